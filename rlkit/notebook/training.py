"""Training from a notebook: the arguments become a learner, whose step is that of `rlkit train` (rlkit.training.learner)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rlkit.functional as F
from rlkit.algorithm import KL, Algorithm
from rlkit.episodes.stream import StreamState, order_of_parts
from rlkit.errors import Refusal
from rlkit.notebook.algorithms import core_selector
from rlkit.notebook.borrowed import Share, given, no_optimizer
from rlkit.notebook.checkpoints import save_checkpoint
from rlkit.notebook.configs import TrainingConfig, asks_for, create_grpo_config, create_switch_strategy, get_algorithm_config, named
from rlkit.notebook.data import TRAINING, GenerationConfig, Prompt, TrainingState, as_task, update_ema_metrics
from rlkit.notebook.generation import engine_of, load_model, policy_of
from rlkit.notebook.kl import UpdateHook, compute_kl, create_reference_model, update_reference_model
from rlkit.notebook.rollouts import create_environment, environment_from, generated, reward_from, with_config
from rlkit.notebook.stacked import attach, episodes
from rlkit.notebook.tensors import per_token_of, required
from rlkit.rewards import Moments, Reward
from rlkit.training.experiment import BatchSize, Evaluation, Experiment, Sampling, TrainerSettings
from rlkit.training.groups import experience
from rlkit.training.learner import Learner
from rlkit.training.update import batch_logprobs
from rlkit.types import Environment, Policy, Rollout, Task

NAN = float("nan")
WHOLE = 1 << 24  # tokens of a micro-batch, more than any minibatch has
NAMES = {  # the notebooks' names of metrics
    "reward": "reward/mean", "loss": "loss/total", "policy_loss": "loss/policy", "value_loss": "value/loss", "kl": "kl/estimate",
    "kl_coef": "kl/coef", "grad_norm": "optim/grad_norm",
}  # fmt: skip
PLAYING = named(create_environment)  # hooks of the environment


class NotebookLearner(Learner):
    """A learner of a notebook's arguments for one step. Model, optimizer, critic and reference stay the notebook's.

    Args:
      optimizer: over the policy's parameters, and over the critic's. state: before the step.
      parts: seed, batch, environment, generation and reward of the Experiment.
      makes_critic: whether one that is needed and not given is made; its parameters join the optimizer. Such a learner also takes back
        what `held` has added to the state.
      hooks: advantage_fn, loss_fn, kl_fn, pair_selector, normalize.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        config: TrainingConfig,
        state: TrainingState,
        parts: Mapping[str, Any],
        *,
        ref_model: nn.Module | None = None,
        ref_update_fn: UpdateHook | None = None,
        critic: nn.Module | None = None,
        makes_critic: bool = False,
        micro_batch_tokens: int = 16384,
        **hooks: Any,
    ):
        algorithm, kl = _hooked(weakref.proxy(self), config, **hooks)  # caches keep parts for longer than a learner
        if kl.active and ref_model is None:
            raise ValueError(f"kl_coef={kl.coef} needs a ref_model: create_reference_model(model), or set kl_coef=0")
        if algorithm.critic.active and critic is None and not makes_critic:
            raise ValueError(f"'{algorithm.name}' needs a critic: rlkit.models.critic.make_critic(model, model='head')")
        self.optimizer, self.given_critic = optimizer, critic if algorithm.critic.active else None
        self.ref_model, self.ref_update_fn = ref_model, ref_update_fn
        limit = WHOLE if hooks.get("loss_fn") is not None else micro_batch_tokens
        x = Experiment(
            name=algorithm.name,
            task=lambda split: (),
            model=lambda device: policy,
            algorithm=algorithm._replace(critic=algorithm.critic._replace(optimizer=no_optimizer)),
            kl=kl,
            reference=given(ref_model, None if ref_update_fn is None else partial(update_reference_model, update_fn=ref_update_fn)),
            optimizer=no_optimizer,
            trainer=TrainerSettings(steps=state.step + 1, micro_batch_tokens=limit, max_grad_norm=config.max_grad_norm),
            evaluation=Evaluation(parts["reward"], n=0),
            **parts,
        )
        super().__init__(x, policy)
        if state.learner:
            self.load({"rlkit": state.learner})
        if makes_critic and "optimizer" in state.learner:
            self.take_back(state.learner)
        self.rl_step, self.tokens, self.moments = state.step, state.total_tokens, Moments(*state.moments)
        same = state.learner.get("algorithm", algorithm.name) == algorithm.name
        self.progress = self.progress._replace(step=state.step, since=self.progress.since if same else state.step)

    def make_critic(self) -> nn.Module | None:
        """The notebook's, or a new one, whose parameters join the optimizer."""
        if self.given_critic is None and (critic := super().make_critic()) is not None:
            self.optimizer.add_param_group({"params": list(critic.parameters())})
            return critic
        return self.given_critic

    def make_optimizers(self) -> list[Any]:
        """The notebook's optimizer, as one for the policy and one for the critic."""
        shares: list[Any] = [Share(self.optimizer, net) for net in self.nets.values()]
        self.optimizers = shares
        return shares

    def iterate(self, before: TrainingState, rollouts: Sequence[Rollout], trained: Sequence[Rollout]) -> TrainingState:
        """One step; the state after it, with the notebooks' names beside those of the metrics."""
        unread = self.ref_model if not self.x.kl.active else None  # a reference that no part of the step reads
        kl = NAN if unread is None else self.distance(unread, trained)
        metrics = self.step(rollouts, trained)
        if unread is not None and self.ref_update_fn is not None:
            update_reference_model(unread, self.model, self.ref_update_fn, step=self.rl_step, kl=kl)
        row = {short: float(metrics[name]) for short, name in NAMES.items()} | {"tokens": float(self.tokens - before.total_tokens)}
        row |= metrics if self.x.kl.active else metrics | {"kl": kl, "kl_coef": 0.0}
        kept = self.saved() | {"algorithm": self.x.algorithm.name}
        return TrainingState(
            self.rl_step, self.tokens, row, update_ema_metrics(before.ema_metrics, row), tuple(self.moments), before.stream, kept
        )

    def held(self, state: TrainingState) -> TrainingState:
        """The state with what a checkpoint needs of optimizer, critic and reference."""
        reference = {} if self.ref_model is None else self.ref_model.state_dict()
        kept = {"optimizer": self.optimizer.state_dict(), "critic": {} if self.critic is None else self.critic.state_dict()}
        kept["reference"] = self.without_frozen({f"model.{name}": value for name, value in reference.items()})
        return state._replace(learner={**state.learner, **kept})

    def take_back(self, kept: Mapping[str, Any]) -> None:
        """Puts that back."""
        self.optimizer.load_state_dict(kept["optimizer"])
        if self.critic is not None:
            self.critic.load_state_dict(kept["critic"])
        if self.ref_model is not None:
            reference = {name.removeprefix("model."): value for name, value in kept["reference"].items()}
            self.ref_model.load_state_dict(reference, strict=False)

    def distance(self, model: nn.Module, rollouts: Sequence[Rollout]) -> float:
        """KL(policy‖model) on the policy's tokens, k3, in nats per token."""
        batch = self.assembled(rollouts)
        own, other = (batch_logprobs(self, m, batch).logprobs for m in (self.model, model))
        return float(F.approximate_kl(other, own, batch.response_mask))


# -------------------------------------------------------------------------------------------- hooks as parts of the core


def _hooked(
    learner: Learner,
    config: TrainingConfig,
    *,
    advantage_fn: Callable[..., Tensor] | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    kl_fn: Callable[..., Tensor] | None = None,
    pair_selector: Callable[..., Any] | None = None,
    normalize: bool = True,
) -> tuple[Algorithm, KL]:
    """Algorithm and KL with the hooks in them. Raises: ValueError for a hook that would do nothing."""
    algorithm, kl = config.algorithm, config.kl
    if kl_fn is not None:
        if not kl.coef:
            raise ValueError(f"kl_fn is given, and the coefficient of the KL in '{algorithm.name}' is 0; set kl_coef")
        core = asks_for(kl_fn, "logprobs")
        kl = kl._replace(estimator=kl_fn) if core else kl._replace(estimator=_per_rollout(kl_fn), placement="reward_sequence")
    if pair_selector is not None:
        if not takes_pairs(config):
            raise ValueError(f"pair_selector is given, and '{algorithm.name}' compares no pairs; use create_pairwise_config()")

        def selector(rewards: Tensor, group_ids: Tensor) -> Tensor:
            return core_selector(pair_selector, learner.trained)(rewards, group_ids)

        algorithm = algorithm._replace(advantage=partial(algorithm.advantage, pair_selector=selector))
    if advantage_fn is not None:
        algorithm = algorithm._replace(advantage=_advantage(learner, advantage_fn, normalize), normalization=F.no_normalization)
    return algorithm if loss_fn is None else algorithm._replace(policy_loss=_policy_loss(learner, loss_fn)), kl


def takes_pairs(config: TrainingConfig) -> bool:
    """Whether an algorithm compares pairs."""
    return "pair_selector" in named(config.algorithm.advantage)


def _per_rollout(kl_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kl_fn that gives [B] as an estimator: each rollout's number on all of its tokens."""

    def estimator(logprobs: Tensor, logprobs_ref: Tensor, response_mask: Tensor, rollout_ids: Tensor, step_ids: Tensor) -> Tensor:
        positions, mask = F.episode_positions(rollout_ids, step_ids, response_mask)
        policy, ref = (F.to_episodes(x, positions, mask) for x in (logprobs, logprobs_ref))
        return compute_kl(policy, ref, mask, kl_fn)[rollout_ids][:, None].expand(response_mask.shape)

    return estimator


def _advantage(learner: Learner, advantage_fn: Callable[..., Tensor], normalize: bool) -> Any:
    """An advantage_fn, which takes rollouts, as an advantage."""

    def advantage(rewards: Tensor, rollout_ids: Tensor, step_ids: Tensor, sampled_mask: Tensor, logprobs_sampler: Tensor) -> Tensor:
        positions, mask = episodes(rollout_ids, step_ids, sampled_mask, len(rewards))
        advantages = per_token_of(advantage_fn(learner.trained, normalize).float(), mask)
        return F.from_episodes(advantages, positions, mask, logprobs_sampler)

    return advantage


def _policy_loss(learner: Learner, loss_fn: Callable[..., Tensor]) -> Any:
    """A loss_fn, which gives a number for a whole minibatch, as a loss per token whose weighted sum is that number."""

    def policy_loss(
        logprobs: Tensor, logprobs_old: Tensor, rollout_ids: Tensor, step_ids: Tensor, response_mask: Tensor, weights: Tensor, scale: Tensor
    ) -> Tensor:
        whole, n = learner.minibatch, len(learner.trained)
        assert whole is not None
        positions, mask = episodes(rollout_ids, step_ids, response_mask, n)
        every, full = episodes(whole.rollout_ids, whole.step_ids, whole.response_mask, n)
        if not torch.equal(mask.any(1), full.any(1)):
            raise Refusal("memory ran out, and a loss_fn needs its whole minibatch at once: shorten replies, or set algorithm.minibatches")
        chosen = [r if kept else r._replace(steps=()) for r, kept in zip(learner.trained, mask.any(1).tolist(), strict=True)]
        attached = [r for r in attach(chosen, positions, mask, logprobs, logprobs_old) if r.steps]
        loss = loss_fn(attached, F.to_episodes(required(whole.advantages), every, full)[full.any(1)])
        share = F.fill_masked(weights * scale, response_mask, 0.0).sum()
        return (loss / share if share else 0.0 * loss).expand(response_mask.shape)

    return policy_loss


# --------------------------------------------------------------------------------------------------- update and step


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
    """One RL step's updates on scored rollouts: `Learner.step`.

    Args:
      model: in evaluation mode, so that no dropout parts sampler and trainer. rollouts: by the model as it is.
      ref_model: needed by the config's KL. critic: needed by its advantage (`rlkit.make_critic`).
      advantage_fn: (rollouts, normalize) → [B, T] in place of the config's. loss_fn: (rollouts, advantages) → scalar in place of the
        policy loss, on a whole minibatch at once; the rollouts are those of `attach_logprobs`.
      kl_fn: in place of the config's estimator; one that gives [B] is subtracted from the reward: reward - coef · KL.
      pair_selector: of an algorithm of pairs. temperature: > 0, the sampler's. micro_batch_tokens: padded tokens at once, for the memory.
    Returns: loss, policy_loss, value_loss, kl (nats per token, before the update), kl_coef, grad_norm, and all metrics of a step of
      `rlkit train`; nan for what there is none of.
    Raises: ValueError for a config without the reference, critic or pairs that it needs, and for rollouts of another distribution.
    """
    _refuse_another_distribution(rollouts, temperature)
    own: dict[str, Any] = {"ref_model": ref_model, "critic": critic, "micro_batch_tokens": micro_batch_tokens, "normalize": normalize}
    own |= {"advantage_fn": advantage_fn, "loss_fn": loss_fn, "kl_fn": kl_fn, "pair_selector": pair_selector}
    sampling = Sampling(engine_of(None, TRAINING), temperature)
    parts = {"seed": seed, "batch": BatchSize(1, config.group_size), "environment": Environment(), "generation": sampling}
    parts["reward"] = Reward("given", {})
    learner = NotebookLearner(Policy(model, None, (), 0, 0), optimizer, config, TrainingState(), parts, **own)
    return dict(learner.iterate(TrainingState(), rollouts, rollouts).metrics)


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
    """One RL step, as `rlkit train` takes it: rollouts, rewards, updates, then the reference.

    Args:
      model, tokenizer: a causal LM in evaluation mode (also under PEFT), and its fast tokenizer with a chat template.
      prompts: each a group of `config.group_size` rollouts. Refills play them again, with other seeds.
      optimizer: over the model's parameters, and over the critic's. state: of the iteration before.
      config: None is `create_grpo_config()`. ref_model: needed by its KL. ref_update_fn: called after the updates; step counts from 1.
      environment: None is made of the hooks; without any, one reply to each prompt. temperature: ≥ 0; 0 is greedy.
      hooks: of `run_rollouts` (generator, template_fn, tools, …) and of `update_policy` (loss_fn, kl_fn, critic, …).
    Returns: the next state, with the metrics of `update_policy`, reward (raw, mean) and tokens; and the scored rollouts.
    """
    if ref_update_fn is not None and ref_model is None:
        raise ValueError("ref_update_fn has no ref_model to move; give one, such as create_reference_model(model)")
    tasks = [as_task(prompt, i) for i, prompt in enumerate(prompts)]
    places = order_of_parts(tasks, seed, 0)  # the stream draws the task at places[i] as its i-th
    placed = [task for _, task in sorted(zip(places, tasks, strict=True), key=lambda pair: pair[0])]
    own: dict[str, Any] = {"environment": environment, "generate": generate, "ref_model": ref_model, "ref_update_fn": ref_update_fn}
    own |= {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, **hooks}
    learner = _learner(model, tokenizer, optimizer, config or create_grpo_config(), state, reward_fn, len(tasks), **own)
    after, rollouts = _iteration(learner, placed, state._replace(stream=StreamState()))
    return after._replace(stream=state.stream), rollouts


def _learner(
    model: Any,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    config: TrainingConfig,
    state: TrainingState,
    reward_fn: Any,
    prompts: int,
    *,
    seed: int,
    environment: Any = None,
    generate: Any = None,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    generator: Any = None,
    template_fn: Any = None,
    use_chat_template: bool = True,
    **hooks: Any,
) -> NotebookLearner:
    """The learner of an iteration, with all that its rollouts need."""
    environment = environment_from(environment, **{name: hooks.pop(name) for name in PLAYING & hooks.keys()})
    sampling = TRAINING._replace(max_new_tokens=max_new_tokens, temperature=temperature)
    reward = reward_from(reward_fn)
    reward = reward._replace(normalize=reward.normalize or config.normalize_rewards)
    if generator is not None:
        config = config._replace(algorithm=config.algorithm._replace(episodes=partial(generated, generator, sampling, reward)))
    generation = Sampling(engine_of(generate, sampling), temperature, max_new_tokens)
    parts = {"seed": seed, "batch": BatchSize(prompts, config.group_size), "environment": environment, "generation": generation}
    parts["reward"] = reward
    policy = policy_of(model, tokenizer, template_fn=template_fn, use_chat_template=use_chat_template)
    return NotebookLearner(policy, optimizer, config, state, parts, **hooks)


def _iteration(learner: NotebookLearner, tasks: Sequence[Task], state: TrainingState) -> tuple[TrainingState, list[Rollout]]:
    """Rollouts of the prompts that the state's stream comes to next, and the step."""
    x, stream = learner.begin(), StreamState(*state.stream)
    sampled, trained, stream = experience(x, learner.policy, tasks, stream, step=learner.rl_step, clock=learner.clock)
    after = learner.iterate(state, sampled, trained)._replace(stream=tuple(stream))
    config = TRAINING._replace(max_new_tokens=x.generation.max_new_tokens, temperature=x.generation.temperature)
    return after, sampled if x.algorithm.episodes else with_config(sampled, config)


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
    """Trains a model from a notebook, with AdamW. The steps are those of `rlkit train`, which also logs and evaluates.

    Args:
      model: one that is built, or a model_id for the model_loader.
      prompts: all of them; every step draws the next `batch_size` of an order that the seed fixes, and what refills need.
      steps: RL steps until the end, those of `state` included. save_every: steps between checkpoints; the last step is saved too.
      output_dir: where checkpoints go, by checkpoint_fn (`save_checkpoint`); None writes none. state: of `load_checkpoint`, to go on.
      config: of every step. Without one: `get_algorithm_config(step, switch_strategy, **numbers)`, GRPO where there is no strategy.
      ref_model_fn: (policy_model) → reference, called once where a KL needs it or a ref_update_fn moves it.
      progress: gets a line a step: loss and reward as moving averages, and the tokens so far. None is silent.
      hooks: of `training_iteration`; kl_fn and pair_selector act while the algorithm has a KL, or pairs.
    Returns: the model, and a row a step: step, algorithm and the metrics of `training_iteration`.
    Raises: ValueError where both a config and a strategy or numbers are given.
    """
    if config is not None and (switch_strategy is not None or numbers):
        raise ValueError("give a config, or a switch_strategy and numbers, not both: a config holds for every step")
    model = model_loader(model, "float32", None, False, 16, 32) if isinstance(model, str) else model
    assert isinstance(model, nn.Module)

    def planned(step: int) -> tuple[TrainingConfig, dict[str, Any]]:
        now = config or get_algorithm_config(step, switch_strategy or create_switch_strategy("grpo", "grpo"), **numbers)
        return now, {"seed": seed, "max_new_tokens": max_new_tokens, **(_acting(hooks, now) if switch_strategy else hooks)}

    statistics: list[dict[str, Any]] = []
    was_training = model.training
    model.eval()  # no dropout: sampler and trainer are to see one policy
    try:
        for learner, now in _steps(model, tokenizer, prompts, reward_fn, state, steps, batch_size, planned, ref_model_fn):
            statistics.append({"step": now.step, "algorithm": learner.x.algorithm.name, **now.metrics})
            if progress is not None:
                loss, reward = (now.ema_metrics.get(name, NAN) for name in ("loss", "reward"))
                progress(f"step {now.step}/{steps}  loss {loss:.4f}  reward {reward:.3f}  tokens {now.total_tokens:,}")
            if output_dir is not None and (now.step % save_every == 0 or now.step == steps):
                save = checkpoint_fn or partial(save_checkpoint, state=learner.held(now))
                save(model, tokenizer, now.step, str(output_dir))
    finally:
        model.train(was_training)
    return model, statistics


def _steps(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    reward_fn: Any,
    state: TrainingState,
    steps: int,
    batch_size: int,
    planned: Callable[[int], tuple[TrainingConfig, dict[str, Any]]],
    ref_model_fn: Callable[[nn.Module], nn.Module] | None,
) -> Iterator[tuple[NotebookLearner, TrainingState]]:
    """Every step of a run, and the state after it. `planned`: (step) → its config and hooks."""
    tasks = [as_task(prompt, i) for i, prompt in enumerate(prompts)]
    state = state._replace(stream=state.stream or divmod(state.step * batch_size, max(1, len(tasks))))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, weight_decay=0.0)
    nets: dict[str, Any] = {"ref_model": None, "critic": None, "makes_critic": True}
    for step in range(state.step, steps):
        config, hooks = planned(step)
        if nets["ref_model"] is None and ref_model_fn is not None and (config.kl.active or hooks.get("ref_update_fn")):
            nets["ref_model"] = ref_model_fn(model)
        if nets["critic"] is None and (critic := hooks.get("critic")) is not None:
            nets["critic"] = critic
            optimizer.add_param_group({"params": list(critic.parameters())})
        learner = _learner(model, tokenizer, optimizer, config, state, reward_fn, batch_size, **hooks | nets)
        nets["critic"] = nets["critic"] if learner.critic is None else learner.critic
        for group, rate in zip(optimizer.param_groups, (config.learning_rate, config.value_learning_rate), strict=False):
            group["lr"] = rate
        state, _ = _iteration(learner, tasks, state)
        yield learner, state


def _acting(hooks: Mapping[str, Any], config: TrainingConfig) -> dict[str, Any]:
    """The hooks that an algorithm has a place for: a kl_fn needs a KL, a pair_selector pairs."""
    idle = {"kl_fn": not config.kl.coef, "pair_selector": not takes_pairs(config)}
    return {name: hook for name, hook in hooks.items() if not idle.get(name)}
