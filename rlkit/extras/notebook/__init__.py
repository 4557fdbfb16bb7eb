"""Provide the functions of the project's first documents under the names used there. They are built
on `collect`, `play` and `Learner.step`.

The core has the only episode loop and the only training loop. This package turns arguments and
hooks into parts of the core, and episodes of the core into rollouts in the documents' form
(`rlkit.extras.notebook.views`). Users import these names from `rlkit.notebook`. docs/notebooks.md
lists the differences from the documents, name by name.

Each file imports only files before it in this list: arguments, borrowed, data, checkpoints,
configs, kl, rewards, views, algorithms, generation, chat, hooks, rollouts, manager, training,
trainer.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from rlkit.extras.notebook.arguments import explain_arguments

_HOMES = {
    "algorithms": (
        "compute_advantages compute_dapo_loss compute_policy_gradient_loss compute_ppo_loss"
    ),
    "chat": (
        "LLMGenerator ToolUseLLM batch_history calculate create_batch execute_tool_call"
        " generate_templates get_weather has_tool_call parse_tool_calls res"
    ),
    "checkpoints": "Checkpoint load_checkpoint save_checkpoint",
    "configs": "create_dapo_config create_grpo_config create_ppo_config get_algorithm_config",
    "data": (
        "Batch Conversation Generation GenerationConfig Message Rollout TrainingConfig"
        " TrainingState"
    ),
    "generation": (
        "QWEN3_THINK_END_TOKEN compute_logprobs_for_tokens format_prompt generate"
        " load_model load_tokenizer parse_thinking"
    ),
    "kl": (
        "compute_forward_kl compute_kl compute_reverse_kl create_adaptive_kl"
        " create_ema_updater create_kl_updater create_periodic_updater"
        " create_reference_model create_truncated_kl truncated_kl update_reference_model"
    ),
    "manager": (
        "RLStepData RolloutData RolloutManager StepData dummy_prompt_generator"
        " dummy_reward_function dummy_termination_check"
    ),
    "rewards": (
        "aggregate_vector_rewards compute_scalar_reward compute_vector_reward"
        " exact_match_reward format_reward length_penalty_reward max_aggregator"
        " mean_aggregator min_aggregator tool_usage_reward weighted_sum_aggregator"
    ),
    "rollouts": "create_batch_rollouts create_multiturn_rollout create_rollout",
    "trainer": (
        "RLTrainer SimpleValueHead compute_advantages_and_returns compute_kl_divergence"
        " compute_value_loss generate_initial_prompts"
    ),
    "training": "train training_iteration update_ema_metrics",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rlkit.notebook' has no attribute '{name}'")
    part = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return part if inspect.isclass(part) or not callable(part) else explain_arguments(part)
