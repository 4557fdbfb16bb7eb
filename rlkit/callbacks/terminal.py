"""What the terminal shows while a run trains: a bar that moves, or one line per RL step where the output is piped."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L


class Progress(L.Callback):
    """One line per RL step; on a terminal a bar with the time left below it."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.task: Any = None
        self.last_reward: float | None = None
        self.started = 0.0

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.started = time.perf_counter()
        if not sys.stdout.isatty():
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.bar = Bar(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[reward]}")
        )
        self.task = self.bar.add_task("training", total=module.total_steps, completed=module.rl_step, reward="")
        self.bar.start()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        line = step_line(module.rl_step, module.total_steps, module.metrics, self.last_reward)
        self.last_reward = module.metrics["reward/mean"]
        if self.bar is None:
            print(line, flush=True)
            return
        self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self.bar.update(self.task, completed=module.rl_step, total=module.total_steps, reward=f"reward {self.last_reward:.2f}")

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        if self.bar is not None:
            self.bar.stop()

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, module)


def step_line(step: int, total: int, row: dict[str, Any], last_reward: float | None) -> str:
    """`step 12/25 reward 0.43 (+0.02) kl 0.004 len 27 trunc 3% | gen 0.8s rew 0.0s upd 0.9s`."""
    change = "" if last_reward is None else f" ({row['reward/mean'] - last_reward:+.2f})"
    return (
        f"step {step:>{len(str(total))}}/{total} reward {row['reward/mean']:.2f}{change} kl {row['kl/ref_k3']:.4f} "
        f"len {row['len/mean']:.0f} trunc {row['len/truncated_frac']:.0%} | gen {row['perf/generate_s']:.1f}s "
        f"rew {row['perf/reward_s']:.1f}s upd {row['perf/update_s']:.1f}s{f' | {held_out(row)}' if 'eval/accuracy' in row else ''}"
    )


def held_out(row: dict[str, Any]) -> str:
    """`held-out accuracy 0.988`, and the mean reward where it says something else."""
    reward = f", reward {row['eval/reward']:.3f}" if row["eval/reward"] != row["eval/accuracy"] else ""
    return f"held-out accuracy {row['eval/accuracy']:.3f}{reward}"


def how_sampled(temperature: float) -> str:
    """What the figures of held-out tasks are of."""
    return f"sampled at temperature {temperature:g}" if temperature else "greedy"
