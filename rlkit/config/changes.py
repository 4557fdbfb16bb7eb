"""Compare two configs, and decide whether a run can continue with the differences."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlkit.errors import ConfigError
from rlkit.system.redaction import redact_config
from rlkit.training.schedules.paths import flatten_numbers

ONCE = ("resume", "takeover")  # keys for the present process only; they do not describe the run


# two configs of the same run may differ in these keys
LENGTH = ("trainer.steps", "trainer.max_time", *ONCE)


# these keys may differ too, because the result does not depend on the ranks
PLACE = ("trainer.devices", "trainer.nodes", "trainer.strategy", "trainer.timeout")


FIXED = ("model", "optimizer._target_", "task", "seed")  # keys that a continued run may not change


# sections about the run's output; they do not affect its numbers
APART = ("logger", "callbacks")


def identify(config: Mapping[str, Any]) -> str:
    """Compute a run's identity from the config of its new folder: 16 hexadecimal digits of a
    SHA-256.

    Secrets are replaced first. The sections in APART, the keys in ONCE, suggestions and shelves are
    left out. A run folder keeps the identity when the folder is moved, and when its run continues
    with other settings (`rlkit.system.identity`).
    """
    settings = {
        key: value
        for key, value in _flatten_compared(config).items()
        if key not in ONCE and key.split(".")[0] not in APART
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[
        :16
    ]


def _flatten_compared(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a config to dotted key → value, without secrets, suggestions and shelves."""
    return {
        key: value
        for key, value in flatten_numbers(redact_config(config)).items()
        if not {"suggests", "shelf"} & set(key.split("."))
    }


def find_differences(
    old: Mapping[str, Any], new: Mapping[str, Any], *, beside: tuple[str, ...] = ()
) -> dict[str, tuple[Any, Any]]:
    """Find the values that differ between two configs. Return dotted key → (old, new). The run's
    length, the keys in `beside`, and suggestions are not compared."""
    before = _flatten_compared(old)
    after = _flatten_compared(new)
    return {
        key: (before.get(key), after.get(key))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key) and key not in LENGTH + beside
    }


def find_departures(
    old: Mapping[str, Any], new: Mapping[str, Any], *, beside: tuple[str, ...] = ()
) -> dict[str, tuple[Any, Any]]:
    """Find the differences between a config and a run's config, as `find_differences` does, but
    without the logger, the callbacks and the number of ranks."""
    changed = find_differences(old, new, beside=PLACE + beside)
    return {key: values for key, values in changed.items() if key.split(".")[0] not in APART}


def refuse_changes(folder: Path, changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise ConfigError if a continued run cannot take these changes."""
    fixed = [key for key in changed if any(key == f or key.startswith(f"{f}.") for f in FIXED)]
    if fixed:
        was, wanted = changed[fixed[0]]
        raise ConfigError(
            f"resume={folder}: {fixed[0]} was {was} and is now {wanted} (by its config.yaml and by"
            f" the command); a run cannot continue with another {fixed[0].split('.')[0]}. Take the"
            " override away, or start a new run with resume=never"
        )
