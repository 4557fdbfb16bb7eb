"""Advantages of tokens and turns: returns and GAE by hand, against loops, and what tools, rows and
padding must not change."""

import inspect
import itertools
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from parametrise import each
from rlkit.functional import gae, group_mean, remax, reward_to_go, turn_gae, turn_group_mean
from rlkit.types import Estimate

NAN = float("nan")
CLOSE = {"rtol": 0, "atol": 1e-12}  # float64 rounding of sums of at most 40 terms
OPTIONS = {
    "reward_to_go": partial(reward_to_go, gamma=0.9),
    "gae": partial(gae, gamma=0.9, lam=0.8),
    "gae bootstrap": partial(gae, gamma=0.9, lam=0.8, bootstrap_truncated=True),
    "turn_gae": partial(turn_gae, gamma=0.9, lam=0.8),
    "turn_gae bootstrap": partial(turn_gae, gamma=0.9, lam=0.8, bootstrap_truncated=True),
    "adaptive_gae": partial(gae, gamma=0.9, alpha=0.4),
}


def _rows(seed: int = 0) -> dict[str, Tensor]:
    """9 rows of 7 positions: rollout 2 fills three of them, out of order, rollout 4 two; rollout 3
    has no token."""
    generator = torch.Generator().manual_seed(seed)
    step_ids = torch.tensor([0, 0, 1, 0, 2, 0, 1, 0, 0]).unsqueeze(1).repeat(1, 7)
    step_ids[0, 4:] = 1  # a row of two steps
    mask = torch.rand(9, 7, generator=generator) < 0.6
    mask[3] = False
    return {
        "rollout_ids": torch.tensor([0, 1, 2, 3, 2, 4, 4, 2, 5]),
        "step_ids": step_ids,
        "response_mask": mask,
        "truncated": torch.tensor([True, False, True, True, False, True]),
        "token_rewards": torch.randn(9, 7, generator=generator, dtype=torch.float64),
        "values": torch.randn(9, 7, generator=generator, dtype=torch.float64),
    }


def _episode(
    step_ids: list[int],
    mask: list[int],
    rewards: list[float],
    values: list[float],
    truncated: bool = False,
) -> dict[str, Tensor]:
    """One rollout in one row."""
    return {
        "rollout_ids": torch.tensor([0]),
        "step_ids": torch.tensor([step_ids]),
        "response_mask": torch.tensor([mask]).bool(),
        "truncated": torch.tensor([truncated]),
        "token_rewards": torch.tensor([rewards], dtype=torch.float64),
        "values": torch.tensor([values], dtype=torch.float64),
    }


def _call(option, given: dict[str, Tensor], **numbers) -> Estimate:
    """Both results; of what gives advantages alone, they stand for the returns as well."""
    got = option(
        **{n: given[n] for n in inspect.signature(option).parameters if n in given}, **numbers
    )
    return got if isinstance(got, Estimate) else Estimate(got, got)


def _loop(
    name: str, given: dict[str, Tensor], gamma: float, lam: float
) -> dict[tuple[int, int], tuple[float, float]]:
    """Backwards over the actions of each rollout, one at a time: place of a token → (advantage,
    return)."""
    out = {}
    for rollout in range(6):
        rows = [r for r in range(9) if given["rollout_ids"][r] == rollout]
        tokens = sorted(
            (int(given["step_ids"][r, t]), t, r)
            for r in rows
            for t in range(7)
            if given["response_mask"][r, t]
        )
        places = [(r, t) for _, t, r in tokens]
        turns = [
            [p for p in places if given["step_ids"][p] == step]
            for step in sorted({k for k, _, _ in tokens})
        ]
        actions = turns if name.startswith("turn") else [[p] for p in places]
        cut = name.endswith("bootstrap") and bool(given["truncated"][rollout]) and bool(places)
        following, advantage = float(given["values"][places[-1]]) if cut else 0.0, 0.0
        for action in reversed(actions):
            reward, value = (
                sum(float(given["token_rewards"][p]) for p in action),
                float(given["values"][action[0]]),
            )
            if name == "reward_to_go":
                value = 0.0
            advantage = reward + gamma * following - value + gamma * lam * advantage
            following = value
            out |= dict.fromkeys(action, (advantage, advantage + value))
    return out


@each("seed", range(3))
@each("name", [name for name in OPTIONS if name != "adaptive_gae"])
def test_against_a_loop(name: str, seed: int) -> None:
    given = _rows(seed)
    got, expected = (
        _call(OPTIONS[name], given),
        _loop(name, given, 0.9, 1.0 if name == "reward_to_go" else 0.8),
    )
    for r, t in itertools.product(range(9), range(7)):
        advantage, following = expected.get((r, t), (0.0, 0.0))
        assert got.advantages[r, t].item() == pytest.approx(advantage, abs=1e-12)
        assert got.returns[r, t].item() == pytest.approx(following, abs=1e-12)


# ------------------------------------------------------------------------------------------ by hand


def test_tool_tokens_are_passed_over() -> None:
    """act, act, obs, obs, act, act: the return is 1 on every act, not 0 before the tool; and γ
    counts acts alone."""
    given = _episode([0, 0, 0, 0, 1, 1], [1, 1, 0, 0, 1, 1], [0, 0, 9, NAN, 0, 1], [0] * 6)
    assert _call(reward_to_go, given).advantages.tolist() == [[1.0, 1.0, 0.0, 0.0, 1.0, 1.0]]
    assert _call(reward_to_go, given, gamma=0.5).advantages.tolist() == [
        [0.125, 0.25, 0.0, 0.0, 0.5, 1.0]
    ]
    assert _call(reward_to_go, given, gamma=0.0).advantages.tolist() == [
        [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    ]


def test_rewards_on_the_way_count_from_where_they_were_earned() -> None:
    """A step's reward of 2 in the middle, a KL of 0.5 on each act, 1 at the end: from behind 0.5,
    0, 1.5, 1; no act owes the past."""
    given = _episode([0, 0, 0, 1, 1], [1, 1, 0, 1, 1], [-0.5, 1.5, 0, -0.5, 0.5], [0] * 5)
    assert _call(reward_to_go, given).advantages.tolist() == [[1.0, 1.5, 0.0, 0.0, 0.5]]


def test_gae_by_hand_with_a_tool_in_the_middle() -> None:
    """γ = 1, λ = ½, V = .1 .2 · · .3 .4, reward 1 at the end.

    δ = .1, .1, .1, .6 → Â₄ = .6, Â₃ = .1 + .3 = .4, Â₂ = .1 + .2 = .3, Â₁ = .1 + .15 = .25. A reset
    at the tool would give
    -.2 at the second act. The returns are those that verl's function gives here.
    """
    given = _episode(
        [0, 0, 0, 0, 1, 1], [1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1], [0.1, 0.2, 77.0, NAN, 0.3, 0.4]
    )
    got = _call(gae, given, lam=0.5)
    torch.testing.assert_close(
        got.advantages, torch.tensor([[0.25, 0.3, 0, 0, 0.4, 0.6]], dtype=torch.float64), **CLOSE
    )
    torch.testing.assert_close(
        got.returns, torch.tensor([[0.35, 0.5, 0, 0, 0.7, 1.0]], dtype=torch.float64), **CLOSE
    )


def test_turn_gae_by_hand() -> None:
    """Two turns, V = .2 and .5 at their first tokens, rewards .1 + .2 and 1; γ = λ = ½.

    δ₂ = 1 - .5 = .5, δ₁ = .3 + .25 - .2 = .35, Â₁ = .35 + .25 · .5 = .475; returns .675 and 1, on
    each token of the turn.
    """
    given = _episode([0, 0, 0, 1, 1], [1, 1, 0, 1, 1], [0.1, 0.2, 9, 0, 1], [0.2, 9, NAN, 0.5, 9])
    got = _call(turn_gae, given, gamma=0.5, lam=0.5)
    torch.testing.assert_close(
        got.advantages, torch.tensor([[0.475, 0.475, 0, 0.5, 0.5]], dtype=torch.float64), **CLOSE
    )
    torch.testing.assert_close(
        got.returns, torch.tensor([[0.675, 0.675, 0, 1, 1]], dtype=torch.float64), **CLOSE
    )


@pytest.mark.parametrize("option", [gae, turn_gae])
def test_a_truncated_rollout_may_go_on_from_its_last_state(option) -> None:
    """One token, V = .5, reward 0: cut off is a loss of .5, or with the value of the last state
    behind it, at γ = .9, of .05."""
    for truncated, bootstrap, expected in (
        (True, False, -0.5),
        (False, True, -0.5),
        (True, True, -0.05),
    ):
        given = _episode([0, 0], [1, 0], [0, 0], [0.5, 9], truncated)
        got = _call(option, given, gamma=0.9, bootstrap_truncated=bootstrap)
        torch.testing.assert_close(
            got.advantages, torch.tensor([[expected, 0]], dtype=torch.float64), **CLOSE
        )


# ---------------------------------------------------------------------------------------- relations


def test_gae_without_decay_is_the_return_minus_the_value() -> None:
    given = _rows()
    got, returns = (
        _call(gae, given, gamma=0.9, lam=1.0),
        _call(reward_to_go, given, gamma=0.9).returns,
    )
    expected = (returns - given["values"]).where(given["response_mask"], 0.0)
    torch.testing.assert_close(got.advantages, expected, **CLOSE)
    torch.testing.assert_close(got.returns, returns, **CLOSE)


def test_gae_with_full_decay_is_the_one_step_error() -> None:
    given = _episode([0] * 3, [1] * 3, [1, 0, 2], [0.5, 0.25, 4])
    assert _call(gae, given, lam=0.0).advantages.tolist() == [[1 + 0.25 - 0.5, 4 - 0.25, 2 - 4]]


@pytest.mark.parametrize("name", OPTIONS)
def test_observations_may_as_well_not_be_there(name: str) -> None:
    """act act obs obs act act against the four acts alone: the same numbers on the acts, bit for
    bit."""
    given = _episode(
        [0, 0, 0, 0, 1, 1],
        [1, 1, 0, 0, 1, 1],
        [0.5, 0.1, 7, 7, 0, 1],
        [0.1, 0.2, 77, NAN, 0.3, 0.4],
        truncated=True,
    )
    acts = [0, 1, 4, 5]
    compact = {n: v[:, acts] if v.dim() == 2 else v for n, v in given.items()}
    for long, short in zip(_call(OPTIONS[name], given), _call(OPTIONS[name], compact), strict=True):
        assert torch.equal(long[:, acts], short)


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_of_a_rollout_are_one_sequence(name: str) -> None:
    """Two turns in one row or each in a row of its own, in either order."""
    given = _episode(
        [0, 0, 1, 1], [1, 1, 1, 1], [0.5, 0, 0.25, 1], [0.1, 0.2, 0.3, 0.4], truncated=True
    )
    for order in ([0, 1], [1, 0]):
        split = {n: v.view(2, 2)[order] if v.dim() == 2 else v for n, v in given.items()} | {
            "rollout_ids": torch.tensor([0, 0])
        }
        for one, two in zip(_call(OPTIONS[name], given), _call(OPTIONS[name], split), strict=True):
            assert torch.equal(one.view(2, 2)[order], two)


@pytest.mark.parametrize("bootstrap", [False, True])
def test_turns_of_one_token_are_tokens(bootstrap: bool) -> None:
    given = _rows()
    given["step_ids"] = given["step_ids"] * 7 + torch.arange(7)
    numbers = {"gamma": 0.9, "lam": 0.8, "bootstrap_truncated": bootstrap}
    for token, turn in zip(
        _call(gae, given, **numbers), _call(turn_gae, given, **numbers), strict=True
    ):
        assert torch.equal(token, turn)


def test_a_turn_has_one_advantage_and_one_return() -> None:
    given = _rows()
    for got in _call(turn_gae, given):
        for rollout, step in itertools.product(range(6), range(3)):
            at = (
                given["response_mask"]
                & (given["rollout_ids"] == rollout).unsqueeze(1)
                & (given["step_ids"] == step)
            )
            assert got[at].unique().numel() == min(1, int(at.sum()))


# ----------------------------------------------------------------------------- what must not matter


@pytest.mark.parametrize("name", OPTIONS)
def test_padding_garbage_and_the_order_of_rows_change_no_bit(name: str) -> None:
    given = _rows()
    got = _call(OPTIONS[name], given)
    wide = {n: pad(v, (0, 4)) if v.dim() == 2 else v for n, v in given.items()}
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    mixed = {n: v if n == "truncated" else v[order] for n, v in given.items()}
    for garbage in (NAN, float("inf"), -1e300):
        dirty = {
            n: v.where(given["response_mask"], garbage) if v.is_floating_point() else v
            for n, v in given.items()
        }
        assert all(map(torch.equal, _call(OPTIONS[name], dirty), got))
    assert all(
        torch.equal(x, pad(y, (0, 4))) for x, y in zip(_call(OPTIONS[name], wide), got, strict=True)
    )
    assert all(
        torch.equal(x, y[order]) for x, y in zip(_call(OPTIONS[name], mixed), got, strict=True)
    )
    assert not any(x[~given["response_mask"]].any() for x in got)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_batch_without_a_trained_token_gives_zeros(name: str) -> None:
    given = _rows()
    for x in _call(OPTIONS[name], given | {"response_mask": torch.zeros(9, 7, dtype=torch.bool)}):
        assert x.shape == (9, 7) and not x.any()
    empty = {n: v[:0] if n != "truncated" else v for n, v in given.items()}
    assert all(x.shape == (0, 7) for x in _call(OPTIONS[name], empty))


@each("dtype", [torch.bfloat16, torch.float32, torch.float64])
@each("name", OPTIONS)
def test_dtype_is_that_of_the_token_rewards_and_nothing_carries_a_gradient(
    name: str, dtype: torch.dtype
) -> None:
    given = _rows()
    given = given | {
        "token_rewards": given["token_rewards"].to(dtype),
        "values": given["values"].float().requires_grad_(),
    }
    for x in _call(OPTIONS[name], given):
        assert x.dtype == dtype and x.isfinite().all() and not x.requires_grad


def test_more_rollouts_than_rows_are_no_matter() -> None:
    """The last rollout of a batch may have ended before its first reply."""
    given = _rows()
    more = given | {"truncated": torch.cat([given["truncated"], torch.tensor([True, True])])}
    for name, option in OPTIONS.items():
        assert all(map(torch.equal, _call(option, given), _call(option, more))), name


@each("value", [-0.1, 1.1, NAN])
@each(
    ("option", "name"),
    [(reward_to_go, "gamma"), *itertools.product((gae, turn_gae), ("gamma", "lam"))],
)
def test_hyperparameters_are_checked(option, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value}; allowed: "):
        _call(option, _rows(), **{name: value})


@each("value", [0.0, -1.0, NAN])
def test_alpha_is_checked(value: float) -> None:
    with pytest.raises(ValueError, match=f"alpha is {value}; allowed: "):
        _call(gae, _rows(), alpha=value)


@each(("length", "lam"), [(1, 0.0), (20, 0.0), (25, 0.2), (40, 0.5), (1000, 0.98)])
def test_adaptive_gae_by_hand(length: int, lam: float) -> None:
    """Without values and with a reward of 1 at the end, Â is λ^i from behind, which sums to α · l;
    and the return is 1."""
    given = _episode([0] * length, [1] * length, [0.0] * (length - 1) + [1.0], [0.0] * length)
    got = _call(gae, given, alpha=0.05)
    expected = [lam**i for i in reversed(range(length))]
    torch.testing.assert_close(
        got.advantages, torch.tensor([expected], dtype=torch.float64), rtol=1e-9, atol=1e-12
    )
    assert got.returns.tolist() == [[1.0] * length]
    if lam == 0.5:
        assert got.advantages.sum() == pytest.approx(0.05 * length)


def test_adaptive_gae_is_gae_with_a_lambda_for_each_rollout() -> None:
    """The same rollouts by `gae` with λ = 1 - 1/(αl): the policy's; with λ = 1: the critic's, which
    no value biases."""
    given = _rows()
    lengths = [int(given["response_mask"][given["rollout_ids"] == j].sum()) for j in range(6)]
    got = _call(gae, given, alpha=0.4)
    for j, n in enumerate(lengths):
        own = given["rollout_ids"] == j
        if n:
            torch.testing.assert_close(
                got.advantages[own],
                _call(gae, given, lam=max(0.0, 1 - 1 / (0.4 * n))).advantages[own],
                **CLOSE,
            )
    torch.testing.assert_close(got.returns, _call(gae, given, lam=1.0).returns, **CLOSE)


def _group(rewards: list[list[float]], **more) -> dict[str, Tensor]:
    """A group of rollouts with a turn of two tokens for each number; the number stands at the
    turn's last token."""
    width = 2 * max(map(len, rewards))
    rows = [[x for r in own for x in (0.0, r)] + [NAN] * (width - 2 * len(own)) for own in rewards]
    n = len(rewards)
    return {
        "token_rewards": torch.tensor(rows, dtype=torch.float64),
        "rewards": torch.tensor([sum(own) for own in rewards], dtype=torch.float64),
        "group_ids": torch.zeros(n, dtype=torch.int64),
        "rollout_ids": torch.arange(n),
        "step_ids": (torch.arange(width) // 2).expand(n, width),
        "response_mask": torch.tensor(
            [[t < 2 * len(own) for t in range(width)] for own in rewards]
        ),
    } | more


def test_turn_group_mean_by_hand() -> None:
    """Returns 3 2 | 2 0 | 1 of first and second turns, and 0 of the turn that the third does not
    have: means 2 and 2/3; with γ = 0 the rewards 1 2 | 2 0 | 1 themselves: 4/3 and 2/3."""
    given = _group([[1, 2], [2, 0], [1]])
    expected = torch.tensor([[3, 3, 4, 4], [0, 0, -2, -2], [-3, -3, 0, 0]], dtype=torch.float64) / 3
    torch.testing.assert_close(turn_group_mean(**given), expected, **CLOSE)
    expected = (
        torch.tensor([[-1, -1, 4, 4], [2, 2, -2, -2], [-1, -1, 0, 0]], dtype=torch.float64) / 3
    )
    torch.testing.assert_close(turn_group_mean(**given, gamma=0.0), expected, **CLOSE)
    lost = given["rewards"].where(
        torch.tensor([True, False, True]), NAN
    )  # the second cannot be scored: means 2 and 1
    assert turn_group_mean(**given | {"rewards": lost}).tolist() == [
        [1, 1, 1, 1],
        [0, 0, 0, 0],
        [-1, -1, 0, 0],
    ]
    with pytest.raises(ValueError, match=r"gamma is 1\.1; allowed: "):
        turn_group_mean(**given, gamma=1.1)


def test_turn_group_mean_is_the_group_mean_of_each_turn() -> None:
    """Of one turn it is `group_mean`, and with all rewards at the end too; turns of other groups,
    padding and tools are no matter."""
    one, end = _group([[1], [0], [4]]), _group([[0, 1], [0, 0], [0, 4]])
    expected = group_mean(one["rewards"], one["group_ids"])
    for given in (one, end):
        assert all(torch.equal(column, expected) for column in turn_group_mean(**given).T)
    groups = _group([[1, 0], [2, 5], [0, 3], [1, 1]], group_ids=torch.tensor([8, 2, 8, 2]))
    got = turn_group_mean(**groups)
    assert (got[[0, 2]].sum(0) == 0).all() and (got[[1, 3]].sum(0) == 0).all()
    wide = {n: pad(v, (0, 3)) if v.dim() == 2 else v for n, v in groups.items()}
    assert torch.equal(turn_group_mean(**wide), pad(got, (0, 3)))


def test_remax_by_hand() -> None:
    """Rewards 2 and 1 on two turns, greedy 1.5: returns 3 3 1 less 1.5. An unknown greedy reward
    gives no advantage."""
    given = _episode([0, 0, 0, 1], [1, 1, 0, 1], [0, 2, NAN, 1], [0] * 4)
    del given["values"], given["truncated"]
    assert remax(**given, greedy_rewards=torch.tensor([1.5])).tolist() == [[1.5, 1.5, 0.0, -0.5]]
    assert not remax(**given, greedy_rewards=torch.tensor([NAN])).any()


def test_remax_is_unbiased() -> None:
    """By enumeration of one token of three: Σ π (R - R_greedy) ∇log π is the gradient of the
    expected reward, whatever the baseline."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([[1.0], [0.0], [0.4]], dtype=torch.float64)
    place = (torch.arange(3), torch.zeros(3, 1).long(), torch.ones(3, 1).bool())
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad(
        (logprobs.exp() * rewards[:, 0]).sum(), logits, retain_graph=True
    )
    for greedy in (rewards[int(logits.argmax())], torch.tensor([7.0])):
        advantages = remax(rewards, greedy.expand(3), *place)[:, 0]
        (got,) = torch.autograd.grad(
            (logprobs.exp().detach() * advantages * logprobs).sum(), logits, retain_graph=True
        )
        torch.testing.assert_close(got, exact, **CLOSE)
