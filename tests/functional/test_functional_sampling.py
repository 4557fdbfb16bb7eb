"""Randomness by name: the hash, the distribution, and independence of everything that must not
matter."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlkit.functional import cut_distribution, gumbel_choice, gumbel_noise, mix

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _splitmix(word: int) -> int:
    """The finaliser as in the paper's Java code, on Python integers."""
    word = ((word ^ (word >> 30)) * FIRST) & WORD
    word = ((word ^ (word >> 27)) * SECOND) & WORD
    return word ^ (word >> 31)


def _unsplitmix(word: int) -> int:
    """Its inverse: an xorshift is undone by repeating it, an odd multiplier by its inverse modulo
    2^64."""
    for shift, multiplier in ((31, SECOND), (27, FIRST), (30, 1)):
        original = word
        for _ in range(64 // shift + 1):
            original = word ^ (original >> shift)
        word = (original * pow(multiplier, -1, 1 << 64)) & WORD
    return word


def _state(seed: int, counter: int) -> int:
    return _splitmix((_splitmix((seed + GOLDEN) & WORD) ^ counter) + GOLDEN & WORD)


def test_mix_agrees_with_the_published_sequence() -> None:
    """The first output of splitmix64 from state 1234567, without its lowest bit."""
    assert mix(1234567) == 6457827717110365317 >> 1


def test_mix_tells_order_number_and_sign_apart() -> None:
    names = [(), (0,), (0, 0), (1,), (-1,), (1, 2), (2, 1), (1, 2, 0), (0, 1, 2), (3, 0), (0, 3)]
    assert len({mix(*name) for name in names}) == len(names)


def test_mix_fits_int64_and_does_not_collide() -> None:
    """40,000 neighbouring names: one collision among 63-bit hashes has probability 1e-10."""
    seeds = {
        mix(0, step, prompt, sample)
        for step in range(50)
        for prompt in range(100)
        for sample in range(8)
    }
    assert len(seeds) == 40_000
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_mix_spreads_one_bit_over_all() -> None:
    """Avalanche: one changed bit of either part flips each of the 63 bits about half of the
    time."""
    flips = [bin(mix(7, 5) ^ mix(7 ^ (1 << bit), 5)).count("1") for bit in range(63)]
    flips += [bin(mix(7, 5) ^ mix(7, 5 ^ (1 << bit))).count("1") for bit in range(63)]
    mean = sum(flips) / len(flips)
    assert abs(mean - 31.5) < 5 * math.sqrt(
        63 / 4 / len(flips)
    )  # five standard errors of a binomial mean
    assert min(flips) >= 12  # five standard deviations below 31.5


def test_noise_agrees_with_a_scalar_version() -> None:
    """The whole formula on Python integers and floats: guards the shifts, which in torch carry the
    sign along."""
    seeds, counters, vocabulary = [0, 1, mix(3), -5, (1 << 63) - 1], [0, 1, 2, 1000, 1 << 40], 40
    noise = gumbel_noise(torch.tensor(seeds), torch.tensor(counters), vocabulary)
    for row, (seed, counter) in enumerate(zip(seeds, counters, strict=True)):
        for token in range(vocabulary):
            word = _splitmix((_state(seed, counter) + (token + 1) * GOLDEN) & WORD)
            u = ((word >> 33) + 0.5) / 2**31
            expected = -math.log(-math.log1p(-u))
            # float32 rounding of u and of two logarithms; near g = 0 the error is absolute
            assert noise[row, token].item() == pytest.approx(expected, rel=2e-6, abs=2e-6)


def test_argmax_draws_from_the_softmax() -> None:
    """χ² over 300,000 draws with neighbouring seeds and counters, the hardest case for a weak hash.

    6 symbols, one of probability 0.0006 (190 draws expected); χ² with 5 degrees of freedom is above
    35.9 once in 1e6.
    """
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -5.0])
    seeds = torch.arange(1000).repeat_interleave(300)
    counters = torch.arange(300).repeat(1000)
    drawn = (logits + gumbel_noise(seeds, counters, 6)).argmax(-1).bincount(minlength=6).double()
    expected = 300_000 * logits.double().softmax(-1)
    assert ((drawn - expected).square() / expected).sum() < 35.9


def test_moments_are_those_of_a_gumbel() -> None:
    """Mean 0.5772 (Euler), variance π²/6; standard errors of 1e6 draws are 0.0013 and 0.0034: five
    of each."""
    noise = gumbel_noise(torch.arange(1000), 3, 1000).double()
    assert abs(noise.mean() - 0.5772157) < 0.0065
    assert abs(noise.var() - math.pi**2 / 6) < 0.017


@pytest.mark.parametrize("neighbour", ["seed", "counter", "token", "seed and counter"])
def test_neighbours_are_independent(neighbour: str) -> None:
    """Correlation of 200,000 pairs is within 5 / √200,000 = 0.011 of 0. "seed and counter": seed +
    1, counter - 1."""
    seeds, counters = torch.arange(400), torch.full((400,), 7)
    first = gumbel_noise(seeds, counters, 501)[:, :500]
    second = {
        "seed": lambda: gumbel_noise(seeds + 1, counters, 500),
        "counter": lambda: gumbel_noise(seeds, counters + 1, 500),
        "token": lambda: gumbel_noise(seeds, counters, 501)[:, 1:],
        "seed and counter": lambda: gumbel_noise(seeds + 1, counters - 1, 500),
    }[neighbour]()
    pairs = torch.stack([first.flatten(), second.flatten()])
    assert abs(pairs.corrcoef()[0, 1]) < 0.011


def test_a_row_depends_on_its_own_seed_and_counter_alone() -> None:
    """What makes batching invisible: order, company, one counter or many, and the vocabulary's size
    change nothing."""
    seeds, counters = torch.tensor([5, 9, 5, 77]), torch.tensor([0, 4, 1, 4])
    noise = gumbel_noise(seeds, counters, 1003)  # not a multiple of a vector register
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(gumbel_noise(seeds[order], counters[order], 1003), noise[order])
    for row in range(4):
        assert torch.equal(
            gumbel_noise(seeds[row : row + 1], int(counters[row]), 1003)[0], noise[row]
        )
    assert torch.equal(gumbel_noise(seeds, counters, 17), noise[:, :17])
    assert not torch.equal(noise[0], noise[2])  # same seed, another counter


def test_the_ends_of_the_interval_are_finite() -> None:
    """u is never 0 and never 1: a seed is solved for that makes token 0 draw all zero bits, and one
    for all ones."""
    counter = 3
    words = {
        0: -math.log(-math.log1p(-(2.0**-32))),
        WORD: -math.log(24 * math.log(2)),
    }  # g = 22.2 and g = -2.81
    for word, expected in words.items():
        state = (_unsplitmix(word) - GOLDEN) & WORD
        seed = (_unsplitmix((_unsplitmix(state) - GOLDEN & WORD) ^ counter) - GOLDEN) & WORD
        seed = seed - (1 << 64) if seed >> 63 else seed
        noise = gumbel_noise(torch.tensor([seed]), counter, 1)
        assert noise.item() == pytest.approx(expected, rel=1e-6)  # float32 rounding


def test_arguments_are_left_alone() -> None:
    """The noise is made in place, but not in the caller's tensors."""
    seeds, counters = torch.tensor([1, 2]), torch.tensor([3, 4])
    gumbel_noise(seeds, counters, 5)
    assert seeds.tolist() == [1, 2]
    assert counters.tolist() == [3, 4]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"dtype of seeds is torch.float32; allowed: an integer dtype"
    ):
        gumbel_noise(torch.tensor([1.0]), 0, 5)
    with pytest.raises(ValueError, match=r"vocabulary is 0; allowed: ≥ 1"):
        gumbel_noise(torch.tensor([1]), 0, 0)


# ----------------------------------------------------------------------------- a draw in two levels


@pytest.mark.parametrize("vocabulary", [1, 2, 6, 9, 11])
def test_a_choice_draws_from_the_distribution(vocabulary: int) -> None:
    """χ² over 200,000 draws with neighbouring seeds and counters, whole and broken last blocks, one
    token of probability 0.

    Degrees of freedom are at most 9, where χ² is above 44 once in 1e6.
    """
    weights = torch.tensor([4.0, 1.0, 2.0, 0.002, 3.0, 0.5, 0.0, 5.0, 1.5, 0.3, 2.5])[:vocabulary]
    seeds, counters = torch.arange(1000).repeat_interleave(200), torch.arange(200).repeat(1000)
    drawn = (
        gumbel_choice(weights.expand(200_000, -1), seeds, counters)
        .bincount(minlength=vocabulary)
        .double()
    )
    expected = 200_000 * weights.double() / weights.sum()
    assert len(drawn) == vocabulary and not drawn[weights == 0].any()
    likely = weights > 0
    assert ((drawn - expected).square() / expected)[likely].sum() < 44


@pytest.mark.parametrize("neighbour", ["seed", "counter", "seed and counter"])
def test_choices_of_neighbours_are_independent(neighbour: str) -> None:
    """χ² of the 8 × 8 table of 200,000 pairs of draws over uniform tokens; at 49 degrees of freedom
    it is above 112 once in 1e6."""
    seeds, counters = torch.arange(1000).repeat_interleave(200), torch.arange(200).repeat(1000) * 2
    other = (
        seeds + 5000 if "seed" in neighbour else seeds,
        counters - 1 if neighbour == "seed and counter" else counters + 1,
    )
    other = (seeds + 5000, counters) if neighbour == "seed" else other
    uniform = torch.full((1, 8), 0.125).expand(200_000, -1)
    pairs = 8 * gumbel_choice(uniform, seeds, counters) + gumbel_choice(uniform, *other)
    expected = 200_000 / 64
    assert (pairs.bincount(minlength=64).double() - expected).square().sum() / expected < 112


def test_a_choice_depends_on_its_own_row_alone() -> None:
    """Order, company, one counter or many; and nothing is drawn outside of the vocabulary, whatever
    the probabilities are."""
    seeds, counters = torch.tensor([mix(1), mix(2), mix(1), mix(4)]), torch.tensor([0, 4, 1, 4])
    probabilities = torch.rand(4, 1003, generator=torch.Generator().manual_seed(0))
    drawn, order = gumbel_choice(probabilities, seeds, counters), torch.tensor([2, 0, 3, 1])
    assert torch.equal(
        gumbel_choice(probabilities[order], seeds[order], counters[order]), drawn[order]
    )
    for row in range(4):
        assert (
            gumbel_choice(probabilities[row : row + 1], seeds[row : row + 1], int(counters[row]))
            == drawn[row]
        )
    assert drawn[0] != drawn[2]
    assert (gumbel_choice(torch.full((4, 7), torch.nan), seeds, counters) < 7).all()


class Traffic(TorchDispatchMode):
    """Bytes of all tensors that operations read and write; views move none, and what is broadcast
    or gathered counts once an entry."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            given, made = (
                [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)]
                for x in ((args, kwargs), out)
            )
            most = (
                made[0].numel() if "gather" in str(func) else 1 << 62
            )  # a gather reads as many entries as it gives
            self.bytes += sum(min(t.numel(), most) * t.element_size() for t in given) + sum(
                t.numel() * t.element_size() for t in made
            )
        return out


def test_noise_moves_few_bytes() -> None:
    """At Qwen3's vocabulary: probabilities are read once (4 bytes an entry), and noise and all the
    rest move less than 4 more."""
    rows, vocabulary = 4, 151_936
    probabilities = torch.rand(rows, vocabulary)
    seeds, counters = torch.arange(rows), torch.arange(rows)
    with Traffic() as noise:
        gumbel_noise(seeds, counters, vocabulary)
    with Traffic() as choice:
        gumbel_choice(probabilities, seeds, counters)
    assert noise.bytes / rows / vocabulary > 200  # what the count is worth
    assert 4 < choice.bytes / rows / vocabulary < 8


def test_a_cut_distribution_keeps_the_fewest_likely_tokens_that_are_asked_for() -> None:
    """Against a loop over one row at a time, in every order of cuts; what is kept keeps its
    proportions."""
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(20, 12, generator=generator, dtype=torch.float64).log_softmax(-1)
    assert cut_distribution(logprobs) is logprobs
    for top_k, top_p in ((0, 0.6), (3, 1.0), (5, 0.7), (99, 0.99), (1, 0.1)):
        cut = cut_distribution(logprobs, top_k=top_k, top_p=top_p)
        for row, found in zip(logprobs.exp(), cut.exp(), strict=True):
            order = row.argsort(descending=True).tolist()[: top_k or None]
            mass, kept = 0.0, []
            for token in order:
                if mass >= top_p:
                    break
                kept.append(token)
                mass += float(row[token] / row[order].sum())
            expected = torch.zeros_like(row)
            expected[kept] = row[kept] / row[kept].sum()
            torch.testing.assert_close(found, expected)
    halves = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    cut = cut_distribution(halves.log(), top_p=0.5).exp()
    assert cut.tolist() == [1, 0, 0], "a total of exactly top_p is enough"
    with pytest.raises(ValueError, match="top_p is 0"):
        cut_distribution(logprobs, top_p=0)
