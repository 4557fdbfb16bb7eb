"""Check a config and build its objects. A function's signature is the schema of its config node.

Every mapping in a config has a `_target_`, or holds named parts if a signature asks for a mapping.
The signature of the target (the function named by `_target_`) lists the keys and their types.
Therefore one walk through the config finds every unknown key, every wrong type and every missing
value. Keys added with `+` are checked too. A second walk of the same shape builds the functions.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import sys
import types
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, Protocol

from rlkit.config.hints import list_leaves, suggest_key
from rlkit.config.options import conf_dir
from rlkit.errors import (
    ConfigError,
    describe_error,
    list_parameters,
    name_error,
    place,
    suggest_name,
)
from rlkit.system.extras import explain_missing
from rlkit.system.shared_state import FOLDER, guard_state
from rlkit.types import is_record

# `suggests` holds an option's suggestions for other groups. The defaults of the other groups refer
# to `suggests`. The option's own function never gets it.
SPECIAL = ("_target_", "_partial_", "_args_", "suggests")
KINDS = {"_target_": str, "_partial_": bool, "_args_": list}
WANTED = {
    "_target_": "the name of a function; write MODULE.FUNCTION",
    "_partial_": "true or false",
    "_args_": "a list of values",
}
# Suggestions that an option can make to other groups, with their types. All numbers are > 0.
SUGGESTED: dict[str, Any] = {
    **dict.fromkeys(("lr", "lora_lr", "critic_lr"), float),
    "thinking": bool | None,
    "max_new_tokens": int | None,
    **dict.fromkeys(
        ("steps", "micro_batch_tokens", "max_new_tokens_thinking", "turns", "prompts"), int
    ),
    **dict.fromkeys(("embedded", "environment"), str),
    "kl": Any,
    **dict.fromkeys(("show", "weights"), str),  # read by teacher=context
}
# Keys below `task` in a config that are parts of the run, not arguments of the task's function.
BESIDE = ("sampler", "reuse")
MISSING = "???"
# keyword-only parameters that the run passes itself; a config does not set them
GIVEN_LATER = ("split", "device")


# ----------------------------------------------------------------------------------------- checking


def check(node: Any, path: str = "", leaves: Sequence[str] = ()) -> list[str]:
    """List every problem of a composed config. A problem is one sentence with the path, the fault
    and the nearest valid name.

    `leaves`: the dotted keys of the whole config, from which the nearest key is suggested. The
    default is the keys of `node`.
    """
    leaves = leaves or (list_leaves(node) if isinstance(node, dict) else [])
    if isinstance(node, list):
        return [p for i, item in enumerate(node) for p in check(item, f"{path}[{i}]", leaves)]
    if node == MISSING:
        return [f"{path}: has no default; set {path}=VALUE"]
    if isinstance(node, float) and math.isnan(node):
        return [f"{path}: nan is no number that anything can be computed with; give one"]
    if isinstance(node, int) and abs(node) >= 1 << 63:
        return [f"{path}: this number has more digits than can be counted with; give a smaller one"]
    if not isinstance(node, dict):
        return []
    if "_target_" not in node:
        return [p for key, value in node.items() for p in check(value, _join(path, key), leaves)]
    if node["_target_"] == MISSING:
        return [f"{path}: has no default; set {_join(path, '_target_')}=MODULE.FUNCTION"]
    for key, kind in KINDS.items():
        if key in node and not isinstance(node[key], kind):
            return [f"{_join(path, key)}: {node[key]!r:.200} is not {WANTED[key]}"]
    try:
        target = resolve(node["_target_"])
    except ConfigError as error:
        return [f"{_join(path, '_target_')}: {error}"]
    return _check_call(node, target, path, leaves)


def _check_call(
    node: Mapping[str, Any], target: Callable[..., Any], path: str, leaves: Sequence[str]
) -> list[str]:
    """Check the keys and values of a node against its target's signature, then the nodes within."""
    parameters = list_parameters(target)
    partial = node.get("_partial_", False)
    # Required positional parameters of a partial are given when the part is called, so a config
    # does not set them.
    named = {
        name: p
        for name, p in parameters.items()
        if p.kind is p.KEYWORD_ONLY
        or (p.kind is p.POSITIONAL_OR_KEYWORD and not (partial and p.default is p.empty))
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    hints = signature_hints(target)
    of_task = path.rpartition(".")[2] == "task"  # the path may also begin with a phase
    beside = [key for key in BESIDE if of_task and key in node and key not in named]
    keys = [key for key in node if key not in SPECIAL and key not in beside]
    problems = [
        problem
        for key in beside
        for problem in _check_value(node[key], Callable[..., Any], _join(path, key), leaves)
    ]
    problems += _check_suggestions(node.get("suggests", {}), _join(path, "suggests"))
    for key in keys:
        where = _join(path, key)
        if key in named:
            problems += _check_value(node[key], hints.get(key, Any), where, leaves)
        elif not takes_any:
            label = f"'{node['_target_']}'" if path else "a run"
            # a user's own function may replace a part that has this key
            own = path and not str(node["_target_"]).startswith("rlkit.")
            away = (
                f"; where the option behind it sets '{key}', take it out with ~{where}"
                if own
                else ""
            )
            hint = suggest_name(key, named) if own else suggest_key(where, named, leaves, node[key])
            problems.append(
                f"{where}: {label} takes no '{key}'.{hint} It takes:"
                f" {', '.join(named) or 'nothing'}{away}"
            )
    for name, p in named.items():
        if (
            p.default is p.empty
            and name not in keys
            and not node.get("_args_")
            and not (partial and name in GIVEN_LATER)
        ):
            problems.append(f"{_join(path, name)}: '{node['_target_']}' needs a value here")
    return problems


def _check_suggestions(given: Any, path: str) -> list[str]:
    """Report suggestions of an option if no other group reads them, or if they have the wrong type.
    They are reported even if the config overrides the suggested key."""
    if not isinstance(given, dict):
        return [f"{path}: {given!r} is not a mapping of suggestions"]
    problems = []
    for key, value in given.items():
        if key not in SUGGESTED:
            problems.append(
                f"{path}.{key}: nothing reads this.{suggest_name(key, SUGGESTED)} There are:"
                f" {', '.join(SUGGESTED)}"
            )
        elif value == MISSING:
            problems.append(f"{path}.{key}: has no value; set one, or leave the key out")
        elif not fits(value, SUGGESTED[key]):
            problems.append(f"{path}.{key}: {value!r} is not {describe(SUGGESTED[key])}")
        elif isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
            problems.append(f"{path}.{key}={value}: must be greater than 0")
    return problems


def _check_value(value: Any, hint: Any, where: str, leaves: Sequence[str]) -> list[str]:
    """Check a value against the type hint of its parameter. Also check every node inside the
    value."""
    problems = check(value, where, leaves)
    return (
        problems
        if problems and not isinstance(value, dict | list)
        else problems + find_mismatches(value, hint, where)
    )


def find_mismatches(value: Any, hint: Any, where: str) -> list[str]:
    """Report each value, at any depth, with another type than its parameter in the signature."""
    if isinstance(value, dict) and "_target_" in value:
        return _report_bare_function(value, hint, where)
    if value == MISSING:
        return []
    if not isinstance(value, dict | list):
        said = f"is not {describe(hint)}"
        group = where.replace(".", "/")
        if said.startswith("is not a part") and (conf_dir() / group).is_dir():
            said = f"names an option; write {group}={value}"
        return [] if fits(value, hint) else [f"{where}: {value!r} {said}"]
    holding = [option for option in alternatives(hint) if _holds(option, type(value))]
    if not holding:
        part = next(
            (_public_name(option) for option in alternatives(hint) if is_record(option)),
            "",
        )
        if part and isinstance(value, dict):
            return [
                f"{where}: {value!r} has no _target_, so nothing says what it is; add _target_:"
                f" {part}"
            ]
        return [f"{where}: {value!r} is not {describe(hint)}"]
    inside = typing.get_args(holding[0])
    if len(holding) > 1 or not inside:
        return []
    if isinstance(value, dict):
        items = [(_join(where, key), item) for key, item in value.items()]
    else:
        items = [(f"{where}[{i}]", item) for i, item in enumerate(value)]
    hints = [inside[-1]] * len(items)
    if typing.get_origin(holding[0]) is tuple:
        hints = [inside[0]] * len(items) if ... in inside else [*inside]
        if len(hints) != len(items):
            return [f"{where}: {value!r} has {len(items)} values; give {len(hints)}"]
    return [
        problem
        for (place, item), own in zip(items, hints, strict=True)
        for problem in find_mismatches(item, own, place)
    ]


def _report_bare_function(node: Mapping[str, Any], hint: Any, where: str) -> list[str]:
    """Report a bare function given where a record with a function is needed, for example a reward
    function instead of a term."""
    wanted = [option for option in alternatives(hint) if option is not type(None)]
    if not node.get("_partial_") or not wanted or not all(map(is_record, wanted)):
        return []
    part = _public_name(wanted[0])
    held = next(
        (
            name
            for name, kind in signature_hints(wanted[0]).items()
            if typing.get_origin(kind) is Callable
        ),
        None,
    )
    beneath = (
        f"; write _target_: {part} there, and the function beneath it as {held}"
        if held
        else f"; write _target_: {part}"
    )
    return [f"{where}: '{node['_target_']}' is a function, not a {part}{beneath}"]


def _public_name(part: type) -> str:
    """Return the dotted name of a class, as a config writes it. The name begins with the package if
    the package exports the class, otherwise with the module."""
    package = part.__module__.rpartition(".")[0]
    module = sys.modules.get(package)
    home = package if getattr(module, part.__name__, None) is part else part.__module__
    return f"{home}.{part.__name__}"


def _holds(hint: Any, kind: type) -> bool:
    """Return whether a hint accepts a container of this kind: a sequence hint accepts a list, a
    mapping hint a dict."""
    base = typing.get_origin(hint) or hint
    if is_open(base):
        return True
    if base is tuple or not inspect.isclass(base):
        return base is tuple and kind is list
    return base not in (Callable, Hashable) and not is_protocol(base) and issubclass(kind, base)


def is_open(hint: Any) -> bool:
    """Return whether a hint accepts every value."""
    return hint in (Any, object) or isinstance(hint, typing.TypeVar)


def is_protocol(hint: Any) -> bool:
    """Return whether a class is a Protocol. A value then fits if it has the Protocol's methods and
    attributes."""
    return isinstance(hint, type) and Protocol in hint.__bases__


def fits(value: Any, hint: Any) -> bool:
    """Return whether a plain value fits a hint. A text is never read as a number."""
    for option in alternatives(hint):
        if is_open(option) or (option is type(None) and value is None):
            return True
        if typing.get_origin(option) is Literal and value in typing.get_args(option):
            return True
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return True
        if option in (int, str, bool) and type(value) is option:
            return True
    return False


def describe(hint: Any) -> str:
    """Describe a hint in words, for example 'a whole number or null' or 'a list, [value, …]'."""
    names = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        type(None): "null",
    }
    words = []
    for option in alternatives(hint):
        base = typing.get_origin(option) or option
        if base is Literal:
            words.append("one of " + ", ".join(map(str, typing.get_args(option))))
        elif (
            inspect.isclass(base)
            and base is not str
            and issubclass(base, Mapping | Sequence)
            and not is_record(base)
        ):
            words.append(
                "a mapping, {name: value}" if issubclass(base, Mapping) else "a list, [value, …]"
            )
        else:
            words.append(names.get(option, "a part (a mapping with a _target_)"))
    return " or ".join(dict.fromkeys(words))


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union. For any other hint, return a tuple with only this hint."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(a for h in typing.get_args(hint) for a in alternatives(h))
    return (hint,)


def signature_hints(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the type hints by parameter. A hint that cannot be evaluated here counts as Any."""
    try:
        return typing.get_type_hints(target.__init__ if _is_plain_class(target) else target)
    except (NameError, TypeError, AttributeError):
        return {}


def _is_plain_class(target: Any) -> bool:
    return inspect.isclass(target) and not issubclass(target, tuple)


@functools.cache
def resolve(name: Any) -> Callable[..., Any]:
    """Import the function named by a `_target_`. Raises ConfigError with the nearest valid name."""
    module_name, _, attribute = str(name).rpartition(".")
    try:
        with guard_state(f"importing {module_name}", kinds=[FOLDER]):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = explain_missing(str(name))
        if missing:
            raise ConfigError(missing) from None
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"'{name}' cannot be imported ({error}); is the package installed, and the folder"
                " on PYTHONPATH?"
            ) from error
        raise ConfigError(f"'{name}' cannot be imported: {place(error)}: {error}") from error
    except SyntaxError as error:
        raise ConfigError(
            f"'{name}' cannot be imported: {error.filename}:{error.lineno}: {error.msg}"
        ) from error
    except Exception as error:  # a user's module may raise any error while it is imported
        raise ConfigError(
            f"'{name}' cannot be imported: {place(error)}: {name_error(error)}"
        ) from error
    target = getattr(module, attribute, MISSING)
    if target is MISSING:
        public = [n for n in dir(module) if not n.startswith("_")]
        raise ConfigError(f"'{module_name}' has no '{attribute}'.{suggest_name(attribute, public)}")
    if not callable(target):
        raise ConfigError(f"'{name}' is not a function")
    return target


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


# ----------------------------------------------------------------------------------------- building


def build(node: Any, path: str = "") -> Any:
    """Build the objects of a checked config. A node with `_partial_` becomes a `functools.partial`.

    Raises: ConfigError naming the config path of the part that refuses its values.
    """
    if isinstance(node, list):
        return [build(item, f"{path}[{i}]") for i, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    values = {
        key: build(value, _join(path, key)) for key, value in node.items() if key not in SPECIAL
    }
    if "_target_" not in node:
        return values
    target = resolve(node["_target_"])
    arguments = [build(a, f"{path}._args_") for a in node.get("_args_", ())]
    beside = {
        key: values.pop(key)
        for key in BESIDE
        if path == "task" and key in values and key not in list_parameters(target)
    }
    if node.get("_partial_"):
        part: Any = functools.partial(target, *arguments, **values)
    else:
        try:
            with guard_state(target, kinds=[FOLDER]):
                part = target(*arguments, **values)
        except Exception as error:  # a user's function may raise any error
            plain = isinstance(error, TypeError | ValueError)
            said = error if plain else describe_error(error)
            raise ConfigError(f"{path or node['_target_']}: {said}") from error
    if path not in ("task", "model"):
        return part
    from rlkit.training.experiment import TaskSource, model_spec

    if path == "task":
        return TaskSource(part, **beside)
    return model_spec(part, node.get("suggests", {}))
