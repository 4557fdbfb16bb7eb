"""Does the roofline model of `rlkit check` predict the seconds of a step on this processor?

    python experiments/benchmarks/roofline.py [--rounds 2]        # about five minutes

There are three models, of 0.9, 4.5 and 26 million parameters. The first ships with rlkit, and the
roofline model is calibrated on it; the others are new to it. Replies never end, so that the number
of tokens of a step is known. Rounds alternate between a forecast (`check.device=cpu`) and a run of
`rlkit train`, each in its own process. Both count processor seconds of one thread, and a busy
machine changes them little.

roofline.csv has a row for each size: both times, their ratio, and whether the ratio is within 25 %
of 1. It also has the parts known to both sides.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench

WITHIN = 0.25
BASE = [*bench.SPREAD, "trainer.accelerator=cpu", "trainer.threads=1"]


def processor_clock(run: Path, /) -> Any:
    """Return a callback that stores processor seconds in bench.MARKS.

    It stores the time at the start of training and at the end of every step.
    """
    import lightning as L

    bench.MARKS.update(ends=[], rows=[])

    class Clock(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            bench.MARKS["ends"].append(time.process_time())

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            bench.MARKS["ends"].append(time.process_time())
            bench.MARKS["rows"].append(module.metrics)

    return Clock()


# ---------------------------------------------------------- the processor of this machine as a card


def processor(shape: Any, threads: int, clock: Callable[[], float] = time.process_time) -> Any:
    """Describe this machine's processor as a card for the roofline model.

    The rates of matrix products and of the memory are measured. A decode step and an update of the
    embedded model are measured at two numbers of tokens each. Their time beyond the products
    consists of a part for each call and a part for each token. Both parts are scaled to another
    model by its number of layers and its width.

    Args:
      shape: shape of the model to forecast; products are measured at its sizes.
      threads: number of torch threads. clock: returns seconds; a processor clock needs one thread.
    """
    import torch

    from rlkit.extras.forecast.roofline import read_shape
    from rlkit.models.load import load_policy

    torch.set_num_threads(threads)
    policy = load_policy(path="tiny")._replace(eos_token_ids=(1,))  # no reply ends
    tiny = read_shape(policy.model.config)
    bandwidth = stream_rate(clock)
    own, other = (
        dict(zip(("train", "decode"), product_rates(s, clock), strict=True)) for s in (tiny, shape)
    )
    few, many, reply = 4, 64, 32
    steps = {rows: decode_seconds(policy, rows, reply, clock) for rows in (few, many)}
    entry = draw_seconds(tiny.vocab, clock)
    row = max(0.0, (steps[many] - steps[few]) / (many - few))
    products = 2 * (tiny.used + tiny.hidden * tiny.vocab)
    beyond = row - products / own["decode"] - tiny.vocab * entry
    short, long = 128, 2048
    passes = {tokens: update_seconds(policy, tokens, clock) for tokens in (short, long)}
    token = max(0.0, (passes[long] - passes[short]) / (long - short))
    width = tiny.layers * tiny.hidden
    from rlkit.extras.forecast.roofline import LAYER_KERNELS, STEP_KERNELS, Card

    return Card(
        name=f"the processor of this machine, {torch.get_num_threads()} threads",
        memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        bandwidth=bandwidth,
        flops=other["train"],
        decode_flops=other["decode"],
        kernel_s=max(0.0, steps[few] - few * row) / (tiny.layers * LAYER_KERNELS + STEP_KERNELS),
        entry_s=entry,
        itemsize=4,
        touch_s=max(0.0, beyond) / width,
        train_touch_s=max(0.0, token - 3 * products / own["train"]) / width,
        train_layer_s=max(0.0, passes[short] - short * token) / tiny.layers,
        source="measured now",
    )


def taken(work: Callable[[], Any], clock: Callable[[], float], rounds: int = 3) -> float:
    """Return the shortest time of a few rounds in seconds, after one round to warm up."""
    work()
    spent = []
    for _ in range(rounds):
        begun = clock()
        work()
        spent.append(clock() - begun)
    return min(spent)


def stream_rate(clock: Callable[[], float]) -> float:
    """Return the bytes per second read and written by a copy too large for any cache."""
    import torch

    source = torch.ones(1 << 24)
    target = torch.empty_like(source)
    return 2 * source.nbytes / taken(lambda: target.copy_(source), clock)


def product_rates(shape: Any, clock: Callable[[], float]) -> tuple[float, float]:
    """Return the operations per second of float32 products of this model's MLP.

    The first rate is for forward and backward of a micro-batch, the second for the rows of a decode
    step.
    """
    import torch

    weight = torch.randn(shape.mlp, shape.hidden, requires_grad=True)
    rates = []
    for rows, backward in ((2048, True), (64, False)):
        x = torch.randn(rows, shape.hidden, requires_grad=True)
        upstream, operations = (
            torch.ones(rows, shape.mlp),
            2 * rows * weight.numel() * (3 if backward else 1),
        )
        repeats = max(1, int(4e8 / operations))

        def work(
            x: Any = x, upstream: Any = upstream, backward: bool = backward, repeats: int = repeats
        ) -> None:
            for _ in range(repeats):
                with torch.set_grad_enabled(backward):
                    out = torch.nn.functional.linear(x, weight)
                if backward:
                    torch.autograd.grad(out, (x, weight), upstream)

        rates.append(operations * repeats / taken(work, clock))
    return rates[0], rates[1]


def decode_seconds(policy: Any, rows: int, tokens: int, clock: Callable[[], float]) -> float:
    """Return the seconds of one decode step of `rows` rows, including the engine's own work."""
    from rlkit.engines import Cached
    from rlkit.functional import mix
    from rlkit.system.loops import run, run_together
    from rlkit.types import SamplingParams

    params = SamplingParams(max_new_tokens=tokens)

    async def sampled(engine: Any) -> None:
        await engine.load(policy, 0)
        await run_together(
            engine.generate(i, range(100, 132), mix(0, i), params) for i in range(rows)
        )

    engine = Cached()
    return taken(lambda: run(sampled(engine)), clock) / tokens


def draw_seconds(vocab: int, clock: Callable[[], float]) -> float:
    """Return the seconds of sampling, per row and vocabulary entry."""
    import torch

    from rlkit.engines.transformers import draw

    logits, seeds = torch.randn(64, vocab), torch.arange(64)
    return taken(lambda: draw(logits, seeds, seeds, 1.0), clock, 10) / logits.numel()


def update_seconds(policy: Any, tokens: int, clock: Callable[[], float]) -> float:
    """Return the seconds of forward and backward on rows of 64 tokens.

    Half of every row is its prompt.
    """
    import torch

    from rlkit.models.log_probs import forward_logprobs
    from rlkit.models.packing import pack

    ids = torch.randint(0, 700, (tokens // 64, 64), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(64) >= 32).expand(ids.shape)

    def work() -> None:
        forward_logprobs(policy.model, pack(ids, mask)).logprobs.sum().backward()

    return taken(work, clock)


# --------------------------------------------------------------------------------------- both sides


def overrides(given: dict[str, Any], path: str) -> list[str]:
    """Return the overrides of a run; the measured run and the forecast have the same."""
    sizes = [
        f"batch.prompts={given['prompts']}",
        f"batch.group_size={given['group']}",
        f"generation.max_new_tokens={given['tokens']}",
    ]
    return [*BASE, *sizes, f"model.path={path}", f"trainer.steps={given['steps']}"]


def measured(given: dict[str, Any]) -> dict[str, float]:
    """Return the median processor seconds of a step and of its update, without the first step."""
    from rlkit.commands.cli import main

    with tempfile.TemporaryDirectory() as folder:
        words = overrides(given, bench.model_folder(given["size"], Path(folder)))
        quiet = [
            "logger=none",
            "schedule=constant",
            "evaluation.n=0",
            "~callbacks.checkpoint",
            "~callbacks.samples",
        ]
        clock = ["+callbacks.clock={_target_: roofline.processor_clock, _partial_: true}"]
        if main(["train", f"hydra.run.dir={folder}/run", *quiet, *clock, *words]):
            raise RuntimeError("rlkit train failed")
    import roofline

    ends, rows = roofline.bench.MARKS["ends"], roofline.bench.MARKS["rows"]
    if any(row["optim/updates"] < 1 for row in rows):
        raise RuntimeError("a step had no update: its seconds are not those of the forecast")
    steps = [b - a for a, b in itertools.pairwise(ends)][1:]
    return {
        "step": statistics.median(steps),
        "update": statistics.median(row["perf/update_processor_s"] for row in rows[1:]),
        "sampled": rows[-1]["tokens/sampled"],
    }


def expected(given: dict[str, Any]) -> dict[str, Any]:
    """Return the forecast of `rlkit check check.device=cpu` for the same run: seconds by name."""
    from rlkit.config.compose import compose, experiment
    from rlkit.extras import forecast

    with tempfile.TemporaryDirectory() as folder:
        composed = compose(overrides(given, bench.model_folder(given["size"], Path(folder))))
        x = experiment(composed)
        shape = forecast.find_shape(x)
        load, _ = forecast.measure_load(x, composed.config, {"reply_share": "1"})
    card = processor(shape, 1)
    found = forecast.forecast(card, shape, load)
    return {
        "step": found.total,
        "parts": dict(found.seconds),
        "parameters": shape.parameters,
        "card": card._asdict(),
    }


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        given = json.loads(sys.argv[3])
        bench.answer({"measured": measured, "expected": expected}[sys.argv[2]](given))
        return
    parser = bench.parser(__doc__, rounds=2, threads=1, device=False)
    parser.add_argument(
        "--sizes",
        nargs="+",
        choices=tuple(bench.SIZES),
        default=list(bench.SIZES),
        help="millions of parameters",
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument(
        "--steps", type=int, default=3, help="of a process; the first is not counted"
    )
    options = parser.parse_args()
    if options.quick:
        (
            options.rounds,
            options.sizes,
            options.prompts,
            options.group,
            options.tokens,
            options.steps,
        ) = (
            1,
            ["0.9"],
            2,
            2,
            8,
            2,
        )
    rows = []
    for size in options.sizes:
        given = {
            name: getattr(options, name) for name in ("prompts", "group", "tokens", "steps")
        } | {"size": size}
        runs: dict[str, list[Any]] = {"expected": [], "measured": []}
        for _ in range(options.rounds):
            for side, own in runs.items():
                own.append(
                    bench.child(
                        [bench.PYTHON, __file__, "--side", side, json.dumps(given)], threads=1
                    )
                )
        rows.append(row_of(given, runs, options.rounds))
    bench.write(options.out, "roofline", [row | bench.provenance(1) for row in rows])
    outside = [row["million"] for row in rows if not row["within"]]
    print(
        f"{'all within' if not outside else f'outside: {outside} million parameters;'} {WITHIN:.0%}"
    )


def row_of(given: dict[str, Any], runs: dict[str, list[Any]], rounds: int) -> dict[str, Any]:
    """Return the row of one size, with medians over the rounds of both sides."""

    def median(side: str, of: Any) -> float:
        return statistics.median(of(run) for run in runs[side])

    step, seen = (
        median("expected", lambda run: run["step"]),
        median("measured", lambda run: run["step"]),
    )
    update = median("expected", lambda run: run["parts"]["update"] + run["parts"]["scoring"])
    return {
        "million": round(runs["expected"][0]["parameters"] / 1e6, 2),
        "expected_s": round(step, 3),
        "measured_s": round(seen, 3),
        "expected_of_measured": round(step / seen, 3),
        "within": abs(step / seen - 1) <= WITHIN,
        "expected_update_s": round(update, 3),
        "measured_update_s": round(median("measured", lambda run: run["update"]), 3),
        "sampled": runs["measured"][0]["sampled"],
        **{name: given[name] for name in ("prompts", "group", "tokens", "steps")},
        "rounds": rounds,
    }


if __name__ == "__main__":
    main()
