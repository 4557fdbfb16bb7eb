"""The fast engine against the reference engine: the same tokens, whatever the slots, the queue and
the room; and no token read twice."""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parametrise import cases, combinations
from rlkit.engines import Cached, Transformers
from rlkit.engines.cached import graphs
from rlkit.engines.cached.attention import SIDE_BY_SIDE, cut_slots
from rlkit.engines.cached.passes import Passes
from rlkit.engines.cached.sampler import STATE, Sampler
from rlkit.engines.cached.scheduler import Scheduler, round_to_bucket
from rlkit.environments import calculator, tool_schema
from rlkit.episodes import collect
from rlkit.functional import mix
from rlkit.models import encode_prompt
from rlkit.models.chat import make_renderer
from rlkit.types import Generation, SamplingParams

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
    found = [
        tuple(encode_prompt(tiny.renderer, [{"role": "user", "content": q}], TOOLS))
        for q in QUESTIONS
    ]
    return [found[i] for i in (0, 0, 1, 2, 0, 3, 3, 1, 2, 2, 0)]


SEEDS = [mix(3, i) for i in range(11)]


def equal(ours: list[Generation], theirs: list[Generation]) -> bool:
    """The same tokens and ends; log-probs equal up to the rounding of another order of summation,
    in float32."""
    assert [(g.token_ids, g.finish_reason) for g in ours] == [
        (g.token_ids, g.finish_reason) for g in theirs
    ]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=1e-4
        )
    return True


@contextmanager
def count_tokens(model):
    """The tokens that go through the model, pass by pass."""
    read: list[int] = []
    hook = model.base_model.register_forward_pre_hook(
        lambda m, a, k: read.append(k["input_ids"].numel()), with_kwargs=True
    )
    try:
        yield read
    finally:
        hook.remove()


LIMITS = [
    ({}, {"max_rows": 3}, {"max_cached_tokens": 600}),
    ({"max_rows": 1}, {"max_cached_tokens": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    cases(
        [{"temperature": 0.0}, {"temperature": 1.3, "top_p": 0.9, "top_k": 100}],
        lambda s: "top_p" in s,
    ),
    ids=str,
)
@pytest.mark.parametrize("limits", cases(LIMITS, 1))
def test_replies_are_those_of_the_reference_in_any_slots(
    tiny, contexts, complete, reference, settings, limits
):
    """All at once, three slots for eleven contexts, one, and room for two contexts of the
    longest."""
    expected = reference(tiny, contexts, SEEDS, max_new_tokens=24, **settings)
    assert settings["temperature"] == 0 or (
        len({g.token_ids for g in expected}) > 4 and len({len(g.token_ids) for g in expected}) > 1
    )
    for slots in limits:
        assert equal(
            complete(Cached(**slots), tiny, contexts, SEEDS, max_new_tokens=24, **settings),
            expected,
        )


@pytest.mark.slow
@pytest.mark.parametrize("spelled, interruption", [(False, ""), (True, ""), (False, "Time is up.")])
def test_a_thinking_budget_is_the_same_in_any_slots(
    tiny, contexts, complete, reference, spelled, interruption
):
    """Each slot has the state of its own reply, also where the tags are spelled, and none of the
    reply before."""
    thinking = make_renderer(tiny.renderer.tokenizer, interruption=interruption).thinking
    tokens = tuple(tiny.renderer.plain.encode(interruption, add_special_tokens=False).ids)
    assert thinking.close == (*tokens, tiny.renderer.thinking.ids[1]) and (
        not interruption or len(tokens) > 2
    )
    if spelled:  # the tags' own tokens are decoded to the same text
        thinking = thinking._replace(ids=None)
    policy = tiny._replace(renderer=tiny.renderer._replace(thinking=thinking))
    rows = [
        *contexts,
        (*contexts[0], tiny.renderer.thinking.ids[0]),
    ]  # the last begins inside a block
    settings = {"max_new_tokens": 24, "max_thinking_tokens": 3, "temperature": 1.5}
    expected = reference(policy, rows, [*SEEDS, 5], **settings)
    assert sum(bool(g.forced) for g in expected) > 5
    for slots in ({}, {"max_rows": 3}):
        found = complete(Cached(**slots), policy, rows, [*SEEDS, 5], **settings)
        assert equal(found, expected) and [g.forced for g in found] == [g.forced for g in expected]
    for g in (
        expected
    ):  # what is written is all of it, in a row; nothing of it has a log-prob, or counts as sampled
        assert [g.token_ids[i] for i in g.forced] == ([*thinking.close] * len(g.forced))[
            : len(g.forced)
        ]
        assert not any(g.logprobs[i] for i in g.forced)
        assert len(g.forced) % len(thinking.close) == 0 or g.forced[-1] == len(g.token_ids) - 1


def follower(rng_seed: int, rewrites: bool):
    """What follows a reply is a function of its index, its number and the reply: nothing, more of
    the same, or another beginning."""
    turns: dict[int, int] = {}
    held: dict[int, tuple[int, ...]] = {}

    def follow(index, reply, context):
        number = turns[index] = turns.get(index, 0) + 1
        rng = random.Random(mix(rng_seed, index, number))
        if number > 4 or rng.random() < 0.2:
            return None
        whole = held.get(index, context) + reply.token_ids
        if (
            rewrites and rng.random() < 0.5
        ):  # the context is written anew from somewhere in the middle
            whole = whole[: rng.randrange(1, len(whole))]
        held[index] = whole + tuple(
            rng.randrange(100, 700) for _ in range(rng.randrange(0 if rewrites else 1, 40))
        )
        return held[index], mix(rng_seed, index, number, 9)

    return follow


def turns(complete, engine, policy, contexts, rewrites, **params):
    """All completions of episodes that go on as `follower` says, episode by episode."""
    follow, seen = follower(7, rewrites), {}

    def note(index, reply):
        seen.setdefault(index, []).append(reply._replace(versions=()))
        return follow(index, reply, contexts[index])

    last = complete(
        engine, policy, contexts, SEEDS[: len(contexts)], note, max_new_tokens=12, **params
    )
    assert [replies[-1] for _, replies in sorted(seen.items())] == last
    return [reply for _, replies in sorted(seen.items()) for reply in replies]


@pytest.mark.slow
@pytest.mark.parametrize("rewrites", cases([False, True], [True]))
@pytest.mark.parametrize(
    "slots",
    cases([{}, {"max_rows": 2}, {"max_cached_tokens": 700}], [{"max_cached_tokens": 700}]),
    ids=str,
)
def test_what_follows_is_that_of_contexts_read_afresh(tiny, contexts, complete, rewrites, slots):
    """Every reply of every turn, where contexts go on, are cut back and written anew, and outgrow
    the room that there is."""
    found = [
        turns(complete, engine, tiny, contexts, rewrites)
        for engine in (Cached(**slots), Transformers())
    ]
    assert len(found[0]) > 20 and equal(*found)


def test_a_long_conversation_beside_one_that_gets_a_long_message(tiny, complete, reference):
    """Their unread tokens are padded to one width, which from the end of the long one would reach
    beyond its room."""
    base = tuple(100 + i for i in range(40))
    grown = {0: base * 4, 1: base}

    def follow(index, reply):
        if len(grown[index]) not in (160, 40):
            return None
        grown[index] += reply.token_ids + (base[:2] if index == 0 else base * 3)
        return grown[index], 7

    found = complete(Cached(), tiny, [grown[0], grown[1]], [1, 2], follow, max_new_tokens=4)
    assert len(grown[0]) < len(grown[1]) + 20 and equal(
        found, reference(tiny, [grown[0], grown[1]], [7, 7], max_new_tokens=4)
    )


def test_siblings_are_read_once_and_a_conversation_costs_its_new_tokens(tiny, contexts, complete):
    """Turn after turn the same number of new tokens goes through the model, whatever stands before
    them."""
    numbers, news = {}, 10

    def same(index, reply):
        number = numbers[index] = numbers.get(index, 0) + 1
        held[index] = held[index] + reply.token_ids + tuple(range(200, 200 + news))
        return None if number == 6 else (held[index], mix(index, number))

    held = {i: contexts[0] for i in range(4)}
    with count_tokens(tiny.model) as read:
        complete(Cached(), tiny, [contexts[0]] * 4, SEEDS[:4], same, max_new_tokens=1)
    assert (
        read == [len(contexts[0])] + [4 * (news + 1)] * 5
    )  # the reply's last token, which had only been drawn, and what is new


@pytest.mark.slow
def test_an_episode_with_tools_is_the_same_with_either_engine(tiny, experiment):
    """The default task through the whole loop, episodes in slots of their own pace."""
    tasks = experiment.task(split="train")[:6]
    settings = {
        "environment": experiment.environment,
        "group_size": 3,
        "seed": 5,
        "max_new_tokens": 48,
        "temperature": 1.0,
    }
    ours, theirs = (
        collect(tiny, tasks, engine=engine, **settings)
        for engine in (Cached(max_rows=5), Transformers())
    )
    assert [[s.response_ids for s in r.steps] for r in ours] == [
        [s.response_ids for s in r.steps] for r in theirs
    ]
    assert [(r.status, r.group, r.sample) for r in ours] == [
        (r.status, r.group, r.sample) for r in theirs
    ]
    assert max(len(r.steps) for r in ours) > 1


@pytest.mark.slow
def test_adapters_are_part_of_the_policy(tiny, contexts, complete, reference):
    """Under LoRA the cache is that of the adapted model."""
    from rlkit.models import LoRA, load_policy

    policy = load_policy(path="tiny", lora=LoRA(rank=2))
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.05)
    expected = reference(policy, contexts[:4], SEEDS[:4], max_new_tokens=12)
    assert expected != reference(tiny, contexts[:4], SEEDS[:4], max_new_tokens=12)
    assert equal(complete(Cached(), policy, contexts[:4], SEEDS[:4], max_new_tokens=12), expected)


WINDOWS = {  # of some layers, or of all
    "qwen3": {
        "layer_types": ["full_attention", "sliding_attention"],
        "use_sliding_window": True,
        "sliding_window": 4,
    },
    "mistral": {"sliding_window": 4},
}


@pytest.mark.parametrize("family", WINDOWS)
def test_contexts_longer_than_a_window_are_left_to_the_reference(tiny, complete, reference, family):
    """Keys of a position are not all that such a layer needs; the replies are right all the same,
    also those that follow."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.5,
        max_position_embeddings=64,
        **WINDOWS[family],
    )
    policy = tiny._replace(
        model=AutoModelForCausalLM.from_config(config).eval(),
        eos_token_ids=(49,),
        pad_token_id=0,
        context_length=64,
    )
    contexts, replies = [tuple(range(1, 12)), (5, 6)], []

    def follow(index, reply):
        replies.append(reply._replace(versions=()))
        return (contexts[index] + reply.token_ids + (7,), 8) if len(replies) <= 2 else None

    last = complete(Cached(), policy, contexts, [1, 2], follow, max_new_tokens=5)
    assert (
        replies[:2] == reference(policy, contexts, [1, 2], max_new_tokens=5) and len(replies) == 4
    )
    again = [c + r.token_ids + (7,) for c, r in zip(contexts, replies[:2], strict=True)]
    assert last == replies[2:] == reference(policy, again, [8, 8], max_new_tokens=5)


def test_mode_and_attention_are_put_back_also_after_an_error(tiny, complete):
    before = tiny.model.config._attn_implementation
    tiny.model.train()
    try:
        with pytest.raises((IndexError, RuntimeError)):
            complete(Cached(), tiny, [[10**6]], [1], max_new_tokens=2)
        assert tiny.model.training and tiny.model.config._attn_implementation == before
    finally:
        tiny.model.eval()


@pytest.mark.parametrize("wrong", ["max_rows", "max_cached_tokens", "check_every"])
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=wrong):
        Cached(**{wrong: 0})


# -------------------------------------------------------------------- stop checks, parts, the bound


@pytest.mark.slow
@pytest.mark.parametrize("every", cases([2, 8, 100], 1))
def test_how_often_the_host_looks_changes_no_reply(tiny, contexts, complete, every):
    """Ends by token and by length in any step, refilled slots, a thinking budget: nothing is drawn
    behind an end."""
    settings = {"max_new_tokens": 18, "temperature": 1.3, "max_thinking_tokens": 3}
    expected = complete(Cached(max_rows=3, check_every=1), tiny, contexts, SEEDS, **settings)
    assert {g.finish_reason for g in expected} == {"stop", "length"} and any(
        g.forced for g in expected
    )
    found = complete(Cached(max_rows=3, check_every=every), tiny, contexts, SEEDS, **settings)
    assert equal(found, expected) and [g.forced for g in found] == [g.forced for g in expected]


def test_parts_cover_all_slots_and_read_less():
    """Every slot lies in one part that sees as far as it does; slots of one length are one part,
    and a long one is kept apart."""
    rng = random.Random(0)
    for n in (1, 7, 8, 9, 64):
        reach = [rng.randrange(1, 5000) for _ in range(n)]
        parts = cut_slots(reach)
        assert [start for start, _, _ in parts] == [0, *(stop for _, stop, _ in parts)][
            :-1
        ] and parts[-1][1] == n
        assert all(max(reach[start:stop]) == length for start, stop, length in parts)
    assert cut_slots([300] * 64) == [(0, 64, 300)]
    assert cut_slots([100] * 31 + [5000]) == [
        (0, 32 - SIDE_BY_SIDE, 100),
        (32 - SIDE_BY_SIDE, 32, 5000),
    ]


@pytest.mark.slow
def test_slots_of_very_different_lengths(tiny, complete, reference, monkeypatch):
    """Read in parts, the replies are the same: contexts of 20 and of 200 tokens."""
    monkeypatch.setattr("rlkit.engines.cached.attention.CALL", 64)
    rng = random.Random(1)
    contexts = [
        tuple(rng.randrange(100, 700) for _ in range(20 if i < 8 else 200)) for i in range(10)
    ]
    parts, measured = [], Scheduler.measured

    def watched(self, slots):
        found = measured(self, slots)
        parts.append(len(found))
        return found

    monkeypatch.setattr(Scheduler, "measured", watched)
    found = complete(Cached(kernel="eager"), tiny, contexts, range(10), max_new_tokens=4)
    assert max(parts) == 2 and equal(found, reference(tiny, contexts, range(10), max_new_tokens=4))


# ------------------------------------------------------------------------ episodes that come and go


class Day:
    """Episodes that arrive, wait for something outside, go on, are written anew and are given up,
    in an order that `seed` says."""

    def __init__(self, seed, decoder, params, opening):
        self.opening = opening
        self.rng, self.decoder, self.params = random.Random(seed), decoder, params
        self.asked, self.found = {}, {}  # (key, turn) → prompt and seed; completion
        self.turn: dict[int, int] = {}  # of episodes in play
        self.parked: dict[int, tuple[int, ...]] = {}
        self.in_use, self.given_up = set(), 0

    def ask(self, key, prompt):
        at = key, self.turn[key]
        self.asked[at] = prompt, mix(*at)
        self.decoder.submit(key, prompt, mix(*at), self.params)

    def words(self, most):
        """Some end inside a thinking block, as some templates make it."""
        said = tuple(self.rng.randrange(100, 700) for _ in range(self.rng.randrange(1, most)))
        return said + self.opening if self.rng.random() < 0.5 else said

    def release(self, key):
        self.decoder.release(key)
        del self.turn[key]
        self.parked.pop(key, None)

    def go_on(self, key):
        whole = self.parked.pop(key)
        if self.rng.random() < 0.3:
            whole = whole[: self.rng.randrange(1, len(whole))]
        self.turn[key] += 1
        self.ask(key, (whole + self.words(30))[:150])

    def play(self, episodes):
        first, arrived = self.words(60), 0
        while self.turn or arrived < episodes:
            while arrived < episodes and self.rng.random() < 0.4:
                self.turn[arrived] = 0
                self.ask(arrived, first if arrived % 3 == 0 else self.words(60))
                arrived += 1
            for key in list(self.turn):
                chance = self.rng.random()
                if key in self.parked and chance < 0.2:
                    self.go_on(key)
                elif chance > 0.993:
                    self.given_up += key not in self.parked
                    self.release(key)
            if self.decoder.idle:
                continue
            for key, reply in self.decoder.advance():
                self.found[key, self.turn[key]] = reply
                self.parked[key] = self.asked[key, self.turn[key]][0] + reply.token_ids
                if self.turn[key] == 3:
                    self.release(key)
            self.in_use.add(len(self.decoder.slots.rows))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    combinations(
        [{}, {"max_rows": 3}, {"max_cached_tokens": 400}, {"check_every": 4}],
        [{}, {"max_thinking_tokens": 2}, {"max_thinking_tokens": 2, "spelled": True}],
        slow=2,
    ),
    ids=str,
)
def test_episodes_may_come_wait_and_go_in_any_order(small, reference, case):
    """Episodes that lose their pages while they wait outside, rows that are cut, rows released
    while they draw: every completion is that of the reference engine, which knows of no slots."""
    slots, more = case
    more = dict(more)
    policy = small
    if more.pop("spelled", False):
        policy = small._replace(
            renderer=small.renderer._replace(thinking=small.renderer.thinking._replace(ids=None))
        )
    params, in_use, given_up = {"max_new_tokens": 12, "temperature": 1.2} | more, [], 0
    for seed in range(3):
        engine = Cached(**slots)
        engine.decoder = engine.make_decoder(policy)
        day = Day(seed, engine.decoder, SamplingParams(**params), small.renderer.thinking.ids[:1])
        with engine.serving():
            day.play(20)
            assert engine.decoder.idle and not engine.decoder.slots.held
        prompts, seeds = zip(*(day.asked[at] for at in day.found), strict=True)
        expected = reference(policy, prompts, seeds, **params)
        assert len(expected) > 20 and equal(list(day.found.values()), expected)
        assert [g.forced for g in day.found.values()] == [g.forced for g in expected] and (
            "max_thinking_tokens" in params
        ) == any(g.forced for g in expected)
        in_use.append(len(day.in_use))
        given_up += day.given_up
    assert given_up > 0 and max(in_use) > 1


def test_a_key_may_come_back_after_its_release(small, reference):
    """Before the slot was given to another: what it held is not taken for what the new one
    holds."""
    engine, prompts, found = Cached(), [(200, 300, 400), (200, 300, 500)], []
    engine.decoder = decoder = engine.make_decoder(small)
    with engine.serving():
        for prompt in prompts:
            decoder.submit(0, prompt, 1, SamplingParams(max_new_tokens=3))
            while not decoder.idle:
                found += [reply for _, reply in decoder.advance()]
            decoder.release(0)
    assert equal(found, reference(small, prompts, [1, 1], max_new_tokens=3))


# -------------------------------------------------------------------------------- the captured step


class Recorder(TorchDispatchMode):
    """What a CUDA graph is, on a CPU: a fixed list of operations over fixed memory, in which
    nothing asks the host."""

    LOOKS = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "unique",
        "is_nonzero",
        "lift_fresh",
        "equal.default",
    )

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in self.LOOKS):
            raise RuntimeError(f"{func} asks the host")
        by = args[1] if len(args) > 1 and isinstance(args[1], (tuple, list)) else ()
        if any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in by):
            raise RuntimeError(f"{func} by a mask asks the host how many")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        """Every operation on the memory that it had, its results into the memory that they had;
        views are views still."""
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(
                *((x if isinstance(x, (tuple, list)) else (x,)) for x in (out, again)), strict=True
            ):
                if (
                    isinstance(old, torch.Tensor)
                    and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr()
                ):
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
    make = Sampler.__init__

    def init(self, *args, **kwargs):
        make(self, *args, **kwargs)
        budget = (
            ()
            if self.budget is None
            else (self.budget.inside, self.budget.used, self.budget.written)
        )
        buffers[:] = [*(getattr(self, name) for name in STATE), *budget]

    monkeypatch.setattr(Sampler, "__init__", init)
    monkeypatch.setattr("rlkit.engines.cached.scheduler.can_capture", lambda device: True)
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs.Graphs, "refused", set())
    return done


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    cases([{}, {"max_thinking_tokens": 3}, {"temperature": 0.0}, {"top_p": 0.9, "top_k": 100}], 1),
    ids=str,
)
def test_a_captured_step_gives_the_same_replies(
    tiny, contexts, complete, reference, recording, settings
):
    """The step asks nothing of the host and depends on buffers alone: recorded and replayed, it
    draws what the reference draws."""
    settings = {"max_new_tokens": 16, "temperature": 1.3} | settings
    expected = reference(tiny, contexts, SEEDS, **settings)
    found = complete(Cached(max_rows=4, check_every=8), tiny, contexts, SEEDS, **settings)
    assert equal(found, expected) and [g.forced for g in found] == [g.forced for g in expected]
    assert 0 < recording["captured"] < recording["replayed"] / 4


@pytest.mark.slow
def test_captured_steps_over_many_turns(tiny, contexts, complete, recording):
    """Contexts that grow are read through a wider part of the same table."""
    found = [
        turns(complete, engine, tiny, contexts[:5], True)
        for engine in (Cached(max_cached_tokens=700), Transformers())
    ]
    assert equal(*found) and recording["replayed"] > recording["captured"] > 2


@pytest.mark.slow
def test_weights_that_change_between_loads_are_seen(tiny, contexts, complete, reference, recording):
    """In place, as an optimizer's step, and replaced by others."""
    from copy import deepcopy

    policy = tiny._replace(model=deepcopy(tiny.model))
    engine, replies = Cached(), []
    for change in (
        lambda w: None,
        lambda w: w.data.mul_(1.5),
        lambda w: setattr(w, "data", w.data * 0.5),
    ):
        for weight in policy.model.model.layers[1].mlp.parameters():
            change(weight)
        replies.append(complete(engine, policy, contexts[:4], SEEDS[:4], max_new_tokens=12))
        assert equal(replies[-1], reference(policy, contexts[:4], SEEDS[:4], max_new_tokens=12))
    assert replies[0] != replies[1] != replies[2] and recording["replayed"] > 3


@pytest.mark.parametrize("when", ["capture", "first step"])
def test_a_step_that_cannot_be_captured_runs_without_and_says_so_once(
    tiny, contexts, complete, reference, recording, monkeypatch, when
):
    """Found by the capture, or by the step before it, which breaks off in the model and is done
    again."""
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

    expected = reference(tiny, contexts, SEEDS, max_new_tokens=8)
    if when == "capture":
        monkeypatch.setattr(graphs, "capture", fail)
    else:
        attention = Passes.attention
        monkeypatch.setattr(graphs, "refuse_host_waits", watch)
        monkeypatch.setattr(
            Passes,
            "attention",
            lambda self, *given: fail() if watched else attention(self, *given),
        )
    with pytest.warns(
        UserWarning, match="Qwen3ForCausalLM cannot be captured.*cuda_graphs=false .*capturing$"
    ) as caught:
        found = complete(Cached(), tiny, contexts, SEEDS, max_new_tokens=8)
    assert equal(found, expected) and len(caught) == len(failures) == 1
    assert (
        equal(complete(Cached(), tiny, contexts, SEEDS, max_new_tokens=8), expected)
        and len(failures) == 1
    )  # the next call does not try


def test_shapes_are_few_and_never_too_small():
    shapes = [round_to_bucket(n) for n in range(1, 257)]
    assert all(n <= shape <= 1.5 * n for n, shape in enumerate(shapes, 1)) and shapes == sorted(
        shapes
    )
    assert len(set(shapes)) == 16


def test_beyond_the_bound_the_smallest_graph_that_covers_a_step_is_replayed(
    tiny, recording, monkeypatch
):
    """Whatever an engine is asked for, it holds so many graphs and no more; those that it has
    dropped do not count."""
    monkeypatch.setattr(graphs, "MOST_SHAPES", 2)
    ran = []
    own = graphs.Graphs(tiny.model, torch.device("cpu"))
    for slots, pages in ((8, 4), (8, 4), (8, 2), (8, 2), (4, 1), (4, 3), (8, 8), (16, 2)):
        step = (slots, pages)
        own(graphs.Shape("settings", slots, (pages,)), lambda step=step: ran.append(step))
    own(graphs.Shape("others", 4, (1,)), lambda: ran.append("others"))
    assert own.captured == recording["captured"] == 2 and recording["replayed"] == 4
    # kernel by kernel, in the capture, and what no graph covers
    assert ran == [(8, 4), (8, 4), (8, 2), (8, 2), (8, 8), (16, 2), "others"]
    own.forget()
    for _ in range(2):
        own(graphs.Shape("settings", 16, (2,)), lambda: ran.append("again"))
    assert own.captured == 3 and len(own.replays) == 1 and own.pool is not None


@pytest.mark.slow
def test_cache_and_graphs_outlive_the_call(tiny, contexts, complete, reference, recording):
    """The third call allocates nothing and captures nothing, with other weights too; other numbers
    have their own state. A shape is captured when it comes up again, so the second call may."""
    from copy import deepcopy

    # no reply ends early: the lengths of rows decide the shapes that are captured
    policy = tiny._replace(model=deepcopy(tiny.model), eos_token_ids=(-1,))
    engine, counts, places = Cached(), [], []
    for temperature in (1.3, 1.2, 1.3, 1.0, 1.2):
        for weight in policy.model.model.layers[1].mlp.parameters():
            weight.data.mul_(1.1)
        found = complete(
            engine, policy, contexts, SEEDS, max_new_tokens=16, temperature=temperature
        )
        assert equal(
            found, reference(policy, contexts, SEEDS, max_new_tokens=16, temperature=temperature)
        )
        counts.append(engine.metrics()["captured_shapes"])
        places.append([tensor.data_ptr() for tensor in engine.decoder.pages.keys])
    assert counts[1] == counts[2] > 0 and counts[3] == counts[4] and places[0] == places[4]


# --------------------------------------------------------------------------------- the distribution


@pytest.mark.slow
@pytest.mark.parametrize("engine", cases([Cached, Transformers], 1))
@pytest.mark.parametrize("temperature", cases([1.0, 2.5], [2.5]))
def test_replies_of_two_tokens_follow_their_exact_distribution(tiny, complete, engine, temperature):
    """All 36 replies of two tokens over a vocabulary of 6, enumerated: chi-square of 4,000 fixed
    seeds at 35 degrees of freedom.

    75.0 is its 99.99 % quantile: one sound engine in 10,000 sets of seeds would be called wrong.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=6,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=16,
        initializer_range=0.2,
    )
    policy = tiny._replace(
        model=Qwen3ForCausalLM(config).eval(),
        eos_token_ids=(99,),
        pad_token_id=0,
        context_length=16,
    )
    n, context = 4000, (1, 4, 2)
    seeds = [mix(11, i) for i in range(n)]
    replies = complete(
        engine(max_rows=n), policy, [context] * n, seeds, max_new_tokens=2, temperature=temperature
    )
    with torch.no_grad():
        logits = (
            policy.model(torch.tensor([[*context, first] for first in range(6)])).logits[:, -2:]
            / temperature
        )
    expected = (
        logits[0, 0].log_softmax(-1)[:, None] + logits[:, 1].log_softmax(-1)
    ).exp().flatten() * n
    observed = torch.bincount(
        torch.tensor([6 * g.token_ids[0] + g.token_ids[1] for g in replies]), minlength=36
    )
    assert (
        expected.min() > 5 and expected.max() > 1.5 * expected.median()
    )  # else the statistic means nothing
    assert float(((observed - expected) ** 2 / expected).sum()) < 75.0
