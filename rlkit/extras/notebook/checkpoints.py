"""Save and load checkpoints in the format of Hugging Face."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from rlkit.errors import DataError
from rlkit.extras.notebook.data import Hook
from rlkit.system.digest import find_folder_damage, write_sums


class Checkpoint(NamedTuple):
    model: Any
    tokenizer: Any
    step: int


def save_checkpoint(
    model: Any, tokenizer: Any, step: int, output_dir: str | Path, checkpoint_fn: Hook = None
) -> None:
    """Write model and tokenizer to output_dir/checkpoint-STEP, completely or not at all. If the
    model has adapters, only the adapters are written."""
    if checkpoint_fn is not None:
        checkpoint_fn(model, tokenizer, step, output_dir)
        return
    folder = Path(output_dir) / f"checkpoint-{step}"
    part = folder.with_name(folder.name + ".tmp")
    for old in (part, folder):
        shutil.rmtree(old, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    write_sums(part)
    os.replace(part, folder)


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Load the model, the tokenizer and the step of a checkpoint, or of the newest checkpoint in an
    output_dir. Raises: DataError if there is no checkpoint, or if it is damaged."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    near = Path(path), *Path(path).glob("checkpoint-*")
    folders = {
        int(found[1]): f for f in near if (found := re.fullmatch(r"checkpoint-(\d+)", f.name))
    }
    if not folders:
        raise DataError(f"{path}: no checkpoint of save_checkpoint is there")
    step = max(folders)
    why = find_folder_damage(folders[step])
    if why:
        raise DataError(f"{folders[step]}: {why}; move it away to load an older checkpoint")
    if (folders[step] / "adapter_config.json").exists():
        from peft import AutoPeftModelForCausalLM

        model = AutoPeftModelForCausalLM.from_pretrained(folders[step], is_trainable=True)
    else:
        model = AutoModelForCausalLM.from_pretrained(folders[step])
    return Checkpoint(model.eval(), AutoTokenizer.from_pretrained(folders[step]), step)
