"""The held-out curve: before the first step, every n steps, and after the last."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import lightning as L

from rlkit import ranks, rng
from rlkit.callbacks.metrics import append_row
from rlkit.callbacks.terminal import held_out, how_sampled
from rlkit.callbacks.token_values import save_tokens
from rlkit.deadline import process_ends_after
from rlkit.files import lenient
from rlkit.models.chat import decode
from rlkit.rollouts import save_rollouts
from rlkit.rollouts.evaluation import greedy_accuracy
from rlkit.settings import Evaluation
from rlkit.types import Task

KEPT = 16  # held-out rollouts that an evaluation writes, of the same tasks each time: how an answer changes
INTERVALS = {"accuracy": "interval", "reward": "reward_interval"}  # what a held-out result says → under which key its interval stands


class HeldOut(L.Callback):
    """Adds `eval/*` to the row of a step; its time is not the step's. `results` maps RL step → result."""

    def __init__(self, tasks: Sequence[Task], metrics: Path, results: dict[int, dict[str, Any]]):
        self.tasks, self.metrics, self.results = tasks, metrics, results

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        if self.tasks and module.rl_step == 0 and not self.results:  # a resumed run has nothing to add to the rows before it
            module.metrics = row = self.evaluate(trainer, module)
            append_row(self.metrics, module.rl_step, row)
            for logger in trainer.loggers:
                logger.log_metrics(row, step=module.rl_step)
            temperature = module.experiment.evaluation.curve_temperature
            trainer.print(f"before: {held_out(row)} on {len(self.tasks)} problems, {how_sampled(temperature)}")

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        every, stop_at = module.experiment.evaluation.every, module.experiment.evaluation.stop_at
        if not self.tasks or not (trainer.should_stop or (every and module.rl_step % every == 0)):
            return
        module.metrics |= self.evaluate(trainer, module)
        if stop_at is not None and module.metrics["eval/accuracy"] >= stop_at:
            trainer.should_stop = True

    def evaluate(self, trainer: L.Trainer, module: Any) -> dict[str, float]:
        """One pass over the held-out tasks."""
        started = time.perf_counter()
        x = module.experiment
        forward = trainer.strategy.precision_plugin.forward_context
        watch = in_time(x.evaluation, f"the evaluation after step {module.rl_step}")
        with watch, forward(), ranks.whole_weights(module.model), rng.kept():  # it moves nobody's random numbers
            result, rollouts = greedy_accuracy(
                module.policy, self.tasks, seed=x.evaluation.seed, **x.held_out(x.evaluation.curve_temperature)
            )
        self.results[module.rl_step] = result
        if trainer.is_global_zero:
            name = self.metrics.parent / "held_out" / f"step_{module.rl_step:06d}"
            with lenient(f"held_out/{name.name}"):
                save_rollouts(name.with_suffix(".jsonl.gz"), rollouts[:KEPT])
                save_tokens(name.with_suffix(".tokens.jsonl.gz"), rollouts[:KEPT], lambda ids: decode(module.policy.codec, ids))
        return result_row(result) | {"perf/eval_s": time.perf_counter() - started}


def in_time(settings: Evaluation, name: str) -> AbstractContextManager[None]:
    """The block in which an evaluation, or a part of one, is played and scored: at its deadline the process ends and says so."""
    return process_ends_after(settings.max_time, lambda: f"{name} hangs: nothing within evaluation.max_time={settings.max_time:g} minutes")


def result_row(result: Mapping[str, Any]) -> dict[str, float]:
    """A held-out result as `eval/*`, and as `eval/part/NAME/*` that of each part of a mixture."""
    rows = {"eval/": result} | {f"eval/part/{part}/": own for part, own in result.get("parts", {}).items()}
    out: dict[str, float] = {}
    for prefix, own in rows.items():
        for name, interval in INTERVALS.items():
            low, high = own[interval]
            out |= {prefix + name: own[name], f"{prefix}{name}_low": low, f"{prefix}{name}_high": high}
        out |= {f"{prefix}n": own["n"]} if own is not result else {}
    return out


def result_of(row: Mapping[str, Any], n: int, temperature: float) -> dict[str, Any]:
    """The inverse: the result of `n` tasks as an earlier process of the run wrote it."""

    def read(prefix: str, n: int) -> dict[str, Any]:
        out: dict[str, Any] = {"n": n, "temperature": temperature}
        for name, interval in INTERVALS.items():
            out |= {name: row[prefix + name], interval: [row[f"{prefix}{name}_low"], row[f"{prefix}{name}_high"]]}
        return out

    suffix = "/accuracy_low"
    named = [key.removeprefix("eval/part/").removesuffix(suffix) for key in row if key.startswith("eval/part/") and key.endswith(suffix)]
    parts = {part: read(f"eval/part/{part}/", row[f"eval/part/{part}/n"]) for part in named}
    return read("eval/", n) | ({"parts": parts} if parts else {})
