"""Right, and the sooner the better."""

from __future__ import annotations

from rlkit.rewards.numeric import numeric, unreadable
from rlkit.rewards.truths import reads_truth
from rlkit.types import Rollout, gives


@gives("non_negative", "raw")
@reads_truth(unreadable)
def few_turns(rollout: Rollout, *, max_turns: int = 50) -> float | None:
    """1 for the right number in the first reply, falling along a line to 1 / max_turns in the last; 0 for a wrong one or none.

    R = correct · (1 - (n - 1) / max_turns), n replies

    Args:
      rollout: scored by its last reply, as `numeric` does.
      max_turns: ≥ 1, the environment's; more replies than that score as many.
    Returns: 0 … 1; None where `numeric` cannot read `task.answer`.
    """
    correct = numeric(rollout)
    return None if correct is None else correct * (1 - (min(len(rollout.steps), max_turns) - 1) / max_turns)
