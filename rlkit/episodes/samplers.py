"""Choose the next problem from the past scores of all problems.

    state ── draw ──▶ problems of a step ── play, score ──▶ outcomes ── update ──▶ state

To draw is to choose one problem; a problem may be drawn again in a later step. The state consists
of plain numbers and a table with a row for each problem, so the state fits into a checkpoint. A
draw depends only on the state and the run's seed. In a mixture of tasks, the order of the epoch
decides which task of the mixture (its "part") comes next. The sampler then chooses among the
problems of this part.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from rlkit.errors import ConfigError, DataError
from rlkit.types import Rollout, Task, ranges

if TYPE_CHECKING:
    from torch import Tensor

# Columns of the table: SUCCESSES is the sum of a problem's rewards, each clipped to 0 … 1. FAILURES
# is the sum of `1 - reward`. LAST is the mean reward of the problem's last group, or -1 before its
# first group. ASKED is the number of the problem's last draw, or 0 before its first draw. The draws
# of each part of a mixture are numbered from 1.
SUCCESSES, FAILURES, LAST, ASKED = range(4)
# Entries: `table` is [n, 4] float64. `draws` is the number of draws so far, by part of the mixture.
# `step` lists the table rows drawn since the last call of `with_outcomes`. `asked` lists the table
# rows drawn for the previous step.
State = Mapping[str, Any]


class TaskSampler(NamedTuple):
    """Hold a rule for drawing the next problem. The rule chooses among the n problems of one part
    of the mixture that have not been drawn in this step.

    Problem i is drawn with the probability `P(i) = (1 - explore) · w_i / Σ w + explore / n`. With
    `greedy`, the fraction `w_i / Σ w` is replaced by 1 for the problem with the largest w, and by 0
    for all other problems. Among problems with the same largest w, the problem drawn longest ago
    gets the 1.

    weigh     function from the rows of the table [n, 4] to the weights w ≥ 0 [n]; None: the scores
              have no effect, and problems are drawn in the order of the epochs
    retest    every retest-th draw of a part takes the problem drawn longest ago; 0: there are no
              retests
    memory    factor on a problem's earlier successes and failures, applied whenever a new group of
              the problem is scored
    """

    name: str
    weigh: Callable[[Tensor], Tensor] | None = None
    explore: float = 0.0
    greedy: bool = False
    retest: int = 0
    memory: float = 1.0


def uniform_sampler() -> TaskSampler:
    """Draw every problem once per epoch, in an order fixed by the seed."""
    return TaskSampler("uniform")


@ranges(
    low=(0, 1),
    high=(0, 1),
    hard=(1e-9, None),
    normal=(1e-9, None),
    easy=(1e-9, None),
    unseen=(1e-9, None),
)
def pool_sampler(
    *,
    low: float = 0.25,
    high: float = 0.75,
    hard: float = 0.2,
    normal: float = 1.0,
    easy: float = 0.2,
    unseen: float = 1.0,
) -> TaskSampler:
    """Draw problems by pool: every problem in a pool has the pool's weight. The pass rate p of a
    problem's last group decides its pool: "hard" for p ≤ low, "easy" for p > high, and "normal" in
    between. A problem without a scored group is in the pool "unseen".

    Args: low, high: limits of the pass rate, 0 … 1. hard, normal, easy, unseen: weight of a problem
    in the pool of this name, > 0. A problem of weight 0 would never be drawn again.
    Source: prime-rl, curriculum/samplers/pool.py, with its defaults.
    """
    return TaskSampler(
        "pools",
        partial(by_pool, low=low, high=high, hard=hard, normal=normal, easy=easy, unseen=unseen),
    )


def by_pool(
    rows: Tensor, *, low: float, high: float, hard: float, normal: float, easy: float, unseen: float
) -> Tensor:
    """Return the weights [n] of `pool_sampler`."""
    last = rows[:, LAST]
    out = last.new_full(last.shape, normal)
    out[last <= low], out[last > high], out[last < 0] = hard, easy, unseen
    return out


@ranges(explore=(1e-9, 1), prior=(1e-9, None), memory=(0, 1))
def variance_sampler(
    *, explore: float = 0.1, prior: float = 0.5, memory: float = 0.8
) -> TaskSampler:
    """Draw problems in proportion to the expected variance of a reply's success. The weight is
    `w = E[p(1-p)] = ab / ((a+b)(a+b+1))`, for a chance of success `p ~ Beta(a, b)`.

    Here `a = prior + Σ_k memory^k · successes`, where k = 0 is the problem's last group. b is the
    same sum over failures. With a prior of 1/2, an unseen problem has the weight 1/8. After four
    successes in eight replies the weight is 0.225, and after no success in eight replies it is
    0.047.

    Args: explore: share of draws that ignore the weights, > 0, so every problem is drawn at some
    time. prior: number added to both sums, > 0. memory: weight of a group relative to the problem's
    next group, 0 … 1.
    Source: arXiv:2601.02648 takes the variance p(1-p) as the priority. Its expectation under the
      Beta distribution is rlkit's own derivation.
    """
    return TaskSampler(
        "variance", partial(by_variance, prior=prior), explore=explore, memory=memory
    )


def by_variance(rows: Tensor, *, prior: float) -> Tensor:
    """Return the weights [n] of `variance_sampler`."""
    a = rows[:, SUCCESSES] + prior
    b = rows[:, FAILURES] + prior
    return a * b / ((a + b) * (a + b + 1))


@ranges(retest=(1, None), unseen=(0, None), explore=(0, 1))
def prioritised_sampler(
    *, retest: int = 8, unseen: float = 0.1, explore: float = 0.0
) -> TaskSampler:
    """Draw the problem with the largest p(1-p), where p is the pass rate of its last group.
    Periodic retests also draw problems that were solved or too hard.

    Args: retest: every retest-th draw takes the problem drawn longest ago. Therefore each of n
      problems is drawn within n · retest draws. unseen: weight of a problem without a scored group,
      in place of p(1-p). With a weight below 0.25, problems with p near 1/2 are drawn before unseen
      problems. With a weight above 0, unseen problems are drawn before problems with p = 0 or p =
      1. explore: share of draws that ignore the weights.
    Source: the heap with periodic retests of arXiv:2601.02648.
    """
    return TaskSampler(
        "prioritised",
        partial(by_last_variance, unseen=unseen),
        explore=explore,
        greedy=True,
        retest=retest,
    )


def by_last_variance(rows: Tensor, *, unseen: float) -> Tensor:
    """Return p(1-p) of each problem's last group [n], or `unseen` for a problem without a group."""
    p = rows[:, LAST]
    return (p * (1 - p)).masked_fill(p < 0, unseen)


@ranges(solved=(0, 1))
def unsolved_sampler(*, solved: float = 0.9) -> TaskSampler:
    """Stop drawing a problem once the mean reward of its last group has reached `solved` (no
    positive resampling). Once all problems of a part of the mixture are solved, all of them are
    drawn again.

    A solved problem is not drawn again even if the policy forgets how to solve it. The metric
    `sampler/solved` uses 0.9, whatever `solved` is.

    Source: ScaleRL, Khatri et al. 2025, arXiv:2510.13786. ScaleRL compares the mean over all groups
    with the threshold. This sampler compares the last group, as TRL does.
    """
    return TaskSampler("unsolved", partial(while_unsolved, solved=solved))


def while_unsolved(rows: Tensor, *, solved: float) -> Tensor:
    """Return the weights [n] of `unsolved_sampler`: 1 for an unsolved problem, 0 for a solved
    problem."""
    return (rows[:, LAST] < solved).to(rows.dtype)


# ---------------------------------------------------------------------------------- draw and update


def choose_tasks(
    sampler: TaskSampler,
    tasks: Sequence[Task],
    parts: Sequence[str],
    state: State | None,
    *,
    seed: int,
) -> State:
    """Draw one problem for each entry of `parts` and return the new state. The positions of the
    drawn problems in `tasks` are appended to the list `step` of the new state.

    Two calls with the lists a and then b as `parts` draw the same problems as one call with a + b.
    If a problem occurs several times in the tasks, it counts once, at its first position.

    Args: parts: for each draw, in order, the name of the part of the mixture to draw from. state:
      the state so far; None at the start of a run. seed: the run's seed.
    Raises: DataError if the state belongs to other tasks; ConfigError if a weight is not a number
      of at least 0.
    """
    import torch

    if state is None:
        table = torch.zeros(len(tasks), 4, dtype=torch.float64)
        table[:, LAST] = -1.0
        state = {"table": table, "draws": {}, "step": [], "asked": []}
    if len(state["table"]) != len(tasks):
        raise DataError(
            f"task.sampler={sampler.name} has the scores of {len(state['table'])} tasks, but there"
            f" are {len(tasks)} tasks; restore task.path, task.max_samples and the data, or start a"
            " new run"
        )
    first: dict[tuple[str, str], int] = {}
    for i, task in enumerate(tasks):
        first.setdefault((task.part, task.id), i)
    own = {
        part: torch.tensor([i for (of, _), i in first.items() if of == part]) for part in set(parts)
    }
    table = state["table"].clone()
    draws = dict(state["draws"])
    step = list(state["step"])
    for part in parts:
        number = draws[part] = draws.get(part, 0) + 1
        fresh = own[part][~torch.isin(own[part], torch.tensor(step, dtype=torch.int64))]
        places = fresh if len(fresh) else own[part]
        place = int(
            places[
                _place(
                    sampler,
                    table[places],
                    number,
                    random.Random(f"task sampler/{seed}/{part}/{number}"),
                )
            ]
        )
        table[place, ASKED] = number
        step.append(place)
    return {**state, "table": table, "draws": draws, "step": step}


def _place(sampler: TaskSampler, rows: Tensor, number: int, source: random.Random) -> int:
    """Choose one of the table rows of a part of the mixture, for the part's draw number
    `number`."""
    import torch

    if sampler.retest and number % sampler.retest == 0:
        return int(rows[:, ASKED].argmin())
    shares = compute_chances(sampler, rows).cumsum(0)
    return min(
        int(torch.searchsorted(shares, source.random() * float(shares[-1]), right=True)),
        len(rows) - 1,
    )


def compute_chances(sampler: TaskSampler, rows: Tensor) -> Tensor:
    """Return the probability [n] with which an ordinary draw (not a retest) chooses each problem.
    The probabilities sum to 1. Raises: ConfigError if a weight is not a number of at least 0."""
    import torch

    assert sampler.weigh is not None
    weights = sampler.weigh(rows.clone())
    if weights.shape != rows.shape[:1] or not bool((weights.isfinite() & (weights >= 0)).all()):
        raise ConfigError(
            f"task.sampler={sampler.name}: its weights must be {len(rows)} numbers of at least 0,"
            " one per problem"
        )
    weights = weights.double() if weights.any() else torch.ones(len(rows), dtype=torch.float64)
    if sampler.greedy:
        best = (weights == weights.max()).nonzero()[:, 0]
        weights = torch.zeros_like(weights).index_fill(0, best[rows[best, ASKED].argmin()], 1.0)
    return (1 - sampler.explore) * weights / weights.sum() + sampler.explore / len(rows)


def with_outcomes(sampler: TaskSampler, state: State, rollouts: Sequence[Rollout]) -> State:
    """Return the state updated with the scored groups of a step. Group number k holds the rollouts
    of the k-th problem drawn for the step.

    Rewards are clipped to 0 … 1. Rollouts that cannot be scored are left out.
    """
    table = state["table"].clone()
    scores = dict[int, list[float]]()
    for rollout in rollouts:
        if rollout.total_reward is not None:
            scores.setdefault(rollout.group, []).append(min(max(rollout.total_reward, 0.0), 1.0))
    for k, own in scores.items():
        row = table[state["step"][k]]
        row[SUCCESSES] = sampler.memory * row[SUCCESSES] + sum(own)
        row[FAILURES] = sampler.memory * row[FAILURES] + len(own) - sum(own)
        row[LAST] = sum(own) / len(own)
    return {**state, "table": table, "step": [], "asked": list(state["step"])}


def measure_sampler(state: State | None) -> dict[str, float]:
    """Return the sampler's metrics. The result is empty for the uniform sampler. sampler/seen is
    the share of table rows with a scored group. sampler/mixed and sampler/solved are shares of
    these seen rows. For sampler/mixed, the mean reward of the row's last group is above 0 and below
    1. For sampler/solved, this mean is 0.9 or more. A row that repeats the problem of an earlier
    row counts as unseen."""
    if state is None:
        return {}
    last = state["table"][:, LAST]
    seen = last[last >= 0]
    shares = {"mixed": (seen > 0) & (seen < 1), "solved": seen >= 0.9}
    return {"sampler/seen": len(seen) / len(last)} | {
        f"sampler/{name}": float(own.double().mean()) for name, own in shares.items()
    }
