"""The bench: optima are what enumeration says, the start is a uniform draw, placebos learn nothing,
and the page claims what holds."""

from __future__ import annotations

import csv
import itertools
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from answers import ANSWERS, misfits
from parametrise import cases, each
from rlkit.commands.cli import main
from rlkit.config.compose import compose, conf_dir
from rlkit.config.experiment import experiment as configured
from rlkit.config.schema import build
from rlkit.errors import ConfigError
from rlkit.extras.bench import matrix as bench
from rlkit.extras.bench import rates, tasks
from rlkit.extras.bench.fresh import Opinions, fresh_policy, random_reply
from rlkit.extras.bench.lists import listed, paid, priced
from rlkit.extras.bench.tasks import LETTERS, Chain, Lake, Value, average_value, draw_holes
from rlkit.models import LoRA
from rlkit.models.chat import encode_prompt
from rlkit.runs.python import train
from rlkit.types import Rollout, Step

TASKS = sorted(
    f.stem for f in (conf_dir() / "experiment" / "bench").glob("*.yaml") if f.stem != "base"
)


def reply(task, text, *, group=0, sample=0):
    return Rollout(task, (Step((), (), (), (), "stop", content=text),), group=group, sample=sample)


def rows(name, split="test", **options):
    config = compose(
        [f"experiment=bench/{name}", *(f"task.{key}={value}" for key, value in options.items())]
    ).config
    return config, build(config["task"], "task")(split=split)


GAMES = ("chain", "lake")


@pytest.mark.slow
@each("name", [name for name in TASKS if name not in (*GAMES, "lengthy")])
def test_the_value_of_a_task_is_what_enumeration_says(name):
    """Random: the mean over all replies of the form that the preset's policy has, to all problems,
    each equally often. Best: 1."""
    config, tasks = rows(name)
    distinct = list({task.messages[0]["content"]: task for task in tasks}.values())
    forms = ["".join(own) for own in itertools.product(*config["model"]["replies"])]
    scores = np.array([[listed(reply(task, text)) for text in forms] for task in distinct])
    assert (
        average_value(distinct) == pytest.approx((scores.mean(), scores.max(1).mean()))
        and average_value(distinct).best == 1.0
    )
    counts = [
        sum(own.messages == task.messages for own in tasks[: config["evaluation"]["n"]])
        for task in distinct
    ]
    assert max(counts) - min(counts) <= 1


@pytest.mark.slow
def test_needles_are_hidden_as_deep_as_they_say():
    _, tasks = rows("needle")
    assert sorted({len(task.metadata["right"]) / 256 for task in tasks}) == [1 / 64, 1 / 32, 1 / 16]


def played(game, number, act):
    total, over = 0.0, False
    game.reset(seed=number)
    while not over:
        _, reward, over, _, _ = game.step(act(game))
        total += reward
    return total


@pytest.mark.slow
def test_the_chains_value_is_that_of_its_policies():
    _, tasks = rows("chain")
    game, rng = Chain(), random.Random(0)
    drawn = [played(game, i % 8, lambda g: rng.choice(LETTERS[: g.choices])) for i in range(4000)]
    assert average_value(tasks).random == pytest.approx(np.mean(drawn), abs=0.02)
    assert {played(game, i, lambda g: g.right) for i in range(8)} == {average_value(tasks).best}


@pytest.mark.slow
@each("name", [name for name in TASKS if name not in GAMES])
def test_a_placebo_rewards_every_reply_alike_in_training_alone(name):
    for kind in ("coin", "format"):
        training, test = (
            rows(name, split, placebo=kind, max_samples=400)[1] for split in ("train", "test")
        )
        best = next(iter(test[0].metadata["right"]))
        totals = [[listed(reply(task, text)) for task in training] for text in (best, "no")]
        assert [np.mean(own) for own in totals] == pytest.approx(
            [1.0, 1.0] if kind == "format" else [0.5, 0.5], abs=0.1
        )
        assert {listed(reply(task, best)) for task in test} == {0.0, 1.0}


@pytest.mark.slow
def test_the_value_of_lengthy_is_that_of_random_replies():
    """Random: the mean over replies as the start draws them. Best: the right letter alone. All
    eight letters earn less, not nothing."""
    config, tasks = rows("lengthy")
    rng, form, opinions = random.Random(0), config["model"]["replies"], Opinions(0, 0.0)
    drawn = [
        priced(reply(task, random_reply(rng, form, ["a"], opinions)))
        for task in tasks
        for _ in range(5)
    ]
    assert average_value(tasks).random == pytest.approx(
        np.mean(drawn), abs=0.01
    )  # 20,480 draws: standard error 0.0035
    assert {max(priced(reply(task, letter)) for letter in "abcdefgh") for task in tasks} == {
        average_value(tasks).best
    }
    assert (
        priced(reply(tasks[0], "abcdefgh")) == pytest.approx(1 - 7 * 0.05)
        and priced(reply(tasks[0], "?")) == 0.0
    )
    assert {
        priced(reply(task, "xyz")) for task in rows("lengthy", "train", placebo="format")[1]
    } == {1.0}


def walked(game, number, moves):
    """What an episode earns whose replies are these, until it ends."""
    game.reset(seed=number)
    total = 0.0
    for move in moves:
        _, reward, over, _, _ = game.step(move)
        total += reward
        if over:
            break
    return total


@pytest.mark.slow
@pytest.mark.parametrize("walks", cases([4_000, 20_000], fast=1))
def test_the_values_of_the_lake_are_those_of_its_walks(walks):
    """Random: walks of the eight maps. Best: some walk without a fall reaches the goal, found here
    by trying all of six moves."""
    _, tasks = rows("lake")
    by_map = {task.metadata["seed"]: task.metadata["value"] for task in tasks}
    game, rng = Lake(), random.Random(0)
    drawn = [walked(game, i % 8, rng.choices("udlr", k=10)) for i in range(walks)]
    assert average_value(tasks).random == pytest.approx(
        np.mean(drawn), abs=4 * np.std(drawn) / walks**0.5
    )  # four standard errors
    for number, (_, best) in by_map.items():
        assert (
            max(
                walked(game, number, moves)
                for moves in itertools.product("dr", repeat=6)
                if moves.count("d") == 3
            )
            <= best
            == 1.0
        )
    assert len({draw_holes(number, 3) for number in by_map}) == len(by_map) == 8


def test_a_walk_over_the_lake_ends_in_a_hole_at_the_goal_and_after_its_turns():
    game = Lake(length=3)
    game.reset(seed=0)
    game.thin = frozenset({5})
    assert walked_from(game, 1, "d") == (0.0, True) and walked_from(game, 14, "r") == (1.0, True)
    assert walked_from(game, 0, "l") == (0.0, False) and game.cell == 0
    assert [game.step(move)[2] for move in "??"] == [False, True] and game.cell == 0


def walked_from(game, cell, move):
    """What a first turn from a cell earns, and whether it ends the episode."""
    game.cell, game.turn = cell, 0
    return game.step(move)[1:3]


@pytest.mark.slow
def test_the_placebos_of_the_lake_pay_at_the_end_alone():
    tasks = {
        kind: rows("lake", "train", placebo=kind, max_samples=800)[1] for kind in ("coin", "format")
    }
    earned = {
        kind: [walked(Lake(), task.metadata["seed"], "?" * 10) for task in own]
        for kind, own in tasks.items()
    }
    assert set(earned["format"]) == {1.0} and np.mean(earned["coin"]) == pytest.approx(
        0.5, abs=0.07
    )  # four standard errors


def test_the_start_takes_adapters_that_change_nothing_at_first():
    plain, adapted = (fresh_policy(replies=["abcd"], steps=3, lora=LoRA(rank)) for rank in (0, 2))
    ids = torch.arange(2, 8)[None]  # all characters of the form, after two of the template's
    with torch.no_grad():
        assert torch.equal(plain.model(input_ids=ids).logits, adapted.model(input_ids=ids).logits)
    trained = {name for name, weight in adapted.model.named_parameters() if weight.requires_grad}
    assert trained and all("lora_" in name for name in trained)


@pytest.mark.slow
def test_the_placebos_of_a_game_do_too():
    """At the turn that counts: a coin, or 1, whatever the reply. The other turns pay coins in
    training."""
    acts = {"right": lambda g: g.right, "wrong": lambda g: "?"}
    for kind, means in (("none", [1.0, 0.0]), ("coin", [0.5, 0.5]), ("format", [1.0, 1.0])):
        tasks = rows("chain", "train", placebo=kind, max_samples=3000)[1]
        got = [
            np.mean([played(Chain(), task.metadata["seed"], act) for task in tasks])
            for act in acts.values()
        ]
        assert got == pytest.approx(means, abs=0.17)  # five coins of ±1: standard error 0.04


@pytest.mark.slow
def test_the_verifier_errs_as_often_as_it_says_and_for_all_arms_alike():
    _, tasks = rows("noisy", "train")
    worst = [task for task in tasks if task.metadata["flip"] == pytest.approx(0.45)]
    best = {task.id: next(iter(task.metadata["right"])) for task in worst}
    right = [listed(reply(task, best[task.id], sample=i)) for i in range(8) for task in worst]
    wrong = [listed(reply(task, "?", sample=i)) for i in range(8) for task in worst]
    assert np.mean(right) == pytest.approx(0.55, abs=0.02) and [1 - r for r in right] == wrong
    assert all(task.metadata.get("flip", 0.0) == 0 for task in rows("noisy")[1])


@pytest.mark.slow
def test_a_right_reply_pays_by_problem_in_training_alone():
    earned = {
        split: {paid(reply(task, task.metadata["right"][0])) for task in rows("scales", split)[1]}
        for split in ("train", "test")
    }
    assert earned == {"train": {1.0, 10.0, 100.0, 1000.0}, "test": {1.0}}
    coins = rows("scales", "train", placebo="coin", max_samples=400)[1]
    assert {paid(reply(task, "no")) for task in coins} == {0.0, 1.0}


def test_the_turns_that_do_not_count_pay_their_coin():
    game = Chain(length=4, coin=0.5)
    game.reset(seed=1000)
    earned = [game.step("?")[1] for _ in range(4)]
    assert earned.pop(game.counts) == 0.0 and {abs(own) for own in earned} == {0.5}


@pytest.mark.slow
def test_the_start_draws_replies_of_the_form_uniformly():
    """Mass of all well-formed replies above 0.97, none more than twice or less than half as likely
    as another; fixed by the seed."""
    policy = fresh_policy(replies=["abcd", "xy"], symbols=LETTERS)
    forms = ["".join(own) for own in itertools.product("abcd", "xy")]
    prompt = encode_prompt(policy.renderer, [{"role": "user", "content": "k"}])
    tokens = [
        policy.renderer.tokenizer.encode(text + "<end>", add_special_tokens=False) for text in forms
    ]
    with torch.no_grad():
        logits = policy.model(
            input_ids=torch.tensor([prompt + own for own in tokens])
        ).logits.log_softmax(-1)
    mass = [
        logits[i, len(prompt) - 1 + torch.arange(3), torch.tensor(own)].sum().exp().item()
        for i, own in enumerate(tokens)
    ]
    assert sum(mass) > 0.97 and max(mass) < 2 * min(mass)
    assert policy.renderer.tokenizer.decode(tokens[0][:2]) == "ax"


def test_opinions_have_the_strength_that_they_say():
    """Log-odds of standard deviation `strength`, for one prompt as for two; none without strength;
    fixed by seed, prompt and place."""
    own = Opinions(0, 1.5)
    for prompts in (["a"], ["a", "b"]):
        drawn = np.log([own.weights(prompts, place, "abcdefgh") for place in range(500)])
        assert drawn.std() == pytest.approx(1.5, abs=0.08) and drawn.mean() == pytest.approx(
            0.0, abs=0.08
        )
    assert Opinions(0, 0.0).weights(["a", "b"], 0, "abc") == [1.0, 1.0, 1.0]
    one, again, *others = (
        Opinions(*which).weights(*asked)
        for which, asked in [
            ((0, 1.0), (["a"], 0, "abc")),
            ((0, 1.0), (["a"], 0, "abc")),
            ((1, 1.0), (["a"], 0, "abc")),
            ((0, 1.0), (["b"], 0, "abc")),
            ((0, 1.0), (["a"], 1, "abc")),
        ]
    )
    assert one == again and one not in others


def test_a_start_is_the_same_the_second_time_and_as_often_as_it_is_trained():
    """Its weights are kept for the next arm of a seed: training one copy must not change them."""
    made = {"replies": ["abcd"], "steps": 3, "seed": 5}
    first = fresh_policy(**made).model
    kept = {name: weight.clone() for name, weight in first.state_dict().items()}
    with torch.no_grad():
        for weight in first.parameters():
            weight.add_(1.0)
    assert all(
        torch.equal(weight, kept[name])
        for name, weight in fresh_policy(**made).model.state_dict().items()
    )


@pytest.mark.slow
def test_a_start_with_opinions_reads_its_prompt():
    """What it replies is within 0.2 of the opinion on the prompt, in total variation, and nearer to
    it than to that on any other prompt."""
    policy = fresh_policy(
        replies=["abcdefgh"], symbols="ijkl", prompt=1, opinions=1.0, init_std=0.18
    )
    letters = policy.renderer.tokenizer.encode("abcdefgh", add_special_tokens=False)
    meant = np.array([Opinions(0, 1.0).weights([prompt], 0, "abcdefgh") for prompt in "ijkl"])
    for i, prompt in enumerate("ijkl"):
        ids = encode_prompt(policy.renderer, [{"role": "user", "content": prompt}])
        with torch.no_grad():
            got = (
                policy.model(input_ids=torch.tensor([ids]))
                .logits[0, -1]
                .softmax(-1)[letters]
                .numpy()
            )
        away = abs(got - meant / meant.sum(1, keepdims=True)).sum(1) / 2
        assert away.argmin() == i and away[i] < 0.2


# ----------------------------------------------------------------------------------------- the page


def table(arms, tasks=("noisy", "needle"), seeds=10, spread=0.02):
    """Rows of arms with these mean regrets, the same on all tasks."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(seeds, len(tasks)))
    return [
        {
            "task": task,
            "arm": arm,
            "seed": s,
            "regret": mean + 0.1 * noise[s, t] + spread * rng.normal(),
            "updates": 1,
            "samples": 2,
            "tokens": 3,
            "processor_s": "",
        }
        for s in range(seeds)
        for t, task in enumerate(tasks)
        for arm, mean in arms.items()
    ]


def test_the_page_claims_what_differs_and_names_what_does_not():
    """A shared seed effect of 0.1 hides nothing: arms are paired."""
    found = bench.arrange_scores(table({"a": 0.5, "b": 0.4, "c": 0.5}))
    told = {(p.task, p.first, p.second) for p in bench.compare_arms(found) if p.q <= 0.05}
    assert told == {(task, *pair) for task in found.tasks for pair in (("a", "b"), ("b", "c"))}
    text = bench.format_page(table({"a": 0.5, "b": 0.4, "c": 0.5}), {})
    assert (
        "noisy: b is better than a by 0." in text
        and "4 of 6 comparisons" in text
        and "noisy: a and c" in text
    )


def test_a_seed_that_lacks_a_run_is_left_out_for_all():
    whole = table({"a": 0.5, "b": 0.4})
    rows = [row for row in whole if (row["seed"], row["arm"], row["task"]) != (3, "b", "needle")]
    found = bench.arrange_scores(rows)
    assert "Left out for every arm: seeds 3." in bench.format_page(rows, {})
    assert "Left out" not in bench.format_page(whole, {})
    assert found.seeds == [0, 1, 2, 4, 5, 6, 7, 8, 9] and found.of["a"].shape == (9, 2)
    assert "nothing is compared" in bench.format_page(whole[:4], {})


def test_comparisons_with_placebos_do_not_help_others_to_pass():
    """Beside many that differ, a p-value of 0.04 would pass; the page says which arms are above
    both placebos."""
    coin, form = bench.PLACEBOS
    rows = table({"a": 0.5, "b": 0.488, "c": 0.5, "d": 0.9, coin: 0.9, form: 1.0})
    alone = bench.compare_arms(
        bench.arrange_scores([row for row in rows if row["arm"] not in bench.PLACEBOS])
    )
    beside = {
        (p.task, p.first, p.second): p.q for p in bench.compare_arms(bench.arrange_scores(rows))
    }
    assert [p.q for p in alone] == [beside[p.task, p.first, p.second] for p in alone]
    text = bench.format_page(rows, {})
    assert (
        "of 12 comparisons" in text
        and "- noisy: all but d\n- needle: all but d" in text
        and f"better than {coin}" not in text
    )


def test_an_arm_that_a_task_refuses_is_left_out_there_and_no_seed_for_it():
    """max_rl refuses the rewards below 0 of lengthy: its missing runs left not one seed for the
    whole matrix."""
    whole = table({"a": 0.5, "b": 0.4, "c": 0.3})
    found = bench.arrange_scores(
        [row for row in whole if (row["arm"], row["task"]) != ("b", "needle")]
    )
    assert found.seeds == list(range(10)) and list(found.select_complete()) == ["a", "c"]
    assert [(p.task, p.first, p.second) for p in bench.compare_arms(found)] == [
        ("noisy", "a", "b"),
        ("noisy", "a", "c"),
        ("noisy", "b", "c"),
        ("needle", "a", "c"),
    ]
    refused = {Path(f"folder/needle/b/{seed}"): "rewards below 0" for seed in range(3)}
    text = bench.format_page(
        [row for row in whole if (row["arm"], row["task"]) != ("b", "needle")], refused
    )
    assert "- folder/needle/b, seeds 0, 1, 2: rewards below 0\n" in text
    assert next(line for line in text.splitlines() if line.startswith("| b |")).endswith(
        "#2 | did not run |"
    )
    assert (
        "did not run on every task: b." in text
        and sum(line.startswith("| b |") for line in text.splitlines()) == 1
    )


def test_unequal_budgets_are_named_with_their_factor():
    rows = [
        row | {"samples": 5 if (row["arm"], row["task"]) == ("b", "needle") else 2}
        for row in table({"a": 0.5, "b": 0.4})
    ]
    assert (
        "Not equal: samples, by a factor of up to 2.5 (needle: b beside a).\n"
        in bench.format_page(rows, {})
    )
    assert "Not equal" not in bench.format_page(table({"a": 0.5, "b": 0.4}), {})
    coin = next(iter(bench.PLACEBOS))  # it may have nothing to update from
    assert "Not equal" not in bench.format_page(
        [row | {"updates": row["arm"] != coin} for row in table({"a": 0.5, "b": 0.4, coin: 1.0})],
        {},
    )


def test_false_claims_are_rare_over_many_pages():
    """Four equal arms: any claim among the 12 comparisons in at most 5 % of the pages."""
    rng, claims = np.random.default_rng(1), 0
    for _ in range(200):
        found = bench.Scores(
            ["s", "t"], list(range(10)), {arm: rng.normal(size=(10, 2)) for arm in "abcd"}
        )
        claims += any(p.q <= 0.05 for p in bench.compare_arms(found))
    assert claims / 200 <= 0.09


def test_differences_of_a_coarse_score_that_are_equal_are_not_certain():
    """Two arms of accuracy 0.995 that differ by the same step on all seeds had a variance of 0, and
    a q of 0."""
    found = bench.Scores(
        ["t"], list(range(10)), {"a": np.full((10, 1), 0.99), "b": np.full((10, 1), 0.995)}
    )
    (pair,) = bench.compare_arms(found)
    assert found.step(0) == pytest.approx(0.005) and pair.high - pair.low == pytest.approx(
        2 * 2.262157 * 0.005 / 120**0.5
    )


def test_fewer_than_ten_seeds_claim_nothing():
    """At the default of three seeds, 49 % of the pages of equal arms near an accuracy of 0.995 made
    a claim."""
    text = bench.format_page(table({"a": 0.9, "b": 0.1}, seeds=9), {})
    assert (
        "Nothing: 9 seeds, and fewer than 10 claim nothing (`seeds=10`). comparisons.csv has each"
        " difference" in text
    )
    assert "is better than" not in text and "Below 10 seeds it has no interval." in text


def test_a_page_whose_arms_share_one_rate_says_so_in_its_title():
    rows = [
        row | {"overrides": f"algorithm={row['arm']} seed=0"} for row in table({"a": 0.5, "b": 0.4})
    ]
    assert bench.format_page(rows, {}).startswith("# rlkit bench, every arm at one shared rate\n")
    own = [
        row | {"overrides": row["overrides"] + f" optimizer.lr=1e-{2 + (row['arm'] == 'a')}"}
        for row in rows
    ]
    assert bench.format_page(own, {}).startswith("# rlkit bench\n")
    adapted = [
        row | {"overrides": row["overrides"] + " model.lora.rank=8" * (row["arm"] == "a")}
        for row in rows
    ]
    assert bench.format_page(adapted, {}).startswith("# rlkit bench\n")


def test_a_page_of_one_arm_claims_nothing():
    assert "\nNothing: no task has two arms.\n" in bench.format_page(table({"a": 0.5}), {})


@each("word", ["1", "True", "yes"])
def test_placebo_is_true_or_false(word, capsys):
    assert main(["bench", "algorithms=grpo", f"placebo={word}"]) == 2
    assert f"placebo={word}: must be true or false" in capsys.readouterr().err


@pytest.mark.slow
def test_every_problem_of_the_largest_tasks_is_there():
    for make in (tasks.needle, tasks.scales, tasks.noisy, tasks.stale, tasks.proxy, tasks.lengthy):
        assert len({own.messages[0]["content"] for own in make(problems=32)}) == 32
    for number in range(32):
        assert Chain(length=32).reset(seed=number)[0] == LETTERS[number]
        for holes in range(10):
            assert tasks.compute_crossing(draw_holes(number, holes), 6).best == 1.0


def test_regret_is_1_at_random_and_0_at_best():
    assert [Value(0.25, 0.75).regret(r) for r in (0.25, 0.5, 0.75)] == [1.0, 0.5, 0.0]


@pytest.mark.slow
@each(
    "words, expected",
    [
        ([], "algorithms=grpo"),
        (["algorithms=grpo", "tasks=needles"], "there is no such task"),
        (["algorithms=grpp"], "grpp"),
        (["algorithms=grpo", "seeds=x"], "whole number"),
        (["arms=nowhere.yaml"], "nowhere.yaml"),
        (["algorithms=grpo", "seed=7"], "set seeds=N"),
        (["algorithms=grpo", "experiment=laptop"], "set tasks=A,B"),
        (["algorithms=grpo", "algorithm=rloo"], "the arm 'grpo' sets it itself"),
        (["algorithms=grpo", "tasks=lake", "task.length=5"], "task.length"),
        (["algorithms=grpo", "tasks=lake", "task.holes=10"], "task.holes"),
        (["algorithms=grpo", "tasks=scales", "task.problems=33"], "task.problems"),
        (["algorithms=grpo", "rates=1e-3,2e-3"], "5 or more different learning rates"),
        (["algorithms=grpo", "rates=1e-3,2e-3,4e-3,8e-3,x"], "5 or more different learning rates"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_does(words, expected, capsys):
    assert main(["bench", *words, "placebo=false"]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.slow
@each("words", [["algorithm=dapo"], ["algorithm=grpo", "algorithm/advantage=gdpo"]])
def test_what_an_environment_pays_at_its_steps_reaches_the_parts_that_read_the_terms_of_the_reward(
    words, tmp_path
):
    """dapo's filter found all groups equal, since the term was 0 for every episode, and a run of it
    trained on nothing."""
    common = [
        "experiment=bench/chain",
        "trainer.steps=1",
        "batch.prompts=2",
        "evaluation.n=0",
        "model.steps=5",
    ]
    run = tmp_path / str(len(words))
    train(configured(*words, *common), run)
    (row,) = (
        r
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if "reward/mean" in (r := json.loads(line))
    )
    assert row["optim/updates"] == 2 and row["reward/task/mean"] == row["reward/mean"] != 0


@pytest.mark.slow
def test_a_matrix_runs_and_goes_on_where_it_was(tmp_path, capsys):
    """Two steps of two algorithms on one seed, then on two: what is done is not run again, and the
    page has a row for every arm."""
    words = [
        "bench",
        "algorithms=grpo,rloo",
        "tasks=noisy",
        "placebo=false",
        f"folder={tmp_path}",
        "jobs=1",
    ]
    words += ["trainer.steps=2", "evaluation.n=16", "model.steps=5"]
    assert (
        main([*words, "seeds=1"]) == 0
        and "2 runs, 0 of them done earlier" in capsys.readouterr().out
    )
    before = (tmp_path / "noisy" / "grpo" / "0" / "metrics.jsonl").read_bytes()
    assert (
        main([*words, "seeds=2"]) == 0
        and "4 runs, 2 of them done earlier" in capsys.readouterr().out
    )
    assert (tmp_path / "noisy" / "grpo" / "0" / "metrics.jsonl").read_bytes() == before
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert [(row["arm"], row["seed"]) for row in rows] == [
        ("grpo", "0"),
        ("rloo", "0"),
        ("grpo", "1"),
        ("rloo", "1"),
    ]
    (pair,) = csv.DictReader((tmp_path / "comparisons.csv").read_text().splitlines())
    capsys.readouterr()
    assert main([*words, "seeds=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(misfits(found, ANSWERS["bench"])) == [] and found["finished"] == found["runs"] == 4
    assert [{key: str(value) for key, value in row.items()} for row in found["rows"]] == rows
    assert [own["mean"] for own in found["comparisons"]] == [float(pair["mean"])]
    between = [float(rows[i]["regret"]) - float(rows[i + 1]["regret"]) for i in (0, 2)]
    assert (pair["task"], pair["first"], pair["second"]) == ("noisy", "grpo", "rloo")
    assert float(pair["mean"]) == pytest.approx(sum(between) / 2, abs=2e-5)  # of rounded figures
    lines = (tmp_path / "README.md").read_text().splitlines()
    mean = {
        arm: sum(1 - float(row["regret"]) for row in rows if row["arm"] == arm) / 2
        for arm in ("grpo", "rloo")
    }
    for arm, value in mean.items():
        by_task, over_tasks = (line for line in lines if line.startswith(f"| {arm} |"))
        spent = next(line for line in lines if line.startswith(f"| noisy | {arm} |"))
        assert (
            by_task.startswith(f"| {arm} | {value:.3f} #") and f"| {value:.3f} |" in over_tasks
        )  # no interval of two seeds
        assert spent.startswith(f"| noisy | {arm} | 4 | 256 |")  # two updates a step for all


def trial(rate, regret, seed, task="needle", arm="grpo"):
    return rate, {"task": task, "arm": arm, "seed": seed, "regret": regret}


def test_each_arm_takes_the_rate_of_its_highest_mean_score():
    """Of equal scores the lower rate; a rate that lacks a seed is none to choose."""
    names = ["1e-3", "3e-3", "1e-2", "3e-2", "1e-1"]
    regrets = {"1e-3": 0.9, "3e-3": 0.4, "1e-2": 0.2, "3e-2": 0.2, "1e-1": 0.1}
    seeds = list(rates.SEEDS)
    rows = [
        trial(rate, regret + (0.05 if seed % 2 else -0.05), seed)
        for rate, regret in regrets.items()
        for seed in seeds
        if (rate, seed) != ("1e-1", seeds[-1])
    ]
    rows += [trial("1e-3", 0.0, seed, arm="rloo") for seed in seeds]
    rows += [trial("1e-3", 0.0, seeds[0], arm="lost")]
    chosen = rates.choose_rates(rows, names)
    grpo = chosen["needle", "grpo"]
    assert (grpo.rate, grpo.edge) == ("1e-2", False)
    assert grpo.score == pytest.approx(0.8)
    assert grpo.near == pytest.approx((0.8 + 0.8) / 2)  # 3e-3 is further away than a factor of 3
    assert not grpo.partial
    # 3e-3 is within a factor of 3, and rloo has no finished run there
    assert chosen["needle", "rloo"] == rates.Choice("1e-3", 1.0, 1.0, edge=True, partial=True)
    assert ("needle", "lost") not in chosen
    page = rates.tabulate_rates(chosen, ["needle"], ["grpo", "rloo", "lost", *bench.PLACEBOS])
    assert page.endswith(
        "| grpo | 1e-2, 0.800, 0.800 |\n| rloo | 1e-3*, 1.000, 1.000† |\n| lost | none |"
    )


def test_rates_with_a_failed_run_are_named_and_equal_means_are_equal():
    """The page marks the lowest and highest rate that ended everywhere. In floating point these two
    sums differ by their order."""
    names = ["1e-3", "2e-3", "4e-3", "8e-3", "2e-2"]
    low, high = (0.6, 0.4, 0.1, 0.3, 0.2, 0.5), (0.5, 0.6, 0.3, 0.4, 0.1, 0.2)
    assert sum(1 - x for x in low) != sum(1 - x for x in high)
    rows = [
        trial(rate, regret, seed)
        for rate, own in (("2e-3", low), ("4e-3", high))
        for seed, regret in zip(rates.SEEDS, own, strict=True)
    ]
    assert rates.choose_rates(rows, names)["needle", "grpo"] == rates.Choice(
        "2e-3", 0.65, 0.65, edge=True, partial=True
    )


@pytest.mark.parametrize(
    "words, said",
    [
        (["seeds=101"], "seeds from 100 on choose the rates"),
        (["optimizer.lr=1e-3"], r"the command sets optimizer\.lr itself"),
    ],
)
def test_scores_and_choices_share_no_seed_and_no_rate(tmp_path, capsys, words, said):
    given = ["bench", "algorithms=grpo", "tasks=noisy", f"folder={tmp_path}"]
    assert main([*given, "rates=1e-3,2e-3,4e-3,8e-3,2e-2", *words]) == 2
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.slow
def test_an_interrupted_choice_of_rates_publishes_no_scores(tmp_path, monkeypatch, capsys):
    """The folder holds finished runs of an earlier choice, at another rate."""
    monkeypatch.setattr(bench, "run_all", lambda cells, **_: ([], [2]))
    monkeypatch.setattr(
        bench,
        "read_row",
        lambda run: {"task": run.task, "arm": run.arm, "seed": run.seed, "regret": 0.5},
    )
    words = ["bench", "algorithms=grpo", "tasks=noisy", "placebo=false", f"folder={tmp_path}"]
    assert main([*words, "rates=1e-3,2e-3,4e-3,8e-3,2e-2"]) == 130
    assert "to go on" in capsys.readouterr().out
    assert not (tmp_path / "README.md").exists() and not (tmp_path / "results.csv").exists()


def test_arms_run_at_their_own_rates_and_placebos_at_that_of_the_task(tmp_path):
    arms = {"grpo": ("algorithm=grpo",), "lost": ("algorithm=rloo",)} | bench.PLACEBOS
    cells = bench.matrix(tmp_path, ["needle"], arms, [0, 1], ["trainer.steps=2"])
    chosen = {("needle", "grpo"): rates.Choice("1e-2", 1.0, 1.0, edge=False)}
    found = rates.with_rates(cells, chosen)
    assert [(cell.arm, cell.seed) for cell in found] == [
        (arm, seed) for seed in (0, 1) for arm in arms if arm != "lost"
    ]
    for cell in found:
        assert ("optimizer.lr=1e-2" in cell.overrides) == (cell.arm == "grpo")
    tried = rates.list_trials(tmp_path, ["needle"], arms, ["1e-3", "1e-2"], ["trainer.steps=2"])
    assert {cell.seed for cell in tried} == set(rates.SEEDS)
    assert not {cell.arm for cell in tried} & bench.PLACEBOS.keys()
    for cell, rate in tried.items():
        assert cell.overrides[-2:] == (f"optimizer.lr={rate}", f"seed={cell.seed}")
        assert rate in cell.folder.parts and cell.folder not in {own.folder for own in found}


def test_an_arm_with_a_rate_of_its_own_has_none_to_choose():
    with pytest.raises(ConfigError, match=r"fast sets optimizer\.lr itself"):
        rates.read_rates("1e-3,2e-3,4e-3,8e-3,2e-2", {"fast": ("optimizer.lr=1",)})
    with pytest.raises(ConfigError, match="5 or more different learning rates"):
        rates.read_rates("1e-3,0.001,4e-3,8e-3,2e-2", {"grpo": ()})
    given = "8e-3,1e-3,2e-3,4e-3,2e-2"
    assert rates.read_rates(given, {"grpo": ()}) == ["1e-3", "2e-3", "4e-3", "8e-3", "2e-2"]


@pytest.mark.slow
def test_a_matrix_chooses_rates_first_and_goes_on_where_it_was(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rates, "SEEDS", range(100, 101))
    monkeypatch.setattr(rates, "FEWEST", 2)
    words = ["bench", "algorithms=grpo", "tasks=noisy", "placebo=false", f"folder={tmp_path}"]
    words += ["jobs=1", "seeds=1", "trainer.steps=2", "evaluation.n=16", "model.steps=5"]
    words += ["rates=8e-3,1e-30"]
    assert main(words) == 0
    assert "3 of 3 jobs finished" in capsys.readouterr().out
    tried = list(csv.DictReader((tmp_path / "rates.csv").read_text().splitlines()))
    assert len(tried) == 2
    means = {
        rate: sum(1 - float(row["regret"]) for row in tried if row["rate"] == rate)
        for rate in ("1e-30", "8e-3")
    }
    best = max(means, key=means.get)
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert [row["seed"] for row in rows] == ["0"]
    assert all(f"optimizer.lr={best}" in row["overrides"].split() for row in rows)
    page = (tmp_path / "README.md").read_text()
    assert f"| grpo | {best}" in page and "one shared rate" not in page
    assert main(words) == 0
    assert "2 runs, 2 of them done earlier" in capsys.readouterr().out


OUTSIDE = """
from rlkit.types import Task


def vowels(*, split, seed=0, max_samples=64, placebo="none"):
    row, asked = {"right": ["a", "e"], "value": [0.25, 1.0]}, ({"role": "user", "content": "v"},)
    names = [f"vowels/{split}/{i}" for i in range(max_samples)]
    return [Task(name, asked, "", "listed", "single_turn", row) for name in names]
"""
MINE = {
    "algorithm/mine.yaml": "defaults: [grpo, _self_]\nname: mine\nminibatches: 1\n",
    "experiment/bench/vowels.yaml": (
        "# @package _global_\ndefaults:\n  - /experiment/bench: base\n  - override /task: bench\n\n"
        "task: {_target_: my_vowels.vowels}\nmodel: {replies: [abcdefgh], steps: 5}\n"
    ),
}


@pytest.mark.slow
def test_an_algorithm_and_a_task_from_outside_enter_the_table_by_their_config_path(
    tmp_path, monkeypatch, capsys
):
    """Scored between the random policy and the best that its task's own rows name, on the bench's
    budget, beside an arm of rlkit's."""
    for name, text in MINE.items():
        (tmp_path / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / name).write_text(text)
    (tmp_path / "my_vowels.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the processes that the runs are in
    out, small = tmp_path / "out", ["trainer.steps=2", "evaluation.n=32"]
    words = [
        "algorithms=mine,grpo",
        "tasks=vowels",
        "placebo=false",
        "seeds=1",
        "jobs=1",
        f"folder={out}",
    ]
    assert main(["bench", *words, *small, "--config-dir", str(tmp_path / "conf")]) == 0, (
        capsys.readouterr().err
    )
    rows = {
        row["arm"]: row for row in csv.DictReader((out / "results.csv").read_text().splitlines())
    }
    assert list(rows) == ["mine", "grpo"] and [float(row["updates"]) for row in rows.values()] == [
        4,
        4,
    ]
    for row in rows.values():
        assert float(row["regret"]) == pytest.approx((1 - float(row["reward"])) / 0.75, abs=1e-4)
