"""How far the policy moves: KL after a step's last update, and from the start of the run, without a
copy of the weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from rlkit.config.compose import compose, experiment
from rlkit.config.problems.rows import load_tasks
from rlkit.training.reference_states import ReferenceStates
from rlkit.training.run import train_in
from rlkit.training.update import drift
from rlkit.training.update.split import select
from rlkit.types import Batch

FAST = [
    "debug=fast",
    "trainer.accelerator=cpu",
    "logger=none",
    "evaluation.n=0",
    "optimizer.lr=1e-3",
    "task.max_samples=64",
    "generation.max_new_tokens=32",
    "batch.group_size=8",
    "batch.prompts=2",
    "seed=3",
]


def run(folder: Path, *overrides: str, resume: bool = False) -> list[dict]:
    x = experiment(compose([*FAST, *overrides]))
    train_in(
        x, load_tasks(x), folder, started=0.0, resume=folder / "checkpoints" if resume else None
    )
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if not k.startswith("perf/")}
        for row in found
        if "reward/mean" in row
    ]


@pytest.mark.slow
def test_the_last_update_is_in_the_kl_of_the_step_and_the_kl_before_each_update_is_not(tmp_path):
    """With one update a step kl/old is 0 by its definition, however far that update went."""
    rows = run(tmp_path / "one", "algorithm.minibatches=1", "trainer.steps=2")
    moved = [row for row in rows if row["optim/updates"]]
    assert moved and all(abs(row["kl/old"]) < 1e-9 < 1e-7 < row["kl/step"] for row in moved)


@pytest.mark.slow
def test_drift_from_the_start_is_measured_where_no_reference_stays_there(tmp_path):
    """A reference that is copied after every step is never away; the first step moves as far from
    the start as from before it."""
    for name, overrides in {
        "moving": ["reference=periodic", "reference.every=1"],
        "none": ["kl=none", "reference=none"],
    }.items():
        rows = run(tmp_path / name, *overrides, "trainer.steps=2")
        assert rows[0]["kl/start"] == pytest.approx(
            rows[0]["kl/step"], rel=1e-3
        )  # the same rollouts, in passes of their own
        assert all(row["kl/start"] > 1e-4 > (row["kl/ref_k3"] or 0) for row in rows)


@pytest.mark.slow
def test_where_the_reference_is_the_start_kl_ref_says_it_at_no_cost(tmp_path):
    rows = run(tmp_path / "run", "trainer.steps=2")
    state = torch.load(
        sorted((tmp_path / "run" / "checkpoints").glob("*.ckpt"))[-1], weights_only=True
    )
    assert all(row["kl/start"] is None for row in rows) and state["rlkit"]["start"] is None


@pytest.mark.slow
def test_a_reference_that_a_phase_starts_again_is_not_the_start(tiny):
    """kl/start was missing, and kl/ref was read as the distance from the start."""
    words = ["schedule=on_reward", "kl=k3"]
    for reset, expected in (("optimizer", [True, True]), ("reference", [True, False])):
        x = experiment(compose([*words, f"schedule.phases.refine.reset=[{reset}]"]))
        kept = ReferenceStates(x, tiny.model)
        assert [kept.measures_drift(*phase) for phase in kept.phases.items()] == expected


@pytest.mark.slow
def test_a_resumed_run_measures_from_the_same_start(tmp_path):
    words = (
        "kl=none",
        "reference=none",
        "schedule=constant",
    )  # a schedule would follow the length of the run
    whole = run(tmp_path / "whole", *words, "trainer.steps=3")
    run(tmp_path / "parts", *words, "trainer.steps=2")
    parts = run(tmp_path / "parts", *words, "trainer.steps=3", resume=True)
    assert [row["kl/start"] for row in parts] == [row["kl/start"] for row in whole]
    assert all(math.isfinite(row["kl/start"]) for row in whole)


@pytest.mark.slow
def test_the_log_probs_of_a_steps_only_update_are_those_of_the_policy_before_it(
    tmp_path, monkeypatch
):
    """A pass before the update gives the same figure; the two differ by the rounding of other
    widths."""
    words = (
        "kl=none",
        "reference=none",
        "algorithm.minibatches=1",
        "trainer.steps=2",
        "trainer.micro_batch_tokens=300",
    )
    once = run(tmp_path / "once", *words)
    monkeypatch.setattr("rlkit.training.update.drift.updates_once", lambda u, batch: False)
    apart = run(tmp_path / "apart", *words)
    assert all(row["kl/step"] > 1e-6 for row in once)
    assert [row["kl/step"] for row in once] == pytest.approx(
        [row["kl/step"] for row in apart], rel=0.01
    )


def test_log_probs_of_an_update_find_their_tokens_in_any_order_of_its_micro_batches():
    owners = torch.tensor([0, 1, 1, 2])  # the second rollout has two rows
    mask = torch.tensor(
        [[False, True, True], [True, True, False], [False, False, True], [False, True, False]]
    )
    wanted = torch.arange(12.0).view(4, 3) * mask
    parts = [torch.tensor([3]), torch.tensor([1, 2]), torch.tensor([0])]
    terms = {
        "owners": [owners[part][:, None].expand(-1, 3)[mask[part]].float() for part in parts],
        "logprobs": [wanted[part][mask[part]] for part in parts],
    }
    per_token, per_rollout = torch.zeros(4, 3), torch.zeros(3)
    batch = Batch(
        ids=per_token.long(),
        attention_mask=torch.ones(4, 3, dtype=torch.bool),
        response_mask=mask,
        sampled_mask=mask,
        rollout_ids=owners,
        step_ids=per_token.long(),
        rewards=per_rollout,
        group_ids=per_rollout.long(),
        truncated=per_rollout.bool(),
        lengths=per_rollout.long(),
        reply_lengths=per_rollout.long(),
        versions=per_token.long(),
        token_rewards=per_token,
        logprobs_sampler=per_token,
    )
    assert torch.equal(drift.add_terms(drift.Few(batch, None), terms).logprobs, wanted)
    few = select(batch, torch.tensor([1, 2]))
    assert torch.equal(drift.add_terms(drift.Few(few, None), terms).logprobs, wanted[1:3])
