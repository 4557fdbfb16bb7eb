"""Digests of written files, to find damage before a file is used.

The last line of a checkpoint holds the SHA-256 of all bytes before it. `torch.load` ignores this
line, because it comes after the archive. A folder of weights holds `rlkit.sha256`, a list in the
format of `sha256sum -c rlkit.sha256`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from rlkit.system.files import open_regular

MARK = b"\nrlkit sha256 "
SEAL = len(MARK) + 64 + 1  # bytes of the last line of a sealed file
SUMS = "rlkit.sha256"
CHUNK = 1 << 20


class Hashing:
    """A binary file for writing that also computes the digest of everything written."""

    def __init__(self, file: IO[bytes]):
        self.file = file
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def seal(file: IO[bytes], write: Callable[[Any], object]) -> None:
    """Let `write` fill a file, then append the digest of the bytes written."""
    hashing = Hashing(file)
    write(hashing)
    file.write(MARK + hashing.digest.hexdigest().encode() + b"\n")


def find_damage(path: Path) -> str:
    """Say why a sealed file is damaged, in a few words; empty if it is whole."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - SEAL))
            last = file.read()
            if not (last.startswith(MARK) and last.endswith(b"\n")):
                return "its end is missing or is not what was written"
            file.seek(0)
            digest = digest_more(file, size - SEAL, hashlib.sha256())
    except OSError as error:
        return error.strerror or str(error)
    whole = digest.hexdigest().encode() == last[len(MARK) : -1]
    return "" if whole else "its content is not what was written"


def digest_more(file: IO[bytes], count: int, digest: Any) -> Any:
    """Continue a hashlib digest with the next `count` bytes of a file, and return it."""
    while count and (part := file.read(min(count, CHUNK))):
        digest.update(part)
        count -= len(part)
    return digest


def write_sums(folder: Path) -> None:
    """List the digests of all files of a folder in its rlkit.sha256."""
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.name != SUMS
    )
    (folder / SUMS).write_text("".join(f"{_sum(folder / name)}  {name}\n" for name in names))


def lists_every_file(folder: Path) -> bool:
    """Return whether rlkit.sha256 lists every file of a folder. If it does, rlkit wrote them all,
    and deleting the folder loses no other file."""
    try:
        names = {line.partition("  ")[2] for line in (folder / SUMS).read_text().splitlines()}
    except (OSError, ValueError):
        return False
    return all(
        path.is_dir() or path.relative_to(folder).as_posix() in {*names, SUMS}
        for path in folder.rglob("*")
    )


def find_folder_damage(folder: Path, *, weights: bool = True) -> str:
    """Describe in a phrase the first file whose digest differs from rlkit.sha256. The result is
    empty if all digests agree, or if the folder has no rlkit.sha256.

    Args:
      weights: if True, *.safetensors files are checked too; this takes about a second for each
        gigabyte or two.
    """
    try:
        listed = (folder / SUMS).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"{SUMS} cannot be read ({error.strerror})"
    try:
        lines = [line.split("  ", 1) for line in listed.decode().splitlines()]
        wanted = {name: digest for digest, name in lines}
    except ValueError:
        wanted = {}
    if not wanted:
        return f"{SUMS} is damaged"
    for name, digest in wanted.items():
        if not weights and name.endswith(".safetensors"):
            continue
        try:
            if _sum(folder / name) != digest:
                return f"{name} is not the file that {SUMS} lists"
        except (OSError, ValueError):  # ValueError: a name with a null byte
            return f"{name!r} is listed in {SUMS} and cannot be read"
    return ""


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
