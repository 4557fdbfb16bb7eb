"""Tokens a second of the rollout engines on one machine: `transformers` (Hugging Face generate) against `cached`.

    python experiments/benchmarks/decode.py [--rows 64 256] [--tokens 96] [--rounds 5] [--threads 2]

The embedded model, real prompts of the default task, groups of 8. No reply ends before its limit, so both engines draw the same number of
tokens. Rounds alternate between the engines; medians and the median of the paired ratios go into decode.csv. The prompts are read anew in
every round and count in neither figure, their time does in both.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

from rlkit.environments import calculator, tool_schema
from rlkit.functional import mix
from rlkit.generation import cached, generate
from rlkit.models import encode_prompt, load_policy
from rlkit.tasks import arithmetic

HERE = Path(__file__).parent
ENGINES = {"transformers": generate, "cached": cached}
NEVER = (1,)  # the id of a byte that the model does not write


def measure(rows: int, tokens: int, rounds: int, threads: int) -> list[dict]:
    """One row an engine."""
    torch.set_num_threads(threads)
    policy = load_policy(path="tiny")._replace(eos_token_ids=NEVER)
    tasks = arithmetic(split="train", seed=0, max_samples=rows // 8)
    tools = [tool_schema(calculator)]
    contexts = [tuple(encode_prompt(policy.codec, task.messages, tools)) for task in tasks for _ in range(8)]
    seeds = [mix(0, i) for i in range(rows)]
    seconds: dict[str, list[float]] = {name: [] for name in ENGINES}
    replies = {}
    for number in range(rounds + 1):
        for name, engine in ENGINES.items():
            begun = time.perf_counter()
            replies[name] = engine(policy, contexts, seeds, max_new_tokens=tokens)
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - begun)
    same = sum(a.token_ids == b.token_ids for a, b in zip(*replies.values(), strict=True)) / rows
    pairs = [a / b for a, b in zip(seconds["transformers"], seconds["cached"], strict=True)]
    return [
        {
            "engine": name,
            "rows": rows,
            "prompt_tokens": round(statistics.fmean(map(len, contexts))),
            "new_tokens": tokens,
            "tokens_per_second": round(rows * tokens / statistics.median(times)),
            "seconds": round(statistics.median(times), 3),
            "slowest": round(max(times), 3),
            "times_transformers": round(statistics.median(pairs), 2) if name == "cached" else 1.0,
            "same_replies": same,
            "rounds": rounds,
            "threads": threads,
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "torch": version("torch"),
            "transformers": version("transformers"),
        }
        for name, times in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    rows = [row for n in given.rows for row in measure(n, given.tokens, given.rounds, given.threads)]
    with (HERE / "decode.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print({key: row[key] for key in ("engine", "rows", "tokens_per_second", "times_transformers", "same_replies")})


if __name__ == "__main__":
    main()
