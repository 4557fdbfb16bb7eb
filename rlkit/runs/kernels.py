"""Decide the meaning of `auto` in generation.kernel and model.kernel for all jobs of a sweep or a
bench, before the first one starts."""

from __future__ import annotations

import json
from pathlib import Path

from rlkit.errors import ConfigError
from rlkit.models.compiled import JOBS, NoKernel
from rlkit.system.files import write_json

NAME = "kernels.json"  # in the folder of the jobs


def decide_kernels(folder: Path) -> dict[str, str]:
    """Environment variables to give all jobs of a folder one meaning of `auto`. A line says so if
    they go without compiled code.

    The folder keeps the decision, so jobs added later are computed like the first ones.
    Raises: ConfigError if the jobs so far used compiled code and this machine has none; Undecided
      if the load of the moment keeps the compiler from its work.
    """
    reason = explain_missing_kernels()
    earlier = read_decision(folder / NAME) if next(folder.rglob("config.yaml"), None) else ""
    if earlier == "fused" and reason:
        raise ConfigError(
            f"{folder}: its jobs so far used compiled kernels, and here {reason}. Go on where there"
            " is a compiler, or start anew in another folder"
        )
    decided = earlier or ("eager" if reason else "fused")
    write_json(folder / NAME, {"auto": decided})
    if decided == "eager":
        print(
            f"kernels: all jobs are computed without compiled code ({reason or 'as those so far'})",
            flush=True,
        )
    return {JOBS: decided}


def explain_missing_kernels() -> str:
    """Say why this machine has no compiled code; empty if it has."""
    from rlkit.engines.cached.kernel import compile_kernel
    from rlkit.models.fused import load_operations

    try:
        compile_kernel()
        load_operations()
    except NoKernel as error:
        return str(error)
    return ""


def read_decision(path: Path) -> str:
    """Read eager or fused; empty if nothing is decided yet or the file cannot be read."""
    try:
        decided = json.loads(path.read_text()).get("auto")
    except (OSError, ValueError, AttributeError):
        return ""
    return decided if decided in ("eager", "fused") else ""
