"""Try the largest micro-batch of a run before its first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlkit.models.log_probs import forward_logprobs
from rlkit.models.packing import pack
from rlkit.training.activations import longest_lengths
from rlkit.training.update.record import Update
from rlkit.types import Batch, Rollout, Step, Task


def probe_memory(u: Update, tasks: Sequence[Task]) -> None:
    """Run a forward and backward pass on a full micro-batch of the longest possible rollouts.
    During these passes, memory for the optimizer's moments is reserved.

    The caller does this before the first step on a GPU. If memory is too small, the run then fails
    in the first minute and not in the first hour.

    Raises: OutOfMemory.
    """
    batch = build_longest_rollouts(u, tasks)
    nets = [net for net in (u.model, u.critic) if net is not None]

    def work() -> None:
        moments = [
            torch.empty_like(p)
            for net in nets
            for p in net.parameters()
            if p.requires_grad
            for _ in range(2)
        ]
        part = next(u.micro.split(batch))  # the first micro-batch is full
        packed = pack(batch.ids[part], batch.response_mask[part])
        scores = forward_logprobs(u.model, packed, temperature=u.temperature, critic=u.critic)
        loss = scores.logprobs.sum() + (0.0 if scores.values is None else scores.values.sum())
        loss.backward()
        del moments

    u.micro.retry_halved(batch, work)
    for net in nets:
        net.zero_grad()


def build_longest_rollouts(u: Update, tasks: Sequence[Task]) -> Batch:
    """Build a batch of rollouts with the greatest possible length. They are as many as one
    minibatch has, or as fill one micro-batch even if their prompts took no space. The first tasks,
    the environment and the model limit the length."""
    x = u.x
    prompt, width = longest_lengths(x, u.policy, tasks)
    embedding: Any = u.model.get_input_embeddings()  # type: ignore[operator]

    def ids(begin: int, end: int, row: int) -> tuple[int, ...]:
        return tuple((column + row) % embedding.num_embeddings for column in range(begin, end))

    # A group shares its prompt, as in a run, because shared prompts may change the kernels of
    # attention.
    rollouts = []
    fill = -(-u.micro.limit // max(1, width - prompt))
    most = -(-x.batch.prompts * x.batch.group_size // x.algorithm.minibatches)
    for row in range(min(fill, most)):
        group = row // x.batch.group_size
        reply = ids(prompt, width, row)
        step = Step((), ids(0, prompt, group), reply, (0.0,) * len(reply), "stop")
        rollouts.append(Rollout(Task("probe", ()), (step,), group=group))
    return u.assemble_batch(rollouts)
