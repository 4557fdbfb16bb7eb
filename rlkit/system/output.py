"""What a command prints: secrets are covered, and a terminal that is gone or a full disk ends no
run."""

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
    """A file descriptor whose writes never fail. What a full disk refuses is remembered; a closed
    terminal's is dropped."""

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
    """A standard stream that covers secrets in what is printed: prints, warnings, logs and
    tracebacks alike."""

    def write(self, text: str) -> int:
        return super().write(cover(text))


def guard_output() -> None:
    """Puts an Output in the place of standard output and standard error, where they are the
    process's own.

    A standard stream that the parent has closed becomes /dev/null. Else the next file that is
    opened would get its number, and what libraries print would go into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name) or open(number, "w", closefd=False)  # noqa: SIM115
        try:
            own = not isinstance(stream, Output) and stream.fileno() == number
        except (AttributeError, OSError, ValueError):  # a notebook's or a test's
            continue
        if own:
            stream.flush()
            raw = io.BufferedWriter(Descriptor(number, "wb", closefd=False))
            errors = "backslashreplace"  # a half character that a model wrote
            setattr(
                sys,
                name,
                Output(
                    raw,
                    encoding=stream.encoding,
                    errors=errors,
                    line_buffering=stream.line_buffering,
                ),
            )


def clock(seconds: float) -> str:
    """1:04, or 2:01:04."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
        if minutes >= 60
        else f"{minutes}:{seconds:02}"
    )
