"""Compare decoding and training steps of this checkout with those of an older one, pair by pair.

    git worktree add /tmp/before 149a62e
    python experiments/benchmarks/pairs.py /tmp/before [--processes 14] [--pairs 4] [--cases turns]

Two processes run with one thread each, one for each checkout. They take turns to do a round of
`decode.py`, `turns.py` or `steps.py`, and take turns to go first. The ratio is the processor
seconds of this checkout divided by the older one's. Two processes of one checkout differ by up to 5
% for as long as they live. Therefore the median ratio of a couple of processes is only one
observation.

pairs.csv has the median over `--processes` couples and its 95 % interval. The interval assumes no
distribution: its ends are two order statistics, and the median lies between them with 95 % by the
binomial law.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import bench

HERE = Path(__file__).resolve().parent
CASES = {
    f"{name}, {kernel}": [*words, "--kernel", kernel]
    for kernel in ("fused", "eager")
    for name, words in {
        "decode, 64 rows": ["decode.py", "--rows", "64"],
        "decode, 256 rows": ["decode.py", "--rows", "256"],
        "turns, 32 rows of 20 turns": ["turns.py", "--turns", "20"],
        "steps of training": ["steps.py"],
    }.items()
}


def started(words: list[str], checkout: Path) -> subprocess.Popen[str]:
    """Start a process that does one round, and one more for each line on its standard input."""
    env = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / words[0]), *words[1:], "--threads", "1", "--once"]
    return subprocess.Popen(
        command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def taken(process: subprocess.Popen[str]) -> float:
    """Return the processor seconds of the round that a process has just finished."""
    line = process.stdout.readline()  # type: ignore[union-attr]
    if not line.startswith("processor_s"):
        raise RuntimeError(f"{process.args} gave {line!r}")
    return float(line.split()[1])


def round_of(process: subprocess.Popen[str]) -> float:
    """Ask a process for one more round and return its processor seconds."""
    process.stdin.write("\n")  # type: ignore[union-attr]
    process.stdin.flush()  # type: ignore[union-attr]
    return taken(process)


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the two order statistics that contain the median with at least 95 % probability."""
    n, low = len(ratios), 0
    while sum(math.comb(n, k) for k in range(low + 1)) / 2**n <= 0.025:
        low += 1
    ordered = sorted(ratios)
    return ordered[max(0, low - 1)], ordered[n - max(1, low)]


def compared(words: list[str], older: Path, pairs: int, couple: int) -> tuple[float, float]:
    """Compare one couple of processes.

    Returns: the median ratio of their rounds, and the median seconds of this checkout.
    """
    mine, theirs = started(words, HERE.parents[1]), started(words, older)
    taken(mine), taken(theirs)  # the first round warms up
    ratios, seconds = [], []
    for number in range(pairs):
        if (number + couple) % 2 == 0:
            a, b = round_of(mine), round_of(theirs)
        else:
            b, a = round_of(theirs), round_of(mine)
        ratios.append(a / b)
        seconds.append(a)
    for process in (mine, theirs):
        process.kill()
        process.wait()
    return statistics.median(ratios), statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("older", type=Path)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--cases", default="", help="only those whose name holds this")
    given = parser.parse_args()
    rows = []
    for name, words in CASES.items():
        if given.cases not in name:
            continue
        ratios, seconds = [], []
        for couple in range(given.processes):
            ratio, mine = compared(words, given.older, given.pairs, couple)
            ratios.append(ratio)
            seconds.append(mine)
        low, high = interval(ratios)
        row = {
            "case": name,
            "processes": given.processes,
            "pairs": given.pairs,
            "ratio": statistics.median(ratios),
            "low": low,
            "high": high,
        }
        rows.append(row | {"processor_s": statistics.median(seconds)})
        print(rows[-1], flush=True)
    bench.write(HERE, "pairs", [row | bench.provenance(1) for row in rows])


if __name__ == "__main__":
    main()
