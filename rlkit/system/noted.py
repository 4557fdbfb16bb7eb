"""Recognise the user's own run folders. The state folder keeps a digest of each run folder rlkit
has written for this user.

A note holds the resolved path of a run folder and its digests. A digest covers this path and the
bytes of every config file in the folder. A folder that was moved, copied or edited has another
digest, so it counts as made by a stranger.
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
    """Return the folder for notes: runs/ in $XDG_STATE_HOME/rlkit, else in ~/.local/state/rlkit.
    None if the user has no such folder of his own.

    A folder owned by another user, or writable for others, is not used.
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
    """Return whether a folder is unchanged since rlkit wrote it for this user."""
    state = state_folder()
    if state is None:
        return False
    known = _digests(state / _name(folder))
    return bool(known) and _digest(folder, {}) in known


def note(folder: Path, files: Mapping[str, bytes] | None = None) -> None:
    """Note a folder as the user's own. If the note cannot be written, the folder stays unnoted.

    Args:
      files: relative path → the bytes about to be written to it. The note is written before these
        files, so the folder is noted even if the process is killed in between.
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
    """Compute the SHA-256 of the resolved path and of every config file. `files` takes precedence
    over the files in the folder.

    Returns None if a file is too large or cannot be read.
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
    """Read the digests of a note, the newest digest last."""
    try:
        return entry.read_bytes().decode(errors="surrogateescape").splitlines()[1:]
    except OSError:
        return []


def _forget_lost(state: Path) -> None:
    """Remove the notes about folders that no longer exist."""
    for entry in state.iterdir():
        with suppress(OSError):
            path = entry.read_bytes().split(b"\n", 1)[0]
            if not os.path.isdir(path):
                entry.unlink(missing_ok=True)
