"""`--config FILE`: read overrides from YAML, or from a flat config of the GSM8K/MBPP trainer that
preceded rlkit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from rlkit.config.functions import format_literal
from rlkit.errors import ConfigError, describe_yaml_error, show_controls, suggest_name

# keys of the flat config → keys of rlkit
FLAT = {
    "model.name": "model.path",
    "model.lora_r": "model.lora.rank",
    "model.lora_alpha": "model.lora.alpha",
    "data.dataset": "task",
    "data.max_samples": "task.max_samples",
    "training.lr": "optimizer.lr",
    "training.batch_size": "batch.prompts",
    "training.group_size": "batch.group_size",
    "training.kl_coef": "kl.coef",
    "training.num_iterations": "trainer.steps",
}
BASE = "experiment=gsm8k_tools"  # the old trainer's defaults, for keys missing in the file
# rlkit's own configs; a user's defaults list may build on them
ENTRIES = ("train", "evaluate", "rollout")
DATASETS = ("gsm8k", "mbpp")


def read_overrides(file: str) -> list[str]:
    """Read the overrides in a YAML file. The overrides made from a flat config are printed.

    Args:
      file: a YAML file with a mapping of config keys and groups to values, nested or with dots;
        with a list of overrides; or with a flat config.
    Raises: ConfigError for any other file, and for an unknown key in a flat config.
    """
    try:
        given = yaml.safe_load(Path(file).read_text())
    except yaml.MarkedYAMLError as error:
        raise ConfigError(describe_yaml_error(error, file)) from error
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {file}: {' '.join(str(error).split())}") from error
    if isinstance(given, list) and all(isinstance(line, str) for line in given):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"--config {file}: write overrides as KEY: VALUE lines, or as a list of KEY=VALUE"
        )
    chosen = _read_choices(file, given.get("defaults", []))
    values = dict(_flatten({key: value for key, value in given.items() if key != "defaults"}))
    if {"data", "training"} & given.keys() or FLAT.keys() & values.keys():
        translated = _translate(file, values)
        if os.environ.get("RANK", "0") == "0":
            print(show_controls(f"{file}: {' '.join(translated)}"), flush=True)
        return translated
    return chosen + [f"{key}={_format_value(value)}" for key, value in values.items()]


def _read_choices(file: str, defaults: Any) -> list[str]:
    """Read the options of a defaults list as overrides: `- override algorithm: dapo` or `-
    algorithm: dapo`."""
    if not isinstance(defaults, list):
        raise ConfigError(
            f"--config {file}: defaults: {defaults!r} is not a list; write one GROUP: OPTION per"
            " line, each behind a dash"
        )
    found = []
    for entry in defaults:
        if entry in ("_self_", *ENTRIES):
            continue
        if not isinstance(entry, Mapping) or len(entry) != 1:
            raise ConfigError(
                f"--config {file}: defaults: {entry!r} chooses nothing; write GROUP: OPTION"
            )
        (group, option), *_ = entry.items()
        key = str(group).removeprefix("override ").removeprefix("/")
        found.append(f"{key}={'null' if option is None else option}")
    return found


def _flatten(given: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in given.items():
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise ConfigError(
                f"--config: YAML reads the key '{prefix}{key}' as {key!r}; write it in quotes"
            )
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _translate(file: str, values: Mapping[str, Any]) -> list[str]:
    """Translate a flat config into overrides. Raises: ConfigError naming the file and the key."""
    for key in values:
        if key not in FLAT:
            last = [known for known in FLAT if known.rpartition(".")[2] == key.rpartition(".")[2]]
            hint = f" Did you mean '{last[0]}'?" if last else suggest_name(key, FLAT)
            raise ConfigError(
                f"{file}:{key}: there is no such key.{hint} There are {', '.join(FLAT)}; all others"
                " are given behind the file, as KEY=VALUE"
            )
    dataset = values.get("data.dataset", DATASETS[0])
    if dataset not in DATASETS:
        raise ConfigError(
            f"{file}:data.dataset: there is no {dataset!r}; write {' or '.join(DATASETS)}, or give"
            " task=… behind the file"
        )
    if values.get("training.kl_coef") == 0:
        values = {key: value for key, value in values.items() if key != "training.kl_coef"}
        return [BASE, "kl=none", "reference=none", *_translate(file, values)[1:]]
    return [BASE, *(f"{FLAT[key]}={_format_value(value)}" for key, value in values.items())]


def _format_value(value: Any) -> str:
    """Write a value in Hydra's grammar. A text stays bare if Hydra reads the same text, because
    options and functions have no quotes."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if isinstance(value, list):
        return f"[{','.join(map(_format_value, value))}]"
    with suppress(HydraException):
        if OverridesParser.create().parse_override(f"key=[{value}]").value() == [value]:
            return str(value)
    return format_literal(value)
