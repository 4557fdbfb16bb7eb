"""Read the evidence in a run folder: rows, settings and rollouts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, variance
from typing import Any, NamedTuple

from rlkit.episodes.record import load_rollouts
from rlkit.errors import DataError
from rlkit.runs.folder import read_overrides
from rlkit.runs.reading import ReadRun, read_run, read_series
from rlkit.system.shards import index_steps
from rlkit.types import Rollout, Task

READ = 12  # steps with rollouts to read, spread evenly over the run
NONE = "none"
REFILLS = 4  # most further draws of prompts in a step, of the next remedy
MIXED = ("algorithm/group_filter=mixed", f"algorithm.max_refills={REFILLS}")


class Finding(NamedTuple):
    """A cause supported by the evidence.

    cause     one word, for tables and tests
    title     the cause as a sentence
    evidence  the sentence with its numbers
    advice    the remedy in words
    remedy    the remedy as overrides of the run; empty if no setting helps
    """

    cause: str
    title: str
    evidence: str
    advice: str
    remedy: tuple[str, ...] = ()


class Progress(NamedTuple):
    """The mean reward of the first and the last third of a run's steps."""

    first: float
    last: float
    error: float  # standard error of their difference

    @property
    def chance(self) -> float:
        """Return the change that may be chance: two standard errors, and at least 0.02."""
        return max(0.02, 2 * self.error)

    @property
    def rose(self) -> bool:
        """Return whether the reward rose by more than chance."""
        return self.last - self.first > self.chance


class Evidence(NamedTuple):
    """A run, read from its folder."""

    run: ReadRun
    played: Mapping[int, Sequence[Rollout]]  # RL step → all its rollouts, of a few steps

    @property
    def phases(self) -> dict[str, dict[str, Any]]:
        """The settings of each phase, without the group `schedule.phases.NAME` before them."""
        found: dict[str, dict[str, Any]] = {}
        for key, value in self.run.settings.items():
            if key.startswith("schedule.phases.") and value is not None:
                name, _, own = key.removeprefix("schedule.phases.").partition(".")
                found.setdefault(name, {})[own] = value
        return found

    @property
    def replaced(self) -> set[str]:
        """The groups of config.yaml replaced by a phase, such as algorithm."""
        return {key.split(".")[0] for own in self.phases.values() for key in own}

    def setting(self, key: str, otherwise: Any = None) -> Any:
        """Return a value of config.yaml by its dotted key, in the phase of the newest step."""
        found = self.run.settings
        if key.split(".")[0] in self.replaced:
            own = list(self.phases.values())[int(*self.values("schedule/phase")[-1:])]
            found = own if any(k.split(".")[0] == key.split(".")[0] for k in own) else found
        value = found.get(key)
        return otherwise if value is None else value

    def number(self, key: str) -> float:
        """Return a setting as a number; nan if it is not a number."""
        value = self.setting(key)
        return float(value) if isinstance(value, int | float) else math.nan

    @property
    def given(self) -> list[str]:
        """The overrides of the user's train command."""
        try:
            return read_overrides(self.run.folder)
        except DataError:
            return []

    def values(self, metric: str) -> list[float]:
        """List a metric's values in the order of the steps, without steps that lack it."""
        return list(read_series(self.run, metric).values())

    def mean(self, metric: str, third: int | None = None) -> float:
        """Average a metric over the run, or over its first (0) or last (-1) third; nan without
        values."""
        values = self.values(metric)
        size = max(1, len(values) // 3)
        if third is not None:
            values = values[:size] if third == 0 else values[-size:]
        return fmean(values) if values else math.nan

    def lasting(self, metric: str) -> float:
        """Return the smaller of a share's mean and its value in the first step. A high result means
        that the share was high before any update and stayed high, so it is not a consequence of
        training."""
        return min(self.mean(metric), *self.values(metric)[:1], math.inf)

    @property
    def steps(self) -> int:
        """The number of RL steps with a reward."""
        return len(self.values("reward/mean"))

    @property
    def progress(self) -> Progress:
        """The change of the reward over the run. The error comes from the differences between the
        rewards x of successive steps: `σ² ≈ Var(x_t - x_{t-1}) / 2` and `error = √(2 σ² / n)`, with
        n steps in each third of the run."""
        values = self.values("reward/mean")
        if len(values) < 3:
            return Progress(self.mean("reward/mean"), self.mean("reward/mean"), math.inf)
        noise = variance([b - a for a, b in pairwise(values)]) / 2
        error = math.sqrt(2 * noise / max(1, len(values) // 3))
        return Progress(self.mean("reward/mean", 0), self.mean("reward/mean", -1), error)

    @property
    def rewarded(self) -> bool:
        """Whether the run learns from rewards only, not from a teacher or demonstrations."""
        names = {name for row in self.run.rows for name in row}
        others = [
            name for name in names if name.startswith("streams/") and name != "streams/reward"
        ]
        return not others and "reward/demonstration/mean" not in names

    @property
    def demonstrated(self) -> bool:
        """Whether the run learns from demonstrations. They are not scored."""
        return bool(self.values("reward/demonstration/mean"))

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts read from the folder."""
        return [rollout for own in self.played.values() for rollout in own]

    @property
    def groups(self) -> list[list[Rollout]]:
        """All rollouts read from the folder, by group."""
        found: dict[tuple[int, int], list[Rollout]] = {}
        for step, own in self.played.items():
            for rollout in own:
                found.setdefault((step, rollout.group), []).append(rollout)
        return list(found.values())

    @property
    def tasks(self) -> list[Task]:
        """The distinct tasks of all rollouts read from the folder."""
        return list({rollout.task.id: rollout.task for rollout in self.rollouts}.values())


def read_evidence(folder: Path) -> Evidence:
    """Read a run folder, finished or not."""
    return Evidence(read_run(folder), read_played(folder))


def read_played(folder: Path) -> dict[int, Sequence[Rollout]]:
    """Read the rollouts of a few steps. An unreadable step is left out."""
    parts = index_steps(folder / "rollouts")
    steps = list(parts)
    chosen = steps
    if len(steps) > READ:
        chosen = [steps[round(i * (len(steps) - 1) / (READ - 1))] for i in range(READ)]
    played: dict[int, Sequence[Rollout]] = {}
    for step in chosen:
        try:
            with warnings.catch_warnings(action="ignore"):
                played[step] = load_rollouts(parts[step])
        except (DataError, OSError):
            continue
    return played


def share_of_copies(groups: Sequence[Sequence[Rollout]]) -> float:
    """Compute the share of rollouts that equal an earlier rollout of their group word for word; nan
    without groups."""
    total = sum(len(own) - 1 for own in groups)
    different = sum(len({tuple(map(str, r.conversation)) for r in own}) - 1 for own in groups)
    return 1 - different / total if total else math.nan


def spread_within(groups: Sequence[Sequence[Rollout]]) -> float:
    """Compute the standard deviation of the rewards within groups. It is the square root of the
    mean variance of a group, or nan without a group of at least two scored rollouts."""
    squares = []
    for own in groups:
        scored = [r.total_reward for r in own if r.total_reward is not None]
        if len(scored) > 1:
            squares.append(variance(scored))
    return math.sqrt(fmean(squares)) if squares else math.nan
