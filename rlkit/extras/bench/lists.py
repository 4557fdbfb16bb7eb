"""Score a reply by the row's own list of right replies, for generated problems with a computed
optimum."""

from __future__ import annotations

import zlib

from rlkit.rewards.declarations import no_gold, reads_fields
from rlkit.types import Rollout, gives


@gives("binary", "non_negative", "raw")
@no_gold
@reads_fields("right")
def listed(rollout: Rollout) -> float | None:
    """Score 1 if the last reply is one of `task.metadata["right"]`, else 0. If the row has no list,
    the rollout is unscored (None).

    With `metadata["among"]` it is enough if the reply contains a listed reply, and with
    `metadata["any"]` every reply is right. `metadata["flip"]` is the chance of an error of the
    verifier, drawn for each rollout on its own: then the score becomes 1 - score. The draw is a
    hash of row, group and sample, so arms with the same seed share it. With a chance of one half,
    the score is a coin flip.
    """
    row = rollout.task.metadata
    if row.get("right") is None:
        return None
    text = rollout.final_content
    right = bool(row.get("any")) or (
        any(own in text for own in row["right"]) if row.get("among") else text in row["right"]
    )
    draw = zlib.crc32(f"{rollout.task.id}/{rollout.group}/{rollout.sample}".encode()) / 2**32
    return float(right != (draw < row.get("flip", 0.0)))


@gives("non_negative", "raw")
@no_gold
@reads_fields("right")
def paid(rollout: Rollout) -> float | None:
    """Score as `listed`, multiplied by the number `task.metadata["pay"]` >= 0 if the row has
    one."""
    score = listed(rollout)
    return None if score is None else score * rollout.task.metadata.get("pay", 1.0)


@gives("raw")
@no_gold
@reads_fields("right")
def priced(rollout: Rollout) -> float | None:
    """`listed` - `task.metadata["price"]` · (characters of the last reply beyond the shortest
    right one's)."""
    score = listed(rollout)
    row = rollout.task.metadata
    if score is None:
        return None
    return score - row.get("price", 0.0) * max(
        0, len(rollout.final_content) - min(map(len, row["right"]))
    )
