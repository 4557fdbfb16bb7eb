"""One whole training_step on CUDA with a Qwen3-shaped model of random weights and LoRA. Needs
torch, transformers, lightning, peft.

On a machine without pytest-xdist: pytest -o addopts= -m gpu tests/gpu.
"""

from __future__ import annotations

import math
import shutil

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def random_qwen3(tmp_path_factory):
    """Four layers of Qwen3-0.6B's width, random weights, the tiny model's tokenizer and
    template."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rlkit.models.load import TINY

    folder = tmp_path_factory.mktemp("qwen3")
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    config = Qwen3Config.from_pretrained(TINY)
    config.update(
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        }
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def test_one_training_step_with_lora(random_qwen3):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    import lightning as L

    from rlkit import Experiment, load_policy
    from rlkit.algorithm import KL, Algorithm
    from rlkit.engines import Transformers
    from rlkit.environments import calculator, tool_use
    from rlkit.functional import (
        clipped,
        group_mean,
        k3,
        keep_all,
        normalize_group,
        sequence_mean,
        token_ratio,
    )
    from rlkit.models import LoRA
    from rlkit.rewards import Reward, Term, weighted_sum
    from rlkit.tasks import arithmetic
    from rlkit.training.ahead.here import Here
    from rlkit.training.experiment import (
        BatchSize,
        Evaluation,
        ModelSpec,
        Sampling,
        TaskSource,
        TrainerSettings,
    )
    from rlkit.training.module import RLModule
    from rlkit.training.references import frozen

    length = Reward(
        "length",
        {"length": Term(1.0, lambda rollout: float(rollout.response_length))},
        weighted_sum,
    )  # random weights solve nothing
    policy = load_policy(path=str(random_qwen3), lora=LoRA(rank=16), device="cuda")
    assert policy.model.get_base_model().model.embed_tokens.weight.dtype == torch.bfloat16
    import functools

    x = Experiment(
        name="gpu",
        seed=0,
        batch=BatchSize(2, 4),
        task=TaskSource(arithmetic),
        environment=tool_use(tools={"calculator": calculator}),
        model=ModelSpec(load_policy),
        generation=Sampling(Transformers(), max_new_tokens=16),
        reward=length,
        algorithm=Algorithm(
            "grpo", group_mean, token_ratio, clipped, sequence_mean, keep_all, normalize_group
        ),
        kl=KL("k3", k3, coef=0.1),
        reference=frozen(),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-4),
        trainer=TrainerSettings(steps=1),
        evaluation=Evaluation(length, n=0),
    )
    tasks = arithmetic(max_samples=8)
    module = RLModule(x, policy, tasks, source=Here(x, tasks))
    before = {
        n: p.detach().cpu().clone() for n, p in policy.model.named_parameters() if p.requires_grad
    }
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(module)
    after = dict(policy.model.named_parameters())  # on the CPU, where Lightning leaves them
    assert module.rl_step == 1 and any(not torch.equal(before[n], after[n]) for n in before)
    assert module.metrics["ratio/first_mean"] == pytest.approx(1.0, abs=1e-6)
    # rounding of a bfloat16 base of four layers
    assert module.metrics["mismatch/logp_abs_mean"] < 0.05
    assert math.isfinite(module.metrics["optim/grad_norm"]) and module.metrics[
        "kl/ref"
    ] == pytest.approx(0.0, abs=0.05)
