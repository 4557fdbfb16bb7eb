"""One process at a time works in a run folder: who does, whether it lives, and what becomes of one that has to give way.

The owner writes owner.json when it starts, renews its `beat` every 30 seconds, and removes the file when it ends. A second process is
refused while the owner lives:

    the same machine   its process id is there, with the same start time
    another machine    its beat is younger than 5 minutes, by the clocks of the two

Another machine is also one that has been started again since, and another container: neither shows the owner's processes. A SLURM job
that was queued again knows that its earlier self is gone.

The file is created with O_EXCL and changed under `flock`, so of several processes that find a dead owner exactly one takes its place.
On a file system without locks two may do so in the same instant: then the later one has the folder, and the other one sees it at its
next check. An owner that finds another name in the file ends, and writes nothing more.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from rlkit.errors import Refusal, RLKitError

NAME = "owner.json"
BEAT = 30.0  # seconds between two signs of life
DEAD = 300.0  # seconds without one after which an owner on another machine counts as dead
PATIENCE = 2.0  # seconds to wait for the lock on the file, which is held for milliseconds
UNKNOWN = "unknown"  # start time of a process that exists and that we may not look at


class Occupied(Refusal):
    """Another process works in the run folder."""


class TakenOver(RLKitError, RuntimeError):
    """Another process has taken the run folder over while this one worked in it."""


class Claim(NamedTuple):
    """What this process has written to the owner.json of a folder, and the thread that renews it."""

    record: Mapping[str, Any]
    ended: threading.Event
    beating: threading.Thread


HELD: dict[Path, Claim] = {}  # run folder → this process's claim to it
_ONE = threading.Lock()  # the beating thread and the training one open the file in turn


@contextmanager
def owned(folder: Path, *, takeover: bool = False) -> Iterator[None]:
    """A block in which this process owns a run folder, which is made where it is missing.

    A thread renews the beat: an RL step may take longer than five minutes, and a thread ends with its process, however that ends. So a
    process that hangs is alive, as it should be: it might go on and write.

    Args:
      folder: the run's.
      takeover: take it also from an owner that lives.
    Raises: Occupied where another process owns it. Where owner.json cannot be written, a warning says so and the block runs.
    """
    folder = folder.resolve()
    record = identity() | {"token": secrets.token_hex(8)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if said := claim(folder, record, takeover=takeover):
            print(f"resume: {said}", flush=True)
    except OSError as error:
        why = error.strerror or error
        print(f"warning: {folder / NAME} not written ({why}); nothing keeps a second process from this run", file=sys.stderr, flush=True)
        yield
        return
    ended = threading.Event()
    beating = threading.Thread(target=beat, args=(folder, record, ended), name=NAME, daemon=True)
    HELD[folder] = Claim(record, ended, beating)
    beating.start()
    try:
        yield
    finally:
        release(folder)


def identity() -> dict[str, Any]:
    """This process: host, pid, which boot and which container of that host, start time, SLURM job, and the time as its first beat."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "place": _place(),
        "started": started(os.getpid()),
        "since": datetime.now().isoformat(sep=" ", timespec="seconds"),
        "beat": time.time(),
        "slurm": slurm(),
    }


def slurm() -> list[Any] | None:
    """The SLURM job of this process and how often it has been started again; None outside of one."""
    job = os.environ.get("SLURM_JOB_ID")
    return [job, int(os.environ.get("SLURM_RESTART_COUNT") or 0)] if job else None


def _place() -> str:
    """Which processes a pid can mean here: the boot of the kernel and the namespace of process ids; empty where the system has neither."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def started(pid: int) -> str | None:
    """When a process of this machine was started, in the system's own words; None where there is none, or only what is left of it."""
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
        return UNKNOWN
    with suppress(OSError):  # a system without /proc
        said = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, env={"LC_ALL": "C"})
        state, _, since = said.stdout.strip().partition(" ")
        return None if state.startswith("Z") else since.strip() or UNKNOWN
    return UNKNOWN


def lives(found: Mapping[str, Any]) -> bool:
    """Whether the process of a record may still work in its folder."""
    if found.get("host") == socket.gethostname() and found.get("place", _place()) == _place():
        now = started(found["pid"])
        return now is not None and (found.get("started") in (now, UNKNOWN) or now == UNKNOWN)
    mine, theirs = slurm(), found.get("slurm")
    again = mine is not None and isinstance(theirs, list) and theirs[:1] == mine[:1] and theirs != mine  # the same job, queued again
    return not again and time.time() - found["beat"] < DEAD


def occupied(folder: Path) -> str:
    """Who works in a folder, as a sentence that tells how to go on. Empty if no one does, or if it cannot be found out."""
    try:
        with _opened(folder / NAME) as file:
            found = _read(file)
    except OSError:
        return ""
    return _occupied(folder, found) if lives(found) else ""


def _occupied(folder: Path, found: Mapping[str, Any]) -> str:
    age = max(0, round(time.time() - found["beat"]))
    if "host" not in found:
        return f"{folder / NAME} cannot be read and is {age} s old: another process may be starting there. Look, then add takeover=true"
    here = found["host"] == socket.gethostname() and found.get("place", _place()) == _place()
    until = "" if here else f", dead after {DEAD:.0f} s without one"
    return (
        f"{folder}: process {found['pid']} on {found['host']} works there since {found.get('since')} "
        f"(last sign of life {age} s ago{until}). Wait for it, or end it; to take the folder from it, add takeover=true"
    )


def claim(folder: Path, record: Mapping[str, Any], *, takeover: bool = False) -> str:
    """Writes a record to the folder's owner.json. Returns what became of an earlier owner, or nothing.

    Raises: Occupied where another process lives there and `takeover` is not set; OSError where the file cannot be written.
    """
    with _opened(folder / NAME, create=True) as file:
        created = file.fresh and not os.fstat(file.descriptor).st_size  # else another process had the lock before us
        found = {} if created else _read(file)
        alive = not created and lives(found)
        if alive and not takeover:
            raise Occupied(_occupied(folder, found))
        try:
            _write(file, record)
        except OSError:
            if created:
                (folder / NAME).unlink(missing_ok=True)
            raise
    if created:
        return ""
    who = f"process {found.get('pid')} on {found.get('host')}, which began at {found.get('since')}"
    return f"taken over from {who}; it ends at its next step" if alive else f"{who}, is gone without an end of its own"


def beat(folder: Path, record: Mapping[str, Any], ended: threading.Event) -> None:
    """Renews a record until `ended` is set or another process has the folder. A file that someone deleted is written again."""
    while not ended.wait(BEAT):
        with suppress(OSError), _opened(folder / NAME, create=True) as file:
            if _read(file).get("token", record["token"]) != record["token"]:
                return
            _write(file, {**record, "beat": time.time()})


def check_owner(folder: Path) -> None:
    """Raises TakenOver where this process owned a run folder and another one does now; nothing where it never did."""
    if said := lost(folder):
        raise TakenOver(said)


def check_path(path: Path) -> None:
    """`check` for the run folder that a path lies in."""
    for folder in [folder for folder in HELD if folder in path.resolve().parents]:
        check_owner(folder)


def lost(folder: Path) -> str:
    """Who has taken a run folder from this process, as a sentence; empty where it is still its own, or never was."""
    folder = folder.resolve()
    held = HELD.get(folder)
    if held is None:
        return ""
    try:
        with _opened(folder / NAME) as file:
            found = _read(file)
    except OSError:  # deleted, or a file system that fails: nobody else has put his name there
        return ""
    if found.get("token", held.record["token"]) == held.record["token"]:
        return ""
    who = f"process {found['pid']} on {found['host']}"
    return f"{folder} was taken over by {who}; this process ends and writes nothing more there"


def release(folder: Path) -> None:
    """Gives a run folder up: the file is removed, where it is still this process's."""
    held = HELD.pop(folder.resolve(), None)
    if held is None:
        return
    held.ended.set()
    held.beating.join(2 * PATIENCE)  # its last beat may be under way
    with suppress(OSError), _opened(folder / NAME) as file:
        if _read(file).get("token") == held.record["token"]:
            (folder / NAME).unlink()


# ------------------------------------------------------------------------------------------------------------ the file


class _File(NamedTuple):
    descriptor: int
    fresh: bool  # whether this process has just created it


@contextmanager
def _opened(path: Path, *, create: bool = False) -> Iterator[_File]:
    """The file, locked; one that is deleted or replaced while we wait for the lock is opened again."""
    with _ONE:
        while True:
            fresh = False
            try:
                descriptor = os.open(path, os.O_RDWR)
            except FileNotFoundError:
                if not create:
                    raise
                try:
                    descriptor, fresh = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), True
                except FileExistsError:  # another process was faster
                    continue
            try:
                _lock(descriptor)
                if _is(path, descriptor):
                    yield _File(descriptor, fresh)
                    return
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.005)
        except OSError:  # a file system without locks
            return


def _is(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _read(file: _File) -> dict[str, Any]:
    """The record in the file. Of one that cannot be read, as while it is being written, only the time: then its last change is a beat."""
    try:
        found = json.loads(os.pread(file.descriptor, 1 << 16, 0).decode())
        types = {"host": str, "pid": int, "beat": int | float, "token": str}
        if isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in types.items()):
            return found if found["pid"] > 0 else {"beat": found["beat"]}
    except (ValueError, RecursionError):
        pass
    return {"beat": os.fstat(file.descriptor).st_mtime}


def _write(file: _File, record: Mapping[str, Any]) -> None:
    """Overwrites the file in place, so that its lock and the folder's time of change stay."""
    data = (json.dumps(record, indent=1) + "\n").encode()
    os.pwrite(file.descriptor, data, 0)
    os.ftruncate(file.descriptor, len(data))
