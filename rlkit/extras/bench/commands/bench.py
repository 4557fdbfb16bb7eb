"""small tasks with a known optimum: algorithms=grpo,dapo tasks=needle,noisy seeds=10"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from rlkit.commands.arguments import Answer, Arguments, drop, find_option, read_flag
from rlkit.config.functions import read_key
from rlkit.config.problems.names import part_problem
from rlkit.errors import ConfigError, Refusal, RLKitError
from rlkit.runs.sweeps.runner import sum_up
from rlkit.system import owner
from rlkit.system.files import write_atomic
from rlkit.system.processors import count_cores

GIVES_JSON = True

SETTINGS = {
    "algorithms": "",
    "arms": "",
    "tasks": "",
    "rates": "",
    "seeds": "3",
    "placebo": "true",
    "jobs": "",
    "folder": "outputs/bench",
}
FIXED = {"seed": "seeds=N", "experiment": "tasks=A,B"}  # override → the setting in its place


def command(arguments: Arguments) -> Answer:
    """Train algorithms on small tasks with a known optimum, several seeds each, and compare them. A
    matrix that was interrupted goes on with the same command.

    algorithms=A,B  options of algorithm, an arm each
    arms=FILE       or a YAML file of `name: [override, …]`
    tasks=A,B       of experiment/bench; all by default
    rates=R,R,…     learning rates; each arm first chooses its own on each task
    seeds=N         3 by default
    placebo=false   without the arms that cannot learn
    jobs=N          runs at the same time; by default the cores
    folder=FOLDER   outputs/bench by default
    KEY=VALUE       an override of every run
    --json          rows and comparisons for a program

        rlkit bench algorithms=grpo,dapo tasks=needle seeds=3
        rlkit bench arms=arms.yaml jobs=2
    """
    from rlkit.extras.bench import matrix as bench
    from rlkit.extras.bench import rates as trials

    given = {key: find_option(arguments.overrides, key) or usual for key, usual in SETTINGS.items()}
    common = drop(arguments.overrides, *SETTINGS)
    for key in ("seeds", "jobs"):
        if given[key] and not (given[key].isdigit() and int(given[key])):
            raise ConfigError(f"{key}={given[key]}: give a whole number, 1 or more")
    arms = read_arms(given) | (bench.PLACEBOS if read_flag("placebo", given["placebo"]) else {})
    check_words(common, arms)
    folder = Path(given["folder"])
    tasks = read_tasks(given["tasks"], arguments.config_dir)
    rates = check_rates(given, arms | {"the command": tuple(common)})
    cells = bench.matrix(folder, tasks, arms, range(int(given["seeds"])), common)
    compose_all(cells[: len(tasks) * len(arms)], arguments.config_dir)
    began = time.time()
    run = partial(
        bench.run_all,
        folder=folder,
        jobs=int(given["jobs"] or count_cores()),
        config_dir=arguments.config_dir,
    )
    with owner.own_folder(folder, takeover=find_option(common, "takeover") == "true"):
        section = ""
        tried = trials.list_trials(folder, tasks, arms, rates, common)
        planned = len(tried) + len(cells)
        done, received = run(list(tried)) if tried else ([], [])
        if tried:
            chosen = trials.choose_rates(trials.write_trials(folder, tried), rates)
            table = trials.tabulate_rates(chosen, tasks, list(arms))
            section = f"## Rates\n\n{trials.NOTE}\n\n{table}"
            # A choice that was interrupted has no scores yet, only those of earlier choices.
            cells = [] if received else trials.with_rates(cells, chosen)
        if cells and not received:
            scored, received = run(cells)
            done = [*done, *scored]
        failed = {job.folder: job.reason for job in done if job.status == "failed"}
        rows = [row for cell in cells if (row := bench.read_row(cell))]
        compared, page = write_page(folder, rows, failed, section) if rows else ([], "")
    finished = sum(job.status == "finished" for job in done)
    lines = [page, sum_up(done, planned, began)]
    if finished < planned:
        lines.append(f"to go on         rlkit bench {shlex.join(arguments.words)}")
    text = "\n".join(filter(None, lines))
    if not rows and not received:
        print(text)
        said = next(iter(failed.values()), "evaluation.n=0 leaves nothing to compare")
        raise RLKitError(f"rlkit bench: no run has a score; the first said: {said}")
    data = {
        "folder": str(folder),
        "runs": planned,
        "finished": finished,
        "failed": {str(place): why for place, why in failed.items()},
        "rows": rows,
        "comparisons": compared,
    }
    status = 128 + received[0] if received else int(finished < planned)
    return Answer(data, text, status)


def write_page(
    folder: Path, rows: list[dict[str, Any]], failed: dict[Path, str], section: str
) -> tuple[list[dict[str, Any]], str]:
    """Write results.csv, comparisons.csv and README.md from the runs' rows. Return the comparisons,
    and the page with the files' place, to print.

    Args:
      section: see `matrix.format_page`.
    """
    from rlkit.extras.bench import matrix as bench

    bench.write_rows(folder / "results.csv", rows)
    found = bench.arrange_scores(rows)
    compared = [
        {k: round(v, 5) if isinstance(v, float) else v for k, v in p._asdict().items()}
        for p in (bench.compare_arms(found) if len(found.seeds) > 1 else [])
    ]
    if compared:
        bench.write_rows(folder / "comparisons.csv", compared)
    else:
        (folder / "comparisons.csv").unlink(missing_ok=True)  # left by an earlier, larger matrix
    text = bench.format_page(rows, failed, section)
    write_atomic(folder / "README.md", text.encode())
    places = f"rows             {folder / 'results.csv'}\npage             {folder / 'README.md'}"
    return compared, f"\n{text}\n{places}"


def read_arms(given: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """Read the arms as name → overrides. They are options of `algorithm`, and the entries of a file
    with names and lists of overrides."""
    from rlkit.extras.bench.matrix import PLACEBOS, name_folder

    arms: dict[str, tuple[str, ...]] = {
        name: (f"algorithm={name}",) for name in given["algorithms"].split(",") if name
    }
    if given["arms"]:
        try:
            arms |= {
                str(name): tuple(map(str, own))
                for name, own in yaml.safe_load(Path(given["arms"]).read_text()).items()
            }
        except (OSError, yaml.YAMLError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"arms={given['arms']}: needs a YAML file of `name: [override, …]` ({error})"
            ) from error
    for name in arms:
        why = part_problem(name)
        if why:
            key = "arms" if given["arms"] else "algorithms"
            raise ConfigError(
                f"{key}={given[key]}: the arm {name!r:.60} is no name of a folder ({why}); give it"
                " a plain one"
            )
    named: dict[str, str] = {}
    for name in (*arms, *PLACEBOS):
        other = named.setdefault(name_folder(name), name)
        if other != name:
            raise ConfigError(
                f"arms '{other}' and '{name}' would have one folder, {name_folder(name)}; rename"
                " one"
            )
    if not arms:
        raise ConfigError("rlkit bench needs algorithms=grpo,dapo,… or arms=FILE.yaml")
    return arms


def check_words(common: Sequence[str], arms: Mapping[str, Sequence[str]]) -> None:
    """Raises: ConfigError for an override that another override of the same run would replace."""
    for arm, own in arms.items():
        keys = list(map(read_key, (*own, *common)))
        fixed = FIXED.keys() & set(keys)
        if fixed:
            key = min(fixed)
            raise ConfigError(f"{key}=: rlkit bench gives each run its own; set {FIXED[key]}")
        twice = set(keys[: len(own)]) & set(keys[len(own) :])
        if twice:
            raise ConfigError(
                f"{min(twice)}=: the command gives it to all arms, and the arm {arm!r} sets it"
                " itself; remove one of the two"
            )


def check_rates(given: dict[str, str], arms: dict[str, tuple[str, ...]]) -> list[str]:
    """Return the rates of `rates=`, none without it. Raises: ConfigError, also if a seed of the
    scores is one of the choice."""
    from rlkit.extras.bench import rates as trials

    if not given["rates"]:
        return []
    if int(given["seeds"]) > trials.SEEDS[0]:
        raise ConfigError(
            f"seeds={given['seeds']}: the seeds from {trials.SEEDS[0]} on choose the rates; give at"
            f" most seeds={trials.SEEDS[0]}"
        )
    return trials.read_rates(given["rates"], arms)


def read_tasks(text: str, config_dir: str | None) -> list[str]:
    """Return the named tasks, or all tasks. Raises: ConfigError for an unknown task."""
    from rlkit.config.compose import conf_dir

    folders = [conf_dir(), *([Path(config_dir)] if config_dir else [])]
    known = sorted(
        {f.stem for folder in folders for f in (folder / "experiment" / "bench").glob("*.yaml")}
        - {"base"}
    )
    chosen = [name for name in dict.fromkeys(text.split(",")) if name] or known
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ConfigError(
            f"tasks={unknown[0]}: there is no such task; there are {', '.join(known)}"
        )
    return chosen


def compose_all(cells: list, config_dir: str | None) -> None:
    """Compose the first seed of every arm on every task. Raises: ConfigError with the problems,
    before anything runs."""
    from rlkit.config.experiment import experiment

    problems: dict[str, str] = {}
    for cell in cells:
        try:
            experiment(*cell.overrides, config_dir=config_dir)
        except Refusal as error:
            problems.setdefault(str(error), f"{cell.arm} on {cell.task}")
    if problems:
        raise ConfigError("\n".join(f"{where}: {text}" for text, where in problems.items()))
