"""Play games of Gymnasium and Minigrid by name. Actions are words, and observations are text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from rlkit.errors import ConfigError, describe_error, install
from rlkit.types import reaches

COMPASS = ("east", "south", "west", "north")  # Minigrid's directions in its order
FREE = ("empty", "floor", "goal")  # cells of Minigrid that the agent can step on
NOTHING = ("unseen", "empty", "floor", "wall")  # cells of Minigrid that are not mentioned


class Words(NamedTuple):
    """Hold the words for a kind of game. `game` is the game's instance without wrappers."""

    rules: Callable[[Any], str]  # (game) → its rules
    # (game) → names of the actions, in the order of their numbers
    actions: Callable[[Any], Sequence[str]]
    describe: Callable[[Any, Any], str]  # (game, observation) → text


@reaches(id="import", settings="import")
def named_game(id: str, **settings: Any) -> Callable[[], SpokenGame]:
    """Return a function that makes a game of Gymnasium with words for its actions and observations.

    The known games are Gymnasium's toy text (FrozenLake, CliffWalking, Taxi, Blackjack), and
    Minigrid with BabyAI if the package minigrid is installed.

    Args:
      id: name of the game for `gymnasium.make`, for example FrozenLake-v1 or MiniGrid-Empty-5x5-v0.
      settings: further arguments of `gymnasium.make`, for example is_slippery.
    Raises: ConfigError if the package or the game is missing, or if there are no words for the
      game.
    """
    if find_spec("gymnasium") is None:
        raise ConfigError(f"environment.id needs the package gymnasium: {install('gym')}")
    import gymnasium

    def make() -> SpokenGame:
        return SpokenGame(gymnasium.make(id, **settings))

    try:
        made = make()
    except ConfigError as error:
        raise ConfigError(f"environment.id={id}: {error}") from None
    except Exception as error:
        raise ConfigError(f"environment.id={id}: {describe_error(error)}") from error
    made.close()
    return make


class SpokenGame:
    """Play a game with text instead of actions and observations.

    The action of a reply is the last action named in it. If a reply names no action, the policy
    loses its turn: the game does not change, and the reward is 0.
    """

    def __init__(self, instance: Any):
        self.instance = instance
        self.game = instance.unwrapped
        words = find_words(self.game)
        count = getattr(instance.action_space, "n", 0)
        self.describe = words.describe
        self.actions = list(words.actions(self.game))[:count]
        self.rules = words.rules(self.game)
        if not self.actions:
            raise ConfigError(f"its actions are {instance.action_space}, which have no names")

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin the game. Return the rules, the names of the actions, and the first observation."""
        observation, info = self.instance.reset(seed=seed)
        return f"{self.rules}\n{self.ask()}\n\n{self.describe(self.game, observation)}", info

    def step(self, reply: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the action named last in the reply."""
        action = read_action(reply, self.actions)
        if action is None:
            return f"That names no action. {self.ask()}", 0.0, False, False, {}
        observation, reward, *ends = self.instance.step(action)
        return self.describe(self.game, observation), float(reward), *ends

    def ask(self) -> str:
        """Name the actions."""
        return f"Answer with one action: {', '.join(self.actions)}."

    def close(self) -> None:
        """Close the game."""
        self.instance.close()


def read_action(reply: str, actions: Sequence[str]) -> int | None:
    """Return the number of the action named last in a reply; None if it names no action. Case is
    ignored."""
    names = "|".join(map(re.escape, actions))
    found = re.findall(rf"(?<!\w)(?:{names})(?!\w)", reply, re.IGNORECASE)
    return actions.index(found[-1].lower()) if found else None


def find_words(game: Any) -> Words:
    """Return the words of a game, by its class. Raises: ConfigError if there are none."""
    for kind in type(game).__mro__:
        if kind.__name__ in GAMES and kind.__module__.split(".")[0] in ("gymnasium", "minigrid"):
            return GAMES[kind.__name__]
    raise ConfigError(
        "there are words for the actions and observations of Gymnasium's toy text and of Minigrid"
        " alone; for others write a class with reset and step that takes text and gives text, and"
        " name it as environment.make._target_=MODULE.CLASS"
    )


# ---------------------------------------------------------------------------------------- toy text


def describe_slips(game: Any) -> str:
    """Return a sentence if a move can have several outcomes, else ""."""
    random = any(len(found) > 1 for moves in game.P.values() for found in moves.values())
    return " It is slippery: a move may go to its left or right side instead." if random else ""


def draw_map(rows: Sequence[str], place: int) -> str:
    """Draw a map with the player as @, and describe the player's place in words. `place` is row ×
    columns + column, counted from 0."""
    row, column = divmod(place, len(rows[0]))
    drawn = list(rows)
    drawn[row] = f"{rows[row][:column]}@{rows[row][column + 1 :]}"
    return "\n".join([*drawn, f"You, @, are at row {row + 1}, column {column + 1}."])


def lake_rules(game: Any) -> str:
    return (
        "Cross the frozen lake to the goal G. F is ice, and a hole H ends the game."
        f"{describe_slips(game)} The goal earns 1."
    )


def lake(game: Any, observation: Any) -> str:
    return draw_map([b"".join(row).decode() for row in game.desc.tolist()], int(observation))


def cliff_rules(game: Any) -> str:
    return (
        "Walk from S to the goal G. A step costs 1. A step off the cliff C costs 100 and leads back"
        f" to S.{describe_slips(game)}"
    )


def cliff(game: Any, observation: Any) -> str:
    return draw_map(["............"] * 3 + ["SCCCCCCCCCCG"], int(observation))


def taxi_rules(game: Any) -> str:
    rows = [b"".join(row).decode() for row in game.desc.tolist()]
    return "\n".join(
        [
            "Drive the taxi to the passenger, pick up the passenger, drive to the destination, and"
            " drop off the passenger. A step costs 1, a wrong pickup or dropoff 10, and the right"
            " dropoff earns 20. The taxi crosses : but no wall |. The map, with north at the top:",
            *rows,
        ]
    )


def taxi(game: Any, observation: Any) -> str:
    row, column, passenger, destination = game.decode(int(observation))
    places = [
        f"{name} (row {at[0] + 1}, column {at[1] + 1})"
        for name, at in zip("RGYB", game.locs, strict=True)
    ]
    waits = "is in the taxi" if passenger == len(places) else f"waits at {places[passenger]}"
    return (
        f"The taxi is at row {row + 1}, column {column + 1}. The passenger {waits}. The destination"
        f" is {places[destination]}."
    )


def blackjack_rules(game: Any) -> str:
    return (
        "Come closer to 21 than the dealer, but not above 21. Face cards count 10, an ace 1 or 11."
        " A hit draws a card; after stick the dealer draws to 17 or more. Winning earns 1, losing"
        " costs 1."
    )


def blackjack(game: Any, observation: Any) -> str:
    total, shown, ace = observation
    return (
        f"Your cards count {total}{', with an ace as 11' if ace else ''}. The dealer shows"
        f" {'an ace' if shown == 1 else shown}."
    )


# ---------------------------------------------------------------------------------------- Minigrid


def grid_rules(game: Any) -> str:
    return (
        "You are in a world of square cells and see those ahead of you, not through walls. left and"
        " right turn you; forward moves one cell. Fulfil the mission in few steps."
    )


def grid_actions(game: Any) -> list[str]:
    return [action.name for action in game.actions]


def grid(game: Any, observation: Mapping[str, Any]) -> str:
    """Describe the mission, the free cells ahead and beside, and the things in view. In the image,
    the first index goes from left to right, and the agent looks towards index 0 of the second. Its
    own cell is in the middle of the first index and at the end of the second. This cell holds the
    thing that the agent carries."""
    image = observation["image"]
    x = image.shape[0] // 2
    y = image.shape[1] - 1
    ahead = count_free_cells([image[x, j] for j in range(y - 1, -1, -1)])
    left = count_free_cells([image[i, y] for i in range(x - 1, -1, -1)])
    right = count_free_cells([image[i, y] for i in range(x + 1, image.shape[0])])
    seen = [
        f"{name_thing(image[i, j])} {describe_place(i - x, y - j)}"
        for j in range(y, -1, -1)
        for i in range(image.shape[0])
        if (i, j) != (x, y) and name_cell(image[i, j]) not in NOTHING
    ]
    carried = "nothing" if name_cell(image[x, y]) in NOTHING else name_thing(image[x, y])
    return "\n".join(
        [
            f"Mission: {observation['mission']}.",
            f"You face {COMPASS[int(observation['direction'])]} and carry {carried}.",
            f"Free cells: {ahead} ahead, {left} to the left, {right} to the right.",
            f"You see: {'; '.join(seen) or 'nothing'}.",
        ]
    )


def count_free_cells(cells: Sequence[Any]) -> int:
    """Count the cells that the agent can step on, up to the first other cell."""
    free = [
        name_cell(cell) in FREE or (name_cell(cell) == "door" and not cell[2]) for cell in cells
    ]
    return [*free, False].index(False)


def name_cell(cell: Any) -> str:
    from minigrid.core.constants import IDX_TO_OBJECT

    return str(IDX_TO_OBJECT[int(cell[0])])


def name_thing(cell: Any) -> str:
    """Name a thing in words, as in `a locked red door`."""
    from minigrid.core.constants import IDX_TO_COLOR, STATE_TO_IDX

    kind = name_cell(cell)
    states = {number: state for state, number in STATE_TO_IDX.items()}
    words = [IDX_TO_COLOR[int(cell[1])], kind]
    words = [states[int(cell[2])], *words] if kind == "door" else words
    return " ".join(["an" if words[0] == "open" else "a", *words])


def describe_place(right: int, ahead: int) -> str:
    """Describe a place relative to the agent, as in `2 ahead, 1 left`."""
    side = f"{abs(right)} {'right' if right > 0 else 'left'}"
    return ", ".join([f"{ahead} ahead"] * (ahead > 0) + [side] * (right != 0))


MOVES = ("left", "down", "right", "up")
GAMES: dict[str, Words] = {
    "FrozenLakeEnv": Words(lake_rules, lambda game: MOVES, lake),
    "CliffWalkingEnv": Words(cliff_rules, lambda game: ("up", "right", "down", "left"), cliff),
    "TaxiEnv": Words(
        taxi_rules, lambda game: ("south", "north", "east", "west", "pickup", "dropoff"), taxi
    ),
    "BlackjackEnv": Words(blackjack_rules, lambda game: ("stick", "hit"), blackjack),
    "MiniGridEnv": Words(grid_rules, grid_actions, grid),
}
