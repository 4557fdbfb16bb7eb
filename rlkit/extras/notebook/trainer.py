"""Provide the PPO trainer of the chat and PPO notebook. Its updates are made by
`rlkit.training.learner.Learner`, so there is only one training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rlkit.functional as F
from rlkit.extras.notebook.borrowed import experiment
from rlkit.extras.notebook.chat import TEMPERATURE, LLMGenerator
from rlkit.extras.notebook.configs import make_core, squared
from rlkit.extras.notebook.data import Hook, TrainingConfig
from rlkit.extras.notebook.generation import begun
from rlkit.extras.notebook.manager import RLStepData, RolloutData, RolloutManager, core_rollout
from rlkit.training.experiment import Experiment, Sampling, TrainerSettings
from rlkit.training.learner import Learner
from rlkit.training.update.scored import compute_batch_logprobs
from rlkit.types import Estimate, Rollout


class SimpleValueHead(nn.Module):
    """Compute values from hidden states: [..., hidden] → [..., 1]."""

    def __init__(self, hidden_size: int):
        super().__init__()
        half = max(1, hidden_size // 2)
        self.value_head = nn.Sequential(nn.Linear(hidden_size, half), nn.ReLU(), nn.Linear(half, 1))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.value_head(hidden_states)


# ----------------------------------------------------------------------------------- what a loss is


def compute_advantages_and_returns(
    rollouts: Sequence[RolloutData], gamma: float = 0.99, lam: float = 0.95, use_gae: bool = True
) -> None:
    """Write `advantages` and `returns` into the steps, one number per step. They are computed by
    GAE over the steps, with the reward at the last step. Without use_gae, lam is 1."""
    for rollout in (r for r in rollouts if r.steps):
        steps: list[Any] = rollout.steps
        values = torch.tensor(
            [[_last(getattr(step, "values", None)) for step in steps]], dtype=torch.float64
        )
        rewards = torch.zeros_like(values)
        rewards[0, -1] = rollout.reward or 0.0
        at = torch.arange(len(steps))[None]
        mask = torch.ones(1, len(steps), dtype=torch.bool)
        given = torch.zeros(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64), at, mask
        advantages, returns = F.gae(
            rewards, values, *given, gamma=gamma, lam=lam if use_gae else 1.0
        )
        if rollout.reward is None:
            advantages = torch.zeros_like(values)
            returns = values
        for step, advantage, expected in zip(
            steps, advantages[0].tolist(), returns[0].tolist(), strict=True
        ):
            step.advantages = advantage
            step.returns = expected


def _last(values: Tensor | float | None) -> float:
    return 0.0 if values is None else float(torch.as_tensor(values).reshape(-1)[-1])


def compute_value_loss(
    values: Tensor,
    returns: Tensor,
    clip_value: bool = False,
    old_values: Tensor | None = None,
    clip_epsilon: float = 0.2,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Compute the mean squared distance of the values from the returns [B], and its statistics.
    With `clip_value`, the values are clipped around old_values.

    values, old_values: [B], [B, T] or [B, T, 1]. With T, the last value inside the mask [B, T] is
    used. clip_epsilon: largest distance from old_values, in units of reward.
    """
    if clip_value and old_values is None:
        raise ValueError("clip_value=True needs old_values, the values before the first update")
    values, old_values = (
        _of_last_token(values, mask),
        _of_last_token(values if old_values is None else old_values, mask),
    )
    returns = returns.to(values.device).reshape(values.shape)
    loss = squared(values, old_values, returns, clip=clip_epsilon if clip_value else None).mean()
    own = values.detach()
    stats = {
        "value_loss": float(loss.detach()),
        "value_mean": float(own.mean()),
        "returns_mean": float(returns.mean()),
    }
    return loss, stats | {"value_std": float(own.std(correction=min(1, len(own) - 1)))}


def _of_last_token(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return one value per sequence: [B], [B, T] or [B, T, 1] → [B]."""
    values = values[..., 0] if values.dim() == 3 else values
    if values.dim() == 1:
        return values
    last = (
        -1
        if mask is None
        else (mask.long() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)
    )
    return values[torch.arange(len(values), device=values.device), last]


def compute_kl_divergence(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Estimate KL(old ‖ new) from tokens sampled by the old policy: the mean of old - new, in nats
    per token."""
    return (old_logprobs - logprobs).mean()


# -------------------------------------------------------------------------------------- the trainer


class HeadOnStates(nn.Module):
    """Use a value head as the core's critic. It reads the policy's last hidden states, but passes
    no gradient to them."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor, packed: Any) -> Tensor:
        return self.head(hidden.detach().to(next(self.head.parameters()).dtype)).reshape(
            len(hidden)
        )


def advantages_of_steps(
    metadata: Sequence[Mapping[str, Any]],
    rollout_ids: Tensor,
    step_ids: Tensor,
    response_mask: Tensor,
) -> Estimate:
    """Read the advantages and returns from the rollouts' metadata, one number per step, and put
    each number on all tokens of its step [B, T]."""
    found = []
    for name in ("advantages", "returns"):
        numbers = nn.utils.rnn.pad_sequence(
            [torch.tensor([*m[name], 0.0], dtype=torch.float32) for m in metadata], batch_first=True
        )
        per_token = numbers.to(step_ids.device)[rollout_ids[:, None], step_ids]
        found.append(F.fill_masked(per_token, response_mask, 0.0))
    return Estimate(*found)


class RLTrainer:
    """Train with PPO on whole rollouts. Each iteration samples rollouts, computes rewards, values
    and advantages, and makes the updates. config: values for any keys of DEFAULTS. With
    save_interval=0, nothing is saved."""

    def __init__(self, model: Any, tokenizer: Any, value_head: nn.Module, config: dict[str, Any]):
        unknown = sorted({*config} - {*DEFAULTS})
        if unknown:
            raise ValueError(
                f"config: there is no {', '.join(unknown)}; there are {', '.join(DEFAULTS)}"
            )
        if any(
            p.requires_grad and p.dtype in (torch.float16, torch.bfloat16)
            for p in model.parameters()
        ):
            print(
                "RLTrainer: weights in half precision do not move at these learning rates; the"
                " model is now in float32"
            )
            model.float()
        self.model = model
        self.tokenizer = tokenizer
        self.value_head = value_head
        self.config = config
        self.settings: dict[str, Any] = {**DEFAULTS, **config}
        self.policy_optimizer = torch.optim.Adam(
            [p for p in model.parameters() if p.requires_grad], lr=self.settings["policy_lr"]
        )
        self.value_optimizer = torch.optim.Adam(
            value_head.parameters(), lr=self.settings["value_lr"]
        )
        self.training_stats: list[dict[str, Any]] = []
        self.generator = LLMGenerator(model, tokenizer, seed=self.settings["seed"])
        self.generator.temperature = self.settings["temperature"]
        self.learner = Learner(
            self._experiment(1, 1),
            self.generator.policy,
            critic=HeadOnStates(value_head),
            optimizers=(self.policy_optimizer, self.value_optimizer),
        )

    def _experiment(self, epochs: int, minibatches: int) -> Experiment:
        """Return the experiment for one step of the learner."""
        s = self.settings
        algorithm, _ = make_core(
            TrainingConfig("ppo", clip_range=s["clip_epsilon"], value_loss_coef=s["vf_coef"])
        )
        critic = algorithm.critic._replace(
            loss=partial(squared, clip=s["clip_epsilon"] if s["clip_value"] else None)
        )
        algorithm = algorithm._replace(
            advantage=advantages_of_steps, critic=critic, epochs=epochs, minibatches=minibatches
        )
        sampling = Sampling(self.generator.engine, s["temperature"], s["max_new_tokens"])
        limits = TrainerSettings(
            1,
            micro_batch_tokens=s["micro_batch_tokens"],
            max_grad_norm=s["max_grad_norm"] or float("inf"),
        )
        return experiment(
            self.generator.policy, algorithm, seed=s["seed"], generation=sampling, trainer=limits
        )

    def generate_with_values(
        self, prompts: Sequence[Any], max_new_tokens: int = 512, temperature: float | None = None
    ) -> tuple[list[tuple[str, str]], list[Tensor], list[Tensor], list[list[int]]]:
        """Sample replies. Return four lists: (thinking, content), log-probs [T], values [T] of the
        states before the tokens, and token ids [T]."""
        rollouts = begun(
            self.generator.policy, self.generator.replies(prompts, max_new_tokens, temperature)
        )
        steps = [r.steps[0] for r in rollouts]
        logprobs = [torch.tensor(s.logprobs) for s in steps]
        tokens = [list(s.response_ids) for s in steps]
        return [(s.thinking, s.content) for s in steps], logprobs, self._values(rollouts), tokens

    def _values(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Return the values [T] of the states before the sampled tokens, for rollouts with one
        step."""
        u = self.learner.record()
        batch = u.assemble_batch(rollouts)
        found: Any = compute_batch_logprobs(u, self.model, batch, critic=self.learner.critic).values
        return [values[mask].cpu() for values, mask in zip(found, batch.response_mask, strict=True)]

    def train_step(
        self, rollouts: Sequence[RolloutData], n_epochs: int = 4, batch_size: int = 32
    ) -> dict[str, float]:
        """Take one step of the learner on rollouts with advantages, and return its metrics. A
        minibatch consists of whole rollouts with about `batch_size` steps in total."""
        trained = [r for r in (core_rollout(r, group=i) for i, r in enumerate(rollouts)) if r.steps]
        if not trained:
            return {}
        steps = sum(len(r.steps) for r in trained)
        minibatches = max(1, min(len(trained), -(-steps // batch_size)))
        self.learner.settle(self._experiment(n_epochs, minibatches), exact=False)
        self.model.eval()  # without dropout, so sampler and trainer see the same policy
        row = self.learner.step(trained)
        self.generator.version = self.learner.rl_step
        named = {"policy_loss": row["loss/policy"], "value_loss": row["value/loss"]}
        named |= {
            "total_loss": row["loss/policy"] + self.settings["vf_coef"] * row["value/loss"],
            "approx_kl": row["kl/old"],
        }
        return named | {"clipfrac": row["clip/low_frac"] + row["clip/high_frac"]} | row

    def train(
        self,
        initial_prompts_generator: Callable[[int], Sequence[str]],
        reward_function: Callable[..., float | None],
        termination_function: Hook,
        prompt_generator_function: Callable[..., str | None],
        n_iterations: int = 10,
        n_rollouts_per_iter: int = 4,
        max_steps: int = 50,
    ) -> list[dict[str, Any]]:
        """Train for n_iterations. Return one row for each iteration so far, with iteration,
        rollout_summary and training_stats (the metrics of `train_step`)."""
        for _ in range(n_iterations):
            manager = RolloutManager(self.generator, n_rollouts_per_iter, max_steps)
            manager.initialize_rollouts(initial_prompts_generator(n_rollouts_per_iter))
            manager.run_rollouts(
                prompt_generator_function, termination_function, self.settings["max_new_tokens"]
            )
            manager.assign_rewards(reward_function)
            self.add_values(manager.rollouts)
            compute_advantages_and_returns(
                manager.rollouts, self.settings["gamma"], self.settings["lam"]
            )
            stats = self.train_step(
                manager.rollouts, self.settings["ppo_epochs"], self.settings["batch_size"]
            )
            iteration = len(self.training_stats) + 1
            summary = manager.get_rollout_summary()
            self.training_stats.append(
                {"iteration": iteration, "rollout_summary": summary, "training_stats": stats}
            )
            losses = "  ".join(
                f"{name} {stats.get(name, 0):.4f}"
                for name in ("policy_loss", "value_loss", "approx_kl")
            )
            print(
                f"iteration {iteration}  reward {summary['avg_reward']:.2f}  steps"
                f" {summary['avg_steps']:.2f}  {losses}"
            )
            if self.settings["save_interval"] and iteration % self.settings["save_interval"] == 0:
                self.save_checkpoint(f"checkpoint_iter_{iteration}.pt")
        return self.training_stats

    def add_values(self, rollouts: Sequence[RolloutData]) -> None:
        """Write the value of the state before the reply into each step, as `values` [1]."""
        steps = [
            s for r in rollouts for s in r.steps if isinstance(s, RLStepData) and s.response_tokens
        ]
        alone = [core_rollout(RolloutData(i, "", [s]), group=i) for i, s in enumerate(steps)]
        for step, values in zip(steps, self._values(alone) if alone else (), strict=True):
            step.values = values[:1]

    def save_checkpoint(self, filepath: str | Path) -> None:
        """Write everything that later iterations depend on. `load_checkpoint` continues from this
        file."""
        nets = {f"{name}_state_dict": getattr(self, name).state_dict() for name in SAVED}
        rest = {
            "training_stats": self.training_stats,
            "config": self.config,
            "calls": self.generator.calls,
        }
        torch.save({**nets, **rest, "learner": self.learner.save()}, filepath)

    def load_checkpoint(self, filepath: str | Path) -> None:
        """Load a checkpoint into a trainer with the same model and config. The trainer then
        continues with the same results, bit for bit."""
        kept = torch.load(
            filepath, weights_only=True, map_location=next(self.model.parameters()).device
        )
        for name in SAVED:
            getattr(self, name).load_state_dict(kept[f"{name}_state_dict"])
        self.learner.load({"rlkit": kept["learner"]})
        self.training_stats = kept["training_stats"]
        self.generator.calls = kept["calls"]
        self.generator.version = self.learner.rl_step


DEFAULTS: Mapping[str, Any] = {
    "policy_lr": 1e-5,
    "value_lr": 1e-4,
    "gamma": 0.99,
    "lam": 0.95,
    "clip_epsilon": 0.2,
    "vf_coef": 0.5,
    "max_grad_norm": 0.0,
    "ppo_epochs": 4,
    "batch_size": 32,
    "max_new_tokens": 512,
    "save_interval": 5,
    "clip_value": False,
    "temperature": TEMPERATURE,
    "seed": 0,
    "micro_batch_tokens": 16384,
}
SAVED = ("model", "value_head", "policy_optimizer", "value_optimizer")
INITIAL_PROMPTS = (
    "What is 17 times 24?",
    "Tell a short story.",
    "Explain how a bicycle stays upright.",
    "What is wrong with print(1?",
)


def generate_initial_prompts(n: int) -> list[str]:
    """Return n prompts, repeating four examples (an example of an initial_prompts_generator)."""
    return list(islice(cycle(INITIAL_PROMPTS), n))
