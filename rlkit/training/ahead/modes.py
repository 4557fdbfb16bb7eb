"""The only place that chooses a run's `GroupSource`, by asynchrony.mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

from rlkit.training.ahead.here import Here, Lagged
from rlkit.training.ahead.process import SamplingProcess
from rlkit.training.ahead.source import GroupSource
from rlkit.training.experiment import Experiment
from rlkit.types import Task


def group_source(
    x: Experiment,
    tasks: Sequence[Task],
    again: Callable[[], Experiment] | None = None,
    folder: Path | None = None,
) -> AbstractContextManager[GroupSource]:
    """A context with the source of a run's groups. Its sampling process, if any, ends with the
    context.

    Args:
      x: the whole run. tasks: its prompts.
      again: builds the experiment in a second process (`rlkit.config.compose.make_builder`);
        None if parts of it are Python objects.
      folder: of the run, for the second process's log and journal.
    Raises: ConfigError if a second process cannot be made.
    """
    if x.asynchrony.mode == "overlap":
        return closing(SamplingProcess(x, tasks, again, folder))
    return nullcontext(Lagged(x, tasks) if x.asynchrony.mode == "lag" else Here(x, tasks))
