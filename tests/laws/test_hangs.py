"""Nothing hangs silently: every place where code of the user's is called names it after a while,
gives up what can be given up, and ends the run at its limit otherwise."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import ctypes
import fcntl
import itertools
import multiprocessing
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from types import SimpleNamespace
from typing import ClassVar

import pytest

from parametrise import cases, cover
from rlkit.engines import Batched
from rlkit.environments import gymnasium, tool_use
from rlkit.environments.session import open_session
from rlkit.episodes import collect
from rlkit.errors import ConfigError, EnvironmentFailed, Hung
from rlkit.models.chat import encode_scaffold
from rlkit.rewards import Reward, RewardError, Term, numeric, score
from rlkit.system import leaving, loops, waiting
from rlkit.system.deadline import call_user
from rlkit.training.callbacks.faults import Watchdog
from rlkit.types import Environment, Generation, Rollout, Step, Task

TASK = Task("t/0", ({"role": "user", "content": "Go."},), answer="1")
BOUND = 10.0  # seconds that no case may take, with a large margin for a busy machine


@pytest.fixture
def quick(monkeypatch):
    """All limits are tenths of a second. A call has half a second, in which the watcher has to get
    its turn beside a busy process."""
    monkeypatch.setattr(waiting, "CALL_LIMIT", 0.5)
    for name in ("GRACE", "CLOSE_LIMIT", "LATE"):
        monkeypatch.setattr(waiting, name, 0.1)
    for name in ("NAMED_AFTER", "LOOK"):  # well before the limits, also on a busy machine
        monkeypatch.setattr(waiting, name, 0.01)
    waiting.WATCHER.named.clear()
    waiting.WATCHER.thread = None  # one that looks now may sleep for a second
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < BOUND


def says(text: str) -> Batched:
    """An engine that always says the same."""

    def complete(policy, prompts, seeds, params):
        ids = (*encode_scaffold(policy.renderer, text), policy.eos_token_ids[0])
        return [Generation(ids, (-1.0,) * len(ids), "stop")] * len(prompts)

    return Batched(complete)


# ----------------------------------------------------------------------------------- how code hangs


async def waits(*_, **__):
    await asyncio.Event().wait()


async def swallows(*_, **__):
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


def sleeps(*_, **__):
    time.sleep(1000)


def locks(*_, **__):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def holds(*_, **__):
    """In C, with the interpreter's lock: no other thread of Python runs."""
    ctypes.PyDLL(None).sleep(1000)


ASYNC, PLAIN = (waits, swallows), (sleeps, locks, holds)


# --------------------------------------------------------------------------------------- the places


class Whole:
    """A session without anything in it; `do` replaces one of its methods."""

    tools = {}  # noqa: RUF012

    def first_prompt(self):
        return TASK.messages

    def answer(self, rollout):
        return rollout, None

    def state(self):
        return {}

    def close(self):
        pass


class Game:
    """A game of one turn."""

    def reset(self, *, seed):
        return "Move.", {}

    def step(self, action):
        return "Over.", 0.0, True, False, {}

    def close(self):
        pass


def with_method(kind, name, do):
    """A class with one method replaced."""
    return type(f"My{kind.__name__}", (kind,), {name: do})


def session(name):
    return lambda do: Environment(session=lambda task: with_method(Whole, name, do)())


def game(make, kind, name):
    return lambda do: make(make=with_method(kind, name, do))


def as_tool(do):
    """The tool `hang`, which is called without arguments."""
    if asyncio.iscoroutinefunction(do):

        async def hang() -> str:
            """Hangs."""
            await do()

    else:

        def hang() -> str:
            """Hangs."""
            do()

        hang.bounded = True
    return tool_use(tools={"hang": hang}, timeout=0.1)


def together_with_another(do):
    environment = as_tool(do)
    tool = environment.tools(TASK)["hang"]
    tool.bounded = False
    tool.independent = True
    return environment


class Shelf:
    def put(self) -> str:
        """Puts."""
        return "put"


def manager(do):
    if asyncio.iscoroutinefunction(do):

        @asynccontextmanager
        async def entered(task):
            await do()
            yield Whole()

    else:

        @contextmanager
        def entered(task):
            do()
            yield Whole()

    return Environment(session=entered)


CALL = '<tool_call>{"name": "hang", "arguments": {}}</tool_call>'
DOORS = {  # name → environment of something that hangs; what the line names; what the policy says
    "a session": (manager, "the environment's session", "ok"),
    "first_prompt": (session("first_prompt"), "the environment's first prompt", "ok"),
    "answer": (session("answer"), "the environment's answer", "ok"),
    "state": (session("state"), "the environment's state", "ok"),
    "close": (session("close"), "the close of", "ok"),
    "tools": (lambda do: Environment(tools=do), "the environment's tools", "ok"),
    "a first prompt": (
        lambda do: Environment(first_prompt=do),
        "the environment's first prompt",
        "ok",
    ),
    "a next prompt": (
        lambda do: Environment(next_prompt=do),
        "the environment's next prompt",
        "ok",
    ),
    "stop": (lambda do: Environment(stop=do), "the environment's stop", "ok"),
    "a tool": (as_tool, "the tool", CALL),
    "two tools": (together_with_another, "the tool", CALL + CALL),
    "a class of tools": (
        lambda do: tool_use(tools={"shelf": with_method(Shelf, "close", do)}),
        "the close of",
        "ok",
    ),
    "make": (lambda do: gymnasium(make=do), "the environment's make", "ok"),
    "reset": (game(gymnasium, Game, "reset"), "the environment's reset", "ok"),
    "step": (game(gymnasium, Game, "step"), "the environment's step", "ok"),
    "close of a game": (game(gymnasium, Game, "close"), "the close of", "ok"),
}
PLACE = f"{__file__}:"
WAITING = [("a tool", swallows), ("a next prompt", swallows), ("step", waits)]  # fast


@pytest.mark.slow
@pytest.mark.parametrize(
    ("door", "do"),
    cases(
        cover([(door, do) for door in DOORS for do in ASYNC], 6, also=WAITING), WAITING, unpack=True
    ),
)
def test_async_code_that_hangs_is_named_and_its_episodes_fail(tiny, quick, capfd, door, do):
    """Each of them hung forever where it swallowed its cancellation, without a word."""
    check_async(tiny, capfd, DOORS[door], do)


@pytest.mark.slow
def test_a_call_at_its_limit_is_named_though_the_watcher_had_no_turn(
    tiny, quick, capfd, monkeypatch
):
    """On a busy machine the watcher's thread may not run between the start of a call and its
    limit."""
    monkeypatch.setattr(waiting, "_watch", lambda: None)
    check_async(tiny, capfd, DOORS["a next prompt"], swallows)


@pytest.mark.slow
def test_whoever_looks_while_a_line_is_being_printed_waits_for_it(quick, monkeypatch):
    """A watcher whose writing stood still for half a second left a call unnamed at its limit."""
    writes, returned, order = threading.Event(), threading.Event(), []

    class Slow:
        def write(self, text):
            writes.set()
            returned.wait(0.2)  # whoever does not wait comes back meanwhile
            order.append("printed")

        def flush(self):
            pass

    monkeypatch.setattr(waiting, "LOOK", BOUND)  # the test looks, not the watcher
    monkeypatch.setattr(sys, "stderr", Slow())
    with waiting.waiting("the tool", sleeps):
        late = time.monotonic() + 1.0
        first = threading.Thread(target=waiting.look_safely, args=(late,))
        first.start()
        assert writes.wait(BOUND)
        waiting.look_safely(late)
        order.append("came back")
        returned.set()
        first.join(BOUND)
    assert order[0] == "printed"


def check_async(tiny, capfd, door, do, failures=4, place=PLACE):
    """Four episodes: what hangs is named with its place, and so many fail at least."""
    make, named, text = door
    rollouts = collect(
        tiny, [TASK, TASK], engine=says(text), environment=make(do), group_size=2, max_new_tokens=64
    )
    said = capfd.readouterr().err
    if do is waits and named == "the tool":
        assert all(
            "took longer than 0.1 s" in rollout.steps[0].tool_results[0].content
            for rollout in rollouts
        )
    else:
        failed = [r for r in rollouts if r.truncation in ("error", "deadline")]
        assert len(failed) >= failures
        assert all(place in r.error or "time_limit" in r.error for r in failed)
    assert f"for {named} " in said and place in said and "episode" in said
    assert not waiting.WAITS


REWARDS = {
    "one by one": lambda do: Term(1.0, do, timeout=0.1),
    "batched": lambda do: Term(1.0, do, timeout=0.1, batched=True),
    "in threads": lambda do: Term(1.0, do, timeout=0.1, threads=2),
}


def rollout(text="ok"):
    return Rollout(TASK, (Step((), (1,), (-1.0,), (), "stop", content=text),), "terminated")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "do"),
    cases(
        [(form, do) for form in REWARDS for do in (waits, swallows, sleeps, locks)],
        [("one by one", swallows), ("in threads", sleeps)],
        unpack=True,
    ),
)
def test_a_reward_that_hangs_is_named_at_its_first_timeout(quick, capfd, form, do):
    """32 timeouts passed before anything was said, and an async one that swallowed its cancellation
    gave no name at all."""
    begun = time.monotonic()
    with pytest.raises(RewardError, match=r"nothing within 0\.1 s"):
        score([rollout()] * 32, Reward("mine", {"mine": REWARDS[form](do)}))
    assert form == "in threads" or time.monotonic() - begun < 32 * 0.1
    assert (
        f"for the reward {__name__}.{do.__name__} ({PLACE}"
        in capfd.readouterr().err.replace("rlkit: ", "")
        or form != "in threads"
    )


def test_a_reward_that_raises_does_not_wait_for_another(quick):
    """The error that ended the step was never printed."""

    async def mine(rollout):
        if rollout.final_content == "raises":
            raise ValueError("this one")
        await swallows()

    with pytest.raises(RewardError, match="this one"):
        score([rollout(), rollout("raises"), rollout()], Reward("mine", {"mine": Term(1.0, mine)}))


# -------------------------------------------------------------------- plain code in the main thread


def in_a_fork(work, log) -> int:
    """The exit status of a new process that does this; it is killed if it hangs."""
    child = os.fork()
    if not child:
        atexit._clear()
        for stream in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        sys.stdout, sys.stderr = (
            os.fdopen(1, "w", 1, closefd=False),
            os.fdopen(2, "w", 1, closefd=False),
        )
        try:
            work()
        finally:
            os._exit(77)
    end = time.monotonic() + BOUND
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise AssertionError(f"it hung: {log.read_text()}")


def limited():
    return waiting.limit_waiting(
        0.3 / 60, waiting.MAX_STEP_TIME, lambda: "step 7 hangs in generate"
    )


FAST = {("close", sleeps), ("step", holds)}
BLOCKS = cover([(door, do) for door in DOORS for do in PLAIN if door != "two tools"], 6, also=FAST)


@pytest.mark.slow
@pytest.mark.parametrize(("door", "do"), cases(BLOCKS, FAST, unpack=True))
def test_plain_code_that_blocks_the_main_thread_ends_the_run_at_its_limit_with_the_line(
    tiny, quick, tmp_path, door, do
):
    """A `step` or a `close()` that slept hung forever: no limit held in the main thread, and no
    line was printed."""
    check_plain(tiny, tmp_path, DOORS[door], do)


def check_plain(tiny, tmp_path, door, do):
    """A run in a process of its own ends, and its line names this hanging place."""
    make, named, text = door

    def work():
        with limited():
            collect(
                tiny,
                [TASK],
                engine=says(text),
                environment=make(do),
                group_size=2,
                max_new_tokens=64,
            )

    assert in_a_fork(work, tmp_path / "log") == 1
    said = (tmp_path / "log").read_text()
    if do is holds:  # no thread of Python can print: the stack names the place
        assert f'File "{__file__}", line {do.__code__.co_firstlineno + 2} in holds' in said
        return
    (line,) = [line for line in said.splitlines() if line.startswith("rlkit: step 7")]
    assert line.startswith(
        "rlkit: step 7 hangs in generate: nothing within trainer.max_step_time=0.005 minutes;"
        " waiting for "
    )
    assert (
        f"for {named} " in line and PLACE in line and "in 1 episode" in line
    ) or "in 2 episodes" in line
    assert "Where each thread stands:" in line and f"in {do.__name__}" in said


# ------------------------------------------------------------------------- further kinds of waiting


async def polls(*_, **__):
    while True:
        await asyncio.sleep(0)


async def never_arrives(*_, **__):
    await asyncio.shield(asyncio.get_running_loop().create_future())


async def in_a_thread(*_, **__):
    await asyncio.to_thread(threading.Event().wait)


async def for_a_lock(*_, **__):
    async with asyncio.Lock() as _, asyncio.Semaphore(0):
        pass


async def for_a_queue(*_, **__):
    await asyncio.Queue().get()


async def for_the_others(*_, **__):
    await asyncio.Barrier(1000).wait()


async def for_a_child(*_, **__):
    child = await asyncio.create_subprocess_exec("cat", stdin=subprocess.PIPE)
    try:
        await child.wait()
    finally:
        child.kill()


async def never_yields():
    await asyncio.Event().wait()
    yield


async def for_a_generator(*_, **__):
    async for _ in never_yields():
        pass


async def for_a_condition(*_, **__):
    condition = asyncio.Condition()
    async with condition:
        await condition.wait()


async def for_a_group(*_, **__):
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.Event().wait())


async def for_a_group_that_swallows(*_, **__):
    async with asyncio.TaskGroup() as group:
        group.create_task(swallows())


async def for_many(*_, **__):
    await asyncio.gather(asyncio.Event().wait(), asyncio.sleep(1000), return_exceptions=True)


async def in_its_cleanup(*_, **__):
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.Event().wait()


async def for_a_stream(*_, **__):
    await asyncio.StreamReader().read()


async def for_a_silent_peer(*_, **__):
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        await asyncio.get_running_loop().sock_recv(here, 1)


async def for_a_future_of_a_thread(*_, **__):
    await asyncio.wrap_future(concurrent.futures.Future())


async def for_a_loop_of_its_own(*_, **__):
    await asyncio.to_thread(asyncio.run, asyncio.sleep(1000))


class Never:
    def __await__(self):
        while True:
            yield


async def for_an_object(*_, **__):
    await Never()


def gives_a_future(*_, **__):
    return asyncio.get_running_loop().create_future()


def spins(*_, **__):
    while True:
        pass


def spins_whatever_is_raised(*_, **__):
    while True:
        with suppress(BaseException):
            while True:
                pass


def asks_a_generator(*_, **__):
    next(i for i in itertools.count() if i < 0)


def waits_for_a_child(*_, **__):
    subprocess.run(["cat"], stdin=os.pipe()[0], check=False)


def accepts(*_, **__):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.accept()


def receives(*_, **__):
    here, _there = socket.socketpair()
    here.recv(1)


def gets(*_, **__):
    queue.Queue().get()


def selects(*_, **__):
    select.select([os.pipe()[0]], [], [])


def reads(*_, **__):
    os.read(os.pipe()[0], 1)


def joins(*_, **__):
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    thread.join()


def waits_for_a_lock_of_another_thread(*_, **__):
    lock, held = threading.Lock(), threading.Event()

    def hold():
        with lock:
            held.set()
            threading.Event().wait()

    threading.Thread(target=hold, daemon=True).start()
    held.wait()
    with lock:
        pass


def waits_for_a_result(*_, **__):
    concurrent.futures.Future().result()


def waits_for_its_own_loop(*_, **__):
    """A coroutine for the loop that this call keeps from running."""
    loop = asyncio.get_running_loop()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()


def runs_a_loop_in_a_thread(*_, **__):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, asyncio.sleep(1000)).result()


def waits_for_another_process(*_, **__):
    multiprocessing.get_context("fork").Queue().get()


def locks_a_file(*_, **__):
    with tempfile.NamedTemporaryFile() as file, open(file.name) as again:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.flock(again, fcntl.LOCK_EX)


def opens_a_pipe(*_, **__):
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(f"{folder}/pipe")
        open(f"{folder}/pipe").close()


def waits_for_a_signal(*_, **__):
    signal.sigwait([signal.SIGUSR2])


OWN_DOORS = ("answer", "first_prompt", "a next prompt", "reset", "step", "a session", "stop")
KINDS = (
    polls,
    never_arrives,
    in_a_thread,
    for_a_lock,
    for_a_queue,
    for_the_others,
    for_a_child,
    for_a_generator,
    for_a_condition,
    for_a_group,
    for_a_group_that_swallows,
    for_many,
    in_its_cleanup,
    for_a_stream,
    for_a_silent_peer,
    for_a_future_of_a_thread,
    for_a_loop_of_its_own,
    for_an_object,
    gives_a_future,
)
BLOCKING = (
    spins_whatever_is_raised,
    asks_a_generator,
    waits_for_a_child,
    accepts,
    receives,
    gets,
    selects,
    reads,
    joins,
    waits_for_a_lock_of_another_thread,
    waits_for_a_result,
    waits_for_its_own_loop,
    runs_a_loop_in_a_thread,
    waits_for_another_process,
    locks_a_file,
    opens_a_pipe,
    waits_for_a_signal,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("door", "do"),
    cases(
        zip(itertools.cycle(OWN_DOORS), KINDS),
        [("answer", polls)],
        unpack=True,
    ),
)
def test_any_kind_of_async_waiting_is_named_and_fails_its_episodes(tiny, quick, capfd, door, do):
    check_async(tiny, capfd, DOORS[door], do)


def test_a_loop_that_spins_ends_the_run_at_its_limit(tiny, quick, tmp_path):
    check_plain(tiny, tmp_path, DOORS["answer"], spins)


@pytest.mark.slow
@pytest.mark.parametrize(("door", "do"), list(zip(itertools.cycle(OWN_DOORS), BLOCKING)))
def test_any_kind_of_plain_waiting_ends_the_run_with_its_line(tiny, quick, tmp_path, door, do):
    check_plain(tiny, tmp_path, DOORS[door], do)


class Pair(Whole):
    """Each session of a group waits for a second answer of the other."""

    met: ClassVar[list[asyncio.Event]] = []

    def __init__(self):
        self.met.append(asyncio.Event())
        self.own = len(self.met) - 1
        self.answers = 0

    async def answer(self, rollout):
        self.answers += 1
        if self.answers == 2:
            self.met[self.own].set()
        await self.met[self.own ^ 1].wait()
        return rollout, [{"role": "user", "content": "Go on."}]


@pytest.mark.slow
@pytest.mark.parametrize("admission", cases(["rounds", "barrier", "free"], ["rounds"]))
def test_sessions_that_wait_for_one_another_fail_at_the_limit(tiny, quick, capfd, admission):
    Pair.met.clear()
    rollouts = collect(
        tiny,
        [TASK, TASK],
        engine=says("ok"),
        environment=Environment(session=lambda task: Pair()),
        group_size=2,
        max_new_tokens=64,
        admission=admission,
    )
    assert all(r.truncation == "error" and PLACE in r.error for r in rollouts)
    assert "for the environment's answer " in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("do", "batched"),
    cases(itertools.product([sleeps, swallows], [False, True]), [(sleeps, False)], unpack=True),
)
def test_a_reward_without_a_timeout_ends_the_run_at_its_limit(quick, tmp_path, do, batched):
    def work():
        with limited():
            score([rollout()] * 2, Reward("mine", {"mine": Term(1.0, do, batched=batched)}))

    assert in_a_fork(work, tmp_path / "log") == 1
    said = (tmp_path / "log").read_text()
    assert (
        "for the reward " in said
        and f"{do.__name__} ({PLACE}" in said
        and "trainer.max_step_time" in said
    )


@pytest.mark.slow
def test_an_engine_of_the_users_that_hangs_ends_the_run(tiny, quick, tmp_path):
    def work():
        with limited():
            collect(tiny, [TASK], engine=Batched(sleeps), environment=Environment())

    assert in_a_fork(work, tmp_path / "log") == 1
    assert f"for generation.engine {__name__}.sleeps ({PLACE}" in (tmp_path / "log").read_text()


def test_a_step_in_which_nothing_moves_ends_the_run_though_nothing_of_the_users_is_waited_for(
    quick, tmp_path
):
    dog = Watchdog()
    dog.on_train_batch_start(
        None, SimpleNamespace(rl_step=6, clock=SimpleNamespace(current="reward"))
    )

    def work():
        with waiting.limit_waiting(0.1 / 60, waiting.MAX_STEP_TIME, dog.place):
            threading.Event().wait()

    assert in_a_fork(work, tmp_path / "log") == 1
    assert (
        "rlkit: step 7 hangs in reward: nothing within trainer.max_step_time="
        in (tmp_path / "log").read_text()
    )


@pytest.mark.slow
def test_a_limit_counts_neither_what_moves_nor_what_computes_nor_time_between_steps(
    quick, tmp_path
):
    """A healthy run is never ended: slow calls that return, a model that computes for hours,
    another process that is waited for."""
    dog = Watchdog()

    def work():
        with waiting.limit_waiting(0.2 / 60, waiting.MAX_STEP_TIME, dog.place):
            threading.Event().wait(0.4)  # between steps
            dog.on_train_batch_start(
                None, SimpleNamespace(rl_step=6, clock=SimpleNamespace(current="update"))
            )
            with waiting.working():
                threading.Event().wait(0.4)
            with waiting.waiting_outside():
                threading.Event().wait(0.4)
            with waiting.waiting("the reward", numeric):
                for _ in range(8):
                    threading.Event().wait(0.05)
                    waiting.note_movement()
        os._exit(5)

    assert in_a_fork(work, tmp_path / "log") == 5, (tmp_path / "log").read_text()


def test_time_in_which_a_decoder_keeps_the_loop_is_no_waiting_but_an_update_is(quick, monkeypatch):
    """A tool was named although the model decoded; a teacher that hangs in an update is."""
    now = [100.0]
    monkeypatch.setattr(waiting, "monotonic", lambda: now[0])
    monkeypatch.setattr(waiting.WORK, "total", 0.0)

    async def ages():
        wait = waiting.Wait("the tool", sleeps)
        for block in (waiting.decoding, waiting.working):
            with block():
                now[0] += 7.0
                yield wait.age(now[0])
            yield wait.age(now[0])

    async def main():
        return [age async for age in ages()]

    assert loops.run(main()) == [0.0, 0.0, 7.0, 7.0]


def test_a_process_that_was_stopped_has_not_hung(quick, tmp_path):
    def work():
        with (
            waiting.limit_waiting(0.5 / 60, waiting.MAX_STEP_TIME, lambda: "step 1 hangs"),
            waiting.waiting("the tool", sleeps),
        ):
            waiting._pass_over(1000.0)  # as after SIGSTOP
            waiting.look(time.monotonic() + 1000.0)
        os._exit(5)

    assert in_a_fork(work, tmp_path / "log") == 5, (tmp_path / "log").read_text()


# ------------------------------------------------------------------------ an error that ends a step


ENDS = "rlkit: the environment's answer raised ValueError: this error ends the step"


def one_raises(do):
    """Of several sessions the first one raises and the others hang."""
    made = []

    class Mine(Whole):
        def __init__(self):
            made.append(self)

        async def answer(self, rollout):
            if self is made[0]:
                await asyncio.sleep(0)
                raise ValueError("this error ends the step")
            await waits() if do is not swallows else await swallows()

        async def close(self):
            if do is not swallows and self is not made[0]:
                do()

    return Environment(session=lambda task: Mine())


def test_an_error_comes_out_although_another_episode_swallows_its_cancellation(tiny, quick, capfd):
    """It was never printed."""
    with pytest.raises(EnvironmentFailed, match="this error ends the step"):
        collect(tiny, [TASK], engine=says("ok"), environment=one_raises(swallows), group_size=3)
    assert ENDS in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("do", [sleeps, holds])
def test_an_error_is_printed_before_anything_else_is_waited_for(tiny, quick, tmp_path, do):
    """The close of another episode blocks the main thread."""

    def work():
        with limited():
            collect(tiny, [TASK], engine=says("ok"), environment=one_raises(do), group_size=3)

    assert in_a_fork(work, tmp_path / "log") == 1
    said, error, rest = (tmp_path / "log").read_text().partition(ENDS)
    assert error and "for the close of " not in said
    assert do is holds or "for the close of " in rest


# ---------------------------------------------------------------------------------- loops and calls


def test_a_loop_ends_whatever_its_tasks_and_threads_do(quick):
    """`asyncio.run` waits for all of them."""

    async def main():
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 2.0)
        asyncio.create_task(swallows())  # noqa: RUF006
        await asyncio.sleep(0)
        return "done"

    assert loops.run(main()) == "done"


@pytest.mark.slow
def test_a_call_that_comes_back_in_its_grace_is_no_hang(quick, monkeypatch):
    monkeypatch.setattr(waiting, "GRACE", BOUND)

    async def slow():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)

    async def main():
        with pytest.raises(
            Hung, match=r"the environment's answer .*slow \(.*\) did not end within 0.5 s"
        ):
            await call_user("the environment's answer", slow)

    loops.run(main())


@pytest.mark.slow
def test_a_task_that_was_left_behind_changes_nothing_when_it_comes_back(tiny, quick, monkeypatch):
    """Its episode has failed; what it says later is neither sampled nor told."""
    release, told = threading.Event(), []

    async def comes_back() -> str:
        """Comes back late."""
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return "late"

    async def another() -> str:
        """Takes its time."""
        await asyncio.sleep(0.03)

    first = []

    def tools(task):
        first.append(1)
        tool = comes_back if len(first) == 1 else another
        tool.__name__ = "hang"
        return {"hang": tool}

    def tell(rollout):
        told.append(rollout.sample)
        release.set()

    environment = tool_use(tools={"another": another}, timeout=0.1, max_turns=12)._replace(
        tools=tools
    )
    rollouts = collect(
        tiny,
        [TASK],
        engine=says(CALL),
        environment=environment,
        group_size=2,
        max_new_tokens=64,
        on_done=tell,
    )
    assert rollouts[0].truncation == "error" and len(rollouts[0].steps) == 1
    assert told == [0, 1] and len(rollouts[1].steps) == 12


def test_the_close_of_a_session_that_hangs_leaves_no_task_behind_in_the_first_error(quick):
    """The first error comes out, with a note of the close."""

    async def main():
        with pytest.raises(ConfigError, match="mine") as caught:
            async with open_session(session("close")(waits), TASK):
                raise ConfigError("mine")
        assert "the close of" in caught.value.__notes__[0]

    loops.run(main())


def test_the_watcher_ends_where_nothing_is_waited_for(quick):
    with waiting.waiting("the tool", sleeps):
        thread = waiting.WATCHER.thread
        assert thread is not None and thread.daemon
    thread.join(BOUND)
    assert not thread.is_alive() and waiting.WATCHER.thread is not thread


def test_a_call_is_named_ever_more_rarely_and_only_the_innermost_one(quick, monkeypatch, capfd):
    monkeypatch.setattr(waiting, "NAMED_AFTER", 0.1)
    monkeypatch.setattr(waiting, "LOOK", BOUND)  # the test looks, not the watcher
    with waiting.waiting("the reward", numeric), waiting.waiting("the judge", "http://here"):
        now = time.monotonic()
        for seconds in (0.05, 0.2, 0.3, 0.5, 0.9):
            waiting.look(now + seconds)
    lines = [line for line in capfd.readouterr().err.splitlines() if "judge" in line]
    assert (
        len(lines) == 2
        and lines[0] == "rlkit: waiting for 0 s for the judge http://here, in 1 episode"
    )


# ----------------------------------------------------------------------------- the end of a process


@pytest.mark.slow
def test_a_finished_command_ends_whatever_threads_and_handlers_are_left(
    quick, tmp_path, monkeypatch
):
    """ "finished" was printed, and the process stayed."""
    monkeypatch.setattr(leaving, "GRACE", 0.1)

    def work():
        threading.Thread(target=sleeps, name="upload").start()
        print("finished")
        leaving.leave_process(3)

    def handler():
        atexit.register(sleeps)
        atexit.register(print, "a quick handler")
        leaving.leave_process(4)

    assert in_a_fork(work, tmp_path / "log") == 3
    assert (tmp_path / "log").read_text().splitlines() == [
        "finished",
        (
            f"rlkit: the thread 'upload' of {__name__}.sleeps"
            f" ({PLACE}{sleeps.__code__.co_firstlineno}) did not end within 0.1 s; the process ends"
            " all the same"
        ),
    ]
    assert in_a_fork(handler, tmp_path / "other") == 4
    assert (
        (tmp_path / "other")
        .read_text()
        .startswith(
            "a quick handler\nrlkit: an exit handler of a library or of your code did not end"
        )
    )


PARTS = """
import threading, time
from rlkit.rewards import numeric

def leaves(rollout):
    threading.Thread(target=threading.Event().wait, name="left").start()
    return numeric(rollout)

class Game:
    def reset(self, *, seed=None):
        return "Say a number.", {}

    def step(self, action):
        time.sleep(1000)
"""


@pytest.mark.slow
def test_a_run_of_the_command_line_ends(tmp_path):
    (tmp_path / "my_parts.py").write_text(PARTS)
    fast = [
        "debug=fast",
        "trainer.accelerator=cpu",
        "evaluation.n=0",
        "logger=none",
        "trainer.steps=1",
        "generation.max_new_tokens=32",
    ]

    def train(*words):
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-m", "rlkit", "train", *fast, *words]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    done = train("reward=numeric", "reward.terms.numeric.fn._target_=my_parts.leaves")
    assert done.returncode == 0 and "the thread 'left'" in done.stderr, done.stderr
    game = ["task=episodes", "environment=gymnasium", "environment.make._target_=my_parts.Game"]
    done = train(*game, "trainer.max_step_time=0.05")
    assert done.returncode == 1
    assert (
        "waiting for " in done.stderr
        and f"my_parts.Game.step ({tmp_path}/my_parts.py:13), in " in done.stderr
    ), done.stderr
