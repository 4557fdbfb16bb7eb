"""Collect episodes, turn them into tensors, save them, and summarise them in numbers.

torch is imported only when it is needed, so rollout files can be read without it.

Each file imports only files before it in this list: _assemble, completions, episode, record,
samplers, summary, demonstrate, replies, stream, _collect, scoring, evaluation.
"""

from typing import TYPE_CHECKING, Any

from rlkit.episodes.record import (
    append_rollouts,
    append_step,
    load_rollouts,
    rollout_schema,
    save_rollouts,
    write_transcript,
)
from rlkit.episodes.summary import count_failures, count_refusals, summarize

if TYPE_CHECKING:
    from rlkit.episodes._assemble import assemble
    from rlkit.episodes._collect import collect
    from rlkit.episodes.demonstrate import demonstrations

_HOMES = {"assemble": "_assemble", "collect": "_collect", "demonstrations": "demonstrate"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
