"""Suggest a known key for a misspelt key, or for the name of a setting in another library. Names of
TRL and verl are tried first, then all keys of the config."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from rlkit.config.options import conf_dir

# Names used in TRL, verl and public notebooks → rlkit's key. A key that chooses an option of a
# group ends with "=".
PEERS = {
    "batch.prompts": (
        "batch_size train_batch_size rollout_batch_size prompts_per_step"
        " per_device_train_batch_size num_prompts"
    ),
    "batch.group_size": (
        "group_size num_generations rollout_n n_samples n_samples_per_prompt samples_per_prompt"
        " num_rollouts"
    ),
    "optimizer.lr": "lr learning_rate actor_lr",
    "kl.coef": "beta kl_beta kl_coef kl_loss_coef init_kl_coef kl_coefficient",
    "model.path": "model_name model_name_or_path pretrained",
    "model.lora.rank": "lora_rank lora_r",
    "model.lora.alpha": "lora_alpha",
    "model.enable_thinking": "thinking think",
    "trainer.steps": (
        "steps max_steps total_steps num_steps total_training_steps num_train_steps iterations"
    ),
    "trainer.max_time": "time_limit",
    "trainer.devices": "gpus num_gpus n_gpus_per_node",
    "trainer.nodes": "nnodes num_nodes",
    "trainer.micro_batch_tokens": (
        "micro_batch_size gradient_accumulation_steps ppo_micro_batch_size_per_gpu"
        " ppo_max_token_len_per_gpu"
    ),
    "trainer.precision": "bf16 fp16 dtype torch_dtype",
    "generation.max_new_tokens": (
        "max_completion_length max_response_length response_length max_tokens max_length"
    ),
    "generation.temperature": "temperature",
    "algorithm.epochs": "num_iterations ppo_epochs num_ppo_epochs",
    "algorithm.minibatches": "num_mini_batches ppo_mini_batch_size num_minibatches",
    "algorithm.policy_loss.clip_low": (
        "epsilon clip_ratio clip_ratio_low cliprange clip_eps clip_epsilon"
    ),
    "algorithm.policy_loss.clip_high": "epsilon_high clip_ratio_high",
    "algorithm=": "adv_estimator loss_type loss_mode algo",
    "algorithm/group_filter=": "filter_groups filter_groups_enable",
    "algorithm/normalization=": "scale_rewards norm_adv_by_std_in_grpo normalize_advantages",
    "algorithm/aggregation=": "loss_agg_mode",
    "algorithm/correction=": "vllm_importance_sampling_correction rollout_is",
    "kl.placement": "use_kl_in_reward",
    "kl=": "kl_estimator kl_loss_type kl_penalty",
    "reference=": "ref_model sync_ref_model ref_policy",
    "reward=": (
        "reward_funcs reward_fn reward_function reward_weights custom_reward_function_path"
    ),
    "environment=": "environment_factory multi_turn multi_turn_enable",
    "task=": "dataset dataset_name data train_dataset train_files task_path",
    "task.max_samples": "max_train_samples num_samples",
    "generation=": "use_vllm engine rollout rollout_name",
    "evaluation": "eval",
    "evaluation.every": "eval_steps eval_every test_freq eval_interval",
    "callbacks.checkpoint.every": "save_steps save_freq save_every",
    "logger=": "report_to wandb loggers",
    "resume": "resume_from_checkpoint resume_mode",
    "name": "run_name experiment_name",
    "hydra.run.dir": "output_dir default_local_dir save_dir",
}
MEANT = {word: key for key, words in PEERS.items() for word in words.split()}


def suggest_key(path: str, named: Iterable[str], leaves: Iterable[str], value: Any = None) -> str:
    """Suggest a known key for an unknown key, as in " Did you mean 'optimizer.lr'?". Return '' if
    no known key is similar.

    Args:
      path: the unknown key as it was written, dotted.
      named: the valid names at its place.
      leaves: every dotted key of the config.
      value: the value given for the key. The keys of a mapping belong to the name, as in
        data.train_batch_size.

    The first match wins: a name at the same place that differs by one or two letters, a name from
    another library, a key with the same last name anywhere, a similar name.
    """
    parent, _, word = path.rpartition(".")
    # evaluation.reward.terms.task counts as the same place as reward.terms.task
    same_part = f".{path}" if parent else "."
    below = [
        leaf
        for leaf in leaves
        if leaf != path and not leaf.endswith(same_part) and not leaf.startswith(f"{path}.")
    ]
    near = difflib.get_close_matches(word, list(named), n=1, cutoff=0.85)
    if near:
        return _sentence(near)
    meant = _find_meant(path, value)
    if meant:
        return _sentence(meant)
    same = [leaf for leaf in below if leaf.rpartition(".")[2] == word]
    if same:
        same = sorted(same, key=lambda leaf: (leaf.count("."), leaf))[:3]
        places = [leaf.replace(".", "/") for leaf in same if isinstance(value, str)]
        groups = [f"{place}=" for place in places if (conf_dir() / place).is_dir()]
        return _sentence(groups or same)
    near = difflib.get_close_matches(word, list(named), n=1, cutoff=0.5) if parent else []
    if near:
        return _sentence(near)
    by_name = {
        leaf.rpartition(".")[2]: leaf for leaf in sorted(below, key=lambda leaf: -leaf.count("."))
    }
    names = {**by_name, **MEANT}
    return _sentence(
        [names[name] for name in difflib.get_close_matches(word, list(names), n=1, cutoff=0.8)]
    )


def _find_meant(path: str, value: Any) -> list[str]:
    """List rlkit's keys for a name of another library."""
    if isinstance(value, Mapping) and value:
        return [meant for key in value for meant in _find_meant(f"{path}.{key}", value[key])]
    words = path.split(".")
    names = ("_".join(words[-2:]), words[-1])  # rollout.n means more than n
    return [MEANT[name] for name in names if MEANT.get(name, path) != path][:1]


def list_leaves(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """List every settable dotted key of a plain config. A group counts as a key, and so does a
    whole list. Hydra's own keys are left out."""
    found = []
    for key, value in config.items():
        if key.startswith("_") or key == "suggests":
            continue
        found.append(f"{prefix}{key}")
        if isinstance(value, Mapping):
            found += list_leaves(value, f"{prefix}{key}.")
    return found


def _sentence(keys: list[str]) -> str:
    if not keys:
        return ""
    shown = [repr(f"{key}OPTION" if key.endswith("=") else key) for key in keys]
    return f" Did you mean {' or '.join(shown)}?"
