"""The settings that a resumed run keeps besides its weights: threads, kernels, the size of the
engine's cache, checkpointing of activations, the correction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlkit.models.checkpointing import is_checkpointed
from rlkit.training import schedules
from rlkit.training.activations import keep_activations
from rlkit.training.experiment import Experiment, describe_correction
from rlkit.training.kernels import keep_kernels, read_kernels_in_use
from rlkit.training.schedules import Progress
from rlkit.types import CachingEngine, Policy


def describe_arithmetic(x: Experiment, model: nn.Module) -> dict[str, Any]:
    """The settings that affect the last bits of a run's numbers: the threads of the CPU, the
    kernels of decoding and updates, the size of the engine's cache, and whether updates recompute
    their activations."""
    engine = x.generation.engine
    kernels = read_kernels_in_use(engine, model)
    on_cpu = next(model.parameters()).device.type == "cpu"  # a GPU's sums do not depend on them
    return {
        "threads": torch.get_num_threads() if on_cpu else None,
        "cached_tokens": engine.cached_tokens if isinstance(engine, CachingEngine) else None,
        "kernel": kernels.get("decoding"),
        "update_kernel": kernels["updates"],
        "gradient_checkpointing": is_checkpointed(model),
    }


def go_on_as_before(
    x: Experiment,
    policy: Policy,
    critic: nn.Module | None,
    checkpoint: Mapping[str, Any],
    *,
    exact: bool,
) -> None:
    """Keep the threads, the kernels, the size of the cache and the checkpointing of activations of
    a checkpoint, unless the config names others. Print how the run differs from a new one: in these
    choices, the correction and trainer.steps.

    Args:
      x: as configured. exact: what this process has found about its own engine.
    """
    state = checkpoint["rlkit"]
    said = []
    threads = state["threads"] or torch.get_num_threads()
    if x.trainer.threads is None and threads != torch.get_num_threads():
        torch.set_num_threads(threads)  # the same sums in the same order
        said.append(f"computes with {threads} thread(s), as the run did so far")
    # activations first, because the update kernel depends on them
    recompute = state["gradient_checkpointing"]
    said.append(keep_activations(x, policy.model, critic, recompute))
    engine = x.generation.engine
    said += keep_kernels(engine, policy.model, state, critic)
    if state["cached_tokens"] and isinstance(engine, CachingEngine):
        engine.keep_cached_tokens(state["cached_tokens"])
    config = checkpoint.get("run", {}).get("config", {})
    steps = config.get("trainer", {}).get("steps", x.trainer.steps)
    said.append(schedules.explain_new_length(x, Progress(**state["progress"]), before=steps))
    if state["exact"] != exact:
        line = describe_correction(x, exact=state["exact"])
        said.append(line and f"{line.partition(' (')[0]}, as when the run began")
    for line in filter(None, said):
        print(f"resume: {line}", flush=True)


def select_trained_state(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """A state dict of model and critic without the frozen base, because model.path holds the base:
    under LoRA the trained adapters, and the critic."""
    trained = {f"model.{name}" for name, p in model.named_parameters() if p.requires_grad}
    frozen = any(not p.requires_grad for p in model.parameters())
    return {
        name: value
        for name, value in state.items()
        if not frozen or name in trained or not name.startswith("model.")
    }
