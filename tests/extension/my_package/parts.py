"""The functions. CALLS counts who was called, for the test that looks on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from rlkit.training.references import follow, frozen, track
from rlkit.types import Environment, Reference, Rollout, Task, ToolCall

CALLS: Counter[str] = Counter()


def reward(rollout: Rollout, *, bonus: float) -> float:
    """1 for the right number, and a bonus for an answer at all."""
    CALLS["reward"] += 1
    return float(rollout.final_content.strip() == rollout.task.answer) + bonus * bool(
        rollout.final_content
    )


def advantage(rewards, group_ids, *, scale: float):
    """The reward less the mean of the batch. [N] → [N]"""
    CALLS["algorithm"] += 1
    return scale * (rewards - rewards.mean()) + 0.01 * torch.arange(len(group_ids))


def squared(logprobs, logprobs_ref):
    """Half the squared log-ratio per token [B, T], in nats."""
    CALLS["kl"] += 1
    return (logprobs - logprobs_ref).square() / 2


def every_other(*, start: int) -> Reference:
    """A copy of the policy, taken anew after every second step from `start` on."""
    whole = frozen()

    def update(state: Any, policy: Any, *, step: int, **_: Any) -> Any:
        CALLS["reference"] += 1
        if step >= start and step % 2 == 0:
            follow(track(state), policy)
        return state

    return whole._replace(name="every_other", update=update)


def doubles(*, split: str, n: int) -> Sequence[Task]:
    """What is twice i? Each split has a hundred of its own, at most."""
    CALLS["task"] += 1
    first = {"train": 1, "validation": 101, "test": 201}[split]
    questions = [
        (i, {"role": "user", "content": f"What is {i} + {i}?"}) for i in range(first, first + n)
    ]
    return [Task(f"{split}/{i}", (message,), answer=str(2 * i)) for i, message in questions]


def double(number: int) -> str:
    """Doubles a number.

    Args:
        number: any.
    """
    CALLS["tool"] += 1
    return str(2 * int(number))


def brackets(content: str) -> tuple[str, list[ToolCall]]:
    """[[name number]] is a call."""
    CALLS["parser"] += 1
    found = re.findall(r"\[\[(\w+) (-?\d+)\]\]", content)
    return re.sub(r"\[\[.*?\]\]", "", content), [
        ToolCall("", name, {"number": int(number)}) for name, number in found
    ]


def workshop(*, parse_calls: Any, tools: Any, max_turns: int) -> Environment:
    """Asks, once more after a reply without a call, and hands the tools."""

    def first_prompt(task: Task):
        CALLS["environment"] += 1
        return task.messages

    def next_prompt(rollout: Rollout, index: int):
        return "Are you sure?" if index == 0 else None

    return Environment(
        first_prompt=first_prompt,
        next_prompt=next_prompt,
        tools=lambda task: tools,
        stop=lambda rollout, index: False,
        parse_calls=parse_calls,
        max_steps=max_turns,
    )


class Shelf:
    """Books by name, for one episode. Both methods are quick, so neither needs a thread."""

    bounded = True

    def __init__(self, *, size: int) -> None:
        self.books: dict[str, str] = {}
        self.size = size

    def put(self, name: str, text: str) -> str:
        """Puts a book on the shelf.

        Args:
            name: its name.
            text: what it says.
        """
        if len(self.books) == self.size:
            raise ValueError("the shelf is full")
        self.books[name] = text
        return f"{len(self.books)} books"

    def read(self, name: str) -> str:
        """Reads a book.

        Args:
            name: its name.
        """
        return self.books[name]

    def state(self) -> dict[str, Any]:
        return {"books": self.books}


def shelved(rollout: Rollout) -> float:
    """1 where a book on the shelf says the answer at the end."""
    return float(rollout.task.answer in rollout.state["shelf"]["books"].values())


class Nim:
    """A game of two players who are both the policy: take 1 to 3 stones in turn; who takes the last
    one wins.

    The replies of the winner get 1, those of the loser -1. A reply that takes none loses.
    """

    def __init__(self, stones: int) -> None:
        self.tools: dict[str, Any] = {}
        self.stones, self.players = stones, ("Ann", "Bob")

    def first_prompt(self) -> list[dict[str, str]]:
        return [self.asked("Ann")]

    def asked(self, player: str) -> dict[str, str]:
        return {
            "role": "user",
            "content": f"You are {player}. {self.stones} stones are left. How many do you take?",
        }

    def answer(self, rollout: Rollout) -> tuple[Rollout, list[dict[str, str]] | None]:
        turn = len(rollout.steps) - 1
        said = rollout.final_content.strip()
        taken = int(said) if said in ("1", "2", "3") and int(said) <= self.stones else 0
        self.stones -= taken
        if taken and self.stones:
            return rollout, [self.asked(self.players[(turn + 1) % 2])]
        winner = turn % 2 if taken else (turn + 1) % 2
        steps = tuple(
            step._replace(reward=1.0 if i % 2 == winner else -1.0)
            for i, step in enumerate(rollout.steps)
        )
        return (
            rollout._replace(
                steps=steps, metadata={**rollout.metadata, "winner": self.players[winner]}
            ),
            None,
        )

    def state(self) -> dict[str, Any]:
        return {"stones": self.stones}


def nim(*, stones: int) -> Environment:
    """The game of both players, as an environment."""
    return Environment(session=lambda task: Nim(stones), max_steps=stones)


def sawtooth(step: int, *, low: float, high: float) -> float:
    """high, low, high, low: step → number."""
    CALLS["schedule"] += 1
    return low if step % 2 else high
