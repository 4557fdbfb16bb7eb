"""Do replies depend on how many rows are decoded together? Count the tokens that change.

    rlkit get smollm2_135m
    python experiments/benchmarks/flips.py [--precision float32 bfloat16] [--batches 64 8 1]

SmolLM2-135M with adapters of rank 16 replies to word problems, 8 samples to each, with the engine
`cached` at temperature 1. The same rows with the same noise are decoded once in each size of batch.
A flip is the first token of a reply that differs from the reply in the first size; later tokens of
that reply have another context and do not count. Sums in another order change the last bits of
log-probs, and a token flips if its draw lies that near to the border to another token.

flips.csv has a row for each precision and size. The counts do not depend on the load of the
machine.
"""

from __future__ import annotations

from typing import Any

import bench
import torch
from check_forecast import stories
from served import completions

from rlkit.functional import mix
from rlkit.models import LoRA, encode_prompt, load_policy

GROUP = 8


def count_flips(ours: list[Any], theirs: list[Any]) -> tuple[int, int]:
    """Return the number of replies that differ, and of tokens up to their first differences."""
    flips = tokens = 0
    for a, b in zip(ours, theirs, strict=True):
        equal = [x == y for x, y in zip(a.token_ids, b.token_ids, strict=False)]
        differs = a.token_ids != b.token_ids
        first = equal.index(False) if False in equal else len(equal)
        flips += differs
        tokens += first + differs
    return flips, tokens


def measure(precision: str, given: Any) -> list[dict[str, Any]]:
    """Decode the rows in each size of batch, and return a row for each size after the first."""
    policy = load_policy(path="get:smollm2_135m", dtype=precision, lora=LoRA(rank=16))
    rows = [row["prompt"] for row in stories(given.rows // GROUP)]
    prompts = [
        tuple(encode_prompt(policy.renderer, [{"role": "user", "content": text}]))
        for text in rows
        for _ in range(GROUP)
    ]
    seeds = [mix(0, i) for i in range(len(prompts))]
    replies = {
        size: completions(
            "cached", policy, prompts, seeds, max_new_tokens=given.tokens, max_rows=size
        )
        for size in given.batches
    }
    first, *others = given.batches
    out = []
    for size in others:
        flips, tokens = count_flips(replies[first], replies[size])
        out.append(
            {
                "precision": precision,
                "batch": size,
                "against": first,
                "flips": flips,
                "tokens": tokens,
                "tokens_a_flip": round(tokens / flips) if flips else "",
                "replies": len(prompts),
            }
        )
    return out


def main() -> None:
    parser = bench.parser(__doc__, rounds=1, threads=1, device=False)
    names = ("float32", "bfloat16")
    parser.add_argument("--precision", nargs="+", choices=names, default=names)
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 8, 1])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    if given.quick:
        given.precision, given.rows, given.tokens = ["float32"], GROUP, 2
    torch.set_num_threads(given.threads)
    for precision in given.precision:
        rows = [row | bench.provenance(given.threads) for row in measure(precision, given)]
        bench.write(given.out, "flips", rows, by=("precision",))


if __name__ == "__main__":
    main()
