"""Episodes on the real engine: when an answer came changes nothing, and neither does what failed
before."""

from __future__ import annotations

import asyncio
import random
import signal

import numpy as np
import pytest
import torch

from parametrise import cases
from rlkit.engines import Cached, Transformers
from rlkit.engines.cached.scheduler import Scheduler
from rlkit.episodes import collect
from rlkit.episodes.episode import play as one_episode
from rlkit.errors import EngineError, EnvironmentFailed, Interrupted
from rlkit.system import rng
from rlkit.system.loops import run_together
from rlkit.tasks import arithmetic
from rlkit.types import Environment, Step, Task

TURNS = 4


class Talk:
    """A conversation of so many turns that waits for `pause` before each answer, and before its
    first prompt where `late`."""

    tools = {}  # noqa: RUF012

    def __init__(self, task, pause, late=False):
        self.task, self.pause, self.late, self.closed = task, pause, late, 0

    async def first_prompt(self):
        if self.late:
            await self.pause()
        return self.task.messages

    async def answer(self, rollout):
        await self.pause()
        n = len(rollout.steps)
        return rollout, (
            None
            if n == TURNS
            else [
                {
                    "role": "user",
                    "content": "And then? " * (1 + len(rollout.steps[-1].response_ids) % 3),
                }
            ]
        )

    async def close(self):
        self.closed += 1


async def at_once():
    """Waits for nothing."""


@pytest.fixture(scope="module")
def policy(tiny):
    """A third of the tokens ends a reply, so that episodes are of many lengths."""
    return tiny._replace(eos_token_ids=(*tiny.eos_token_ids, *range(100, 760, 3)))


@pytest.fixture(scope="module")
def tasks():
    return arithmetic(max_samples=5)


def play(policy, tasks, engine, pause=at_once, late=False, **more):
    environment = Environment(session=lambda task: Talk(task, pause, late), max_steps=9)
    settings = {"group_size": 2, "seed": 3, "max_new_tokens": 16} | more
    return collect(policy, tasks, engine=engine, environment=environment, **settings)


def bits(rollouts):
    return [[(step.response_ids, step.logprobs) for step in rollout.steps] for rollout in rollouts]


def tokens(rollouts):
    return [[step.response_ids for step in rollout.steps] for rollout in rollouts]


@pytest.fixture(scope="module")
def plain(policy, tasks):
    """The episodes whose answers wait for nothing."""
    rollouts = play(policy, tasks, Cached())
    assert (
        sum(len(r.steps) for r in rollouts) > 25
        and len({len(s.response_ids) for r in rollouts for s in r.steps}) > 5
    )
    return rollouts


@pytest.mark.slow
def test_two_collects_on_one_engine_are_one_collect_on_two(policy, tasks, plain):
    """Bit for bit: nothing of the first is left in the engine, whose weights are used in place."""
    engine = Cached()
    assert bits(play(policy, tasks, engine)) == bits(play(policy, tasks, engine)) == bits(plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    cases([Cached(max_rows=3), Cached(max_cached_tokens=1500), Transformers()], 1),
    ids=["rows", "cache", "reference"],
)
def test_slots_change_no_token(policy, tasks, plain, engine):
    found = play(policy, tasks, engine)
    assert tokens(found) == tokens(plain)
    for a, b in zip(found, plain, strict=True):
        for ours, theirs in zip(a.steps, b.steps, strict=True):
            torch.testing.assert_close(
                torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), rtol=1e-5, atol=1e-5
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", cases([{}, {"max_rows": 3}, {"max_cached_tokens": 1500}], [{"max_rows": 3}]), ids=str
)
@pytest.mark.parametrize("seeds", cases([2, 5], 1))
def test_a_run_repeats_itself_whenever_answers_come(policy, tasks, plain, weather, more, seeds):
    """First prompts and answers in five orders, some early, some late: the same bits; and the
    tokens of answers at once."""
    runs = [
        play(policy, tasks, Cached(**more), weather(seed).pause, late=True, admission_rounds=6)
        for seed in range(seeds)
    ]
    assert all(bits(found) == bits(runs[0]) for found in runs) and tokens(runs[0]) == tokens(plain)


@pytest.mark.slow
def test_a_barrier_gives_the_bits_of_answers_at_once(policy, tasks, plain, weather):
    assert bits(play(policy, tasks, Cached(), weather(1).pause, admission="barrier")) == bits(plain)


@pytest.mark.slow
@pytest.mark.parametrize("more", cases([{}, {"max_rows": 3}], 1), ids=str)
def test_free_gives_the_same_tokens(policy, tasks, plain, weather, more):
    """Prompts and answers join as they come: slots grow after the first burst."""
    assert tokens(
        play(policy, tasks, Cached(**more), weather(1).pause, late=True, admission="free")
    ) == tokens(plain)


def test_versions_stand_on_every_step(policy, tasks):
    assert {
        step.versions for r in play(policy, tasks[:2], Cached(), version=7) for step in r.steps
    } == {((0, 7),)}


def test_weights_are_not_changed_under_episodes_in_play(policy, tasks):
    engine = Cached()

    async def pause():
        with pytest.raises(EngineError, match=r"Cached.load: \d+ episodes are in play"):
            await engine.load(policy, 1)

    play(policy, tasks[:2], engine, pause)


@pytest.mark.slow
def test_collect_works_inside_a_running_loop_and_inside_a_collect(policy, tasks):
    """As in a notebook, and as in a session that plays episodes of its own on another engine."""
    alone = bits(play(policy, tasks[:1], Cached()))

    async def pause():
        assert bits(play(policy, tasks[:1], Cached())) == alone

    async def cell():
        return play(policy, tasks[:1], Cached(), pause)

    assert bits(asyncio.run(cell())) == alone


def test_a_session_that_closes_slowly_holds_up_no_decoding(policy, tasks):
    """The first episode to end closes when all others have ended."""
    ended, others = [], asyncio.Event()

    class Slow(Talk):
        async def close(self):
            ended.append(self)
            if len(ended) == 4:
                others.set()
            if len(ended) == 1:
                await others.wait()

    async def outside():
        await asyncio.sleep(0)

    environment = Environment(session=lambda task: Slow(task, outside), max_steps=9)
    assert (
        len(collect(policy, tasks[:4], engine=Cached(), environment=environment, max_new_tokens=16))
        == 4
    )


# ----------------------------------------------------------------------------------------- failures

ERRORS = [RuntimeError("by hand"), KeyboardInterrupt(), Interrupted(signal.SIGTERM)]


@pytest.mark.slow
@pytest.mark.parametrize("error", cases(ERRORS, 1), ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("where", ["decoder", "answer", "close"])
def test_after_an_error_sessions_are_closed_and_the_engine_is_as_new(
    policy, tasks, plain, monkeypatch, capfd, where, error
):
    """It comes out as it was raised, or as the environment's; the model is in its own mode, and
    nothing complains."""
    sessions, calls, raised = [], [], []

    def fail(at):
        calls.append(at)
        if at == where and len(calls) > 25 and not raised:
            raised.append(error)
            raise error

    class Failing(Talk):
        async def answer(self, rollout):
            fail("answer")
            return await super().answer(rollout)

        async def close(self):
            await super().close()
            fail("close")

    def opened(task):
        sessions.append(Failing(task, at_once))
        return sessions[-1]

    engine, advance = Cached(), Scheduler.advance
    mode = policy.model.config._attn_implementation, policy.model.training
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "advance", lambda self: (fail("decoder"), advance(self))[1])
        environment = Environment(session=opened, max_steps=9)
        blamed = isinstance(error, Exception) and where != "decoder"
        with pytest.raises(EnvironmentFailed if blamed else type(error)) as caught:
            collect(
                policy,
                tasks,
                engine=engine,
                environment=environment,
                group_size=2,
                max_new_tokens=16,
            )
    assert "by hand" in str(caught.value) if blamed else caught.value is error
    assert len(sessions) == 10 and [session.closed for session in sessions] == [1] * 10
    assert (policy.model.config._attn_implementation, policy.model.training) == mode
    complaints = [
        line for line in capfd.readouterr().err.splitlines() if "by hand" not in line
    ]  # the error itself comes first
    assert not complaints and bits(play(policy, tasks, engine)) == bits(plain)


@pytest.mark.slow
def test_an_error_in_the_loop_itself_comes_out_as_it_was_raised(policy, tasks, plain, monkeypatch):
    """A signal may strike while all wait for something outside."""
    sessions, engine = [], Cached()

    async def forever():
        selector = asyncio.get_running_loop()._selector
        select = selector.select

        def strike(timeout):
            selector.select = select
            raise Interrupted(signal.SIGTERM)

        if len(sessions) == len(tasks) and not hasattr(selector, "struck"):
            selector.struck, selector.select = True, strike
        await asyncio.Event().wait()

    def opened(task):
        sessions.append(Talk(task, forever))
        return sessions[-1]

    with pytest.raises(Interrupted):
        collect(
            policy,
            tasks,
            engine=engine,
            environment=Environment(session=opened, max_steps=9),
            max_new_tokens=16,
        )
    assert [session.closed for session in sessions] == [1] * len(tasks) and bits(
        play(policy, tasks, engine)
    ) == bits(plain)


class Dice:
    """A session that draws from every generator when it is opened, asked and answers, and waits
    between two draws."""

    tools: dict = {}  # noqa: RUF012

    def __init__(self):
        self.drawn = [draw()]

    async def first_prompt(self):
        self.drawn.append(draw())
        await asyncio.sleep(0)
        self.drawn.append(draw())
        return "roll"

    def answer(self, rollout):  # plain
        self.drawn.append(draw())
        return rollout, None if len(rollout.steps) == 2 else "again"

    def state(self):
        return {"drawn": self.drawn}


def draw():
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_what_a_session_draws_is_its_own():
    """Whatever episodes run beside it, and however long they wait; no two of its draws are equal,
    and nothing moves outside."""

    async def say(rollout, messages, session):
        for _ in range(rollout.sample):
            await asyncio.sleep(0)
        return Step((), (), (1,), (0.0,), "stop")

    async def played(*samples):
        task, dice = Task("a", ()), Environment(session=lambda task: Dice(), max_steps=3)
        return await run_together(
            [one_episode(task, dice, say, sample=i, seed=100 + i) for i in samples]
        )

    before = rng.state()["torch"]
    with rng.keep_generators():
        several, alone = (
            asyncio.run(played(2, 0, 1)),
            [asyncio.run(played(i))[0] for i in (2, 0, 1)],
        )
    assert several == alone and (rng.state()["torch"] == before).all()
    drawn = [
        number for rollout in several for triple in rollout.state["drawn"] for number in triple
    ]
    assert len(drawn) == 3 * 5 * 3 == len(set(drawn))
