"""Rewards, a tool and an engine with a fault each, and rows with faults, for run.py."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

from rlkit.engines import Cached
from rlkit.rewards import numeric
from rlkit.types import Policy, Rollout

ROWS = 400


def unread(rollout: Rollout) -> float | None:
    """Reads only half of the truths: those of odd numbers."""
    return numeric(rollout) if int(rollout.task.answer) % 2 else None


def hackable(rollout: Rollout) -> float:
    """Pays any reply of twenty characters."""
    return min(1.0, len(rollout.final_content) / 20)


def calculator(expression: str) -> str:
    """Calculates.

    Args:
      expression: to calculate.
    """
    raise RuntimeError("the calculator's server does not answer")


class Stale(Cached):
    """An engine that goes on with the weights that it saw first."""

    old: Policy | None = None

    async def load(self, weights: Policy, version: int) -> None:
        """Claims the version, and keeps the weights."""
        if self.old is None:
            self.old = weights._replace(model=copy.deepcopy(weights.model))
        await super().load(self.old, version)


# --------------------------------------------------------------------------------------------- rows


def question(rng: random.Random, low: int, high: int, operations: int) -> tuple[str, int]:
    """A word problem in the form of task=arithmetic, and its answer."""
    name = rng.choice(("Ann", "Ben", "Eva", "Kim", "Leo", "Mia"))
    item = rng.choice(("pens", "hats", "cups", "eggs", "keys"))
    total = rng.randint(low, high)
    words = [f"{name} has {total} {item}."]
    for _ in range(operations):
        x = rng.randint(low, high)
        total += x
        words.append(f"{name} {rng.choice(('buys', 'finds'))} {x} more.")
    return " ".join([*words, f"How many {item} does {name} have now?"]), total


def write_rows(kind: str, seed: int, file: Path) -> Path:
    """Writes the rows of a fault that lies in the data."""
    rng = random.Random(f"{kind} {seed}")
    span = {"hard": (100_000, 999_999), "easy": (2, 9)}.get(kind, (2, 20))
    count = {"hard": 3, "easy": 1}.get(kind)
    rows: list[dict[str, Any]] = []
    while len(rows) < ROWS:
        prompt, answer = question(rng, *span, count or rng.randint(1, 3))
        if kind == "leak":
            prompt += f" (The answer is {answer}.)"
        if kind == "repeated" and rows and rng.random() < 0.9:
            prompt, answer = rows[0]["prompt"], int(rows[0]["answer"])
        rows.append({"prompt": prompt, "answer": str(answer)})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
