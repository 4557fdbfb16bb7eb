"""`rlkit runs`: the runs that there are, newest first, filtered by settings; and in what two of
them differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rlkit.commands.arguments import Arguments, drop, option, unquote
from rlkit.config.changes import difference
from rlkit.errors import ConfigError, DataError, visible
from rlkit.runs import folder as runs
from rlkit.training.schedules.paths import flat

TAKES_TEXTS = True
READS_NO_CODE = True

SHOWN = 30  # runs of a list, without limit=
RESULTS = {
    "steps": "steps",
    "wall_seconds": "seconds",
    "tokens": "tokens",
    "peak_memory_gb": "peak memory, GB",
    "ended": "ended",
}


def command(arguments: Arguments) -> int:
    """List runs, newest first, or show in what two of them differ.

    FOLDER…    where to look; by default outputs
    KEY=VALUE  only runs with this setting or override
    limit=N    runs of the list, 30 by default; 0 shows all
    diff A B   settings and results of two runs side by side

        rlkit runs algorithm=dapo limit=5
        rlkit runs diff outputs/grpo/A outputs/dapo/B
    """
    words = [*arguments.texts]
    if words[:1] == ["diff"]:
        if len(words) != 3 or arguments.overrides:
            raise ConfigError("rlkit runs diff takes two run folders: rlkit runs diff A B")
        a, b = (runs.find_run(text, "runs diff") for text in words[1:])
        print(visible("\n".join(side_by_side(a, b)), kept="\n"))
        return 0
    limit = option(arguments.overrides, "limit") or str(SHOWN)
    if not limit.isdigit():
        raise ConfigError(f"limit={limit}: give a whole number, 0 for all")
    wanted = drop(arguments.overrides, "limit")
    absent = [text for text in words if not Path(text).is_dir()]
    if absent:
        raise ConfigError(
            f"'{absent[0]}': rlkit runs takes folders, KEY=VALUE, limit=N, or diff A B; there is no"
            " such folder"
        )
    places = [Path(text) for text in words] or [runs.OUTPUTS]
    print(visible("\n".join(run_table(places, wanted, int(limit))), kept="\n"))
    return 0


def run_table(places: Sequence[Path], wanted: Sequence[str], limit: int) -> list[str]:
    """A table: a run a line, newest first; what it ended with, its test accuracy, and the overrides
    that made it."""
    folders = {
        path.parent
        for place in places
        for path in place.rglob("config.yaml")
        if path.parent.name != ".hydra"
    }
    # no debug bundle inside a run
    folders = {folder for folder in folders if folders.isdisjoint(folder.parents)}
    found = sorted(
        (f for f in folders if _passes(f, wanted)),
        key=lambda f: (f / "config.yaml").stat().st_mtime,
        reverse=True,
    )
    if not found:
        asked = f" with {' '.join(wanted)}" if wanted else ""
        return [f"no run{asked} below {', '.join(map(str, places))}"]
    shown = found[:limit] if limit else found
    rows = [("began", "run", "ended", "steps", "test accuracy", "overrides"), *map(_row, shown)]
    more = len(found) - len(shown)
    return _columns(rows) + ([f"{more} more; limit=0 shows all"] if more else [])


def _row(folder: Path) -> tuple[str, ...]:
    summary = runs.read_summary(folder) or {}
    began = datetime.fromtimestamp((folder / "config.yaml").stat().st_mtime).strftime(
        "%Y-%m-%d %H:%M"
    )
    accuracy = " → ".join(
        f"{side['accuracy']:.3f}"
        for key in ("before", "after")
        if isinstance(side := summary.get(key), dict)
    )
    ended = str(summary.get("ended") or "not ended").partition(":")[0]
    return (
        began,
        str(folder),
        ended,
        str(summary.get("steps", "")),
        accuracy,
        " ".join(_overrides(folder)),
    )


def _overrides(folder: Path) -> list[str]:
    with suppress(DataError, OSError):
        return runs.saved_overrides(folder)
    return []


def _passes(folder: Path, wanted: Sequence[str]) -> bool:
    """Whether a run has all of these settings: a value of its config, or an override that it was
    started with."""
    if not wanted:
        return True
    try:
        values = {key: str(value) for key, value in flat(runs.read_config(folder)).items()}
    except DataError:
        return False
    given = {
        o.partition("=")[0].lstrip("+"): unquote(o.partition("=")[2]) for o in _overrides(folder)
    }
    return all(
        _same(value, values.get(key), given.get(key), values.get(f"{key}.name"))
        for key, _, value in (w.partition("=") for w in wanted)
    )


def _same(value: str, *found: str | None) -> bool:
    """Whether one of the texts is the value, numbers by their size: 3e-4 is 0.0003."""
    for text in found:
        if text is None:
            continue
        with suppress(ValueError):
            if float(text) == float(value):
                return True
        if text.lower() == unquote(value).lower():
            return True
    return False


def side_by_side(a: Path, b: Path) -> list[str]:
    """Settings that differ, then results side by side."""
    changed = difference(runs.read_config(a), runs.read_config(b))
    lines = [f"A  {a}", f"B  {b}", ""]
    lines += _table(
        "setting", {key: (_text(old), _text(new)) for key, (old, new) in changed.items()}
    ) or ["the settings are equal"]
    sides = [_results(runs.read_summary(folder) or {}) for folder in (a, b)]
    results = {
        key: (sides[0].get(key, "-"), sides[1].get(key, "-"))
        for key in dict.fromkeys((*sides[0], *sides[1]))
    }
    return [
        *lines,
        "",
        *_table("result", results),
        "",
        "whether a difference can be claimed: rlkit compare A B, with several seeds a side",
    ]


def _results(summary: Mapping[str, Any]) -> dict[str, str]:
    found = {
        f"test accuracy, {key}": f"{s['accuracy']:.3f}"
        for key in ("before", "after")
        if isinstance(s := summary.get(key), dict)
    }
    return found | {label: _text(summary[key]) for key, label in RESULTS.items() if key in summary}


def _text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "-" if value is None else str(value)


def _table(first: str, rows: Mapping[str, tuple[str, str]]) -> list[str]:
    if not rows:
        return []
    return _columns([(first, "A", "B"), *((key, *values) for key, values in rows.items())])


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines whose cells stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
