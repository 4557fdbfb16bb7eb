"""Replace parts of an experiment by Python objects, and check the arguments of the package's
top-level functions. Type hints decide whether an object fits into a place."""

from __future__ import annotations

import functools
import inspect
import numbers
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any

from rlkit.config.functions import name_apart
from rlkit.config.schema import (
    alternatives,
    describe,
    fits,
    is_open,
    is_protocol,
    signature_hints,
)
from rlkit.environments.tools import tool_name
from rlkit.errors import ConfigError, name_function, require_arguments, suggest_name
from rlkit.rewards import Reward, Term
from rlkit.tasks import make_tasks
from rlkit.training.experiment import Experiment, ModelSpec
from rlkit.training.schedules.paths import list_fields
from rlkit.types import SPLITS, Policy, SamplingParams, Splits, Task, is_record, missing, plain

hints_of = functools.cache(signature_hints)  # for records


@functools.cache
def wrap_with_checks(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a top-level function of the package so that it checks its arguments. Unknown arguments
    are refused. A bare function becomes a Reward or a Term if the signature asks for this type.

    Raises: ConfigError in place of Python's TypeError, or of an AttributeError in the function.
    """
    signature = inspect.signature(function)
    # modules below the experiment's layer cannot import the type of x
    hints = {**signature_hints(function), "x": Experiment}

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        try:
            call = signature.bind(*arguments, **keywords)
        except TypeError as error:
            raise ConfigError(
                f"rlkit.{name}: {error}; it takes {', '.join(signature.parameters)}"
            ) from None
        for key, value in call.arguments.items():
            kind = signature.parameters[key].kind
            where = f"rlkit.{name}: {key}"
            hint = hints.get(key, Any)
            # keyword arguments of any name: further settings of an episode or of a config
            if kind is inspect.Parameter.VAR_KEYWORD:
                params = hints_of(SamplingParams)
                call.arguments[key] = {
                    own: lift_part(value[own], params.get(own, Any), f"rlkit.{name}: {own}")
                    for own in value
                }
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                call.arguments[key] = [lift_part(own, hint, where) for own in value]
            else:
                call.arguments[key] = lift_part(value, hint, where)
        return function(*call.args, **call.kwargs)

    checked.__module__ = "rlkit"  # the name pickle looks up
    checked.__qualname__ = name
    return checked


def place_part(owner: Any, path: str, part: Any, hint: Any, where: str) -> Any:
    """Return a copy of the owner with a new part at a path inside it.

    Args:
      path: dotted path of field names, keys and keyword arguments.
      hint: the owner's type.
      where: the whole path, for messages.
    Raises: ConfigError if the place does not exist or cannot take the part.
    """
    if not path:
        return lift_part(part, hint, where)
    name, _, rest = path.partition(".")
    if isinstance(owner, Mapping):
        within = (Any, *typing.get_args(hint))[-1]
        return {**owner, name: place_part(owner.get(name), rest, part, within, where)}
    if inspect.isroutine(owner):
        owner = partial(owner)
    is_partial = isinstance(owner, partial)
    takes = owner if is_partial else type(owner)
    if not (is_partial or is_record(owner)):
        raise ConfigError(
            f"{where}: there is no '{name}' to replace; give the whole part that it would belong to"
        )
    known = dict.fromkeys(inspect.signature(takes).parameters, Any) | signature_hints(plain(takes))
    if name not in known:
        raise ConfigError(
            f"{where}: there is no '{name}'.{suggest_name(name, known)} There are:"
            f" {', '.join(known)}"
        )
    new = {name: place_part(get_inside(owner, name), rest, part, known[name], where)}
    return partial(owner, **new) if is_partial else owner._replace(**new)


def get_inside(owner: Any, name: str) -> Any:
    """Return the field, entry or keyword argument with this name, or None if the owner does not
    have it."""
    return list_fields(owner).get(name)


def lift_part(part: Any, hint: Any, where: str) -> Any:
    """Convert a part, and everything in it, to the type of its place. Raises ConfigError if
    anything does not fit."""
    if hint in (Reward, Term) and not isinstance(part, hint):
        part = (make_reward if hint is Reward else make_term)(part, where)
    elif where == "task":
        part = part if callable(part) else make_task_function(part)
        require_arguments(part, "task", split="train")
        hint = Callable[..., Any]
    elif where == "model":
        part = wrap_policy(part) if isinstance(part, Policy) else part
        if hasattr(part, "named_parameters"):
            raise ConfigError(
                "model: a network alone has no tokenizer; give rlkit.models.make_policy(model,"
                " tokenizer)"
            )
        if callable(part):
            require_arguments(part, "model", device="cpu")
        hint = Callable[..., Any] | Policy
    is_scalar = isinstance(part, str | int | float | NoneType)
    fitting = [one for one in alternatives(hint) if (fits if is_scalar else stands)(part, one)]
    if not fitting:
        raise ConfigError(explain_misfit(part, hint, where))
    return part if is_scalar else with_lifted(part, fitting[0], where)


def with_lifted(part: Any, hint: Any, where: str) -> Any:
    """Convert the fields, values or items of a part with `lift_part`. The same object is returned
    if nothing changes."""
    within = typing.get_args(hint)
    if is_record(part) and isinstance(part, tuple):
        hints = hints_of(type(part))
        held: Mapping[Any, Any] = list_fields(part)
    elif isinstance(part, Mapping) and within:
        held = part
        hints = dict.fromkeys(part, within[-1])
    elif isinstance(part, Sequence) and len(within) == 1:
        held = dict(enumerate(part))
        hints = dict.fromkeys(held, within[0])
    else:
        return part
    new = {key: lift_part(held[key], hints.get(key, Any), f"{where}.{key}") for key in held}
    if all(new[key] is held[key] for key in held):
        return part
    if is_record(part):
        return part._replace(**new)
    return new if isinstance(part, Mapping) else [*new.values()]


def stands(part: Any, hint: Any) -> bool:
    """Return whether a part has the type of its place in the experiment. The part is not called,
    and its own fields are not checked."""
    base = typing.get_origin(hint) or hint
    if is_open(base):
        return True
    if is_function(base):
        return callable(part)
    if is_protocol(base):
        return not missing(part, base)
    kinds = {tuple: tuple | list, int: numbers.Integral, float: numbers.Real}
    # a record is a tuple, but does not count as a sequence
    alike = is_record(base) or not is_record(part)
    return alike and isinstance(base, type) and isinstance(part, kinds.get(base, base))


def is_function(base: Any) -> bool:
    """Return whether a type hint is `Callable` or a protocol with `__call__`."""
    calls = is_protocol(base) and any("__call__" in vars(own) for own in base.__mro__)
    return base is Callable or calls


def explain_misfit(part: Any, hint: Any, where: str) -> str:
    """Explain in a sentence why a part does not fit into its place."""
    wanted = [one for one in alternatives(hint) if one is not NoneType]
    hint = wanted[0] if len(wanted) == 1 else hint
    takes = ""
    if hint is Experiment:
        takes = "; make one by rlkit.experiment(…)"
    elif is_record(hint) and not where.startswith("rlkit."):
        prefix = where.replace(".", "__")
        own = ", ".join(f"{prefix}__{name}" for name in hint._fields)
        takes = f", or replace one of its parts: {own}"
    elif isinstance(part, type):
        takes = f", made of this class: {part.__name__}(…)"
    elif is_protocol(hint) and not is_function(hint):
        takes = f"; it has no {', '.join(missing(part, hint))}"
    words = " or ".join(map(describe_type, wanted))
    if isinstance(part, str | int | float | NoneType):
        return f"{where}: {part!r:.100} is not {words}{takes}"
    return f"{where}: {part!r:.100} cannot stand there; give {words}{takes}"


def describe_type(hint: Any) -> str:
    """Describe a type for a message, for example "a number", "a function" or "a value of the type
    Reward"."""
    base = typing.get_origin(hint) or hint
    if is_function(base):
        return "a function"
    said = describe(hint)
    return f"a value of the type {base.__name__}" if said.startswith("a part") else said


def name_tools(part: Any) -> Mapping[str, Any]:
    """Return name → tool. A single tool or a list of tools is named after the functions. A mapping
    keeps its names."""
    if isinstance(part, Mapping):
        return part
    tools = part if isinstance(part, list | tuple) else [part]
    return name_apart((tool_name(tool), tool) for tool in tools)


def make_term(part: Any, where: str) -> Term:
    """Make a reward term of weight 1 from a function of a rollout. A Term is returned as it is."""
    if isinstance(part, Term):
        return part
    if not callable(part):
        raise ConfigError(
            f"{where}: {part!r:.100} is no term of a reward; give a function (rollout) → float or a"
            " Term"
        )
    return Term(1.0, part)


def make_reward(part: Any, where: str) -> Reward:
    """Make a reward from functions and terms. In a mapping the keys are the names of the terms;
    otherwise the terms are named after their functions."""
    own = part if type(part) in (list, tuple) else [part]
    terms = (
        {name: make_term(one, f"{where}.terms.{name}") for name, one in part.items()}
        if isinstance(part, Mapping)
        else {}
    )
    terms = terms or name_apart(
        (name_function(term.fn).rpartition(".")[2].strip("<>"), term)
        for term in (make_term(one, where) for one in own)
    )
    return Reward("+".join(terms), terms)


def make_task_function(part: Any) -> Callable[..., Sequence[Task]]:
    """Make the function that returns the tasks of a split. `part` holds tasks, or rows with a
    prompt and an answer. Without splits, all tasks are for training."""
    if isinstance(part, Mapping):  # for example a DatasetDict
        part = Splits(**{split: part[split] for split in SPLITS if split in part})
    splits = part if isinstance(part, Splits) else Splits(part)
    tasks = {split: make_tasks(rows, split) for split, rows in splits._asdict().items()}
    return lambda *, split: tasks[split]


def wrap_policy(policy: Policy) -> ModelSpec:
    """Wrap a loaded policy as a run's model. The run moves it to its device."""

    def model(*, device: Any) -> Policy:
        policy.model.to(device)
        return policy

    config: Any = policy.model.config
    return ModelSpec(model, origin=config.name_or_path)
