"""Make run folders, find run folders, and read and write their files."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from rlkit.config.changes import ONCE, find_departures, identify
from rlkit.config.functions import read_key
from rlkit.config.trust import read_yaml
from rlkit.errors import ConfigError, DataError, suggest_name
from rlkit.system.contents import require_readable
from rlkit.system.files import put_aside, read_regular, refuse_unwritable, write_atomic
from rlkit.system.identity import identity_line, read_identity
from rlkit.system.noted import is_noted, note
from rlkit.system.redaction import FROM_ENVIRONMENT, REDACTED, is_secret_key, redact_config
from rlkit.system.rows import read_rows
from rlkit.system.shards import index_steps
from rlkit.training.schedules.paths import flatten_numbers

OUTPUTS = Path("outputs")
LATEST = "latest"  # in OUTPUTS, a link to the newest run
SET_ASIDE = ".set_aside"  # ending of the name of a run folder after a sweep has set it aside
OVERRIDE = re.compile(r"([+~]*[\w./@-]+)=(.*)", re.DOTALL)
# entries of summary.json: the last evaluation on validation problems, and the evaluations on test
# problems before and after training
EVALUATIONS = ("validation", "before", "after")


def make_fresh_folder(parent: Path, label: str = "") -> Path:
    """Make a new, empty folder <parent>/<time>_<label>, and return its absolute path. Raises
    ConfigError if it cannot be made."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S") + (f"_{label}" if label else "")
    parent = parent.absolute()  # a user's function may change the working directory
    folder = parent / stamp
    number = 2
    with refuse_unwritable(parent):
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                folder.mkdir()
                return folder
            except FileExistsError:  # another process may have made it first
                folder = parent / f"{stamp}_{number}"
                number += 1


def point_latest(
    outputs: Path, folder: Path | None, *, instead_of: Path | None = None
) -> Path | None:
    """Point the link `latest` in `outputs` to a run folder, and return its former target, or None.
    Remove the link if there is no such folder. On a file system without links, do nothing. Nothing
    changes either if the link no longer leads to `instead_of`, because another run has begun."""
    link = outputs / LATEST
    former = None
    with suppress(OSError):
        if link.is_symlink():  # a file or folder with this name belongs to the user
            former = outputs / os.readlink(link)
            if instead_of not in (None, former):
                return former
            link.unlink()
        if folder is not None and folder.is_dir():
            link.symlink_to(os.path.relpath(folder, outputs))
    return former


def describe_overrides(overrides: Sequence[str], name: str) -> str:
    """Make the part of a run folder's name that describes the run's overrides, for example
    "lr-3e-4_seed-2". The text has at most 60 characters, and no override is cut in the middle.

    Overrides already in `name` are left out. Overrides without effect on the run's numbers are left
    out too.
    """
    parts = []
    length = 0
    for text in overrides:
        key, _, value = text.lstrip("+~").partition("=")
        part = f"{re.split(r'[./@]', key)[-1]}-{value}"
        silent = (
            key in (*ONCE, "name", "debug", "logger")
            or key.startswith(("hydra", "logger.", "callbacks."))
            or value == name
        )
        if silent or not re.fullmatch(r"[\w.+-]+", part):
            continue
        length += len(part) + 1
        if length > 60:
            break
        parts.append(part)
    return "_".join(parts)


def shorten_path(path: Path) -> str:
    """Return a path for printing, relative to the working directory if the path lies below it."""
    with suppress(OSError):  # the working directory may be gone
        if path.is_relative_to(Path.cwd()):
            return str(path.relative_to(Path.cwd()))
    return str(path)


def require_writable(folder: Path) -> None:
    """Check that a folder is writable, by making it and writing a temporary file into it. Raises
    ConfigError if this fails. Call this before anything is computed."""
    made = not folder.exists()
    try:
        with refuse_unwritable(folder):
            write_atomic(folder / ".writable", b"rlkit\n")
            (folder / ".writable").unlink()
    except ConfigError:
        if made:
            with suppress(OSError):
                folder.rmdir()
        raise


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run folder: it has a config.yaml."""
    return os.path.isfile(folder / "config.yaml")  # Path.is_file raises for a name that is too long


def is_finished(folder: Path) -> bool:
    """Return whether the run in a folder has finished."""
    summary = read_summary(folder)
    return summary is not None and summary.get("ended") == "finished"


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Read summary.json, without evaluations of the wrong type. Return None if the file is missing,
    unreadable, or from another run."""
    try:
        summary = json.loads(read_regular(folder / "summary.json").decode())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(summary, dict) or (summary.get("identity") or "") != read_identity(folder):
        return None
    return {
        key: value
        for key, value in summary.items()
        if key not in EVALUATIONS or isinstance(value, dict)
    }


def find_run(text: str, key: str) -> Path:
    """Return the absolute path of a run folder. `text` is the user's name for the folder or for a
    checkpoint in it. `key` is the key or the command (of several words) that was given it.

    Raises: ConfigError if no run is found; DataError if the folder's config.yaml has no identity.
    """
    path = Path(text).expanduser().absolute()
    if LATEST in path.parts:
        # resolve links, so a continued run keeps its folder when the link `latest` changes
        path = path.resolve()
    for folder in (path, path.parent, path.parent.parent):
        if os.path.exists(path) and is_run(folder) and (folder == path or read_identity(folder)):
            find_identity(folder)
            return folder
        if folder == path or os.path.isfile(path):
            refuse_leftovers(folder)
    runs = sorted(
        (p.parent for p in OUTPUTS.glob("*/*/config.yaml") if p.parent.name != ".hydra"),
        key=lambda p: p.stat().st_mtime,
    )
    newest = f" The newest run is {runs[-1]}" if runs else ""
    near = suggest_name(text, map(str, [*runs, *OUTPUTS.glob("*")]))
    named = f"{key} {text}" if " " in key else f"{key}={text}"
    raise ConfigError(f"{named}: no run folder of rlkit.{near or newest}")


def refuse_leftovers(folder: Path) -> None:
    """Raise DataError if a folder holds rows or checkpoints but no config.yaml. A new run in this
    folder would replace another run."""
    left = "metrics.jsonl" if os.path.lexists(folder / "metrics.jsonl") else "checkpoints/"
    if not is_run(folder) and (left == "metrics.jsonl" or any(folder.glob("checkpoints/*.ckpt"))):
        raise DataError(
            f"{folder} holds {left}, but no file config.yaml, and only that file says which run it"
            " is. Put the file back, or choose another folder"
        )


def find_checkpoint(text: str, folder: Path) -> Path:
    """Return the path from which to load a run: the checkpoint file if the user has named one,
    otherwise the run's folder checkpoints/."""
    return Path(text).expanduser().absolute() if text.endswith(".ckpt") else folder / "checkpoints"


def find_unfinished_run(
    name: str, config: Mapping[str, Any], *, beside: tuple[str, ...] = ()
) -> Path | None:
    """Find the newest unfinished run under outputs/<name> with this config. The run's length, the
    ranks, the logger and the callbacks may differ.

    `beside` names further keys that may differ, because their values depend on the run's length
    (`rlkit.config.compose.find_length_keys`).
    """
    candidates = [
        f for f in (OUTPUTS / name).absolute().glob("*") if is_run(f) and not is_finished(f)
    ]
    for folder in sorted(candidates, key=_read_last_write, reverse=True):
        with suppress(DataError):  # a half-written config does not match
            if not find_departures(read_config(folder), config, beside=beside):
                return folder
    return None


def _read_last_write(folder: Path) -> float:
    """Return the time when a run wrote its last row, or when the run started if it has no rows.
    (The modification time of the folder itself also changes when a process only checks whether to
    resume.)"""
    rows = folder / "metrics.jsonl"
    return (rows if rows.exists() else folder / "config.yaml").stat().st_mtime


def read_config(folder: Path) -> dict[str, Any]:
    """Read a run's config as written by `write_config`. Raises DataError if it cannot be read."""
    config = read_yaml(folder / "config.yaml")
    if not isinstance(config, dict):
        raise DataError(
            f"{folder}/config.yaml: holds no settings; restore the folder as rlkit wrote it"
        )
    return config


def write_config(
    folder: Path, config: Mapping[str, Any], identity: str = "", *, new: bool = False
) -> None:
    """Write the resolved config without its secrets, to be read by people and on resume. The file
    is written completely or not at all.

    Args:
      identity: the run's identity, for the first line. If empty, it is computed from this config.
      new: if True, the folder is new, and is noted as the user's own.
    """
    cover_overrides(folder)
    content = identity_line(identity or identify(config)) + dump(redact_config(config))
    if new:
        note(folder, {"config.yaml": content})
    rewrite(folder, "config.yaml", content)


def cover_overrides(folder: Path) -> None:
    """Replace the secrets in the files of .hydra/."""
    for name in ("config.yaml", "hydra.yaml", "overrides.yaml"):
        path = folder / ".hydra" / name
        if path.is_file():
            write_hydra(folder, f".hydra/{name}", path.read_text())


def write_hydra(folder: Path, name: str, text: str) -> None:
    """Write a file of .hydra/ without its secrets. `text` is the YAML that Hydra itself would
    write."""
    written = yaml.safe_load(text)
    hidden = redact_node(written)
    rewrite(folder, name, text.encode() if hidden == written else dump(hidden))


def rewrite(folder: Path, name: str, content: bytes) -> None:
    """Write a config file of a run folder. A folder noted as the user's own stays noted, even if
    the process is killed in between."""
    path = folder / name
    if path.is_file() and path.read_bytes() == content:
        return
    if is_noted(folder):
        note(folder, {name: content})
    write_atomic(path, content)


def dump(config: Any) -> bytes:
    """Write a config as YAML, in the order of its keys and without aliases."""
    return yaml.dump(config, Dumper=_NoAliases, sort_keys=False).encode()


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def redact_node(node: Any) -> Any:
    """Remove secrets from the content of one of Hydra's files. An override of a secret key loses
    its value, even if the value is short."""
    if isinstance(node, list):
        return [redact_node(value) for value in node]
    if isinstance(node, dict):
        return {key: redact_node(value) for key, value in redact_config(node).items()}
    found = OVERRIDE.fullmatch(node) if isinstance(node, str) else None
    if found and is_secret_key(found[1].rpartition(".")[2]) and not FROM_ENVIRONMENT.search(node):
        return f"{found[1]}={REDACTED}"
    return redact_config(node)


def write_start(
    folder: Path,
    config: Mapping[str, Any],
    versions: Mapping[str, str],
    *,
    identity: str = "",
    overrides: Sequence[str] = (),
) -> list[str]:
    """Add an entry for this process to run.json. Return sentences on differences from the run's
    previous process, in the versions of packages and the state of the code.

    An unreadable run.json is set aside, and a sentence says so.

    Args:
      identity: the run's identity.
      overrides: the overrides that will be written to .hydra/overrides.yaml. `require_overrides`
        later compares the file with these overrides.
    """
    started = datetime.now().isoformat(timespec="seconds")
    now = {
        "started": started,
        "identity": identity,
        "overrides": redact_node(list(overrides)),
        "config": redact_config(config),
        "versions": dict(versions),
        "git": git_state(),
    }
    starts = _read_starts(folder)
    changed = []
    if starts is None:
        kept = put_aside(folder / "run.json", ".unreadable")
        starts = []
        changed = [f"run.json cannot be read and is kept as {kept.name}"]
    write_atomic(
        folder / "run.json", (json.dumps([*starts, now], indent=1, default=str) + "\n").encode()
    )
    if not starts:
        return changed
    before = starts[-1]
    changed = [
        f"{name} was {was} and is now {then}"
        for name, was in before["versions"].items()
        if was != (then := now["versions"].get(name))
    ]
    if before["git"] != now["git"]:
        changed.append(
            f"the code was at {before['git'] or 'no commit'} and is now at"
            f" {now['git'] or 'no commit'}"
        )
    return changed


def read_start(folder: Path) -> dict[str, Any]:
    """Read the entry of the run's last process in run.json: config, versions and git state. Return
    an empty mapping without an entry."""
    starts = _read_starts(folder)
    return starts[-1] if starts else {}


def read_begin(folder: Path) -> datetime:
    """Return the local time at which a run began: of its first process by run.json, or, without
    one, of the last change of config.yaml."""
    with suppress(IndexError, KeyError, TypeError, ValueError):
        return datetime.fromisoformat((_read_starts(folder) or [])[0]["started"])
    return datetime.fromtimestamp((folder / "config.yaml").stat().st_mtime)


def _read_starts(folder: Path) -> list[dict[str, Any]] | None:
    """Read run.json, with one entry for each process of the run. Return None if the file cannot be
    read."""
    try:
        starts = json.loads(read_regular(folder / "run.json").decode())
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError):
        return None
    known = {"identity": str, "overrides": list, "versions": dict, "git": str}
    fine = isinstance(starts, list) and all(
        isinstance(s, dict) and all(isinstance(s.get(k), t) for k, t in known.items())
        for s in starts
    )
    return starts if fine else None


def find_identity(folder: Path) -> str:
    """Read the identity of the run in a folder from its config.yaml. Raises DataError if the file
    cannot be read or has no identity."""
    require_readable(folder / "config.yaml")
    identity = read_identity(folder)
    if not identity:
        raise DataError(
            f"{folder}/config.yaml does not say which run it belongs to: its first line is damaged,"
            " or a version before 0.1.0 wrote it. Put the file back as rlkit wrote it, or start a"
            " new run"
        )
    return identity


def require_identity(folder: Path) -> str:
    """Read the identity of the run in a folder. Raises DataError as `find_identity` does. Also
    raises DataError if run.json has the identity of another run."""
    identity = find_identity(folder)
    starts = _read_starts(folder)
    others = [start["identity"] for start in starts or () if start["identity"] != identity]
    if others:
        raise DataError(
            f"{folder}: config.yaml belongs to run {identity} and run.json to run {others[0]}, so"
            " one of them comes from another run. Put the right file back"
        )
    if starts == []:
        print("resume: run.json is missing; a new one begins with this process", flush=True)
    return identity


def require_overrides(folder: Path) -> None:
    """Raise DataError if .hydra/overrides.yaml differs from the overrides recorded in run.json. A
    resumed run is composed from .hydra/overrides.yaml, so the file must not have changed."""
    path = folder / ".hydra" / "overrides.yaml"
    if not path.is_file():
        raise DataError(
            f"{path} is missing or not a file, so the settings of this run cannot be composed"
            " again. Put it back; a run begun in Python from objects has none, and goes on there"
        )
    saved = _read_saved(folder)
    starts = _read_starts(folder) or ()
    if starts and all(start["overrides"] not in (saved, redact_node(saved)) for start in starts):
        raise DataError(
            f"{path} is not what this run wrote: run.json lists other overrides. Put it back, and"
            " give changes on the command line"
        )


def git_state() -> str:
    """Return the git commit of rlkit's code, with `+changes` if files differ from the commit.
    Return an empty text outside a repository."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        commit = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5
        )
        changes = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "-uno"],
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if commit.returncode != 0:
        return ""
    return commit.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def read_overrides(folder: Path) -> list[str]:
    """Read the overrides from the start of a run, without secrets and without keys that apply to
    one process only.

    Raises: DataError if they cannot be read.
    """
    return [
        text for text in _read_saved(folder) if REDACTED not in text and read_key(text) not in ONCE
    ]


def list_withheld_keys(folder: Path) -> list[str]:
    """List the keys of overrides whose values are secrets. Secrets are not stored in the folder, so
    the user must give these overrides again."""
    return [read_key(text) for text in _read_saved(folder) if REDACTED in text]


def _read_saved(folder: Path) -> list[str]:
    path = folder / ".hydra" / "overrides.yaml"
    if not path.is_file():
        return []
    saved = read_yaml(path)
    if not isinstance(saved, list):
        raise DataError(f"{path}: holds no list of overrides; restore the folder as rlkit wrote it")
    return [str(text) for text in saved]


def refuse_restart(folder: Path) -> None:
    """Raise DataError if a run has trained but has no checkpoint left. Such a run could only start
    from the beginning and replace its old results."""
    steps = count_lost_steps(folder)
    if steps:
        raise DataError(
            f"{folder} has trained {steps} steps (by metrics.jsonl, rollouts/ or summary.json), but"
            " none of its checkpoints is left, so it cannot continue. Start a new run without"
            " resume (with resume=auto: move this folder away first); nothing in it was changed"
        )


def count_lost_steps(folder: Path) -> int:
    """Count the steps that a run has trained and that no checkpoint holds any more. The count is 0
    if a checkpoint exists, or if the run ended before its first save.

    A run has saved before if it has rows of steps after callbacks.checkpoint.every, if its summary
    reports a save at the end, or if another file written by a save exists.
    """
    saves = folder / "checkpoints"
    if any(saves.glob("step_*.ckpt")):
        return 0
    summary = read_summary(folder) or {}
    steps = max(
        [row["step"] for row in read_rows(folder / "metrics.jsonl")]
        + [*index_steps(folder / "rollouts")],
        default=0,
    )
    ended = (
        summary.get("ended") in ("finished", "out of time", "interrupted")
        and summary.get("steps")
        and not summary.get("unsaved")
    )
    left = any(any(saves.glob(name)) for name in ("*.superseded", "*.damaged*", "best.json"))
    every = None  # unknown if the config cannot be read, or has no such callback
    with suppress(DataError):
        every = flatten_numbers(read_config(folder)).get("callbacks.checkpoint.every")
    return steps if ended or left or every is None or steps > every else 0
