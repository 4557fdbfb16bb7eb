"""A score by what the row itself lists, for generated problems whose optimum is computed."""

from __future__ import annotations

import zlib

from rlkit.types import Rollout, gives


@gives("binary", "non_negative", "raw")
def listed(rollout: Rollout) -> float | None:
    """1 where the last reply is one of `task.metadata["right"]`, else 0; None, cannot be scored, where the row has no such list.

    With `metadata["any"]` every reply is right. A row with `metadata["flip"]` has a verifier that errs: with that chance, drawn for each
    rollout on its own, the score is 1 - score. The draw is a hash of row, group and sample, so that arms of one seed share it. With a
    chance of one half the score is a coin.
    """
    row = rollout.task.metadata
    if row.get("right") is None:
        return None
    right = bool(row.get("any")) or rollout.final_content in row["right"]
    draw = zlib.crc32(f"{rollout.task.id}/{rollout.group}/{rollout.sample}".encode()) / 2**32
    return float(right != (draw < row.get("flip", 0.0)))


@gives("non_negative", "raw")
def paid(rollout: Rollout) -> float | None:
    """`listed`, times the number >= 0 `task.metadata["pay"]` where there is one."""
    score = listed(rollout)
    return None if score is None else score * rollout.task.metadata.get("pay", 1.0)
