"""rlkit: reinforcement learning of language models on multi-turn, tool-using tasks.

    x = rlkit.experiment("algorithm=dapo", "kl=none", reward=my_reward, trainer__steps=10)
    run = rlkit.train(x)

Single parts are in namespaces: `rlkit.functional.k3`, `rlkit.rewards.numeric`,
`rlkit.references.ema`. Nothing is imported before it is asked for. `__init__.pyi` lists the names
and where each is from. The notebooks' functions (`rlkit.notebook`) can be imported from here too,
and are not listed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path
from typing import Any

# `from HOME import NAME as NAME` in the list of names: NAME → HOME
_HOME = {"experiment": "rlkit.config.experiment"} | {
    alias.name: str(node.module)
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
    if alias.asname
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home in ("rlkit", "rlkit.training"):
        return importlib.import_module(f"{home}.{name}")
    if home is not None:
        found = getattr(importlib.import_module(home), name)
        if isinstance(found, type) or not callable(found):
            return found
        from rlkit.config.parts import wrap_with_checks

        return wrap_with_checks(found, name)
    if not name.startswith("_") and importlib.util.find_spec(f"rlkit.{name}") is None:
        notebook = importlib.import_module("rlkit.notebook")
        if name in dir(notebook):
            return getattr(notebook, name)
    raise AttributeError(f"module 'rlkit' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
