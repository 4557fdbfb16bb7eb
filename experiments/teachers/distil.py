"""How far does distillation from a GRPO run get in a third of the run's steps?

    python experiments/teachers/distil.py [--seeds 0 1 2] [--steps 6] [--only opd "opd, exact"] \\
        [--teacher-steps 60]

For every seed, `rlkit train` with the defaults (GRPO, 20 steps on the embedded model) makes the
teacher. Every variant then starts again from model=tiny with `teacher=path`, without a reward in
its loss. results.csv has a row for each run; runs with a row are not repeated. With
`--teacher-steps` the teacher trains for this many steps instead, and the names of its row and of
its students' rows say so. Accuracies are greedy. `target` is the first step with a validation
accuracy of at least 0.97.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from study import interval

HERE, TARGET, STEPS = Path(__file__).parent, 0.97, 6  # a third of GRPO's 20 steps
GRPO_STEPS = 20  # of the default run
COMMON = (
    "trainer.threads=1",
    "evaluation.every=1",
    "logger=none",
    "callbacks.checkpoint.model=false",
)
EXACT = "algorithm.streams.teacher.loss._target_=rlkit.functional.kl_student_teacher"
STREAM = "_target_: rlkit.algorithm.Stream"
SAMPLED = "{_target_: rlkit.functional.sampled_divergence, _partial_: true}"
VARIANTS = {
    "opd": ["algorithm=opd"],
    "opd, exact": ["algorithm=opd", EXACT],
    "opd, exact, four updates": ["algorithm=opd", EXACT, "algorithm.minibatches=4"],  # a step
    "gkd": ["algorithm=gkd", "algorithm.minibatches=2"],
    "grpo + opd": [
        "algorithm=grpo",
        "kl=none",
        f"+algorithm.streams.reward={{{STREAM}}}",
        f"+algorithm.streams.teacher={{{STREAM}, mask: sampled, loss: {SAMPLED}}}",
    ],
    "reward alone": [
        "algorithm=grpo",
        "kl=none",
        "reference=none",
    ],  # as many steps as the others, and no teacher
}


def trained(overrides: Sequence[str], folder: Path) -> Path:
    """Run `rlkit train` and return its run folder. Raises: CalledProcessError."""
    command = [sys.executable, "-m", "rlkit", "train", *overrides]
    subprocess.run(
        command,
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return max(
        folder.glob("outputs/*/*/summary.json"), key=lambda file: file.stat().st_mtime
    ).parent


def row(variant: str, seed: int, run: Path) -> dict[str, str]:
    """Return one run's row."""
    summary = json.loads((run / "summary.json").read_text())
    curve = {
        r["step"]: r
        for r in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if "eval/accuracy" in r
    }
    reached = next((step for step, r in curve.items() if r["eval/accuracy"] >= TARGET), "")
    found = {
        "variant": variant,
        "seed": seed,
        "steps": summary["steps"],
        "tokens": summary["tokens"],
        "target": reached,
        "before": summary["before"]["accuracy"],
        "after": summary["after"]["accuracy"],
        "curve": " ".join(f"{step}:{r['eval/accuracy']:.3f}" for step, r in curve.items()),
    }
    return {key: str(value) for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="+", default=list(VARIANTS))
    parser.add_argument("--teacher-steps", type=int, default=GRPO_STEPS)
    parser.add_argument("--results", type=Path, default=HERE / "results.csv")
    given = parser.parse_args()
    results = given.results
    taught = (
        "" if given.teacher_steps == GRPO_STEPS else f", teacher of {given.teacher_steps} steps"
    )
    teacher_name = f"grpo, {given.teacher_steps} steps" if taught else "grpo"
    rows = list(csv.DictReader(results.open())) if results.exists() else []
    for seed in given.seeds:
        done = {r["variant"] for r in rows if r["seed"] == str(seed)}
        if not {teacher_name, *(name + taught for name in given.only)} - done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            teacher = trained(
                [
                    *COMMON[:-1],
                    f"trainer.steps={given.teacher_steps}",
                    f"seed={seed}",
                    "name=teacher",
                ],
                Path(folder),
            )
            new = [] if teacher_name in done else [row(teacher_name, seed, teacher)]
            for variant in [name for name in given.only if name + taught not in done]:
                own = [*VARIANTS[variant], f"trainer.steps={given.steps}", f"seed={seed}"]
                own += (
                    []
                    if variant == "reward alone"
                    else ["teacher=path", f"teacher.path={teacher / 'model'}"]
                )
                new.append(
                    row(
                        variant + taught,
                        seed,
                        trained([*COMMON, *own, "name=student"], Path(folder)),
                    )
                )
        rows += new
        with results.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    print(
        "| variant | seeds | steps | tokens | test accuracy, 95 % | reached 0.97"
        " |\n|---|---|---|---|---|---|"
    )
    for variant in dict.fromkeys(r["variant"] for r in rows):
        mine = [r for r in rows if r["variant"] == variant]
        mean, half = interval([float(r["after"]) for r in mine])
        tokens = sum(int(r["tokens"]) for r in mine) // len(mine)
        reached = sum(bool(r["target"]) for r in mine)
        print(
            f"| {variant} | {len(mine)} | {mine[0]['steps']} | {tokens:,} | {mean:.3f} ± {half:.3f}"
            f" | {reached} of {len(mine)} |"
        )


if __name__ == "__main__":
    main()
