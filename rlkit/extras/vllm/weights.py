"""A policy in the form that vLLM reads: weights by their names in a checkpoint, adapters, and
folders."""

from __future__ import annotations

import copy
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkit.system.adapters import base_model, has_adapters
from rlkit.system.fingerprints import fingerprint
from rlkit.types import Policy


@contextmanager
def use_plain_numerics() -> Iterator[None]:
    """Compute for vLLM in its own precision, without the trainer's autocast and without gradient.
    It works as a context manager and as a decorator."""
    with (
        torch.autocast("cuda", enabled=False),
        torch.autocast("cpu", enabled=False),
        torch.no_grad(),
    ):
        yield


def base_mark(model: Any, *, merge: bool) -> Any:
    """Compute a fingerprint of the weights that are pushed as a whole. If the adapter is pushed
    separately, these are only the weights of the base."""
    adapted = not merge and lora_rank(model) is not None
    return fingerprint(
        t for name, t in model.named_parameters() if not (adapted and "lora_" in name)
    )


def adapter_mark(model: Any) -> Any:
    """Compute a fingerprint of the active adapter."""
    active = model.active_adapter
    return fingerprint(t for name, t in model.named_parameters() if f".{active}." in name)


def list_weights(model: Any, *, merge: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters by their names in a checkpoint. Under LoRA these are the parameters of
    the base; with `merge` the adapter is added to them.

    A head shared with the embedding is yielded too, because vLLM may keep a copy of it in another
    layout.
    """
    lora = has_adapters(model)
    base = base_model(model)
    layers = (
        {name: m for name, m in base.named_modules() if hasattr(m, "get_delta_weight")}
        if lora and merge
        else {}
    )
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if lora and "lora_" in name:
            continue
        weight = parameter.detach()
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        if layer is not None:
            weight = (
                weight.float() + layer.get_delta_weight(model.active_adapter).detach().float()
            ).to(weight.dtype)
        yield name.replace(".base_layer.", "."), weight


def lora_rank(model: Any) -> int | None:
    """Return the rank of the active adapter. Return None for a model without adapters."""
    return model.peft_config[model.active_adapter].r if has_adapters(model) else None


def save_adapter(model: Any, folder: Path) -> None:
    """Write the active adapter in PEFT's format, directly into the folder."""
    active = model.active_adapter
    model.save_pretrained(folder, selected_adapters=[active], save_embedding_layers=False)
    if active != "default":  # PEFT writes any other adapter into a folder with its name
        for file in (folder / active).iterdir():
            file.rename(folder / file.name)


def make_temporary_folder(owner: Any, where: str | None = None) -> Path:
    """Make a folder. It is deleted together with its owner, or at the end of the process."""
    folder = Path(tempfile.mkdtemp(prefix="rlkit-vllm-", dir=where))
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return folder


def save_model(policy: Policy) -> Path:
    """Write a folder for `vllm serve`: the config, the tokenizer and the weights. Under LoRA these
    are the weights of the base."""
    folder = make_temporary_folder(policy.model)
    save_config(policy.model, folder)
    policy.renderer.tokenizer.save_pretrained(folder)
    save_weights(policy.model, folder, merge=False)
    return folder


@use_plain_numerics()
def save_weights(model: Any, folder: Path, *, merge: bool) -> None:
    """Write whole weights for a server to read."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    weights = {
        name: weight.to("cpu", copy=True).contiguous()
        for name, weight in list_weights(model, merge=merge)
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def save_config(model: Any, folder: Path) -> None:
    """Write the model's config.json for vLLM."""
    base = base_model(model)
    config = copy.deepcopy(base.config)
    config.architectures = [type(base).__name__]
    config.save_pretrained(folder)
