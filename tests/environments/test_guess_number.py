"""The guessing game and the scripted dialogue: who says what, when it ends, and what it is
worth."""

from __future__ import annotations

import pytest

from rlkit.engines import Batched
from rlkit.environments import continue_with_step, dialogue, guess_number, said_done
from rlkit.environments._guess_number import read_last_guess
from rlkit.episodes import assemble, collect
from rlkit.episodes.evaluation import is_correct
from rlkit.errors import ConfigError, DataError
from rlkit.models import decode, encode_text
from rlkit.rewards import Reward, Term, few_turns, score, weighted_sum
from rlkit.tasks import guess_number as games
from rlkit.types import Generation, Rollout, Step, Task


def engine(policy, say):
    """An engine without a model: `say` gives the reply to the text of a context."""

    def complete(_, prompts, seeds, params):
        replies = [
            (
                *encode_text(policy.renderer, say(decode(policy.renderer, ids))),
                policy.eos_token_ids[0],
            )
            for ids in prompts
        ]
        return [Generation(tuple(ids), (0.0,) * len(ids), "stop") for ids in replies]

    return Batched(complete)


def game(number: int) -> Task:
    return games(max_samples=1)[0]._replace(answer=str(number))


@pytest.mark.parametrize("number", [1, 50, 73, 100])
def test_a_player_that_halves_finds_every_number_in_seven_guesses(tiny, number):
    guesses = []

    def say(context: str) -> str:
        hints = [w for w in context.replace("<|im_end|>", " ").split() if w in ("higher", "lower")]
        low, high = 1, 100
        for i, word in enumerate(hints[len(hints) - len(guesses) :]):
            low, high = (guesses[i] + 1, high) if word == "higher" else (low, guesses[i] - 1)
        guesses.append((low + high) // 2)
        return str(guesses[-1])

    (rollout,) = collect(tiny, [game(number)], engine=engine(tiny, say), environment=guess_number())
    assert (
        guesses[-1] == number
        and len(guesses) == len(rollout.steps) <= 7
        and rollout.status == "terminated"
    )
    assert few_turns(rollout) == pytest.approx(1 - (len(guesses) - 1) / 50)
    assert (
        len(assemble([rollout._replace(reward=1.0)], pad_token_id=0).ids) == 1
    )  # append-only: one training sequence
    said = [m["content"] for m in rollout.conversation if m["role"] == "user"][1:]
    assert said == ["higher" if g < number else "lower" for g in guesses[:-1]]


def test_a_game_without_the_right_guess_is_truncated_and_worth_nothing(tiny):
    (rollout,) = collect(
        tiny, [game(7)], engine=engine(tiny, lambda _: "9"), environment=guess_number(max_turns=5)
    )
    assert (rollout.status, rollout.truncation, len(rollout.steps)) == ("truncated", "steps", 5)
    assert few_turns(rollout) == 0


def test_a_reply_without_a_number_is_asked_for_one(tiny):
    (rollout,) = collect(
        tiny, [game(7)], engine=engine(tiny, lambda _: "hm"), environment=guess_number(max_turns=2)
    )
    assert rollout.steps[1].prompt == ({"role": "user", "content": "Say a whole number."},)


@pytest.mark.parametrize(
    "reply, guess",
    [
        *(("5,000", 5000), ("It is 42.0", 42), ("-42", -42), ("1,2,3", None), ("3-5", 5)),
        *(("42.", 42), ("42.5", None), ("none", None), ("7, then 1,234,567", 1234567)),
        ("The answer is 42, between 1 and 100.", 42),
    ],
)
def test_the_game_reads_the_number_that_the_reward_reads(reply, guess):
    step = Step((), (), (), (), "stop", content=reply)
    rollout = Rollout(game(guess or 7), (step,))
    assert read_last_guess(rollout) == guess
    assert few_turns(rollout) == float(guess is not None)


@pytest.mark.parametrize("turns, worth", [(1, 1.0), (2, 0.75), (4, 0.25), (9, 0.25)])
def test_the_sooner_the_better(turns, worth):
    steps = tuple(Step((), (), (), (), "stop", content="7") for _ in range(turns))
    assert few_turns(Rollout(game(7), steps), max_turns=4) == worth


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_number_comes_up_once_before_any_comes_up_again(split):
    """So that as many held-out games as there are numbers play every game that can be."""
    answers = [int(t.answer) for t in games(split=split, max_samples=30, low=5, high=16)]
    assert sorted(answers[:12]) == sorted(answers[12:24]) == list(range(5, 17))
    assert len(answers) == 30 and len(set(answers[24:])) == 6 and answers[:12] != answers[12:24]


def test_another_seed_or_split_is_another_order():
    assert [t.answer for t in games(max_samples=9)] != [
        t.answer for t in games(split="test", max_samples=9)
    ]
    assert (
        [t.answer for t in games(seed=1, max_samples=9)]
        == [t.answer for t in games(seed=1, max_samples=9)]
        != [t.answer for t in games(seed=2, max_samples=9)]
    )
    with pytest.raises(DataError, match=r"low=9, task\.high=9"):
        games(low=9, high=9)


@pytest.mark.parametrize(
    "turns, found, right", [(1, True, True), (50, True, True), (50, False, False)]
)
def test_a_found_number_is_right_however_late(turns, found, right):
    """Only the first guess earns 1: counting full marks alone would call a perfect player wrong."""
    steps = tuple(Step((), (), (), (), "stop", content="7") for _ in range(turns))
    (rollout,) = score(
        [Rollout(game(7 if found else 8), steps)],
        Reward("few_turns", {"few_turns": Term(1.0, few_turns)}, weighted_sum),
    )
    assert is_correct(rollout) is right


def test_a_dialogue_of_ten_lines(tiny):
    """The example functions: the user goes on until the policy says DONE."""
    replies = iter(["one", "two", "DONE"])
    env = dialogue(prompt_fn=continue_with_step, termination_fn=said_done)
    (rollout,) = collect(
        tiny, [game(7)], engine=engine(tiny, lambda _: next(replies)), environment=env
    )
    assert [s.prompt[-1]["content"] for s in rollout.steps[1:]] == [
        "Continue with step 1.",
        "Continue with step 2.",
    ]
    assert rollout.status == "terminated" and rollout.final_content == "DONE"


def test_a_prompt_fn_that_has_nothing_to_say_ends_the_dialogue(tiny):
    env = dialogue(prompt_fn=lambda rollout, step: None)
    (rollout,) = collect(tiny, [game(7)], engine=engine(tiny, lambda _: "x"), environment=env)
    assert (rollout.status, len(rollout.steps)) == ("terminated", 1)


def test_limits_and_tool_names_are_checked():
    with pytest.raises(ConfigError, match="max_turns is 0"):
        dialogue(prompt_fn=continue_with_step, max_turns=0)
    with pytest.raises(ConfigError, match=r"environment\.tools\.other"):
        dialogue(prompt_fn=continue_with_step, tools={"other": said_done})
