"""What a hook asks for, read from its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rlkit.algorithm import inputs
from rlkit.types import QUANTITIES


def asks_for(function: Callable[..., Any], quantity: str) -> bool:
    """Whether a function is one of the core: all that it asks for are quantities, this one among them."""
    asked = inputs(function)
    return quantity in asked and set(asked) <= set(QUANTITIES)


def named(function: Callable[..., Any]) -> set[str]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {p.name for p in inspect.signature(function).parameters.values() if p.kind not in kinds}


def accepted(function: Callable[..., Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the keywords that a function takes."""
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()):
        return dict(keywords)
    return {name: value for name, value in keywords.items() if name in named(function)}
