"""Can recorded log-probs be recomputed from a finished run?

    python experiments/why/tokens.py [--tokens 1000] [--runs outputs/why/tokens]

The script trains two runs unless they exist: one with many turns, and one with overlapped sampling.
It picks 1,000 random tokens of each from a fixed seed, recomputes the policy version of each token
from the start of the run, and writes tokens.csv, a row for each run.
"""

from __future__ import annotations

import argparse
import csv
import functools
import random
import time
from pathlib import Path

from rlkit.commands.arguments import Arguments
from rlkit.commands.cli import main as main_command
from rlkit.config.problems.rows import load_tasks
from rlkit.extras.why.commands.why import compose_run
from rlkit.extras.why.evidence import read_evidence
from rlkit.extras.why.tokens import Token, find_token, measure_gaps, read_step
from rlkit.runs.folder import is_finished

FILE = Path(__file__).parent / "tokens.csv"
STEPS = 4
COMMON = (
    f"trainer.steps={STEPS}",
    "trainer.threads=1",
    "batch.prompts=4",
    "batch.group_size=4",
    "evaluation.n=0",
    "logger=none",
    "callbacks.checkpoint.model=false",
    "callbacks.checkpoint.every=1000",
    "callbacks.completions.every=0",
)
RUNS = {
    "turns": ("task=guess_number",),  # up to 50 turns
    "overlap": ("asynchrony=overlap", "asynchrony.staleness=1", "asynchrony.sampler.threads=1"),
}


read_once = functools.cache(read_step)


def draw_token(rng: random.Random, folder: Path) -> Token:
    """Return a random token of a random rollout of a random step."""
    step = rng.randint(1, STEPS)
    played = read_once(folder, step)
    rollout = rng.randrange(len(played))
    length = sum(len(said.sampled) for said in played[rollout].steps)
    return find_token(played, step, rollout, rng.randrange(length))


def main() -> None:
    """Write a row for each run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--runs", type=Path, default=Path("outputs/why/tokens"))
    given = parser.parse_args()
    rows = []
    for name, words in RUNS.items():
        folder = (given.runs / name).absolute()
        if not is_finished(folder):
            assert main_command(["train", *COMMON, *words, f"hydra.run.dir={folder}"]) == 0
        rng = random.Random(0)
        tokens = [draw_token(rng, folder) for _ in range(given.tokens)]
        x = compose_run(folder, str(folder), Arguments([], trusted=True), ()).x
        began = time.process_time()
        gaps = measure_gaps(x, load_tasks(x), read_evidence(folder), tokens)
        rows.append(
            {
                "run": name,
                "tokens": len(gaps),
                "turns": 1 + max(token.reply for token in tokens),
                "versions": len({token.version for token in tokens}),
                "behind": max(token.step - 1 - token.version for token in tokens),
                "largest_gap": f"{max(gaps):.2g}",
                "seconds": round(time.process_time() - began, 1),
            }
        )
        print(rows[-1], flush=True)
    with FILE.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
