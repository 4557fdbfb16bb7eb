"""Decide whether an update has a gradient. An update known to have no gradient is skipped."""

from __future__ import annotations

from typing import Any

from rlkit.models.critic import HeadCritic
from rlkit.training.update.record import Update
from rlkit.types import Weighted, declarations


def has_signal(u: Update, batch: Weighted) -> bool:
    """Return False if the gradient of the policy's loss is known to be exactly 0.

    The gradient is 0 for a batch without a trained token. It is also 0 if none of the following
    four terms has a gradient:

    policy loss     it has none if every advantage is 0 and the loss declares by `@vanishes` that
                    its gradient is then 0
    KL in the loss  it has none if the reference is the policy (`references.is_policy`) and the
                    estimator declares by `@vanishes` that its gradient is then 0
    entropy bonus   it has none if its coefficient is 0
    value loss      it has none if no gradient flows from it into the policy's trunk

    A skipped update steps no optimizer, so the weights, the moments and the optimizer's count of
    steps stay as they are. A step with a gradient of 0 would instead decay the weights and repeat
    old momentum. A skipped update is not measured for algorithm.target_kl. The batch is the same on
    all ranks, and therefore the answer is the same on all ranks.
    """
    a = u.x.algorithm
    if not batch.response_mask.any():
        return False
    if a.entropy_coef or (isinstance(u.critic, HeadCritic) and u.critic.trunk_gradient):
        return True
    vanishes = _declared(a.policy_loss, "without_advantages") and not batch.advantages.any()
    if a.reward_coef and not vanishes:
        return True
    if not u.x.kl.in_loss:
        return False
    known = _declared(u.x.kl.estimator, "at_reference") and u.kept.is_policy(u.x.reference)
    return not known


def _declared(part: Any, when: str) -> bool:
    """Return whether a function of the algorithm declares by `@vanishes` that it has no gradient in
    the case `when`."""
    return when in (declarations(part, "vanishes") or ())


def updates_once(u: Update, batch: Weighted) -> bool:
    """Return whether the step has a single update, which reads the whole batch before any weight
    moves. The log-probs in this update are then the log-probs of the old policy. With a critic the
    answer does not matter: those log-probs are computed before the updates (`needs_old`)."""
    a = u.x.algorithm
    return a.epochs * a.minibatches == 1 and has_signal(u, batch)
