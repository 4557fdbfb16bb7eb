"""The table of mutations fits the code, and `.ci/mutants` tells a fault from no fault."""

from __future__ import annotations

import ast
import csv
import os
import subprocess
import sys

import pytest

from mutating import LIMIT, ROOT, Mutation, mutate, read_progress, read_table
from parametrise import every_extra

TABLE = read_table()


@pytest.mark.slow
def test_every_mutation_fits_the_code_and_names_its_tests():
    assert len(TABLE) >= 120 and len({m.key for m in TABLE}) == len(TABLE)
    for mutation in TABLE:
        file = ROOT / mutation.file
        if not file.is_file():  # of an extra that was deleted
            assert not every_extra() and "rlkit/extras/" in mutation.file
            continue
        source = file.read_text()
        assert mutate(source, mutation) != source
        ast.parse(mutation.after)
        assert mutation.tests
        lost = {test for test in mutation.tests if not (ROOT / test).is_file()}
        assert not lost or not every_extra()
    rooms = {m.file.split("/")[1] for m in TABLE}
    assert rooms == {"training", "engines", "episodes", "functional", "system", "runs", "extras"}


def test_a_mutation_is_tied_to_syntax_and_occurs_once():
    source = "class A:\n    def f(self):\n        x = g(\n            1,  # é\n        ) + h(1)\n"
    own = Mutation("a.py", "A.f", "g(1)", "2")
    assert mutate(source, own).endswith("        x = (2) + h(1)\n")
    assert mutate(source, own._replace(before="x = g(1) + h(1)", after="x = 3")).endswith("x = 3\n")
    for before, times in (("1", 2), ("g(2)", 0)):
        with pytest.raises(ValueError, match=f"occurs {times} times"):
            mutate(source, own._replace(before=before))


@pytest.mark.slow
def test_a_fault_is_noticed_and_a_row_says_by_which_test(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("the copy of the tree is made of the files that git knows")
    rows = tmp_path / "rows.csv"
    words = [sys.executable, "tests/mutating.py", str(rows), "functional/aggregation"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0 and done.stdout.endswith("1 mutations: 1 killed\n"), done
    with rows.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["outcome"] == "killed" and "test_functional_aggregation.py::" in row["test"]
    assert row["machine"].endswith(f"{os.cpu_count()} cores")


def test_a_process_that_sleeps_is_told_from_one_that_computes():
    asleep = subprocess.Popen(["sleep", "infinity"])
    try:
        # While it starts it computes with pauses, so only the end of this loop shows its sleep.
        while read_progress(asleep.pid) != (False, pytest.approx(0, abs=0.1)):
            pass
        before = read_progress(os.getpid())
        assert before[0]
        while read_progress(os.getpid())[1] == before[1]:
            pass
    finally:
        asleep.kill()
        asleep.wait()
