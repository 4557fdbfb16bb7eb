"""Look up the meaning of a metric in glossary.yaml beside this file. The documentation shows this
glossary, and tests check that it names every metric."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

import yaml


class Entry(NamedTuple):
    """Hold the explanation of one metric, or of several metrics with similar names."""

    names: tuple[str, ...]  # a word in capitals stands for any name
    means: str
    unit: str
    usual: str  # the healthy range
    act: str  # what to do outside the healthy range


class Section(NamedTuple):
    """Hold a group of metrics that are read together."""

    title: str
    computed: tuple[str, ...]  # the functions that compute them
    entries: tuple[Entry, ...]


@functools.cache
def read_sections() -> tuple[Section, ...]:
    """Read the whole glossary, in the order of its file."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return tuple(
        Section(
            part["title"],
            tuple(part["computed"]),
            tuple(_entry(names, said) for names, said in part["metrics"].items()),
        )
        for part in yaml.load(text, yaml.BaseLoader)  # reads every value as text, even a plain 0
    )


def _entry(names: str, said: dict[str, str]) -> Entry:
    return Entry(tuple(names.split(", ")), **said)


def find_meaning(metric: str) -> Entry | None:
    """Return the entry of a metric, or None. An exact name takes precedence over a name with words
    in capitals.

    >>> find_meaning("reward/format/mean").unit
    'units of the term'
    """
    every = [entry for section in read_sections() for entry in section.entries]
    exact = (entry for entry in every if metric in entry.names)
    return next(exact, None) or next(
        (entry for entry in every if any(_pattern(name).fullmatch(metric) for name in entry.names)),
        None,
    )


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    """Make a regular expression for a name with words in capitals. NAME matches the rest of the
    metric's name. Any other word in capitals matches one level of the name."""
    parts = (
        {"NAME": ".+"}.get(p, "[^/]+") if p.isupper() else re.escape(p)
        for p in re.split(r"([A-Z]{4,})", name)
    )
    return re.compile("".join(parts))
