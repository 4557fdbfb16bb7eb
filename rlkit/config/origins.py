"""Find the origin of each value in a composed config.

Hydra merges the option files of a run in one order, later files over earlier ones, and then sets
the values of the command line. Therefore the origin of a key is the first of these that applies:

1. "command line", if an override sets the key or a mapping around it, even to the same value. If
   the override came from a config file or a run folder, the origin names this instead.
2. "phase NAME", if the key lies in schedule.phases.NAME.
3. The source of a reference like `${trainer.steps}`. It is "suggested by GROUP=OPTION" if the
   reference leads to a key under `suggests`, otherwise "follows KEY".
4. "default", if `rlkit train` without overrides has the same key with the same value.
5. The last option file that sets the key, as GROUP=OPTION. Presets count as options.

A key counts as changed if its origin is of kind 1, or if its value differs from `rlkit train`
without overrides. A key in a phase counts as changed if its value differs from the same key of the
whole run. Names of functions (`_target_`) and suggestions never count as changed, because the
choice of the option implies them. Keys inside a reference to a mapping, for example `sandbox:
${sandbox}`, are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from rlkit.config.compose import PRESETS, Composed, Layer, compose, list_layers, read_unresolved
from rlkit.config.suggestions import RESOLVERS
from rlkit.system.redaction import redact_config
from rlkit.training.schedules.paths import flatten_numbers

COMMAND_LINE = "command line"
DEFAULT = "default"
REMOVED = "removed"
SILENT = {"_target_", "_partial_", "suggests", "shelf"}
PHASE = re.compile(r"schedule\.phases\.(\w+)\.(.+)")
PHASE_ONLY = re.compile(r"(until|numbers|reset)\b")  # keys that exist only in phases
REFERENCE = re.compile(r"\$\{(?:oc\.select:)?(\.*)([A-Za-z_][\w.]*)(?=[,}])")
ADVICE = re.compile(r"\$\{(rlkit_\w+):([^{}]*)\}")
EXTRA = re.compile(r"rlkit\.extras\.(\w+)\.")


class Option(NamedTuple):
    """Describe a chosen option."""

    place: str  # path of the option's keys, for example algorithm or algorithm.advantage
    name: str
    origin: str  # empty if another option chooses it
    changed: bool


class Value(NamedTuple):
    """Describe one key of the config, with its value and origin."""

    key: str
    value: Any  # resolved, without secrets
    origin: str
    changed: bool


class Explained(NamedTuple):
    """Hold the options, values and extras of a run."""

    options: list[Option]
    values: list[Value]
    extras: list[str]


def explain(
    overrides: Sequence[str],
    *,
    sources: Mapping[str, str] | None = None,
    config_dir: str | None = None,
    before_import: Callable[[dict[str, Any]], None] | None = None,
) -> Explained:
    """Compose the config of `rlkit train` with these overrides. Return the options and values with
    their origins, and the extras used by the config.

    Args:
      sources: key of an override → the file or folder from which the override was read.
      config_dir, before_import: as for `compose`.
    Raises: ConfigError.
    """
    composed = compose(overrides, config_dir=config_dir, before_import=before_import)
    files = list_layers(composed, config_dir=config_dir)
    standard = compose([])
    groups = {layer.option.partition("=")[0] for layer in files} | set(_choices(composed))
    chosen: dict[str, tuple[str, str]] = {}  # group → (option, its origin)
    is_set: dict[str, str] = {}  # key → its origin
    removed = []
    for text in composed.overrides:
        key, _, value = text.lstrip("+~").partition("=")
        origin = (sources or {}).get(key, COMMAND_LINE)
        if text.startswith("~"):
            removed.append(Value(key, REMOVED, origin, True))
        elif key.partition("@")[0] in groups and not value.startswith("{"):
            chosen[key] = (value, origin)
        else:
            is_set[key] = origin
    return Explained(
        _options(composed, standard, files, chosen),
        [*_values(composed, standard, files, is_set), *removed],
        find_extras(composed.config),
    )


def find_extras(config: Mapping[str, Any]) -> list[str]:
    """List the extras whose functions a config names, sorted."""
    return sorted(set(EXTRA.findall(str(config))))


def _choices(composed: Composed) -> dict[str, str]:
    """Return group → option, in the order of the config. The group's name ends in @PLACE if the
    option's keys are at another place than usual."""
    chosen = reversed(list(composed.full.hydra.runtime.choices.items()))
    return {
        str(group): str(name)
        for group, name in chosen
        if name is not None and not str(group).startswith("hydra/")
    }


def _options(
    composed: Composed,
    standard: Composed,
    files: Sequence[Layer],
    chosen: dict[str, tuple[str, str]],
) -> list[Option]:
    """List the chosen options with their origins: first the presets, then the others in the order
    of the config."""
    preset: dict[str, tuple[str, str]] = {}
    for layer in files:
        if layer.option:
            for group, name in layer.overrides.items():
                text = f"[{','.join(name)}]" if isinstance(name, list) else str(name)
                preset[group] = (text, layer.option)
    said = preset | chosen
    choices = _choices(composed)
    for group, (name, _) in said.items():
        if name.startswith("["):  # Hydra does not record a choice of several options
            choices[group] = name
    before = _choices(standard)
    order = {place: number for number, place in enumerate([*PRESETS, *composed.config])}
    found = []
    for group, name in choices.items():
        path, _, elsewhere = group.partition("@")
        place = elsewhere or path.replace("/", ".")
        is_top = "." not in place
        _, origin = said.get(group, ("", DEFAULT if is_top else ""))
        changed = group in said or (is_top and before.get(group) != name)
        found.append(Option(place, name, origin, changed))
    return sorted(found, key=lambda option: order.get(option.place.partition(".")[0], -1))


def _values(
    composed: Composed, standard: Composed, files: Sequence[Layer], is_set: Mapping[str, str]
) -> Iterator[Value]:
    """Yield every key with a plain value, in the order of the config."""
    now = flatten_numbers(composed.config)
    before = flatten_numbers(standard.config)
    shown = flatten_numbers(redact_config(composed.config))
    raw = flatten_numbers(read_unresolved(composed.full))
    owners: dict[str, str] = {}
    for layer in files:
        owners |= dict.fromkeys(flatten_numbers(layer.config), layer.option)

    def setter(key: str) -> str:
        """Return the origin of the override that sets a key, or sets a mapping around the key.
        Return an empty text without such an override."""
        parts = key.split(".")
        above = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        return next((is_set[path] for path in above if path in is_set), "")

    def find_origin(key: str, changed: bool) -> str:
        phase = PHASE.fullmatch(key)
        source = follow_reference(key, raw.get(key), now)
        if setter(key):
            return setter(key)
        if phase:
            return f"phase {phase[1]}"
        if source and "suggests" in source.split("."):
            said = setter(source)
            return f"{source}, {said}" if said else f"suggested by {owners.get(source) or DEFAULT}"
        if source:
            return f"follows {source}"
        return (changed and owners.get(key)) or DEFAULT

    for key in now:
        if key not in raw and not setter(key):
            continue
        phase = PHASE.fullmatch(key)
        if setter(key):
            changed = True
        elif SILENT & set(key.split(".")):
            changed = False
        elif phase and PHASE_ONLY.match(phase[2]):
            changed = now[key] not in (None, {}, [])
        elif phase:
            changed = phase[2] not in now or now[phase[2]] != now[key]
        else:
            changed = key not in before or before[key] != now[key]
        yield Value(key, shown.get(key), find_origin(key, changed), changed)


def follow_reference(key: str, written: Any, config: Mapping[str, Any]) -> str:
    """Return the key to which a reference leads. Return an empty text if the value is not a
    reference to a key.

    Args:
      written: the reference as written in a file or an override.
      config: dotted key → value, resolved.
    """
    if not isinstance(written, str) or not written.startswith("${") or not written.endswith("}"):
        return ""
    advice = ADVICE.fullmatch(written)
    if advice:
        read: dict[str, Any] = {}
        given = [yaml.safe_load(text) for text in advice[2].split(",") if text]
        value = RESOLVERS[advice[1]](*given, _root_=_Recorded(config, "", read))
        followed_by = [path for path, found in read.items() if found == value]
        return followed_by[-1] if followed_by else ""
    for dots, path in REFERENCE.findall(written):
        above = key.split(".")[: -len(dots)] if dots else []
        whole = ".".join([*above, path])
        if whole in config:
            return whole
    return ""


class _Recorded(Mapping[str, Any]):
    """Wrap a config, and record every value read from it."""

    def __init__(self, values: Mapping[str, Any], path: str, read: dict[str, Any]) -> None:
        self.values_by_key = values
        self.path = path
        self.read = read

    def __getitem__(self, key: str) -> Any:
        where = self.path + key
        if where in self.values_by_key:
            self.read[where] = self.values_by_key[where]
            return self.read[where]
        if any(known.startswith(f"{where}.") for known in self.values_by_key):
            return _Recorded(self.values_by_key, f"{where}.", self.read)
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        own = [key[len(self.path) :] for key in self.values_by_key if key.startswith(self.path)]
        return iter(dict.fromkeys(key.partition(".")[0] for key in own))

    def __len__(self) -> int:
        return sum(1 for _ in self)
