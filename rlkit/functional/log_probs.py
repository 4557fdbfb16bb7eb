"""Log-probs of given tokens, from logits or from hidden states. From hidden states, the [M, V]
logits are never kept for the backward pass.

M is the number of scored tokens (usually all True entries of response_mask, flattened), and H is
the hidden size of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rlkit.functional._arguments import require, require_positive
from rlkit.functional.entropy import from_log_probs
from rlkit.functional.masking import fill_masked, full_precision


def token_log_probs(logits: Tensor, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Compute the log-probability of each given token under softmax(logits / temperature).

    logp_m = z_m[ids_m] - logsumexp(z_m), z = logits / temperature

    Args:
      logits: [M, V], any float dtype; carries the gradient. Computed in float32 (float64 for
        float64 logits).
      ids: [M] int64, 0 … V-1.
      temperature: the sampler's temperature, > 0 and finite; 0 (greedy) has no log-probs.
    Returns: [M] in nats, ≤ 0.
    Raises: ValueError naming the temperature.
    Source: TRL, verl and OpenRLHF also divide by the temperature before the log-softmax, so that
      the trainer scores the distribution the tokens were sampled from.

    >>> token_log_probs(
    ...     torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 0]), temperature=2.0
    ... )
    tensor([-0.6931, -0.3133])
    """
    logits = _divide_by_temperature(logits, temperature)
    return _select(logits, ids) - logits.logsumexp(-1)


def chunked_log_probs(
    hidden: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    ids: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int,
    entropy_gradient: bool = False,
    frozen_head: bool = False,
    reference: tuple[Tensor, Callable[[Tensor], Tensor]] | None = None,
) -> tuple[Tensor, ...]:
    """Compute log-probs and entropies of tokens from hidden states, `chunk_size` tokens at a time.
    With a reference, compute the exact KL too.

    KL_m = Σ_v π_v (log π_v - log ref_v), over the whole vocabulary, both policies at the same
    temperature

    The heads of policy and reference may have different numbers of rows, because either may pad the
    same vocabulary. Only ids present in both are compared. The other rows are left out before
    normalisation, so padding takes no probability.

    The results equal `token_log_probs(lm_head(hidden), ids)` and
    `entropy.from_logits(lm_head(hidden) / temperature)`.

    If gradients are enabled and there are several chunks, each chunk is checkpointed. The backward
    pass then applies the head again instead of keeping its logits, so the peak memory is chunk_size
    × V instead of M × V. Without `entropy_gradient`, the entropy costs nothing in the backward
    pass. With `frozen_head`, ∂logp_m/∂h_m is computed together with logp_m. The backward pass needs
    nothing else, so the head is applied only once.

    Args:
      hidden: [M, H] last hidden states, aligned with `ids`; carries the gradient. M = 0 is legal.
      lm_head: [m, H] → [m, V] logits; its parameters receive gradients too.
      ids: [M] int64, 0 … V-1.
      temperature: the sampler's temperature, > 0 and finite.
      chunk_size: tokens in a chunk, ≥ 1; it only affects memory and time.
      entropy_gradient: if True, the entropy carries the gradient, for an entropy bonus.
      frozen_head: the caller states that no parameter of the head needs a gradient, and that each
        output row of the head depends on one input row only.
      reference: a pair of the reference's hidden states [M, H'] at the same tokens, and its head.
        The head covers the same vocabulary, with more or fewer rows of padding. No gradient flows
        into the reference.
    Returns: log-probs [M], entropies [M] and, with a reference, KL(π‖ref) [M]; in nats, float32 or
      float64. The KL is ≥ 0 up to rounding, and its gradient flows into the policy only. It is inf,
      without a finite gradient, if the reference excludes (-inf) a token of positive probability
      under the policy. A token excluded by the policy adds 0.
    Raises: ValueError naming the argument out of range.
    Source: gradient checkpointing, Chen et al. 2016, arXiv:1604.06174.

    >>> lm_head = torch.nn.Linear(2, 4, bias=False)
    >>> logprobs, entropy = chunked_log_probs(
    ...     torch.zeros(3, 2), lm_head, torch.tensor([0, 1, 2]), chunk_size=2
    ... )
    >>> logprobs.exp().tolist(), entropy.exp().round().tolist()
    ([0.25, 0.25, 0.25], [4.0, 4.0, 4.0])
    """
    require(chunk_size >= 1, "chunk_size", chunk_size, "≥ 1")
    columns = [hidden, ids]
    head_ref = None
    if reference is not None:
        require(
            len(reference[0]) == len(hidden),
            "len(hidden of the reference)",
            len(reference[0]),
            f"{len(hidden)}, 1 per token",
        )
        columns = [hidden, ids, reference[0].detach()]
        head_ref = reference[1]
    score = partial(
        _score,
        lm_head=lm_head,
        head_ref=head_ref,
        temperature=temperature,
        entropy_gradient=entropy_gradient,
    )
    carries = torch.is_grad_enabled() and hidden.requires_grad
    if carries and frozen_head and reference is None and not entropy_gradient:
        score = partial(_WithGradient.apply, score)
    elif torch.is_grad_enabled() and len(hidden) > chunk_size:  # a single chunk keeps its logits
        score = partial(checkpoint, score, use_reentrant=False)
    pieces = zip(*[column.split(chunk_size) for column in columns], strict=True)
    return tuple(
        torch.cat(parts) for parts in zip(*[score(*piece) for piece in pieces], strict=True)
    )


def _score(
    hidden: Tensor,
    ids: Tensor,
    hidden_ref: Tensor | None = None,
    *,
    lm_head: Callable[[Tensor], Tensor],
    head_ref: Callable[[Tensor], Tensor] | None,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Tensor, ...]:
    """Compute the log-probs, KL and entropies of one chunk. The entropy comes last: when a
    checkpoint recomputes the chunk, it stops at the last tensor needed, before the entropy."""
    logits = _divide_by_temperature(lm_head(hidden), temperature)
    normaliser = logits.logsumexp(-1)  # [m], shared by log-probs, KL and entropy
    logprobs = _select(logits, ids) - normaliser
    divergence: tuple[Tensor, ...] = ()
    if hidden_ref is not None and head_ref is not None:
        with torch.no_grad():
            logits_ref = _divide_by_temperature(head_ref(hidden_ref), temperature)
            shared = min(logits.shape[-1], logits_ref.shape[-1])
            logits_ref = logits_ref[:, :shared]
            logits_ref = logits_ref - logits_ref.logsumexp(-1, keepdim=True)
        logp = (
            logits[:, :shared].log_softmax(-1)
            if shared < logits.shape[-1]
            else logits - normaliser.unsqueeze(-1)
        )
        divergence = (_divergence(logp, logits_ref),)
    with torch.set_grad_enabled(entropy_gradient):
        entropy = from_log_probs(logits - normaliser.unsqueeze(-1))
    return logprobs, entropy, *divergence


class _WithGradient(torch.autograd.Function):
    """Compute the log-probs of one chunk and the gradient of each log-prob with respect to its own
    hidden state. One backward pass of the sum gives all gradients."""

    @staticmethod
    def forward(
        ctx: Any, score: Callable[[Tensor, Tensor], tuple[Tensor, ...]], hidden: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            states = hidden.detach().requires_grad_()
            logprobs, entropy = score(states, ids)
            (gradient,) = torch.autograd.grad(logprobs.sum(), states)
        ctx.save_for_backward(gradient)
        entropy = entropy.detach()
        ctx.mark_non_differentiable(entropy)
        return logprobs.detach(), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprobs: Tensor, _: Tensor) -> tuple[None, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return None, (by_logprobs[:, None] * gradient).to(gradient.dtype), None


def _divergence(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Compute KL(π‖ref) of each row: [m, V], [m, V] → [m]. A token excluded by π adds 0, even if
    the reference excludes it too.

    Σ π is 1, so the gradient of Σ π is 0 and may be subtracted. For equal distributions the
    gradient of the KL is then exactly 0, not only up to rounding.
    """
    probabilities = logp.exp()
    gap = fill_masked(logp - logp_ref, probabilities > 0, 0.0)
    return (probabilities * gap - (probabilities - probabilities.detach())).sum(-1)


def _divide_by_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Convert logits to full precision and divide them by the temperature."""
    require_positive(temperature=temperature)
    logits = full_precision(logits)
    return logits if temperature == 1 else logits / temperature


def _select(logits: Tensor, ids: Tensor) -> Tensor:
    """Select from each row the entry of its token: [M, V], [M] → [M]."""
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
