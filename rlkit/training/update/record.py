"""The record of one RL step for its passes and updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlkit.distributed import ranks
from rlkit.episodes import assemble
from rlkit.training.experiment import Experiment
from rlkit.training.metrics import Clock
from rlkit.training.reference_states import ReferenceStates
from rlkit.training.update.micro_batches import MicroBatches
from rlkit.types import Batch, Policy, Rollout


class Host(NamedTuple):
    """Hooks: how the host runs forward, backward, optimizer step and all-reduce. The defaults are
    plain torch and the collectives of a process group."""

    # (model, function, *arguments, **settings) → function(model, …), as its forward pass
    forward: Callable[..., Any] = ranks.run_in_forward
    backward: Callable[[Tensor], Any] = Tensor.backward
    optimizer_step: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: optimizer.step()
    # every tensor becomes its sum over the processes, in place
    all_reduce: Callable[[Iterable[Tensor | None]], None] = ranks.all_reduce_sum


class Update(NamedTuple):
    """One RL step: its experiment, the models it reads, and the host of its computations.

    The record stays the same from the first pass to the last update. The weights move in its
    models, and `micro` may halve its micro-batches.
    """

    x: Experiment  # of the step: with its phase, and with the present values of scheduled numbers
    policy: Policy
    critic: nn.Module | None  # None in a phase without a critic
    kept: ReferenceStates  # the reference and the teachers
    micro: MicroBatches
    host: Host
    clock: Clock
    step: int  # RL steps done
    # seed for the order of rollouts and every other draw of the step; the same on all ranks
    seed: int
    warming_up: bool  # whether the critic learns alone
    trained: Sequence[Rollout]  # the rollouts of the batch's rows

    @property
    def model(self) -> nn.Module:
        """The policy's model."""
        return self.policy.model

    @property
    def temperature(self) -> float:
        """The divisor of the trained log-probs: the sampler's temperature, 1 for a greedy
        sampler."""
        return self.x.generation.temperature or 1.0

    def assemble_batch(self, rollouts: Sequence[Rollout]) -> Batch:
        """Rollouts as tensors on the policy's device."""
        device = next(self.model.parameters()).device
        return assemble(rollouts, pad_token_id=self.policy.pad_token_id, device=device)
