"""Step the optimizers of policy and critic, and make them. One of them is an AdamW with 8-bit
moments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import isfinite
from typing import Any

import torch

from rlkit.algorithm import Critic, hyperparameters
from rlkit.distributed import ranks
from rlkit.errors import ConfigError, NonFinite
from rlkit.models.critic import make_critic
from rlkit.system.sharding import is_sharded
from rlkit.training.experiment import Experiment
from rlkit.training.metrics import NAN
from rlkit.training.schedules import list_phases
from rlkit.training.update.micro_batches import name_remedy
from rlkit.training.update.record import Update
from rlkit.types import bound, plain, safe

POLICY = 0
CRITIC = 1


class Optimizers:
    """Hold the optimizer of the policy and, if there is a critic, the optimizer of the critic, in
    this order. For each optimizer, this class counts how many consecutive steps were skipped
    because the loss or the gradient was not finite."""

    def __init__(self, made: Sequence[torch.optim.Optimizer]):
        self.made = list(made)
        self.nonfinite: dict[int, int] = {}

    def forget(self) -> None:
        """Reset the moments of all optimizers."""
        for optimizer in self.made:
            optimizer.state.clear()

    def step(
        self,
        u: Update,
        index: int,
        configured: Callable[..., Any],
        parameters: Iterable[torch.nn.Parameter],
        loss: float,
    ) -> tuple[float, float]:
        """Clip the gradients, and step one optimizer at the present learning rate. Return the norm
        of the gradient before clipping, and the learning rate.

        If the loss or the norm is not finite, the step is skipped and the returned norm is nan.

        Raises: NonFinite after trainer.max_nonfinite consecutive skipped steps.
        """
        optimizer = self.made[index]
        for group in optimizer.param_groups:
            group["lr"] = hyperparameters(configured).get("lr", group["lr"])
        parameters = list(parameters)
        # the backward pass has already summed the gradients of shards over the ranks
        u.host.all_reduce(p.grad for p in parameters if not is_sharded(p))
        clipped = torch.nn.utils.clip_grad_norm_(parameters, u.x.trainer.max_grad_norm)
        norm = float(ranks.gather_tensors(clipped))
        finite = isfinite(norm) and isfinite(loss)
        skipped = 0 if finite else self.nonfinite.get(index, 0) + 1
        self.nonfinite[index] = skipped
        if skipped >= u.x.trainer.max_nonfinite:
            raise NonFinite(
                f"step {u.step + 1}: {skipped} updates in a row had a loss ({loss:g}) or a"
                f" gradient (norm {norm:g}) that is not finite and were skipped"
                " (trainer.max_nonfinite); a lower optimizer.lr, trainer.precision=32-true or"
                " another kl often helps"
            )
        if finite:
            remedy = "train adapters (model.lora.rank=16), or a smaller model"
            with name_remedy("the optimiser's step", remedy):
                u.host.optimizer_step(optimizer)
        return (norm if finite else NAN), optimizer.param_groups[0]["lr"]


def make_first_critic(x: Experiment, model: torch.nn.Module) -> torch.nn.Module | None:
    """Make the critic of the first phase that trains a critic. Return None if no phase trains a
    critic. The critic is made at the start of the run, even if only a later phase trains it."""
    active = find_first_critic(x)
    if active is None:
        return None
    # the critic's random start must not change the random numbers of anything else
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(x.seed)
        return make_critic(model, model=active.model, trunk_gradient=active.trunk_gradient)


def find_first_critic(x: Experiment) -> Critic | None:
    """Return the critic's settings in the first phase that trains a critic, or None if no phase
    does."""
    every = (phase.algorithm.critic for phase in list_phases(x).values())
    return next((critic for critic in every if critic.active), None)


def make_optimizers(
    x: Experiment, model: torch.nn.Module, critic: torch.nn.Module | None
) -> list[torch.optim.Optimizer]:
    """Make new optimizers for the policy and, if there is one, for the critic."""
    made = [make_optimizer(x.optimizer, [p for p in model.parameters() if p.requires_grad])]
    settings = find_first_critic(x)
    if critic is not None and settings is not None:
        assert settings.optimizer is not None
        made.append(make_optimizer(settings.optimizer, list(critic.parameters())))
    return made


def make_optimizer(
    make: Callable[..., Any], parameters: Sequence[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Make the optimizer of these parameters. On CUDA, torch's Adam and AdamW are made with
    fused=True: one kernel updates all tensors instead of about ten kernels."""
    free = not bound(make).keys() & {"fused", "foreach"}
    if (
        free
        and plain(make) in (torch.optim.Adam, torch.optim.AdamW)
        and all(p.device.type == "cuda" for p in parameters)
    ):
        make = partial(make, fused=True)
    return make(parameters)


@safe("betas")
def adamw_8bit(
    parameters: Sequence[torch.nn.Parameter],
    *,
    lr: float,
    betas: Sequence[float] = (0.9, 0.99),
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """Make an AdamW with 8-bit moments, quantised in blocks. The two moments take 2 bytes per
    parameter instead of 8. Tensors below 4,096 entries keep float32 moments.

    Raises: ConfigError if the package bitsandbytes is missing, or if the weights are sharded.
    Source: Dettmers et al. 2022, arXiv:2110.02861.
    """
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f"optimizer=adamw_8bit: {error}; pip install bitsandbytes, or use optimizer=adamw"
        ) from error
    if any(map(is_sharded, parameters)):
        raise ConfigError(
            "optimizer=adamw_8bit: bitsandbytes cannot step sharded weights; use trainer=ddp, or"
            " optimizer=adamw"
        )
    return AdamW8bit(parameters, lr=lr, betas=tuple(betas), weight_decay=weight_decay)
