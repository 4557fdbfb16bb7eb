"""Choose a run's device, threads and precision, and silence messages of the frameworks."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rlkit.errors import ConfigError, find_distribution
from rlkit.system.processors import (
    PARAMETERS_PER_THREAD,
    choose_threads,
    count_cores,
    machine_memory,
)
from rlkit.system.shared_state import FOLDER, guard_state
from rlkit.types import ThreadedEngine

PACKAGES = ("torch", "transformers", "peft", "lightning", "hydra-core", "numpy")


def pick_device(x: Any) -> Any:
    """Choose the device from the settings of an experiment's trainer. Raises ConfigError if there
    is no GPU."""
    import torch

    if x.trainer.accelerator == "gpu" and not torch.cuda.is_available():
        raise ConfigError(
            "trainer=gpu: torch sees no GPU on this machine; use trainer=auto, or install a torch"
            " build with CUDA"
        )
    if x.trainer.accelerator == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    joined = (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) if joined else 0)


def load_on_device(x: Any) -> tuple[Any, Any]:
    """Load the policy on its device, with the run's threads. Returns the policy and the device."""
    silence_frameworks()
    device = pick_device(x)
    if device.type == "cpu":
        keep_freed_memory()
    with guard_state(x.model.load, kinds=[FOLDER]):
        policy = x.model(device=device)
    use_threads(x.trainer, policy.model, device)
    # the threads of the cached engine's compiled step do not spin, so every core helps
    if isinstance(x.generation.engine, ThreadedEngine):
        available = max(1, count_cores() // x.trainer.devices)
        x.generation.engine.threads = x.trainer.threads or choose_threads(
            available * PARAMETERS_PER_THREAD, available
        )
    return policy, device


def use_threads(settings: Any, model: Any, device: Any) -> None:
    """Set torch's number of threads: the number in the settings, or as many as a model of this size
    can use. On a GPU torch keeps its own number."""
    import torch

    parameters = sum(p.numel() for p in model.parameters())
    if settings.threads:
        torch.set_num_threads(settings.threads)
    elif device.type == "cpu":
        torch.set_num_threads(choose_threads(parameters, max(1, count_cores() // settings.devices)))


def total_memory(device: Any) -> int:
    """Return the bytes of memory of a device for this process. On a GPU this is all of its memory.
    On a CPU, the memory of the machine or of its control group is divided equally among the ranks
    on this machine.

    The result never depends on the memory free at the moment, so decisions based on it are
    repeatable.
    """
    import torch

    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_memory() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks of up to 32 MiB instead of giving them back to the system. Other
    C libraries stay as they are.

    An update frees and takes the same blocks again and again. Each time, the system would first
    fill every page with zeros. This would take about an eighth of the processor time of an update
    over 10,000 tokens. The peak memory stays the same, since larger blocks are still given back at
    once.
    """
    # constants of malloc.h; glibc allows at most 32 MiB
    trim_threshold = -1
    mmap_threshold = -3
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_threshold, 32 << 20)


def precision(x: Any, device: Any) -> str:
    """Return the trainer's precision. auto means bf16-mixed if all weights are trained on a GPU.
    Otherwise auto means 32-true, without a cast; under LoRA the base model is bfloat16 already."""
    if x.trainer.precision != "auto":
        return x.trainer.precision
    return "bf16-mixed" if device.type == "cuda" and not x.model.rank else "32-true"


def autocast(x: Any, device: Any, *, updates: bool = False) -> AbstractContextManager[Any]:
    """Return a context with the numerics of training: bfloat16 autocast under bf16-mixed, nothing
    otherwise. With `updates`, the weights change inside the block, so casts of weights are not
    cached."""
    import torch

    return (
        torch.autocast(device.type, torch.bfloat16, cache_enabled=not updates)
        if precision(x, device) == "bf16-mixed"
        else nullcontext()
    )


def silence_frameworks() -> None:
    """Silence the frameworks' adverts and tips, but not their warnings about our calls."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in (
        ".*does not have many workers.*",
        ".*eval mode at the start of training.*",
        ".*`training_step` returned `None`.*",
        ".*GPU available but not used.*",
        # printed on a cluster; several nodes without srun are refused
        ".*`srun` command is available.*",
        ".*isinstance.treespec, LeafSpec.*",
        ".*Checkpoint directory .* exists.*",
    ):
        warnings.filterwarnings("ignore", message=message)


def versions() -> dict[str, str]:
    """Return the versions of all packages with an influence on a run's numbers."""
    own = find_distribution()
    found = {"python": sys.version.split()[0], "rlkit": own.version if own else "not installed"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
