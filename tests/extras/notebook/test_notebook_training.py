"""There is one training loop: a notebook's gives the weights that `rlkit train` gives, with all
that a step of it knows."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from rlkit.config.compose import compose, experiment
from rlkit.config.problems.rows import load_tasks
from rlkit.episodes.stream import StreamState, take
from rlkit.notebook import (
    GenerationConfig,
    TrainingConfig,
    create_ema_updater,
    create_grpo_config,
    create_kl_updater,
    create_reference_model,
    load_model,
    load_tokenizer,
    train,
    training_iteration,
)
from rlkit.system import rng
from rlkit.training.run import train_in

COMMON = [
    "trainer.threads=1",
    "trainer.accelerator=cpu",
    "trainer.steps=3",
    "batch.prompts=4",
    "batch.group_size=4",
    "evaluation.n=0",
    "generation.max_new_tokens=32",
    "optimizer.lr=1e-3",
    "optimizer.betas=[0.9,0.999]",
    "schedule=constant",
    "logger=none",
    "task.max_samples=64",
    "algorithm/correction=none",
    "seed=3",
]
REFILLS = [
    "algorithm/group_filter=mixed",
    "algorithm.max_refills=2",
    "algorithm.epochs=3",
    "algorithm.target_kl=1e-3",
]
PPO = ["algorithm=ppo", "algorithm.critic.warmup=1", "algorithm.critic.optimizer.betas=[0.9,0.999]"]
EMA = ["reference=ema", "reference.decay=0.5", "kl=k3", "kl.coef=0.1"]
ON_KL = [
    "reference=on_kl",
    "reference.threshold=1e-6",
    "kl=k3",
    "kl.coef=0.1",
    "reward.normalize=true",
]


def model_of(x):
    """Model and tokenizer as a run of this experiment has them at its start."""
    torch.set_num_threads(1)
    rng.seed(x.seed)
    policy = x.model(device="cpu")
    return policy.model.eval(), policy.renderer.tokenizer


def settings(x):
    """The experiment as a notebook's configs, and the rest of its arguments."""
    rate = x.algorithm.critic.optimizer.keywords["lr"] if x.algorithm.critic.active else 0.0
    config = TrainingConfig(
        x.algorithm,
        learning_rate=x.optimizer.keywords["lr"],
        kl=x.kl,
        value_learning_rate=rate,
        max_grad_norm=x.trainer.max_grad_norm,
        group_size=x.batch.group_size,
        normalize_rewards=x.reward.normalize,
    )
    sampling = GenerationConfig(
        x.generation.max_new_tokens, x.generation.temperature, 1.0, 0, enable_thinking=None
    )
    return (
        sampling,
        config,
        {"environment": x.environment, "engine": x.generation.engine, "seed": x.seed},
    )


def by_runs(x, tasks, update_fn, tmp_path):
    """`train` of the notebook."""
    model, tokenizer = model_of(x)
    sampling, config, given = settings(x)
    states = []
    train(
        model,
        tasks,
        x.reward,
        x.trainer.steps,
        x.batch.prompts,
        use_ref_model=bool(update_fn),
        output_dir=tmp_path,
        gen_config=sampling,
        train_config=config,
        tokenizer=tokenizer,
        log_fn=states.append,
        optimizer_fn=partial(torch.optim.AdamW, weight_decay=0.0),
        **given,
        **({"ref_update_fn": update_fn} if update_fn else {}),
    )
    return model, states


def by_iterations(x, tasks, update_fn, tmp_path):
    """training_iteration on prompts that the notebook draws."""
    model, tokenizer = model_of(x)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=x.optimizer.keywords["lr"], weight_decay=0.0
    )
    sampling, config, given = settings(x)
    ref_model = create_reference_model(model) if update_fn else None
    stream, states = StreamState(), []
    for _ in range(x.trainer.steps):
        drawn, stream = take(tasks, stream, x.batch.prompts, seed=x.seed)
        states.append(
            training_iteration(
                model,
                tokenizer,
                drawn,
                sampling,
                config,
                x.reward,
                optimizer,
                ref_model,
                update_fn,
                **given,
            )
        )
    return model, states


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop, overrides, update_fn, seen",
    [
        (by_runs, [*REFILLS, "kl=none"], None, {"group/sampled": 4, "optim/ended_by_target_kl": 0}),
        (by_iterations, EMA, create_ema_updater(0.5), {"kl/ref_k3": 0}),
        (by_iterations, [*PPO, "kl=none"], None, {"value/loss": 0}),
        (by_runs, ["kl=none"], None, {"adv/std": 0}),
        (by_iterations, ["kl=none"], None, {"adv/std": 0}),
        (by_runs, [*PPO, *EMA, "kl.placement=reward"], create_ema_updater(0.5), {"value/loss": 0}),
        (by_runs, ON_KL, create_kl_updater(1e-6), {"kl/estimate": 1e-6}),
    ],
)
def test_a_notebook_gives_the_weights_of_a_run(loop, overrides, update_fn, seen, tmp_path):
    """`seen`: metric → what it exceeds in some step, so that what a case is about does happen in
    it."""
    x = experiment(compose([*COMMON, *overrides]))
    tasks = load_tasks(x)
    train_in(x, tasks, tmp_path, started=0.0, resume=None)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for name, bound in seen.items():
        assert any((row.get(name) or 0) > bound for row in rows), name
    run = torch.load(tmp_path / "checkpoints" / "step_000003.ckpt", weights_only=True)["state_dict"]
    model, ours = loop(x, tasks.train, update_fn, tmp_path / "notebook")
    assert all(
        torch.equal(value, run[f"model.{name}"]) for name, value in model.state_dict().items()
    )
    assert [state.step for state in ours] == [1, 2, 3]
    assert all(
        state.metrics["reward/mean"] == row["reward/mean"]
        for state, row in zip(ours, rows, strict=True)
    )


@pytest.mark.slow
def test_iterations_without_a_seed_take_each_prompt_once():
    """Each drew a seed of its own, while the place in the order went on: prompts came twice."""
    model, tokenizer = load_model("tiny", dtype="float32"), load_tokenizer("tiny")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    sampling = GenerationConfig(2, 1.0, 1.0, 0)
    config = create_grpo_config(0.0)._replace(group_size=2)
    seen = []

    def reward(rollout):
        seen.append(rollout.prompt)
        return float(len(seen) % 2)

    for _ in range(8):
        given = model, tokenizer, list("abcdefgh"), sampling, config, reward, optimizer
        training_iteration(*given, batch_size=1)
    assert len(set(seen[::2])) == 8
