"""Decide what `auto` means in generation.kernel and model.kernel, for all jobs of a sweep or a
bench, before the first job starts."""

from __future__ import annotations

import json
from pathlib import Path

from rlkit.errors import ConfigError
from rlkit.models.compiled import JOBS, NoKernel
from rlkit.system.files import write_json

NAME = "kernels.json"  # in the folder of the jobs


def decide_kernels(folder: Path) -> dict[str, str]:
    """Decide the meaning of `auto` for all jobs of a folder, and return it as environment variables
    for the jobs. A line is printed if the jobs run without compiled code.

    The folder keeps the decision, so jobs added later are computed like the first jobs.
    Raises: ConfigError if the jobs so far used compiled code and this machine cannot compile;
      Undecided if the compiler cannot work because of the machine's present load.
    """
    reason = explain_missing_kernels()
    earlier = read_decision(folder / NAME) if next(folder.rglob("config.yaml"), None) else ""
    if earlier == "fused" and reason:
        raise ConfigError(
            f"{folder}: its jobs so far used compiled kernels, but here {reason}. Continue on a"
            " machine with a compiler, or start again in another folder"
        )
    decided = earlier or ("eager" if reason else "fused")
    write_json(folder / NAME, {"auto": decided})
    if decided == "eager":
        print(
            "kernels: all jobs are computed without compiled code"
            f" ({reason or 'like the jobs so far'})",
            flush=True,
        )
    return {JOBS: decided}


def explain_missing_kernels() -> str:
    """Explain why this machine cannot compile code. Return an empty text if it can."""
    from rlkit.engines.cached.kernel import compile_kernel
    from rlkit.models.fused import load_operations

    try:
        compile_kernel()
        load_operations()
    except NoKernel as error:
        return str(error)
    return ""


def read_decision(path: Path) -> str:
    """Read the decision from its file: "eager" or "fused". Return an empty text without a decision
    so far, or if the file cannot be read."""
    try:
        decided = json.loads(path.read_text()).get("auto")
    except (OSError, ValueError, AttributeError):
        return ""
    return decided if decided in ("eager", "fused") else ""
