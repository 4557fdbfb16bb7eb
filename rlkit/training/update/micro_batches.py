"""The size of a run's micro-batches. If memory runs out, halve them and do the work again, or
raise an error with the key to lower."""

from __future__ import annotations

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
    """Memory ran out, and a smaller micro-batch does not help. The message names the key to
    lower."""


class MicroBatches:
    """trainer.micro_batch_tokens, halved as often as memory ran out."""

    def __init__(self, tokens: int):
        self.tokens = tokens
        self.halvings = 0
        self.minibatch: Minibatch | None = None  # the minibatch whose update is running or failed

    @property
    def limit(self) -> int:
        """The most tokens of a micro-batch."""
        return max(1, self.tokens >> self.halvings)

    def of(self, batch: Batch) -> Iterable[tuple[Tensor, bool]]:
        """The micro-batches of this rank as row numbers, and whether each counts. Every rank has
        the same number of micro-batches; some may be padding and do not count."""
        if ranks.size() == 1:
            return ((rows, True) for rows in split_into_micro_batches(batch, self.limit))
        lengths = batch.attention_mask.sum(1)
        own = ranks.assign_groups(lengths, batch.group_ids[batch.rollout_ids])
        mine = replace(batch, response_mask=batch.response_mask & own[:, None])
        return ranks.pad_work(
            list(split_into_micro_batches(mine, self.limit)),
            spare=lambda: list(split_into_micro_batches(batch, 1))[-1],
        )

    def retry_halved(
        self, batch: Batch, work: Callable[[], T], terms: UpdateTerms | None = None
    ) -> T:
        """Return the value of `work`. If memory runs out, repeat it with half as many tokens per
        micro-batch, as long as this splits `batch`.

        Micro-batches stay small, also in the checkpoint; this changes only the last bits of
        gradients. `work` must start from scratch each time; additions of a failed try to `terms`
        are removed. Several ranks do not retry, because they would no longer do the same work.
        Raises: OutOfMemory.
        """
        while True:
            before = terms.remember() if terms else None
            try:
                return work()
            except torch.OutOfMemoryError as error:
                message = str(error).splitlines()[0]
            # not in the handler, because the error's frames keep the tensors alive there
            if terms is not None and before is not None:
                terms.go_back(before)
            self.halve(batch, message)

    def retry_update(self, minibatch: Minibatch, work: Callable[[], T], terms: UpdateTerms) -> T:
        """Call `retry_halved` for the update of a minibatch, and note the minibatch for the debug
        bundle."""
        self.minibatch = minibatch
        done = self.retry_halved(minibatch, work, terms)
        self.minibatch = None
        return done

    def halve(self, batch: Batch, message: str) -> None:
        """Halve the tokens of a micro-batch. Raises: OutOfMemory if this does not split the
        batch."""
        splits = any(
            len(set(batch.rollout_ids[rows].tolist())) > 1
            for rows in split_into_micro_batches(batch, self.limit)
        )
        if ranks.size() > 1 or not splits:
            one = (
                "each is one rollout already: lower generation.max_new_tokens, or set"
                " model.gradient_checkpointing=true or model.lora.rank=16"
            )
            remedy = "lower trainer.micro_batch_tokens" if splits else one
            raise OutOfMemory(
                f"out of memory in the update, with micro-batches of {self.limit} tokens; {remedy}"
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
    """Run a block. If memory runs out, raise OutOfMemory with `remedy`, the key to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"out of memory in {what}: {remedy} ({str(error).splitlines()[0]})"
        ) from error
