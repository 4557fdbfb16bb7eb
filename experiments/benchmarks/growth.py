"""What grows with the turns of an episode: memory, file size, or the memory of a training run?

    python experiments/benchmarks/growth.py [--turns 5 20 50]

The script makes 64 episodes with the embedded tokenizer and 24 random tokens per turn, under both
histories. `memory_mib` is the size of every Python object in the rollouts, each counted once.
`lines_mib` and `file_mib` are the sizes of their JSON lines, plain and compressed. These bytes are
counted, so any machine gives the same. The last row of a history has an empty `turns`, and the
exponents k of bytes ~ turns^k: 1 is linear.

`peak_mib` is the peak memory of `rlkit train` in two RL steps of 8 × 8 episodes of up to 64 tokens
per turn, in its own process. Nearly all of it is torch, the engine's cache and the update.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import bench

EPISODES, DRAWN = 64, 24
BYTES = ("memory_mib", "lines_mib", "file_mib")
RUN = [
    "train",
    "kl=none",
    "reference=none",
    "evaluation.n=0",
    "logger=none",
    "trainer.steps=2",
    "batch.prompts=8",
    "batch.group_size=8",
    "reward=numeric",
    "reward.terms.numeric.fn._target_=bench.solved",
    "generation.max_new_tokens=64",
    "environment=single_turn",
    "environment._target_=bench.talk",
    "trainer.accelerator=cpu",
    "~callbacks.checkpoint",
]


def played(turns: int, history: str) -> list[Any]:
    """Return episodes of `turns` turns, sampled from an engine that returns random tokens."""
    from rlkit.engines import Batched
    from rlkit.environments import single_turn
    from rlkit.episodes import collect
    from rlkit.models import load_policy
    from rlkit.types import Generation, Task

    draw = random.Random(0)

    def reply() -> Generation:
        return Generation(
            tuple(draw.choices(range(100, 700), k=DRAWN)),
            tuple(draw.gauss(-2, 1) for _ in range(DRAWN)),
            "stop",
        )

    environment = single_turn()._replace(
        next_prompt=lambda r, i: "Go on, please.", max_steps=turns, history=history
    )
    tasks = [
        Task(f"row/{i}", ({"role": "user", "content": f"Question {i}"},)) for i in range(EPISODES)
    ]
    policy = load_policy(path="tiny")._replace(context_length=1 << 20)
    return collect(
        policy,
        tasks,
        engine=Batched(lambda policy, prompts, *_: [reply() for _ in prompts]),
        environment=environment,
    )


def held(value: Any, seen: set[int]) -> int:
    """Return the bytes of an object and of everything inside it, each object counted once."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    inside = (
        [*value.keys(), *value.values()]
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return sys.getsizeof(value) + sum(held(item, seen) for item in inside)


def counted(turns: int, history: str) -> dict[str, Any]:
    """Return the bytes of the episodes with this number of turns."""
    from rlkit.episodes import save_rollouts

    rollouts = played(turns, history)
    sizes = [held(rollouts, set())]
    with tempfile.TemporaryDirectory() as folder:
        for ending in (".jsonl", ".jsonl.gz"):
            save_rollouts(file := Path(folder) / f"rollouts{ending}", rollouts)
            sizes.append(file.stat().st_size)
    return {"history": history, "turns": turns, "tokens": turns * EPISODES * DRAWN} | {
        name: round(size / 2**20, 3) for name, size in zip(BYTES, sizes, strict=True)
    }


def peak(turns: int) -> None:
    """Run rlkit in this child process, and answer with its peak memory in MiB."""
    from rlkit.commands.cli import main as rlkit

    with tempfile.TemporaryDirectory() as folder:
        status = rlkit(
            [
                *RUN,
                f"+environment.turns={turns}",
                "trainer.threads=1",
                f"hydra.run.dir={folder}/run",
            ]
        )
    if not status:
        bench.answer(round(bench.memory("VmHWM")))


def main() -> None:
    parser = bench.parser(__doc__, rounds=1, threads=1, device=False)
    parser.add_argument("--turns", type=int, nargs="+", default=[5, 20, 50])
    parser.add_argument("--peak", type=int, help="in a child: turns of a run")
    given = parser.parse_args()
    if given.peak:
        peak(given.peak)
        return
    turns = [2, 4, 8] if given.quick else given.turns
    last = {"rounds": 1} | bench.provenance(given.threads)
    rows: list[dict[str, Any]] = []
    for history in ("keep_thinking", "strip_thinking"):
        own = [counted(count, history) for count in turns]
        for row in own[: 1 if given.quick else None] if history == "keep_thinking" else ():
            row["peak_mib"] = bench.child(
                [bench.PYTHON, __file__, "--peak", str(row["turns"])], threads=given.threads
            )
        fits = {
            f"{name}_exponent": round(bench.exponent(turns, [row[name] for row in own])[0], 2)
            for name in BYTES
        }
        rows += [row | last for row in own] + [{"history": history, "turns": ""} | fits | last]
    bench.write(given.out, "growth", rows)


if __name__ == "__main__":
    main()
