"""Randomness without generator state: a hash of integers, and Gumbel noise computed from seed,
counter and token.

Sampling is Gumbel-max in two levels, an exact draw from the softmax (`gumbel_choice`). A rollout
therefore draws the same tokens in any batch, in any row, on any rank and on any device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlkit.functional._arguments import require

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, odd: the increment of splitmix64
# shift and multiplier of the two mixing rounds of splitmix64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_WORD = (1 << 64) - 1


def mix(*parts: int) -> int:
    """Hash any number of integers into one 63-bit seed, for example run seed, step, prompt position
    and sample index.

    h ← finalise((h xor part) + golden), from h = 0, for each part in turn; the result is h without
    its lowest bit.

    Args:
      parts: any integers, taken modulo 2^64; order and number matter: mix(1, 2) ≠ mix(2, 1), mix(0)
        ≠ mix(0, 0).
    Returns: 0 … 2^63 - 1, so that it fits an int64 tensor; the same on every machine.
    Source: `mix64variant13` of Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
      generators", as in the common splitmix64. Combining the parts by xor is our own.

    >>> mix(1, 2), mix(2, 1)
    (6804074658870690613, 8085905411993364802)
    """
    state = 0
    for part in parts:
        state = ((state ^ (part & _WORD)) + _GOLDEN) & _WORD
        for shift, multiplier in _ROUNDS:
            state = ((state ^ (state >> shift)) * multiplier) & _WORD
        state ^= state >> 31
    return state >> 1


def gumbel_noise(seeds: Tensor, counter: int | Tensor, vocabulary: int) -> Tensor:
    """Generate standard Gumbel noise for every token of the vocabulary. Each number is a pure
    function of (seed, counter, token).

    g = -log(-log(1 - u)), u = (top 31 bits of splitmix64(state(seed, counter), token) + ½) / 2^31,
    0 < u < 1

    The largest g come from the smallest u, where float32 is most precise. g reaches 22, so a token
    of probability 1e-9 is still drawn with the right probability. The bits are equal on every
    device; the two logarithms may differ in the last place.

    Args:
      seeds: [B] integers, one for each rollout, from `mix`.
      counter: number of tokens drawn by the rollout so far, one number for all rows or [B].
      vocabulary: V ≥ 1.
    Returns: [B, V] float32 on the device of `seeds`, always finite; row b depends on seeds[b] and
      counter[b] alone, and entry v does not depend on V.
    Raises: ValueError if `seeds` are not integers or `vocabulary` is below 1.
    Source: Gumbel-max, Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030. splitmix64 as in `mix`.

    >>> gumbel_noise(torch.tensor([7, 8]), 0, 3).argmax(-1)
    tensor([1, 2])
    """
    require(vocabulary >= 1, "vocabulary", vocabulary, "≥ 1")
    require(
        not seeds.is_floating_point() and not seeds.is_complex(),
        "dtype of seeds",
        seeds.dtype,
        "an integer dtype",
    )
    state = _finalise(seeds.to(torch.int64, copy=True).add_(_wrap_signed(_GOLDEN)))  # [B]
    state = _finalise(state.bitwise_xor_(counter).add_(_wrap_signed(_GOLDEN)))
    tokens = torch.arange(1, vocabulary + 1, device=seeds.device) * _wrap_signed(_GOLDEN)  # [V]
    # [B, V]; the last xor of splitmix64 leaves its top 31 bits alone
    bits = _mix_words(state.unsqueeze(-1) + tokens)
    bits.bitwise_right_shift_(33).bitwise_and_((1 << 31) - 1)
    # float32 would round the largest u to 1
    u = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def gumbel_choice(probabilities: Tensor, seeds: Tensor, counter: int | Tensor) -> Tensor:
    """Draw one token for each row. The draw is a pure function of (seed, counter) and of the row's
    probabilities.

    The vocabulary is divided into blocks of `s = ⌈√V⌉` tokens. With the noise
    `g = gumbel_noise(seeds, counter, ⌊V/s⌋ + 1 + s)`:

        block = argmax_b (log Σ_{v in b} p_v + g_b)
        token = argmax_{v in block} (log p_v + g_{⌊V/s⌋ + 1 + v mod s})

    Both are Gumbel-max draws with independent noise, so exactly
    `P(token) = P(block) · p_token / P(block) = p_token`. All blocks use the same noise for their
    tokens, but tokens are drawn from one block only, so each noise number is used once. A row needs
    about 2√V noise numbers instead of V. At V = 151,936 this moves 1.4 bytes of memory per token of
    the vocabulary; one noise number per token would move about 270 bytes.

    Args:
      probabilities: [B, V] ≥ 0, each row with a positive sum, which need not be 1.
      seeds: [B] integers.
      counter: one number or [B], as in `gumbel_noise`.
    Returns: [B] int64. A token of probability 0 is never drawn.
    Source: Gumbel-max, Maddison et al. 2014, arXiv:1411.0030: the maximum over a set is again a
      Gumbel variable, located at the log of the set's total probability.

    >>> gumbel_choice(torch.tensor([[0.1, 0.2, 0.7]]).expand(4, 3), torch.arange(4), 0)
    tensor([0, 0, 1, 2])
    """
    vocabulary = probabilities.shape[-1]
    size = math.isqrt(vocabulary - 1) + 1
    whole = vocabulary // size  # full blocks; the rest is one more block, perhaps empty
    noise = gumbel_noise(seeds, counter, whole + 1 + size)
    mass = probabilities[:, : whole * size].unflatten(1, (whole, size)).sum(-1)
    mass = torch.cat([mass, probabilities[:, whole * size :].sum(-1, keepdim=True)], -1)
    block = mass.log_().add_(noise[:, : whole + 1]).argmax(-1, keepdim=True)
    tokens = block * size + torch.arange(size, device=probabilities.device)  # [B, s]
    inside = probabilities.gather(1, tokens.clamp(max=vocabulary - 1)).masked_fill_(
        tokens >= vocabulary, 0.0
    )
    return tokens.gather(1, inside.log_().add_(noise[:, whole + 1 :]).argmax(-1, keepdim=True))[
        :, 0
    ].clamp_(max=vocabulary - 1)


def cut_distribution(logprobs: Tensor, *, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """Keep only the most likely tokens of a distribution, and normalise the distribution again.
    First keep the `top_k` most likely tokens, then the nucleus of `top_p`.

    The nucleus is the smallest set of most likely tokens with a total probability of at least
    top_p.

    Args:
      logprobs: [..., V], normalised, in nats.
      top_p: total probability to keep, 0 < top_p ≤ 1; 1 keeps all tokens.
      top_k: number of tokens to keep, ≥ 0; 0 keeps all tokens. Tokens tied for the last place are
        all kept, for both limits.
    Returns: [..., V] in nats, -inf for tokens not kept. With top_p = 1 and top_k = 0, the input
      itself.
    Raises: ValueError for a top_p or top_k out of range.
    Source: nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751; top-k, Fan et al. 2018,
      arXiv:1805.04833.

    >>> cut_distribution(torch.tensor([0.5, 0.3, 0.2]).log(), top_p=0.7).exp()
    tensor([0.6250, 0.3750, 0.0000])
    """
    require(0 < top_p <= 1, "top_p", top_p, "> 0 and ≤ 1")
    require(top_k >= 0, "top_k", top_k, "≥ 0; 0 keeps all tokens")
    if top_k:
        last = logprobs.topk(min(top_k, logprobs.shape[-1])).values[..., -1:]
        logprobs = logprobs.where(logprobs >= last, -torch.inf).log_softmax(-1)
    if top_p < 1:
        ranked = logprobs.sort(descending=True).values
        probabilities = ranked.exp()
        before = probabilities.cumsum(-1) - probabilities  # the mass of all likelier tokens
        last = ranked.where(before < top_p, torch.inf).amin(-1, keepdim=True)
        logprobs = logprobs.where(logprobs >= last, -torch.inf).log_softmax(-1)
    return logprobs


def _finalise(words: Tensor) -> Tensor:
    """Apply the whole finaliser of splitmix64, in place."""
    words = _mix_words(words)
    return words.bitwise_xor_((words >> 31) & ((1 << 33) - 1))


def _mix_words(words: Tensor) -> Tensor:
    """Apply the finaliser's two rounds, in place: w ← (w xor w >>> shift) × multiplier modulo 2^64.

    Shifts of int64 carry the sign along, so the mask makes them logical; multiplication wraps
    around.
    """
    shifted = torch.empty_like(words)
    for shift, multiplier in _ROUNDS:
        torch.bitwise_right_shift(words, shift, out=shifted)
        words.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1)).mul_(
            _wrap_signed(multiplier)
        )
    return words


def _wrap_signed(word: int) -> int:
    """Return the int64 with the same bits as an unsigned 64-bit word."""
    return word - (1 << 64) if word >> 63 else word
