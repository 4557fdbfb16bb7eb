"""Generated problems of the package reasoning-gym: with a stub of its two modules, and with the
package where it is installed."""

from __future__ import annotations

import json
import sys
import types

import pytest

from rlkit.errors import ConfigError
from rlkit.extras.adapters import reasoning_gym
from rlkit.extras.adapters import reasoning_gym_reward as score
from rlkit.extras.adapters._reasoning_gym import Entries, _generate_entries
from rlkit.types import Rollout, Step


class Doubles:
    """A data set as the package makes one; half a point for a number that is wrong."""

    def __init__(self, seed, size, factor=2):
        assert factor > 0, "factor must be positive"
        self.seed, self.factor, self.generated = seed, factor, 0

    def __getitem__(self, i):
        self.generated += 1
        return {
            "question": f"{self.factor} times {self.seed + i}?",
            "answer": str(self.factor * (self.seed + i)),
            "metadata": {1: object()},
        }

    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.5 * answer.isdigit()


class Evaluated(Doubles):
    """Evaluates the reply, as some data sets of the package do."""

    def score_answer(self, answer, entry):
        return (
            1.0
            if isinstance(eval(answer, {"x": 3, "sin": lambda v: v}), (int, float, list))
            else 0.5
        )


@pytest.fixture(autouse=True)
def fresh():
    _generate_entries.cache_clear()
    yield
    _generate_entries.cache_clear()


@pytest.fixture
def stub(monkeypatch):
    package, factory = types.ModuleType("reasoning_gym"), types.ModuleType("reasoning_gym.factory")
    factory.DATASETS = {"doubles": (Doubles, None), "evaluated": (Evaluated, None)}
    package.create_dataset = lambda name, **options: factory.DATASETS[name][0](**options)
    package.factory = factory
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


def made(split="train", **options):
    return reasoning_gym(**{"dataset": "doubles", "split": split, "seed": 3, "rows": 60, **options})


def replied(task, text, finish_reason="stop"):
    return Rollout(task, (Step((), (), (), (), finish_reason, content=text),))


def test_rows_are_scored_by_the_package_from_what_a_file_keeps(stub):
    """A row survives JSON, though the entry does not; the answer may be tagged, and a reply that
    was cut scores nothing."""
    task = made(options={"factor": 5})[0]
    task = task._replace(metadata=json.loads(json.dumps(task.metadata)))
    right = task.answer
    texts = [right, f"so <answer>1</answer> no <answer> {right}\n</answer>", "7", "seven"]
    assert [score(replied(task, text)) for text in texts] == [1.0, 1.0, 0.5, 0.0]
    assert score(replied(task, right, "length")) == 0.0
    with pytest.raises(ConfigError, match="use task=reasoning_gym"):
        score(replied(task._replace(metadata={}), right))


@pytest.mark.parametrize(
    "text", ["3 + 4*(5 - 1)", "[1, 2]", "2*x**2 + sin(2*x)", "(x + 1)**(3/2)", "-1.5"]
)
def test_an_expression_is_evaluated(text, stub):
    assert score(replied(made(dataset="evaluated")[0], text)) == 1.0


HOSTILE = (
    "__import__('os').getpid()",
    "open('/etc/passwd').read()",
    "x.real",
    "x. real",
    "(lambda: 1)()",
    "[i for i in (1, 2)]",
    "print(1)",
    "9**9**9",
    "(((9)**99)**99)**99",
    "'a'*1000000",
    "[0]*1000000",
    "3*[0]",
    "(print)(1)",
    "x:=1",
    "1+" * 300 + "1",
    "exit ()",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_more_than_an_expression_scores_0_and_is_not_evaluated(text, stub, monkeypatch):
    monkeypatch.setattr(Entries, "score", lambda *given: pytest.fail(f"evaluated {given[1]!r}"))
    assert score(replied(made(dataset="evaluated")[0], text)) == 0.0


def test_the_splits_share_no_problem_and_leave_none_out(stub):
    splits = [made(split) for split in ("train", "validation", "test")]
    asked = [task.messages[0]["content"] for own in splits for task in own]
    assert len(asked) == len(set(asked)) == 60 and all(splits)
    assert made(max_samples=5) == splits[0][:5] and made(seed=4)[0] != splits[0][0]
    assert made(system="Think.")[0].messages[0] == {"role": "system", "content": "Think."}


def test_what_is_not_there_is_refused_in_a_sentence(stub, monkeypatch):
    with pytest.raises(ConfigError, match=r"no such data set\. Did you mean 'doubles'"):
        made(dataset="double")
    with pytest.raises(ConfigError, match=r"task\.options: TypeError: .*factr"):
        made(options={"factr": 2})
    with pytest.raises(ConfigError, match="factor must be positive"):
        made(options={"factor": 0})
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"needs the package: .*\[reasoning_gym\]"):
        made(rows=61)


@pytest.mark.parametrize(
    "dataset, options",
    [("countdown", {"min_numbers": 3, "max_numbers": 3}), ("knights_knaves", {})],
)
def test_the_packages_own_answers_score_1(dataset, options):
    pytest.importorskip("reasoning_gym", reason="the extra reasoning_gym is not installed")
    tasks = reasoning_gym(dataset=dataset, split="train", seed=0, rows=20, options=options)
    assert [score(replied(task, task.answer)) for task in tasks] == [1.0] * len(tasks)
    assert max(score(replied(task, "?")) for task in tasks) < 0.2
