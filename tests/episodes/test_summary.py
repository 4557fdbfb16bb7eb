"""Episodes in numbers: every metric by hand, and the same keys whatever happened."""

from __future__ import annotations

import math

import pytest

from parametrise import each
from rlkit.episodes import summarize
from rlkit.episodes.summary import group_rewards
from rlkit.types import Rollout, Step, Task, ToolCall, ToolResult

TASK = Task("row/0", ())
GOOD, BAD = (
    ToolCall("call_0", "calculator", {}),
    ToolCall("call_1", "", {}, "Error: not a tool call"),
)


def step(
    length: int,
    content: str = "",
    thinking: str = "",
    calls=(),
    failed: int = 0,
    closed: bool = True,
    end: str = "stop",
) -> Step:
    results = tuple(ToolResult(c.id, c.name, "x", ok=i >= failed) for i, c in enumerate(calls))
    return Step(
        (),
        (1,),
        (7,) * length,
        (-1.0,) * length,
        "tool" if calls else end,
        thinking,
        content,
        closed,
        tuple(calls),
        results,
    )


def rollout(
    *steps: Step,
    group: int,
    reward: float | None,
    truncation: str = "",
    accuracy: float | None = None,
) -> Rollout:
    status = "truncated" if truncation else "terminated"
    statuses = {
        "numeric": {1.0: "ok", 0.0: "wrong", None: "unparseable"}[accuracy],
        "shadow": "timeout" if truncation else "error",
    }
    rewards = {"numeric": accuracy, "shadow": None}
    return Rollout(
        TASK, steps, status, truncation, group, reward=reward, rewards=rewards, statuses=statuses
    )


# group 0: 1 and 0, mixed; group 1: 1 and unscored, all good; group 2: 0 and 0, all bad; group 3:
# nobody scored
ROLLOUTS = [
    rollout(step(4, calls=[GOOD]), step(2, "#### 7"), group=0, reward=1.0, accuracy=1.0),
    rollout(
        step(10, "half a", thinking="hm", end="length"),
        group=0,
        reward=0.0,
        truncation="length",
        accuracy=0.0,
    ),
    rollout(step(3, "#### 7", thinking="hm"), group=1, reward=1.0, accuracy=1.0),
    rollout(group=1, reward=None, truncation="context"),
    rollout(
        step(5, calls=[GOOD, BAD], failed=2),
        step(5, calls=[BAD], failed=1)._replace(dropped=1),
        group=2,
        reward=0.0,
        truncation="steps",
        accuracy=0.0,
    ),
    rollout(step(1), group=2, reward=0.0, accuracy=0.0),
    rollout(step(2, thinking="hm", closed=False, end="budget"), group=3, reward=None),
    rollout(step(8, "let me see", calls=[GOOD]), group=3, reward=None, truncation="steps"),
]
BY_HAND = {
    "reward/mean": 2 / 5,  # 1, 0, 1, 0, 0
    "reward/std": math.sqrt(2 / 5 * 3 / 5),
    "reward/unscored_frac": 3 / 8,
    "reward/numeric/mean": 2 / 5,
    "reward/numeric/std": math.sqrt(2 / 5 * 3 / 5),
    "reward/numeric/variance_share": 1.0,  # it is the reward
    "reward/numeric/ok_frac": 2 / 8,
    "reward/numeric/wrong_frac": 3 / 8,
    "reward/numeric/unparseable_frac": 3 / 8,
    "reward/numeric/timeout_frac": 0.0,
    "reward/numeric/error_frac": 0.0,
    "reward/shadow/ok_frac": 0.0,
    "reward/shadow/wrong_frac": 0.0,
    "reward/shadow/unparseable_frac": 0.0,
    "reward/shadow/timeout_frac": 4 / 8,  # the truncated ones
    "reward/shadow/error_frac": 4 / 8,
    "group/frac_zero_std": 2 / 3,  # of the three prompts with a score
    "group/frac_all_good": 1 / 3,
    "group/frac_all_bad": 1 / 3,
    "group/frac_mixed": 1 / 3,
    "len/mean": 40 / 8,  # 6, 10, 3, 0, 10, 1, 2, 8
    "len/min": 0,
    "len/max": 10,
    "len/terminated_mean": (6 + 3 + 1 + 2) / 4,
    "len/solved_mean": (6 + 3) / 2,
    "len/unsolved_mean": (10 + 10 + 1) / 3,
    "len/truncated_frac": 4 / 8,
    "stop_reason/stop": 4 / 8,
    "stop_reason/length": 1 / 8,
    "stop_reason/context": 1 / 8,
    "stop_reason/steps": 2 / 8,
    "finish_reason/stop": 3 / 9,  # of the nine replies
    "finish_reason/tool": 4 / 9,
    "finish_reason/budget": 1 / 9,
    "finish_reason/length": 1 / 9,
    "dropped_frac": 1 / 8,
    "stop_reason/environment": 0.0,
    "stop_reason/error": 0.0,
    "stop_reason/deadline": 0.0,
    "len/loop_frac": 0.0,
    "think_closed_frac": 7 / 8,
    "answer_found_frac": 3 / 8,  # the first three; the last speaks but still calls
    "parse_fail_frac": 1 / 8,
    "tools/calls": (1 + 3 + 1) / 8,
    "tools/failures": 3 / 8,
    "tools/turns": (2 + 1 + 1 + 0 + 2 + 1 + 1 + 1) / 8,
    "rollout/empty_frac": (
        2 / 8
    ),  # the one without steps, and the one whose single token says nothing
}


@each("key", BY_HAND)
def test_by_hand(key):
    assert summarize(ROLLOUTS)[key] == pytest.approx(
        BY_HAND[key], abs=1e-12
    )  # sums of eight small numbers


def test_every_key_is_computed_by_hand_above():
    """A new metric needs a worked number; those left over are what cannot be computed."""
    rest = {k: v for k, v in summarize(ROLLOUTS).items() if k not in BY_HAND}
    assert set(rest) == {
        f"reward/shadow/{name}" for name in ("mean", "std", "variance_share")
    } and all(map(math.isnan, rest.values()))


@pytest.mark.parametrize("chosen", [slice(0, 1), slice(3, 4), slice(6, 8)])
def test_the_keys_never_depend_on_what_happened(chosen):
    """CSV and TensorBoard need the same columns in every step; what has no value is nan."""
    assert list(summarize(ROLLOUTS[chosen])) == list(summarize(ROLLOUTS))


def test_nothing_scored_is_nan_not_zero():
    row = summarize(ROLLOUTS[6:])
    assert (
        math.isnan(row["reward/mean"])
        and math.isnan(row["reward/std"])
        and row["reward/unscored_frac"] == 1
    )
    assert math.isnan(row["len/solved_mean"]) and row["group/frac_zero_std"] == 0


def test_the_ways_to_end_add_up():
    row = summarize(ROLLOUTS)
    assert sum(v for k, v in row.items() if k.startswith("stop_reason/")) == 1
    assert row["group/frac_mixed"] + row["group/frac_zero_std"] == pytest.approx(
        1, abs=1e-12
    )  # thirds in floating point


def test_groups_leave_out_what_has_no_score():
    assert group_rewards(ROLLOUTS) == {0: [1.0, 0.0], 1: [1.0], 2: [0.0, 0.0]}


def scored(
    group: int, a: float, b: float, reward: float, step_reward: float | None = None
) -> Rollout:
    one = step(1)._replace(reward=step_reward)
    return Rollout(TASK, (one,), group=group, reward=reward, rewards={"a": a, "b": b})


def test_shares_of_the_advantages_variance_by_hand():
    """reward = a + 2 b, independent in the group: variances 1/4 and 4/4, so shares 1/5 and 4/5.
    Levels of groups do not count."""
    rollouts = [
        scored(g, a, b, a + 2 * b + 100 * g) for g in (0, 1) for a in (0.0, 1.0) for b in (0.0, 1.0)
    ]
    found = summarize(rollouts)
    assert (found["reward/a/variance_share"], found["reward/b/variance_share"]) == pytest.approx(
        (0.2, 0.8)
    )
    constant = summarize([scored(0, 0.1, b, 0.1 + b) for b in (0.0, 1.0, 1.0)])
    assert math.isnan(constant["reward/a/variance_share"]) and constant[
        "reward/b/variance_share"
    ] == pytest.approx(1)


def test_rewards_of_steps_are_part_of_the_reward():
    """What the advantage sees is what is logged: else a run on rewards of steps alone reads as one
    where all rewards are equal."""
    found = summarize(
        [scored(0, 0, 0, 0.0, step_reward=1.0), scored(0, 0, 0, 0.0, step_reward=-1.0)]
    )
    assert (found["reward/mean"], found["reward/std"], found["group/frac_zero_std"]) == (
        0.0,
        1.0,
        0.0,
    )
