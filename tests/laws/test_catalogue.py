"""Laws of every algorithm, every part of one, and every KL in every placement, as the config builds
them.

The policy is a table of logits, one distribution a token, and the critic a table of values; so a
gradient is that of every number that the loss can move. A new option is in the table by being a
file in conf/.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parametrise import (
    ALGORITHMS,
    KINDS_OF_ALGORITHM,
    KINDS_OF_KL,
    OTHERS,
    PARTS,
    PLACED_KLS,
    cases,
)
from rlkit.config.compose import compose
from rlkit.config.compose import experiment as built
from rlkit.config.problems import find_problems
from rlkit.config.problems.trial import dry_run
from rlkit.errors import ConfigError
from rlkit.training.schedules import resolve_schedules, start
from rlkit.training.update.loss import loss_weights, surrogate, value_surrogate
from rlkit.training.update.sampled import filter_rollouts
from rlkit.training.update.scored import compute_old_share
from rlkit.training.update.split import PER_ROLLOUT, select, split_into_micro_batches
from rlkit.training.update.weighted import weigh
from rlkit.types import Minibatch, Scored, TokenLogprobs

B, T, V = 12, 9, 6
ROLLOUTS = torch.tensor([0, 0, 0, 1, 2, 2, 3, 4, 5, 6, 6, 7])  # of each row; rollout 8 has no row
ALWAYS = ("trainer.steps=1",)
CRITIC = ("algorithm/critic=head",)

# The whole table, in which parts and placed KLs are slow but for a representative of each kind.
TABLE = [
    *cases(ALGORITHMS, KINDS_OF_ALGORITHM),
    *cases(PARTS, 1),
    *cases(PLACED_KLS, KINDS_OF_KL),
    *cases(OTHERS, 1),
]
BOUNDS = [*cases(ALGORITHMS, KINDS_OF_ALGORITHM), *cases(PLACED_KLS, KINDS_OF_KL)]


@functools.cache
def composed(overrides: tuple[str, ...]):
    """The experiment, or None where the combination is refused. What stands behind `kl=` is set
    without composing once more."""
    if overrides[0].startswith("kl=") and overrides[1:]:
        x = composed(overrides[:1])
        fields = dict(text.removeprefix("kl.").split("=") for text in overrides[1:])
        x = x._replace(
            kl=x.kl._replace(
                **{
                    name: value == "true" if value in ("true", "false") else value
                    for name, value in fields.items()
                }
            )
        )
        if find_problems(x):
            return None
        dry_run(x)
        return x
    alone = {"algorithm=sft": ("batch.group_size=1",)}  # a row is one episode
    needs = (
        alone
        | {
            "algorithm/advantage=gae": CRITIC,
            "algorithm/advantage=turn_gae": CRITIC,
            "algorithm/advantage=adaptive_gae": CRITIC,
        }
    ).get(overrides[0], ())
    needs = (
        ("algorithm=ppo",)
        if overrides[0].startswith("algorithm/critic") and overrides[0] != "algorithm/critic=none"
        else needs
    )
    needs = ("algorithm=pairwise",) if "pair_selector" in overrides[0] else needs
    try:
        x = built(compose([*needs, *overrides]))
    except ConfigError:
        return None
    return resolve_schedules(x, start(x))


def experiment(overrides):
    x = composed(overrides)
    if x is None:
        pytest.skip("refused at start")
    return x


def make_batch(dtype: torch.dtype = torch.float64, seed: int = 0) -> Scored:
    """12 rows of 9 rollouts of 3 prompts; log-ratios of order 1, so that clips bind; one prompt all
    right, one reward unknown."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.rand(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    lengths = torch.randint(3, T + 1, (B,), generator=generator)
    lengths[0] = T
    attention = torch.arange(T) < lengths[:, None]
    response = attention & (torch.rand(B, T, generator=generator) < 0.6)
    response[:, 0], response[:, 2] = False, True
    response[4] = False  # a row without a trained token
    zeros = torch.zeros(B, T, dtype=dtype)
    rewards = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 1.0, 0.0, float("nan"), 1.0], dtype=dtype)
    last = torch.zeros(B, T, dtype=torch.bool)
    for j in range(8):
        rows = (j == ROLLOUTS).nonzero()[:, 0]
        row = [r for r in rows.tolist() if response[r].any()][-1]
        last[row, response[row].nonzero()[-1]] = True
    return Scored(
        ids=torch.randint(V, (B, T), generator=generator),
        attention_mask=attention,
        response_mask=response,
        sampled_mask=response,
        rollout_ids=ROLLOUTS,
        step_ids=torch.arange(B)[:, None].expand(B, T).contiguous(),
        rewards=rewards,
        group_ids=torch.tensor([5, 5, 5, 2, 2, 2, 9, 9, 9]),
        truncated=torch.arange(9) % 4 == 1,
        lengths=torch.zeros(9, dtype=torch.int64).index_add_(0, ROLLOUTS, response.sum(1))
        * 9,  # near generation.max_new_tokens
        reply_lengths=torch.zeros(9, dtype=torch.int64).index_add_(0, ROLLOUTS, response.sum(1))
        * 9,
        token_rewards=zeros.where(~last, rewards.nan_to_num()[ROLLOUTS][:, None]),
        logprobs_sampler=-random(B, T, scale=2.0) * response,
        logprobs_old=-random(B, T, scale=2.0) * response,
        entropy_old=random(B, T) * response,
        logprobs_ref=-random(B, T, scale=2.0) * response,
        values=random(B, T) * response,
        greedy_rewards=torch.linspace(0, 1, 9, dtype=dtype),
        versions=torch.randint(4, (B, T), generator=generator),
        components={"task": rewards},
    )


def make_policy(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    logits, ref = (
        torch.randn(B, T, V, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)
    )
    return {
        "logits": logits,
        "ref": ref,
        "values": torch.rand(B, T, generator=generator, dtype=torch.float64).to(dtype),
    }


def prepared(x, batch: Scored) -> Minibatch:
    """As the module prepares an update."""
    batch = filter_rollouts(batch, x.algorithm)
    batch = replace(batch, old_share=compute_old_share(batch, x.algorithm, step=3))
    return loss_weights(weigh(batch, x.algorithm, x.kl), x.algorithm)


def loss_of(x, batch: Minibatch, policy: dict[str, Tensor]) -> Tensor:
    """The loss of policy and critic on some rows."""
    logs, ref = policy["logits"].log_softmax(-1), policy["ref"].log_softmax(-1)
    scores = TokenLogprobs(
        logprobs=logs.gather(2, batch.ids[:, :, None])[:, :, 0],
        entropy=-(logs.exp() * logs).sum(-1),
        values=policy["values"],
        full_kl=(logs.exp() * (logs - ref.detach())).sum(-1),
    )
    loss, _ = surrogate(batch, scores, x.algorithm, x.kl)
    if x.algorithm.critic.active:
        loss = loss + value_surrogate(batch, scores, x.algorithm.critic)[0]
    return loss


def leaves(policy: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone().requires_grad_() for name, tensor in policy.items()}


def gradient_of(
    x, batch: Minibatch, policy: dict[str, Tensor], portions=None
) -> tuple[Tensor, Tensor]:
    """Loss and flat gradient, in one piece or summed over portions."""
    given, total = leaves(policy), policy["logits"].new_zeros(())
    for rows in portions if portions is not None else [None]:
        part = batch if rows is None else select(batch, rows)
        mine = (
            given
            if rows is None
            else {name: t[rows][:, : part.ids.shape[1]] for name, t in given.items()}
        )
        loss = loss_of(x, part, mine)
        if loss.requires_grad:
            loss.backward()
        total = total + loss.detach()
    flat = [
        torch.zeros_like(t).flatten() if t.grad is None else t.grad.flatten()
        for t in (given["logits"], given["values"])
    ]
    return total, torch.cat(flat)


def changed(batch: Scored, change) -> Scored:
    return replace(
        batch,
        **{
            n: change(t)
            for n, t in vars(batch).items()
            if torch.is_tensor(t) and n not in PER_ROLLOUT
        },
    )


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    """Norm-relative: single entries may cancel, the gradient as a whole does not."""
    return bool((ours - theirs).norm() <= tolerance * theirs.norm())


def ids(overrides):
    return ",".join(overrides)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", TABLE, ids=ids)
def test_no_split_into_micro_batches_changes_the_gradient(overrides):
    """Policy, KL, entropy and value terms: whatever the budget, the sum is the same."""
    x = experiment(overrides)
    for dtype, tolerance in (
        (torch.float64, 1e-10),
        (torch.float32, 1e-5),
    ):  # rounding of sums in another order
        batch, policy = prepared(x, make_batch(dtype)), make_policy(dtype)
        loss, whole = gradient_of(x, batch, policy)
        assert whole.isfinite().all() and whole.norm() > 0
        for budget in (1, 45):
            got, gradient = gradient_of(x, batch, policy, split_into_micro_batches(batch, budget))
            assert close(gradient, whole, tolerance)
            torch.testing.assert_close(got, loss, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", TABLE, ids=ids)
def test_neither_padding_nor_order_changes_the_gradient(overrides):
    x = experiment(overrides)
    batch, policy = make_batch(), make_policy()
    _, whole = gradient_of(x, prepared(x, batch), policy)

    def pad(tensor: Tensor) -> Tensor:
        if tensor.dim() == 1:
            return tensor
        return torch.nn.functional.pad(tensor, (0, 0, 0, 4) if tensor.dim() == 3 else (0, 4))

    given = {name: pad(t) for name, t in policy.items()}
    _, padded = gradient_of(x, prepared(x, changed(batch, pad)), given)
    logits, values = (
        padded[: B * (T + 4) * V].view(B, T + 4, V),
        padded[B * (T + 4) * V :].view(B, T + 4),
    )
    assert logits[:, T:].count_nonzero() == 0 and values[:, T:].count_nonzero() == 0
    assert close(
        torch.cat([logits[:, :T].flatten(), values[:, :T].flatten()]), whole, 1e-10
    )  # sums over other widths
    order = torch.randperm(B, generator=torch.Generator().manual_seed(4))
    shuffled = {name: t[order] for name, t in policy.items()}
    _, got = gradient_of(x, prepared(x, changed(batch, lambda t: t[order])), shuffled)
    logits, values = whole[: B * T * V].view(B, T, V)[order], whole[B * T * V :].view(B, T)[order]
    assert close(got, torch.cat([logits.flatten(), values.flatten()]), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", TABLE, ids=ids)
def test_garbage_under_the_mask_changes_no_bit(overrides):
    """Padding, prompt and tool tokens: nothing that stands there reaches an advantage, a weight,
    the loss or a gradient."""
    x = experiment(overrides)
    batch, policy = make_batch(), make_policy()
    mask = batch.response_mask
    names = (
        "logprobs_sampler",
        "logprobs_old",
        "entropy_old",
        "logprobs_ref",
        "values",
        "token_rewards",
    )
    loss, clean = gradient_of(x, prepared(x, batch), policy)
    for garbage in (float("nan"), float("inf"), -1e300):
        dirty = replace(
            batch, **{name: getattr(batch, name).where(mask, garbage) for name in names}
        )
        soiled = policy | {
            "logits": policy["logits"].where(mask[:, :, None], 1e300),
            "values": policy["values"].where(mask, garbage),
        }
        got, gradient = gradient_of(x, prepared(x, dirty), soiled)
        assert torch.equal(got, loss) and torch.equal(gradient, clean)


@pytest.mark.parametrize("overrides", TABLE, ids=ids)
def test_only_policy_and_critic_get_a_gradient(overrides):
    """Sampler, old and reference log-probs, old values, rewards, advantages, returns, scales and
    weights are constants."""
    x = experiment(overrides)
    batch, policy = make_batch(), leaves(make_policy())
    names = (
        "rewards",
        "token_rewards",
        "logprobs_sampler",
        "logprobs_old",
        "entropy_old",
        "logprobs_ref",
        "values",
    )
    constants = {name: getattr(batch, name).clone().requires_grad_() for name in names}
    ready = prepared(x, replace(batch, **constants))
    made = {
        n: getattr(ready, n)
        for n in ("advantages", "returns", "scale", "weights")
        if getattr(ready, n) is not None
    }
    assert not any(tensor.requires_grad for tensor in made.values())
    later = {
        name: made[name].clone().requires_grad_()
        for name in ("advantages", "returns")
        if name in made
    }
    loss_of(x, replace(ready, **later), policy).backward()
    assert policy["logits"].grad.count_nonzero() > 0 and policy["ref"].grad is None
    assert (policy["values"].grad is not None) == x.algorithm.critic.active
    assert [name for name, tensor in (constants | later).items() if tensor.grad is not None] == []


@pytest.mark.parametrize("overrides", BOUNDS, ids=ids)
def test_a_batch_without_a_trained_token_is_a_zero(overrides):
    """Everything filtered, or every reply empty: no nan, and a gradient of 0."""
    x = experiment(overrides)
    batch = make_batch()
    batch = replace(batch, response_mask=torch.zeros_like(batch.response_mask))
    loss, gradient = gradient_of(x, prepared(x, batch), make_policy())
    assert loss == 0 and gradient.count_nonzero() == 0


@pytest.mark.parametrize("overrides", BOUNDS, ids=ids)
def test_huge_log_ratios_stay_finite(overrides):
    x = experiment(overrides)
    batch, policy = make_batch(), make_policy()
    signs = torch.where(torch.arange(T) % 2 == 0, 1e4, -1e4).double()
    for name in ("logprobs_old", "logprobs_ref", "logprobs_sampler"):
        extreme = replace(batch, **{name: getattr(batch, name) + signs})
        loss, gradient = gradient_of(x, prepared(x, extreme), policy)
        assert loss.isfinite() and gradient.isfinite().all()


@pytest.mark.slow
def test_only_these_combinations_are_refused():
    """So that a combination is not lost without a word."""
    refused = {
        ids(overrides)
        for overrides in ALGORITHMS + PARTS + PLACED_KLS + OTHERS
        if composed(overrides) is None
    }
    carry_the_ratio = {
        f"kl={name},kl.placement=loss,kl.importance_weight=true"
        for name in ("forward", "k1", "reverse")
    }
    exact = {
        ids(overrides)
        for overrides in PLACED_KLS
        if overrides[0] == "kl=full" and overrides[1] != "kl.placement=loss"
    }
    need_a_teacher = {
        f"algorithm={name}" for name in ("opd", "gkd", "mopd", "sdft", "sdpo", "opsd")
    }
    assert refused == carry_the_ratio | exact | need_a_teacher
