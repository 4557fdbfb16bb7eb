"""Does `rlkit why` name a planted fault? Sixteen kinds of faults on ten seeds, and thirty healthy
runs.

    python experiments/why/run.py --half tune [--runs outputs/why] [--only kl tool] [--most 20]
    python experiments/why/run.py --half report

Limits of the checks are tuned on the even seeds; the odd ones are only reported. A run is ten RL
steps of 64 rollouts on one thread. Its folder stays in --runs, and a run that is there is not
repeated; the diagnosis always is. rows.csv has a row a run: `named` is the place of the planted
cause among the findings, 0 where it is not among them.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from rlkit.commands.arguments import Arguments
from rlkit.commands.cli import main as main_command
from rlkit.extras.why.commands.why import diagnose
from rlkit.extras.why.evidence import read_evidence
from rlkit.runs.folder import is_finished

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from faults import write_rows  # noqa: E402

SEEDS = range(10)
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
# kind → overrides; ROWS is replaced by the path of its rows
FAULTS: Mapping[str, Sequence[str]] = {
    "rate_low": ("optimizer.lr=1e-6",),
    "rate_high": ("optimizer.lr=0.03",),
    "kl": ("kl=k3", "kl.coef=10"),
    "groups": ("batch.group_size=2",),
    "temperature": ("generation.temperature=0.05",),
    "cut": ("generation.max_new_tokens=8",),
    "unread": ("reward=faults.unread",),
    "repeated": ("task=jsonl", "task.path=ROWS"),
    "leak": ("task=jsonl", "task.path=ROWS"),
    "hackable": ("reward=faults.hackable",),
    "sign": ("reward.terms.task.weight=-1",),
    "tool": ("environment=tool_use", "environment.tools.calculator._target_=faults.calculator"),
    "stale": ("generation.engine._target_=faults.Stale",),
    "critic": ("algorithm=ppo", "algorithm.critic.optimizer.lr=0"),
    "hard": ("task=jsonl", "task.path=ROWS"),
    "easy": ("task=jsonl", "task.path=ROWS"),
}
HEALTHY: Mapping[str, Sequence[str]] = {
    "healthy": (),
    "healthy_dapo": ("algorithm=dapo", "kl=none"),
    "healthy_ppo": ("algorithm=ppo",),
}
KINDS = FAULTS | HEALTHY
COLUMNS = ("kind", "seed", "half", "named", "first", "second", "findings", "from", "to", "seconds")


def train(kind: str, seed: int, folder: Path) -> None:
    """Trains a run in its folder, in this process. Raises: RuntimeError with the last lines of its
    output."""
    words = [*BASE, *KINDS[kind], f"seed={seed}", f"hydra.run.dir={folder}"]
    if any("ROWS" in word for word in words):
        rows = write_rows(kind, seed, folder.parent / f"{seed}.jsonl")
        words = [word.replace("ROWS", str(rows.absolute())) for word in words]
    shutil.rmtree(folder, ignore_errors=True)  # of a call that was interrupted
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        status = main_command(["train", *words])
    if status:
        raise RuntimeError(f"{kind}, seed {seed}: {out.getvalue()[-2000:]}")


def row_of(kind: str, seed: int, folder: Path, seconds: float) -> dict[str, object]:
    """What the findings say of a run."""
    e = read_evidence(folder)
    findings, _ = diagnose(e, str(folder), Arguments(["trust=true"]), attack=False)
    causes = [finding.cause for finding in findings]
    return {
        "kind": kind,
        "seed": seed,
        "half": half_of(seed),
        "named": causes.index(kind) + 1 if kind in causes else 0,
        "first": causes[0] if causes else "",
        "second": causes[1] if len(causes) > 1 else "",
        "findings": len(causes),
        "from": round(e.progress.first, 3),
        "to": round(e.progress.last, 3),
        "seconds": round(seconds, 1),
    }


def half_of(seed: int) -> str:
    """Even seeds are tuned on."""
    return "report" if seed % 2 else "tune"


def sum_up(rows: Sequence[Mapping[str, object]]) -> str:
    """The table: of each kind how often its cause is among the first two, and what else stood
    first."""
    lines = ["| planted | runs | among the first two | first named |", "|---|---|---|---|"]
    for kind in KINDS:
        own = [row for row in rows if row["kind"] == kind]
        if own:
            hits = sum(str(row["named"]) in "12" for row in own)
            firsts = sorted({str(row["first"]) or "nothing" for row in own})
            hit = (
                f"{hits}"
                if kind in FAULTS
                else f"false alarms: {sum(bool(r['first']) for r in own)}"
            )
            lines.append(f"| {kind} | {len(own)} | {hit} | {', '.join(firsts)} |")
    return "\n".join(lines)


def main() -> None:
    """Train the missing runs of one half, and write rows.csv."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--half", choices=("tune", "report"), required=True)
    parser.add_argument("--runs", type=Path, default=Path("outputs/why"))
    parser.add_argument("--only", nargs="*", default=list(KINDS))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--most", type=int, default=10_000, help="runs to train in this call")
    given = parser.parse_args()
    file = HERE / "rows.csv"
    known = list(csv.DictReader(file.open())) if file.is_file() else []
    table = {(row["kind"], int(row["seed"])): dict(row) for row in known}
    left = given.most
    for seed in (own for own in given.seeds if half_of(own) == given.half):
        for kind in given.only:
            folder = (given.runs / kind / str(seed)).absolute()
            seconds = float(table.get((kind, seed), {}).get("seconds", 0))
            if not is_finished(folder) and left:
                left -= 1
                begun = time.perf_counter()
                try:
                    train(kind, seed, folder)
                except RuntimeError as error:
                    print(error, flush=True)
                seconds = time.perf_counter() - begun
            if is_finished(folder):
                table[kind, seed] = row_of(kind, seed, folder, seconds)
                print(table[kind, seed], flush=True)
                with file.open("w", newline="") as out:
                    writer = csv.DictWriter(out, COLUMNS)
                    writer.writeheader()
                    writer.writerows(table[key] for key in sorted(table))
    print(sum_up([row for row in table.values() if row["half"] == given.half]))


if __name__ == "__main__":
    main()
