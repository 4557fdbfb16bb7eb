"""Print the metrics of some runs as a table: python experiments/machines/rows.py FOLDER…"""

from __future__ import annotations

import json
import sys
from pathlib import Path

KEYS = {
    "reward/mean": ".6f",
    "tokens/sampled": ".0f",
    "loss/policy": ".6f",
    "optim/grad_norm": ".6f",
}

print(f"| run | step | {' | '.join(KEYS)} |\n|---|---|{'---|' * len(KEYS)}")
for folder in map(Path, sys.argv[1:]):
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        if "reward/mean" in (row := json.loads(line)):
            print(
                f"| {folder.name} | {row['step']} |"
                f" {' | '.join(f'{row[key]:{form}}' for key, form in KEYS.items())} |"
            )
