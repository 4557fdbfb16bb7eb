"""Plan the jobs of a command line, and check every job before the first job starts."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from rlkit.config.changes import ONCE, find_departures
from rlkit.config.functions import read_functions, read_key
from rlkit.distributed.launch import explain_sweep_problem
from rlkit.errors import ConfigError, DataError, Refusal, install
from rlkit.runs import folder as runs
from rlkit.runs.sweeps.jobs import is_alive, read_jobs
from rlkit.system import owner
from rlkit.system.files import put_aside

PLUGINS = ("joblib", "submitit", "optuna")  # extras
SHOWN = 3  # largest number of changed settings to name in a sentence


class Plan(NamedTuple):
    """Hold the plan of a sweep."""

    config: DictConfig  # Hydra's config, with the sweeper and the launcher
    arguments: list[str]  # the arguments in the sweeper's form
    root: Path
    total: int  # jobs
    varied: list[str]  # keys with several values


def make_plan(arguments: Sequence[str], config_dir: str | None) -> Plan:
    """Compose, check and dry-run the jobs of a command line. Raises ConfigError with all problems
    at once."""
    from hydra.core.config_store import ConfigStore

    given = [read_override(text)[1] for text in arguments]
    secret = [text.partition("=")[0] for text in arguments if runs.redact_node(text) != text]
    if secret:
        raise ConfigError(
            f"{secret[0]}: holds a secret, and a sweep names its folders by its overrides; take it"
            f" from the environment, as {secret[0]}='${{oc.env:NAME}}'"
        )
    config = compose_sweep(given, config_dir)
    root = Path(config.hydra.sweep.dir)
    search = is_search(config)
    living = None if config.takeover else owner.find_occupant(root)
    if living:
        # raised before the jobs' folders are read, because these belong to the running sweep
        raise owner.Occupied(living)
    resume = (
        [text.partition("=")[2] for text in given if read_key(text) == "resume"] or ["never"]
    )[-1]
    if resume not in ("never", "auto"):
        raise ConfigError(
            f"resume={resume}: a sweep takes resume=auto, which goes on where {root} ended; a"
            " single run is resumed without -m"
        )
    own = [text for text in given if not text.lstrip("+~").startswith("hydra")]
    every = [
        *(f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()),
        *own,
    ]
    varied = [key for key, texts in _values(every, intervals=search).items() if len(texts) > 1]
    jobs = list_corners(every) if search else expand(every)
    if search and resume == "never" and read_jobs(root / "jobs"):
        raise ConfigError(
            f"{root} holds trials of a search already, which would be taken for this one's;"
            f" resume=auto goes on with it, another search needs hydra.sweep.dir={root}_2"
        )
    added = check_jobs(jobs, config_dir, None if search else root, resume == "auto")
    refuse_running(root)
    if not varied and not search:
        raise ConfigError(
            "-m: no key has several values; write algorithm=grpo,dapo seed=1,2, or leave -m away"
        )
    # Hydra's launchers compose each job themselves, and know only options
    for text in itertools.chain(*jobs):
        for name, term in read_functions(text).get("reward.terms", {}).items():
            ConfigStore.instance().store(
                term["fn"]["_target_"], {"terms": {name: term}}, group="reward"
            )
    task = [f"++{text}" if text.partition("=")[0] in added else text for text in own]
    return Plan(
        config, task, root, int(config.hydra.sweeper.n_trials) if search else len(jobs), varied
    )


def refuse_running(root: Path) -> None:
    """Raise ConfigError if a job of an earlier sweep still runs although the sweep's own process
    has ended."""
    for job in read_jobs(root / "jobs"):
        if is_alive(job):
            raise ConfigError(
                f"{root}: job {job.folder.name} still runs there as process {job.process['pid']};"
                " wait for it, or end it"
            )


def check_jobs(
    jobs: Sequence[list[str]],
    config_dir: str | None,
    root: Path | None,
    resume: bool,
) -> set[str]:
    """Compose, check and dry-run every job. Return the keys without an entry in the YAML files,
    which only a function's signature knows. Hydra must be told to add these keys.

    Args:
      root: the folder with the jobs' folders. None: no folder is checked, because a search chooses
        the values of its jobs later.
    Raises: ConfigError with the problems of all jobs; a problem common to all is given once.
    """
    from rlkit.config.compose import compose, experiment
    from rlkit.training.loggers import check_loggers

    problems: dict[str, list[str]] = {}
    added: set[str] = set()
    for job in jobs:
        try:
            composed = compose(job, config_dir=config_dir)
            added |= {
                key[2:]
                for text in composed.overrides
                if (key := text.partition("=")[0]).startswith("++")
            }
            x = experiment(composed)
            check_loggers(x.logger)
            problem = explain_sweep_problem(x.trainer.devices, x.trainer.nodes)
            if problem:
                raise ConfigError(problem)
            lines = (
                folder_problems(
                    root / folder_name(dirname(composed.overrides)), composed.config, resume
                )
                if root
                else []
            )
        except Refusal as error:
            lines = str(error).splitlines()
        for line in lines:
            problems.setdefault(line, []).append(" ".join(job))
    if problems:
        raise ConfigError(
            "\n".join(
                line if len(of) == len(jobs) > 1 else f"job {of[0]}: {line}"
                for line, of in problems.items()
            )
        )
    return added


def is_search(config: DictConfig) -> bool:
    """Return whether the sweeper proposes jobs itself (a search), instead of running a grid."""
    return config.hydra.runtime.choices["hydra/sweeper"] != "basic"


def compose_sweep(given: Sequence[str], config_dir: str | None) -> DictConfig:
    """Compose the config of the sweep itself: sweeper, launcher and folder. Raises ConfigError, for
    example if a plugin is missing."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    from rlkit.config.compose import (
        conf_dir,
        drop_shelves,
        is_group,
        searchpath,
        shorten_to_sentence,
    )

    GlobalHydra.instance().clear()
    search = searchpath(config_dir)
    with initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="train"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        # A key without an entry in the YAML files is added here. The check of the jobs decides
        # whether a signature has it.
        texts = [
            (
                text
                if text[0] in "+~"
                or read_override(text)[0].is_sweep_override()
                or is_group(text, search)
                else f"++{text}"
            )
            for text in given
            if not read_functions(text)
        ]
        try:
            config = hydra.compose_config(
                "train",
                [*search, *texts],
                RunMode.MULTIRUN,
                from_shell=False,
                validate_sweep_overrides=False,
            )
            drop_shelves(config)
            config.hydra.mode = RunMode.MULTIRUN
            targets = {name: str(config.hydra[name]._target_) for name in ("sweeper", "launcher")}
        except (HydraException, OmegaConfBaseException) as error:
            absent = re.search(rf"hydra/(?:launcher|sweeper)/({'|'.join(PLUGINS)})", str(error))
            raise ConfigError(
                f"{absent[0]} is not installed; {install(absent[1])}"
                if absent
                else shorten_to_sentence(error)
            ) from error
    require_plugins(targets)
    # the option shipped with optuna's plugin minimises, and ends a search with the first failed job
    if str(config.hydra.runtime.choices["hydra/sweeper"]) == "optuna":
        config.hydra.sweeper.direction = "maximize"
        config.hydra.sweeper.max_failure_rate = 1.0
    return config


def require_plugins(targets: Mapping[str, str]) -> None:
    """Raise ConfigError if a sweeper or launcher needs a plugin that is not installed."""
    for name, target in targets.items():
        package = ".".join(target.split(".")[:2])
        extra = next((e for e in PLUGINS if e in target), "")
        if extra and not is_installed(package):
            raise ConfigError(f"hydra/{name}: {package} is not installed; {install(extra)}")


def is_installed(module: str) -> bool:
    """Return whether a module could be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """List the jobs of a grid, each as its overrides. The jobs are all combinations of values, and
    the last key changes fastest. Raises ConfigError."""
    return [list(job) for job in itertools.product(*_values(overrides).values())]


def list_corners(overrides: Sequence[str]) -> list[list[str]]:
    """List the jobs to check before a search. In the first job every key has its first value. In
    each further job one key has another choice, or the other end of its interval."""
    ends = _values(overrides, intervals=True)
    first = {key: own[0] for key, own in ends.items()}
    return [
        list(first.values()),
        *(list((first | {key: end}).values()) for key, own in ends.items() for end in own[1:]),
    ]


def _values(overrides: Sequence[str], *, intervals: bool = False) -> dict[str, list[str]]:
    """Return key → overrides of this key in the sweep. There is one override for each value, or one
    for each end of an interval.

    Raises: ConfigError if an override cannot be read, or if its value is an interval and
    `intervals` is false.
    """
    found: dict[str, list[str]] = {}
    for override, text in map(read_override, overrides):
        key = override.get_key_element()
        given = override.value()
        if override.is_interval_sweep() and not intervals:
            raise ConfigError(f"{text}: an interval needs hydra/sweeper=search")
        if override.is_interval_sweep():
            texts = [str(given.start), str(given.end)]
        elif override.is_sweep_override():
            texts = list(override.sweep_string_iterator())
        else:
            texts = [override.get_value_element_as_str()]
        found[key] = [f"{key}={value}" for value in texts]
    return found


def read_override(text: str) -> tuple[Any, str]:
    """Parse an override as for a single run, and return its text in Hydra's grammar. Raises
    ConfigError if the override cannot be read."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from rlkit.config.compose import parse_override, shorten_to_sentence

    try:
        return parse_override(OverridesParser.create(), text)
    except HydraException as error:
        raise ConfigError(f"'{text}' cannot be read: {shorten_to_sentence(error)}") from error


def dirname(overrides: Sequence[str]) -> str:
    """Make Hydra's override_dirname: the overrides of one job, in alphabetical order."""
    return ",".join(sorted(text for text in overrides if read_key(text) not in ONCE))


def folder_name(text: str) -> str:
    """Make a folder name from a job's overrides. The name has no slashes, is printable, and is not
    longer than a file system allows."""
    name = (
        text.replace("/", ".").replace("++", "").replace("'", "").replace('"', "").replace(" ", "")
    )
    if name.isprintable() and len(name.encode()) <= 160 and name not in ("", ".", ".."):
        return name
    plain = "".join(c if c.isprintable() else "_" for c in name)
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{plain.encode()[:150].decode(errors='ignore')}~{digest}"


# used by hydra.sweep.subdir in conf/train.yaml
OmegaConf.register_new_resolver("rlkit_folder", folder_name, replace=True)


def folder_problems(folder: Path, config: Mapping[str, Any], resume: bool) -> list[str]:
    """Explain why a job cannot run in its folder: the folder already has a run, or a run with
    another config."""
    if not runs.is_run(folder):
        return (
            [f"{folder} holds a finished run without config.yaml; move it away"]
            if runs.is_finished(folder)
            else []
        )
    root = folder.parent
    other = f"another sweep needs a folder of its own, as in hydra.sweep.dir={root}_2"
    if not resume:
        return [
            f"{root} holds runs of these jobs already, and runs are never overwritten; resume=auto"
            f" continues them, {other}"
        ]
    living = None if config.get("takeover") else owner.find_occupant(folder)
    if living:
        return [living]
    changed = name_changed_settings(folder, config)
    return [f"{folder} holds a run of another config ({changed}); {other}"] if changed else []


def name_changed_settings(folder: Path, config: Mapping[str, Any]) -> str:
    """Name the differences between the run in a folder and a job's config, including the run's
    length. Return an empty text if no difference matters.

    Raises: DataError if the folder's config cannot be read.
    """
    earlier = runs.read_config(folder)
    changed = find_departures(earlier, config)
    lengths = [(own.get("trainer") or {}).get("steps") for own in (earlier, config)]
    if lengths[0] != lengths[1]:
        changed = {"trainer.steps": (lengths[0], lengths[1]), **changed}
    named = [f"{key} was {was} and is now {now}" for key, (was, now) in changed.items()]
    more = f", and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
    return ", ".join(named[:SHOWN]) + more


def set_aside_changed(folder: Path, config: Mapping[str, Any]) -> str:
    """Set the run in a folder aside if it does not have the job's config. Return the reason, or an
    empty text if the run stays.

    Raises: Occupied if a process works in the folder; OSError if the folder cannot be moved.
    """
    if not runs.is_run(folder) and not runs.is_finished(folder):
        return ""
    try:
        changed = name_changed_settings(folder, config)
    except DataError as error:
        changed = str(error)
    if changed:
        living = owner.find_occupant(folder)
        if living:
            raise owner.Occupied(living)
        put_aside(folder, runs.SET_ASIDE)
    return changed
