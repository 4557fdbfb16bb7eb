"""Symbolic equality of mathematical answers by the package math-verify, in a child process with a deadline.

What a policy writes may keep sympy busy for ever (9**9**9), so it is never evaluated in the process that trains. One child serves all
calls; it is started by the first, and killed and started anew where it misses a deadline.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import select
import subprocess
import sys
from threading import Lock
from typing import Any

from rlkit.errors import ConfigError
from rlkit.rewards.answers import final_answer
from rlkit.rewards.score import Verdict
from rlkit.types import Rollout, gives

ENDED = "the child ended without an answer"
START = 120.0  # seconds for the child to import sympy
MEMORY = 4 * 2**30  # bytes of address space that the child may take
LATEX = re.compile(r"[\\^]")
DELIMITER = re.compile(r"\$|\\\(|\\\[|\\boxed|####")
_LOCK = Lock()
_children: list[subprocess.Popen[str]] = []  # none or one


@gives("binary", correct=1, wrong=0)
@gives("raw")
def math_verify(rollout: Rollout, *, correct: float = 1.0, wrong: float = 0.0, deadline: float = 5.0) -> float | None:
    r"""Whether the final reply's mathematical answer equals `task.answer`: 1/2, 0.5 and \frac{1}{2} do, sets and intervals too.

    LaTeX is read between $ $, \( \), \[ \] and in \boxed{}; a text without any of these that has LaTeX in it is taken as one formula.

    Args:
      correct, wrong: the two scores.
      deadline: seconds for one reply, > 0.
    Returns: `correct` or `wrong`; None where nothing can be read from `task.answer`. A reply from which nothing can be read is wrong
      with the status unparseable, one that takes longer than the deadline wrong with the status timeout.
    Raises: ConfigError where math-verify is not installed. RuntimeError where the child fails on the pair.
    Source: github.com/huggingface/Math-Verify.
    """
    if not deadline > 0:
        raise ConfigError(f"math_verify: deadline must be > 0 seconds, not {deadline}")
    answer = final_answer(rollout)
    said = ask(rollout.task.answer, answer or "", deadline)
    if said == "no truth":
        return None
    if said in ("unparseable", "timeout"):
        return Verdict(wrong, "timeout" if said == "timeout" else "unparseable")
    if said in ("equal", "different"):
        return correct if said == "equal" else wrong
    raise RuntimeError(f"math-verify failed: {said}")


def ask(truth: str, answer: str, deadline: float) -> str:
    """What the child says of a pair: equal, different, unparseable, no truth, timeout, or what went wrong."""
    with _LOCK:
        child = _children[0] if _children else _start()
        said = _exchange(child, json.dumps([truth, answer]), deadline)
        if said in (None, ENDED):
            stop()
        return "timeout" if said is None else said


def _start() -> subprocess.Popen[str]:
    """A child that has math-verify imported. Raises ConfigError where it cannot."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", "from rlkit.rewards.math_verify import serve; serve()"]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment)
    _children.append(child)
    said = _exchange(child, "", START)
    if said != "ready":
        stop()
        raise ConfigError(
            f"the reward math_verify cannot import math-verify ({said}); pip install 'rlkit[math]', or choose reward=numeric for "
            "plain numbers"
        )
    return child


def _exchange(child: subprocess.Popen[str], line: str, seconds: float) -> str | None:
    """The child's answer to a line, or to its start where the line is empty; None where it does not come in time."""
    assert child.stdin is not None and child.stdout is not None
    try:
        if line:
            child.stdin.write(line + "\n")
            child.stdin.flush()
        if not select.select([child.stdout], [], [], seconds)[0]:
            return None
        said = child.stdout.readline()
    except BrokenPipeError:
        said = ""
    return str(json.loads(said)) if said else ENDED


def stop() -> None:
    """Ends the child; the next call starts another."""
    while _children:
        child = _children.pop()
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


atexit.register(stop)


# ------------------------------------------------------------------------------------------------------- in the child


def serve() -> None:
    """Answers pairs, one line each, until the parent is gone. What the package itself prints goes nowhere."""
    out, sys.stdout = sys.stdout, sys.stderr
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        import math_verify as package
    except ImportError as error:
        print(json.dumps(str(error)), file=out, flush=True)
        return
    print(json.dumps("ready"), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(_judged(package, *json.loads(line))), file=out, flush=True)


def _judged(package: Any, truth: str, answer: str) -> str:
    try:
        gold = package.parse(_delimited(truth))
        if not gold:
            return "no truth"
        given = package.parse(_delimited(answer))
        if not given:
            return "unparseable"
        return "equal" if package.verify(gold, given) else "different"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _delimited(text: str) -> str:
    r"""Bare LaTeX as a formula: math-verify reads 2\sqrt{3} without dollars as 2."""
    return f"${text.strip()}$" if LATEX.search(text) and not DELIMITER.search(text) else text
