"""Sessions: opened once an episode and closed exactly once, with tools of their own that run while
others do."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from contextlib import asynccontextmanager, contextmanager

import pytest

from parametrise import each
from rlkit.engines import Batched
from rlkit.environments import answer_calls, dialogue, hermes, tool_use, xml
from rlkit.environments.session import open_session
from rlkit.episodes import collect
from rlkit.episodes.episode import play
from rlkit.errors import ConfigError, EnvironmentFailed, Interrupted
from rlkit.models.chat import encode_scaffold
from rlkit.system.loops import run
from rlkit.types import Environment, Generation, Rollout, Step, Task, ToolCall

TASK = Task("t/0", ({"role": "user", "content": "Go."},))
EPISODES = 4


def reply(content: str = "ok", *calls: str) -> Step:
    """A reply that calls tools by name, without arguments or with one named `text`: "note",
    "note:hello"."""
    parts = [call.partition(":") for call in calls]
    made = tuple(
        ToolCall(f"call_{i}", name, {"text": text} if colon else {})
        for i, (name, colon, text) in enumerate(parts)
    )
    return Step((), (), (), (), "tool" if made else "stop", content=content, tool_calls=made)


def saying(*replies: Step):
    """A policy that says these one after the other, without an engine."""

    async def say(rollout, messages, session):
        return replies[len(rollout.steps)]

    return say


def played(environment: Environment, *replies: Step, n: int = 1) -> list[Rollout]:
    """n episodes at the same time."""

    async def all_of_them():
        return await asyncio.gather(
            *(play(TASK, environment, saying(*replies), sample=i) for i in range(n))
        )

    return run(all_of_them())


def result(rollout: Rollout, step: int = 0) -> str:
    return rollout.steps[step].tool_results[0].content


# -------------------------------------------------------------------------------------- closed once


class Counted:
    """A session whose end is counted; `do` is what its answer does."""

    tools = {}  # noqa: RUF012
    opened, ended = 0, 0

    def __init__(self, do):
        self.do = do
        Counted.opened += 1

    def first_prompt(self):
        return TASK.messages

    def answer(self, rollout):
        return self.do(rollout)

    def end(self):
        Counted.ended += 1


def bare(do):
    session = Counted(do)
    session.close = session.end
    return session


async def turns():
    """Closings of one batch that end one after the other: the first failure must not cut the others
    short."""
    for _ in range(2 * Counted.ended + 1):
        await asyncio.sleep(0)


def awaited_close(do):
    session = Counted(do)

    async def close():
        await turns()
        session.end()

    session.close = close
    return session


@contextmanager
def managed(do):
    session = Counted(do)
    try:
        yield session
    finally:
        session.end()


@asynccontextmanager
async def awaited_manager(do):
    await asyncio.sleep(0)
    session = Counted(do)
    try:
        yield session
    finally:
        await turns()
        session.end()


async def awaited_session(do):
    return bare(do)


FORMS = [bare, awaited_close, managed, awaited_manager, awaited_session]


def ends(rollout):
    return rollout, None


def raises(rollout):
    if rollout.sample == 1:
        raise ZeroDivisionError("mine")
    return rollout, None


async def waits(rollout):
    await asyncio.Event().wait()


@pytest.fixture
def interruptible():
    """Ctrl-C as in a terminal: a process in the background may have been started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def says(tiny, error=None):
    def complete(policy, prompts, seeds, params):
        if isinstance(error, signal.Signals):
            os.kill(os.getpid(), error)
        elif error is not None:
            raise error
        ids = (*encode_scaffold(policy.renderer, "ok"), policy.eos_token_ids[0])
        return [Generation(ids, (-1.0,) * len(ids), "stop")] * len(prompts)

    return Batched(complete)


@pytest.mark.slow
@each("inside", [False, True], ids=["", "in a running loop"])
@each("form", FORMS)
@each(
    ("do", "engine", "deadline", "raised"),
    [
        (ends, None, None, None),
        (raises, None, None, EnvironmentFailed),
        (ends, RuntimeError("the engine broke"), None, RuntimeError),
        (ends, KeyboardInterrupt(), None, KeyboardInterrupt),
        (ends, Interrupted(signal.SIGTERM), None, Interrupted),
        (ends, signal.SIGINT, None, KeyboardInterrupt),
        (waits, None, 0.01, None),
    ],
    ids=[
        "a normal end",
        "it raises",
        "the engine raises",
        "an interruption in decoding",
        "a signal that rlkit handles",
        "Ctrl-C in decoding",
        "its deadline",
    ],
)
def test_every_session_is_closed_exactly_once(
    tiny, interruptible, do, engine, deadline, raised, form, inside
):
    """An environment that raised, or Ctrl-C, left the other sessions open."""
    Counted.opened = Counted.ended = 0
    environment = Environment(session=lambda task: form(do), deadline=deadline)

    def collected():
        return collect(
            tiny, [TASK], engine=says(tiny, engine), environment=environment, group_size=EPISODES
        )

    async def in_a_loop():
        return collected()

    call = (lambda: asyncio.run(in_a_loop())) if inside else collected
    if raised is None:
        assert [r.truncation for r in call()] == ["deadline" if deadline else ""] * EPISODES
    else:
        with pytest.raises(raised):
            call()
    assert (Counted.opened, Counted.ended) == (EPISODES, EPISODES)


@pytest.mark.parametrize("form", FORMS)
def test_one_cancelled_episode_closes_its_session_and_no_other(form):
    Counted.opened = Counted.ended = 0
    go = asyncio.Event()

    async def together(rollout):
        await go.wait()
        return rollout, None

    async def main():
        playing = [
            asyncio.create_task(
                play(TASK, Environment(session=lambda task: form(together)), saying(reply()))
            )
            for _ in range(3)
        ]
        while Counted.opened < 3:
            await asyncio.sleep(0)
        playing[1].cancel()
        await asyncio.wait(playing[1:2])
        assert playing[1].cancelled() and Counted.ended == 1
        go.set()
        await asyncio.gather(playing[0], playing[2])

    run(main())
    assert Counted.ended == 3


def test_a_failing_close_does_not_hide_the_first_error_and_is_told_otherwise():
    class Stuck(Counted):
        def close(self):
            raise OSError("stuck")

    environment = Environment(session=lambda task: Stuck(raises))
    with pytest.raises(
        EnvironmentFailed,
        match=(
            r"session's close raised OSError: stuck at .*test_sessions.py:\d+, in an episode of"
            r" task 't/0'"
        ),
    ):
        played(environment, reply())
    with pytest.raises(EnvironmentFailed, match="answer raised ZeroDivisionError: mine") as said:
        run(play(TASK, environment, saying(reply()), sample=1))
    assert "OSError: stuck" in said.value.__notes__[0]


def test_a_manager_cannot_make_an_error_vanish():
    class Swallows(Counted):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return True

    with pytest.raises(EnvironmentFailed, match="mine"):
        run(
            play(
                TASK, Environment(session=lambda task: Swallows(raises)), saying(reply()), sample=1
            )
        )


def test_what_is_no_session_is_named_and_closed():
    Counted.ended = 0

    class Half:
        tools = {}  # noqa: RUF012
        close = Counted.end

    with pytest.raises(EnvironmentFailed, match=r"Half .*has no `first_prompt`"):
        played(Environment(session=lambda task: Half()), reply())
    assert Counted.ended == 1


# --------------------------------------------------------------------------------- state of its own


class Shelf:
    """Keeps a word for the episode."""

    closed: list[str] = []  # noqa: RUF012

    def __init__(self, *, task: Task | None = None, limit: int = 100):
        self.word, self.task, self.limit = "", task, limit

    def put(self, text: str) -> str:
        """Keeps a word.

        Args:
            text: The word.
        """
        self.word = text[: self.limit]
        return f"kept {self.word}"

    async def get(self) -> str:
        """Gives the word."""
        return self.word

    def helper(self):
        return "no docstring, no tool"

    def state(self):
        return {"word": self.word, "task": self.task.id}

    async def close(self):
        Shelf.closed.append(self.word)


def test_the_tools_of_a_class_keep_their_state_and_share_it_with_no_other_episode():
    """A tool lost its state after every reply, or one sample read another's secret."""
    Shelf.closed.clear()
    environment = tool_use(tools={"shelf": functools.partial(Shelf, limit=3)}, parse_calls=hermes)

    def say_own(i):
        return saying(reply("", f"put:{i}{i}{i}{i}"), reply("", "get"), reply("done"))

    async def main():
        return await asyncio.gather(
            *(play(TASK, environment, say_own(i), sample=i) for i in range(4))
        )

    rollouts = run(main())
    assert [result(r, 1) for r in rollouts] == ["000", "111", "222", "333"] == sorted(Shelf.closed)
    assert [r.state for r in rollouts] == [
        {"shelf": {"word": str(i) * 3, "task": "t/0"}} for i in range(4)
    ]


def test_a_closure_keeps_its_state_over_the_episode():
    def tools(task):
        kept = []

        def count() -> str:
            kept.append(1)
            return str(len(kept))

        return {"count": count}

    rollouts = played(
        tool_use(tools={"x": Shelf})._replace(tools=tools),
        reply("", "count"),
        reply("", "count"),
        reply("done"),
        n=3,
    )
    assert [(result(r, 0), result(r, 1)) for r in rollouts] == [("1", "2")] * 3
    assert all("state" not in r.metadata for r in rollouts)


def test_the_methods_of_a_class_are_read_by_a_parser_and_named_in_the_schema():
    environment = tool_use(tools={"shelf": Shelf}, parse_calls=xml)
    _, (call,) = environment.parse_calls('<tool name="put">word</tool>')
    assert (call.name, call.arguments) == ("put", {"text": "word"})

    async def names():
        async with open_session(environment, TASK) as session:
            from rlkit.environments import tool_schema

            return {
                name: list(tool_schema(tool)["function"]["parameters"]["properties"])
                for name, tool in session.tools.items()
            }

    assert run(names()) == {"put": ["text"], "get": []}


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ({"a": Counted}, "no public method with a docstring"),
        (
            {"a": Shelf, "b": Shelf},
            r"tools.a and environment.tools.b both give .* '(get|put)'; .*'~environment.tools.a'",
        ),
    ],
)
def test_classes_that_give_no_tools_are_refused(tools, words):
    with pytest.raises(ConfigError, match=words):
        tool_use(tools=tools)


def test_a_tool_class_that_cannot_be_made_is_blamed_and_the_others_are_closed():
    class Broken(Shelf):
        def __init__(self):
            raise ValueError("no room")

        def other(self) -> str:
            """Does nothing."""

    Broken.put = Broken.get = None
    Shelf.closed.clear()
    with pytest.raises(
        EnvironmentFailed, match=r"tools raised ValueError: no room at .*test_sessions.py"
    ):
        played(tool_use(tools={"shelf": Shelf, "broken": Broken}), reply())
    assert Shelf.closed == [""]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ([1], "give a mapping"),
        ({"a": {"b": {1, 2}}}, r"\{'a': \{'b': \{1, 2\}\}\} \(Object of type set"),
    ],
)
def test_a_state_that_is_not_plain_is_refused_with_its_place(state, words):
    class Odd(Counted):
        def state(self):
            return state

    with pytest.raises(EnvironmentFailed, match=rf"test_sessions.py:\d+\): .*{words}"):
        played(Environment(session=lambda task: Odd(ends)), reply())


# --------------------------------------------------------------------------------- at the same time


class Meeting:
    """Waits until two are here."""

    def __init__(self):
        self.here, self.both, self.most = 0, asyncio.Event(), 0

    async def meet(self) -> str:
        """Meets."""
        self.here += 1
        if self.here == 2:
            self.both.set()
        await self.both.wait()
        return "met"

    async def alone(self) -> str:
        """Says how many are in here."""
        self.here += 1
        self.most = max(self.most, self.here)
        await asyncio.sleep(0)
        self.here -= 1
        return str(self.most)


def test_the_calls_of_two_episodes_wait_at_the_same_time():
    meeting = Meeting()
    rollouts = played(tool_use(tools={"meet": meeting.meet}), reply("", "meet"), reply("done"), n=2)
    assert [result(r) for r in rollouts] == ["met", "met"]


def test_calls_of_one_reply_wait_together_only_where_all_are_independent():
    class Both(Meeting):
        independent = True

    def run_two(made, name):
        return [
            r.content
            for r in (
                played(tool_use(tools={"m": made}), reply("", name, name), reply("done"))[0]
                .steps[0]
                .tool_results
            )
        ]

    assert run_two(Both, "meet") == ["met", "met"]
    assert (run_two(Both, "alone"), run_two(Meeting, "alone")) == (["2", "2"], ["1", "1"])


def test_an_answer_without_anything_outside_never_suspends():
    """The decoder counts an answer that suspends as one from outside, which joins later: then a
    run's bits would depend on it."""

    class Quick(Shelf):
        bounded = independent = True

    async def answer():
        async with open_session(tool_use(tools={"shelf": Quick}, deadline=9.0), TASK) as session:
            rollout = Rollout(TASK, (reply("", "put:a", "get", "nothing", "put"),))
            with pytest.raises(
                StopIteration
            ):  # what a coroutine raises that ends without a single await
                session.answer(rollout).send(None)
            over = session.answer(Rollout(TASK, (reply("over"),)))
            with pytest.raises(StopIteration):
                over.send(None)

    run(answer())


def test_functions_may_be_async_and_a_deadline_cuts_them_short():
    async def stop(rollout, step):
        await asyncio.sleep(0)
        return step == 2

    async def prompt(rollout, step):
        await asyncio.sleep(0)
        return f"go on {step}"

    (rollout,) = played(dialogue(prompt_fn=prompt, termination_fn=stop), *[reply()] * 3)
    assert [s.prompt for s in rollout.steps] == [()] * 3 and rollout.status == "terminated"

    async def never(rollout, step):
        await asyncio.Event().wait()

    tools = {"shelf": Shelf}
    (rollout,) = played(
        dialogue(prompt_fn=never, tools=tools, deadline=0.01), reply("", "put:a"), reply()
    )
    assert (rollout.status, rollout.truncation, len(rollout.steps)) == ("truncated", "deadline", 2)
    assert rollout.state["shelf"]["word"] == "a"


@pytest.mark.parametrize("plain", [True, False])
def test_an_executor_of_the_users_may_be_plain_or_async(plain):
    from rlkit.types import ToolResult

    def answer(call, tools):
        return ToolResult(call.id, call.name, f"by hand: {call.name}", ok=True)

    async def awaited_answer(call, tools):
        return answer(call, tools)

    environment = tool_use(tools={"shelf": Shelf})._replace(
        execute=answer if plain else awaited_answer
    )
    assert result(played(environment, reply("", "get"), reply("done"))[0]) == "by hand: get"


def test_a_session_of_the_users_answers_calls_with_the_shipped_function():
    class Own(Counted):
        def __init__(self):
            super().__init__(None)
            shelf = Shelf()
            self.tools = {"put": shelf.put}

        async def answer(self, rollout):
            return (
                await answer_calls(rollout, self.tools)
                if rollout.steps[-1].tool_calls
                else (rollout, None)
            )

    assert (
        result(
            played(
                Environment(session=lambda task: Own(), max_steps=3),
                reply("", "put:x"),
                reply("done"),
            )[0]
        )
        == "kept x"
    )


@pytest.mark.parametrize("said", [7, b"On.", [], ["On."], [{"content": "On."}], {"role": "user"}])
def test_what_is_no_message_is_refused_as_a_next_prompt(said):
    """A prompt_fn that gave a number failed in the encoder of messages, in a traceback."""
    environment = Environment(next_prompt=lambda rollout, step: said)

    async def say(rollout, messages, session):
        return Step(tuple(messages), (1,), (2,), (-1.0,), "stop")

    task = Task("t/0", ({"role": "user", "content": "Go."},))
    with pytest.raises(EnvironmentFailed, match="it must be messages, each with a role"):
        run(play(task, environment, say))


def test_code_that_cancels_its_episode_or_stops_the_loop_is_named():
    """Both ended the command in a traceback of asyncio."""

    async def cancels():
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    async def stops():
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)

    for own, words in ((cancels, "cancelled the task"), (stops, "stopped the event loop")):
        with pytest.raises(EnvironmentFailed, match=words):
            run(own())


def test_a_session_that_changes_a_reply_changes_its_own_copy_alone():
    class Own:
        def __init__(self, task):
            self.tools = {}

        def first_prompt(self):
            return "Go."

        def answer(self, rollout):
            rollout.steps[-1].tool_calls[0].arguments["text"] = "changed"
            return rollout, None

    (rollout,) = played(Environment(session=Own), reply("ok", "note:hello"))
    assert rollout.steps[0].tool_calls[0].arguments == {"text": "hello"}
