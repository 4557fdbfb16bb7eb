"""Training from a notebook: updates on rollouts, one RL step, a whole run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import rlkit.functional as F
from rlkit.algorithm import (
    KL,
    Algorithm,
    call,
    choose,
    estimate_advantages,
    micro_batches,
    minibatches,
    quantities,
    scale_tokens,
    select,
    surrogate,
    value_surrogate,
)
from rlkit.episodes import assemble
from rlkit.episodes.stream import StreamState, take
from rlkit.models import make_critic, pack, score
from rlkit.notebook._arguments import asks_for, named
from rlkit.notebook.algorithms import core_selector
from rlkit.notebook.checkpoints import save_checkpoint
from rlkit.notebook.configs import TrainingConfig, create_grpo_config, create_switch_strategy, get_algorithm_config
from rlkit.notebook.data import TRAINING, GenerationConfig, Prompt, TrainingState, as_task, update_ema_metrics
from rlkit.notebook.generation import load_model
from rlkit.notebook.kl import KLHook, UpdateHook, compute_kl, create_reference_model, update_reference_model
from rlkit.notebook.rollouts import create_environment, run_rollouts
from rlkit.notebook.tensors import attach, episodes, per_token_of, plain, required, score_batch
from rlkit.rewards import Moments, Reward, normalise, update_moments
from rlkit.types import Batch, Environment, Rollout, Task

NAN = float("nan")


def update_policy(
    model: nn.Module,
    rollouts: Sequence[Rollout],
    optimizer: torch.optim.Optimizer,
    config: TrainingConfig,
    *,
    ref_model: nn.Module | None = None,
    critic: nn.Module | None = None,
    advantage_fn: Callable[..., Tensor] | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    kl_fn: Callable[..., Tensor] | None = None,
    pair_selector: Callable[..., Any] | None = None,
    normalize: bool = True,
    temperature: float = 1.0,
    micro_batch_tokens: int = 16384,
    seed: int = 0,
) -> dict[str, float]:
    """One RL step's updates on scored rollouts: old, reference and value passes, advantages, then every minibatch of every epoch.

    Args:
      model: in evaluation mode, so that no dropout parts sampler and trainer. rollouts: scored, by the model as it is.
      config: what is optimised. ref_model: needed by its KL. critic: needed by its advantage (`rlkit.models.critic`).
      advantage_fn: (rollouts, normalize) → [B, T] in place of the config's. loss_fn: (rollouts, advantages) → scalar in place of the
        policy loss, on a whole minibatch at once; the rollouts are those of `attach_logprobs`.
      kl_fn: in place of the config's estimator; one that gives [B] is subtracted from the reward: reward - coef · KL.
      pair_selector: of an algorithm of pairs. temperature: > 0, the sampler's. micro_batch_tokens: padded tokens at once, for the memory.
    Returns: loss, policy_loss, value_loss, kl (nats per token, before the update), kl_coef, grad_norm; nan for what there is none of.
    Raises: ValueError where a part of the config has no reference, critic or pairs to work on.
    """
    _refuse_another_distribution(rollouts, temperature)
    config = _hooked(config, rollouts, ref_model, critic, kl_fn, pair_selector)
    algorithm, kl = config.algorithm, config.kl
    sampled = assemble([plain(r) for r in rollouts], pad_token_id=0, device=next(model.parameters()).device)
    batch = choose(sampled, algorithm)
    old = score_batch(model, batch, temperature, micro_batch_tokens, critic)
    batch = batch._replace(logprobs_old=old.logprobs, entropy_old=old.entropy, values=old.values)
    divergence = NAN
    if ref_model is not None:
        batch = batch._replace(logprobs_ref=score_batch(ref_model, batch, temperature, micro_batch_tokens).logprobs)
        given = quantities(batch) | {"logprobs": batch.logprobs_old}
        divergence = float(F.masked_mean(call(kl.estimator or F.k3, given), batch.response_mask))
    if advantage_fn is not None:
        positions, mask = episodes(sampled)
        advantages = per_token_of(advantage_fn(rollouts, normalize).to(mask.device), mask)
        batch = batch._replace(advantages=F.from_episodes(advantages, positions, mask, sampled.token_rewards))
        algorithm = algorithm._replace(advantage=_as_given, normalization=F.no_normalization)
    batch = estimate_advantages(scale_tokens(batch, algorithm), algorithm, kl)
    rows: list[dict[str, float]] = []
    for minibatch in minibatches(batch, algorithm, seed=seed):
        if required(minibatch.advantages).any() or kl.in_loss or algorithm.critic.active or loss_fn is not None:
            optimizer.zero_grad()
            row = _accumulate(model, minibatch, algorithm, kl, rollouts, critic, loss_fn, temperature, micro_batch_tokens)
            rows.append(row | {"grad_norm": _step(optimizer, model, critic, config.max_grad_norm)})
    means = {name: fmean(row[name] for row in rows) if rows else NAN for name in ("loss", "policy_loss", "value_loss", "grad_norm")}
    return means | {"kl": divergence, "kl_coef": float(kl.coef) if kl.active else 0.0}  # type: ignore[arg-type]


def _accumulate(
    model: nn.Module,
    minibatch: Batch,
    algorithm: Algorithm,
    kl: KL,
    rollouts: Sequence[Rollout],
    critic: nn.Module | None,
    loss_fn: Callable[..., Tensor] | None,
    temperature: float,
    micro_batch_tokens: int,
) -> dict[str, float]:
    """The gradient of one update, over portions that only sum, and the losses."""
    totals = {"loss": 0.0, "policy_loss": 0.0, "value_loss": 0.0 if algorithm.critic.active else NAN}
    own = algorithm if loss_fn is None else algorithm._replace(policy_loss=_nothing)
    for rows in micro_batches(minibatch, micro_batch_tokens if loss_fn is None else 1 << 62):
        part = select(minibatch, rows)
        packed = pack(part.ids, part.response_mask)
        scores = score(model, packed, temperature=temperature, critic=critic, entropy_gradient=bool(algorithm.entropy_coef))
        loss, terms = surrogate(part, scores, own, kl)
        policy_loss = (required(part.weights) * F.fill_masked(terms["policy_loss"], part.response_mask, 0.0)).sum()
        if loss_fn is not None:
            policy_loss = loss_fn(*_hook_inputs(part, scores.logprobs, rollouts))
            loss = loss + policy_loss
        if algorithm.critic.active:
            value_loss, _ = value_surrogate(part, scores, algorithm.critic)
            totals["value_loss"] += float(value_loss.detach()) / algorithm.critic.coef
            loss = loss + value_loss
        loss.backward()
        totals["loss"] += float(loss.detach())
        totals["policy_loss"] += float(policy_loss.detach())
    return totals


def _hook_inputs(part: Batch, logprobs: Tensor, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], Tensor]:
    """What a loss_fn gets: the rollouts that are trained on, with their log-probs, and their advantages [B, T]."""
    positions, mask = episodes(part)
    trained = mask.any(1)
    chosen = [r if kept else r._replace(steps=()) for r, kept in zip(rollouts, trained.tolist(), strict=True)]
    attached = [r for r in attach(chosen, part, logprobs, required(part.logprobs_old)) if r.steps]
    return attached, F.to_episodes(required(part.advantages), positions, mask)[trained]


def _step(optimizer: torch.optim.Optimizer, model: nn.Module, critic: nn.Module | None, max_grad_norm: float) -> float:
    """One optimiser step with the gradients of policy and critic clipped apart; none where one is not finite. The policy's norm."""
    norms = [nn.utils.clip_grad_norm_(m.parameters(), max_grad_norm) for m in (model, critic) if m is not None]
    if all(map(math.isfinite, norms)):
        optimizer.step()
    return float(norms[0])


def _refuse_another_distribution(rollouts: Sequence[Rollout], temperature: float) -> None:
    """Ratios and KL compare the distribution that is scored, so it has to be the one that was sampled."""
    for rollout in rollouts:
        params = GenerationConfig(**rollout.metadata.get("generation", TRAINING._asdict())).params
        if params.top_p < 1 or params.top_k:
            raise ValueError(
                f"rollout {rollout.task.id!r} was sampled from a cut distribution (top_p {params.top_p}, top_k {params.top_k}), which "
                "no loss can score; sample with GenerationConfig(temperature=1.0, top_p=1.0, top_k=0)"
            )
        sampled = params.temperature or 1.0
        if "generation" in rollout.metadata and sampled != temperature:
            raise ValueError(f"rollout {rollout.task.id!r} was sampled at temperature {sampled}; give temperature={sampled} here too")


def _hooked(
    config: TrainingConfig,
    rollouts: Sequence[Rollout],
    ref_model: nn.Module | None,
    critic: nn.Module | None,
    kl_fn: Callable[..., Tensor] | None,
    pair_selector: Callable[..., Any] | None,
) -> TrainingConfig:
    """The config with the hooks in it; refuses what would silently do nothing."""
    algorithm, kl = config.algorithm, config.kl
    if algorithm.target_kl is not None or algorithm.max_refills or algorithm.critic.warmup:
        raise ValueError(f"'{algorithm.name}' has target_kl, max_refills or critic.warmup, which only `rlkit train` knows; leave them out")
    if kl_fn is not None:
        if not kl.coef:
            raise ValueError(f"kl_fn is given, and the coefficient of the KL in '{algorithm.name}' is 0; set kl_coef")
        core = asks_for(kl_fn, "logprobs")
        kl = kl._replace(estimator=kl_fn) if core else kl._replace(estimator=_per_rollout(kl_fn), placement="reward_sequence")
    if kl.active and ref_model is None:
        raise ValueError(f"kl_coef={kl.coef} needs a ref_model: create_reference_model(model), or set kl_coef=0")
    if algorithm.critic.active and critic is None:
        raise ValueError(f"'{algorithm.name}' needs a critic: rlkit.models.critic.make_critic(model, model='head')")
    if pair_selector is not None:
        if not _takes_pairs(config):
            raise ValueError(f"pair_selector is given, and '{algorithm.name}' compares no pairs; use create_pairwise_config()")
        selector = core_selector(pair_selector, rollouts)
        advantage: Any = algorithm.advantage
        algorithm = algorithm._replace(advantage=partial(advantage, pair_selector=selector))
    return config._replace(algorithm=algorithm, kl=kl)


def _takes_pairs(config: TrainingConfig) -> bool:
    return "pair_selector" in named(config.algorithm.advantage)


def _per_rollout(kl_fn: KLHook) -> Callable[..., Tensor]:
    """A kl_fn as an estimator of the core: each rollout's number on all of its tokens."""

    def estimator(logprobs: Tensor, logprobs_ref: Tensor, response_mask: Tensor, rollout_ids: Tensor, step_ids: Tensor) -> Tensor:
        positions, mask = F.episode_positions(rollout_ids, step_ids, response_mask)
        policy, ref = (F.to_episodes(x, positions, mask) for x in (logprobs, logprobs_ref))
        return compute_kl(policy, ref, mask, kl_fn)[rollout_ids][:, None].expand(response_mask.shape)

    return estimator


def _as_given(advantages: Tensor) -> Tensor:
    return advantages


def _nothing(ratio: Tensor) -> Tensor:
    return torch.zeros_like(ratio)


PLAYING = {*named(create_environment), "generator", "template_fn", "use_chat_template"}  # hooks of rollouts; the others are of updates


def training_iteration(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    optimizer: torch.optim.Optimizer,
    state: TrainingState = TrainingState(),  # noqa: B008  (immutable)
    *,
    reward_fn: Callable[..., Any] | Reward,
    config: TrainingConfig | None = None,
    ref_model: nn.Module | None = None,
    ref_update_fn: UpdateHook | None = None,
    environment: Environment | Callable[[Task], Environment] | None = None,
    generate: Any = None,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    seed: int = 0,
    **hooks: Any,
) -> tuple[TrainingState, list[Rollout]]:
    """One RL step: rollouts, rewards, updates, then the reference.

    Args:
      model, tokenizer: a causal LM in evaluation mode (also under PEFT), and its fast tokenizer with a chat template.
      prompts: texts, message lists or Tasks, each a group of `config.group_size` rollouts.
      optimizer: over the model's parameters, and over the critic's.
      state: of the iteration before. reward_fn: (rollout) → number or None, also `@batched`, or a Reward of several terms.
      config: None is `create_grpo_config()`. ref_model: needed where its KL is on.
      ref_update_fn: (ref_model, policy_model, step, kl) → None after the updates; two arguments do. step counts from 1.
      environment: None is made of the hooks; without any, one reply to each prompt. generate: the engine.
      temperature: ≥ 0; 0 is greedy.
      hooks: for `run_rollouts`: generator, template_fn, use_chat_template, prompt_generator_fn, termination_fn, stop_condition, tools,
        tool_parser, tool_executor, system_prompt, max_steps. For `update_policy`: advantage_fn, loss_fn, kl_fn, pair_selector, critic,
        normalize, micro_batch_tokens.
    Returns: the next state and the scored rollouts. Its metrics: reward (raw, mean), kl and kl_coef apart, the losses, tokens.
    """
    if ref_update_fn is not None and ref_model is None:
        raise ValueError("ref_update_fn has no ref_model to move; give one, such as create_reference_model(model)")
    config = config or create_grpo_config()
    rollouts = run_rollouts(
        model,
        tokenizer,
        prompts,
        num_rollouts=config.group_size,
        reward_fn=reward_fn,
        config=TRAINING._replace(max_new_tokens=max_new_tokens, temperature=temperature),
        environment=environment,
        generate=generate,
        seed=seed,
        step=state.step,
        **{name: hooks.pop(name) for name in PLAYING & hooks.keys()},
    )
    settings: dict[str, Any] = {"ref_model": ref_model, "temperature": temperature or 1.0, "seed": F.mix(seed, state.step)}
    moments = update_moments(Moments(*state.moments), rollouts)
    trained = normalise(rollouts, moments) if config.normalize_rewards else rollouts
    metrics = update_policy(model, trained, optimizer, config, **settings | hooks)
    step = state.step + 1
    if ref_update_fn is not None and ref_model is not None:
        update_reference_model(ref_model, model, ref_update_fn, step=step, kl=metrics["kl"])
    scores = [r.reward for r in rollouts if r.reward is not None]
    tokens = sum(len(s.prompt_ids) + len(s.response_ids) for r in rollouts for s in r.steps)
    metrics = {"reward": fmean(scores) if scores else NAN, **metrics, "tokens": float(tokens)}
    return TrainingState(step, state.total_tokens + tokens, metrics, update_ema_metrics(state.ema_metrics, metrics), moments), rollouts


def train_model(
    model: nn.Module | str,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    reward_fn: Callable[..., Any] | Reward,
    *,
    steps: int = 100,
    batch_size: int = 4,
    max_new_tokens: int = 256,
    save_every: int = 50,
    output_dir: str | Path | None = None,
    config: TrainingConfig | None = None,
    switch_strategy: Callable[[int], str] | None = None,
    numbers: Mapping[str, Any] = {},
    model_loader: Callable[..., Any] = load_model,
    ref_model_fn: Callable[[nn.Module], nn.Module] | None = create_reference_model,
    checkpoint_fn: Callable[[nn.Module, Any, int, str], None] | None = None,
    state: TrainingState = TrainingState(),  # noqa: B008  (immutable)
    progress: Callable[[str], None] | None = print,
    seed: int = 0,
    **hooks: Any,
) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Trains a model from a notebook, with AdamW. Runs that log, evaluate and resume bit for bit are those of `rlkit train`.

    Args:
      model: one that is built, or a model_id for the model_loader: (model_id, dtype, device_map, use_lora, lora_rank, lora_alpha) → model.
      prompts: all of them; every step draws the next `batch_size` of an order that the seed fixes.
      steps: RL steps until the end, those of `state` included. save_every: steps between checkpoints; the last step is saved too.
      output_dir: where checkpoints go; None writes none.
      config: of every step. Without one: `get_algorithm_config(step, switch_strategy, **numbers)`, GRPO where there is no strategy.
      ref_model_fn: (policy_model) → reference, called once where a KL needs it or a ref_update_fn moves it.
      checkpoint_fn: (model, tokenizer, step, output_dir) → None in place of `save_checkpoint`.
      state: of `load_checkpoint`, to go on.
      progress: gets a line a step: loss and reward as moving averages, and the tokens so far. None is silent.
      hooks: for `training_iteration` and `update_policy`; kl_fn and pair_selector act while the algorithm has a KL, or pairs.
    Returns: the model, and a row of metrics a step: step, algorithm, reward, kl, kl_coef, loss, policy_loss, value_loss, grad_norm, tokens.
    Raises: ValueError where both a config and a strategy or numbers are given.
    """
    if config is not None and (switch_strategy is not None or numbers):
        raise ValueError("give a config, or a switch_strategy and numbers, not both: a config holds for every step")
    tasks = [as_task(prompt, i) for i, prompt in enumerate(prompts)]
    if isinstance(model, str):
        model = model_loader(model, "float32", None, False, 16, 32)
    assert isinstance(model, nn.Module)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained}], lr=1e-4, weight_decay=0.0)
    ref_model: nn.Module | None = None
    critic: nn.Module | None = None
    statistics: list[dict[str, Any]] = []
    was_training = model.training
    model.eval()  # no dropout: sampler and trainer are to see one policy
    try:
        for step in range(state.step, steps):
            now = config or get_algorithm_config(step, switch_strategy or create_switch_strategy("grpo", "grpo"), **numbers)
            if ref_model is None and ref_model_fn is not None and (now.kl.active or hooks.get("ref_update_fn")):
                ref_model = ref_model_fn(model)
            if critic is None and now.algorithm.critic.active:
                critic = make_critic(model, model=now.algorithm.critic.model, trunk_gradient=now.algorithm.critic.trunk_gradient)
                optimizer.add_param_group({"params": list(critic.parameters())})
            for group, rate in zip(optimizer.param_groups, (now.learning_rate, now.value_learning_rate), strict=False):
                group["lr"] = rate
            idle = {"kl_fn": not now.kl.coef, "pair_selector": not _takes_pairs(now)} if switch_strategy else {}
            settings: dict[str, Any] = {"config": now, "ref_model": ref_model, "max_new_tokens": max_new_tokens, "seed": seed}
            settings |= {"critic": critic if now.algorithm.critic.active else None}
            settings |= {name: hook for name, hook in hooks.items() if not idle.get(name)}
            drawn, _ = take(tasks, StreamState(*divmod(step * batch_size, max(1, len(tasks)))), batch_size, seed=seed)
            state, _ = training_iteration(model, tokenizer, drawn, optimizer, state, reward_fn=reward_fn, **settings)
            statistics.append({"step": state.step, "algorithm": now.algorithm.name, **state.metrics})
            if progress is not None:
                progress(_progress_line(state, steps))
            if output_dir is not None and (state.step % save_every == 0 or state.step == steps):
                save = checkpoint_fn or partial(save_checkpoint, state=state)
                save(model, tokenizer, state.step, str(output_dir))
    finally:
        model.train(was_training)
    return model, statistics


def _progress_line(state: TrainingState, steps: int) -> str:
    ema = state.ema_metrics
    return f"step {state.step}/{steps}  loss {ema.get('loss', NAN):.4f}  reward {ema.get('reward', NAN):.3f}  tokens {state.total_tokens:,}"
