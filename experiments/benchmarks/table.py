"""Make the whole comparison with the peers in one session.

    bash experiments/benchmarks/peers_env.sh /tmp/peers && \\
        bash tests/extras/vllm/vllm_env.sh /tmp/vllm
    python experiments/benchmarks/table.py --python /tmp/peers/bin/python \\
        --vllm-python /tmp/vllm/bin/python

It compares steps with TRL's, decoding with vLLM's, and memory at several of TRL's micro-batches.
Every comparison is a series of pairs. A pair is a process or a round of each side, and the sides
take turns to go first. table.csv has a row for each figure: ours, the peer's, the median ratio of
the pairs, the ratio in the table before this one, and the goal. The script also replaces peers.csv
and decode.csv. It stops at once if a peer is not installed. --without vllm or --without trl leaves
out a peer, and the table says so.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench
import peers

STEPS = {  # figure → (replies, beta), goal: at most this of TRL's time
    "step, natural replies, beta 0": ("natural", 0.0, 0.22),
    "step, natural replies, beta 0.04": ("natural", 0.04, 0.25),
    "step, forced replies, beta 0": ("forced", 0.0, 0.33),
}
DECODE = {64: 2.5, 256: 1.6}  # rows → goal: at least so many times vLLM's tokens a second
MICRO_BATCHES = (1, 4, 8)  # of TRL's 128 rows, in micro-batches of 128, 32 and 16
MEMORY = 0.75  # of TRL's peak at its best micro-batch


def steps_and_memory(given: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of the table and of peers.csv."""
    size = (
        {"prompts": 2, "group": 2, "tokens": 8, "steps": 2}
        if given.quick
        else {"prompts": 16, "group": 8, "tokens": 96, "steps": 6}
    )
    asked = size | {
        "threads": given.threads,
        "device": "cpu",
        "lora": 0,
        "vllm": False,
        "lr": 3e-4,
        "seed": 0,
        "held_out": False,
        "model": "tiny",
        "tasks": "arithmetic",
    }
    table, rows = [], []
    for name, (lengths, beta, goal) in STEPS.items():
        found = peers.compare(
            asked | {"lengths": lengths, "beta": beta, "micro_batches": 1},
            given.python,
            given.rounds,
        )
        rows += found
        table.append(figure(name, "TRL", found, "seconds_per_step", "time_of_trl", goal))
    natural = [row for row in rows if (row["lengths"], row["beta"]) == ("natural", 0.0)]
    parts = (1, 2) if given.quick else MICRO_BATCHES
    for part in parts[1:]:
        more = peers.compare(
            asked | {"lengths": "natural", "beta": 0.0, "micro_batches": part}, given.python, 1
        )
        rows, natural = rows + more, natural + more
    ours = min(row["peak_mib"] for row in natural if row["side"] == "rlkit")
    theirs = {row["micro_batches"]: row["peak_mib"] for row in natural if row["side"] == "trl"}
    for part, peak in theirs.items():
        own = next(
            row["peak_mib"]
            for row in natural
            if (row["side"], row["micro_batches"]) == ("rlkit", part)
        )
        name = (
            f"memory, MiB resident, micro-batches of {size['prompts'] * size['group'] // part} rows"
        )
        table.append(line(name, "TRL", own, peak, own / peak, ""))
    best = min(theirs.values())
    table.append(
        line(
            "memory, MiB resident, each at its best micro-batch",
            "TRL",
            ours,
            best,
            ours / best,
            MEMORY,
        )
    )
    last = (
        size
        | {"rounds": given.rounds}
        | bench.provenance(given.threads)
        | {"trl": peers.peer_version(given.python)}
    )
    return table, [row | {"model": "0.9"} | last for row in rows]


def decoding(given: Any) -> list[dict[str, Any]]:
    """Run decode.py, which writes decode.csv with engines in turn, and return rows of the table."""
    words = [
        sys.executable,
        str(bench.HERE / "decode.py"),
        "--threads",
        str(given.threads),
        "--out",
        str(given.out),
    ]
    words += [
        "--engines",
        "transformers",
        "cached",
        "--vllm-python",
        given.vllm_python,
        "--rounds",
        str(given.rounds),
    ]
    subprocess.run(
        [*words, *(["--quick"] if given.quick else [])],
        env=bench.environment(given.threads),
        check=True,
    )
    with (given.out / "decode.csv").open(newline="") as file:
        found = {
            (row["engine"], int(row["rows"])): float(row["tokens_per_second"])
            for row in csv.DictReader(file)
            if row["device"] == "cpu"
        }
    sizes = sorted({rows for _, rows in found})
    out = []
    for rows in sizes:
        for peer in ("vllm", "transformers"):
            ours, theirs = found["cached", rows], found[peer, rows]
            goal = DECODE.get(rows, "") if peer == "vllm" else ""
            out.append(
                line(f"decoding, {rows} rows, tokens/s", peer, ours, theirs, ours / theirs, goal)
            )
    return out


def figure(
    name: str, peer: str, rows: list[dict[str, Any]], column: str, ratio: str, goal: Any
) -> dict[str, Any]:
    """Return a line of the table, from a pair of rows of peers.compare."""
    by_side = {row["side"]: row for row in rows}
    return line(
        name, peer, by_side["rlkit"][column], by_side["trl"][column], by_side["rlkit"][ratio], goal
    )


def line(
    name: str, peer: str, ours: float, theirs: float, ratio: float, goal: Any
) -> dict[str, Any]:
    """Return one figure as a line of the table.

    More is better for decoding, which is a rate; less is better for all other figures.
    """
    reached = (
        "" if goal == "" else (ratio >= goal if name.startswith("decoding") else ratio <= goal)
    )
    return {
        "figure": name,
        "peer": peer,
        "rlkit": ours,
        "theirs": theirs,
        "ratio": round(ratio, 3),
        "goal": goal,
        "reached": reached,
    }


def before(file: Path) -> dict[tuple[str, str], str]:
    """Return the ratios of the table before this one, by figure and peer."""
    if not file.exists():
        return {}
    with file.open(newline="") as opened:
        return {(row["figure"], row["peer"]): row["ratio"] for row in csv.DictReader(opened)}


def main() -> None:
    parser = bench.parser(__doc__, rounds=3, device=False)
    parser.add_argument(
        "--python",
        default=os.environ.get("PEERS_PYTHON"),
        help="of the environment that peers_env.sh made",
    )
    parser.add_argument(
        "--vllm-python",
        default=os.environ.get("VLLM_PYTHON"),
        help="of the environment that tests/extras/vllm/vllm_env.sh made",
    )
    parser.add_argument(
        "--without", nargs="+", choices=("trl", "vllm"), default=[], help="peers that are left out"
    )
    given = parser.parse_args()
    for package, python in (("trl", given.python), ("vllm", given.vllm_python)):
        if package not in given.without:
            peers.need_peers(python or "(no interpreter named)", package)
    earlier, table, left_out = before(given.out / "table.csv"), [], " ".join(given.without)
    if "trl" not in given.without:
        table, rows = steps_and_memory(given)
        bench.write(given.out, "peers", rows)
    if "vllm" not in given.without:
        table += decoding(given)
    last = {"rounds": given.rounds, "left_out": left_out} | bench.provenance(given.threads)
    bench.write(
        given.out,
        "table",
        [row | {"before": earlier.get((row["figure"], row["peer"]), "")} | last for row in table],
    )


if __name__ == "__main__":
    main()
