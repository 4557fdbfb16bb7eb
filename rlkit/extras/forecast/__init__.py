"""Seconds and memory of an RL step: on a card elsewhere, from sizes alone; on this machine, from
timed passes.

Files in the order of their imports: costs, roofline, load, timing, commands.
"""

from rlkit.extras.forecast.load import load_of, shape_of_run
from rlkit.extras.forecast.roofline import (
    CARDS,
    KNOWN,
    Card,
    Forecast,
    Load,
    Shape,
    compute_memory,
    decode_limit,
    decode_step,
    forecast,
    propose_changes,
    settle_checkpointing,
    shape_of,
)

__all__ = [
    "CARDS",
    "KNOWN",
    "Card",
    "Forecast",
    "Load",
    "Shape",
    "compute_memory",
    "decode_limit",
    "decode_step",
    "forecast",
    "load_of",
    "propose_changes",
    "settle_checkpointing",
    "shape_of",
    "shape_of_run",
]
