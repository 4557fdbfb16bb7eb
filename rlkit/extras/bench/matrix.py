"""Run a matrix of short runs, tasks × arms × seeds, as a sweep. Write their results as rows and as
one page.

A run is `rlkit train` in <folder>/TASK/ARM/SEED, on one thread, with as many at a time as there are
cores. A finished run is not repeated, unless its settings have changed. A run's score is 1 - regret
(rlkit/extras/bench/tasks.py): 0 is as good as a random policy, 1 as good as possible.
"""

from __future__ import annotations

import csv
import io
import math
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlkit.extras.bench import fresh
from rlkit.extras.bench.over_tasks import (
    compare_together,
    improvement,
    iqm,
    profile,
    ranks,
    seeds_interval,
)
from rlkit.extras.bench.warm import warm_server
from rlkit.runs import folder as runs
from rlkit.runs.comparing import ALPHA, TO_CLAIM, estimate_bounded_mean, find_smallest_step
from rlkit.runs.sweeps.jobs import RunJob
from rlkit.runs.sweeps.plan import refuse_running, set_aside_changed
from rlkit.runs.sweeps.runner import Start, conduct_jobs, do_job, end_line, make_sweep
from rlkit.statistics import FEWEST
from rlkit.system import owner
from rlkit.system.files import write_atomic

# Arms without a chance to learn the task: a method counts only above them. Their training rewards
# are a coin, or 1 for any reply.
PLACEBOS = {
    f"placebo {kind}": ("algorithm=grpo", f"task.placebo={kind}") for kind in ("coin", "format")
}
THRESHOLDS = (0.1, 0.25, 0.5, 0.75, 0.9)  # of 1 - regret, in the performance profile
SPENT = {
    "updates": "optimiser steps",
    "samples": "samples",
    "tokens": "tokens",
    "processor_s": "processor seconds",
}
# overrides on which a run's learning rate depends
RATES = re.compile(r"(?<!\S)(?:optimizer|optimizer\.lr|model|model\.lora\.rank)=\S+")
FEW = 6  # most unseparated pairs of a task named on the page
ROUNDED = 2e-5  # regrets of a table that differ by less differ by rounding alone


class MatrixRun(NamedTuple):
    """One run of the matrix."""

    task: str
    arm: str
    seed: int
    overrides: tuple[str, ...]
    folder: Path
    note: str = ""  # shown in the run's line, after its arm


Row = dict[str, Any]


# --------------------------------------------------------------------------------------------- runs


def matrix(
    folder: Path,
    tasks: Sequence[str],
    arms: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    common: Sequence[str],
) -> list[MatrixRun]:
    """List all runs of the matrix. Seeds vary slowest, so that a matrix stopped early has complete
    seeds. `common` is added to the overrides of every run."""
    return [
        MatrixRun(
            task,
            arm,
            seed,
            (f"experiment=bench/{task}", *own, *common, f"seed={seed}"),
            folder / task / name_folder(arm) / str(seed),
        )
        for seed in seeds
        for task in tasks
        for arm, own in arms.items()
    ]


def name_folder(arm: str) -> str:
    """Turn an arm's name into the name of a folder below its task's."""
    return re.sub(r"[^\w.+=-]+|^\.+$", "_", arm) or "_"


def run_all(
    cells: Sequence[MatrixRun],
    folder: Path,
    *,
    jobs: int,
    config_dir: str | None,
    start: Start | None = None,
) -> tuple[list[RunJob], list[int]]:
    """Run the unfinished runs, `jobs` at a time, on one thread each.

    A run whose settings have changed, finished or not, is set aside and run again. The caller owns
    `folder` (`owner.own_folder`), the parent of all runs.

    Args:
      start: a function to start a job's process. By default, a job is a copy of a process that has
        imported the modules of a run.
    Returns: the outcome of each run, in order, and the signals that stopped the queue.
    Raises: Occupied or ConfigError if one of the runs is in use. No run has begun then.
    """
    refuse_running(folder)
    overrides = {cell: [*cell.overrides, "resume=auto"] for cell in cells}
    devices = prepare(cells, overrides, config_dir)
    todo = [RunJob(number, overrides[cell], cell.folder) for number, cell in enumerate(cells)]
    waiting = [job for job in todo if not runs.is_finished(job.folder)]
    done = len(todo) - len(waiting)
    print(f"{len(todo)} runs, {done} of them done earlier, {jobs} at a time", flush=True)
    sweep = make_sweep(folder, config_dir, jobs, threads=1)
    environment = {**sweep.environment, fresh.STARTS: str((folder / "starts").resolve())}
    sweep = sweep._replace(environment=environment)
    places = {job.folder: cell for job, cell in zip(todo, cells, strict=True)}

    def line(job: RunJob) -> str:
        cell = places[job.folder]
        name = f"{cell.task}  {cell.arm}{cell.note}  seed {cell.seed}"
        return end_line(job, sweep, len(todo), name, "reward")

    found = {job.number: job._replace(status="finished") for job in todo}
    found |= {job.number: job._replace(status="not started") for job in waiting}
    with ExitStack() as block:
        received = block.enter_context(conduct_jobs(sweep, line))
        if waiting and start is None and sys.platform == "linux":
            start = block.enter_context(warm_server(sweep.environment, [fresh.__name__])).start
        pool = block.enter_context(ThreadPoolExecutor(max(1, min(jobs, len(waiting)))))
        try:
            for job in pool.map(lambda job: do_job(job, sweep, start, devices=devices), waiting):
                found[job.number] = job
        except KeyboardInterrupt:
            received.append(signal.SIGINT)
            pool.shutdown(cancel_futures=True)
    return list(found.values()), received


def prepare(
    cells: Sequence[MatrixRun],
    overrides: Mapping[MatrixRun, Sequence[str]],
    config_dir: str | None,
) -> int:
    """Set aside the runs whose settings have changed, and print this. Return the devices of each
    run."""
    from rlkit.config.compose import compose

    first = compose(overrides[cells[0]], config_dir=config_dir).config
    aside: dict[str, int] = {}
    for cell in cells:
        if runs.is_run(cell.folder) or runs.is_finished(cell.folder):
            config = compose(overrides[cell], config_dir=config_dir).config
            living = None if config.get("takeover") else owner.find_occupant(cell.folder)
            if living:
                raise owner.Occupied(living)
            changed = set_aside_changed(cell.folder, config)
            if changed:
                aside[changed] = aside.get(changed, 0) + 1
    for changed, count in aside.items():
        print(f"set aside {count} run{'s' * (count > 1)} of other settings: {changed}", flush=True)
    return int((first.get("trainer") or {}).get("devices") or 1)


def read_row(cell: MatrixRun) -> Row | None:
    """Read a run's result from its folder; None if it is not finished, or without an evaluation."""
    from rlkit.runs.reading import read_run
    from rlkit.runs.verdicts import UNITS, read_budget

    if not runs.is_finished(cell.folder):
        return None
    run = read_run(cell.folder)
    if not run.summary.get("after"):
        return None
    value = read_value(cell.folder)
    reward = float(run.summary["after"]["reward"])
    row = {
        "task": cell.task,
        "arm": cell.arm,
        "seed": runs.read_config(cell.folder)["seed"],
        "reward": round(reward, 5),
        "regret": round(value.regret(reward), 5),
        "random": round(value.random, 5),
        "best": round(value.best, 5),
    }
    row |= {unit: round(max(read_budget(run, unit).values(), default=0.0), 1) for unit in UNITS}
    spent = run.summary.get("processor_seconds")
    row["processor_s"] = "" if spent is None else spent
    return row | {"overrides": " ".join(runs.read_overrides(cell.folder))}


def read_value(folder: Path) -> Any:
    """Read the expected rewards of the random and the best policy on a run's test problems."""
    from rlkit.config.schema import build
    from rlkit.extras.bench.tasks import average_value

    config = runs.read_config(folder)
    return average_value(build(config["task"], "task")(split="test")[: config["evaluation"]["n"]])


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write one line for each run."""
    with io.StringIO(newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        write_atomic(path, file.getvalue().encode())


# ----------------------------------------------------------------------------------------- the page


class Scores(NamedTuple):
    """The scores 1 - regret, for the seeds common to all arms on their tasks: arm → [n seeds,
    tasks]. A score is NaN on a task without a finished run of the arm."""

    tasks: list[str]
    seeds: list[int]
    of: dict[str, np.ndarray]

    def select_task(self, task: int) -> dict[str, np.ndarray]:
        """Select the arms with runs on a task: arm → [n seeds]."""
        return {
            arm: own[:, task] for arm, own in self.of.items() if not np.isnan(own[:, task]).any()
        }

    def step(self, task: int) -> float:
        """Find the smallest step between the scores of two runs on a task. With it, equal
        differences of a coarse score do not count as certain."""
        return find_smallest_step(
            [value for own in self.select_task(task).values() for value in own.tolist()], ROUNDED
        )

    def select_complete(self) -> dict[str, np.ndarray]:
        """Select the arms with runs on all tasks: arm → [n seeds, tasks]."""
        return {arm: own for arm, own in self.of.items() if not np.isnan(own).any()}


def arrange_scores(rows: Sequence[Row]) -> Scores:
    """Arrange the rows as arms × seeds × tasks. If a run of a seed is missing, the seed is left out
    for all arms, so that every comparison is within pairs.

    If an arm has no run at all on a task, for example because the task refuses the arm, only the
    arm is left out on this task, and no seed.
    """
    found = {(row["task"], row["arm"], int(row["seed"])): 1 - float(row["regret"]) for row in rows}
    tasks, arms = (list(dict.fromkeys(row[key] for row in rows)) for key in ("task", "arm"))
    there = {(task, arm) for task, arm, _ in found}
    seeds = [
        seed
        for seed in sorted({seed for *_, seed in found})
        if all((*cell, seed) in found for cell in there)
    ]
    cube = {
        arm: np.array(
            [[found.get((task, arm, seed), math.nan) for task in tasks] for seed in seeds]
        )
        for arm in arms
    }
    return Scores(tasks, seeds, cube)


class Pair(NamedTuple):
    """A comparison of two arms on a task. `q` is the lowest false-discovery rate for a claim, nan
    below `TO_CLAIM` seeds."""

    task: str
    first: str
    second: str
    mean: float  # second - first, of 1 - regret
    low: float
    high: float
    q: float
    sees: float  # the difference that these seeds would claim four times in five

    def order(self) -> tuple[str, str]:
        """Return the better arm, then the other arm."""
        return (self.second, self.first) if self.mean > 0 else (self.first, self.second)


def compare_arms(found: Scores) -> list[Pair]:
    """Compare every pair of arms on every task, by Student's t within seeds, with the
    false-discovery rate over all of them.

    Pairs with a placebo are corrected separately. Nearly all of them differ, so in a common
    correction the other pairs would pass with larger p-values.
    """
    places = [
        (t, a, b) for t in range(len(found.tasks)) for a, b in combinations(found.select_task(t), 2)
    ]
    steps = [found.step(t) for t in range(len(found.tasks))]
    out: dict[tuple[int, str, str], Pair] = {}
    for placebo in (False, True):
        own = [place for place in places if bool(set(place[1:]) & PLACEBOS.keys()) == placebo]
        sides = [
            (found.select_task(t)[a].tolist(), found.select_task(t)[b].tolist(), steps[t])
            for t, a, b in own
        ]
        for (t, a, b), (d, q, sees) in zip(own, compare_together(sides), strict=True):
            out[t, a, b] = Pair(found.tasks[t], a, b, d.mean, d.low, d.high, q, sees)
    return [out[place] for place in places]


def format_page(rows: Sequence[Row], failed: Mapping[Path, str], rates: str = "") -> str:
    """Write the page in Markdown: scores by task, over tasks, what can be claimed and what cannot,
    and the cost of the runs.

    Args:
      rates: the section on the rates chosen for the arms, if they were chosen.
    """
    found = arrange_scores(rows)
    n = len(found.seeds)
    arms = list(found.of)
    size = f"{len(arms)} arms, {len(found.tasks)} task{'s' * (len(found.tasks) > 1)}, {n} seeds"
    shared = ", every arm at one shared rate" if shares_rate(rows) and not rates else ""
    parts = [
        f"# rlkit bench{shared}\n\n{size} ({', '.join(map(str, found.seeds)) or 'none in common'})."
    ]
    parts.append(
        "Scores are 1 - regret: 0 is a policy that replies at random, 1 the best that is possible,"
        " both computed. Arms of a seed share the start, the problems, their order and the sampling"
        " noise, and are compared within seeds."
    )
    partial = sorted({int(row["seed"]) for row in rows} - {*found.seeds})
    if partial:
        parts.append(
            f"Left out for every arm: seeds {', '.join(map(str, partial))}. They lack a run of an"
            " arm, so what is compared may be the easier seeds."
        )
    if failed:
        parts.append("Failed:\n\n" + list_failures(failed))
    if n < 2:
        return (
            "\n\n".join(
                [
                    *parts,
                    "Fewer than two seeds have a run of every arm, so nothing is compared.",
                    tabulate_budgets(rows),
                    *filter(None, [rates]),
                ]
            )
            + "\n"
        )
    parts += [
        "## Scores by task",
        tabulate_by_task(found),
        "## Over tasks",
        tabulate_over_tasks(found),
        "## What can be claimed",
        list_claims(found),
    ]
    parts += ["## What the runs spent", tabulate_budgets(rows), *filter(None, [rates])]
    return "\n\n".join(parts) + "\n"


def shares_rate(rows: Sequence[Row]) -> bool:
    """Return whether all arms have one learning rate. Arms with another optimizer, model or rank of
    adapters have another default rate."""
    rates = {
        tuple(RATES.findall(row.get("overrides", ""))) for row in rows if row["arm"] not in PLACEBOS
    }
    return len(rates) < 2


def list_failures(failed: Mapping[Path, str]) -> str:
    """Write a line for each message of an arm on a task, with its seeds."""
    seeds: dict[tuple[Path, str], list[str]] = {}
    for folder, why in failed.items():
        seeds.setdefault((folder.parent, why), []).append(folder.name)
    return "\n".join(
        f"- {folder}, seed{'s' * (len(own) > 1)} {', '.join(own)}: {why}"
        for (folder, why), own in seeds.items()
    )


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Write a table."""
    return "\n".join(
        f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *lines)
    )


def tabulate_by_task(found: Scores) -> str:
    """Tabulate for each task the mean over seeds, its 95 % interval, and the rank. Equal means
    share a rank."""
    cells = {arm: ["did not run"] * len(found.tasks) for arm in found.of}
    for t in range(len(found.tasks)):
        there = found.select_task(t)
        for (arm, own), place in zip(
            there.items(), ranks(np.array([own.mean() for own in there.values()])), strict=True
        ):
            mean, low, high = score_interval(own.tolist(), found.step(t))
            span = "" if math.isnan(low) else f" ({low:.2f} to {high:.2f})"
            cells[arm][t] = f"{mean:.3f}{span} #{place:g}"
    return markdown(["arm", *found.tasks], [[arm, *own] for arm, own in cells.items()])


def score_interval(scores: Sequence[float], step: float) -> tuple[float, float, float]:
    """Compute the mean score over seeds and its 95 % interval. Scores are between -1, or the lowest
    score if it is lower, and the best possible score, 1."""
    return estimate_bounded_mean(
        scores, resolution=step, bounds=(min(-1.0, *scores), max(1.0, *scores))
    )


def tabulate_over_tasks(found: Scores) -> str:
    """Tabulate over tasks: IQM and mean with their intervals, mean rank, profile, and the chance to
    beat the first arm.

    Only arms with runs on all tasks are listed, because means over different tasks are not
    comparable.
    """
    arms = found.select_complete()
    if not arms:
        return "No arm ran on every task."
    mean_rank = ranks(np.stack(list(arms.values()), -1)).mean((0, 1))
    first = next(iter(arms.values()))
    lines = []
    steps = [found.step(t) for t in range(len(found.tasks))]
    for i, (arm, own) in enumerate(arms.items()):
        middle = seeds_interval(own, iqm, resolution=max(steps))
        mean = score_interval(own.mean(1).tolist(), max(steps) / len(steps))
        spans = [
            f"{value:.3f}" + ("" if math.isnan(low) else f" ({low:.3f} to {high:.3f})")
            for value, low, high in (middle, mean)
        ]
        lines.append(
            [
                arm,
                *spans,
                f"{mean_rank[i]:.2f}",
                *(f"{share:.2f}" for share in profile(own, THRESHOLDS)),
                f"{improvement(first, own):.2f}",
            ]
        )
    columns = [
        "arm",
        "IQM",
        "mean",
        "mean rank",
        *(f"share > {t:g}" for t in THRESHOLDS),
        f"P(better than {next(iter(arms))})",
    ]
    note = "IQM: the mean of the middle half of all scores."
    note += f" Below {TO_CLAIM} seeds it has no interval." if len(found.seeds) < TO_CLAIM else ""
    left_out = [arm for arm in found.of if arm not in arms]
    if left_out:
        note += f" Left out, since they did not run on every task: {', '.join(left_out)}."
    return f"{markdown(columns, lines)}\n\n{note}"


def list_claims(found: Scores) -> str:
    """List the pairs of arms separated at a false-discovery rate of 5 % over all pairs and tasks,
    the largest difference first. Then list the other pairs, and then the placebos."""
    n = len(found.seeds)
    if n < TO_CLAIM:
        known = " comparisons.csv has each difference with its interval." if n >= FEWEST else ""
        return (
            f"Nothing: {n} seeds, and fewer than {TO_CLAIM} claim nothing"
            f" (`seeds={TO_CLAIM}`).{known}"
        )
    all_pairs = compare_arms(found)
    every = [p for p in all_pairs if not {p.first, p.second} & PLACEBOS.keys()]
    told = sorted((p for p in every if p.q <= ALPHA), key=lambda p: -abs(p.mean))
    lines = []
    for p in told:
        low, high = sorted((abs(p.low), abs(p.high)))
        lines.append(
            f"- {p.task}: {' is better than '.join(p.order())} by {abs(p.mean):.3f} ({low:.3f} to"
            f" {high:.3f}), {rate(p.q)}"
        )
    rest = []
    for task in found.tasks:
        own = [p for p in every if p.task == task and p.q > ALPHA]
        if own:
            names = (
                "; ".join(f"{p.first} and {p.second}" for p in own)
                if len(own) <= FEW
                else f"{len(own)} pairs"
            )
            low = min(p.sees for p in own)
            high = max(p.sees for p in own)
            seen = f"{low:.2f}" if len(own) == 1 else f"{low:.2f} to {high:.2f}"
            rest.append(f"- {task}: {names} (a difference of {seen} would be seen)")
    above = list_above_placebos(found, all_pairs)
    if not every:
        return "\n".join(["Nothing: no task has two arms.", "", *above]).rstrip()
    head = (
        f"{len(told)} of {len(every)} comparisons, at a false-discovery rate of 5 % (Benjamini and"
        " Hochberg) over all of them."
    )
    tail = (
        "Not told apart (comparisons.csv has each):"
        if rest
        else "All are told apart; comparisons.csv has each."
    )
    return "\n".join([head, "", *lines, "", tail, "", *rest, "", *above]).rstrip()


def rate(q: float) -> str:
    """Write a false-discovery rate with four digits, or as an upper bound if it is tiny."""
    return f"q = {q:.4f}" if q >= 0.00005 else "q < 0.0001"


def list_above_placebos(found: Scores, all_pairs: Sequence[Pair]) -> list[str]:
    """List by task the arms above every placebo, and the other arms."""
    lines = []
    for t, task in enumerate(found.tasks):
        arms = found.select_task(t)
        told = [p.order() for p in all_pairs if p.task == found.tasks[t] and p.q <= ALPHA]
        placebos = arms.keys() & PLACEBOS.keys()
        own = [arm for arm in arms if arm not in PLACEBOS]
        below = [arm for arm in own if any((arm, placebo) not in told for placebo in placebos)]
        names = f"all but {', '.join(below)}" if below else "all"
        if len(below) == len(own):
            names = "none"
        lines += [f"- {task}: {names}"] if placebos else []
    return (
        ["Above both placebos (a correction over all comparisons with them):", "", *lines]
        if lines
        else []
    )


def tabulate_budgets(rows: Sequence[Row]) -> str:
    """Tabulate the mean optimiser steps, samples, tokens and processor seconds of a run, by arm and
    task, with a note on unequal amounts."""
    spent = {
        (task, arm): [
            _mean([row[unit] for row in rows if (row["task"], row["arm"]) == (task, arm)])
            for unit in SPENT
        ]
        for task, arm in dict.fromkeys((row["task"], row["arm"]) for row in rows)
    }
    lines = [
        [*cell, *(f"{mean:,.0f}" for mean in means[:3]), f"{means[3]:.1f}"]
        for cell, means in spent.items()
    ]
    table = markdown(["task", "arm", *SPENT.values()], lines)
    return "\n\n".join(
        [
            *find_unequal(spent),
            table,
            "Processor seconds are without the start, which the arms of a seed share.",
        ]
    )


def find_unequal(spent: Mapping[tuple[str, str], Sequence[float]]) -> list[str]:
    """For optimiser steps, samples and tokens each, name the arms of a task with unequal amounts;
    placebos do not count."""
    from rlkit.runs.verdicts import UNEVEN

    out = []
    for i, unit in enumerate(list(SPENT.values())[:3]):
        worst = 1.0, "", "", ""
        for task in dict.fromkeys(task for task, _ in spent):
            own = {
                arm: means[i]
                for (of, arm), means in spent.items()
                if of == task and arm not in PLACEBOS
            }
            if not own:
                continue
            most = max(own, key=own.__getitem__)
            least = min(own, key=own.__getitem__)
            worst = max(
                worst, (own[most] / own[least] if own[least] else math.inf, task, most, least)
            )
        if worst[0] > 1 + UNEVEN:
            out.append(
                "Not equal: {unit}, by a factor of up to {0:.1f} ({1}: {2} beside {3}).".format(
                    *worst, unit=unit
                )
            )
    return out or [
        "Without the placebos, optimiser steps, samples and tokens are equal on every task."
    ]


def _mean(values: Sequence[Any]) -> float:
    """Average the numbers; nan if one is missing."""
    return float(np.mean([math.nan if value == "" else float(value) for value in values]))
