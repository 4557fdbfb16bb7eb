"""Which implementation of `GroupSource` a run has: the only place that reads asynchrony.mode for
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlkit.training.ahead.here import Here
from rlkit.training.ahead.lagged import Lagged
from rlkit.training.ahead.process import sampling_process
from rlkit.training.ahead.source import GroupSource
from rlkit.training.experiment import Experiment
from rlkit.types import Task


@contextmanager
def group_source(
    x: Experiment,
    tasks: Sequence[Task],
    again: Callable[[], Experiment] | None = None,
    *,
    folder: Path | None = None,
) -> Iterator[GroupSource]:
    """What samples the groups of a run. A process that it needs has ended afterwards.

    Args:
      x: the whole run. tasks: its prompts.
      again: builds the experiment in a second process (`rlkit.config.compose.builder`); None if
        parts of it are Python objects.
      folder: of the run, for the second process's log and journal.
    Raises: ConfigError where a second process cannot be made.
    """
    if x.asynchrony.mode == "overlap":
        with sampling_process(x, tasks, again, folder=folder) as process:
            yield process
    else:
        yield Lagged(x, tasks) if x.asynchrony.mode == "lag" else Here(x, tasks)
