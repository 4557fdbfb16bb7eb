"""Run the variants of a study on several seeds, and write a CSV, a table and a plot.

    python experiments/study.py experiments/kl [--seeds 0 1 2] [--only none 'k3, 0.2'] [--jobs 2]
                                               [--keep runs]

A study is a folder with a study.yaml:

    title
    variants    name: overrides of `rlkit train`; the first variant is the baseline
    common      overrides of all variants; FOLDER in them is the study's own folder
    once        names of variants for the first seed only
    seeds       by default three
    path        a folder beside study.yaml with Python files for the runs
    warm_up     overrides of one run before the others; WARM_UP in theirs is its model

Every run is `rlkit train` on one torch thread in an empty folder. Runs with a row in results.csv
are not repeated. All variants have the same seeds, and differences are taken within a seed. The
warm-up has a row of its own, and its run stays in the study's folder.

With --keep FOLDER the runs stay in FOLDER/VARIANT/SEED, for `rlkit compare` and `rlkit report`. An
interrupted run then continues, and its row has no seconds: those of the first process are unknown.
`commit` is that of rlkit's code in the clone, or several if the run was continued after a change.
The columns of seconds are `step_seconds` of all steps, `process_seconds` and `cpu_seconds` of the
whole command, and `training_cpu_seconds` without imports, loading and checks.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from rlkit.runs import comparing

WARM_UP_SEED = 1000  # of no variant: else its first prompts would be those of the warm-up
COMMON = (
    "trainer.threads=1",
    "evaluation.every=4",
    "logger=none",
    "callbacks.checkpoint.model=false",
)

Row = dict[str, str]
RUNNING: set[subprocess.Popen[str]] = set()


def trained(
    overrides: Sequence[str], *, modules: Path | None = None, kept: Path | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, float]]:
    """Run `rlkit train` in an empty folder, on one thread.

    Args:
      modules: a folder of Python files for the run to import.
      kept: the run's folder, in place of an empty one; a run already in it continues.
    Returns: its summary with `commits`, those of its starts; its rows of metrics; and its seconds,
      by the names of their columns, none if it was continued.
    Raises:
      RuntimeError: the command failed; the message has the last lines of its output.
    """
    found = [str(modules)] if modules else []
    found += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    more = ["resume=auto"] if kept else []
    with nullcontext(kept) if kept else tempfile.TemporaryDirectory() as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "rlkit", "train", *overrides, *more]
        log = Path(folder) / "log.txt"
        begun = time.perf_counter()
        with log.open("w") as out:
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdout=out,
                stderr=out,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(found)},
            )
            RUNNING.add(process)
            _, status, usage = os.wait4(process.pid, 0)  # processor time of this run alone
            RUNNING.discard(process)
        wall = time.perf_counter() - begun
        if status:
            raise RuntimeError(
                f"{' '.join(command)} ended with status {status}:\n{log.read_text()[-4000:]}"
            )
        # `kept` may hold older runs with other settings.
        ended = Path(folder).glob("outputs/*/*/summary.json")
        run = max(ended, key=lambda path: path.stat().st_mtime).parent
        summary = json.loads((run / "summary.json").read_text())
        starts = json.loads((run / "run.json").read_text())
        summary["commits"] = list(dict.fromkeys(start["git"] for start in starts))
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if "processor_seconds" not in summary:  # a continued run
        return summary, rows, {}
    seconds = {
        "process_seconds": round(wall, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "training_cpu_seconds": round(summary["processor_seconds"], 1),
    }
    return summary, rows, seconds


def one_run(
    name: str, overrides: Sequence[str], seed: int, folder: Path, **places: Path | None
) -> Row:
    """Train one run and return its row; `places` are the keywords of `trained`."""
    words = [text.replace("FOLDER", str(folder.resolve())) for text in overrides]
    if any("WARM_UP" in text for text in words):
        [model] = (folder.resolve() / "warm_up").glob("outputs/*/*/model")
        words = [text.replace("WARM_UP", str(model)) for text in words]
    summary, rows, seconds = trained([*COMMON, *words, f"seed={seed}"], **places)
    steps = [row for row in rows if "reward/mean" in row]
    curve = {
        row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row
    }  # on validation problems, at the first and the last step too
    found = {
        "variant": name,
        "seed": seed,
        "base": summary["before"]["accuracy"],
        "final": summary["after"]["accuracy"],
        "final_low": round(summary["after"]["interval"][0], 4),
        "final_high": round(summary["after"]["interval"][1], 4),
        "problems": summary["after"]["n"],
        "curve_mean": round(mean_height(curve), 4),
        "steps": summary["steps"],
        "steps_to_0.9": next((step for step, accuracy in curve.items() if accuracy >= 0.9), ""),
        # null if no group of the last step had anything to learn
        "final_kl": "" if steps[-1].get("kl/ref_k3") is None else round(steps[-1]["kl/ref_k3"], 5),
        "final_entropy": (
            "" if steps[-1]["policy/entropy"] is None else round(steps[-1]["policy/entropy"], 4)
        ),
        "step_seconds": round(sum(row["perf/step_s"] for row in steps), 1),
        **dict.fromkeys(("process_seconds", "cpu_seconds", "training_cpu_seconds"), ""),
        **seconds,
        "curve": " ".join(f"{step}:{accuracy:.3f}" for step, accuracy in curve.items()),
        "overrides": " ".join(overrides),
        "date": date.today().isoformat(),
        "python": summary["versions"]["python"],
        "torch": summary["versions"]["torch"],
        "transformers": summary["versions"]["transformers"],
        "commit": " ".join(summary["commits"]),
    }
    return {key: str(value) for key, value in found.items()}


@contextmanager
def end_runs(pool: ThreadPoolExecutor) -> Iterator[None]:
    """On an interruption begin no further run. After SIGTERM, end the runs in progress too; Ctrl-C
    has reached them already."""
    try:
        yield
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        if isinstance(error, SystemExit):
            for process in list(RUNNING):
                process.terminate()
        raise


def collect(runs: Sequence[Future[Row]]) -> Iterator[Row]:
    """Yield the row of each run as it ends. Runs that fail do not stop the others: their errors are
    printed, and at the end the process exits with their number."""
    failed = 0
    for run in as_completed(runs):
        if run.exception():
            failed += 1
            print(f"a run failed; the others go on: {run.exception()}", flush=True)
        else:
            yield run.result()
    if failed:
        sys.exit(f"{failed} of {len(runs)} runs failed; the same command tries them again")


def mean_height(curve: Mapping[int, float]) -> float:
    """Return the mean validation accuracy over the run's steps.

    It is the area under the curve (trapezia), divided by the curve's width.
    """
    points = sorted(curve.items())
    area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))
    return area / (points[-1][0] - points[0][0])


def interval(values: Sequence[float], resolution: float = 0.0) -> tuple[float, float]:
    """Return the mean, and half the width of Student's 95 % interval; NaN where there are too few
    values.

    Args:
      resolution: the smallest step of a coarse score. With it, equal differences still leave an
        interval wider than 0.
    """
    if not values:
        return math.nan, math.nan
    found = comparing.compare_pairs([0.0] * len(values), values, resolution=resolution)
    return found.mean, found.high - found.mean


def paired(rows: Sequence[Row], name: str, baseline: str, column: str) -> tuple[float, float]:
    """Return a variant's mean difference from the baseline, and half its 95 % interval's width.

    Only seeds of both variants count.
    """
    values = {
        key: {row["seed"]: float(row[column]) for row in rows if row["variant"] == key}
        for key in (name, baseline)
    }
    shared = sorted(values[name].keys() & values[baseline].keys())
    step = comparing.find_smallest_step(
        [value for own in values.values() for value in own.values()], 2e-4
    )  # figures have four digits
    return interval([values[name][seed] - values[baseline][seed] for seed in shared], step)


def table(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Return the table with a line for each variant.

    A line has means and ranges over the seeds, and the difference from the first variant.
    """
    lines = [
        (
            "| variant | final test accuracy: mean (lowest – highest) | difference, 95 % "
            "| validation accuracy, mean over the run | difference, 95 % | final KL, nats | CPU s |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        mine = [row for row in rows if row["variant"] == name]
        if not mine:
            continue
        final, height, kl, seconds = (
            [float(row[key]) for row in mine if row[key]]
            for key in ("final", "curve_mean", "final_kl", "cpu_seconds")
        )
        differences = [
            (
                "–"
                if name == names[0]
                else "{:+.3f} ± {:.3f}".format(*paired(rows, name, names[0], key))
            )
            for key in ("final", "curve_mean")
        ]
        columns = [
            name,
            f"{statistics.fmean(final):.3f} ({min(final):.3f} – {max(final):.3f})",
            differences[0],
        ]
        columns += [
            f"{statistics.fmean(height):.3f}",
            differences[1],
            f"{statistics.fmean(kl):.4f}" if kl else "–",
        ]
        columns.append(f"{statistics.fmean(seconds):.0f}" if seconds else "–")
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Row], names: Sequence[str], title: str, path: Path) -> None:
    """Draw the accuracy over the run on the left and the final accuracy on the right.

    The left panel has the mean validation accuracy of the seeds. The right panel has a dot and an
    interval for each seed's test accuracy.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    names = [name for name in names if any(row["variant"] == name for row in rows)]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10.5, max(3.2, 0.34 * len(names) + 1.2)), layout="constrained"
    )
    few = len(names) <= 10
    shades = pyplot.colormaps["tab10" if few else "turbo"]
    colors = [shades(place if few else place / len(names)) for place in range(len(names))]
    for place, name in enumerate(names):
        mine = [row for row in rows if row["variant"] == name]
        curves = [dict(pair.split(":") for pair in row["curve"].split()) for row in mine]
        steps = sorted(set.intersection(*(set(map(int, curve)) for curve in curves)))
        left.plot(
            steps,
            [statistics.fmean(float(curve[str(step)]) for curve in curves) for step in steps],
            color=colors[place],
            label=name,
        )
        for row in mine:
            right.plot(
                [float(row["final_low"]), float(row["final_high"])],
                [place, place],
                color=colors[place],
                alpha=0.25,
                linewidth=5,
            )
            right.plot(float(row["final"]), place, "o", color=colors[place], markersize=4)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set(
        xlabel="RL step",
        ylabel="validation accuracy, greedy",
        ylim=(0, 1.02),
        title="mean of the seeds" if few else "mean of the seeds, in the colours of the dots",
    )
    right.set_yticks(range(len(names)), names, fontsize=8)
    right.invert_yaxis()
    right.set(xlabel="test accuracy at the end", title="a dot a seed, bands 95 %")
    if few:
        left.legend(fontsize=7)
    rates = {
        text
        for row in rows
        for text in row["overrides"].split()
        if text.startswith("optimizer.lr=")
    }
    figure.suptitle(
        title if rates or len(names) == 1 else f"{title}; every variant at one shared rate",
        fontsize=10,
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV, [] without a file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[Row], names: Sequence[str]) -> None:
    """Write all rows, in the order of the variants."""
    order = {name: place for place, name in enumerate(names)}
    rows.sort(key=lambda row: (order.get(row["variant"], len(order)), int(row["seed"])))
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    part.replace(path)


def check_settings(
    rows: Sequence[Row], variants: Mapping[str, Sequence[str]], *, missing: bool
) -> None:
    """Exit if a row has other overrides than its variant has today and runs are missing: the table
    would mix two studies. If none is missing, print a note instead."""
    for row in rows:
        own = variants.get(row["variant"])
        if own is None or row["overrides"] == " ".join(own):
            continue
        found = (
            f"results.csv has {row['variant']}, seed {row['seed']}, with other overrides than"
            " study.yaml"
        )
        if missing:
            sys.exit(f"{found}. Move results.csv and the folder of --keep away, or undo the change")
        print(f"note: {found}. To run today's settings, move results.csv away")
        return


def main() -> None:
    """Run the missing variants and seeds, print the table, and draw the plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="of the study")
    parser.add_argument("--seeds", type=int, nargs="+", help="the study's where none is given")
    parser.add_argument("--only", nargs="+", help="variants")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--keep", type=Path, help="folder in which the runs stay")
    arguments = parser.parse_args()
    study = yaml.safe_load((arguments.folder / "study.yaml").read_text())
    common, once = study.get("common", []), study.get("once", [])
    first, *others = study.get("seeds", [0, 1, 2])
    seeds = arguments.seeds or [first, *others]
    modules = (arguments.folder / study["path"]).resolve() if "path" in study else None
    keep = arguments.keep.resolve() if arguments.keep else None
    variants = {name: [*common, *own] for name, own in study["variants"].items()}
    for name in arguments.only or ():
        if name not in variants:
            parser.error(f"--only {name!r}: no such variant; there are {', '.join(variants)}")
    path = arguments.folder / "results.csv"
    rows = read(path)
    own = {"warm-up": [*common, *study.get("warm_up", []), "callbacks.checkpoint.model=true"]}
    known = {(row["variant"], int(row["seed"])) for row in rows}
    wanted = [
        (name, seed)
        for seed in seeds
        for name in arguments.only or variants
        if (name, seed) not in known
    ]
    wanted = [(name, seed) for name, seed in wanted if name not in once or seed == first]
    check_settings(rows, variants | own, missing=bool(wanted))
    warm_up = arguments.folder.resolve() / "warm_up"
    asks = any("WARM_UP" in word for name, _ in wanted for word in variants[name])
    if asks and not list(warm_up.glob("outputs/*/*/model")):
        rows = [row for row in rows if row["variant"] != "warm-up"]
        rows.append(
            one_run(
                "warm-up",
                own["warm-up"],
                WARM_UP_SEED,
                arguments.folder,
                modules=modules,
                kept=warm_up,
            )
        )
        write(path, rows, list(variants))
    elif asks and not any(row["variant"] == "warm-up" for row in rows):
        sys.exit(f"{warm_up} holds a model without a row in results.csv; delete the folder")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ThreadPoolExecutor(arguments.jobs) as pool, end_runs(pool):
        runs = [
            pool.submit(
                one_run,
                name,
                variants[name],
                seed,
                arguments.folder,
                modules=modules,
                kept=keep / name / str(seed) if keep else None,
            )
            for name, seed in wanted
        ]
        for row in collect(runs):
            print(
                {
                    key: row[key]
                    for key in ("variant", "seed", "base", "final", "curve_mean", "cpu_seconds")
                },
                flush=True,
            )
            rows.append(row)
            write(path, rows, list(variants))
    print(table(rows, list(variants)))
    plot(rows, list(variants), study["title"], arguments.folder / "accuracy.png")


if __name__ == "__main__":
    main()
