"""Compute the expected update of an algorithm by enumeration, and compare it with the true
gradient.

The game has an easy and a hard problem. In each of at most three turns the policy gives the right
answer, gives a wrong answer, or looks. An answer ends the episode, so the policy decides when to
stop. The third look ends the episode too. The right answer earns 1, everything else 0. A turn is
one token and the policy is a table of logits, so a problem has seven possible episodes (routes).

A batch is one group: n routes of one problem, drawn by the sampler. Its update is the gradient of
the training loss, computed by the functions and parts of a real run, before any optimizer. The
expectation runs over both problems and all multisets of routes, in float64. It is exact for parts
without a preferred order of rollouts.

The truth is the gradient of the expected reward, less the coefficient times KL(π‖ref) of whole
episodes if the experiment has a KL. `max_rl` has an objective of its own: the mean over problems
of `-Σ_k (1 - p)^k / k` for k = 1 … n - 1, where p is the chance of a right answer.

Later updates on the same batch, refills, and streams other than the reward's are left out. A critic
is perfect: it knows the expected return of every state.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rlkit.functional as F
from rlkit.algorithm import KL, require_number
from rlkit.errors import ConfigError
from rlkit.training.experiment import Experiment, settle_correction
from rlkit.training.update.loss import loss_weights, surrogate
from rlkit.training.update.sampled import filter_rollouts
from rlkit.training.update.scored import compute_old_share
from rlkit.training.update.weighted import penalize, weigh
from rlkit.types import Scored, TokenLogprobs, plain

RIGHT, WRONG, LOOK = range(3)
TURNS = 3
SIZES = (2, 3)
STALENESS = (0, 1)
# [problem, turn, token] logits of the sampler, one step old; the easy problem stands first.
OLD = (
    ((0.4, 0.2, 0.6), (1.2, 0.0, 0.2), (1.6, 0.0, -0.4)),
    ((-2.0, 0.6, 0.6), (-1.4, 0.6, 0.4), (-0.4, 0.6, 0.2)),
)
# The policy's logits are the sampler's, plus this times the gradient of the expected reward.
STEP = 6.0


class Figures(NamedTuple):
    """Figures of an expected update u compared with the true gradient g, both [problem, turn,
    token]."""

    angle: float  # between u and g, in degrees; nan if u is 0
    scale: float  # u·g / g·g; a learning rate absorbs it
    bias: float  # |u - g| / |g|
    # n (E|single update|² - |u|²) / |scale · g|²: the number of rollouts to average until the noise
    # is as long as the update's part along g
    noise: float
    turns: tuple[tuple[float, ...], ...]  # the scale at each problem's turns


class Problem(NamedTuple):
    """All routes (possible episodes) of a problem, each once."""

    batch: Scored
    scores: TokenLogprobs  # of the policy; carries the gradient
    chances: list[float]  # of each route, by the sampler


def prove(x: Experiment, size: int, staleness: int) -> Figures:
    """Compute the figures of an experiment for groups of `size` rollouts.

    Args:
      x: an experiment with plain numbers, from `rlkit.config.problems.schedules.build_first_steps`.
      staleness: 0 if the policy itself sampled the rollouts, 1 if the policy one step earlier did.
    Raises: ConfigError if the loss has no reward.
    """
    if not x.algorithm.reward_coef or x.algorithm.episodes is not None:
        raise ConfigError(
            f"algorithm={x.algorithm.name} does not learn from rewards of sampled rollouts, so its"
            " update has no gradient to be compared with; choose another algorithm"
        )
    x = settle_correction(x, exact=staleness == 0)
    with use_float64():
        old = torch.tensor(OLD, requires_grad=True)
        [ascent] = torch.autograd.grad(
            torch.stack([*map(compute_expected_reward, old)]).mean(), old
        )
        now = (old + STEP * ascent).detach().requires_grad_()
        sampler = old.detach() if staleness else now.detach()
        objectives = torch.stack([compute_objective(x, own, size) for own in now])
        [truth] = torch.autograd.grad(objectives.mean(), now)
        mean = torch.zeros_like(truth)
        square = 0.0
        for logits, sampled in zip(now, sampler, strict=True):
            problem = make_problem(x, logits, sampled, staleness)
            for rows, chance in list_multisets(problem.chances, size):
                [slope] = torch.autograd.grad(
                    compute_loss(x, problem, rows), now, retain_graph=True
                )
                mean -= chance / len(now) * slope
                square += chance / len(now) * float(slope.square().sum())
    return compare(mean, truth, size, square)


@contextmanager
def use_float64() -> Iterator[None]:
    """Within this block, make weights and other tensors without an explicit dtype in float64."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def compare(mean: Tensor, truth: Tensor, size: int, square: float) -> Figures:
    """Compute the figures of an expected update. They also need the expected squared length of a
    single update."""
    scale = (mean * truth).sum() / truth.square().sum()
    along = float((scale * truth).norm())
    across = float((mean - scale * truth).norm())
    angle = math.degrees(math.atan2(across, math.copysign(along, scale)))
    spread = size * (square - float(mean.square().sum()))
    turns = (mean * truth).sum(-1) / truth.square().sum(-1)
    return Figures(
        angle=angle if mean.any() else math.nan,
        scale=float(scale),
        bias=float((mean - truth).norm() / truth.norm()),
        noise=spread / along**2 if along else math.inf,
        turns=tuple(map(tuple, turns.tolist())),
    )


def list_routes() -> tuple[Tensor, Tensor]:
    """Return the tokens of the seven routes [7, 3], and a mask of the sampled tokens [7, 3]."""
    ids = torch.full((2 * TURNS + 1, TURNS), LOOK)
    for looks, answer in itertools.product(range(TURNS), (RIGHT, WRONG)):
        ids[2 * looks + answer, looks] = answer
    answered = (ids != LOOK).long()
    return ids, answered.cumsum(1) == answered


def score_routes(logits: Tensor) -> TokenLogprobs:
    """Score the tokens of all routes by a policy [turn, token]; its reference is uniform."""
    ids, mask = list_routes()
    log_p = logits.log_softmax(-1)
    entropy = F.from_log_probs(log_p)
    return TokenLogprobs(
        logprobs=F.fill_masked(log_p[torch.arange(TURNS), ids], mask, 0.0),
        entropy=entropy.expand_as(mask),
        full_kl=(math.log(logits.shape[-1]) - entropy).expand_as(mask),
    )


def compute_expected_reward(logits: Tensor) -> Tensor:
    """Compute the chance of the right answer to a problem."""
    ids, _ = list_routes()
    return score_routes(logits).logprobs.sum(1).exp()[(ids == RIGHT).any(1)].sum()


def compute_objective(x: Experiment, logits: Tensor, size: int) -> Tensor:
    """Compute the objective whose gradient the update on a problem should follow."""
    value = compute_expected_reward(logits)
    if plain(x.algorithm.advantage) is F.max_rl:
        orders = torch.arange(1.0, size)
        value = -((1 - value) ** orders / orders).sum()
    if x.kl.active:
        _, mask = list_routes()
        logprobs = score_routes(logits).logprobs
        reached = logprobs.sum(1, keepdim=True).exp() * mask
        divergence = (reached * (logprobs + math.log(logits.shape[-1]))).sum()
        value = value - require_number(x.kl.coef) * divergence
    return value


def make_problem(x: Experiment, logits: Tensor, sampler: Tensor, staleness: int) -> Problem:
    """Make the routes of a problem, in the form of a step before its update."""
    ids, mask = list_routes()
    n = len(ids)
    right = (ids == RIGHT).double()
    now = score_routes(logits.detach())
    sampled = score_routes(sampler).logprobs
    greedy = ((ids == logits.argmax(-1)) | ~mask).all(1)
    batch = Scored(
        ids=ids,
        attention_mask=mask,
        response_mask=mask,
        sampled_mask=mask,
        rollout_ids=torch.arange(n),
        step_ids=torch.arange(TURNS).expand(n, TURNS),
        rewards=right.sum(1),
        group_ids=torch.zeros(n, dtype=torch.int64),
        truncated=(ids == LOOK).all(1),
        lengths=mask.sum(1),
        reply_lengths=torch.ones(n, dtype=torch.int64),
        greedy_rewards=right[greedy].sum().expand(n),
        token_rewards=right,
        logprobs_sampler=sampled,
        versions=torch.zeros_like(ids),
        logprobs_old=now.logprobs,
        entropy_old=now.entropy,
        logprobs_ref=F.fill_masked(torch.full(ids.shape, -math.log(logits.shape[-1])), mask, 0.0),
        full_kl=now.full_kl,
    )
    batch = replace(
        batch,
        values=compute_perfect_values(batch, x.kl),
        old_share=compute_old_share(batch, x.algorithm, step=staleness),
    )
    return Problem(batch, score_routes(logits), sampled.sum(1).exp().tolist())


def compute_perfect_values(batch: Scored, kl: KL) -> Tensor:
    """Compute the policy's expected return at each state [7, 3], minus the KL in the reward."""
    assert batch.logprobs_old is not None
    later = (batch.token_rewards - penalize(batch, kl)).flip(1).cumsum(1).flip(1)
    reached = batch.logprobs_old.sum(1, keepdim=True).exp() * batch.response_mask
    return ((reached * later).sum(0) / reached.sum(0)).expand_as(later)


def list_multisets(chances: Sequence[float], size: int) -> Iterator[tuple[list[int], float]]:
    """Yield every multiset of the given number of routes, and its chance of being drawn as a
    group."""
    for rows in itertools.combinations_with_replacement(range(len(chances)), size):
        orders = math.factorial(size)
        for count in Counter(rows).values():
            orders //= math.factorial(count)
        yield list(rows), orders * math.prod(chances[row] for row in rows)


def compute_loss(x: Experiment, problem: Problem, rows: list[int]) -> Tensor:
    """Compute the policy's loss on a group of routes, as in the first update of a training step."""
    n = len(rows)
    tensors = {
        name: value[rows]
        for name, value in vars(problem.batch).items()
        if isinstance(value, Tensor)
    }
    own: dict[str, Any] = {
        "rollout_ids": torch.arange(n),
        "components": dict.fromkeys(x.reward.terms, tensors["rewards"]),
        "metadata": ({},) * n,
    }
    batch = filter_rollouts(replace(problem.batch, **tensors | own), x.algorithm)
    given = problem.scores._asdict().items()
    scores = TokenLogprobs(**{name: value[rows] for name, value in given if value is not None})
    weighted = weigh(batch, x.algorithm, x.kl)
    return surrogate(loss_weights(weighted, x.algorithm), scores, x.algorithm, x.kl)[0]
