"""Values from untrusted programs: decode a child's output, and compare its values with literals.
Nothing in this file runs code of a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 64


@dataclass(frozen=True)
class Opaque:
    """Stand for a value that has no literal type. It equals no expected value, and has no items and
    no order."""

    type: str


SCALARS: dict[bytes, Callable[[bytes], Any]] = {  # tag → payload → value
    b"i": lambda payload: int(payload, 16),
    b"f": lambda payload: float.fromhex(payload.decode()),
    b"c": lambda payload: complex(*map(float.fromhex, payload.decode().split(","))),
    b"s": lambda payload: payload.decode("utf-8", "surrogatepass"),
    b"b": bytes,
    b"o": lambda payload: Opaque(payload.decode("utf-8", "replace")),
}
# tag → items → value; the items of a dict are its keys and values in turn
COLLECTIONS: dict[bytes, Callable[[list[Any]], Any]] = {
    b"l": list,
    b"t": tuple,
    b"S": set,
    b"Z": frozenset,
    b"d": lambda items: dict(zip(items[::2], items[1::2], strict=True)),
}


class Malformed(ValueError):
    """Raised for bytes that encode no value, because the program itself wrote to the channel."""


def split_records(data: bytes) -> list[tuple[str, bytes]]:
    """Split a child's output into its complete records, (tag, payload) each. Reading stops at the
    first broken record."""
    out = []
    position = 0
    while position < len(data):
        colon = data.find(b":", position + 1, position + 9)
        if colon < 0 or not data[position + 1 : colon].isdigit():
            break
        end = colon + 1 + int(data[position + 1 : colon])
        if end > len(data):
            break
        out.append((chr(data[position]), data[colon + 1 : end]))
        position = end
    return out


def decode_value(data: bytes) -> Any:
    """Decode a value written by `_child.encode`: numbers, text, bytes, None, and lists, tuples,
    sets and dicts of them; else `Opaque`.

    Raises: Malformed for any other bytes. Time and memory are linear in the bytes.
    """
    try:
        value, end = _decode(data, 0, 0)
    except (
        ValueError,
        LookupError,
        TypeError,
        OverflowError,
    ) as error:  # KeyError: an unknown tag; TypeError: a list in a set
        raise Malformed(str(error)) from error
    if end != len(data):
        raise Malformed("bytes after the value")
    return value


def _decode(data: bytes, position: int, depth: int) -> tuple[Any, int]:
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    tag = data[position : position + 1]
    if tag in (b"N", b"T", b"F"):
        return {b"N": None, b"T": True, b"F": False}[tag], position + 1
    colon = data.index(b":", position + 1, position + 9)
    size = int(data[position + 1 : colon])
    start = colon + 1
    if size < 0 or size > len(data):
        raise ValueError("impossible size")
    if tag in COLLECTIONS:
        items = []
        for _ in range(2 * size if tag == b"d" else size):
            item, start = _decode(data, start, depth + 1)
            items.append(item)
        return COLLECTIONS[tag](items), start
    payload = data[start : start + size]
    if len(payload) != size:
        raise ValueError("cut off")
    return SCALARS[tag](payload), start + size


def are_equal(value: Any, expected: Any) -> bool:
    """Return whether a value equals the expected value and has the same type: True does not equal
    1, and (1, 2) does not equal [1, 2]. All numbers are one type, so 2.0 equals 2.

    NaN equals nothing, as in Python. Dict order does not count.
    >>> are_equal([1, (2.0, "a")], [1, (2, "a")]), are_equal(True, 1), are_equal((1,), [1])
    (True, False, False)
    """
    if _is_number(value) and _is_number(expected):
        return bool(value == expected)
    if isinstance(value, set | frozenset) and isinstance(expected, set | frozenset):
        return len(value) == len(expected) and set(map(_key, value)) == set(map(_key, expected))
    if type(value) is not type(expected):
        return False
    if isinstance(value, list | tuple):
        return len(value) == len(expected) and all(map(are_equal, value, expected))
    if isinstance(value, Mapping):
        own, wanted = ({_key(k): v for k, v in pairs.items()} for pairs in (value, expected))
        return own.keys() == wanted.keys() and all(are_equal(own[k], wanted[k]) for k in wanted)
    return bool(value == expected)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def _key(value: Any) -> tuple[str, Any]:
    """Pair a hashable value with its type, at any depth, because sets and dicts treat True and 1 as
    equal."""
    if isinstance(value, tuple):
        return "tuple", tuple(map(_key, value))
    if isinstance(value, frozenset):
        return "frozenset", frozenset(map(_key, value))
    return ("number" if _is_number(value) else type(value).__name__), value
