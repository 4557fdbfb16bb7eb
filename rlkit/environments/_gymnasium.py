"""Play text environments with Gymnasium's methods `reset` and `step`. The package gymnasium itself
is not needed."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

from rlkit.environments._dialogue import dialogue
from rlkit.environments.games import close_quietly, derive_seed, set_last_reward, unpack
from rlkit.environments.prompts import with_system_prompt
from rlkit.errors import ConfigError, Hung, describe_error, list_parameters
from rlkit.system.deadline import call_user
from rlkit.types import Environment, Message, Messages, Rollout, Task, Tool, reaches, safe


@reaches(id="import")
@safe("make", "parse_action", "render", "system_prompt")
def gymnasium(
    *,
    make: Callable[..., Any],
    id: str | None = None,
    parse_action: Callable[[str], Any] = str.strip,
    render: Callable[[Any], str] = str,
    max_turns: int = 50,
    system_prompt: str | None = None,
    history: Literal["keep_thinking", "strip_thinking"] = "keep_thinking",
    deadline: float | None = None,
) -> Environment:
    """Make an environment of a game: replies are actions, and observations are prompts. The reward
    of an action is the reward of its step.

    Every episode has its own instance of the game. The instance is reset with the task's seed. This
    is `metadata["seed"]`, or else a seed made from the task's id. If the game takes all its
    randomness from the seed, the samples of a task begin with the same observation and differ only
    by their actions. If `step` returns terminated, the episode ends as terminated. If it returns
    truncated, the episode ends as truncated by the environment. If `step` raises, or if a reward is
    not a number, the episode ends as truncated by "error", with the reason in `rollout.error`. The
    reward `environment` cannot score such an episode.

    Args:
      make: function without arguments that returns a game. A game has `reset(seed=…)` →
        (observation, info), `step(action)` → (observation, reward, terminated, truncated, info),
        and perhaps `close()`. `make` and the methods may be async, and all episodes then wait at
        the same time. If an `id` is given, `make` is instead called once with the id, at the start
        of the run, and returns the function without arguments.
      id: name of a game, passed to `make`, for example FrozenLake-v1.
      parse_action: function from the content of a reply, without its thinking, to an action. If it
        raises ValueError, the reply is not an action: the policy reads the error and loses its turn
        with reward 0.
      render: function from an observation to its text.
      max_turns: number of replies of an episode, at least 1. If the game has not ended after this
        many replies, the episode is truncated.
      system_prompt: text to put in front of the task's messages and the first observation; None: no
        text.
      history: with keep_thinking, new text is only appended to the conversation. With
        strip_thinking, the conversation is rendered again for every reply, without earlier
        thinking.
      deadline: seconds, > 0, that an episode may wait for async methods in total; then it is
        truncated. None: no limit.
    Raises: ConfigError for a limit out of range, or if `make` needs an argument. The start of an
      episode raises it if the game cannot be made or reset.
    """
    if id is not None:
        make = make(id)
    parameters = list_parameters(make).values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    if needed:
        raise ConfigError(
            f"environment.make needs a value for {needed[0]!r}; set environment.id=NAME for a game"
            " of Gymnasium, or environment.make._target_=MODULE.FUNCTION for one of your own"
        )

    @asynccontextmanager
    async def session(task: Task) -> AsyncIterator[Game]:
        instance = None
        try:
            try:
                instance = await call_user("the environment's make", make)
                given = await call_user(
                    "the environment's reset", instance.reset, seed=derive_seed(task)
                )
                observation, _ = unpack(given, "observation, info")
                first: Message = {"role": "user", "content": render(observation)}
            except Hung:
                raise
            except Exception as error:
                raise ConfigError(
                    "environment.make: the environment cannot be made or"
                    f" reset(seed={derive_seed(task)}) for task {task.id!r}:"
                    f" {describe_error(error)}; it needs reset(seed=…) → (observation, info)"
                ) from error
            yield Game(
                instance,
                with_system_prompt((*task.messages, first), system_prompt),
                parse_action,
                render,
            )
        finally:
            await close_quietly(instance)

    base = dialogue(max_turns=max_turns, history=history, deadline=deadline)
    return base._replace(first_prompt=None, session=session)


class Game:
    """Hold an episode's session: a game, after its reset."""

    tools: dict[str, Tool] = {}  # noqa: RUF012

    def __init__(
        self,
        instance: Any,
        messages: Messages,
        parse_action: Callable[[str], Any],
        render: Callable[[Any], str],
    ):
        self.instance = instance
        self.messages = messages
        self.parse_action = parse_action
        self.render = render

    def first_prompt(self) -> Messages:
        """Return the task's messages and the first observation."""
        return self.messages

    async def answer(self, rollout: Rollout) -> tuple[Rollout, Messages | None]:
        """Take one action. If the game raises, the episode ends, and the run goes on."""
        try:
            action = self.parse_action(rollout.final_content)
        except ValueError as error:
            return set_last_reward(rollout, 0.0), [
                {"role": "user", "content": f"That is not an action: {error}"}
            ]
        try:
            given = await call_user("the environment's step", self.instance.step, action)
            observation, reward, terminated, truncated, _ = unpack(
                given, "observation, reward, terminated, truncated, info"
            )
            number = float(reward)
            if not math.isfinite(number):
                raise ValueError(f"the reward is {reward}")
            text = None if terminated or truncated else self.render(observation)
        except Exception as error:
            said = f"step({str(action)[:200]!r}) raised {describe_error(error)}"
            return (
                rollout._replace(status="truncated", truncation="error", error=said),
                None,
            )
        rollout = set_last_reward(rollout, number)
        if truncated and not terminated:
            rollout = rollout._replace(status="truncated", truncation="environment")
        return rollout, None if text is None else [{"role": "user", "content": text}]
