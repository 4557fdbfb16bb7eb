"""Every sentence of compare, plan, bench and the report keeps the level that it promises, in a
simulation that calls the real functions.

experiments/sentences/run.py has the table of promises and the simulation. Here are its
representatives, the whole of it (slow), and the laws that let no new sentence in without a promise.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlkit
from parametrise import each
from rlkit.runs.trends import TRENDS
from rlkit.system.extras import explain_missing

FOLDER = Path(__file__).parents[2] / "experiments" / "sentences"


def loaded(name: str) -> Any:
    """A file of the experiment, under the name by which the others import it."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


loaded("simulate")
run = loaded("run")

# What tells how sure something is: who calls one of these says something that can be false.
ESTIMATORS = {
    "compare_pairs",
    "estimate_bounded_mean",
    "seeds_interval",
    "bootstrap",
    "compare_together",
    "count_needed_seeds",
    "find_detectable_effect",
    "compute_power",
    "holm",
    "false_discovery",
    "mean_interval",
    "wilson",
    "share_interval",
    "newcombe",
    "average_thirds",
    "spread_bound",
    "holm_levels",
    "improvement",
}
# Function → the promises of what is said with it.
SPEAKERS = {
    "runs.verdicts.judge_lines": ("rlkit compare, claim", "rlkit compare, interval"),
    "runs.verdicts.phrase_verdict": (
        "rlkit compare, seeds needed",
        "rlkit compare, seen",
        "rlkit compare, enough",
    ),
    "runs.verdicts.find_falls": ("rlkit compare, fall", "rlkit compare, fall's interval"),
    "commands.plan.plan_seeds": (
        "rlkit plan, seeds",
        "rlkit plan, pilot's spread",
        "rlkit plan, seen",
    ),
    "commands.plan.phrase_need": ("rlkit plan, pilot's spread", "rlkit plan, seen"),
    # the pairs are a run's prompts
    "extras.why.effects.list_effects": ("rlkit compare, claim", "rlkit compare, interval"),
    "commands.train._compare_tests": ("report, change of one run",),
    "extras.bench.matrix.compare_arms": (
        "rlkit bench, claims",
        "rlkit bench, equal arms",
        "rlkit bench, claims' intervals",
        "rlkit bench, seen",
        "rlkit bench, placebos",
    ),
    "extras.bench.matrix.score_interval": ("rlkit bench, scores",),
    "extras.bench.matrix.tabulate_over_tasks": ("rlkit bench, IQM",),
    "extras.report.tables.tabulate_figures": ("report, marks", "report, change of one run"),
    "extras.report.tables.average_over_seeds": ("report, seeds", "report, change over seeds"),
    "episodes.evaluation._share_interval": ("report, one run",),
    "episodes.evaluation._mean_interval": ("report, one run",),
    "episodes.evaluation.summarise_curves": ("report, one run",),
    **{f"runs.trends.{check.__name__}": ("report, health",) for check in TRENDS},
}
SPEAKERS = {name: said for name, said in SPEAKERS.items() if not explain_missing(f"rlkit.{name}")}
# The sentences themselves, without what is filled in: a new one has to be written here, beside a
# promise above.
WORDS = {
    "runs.verdicts.phrase_verdict": {
        " (…, … to …)",
        "… against …: no difference can be claimed",
        "… is … than … by … (… to …), … seeds.",
        "…, since … seeds claim nothing; to see … you need … seeds.",
        "…; they share … seed…, and fewer than … claim nothing.",
        "…; to see … you need … seeds; these … seeds see ….",
        "…; … seeds are enough to see ….",
    },
    "runs.verdicts.phrase_fall": {
        " (…, … to …)",
        ", … seed…",
        "… ends below its start: accuracy … before, … after",
        "…; fewer than … claim nothing.",
        "…; this may be chance.",
    },
    "commands.plan.phrase_need": {
        "  … against …: … seeds, … of runs, one at a time\n    ….",
        "\n    With … seeds a difference of … is found 4 times in 5.",
        "; if it is no larger than the pilot's, … seeds are enough",
        "The pilot's spread is … (… seeds), and the true one may be …",
    },
    "extras.bench.matrix.list_claims": {
        "- …: … (a difference of … would be seen)",
        "- …: … by … (… to …), …",
        "Nothing: … seeds, and fewer than … claim nothing (`seeds=…`).…",
        "… and …",
        (
            "… of … comparisons, at a false-discovery rate of 5 % (Benjamini and Hochberg) over all"
            " of them."
        ),
        "… pairs",
        "… to …",
    },
}
WORDS = {name: said for name, said in WORDS.items() if not explain_missing(f"rlkit.{name}")}


@pytest.mark.slow
@each(
    "name",
    [
        "rlkit compare, claim",
        "rlkit plan, seeds",
        *(
            name
            for name in ["report, seeds", "report, marks", "rlkit bench, equal arms"]
            if name in run.PROMISES
        ),
    ],
)
def test_promises_hold_in_the_hardest_settings(name):
    """Few seeds, and a coarse score near its bound. 49 % of such pages of the bench made a false
    claim."""
    for setting in (run.Setting(3, 0.995, True), run.Setting(10, 0.998, True)):
        count = run.simulated(name, setting, 24)
        assert run.kept(run.PROMISES[name], setting, count), (setting, count)


@pytest.mark.slow
@pytest.mark.parametrize("name", run.PROMISES)
def test_every_promise_holds_in_every_setting(name):
    broken = []
    for setting in run.settings(name):
        count = run.simulated(name, setting, 300)
        if count is not None and count.of and not run.kept(run.PROMISES[name], setting, count):
            broken.append((setting, count))
    assert not broken


def calls() -> Iterator[tuple[str, str]]:
    """(function, estimator that it calls) of the whole package."""
    package = Path(rlkit.__file__).parent
    for file in sorted(package.rglob("*.py")):
        module = ".".join(file.relative_to(package).with_suffix("").parts)
        text = file.read_text()
        if not any(f"{name}(" in text for name in ESTIMATORS):
            continue
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    name = getattr(node, "id", None) or getattr(node, "attr", None)
                    if isinstance(node, ast.Name | ast.Attribute) and name in ESTIMATORS:
                        yield f"{module}.{function.name}", name


def test_whoever_says_how_sure_something_is_has_a_promise():
    inside = (
        "runs.comparing.",
        "statistics.",
        "runs.trends.average_thirds",
        "extras.bench.over_tasks.",
    )
    found = {where for where, _ in calls() if not where.startswith(inside)}
    assert found - {"commands.plan.command"} == set(SPEAKERS)
    assert {name for own in SPEAKERS.values() for name in own} == set(run.PROMISES), (
        "each promise belongs to what is said"
    )


def templates(function: ast.AST) -> set[str]:
    """The texts with words that a function fills in, each place as …"""
    texts = (node for node in ast.walk(function) if isinstance(node, ast.JoinedStr))
    filled = (
        "".join(str(own.value) if isinstance(own, ast.Constant) else "…" for own in node.values)
        for node in texts
    )
    return {text for text in filled if re.search("[a-z]{2}", text)}


@each("name", list(WORDS))
def test_a_sentence_of_another_kind_needs_a_promise(name):
    module, _, function = name.rpartition(".")
    tree = ast.parse((Path(rlkit.__file__).parent / (module.replace(".", "/") + ".py")).read_text())
    (own,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    assert templates(own) == WORDS[name]
