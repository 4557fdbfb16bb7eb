"""Programs that write their own reward, which a config alone cannot decide: the command line has to
say trust=true."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

PROGRAMS = ("rlkit.gateway.program", "rlkit.gateway._program.program")


def own_score_problems(config: Any, *, trusted: bool) -> list[str]:
    """A sentence for each program whose reward is a file of its own, unless the command line trusts
    it."""
    if trusted:
        return []
    return [
        f"{path}.score=file: the program writes its own reward, and so does a policy that can write"
        " files in the program's folder, so what is learned may be to cheat. Add trust=true to"
        " this command if you want that, or score with environment.score=exit or a reward"
        for path in scored_by_file(config)
    ]


def scored_by_file(node: Any, path: str = "") -> Iterator[str]:
    """The places of the programs in a config whose score is a file."""
    if isinstance(node, list):
        for i, item in enumerate(node):
            yield from scored_by_file(item, f"{path}[{i}]")
    if not isinstance(node, Mapping):
        return
    if node.get("_target_") in PROGRAMS and node.get("score") == "file":
        yield path or "environment"
    for key, value in node.items():
        yield from scored_by_file(value, f"{path}.{key}" if path else str(key))
