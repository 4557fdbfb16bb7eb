"""Run the updates of a step, one on each minibatch. A minibatch is processed in micro-batches, and
the gradients of its micro-batches are added up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rlkit.algorithm import asks_for
from rlkit.distributed import ranks
from rlkit.functional import approximate_kl
from rlkit.models.head import Head, split_model
from rlkit.models.log_probs import compute_states, forward_logprobs
from rlkit.models.packing import Packed, pack
from rlkit.training.metrics import UpdateTerms
from rlkit.training.update.loss import loss_weights, surrogate, value_surrogate
from rlkit.training.update.optimizers import CRITIC, POLICY, Optimizers
from rlkit.training.update.record import Update
from rlkit.training.update.scored import with_reference
from rlkit.training.update.signal import has_signal
from rlkit.training.update.split import select, split_into_minibatches
from rlkit.training.update.streams import Imitation, Taught, backward_stream, list_stream_passes
from rlkit.types import Minibatch, TokenLogprobs, Weighted


def step_minibatches(u: Update, batch: Weighted, terms: UpdateTerms) -> Iterator[Minibatch]:
    """Yield the batch of every update in order, with each token's weight in the loss.

    Every epoch splits the rollouts into different minibatches. The reference's log-probs were
    computed in the minibatches of the first epoch. If an update of a later epoch needs the
    reference's log-probs, and no earlier update has had a gradient, these log-probs are computed
    again in the new minibatches.
    """
    kl = u.x.kl
    for epoch, splits in enumerate(split_into_minibatches(batch, u.x.algorithm, u.seed)):
        still = kl.in_loss and len(splits) > 1 and not any(terms.norms["policy"])
        if epoch and still and has_signal(u, batch):
            batch = u.micro.retry_halved(batch, partial(with_reference, u, batch, splits))
        yield from (loss_weights(select(batch, rows), u.x.algorithm) for rows in splits)


def make_one_update(
    u: Update, optimizers: Optimizers, minibatch: Minibatch, terms: UpdateTerms
) -> bool:
    """Take one step of each optimizer on a minibatch. Return False to end the updates of this RL
    step."""
    learns = not u.warming_up and has_signal(u, minibatch)
    others = [] if u.warming_up else list(list_stream_passes(u, minibatch))
    if not learns and not others and u.critic is None:
        terms.skip("no_signal")
        return True
    ranks.reshard(u.model)
    for net in (u.model, u.critic):
        if net is not None:
            net.zero_grad()
    moved, tokens, loss = sum_gradients(u, minibatch, terms, others, learns=learns)
    limit = u.x.algorithm.target_kl
    if limit is not None and moved > limit * tokens:
        terms.skip("target_kl")
        return False
    with u.clock.part("model"):
        if learns or others:
            trained = [p for p in u.model.parameters() if p.requires_grad]
            taken = optimizers.step(u, POLICY, u.x.optimizer, trained, loss)
            terms.stepped("policy", *taken)
        if u.critic is not None:
            configured = u.x.algorithm.critic.optimizer
            assert configured is not None
            taken = optimizers.step(u, CRITIC, configured, u.critic.parameters(), loss)
            terms.stepped("critic", *taken)
    return True


def sum_gradients(
    u: Update,
    minibatch: Minibatch,
    terms: UpdateTerms,
    others: Sequence[Imitation | Taught],
    *,
    learns: bool,
) -> tuple[float, float, float]:
    """Add up the gradients of all passes of an update.

    A micro-batch known to have no gradient is read for its metrics alone, without a backward pass.
    If only other streams move the policy, the reward's rows are read for algorithm.target_kl.

    Returns: three sums over all ranks. The first is KL(old‖now) in nats, summed over the tokens
      counted by algorithm.target_kl. The second is the number of these tokens. The third is the
      loss.
    """
    a = u.x.algorithm
    moved = tokens = loss = 0.0
    # with a critic, or on several ranks, all passes have a gradient
    alone = u.critic is None and ranks.size() == 1
    # KL-Cov needs the old log-probs to the last bit, so it keeps the scoring pass's micro-batches
    keeps = asks_for(a.policy_loss, "covariance_rank")
    ordered = order_by_signal(minibatch) if alone and not keeps else minibatch
    read = learns or u.critic is not None or (others and a.target_kl is not None)
    for rows, counts in u.micro.of(ordered) if read else ():
        part = select(minibatch, rows)
        packed = pack(part.ids, part.response_mask)
        if not counts:
            part = replace(part, weights=torch.zeros_like(part.weights))
        with torch.set_grad_enabled(not alone or has_signal(u, part)):
            scores = compute_trained_logprobs(u, packed)
            policy_loss, parts = surrogate(part, scores, a, u.x.kl)
        total = policy_loss if learns else policy_loss.new_zeros(())
        if u.critic is not None:
            value_loss, value_parts = value_surrogate(part, scores, a.critic)
            total = total + value_loss
            parts = parts | value_parts
        loss += float(total.detach())
        if total.requires_grad:
            with u.clock.part("model"):
                u.host.backward(total)
        if counts:
            terms.add(part, policy_loss, scores, parts, packed)
        if counts and a.target_kl is not None and part.logprobs_old is not None:
            count = int(part.response_mask.sum())
            own = scores.logprobs.detach()
            moved += count * float(approximate_kl(own, part.logprobs_old, part.response_mask))
            tokens += count
    loss += sum(backward_stream(u, given, terms) for given in others)
    sums = torch.tensor([moved, tokens, loss], dtype=torch.float64)
    u.host.all_reduce([sums])
    moved, tokens, loss = sums.tolist()
    return moved, tokens, loss


def order_by_signal(minibatch: Minibatch) -> Minibatch:
    """Renumber the groups. Groups with an advantage come first, and groups without one last, for
    example groups of equal rewards. Micro-batches take the groups in this order. Therefore at most
    one micro-batch has groups of both kinds."""
    groups = minibatch.group_ids
    learned = torch.isin(groups, groups[minibatch.rollout_ids[minibatch.advantages.any(1)]])
    return replace(minibatch, group_ids=torch.where(learned, groups, groups + groups.max() + 1))


def compute_trained_logprobs(u: Update, packed: Packed) -> TokenLogprobs:
    """Compute log-probs and values of an update's tokens, with gradient."""
    with u.clock.part("model"):
        return u.host.forward(
            u.model,
            forward_logprobs,
            packed,
            temperature=u.temperature,
            entropy_gradient=bool(u.x.algorithm.entropy_coef),
            critic=u.critic,
            reference=find_exact_reference(u, packed),
        )


def find_exact_reference(u: Update, packed: Packed) -> tuple[Tensor, Head] | None:
    """Return the reference's hidden states and head, or None if the KL is not computed exactly over
    the vocabulary."""
    if not u.x.kl.active or not asks_for(u.x.kl.estimator, "full_kl"):
        return None
    with u.kept.reference(u.x.reference) as model, torch.no_grad():
        return u.host.forward(model, compute_states, packed), split_model(model)[1]
