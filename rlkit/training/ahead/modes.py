"""Choose a run's `GroupSource` by asynchrony.mode. No other file makes this choice."""

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
    """Return a context manager for the source of a run's groups. If the source has a sampling
    process, leaving the context ends this process.

    Args:
      x: the experiment of the whole run.
      tasks: the training prompts of the run.
      again: a function to build the experiment in a second process
        (`rlkit.config.compose.make_builder`). None if the experiment contains Python objects, which
        no config can hold.
      folder: the run folder. The second process writes its log and journal into it.
    Raises: ConfigError if a second process cannot be made.
    """
    if x.asynchrony.mode == "overlap":
        return closing(SamplingProcess(x, tasks, again, folder))
    return nullcontext(Lagged(x, tasks) if x.asynchrony.mode == "lag" else Here(x, tasks))
