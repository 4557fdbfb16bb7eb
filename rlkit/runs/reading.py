"""Run folders read back: numbers, settings, phases, and which runs are one line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlkit.config.changes import ONCE
from rlkit.episodes.record import FORMATS
from rlkit.errors import ConfigError, DataError
from rlkit.runs import folder as runs
from rlkit.system.redaction import redacted
from rlkit.system.rows import read_lines
from rlkit.training.schedules.paths import flat

SWITCH = "schedule/switch"
LARGEST = 1e100
SAME = (*ONCE, "trainer.max_time")  # settings that change nothing a run computes, beside its seeds


class ReadRun(NamedTuple):
    """What a folder says of a run."""

    folder: Path
    name: str
    seed: int | None
    settings: Mapping[str, Any]  # dotted key → value
    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]  # one a step, from step 0, in order
    switches: Sequence[tuple[int, str]]  # (step after which, what the run said)
    notes: Sequence[str] = ()  # what of the folder could not be read


class Group(NamedTuple):
    """Runs that differ by their seed alone: one line."""

    label: str
    runs: Sequence[ReadRun]


def find_runs(paths: Iterable[Path | str], command: str) -> list[Path]:
    """Folders of runs and of `rlkit rollout`: those named, and those below a folder that is none
    itself.

    What else a sweep writes beside its runs is passed over, since `outputs/sweep/*` names it too.
    Raises ConfigError, which names the command.
    """
    found = list[Path]()
    without = list[Path]()
    for path in (Path(text).expanduser() for text in paths):
        own = [path] if is_source(path) else sorted(f for f in folders(path) if is_source(f))
        found += own
        without += [] if own else [path]
    beside = {path.parent for path in found}
    odd = [path for path in without if path.parent not in beside or not path.exists()]
    if odd:
        runs.find_run(str(odd[0]), command)  # names the newest run, where there is one
        raise ConfigError(f"{command}: {odd[0]} holds no run")
    return list(dict.fromkeys(found))


def folders(path: Path) -> list[Path]:
    """Folders below a path that may hold a run; not what Hydra writes, nor what a sweep has set
    aside."""
    files = [
        f
        for name in ("config.yaml", *(f"rollouts{ending}" for ending in FORMATS))
        for f in path.rglob(name)
    ]
    found = dict.fromkeys(f.parent for f in files if f.parent.name != ".hydra")
    return [f for f in found if runs.SET_ASIDE not in str(f.relative_to(path))]


def is_source(folder: Path) -> bool:
    """Whether a report can be made of what is there: a run's metrics or a file of rollouts."""
    return (runs.is_run(folder) and folder.name != ".hydra") or rollout_file(folder) is not None


def rollout_file(folder: Path) -> Path | None:
    """The file of `rlkit rollout`."""
    return next(
        (path for ending in FORMATS if (path := folder / f"rollouts{ending}").is_file()), None
    )


def read_run(folder: Path) -> ReadRun:
    """A run, finished or not; of a folder of `rlkit rollout` the numbers are of one step. What
    cannot be read is left out and noted."""
    notes: list[str] = []
    settings: dict[str, Any] = {}
    if runs.is_run(folder):
        try:
            settings = flat(redacted(runs.read_config(folder)))
        except (DataError, RecursionError) as error:
            notes.append(
                f"{error}; the settings are left out"
                if str(error)
                else f"{folder}/config.yaml: the settings are left out"
            )
    summary = redacted(runs.read_summary(folder) or {})
    merged: dict[int, dict[str, Any]] = {}
    switches = []
    lines = read_lines(folder / "metrics.jsonl")
    odd = sum(row is None for _, row in lines)
    if odd:
        notes.append(f"{folder}/metrics.jsonl: {odd} lines are no rows of a step and left out")
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
    """Whether a value of a row or a summary can be drawn and averaged: a finite number of a size
    that its square exists."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def series(run: ReadRun, metric: str) -> dict[int, float]:
    """Step → value, where there is a finite one."""
    return {row["step"]: float(row[metric]) for row in run.rows if is_number(row.get(metric))}


def metrics_of(found: Iterable[ReadRun]) -> list[str]:
    """All metrics in the order in which runs have them."""
    return list(
        dict.fromkeys(key for run in found for row in run.rows for key in row if key != "step")
    )


# ------------------------------------------------------------------------------- which are one line


def is_seed(key: str) -> bool:
    """Whether a setting only chooses random numbers."""
    return key.rsplit(".", 1)[-1] == "seed"


def group_runs(found: Sequence[ReadRun]) -> list[Group]:
    """Runs with metrics, those together whose settings differ by seeds alone, labelled by what
    tells them apart."""
    by_settings: dict[str, list[ReadRun]] = {}
    for run in found:
        if run.rows:
            own = {
                k: v for k, v in sorted(run.settings.items()) if not is_seed(k) and k not in SAME
            }
            by_settings.setdefault(json.dumps(own, default=str), []).append(run)
    members = list(by_settings.values())
    changed = differences([own[0] for own in members])
    return [
        Group(label, own)
        for label, own in zip(labels([own[0] for own in members], changed), members, strict=True)
    ]


def differences(found: Sequence[ReadRun]) -> dict[str, list[Any]]:
    """Dotted key → its value in each run, for the settings that are not the same in all; seeds
    aside."""
    told = (key for run in found for key in run.settings if not is_seed(key) and key not in SAME)
    # Hydra's own words
    keys = dict.fromkeys(key for key in told if not key.endswith(("_partial_", "_convert_")))
    table = {key: [run.settings.get(key) for run in found] for key in keys}
    return {
        key: values for key, values in table.items() if any(value != values[0] for value in values)
    }


def labels(found: Sequence[ReadRun], changed: Mapping[str, Sequence[Any]]) -> list[str]:
    """A short name of each, no two alike: the run's, with the settings that it takes to tell them
    apart, else a number."""
    names = [run.name for run in found]
    out = list(names)
    for key, values in sorted(changed.items(), key=lambda item: weight(item[0])):
        if len(set(out)) == len(out):
            break
        longer = [
            f"{text}, {said(key, value)}" if out.count(text) > 1 else text
            for text, value in zip(out, values, strict=True)
        ]
        out = longer if len(set(longer)) > len(set(out)) else out
    return [
        f"{text} ({out[: i + 1].count(text)})" if out.count(text) > 1 else text
        for i, text in enumerate(out)
    ]


def weight(key: str) -> tuple[int, int]:
    """How little a setting says of a run: names first, then which option of a group, then numbers,
    then code within options."""
    depth = key.count(".")
    last = key.rsplit(".", 1)[-1]
    if last == "name":
        return 0, depth
    if last == "_target_":
        return 1 if depth == 1 else 3, depth
    return 2, depth


def said(key: str, value: Any) -> str:
    """A setting in a few characters; of an option's code its name.

    >>> said("optimizer.lr", 1e-4), said("task._target_", "rlkit.tasks.gsm8k")
    ('optimizer.lr=0.0001', 'task=gsm8k')
    """
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if key.endswith("._target_"):
        key = key.removesuffix("._target_")
        text = text.rsplit(".", 1)[-1]
    return f"{'.'.join(key.split('.')[-2:])}={text if len(text) <= 24 else text[:23] + '…'}"
