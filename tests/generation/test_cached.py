"""The fast engine against the reference engine: the same tokens, whatever the slots, the queue and the room; and no token read twice."""

from __future__ import annotations

import random
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from rlkit.environments import calculator, tool_schema
from rlkit.functional import mix
from rlkit.generation import cached, generate
from rlkit.generation.cached import _by_turns
from rlkit.models import encode_prompt
from rlkit.rollouts import collect
from rlkit.types import Generation

TOOLS = [tool_schema(calculator)]
QUESTIONS = (
    "Ann has 3 pens. Ann buys 4 more. How many pens does Ann have now?",
    "Ben has 5 hats.",
    "How many?",
    "Ida has 20 boxes of 9 figs.",
)


@pytest.fixture(scope="module")
def contexts(tiny):
    """Eleven contexts of four questions: siblings, and others of other lengths."""
    found = [tuple(encode_prompt(tiny.codec, [{"role": "user", "content": q}], TOOLS)) for q in QUESTIONS]
    return [found[i] for i in (0, 0, 1, 2, 0, 3, 3, 1, 2, 2, 0)]


SEEDS = [mix(3, i) for i in range(11)]


def equal(ours: list[Generation], theirs: list[Generation]) -> bool:
    """The same tokens and ends; log-probs equal up to the rounding of another order of summation, in float32."""
    assert [(g.token_ids, g.finish_reason) for g in ours] == [(g.token_ids, g.finish_reason) for g in theirs]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=1e-4)
    return True


@contextmanager
def count_tokens(model):
    """The tokens that go through the model, pass by pass."""
    read: list[int] = []
    hook = model.base_model.register_forward_pre_hook(lambda m, a, k: read.append(k["input_ids"].numel()), with_kwargs=True)
    try:
        yield read
    finally:
        hook.remove()


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1.3, "top_p": 0.9, "top_k": 100}], ids=str)
def test_replies_are_those_of_the_reference_in_any_slots(tiny, contexts, settings):
    """All at once, three slots for eleven contexts, one, and room for two contexts of the longest."""
    expected = generate(tiny, contexts, SEEDS, max_new_tokens=24, **settings)
    assert settings["temperature"] == 0 or (len({g.token_ids for g in expected}) > 4 and len({len(g.token_ids) for g in expected}) > 1)
    for slots in ({}, {"max_rows": 3}, {"max_rows": 1}, {"max_cached_tokens": 600}, {"max_cached_tokens": 1}):
        assert equal(cached(tiny, contexts, SEEDS, max_new_tokens=24, **settings, **slots), expected)


@pytest.mark.parametrize("spelled", [False, True])
def test_a_thinking_budget_is_the_same_in_any_slots(tiny, contexts, spelled):
    """Each slot has the state of its own reply, also where the tags are spelled, and none of the reply before."""
    thinking = tiny.codec.thinking
    if spelled:  # the tags' own tokens are decoded to the same text
        thinking = thinking._replace(ids=None)
    policy = tiny._replace(codec=tiny.codec._replace(thinking=thinking))
    rows = [*contexts, (*contexts[0], tiny.codec.thinking.ids[0])]  # the last begins inside a block
    settings = {"max_new_tokens": 24, "max_thinking_tokens": 3, "temperature": 1.5}
    expected = generate(policy, rows, [*SEEDS, 5], **settings)
    assert sum(bool(g.forced) for g in expected) > 5
    for slots in ({}, {"max_rows": 3}):
        found = cached(policy, rows, [*SEEDS, 5], **settings, **slots)
        assert equal(found, expected) and [g.forced for g in found] == [g.forced for g in expected]


def follower(rng_seed: int, rewrites: bool):
    """What follows a reply is a function of its index, its number and the reply: nothing, more of the same, or another beginning."""
    turns: dict[int, int] = {}
    held: dict[int, tuple[int, ...]] = {}

    def follow(index, reply, context):
        number = turns[index] = turns.get(index, 0) + 1
        rng = random.Random(mix(rng_seed, index, number))
        if number > 4 or rng.random() < 0.2:
            return None
        whole = held.get(index, context) + reply.token_ids
        if rewrites and rng.random() < 0.5:  # the context is written anew from somewhere in the middle
            whole = whole[: rng.randrange(1, len(whole))]
        held[index] = whole + tuple(rng.randrange(100, 700) for _ in range(rng.randrange(0 if rewrites else 1, 40)))
        return held[index], mix(rng_seed, index, number, 9)

    return follow


@pytest.mark.parametrize("rewrites", [False, True])
@pytest.mark.parametrize("slots", [{}, pytest.param({"max_rows": 2}, marks=pytest.mark.slow), {"max_cached_tokens": 700}], ids=str)
def test_what_follows_is_that_of_contexts_read_afresh(tiny, contexts, rewrites, slots):
    """Every reply of every turn, where contexts go on, are cut back and written anew, and outgrow the room that there is."""
    found = []
    for engine in (partial(cached, **slots), partial(_by_turns, temperature=1.0)):
        follow, seen = follower(7, rewrites), {}

        def note(index, reply, follow=follow, seen=seen):
            seen.setdefault(index, []).append(reply)
            return follow(index, reply, contexts[index])

        last = engine(tiny, contexts, SEEDS, max_new_tokens=12, follow=note) if engine.func is cached else engine(
            tiny, contexts, SEEDS, note, max_new_tokens=12
        )  # fmt: skip
        assert [replies[-1] for _, replies in sorted(seen.items())] == last
        found.append([reply for _, replies in sorted(seen.items()) for reply in replies])
    assert len(found[0]) > 20 and equal(*found)


def test_a_long_conversation_beside_one_that_gets_a_long_message(tiny):
    """Their unread tokens are padded to one width, which from the end of the long one would reach beyond its room."""
    base = tuple(100 + i for i in range(40))
    grown = {0: base * 4, 1: base}

    def follow(index, reply):
        if len(grown[index]) not in (160, 40):
            return None
        grown[index] += reply.token_ids + (base[:2] if index == 0 else base * 3)
        return grown[index], 7

    found = cached(tiny, [grown[0], grown[1]], [1, 2], max_new_tokens=4, follow=follow)
    assert len(grown[0]) < len(grown[1]) + 20 and equal(found, generate(tiny, [grown[0], grown[1]], [7, 7], max_new_tokens=4))


def test_siblings_are_read_once_and_a_conversation_costs_its_new_tokens(tiny, contexts):
    """Turn after turn the same number of new tokens goes through the model, whatever stands before them."""
    follow, news = {}, 10

    def same(index, reply):
        number = follow[index] = follow.get(index, 0) + 1
        held[index] = held[index] + reply.token_ids + tuple(range(200, 200 + news))
        return None if number == 6 else (held[index], mix(index, number))

    held = {i: contexts[0] for i in range(4)}
    with count_tokens(tiny.model) as read:
        cached(tiny, [contexts[0]] * 4, SEEDS[:4], max_new_tokens=1, follow=same)
    assert read == [len(contexts[0])] + [4 * (news + 1)] * 5  # the reply's last token, which had only been drawn, and what is new


def test_an_episode_with_tools_is_the_same_with_either_engine(tiny, experiment):
    """The default task through the whole loop, episodes in slots of their own pace."""
    tasks = experiment.task(split="train")[:6]
    settings = {"environment": experiment.environment, "group_size": 3, "seed": 5, "max_new_tokens": 48, "temperature": 1.0}
    ours, theirs = (
        collect(tiny, tasks, generate=engine, **settings) for engine in (partial(cached, max_rows=5), generate)
    )  # fmt: skip
    assert [[s.response_ids for s in r.steps] for r in ours] == [[s.response_ids for s in r.steps] for r in theirs]
    assert [(r.status, r.group, r.sample) for r in ours] == [(r.status, r.group, r.sample) for r in theirs]
    assert max(len(r.steps) for r in ours) > 1


def test_adapters_are_part_of_the_policy(tiny, contexts):
    """Under LoRA the cache is that of the adapted model."""
    from rlkit.models import LoRA, load_policy

    policy = load_policy(path="tiny", lora=LoRA(rank=2))
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.05)
    expected = generate(policy, contexts[:4], SEEDS[:4], max_new_tokens=12)
    assert expected != generate(tiny, contexts[:4], SEEDS[:4], max_new_tokens=12)
    assert equal(cached(policy, contexts[:4], SEEDS[:4], max_new_tokens=12), expected)


def test_layers_with_a_window_are_left_to_the_reference(tiny):
    """Keys of a position are not all that such a layer needs; the replies are right all the same, also those that follow."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        layer_types=["full_attention", "sliding_attention"], sliding_window=4, use_sliding_window=True, max_position_embeddings=64,
    )  # fmt: skip
    policy = tiny._replace(model=Qwen3ForCausalLM(config).eval(), eos_token_ids=(49,), pad_token_id=0, context_length=64)
    contexts, replies = [tuple(range(1, 12)), (5, 6)], []

    def follow(index, reply):
        replies.append(reply)
        return (contexts[index] + reply.token_ids + (7,), 8) if len(replies) <= 2 else None

    last = cached(policy, contexts, [1, 2], max_new_tokens=5, follow=follow)
    assert replies[:2] == generate(policy, contexts, [1, 2], max_new_tokens=5) and len(replies) == 4
    again = [c + r.token_ids + (7,) for c, r in zip(contexts, replies[:2], strict=True)]
    assert last == replies[2:] == generate(policy, again, [8, 8], max_new_tokens=5)


def test_mode_and_attention_are_put_back_also_after_an_error(tiny):
    before = tiny.model.config._attn_implementation
    tiny.model.train()
    try:
        with pytest.raises((IndexError, RuntimeError)):
            cached(tiny, [[10**6]], [1], max_new_tokens=2)
        assert tiny.model.training and tiny.model.config._attn_implementation == before
    finally:
        tiny.model.eval()


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"max_new_tokens": 0}, {"max_rows": 0}, {"max_cached_tokens": 0}, {"top_p": 0.0}, {"max_thinking_tokens": -1}],
)
def test_numbers_out_of_range_are_refused(tiny, contexts, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        cached(tiny, contexts, SEEDS, **wrong)
