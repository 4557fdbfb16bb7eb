"""Does every algorithm of the catalogue learn on the embedded task? Each preset as it ships, on three seeds.

    python experiments/algorithms/run.py [--seeds 0 1 2] [--only grpo ppo] [--jobs 2]

Every run is `rlkit train` on one torch thread in an empty folder, `--jobs` at a time, with the held-out curve every fourth step.
Writes a row to results.csv after each run and passes over those that it holds already; at the end prints the table and draws accuracy.png.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

HERE = Path(__file__).parent
COMMON = ("trainer.threads=1", "evaluation.every=4", "logger=none")
# name → overrides; those run once have the numbers of the notebooks that rlkit grew out of, on the embedded task.
RUNS: dict[str, tuple[str, ...]] = {
    name: (f"algorithm={name}",)
    for name in (
        "reinforce", "rloo", "reinforce_pp", "reinforce_pp_baseline", "grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "cispo",
        "sapo", "gmpo", "max_rl", "opo", "pass_at_k", "ppo", "pairwise",
    )
}  # fmt: skip
RUNS |= {
    "reinforce, no baseline": ("algorithm=reinforce", "algorithm/advantage=raw"),
    "ppo, turn-level GAE": ("algorithm=ppo", "algorithm/advantage=turn_gae"),
    "ppo, separate critic": ("algorithm=ppo", "algorithm/critic=separate"),
}
ONCE = {
    "notebook GRPO": ("experiment=gsm8k_tools", "model=tiny", "task=arithmetic", "generation.max_new_tokens=64"),
    "notebook PPO": ("experiment=notebook_ppo",),
    "notebook pairwise": ("experiment=notebook_pairwise",),
}  # one seed: their rates are those of adapters on a model a thousand times larger
RUNS |= ONCE


def one_run(name: str, seed: int) -> dict:
    """One run's row."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rlkit", "train", *RUNS[name], *COMMON, f"seed={seed}"]
        log = Path(folder) / "log.txt"
        begun = time.perf_counter()
        with log.open("w") as out:
            process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, env=os.environ | {"OMP_NUM_THREADS": "1"})
            _, status, usage = os.wait4(process.pid, 0)  # the processor time of this run alone
        wall = time.perf_counter() - begun
        if status:
            raise RuntimeError(f"{' '.join(command)} ended with status {status}:\n{log.read_text()[-4000:]}")
        run = next(Path(folder).glob("outputs/*/*/summary.json")).parent
        summary = json.loads((run / "summary.json").read_text())
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward/mean" in row]
    curve = {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
    return {
        "algorithm": name,
        "seed": seed,
        "base": summary["before"]["accuracy"],
        "final": summary["after"]["accuracy"],
        "final_low": round(summary["after"]["interval"][0], 4),
        "final_high": round(summary["after"]["interval"][1], 4),
        "problems": summary["after"]["n"],
        "steps": summary["steps"],
        "steps_to_0.9": next((step for step, accuracy in curve.items() if accuracy >= 0.9), ""),
        "best": max(curve.values()),
        "last_reward": round(steps[-1]["reward/mean"], 4),
        "final_kl": steps[-1]["kl/ref_k3"] if steps[-1]["kl/ref_k3"] is None else round(steps[-1]["kl/ref_k3"], 5),
        "final_entropy": round(steps[-1]["policy/entropy"], 4),
        "training_seconds": round(sum(row["perf/step_s"] for row in steps), 1),
        "process_seconds": round(wall, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "curve": " ".join(f"{step}:{accuracy:.3f}" for step, accuracy in curve.items()),
        "overrides": " ".join(RUNS[name]),
        "date": date.today().isoformat(),
        "torch": summary["versions"]["torch"],
        "transformers": summary["versions"]["transformers"],
    }


def read() -> list[dict]:
    """The rows that are there."""
    path = HERE / "results.csv"
    return list(csv.DictReader(path.open())) if path.exists() else []


def write(rows: list[dict]) -> None:
    """All rows, in the order of the catalogue."""
    names = list(RUNS)
    rows.sort(key=lambda row: (names.index(row["algorithm"]), int(row["seed"])))
    with (HERE / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def table(rows: list[dict]) -> str:
    """One line an algorithm: mean and range over its seeds."""
    lines = [
        "| algorithm | base | final: mean (lowest – highest) | steps to 0.9 | whole run, CPU s | final KL, nats |",
        "|---|---|---|---|---|---|",
    ]
    for name in RUNS:
        mine = [row for row in rows if row["algorithm"] == name]
        if not mine:
            continue
        final = [float(row["final"]) for row in mine]
        reached = [str(row["steps_to_0.9"]) or "–" for row in mine]
        kl = [float(row["final_kl"]) for row in mine if row["final_kl"] not in ("", None)]
        seconds = [float(row["cpu_seconds"]) for row in mine if row["cpu_seconds"]]
        lines.append(
            f"| {name} | {statistics.fmean(float(row['base']) for row in mine):.3f} | {statistics.fmean(final):.3f} "
            f"({min(final):.3f} – {max(final):.3f}) | {', '.join(reached)} "
            f"| {f'{statistics.fmean(seconds):.0f}' if seconds else '–'} | {f'{statistics.fmean(kl):.4f}' if kl else '–'} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: list[dict]) -> None:
    """Held-out accuracy at the end, one dot a seed, and where each run began."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in RUNS if any(row["algorithm"] == name for row in rows)]
    figure, axes = pyplot.subplots(figsize=(7.5, 0.32 * len(names) + 1.2), layout="constrained")
    for place, name in enumerate(names):
        mine = [row for row in rows if row["algorithm"] == name]
        for row in mine:
            axes.plot([float(row["final_low"]), float(row["final_high"])], [place, place], color="tab:blue", alpha=0.25, linewidth=5)
            axes.plot(float(row["final"]), place, "o", color="tab:blue", markersize=4)
        axes.plot(float(mine[0]["base"]), place, "|", color="black", markersize=9)
    axes.axvline(0.9, color="grey", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.01), xlabel="held-out accuracy, greedy (bar: before; dots: seeds; bands: 95 %)")
    axes.set_title("Every algorithm as it ships, embedded task")
    figure.savefig(HERE / "accuracy.png", dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(RUNS))
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    rows = read()
    known = {(row["algorithm"], int(row["seed"])) for row in rows}
    wanted = [(name, seed) for seed in arguments.seeds for name in arguments.only if (name, seed) not in known]
    wanted = [(name, seed) for name, seed in wanted if name not in ONCE or seed == arguments.seeds[0]]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for row in pool.map(lambda pair: one_run(*pair), wanted):
            print({k: row[k] for k in ("algorithm", "seed", "base", "final", "steps_to_0.9", "training_seconds")}, flush=True)
            rows.append(row)
            write(rows)
    print(table(rows))
    plot(rows)


if __name__ == "__main__":
    main()
