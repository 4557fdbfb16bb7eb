"""A callback for `callbacks`: it records the process's resources after every RL step."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


def resources(run: Path, /) -> Any:
    """Return a callback that writes resources.jsonl into the run folder.

    A row has step, rss (MiB), handles, children, seconds since the run's first step, and yardstick
    (s).
    """
    import lightning as L
    import torch

    matrix, product = torch.ones(256, 256), torch.empty(256, 256)

    def yardstick() -> float:
        """Return the seconds of a fixed piece of work in Python and torch.

        They show how fast the machine is at the moment, independently of the run.
        """
        begun = time.perf_counter()
        sum(i * i for i in range(20_000))
        for _ in range(10):
            torch.mm(matrix, matrix, out=product)
        return time.perf_counter() - begun

    class Resources(L.Callback):
        started = time.perf_counter()

        def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
            row = {
                "step": module.rl_step,
                "seconds": time.perf_counter() - self.started,
                **held(),
                "yardstick": yardstick(),
            }
            with (run / "resources.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")

    return Resources()


def held() -> dict[str, float]:
    """Return this process's resident memory in MiB, open file handles and child processes.

    It works on Linux only.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    children = [
        pid
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    return {
        "rss": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "handles": len(os.listdir("/proc/self/fd")),
        "children": len(children),
    }
