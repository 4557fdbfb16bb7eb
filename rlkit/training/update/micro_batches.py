"""Choose the size of a run's micro-batches. If memory runs out, the micro-batches are halved and
the work is repeated. If smaller micro-batches do not help, an error is raised. Its message names a
change of the config that saves memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from rlkit.distributed import ranks
from rlkit.errors import RLKitError
from rlkit.training.metrics import UpdateTerms
from rlkit.training.update.split import split_into_micro_batches
from rlkit.types import Batch, Minibatch

T = TypeVar("T")


class OutOfMemory(RLKitError, MemoryError):
    """Raised if memory runs out and smaller micro-batches do not help. The message names a change
    of the config that saves memory, for example a config key whose value to lower."""


class MicroBatches:
    """Hold the size of a run's micro-batches. The size begins with trainer.micro_batch_tokens, and
    is halved each time memory runs out.

    Args:
      tokens: trainer.micro_batch_tokens.
      packed_context: the longest row that the model reads packed, in tokens. If a batch has a
        longer row, the tokens shared between its rows count in each row.
    """

    def __init__(self, tokens: int, *, packed_context: float = math.inf):
        self.tokens = tokens
        self.packed_context = packed_context
        self.halvings = 0
        self.minibatch: Minibatch | None = None  # the minibatch of the running or failed update

    @property
    def limit(self) -> int:
        """Return the largest number of tokens in a micro-batch."""
        return max(1, self.tokens >> self.halvings)

    def of(self, batch: Batch) -> Iterable[tuple[Tensor, bool]]:
        """Split a batch into this rank's micro-batches. Each item is a pair: the numbers of the
        rows in a micro-batch, and whether the results of this micro-batch count. Every rank gets
        the same number of micro-batches. A rank with too few micro-batches gets additional ones
        with results that do not count."""
        if ranks.size() == 1:
            return ((rows, True) for rows in self.split(batch))
        lengths = batch.attention_mask.sum(1)
        own = ranks.assign_groups(lengths, batch.group_ids[batch.rollout_ids])
        mine = replace(batch, response_mask=batch.response_mask & own[:, None])
        return ranks.pad_work(
            list(self.split(mine)),
            spare=lambda: list(split_into_micro_batches(batch, 1))[-1],
        )

    def split(self, batch: Batch) -> Iterator[Tensor]:
        """Split a batch into micro-batches of at most `limit` tokens; yield the numbers of the rows
        in each."""
        packs = batch.ids.shape[1] <= self.packed_context
        return split_into_micro_batches(batch, self.limit, packs=packs)

    def retry_halved(
        self, batch: Batch, work: Callable[[], T], terms: UpdateTerms | None = None
    ) -> T:
        """Call `work` and return its value. If memory runs out, call `work` again with half as many
        tokens per micro-batch, as long as smaller micro-batches split `batch` further.

        The micro-batches stay small from then on, also after a resume from a checkpoint with the
        same trainer.micro_batch_tokens. This changes only the last bits of gradients. `work` must
        start from scratch each time. Everything that a failed try added to `terms` is removed. A
        run with several ranks does not retry, because the ranks would no longer do the same work.

        Raises: OutOfMemory.
        """
        while True:
            before = terms.remember() if terms else None
            try:
                return work()
            except torch.OutOfMemoryError as error:
                message = str(error).splitlines()[0]
            # not in the `except` block, because inside it the error's frames keep the tensors alive
            if terms is not None and before is not None:
                terms.go_back(before)
            self.halve(batch, message)

    def retry_update(self, minibatch: Minibatch, work: Callable[[], T], terms: UpdateTerms) -> T:
        """Call `retry_halved` for the update of a minibatch. During the update the attribute
        `self.minibatch` holds the argument `minibatch`. If the update fails, the attribute stays
        set, so that the debug bundle can save it."""
        self.minibatch = minibatch
        done = self.retry_halved(minibatch, work, terms)
        self.minibatch = None
        return done

    def halve(self, batch: Batch, message: str) -> None:
        """Halve the number of tokens in a micro-batch. Raise OutOfMemory if smaller micro-batches
        would not split the batch further."""
        # of all sampled tokens: a teacher also reads the rollouts that the reward leaves out
        packs = self.split(batch.whole())
        splits = any(len(set(batch.rollout_ids[rows].tolist())) > 1 for rows in packs)
        if ranks.size() > 1 or not splits:
            one = (
                "each is one rollout already: lower generation.max_new_tokens, or set"
                " model.gradient_checkpointing=true or model.lora.rank=16"
            )
            remedy = "lower trainer.micro_batch_tokens" if splits else one
            raise OutOfMemory(
                f"out of memory in training, with micro-batches of {self.limit} tokens; {remedy}"
                f" ({message})"
            )
        self.halvings += 1
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(
            f"warning: out of memory: micro-batches are halved to {self.limit} tokens, and the work"
            f" is done again; set trainer.micro_batch_tokens={self.limit} to start with this size",
            flush=True,
        )


@contextmanager
def name_remedy(what: str, remedy: str) -> Iterator[None]:
    """Return a context manager that raises OutOfMemory if memory runs out in its block. The message
    names `remedy`, a change of the config that saves memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"out of memory in {what}: {remedy} ({str(error).splitlines()[0]})"
        ) from error
