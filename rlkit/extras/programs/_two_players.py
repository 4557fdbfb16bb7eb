"""Play text games of two players in turn. Both players are the policy, or one is another model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Literal

from rlkit.environments import dialogue, with_system_prompt
from rlkit.environments.games import close_quietly, derive_seed, set_last_reward, unpack
from rlkit.errors import ConfigError, EpisodeOver, Hung, describe_error
from rlkit.system.deadline import call_user
from rlkit.types import Environment, Messages, Rollout, Table, Task, Tool, reaches, safe


@reaches(opponent="path")
@safe("make", "parse_action", "render", "system_prompt")
def two_players(
    *,
    make: Callable[[], Any],
    opponent: str | None = None,
    parse_action: Callable[[str], Any] = str.strip,
    render: Callable[[Any], str] = str,
    max_turns: int = 50,
    system_prompt: str | None = None,
    history: Literal["keep_thinking", "strip_thinking"] = "keep_thinking",
) -> Environment:
    """Make an environment of a game for two players. Replies are actions, and the players take
    turns. Each player has its own rollout with its own prompts and rewards.

    In self-play, the samples 2k and 2k + 1 of a task play each other, as players 0 and 1. A sample
    without a partner plays against another copy of the policy. With an `opponent`, every sample
    plays against it. In these two cases the other side is not trained on, and the numbers of task
    and sample decide which side the policy has. `rollout.player` is the side of a rollout.

    The game ends if a player's reply reaches the length limit, or if a player has had `max_turns`
    replies. The other player's rollout is then truncated by "environment". If the game raises, or
    if a reward is not a number, both rollouts are truncated by "error".

    Args:
      make: function without arguments that returns a game. A game has `reset(seed=…)` →
        (observation of the first player, info), `step(action)` → (observation of the next player, a
        reward for each player, terminated, truncated, info), and perhaps `close()`. All functions
        may be plain or async. If the game has an attribute `player`, 0 or 1, this player is next.
        Otherwise player 0 begins, and the players alternate.
      opponent: path of the other player's model, in the form of `model.path`. With the policy's own
        path, the opponent keeps the policy's weights from the start of the run. None: self-play.
      parse_action, render, max_turns, system_prompt, history: as for `gymnasium`, for each player.
    Raises: ConfigError for a limit out of range. The start of a game raises it if the game cannot
      be made or reset.
    """

    def table(task: Task, players: int = 2) -> Game:
        return Game(task, make, parse_action, render, system_prompt)

    base = dialogue(max_turns=max_turns, history=history)
    return base._replace(
        first_prompt=None,
        session=lambda task: table(task).player(0),
        table=Table(table, opponent=opponent),
    )


class Game:
    """Hold a game and its next player. The sessions of the two players wait for each other here."""

    def __init__(
        self,
        task: Task,
        make: Callable[[], Any],
        parse_action: Callable[[str], Any],
        render: Callable[[Any], str],
        prompt: str | None,
    ):
        self.task = task
        self.make = make
        self.parse_action = parse_action
        self.render = render
        self.system_prompt = prompt
        self.game: Any = None
        self.starting = False
        self.changed = asyncio.Event()
        self.called = (asyncio.Event(), asyncio.Event())
        self.observation = ""
        self.rewards = [0.0, 0.0]
        self.here = 0
        # None while the game runs; then "", or the reason why a limit ended the game
        self.over: str | None = None
        self.error = ""

    def player(self, number: int) -> Player:
        """Return the session of a player, 0 or 1."""
        self.here += 1
        return Player(self, number)

    async def start(self) -> None:
        """Make and reset the game once. The first caller does this, and the other player waits."""
        while self.game is None and self.over is None:
            if self.starting:
                await self.changed.wait()
                continue
            self.starting = True
            self.changed.clear()
            try:
                await self._start(derive_seed(self.task))
            finally:
                self.starting = False
                self.changed.set()

    async def _start(self, seed: int) -> None:
        try:
            self.game = await call_user("the environment's make", self.make, count=2)
            given = await call_user("the environment's reset", self.game.reset, seed=seed, count=2)
            observation, _ = unpack(given, "observation, info")
            self._next(observation, 0)
        except Hung as error:
            self.lost(0, error)
            raise
        except Exception as error:
            raise ConfigError(
                f"environment.make: the game cannot be made or reset(seed={seed}) for task"
                f" {self.task.id!r}: {describe_error(error)}; it needs reset(seed=…) →"
                " (observation, info)"
            ) from error

    def _next(self, observation: Any, number: int) -> None:
        self.observation = self.render(observation)
        self.called[getattr(self.game, "player", number)].set()

    async def act(self, number: int, action: Any) -> None:
        """Take one action of a player. If the game raises, the game ends, and the run goes on."""
        try:
            given = await call_user("the environment's step", self.game.step, action, count=2)
            observation, rewards, terminated, truncated, _ = unpack(
                given, "observation, rewards, terminated, truncated, info"
            )
            numbers = [float(reward) for reward in rewards]
            if len(numbers) != 2 or not all(map(math.isfinite, numbers)):
                raise ValueError(f"the rewards are {rewards!r:.200}; give a number for each player")
            self.rewards = [own + new for own, new in zip(self.rewards, numbers, strict=True)]
            if terminated or truncated:
                self.end("" if terminated else "environment")
            else:
                self._next(observation, 1 - number)
        except Exception as error:
            self.error = f"step({str(action)[:200]!r}) raised {describe_error(error)}"
            self.end("error")

    def end(self, how: str) -> None:
        """End the game for both players."""
        if self.over is None:
            self.over = how
            self.changed.set()
            for called in self.called:
                called.set()

    def lost(self, number: int, error: BaseException) -> None:
        """Record that a player's episode has failed, so the other player no longer waits for it."""
        self.error = self.error or str(error)
        self.end("error")

    async def turn(self, number: int) -> str | None:
        """Wait for a player's turn. Return its observation, or None if the game is over."""
        await self.called[number].wait()
        if self.over is None:
            self.called[number].clear()
            return self.observation
        return None

    async def leave(self) -> None:
        """Leave the game for one player. The game is closed when both players have left."""
        self.end("environment")
        self.here -= 1
        if not self.here:
            await close_quietly(self.game)


class Player:
    """Hold the session of one player."""

    tools: dict[str, Tool] = {}  # noqa: RUF012

    def __init__(self, table: Game, number: int):
        self.table = table
        self.number = number

    async def first_prompt(self) -> Messages:
        """Return the task's messages and the player's observation at its first turn. Raises:
        EpisodeOver if the game ends before this turn."""
        await self.table.start()
        text = await self.table.turn(self.number)
        if text is None:
            raise EpisodeOver("the game ended before this player's first turn")
        return with_system_prompt(
            (*self.table.task.messages, {"role": "user", "content": text}), self.table.system_prompt
        )

    async def answer(self, rollout: Rollout) -> tuple[Rollout, Messages | None]:
        """Take one action. Then wait until the other player has acted and this player's turn comes
        again."""
        table = self.table
        try:
            action = table.parse_action(rollout.final_content)
        except ValueError as error:
            return set_last_reward(rollout, 0.0), [
                {"role": "user", "content": f"That is no action: {error}"}
            ]
        await table.act(self.number, action)
        text = await table.turn(self.number)
        rollout = set_last_reward(rollout, table.rewards[self.number])
        table.rewards[self.number] = 0.0
        if text is not None:
            return rollout, [{"role": "user", "content": text}]
        if table.error:
            rollout = rollout._replace(error=table.error)
        return (
            rollout._replace(status="truncated", truncation=table.over) if table.over else rollout
        ), None

    async def close(self) -> None:
        """Leave the table."""
        await self.table.leave()
