"""Log-probs of tokens, whole and chunk by chunk."""

import math
import weakref

import pytest
import torch
from torch import Tensor

from parametrise import each
from rlkit.functional import chunked_log_probs, from_logits, log_probs, token_log_probs


def _problem(
    m: int = 11, h: int = 6, v: int = 9, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(m, h, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(v, h, generator=generator, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(v, (m,), generator=generator)


def test_by_hand() -> None:
    """Odds 3 : 1 are p = 3/4; at temperature 2 they are √3 : 1, p = √3 / (√3 + 1)."""
    logits, ids = torch.tensor([[math.log(3.0), 0.0]]), torch.tensor([0])
    close = {"abs": 1e-6}  # float32 rounding of values of order 1
    assert token_log_probs(logits, ids).item() == pytest.approx(math.log(0.75), **close)
    root = math.sqrt(3)
    assert token_log_probs(logits, ids, temperature=2.0).item() == pytest.approx(
        math.log(root / (root + 1)), **close
    )


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_temperatures_without_log_probs_are_refused(temperature: float) -> None:
    hidden, weight, ids = _problem()
    with pytest.raises(ValueError, match=r"temperature is .*allowed: > 0"):
        token_log_probs(hidden @ weight.T, ids, temperature=temperature)
    with pytest.raises(ValueError, match=r"temperature is .*allowed: > 0"):
        chunked_log_probs(
            hidden, lambda x: x @ weight.T, ids, temperature=temperature, chunk_size=4
        )


def test_chunk_size_below_one_is_refused() -> None:
    hidden, weight, ids = _problem()
    with pytest.raises(ValueError, match=r"chunk_size is 0; allowed: ≥ 1"):
        chunked_log_probs(hidden, lambda x: x @ weight.T, ids, chunk_size=0)


def test_half_precision_logits_are_normalised_in_float32() -> None:
    """In bfloat16 the log-softmax over 500 tokens would be off by up to 0.03."""
    logits = torch.randn(20, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.arange(20)
    exact = logits.double().log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    got = token_log_probs(logits, ids, temperature=0.7)
    assert got.dtype == torch.float32
    exact = (logits.double() / 0.7).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(
        got.double(), exact, rtol=0, atol=5e-6
    )  # float32 rounding of values of order 10


@each("chunk_size", [1, 4, 11, 100])
@each("temperature", [1.0, 0.6])
@each("entropy_gradient", [False, True])
def test_chunked_equals_the_naive_form(
    chunk_size: int, temperature: float, entropy_gradient: bool
) -> None:
    """Values and the gradients into the hidden states and into the head."""
    hidden, weight, ids = _problem()
    logits = hidden @ weight.T
    logp = (logits / temperature).log_softmax(-1)
    naive_entropy = -(logp.exp() * logp).sum(-1)
    naive = logp[torch.arange(11), ids]
    scale = torch.linspace(-1, 2, 11, dtype=torch.float64)
    target = (naive * scale).sum() + (naive_entropy * scale.flip(0)).sum() * entropy_gradient
    expected = torch.autograd.grad(target, (hidden, weight))

    got, entropy = chunked_log_probs(
        hidden,
        lambda x: x @ weight.T,
        ids,
        temperature=temperature,
        chunk_size=chunk_size,
        entropy_gradient=entropy_gradient,
    )
    loss = (got * scale).sum() + ((entropy * scale.flip(0)).sum() if entropy_gradient else 0.0)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    close = {"rtol": 0, "atol": 1e-13}  # float64 rounding over sums of 11 terms of order 1
    torch.testing.assert_close(got, naive, **close)
    torch.testing.assert_close(entropy, naive_entropy, **close)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **close)


@each("chunk_size", [4, 100])
@each("temperature", [1.0, 0.6])
def test_under_a_frozen_head_the_states_get_the_same_gradient(
    chunk_size: int, temperature: float
) -> None:
    """And the head runs once for each chunk, the backward pass included."""
    hidden, weight, ids = _problem()
    scale = torch.linspace(-1, 2, 11, dtype=torch.float64)
    calls: list[int] = []

    def head(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x @ weight.detach().T

    found = []
    for frozen in (True, False):
        logprobs, entropy = chunked_log_probs(
            hidden, head, ids, temperature=temperature, chunk_size=chunk_size, frozen_head=frozen
        )
        before = len(calls)
        (gradient,) = torch.autograd.grad((logprobs * scale).sum(), hidden)
        assert not frozen or len(calls) == before == math.ceil(11 / chunk_size)
        assert not entropy.requires_grad
        found.append((logprobs, entropy, gradient))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def test_chunked_equals_token_log_probs_in_bfloat16() -> None:
    hidden, weight, ids = _problem(dtype=torch.bfloat16)
    logits = hidden @ weight.T
    got, entropy = chunked_log_probs(
        hidden, lambda x: x @ weight.T, ids, temperature=0.8, chunk_size=11
    )
    assert got.dtype == entropy.dtype == torch.float32
    assert torch.equal(got, token_log_probs(logits, ids, temperature=0.8))
    torch.testing.assert_close(
        entropy, from_logits(logits.float() / 0.8), rtol=0, atol=2e-6
    )  # float32, order 1


def test_entropy_carries_a_gradient_only_where_asked() -> None:
    hidden, weight, ids = _problem()
    for asked in (False, True):
        logprobs, entropy = chunked_log_probs(
            hidden, lambda x: x @ weight.T, ids, chunk_size=3, entropy_gradient=asked
        )
        assert logprobs.requires_grad
        assert entropy.requires_grad is asked


def test_no_logits_survive_the_forward_pass() -> None:
    """What chunking is for: the graph holds hidden states, never [m, V]; the head runs once more
    per chunk instead."""
    hidden, weight, ids = _problem()
    alive: list[weakref.ref[Tensor]] = []

    def head(x: Tensor) -> Tensor:
        logits = x @ weight.T
        alive.append(weakref.ref(logits))
        return logits

    logprobs, _ = chunked_log_probs(hidden, head, ids, chunk_size=4)
    assert len(alive) == 3  # ⌈11 / 4⌉
    assert all(logits() is None for logits in alive)
    logprobs.sum().backward()
    assert len(alive) == 6


def test_a_detached_entropy_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recomputation of a chunk ends before the entropy: it would be two more passes over [m, V]
    for nothing."""
    hidden, weight, ids = _problem()
    calls: list[int] = []
    original = log_probs.from_log_probs
    monkeypatch.setattr(log_probs, "from_log_probs", lambda x: (calls.append(1), original(x))[1])
    chunked_log_probs(hidden, lambda x: x @ weight.T, ids, chunk_size=4)[0].sum().backward()
    assert len(calls) == 3


def test_no_tokens_at_all() -> None:
    hidden, weight, ids = _problem(m=0)
    logprobs, entropy = chunked_log_probs(hidden, lambda x: x @ weight.T, ids, chunk_size=4)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()  # an empty micro-batch still takes part in the backward pass
    assert weight.grad is not None


def test_lengths_that_differ_are_an_error() -> None:
    hidden, weight, ids = _problem()
    with pytest.raises((ValueError, RuntimeError)):
        chunked_log_probs(hidden, lambda x: x @ weight.T, ids[:4], chunk_size=4)


def _reference() -> tuple[Tensor, Tensor]:
    """Hidden states of another width, and a head over the same nine tokens."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (
        torch.randn(n, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        for n in (11, 9)
    )
    return hidden, weight


@each("chunk_size", [1, 4, 11, 100])
@each("temperature", [1.0, 0.6])
@each("entropy_gradient", [False, True])
def test_exact_divergence_equals_the_naive_form(
    chunk_size: int, temperature: float, entropy_gradient: bool
) -> None:
    """Its value and its gradient into the policy, beside those of the log-probs; none into the
    reference."""
    hidden, weight, ids = _problem()
    hidden_ref, weight_ref = _reference()
    logp, ref = (
        (h @ w.T / temperature).log_softmax(-1)
        for h, w in ((hidden, weight), (hidden_ref, weight_ref))
    )
    naive = (logp.exp() * (logp - ref.detach())).sum(-1)
    scale = torch.linspace(-1, 2, 11, dtype=torch.float64)
    expected = torch.autograd.grad(
        (naive * scale).sum() + logp[torch.arange(11), ids].sum(), (hidden, weight)
    )
    logprobs, entropy, divergence = chunked_log_probs(
        hidden,
        lambda x: x @ weight.T,
        ids,
        temperature=temperature,
        chunk_size=chunk_size,
        entropy_gradient=entropy_gradient,
        reference=(hidden_ref, lambda x: x @ weight_ref.T),
    )
    ((divergence * scale).sum() + logprobs.sum()).backward()
    close = {"rtol": 0, "atol": 1e-13}  # float64 rounding over sums of 11 terms of order 1
    torch.testing.assert_close(divergence, naive, **close)
    torch.testing.assert_close(entropy, -(logp.exp() * logp).sum(-1), **close)
    for ours, theirs in zip((hidden.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs, **close)
    assert hidden_ref.grad is None and weight_ref.grad is None


@pytest.mark.parametrize("rows, rows_ref", [(9, 7), (7, 9)])
def test_exact_divergence_of_heads_with_unequal_padding(rows: int, rows_ref: int) -> None:
    """Both are normalised over the ids that both have; log-probs and entropies stay those of the
    whole head."""
    hidden, weight, ids = _problem()
    hidden_ref, weight_ref = _reference()
    heads = [lambda x, w=w, n=n: x @ w[:n].T for w, n in ((weight, rows), (weight_ref, rows_ref))]
    logp, ref = (
        (h @ w[:7].T).log_softmax(-1) for h, w in ((hidden, weight), (hidden_ref, weight_ref))
    )
    ids = ids % 7
    logprobs, entropy, divergence = chunked_log_probs(
        hidden, heads[0], ids, chunk_size=4, reference=(hidden_ref, heads[1])
    )
    close = {"rtol": 0, "atol": 1e-13}  # float64 rounding over sums of 7 terms of order 1
    torch.testing.assert_close(divergence, (logp.exp() * (logp - ref)).sum(-1), **close)
    plain = chunked_log_probs(hidden, heads[0], ids, chunk_size=4)
    torch.testing.assert_close((logprobs, entropy), plain, **close)


def test_exact_divergence_by_hand() -> None:
    """¾ and ¼ against ½ and ½: ¾ log 1.5 + ¼ log 0.5."""
    logits, even = (
        torch.tensor([[math.log(3.0), 0.0]], dtype=torch.float64),
        torch.zeros(1, 2, dtype=torch.float64),
    )
    given = {"chunk_size": 1, "reference": (even, lambda x: x)}
    _, _, divergence = chunked_log_probs(logits, lambda x: x, torch.tensor([0]), **given)
    assert divergence.item() == pytest.approx(
        0.75 * math.log(1.5) + 0.25 * math.log(0.5), abs=1e-15
    )  # float64 rounding


def test_exact_divergence_of_tokens_that_are_excluded() -> None:
    """What the policy excludes adds nothing, with or without the reference; what the reference
    alone excludes is infinite."""
    inf = math.inf
    logits = torch.tensor(
        [[0.0, 0.0, -inf], [0.0, 0.0, -inf], [0.0, -1e4, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64
    )
    ref = torch.tensor(
        [[0.0, 0.0, -inf], [0.0, 0.0, 0.0], [0.0, -inf, 0.0], [0.0, 0.0, -inf]], dtype=torch.float64
    )
    given = {"chunk_size": 3, "reference": (ref, lambda x: x)}
    _, _, divergence = chunked_log_probs(
        logits, lambda x: x, torch.zeros(4, dtype=torch.int64), **given
    )
    assert divergence.tolist() == pytest.approx([0.0, math.log(1.5), 0.0, inf], abs=1e-15)
    finite = logits[:3].detach().requires_grad_()
    given = {"chunk_size": 3, "reference": (ref[:3], lambda x: x)}
    chunked_log_probs(finite, lambda x: x, torch.zeros(3, dtype=torch.int64), **given)[
        2
    ].sum().backward()
    torch.testing.assert_close(
        finite.grad, torch.zeros_like(finite), rtol=0, atol=1e-15
    )  # rounding; log 1.5 is a constant here


def test_exact_divergence_of_equal_policies_is_zero_up_to_rounding() -> None:
    hidden, weight, ids = _problem(dtype=torch.float32)
    _, _, divergence = chunked_log_probs(
        hidden,
        lambda x: x @ weight.T,
        ids,
        chunk_size=4,
        reference=(hidden, lambda x: x @ weight.T),
    )
    assert divergence.tolist() == [0.0] * 11
    near = chunked_log_probs(
        hidden,
        lambda x: x @ weight.T,
        ids,
        chunk_size=4,
        reference=(hidden * 1.001, lambda x: x @ weight.T),
    )[2]
    assert (near > -1e-6).all()  # float32 rounding of nine terms of order 1


def test_no_logits_of_the_reference_survive_the_forward_pass() -> None:
    """Both heads run once a chunk forward and once backward; nothing of width V is kept in
    between."""
    hidden, weight, ids = _problem()
    hidden_ref, weight_ref = _reference()
    alive: list[weakref.ref[Tensor]] = []

    def head(x: Tensor) -> Tensor:
        logits = x @ (weight if x.shape[1] == 6 else weight_ref).T
        alive.append(weakref.ref(logits))
        return logits

    *_, divergence = chunked_log_probs(
        hidden, head, ids, chunk_size=4, reference=(hidden_ref, head)
    )
    assert len(alive) == 6 and all(logits() is None for logits in alive)
    divergence.sum().backward()
    assert len(alive) == 12


def test_reference_without_tokens_or_with_other_tokens() -> None:
    hidden, weight, ids = _problem(m=0)
    _, weight_ref = _reference()
    empty = torch.zeros(0, 4, dtype=torch.float64)
    _, _, divergence = chunked_log_probs(
        hidden,
        lambda x: x @ weight.T,
        ids,
        chunk_size=4,
        reference=(empty, lambda x: x @ weight_ref.T),
    )
    assert divergence.shape == (0,)
    with pytest.raises(ValueError, match=r"reference.* is 1; allowed: 0"):
        chunked_log_probs(
            hidden,
            lambda x: x @ weight.T,
            ids,
            chunk_size=4,
            reference=(torch.zeros(1, 4), lambda x: x),
        )


def test_without_a_reference_there_are_two() -> None:
    hidden, weight, ids = _problem()
    assert len(chunked_log_probs(hidden, lambda x: x @ weight.T, ids, chunk_size=4)) == 2
