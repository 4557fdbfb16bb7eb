"""The streams beside the reward's: each adds coef · Σ weights · loss per token to an update, in a
pass of its own over its own tokens.

loss = reward + Σ_c coef_c Σ_t w_ct l_ct, where the weights w_c sum to 1 over the stream's mask,
before the batch is split. So a stream leaves the gradients of the others as they are, and one
without tokens, or of coefficient 0, computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rlkit.algorithm import Stream, number, part, quantities, whole
from rlkit.episodes import demonstrations
from rlkit.episodes._assemble import rows as rows_of
from rlkit.errors import DataError
from rlkit.functional import chunked_divergence, fill_masked, no_correction, token_mean
from rlkit.models.chat import Renderer, encode_text
from rlkit.models.head import trunk_and_head
from rlkit.models.log_probs import CHUNK_LOGITS, forward_logprobs, states
from rlkit.models.packing import Packed, pack
from rlkit.training.teachers import shown_prompts
from rlkit.types import Batch, Rollout, TokenScorer

if TYPE_CHECKING:
    from rlkit.training.learner import Learner

Prompts = dict[
    int, tuple[int, list[int]]
]  # rollout → (tokens of its own first prompt, the teacher's)


class Pass(NamedTuple):
    """What one stream learns from in an update: the batch's response_mask is its mask, its weights
    are those of its tokens."""

    name: str
    stream: Stream
    batch: Batch
    teacher: str = ""  # key of the teacher's model
    shown: Prompts | None = None


def active(learner: Learner) -> dict[str, Stream]:
    """The streams beside the reward's that count in this step."""
    streams = learner.x.algorithm.streams
    return {
        name: stream
        for name, stream in streams.items()
        if name != "reward" and number(stream.coef) > 0
    }


def of_reward(batch: Batch, rollouts: Sequence[Rollout], stream: Stream | None) -> Batch:
    """The batch without the rollouts of parts that the reward's stream leaves to others."""
    if stream is None or stream.parts is None:
        return batch
    return batch._replace(response_mask=batch.response_mask & of_parts(batch, rollouts, stream))


def of_parts(batch: Batch, rollouts: Sequence[Rollout], stream: Stream) -> Tensor:
    """[B, 1] bool: whether the rollout of a row is of a part that the stream sees."""
    seen = torch.tensor(
        [stream.of(rollouts[i].task.part) for i in batch.rollout_ids.tolist()],
        device=batch.ids.device,
    )
    return seen[:, None]


def stream_passes(learner: Learner, minibatch: Batch) -> Iterator[Pass]:
    """Every pass of an update, with weights that are fixed before it is split; streams without a
    token are left out.

    Raises: DataError where a part of the mixture has no teacher.
    """
    for name, stream in active(learner).items():
        if name == "teacher":
            yield from teacher_passes(learner, stream, minibatch)
        elif stream.mask == "observations":
            assert minibatch.observed_mask is not None
            mask = minibatch.observed_mask & of_parts(minibatch, learner.trained, stream)
            yield from weighed(Pass(name, stream, minibatch._replace(response_mask=mask)))
        else:
            chosen = [
                i
                for i in minibatch.rollout_ids.unique().tolist()
                if stream.of(learner.trained[i].task.part)
            ]
            if not chosen:
                continue
            tasks = {learner.trained[i].group: learner.trained[i].task for i in chosen}
            found = learner.assembled(
                demonstrations(learner.policy, list(tasks.values()), learner.x.environment)
            )
            yield from weighed(Pass(name, stream, found))


def teacher_passes(learner: Learner, stream: Stream, minibatch: Batch) -> Iterator[Pass]:
    """One pass a teacher, each over the rows of its part of the mixture, with the weights of the
    whole mask."""
    teacher = learner.x.teacher
    batch = whole(minibatch)
    batch = batch._replace(
        response_mask=batch.response_mask & of_parts(batch, learner.trained, stream)
    )
    shown = None
    if teacher.show is not None:
        shown = shown_prompts(learner.policy, learner.trained, teacher.show, learner.x.environment)
        first = (
            batch.step_ids[:, 0] == 0
        )  # a row whose context was rewritten has no first prompt to show anything in
        told = torch.tensor(
            [i in shown for i in batch.rollout_ids.tolist()], device=batch.ids.device
        )
        batch = batch._replace(response_mask=batch.response_mask & (told & first)[:, None])
    for whole_pass in weighed(Pass("teacher", stream, batch, shown=shown)):
        parts = [learner.trained[i].task.part for i in batch.rollout_ids.tolist()]
        if "" not in teacher.models and (
            odd := {part for part in parts if stream.of(part)} - set(teacher.models)
        ):
            raise DataError(
                f"teacher={teacher.name}: there is no teacher for the part {min(odd)!r}; there are:"
                f" {', '.join(teacher.models)}"
            )
        for key in teacher.models:
            own = torch.tensor([not key or key == name for name in parts], device=batch.ids.device)
            mine = whole_pass.batch._replace(response_mask=batch.response_mask & own[:, None])
            if mine.response_mask.any():
                yield whole_pass._replace(batch=mine, teacher=key)


def weighed(given: Pass) -> Iterator[Pass]:
    """The pass with each token's share of its loss; nothing where there is no token."""
    if not given.batch.response_mask.any():
        return
    with torch.no_grad():
        weights, _ = part(
            "aggregation", given.stream.aggregation or token_mean, quantities(given.batch)
        )
        yield given._replace(
            batch=given.batch._replace(weights=fill_masked(weights, given.batch.response_mask, 0.0))
        )


def backward_stream(learner: Learner, given: Pass, terms: Any) -> float:
    """Adds the gradient of a pass, one micro-batch at a time; this rank's part of its loss."""
    from rlkit.training.update import rank_micro_batches, select

    total = 0.0
    batch = given.batch
    factor = correction(learner, batch) if given.name == "teacher" else None
    for rows, counts in rank_micro_batches(learner, batch):
        some = select(batch._replace(scale=factor), rows)
        packed = pack(some.ids, some.response_mask)
        with learner.clock.part("model"):
            tokens = (
                divergences(learner, given, some, packed)
                if given.name == "teacher"
                else nll(learner, packed)
            )
        assert some.weights is not None
        weights = some.weights[some.response_mask]
        loss = number(given.stream.coef) * (weights * tokens).sum() * float(counts)
        total += float(loss.detach())
        with learner.clock.part("model"):
            learner.host.backward(loss)
        if counts:
            terms.add_stream(given.name, tokens.detach(), loss.detach(), packed)
    return total


def correction(learner: Learner, batch: Batch) -> Tensor | None:
    """The off-policy correction of the sampled tokens of a teacher's pass; None where it is 1."""
    function = learner.x.algorithm.correction
    if (
        batch.logprobs_old is None
        or batch.old_share is not None
        or getattr(function, "func", function) is no_correction
    ):
        return None
    with torch.no_grad():
        return part("correction", function, quantities(batch))[0]


def nll(learner: Learner, packed: Packed) -> Tensor:
    """-log π of the pass's tokens [M]."""
    scores = learner.host.forward(
        learner.model, forward_logprobs, packed, temperature=learner.temperature
    )
    return -scores.logprobs[packed.response_mask]


def divergences(learner: Learner, given: Pass, batch: Batch, packed: Packed) -> Tensor:
    """The divergence at each of the pass's tokens [M]: the teacher reads the same reply, behind its
    own prompt if it has one."""
    mask, (read, head) = batch.response_mask, teacher_states(learner, given, batch, packed)
    before = (
        batch.logprobs_old if batch.old_share is None else batch.logprobs_sampler
    )  # then no correction either: the ratio is π / μ
    old = None if before is None else before[mask]
    factor = None if batch.scale is None else batch.scale[mask]
    return learner.host.forward(
        learner.model,
        token_divergences,
        packed,
        (read, head),
        old,
        factor,
        divergence=given.stream.loss,
        temperature=learner.temperature,
    )


def teacher_states(
    learner: Learner, given: Pass, batch: Batch, packed: Packed
) -> tuple[Tensor, Any]:
    """The teacher's last states at the pass's tokens [M, H] and its head. A TokenScorer returns
    both itself."""
    rows = (batch.ids, batch.response_mask) if given.shown is None else as_shown(batch, given.shown)
    with learner.teacher_model(given.teacher) as model, torch.no_grad():
        if isinstance(model, TokenScorer):
            columns = trunk_and_head(learner.model)[1].weight.shape[0]
            assert given.stream.loss is not None
            return model.score_tokens(*rows, divergence=given.stream.loss, columns=columns)
        theirs = packed if given.shown is None else pack(*rows)
        if not torch.equal(theirs.targets[theirs.inverse], packed.targets[packed.inverse]):
            raise RuntimeError(
                "the teacher does not read the tokens that the policy sampled; this is a bug in"
                " rlkit.training.streams"
            )
        read = learner.host.forward(model, states, theirs)[
            theirs.inverse
        ]  # without gradient: a live teacher's head is the policy's
        return read.detach(), trunk_and_head(model)[1]


def token_divergences(
    model: nn.Module,
    packed: Packed,
    teacher: tuple[Tensor, Any],
    old: Any,
    factor: Any,
    **settings: Any,
) -> Tensor:
    """The divergence at the sampled tokens of packed rows [M], in the order of the response
    mask."""
    hidden = states(model, packed)[packed.inverse]
    head = trunk_and_head(model)[1]
    size = max(
        1,
        CHUNK_LOGITS
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


def as_shown(batch: Batch, shown: Prompts) -> tuple[Tensor, Tensor]:
    """The rows as the teacher reads them, ids and mask [B, T']: its own prompt, then what follows
    the policy's, token by token."""
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


# ------------------------------------------------------------------------------------- observations


def observed(batch: Batch, rollouts: Sequence[Rollout], renderer: Renderer) -> Tensor:
    """[B, T] bool: the tokens of what tools answered, without the template around them, each in the
    row where it was first read."""
    mask = torch.zeros_like(batch.response_mask)
    row = 0
    for rollout in rollouts:
        for own in rows_of(rollout):
            for step in sorted(set(own.steps)):
                kept = rollout.steps[step].kept
                for begin, end in tool_bodies(rollout.steps[step], renderer) if step else ():
                    mask[row, kept + begin : kept + end] = True
            row += 1
    return mask & ~whole(batch).response_mask


def tool_bodies(step: Any, renderer: Renderer) -> list[tuple[int, int]]:
    """Where in a step's prompt_ids the contents of its new tool messages stand: the last occurrence
    of each, from the back."""
    ids = list(step.prompt_ids)
    spans = list[tuple[int, int]]()
    limit = len(step.prompt_ids)
    for message in reversed(step.prompt):
        body = encode_text(renderer, message.get("content") or "")
        begin = (
            next((i for i in range(limit - len(body), 0, -1) if ids[i : i + len(body)] == body), 0)
            if body
            else 0
        )
        if begin:
            limit = begin
            spans += [(begin, begin + len(body))] if message["role"] == "tool" else []
    return spans
