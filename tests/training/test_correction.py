"""algorithm/correction=auto: settled by the check before the first step, said, kept on resume, and
without effect where nothing differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlkit.config.compose import compose, experiment
from rlkit.config.problems.rows import load_tasks
from rlkit.functional import no_correction, sequence_correction, token_correction
from rlkit.training import selfcheck
from rlkit.training.experiment import describe_correction, settle_correction
from rlkit.training.run import train_in
from rlkit.training.schedules import list_phases

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


def run(folder: Path, *overrides: str, resume: bool = False) -> tuple[list[dict], dict]:
    """The rows of a run without its clock, and its last checkpoint."""
    x = experiment(compose([*FAST, *overrides]))
    train_in(
        x, load_tasks(x), folder, started=0.0, resume=folder / "checkpoints" if resume else None
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    state = torch.load(sorted((folder / "checkpoints").glob("*.ckpt"))[-1], weights_only=True)
    return [
        {k: v for k, v in row.items() if not k.startswith("perf/")}
        for row in rows
        if "reward/mean" in row
    ], state


@pytest.mark.slow
@pytest.mark.parametrize("exact, wanted", [(True, no_correction), (False, token_correction)])
def test_auto_is_settled_in_every_phase_and_a_choice_of_ones_own_stays(exact, wanted):
    x = experiment(compose(["schedule=grpo_to_dapo", "schedule.phases.explore.until=2"]))
    assert [
        p.algorithm.correction for p in list_phases(settle_correction(x, exact=exact)).values()
    ] == [
        wanted,
        wanted,
    ]
    own = experiment(compose(["algorithm/correction=sequence_mask"]))
    settled = settle_correction(own, exact=exact)
    assert (
        settled.algorithm.correction.func is sequence_correction
        and describe_correction(own, exact=exact) == ""
    )


@pytest.mark.slow
def test_an_engine_that_agrees_is_not_corrected_and_the_run_is_bit_for_bit_the_uncorrected_one(
    tmp_path, capsys
):
    rows, state = run(tmp_path / "auto", "trainer.steps=2")
    assert (
        "correction: none (auto: in float32 the engine gives the log-probs of the trainer)"
        in capsys.readouterr().out
    )
    without, bare = run(tmp_path / "none", "trainer.steps=2", "algorithm/correction=none")
    assert "correction:" not in capsys.readouterr().out
    assert json.dumps(rows) == json.dumps(without)  # so that nan equals nan
    assert all(
        torch.equal(state["state_dict"][name], bare["state_dict"][name])
        for name in bare["state_dict"]
    )


@pytest.mark.slow
def test_an_engine_that_rounds_differently_is_corrected_and_a_resumed_run_keeps_what_it_had(
    tmp_path, capsys, monkeypatch
):
    """In half precision engine and trainer differ; that the next machine computes in float32
    changes nothing in the middle of a run."""
    check = selfcheck.check_policy
    monkeypatch.setattr(
        selfcheck, "check_policy", lambda *inputs: check(*inputs)._replace(exact=False)
    )
    _, state = run(tmp_path / "run", "trainer.steps=1", "algorithm.minibatches=1")
    assert (
        "correction: token_truncate, cap 2 (auto: " in capsys.readouterr().out
        and not state["rlkit"]["exact"]
    )
    monkeypatch.setattr(selfcheck, "check_policy", check)
    rows, state = run(tmp_path / "run", "trainer.steps=2", "algorithm.minibatches=1", resume=True)
    assert (
        "resume: correction: token_truncate, cap 2, as when the run began"
        in capsys.readouterr().out
    )
    assert not state["rlkit"]["exact"] and len(rows) == 2
