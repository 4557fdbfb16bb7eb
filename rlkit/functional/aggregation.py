"""Weights [B, T]: how much each token counts. They are computed over the whole update batch.

The loss is `Σ weights × loss per token`, summed over all micro-batches. No mean is taken within a
micro-batch, so a split into micro-batches never changes the gradient. Weights have torch's default
dtype, float32 in a run, and are 0 where the mask is False. The weights sum to 1 unless a function's
docstring says otherwise, and are all 0 if nothing is trained. "Sequence" means all trained tokens
of one rollout, even if the rollout fills several rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkit.functional._arguments import require_positive
from rlkit.functional.masking import segment_sum


def token_mean(response_mask: Tensor) -> Tensor:
    """Give every trained token the same weight, so long rollouts count more.

    w_it = m_it / Σ m

    The denominator depends on the sampled lengths. If the policy decides the length, the expected
    update of a small batch is therefore not along the policy gradient. For a large batch it is.

    Args:
      response_mask: [B, T] bool, of the whole update batch.
    Returns: [B, T]; sums to 1.
    Source: DAPO, Yu et al. 2025, section 3.3, arXiv:2503.14476; in TRL `dapo`, in verl
      `token-mean`. As written, the paper takes the mean within each prompt (`prompt_mean`).

    >>> token_mean(torch.tensor([[True, True], [True, False]]))
    tensor([[0.3333, 0.3333],
            [0.3333, 0.0000]])
    """
    return response_mask.to(torch.get_default_dtype()) / response_mask.sum().clamp_min(1)


def sequence_mean(response_mask: Tensor, rollout_ids: Tensor) -> Tensor:
    """Give every rollout the same weight, shared equally by its tokens. Tokens of long rollouts
    count less.

    w_it = m_it / (n |y_j|), where j is the rollout of row i, |y_j| counts its trained tokens over
    all its rows, and n counts the rollouts with a trained token

    If the policy decides the length, the expected update is not along the policy gradient: late
    tokens of a rollout count less (docs/prove.md). A rollout without a trained token does not count
    in n. So the weights sum to 1 whatever is masked. TRL counts such a rollout, and so does
    verl if it is given a global batch size. This shrinks the loss of all others.

    Args:
      response_mask: [B, T] bool, of the whole update batch.
      rollout_ids: [B] int64, 0 … N-1.
    Returns: [B, T]; sums to 1.
    Source: GRPO, Shao et al. 2024 eq. 3, arXiv:2402.03300; in TRL `grpo`, in verl
      `seq-mean-token-mean`.

    >>> sequence_mean(torch.tensor([[True, True], [True, False]]), torch.tensor([0, 1]))
    tensor([[0.2500, 0.2500],
            [0.5000, 0.0000]])
    """
    return _equal_shares(response_mask, rollout_ids)


def sequence_sum(response_mask: Tensor, rollout_ids: Tensor, *, constant: float) -> Tensor:
    """Sum over a rollout's tokens, divide by a constant, and take the mean over rollouts. The
    weight of a token does not depend on any length.

    w_it = m_it / (N · constant), for N rollouts in the batch

    The weights sum to mean |y| / constant and *not* to 1. Rollouts without a trained token count in
    N, because this form avoids a denominator that depends on the samples.

    Args:
      response_mask: [B, T] bool, of the whole update batch.
      rollout_ids: [B] int64.
      constant: > 0, in tokens; usually the largest number of tokens allowed in a rollout.
    Returns: [B, T].
    Raises: ValueError naming the constant.
    Source: Dr. GRPO, Liu et al. 2025, section 3.2, arXiv:2503.20783; in TRL `dr_grpo`. The
      constant is that of the authors' code. verl's `seq-mean-token-sum-norm` divides by the padded
      length unless told otherwise, and counts no empty rollout unless given a global batch size.

    >>> sequence_sum(torch.tensor([[True, True], [True, False]]), torch.tensor([0, 1]), constant=4)
    tensor([[0.1250, 0.1250],
            [0.1250, 0.0000]])
    """
    require_positive(constant=constant)
    return response_mask / (rollout_ids.unique().numel() * constant)


def prompt_mean(response_mask: Tensor, rollout_ids: Tensor, group_ids: Tensor) -> Tensor:
    """Give every prompt the same weight, shared equally by all tokens of its rollouts.

    w_it = m_it / (T_g n), where g is the group of row i's rollout, T_g counts its trained tokens,
    and n counts the groups with T_g ≥ 1

    Args:
      response_mask: [B, T] bool, of the whole update batch.
      rollout_ids: [B] int64, indices into `group_ids`.
      group_ids: [N] any integers.
    Returns: [B, T]; sums to 1. A prompt without a trained token does not count in n.
    Source: the objective of DAPO as written, Yu et al. 2025 eq. 8, arXiv:2503.14476, an expectation
      over prompts of token means; compared with the other forms in Khatri et al. 2025 (ScaleRL),
      arXiv:2510.13786.

    >>> response_mask = torch.tensor([[True, True], [True, False], [True, True]])
    >>> prompt_mean(response_mask, torch.tensor([0, 1, 2]), torch.tensor([7, 7, 8]))
    tensor([[0.1667, 0.1667],
            [0.1667, 0.0000],
            [0.2500, 0.2500]])
    """
    _, group = group_ids.unique(return_inverse=True)
    return _equal_shares(response_mask, group[rollout_ids])


def _equal_shares(response_mask: Tensor, owners: Tensor) -> Tensor:
    """Return weights: every owner in `owners` [B] with a trained token gets the same share, and its
    tokens divide this share equally."""
    tokens = segment_sum(response_mask, owners)
    # [B], in the default dtype; the counts before it are exact integers
    share = 1.0 / (tokens[owners] * (tokens > 0).sum()).clamp_min(1)
    return response_mask * share.unsqueeze(-1)
