"""environment=gymnasium environment.id=NAME: games that a policy can read and answer, or a refusal
before the model is loaded."""

from __future__ import annotations

from functools import partial

import pytest

from environments.test_gymnasium import replies
from rlkit.config.compose import compose
from rlkit.config.schema import build
from rlkit.environments import gymnasium
from rlkit.episodes import collect
from rlkit.errors import ConfigError
from rlkit.extras.programs import named_game
from rlkit.extras.programs._named_games import read_action
from rlkit.tasks import episodes

gym = pytest.importorskip("gymnasium")
NAMES = {
    "FrozenLake-v1": ("left", "down", "right", "up"),
    "FrozenLake8x8-v1": ("left", "down", "right", "up"),
    "CliffWalking-v1": ("up", "right", "down", "left"),
    "Taxi-v4": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack-v1": ("stick", "hit"),
}


def play(tiny, id, *said, **settings):
    environment = gymnasium(make=partial(named_game, **settings), id=id, max_turns=len(said))
    (rollout,) = collect(
        tiny, episodes(max_samples=1), engine=replies(*said), environment=environment
    )
    return rollout


def shown(rollout) -> list[str]:
    return [step.prompt[-1]["content"] for step in rollout.steps]


def test_a_lake_is_crossed_by_the_names_of_its_actions(tiny):
    way = [
        "I go down.",
        "DOWN",
        "right",
        "Not up, but right",
        "down",
        "<think>\nleft\n</think>right",
    ]
    rollout = play(tiny, "FrozenLake-v1", *way, is_slippery=False)
    assert (rollout.status, rollout.steps[-1].reward) == ("terminated", 1.0)
    first, second = shown(rollout)[:2]
    assert "Answer with one action: left, down, right, up." in first and "slippery" not in first
    assert first.endswith("@FFF\nFHFH\nFFFH\nHFFG\nYou, @, are at row 1, column 1.")
    assert second == "SFFF\n@HFH\nFFFH\nHFFG\nYou, @, are at row 2, column 1."


def test_a_reply_without_an_action_loses_its_turn(tiny):
    rollout = play(tiny, "FrozenLake-v1", "upwards", "down", is_slippery=False)
    lost, moved = shown(rollout)[1], rollout.steps
    assert lost == "That names no action. Answer with one action: left, down, right, up."
    assert [step.reward for step in moved] == [0.0, 0.0] and rollout.truncation == "steps"


@pytest.mark.parametrize("id", NAMES)
def test_the_words_are_those_of_the_game(id):
    """Each name takes the game's own action, and the words are those of its own state."""
    game = named_game(id)()
    assert tuple(game.actions) == NAMES[id]
    for i, name in enumerate(NAMES[id]):
        said, _ = game.reset(seed=1)
        plain = gym.make(id)
        plain.reset(seed=1)
        assert f"action: {', '.join(NAMES[id])}." in said
        text, reward, *ends, _ = game.step(f"My move: {name}")
        observation, expected, *expected_ends, _ = plain.step(i)
        assert (reward, ends) == (expected, expected_ends)
        assert text == game.describe(game.game, observation)


def test_a_taxi_is_described_by_its_places():
    game = named_game("Taxi-v4")()
    text = game.describe(game.game, game.game.encode(2, 0, 4, 3))
    assert text == (
        "The taxi is at row 3, column 1. The passenger is in the taxi. The destination is B (row 5,"
        " column 4)."
    )
    text = game.describe(game.game, game.game.encode(0, 0, 1, 0))
    assert "The passenger waits at G (row 1, column 5)." in text
    assert "|R: | : :G|\n| : | : : |" in game.reset(seed=0)[0]


def test_cards_are_described():
    game = named_game("Blackjack-v1")()
    assert game.describe(None, (18, 1, 1)) == (
        "Your cards count 18, with an ace as 11. The dealer shows an ace."
    )
    assert game.describe(None, (12, 10, 0)) == "Your cards count 12. The dealer shows 10."


def test_slippery_games_say_so():
    assert "It is slippery" in named_game("FrozenLake-v1")().rules
    assert "It is slippery" not in named_game("CliffWalking-v1")().rules
    assert "It is slippery" in named_game("CliffWalking-v1", is_slippery=True)().rules


@pytest.mark.parametrize(
    "id, said",
    [
        ("CartPole-v1", "environment.make._target_=MODULE.CLASS"),
        ("Pendulum-v1", "environment.make._target_=MODULE.CLASS"),
        ("FrozenLike-v1", "FrozenLake"),
        ("FrozenLake-v7", "FrozenLake"),
    ],
)
def test_a_game_without_words_is_refused_before_a_model_is_loaded(id, said):
    with pytest.raises(ConfigError) as refused:
        build(compose(["task=episodes", "environment=gymnasium", f"environment.id={id}"]).config)
    assert f"environment.id={id}: " in str(refused.value) and said in str(refused.value)


def test_no_game_at_all_is_refused():
    with pytest.raises(
        ConfigError, match=r"set environment\.id=NAME .*environment\.make\._target_="
    ):
        build(compose(["task=episodes", "environment=gymnasium"]).config)


def test_settings_of_a_game_come_from_the_config():
    words = ["task=episodes", "environment=gymnasium", "environment.id=FrozenLake-v1"]
    with pytest.raises(ConfigError, match="no_such"):
        build(compose([*words, "+environment.make.no_such=1"]).config)
    build(compose([*words, "+environment.make.is_slippery=false"]).config)


@pytest.mark.parametrize(
    "reply, action",
    [("left", 0), ("Left, then right.", 1), ("leftover", None), ("", None), ("**RIGHT**", 1)],
)
def test_the_action_is_the_last_one_named(reply, action):
    assert read_action(reply, ["left", "right"]) == action


# ---------------------------------------------------------------------------------------- Minigrid


@pytest.fixture
def minigrid():
    return pytest.importorskip("minigrid")


def test_a_grid_is_walked_by_the_names_of_its_actions(minigrid, tiny):
    way = ["forward", "forward", "right", "forward", "forward"]
    rollout = play(tiny, "MiniGrid-Empty-5x5-v0", *way)
    assert rollout.status == "terminated" and rollout.steps[-1].reward > 0.9
    first, *_, last = shown(rollout)
    assert "Answer with one action: left, right, forward, pickup, drop, toggle, done." in first
    assert "Mission: get to the green goal square.\nYou face east and carry nothing." in first
    assert "Free cells: 2 ahead, 0 to the left, 2 to the right." in first
    assert "You see: a green goal 2 ahead, 2 right." in first
    assert last.splitlines()[1:] == [
        "You face south and carry nothing.",
        "Free cells: 1 ahead, 0 to the left, 2 to the right.",
        "You see: a green goal 1 ahead.",
    ]


def test_things_in_view_are_named(minigrid):
    from minigrid.core.world_object import Ball, Door, Key

    game = named_game("MiniGrid-Empty-8x8-v0")()
    game.reset(seed=0)
    grid = game.game.grid
    grid.set(2, 1, Key("yellow"))
    grid.set(4, 1, Door("red", is_locked=True))
    grid.set(1, 3, Ball("blue"))
    text = game.step("toggle")[0]
    seen = "You see: a blue ball 2 right; a yellow key 1 ahead; a locked red door 3 ahead."
    assert seen in text and "Free cells: 0 ahead, 0 to the left, 1 to the right." in text
    text = game.step("pickup")[0]
    assert "carry a yellow key." in text and "Free cells: 2 ahead" in text
    grid.set(2, 1, Door("red", is_open=True))
    assert "Free cells: 2 ahead" in game.step("done")[0]


@pytest.mark.parametrize("id", ["MiniGrid-Dynamic-Obstacles-5x5-v0", "BabyAI-GoToObj-v0"])
def test_other_grids_name_the_actions_that_they_have(minigrid, id):
    game = named_game(id)()
    game.reset(seed=0)
    assert len(game.actions) == game.instance.action_space.n
    assert all("Mission: " in game.step(name)[0] for name in game.actions[:2])
