"""Forecast the seconds and the memory of an RL step: on a card elsewhere from sizes alone, and on
this machine from timed passes.

Each file imports only files before it in this list: costs, roofline, load, timing, commands.
"""

from rlkit.extras.forecast.load import find_shape, measure_load
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
    read_shape,
    settle_checkpointing,
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
    "find_shape",
    "forecast",
    "measure_load",
    "propose_changes",
    "read_shape",
    "settle_checkpointing",
]
