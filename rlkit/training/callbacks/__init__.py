"""Make the callbacks of a run. Each function takes the run folder and makes a Lightning callback.
Callbacks do all work of a run besides learning.

Lightning is imported only when a callback is made, so checking a config does not import it.

Each file imports only files before it in this list: conversations, metrics, pathologies, stopping,
terminal, _health, checkpoints, evaluation, faults.
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
    """Save the whole state of the run after every `every` RL steps, after the last step, and on a
    signal. The newest `keep` checkpoints stay.

    Args:
      best: a column of metrics.jsonl, such as eval/accuracy (on validation problems); test/* is
        refused. The step with the best value so far is also saved, and its checkpoint is kept.
        checkpoints/best.ckpt is a link to this checkpoint, and checkpoints/best.json holds the
        value. None: no best step is kept.
      mode: whether the greatest or the smallest value is the best.
      model: whether the end of a run writes the policy to model/ and the best policy to
        model_best/. The format is Hugging Face's; adapters are in PEFT's format.
    """
    from rlkit.training.callbacks.checkpoints import RLCheckpoint

    return RLCheckpoint(run, every=every, keep=keep, best=best, mode=mode, model=model)


@ranges(every=(1, None), count=(1, None))
def samples(run: Path, /, *, every: int = 5, count: int = 6) -> Any:
    """Write sample conversations to samples/ and to the loggers, after the first, every `every`-th
    and the last RL step.

    Args:
      count: number of conversations of a step.
    """
    from rlkit.training.callbacks.conversations import Samples

    return Samples(run / "samples", every=every, count=count)


@ranges(every=(0, None))
def rollouts(run: Path, /, *, every: int = 1) -> Any:
    """Write all rollouts of every `every`-th RL step to rollouts/. With 0, no rollouts are
    written."""
    from rlkit.training.callbacks.conversations import Rollouts

    return Rollouts(run / "rollouts", every=every)


@ranges(every=(0, None), tables=(0, None))
def completions(run: Path, /, *, every: int = 1, tables: int = 5) -> Any:
    """Write the rollouts of every `every`-th RL step to completions/, as rows of a flat Parquet
    table. With 0, no rollouts are written.

    Args:
      tables: a table of rollouts is sent to wandb and trackio after every `tables`-th RL step, and
        also after the first and the last step. 0: no tables.
    """
    from rlkit.training.callbacks.conversations import Completions

    return Completions(run / "completions", every=every, tables=tables)


def progress(run: Path, /) -> Any:
    """Show a progress bar on a terminal, and otherwise print one readable line per RL step."""
    from rlkit.training.callbacks.terminal import ProgressLines

    return ProgressLines()


def health(run: Path, /) -> Any:
    """Print a warning in plain words when a run shows a known pathology."""
    from rlkit.training.callbacks._health import Health

    return Health()
