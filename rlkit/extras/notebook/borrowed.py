"""Make a learner from a notebook's own objects: its model, its optimizer (perhaps of several
networks), and its reference model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from rlkit.algorithm import KL, Algorithm
from rlkit.rewards import Reward
from rlkit.training.experiment import BatchSize, Evaluation, Experiment, ModelSpec, TaskSource
from rlkit.training.references import none
from rlkit.types import Environment, Policy, Reference


class Share:
    """Present one network's part of an optimizer of several networks as a separate optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, net: nn.Module):
        self.optimizer = optimizer
        self.own = {id(p) for p in net.parameters()}
        self.param_groups = [
            group
            for group in optimizer.param_groups
            if any(id(p) in self.own for p in group["params"])
        ]

    def step(self) -> None:
        """Take an optimizer step that only changes this network's parameters."""
        others = [
            (p, p.grad)
            for group in self.optimizer.param_groups
            for p in group["params"]
            if id(p) not in self.own
        ]
        for p, _ in others:
            p.grad = None
        self.optimizer.step()
        for p, grad in others:
            p.grad = grad


def no_optimizer(parameters: Any) -> Any:
    """Stand for an optimizer that exists already; never called. It sets no learning rate, so the
    optimizer keeps its own."""


def experiment(policy: Policy, algorithm: Algorithm, **parts: Any) -> Experiment:
    """Make the experiment for a learner from a notebook's parts. The model, the optimizers and the
    rollouts exist already, and there is no evaluation."""
    some: dict[str, Any] = {
        "seed": 0,
        "batch": BatchSize(1, 1),
        "environment": Environment(),
        "kl": KL("none"),
        "reference": none(),
    }
    some |= {
        "reward": Reward("given", {}),
        "task": TaskSource(lambda split: ()),
        "model": ModelSpec(lambda device: policy),
    } | parts
    algorithm = algorithm._replace(critic=algorithm.critic._replace(optimizer=no_optimizer))
    evaluation = Evaluation(some["reward"], n=0)
    return Experiment(
        algorithm.name, algorithm=algorithm, optimizer=no_optimizer, evaluation=evaluation, **some
    )


def given(model: nn.Module | None, update: Callable[..., Any] | None = None) -> Reference:
    """Describe a reference model that the caller keeps. `update` is a function of (reference model,
    policy model, step=, kl=). It changes the reference model in place after a step."""

    def updated(state: nn.Module, policy: nn.Module, **progress: Any) -> nn.Module:
        if update is not None:
            update(state, policy, **progress)
        return state

    return Reference(
        "given",
        lambda policy, step: model,
        updated,
        lambda state, _: nullcontext(state),
        lambda state: {},
        lambda state, *_: state,
    )
