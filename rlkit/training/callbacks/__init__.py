"""Everything that a run does besides learning. Each part is a function from the run folder to a
Lightning callback.

Lightning is imported only when a part is made, so checking a config does not import it.

Files in the order of their imports: conversations, metrics, pathologies, stopping, terminal,
_health, checkpoints, evaluation, faults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from rlkit.types import ranges, safe


@safe("best")
@ranges(every=(1, None), keep=(1, None))
def checkpoint(
    run: Path,
    /,
    *,
    every: int = 10,
    keep: int = 2,
    best: str | None = None,
    mode: Literal["max", "min"] = "max",
    model: bool = True,
) -> Any:
    """Saves the whole state after every `every` RL steps, after the last one and on a signal; the
    newest `keep` stay.

    Args:
      best: a column of metrics.jsonl, such as eval/accuracy (on validation problems); test/* is
        refused. The step with the best value so far is also saved and kept: checkpoints/best.ckpt
        is a link to it, checkpoints/best.json holds its value. None: no best step is kept.
      mode: whether the greatest or the smallest value is the best.
      model: whether the end of a run writes the policy in Hugging Face's format (adapters in
        PEFT's) to model/, and the best one to model_best/.
    """
    from rlkit.training.callbacks.checkpoints import RLCheckpoint

    return RLCheckpoint(run, every=every, keep=keep, best=best, mode=mode, model=model)


@ranges(every=(1, None), count=(1, None))
def samples(run: Path, /, *, every: int = 5, count: int = 6) -> Any:
    """Writes sample conversations to samples/ and to the loggers, after the first, every `every`-th
    and the last RL step."""
    from rlkit.training.callbacks.conversations import Samples

    return Samples(run / "samples", every=every, count=count)


@ranges(every=(0, None))
def rollouts(run: Path, /, *, every: int = 1) -> Any:
    """Writes all rollouts of every `every`-th RL step to rollouts/; 0 writes none."""
    from rlkit.training.callbacks.conversations import Rollouts

    return Rollouts(run / "rollouts", every=every)


@ranges(every=(0, None), tables=(0, None))
def completions(run: Path, /, *, every: int = 1, tables: int = 5) -> Any:
    """Writes the rollouts of every `every`-th RL step as rows of a flat table to completions/
    (Parquet; 0 writes none).

    Args:
      tables: RL steps between tables in the loggers that sort and filter them (wandb, trackio); the
        first and the last step always have a table. 0: no tables.
    """
    from rlkit.training.callbacks.conversations import Completions

    return Completions(run / "completions", every=every, tables=tables)


def progress(run: Path, /) -> Any:
    """A progress bar on a terminal, one readable line per RL step otherwise."""
    from rlkit.training.callbacks.terminal import ProgressLines

    return ProgressLines()


def health(run: Path, /) -> Any:
    """Says in plain words when a run shows a known pathology."""
    from rlkit.training.callbacks._health import Health

    return Health()
