"""What does rldoctor 0.2 find in the same runs?

    python -m venv /tmp/rldoctor && /tmp/rldoctor/bin/pip install rldoctor==0.2
    python experiments/why/rldoctor.py /tmp/rldoctor/bin/rl-doctor [--runs outputs/why]
    python experiments/why/rldoctor.py /tmp/rldoctor/bin/rl-doctor --folders outputs/latest

rldoctor reads only metrics. This script writes each run's metrics under rldoctor's names
(`rl-doctor fields`) and keeps its findings of the severities WARNING and CRITICAL, in their order.
rldoctor names no settings and no parts of a run. NAMED therefore lists, generously, each detector
with a text that could lead to the planted cause. rldoctor.csv gets a row for each run; the table
covers the seeds of one half.

    named  place of such a detector among the findings, 0 if there is none
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from run import KINDS, half_of, sum_up  # noqa: E402

from rlkit.runs.reading import read_run  # noqa: E402

FILE = HERE / "rldoctor.csv"
# Name in rldoctor → metrics of rlkit; the first metric found in the run is used.
FIELDS: Mapping[str, Sequence[str]] = {
    "reward": ("reward/mean",),
    "reward_std": ("reward/std",),
    "frac_reward_zero_std": ("group/frac_zero_std",),
    "advantage/mean": ("adv/mean",),
    "advantage/std": ("adv/std",),
    "entropy": ("policy/entropy",),
    "kl": ("kl/start", "kl/ref_k3", "kl/ref"),
    "clip_ratio/low_mean": ("clip/low_frac",),
    "clip_ratio/high_mean": ("clip/high_frac",),
    "grad_norm": ("optim/grad_norm",),
    "learning_rate": ("optim/lr",),
    "policy_loss": ("loss/policy",),
    "completions/mean_length": ("len/mean",),
    "completions/max_length": ("len/max",),
    "completions/clipped_ratio": ("len/truncated_frac",),
    "explained_variance": ("value/explained_variance",),
    "step_time": ("perf/step_s",),
}
# Planted fault → detectors with a text that could lead to the fault.
NAMED: Mapping[str, Sequence[str]] = {
    "rate_low": ("kl_drift", "gradient_pathology", "plateau"),
    "rate_high": ("kl_drift", "gradient_pathology", "clip_saturation", "entropy_collapse"),
    "kl": ("kl_drift",),
    "groups": ("advantage_collapse",),
    "temperature": ("entropy_collapse", "advantage_collapse"),
    "cut": ("length_pathology",),
    "hackable": ("reward_hacking", "reward_composition"),
    "stale": ("clip_saturation",),
    "hard": ("advantage_collapse",),
    "easy": ("advantage_collapse",),
}
COLUMNS = ("kind", "seed", "half", "named", "first", "second", "findings", "suspected")


def write_log(folder: Path, file: Path) -> None:
    """Write a run's metrics under rldoctor's names."""
    run = read_run(folder)
    with file.open("w") as out:
        for row in run.rows:
            own = {"step": row["step"], "group_size": run.settings["batch.group_size"]}
            for name, metrics in FIELDS.items():
                known = [row[metric] for metric in metrics if row.get(metric) is not None]
                own |= {name: known[0]} if known else {}
            out.write(json.dumps(own) + "\n")


def name_detectors(program: str, folder: Path) -> list[str]:
    """Return the detectors with a warning, in the order of the report."""
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "log.jsonl"
        write_log(folder, log)
        told = subprocess.run(
            [program, "diagnose", str(log), "-f", "json"],
            capture_output=True,
            text=True,
            check=True,
        )
    found = json.loads(told.stdout)["findings"]
    return [own["detector"] for own in found if own["severity"] in ("WARNING", "CRITICAL")]


def main() -> None:
    """Diagnose all runs of a half, write their rows, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--runs", type=Path, default=Path("outputs/why"))
    parser.add_argument("--half", default="fresh", help="of the seeds")
    parser.add_argument("--folders", type=Path, nargs="*", default=[])
    given = parser.parse_args()
    for folder in given.folders:
        print(f"{folder.name}: {', '.join(name_detectors(given.program, folder)) or 'nothing'}")
    if given.folders:
        return
    rows = []
    for kind in KINDS:
        for folder in sorted((given.runs / kind).glob("[0-9]*/")):
            if half_of(int(folder.name)) != given.half or not (folder / "summary.json").is_file():
                continue
            found = name_detectors(given.program, folder)
            places = [i for i, own in enumerate(found, 1) if own in NAMED.get(kind, ())]
            row: dict[str, object] = dict.fromkeys(COLUMNS, "")
            row |= {"kind": kind, "seed": folder.name, "half": given.half}
            row |= {"named": min(places, default=0), "findings": len(found)}
            row |= {"first": "".join(found[:1]), "second": "".join(found[1:2])}
            rows.append(row)
    with FILE.open("w", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    print("\n".join(sum_up(rows)))


if __name__ == "__main__":
    main()
