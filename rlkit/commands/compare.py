"""`rlkit compare`: which line of runs is better, in sentences and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit.commands.arguments import Answer, Arguments, take_settings
from rlkit.display import align_columns
from rlkit.errors import ConfigError, Refusal
from rlkit.runs import verdicts
from rlkit.runs.reading import Group, find_runs, group_runs, read_run
from rlkit.system.extras import load_command

TAKES_TEXTS = True
GIVES_JSON = True


def command(arguments: Arguments) -> Answer:
    """Say which line of runs is better and by how much, in sentences and as a table. Runs that
    differ only in their seed are one line.

    FOLDER…        run folders or folders of runs; each line is compared with the first
    figure=NAME    test, test_reward, validation, curve or reward; else the first available
    at=UNIT        the validation accuracy at equal spending of all lines: at=steps, at=tokens
    pairs=all      every pair of lines instead
    effect=NUMBER  the difference that matters to you
    --json         the same for a program

        rlkit compare outputs/grpo outputs/dapo
        rlkit compare outputs/grpo outputs/dapo pairs=all effect=0.02
    """
    groups, given = read_lines(arguments, "compare", ("figure", "at", "pairs", "effect"))
    compared = verdicts.find_shared_figure(groups, given.get("figure"), given.get("at"))
    if compared is None:
        raise ConfigError(
            "rlkit compare: fewer than two lines of these runs have a figure in common"
            f" ({', '.join(verdicts.FIGURES)})"
        )
    if given.get("pairs", "first") not in ("first", "all"):
        raise ConfigError(
            f"pairs={given['pairs']}: write pairs=all, or pairs=first for each line against the"
            " first"
        )
    found = verdicts.judge_lines(
        groups,
        compared,
        every_pair=given.get("pairs") == "all",
        effect=read_effect(given, verdicts.EFFECT),
    )
    if not found:
        raise ConfigError(
            f"rlkit compare: the first line, {groups[0].label}, has no {compared.name}; pairs=all"
            " compares the others"
        )
    told = verdicts.format_verdicts(groups, compared, found)
    suspected = list_suspicions([run.folder for group in groups for run in group.runs])
    data = {
        "lines": [group.label for group in groups],
        "figure": compared,
        "spent": verdicts.average_budgets(groups),
        "comparisons": found,
        "sentences": told,
        "suspicions": suspected,
    }
    return Answer(data, "\n".join([table(data), "", *told, *suspected]))


def list_suspicions(folders: Sequence[Path]) -> list[str]:
    """Ask the command `why`, if it is installed, for the likeliest cause in runs without progress,
    and for the command that proves it."""
    why = load_command("why")
    if why is None:
        return []
    try:
        return why(Arguments(["brief=true"], texts=tuple(map(str, folders)))).text.splitlines()
    except (Refusal, OSError):  # an unreadable folder is named elsewhere
        return []


def read_lines(
    arguments: Arguments, name: str, settings: Sequence[str]
) -> tuple[list[Group], dict[str, str]]:
    """Read the lines of a command's folders, and its settings. Raises: ConfigError for fewer than
    two lines."""
    given = take_settings(arguments, settings, name)
    groups = group_runs([read_run(folder) for folder in find_runs(arguments.texts, name)])
    if len(groups) < 2:
        said = "one line of runs" if groups else "no run with finished steps"
        raise ConfigError(
            f"rlkit {name} needs folders of two kinds of runs, such as rlkit {name} outputs/grpo"
            f" outputs/dapo; found {said}"
        )
    return groups, given


def read_effect(given: dict[str, str], usual: float) -> float:
    """Read the difference that matters to the user, > 0."""
    try:
        effect = float(given.get("effect", usual))
    except ValueError:
        effect = 0.0
    if not effect > 0:
        raise ConfigError(
            f"effect={given['effect']}: give a difference above 0, such as effect=0.02"
        )
    return effect


def table(data: Mapping[str, Any]) -> str:
    """Write one row per line of runs: seeds, mean figure, and the spending of a run."""
    spent = data["spent"]
    figure = data["figure"]
    rows: list[list[object]] = []
    for i, (label, values) in enumerate(zip(data["lines"], figure.values, strict=True)):
        mean = sum(values.values()) / len(values) if values else None
        rows.append([label, len(values), mean, *(f"{own[i]:,.0f}" for own in spent.values())])
    return align_columns(
        ["", "seeds", figure.name, *(verdicts.UNITS[unit] for unit in spent)], rows, left=1
    )
