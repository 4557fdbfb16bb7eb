"""The input and output of commands: parse a command line, look up and change overrides, and hold an
answer."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlkit.commands.config_file import ENTRIES, read_overrides
from rlkit.config.functions import read_key
from rlkit.config.hints import MEANT
from rlkit.errors import ConfigError

STARTED = time.perf_counter()
WITH_VALUE = ("--config-dir", "--config", "-cn", "--config-name", "-c", "--cfg")  # flags


class Arguments(NamedTuple):
    """A parsed command line."""

    overrides: list[str]
    multirun: bool = False
    config_dir: str | None = None
    shown: str = ""  # part of the config to print instead of a run: job, hydra, all, info
    resolved: bool = False  # with `shown`: print values instead of references
    words: tuple[str, ...] = ()  # all words, unchanged
    texts: tuple[str, ...] = ()  # words that are not overrides, if the command takes them
    sources: Mapping[str, str] = {}  # key of an override → its file of --config
    trusted: bool = False  # trust=true, a word of every command and not an override


class Answer(NamedTuple):
    """The result of a command, as data and as text. The text is written from the data."""

    data: Mapping[str, Any]  # docs/commands.md has the keys; a NamedTuple counts as a mapping
    text: str
    status: int = 0  # the exit status


def parse(words: Sequence[str], *, texts: bool = False) -> Arguments:
    """Parse flags and overrides. With `texts`, other words and names of existing files are accepted
    too. Raises: ConfigError for an unknown flag."""
    arguments = Arguments([], words=tuple(words))
    files = list[str]()
    name = ""
    rest = iter(words)
    for word in rest:
        flag, _, value = word.partition("=")
        if flag in WITH_VALUE:
            value = value or next(rest, "")
        if word in ("-m", "--multirun"):
            arguments = arguments._replace(multirun=True)
        elif flag == "--config-dir":
            arguments = arguments._replace(config_dir=value)
        elif flag == "--config":
            files.append(value)
        elif flag in ("-cn", "--config-name"):
            name = value
        elif flag in ("-c", "--cfg"):
            arguments = arguments._replace(shown=value)
            if value not in ("job", "hydra", "all"):
                raise ConfigError(f"--cfg {value}: write --cfg job, --cfg hydra or --cfg all")
        elif flag in ("-i", "--info"):
            arguments = arguments._replace(shown="info")
        elif word == "--resolve":
            arguments = arguments._replace(resolved=True)
        elif texts and (
            os.path.exists(word)
            or " " in word.partition("=")[0].strip()
            or not re.match(r"[-~]|[^=]+=", word)
        ):
            # Folders of a sweep have a = in their names. A question may be longer than a file's
            # name, and Path.exists then raises.
            arguments = arguments._replace(texts=(*arguments.texts, word))
        elif word.startswith("-"):
            raise ConfigError(_suggest_flag(word, next(rest, "VALUE")))
        elif "=" not in word and not word.startswith("~"):
            raise ConfigError(f"'{word}' is not an override; write KEY=VALUE or GROUP=OPTION")
        else:
            arguments.overrides.append(word)
    if arguments.resolved and not arguments.shown:
        raise ConfigError("--resolve: nothing is printed without --cfg; write --cfg job --resolve")
    if name and name.removesuffix(".yaml") not in ENTRIES:
        files.append(str(_find_named(name, arguments.config_dir)))
    said = set(map(read_key, arguments.overrides))  # the command line wins
    read = [(text, file) for file in files for text in read_overrides(file)]
    read = [(text, file) for text, file in read if read_key(text) not in said]
    overrides = [*(text for text, _ in read), *arguments.overrides]
    return arguments._replace(
        overrides=drop(overrides, "trust"),
        sources={read_key(text): file for text, file in read},
        trusted=read_flag("trust", find_option(overrides, "trust")),
    )


# settings whose values differ from those of the other libraries' flags
UNLIKE = ("trainer.precision", "trainer.micro_batch_tokens", "evaluation")


def _find_named(name: str, folder: str | None) -> Path:
    """Find the file of --config-name: NAME.yaml in the folder of --config-dir, or in the current
    folder."""
    place = Path(folder or ".") / f"{name.removesuffix('.yaml')}.yaml"
    if not place.is_file():
        raise ConfigError(
            f"--config-name {name}: there is no {place}. It names a file of your own in"
            " --config-dir DIR; which of rlkit's configs is taken follows from the command (train,"
            " evaluate, rollout)"
        )
    return place


def _suggest_flag(word: str, value: str) -> str:
    """Suggest the right spelling of an unknown flag."""
    flag, given, behind = word.lstrip("-").partition("=")
    key = flag.replace("-", "_")
    if given:
        value = behind
    elif value.startswith("-") or "=" in value:
        value = "VALUE"
    if key in MEANT:
        group = MEANT[key].endswith("=")
        if MEANT[key] in UNLIKE or (group and value.lower() in ("true", "false")):
            value = "OPTION" if group else "VALUE"
        return f"there is no flag '{word}'; write {MEANT[key].removesuffix('=')}={value}"
    flags = "-m, --config FILE, --config-name NAME, --config-dir DIR, --cfg, --info, --json, --help"
    return f"there is no flag '{word}'; settings are written KEY=VALUE, and the flags are {flags}"


def find_option(overrides: Sequence[str], key: str) -> str | None:
    """Return a key's value on the command line, or None."""
    values = [o.partition("=")[2] for o in overrides if read_key(o) == key]
    return unquote(values[-1]) if values else None


def append_overrides(saved: list[str], overrides: list[str]) -> list[str]:
    """Append overrides to a run's overrides. A word-for-word repetition is dropped, because
    `+group=option` may occur only once."""
    return [text for text in saved if text not in overrides] + overrides


def drop(overrides: Sequence[str], *keys: str) -> list[str]:
    """Return the overrides without those of the given keys."""
    return [o for o in overrides if read_key(o) not in keys]


def take_settings(arguments: Arguments, names: Sequence[str], command: str) -> dict[str, str]:
    """Read a command's settings from its arguments. Raises: ConfigError for any other override."""
    unknown = drop(arguments.overrides, *names)
    if unknown:
        raise ConfigError(
            f"'{unknown[0]}': rlkit {command} takes the settings"
            f" {', '.join(f'{name}=' for name in names)}"
        )
    return {
        name: value
        for name in names
        if (value := find_option(arguments.overrides, name)) is not None
    }


def read_flag(key: str, value: str | None) -> bool:
    """Read true or false; None is false. Raises: ConfigError for another word."""
    if value not in (None, "true", "false"):
        raise ConfigError(f"{key}={value}: must be true or false")
    return value == "true"


def unquote(text: str) -> str:
    """Invert `quote`. A text without quotes stays as it is, even if it means something else in
    Hydra's grammar."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return re.sub(rf"(\\+)({text[0]}|$)", lambda m: "\\" * (len(m[1]) // 2) + m[2], text[1:-1])
    return text
