"""What a config that comes with a folder may call without being asked: functions that rlkit ships, and nothing else."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlkit.config.schema import present_name
from rlkit.errors import ConfigError, DataError
from rlkit.system.redaction import FROM_ENVIRONMENT

LARGEST = 4 << 20  # bytes of a YAML file that is read
SHOWN = 3
OPTIMIZERS = "torch.optim."


class _Plain(yaml.SafeLoader):
    """YAML without aliases: a few lines of them can stand for more values than memory holds."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(
                None, None, "it holds an alias (*name), which rlkit never writes", self.peek_event().start_mark
            )
        return super().compose_node(parent, index)


def read_yaml(path: Path) -> Any:
    """A YAML file of a run folder, as data. Raises DataError where it is no such file, holds aliases, or is too large or too deep."""
    try:
        if path.stat().st_size > LARGEST:
            raise DataError(f"{path}: {path.stat().st_size:,} bytes are no config of rlkit; give the folder as rlkit wrote it")
        return yaml.load(path.read_text(), Loader=_Plain)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        why = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise DataError(f"{path}: cannot be read ({why:.300}); give the folder as rlkit wrote it") from error


@functools.cache
def shipped(conf: Path) -> frozenset[str]:
    """The functions that the shipped options name."""
    return frozenset(name for f in conf.rglob("*.yaml") for name in re.findall(r"_target_: *['\"]?([\w.]+)", f.read_text()))


def outside(node: Any, known: frozenset[str], path: str = "") -> Iterator[str]:
    """Every place of a config that has code of others run, or the environment read, as "path: what"."""
    if isinstance(node, Mapping):
        target = node.get("_target_")
        if target is not None and not (isinstance(target, str) and (target in known or target.startswith(OPTIMIZERS))):
            yield f"{path or 'the config'} calls {target!s:.80}"
        if node.get("trust_remote_code"):
            yield f"{path}.trust_remote_code runs code that comes with the model {node.get('path')!s:.80}"
        if target == "rlkit.tasks.verifiers":
            yield f"{path}.id imports {node.get('id')!s:.80}"
        if target == "rlkit.environments.mcp":
            yield f"{path}.servers starts or asks {node.get('servers')!s:.80}"
        if target == "rlkit.engines.VLLM" and (
            node.get("arguments") or node.get("addresses") not in (None, [], ["start"]) or node.get("server") not in (None, "start")
        ):
            yield f"{path} gives vLLM a server or arguments of its own"
        for key, value in node.items():
            yield from outside(value, known, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from outside(value, known, f"{path}[{i}]")
    elif isinstance(node, str):
        if names := FROM_ENVIRONMENT.findall(node):
            yield f"{path} reads the environment variable {names[0]}"
        if "pkg://" in node or (node.lstrip("+").startswith("hydra") and "_target_" in node):
            yield f"{path} is {node:.80}"


def require_trust(node: Any, where: str, conf: Path, *, trusted: bool, own: str = "") -> None:
    """Refuse a config that has code of others run, unless the user trusts it.

    Args:
      node: the config, or the part of it that is used.
      where: the folder that it comes from, as the user named it.
      conf: rlkit's own options. own: text of the user's own, in which he names functions himself.
      trusted: whether the user has said trust=true.
    Raises: ConfigError naming what the folder would have run.
    """
    if trusted:
        return
    mine = frozenset(present_name(name) for name in re.findall(r"_target_\s*[:=]\s*['\"]?([\w.]+)", own))
    found = list(dict.fromkeys(outside(node, shipped(conf) | mine)))
    if found:
        more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise ConfigError(
            f"{where}: its config is not rlkit's alone: {'; '.join(found[:SHOWN])}{more}. If you know where the folder comes from, say "
            "trust=true"
        )


def with_environment(node: Any, path: str = "") -> Any:
    """The config with the values of the environment variables that it names. Raises ConfigError for one that is not set."""
    import os

    if isinstance(node, Mapping):
        return {key: with_environment(value, f"{path}.{key}" if path else str(key)) for key, value in node.items()}
    if isinstance(node, list):
        return [with_environment(value, path) for value in node]
    if not isinstance(node, str):
        return node

    def value(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise ConfigError(f"{path}: the run took this from the environment variable {found[1]}, which is not set; set it")
        return os.environ[found[1]]

    return FROM_ENVIRONMENT.sub(value, node)
