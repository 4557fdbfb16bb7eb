"""Which share of an RL step is spent outside model compute: rewards, environment, assembly, logging?

    python experiments/benchmarks/overhead.py [--steps 8] [OVERRIDE ...]

The default of `rlkit train`, its callbacks and its logger included, without evaluation; or with overrides of yours. Model compute
is what runs inside the model's trunk and head, the draw of the next token, the scoring of given tokens, backward and optimiser; a step
runs from the end of a step to the end of the next. Each round is a run in a process of its own; shares are medians over the steps of
all rounds without the first step of each. overhead.csv has a row a part:

    decode        trunk, head and draw while replies are sampled        (model)
    score, backward, optimizer                                          (model)
    generation    the rest of sampling: engine, environment, tools, template, tokenizer
    reward        scores of the rollouts
    update        the rest of the update: assembly, advantages, the terms that metrics are made of
    metrics       the row
    after         callbacks, loggers, the loop

`outside` is the share of the last five. Where a run's own metrics have `perf/outside_model_frac`, its median stands beside it.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench

MODEL = ("decode", "score", "backward", "optimizer")
SPENT: dict[str, float] = defaultdict(float)
DEPTH = [0]  # inside a part already: what it calls counts as that part


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its time added to a part; device work included."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if DEPTH[0]:
            return function(*args, **kwargs)
        DEPTH[0] += 1
        begun = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            synchronize()
            SPENT[name] += time.perf_counter() - begun
            DEPTH[0] -= 1

    return run


def synchronize() -> None:
    """Waits for the device."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def install(module: Any) -> None:
    """Clocks round the model compute of a run that is about to train."""
    import rlkit.training.update
    from rlkit.models.log_probs import trunk_and_head

    rlkit.training.update.forward_logprobs = timed("score", rlkit.training.update.forward_logprobs)  # type: ignore[assignment]
    trunk, head = trunk_and_head(module.model)
    for part in (trunk, head.module):
        part.forward = timed("decode", part.forward)  # outside `score` a trunk runs in decoding alone
    for engine in ("cached.sampler", "transformers"):
        engine_module: Any = sys.modules[f"rlkit.engines.{engine}"]
        engine_module.draw = timed("decode", engine_module.draw)
    fast = sys.modules["rlkit.engines.cached.forward"].Trunk  # passes the trunk's own forward by
    fast.__call__ = timed("decode", fast.__call__)
    module.manual_backward = timed("backward", module.manual_backward)
    optimizers = module.optimizers()
    for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
        optimizer.step = timed("optimizer", optimizer.step)


def clocks(run: Path, /) -> Any:
    """A callback: the parts of every step, gathered in bench.MARKS."""
    import lightning as L

    bench.MARKS.update(steps=[], last=0.0)

    class Clocks(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            install(module)
            bench.MARKS["last"] = time.perf_counter()

        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            SPENT["began"] = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            now = time.perf_counter()
            row = module.metrics
            spent = {name: SPENT[name] for name in MODEL}
            inside = row["perf/step_s"]
            parts = {name: row[f"perf/{name}_s"] for name in ("generate", "reward", "update")}
            spent |= {
                "generation": parts["generate"] - spent["decode"],
                "reward": parts["reward"],
                "update": parts["update"] - spent["score"] - spent["backward"] - spent["optimizer"],
            }
            total = now - bench.MARKS["last"]
            known = sum(spent.values())
            spent |= {"metrics": max(0.0, inside - known), "after": total - max(inside, known), "total": total}
            spent["own"] = row.get("perf/outside_model_frac", -1.0)
            bench.MARKS["steps"].append(spent)
            bench.MARKS["last"] = now
            SPENT.clear()

    return Clocks()


def side(overrides: list[str]) -> list[dict[str, float]]:
    """The parts of the steps of one run in this process."""
    from rlkit.commands.cli import main

    with tempfile.TemporaryDirectory() as folder:
        given = ["train", f"hydra.run.dir={folder}/run", "evaluation.n=0", "+callbacks.clocks={_target_: overhead.clocks, _partial_: true}"]
        if main([*given, *overrides]):
            raise RuntimeError(f"rlkit train {' '.join(overrides)} failed")
    return bench.MARKS["steps"]


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        import overhead  # what Hydra imports is another module than the one that runs

        bench.answer(overhead.side(json.loads(sys.argv[2])))
        return
    parser = bench.parser(__doc__, rounds=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("overrides", nargs="*", help="of rlkit train")
    given = parser.parse_intermixed_args()
    if given.quick:
        given.rounds, given.steps, given.overrides = 1, 2, ["batch.prompts=2", "batch.group_size=2", *given.overrides]
    overrides = [f"trainer.steps={given.steps}", f"trainer.threads={given.threads}", *given.overrides]
    overrides.append(f"trainer.accelerator={'gpu' if given.device == 'cuda' else 'cpu'}")
    command = [bench.PYTHON, __file__, "--side", json.dumps(overrides)]
    runs = [bench.child(command, threads=given.threads) for _ in range(given.rounds)]
    steps = [step for run in runs for step in run[1:]]
    parts = [name for name in steps[0] if name not in ("total", "own")]
    outside = statistics.median(sum(step[name] for name in parts if name not in MODEL) / step["total"] for step in steps)
    own = [step["own"] for step in steps if step["own"] >= 0]
    last = {"step_s": round(statistics.median(step["total"] for step in steps), 4), "outside": round(outside, 4)}
    last |= {"outside_model_frac": round(statistics.median(own), 4) if own else "", "overrides": " ".join(given.overrides)}
    last |= {"steps": given.steps, "rounds": given.rounds} | bench.provenance(given.threads, given.device)
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
    print(f"outside model compute: {outside:.1%} of a step; goal: 5 %")


if __name__ == "__main__":
    main()
