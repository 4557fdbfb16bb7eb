"""Continue a run with one change (a fork). All forks take a few steps from the same place, on the
same prompts with the same noise. Then the resulting policy is measured on further prompts."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from rlkit.config.changes import identify
from rlkit.config.compose import make_builder
from rlkit.config.problems.schedules import build_first_steps
from rlkit.episodes.stream import StreamState, take
from rlkit.errors import ConfigError
from rlkit.extras.why.evidence import REFILLS, Evidence
from rlkit.extras.why.remedies import PROBES, SAMPLES, Remedy
from rlkit.system import rng
from rlkit.system.device import autocast
from rlkit.system.waiting import MAX_STEP_TIME, limit_waiting
from rlkit.tasks.splits import identify_problem
from rlkit.training.ahead.flight import Flight
from rlkit.training.ahead.modes import group_source
from rlkit.training.ahead.source import GroupSource, get_next_groups
from rlkit.training.callbacks.checkpoints import list_checkpoints, parse_step, read_checkpoint
from rlkit.training.experiment import BatchSize, Experiment
from rlkit.training.groups import score_fresh
from rlkit.training.learner import Learner
from rlkit.training.metrics import Clock
from rlkit.training.run import ready
from rlkit.types import Policy, Splits, Task

PROBE = 1_000_000  # step number that seeds the replies to the measuring prompts
LATE = 2 / 3  # no fork begins after this share of a run's steps, because scheduled numbers run out
FILE = Path("why") / "forks.jsonl"


class Fork(NamedTuple):
    """The outcome of a continued run: a row of why/forks.jsonl."""

    title: str
    overrides: tuple[str, ...]
    start: int  # RL steps of the checkpoint; 0: the start
    steps: int
    seconds: float
    rewards: Mapping[str, float]  # id of a prompt → mean reward of its replies
    of: str = ""  # `identify` of its config


class Place(NamedTuple):
    """The place in a run from which forks start."""

    step: int
    state: dict[str, Any] | None  # the checkpoint; None: the start

    @property
    def stream(self) -> StreamState:
        """The state of the prompt stream at this place."""
        return StreamState(*self.state["rlkit"]["stream"]) if self.state else StreamState()


def choose_place(folder: Path, e: Evidence, asked: int | None) -> Place:
    """Choose the checkpoint of the given step. Without a step, choose the start of the run if its
    reward did not rise. Otherwise choose the newest checkpoint within the first two thirds of the
    run.

    Raises: ConfigError if there is no such checkpoint.
    """
    known = {parse_step(path): path for path in list_checkpoints(folder / "checkpoints")}
    if asked is None:
        limit = LATE * e.number("trainer.steps")
        early = [step for step in known if step <= limit]
        asked = max(early, default=0) if e.progress.rose else 0
    if asked and asked not in known:
        steps = ", ".join(map(str, (0, *known)))
        raise ConfigError(
            f"step={asked}: there is no checkpoint of step {asked} in {folder}; there are those of"
            f" {steps}"
        )
    return Place(asked, read_checkpoint(known[asked]) if asked else None)


def choose_probes(x: Experiment, tasks: Splits, place: Place, steps: int) -> list[Task]:
    """Choose distinct problems that come later in the stream than the prompts of all forks' steps.
    A step may draw further prompts in the run itself, and in the forks with MIXED. A repeated
    problem is chosen only if no other is left."""
    draws = 1 + max(REFILLS, x.algorithm.max_refills)
    taken = steps * x.batch.prompts * draws
    drawn, _ = take(tasks.train, place.stream, taken + 2 * PROBES, seed=x.seed)
    later = {identify_problem(task): task for task in drawn[taken:]}
    trained = set(map(identify_problem, drawn[:taken]))
    further = [task for problem, task in later.items() if problem not in trained]
    return (further or list(later.values()))[:PROBES]


class Setting(NamedTuple):
    """The unchanged run, or the run with a remedy."""

    remedy: Remedy
    x: Experiment
    config: Mapping[str, Any]  # the source of `x`


def run_fork(x: Experiment, setting: Setting, tasks: Splits, place: Place, steps: int) -> Fork:
    """Continue a run by a setting, and measure the resulting policy.

    Args:
      x: the unchanged run; the policy is measured with its rewards and its temperature.
    Raises: every error of a step.
    """
    begun = time.perf_counter()
    remedy, own, config = setting
    again = make_builder(config)
    with (
        limit_waiting(own.trainer.max_step_time, MAX_STEP_TIME, lambda: "a fork hangs"),
        group_source(own, tasks.train, again) as source,
        redirect_stdout(io.StringIO()),
    ):
        policy, device, exact = ready(own, tasks)
        learner = Learner(own, policy, exact=exact)
        flight = Flight() if place.state is None else restore(learner, source, place.state)
        with autocast(own, device, updates=True):
            for _ in range(steps):
                flight = take_step(learner, source, flight)
        with autocast(own, device):
            rewards = measure(x, learner, policy, choose_probes(x, tasks, place, steps))
    seconds = round(time.perf_counter() - begun, 2)
    of = identify(config)
    return Fork(remedy.title, remedy.overrides, place.step, steps, seconds, rewards, of)


def take_step(learner: Learner, source: GroupSource, flight: Flight) -> Flight:
    """Take one RL step, as in training; return the groups in flight after it."""
    learner.begin()
    groups, flight, _ = get_next_groups(
        source,
        flight,
        learner.experiment,
        learner.policy,
        progress=learner.progress,
        clock=learner.clock,
    )
    learner.step(groups.sampled, groups.trained)
    return flight


def restore(learner: Learner, source: GroupSource, state: dict[str, Any]) -> Flight:
    """Restore the learner from a checkpoint. If a remedy has removed a critic or a reference, its
    part of the checkpoint is ignored."""
    learner.load(state)
    learner.nets.load_state_dict(state["state_dict"], strict=False)
    saved = state["optimizer_states"]
    for optimizer, own in zip(learner.optimizers.made, saved, strict=False):
        optimizer.load_state_dict(own)
    flight = source.restore(state["rlkit"], learner.policy, learner.progress)
    rng.restore(state["rlkit"]["generators"][0])
    return flight


def measure(
    x: Experiment, learner: Learner, policy: Policy, probes: Sequence[Task]
) -> dict[str, float]:
    """Measure the mean reward of the replies to each prompt, with the unchanged run's reward and
    temperature, and with the fork's lengths and environment."""
    first = next(iter(build_first_steps(x).values()))
    temperature = first.generation.temperature
    probing = learner.x._replace(
        batch=BatchSize(len(probes), SAMPLES),
        reward=first.reward,
        generation=learner.x.generation._replace(temperature=temperature),
        algorithm=first.algorithm,
    )
    place: Any = {"step": PROBE, "version": learner.rl_step, "first": 0, "clock": Clock()}
    found: dict[str, list[float]] = {}
    for rollout in score_fresh(probing, policy, probes, **place):
        if rollout.total_reward is not None:
            found.setdefault(rollout.task.id, []).append(rollout.total_reward)
    return {task: sum(own) / len(own) for task, own in found.items()}


# --------------------------------------------------------------------------------------------- rows


def read_forks(folder: Path, place: Place, steps: int) -> dict[tuple[str, ...], Fork]:
    """Read the finished forks from this place, by the identity of their config and their overrides.
    A line cut short by a kill is skipped."""
    done = {}
    file = folder / FILE
    for line in file.read_text().splitlines() if file.is_file() else ():
        try:
            fork = Fork(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if (fork.start, fork.steps) == (place.step, steps):
            done[fork.of, *fork.overrides] = fork._replace(overrides=tuple(fork.overrides))
    return done


def write_fork(folder: Path, fork: Fork) -> None:
    """Append a fork as a row to why/forks.jsonl."""
    file = folder / FILE
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(fork._asdict()) + "\n")
