"""Calls of user code that end neither the process nor the run, in threads and in coroutines, and
what becomes of those given up."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from rlkit.environments import python_tool
from rlkit.sandbox import Sandbox, process
from rlkit.system import deadline, leaving
from rlkit.system.deadline import (
    Countdown,
    DeadlinePassed,
    ProcessEndAsked,
    cancel_after,
    contain_block,
    contain_call,
    end_when_left,
    run_in_thread,
    run_in_worker,
)
from rlkit.system.loops import run


def test_a_call_that_ends_leaves_the_others_contained():
    """os._exit is one name of the process: the first call to end must not give it back while
    another one runs."""
    first, second = threading.Event(), threading.Event()

    def late():
        first.set()
        second.wait(20)
        os._exit(3)

    def contained_late():
        with pytest.raises(ProcessEndAsked):
            contain_call(late)
        raised.append(True)

    raised = []
    thread = threading.Thread(target=contained_late)
    thread.start()
    first.wait(20)
    with pytest.raises(ProcessEndAsked, match=r"os._exit\(4\) at .*test_deadline.py"):
        contain_call(lambda: os._exit(4))
    second.set()
    thread.join(20)
    assert raised == [True]


def test_a_coroutine_that_waits_contains_no_other(monkeypatch):
    """Coroutines take turns in one thread: what rlkit's own code does meanwhile is the process's
    business."""
    ended = []
    monkeypatch.setattr(leaving, "end_process", ended.append)
    go = asyncio.Event()

    async def tool():
        with contain_block():
            await go.wait()
            os._exit(3)

    async def main():
        playing = asyncio.create_task(tool())
        await asyncio.sleep(0)
        os._exit(5)
        go.set()
        with pytest.raises(ProcessEndAsked):
            await playing

    run(main())
    assert ended == [5]


def test_a_thread_that_goes_on_is_named_once_and_what_it_gives_is_dropped(capsys):
    deadline.warn_once.cache_clear()
    release = threading.Event()

    async def main():
        for _ in range(2):
            with pytest.raises(DeadlinePassed):
                await run_in_worker(lambda: release.wait(20), 0.01, "the tool slow")
        waiting = asyncio.create_task(
            run_in_worker(lambda: release.wait(20), None, "the tool slow")
        )
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        release.set()
        assert await run_in_worker(lambda: "other", None, "another") == "other"

    run(main())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: the tool slow was given up and goes on in a thread")


@pytest.mark.parametrize("worker", [False, True])
def test_a_call_that_says_how_it_is_ended_is_ended(worker, capsys):
    ended, over = threading.Event(), threading.Event()

    def call():
        with end_when_left(ended.set):
            ended.wait(20)
        over.set()

    with pytest.raises(DeadlinePassed):
        run(run_in_worker(call, 0.01, "the tool x")) if worker else run_in_thread(call, 0.01)
    assert over.wait(20) and capsys.readouterr().err == ""


def test_a_call_given_up_before_it_says_how_is_ended_when_it_does():
    entered, ended = threading.Event(), threading.Event()

    def call():
        entered.wait(20)
        with end_when_left(ended.set):
            assert ended.wait(20)

    with pytest.raises(DeadlinePassed):
        run_in_thread(call, 0.01)
    entered.set()
    assert ended.wait(20)


def test_the_program_of_a_call_given_up_is_killed(monkeypatch):
    """It went on beside the training until its own limit."""
    children = []

    class Popen(process.subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            children.append(self)

    tool = python_tool(sandbox=Sandbox(time_limit=100.0, min_level="basic"))
    tool("1")  # the level is probed
    monkeypatch.setattr(process.subprocess, "Popen", Popen)

    async def main():
        playing = asyncio.create_task(
            run_in_worker(lambda: tool("while True: pass"), None, "the tool python")
        )
        while not children:
            await asyncio.sleep(0.001)
        playing.cancel()
        await asyncio.wait([playing])

    run(main())
    assert children[0].wait(20) == -9


def test_a_call_that_raises_what_no_future_takes_is_told():
    def stop():
        raise StopIteration(3)

    with pytest.raises(RuntimeError, match="StopIteration 3"):
        run(run_in_worker(stop, None, "the tool stop"))


def test_more_calls_than_threads_wait_for_a_place_and_one_given_up_leaves_its_own(monkeypatch):
    monkeypatch.setattr(deadline, "MOST_THREADS", 1)
    release, running = threading.Event(), []

    def hang():
        release.wait(20)

    def short(i):
        running.append(i)
        assert len(running) == 1
        running.pop()
        return i

    async def main():
        hung = asyncio.create_task(run_in_worker(hang, 0.01, "the tool hang"))
        await asyncio.sleep(0)
        assert await asyncio.gather(
            *(run_in_worker(lambda i=i: short(i), None, "short") for i in range(4))
        ) == [0, 1, 2, 3]
        with pytest.raises(DeadlinePassed):
            await hung

    run(main())
    release.set()


@pytest.mark.parametrize("kind", ["async", "thread"])
@pytest.mark.parametrize(("busy", "passes"), [(1, True), (20, False)])
def test_time_in_which_the_loop_is_busy_does_not_count(monkeypatch, kind, busy, passes):
    """A decoder that blocks the loop for longer than a tool's limit had the tool given up although
    it was quick."""
    release = threading.Event()

    async def main():
        loop, ahead = asyncio.get_running_loop(), 0.0
        real = loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + ahead)
        answer = asyncio.Event()

        async def tool():
            await answer.wait()
            await asyncio.sleep(0)

        async def call():
            async with cancel_after(1.0):
                await (
                    tool()
                    if kind == "async"
                    else run_in_worker(lambda: release.wait(20), None, "a tool")
                )

        playing = asyncio.create_task(call())
        await asyncio.sleep(0)
        for _ in range(busy):
            ahead += 100.0
            await asyncio.sleep(0)
        answer.set()
        release.set()
        await playing

    if passes:
        run(main())
    else:
        with pytest.raises(DeadlinePassed):
            run(main())


def test_a_deadline_holds_for_all_blocks_together_and_cuts_nothing_that_is_there_at_once():
    async def main():
        countdown = Countdown(0.02)
        for _ in range(2):  # the second one begins with nothing left
            with pytest.raises(DeadlinePassed):
                async with countdown.running():
                    await asyncio.Event().wait()
        async with countdown.running():
            at_once = True
        return at_once and countdown.spent >= 0.02

    assert run(main())
