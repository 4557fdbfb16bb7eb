"""What the jobs of a sweep came to: a table for people and as CSV, and one page of all runs."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit.errors import Refusal
from rlkit.runs import folder as runs
from rlkit.runs.sweeps.jobs import RunJob
from rlkit.system.rows import read_rows


def _table(jobs: Sequence[RunJob]) -> list[dict[str, Any]]:
    """One row a job: what it varies, how it ended, the last validation accuracy, test accuracy before and after, reward, steps, time."""
    settings = [dict(text.lstrip("+").partition("=")[::2] for text in job.overrides) for job in jobs]
    keys = [key for key in dict.fromkeys(k for s in settings for k in s) if len({s.get(key) for s in settings}) > 1 and key != "resume"]
    out = []
    for job, setting in zip(jobs, settings, strict=True):
        summary = runs.read_summary(job.folder) or {}
        rewards = [row["reward/mean"] for row in read_rows(job.folder / "metrics.jsonl") if row.get("reward/mean") is not None]
        before, after, validation = (summary.get(name) or {} for name in ("before", "after", "validation"))
        out.append(
            {key: setting.get(key, "") for key in keys}
            | {"status": job.status, "validation": validation.get("accuracy")}
            | {"before": before.get("accuracy"), "after": after.get("accuracy")}
            | {"reward": statistics.fmean(rewards[-10:]) if rewards else None, "steps": summary.get("steps")}
            | {"seconds": summary.get("wall_seconds"), "folder": str(job.folder)}
        )
    return out


def table_csv(jobs: Sequence[RunJob]) -> str:
    """The table of all jobs as CSV."""
    lines, out = _table(jobs), io.StringIO()
    writer = csv.DictWriter(out, list(lines[0]) if lines else ["status"])
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def comparison(jobs: Sequence[RunJob]) -> str:
    """The table for people, best first, and over seeds mean ± standard deviation of the test accuracy where there are several.

    The order goes by validation accuracy where there is any, else by the training reward: with a choice by test accuracy, that would no
    longer be a figure of problems that nothing was tuned on.
    """
    lines = _table(jobs)
    if not lines:
        return "no job has begun"
    keys = list(lines[0])[: list(lines[0]).index("status")]

    order = "validation" if any(line["validation"] is not None for line in lines) else "reward"
    shown = "after" if any(line["after"] is not None for line in lines) else order
    best_first = sorted(lines, key=lambda line: (line[order] is None, -(line[order] or 0.0)))
    columns = [*keys, "status", "validation", "before", "after", "reward", "steps", "seconds"]
    text = aligned(columns, [[cell(line[c]) for c in columns] for line in best_first], left=len(keys) + 1)
    others = [key for key in keys if key != "seed"]
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for line in best_first:
        if line[order] is not None and line[shown] is not None and line["status"] == "finished":
            groups.setdefault(tuple(str(line[key]) for key in others), []).append(line)
    if "seed" in keys and any(len(own) > 1 for own in groups.values()):
        seeds = []
        for group, own in sorted(groups.items(), key=lambda item: -statistics.fmean(line[order] for line in item[1])):
            values = [line[shown] for line in own]
            spread = f"{statistics.stdev(values):.3f}" if len(values) > 1 else "-"
            seeds.append([*group, str(len(own)), f"{statistics.fmean(values):.3f}", spread])
        text += "\n\n" + aligned([*others, "seeds", f"mean {shown}", "std"], seeds, left=len(others))
    said = "validation accuracy" if order == "validation" else "training reward; set evaluation.every to order them by validation accuracy"
    return f"{text}\n\nbefore and after: test accuracy; best first by {said}"


def cell(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def aligned(columns: Sequence[str], lines: Sequence[Sequence[str]], *, left: int) -> str:
    """Columns of text, the first `left` of them flush left, the numbers right."""
    widths = [max(len(text) for text in (column, *(line[i] for line in lines))) for i, column in enumerate(columns)]

    def put(line: Sequence[str]) -> str:
        return "  ".join(t.ljust(w) if i < left else t.rjust(w) for i, (t, w) in enumerate(zip(line, widths, strict=True))).rstrip()

    return "\n".join([put(columns), "-" * (sum(widths) + 2 * len(widths) - 2), *map(put, lines)])


def report(root: Path, jobs: Sequence[RunJob]) -> Path | None:
    """One HTML page of all runs of a sweep, where matplotlib is there to draw it."""
    from rlkit.runs.report import write_report

    folders = [job.folder for job in jobs if runs.is_run(job.folder)]
    if not folders:
        return None
    try:
        return write_report(folders, root / "report.html")
    except Refusal as error:
        print(f"report           none: {error}")
        return None
