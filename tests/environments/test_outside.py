"""A stateful tool, a reward of its end state, and self-play, from a package outside and its config
alone (tests/extension)."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

from rlkit.config.compose import compose, experiment
from rlkit.config.problems.rows import load_tasks
from rlkit.engines import Batched
from rlkit.episodes import collect, load_rollouts, save_rollouts
from rlkit.models import decode
from rlkit.models.chat import encode_scaffold
from rlkit.rewards import score
from rlkit.types import Generation, Task

TASK = Task("t/0", ({"role": "user", "content": "Keep 7."},), answer="7")


@pytest.fixture
def chosen(monkeypatch):
    """The experiment of some options of the package."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "extension"))
    return lambda *words: experiment(compose(["hydra.searchpath=[pkg://my_package.conf]", *words]))


def saying(reply):
    """An engine that says what `reply(text of the context, its turn, seed)` gives."""

    def complete(policy, prompts, seeds, params):
        out = []
        for ids, seed in zip(prompts, seeds, strict=True):
            text = decode(policy.renderer, ids)
            ids = (
                *encode_scaffold(
                    policy.renderer, reply(text, text.count("<|im_start|>assistant") - 1, seed)
                ),
                policy.eos_token_ids[0],
            )
            out.append(Generation(ids, (-1.0,) * len(ids), "stop"))
        return out

    return Batched(complete)


def call(tool, **arguments):
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.slow
def test_a_shelf_is_an_episodes_own_and_its_end_state_is_rewarded(tiny, chosen, tmp_path):
    x = chosen("environment=shelf", "reward=shelved", "environment.tools.shelf.size=1")

    def reply(context, turn, seed):
        says = "7" if seed % 2 else "8"
        return [
            call("put", name="a", text=says),
            call("read", name="a") + call("put", name="b", text="7"),
            "done",
        ][turn]

    rollouts = score(
        collect(tiny, [TASK], engine=saying(reply), environment=x.environment, group_size=6),
        x.reward,
    )
    for r in rollouts:
        own, full = (given.content for given in r.steps[1].tool_results)
        assert full == "Error: the shelf is full." and r.state == {"shelf": {"books": {"a": own}}}
        assert r.reward == (own == "7")
    assert {r.reward for r in rollouts} == {0.0, 1.0}
    save_rollouts(tmp_path / "r.jsonl", rollouts)
    assert [r.state for r in load_rollouts(tmp_path / "r.jsonl")] == [r.state for r in rollouts]


@pytest.mark.slow
def test_the_tool_with_state_of_the_page_runs_as_it_is_shown(tiny, tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "own_parts.md").read_text()
    for name in ("my_tools.py", "environment/till.yaml", "reward/thrifty.yaml"):
        shown = re.search(
            rf"^    # (?:my_conf/)?{name}\n((?:    .*\n|\n)+?)(?=    #|    PYTHONPATH)", text, re.M
        )[1]
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(shown))
    monkeypatch.syspath_prepend(str(tmp_path))
    x = experiment(
        compose(
            [
                f"hydra.searchpath=[file://{tmp_path}]",
                "environment=till",
                "environment.tools.calculator.limit=1",
                "reward=thrifty",
                "task.max_samples=40",
            ]
        )
    )
    load_tasks(x)  # a reward of the end state is taken, though no gold answer leaves a tape

    def reply(context, turn, seed):
        calls = [call("calculator", expression="3 + 4")] * (1 + seed % 2)
        return "#### 7" if turn else "".join(calls)

    rollouts = collect(tiny, [TASK], engine=saying(reply), environment=x.environment, group_size=8)
    results = {tuple(r.content for r in own.steps[0].tool_results) for own in rollouts}
    assert results == {("7",), ("7", "Error: the tape is full.")}
    assert {own.reward for own in score(rollouts, x.reward)} == {1.0}
    for tape, worth in ((["3 + 4"], 1.0), ([], 0.5), (["1", "2"], 0.5)):
        [own] = score([rollouts[0]._replace(state={"calculator": {"tape": tape}})], x.reward)
        assert own.reward == worth


@pytest.mark.slow
def test_a_policy_plays_both_sides_and_each_reply_gets_its_own_players_reward(tiny, chosen):
    x = chosen("environment=nim")

    def reply(context, turn, seed):
        assert context.rpartition("You are ")[2].startswith(("Ann", "Bob")[turn % 2])
        return "2" if turn == 0 else str(1 + seed % 3)

    rollouts = collect(tiny, [TASK], engine=saying(reply), environment=x.environment, group_size=8)
    for r in rollouts:
        won = ("Ann", "Bob").index(r.metadata["winner"])
        assert [s.reward for s in r.steps] == [
            1.0 if i % 2 == won else -1.0 for i in range(len(r.steps))
        ]
        assert r.status == "terminated" and (r.state["stones"] == 0) == (
            won == (len(r.steps) - 1) % 2
        )
    assert {r.metadata["winner"] for r in rollouts} == {"Ann", "Bob"}
