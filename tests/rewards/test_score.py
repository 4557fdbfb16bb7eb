"""Scoring a batch: components by name, shadow terms, None, errors that name their place, and
rewards chosen by row."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from itertools import combinations, zip_longest

import pytest

from rlkit.episodes import assemble
from rlkit.errors import ConfigError
from rlkit.rewards import (
    Reward,
    RewardError,
    Term,
    Verdict,
    batched,
    by_task,
    environment,
    exact_match,
    numeric,
    score,
    weighted_sum,
)
from rlkit.types import Rollout, Step, Task

ROLLOUTS = [Rollout(Task(f"t/{i}", (), reward=name), ()) for i, name in enumerate(["a", "b"])]


def index(rollout: Rollout) -> float:
    return float(rollout.task.id[-1])


def reward(**terms: Term) -> Reward:
    return Reward("test", terms, weighted_sum)


def test_reward_is_the_weighted_sum_of_its_terms_and_shadow_terms_are_only_logged():
    scored = score(
        ROLLOUTS,
        reward(
            one=Term(0.5, lambda r: 1.0), index=Term(-2.0, index), shadow=Term(0.0, lambda r: 9.0)
        ),
    )
    assert [r.reward for r in scored] == [0.5, -1.5]  # 0.5 * 1 - 2 * 0 and 0.5 * 1 - 2 * 1
    assert scored[1].rewards == {"one": 1.0, "index": 1.0, "shadow": 9.0}
    assert ROLLOUTS[0].reward is None and ROLLOUTS[0].rewards == {}


def test_none_of_a_weighted_term_makes_the_reward_none_and_of_a_shadow_term_does_not():
    assert (
        score(ROLLOUTS, reward(one=Term(1.0, lambda r: 1.0), none=Term(0.0, lambda r: None)))[
            0
        ].reward
        == 1.0
    )
    scored = score(ROLLOUTS, reward(one=Term(1.0, lambda r: 1.0), none=Term(1.0, lambda r: None)))
    assert scored[0].reward is None and scored[0].rewards == {"one": 1.0, "none": None}


def centred(rollouts: list[Rollout], *, scale: float = 1.0) -> list[float]:
    mean = sum(map(index, rollouts)) / len(rollouts)
    return [scale * (index(r) - mean) for r in rollouts]


@batched
def marked(rollouts: list[Rollout]) -> list[float]:
    return centred(rollouts)


@pytest.mark.parametrize(
    "term",
    [
        Term(1.0, centred, batched=True),
        Term(1.0, batched(partial(centred))),
        Term(1.0, partial(marked)),
    ],
)
def test_a_batched_term_sees_all_rollouts_at_once(term):
    assert [r.reward for r in score(ROLLOUTS, reward(centred=term))] == [-0.5, 0.5]


def boom(rollout: Rollout) -> float:
    raise KeyError("answer")


def test_a_reward_that_raises_names_the_term_and_the_task():
    with pytest.raises(RewardError, match=r"'bad'.*'t/0'.*KeyError.*answer") as caught:
        score(ROLLOUTS, reward(good=Term(1.0, index), bad=Term(0.0, boom)))
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", [1.0], object(), 1j])
def test_a_value_that_is_no_reward_is_an_error_and_not_zero(value):
    with pytest.raises(RewardError, match=r"'odd'.*'t/0'"):
        score(ROLLOUTS, reward(odd=Term(1.0, lambda r: value)))


@pytest.mark.parametrize("values", [[1.0], 1.0, None, "ab", [1.0, 2.0, 3.0]])
def test_a_batched_reward_gives_one_score_for_each_rollout(values):
    with pytest.raises(RewardError, match="batched"):
        score(ROLLOUTS, reward(odd=Term(1.0, lambda rollouts: values, batched=True)))


def test_an_aggregate_that_is_not_finite_is_an_error():
    with pytest.raises(RewardError, match="aggregator"):
        score(ROLLOUTS, reward(big=Term(1e308, lambda r: 1e3)))


@pytest.mark.parametrize("paid", [1e16, -1e308, float("nan")])
def test_rewards_that_float32_cannot_be_trained_on_are_refused(paid):
    """Finite rewards of ±1e308 became infinite advantages, or an overflow in their mean."""
    with pytest.raises(RewardError, match=r"term 'big' returned no reward.*1e\+15"):
        score(ROLLOUTS, reward(big=Term(1.0, lambda r: paid)))
    step = Step((), (1,), (2,), (-1.0,), "stop", reward=paid)
    with pytest.raises(RewardError, match=r"the rewards of an episode .* add up to"):
        score([Rollout(Task("t/0", ()), (step,))], reward(one=Term(1.0, lambda r: 1.0)))


def test_true_and_false_are_one_and_zero():
    assert score(ROLLOUTS, reward(yes=Term(1.0, lambda r: True)))[0].reward == 1.0


def test_all_weights_zero_is_refused():
    with pytest.raises(ConfigError, match="weight"):
        score(ROLLOUTS, reward(shadow=Term(0.0, index)))


def test_no_rollouts_give_no_rollouts():
    assert (
        score(
            [], reward(index=Term(1.0, index), centred=Term(1.0, lambda rollouts: [], batched=True))
        )
        == []
    )


def test_by_task_scores_each_row_with_its_own_reward():
    fn = partial(by_task, rewards={"a": lambda r: 1.0, "b": lambda r: None})
    assert [r.reward for r in score(ROLLOUTS, reward(by_task=Term(1.0, fn)))] == [1.0, None]


def test_by_task_names_the_row_and_the_known_rewards():
    fn = partial(by_task, rewards={"numeric": numeric, "exact_match": exact_match})
    with pytest.raises(ConfigError, match=r"'t/0'.*'a'.*exact_match, numeric"):
        score(ROLLOUTS, reward(by_task=Term(1.0, fn)))


def test_by_task_gives_a_batched_reward_all_rows_that_name_it():
    rows = [*ROLLOUTS, Rollout(Task("t/4", (), reward="a"), ())]
    fn = partial(by_task, rewards={"a": batched(partial(centred, scale=2.0)), "b": index})
    assert [r.reward for r in score(rows, reward(by_task=Term(1.0, fn)))] == [
        -4.0,
        1.0,
        4.0,
    ]  # mean of 0 and 4 is 2


# ---------------------------------------------------------------------------- how scores come about

FOUR = [Rollout(Task(f"t/{i}", ()), ()) for i in range(4)]


def lenient(rate: float = 0.5, **terms: Term) -> Reward:
    return Reward("test", terms, weighted_sum, max_error_rate=rate)


def patchy(rollout: Rollout) -> float | str:
    """ok, wrong, error by raising, error by shape."""
    i = int(index(rollout))
    return boom(rollout) if i == 2 else "no number" if i == 3 else 1.0 - i


def test_every_score_has_a_status_and_failures_are_none_and_never_zero():
    scored = score(FOUR, lenient(odd=Term(1.0, patchy)))
    assert [r.statuses["odd"] for r in scored] == ["ok", "wrong", "error", "error"]
    assert [r.reward for r in scored] == [1.0, 0.0, None, None]


def test_none_is_unparseable_and_a_verdict_says_its_own_status():
    scored = score(
        FOUR[:1],
        reward(none=Term(1.0, lambda r: None), late=Term(1.0, lambda r: Verdict(-1.0, "timeout"))),
    )
    assert scored[0].statuses == {"none": "unparseable", "late": "timeout"} and scored[
        0
    ].rewards == {"none": None, "late": -1.0}
    assert type(scored[0].rewards["late"]) is float


def test_above_the_error_rate_scoring_stops_with_the_rollout():
    seen = []
    with pytest.raises(
        RewardError, match=r"'odd'.*'t/3'.*2 of 4 rollouts failed, more than max_error_rate=0.25"
    ) as caught:
        score(FOUR, lenient(0.25, odd=Term(1.0, lambda r: seen.append(r) or patchy(r))))
    assert caught.value.rollout is FOUR[3]
    with pytest.raises(RewardError) as caught:
        score(FOUR, lenient(0.0, odd=Term(1.0, patchy)))
    assert caught.value.rollout is FOUR[2]


def test_a_rate_of_failures_that_is_allowed_is_no_failure():
    """29 of 100 are 0.29, and 0.29 · 100 is 28.999…"""
    rollouts = [Rollout(Task(str(i), ()), ()) for i in range(100)]
    patchy = Term(1.0, lambda r: boom(r) if int(r.task.id) < 29 else 1.0)
    scored = score(rollouts, lenient(0.29, odd=patchy))
    assert [r.reward for r in scored] == [None] * 29 + [1.0] * 71


def test_a_failed_episode_is_shown_to_no_term_and_has_no_component():
    """It counted as a wrong answer in the group's baseline of `gdpo`."""
    failed = FOUR[1]._replace(truncation="error", status="truncated")
    terms = {
        "right": Term(1.0, lambda r: r.state["x"] if r.truncation else 1.0),
        "all": Term(0.0, batched(lambda rollouts: [float(len(rollouts))] * len(rollouts))),
    }
    scored = score([FOUR[0], failed, FOUR[2]], reward(**terms))
    assert [r.rewards["right"] for r in scored] == [1.0, None, 1.0]
    assert [r.rewards["all"] for r in scored] == [2.0, None, 2.0]
    assert scored[1].reward is None and scored[1].statuses == {"right": "error", "all": "error"}


@pytest.mark.parametrize("rate", [-0.1, 1.1])
def test_an_error_rate_is_a_share(rate):
    with pytest.raises(ConfigError, match="max_error_rate"):
        score(FOUR, lenient(rate, one=Term(1.0, index)))


def test_a_refusal_passes_whatever_the_error_rate():
    def refusing(rollout):
        raise ConfigError("install it")

    for fn in (refusing, asynchronous(refusing)):
        for timeout in (None, 5.0):
            with pytest.raises(ConfigError, match="install it"):
                score(FOUR, lenient(1.0, odd=Term(1.0, fn, timeout=timeout)))


def test_metrics_of_an_earlier_scoring_are_replaced():
    term = Term(1.0, lambda r: (1.0, {"words": 3}))
    measured = Reward("test", {"one": term}, lambda scores, weights: (1.0, {"mean": 2}))
    (once,) = score(FOUR[:1], measured)
    assert once.metrics == {"reward/one/words": 3.0, "aggregator/mean": 2.0}
    (again,) = score([once], reward(one=Term(1.0, index)))
    assert again.metrics == {}


# ----------------------------------------------------------------------------------------- timeouts


def sleepy(rollout: Rollout) -> float:
    if index(rollout) == 1:
        time.sleep(2)
    return 1.0


def asynchronous(fn):
    async def run(rollout):
        return fn(rollout)

    return run


async def waiting(rollout: Rollout) -> float:
    await asyncio.sleep(60 if index(rollout) == 1 else 0)
    return 1.0


@pytest.mark.slow
@pytest.mark.parametrize("fn", [sleepy, waiting])
def test_a_reward_that_hangs_is_given_up(fn):
    start = time.perf_counter()
    scored = score(FOUR, lenient(slow=Term(1.0, fn, timeout=0.2)))
    assert time.perf_counter() - start < 1.5
    assert [r.statuses["slow"] for r in scored] == ["ok", "timeout", "ok", "ok"] and scored[
        1
    ].reward is None
    with pytest.raises(RewardError, match=r"'slow'.*'t/1': nothing within 0.2 s"):
        score(FOUR, reward(slow=Term(1.0, fn, timeout=0.2)))


def test_a_batched_reward_that_hangs_has_no_score_at_all():
    scored = score(
        FOUR,
        lenient(
            1.0,
            slow=Term(1.0, lambda rollouts: list(map(sleepy, rollouts)), batched=True, timeout=0.2),
        ),
    )
    assert {r.statuses["slow"] for r in scored} == {"timeout"} and all(
        r.reward is None for r in scored
    )


@pytest.mark.parametrize("timeout", [0.0, -1.0])
def test_a_timeout_is_positive(timeout):
    with pytest.raises(ConfigError, match="timeout"):
        score(FOUR, reward(one=Term(1.0, index, timeout=timeout)))


# -------------------------------------------------------------------------------------------- async


@pytest.mark.slow
def test_async_rewards_are_in_flight_together_and_keep_their_order():
    most = running = 0

    async def slow(rollout):
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05 * (4 - index(rollout)))
        running -= 1
        return index(rollout)

    for fn in (slow, partial(slow), lambda r: slow(r)):
        most = 0
        assert [r.reward for r in score(FOUR, reward(slow=Term(1.0, fn)))] == [
            0.0,
            1.0,
            2.0,
            3.0,
        ] and most == 4


def test_async_errors_are_those_of_their_rollout():
    scored = score(FOUR, lenient(odd=Term(1.0, asynchronous(patchy))))
    assert [r.statuses["odd"] for r in scored] == ["ok", "wrong", "error", "error"]


def test_an_async_batched_reward_and_one_chosen_by_row():
    async def all_at_once(rollouts):
        return [index(r) for r in rollouts]

    fn = partial(by_task, rewards={"a": asynchronous(index), "b": lambda r: -1.0})
    scored = score(ROLLOUTS, reward(many=Term(1.0, all_at_once, batched=True), row=Term(1.0, fn)))
    assert [r.rewards for r in scored] == [{"many": 0.0, "row": 0.0}, {"many": 1.0, "row": -1.0}]


def test_async_rewards_work_inside_a_running_loop():
    """As in a notebook."""

    async def cell():
        return score(FOUR, reward(slow=Term(1.0, asynchronous(index))))

    assert [r.reward for r in asyncio.run(cell())] == [0.0, 1.0, 2.0, 3.0]


# --------------------------------------------------------------------------------- rewards of steps


def episode(count: int) -> Rollout:
    steps = [Step((), (10 * i,), (10 * i + 1,), (-1.0,), "stop") for i in range(count)]
    return Rollout(Task("t/0", ()), tuple(steps))


def test_rewards_of_steps_go_to_their_steps_beside_the_outcome():
    terms = {
        "outcome": Term(1.0, lambda r: 5.0),
        "steps": Term(0.5, lambda r: [1.0, None, 3], per_step=True),
        "cost": Term(-1.0, lambda r: [0.1] * len(r.steps), per_step=True),
        "shadow": Term(0.0, lambda r: [9.0] * len(r.steps), per_step=True),
    }
    (scored,) = score([episode(3)], reward(**terms))
    assert [s.reward for s in scored.steps] == pytest.approx([0.4, -0.1, 1.4])
    assert scored.reward == 5.0 and scored.total_reward == pytest.approx(6.7)
    assert scored.rewards == pytest.approx(
        {"outcome": 5.0, "steps": 4.0, "cost": 0.3, "shadow": 27.0}
    )
    batch = assemble([scored], pad_token_id=0)
    assert batch.token_rewards[batch.response_mask].tolist() == pytest.approx([0.4, -0.1, 6.4])
    assert batch.rewards.tolist() == pytest.approx([6.7])


def test_rewards_of_steps_alone_have_an_outcome_of_zero():
    scored = score(
        [episode(2), episode(0)],
        reward(steps=Term(1.0, lambda r: [1.0] * len(r.steps), per_step=True)),
    )
    assert [(r.reward, r.total_reward) for r in scored] == [(0.0, 2.0), (0.0, 0.0)]


def test_a_shadow_term_of_steps_leaves_the_steps_alone():
    terms = {
        "one": Term(1.0, lambda r: 1.0),
        "shadow": Term(0.0, lambda r: [9.0] * len(r.steps), per_step=True),
    }
    (scored,) = score([episode(2)], reward(**terms))
    assert [s.reward for s in scored.steps] == [None, None] and scored.rewards["shadow"] == 18.0


def test_rewards_of_steps_may_be_missing_for_the_whole_rollout():
    (scored,) = score([episode(2)], reward(steps=Term(1.0, lambda r: None, per_step=True)))
    assert (
        scored.reward is None
        and scored.total_reward is None
        and [s.reward for s in scored.steps] == [None, None]
    )


@pytest.mark.parametrize("value", [1.0, [1.0], [1.0, float("nan")], "ab", [1.0, "b"]])
def test_rewards_of_steps_have_one_entry_a_step(value):
    with pytest.raises(RewardError, match=r"'steps'.*'t/0'"):
        score([episode(2)], reward(steps=Term(1.0, lambda r: value, per_step=True)))


def test_a_batched_term_may_be_one_of_steps():
    term = Term(
        1.0, lambda rollouts: [[1.0] * len(r.steps) for r in rollouts], batched=True, per_step=True
    )
    assert [s.reward for s in score([episode(2)], reward(steps=term))[0].steps] == [1.0, 1.0]


PAID = {
    "none": (),
    "one": (None, 2.0),
    "all": (0.25, 2.0),
}  # what the environment paid at the two steps of an episode
TERMS = {
    "steps": Term(0.5, lambda r: [1.0, 3.0], per_step=True),
    "outcome": Term(2.0, lambda r: 5.0),
    "environment": Term(1.0, environment),
    "shadow": Term(0.0, lambda r: [9.0, 9.0], per_step=True),
}


@pytest.mark.parametrize("paid", PAID)
@pytest.mark.parametrize(
    "names",
    [c for n in range(1, 5) for c in combinations(TERMS, n) if c != ("shadow",)],
    ids="+".join,
)
def test_an_episode_earns_what_the_environment_paid_and_its_terms_add_however_often_scored(
    paid, names
):
    """total = Σ paid + Σ weight · term over all terms but `environment`, whose component is Σ paid;
    scored once, twice, or after another reward. Terms of steps took the place of what was paid."""
    played = episode(2)
    played = played._replace(
        steps=tuple(s._replace(reward=p) for s, p in zip_longest(played.steps, PAID[paid]))
    )
    rewarded, amount = (
        reward(**{name: TERMS[name] for name in names}),
        sum(p or 0.0 for p in PAID[paid]),
    )
    (once,) = score([played], rewarded)
    assert once.total_reward == pytest.approx(
        amount + 2.0 * ("steps" in names) + 10.0 * ("outcome" in names)
    )
    assert once.rewards.get("environment", amount) == pytest.approx(amount)
    assert score([once], rewarded) == [once]
    assert score(
        score([played], reward(other=Term(7.0, lambda r: [1.0, 1.0], per_step=True))), rewarded
    ) == [once]
