"""Read the numbers, settings and phases of run folders. Group runs with equal settings into lines;
a line is one row of a report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlkit.config.changes import ONCE
from rlkit.episodes.record import FORMATS
from rlkit.errors import ConfigError, DataError
from rlkit.runs import folder as runs
from rlkit.system.redaction import redact_config
from rlkit.system.rows import read_lines
from rlkit.training.schedules.paths import flatten_numbers

SWITCH = "schedule/switch"
LARGEST = 1e100
SAME = (*ONCE, "trainer.max_time")  # settings that may differ within a line, in addition to seeds


class ReadRun(NamedTuple):
    """Hold the content of a run folder."""

    folder: Path
    name: str
    seed: int | None
    settings: Mapping[str, Any]  # dotted key → value
    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]  # one per step, from step 0, in order
    switches: Sequence[tuple[int, str]]  # (last step before the switch, the run's message)
    notes: Sequence[str] = ()  # sentences on unreadable parts of the folder


class Group(NamedTuple):
    """Hold a line of a report: runs with equal settings but different seeds."""

    label: str
    runs: Sequence[ReadRun]


def find_runs(paths: Iterable[Path | str], command: str) -> list[Path]:
    """List the given folders of runs and of `rlkit rollout`. In place of any other given folder,
    list the folders of runs and rollouts below it.

    Other files and folders in the same folder as the runs of a sweep are ignored, because the
    pattern `outputs/sweep/*` also names them. Raises ConfigError, with the name of the command, if
    a path holds no run.
    """
    found = list[Path]()
    without = list[Path]()
    for path in (Path(text).expanduser() for text in paths):
        own = (
            [path] if is_source(path) else sorted(f for f in find_run_folders(path) if is_source(f))
        )
        found += own
        without += [] if own else [path]
    beside = {path.parent for path in found}
    odd = [path for path in without if path.parent not in beside or not path.exists()]
    if odd:
        # the message of `find_run` also names the newest run, if there is one
        runs.find_run(str(odd[0]), f"rlkit {command}")
        raise ConfigError(f"{command}: {odd[0]} holds no run")
    # outputs/latest is a link to a run
    return list({path.resolve(): path for path in found}.values())


def find_run_folders(path: Path) -> list[Path]:
    """List the folders below a path that may hold a run. Hydra's own folders and runs set aside by
    a sweep are left out."""
    files = [
        f
        for name in ("config.yaml", *(f"rollouts{ending}" for ending in FORMATS))
        for f in path.rglob(name)
    ]
    found = dict.fromkeys(f.parent for f in files if f.parent.name != ".hydra")
    return [f for f in found if runs.SET_ASIDE not in str(f.relative_to(path))]


def is_source(folder: Path) -> bool:
    """Return whether a report can be made of a folder: whether it is a run folder, or has a file of
    rollouts."""
    return (runs.is_run(folder) and folder.name != ".hydra") or find_rollout_file(
        folder
    ) is not None


def find_rollout_file(folder: Path) -> Path | None:
    """Return the file of rollouts written by `rlkit rollout`, or None."""
    return next(
        (path for ending in FORMATS if (path := folder / f"rollouts{ending}").is_file()), None
    )


def read_run(folder: Path) -> ReadRun:
    """Read a run, finished or not. A folder of `rlkit rollout` is read as a run of one step.
    Unreadable parts are left out, and `notes` names them."""
    notes: list[str] = []
    settings: dict[str, Any] = {}
    if runs.is_run(folder):
        try:
            settings = flatten_numbers(redact_config(runs.read_config(folder)))
        except (DataError, RecursionError) as error:
            notes.append(
                f"{error}; the settings are left out"
                if str(error)
                else f"{folder}/config.yaml: the settings are left out"
            )
    summary = redact_config(runs.read_summary(folder) or {})
    merged: dict[int, dict[str, Any]] = {}
    switches = []
    lines = read_lines(folder / "metrics.jsonl")
    odd = sum(row is None for _, row in lines)
    if odd:
        notes.append(f"{folder}/metrics.jsonl: {odd} lines are not rows of a step and are left out")
    for step, row in ((row["step"], row) for _, row in lines if row is not None):
        if SWITCH in row:
            switches.append((step, str(row[SWITCH])))
        merged.setdefault(step, {}).update(
            {k: v for k, v in row.items() if k != SWITCH} | {"step": step}
        )
    name = settings.get("name") or folder.parent.name
    seed = settings.get("seed", summary.get("seed"))
    seed = seed if type(seed) is int else None
    return ReadRun(
        folder,
        str(name),
        seed,
        settings,
        summary,
        [merged[step] for step in sorted(merged)],
        switches,
        notes,
    )


def is_number(value: Any) -> bool:
    """Return whether a value of a row or a summary can be plotted and averaged: a finite number
    with a finite square."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def read_series(run: ReadRun, metric: str) -> dict[int, float]:
    """Read a metric as step → value, for each step with a finite value."""
    return {row["step"]: float(row[metric]) for row in run.rows if is_number(row.get(metric))}


# ------------------------------------------------------------------------------- which are one line


def is_seed(key: str) -> bool:
    """Return whether a setting is a seed."""
    return key.rsplit(".", 1)[-1] == "seed"


def group_runs(found: Sequence[ReadRun]) -> list[Group]:
    """Group the runs with equal settings, apart from seeds. Runs without metrics are left out. Each
    group is labelled by its differences from the other groups."""
    by_settings: dict[str, list[ReadRun]] = {}
    for run in found:
        if run.rows:
            own = {
                k: v for k, v in sorted(run.settings.items()) if not is_seed(k) and k not in SAME
            }
            by_settings.setdefault(json.dumps(own, default=str), []).append(run)
    members = list(by_settings.values())
    changed = find_differences([own[0] for own in members])
    return [
        Group(label, own)
        for label, own in zip(
            make_labels([own[0] for own in members], changed), members, strict=True
        )
    ]


def find_differences(found: Sequence[ReadRun]) -> dict[str, list[Any]]:
    """Find the settings, except seeds, that differ between runs. Return dotted key → the key's
    value in each run."""
    told = (key for run in found for key in run.settings if not is_seed(key) and key not in SAME)
    # leave out Hydra's own keys
    keys = dict.fromkeys(key for key in told if not key.endswith(("_partial_", "_convert_")))
    table = {key: [run.settings.get(key) for run in found] for key in keys}
    return {
        key: values for key, values in table.items() if any(value != values[0] for value in values)
    }


def make_labels(found: Sequence[ReadRun], changed: Mapping[str, Sequence[Any]]) -> list[str]:
    """Make a short and unique label for each run: the run's name, and as many settings as needed to
    distinguish the runs. If two runs have equal settings, a number is added."""
    names = [run.name for run in found]
    out = list(names)
    for key, values in sorted(changed.items(), key=lambda item: rank_setting(item[0])):
        if len(set(out)) == len(out):
            break
        longer = [
            f"{text}, {shorten_setting(key, value)}" if out.count(text) > 1 else text
            for text, value in zip(out, values, strict=True)
        ]
        out = longer if len(set(longer)) > len(set(out)) else out
    return [
        f"{text} ({out[: i + 1].count(text)})" if out.count(text) > 1 else text
        for i, text in enumerate(out)
    ]


def rank_setting(key: str) -> tuple[int, int]:
    """Return the rank of a setting among the settings of a label. The most informative settings
    have the lowest rank: first names, then the chosen option of a group, then numbers, then
    functions within options."""
    depth = key.count(".")
    last = key.rsplit(".", 1)[-1]
    if last == "name":
        return 0, depth
    if last == "_target_":
        return 1 if depth == 1 else 3, depth
    return 2, depth


def shorten_setting(key: str, value: Any) -> str:
    """Write a setting in a few characters. A function is shortened to its name.

    >>> shorten_setting("optimizer.lr", 1e-4), shorten_setting("task._target_", "rlkit.tasks.gsm8k")
    ('optimizer.lr=0.0001', 'task=gsm8k')
    """
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if key.endswith("._target_"):
        key = key.removesuffix("._target_")
        text = text.rsplit(".", 1)[-1]
    return f"{'.'.join(key.split('.')[-2:])}={text if len(text) <= 24 else text[:23] + '…'}"
