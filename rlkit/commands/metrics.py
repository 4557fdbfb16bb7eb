"""`rlkit metrics`: explain the numbers of a run, and give advice on bad values."""

from __future__ import annotations

from rlkit.commands.arguments import Answer, Arguments
from rlkit.commands.help import wrap_behind_label
from rlkit.errors import ConfigError, suggest_name
from rlkit.training.glossary import Entry, Section, find_meaning, read_sections

TAKES_TEXTS = True
GIVES_JSON = True


def command(arguments: Arguments) -> Answer:
    """Say what a number of metrics.jsonl means, its unit, a healthy value and what to do otherwise.
    Without a name, list all names.

    NAME…   metrics, or the beginning of some, such as kl
    --json  the same for a program

        rlkit metrics kl/ref_k3
        rlkit metrics kl optim/grad_norm
    """
    if arguments.overrides:
        raise ConfigError(
            f"'{arguments.overrides[0]}': rlkit metrics takes names of metrics, such as kl/ref_k3"
        )
    every = [entry for section in read_sections() for entry in section.entries]
    if arguments.texts:
        found = [entry for name in arguments.texts for entry in find_entries(name, every)]
        return Answer({"metrics": found}, "\n".join(map(entry_text, found)))
    return Answer({"metrics": every}, "\n".join(map(section_text, read_sections())))


def find_entries(name: str, every: list[Entry]) -> list[Entry]:
    """Find the entry of a metric, or the entries of all metrics below a name, for example kl.
    Raises: ConfigError for a name without an entry."""
    found = find_meaning(name)
    entries = (
        [found]
        if found
        else [entry for entry in every if any(own.startswith(f"{name}/") for own in entry.names)]
    )
    if not entries:
        raise ConfigError(
            f"{name}: there is no such"
            f" metric.{suggest_name(name, [own for entry in every for own in entry.names])}"
        )
    return entries


def section_text(section: Section) -> str:
    """Write the names of a section."""
    names = ", ".join(name for entry in section.entries for name in entry.names)
    return f"{section.title}\n{wrap_behind_label('  ', names)}\n"


def entry_text(entry: Entry) -> str:
    """Write names, meaning, unit, healthy range and advice."""
    rows = {
        "means": entry.means,
        "unit": entry.unit,
        "healthy": entry.usual,
        "otherwise": entry.act,
    }
    told = [
        wrap_behind_label(f"  {label:<11}", text.replace("`", "")) for label, text in rows.items()
    ]
    return "\n".join([", ".join(entry.names), *told, ""])
