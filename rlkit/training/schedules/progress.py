"""Define the phases and the progress of a run, and make the experiment of each step.

    start ──▶ at ──▶ one RL step ──▶ advance ──▶ at ──▶ …

A checkpoint needs only the Progress.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rlkit.errors import suggest_name
from rlkit.training.schedules.controllers import count_streak, read_condition
from rlkit.training.schedules.paths import flatten_numbers, list_fields, list_settable, replace
from rlkit.types import Controller, bound, safe

PHASED = ("algorithm", "kl", "reference", "reward")  # the groups that a phase can replace


@safe("algorithm", "kl", "reference", "reward", "until", "numbers", "reset")
class Phase(NamedTuple):
    """Describe a part of the run with config groups of its own, such as `algorithm` or `reward`. A
    field with the value None means that the phase uses the whole run's config group.

    `until` says when the phase ends:

    20         after 20 RL steps of the phase
    0.5        once the phase has lasted this share of trainer.steps; greater than 0, less than 1
    text       once this condition holds, for example "reward/mean > 0.8 for 5"
    function   once it returns True: (metrics) or (metrics, steps in the phase) → bool
    None       never; only the last phase may have it

    `numbers` are like the numbers of the schedule, but their functions count steps from the start
    of the phase. The schedule's own numbers count steps from the start of the run. If both name the
    same path, the phase's number is used.
    """

    algorithm: Any
    kl: Any = None
    reference: Any = None
    reward: Any = None
    until: int | float | str | Callable[..., bool] | None = None
    numbers: Mapping[str, Any] = {}
    # reset when the phase begins; a reference replaced by the phase always restarts
    reset: Sequence[Literal["optimizer", "reference"]] = ()

    @property
    def groups(self) -> dict[str, Any]:
        """Return the config groups replaced by the phase, as name → group."""
        own = self._asdict()
        return {name: own[name] for name in PHASED if own[name] is not None}


@safe("numbers", "phases", "name")
class Schedule(NamedTuple):
    """Hold the scheduled numbers of a run, and its phases.

    `numbers` maps a path (kl.coef, optimizer.lr, algorithm.policy_loss.clip_high) to a function or
    a Controller. A path is a dotted key, {"kl.coef": f}, or nested mappings, {"kl": {"coef": f}}. A
    command line can override nested mappings.

    A function takes the step, counted from 0. If it has a second positional parameter `value`, it
    also takes the configured number. If its keyword `steps` defaults to None, the keyword is set to
    the length of the run (trainer.steps) or, for a number of a phase, to the length of this phase.

    `phases` maps names to phases, in order. `name` is the name of a run with phases, because no
    single algorithm can name this run.
    """

    numbers: Mapping[str, Any] = {}
    phases: Mapping[str, Phase] = {}
    name: str = ""

    @property
    def paths(self) -> dict[str, Callable[..., float] | Controller]:
        """Return dotted path → function or Controller, for the whole run. The functions and
        Controllers of a phase are in `list_phases(experiment)[name].schedule`."""
        return flatten_numbers(self.numbers)


class Progress(NamedTuple):
    """Say how far a run has come: its step, its phase, and the state of its controllers. A
    checkpoint stores these plain numbers as `_asdict()`."""

    step: int = 0  # RL steps done
    phase: int = 0  # position among the phases
    since: int = 0  # RL step at which the phase began
    streak: int = 0  # on how many consecutive steps the phase's end condition has held
    controllers: Mapping[str, Mapping[str, float]] = {}  # path → state of its Controller


def start(experiment: Any) -> Progress:
    """Return the progress of a run that has not begun."""
    first = next(iter(list_phases(experiment).values()))
    return Progress(
        controllers={path: dict(c.init()) for path, c in find_controllers(first).items()}
    )


def list_phases(experiment: Any) -> dict[str, Any]:
    """Return the experiment of each phase by the name of the phase.

    The experiment of a phase has the phase's config groups (algorithm, kl, reference, reward) in
    place of the run's config groups. If phase and run schedule the same number, the experiment has
    the phase's schedule for this number. The schedule of a phase's experiment contains no phases.
    For a run without phases, return one phase named "".
    """
    schedule = experiment.schedule
    if not schedule.phases:
        return {"": experiment}
    return {
        name: experiment._replace(
            **phase.groups, schedule=Schedule(schedule.paths | flatten_numbers(phase.numbers))
        )
        for name, phase in schedule.phases.items()
    }


def _find_current(experiment: Any, progress: Progress) -> tuple[Phase | None, Any]:
    """Return the present phase and its experiment. The phase is None in a run without phases."""
    given = list(experiment.schedule.phases.values())
    of_phases = list(list_phases(experiment).values())
    return given[progress.phase] if given else None, of_phases[progress.phase]


def find_controllers(experiment: Any) -> dict[str, Controller]:
    """Return path → Controller for the experiment of one phase. A Controller stands either in the
    experiment itself, in place of a number, or in `experiment.schedule.numbers`."""
    scheduled = {
        path: f for path, f in experiment.schedule.paths.items() if isinstance(f, Controller)
    }
    return dict(find_inline_controllers(experiment._replace(schedule=None))) | scheduled


def find_inline_controllers(node: Any, prefix: str = "") -> Iterator[tuple[str, Controller]]:
    """Yield (path, Controller) for each Controller that takes the place of a number."""
    for key, value in list_fields(node).items():
        if isinstance(value, Controller):
            yield f"{prefix}{key}", value
        else:
            yield from find_inline_controllers(value, f"{prefix}{key}.")


def resolve_schedules(experiment: Any, progress: Progress) -> Any:
    """Return the experiment of the next step. Its config groups are those of the present phase, and
    every scheduled number is replaced by its present value.

    Raises: KeyError naming a path that leads to no number.
    """
    phase, x = _find_current(experiment, progress)
    own = flatten_numbers(phase.numbers) if phase else {}
    for path, controller in find_controllers(x).items():
        state = progress.controllers.get(path, controller.init())
        x = replace(x, path.split("."), functools.partial(_get_value_in_force, state), path)
    for path, function in x.schedule.paths.items():
        if not isinstance(function, Controller):
            step = progress.step - progress.since if path in own else progress.step
            function = _set_span(function, experiment, progress, own=path in own)
            x = replace(x, path.split("."), functools.partial(_value, function, step), path)
    return x


def foresee_step(experiment: Any, progress: Progress, step: int) -> Any:
    """Return the experiment of a later step, as far as it is known now. Phases of known length are
    assumed to end on time. Controllers are assumed to keep their values."""
    given = list(experiment.schedule.phases.values())
    while progress.step < step:
        progress = progress._replace(step=progress.step + 1)
        if progress.phase + 1 < len(given):
            end = phase_steps(given[progress.phase].until, experiment.trainer.steps)
            if end is not None and progress.step - progress.since >= end:
                progress = progress._replace(phase=progress.phase + 1, since=progress.step)
    return resolve_schedules(experiment, progress)


def phase_steps(until: Any, steps: int) -> int | None:
    """Return how many RL steps a phase lasts in a run of `steps` RL steps, or None if `until` is
    not a number."""
    if isinstance(until, float):
        return max(1, round(until * steps))
    return until if isinstance(until, int) else None


def _span(experiment: Any, progress: Progress, *, own: bool) -> int:
    """Return the length, in RL steps, of a schedule whose config does not set `steps`.

    If the present phase itself defines the schedule (`own`), the schedule is as long as this phase.
    Otherwise the schedule is as long as the run. If the end of the phase is not known beforehand,
    the phase is assumed to last until the end of the run.
    """
    steps = experiment.trainer.steps
    if not own:
        return steps
    left = max(1, steps - progress.since)
    phase, _ = _find_current(experiment, progress)
    return min(left, phase_steps(phase.until, steps) or left) if phase is not None else left


def _set_span(
    function: Callable[..., Any], experiment: Any, progress: Progress, *, own: bool
) -> Callable[..., Any]:
    """Return the function with `steps` set to `_span`, if the function has this parameter with the
    default None."""
    taken = inspect.signature(function).parameters.get("steps")
    if taken is None or taken.default is not None:
        return function
    return functools.partial(function, steps=_span(experiment, progress, own=own))


def _is_brought(phase: Phase | None, path: str) -> bool:
    """Return whether the number at a path comes from the phase: from the phase's scheduled numbers,
    or from a config group replaced by the phase."""
    return phase is not None and (
        path in flatten_numbers(phase.numbers) or path.partition(".")[0] in phase.groups
    )


def _value(function: Callable[..., float], step: int, configured: float) -> float:
    return function(step, configured) if _positional(function) > 1 else function(step)


def _get_value_in_force(state: Mapping[str, float], configured: Any) -> float:
    return state["value"]


def list_values(experiment: Any, progress: Progress) -> dict[str, float]:
    """Return path → value in the next step, for every scheduled number and every Controller."""
    x = resolve_schedules(experiment, progress)
    paths = x.schedule.paths | find_controllers(_find_current(experiment, progress)[1])
    return {
        path: float(
            functools.reduce(lambda node, key: list_settable(node)[key], path.split("."), x)
        )
        for path in paths
    }


def explain_new_length(experiment: Any, progress: Progress, *, before: int) -> str:
    """Return a sentence about the effect of a changed trainer.steps on a resumed run, or "" if
    trainer.steps is unchanged.

    Args:
      before: trainer.steps of the run so far.
    """
    steps = experiment.trainer.steps
    if before == steps:
        return ""
    was = list_values(
        experiment._replace(trainer=experiment.trainer._replace(steps=before)), progress
    )
    now = list_values(experiment, progress)
    moved = [
        f"{path} is {now[path]:.4g} instead of {was[path]:.4g}"
        for path in now
        if was[path] != now[path]
    ]
    line = f"trainer.steps was {before} and is now {steps}"
    if moved:
        line += f"; from step {progress.step + 1} on the new curves apply: {', '.join(moved)}"
    return line


def advance(experiment: Any, progress: Progress, metrics: Mapping[str, float]) -> Progress:
    """Return the progress after an RL step with these `metrics`.

    Controllers are updated. If the phase's end condition is fulfilled, the next phase begins.
    Controllers defined by the new phase start again. Controllers shared by both phases continue.
    """
    phase, x = _find_current(experiment, progress)
    now = find_controllers(x)
    states = {}
    for path, controller in now.items():
        update = _set_span(controller.update, experiment, progress, own=_is_brought(phase, path))
        states[path] = dict(update(progress.controllers.get(path, controller.init()), metrics))
    progress = progress._replace(step=progress.step + 1, controllers=states)
    if phase is None or progress.phase + 1 == len(experiment.schedule.phases):
        return progress
    until = phase_steps(phase.until, experiment.trainer.steps) or phase.until
    ended, held = _check_end(until, progress, metrics)
    if not ended:
        return progress._replace(streak=held)
    progress = progress._replace(phase=progress.phase + 1, since=progress.step, streak=0)
    then = find_controllers(_find_current(experiment, progress)[1])
    kept = {
        path: states[path] if now.get(path) is c else dict(c.init()) for path, c in then.items()
    }
    return progress._replace(controllers=kept)


def find_resets(experiment: Any, progress: Progress) -> Sequence[str]:
    """Return the things to reset at the beginning of the present phase: "reference", "optimizer",
    both or neither."""
    phase, _ = _find_current(experiment, progress)
    return () if phase is None else phase.reset


def describe_transition(
    experiment: Any, before: Progress, now: Progress, reset: Sequence[str]
) -> str:
    """Return a line about the start of a phase.

    Args:
      before, now: the progress before and after the start of the phase.
      reset: some of "reference" and "optimizer moments".
    """
    named = list_phases(experiment)
    names = list(named)
    name = names[now.phase]
    kept = ["weights", "prompt order"]
    kept += [what for what in ("optimizer moments", "reference") if what not in reset]
    return (
        f"phase {names[before.phase]} → {name} after step {now.step}:"
        f" {named[name].algorithm.name}; keeps {', '.join(kept)}; resets"
        f" {', '.join(['its own controllers', *reset])}"
    )


def measure_schedules(experiment: Any, progress: Progress) -> dict[str, float]:
    """Return metrics about schedules. schedule/PATH is the value of each scheduled number in the
    step. schedule/phase is the number of the phase, counted from 0."""
    own = {f"schedule/{path}": value for path, value in list_values(experiment, progress).items()}
    return own | ({"schedule/phase": progress.phase} if len(list_phases(experiment)) > 1 else {})


def list_watched(experiment: Any, progress: Progress) -> dict[str, str]:
    """Return path → metric for every controller and every end condition of the present phase. The
    path leads to the controller or the condition, and the metric is the one that it reads."""
    phase, x = _find_current(experiment, progress)
    out = {}
    for path, controller in find_controllers(x).items():
        metric = bound(controller.update).get("metric")
        if isinstance(metric, str):
            out[path] = metric
    if phase is not None and isinstance(phase.until, str):
        name = list(experiment.schedule.phases)[progress.phase]
        out[f"schedule.phases.{name}.until"] = read_condition(phase.until).metric
    return out


def find_unmeasured(experiment: Any, progress: Progress, metrics: Mapping[str, float]) -> list[str]:
    """Return a sentence for each controller or end condition that reads a metric not measured in
    this step. Metrics of validation problems (eval/…) are left out, because not every step measures
    them."""
    return [
        f"{path}: waits for '{metric}', but no step measures it.{suggest_name(metric, metrics)}"
        f" Every step measures: {', '.join(sorted(metrics))}"
        for path, metric in list_watched(experiment, progress).items()
        if metric not in metrics and not metric.startswith("eval/")
    ]


def _check_end(until: Any, progress: Progress, metrics: Mapping[str, float]) -> tuple[bool, int]:
    """Return whether the phase is over, and on how many consecutive steps its condition has
    held."""
    steps = progress.step - progress.since
    if isinstance(until, str):
        held = count_streak(read_condition(until), progress.streak, metrics)
        return held >= read_condition(until).times, held
    if callable(until):
        return bool(until(metrics, steps) if _positional(until) > 1 else until(metrics)), 0
    return until is not None and steps >= until, 0


def _positional(function: Callable[..., Any]) -> int:
    return sum(
        p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)
        for p in inspect.signature(function).parameters.values()
    )
