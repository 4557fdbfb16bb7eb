"""Faults for run.py: rewards, a tool and an engine with one fault each, and faulty rows."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

from rlkit.engines import Cached
from rlkit.rewards import numeric
from rlkit.tasks import arithmetic
from rlkit.types import Policy, Rollout, Task

ROWS = 4096
EASY = {"buys", "finds", "gets"}  # operations learned by the embedded model without errors
LONG = 1_000_003  # factor; the numbers in the embedded model's warm-up have two digits


def unread(rollout: Rollout) -> float | None:
    """Score only odd answers, so that half of the tasks have no reward."""
    return numeric(rollout) if int(rollout.task.answer) % 2 else None


def hackable(rollout: Rollout) -> float:
    """Give the full reward to any reply of twenty characters."""
    return min(1.0, len(rollout.final_content) / 20)


def calculator(expression: str) -> str:
    """Calculates.

    Args:
      expression: to calculate.
    """
    raise RuntimeError("the calculator's server does not answer")


class Stale(Cached):
    """An engine that keeps sampling with the first weights it was given."""

    old: Policy | None = None

    async def load(self, weights: Policy, version: int) -> None:
        """Claim the new version, but keep the first weights."""
        if self.old is None:
            self.old = weights._replace(model=copy.deepcopy(weights.model))
        await super().load(self.old, version)


# --------------------------------------------------------------------------------------------- rows


def write_rows(kind: str, seed: int, file: Path) -> Path:
    """Write rows with a fault in the data, made from problems of task=arithmetic."""
    tasks = arithmetic(split="train", seed=seed, max_samples=ROWS)
    if kind == "easy":
        tasks = [task for task in tasks if kinds_of(task) <= EASY]
    if kind == "hard":
        tasks = [lengthen(task) for task in tasks if kinds_of(task) <= EASY]
    if kind == "repeated":
        tasks = [tasks[0] if i % 10 else task for i, task in enumerate(tasks)]
    rows: list[dict[str, Any]] = []
    for task in tasks:
        prompt = task.messages[0]["content"]
        if kind == "leak":
            prompt = f"{prompt} {task.answer}"
        rows.append({"prompt": prompt, "answer": task.answer})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def lengthen(task: Task) -> Task:
    """Multiply all numbers of a sum, and its answer, by LONG."""
    content = re.sub(r"\d+", lambda found: str(LONG * int(found[0])), task.messages[0]["content"])
    message = {"role": "user", "content": content}
    return task._replace(messages=(message,), answer=str(LONG * int(task.answer)))


def kinds_of(task: Task) -> set[str]:
    """Return the kinds of a problem's operations, and "distractor" if the problem has one."""
    return set(task.metadata["kinds"])
