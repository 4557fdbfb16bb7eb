"""Mutations of rlkit, each of which has to fail a test.

`mutations.yaml` is the table: file → its tests, and function → [before, after]. `before` is an
expression or a statement that occurs once in the function. Nodes are compared, so line breaks and
comments do not count, and a row that the code has outgrown is an error. The rows are written by
hand: operators drawn at random mostly change messages and bounds of sizes, while each row here
is a fault that would give wrong numbers or lose something of a run.

A mutation is made in a copy of the tree. Its tests run in a fork of this process, which has torch
and Lightning imported already, fast ones first, until one fails. That test runs once more without
the mutation, where it has to pass.

    .ci/mutants                    # goes on where it was interrupted; tries survivors again
    .ci/mutants runs/verdicts      # those of the files or functions with such names
"""

from __future__ import annotations

import ast
import contextlib
import csv
import functools
import importlib
import importlib.util
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("mutations.yaml")
UNUSABLE = 4  # exit status of pytest for a command that it cannot run
# seconds in which a test computes, or sleeps; one that hangs has noticed the mutation
LIMIT = 300
LOOK = 0.05  # seconds between two looks at a test
MARKED = ("not slow and not gpu", "slow and not gpu")  # fast tests first
ALLOWED = 0.03  # share of survivors
KEY = ("file", "function", "before", "after")  # names a mutation
COLUMNS = ("date", "commit", "machine", "python", "torch", *KEY, "outcome", "test", "seconds")
WARM = ("torch", "lightning", "transformers", "peft", "hydra", "pandas")


class Mutation(NamedTuple):
    """In a function of a file, `before` becomes `after`."""

    file: str
    function: str  # with its class, as in Learner.save
    before: str
    after: str
    tests: tuple[str, ...] = ()
    equivalent: str = ""  # why no test can notice it

    @property
    def key(self) -> tuple[str, ...]:
        """What names it in the rows of outcomes (KEY)."""
        return self[:4]

    def __str__(self) -> str:
        return f"{self.file} {self.function}: {self.before} → {self.after}"


def read_table() -> list[Mutation]:
    """The rows of the table."""
    return [
        Mutation(file, function, row[0], row[1], tuple(own["tests"].split()), *row[2:])
        for file, own in yaml.safe_load(TABLE.read_text()).items()
        for function, rows in own.items()
        if function != "tests"
        for row in rows
    ]


parsed = functools.lru_cache(1)(ast.parse)


def mutate(source: str, mutation: Mutation) -> str:
    """The source with the mutation. Raises: ValueError unless the function holds `before` once."""
    scope: ast.AST = parsed(source)
    for name in mutation.function.split("."):
        scope = next(n for n in ast.walk(scope) if getattr(n, "name", "") == name)
    (wanted,) = ast.parse(mutation.before).body
    is_expression = isinstance(wanted, ast.Expr)
    looked_for = wanted.value if isinstance(wanted, ast.Expr) else wanted
    text = ast.dump(looked_for)
    same_kind = (n for n in ast.walk(scope) if type(n) is type(looked_for))
    found = [n for n in same_kind if ast.dump(n) == text]
    if len(found) != 1:
        raise ValueError(f"{mutation}: `before` occurs {len(found)} times; it has to occur once")
    place: Any = found[0]
    lines = source.encode().splitlines(keepends=True)
    begin = sum(map(len, lines[: place.lineno - 1])) + place.col_offset
    end = sum(map(len, lines[: place.end_lineno - 1])) + place.end_col_offset
    after = f"({mutation.after})" if is_expression else mutation.after
    whole = b"".join(lines)
    return (whole[:begin] + after.encode() + whole[end:]).decode()


class Watch:
    """A plugin of pytest: the name of the test that runs or has failed."""

    def __init__(self, note: Path):
        self.note = note

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note.write_text(nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.note.write_text(report.nodeid)


def run_tests(tree: Path, tests: str, marked: str = "not gpu") -> tuple[str, str]:
    """Runs the tests of a file, or one of them, in a copy of the tree, in a fork: passed, failed,
    timeout, died or unusable; and the test under way when it ended."""
    note = tree.with_name("under_way.txt")
    note.write_text("")
    child = os.fork()
    if not child:
        status = UNUSABLE
        try:
            status = in_child(tree, tests, marked, note)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    seen, slept, begun = 0.0, 0.0, 0.0  # of the test under way
    while True:
        ready, computed = read_progress(child)
        pid, status = os.waitpid(child, os.WNOHANG)
        if note.stat().st_mtime != seen:
            seen, slept, begun = note.stat().st_mtime, 0.0, computed
        slept += 0.0 if ready else LOOK
        late = max(slept, computed - begun) > LIMIT
        if pid or late:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # what a test has started and left behind
        if pid:
            break
        if late:
            os.waitpid(child, 0)
            return "timeout", note.read_text()
        time.sleep(LOOK)
    code = os.waitstatus_to_exitcode(status)
    if code in (0, 5):  # 5: no test has these marks
        return "passed", ""
    how = "failed" if code in (1, 2) else "unusable"
    return ("died" if code < 0 else how), note.read_text()


def read_progress(pid: int) -> tuple[bool, float]:
    """Whether a process computes, or would if others left it a core, and its seconds of the
    processor so far."""
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return state == "R", (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK")


def in_child(tree: Path, tests: str, marked: str, note: Path) -> int:
    """Runs pytest in the tree, whose rlkit it imports; its exit status."""
    import pytest
    import torch

    os.setpgid(0, 0)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(p for p in sys.path if Path(p or ".").resolve() not in BESIDE)]
    importlib.invalidate_caches()
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    output = os.open(tree.with_name("output.txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    rewriting = "-Wignore::pytest.PytestAssertRewriteWarning"  # some plugins are imported already
    words = ["-x", "-q", "-n0", "-pno:cacheprovider", f"-m{marked}", rewriting, tests]
    return int(pytest.main(words, plugins=[Watch(note)]))


BESIDE = (ROOT, ROOT / "tests")


def outcome_of(mutation: Mutation, tree: Path, sound: dict[str, bool]) -> tuple[str, str]:
    """What the tests say: killed, survived, timeout; broken, if the failing test fails without the
    mutation too. And the test that noticed it.

    Args:
      sound: test → whether it passes without any mutation, as far as it is known.
    """
    file = tree / mutation.file
    source = file.read_text()
    try:
        rewrite(file, mutate(source, mutation))
        for marked, tests in product(MARKED, mutation.tests):
            how, test = run_tests(tree, tests, marked)
            if how != "passed":
                break
    finally:
        rewrite(file, source)
    if how == "passed":
        return "survived", ""
    if how == "unusable":
        print(tree.with_name("output.txt").read_text()[-2000:], flush=True)
        return "broken", test
    if test not in sound:
        sound[test] = run_tests(tree, test or tests)[0] == "passed"
    if not sound[test]:
        return "broken", test
    return ("timeout" if how == "timeout" else "killed"), test


def rewrite(file: Path, source: str) -> None:
    """Writes a source; its compiled form, which two writes in one second would share, is gone."""
    file.write_text(source)
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


@contextlib.contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of the files that git knows."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True
    )
    with tempfile.TemporaryDirectory(prefix="rlkit_mutants_") as folder:
        tree = Path(folder, "rlkit")
        for name in filter(None, listed.stdout.split("\0")):
            target = tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
        yield tree


def try_all(mutations: Sequence[Mutation], rows: Path) -> None:
    """Tries mutations one after the other, and appends a row for each."""
    here = measured_here()
    sound: dict[str, bool] = {}
    with copied_tree() as tree, rows.open("a", newline="") as file:
        for mutation in mutations:
            begun = time.monotonic()
            outcome, test = outcome_of(mutation, tree, sound)
            seconds = f"{time.monotonic() - begun:.1f}"
            csv.writer(file).writerow([*here, *mutation.key, outcome, test, seconds])
            file.flush()
            print(f"{outcome:8} {seconds:>6} s  {mutation}", flush=True)


def measured_here() -> list[str]:
    """The date, the commit, the machine and the versions."""
    import torch

    words = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    machine = f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"
    version = torch.__version__.partition("+")[0]
    return [date.today().isoformat(), commit, machine, platform.python_version(), version]


def main(rows: Path, chosen: Sequence[str]) -> int:
    """Tries the mutations that have no row yet or survived, half of them on each of two cores, and
    prints the survivors; 1 if they are too many."""
    table = [m for m in read_table() if any(part in f"{m.file} {m.function}" for part in chosen)]
    if not rows.exists():
        rows.write_text(",".join(COLUMNS) + "\n")
    random.Random("mutants").shuffle(table)  # the rows of an interrupted run are a random sample
    left = [m for m in table if known(rows).get(m.key) in (None, "survived")]
    for name in WARM:
        importlib.import_module(name)
    workers = min(2, len(os.sched_getaffinity(0)))
    children = []
    for i in range(workers):
        child = os.fork()
        if not child:
            status = 1
            try:
                try_all([m for m in left[i::workers] if not m.equivalent], rows)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        children.append(child)
    ended = [os.waitpid(child, 0)[1] for child in children]
    found = known(rows)
    outcomes = Counter(
        "equivalent" if m.equivalent else found.get(m.key, "not tried") for m in table
    )
    survivors = [m for m in table if found.get(m.key) == "survived" and not m.equivalent]
    for mutation in survivors:
        print(f"survived: {mutation}")
    print(f"{len(table)} mutations: {', '.join(f'{n} {what}' for what, n in outcomes.items())}")
    odd = outcomes["broken"] + outcomes["not tried"] + any(ended)
    return int(len(survivors) > ALLOWED * len(table) or odd > 0)


def known(rows: Path) -> dict[tuple[str, ...], str]:
    """Mutation → its last outcome."""
    with rows.open(newline="") as file:
        found = list(csv.DictReader(file))
    return {tuple(row[name] for name in KEY): row["outcome"] for row in found}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or [""]))
