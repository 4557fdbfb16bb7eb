"""Text environments with `reset` and `step`, as Gymnasium has them. The package itself is not needed: what counts is the two methods."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from rlkit.environments.dialogue import dialogue
from rlkit.environments.prompts import with_system_prompt
from rlkit.errors import ConfigError, place
from rlkit.types import Environment, Messages, Rollout, Session, Task, Transition


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

    def opened(task: Task) -> tuple[Any, str]:
        try:
            instance = make()
            observation, _ = instance.reset(seed=seed_of(task))
            return instance, render(observation)
        except Exception as error:
            raise ConfigError(
                f"environment.make: the environment cannot be made or reset(seed={seed_of(task)}) for task {task.id!r}: "
                f"{type(error).__name__}: {error} at {place(error)}; it needs reset(seed=…) → (observation, info)"
            ) from error

    def first_prompt(task: Task) -> Messages:
        instance, observation = opened(task)
        close(instance)
        return with_system_prompt((*task.messages, {"role": "user", "content": observation}), system_prompt)

    def open_session(task: Task) -> Session:
        instance, observation = opened(task)

        def next_prompt(rollout: Rollout, step: int) -> Transition:
            if (told := rollout.steps[0].prompt[-1]["content"]) != observation:
                raise ConfigError(
                    f"environment.make: for task {task.id!r} reset(seed={seed_of(task)}) gave {told[:80]!r}, then {observation[:80]!r}; "
                    "the samples of a task must begin alike, so draw whatever is random from the seed"
                )
            return play(instance, rollout.final_content, parse_action, render)

        return Session(next_prompt, partial(close, instance))

    base = dialogue(prompt_fn=no_session, max_turns=max_turns, history=history)
    return base._replace(first_prompt=first_prompt, open=open_session)


def seed_of(task: Task) -> int:
    """What the task's episodes are reset with."""
    return int(task.metadata.get("seed", zlib.crc32(task.id.encode())))


def play(instance: Any, content: str, parse_action: Callable[[str], Any], render: Callable[[Any], str]) -> Transition:
    """One action; whatever the environment does wrong ends the episode, not the run."""
    try:
        action = parse_action(content)
    except ValueError as error:
        return Transition(f"That is no action: {error}", 0.0)
    try:
        observation, reward, terminated, truncated, _ = instance.step(action)
        number = float(reward)
        if not math.isfinite(number):
            raise ValueError(f"the reward is {reward}")
        prompt = None if terminated or truncated else render(observation)
        return Transition(prompt, number, "environment" if truncated and not terminated else "")
    except Exception as error:
        said = f"step({str(action)[:200]!r}) raised {type(error).__name__}: {error} at {place(error)}"
        return Transition(None, truncation="error", metadata={"error": said})


def close(instance: Any) -> None:
    """Lets the instance free what it holds. An episode that is over is not lost to a failure here."""
    with contextlib.suppress(Exception):
        getattr(instance, "close", lambda: None)()


def no_session(rollout: Rollout, step: int) -> Messages:
    """There is no state outside an episode."""
    raise ConfigError("an environment with reset and step plays only in episodes that `collect` opens")
