"""What a resumed run keeps although no weights hold it: threads, kernels, the correction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlkit.training import schedules
from rlkit.training.experiment import Experiment, correction_in_words
from rlkit.training.kernels import keep_kernels, kernels_in_use
from rlkit.training.schedules import Progress


def computed_with(x: Experiment, model: nn.Module) -> dict[str, Any]:
    """What decides the last bits of a run's numbers: the threads of the CPU, and the kernels that
    decode and update."""
    kernels = kernels_in_use(x.generation.engine, model)
    on_cpu = next(model.parameters()).device.type == "cpu"  # a GPU's sums do not depend on them
    return {
        "threads": torch.get_num_threads() if on_cpu else None,
        "kernel": kernels.get("decoding"),
        "update_kernel": kernels["updates"],
    }


def compute_as_before(
    x: Experiment, model: nn.Module, critic: nn.Module | None, state: Mapping[str, Any]
) -> None:
    """Goes on with the threads and kernels that a checkpoint names, where the config leaves that
    open; says what differs from what this process would have taken."""
    threads = state["threads"] or torch.get_num_threads()
    # the same sums in the same order
    if x.trainer.threads is None and threads != torch.get_num_threads():
        torch.set_num_threads(threads)
        print(f"resume: computes with {threads} thread(s), as the run did so far", flush=True)
    for said in keep_kernels(x.generation.engine, model, state, critic):
        print(f"resume: {said}", flush=True)


def say_lengthened(x: Experiment, progress: Progress, checkpoint: Mapping[str, Any]) -> None:
    """Says what another trainer.steps than the checkpoint's changes."""
    config = checkpoint.get("run", {}).get("config", {})
    steps = config.get("trainer", {}).get("steps", x.trainer.steps)
    said = schedules.lengthened(x, progress, before=steps)
    if said:
        print(f"resume: {said}", flush=True)


def say_correction(x: Experiment, *, exact: bool) -> None:
    """Says what algorithm/correction=auto was when the run began, where this process found the
    engine's log-probs to differ."""
    line = correction_in_words(x, exact=exact)
    if line:
        print(f"resume: {line.partition(' (')[0]}, as when the run began", flush=True)


def trained_state(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """A state dict of model and critic without a frozen base, which comes from model.path: under
    LoRA the adapters that are trained, and the critic."""
    trained = {f"model.{name}" for name, p in model.named_parameters() if p.requires_grad}
    frozen = any(not p.requires_grad for p in model.parameters())
    return {
        name: value
        for name, value in state.items()
        if not frozen or name in trained or not name.startswith("model.")
    }
