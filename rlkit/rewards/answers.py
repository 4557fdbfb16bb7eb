"""What of a rollout is scored as its answer."""

from __future__ import annotations

from rlkit.types import Rollout


def final_answer(rollout: Rollout) -> str | None:
    """Content of the last reply, thinking excluded, or None where the episode ended without a final answer.

    There is none in an episode without a reply, in one that was truncated, in a reply cut off by the length limit (what
    it would have said next is unknown), and in a reply that still calls tools.
    """
    if not rollout.steps or rollout.status == "truncated":
        return None
    last = rollout.steps[-1]
    return None if last.finish_reason == "length" or last.tool_calls else rollout.final_content
