"""Write tasks in Harbor's format: which of two numbers is larger?

    python experiments/programs/harbor_agent/make_tasks.py FOLDER [--count 320]

The hidden test of a task reads answer.txt. It gives 1 if the larger number is the only number
there.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

CONFIG = """schema_version = "1.3"

[task]
name = "rlkit/larger-{a}-{b}"
description = "The larger of two numbers."

[agent]
timeout_sec = 1800.0

[verifier]
timeout_sec = 600.0

[environment]
network_mode = "no-network"
"""
INSTRUCTION = """Which number is larger, {a} or {b}?

Write it into answer.txt.
"""
TEST = """#!/bin/bash
# 1 if the only number in answer.txt is the expected one
reward=0
if [ "$(grep -oE '[0-9]+' answer.txt)" = "$(cat /tests/expected.txt)" ]; then
    reward=1
fi
echo $reward > /logs/verifier/reward.txt
"""


def write_task(folder: Path, a: int, b: int) -> None:
    """Write a task's folder, with a solution that passes its test."""
    files = {
        "task.toml": CONFIG.format(a=a, b=b),
        "instruction.md": INSTRUCTION.format(a=a, b=b),
        "tests/test.sh": TEST,
        "tests/expected.txt": f"{max(a, b)}\n",
        "solution/solve.sh": f"#!/bin/bash\necho {max(a, b)} > answer.txt\n",
    }
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=320)
    given = parser.parse_args()
    rng = random.Random(0)
    for number in range(given.count):
        write_task(given.folder / f"{number:03}", *rng.sample(range(10, 1000), 2))


if __name__ == "__main__":
    main()
