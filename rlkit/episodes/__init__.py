"""Episodes: collecting them, turning them into tensors, saving them, and what they say in numbers."""

from rlkit.episodes._assemble import assemble
from rlkit.episodes._collect import collect
from rlkit.episodes.demonstrate import demonstrations
from rlkit.episodes.record import append_rollouts, load_rollouts, rollout_schema, save_rollouts, transcript
from rlkit.episodes.summary import failures, summarize
