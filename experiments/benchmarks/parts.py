"""Where do the processor seconds of a training step go, and how many would the arithmetic take?

    rlkit get smollm2_135m
    python experiments/benchmarks/parts.py [--precision float32 bf16] [--steps 4] [--threads 1]

The model is SmolLM2-135M with adapters of rank 16 on all projections, no KL, and one update per
step. A step has 4 word problems of about GSM8K's length, with 8 replies of at most 64 tokens each.
Every precision runs in its own process. The first step costs more than later ones; it has its own
column and is otherwise left out. `before_s` is spent before it, on imports, the model and its
checks.

parts.csv has a row for each precision and part: prefill (reading the contexts), decode, scoring
(log-probs before the update), update, other. `tokens` is the number of tokens through the model in
that part. `limit_s` is the time of the part's matrix products alone. The operations are 2 · weights
· tokens for a forward pass, the same again for a backward pass through frozen weights, and 2 ·
vocabulary · hidden for each predicted token. They are divided by the measured rate of the same
products in this process, at `rows` rows each. Attention, norms, adapters, sampling and the
optimizer are not in the limit.

With `--steps 0` nothing is trained, and products.csv has the rate of the products alone.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench

PARTS = ("prefill", "decode", "scoring", "update", "other")
ROWS = {"prefill": 512, "decode": 32, "scoring": 512, "update": 512}  # rows of a matrix product
PRECISIONS = {"float32": "32-true", "bf16": "bf16-mixed"}
STEPS: list[dict[str, float]] = []  # a step's seconds by part, and its tokens as "tokens_PART"
BEFORE: list[float] = []  # processor seconds from the start of the process to the first step


class Meter:
    """Processor seconds and tokens of each part of the current step."""

    def __init__(self) -> None:
        self.begun = time.process_time()
        self.found: Counter[str] = Counter()
        self.inside = False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add a block's seconds to a part; a part inside another part counts for the outer one."""
        if self.inside:
            yield
            return
        self.inside = True
        begun = time.process_time()
        try:
            yield
        finally:
            self.inside = False
            self.found[name] += time.process_time() - begun

    def end_step(self) -> None:
        """Store the figures of the step, and begin the next one."""
        now = time.process_time()
        known = sum(self.found[name] for name in PARTS)
        STEPS.append({"step": now - self.begun, "other": now - self.begun - known, **self.found})
        self.found.clear()
        self.begun = now


def measure_calls(meter: Meter) -> None:
    """Replace the functions of each part by versions that measure their time and count tokens."""
    from rlkit.engines.cached.scheduler import Scheduler
    from rlkit.training.update import drift, minibatch, scored, step

    def timed(home: Any, name: str, part: str, count: Callable[..., None] | None = None) -> None:
        inner = getattr(home, name)

        def measured(*arguments: Any, **keywords: Any) -> Any:
            if count is not None:
                count(*arguments)
            with meter.part(part):
                return inner(*arguments, **keywords)

        setattr(home, name, measured)

    def counted(home: Any, part: str) -> None:
        inner = home.pack

        def pack(*arguments: Any, **keywords: Any) -> Any:
            packed = inner(*arguments, **keywords)
            note(part, len(packed.ids), len(packed.targets))
            return packed

        home.pack = pack

    def note(part: str, tokens: int, predicted: int) -> None:
        meter.found.update({f"tokens_{part}": tokens, f"predicted_{part}": predicted})

    def note_contexts(scheduler: Any, rows: Any) -> None:
        contexts = {(row.prompt, row.known): len(row.context) - row.known for row in rows}
        note("prefill", sum(contexts.values()), len(rows))

    def note_draws(scheduler: Any) -> None:
        draws = len(scheduler.slots.rows) * scheduler.check_every
        note("decode", draws, draws)

    timed(Scheduler, "read", "prefill", note_contexts)
    timed(Scheduler, "draw", "decode", note_draws)
    for home in (scored, drift):
        timed(home, "compute_batch_logprobs", "scoring")
    timed(step, "make_one_update", "update")
    counted(scored, "scoring")
    counted(minibatch, "update")


def metered(run: Path, /) -> Any:
    """Return a callback that ends the meter's steps."""
    import lightning as L

    meter = Meter()
    measure_calls(meter)

    class Metered(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            meter.found.clear()
            meter.begun = time.process_time()
            BEFORE.append(meter.begun)

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            meter.end_step()

    return Metered()


# ---------------------------------------------------------------------------- the limit


def read_shape_of(model: str) -> Any:
    """Return the shape of the embedded model, or of a model that `rlkit get` has fetched."""
    from rlkit.extras.forecast.roofline import read_shape
    from rlkit.models.load import find_fetched_folder, pretrained_config

    folder = find_fetched_folder(model)
    return read_shape(pretrained_config(str(folder) if folder and folder.exists() else model))


def product_rate(shape: Any, rows: int, dtype: Any) -> float:
    """Return the FLOP per processor second of one layer's products, at `rows` rows each."""
    import torch

    ends = [
        (shape.hidden, shape.heads * shape.head_dim),
        (shape.hidden, 2 * shape.kv_heads * shape.head_dim),
        (shape.heads * shape.head_dim, shape.hidden),
        (shape.hidden, 2 * shape.mlp),
        (shape.mlp, shape.hidden),
    ]
    layers = [[torch.randn(m, n).to(dtype) for n, m in ends] for _ in range(8)]
    inputs = [torch.randn(rows, n).to(dtype) for n, _ in ends]
    work = 2 * rows * sum(n * m for n, m in ends) * len(layers)
    rates = []
    for _ in range(5):
        begun = time.process_time()
        for weights in layers:
            for weight, given in zip(weights, inputs, strict=True):
                torch.nn.functional.linear(given, weight)
        rates.append(work / (time.process_time() - begun))
    return max(rates)


def measure_products(model: str) -> list[dict[str, Any]]:
    """Return a row for each precision and number of rows."""
    import torch

    shape = read_shape_of(model)
    dtypes = {"float32": torch.float32, "bf16": torch.bfloat16}
    return [
        {
            "model": model,
            "precision": precision,
            "rows": rows,
            "gflops": round(product_rate(shape, rows, dtype) / 1e9, 1),
        }
        for precision, dtype in dtypes.items()
        for rows in sorted(set(ROWS.values()))
    ]


def flops(shape: Any, part: str, tokens: float, predicted: float) -> float:
    """Return the FLOP of the matrix products with weights.

    An update counts the backward pass to the inputs too.
    """
    passes = 2 if part == "update" else 1
    return passes * 2 * (shape.used * tokens + shape.vocab * shape.hidden * predicted)


def measure(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one precision and return its rows."""
    import torch
    from check_forecast import stories

    from rlkit.commands.cli import main as run

    with tempfile.TemporaryDirectory() as folder:
        tasks = Path(folder) / "tasks.jsonl"
        tasks.write_text("".join(json.dumps(row) + "\n" for row in stories(64)))
        status = run(
            [
                "train",
                f"hydra.run.dir={folder}/run",
                f"model={given['model']}",
                "task=jsonl",
                f"task.path={tasks}",
                "environment=single_turn",
                "reward=numeric",
                "reward.terms.numeric.fn._target_=bench.spread",
                "kl=none",
                "reference=none",
                "batch.prompts=4",
                "batch.group_size=8",
                "algorithm.minibatches=1",
                "generation.max_new_tokens=64",
                "evaluation.n=0",
                "logger=none",
                f"trainer.steps={given['steps']}",
                f"trainer.precision={PRECISIONS[given['precision']]}",
                f"trainer.threads={given['threads']}",
                "+callbacks.parts={_target_: parts.metered, _partial_: true}",
                *given["overrides"],
            ]
        )
    if status:
        raise RuntimeError(f"rlkit train ended with {status}")
    from parts import BEFORE, STEPS  # the callback's module; this file runs as __main__

    shape = read_shape_of(given["model"])
    dtype = torch.float32 if given["precision"] == "float32" else torch.bfloat16
    rows = []
    for part in PARTS:
        mean = {
            name: statistics.fmean(step.get(f"{name}{part}", 0.0) for step in STEPS[1:])
            for name in ("", "tokens_", "predicted_")
        }
        rate = product_rate(shape, ROWS[part], dtype) if part in ROWS else 0.0
        work = flops(shape, part, mean["tokens_"], mean["predicted_"])
        limit = work / rate if rate else 0.0
        rows.append(
            {
                "model": given["model"],
                "precision": given["precision"],
                "part": part,
                "processor_s": round(mean[""], 3),
                "limit_s": round(limit, 3),
                "times_limit": round(mean[""] / limit, 2) if limit else "",
                "tokens": round(mean["tokens_"]),
                "gflop": round(work / 1e9, 1),
                "gflops_of_products": round(rate / 1e9, 1),
                "rows": ROWS.get(part, ""),
                "step_s": round(statistics.fmean(step["step"] for step in STEPS[1:]), 3),
                "first_step_s": round(STEPS[0]["step"], 3),
                "before_s": round(BEFORE[0], 3),
                "steps": len(STEPS) - 1,
            }
        )
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        side = json.loads(sys.argv[2])
        bench.answer(measure(side) if side["steps"] else measure_products(side["model"]))
        return
    parser = bench.parser(__doc__, rounds=1, threads=1, device=False)
    parser.add_argument("--model", default="smollm2_135m")
    parser.add_argument("--precision", nargs="+", choices=tuple(PRECISIONS), default=["float32"])
    parser.add_argument("--steps", type=int, default=4, help="0: only the products")
    parser.add_argument("overrides", nargs="*", help="of rlkit train, for both precisions")
    given = parser.parse_args()
    if given.quick:
        given.model, given.steps = "tiny", 2
    if not given.steps:
        command = [bench.PYTHON, __file__, "--side", json.dumps(vars(given) | {"out": ""})]
        rows = [
            r | bench.provenance(given.threads) for r in bench.child(command, threads=given.threads)
        ]
        bench.write(given.out, "products", rows)
        return
    for precision in given.precision:
        side = {**vars(given), "precision": precision, "out": ""}
        command = [bench.PYTHON, __file__, "--side", json.dumps(side)]
        found = bench.child(command, threads=given.threads)
        rows = [row | bench.provenance(given.threads) for row in found]
        bench.write(given.out, "parts", rows, by=("model", "precision"))


if __name__ == "__main__":
    main()
