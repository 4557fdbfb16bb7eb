"""Do programs that know nothing of rlkit train? One run of each agent beside this file, on two cores, without a network.

    pip install "rlkit-lm[programs]" anthropic "pydantic-ai-slim[openai]"
    python experiments/programs/run.py [--agents agent anthropic_agent pydantic_agent] [--seeds 0] [--steps 6] [--n 32] [--prompts 8]

Writes results.csv beside itself: greedy test accuracy before and after, and the versions of the clients. Packages of another folder
are found by PYTHONPATH, which is passed on to the programs.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent.resolve()
PACKAGES = {"plain_agent": (), "agent": ("openai",), "anthropic_agent": ("anthropic",), "pydantic_agent": ("pydantic-ai-slim", "openai")}


def trained(agent: str, seed: int, steps: int, n: int, prompts: int) -> dict:
    """One run: its row."""
    words = [
        "train", "environment=program", f"environment.command=[python,'{HERE / agent}.py']", f"seed={seed}", f"trainer.steps={steps}",
        f"evaluation.n={n}", f"batch.prompts={prompts}", "environment.max_turns=4", "logger=none",
        f"environment.variables={{PYTHONPATH:'{os.environ.get('PYTHONPATH', '')}'}}",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "rlkit", *words], check=True, cwd=folder, stdout=subprocess.DEVNULL)
        summary = json.loads(next(Path(folder).glob("outputs/*/*/summary.json")).read_text())
    return {
        "agent": agent, "versions": " ".join(f"{name}=={version(name)}" for name in PACKAGES[agent]), "seed": seed, "steps": steps,
        "prompts": prompts, "before": summary["before"]["accuracy"], "after": summary["after"]["accuracy"], "n": summary["after"]["n"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--agents", nargs="+", choices=PACKAGES, default=["agent", "anthropic_agent", "pydantic_agent"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    for name, value in {"steps": 6, "n": 32, "prompts": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, default=HERE / "results.csv")
    arguments = parser.parse_args()
    rows = []
    for agent in arguments.agents:
        for seed in arguments.seeds:
            rows.append(trained(agent, seed, arguments.steps, arguments.n, arguments.prompts))
            print(rows[-1], flush=True)
            with arguments.out.open("w", newline="") as file:  # after each run, so that an interrupted study keeps what it has
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
