"""Find everything in an experiment that cannot run, or would silently do nothing, before a model is
loaded.

Keys and types are checked against the signatures of functions (rlkit.config.schema). The files here
check numbers (numbers.py), combinations of parts (combinations.py, schedules.py, asynchrony.py),
the assumptions of parts about other parts (assumptions.py), the parts' maths on fake data
(trial.py) and the rows of the data (rows.py). doubts.py reports legal settings that are probably
not intended.

Each file imports only files before it in this list: assumptions, asynchrony, combinations, names,
numbers, schedules, trial, doubts, rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit.config.problems.assumptions import assumption_problems
from rlkit.config.problems.asynchrony import asynchrony_problems, reuse_problems
from rlkit.config.problems.combinations import (
    adapter_problems,
    combination_problems,
    rank_problems,
)
from rlkit.config.problems.numbers import number_problems
from rlkit.config.problems.schedules import (
    build_first_steps,
    build_last_steps,
    critic_problems,
    schedule_problems,
)
from rlkit.config.problems.trial import optimizer_problems

if TYPE_CHECKING:  # torch is imported only with the parts that need it
    from rlkit.training.experiment import Experiment


def run_problems(x: Experiment) -> list[str]:
    """List the problems of a run as sentences. Every phase of the schedule is checked with the
    settings of the phase's first step, and its numbers also with those of the last step."""
    problems = schedule_problems(x) + rank_problems(x)
    firsts = {} if problems else build_first_steps(x)
    lasts = {} if problems else build_last_steps(x)
    for name, first in firsts.items():
        found = find_problems(first)
        found += [
            f"in the last step, {problem}"
            for problem in number_problems(lasts[name])
            if problem not in found
        ]
        problems += [f"schedule.phases.{name}: {problem}" if name else problem for problem in found]
    problems += asynchrony_problems(x, firsts) + reuse_problems(x, firsts) if firsts else []
    problems += adapter_problems(x) if firsts else []
    if firsts and not x.needs_reference and x.reference.name not in ("none", "frozen"):
        problems.append(
            f"reference={x.reference.name}: it would be updated and never used, since no KL"
            f" compares with it (kl={x.kl.name}, kl.coef={x.kl.coef}); choose a kl, or"
            " reference=frozen"
        )
    return problems + critic_problems(firsts) + optimizer_problems(x)


def find_problems(x: Experiment) -> list[str]:
    """List the problems of an experiment as sentences: parts that cannot run or would silently do
    nothing. All scheduled numbers must already be replaced by plain numbers."""
    return number_problems(x) + combination_problems(x) + assumption_problems(x)
