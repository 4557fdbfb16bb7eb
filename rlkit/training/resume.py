"""Keep the settings of a run when it is resumed: threads, kernels, the size of the engine's cache,
checkpointing of activations, and the off-policy correction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlkit.errors import DataError
from rlkit.models.checkpointing import is_checkpointed
from rlkit.training import schedules
from rlkit.training.activations import keep_activations
from rlkit.training.experiment import Experiment, describe_correction
from rlkit.training.kernels import keep_kernels, read_kernels_in_use
from rlkit.training.schedules import Progress
from rlkit.types import CachingEngine, Policy


class Fields(dict[str, Any]):
    """rlkit's own part of a checkpoint. Raises DataError for a field that it does not have."""

    def __missing__(self, name: str) -> Any:
        raise DataError(
            f"the checkpoint has no {name!r}, so another commit of rlkit wrote it. Continue with"
            ' the commit that run.json names as "git", or start a new run'
        )


def describe_arithmetic(x: Experiment, model: nn.Module) -> dict[str, Any]:
    """Return the settings with an effect on the last bits of a run's numbers. They are the CPU
    threads, the kernels for decoding and updates, the size of the engine's cache, and whether
    updates recompute their activations."""
    engine = x.generation.engine
    kernels = read_kernels_in_use(engine, model)
    # on a GPU, sums do not depend on the number of CPU threads
    on_cpu = next(model.parameters()).device.type == "cpu"
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
    """Apply the settings of a checkpoint, unless the config sets others: threads, kernels, the size
    of the engine's cache, and checkpointing of activations. Print a sentence for each setting that
    differs from a new run. The sentences also name a different off-policy correction and a changed
    trainer.steps.

    Args:
      x: the experiment as configured.
      exact: whether the engine gives exactly the trainer's log-probs, as found by this process in
        its check before the first step.
    """
    state = checkpoint["rlkit"]
    said = []
    threads = state["threads"] or torch.get_num_threads()
    if x.trainer.threads is None and threads != torch.get_num_threads():
        torch.set_num_threads(threads)  # so that sums are added in the same order
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
    """Return the state dict of model and critic without the frozen base weights. A resumed run
    loads the base from model.path. Under LoRA the trained adapters and the critic remain."""
    trained = {f"model.{name}" for name, p in model.named_parameters() if p.requires_grad}
    frozen = any(not p.requires_grad for p in model.parameters())
    return {
        name: value
        for name, value in state.items()
        if not frozen or name in trained or not name.startswith("model.")
    }
