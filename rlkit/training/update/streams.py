"""Add the gradients of streams to an update. A stream is a training signal other than the reward.
It adds `coef · Σ weights · loss per token` to the loss of an update. Each stream has its own pass,
over its own tokens.

    loss = reward loss + Σ_c coef_c Σ_t w_ct l_ct

l_ct is the loss of stream c at token t. The weights w_ct are those of the stream's aggregation over
the tokens of stream c, and are fixed before the batch is split. Therefore a stream does not change
the gradients of other streams. A stream computes nothing if it has no tokens, or if its coefficient
is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rlkit.algorithm import Stream, call_part, require_number
from rlkit.episodes import demonstrations
from rlkit.errors import DataError
from rlkit.functional import chunked_divergence, fill_masked, no_correction, token_mean
from rlkit.models.head import split_model
from rlkit.models.log_probs import choose_chunk_logits, compute_states, forward_logprobs
from rlkit.models.packing import Packed, pack
from rlkit.training.metrics import UpdateTerms
from rlkit.training.teachers import build_shown_prompts
from rlkit.training.update.record import Update
from rlkit.training.update.sampled import select_parts, select_rows
from rlkit.training.update.split import select
from rlkit.types import Batch, Minibatch, TokenScorer, plain

# rollout → (number of tokens in the policy's first prompt, token ids of the teacher's prompt)
Prompts = dict[int, tuple[int, list[int]]]


class Imitation(NamedTuple):
    """Describe a pass of a stream that imitates given tokens. The response_mask of `batch` marks
    these tokens."""

    name: str
    stream: Stream
    batch: Batch
    weights: Tensor  # [B, T] weight of each token in the stream's loss


class Taught(NamedTuple):
    """Describe a pass in which the policy learns from one teacher. The response_mask of `batch`
    marks the tokens of the pass."""

    name: str
    stream: Stream
    batch: Minibatch  # its field `weights` belongs to the reward's loss, not to this pass
    weights: Tensor  # [B, T] weight of each token, over the tokens of all teachers
    factor: Tensor | None  # [B, T] off-policy correction of the sampled tokens; None means 1
    teacher: str  # key of the teacher's model
    shown: Prompts | None  # prompts with the teacher's hint; None: the teacher reads the policy's


def list_stream_passes(u: Update, minibatch: Minibatch) -> Iterator[Imitation | Taught]:
    """Yield the passes of all streams in an update. The weights of a pass are fixed before the pass
    is split into micro-batches. A stream without tokens yields no pass.

    Raises: DataError if a part of the mixture has no teacher.
    """
    for name, stream in u.x.algorithm.active_streams.items():
        if name == "teacher":
            yield from _list_taught(u, stream, minibatch)
        else:
            batch = _select_imitated(u, stream, minibatch)
            if batch is not None and batch.response_mask.any():
                yield Imitation(name, stream, batch, _weights(stream, batch))


def _select_imitated(u: Update, stream: Stream, minibatch: Minibatch) -> Batch | None:
    """Return the batch of an imitation stream. The stream trains the policy to predict some tokens
    of this batch, marked by the response mask.

    With the mask "observations", the batch is the minibatch, and the marked tokens are the results
    of tools. Otherwise the batch has the conversations in the data rows of the minibatch's prompts,
    and the marked tokens are the replies. Return None if the stream applies to none of these
    prompts.
    """
    if stream.mask == "observations":
        assert minibatch.observed_mask is not None
        batch = replace(minibatch, response_mask=minibatch.observed_mask)
        return select_parts(batch, u.trained, stream)
    own = [u.trained[i] for i in minibatch.rollout_ids.unique().tolist()]
    tasks = {rollout.group: rollout.task for rollout in own if stream.of(rollout.task.part)}
    if not tasks:
        return None
    return u.assemble_batch(demonstrations(u.policy, list(tasks.values()), u.x.environment))


def _list_taught(u: Update, stream: Stream, minibatch: Minibatch) -> Iterator[Taught]:
    """Yield one pass for each teacher, over the rows from the teacher's part of the mixture. The
    weights are computed over the rows of all teachers together."""
    teacher = u.x.teacher
    batch = select_parts(minibatch.whole(), u.trained, stream)
    shown = None
    rows = batch.rollout_ids.tolist()
    if teacher.show is not None:
        shown = build_shown_prompts(u.policy, u.trained, teacher.show, u.x.environment)
        # a row whose context was rewritten does not begin with the first prompt, so the hint cannot
        # be put into this row
        first = (batch.step_ids[:, 0] == 0).tolist()
        batch = select_rows(batch, [own and i in shown for own, i in zip(first, rows, strict=True)])
    if not batch.response_mask.any():
        return
    parts = [u.trained[i].task.part for i in rows]
    unknown = {part for part in parts if stream.of(part)} - set(teacher.models)
    if "" not in teacher.models and unknown:
        raise DataError(
            f"teacher={teacher.name}: the part {min(unknown)!r} has no teacher; these parts have"
            f" one: {', '.join(teacher.models)}"
        )
    weights = _weights(stream, batch)
    for key in teacher.models:
        own_batch = select_rows(batch, [not key or key == part for part in parts])
        if own_batch.response_mask.any():
            factor = _correction(u, own_batch)
            yield Taught("teacher", stream, own_batch, weights, factor, key, shown)


def _weights(stream: Stream, batch: Batch) -> Tensor:
    """Return each token's share of a stream's loss [B, T]."""
    with torch.no_grad():
        weights, _ = call_part("aggregation", stream.aggregation or token_mean, batch.quantities)
        return fill_masked(weights, batch.response_mask, 0.0)


def _correction(u: Update, batch: Minibatch) -> Tensor | None:
    """Return the off-policy correction [B, T] for a pass in which the policy learns from a teacher.
    None means that every token has the factor 1."""
    function = u.x.algorithm.correction
    nothing = plain(function) is no_correction
    if nothing or batch.logprobs_old is None or batch.old_share is not None:
        return None
    with torch.no_grad():
        return call_part("correction", function, batch.quantities)[0]


def backward_stream(u: Update, given: Imitation | Taught, terms: UpdateTerms) -> float:
    """Compute the gradient of a stream's pass, one micro-batch at a time, and add it to the
    gradients of the update. Return this rank's part of the loss."""
    total = 0.0
    for rows, counts in u.micro.of(given.batch):
        some: Batch = select(given.batch, rows)
        packed = pack(some.ids, some.response_mask)
        with u.clock.part("model"):
            if isinstance(given, Taught):
                tokens = compute_divergences(u, given, rows, packed)
            else:
                tokens = compute_nll(u, packed)
        weights = given.weights[rows][:, : some.ids.shape[1]][some.response_mask]
        loss = require_number(given.stream.coef) * (weights * tokens).sum() * float(counts)
        total += float(loss.detach())
        with u.clock.part("model"):
            u.host.backward(loss)
        if counts:
            terms.add_stream(given.name, tokens.detach(), loss.detach(), packed)
    return total


def compute_nll(u: Update, packed: Packed) -> Tensor:
    """Compute -log π of the pass's tokens [M]."""
    scores = u.host.forward(u.model, forward_logprobs, packed, temperature=u.temperature)
    return -scores.logprobs[packed.response_mask]


def compute_divergences(u: Update, given: Taught, rows: Tensor, packed: Packed) -> Tensor:
    """Compute the divergence between policy and teacher at each token of some rows of a pass [M].
    The teacher reads the same reply as the policy. Before the reply, the teacher reads its own
    prompt if it has one, and otherwise the policy's prompt."""
    batch = select(given.batch, rows)
    mask = batch.response_mask
    factor = None if given.factor is None else given.factor[rows][:, : mask.shape[1]]
    teacher = compute_teacher_states(u, given, batch, packed)
    # without the trainer's old log-probs there is no correction, and the ratio is π / μ, the policy
    # over the sampling policy
    before = batch.logprobs_old if batch.old_share is None else batch.logprobs_sampler
    return u.host.forward(
        u.model,
        compute_token_divergences,
        packed,
        teacher,
        None if before is None else before[mask],
        None if factor is None else factor[mask],
        divergence=given.stream.loss,
        temperature=u.temperature,
    )


def compute_teacher_states(
    u: Update, given: Taught, batch: Batch, packed: Packed
) -> tuple[Tensor, Any]:
    """Return the teacher's last hidden states at the tokens of the pass [M, H], and the teacher's
    head. A teacher that is a TokenScorer returns this pair itself."""
    rows = (
        (batch.ids, batch.response_mask)
        if given.shown is None
        else show_to_teacher(batch, given.shown)
    )
    with u.kept.teacher(given.teacher) as model, torch.no_grad():
        if isinstance(model, TokenScorer):
            columns = split_model(u.model)[1].weight.shape[0]
            assert given.stream.loss is not None
            return model.score_tokens(*rows, divergence=given.stream.loss, columns=columns)
        theirs = packed if given.shown is None else pack(*rows)
        if not torch.equal(theirs.targets[theirs.inverse], packed.targets[packed.inverse]):
            raise RuntimeError(
                "the teacher does not read the tokens that the policy sampled; this is a bug in"
                " rlkit.training.update.streams"
            )
        # detached, because a live teacher is the policy itself
        read = u.host.forward(model, compute_states, theirs)[theirs.inverse]
        return read.detach(), split_model(model)[1]


def compute_token_divergences(
    model: nn.Module,
    packed: Packed,
    teacher: tuple[Tensor, Any],
    old: Any,
    factor: Any,
    **settings: Any,
) -> Tensor:
    """Compute the divergence at the sampled tokens of packed rows [M], in the order of the response
    mask."""
    hidden = compute_states(model, packed)[packed.inverse]
    head = split_model(model)[1]
    size = max(
        1,
        choose_chunk_logits(hidden.device)
        // (head.weight.shape[0] + getattr(teacher[1], "weight", head.weight).shape[0]),
    )
    return chunked_divergence(
        (hidden, head),
        teacher,
        packed.targets[packed.inverse],
        old,
        factor,
        chunk_size=size,
        **settings,
    )


def show_to_teacher(batch: Batch, shown: Prompts) -> tuple[Tensor, Tensor]:
    """Return the rows in the form that the teacher reads, as token ids and mask [B, T']. The
    teacher's prompt takes the place of the policy's prompt. The tokens after the prompt stay the
    same."""
    ids = []
    masks = []
    for row, rollout in enumerate(batch.rollout_ids.tolist()):
        length = int(batch.attention_mask[row].sum())
        own, prompt = shown.get(rollout, (length, []))
        rest = slice(own, length)
        ids.append(torch.cat([batch.ids.new_tensor(prompt), batch.ids[row, rest]]))
        masks.append(
            torch.cat([batch.response_mask.new_zeros(len(prompt)), batch.response_mask[row, rest]])
        )
    return pad_sequence(ids, batch_first=True), pad_sequence(masks, batch_first=True)
