"""How much does sampling ahead in a second process gain, and how much could it gain at most?

    python experiments/benchmarks/overlap.py

The script measures seconds per RL step of the default run, one thread per process, in turn:

    none      sampling, then the update
    overlap   a second process samples while this one updates (asynchrony=overlap, staleness 1);
              `handover` is the exchange of weights and groups between the processes
    ceiling   one process only samples and another only updates, at the same time and without any
              exchange; the slower process gives the seconds. Cores share caches and memory, so
              the ceiling is less than twice as fast as none

Each runs with the default engine, and with an engine that waits a second before it decodes, like an
engine on another machine. With the waiting engine, an overlapped step should take as long as the
longer of sampling and update. `reached` is the ceiling's seconds divided by those of overlap.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench

from rlkit.engines import Cached

WAIT = 1.0  # seconds of the waiting engine; a tenth of it with --quick
RUN = ["trainer.threads=1", "trainer.accelerator=cpu", "seed=0"]
WAYS = {"none": ["asynchrony=none"], "overlap": ["asynchrony=overlap", "asynchrony.staleness=1"]}


class Waiting(Cached):
    """The default engine with a pause before it samples a step."""

    def __init__(self, *, seconds: float, **settings: Any):
        super().__init__(**settings)
        self.seconds = seconds

    async def load(self, weights: Any, version: int) -> None:
        await asyncio.sleep(self.seconds)
        await super().load(weights, version)


def run(folder: str, overrides: list[str]) -> None:
    """Run rlkit in this process; answer with the seconds and metrics of its steps."""
    seconds, rows = bench.steps_of(overrides, Path(folder) / "run")
    wanted = (
        "perf/generate_s",
        "perf/update_s",
        "staleness/sampling_s",
        "staleness/handover_s",
        "staleness/wait_s",
    )
    bench.answer([seconds, *([row[key] for row in rows if key in row] for key in wanted)])


def side(what: str, folder: str, overrides: list[str], steps: int) -> None:
    """Do only the sampling or only the update in this process; answer with its seconds per step.

    The process starts when the other one is ready, and goes on until both have done their steps.
    """
    import torch

    from rlkit.config.compose import compose, experiment
    from rlkit.config.problems.rows import load_tasks
    from rlkit.episodes.stream import StreamState
    from rlkit.training.groups import experience
    from rlkit.training.learner import Learner

    x = experiment(compose(["logger=none", "schedule=constant", "evaluation.n=0", *overrides]))
    torch.set_num_threads(1)
    tasks, learner, stream = (
        load_tasks(x).train,
        Learner(x, x.model(device="cpu"), exact=True),
        StreamState(),
    )
    own = learner.begin()
    groups = experience(own, learner.policy, tasks, stream, step=0)[:2]
    here, other = (
        Path(folder) / f"{name}" for name in (what, {"sample": "update", "update": "sample"}[what])
    )
    here.mkdir()
    while not other.exists():
        time.sleep(0.01)
    times: list[float] = []
    while len(times) < steps or not (other / "done").exists():
        begun = time.perf_counter()
        if what == "sample":
            *_, stream = experience(own, learner.policy, tasks, stream, step=len(times))
        else:
            learner.step(*groups)
        times.append(time.perf_counter() - begun)
        if len(times) == steps:
            (here / "done").touch()
    bench.answer(times[:steps])


def ceiling(overrides: list[str], steps: int) -> tuple[float, float]:
    """Return the median seconds of a step's sampling and of its update.

    Two processes do the two kinds of work at the same time.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [bench.PYTHON, str(Path(__file__)), "--steps", str(steps)]
        started = [
            subprocess.Popen(
                [*command, "--side", what, "--folder", folder, *overrides],
                env=bench.environment(1),
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for what in ("sample", "update")
        ]
        said = [process.communicate()[0] for process in started]
    found = [[line for line in text.splitlines() if line.startswith(bench.MARK)] for text in said]
    if not all(found):
        raise RuntimeError("\n".join(text[-2000:] for text in said))
    sample, update = (
        statistics.median(bench.json.loads(lines[-1][len(bench.MARK) :])) for lines in found
    )
    return sample, update


def engines(wait: float) -> dict[str, list[str]]:
    """Return the overrides of each engine, by name."""
    waiting = ["generation.engine._target_=overlap.Waiting", f"+generation.engine.seconds={wait}"]
    return {"cached": [], f"cached and {wait:g} s": waiting}


def measured(rounds: int, steps: int, extra: list[str], wait: float = WAIT) -> list[dict[str, Any]]:
    """Return a row for each engine and way."""
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for turn in range(rounds):
        for engine, words in engines(wait).items():
            for way in list(WAYS)[:: 1 if turn % 2 else -1]:
                with tempfile.TemporaryDirectory() as folder:
                    own = [*RUN, *WAYS[way], f"trainer.steps={steps + 2}", *words, *extra]
                    parts = bench.child(
                        [bench.PYTHON, str(Path(__file__)), "--folder", folder, *own], threads=1
                    )
                kept = [
                    statistics.median(values[1:-1] or values) if values else 0.0 for values in parts
                ]  # the first step warms up
                found.setdefault((engine, way), []).append(tuple(kept))
            sample, update = ceiling([*RUN, *words, *extra], steps)
            found.setdefault((engine, "ceiling"), []).append(
                (max(sample, update), sample, update, 0.0, 0.0, 0.0)
            )
    rows = []
    for (engine, way), kept in found.items():
        step, generate, update, sampling, handover, wait = (
            round(statistics.median(column), 4) for column in zip(*kept, strict=True)
        )
        most = statistics.median(values[0] for values in found[engine, "ceiling"])
        rows.append(
            {
                "engine": engine,
                "way": way,
                "step_s": step,
                "sampling_s": sampling or generate,
                "update_s": update,
                "wait_s": wait,
                "handover_s": handover,
                "handover_share": round(handover / step, 5),
                "reached": round(most / step, 3),
                "longer_share": round(max(sampling or generate, update) / step, 3),
                "rounds": rounds,
            }
        )
    return rows


def main() -> None:
    parser = bench.parser(__doc__, rounds=3, threads=1, device=False)
    parser.add_argument("--steps", type=int, default=12, help="RL steps of a measurement")
    parser.add_argument(
        "--side", choices=("sample", "update"), help="one of the ceiling's processes"
    )
    parser.add_argument("--folder", help="of a child")
    parser.add_argument("overrides", nargs="*", help="of the runs")
    given = parser.parse_intermixed_args()
    if given.side:
        return side(given.side, given.folder, given.overrides, given.steps)
    if given.folder:
        return run(given.folder, given.overrides)
    small = ["batch.prompts=2", "batch.group_size=4", "generation.max_new_tokens=8"]
    rows = (
        measured(1, 2, [*small, *given.overrides], WAIT / 10)
        if given.quick
        else measured(given.rounds, given.steps, given.overrides)
    )
    bench.write(given.out, "overlap", [row | bench.provenance(1) for row in rows])


if __name__ == "__main__":
    sys.exit(main())
