"""Find the problems of a schedule, and probably unintended settings of a schedule, as sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlkit.errors import ConfigError, name_function, suggest_name
from rlkit.training.glossary import find_meaning, read_sections
from rlkit.training.schedules.controllers import read_condition
from rlkit.training.schedules.paths import flatten_numbers
from rlkit.training.schedules.progress import (
    Phase,
    Progress,
    find_controllers,
    find_inline_controllers,
    list_phases,
    list_watched,
    phase_steps,
    resolve_schedules,
    start,
)
from rlkit.types import Controller

if TYPE_CHECKING:  # torch is imported only with the parts that need it
    from rlkit.training.experiment import Experiment

RESETS = ("optimizer", "reference")
OF_OPTIMIZERS = ("optimizer.", "algorithm.critic.optimizer.")


def schedule_problems(experiment: Any) -> list[str]:
    """List a schedule's problems, as sentences."""
    given = experiment.schedule.phases
    problems = _check_whole(given)
    if problems:
        return problems
    numbers = {"schedule.numbers": experiment.schedule.paths}
    numbers |= {
        f"schedule.phases.{name}.numbers": flatten_numbers(p.numbers) for name, p in given.items()
    }
    for where, paths in numbers.items():
        problems += [
            f"{where}.{path}={f!r}: is no function of the step; give it a _target_ such as "
            "rlkit.training.schedules.constant with _partial_: true"
            for path, f in paths.items()
            if not callable(f) and not isinstance(f, Controller)
        ]
    for name, phase in given.items():
        problems += _check_phase(f"schedule.phases.{name}", phase, last=name == list(given)[-1])
    if not problems:
        problems = _check_waiting(experiment)
    for name, x in list_phases(experiment).items():
        where = f"schedule.phases.{name}: " if name else ""
        twice = (
            x.schedule.paths.keys()
            & dict(find_inline_controllers(x._replace(schedule=None))).keys()
        )
        problems += [
            f"{where}{path}: is set by a controller and by schedule.numbers.{path}; keep one of"
            " the two"
            for path in sorted(twice)
        ]
        problems += [
            f"{where}{path}: only the learning rate of an optimizer follows a schedule; set a"
            " plain number"
            for path in sorted(find_controllers(x).keys() | x.schedule.paths.keys())
            if path.startswith(OF_OPTIMIZERS) and not path.endswith(".lr")
        ]
    return problems


def _check_whole(given: Mapping[str, Any]) -> list[str]:
    """Report entries of the schedule that are no phase or set only a part of a config group."""
    problems = []
    for name, phase in given.items():
        where = f"schedule.phases.{name}"
        if not isinstance(phase, Phase):
            problems.append(
                f"{where}: is no phase; give it the _target_ rlkit.training.schedules.Phase, or"
                f" take it out with ~{where}"
            )
            continue
        problems += [
            f"{where}.{group}: must be whole, since a phase shares no part of a group; choose"
            f" +{group}@{where}.{group}=OPTION first"
            for group, part in phase.groups.items()
            if isinstance(part, Mapping)
        ]
    return problems


def _check_phase(where: str, phase: Phase, *, last: bool) -> list[str]:
    """Report impossible values of `until` and `reset` in a phase."""
    problems = []
    if phase.until is None and not last:
        problems.append(
            f"{where}: has no end, so no later phase begins; set {where}.until to RL steps or to a"
            " condition"
        )
    if isinstance(phase.until, int) and phase.until < 1:
        problems.append(f"{where}.until={phase.until}: must be at least 1 RL step")
    if isinstance(phase.until, float) and not 0 < phase.until < 1:
        problems.append(
            f"{where}.until={phase.until}: a share of the run's steps lies between 0 and 1; RL"
            " steps are a whole number"
        )
    if isinstance(phase.until, str):
        try:
            read_condition(phase.until)
        except ValueError as error:
            problems.append(f"{where}.until: {error}")
    problems += [
        f"{where}.reset: '{word}' is not one of {', '.join(RESETS)}"
        for word in phase.reset
        if word not in RESETS
    ]
    return problems


def _check_waiting(experiment: Any) -> list[str]:
    """Report metrics followed by a phase or a controller, if these are test results or the run
    never measures them. Test results must not decide anything in a run."""
    problems = []
    evaluated = experiment.evaluation.n > 0 and experiment.evaluation.every > 0
    for path, metric in _find_awaited_metrics(experiment).items():
        if metric.startswith("test/"):
            instead = f"wait for 'eval/{metric[5:]}' (validation)"
            problems.append(
                f"{path}: waits for '{metric}', but test problems must not decide what a run does;"
                f" {instead}"
            )
        if metric.startswith("eval/") and not evaluated:
            problems.append(
                f"{path}: waits for '{metric}', which is measured of validation problems only; set"
                " evaluation.every and evaluation.n"
            )
    return problems


def _find_awaited_metrics(experiment: Any) -> dict[str, str]:
    """Return path → metric, for every condition or controller on a metric, in any phase."""
    return {
        path: metric
        for i in range(len(experiment.schedule.phases) or 1)
        for path, metric in list_watched(experiment, Progress(phase=i)).items()
    }


def critic_problems(firsts: Mapping[str, Experiment]) -> list[str]:
    """List differences of the critic's settings between phases. The critic and its optimizer are
    made once, in the first phase. Afterwards only the learning rate of the optimizer follows the
    phase.

    Args:
      firsts: as returned by `build_first_steps`.
    """
    from rlkit.algorithm import hyperparameters

    said: dict[str, dict[str, str]] = {}
    for name, x in firsts.items():
        critic = x.algorithm.critic
        if not critic.active or critic.optimizer is None:
            continue
        own: dict[str, Any] = {"model": critic.model, "trunk_gradient": critic.trunk_gradient}
        own["optimizer"] = name_function(critic.optimizer)
        numbers = hyperparameters(critic.optimizer)
        own |= {f"optimizer.{key}": numbers[key] for key in numbers if key != "lr"}
        for key, value in own.items():
            said.setdefault(key, {})[f"{value} (phase {name})"] = str(value)
    return [
        f"algorithm.critic.{key}={', '.join(values)}: a run has one critic with one optimizer,"
        " and only the optimizer's lr may change with the phase; set the same in all phases"
        for key, values in said.items()
        if len(set(values.values())) > 1
    ]


def schedule_warnings(experiment: Any) -> list[str]:
    """List legal settings of a schedule that are probably not intended."""
    known = [name for part in read_sections() for entry in part.entries for name in entry.names]
    out = [
        f"{path}: waits for '{metric}', which rlkit itself never"
        f" measures.{suggest_name(metric, known)}"
        " `rlkit metrics` lists its metrics; a part of your own may add others"
        for path, metric in _find_awaited_metrics(experiment).items()
        if find_meaning(metric) is None
    ]
    out += [
        f"schedule.numbers.kl.coef: kl={x.kl.name} has no KL to weigh; choose a kl"
        for x in list_phases(experiment).values()
        if "kl.coef" in x.schedule.paths and x.kl.estimator is None
    ]
    steps = 0
    given = experiment.schedule.phases
    for position, (name, phase) in enumerate(given.items()):
        where = f"schedule.phases.{name}.until={phase.until}"
        until = phase_steps(phase.until, experiment.trainer.steps)
        if position + 1 == len(given):
            out += (
                []
                if phase.until is None
                else [f"{where}: has no effect; the last phase ends with the run (trainer.steps)"]
            )
            continue
        steps += until or 1
        if steps >= experiment.trainer.steps:
            out.append(
                f"{where}: ends at step {steps} or later, and"
                f" trainer.steps={experiment.trainer.steps}: no later phase begins"
            )
            break
    return out


def phase_problems(config: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Report overrides of a config group without effect. This happens if every phase of the
    schedule has its own version of the group."""
    phases = (config.get("schedule") or {}).get("phases") or {}
    if not isinstance(phases, Mapping):
        return [f"schedule.phases: maps the names of phases to phases, not {phases!r:.100}"]
    out = []
    for text in overrides:
        key, _, value = text.lstrip("+~").partition("=")
        group = key.partition("/")[0].partition(".")[0]
        if (
            "@" in key
            or not phases
            or not all(
                isinstance(phase, dict) and phase.get(group) is not None
                for phase in phases.values()
            )
        ):
            continue
        places = [f"schedule.phases.{name}.{key.replace('/', '.')}" for name in phases]
        # Hydra's form for choosing an option at another place is group@place=option
        is_option = "/" in key or key == group
        meant = [f"{key}@{place}={value}" if is_option else f"{place}={value}" for place in places]
        out.append(
            f"{text}: changes nothing, every phase of the schedule has its own {group}; write"
            f" {' or '.join(meant)}"
        )
    return out


def build_first_steps(x: Experiment) -> dict[str, Experiment]:
    """Return phase → the experiment with the settings of the phase's first step. Every scheduled
    number is replaced by a plain number.

    Raises: ConfigError naming a path that does not exist.
    """
    return _build_steps(x, 0)


def build_last_steps(x: Experiment) -> dict[str, Experiment]:
    """Return the same for the last step of the run, as if every phase lasted until then."""
    return _build_steps(x, x.trainer.steps - 1)


def _build_steps(x: Experiment, step: int) -> dict[str, Experiment]:
    out = {}
    for name, phase in list_phases(x).items():
        try:
            out[name] = resolve_schedules(phase, start(phase)._replace(step=step))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"{f'schedule.phases.{name}, ' if name else ''}schedule.numbers: {error.args[0]}"
            ) from error
    return out
