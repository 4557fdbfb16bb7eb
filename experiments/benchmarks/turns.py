"""Does a turn of an append-only episode cost only its new tokens, or its whole history again?

    python experiments/benchmarks/turns.py [--rows 32] [--turns 50] [--rounds 3] [--threads 2] \\
        [--once] [--kernel eager]

The script compares the seconds of turn 5 and of turn 50. Every turn adds 16 tokens and samples 8,
with the embedded model. A context is therefore about 150 tokens long at turn 5, and 1,250 at turn
50. The episodes keep pace with each other, since no reply ends before its limit.

turns.csv has, for each engine, the seconds and the tokens through the model at both turns. The last
column is the same ratio for one decode step of the model's own forward. The tokens are counted
by a hook, and a model with hooks decodes by calls of torch.

`--once` only prints the processor seconds of one round of `cached`, for a comparison with another
checkout (served.py). It counts no tokens and sets no hook, so `--kernel` chooses the way of
decoding.
"""

from __future__ import annotations

import statistics
import time

import bench
import torch
from served import completions

from rlkit.functional import mix
from rlkit.models import load_policy

NEW, DRAWN = 16, 8


def context_length(turn: int) -> int:
    """Return the number of tokens before the reply of a turn, counted from 1."""
    return 48 + (turn - 1) * (NEW + DRAWN)


def counted(policy, rows: int, turns: int, engine: str) -> tuple[dict[int, float], dict[int, int]]:
    """Return the seconds and the tokens through the model, by turn."""
    read, now = dict.fromkeys(range(1, turns + 2), 0), [1]
    hook = policy.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: read.__setitem__(
            now[0], read[now[0]] + kwargs["input_ids"].numel()
        ),
        with_kwargs=True,
    )
    seconds = episodes(policy, rows, turns, engine, now=now)
    hook.remove()
    return seconds, read


def episodes(
    policy,
    rows: int,
    turns: int,
    engine: str,
    *,
    kernel: str = "auto",
    now: list[int] | None = None,
) -> dict[int, float]:
    """Return the seconds by turn. `now` holds the number of the current turn."""
    marks = {0: time.perf_counter()}
    now = [1] if now is None else now
    held = {i: tuple(100 + (7 * i + j) % 500 for j in range(48)) for i in range(rows)}
    done = [0]

    def follow(index: int, reply) -> tuple[tuple[int, ...], int] | None:
        held[index] += reply.token_ids + tuple(200 + (index + j) % 300 for j in range(NEW))
        done[0] += 1
        if done[0] % rows == 0:
            marks[now[0]] = time.perf_counter()
            now[0] += 1
        return (
            (held[index], mix(index, done[0] // rows))
            if now[0] <= turns and len(marks) <= turns
            else None
        )

    if engine == "cached":
        prompts = [held[i] for i in range(rows)]
        completions(
            engine,
            policy,
            prompts,
            [mix(i) for i in range(rows)],
            max_new_tokens=DRAWN,
            follow=follow,
            kernel=kernel,
        )
    else:
        for _ in range(turns):
            prompts = [held[i] for i in range(rows)]
            replies = completions(
                engine, policy, prompts, [mix(i) for i in range(rows)], max_new_tokens=DRAWN
            )
            for i, reply in enumerate(replies):
                follow(i, reply)
    return {turn: marks[turn] - marks[turn - 1] for turn in range(1, turns + 1)}


def decode_step(policy, rows: int, length: int, rounds: int = 20) -> float:
    """Return the seconds of one token for all rows after `length` tokens.

    Only the model's own forward with its own cache is timed.
    """
    ids = torch.randint(100, 600, (rows, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache = policy.model(input_ids=ids, use_cache=True).past_key_values
        times = []
        for _ in range(rounds):
            begun = time.perf_counter()
            policy.model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
            times.append(time.perf_counter() - begun)
            cache.crop(-1)
    return statistics.median(times)


def main() -> None:
    parser = bench.parser(__doc__, rounds=3, device=False)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--kernel", default="auto", help="of --once")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.rows, given.turns = 1, 2, 6
    torch.set_num_threads(given.threads)
    policy = load_policy(path="tiny")._replace(eos_token_ids=bench.NEVER)
    if given.once:
        bench.once(lambda: episodes(policy, given.rows, given.turns, "cached", kernel=given.kernel))
        return
    early, late = 5, given.turns
    hand = decode_step(policy, given.rows, context_length(late)) / decode_step(
        policy, given.rows, context_length(early)
    )
    rows = []
    for engine in ("transformers", "cached"):
        runs = [counted(policy, given.rows, given.turns, engine) for _ in range(given.rounds)]
        seconds = {turn: statistics.median(run[0][turn] for run in runs) for turn in (early, late)}
        rows.append(
            {
                "engine": engine,
                "rows": given.rows,
                **{f"context_{turn}": context_length(turn) for turn in (early, late)},
                **{f"seconds_{turn}": round(seconds[turn], 4) for turn in (early, late)},
                **{f"tokens_{turn}": runs[0][1][turn] for turn in (early, late)},
                "ratio": round(seconds[late] / seconds[early], 2),
                "ratio_of_a_decode_step": round(hand, 2),
                "whole_run_seconds": round(
                    statistics.median(sum(run[0].values()) for run in runs), 2
                ),
                "rounds": given.rounds,
            }
            | bench.provenance(given.threads)
        )
    bench.write(given.out, "turns", rows)


if __name__ == "__main__":
    main()
