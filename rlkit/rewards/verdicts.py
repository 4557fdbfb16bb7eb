"""The answer in a rollout, and the values that a reward function may return besides a number."""

from __future__ import annotations

from typing import Literal, Self

from rlkit.types import Rollout

ScoreStatus = Literal["ok", "wrong", "unparseable", "timeout", "error"]


def final_answer(rollout: Rollout) -> str | None:
    """`rollout.final_content`, or None if the episode ended without a final answer.

    An episode has no final answer if it has no reply or was truncated, or if its last reply was cut
    off by the length limit or still calls tools. But the environment may give the answer itself
    (`metadata["final_content"]`).
    """
    if not rollout.steps or rollout.status == "truncated":
        return None
    if "final_content" in rollout.metadata:
        return rollout.final_content
    last = rollout.steps[-1]
    return None if last.finish_reason == "length" or last.tool_calls else rollout.final_content


class Verdict(float):
    """A score with its status, if the number alone does not tell it: Verdict(0.0,
    "unparseable"), Verdict(0.0, "timeout")."""

    status: ScoreStatus

    def __new__(cls, score: float, status: ScoreStatus) -> Self:
        verdict = super().__new__(cls, score)
        verdict.status = status
        return verdict


class Paid(Verdict):
    """A score of 0 for an episode that was already rewarded at its steps. The sum paid there is the
    component, for logs and algorithms; it does not count a second time."""

    def __init__(self, amount: float) -> None:
        self.amount = amount

    def __new__(cls, amount: float) -> Self:
        return super().__new__(cls, 0.0, "ok" if amount > 0 else "wrong")
