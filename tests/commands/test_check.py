"""`rlkit check` takes one real step and leaves nothing; `rlkit doctor` shows what a machine lacks
instead of failing on it."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from email.message import Message
from types import SimpleNamespace

import pytest
import torch

from rlkit.commands import check, doctor
from rlkit.commands.cli import main
from rlkit.config.compose import compose, experiment
from rlkit.config.problems.rows import load_tasks
from rlkit.config.problems.schedules import build_first_steps


@pytest.fixture(scope="module")
def checked():
    """The report of a check, and what it printed."""
    x = experiment(
        compose(["algorithm=ppo", "task.max_samples=40", "trainer.micro_batch_tokens=1000"])
    )
    printed = io.StringIO()
    with redirect_stdout(printed):
        report = check.run(build_first_steps(x)[""], load_tasks(x))
    return report, printed.getvalue()


@pytest.fixture
def report(checked):
    return checked[0]


@pytest.mark.slow
def test_one_step_of_policy_and_critic_was_taken(report):
    assert (
        report.metrics["optim/updates"] == report.metrics["optim/critic_updates"] == 1
        and report.metrics["optim/grad_norm"] > 0
    )
    assert all(0 <= r.reward <= 1 for r in report.rollouts) and report.warnings == []


def test_memory_is_counted(report, tiny):
    """Every term by hand for the embedded model: its weights once more as the reference, two
    moments each, and a value head."""
    size = sum(p.numel() for p in tiny.model.parameters()) * 4
    assert 0 < report.memory.weights - size < 100_000  # the value head
    assert report.memory.gradients == pytest.approx(
        report.memory.weights, rel=1e-3
    )  # buffers have none
    assert report.memory.reference == pytest.approx(size, rel=1e-3)
    assert report.memory.optimizer == pytest.approx(
        2 * report.memory.weights, rel=1e-3
    )  # and a step counter a tensor
    assert report.memory.peak > sum(report.memory[:4])


def test_the_header_tells_whether_activations_are_kept(checked):
    """1,000 tokens, as trainer.micro_batch_tokens allows; whole rollouts."""
    (line,) = [own for own in checked[1].splitlines() if own.startswith("activations: ")]
    tokens = int(line.split(" tokens")[0].split()[-1].replace(",", ""))
    assert line.startswith("activations: kept (one micro-batch of ") and 500 < tokens <= 1000


def test_shared_storage_counts_once():
    a = torch.zeros(10)
    assert check.count_bytes([a, {"view": a[:2]}, (torch.zeros(3),)]) == 52


@pytest.mark.slow
def test_rewards_that_are_all_equal_are_spread_for_the_update(capsys, tmp_path, monkeypatch):
    """One right answer a group teaches nothing; then a broken update would pass unseen."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text("def always(rollout):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [
        "reward=numeric",
        "reward.terms.numeric.fn._target_=my_rewards.always",
        "kl=none",
        "reference=none",
        "task.max_samples=40",
    ]
    assert main(["check", *words]) == 0
    said = capsys.readouterr().out
    assert (
        "1.00 (numeric 1.00)" in said
        and "tried with 0 and 1 in turn" in said
        and "gradient norm" in said
        and "ready" in said
    )
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")]


@pytest.mark.slow
def test_demonstrations_are_checked_without_a_reward(capsys, tmp_path, monkeypatch):
    """They are not scored, so there is no first rollout to read the terms from."""
    monkeypatch.chdir(tmp_path)
    talk = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    row = json.dumps({"messages": talk}) + "\n"
    (tmp_path / "rows.jsonl").write_text(20 * row)
    assert main(["check", "experiment=sft", "task.path=rows.jsonl"]) == 0
    said = capsys.readouterr().out
    assert " 4 episodes, " in said and "gradient norm" in said
    assert "can be scored" not in said and said.endswith("with the same overrides\n")


@pytest.mark.parametrize(
    "words, expected",
    [(["-m", "seed=1,2"], "one run at a time"), (["kl.coef=x"], "kl.coef")],
    ids=str,
)
def test_check_refuses_as_train_does(words, expected, capsys):
    assert main(["check", *words]) == 2 and expected in capsys.readouterr().err


def test_the_doctor_finds_this_machine_ready(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for word in (
        "python",
        "torch",
        "devices",
        "sandbox",
        "disk",
        "embedded model",
        "ready: rlkit train",
    ):
        assert word in said


def test_what_fails_is_a_finding(monkeypatch, capsys):
    """A machine that lacks something is what the command is for."""
    requires = ["torch>=99", "no-such-package>=1", "hydra-core>=1", "gone>=1; extra == 'gym'"]
    own = SimpleNamespace(name="ours", version="1", requires=requires, metadata=Message())
    monkeypatch.setattr("rlkit.errors.find_distribution", lambda: own)
    monkeypatch.setattr(doctor, "check_devices", lambda: 1 / 0)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    bad = [line.split()[1] for line in lines if line.startswith("BAD")]
    assert (
        {"torch", "no-such-package"} <= set(bad)
        and "not ready: " in lines[-1]
        and "gone" not in "".join(bad)
    )
    assert any("ZeroDivisionError" in line for line in lines)


def test_a_card_without_the_forecast_is_refused_with_the_extra_it_needs(monkeypatch, capsys):
    monkeypatch.setattr(check, "load_command", lambda name: None)
    assert main(["check", "check.device=h200"]) == 2
    assert "needs the extra 'forecast'" in capsys.readouterr().err
