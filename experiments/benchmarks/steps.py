"""Measure the processor seconds of a short training of the embedded default.

    python experiments/benchmarks/steps.py --once [--steps 6] [--kernel eager]

The seconds include the start and the end of the run. pairs.py compares them with another
checkout's.
"""

from __future__ import annotations

import contextlib
import os
import tempfile

import bench
import torch

import rlkit


def train(steps: int, kernel: str) -> None:
    """Train for `steps` steps in a temporary folder, without output."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        experiment = rlkit.experiment(
            f"trainer.steps={steps}",
            f"trainer.threads={torch.get_num_threads()}",
            f"generation.kernel={kernel}",
            "evaluation.n=0",
            "logger=none",
        )
        rlkit.train(experiment, folder=folder)


def main() -> None:
    parser = bench.parser(__doc__, rounds=1, threads=1, device=False)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kernel", default="auto")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    bench.once(lambda: train(1 if given.quick else given.steps, given.kernel))


if __name__ == "__main__":
    main()
