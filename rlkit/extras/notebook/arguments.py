"""Replace torch's errors by clear sentences, for notebook cells with a tensor of the wrong
shape."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable
from typing import Any

from rlkit.errors import RLKitError, list_parameters, name_error, name_function


@functools.cache
def explain_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function: if torch or Python cannot compute with its arguments, raise a ValueError
    with their types and shapes. Errors of the user's own code and memory errors are raised
    unchanged."""

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except (RuntimeError, ValueError, LookupError, AttributeError, TypeError) as error:
            text = name_error(error)
            passed = dict(zip(list_parameters(function), given, strict=False)) | named
            places = [f.f_globals["__name__"] for f, _ in traceback.walk_tb(error.__traceback__)]
            known = rf"^\w*Error: .*alloc|^(Value|Type)Error: .*\b({'|'.join(passed)})\b"
            own = any(not place.startswith(("rlkit.", "torch.")) for place in places)
            if own or len(places) < 2 or isinstance(error, RLKitError) or re.search(known, text):
                raise
            shown = ", ".join(
                f"{name} is {getattr(value, 'dtype', type(value).__name__)}"
                f" {getattr(value, 'shape', '')}"
                for name, value in passed.items()
            )
            said = f"{name_function(function)}: cannot compute with these: {shown} ({text})"
            raise ValueError(said) from error

    return call
