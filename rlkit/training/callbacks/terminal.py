"""Print the lines of a run while it trains. Each RL step has one line. On a terminal, there is also
a bar below the lines."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import lightning as L

from rlkit.system.output import clock

COLUMNS = 80  # the most characters in the line of a step
# printed once, above the lines of the steps
LEGEND = "each step: ... | seconds of sampling (+ scoring) + update, time left of the run"
LONG = 120.0  # seconds of sampling in a run that are announced
RECENT = 8  # the time left is estimated from this many steps


class ProgressLines(L.Callback):
    """Print one line per RL step with the time left. On a terminal, a bar below the lines counts
    the time down."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.task: Any = None
        self.last_reward: float | None = None
        self.seconds: deque[float] = deque(maxlen=RECENT)  # seconds of each of the last steps
        self.evaluation = 0.0  # seconds of the last evaluation
        self.countdown = TimeLeft()

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.evaluation = module.metrics.get("perf/eval_s", 0.0)
        print(LEGEND)
        if not sys.stdout.isatty():
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        left = TextColumn("{task.fields[left]}")
        reward = TextColumn("{task.fields[reward]}")
        self.bar = Bar(TextColumn("step"), MofNCompleteColumn(), BarColumn(), left, reward)
        self.task = self.bar.add_task(
            "training",
            total=module.total_steps,
            completed=module.rl_step,
            reward="",
            left=self.countdown,
        )
        self.bar.start()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        row = module.metrics
        self.seconds.append(row["perf/step_s"] + row["perf/between_s"])
        self.evaluation = row.get("perf/eval_s", self.evaluation)
        self.countdown.set(None if trainer.should_stop else self.left(module))
        line = step_line(
            module.rl_step, module.total_steps, row, self.last_reward, str(self.countdown)
        )
        self.last_reward = row["reward/mean"]
        lines = [line, *([f"  {measured}"] if (measured := format_held_out(row)) else [])]
        if self.bar is None:
            print("\n".join(lines), flush=True)
            return
        self.bar.console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
        self.bar.update(
            self.task,
            completed=module.rl_step,
            total=module.total_steps,
            reward=f"reward {self.last_reward:.2f}",
        )

    def left(self, module: Any) -> float:
        """Return the seconds until all steps of the run are done, or until trainer.max_time is over
        if this comes first."""
        evaluations = (
            count_evaluations_left(
                module.rl_step, module.total_steps, module.experiment.evaluation.every
            )
            if self.evaluation
            else 0
        )
        seconds = time_left(
            module.total_steps - module.rl_step, self.seconds, evaluations * self.evaluation
        )
        limit = module.experiment.trainer.max_time
        return (
            seconds
            if limit is None
            else min(seconds, module.started + 60 * limit - time.perf_counter())
        )

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        if self.bar is not None:
            self.bar.stop()

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, module)


class TimeLeft:
    """Show the time left as a text that counts down. The text is empty as long as the time is
    unknown."""

    def __init__(self) -> None:
        self.end: float | None = None

    def set(self, seconds: float | None) -> None:
        """Start to count down from this many seconds. With None, the text is empty."""
        self.end = None if seconds is None else time.perf_counter() + seconds

    def __str__(self) -> str:
        return "" if self.end is None else f"{clock(self.end - time.perf_counter())} left"


def time_left(steps: int, taken: Sequence[float], evaluations: float) -> float:
    """Estimate the seconds that remain in a run: `steps · median(taken) + evaluations`.

    The median is used because a single step may be unusually slow. For example, a step compiles
    code, or writes a checkpoint to a slow disk. Such a step says nothing about later steps.

    Args:
      steps: number of steps that remain.
      taken: seconds of each of the last steps.
      evaluations: seconds of the evaluations that remain.
    """
    return steps * statistics.median(taken) + evaluations


def count_evaluations_left(step: int, total: int, every: int) -> int:
    """Return the number of evaluations after `step`. A run is evaluated after every `every`-th
    step, and once after the last step. If `every` is 0, only the evaluation after the last step
    remains.

    >>> (
    ...     count_evaluations_left(0, 25, 10),
    ...     count_evaluations_left(10, 25, 10),
    ...     count_evaluations_left(20, 20, 10),
    ...     count_evaluations_left(3, 25, 0),
    ... )
    (3, 2, 0, 1)
    """
    if step >= total:
        return 0
    return ((total - 1) // every - step // every if every else 0) + 1


def step_line(
    step: int, total: int, row: dict[str, Any], last_reward: float | None, left: str = ""
) -> str:
    """Return the line of a step, such as `step 12/25 reward 0.43 (+0.02) kl 0.0041 len 27 trunc 3%
    | 0.8 + 0.9 s, 0:24 left`. The two numbers before `s` are the seconds of sampling and of the
    update.

    The line has at most 80 columns. If there is not enough room, first the change of the reward is
    left out, and then the seconds are added up. Metrics that do not exist, for example a KL without
    a reference, are left out. If nothing was scored, the loss takes the place of the reward. The
    seconds of scoring are shown separately if scoring takes at least half a second.
    """
    reward = row["reward/mean"]
    kl = row["kl/ref_k3"]
    cut = row["len/truncated_frac"]
    scoring = row["perf/reward_s"]
    change = "" if last_reward is None else f" ({reward - last_reward:+.2f})"
    seconds = [row["perf/generate_s"], *([scoring] if scoring >= 0.5 else []), row["perf/update_s"]]
    digits = 4 if kl < 1 else 1
    learns_rewards = math.isfinite(reward) and "reward/demonstration/mean" not in row
    line = ""
    for shown, parts in ((change, seconds), ("", seconds), ("", [sum(seconds)])):
        said = [
            f"step {step:>{len(str(total))}}/{total}",
            f"reward {reward:.2f}{shown}"
            if learns_rewards
            else f"loss {row.get('loss/total', math.nan):.3f}",
            *([] if math.isnan(kl) else [f"kl {kl:.{digits}f}"]),
            f"len {row['len/mean']:.0f}",
            *([f"trunc {cut:.0%}"] if cut else []),
            "| "
            + " + ".join(f"{value:.1f}" if value < 9.95 else f"{value:.0f}" for value in parts)
            + " s",
        ]
        line = " ".join(said) + (f", {left}" if left else "")
        if len(line) <= COLUMNS:
            break
    return line


def format_held_out(row: dict[str, Any]) -> str:
    """Return a text such as `validation accuracy 0.981, test accuracy 0.988`. Each accuracy is
    followed by the mean reward if the two differ. Without an evaluation the text is empty."""
    said = []
    for split, prefix in (("validation", "eval/"), ("test", "test/")):
        if f"{prefix}accuracy" in row:
            accuracy = row[f"{prefix}accuracy"]
            reward = row[f"{prefix}reward"]
            said.append(
                f"{split} accuracy"
                f" {accuracy:.3f}{f', reward {reward:.3f}' if reward != accuracy else ''}"
            )
    return ", ".join(said)


def say_pace(seconds: float, steps: int) -> str | None:
    """Say how long the run will sample, before its first step is timed. Return None if this is less
    than LONG: the line of the first step is printed soon.

    >>> say_pace(18.0, 60)
    'at this pace, sampling takes 0:18 a step and 18:00 in all; updates come on top'

    Args:
      seconds: of the rollouts of one step, at the pace of the first evaluation.
      steps: number of steps of the run.
    """
    if seconds * steps < LONG:
        return None
    total = clock(seconds * steps)
    said = f"at this pace, sampling takes {clock(seconds)} a step and {total} in all"
    return f"{said}; updates come on top"


def describe_sampling(temperature: float) -> str:
    """Describe how the replies of an evaluation were sampled."""
    return f"sampled at temperature {temperature:g}" if temperature else "greedy"
