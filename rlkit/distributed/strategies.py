"""Lightning's strategies for several ranks, adapted to reinforcement learning with manual
optimisation.

rlkit.training.update.minibatch sums the gradients over ranks after the last micro-batch. So each
rank may run any number of backward passes, and an update need not use every parameter. For example,
the parameters of a critic may be unused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from rlkit.distributed import ranks
from rlkit.errors import ConfigError


def save_once(
    strategy: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
) -> None:
    """Write the checkpoint on rank 0. If writing fails, raise OSError on every rank. With
    Lightning's own method, the other ranks would hang."""
    ranks.broadcast(lambda: strategy.checkpoint_io.save_checkpoint(checkpoint, filepath))


class Replicated(DDPStrategy):
    """Run DDP without its reducer: the module is not wrapped.

    All ranks load the same weights and take steps with the same gradients.
    """

    def configure_ddp(self) -> None:
        return None

    save_checkpoint = save_once


class Sharded(ModelParallelStrategy):
    """Run FSDP2 with the checkpoint format of one process: whole tensors in one file, loadable by
    any number of ranks."""

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        module: Any = self.lightning_module
        ranks.reshard(module)
        return ranks.gather_tensors(module.trained_state(), for_file=True)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module: Any = self.lightning_module
        ranks.reshard(module)
        live = module.state_dict()
        saved = {
            name: ranks.shard_like(value, live[name]) if name in live else value
            for name, value in checkpoint["state_dict"].items()
        }
        module.load_state_dict(saved, strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        own = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return ranks.gather_tensors(own.state_dict(), for_file=True)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            state = {
                i: {
                    name: (
                        ranks.shard_like(value, parameters[i])
                        if isinstance(value, torch.Tensor) and value.ndim
                        else value
                    )
                    for name, value in own.items()
                }
                for i, own in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})

    save_checkpoint = save_once

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)


def make_strategy(settings: Any) -> Any:
    """Make the strategy set in the trainer's settings.

    Raises: ConfigError if the ranks of the strategy were not started.
    """
    count = settings.devices * settings.nodes
    if count == 1:
        return "auto"
    if ranks.size() != count:
        raise ConfigError(
            f"trainer.devices × trainer.nodes = {count}, but only one was started; use `rlkit"
            " train` or torchrun"
        )
    timeout = timedelta(seconds=settings.timeout)
    if settings.strategy == "fsdp":
        return Sharded(
            data_parallel_size=count,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            timeout=timeout,
        )
    return Replicated(timeout=timeout)


def list_cluster_plugins() -> list[Any]:
    """Return the plugins that tell Lightning about ranks it did not start."""
    return [TorchElasticEnvironment()] if ranks.size() > 1 and "RANK" in os.environ else []
