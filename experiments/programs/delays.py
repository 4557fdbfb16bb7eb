"""Do delays and crashes of some programs change the tokens of the others?

    python experiments/programs/delays.py [--episodes 64] [--delay 2.0] [--crashes 0.1]

The script plays 64 episodes of one RL step three times, with fixed weights. Each program is a
process, waiting_agent.py. It waits before each request, for a random time seeded by its task's id;
some programs crash. The surviving episodes are compared with the same episodes without delays:
their token ids and log-probs. In the end the script counts left-over processes and sockets.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

from rlkit.environments import calculator, tool_schema
from rlkit.episodes import collect
from rlkit.extras.programs import program
from rlkit.models import load_policy
from rlkit.tasks import arithmetic
from rlkit.types import Environment, Rollout

AGENT = str(Path(__file__).with_name("waiting_agent.py").resolve())


def environment(delay: float, crashes: float) -> Environment:
    """Return an environment of programs that ask twice.

    delay: longest wait before each request, in seconds
    """
    tool = json.dumps(tool_schema(calculator))
    return program(
        command=["python", AGENT],
        variables={"DELAY": str(delay), "CRASHES": str(crashes), "TOOL": tool},
    )


def left_over() -> dict[str, int]:
    """Count the processes started by this one or its programs, and its open sockets (Linux)."""
    found = [
        child
        for task in Path("/proc/self/task").glob("*/children")
        for child in task.read_text().split()
    ]
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += [entry.name] * (AGENT.encode() in (entry / "cmdline").read_bytes())
    sockets = [
        fd
        for fd in Path("/proc/self/fd").iterdir()
        if os.path.exists(fd) and os.readlink(fd).startswith("socket:")
    ]
    return {"processes": len(found), "sockets": len(sockets)}


def compare(a: list[Rollout], b: list[Rollout]) -> dict[str, float]:
    """Compare the episodes that survive in both lists."""
    pairs = [
        (x, y) for x, y in zip(a, b, strict=True) if "error" not in (x.truncation, y.truncation)
    ]
    ids = sum(
        [s.response_ids for s in x.steps] != [s.response_ids for s in y.steps] for x, y in pairs
    )
    worst = max(
        (
            abs(p - q)
            for x, y in pairs
            for s, t in zip(x.steps, y.steps, strict=True)
            for p, q in zip(s.logprobs, t.logprobs, strict=False)
        ),
        default=0.0,
    )
    return {
        "episodes": len(a),
        "survive": len(pairs),
        "other tokens": ids,
        "largest difference of a log-prob": worst,
    }


def study(episodes: int, delay: float, crashes: float) -> dict[str, dict[str, float]]:
    """Compare delays alone, and delays with crashes, with undisturbed episodes."""
    policy = load_policy(path="tiny")
    tasks = arithmetic(split="test", seed=0, max_samples=episodes)
    before = left_over()

    def play(delay: float, crashes: float) -> list[Rollout]:
        return collect(
            policy, tasks, environment=environment(delay, crashes), seed=1, max_new_tokens=32
        )

    plain = play(0.0, 0.0)
    found = {
        "delays": compare(play(delay, 0.0), plain),
        "delays and crashes": compare(play(delay, crashes), plain),
    }
    return found | {"left over": {k: n - before[k] for k, n in left_over().items()}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--delay", type=float, default=2.0)
    parser.add_argument("--crashes", type=float, default=0.1)
    json.dump(study(**vars(parser.parse_args())), sys.stdout, indent=1)
