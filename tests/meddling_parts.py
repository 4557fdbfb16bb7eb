"""Parts that leave the folder of the run, named by configs: the sampling process imports them too.
AWAY: where they go."""

from __future__ import annotations

import os
import tempfile

from rlkit.environments import dialogue, gymnasium, tool_use
from rlkit.types import ToolCall

AWAY = "RLKIT_TEST_AWAY"  # in the environment: a folder; absent: they stay


def leave() -> None:
    """Goes to a new folder, which is gone again: no path can be resolved from it."""
    if AWAY in os.environ:
        place = tempfile.mkdtemp(dir=os.environ[AWAY])
        os.chdir(place)
        os.rmdir(place)


def score(rollout):
    """A number that differs between replies."""
    leave()
    return sum(rollout.steps[-1].response_ids) % 7 / 7


def right(rollout):
    """Whether a reply is the answer."""
    leave()
    return float(rollout.final_content.strip() == rollout.task.answer)


def look(value: int) -> str:
    """Looks.

    Args:
        value: A number.
    """
    leave()
    return str(value)


def tools(**settings):
    """tool_use with one tool, called by every reply."""
    return tool_use(
        **settings
        | {
            "tools": {"look": look},
            "parse_calls": lambda content: (content, [ToolCall("", "look", {"value": 1})]),
        }
    )


def after(rollout, step):
    leave()
    return "Once more." if step == 0 else None


def turns(**settings):
    """A dialogue of two turns."""
    leave()
    return dialogue(prompt_fn=after, max_turns=2)


class Game:
    """Two turns."""

    def reset(self, *, seed=None):
        leave()
        self.turn = 0
        return "Say a number.", {}

    def step(self, action):
        leave()
        self.turn += 1
        return "Another one.", 0.5, self.turn > 1, False, {}


def game(**settings):
    return gymnasium(make=Game)


def advantage(rewards):
    leave()
    return rewards - rewards.mean()


leave()  # while it is imported
