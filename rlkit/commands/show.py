"""`rlkit show`: show the options and keys of a run on one screen, with their origins
(rlkit.config.origins)."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlkit.commands.arguments import (
    Answer,
    Arguments,
    append_overrides,
    drop,
    find_option,
)
from rlkit.commands.trust import make_asker
from rlkit.config.functions import read_key
from rlkit.config.options import find_shelf
from rlkit.config.origins import PHASE, Explained, Option, Value, explain
from rlkit.runs import folder as runs

GIVES_JSON = True

WIDTH = 100
ORIGIN = 62  # column of the origins
NAMES = 22  # columns of keys; a longer key widens them, unless it is very long
LONG_NAME = 36  # columns of a very long key
# the functions and classes of tools; they are always shown
TOOL = re.compile(r"^(environment\..*\btools\.\w+)\._target_$")
# keys that are shown even if they equal the default run's
MATTER = (
    "name",
    "seed",
    "batch.prompts",
    "batch.group_size",
    "model.path",
    "model.lora.rank",
    "model.gradient_checkpointing",
    "generation.temperature",
    "generation.max_new_tokens",
    "algorithm.epochs",
    "algorithm.minibatches",
    "kl.name",
    "kl.placement",
    "kl.coef",
    "optimizer.lr",
    "trainer.accelerator",
    "trainer.steps",
    "trainer.micro_batch_tokens",
    "evaluation.n",
    "evaluation.every",
    "callbacks.checkpoint.every",
)


def command(arguments: Arguments) -> Answer:
    """Show what a run is made of: its options, the keys that matter or differ, and where each comes
    from.

    KEY=VALUE   the overrides of the run; GROUP=OPTION an option
    run=FOLDER  an existing run, with the overrides on top
    --json      every key with its origin, for a program

        rlkit show algorithm=dapo kl=none
        rlkit show run=outputs/latest
    """
    overrides = drop(arguments.overrides, "run")
    sources = dict(arguments.sources)
    ask = None
    where = _find_named_folder(arguments.overrides)
    if where:
        folder = runs.find_run(where.partition("=")[2], where.partition("=")[0])
        runs.require_overrides(folder)
        ask = make_asker(where, folder, overrides, arguments, entry="train")
        said = set(map(read_key, overrides))
        saved = runs.read_overrides(folder)
        sources |= {key: where for key in map(read_key, saved) if key not in said}
        overrides = append_overrides(saved, overrides)
    explained = explain(
        overrides,
        sources=sources,
        config_dir=arguments.config_dir,
        before_import=ask,
    )
    if where:
        explained = explained._replace(
            values=with_decision(explained.values, runs.read_start(folder))
        )
    words = runs.redact_node(overrides)
    data = {"overrides": words, **explained._asdict()}
    return Answer(data, "\n".join(screen(explained, list(map(shlex.quote, words)))))


def with_decision(values: Sequence[Value], start: Mapping[str, Any]) -> list[Value]:
    """Replace model.gradient_checkpointing=auto by the run's decision. `start` is the last entry of
    run.json."""
    key = "gradient_checkpointing"
    decided = start.get(key)
    return [
        value._replace(value=f"auto ({json.dumps(decided)} in this run)")
        if value.key == f"model.{key}" and value.value == "auto" and isinstance(decided, bool)
        else value
        for value in values
    ]


def _find_named_folder(overrides: Sequence[str]) -> str:
    """Return the folder of run=FOLDER or resume=FOLDER on the command line; empty without
    either."""
    run = find_option(overrides, "run")
    resume = find_option(overrides, "resume")
    if run:
        return f"run={run}"
    return f"resume={resume}" if resume and resume not in ("never", "auto") else ""


def screen(explained: Explained, words: Sequence[str] = ()) -> list[str]:
    """Write the lines: a block for each group, then the extras. `words` are the overrides."""
    options = {chosen.place: chosen for chosen in explained.options}
    tops = [place for place in options if "." not in place]
    shown = [
        value._replace(key=TOOL.sub(r"\1", value.key))
        for value in explained.values
        if TOOL.match(value.key) or _is_shown(value, options)
    ]
    lines = [
        *wrap(" ".join(["rlkit train", *words]), "", "    "),
        "* differs from `rlkit train` without overrides",
        "",
        *_rows([value for value in shown if _head(value.key) not in options], "", ""),
        "",
    ]
    for top in tops:
        lines.append(_row(options[top], f"{top} = {_with_shelf(options[top])}"))
        lines += _format_nested(explained.options, top)
        own = [value for value in shown if _head(value.key) == top]
        lines += _rows([value for value in own if not PHASE.fullmatch(value.key)], top)
        if top == "schedule":
            lines += _phases(explained, [value for value in own if PHASE.fullmatch(value.key)])
    return [*lines, "", f"extras: {', '.join(explained.extras) or 'none'}"]


def _is_shown(value: Value, options: Mapping[str, Option]) -> bool:
    """Return whether a key gets a line: it differs or matters, and does not merely repeat its
    option's name."""
    above, _, name = value.key.rpartition(".")
    named = options.get(above)
    repeats = name == "name" and named is not None and named.name == value.value
    repeats = repeats or value.key in options  # logger=none has no keys
    return (value.changed and not repeats) or value.key in MATTER


def _with_shelf(chosen: Option) -> str:
    """Return the option's name, with a note if the option is from the catalogue."""
    shelf = find_shelf(chosen.place.replace(".", "/"), chosen.name)
    return f"{chosen.name} (catalogue)" if shelf == "catalogue" else chosen.name


def _head(key: str) -> str:
    return key.partition(".")[0]


def wrap(text: str, first: str, later: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _row(shown: Option | Value, text: str) -> str:
    """Write a line with a mark for a difference, and the origin in its column."""
    origin = shown.origin
    room = max(WIDTH - len(origin) - 2, ORIGIN - 2)
    left = f"{'*' if shown.changed else ' '} {text}"
    if len(left) > room:
        left = f"{left[: room - 1]}…"
    line = f"{left:<{ORIGIN - 2}}  {origin}".rstrip()
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"


def _rows(values: Sequence[Value], above: str, indent: str = "    ") -> Iterator[str]:
    """Write a line for each key below `above`, the values in a column."""
    names = [value.key[len(above) + 1 :] if above else value.key for value in values]
    width = max(NAMES, *(len(name) for name in names if len(name) < LONG_NAME), 0)
    for name, value in zip(names, values, strict=True):
        yield _row(value, f"{indent}{name:<{width}} {_format_value(value.value)}")


def _format_value(value: Any) -> str:
    """Write a value in the form of the command line."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _format_nested(options: Sequence[Option], above: str) -> Iterator[str]:
    """Write the options within an option: a line for each chosen option, and one line for all
    others."""
    own = [inner for inner in options if _is_below(inner.place, above)]
    own = [inner for inner in own if not _is_below(inner.place, "schedule.phases")]
    quiet = [inner for inner in own if not inner.origin]
    outer = [o for o in quiet if not any(_is_below(o.place, other.place) for other in own)]
    names = [f"{o.place[len(above) + 1 :]}={o.name}" for o in outer]
    yield from wrap("  ".join(names), "      ", "      ")
    for inner in own:
        if inner.origin:
            yield _row(inner, f"    {inner.place[len(above) + 1 :]} = {_with_shelf(inner)}")


def _is_below(place: str, above: str) -> bool:
    return place.startswith(f"{above}.")


def _phases(explained: Explained, values: Sequence[Value]) -> Iterator[str]:
    """Show how each phase of a schedule differs from the whole run."""
    whole = {chosen.place: chosen.name for chosen in explained.options}
    found = (PHASE.fullmatch(value.key) for value in explained.values)
    for name in dict.fromkeys(match[1] for match in found if match):
        above = f"schedule.phases.{name}"
        yield f"      phase {name}"
        own = [inner for inner in explained.options if _is_below(inner.place, above)]
        for inner in sorted(own, key=lambda inner: inner.place.count(".")):
            place = inner.place[len(above) + 1 :]
            differs = whole.get(place) != inner.name
            if differs or inner.origin or "." not in place:
                origin = inner.origin or f"phase {name}"
                row = inner._replace(origin=origin, changed=differs or inner.changed)
                yield _row(row, f"      {place} = {inner.name}")
        yield from _rows([v for v in values if _is_below(v.key, above)], above, "      ")
