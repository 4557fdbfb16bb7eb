"""Make an experiment from Python, with the options and checks of the command line
(`rlkit.experiment`). Any part may be a Python object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial, reduce
from numbers import Number
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlkit.config.compose import check_experiment, compose, conf_dir
from rlkit.config.functions import format_literal
from rlkit.config.parts import get_inside, name_tools, place_part
from rlkit.config.problems.schedules import phase_problems
from rlkit.config.schema import build
from rlkit.errors import ConfigError, name_function, refuse_problems
from rlkit.training.experiment import Experiment, ModelSpec, TaskSource, model_spec
from rlkit.training.schedules.paths import list_fields
from rlkit.types import is_record

PLAIN = (str, int, float, bool, type(None), Path)


class Configured(Experiment):
    """Hold an experiment with its config. `_replace` returns a plain Experiment without the config,
    because the config would no longer describe the changed experiment."""

    config: Mapping[str, Any] = MappingProxyType({})
    # the overrides from which the config was composed; None if any part is a Python object
    overrides: tuple[str, ...] | None = ()


def experiment(
    *overrides: str,
    config_dir: str | Path | None = None,
    **keywords: Any,
) -> Experiment:
    """Compose an experiment from the options of conf/, as `rlkit train` does, and check it before a
    model is loaded.

        rlkit.experiment("algorithm=dapo", "kl=none", reward=my_reward, trainer__steps=10)

    Args:
      overrides: as on the command line.
      config_dir: a folder of your own options.
      keywords: overrides as keywords, with two underscores for a dot: trainer__steps=10 is
        trainer.steps=10. A Python object replaces the part itself: reward=my_reward,
        algorithm__advantage=my_advantage, reference=rlkit.references.ema(decay=0.99). A reward may
        be a function, a Term, or several of them in a list or by name. A task may be a list of
        Tasks, rows with a prompt and an answer, a `datasets.Dataset`, or a Splits of these. Tools
        may be one function or several. A model may be a Policy. A keyword below a replaced part
        sets a value in the new part: algorithm__advantage__scale=0.5.
    Raises: ConfigError with all problems, in the same sentences as on the command line.
    """
    if "--config-dir" in " ".join(overrides):
        raise ConfigError('--config-dir: from Python, give the folder as config_dir="my_conf"')
    given = {key.replace("__", "."): unwrap(value) for key, value in keywords.items()}
    parts = {path: value for path, value in given.items() if is_part(path, value)}
    # keys below a replaced task or model still belong to the option
    above = tuple(f"{path}." for path in parts if path not in ("task", "model"))
    parts |= {path: value for path, value in given.items() if path.startswith(above)}
    more = [override(path, value) for path, value in given.items() if path not in parts]
    words = [*overrides, *more]
    composed = compose(words, config_dir=config_dir)
    problems = phase_problems(
        composed.config, [f"{path}={type(part).__name__}" for path, part in parts.items()]
    )
    refuse_problems(problems)
    config = built = composed.config
    # these objects are passed to an option's function as arguments; all others replace the
    # function's result
    early = [
        path
        for path in parts
        if path.startswith(("environment.tools", "task.sampler", "task.reuse"))
        and not path.startswith(above)
    ]
    for path in early:
        own = name_tools(parts[path]) if path == "environment.tools" else parts[path]
        built = with_value(built, path, own)
    x = build(built)
    source = x.task
    suggested = x.model.suggests
    x = x._replace(task=source.load, model=x.model.load)
    for path, part in parts.items():
        if path not in early:
            x = place_part(x, path, part, Experiment, path)
            part = reduce(get_inside, path.split("."), x)
        config = with_value(config, path, describe_part(part))
    # a replaced task or model keeps the other numbers of its option
    x = x._replace(task=replace(source, load=x.task), model=model_spec(x.model, suggested))
    configured = Configured(*check_experiment(x))
    configured.config = config
    configured.overrides = None if parts else tuple(composed.overrides)
    return configured


def unwrap(value: Any) -> Any:
    """Return NumPy's numbers as Python's, also in lists."""
    if type(value) in (list, tuple):
        return type(value)(map(unwrap, value))
    return value.item() if isinstance(value, Number) and hasattr(value, "item") else value


def is_part(path: str, value: Any) -> bool:
    """Return whether the value of a keyword is a Python object instead of a plain value. Rows given
    for a task count as a Python object."""
    rows = isinstance(value, list | tuple) or (isinstance(value, Mapping) and "train" in value)
    return (path == "task" and rows) or not is_plain(value)


def is_plain(value: Any) -> bool:
    """Return whether a config can hold a value: text, a number, a truth value, None, or lists and
    mappings of such values."""
    if type(value) in (list, tuple):
        return bool(value) and all(map(is_plain, value))
    return all(map(is_plain, value.values())) if type(value) is dict else isinstance(value, PLAIN)


def override(path: str, value: Any) -> str:
    """Write a keyword as an override. If the keyword is the name of a group, a text chooses an
    option of the group."""
    is_group = (conf_dir() / path.replace(".", "/")).is_dir()
    chosen = [value] if isinstance(value, str) else value
    if (
        is_group
        and isinstance(chosen, list | tuple)
        and all(isinstance(name, str) for name in chosen)
    ):
        options = f"[{','.join(chosen)}]" if chosen is value else value
        return f"{path.replace('.', '/')}={options}"
    return f"{path}={format_literal(value)}"


# ------------------------------------------------------------------------------------- written down


def describe_part(part: Any) -> Any:
    """Describe a part as a node of a config, for the run folder. The node has the part's name and
    its plain values. The node is a description: rlkit may not be able to build the part from it
    again."""
    if is_plain(part):
        return str(part) if isinstance(part, Path) else part
    if isinstance(part, Mapping):
        return {str(key): describe_part(value) for key, value in part.items()}
    if isinstance(part, ModelSpec | TaskSource):
        return describe_part(part.load)
    if is_record(part):
        return {"_target_": name_function(type(part)), **describe_part(part._asdict())}
    if isinstance(part, list | tuple):
        return [describe_part(value) for value in part[:8]]  # only the first tasks of a long list
    if isinstance(part, partial):
        return {
            "_target_": name_function(part.func),
            "_partial_": True,
            **describe_part(part.keywords),
        }
    return {
        "_target_": name_function(part if callable(part) else type(part)),
        "_partial_": callable(part),
    }


def with_value(config: Any, path: str, value: Any) -> Any:
    """Copy a nested mapping, with a new value at a dotted path."""
    name, _, rest = path.partition(".")
    held = list_fields(config)
    return {**held, name: with_value(held.get(name), rest, value) if rest else value}
