"""Rules for overlong rollouts: (rewards [N], …) → (rewards [N] used for the advantage, [N] bool,
True for a rollout to train on)."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkit.functional._arguments import require, require_positive
from rlkit.functional.masking import full_precision
from rlkit.types import assumes, keeps


@keeps("binary", "non_negative", "raw")
def keep_overlong(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Train on every rollout with its own reward, whatever its length.

    Args:
      rewards: [N], nan for an unscored rollout.
    Returns: `rewards` unchanged, and True for every rollout [N].
    Source: GRPO as published, Shao et al. 2024, arXiv:2402.03300.

    >>> keep_overlong(torch.tensor([1.0]))
    (tensor([1.]), tensor([True]))
    """
    return rewards, torch.ones_like(rewards, dtype=torch.bool)


@assumes("raw_rewards", "reply_budget")
@keeps("raw")
def soft_penalty(
    rewards: Tensor, reply_lengths: Tensor, *, limit: float, buffer: float = 0.2
) -> tuple[Tensor, Tensor]:
    """Lower the reward of a rollout whose longest reply comes close to the allowed length.

    R'_i = R_i + clamp((L - b - |y_i|) / b, -1, 0), with L = limit and b = buffer · limit

    The penalty is 0 for up to `L - b` tokens, and -1 for L or more tokens.

    A reply is the output of one call of the policy. In an episode of several replies only the
    longest reply counts, so ten short turns are not penalised. To penalise the length of a whole
    episode, use `rlkit.rewards.soft_length`.

    Args:
      rewards: [N], nan for an unscored rollout.
      reply_lengths: [N] sampled tokens of each rollout's longest reply.
      limit: allowed length of a reply in tokens, > 0; from this length on the penalty is 1.
      buffer: share of the limit over which the penalty grows, in (0, 1]; in the paper 4096 of 20480
        tokens.
    Returns: rewards [N], lowered by 0 … 1, with nan left as nan; and True for every rollout [N].
    Raises: ValueError naming the limit or the buffer.
    Source: soft overlong punishment, DAPO, Yu et al. 2025, section 3.4, eq. 13, arXiv:2503.14476,
      where a rollout is one reply. The paper's rewards are 1 and -1, so the largest penalty is half
      of their distance. With the rewards 1 and 0 it is all of it.

    >>> soft_penalty(torch.ones(4), torch.tensor([80, 90, 100, 500]), limit=100)[0]
    tensor([1.0000, 0.5000, 0.0000, 0.0000])
    """
    require_positive(limit=limit)
    require(0 < buffer <= 1, "buffer", buffer, "0 < buffer ≤ 1")
    exact = full_precision(rewards)  # bfloat16 cannot represent 4001
    # in this form the penalty is exactly -1 at the limit
    penalty = ((limit - reply_lengths.to(exact.dtype)) / (buffer * limit) - 1).clamp(-1.0, 0.0)
    return (exact + penalty).to(rewards.dtype), torch.ones_like(rewards, dtype=torch.bool)


@keeps("binary", "non_negative", "raw")
def mask_truncated(rewards: Tensor, truncated: Tensor) -> tuple[Tensor, Tensor]:
    """Leave truncated rollouts out of training, because their reward does not show how they would
    have ended.

    trained_i = not truncated_i; the rewards are unchanged and still count in the baseline of their
    group.

    Args:
      rewards: [N], nan for an unscored rollout.
      truncated: [N] bool, True for a rollout truncated by a limit.
    Returns: `rewards` unchanged, and [N] bool, False for truncated rollouts.
    Source: overlong filtering, DAPO, Yu et al. 2025, section 3.4, arXiv:2503.14476; in TRL
      `mask_truncated_completions`. DAPO leaves out only replies at the maximum length.

    >>> mask_truncated(torch.tensor([1.0, 0.0]), torch.tensor([False, True]))
    (tensor([1., 0.]), tensor([ True, False]))
    """
    return rewards, ~truncated
