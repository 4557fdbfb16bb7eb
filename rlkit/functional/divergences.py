"""Divergences of a student's next-token distribution from a teacher's, computed in chunks of
tokens. They are the loss of the teacher stream.

q = π is the student and carries the gradient. p = T is the teacher, a constant. ℓ_v = log q_v - log
p_v, and a is the sampled token. The literature calls KL(π‖T) reverse and KL(T‖π) forward, but `kl=`
uses these names the other way round. So the functions here are named by the order of the arguments,
student and teacher.

Every divergence takes (logq [m, V], logp [m, V], ids [m], ratio [m]) and gives [m] in nats. `ratio`
is π divided by the old policy (the sampler if `algorithm.old` is sampler), times the off-policy
correction if one is used; it carries no gradient. Only terms of the sampled token use the ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlkit.functional._arguments import require
from rlkit.functional.log_probs import _divergence, _divide_by_temperature, _select
from rlkit.functional.masking import fill_masked

BOUND = 20.0  # nats, of a log-ratio


def sampled_divergence(logq: Tensor, logp: Tensor, ids: Tensor, ratio: Tensor) -> Tensor:
    """Estimate KL(π‖T) from the sampled token by the score function: each token's advantage is
    `-ℓ_a`.

    value: `ratio · ℓ_a`
    gradient: `ratio · sg(ℓ_a) ∇log q_a`. Its expectation under π at this state is ∇KL(π‖T)

    Args:
      logq: [m, V] log-probs of the student in nats, carries the gradient.
      logp: [m, V] log-probs of the teacher in nats.
      ids: [m] int64, the sampled tokens.
      ratio: [m], without gradient.
    Returns: [m] in nats, of either sign; ℓ_a is clamped to ±20.
    Source: on-policy distillation, Lu et al. 2025 (Thinking Machines), and Gu et al. 2023
      (MiniLLM), arXiv:2306.08543. MiniLLM also credits a token with the log-ratios of the later
      tokens and samples from a mixture with the teacher; here a token has its own log-ratio alone.
      Lu et al. take the sampler's log-prob in ℓ_a, fixed before the updates. Here it is that of the
      current policy, so the gradient is that of the KL in every update.

    >>> q, p = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> sampled_divergence(q, p, torch.tensor([0]), torch.ones(1))
    tensor([0.6931])
    """
    own = _select(logq, ids)
    gap = (own - _select(logp, ids)).detach().clamp(-BOUND, BOUND)
    return ratio * gap * (1 + own - own.detach())


def kl_student_teacher(logq: Tensor, logp: Tensor, ids: Tensor, ratio: Tensor) -> Tensor:
    """Compute KL(π‖T) = Σ_v q_v ℓ_v, exact over the vocabulary. It is mode-seeking; the literature
    calls it reverse KL.

    Args: logq, logp as in `sampled_divergence`; ids and ratio are not used.
    Returns: [m] in nats, ≥ 0. For equal distributions the gradient is exactly 0.
    Source: MiniLLM, Gu et al. 2023, arXiv:2306.08543, per token.

    >>> q = torch.tensor([[0.5, 0.5]]).log()
    >>> kl_student_teacher(q, torch.tensor([[0.25, 0.75]]).log(), torch.tensor([0]), torch.ones(1))
    tensor([0.1438])
    """
    return _divergence(logq, logp)


def kl_teacher_student(logq: Tensor, logp: Tensor, ids: Tensor, ratio: Tensor) -> Tensor:
    """Compute KL(T‖π) = -Σ_v p_v ℓ_v, exact over the vocabulary. It is mass-covering; the
    literature calls it forward KL.

    The gradient with respect to log q is q - p. This equals the gradient of the KL, since Σ q is 1.
    It is exactly 0 for equal distributions.

    Args: logq, logp as in `sampled_divergence`; ids and ratio are not used.
    Returns: [m] in nats, ≥ 0. A token excluded by the teacher (p = 0) adds 0.
    Source: Hinton et al. 2015, arXiv:1503.02531, on the student's own states. Hinton et al.
      multiply the loss by the squared temperature; here nothing is multiplied.

    >>> q = torch.tensor([[0.5, 0.5]]).log()
    >>> kl_teacher_student(q, torch.tensor([[0.25, 0.75]]).log(), torch.tensor([0]), torch.ones(1))
    tensor([0.1308])
    """
    q = logq.exp()
    p = logp.exp()
    return (p * fill_masked(logp - logq, p > 0, 0.0) + q - q.detach()).sum(-1)


def jensen_shannon(
    logq: Tensor, logp: Tensor, ids: Tensor, ratio: Tensor, *, beta: float = 0.5
) -> Tensor:
    """Compute β KL(p‖M) + (1 - β) KL(q‖M), M = β p + (1 - β) q, exact over the vocabulary.

    Its gradient is (1 - β) Σ_v q_v (log q_v - log M_v) ∇log q_v. Divided by β, the divergence tends
    to KL(T‖π) for β → 0. Divided by 1 - β, it tends to KL(π‖T) for β → 1.

    Args: logq, logp as in `sampled_divergence`; ids and ratio are not used; beta: 0 < beta < 1.
    Returns: [m] in nats, 0 … log 2.
    Raises: ValueError naming beta.
    Source: GKD, Agarwal et al. 2023, arXiv:2306.13649, equation 1.

    >>> q = torch.tensor([[0.5, 0.5]]).log()
    >>> jensen_shannon(q, torch.tensor([[0.25, 0.75]]).log(), torch.tensor([0]), torch.ones(1))
    tensor([0.0338])
    """
    require(
        0 < beta < 1,
        "beta",
        beta,
        "0 < beta < 1; kl_teacher_student and kl_student_teacher are its limits",
    )
    q = logq.exp()
    p = logp.exp()
    middle = (beta * p + (1 - beta) * q).detach().log()
    own = fill_masked(logq - middle, q > 0, 0.0).detach()
    value = beta * (p * fill_masked(logp - middle, p > 0, 0.0)) + (1 - beta) * q.detach() * own
    return (value + (1 - beta) * own * (q - q.detach())).sum(-1)


def top_k_divergence(
    logq: Tensor,
    logp: Tensor,
    ids: Tensor,
    ratio: Tensor,
    *,
    k: int = 32,
    chosen_by: Literal["student", "teacher"] = "student",
) -> Tensor:
    """Compute KL(π‖T) exactly on a set S of tokens, and estimate the rest from the sampled token. S
    are the k likeliest tokens of the student or of the teacher. The result is unbiased for every k
    and S, as long as ℓ is within ±20, to which it is clamped.

    value: `Σ_S q_v ℓ_v + 1[a ∉ S] ratio · ℓ_a`
    gradient: `Σ_S q_v sg(ℓ_v) ∇log q_v + 1[a ∉ S] ratio · sg(ℓ_a) ∇log q_a`

    S does not depend on the sampled token a, so the expectation under π is the whole sum. Without
    the second term, the loss would drive probability out of S.

    Args:
      logq, logp, ids, ratio: as in `sampled_divergence`.
      k: size of S, ≥ 1; a number above V means V.
      chosen_by: S holds the likeliest tokens of the student or of the teacher. A teacher behind a
        server can only name its own likeliest tokens.
    Returns: [m] in nats, of either sign.
    Raises: ValueError naming k or chosen_by.
    Source: derived here; conditioning on S is the control variate. The truncated form is in
      arXiv:2605.11182.

    >>> q, p = torch.tensor([[0.6, 0.4]]).log(), torch.tensor([[0.9, 0.1]]).log()
    >>> [
    ...     round(float(top_k_divergence(q, p, torch.tensor([a]), torch.ones(1), k=1)), 4)
    ...     for a in (0, 1)
    ... ]
    [-0.2433, 1.143]
    """
    require(k >= 1, "k", k, "≥ 1")
    require(chosen_by in ("student", "teacher"), "chosen_by", chosen_by, "student or teacher")
    chosen = (
        (logq.detach() if chosen_by == "student" else logp).topk(min(k, logq.shape[-1])).indices
    )
    q = logq.gather(-1, chosen).exp()
    gap = (logq.gather(-1, chosen) - logp.gather(-1, chosen)).detach().clamp(-BOUND, BOUND)
    outside = (chosen != ids[:, None]).all(-1)
    return (q * gap).sum(-1) + fill_masked(sampled_divergence(logq, logp, ids, ratio), outside, 0.0)


Divergence = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def chunked_divergence(
    student: tuple[Tensor, Callable[[Tensor], Tensor]],
    teacher: tuple[Tensor, Callable[[Tensor], Tensor]],
    ids: Tensor,
    old: Tensor | None = None,
    factor: Tensor | None = None,
    *,
    divergence: Divergence,
    temperature: float = 1.0,
    chunk_size: int,
) -> Tensor:
    """Compute the divergence of student and teacher at M tokens, `chunk_size` tokens at a time.
    Chunks are checkpointed, as in `chunked_log_probs`.

    Args:
      student, teacher: a pair each of the last hidden states [M, H] before the tokens, and the
        head. No gradient flows into the teacher. If one head has more rows (padding), the extra
        rows are left out before normalisation.
      ids: [M] int64, the sampled tokens.
      old: [M] log-probs before the update in nats. None takes the student's current log-probs, so
        the ratio is 1. The log of the ratio is clamped to ±20.
      factor: [M] off-policy correction, ≥ 0. None is 1.
      divergence: a function of this file.
      temperature: > 0, applied to student and teacher.
      chunk_size: tokens in a chunk, ≥ 1.
    Returns: [M] in nats.
    Raises: ValueError unless the teacher has one hidden state for each token.
    Source: Wijmans et al. 2024, arXiv:2411.09009, for computing logits in chunks; their kernel is
      not used.

    >>> states, head = torch.tensor([[1.0, 0.0]]), lambda hidden: hidden
    >>> chunked_divergence(
    ...     (states, head),
    ...     (-states, head),
    ...     torch.tensor([0]),
    ...     divergence=kl_student_teacher,
    ...     chunk_size=1,
    ... )
    tensor([0.4621])
    """
    hidden, head = student
    states, teacher_head = teacher
    require(
        len(states) == len(hidden),
        "len(hidden of the teacher)",
        len(states),
        f"{len(hidden)}, 1 per token",
    )
    nothing = hidden.new_zeros(len(hidden))
    columns = [
        hidden,
        states.detach(),
        ids,
        nothing if old is None else old,
        nothing + 1 if factor is None else factor,
    ]

    def score(
        hidden: Tensor, states: Tensor, ids: Tensor, before: Tensor, factor: Tensor
    ) -> Tensor:
        logits = _divide_by_temperature(head(hidden), temperature)
        with torch.no_grad():
            theirs = _divide_by_temperature(teacher_head(states), temperature)
            shared = min(logits.shape[-1], theirs.shape[-1])
            logp = theirs[:, :shared].log_softmax(-1)
        logq = logits[:, :shared].log_softmax(-1)
        ratio = (
            factor
            if old is None
            else factor * (_select(logq, ids).detach() - before).clamp(-BOUND, BOUND).exp()
        )
        return divergence(logq, logp, ids, ratio)

    several = torch.is_grad_enabled() and len(hidden) > chunk_size
    run = partial(checkpoint, score, use_reentrant=False) if several else score
    return torch.cat(
        [
            run(*piece)
            for piece in zip(*[column.split(chunk_size) for column in columns], strict=True)
        ]
    )
