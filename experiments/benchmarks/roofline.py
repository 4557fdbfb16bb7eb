"""Does the roofline model of `rlkit check check.device=…` give the seconds of a step? Measured on this machine's processor.

    python experiments/benchmarks/roofline.py [--rounds 3]

Three sizes of model, 0.9, 4.5 and 26 million parameters, none of them special to the model but for the first, which ships with rlkit and
which it measures. Replies never end, so that a step's tokens are known. Rounds alternate between a forecast and a run of `rlkit train`,
each in a process of its own; both count processor seconds of one thread, so that a busy machine moves them little. roofline.csv: a row a
size with both, their ratio, and whether it lies within 25 %; the parts that both know stand beside.
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

SIZES = {"0.9": None, "4.5": (256, 5), "26": (512, 8)}  # millions of parameters → hidden size, layers; None: the embedded model
WITHIN = 0.25
BASE = [
    "model._target_=bench.endless",
    "environment=single_turn",
    "reward=numeric",
    "reward.terms.numeric.fn._target_=roofline.spread",
    "trainer.accelerator=cpu",
    "trainer.threads=1",
]


def spread(rollout: Any, /) -> float:
    """1 or 0, by the length of the text: random weights solve nothing, and groups that agree teach nothing."""
    text = rollout.steps[-1].content if rollout.steps else ""
    return 1.0 if text.strip() == rollout.task.answer else float(bool(text) and sum(map(ord, text)) % 2)


def processor_clock(run: Path, /) -> Any:
    """A callback: processor seconds at the start of training and at the end of every step, in bench.MARKS."""
    import lightning as L

    bench.MARKS.update(ends=[], rows=[])

    class Clock(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            bench.MARKS["ends"].append(time.process_time())

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            bench.MARKS["ends"].append(time.process_time())
            bench.MARKS["rows"].append(module.metrics)

    return Clock()


def model_folder(size: str, folder: Path) -> str:
    """A model of this size with random weights, beside the embedded tokenizer; its path."""
    from rlkit.models.load import TINY, pretrained_config, pretrained_tokenizer

    if SIZES[size] is None:
        return "tiny"
    import torch
    from transformers import AutoModelForCausalLM

    hidden, layers = SIZES[size]
    config = pretrained_config(str(TINY))
    heads = {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64, "layer_types": ["full_attention"] * layers}
    config.update({"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, **heads})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    pretrained_tokenizer("tiny").save_pretrained(folder / "model")
    return str(folder / "model")


def overrides(given: dict[str, Any], path: str) -> list[str]:
    """Of a run that is measured, and of the same run that is forecast."""
    sizes = [f"batch.prompts={given['prompts']}", f"batch.group_size={given['group']}", f"generation.max_new_tokens={given['tokens']}"]
    return [*BASE, *sizes, f"model.path={path}", f"trainer.steps={given['steps']}"]


def measured(given: dict[str, Any]) -> dict[str, float]:
    """Processor seconds of a step, median without the first: of all of it, and of its update."""
    from rlkit.commands.cli import main

    with tempfile.TemporaryDirectory() as folder:
        words = overrides(given, model_folder(given["size"], Path(folder)))
        quiet = ["logger=none", "schedule=constant", "evaluation.n=0", "~callbacks.checkpoint", "~callbacks.samples"]
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
    """What `rlkit check check.device=cpu` expects of the same run: seconds by name."""
    from rlkit.commands import forecast
    from rlkit.config.compose import compose, experiment
    from rlkit.models import roofline

    with tempfile.TemporaryDirectory() as folder:
        composed = compose(overrides(given, model_folder(given["size"], Path(folder))))
        x = experiment(composed)
        shape = forecast.shape_of_run(x)
        load, _ = forecast.load_of(x, composed.config, {"reply_share": "1"})
    card = forecast.measured(shape, 1, time.process_time)
    found = roofline.forecast(card, shape, load)
    return {"step": found.total, "parts": dict(found.seconds), "parameters": shape.parameters, "card": card._asdict()}


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        given = json.loads(sys.argv[3])
        bench.answer({"measured": measured, "expected": expected}[sys.argv[2]](given))
        return
    parser = bench.parser(__doc__, rounds=3, threads=1, device=False)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES), help="millions of parameters")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--steps", type=int, default=4, help="of a process; the first is not counted")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.sizes, options.prompts, options.group, options.tokens, options.steps = 1, ["0.9"], 2, 2, 8, 2
    rows = []
    for size in options.sizes:
        given = {name: getattr(options, name) for name in ("prompts", "group", "tokens", "steps")} | {"size": size}
        runs: dict[str, list[Any]] = {"expected": [], "measured": []}
        for _ in range(options.rounds):
            for side, own in runs.items():
                own.append(bench.child([bench.PYTHON, __file__, "--side", side, json.dumps(given)], threads=1))
        rows.append(row_of(given, runs, options.rounds))
    bench.write(options.out, "roofline", [row | bench.provenance(1) for row in rows])
    outside = [row["million"] for row in rows if not row["within"]]
    print(f"{'all within' if not outside else f'outside: {outside} million parameters;'} {WITHIN:.0%}")


def row_of(given: dict[str, Any], runs: dict[str, list[Any]], rounds: int) -> dict[str, Any]:
    """One size: medians over the rounds of the forecast and of the measured step."""

    def median(side: str, of: Any) -> float:
        return statistics.median(of(run) for run in runs[side])

    step, seen = median("expected", lambda run: run["step"]), median("measured", lambda run: run["step"])
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
