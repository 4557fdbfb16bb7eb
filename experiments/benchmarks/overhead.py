"""What share of an RL step is spent outside the model: rewards, environment, assembly, logging?

    python experiments/benchmarks/overhead.py [--steps 8] [--million 26] [OVERRIDE ...]

The script runs the default of `rlkit train` with its callbacks and its logger, without evaluation,
or a run with your overrides. `rlkit.training.metrics.performance` defines the model's share: the
engine at work, the scoring of given tokens, backward and optimizer. Each round is a run in its own
process. Figures are medians over the steps of all rounds, without the first step of each. A step
runs from the end of a step to the end of the next. overhead.csv has a row for each part:

    decode        the engine at work: passes, sampling, its slots       (model)
    train         scoring, backward, optimizer                          (model)
    generation    the rest of sampling: environment, tools, template, tokenizer, the service around
                  the engine
    reward        scores of the rollouts
    update        the rest of the update: assembly, advantages, inputs of the metrics
    metrics       the row of metrics
    after         callbacks, loggers, the loop

`outside` is the run's own `perf/outside_model_frac`, the share of the last five parts.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench

MODEL = ("decode", "train")


def clocks(run: Path, /) -> Any:
    """Return a callback that gathers the parts of every step in bench.MARKS."""
    import lightning as L

    bench.MARKS.update(steps=[], last=0.0)

    class Clocks(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            bench.MARKS["last"] = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            now = time.perf_counter()
            bench.MARKS["steps"].append(parts_of(module.metrics, now - bench.MARKS["last"]))
            bench.MARKS["last"] = now

    return Clocks()


def parts_of(row: dict[str, float], total: float) -> dict[str, float]:
    """Return the seconds of a step by part, from its row of metrics."""
    named = {
        name: row[f"perf/{name}_s"]
        for name in ("generate", "environment", "reward", "update", "model")
    }
    decode = named["generate"] - named["environment"]
    train = named["model"] - decode
    spent = {
        "decode": decode,
        "train": train,
        "generation": named["environment"],
        "reward": named["reward"],
    }
    spent["update"] = named["update"] - train
    inside = max(row["perf/step_s"], sum(spent.values()))
    spent |= {
        "metrics": inside - sum(spent.values()),
        "after": max(0.0, total - inside),
        "total": total,
    }
    return spent | {"outside": row["perf/outside_model_frac"]}


def side(overrides: list[str]) -> list[dict[str, float]]:
    """Run rlkit in this process and return the parts of its steps."""
    from rlkit.commands.cli import main

    with tempfile.TemporaryDirectory() as folder:
        given = [
            "train",
            f"hydra.run.dir={folder}/run",
            "evaluation.n=0",
            "+callbacks.clocks={_target_: overhead.clocks, _partial_: true}",
        ]
        if main([*given, *overrides]):
            raise RuntimeError(f"rlkit train {' '.join(overrides)} failed")
    return bench.MARKS["steps"]


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        import overhead  # the module imported by Hydra; this file runs as __main__

        bench.answer(overhead.side(json.loads(sys.argv[2])))
        return
    parser = bench.parser(__doc__, rounds=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--million",
        choices=tuple(bench.SIZES),
        default="0.9",
        help="parameters of the model; random weights but for 0.9",
    )
    parser.add_argument("overrides", nargs="*", help="of rlkit train")
    given = parser.parse_intermixed_args()
    if given.quick:
        given.rounds, given.steps, given.overrides = (
            1,
            2,
            ["batch.prompts=2", "batch.group_size=2", *given.overrides],
        )
    overrides = [
        f"trainer.steps={given.steps}",
        f"trainer.threads={given.threads}",
        *given.overrides,
    ]
    overrides.append(f"trainer.accelerator={'gpu' if given.device == 'cuda' else 'cpu'}")
    with tempfile.TemporaryDirectory() as folder:
        overrides.append(f"model.path={bench.model_folder(given.million, Path(folder))}")
        command = [bench.PYTHON, __file__, "--side", json.dumps(overrides)]
        runs = [bench.child(command, threads=given.threads) for _ in range(given.rounds)]
    steps = [step for run in runs for step in run[1:]]
    parts = [name for name in steps[0] if name not in ("total", "outside")]
    outside = statistics.median(step["outside"] for step in steps)
    last = {
        "step_s": round(statistics.median(step["total"] for step in steps), 4),
        "outside": round(outside, 4),
    }
    last |= {
        "million": given.million,
        "overrides": " ".join(given.overrides),
        "steps": given.steps,
        "rounds": given.rounds,
    }
    last |= bench.provenance(given.threads, given.device)
    rows = [
        {
            "part": name,
            "model": name in MODEL,
            "seconds": round(statistics.median(step[name] for step in steps), 4),
            "share": round(statistics.median(step[name] / step["total"] for step in steps), 4),
        }
        for name in parts
    ]
    bench.write(given.out, "overhead", [row | last for row in rows])
    print(
        f"outside model compute: {outside:.1%} of a step; goal: 5 % at 26 million parameters, 12 %"
        " at 0.9 million"
    )


if __name__ == "__main__":
    main()
