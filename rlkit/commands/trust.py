"""What a command does with the config of a run folder that calls code outside rlkit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rlkit.commands.arguments import Arguments, drop, option
from rlkit.errors import ConfigError


def announcer(folder: Path | None) -> Callable[[dict], None] | None:
    """Where the run of a folder is continued, what says which code outside rlkit its config calls, before any of it is imported."""
    from rlkit.config.compose import conf_dir
    from rlkit.config.trust import outside, shipped
    from rlkit.runs import folder as runs

    def announce(config: dict) -> None:
        saved = runs.saved_overrides(folder) if folder is not None else []
        if found := list(dict.fromkeys(outside({"": config, "overrides": saved}, shipped(conf_dir())))):
            print(f"resume: code outside rlkit: {'; '.join(found)}", flush=True)

    return None if folder is None else announce


def asker(where: str, folder: Path, arguments: Arguments) -> Callable[[dict], None]:
    """What refuses a config that comes with a folder and calls code outside rlkit, unless the command line says trust=true."""
    from rlkit.config.compose import conf_dir
    from rlkit.config.trust import require_trust
    from rlkit.runs import folder as runs

    own = " ".join(drop(arguments.overrides, "run"))
    for file in Path(arguments.config_dir).rglob("*.yaml") if arguments.config_dir else ():
        own += "\n" + file.read_text()

    def ask(config: dict) -> None:
        node = {"": config, "overrides": runs.saved_overrides(folder)}
        require_trust(node, where, conf_dir(), trusted=is_trusted(arguments.overrides), own=own)

    return ask


def is_trusted(overrides: Sequence[str]) -> bool:
    """Whether the command line says trust=true. Raises ConfigError for any other value than true or false."""
    said = option(overrides, "trust")
    if said not in (None, "true", "false"):
        raise ConfigError(f"trust={said}: must be true or false")
    return said == "true"


def model_of(run: Path, where: str, arguments: Arguments) -> dict:
    """The model of a run, from its config, which is read as data. Raises ConfigError where it names code outside rlkit and trust=true
    is not said; DataError where it cannot be read."""
    from rlkit.config.compose import conf_dir
    from rlkit.config.trust import require_trust, with_environment
    from rlkit.runs import folder as runs
    from rlkit.system.redaction import learn

    written = runs.read_config(run).get("model")
    if not isinstance(written, dict) or "_target_" not in written:
        raise ConfigError(f"{where}: {run}/config.yaml names no model; give the folder as rlkit wrote it")
    require_trust({"model": written}, where, conf_dir(), trusted=is_trusted(arguments.overrides))
    model = with_environment(written, "model")
    learn(model, written)
    return model
