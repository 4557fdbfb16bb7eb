"""Make the tables of README.md again.

python experiments/proofs/run.py

The first cell of a row is a command's words; `rlkit prove` gives the row.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from rlkit.extras.bench.commands.prove import row

PAGE = Path(__file__).resolve().parent / "README.md"


def remade(text: str) -> str:
    """Return a page with all rows of its tables made again."""
    return re.sub(
        r"^\| `(.+?)` \|.*$", lambda found: row(found[1], shlex.split(found[1])), text, flags=re.M
    )


if __name__ == "__main__":
    PAGE.write_text(remade(PAGE.read_text()))
