"""Task sets of the real package: rows become tasks, and their own rewards score replies as the
package itself does.

The package brings some fifty others, so it is an extra; the continuous integration runs this file
with it.
"""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from rlkit.config.problems.rows import check_reward, check_verifier
from rlkit.episodes.record import make_row, read_row
from rlkit.errors import ConfigError, DataError
from rlkit.extras.adapters import verifiers, verifiers_reward
from rlkit.extras.adapters._verifiers import make_task, record_trace
from rlkit.rewards import Reward, Term, by_task, score
from rlkit.types import SPLITS, Rollout, Step, Task, ToolCall, ToolResult

SOURCE = """
import verifiers.v1 as vf

class Config(vf.TasksetConfig):
    rows: int = 40
    bad: str = ""

class Data(vf.TaskData):
    answer: int

class Double(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def right(self, trace):
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.25)
    async def turns(self, trace):
        if "fail" in trace.last_reply:
            raise RuntimeError("the reward broke")
        return float(trace.num_turns)

class Boxed(Double):
    NEEDS_CONTAINER = True

class Doubles(vf.Taskset[Double, Config]):
    def load(self):
        kind = Boxed if self.config.bad == "box" else Double
        for i in range(self.config.rows):
            prompt = None if self.config.bad == "user" else f"Twice {i}?"
            data = Data(prompt=prompt, system_prompt="Only the number.", answer=2 * i)
            yield kind(data, self.config.task)

__all__ = ["Doubles"]
"""
REWARD = Reward(
    "by_task",
    {"task": Term(1.0, partial(by_task, rewards={"verifiers": verifiers_reward}), batched=True)},
)


@pytest.fixture(scope="module", autouse=True)
def taskset(tmp_path_factory):
    pytest.importorskip("verifiers", minversion="0.4")
    folder = tmp_path_factory.mktemp("tasksets")
    (folder / "rlkit_doubles.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def rows(split: str = "train", **settings) -> list[Task]:
    return verifiers(id="rlkit_doubles", split=split, **{"seed": 0, **settings})


def rollout(task: Task, *said: str, truncation: str = "") -> Rollout:
    prompts = [task.messages, *[({"role": "user", "content": "Sure?"},)] * (len(said) - 1)]
    steps = [
        Step(tuple(prompt), (1,), (2,), (-1.0,), "stop", "hm", text)
        for prompt, text in zip(prompts, said, strict=True)
    ]
    return Rollout(task, tuple(steps), "truncated" if truncation else "terminated", truncation)


def test_rows_become_tasks_and_each_is_on_one_side():
    train, validation, test = (rows(split, validation=0.3, held_out=0.3) for split in SPLITS)
    numbers = [
        int(t.messages[1]["content"].removeprefix("Twice ").removesuffix("?"))
        for t in train + validation + test
    ]
    assert (
        sorted(numbers) == list(range(40)) and 4 <= len(test) <= 20 and 4 <= len(validation) <= 20
    )
    assert train[0].messages[0] == {"role": "system", "content": "Only the number."}
    assert {(t.reward, t.environment) for t in train} == {("verifiers", "single_turn")}
    assert {t.id for t in rows("test", held_out=0.3, seed=5)} == {t.id for t in test}
    assert {t.id for t in rows("test", held_out=0.3, config={"rows": 90})} >= {
        t.id for t in test
    }, "more rows move none"
    assert len(rows(limit=10, max_samples=3)) == 3
    with pytest.raises(DataError, match=r"task\.held_out=0\.0 leaves no test rows"):
        rows("test", held_out=0.0)


def test_replies_are_scored_as_the_package_scores_them():
    """Right and wrong, one turn and two; also after a trip through a file, and as the package does
    it itself."""
    task = rows()[0]
    answer = str(task.metadata["verifiers"]["data"]["answer"])
    episodes = [
        rollout(task, answer),
        rollout(task, "x"),
        rollout(task, "x", f" {answer} "),
        rollout(task, answer, "x"),
    ]
    assert [r.reward for r in score(episodes, REWARD)] == [1.25, 0.25, 1.5, 0.5]
    again = [read_row(make_row(r)) for r in episodes]
    assert [r.reward for r in score(again, REWARD)] == [1.25, 0.25, 1.5, 0.5]
    own = make_task(task.metadata["verifiers"])
    trace = record_trace(own, episodes[2])
    asyncio.run(own.score(trace))
    assert {name: r.value for name, r in trace.rewards.items()} == {"right": 1.0, "turns": 0.5}


def test_a_trace_holds_the_whole_conversation():
    task = rows()[0]
    call, result = (
        ToolCall("call_0", "calculator", {"expression": "1 + 1"}),
        ToolResult("call_0", "calculator", "2", ok=True),
    )
    steps = (
        Step(
            task.messages, (1,), (2,), (-1.0,), "stop", tool_calls=(call,), tool_results=(result,)
        ),
        Step((result.message,), (1,), (2,), (-1.0,), "stop"),
    )
    trace = record_trace(
        make_task(task.metadata["verifiers"]), Rollout(task, steps, "truncated", "steps")
    )
    assert [m.role for m in trace.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert (
        trace.messages[2].tool_calls[0].arguments == '{"expression": "1 + 1"}'
        and trace.tool_messages[0].content == "2"
    )
    assert trace.num_turns == 2 and trace.is_truncated


def test_a_reward_that_raises_is_an_error_and_no_zero():
    """The package logs a failing reward of its own rollouts; here it has no score, and its status
    says why."""
    task = rows()[0]
    scored = score([rollout(task, "fail"), rollout(task, "x")], REWARD._replace(max_error_rate=0.5))
    assert [(r.reward, r.statuses["task"]) for r in scored] == [(None, "error"), (0.25, "ok")]


def test_the_checks_at_the_start_pass():
    check_verifier(rows(), REWARD)  # the rows have no gold answer to try
    check_reward(rows(), REWARD)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"config": {"bad": "box"}}, DataError, "row 0: it needs a container"),
        ({"config": {"bad": "user"}}, DataError, "a user who opens the conversation"),
        ({"config": {"rows": "many"}}, ConfigError, "rows"),
        ({"config": {"rwos": 3}}, ConfigError, "rwos"),
        ({"held_out": 1.0}, ConfigError, "held_out"),
    ],
)
def test_what_cannot_be_played_is_refused_with_the_reason(settings, error, words):
    with pytest.raises(error, match=words):
        rows(**settings)


def test_unknown_task_sets_and_rows_of_other_tasks_are_refused():
    with pytest.raises(ConfigError, match="no_such_set"):
        verifiers(id="no_such_set", split="train", seed=0)
    with pytest.raises(ConfigError, match="no row of a task set"):
        score([rollout(Task("t", (), reward="verifiers"), "x")], REWARD)
