"""Make an Experiment from overrides. Hydra composes the config. The config is checked before any
model or data is loaded. Then the Experiment is built from plain functions.

Order: overrides → composed config → every key checked (rlkit.config.schema) → functions built →
validated, dry-run on fake data (rlkit.config.problems). Each stage reports all of its problems
together. No stage imports a heavier package than torch.
"""

from __future__ import annotations

import copy
import difflib
import functools
import importlib.util
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlkit.config.changes import find_differences
from rlkit.config.functions import read_functions, read_key
from rlkit.config.options import SHELVES, conf_dir
from rlkit.config.problems import run_problems
from rlkit.config.problems.names import name_problems
from rlkit.config.problems.numbers import range_problems
from rlkit.config.problems.schedules import (
    build_first_steps,
    build_last_steps,
    phase_problems,
)
from rlkit.config.problems.trial import dry_run
from rlkit.config.schema import build, check
from rlkit.config.suggestions import RESOLVERS
from rlkit.errors import ConfigError, describe_yaml_error, refuse_problems, suggest_name
from rlkit.system.extras import explain_missing
from rlkit.system.redaction import learn
from rlkit.system.shared_state import FOLDER, guard_state

if TYPE_CHECKING:  # torch is imported only with the parts that need it
    from hydra.types import HydraContext
    from omegaconf import DictConfig

    from rlkit.training.experiment import Experiment


# (key under which a task declares names, function with a part for each name, option with these
# parts)
BY_TASK = (
    ("rewards", "rlkit.rewards.by_task", "reward/by_task.yaml"),
    ("environments", "rlkit.environments.by_task", "environment/by_task.yaml"),
)


# ---------------------------------------------------------------------------------------- composing


class Composed(NamedTuple):
    """Hold a composed config: the config as plain containers, the accepted overrides, and Hydra's
    full object with Hydra's own settings."""

    config: dict[str, Any]
    overrides: list[str]
    full: DictConfig


def compose(
    overrides: Sequence[str],
    *,
    entry: str = "train",
    config_dir: str | Path | None = None,
    before_import: Callable[[dict[str, Any]], None] | None = None,
) -> Composed:
    """Compose an entry config and check it. All problems are reported in one message.

    Args:
      overrides: as on the command line. A key needs no `+` if it is in a part's signature.
      entry: train, evaluate or rollout.
      config_dir: a folder of the user's own options.
      before_import: a function called with the config before any module of the config is imported;
        it may refuse the config. In the config given to this function, values of environment
        variables are written as ${oc.env:NAME}.
    Raises: ConfigError.
    """
    import logging

    logging.getLogger("hydra").setLevel(logging.ERROR)
    _check_searchpath(overrides)
    with initialize_hydra(config_dir) as search:
        problems, accepted = _check_overrides(overrides, search)
        problems += _find_clashes(config_dir)
        try:
            full, accepted = _load(entry, search, accepted)
            plain = _resolve_all(full)
        except ConfigError as error:
            raise ConfigError("\n".join([*problems, str(error)])) from error
        problems += _take_misplaced(plain)
    learn(plain, read_unresolved(full))
    if before_import is not None:
        before_import(with_variables(full))
    problems += check(plain) or range_problems(plain)
    problems += phase_problems(plain, overrides)
    problems += name_problems(plain)
    refuse_problems(problems)
    return Composed(plain, accepted, full)


def compose_without_values(
    theirs: Sequence[str], mine: Sequence[str], *, entry: str, config_dir: str | None
) -> dict[str, Any]:
    """Compose a config from the options chosen by a run folder and from all overrides of the user,
    in the form of `with_variables`.

    The folder's overrides of single values are left out. Its choice of `sandbox` is left out too,
    because this choice decides how strictly code is confined.
    """
    with initialize_hydra(config_dir) as search:
        chosen = [
            text
            for text in theirs
            if is_group(text, search) and not re.match(r"[+~]*(hydra|sandbox)\b", text)
        ]
        for own in ([*mine], []):  # the user's overrides may need the folder's values
            try:
                full, _ = _load(entry, search, _check_overrides([*chosen, *own], search)[1])
                elsewhere = any(
                    ".." in str(option) for option in full.hydra.runtime.choices.values()
                )
                return {} if elsewhere else with_variables(full)
            except ConfigError:
                continue
    return {}


def with_variables(full: DictConfig) -> dict[str, Any]:
    """Return the plain config with ${oc.env:NAME} in place of each value of an environment
    variable, even if the value comes through a reference to another key."""
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    def name_it(name: str, *default: Any) -> Any:
        return f"${{oc.env:{name}}}" if name in os.environ or not default else default[0]

    OmegaConf.register_new_resolver("oc.env", name_it, replace=True)
    try:
        return _resolve_all(full)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


PRESETS = ("experiment", "debug")  # options of these groups set keys of other groups


class Layer(NamedTuple):
    """Describe a file of conf/ as a layer of a config. A later layer overrides the keys of an
    earlier layer."""

    option: str  # GROUP=NAME; empty for the entry config and for Hydra's own files
    config: dict[str, Any]  # its keys at their final paths, with references as written
    overrides: dict[str, str]  # the preset's choices in other groups: group → NAME


def list_layers(
    composed: Composed, *, entry: str = "train", config_dir: str | None = None
) -> tuple[Layer, ...]:
    """List the files behind a composed config, in Hydra's order. Values of the command line are
    left out."""
    with initialize_hydra(config_dir) as search:
        groups = [text for text in composed.overrides if is_group(text, search)]
        chosen = (*search, *groups)
        return _list_layers(entry, chosen, _stamp(chosen))


@functools.lru_cache(maxsize=64)
def _list_layers(entry: str, overrides: tuple[str, ...], stamp: object) -> tuple[Layer, ...]:
    """List the layers of a composition of options. `stamp` invalidates the cache when a file
    changes."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    loader: Any = GlobalHydra.instance().config_loader()
    _, repository = loader._parse_overrides_and_create_caching_repo(entry, list(overrides))
    found = []
    for default in loader.compute_defaults_list(entry, list(overrides), RunMode.RUN).defaults:
        group, _, name = default.config_path.rpartition("/")
        if group.partition("/")[0] in PRESETS:  # experiment=bench/lake
            group, _, name = default.config_path.partition("/")
        listed = repository.load_config(default.config_path).defaults_list
        chosen = {
            str(item.group).lstrip("/") + (f"@{item.package}" if item.package else ""): item.value
            for item in listed or ()
            if item.is_override()
        }
        config: Any = loader._load_single_config(default, repository).config
        plain: Any = OmegaConf.to_container(config, resolve=False)
        plain.pop("defaults", None)
        found.append(Layer(f"{group}={name}" if group else "", plain, chosen))
    return tuple(found)


@contextmanager
def initialize_hydra(config_dir: str | Path | None) -> Iterator[list[str]]:
    """Initialise Hydra for this block, with conf/ and rlkit's resolvers. Yield the overrides with
    which Hydra also searches the user's folder."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    for name, resolver in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    search = searchpath(config_dir)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield search


@contextmanager
def hydra_context(config: DictConfig) -> Iterator[HydraContext]:
    """Yield Hydra's context for jobs with a composed config, including the callbacks in the config
    (hydra.callbacks)."""
    from hydra import initialize_config_dir
    from hydra._internal.callbacks import Callbacks
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import HydraContext

    with initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="train"):
        yield HydraContext(
            config_loader=GlobalHydra.instance().config_loader(), callbacks=Callbacks(config)
        )


def find_length_keys(composed: Composed) -> tuple[str, ...]:
    """List the dotted keys whose values depend on the run's length, as in ${trainer.steps}. When
    two configs are compared, differences in these keys are allowed, as for the run's length."""
    from omegaconf import OmegaConf

    longer = copy.deepcopy(composed.full)
    OmegaConf.update(
        longer, "trainer.steps", 2 * composed.config["trainer"]["steps"] + 1, force_add=True
    )
    OmegaConf.update(
        longer,
        "trainer.max_time",
        2 * (composed.config["trainer"].get("max_time") or 0) + 1,
        force_add=True,
    )
    return tuple(find_differences(composed.config, _resolve_all(longer)))


def searchpath(config_dir: str | Path | None) -> list[str]:
    """Return the override that makes Hydra search a user's folder for options too. Raises
    ConfigError if the folder does not exist."""
    if config_dir and not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {config_dir}: no such folder")
    return [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []


def _find_clashes(config_dir: str | Path | None) -> list[str]:
    """Report options of a user's folder hidden by a shipped option of the same name. Hydra itself
    would ignore them silently."""
    folder = Path(config_dir) if config_dir else None
    files = sorted(folder.rglob("*.yaml")) if folder else []
    hidden = [f for f in files if folder and (conf_dir() / f.relative_to(folder)).exists()]
    return [
        f"{f}: an option of this name ships with rlkit and would be taken instead; rename the file"
        for f in hidden
    ]


def _check_searchpath(overrides: Sequence[str]) -> None:
    """Raise ConfigError if a folder in hydra.searchpath does not exist. Hydra would only warn, and
    then not find the options in it."""
    for scheme, place in re.findall(
        r"(file|pkg)://([^\]\s,'\"]+)",
        " ".join(text for text in overrides if "hydra.searchpath=" in text),
    ):
        if scheme == "file" and not Path(place).is_dir():
            raise ConfigError(
                f"hydra.searchpath: file://{place} is no folder; name the folder that holds your"
                " groups"
            )
        if scheme == "pkg" and not _is_importable(place):
            raise ConfigError(
                f"hydra.searchpath: pkg://{place} cannot be imported; install the package, or put"
                " its folder on PYTHONPATH"
            )


def _is_importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _load(
    entry: str, search: Sequence[str], overrides: Sequence[str]
) -> tuple[DictConfig, list[str]]:
    """Compose the config, including the node `hydra`. Return it with the accepted overrides. Every
    failure becomes a ConfigError.

    Hydra composes the groups. Then this function sets the values as Hydra would. A key without an
    entry in the YAML files is added, because a function's signature may have it. The later check
    against the schema decides.
    """
    import yaml
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    parser = OverridesParser.create()
    groups = [text for text in overrides if is_group(text, search)]
    chosen = (*search, *groups)
    accepted = []
    text = ""
    try:
        full = pickle.loads(_compose_groups(entry, chosen, _stamp(chosen)))
        # functions come before values, as options do, and the last override of a key counts
        for text in {read_key(text): text for text in overrides}.values():
            for path, value in read_functions(text).items():
                OmegaConf.update(full, path, value, merge=False, force_add=True)
        for text in overrides:
            if text in groups or read_functions(text):
                accepted.append(text)
                continue
            try:
                ConfigLoaderImpl._apply_overrides_to_config(parser.parse_overrides([text]), full)
            except HydraException:
                if text[0] in "+~":
                    raise
                text = f"++{text}"
                ConfigLoaderImpl._apply_overrides_to_config(parser.parse_overrides([text]), full)
            accepted.append(text)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(describe_yaml_error(error, "an option")) from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise _make_refusal(error, text, entry, search, overrides) from error
    _keep_declared(full, accepted)
    own = [text for text in accepted if not text.startswith("hydra")]
    full.hydra.overrides.task = own
    full.hydra.job.override_dirname = ",".join(sorted(own))
    full.hydra.runtime.cwd = os.getcwd()
    return full, accepted


def _make_refusal(
    error: Exception, text: str, entry: str, search: Sequence[str], overrides: Sequence[str]
) -> ConfigError:
    """Turn Hydra's error into a sentence about the user's override. `text` is the override applied
    last."""
    absent = re.match(r"(?:In '[^']*': )?Could not find '([\w/]+)/([^/']+)'", str(error))
    if absent:
        group, name = absent.groups()
        where = "" if f"{group}={name}" in overrides else ", which a defaults list names"
        return ConfigError(
            explain_unknown_option(
                f"{group}={name}{where}", name, group, _name_options(group, search)
            )
        )
    absent = re.match(r"Could not override '([\w.]+)'", str(error))
    path = absent[1] if absent else ""
    known: Any = pickle.loads(_compose_groups(entry, (), _stamp(search))) if path else {}
    if path.startswith("hydra."):
        return ConfigError(
            f"{path}: Hydra has no such setting.{suggest_name(path.split('.')[1], known.hydra)}"
        )
    if path and "." not in path:  # for a whole group, Hydra's advice to add the key would not help
        groups = [str(k) for k, own in known.items() if isinstance(own, Mapping) and k != "hydra"]
        it_takes = f"It takes: {', '.join(groups)}"
        return ConfigError(f"{path}: rlkit {entry} has no such group. {it_takes}")
    if str(error).startswith("Error merging override"):
        text = text.lstrip("+")
        said = shorten_to_sentence(error.__cause__ or error)
        key = text.partition("=")[0]
        if "Cannot merge DictConfig with ListConfig" in said:
            said = f"{key} holds values by name and takes no list; set {key}.NAME=VALUE"
        return ConfigError(f"'{text}' cannot be read: {said}")
    unread = (
        f"a YAML file of the config cannot be read ({type(error).__name__}); look for a key that is"
        " no text, such as null"
    )
    return ConfigError(shorten_to_sentence(error) or unread)


def _keep_declared(full: DictConfig, accepted: Sequence[str]) -> None:
    """Remove the shipped parts of each `by_task` unless a row of the task names them.

    A task declares `rewards` and `environments`. A mixture declares the union of its parts'
    declarations. Without declarations every part stays, except a part that needs a missing extra. A
    part set by an override always stays, and so does a user's own part. The declarations themselves
    are removed from the config.
    """
    from omegaconf import OmegaConf

    OmegaConf.set_struct(full, False)
    keys = [f"{text.partition('=')[0]}." for text in accepted]
    raw = OmegaConf.to_container(full, resolve=False)
    for kind, target, option in BY_TASK:
        declared: list[str] = []
        found = list(_find_paths(raw.get("task"), kind, "task")) if isinstance(raw, dict) else []
        for path in found:
            declared += [str(name) for name in OmegaConf.select(full, path)]
        for path in found:
            del OmegaConf.select(full, path.rpartition(".")[0])[kind]
        shipped = set(
            re.findall(rf"(?:@{kind}\.|^        )(\w+):", (conf_dir() / option).read_text(), re.M)
        )
        for path in _find_target_paths(raw, target):
            parts = OmegaConf.select(full, f"{path}.{kind}") or {}
            # keep the part with the most similar name, so the error message can suggest it
            for name in {*declared} - {*parts}:
                declared += difflib.get_close_matches(name, list(parts), 1, 0.5)
            for name in shipped & set(parts):
                touched = any(f".{kind}.{name}." in key for key in keys)
                missing = explain_missing(str(parts[name].get("_target_")))
                if name not in declared and (declared or missing) and not touched:
                    del parts[name]


def _find_paths(node: Any, key: str, path: str) -> Iterator[str]:
    """Yield the dotted key of each list named `key` in a task, and in the parts of a mixture."""
    if isinstance(node, dict):
        if isinstance(node.get(key), list):
            yield f"{path}.{key}"
        for name, part in (node.get("parts") or {}).items():
            yield from _find_paths(part, key, f"{path}.parts.{name}")


def _find_target_paths(node: Any, target: str, path: str = "") -> Iterator[str]:
    """Yield the dotted key of each node with this `_target_`."""
    if isinstance(node, dict):
        if node.get("_target_") == target:
            yield path
        for key, value in node.items():
            if key != "hydra":
                yield from _find_target_paths(value, target, f"{path}.{key}".lstrip("."))


@functools.lru_cache(maxsize=64)
def _compose_groups(entry: str, overrides: tuple[str, ...], stamp: object) -> bytes:
    """Return Hydra's composition of options, pickled. Configs with the same options but other
    values share the cached result.

    `stamp` invalidates the cache when a file changes. Unpickling takes a seventh of the time of a
    deep copy.
    """
    import hydra

    full = hydra.compose(entry, overrides=list(overrides), return_hydra_config=True)
    drop_shelves(full)
    return pickle.dumps(full)


def drop_shelves(node: Any) -> None:
    """Remove the key `shelf` of the options from a composed config, in place and at every depth."""
    from omegaconf import Container

    children = node._content  # a text if the node is missing or refers to another node
    if isinstance(children, dict):
        if "shelf" in children and children["shelf"]._value() in SHELVES:
            del children["shelf"]
        children = list(children.values())
    for child in children if isinstance(children, list) else ():
        if isinstance(child, Container):
            drop_shelves(child)


def _stamp(search: Sequence[str]) -> object:
    """Return a value that changes whenever an option file changes. For example, a notebook may edit
    the user's own option between two calls."""
    folders = [
        conf_dir(),
        *(Path(folder) for text in search for folder in re.findall(r"file://([^],]+)", text)),
    ]
    return tuple(
        (str(f), f.stat().st_mtime_ns) for folder in folders for f in folder.rglob("*.yaml")
    )


def _resolve_all(full: DictConfig) -> dict[str, Any]:
    """Return the config as plain containers, without Hydra's own node and with every reference to
    another value resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def plain(key: Any) -> Any:
        value = "???" if OmegaConf.is_missing(full, key) else full[key]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

    try:
        found: dict[Any, Any] = {key: plain(key) for key in full if key != "hydra"}
        _require_text(found)
        return found
    except (OmegaConfBaseException, ValueError) as error:
        key, written = _find_unresolved(full)
        if "node `suggests` is not a container" in str(error):
            group = written.strip("${}").partition(".suggests")[0] or key.partition(".")[0]
            raise ConfigError(
                f"{group}.suggests: holds values by name; set one of them, as in"
                f" {group}.suggests.NAME=VALUE"
            ) from error
        raise ConfigError(
            f"{key}: {written} cannot be resolved: {shorten_to_sentence(error)}"
            if key
            else shorten_to_sentence(error)
        ) from error


def _require_text(node: Mapping[Any, Any], path: str = "") -> None:
    """Raise ConfigError for a key that YAML does not read as text, for example `on` or 1.5."""
    for key, value in node.items():
        if not isinstance(key, str):
            raise ConfigError(f"{path}{key}: YAML reads this key as {key!r}; write it in quotes")
        if isinstance(value, dict):
            _require_text(value, f"{path}{key}.")


def _find_unresolved(node: Any, path: str = "") -> tuple[str, str]:
    """Find the first key with a reference that cannot be resolved. Return the key, and the
    reference as written.

    Both texts are empty if every reference can be resolved.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for key in node if OmegaConf.is_dict(node) else range(len(node)):
        where = f"{path}.{key}" if path else str(key)
        if where == "hydra" or OmegaConf.is_missing(node, key):
            continue
        try:
            value = node[key]
        except (OmegaConfBaseException, ValueError):
            written: Any = OmegaConf.to_container(node, resolve=False)
            return where, str(written[key])
        if OmegaConf.is_config(value) and not OmegaConf.is_interpolation(node, key):
            found = _find_unresolved(value, where)
            if found[0]:
                return found
    return "", ""


def _take_misplaced(plain: dict[str, Any]) -> list[str]:
    """Find presets without the line `# @package _global_`. Take their keys out of the config and
    report them."""
    return [
        f"{group}: this preset sets {', '.join(found)} under '{group}'; write '# @package _global_'"
        " as the first line of its file"
        for group in PRESETS
        if isinstance(plain.get(group), dict) and (found := plain.pop(group))
    ]


def read_unresolved(full: DictConfig, *, of_hydra: bool = False) -> dict[str, Any]:
    """Return the config, or with `of_hydra` only the node `hydra`. References to other keys and to
    environment variables stay as written."""
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(full, resolve=False)
    return {key: value for key, value in plain.items() if (key == "hydra") == of_hydra}


def list_choices(full: DictConfig) -> list[str]:
    """List GROUP=OPTION for every group with a chosen option, sorted."""
    chosen = full.hydra.runtime.choices.items()
    return sorted(
        f"{group}={option}"
        for group, option in chosen
        if option and not str(group).startswith("hydra/")
    )


def is_group(override: str, search: Sequence[str]) -> bool:
    """Return whether an override chooses an option of a group. An override of Hydra's own settings
    also counts, because these settings may decide where options are found."""
    key, _, value = override.lstrip("+~").partition("=")
    options = _group_options(key.partition("@")[0], search)
    return key.partition("/")[0].partition(".")[0] == "hydra" or (
        bool(options) and not value.startswith("{") and not read_functions(override)
    )


def _group_options(group: str, search: Sequence[str] = ()) -> list[str]:
    """List the names of a group's options. Without `search`, Hydra's repository is asked directly,
    because the loader would copy every option registered by a plugin."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.object_type import ObjectType

    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    loader: Any = hydra.config_loader
    if search:
        return loader.get_group_options(group, ObjectType.CONFIG, overrides=list(search))
    return loader.repository.get_group_options(group, ObjectType.CONFIG)


def _name_options(group: str, search: Sequence[str] = ()) -> list[str]:
    """List the options of a group for a message. For the group experiment, the list includes the
    recipes."""
    recipes = _group_options("experiment/recipe", search) if group == "experiment" else []
    return [*_group_options(group, search), *(f"recipe/{name}" for name in recipes)]


def _check_overrides(
    overrides: Sequence[str], search: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the problems of the overrides, and the overrides that Hydra can compose, in Hydra's
    grammar."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    parser = OverridesParser.create(config_loader=hydra.config_loader)
    # with a search path, the option files are looked up later
    elsewhere = bool(search) or any(text.startswith("hydra.searchpath=") for text in overrides)
    problems = []
    accepted = []
    for given in overrides:
        try:
            override, text = parse_override(parser, given)
        except HydraException as error:
            said = (
                shorten_to_sentence(error)
                .partition(" See https://hydra.cc")[0]
                .replace("no viable alternative at input", "unreadable from here on:")
            )
            problems.append(
                f"'{given}' cannot be read: {said}; close each bracket and quote, and quote the"
                " whole: 'reward=[numeric,format]'"
            )
            continue
        group = override.key_or_group
        options = _group_options(group)
        chosen = override.value() if options and not override.is_sweep_override() else []
        within = [
            str(c).rpartition("/") for c in (chosen if isinstance(chosen, list) else [chosen])
        ]  # an option may be in a folder
        unknown = [
            folder + slash + name
            for folder, slash, name in within
            if name not in (_group_options(f"{group}/{folder}") if slash else map(str, options))
        ]
        if override.is_sweep_override():
            problems.append(f"{text}: several values are a sweep; run it with -m")
        elif unknown and not elsewhere and not read_functions(text):
            problems.append(
                explain_unknown_option(text, str(unknown[0]), group, _name_options(group))
            )
        else:
            accepted.append(text)
    return problems, accepted


def explain_unknown_option(text: str, name: str, group: str, options: Iterable[str]) -> str:
    """Write the sentence about an option that does not exist."""
    return (
        f"{text}: no such option.{suggest_name(name, options)} Options of {group}:"
        f" {', '.join(sorted(options))}"
    )


def parse_override(parser: Any, text: str) -> tuple[Any, str]:
    """Parse an override, and return it with its text in Hydra's grammar. A condition like
    `reward/mean > 0.8 for 3` is put into quotes again, because the shell has removed the user's
    quotes."""
    from hydra.errors import HydraException

    try:
        return parser.parse_overrides([text])[0], text
    except HydraException:
        key, _, value = text.partition("=")
        # a list or mapping with a syntax error must not pass as a text
        if not value or value[0] in "[{'\"":
            raise
        quoted = f"{key}='{value}'"
        return parser.parse_overrides([quoted])[0], quoted


def shorten_to_sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(
        line
        for line in lines
        if not line.startswith(("full_key", "object_type", "Config search path", "provider"))
    )


def experiment(composed: Composed) -> Experiment:
    """Build the Experiment of a composed config, check it, and run each phase once on fake data.
    Raises ConfigError with all problems at once."""
    return check_experiment(build(composed.config))


def make_builder(config: Mapping[str, Any]) -> Callable[[], Experiment]:
    """Return a function that builds the experiment again without loggers and callbacks. The
    sampling process calls this function."""
    return functools.partial(build, {**config, "logger": {}, "callbacks": {}})


def check_experiment(x: Experiment) -> Experiment:
    """Return the experiment after every check possible without model and data. Raises ConfigError
    with all problems at once."""
    # the check runs the functions of these parts on fake data
    with guard_state(x.algorithm, x.kl, x.optimizer, kinds=[FOLDER]):
        refuse_problems(run_problems(x))
        lasts = build_last_steps(x)
        for name, first in build_first_steps(x).items():
            dry_run(first)
            if (lasts[name].algorithm, lasts[name].kl) != (first.algorithm, first.kl):
                dry_run(lasts[name])
    return x
