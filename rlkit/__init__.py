"""rlkit: reinforcement learning of language models on multi-turn, tool-using tasks.

Every primitive is importable from here and works without Hydra: `from rlkit import collect, assemble, group_mean, k3, …`.
Nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "rlkit.types": (
        "Batch", "Controller", "Engine", "Environment", "Estimate", "Generation", "Message", "Policy", "Reference", "Rollout",
        "SamplingParams", "Scores", "Session", "Step", "Task", "ToolCall", "ToolResult",
    ),
    "rlkit.errors": ("ConfigError", "DataError", "Refusal", "RLKitError", "SelfCheckError", "TemplateError"),
    "rlkit.training.experiment": ("BatchSize", "Evaluation", "Experiment", "Sampling", "TrainerSettings"),
    "rlkit.algorithm": (
        "KL", "Algorithm", "Critic", "choose", "estimate_advantages", "micro_batches", "minibatches", "scale_tokens", "surrogate",
        "value_surrogate", "weigh",
    ),
    "rlkit.functional": (
        "all_pairs", "approximate_kl", "batch_mean", "best_minus_second", "best_worst", "chunked_log_probs", "cispo", "clip_fractions",
        "clipped", "clipped_squared_error", "confident", "cut_distribution", "explained_variance", "forward", "full", "gae", "gmpo",
        "group_mean", "gumbel_noise", "k1", "k2", "k3", "keep_all", "leave_one_out", "length_weighted", "log_ratio", "mask_truncated",
        "masked_mean", "max_rl", "mix", "mixed_groups", "normalize_batch", "normalize_group", "pairwise", "pairwise_loss",
        "pass_at_k_advantage", "prompt_mean", "raw", "reinforce", "reverse", "reward_to_go", "sapo", "sequence_correction",
        "sequence_mean", "sequence_ratio", "sequence_sum", "sequence_token_ratio", "soft_penalty", "squared_error", "token_correction",
        "token_log_probs", "token_mean", "token_ratio", "top_entropy", "truncated", "turn_gae", "whiten",
    ),
    "rlkit.functional.statistics": ("mean_interval", "pass_at_k", "wilson"),
    "rlkit.rewards": (
        "Reward", "RewardError", "Term", "Verdict", "batched", "contains", "exact_match", "format_match", "group_normalised", "largest",
        "length", "math_verify", "mean", "numeric", "product", "repetition", "smallest", "soft_length", "tool_usage", "weighted_sum",
    ),
    "rlkit.tasks": ("arithmetic", "conversations", "gsm8k", "jsonl"),
    "rlkit.environments": (
        "calculator", "continue_with_step", "dialogue", "execute", "get_weather", "hermes", "python_tool", "single_turn", "split_thinking",
        "tool_schema", "tool_use", "with_schema", "xml",
    ),
    "rlkit.commands.agent": ("AgentResult", "execute_tool_call", "has_tool_call", "parse_tool_calls", "run_agent"),
    "rlkit.engines": ("Batched", "Cached", "Transformers", "VLLM"),
    "rlkit.models": ("LoRA", "ValueHead", "load_policy", "make_codec", "make_critic", "make_policy", "score"),
    "rlkit.episodes": (
        "append_rollouts", "assemble", "collect", "demonstrations", "load_rollouts",
        "rollout_schema", "save_rollouts", "summarize", "transcript",
    ),
    "rlkit.episodes.evaluation": ("greedy_accuracy", "sampled_accuracy"),
    "rlkit.training.schedules": (
        "Phase", "Progress", "Schedule", "adaptive", "adaptive_entropy", "advance", "at", "condition", "constant", "cosine", "decay",
        "exponential", "linear", "on_metric", "phases", "piecewise", "start", "values",
    ),
    "rlkit.training.learner": ("Host", "Learner"),
    "rlkit.training.module": ("RLModule",),
    "rlkit.notebook": (
        "Checkpoint", "GenerationConfig", "StepView", "TextGeneration", "TrainingConfig", "TrainingState", "aggregate_vector_rewards",
        "assign_rewards", "attach_logprobs", "batch_history", "check_termination_conditions", "compute_advantages",
        "compute_advantages_and_returns", "compute_forward_kl", "compute_grpo_loss", "compute_kl", "compute_kl_divergence",
        "compute_logprobs_for_tokens", "compute_pairwise_loss", "compute_policy_gradient_loss", "compute_ppo_loss", "compute_reverse_kl",
        "compute_scalar_reward", "compute_value_loss", "compute_vector_reward", "confident_share", "create_adaptive_kl", "create_batch",
        "create_batch_rollouts", "create_dapo_config", "create_ema_updater", "create_environment", "create_grpo_config",
        "create_kl_updater", "create_multiturn_rollout", "create_pairwise_config", "create_periodic_updater", "create_ppo_config",
        "create_random_termination", "create_reference_model", "create_rollout", "create_switch_strategy", "create_truncated_kl",
        "early_or_long", "exact_match_reward", "execute_step", "format_prompt", "format_reward", "generate_templates", "generate_text",
        "generate_with_values", "get_algorithm_config", "get_rollout_summary", "initial_prompts", "initialize_rollouts", "length_penalty",
        "load_checkpoint", "load_model", "load_tokenizer", "parse_thinking", "plot_training", "run_rollouts", "same_rollouts",
        "save_checkpoint", "stack_rollouts", "tool_band_reward", "tool_usage_reward", "train_model", "training_iteration", "truncated_kl",
        "update_ema_metrics", "update_policy", "update_reference_model", "view_steps",
    ),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rlkit' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
