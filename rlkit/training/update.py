"""Passes over a batch in micro-batches that only sum: log-probs without gradient, and one
minibatch's update.

Every function takes the learner: its policy and critic, the experiment of the step under way, and
the host that computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkit.algorithm import (
    asks,
    hyperparameters,
    inputs,
    loss_weights,
    micro_batches,
    minibatch_rows,
    place_old,
    select,
    surrogate,
    value_surrogate,
    whole,
)
from rlkit.distributed import ranks
from rlkit.errors import NonFinite
from rlkit.functional import approximate_kl
from rlkit.models.head import Head, trunk_and_head
from rlkit.models.log_probs import forward_logprobs, states
from rlkit.models.packing import Packed, pack
from rlkit.training import drift, streams
from rlkit.training.memory import named, retried
from rlkit.training.metrics import NAN, UpdateTerms
from rlkit.training.references import is_policy
from rlkit.types import Batch, TokenLogprobs, declarations

if TYPE_CHECKING:
    from rlkit.training.learner import Learner

# -------------------------------------------------------------------------- passes without gradient


def with_logprobs(learner: Learner, batch: Batch) -> Batch:
    """The batch with old log-probs, entropies and values, and reference log-probs, if anything
    before or in the update needs them.

    They are computed in the minibatches and micro-batches of the first epoch. So a policy that
    equals the reference gives the same bits in its update, where the gradient of the KL is then 0
    and not rounding, of which an optimiser makes steps of full size. With one epoch of one
    minibatch the old policy is the current one, so "old" is its detached value and costs nothing.
    Nor does it where algorithm.old takes no pass of the trainer; then there is one only for what
    else is asked for.
    """
    a = learner.x.algorithm
    kl = learner.x.kl
    batch = place_old(batch, a, step=learner.rl_step)
    before = (
        a.advantage,
        a.normalization,
        a.overlong,
        a.token_filter,
        *([a.correction] if a.old == "trainer" else []),
    )
    asked = {name for part in before for name in inputs(part)} & {
        "logprobs_old",
        "entropy_old",
        "values",
    }
    splits = minibatch_rows(batch, a, learner.shuffle_seed)[0]
    asked |= {"covariance_rank"} & set(inputs(a.policy_loss))
    if (
        (a.epochs * a.minibatches > 1 and a.old == "trainer")
        or asked
        or kl.in_reward
        or a.critic.active
    ):
        critic = learner.critic if a.critic.active else None
        old = batch_logprobs(learner, learner.model, _read(learner, batch), splits, critic=critic)
        batch = batch._replace(
            logprobs_old=old.logprobs, entropy_old=old.entropy, values=old.values
        )
    return with_reference(learner, batch, splits) if kl.active else batch


def with_reference(learner: Learner, batch: Batch, splits: Sequence[Tensor]) -> Batch:
    """The batch with the reference's log-probs, computed in these minibatches."""
    with learner.reference_model() as model:
        return batch._replace(
            logprobs_ref=batch_logprobs(learner, model, _read(learner, batch), splits).logprobs
        )


def _read(learner: Learner, batch: Batch) -> Batch:
    """The batch with all tokens that log-probs are needed of: for a KL in the baseline those of
    rollouts that are not trained on too."""
    return (
        whole(batch) if learner.x.kl.in_baseline or "teacher" in streams.active(learner) else batch
    )


def step_minibatches(learner: Learner, batch: Batch, terms: UpdateTerms) -> Iterator[Batch]:
    """Every update's batch in its order, with the weights of its tokens.

    Later epochs have other minibatches. While no update has had a gradient, the reference's
    log-probs are computed again in those, if an update reads them.
    """
    a = learner.x.algorithm
    kl = learner.x.kl
    for epoch, splits in enumerate(minibatch_rows(batch, a, learner.shuffle_seed)):
        still = kl.in_loss and len(splits) > 1 and not any(terms.norms["policy"])
        if epoch and still and has_signal(learner, batch):
            batch = retried(learner, batch, partial(with_reference, learner, batch, splits))
        yield from (loss_weights(select(batch, rows), a) for rows in splits)


@torch.no_grad()
def batch_logprobs(
    learner: Learner,
    model: torch.nn.Module,
    batch: Batch,
    splits: Sequence[Tensor] | None = None,
    *,
    critic: torch.nn.Module | None = None,
) -> TokenLogprobs:
    """Log-probs, entropies and values [B, T] of a batch, one micro-batch at a time.

    Args:
      splits: row numbers of the minibatches that are cut into micro-batches, each on its own; None
        is one of all rows.
    """
    out: dict[str, Tensor] = {}
    for split in (
        [torch.arange(len(batch.ids), device=batch.ids.device)] if splits is None else splits
    ):
        for own, counts in rank_micro_batches(learner, select(batch, split)):
            rows = split[own]
            part = select(batch, rows)
            packed = pack(part.ids, part.response_mask)
            with learner.clock.part("model"):
                found = learner.host.forward(
                    model, forward_logprobs, packed, temperature=learner.temperature, critic=critic
                )
            for name, value in found._asdict().items():
                if value is not None:
                    total = out.setdefault(name, torch.zeros_like(batch.logprobs_sampler))
                    if counts:
                        total[rows, : part.ids.shape[1]] = value.to(total.dtype)
    learner.host.all_reduce(out.values())
    nothing = torch.zeros_like(batch.logprobs_sampler)  # no row has a trained token
    return (
        TokenLogprobs(**out)
        if out
        else TokenLogprobs(nothing, nothing, None if critic is None else nothing)
    )


def with_old(learner: Learner, batch: Batch | None) -> Batch | None:
    """The batch with the log-probs of the policy as it is now, if it has none of the old one."""
    if batch is None or batch.logprobs_old is not None:
        return batch
    return batch._replace(logprobs_old=batch_logprobs(learner, learner.model, batch).logprobs)


def moved_since(learner: Learner, then: Mapping[str, Batch | None]) -> dict[str, float]:
    """Name → KL(old‖now) in nats per token on a batch's tokens, k3, all of them in one pass; nan
    without a batch."""
    there = {
        name: drift.on(batch, learner.device) for name, batch in then.items() if batch is not None
    }
    if not there:
        return dict.fromkeys(then, NAN)
    now = batch_logprobs(learner, learner.model, drift.joined(list(there.values()))).logprobs
    found = dict.fromkeys(then, NAN)
    for (name, batch), own in zip(
        there.items(), now.split([len(batch.ids) for batch in there.values()]), strict=True
    ):
        assert batch.logprobs_old is not None
        found[name] = float(
            approximate_kl(own[:, : batch.ids.shape[1]], batch.logprobs_old, batch.response_mask)
        )
    return found


def updates_once(learner: Learner, batch: Batch) -> bool:
    """Whether one update passes the whole batch before anything moves: then its log-probs are those
    of the old policy."""
    a = learner.x.algorithm
    return a.epochs * a.minibatches == 1 and not learner.warming_up() and has_signal(learner, batch)


def rank_micro_batches(learner: Learner, batch: Batch) -> Iterable[tuple[Tensor, bool]]:
    """The micro-batches of this rank as row numbers, equally many on every rank, and whether each
    counts."""
    limit = learner.micro_batch_tokens
    if ranks.size() == 1:
        return ((rows, True) for rows in micro_batches(batch, limit))
    own = ranks.assign_groups(batch.attention_mask.sum(1), batch.group_ids[batch.rollout_ids])
    mine = batch._replace(response_mask=batch.response_mask & own[:, None])
    return ranks.pad_work(
        list(micro_batches(mine, limit)), spare=lambda: list(micro_batches(batch, 1))[-1]
    )


# --------------------------------------------------------------------------------------- one update


def one_update(learner: Learner, minibatch: Batch, terms: UpdateTerms) -> bool:
    """One step of each optimiser; False ends the updates of this RL step. Micro-batches only sum:
    their weights are fixed before."""
    x = learner.x
    critic = learner.x.algorithm.critic
    learns = not learner.warming_up() and has_signal(learner, minibatch)
    others = [] if learner.warming_up() else list(streams.stream_passes(learner, minibatch))
    if not learns and not others and not critic.active:
        terms.skip("no_signal")
        return True
    ranks.reshard(learner.model)
    learner.nets.zero_grad()
    moved = 0.0
    tokens = 0.0
    summed = 0.0
    limit = x.algorithm.target_kl
    for rows, counts in rank_micro_batches(learner, minibatch) if learns or critic.active else ():
        part = select(minibatch, rows)
        packed = pack(part.ids, part.response_mask)
        if not counts and part.weights is not None:
            part = part._replace(weights=torch.zeros_like(part.weights))
        scores = trained_logprobs(learner, packed)
        loss, parts = surrogate(part, scores, x.algorithm, x.kl)
        total = loss if learns else loss.new_zeros(())
        if critic.active:
            value_loss, value_parts = value_surrogate(part, scores, critic)
            total = total + value_loss
            parts = parts | value_parts
        summed += float(total.detach())
        if total.requires_grad:
            with learner.clock.part("model"):
                learner.host.backward(total)
        if counts:
            terms.add(part, loss, scores, parts, packed)
        if counts and limit is not None and part.logprobs_old is not None:
            count = int(part.response_mask.sum())
            moved += count * float(
                approximate_kl(scores.logprobs.detach(), part.logprobs_old, part.response_mask)
            )
            tokens += count
    summed += sum(streams.backward_stream(learner, given, terms) for given in others)
    sums = torch.tensor([moved, tokens, summed], dtype=torch.float64)
    learner.host.all_reduce([sums])
    moved, tokens, summed = sums.tolist()
    if limit is not None and moved > limit * tokens:
        terms.skip("target_kl")
        return False
    with learner.clock.part("model"):
        if learns or others:
            terms.stepped(
                "policy",
                *step_optimizer(learner, 0, x.optimizer, learner.trained_parameters(), summed),
            )
        if learner.critic is not None and critic.active:
            terms.stepped(
                "critic",
                *step_optimizer(learner, 1, critic.optimizer, learner.critic.parameters(), summed),
            )
    return True


def trained_logprobs(learner: Learner, packed: Packed) -> TokenLogprobs:
    """What an update learns from: log-probs and values that carry their gradients."""
    a = learner.x.algorithm
    with learner.clock.part("model"):
        return learner.host.forward(
            learner.model,
            forward_logprobs,
            packed,
            temperature=learner.temperature,
            entropy_gradient=bool(a.entropy_coef),
            critic=learner.critic if a.critic.active else None,
            reference=exact_reference(learner, packed),
        )


def exact_reference(learner: Learner, packed: Packed) -> tuple[Tensor, Head] | None:
    """Hidden states and head of the reference, if the KL is exact over the vocabulary."""
    if not learner.x.kl.active or not asks(learner.x.kl.estimator, "full_kl"):
        return None
    with learner.reference_model() as model, torch.no_grad():
        return learner.host.forward(model, states, packed), trunk_and_head(model)[1]


def has_signal(learner: Learner, batch: Batch) -> bool:
    """False if the gradient of the policy's loss is known to be exactly 0. Such an update is
    skipped.

    It is known of a batch without a trained token. Otherwise it is known if each of these terms has
    none:

    policy loss     every advantage is 0, and the loss declares by `@vanishes` that this is enough
                    KL in the loss  the reference is the policy (`references.is_policy`), and the
                    estimator declares it
    entropy bonus   its coefficient is 0
    value loss      it has no gradient into the policy's trunk

    A skipped update steps no optimiser. So weights, moments and their count of steps stay as they
    are. A step with a gradient of 0 would decay the weights and repeat old momentum. An update that
    is skipped is not measured for algorithm.target_kl. The batch, and so the answer, is the same on
    all ranks.
    """
    a = learner.x.algorithm
    kl = learner.x.kl
    if not batch.response_mask.any():
        return False
    if a.entropy_coef or (a.critic.active and getattr(learner.critic, "trunk_gradient", False)):
        return True
    if a.reward_coef and not _without_advantages(a.policy_loss, batch):
        return True
    return kl.in_loss and not _at_reference(learner)


def _without_advantages(loss: Any, batch: Batch) -> bool:
    """Whether a policy loss is known to be constant on a batch."""
    declared = "without_advantages" in (declarations(loss, "vanishes") or ())
    return declared and batch.advantages is not None and not batch.advantages.any()


def _at_reference(learner: Learner) -> bool:
    """Whether a KL in the loss is known to have no gradient: the reference is the policy."""
    x = learner.x
    if "at_reference" not in (declarations(x.kl.estimator, "vanishes") or ()):
        return False
    return is_policy(x.reference, learner.references.get(learner.reference_key), learner.model)


def known_old(learner: Learner, batch: Batch) -> Batch:
    """The batch with the reference's log-probs as the old policy's, if no update follows to find
    these.

    A batch whose KL stands in the loss has no update only while the reference is the policy.
    """
    known = learner.x.kl.in_loss and batch.logprobs_old is None and batch.old_share is None
    if not known or streams.active(learner) or has_signal(learner, batch):
        return batch
    return batch._replace(logprobs_old=batch.logprobs_ref)


def step_optimizer(
    learner: Learner,
    index: int,
    configured: Any,
    parameters: Iterable[torch.nn.Parameter],
    loss: float,
) -> tuple[float, float]:
    """Clips and steps one optimiser at the learning rate in force; its gradient norm and rate.

    No step if the loss or the norm is not finite: the norm is nan then. Raises NonFinite after
    trainer.max_nonfinite in a row.
    """
    optimizer = learner.optimizers[index]
    for group in optimizer.param_groups:
        group["lr"] = hyperparameters(configured).get("lr", group["lr"])
    parameters = list(parameters)
    learner.host.all_reduce(
        p.grad for p in parameters if not hasattr(p, "full_tensor")
    )  # shards have been added up on the way
    norm = float(
        ranks.full_tensors(
            torch.nn.utils.clip_grad_norm_(parameters, learner.x.trainer.max_grad_norm)
        )
    )
    finite = isfinite(norm) and isfinite(loss)
    learner.nonfinite[index] = skipped = 0 if finite else learner.nonfinite.get(index, 0) + 1
    if skipped >= learner.x.trainer.max_nonfinite:
        raise NonFinite(
            f"step {learner.rl_step + 1}: {skipped} updates in a row had a loss ({loss:g}) or a"
            f" gradient (norm {norm:g}) that is not finite and were skipped"
            " (trainer.max_nonfinite); a lower optimizer.lr, trainer.precision=32-true or another"
            " kl often helps"
        )
    if finite:
        with named(
            "the optimiser's step", "train adapters (model.lora.rank=16), or a smaller model"
        ):
            learner.host.optimizer_step(optimizer)
    return (norm if finite else NAN), optimizer.param_groups[0]["lr"]
