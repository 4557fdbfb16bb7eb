"""The minibatches of a step, as a step makes them without a reference to score again."""

from __future__ import annotations

from collections.abc import Iterator

from rlkit.algorithm import Algorithm
from rlkit.training.update.loss import loss_weights
from rlkit.training.update.split import select, split_into_minibatches
from rlkit.types import Minibatch, Weighted


def minibatches(batch: Weighted, algorithm: Algorithm, seed: int) -> Iterator[Minibatch]:
    """Every update's batch, with the weights of its tokens."""
    for epoch in split_into_minibatches(batch, algorithm, seed):
        for rows in epoch:
            yield loss_weights(select(batch, rows), algorithm)
