"""The reward of code: hidden tests decide, every way to fail has its name, and reference solutions
of MBPP score 1."""

from __future__ import annotations

from functools import partial

import pytest

from rlkit.config.problems.rows import check_verifier
from rlkit.errors import ConfigError, DataError
from rlkit.rewards import (
    Reward,
    RewardError,
    Term,
    _code_exec,
    by_task,
    code_exec,
    judgements,
    numeric,
    score,
    weighted_sum,
)
from rlkit.sandbox import Sandbox, SandboxError, level, process, run_many
from rlkit.sandbox.level import Level
from rlkit.tasks import mbpp
from rlkit.types import Rollout, Step, Task

TASK = Task(
    "t/0",
    (),
    reward="code_exec",
    metadata={"tests": ("assert f(1) == 2", "assert f(2) == 3"), "setup": ""},
)
FAST = Sandbox(time_limit=0.5)
REPLIES = {
    "right": ("Here:\n```python\ndef f(n):\n  return n + 1\n```\nIt adds one.", "ok", 2),
    "right without a block": ("def f(n): return n + 1", "ok", 2),
    "the last block counts": (
        "```python\ndef f(n): return 0\n```\nBetter:\n```python\ndef f(n): return n + 1\n```",
        "ok",
        2,
    ),
    "knows the visible case only": ("```python\ndef f(n): return 2\n```", "wrong", 1),
    "another type": ("```python\ndef f(n): return str(n + 1)\n```", "wrong", 0),
    "another name": ("```python\ndef g(n): return n + 1\n```", "wrong", 0),
    "always equal": (
        "```python\nclass A:\n  __eq__ = lambda s, o: True\ndef f(n): return A()\n```",
        "wrong",
        0,
    ),
    "stops at once": ("```python\nimport os\nos._exit(0)\n```", "error", 0),
    "raises": ("```python\nraise ValueError\n```", "error", 0),
    "endless": ("```python\nwhile True: pass\n```", "timeout", 0),
    "endless in the second": (
        "```python\ndef f(n):\n  while n == 2: pass\n  return n + 1\n```",
        "timeout",
        1,
    ),
    "no Python": ("```python\ndef f(n) return\n```", "unparseable", 0),
    "words": ("I cannot do that.", "unparseable", 0),
    "empty": ("", "unparseable", 0),
    "cannot be compiled": ("```python\nx = '\0'\n```", "error", 0),
}


def rollout(content: str, task: Task = TASK, **changes) -> Rollout:
    step = Step(
        prompt=(),
        prompt_ids=(),
        response_ids=(),
        logprobs=(),
        finish_reason="stop",
        content=content,
    )
    return Rollout(task, (step._replace(**changes),))


@pytest.mark.slow
def test_every_end_has_its_name_and_only_all_tests_score():
    rollouts = [rollout(text) for text, _, _ in REPLIES.values()]
    found = judgements(rollouts, sandbox=FAST)
    expected = [(status, passed, 2) for _, status, passed in REPLIES.values()]
    got = [(v.status, v.passed, v.total) for v in found]
    names = list(REPLIES)
    assert {
        n: g
        for n, g, e in zip(names, got, expected, strict=True)
        if g != e and n != "cannot be compiled"
    } == {}
    assert got[names.index("cannot be compiled")][0] in ("error", "unparseable")
    assert [v.detail != "" for v in found] == [v.status != "ok" for v in found]
    ended = [i for i, (_, status, _) in enumerate(REPLIES.values()) if status != "timeout"]
    assert code_exec([rollouts[i] for i in ended], sandbox=FAST) == [
        float(expected[i][0] == "ok") for i in ended
    ]
    assert code_exec(rollouts[:4], sandbox=FAST, credit="share", correct=2.0, wrong=-2.0) == [
        2.0,
        2.0,
        2.0,
        0.0,
    ]


def test_thinking_is_not_run_and_a_reply_cut_off_is_wrong():
    right = REPLIES["right"][0]
    assert code_exec([rollout("", thinking=right), rollout(right, finish_reason="length")]) == [
        0.0,
        0.0,
    ]


def test_a_task_without_tests_cannot_be_scored_and_a_test_that_cannot_be_checked_is_named():
    assert code_exec([rollout("x = 1", Task("t/1", ()))]) == [None] and code_exec([]) == []
    with pytest.raises(DataError, match=r"t/2.*f\(1\) != 2.*cannot be checked"):
        code_exec([rollout("x = 1", Task("t/2", (), metadata={"tests": ("assert f(1) != 2",)}))])


@pytest.mark.slow
def test_a_hostile_value_is_wrong_for_its_own_program_and_no_other():
    """10**400 under isclose raised OverflowError in the trainer, took the batch with it, and the
    first rollout got the blame."""
    tests = (
        "assert math.isclose(f(1), 2.0)",
        "assert sorted(f(2)) == [1]",
        "assert sum(f(3)) == 3",
    )
    task = TASK._replace(metadata={"tests": tests, "setup": "import math"})
    right = rollout("def f(n): return {1: 2.0, 2: [1], 3: [1, 2]}[n]", task)
    values = [
        "10**400",
        "float('nan')",
        "[1, 'a']",
        "1j",
        "'\\ud800'",
        "{1: {2}}",
        "type('A', (), {})()",
        "[10**400, 0.5]",
        "1 << 10**6",
        "b'x'",
    ]
    hostile = [rollout(f"def f(n): return {value}", task) for value in values]
    rows = [x for pair in zip([right] * len(hostile), hostile, strict=True) for x in pair]
    assert [
        r.reward for r in score(rows, Reward("code", {"code": Term(1.0, code_exec)}, weighted_sum))
    ] == [1.0, 0.0] * len(hostile)


CHEATS = (
    "all = any = allclose = isclose = zip = set = sorted = len = lambda *a, **k: True\nimport"
    " builtins, math\nbuiltins.all = builtins.any = lambda *a: True\nbuiltins.zip = lambda *a:"
    " []\nmath.isclose = lambda *a, **k: True\n"
)


@pytest.mark.parametrize(
    "test, value",
    [
        ("assert sorted(f(1)) == [1, 2]", "[2, 1]"),
        ("assert allclose(f(1), 4.0)", "4.0"),
        ("assert math.isclose(f(1), 4.0)", "4.0"),
        ("assert any(f(1)) == True", "[3]"),
        ("assert len(f(1)) == 2", "'ab'"),
        ("assert set(f(1)) == {1}", "[1, 1]"),
        ("assert list(f(1)) == [0, 1]", "(n for n in range(2))"),
    ],
)
def test_a_program_that_redefines_the_judge_wins_nothing(test, value):
    task = TASK._replace(metadata={"tests": (test,)})
    cheat = rollout(f"{CHEATS}def f(n): return None", task)
    assert code_exec(
        [
            rollout(f"def f(n): return {value}", task),
            cheat,
            rollout(f"{CHEATS}def f(n): return []", task),
        ]
    ) == [1.0, 0.0, 0.0]


def test_a_program_that_this_machine_cannot_start_is_no_wrong_answer_and_stops_no_other(
    monkeypatch,
):
    real = process.run_with

    def failing(job, *rest):
        if "unlucky" in job.code:
            raise SandboxError("no memory for a child")
        return real(job, *rest)

    monkeypatch.setattr(level, "run_with", failing)
    rows = [rollout(REPLIES["right"][0]), rollout("unlucky = 1"), rollout("x = 1")]
    assert [v.status for v in judgements(rows)] == ["ok", "unrun", "wrong"]
    lenient = Reward("code", {"code": Term(1.0, code_exec)}, weighted_sum, max_error_rate=0.5)
    assert [r.reward for r in score(rows, lenient)] == [1.0, None, 0.0]
    with pytest.raises(RewardError, match=r"no memory for a child.*'unlucky = 1'") as failure:
        score(rows, lenient._replace(max_error_rate=0.0))
    assert failure.value.rollout.final_content == "unlucky = 1"


def test_a_test_that_cannot_be_judged_outside_is_refused_at_the_start_with_its_row():
    """In any row, not only in those whose gold answers are tried."""
    rows = [TASK._replace(id=f"t/{i}", answer=REPLIES["right"][0]) for i in range(40)]
    rows[39] = rows[39]._replace(metadata={"tests": ("assert check(f(1), 2)",)})
    with pytest.raises(
        DataError,
        match=(
            r"row t/39: the test 'assert check\(f\(1\), 2\)' cannot be checked \(the expectation"
            r" may stand inside"
        ),
    ):
        check_verifier(rows, Reward("code", {"code": Term(1.0, code_exec)}, weighted_sum))


def test_equal_programs_run_once(monkeypatch):
    counts = []

    def counted(jobs, sandbox):
        counts.append(len(jobs))
        return run_many(jobs, sandbox)

    monkeypatch.setattr(_code_exec, "run_many", counted)
    assert code_exec([rollout(REPLIES["right"][0])] * 5 + [rollout("x = 1")]) == [1.0] * 5 + [
        0.0
    ] and counts == [2]


def test_the_setup_of_a_row_runs_after_the_program():
    task = TASK._replace(
        metadata={"tests": ("assert f(N(1)) == 1",), "setup": "class N(int): pass"}
    )
    assert code_exec([rollout("def f(n): return int(n)", task)]) == [1.0]


def test_a_mixture_scores_code_and_numbers():
    terms = {
        "task": Term(1.0, partial(by_task, rewards={"code_exec": code_exec, "numeric": numeric}))
    }
    rows = [
        rollout(REPLIES["right"][0]),
        rollout("#### 4", Task("n", (), answer="4")),
        rollout("x = 1"),
    ]
    assert [r.reward for r in score(rows, Reward("by_task", terms, weighted_sum))] == [
        1.0,
        1.0,
        0.0,
    ]


def test_a_machine_without_isolation_refuses_to_run_model_written_code(monkeypatch):
    monkeypatch.setattr(
        level, "find_level", lambda: Level("basic", (), ("files", "network"), ("no Landlock",))
    )
    with pytest.raises(ConfigError, match=r"no Landlock.*sandbox\.allow_weak=true"):
        code_exec([rollout("x = 1")])
    assert code_exec([rollout(REPLIES["right"][0])], sandbox=Sandbox(allow_weak=True)) == [1.0]


def gold(shared, rows: slice) -> list[tuple[str, str]]:
    tasks = mbpp(
        path=str(shared / "mbpp" / "mbpp.jsonl"),
        split="train",
        seed=0,
        validation=0.0,
        held_out=0.0,
    )
    tasks = sorted(tasks, key=lambda task: task.id)[rows]
    shown = [
        t._replace(metadata={**t.metadata, "tests": (t.metadata["shown"], *t.metadata["tests"])})
        for t in tasks
    ]
    return [
        (t.id, v.status)
        for t, v in zip(
            shown,
            judgements([rollout(t.answer, t) for t in shown], sandbox=Sandbox(time_limit=20.0)),
            strict=True,
        )
    ]


@pytest.mark.slow
def test_reference_solutions_of_mbpp_pass(shared):
    """All tests of 25 rows, the shown one included."""
    found = gold(shared, slice(0, 25))
    assert len(found) == 25 and [entry for entry in found if entry[1] != "ok"] == []


@pytest.mark.slow
def test_all_reference_solutions_of_mbpp_pass(shared):
    """498 of 500: 123 and 414 are left out by name (`task.exclude`)."""
    found = gold(shared, slice(None))
    assert len(found) == 498 and [entry for entry in found if entry[1] != "ok"] == []
