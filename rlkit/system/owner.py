"""Let only one process at a time work in a run folder: find the folder's owner, tell whether the
owner is alive, and replace it on request.

The owner writes owner.json when it starts, renews the `beat` in it every 30 seconds, and removes
the file when it ends. A second process is refused while the owner is alive. An owner counts as
alive

    on the same machine   if its process id exists, with the same start time
    on another machine    if its beat is younger than 5 minutes, by the clocks of the two

A beat in the future means that the two clocks differ. Then it is unknown how long the owner has
been silent. So the second process is refused, and the refusal names both times.

A restarted machine counts as another machine, and so does another container, because the owner's
process cannot be seen from there. If a SLURM job was queued again, its earlier process is known to
be gone.

The file is created with O_EXCL and changed while the folder is locked. So if several processes find
a dead owner, exactly one of them takes its place. On a file system without locks, two processes may
take its place at the same instant. Then the later process owns the folder, and the earlier process
notices at its next check. An owner that finds another process in the file ends, and writes nothing
more.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rlkit.errors import Refusal, RLKitError, warn
from rlkit.system.files import read_regular, reason

NAME = "owner.json"
BEAT = 30.0  # seconds between two signs of life
DEAD = 300.0  # seconds without a beat until an owner on another machine counts as dead
UNKNOWN = "unknown"  # start time of an existing process that this process may not inspect


class Occupied(Refusal):
    """Raised if another process works in the run folder."""


class TakenOver(RLKitError, RuntimeError):
    """Raised if another process has taken over the run folder of this process."""


# run folder → the token of this process's record, and the event to end its beat
HELD: dict[Path, tuple[str, threading.Event]] = {}


@contextmanager
def own_folder(folder: Path, *, takeover: bool = False) -> Iterator[None]:
    """Own a run folder inside this block. A missing folder is created.

    A thread renews the beat, because an RL step may take longer than five minutes. A hanging
    process therefore counts as alive; it might still go on and write.

    Args:
      folder: the run folder.
      takeover: if True, take the folder even from a living owner.
    Raises: Occupied if another process owns the folder. If owner.json cannot be written, the block
      runs after a warning.
    """
    folder = folder.resolve()
    record = identify_process() | {"token": secrets.token_hex(8)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        said = claim(folder, record, takeover=takeover)
        if said:
            print(f"resume: {said}", flush=True)
    except OSError as error:
        why = reason(error)
        warn(f"{folder / NAME} not written ({why}); nothing keeps a second process from this run")
        yield
        return
    HELD[folder] = record["token"], threading.Event()
    threading.Thread(
        target=beat, args=(folder, record, HELD[folder][1]), name=NAME, daemon=True
    ).start()
    try:
        yield
    finally:
        release(folder)


def identify_process() -> dict[str, Any]:
    """Return the record of this process: host, pid, boot and container of the host, start time,
    SLURM job, and the current time as its first beat."""
    job = os.environ.get("SLURM_JOB_ID")
    return {
        **describe_process(os.getpid()),
        "since": datetime.now().isoformat(sep=" ", timespec="seconds"),
        "beat": time.time(),
        # the job, and how often it was queued again
        "slurm": [job, int(os.environ.get("SLURM_RESTART_COUNT") or 0)] if job else None,
    }


def describe_process(pid: int) -> dict[str, Any]:
    """Return a record of a process of this machine: host, pid, boot and container, start time. A
    later process with the same pid has another record."""
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "place": _place(),
        "started": find_start_time(pid),
    }


def _place() -> str:
    """Return the scope in which a pid is unique: the boot of the kernel and the namespace of
    process ids. It is empty on a system without them."""
    try:
        return (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
            f" {os.readlink('/proc/self/ns/pid')}"
        )
    except OSError:
        return ""


def find_start_time(pid: int) -> str | None:
    """Return when a process of this machine was started, in the system's own format. None if no
    such process exists, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        pass
    return UNKNOWN  # another user's process, or a system without /proc


def is_here(found: Mapping[str, Any]) -> bool:
    """Return whether a record is from this machine, so that its process id can be checked."""
    return found.get("host") == socket.gethostname() and found.get("place") == _place()


def runs_here(found: Mapping[str, Any]) -> bool:
    """Return whether the process of a record runs on this machine. A later process with the same
    pid does not count."""
    if not is_here(found):
        return False
    now = find_start_time(found["pid"])
    return now is not None and (found.get("started") in (now, UNKNOWN) or now == UNKNOWN)


def lives(found: Mapping[str, Any]) -> bool:
    """Return whether the process of a record may still work in its folder."""
    if is_here(found):
        return runs_here(found)
    mine = identify_process()["slurm"]
    theirs = found.get("slurm")
    # this is the same SLURM job, queued again
    again = mine and isinstance(theirs, list) and theirs[:1] == mine[:1] and theirs != mine
    return not again and time.time() - found["beat"] < DEAD


def find_occupant(folder: Path) -> str:
    """Return a sentence with the process at work in a folder, and with advice on how to go on.
    Empty if no process works there, or if this cannot be found out."""
    try:
        found = _read(folder)
    except OSError:
        return ""
    if not lives(found):
        return ""
    now = time.time()
    age = round(now - found["beat"])
    ahead = age < 0 and not is_here(found)
    clocks = (
        f"{_format_time(found['beat'])} by its clock, while it is {_format_time(now)} here: one of"
        " the two"
        " clocks is wrong"
    )
    if "host" not in found:
        how_old = (
            f"its time is {clocks}"
            if ahead
            else f"is {max(0, age)} s old: another process may be starting there"
        )
        return f"{folder / NAME} cannot be read and {how_old}. Look, then add takeover=true"
    if ahead:
        return (
            f"{folder}: process {found['pid']} on {found['host']} gave its last sign of life at"
            f" {clocks}. Look whether it still runs there; if it does not, add takeover=true"
        )
    until = "" if is_here(found) else f", dead after {DEAD:.0f} s without one"
    return (
        f"{folder}: process {found['pid']} on {found['host']} works there since"
        f" {found.get('since')} (last sign of life {max(0, age)} s ago{until}). Wait for it, or end"
        " it; to take the folder from it, add takeover=true"
    )


def _format_time(seconds: float) -> str:
    """Format a system time as date and time; a number out of range stays a number."""
    try:
        return datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g} s"


def claim(folder: Path, record: Mapping[str, Any], *, takeover: bool = False) -> str:
    """Write a record to the folder's owner.json. Returns a text about an earlier owner; empty
    without one.

    Raises: Occupied if a living process owns the folder and `takeover` is not set; OSError if the
      file cannot be written.
    """
    with _lock_folder(folder):
        try:
            with suppress(FileExistsError):
                _write(folder, record, os.O_CREAT | os.O_EXCL)
                return ""
        except OSError:
            (folder / NAME).unlink(missing_ok=True)  # it was created, but could not be written
            raise
        found = _read(folder)
        living = find_occupant(folder)
        if living and not takeover:
            raise Occupied(living)
        _write(folder, record)
    if not found.get("pid"):
        return f"{NAME} could not be read and was replaced"
    who = f"process {found['pid']} on {found.get('host')}, which began at {found.get('since')}"
    return (
        f"taken over from {who}; it ends at its next step"
        if living
        else f"{who}, is gone without an end of its own"
    )


def beat(folder: Path, record: Mapping[str, Any], ended: threading.Event) -> None:
    """Renew the beat of a record until `ended` is set or another process owns the folder. A deleted
    file is written again."""
    while not ended.wait(BEAT):
        with suppress(OSError), _lock_folder(folder):
            with suppress(FileNotFoundError):
                if _read(folder).get("token", record["token"]) != record["token"]:
                    return
            if not ended.is_set():
                _write(folder, {**record, "beat": time.time()}, os.O_CREAT)


def check_owner(folder: Path) -> None:
    """Raise TakenOver if this process has owned a run folder and another process owns it now."""
    said = explain_loss(folder)
    if said:
        raise TakenOver(said)


def check_path(path: Path) -> None:
    """Call `check_owner` for each owned run folder that contains a path."""
    for folder in [folder for folder in HELD if folder in path.resolve().parents]:
        check_owner(folder)


def explain_loss(folder: Path) -> str:
    """Say which process has taken over a run folder of this process. Empty if this process still
    owns the folder, or never owned it."""
    folder = folder.resolve()
    if folder not in HELD:
        return ""
    try:
        found = _read(folder)
    except OSError:  # deleted, or a failing file system: nobody else has put a name there
        return ""
    if found.get("token", HELD[folder][0]) == HELD[folder][0]:
        return ""
    return (
        f"{folder} was taken over by process {found['pid']} on {found['host']}; this process ends"
        " and writes nothing more there"
    )


def release(folder: Path) -> None:
    """Give up a run folder: remove its owner.json if this process still owns the folder."""
    folder = folder.resolve()
    token, ended = HELD.pop(folder, ("", None))
    if ended is None:
        return
    ended.set()
    with suppress(OSError), _lock_folder(folder):
        if _read(folder).get("token") == token:
            (folder / NAME).unlink()


# ----------------------------------------------------------------------------------------- the file


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder against every other process and thread. The lock is held for milliseconds."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(folder: Path) -> dict[str, Any]:
    """Read the record of a folder. If it is not readable, for example while it is being written,
    return a record with only a beat: the time of the file's last change."""
    file = folder / NAME
    try:
        found = json.loads(read_regular(file).decode())
        types = {"host": str, "pid": int, "beat": int | float, "token": str}
        complete = isinstance(found, dict) and all(
            isinstance(found.get(key), kind) for key, kind in types.items()
        )
        if complete and math.isfinite(found["beat"]):
            return found if found["pid"] > 0 else {"beat": found["beat"]}
    except (ValueError, RecursionError):
        pass
    return {"beat": file.stat().st_mtime}


def _write(folder: Path, record: Mapping[str, Any], flags: int = 0) -> None:
    """Write a record into owner.json in place, so that the folder's modification time does not
    change."""
    data = (json.dumps(record, indent=1) + "\n").encode()
    descriptor = os.open(folder / NAME, os.O_RDWR | flags, 0o644)
    try:
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)
