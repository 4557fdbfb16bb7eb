"""`rlkit why`: each planted cause is found in what a run says of itself, a healthy run has none,
and forks are the run itself but for their remedy."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import shutil
from itertools import chain
from pathlib import Path

import pytest
import torch
import yaml

import rlkit
from parametrise import each
from rlkit import Reward, Term
from rlkit.commands.arguments import Arguments
from rlkit.commands.cli import main
from rlkit.config.changes import identify
from rlkit.extras.why import attacks, data, findings, settings
from rlkit.extras.why.attacks import attack, explain_unsafe, make_episode
from rlkit.extras.why.commands.why import compose_run
from rlkit.extras.why.effects import list_effects, say_effect, sum_up
from rlkit.extras.why.evidence import Evidence, Finding, read_evidence, share_of_copies
from rlkit.extras.why.findings import (
    list_findings,
    say_change,
    say_findings,
    say_healthy,
    say_progress,
)
from rlkit.extras.why.forks import Fork, Place, choose_place, read_forks, run_fork, write_fork
from rlkit.extras.why.remedies import (
    PATIENCE,
    apply_remedy,
    choose_budget,
    forecast_minutes,
    list_remedies,
)
from rlkit.extras.why.tokens import read_step
from rlkit.rewards import batched, numeric
from rlkit.runs.reading import ReadRun, read_run
from rlkit.training.callbacks.checkpoints import list_checkpoints, read_checkpoint
from rlkit.types import Splits, Task, ToolResult

SETTINGS = {
    "batch.group_size": 8,
    "batch.prompts": 4,
    "optimizer.lr": 3e-4,
    "model.suggests.lr": 3e-4,
    "kl.name": "k3",
    "kl.coef": 0.05,
    "generation.temperature": 1.0,
    "generation.max_new_tokens": 64,
    "algorithm.normalization._target_": "rlkit.functional.normalize_group",
    "trainer.steps": 9,
}
ROW = {
    "reward/std": 0.4,
    "group/frac_zero_std": 0.2,
    "group/frac_all_bad": 0.1,
    "group/frac_all_good": 0.1,
    "len/truncated_frac": 0.0,
    "stop_reason/error": 0.0,
    "kl/start": 0.02,
    "kl/step": 0.002,
    "kl/coef": 0.05,
    "mismatch/logp_abs_mean": 1e-6,
    "optim/updates": 2,
    "policy/entropy": 0.4,
    "perf/step_s": 2.0,
    "perf/generate_s": 1.0,
}
FLAT = (0.50, 0.48, 0.52, 0.49, 0.51, 0.50, 0.48, 0.51, 0.50)
RISING = (0.40, 0.42, 0.45, 0.50, 0.55, 0.60, 0.66, 0.70, 0.75)


def tasks_of(count, prompt="What is {i} + 100?"):
    return [
        Task(f"row/{i}", ({"role": "user", "content": prompt.format(i=i)},), str(i + 100))
        for i in range(count)
    ]


def said(task, text, reward, group=0):
    return make_episode(task, text)._replace(reward=reward, group=group)


def evidence(settings=None, row=None, rewards=FLAT, rollouts=()):
    """A run of nine steps whose rows are all alike but for the reward."""
    rows = [ROW | (row or {}) | {"step": i + 1, "reward/mean": r} for i, r in enumerate(rewards)]
    run = ReadRun(Path("run"), "grpo", 0, SETTINGS | (settings or {}), {}, rows, ())
    played = list(rollouts) or [
        said(task, f"reply {i}", float(i % 2), group=g)
        for g, task in enumerate(tasks_of(12))
        for i in range(4)
    ]
    return Evidence(run, {1: played})


def causes(e, reward=None):
    return [finding.cause for finding in list_findings(e, reward)]


# ----------------------------------------------------------------------------------------- findings


def test_a_healthy_run_has_no_finding():
    """Neither one that rises nor one whose figures are all usual."""
    assert causes(evidence(rewards=RISING)) == []
    assert causes(evidence()) == []


@each(
    ("cause", "settings", "row"),
    [
        ("cut", {}, {"len/truncated_frac": 0.6, "stop_reason/length": 0.6}),
        ("hard", {}, {"group/frac_all_bad": 0.95, "group/frac_zero_std": 0.95}),
        ("groups", {"batch.group_size": 2}, {"group/frac_zero_std": 0.6}),
        ("kl", {"kl.coef": 10}, {"kl/coef": 10}),
        ("entropy", {"algorithm.entropy_coef": 0.5}, {}),
        ("rate_high", {"optimizer.lr": 3e-2}, {}),
        ("rate_high", {}, {"kl/step": 0.2}),
        ("rate_low", {"optimizer.lr": 1e-6}, {}),
        ("rate_low", {}, {"kl/start": 1e-6}),
        ("temperature", {"generation.temperature": 2.0}, {}),
        ("equal", {}, {"group/frac_zero_std": 0.95, "group/frac_all_bad": 0.5}),
        ("stale", {}, {"mismatch/logp_abs_mean": 0.2}),
        ("environment_fails", {}, {"stop_reason/error": 0.1}),
        ("reward_fails", {}, {"reward/task/error_frac": 0.1}),
    ],
)
def test_a_figure_that_is_out_of_range_names_its_cause(cause, settings, row):
    found = list_findings(evidence(settings, row))
    assert found[0].cause == cause
    assert any(character.isdigit() for character in found[0].evidence), "evidence has numbers"


def test_the_settings_are_those_of_the_phase_and_its_groups_have_no_remedy():
    """The run's own algorithm never ran, and an override of it changes nothing."""
    own = {
        f"schedule.phases.{name}.algorithm.{key}": value
        for name in ("first", "second")
        for key, value in (
            ("entropy_coef", 0.3),
            ("advantage._target_", "rlkit.functional.batch_mean"),
        )
    }
    small = {"batch.group_size": 2, "algorithm.advantage._target_": "rlkit.functional.group_mean"}
    e = evidence(small | own, {"group/frac_zero_std": 0.6, "schedule/phase": 1})
    (found,) = list_findings(e)
    assert found.cause == "entropy" and found.remedy == ()
    assert not any("algorithm" in text for r in list_remedies(e, []) for text in r.overrides)


def test_a_scheduled_rate_is_read_and_no_override_of_it_is_offered():
    """At 0.03 by a schedule it was called 0.0003; `linear` ignores optimizer.lr."""
    key = "schedule.numbers.optimizer.lr"
    row = {"optim/lr": 3e-2}
    e = evidence({f"{key}._target_": "rlkit.training.schedules.linear"}, row)
    (found,) = list_findings(e)
    assert f"At {key}=0.03" in found.evidence and found.remedy == ()
    assert not any("optimizer.lr" in text for r in list_remedies(e, []) for text in r.overrides)
    decayed = evidence({f"{key}._target_": "rlkit.training.schedules.decay"}, row)
    assert list_findings(decayed)[0].remedy == ("optimizer.lr=0.0003",)


def test_a_gradient_of_0_and_skipped_updates_are_named_and_no_rate_is():
    """The first was a rate too low, the second no fault at all."""
    none = {"optim/grad_norm": 0.0, "kl/start": 0.0, "adv/abs_mean": 0.0}
    (found,) = list_findings(evidence(row=none))
    assert "9 steps: no gradient" in found.title and "exactly 0" in found.evidence
    nan = {"optim/updates": 0, "optim/skipped_nonfinite": 2, "kl/start": 0.0}
    (found,) = list_findings(evidence(row=nan))
    assert "9 steps: update skipped" in found.title


def test_a_negative_reward_that_stays_is_not_lost():
    """-1 is below half of -1; a few large steps alone are usual."""
    rewards = [-1.0, -0.99, -1.01] * 3
    e = evidence(rewards=rewards)
    for i in (3, 7):
        e.run.rows[i]["kl/step"] = 0.4
    assert not settings.steps_far(e)


def test_only_the_weight_whose_sign_is_wrong_is_turned():
    """The penalty on length was turned too, which paid for long answers."""

    def exact(rollout):
        return float(rollout.final_content.strip() == rollout.task.answer)

    def length(rollout):
        return len(rollout.final_content) / 1000

    reward = Reward("own", {"num": Term(-1.0, exact), "length": Term(-0.001, length)})
    found = attack(reward, tasks_of(8))
    assert found.cause == "sign" and found.remedy == ("reward.terms.num.weight=1",)


def test_a_prompt_that_was_trained_on_measures_nothing_while_others_are_left():
    """The stream begins again after 20 problems, and the last ones came with trained ones."""
    from types import SimpleNamespace

    from rlkit.extras.why.forks import choose_probes

    algorithm = SimpleNamespace(max_refills=0)
    x = SimpleNamespace(algorithm=algorithm, batch=SimpleNamespace(prompts=3), seed=0)
    probes = choose_probes(x, Splits(tasks_of(20)), Place(0, None), 1)
    assert len(probes) == 5, "20 problems, 3 prompts in up to 5 draws"
    assert choose_probes(x, Splits(tasks_of(10)), Place(0, None), 1), "all were trained on"


def test_problems_are_easy_only_if_the_run_begins_near_its_best_reward():
    """A run that began at 0.94 of 1 had good replies alone in two thirds of its groups."""
    good = {"group/frac_all_good": 0.67, "group/frac_zero_std": 0.67}
    near = [0.94 + 0.005 * i for i in range(9)]
    found = list_findings(evidence(row=good, rewards=near))
    assert [own.cause for own in found] == ["easy"] and "began at 0.94" in found[0].evidence
    assert causes(evidence(row=good)) == [], "0.5 of 1 leaves much to gain"


def test_a_few_lucky_groups_in_the_first_step_do_not_hide_hard_problems():
    e = evidence(row={"group/frac_all_bad": 0.95, "group/frac_zero_std": 0.95})
    e.run.rows[0]["group/frac_all_bad"] = 6 / 8
    assert causes(e) == ["hard"]
    e.run.rows[0]["group/frac_all_bad"] = 5 / 8
    assert "hard" not in causes(e)


def test_a_policy_that_settled_on_one_reply_is_named():
    """Of SmolLM2 naming the first of two numbers always, with half of them right, `rlkit why` said
    that no fault is known."""

    def settled(begun, late, good, rewards=FLAT):
        e = evidence(rewards=rewards)
        for i, row in enumerate(e.run.rows):
            row["group/frac_zero_std"] = late if i > 1 else begun
            row["group/frac_all_good"] = good
        return e

    found = list_findings(settled(0.12, 1.0, 0.5))
    assert [own.cause for own in found] == ["frozen"] and found[0].remedy == ("optimizer.lr=3e-05",)
    assert "12% of the groups" in found[0].evidence and "100% of those" in found[0].evidence
    assert "frozen" not in causes(settled(0.12, 0.6, 0.5)), "four groups of ten still differ"
    assert "frozen" not in causes(settled(0.12, 1.0, 0.95)), "solved"
    assert causes(settled(0.12, 1.0, 0.5, RISING)) == []


def test_larger_groups_are_offered_only_where_a_reply_was_once_right():
    """No trial of 64 replies to a prompt was worth its hours where none of 3,000 was right."""
    none = list_findings(evidence(row={"group/frac_all_bad": 1.0, "group/frac_zero_std": 1.0}))
    assert [own.cause for own in none] == ["hard"] and not none[0].remedy
    few = list_findings(evidence(row={"group/frac_all_bad": 0.95, "group/frac_zero_std": 0.95}))
    assert few[0].remedy == ("batch.group_size=32",)


def test_the_offered_minutes_are_an_hour_or_enough_for_the_first_remedy():
    """A command of 280 minutes was offered."""
    e = evidence(row={"perf/step_s": 10.0, "perf/generate_s": 4.0})
    remedies = list_remedies(e, [])
    whole = 1.5 * forecast_minutes(e, remedies, 8)
    assert len(remedies) > 2 and whole <= PATIENCE
    assert choose_budget(e, remedies, 8) == round(whole + 0.5)
    slow = evidence(row={"perf/step_s": 300.0, "perf/generate_s": 4.0})
    first = 1.5 * forecast_minutes(slow, remedies[:1], 8)
    assert choose_budget(slow, remedies, 8) == round(first + 0.5)


def of_critic(explained, predicted, count=9):
    """A run with a critic, by these figures of each step; the mean return is 0.4."""
    e = evidence(rewards=[0.5 + 0.02 * (-1) ** i for i in range(count)])
    for i, row in enumerate(e.run.rows):
        row["value/explained_variance"] = explained(i)
        row["value/mean"] = predicted(i)
        row["value/return_mean"] = 0.4
    return e


def test_a_critic_is_useless_if_it_does_not_learn_the_mean_or_is_old():
    """PPO on the embedded model: a healthy critic explained nothing in ten steps, but it went from
    0.08 to the mean return of 0.6; one without updates stayed at 0."""
    found = list_findings(of_critic(lambda i: 0.0, lambda i: 0.0))
    assert [own.cause for own in found] == ["critic"]
    assert "It predicts 0.00 on average, while the returns average 0.40." in found[0].evidence
    assert causes(of_critic(lambda i: -0.05, lambda i: 0.4 * i / 8)) == [], "it is young"
    assert causes(of_critic(lambda i: -0.05, lambda i: 0.4, count=50)) == ["critic"], "it is old"
    unsure = of_critic(lambda i: 0.3 * (-1) ** i, lambda i: 0.4, count=50)
    assert causes(unsure) == [], "the interval of what it explains holds 0.05"
    assert causes(of_critic(lambda i: 0.2, lambda i: 0.0)) == [], "it explains a fifth"


def test_a_few_large_steps_are_a_fault_only_if_they_cost_reward():
    """Eight updates a step moved a healthy policy by 0.11 nats in one step of ten."""
    e = evidence()
    e.run.rows[2]["kl/step"] = 1.0
    assert causes(e) == []
    fallen = evidence(rewards=[0.5] + 8 * [0.0])
    fallen.run.rows[2]["kl/step"] = 1.0
    assert causes(fallen) == ["rate_high"]


@each(
    ("settings", "row"),
    [
        ({"batch.group_size": 2}, {"group/frac_zero_std": 0.6}),
        ({"kl.coef": 10}, {"kl/coef": 10}),
        ({"optimizer.lr": 1e-6}, {"kl/start": 1e-6}),
        ({"optimizer.lr": 3e-2}, {"kl/step": 0.2}),
        ({}, {"group/frac_all_bad": 0.95}),
    ],
)
def test_a_setting_is_not_blamed_in_a_run_that_rises(settings, row):
    assert causes(evidence(settings, row, RISING)) == []


def test_an_engine_that_keeps_its_first_weights_is_seen_long_before_the_bound():
    """An engine without an update differed by 3e-7 nats a token in the first step of the default
    run and by 0.03 in the ninth; the bound of a warning in float32 was 0.05."""
    e = evidence()
    for i, row in enumerate(e.run.rows):
        row["mismatch/logp_abs_mean"] = 3e-7 + 0.004 * i
    found = list_findings(e)
    assert [own.cause for own in found] == ["stale"] and "it has old weights" in found[0].evidence
    assert found[0].remedy == ("generation=cached",)
    e.run.settings["generation.engine._target_"] = "rlkit.engines.Cached"
    [own] = list_findings(e)
    assert own.remedy == () and "generation=transformers" in own.advice


def test_what_only_came_later_is_no_cause():
    """A rate that destroys the policy makes its replies long and its calls fail."""
    e = evidence({"optimizer.lr": 3e-2}, {"kl/step": 0.2})
    for row in e.run.rows[1:]:
        row.update(
            {"len/truncated_frac": 0.9, "group/frac_all_bad": 1.0, "group/frac_zero_std": 1.0}
        )
    assert causes(e) == ["rate_high"]


def test_equal_rewards_of_small_groups_are_explained_by_a_rate_that_destroys():
    row = {"kl/step": 0.2, "group/frac_zero_std": 0.6}
    assert causes(evidence({"batch.group_size": 4}, row)) == ["rate_high"]


def test_a_policy_that_has_not_moved_has_no_high_rate():
    """In a run without a signal the rate does nothing, however high it is."""
    row = {"kl/start": 1e-12, "kl/step": 1e-12, "group/frac_zero_std": 1.0}
    assert "rate_high" not in causes(evidence({"optimizer.lr": 3e-2}, row))
    assert "rate_high" in causes(evidence({"optimizer.lr": 3e-2}, row | {"kl/start": 0.1}))


def test_a_rate_is_not_called_low_after_three_steps():
    """A row has the distance before its update. A run of one step was told to train at ten times
    its model's rate."""
    still = {"kl/start": 0.0}
    assert causes(evidence(row=still, rewards=FLAT[:3])) == []
    assert causes(evidence(row=still, rewards=FLAT[:4])) == ["rate_low"]


def test_cut_episodes_are_counted_once_and_by_their_commonest_reason():
    row = {"len/truncated_frac": 0.6, "stop_reason/length": 0.1, "stop_reason/steps": 0.5}
    [found] = list_findings(evidence({"environment.max_turns": 50}, row))
    assert found.evidence == (
        "60% of the episodes were cut, most of them by the limit of turns"
        " (environment.max_turns=50)."
    )
    assert "environment.max_turns=100" in found.advice
    lost = row | {"group/frac_all_bad": 1.0, "group/frac_zero_std": 1.0}
    assert causes(evidence({}, lost)) == ["limit", "hard"], "a lost game is cut as well"


def test_staleness_that_was_asked_for_is_no_fault():
    row = {"mismatch/logp_abs_mean": 0.2}
    assert "stale" not in causes(evidence({"asynchrony.staleness": 2}, row))


def test_replies_that_copy_each_other_at_a_low_temperature():
    [task] = tasks_of(1)
    copies = [said(task, "the same", 0.0) for _ in range(8)]
    assert share_of_copies([copies]) == 1
    assert causes(evidence({"generation.temperature": 0.1}, rollouts=copies))[0] == "temperature"
    assert causes(evidence({"generation.temperature": 1.0}, rollouts=copies)) == []


def test_rows_that_no_reply_is_scored_of():
    played = [said(task, "x", None if i < 3 else 0.0) for i, task in enumerate(tasks_of(12))]
    found = list_findings(evidence(rollouts=played))
    assert found[0].cause == "unread" and "3 of 12 rows" in found[0].evidence


def test_a_tool_that_always_fails():
    def called(ok, name="calculator"):
        result = ToolResult("1", name, "error: no answer", ok)
        played = []
        for task in tasks_of(12):
            rollout = said(task, "x", 0.0)
            played.append(
                rollout._replace(steps=(rollout.steps[0]._replace(tool_results=(result,)),))
            )
        return played

    assert causes(evidence(rollouts=called(ok=False))) == ["tool"]
    assert causes(evidence(rollouts=called(ok=True))) == []
    assert causes(evidence(rollouts=called(ok=False, name=""))) == [], (
        "calls that nobody could read"
    )


def test_prompts_that_hold_their_answer_more_often_than_another_rows():
    """Answers among options stand in every prompt, and are no leak."""
    leaked = [
        said(
            task._replace(messages=({"role": "user", "content": f"It is {task.answer}."},)), "", 0.0
        )
        for task in tasks_of(12)
    ]
    assert causes(evidence(rollouts=leaked)) == ["leak"]
    assert causes(evidence(rewards=[0.0] * 9, rollouts=leaked)) == []  # and none was copied
    options = tasks_of(12, "{i}: A or B?")
    choice = [said(t._replace(answer="AB"[i % 2]), "", 0.0) for i, t in enumerate(options)]
    assert causes(evidence(rollouts=choice)) == []


@each(
    "prompt, found",
    [
        ("{other} or {answer}?", ["leak"]),
        ("{more}What? It is {answer}, {more}", ["leak"]),
        ("Which is larger, {pair}?", []),
    ],
)
def test_truths_at_the_same_place_are_a_leak_and_those_among_options_are_not(prompt, found):
    played = []
    for i, task in enumerate(tasks_of(12)):
        answer, other = str(100 + i), str(50 + i)
        pair = f"{answer} or {other}" if i % 2 else f"{other} or {answer}"
        text = prompt.format(answer=answer, other=other, pair=pair, more="so " * i)
        rows = task._replace(messages=({"role": "user", "content": text},), answer=answer)
        played.append(said(rows, "", 0.0))
    assert causes(evidence(rollouts=played)) == found


def test_rows_that_are_one_problem():
    rows = [task._replace(id=f"copy/{i}") for i, task in enumerate(tasks_of(1) * 6)] + tasks_of(6)
    assert causes(evidence(rollouts=[said(task, "", 0.0) for task in rows])) == ["repeated"]


def test_the_page_explains_every_finding():
    """Each title in the code stands in a row of the table, without the name of a tool or a
    metric."""
    page = (Path(__file__).parents[3] / "docs" / "no_rise.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("|")]
    titles = [*chain.from_iterable(map(titles_of, (data, settings, attacks, findings)))]
    assert len(titles) > 20
    for title in titles:
        assert any(re.search(title, row) for row in rows), title


def titles_of(module):
    """Patterns of the second argument of each Finding(…)."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
            title = node.args[1]
            parts = title.values if isinstance(title, ast.JoinedStr) else [title]
            texts = [part.value.strip() for part in parts if isinstance(part, ast.Constant)]
            yield ".*".join(map(re.escape, texts))


# ------------------------------------------------------------------------------------------ attacks


def constant(rollout):
    return min(1.0, len(rollout.final_content) / 5)


def reversed_numeric(rollout):
    return -numeric(rollout)


@batched
def of_all(rollouts):
    return [1.0 for _ in rollouts]


async def asking(rollout):
    return 1.0


def served(rollout, *, address="http://127.0.0.1:1"):
    return 1.0


@each(("fn", "cause"), [(constant, "hackable"), (reversed_numeric, "sign"), (numeric, None)])
def test_a_reward_that_pays_the_wrong_answer(fn, cause):
    found = attack(Reward("mine", {"mine": Term(1.0, fn)}), tasks_of(12))
    assert (found and found.cause) == cause


def test_the_truth_of_a_repeated_row_is_no_answer_without_sense():
    """The most common truth is tried on all rows, and is right on those that repeat a problem."""
    rows = [task._replace(id=f"copy/{i}") for i, task in enumerate(tasks_of(1) * 12)] + tasks_of(3)
    assert attack(Reward("mine", {"mine": Term(1.0, numeric)}), rows) is None


def test_the_weight_of_a_reversed_reward_is_turned():
    found = attack(Reward("mine", {"task": Term(-1.0, numeric)}), tasks_of(12))
    assert found.cause == "sign" and found.remedy == ("reward.terms.task.weight=1",)


@each(("fn", "why"), [(of_all, "batch"), (asking, "async"), (served, "server"), (numeric, "")])
def test_rewards_that_may_cost_something_are_not_called_unasked(fn, why):
    reason = explain_unsafe(Reward("mine", {"mine": Term(1.0, fn)}), tasks_of(2))
    assert why in reason and bool(why) == bool(reason)


# -------------------------------------------------------------------------------- remedies, effects


def test_a_remedy_takes_the_place_of_what_its_option_was_set_to():
    saved = ["algorithm=ppo", "algorithm.critic.optimizer.lr=0", "kl=k3", "kl.coef=10"]
    assert apply_remedy(saved, ["kl=none"]) == [*saved[:2], "kl=none"]
    assert apply_remedy(saved, ["algorithm=grpo"]) == [*saved[2:], "algorithm=grpo"]
    assert apply_remedy(["algorithm/normalization=group"], ["algorithm/normalization=none"]) == [
        "algorithm/normalization=none"
    ]
    sampled = ["generation=vllm", "generation.max_new_tokens=9", "generation.engine.max_rows=8"]
    kept = ["generation.max_new_tokens=9", "generation=cached"]
    assert apply_remedy(sampled, ["generation=cached"]) == kept


def test_remedies_of_findings_come_first_and_none_changes_the_reward():
    e = evidence({"kl.coef": 10}, {"kl/coef": 10})
    remedies = list_remedies(e, list_findings(e))
    assert remedies[0].overrides == ("kl=none",)
    assert len({own.overrides for own in remedies}) == len(remedies)
    found = attack(Reward("mine", {"mine": Term(1.0, constant)}), tasks_of(12))
    assert found.remedy and not any(
        "reward=by_task" in r.overrides for r in list_remedies(e, [found])
    )


def fork(title, rewards, overrides=("a=b",)):
    return Fork(title, overrides, 0, 8, 1.0, {str(i): r for i, r in enumerate(rewards)})


def test_an_effect_is_claimed_where_the_pairs_show_it_and_no_effect_is_said_to_be_none():
    base = [i % 4 / 4 for i in range(16)]
    control = fork("The run as it is", base, ())
    better = fork("Better", [r + 0.25 * (i % 3 > 0) for i, r in enumerate(base)])
    same = fork("Same", [r + 0.25 * (-1) ** i for i, r in enumerate(base)])
    effects = list_effects(control, [same, better])
    assert [own.helps for own in effects] == [False, True]
    assert say_effect(effects[1]).startswith("Better (a=b): reward is higher by 0.156 (")
    assert "no measurable effect" in say_effect(effects[0])
    assert "Better" in sum_up(control, [same, better], effects)[1]
    few = list_effects(fork("", base[:9], ()), [fork("Few", [1.0] * 9)])
    assert not few[0].claim and "9 prompts claim nothing" in say_effect(few[0])
    assert "Nothing can be told" in " ".join(sum_up(control, [same], list_effects(control, [same])))


def test_a_trial_confirms_a_finding_if_its_change_raises_the_reward():
    base = [i % 4 / 4 for i in range(16)]
    control = fork("The run as it is", base, ())
    better = fork("kl=none", [r + 0.25 * (i % 3 > 0) for i, r in enumerate(base)], ("kl=none",))
    equal = fork("b=1", base, ("b=1",))
    worse = fork("c=1", [r - 0.25 * (i % 3 > 0) for i, r in enumerate(base)], ("c=1",))
    named = [
        Finding("kl", "The KL.", "", "", ("kl=none",)),
        Finding("equal", "Groups.", "", "", ("b=1",)),
        Finding("rate", "The rate.", "", "", ("c=1",)),
        Finding("leak", "Prompts.", "", ""),
    ]
    forks = [better, equal, worse]
    lines = sum_up(control, forks, list_effects(control, forks), named)
    assert lines[0] == "The run as it is, the baseline: mean reward 0.375."
    assert "The same reward on every prompt as the baseline: b=1." in lines
    assert [line for line in lines if line.startswith("Finding")] == [
        "Finding 1 is confirmed by its trial. The KL.",
        "Finding 2 is not confirmed by its trial. Groups.",
        "Finding 3 is not confirmed by its trial. The rate.",
        "Finding 4 is not tested. Prompts.",
    ]


# --------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four steps, with checkpoints after the second and the fourth."""
    folder = tmp_path_factory.mktemp("why") / "run"
    words = ["batch.prompts=4", "batch.group_size=4", "trainer.steps=4", "trainer.threads=1"]
    words += ["evaluation.n=0", "logger=none", "kl.coef=10"]
    words += ["callbacks.checkpoint.every=2", "callbacks.checkpoint.model=false"]
    assert main(["train", *words, f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("refills", [0, 6])
def test_no_fork_trains_on_the_prompts_that_measure_it(refills):
    """A fork with the remedy MIXED draws up to five times a step's prompts, one of a run with
    refills as many as the run."""
    from rlkit.episodes.stream import StreamState, take
    from rlkit.extras.why.evidence import MIXED, REFILLS
    from rlkit.extras.why.forks import choose_probes

    more = ["algorithm/group_filter=mixed", f"algorithm.max_refills={refills}"]
    x = rlkit.experiment("task.max_samples=1024", "batch.prompts=16", *(more if refills else []))
    tasks = Splits(x.task(split="train"))
    probes = choose_probes(x, tasks, Place(0, None), 8)
    draws = 1 + max(refills, REFILLS)
    trained, _ = take(tasks.train, StreamState(epoch=0, position=0), 8 * 16 * draws, seed=x.seed)
    assert len(probes) == 64 and not {task.id for task in probes} & {task.id for task in trained}
    assert MIXED[1] == f"algorithm.max_refills={REFILLS}"


@pytest.mark.slow
def test_the_fork_without_a_remedy_is_the_run(run, monkeypatch):
    """From the checkpoint of step 2, two steps give the weights of step 4, bit for bit."""
    from rlkit.config.problems.rows import load_tasks
    from rlkit.extras.why import forks

    kept = {}

    def measured(x, learner, policy, probes):
        kept.update({k: v.clone() for k, v in policy.model.state_dict().items()})
        return {}

    monkeypatch.setattr(forks, "measure", measured)
    setting = compose_run(run, "run", Arguments([]), ())
    first, last = map(read_checkpoint, list_checkpoints(run / "checkpoints"))
    run_fork(setting.x, setting, load_tasks(setting.x), Place(2, first), 2)
    own = {k.removeprefix("model."): v for k, v in last["state_dict"].items()}
    assert kept.keys() >= own.keys() and len(own) > 10
    assert all(torch.equal(kept[name], value) for name, value in own.items())


@pytest.mark.slow
def test_the_command_names_the_cause_and_proves_it(run, capsys):
    assert main(["why", str(run)]) == 0
    out = capsys.readouterr().out
    assert "The KL penalty is too strong." in out
    assert "In your train command, replace kl.coef=10 with: kl=none" in out
    assert f"rlkit why {run} minutes=" in out
    assert main(["why", str(run), "minutes=1", "steps=1"]) == 0
    out = capsys.readouterr().out
    rows = [json.loads(line) for line in (run / "why" / "forks.jsonl").read_text().splitlines()]
    assert rows[0]["overrides"] == [] and rows[1]["overrides"] == ["kl=none"]
    assert "Finding 1 is " in out and "The run as it is, the baseline: mean reward " in out
    assert " tried alone" in out and " were trained from the start, 1 steps each" in out
    assert main(["why", str(run), "minutes=1", "steps=1"]) == 0
    again = (run / "why" / "forks.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in again][: len(rows)] == rows, "what is done is not repeated"


@pytest.mark.slow
def test_trials_of_other_settings_are_not_reused(run, tmp_path, monkeypatch):
    """A resumed run may have a new learning rate; its trials had the old one."""
    from rlkit.extras.why import forks
    from rlkit.extras.why.commands.why import try_all

    calls = []
    trained = fork("The run as it is", [0.5], ())

    def run_fork(x, setting, tasks, place, steps):
        calls.append(setting.remedy.overrides)
        return trained._replace(of=identify(setting.config), start=0, steps=steps)

    monkeypatch.setattr(forks, "run_fork", run_fork)
    folder = tmp_path / "run"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("why"))
    e = read_evidence(folder)
    place = Place(0, None)
    for more, count in (("", 1), ("", 1), ("optimizer.lr=1e-9", 2), ("", 2)):
        words = yaml.safe_load((run / ".hydra" / "overrides.yaml").read_text())
        written = yaml.safe_dump([*words, *filter(None, [more])])
        (folder / ".hydra" / "overrides.yaml").write_text(written)
        setting = compose_run(folder, "run", Arguments([]), (), "The run as it is")
        done = read_forks(folder, place, 1)
        try_all(e, [setting], place, done, minutes=1, steps=1)
        assert len(calls) == count, more


def test_a_row_that_a_kill_cut_is_passed_over(tmp_path):
    write_fork(tmp_path, fork("A", [0.5]))
    file = tmp_path / "why" / "forks.jsonl"
    with file.open("a") as out:
        out.write('{"title": "B", "over')
    assert list(read_forks(tmp_path, Place(0, None), 8)) == [("", "a=b")]
    assert not read_forks(tmp_path, Place(0, None), 4)


@pytest.mark.slow
def test_forks_begin_at_the_start_of_a_run_that_never_rose(run):
    e = read_evidence(run)
    assert choose_place(run, e, None).step == 0 and choose_place(run, e, 2).step == 2


@pytest.mark.slow
def test_the_command_beside_a_conversation_of_the_report_explains_its_token(run, capsys):
    """Of a choice of five conversations each keeps its place in its whole step."""
    report = pytest.importorskip("rlkit.extras.report.conversations")
    shown = report.collect([read_run(run)], 5)
    entry = next(own for own in reversed(shown.entries) if own["kind"] == "training")
    words = shlex.split(entry["why"] + str(entry["tokens"] - 1))
    number = int(words[-2].removeprefix("rollout="))
    played = read_step(run, entry["step"])[number]
    assert (played.group, played.sample) == (entry["group"], entry["sample"])
    assert words[0] == "rlkit" and main(words[1:]) == 0
    out = capsys.readouterr().out
    assert f"step {entry['step']}, rollout {number}, token {entry['tokens'] - 1}" in out
    assert main([*words[1:-1], f"token={entry['tokens']}"]) == 2, "it is the last token"


@pytest.mark.slow
@each(
    ("words", "said"),
    [
        ([], "takes one run folder"),
        (["nowhere"], "no run folder of rlkit"),
        (["RUN", "minutes=soon"], "minutes=soon: give a whole number"),
        (["RUN", "algorithm=grpo"], "'algorithm=grpo': rlkit why takes"),
        (["RUN", "step=3"], "there is no checkpoint of step 3"),
    ],
)
def test_words_that_say_nothing_are_refused(run, capsys, words, said):
    assert main(["why", *(str(run) if word == "RUN" else word for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_lines_of_a_finding():
    lines = say_findings(list_findings(evidence({"kl.coef": 10}, {"kl/coef": 10})))
    assert lines[0].startswith("1. The KL penalty is too strong. With kl.coef=10")


def test_a_change_quotes_the_overrides_that_it_replaces():
    given = ["seed=1", "kl=k3", "kl.coef=10"]
    told = "In your train command, replace kl=k3 kl.coef=10 with: kl=none"
    assert say_change(("kl=none",), given) == told
    assert say_change(("a=1", "b=2"), given) == "Add to your train command: a=1 b=2"


@each(
    ("rewards", "verdict"),
    [
        (RISING, "rises: it was 0.423 on average in the first 3 of 9 steps, and 0.703 in the last"),
        (FLAT, "flat: it was 0.500 on average in the first 3 of 9 steps, and 0.497 in the last 3."),
        (RISING[::-1], "falls: it was 0.703"),
        ([0.6, 0.6, 0.6, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0], "collapsed: it was 0.600"),
        ([-r for r in RISING], "falls: it was -0.423"),
        (FLAT[:2], "The run has 2 of the 3 steps"),
    ],
)
def test_the_first_line_has_a_verdict_and_the_counts_of_steps(rewards, verdict):
    assert verdict in say_progress(evidence(rewards=rewards))


def test_a_healthy_answer_counts_the_steps():
    flat = "No known fault was found in these 9 steps. More steps show smaller changes: set"
    assert say_healthy(evidence()) == f"{flat} trainer.steps=36."
    assert say_healthy(evidence(rewards=RISING)) == "No known fault was found in these 9 steps."


def test_a_critic_without_a_rate_gets_that_of_its_option():
    e = of_critic(lambda i: 0.0, lambda i: 0.0)
    rate = "algorithm.critic.optimizer.lr"
    e.run.settings.update({rate: 0, "algorithm.critic.model": "head"})
    [found] = list_findings(e)
    assert f"because {rate}=0." in found.evidence
    head = Path(rlkit.__file__).parents[1] / "conf" / "algorithm" / "critic" / "head.yaml"
    assert found.remedy == (f"{rate}={yaml.safe_load(head.read_text())['optimizer']['lr']:g}",)
