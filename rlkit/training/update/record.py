"""Define the record of one RL step. All passes and updates of the step read this record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlkit.distributed import ranks
from rlkit.episodes import assemble
from rlkit.rewards import Moments
from rlkit.training.experiment import Experiment
from rlkit.training.metrics import Clock
from rlkit.training.reference_states import ReferenceStates
from rlkit.training.update.micro_batches import MicroBatches
from rlkit.types import Batch, Policy, Rollout


class Host(NamedTuple):
    """Hold hooks for the host of the computation, such as Lightning. The hooks run the forward
    pass, the backward pass, the optimizer step and the all-reduce. The defaults are plain torch and
    the collectives of a process group."""

    # (model, function, *arguments, **settings) → function(model, …), run as a forward pass
    forward: Callable[..., Any] = ranks.run_in_forward
    backward: Callable[[Tensor], Any] = Tensor.backward
    optimizer_step: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: optimizer.step()
    # replaces every tensor by its sum over the processes, in place
    all_reduce: Callable[[Iterable[Tensor | None]], None] = ranks.all_reduce_sum


class Update(NamedTuple):
    """Hold the inputs of one RL step: its experiment, its models, and the hooks that run its
    computations.

    The record itself does not change between the first pass and the last update. Only the weights
    of its models change, and `micro` may halve the micro-batches.
    """

    x: Experiment  # of this step, with its phase and the present values of scheduled numbers
    policy: Policy
    critic: nn.Module | None  # None in a phase without a critic
    kept: ReferenceStates  # the reference and the teachers
    micro: MicroBatches
    host: Host
    clock: Clock
    step: int  # RL steps done before this one
    # seed for the order of rollouts and every other random choice of the step; the same on all
    # ranks
    seed: int
    warming_up: bool  # whether only the critic learns in this step
    trained: Sequence[Rollout]  # the rollouts that the rows of the batch come from
    moments: Moments | None  # of the rewards so far, to normalise the rewards; None: as they are

    @property
    def model(self) -> nn.Module:
        """Return the policy's model."""
        return self.policy.model

    @property
    def temperature(self) -> float:
        """Return the temperature for the trained log-probs; the logits are divided by this number.
        It is the sampler's temperature, or 1 for a greedy sampler."""
        return self.x.generation.temperature or 1.0

    def assemble_batch(self, rollouts: Sequence[Rollout]) -> Batch:
        """Convert rollouts to tensors on the policy's device."""
        device = next(self.model.parameters()).device
        return assemble(rollouts, pad_token_id=self.policy.pad_token_id, device=device)
