"""SmolLM2-135M-Instruct in float32: the engines, the trainer and a plain forward of transformers
give each sampled token the same log-prob, within 1e-4 nats.

The bound is a tenth of what a run's start allows. Sums in another order leave about 1e-5 here.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlkit.engines import Cached
from rlkit.engines.cached.attention import use_attention
from rlkit.functional import mix
from rlkit.models import LoRA, add_lora, forward_logprobs, load_policy, pack
from rlkit.system.adapters import base_model
from rlkit.types import Generation, Policy

pytestmark = pytest.mark.slow

BOUND = 1e-4
Turn = tuple[tuple[int, ...], Generation]  # a prompt and its reply


@pytest.fixture(scope="module")
def plain(smollm2):
    return load_policy(path=f"get:{smollm2}")


@pytest.fixture(scope="module")
def adapted(plain):
    """With adapters of rank 16 that change what the model says."""
    model = add_lora(copy.deepcopy(plain.model), LoRA(rank=16))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, factor in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(factor, std=0.01)
    return plain._replace(model=model)


@pytest.fixture(scope="module")
def words(plain):
    """Tokens of a text, more than 2,000."""
    page = Path(__file__).parents[2] / "docs" / "config" / "algorithm.md"
    text = page.read_text()[:20_000]
    ids = plain.renderer.plain.encode(text, add_special_tokens=False).ids
    assert len(ids) > 4000
    return tuple(ids)


def forward_of_transformers(policy: Policy, row: Sequence[int], first: int) -> Tensor:
    """Log-probs of the tokens from the first one on, the row alone and whole."""
    ids = torch.tensor([row])
    with torch.no_grad(), use_attention(base_model(policy.model).config, "sdpa"):
        out = policy.model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=len(row) - first)
    scores = out.logits[0].double().log_softmax(-1)
    return scores.gather(1, ids[0, first:, None])[:, 0]


def assert_agree(policy: Policy, episodes: Sequence[Sequence[Turn]]) -> None:
    """Each episode's last context holds the replies of all its turns."""
    rows = [(*turns[-1][0], *turns[-1][1].token_ids) for turns in episodes]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    sampled = torch.zeros(ids.shape)
    for i, (row, turns) in enumerate(zip(rows, episodes, strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        for prompt, reply in turns:
            place = slice(len(prompt), len(prompt) + len(reply.token_ids))
            assert row[place] == reply.token_ids
            mask[i, place] = True
            sampled[i, place] = torch.tensor(reply.logprobs)
    with torch.no_grad():
        scored = forward_logprobs(policy.model, pack(ids, mask)).logprobs
    for i, row in enumerate(rows):
        first = int(mask[i].int().argmax())
        own = torch.zeros(ids.shape[1], dtype=torch.float64)
        own[first : len(row)] = forward_of_transformers(policy, row, first)
        for gap in (sampled[i] - own, scored[i] - own, sampled[i] - scored[i]):
            assert gap[mask[i]].abs().max() <= BOUND


@pytest.mark.parametrize("longest", [500, 2000])
def test_prompts_from_30_tokens_side_by_side(longest, plain, words, complete):
    """Two samples of the first one share its pages."""
    prompts = [words[:30], words[:30], words[500 : 500 + longest]]
    replies = complete(Cached(), plain, prompts, [1, 2, 3], max_new_tokens=6)
    assert sum(len(reply.token_ids) for reply in replies) > 9
    assert_agree(plain, [[turn] for turn in zip(prompts, replies, strict=True)])


def test_eight_turns_with_adapters(adapted, words, complete):
    """Two conversations of their own lengths; what stands before a turn is in the cache."""
    held = {0: words[:40], 1: words[50:170]}
    episodes: dict[int, list[Turn]] = {0: [], 1: []}

    def follow(index, reply):
        turns = episodes[index]
        turns.append((held[index], reply))
        start = 200 + 100 * index + 10 * len(turns)
        held[index] += (*reply.token_ids, *words[start : start + 10 + index])
        return (held[index], mix(index, len(turns))) if len(turns) < 8 else None

    complete(Cached(), adapted, [*held.values()], [1, 2], follow, max_new_tokens=5)
    assert [len(turns) for turns in episodes.values()] == [8, 8]
    assert_agree(adapted, [*episodes.values()])


@pytest.mark.parametrize("who", ["plain", "adapted"])
def test_the_simple_engine_draws_the_same_tokens(who, request, words, complete, reference):
    """Which pads on the left; with the kernel that `auto` is, and with calls of torch."""
    policy = request.getfixturevalue(who)
    prompts = [words[:30], words[60:150], words[200:400]]
    theirs = reference(policy, prompts, [5, 6, 7], max_new_tokens=8)
    found = [
        complete(Cached(kernel=kernel), policy, prompts, [5, 6, 7], max_new_tokens=8)
        for kernel in ("auto", "eager")
    ]
    assert len({reply.token_ids for reply in theirs}) == 3
    for ours in found:
        assert [reply.token_ids for reply in ours] == [reply.token_ids for reply in theirs]
    for own, *others in zip(theirs, *found, strict=True):
        for other in others:
            gap = torch.tensor(own.logprobs) - torch.tensor(other.logprobs)
            assert gap.abs().max() <= BOUND
    if who == "adapted":  # or the adapters might have been left out by all of them
        bare = request.getfixturevalue("plain")
        for prompt, reply in zip(prompts, theirs, strict=True):
            score = forward_of_transformers(bare, (*prompt, *reply.token_ids), len(prompt))
            assert (score - torch.tensor(reply.logprobs)).abs().max() > 100 * BOUND
    assert_agree(policy, [[turn] for turn in zip(prompts, theirs, strict=True)])
