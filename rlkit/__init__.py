"""rlkit: reinforcement learning of language models on multi-turn, tool-using tasks.

Every primitive is importable from here and works without Hydra: `from rlkit import collect, assemble, group_mean, k3, …`.
Nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

_HOMES = {
    "rlkit.types": (
        "Batch", "Controller", "Engine", "Environment", "Estimate", "Generation", "Message", "Policy", "Reference", "Rollout",
        "SamplingParams", "TokenLogprobs", "Session", "Step", "Task", "ToolCall", "ToolResult",
    ),
    "rlkit.errors": ("ConfigError", "DataError", "Refusal", "RLKitError", "SelfCheckError", "TemplateError"),
    "rlkit.training.experiment": ("BatchSize", "Evaluation", "Experiment", "Sampling", "TrainerSettings"),
    "rlkit.algorithm": (
        "KL", "Algorithm", "Critic", "filter_rollouts", "estimate_advantages", "micro_batches", "minibatches", "token_scale", "surrogate",
        "value_surrogate", "loss_weights",
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
    "rlkit.commands.agent": ("AgentResult", "run_agent"),
    "rlkit.engines": ("Batched", "Cached", "Transformers", "VLLM"),
    "rlkit.models": ("LoRA", "ValueHead", "load_policy", "make_renderer", "make_critic", "make_policy", "forward_logprobs"),
    "rlkit.episodes": (
        "append_rollouts", "assemble", "collect", "demonstrations", "load_rollouts",
        "rollout_schema", "save_rollouts", "summarize", "transcript",
    ),
    "rlkit.episodes.evaluation": ("greedy_accuracy", "sampled_accuracy"),
    "rlkit.training.schedules": (
        "Phase", "Progress", "Schedule", "adaptive", "adaptive_entropy", "advance", "at", "condition", "constant", "cosine", "decay",
        "linear", "phases", "start", "values",
    ),
    "rlkit.training.learner": ("Host", "Learner"),
    "rlkit.training.module": ("RLModule",),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """A name of the table, else one of the notebooks' (rlkit.notebook), which are many and not listed here."""
    home = _HOME.get(name) or ("" if name.startswith("_") or importlib.util.find_spec(f"rlkit.{name}") else "rlkit.notebook")
    part = getattr(importlib.import_module(home), name, None) if home else None
    if part is None:
        raise AttributeError(f"module 'rlkit' has no attribute '{name}'")
    return part


def __dir__() -> list[str]:
    return __all__
