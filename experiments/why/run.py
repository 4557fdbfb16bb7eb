"""Does `rlkit why` name a planted fault, and does it stay silent about healthy runs?

    python experiments/why/run.py --half tune [--runs outputs/why] [--only kl tool] [--most 20]
    python experiments/why/run.py --half fresh

There are sixteen kinds of faults on ten seeds, and thirty healthy runs. A run is ten RL steps of 64
rollouts on one thread. The limits of the checks are tuned on the even seeds up to 8. The odd seeds
up to 9 were reported once; the seeds 11 to 19 are reported for today's limits.

rows.csv gets a row for each run, and the same command continues after an interruption. Runs stay in
--runs without their checkpoints. To diagnose runs again after a change of the checks, delete their
rows: a finished run is not trained twice. With --train the runs are only trained.

    named      place of the planted cause among the findings, 0 if it is not among them
    suspected  the cause named by the last lines of the run
    seconds    processor time of the diagnosis, and of the run unless it was trained before
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from rlkit.commands.arguments import Arguments
from rlkit.commands.cli import main as main_command
from rlkit.extras.why.commands.why import diagnose
from rlkit.extras.why.evidence import read_evidence
from rlkit.extras.why.suspicions import suspect_run
from rlkit.runs.folder import is_finished
from rlkit.statistics import wilson

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from faults import write_rows  # noqa: E402

FILE = HERE / "rows.csv"
SEEDS = (*range(10), 11, 13, 15, 17, 19)
BASE = (
    "batch.prompts=8",
    "batch.group_size=8",
    "trainer.steps=10",
    "trainer.threads=1",
    "evaluation.n=0",
    "logger=none",
    "callbacks.checkpoint.model=false",
    "callbacks.checkpoint.every=1000",
    "callbacks.samples.every=1000",
    "callbacks.completions.every=0",
)
# ROWS is replaced by the path of the fault's rows, and START by a policy that knows the task.
OWN_ROWS = ("task=jsonl", "task.path=ROWS", "task.validation=0", "task.held_out=0")
# kind → overrides
FAULTS: Mapping[str, Sequence[str]] = {
    "rate_low": ("optimizer.lr=1e-6",),
    "rate_high": ("optimizer.lr=0.03",),
    "kl": ("kl=k3", "kl.coef=10"),
    "groups": ("batch.group_size=2",),
    "temperature": ("generation.temperature=0.05",),
    "cut": ("generation.max_new_tokens=8",),
    "unread": ("reward=faults.unread",),
    "repeated": OWN_ROWS,
    "leak": OWN_ROWS,
    "hackable": ("reward=faults.hackable",),
    "sign": ("reward.terms.task.weight=-1",),
    "tool": (
        "environment=tool_use",
        "environment.tools.calculator._target_=faults.calculator",
        "environment.max_turns=2",
    ),
    "stale": ("generation.engine._target_=faults.Stale",),
    "critic": ("algorithm=ppo", "algorithm.critic.optimizer.lr=0"),
    "hard": OWN_ROWS,
    "easy": (*OWN_ROWS, "model.path=START"),
}
HEALTHY: Mapping[str, Sequence[str]] = {
    "healthy": (),
    "healthy_dapo": ("algorithm=dapo", "kl=none"),
    "healthy_ppo": ("algorithm=ppo",),
}
KINDS = FAULTS | HEALTHY
START = ("trainer.steps=20", "trainer.threads=1", "evaluation.n=0", "logger=none", "seed=100")
COLUMNS = (
    *("kind", "seed", "half", "named", "first", "second", "findings", "suspected"),
    *("from", "to", "seconds", "commit"),
)
Row = Mapping[str, object]


def train(kind: str, seed: int, folder: Path) -> None:
    """Train a run in its folder, in this process.

    Raises: RuntimeError with the last lines of its output.
    """
    words = [*BASE, *KINDS[kind], f"seed={seed}"]
    if "START" in " ".join(words):
        start = folder.parents[1] / "start"
        if not is_finished(start):
            run_command(START, start)
        words = [word.replace("START", str(start / "model")) for word in words]
    if "ROWS" in " ".join(words):
        rows = write_rows(kind, seed, folder.parent / f"{seed}.jsonl")
        words = [word.replace("ROWS", str(rows)) for word in words]
    run_command(words, folder)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def run_command(words: Sequence[str], folder: Path) -> None:
    """Run `rlkit train` in a folder. Raises: RuntimeError with the last lines of its output."""
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted call
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        status = main_command(["train", *words, f"hydra.run.dir={folder}"])
    if status:
        raise RuntimeError(f"{folder}: {out.getvalue()[-2000:]}")


def row_of(kind: str, seed: int, folder: Path) -> dict[str, object]:
    """Diagnose a run and return its row."""
    e = read_evidence(folder)
    findings, _ = diagnose(e, str(folder), Arguments([], trusted=True), attack=False)
    causes = [finding.cause for finding in findings]
    suspected = suspect_run(e.run)
    return {
        "kind": kind,
        "seed": seed,
        "half": half_of(seed),
        "named": causes.index(kind) + 1 if kind in causes else 0,
        "first": causes[0] if causes else "",
        "second": causes[1] if len(causes) > 1 else "",
        "findings": len(causes),
        "suspected": suspected.finding.cause if suspected else "",
        "from": round(e.progress.first, 3),
        "to": round(e.progress.last, 3),
    }


def half_of(seed: int) -> str:
    """Return "tune" for even seeds and "report" for odd seeds, up to 9; "fresh" for later seeds.

    The limits are tuned on the even seeds. The odd seeds were reported once, and looked at since.
    """
    if seed > 9:
        return "fresh"
    return "report" if seed % 2 else "tune"


def add_row(row: Row) -> None:
    """Append a row to rows.csv."""
    fresh = not FILE.is_file() or not FILE.read_text()
    with FILE.open("a", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS)
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def sum_up(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of one half's table, then the totals with Wilson's 95 % interval.

    A line counts how often the cause of its kind is among the first two findings, and lists the
    causes that were named first.
    """
    yield "| planted | runs | among the first two | first named | last lines |"
    yield "|---|---|---|---|---|"
    for kind in KINDS:
        own = [row for row in rows if row["kind"] == kind]
        if own:
            hits = sum(map(is_named, own)) if kind in FAULTS else "-"
            firsts = sorted({str(row["first"]) or "nothing" for row in own})
            last = sorted({str(row["suspected"]) or "nothing" for row in own})
            yield f"| {kind} | {len(own)} | {hits} | {', '.join(firsts)} | {', '.join(last)} |"
    faulty = [row for row in rows if row["kind"] in FAULTS]
    healthy = [row for row in rows if row["kind"] in HEALTHY]
    totals = {
        "cause among the first two": (sum(map(is_named, faulty)), len(faulty)),
        "healthy runs with a finding": (sum(bool(r["first"]) for r in healthy), len(healthy)),
        "healthy runs with last words": (sum(bool(r["suspected"]) for r in healthy), len(healthy)),
    }
    for what, (count, of) in totals.items():
        if of:
            low, high = wilson(count, of)
            yield f"{what}: {count} of {of} ({low:.2f} to {high:.2f})"


def is_named(row: Row) -> bool:
    """Return whether the planted cause is among the first two findings."""
    return str(row["named"]) in ("1", "2")


def main() -> None:
    """Train and diagnose the runs of one half that have no row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--half", choices=("tune", "report", "fresh"), required=True)
    parser.add_argument("--runs", type=Path, default=Path("outputs/why"))
    parser.add_argument("--only", nargs="*", default=list(KINDS))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--most", type=int, default=10_000, help="runs of this call")
    parser.add_argument("--train", action="store_true", help="train, and diagnose nothing")
    given = parser.parse_args()
    rows: list[Row] = [*csv.DictReader(FILE.open())] if FILE.is_file() else []
    done = {(str(row["kind"]), int(str(row["seed"]))) for row in rows}
    commit = subprocess.run(
        ["git", "-C", str(HERE), "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    seeds = [seed for seed in given.seeds if half_of(seed) == given.half]
    left = [(kind, seed) for seed in seeds for kind in given.only if (kind, seed) not in done]
    for kind, seed in left[: given.most]:
        folder = (given.runs / kind / str(seed)).absolute()
        began = time.process_time()
        try:
            if not is_finished(folder):
                train(kind, seed, folder)
        except RuntimeError as error:
            print(error, flush=True)
            continue
        if given.train:
            continue
        row = row_of(kind, seed, folder)
        row |= {"seconds": round(time.process_time() - began, 1), "commit": commit}
        add_row(row)
        rows.append(row)
        print(row, flush=True)
    print("\n".join(sum_up([row for row in rows if row["half"] == given.half])))


if __name__ == "__main__":
    main()
