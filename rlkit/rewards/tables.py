"""Scores that the row itself lists, for generated problems whose optimum is computed."""

from __future__ import annotations

import zlib

from rlkit.types import Rollout, gives


@gives("non_negative", "raw")
def tabled(rollout: Rollout, *, table: str = "payoffs") -> float | None:
    """What `task.metadata[table]` gives for the last reply, without the fillers "." in front.

    A row with `metadata["flip"]` has a verifier that errs: with that chance, drawn for each rollout on its own, the score is 1 - score. The
    draw is a hash of row, group and sample, so that arms of one seed share it. With a chance of one half the score is a coin.

    Args:
      table: name of the mapping reply → score, ≥ 0; a reply that it lacks earns `metadata["other"]`, else 0.
         None, cannot be scored, where the row has none.
    """
    row = rollout.task.metadata
    if row.get(table) is None:
        return None
    score = float(row[table].get(rollout.final_content.lstrip("."), row.get("other", 0.0)))
    draw = zlib.crc32(f"{rollout.task.id}/{rollout.group}/{rollout.sample}".encode()) / 2**32
    return 1 - score if draw < row.get("flip", 0.0) else score
