"""Numbers and parts as functions of progress. A schedule never edits an experiment: it gives the experiment of a step.

start ──▶ at ──▶ one RL step ──▶ advance ──▶ at ──▶ …        Progress is all that a checkpoint has to hold of it
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rlkit.errors import nearest
from rlkit.types import Controller

PHASED = ("algorithm", "kl", "reference", "reward")  # the groups that a phase may replace
RESETS = ("optimizer", "reference")


class Phase(NamedTuple):
    """A part of the run with groups of its own. A group that is None is that of the whole run.

    until      the phase ends
    20         after 20 RL steps of its own
    text       once a condition holds, "reward/mean > 0.8 for 5"
    function   once it gives True: (metrics) or (metrics, steps in the phase) → bool
    None       never: for the last phase alone

    Steps of its `numbers` count from its start. They stand before the schedule's own, whose steps count over the whole run.
    """

    algorithm: Any
    kl: Any = None
    reference: Any = None
    reward: Any = None
    until: int | str | Callable[..., bool] | None = None
    numbers: Mapping[str, Any] = {}
    reset: Sequence[Literal["optimizer", "reference"]] = ()  # what starts anew when the phase begins, beside what it replaces


class Schedule(NamedTuple):
    """`numbers` maps a path (kl.coef, optimizer.lr, algorithm.policy_loss.clip_high) to a function or a Controller.

    A path is a dotted key, {"kl.coef": f}, or nested mappings, {"kl": {"coef": f}}, which a command line can override.
    A function takes the step, counted from 0; where its second positional parameter is `value`, also the configured number.
    `phases` maps names to phases, in order. `name` is that of a run with phases, which no algorithm alone describes.
    """

    numbers: Mapping[str, Any] = {}
    phases: Mapping[str, Phase] = {}
    name: str = ""

    @property
    def paths(self) -> dict[str, Callable[..., float] | Controller]:
        """Dotted path → function or Controller, of the whole run; those of a phase are in `phases(experiment)[name].schedule`."""
        return _flat(self.numbers)


class Progress(NamedTuple):
    """How far a run is: plain numbers, which go into the checkpoint as `_asdict()`."""

    step: int = 0  # RL steps done
    phase: int = 0  # position among the phases
    since: int = 0  # RL step at which it began
    streak: int = 0  # steps in a row on which its end condition has held
    controllers: Mapping[str, Mapping[str, float]] = {}  # path → state


def _flat(numbers: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for key, value in numbers.items():
        paths |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return paths


# ------------------------------------------------------------------------------------------ functions of the step


def constant(step: int, *, value: float) -> float:
    """The same at every step: in a phase, a number that differs from that of the whole run.

    >>> constant(7, value=0.5)
    0.5
    """
    return value


def linear(step: int, *, start: float, end: float, steps: int) -> float:
    """start + (end - start) · min(1, step / steps); `steps` > 0, step counts from 0.

    >>> linear(5, start=1.0, end=0.0, steps=10)
    0.5
    """
    return start + (end - start) * _share(step, steps)


def cosine(step: int, *, start: float, end: float, steps: int) -> float:
    """end + (start - end) · (1 + cos(π · min(1, step / steps))) / 2; `steps` > 0.

    >>> round(cosine(5, start=1.0, end=0.0, steps=10), 6)
    0.5
    """
    return end + (start - end) * (1 + math.cos(math.pi * _share(step, steps))) / 2


def exponential(step: int, *, start: float, end: float, steps: int) -> float:
    """start · (end / start)^min(1, step / steps): the same factor at every step; `steps` > 0, start and end of one sign and not 0.

    Raises: ValueError where start and end are not of one sign.
    >>> exponential(1, start=1.0, end=0.01, steps=2)
    0.1
    """
    if not start * end > 0:
        raise ValueError(f"start={start}, end={end}: must both be positive or both negative; to reach 0 choose linear or cosine")
    return start * (end / start) ** _share(step, steps)


def piecewise(step: int, *, points: Mapping[int, float] | Sequence[Sequence[float]], interpolate: bool = False) -> float:
    """The value of the last point that is not after `step`: steps, or lines between them with `interpolate`.

    Args:
      points: {step: value} or [[step, value], …], steps ascending. Before the first point the first value holds, after the last the last.
    Raises: ValueError where there is no point, or the steps do not ascend.
    >>> [piecewise(s, points={0: 1.0, 10: 0.0}) for s in (0, 5, 10, 99)]
    [1.0, 1.0, 0.0, 0.0]
    >>> piecewise(5, points=[[0, 1.0], [10, 0.0]], interpolate=True)
    0.5
    """
    pairs = [(float(s), v) for s, v in (points.items() if isinstance(points, Mapping) else points)]
    if not pairs or any(a >= b for (a, _), (b, _) in itertools.pairwise(pairs)):
        raise ValueError(f"points={points}: must be at least one [step, value], with ascending steps")
    before = [pair for pair in pairs if pair[0] <= step] or pairs[:1]
    (begun, value), after = before[-1], pairs[len(before) :]
    if not interpolate or not after or step <= begun:
        return value
    return value + (after[0][1] - value) * (step - begun) / (after[0][0] - begun)


def decay(step: int, value: float, *, to: float, steps: int) -> float:
    """The configured value, falling along a line to `to` of itself: value · (1 - (1 - to) · min(1, step / steps)); `steps` > 0.

    >>> decay(5, 2.0, to=0.5, steps=10)
    1.5
    """
    return value * linear(step, start=1.0, end=to, steps=steps)


def _share(step: int, steps: int) -> float:
    if steps < 1:
        raise ValueError(f"steps={steps}: a schedule needs at least one step")
    return min(1.0, step / steps)


# ------------------------------------------------------------------------------------ conditions on what is measured

GRAMMAR = "METRIC > NUMBER or METRIC > NUMBER for N, with >, >=, < or <=, N at least 1; for example 'reward/mean > 0.8 for 5'"
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


class Condition(NamedTuple):
    """`metric operator bound`, on `times` steps in a row."""

    metric: str
    operator: str
    bound: float
    times: int = 1


@functools.lru_cache(maxsize=64)
def condition(text: str) -> Condition:
    """Reads a condition: METRIC, one of > >= < <=, NUMBER, and perhaps `for N`, the steps in a row on which it has to hold.

    Raises: ValueError with the grammar.
    >>> condition("reward/mean > 0.8 for 5")
    Condition(metric='reward/mean', operator='>', bound=0.8, times=5)
    """
    found = re.fullmatch(r"\s*([^\s<>=]+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?:\s+for\s+(\d+))?\s*", text)
    if not found or int(found[4] or 1) < 1:
        raise ValueError(f"'{text}' is no condition; write {GRAMMAR}")
    return Condition(found[1], found[2], float(found[3]), int(found[4] or 1))


def streak(condition: Condition, before: float, metrics: Mapping[str, float]) -> int:
    """Steps in a row on which a condition has held, after one more step. nan does not hold.

    A step without the metric is passed over, so that `eval/accuracy > 0.9 for 2` asks for two evaluations in a row.
    """
    if condition.metric not in metrics:
        return int(before)
    return int(before) + 1 if OPERATORS[condition.operator](metrics[condition.metric], condition.bound) else 0


# --------------------------------------------------------------------------------- numbers that follow measurements


def on_metric(*, when: str, before: float, after: float, steps: int = 0) -> Controller:
    """`before` until a condition holds, then `after`, for good: also where the condition fails again.

    Args:
      when: a condition, "reward/mean > 0.8 for 5".
      steps: RL steps of a line from before to after; with 0 or 1 the next step has `after`.
    Raises: ValueError where the condition cannot be read, or steps is negative.
    """
    if steps < 0:
        raise ValueError(f"steps={steps}: must not be negative")
    return Controller(
        init=functools.partial(_state, value=before, streak=0, since=0),
        update=functools.partial(_on_metric, when=condition(when), before=before, after=after, steps=steps),
    )


def _on_metric(
    state: Mapping[str, float], metrics: Mapping[str, float], *, when: Condition, before: float, after: float, steps: int
) -> dict[str, float]:
    held = streak(when, state["streak"], metrics)
    since = state["since"] + 1 if state["since"] or held >= when.times else 0
    return {"value": linear(int(since), start=before, end=after, steps=max(1, steps)), "streak": held, "since": since}


def adaptive(*, start: float, target: float, horizon: float = 10_000, limit: float = 0.2, metric: str = "kl/ref_k3") -> Controller:
    """A coefficient that keeps a divergence near a target.

    After each RL step it is multiplied by 1 + clip(KL / target - 1, ±limit) · min(1, rollouts / horizon).
    Ziegler et al. 2019, arXiv:1909.08593, section 2.2. A step without a finite KL changes nothing.

    Args:
      start: coefficient of the first step, greater than 0: it is only ever multiplied.
      target: nats, greater than 0, in the unit of `metric`.
      horizon: rollouts over which it may change by the share `limit`, greater than 0.
      limit: largest relative error that counts, in (0, 1).
      metric: what is held at the target. kl/ref_k3 is nats per token.
    Raises: ValueError where a number is outside its range.
    """
    for name, value in (("start", start), ("target", target), ("horizon", horizon)):
        if not value > 0:
            raise ValueError(f"{name}={value}: must be greater than 0")
    if not 0 < limit < 1:
        raise ValueError(f"limit={limit}: must be greater than 0 and less than 1")
    update = functools.partial(_adaptive, target=target, horizon=horizon, limit=limit, metric=metric)
    return Controller(init=functools.partial(_state, value=start), update=update)


def _adaptive(
    state: Mapping[str, float], metrics: Mapping[str, float], *, target: float, horizon: float, limit: float, metric: str
) -> dict[str, float]:
    divergence = metrics.get(metric, math.nan)
    if not math.isfinite(divergence):
        return dict(state)
    error = max(-limit, min(limit, divergence / target - 1))
    return {"value": state["value"] * (1 + error * min(1.0, metrics["batch/rollouts"] / horizon))}


def adaptive_entropy(
    *, start: float = 0.0, target: float = 0.2, step: float = 0.005, low: float = 0.0, high: float = 1.0, metric: str = "policy/entropy"
) -> Controller:
    """A coefficient that keeps the entropy near a target: + step after a step below it, - step above it, within [low, high].

    After He et al. 2025, arXiv:2505.22312, as TRL has it. A step without a finite entropy changes nothing.

    Args:
      target: nats per sampled token.
      step: greater than 0.
      low, high: bounds of the coefficient, low ≤ start ≤ high.
    Raises: ValueError where a number is outside its range.
    """
    if not step > 0:
        raise ValueError(f"step={step}: must be greater than 0")
    if not low <= start <= high:
        raise ValueError(f"low={low}, start={start}, high={high}: must ascend")
    update = functools.partial(_adaptive_entropy, target=target, step=step, low=low, high=high, metric=metric)
    return Controller(init=functools.partial(_state, value=start), update=update)


def _adaptive_entropy(
    state: Mapping[str, float], metrics: Mapping[str, float], *, target: float, step: float, low: float, high: float, metric: str
) -> dict[str, float]:
    entropy = metrics.get(metric, math.nan)
    change = step * ((entropy < target) - (entropy > target))  # nan is neither
    return {"value": max(low, min(high, state["value"] + change))}


def _state(**numbers: float) -> dict[str, float]:
    return dict(numbers)


# --------------------------------------------------------------------------------------------- the course of a run


def start(experiment: Any) -> Progress:
    """The progress of a run that has not begun."""
    first = next(iter(phases(experiment).values()))
    return Progress(controllers={path: dict(c.init()) for path, c in controllers(first).items()})


def phases(experiment: Any) -> dict[str, Any]:
    """Name → the experiment of that phase: its groups in place, its own numbers before the shared ones, no phases.

    A run without phases is one phase of the name "".
    """
    schedule = experiment.schedule
    if not schedule.phases:
        return {"": experiment}
    return {
        name: experiment._replace(
            **{group: getattr(phase, group) for group in PHASED if getattr(phase, group) is not None},
            schedule=Schedule(schedule.paths | _flat(phase.numbers)),
        )
        for name, phase in schedule.phases.items()
    }


def _current(experiment: Any, progress: Progress) -> tuple[Phase | None, Any]:
    """The phase in force, if there are any, and its experiment."""
    given = list(experiment.schedule.phases.values())
    return given[progress.phase] if given else None, list(phases(experiment).values())[progress.phase]


def controllers(experiment: Any) -> dict[str, Controller]:
    """Path → Controller, of the experiment of one phase: those that stand in place of a number, and those of its schedule."""
    scheduled = {path: f for path, f in experiment.schedule.paths.items() if isinstance(f, Controller)}
    return dict(_inline(experiment._replace(schedule=None))) | scheduled


def _inline(node: Any, prefix: str = "") -> Iterator[tuple[str, Controller]]:
    for key, value in _fields(node).items():
        if isinstance(value, Controller):
            yield f"{prefix}{key}", value
        else:
            yield from _inline(value, f"{prefix}{key}.")


def at(experiment: Any, progress: Progress) -> Any:
    """The experiment of the step to come: the phase's groups in place, and every scheduled number a plain number.

    Raises: KeyError naming the path that binds nothing.
    """
    phase, x = _current(experiment, progress)
    own = _flat(phase.numbers) if phase else {}
    for path, controller in controllers(x).items():
        state = progress.controllers.get(path, controller.init())
        x = replace(x, path.split("."), functools.partial(_in_force, state), path)
    for path, function in x.schedule.paths.items():
        if not isinstance(function, Controller):
            step = progress.step - progress.since if path in own else progress.step
            x = replace(x, path.split("."), functools.partial(_value, function, step), path)
    return x


def _in_force(state: Mapping[str, float], configured: Any) -> float:
    return state["value"]


def values(experiment: Any, progress: Progress) -> dict[str, float]:
    """Path → value in the step to come, of every scheduled number and every Controller."""
    x = at(experiment, progress)
    paths = x.schedule.paths | controllers(_current(experiment, progress)[1])
    return {path: float(functools.reduce(lambda node, key: _settable(node)[key], path.split("."), x)) for path in paths}


def advance(experiment: Any, progress: Progress, metrics: Mapping[str, float]) -> Progress:
    """The progress after an RL step that measured `metrics` (with batch/rollouts, for `adaptive`).

    Controllers move; where the phase's end condition holds the next phase begins. Then controllers that it brings start anew,
    and those that both phases share go on.
    """
    phase, x = _current(experiment, progress)
    now = controllers(x)
    states = {path: dict(c.update(progress.controllers.get(path, c.init()), metrics)) for path, c in now.items()}
    progress = progress._replace(step=progress.step + 1, controllers=states)
    if phase is None or progress.phase + 1 == len(experiment.schedule.phases):
        return progress
    ended, held = _ended(phase.until, progress, metrics)
    if not ended:
        return progress._replace(streak=held)
    progress = progress._replace(phase=progress.phase + 1, since=progress.step, streak=0)
    then = controllers(_current(experiment, progress)[1])
    kept = {path: states[path] if now.get(path) is c else dict(c.init()) for path, c in then.items()}
    return progress._replace(controllers=kept)


def watched(experiment: Any, progress: Progress) -> dict[str, str]:
    """Path → the metric that it follows, in the phase in force: controllers, and the condition that ends the phase."""
    phase, x = _current(experiment, progress)
    out = {}
    for path, controller in controllers(x).items():
        numbers = getattr(controller.update, "keywords", {})
        metric = numbers["when"].metric if isinstance(numbers.get("when"), Condition) else numbers.get("metric")
        if isinstance(metric, str):
            out[path] = metric
    if phase is not None and isinstance(phase.until, str):
        out[f"schedule.phases.{list(experiment.schedule.phases)[progress.phase]}.until"] = condition(phase.until).metric
    return out


def unmeasured(experiment: Any, progress: Progress, metrics: Mapping[str, float]) -> list[str]:
    """Sentences on what waits for a metric that a step has not measured. Held-out ones (eval/…) are not of every step."""
    return [
        f"{path}: waits for '{metric}', which is not measured.{nearest(metric, metrics)} Every step measures: {', '.join(sorted(metrics))}"
        for path, metric in watched(experiment, progress).items()
        if metric not in metrics and not metric.startswith("eval/")
    ]


def _ended(until: Any, progress: Progress, metrics: Mapping[str, float]) -> tuple[bool, int]:
    """Whether the phase is over, and the steps in a row on which its condition has held."""
    steps = progress.step - progress.since
    if isinstance(until, str):
        held = streak(condition(until), progress.streak, metrics)
        return held >= condition(until).times, held
    if callable(until):
        return bool(until(metrics, steps) if _positional(until) > 1 else until(metrics)), 0
    return until is not None and steps >= until, 0


def schedule_problems(experiment: Any) -> list[str]:
    """What of a schedule cannot run, as sentences."""
    problems, given = [], experiment.schedule.phases
    for name, phase in given.items():
        where = f"schedule.phases.{name}"
        if not isinstance(phase, Phase):
            problems.append(f"{where}: is no phase; give it the _target_ rlkit.schedules.Phase, or take it out with ~{where}")
            continue
        problems += [
            f"{where}.{group}: must be whole, since a phase shares no part of a group; choose +{group}@{where}.{group}=OPTION first"
            for group in PHASED
            if isinstance(getattr(phase, group), Mapping)
        ]
    if problems:
        return problems
    shared = [("schedule.numbers", experiment.schedule.paths)]
    for where, paths in [*shared, *((f"schedule.phases.{name}.numbers", _flat(phase.numbers)) for name, phase in given.items())]:
        problems += [
            f"{where}.{path}={f!r}: is no function of the step; give it a _target_ such as rlkit.schedules.constant with _partial_: true"
            for path, f in paths.items()
            if not callable(f) and not isinstance(f, Controller)
        ]
    for name, phase in given.items():
        where = f"schedule.phases.{name}"
        if phase.until is None and name != list(given)[-1]:
            problems.append(f"{where}: has no end, so no later phase begins; set {where}.until to RL steps or to a condition")
        if isinstance(phase.until, int) and phase.until < 1:
            problems.append(f"{where}.until={phase.until}: must be at least 1 RL step")
        if isinstance(phase.until, str):
            try:
                condition(phase.until)
            except ValueError as error:
                problems.append(f"{where}.until: {error}")
        problems += [f"{where}.reset: '{word}' is not one of {', '.join(RESETS)}" for word in phase.reset if word not in RESETS]
    if not problems and (experiment.evaluation.n == 0 or experiment.evaluation.every == 0):
        for position in range(len(given) or 1):
            problems += [
                f"{path}: waits for '{metric}', which is measured before and after the run only; set evaluation.every and evaluation.n"
                for path, metric in watched(experiment, Progress(phase=position)).items()
                if metric.startswith("eval/")
            ]
    for name, x in phases(experiment).items():
        where = f"schedule.phases.{name}: " if name else ""
        twice = x.schedule.paths.keys() & dict(_inline(x._replace(schedule=None))).keys()
        problems += [f"{where}{path}: is set by a controller and by schedule.numbers.{path}; keep one of the two" for path in sorted(twice)]
    return problems


def schedule_warnings(experiment: Any) -> list[str]:
    """What of a schedule is legal but probably not meant."""
    out, steps, given = [], 0, experiment.schedule.phases
    for position, (name, phase) in enumerate(given.items()):
        where = f"schedule.phases.{name}.until={phase.until}"
        if position + 1 == len(given):
            out += [] if phase.until is None else [f"{where}: is without effect: the last phase ends with the run (trainer.steps)"]
            continue
        steps += phase.until if isinstance(phase.until, int) else 1
        if steps >= experiment.trainer.steps:
            out.append(f"{where}: ends at step {steps} or later, and trainer.steps={experiment.trainer.steps}: no later phase begins")
            break
    return out


# ------------------------------------------------------------------------------------------- numbers within a part


def _positional(function: Callable[..., Any]) -> int:
    return sum(p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY) for p in inspect.signature(function).parameters.values())


def _value(function: Callable[..., float], step: int, configured: float) -> float:
    return function(step, configured) if _positional(function) > 1 else function(step)


def _fields(node: Any) -> Mapping[str, Any]:
    """What a nested NamedTuple, mapping or partial function holds."""
    if isinstance(node, functools.partial):
        return node.keywords
    if hasattr(node, "_asdict"):
        return node._asdict()
    return node if isinstance(node, Mapping) else {}


def _settable(node: Any) -> Mapping[str, Any]:
    """The same, and the defaults of a partial function that nobody has set."""
    if not isinstance(node, functools.partial):
        return _fields(node)
    defaults = {p.name: p.default for p in inspect.signature(node).parameters.values() if p.default is not p.empty}
    return defaults | node.keywords


def replace(node: Any, keys: list[str], change: Callable[[Any], float], path: str) -> Any:
    """A copy of nested NamedTuples, mappings and partial functions with one number, or the Controller in its place, changed.

    A whole number stays one: it is rounded to the nearest.
    Raises: KeyError naming the path that binds no number.
    """
    key, rest, known = keys[0], keys[1:], _settable(node)
    if key not in known:
        raise KeyError(f"'{path}' binds nothing: there is no '{key}'; here are: {', '.join(map(str, known)) or 'no numbers'}")
    old = known[key]
    if not rest and (isinstance(old, bool) or not isinstance(old, int | float | Controller)):
        raise KeyError(f"'{path}' is not a number")
    if rest:
        new = replace(old, rest, change, path)
    else:
        new = change(old)
        new = round(new) if isinstance(old, int) or (isinstance(old, Controller) and _whole(node, key)) else float(new)
    if isinstance(node, functools.partial):
        return functools.partial(node.func, *node.args, **{**node.keywords, key: new})
    return node._replace(**{key: new}) if hasattr(node, "_replace") else {**node, key: new}


def _whole(node: Any, key: str) -> bool:
    """Whether a field that a Controller fills is declared a whole number."""
    if isinstance(node, Mapping):
        return False
    parameters = inspect.signature(node.func if isinstance(node, functools.partial) else type(node)).parameters
    declared = parameters[key].annotation if key in parameters else None
    return getattr(declared, "__forward_arg__", declared) in (int, "int")
