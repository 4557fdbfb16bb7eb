"""Write the results of a sweep's jobs, as a table for people and as CSV."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlkit.display import align_columns
from rlkit.runs import folder as runs
from rlkit.runs import verdicts
from rlkit.runs.reading import group_runs, read_run
from rlkit.runs.sweeps.jobs import RunJob, read_last_reward

REWARD = "training reward"  # column; `reward` may be a setting of the sweep


def tabulate_results(jobs: Sequence[RunJob]) -> list[dict[str, Any]]:
    """Make a row for each job, with the job's varying settings, its end, its accuracies, reward,
    steps and seconds, and its folder."""
    settings = [
        dict(text.lstrip("+").partition("=")[::2] for text in job.overrides) for job in jobs
    ]
    keys = [
        key
        for key in dict.fromkeys(k for s in settings for k in s)
        if len({s.get(key) for s in settings}) > 1 and key != "resume"
    ]
    out = []
    for job, setting in zip(jobs, settings, strict=True):
        summary = runs.read_summary(job.folder) or {}
        row: dict[str, Any] = {key: setting.get(key, "") for key in keys} | {"status": job.status}
        row |= {split: (summary.get(split) or {}).get("accuracy") for split in runs.EVALUATIONS}
        row |= {
            REWARD: read_last_reward(job.folder),
            "steps": summary.get("steps"),
            "seconds": summary.get("wall_seconds"),
        }
        out.append(row | {"folder": str(job.folder)})
    return out


def write_csv(path: Path, jobs: Sequence[RunJob]) -> None:
    """Write the rows of `tabulate_results` as a CSV file."""
    rows = tabulate_results(jobs)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["status"])
        writer.writeheader()
        writer.writerows(rows)


def format_comparison(jobs: Sequence[RunJob]) -> str:
    """Write the table for people, with the best job first. If several lines (jobs with equal
    settings apart from the seed) have seeds in common, the table is followed by verdicts. A verdict
    compares a line with the first line.

    Jobs are ordered by validation accuracy if there is any, else by training reward. Test accuracy
    must not decide the order, because test problems must not be used for any choice.
    """
    rows = tabulate_results(jobs)
    if not rows:
        return "no job has begun"
    keys = list(rows[0])[: list(rows[0]).index("status")]
    order = "validation" if any(row["validation"] is not None for row in rows) else REWARD
    rows.sort(key=lambda row: (row[order] is None, -(row[order] or 0.0)))
    columns = [*keys, "status", *runs.EVALUATIONS, REWARD, "steps", "seconds"]
    parts = [
        align_columns(
            columns, [[row[column] for column in columns] for row in rows], left=len(keys) + 1
        )
    ]
    seeds = summarise_lines(jobs)
    if seeds:
        parts.append(seeds)
    named = (
        "validation accuracy"
        if order == "validation"
        else "training reward; set evaluation.every to order them by validation accuracy"
    )
    return "\n\n".join([*parts, f"before and after: test accuracy; best first by {named}"])


def summarise_lines(jobs: Sequence[RunJob]) -> str:
    """Summarise the finished jobs as lines: jobs that differ only in their seed share a line. After
    the lines, a sentence compares each line with the first line. Return an empty text if there is
    nothing to compare."""
    found = [
        read_run(job.folder) for job in jobs if job.status == "finished" and runs.is_run(job.folder)
    ]
    groups = group_runs(found)
    compared = verdicts.find_shared_figure(groups)
    if compared is None or all(len(group.runs) < 2 for group in groups):
        return ""
    rows = []
    for group, values in zip(groups, compared.values, strict=True):
        own = list(values.values())
        rows.append(
            [
                group.label,
                len(own),
                statistics.fmean(own) if own else None,
                statistics.stdev(own) if len(own) > 1 else None,
            ]
        )
    table = align_columns(["", "seeds", f"mean {compared.name}", "std"], rows, left=1)
    return "\n".join(
        [
            table,
            "",
            *verdicts.format_verdicts(groups, compared, verdicts.judge_lines(groups, compared)),
        ]
    )
