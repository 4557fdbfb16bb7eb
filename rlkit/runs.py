"""Run folders: where they are, what state they are in, and which one a command means."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from rlkit.errors import ConfigError

OUTPUTS = Path("outputs")
LENGTH = ("trainer.steps", "trainer.max_time", "resume")  # keys that two configs of one run may differ in
FIXED = ("model", "optimizer._target_", "task", "seed")  # keys that a continued run may not change


def fresh(parent: Path) -> Path:
    """A new, empty folder <parent>/<time>."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder, number = parent / stamp, 2
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:  # also where another process came first
            folder, number = parent / f"{stamp}_{number}", number + 1


def is_run(folder: Path) -> bool:
    """Whether rlkit has trained there."""
    return (folder / "config.yaml").is_file()


def is_finished(folder: Path) -> bool:
    """Whether the run there came to its end."""
    summary = read_summary(folder)
    return summary is not None and summary.get("ended") == "finished"


def read_summary(folder: Path) -> dict[str, Any] | None:
    """summary.json, or None."""
    try:
        return json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return None


def find_run(text: str, key: str) -> Path:
    """The run folder that a user names, itself or one of its checkpoints. Raises ConfigError."""
    path = Path(text).expanduser()
    for folder in (path, path.parent, path.parent.parent):
        if path.exists() and is_run(folder):
            return folder
    runs = sorted((p.parent for p in OUTPUTS.glob("*/*/config.yaml")), key=lambda p: p.stat().st_mtime)
    newest = f" The newest run is {runs[-1]}" if runs else ""
    raise ConfigError(f"{key}={text}: no run folder of rlkit.{newest}")


def checkpoint_source(text: str, folder: Path) -> Path:
    """What to load of a run that a user named: the checkpoint file itself, or the run's folder of checkpoints."""
    return Path(text).expanduser() if text.endswith(".ckpt") else folder / "checkpoints"


def newest_unfinished(name: str, config: Mapping[str, Any]) -> Path | None:
    """The newest run under outputs/<name> that did not finish and whose config is this one but for its length."""
    candidates = [f for f in (OUTPUTS / name).glob("*") if is_run(f) and not is_finished(f)]
    for folder in sorted(candidates, key=lambda f: f.stat().st_mtime, reverse=True):
        if not difference(read_config(folder), config):
            return folder
    return None


def read_config(folder: Path) -> dict[str, Any]:
    """The resolved config that a run was started with."""
    try:
        return yaml.safe_load((folder / "config.yaml").read_text()) or {}
    except yaml.YAMLError:  # half-written: equal to no config
        return {}


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """The resolved config, for people and for resume."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(config), sort_keys=False))


def saved_overrides(folder: Path) -> list[str]:
    """The overrides that a run was started with."""
    path = folder / ".hydra" / "overrides.yaml"
    return [str(line) for line in yaml.safe_load(path.read_text())] if path.is_file() else []


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key → (old, new) for every value that differs, the run's length aside."""
    before, after = flatten(old), flatten(new)
    return {
        key: (before.get(key), after.get(key))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key) and key not in LENGTH
    }


def flatten(node: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    if not isinstance(node, Mapping) or not node:
        return {path: node}
    return {k: v for key, value in node.items() for k, v in flatten(value, f"{path}.{key}" if path else str(key)).items()}


def refuse_changes(folder: Path, changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Raises ConfigError for changes with which a run cannot go on."""
    fixed = [key for key in changed if any(key == f or key.startswith(f"{f}.") for f in FIXED)]
    if fixed:
        was, wanted = changed[fixed[0]]
        raise ConfigError(
            f"resume={folder}: {fixed[0]} was {was} and is now {wanted}; a run cannot continue with another {fixed[0].split('.')[0]}. "
            "Take the override away, or start anew with resume=never"
        )


def quoted(folder: Path) -> str:
    """A folder as a shell takes it."""
    return shlex.quote(str(folder))
