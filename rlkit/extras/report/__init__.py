"""`rlkit report`: show runs on one HTML page that needs nothing else: read → charts, tables,
conversations → page.

The page loads nothing and runs one script; its content policy names the script's hash. Numbers and
conversations reach it as compressed JSON, opened on demand. A model's text is shown by textContent
alone.

Each file imports only files before it in this list: tables, charts, conversations, drawing, page,
commands.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from rlkit.errors import ConfigError, install
from rlkit.extras.report import charts, conversations, drawing, page
from rlkit.runs import folder as runs
from rlkit.runs.reading import Group, find_runs, group_runs, read_run
from rlkit.system.files import refuse_unwritable, write_atomic

LIMIT = 20_000  # conversations on a page


def write_report(
    paths: Sequence[Path | str],
    out: Path | str | None = None,
    *,
    smooth: int | None = None,
    limit: int = LIMIT,
) -> Path:
    """Write one HTML file of runs, and beside it a folder of the same name with each chart as SVG
    and PDF. Return the file's path.

    Args:
      paths: run folders, folders of `rlkit rollout`, or parents of either (a sweep's).
      out: the file. None is report.html in the folder if there is one path, else in a new folder
        outputs/report/TIME.
      smooth: RL steps for the smoothing of learning curves; 0 not at all, None a twelfth of the
        longest run.
      limit: conversations on the page.
    Raises: ConfigError if no run is found, or an argument is out of range.
    """
    if limit < 0 or (smooth is not None and smooth < 0):
        raise ConfigError(f"limit={limit} and smooth={smooth} are counts: 0 or more")
    found = [read_run(folder) for folder in find_runs(paths, "report")]
    target = _choose_place(paths, out)
    groups = group_runs(found)
    told = charts.with_values(groups)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shown = conversations.collect(found, limit)
    notes = [
        *(note for run in found for note in run.notes),
        *(str(warning.message) for warning in caught),
        *shown.notes,
    ]
    files = _draw_charts(told, groups, smooth)
    if told and not files:
        notes.append(f"Charts as SVG and PDF for papers need matplotlib: {install('report')}")
    text = page.render(found, groups, told, shown, notes, target.stem if files else "", smooth)
    with refuse_unwritable(target.parent):
        for name, data in files.items():
            write_atomic(target.with_suffix("") / name, data)
        write_atomic(target, text.encode(errors="backslashreplace"))
    return target


def _draw_charts(
    told: Sequence[charts.Chart], groups: Sequence[Group], smooth: int | None
) -> dict[str, bytes]:
    """File → its bytes; none without matplotlib."""
    if not drawing.has_matplotlib():
        return {}
    pictures = [drawing.draw_chart(chart, groups, smooth) for chart in told]
    return {
        f"{own.name}.{kind}": data
        for own in pictures
        for kind, data in (("svg", own.svg), ("pdf", own.pdf))
    }


def _choose_place(paths: Sequence[Path | str], out: Path | str | None) -> Path:
    """The file to write. Raises: ConfigError for a name that no page can have."""
    if out is None:
        return (
            Path(paths[0]).expanduser()
            if len(paths) == 1
            else runs.make_fresh_folder(runs.OUTPUTS / "report")
        ) / "report.html"
    target = Path(out).expanduser()
    if target.suffix != ".html":
        raise ConfigError(
            f"out={out}: the report is one HTML file; name it so, as in out=comparison.html"
        )
    return target
