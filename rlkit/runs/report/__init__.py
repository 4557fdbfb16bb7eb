"""`rlkit report`: runs read back and shown on one HTML page that needs nothing else: read → charts, tables, conversations → page.

The page loads nothing and runs one script, whose hash its content policy names. What a model wrote reaches it as JSON and is
shown by textContent alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlkit.errors import ConfigError
from rlkit.runs import folder as runs
from rlkit.runs.report import charts, conversations, page, tables
from rlkit.runs.report.read import ReadRun, find_runs, group_runs, read_run
from rlkit.system.files import refusing, write_atomic


def write_report(paths: Sequence[Path | str], out: Path | str | None = None, *, smooth: int | None = None, limit: int = 2000) -> Path:
    """One HTML file of runs; beside it a folder of the same name with each chart as SVG and PDF. Returns the file's path.

    Args:
      paths: run folders, folders of `rlkit rollout`, or folders with such below them (a sweep's).
      out: the file; None is report.html in the folder where there is one path, else in a new folder outputs/report/TIME.
      smooth: RL steps over which learning curves are smoothed; 0 not at all, None a twelfth of the longest run.
      limit: conversations on the page.
    Raises: ConfigError where nothing is found there, an argument is out of range, or matplotlib is missing.
    """
    if limit < 0 or (smooth is not None and smooth < 0):
        raise ConfigError(f"limit={limit} and smooth={smooth} are counts: 0 or more")
    charts.require_matplotlib()
    found = [read_run(folder) for folder in find_runs(paths)]
    target = _where(paths, out)
    beside = target.with_suffix("")
    groups = group_runs(found)
    drawn = [charts.draw_chart(chart, groups, smooth) for chart in charts.with_values(groups)]
    held_out = tables.before_after(groups)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shown = conversations.collect(found, limit)
    notes = [*(note for run in found for note in run.notes), *(str(warning.message) for warning in caught)]
    text = page.render(found, groups, drawn, held_out, shown, notes, beside.name)
    with refusing(target.parent):
        for chart in drawn:
            write_atomic(beside / f"{chart.name}.svg", chart.svg)
            write_atomic(beside / f"{chart.name}.pdf", chart.pdf)
        write_atomic(target, text.encode(errors="backslashreplace"))
    return target


def _where(paths: Sequence[Path | str], out: Path | str | None) -> Path:
    """The file to write. Raises ConfigError for a name that is no page's."""
    if out is None:
        return (Path(paths[0]).expanduser() if len(paths) == 1 else runs.fresh(runs.OUTPUTS / "report")) / "report.html"
    target = Path(out).expanduser()
    if target.suffix != ".html":
        raise ConfigError(f"out={out}: the report is one HTML file; name it so, as in out=comparison.html")
    return target
