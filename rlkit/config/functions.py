"""Read and write texts of overrides: a function in place of an option, as in
`reward=my_module.my_function`, and a value in quotes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def read_key(override: str) -> str:
    """Return the key or group that an override sets."""
    return override.lstrip("+~").partition("=")[0]


def quote(text: str) -> str:
    """Write a text in Hydra's override grammar. Backslashes are escapes only before a quote, and at
    the end."""
    escaped = re.sub(r"(\\+)(?='|$)", r"\1\1", text)
    return "'" + escaped.replace("'", r"\'") + "'"


def format_literal(value: Any) -> str:
    """Write a plain value in Hydra's grammar."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{format_literal(own)}" for key, own in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(format_literal, value)) + "]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool | int | float) else quote(str(value))


def name_apart(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return name → value. A repeated name gets a number."""
    found: dict[str, Any] = {}
    for name, value in named:
        found[f"{name}_{len(found)}" if name in found else name] = value
    return found


def read_functions(override: str) -> dict[str, Any]:
    """Return dotted key → value for an override with one function, or with several functions in
    brackets. The result is empty for any other override.

    >>> read_functions("environment.tools=my_tools.lend")
    {'environment.tools': {'lend': {'_target_': 'my_tools.lend', '_partial_': True}}}
    >>> read_functions("tools=calculator"), read_functions("reward=numeric")
    ({'tools': ['calculator']}, {})
    """
    key, _, value = override.partition("=")
    names = [name.strip() for name in value.removeprefix("[").removesuffix("]").split(",")]
    if key == "tools" and not value.startswith("["):
        return {key: names}
    if key not in ("reward", "environment.tools") or not all(map(FUNCTION.fullmatch, names)):
        return {}
    parts = name_apart(
        (name.rpartition(".")[2], {"_target_": name, "_partial_": True}) for name in names
    )
    if key != "reward":
        return {key: parts}
    terms = {
        short: {"_target_": "rlkit.rewards.Term", "weight": 1.0, "fn": part}
        for short, part in parts.items()
    }
    chosen = {"hydra.runtime.choices.reward": value}  # as in `rlkit show`
    return {"reward.name": "+".join(parts), "reward.terms": terms} | chosen
