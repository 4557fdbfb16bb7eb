"""Symbolic equality of mathematical answers by the package math-verify, in child processes.

A policy's text may keep sympy busy for ever (9**9**9), and the package evaluates parts of it. So
none of it is read in the training process. The children run a script of their own
(`_math_child.py`) with an empty environment, and stay warm between calls. They do not come from
`multiprocessing`. It would import the user's main script once more in each of them, and a fork
would inherit threads, CUDA and secrets.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from rlkit.errors import ConfigError, DataError, install
from rlkit.rewards import Verdict, batched, final_answer, reads_truths
from rlkit.system.processors import count_cores
from rlkit.types import Rollout, Task, gives

CHILD = Path(__file__).with_name("_math_child.py")
DEADLINE = 5.0  # seconds of processor time for one call
START = 300.0  # seconds for a child to import sympy, on the slowest disk
HUNG = 30.0  # times the deadline on the clock, after which the parent kills a child itself
# bytes of address space for a child; if its caches outgrow it, it dies and is replaced
MEMORY = 2 * 2**30
MOST = 16  # children; each takes some 100 MB
_LOCK = Lock()
_idle: list[subprocess.Popen[str]] = []


def _truth_problems(tasks: Sequence[Task], *, deadline: float = DEADLINE, **_: Any) -> list[str]:
    """Say why the truth of each task cannot be read. Equal truths are asked about once."""
    truths = list(dict.fromkeys(task.answer for task in tasks))
    said = dict(zip(truths, ask([(truth,) for truth in truths], deadline), strict=True))
    return [
        "" if said[task.answer] == "readable" else _explain_unread(said[task.answer])
        for task in tasks
    ]


@gives("binary", correct=1, wrong=0)
@gives("raw")
@reads_truths(_truth_problems)
@batched
def math_verify(
    rollouts: Sequence[Rollout],
    *,
    correct: float = 1.0,
    wrong: float = 0.0,
    deadline: float = DEADLINE,
) -> list[float]:
    r"""Whether each final reply's mathematical answer equals `task.answer`, as 0.5 equals 1/2.

    A truth is one answer, with or without delimiters: 2k+2, $[0,1)$, \text{east}, 15\%. In a reply
    the last \boxed{…} is read in the same way; else the text after the last "answer is" or #### on
    its line; else the last formula between $ $, \( \) or \[ \]; else the last number. Units,
    currency and percent signs are dropped. LaTeX unknown to the package is compared as text.

    Args:
      rollouts: a batch. Equal answers to equal truths are compared once. At most as many run at a
        time as this process may use cores.
      correct, wrong: the two scores.
      deadline: seconds of processor time for one reply, > 0. Wall-clock time would turn a right
        answer into a late one on a busy machine.
    Returns: `correct` or `wrong` for each. The status is unparseable if nothing can be read from a
      reply, timeout if it takes longer than the deadline, error if a child dies on it twice; all
      three are wrong.
    Raises: DataError that names a row with an unreadable truth. ConfigError if math-verify is not
      installed. RuntimeError if its process does not start.
    Source: github.com/huggingface/Math-Verify.
    """
    answers = [(rollout.task.answer, final_answer(rollout) or "") for rollout in rollouts]
    distinct = list(dict.fromkeys(pair for pair in answers if pair[1].strip()))
    said = dict(zip(distinct, ask(distinct, deadline), strict=True))
    value: dict[str, float] = {"equal": correct, "different": wrong}
    value |= {status: Verdict(wrong, status) for status in ("unparseable", "timeout", "error")}
    verdicts = [said.get(pair, "unparseable") for pair in answers]
    for rollout, verdict in zip(rollouts, verdicts, strict=True):
        if verdict not in value:
            raise DataError(
                f"row {rollout.task.id}: the gold answer '{rollout.task.answer[:80]}'"
                f" {_explain_unread(verdict)}"
            )
    return [value[verdict] for verdict in verdicts]


def _explain_unread(reason: str) -> str:
    why = {"timeout": "it takes longer than the deadline", "error": "math-verify dies on it"}.get(
        reason, reason
    )
    return (
        f"cannot be read by math_verify: {why}; write one answer in LaTeX or plain text, or leave"
        " the row out"
    )


# ------------------------------------------------------------------------------------- the children


def ask(calls: Sequence[Sequence[str]], deadline: float) -> list[str]:
    """A child's verdict on each (truth,) or (truth, answer), as in `_math_child`; or timeout, or
    error.

    error: the child died, for example because it ran out of memory, and so did a second one.
    """
    if not deadline > 0:
        raise ConfigError(f"math_verify: deadline must be > 0 seconds, not {deadline}")
    if not calls:
        return []
    with ThreadPoolExecutor(min(count_cores(), MOST, len(calls))) as threads:
        return list(threads.map(partial(_answer, deadline=deadline), calls))


def _answer(call: Sequence[str], deadline: float) -> str:
    line = json.dumps([deadline, *call])
    for _ in range(2):  # the first may have outgrown its memory, or been killed from outside
        child = _take()
        try:
            said = _exchange(child, line, HUNG * deadline)
        except TimeoutError:
            _end(child)
            return "timeout"
        if said:
            with _LOCK:
                _idle.append(child)
            return said
        if _end(child) in (-signal.SIGPROF, -signal.SIGALRM):
            return "timeout"
    return "error"


def _take() -> subprocess.Popen[str]:
    """An idle child, or a new one."""
    with _LOCK:
        if _idle:
            return _idle.pop()
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(CHILD), json.dumps(sys.path), str(MEMORY)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={},
        start_new_session=True,
    )
    try:
        said = _exchange(child, "", START)
    except TimeoutError:
        said = (
            f"failed: the process is not ready after {START:g} s; is the machine, or the disk that"
            " Python is on, overloaded?"
        )
    if said == "ready":
        return child
    status = _end(child)
    kind, _, reason = said.partition(": ")
    if kind == "missing":
        raise ConfigError(
            f"the reward math_verify cannot import math-verify ({said}); {install('math')}, or"
            " choose reward=numeric for plain numbers"
        )
    raise RuntimeError(
        f"math_verify cannot start: {reason or f'the process ended with status {status}'}"
    )


def _exchange(child: subprocess.Popen[str], line: str, seconds: float) -> str:
    """A child's answer to a line, or to its start if the line is empty. Empty if the child ended.

    Raises: TimeoutError if nothing comes in time.
    """
    assert child.stdin is not None and child.stdout is not None
    try:
        if line:
            child.stdin.write(line + "\n")
            child.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise TimeoutError
        said = child.stdout.readline()
    except BrokenPipeError:
        return ""
    return str(json.loads(said)) if said else ""


def _end(child: subprocess.Popen[str]) -> int:
    """Kill a child, unless it has ended by itself. Returns its exit status."""
    child.kill()
    status = child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # unsent data has nowhere to go
            pipe.close()
    return status


def stop() -> None:
    """End the idle children; the next call starts others."""
    with _LOCK:
        ended = list(_idle)
        _idle[:] = []
    for child in ended:
        _end(child)


atexit.register(stop)
os.register_at_fork(after_in_child=_idle.clear)  # two processes must not talk to one child
