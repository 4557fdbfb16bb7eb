"""What the training step does with the options of an algorithm, on whole little runs of the
embedded model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from rlkit.config.compose import compose, experiment
from rlkit.config.problems.rows import load_tasks
from rlkit.training.run import train_in

FAST = [
    "debug=fast",
    "trainer.accelerator=cpu",
    "logger=none",
    "evaluation.n=0",
    "optimizer.lr=1e-3",
    "task.max_samples=64",
    "generation.max_new_tokens=32",
]
MIXED = [
    "batch.group_size=8",
    "batch.prompts=2",
    "seed=3",
]  # with which little steps have a gradient


def train(folder: Path, *overrides: str, resume: bool = False) -> list[dict]:
    """Trains in a folder, or goes on there; the rows of the run's steps."""
    x = experiment(compose([*FAST, *overrides]))
    train_in(
        x, load_tasks(x), folder, started=0.0, resume=folder / "checkpoints" if resume else None
    )
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if "reward/mean" in row]


def checkpoint(folder: Path, step: int) -> dict:
    return torch.load(folder / "checkpoints" / f"step_{step:06d}.ckpt", weights_only=True)


def equal(ours, theirs) -> bool:
    """Nested containers of tensors and plain values, bit for bit."""
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(
            equal(value, theirs[key]) for key, value in ours.items()
        )
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(
            equal(a, b) for a, b in zip(ours, theirs, strict=True)
        )
    return ours == theirs or (ours != ours and theirs != theirs)


def without_clock(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]


@pytest.mark.slow
def test_packing_and_the_work_outside_the_model_are_in_every_row(ppo):
    """The siblings of a prompt share it."""
    for row in ppo[1]:
        assert 0 < row["perf/shared_frac"] < 1 and 0 <= row["perf/padding_frac"] < 1
        assert 0 < row["perf/outside_model_frac"] < 1
        parts = row["perf/generate_s"] + row["perf/reward_s"] + row["perf/update_s"]
        assert row["perf/model_s"] < parts <= row["perf/step_s"]


# --------------------------------------------------------------------------------- dynamic sampling


@pytest.mark.slow
def test_prompts_without_signal_are_replaced_until_there_are_enough(tmp_path):
    rows = train(
        tmp_path / "run",
        "algorithm/group_filter=mixed",
        "algorithm.max_refills=8",
        "trainer.steps=2",
        "seed=2",
    )
    for row in rows:
        assert row["group/sampled"] >= 2 and row["batch/rollouts"] == 4
        assert row["group/acceptance_rate"] == pytest.approx(2 / row["group/sampled"])
        assert row["group/frac_mixed"] == pytest.approx(
            row["group/acceptance_rate"]
        )  # metrics are of all that was sampled
    assert max(row["group/sampled"] for row in rows) > 2


@pytest.mark.slow
def test_remax_plays_each_prompt_once_more_and_trains_on_none_of_it(tiny):
    """The baseline is the score of the greedy reply, alike for the samples of a prompt; the samples
    are those of a run without it."""
    from rlkit.episodes import assemble, collect
    from rlkit.episodes.stream import StreamState, take
    from rlkit.rewards import score
    from rlkit.training.groups import experience

    x, plain = (
        experiment(compose([*FAST, *MIXED, f"algorithm={name}"])) for name in ("remax", "reinforce")
    )
    tasks = load_tasks(x).train
    sampled, trained, _ = experience(x, tiny, tasks, StreamState(), step=0)
    others, *_ = experience(plain, tiny, tasks, StreamState(), step=0)
    ids = [
        [[step.response_ids for step in r.steps] for r in rollouts]
        for rollouts in (sampled, others)
    ]
    assert ids[0] == ids[1] and len(sampled) == len(trained) == 16
    drawn, _ = take(tasks, StreamState(), 2, seed=3)
    params = x.generation.params | {"temperature": 0.0}
    greedy = score(collect(tiny, drawn, environment=x.environment, **params), x.reward)
    batch = assemble(trained, pad_token_id=tiny.pad_token_id)
    assert batch.greedy_rewards.tolist() == [greedy[r.group].total_reward for r in trained]
    assert assemble(others, pad_token_id=tiny.pad_token_id).greedy_rewards is None


@pytest.mark.slow
def test_the_cap_ends_the_refilling_and_what_is_there_is_trained_on(tmp_path):
    """No reward is ever given: every prompt is refused, the cap is reached, and nothing is trained
    on."""
    (row,) = train(
        tmp_path / "run",
        "algorithm/group_filter=mixed",
        "algorithm.max_refills=2",
        "trainer.steps=1",
        "reward=format",
        "reward.terms.format.fn.pattern=never",
        "kl=none",
        "reference=none",
        "trainer.micro_batch_tokens=64",
    )
    assert row["group/sampled"] == 2 * 3 and row["group/frac_mixed"] == 0
    assert row["optim/updates"] == 0 and row["optim/skipped_no_signal"] > 0


# ---------------------------------------------------------------------------------- ends and scores


@pytest.mark.slow
def test_rewards_are_trained_on_the_scale_of_the_run_and_logged_as_they_are(tmp_path):
    """Every episode has reward 1, so its raw advantage is 1; on the scale of the run there is
    nothing to learn."""
    always = [
        "reward=format",
        "reward.terms.format.fn.pattern=x",
        "reward.terms.format.fn.wrong=1.0",
        "algorithm/advantage=raw",
        "algorithm/normalization=none",
        "trainer.steps=1",
    ]
    (raw,) = train(tmp_path / "raw", *always, "kl=none", "reference=none")
    (scaled,) = train(
        tmp_path / "scaled", *always, "reward.normalize=true", "kl=none", "reference=none"
    )
    assert raw["reward/mean"] == scaled["reward/mean"] == 1.0 and raw["adv/mean"] == 1.0
    assert scaled["optim/skipped_no_signal"] > 0 and scaled["optim/updates"] == 0
    assert checkpoint(tmp_path / "scaled", 1)["rlkit"]["moments"] == [
        raw["batch/rollouts"],
        1.0,
        0.0,
    ]


@pytest.mark.slow
def test_updates_end_where_the_policy_has_moved_too_far(tmp_path):
    free = train(
        tmp_path / "free",
        "algorithm.epochs=4",
        "algorithm.minibatches=1",
        "trainer.steps=1",
        *MIXED,
    )
    held = train(
        tmp_path / "held",
        "algorithm.epochs=4",
        "algorithm.minibatches=1",
        "trainer.steps=1",
        "algorithm.target_kl=1e-7",
        *MIXED,
    )
    assert free[0]["optim/updates"] == 4 and free[0]["optim/ended_by_target_kl"] == 0
    assert (
        held[0]["optim/updates"] == 1 and held[0]["optim/ended_by_target_kl"] == 1
    )  # the first update starts at the old policy


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["reward", "reward_sequence"])
def test_a_kl_in_the_reward_is_no_term_of_the_loss_and_moves_the_advantages(tmp_path, placement):
    rows = train(
        tmp_path / "run",
        "kl=k1",
        f"kl.placement={placement}",
        "kl.coef=10",
        "trainer.steps=3",
        *MIXED,
    )
    assert (
        rows[0]["adv/mean"] == pytest.approx(rows[0]["adv/mean"]) and abs(rows[0]["kl/ref"]) < 1e-6
    )  # the policy is the reference
    assert rows[-1]["kl/ref_k3"] > 1e-5
    assert all(math.isfinite(row["loss/total"]) for row in rows)


@pytest.mark.slow
def test_an_exact_kl_trains(tmp_path):
    rows = train(tmp_path / "run", "kl=full", "trainer.steps=2", *MIXED)
    assert rows[0]["kl/estimate"] >= -1e-6 and rows[1]["kl/estimate"] > 1e-7


@pytest.mark.slow
def test_an_entropy_bonus_keeps_the_entropy_up(tmp_path):
    """The same run with and without: the same policy before the first update, another one after
    it."""
    common = ("kl=none", "reference=none", "algorithm.minibatches=1", "trainer.steps=3", *MIXED)
    plain, bonus = (
        train(tmp_path / "plain", *common),
        train(tmp_path / "bonus", *common, "algorithm.entropy_coef=1.0"),
    )
    assert bonus[0]["policy/entropy"] == pytest.approx(
        plain[0]["policy/entropy"], rel=1e-5
    )  # float32 sums
    assert bonus[-1]["policy/entropy"] > 1.5 * plain[-1]["policy/entropy"]


# ------------------------------------------------------------------------------------------ critics


# a length of its own: a run that is continued with more steps is exact
SPAN = "schedule.numbers.optimizer.lr.steps=20"
PPO = ["algorithm=ppo", "batch.group_size=4", "batch.prompts=4", "algorithm.minibatches=2", SPAN]


@pytest.fixture(scope="module")
def ppo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "ppo"
    return folder, train(folder, *PPO, "trainer.steps=3", "algorithm.critic.warmup=1")


@pytest.mark.slow
def test_the_critic_learns_alone_in_its_warm_up(ppo):
    _, rows = ppo
    first = rows[0]
    assert first["optim/updates"] == 0 and first["optim/critic_updates"] > 0
    assert rows[1]["optim/updates"] == rows[1]["optim/critic_updates"] > 0
    assert all(
        row["value/loss"] is not None and row["value/explained_variance"] is not None
        for row in rows
    )
    assert first["optim/critic_lr"] != first["optim/lr"]


@pytest.mark.slow
def test_the_policy_does_not_move_in_the_critics_warm_up(tmp_path, tiny):
    train(tmp_path / "run", *PPO, "trainer.steps=1", "algorithm.critic.warmup=1")
    state = checkpoint(tmp_path / "run", 1)["state_dict"]
    assert all(
        torch.equal(state[f"model.{name}"], tensor)
        for name, tensor in tiny.model.state_dict().items()
    )
    assert any(name.startswith("critic.") for name in state)


@pytest.mark.slow
def test_a_resumed_run_with_a_critic_is_the_same_run(ppo, tmp_path):
    folder, _ = ppo
    again = tmp_path / "again"
    train(again, *PPO, "trainer.steps=2", "algorithm.critic.warmup=1")
    train(again, *PPO, "trainer.steps=3", "algorithm.critic.warmup=1", resume=True)
    ours, theirs = checkpoint(again, 3), checkpoint(folder, 3)
    for key in ("state_dict", "optimizer_states", "rlkit"):
        assert equal(ours[key], theirs[key]), key


@pytest.mark.slow
def test_a_separate_critic_trains_its_own_trunk_and_not_the_policys(tmp_path, tiny):
    train(
        tmp_path / "run",
        *PPO,
        "algorithm/critic=separate",
        "trainer.steps=1",
        "algorithm.critic.warmup=1",
    )
    state = checkpoint(tmp_path / "run", 1)["state_dict"]
    base = dict(tiny.model.named_parameters())
    assert all(torch.equal(state[f"model.{name}"], tensor) for name, tensor in base.items())
    moved = [name for name in base if not torch.equal(state[f"critic.model.{name}"], base[name])]
    assert len(moved) > len(base) / 2


@pytest.mark.slow
def test_under_lora_the_critic_is_in_the_checkpoint_and_the_base_is_not(tmp_path):
    train(tmp_path / "run", *PPO, "model.lora.rank=4", "trainer.steps=1")
    names = checkpoint(tmp_path / "run", 1)["state_dict"].keys()
    assert any(name.startswith("critic.head.") for name in names)
    assert all("lora_" in name for name in names if name.startswith("model."))


# ------------------------------------------------------------------------------------------- phases


PHASED = [
    "schedule=reinforce_to_ppo",
    "schedule.phases.explore.until=1",
    "batch.group_size=4",
    "batch.prompts=4",
    SPAN,
    "kl/coef=adaptive",
    "kl.coef.steps=20",
]


@pytest.fixture(scope="module")
def phased(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "phased"
    return folder, train(
        folder, *PHASED, "trainer.steps=3", "schedule.phases.refine.algorithm.critic.warmup=1"
    )


@pytest.mark.slow
def test_the_second_phase_begins_with_its_critic(phased):
    folder, rows = phased
    assert [row["schedule/phase"] for row in rows] == [0, 1, 1]
    assert rows[0]["optim/critic_updates"] == 0 and rows[1]["optim/critic_updates"] > 0
    assert [row["optim/updates"] > 0 for row in rows] == [
        True,
        False,
        True,
    ]  # the critic's warm-up is the phase's first step
    switches = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text().splitlines()
        if "schedule/switch" in line
    ]
    assert len(switches) == 1 and switches[0]["step"] == 1
    assert (
        "explore → refine" in switches[0]["schedule/switch"]
        and "ppo" in switches[0]["schedule/switch"]
    )


@pytest.mark.slow
def test_every_scheduled_number_is_in_every_row(phased):
    _, rows = phased
    assert all({"schedule/optimizer.lr", "schedule/kl.coef"} <= row.keys() for row in rows)
    assert (
        rows[0]["schedule/kl.coef"] == rows[0]["kl/coef"]
        and rows[-1]["schedule/kl.coef"] != rows[0]["schedule/kl.coef"]
    )
    assert all(
        row["schedule/optimizer.lr"] == row["optim/lr"] for row in rows if row["optim/updates"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 2])
def test_a_run_that_is_resumed_at_or_behind_a_switch_is_the_same_run(phased, tmp_path, stop):
    folder, rows = phased
    again, warm = tmp_path / "again", "schedule.phases.refine.algorithm.critic.warmup=1"
    train(again, *PHASED, warm, f"trainer.steps={stop}")
    found = train(again, *PHASED, warm, "trainer.steps=3", resume=True)
    ours, theirs = checkpoint(again, 3), checkpoint(folder, 3)
    for key in ("state_dict", "optimizer_states", "rlkit"):
        assert equal(ours[key], theirs[key]), key
    assert equal(without_clock(found)[-1], without_clock(rows)[-1])


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 4])
def test_a_phase_of_its_own_reference_starts_it_from_the_policy_of_that_moment(tmp_path, lora):
    """Also a frozen one, under LoRA too: and a resumed run compares with the same reference."""
    own = [
        "schedule=on_reward",
        "schedule.phases.explore.until=1",
        "+kl@schedule.phases.refine.kl=k2",
        "+reference@schedule.phases.refine.reference=frozen",
        "schedule.phases.refine.reset=[optimizer]",
        f"model.lora.rank={lora}",
        *MIXED,
        SPAN,
    ]
    rows = train(tmp_path / "whole", *own, "trainer.steps=3")
    assert (
        abs(rows[1]["kl/ref_k3"]) < 1e-9 < rows[2]["kl/ref_k3"]
    )  # nothing moved since the phase began
    train(tmp_path / "again", *own, "trainer.steps=2")
    train(tmp_path / "again", *own, "trainer.steps=3", resume=True)
    ours, theirs = checkpoint(tmp_path / "again", 3), checkpoint(tmp_path / "whole", 3)
    for key in ("state_dict", "optimizer_states", "rlkit"):
        assert equal(ours[key], theirs[key]), key
