"""Protect the user's secrets, for example API keys. A value of the user is sent only to addresses
named by the user's own command line, environment variables or --config-dir."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlkit.config.trust import (
    ABSENT,
    SENDS,
    Declared,
    Folder,
    get_child,
    get_item,
    is_known,
    is_same,
    is_shipped,
    is_text,
    read_declarations,
    shorten_value,
    walk_plain_values,
)
from rlkit.errors import ConfigError
from rlkit.system.redaction import FROM_ENVIRONMENT, is_secret_key

# Environment variables that a logger's package itself sends to the logger's address.
SENT = {
    "rlkit.training.loggers.mlflow": (
        "MLFLOW_TRACKING_TOKEN",
        "MLFLOW_TRACKING_PASSWORD",
        "DATABRICKS_TOKEN",
    )
}


class Leak(NamedTuple):
    """Describe a leak: a value of the user that would be sent to a place named only by the config
    of a run folder."""

    path: str
    what: str  # description of the value
    place: str  # the destination named by the folder, as path=value

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.what} would go to {self.place}, which only the folder names. A key"
            f" goes where you say: repeat {self.place.partition('=')[0]}=VALUE on the command line,"
            f" or set {self.path} yourself"
        )


def find_leaks(node: Any, by: Folder, base: Any = ABSENT) -> list[Leak]:
    """Find environment variables and secrets whose values would reach an address, a program or a
    function named only by the config of a run folder.

    Even trust=true does not allow a leak. A secret is a leak if it is an argument of the same
    function as such an address. If the folder names any such address, every value taken by its
    config from the environment is a leak too, even a value for a prompt.

    """
    found: list[Leak] = []
    places: list[str] = []
    for path, function, own_base in _functions(node, base, ""):
        named = _places(function, by, own_base, path)
        places += named
        if named:
            found += _find_user_values(function, own_base, path, named[0])
    for path, text, own in _leaves(node, base, "") if places else ():
        names = FROM_ENVIRONMENT.findall(text)
        if names and not own:
            found.append(Leak(path, f"the value of {names[0]}", places[0]))
    return list({leak.path: leak for leak in reversed(found)}.values())[::-1]


def _functions(node: Any, base: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    """Yield (path, node, the same node of `base`) for every function of a config."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            base = base if get_child(base, "_target_") == node["_target_"] else ABSENT
            yield path, node, base
        for key, value in node.items():
            yield from _functions(
                value, get_child(base, key), f"{path}.{key}" if path else str(key)
            )
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from _functions(value, get_item(base, i), f"{path}[{i}]")


def _find_user_values(node: Mapping[str, Any], base: Any, path: str, place: str) -> Iterator[Leak]:
    """Yield a Leak for each value of the user among a function's arguments. The function also gets
    an address from the folder."""
    for where, text, own in _leaves(
        {key: value for key, value in node.items() if key != "suggests"}, base, path
    ):
        names = FROM_ENVIRONMENT.findall(text)
        if names:
            yield Leak(where, f"the value of {names[0]}", place)
        elif own and is_secret_key(where.rpartition(".")[2]):
            yield Leak(where, "your secret", place)
    for name in SENT.get(str(node["_target_"]), ()):
        if os.environ.get(name):
            yield Leak(path, f"the value of {name}", place)


def _places(node: Mapping[str, Any], by: Folder, base: Any, path: str) -> list[str]:
    """List the addresses and programs among a function's arguments named only by the folder, as
    path=value. If the function itself is unknown, list the function."""
    target = node["_target_"]
    if not is_known(target, by) and base is ABSENT:
        return [f"{path}._target_={target!s:.80}" if path else f"_target_={target!s:.80}"]
    found = []
    for key, value in node.items():
        verdict = read_declarations(target).get(key, Declared(""))
        if (
            verdict.word not in SENDS
            or is_shipped(value, verdict, target, key, by)
            or is_same(value, get_child(base, key))
        ):
            continue
        if verdict.plain or any(
            is_text(part) and not FROM_ENVIRONMENT.fullmatch(part)
            for part in walk_plain_values(value)
        ):
            found.append(
                f"{path}.{key}={shorten_value(value)}" if path else f"{key}={shorten_value(value)}"
            )
    return found


def _leaves(node: Any, base: Any, path: str) -> Iterator[tuple[str, str, bool]]:
    """Yield (path, text, whether the text comes from rlkit or the user) for every text of a
    config."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _leaves(value, get_child(base, key), f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from _leaves(value, get_item(base, i), f"{path}[{i}]")
    elif isinstance(node, str):
        yield path, node, is_same(node, base)


def refuse_leaks(found: Sequence[Leak], where: str) -> None:
    """Raise ConfigError for the first leak, if there is any."""
    if found:
        raise ConfigError(f"{where}: {found[0]}")


def drop_paths(node: Any, paths: frozenset[str], path: str = "") -> Any:
    """Copy a config, with null at these paths."""
    if path in paths:
        return None
    if isinstance(node, Mapping):
        return {
            key: drop_paths(value, paths, f"{path}.{key}" if path else str(key))
            for key, value in node.items()
        }
    if isinstance(node, list):
        return [drop_paths(value, paths, f"{path}[{i}]") for i, value in enumerate(node)]
    return node
