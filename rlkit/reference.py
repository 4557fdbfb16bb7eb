"""Reference policies: an (init, update) pair over explicit state, and how to score with it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rlkit.types import Reference


def none() -> Reference:
    """No reference: nothing is kept, nothing is scored."""
    return Reference(name="none", init=lambda policy: None, update=_keep, model=_no_model)


def frozen() -> Reference:
    """The policy as it was at the start, for the whole run.

    Under LoRA the state is empty: the start is the same model with its adapter off. Otherwise the state is a copy of the
    weights, without gradient. It never moves, so it is made again from model.path on resume and not checkpointed.
    """
    return Reference(name="frozen", init=_freeze, update=_keep, model=_frozen_model)


def _keep(state: Any, policy: nn.Module, **progress: Any) -> Any:
    return state


def _freeze(policy: nn.Module) -> nn.Module | None:
    if hasattr(policy, "disable_adapter"):
        return None
    return copy.deepcopy(policy).requires_grad_(False).eval()


@contextmanager
def _frozen_model(state: nn.Module | None, policy: nn.Module) -> Iterator[nn.Module]:
    with torch.no_grad():
        if state is not None:
            yield state
        else:
            with policy.disable_adapter():  # type: ignore[operator]
                yield policy


@contextmanager
def _no_model(state: None, policy: nn.Module) -> Iterator[nn.Module]:
    raise ValueError("reference: none is configured, so there is nothing to score with; choose reference=frozen")
    yield policy
