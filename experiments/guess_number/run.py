"""Does PPO with turn-level GAE learn on episodes of many steps?

    python experiments/guess_number/run.py [--seeds 0 1 2]

The script trains experiment=guess_number_ppo with three seeds, one after the other. Every run is
`rlkit train` on one torch thread in an empty folder. After each run it adds a row to results.csv,
and a row for each step to curves.csv. It skips seeds with a row, and draws curve.png.
"""

from __future__ import annotations

import argparse
import csv
import platform
import sys
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import study  # noqa: E402

COMMON = ("trainer.threads=1", "logger=none")
TURNS = 50  # over these turns the reward few_turns falls from 1 to 0
HALVING = 1 - (3.7 - 1) / TURNS  # mean reward of a player who halves the bounds from 1 to 20
STEP = {
    "reward": "reward/mean",
    "guesses": "tools/turns",
    "unsolved": "len/truncated_frac",
    "explained_variance": "value/explained_variance",
    "entropy": "policy/entropy",
    "kl_old": "kl/old",
    "seconds": "perf/step_s",
}


def one_run(seed: int) -> tuple[dict, list[dict]]:
    """Train one run. Return its row, and a row for each of its steps."""
    summary, rows, seconds = study.trained(["experiment=guess_number_ppo", *COMMON, f"seed={seed}"])
    result: dict = {"seed": seed, "steps": summary["steps"], "games": summary["after"]["n"]}
    for when in ("before", "after"):
        low, high = summary[when]["reward_interval"]
        result |= {
            f"{when}_reward": round(summary[when]["reward"], 4),
            f"{when}_low": round(low, 4),
            f"{when}_high": round(high, 4),
            f"{when}_solved": summary[when]["accuracy"],
        }
    result |= {
        **seconds,
        "date": date.today().isoformat(),
        "processor": processor(),
        "python": platform.python_version(),
        "torch": summary["versions"]["torch"],
        "transformers": summary["versions"]["transformers"],
    }
    curve = [
        {"seed": seed, "step": r["step"]} | {k: r[name] for k, name in STEP.items()}
        for r in rows
        if "reward/mean" in r
    ]
    return result, curve


def processor() -> str:
    """Return the processor's name as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def read(name: str) -> list[dict]:
    """Return the rows of a file, [] without a file."""
    path = HERE / name
    return list(csv.DictReader(path.open())) if path.exists() else []


def write(name: str, rows: list[dict]) -> None:
    """Write all rows, sorted by seed."""
    with (HERE / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (int(row["seed"]), int(row.get("step", 0)))))


def plot(results: list[dict], curves: list[dict]) -> None:
    """Draw the mean reward of the games: of each training step, and before and after training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.8), layout="constrained")
    for row in results:
        mine = [(int(r["step"]), float(r["reward"])) for r in curves if r["seed"] == row["seed"]]
        line = axes.plot(
            *zip(*mine, strict=True), linewidth=1.1, alpha=0.7, label=f"seed {row['seed']}"
        )[0]
        shift = 0.25 * (int(row["seed"]) - 1)  # places the seeds' bars beside each other
        for when, place in (("before", 0), ("after", int(row["steps"]) + 1)):
            mean, low, high = (float(row[f"{when}_{x}"]) for x in ("reward", "low", "high"))
            axes.errorbar(
                [place + shift],
                [mean],
                [[mean - low], [high - mean]],
                fmt="o",
                markersize=4,
                capsize=2,
                color=line.get_color(),
            )
    axes.axhline(HALVING, color="grey", linewidth=0.8, linestyle=":", label="halving the bounds")
    axes.set(
        xlabel="RL step (32 games)",
        ylabel="mean reward",
        title="PPO, turn-level GAE, numbers 1 to 20 (dots: evaluation, 95 %)",
        ylim=(0.45, 1.0),
    )
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(HERE / "curve.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    for seed in parser.parse_args().seeds:
        results, curves = read("results.csv"), read("curves.csv")
        if str(seed) in {row["seed"] for row in results}:
            continue
        result, curve = one_run(seed)
        print(result, flush=True)
        write("results.csv", [*results, result])
        write("curves.csv", [*curves, *curve])
    plot(read("results.csv"), read("curves.csv"))


if __name__ == "__main__":
    main()
