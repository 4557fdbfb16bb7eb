"""The score that the package `reasoning-gym` gives an answer to one of its problems."""

from __future__ import annotations

import re

from rlkit.errors import ConfigError
from rlkit.rewards._score import final_answer
from rlkit.tasks._reasoning_gym import generated
from rlkit.types import Rollout

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym(rollout: Rollout) -> float:
    """`score_answer` of the row's data set: mostly in 0 to 1, and for some data sets above 0 for a wrong answer of the right form.

    The answer is what stands in the last `<answer>…</answer>`, or the whole reply without such a tag. An episode without a final answer
    scores 0.

    Raises: ConfigError for a row that is of no such data set, or where the package is not installed; what `score_answer` raises is the
      package's.
    """
    row = rollout.task.metadata.get("reasoning_gym")
    if row is None:
        raise ConfigError(f"task {rollout.task.id!r} has no row of reasoning-gym; use task=reasoning_gym, or another reward")
    if (said := final_answer(rollout)) is None:
        return 0.0
    tagged = TAGGED.findall(said)
    return generated(row["dataset"], row["options"]).score((tagged[-1] if tagged else said).strip(), row["number"])
