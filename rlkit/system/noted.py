"""Recognise the user's own run folders: the state folder keeps a digest of each folder rlkit has
written for this user.

A note holds the resolved path of a folder, and digests of this path with the bytes of every config
file in it. A folder that was moved, copied or edited has another digest, and counts as a
stranger's.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rlkit.system.files import write_atomic

# digests kept for a folder: while rlkit replaces its files one by one, each state in between is
# noted
KEPT = 8
LARGEST = 4 << 20  # bytes of a config file


def state_folder() -> Path | None:
    """The folder for notes: $XDG_STATE_HOME/rlkit, else ~/.local/state/rlkit. None if the user has
    no place of his own.

    A folder that belongs to somebody else, or is writable for others, does not count.
    """
    home = os.environ.get("HOME", "")
    base = os.environ.get("XDG_STATE_HOME") or (
        os.path.join(home, ".local", "state") if home else ""
    )
    if not os.path.isabs(base):
        return None
    place = Path(base) / "rlkit" / "runs"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = place.stat()
    except OSError:
        return None
    mine = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    return place if mine and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else None


def is_noted(folder: Path) -> bool:
    """Whether a folder is as rlkit has left it for this user."""
    state = state_folder()
    if state is None:
        return False
    known = _digests(state / _name(folder))
    return bool(known) and _digest(folder, {}) in known


def note(folder: Path, files: Mapping[str, bytes] | None = None) -> None:
    """Note a folder as the user's own. If nothing can be written, nothing is noted.

    Args:
      files: relative path → the bytes about to be written there. The note comes before the files,
        so even after a kill the folder is noted.
    """
    state = state_folder()
    digest = _digest(folder, files or {})
    if state is None or digest is None:
        return
    entry = state / _name(folder)
    known = _digests(entry)
    if known[-1:] == [digest]:
        return
    lines = [str(folder.resolve()), *[old for old in known if old != digest][1 - KEPT :], digest]
    with suppress(OSError):
        if not known:
            _forget_lost(state)
        write_atomic(entry, "\n".join(lines).encode(errors="surrogateescape"))


def _name(folder: Path) -> str:
    return hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()


def _digest(folder: Path, files: Mapping[str, bytes]) -> str | None:
    """SHA-256 of the resolved path and of every config file. `files` replace the files present.

    None if a file is too large or cannot be read.
    """
    found = dict(files)
    try:
        for path in (folder / "config.yaml", *(folder / ".hydra").glob("*.yaml")):
            name = str(path.relative_to(folder))
            if name in found or not path.is_file():
                continue
            if path.stat().st_size > LARGEST:
                return None
            found[name] = path.read_bytes()
    except OSError:
        return None
    total = hashlib.sha256(os.fsencode(folder.resolve()))
    for name, content in sorted(found.items()):
        total.update(b"\0" + name.encode() + b"\0" + hashlib.sha256(content).digest())
    return total.hexdigest()


def _digests(entry: Path) -> list[str]:
    """The digests of a note, the newest one last."""
    try:
        return entry.read_bytes().decode(errors="surrogateescape").splitlines()[1:]
    except OSError:
        return []


def _forget_lost(state: Path) -> None:
    """Remove the notes of missing folders."""
    for entry in state.iterdir():
        with suppress(OSError):
            path = entry.read_bytes().split(b"\n", 1)[0]
            if not os.path.isdir(path):
                entry.unlink(missing_ok=True)
