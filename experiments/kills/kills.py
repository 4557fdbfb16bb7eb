"""Kills a run again and again with SIGKILL, at moments drawn from a seed, and compares its end with that of a run that nobody killed.

    python experiments/kills/kills.py [asynchrony=overlap|in_flight|lag|none] [kills=20] [seed=0]

Prints a line for each kill, and whether weights, optimizer, sampled tokens and rewards are the same, bit for bit. With overlap either
process is killed, as drawn. Linux; about ten seconds a kill.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch

RUN = [
    "debug=fast", "trainer.accelerator=cpu", "task.max_samples=32", "batch.prompts=2", "batch.group_size=4", "optimizer.lr=3e-3",
    "generation.max_new_tokens=24", "evaluation.n=0", "callbacks.checkpoint.every=2", "callbacks.checkpoint.model=false", "logger=none",
    "trainer.threads=1",
]  # fmt: skip
PER_KILL = 2  # steps
WAIT = 300.0  # seconds in which a run has to come as far as its next kill


def main() -> None:
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    mode, kills, seed = given.get("asynchrony", "overlap"), int(given.get("kills", 20)), int(given.get("seed", 0))
    steps, draw = PER_KILL * (kills + 1), random.Random(seed)
    stale = [] if mode == "none" else ["asynchrony.staleness=2"]
    words = [*RUN, f"trainer.steps={steps}", f"asynchrony={mode}", *stale]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        ended(start([*words, "hydra.run.dir=whole"]))
        print(f"| kill | process | after step | seconds later |\n|---|---|---|---|   ({mode}, seed {seed})")
        for kill in range(kills):
            run = start(["resume=run"] if Path("run").exists() else [*words, "hydra.run.dir=run"])
            sampler = reached(run, PER_KILL * kill, mode)
            who, later = draw.choice(["trainer", "sampler"]) if sampler else "trainer", draw.random()
            time.sleep(later)
            os.kill(sampler if who == "sampler" else run.pid, signal.SIGKILL)
            status = run.wait()
            assert status == (1 if who == "sampler" else -signal.SIGKILL), (status, Path("log").read_text()[-3000:])
            print(f"| {kill + 1} | {who} | {done()} | {later:.2f} |", flush=True)
        ended(start(["resume=run"]))
        one, other = (torch.load(f"{run}/checkpoints/step_{steps:06d}.ckpt", weights_only=True) for run in ("whole", "run"))
        for part in ("state_dict", "optimizer_states"):
            print(f"{part} after {steps} steps: {'the same' if same(one[part], other[part]) else 'DIFFERENT'}")
        rows = [[(r["step"], r["tokens/sampled"], r["reward/mean"]) for r in rows_of(run)] for run in ("whole", "run")]
        print(f"rows: {len(rows[1])} of {len(rows[0])}, {'the same' if rows[0] == rows[1] else 'DIFFERENT'}")
        sys.exit(not (same(one["state_dict"], other["state_dict"]) and rows[0] == rows[1]))


def start(words: list[str]) -> subprocess.Popen[bytes]:
    with open("log", "ab") as log:
        return subprocess.Popen([sys.executable, "-m", "rlkit", "train", *words], stdout=log, stderr=log)


def ended(run: subprocess.Popen[bytes]) -> None:
    assert run.wait() == 0, Path("log").read_text()[-3000:]


def rows_of(run: str) -> list[dict]:
    path = Path(run) / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [row for row in map(json.loads, lines) if "reward/mean" in row]


def done() -> int:
    return len(rows_of("run"))


def reached(run: subprocess.Popen[bytes], step: int, mode: str) -> int | None:
    """Waits until a run has done a step; the process id of its sampling process."""
    until = time.monotonic() + WAIT
    while time.monotonic() < until:
        assert run.poll() is None, Path("log").read_text()[-3000:]
        sampler = sampler_of(run.pid)
        if done() >= step and (sampler or mode != "overlap"):
            return sampler
        time.sleep(0.02)
    raise TimeoutError(f"no step {step} in {WAIT:g} s: {Path('log').read_text()[-3000:]}")


def sampler_of(pid: int) -> int | None:
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if b"sampling_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return None


def same(a, b) -> bool:
    """Whether two values are equal, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


if __name__ == "__main__":
    main()
