"""Do programs written without rlkit train? One run of each agent in this folder, on two cores.

    pip install -c constraints.txt -e '.[programs]' anthropic "pydantic-ai-slim[openai]" mcp
    python experiments/programs/run.py [--agents agent mcp_agent pydantic_agent] [--seeds 0] \\
        [--steps 8] [--n 32] [--prompts 8]

The script needs no network. It writes results.csv beside itself: greedy test accuracy before and
after, and the versions of the clients. Rows of other agents and seeds stay. PYTHONPATH is passed on
to the programs, so that packages of another folder are found.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent.resolve()
PACKAGES = {
    "plain_agent": (),
    "agent": ("openai",),
    "anthropic_agent": ("anthropic",),
    "mcp_agent": ("mcp",),
    "pydantic_agent": ("pydantic-ai-slim", "openai"),
}


def trained(agent: str, seed: int, steps: int, n: int, prompts: int) -> dict:
    """Train one run and return its row."""
    words = [
        "train",
        "environment=program",
        f"environment.command=[python,'{HERE / agent}.py']",
        f"seed={seed}",
        f"trainer.steps={steps}",
        f"evaluation.n={n}",
        f"batch.prompts={prompts}",
        "environment.max_turns=4",
        "logger=none",
        f"environment.variables={{PYTHONPATH:'{os.environ.get('PYTHONPATH', '')}'}}",
    ]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "rlkit", *words],
            check=True,
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )
        summary = json.loads(next(Path(folder).glob("outputs/*/*/summary.json")).read_text())
    return {
        "agent": agent,
        "versions": " ".join(f"{name}=={version(name)}" for name in PACKAGES[agent]),
        "seed": seed,
        "steps": steps,
        "prompts": prompts,
        "before": summary["before"]["accuracy"],
        "after": summary["after"]["accuracy"],
        "n": summary["after"]["n"],
        "seconds": round(time.monotonic() - begun),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--agents", nargs="+", choices=PACKAGES, default=["agent", "mcp_agent", "pydantic_agent"]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    for name, value in {"steps": 8, "n": 32, "prompts": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, default=HERE / "results.csv")
    arguments = parser.parse_args()
    rows = {}
    if arguments.out.exists():
        with arguments.out.open(newline="") as file:
            rows = {(row["agent"], row["seed"]): row for row in csv.DictReader(file)}
    for agent in arguments.agents:
        for seed in arguments.seeds:
            row = trained(agent, seed, arguments.steps, arguments.n, arguments.prompts)
            rows[agent, str(seed)] = row
            print(row, flush=True)
            with arguments.out.open(
                "w", newline=""
            ) as file:  # after each run, so that an interruption loses no row
                writer = csv.DictWriter(file, row)
                writer.writeheader()
                writer.writerows(rows.values())


if __name__ == "__main__":
    main()
