"""Whether an update has a gradient. An update known to have no gradient is skipped."""

from __future__ import annotations

from typing import Any

from rlkit.models.critic import HeadCritic
from rlkit.training.update.record import Update
from rlkit.types import Weighted, declarations


def has_signal(u: Update, batch: Weighted) -> bool:
    """False if the gradient of the policy's loss is known to be exactly 0. Such an update is
    skipped.

    This holds for a batch without a trained token, or if no term has a gradient:

    policy loss     every advantage is 0, and the loss declares by `@vanishes` that it then has no
                    gradient
    KL in the loss  the reference is the policy (`references.is_policy`), and the estimator declares
                    by `@vanishes` that it then has no gradient
    entropy bonus   its coefficient is 0
    value loss      it has no gradient into the policy's trunk

    A skipped update steps no optimizer. So weights, moments and the optimizer's count of steps stay
    as they are. A step with a gradient of 0 would decay the weights and repeat old momentum. A
    skipped update is not measured for algorithm.target_kl. The batch, and so the answer, is the
    same on all ranks.
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
    """Whether a part declares by `@vanishes` to have no gradient in the case `when`."""
    return when in (declarations(part, "vanishes") or ())


def updates_once(u: Update, batch: Weighted) -> bool:
    """Whether a single update reads the whole batch before any weight moves. Its log-probs are then
    the log-probs of the old policy."""
    a = u.x.algorithm
    return a.epochs * a.minibatches == 1 and not u.warming_up and has_signal(u, batch)
