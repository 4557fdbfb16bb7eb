"""Episodes: collecting them, turning them into tensors, saving them, and what they say in numbers."""

from rlkit.rollouts.assemble import assemble
from rlkit.rollouts.collect import collect
from rlkit.rollouts.demonstrate import demonstrations
from rlkit.rollouts.record import append_rollouts, load_rollouts, rollout_schema, save_rollouts, transcript
from rlkit.rollouts.summary import failures, summarize

__all__ = [
    "append_rollouts",
    "assemble",
    "collect",
    "demonstrations",
    "failures",
    "load_rollouts",
    "rollout_schema",
    "save_rollouts",
    "summarize",
    "transcript",
]
