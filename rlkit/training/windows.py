"""Describe models with sliding-window layers. These layers see only the end of the context."""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.engines import Cached
from rlkit.engines.cached.attention import find_longest_context
from rlkit.system.adapters import base_model
from rlkit.training.activations import longest_lengths
from rlkit.training.experiment import Experiment
from rlkit.training.schedules import list_phases
from rlkit.types import Policy, Task


def describe_windows(x: Experiment, policy: Policy, tasks: Sequence[Task]) -> str:
    """Return a line, `window: …`, about a model with sliding-window layers. The line names the
    longest context that the fast paths of engine and update can handle, and the longest possible
    context of this run.

    The line is empty if every layer sees the whole of every context. It is also empty if the line
    `kernels:` already says that the fast paths cannot be used.
    """
    window = find_longest_context(base_model(policy.model).config)
    if not 0 < window < policy.context_length:
        return ""
    longest = max(longest_lengths(phase, policy, tasks).width for phase in list_phases(x).values())
    known = (
        f"window: some layers see only the last {window:,} tokens. Contexts of the first rows of"
        f" the data may reach {longest:,} tokens; contexts longer than the window"
    )
    known = f"{known} {'would be' if longest <= window else 'are'}"
    cached = isinstance(x.generation.engine, Cached)
    decoded = "decoded by the reference engine, and " if cached else ""
    return f"{known} {decoded}scored without packing"
