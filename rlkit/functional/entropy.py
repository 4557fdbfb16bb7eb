"""Entropy of next-token distributions, in nats."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkit.functional.masking import full_precision


def from_log_probs(log_probs: Tensor) -> Tensor:
    """Compute the entropy of distributions given as normalised log-probs.

    H = -Σ_v p_v log p_v, with 0 log 0 = 0

    Args:
      log_probs: [..., V] log-probabilities in nats; -inf for impossible tokens. Carries the
        gradient.
    Returns: [...] in nats, between 0 and log V; float32 or float64.
    Source: Shannon 1948, section 6.

    >>> from_log_probs(torch.tensor([0.0, -torch.inf]))
    tensor(0.)
    """
    log_probs = full_precision(log_probs)
    # 0 · -inf is nan, but 0 · lowest is 0
    finite = log_probs.clamp_min(torch.finfo(log_probs.dtype).min)
    # a log-prob rounded to above 0 must not make the entropy negative
    return (log_probs.exp() * -finite).sum(-1).clamp_min(0.0)


def from_logits(logits: Tensor) -> Tensor:
    """Compute the entropy of softmax(logits).

    H = -Σ_v p_v log p_v, p = softmax(logits)

    Args:
      logits: [..., V], any float dtype, after temperature; -inf for impossible tokens. Carries the
        gradient.
    Returns: [...] in nats, computed in float32 (float64 for float64 logits).
    Source: Shannon 1948, section 6. verl and TRL's PPO trainer use the equal form
      `logsumexp - Σ p · logit`. It loses digits when logits are large.

    >>> from_logits(torch.zeros(4))
    tensor(1.3863)
    """
    return from_log_probs(full_precision(logits).log_softmax(-1))
