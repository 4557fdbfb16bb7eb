"""`rlkit check`: take one small step of a run through all of its parts, and show the time and
memory of the run. Nothing is kept.

First the config is composed and dry-run, as for `rlkit train`. Then the verifier is tried on the
rows, the model is loaded, and trainer and sampler are compared. A few rollouts are played and
scored, and the policy, and a critic if the run has one, take one step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rlkit.commands.arguments import Answer, Arguments
from rlkit.errors import ConfigError
from rlkit.rewards import Reward, Term
from rlkit.rewards import score as score_rollouts
from rlkit.system.extras import load_command
from rlkit.training.experiment import BatchSize, Experiment
from rlkit.types import Rollout, Splits

if TYPE_CHECKING:
    from rlkit.training.learner import Learner
    from rlkit.training.update.record import Host

REPLY = 64  # tokens of a reply here; a run's own limit may take minutes on a CPU
GIVES_JSON = True
GROUP = 4  # rollouts if a group is one sample


class Memory(NamedTuple):
    """Bytes held throughout the run, and the peak during the small step."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    peak: int  # on a GPU of the device, otherwise of the process with its frameworks


def measure_memory(learner: Any, device: Any) -> Memory:
    """Measure the memory of a learner after its one small step."""
    from rlkit.training.metrics import peak_memory

    held = [list(learner.nets.parameters()), list(learner.nets.buffers())]
    weights = count_bytes(held)
    return Memory(
        weights=weights,
        gradients=sum(
            p.numel() * p.element_size() for p in learner.nets.parameters() if p.requires_grad
        ),
        optimizer=sum(count_bytes(o.state) for o in learner.optimizers.made),
        reference=count_bytes([*held, learner.kept.references]) - weights,
        peak=int(peak_memory(device) * 2**30),
    )


class Report(NamedTuple):
    """The result of `run`."""

    warnings: list[str]
    rollouts: list[Rollout]  # the scored rollouts, with their own rewards; none of demonstrations
    metrics: Mapping[str, Any]
    memory: Memory
    seconds: Mapping[str, float]
    learner: Learner  # the learner after its step


def shrink_experiment(x: Experiment) -> Experiment:
    """Cut the experiment to one step of one update with few rollouts: short replies, no evaluation,
    no logger, no callbacks."""
    from rlkit.training.schedules import Schedule

    limit = min(x.generation.max_new_tokens, REPLY)
    budget = x.generation.max_thinking_tokens
    return x._replace(
        batch=BatchSize(max(1, GROUP // x.batch.group_size), x.batch.group_size),
        generation=x.generation._replace(
            max_new_tokens=limit,
            max_thinking_tokens=None if budget is None else min(budget, limit - 1),
        ),
        algorithm=x.algorithm._replace(
            epochs=1, minibatches=1, max_refills=0, critic=x.algorithm.critic._replace(warmup=0)
        ),
        trainer=x.trainer._replace(steps=1, max_time=None),
        evaluation=x.evaluation._replace(n=0, stop_at=None),
        schedule=Schedule(),
        logger={},
        callbacks={},
    )


def run(x: Experiment, tasks: Splits, host: Host | None = None) -> Report:
    """Take one step of the experiment, and print the first lines of a run.

    Args:
      x: the experiment at the first step of the run, without open schedules
        (rlkit.config.problems.schedules.build_first_steps).
      tasks: at least one training task; the other splits are only counted.
      host: the learner's host.
    Raises: the same refusals as a run.
    """
    from rlkit.episodes.stream import StreamState
    from rlkit.system.device import autocast
    from rlkit.system.waiting import MAX_STEP_TIME, limit_waiting
    from rlkit.training.groups import experience
    from rlkit.training.learner import Learner
    from rlkit.training.run import prepare as prepare_policy
    from rlkit.training.update.probe import probe_memory
    from rlkit.training.update.record import Host

    started = time.perf_counter()
    policy, device, agreement = prepare_policy(x, tasks)
    loaded = time.perf_counter() - started
    played: list[Rollout] = []
    cut = shrink_experiment(x)._replace(reward=record_rewards(x.reward, played))
    learner = Learner(cut, policy, exact=agreement.exact, host=host or Host())
    with (
        autocast(cut, device, updates=True),
        limit_waiting(x.trainer.max_step_time, MAX_STEP_TIME, lambda: "step 1 hangs"),
    ):
        if device.type == "cuda":
            probe_memory(learner.record(), tasks.train)
        sampled, trained, _ = experience(
            learner.begin(), policy, tasks.train, StreamState(), step=0, clock=learner.clock
        )
        metrics = learner.step(sampled, trained)
        found = measure_memory(learner, device)
    seconds = {
        "load": loaded,
        "generate": metrics["perf/generate_s"],
        "update": metrics["perf/update_s"],
    }
    return Report(agreement.warnings, played, metrics, found, seconds, learner)


def record_rewards(reward: Reward, played: list[Rollout]) -> Reward:
    """Keep the scored rollouts in `played`. If all rewards are equal, alternate 0 and 1 to
    give the algorithm something to learn from."""

    def scores(rollouts: Sequence[Rollout]) -> list[float | None]:
        played[:] = score_rollouts(rollouts, reward)
        own = [r.total_reward for r in played]
        return [float(i % 2) for i in range(len(own))] if len(set(own)) == 1 else own

    return Reward(reward.name, {"check": Term(1.0, scores, batched=True)})


def count_bytes(node: Any) -> int:
    """Count the bytes of all tensors in nested modules, mappings, tuples and lists; shared storage
    counts once."""
    import torch

    sizes: dict[int, int] = {}
    pending = [node]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            sizes[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, torch.nn.Module):
            pending += [*item.parameters(), *item.buffers()]
        elif isinstance(item, Mapping):
            pending += item.values()
        elif isinstance(item, tuple | list):
            pending += item
    return sum(sizes.values())


def describe_report(report: Report, phases: Sequence[str], doubts: Sequence[str]) -> dict[str, Any]:
    """Write the report as plain data. `doubts` are warnings about the config and the rows."""
    return {
        "phases": phases,
        "warnings": [*doubts, *report.warnings],
        "rewards": [rollout.rewards for rollout in report.rollouts],
        "metrics": report.metrics,
        "seconds": report.seconds,
        "memory": report.memory,
    }


def show_report(
    report: Report, *, phases: Sequence[str] = (), costs: Sequence[tuple[str, str]] = ()
) -> str:
    """Write the report as lines of text: the stages with their numbers, then the memory or the rows
    `costs`."""
    rows = _list_rows(report, phases)
    rows += costs or [
        (f"memory: {name}", say_size(size))
        for name, size in report.memory._asdict().items()
        if size
    ]
    if len(phases) > 1:
        rows.append(
            (
                "phases",
                f"the step was in phase '{phases[0]}'; the others were only tried on fake data",
            )
        )
    lines = [f"{name:<18}{text}" for name, text in rows]
    ready = "ready: rlkit train with the same overrides"
    if report.rollouts and not any(r.total_reward for r in report.rollouts):
        ready += "; but no reply has a reward, so look at more of them first (rlkit rollout n=32)"
    return "\n".join(["", *lines, "", ready])


def _list_rows(report: Report, phases: Sequence[str]) -> list[tuple[str, str]]:
    """List (name, numbers) of each stage."""
    m = report.metrics
    clock = report.seconds
    own = [r.total_reward for r in report.rollouts]
    scored = [r for r in own if r is not None]
    terms = ", ".join(
        f"{name} {_mean([r.rewards.get(name) for r in report.rollouts])}"
        for name in next((r.rewards for r in report.rollouts), {})
    )
    names = {
        "loss/total": "loss",
        "optim/grad_norm": "gradient norm",
        "kl/estimate": "KL",
        "value/loss": "value loss",
    }
    numbers = ", ".join(
        f"{label} {m[key]:.3g}"
        for key, label in names.items()
        if isinstance(m.get(key), float) and m[key] == m[key]
    )
    reward = f"{_mean(own)} ({terms}), {len(scored)} of {len(own)} can be scored"
    spread = "all rewards were equal; the update was tried with 0 and 1 in turn"
    return [
        (
            "config",
            "composed, checked, dry-run on fake data"
            + (f", phase by phase ({', '.join(phases)})" if len(phases) > 1 else ""),
        ),
        ("data", "where rows have a gold answer, it scores 1, and an empty answer does not"),
        ("model", f"loaded in {clock['load']:.1f} s; trainer and sampler agree"),
        (
            "rollout",
            (
                f"{len(own) or m['batch/rollouts']} episodes, {m['tokens/sampled']} tokens of"
                f" replies, {clock['generate']:.1f} s"
            ),
        ),
        *([("reward", reward)] if own else []),  # demonstrations are not scored
        (
            "update",
            (numbers if m["optim/updates"] else "none: this step had nothing to learn from")
            + f", {clock['update']:.1f} s",
        ),
        *([("", spread)] if len(set(own)) == 1 else []),
    ]


def _mean(values: Sequence[float | None]) -> str:
    found = [v for v in values if v is not None]
    return f"{sum(found) / len(found):.2f}" if found else "not scored"


def say_size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"


def prepare(arguments: Arguments) -> tuple[Experiment, Splits, list[str], list[str]]:
    """Return the experiment of the first step, its tasks, the names of all phases, and the doubts
    about them. The doubts are printed."""
    from rlkit.config.compose import compose, experiment
    from rlkit.config.problems.doubts import list_warnings
    from rlkit.config.problems.rows import load_tasks
    from rlkit.config.problems.schedules import build_first_steps
    from rlkit.training.loggers import check_loggers

    composed = compose(arguments.overrides, config_dir=arguments.config_dir)
    x = experiment(composed)
    check_loggers(x.logger)
    tasks = load_tasks(x)
    doubts = list_warnings(x, composed.overrides, tasks)
    for line in doubts:
        print(f"warning: {line}")
    firsts = build_first_steps(x)
    return next(iter(firsts.values())), tasks, list(firsts), doubts


def command(arguments: Arguments) -> int | Answer:
    """Do what `rlkit train` would do with these overrides in one small step, and show how much time
    and memory the run takes. Nothing is kept.

    KEY=VALUE          the overrides of the run; GROUP=OPTION an option
    check.device=CARD  time and memory of the run on this card, without a step (the extra forecast)
    --json             the same for a program

        rlkit check algorithm=dapo kl=none
        rlkit check model=qwen3_1.7b check.device=h100
    """
    forecast = load_command("forecast")
    if forecast is not None:
        return forecast(arguments)
    if any(override.startswith("check.") for override in arguments.overrides):
        raise ConfigError(
            "a setting check.NAME needs the extra 'forecast', which this copy of rlkit does not"
            " have: there is no folder rlkit/extras/forecast"
        )
    x, tasks, phases, doubts = prepare(arguments)
    report = run(x, tasks)
    return Answer(describe_report(report, phases, doubts), show_report(report, phases=phases))
