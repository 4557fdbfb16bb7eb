"""Compare algorithms, each at its own best learning rate on each task.

    python experiments/bench/own_rates.py [--jobs 2] [--folder runs/own_rates] [--minutes 150]

The command can be repeated: it skips runs with a row in own_rates/rows.csv, and stops after
`--minutes`. When no run is missing, it writes own_rates/README.md. README.md of this folder has the
rules, which were written before any run. The stages, in order:

    rate         every arm × task × rate of the grid, seeds 100 to 105
    beside       one more rate where the chosen rate is the outermost one tried, seeds 100 to 105
    score        every arm at its chosen rate, and the placebos, seeds 200 to 209
    one rate     the six arms of the first matrix at the task's rate, seeds 200 to 209
    equal rate   dapo again, with as many steps as make its samples equal to grpo's, seeds 100
                 to 105
    equal score  dapo at the rate chosen from these, with as many steps, seeds 200 to 209
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import recorded
from recorded import Place

from rlkit.extras.bench import matrix as bench
from rlkit.extras.bench.rates import NEAR, SEEDS, Choice, choose_rates, tabulate_rates
from rlkit.runs.comparing import ALPHA
from rlkit.runs.reading import read_run
from rlkit.runs.verdicts import read_budget

HERE = Path(__file__).parent
OUT = HERE / "own_rates"
GRID = ("2.23e-4", "6.67e-4", "2e-3", "6e-3", "1.8e-2")
# Tried where the chosen rate is the lowest or the highest of the grid.
LOWER, HIGHER = "7.44e-5", "5.4e-2"
RATES = (LOWER, *GRID, HIGHER)
# Never chosen: they complete the three rates of the robustness.
LINE = ("2.48e-5", *RATES, "0.162")
FORMER = ("grpo", "dr_grpo", "dapo", "rloo", "max_rl", "ppo")  # arms of the first matrix
ARMS = {name: (f"algorithm={name}",) for name in (*FORMER, "reinforce_pp", "gspo", "cispo")}
TASKS = ("needle", "lake", "lengthy", "scales", "chain", "stale", "proxy")
REFUSED = {("lengthy", "max_rl")}  # max_rl divides by a group's mean reward, which can be negative
FRESH = range(200, 210)


# ---------------------------------------------------------------------------------------- the runs


def measure_samples(folder: Path) -> bench.Row:
    """Return `equal_steps`: the RL step after which a run has sampled as many replies as a run
    without refills samples in all steps. It is the step where the two numbers are nearest."""
    run = read_run(folder)
    own = run.settings
    total = own["trainer.steps"] * own["batch.prompts"] * own["batch.group_size"]
    spent = read_budget(run, "samples")
    return {"equal_steps": min(spent, key=lambda step: (abs(spent[step] - total), step))}


def read_rows() -> list[bench.Row]:
    return list(recorded.read_rows(OUT).values())


def choose(stage: str, rates: Sequence[str] = RATES) -> dict[Place, Choice]:
    """Return the choice of each place among these rates, from the rows of a stage."""
    rows = [(row["rate"], row) for row in read_rows() if row["stage"] == stage]
    return choose_rates(rows, rates)


def run_study(folder: Path, jobs: int, until: float) -> bool:
    """Run all stages. Return whether no run is missing."""
    places = [(task, arm) for task in TASKS for arm in ARMS]

    def run(stage: str, at: Iterable[tuple[Place, str]], seeds: Sequence[int], **own: Any) -> bool:
        accepted = [(place, rate) for place, rate in at if place not in REFUSED]
        planned = recorded.plan(folder, stage, accepted, ARMS | bench.PLACEBOS, seeds, **own)
        return recorded.run_missing(
            planned, OUT, folder, jobs=jobs, until=until, measure=measure_samples
        )

    if not run("rate", [(p, rate) for rate in GRID for p in places], SEEDS):
        return False
    beside = {GRID[0]: LOWER, GRID[-1]: HIGHER}
    ends = choose("rate", GRID)
    if not run("rate", [(p, beside[c.rate]) for p, c in ends.items() if c.rate in beside], SEEDS):
        return False
    chosen = choose("rate")
    outer = {RATES[0]: LINE[0], RATES[-1]: LINE[-1]}
    if not run("beside", [(p, outer[c.rate]) for p, c in chosen.items() if c.rate in outer], SEEDS):
        return False
    placebos = [((task, arm), "") for task in TASKS for arm in bench.PLACEBOS]
    scored = [(p, choice.rate) for p, choice in chosen.items()]
    former = [((task, arm), "") for task in TASKS for arm in FORMER]
    if not run("score", [*scored, *placebos], FRESH) or not run("one rate", former, FRESH):
        return False
    steps = count_equal_steps()
    if not run("equal rate", steps, SEEDS, steps=steps):
        return False
    steps |= extend_equal_steps(steps, choose("equal rate", LINE))
    if not run("equal rate", steps, SEEDS, steps=steps):
        return False
    equal = [(p, choice.rate) for p, choice in choose("equal rate", LINE).items()]
    return run("equal score", equal, FRESH, steps=steps)


def count_equal_steps() -> dict[tuple[Place, str], int]:
    """Return the RL steps of dapo at each rate of the grid that make its samples equal to grpo's:
    the mean over the runs of the choice."""
    found: dict[tuple[Place, str], list[int]] = {}
    for row in read_rows():
        if row["stage"] == "rate" and row["arm"] == "dapo" and row["equal_steps"]:
            place = (row["task"], "dapo"), row["rate"]
            found.setdefault(place, []).append(int(row["equal_steps"]))
    return {place: round(fmean(own)) for place, own in found.items()}


def extend_equal_steps(
    steps: Mapping[tuple[Place, str], int], chosen: Mapping[Place, Choice]
) -> dict[tuple[Place, str], int]:
    """Return one more rate for each place whose chosen rate is the outermost one tried, with the
    number of steps at the chosen rate."""
    out = {}
    for place, choice in chosen.items():
        tried = [LINE.index(rate) for at, rate in steps if at == place]
        own = LINE.index(choice.rate)
        if own in (min(tried), max(tried)):
            beyond = own - 1 if own == min(tried) else own + 1
            if 0 <= beyond < len(LINE):
                out[place, LINE[beyond]] = steps[place, choice.rate]
    return out


# ---------------------------------------------------------------------------------------- the page


def select(arms: Iterable[str], *, stage: str = "score", equal: bool = False) -> bench.Scores:
    """Return the scores of these arms in a stage; with `equal`, dapo's are those at equal
    samples."""
    wanted = set(arms)
    rows = []
    for row in read_rows():
        replaced = equal and row["arm"] == "dapo"
        if row["arm"] in wanted and row["stage"] == ("equal score" if replaced else stage):
            rows.append(row)
    order = list(ARMS | bench.PLACEBOS)
    rows.sort(key=lambda row: (TASKS.index(row["task"]), order.index(row["arm"])))
    return bench.arrange_scores(rows)


def judge(pair: bench.Pair, better: str) -> str:
    """Say whether a former claim, that `better` is the better arm, is a claim again."""
    sign = 1 if better == pair.second else -1
    low, high = sorted((sign * pair.low, sign * pair.high))
    found = f"{sign * pair.mean:+.3f} ({low:+.3f} to {high:+.3f})"
    if not pair.q <= ALPHA:  # nan with too few seeds
        return f"open: {found}"
    return f"{'again' if pair.order()[0] == better else 'REVERSED'}: {found}"


def tabulate_claims() -> str:
    """Return the table of the first matrix's claims, each with the three new differences."""
    with (HERE / "matrix" / "comparisons.csv").open() as file:
        rows = list(csv.DictReader(file))
    columns = {
        "one rate": select(FORMER, stage="one rate"),
        "own rates": select(FORMER),
        "own rates, equal samples": select(FORMER, equal=True),
    }
    tables = {
        name: {(p.task, frozenset((p.first, p.second))): p for p in bench.compare_arms(scores)}
        for name, scores in columns.items()
    }
    lines = []
    for row in rows:
        names = row["first"], row["second"]
        if set(names) & bench.PLACEBOS.keys() or float(row["q"]) > ALPHA:
            continue
        mean = float(row["mean"])
        better, other = names[::-1] if mean > 0 else names
        told = [judge(table[row["task"], frozenset(names)], better) for table in tables.values()]
        lines.append([row["task"], f"{better} above {other}", f"+{abs(mean):.3f}", *told])
    again = [sum(line[3 + i].startswith("again") for line in lines) for i in range(3)]
    count = [f"**{n} of {len(lines)} again**" for n in again]
    head = ["task", "claim", "first matrix", *tables]
    return bench.markdown(head, [*lines, ["", "", "", *count]])


def tabulate_robustness() -> str:
    """Return the mean score of each arm at a third of its best rate, at it, and at three times it,
    over the tasks that all arms accept."""
    means: dict[tuple[Place, str], list[float]] = {}
    for row in read_rows():
        if row["stage"] in ("rate", "beside"):
            place = (row["task"], row["arm"]), row["rate"]
            means.setdefault(place, []).append(1 - float(row["regret"]))
    chosen = choose("rate")
    tasks = [task for task in TASKS if all((task, arm) in chosen for arm in ARMS)]
    lines = []
    for arm in ARMS:
        found: list[list[float]] = [[], [], []]
        for task in tasks:
            at = LINE.index(chosen[task, arm].rate)
            for own, rate in zip(found, LINE[at - 1 : at + 2], strict=True):
                own.append(fmean(means[(task, arm), rate]))
        three = [fmean(own) for own in found]
        lines.append([arm, *(f"{own:.3f}" for own in (*three, fmean(three)))])
    head = ["arm", "a third of the best rate", "best rate", "three times", "mean"]
    return bench.markdown(head, lines)


def write_page() -> None:
    """Write own_rates/README.md and comparisons.csv from the rows."""
    whole, equal = select(ARMS | bench.PLACEBOS), select(ARMS | bench.PLACEBOS, equal=True)
    rows = read_rows()
    ratios = [
        [
            task,
            f"{steps}",
            f"{fmean(float(row['samples']) for row in own) / expected:.3f}",
        ]
        for task, own, steps, expected in list_equal_runs(rows)
    ]
    null = {
        "nine arms at their own rates": select(ARMS),
        "six arms at one rate": select(FORMER, stage="one rate"),
        "six arms at their own rates": select(FORMER),
        "six arms at their own rates, dapo at equal samples": select(FORMER, equal=True),
    }
    shares = [[name, f"{recorded.count_null_pages(scores):.1%}"] for name, scores in null.items()]
    compared = [
        {"samples": name}
        | {k: round(v, 5) if isinstance(v, float) else v for k, v in pair._asdict().items()}
        for name, scores in (("as they are", whole), ("equal", equal))
        for pair in bench.compare_arms(scores)
    ]
    bench.write_rows(OUT / "comparisons.csv", compared)
    spent = [row for row in rows if row["stage"] == "score" and not row.get("failed")]
    parts = [
        "# Each algorithm at its own rate\n\n`python experiments/bench/own_rates.py` writes this"
        " page from rows.csv. [The rules](../README.md#each-algorithm-at-its-own-rate) were written"
        " before any run.",
        recorded.describe_runs(rows),
        "## The claims of the first matrix on fresh seeds",
        "Differences of the two arms, the better one first, with intervals that are corrected as"
        " the claims are; `again` and `REVERSED` at a false-discovery rate of 5 % over all pairs of"
        " the six arms.",
        tabulate_claims(),
        "## Scores at own rates, equal RL steps",
        bench.tabulate_by_task(whole),
        bench.tabulate_over_tasks(whole),
        bench.list_claims(whole),
        "## The same with dapo at equal samples",
        bench.tabulate_by_task(equal),
        bench.list_claims(equal),
        "dapo's RL steps, and its samples divided by grpo's:",
        bench.markdown(["task", "steps", "samples"], ratios),
        "## Rates",
        f"The rate with the highest mean score on seeds {SEEDS[0]} to {SEEDS[-1]}, this score, and"
        f" the mean score over the rates within a factor of {NEAR:g} of the rate. * marks the"
        " lowest and the highest rate tried: a better rate may lie outside.",
        tabulate_rates(choose("rate"), TASKS, list(ARMS)),
        "The choice of dapo at equal samples:",
        tabulate_rates(choose("equal rate", LINE), TASKS, ["dapo"]),
        "## Robustness",
        f"Mean scores on seeds {SEEDS[0]} to {SEEDS[-1]}, which also chose the rates and served to"
        f" set the tasks. Rates are a factor of {NEAR:g} apart.",
        tabulate_robustness(),
        "## Control",
        f"The share of {recorded.PAGES} pages with a claim if the arms of each seed are permuted at"
        " random:",
        bench.markdown(["page", "with a claim"], shares),
        "## What the runs spent",
        bench.tabulate_budgets(spent),
        *recorded.list_failed(rows),
    ]
    (OUT / "README.md").write_text("\n\n".join(parts) + "\n")


def list_equal_runs(
    rows: Sequence[bench.Row],
) -> Iterable[tuple[str, list[bench.Row], int, float]]:
    """Yield for each task dapo's runs at equal samples, their steps, and grpo's samples."""
    for task in TASKS:
        own = [r for r in rows if (r["stage"], r["task"]) == ("equal score", task) and r["samples"]]
        other = [
            float(row["samples"])
            for row in rows
            if (row["stage"], row["task"], row["arm"]) == ("score", task, "grpo") and row["samples"]
        ]
        if own and other:
            yield task, own, int(float(own[0]["steps"])), fmean(other)


if __name__ == "__main__":
    recorded.follow(__doc__ or "", OUT, run_study, write_page)
