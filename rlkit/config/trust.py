"""Decide which values in the config of a run folder need the user's trust. Every value needs it,
except values of parameters declared safe by rlkit's own functions.

Each value of the config is of one of four kinds. It is a shipped option's value, the user's own
value, a value of a parameter that is safe by its type or declaration (`rlkit.types.safe`), or an
unsafe value. Unsafe values are printed, and refused without trust=true.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from rlkit.config.schema import resolve, signature_hints
from rlkit.errors import ConfigError, DataError, list_parameters, tell_user
from rlkit.system.extras import explain_missing
from rlkit.system.redaction import FROM_ENVIRONMENT
from rlkit.types import REACHES, is_record

LARGEST = 4 << 20  # largest number of bytes of a YAML file; a larger file is refused
SHOWN = 12
# torch's optimizers: their parameters are numbers
OPTIMIZER = re.compile(r"torch\.optim\.[A-Z]\w*")
NAME = re.compile(r"\b(?:rlkit|torch)\.[\w.]+")
CALLS = ("_target_", "_partial_", "_args_")
ABSENT: Any = object()
UNDECLARED = "something: no verdict is declared for it"
# words of REACHES for parameters through which a value can leave this process
SENDS = ("program", "address", "import")
MODEL = ("rlkit.models.load_policy", "path")


class _Plain(yaml.SafeLoader):
    """Load YAML without aliases. A few lines with aliases could expand to more values than fit in
    memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(
                None,
                None,
                "it holds an alias (*name), which rlkit never writes",
                self.peek_event().start_mark,
            )
        return super().compose_node(parent, index)


def read_yaml(path: Path) -> Any:
    """Read a YAML file of a run folder as data. Raises DataError if the file is missing, invalid,
    too large or too deep, or holds aliases."""
    try:
        if path.stat().st_size > LARGEST:
            raise DataError(
                f"{path}: {path.stat().st_size:,} bytes are no config of rlkit; give the folder as"
                " rlkit wrote it"
            )
        return yaml.load(path.read_text(), Loader=_Plain)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        why = (
            "it is nested too deeply"
            if isinstance(error, RecursionError)
            else " ".join(str(error).split())
        )
        raise DataError(
            f"{path}: cannot be read ({why:.300}); give the folder as rlkit wrote it"
        ) from error


# ------------------------------------------------------------------------------------- declarations


@functools.cache
def read_shipped_values(conf: Path) -> Mapping[str, Mapping[str, list[Any]]]:
    """Collect the values that shipped options give to functions: function → parameter → values.

    Hydra's own groups are left out, because no part of a run calls their functions. Functions of
    missing extras are also left out.
    """
    found: dict[str, dict[str, list[Any]]] = {}

    def collect(node: Any) -> None:
        values: Iterable[Any] = node if isinstance(node, list) else ()
        if isinstance(node, dict):
            values = node.values()
        for value in values:
            collect(value)
        if isinstance(node, dict) and isinstance(node.get("_target_"), str):
            # a reference whose default is a function's name also names this function
            for name in NAME.findall(node["_target_"]):
                if explain_missing(name):
                    continue
                own = found.setdefault(name, {})
                for key, value in node.items():
                    own.setdefault(key, []).append(_mark_references(value))

    files = [
        file for file in sorted(conf.rglob("*.yaml")) if file.relative_to(conf).parts[0] != "hydra"
    ]
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    options = {file: yaml.load(file.read_text(), Loader=loader) for file in files}
    for option in options.values():
        option.pop("shelf", None)  # this key is never an argument of a function
        collect(option)
    # an option may take its function from another option of its group
    for file, option in options.items():
        if isinstance(option, dict) and "_target_" not in option:
            group = [
                other
                for place, other in options.items()
                if place.parent == file.parent and isinstance(other, dict)
            ]
            for name in {
                str(other["_target_"]) for other in group if "_target_" in other
            } & found.keys():
                for key, value in option.items():
                    found[name].setdefault(key, []).append(_mark_references(value))
    return found


def _mark_references(value: Any) -> Any:
    """Rewrite references to the environment as a run folder writes them, without a default."""
    if isinstance(value, dict):
        return {key: _mark_references(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mark_references(item) for item in value]
    return FROM_ENVIRONMENT.sub(r"${oc.env:\1}", value) if isinstance(value, str) else value


class Declared(NamedTuple):
    """Say what the value of a parameter can reach. `word` is a word of `REACHES`, "" if the value
    can reach nothing, or UNDECLARED."""

    word: str
    default: Any = ABSENT  # the default in the function's signature
    # whether the type cannot hold a text; if such a parameter can reach something, even a value
    # of a shipped option needs trust
    plain: bool = False


@functools.cache
def read_declarations(name: str) -> Mapping[str, Declared]:
    """Import a function by its name in a config. Return parameter → the Declared of this
    parameter."""
    target = resolve(name)
    declared = getattr(
        inspect.unwrap(target, stop=lambda f: hasattr(f, "__verdicts__")), "__verdicts__", {}
    )
    hints = signature_hints(target)
    found = {}
    for key, parameter in list_parameters(target).items():
        plain = is_safe_by_type(hints.get(key, Any))
        otherwise = "" if plain or OPTIMIZER.fullmatch(name) else UNDECLARED
        default = None if parameter.default is parameter.empty else parameter.default
        found[key] = Declared(declared.get(key, otherwise), default, plain)
    return found


def is_safe_by_type(hint: Any) -> bool:
    """Return whether a parameter of this type cannot hold a text. Numbers, truth values and
    Literals cannot hold a text. Parts are safe too, because a config names a part by its function,
    and the function is checked."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return all(map(is_safe_by_type, typing.get_args(hint)))
    if typing.get_origin(hint) is Literal or hint in (int, float, bool, type(None)):
        return True
    if not inspect.isclass(hint) or typing.get_origin(hint) is not None or hint in (Any, object):
        return False
    return is_record(hint) or not issubclass(hint, str | bytes | Sequence | Mapping)


# ------------------------------------------------------------------------------------------ looking


class Folder(NamedTuple):
    """Hold the context for judging the config of a run folder."""

    conf: Path  # rlkit's own options
    mine: frozenset[str] = frozenset()  # names of functions from the user's own overrides
    place: Path | None = (
        # the run folder; a model inside it is allowed: its weights are data, and its template is
        # rendered within limits
        None
    )


def find_unsafe_values(
    node: Any, by: Folder, base: Any = ABSENT, path: str = "", word: str = ""
) -> Iterator[str]:
    """Yield a sentence for every value not declared safe, for example "path=value can reach a
    program".

    Args:
      node: the config, with ${oc.env:NAME} for values of the environment.
      base: the same config without the folder's own values. A value equal in both configs comes
        from rlkit or from the user, so it is safe.
      path: the place of the node in the whole config.
      word: the word declared for the argument that the node belongs to.
    """
    if is_same(node, base):
        return
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield from _find_unsafe_arguments(node, by, base, path, word)
            return
        for key, value in node.items():
            yield from find_unsafe_values(
                value, by, get_child(base, key), f"{path}.{key}" if path else str(key), word
            )
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from find_unsafe_values(value, by, get_item(base, i), f"{path}[{i}]", word)
    elif isinstance(node, str):
        names = FROM_ENVIRONMENT.findall(node)
        if names:
            yield f"{path} reads the environment variable {names[0]}"


def is_same(node: Any, base: Any) -> bool:
    return base is not ABSENT and type(node) is type(base) and node == base


def get_child(base: Any, key: Any) -> Any:
    return base.get(key, ABSENT) if isinstance(base, Mapping) else ABSENT


def get_item(base: Any, i: int) -> Any:
    return base[i] if isinstance(base, list) and i < len(base) else ABSENT


def is_known(target: Any, by: Folder) -> bool:
    return isinstance(target, str) and (
        target in read_shipped_values(by.conf)
        or target in by.mine
        or bool(OPTIMIZER.fullmatch(target))
    )


def _find_unsafe_arguments(
    node: Mapping[str, Any], by: Folder, base: Any, path: str, word: str
) -> Iterator[str]:
    target = node["_target_"]
    base = base if get_child(base, "_target_") == target else ABSENT
    known = is_known(target, by) or base is not ABSENT
    own = read_declarations(target) if known else {}
    if not known:
        yield f"{path or 'the config'} calls {target!s:.80}"
    if word == "calls" and node.get("_partial_"):
        open_to = [key for key, verdict in own.items() if verdict.word]
        if open_to:
            yield (
                f"{path} lets the policy call {target}, whose {open_to[0]} can reach"
                f" {_reach(own[open_to[0]].word)}"
            )
    if node.get("_args_") and not is_same(node["_args_"], get_child(base, "_args_")):
        yield f"{path}._args_={shorten_value(node['_args_'])} can reach {UNDECLARED}"
    for key, value in node.items():
        if key in CALLS or is_same(value, get_child(base, key)):
            continue
        where = f"{path}.{key}" if path else str(key)
        verdict = _verdict(own, key, value) if known and key != "suggests" else Declared("")
        if is_shipped(value, verdict, target, key, by):
            continue
        if verdict.word and _says(value, verdict) and not _is_own_model(target, key, value, by):
            yield f"{where}={shorten_value(value)} can reach {_reach(verdict.word)}"
        yield from find_unsafe_values(value, by, get_child(base, key), where, verdict.word)


def _verdict(own: Mapping[str, Declared], key: str, value: Any) -> Declared:
    """Return the Declared of a parameter. A key without its own parameter has the Declared of the
    function's `**keywords`. A part under such a key is checked on its own."""
    if key in own:
        return own[key]
    if isinstance(value, Mapping) and "_target_" in value:
        return Declared("")
    return next(
        (v for name, v in own.items() if name in ("settings", "kwargs")), Declared(UNDECLARED)
    )


def is_shipped(value: Any, verdict: Declared, target: Any, key: str, by: Folder) -> bool:
    """Return whether a value is the function's own default or is in a shipped option."""
    if is_same(value, verdict.default) or value is None:
        return True
    if verdict.plain and verdict.word:
        return False
    return value in read_shipped_values(by.conf).get(str(target), {}).get(key, ())


def _says(value: Any, verdict: Declared) -> bool:
    """Return whether a value has to be judged. A value with a text always has to be. A number or
    truth value only has to be judged if its parameter is declared to reach something."""
    return verdict.plain or any(map(is_text, walk_plain_values(value)))


def walk_plain_values(value: Any) -> Iterator[Any]:
    """Yield the leaves of a value. Nested functions are left out."""
    if isinstance(value, Mapping):
        if "_target_" not in value:
            for item in value.values():
                yield from walk_plain_values(item)
    elif isinstance(value, list):
        for item in value:
            yield from walk_plain_values(item)
    else:
        yield value


def is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_own_model(target: Any, key: str, value: Any, by: Folder) -> bool:
    """Return whether a value names a model shipped with rlkit, fetched by this user, or stored in
    the run folder itself."""
    from rlkit.models.load import EMBEDDED, FETCHED  # these imports load torch

    if (target, key) != MODEL or not isinstance(value, str):
        return False
    if value in EMBEDDED or value.startswith(FETCHED):
        return True
    if by.place is None:
        return False
    try:
        found = Path(value).expanduser().resolve()
    except (OSError, RuntimeError, ValueError):
        return False
    return found.is_dir() and found.is_relative_to(by.place.resolve())


def _reach(word: str) -> str:
    return REACHES.get(word, word)


def shorten_value(value: Any) -> str:
    said = "[" + ", ".join(map(str, value)) + "]" if isinstance(value, list) else str(value)
    return said if len(said) <= 80 else f"{said[:80]}…"


# ---------------------------------------------------------------------------------------- overrides

PLAIN_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w/.-]*)(@[\w.:-]*)?(=.*)?", re.DOTALL)
REFERENCE = re.compile(r"\$\{[\w.\[\]]+\}")  # a reference to another value of the config


def find_strange_overrides(overrides: Sequence[str]) -> Iterator[str]:
    """Find dangerous overrides of a folder: computed references and Hydra's own settings. Composing
    them can import modules and read files."""
    for text in overrides:
        found = PLAIN_OVERRIDE.fullmatch(text)
        key = found[1] if found else ""
        package = (found[2] or "") if found else ""
        if (
            not key
            or key.split("/")[0].split(".")[0] == "hydra"
            or re.search(r"[@:]hydra\b", package)
        ):
            yield f"{shorten_value(text)} can reach an import"
        elif "." not in key and ".." in text:  # a path to an option outside the folder of options
            yield f"{shorten_value(text)} can reach a path"
        elif "${" in REFERENCE.sub("", text):
            yield f"{shorten_value(text)} can reach an environment variable"


# ------------------------------------------------------------------------------------------- asking


def require_trust(found: Sequence[str], where: str, *, trusted: bool) -> None:
    """Raise ConfigError if the config of a folder has unsafe values and the user does not trust it.
    If the user does, print every unsafe value instead.

    Args:
      found: sentences from `find_unsafe_values` and `find_strange_overrides`.
      where: the folder of the config, as the user named it.
      trusted: whether the user has said trust=true.
    Raises: ConfigError with the findings.
    """
    different = list(dict.fromkeys(found))
    if not different:
        return
    more = f"; and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
    said = "; ".join(different[:SHOWN]) + more
    if not trusted:
        raise ConfigError(
            f"{where}: this folder is not known as your own, and not all of its config is declared"
            f" safe: {said}. If you know where it comes from, say trust=true"
        )
    tell_user(f"{where}: trusted: {said}")


def find_named_functions(text: str) -> frozenset[str]:
    """Find the names of functions in overrides or options."""
    return frozenset(re.findall(r"_target_\s*[:=]\s*['\"]?([\w.]+)", text))


def with_environment(node: Any, path: str = "") -> Any:
    """Return a config with its references to environment variables replaced by the variables'
    values. Raises ConfigError if a variable is not set."""
    if isinstance(node, Mapping):
        return {
            key: with_environment(value, f"{path}.{key}" if path else str(key))
            for key, value in node.items()
        }
    if isinstance(node, list):
        return [with_environment(value, path) for value in node]
    if not isinstance(node, str):
        return node

    def value(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise ConfigError(
                f"{path}: the run took this from the environment variable {found[1]}, which is not"
                " set; set it"
            )
        return os.environ[found[1]]

    return FROM_ENVIRONMENT.sub(value, node)
