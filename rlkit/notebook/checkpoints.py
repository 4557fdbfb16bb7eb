"""Checkpoints and curves."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from rlkit.errors import DataError
from rlkit.notebook.data import TrainingState
from rlkit.system.digest import folder_damage, write_sums
from rlkit.system.files import write_json

NAN = float("nan")


class Checkpoint(NamedTuple):
    """What `load_checkpoint` gives: all of it goes into `train_model`."""

    model: nn.Module
    tokenizer: Any
    state: TrainingState


def save_checkpoint(model: Any, tokenizer: Any, step: int, output_dir: str | Path, *, state: TrainingState | None = None) -> None:
    """Writes output_dir/step_NNNNNN: model and tokenizer in the format of Hugging Face, and the state. Whole, or not there.

    Under PEFT the adapters alone are written. The state of `train_model` brings optimizer, critic and reference with it; what a
    ref_update_fn keeps for itself, such as a KL that adds up, is not in it.
    """
    folder = Path(output_dir) / f"step_{step:06d}"
    part = folder.with_name(folder.name + ".tmp")
    for old in (part, folder):
        shutil.rmtree(old, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    kept = (state or TrainingState(step))._asdict()
    if learner := kept.pop("learner"):
        torch.save(dict(learner), part / "learner.pt")
    write_json(part / "training_state.json", kept)
    write_sums(part)
    os.replace(part, folder)


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Model, tokenizer and state of a folder of `save_checkpoint`, or of the newest one in an output_dir.

    Raises: DataError where there is none, or where a file of it is not what `save_checkpoint` wrote.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(path)
    folder = path if (path / "training_state.json").exists() else max(path.glob("step_??????"), default=None)
    if folder is None:
        raise DataError(f"{path}: no checkpoint of save_checkpoint is there")
    if why := folder_damage(folder):
        raise DataError(f"{folder}: {why}; load an older checkpoint")
    if (folder / "adapter_config.json").exists():
        from peft import AutoPeftModelForCausalLM

        model = AutoPeftModelForCausalLM.from_pretrained(folder, is_trainable=True)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    saved = json.loads((folder / "training_state.json").read_text())
    saved["metrics"] = {name: NAN if value is None else value for name, value in saved["metrics"].items()}  # JSON knows no nan
    if (folder / "learner.pt").exists():
        saved["learner"] = torch.load(folder / "learner.pt", weights_only=True)
    return Checkpoint(model, AutoTokenizer.from_pretrained(folder), TrainingState(**saved))


def plot_training(statistics: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Reward, policy loss and value loss over the steps, side by side, as a picture; its format is that of the path's ending."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.5), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3), ("reward", "policy_loss", "value_loss"), strict=True):
        axes.plot([row["step"] for row in statistics], [row[name] for row in statistics])
        axes.set(xlabel="RL step", title=name.replace("_", " "))
    figure.savefig(path)
