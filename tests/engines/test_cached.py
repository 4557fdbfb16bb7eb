"""The fast engine against the reference engine: the same tokens, whatever the slots, the queue and the room; and no token read twice."""

from __future__ import annotations

import random
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from rlkit.engines.slots import SIDE_BY_SIDE, Slots, parts_of
from torch.utils._python_dispatch import TorchDispatchMode

from rlkit.engines import cached, generate, graphs
from rlkit.engines.cached import _by_turns, _Decoder, coarse
from rlkit.environments import calculator, tool_schema
from rlkit.episodes import collect
from rlkit.functional import mix
from rlkit.models import encode_prompt
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


WINDOWS = {  # of some layers, or of all
    "qwen3": {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 4},
    "mistral": {"sliding_window": 4},
}


@pytest.mark.parametrize("family", WINDOWS)
def test_layers_with_a_window_are_left_to_the_reference(tiny, family):
    """Keys of a position are not all that such a layer needs; the replies are right all the same, also those that follow."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, initializer_range=0.5, max_position_embeddings=64, **WINDOWS[family],
    )  # fmt: skip
    policy = tiny._replace(model=AutoModelForCausalLM.from_config(config).eval(), eos_token_ids=(49,), pad_token_id=0, context_length=64)
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
    [
        {"temperature": -1.0}, {"max_new_tokens": 0}, {"max_rows": 0}, {"max_cached_tokens": 0}, {"check_every": 0}, {"top_p": 0.0},
        {"max_thinking_tokens": -1},
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(tiny, contexts, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        cached(tiny, contexts, SEEDS, **wrong)


# ------------------------------------------------------------------------------------------- stop checks, parts, the bound


@pytest.mark.parametrize("every", [2, 8, 100])
def test_how_often_the_host_looks_changes_no_reply(tiny, contexts, every):
    """Ends by token and by length in any step, refilled slots, a thinking budget: nothing is drawn behind an end."""
    settings = {"max_new_tokens": 18, "temperature": 1.3, "max_thinking_tokens": 3}
    expected = cached(tiny, contexts, SEEDS, **settings, max_rows=3, check_every=1)
    assert {g.finish_reason for g in expected} == {"stop", "length"} and any(g.forced for g in expected)
    found = cached(tiny, contexts, SEEDS, **settings, max_rows=3, check_every=every)
    assert equal(found, expected) and [g.forced for g in found] == [g.forced for g in expected]


def test_parts_cover_all_slots_and_read_less():
    """Every slot lies in one part that sees as far as it does; slots of one length are one part, and a long one is kept apart."""
    rng = random.Random(0)
    for n in (1, 7, 8, 9, 64):
        reach = torch.tensor([rng.randrange(1, 5000) for _ in range(n)])
        parts = parts_of(reach)
        assert [start for start, _, _ in parts] == [0, *(stop for _, stop, _ in parts)][:-1] and parts[-1][1] == n
        assert all(int(reach[start:stop].max()) == length for start, stop, length in parts)
    assert parts_of(torch.full((64,), 300)) == [(0, 64, 300)]
    assert parts_of(torch.tensor([100] * 31 + [5000])) == [(0, 32 - SIDE_BY_SIDE, 100), (32 - SIDE_BY_SIDE, 32, 5000)]


def test_slots_of_very_different_lengths(tiny, monkeypatch):
    """Read in parts, the replies are the same: contexts of 20 and of 200 tokens."""
    monkeypatch.setattr("rlkit.engines.slots.CALL", 64)
    rng = random.Random(1)
    contexts = [tuple(rng.randrange(100, 700) for _ in range(20 if i < 8 else 200)) for i in range(10)]
    parts, measure = [], _Decoder.measure
    monkeypatch.setattr(_Decoder, "measure", lambda self: (measure(self), parts.append(len(self.parts))))
    found = cached(tiny, contexts, range(10), max_new_tokens=4)
    assert max(parts) == 2 and equal(found, generate(tiny, contexts, range(10), max_new_tokens=4))


@pytest.mark.parametrize("most", [300, 700])
def test_the_cache_never_holds_more_than_it_may(tiny, contexts, most):
    """Watched at each pass, while episodes outgrow their room: the youngest wait, and every reply is that of a boundless cache."""

    def play(**bound):
        seen, held = {}, dict(enumerate(contexts[:6]))

        def follow(index, reply):
            seen.setdefault(index, []).append(reply)
            if len(seen[index]) == 4:
                return None
            held[index] += reply.token_ids + tuple(range(200, 200 + 15 * (1 + index % 3)))
            return held[index], mix(index, len(seen[index]))

        cached(tiny, contexts[:6], SEEDS[:6], max_new_tokens=8, follow=follow, **bound)
        return [reply for _, replies in sorted(seen.items()) for reply in replies]

    free, held = play(), []
    with pytest.MonkeyPatch.context() as patch:
        forward, resize = _Decoder.forward, Slots.resize
        watch = lambda cache: held.extend((k.shape[0], k.shape[2], cache.slots, cache.room) for k in (*cache.keys, *cache.values))  # noqa: E731
        patch.setattr(_Decoder, "forward", lambda self, *a: (forward(self, *a), watch(self.cache))[0])
        patch.setattr(Slots, "resize", lambda self, *a: (resize(self, *a), watch(self))[0])
        bounded = play(max_cached_tokens=most)
    assert equal(bounded, free)
    assert all((slots, room) == tuple(told) for slots, room, *told in held)
    assert all(slots * room <= most or slots == 1 for slots, room, _, _ in held)
    assert len({room for _, room, _, _ in held}) > 1  # it did grow


# --------------------------------------------------------------------------------------------------- the captured step


class Recorder(TorchDispatchMode):
    """What a CUDA graph is, on a CPU: a fixed list of operations over fixed memory, in which nothing asks the host."""

    LOOKS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "lift_fresh", "equal.default")

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in self.LOOKS):
            raise RuntimeError(f"{func} asks the host")
        if "index" in str(func) and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise RuntimeError(f"{func} by a mask asks the host how many")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        """Every operation on the memory that it had, its results into the memory that they had; views are views still."""
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(*((x if isinstance(x, (tuple, list)) else (x,)) for x in (out, again)), strict=True):
                if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


@pytest.fixture
def recording(monkeypatch):
    """Steps are captured, on a CPU; gives how often, and how often they were replayed."""
    done = {"captured": 0, "replayed": 0}

    def capture(step, device, pool):
        kept = [t.clone() for t in buffers]
        recorder = Recorder()
        with recorder:
            step()
        for tensor, before in zip(buffers, kept, strict=True):
            tensor.copy_(before)  # capturing carries nothing out
        done["captured"] += 1

        def replay():
            done["replayed"] += 1
            recorder.replay()

        return replay

    buffers = []
    make = _Decoder.__init__

    def init(self, *args, **kwargs):
        make(self, *args, **kwargs)
        budget = () if self.budget is None else (self.budget.inside, self.budget.used, self.budget.written)
        buffers[:] = [*self.state, *budget]

    monkeypatch.setattr(_Decoder, "__init__", init)
    monkeypatch.setattr(graphs, "CAPTURED", ("cpu",))
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs.Graphs, "refused", set())
    return done


@pytest.mark.parametrize("settings", [{}, {"max_thinking_tokens": 3}, {"temperature": 0.0}, {"top_p": 0.9, "top_k": 100}], ids=str)
def test_a_captured_step_gives_the_same_replies(tiny, contexts, recording, settings):
    """The step asks nothing of the host and depends on buffers alone: recorded and replayed, it draws what the reference draws."""
    settings = {"max_new_tokens": 16, "temperature": 1.3} | settings
    expected = generate(tiny, contexts, SEEDS, **settings)
    found = cached(tiny, contexts, SEEDS, **settings, max_rows=4, check_every=8)
    assert equal(found, expected) and [g.forced for g in found] == [g.forced for g in expected]
    assert 0 < recording["captured"] < recording["replayed"] / 4


@pytest.mark.slow
def test_captured_steps_over_many_turns_in_a_cache_that_moves(tiny, contexts, recording):
    """Graphs of the memory before are not replayed into the one after."""
    found = []
    for engine in (partial(cached, max_cached_tokens=700, max_new_tokens=12), partial(_by_turns, temperature=1.0, max_new_tokens=12)):
        follow, seen = follower(7, True), {}

        def note(index, reply, follow=follow, seen=seen):
            seen.setdefault(index, []).append(reply)
            return follow(index, reply, contexts[index])

        engine(tiny, contexts[:5], SEEDS[:5], follow=note)
        found.append([reply for _, replies in sorted(seen.items()) for reply in replies])
    assert equal(*found) and recording["replayed"] > recording["captured"] > 2


def test_weights_that_change_between_calls_are_seen(tiny, contexts, recording):
    """In place, as an optimizer's step, and replaced by others."""
    from copy import deepcopy

    policy = tiny._replace(model=deepcopy(tiny.model))
    replies = []
    for change in (lambda w: None, lambda w: w.data.mul_(1.5), lambda w: setattr(w, "data", w.data * 0.5)):
        for weight in policy.model.model.layers[1].mlp.parameters():
            change(weight)
        replies.append(cached(policy, contexts[:4], SEEDS[:4], max_new_tokens=12))
        assert equal(replies[-1], generate(policy, contexts[:4], SEEDS[:4], max_new_tokens=12))
    assert replies[0] != replies[1] != replies[2] and recording["replayed"] > 3


@pytest.mark.parametrize("when", ["capture", "first step"])
def test_a_step_that_cannot_be_captured_runs_without_and_says_so_once(tiny, contexts, recording, monkeypatch, when):
    """Found by the capture, or by the step before it, which breaks off in the model and is done again."""
    failures, watched = [], []

    def fail(*_):
        failures.append(when)
        raise RuntimeError("operation not permitted when stream is capturing\nand a long tail")

    @contextmanager
    def watch(device):
        watched.append(device)
        try:
            yield
        finally:
            watched.clear()

    expected = generate(tiny, contexts, SEEDS, max_new_tokens=8)
    if when == "capture":
        monkeypatch.setattr(graphs, "capture", fail)
    else:
        attention = _Decoder.attention
        monkeypatch.setattr(graphs, "host_looks_refused", watch)
        monkeypatch.setattr(_Decoder, "attention", lambda self, *given: fail() if watched else attention(self, *given))
    with pytest.warns(UserWarning, match="Qwen3ForCausalLM cannot be captured.*cuda_graphs=false .*capturing$") as caught:
        found = cached(tiny, contexts, SEEDS, max_new_tokens=8)
    assert equal(found, expected) and len(caught) == len(failures) == 1
    assert equal(cached(tiny, contexts, SEEDS, max_new_tokens=8), expected) and len(failures) == 1  # the next call does not try


def test_shapes_are_few_and_never_too_small():
    for step, most in ((1, 500), (64, 8192)):
        shapes = [coarse(n, step, most) for n in range(1, most + 1)]
        assert all(n <= shape <= max(n + step - 1, 1.25 * n) for n, shape in enumerate(shapes, 1))
        assert shapes == sorted(shapes) and len(set(shapes)) < 50


# ---------------------------------------------------------------------------------------------------- the distribution


@pytest.mark.parametrize("engine", [cached, generate])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_replies_of_two_tokens_follow_their_exact_distribution(tiny, engine, temperature):
    """All 36 replies of two tokens over a vocabulary of 6, enumerated: chi-square of 4,000 fixed seeds at 35 degrees of freedom.

    75.0 is its 99.99 % quantile: one sound engine in 10,000 sets of seeds would be called wrong.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=6, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        max_position_embeddings=16, initializer_range=0.2,
    )  # fmt: skip
    policy = tiny._replace(model=Qwen3ForCausalLM(config).eval(), eos_token_ids=(99,), pad_token_id=0, context_length=16)
    n, context = 4000, (1, 4, 2)
    replies = engine(policy, [context] * n, [mix(11, i) for i in range(n)], max_new_tokens=2, temperature=temperature, max_rows=n)
    with torch.no_grad():
        logits = policy.model(torch.tensor([[*context, first] for first in range(6)])).logits[:, -2:] / temperature
    expected = (logits[0, 0].log_softmax(-1)[:, None] + logits[:, 1].log_softmax(-1)).exp().flatten() * n
    observed = torch.bincount(torch.tensor([6 * g.token_ids[0] + g.token_ids[1] for g in replies]), minlength=36)
    assert expected.min() > 5 and expected.max() > 1.5 * expected.median()  # else the statistic means nothing
    assert float(((observed - expected) ** 2 / expected).sum()) < 75.0
