"""Engines and sessions from outside: what they give is looked at where it comes in, and the message
names it."""

from __future__ import annotations

import pytest

from rlkit.config.problems.rows import check_reward
from rlkit.engines import Batched, Cached
from rlkit.environments import single_turn
from rlkit.episodes import collect
from rlkit.errors import EngineError, EnvironmentFailed
from rlkit.rewards import Reward, Term, weighted_sum
from rlkit.types import Environment, Generation, Task

TASK = Task("t", ({"role": "user", "content": "2 + 2?"},), answer="4")
GOOD = Generation((5, 6), (-0.5, -0.1), "length")


def play(tiny, engine, **more):
    return collect(
        tiny, [TASK] * 3, engine=engine, environment=single_turn(), max_new_tokens=2, **more
    )


@pytest.mark.parametrize(
    "reply, said",
    [
        (None, "in place of a rlkit.types.Generation"),
        (GOOD._replace(token_ids=(), logprobs=()), "no token"),
        (GOOD._replace(logprobs=(-0.5,)), "1 log-probs for 2 tokens"),
        (GOOD._replace(logprobs=(-0.5, float("nan"))), "not finite"),
        (GOOD._replace(finish_reason="eos"), 'finish_reason="eos"'),
    ],
)
def test_a_completion_that_cannot_be_trained_on_is_refused(tiny, reply, said):
    with pytest.raises(EngineError, match=r"generation\.engine .*Batched.* gave") as raised:
        play(tiny, Batched(lambda policy, prompts, seeds, params: [reply] * len(prompts)))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "replies, said",
    [([GOOD] * 2, "2 completions for 3 prompts"), ([], "0 completions"), (None, "None for 3")],
)
def test_a_function_that_gives_another_number_of_completions_is_named(tiny, replies, said):
    def short(policy, prompts, seeds, params):
        return replies

    with pytest.raises(EngineError, match=f"short\\) gave {said}"):
        play(tiny, Batched(short))


def test_what_is_no_engine_is_told_how_to_become_one(tiny):
    with pytest.raises(EngineError, match=r"no `generate`.*rlkit\.engines\.Batched"):
        play(tiny, lambda policy, prompts, seeds, params: [])


def test_an_engine_may_be_plain_and_is_told_of_each_episodes_end_once(tiny):
    class Plain:
        busy_s = 0.0

        def __init__(self):
            self.loaded, self.released = [], []

        def load(self, weights, version):
            self.loaded.append(version)

        def generate(self, key, prompt_ids, seed, params):
            return GOOD

        def release(self, key):
            self.released.append(key)

    engine = Plain()
    play(tiny, engine, version=7)
    assert engine.loaded == [7] and len(engine.released) == len(set(engine.released)) == 3


@pytest.mark.parametrize("prompt", [None, [], [{"content": "no role"}], 7])
def test_a_first_prompt_that_is_none_is_blamed(tiny, prompt):
    with pytest.raises(
        EnvironmentFailed, match="first prompt raised TypeError: it must be messages"
    ):
        collect(
            tiny, [TASK], engine=Cached(), environment=Environment(first_prompt=lambda task: prompt)
        )


def test_a_reward_of_the_end_state_is_tried_on_the_state_at_the_start():
    """A gold answer in words has no session: the reward would raise, and no run could be trained on
    it."""

    class Shelf:
        tools = {}  # noqa: RUF012

        def first_prompt(self):
            return TASK.messages

        def answer(self, rollout):
            return rollout, None

        def state(self):
            return {"books": []}

    shelved = Reward(
        "shelved",
        {"shelved": Term(1.0, lambda rollout: float("4" in rollout.state["books"]))},
        weighted_sum,
    )
    check_reward([TASK], shelved, Environment(session=lambda task: Shelf()))
