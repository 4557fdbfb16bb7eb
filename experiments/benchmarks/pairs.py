"""What decoding and a training step cost beside an older checkout, pair by pair: the ratio of
processor seconds, this checkout over the older one.

    git worktree add /tmp/before 149a62e
    python experiments/benchmarks/pairs.py /tmp/before [--processes 14] [--pairs 4] [--cases turns]

Two processes, one a checkout, with one thread each; in turn each does a round of `decode.py`,
`turns.py` or `steps.py`, and which goes first alternates. The median ratio of their rounds is one
observation, since two processes of one checkout differ by up to 5 % for as long as they live.
pairs.csv has the median over `--processes` such couples and its 95 % interval, free of any
distribution: the order statistics between which the median lies with 95 % by the binomial law.
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
    """A process that does a round, and one more for each line that it is given."""
    env = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / words[0]), *words[1:], "--threads", "1", "--once"]
    return subprocess.Popen(
        command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def taken(process: subprocess.Popen[str]) -> float:
    """Processor seconds of the round that it has done."""
    line = process.stdout.readline()  # type: ignore[union-attr]
    if not line.startswith("processor_s"):
        raise RuntimeError(f"{process.args} gave {line!r}")
    return float(line.split()[1])


def round_of(process: subprocess.Popen[str]) -> float:
    """Processor seconds of one more round."""
    process.stdin.write("\n")  # type: ignore[union-attr]
    process.stdin.flush()  # type: ignore[union-attr]
    return taken(process)


def interval(ratios: list[float]) -> tuple[float, float]:
    """The order statistics that hold the median with 95 % at least."""
    n, low = len(ratios), 0
    while sum(math.comb(n, k) for k in range(low + 1)) / 2**n <= 0.025:
        low += 1
    ordered = sorted(ratios)
    return ordered[max(0, low - 1)], ordered[n - max(1, low)]


def compared(words: list[str], older: Path, pairs: int, couple: int) -> tuple[float, float]:
    """The median ratio of the rounds of one couple of processes, and this checkout's seconds."""
    mine, theirs = started(words, HERE.parents[1]), started(words, older)
    taken(mine), taken(theirs)  # the first round, which warms up
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
