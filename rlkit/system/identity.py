"""The identity of a run. It is in the first line of config.yaml from the start, and every resume
keeps it."""

from __future__ import annotations

import re
from pathlib import Path

from rlkit.system.files import open_regular

LINE = re.compile(rb"# rlkit run ([0-9a-f]{16}):")


def identity_line(identity: str) -> bytes:
    """Return the first line of a config.yaml, a YAML comment with the run's identity."""
    text = f"# rlkit run {identity}: the digest of the config with which this folder was made\n"
    return text.encode()


def read_identity(folder: Path) -> str:
    """Read the identity of the run in a folder. It is empty if config.yaml is missing, cannot be
    read, or has no identity."""
    try:
        with open_regular(folder / "config.yaml") as file:
            found = LINE.match(file.readline(100))
    except OSError:
        return ""
    return found[1].decode() if found else ""
