"""`rlkit metrics`: what the numbers of a run mean, and what to do about them."""

from __future__ import annotations

from rlkit.commands.arguments import Arguments
from rlkit.commands.help import behind_label
from rlkit.errors import ConfigError, nearest
from rlkit.training.glossary import Entry, meaning_of, sections

TAKES_TEXTS = True
READS_NO_CODE = True


def command(arguments: Arguments) -> int:
    """Say what a number of metrics.jsonl means, its unit, a healthy value and what to do otherwise.
    Without a name, list all names.

    NAME…  metrics, or the beginning of some, such as kl

        rlkit metrics kl/ref_k3
        rlkit metrics kl optim/grad_norm
    """
    if arguments.overrides:
        raise ConfigError(
            f"'{arguments.overrides[0]}': rlkit metrics takes names of metrics, such as kl/ref_k3"
        )
    if not arguments.texts:
        for section in sections():
            names = ", ".join(name for entry in section.entries for name in entry.names)
            print(f"{section.title}\n{behind_label('  ', names)}\n")
    for name in arguments.texts:
        print(explained(name))
    return 0


def explained(name: str) -> str:
    """An entry as a person reads it, or those of all metrics below a name such as kl. Raises
    ConfigError for a name without one."""
    every = [entry for section in sections() for entry in section.entries]
    found = meaning_of(name)
    entries = (
        [found]
        if found
        else [entry for entry in every if any(own.startswith(f"{name}/") for own in entry.names)]
    )
    if not entries:
        raise ConfigError(
            f"{name}: there is no such"
            f" metric.{nearest(name, [own for entry in every for own in entry.names])}"
        )
    return "\n".join(entry_text(entry) for entry in entries)


def entry_text(entry: Entry) -> str:
    """Names, meaning, unit, healthy range and what to do."""
    rows = {
        "means": entry.means,
        "unit": entry.unit,
        "healthy": entry.usual,
        "otherwise": entry.act,
    }
    told = [behind_label(f"  {label:<11}", text.replace("`", "")) for label, text in rows.items()]
    return "\n".join([", ".join(entry.names), *told, ""])
