"""What do slow tools cost under each rule of admission, compared with an instant tool?

    python experiments/benchmarks/tools.py [--rounds 5] [--threads 2] [--tokens 96]

The script measures the seconds of a step of the embedded model with the engine `cached`. Every
episode has two replies, with one call of a tool in between, and the tool only waits. There are 64
episodes with a tool of 0.25 s, and 128 with a tool of 1 s. The text of a reply is not read as a
call: the call is added to each first reply, so that all episodes do the same.

Rounds alternate between the rules and the instant tool. tools.csv has medians; `more_than_instant`
is the median of the paired differences in seconds. `apart_s` is the time of all tool calls one
after the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import bench
import torch

from rlkit.engines import Cached
from rlkit.environments import answer_calls
from rlkit.episodes import collect
from rlkit.models import load_policy
from rlkit.tasks import arithmetic
from rlkit.types import Environment, Messages, Policy, Rollout, Task, ToolCall

CASES = ((64, 0.25), (128, 1.0))  # episodes, seconds of the tool
RULES = {
    "rounds": ("rounds", 16),
    "rounds, 96": ("rounds", 96),
    "barrier": ("barrier", 16),
    "free": ("free", 16),
}  # rule, rounds
ENDS = range(100, 760, 60)  # tokens that end a reply, so that lengths vary


def instant() -> str:
    """Does nothing."""
    return "done"


instant.bounded = True  # type: ignore[attr-defined]


class OneCall:
    """A session that answers the first reply with a tool's result, and ends after the second."""

    def __init__(self, task: Task, seconds: float):
        self.task, self.tools = task, {"wait": self.wait if seconds else instant}
        self.seconds = seconds

    def wait(self) -> str:
        """Waits."""
        time.sleep(self.seconds)
        return "done"

    def first_prompt(self) -> Messages:
        return self.task.messages

    async def answer(self, rollout: Rollout) -> tuple[Rollout, Messages | None]:
        if len(rollout.steps) > 1:
            return rollout, None
        called = rollout.steps[-1]._replace(tool_calls=(ToolCall("call_0", "wait", {}),))
        return await answer_calls(rollout._replace(steps=(*rollout.steps[:-1], called)), self.tools)


def step(
    policy: Policy, engine: Cached, tasks: Sequence[Task], seconds: float, **params: Any
) -> float:
    """Return the seconds of all episodes, one for each task."""
    environment = Environment(session=lambda task: OneCall(task, seconds), max_steps=3)
    begun = time.perf_counter()
    rollouts = collect(policy, tasks, engine=engine, environment=environment, **params)
    spent = time.perf_counter() - begun
    answered = [r for r in rollouts if len(r.steps) == 2 and r.steps[0].tool_results[0].ok]
    if len(answered) < 0.9 * len(rollouts):  # the others reached the length limit
        raise RuntimeError(
            f"only {len(answered)} of {len(rollouts)} episodes have called their tool and gone on"
        )
    return spent


def measure(
    policy: Policy, episodes: int, seconds: float, rounds: int, tokens: int
) -> list[dict[str, Any]]:
    """Return a row for each rule, and one for the instant tool."""
    engine, tasks = Cached(), arithmetic(split="train", seed=0, max_samples=episodes)
    kinds = {"instant": (0.0, "rounds", 16)} | {
        name: (seconds, *rule) for name, rule in RULES.items()
    }
    spent: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 1):
        for name, (own, rule, after) in kinds.items():
            params = {"admission": rule, "admission_rounds": after, "max_new_tokens": tokens}
            took = step(policy, engine, tasks, own, seed=number, **params)
            if number:  # the first warms up
                spent[name].append(took)
    return [
        {
            "episodes": episodes,
            "tool_s": kinds[name][0],
            "admission": name,
            "seconds": round(statistics.median(times), 3),
            "slowest": round(max(times), 3),
            "more_than_instant": round(
                statistics.median(a - b for a, b in zip(times, spent["instant"], strict=True)), 3
            ),
            "apart_s": episodes * kinds[name][0],
            "rounds": rounds,
        }
        for name, times in spent.items()
    ]


def main() -> None:
    parser = bench.parser(__doc__, rounds=5, device=False)
    parser.add_argument("--tokens", type=int, default=96, help="of a reply at most")
    given = parser.parse_args()
    cases = CASES
    if given.quick:
        given.rounds, cases = 1, ((8, 0.05),)
    torch.set_num_threads(given.threads)
    policy = load_policy(path="tiny")
    policy = policy._replace(eos_token_ids=(*policy.eos_token_ids, *ENDS))
    rows = [
        row
        for episodes, seconds in cases
        for row in measure(policy, episodes, seconds, given.rounds, given.tokens)
    ]
    bench.write(given.out, "tools", [row | bench.provenance(given.threads) for row in rows])


if __name__ == "__main__":
    main()
