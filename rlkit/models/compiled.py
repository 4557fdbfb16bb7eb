"""C files that the machine's own compiler compiles at their first use, in about a second.

A library is kept in the user's cache folder, under a hash of all that it depends on.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlkit.errors import EngineError

FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")


def library(source: Path, option: str, function: str, flags: Sequence[str] = ()) -> Any:
    """The library of a C file: from the cache folder, or compiled now.

    Args:
      option: the one that asks for it, for messages. function: one that the library has. flags: of the compiler, beside `FLAGS`.
    Raises: EngineError where it can neither be loaded nor compiled.
    """
    compiler = next((found for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and (found := shutil.which(name))), None)
    if compiler is None:
        raise EngineError(f"{option}=fused: there is no C compiler (cc, gcc or clang) on the PATH; install one, or use eager")
    key = hashlib.sha256("\n".join((source.read_text(), *FLAGS, *flags, compiler, *_processor())).encode()).hexdigest()[:16]
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlkit" / f"{source.stem.strip('_')}-{key}.so"
    with suppress(OSError, AttributeError):
        return _loaded(kept, function)
    try:
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder) / kept.name
            _compile(compiler, source, built, (*FLAGS, *flags))
            with suppress(OSError):  # no such folder can be made: it is compiled again the next time
                kept.parent.mkdir(parents=True, exist_ok=True)
                part = shutil.copy(built, kept.with_suffix(f".{os.getpid()}"))
                os.replace(part, kept)
            return _loaded(built, function)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()[-300:]
        raise EngineError(f"{option}=fused: {compiler} does not compile the kernel ({reason}); use eager") from None


def _compile(compiler: str, source: Path, target: Path, flags: Sequence[str]) -> None:
    """Compile a C file for this processor and with OpenMP, or where the compiler does not know one of them without it."""
    for absent in ((), ("-march=native",), ("-fopenmp",), ("-march=native", "-fopenmp")):
        command = [compiler, *(flag for flag in flags if flag not in absent), "-o", str(target), str(source), "-lm", "-lpthread"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=len(absent) == 2)
        if done.returncode == 0:
            return


def _loaded(path: Path, function: str) -> Any:
    loaded = ctypes.CDLL(str(path))
    getattr(loaded, function)  # a damaged file has none
    return loaded


def _processor() -> tuple[str, str]:
    """What the compiled code depends on: a home folder may be that of several machines."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return platform.machine(), next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return platform.machine(), platform.processor()
