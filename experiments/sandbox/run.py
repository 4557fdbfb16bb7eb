"""How fast does the sandbox run programs, and which of MBPP's reference solutions can it check?

    python experiments/sandbox/run.py MBPP.jsonl [--programs 200]

The script measures the latency of one program after another at every level available on this
kernel, and the throughput of all cores. Then it runs every reference solution. It prints tables;
the README has their contents.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from rlkit.rewards import judgements
from rlkit.sandbox import Job, Sandbox, find_level
from rlkit.sandbox.level import CHOICES, run_many
from rlkit.sandbox.process import count_workers, run_with
from rlkit.tasks import mbpp
from rlkit.types import Rollout, Step, Task

SANDBOX = Sandbox()


def latency(jobs: Sequence[Job], features: Sequence[str]) -> list[float]:
    """Return the seconds of each program from the call to its outcome, one at a time, sorted."""
    seconds = []
    for job in jobs:
        start = time.perf_counter()
        run_with(job, SANDBOX, features)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)


def processor(jobs: Sequence[Job], features: Sequence[str]) -> float:
    """Return the processor seconds per program, of parent and child.

    A busy machine changes them little.
    """
    before = os.times()
    for job in jobs:
        run_with(job, SANDBOX, features)
    after = os.times()
    return sum(after[:4]) / len(jobs) - sum(before[:4]) / len(jobs)


def throughput(jobs: Sequence[Job], features: Sequence[str]) -> float:
    """Return the programs per second of all workers together."""
    start = time.perf_counter()
    run_many(jobs, SANDBOX, features)
    return len(jobs) / (time.perf_counter() - start)


def answered(task: Task) -> Rollout:
    """Return the reference solution as a reply, to be judged by all tests.

    The test shown in the prompt is one of them.
    """
    tests = (task.metadata["shown"], *task.metadata["tests"])
    step = Step(
        prompt=(),
        prompt_ids=(),
        response_ids=(),
        logprobs=(),
        finish_reason="stop",
        content=task.answer,
    )
    return Rollout(task._replace(metadata={**task.metadata, "tests": tests}), (step,))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mbpp", type=Path, help="a .jsonl file of MBPP rows")
    parser.add_argument("--programs", type=int, default=200)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.mbpp.read_text().splitlines()]
    tasks = [
        t
        for split in ("train", "test")
        for t in mbpp(path=str(arguments.mbpp), split=split, seed=0, exclude=())
    ]
    rollouts = [answered(task) for task in tasks]
    jobs = [Job(r["code"], ("1",)) for r in rows if r["task_id"] not in (123,)][
        : arguments.programs
    ]
    cores = min(count_workers(SANDBOX), os.cpu_count() or 1)
    print(f"{find_level()}\n{len(jobs)} reference solutions of MBPP, {cores} workers\n")
    print(
        "| level | median | p95 | one after another | all workers | per core | processor time"
        " |\n|---|---|---|---|---|---|---|"
    )
    for features in CHOICES:
        if set(features) <= set(find_level().features):
            seconds, many = latency(jobs, features), throughput(jobs, features)
            p95 = seconds[int(0.95 * len(seconds))]
            print(
                f"| {'+'.join(features) or 'limits only'} | {1e3 * statistics.median(seconds):.0f}"
                f" ms | {1e3 * p95:.0f} ms | {1 / statistics.mean(seconds):.1f} /s | {many:.1f} /s"
                f" | {many / cores:.1f} /s | {1e3 * processor(jobs, features):.0f} ms |"
            )
    print(f"\n{len(rows)} rows, {len(tasks)} with tests that can be split")
    found = {
        r.task.id.rpartition("/")[2]: v
        for r, v in zip(rollouts, judgements(rollouts), strict=True)
        if v
    }
    failed = {name: v for name, v in found.items() if v.status != "ok"}
    print(f"{len(found) - len(failed)} reference solutions pass; the others:")
    for name, judgement in sorted(failed.items()):
        print(
            f"  {name}: {judgement.status}, {judgement.passed} of {judgement.total} tests,"
            f" {judgement.detail}"
        )


if __name__ == "__main__":
    main()
