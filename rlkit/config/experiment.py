"""`rlkit.experiment`: an experiment from Python. Options and checks are those of the command line;
any part may be a Python object."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlkit.config.compose import checked, compose, conf_dir
from rlkit.config.problems.schedules import phase_problems
from rlkit.config.schema import (
    alternatives,
    build,
    is_open,
    is_protocol,
    mismatch,
    signature_hints,
)
from rlkit.errors import ConfigError, nearest, written
from rlkit.rewards import Reward, Term
from rlkit.training.experiment import Experiment, ModelSpec, TaskSource, model_spec
from rlkit.training.schedules.paths import fields
from rlkit.types import Policy, Splits, Task, is_record, missing, plain

PLAIN = (str, int, float, bool, type(None), Path)


class Configured(Experiment):
    """An experiment that knows its config. `_replace` gives one that does not, since the config
    would no longer describe it."""

    config: Mapping[str, Any] = MappingProxyType({})
    # that give the config to Hydra; empty where a part is a Python object
    overrides: tuple[str, ...] = ()


def experiment(*overrides: str, config_dir: str | None = None, **keywords: Any) -> Experiment:
    """Compose an experiment from the options of conf/, as `rlkit train` does, and check it before a
    model is loaded.

        rlkit.experiment("algorithm=dapo", "kl=none", reward=my_reward, trainer__steps=10)

    Args:
      overrides: as on the command line.
      config_dir: a folder of your own options.
      keywords: overrides as keywords, two underscores for a dot: trainer__steps=10 is
        trainer.steps=10. A Python object replaces the part itself: reward=my_reward,
        algorithm__advantage=my_advantage, reference=rlkit.references.ema(decay=0.99). A reward may
        be a function, a Term, or several of them in a list or by name; a task a list of Tasks or a
        Splits; a model a Policy. A keyword below a part that is replaced sets it in the new one:
        algorithm__advantage__scale=0.5. trust=True allows what the command line allows by
        trust=true.
    Raises: ConfigError with all problems, in the sentences of the command line.
    """
    if "--config-dir" in " ".join(overrides):
        raise ConfigError('--config-dir: from Python, give the folder as config_dir="my_conf"')
    given = {key.replace("__", "."): value for key, value in keywords.items()}
    trusted = given.pop("trust", False) is True or "trust=true" in overrides
    parts = {path: value for path, value in given.items() if not is_plain(value)}
    # what is set beside a task or a model that is replaced is an option's
    above = tuple(f"{path}." for path in parts if path not in ("task", "model"))
    parts |= {path: value for path, value in given.items() if path.startswith(above)}
    words = [text for text in overrides if text not in ("trust=true", "trust=false")]
    words += [override(path, value) for path, value in given.items() if path not in parts]
    composed = compose(words, config_dir=config_dir, trusted=trusted)
    problems = phase_problems(
        composed.config, [f"{path}={type(part).__name__}" for path, part in parts.items()]
    )
    if problems:
        raise ConfigError("\n".join(problems))
    config = built = composed.config
    # Python objects that the function of an option is called with; the others replace what it gives
    early = [
        path
        for path, part in parts.items()
        if not path.startswith(above)
        if path.startswith(("environment.tools.", "task.sampler", "task.reuse"))
        or (path == "environment.tools" and isinstance(part, Mapping))
    ]
    for path in early:
        built = with_value(built, path, parts[path])
    x = build(built)
    source = x.task
    suggested = x.model.suggests
    x = x._replace(task=source.load, model=x.model.load)
    for path, part in parts.items():
        if path not in early:
            x = placed(x, path, part, Experiment, path)
            part = reduce(inside, path.split("."), x)
        config = with_value(config, path, described(part))
    # whatever gives tasks and model, their other numbers are those of the options it replaces
    x = x._replace(task=replace(source, load=x.task), model=model_spec(x.model, suggested))
    configured = Configured(*checked(x))
    configured.config = config
    configured.overrides = () if parts else tuple(composed.overrides)
    return configured


def is_plain(value: Any) -> bool:
    """Whether a config can hold the value: text, a number, a truth value, nothing, and lists and
    mappings of them."""
    if type(value) in (list, tuple):
        return bool(value) and all(map(is_plain, value))
    return all(map(is_plain, value.values())) if type(value) is dict else isinstance(value, PLAIN)


def override(path: str, value: Any) -> str:
    """A keyword as an override. A text chooses an option where there is a group of that name."""
    is_group = (conf_dir() / path.replace(".", "/")).is_dir()
    chosen = [value] if isinstance(value, str) else value
    if (
        is_group
        and isinstance(chosen, list | tuple)
        and all(isinstance(name, str) for name in chosen)
    ):
        options = f"[{','.join(chosen)}]" if chosen is value else value
        return f"{path.replace('.', '/')}={options}"
    return f"{path}={literal(value)}"


def literal(value: Any) -> str:
    """A plain value in Hydra's grammar."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{literal(own)}" for key, own in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(literal, value)) + "]"
    if isinstance(value, str | Path):
        return "'" + str(value).replace("'", r"\'") + "'"
    text = repr(value)
    return {"None": "null", "True": "true", "False": "false"}.get(text, text)


# -------------------------------------------------------------------------- parts as Python objects


def placed(owner: Any, path: str, part: Any, hint: Any, where: str) -> Any:
    """The owner with a part in place of what stands at a path inside it.

    Args:
      path: of field names, keys and keyword arguments. hint: the owner's type. where: the whole
        path, for messages.
    Raises: ConfigError where there is no such place, or where the part cannot stand there.
    """
    if not path:
        return lifted(part, hint, where)
    name, _, rest = path.partition(".")
    if isinstance(owner, Mapping):
        within = (Any, *typing.get_args(hint))[-1]
        return {**owner, name: placed(owner.get(name), rest, part, within, where)}
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
            f"{where}: there is no '{name}'.{nearest(name, known)} There are: {', '.join(known)}"
        )
    new = {name: placed(inside(owner, name), rest, part, known[name], where)}
    return partial(owner, **new) if is_partial else owner._replace(**new)


def inside(owner: Any, name: str) -> Any:
    """What stands under a name: a field, an entry or a keyword argument; None where nothing
    does."""
    return fields(owner).get(name)


def lifted(part: Any, hint: Any, where: str) -> Any:
    """The part as its place takes it. Raises ConfigError where it cannot stand there."""
    if hint in (Reward, Term) and not isinstance(part, hint):
        part = (as_reward if hint is Reward else as_term)(part, where)
    elif where == "task" and not callable(part):
        part = task_function(part, where)
    elif where == "model" and isinstance(part, Policy):
        part = the_policy(part)
    if is_plain(part):
        problems = mismatch(part, hint, where)
        if problems:
            raise ConfigError(problems[0])
    elif not any(stands(part, one) for one in alternatives(hint)):
        takes = ""
        if is_record(hint):
            prefix = where.replace(".", "__")
            own = ", ".join(f"{prefix}__{name}" for name in hint._fields)
            takes = f", or replace one of its parts: {own}"
        elif isinstance(part, type):
            takes = f", made of this class: {part.__name__}(…)"
        elif is_protocol(hint):
            takes = f"; it has no {', '.join(missing(part, hint))}"
        raise ConfigError(
            f"{where}: {part!r:.100} cannot stand there; give"
            f" {' or '.join(map(in_words, alternatives(hint)))}{takes}"
        )
    return part


def stands(part: Any, hint: Any) -> bool:
    """Whether a part is of the type that its place asks for, as far as that shows without calling
    it."""
    base = typing.get_origin(hint) or hint
    if is_open(base):
        return True
    if base is Callable or "__call__" in vars(base):
        return callable(part)
    if is_protocol(base):
        return not missing(part, base)
    return isinstance(base, type) and isinstance(part, base)


def in_words(hint: Any) -> str:
    """A type for a message: Reward; a function."""
    base = typing.get_origin(hint) or hint
    return (
        "a function"
        if base is Callable or "__call__" in vars(base)
        else f"a value of the type {base.__name__}"
    )


def as_term(part: Any, where: str) -> Term:
    """A function of a rollout as a term of weight 1."""
    if isinstance(part, Term):
        return part
    if not callable(part):
        raise ConfigError(
            f"{where}: {part!r:.100} is no term of a reward; give a function (rollout) → float or a"
            " Term"
        )
    return Term(1.0, part)


def as_reward(part: Any, where: str) -> Reward:
    """Functions and terms as a reward; they are named as they are in a mapping, else as the
    functions are."""
    own = part if type(part) in (list, tuple) else [part]
    terms = (
        {name: as_term(one, f"{where}.terms.{name}") for name, one in part.items()}
        if isinstance(part, Mapping)
        else {}
    )
    for one in own if not terms else ():
        term = as_term(one, where)
        name = written(term.fn).rpartition(".")[2].strip("<>")
        terms[name if name not in terms else f"{name}_{len(terms)}"] = term
    return Reward("+".join(terms), terms)


def task_function(part: Any, where: str) -> Callable[..., Sequence[Task]]:
    """Tasks as the function of a split that a run asks. A list is all for training, without
    validation or test problems."""
    splits = part if isinstance(part, Splits) else Splits(part)
    if isinstance(part, Task) or not all(isinstance(task, Task) for own in splits for task in own):
        raise ConfigError(
            f"{where}: {part!r:.100} are no tasks; give a list of Task, a Splits, or a function"
            " (split=…) → tasks"
        )
    return lambda *, split: splits._asdict()[split]


def the_policy(policy: Policy) -> ModelSpec:
    """A policy that is loaded already, as a run loads it; it is moved to the run's device."""

    def model(*, device: Any) -> Policy:
        policy.model.to(device)
        return policy

    config: Any = policy.model.config
    return ModelSpec(model, origin=config.name_or_path)


# ------------------------------------------------------------------------------------- written down


def described(part: Any) -> Any:
    """A part as a node of a config, for the run folder: what it is called, and its plain values. It
    may not be buildable again."""
    if is_plain(part):
        return str(part) if isinstance(part, Path) else part
    if isinstance(part, Mapping):
        return {str(key): described(value) for key, value in part.items()}
    if isinstance(part, ModelSpec | TaskSource):
        return described(part.load)
    if is_record(part):
        return {"_target_": written(type(part)), **described(part._asdict())}
    if isinstance(part, list | tuple):
        return [described(value) for value in part[:8]]  # of a long list of tasks the first ones
    if isinstance(part, partial):
        return {"_target_": written(part.func), "_partial_": True, **described(part.keywords)}
    return {
        "_target_": written(part if callable(part) else type(part)),
        "_partial_": callable(part),
    }


def with_value(config: Any, path: str, value: Any) -> Any:
    """A copy of a nested mapping with the value at a dotted path."""
    name, _, rest = path.partition(".")
    held = fields(config)
    return {**held, name: with_value(held.get(name), rest, value) if rest else value}
