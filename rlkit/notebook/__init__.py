"""The author's notebook signatures, lifted onto the core: plain functions of models, tokenizers and lists of rollouts, without Hydra.

No maths stands here: every function arranges tensors and calls the core. In this package `[B, T]` means B rollouts × the tokens that
each sampled, in the order of time and filled up on the right (`stack_rollouts`); prompts and tool results are not among them.

The hooks and their signatures head docs/notebooks.md.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "rlkit.notebook.algorithms": (
        "PairSelector", "compute_advantages", "compute_grpo_loss", "compute_pairwise_loss",
        "compute_policy_gradient_loss",
    ),
    "rlkit.notebook.chat": (
        "LLMGenerator", "ToolUseLLM", "batch_history", "calculate", "create_batch", "execute_tool_call", "generate_templates",
        "get_weather", "has_tool_call", "parse_tool_calls", "res",
    ),
    "rlkit.notebook.checkpoints": ("Checkpoint", "load_checkpoint", "plot_training", "save_checkpoint"),
    "rlkit.notebook.configs": (
        "CONFIGS", "TrainingConfig", "create_dapo_config", "create_grpo_config", "create_pairwise_config", "create_ppo_config",
        "create_switch_strategy", "get_algorithm_config",
    ),
    "rlkit.notebook.data": (
        "TRAINING", "Conversation", "GenerationConfig", "Prompt", "StepView", "TextGeneration", "TrainingState", "update_ema_metrics",
        "view_steps",
    ),
    "rlkit.notebook.generation": (
        "format_prompt", "generate_text", "generate_with_values", "load_model", "load_tokenizer", "parse_thinking",
    ),
    "rlkit.notebook.kl": (
        "KLHook", "UpdateHook", "compute_forward_kl", "compute_kl", "compute_reverse_kl", "confident_share",
        "create_adaptive_kl", "create_ema_updater", "create_kl_updater", "create_periodic_updater", "create_reference_model",
        "create_truncated_kl", "lift_update", "truncated_kl", "update_reference_model",
    ),
    "rlkit.notebook.manager": (
        "RLStepData", "RolloutData", "RolloutManager", "StepData", "dummy_prompt_generator", "dummy_reward_function",
        "dummy_termination_check",
    ),
    "rlkit.notebook.rewards": (
        "aggregate_vector_rewards", "compute_scalar_reward", "compute_vector_reward", "exact_match_reward", "format_reward",
        "length_penalty", "tool_band_reward", "tool_usage_reward",
    ),
    "rlkit.notebook.rollouts": (
        "INITIAL_PROMPTS", "assign_rewards", "check_termination_conditions", "create_batch_rollouts", "create_environment",
        "create_multiturn_rollout", "create_random_termination", "create_rollout", "early_or_long", "execute_step",
        "get_rollout_summary", "initial_prompts", "initialize_rollouts", "run_rollouts",
    ),
    "rlkit.notebook.tensors": ("score_batch",),
    "rlkit.notebook.stacked": ("attach_logprobs", "same_rollouts", "stack_rollouts"),
    "rlkit.notebook.tokens": ("compute_logprobs_for_tokens",),
    "rlkit.notebook.trainer": (
        "RLTrainer", "SimpleValueHead", "compute_advantages_and_returns", "compute_kl_divergence", "compute_ppo_loss", "compute_value_loss",
        "generate_initial_prompts",
    ),
    "rlkit.notebook.training": ("train_model", "training_iteration", "update_policy"),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rlkit.notebook' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)
