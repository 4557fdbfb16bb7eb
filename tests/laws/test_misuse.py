"""Sixty wrong calls of the Python API: each is answered by a sentence that says where, never by an
AttributeError or a TypeError of Python. No model is loaded."""

from __future__ import annotations

import functools

import pytest
import torch

import rlkit
from rlkit.config.parts import lift_part
from rlkit.environments import find_environment

TASK = rlkit.Task("t/0", ({"role": "user", "content": "What is 1 + 1?"},), answer="2")
ROLLOUT = rlkit.Rollout(TASK, ())
PLAYED = (rlkit.Policy(None, None, (), 0, 8), [TASK], rlkit.environments.single_turn())
F = rlkit.functional


def brief(rollout):
    return 1.0


@functools.cache
def plain():
    return rlkit.experiment(task=[TASK], evaluation__n=0, logger="none")


def changed(**fields):
    """An experiment whose fields a user has replaced by hand."""
    return rlkit.load_tasks(plain()._replace(**fields))


def of(**keywords):
    return lambda: rlkit.experiment(**keywords)


def rows(*given):
    return lambda: rlkit.load_tasks(rlkit.experiment(task=list(given), evaluation__n=0))


MISUSES = {
    # an experiment's words
    "override of another type": lambda: rlkit.experiment(3),
    "overrides in a list": lambda: rlkit.experiment(["algorithm=dapo"]),
    "overrides in a mapping": lambda: rlkit.experiment({"algorithm": "dapo"}),
    "overrides in one text": lambda: rlkit.experiment("algorithm=dapo kl=none"),
    "no override": lambda: rlkit.experiment("dapo"),
    "empty override": lambda: rlkit.experiment(""),
    "flag": lambda: rlkit.experiment("--algorithm"),
    "an override that is None": lambda: rlkit.experiment(None),
    "an experiment": lambda: rlkit.experiment(plain()),
    "config_dir that is not there": of(config_dir="nowhere"),
    "config_dir of another type": of(config_dir=3),
    "trust in words": of(trust="yes"),
    "unknown key": of(trainer__stesp=3),
    "one underscore": of(trainer_steps=3),
    "group of nothing": of(algorithm=None),
    "group of a number": of(kl=3),
    "empty mapping for a group": of(reward={}),
    "empty list for a group": lambda: rlkit.load_tasks(rlkit.experiment(reward=[])),
    "object for a number": of(trainer__steps=object()),
    "fraction for a whole number": of(trainer__steps=1.5),
    "text for a number": of(optimizer__lr="high"),
    "list for a number": of(seed=[1, 2]),
    # its parts
    "function for a record": of(kl=brief),
    "class for an engine": of(generation__engine=rlkit.engines.Cached),
    "object for a choice": of(kl__placement=object()),
    "number for a function": of(algorithm__advantage=3),
    "part of a part that is a number": of(trainer__steps__more=object()),
    "algorithm without parts": of(algorithm=rlkit.Algorithm("mine", *[None] * 5)),
    "algorithm of texts": of(algorithm=rlkit.Algorithm("mine", *["grpo"] * 5)),
    "kl whose coefficient is a text": of(kl=rlkit.KL("mine", F.k3, coef="much")),
    "reward of a number": of(reward=object()),
    "reward of texts and functions": of(reward=[brief, 3]),
    "reward whose terms are a function": of(reward=rlkit.Reward("mine", 3)),
    "term without a function": of(reward=rlkit.Term(1.0, "numeric")),
    "term whose weight is a text": of(reward=rlkit.Term("one", brief)),
    "reward with too many arguments": lambda: rlkit.load_tasks(
        rlkit.experiment(task=[TASK], evaluation__n=0, reward=lambda rollout, more: 1.0)
    ),
    "environment of a text's type": of(environment=object()),
    "tools of a number": of(environment="tool_use", environment__tools=[3]),
    "logger of a function": of(logger=brief),
    "callback of a number": of(callbacks__mine=object()),
    "class for the model": of(model=torch.nn.Linear),
    "network for the model": of(model=torch.nn.Linear(2, 2)),
    "object for a function of a Protocol": of(algorithm__policy_loss=object()),
    # its tasks
    "task of a number": of(task=3),
    "task that is one task": of(task=TASK),
    "task of texts": rows("What is 1 + 1?"),
    "task of functions": rows(brief),
    "task of none": rows(),
    "row without a prompt": rows({"question": "1 + 1?", "answer": "2"}),
    "row with an empty prompt": rows({"prompt": "", "answer": "2"}),
    "row with a prompt of a number": rows({"prompt": 3, "answer": "2"}),
    "row with an answer of None": rows({"prompt": "1 + 1?", "answer": None}),
    "task whose messages are a text": rows(rlkit.Task("t/0", "What is 1 + 1?", "2")),
    "task whose messages are texts": rows(rlkit.Task("t/0", ("What is 1 + 1?",), "2")),
    # fields by hand
    "batch of a number": lambda: changed(batch=3),
    "task by hand": lambda: changed(task=[TASK]),
    "trainer of a mapping": lambda: changed(trainer={"steps": 3}),
    "model by hand": lambda: changed(model="tiny"),
    # functions
    "train with words": lambda: rlkit.train("algorithm=grpo"),
    "train with nothing": lambda: rlkit.train(),
    "train with a folder of another type": lambda: rlkit.train(plain(), folder=3),
    "train with an unknown keyword": lambda: rlkit.train(plain(), steps=3),
    "steps of a mapping": lambda: rlkit.steps({}),
    "collect from a name": lambda: rlkit.collect("tiny", [TASK], rlkit.environments.single_turn()),
    "collect with a misspelt number": lambda: rlkit.collect(*PLAYED, temprature=1.0),
    "collect with a text for a number": lambda: rlkit.collect(*PLAYED, temperature="hot"),
    "collect without arguments": lambda: rlkit.collect(),
    "score with a number": lambda: rlkit.score([ROLLOUT], 3),
    "score of one rollout": lambda: rlkit.score(ROLLOUT, brief),
    "score of tasks": lambda: rlkit.score([TASK], brief),
    "score with terms of functions": lambda: rlkit.score([3], rlkit.Reward("m", {"m": brief})),
    "assemble of a text": lambda: rlkit.assemble("rollouts", pad_token_id=0),
    "load_policy by position": lambda: rlkit.load_policy("tiny"),
    "load_policy of a type": lambda: rlkit.load_policy(path="tiny", dtype="half"),
    "load_policy with a rank": lambda: rlkit.load_policy(path="tiny", lora=8),
    "task that takes no split": of(task=lambda: [TASK]),
    "model that takes no device": of(model=lambda: None),
    "environment that is not called": lambda: find_environment(
        rlkit.environments.single_turn, TASK
    ),
    "lookup of no environment": lambda: find_environment(lambda task: None, TASK),
    "load_policy on a card that is not there": lambda: rlkit.load_policy(
        path="tiny", device="cuda"
    ),
    "greedy accuracy of no task": lambda: rlkit.greedy_accuracy(
        PLAYED[0], [], PLAYED[2], reward=rlkit.Reward("m", {})
    ),
    "phases in a list": of(schedule__phases=[1, 2]),
    "greedy accuracy without a reward": lambda: rlkit.greedy_accuracy(None, [TASK], None),
    "autocast of a text": lambda: rlkit.autocast("algorithm=grpo", "cpu"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MISUSES)
def test_a_wrong_call_is_answered_by_a_sentence(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rlkit.RLKitError) as raised:
        MISUSES[case]()
    assert 20 < len(str(raised.value)) < 1_500
    assert not str(raised.value).rstrip().endswith(" no")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("algorithm=ppo",),
        ("experiment=sft", "task.path=rows.jsonl"),
        ("schedule=grpo_to_dapo", "asynchrony=lag"),
        ("task=guess_number", "kl=none", "reference=none"),
        ("experiment=recipe/dapo",),
    ],
)
def test_what_the_options_give_is_a_right_argument(words):
    """The types that the signatures name are those of the parts that ship; nothing is copied."""
    x = rlkit.experiment(*words)
    assert lift_part(x, rlkit.Experiment, "rlkit.train: x") is x
