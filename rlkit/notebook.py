"""The functions of the notebooks that rlkit grew out of: `from rlkit.notebook import
create_rollout`.

They are the extra `notebook` (rlkit/extras/notebook). Those documents import them from here, so
this module forwards to it; no other module of the core names an extra.
"""

from __future__ import annotations

import importlib
from typing import Any

from rlkit.system.extras import explain_missing

EXTRA = "rlkit.extras.notebook"


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'rlkit.notebook' has no attribute '{name}'")
    missing = explain_missing(EXTRA)
    if missing:
        raise ImportError(missing, name=EXTRA)
    return getattr(importlib.import_module(EXTRA), name)


def __dir__() -> list[str]:
    """The names of the extra; none if it is not there."""
    return [] if explain_missing(EXTRA) else list(importlib.import_module(EXTRA).__all__)
