"""`rlkit train --cfg job`, `--info`: the composed config, or the chosen options, printed without a
run."""

from __future__ import annotations

import yaml

from rlkit.commands.arguments import Arguments, find_option
from rlkit.commands.config_file import ENTRIES
from rlkit.config.compose import compose, conf_dir, list_choices, read_unresolved
from rlkit.errors import ConfigError
from rlkit.system.redaction import redact_config


def command(name: str, arguments: Arguments) -> int:
    """Print the requested part of the config, without secrets. Raises ConfigError if the config
    cannot be composed."""
    entry = "train" if name == "check" else name
    if entry not in ENTRIES:
        raise ConfigError(f"rlkit {name} has no config to print; there are: {', '.join(ENTRIES)}")
    for key in ("run", "split", "resume"):
        value = find_option(arguments.overrides, key)
        if value not in (None, "never", "auto"):
            raise ConfigError(
                f"{key}={value}: --cfg and --info print a config without a run; leave it away, or"
                " write rlkit show run=FOLDER"
            )
    # nothing of the config is run
    composed = compose(arguments.overrides, entry=entry, config_dir=arguments.config_dir)
    if arguments.shown == "info":
        print("\n".join(list_choices(composed.full)))
        print(
            "searched:",
            *[place for place in (conf_dir(), arguments.config_dir) if place],
            sep="\n  ",
        )
        return 0
    own = composed.config if arguments.resolved else read_unresolved(composed.full)
    hydra = read_unresolved(composed.full, of_hydra=True)
    parts = {"job": own, "hydra": hydra, "all": {**own, **hydra}}
    print(
        yaml.safe_dump(redact_config(parts[arguments.shown]), sort_keys=False, allow_unicode=True),
        end="",
    )
    return 0
