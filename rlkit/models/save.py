"""Save a policy as a folder for `from_pretrained`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rlkit.system.adapters import has_adapters
from rlkit.system.digest import lists_every_file, write_sums
from rlkit.system.files import convert_write_errors, put_aside, sync
from rlkit.types import Policy


def save_policy(
    folder: Path,
    policy: Policy,
    *,
    state: Mapping[str, Tensor] | None = None,
    tokenizer: bool = True,
    card: str = "",
) -> None:
    """Write all weights in Hugging Face's format, or only the adapters in PEFT's format, and the
    digests of all files.

    The folder appears only when it is complete, and replaces an old folder. If the old folder holds
    files not listed in rlkit.sha256, it is kept under another name.

    Args:
      state: weights to write in place of the model's own weights, for example from a checkpoint or
        gathered from shards.
      tokenizer: True also writes the tokenizer with the chat template.
      card: the text of README.md, shown by model hubs.
    Raises: OSError if a write fails, in any of the libraries. The old folder is then still in
    place, unless the error came after its removal.
    """
    model: Any = policy.model
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    # PEFT's default for save_embedding_layers, "auto", would send a request to the hub. A second
    # adapter is the reference's.
    settings: dict[str, Any] = (
        {"save_embedding_layers": False, "selected_adapters": [model.active_adapter]}
        if has_adapters(model)
        else {}
    )
    if state is not None:
        settings["state_dict"] = dict(state)
    try:
        with convert_write_errors():
            model.save_pretrained(part, **settings)
            if tokenizer:
                policy.renderer.tokenizer.save_pretrained(part)
            if card:
                (part / "README.md").write_text(card, errors="backslashreplace")
            write_sums(part)
        for path in part.rglob("*"):
            sync(path)
        if folder.is_dir() and not folder.is_symlink():
            if lists_every_file(folder):
                shutil.rmtree(folder)
            elif any(folder.iterdir()):  # the user has put other files into the folder
                print(
                    f"warning: {folder} holds other files, and is kept as"
                    f" {put_aside(folder, '.aside').name}",
                    flush=True,
                )
        os.replace(part, folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
