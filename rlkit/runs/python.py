"""Train from Python: a whole run, or one RL step at a time. Each step equals the same step of
`rlkit train`, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rlkit import display
from rlkit.config.changes import identify
from rlkit.config.compose import make_builder
from rlkit.config.experiment import Configured, describe_part
from rlkit.config.problems.doubts import list_warnings
from rlkit.config.problems.rows import load_tasks
from rlkit.distributed import ranks
from rlkit.errors import ConfigError
from rlkit.runs import folder as runs
from rlkit.system import owner
from rlkit.system.device import autocast, pick_device, versions
from rlkit.system.files import refuse_unwritable, write_atomic
from rlkit.system.rows import read_rows
from rlkit.training.experiment import Experiment
from rlkit.types import Policy, Rollout, Splits

WITHOUT_FILES = ("progress", "health")  # callbacks that write no files


class Run(NamedTuple):
    """Hold the result of a run."""

    # one row for each step, as in metrics.jsonl; step 0 is the evaluation before training
    metrics: list[dict[str, Any]]
    rollouts: list[Rollout]  # scored rollouts of the last step
    policy: Policy  # the trained policy
    folder: Path | None
    summary: dict[str, Any]  # how the run ended, and its test results `before` and `after`

    def __repr__(self) -> str:
        return display.run_text(self)

    def _repr_html_(self) -> str:
        return display.run_html(self)


class RLStep(NamedTuple):
    """Hold the result of an RL step."""

    step: int  # counted from 1
    metrics: dict[str, Any]
    rollouts: list[Rollout]  # scored
    policy: Policy  # the policy after the step

    def __repr__(self) -> str:
        reward = display.format_figure(self.metrics.get("reward/mean"))
        return (
            f"RL step {self.step} · reward {reward} · {len(self.rollouts)} rollouts ·"
            f" {len(self.metrics)} metrics"
        )


def train(x: Experiment, folder: Path | str | None = None) -> Run:
    """Train to the end, with evaluations, as `rlkit train` does.

    An interrupt (Ctrl-C, or the stop button of a notebook) ends the run after the current step, and
    the results so far are returned.

    Args:
      x: from `rlkit.experiment`, or built by hand.
      folder: a new run folder, for `rlkit report` and `rlkit export`. `rlkit evaluate` and
        `resume=` need an experiment without Python objects. None keeps nothing on disk: no
        checkpoints, no loggers, and only the callbacks that print. A line names the callbacks left
        out.
    Raises: ConfigError, DataError or SelfCheckError before the first step; during a step, any
      exception of a part.
    """
    from rlkit.training.loggers import check_loggers
    from rlkit.training.run import train_in

    started = time.perf_counter()
    tasks = _load_problems(x)
    again = _make_rebuilder(x)
    with ExitStack() as stack:
        if folder is None:
            place = Path(stack.enter_context(TemporaryDirectory(prefix="rlkit_")))
            kept = {name: part for name, part in x.callbacks.items() if name in WITHOUT_FILES}
            left_out = ", ".join(name for name in x.callbacks if name not in kept)
            if left_out:
                print(f"nothing is written without folder=; callbacks left out: {left_out}")
            x = x._replace(logger={}, callbacks=kept)
        else:
            check_loggers(x.logger)
            place = Path(folder).expanduser().absolute()
            _begin_run(x, place, stack)
        summary, module = train_in(
            x,
            tasks,
            place,
            started=started,
            resume=None,
            provenance=runs.read_start(place),
            again=again,
        )
        rows = list(read_rows(place / "metrics.jsonl"))
    module.policy.model.to(pick_device(x))  # Lightning leaves the model on the CPU
    return Run(rows, module.rollouts, module.policy, None if folder is None else place, summary)


def steps(x: Experiment) -> Iterator[RLStep]:
    """Train one RL step at a time, without evaluations and without writing files. You may stop
    after any step.

    Raises: as `train`.
    """
    from rlkit.training.ahead.flight import Flight
    from rlkit.training.ahead.modes import group_source
    from rlkit.training.ahead.source import get_next_groups
    from rlkit.training.learner import Learner
    from rlkit.training.run import ready

    tasks = _load_problems(x)
    with group_source(x, tasks.train, _make_rebuilder(x)) as source:
        policy, device, exact = ready(x, tasks)
        learner = Learner(x, policy, exact=exact)
        flight = Flight()
        while learner.rl_step < x.trainer.steps:
            with autocast(x, device, updates=True):
                learner.begin()
                groups, flight, figures = get_next_groups(
                    source,
                    flight,
                    learner.experiment,
                    policy,
                    progress=learner.progress,
                    clock=learner.clock,
                )
                learner.step(groups.sampled, groups.trained)
                learner.metrics |= figures
            yield RLStep(learner.rl_step, learner.metrics, learner.rollouts, policy)


def _make_rebuilder(x: Experiment) -> Callable[[], Experiment] | None:
    """Return a function that builds the experiment in another process, or None if a part is a
    Python object."""
    return make_builder(x.config) if isinstance(x, Configured) and x.overrides else None


def _load_problems(x: Experiment) -> Splits:
    """Load a run's problems in this process, and print warnings about settings the user probably
    did not intend."""
    count = x.trainer.devices * x.trainer.nodes
    if count > 1 and ranks.size() == 1:
        raise ConfigError(
            f"trainer.devices={x.trainer.devices}, trainer.nodes={x.trainer.nodes}: only"
            f" `rlkit train` starts {count} processes; from Python, train in one process"
            " (trainer__devices=1)"
        )
    tasks = load_tasks(x)
    overrides = (x.overrides or ()) if isinstance(x, Configured) else ()
    for line in list_warnings(x, overrides, tasks):
        print(f"warning: {line}", flush=True)
    return tasks


def _begin_run(x: Experiment, folder: Path, stack: ExitStack) -> None:
    """Own the folder until `stack` ends, and write the first files of a run to it."""
    if runs.is_run(folder):
        raise ConfigError(
            f"folder={folder}: already holds a run, and a run is never overwritten; choose another"
            f" folder, or continue the run: rlkit train resume={folder}"
        )
    runs.refuse_leftovers(folder)
    runs.require_writable(folder)
    stack.enter_context(owner.own_folder(folder))
    overrides = None  # an experiment with Python objects cannot be composed from overrides again
    if isinstance(x, Configured) and x.config:
        config = x.config
        overrides = x.overrides
    else:
        config = describe_part(x)
    identity = identify(config)
    with refuse_unwritable(folder):
        if overrides is not None:
            (folder / ".hydra").mkdir(exist_ok=True)
            write_atomic(folder / ".hydra" / "overrides.yaml", runs.dump(list(overrides)))
        runs.write_start(folder, config, versions(), identity=identity, overrides=overrides or ())
        runs.write_config(folder, config, identity, new=True)
