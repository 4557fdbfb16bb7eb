"""Find problems of groups sampled ahead, or kept for later steps, as sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit.errors import describe_definition
from rlkit.system.shared_state import find_user_functions
from rlkit.training.schedules import list_phases
from rlkit.training.schedules.paths import flatten_numbers
from rlkit.training.schedules.progress import find_controllers, phase_steps
from rlkit.types import is_stateful

if TYPE_CHECKING:  # torch is imported only with the parts that need it
    from rlkit.training.experiment import Experiment

# Settings used when groups are requested. This happens `staleness` RL steps before the step that
# trains on these groups.
DISPATCH = (
    "generation.",
    "environment.",
    "batch.",
    "reward.",
    "algorithm.group_filter",
    "algorithm.max_refills",
)


def asynchrony_problems(x: Experiment, firsts: dict[str, Experiment]) -> list[str]:
    """Check that every setting with an effect on groups is known when the groups are requested.
    `firsts`: phase → the experiment with the settings of the phase's first step."""
    mode = x.asynchrony.mode
    staleness = x.asynchrony.staleness
    said = f"asynchrony.staleness={staleness}"
    if mode == "none" and staleness:
        return [
            f"{said}: with asynchrony=none a step samples with the weights that it trains; choose"
            " asynchrony=lag, or set it to 0"
        ]
    problems = _find_second_process_problems(x) if mode == "overlap" else []
    if not staleness:
        return problems
    for name, phase in list_phases(x).items():
        where = f"schedule.phases.{name}: " if name else ""
        if phase.algorithm.episodes is not None:
            problems.append(
                f"{where}{said}: algorithm={phase.algorithm.name} samples nothing, so nothing can"
                " be sampled ahead; choose asynchrony=none"
            )
        problems += [
            f"{where}{path}: follows what the run measures, so its value is not known {staleness}"
            f" steps ahead ({said}); give it a function of the step, or choose asynchrony=none"
            for path in find_controllers(phase)
            if path.startswith(DISPATCH)
        ]
    return problems + _open_ends(x, firsts, said)


def _find_second_process_problems(x: Experiment) -> list[str]:
    """Report settings that do not allow sampling in a second process of this machine."""
    said = "asynchrony=overlap"
    problems = []
    count = x.trainer.devices * x.trainer.nodes
    if count > 1:
        problems.append(
            f"{said}: there is one sampling process, and trainer={x.trainer.strategy} has {count}"
            " ranks; choose asynchrony=lag"
        )
    if (
        any(phase.algorithm.episodes is not None for phase in list_phases(x).values())
        and not x.asynchrony.staleness
    ):
        problems.append(
            f"{said}: algorithm={x.algorithm.name} samples nothing; choose asynchrony=none"
        )
    return problems + _find_stateful(x)


def _find_stateful(x: Experiment) -> list[str]:
    """Find functions with a memory of earlier calls, because the second process would call them
    with a separate memory."""
    found: dict[str, str] = {}
    for phase in list_phases(x).values():
        terms = {f"reward.terms.{name}": term.fn for name, term in phase.reward.terms.items()}
        filters = (
            {"algorithm.group_filter": phase.algorithm.group_filter}
            if phase.algorithm.max_refills
            else {}
        )
        parts = {
            **terms,
            "reward.aggregator": phase.reward.aggregator,
            "environment": phase.environment,
            **filters,
        }
        for path, part in parts.items():
            marked = [function for function in find_user_functions(part) if is_stateful(function)]
            found |= {describe_definition(function): path for function in marked}
    return [
        f"asynchrony=overlap: {path} ({place}) keeps state between its calls (@stateful), and a"
        " second process would call it with a state of its own, so its numbers would differ from"
        " asynchrony=lag; choose asynchrony=lag"
        for place, path in found.items()
    ]


def reuse_problems(x: Experiment, firsts: dict[str, Experiment]) -> list[str]:
    """Report task.reuse in a run with later changes of sampling or scoring: a kept group keeps its
    rewards. `firsts` is as in `asynchrony_problems`."""
    from rlkit.training.ahead.flight import digest_settings

    if not x.reuse.active:
        return []
    given = [x.schedule.numbers, *(phase.numbers for phase in x.schedule.phases.values())]
    scheduled = [path for numbers in given for path in flatten_numbers(numbers)]
    moved = [path for path in scheduled if path.startswith(("reward.", "environment."))]
    if len({digest_settings(first) for first in firsts.values()}) > 1:
        moved.append("schedule.phases")
    return [
        f"task/reuse: {path} changes how groups are sampled or scored, and kept groups would be"
        " learned from with their former rewards; choose task/reuse=none"
        for path in moved
    ]


def _open_ends(x: Experiment, firsts: dict[str, Experiment], said: str) -> list[str]:
    """Report phases without a known end, if the phases sample or score differently. Groups are
    requested before the end of the phase is known, so the settings of the groups are unknown."""
    from rlkit.training.ahead.flight import digest_settings

    given = x.schedule.phases
    numbered = any(
        path.startswith(DISPATCH)
        for phase in given.values()
        for path in flatten_numbers(phase.numbers)
    )
    alike = len({digest_settings(first) for first in firsts.values()}) == 1 and not numbered
    return [
        f"schedule.phases.{name}.until={phase.until}: groups are sampled ahead ({said}), while the"
        " end of this phase is not known, and the phases sample or score differently; let it end"
        " after a number of steps, or choose asynchrony=none"
        for name, phase in list(given.items())[:-1]
        if phase_steps(phase.until, x.trainer.steps) is None and not alike
    ]
