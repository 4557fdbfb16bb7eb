"""A run of two tasks: each part has its own reward, environment and metrics, in training and held
out, and they add up to the whole."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from rlkit.commands.evaluate import format_accuracy
from rlkit.commands.train import format_closing_lines
from rlkit.config.compose import compose, experiment
from rlkit.config.problems.rows import check_reward, load_tasks
from rlkit.episodes import assemble, summarize
from rlkit.episodes.evaluation import _with_parts, summarise_accuracy, summarise_curves
from rlkit.errors import ConfigError
from rlkit.functional import no_correction
from rlkit.rewards import Reward, Term, by_task, few_turns, numeric, score
from rlkit.training.callbacks.evaluation import flatten_result
from rlkit.training.run import train_in
from rlkit.training.update.sampled import filter_rollouts
from rlkit.training.update.weighted import weigh
from rlkit.types import Rollout, Scored, Step, Task

MIXTURE = [
    "task=mixture",
    "debug=fast",
    "trainer.accelerator=cpu",
    "logger=none",
    "generation.max_new_tokens=40",
    "environment.environments.guess_number.max_turns=2",
    "task.max_samples=64",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A step of four prompts, three of arithmetic to one game; eight held-out tasks."""
    folder = tmp_path_factory.mktemp("mixture")
    x = experiment(
        compose(
            [
                *MIXTURE,
                "task.weights.arithmetic=3",
                "batch.prompts=4",
                "evaluation.n=8",
                "trainer.steps=1",
            ]
        )
    )
    tasks = load_tasks(x)
    summary, _ = train_in(x, tasks, folder, started=0.0, resume=None)
    return (
        tasks,
        summary,
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()],
    )


@pytest.mark.slow
def test_each_step_and_the_held_out_rows_have_the_shares(run):
    tasks, _, rows = run
    assert tasks.validation == [] and [
        sum(t.part == part for t in tasks.test) for part in ("arithmetic", "guess_number")
    ] == [6, 2]
    assert rows[1]["part/arithmetic/share"] == 0.75 and rows[1]["part/guess_number/share"] == 0.25


@pytest.mark.slow
def test_each_part_plays_in_its_own_environment(run):
    """There are no tools in a game, and none of these has more than two turns."""
    _, _, rows = run
    assert (
        rows[1]["part/guess_number/tools/calls"] == 0
        and rows[1]["part/guess_number/tools/turns"] <= 2
    )
    assert rows[1]["part/arithmetic/tools/calls"] > 0


@pytest.mark.slow
def test_means_of_the_parts_add_up_to_the_whole(run):
    _, _, rows = run
    parts = ("arithmetic", "guess_number")
    for name in (
        "reward/mean",
        "len/mean",
        "len/truncated_frac",
        "group/frac_mixed",
        "tools/turns",
        "reward/task/ok_frac",
    ):
        whole = sum(
            rows[1][f"part/{part}/share"] * rows[1][f"part/{part}/{name}"] for part in parts
        )
        assert whole == pytest.approx(rows[1][name], abs=1e-9)  # rounding
    keys = {
        key
        for key in rows[1]
        if key.startswith(("reward/", "group/frac", "len/", "stop_reason/", "tools/"))
    }
    assert all(f"part/{part}/{key}" in rows[1] for part in parts for key in keys)


@pytest.mark.slow
def test_held_out_accuracy_is_that_of_the_parts_together(run, tmp_path):
    _, summary, rows = run
    for row, result in ((rows[0], summary["before"]), (rows[1], summary["after"])):
        own = result["parts"]
        assert {part: r["n"] for part, r in own.items()} == {"arithmetic": 6, "guess_number": 2}
        assert sum(r["n"] * r["accuracy"] for r in own.values()) == pytest.approx(
            8 * result["accuracy"]
        )
        assert row["test/part/arithmetic/accuracy"] == own["arithmetic"]["accuracy"]
    assert "accuracy, guess_number" in format_closing_lines(summary, tmp_path)


# ---------------------------------------------------------------------------------- without a model


def rollout(part: str, group: int, reward: str, answer: str, *said: str) -> Rollout:
    steps = tuple(Step((), (1,), (2, 3), (-1.0, -1.0), "stop", content=text) for text in said)
    return Rollout(Task(f"{part}/{group}", (), answer, reward, part=part), steps, group=group)


def mixed() -> list[Rollout]:
    """Two prompts of sums, with 1 of 2 right; one of games, won in one turn and in two."""
    return [
        rollout("sums", 0, "numeric", "7", "#### 7"),
        rollout("sums", 0, "numeric", "7", "#### 8"),
        rollout("games", 1, "few_turns", "5", "5"),
        rollout("games", 1, "few_turns", "5", "4", "5"),
        rollout("sums", 2, "numeric", "3", "#### 3"),
        rollout("sums", 2, "numeric", "3", "#### 4"),
    ]


def scored(rollouts):
    return score(
        rollouts,
        Reward(
            "by_task", {"task": Term(1.0, lambda rs: by_task(rs, rewards=REWARDS), batched=True)}
        ),
    )


REWARDS = {"numeric": numeric, "few_turns": few_turns}


def test_every_part_is_scored_by_the_reward_of_its_rows():
    together = scored(mixed())
    alone = [
        score([r], Reward("one", {"task": Term(1.0, REWARDS[r.task.reward])}))[0] for r in mixed()
    ]
    assert [r.reward for r in together] == [r.reward for r in alone] and len(
        {r.reward for r in together}
    ) == 3


@pytest.mark.parametrize("part", ["sums", "games"])
def test_an_advantage_within_groups_is_that_of_each_part_alone(part, experiment):
    """Rewards of other parts, on another scale, enter neither the mean nor the deviation of a
    group."""

    def advantages(rollouts):
        batch = filter_rollouts(assemble(rollouts, pad_token_id=0), experiment.algorithm)
        algorithm = experiment.algorithm._replace(correction=no_correction)
        batch = weigh(Scored(**vars(batch), logprobs_old=None), algorithm, experiment.kl)
        own = torch.tensor([rollouts[i].task.part == part for i in batch.rollout_ids.tolist()])
        return batch.advantages[own]

    whole = scored(mixed())
    alone = advantages([r for r in whole if r.task.part == part])
    assert torch.equal(advantages(whole), alone) and alone.any()


def test_results_of_parts_are_those_of_their_rollouts_alone():
    whole = scored(mixed())
    sums = [r for r in whole if r.task.part == "sums"]
    assert _with_parts(whole, summarise_accuracy)["parts"]["sums"] == summarise_accuracy(sums)
    metrics = summarize(whole)
    mine = {
        k.removeprefix("part/sums/"): v for k, v in metrics.items() if k.startswith("part/sums/")
    }
    expected = summarize([r._replace(task=r.task._replace(part="")) for r in sums]) | {
        "share": 4 / 6
    }
    assert mine.keys() == expected.keys()
    assert all(
        a == expected[k] or (math.isnan(a) and math.isnan(expected[k])) for k, a in mine.items()
    )
    assert not any(k.startswith("part/") for k in expected)
    result = {
        "split": "test",
        "n": 3,
        "distinct": 2,
        "greedy": _with_parts(whole, summarise_accuracy),
        "sampled": {},
        "wall_seconds": 0.0,
    }
    result["sampled"] = summarise_curves(whole, samples=2, k=[1]) | {
        "parts": {p: summarise_curves(sums, samples=2, k=[1]) for p in ("sums", "games")}
    }
    lines = format_accuracy(result, Path("out")).splitlines()
    assert any(line.startswith("sums: greedy accuracy") for line in lines) and any(
        line.startswith("games: pass@1") for line in lines
    )
    assert flatten_result(result["greedy"], "eval/")["eval/part/games/n"] == 2


def test_a_reward_that_can_score_no_row_of_a_part_is_refused():
    """Also where the part is so light that it is not among the first rows of all."""
    tasks = [Task(f"a/{i}", (), "7", part="a") for i in range(100)] + [
        Task("b/0", (), "blue", part="b")
    ]
    check_reward(tasks[:100], Reward("numeric", {"numeric": Term(1.0, numeric)}))
    with pytest.raises(ConfigError, match=r"none of the first 1 rows \(the first is b/0\)"):
        check_reward(tasks, Reward("numeric", {"numeric": Term(1.0, numeric)}))


@pytest.mark.slow
def test_parts_are_composed_on_the_command_line():
    more = [
        "+task@task.parts.more=arithmetic",
        "task.parts.more.seed=7",
        "task.weights.more=2",
        "task.weights.guess_number=0",
    ]
    x = experiment(compose(["task=mixture", *more]))
    parts = [t.part for t in x.task(split="train")[:6]]
    assert sorted(parts) == ["arithmetic", "arithmetic", "more", "more", "more", "more"]
