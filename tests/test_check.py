"""`rlkit check` takes one real step and leaves nothing; `rlkit doctor` shows what a machine lacks instead of failing on it."""

from __future__ import annotations

from email.message import Message
from types import SimpleNamespace

import pytest
import torch

from rlkit.commands import check, doctor
from rlkit.commands.cli import main
from rlkit.config.compose import compose, experiment
from rlkit.config.problems.rows import load_tasks
from rlkit.config.problems.schedules import first_steps
from rlkit.episodes.stream import StreamState
from rlkit.training.experience import experience
from rlkit.training.learner import Learner


@pytest.fixture(scope="module")
def report():
    x = experiment(compose(["algorithm=ppo", "task.max_samples=40", "trainer.micro_batch_tokens=1000"]))
    return check.run(first_steps(x)[""], load_tasks(x))


def test_one_step_of_policy_and_critic_was_taken(report):
    assert report.metrics["optim/updates"] == report.metrics["optim/critic_updates"] == 1 and report.metrics["optim/grad_norm"] > 0
    assert all(0 <= r.reward <= 1 for r in report.rollouts) and report.warnings == []


def test_memory_is_counted(report, tiny):
    """Every term by hand for the embedded model: its weights once more as the reference, two moments each, and a value head."""
    size = sum(p.numel() for p in tiny.model.parameters()) * 4
    head = report.memory.weights - size
    assert 0 < head < 100_000
    assert report.memory.gradients == pytest.approx(report.memory.weights, rel=1e-3)  # buffers have none
    assert report.memory.reference == pytest.approx(size, rel=1e-3)
    assert report.memory.optimizer == pytest.approx(2 * report.memory.weights, rel=1e-3)  # and a step counter a tensor
    config = tiny.model.config
    assert check.cache_bytes(tiny.model) == 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    # more than the inputs and outputs of every layer, less than fifty times as much
    layers = 1000 * config.num_hidden_layers * config.hidden_size * 4
    assert 2 * layers < report.memory.saved < 100 * layers


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["algorithm=reinforce", "batch.prompts=32", "batch.group_size=1"],
        pytest.param(["generation.max_new_tokens=200", "generation.temperature=3", "batch.prompts=1"], marks=pytest.mark.slow),
        pytest.param(["algorithm=ppo", "algorithm/critic=separate"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_no_step_keeps_more_than_the_estimate(words):
    """The small step's rows share their prompts, and its replies are short: carried on from it, the estimate was too low for both."""
    shape = ["batch.prompts=4", "trainer.micro_batch_tokens=1000", "task.max_samples=40", "evaluation.n=0", "trainer.accelerator=cpu"]
    x = first_steps(experiment(compose([*shape, *words])))[""]
    tasks = load_tasks(x)
    bound = check.run(x, tasks).memory
    x = x._replace(trainer=x.trainer._replace(steps=1), callbacks={}, logger={})
    learner = Learner(x, x.model(device="cpu"))
    with check.saved_for_backward(learner.nets) as kept:
        sampled, trained, _ = experience(learner.begin(), learner.policy, tasks.train, StreamState(), step=0)
        learner.step(sampled, trained)
    assert learner.metrics["optim/updates"] and 0 < kept.peak <= bound.saved + bound.working
    if x.batch.group_size == 1:  # nothing to share, so the estimate has to be near
        assert kept.peak > bound.saved / 3


def test_gradient_checkpointing_still_keeps_inputs_and_one_layer(tiny):
    """Hooks see neither what a checkpoint holds, nor that a layer is run again in the backward pass."""
    x = experiment(compose(["task.max_samples=40"]))
    learner = Learner(x, x.model(device="cpu"))
    plain = check.saved_of_rows(learner, 1000, 100)
    learner.policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers, width = tiny.model.config.num_hidden_layers, tiny.model.config.hidden_size
    assert plain > check.saved_of_rows(learner, 1000, 100) > plain / layers + 4 * 1000 * layers * width
    assert check.saved_of_rows(learner, 1000, 100) == check.saved_of_rows(learner, 1000, 100)  # it is on again


def test_what_autograd_keeps_is_counted_while_it_keeps_it():
    """Two backward passes one after the other are at most as much as one."""
    layer = torch.nn.Linear(10, 10)
    with check.saved_for_backward(layer) as kept:
        for _ in range(2):
            (layer(torch.zeros(5, 10)).exp() * 1.0).sum().backward()
    assert kept.peak == 2 * 5 * 10 * 4 and kept.now == 0  # the input of the layer, and what exp gave


def test_shared_storage_counts_once():
    a = torch.zeros(10)
    assert check.size_of([a, {"view": a[:2]}, (torch.zeros(3),)]) == 52


def test_rewards_that_are_all_equal_are_spread_for_the_update(capsys, tmp_path, monkeypatch):
    """One right answer a group teaches nothing; then a broken update would pass unseen."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text("def always(rollout):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["reward=numeric", "reward.terms.numeric.fn._target_=my_rewards.always", "kl=none", "reference=none", "task.max_samples=40"]
    assert main(["check", *words]) == 0
    said = capsys.readouterr().out
    assert "1.00 (numeric 1.00)" in said and "0 and 1 in turn" in said and "gradient norm" in said and "ready" in said
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")]


@pytest.mark.parametrize("words, expected", [(["-m", "seed=1,2"], "one run at a time"), (["kl.coef=x"], "kl.coef")], ids=str)
def test_check_refuses_as_train_does(words, expected, capsys):
    assert main(["check", *words]) == 2 and expected in capsys.readouterr().err


def test_the_doctor_finds_this_machine_ready(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for word in ("python", "torch", "devices", "sandbox", "disk", "embedded model", "ready: rlkit train"):
        assert word in said


def test_what_fails_is_a_finding(monkeypatch, capsys):
    """A machine that lacks something is what the command is for."""
    requires = ["torch>=99", "no-such-package>=1", "hydra-core>=1", "gone>=1; extra == 'gym'"]
    own = SimpleNamespace(name="ours", version="1", requires=requires, metadata=Message())
    monkeypatch.setattr("rlkit.errors.distribution", lambda: own)
    monkeypatch.setattr(doctor, "devices", lambda: 1 / 0)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    bad = [line.split()[1] for line in lines if line.startswith("BAD")]
    assert {"torch", "no-such-package"} <= set(bad) and "not ready: " in lines[-1] and "gone" not in "".join(bad)
    assert any("ZeroDivisionError" in line for line in lines)
