"""How many torch threads pay, and how much does a run lose beside busy processes?

    python experiments/benchmarks/threads.py

neighbours: seconds per RL step of the default run, alone and beside one and three processes that
never rest. It runs with torch's own choice of threads, which spin between operations, with the same
threads but no spinning, and with the choice of `rlkit train`.

sizes: seconds of a decode step and of an update, for models of one to about fifty million
parameters, with one and two threads, alone. `rlkit.system.processors.PARAMETERS_PER_THREAD` is
based on these figures.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import bench

WAYS = {  # name → (overrides, environment)
    "all cores, spinning": ([f"trainer.threads={os.cpu_count()}"], {"OMP_WAIT_POLICY": "active"}),
    "all cores, not spinning": (
        [f"trainer.threads={os.cpu_count()}"],
        {"OMP_WAIT_POLICY": "passive"},
    ),
    "as chosen": ([], {}),
}
SHAPES = {
    1: (128, 4),
    4: (256, 5),
    13: (384, 7),
    50: (640, 10),
}  # millions of parameters, about → hidden size, layers


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Within the block, run `count` processes that never rest."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def neighbours(
    rounds: int, counts: list[int], steps: int, extra: list[str], ways: dict = WAYS
) -> list[dict]:
    """Return the median seconds per step for each way and number of neighbours, ways in turn."""
    seconds: dict[tuple[int, str], list[float]] = {}
    for _ in range(rounds):
        for count in counts:
            for name, (overrides, environment) in ways.items():
                with tempfile.TemporaryDirectory() as folder, busy(count):
                    command = [
                        bench.PYTHON,
                        str(Path(__file__)),
                        "--child",
                        folder,
                        f"trainer.steps={steps}",
                        *overrides,
                        *extra,
                    ]
                    clean = {
                        k: v
                        for k, v in bench.environment(1).items()
                        if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
                    }
                    done = subprocess.run(
                        command, env=clean | environment, capture_output=True, text=True
                    )
                found = [line for line in done.stdout.splitlines() if line.startswith(bench.MARK)]
                if not found:
                    raise RuntimeError(
                        f"{' '.join(command)} ended with"
                        f" {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
                    )
                times = [
                    float(text) for text in found[-1][len(bench.MARK) :].strip("[]").split(",")
                ]
                seconds.setdefault((count, name), []).append(
                    statistics.median(times[1:] or times)
                )  # the first step warms up
    return [
        {
            "what": "step",
            "neighbours": count,
            "way": name,
            "seconds": round(statistics.median(times), 3),
            "rounds": rounds,
        }
        for (count, name), times in seconds.items()
    ]


def child(folder: str, overrides: list[str]) -> None:
    """Run rlkit in this process, and answer with its seconds per step."""
    bench.answer(bench.steps_of(overrides, Path(folder) / "run")[0])


def sizes(rounds: int, shapes: dict[int, tuple[int, int]]) -> list[dict]:
    """Return the median seconds of a decode step and of an update, for one and for two threads.

    A decode step has 64 rows; an update has 16 rows of 128 tokens. The numbers of threads
    alternate.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    rows = []
    for hidden, layers in shapes.values():
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=1024,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            num_key_value_heads=max(1, hidden // 64),
            head_dim=32,
            max_position_embeddings=512,
        )
        model = AutoModelForCausalLM.from_config(config)
        ids = torch.randint(1024, (64, 128))
        times: dict[tuple[str, int], list[float]] = {}
        for _ in range(rounds):
            for threads in (1, 2):
                torch.set_num_threads(threads)
                with torch.no_grad():
                    cache = model(ids[:, :64], use_cache=True).past_key_values
                    begun = time.perf_counter()
                    for i in range(64, 96):
                        cache = model(
                            ids[:, i : i + 1], past_key_values=cache, use_cache=True
                        ).past_key_values
                times.setdefault(("decode", threads), []).append((time.perf_counter() - begun) / 32)
                begun = time.perf_counter()
                model(ids[:16], labels=ids[:16]).loss.backward()
                model.zero_grad()
                times.setdefault(("update", threads), []).append(time.perf_counter() - begun)
        parameters = sum(p.numel() for p in model.parameters())
        for (what, threads), values in times.items():
            way = f"{threads} thread(s)"
            rows.append(
                {
                    "what": what,
                    "parameters": parameters,
                    "way": way,
                    "seconds": round(statistics.median(values), 5),
                    "rounds": rounds,
                }
            )
    return rows


def main() -> None:
    parser = bench.parser(__doc__, rounds=3, device=False)
    parser.add_argument(
        "--child", help="runs one training in this folder and says its seconds a step"
    )
    parser.add_argument("overrides", nargs="*", help="of the runs")
    given = parser.parse_intermixed_args()
    if given.child:
        return child(given.child, given.overrides)
    if given.quick:
        one = {"as chosen": WAYS["as chosen"]}
        rows = neighbours(
            1, [0], 2, ["debug=fast", "evaluation.n=0", *given.overrides], one
        ) + sizes(2, {1: SHAPES[1]})
    else:
        rows = sizes(9, SHAPES) + neighbours(given.rounds, [0, 1, 3], 5, given.overrides)
    bench.write(given.out, "threads", [row | bench.provenance(given.threads) for row in rows])


if __name__ == "__main__":
    main()
