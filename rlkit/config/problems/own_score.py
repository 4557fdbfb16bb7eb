"""Parts whose program writes its own reward, which a config alone cannot decide: the command line
has to say trust=true."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlkit.config.schema import resolve
from rlkit.errors import ConfigError


def own_score_problems(config: Any, *, trusted: bool) -> list[str]:
    """A sentence for each part that declares `rlkit.types.writes_reward`, unless the command line
    trusts it."""
    if trusted:
        return []
    return [
        f"{key}={value}: the program writes its own reward, and so does a policy that can write"
        " files in the program's folder, so what is learned may be to cheat. Add trust=true to"
        f" this command if you want that, or choose another {key} or a reward"
        for key, value in written_rewards(config)
    ]


def written_rewards(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a config that let a program write its own reward, with their values."""
    if isinstance(node, list):
        for i, item in enumerate(node):
            yield from written_rewards(item, f"{path}[{i}]")
    if not isinstance(node, Mapping):
        return
    for key, value in declared_of(node.get("_target_")).items():
        if node.get(key) == value:
            yield f"{path or 'environment'}.{key}", value
    for key, value in node.items():
        yield from written_rewards(value, f"{path}.{key}" if path else str(key))


def declared_of(target: Any) -> Mapping[str, Any]:
    """What a part declares; nothing if there is no such part, which is told elsewhere."""
    if not isinstance(target, str):
        return {}
    try:
        return getattr(resolve(target), "__writes_reward__", {})
    except ConfigError:
        return {}
