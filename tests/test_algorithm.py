"""Where the parts meet: quantities by name, one weighting an update, and no trace of how an update
was cut into portions."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import pytest
import torch

from minibatches import minibatches
from parametrise import AGGREGATIONS, combinations, each
from rlkit.algorithm import KL, Algorithm, Critic, Stream, call, list_inputs
from rlkit.functional import (
    clipped,
    clipped_squared_error,
    forward,
    gae,
    gmpo,
    group_mean,
    k3,
    keep_all,
    mixed_groups,
    normalize_group,
    pairwise,
    pairwise_loss,
    raw,
    reinforce,
    reverse,
    reward_to_go,
    sequence_ratio,
    sequence_sum,
    sequence_token_ratio,
    squared_error,
    token_mean,
    token_ratio,
    turn_gae,
    whiten,
)
from rlkit.training.metrics import UpdateTerms, pick_counted
from rlkit.training.update.loss import loss_weights, surrogate, value_surrogate
from rlkit.training.update.sampled import filter_rollouts, mark_last_tokens
from rlkit.training.update.split import PER_ROLLOUT, select, split_into_micro_batches
from rlkit.training.update.weighted import weigh
from rlkit.types import QUANTITIES, Batch, Scored, TokenLogprobs, Weighted, agreement

POLICY_LOSSES = {"clipped": clipped, "reinforce": reinforce}
KLS = {
    "none": KL("none"),
    "k3": KL("k3", k3, coef=0.3),
    "forward": KL("forward", forward, coef=0.3),
    "reverse": KL("reverse", reverse, coef=0.3),
}
TABLE = combinations(AGGREGATIONS, POLICY_LOSSES, KLS)
ROLLOUTS = torch.tensor([0, 0, 0, 1, 2, 2, 3, 4, 5, 6, 6, 7])  # of each row; rollout 8 has no row
TOKENS = ("logprobs_sampler", "logprobs_old", "logprobs_ref")


def algorithm(aggregation=token_mean, policy_loss=clipped, **more) -> Algorithm:
    scale = (
        {} if "advantage" in more else {"normalization": normalize_group}
    )  # GRPO's, unless a test brings an advantage
    parts = {"advantage": group_mean, "ratio": token_ratio, "group_filter": keep_all} | scale | more
    return Algorithm("test", policy_loss=policy_loss, aggregation=aggregation, **parts)


def make_batch(seed: int = 0) -> Scored:
    """12 rows of 9 rollouts of 3 prompts, of different lengths; log-ratios of order 1, so that the
    clip binds on some tokens."""
    generator = torch.Generator().manual_seed(seed)
    b, t = len(ROLLOUTS), 9
    lengths = torch.randint(3, t + 1, (b,), generator=generator)
    lengths[0] = t
    attention = torch.arange(t) < lengths[:, None]
    response = attention & (torch.rand(b, t, generator=generator) < 0.6)
    response[:, 0] = False
    response[:, 2] = True
    response[4] = False  # a row without a trained token
    tokens = {
        name: (
            (-2 * torch.rand(b, t, generator=generator, dtype=torch.float64)).masked_fill(
                ~response, 0
            )
        )
        for name in TOKENS
    }
    return Scored(
        ids=torch.randint(1, 50, (b, t), generator=generator),
        attention_mask=attention,
        response_mask=response,
        sampled_mask=response,
        rollout_ids=ROLLOUTS,
        step_ids=torch.zeros(b, t, dtype=torch.int64),
        rewards=torch.tensor(
            [1.0, 0.0, 0.5, 1.0, 1.0, 1.0, 0.0, float("nan"), 1.0], dtype=torch.float64
        ),  # the second prompt's are equal
        group_ids=torch.tensor([5, 5, 5, 2, 2, 2, 9, 9, 9]),
        truncated=torch.arange(9) % 4 == 0,
        lengths=torch.zeros(9, dtype=torch.int64).index_add_(0, ROLLOUTS, response.sum(1)),
        greedy_rewards=torch.linspace(0, 1, 9),
        reply_lengths=torch.tensor(
            [max(response.sum(1)[i == ROLLOUTS].tolist(), default=0) for i in range(9)]
        ),
        token_rewards=torch.zeros(b, t, dtype=torch.float64),
        versions=torch.randint(5, (b, t), generator=generator) * response,
        components={"right": torch.arange(9.0) % 2, "form": torch.arange(9.0) % 3},
        metadata=tuple({"level": i} for i in range(9)),
        **tokens,
    )


def estimated(batch: Batch, a: Algorithm, kl: KL = KLS["none"]) -> Weighted:
    """Chosen rollouts with advantages, as the module prepares them."""
    return weigh(filter_rollouts(batch, a), a, kl)


def scored(batch: Batch) -> torch.Tensor:
    """The sampled tokens of rollouts with a reward: what cannot be scored has advantage 0, whatever
    an estimator says."""
    return batch.response_mask & ~batch.rewards.isnan()[batch.rollout_ids][:, None]


def policy_logprobs(batch: Batch, seed: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return -2 * torch.rand(batch.ids.shape, generator=generator, dtype=torch.float64)


def prepared(a: Algorithm, batch: Batch | None = None) -> Scored:
    return loss_weights(estimated(batch or make_batch(), a), a)


def whole(batch: Batch, logprobs: torch.Tensor, a: Algorithm, kl: KL):
    """Loss and gradient in one piece."""
    leaf = logprobs.clone().requires_grad_()
    loss, _ = surrogate(batch, TokenLogprobs(leaf, torch.zeros_like(leaf)), a, kl)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def in_portions(batch: Batch, logprobs: torch.Tensor, a: Algorithm, kl: KL, portions):
    """Loss and gradient summed over micro-batches, as the module sums them."""
    leaf, total = logprobs.clone().requires_grad_(), 0.0
    for rows in portions:
        part = select(batch, rows)
        mine = leaf[rows][:, : part.ids.shape[1]]
        loss, _ = surrogate(part, TokenLogprobs(mine, torch.zeros_like(mine)), a, kl)
        loss.backward()
        total += float(loss.detach())
    return total, leaf.grad


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Norm-relative: single entries may cancel, the gradient as a whole does not."""
    assert theirs.norm() > 0
    return float((ours - theirs).norm() / theirs.norm())


def test_the_loss_falls_by_the_entropy_times_its_coefficient():
    """A bonus: descending the loss raises the entropy of every trained token."""
    a = algorithm(entropy_coef=0.1)
    batch = prepared(a)
    logprobs = policy_logprobs(batch)
    entropy = torch.rand(batch.ids.shape, dtype=torch.float64).requires_grad_()
    loss, _ = surrogate(batch, TokenLogprobs(logprobs, entropy), a, KLS["none"])
    (gradient,) = torch.autograd.grad(loss, entropy)
    expected = -0.1 * batch.weights.double() * batch.response_mask
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)
    without, _ = surrogate(
        batch, TokenLogprobs(logprobs, torch.zeros_like(entropy)), a, KLS["none"]
    )
    gained = float((expected * entropy.detach()).sum())
    assert float((loss - without).detach()) == pytest.approx(gained, rel=1e-10)


def test_what_has_no_reward_has_no_advantage_whatever_a_normalisation_gives():
    a = algorithm(normalization=lambda advantages: advantages + 1)
    whole_batch = make_batch()
    rewards = whole_batch.rewards.clone()
    rewards[1] = math.nan
    batch = estimated(replace(whole_batch, rewards=rewards), a)
    outside = batch.response_mask & ~scored(batch)
    assert outside.any() and not batch.advantages[outside].any()
    assert batch.advantages[scored(batch)].all()


def test_the_first_terms_are_those_of_the_first_update():
    terms = UpdateTerms()
    for ratio in (1.0, 2.0, 3.0):
        terms.tokens["ratio"].append(torch.tensor([ratio]))
        terms.stepped("policy", 1.0, 1e-3)
    assert terms.first["ratio"].tolist() == [1.0]


def test_the_coefficient_of_the_reward_scales_the_policy_loss_and_not_the_kl():
    streams = {"reward": Stream(coef=0.25), "imitation": Stream()}
    batch, kl = prepared(algorithm()), KLS["k3"]
    logprobs = policy_logprobs(batch)
    _, gradient = whole(batch, logprobs, algorithm(streams=streams), kl)
    _, both = whole(batch, logprobs, algorithm(), kl)
    _, alone = whole(batch, logprobs, algorithm(), KLS["none"])
    assert distance(gradient, both - 0.75 * alone) < 1e-12


def test_no_gradient_flows_through_a_correction():
    """One that reads the log-probs of the policy in training scales the loss by their value."""

    def own(logprobs, logprobs_sampler):
        return (logprobs - logprobs_sampler).exp()

    batch = prepared(algorithm())
    batch = replace(batch, old_share=torch.full(batch.ids.shape, 0.5, dtype=torch.float64))
    logprobs = policy_logprobs(batch)
    fixed = own(logprobs, batch.logprobs_sampler)
    held = algorithm(correction=lambda logprobs: fixed)
    _, expected = whole(batch, logprobs, held, KLS["none"])
    _, gradient = whole(batch, logprobs, algorithm(correction=own), KLS["none"])
    assert distance(gradient, expected) < 1e-12


def test_values_are_clipped_around_those_before_the_update():
    """The value moved from 0.5 to 2 and the return is 3, so a clip at 0.2 leaves no gradient."""
    batch = prepared(algorithm())
    shape = batch.ids.shape
    batch = replace(
        batch,
        values=torch.full(shape, 0.5, dtype=torch.float64),
        returns=torch.full(shape, 3.0, dtype=torch.float64),
    )
    now = torch.full(shape, 2.0, dtype=torch.float64).requires_grad_()
    zeros = torch.zeros(shape)
    critic = Critic(loss=functools.partial(clipped_squared_error, clip=0.2))
    loss, terms = value_surrogate(batch, TokenLogprobs(zeros, zeros, now), critic)
    (gradient,) = torch.autograd.grad(loss, now)
    assert gradient.count_nonzero() == 0
    held = terms["value_loss"][batch.response_mask]
    assert held == pytest.approx(torch.full_like(held, (3 - 0.7) ** 2 / 2))


def test_a_baseline_counts_the_kl_of_rollouts_that_are_not_trained():
    """Rollout 3 is masked; its KL lowers its reward, and with it the baseline of its group."""
    kl = KL("k3", k3, coef=0.3, placement="reward", in_baseline=True)
    a = algorithm(advantage=group_mean)
    batch = make_batch()
    masked = batch.response_mask & (batch.rollout_ids != 3)[:, None]
    batch = replace(batch, response_mask=masked)
    gap = batch.logprobs_ref - batch.logprobs_old
    penalty = 0.3 * (gap.exp() - gap - 1) * batch.sampled_mask
    of_rollouts = torch.zeros(9, dtype=torch.float64).index_add(0, ROLLOUTS, penalty.sum(1))
    assert of_rollouts[3] > 0
    by_hand = weigh(replace(batch, rewards=batch.rewards - of_rollouts), a, KLS["none"])
    got = weigh(batch, a, kl).advantages
    torch.testing.assert_close(got, by_hand.advantages, rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------------------------ parts by name


def test_a_part_gets_what_its_signature_names_whatever_the_order():
    def part(b, a, *, scale=10):
        return b - a * scale

    assert list_inputs(part) == ("b", "a")
    assert call(part, {"a": 1, "b": 2, "c": 3}) == -8


def test_a_hyperparameter_is_never_injected():
    """A keyword-only or bound parameter is the config's, even where a quantity has its name."""

    def part(rewards, *, lengths=2.0):
        return rewards * lengths

    given = {"rewards": 3.0, "lengths": 99.0}
    assert call(part, given) == 6.0
    assert call(functools.partial(part, lengths=5.0), given) == 15.0


def test_a_quantity_that_is_not_there_is_named():
    with pytest.raises(KeyError, match="values"):
        call(lambda values: values, {"rewards": 1})


def test_every_promised_quantity_reaches_a_loss():
    """types.QUANTITIES is the contract: a loss that asks for all of them gets all of them, but for
    what is the critic's own."""
    promised = set(QUANTITIES) - {"values_old"}
    source = (
        f"def everything({', '.join(promised)}):\n    seen.update(locals())\n    return -advantages"
        " * logprobs"
    )
    seen: dict = {}
    scope = {"seen": seen}
    exec(source, scope)
    batch = prepared(algorithm())
    zeros = torch.zeros(batch.ids.shape)
    batch = replace(batch, entropy_old=zeros, returns=zeros, covariance_rank=zeros)
    surrogate(
        batch,
        TokenLogprobs(policy_logprobs(batch), zeros, zeros, zeros),
        algorithm(policy_loss=scope["everything"]),
        KLS["k3"],
    )
    assert promised <= set(seen)


def test_lengths_are_the_sampled_tokens_of_all_rows_of_a_rollout():
    batch = make_batch()
    want = [int(batch.response_mask[i == batch.rollout_ids].sum()) for i in range(9)]
    assert batch.quantities["lengths"].tolist() == want and want[8] == 0


# --------------------------------------------------------------------------------------- advantages


def test_one_number_a_rollout_reaches_every_trained_token_of_all_its_rows():
    batch = make_batch()
    got = estimated(batch, algorithm(advantage=lambda rewards: torch.arange(9.0))).advantages
    assert torch.equal(got, torch.arange(9.0)[batch.rollout_ids][:, None] * scored(batch))


def test_token_advantages_are_taken_as_they_are_inside_the_mask():
    batch = make_batch()
    values = torch.randn(batch.ids.shape, generator=torch.Generator().manual_seed(1))
    got = estimated(batch, algorithm(advantage=lambda response_mask: values)).advantages
    assert torch.equal(got, values * scored(batch))


@pytest.mark.parametrize("shape", [(12,), (9, 1), (12, 8), (), (9, 9)])
def test_another_shape_is_refused(shape):
    """[B] in place of [N] would broadcast or index without a word."""
    with pytest.raises(
        ValueError,
        match=r"algorithm.advantage \(.*\): gave shape .*\[N\] = \(9,\) or \[B, T\] = \(12, 9\)",
    ):
        estimated(make_batch(), algorithm(advantage=lambda rewards: torch.zeros(shape)))


def test_the_group_filter_masks_whole_prompts():
    """Rollouts 3, 4, 5 are all right; of 6, 7, 8 two are scored, and they differ."""
    batch = make_batch()
    got = estimated(batch, algorithm(group_filter=mixed_groups, advantage=raw))
    dropped = torch.isin(batch.rollout_ids, torch.tensor([3, 4, 5]))
    assert not got.response_mask[dropped].any() and got.advantages[dropped].count_nonzero() == 0
    assert torch.equal(got.response_mask[~dropped], batch.response_mask[~dropped])
    weights = loss_weights(got, algorithm()).weights
    assert weights[dropped].count_nonzero() == 0
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-6)  # float32 weights


def test_a_reward_that_the_overlong_rule_changes_changes_the_last_token_of_the_rollout():
    """So the rewards of the tokens still sum up to the reward of the rollout."""
    batch = make_batch()
    change = torch.arange(9.0, dtype=torch.float64) / 10

    def overlong(rewards):
        return rewards - change, torch.ones(9, dtype=torch.bool)

    got = filter_rollouts(batch, algorithm(overlong=overlong))
    torch.testing.assert_close(got.rewards, batch.rewards - change, equal_nan=True)
    sums = torch.zeros(9, dtype=torch.float64).index_add(0, ROLLOUTS, got.token_rewards.sum(1))
    scored_ones = ~batch.rewards.isnan() & (batch.lengths > 0)
    torch.testing.assert_close(sums[scored_ones], -change[scored_ones])
    assert (got.token_rewards != 0).sum(1).max() == 1


def test_baselines_see_the_rollouts_that_the_filter_drops():
    """Filtering is of the update, not of the statistics: the advantage is the same, masked or
    not."""
    kept = estimated(
        make_batch(), algorithm(advantage=lambda rewards: rewards.nan_to_num() - rewards.nanmean())
    )
    cut = estimated(
        make_batch(),
        algorithm(
            advantage=lambda rewards: rewards.nan_to_num() - rewards.nanmean(),
            group_filter=mixed_groups,
        ),
    )
    assert torch.equal(cut.advantages, kept.advantages * cut.response_mask)


def test_an_unscored_rollout_has_advantage_zero_not_nan():
    batch = estimated(make_batch(), algorithm())
    assert (
        batch.advantages.isfinite().all()
        and batch.advantages[batch.rollout_ids == 7].count_nonzero() == 0
    )


def test_advantages_and_weights_carry_no_gradient():
    batch = make_batch()
    batch = replace(batch, rewards=batch.rewards.clone().requires_grad_())
    got = prepared(algorithm(advantage=lambda rewards: rewards * 2), batch)
    assert not got.advantages.requires_grad and not got.weights.requires_grad


# --------------------------------------------------------------------------------------------- loss


def test_the_loss_by_hand():
    """Two tokens, token_mean: ½(−A₁r₁) + ½(−A₂r₂) + coef·½(k3₁ + k3₂), at ratio 1: −½(1 − 2) +
    0.3·½·(e^½ − ½ − 1)."""
    log = torch.tensor([[0.0, -1.0, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[False, True, True]])
    batch = Weighted(
        ids=torch.tensor([[1, 2, 3]]),
        attention_mask=torch.ones(1, 3, dtype=torch.bool),
        response_mask=mask,
        sampled_mask=mask,
        rollout_ids=torch.tensor([0]),
        step_ids=torch.zeros(1, 3, dtype=torch.int64),
        rewards=torch.tensor([1.0]),
        group_ids=torch.tensor([0]),
        truncated=torch.tensor([False]),
        lengths=torch.tensor([2]),
        reply_lengths=torch.tensor([2]),
        token_rewards=torch.zeros(1, 3),
        versions=torch.zeros(1, 3, dtype=torch.int64),
        scale=torch.ones(1, 3),
        logprobs_sampler=log,
        logprobs_old=log,
        logprobs_ref=torch.tensor([[0.0, -0.5, -1.0]]).double(),
        advantages=torch.tensor([[0.0, 1.0, -2.0]]).double(),
    )
    a = algorithm()
    loss, terms = surrogate(
        loss_weights(batch, a), TokenLogprobs(log, torch.zeros_like(log)), a, KLS["k3"]
    )
    k = torch.tensor(0.5).double().exp() - 1.5
    assert float(loss) == pytest.approx(0.5 + 0.3 * float(k) / 2, abs=1e-12)  # double rounding
    assert terms["kl"][0].tolist() == pytest.approx([0.0, float(k), 0.0], abs=1e-12)


def test_without_old_log_probs_the_policy_is_its_own_old():
    """One minibatch, one epoch: ratio 1 everywhere, and the gradient that of given old log-probs
    with the same values."""
    a = algorithm()
    batch = prepared(a)
    logprobs = policy_logprobs(batch)
    alone, given = replace(batch, logprobs_old=None), replace(batch, logprobs_old=logprobs)
    leaf = logprobs.clone().requires_grad_()
    _, terms = surrogate(alone, TokenLogprobs(leaf, torch.zeros_like(leaf)), a, KLS["none"])
    assert torch.equal(terms["ratio"], torch.ones_like(logprobs))
    assert torch.equal(
        whole(alone, logprobs, a, KLS["none"])[1], whole(given, logprobs, a, KLS["none"])[1]
    )


def test_an_unprepared_batch_is_refused_by_name():
    batch = replace(prepared(algorithm()), logprobs_ref=None)
    with pytest.raises(ValueError, match="logprobs_ref"):
        surrogate(
            batch,
            TokenLogprobs(policy_logprobs(batch), torch.zeros(batch.ids.shape)),
            algorithm(),
            KLS["k3"],
        )


def test_an_inactive_kl_needs_no_reference_and_adds_nothing():
    batch = replace(prepared(algorithm()), logprobs_ref=None)
    logprobs = policy_logprobs(batch)
    plain = whole(batch, logprobs, algorithm(), KLS["none"])
    zero = whole(batch, logprobs, algorithm(), KL("k3", k3, coef=0.0))
    assert torch.equal(plain[1], zero[1])


@pytest.mark.parametrize("names", TABLE, ids="-".join)
def test_garbage_under_the_mask_changes_no_bit(names):
    """nan and inf in padding, prompt and tool tokens reach neither the loss nor a gradient (0 × nan
    is nan)."""
    a, kl = algorithm(AGGREGATIONS[names[0]], POLICY_LOSSES[names[1]]), KLS[names[2]]
    batch = prepared(a)
    logprobs, mask = policy_logprobs(batch), batch.response_mask
    loss, gradient = whole(batch, logprobs, a, kl)
    assert gradient[~mask].count_nonzero() == 0 and gradient[mask].count_nonzero() > 0
    for garbage in (float("nan"), float("inf"), -float("inf"), 1e300):
        dirty = replace(
            batch, **{name: getattr(batch, name).where(mask, garbage) for name in TOKENS}
        )
        got_loss, got_gradient = whole(dirty, logprobs.where(mask, garbage), a, kl)
        assert torch.equal(got_loss, loss) and torch.equal(got_gradient, gradient)


@pytest.mark.parametrize("dirty", ["logprobs", "logprobs_old", "logprobs_ref", "entropy"])
def test_a_users_own_part_is_safe_from_garbage_without_clamping(dirty):
    """Shipped parts clamp, which hides nan; a plain exp has 0 × inf in its gradient unless its
    input is filled before."""

    def loss(logprobs, logprobs_old, entropy, advantages):
        return -advantages * (logprobs - logprobs_old + entropy).exp()

    def estimator(logprobs, logprobs_ref):
        return (logprobs_ref - logprobs).exp()

    a, kl = algorithm(policy_loss=loss), KL("mine", estimator, coef=0.3)
    batch = prepared(a)
    given = {
        name: policy_logprobs(batch, seed)
        for seed, name in enumerate(("logprobs", "logprobs_old", "logprobs_ref", "entropy"))
    }
    gradients = []
    for garbage in (0.0, float("nan"), float("inf"), -float("inf")):
        q = given | {dirty: given[dirty].where(batch.response_mask, garbage)}
        leaf = q["logprobs"].clone().requires_grad_()
        own = replace(batch, logprobs_old=q["logprobs_old"], logprobs_ref=q["logprobs_ref"])
        value, terms = surrogate(own, TokenLogprobs(leaf, q["entropy"]), a, kl)
        assert all(term.isfinite().all() for term in terms.values())  # the metrics are made of them
        gradients.append(torch.cat([value.detach()[None], *torch.autograd.grad(value, leaf)[0]]))
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])


def test_garbage_in_token_advantages_is_masked_where_they_are_made():
    """A return computed over whole rows has anything outside the replies; 0 × nan must not come of
    it."""
    batch = make_batch()
    a = algorithm(
        advantage=lambda response_mask: (
            torch.ones(response_mask.shape).double().where(response_mask, float("nan"))
        )
    )
    loss, gradient = whole(prepared(a, batch), policy_logprobs(batch), a, KLS["none"])
    assert loss.isfinite() and gradient.isfinite().all()


@pytest.mark.parametrize("names", TABLE, ids="-".join)
def test_only_the_policy_gets_a_gradient(names):
    """Old, reference and sampler log-probs, advantages and weights are constants."""
    a, kl = algorithm(AGGREGATIONS[names[0]], POLICY_LOSSES[names[1]]), KLS[names[2]]
    batch = prepared(a)
    constants = {
        name: getattr(batch, name).clone().requires_grad_() for name in (*TOKENS, "advantages")
    }
    leaf = policy_logprobs(batch).requires_grad_()
    loss, terms = surrogate(
        replace(batch, **constants), TokenLogprobs(leaf, torch.zeros_like(leaf)), a, kl
    )
    loss.backward()
    assert leaf.grad.count_nonzero() > 0
    assert {
        name: tensor.grad for name, tensor in constants.items() if tensor.grad is not None
    } == {}
    assert not any(term.requires_grad for term in terms.values())


# ----------------------------------------------------------------------------------------- portions


@pytest.mark.parametrize("budget", [1, 9, 20, 10**6])
def test_micro_batches_cover_every_trained_row_once_within_the_budget(budget):
    batch = make_batch()
    portions = list(split_into_micro_batches(batch, budget))
    rows = torch.cat(portions)
    assert sorted(rows.tolist()) == [i for i in range(12) if i != 4]  # row 4 has no trained token
    owners = [set(batch.rollout_ids[portion].tolist()) for portion in portions]
    assert sum(map(len, owners)) == len(set().union(*owners)) == 8  # no rollout is cut apart
    for portion, rollouts in zip(portions, owners, strict=True):
        assert len(rollouts) == 1 or counted(batch, portion) <= budget


def needed(batch):
    """Tokens of each row from which something is predicted."""
    return torch.stack(
        [row.nonzero().max() if row.any() else torch.tensor(0) for row in batch.response_mask]
    )


def counted(batch, portion, shared=1 / 8):
    """Tokens of rows packed in this order: one that the row before has too counts `shared`."""
    total = 0
    before = ()
    for row, length in zip(portion.tolist(), needed(batch)[portion].tolist(), strict=True):
        own = batch.ids[row, :length].tolist()
        same = agreement(own, before)
        total += len(own) - same * (1 - shared)
        before = own
    return total


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("budget", [30, 50, 90])
def test_a_shared_beginning_counts_once_if_the_model_packs_rows(budget, packs):
    """Two groups of eight: prompts of 20 tokens, replies of 3."""
    ids = torch.arange(23).repeat(16, 1)
    ids[:, 20:] = torch.arange(16)[:, None] + 50
    ids[8:, 0] = 40
    batch = replace(
        make_batch(),
        ids=ids,
        attention_mask=torch.ones_like(ids),
        response_mask=torch.arange(23).expand(16, -1) >= 20,
        rollout_ids=torch.arange(16),
        group_ids=torch.arange(16) // 8,
    )
    portions = list(split_into_micro_batches(batch, budget, packs=packs))
    assert torch.equal(torch.cat(portions), torch.arange(16))
    shared = 1 / 8 if packs else 1
    for portion, following in itertools.pairwise(portions):
        assert counted(batch, portion, shared) <= budget
        assert counted(batch, torch.cat([portion, following[:1]]), shared) > budget
    assert len(portions) == ({30: 8, 50: 3, 90: 2} if packs else {30: 16, 50: 8, 90: 4})[budget]


@pytest.mark.parametrize("budget", [1, 9, 20, 45, 10**6])
def test_rows_of_a_group_stand_side_by_side_and_fill_the_budget(budget):
    """One row a rollout: what is packed together shares its prompt, and no portion ends before it
    is full."""
    batch = make_batch()
    batch = replace(batch, rollout_ids=torch.arange(12), group_ids=torch.arange(12) % 3)
    portions = list(split_into_micro_batches(batch, budget))
    order = torch.cat(portions)
    assert batch.group_ids[order].tolist() == sorted(batch.group_ids[order].tolist())
    for portion, following in itertools.pairwise(portions):
        assert counted(batch, torch.cat([portion, following[:1]])) > budget


def test_a_rollout_longer_than_the_budget_is_a_portion_of_its_own():
    """Rollout 0 has three rows, 2 and 6 two, one of which has no trained token."""
    batch = make_batch()
    portions = list(split_into_micro_batches(batch, 1))
    assert sorted(len(p) for p in portions) == [1, 1, 1, 1, 1, 1, 2, 3]
    assert all(len(batch.rollout_ids[p].unique()) == 1 for p in portions)


@pytest.mark.parametrize("budget", [1, 20, 10**6])
@pytest.mark.parametrize("kind", ["token", "rollout", "number"])
def test_micro_batches_count_each_term_as_their_batch_does(kind, budget):
    """A rollout without a trained token counts nowhere."""
    batch = make_batch()
    trained = batch.response_mask & (batch.rollout_ids != 0)[:, None]
    batch = replace(batch, response_mask=trained)
    number = torch.tensor(3.0)
    value = {
        "token": torch.arange(batch.ids.numel()).view_as(batch.ids),
        "rollout": torch.arange(len(batch.rewards)),
        "number": number,
    }[kind]
    found = []
    for rows in split_into_micro_batches(batch, budget):
        part = select(batch, rows)
        own = value[rows][:, : part.ids.shape[1]] if kind == "token" else value
        found.append(pick_counted(own, part))
    whole_value = pick_counted(value, batch)
    assert torch.equal(torch.cat(found).sort().values, whole_value.sort().values)
    if kind == "rollout":
        assert 0 not in whole_value and len(whole_value) == 7


SEQUENCE_PARTS = {
    "sequence ratio": {"ratio": sequence_ratio},
    "sequence token ratio": {"ratio": sequence_token_ratio},
    "gmpo": {"policy_loss": gmpo},
}


@pytest.mark.slow
@each("aggregation", AGGREGATIONS)
@each("part", SEQUENCE_PARTS)
def test_no_budget_changes_what_is_made_of_whole_rollouts(part, aggregation):
    """Three rows of a rollout are one sequence: its ratio is the same whatever the budget, down to
    one row's length."""
    a = algorithm(AGGREGATIONS[aggregation], **SEQUENCE_PARTS[part])
    batch = prepared(a)
    logprobs = policy_logprobs(batch)
    loss, gradient = whole(batch, logprobs, a, KLS["k3"])
    for budget in (1, 9, 20, 45, 10**6):
        got_loss, got = in_portions(
            batch, logprobs, a, KLS["k3"], split_into_micro_batches(batch, budget)
        )
        assert distance(got, gradient) < 1e-10 and got_loss == pytest.approx(
            float(loss), rel=1e-10
        )  # float64 sums reordered
    for garbage in (float("nan"), float("inf")):
        got_loss, got = whole(batch, logprobs.where(batch.response_mask, garbage), a, KLS["k3"])
        assert torch.equal(got_loss, loss) and torch.equal(got, gradient)


def test_a_batch_without_a_trained_token_has_no_portions():
    batch = make_batch()
    assert (
        list(
            split_into_micro_batches(
                replace(batch, response_mask=torch.zeros_like(batch.response_mask)), 100
            )
        )
        == []
    )


def test_selected_rows_lose_padding_only():
    batch = prepared(algorithm())
    for rows in split_into_micro_batches(batch, 20):
        part = select(batch, rows)
        for name, tensor in vars(part).items():
            if name == "metrics":
                assert tensor == batch.metrics == {}
            elif not torch.is_tensor(tensor) or name in PER_ROLLOUT:
                assert tensor is getattr(batch, name)
            elif tensor.dim() == 1:
                assert torch.equal(tensor, getattr(batch, name)[rows])
            else:
                assert torch.equal(tensor, getattr(batch, name)[rows][:, : tensor.shape[1]])
        assert int(part.attention_mask.sum()) == int(batch.attention_mask[rows].sum())


@pytest.mark.parametrize("names", TABLE, ids="-".join)
def test_no_split_changes_loss_or_gradient(names):
    """Micro-batches only sum: weights are fixed on the whole update, so budgets, orders of rows and
    padding leave no trace."""
    a, kl = algorithm(AGGREGATIONS[names[0]], POLICY_LOSSES[names[1]]), KLS[names[2]]
    batch, tolerance = prepared(a), 1e-10  # float64 sums in another order
    logprobs = policy_logprobs(batch)
    loss, gradient = whole(batch, logprobs, a, kl)
    for budget in (1, 9, 20, 45, 10**6):
        got_loss, got = in_portions(batch, logprobs, a, kl, split_into_micro_batches(batch, budget))
        assert distance(got, gradient) < tolerance and got_loss == pytest.approx(
            float(loss), rel=1e-10
        )
    generator = torch.Generator().manual_seed(3)
    for sizes in ((1, 11), (5, 4, 3), (12,)):  # whatever rows come together, rollouts cut apart too
        order = torch.randperm(12, generator=generator)
        assert (
            distance(in_portions(batch, logprobs, a, kl, order.split(list(sizes)))[1], gradient)
            < tolerance
        )


@pytest.mark.parametrize("names", TABLE, ids="-".join)
def test_neither_padding_nor_the_order_of_rows_changes_the_gradient(names):
    a, kl = algorithm(AGGREGATIONS[names[0]], POLICY_LOSSES[names[1]]), KLS[names[2]]
    batch = make_batch()
    logprobs = policy_logprobs(batch)
    _, gradient = whole(prepared(a, batch), logprobs, a, kl)

    def changed(change):
        return replace(
            batch,
            **{
                n: change(t)
                for n, t in vars(batch).items()
                if torch.is_tensor(t) and n not in PER_ROLLOUT
            },
        )

    def pad(tensor, fill=0):
        return torch.nn.functional.pad(tensor, (0, 6), value=fill) if tensor.dim() == 2 else tensor

    padded = prepared(a, changed(pad))
    _, got = in_portions(
        padded, pad(logprobs, float("nan")), a, kl, split_into_micro_batches(padded, 20)
    )
    assert (
        distance(got[:, :9], gradient) < 1e-10 and got[:, 9:].count_nonzero() == 0
    )  # float64 sums in another order
    order = torch.randperm(12, generator=torch.Generator().manual_seed(4))
    _, got = whole(prepared(a, changed(lambda t: t[order])), logprobs[order], a, kl)
    assert distance(got, gradient[order]) < 1e-10


@pytest.mark.parametrize(
    "quantity", [n for n, text in QUANTITIES.items() if text.startswith("[N]")]
)
def test_a_loss_may_ask_for_any_figure_of_a_rollout_and_no_split_changes_it(quantity):
    """Figures per rollout must be those of the whole update also where a micro-batch holds only
    some rows of a rollout."""

    def loss(logprobs, advantages, rollout_ids, **given):
        figure = given[quantity].double().nan_to_num()[rollout_ids][:, None]
        return -advantages * logprobs * (1 + figure)

    def by_figure(logprobs, advantages, rollout_ids, figure):
        return loss(logprobs, advantages, rollout_ids, **{quantity: figure})

    scope = {"loss": by_figure}
    exec(
        f"def asks(logprobs, advantages, rollout_ids, {quantity}):\n    return loss(logprobs,"
        f" advantages, rollout_ids, {quantity})",
        scope,
    )
    a = algorithm(policy_loss=scope["asks"])
    batch = prepared(a)
    logprobs = policy_logprobs(batch)
    _, gradient = whole(batch, logprobs, a, KLS["none"])
    _, got = in_portions(batch, logprobs, a, KLS["none"], split_into_micro_batches(batch, 9))
    assert distance(got, gradient) < 1e-10  # float64 sums in another order


# -------------------------------------------------------------------------------------- minibatches


def members(part: Batch) -> set[int]:
    return set(part.rollout_ids.tolist())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_minibatches_cover_every_rollout_once_an_epoch_and_split_none(count):
    a = algorithm(epochs=2, minibatches=count)
    batch = estimated(make_batch(), a)
    parts = list(minibatches(batch, a, seed=1))
    assert len(parts) == 2 * count
    for epoch in (parts[:count], parts[count:]):
        assert sorted(i for part in epoch for i in members(part)) == list(
            range(8)
        )  # rollout 8 has no row
        assert sum(len(part.ids) for part in epoch) == 12
    for part in parts:
        assert all((part.rollout_ids == i).sum() == (i == ROLLOUTS).sum() for i in members(part))


def test_each_minibatch_is_weighted_by_itself():
    """An optimiser step's weights sum to 1 over its own rows; shares of the whole batch would
    shrink every step."""
    a = algorithm(minibatches=3)
    for part in minibatches(estimated(make_batch(), a), a, seed=0):
        assert float(part.weights.double().sum()) == pytest.approx(1.0, abs=1e-6)  # float32 weights


def test_minibatches_are_a_function_of_the_seed():
    a = algorithm(epochs=3, minibatches=3)
    batch = estimated(make_batch(), a)

    def split(seed):
        return [tuple(sorted(members(part))) for part in minibatches(batch, a, seed=seed)]

    torch.manual_seed(0)
    first = split(11)
    torch.manual_seed(1)
    assert split(11) == first  # no global generator
    assert split(12) != first
    assert first[:3] != first[3:6]  # each epoch is shuffled anew
    assert split((1 << 63) - 1)  # the largest seed that rlkit.functional.mix gives


def test_advantages_are_not_estimated_again_in_a_minibatch():
    """Baselines belong to the whole update batch; a minibatch may hold one rollout of a prompt."""
    a = algorithm(minibatches=3)
    batch = estimated(make_batch(), a)
    for part in minibatches(batch, a, seed=0):
        for i in members(part):
            ours, theirs = (
                part.advantages[part.rollout_ids == i],
                batch.advantages[batch.rollout_ids == i],
            )
            assert torch.equal(ours, theirs[:, : ours.shape[1]])


def test_a_minibatch_of_rollouts_without_rows_does_not_end_the_run():
    """A prompt that does not fit gives an episode without steps, so without rows; with one rollout
    a part, a part is empty."""
    a = algorithm(minibatches=9)
    batch = estimated(make_batch(), a)
    parts = [part for part in minibatches(batch, a, seed=0) if len(part.ids)]
    assert sorted(i for part in parts for i in members(part)) == list(range(8))


def test_as_many_parts_as_asked_for_where_they_do_not_divide_evenly():
    """9 rollouts in 4 parts: an update must not silently vanish."""
    a = algorithm(minibatches=4)
    assert len(list(minibatches(estimated(make_batch(), a), a, seed=0))) == 4


# -------------------------------------------------------------------------------------------- pairs


@pytest.mark.parametrize("group_filter", [keep_all, mixed_groups])
@pytest.mark.parametrize("length_normalise", [False, True])
def test_the_update_of_pairwise_is_the_gradient_of_the_preference_loss(
    length_normalise, group_filter
):
    """Through every stage, at the old policy (ratio 1), with rollouts of several rows, one unscored
    and one without a row."""
    numbers = {"beta": 0.7, "length_normalise": length_normalise}
    preference = functools.partial(pairwise, **numbers)
    a = algorithm(
        functools.partial(sequence_sum, constant=1.0),
        reinforce,
        advantage=preference,
        group_filter=group_filter,
    )
    batch = prepared(a)
    pairs = torch.tensor(
        [[0, 1], [0, 2], [2, 1]]
    )  # the second prompt's are all alike, of the third only one is scored and has a row
    leaf = batch.logprobs_old.clone().requires_grad_()
    (expected,) = torch.autograd.grad(
        pairwise_loss(leaf, batch.response_mask, batch.rollout_ids, pairs, **numbers).mean(), leaf
    )
    _, gradient = whole(batch, batch.logprobs_old, a, KLS["none"])
    assert (gradient - expected).norm() <= 1e-7 * expected.norm()  # the weights are float32


# ------------------------------------------------------------------------------ tokens and a critic


def at_the_end(batch: Batch) -> Scored:
    """The same batch with each scored rollout's reward at its last trained token, as `assemble`
    places it."""
    return replace(
        batch,
        token_rewards=batch.rewards.nan_to_num(0.0)[batch.rollout_ids][:, None]
        * mark_last_tokens(batch),
    )


def test_a_kl_in_the_reward_is_the_same_taken_from_tokens_or_subtracted_afterwards():
    """Undiscounted and without baseline: the return to go of reward minus KL is the reward minus
    the KL to come."""
    kl = KL("k3", k3, placement="reward", coef=0.3)
    batch = at_the_end(make_batch())
    tokens = estimated(batch, algorithm(advantage=reward_to_go), kl).advantages
    torch.testing.assert_close(
        tokens, estimated(batch, algorithm(advantage=raw), kl).advantages, rtol=0, atol=1e-12
    )  # float64 rounding
    assert not torch.equal(tokens, estimated(batch, algorithm(advantage=raw)).advantages)


@pytest.mark.parametrize("advantage", [gae, turn_gae])
def test_an_estimate_gives_the_critic_its_returns(advantage):
    """Without decay they are the return to go, whatever the critic says; the advantages are
    whitened, the returns are not."""
    batch = at_the_end(make_batch())
    values = torch.randn(
        batch.ids.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    a = algorithm(
        advantage=functools.partial(advantage, lam=1.0),
        normalization=whiten,
        critic=Critic("head", squared_error),
    )
    got = estimated(replace(batch, values=values), a)
    returns = estimated(batch, algorithm(advantage=reward_to_go)).advantages
    torch.testing.assert_close(
        got.returns * scored(batch), returns, rtol=0, atol=1e-12
    )  # float64 rounding
    unscored = batch.response_mask & ~scored(batch)
    assert unscored.any() and torch.equal(
        got.returns[unscored], values[unscored]
    )  # the critic has nothing to learn there
    counted = got.advantages[scored(batch)]
    assert counted.mean().item() == pytest.approx(
        0, abs=1e-12
    ) and counted.var().item() == pytest.approx(1, abs=1e-6)  # eps is 1e-8
