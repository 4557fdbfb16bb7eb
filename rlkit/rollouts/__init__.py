"""Episodes: collecting them, turning them into tensors, saving them, and what they say in numbers."""

from rlkit.rollouts.assemble import assemble
from rlkit.rollouts.collect import collect
from rlkit.rollouts.record import load_rollouts, save_rollouts, transcript
from rlkit.rollouts.summary import summarize

__all__ = ["assemble", "collect", "load_rollouts", "save_rollouts", "summarize", "transcript"]
