"""Choose the kernels of a run, for decoding and for updates, and report them with the engine. A run
chooses its kernels once, prints them in one line, writes them to run.json, and keeps them when it
is resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlkit.distributed import ranks
from rlkit.errors import EngineError
from rlkit.models.checkpointing import is_checkpointed
from rlkit.models.fused import (
    get_update_kernel,
    go_on_with,
    serves,
    update_kernel,
    use_update_kernel,
)
from rlkit.models.head import split_model
from rlkit.models.packing import find_packed_context
from rlkit.system.files import report_write_errors, write_atomic
from rlkit.types import KernelEngine, SharedEngine

OTHER_RANK = "as another process of the run"
SHARDS = "the weights are sharded"
LARGE = 4_000_000_000  # parameters; from here on a GPU should sample with vLLM


def read_kernels_in_use(engine: Any, model: Any) -> dict[str, str]:
    """Return the kernels in use: `decoding` and `updates` → eager or fused. `decoding` is missing
    if the engine has kernels of its own."""
    updates: dict[str, str] = {"updates": update_kernel(model)}
    if not isinstance(engine, KernelEngine):
        return updates
    # the engine's decoder may still be the previous one, so its setting comes first
    decoding = "eager" if engine.kernel == "eager" else engine.decodes
    return ({"decoding": decoding} if decoding else {}) | updates


def settle_kernels(engine: Any, model: Any, *, sharded: bool = False) -> str:
    """Decide what `auto` means for the kernels of the run: eager or fused. The decision is the same
    on all ranks. Return a line with the kernels and the reason for any fallback. On a GPU, a line
    about the engine comes first. Call this function when the engine has sampled, and under the
    autocast of the run.

    Args:
      sharded: whether the weights will be sharded. `auto` then means eager, because compiled code
        cannot read shards.
    Raises: EngineError if the config names fused, and the engine or the updates cannot use it.
    """
    own = engine if isinstance(engine, KernelEngine) else None
    decodes = own.decodes if own else None
    if own and own.kernel == "fused" and decodes == "eager":
        raise EngineError(f"generation.kernel=fused: {own.why_eager}; use auto or eager")
    trunk = split_model(model)[0]
    updates = get_update_kernel(trunk)
    misfit = (
        ""
        if find_packed_context(trunk.config) and serves(trunk)
        else "it needs packed rows (model.attention) and no autocast (trainer.precision)"
    )
    if misfit and updates.asked == "fused":
        raise EngineError(f"model.kernel=fused: {misfit}; use auto or eager")
    why = SHARDS if sharded else OTHER_RANK
    demoted = ranks.any_rank(sharded or decodes == "eager") and decodes == "fused"
    if own and decodes:
        own.settle("eager" if demoted else decodes, why if demoted else own.why_eager)
    demoted = ranks.any_rank(bool(sharded or misfit or updates.used == "eager"))
    if demoted and updates.used == "fused" and updates.automatic:
        use_update_kernel(model, "eager", misfit or why)
    parameters = sum(p.numel() for p in model.parameters())
    lines = [engine_line(engine, next(model.parameters()).device, parameters)]
    lines.append(kernels_line(engine, model))
    return "\n".join(filter(None, lines))


def engine_line(engine: Any, device: torch.device, parameters: int) -> str:
    """Return the line `engine: Cached, …`. The line names the run's engine, the place where the
    engine decodes, and the weights that it uses. On a CPU the line is empty.

    From LARGE parameters on, the line recommends vLLM instead of an engine in the trainer's
    process.
    """
    if device.type != "cuda":
        return ""
    name = type(engine).__name__
    if isinstance(engine, SharedEngine):
        return f"engine: {name}; it decodes with kernels of its own, from copies of the weights"
    line = f"engine: {name}; it decodes with the model's own code"
    if parameters < LARGE:
        return line
    return (
        f"{line}; for a model of {parameters / 1e9:.1f} billion parameters we advise"
        " generation=vllm, whose kernels are written for large models (advice, not a measurement)"
    )


def kernels_line(engine: Any, model: Any) -> str:
    """Return a line such as `kernels: decoding fused, updates eager (there is no C compiler …)`."""
    reasons = {
        "decoding": engine.why_eager if isinstance(engine, KernelEngine) else "",
        "updates": get_update_kernel(split_model(model)[0]).reason,
    }
    words = []
    for what, kernel in read_kernels_in_use(engine, model).items():
        because = f" ({reasons[what]})" if reasons[what] and kernel == "eager" else ""
        words.append(f"{what} {kernel}{because}")
    return f"kernels: {', '.join(words)}"


def keep_kernels(
    engine: Any, model: Any, state: Mapping[str, Any], critic: Any = None
) -> list[str]:
    """Use the kernels of a checkpoint, unless the config names other kernels. Return a sentence for
    the user about each change."""
    before = read_kernels_in_use(engine, model)
    said = []
    kernel = state["kernel"]  # None if the engine has kernels of its own
    if kernel and isinstance(engine, KernelEngine):
        said.append(engine.go_on_with(kernel))
        if (
            before.get("decoding") == "fused"
            and read_kernels_in_use(engine, model).get("decoding") == "eager"
        ):
            said.append("decoding is eager, as the run did so far (generation.kernel)")
    said.append(go_on_with(model, state["update_kernel"]))
    if before["updates"] == "fused" and update_kernel(model) == "eager":
        said.append("updates are eager, as the run did so far (model.kernel)")
    if critic is not None:
        use_update_kernel(critic, update_kernel(model))
    return [text for text in said if text]


def record_choices(engine: Any, model: Any) -> dict[str, Any]:
    """Return the choices that a run makes for `auto`: its kernels, and whether updates recompute
    their activations. They are written to run.json and summary.json."""
    return {
        "kernels": read_kernels_in_use(engine, model),
        "gradient_checkpointing": is_checkpointed(model),
    }


def note_choices(folder: Path, choices: Mapping[str, Any]) -> None:
    """Add the value of `record_choices` to run.json, in the entry of the process that works in the
    folder. A folder without run.json stays unchanged."""
    path = folder / "run.json"
    try:
        starts = json.loads(path.read_text())
        starts[-1].update(choices)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return
    with report_write_errors("run.json"):
        write_atomic(path, (json.dumps(starts, indent=1) + "\n").encode())
