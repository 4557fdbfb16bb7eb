"""Does `rlkit train` learn, and how fast?

    python experiments/quickstart/run.py [--seeds 0 1 2]

The script trains the default run with three seeds, one after the other, each in an empty folder. It
writes results.csv, rewards.csv and learning.png beside itself. Wall time is the time of the whole
process: start-up, both evaluations, training.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

HERE = Path(__file__).parent


def one_run(seed: int) -> tuple[dict, list[dict]]:
    """Train one default run. Return its summary and its rows."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "rlkit", "train", f"seed={seed}"],
            check=True,
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )
        wall = time.perf_counter() - begun
        run = next(Path(folder).glob("outputs/*/*/summary.json")).parent
        summary = json.loads((run / "summary.json").read_text())
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return summary | {"process_seconds": wall}, rows


def processor() -> str:
    """Return the processor's name as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    results, curves = [], {}
    for seed in seeds:
        summary, rows = one_run(seed)
        curves[seed] = [(r["step"], r["reward/mean"]) for r in rows if "reward/mean" in r]
        before, after = summary["before"], summary["after"]
        results.append(
            {
                "seed": seed,
                "before": before["accuracy"],
                "after": after["accuracy"],
                "after_low": round(after["interval"][0], 4),
                "after_high": round(after["interval"][1], 4),
                "n": after["n"],
                "steps": summary["steps"],
                "process_seconds": round(summary["process_seconds"], 1),
                "seconds_a_step": round(
                    sorted(r["perf/step_s"] for r in rows if "perf/step_s" in r)[
                        summary["steps"] // 2
                    ],
                    2,
                ),
                "peak_memory_gb": summary["peak_memory_gb"],
                "date": date.today().isoformat(),
                "processor": processor(),
                "cores": os.cpu_count(),
                "python": summary["versions"]["python"],
                "torch": summary["versions"]["torch"],
                "transformers": summary["versions"]["transformers"],
            }
        )
        print(results[-1], flush=True)
    with (HERE / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, results[0])
        writer.writeheader()
        writer.writerows(results)
    with (HERE / "rewards.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [
                ("seed", "step", "reward"),
                *((s, *point) for s, points in curves.items() for point in points),
            ]
        )
    plot(results, curves)


def plot(results: list[dict], curves: dict[int, list]) -> None:
    """Draw the training reward of each step, and test accuracy before and after."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for result in results:
        steps, rewards = zip(*curves[result["seed"]], strict=True)
        line = axes.plot(
            steps,
            rewards,
            linewidth=1.2,
            alpha=0.8,
            label=f"seed {result['seed']}: training reward",
        )[0]
        axes.plot([0, steps[-1]], [result["before"], result["after"]], "o", color=line.get_color())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.axhline(0.95, color="grey", linewidth=0.8, linestyle=":")
    axes.set(
        xlabel="RL step (16 prompts × 8 samples)",
        ylabel="share of right answers",
        ylim=(0, 1.02),
        title="rlkit train (dots: test, greedy)",
    )
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(HERE / "learning.png", dpi=130)


if __name__ == "__main__":
    main()
