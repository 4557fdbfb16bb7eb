"""Try parts without a model: run the maths on fake data, and the optimizer on one parameter."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlkit.errors import ConfigError, describe_error, name_function
from rlkit.training.schedules import list_phases
from rlkit.types import bound

if TYPE_CHECKING:  # torch is imported only with the parts that need it
    from torch import Tensor

    from rlkit.algorithm import KL
    from rlkit.training.experiment import Experiment
    from rlkit.types import Minibatch, Scored, TokenLogprobs


def dry_run(x: Experiment) -> None:
    """Run one update on fake data through advantage, weights, loss and backward, in milliseconds
    and without a model.

    The run is skipped if a part asks for `metadata`, because the metadata of a user's rows cannot
    be made up. It is also skipped if the reward is no part of the loss.

    Raises: ConfigError if a part fails, if the gradient is zero or not finite, or if a part has a
      gradient in a case declared with `@vanishes`.
    """

    from rlkit.algorithm import asks_for
    from rlkit.training.metrics import UpdateTerms, update_metrics
    from rlkit.training.update.loss import loss_weights, surrogate, value_surrogate
    from rlkit.training.update.weighted import weigh

    if any(
        asks_for(function, "metadata") for function in (*x.algorithm.parts.values(), x.kl.estimator)
    ):
        return
    if not x.algorithm.reward_coef:
        return
    scored, scores, logits = _fake_batch(x)
    mask = scored.response_mask
    try:
        scored = _filter_and_score(scored, x)
        batch = loss_weights(weigh(scored, x.algorithm, x.kl), x.algorithm)
        loss, terms = surrogate(batch, scores, x.algorithm, x.kl)
        if x.algorithm.critic.active:
            loss = loss + value_surrogate(batch, scores, x.algorithm.critic)[0]
        if loss.requires_grad:
            loss.backward(retain_graph=True)
        update_metrics(
            replace(batch, metrics={name: term for name, term in terms.items() if "/" in name}),
            UpdateTerms(),
            x,
        )
    except Exception as error:  # a user's own part may raise any error
        raise ConfigError(
            f"algorithm={x.algorithm.name}, kl={x.kl.name}: the dry run on fake data fails:"
            f" {describe_error(error)}"
        ) from error
    alone = _policy_gradient(x, batch, scores, logits)
    whole = logits.grad
    if whole is None or not whole.isfinite().all() or not alone.isfinite().all() or not alone.any():
        made = {
            "advantage": batch.advantages,
            "correction": batch.scale,
            "aggregation": batch.weights,
        } | terms
        bad = [
            name
            for name, value in made.items()
            if value is not None and value.shape == mask.shape and not value[mask].isfinite().all()
        ]
        why = f": {bad[0]} gave nan or inf" if bad else ""
        raise ConfigError(
            f"algorithm={x.algorithm.name}: the dry run's gradient is zero or not finite{why};"
            " check its numbers"
        )
    _check_vanishing(x, batch, scores)


def _filter_and_score(batch: Scored, x: Experiment) -> Scored:
    """Filter the fake rollouts. Each part gets only the quantities known at its call in a run. The
    result has all quantities known before the updates."""
    from rlkit.training.update.sampled import filter_rollouts
    from rlkit.training.update.scored import compute_old_share, needs_old

    critic = x.algorithm.critic.active
    before = needs_old(x, critic=critic)
    computed = {
        "logprobs_old": before,
        "entropy_old": before,
        "values": critic,
        "logprobs_ref": x.kl.active,
    }
    empty: dict[str, Any] = dict.fromkeys(computed)
    known = {name: getattr(batch, name) for name, own in computed.items() if own}
    share = compute_old_share(batch, x.algorithm, step=1)
    filtered = filter_rollouts(replace(batch, **empty), x.algorithm)
    return replace(filtered, **known, old_share=share)


def _policy_gradient(
    x: Experiment, batch: Minibatch, scores: TokenLogprobs, logits: Tensor
) -> Tensor:
    """Compute the gradient of the policy loss alone. A KL or an entropy bonus would hide a gradient
    of zero.

    Raises: ConfigError if the policy loss has no gradient.
    """
    import torch

    from rlkit.algorithm import KL
    from rlkit.training.update.loss import surrogate

    loss, _ = surrogate(batch, scores, x.algorithm._replace(entropy_coef=0.0), KL("none"))
    found = None
    if loss.requires_grad:
        found = torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True)[0]
    if found is None:
        raise ConfigError(
            f"algorithm.policy_loss ({name_function(x.algorithm.policy_loss)}): its value has no"
            " gradient"
            " with respect to logprobs or ratio, so the rewards would train nothing; take out"
            " detach(), item() or no_grad()"
        )
    return found


def _fake_batch(x: Experiment) -> tuple[Scored, TokenLogprobs, Tensor]:
    """Make a fake batch of two groups, each with one rewarded rollout. Also return the policy's
    log-probs and values for the batch, and the logits behind these."""
    import torch

    from rlkit.algorithm import asks_for
    from rlkit.types import Scored, TokenLogprobs

    exact = x.kl.active and asks_for(x.kl.estimator, "full_kl")
    groups = 2
    size = max(2, min(x.batch.group_size, 64))
    width = 6
    vocabulary = 7
    n = groups * size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (n, width), generator=generator)
    mask = (torch.arange(width) >= 2).expand(n, width).clone()
    logits = torch.randn(n, width, vocabulary, generator=generator).requires_grad_()
    logprobs = logits.log_softmax(-1).gather(2, ids[:, :, None])[:, :, 0]
    fixed = logprobs.detach()
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    rewards = (torch.arange(n) % size == 0).float()
    values = torch.zeros(n, width).requires_grad_()
    last = torch.zeros(n, width).index_fill(1, torch.tensor([width - 1]), 1.0)
    batch = Scored(
        ids=ids,
        attention_mask=torch.ones_like(mask),
        response_mask=mask,
        sampled_mask=mask,
        rollout_ids=torch.arange(n),
        step_ids=torch.zeros_like(ids),
        rewards=rewards,
        group_ids=torch.arange(n) // size,
        truncated=torch.zeros(n, dtype=torch.bool),
        lengths=mask.sum(1),
        reply_lengths=mask.sum(1),
        greedy_rewards=torch.zeros(n),
        token_rewards=last * rewards[:, None],
        logprobs_sampler=fixed,
        logprobs_old=fixed,
        entropy_old=entropy.detach(),
        logprobs_ref=fixed - 0.1,
        full_kl=torch.full_like(fixed, 0.1) if exact else None,
        values=values.detach(),
        versions=torch.zeros_like(ids),
        components={name: rewards.clone() for name in x.reward.terms},
        metadata=tuple({} for _ in range(n)),
    )
    scores = TokenLogprobs(
        logprobs,
        entropy,
        values if x.algorithm.critic.active else None,
        full_kl=logprobs - fixed + 0.1 if exact else None,
    )
    return batch, scores, logits


def _check_vanishing(x: Experiment, batch: Minibatch, scores: TokenLogprobs) -> None:
    """Test whether the policy loss and the KL estimator have no gradient in the cases that they
    declare with `rlkit.types.vanishes`.

    Raises: ConfigError if a part has a gradient in a declared case.
    """
    import torch

    from rlkit.algorithm import KL, asks_for
    from rlkit.training.update.loss import surrogate
    from rlkit.types import declarations

    now = scores.logprobs.detach()
    moved = replace(
        batch,
        advantages=torch.zeros_like(now),
        logprobs_old=now - 0.2,
        logprobs_sampler=now - 0.1,
        logprobs_ref=now,
        covariance_rank=torch.zeros_like(now),
    )
    plain = x.algorithm._replace(entropy_coef=0.0, streams={})
    loss = plain.policy_loss
    estimator = x.kl.estimator
    tried: list[tuple[str, Any, str, KL]] = []
    if "without_advantages" in (declarations(loss, "vanishes") or ()):
        tried.append(("algorithm.policy_loss", loss, "without_advantages", KL("none")))
        # the exact KL needs log-probs of the whole vocabulary, and the fake data has none
        exact = asks_for(estimator, "full_kl")
        if (
            x.kl.in_loss
            and not exact
            and "at_reference" in (declarations(estimator, "vanishes") or ())
        ):
            tried.append(("kl.estimator", estimator, "at_reference", x.kl._replace(coef=1.0)))
    for path, part, word, kl in tried:
        value, _ = surrogate(moved, scores, plain, kl)
        found = torch.autograd.grad(value, scores.logprobs, retain_graph=True, allow_unused=True)
        if found[0] is not None and found[0].any():
            raise ConfigError(
                f'{path} ({name_function(part)}): declares @vanishes("{word}"), and has a'
                " gradient there;"
                " remove the declaration"
            )


def optimizer_problems(x: Experiment) -> list[str]:
    """Try the settings of each optimizer on one parameter, before the model is loaded. Return the
    problems as sentences."""
    import torch

    critics = {
        id(p.algorithm.critic): p.algorithm.critic.optimizer
        for p in list_phases(x).values()
        if p.algorithm.critic.active
    }
    problems = []
    for path, make in [
        ("optimizer", x.optimizer),
        *(("algorithm.critic.optimizer", make) for make in critics.values() if make),
    ]:
        try:
            make([torch.nn.Parameter(torch.zeros(1))])
        except Exception as error:  # a user's own optimizer may raise any error
            problems.append(
                f"{path}: {error}; its numbers are"
                f" {', '.join(f'{k}={v}' for k, v in bound(make).items())}"
            )
    return problems
