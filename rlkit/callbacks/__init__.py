"""What a run does besides learning. Each part is a function of the run folder that gives a Lightning callback.

Lightning is imported only when a part is made, so that a config is checked without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def checkpoint(run: Path, /, *, every: int = 10, keep: int = 2) -> Any:
    """Saves the whole state after every `every` RL steps and after the last one; the newest `keep` stay."""
    from rlkit.callbacks.checkpoints import RLCheckpoint

    return RLCheckpoint(run / "checkpoints", every=every, keep=keep)


def samples(run: Path, /, *, every: int = 5, count: int = 6) -> Any:
    """Writes sample conversations to samples/ and to the loggers, after the first, every `every`-th and the last RL step."""
    from rlkit.callbacks.conversations import Samples

    return Samples(run / "samples", every=every, count=count)


def rollouts(run: Path, /, *, every: int = 1) -> Any:
    """Writes all rollouts of every `every`-th RL step to rollouts/; 0 writes none."""
    from rlkit.callbacks.conversations import Rollouts

    return Rollouts(run / "rollouts", every=every)


def tokens(run: Path, /, *, every: int = 1, count: int = 8) -> Any:
    """Writes token texts, log-probs, advantages and loss mask of `count` rollouts of every `every`-th RL step to tokens/; 0 writes none."""
    from rlkit.callbacks.token_values import Tokens

    return Tokens(run / "tokens", every=every, count=count)


def progress(run: Path, /) -> Any:
    """A progress bar on a terminal, one readable line per RL step otherwise."""
    from rlkit.callbacks.terminal import Progress

    return Progress()


def health(run: Path, /) -> Any:
    """Says in plain words when a run shows a known pathology."""
    from rlkit.callbacks.pathologies import Health

    return Health()
