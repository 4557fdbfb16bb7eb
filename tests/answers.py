"""What `--json` of each command prints: its keys and types, as docs/commands.md has the keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NUMBER = (int, float)
MAYBE = (int, float, type(None))
TEXT = (str, type(None))

FORECAST = {
    "memory": {str: NUMBER},
    "fits": bool,
    "slots": int,
    "seconds": {str: NUMBER},
    "tokens_per_s": NUMBER,
    "share": NUMBER,
}

# A mapping with given keys; one of any keys is {str: schema}, a list [schema], else a type or
# several. A key with ? may be missing.
ANSWERS: dict[str, Any] = {
    "check": {
        "phases": [str],
        "warnings": [str],
        "rewards": [{str: MAYBE}],
        "metrics": {str: MAYBE},
        "seconds": {"load": float, "generate": float, "update": float},
        "memory": {
            "weights": int,
            "gradients": int,
            "optimizer": int,
            "reference": int,
            "peak": int,
        },
        "cost?": {
            "costs": {
                "prefill": float,
                "decode": float,
                "scoring": float,
                "update": float,
                "evaluation": float,
                "steps": int,
            },
            "step": {str: NUMBER},
            "source": str,
            "on": str,
            "peak": NUMBER,
            "activations": NUMBER,
            "cache": NUMBER,
        },
    },
    "check check.device=h200": {
        "device": {str: (str, int, float)},
        "lengths": str,
        "load": {str: (int, bool, type(None))},
        "forecast": FORECAST,
        "changes": {str: FORECAST},
        "uncounted": [str],
    },
    "show": {
        "overrides": [str],
        "options": [{"place": str, "name": str, "origin": str, "changed": bool}],
        "values": [
            {
                "key": str,
                "value": (str, int, float, bool, list, dict, type(None)),
                "origin": str,
                "changed": bool,
            }
        ],
        "extras": [str],
    },
    "compare": {
        "lines": [str],
        "figure": {"name": str, "values": [{str: NUMBER}], "resolution": NUMBER},
        "spent": {str: [NUMBER]},
        "comparisons": [
            {
                "first": str,
                "second": str,
                "found": {
                    "mean": MAYBE,
                    "low": MAYBE,
                    "high": MAYBE,
                    "p": MAYBE,
                    "spread": MAYBE,
                    "n": int,
                },
                "p": MAYBE,
                "claim": str,
                "sentence": str,
            }
        ],
        "sentences": [str],
        "suspicions": [str],
    },
    "plan": {
        "figure": str,
        "effect": NUMBER,
        "comparisons": [
            {
                "first": str,
                "second": str,
                "seeds": int,
                "seconds": NUMBER,
                "pilot_seeds": int,
                "pilot_spread": NUMBER,
                "spread_bound": NUMBER,
                "likely_seeds": int,
                "given_seeds": (int, type(None)),
                "seen": MAYBE,
            }
        ],
    },
    "bench": {
        "folder": str,
        "runs": int,
        "finished": int,
        "failed": {str: str},
        "rows": [{str: (str, int, float)}],
        "comparisons": [
            {
                "task": str,
                "first": str,
                "second": str,
                "mean": NUMBER,
                "low": MAYBE,
                "high": MAYBE,
                "q": MAYBE,
                "sees": MAYBE,
            }
        ],
    },
    "runs": {
        "runs": [
            {
                "folder": str,
                "began": str,
                "ended": str,
                "steps": (int, type(None)),
                "test_accuracy": {str: NUMBER},
                "overrides": [str],
            }
        ],
        "more": int,
    },
    "runs diff": {
        "settings": {str: [(str, int, float, bool, list, dict, type(None))]},
        "results": {str: [(str, int, float, type(None))]},
    },
    "metrics": {"metrics": [{"names": [str], "means": str, "unit": str, "usual": str, "act": str}]},
}


def misfits(value: Any, schema: Any, place: str = "") -> Iterator[str]:
    """The places of a JSON document that are not as the schema says."""
    if isinstance(schema, list):
        if not isinstance(value, list):
            yield f"{place}: no list"
            return
        for i, own in enumerate(value):
            yield from misfits(own, schema[0], f"{place}[{i}]")
    elif isinstance(schema, dict):
        if not isinstance(value, dict):
            yield f"{place}: no mapping"
            return
        if str not in schema:
            known = {key.removesuffix("?") for key in schema}
            needed = {key for key in schema if not key.endswith("?")}
            yield from (f"{place}.{key}: not known" for key in value.keys() - known)
            yield from (f"{place}.{key}: missing" for key in needed - value.keys())
        for key, own in value.items():
            inner = schema.get(str) or schema.get(key) or schema.get(f"{key}?")
            if inner is not None:
                yield from misfits(own, inner, f"{place}.{key}")
    elif not isinstance(value, schema):
        yield f"{place}: {value!r} is no {schema}"
