"""There is one training loop: a notebook's gives the weights that `rlkit train` gives, with all that a step of it knows."""

from __future__ import annotations

import json

import pytest
import torch

from rlkit import (
    TrainingConfig,
    TrainingState,
    create_ema_updater,
    create_kl_updater,
    create_reference_model,
    load_checkpoint,
    train_model,
    training_iteration,
)
from rlkit.config.compose import compose, experiment
from rlkit.config.problems.rows import load_tasks
from rlkit.episodes.stream import StreamState, take
from rlkit.models import make_critic
from rlkit.system import rng
from rlkit.training.run import train_in

COMMON = [
    "trainer.threads=1", "trainer.accelerator=cpu", "trainer.steps=3", "batch.prompts=4", "batch.group_size=4", "evaluation.n=0",
    "generation.max_new_tokens=32", "optimizer.lr=1e-3", "optimizer.betas=[0.9,0.999]", "schedule=constant", "logger=none",
    "task.max_samples=64", "algorithm/correction=none", "seed=3",
]  # fmt: skip
REFILLS = ["algorithm/group_filter=mixed", "algorithm.max_refills=2", "algorithm.epochs=3", "algorithm.target_kl=1e-3"]
PPO = ["algorithm=ppo", "algorithm.critic.warmup=1", "algorithm.critic.optimizer.betas=[0.9,0.999]"]
EMA = ["reference=ema", "reference.decay=0.5", "kl=k3", "kl.coef=0.1"]
ON_KL = ["reference=on_kl", "reference.threshold=1e-6", "kl=k3", "kl.coef=0.1", "reward.normalize=true"]


def model_of(x):
    """Model and tokenizer as a run of this experiment has them at its start."""
    torch.set_num_threads(1)
    rng.seed(x.seed)
    policy = x.model(device="cpu")
    return policy.model.eval(), policy.renderer.tokenizer


def settings(x):
    """The experiment as a notebook's arguments."""
    rate = x.algorithm.critic.optimizer.keywords["lr"] if x.algorithm.critic.active else 0.0
    config = TrainingConfig(
        x.algorithm, x.kl, x.optimizer.keywords["lr"], rate, x.trainer.max_grad_norm, x.batch.group_size, x.reward.normalize
    )
    given = {"environment": x.environment, "generate": x.generation.engine, "max_new_tokens": x.generation.max_new_tokens}
    return given | {"config": config, "seed": x.seed}


def by_runs(x, tasks, update_fn, tmp_path):
    """train_model, and once more from its checkpoint of the first step."""
    model, tokenizer = model_of(x)
    given = settings(x) | {"ref_update_fn": update_fn} | {"batch_size": x.batch.prompts, "output_dir": tmp_path, "progress": None}
    _, rows = train_model(model, tokenizer, tasks, x.reward, steps=x.trainer.steps, save_every=1, **given)
    if x.reference.name != "on_kl":  # the KL that has added up is the updater's
        again = load_checkpoint(tmp_path / "step_000001")
        train_model(again.model, again.tokenizer, tasks, x.reward, steps=x.trainer.steps, state=again.state, **given)
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.model.state_dict().items())
    return model, rows


def by_iterations(x, tasks, update_fn, tmp_path):
    """training_iteration on prompts that the notebook draws."""
    model, tokenizer = model_of(x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=x.optimizer.keywords["lr"], weight_decay=0.0)
    given = settings(x) | {"reward_fn": x.reward}
    if update_fn is not None:
        given |= {"ref_model": create_reference_model(model), "ref_update_fn": update_fn}
    if x.algorithm.critic.active:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(x.seed)
            given["critic"] = make_critic(model, model="head")
        optimizer.add_param_group({"params": list(given["critic"].parameters()), "lr": given["config"].value_learning_rate})
    state, stream, rows = TrainingState(), StreamState(), []
    for _ in range(x.trainer.steps):
        drawn, stream = take(tasks, stream, x.batch.prompts, seed=x.seed)
        state, rollouts = training_iteration(model, tokenizer, drawn, optimizer, state, **given)
        assert [r.task for r in rollouts] == [task for task in drawn for _ in range(x.batch.group_size)]
        rows.append(state.metrics)
    return model, rows


@pytest.mark.parametrize(
    "loop, overrides, update_fn, seen",
    [
        (by_runs, [*REFILLS, "kl=none"], None, {"group/sampled": 4, "optim/ended_by_target_kl": 0}),
        pytest.param(by_iterations, EMA, create_ema_updater(0.5), {"kl/ref_k3": 0}, marks=pytest.mark.slow),
        (by_iterations, [*PPO, "kl=none"], None, {"value/loss": 0}),
        pytest.param(by_runs, ["kl=none"], None, {"adv/std": 0}, marks=pytest.mark.slow),
        pytest.param(by_iterations, ["kl=none"], None, {"adv/std": 0}, marks=pytest.mark.slow),
        pytest.param(by_runs, [*PPO, *EMA, "kl.placement=reward"], create_ema_updater(0.5), {"value/loss": 0}, marks=pytest.mark.slow),
        pytest.param(by_runs, ON_KL, create_kl_updater(1e-6), {"kl/estimate": 1e-6}, marks=pytest.mark.slow),
    ],
)
def test_a_notebook_gives_the_weights_of_a_run(loop, overrides, update_fn, seen, tmp_path):
    """`seen`: metric → what it exceeds in some step, so that what a case is about does happen in it."""
    x = experiment(compose([*COMMON, *overrides]))
    tasks = load_tasks(x)
    train_in(x, tasks, tmp_path, started=0.0, resume=None)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for name, bound in seen.items():
        assert any((row.get(name) or 0) > bound for row in rows), name
    run = torch.load(tmp_path / "checkpoints" / "step_000003.ckpt", weights_only=True)["state_dict"]
    model, ours = loop(x, tasks.train, update_fn, tmp_path / "notebook")
    assert all(torch.equal(value, run[f"model.{name}"]) for name, value in model.state_dict().items())
    assert len(ours) == 3 and all(row["reward/mean"] == theirs["reward/mean"] for row, theirs in zip(ours, rows, strict=True))
