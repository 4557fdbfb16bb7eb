"""Out of memory: micro-batches are halved and the work is done again, or the key to lower is
named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from rlkit.algorithm import micro_batches
from rlkit.distributed import ranks
from rlkit.environments import environment_of
from rlkit.episodes.episode import opening
from rlkit.errors import RLKitError
from rlkit.models.chat import encode_prompt
from rlkit.models.log_probs import forward_logprobs
from rlkit.models.packing import pack
from rlkit.training.metrics import UpdateTerms
from rlkit.types import Batch, Task

T = TypeVar("T")


class OutOfMemory(RLKitError, MemoryError):
    """Memory ran out where a smaller micro-batch does not help; the message names the key to
    lower."""


def retried(
    learner: Any, batch: Batch, work: Callable[[], T], terms: UpdateTerms | None = None
) -> T:
    """What `work` gives; where memory runs out, done again with micro-batches of half as many
    tokens, as often as that splits `batch`.

    The smaller micro-batches stay, in the checkpoint too: they change no gradient but in its last
    bits. `work` must start from scratch each time; what it has added to `terms` is taken out again.
    Several ranks do not retry: they would no longer do the same work.
    Raises: OutOfMemory.
    """
    while True:
        before = terms.taken() if terms else None
        try:
            return work()
        except torch.OutOfMemoryError as error:
            message = str(error).splitlines()[0]
        tokens = (
            learner.micro_batch_tokens
        )  # outside of the handler: the error holds the frames, and they hold the tensors
        splits = any(
            len(set(batch.rollout_ids[rows].tolist())) > 1 for rows in micro_batches(batch, tokens)
        )
        if ranks.size() > 1 or not splits:
            one = (
                "each is one rollout already: lower generation.max_new_tokens, set"
                " model.gradient_checkpointing=true or model.lora.rank=16"
            )
            remedy = "lower trainer.micro_batch_tokens" if splits else one
            raise OutOfMemory(
                f"out of memory in the update, with micro-batches of {tokens} tokens; {remedy}"
                f" ({message})"
            )
        learner.halvings += 1
        if terms is not None and before is not None:
            terms.back_to(before)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(
            f"warning: out of memory: micro-batches are halved to {learner.micro_batch_tokens}"
            " tokens, and the work is done again;"
            f" trainer.micro_batch_tokens={learner.micro_batch_tokens} would begin with that",
            flush=True,
        )


@contextmanager
def named(what: str, remedy: str) -> Iterator[None]:
    """A block in which running out of memory names the key to lower. Raises OutOfMemory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"out of memory in {what}: {remedy} ({str(error).splitlines()[0]})"
        ) from error


def probe_memory(learner: Any, tasks: Sequence[Task]) -> None:
    """One forward and backward pass of a micro-batch of the longest rollouts there can be, with
    room for the optimiser's moments.

    It is done before the first step on a GPU, so that memory runs out in the first minute and not
    in the first hour.
    Raises: OutOfMemory.
    """
    x = learner.x
    policy = learner.policy
    turns = [(environment_of(x.environment, task), task) for task in tasks[:16]]
    openings = [opening(task, environment) for environment, task in turns]
    prompts = [len(encode_prompt(policy.renderer, own.prompt, own.schemas)) for own in openings]
    longest = max(
        (
            p + e.max_steps * x.generation.max_new_tokens
            for p, (e, _) in zip(prompts, turns, strict=True)
        ),
        default=1,
    )
    width = min(policy.context_length, longest)
    rows = max(1, learner.micro_batch_tokens // width)
    row = torch.arange(rows)[:, None]
    column = torch.arange(width)
    prompt = min(prompts, default=0)
    # A group shares its prompt, as in a run: attention over packed rows may take other kernels
    # then.
    ids = (
        column + torch.where(column < prompt, row // x.batch.group_size, row)
    ) % policy.model.get_input_embeddings().num_embeddings
    mask = (column >= prompt).expand(rows, width)
    of = {
        "ids": ids,
        "response_mask": mask,
        "rollout_ids": row[:, 0],
        "group_ids": row[:, 0] // x.batch.group_size,
    }
    fields: Any = dict.fromkeys(Batch._fields) | {
        name: value.to(learner.device) for name, value in of.items()
    }
    batch = Batch(**fields)  # what cuts it into micro-batches

    def work() -> None:
        moments = [
            torch.empty_like(p)
            for p in learner.nets.parameters()
            if p.requires_grad
            for _ in range(2)
        ]
        for part in micro_batches(batch, learner.micro_batch_tokens):
            critic = learner.critic if x.algorithm.critic.active else None
            scores = forward_logprobs(
                learner.model,
                pack(batch.ids[part], batch.response_mask[part]),
                temperature=learner.temperature,
                critic=critic,
            )
            loss = scores.logprobs.sum() + (0.0 if scores.values is None else scores.values.sum())
            loss.backward()
        del moments

    retried(learner, batch, work)
    learner.nets.zero_grad()
