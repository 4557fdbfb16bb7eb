"""Known pathologies: each is said when it is there, not when it is not, and once in a run."""

from __future__ import annotations

import asyncio

import pytest
import torch

from rlkit.environments import execute, hermes
from rlkit.episodes import assemble, summarize
from rlkit.episodes.summary import describe_failing_tools
from rlkit.training.callbacks._health import Health
from rlkit.training.callbacks.pathologies import CHECKS, LEAST_BAD
from rlkit.training.metrics import Clock, UpdateTerms, performance, update_metrics
from rlkit.types import Rollout, Step, Task, ToolCall, ToolResult, Weighted

NAN = float("nan")
HEALTHY = {
    "group/frac_zero_std": 0.9,
    "group/frac_all_bad": 0.4,
    "reward/mean": 0.4,
    "reward/std": 0.5,
    "adv/abs_mean": 0.3,
    "len/truncated_frac": 0.5,
    "len/loop_frac": 0.02,
    "parse_fail_frac": 0.2,
    "reward/numeric/error_frac": 0.0,
    "reward/numeric/timeout_frac": 0.0,
    "reward/format/error_frac": 0.0,
    "reward/format/timeout_frac": 0.0,
    "ratio/first_mean": 1.009,
    "mismatch/logp_abs_mean": 0.001,
    "optim/skipped_nonfinite": 0,
    "optim/grad_norm": 0.4,
    "optim/updates": 2,
    "stop_reason/length": 0.6,
    "stop_reason/context": 0.1,
    "stop_reason/steps": 0.2,
    "stop_reason/deadline": 0.0,
    "stop_reason/environment": 0.0,
    "stop_reason/error": 0.0,
    "perf/update_s": 1.9,
    "perf/update_processor_s": 0.9,
}
PROGRAMS = {  # of a step that programs play
    "program/rows": 2.0,
    "program/prompt_tokens": 100.0,
    "program/thinking_tokens": 10.0,
    "answer_found_frac": 0.1,
    "reward/numeric/ok_frac": 0.0,
}
ILL = {  # check → (what makes it speak, words of the message)
    "broken_policy": (
        {"group/frac_all_bad": 1.0, "group/frac_zero_std": 1.0, LEAST_BAD: 0.25},
        ["75%", "0%", "lower optimizer.lr"],
    ),
    "all_rewards_equal": (
        {"group/frac_zero_std": 1.0, "adv/abs_mean": 0.0},
        ["equal", "0.40", "batch.group_size"],
    ),
    "most_truncated": (
        {"len/truncated_frac": 0.51},
        ["51%", "truncated", "length", "generation.max_new_tokens"],
    ),
    "length_inflation": ({"len/loop_frac": 0.1}, ["10%", "repeat themselves", "imitation"]),
    "parse_failures": ({"parse_fail_frac": 0.25}, ["25%", "samples/", "environment/parse_calls"]),
    "reward_failures": ({"reward/format/timeout_frac": 0.05}, ["format", "5.0%", "timeout_frac"]),
    "environment_failures": ({"stop_reason/error": 0.25}, ["25%", "environment", "not scored"]),
    "dropped_thinking": (
        {"program/thinking_tokens": 11.0, "program/prompt_tokens": 100.0},
        ["11%", "environment.dropped_thinking=continue"],
    ),
    "no_answers": (
        {"program/rows": 2.0, "answer_found_frac": 0.0, "reward/numeric/ok_frac": 0.0},
        ["every final content is empty", "environment.answer"],
    ),
    "ratio_off": ({"ratio/first_mean": 1.02}, ["1.020", "not 1"]),
    "sampler_off": ({"mismatch/logp_abs_mean": 0.06}, ["0.060 nats", "more than 0.001"]),
    "version_wrong": (
        {"mismatch/version_right": 0.0, "mismatch/version_wrong": 7.0},
        ["another version", "10^7", "missed an update"],
    ),
    "version_unknown": (
        {"mismatch/version_right": 5.0, "mismatch/version_wrong": 1.0},
        ["cannot tell", "its rounding"],
    ),
    "no_gradient": ({"optim/grad_norm": 0.0}, ["exactly 0", "adv/abs_mean"]),
    "update_skipped": ({"optim/skipped_nonfinite": 2}, ["2 update(s) skipped"]),
    "waits_for_cores": ({"perf/update_s": 2.1}, ["2.1 s", "0.9 s", "other processes"]),
}


def spoken(row):
    return {check.__name__: text for check in CHECKS if (text := check(row)) is not None}


class Trainer:
    def __init__(self):
        self.lines = []

    def print(self, line):
        self.lines.append(line)


class Module:
    def __init__(self, row, step=1):
        self.metrics, self.rl_step, self.rollouts = row, step, ()


def test_a_healthy_row_is_silent():
    """Every value at the edge of its bound, or just within."""
    assert spoken(HEALTHY) == {} == spoken(HEALTHY | PROGRAMS)


def test_groups_of_one_are_no_fault_where_rewards_differ():
    """PPO compares with its critic: it was told that there is nothing to learn from, at every
    step."""
    assert spoken(HEALTHY | {"group/frac_zero_std": 1.0}) == {}
    assert list(spoken(HEALTHY | {"group/frac_zero_std": 1.0, "reward/std": 0.0})) == [
        "all_rewards_equal"
    ]


def test_every_check_is_in_the_table():
    assert [check.__name__ for check in CHECKS] == list(ILL)


@pytest.mark.parametrize("name", ILL)
def test_one_illness_makes_one_check_speak(name):
    change, words = ILL[name]
    messages = spoken(HEALTHY | change)
    assert list(messages) == [name] and all(word in messages[name] for word in words)


def test_a_resumed_run_repeats_no_warning_and_remembers_its_best_groups():
    """It advised easier problems where the policy had broken."""
    broken = HEALTHY | {"group/frac_all_bad": 0.95, "group/frac_zero_std": 1.0, "reward/std": 0.0}
    said = []
    for stop in (False, True):  # the same steps, without and with a resume
        health, trainer = Health(), Trainer()
        for step, row in enumerate([HEALTHY, broken, broken]):
            if stop:
                health, saved = Health(), health.state_dict()
                health.load_state_dict(saved)
            health.on_train_batch_end(trainer, Module(row, step + 1))
        said.append(trainer.lines)
    assert said[0] and said[0] == said[1]


def test_a_ratio_below_one_counts_too():
    assert "ratio_off" in spoken(HEALTHY | {"ratio/first_mean": 0.98})


def test_a_teacher_that_equals_the_policy_is_named():
    """algorithm=opd teacher=ema moved no weight in any step, and no line said so."""
    taught = HEALTHY | {"len/truncated_frac": 0.0, "optim/grad_norm": 0.0, "streams/teacher": 0.0}
    assert (
        list(spoken(taught)) == ["no_gradient"]
        and "the teacher equals the policy" in spoken(taught)["no_gradient"]
    )


@pytest.mark.parametrize("key", ["ratio/first_mean", "mismatch/logp_abs_mean", "reward/mean"])
def test_what_was_not_measured_is_no_illness(key):
    """A step without an update has no ratio; nan must not read as a mismatch."""
    assert spoken(HEALTHY | {key: NAN}) == {}


def test_a_real_row_has_every_key_that_the_checks_read(experiment):
    """A renamed metric must not turn a check into a KeyError in the middle of a run, nor into
    silence."""
    rollout = Rollout(
        Task("row/0", ()),
        (Step((), (1, 2), (3,), (-1.0,), "stop"),),
        reward=1.0,
        rewards={"numeric": 1.0, "format": 1.0},
    )
    batch = assemble([rollout], pad_token_id=0)
    zeros = torch.zeros(batch.ids.shape)
    batch = Weighted(**vars(batch), logprobs_old=None, advantages=zeros, scale=zeros)
    row = summarize([rollout]) | update_metrics(batch, UpdateTerms(), experiment)
    row |= performance(batch, UpdateTerms(), Clock(), tokens=3, device=torch.device("cpu"))
    assert set(HEALTHY) <= set(row)
    assert list(spoken(row)) == ["all_rewards_equal"]


def test_a_warning_comes_once_in_a_run():
    """A share that goes up and down around its bound repeated the sentence every few steps."""
    trainer, health = Trainer(), Health()
    ill = HEALTHY | ILL["sampler_off"][0]
    for step, row in enumerate([HEALTHY, ill, ill, HEALTHY, ill], start=1):
        health.on_train_batch_end(trainer, Module(row, step))
    assert [line[: len("warning: step 2")] for line in trainer.lines] == ["warning: step 2"]


@pytest.mark.parametrize("before", [0.0, 0.4, 0.6])
def test_a_policy_that_lost_what_it_could_do_is_not_told_that_problems_are_hard(before):
    """optimizer.lr=100 was answered by "choose easier problems" and "raise max_new_tokens"."""
    trainer, health = Trainer(), Health()
    broken = HEALTHY | {
        "group/frac_zero_std": 1.0,
        "group/frac_all_bad": 1.0,
        "adv/abs_mean": 0.0,
        "len/truncated_frac": 1.0,
        "optim/grad_norm": 0.0,
    }
    health.on_train_batch_end(trainer, Module(HEALTHY | {"group/frac_all_bad": before}, 1))
    health.on_train_batch_end(trainer, Module(broken, 2))
    if before < 0.5:
        (line,) = trainer.lines
        assert "lower optimizer.lr" in line
    else:
        assert "lower optimizer.lr" not in "".join(trainer.lines)


def test_a_tool_that_fails_in_every_call_is_named():
    def rollout(*results):
        step = Step((), (1,), (2,), (-1.0,), "tool", tool_results=results)
        return Rollout(Task("row/0", ()), (step,), reward=0.0, rewards={})

    broken = ToolResult("", "look", "Error: no.", ok=False)
    fine = ToolResult("", "add", "3", ok=True)
    unknown = ToolResult("", "none", "Error: there is no tool 'none'.", ok=False)
    _, (call,) = hermes("<tool_call>{</tool_call>")
    unreadable = ToolResult("", call.name, call.error, ok=False)
    unfit = asyncio.run(execute(ToolCall("", "tool", {}), {"tool": lambda path: path}))
    assert not unfit.ok and describe_failing_tools(4 * [rollout(unfit)]) == []
    assert describe_failing_tools(3 * [rollout(broken, fine, unknown, unknown)]) == []
    assert describe_failing_tools(4 * [rollout(broken, fine, unknown, unreadable)]) == [
        "the tool look failed in all of its 4 calls; the first error: Error: no."
    ]
    assert describe_failing_tools([*4 * [rollout(broken)], rollout(broken._replace(ok=True))]) == []


@pytest.mark.parametrize(
    ("why", "key"),
    [
        ("length", "generation.max_new_tokens"),
        ("context", "overflow=drop_oldest"),
        ("steps", "max_turns"),
        ("deadline", "environment.deadline"),
    ],
)
def test_truncation_names_the_key_of_what_cut_most_episodes(why, key):
    row = HEALTHY | {
        "len/truncated_frac": 0.95,
        "stop_reason/length": 0.1,
        f"stop_reason/{why}": 0.8,
    }
    assert key in spoken(row)["most_truncated"] and f"by {why}" in spoken(row)["most_truncated"]


def test_truncation_of_programs_names_keys_that_they_have():
    row = HEALTHY | {"len/truncated_frac": 0.95, "program/rows": 1.0, "answer_found_frac": 1.0}
    assert "environment.time_limit" in spoken(row | {"stop_reason/deadline": 0.8})["most_truncated"]
    assert "overflow" not in spoken(row | {"stop_reason/context": 0.8})["most_truncated"]


def test_equal_groups_name_the_direction():
    """Where all rewards are bad a harder task is no remedy."""
    ill = HEALTHY | ILL["all_rewards_equal"][0]
    assert "easier" in spoken(ill | {"group/frac_all_bad": 0.9})["all_rewards_equal"]
    assert "harder" in spoken(ill | {"group/frac_all_bad": 0.0})["all_rewards_equal"]
    # replies that are cut earn nothing, whatever the problems
    both = spoken(ill | {"group/frac_all_bad": 1.0} | ILL["most_truncated"][0])
    assert both["all_rewards_equal"].endswith("first let the replies end")
    # at a mean of 0.88 it advised harder problems alone, and one prompt in eight was never solved
    mixed = spoken(ill | {"group/frac_all_bad": 0.125})["all_rewards_equal"]
    assert "solved always or never" in mixed and "lower optimizer.lr" in mixed
    assert "all_rewards_equal" not in spoken(
        ill | {"streams/teacher": 0.2}
    )  # there is something else to learn from


def test_a_second_illness_is_said_while_the_first_lasts():
    trainer, health = Trainer(), Health()
    first = HEALTHY | ILL["most_truncated"][0]
    health.on_train_batch_end(trainer, Module(first))
    health.on_train_batch_end(trainer, Module(first | ILL["update_skipped"][0], 2))
    assert len(trainer.lines) == 2 and "skipped" in trainer.lines[1]


def test_warnings_come_in_the_order_of_the_checks():
    """The output of a run is a function of the run; the order of a set of words differs from
    process to process."""
    trainer, row = Trainer(), dict(HEALTHY)
    for change, _ in ILL.values():
        row |= change
    health = Health()
    health.least_bad = row[LEAST_BAD]
    health.on_train_batch_end(trainer, Module(row))
    assert trainer.lines == [f"warning: step 1: {text}" for text in spoken(row).values()]


def test_half_precision_is_allowed_what_its_rounding_was_measured_to_be():
    """SmolLM2 samples at 0.05 nats from its trainer in bfloat16, which is no illness."""
    row = HEALTHY | {"mismatch/logp_abs_mean": 0.055, "mismatch/logp_abs_bound": 0.059}
    assert "sampler_off" not in spoken(row)
    row |= {"mismatch/logp_abs_bound": 0.005}
    assert "0.055 nats a token on average, more than 0.005" in spoken(row)["sampler_off"]
