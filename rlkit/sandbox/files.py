"""What a program may read of this machine, and the folder that it works in."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("site-packages", "dist-packages")  # what was installed beside the standard library is the trainer's, not the program's
FOLDER = "rlkit-program-"  # a folder of this name has, or had, a living owner that holds its lock

# Run once, in an interpreter of its own: the shared libraries that the standard library's extension modules load. libgcc_s is
# loaded by the C library when a thread ends.
LIBRARIES = """
import ctypes, importlib, os, sys
for folder in [path for path in sys.path if path.endswith("lib-dynload") and os.path.isdir(path)]:
    for name in {entry.partition(".")[0] for entry in os.listdir(folder)}:
        if not name.startswith(("_test", "_xx", "xx", "_tkinter", "readline")):
            try:
                importlib.import_module(name)
            except Exception:
                pass
try:
    ctypes.CDLL("libgcc_s.so.1")
except OSError:
    pass
with open("/proc/self/maps") as maps:
    names = {line.split(None, 5)[5].rstrip("\\n") for line in maps if ".so" in line}
sys.stdout.buffer.write(b"\\0".join(os.fsencode(name) for name in names))
"""


@functools.cache
def readable() -> tuple[str, ...]:
    """The files and folders that a program may read beside its own folder: the standard library and what it loads.

    Landlock allows whole subtrees and cannot leave a part of one out. So every entry of the standard library's folders is
    listed, except the folders of installed packages, and of the system's libraries only those that the standard library loads.
    """
    found = {sysconfig.get_config_var("DESTSHARED"), "/usr/share/zoneinfo", "/usr/lib/locale"}
    for name in ("stdlib", "platstdlib"):
        with contextlib.suppress(FileNotFoundError), os.scandir(sysconfig.get_path(name)) as entries:
            found |= {entry.path for entry in entries if entry.name not in PACKAGES}
    loaded = subprocess.run([sys.executable, "-I", "-S", "-B", "-c", LIBRARIES], env={}, stdout=subprocess.PIPE, check=False, timeout=60)
    found |= {os.fsdecode(name) for name in loaded.stdout.split(b"\0")}
    return tuple(sorted(str(Path(path).resolve()) for path in found if path and os.path.exists(path)))


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """An empty folder that is removed afterwards, whatever a program left in it.

    It is locked while its owner lives. The kernel releases the lock however the owner ends, so `sweep` can tell a folder that
    was left behind from one in use, across process namespaces that share a temporary folder too.
    """
    made = tempfile.mkdtemp(prefix=".rlkit-")
    lock = os.open(made, os.O_RDONLY | os.O_CLOEXEC)
    path = made
    try:
        if _locked(lock):  # else it keeps a name that is never swept
            path = os.path.join(os.path.dirname(made), FOLDER + os.path.basename(made)[len(".rlkit-") :])
            os.rename(made, path)  # only now: a folder of this name without a lock has no owner
        yield path
    finally:
        _remove(path)
        os.close(lock)


def sweep() -> list[str]:
    """Remove the folders of this user in the temporary folder whose owner is gone. Returns their paths."""
    swept = []
    for entry in Path(tempfile.gettempdir()).glob(FOLDER + "*"):
        try:
            lock = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid() and _locked(lock):
                _remove(str(entry))
                swept.append(str(entry))
        finally:
            os.close(lock)
    return swept


def _locked(descriptor: int) -> bool:
    """Whether this process now holds the lock; no where another does, or where the file system has none."""
    import fcntl  # not on Windows, where nothing here runs

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(path: str) -> None:
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(path)
    if os.path.exists(path):  # folders nested too deeply, or made unreadable (basic level only)
        subprocess.run(["chmod", "-R", "u+rwx", path], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", path], check=False, stderr=subprocess.DEVNULL)
