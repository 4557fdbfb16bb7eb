"""Text environments with `reset` and `step`, as Gymnasium has them. The package itself is not needed: what counts is the two methods."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from rlkit.environments.dialogue import dialogue
from rlkit.environments.prompts import with_system_prompt
from rlkit.errors import ConfigError, place
from rlkit.types import Environment, Messages, Rollout, Task


def gymnasium(
    *,
    make: Callable[[], Any],
    parse_action: Callable[[str], Any] = str.strip,
    render: Callable[[Any], str] = str,
    max_turns: int = 50,
    system_prompt: str | None = None,
    history: Literal["keep_thinking", "strip_thinking"] = "keep_thinking",
) -> Environment:
    """The policy's replies are the actions, the observations its prompts; rewards stand at their steps.

    Every episode has an instance of its own, reset with the task's seed (`metadata["seed"]`, else one of its id): the samples of a
    task begin with the same observation and differ by their actions alone. `terminated` ends an episode as terminated, `truncated` as
    truncated by the environment. One that raises, or gives a reward that is no number, ends that episode as truncated by "error",
    with the reason in `rollout.metadata["error"]`, and the reward `environment` cannot score it.

    Args:
      make: () → an object with `reset(seed=…)` → (observation, info) and `step(action)` → (observation, reward, terminated, truncated,
        info), and perhaps `close()`.
      parse_action: content of a reply, thinking excluded → action. ValueError says that it is none: the policy reads why, and its turn is
        gone, with reward 0.
      render: observation → text.
      max_turns: replies of an episode, at least 1; one that would go on after the last is truncated.
      system_prompt: put in front of the task's messages and the first observation; None adds none.
      history: keep_thinking only appends; strip_thinking renders the conversation anew, without earlier thinking.
    Raises: ConfigError for a limit below 1; from the first prompt, where the environment cannot be made or reset.
    """

    def session(task: Task) -> Game:
        return Game(task, make, parse_action, render, system_prompt)

    base = dialogue(prompt_fn=lambda rollout, step: None, max_turns=max_turns, history=history)
    return base._replace(session=session)


class Game:
    """The session of an episode: an instance of its own."""

    tools: Mapping[str, Any] = {}

    def __init__(self, task: Task, make: Any, parse_action: Any, render: Any, system_prompt: str | None):
        self.parse_action, self.render = parse_action, render
        try:
            self.instance = make()
            observation, _ = self.instance.reset(seed=seed_of(task))
            self.prompt = with_system_prompt((*task.messages, {"role": "user", "content": render(observation)}), system_prompt)
        except Exception as error:
            raise ConfigError(
                f"environment.make: the environment cannot be made or reset(seed={seed_of(task)}) for task {task.id!r}: "
                f"{type(error).__name__}: {error} at {place(error)}; it needs reset(seed=…) → (observation, info)"
            ) from error

    def first_prompt(self) -> Messages:
        return self.prompt

    def answer(self, rollout: Rollout) -> Any:
        return play(self.instance, rollout, self.parse_action, self.render)


def seed_of(task: Task) -> int:
    """What the task's episodes are reset with."""
    return int(task.metadata.get("seed", zlib.crc32(task.id.encode())))


def play(instance: Any, rollout: Rollout, parse_action: Callable[[str], Any], render: Callable[[Any], str]) -> tuple[Rollout, Any]:
    """One action; whatever the environment does wrong ends the episode, not the run."""
    last = rollout.steps[-1]

    def rewarded(reward: float) -> Rollout:
        return rollout._replace(steps=(*rollout.steps[:-1], last._replace(reward=reward)))

    try:
        action = parse_action(rollout.final_content)
    except ValueError as error:
        return rewarded(0.0), f"That is no action: {error}"
    try:
        observation, reward, terminated, truncated, _ = instance.step(action)
        number = float(reward)
        if not math.isfinite(number):
            raise ValueError(f"the reward is {reward}")
        prompt = None if terminated or truncated else render(observation)
        after = rewarded(number)
        return (after._replace(status="truncated", truncation="environment") if truncated and not terminated else after), prompt
    except Exception as error:
        said = f"step({str(action)[:200]!r}) raised {type(error).__name__}: {error} at {place(error)}"
        return rollout._replace(status="truncated", truncation="error", metadata={**rollout.metadata, "error": said}), None


def close(instance: Any) -> None:
    """Lets the instance free what it holds. An episode that is over is not lost to a failure here."""
    with contextlib.suppress(Exception):
        getattr(instance, "close", lambda: None)()
