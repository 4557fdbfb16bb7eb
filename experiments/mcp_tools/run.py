"""Does a policy learn equally well with a tool on an MCP server and with the same function?

    pip install -c constraints.txt -e '.[mcp]'
    python experiments/mcp_tools/run.py [--seeds 0 1 2] [--steps 25]

First it plays 64 episodes each way with the same weights: with the function in the process, with a
shared server, and with a server process for each episode. Their token ids must be equal, and their
log-probs are compared. Then it trains the default run with the function and with the shared server.
It writes results.csv beside itself and needs no network.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
COMMAND = [sys.executable, str(HERE / "calculator_server.py")]
ENV = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # an MCP server inherits almost no variables


def equal_episodes(seed: int) -> dict:
    """Play 64 episodes each way and compare their token ids and log-probs.

    The ways are the tool in the process, a shared server, and a process for each episode that
    calls.
    """
    import rlkit
    from rlkit.environments import calculator, tool_use
    from rlkit.extras.programs import mcp
    from rlkit.tasks import arithmetic

    policy, tasks = rlkit.load_policy(path="tiny"), arithmetic(max_samples=16)
    server = {"command": COMMAND, "env": ENV}
    ways = {
        "in_process": tool_use(tools={"calculator": calculator}),
        "shared": mcp(servers={"calculator": server | {"shared": True}}),
        "process_each": mcp(servers={"calculator": server}),
    }
    played = {
        name: rlkit.collect(policy, tasks, way, group_size=4, seed=seed, max_new_tokens=64)
        for name, way in ways.items()
    }
    own = [step for rollout in played["in_process"] for step in rollout.steps]
    row = {"seed": seed, "replies": len(own), "calls": sum(len(step.tool_calls) for step in own)}
    for name in ("shared", "process_each"):
        steps = [step for rollout in played[name] for step in rollout.steps]
        for key in ("prompt_ids", "response_ids"):
            assert [getattr(s, key) for s in steps] == [getattr(s, key) for s in own], (
                f"seed {seed}: other {key} with {name}"
            )
        gaps = [
            abs(a - b)
            for s, o in zip(steps, own, strict=True)
            for a, b in zip(s.logprobs, o.logprobs, strict=True)
        ]
        row[f"largest_difference_{name}"] = max(gaps)
    return row


def trained(seed: int, steps: int, *overrides: str) -> dict:
    """Train the default run with these overrides and return its summary."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", f"seed={seed}", f"trainer.steps={steps}", "logger=none", *overrides]
        subprocess.run(
            [sys.executable, "-m", "rlkit", *words],
            check=True,
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )
        return json.loads(next(Path(folder).glob("outputs/*/*/summary.json")).read_text())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=25)
    arguments = parser.parse_args()
    words = ",".join(f"'{word}'" for word in COMMAND)
    env = ",".join(f"{key}: '{value}'" for key, value in ENV.items())
    served = (
        f"environment.servers={{calculator: {{command: [{words}], shared: true, env: {{{env}}}}}}}"
    )
    rows = []
    for seed in arguments.seeds:
        row = equal_episodes(seed)
        for name, overrides in {"in_process": [], "mcp": ["environment=mcp", served]}.items():
            summary = trained(seed, arguments.steps, *overrides)
            row |= {
                f"{name}_before": summary["before"]["accuracy"],
                f"{name}_after": summary["after"]["accuracy"],
            }
        rows.append(row | {"steps": arguments.steps, "n": summary["after"]["n"]})
        print(rows[-1], flush=True)
    with (HERE / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
