"""Run folders: where they are, what state they are in, and which one a command means."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from rlkit.errors import ConfigError
from rlkit.files import refusing, write_atomic

OUTPUTS = Path("outputs")
LENGTH = ("trainer.steps", "trainer.max_time", "resume")  # keys that two configs of one run may differ in
PLACE = ("trainer.devices", "trainer.nodes", "trainer.strategy", "trainer.timeout")  # and these: the result does not depend on the ranks
REDACTED = "<redacted>"
SECRET = re.compile(  # names of keys and of environment variables that hold a secret
    r"(^|_)(api_?keys?|access_?keys?|private_?keys?|secrets?|passwords?|passwd|credentials?|authorization)(_|$)"
    r"|(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)(?<![a-z])tokens?$",
    re.IGNORECASE,
)
FIXED = ("model", "optimizer._target_", "task", "seed")  # keys that a continued run may not change


def fresh(parent: Path) -> Path:
    """A new, empty folder <parent>/<time>. Raises ConfigError where it cannot be made."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder, number = parent / stamp, 2
    with refusing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                folder.mkdir()
                return folder
            except FileExistsError:  # also where another process came first
                folder, number = parent / f"{stamp}_{number}", number + 1


def require_writable(folder: Path) -> None:
    """Make the folder, and a file in it for a moment. Raises ConfigError where that is impossible, before anything is computed."""
    made = not folder.exists()
    try:
        with refusing(folder):
            write_atomic(folder / ".writable", b"rlkit\n")
            (folder / ".writable").unlink()
    except ConfigError:
        if made:
            with suppress(OSError):
                folder.rmdir()
        raise


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
    """The newest run under outputs/<name> that did not finish and whose config is this one but for its length and its ranks."""
    candidates = [f for f in (OUTPUTS / name).glob("*") if is_run(f) and not is_finished(f)]
    for folder in sorted(candidates, key=lambda f: f.stat().st_mtime, reverse=True):
        if not difference(read_config(folder), config, beside=PLACE):
            return folder
    return None


def read_config(folder: Path) -> dict[str, Any]:
    """The resolved config that a run was started with."""
    try:
        return yaml.safe_load((folder / "config.yaml").read_text()) or {}
    except yaml.YAMLError:  # half-written: equal to no config
        return {}


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """The resolved config without its secrets, for people and for resume; whole or not there."""
    text = yaml.safe_dump(redacted(config), sort_keys=False)
    write_atomic(folder / "config.yaml", text.encode())
    hide_secrets(folder / ".hydra", secrets(config))


def redacted(config: Any) -> Any:
    """The config with REDACTED where a secret stands: the text under a key that is named like one, and what an environment variable
    named like one holds, wherever it was put."""
    found = secrets(config)

    def hide(node: Any) -> Any:
        if isinstance(node, Mapping):
            return {key: hide(value) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return [hide(value) for value in node]
        return _covered(node, found) if isinstance(node, str) else node

    return hide(config) if found else config


def secrets(config: Any) -> set[str]:
    """The secret texts of a config."""
    texts = list(_texts(config))
    named = {text for key, text in texts if SECRET.search(key)}
    environment = {value for name, value in os.environ.items() if SECRET.search(name) and len(value) >= 8}
    return (named | {value for value in environment if any(value in text for _, text in texts)}) - {"", REDACTED}


def _texts(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(nearest key, text) for every text of a config."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _texts(value, str(name))
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _texts(value, key)
    elif isinstance(node, str):
        yield key, node


def _covered(text: str, values: set[str]) -> str:
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, REDACTED)
    return text


def hide_secrets(folder: Path, values: set[str]) -> None:
    """Writes REDACTED over secrets in the YAML files that Hydra has put into a folder."""
    for path in folder.glob("*.yaml") if values else ():
        text = path.read_text()
        if (hidden := _covered(text, values)) != text:
            write_atomic(path, hidden.encode())


def write_start(folder: Path, config: Mapping[str, Any], versions: Mapping[str, str]) -> list[str]:
    """Adds this process to run.json; what differs from the one before it (versions of packages, state of the code), as sentences."""
    started = datetime.now().isoformat(timespec="seconds")
    now = {"started": started, "config": redacted(config), "versions": dict(versions), "git": git_state()}
    starts = _starts(folder)
    write_atomic(folder / "run.json", (json.dumps([*starts, now], indent=1, default=str) + "\n").encode())
    if not starts:
        return []
    before = starts[-1]
    changed = [
        f"{name} was {was}, is {now['versions'].get(name)}" for name, was in before["versions"].items() if was != now["versions"].get(name)
    ]
    if before["git"] != now["git"]:
        changed.append(f"the code was at {before['git'] or 'no commit'}, is at {now['git'] or 'no commit'}")
    return changed


def read_start(folder: Path) -> dict[str, Any]:
    """Config, versions and git state of the process that works in the folder."""
    starts = _starts(folder)
    return starts[-1] if starts else {}


def _starts(folder: Path) -> list[dict[str, Any]]:
    try:
        return list(json.loads((folder / "run.json").read_text()))
    except (OSError, ValueError):
        return []


def git_state() -> str:
    """Commit of the folder that the package lies in, with `+changes` where files differ from it; empty outside a repository."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return ""
    try:
        commit = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5)
        changes = subprocess.run(["git", "-C", str(root), "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return commit.stdout.strip() + ("+changes" if changes.stdout.strip() else "") if commit.returncode == 0 else ""


def saved_overrides(folder: Path) -> list[str]:
    """The overrides that a run was started with; one with a secret has to be given again."""
    path = folder / ".hydra" / "overrides.yaml"
    return [str(line) for line in yaml.safe_load(path.read_text()) if REDACTED not in str(line)] if path.is_file() else []


def difference(old: Mapping[str, Any], new: Mapping[str, Any], *, beside: tuple[str, ...] = ()) -> dict[str, tuple[Any, Any]]:
    """Dotted key → (old, new) for every value that differs, the run's length and the keys `beside` it left out."""
    before, after = flatten(redacted(old)), flatten(redacted(new))
    return {
        key: (before.get(key), after.get(key))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key) and key not in LENGTH + beside
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


def clock(seconds: float) -> str:
    """1:04, or 2:01:04."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"
