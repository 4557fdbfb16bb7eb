"""Every divergence has the value and the gradient of its definition, by enumeration over four
tokens in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import rlkit.functional as F
from parametrise import each

V = 4
GENERATOR = torch.Generator().manual_seed(0)
Z, P = (
    torch.randn(V, dtype=torch.float64, generator=GENERATOR),
    torch.randn(V, dtype=torch.float64, generator=GENERATOR).softmax(0),
)


def kl(a, b):
    return (a * (a / b).log()).sum()


# function → divergence of q, p; which carries the gradient of the state's own distribution alone
DEFINITIONS = {
    F.sampled_divergence: lambda q: kl(q, P),
    F.kl_student_teacher: lambda q: kl(q, P),
    F.kl_teacher_student: lambda q: kl(P, q),
    F.jensen_shannon: lambda q: 0.5 * kl(P, (P + q) / 2) + 0.5 * kl(q, (P + q) / 2),
    **{partial(F.top_k_divergence, k=k): lambda q: kl(q, P) for k in (1, 2, V)},
}


@each("function, definition", DEFINITIONS.items())
def test_value_and_gradient_are_those_of_the_definition(function, definition):
    """Under samples of the policy, and under those of another with the ratio."""
    for drawn in (Z.softmax(0), torch.full((V,), 0.25, dtype=torch.float64)):
        z = Z.clone().requires_grad_()
        ratio = z.softmax(0).detach() / drawn
        rows = z.log_softmax(0).expand(V, V), P.log().expand(V, V), torch.arange(V), ratio
        expected = (drawn * function(*rows)).sum()
        (found,) = torch.autograd.grad(expected, z)
        exact = definition(z.softmax(0))
        (wanted,) = torch.autograd.grad(exact, z)
        if function not in (F.kl_student_teacher, F.kl_teacher_student, F.jensen_shannon):
            assert torch.allclose(expected, exact, atol=1e-10)
        assert torch.allclose(found, wanted, rtol=0, atol=1e-10)


@each(
    "function",
    [
        F.sampled_divergence,
        F.kl_student_teacher,
        F.kl_teacher_student,
        F.jensen_shannon,
        F.top_k_divergence,
    ],
)
def test_a_teacher_that_is_the_policy_has_no_gradient(function):
    z = Z[None].clone().requires_grad_()
    value = function(
        z.log_softmax(-1),
        z.detach().log_softmax(-1),
        torch.tensor([1]),
        torch.ones(1, dtype=torch.float64),
    )
    (gradient,) = torch.autograd.grad(value.sum(), z)
    assert value.abs().max() < 1e-15 and gradient.abs().max() < 1e-15


def test_chunks_and_padding_rows_change_nothing():
    hidden = torch.randn(5, 3, dtype=torch.float64, generator=GENERATOR)
    head, wide = (
        torch.nn.Linear(3, V, bias=False).double(),
        torch.nn.Linear(3, V + 2, bias=False).double(),
    )
    given = (hidden.requires_grad_(), head), (hidden.detach(), wide), torch.tensor([0, 1, 2, 3, 0])
    whole = F.chunked_divergence(*given, divergence=F.kl_student_teacher, chunk_size=8)
    parts = F.chunked_divergence(*given, divergence=F.kl_student_teacher, chunk_size=2)
    wanted = (
        head(hidden).softmax(-1)
        * (head(hidden).log_softmax(-1) - wide(hidden)[:, :V].log_softmax(-1))
    ).sum(-1)
    assert torch.allclose(whole, wanted, rtol=0, atol=1e-12) and torch.allclose(
        parts, whole, rtol=0, atol=1e-12
    )
    gradients = [torch.autograd.grad(value.sum(), hidden)[0] for value in (whole, parts)]
    assert torch.allclose(*gradients, rtol=0, atol=1e-12)


def test_beta_and_k_out_of_range_are_refused():
    given = Z.log_softmax(-1)[None], P.log()[None], torch.tensor([0]), torch.ones(1)
    with pytest.raises(ValueError, match="beta"):
        F.jensen_shannon(*given, beta=1.0)
    with pytest.raises(ValueError, match="k is 0"):
        F.top_k_divergence(*given, k=0)
