"""The service around a decoder: who decodes with whom in which round, and what is left of it when
something fails.

The decoder here has no model: it ends each completion after as many rounds as the test says, and
writes down what it was given. Nothing sleeps: answers from outside wait for events.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal

import pytest

from parametrise import cases, count_threads
from rlkit.engines import Batched, Cached
from rlkit.engines.service import Service
from rlkit.errors import EngineError, Interrupted
from rlkit.system.loops import run, run_together
from rlkit.types import Generation, SamplingParams

RULES = ("rounds", "barrier", "free")


class Recorder:
    """A decoder of scripted lengths. `seen` has (round, keys that were new in it); `before` is
    called at the start of each round."""

    def __init__(self, lengths=lambda key, turn: 3, before=lambda rounds: None):
        self.lengths, self.before, self.rounds = lengths, before, 0
        self.left: dict[int, int] = {}
        self.params: dict[int, SamplingParams] = {}
        self.new: list[int] = []
        self.seen: list[tuple[int, tuple[int, ...]]] = []
        self.freed: list[tuple[int, int]] = []  # round, key
        self.together: list[set[SamplingParams]] = []

    @property
    def idle(self):
        return not self.left

    def accepts(self, params):
        return all(self.params[key] == params for key in self.left)

    def submit(self, key, prompt_ids, seed, params):
        assert key not in self.left
        self.left[key], self.params[key] = self.lengths(key, len(prompt_ids)), params
        self.new.append(key)

    def release(self, key):
        self.left.pop(key, None)
        self.freed.append((self.rounds, key))

    def advance(self):
        if self.new:
            self.seen.append((self.rounds, tuple(self.new)))
            self.new = []
        self.together.append({self.params[key] for key in self.left})
        self.before(self.rounds)
        self.rounds += 1
        self.left = {key: left - 1 for key, left in self.left.items()}
        ended = [key for key, left in self.left.items() if left == 0]
        self.left = {key: left for key, left in self.left.items() if left}
        return [(key, Generation((7,), (0.0,), "stop")) for key in ended]


class Played(Service):
    """A service over one decoder, which all loads give."""

    def __init__(self, decoder):
        super().__init__()
        self.own = decoder

    def make_decoder(self, policy):
        return self.own

    @property
    def kept(self):
        """What it still remembers of keys."""
        return [*self.waiting, *self.running, *self.due, *self.answered]


async def at_once(key, turn):
    """An answer that waits for nothing."""


def play(service, keys, turns=3, pause=at_once, version=0, rule="rounds", rounds=16):
    """Episodes of so many turns side by side, `pause(key, turn)` after each of them; their
    completions."""
    params = SamplingParams(admission=rule, admission_rounds=rounds)

    async def episode(key):
        try:
            replies = []
            for turn in range(1, turns + 1):
                replies.append(await service.generate(key, (1,) * turn, 0, params))
                await pause(key, turn)
            return replies
        finally:
            service.release(key)

    async def all_of_them():
        await service.load(None, version)
        return await run_together(map(episode, keys))

    return run(all_of_them())


def uneven(key, turn):
    return 1 + (5 * key + 3 * turn) % 7


# ----------------------------------------------------------------------------------- who joins when


@pytest.mark.parametrize("rule", RULES)
def test_an_answer_that_waits_for_nothing_joins_the_next_round(rule):
    """Whatever the rule: a reply of round r is followed by the next prompt of its episode in round
    r, beside those that still decode."""
    decoder = Recorder(lambda key, turn: 2 if key == 0 else 5)
    play(Played(decoder), [0, 1], rule=rule)
    assert decoder.seen == [(0, (0, 1)), (2, (0,)), (4, (0,)), (5, (1,)), (10, (1,))]


@pytest.mark.parametrize("rounds", [1, 4, 16])
def test_an_answer_from_outside_joins_so_many_rounds_after_its_reply(weather, rounds):
    """In any order of readiness, early or late, what the decoder is given, and when it is told that
    an episode is over, is the same."""
    found = []
    for seed in range(12):
        decoder = Recorder(uneven)
        service = Played(decoder)
        play(service, range(6), 4, weather(seed).pause, rounds=rounds)
        found.append((decoder.seen, sorted(decoder.freed)))
        joined = {}
        for at, keys in decoder.seen:
            for key in keys:
                joined.setdefault(key, []).append(at)
        for key, ats in joined.items():
            assert [b - a for a, b in itertools.pairwise(ats)] == [
                uneven(key, turn) + rounds for turn in (1, 2, 3)
            ]
    assert all(seen == found[0] for seen in found) and len({at for at, _ in found[0][1]}) > 3


def test_the_decoder_waits_for_a_late_answer():
    """The other episode decodes up to the round in which the answer is due, and not beyond it
    before it is there."""
    decoder, stood = Recorder(lambda key, turn: 20 if key == 0 else 1), []

    async def pause(key, turn):
        while (
            not stood or stood[-1] != decoder.rounds
        ):  # until the decoder stands still for a hundred turns of the loop
            stood.append(decoder.rounds)
            for _ in range(100):
                await asyncio.sleep(0)

    service = Played(decoder)
    play(
        service,
        [0, 1],
        2,
        lambda key, turn: pause(key, turn) if (key, turn) == (1, 1) else at_once(key, turn),
        rounds=4,
    )
    assert (
        decoder.seen == [(0, (0, 1)), (5, (1,)), (20, (0,))]
        and stood[-1] == 5
        and service.late_s > 0
    )


def test_where_nothing_decodes_the_counter_jumps():
    """No round is decoded for the sake of the counter."""
    decoder, decoded = Recorder(lambda key, turn: 2), []
    decoder.before = decoded.append
    play(
        Played(decoder),
        [0],
        2,
        lambda key, turn: asyncio.sleep(0) if turn == 1 else at_once(key, turn),
        rounds=100,
    )
    assert decoded == [0, 1, 102, 103]


@pytest.mark.parametrize("seed", range(4))
def test_a_barrier_gives_what_answers_at_once_give(weather, seed):
    quiet, windy = Recorder(uneven), Recorder(uneven)
    play(Played(quiet), range(6), 4)
    play(Played(windy), range(6), 4, weather(seed).pause, rule="barrier")
    assert (windy.seen, sorted(windy.freed)) == (
        quiet.seen,
        sorted(quiet.freed),
    ) and windy.rounds == quiet.rounds


@pytest.mark.parametrize("seed", range(4))
def test_free_never_stands_still_while_something_can_decode(weather, seed):
    """An answer joins in the next round after it is there, and the decoder waits only where all
    wait."""
    service = Played(Recorder(uneven))
    replies = play(service, range(6), 4, weather(seed).pause, rule="free")
    assert [len(own) for own in replies] == [4] * 6 and service.late_s == 0.0 and not service.kept


# ----------------------------------------------------------------------------------------- its life


def test_versions_stand_on_every_completion_and_the_rounds_go_on():
    service = Played(Recorder())
    first, second = (play(service, [0, 1], version=version) for version in (3, 4))
    assert [g.versions for own in first + second for g in own] == [((0, 3),)] * 6 + [((0, 4),)] * 6


def test_there_is_no_completion_before_weights_are_loaded():
    with pytest.raises(EngineError, match="await load"):
        run(Cached().generate(0, [1], 0, SamplingParams()))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"max_new_tokens": 0},
        {"top_p": 0.0},
        {"top_k": -1},
        {"admission_rounds": 0},
    ],
)
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="{}={}: must be".format(*next(iter(wrong.items())))):
        run(Cached().generate(0, [1], 0, SamplingParams(**wrong)))


def test_weights_do_not_change_while_episodes_are_in_play():
    """Neither while one decodes nor while one waits for something outside; afterwards they do."""
    refused = []
    service = Played(Recorder())

    async def pause(key, turn):
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="in play"):
            await service.load(None, 1)
        refused.append(key)

    play(service, [0, 1], 3, pause)
    assert len(refused) == 6 and play(service, [0], version=1)[0][0].versions == ((0, 1),)


def test_completions_with_other_numbers_wait_for_each_other():
    decoder = Recorder(uneven)
    service = Played(decoder)

    async def main():
        await service.load(None, 0)
        params = [SamplingParams(temperature=t) for t in (1.0, 0.5)]
        asked = [
            asyncio.create_task(service.generate(key, (1,), 0, params[key % 2])) for key in range(8)
        ]
        await asyncio.wait(asked)
        for key in range(8):
            service.release(key)

    run(main())
    assert (
        all(len(params) == 1 for params in decoder.together)
        and len(set.union(*decoder.together)) == 2
    )


def test_a_key_that_is_released_while_it_decodes_or_waits_is_forgotten():
    """The others go on as if it had ended."""
    decoder = Recorder(lambda key, turn: 10 if key == 0 else 3)
    service = Played(decoder)

    async def main():
        await service.load(None, 0)
        params = SamplingParams()
        asked = [asyncio.create_task(service.generate(key, (1,), 0, params)) for key in range(3)]
        decoder.before = lambda at: at == 1 and service.release(0)
        done, _ = await asyncio.wait(asked[1:])
        assert len(done) == 2 and not asked[0].done()
        service.release(1)  # it and the other wait for something outside
        assert service.over == {1}
        service.release(2)
        asked[0].cancel()

    run(main())
    assert not service.kept


def test_one_episode_of_many_is_cancelled():
    """While it decodes: its reply is given to no one, and the others have theirs."""
    decoder = Recorder(uneven)
    service = Played(decoder)

    async def episode(key):
        try:
            return [await service.generate(key, (1,) * n, 0, SamplingParams()) for n in (1, 2, 3)]
        finally:
            service.release(key)

    async def main():
        await service.load(None, 0)
        tasks = [asyncio.create_task(episode(key)) for key in range(5)]
        decoder.before = lambda at: tasks[3].cancel() if at == 4 else None
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(found[3], asyncio.CancelledError) and all(
            len(own) == 3 for i, own in enumerate(found) if i != 3
        )

    run(main())
    assert not service.kept and not decoder.left


@pytest.mark.slow
def test_nothing_is_kept_of_thousands_of_keys():
    service = Batched(
        lambda policy, prompts, seeds, params: [Generation((1,), (0.0,), "stop")] * len(prompts)
    )
    for turns in (1, 2):
        play(service, range(3000), turns)
    assert not [
        *service.waiting,
        *service.running,
        *service.due,
        *service.answered,
        *service.decoder.waiting,
    ]
    assert service.driver is None or service.driver.done()


# ----------------------------------------------------------------------------------------- failures

ERRORS = [
    ValueError("no such token"),
    KeyboardInterrupt("by hand"),
    Interrupted(signal.SIGTERM),
    SystemExit(3),
]


@pytest.mark.parametrize("error", cases(ERRORS, ERRORS[:2]), ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("where", cases(["advance", "outside"], 1))
def test_an_error_ends_all_and_comes_out_as_it_was_raised(where, error, capfd):
    """No task, thread or key is left, nothing is said on stderr, and after the next load the engine
    is as new."""
    threads = count_threads()

    def fail(at):
        if where == "advance" and at == 6:
            raise error

    async def pause(key, turn):
        await asyncio.sleep(0)
        if where == "outside" and key == 2:
            raise error

    tasks = []

    async def watched(key, turn):
        tasks.append(asyncio.current_task())
        await pause(key, turn)

    service = Played(Recorder(uneven, fail))
    with pytest.raises(type(error)) as caught:
        play(service, range(4), 4, watched)
    assert caught.value is error and not service.kept and all(task.done() for task in tasks)
    assert service.own.left == {} and {key for _, key in service.own.freed} == {0, 1, 2, 3}
    del caught
    gc.collect()
    assert capfd.readouterr().err == "" and count_threads() == threads
    service.own.before, service.own.lengths = lambda at: None, lambda key, turn: 3
    where = "nowhere"
    assert [len(own) for own in play(service, range(4))] == [3] * 4


def test_a_decoder_that_failed_is_not_asked_again_before_the_next_load():
    decoder = Recorder(before=lambda at: 1 / 0)
    service = Played(decoder)

    async def main():
        await service.load(None, 0)
        for key in range(2):
            with pytest.raises(ZeroDivisionError):
                await service.generate(key, (1,), 0, SamplingParams())
        decoder.before = lambda at: None
        await service.load(None, 0)
        assert (await service.generate(2, (1,), 0, SamplingParams())).token_ids == (7,)
        service.release(2)

    run(main())


def test_a_running_loop_waits_meanwhile_also_twice():
    """As in a notebook, where a cell runs inside a loop: each `play` has a loop of its own, in the
    same thread."""

    async def cell(depth):
        loop = asyncio.get_running_loop()
        first = play(Played(Recorder()), range(3))
        if depth:
            run(cell(depth - 1))
        assert play(Played(Recorder()), range(3)) == first and asyncio.get_running_loop() is loop
        await asyncio.sleep(0)

    asyncio.run(cell(2))


def test_a_service_lives_on_in_a_second_loop():
    """The first loop ended in the middle: what it left is forgotten, and that is no failure of the
    decoder."""
    service = Played(Recorder())

    async def leave():
        await service.load(None, 0)
        asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
        await service.generate(0, (1,), 0, SamplingParams())

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(leave())
    assert not service.kept and run(service.generate(1, (1,), 0, SamplingParams())).token_ids == (
        7,
    )


def test_giving_the_engine_new_weights_counts_as_its_work(monkeypatch):
    """Under adapters it computes copies of all weights, which is no time of the sessions."""
    seconds = iter((1.0, 4.5))
    monkeypatch.setattr("time.perf_counter", lambda: next(seconds))

    class Slow(Service):
        def make_decoder(self, policy):
            return Recorder()

    engine = Slow()
    asyncio.run(engine.load(None, 1))
    assert engine.busy_s == 3.5
