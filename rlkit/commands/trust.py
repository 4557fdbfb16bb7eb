"""What a command does with the config of a run folder that calls code outside rlkit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rlkit.commands.arguments import Arguments, drop, option
from rlkit.config.compose import conf_dir
from rlkit.config.trust import outside, require_trust, shipped, with_environment
from rlkit.errors import ConfigError
from rlkit.runs import folder as runs
from rlkit.system.redaction import learn


def announcer(folder: Path) -> Callable[[dict], None]:
    """Where the run of a folder is continued: says which code outside rlkit its config calls, before any of it is imported."""

    def announce(config: dict) -> None:
        node = {"": config, "overrides": runs.saved_overrides(folder)}
        if found := list(dict.fromkeys(outside(node, shipped(conf_dir())))):
            print(f"resume: code outside rlkit: {'; '.join(found)}", flush=True)

    return announce


def asker(where: str, folder: Path, arguments: Arguments) -> Callable[[dict], None]:
    """Refuses a config that comes with a folder and calls code outside rlkit, unless the command line says trust=true."""
    files = Path(arguments.config_dir).rglob("*.yaml") if arguments.config_dir else ()
    own = "\n".join([*drop(arguments.overrides, "run"), *(file.read_text() for file in files)])

    def ask(config: dict) -> None:
        node = {"": config, "overrides": runs.saved_overrides(folder)}
        require_trust(node, where, conf_dir(), trusted=is_trusted(arguments.overrides), own=own)

    return ask


def is_trusted(overrides: Sequence[str]) -> bool:
    """Whether the command line says trust=true. Raises ConfigError for any other value than true or false."""
    given = option(overrides, "trust")
    if given not in (None, "true", "false"):
        raise ConfigError(f"trust={given}: must be true or false")
    return given == "true"


def model_of(run: Path, where: str, arguments: Arguments) -> dict:
    """The model of a run, from its config, which is read as data. Raises ConfigError where it names code outside rlkit and trust=true
    is not said; DataError where it cannot be read."""
    written = runs.read_config(run).get("model")
    if not isinstance(written, dict) or "_target_" not in written:
        raise ConfigError(f"{where}: {run}/config.yaml names no model; give the folder as rlkit wrote it")
    require_trust({"model": written}, where, conf_dir(), trusted=is_trusted(arguments.overrides))
    model = with_environment(written, "model")
    learn(model, written)
    return model
