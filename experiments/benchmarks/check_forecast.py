"""Does `rlkit check` forecast the cost of a run? Compare it with three measured steps.

    rlkit get smollm2_135m && python experiments/benchmarks/check_forecast.py

For each setting `rlkit check` makes its forecast, and `rlkit train` then takes three steps, each in
its own process. The script compares processor seconds of a step and peak resident memory. The first
step of a run costs more than later ones and is left out. Rewards differ within every group, so that
every step has its updates.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench

NAMES = ("Ada", "Ben", "Chloe", "Dan", "Eva", "Finn", "Gwen", "Hugo")
THINGS = ("apples", "books", "pens", "shells", "stamps", "coins", "cards", "beads")
ENDS: list[float] = []  # processor seconds at the start of training and after each step


def clock(run: Path, /) -> Any:
    """Return a callback that records the process's time after each step, with all other work."""
    import lightning as L

    class Clock(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            ENDS.append(time.process_time())

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            ENDS.append(time.process_time())

    return Clock()


def stories(count: int) -> list[dict[str, str]]:
    """Return word problems of about the length of GSM8K's."""
    rows = []
    for i in range(count):
        name, other = NAMES[i % 8], NAMES[(i + 3) % 8]
        thing = THINGS[i // 8 % 8]
        a, b, c = 12 + i, 3 + i % 7, 2 + i % 5
        rows.append(
            {
                "prompt": (
                    f"{name} has {a} {thing} at home and buys {b} more every day of the week,"
                    f" apart from Sunday. At the end of the week {name} gives {c} {thing} to"
                    f" {other}, who had none before, and loses half of the rest on the way to"
                    f" school. How many {thing} do {name} and {other} have together in the end?"
                ),
                "answer": str((a + 6 * b - c) // 2 + c),
            }
        )
    return rows


def pairs(count: int) -> list[dict[str, str]]:
    """Return questions for the larger of two numbers: about 50 tokens with the template."""
    return [
        {
            "prompt": f"Which number is larger, {i % 90 + 10} or {7 * i % 89 + 10}?",
            "answer": str(max(i % 90 + 10, 7 * i % 89 + 10)),
        }
        for i in range(count)
    ]


def settings(folder: Path) -> dict[str, list[str]]:
    """Return the overrides of each setting, by name."""
    out = {"embedded_default": ["evaluation.n=0"]}
    rows = {"smollm2_4x8x64": stories(64), "smollm2_8x8x3": pairs(400)}
    sizes = {"smollm2_4x8x64": (4, 64), "smollm2_8x8x3": (8, 3)}
    for name, own in rows.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in own))
        prompts, tokens = sizes[name]
        out[name] = [
            "model=smollm2_135m",
            "task=jsonl",
            f"task.path={file}",
            "environment=single_turn",
            "reward=numeric",
            "reward.terms.numeric.fn._target_=bench.spread",
            f"batch.prompts={prompts}",
            f"generation.max_new_tokens={tokens}",
            "evaluation.n=0",
        ]
    return out


def check(overrides: list[str]) -> dict[str, float]:
    """Return the forecast of `rlkit check`, and the processor seconds of making it."""
    from rlkit.commands import check
    from rlkit.commands.arguments import Arguments
    from rlkit.extras.forecast.commands.forecast import list_costs, measure_here

    x, tasks, *_ = check.prepare(Arguments(overrides))
    report, found = measure_here(x, tasks, {})
    for name, text in list_costs(found, report.memory):
        print(f"{name:<12}{text}", file=sys.stderr)
    return {
        "step": found.costs.step,
        "sampling": found.costs.sampling,
        "gib": found.peak / 2**30,
        "check": time.process_time(),
    }


def train(overrides: list[str], folder: str) -> dict[str, float]:
    """Return the processor seconds of the steps after the first, and the peak memory."""
    import check_forecast  # the callback's module; this file runs as __main__

    from rlkit.commands.cli import main

    status = main(
        [
            "train",
            f"hydra.run.dir={folder}",
            "trainer.steps=3",
            "+callbacks.clock={_target_: check_forecast.clock, _partial_: true}",
            *overrides,
        ]
    )
    if status:
        raise RuntimeError(f"rlkit train {' '.join(overrides)} ended with {status}")
    ends = check_forecast.ENDS
    rows = [json.loads(row) for row in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    steps = [b - a for a, b in itertools.pairwise(ends)]
    return {
        "first": steps[0],
        "step": statistics.fmean(steps[1:]),
        "update": statistics.fmean(row["perf/update_processor_s"] for row in rows[-2:]),
        "gib": bench.memory("VmHWM") / 1024,
    }


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        side = {"check": check, "train": train}[sys.argv[2]]
        bench.answer(side(**json.loads(sys.argv[3])))
        return
    parser = bench.parser(__doc__, rounds=1, threads=1, device=False)
    parser.add_argument("--settings", nargs="+", help="some of them, by name")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        own = settings(Path(name))
        for setting in given.settings or (["embedded_default"] if given.quick else own):
            overrides = [*own[setting], f"trainer.threads={given.threads}"]
            for number in range(given.rounds):
                sides = {
                    "check": {"overrides": overrides},
                    "train": {"overrides": overrides, "folder": f"{name}/{setting}_{number}"},
                }
                said, took = (
                    bench.child(
                        [bench.PYTHON, __file__, "--side", side, json.dumps(words)],
                        threads=given.threads,
                    )
                    for side, words in sides.items()
                )
                rows.append(
                    {
                        "setting": setting,
                        "forecast_s": round(said["step"], 3),
                        "taken_s": round(took["step"], 3),
                        "forecast_of_taken_s": round(said["step"] / took["step"], 3),
                        "forecast_gib": round(said["gib"], 3),
                        "taken_gib": round(took["gib"], 3),
                        "forecast_of_taken_gib": round(said["gib"] / took["gib"], 3),
                        "forecast_sampling_s": round(said["sampling"], 3),
                        "taken_update_s": round(took["update"], 3),
                        "first_step_s": round(took["first"], 3),
                        "check_s": round(said["check"], 1),
                    }
                    | bench.provenance(given.threads)
                )
    bench.write(given.out, "check_forecast", rows, by=("setting",))


if __name__ == "__main__":
    main()
