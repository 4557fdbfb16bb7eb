"""C files, compiled by the machine's own compiler at their first use, in about a second.

A library is kept in a folder of the user's own. Its name holds a digest of everything it depends
on, and its file begins with a digest of its bytes. One process compiles, the others wait for it. A
process loads a private copy of the checked bytes, so damage to the folder never reaches it.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from rlkit.errors import EngineError
from rlkit.system.files import cache_folder
from rlkit.system.plain_files import read_plain_file

FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")
LIMIT = 600.0  # seconds for the compiler, and for waiting for another process
PATIENCE = 20.0  # seconds of waiting until a line reports it
LARGEST = 64 << 20  # bytes of a library
DIGEST = hashlib.sha256().digest_size
# in the environment of a sweep's jobs: "fused" or "eager", the meaning of `auto` in all of them
JOBS = "RLKIT_KERNELS"
# A compiler's messages about too little room on the machine at the moment.
OF_THE_MOMENT = re.compile(
    r"\bkilled\b|no space left|cannot allocate memory|out of memory|disk quota|resource"
    r" temporarily",
    re.IGNORECASE,
)
# From memory if possible, like `load`: temporary files may lie on a disk mounted noexec.
CHECK = """
import ctypes, os, sys
path = sys.argv[1]
if hasattr(os, "memfd_create"):
    copy = os.memfd_create("check")
    with open(path, "rb") as file, open(copy, "wb", closefd=False) as out:
        out.write(file.read())
    path = f"/proc/self/fd/{copy}"
getattr(ctypes.CDLL(path), sys.argv[2])
"""
# descriptors of the copies: the C library identifies loaded files by the descriptor's number
HELD: list[int] = []


class NoKernel(EngineError):
    """Compiled code is impossible on this machine, now and at the next start. The message is only
    the reason."""


class Undecided(EngineError):
    """The machine is too busy to compile at the moment. This must not decide which code a run uses,
    since the numbers depend on it."""


class Recipe(NamedTuple):
    """Everything a library depends on."""

    source: Path
    function: str  # a function in the library
    compiler: str
    flags: tuple[str, ...]
    name: str  # of its file


def load_library(source: Path, function: str, flags: Sequence[str] = ()) -> Any:
    """The library of a C file: from the user's folder, or compiled now.

    Args:
      function: a function in the library. flags: of the compiler, besides `FLAGS`.
    Raises: NoKernel if it can neither be loaded nor compiled; Undecided if the compiler was kept
      from compiling.
    """
    recipe = find_recipe(source, function, (*FLAGS, *flags))
    with open_folders() as folders:
        loaded = load(find(folders, recipe.name), function)
        if loaded is not None:
            return loaded
        with lock_library(folders, recipe.name):
            # another process may have compiled it meanwhile
            loaded = load(find(folders, recipe.name), function)
            if loaded is not None:
                return loaded
            data = compile_library(recipe)
            keep(folders, recipe.name, data)
    loaded = load(data, function)
    if loaded is None:
        raise NoKernel("the compiled library cannot be loaded into this process")
    return loaded


def load_or_reason(kernel: str, option: str, make: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of `make` with compiled code, or None and the reason why "auto" does
    without it.

    Args:
      kernel: auto or fused, the value of the config's `option`.
    Raises: EngineError if "fused" is impossible, if the other jobs of a sweep use code that is
      impossible here, or if the machine is too busy to compile at the moment.
    """
    together = os.environ.get(JOBS)
    if kernel == "auto" and together == "eager":
        return None, "so that all jobs are computed alike"
    try:
        return make(), ""
    except Undecided as error:
        raise Undecided(
            f"{option}: {error}. Start again when the machine is less busy, or set {option}=eager"
        ) from None
    except NoKernel as error:
        if kernel == "fused":
            raise NoKernel(f"{option}=fused: {error}; use auto or eager") from None
        if together == "fused":
            raise NoKernel(
                f"{option}: the other jobs use compiled code, which is impossible here: {error}."
                f" Set {option}=eager for all of them"
            ) from None
        return None, str(error)


def find_recipe(source: Path, function: str, flags: tuple[str, ...]) -> Recipe:
    """How a C file is compiled here. Raises: NoKernel without a compiler."""
    if os.name != "posix":
        raise NoKernel("compiled code needs Linux or macOS")
    names = [name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name]
    compiler = next((found for found in map(shutil.which, names) if found), None)
    if compiler is None:
        raise NoKernel("there is no C compiler (cc, gcc or clang) on the PATH")
    real = os.path.realpath(compiler)
    made = os.stat(real)
    known = (*flags, compiler, real, str(made.st_size), str(made.st_mtime_ns), *_processor())
    digest = hashlib.sha256(source.read_bytes() + "\n".join(known).encode(errors="surrogateescape"))
    return Recipe(
        source, function, compiler, flags, f"{source.stem.strip('_')}-{digest.hexdigest()[:32]}"
    )


def _processor() -> tuple[str, str]:
    """The processor, because machines may share a home folder and compiled code depends on the
    processor."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return platform.machine(), next(
            (line for line in lines if line.lower().startswith(("flags", "features"))), ""
        )
    return platform.machine(), platform.processor()


# ---------------------------------------------------------------------------------------- compiling


def compile_library(recipe: Recipe) -> bytes:
    """Compile the library, and try it in a process of its own, since a bad library can end the
    process that loads it.

    It is compiled for this processor and with OpenMP, or without one of them if the compiler does
    not know it.
    Raises: NoKernel, Undecided.
    """
    reason = ""
    try:
        with tempfile.TemporaryDirectory(prefix="rlkit-kernel-") as folder:
            target = Path(folder) / "library.so"
            for absent in ((), ("-march=native",), ("-fopenmp",), ("-march=native", "-fopenmp")):
                flags = [flag for flag in recipe.flags if flag not in absent]
                command = [
                    recipe.compiler,
                    *flags,
                    "-o",
                    str(target),
                    str(recipe.source),
                    "-lm",
                    "-lpthread",
                ]
                reason = run_to_end(
                    command, Path(folder), f"{recipe.compiler} does not compile the kernel"
                )
                if reason:
                    continue
                data = read_plain_file(target, most=LARGEST)
                check = [sys.executable, "-I", "-S", "-c", CHECK, str(target), recipe.function]
                reason = run_to_end(
                    check, Path(folder), f"{recipe.compiler} makes a library that cannot be loaded"
                )
                if not reason:
                    return data
    except OSError as error:
        if error.errno in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.ENOMEM,
            errno.EAGAIN,
            errno.EMFILE,
            errno.ENFILE,
        ):
            raise Undecided(f"the kernel cannot be compiled now ({error.strerror})") from None
        reason = reason or f"{recipe.compiler} does not compile the kernel ({error.strerror})"
    raise NoKernel(reason)


def run_to_end(command: Sequence[str], folder: Path, what: str) -> str:
    """Run a command to its end. On failure returns `what` and the command's last output, else
    nothing.
    Raises: OSError, Undecided."""
    said = folder / "said.txt"
    with said.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=folder,
            start_new_session=True,
        )
        try:
            status = await_status(process, command[0])
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # and its children
            process.kill()
            process.wait()
    if status == 0:
        return ""
    with suppress(OSError):
        os.truncate(said, min(said.stat().st_size, 1 << 16))
    text = " ".join(said.read_text(errors="replace").split())
    if command[0] != sys.executable and (status == -signal.SIGKILL or OF_THE_MOMENT.search(text)):
        raise Undecided(f"{command[0]} was kept from compiling ({text[-200:] or 'it was killed'})")
    ending = f"signal {-status}" if status < 0 else f"status {status}"
    return f"{what} ({ending}{': ' if text else ''}{text[-200:]})"


def await_status(process: subprocess.Popen[bytes], name: str) -> int:
    """Wait for a process and return its status, within `LIMIT`; a line reports a long wait. Raises:
    Undecided."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(min(PATIENCE, LIMIT))
    if LIMIT > PATIENCE:
        print(
            f"waiting for {name}, which compiles the kernel for more than {PATIENCE:g} s",
            flush=True,
        )
    with suppress(subprocess.TimeoutExpired):
        return process.wait(max(0.0, LIMIT - PATIENCE))
    raise Undecided(f"{name} did not end within {LIMIT:g} s")


# ------------------------------------------------------------------------------------------ loading


def load(data: bytes | None, function: str) -> Any | None:
    """Load the library of these bytes, from a copy private to this process; None if it cannot be
    loaded."""
    if data is None:
        return None
    for copy in (_load_from_memory, _load_from_disk):
        with suppress(OSError, AttributeError):
            loaded = copy(data)
            getattr(loaded, function)
            return loaded
    return None


def _load_from_memory(data: bytes) -> Any:
    descriptor = os.memfd_create("rlkit-kernel", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        loaded = ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    except BaseException:
        os.close(descriptor)
        raise
    HELD.append(descriptor)
    return loaded


def _load_from_disk(data: bytes) -> Any:
    with tempfile.TemporaryDirectory(prefix="rlkit-kernel-") as folder:
        copy = Path(folder) / "library.so"
        copy.write_bytes(data)
        return ctypes.CDLL(str(copy))


# -------------------------------------------------------------------------------- the user's folder


def list_library_folders() -> list[Path]:
    """Folders for libraries: the user's cache folder, and for a user without one a folder beside
    the temporary files."""
    cache = cache_folder()
    found = [] if cache is None else [cache / "kernels"]
    with suppress(OSError):
        found.append(Path(tempfile.gettempdir()) / f"rlkit-kernels-{os.geteuid()}")
    return found


@contextmanager
def open_folders() -> Iterator[list[int]]:
    """Open the usable folders of these as descriptors. An absent folder is made if no earlier one
    is writable."""
    with ExitStack() as stack:
        found = list[int]()
        writable = False
        for path in list_library_folders():
            descriptor = open_own_folder(path, make=not writable)
            if descriptor is not None:
                stack.callback(os.close, descriptor)
                found.append(descriptor)
                writable = writable or os.access(path, os.W_OK)
        yield found


def open_own_folder(path: Path, *, make: bool) -> int | None:
    """Open a folder only this user can read or write; None if there is none and none can be
    made."""
    try:
        if make:
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, RuntimeError):  # a loop of links
        return None
    found = os.fstat(descriptor)
    if found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return descriptor
    os.close(descriptor)
    return None


def find(folders: Sequence[int], name: str) -> bytes | None:
    """Read the library kept under a name; None if it is absent or damaged."""
    for folder in folders:
        with suppress(OSError):
            content = read_plain_file(name, most=LARGEST, folder=folder)
            digest = content[:DIGEST]
            data = content[DIGEST:]
            if data and hashlib.sha256(data).digest() == digest:
                return data
    return None


def keep(folders: Sequence[int], name: str, data: bytes) -> None:
    """Write a library to the disk, in the first folder that accepts it. If none does, the next
    start compiles it again."""
    with ExitStack() as stack:
        for folder in folders:
            if keep_in(folder, name, data):
                return
        for path in list_library_folders():  # a folder not needed until now
            descriptor = open_own_folder(path, make=True)
            if descriptor is not None:
                stack.callback(os.close, descriptor)
                if keep_in(descriptor, name, data):
                    return


def keep_in(folder: int, name: str, data: bytes) -> bool:
    """Whether the folder has the library now."""
    part = f"{name}.{secrets.token_hex(8)}.part"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(part, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
        return True
    except OSError:
        with suppress(OSError):
            os.unlink(part, dir_fd=folder)
        return False


@contextmanager
def lock_library(folders: Sequence[int], name: str) -> Iterator[None]:
    """Let one process at a time into this block. The system gives the lock back however the process
    ends."""
    with ExitStack() as stack:
        for folder in folders:
            descriptor = open_lock(folder, f"{name}.lock")
            if descriptor is not None:
                stack.callback(os.close, descriptor)
                wait_for(descriptor)
                break
        yield


def open_lock(folder: int, name: str) -> int | None:
    """Open the file of a lock; None if the folder takes none."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


def wait_for(descriptor: int) -> None:
    """Take a lock, or give up after `LIMIT`: the process then compiles for itself, with the same
    result."""
    import fcntl

    began = time.monotonic()
    said = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - began
        except OSError:  # a file system without locks
            return
        if waited > LIMIT:
            return
        if waited > PATIENCE and not said:
            said = True
            print("waiting for another process that compiles the kernel", flush=True)
        time.sleep(0.05)
