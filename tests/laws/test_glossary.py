"""No metric is without a meaning: what runs wrote, and what the code names, has an entry in
rlkit/training/glossary.yaml."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlkit
from rlkit.algorithm import PARTS
from rlkit.commands.cli import main
from rlkit.config.schema import resolve
from rlkit.training.glossary import find_meaning, read_sections

ROOT = Path(__file__).resolve().parents[2]
MISSING = (
    "no entry in rlkit/training/glossary.yaml; add meaning, unit, healthy range and what to do,"
    " then run python docs/generate.py"
)
ENTRIES = [entry for section in read_sections() for entry in section.entries]
PREFIXES = {name.partition("/")[0] for entry in ENTRIES for name in entry.names if "/" in name}
NO_METRIC = {
    "held_out",
    "samples",
    "checkpoints",
    "final",
}  # folders of a run, and a tag of TensorBoard


def known(metric: str) -> bool:
    """Whether it has an entry of its own: the one for what a user's reward measures would take any
    name below its term."""
    return find_meaning(metric) not in (None, find_meaning("reward/task/of_its_own"))


def written() -> set[str]:
    """Names of the metrics of the runs that tests/laws/goldens holds: every algorithm, mixtures,
    phases."""
    lines = (
        line
        for file in (ROOT / "tests" / "laws" / "goldens").glob("*.yaml")
        for line in file.read_text().splitlines()
    )
    return {
        found[1]
        for line in lines
        if (found := re.match(r"  ['\"]?([a-z_]+(?:/[\w./-]+)?)['\"]?:", line))
    }


def named() -> Iterator[tuple[str, str]]:
    """(file, metric) of each text in the rooms that make rows that looks like a metric; "…" stands
    for what is filled in."""
    for file in sorted(
        f
        for room in ("training", "episodes")
        for f in (Path(rlkit.__file__).parent / room).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(file.read_text())):
            text = (
                node.value
                if isinstance(node, ast.Constant)
                else node
                if isinstance(node, ast.JoinedStr)
                else None
            )
            if isinstance(text, ast.JoinedStr):
                text = "".join(
                    part.value if isinstance(part, ast.Constant) else "…" for part in text.values
                )
            if (
                isinstance(text, str)
                and re.fullmatch(r"[a-z_]+/[\w@…/]+", text)
                and text.partition("/")[0] not in NO_METRIC
            ):
                yield file.name, text


def test_every_metric_of_the_goldens_has_an_entry():
    found = {name for name in written() if "/" in name or name.endswith("_frac")}
    assert len(found) > 200
    assert not sorted(name for name in found if not known(name)), MISSING


@pytest.mark.slow
def test_every_metric_that_the_code_names_has_an_entry():
    found = list(named())
    assert len(found) > 100
    names = [name for entry in ENTRIES for name in entry.names]
    lost = [
        (f, n)
        for f, n in found
        if not (any(k.startswith(n.partition("…")[0]) for k in names) if "…" in n else known(n))
    ]
    lost = [
        (f, n) for f, n in lost if not any(k.startswith(n) for k in names)
    ]  # the beginning of composed names
    assert not lost, MISSING


@pytest.mark.parametrize("page", ["no_rise.md", "curves.md"])
def test_pages_that_start_from_metrics_name_ones_that_exist(page):
    """`rlkit metrics NAME` answers for each; what is a key of the config is written with a dot, and
    an option with "="."""
    said = re.findall(r"`([a-z_]+/[\w/*@]+|[a-z_]+_frac)`", (ROOT / "docs" / page).read_text())
    assert len(said) > 10
    names = [name for entry in ENTRIES for name in entry.names]
    assert not [
        n
        for n in said
        if not (known(n) if n[-1] != "*" else any(k.startswith(n[:-1]) for k in names))
    ]


def test_no_entry_outlives_its_metric():
    """Its section's functions stand in files that have its last word; a part's own metrics have the
    names of the parts."""
    for section in read_sections():
        source = "\n".join(
            inspect.getsource(importlib.import_module(resolve(name).__module__))
            for name in section.computed
        )
        # names that are composed
        source += (
            "reference/ step perf/model perf/generate perf/environment perf/reward perf/update"
        )
        for name in (name for entry in section.entries for name in entry.names):
            head, _, last = name.rpartition("/")
            word = re.sub(
                r"_(s|frac|low|high|lr|updates|grad_norm|histogram)$", "", last
            ).removeprefix("critic_")
            chosen = last.isupper() and (
                head in PARTS or head in source or head.partition("/")[0] in PREFIXES
            )
            assert chosen or word in source or "PART" in name, name


def test_every_entry_says_all_of_it():
    assert len({name for entry in ENTRIES for name in entry.names}) == sum(
        len(entry.names) for entry in ENTRIES
    )
    for entry in ENTRIES:
        assert all(entry[1:]) and entry.means.endswith((".", ")")), entry.names


def test_the_terminal_explains_a_metric_and_those_below_a_name(capsys):
    assert main(["metrics", "reward/format/mean", "kl"]) == 0
    said = capsys.readouterr().out
    assert (
        "one reward term" in said and "kl/step" in said and max(map(len, said.splitlines())) <= 130
    )
    assert main(["metrics", "kl/reff"]) == 2 and "Did you mean 'kl/ref'?" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["asynchrony=lag", "asynchrony.staleness=1"],
        ["algorithm=ppo", "algorithm/critic=separate"],
        ["algorithm=echo"],
    ],
)
def test_every_metric_of_a_run_has_an_entry(words):
    """Names that the code composes show only in a row; the goldens have no asynchrony and no
    streams."""
    x = rlkit.experiment(
        *words,
        "batch.prompts=2",
        "batch.group_size=2",
        "trainer.steps=2",
        "generation.max_new_tokens=8",
        "trainer.threads=1",
    )
    for step in rlkit.steps(x):
        assert not sorted(name for name in step.metrics if not known(name)), MISSING
