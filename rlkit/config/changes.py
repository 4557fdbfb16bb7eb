"""In what two configs differ, and which changes a run can go on with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlkit.errors import ConfigError
from rlkit.system.redaction import redacted
from rlkit.training.schedules.paths import flat

ONCE = ("resume", "takeover")  # keys that say how a process begins, and nothing of the run


LENGTH = ("trainer.steps", "trainer.max_time", *ONCE)  # keys that two configs of one run may differ in


PLACE = ("trainer.devices", "trainer.nodes", "trainer.strategy", "trainer.timeout")  # and these: the result does not depend on the ranks


FIXED = ("model", "optimizer._target_", "task", "seed")  # keys that a continued run may not change


def difference(old: Mapping[str, Any], new: Mapping[str, Any], *, beside: tuple[str, ...] = ()) -> dict[str, tuple[Any, Any]]:
    """Dotted key → (old, new) for every value that differs, the run's length, the keys `beside` it and mere suggestions left out."""
    before, after = flat(redacted(old)), flat(redacted(new))
    return {
        key: (before.get(key), after.get(key))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key) and key not in LENGTH + beside and "suggests" not in key.split(".")
    }


def refuse_changes(folder: Path, changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Raises ConfigError for changes with which a run cannot go on."""
    fixed = [key for key in changed if any(key == f or key.startswith(f"{f}.") for f in FIXED)]
    if fixed:
        was, wanted = changed[fixed[0]]
        raise ConfigError(
            f"resume={folder}: {fixed[0]} was {was} and is now {wanted}; a run cannot continue with another {fixed[0].split('.')[0]}. "
            "Take the override away, or start anew with resume=never"
        )
