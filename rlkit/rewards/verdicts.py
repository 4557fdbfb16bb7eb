"""Find the answer in a rollout, and define the values that a reward function may return besides a
number."""

from __future__ import annotations

from typing import Literal, Self

from rlkit.types import Rollout

ScoreStatus = Literal["ok", "wrong", "unparseable", "timeout", "error"]


def final_answer(rollout: Rollout) -> str | None:
    """Return `rollout.final_content`, or None if the episode ended without a final answer.

    An episode has no final answer if it has no reply or was truncated. The same holds if the last
    reply was truncated by the length limit or still calls tools. An answer given by the environment
    itself (`metadata["final_content"]`) counts in these last two cases.
    """
    if not rollout.steps or rollout.status == "truncated":
        return None
    if "final_content" in rollout.metadata:
        return rollout.final_content
    last = rollout.steps[-1]
    return None if last.finish_reason == "length" or last.tool_calls else rollout.final_content


class Verdict(float):
    """Hold a score together with its status. Return a Verdict if the status does not follow from
    the number, as in Verdict(0.0, "unparseable") or Verdict(0.0, "timeout")."""

    status: ScoreStatus

    def __new__(cls, score: float, status: ScoreStatus) -> Self:
        verdict = super().__new__(cls, score)
        verdict.status = status
        return verdict


class Paid(Verdict):
    """Hold a score of 0 for an episode that was already rewarded at its steps. `amount` is the sum
    of the rewards paid at the steps. Logs and algorithms see this amount as the component's value,
    but it is not added to the reward a second time."""

    def __init__(self, amount: float) -> None:
        self.amount = amount

    def __new__(cls, amount: float) -> Self:
        return super().__new__(cls, 0.0, "ok" if amount > 0 else "wrong")
