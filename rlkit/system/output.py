"""The standard output of a command. Secrets in it are covered, and neither a closed terminal nor a
full disk ends a run."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

from rlkit.system.files import LOST, reason
from rlkit.system.redaction import cover

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Descriptor(io.FileIO):
    """A file descriptor whose writes never fail. A full disk is noted in LOST; output to a closed
    terminal is dropped."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno in FULL:
                LOST["standard output"] = reason(error)
            return len(data)


class Output(io.TextIOWrapper):
    """A standard stream that covers secrets in prints, warnings, logs and tracebacks alike."""

    def write(self, text: str) -> int:
        return super().write(cover(text))


def guard_output() -> None:
    """Replace standard output and standard error each by an Output, unless a notebook or a test has
    replaced them.

    If the parent has closed a standard stream, it becomes /dev/null. Otherwise the next opened file
    would get its descriptor number, and prints of libraries would go into this file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, so `number`
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name) or open(number, "w", closefd=False)  # noqa: SIM115
        try:
            own = not isinstance(stream, Output) and stream.fileno() == number
        except (AttributeError, OSError, ValueError):  # a stream of a notebook or a test
            continue
        if own:
            stream.flush()
            raw = io.BufferedWriter(Descriptor(number, "wb", closefd=False))
            errors = "backslashreplace"  # a model may write half a character
            setattr(
                sys,
                name,
                Output(
                    raw,
                    encoding=stream.encoding,
                    errors=errors,
                    line_buffering=True,  # a pipe too gets each line when it is written
                ),
            )


def hold_unawaited(held: set[str], show: Any, message: Any, *place: Any) -> None:
    """Show a Python warning, but keep a warning about a never awaited coroutine in `held`.

    The command refuses such a coroutine and says so in its own sentence.
    """
    if "was never awaited" in str(message):
        held.add(str(message))
    else:
        show(message, *place)


def clock(seconds: float) -> str:
    """Format seconds as 1:04 or 2:01:04."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
        if minutes >= 60
        else f"{minutes}:{seconds:02}"
    )
