"""Pages and slots of the cached engine: who holds what, who gives way, how full the slots are."""

from __future__ import annotations

import copy
import importlib.util
import random
import sys
from pathlib import Path

import pytest
import torch

from parametrise import cases
from rlkit.engines import Cached, Transformers
from rlkit.engines.cached import cache, engine
from rlkit.engines.cached.cache import Pages
from rlkit.engines.cached.passes import Passes
from rlkit.engines.cached.sampler import Sampler, Saved
from rlkit.engines.cached.slots import Slots
from rlkit.functional import mix
from rlkit.models import LoRA, add_lora
from rlkit.system import device
from rlkit.types import SamplingParams

CPU = torch.device("cpu")
BENCHMARKS = Path(__file__).parents[2] / "experiments" / "benchmarks"


@pytest.fixture(scope="module")
def refill():
    """The benchmark of the same name, with the engine's model left out."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("refill", BENCHMARKS / "refill.py")
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return found


def tokens(replies):
    return [(reply.token_ids, reply.finish_reason) for reply in replies]


# -------------------------------------------------------------------------------------- bookkeeping


def consistent(slots: Slots) -> None:
    """Each page is free or held as often as rows hold it; the table says what the rows say."""
    pages = slots.pages
    rows = [*slots.queue, *slots.active, *slots.held.values()]
    held = [page for row in rows for page in row.pages]
    assert [held.count(page) for page in range(1, pages.pages + 1)] == pages.holders[1:]
    assert sorted(pages.left) == [n for n in range(1, pages.pages + 1) if not pages.holders[n]]
    for number in range(pages.slots):
        row = slots.rows[number] if number < len(slots.rows) else None
        own = [] if row is None else row.pages
        assert pages.table[number].tolist() == own + [0] * (pages.columns - len(own))
        assert int(slots.room[number]) in (0, len(own) * pages.page)
    for row in rows:  # no one writes into a page that another reads
        alike = [own for own in rows if own.reads and own.prompt == row.prompt]
        readers = alike if row.reads and row.saved is None else [row]
        for page in row.pages[row.known // pages.page :]:
            assert pages.holders[page] == sum(page in own.pages for own in readers)


@pytest.mark.parametrize("seed", cases(range(20), 3))
def test_every_page_is_free_or_held_whatever_happens(seed):
    """Prompts come, share pages, draw, end, go on, are written anew, are cut and released."""
    rng = random.Random(seed)
    slots = Slots(Pages(96, 4, 96, CPU))
    openings = [tuple(rng.randrange(9) for _ in range(n)) for n in (5, 16, 17, 40)]
    openings += [(*openings[3][:33], 9, *range(n)) for n in (0, 1, 14, 20)]
    asked: dict[int, tuple[int, ...]] = {}
    cuts = 0
    for turn in range(300):
        key = rng.randrange(12)
        chance = rng.random()
        if key not in asked and chance < 0.6:
            asked[key] = rng.choice(openings)
            slots.submit(key, asked[key], mix(seed, turn), min(96, len(asked[key]) + 30))
        elif key in slots.held and chance < 0.8:
            whole = slots.held[key].tokens
            prompt = (*whole[: rng.randrange(1, len(whole) + 1)], *(1,) * rng.randrange(1, 9))[:60]
            slots.submit(key, prompt, mix(seed, turn), len(prompt) + 30)
        elif chance > 0.95:
            asked.pop(key, None)
            slots.release(key)
        slots.stopped = []
        slots.fill()
        if chance < 0.5:
            slots.sort()
            lengths = [max(slots.reach[row.slot], len(row.context)) for row in slots.rows]
            assert lengths == sorted(lengths, reverse=True)
        consistent(slots)
        for row in slots.reading:
            slots.begin(row)
        cut = slots.extend(rng.randrange(1, 9))
        cuts += len(cut)
        for row, _ in cut:
            row.reads = True
        slots.fill()
        consistent(slots)
        for row in slots.active:
            if not row.reads and rng.random() < 0.1:
                drawn = int(slots.reach[row.slot]) - len(row.prompt)
                slots.finish(row, (3,) * (drawn + 1))
        consistent(slots)
    assert cuts > 0
    slots.clear()
    consistent(slots)
    assert slots.idle and len(slots.pages.left) == slots.pages.pages


def test_samples_of_a_prompt_share_its_full_pages():
    slots = Slots(Pages(400, 4, 96, CPU))
    for key in range(3):
        slots.submit(key, tuple(range(40)), key, 60)
    slots.fill()
    first, second, third = (row.pages for row in slots.active)
    assert first[:2] == second[:2] == third[:2] and len({first[2], second[2], third[2]}) == 3


@pytest.mark.parametrize("order", cases([(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)], 2))
def test_who_gives_way_depends_on_contexts_alone(order):
    """The row that has drawn least, whichever came first."""
    slots = Slots(Pages(160, 4, 96, CPU))
    prompts = {key: (key + 1,) * (30 + key) for key in order}
    for key in order:
        slots.submit(key, prompts[key], key, 96)
    slots.fill()
    cut = []
    for _ in range(12):
        for row in slots.reading:
            slots.begin(row)
        cut += [row.key for row, _ in slots.extend(4)]
    assert cut == [0]


# ------------------------------------------------------------------------------- rows that give way


def conversation(complete, engine, policy, contexts, seeds):
    """Three turns of each context, and the replies of all turns."""
    seen, held = {}, dict(enumerate(contexts))

    def follow(index, reply):
        seen.setdefault(index, []).append(reply._replace(versions=()))
        if len(seen[index]) == 3:
            return None
        held[index] += reply.token_ids + tuple(range(200, 205 + 3 * (index % 3)))
        return held[index], mix(index, len(seen[index]))

    complete(engine, policy, contexts, seeds, follow, max_new_tokens=30, max_thinking_tokens=3)
    return [reply for _, replies in sorted(seen.items()) for reply in replies]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["auto", "eager"])
@pytest.mark.parametrize("every", cases([1, 8], 1))
def test_rows_that_give_way_go_on_where_they_were(small, complete, monkeypatch, every, kernel):
    """In a cache of two contexts: the tokens are those of a cache without bounds, none is drawn
    twice, and no more pages are in use than there are."""
    rng = random.Random(3)
    contexts = [tuple(rng.randrange(100, 700) for _ in range(20 + i)) for i in range(6)]
    seeds = [mix(1, i) for i in range(6)]
    settings = {"check_every": every, "kernel": kernel}
    free = conversation(complete, Cached(**settings), small, contexts, seeds)
    cuts, extend = [], Slots.extend
    monkeypatch.setattr(
        Slots, "extend", lambda self, n: (cuts.append(len(cut := extend(self, n))), cut)[1]
    )
    bounded = Cached(max_cached_tokens=200, **settings)
    found = conversation(complete, bounded, small, contexts, seeds)
    assert tokens(found) == tokens(free) and sum(cuts) > 0
    assert [reply.forced for reply in found] == [reply.forced for reply in free]
    for ours, theirs in zip(found, free, strict=True):
        torch.testing.assert_close(
            torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=1e-4
        )
    assert bounded.decoder.pages.keys[0].shape[1] == 200 // 16 + 2  # 208 tokens and the spare page


@pytest.mark.slow
def test_samples_of_a_short_prompt_that_give_way_keep_their_own_tokens(small, complete):
    """The prompt fills no page, so nothing but the tokens tells the contexts of the rows apart."""
    contexts = [tuple(range(100, 108))] * 6
    seeds = [mix(5, i) for i in range(6)]
    settings = {"max_new_tokens": 60}
    free = complete(Cached(), small, contexts, seeds, **settings)
    bounded = Cached(max_cached_tokens=130)
    assert tokens(complete(bounded, small, contexts, seeds, **settings)) == tokens(free)


@pytest.mark.slow
def test_the_cache_is_made_once_and_no_row_is_read_twice(small, complete, monkeypatch):
    """Ten calls whose contexts grow and share no beginning: the first design made a new cache for
    each and drew the rows again."""
    read, made, own = [], [], Passes.read

    def watched(self, rows):
        read.extend(len(row.context) - row.known for row in rows)
        return own(self, rows)

    monkeypatch.setattr(Passes, "read", watched)
    monkeypatch.setattr(
        cache, "allocate_zeros", lambda shape, like: (made.append(shape), torch.zeros(shape))[1]
    )
    engine = Cached()
    for call in range(1, 11):
        contexts = [(50 + i, *range(100, 100 + 10 * call + i)) for i in range(5)]
        complete(engine, small, contexts, range(5), max_new_tokens=8)
        assert sum(read) == sum(map(len, contexts))
        read.clear()
    assert len(made) == 4  # keys and values of two layers


@pytest.mark.slow
@pytest.mark.parametrize("slots", [3, 64])
def test_a_beginning_shared_by_all_prompts_is_read_once(small, complete, monkeypatch, slots):
    """Ten prompts of two samples each: 40 common tokens, of which two pages of 16 are shared, and 9
    own ones. The replies are those of prompts that are read alone."""
    rng = random.Random(4)
    common = tuple(rng.randrange(100, 700) for _ in range(40))
    prompts = [(*common, *(rng.randrange(100, 700) for _ in range(9))) for _ in range(10)]
    contexts = [prompt for prompt in prompts for _ in range(2)]
    seeds = [mix(2, i) for i in range(20)]
    alone = [
        complete(Cached(), small, [context], [seed], max_new_tokens=8)[0]
        for context, seed in zip(contexts, seeds, strict=True)
    ]
    read, own = [], Passes.read

    def watched(self, rows):
        read.extend(len(row.context) - row.known for row in rows)
        return own(self, rows)

    monkeypatch.setattr(Passes, "read", watched)
    found = complete(Cached(max_rows=slots), small, contexts, seeds, max_new_tokens=8)
    assert tokens(found) == tokens(alone)
    for ours, theirs in zip(found, alone, strict=True):
        torch.testing.assert_close(
            torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=1e-5
        )
    if slots == 64:
        assert sorted(read) == [49 - 32] * 9 + [49]


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(range(40), 4))
def test_shared_beginnings_change_no_reply(small, complete, monkeypatch, case):
    """Prompts from a random tree, in any slots and cache, over turns that go on or are rewritten,
    with and without adapters and a thinking budget: the replies are the reference engine's, and at
    every filling the pages are held by whoever reads them."""
    rng = random.Random(case)

    def some(length):
        return tuple(rng.randrange(100, 700) for _ in range(length))

    tree = [some(rng.choice((3, 16, 30, 48)))]
    for _ in range(4):
        tree.append(
            (*rng.choice(tree)[: rng.choice((15, 16, 17, 99))], *some(rng.randrange(1, 20)))
        )
    contexts = [rng.choice(tree)[:90] for _ in range(12)]
    policy = small
    if rng.random() < 0.5:
        torch.manual_seed(case)
        policy = small._replace(model=add_lora(copy.deepcopy(small.model), LoRA(rank=2)))
        for name, weight in policy.model.named_parameters():
            weight.data += 0.1 * torch.randn_like(weight) if "lora" in name else 0
    limits = {
        "max_rows": rng.choice((1, 2, 3, 64)),
        "max_cached_tokens": rng.choice((None, 200, 330)),
        "check_every": rng.choice((1, 8)),
    }
    params = {"max_new_tokens": 12, "max_thinking_tokens": rng.choice((None, 3))}

    def play(engine):
        seen, held, draw = {}, dict(enumerate(contexts)), random.Random(case)
        rests = [[draw.randrange(100, 700) for _ in range(7)] for _ in range(12)]
        # the tokens of the first turn that the second prompt keeps; 999: all of them
        cuts = [draw.choice((999, draw.randrange(1, 90))) for _ in range(12)]

        def follow(index, reply):
            seen.setdefault(index, []).append(reply._replace(versions=()))
            if len(seen[index]) == 2:
                return None
            whole = held[index] + reply.token_ids
            held[index] = (*whole[: cuts[index]], *rests[index])
            return held[index], mix(case, index)

        complete(engine, policy, contexts, [mix(case, i, 1) for i in range(12)], follow, **params)
        return [reply for _, replies in sorted(seen.items()) for reply in replies]

    fill = Slots.fill

    def checked(self):
        moves = fill(self)
        consistent(self)
        return moves

    monkeypatch.setattr(Slots, "fill", checked)
    found, expected = play(Cached(**limits)), play(Transformers())
    assert tokens(found) == tokens(expected)
    assert [reply.forced for reply in found] == [reply.forced for reply in expected]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(
            torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=1e-4
        )


def test_a_slot_that_is_stopped_gives_no_completion(small):
    """One that ended in a step that failed would be given to the next row of its slot."""
    sampler = Sampler(2, small, SamplingParams(max_new_tokens=4), CPU)
    sampler.ended[1] = True
    sampler.stop(torch.tensor([1]))
    assert sampler.take(2) == []


def test_tokens_sampled_before_a_row_lost_its_slot_count_when_one_gives_way():
    """A row that had its slot again and was not yet read counted as one without tokens."""
    slots = Slots(Pages(400, 4, 96, CPU))
    for key in range(2):
        slots.submit(key, (key,) * 20, key, 90)
    slots.fill()
    one, two = slots.active
    one.saved = Saved((3,) * 30, (0.0,) * 30, (False,) * 30, None)
    slots.begin(two)
    slots.extend(3)
    assert slots._find_weakest() is two


@pytest.mark.parametrize("length, shared", [(31, 1), (32, 1), (33, 2)])
def test_a_sample_that_enters_later_reads_the_last_token_again(length, shared):
    """This token's hidden state gives the first new one, even if the prompt fills its pages."""
    slots = Slots(Pages(400, 4, 96, CPU))
    prompt = tuple(range(length))
    slots.submit(0, prompt, 0, 60)
    slots.fill()
    (first,) = slots.reading
    slots.begin(first)
    slots.submit(1, prompt, 1, 60)
    slots.fill()
    (second,) = slots.reading
    assert second.known == 16 * shared
    assert second.pages[:shared] == first.pages[:shared]
    assert not set(second.pages[shared:]) & set(first.pages)
    consistent(slots)


def test_few_tokens_in_common_hold_no_prompt_back(small, complete, monkeypatch):
    """A page in common and five prompts: a pass of its own would cost more than it saves."""
    passes, own = [], Passes.read
    monkeypatch.setattr(
        Passes, "read", lambda self, rows: (passes.append(len(rows)), own(self, rows))[1]
    )
    prompts = [(*range(100, 116), 50 + i, 60, 61) for i in range(5)]
    complete(Cached(), small, prompts, range(5), max_new_tokens=4)
    assert passes == [5]


# ----------------------------------------------------------------------------------------- its size


def test_the_size_is_a_share_of_the_total_memory_beside_the_weights(tiny, monkeypatch):
    """Two layers of a card's worth: 0.35 of what the weights leave, over the bytes of a token."""
    weights = sum(p.numel() * p.element_size() for p in tiny.model.parameters())
    config = tiny.model.config
    size = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    monkeypatch.setattr(cache, "total_memory", lambda device: weights + 1000 * size)
    assert cache.count_token_bytes(tiny.model) == size
    assert cache.choose_cache_tokens(tiny.model, CPU) == 350
    monkeypatch.setattr(cache, "total_memory", lambda device: 1)
    assert cache.choose_cache_tokens(tiny.model, CPU) == 1


def test_the_caches_of_ranks_on_one_machine_fit_its_memory(tiny, monkeypatch):
    """Four ranks in one small container: each took its share of the whole, 1.4 times what is
    there."""
    weights = sum(p.nbytes for p in tiny.model.parameters())
    size = cache.count_token_bytes(tiny.model)
    monkeypatch.setattr(device, "machine_memory", lambda: 4 * (weights + 1000 * size))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cache.choose_cache_tokens(tiny.model, CPU) == 350


def test_a_size_is_settled_once_and_kept(tiny, monkeypatch):
    """The first weights decide; a resumed run, or a process that samples for another, is told."""
    monkeypatch.setattr(engine, "choose_cache_tokens", lambda causal, device: 500)
    own, told, named = Cached(), Cached(), Cached(max_cached_tokens=700)
    told.keep_cached_tokens(300)
    named.keep_cached_tokens(300)
    for given, size in ((own, 500), (told, 300), (named, 700)):
        given.make_decoder(tiny)
        assert given.cached_tokens == size
    assert Cached(max_rows=2).max_cached_tokens is None


def test_memory_of_a_cache_on_a_cpu_is_taken_as_it_is_used():
    """A cache of a gigabyte is nothing until it is written to."""
    found = cache.allocate_zeros((1 << 14, 1 << 14), torch.zeros(0))
    assert found.shape == (1 << 14, 1 << 14) and not found[-1].any()


# ------------------------------------------------------------------------------- how full slots are


@pytest.mark.slow
@pytest.mark.parametrize(
    "load", ["GSM8K with tools", "thinking, 4k", "prompts of 2,000", "forced lengths"]
)
def test_slots_are_refilled_at_the_next_look(tiny, refill, load):
    """The bounds are those that the cache was built for; rooms of eight slots let 70 to 150 of 256
    rows draw."""
    found = refill.measure(refill.LOADS[load], tiny)
    assert found["rows_drawing"] >= 0.95
    assert found["steps_to_ideal"] <= 1.03
    assert found["drawn_to_needed"] == 1.0


def test_a_row_alone_at_the_end_does_not_wait_to_be_read(tiny, refill):
    """It waited until the rows that drew beside it were few."""
    with refill.without_a_model():
        decoder = Cached(max_rows=64, kernel="eager").make_decoder(tiny)
        decoder.passes.logits = lambda states: None
        params = SamplingParams(max_new_tokens=400)
        for key in range(65):
            decoder.submit(key, (1 + key,) * 9, 8 if key == 0 else 300, params)
        while not decoder.idle:
            for key, _ in decoder.advance():
                decoder.release(key)
    assert decoder.rounds < 8 + 300 + 30
