"""Games of two players: whose turn it is, whose reward, and what ends a game for both."""

from __future__ import annotations

import asyncio

import pytest

from rlkit.engines import Batched
from rlkit.episodes import _collect, collect
from rlkit.episodes.episode import read_opening
from rlkit.errors import ConfigError
from rlkit.extras.programs import two_players
from rlkit.models import decode
from rlkit.models.chat import encode_scaffold
from rlkit.types import Generation, Task

TASKS = [Task(f"t/{i}", (), metadata={"seed": i}) for i in range(2)]


class Higher:
    """Each says a number, twice; player 0 wins a point for each number that is larger than the
    answer to it."""

    open = 0

    def reset(self, *, seed=None):
        self.said, self.closed = [], False
        Higher.open += 1
        return "begin", {}

    def step(self, action):
        if action == "break":
            raise RuntimeError("the board fell")
        self.said.append(int(action))
        pair = self.said[-2:] if len(self.said) % 2 == 0 else [0, 0]
        won = (pair[0] > pair[1]) - (pair[0] < pair[1])
        return f"heard {action}", (won, -won), len(self.said) == 4, False, {}

    def close(self):
        Higher.open -= 1


class Asking(Higher):
    """The same with a game that waits for something outside, and in which player 1 begins."""

    player = 1

    async def step(self, action):
        await asyncio.sleep(0)
        self.player = 1 - self.player
        return super().step(action)


class Counted(Batched):
    """An engine that says `say(context, seed)`, and notes the keys in play."""

    def __init__(self, say):
        def complete(policy, prompts, seeds, params):
            said = [
                say(decode(policy.renderer, context), seed)
                for context, seed in zip(prompts, seeds, strict=True)
            ]
            ids = [tuple(encode_scaffold(policy.renderer, text + "<|im_end|>")) for text in said]
            return [Generation(i, (0.0,) * len(i), "stop") for i in ids]

        super().__init__(complete)
        self.keys, self.released = set(), []

    async def generate(self, key, prompt_ids, seed, params):
        self.keys.add(key)
        return await super().generate(key, prompt_ids, seed, params)

    def release(self, key):
        self.released.append(key)
        super().release(key)


def by_turn(context, seed):
    """Player 0 says 5 and 1, player 1 answers 3 and 3."""
    return (
        "3"
        if "heard" in context.partition("<|im_start|>assistant")[0]
        else "1"
        if "heard" in context
        else "5"
    )


def said(rollout):
    return [step.content for step in rollout.steps]


@pytest.fixture(autouse=True)
def closed():
    yield
    assert Higher.open == 0


@pytest.mark.parametrize("admission", ["rounds", "barrier", "free"])
def test_two_samples_of_a_task_play_each_other_and_each_has_its_rollout(tiny, admission):
    engine = Counted(by_turn)
    rollouts = collect(
        tiny, TASKS, two_players(make=Higher), engine=engine, group_size=4, admission=admission
    )
    assert [(r.group, r.sample, r.player) for r in rollouts] == [
        (g, s, s % 2) for g in (0, 1) for s in range(4)
    ]
    for first, second in zip(rollouts[::2], rollouts[1::2], strict=True):
        assert (said(first), said(second)) == (["5", "1"], ["3", "3"])
        assert [s.reward for s in first.steps] == [1, -1] and [s.reward for s in second.steps] == [
            -1,
            1,
        ]
        assert (
            first.steps[0].prompt[-1]["content"] == "begin"
            and second.steps[0].prompt[-1]["content"] == "heard 5"
        )
        assert first.status == second.status == "terminated"
    assert len(engine.keys) == 4 and sorted(engine.released) == sorted(
        engine.keys
    )  # one cache a game, released once


def test_a_game_may_wait_and_say_whose_turn_it_is(tiny):
    rollouts = collect(
        tiny, TASKS[:1], two_players(make=Asking), engine=Counted(by_turn), group_size=2
    )
    assert [said(r) for r in rollouts] == [["3", "3"], ["5", "1"]]


def test_a_sample_that_is_left_over_plays_against_the_policy_on_both_sides(tiny):
    engine = Counted(by_turn)
    rollouts = collect(tiny, TASKS, two_players(make=Higher), engine=engine, group_size=1)
    assert [(r.player, said(r)) for r in rollouts] == [(0, ["5", "1"]), (1, ["3", "3"])]
    assert len(engine.keys) == 2 and sorted(engine.released) == sorted(engine.keys)


def test_against_another_model_each_sample_has_a_game_and_the_opponent_draws_for_itself(
    tiny, monkeypatch
):
    seeds, engine = (
        {"policy": set(), "opponent": set()},
        Counted(lambda context, seed: (seeds["policy"].add(seed), "9")[1]),
    )
    rival = Counted(lambda context, seed: (seeds["opponent"].add(seed), "3")[1])
    monkeypatch.setattr(_collect, "_load_player", lambda path, device: (tiny, rival))
    rollouts = collect(
        tiny, TASKS, two_players(make=Higher, opponent="other"), engine=engine, group_size=3
    )
    assert [r.player for r in rollouts] == [0, 1, 0, 1, 0, 1]
    assert all(said(r) == ["9", "9"] and sum(s.reward for s in r.steps) == 2 for r in rollouts)
    assert not seeds["policy"] & seeds["opponent"]
    assert len(engine.released) == len(rival.released) == 6


def test_a_game_that_breaks_ends_for_both_and_the_others_go_on(tiny):
    def say(context, seed):
        return "break" if "heard 5" in context and seed % 2 else by_turn(context, seed)

    rollouts = collect(tiny, TASKS, two_players(make=Higher), engine=Counted(say), group_size=8)
    pairs = [
        (a.truncation, b.truncation) for a, b in zip(rollouts[::2], rollouts[1::2], strict=True)
    ]
    assert set(pairs) == {("error", "error"), ("", "")}
    broken = next(r for r in rollouts if r.truncation)
    assert "step('break') raised RuntimeError: the board fell" in broken.error


def test_a_player_who_is_cut_off_ends_the_game_for_the_other(tiny):
    """By length in the first reply: the other has no turn. By the limit of turns: the other keeps
    what it has."""
    first, second = collect(
        tiny, TASKS[:1], two_players(make=Higher), group_size=2, max_new_tokens=1
    )
    assert (first.truncation, len(first.steps), second.truncation, len(second.steps)) == (
        "length",
        1,
        "environment",
        0,
    )
    first, second = collect(
        tiny,
        TASKS[:1],
        two_players(make=Higher, max_turns=1),
        engine=Counted(by_turn),
        group_size=2,
    )
    assert (first.truncation, second.truncation) == ("steps", "environment") and [
        s.reward for s in first.steps
    ] == [1]


def test_a_game_that_cannot_begin_is_refused():
    class Bad(Higher):
        def reset(self, *, seed=None):
            super().reset()
            raise OSError("no board")

    with pytest.raises(ConfigError, match=r"environment\.make: the game cannot be made.*no board"):
        read_opening(TASKS[0], two_players(make=Bad))
