"""Compile C files with the machine's own compiler, at their first use, in about a second.

A compiled library is kept in the user's cache folder, if there is one. The library's name holds a
digest of everything it depends on, and its file begins with a digest of its bytes. Each process
checks the bytes and loads a private copy of them, so it never runs a library damaged in the folder.
Processes that start at the same time all compile, with the same result.
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
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from rlkit.errors import EngineError
from rlkit.system.files import cache_folder
from rlkit.system.plain_files import read_plain_file

FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")
LIMIT = 600.0  # largest number of seconds for a compiler run
PATIENCE = 20.0  # seconds until a printed line reports that the compiler is still running
LARGEST = 64 << 20  # largest number of bytes of a library
DIGEST = hashlib.sha256().digest_size
# environment variable set for a sweep's jobs: "fused" or "eager", the meaning of `auto` in all jobs
JOBS = "RLKIT_KERNELS"
# Matches a compiler's message about too little memory or disk space at the moment.
OF_THE_MOMENT = re.compile(
    r"\bkilled\b|no space left|cannot allocate memory|out of memory|disk quota|resource"
    r" temporarily",
    re.IGNORECASE,
)
# Load the library from memory if possible, as `load` does: temporary files may be on a disk mounted
# noexec.
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
# Open descriptors of the copies in memory. The descriptors stay open because the C library
# identifies a loaded file by its path, and the path holds the descriptor's number.
HELD: list[int] = []


class NoKernel(EngineError):
    """Report that compiled code is impossible on this machine, now and at the next start. The
    message is only the reason, without a subject."""


class Undecided(EngineError):
    """Report that the machine is too busy to compile at the moment. A busy machine must not decide
    between compiled code and torch, because the choice changes the run's numbers."""


class Recipe(NamedTuple):
    """Hold everything that a compiled library depends on."""

    source: Path
    function: str  # name of a function in the library
    compiler: str
    flags: tuple[str, ...]
    name: str  # name of the library's file


def load_library(source: Path, function: str, flags: Sequence[str] = ()) -> Any:
    """Load the compiled library of a C file from the user's cache folder. If the folder does not
    have the library, compile it now.

    Args:
      function: name of a function in the library.
      flags: flags of the compiler, in addition to `FLAGS`.
    Raises: NoKernel if the library can neither be loaded nor compiled. Undecided if the machine is
    too busy to compile.
    """
    recipe = find_recipe(source, function, (*FLAGS, *flags))
    with open_own_folder() as folder:
        loaded = load(find(folder, recipe.name), function)
        if loaded is not None:
            return loaded
        data = compile_library(recipe)
        keep(folder, recipe.name, data)
    loaded = load(data, function)
    if loaded is None:
        raise NoKernel("the compiled library cannot be loaded into this process")
    return loaded


def load_or_reason(kernel: str, option: str, make: Callable[[], Any]) -> tuple[Any, str]:
    """Call `make`, a function that loads compiled code.

    Args:
      kernel: auto or fused, the value of the config's `option`.
      option: name of the config key, for messages.
    Returns: the result of `make` and "", or None and the reason why "auto" does not use compiled
    code.
    Raises: EngineError if "fused" is impossible, if the other jobs of a sweep use compiled code and
    this machine cannot, or if the machine is too busy to compile at the moment.
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
    """Find the compiler and the flags for a C file on this machine.

    Raises: NoKernel if there is no compiler.
    """
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
    """Return a description of the processor. Compiled code depends on the processor, and machines
    with different processors may share a home folder."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return platform.machine(), next(
            (line for line in lines if line.lower().startswith(("flags", "features"))), ""
        )
    return platform.machine(), platform.processor()


# ---------------------------------------------------------------------------------------- compiling


def compile_library(recipe: Recipe) -> bytes:
    """Compile the library and return its bytes. A separate process tries to load it first, because
    a bad library can end the process that loads it.

    The library is compiled for this processor and with OpenMP. If the compiler does not support one
    of these two, the library is compiled without it.

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
    """Run a command to its end. Return an empty text on success. On failure, return `what` and the
    command's last output.

    Raises: OSError, Undecided.
    """
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
                os.killpg(process.pid, signal.SIGKILL)  # also kills the children of the process
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
    """Wait at most `LIMIT` seconds for a process and return its exit status. If the wait is long,
    print a line about it.

    Raises: Undecided after `LIMIT` seconds.
    """
    with suppress(subprocess.TimeoutExpired):
        return process.wait(PATIENCE)
    print(f"waiting for {name}, which compiles the kernel for more than {PATIENCE:g} s", flush=True)
    with suppress(subprocess.TimeoutExpired):
        return process.wait(LIMIT - PATIENCE)
    raise Undecided(f"{name} did not end within {LIMIT:g} s")


# ------------------------------------------------------------------------------------------ loading


def load(data: bytes | None, function: str) -> Any | None:
    """Load a library from its bytes, through a copy private to this process. Return None if it
    cannot be loaded."""
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


@contextmanager
def open_own_folder() -> Iterator[int | None]:
    """Yield a descriptor of the folder for libraries, in the user's cache folder. Yield None if
    there is none and none can be created, or if somebody else can read or write it."""
    cache = cache_folder()
    with ExitStack() as stack:
        folder = None
        with suppress(OSError, RuntimeError):  # RuntimeError: a loop of symbolic links
            if cache is not None:
                cache.mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError):
                    (cache / "kernels").mkdir(mode=0o700)
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                folder = os.open(cache / "kernels", flags)
                stack.callback(os.close, folder)
        found = None if folder is None else os.fstat(folder)
        own = found and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        yield folder if own else None


def find(folder: int | None, name: str) -> bytes | None:
    """Read the library with this name. Return None if it is missing or damaged."""
    if folder is not None:
        with suppress(OSError):
            content = read_plain_file(name, most=LARGEST, folder=folder)
            data = content[DIGEST:]
            if data and hashlib.sha256(data).digest() == content[:DIGEST]:
                return data
    return None


def keep(folder: int | None, name: str, data: bytes) -> None:
    """Write a library into the folder. Without a folder, or if the folder does not accept it, the
    next start compiles the library again."""
    if folder is None:
        return
    part = f"{name}.{secrets.token_hex(8)}.part"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(part, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    except OSError:
        with suppress(OSError):
            os.unlink(part, dir_fd=folder)
