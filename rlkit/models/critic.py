"""Compute values with a critic, from the hidden states before sampled tokens. A critic sees the
context of a token, and never the token itself."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.models.head import split_model
from rlkit.models.log_probs import compute_states
from rlkit.models.packing import Packed
from rlkit.system.adapters import base_model


class ValueHead(nn.Module):
    """Compute a value from a hidden state: hidden → hidden/2 → ReLU → 1, in float32. The last layer
    starts at zero, so every value starts at 0."""

    def __init__(self, hidden: int):
        super().__init__()
        half = max(1, hidden // 2)
        self.hidden = nn.Linear(hidden, half)
        self.value = nn.Linear(half, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [..., hidden] to values [...]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.value(self.hidden(hidden.to(self.hidden.weight.dtype)).relu()).squeeze(-1)


class HeadCritic(nn.Module):
    """Put a value head on the policy's own trunk. The gradient of the value loss reaches the trunk
    only with `trunk_gradient`."""

    def __init__(self, policy: nn.Module, *, trunk_gradient: bool):
        super().__init__()
        self.trunk_gradient = trunk_gradient
        self.head = ValueHead(read_width(policy))

    def forward(self, hidden: Tensor, packed: Packed) -> Tensor:
        """Return the values [K] of the states [K, H] computed by the policy's trunk."""
        return self.head(hidden if self.trunk_gradient else hidden.detach())


class SeparateCritic(nn.Module):
    """Put a value head on a separate trunk, at first a copy of the policy's trunk. Both the
    separate trunk and the head are trained."""

    def __init__(self, policy: nn.Module):
        super().__init__()
        causal: Any = base_model(policy)
        self.model = copy.deepcopy(causal).float().requires_grad_(True)
        # The head of the language model is never used. Train it only if it is also the embedding.
        self.model.get_output_embeddings().requires_grad_(self.model.config.tie_word_embeddings)
        self.head = ValueHead(read_width(policy))

    def forward(self, hidden: Tensor, packed: Packed) -> Tensor:
        """Return the values [K] of the states before the K distinct sampled tokens. The policy's
        hidden states (`hidden`) are not used."""
        return self.head(compute_states(self.model, packed))


def read_width(policy: nn.Module) -> int:
    """Return the size of the last hidden states."""
    _, head = split_model(policy)
    return int(head.weight.shape[1])


def make_critic(policy: nn.Module, *, model: str, trunk_gradient: bool = False) -> nn.Module:
    """Make the critic selected by `algorithm.critic.model`, on the policy's device."""
    device = next(policy.parameters()).device
    critic = (
        SeparateCritic(policy)
        if model == "separate"
        else HeadCritic(policy, trunk_gradient=trunk_gradient)
    )
    return critic.to(device)
