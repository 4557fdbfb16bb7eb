"""one HTML page of runs or a sweep: curves, tables, conversations; out=FILE"""

from __future__ import annotations

from rlkit.commands.arguments import Arguments, find_option
from rlkit.errors import ConfigError
from rlkit.extras.report import write_report

TAKES_TEXTS = True


def command(arguments: Arguments) -> int:
    """Write runs as one HTML page.

    RUN…          run folders or folders of runs
    out=FILE      the page, ending in .html
    smooth=STEPS  steps that a curve is averaged over
    limit=N       conversations that are shown

        rlkit report outputs/latest
        rlkit report outputs/grpo outputs/dapo out=both.html
    """
    given = {
        key: value
        for key in ("out", "smooth", "limit")
        if (value := find_option(arguments.overrides, key)) is not None
    }
    unknown = [text for text in arguments.overrides if text.partition("=")[0] not in given]
    if unknown:
        raise ConfigError(
            f"'{unknown[0]}': rlkit report takes folders, out=FILE.html, smooth=STEPS and"
            " limit=CONVERSATIONS"
        )
    if not arguments.texts:
        raise ConfigError(
            "rlkit report needs at least one run folder, or a folder with runs below it: rlkit"
            " report outputs/grpo/*"
        )
    wrong = [key for key in ("smooth", "limit") if not given.get(key, "0").isdigit()]
    if wrong:
        raise ConfigError(f"{wrong[0]}={given[wrong[0]]}: give a whole number, 0 or more")
    counts = {key: int(given[key]) for key in ("smooth", "limit") if key in given}
    print(write_report(arguments.texts, given.get("out"), **counts))
    return 0
