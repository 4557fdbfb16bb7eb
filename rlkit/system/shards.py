"""Keep the lines of many RL steps in few files. Each step is one gzip member, with the step's
number and the member's length in its header.

    rollouts/steps_000001-000100.jsonl.gz:  [step 1, its bytes | compressed lines] [step 2, its
    bytes | compressed lines] …

A step is found by reading headers only. If the end of a file is missing, the steps before the
missing part can still be read. For other programs it is an ordinary gzip file. Step and length are
a subfield of the header's extra field (RFC 1952, 2.3.1.1), as in bgzip's files.
"""

from __future__ import annotations

import gzip
import mmap
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rlkit.errors import DataError
from rlkit.system.files import append_once, append_whole, open_regular, reason, write_atomic

STEPS = 100  # RL steps in a file
HEAD = struct.Struct("<16sQQ")  # constant bytes, step, length of the member in bytes
# the constant bytes: deflated, with an extra field, without a time
SAME = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff" + struct.pack("<H2sH", 20, b"RL", 16)


class Part(NamedTuple):
    """The place of one step's bytes in a file."""

    path: Path
    start: int = 0
    stop: int | None = None  # None: to the end of the file

    def __str__(self) -> str:
        return f"{self.path} from byte {self.start}" if self.start else str(self.path)

    def read(self) -> bytes:
        """Read the bytes from start to stop, or to the end of a shorter file. Raises: OSError."""
        with open_regular(self.path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(self.start)
            return file.read(min(self.stop or size, size) - self.start)


def append_lines(folder: Path, step: int, lines: bytes) -> None:
    """Append the lines of an RL step after the earlier steps. If it raises OSError, nothing was
    appended."""
    data = gzip.compress(lines, compresslevel=3, mtime=0)[10:]  # without gzip's own header
    append_whole(
        folder / f"{stem(step)}.jsonl.gz", HEAD.pack(SAME, step, HEAD.size + len(data)) + data
    )


def stem(step: int) -> str:
    """Return the name, without its ending, of an RL step's file. Lines from before the first step
    are in the first step's file.

    >>> stem(101)
    'steps_000101-000200'
    """
    first = max(step - 1, 0) // STEPS * STEPS + 1
    return f"steps_{first:06d}-{first + STEPS - 1:06d}"


def index_steps(folder: Path) -> dict[int, Part]:
    """Map each RL step in a folder to its place, in order. Without a folder the result is empty."""
    found: dict[int, Part] = {}
    for path in list_shards(folder):
        found |= scan_members(path)
    return dict(sorted(found.items()))


def list_shards(folder: Path) -> list[Path]:
    """List the files of recorded steps, in order of the steps."""
    return sorted(folder.glob("steps_*.jsonl.gz"))


def scan_members(path: Path) -> Iterator[tuple[int, Part]]:
    """Yield (step, place) for each step in a file, even if the file ends in the middle of the last
    step. After a damaged header, the scan continues at the next valid header."""
    if path.stat().st_size < HEAD.size:
        return
    with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = 0
        while 0 <= start <= len(data) - HEAD.size:
            same, step, length = HEAD.unpack_from(data, start)
            whole = same == SAME and length > HEAD.size
            if whole:
                yield step, Part(path, start, start + length)
            start = start + length if whole else data.find(SAME, start + 1)


def cut_steps(folder: Path, step: int) -> None:
    """Move everything after an RL step to NAME.discarded.jsonl.gz beside the folder, because a
    resumed run writes it again. A line about the move is printed.

    Raises: DataError if a file cannot be written. Its steps then stay in the folder.
    """
    target = folder.with_name(f"{folder.name}.discarded.jsonl.gz")
    moved = 0
    for path in list_shards(folder):
        held = dict(scan_members(path))
        size = path.stat().st_size
        end = max(
            (
                stop
                for number, (_, _, stop) in held.items()
                if number <= step and stop and stop <= size
            ),
            default=0,
        )
        try:
            append_once(target, Part(path, end).read())
            os.truncate(path, end)
            if not end:
                path.unlink()
        except OSError as error:
            why = (
                f"{target} cannot be written ({reason(error)}), so {folder.name} that the resumed"
                " run replaces would be lost"
            )
            raise DataError(why) from None
        moved += sum(number > step for number in held)
    if moved:
        print(
            f"resume: {folder.name} of {moved} step(s) after step {max(step, 0)}: moved to"
            f" {target.name}",
            flush=True,
        )


def cut_samples(folder: Path, step: int) -> None:
    """Cut off the conversations of all steps after `step`."""
    for path in folder.glob("steps_*.md"):
        text = path.read_bytes()
        for title in re.finditer(rb"^# Sample conversations of step (\d{1,18})$", text, re.M):
            if int(title[1]) > step:
                write_atomic(path, text[: title.start()])
                break
