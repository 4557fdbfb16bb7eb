"""How does the cost of an RL step grow with batch, length, group size, turns and LoRA rank?

    python experiments/benchmarks/scaling.py [--axes batch length group turns rank]

The script runs whole `rlkit train` steps of the embedded model. Replies never end, so that the
settings fix the number of tokens. Each point runs once per round, points in turn. A figure is the
median over the steps of all rounds, without the first step of each round.

The exponent k of cost ~ size^k is fitted by least squares of the logarithms. It is given with its
95 % interval, for the whole step, generation and update. For comparison there is the exponent of
the tokens in the update: a cost that is linear in tokens has the same exponent. With a lower
exponent, part of the cost does not grow with size. With a higher one, part grows faster, like
attention with length and turns.

scaling.csv has a row for each point, and then for each axis a row with the exponents and an empty
`size`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import bench

BASE = [
    "model._target_=bench.endless",
    "environment=single_turn",
    "reward=numeric",
    "reward.terms.numeric.fn._target_=bench.solved",
]
BASE += [
    "kl=none",
    "reference=none",
    "batch.prompts=8",
    "batch.group_size=8",
    "generation.max_new_tokens=32",
    "algorithm.entropy_coef=0.001",
]
ENDING = [
    "model._target_=rlkit.models.load_policy",
    "generation.max_new_tokens=64",
]  # a reply cut at its limit ends its episode
AXES: dict[str, tuple[list[int], Any]] = {
    "batch": ([4, 8, 16, 32], lambda n: [f"batch.prompts={n}"]),
    "length": ([32, 64, 128, 256], lambda n: [f"generation.max_new_tokens={n}"]),
    "group": ([4, 8, 16, 32], lambda n: [f"batch.group_size={n}"]),
    "turns": (
        [1, 2, 4, 8],
        lambda n: [*ENDING, "environment._target_=bench.talk", f"+environment.turns={n}"],
    ),
    "rank": ([1, 4, 16, 64], lambda n: [f"model.lora.rank={n}"]),
}
QUICK = {
    "batch": [1, 2, 3],
    "length": [4, 8, 16],
    "group": [2, 3, 4],
    "turns": [1, 2, 3],
    "rank": [1, 2, 4],
}
COSTS = ("step_s", "generate_s", "update_s")


def point(axis: str, size: int, given: argparse.Namespace) -> list[dict[str, float]]:
    """Return the costs of the steps of one run, without the first step."""
    overrides = [
        *BASE,
        *AXES[axis][1](size),
        f"trainer.steps={given.steps + 1}",
        f"trainer.threads={given.threads}",
    ]
    overrides.append(f"trainer.accelerator={'gpu' if given.device == 'cuda' else 'cpu'}")
    if given.quick:
        small = {
            "batch": ["batch.group_size=2", "generation.max_new_tokens=4"],
            "group": ["batch.prompts=1", "generation.max_new_tokens=4"],
        }
        overrides = [
            *BASE,
            "batch.prompts=1",
            "batch.group_size=2",
            *small.get(axis, []),
            *overrides[len(BASE) :],
        ]
    with tempfile.TemporaryDirectory() as folder:
        seconds, rows = bench.steps_of(overrides, Path(folder) / "run")
    parts = [{name: row[f"perf/{name}"] for name in ("generate_s", "update_s")} for row in rows]
    tokens = [row["perf/tokens_per_s"] * row["perf/step_s"] for row in rows]
    whole = zip(seconds, parts, tokens, strict=True)
    return [{"step_s": spent, "tokens": count} | part for spent, part, count in whole][1:]


def main() -> None:
    parser = bench.parser(__doc__, rounds=2)
    parser.add_argument("--axes", nargs="+", choices=tuple(AXES), default=list(AXES))
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a run")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.steps = 1, 1
    sizes = {axis: QUICK[axis] if given.quick else AXES[axis][0] for axis in given.axes}
    seen: dict[tuple[str, int], list[dict[str, float]]] = {
        (axis, size): [] for axis in sizes for size in sizes[axis]
    }
    for _ in range(given.rounds):
        for axis, size in seen:
            seen[axis, size] += point(axis, size, given)
    last = {"rounds": given.rounds, "steps": given.steps} | bench.provenance(
        given.threads, given.device
    )
    rows: list[dict[str, Any]] = []
    for axis in given.axes:
        own = [
            {
                key: statistics.median(step[key] for step in seen[axis, size])
                for key in (*COSTS, "tokens")
            }
            for size in sizes[axis]
        ]
        rows += [
            {"axis": axis, "size": size, "tokens": round(cost["tokens"])}
            | {key: round(cost[key], 4) for key in COSTS}
            for size, cost in zip(sizes[axis], own, strict=True)
        ]
        fit: dict[str, Any] = {
            "axis": axis,
            "size": "",
            "tokens_exponent": round(bench.exponent(sizes[axis], [c["tokens"] for c in own])[0], 2),
        }
        for key in COSTS:
            slope, low, high = bench.exponent(sizes[axis], [cost[key] for cost in own])
            fit[f"{key}_exponent"], fit[f"{key}_interval"] = (
                round(slope, 2),
                f"{low:.2f} – {high:.2f}",
            )
        rows.append(fit)
    bench.write(given.out, "scaling", [row | last for row in rows])


if __name__ == "__main__":
    main()
