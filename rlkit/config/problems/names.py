"""Check the names of folders. Each part of a name must be a plain name, so the folder stays inside
its parent folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

LONGEST = 200  # largest number of bytes in one part of a name; a file system accepts 255
# groups that may give a run its name, in this order
SOURCES = ("schedule", "algorithm")


def name_problems(config: Mapping[str, Any]) -> list[str]:
    """Explain why the name of a run cannot be a folder inside outputs/. The sentence begins with
    the config key of the name. The name `a/b` makes a folder `b` inside a folder `a`."""
    name = config.get("name")
    if not isinstance(name, str):  # the schema reports the type
        return []
    reason = next((why for part in name.split("/") if (why := part_problem(part))), "")
    if name.startswith("/"):
        reason = "it is an absolute path"
    if name.split("/")[0] == "latest":
        reason = "outputs/latest leads to the newest run"
    if not reason:
        return []
    given = [
        key
        for key in SOURCES
        if isinstance(own := config.get(key), Mapping) and own.get("name") == name
    ]
    key = f"{given[0]}.name" if given else "name"
    shown = "".join(c if c.isprintable() else "?" for c in name)
    return [
        f"{key}={shown:.60}: {reason}. Runs are written to outputs/NAME; give a plain name, as in"
        " name=first_try"
    ]


def part_problem(part: str) -> str:
    """Explain why a text is not a plain name of a file or folder. Return an empty text for a plain
    name."""
    if not part:
        return "it is empty, or a part of it is"
    if part in (".", ".."):
        return f"'{part}' is no folder of its own"
    if part[0] in "~-":
        return f"a part begins with '{part[0]}', which shells and commands read as something else"
    if not part.isprintable():
        return "it holds a character that cannot be printed"
    if "/" in part:
        return "it has a slash"
    if part != part.strip():
        return "a part begins or ends with a space"
    if len(os.fsencode(part)) > LONGEST:
        return f"a part has more than {LONGEST} bytes"
    return ""
