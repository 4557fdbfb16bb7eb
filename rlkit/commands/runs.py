"""`rlkit runs`: list the runs, newest first and filtered by settings, or show the differences of
two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlkit.commands.arguments import Answer, Arguments, drop, find_option, unquote
from rlkit.config.changes import find_differences
from rlkit.config.trust import read_yaml
from rlkit.display import align_columns
from rlkit.errors import ConfigError, DataError, suggest_name
from rlkit.runs import folder as runs
from rlkit.training.schedules.paths import flatten_numbers

TAKES_TEXTS = True
GIVES_JSON = True

SHOWN = 30  # listed runs without limit=
RESULTS = {
    "steps": "steps",
    "wall_seconds": "seconds",
    "tokens": "tokens",
    "peak_memory_gb": "peak memory, GB",
    "ended": "ended",
}


HEAD = ("began", "run", "ended", "steps", "test accuracy", "overrides")


class Listed(NamedTuple):
    """A run in the list."""

    began: str  # local time
    folder: Path
    ended: str
    steps: int | None
    test_accuracy: dict[str, float]  # before, after
    overrides: list[str]  # overrides of the run's start


def command(arguments: Arguments) -> Answer:
    """List runs, newest first, or show the differences of two runs.

    FOLDER…    where to look; by default outputs
    KEY=VALUE  only runs with this setting or override
    limit=N    runs of the list, 30 by default; 0 shows all
    diff A B   settings and results of two runs side by side
    --json     the same for a program

        rlkit runs algorithm=dapo limit=5
        rlkit runs diff outputs/grpo/A outputs/dapo/B
    """
    words = [*arguments.texts]
    if words[:1] == ["diff"]:
        if len(words) != 3 or arguments.overrides:
            raise ConfigError("rlkit runs diff takes two run folders: rlkit runs diff A B")
        a, b = (runs.find_run(text, "runs diff") for text in words[1:])
        compared = compare_runs(a, b)
        lines = [f"A  {a}", f"B  {b}", "", *format_side_by_side(**compared)]
        return Answer(compared, "\n".join(lines))
    limit = find_option(arguments.overrides, "limit") or str(SHOWN)
    if not limit.isdecimal():
        raise ConfigError(f"limit={limit}: give a whole number, 0 for all")
    wanted = drop(arguments.overrides, "limit")
    absent = [text for text in words if not Path(text).is_dir()]
    if absent:
        raise ConfigError(
            f"'{absent[0]}': rlkit runs takes folders, KEY=VALUE, limit=N, or diff A B; there is no"
            " such folder"
        )
    places = [Path(text) for text in words] or [runs.OUTPUTS]
    found = find_folders(places, wanted)
    shown = list(map(read_listed, found[: int(limit) or None]))
    more = len(found) - len(shown)
    lines = align_columns(HEAD, list(map(_row, shown)), left=len(HEAD)).splitlines()
    if not found:
        asked = f" with {' '.join(wanted)}" if wanted else ""
        hint = _name_nearest(wanted, find_folders(places, ())[:1])
        lines = [f"no run{asked} below {', '.join(map(str, places))}.{hint}"]
    if more:
        lines.append(f"{more} more; limit=0 shows all")
    return Answer({"runs": shown, "more": more}, "\n".join(lines))


def _name_nearest(wanted: Sequence[str], folders: Sequence[Path]) -> str:
    """Suggest the nearest names for settings that these runs lack."""
    known = {
        key.removesuffix(".name") for f in folders for key in flatten_numbers(runs.read_config(f))
    }
    keys = [text.partition("=")[0] for text in wanted]
    return "".join(suggest_name(key, known) for key in keys if key not in known)


def find_folders(places: Sequence[Path], wanted: Sequence[str]) -> list[Path]:
    """Find the folders of runs with these settings, newest first."""
    folders = {
        path.parent
        for place in places
        for path in place.rglob("config.yaml")
        if path.parent.name != ".hydra"
    }
    # leave out a debug bundle inside a run
    folders = {folder for folder in folders if folders.isdisjoint(folder.parents)}
    found = (folder for folder in folders if _passes(folder, wanted))
    return sorted(found, key=lambda folder: (runs.read_begin(folder), folder), reverse=True)


def read_listed(folder: Path) -> Listed:
    summary = runs.read_summary(folder) or {}
    return Listed(
        f"{runs.read_begin(folder):%Y-%m-%d %H:%M}",
        folder,
        str(summary.get("ended") or "not ended"),
        summary.get("steps"),
        _accuracies(summary),
        _overrides(folder),
    )


def _accuracies(summary: Mapping[str, Any]) -> dict[str, float]:
    sides = {key: summary.get(key) for key in ("before", "after")}
    return {key: side["accuracy"] for key, side in sides.items() if isinstance(side, dict)}


def _row(run: Listed) -> tuple[str, ...]:
    """Write a run as a line of the table."""
    return (
        run.began,
        str(run.folder),
        run.ended.partition(":")[0],
        "" if run.steps is None else str(run.steps),
        " → ".join(f"{value:.3f}" for value in run.test_accuracy.values()),
        " ".join(run.overrides),
    )


def _overrides(folder: Path) -> list[str]:
    with suppress(DataError, OSError):
        return runs.read_overrides(folder)
    return []


def _passes(folder: Path, wanted: Sequence[str]) -> bool:
    """Return whether a run has all of these settings, each as a value in its config or as one of
    its overrides."""
    if not wanted:
        return True
    try:
        values = flatten_numbers(runs.read_config(folder))
    except DataError:
        return False
    with suppress(DataError, LookupError, TypeError):  # Python writes no options
        values |= read_yaml(folder / ".hydra" / "hydra.yaml")["hydra"]["runtime"]["choices"]
    values = {key: str(value) for key, value in values.items()}
    given = _overrides(folder)
    return all(
        _normalize(unquote(value))
        in [
            _normalize(own)
            for own in (values.get(key), find_option(given, key), values.get(f"{key}.name"))
            if own is not None
        ]
        for key, _, value in (w.partition("=") for w in wanted)
    )


def _normalize(text: str) -> float | str:
    """Return a number as a number, so 3e-4 equals 0.0003, and other values as YAML reads them, so
    null equals None."""
    with suppress(ValueError):
        return float(text)
    with suppress(yaml.YAMLError):
        text = str(yaml.safe_load(text))
    return text.lower()


def compare_runs(a: Path, b: Path) -> dict[str, Any]:
    """Return the settings that differ, and the results, of two runs: key → its values in A and
    B."""
    sides = [_results(runs.read_summary(folder) or {}) for folder in (a, b)]
    return {
        "settings": find_differences(runs.read_config(a), runs.read_config(b)),
        "results": {key: [side.get(key) for side in sides] for key in sides[0] | sides[1]},
    }


def format_side_by_side(settings: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    """Write differing settings, then results side by side."""
    return [
        *(_table("setting", settings) or ["the settings are equal"]),
        "",
        *_table("result", results),
        "",
        "whether a difference can be claimed: rlkit compare A B, with several seeds a side",
    ]


def _results(summary: Mapping[str, Any]) -> dict[str, Any]:
    found = {f"test accuracy, {key}": value for key, value in _accuracies(summary).items()}
    return found | {label: summary[key] for key, label in RESULTS.items() if key in summary}


def _text(key: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float) and key.startswith("test accuracy"):
        return f"{value:.3f}"
    return "-" if value is None else str(value)


def _table(first: str, rows: Mapping[str, Sequence[Any]]) -> list[str]:
    if not rows:
        return []
    cells = [(key, *(_text(key, value) for value in pair)) for key, pair in rows.items()]
    return align_columns((first, "A", "B"), cells, left=3).splitlines()
