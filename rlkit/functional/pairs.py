"""Learning from pairs of one prompt's rollouts: the choice of pairs, their loss, and an advantage
with the same gradient.

A selector of pairs is (rewards [N], group_ids [N]) → [P, 2] int64, with the preferred rollout
first. Only the reward orders a pair. So two rollouts with equal rewards form no pair, and an
unscored rollout (reward nan) is in no pair.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlkit.functional._arguments import require_positive
from rlkit.functional.masking import fill_masked, segment_sum
from rlkit.types import safe


def all_pairs(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Pair every two rollouts of a prompt with different rewards.

    {(i, j): R_i > R_j, i and j in the same group}

    Args:
      rewards: [N], nan for an unscored rollout.
      group_ids: [N] any integers; the rollouts of a group need not be neighbours.
    Returns: [P, 2] int64, (preferred, dispreferred); P = 0 if no group has different rewards.
    Source: Ouyang et al. 2022 (InstructGPT), section 3.5, arXiv:2203.02155: all comparisons of one
      prompt.

    >>> all_pairs(torch.tensor([1.0, 0.0, 1.0, 5.0]), torch.tensor([0, 0, 0, 1]))
    tensor([[0, 1],
            [2, 1]])
    """
    same = group_ids.unsqueeze(1) == group_ids.unsqueeze(0)
    return (same & (rewards.unsqueeze(1) > rewards.unsqueeze(0))).nonzero()


def best_worst(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Pair the best rollout of each prompt with its worst. Of several equal rollouts, take the
    first.

    {(argmax_g R, argmin_g R)}, for every group g with different rewards

    Args:
      rewards: [N], nan for an unscored rollout.
      group_ids: [N] any integers; the rollouts of a group need not be neighbours.
    Returns: [P, 2] int64, (preferred, dispreferred), at most one pair for each group; P = 0 if no
      group has different rewards.
    Source: best-of-n against worst-of-n, Dong et al. 2024 (RLHF Workflow), section 3,
      arXiv:2405.07863.

    >>> best_worst(torch.tensor([1.0, 0.0, 1.0, 0.5]), torch.tensor([0, 0, 0, 0]))
    tensor([[0, 1]])
    """
    groups, group = group_ids.unique(return_inverse=True)
    n = len(rewards)
    ends = []
    for sign in (1.0, -1.0):
        score = (sign * rewards).where(~rewards.isnan(), -torch.inf)
        top = score.new_full((groups.numel(),), -torch.inf).scatter_reduce(0, group, score, "amax")
        place = torch.arange(n, device=rewards.device).where(
            (score == top[group]) & ~rewards.isnan(), n
        )
        ends.append(place.new_full((groups.numel(),), n).scatter_reduce(0, group, place, "amin"))
    pairs = torch.stack(ends, 1)
    pairs = pairs[(pairs < n).all(1)]
    return pairs[rewards[pairs[:, 0]] > rewards[pairs[:, 1]]]


def pairwise_loss(
    logprobs: Tensor,
    response_mask: Tensor,
    rollout_ids: Tensor,
    pairs: Tensor,
    *,
    beta: float = 0.1,
    length_normalise: bool = False,
) -> Tensor:
    """Compute the loss of each pair: it falls as the policy prefers the better rollout. This is for
    notebooks and tests; a run uses `pairwise`.

    loss_ij = -log σ(β (s_i - s_j)), s_i = Σ_t log π_t over the trained tokens of rollout i

    Args:
      logprobs: [B, T] in nats, carries the gradient. Any value where the mask is False.
      response_mask: [B, T] bool.
      rollout_ids: [B] int64; all rows of a rollout must be passed.
      pairs: [P, 2] int64, (preferred, dispreferred); each rollout must have a row.
      beta: > 0, per nat.
      length_normalise: if True, s_i is the mean over tokens, not the sum.
    Returns: [P] > 0, in nats; log 2 for two equally likely rollouts. Without pairs the result is
      empty, and its sum still has a gradient, of 0.
    Raises: ValueError naming beta.
    Source: Rafailov et al. 2023 (DPO), section 4, arXiv:2305.18290, without a reference. The mean
      over tokens, also without a reference, is SimPO, Meng et al. 2024, section 2.2,
      arXiv:2405.14734. SimPO also subtracts a margin γ inside σ; here there is no margin.

    >>> mask, pairs = torch.ones(2, 1).bool(), torch.tensor([[0, 1]])
    >>> pairwise_loss(torch.tensor([[-1.0], [-1.0]]), mask, torch.tensor([0, 1]), pairs)
    tensor([0.6931])
    """
    require_positive(beta=beta)
    scores = segment_sum(fill_masked(logprobs, response_mask, 0.0), rollout_ids)
    if length_normalise:
        scores = scores / segment_sum(response_mask, rollout_ids).clamp_min(1)
    return -logsigmoid(beta * (scores[pairs[:, 0]] - scores[pairs[:, 1]]))


@safe("pair_selector")
def pairwise(
    rewards: Tensor,
    group_ids: Tensor,
    logprobs_old: Tensor,
    response_mask: Tensor,
    rollout_ids: Tensor,
    *,
    beta: float = 0.1,
    length_normalise: bool = False,
    pair_selector: Callable[[Tensor, Tensor], Tensor] = all_pairs,
) -> Tensor:
    """Compute the advantage for which the policy gradient equals the gradient of the mean
    `pairwise_loss`, taken at the old policy.

    A_i = N/P · β (Σ_{(i,j)} σ(-β (s_i - s_j)) - Σ_{(j,i)} σ(-β (s_j - s_i))), s as in
    `pairwise_loss`; divided by |y_i| if s is a mean

    The gradients are exactly equal with policy_loss `reinforce` and aggregation `sequence_sum` with
    constant 1, whose weights are 1/N.

    Args:
      rewards: [N], nan for an unscored rollout.
      group_ids: [N] any integers.
      logprobs_old: [B, T] in nats. Any value where the mask is False.
      response_mask: [B, T] bool.
      rollout_ids: [B].
      beta: > 0, per nat. The weight of a pair fades once the better rollout is ahead by more than
        about 1 / beta nats. DPO takes 0.1.
      length_normalise: if True, s_i is the mean over tokens, not the sum; SimPO combines this with
        a beta of 2 to 2.5.
      pair_selector: (rewards, group_ids) → [P, 2]. It receives the reward nan for a rollout without
        a trained token.
    Returns: [B, T], equal at all tokens of a rollout, of the dtype of `logprobs_old`; sums to 0
      over the rollouts of a group unless length_normalise. It is 0 for a rollout in no pair.
    Raises: ValueError naming beta.
    Source: the gradient of the loss of DPO, Rafailov et al. 2023, section 4, arXiv:2305.18290,
      without a reference. All pairs of the batch count the same. With `all_pairs`, a prompt with
      more pairs therefore counts more; InstructGPT gives each prompt the same weight.

    >>> given = (torch.zeros(2, 1), torch.ones(2, 1).bool(), torch.tensor([0, 1]))
    >>> pairwise(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), *given, beta=1.0)
    tensor([[ 1.],
            [-1.]])
    """
    require_positive(beta=beta)
    n = len(rewards)
    tokens = segment_sum(response_mask, rollout_ids, n=n)
    scores = segment_sum(
        fill_masked(logprobs_old.detach().double(), response_mask, 0.0), rollout_ids, n=n
    )
    share = 1.0 / tokens.clamp_min(1).double() if length_normalise else torch.ones_like(scores)
    better, worse = pair_selector(rewards.where(tokens > 0, torch.nan), group_ids).unbind(1)
    pull = beta * torch.sigmoid(-beta * ((scores * share)[better] - (scores * share)[worse]))
    balance = torch.zeros_like(scores).index_add(0, better, pull).index_add(0, worse, -pull)
    advantages = balance * share * (rollout_ids.unique().numel() / max(len(better), 1))
    return advantages[rollout_ids].unsqueeze(-1).expand(response_mask.shape).to(logprobs_old.dtype)
