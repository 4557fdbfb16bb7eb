"""The held-out curve: before the first step, every n steps, and after the last."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L

from rlkit.callbacks.metrics import append_row
from rlkit.rollouts.evaluation import greedy_accuracy
from rlkit.types import Task


class HeldOut(L.Callback):
    """Adds `eval/*` to the row of a step; its time is not the step's. `results` maps RL step → result."""

    def __init__(self, tasks: Sequence[Task], metrics: Path, results: dict[int, dict[str, Any]]):
        self.tasks, self.metrics, self.results = tasks, metrics, results

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        if self.tasks and module.rl_step not in self.results:
            row = self.evaluate(trainer, module)
            append_row(self.metrics, module.rl_step, row)
            for logger in trainer.loggers:
                logger.log_metrics(row, step=module.rl_step)
            trainer.print(f"before: held-out accuracy {row['eval/accuracy']:.3f} on {len(self.tasks)} problems, greedy")

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        every, stop_at = module.experiment.evaluation.every, module.experiment.evaluation.stop_at
        if not self.tasks or not (trainer.should_stop or (every and module.rl_step % every == 0)):
            return
        module.metrics |= self.evaluate(trainer, module)
        if stop_at is not None and module.metrics["eval/accuracy"] >= stop_at:
            trainer.should_stop = True

    def evaluate(self, trainer: L.Trainer, module: Any) -> dict[str, float]:
        """One greedy pass over the held-out tasks."""
        started = time.perf_counter()
        x = module.experiment
        with trainer.strategy.precision_plugin.forward_context():
            result, _ = greedy_accuracy(
                module.policy,
                self.tasks,
                reward=x.evaluation.reward,
                generate=x.generation.engine,
                environment=x.environment,
                max_new_tokens=x.evaluation.max_new_tokens or x.generation.max_new_tokens,
                max_thinking_tokens=x.generation.max_thinking_tokens,
            )
        self.results[module.rl_step] = result
        return result_row(result) | {"perf/eval_s": time.perf_counter() - started}


def result_row(result: Mapping[str, Any]) -> dict[str, float]:
    """A held-out result as `eval/*`, and as `eval/part/NAME/*` that of each part of a mixture."""
    rows = {"eval/": result} | {f"eval/part/{part}/": own for part, own in result.get("parts", {}).items()}
    out: dict[str, float] = {}
    for prefix, own in rows.items():
        low, high = own["interval"]
        named = {"accuracy": own["accuracy"], "accuracy_low": low, "accuracy_high": high, "reward": own["reward"]}
        out |= {prefix + name: value for name, value in named.items()} | ({f"{prefix}n": own["n"]} if own is not result else {})
    return out


def result_of(row: Mapping[str, Any], n: int) -> dict[str, Any]:
    """The inverse: the result of `n` tasks as an earlier process of the run wrote it."""

    def read(prefix: str, n: int) -> dict[str, Any]:
        interval = [row[f"{prefix}accuracy_low"], row[f"{prefix}accuracy_high"]]
        return {"accuracy": row[f"{prefix}accuracy"], "interval": interval, "n": n, "reward": row[f"{prefix}reward"]}

    suffix = "/accuracy_low"
    named = [key.removeprefix("eval/part/").removesuffix(suffix) for key in row if key.startswith("eval/part/") and key.endswith(suffix)]
    parts = {part: read(f"eval/part/{part}/", row[f"eval/part/{part}/n"]) for part in named}
    return read("eval/", n) | ({"parts": parts} if parts else {})
