"""Reward of code: the program in the reply runs in the sandbox, its tests are judged outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from rlkit.errors import DataError
from rlkit.rewards.aggregators import batched
from rlkit.rewards.answers import final_answer
from rlkit.rewards.score import Verdict
from rlkit.sandbox import Check, Job, Outcome, Sandbox, Unsplittable, passes, run_many, split
from rlkit.types import Rollout, Task, gives

FENCES = ("```python", "```py", "```")


class Judgement(NamedTuple):
    """What became of one program.

    `status`: ok (every test passes), wrong (some test fails), timeout, error (it raised, was killed or said too much),
    unparseable (no code, or not Python).
    """

    status: Literal["ok", "wrong", "timeout", "error", "unparseable"]
    passed: int
    total: int
    seconds: float = 0.0
    detail: str = ""


@gives("binary", credit="all", correct=1, wrong=0)
@gives("non_negative", wrong=0)
@gives("raw")
@batched
def code_exec(
    rollouts: Sequence[Rollout],
    *,
    sandbox: Sandbox | None = None,
    credit: Literal["all", "share"] = "all",
    correct: float = 1.0,
    wrong: float = 0.0,
) -> list[float | None]:
    """Whether the program in the final reply passes the tests of its task, `task.metadata["tests"]`.

    Args:
      rollouts: a batch; equal programs of equal tests run once.
      sandbox: limits, and the isolation that is asked for.
      credit: all gives `correct` where every test passes; share gives what lies between `wrong` and `correct` by the share that
        passes, which rewards programs that are right on easy cases only.
      correct, wrong: the two scores.
    Returns: a score each, with the status of its judgement; None for a task without tests.
    Raises: DataError naming the row whose test cannot be checked; ConfigError where the sandbox is weaker than asked for.
    """

    def value(judgement: Judgement | None) -> float | None:
        if judgement is None:
            return None
        share = judgement.passed / judgement.total if credit == "share" else float(judgement.status == "ok")
        return Verdict(wrong + (correct - wrong) * share, judgement.status)

    return [value(judgement) for judgement in judgements(rollouts, sandbox=sandbox)]


def judgements(rollouts: Sequence[Rollout], *, sandbox: Sandbox | None = None) -> list[Judgement | None]:
    """What became of each rollout's program, with its status for a log; None for a task without tests. See `code_exec`."""
    checks = [tests_of(rollout.task) for rollout in rollouts]
    jobs = [_job(rollout, tests) for rollout, tests in zip(rollouts, checks, strict=True)]
    distinct = list(dict.fromkeys(job for job in jobs if job))
    outcomes = dict(zip(distinct, run_many(distinct, sandbox), strict=True))
    return [
        None if not tests else Judgement("unparseable", 0, len(tests), detail="no code") if job is None else _judged(outcomes[job], tests)
        for job, tests in zip(jobs, checks, strict=True)
    ]


def extract_code(text: str) -> str:
    """The last fenced block (```python, ```py or ```) that is closed and not empty, or the whole text where there is none.

    >>> extract_code("First ```x``` then:\\n```python\\na = 1\\n```\\ndone")
    'a = 1'
    """
    block: list[str] | None = None
    found = ""
    for line in text.splitlines():
        fence = line.strip().lower()
        if block is None:
            block = [] if fence in FENCES else None
        elif fence == "```":
            found = "\n".join(block) if any(map(str.strip, block)) else found
            block = None
        else:
            block.append(line)
    return found or text


def tests_of(task: Task) -> list[Check]:
    """The task's tests, split. Raises: DataError naming the row and the test that cannot be."""
    checks = []
    for test in task.metadata.get("tests", ()):
        try:
            checks.append(split(test))
        except Unsplittable as error:
            raise DataError(
                f"row {task.id}: the test {test!r:.120} cannot be checked ({error}); write it as assert CALL == LITERAL"
            ) from error
    return checks


def _job(rollout: Rollout, tests: Sequence[Check]) -> Job | None:
    answer = final_answer(rollout)
    code = extract_code(answer) if answer is not None else ""
    if not tests or not code.strip():
        return None
    return Job(f"{code}\n{rollout.task.metadata.get('setup', '')}", tuple(check.call for check in tests))


def _judged(outcome: Outcome, tests: Sequence[Check]) -> Judgement:
    right = [passes(check, result) for check, result in zip(tests, outcome.results, strict=False)]
    judgement = Judgement("wrong", sum(right), len(tests), outcome.seconds)
    if outcome.status == "timeout":
        return judgement._replace(status="timeout", detail=f"more than {outcome.seconds:.1f} s")
    if outcome.status == "error":
        syntax = outcome.error.startswith(("SyntaxError", "IndentationError", "TabError"))
        return judgement._replace(status="unparseable" if syntax else "error", passed=0, detail=outcome.error)
    if outcome.status != "ok":
        return judgement._replace(status="error", passed=0, detail=outcome.status)
    if judgement.passed == judgement.total:
        return judgement._replace(status="ok")
    failed = right.index(False)
    return judgement._replace(detail=f"{tests[failed].call:.80}: {outcome.results[failed].error or 'another value'}")
