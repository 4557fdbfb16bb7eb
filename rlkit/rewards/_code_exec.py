"""Reward programs that pass tests. The program in a reply runs in the sandbox. Its test results are
judged outside the sandbox."""

from __future__ import annotations

import ast
import builtins
import itertools
import re
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from rlkit.errors import DataError
from rlkit.rewards.declarations import batched, reads_fields
from rlkit.rewards.fences import split_code_blocks
from rlkit.rewards.verdicts import Verdict, final_answer
from rlkit.sandbox import (
    Check,
    Job,
    Outcome,
    Sandbox,
    SandboxError,
    Unsplittable,
    passes,
    run_many,
    split,
)
from rlkit.types import Rollout, Task, gives


class Judgement(NamedTuple):
    """Hold the judgement of one program.

    `status` is ok if every test passes, and wrong if some test fails. timeout: the program took too
    long. error: it raised, was killed or printed too much. unparseable: the reply has no code, or
    the code is not Python. unrun: this machine could not start the program, for a reason outside
    the program.
    """

    status: Literal["ok", "wrong", "timeout", "error", "unparseable", "unrun"]
    passed: int
    total: int
    seconds: float = 0.0
    detail: str = ""


@gives("binary", credit="all", correct=1, wrong=0)
@gives("non_negative", wrong=0)
@gives("raw")
@batched
@reads_fields("tests")
def code_exec(
    rollouts: Sequence[Rollout],
    *,
    sandbox: Sandbox | None = None,
    credit: Literal["all", "share"] = "all",
    correct: float = 1.0,
    wrong: float = 0.0,
) -> list[float | SandboxError | None]:
    """Score whether the program in the final reply passes the tests of its task,
    `task.metadata["tests"]`.

    Args:
      rollouts: a batch of rollouts. Equal programs with equal tests run only once.
      sandbox: limits of a program, and the required isolation.
      credit: "all" gives `correct` if every test passes, else `wrong`. "share" gives a score
        between `wrong` and `correct`, in proportion to the share of passing tests. Therefore a
        program that is right only on the easy cases also gets a reward.
      correct, wrong: the scores of a right and of a wrong program.
    Returns: one score per rollout, with the status of its judgement; None for a task without tests.
      If this machine could not start the program, the value is a SandboxError. This error counts as
      a failure of the reward (`Reward.max_error_rate`) and not as a wrong answer.
    Raises: DataError naming the row if a test cannot be checked; ConfigError if the sandbox is
      weaker than required.
    """

    def value(judgement: Judgement | None) -> float | SandboxError | None:
        if judgement is None:
            return None
        if judgement.status == "unrun":
            return SandboxError(judgement.detail)
        share = (
            judgement.passed / judgement.total
            if credit == "share"
            else float(judgement.status == "ok")
        )
        return Verdict(wrong + (correct - wrong) * share, judgement.status)

    return [value(judgement) for judgement in judgements(rollouts, sandbox=sandbox)]


def judgements(
    rollouts: Sequence[Rollout], *, sandbox: Sandbox | None = None
) -> list[Judgement | None]:
    """Judge each rollout's program and return its status with the details, for example for a log.
    The result is None for a task without tests. See `code_exec`."""
    checks = [split_tests(rollout.task) for rollout in rollouts]
    jobs = [_job(rollout, tests) for rollout, tests in zip(rollouts, checks, strict=True)]
    distinct = list(dict.fromkeys(job for job in jobs if job))
    outcomes = dict(zip(distinct, run_many(distinct, sandbox), strict=True))
    judgements: list[Judgement | None] = []
    for job, tests in zip(jobs, checks, strict=True):
        if not tests:
            judgements.append(None)
        elif job is None:
            judgements.append(Judgement("unparseable", 0, len(tests), detail="no code"))
        else:
            judgements.append(_judge_outcome(outcomes[job], tests))
    return judgements


def extract_code(text: str, names: Collection[str] = ()) -> str:
    """Extract the program from a reply. The program is a fenced block (see `rlkit.rewards.fences`),
    or the whole text if no block can be a program.

    Args:
      names: names that the program may define at its top level. The program is the last block with
        a definition of one of these names, so a block with an example of its use may follow. Python
        blocks are preferred to unmarked blocks, and unmarked blocks to blocks in other languages.
        If no block defines a name, the program is the last Python block, else the last unmarked
        block.

    >>> extract_code("First ```x``` then:\\n```python\\na = 1\\n```\\nThis prints\\n```\\n1\\n```")
    'a = 1'
    """
    blocks = split_code_blocks(text)
    ranked = [
        block
        for language in ("python", "unmarked", "other")
        for block in reversed(blocks)
        if block.language == language
    ]
    either = "|".join(map(re.escape, names))
    definition = re.compile(
        rf"^(?:(?:async[ \t]+)?def|class)[ \t]+(?:{either})\b|^(?:{either})[ \t]*=(?!=)",
        re.MULTILINE,
    )
    defining = (block.code for block in ranked if names and definition.search(block.code))
    programs = (block.code for block in ranked if block.language != "other")
    return next(itertools.chain(defining, programs), text)


def _list_called_names(calls: Sequence[str]) -> set[str]:
    """List the names used by tests, without Python's builtins."""
    found = {
        node.id
        for call in calls
        for node in ast.walk(ast.parse(call, mode="eval"))
        if isinstance(node, ast.Name)
    }
    return found - set(dir(builtins))


def split_tests(task: Task) -> list[Check]:
    """Split each test of a task into the calls to run and the check of their results. Raises:
    DataError naming the row and the test if a test cannot be split."""
    checks = []
    tests, setup = task.metadata.get("tests") or [], task.metadata.get("setup") or ""
    if not isinstance(tests, list | tuple) or not all(
        isinstance(own, str) for own in [*tests, setup]
    ):
        raise DataError(
            f"row {task.id}: its tests are {tests!r:.100} and its setup is {setup!r:.100}; give a"
            " list of texts, and a text"
        )
    for test in tests:
        try:
            checks.append(split(test, setup))
        except Unsplittable as error:
            raise DataError(
                f"row {task.id}: the test {test!r:.120} cannot be checked ({error}); write it as"
                " assert CALL == LITERAL"
            ) from error
    return checks


def _job(rollout: Rollout, tests: Sequence[Check]) -> Job | None:
    answer = final_answer(rollout)
    calls = tuple(call for check in tests for call in check.calls)
    code = extract_code(answer, _list_called_names(calls)) if answer is not None else ""
    if not tests or not code.strip():
        return None
    return Job(f"{code}\n{rollout.task.metadata.get('setup') or ''}", calls)


def _judge_outcome(outcome: Outcome | SandboxError, tests: Sequence[Check]) -> Judgement:
    if isinstance(outcome, SandboxError):
        return Judgement("unrun", 0, len(tests), detail=str(outcome))
    given = iter(outcome.results)
    # if the program ended early, there are fewer answers than tests
    answers = [tuple(itertools.islice(given, len(check.calls))) for check in tests]
    right = [passes(check, *results) for check, results in zip(tests, answers, strict=True)]
    judgement = Judgement("wrong", sum(right), len(tests), outcome.seconds)
    if outcome.status == "timeout":
        return judgement._replace(status="timeout", detail=f"more than {outcome.seconds:.1f} s")
    if outcome.status == "error":
        syntax = outcome.error.startswith(("SyntaxError", "IndentationError", "TabError"))
        return judgement._replace(
            status="unparseable" if syntax else "error", passed=0, detail=outcome.error
        )
    if outcome.status != "ok":
        return judgement._replace(status="error", passed=0, detail=outcome.status)
    if judgement.passed == judgement.total:
        return judgement._replace(status="ok")
    failed = right.index(False)
    problem = next((result.error for result in answers[failed] if result.error), "another value")
    return judgement._replace(detail=f"{', '.join(tests[failed].calls):.80}: {problem}")
