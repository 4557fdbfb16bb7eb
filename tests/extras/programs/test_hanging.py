"""What the doors to programs of others add to the places where code may hang."""

from __future__ import annotations

import pytest

from laws import test_hangs
from laws.test_hangs import ASYNC, PLAIN, Game, check_async, check_plain, game, sleeps
from parametrise import cases
from rlkit.extras.programs import gymnasium_vector, program, two_players

quick = test_hangs.quick


class Duel(Game):
    def step(self, action):
        return "Over.", (0.0, 0.0), True, False, {}


class Games(Game):
    def __init__(self, num_envs=1):
        self.num_envs = num_envs

    def reset(self, *, seed):
        return ["Move."] * self.num_envs, {}

    def step(self, actions):
        n = self.num_envs
        return ["Over."] * n, [0.0] * n, [True] * n, [False] * n, {}


def program_of(do):
    """An async function as a program; a plain one has a thread of its own."""

    async def play(task, client):
        await do()

    return program(function=play, time_limit=0.1)


DOORS = {  # name → as in test_hangs, and how many of four episodes fail at least
    "reset of a vector": (game(gymnasium_vector, Games, "reset"), "the environment's reset", 4),
    "step of a vector": (game(gymnasium_vector, Games, "step"), "the environment's step", 4),
    # only the last one of a table closes
    "close of a vector": (game(gymnasium_vector, Games, "close"), "the close of", 2),
    # the other player had no turn
    "reset of a duel": (game(two_players, Duel, "reset"), "the environment's reset", 2),
    "step of a duel": (game(two_players, Duel, "step"), "the environment's step", 2),
    "close of a duel": (game(two_players, Duel, "close"), "the close of", 2),
    "a program": (program_of, "the program", 4),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("door", "do"),
    cases([(door, do) for door in DOORS for do in ASYNC], 2, unpack=True),
)
def test_async_code_of_others_that_hangs_is_named_and_its_episodes_fail(
    tiny, quick, capfd, door, do
):
    make, named, failures = DOORS[door]
    place = f"{__file__}:" if door == "a program" else test_hangs.PLACE
    check_async(tiny, capfd, (make, named, "ok"), do, failures, place)


BLOCKS = [(door, do) for door in DOORS for do in PLAIN if door != "a program"]


@pytest.mark.slow
@pytest.mark.parametrize(("door", "do"), cases(BLOCKS, {("close of a duel", sleeps)}, unpack=True))
def test_plain_code_of_others_that_blocks_the_main_thread_ends_the_run_with_the_line(
    tiny, quick, tmp_path, door, do
):
    make, named, _ = DOORS[door]
    check_plain(tiny, tmp_path, (make, named, "ok"), do)
