"""How many tokens does a sampler of problems save, if few problems carry a signal?

    python experiments/sampling/run.py [--seeds 0 1] [--only uniform variance] [--steps 800] \\
        [--known]

A problem carries a signal if the replies to it can get different rewards. The pool has problems of
two letters; one in ten has a right letter. No reply to the others is right, and their groups teach
nothing. The model is the bench's: 20,000 parameters, made on the spot, replies with a random letter
of eight.

Every run is `rlkit train` until `evaluation.stop_at=0.9`. The accuracy curve is greedy and counts
only the problems with a signal, so it shows how soon a pool is learned, not how well the learning
generalises. results.csv has a row for each run, and a run with a row is not repeated. `tokens`
counts the tokens read and sampled in training until the stop. The ratio to the uniform sampler is
paired by seed.

`--known`: every problem has a right letter. Before the run, the policy learns the letters of nine
problems in ten by imitation, and replies at random to the rest. Only the unknown problems then
carry a signal, and the policy already reads all prompts.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlkit.extras.bench.fresh import fresh_policy, pad_rows
from rlkit.extras.bench.tasks import LETTERS, Question, deal_tasks
from rlkit.types import Policy, Split, Task

sys.path.insert(0, str(Path(__file__).parents[1]))
from study import interval

HERE, TARGET, ONE_IN = Path(__file__).parent, 0.9, 10
COMMON = (
    "experiment=bench/noisy",
    "task._target_=run.pool",
    "model.prompt=2",
    "evaluation.every=2",
    f"evaluation.stop_at={TARGET}",
    "evaluation.curve_temperature=0",
    "model.opinions=0",
    "model.init_std=0.02",
    "optimizer.lr=3e-3",
)
SAMPLED = 512  # replies; the standard error of an accuracy is then at most 0.022
KNOWN = (
    "evaluation.curve_temperature=1",
    "task._target_=run.known_pool",
    "model._target_=run.knowing",
    "+model.pool=${task.max_samples}",
)
LESSONS, RATE = 800, 1e-2  # steps of AdamW before the run, on 128 problems each; learning rate
SOME = 0.2  # share of right letters in the lessons on a signal problem; others are random
SAMPLERS = ("uniform", "pools", "variance", "prioritised", "unsolved")


def pool(*, split: Split, seed: int, max_samples: int, placebo: str = "none") -> Sequence[Task]:
    """Return problems of two letters; one in ten has a right reply.

    Validation and test contain only the problems with a right reply.
    """
    rng = random.Random(f"pool of {seed}")
    prompts = rng.sample(
        [first + second for first in LETTERS[8:] for second in LETTERS[8:]], max_samples
    )
    rows = [
        Question(prompt, [] if i % ONE_IN else [rng.choice(LETTERS[:8])])
        for i, prompt in enumerate(prompts)
    ]
    rows = rows if split == "train" else rows[::ONE_IN]
    return deal_tasks(
        "pool", rows, [LETTERS[:8]], split=split, seed=seed, max_samples=len(rows), placebo="none"
    )


def known_pool(
    *, split: Split, seed: int, max_samples: int, placebo: str = "none"
) -> Sequence[Task]:
    """Return the problems of `--known`: every one has a right reply.

    The start policy knows the replies to nine in ten.
    """
    rows = _questions(seed, max_samples)
    rows, count = (rows, len(rows)) if split == "train" else (rows[::ONE_IN], SAMPLED)
    return deal_tasks(
        "pool", rows, [LETTERS[:8]], split=split, seed=seed, max_samples=count, placebo="none"
    )


def _questions(seed: int, count: int) -> list[Question]:
    rng = random.Random(f"known pool of {seed}")
    prompts = rng.sample([first + second for first in LETTERS[8:] for second in LETTERS[8:]], count)
    return [Question(prompt, [rng.choice(LETTERS[:8])]) for prompt in prompts]


def knowing(
    *, pool: int, seed: int = 0, device: torch.device | str = "cpu", **options: Any
) -> Policy:
    """Return the bench's fresh policy after lessons on a pool.

    The lessons teach the right letter of nine problems in ten, and a random letter for the rest.
    """
    policy = fresh_policy(seed=seed, **options)
    questions = _questions(seed, pool)
    model, rng = policy.model, random.Random(f"lessons of {seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for step in range(LESSONS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - step / LESSONS)
        texts = []
        for i in rng.choices(range(pool), k=128):
            letter = (
                questions[i].right[0]
                if i % ONE_IN or rng.random() < SOME
                else rng.choice(LETTERS[:8])
            )
            texts.append(f"<u>{questions[i].prompt}<end><a>{letter}<end>")
        ids, targets = pad_rows(
            [policy.renderer.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        )
        loss = torch.nn.functional.cross_entropy(
            model(input_ids=ids).logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return policy._replace(model=model.to(device))


def run(sampler: str, seed: int, given: argparse.Namespace) -> dict[str, str]:
    """Train one run and return its row. Raises: CalledProcessError."""
    own = [
        f"task/sampler={sampler}",
        f"seed={seed}",
        f"trainer.steps={given.steps}",
        f"task.max_samples={given.pool}",
        f"task.seed={seed}",
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "rlkit",
            "train",
            *COMMON,
            *own,
            *(KNOWN if given.known else ()),
            *given.set,
        ]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=environment)
        file = next(Path(folder).glob("outputs/*/*/summary.json"))
        summary = json.loads(file.read_text())
        rows = [
            json.loads(line) for line in (file.parent / "metrics.jsonl").read_text().splitlines()
        ]
    curve = {r["step"]: r["eval/accuracy"] for r in rows if "eval/accuracy" in r}
    reached = any(accuracy >= TARGET for accuracy in curve.values())
    found = {
        "sampler": sampler,
        "seed": seed,
        "reached": int(reached),
        "steps": summary["steps"],
        "tokens": summary["tokens"],
        "curve": " ".join(f"{step}:{accuracy:.3f}" for step, accuracy in curve.items()),
    }
    return {key: str(value) for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--only", nargs="+", default=list(SAMPLERS), choices=SAMPLERS)
    parser.add_argument("--steps", type=int, default=800, help="at most")
    parser.add_argument("--pool", type=int, default=320, help="training problems")
    parser.add_argument(
        "--known",
        action="store_true",
        help="a pool of which nine problems in ten are known at the start",
    )
    parser.add_argument("--set", nargs="*", default=[], help="further overrides")
    parser.add_argument("--results", type=Path, default=HERE / "results.csv")
    given = parser.parse_args()
    rows = list(csv.DictReader(given.results.open())) if given.results.exists() else []
    for seed in given.seeds:
        for sampler in given.only:
            if any((r["sampler"], r["seed"]) == (sampler, str(seed)) for r in rows):
                continue
            rows.append(run(sampler, seed, given))
            with given.results.open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0].keys())
                writer.writeheader()
                writer.writerows(rows)
    print(table(rows))


def table(rows: Sequence[dict[str, str]]) -> str:
    """Return the table with a line for each sampler.

    The ratio is the geometric mean over seeds, with Student's 95 % interval of its logarithm.
    """
    base = {r["seed"]: int(r["tokens"]) for r in rows if r["sampler"] == "uniform"}
    lines = [
        "| sampler | reached 0.9 | steps | tokens | uniform's tokens / its own, 95 % |",
        "|---|---|---|---|---|",
    ]
    for sampler in dict.fromkeys(r["sampler"] for r in rows):
        mine = [r for r in rows if r["sampler"] == sampler]
        steps, tokens = (sum(int(r[key]) for r in mine) / len(mine) for key in ("steps", "tokens"))
        logs = [math.log(base[r["seed"]] / int(r["tokens"])) for r in mine if r["seed"] in base]
        mean, half = interval(logs) if len(logs) > 2 else (sum(logs) / max(len(logs), 1), math.nan)
        ratio = (
            f"{math.exp(mean):.2f} ({math.exp(mean - half):.2f} – {math.exp(mean + half):.2f})"
            if half == half
            else f"{math.exp(mean):.2f}"
        )
        lines.append(
            f"| {sampler} | {sum(int(r['reached']) for r in mine)} of {len(mine)} | {steps:.0f} |"
            f" {tokens:,.0f} | {ratio} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
