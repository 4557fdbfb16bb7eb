"""Guard a command against the config of a folder not known as the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlkit.commands.arguments import Arguments, find_option
from rlkit.config.compose import compose_without_values, conf_dir
from rlkit.config.keys import find_leaks, refuse_leaks
from rlkit.config.trust import (
    Folder,
    find_named_functions,
    find_strange_overrides,
    find_unsafe_values,
    require_trust,
    with_environment,
)
from rlkit.errors import ConfigError
from rlkit.runs import folder as runs
from rlkit.system.noted import is_noted
from rlkit.system.redaction import learn


def make_asker(
    where: str,
    folder: Path,
    mine: Sequence[str],
    arguments: Arguments,
    *,
    entry: str,
    own_model: bool = False,
) -> Callable[[dict[str, Any]], None] | None:
    """Make a function that refuses a folder's config unless the config is declared safe or the user
    gave trust=true. None if the folder is the user's own.

    Args:
      where: the folder as the user named it.
      mine: the user's overrides.
      entry: the entry config to compose.
      own_model: True if the folder may hold the model itself.
    Returns: a function of the composed config, in which values of the environment are written as
      ${oc.env:NAME}.
    Raises: ConfigError if composing alone would import something.
    """
    if is_noted(folder):
        return None
    theirs = [text for text in runs.read_overrides(folder) if text not in mine]
    strange = list(find_strange_overrides(theirs))
    if not arguments.trusted:
        require_trust(strange, where, trusted=False)
    files = Path(arguments.config_dir).rglob("*.yaml") if arguments.config_dir else ()
    named = find_named_functions("\n".join([*mine, *(file.read_text() for file in files)]))
    by = Folder(conf_dir(), named, folder if own_model else None)
    base = compose_without_values(theirs, mine, entry=entry, config_dir=arguments.config_dir)

    def ask(config: dict[str, Any]) -> None:
        require_trust(
            [*strange, *find_unsafe_values(config, by, base)], where, trusted=arguments.trusted
        )
        refuse_leaks(find_leaks(config, by, base), where)

    return ask


def read_model(run: Path, where: str, arguments: Arguments) -> dict[str, Any]:
    """Read the model of a run from its config, as data.

    Raises: ConfigError unless it is declared safe or the user gave trust=true; DataError if it
      cannot be read.
    """
    written = runs.read_config(run).get("model")
    if not isinstance(written, dict) or "_target_" not in written:
        raise ConfigError(
            f"{where}: {run}/config.yaml names no model; give the folder as rlkit wrote it"
        )
    if not is_noted(run):
        by = Folder(conf_dir(), place=run)
        require_trust(
            list(find_unsafe_values({"model": written}, by)), where, trusted=arguments.trusted
        )
        refuse_leaks(find_leaks({"model": written}, by), where)
    model = with_environment(written, "model")
    learn(model, written)
    return model


def with_limits(x: Any, arguments: Arguments) -> Any:
    """Return the settings of run=FOLDER. If the folder is a stranger's and not trusted, its model's
    chat template gets limits."""
    from rlkit.models.confined import confine_template
    from rlkit.models.load import EMBEDDED

    named = find_option(arguments.overrides, "run")
    if (
        not named
        or x.model.path in (None, *EMBEDDED)
        or arguments.trusted
        or is_noted(runs.find_run(named, "run"))
    ):
        return x
    return x._replace(model=replace(x.model, load=confine_template(x.model.load)))
