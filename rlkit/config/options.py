"""Find the files of conf/, and read the shelf of each option.

A line `shelf: everyday` or `shelf: catalogue` in an option's file says whether most users need to
know the option. The shelf sorts lists of options and changes nothing else. `rlkit.config.compose`
removes this line from every composed config, so no part and no run folder receives it.
"""

from __future__ import annotations

import re
from pathlib import Path

SHELVES = ("everyday", "catalogue")
LINE = re.compile(rf"^shelf: ({'|'.join(SHELVES)})\b", re.M)


def conf_dir() -> Path:
    """Return the folder of the shipped options. It is inside the installed package, or next to the
    package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def read_shelf(file: Path) -> str:
    """Read the shelf from an option's file. The result is "" if the file has no line `shelf:`; a
    user's own file need not have this line."""
    found = LINE.search(file.read_text())
    return found[1] if found else ""


def find_shelf(group: str, option: str) -> str:
    """Find the shelf of a shipped option: everyday, catalogue, or "" if there is no such option.

    Args:
      group: as on the command line, for example algorithm or algorithm/policy_loss.
      option: as on the command line, for example grpo or recipe/grpo.
    """
    file = conf_dir() / group / f"{option}.yaml"
    return read_shelf(file) if file.is_file() else ""


def group_options_by_shelf(group: str) -> dict[str, list[str]]:
    """Return shelf → the shipped options of a group, sorted. A preset in a folder below experiment/
    is named FOLDER/NAME."""
    folder = conf_dir() / group
    files = sorted(folder.rglob("*.yaml") if group == "experiment" else folder.glob("*.yaml"))
    shelves: dict[str, list[str]] = {shelf: [] for shelf in SHELVES}
    for file in files:
        shelves[read_shelf(file) or "catalogue"].append(
            file.relative_to(folder).with_suffix("").as_posix()
        )
    return shelves
