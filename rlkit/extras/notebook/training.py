"""Train from a notebook. An iteration is one step of rlkit.training.learner.Learner, as in `rlkit
train`."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import rlkit.functional as F
from rlkit.algorithm import KL
from rlkit.episodes.stream import StreamState, order_of_parts
from rlkit.extras.notebook.borrowed import Share, experiment, given
from rlkit.extras.notebook.checkpoints import save_checkpoint
from rlkit.extras.notebook.configs import get_algorithm_config, make_core
from rlkit.extras.notebook.data import (
    GenerationConfig,
    Hook,
    Prompt,
    TrainingConfig,
    TrainingState,
)
from rlkit.extras.notebook.generation import (
    choose_engine,
    choose_seed,
    load_model,
    load_tokenizer,
    read_prompts,
)
from rlkit.extras.notebook.hooks import with_hooks
from rlkit.extras.notebook.kl import UpdateHook, create_reference_model, update_reference_model
from rlkit.extras.notebook.rollouts import choose_environment
from rlkit.extras.notebook.views import viewed_reward
from rlkit.training.experiment import BatchSize, Sampling, TrainerSettings
from rlkit.training.groups import experience
from rlkit.training.learner import Learner
from rlkit.training.update.optimizers import make_first_critic
from rlkit.types import Policy, Task

# tokens of a micro-batch; more than any minibatch has, so a minibatch is never split
WHOLE = 1 << 24
MEASURED = 1e-30  # a coefficient above 0, so the KL is measured, but too small to have an effect
NAMES = {
    "loss": "loss/total",
    "reward": "reward/mean",
    "kl": "kl/estimate",
    "kl_coef": "kl/coef",
    "policy_loss": "loss/policy",
    "value_loss": "value/loss",
    "grad_norm": "optim/grad_norm",
}


class Run(NamedTuple):
    """Hold the state that one iteration of an optimizer passes to the next."""

    learner: Mapping[str, Any]  # result of Learner.save
    critic: nn.Module | None
    engine: Any
    stream: StreamState
    seed: int


RUNS: weakref.WeakKeyDictionary[torch.optim.Optimizer, Run] = weakref.WeakKeyDictionary()


class IterationLearner(Learner):
    """Make a learner from an iteration's arguments. parts: fields of the Experiment. hooks: hooks
    of `with_hooks`."""

    def __init__(
        self,
        policy: Policy,
        optimizer: Any,
        config: TrainingConfig,
        ref_model: Any,
        ref_update_fn: Hook,
        parts: Any,
        **hooks: Any,
    ):
        micro_batch_tokens = hooks.pop("micro_batch_tokens", 16384)
        # a weak reference, because caches keep the parts longer than the learner lives
        algorithm, kl = with_hooks(weakref.proxy(self), config, **hooks)
        if ref_update_fn is not None:
            kl = kl._replace(estimator=kl.estimator or F.k3, coef=kl.coef or MEASURED)
        run = RUNS.get(optimizer)
        self.optimizer = optimizer
        self.config = config
        self.own_critic = run.critic if run else None
        limit = WHOLE if hooks.get("loss_fn") is not None else micro_batch_tokens
        steps = 1 + (run.learner["rl_step"] if run else 0)
        x = experiment(
            policy,
            algorithm,
            kl=kl if ref_model is not None else KL("none"),
            reference=given(
                ref_model,
                ref_update_fn and partial(update_reference_model, update_fn=ref_update_fn),
            ),
            trainer=TrainerSettings(
                steps=steps,
                micro_batch_tokens=limit,
                max_grad_norm=config.max_grad_norm or math.inf,
            ),
            **parts,
        )
        if self.own_critic is None and algorithm.critic.active:
            self.own_critic = make_first_critic(x, policy.model)
            assert self.own_critic is not None
            new = list(self.own_critic.parameters())
            optimizer.add_param_group({"params": new, "lr": config.value_learning_rate})
        critic = self.own_critic if algorithm.critic.active else None
        nets = [policy.model] if critic is None else [policy.model, critic]
        # split the caller's optimizer into one for the policy and one for the critic
        super().__init__(
            x,
            policy,
            critic=critic,
            optimizers=[Share(optimizer, net) for net in nets],  # type: ignore[misc]
        )
        if run is not None:
            self.load({"rlkit": run.learner})
            self.progress = self.progress._replace(step=self.rl_step)

    def iterate(self, tasks: Sequence[Task], stream: StreamState, engine: Any) -> TrainingState:
        """Take the step. `engine` is that of iterations without one of their own."""
        x = self.begin()
        sampled, trained, stream = experience(
            x, self.policy, tasks, stream, step=self.rl_step, clock=self.clock
        )
        metrics = self.step(sampled, trained)
        RUNS[self.optimizer] = Run(self.save(), self.own_critic, engine, stream, x.seed)
        row = {short: float(metrics[name]) for short, name in NAMES.items()} | metrics
        unread = {} if x.kl.active else {"kl": 0.0, "kl_coef": 0.0}
        return TrainingState(self.rl_step, sum(r.response_length for r in sampled), row | unread)


def training_iteration(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    gen_config: GenerationConfig,
    train_config: TrainingConfig,
    reward_fn: Any,
    optimizer: torch.optim.Optimizer,
    ref_model: nn.Module | None = None,
    ref_update_fn: UpdateHook | None = None,
    *,
    batch_size: int | None = None,
    seed: int | None = None,
    aggregator: Any = None,
    generator: Any = None,
    engine: Any = None,
    environment: Any = None,
    max_turns: int = 5,
    tool_parser: Hook = None,
    tool_executor: Hook = None,
    stop_condition: Hook = None,
    template_fn: Hook = None,
    use_chat_template: bool = False,
    **hooks: Any,
) -> TrainingState:
    """Take one RL step, as in `rlkit train`. Return its metrics, also under the short names in
    NAMES. All iterations with the same optimizer are one run.

    batch_size: number of prompts to take next, in an order fixed by the seed; None: all prompts.
      Arguments of `create_batch_rollouts` do the same here. hooks: advantage_fn, loss_fn (on a
      whole minibatch), kl_fn, pair_selector, and micro_batch_tokens. A hook without effect raises
      ValueError.
    """
    _warn(gen_config, make_core(train_config)[1], ref_model, ref_update_fn, hooks.get("kl_fn"))
    run = RUNS.get(optimizer)
    # the stream's place counts in the order of one seed
    seed = run.seed if run and seed is None else choose_seed(seed)
    policy, tasks = read_prompts(
        model, tokenizer, prompts, gen_config, use_chat_template, template_fn
    )
    stream = run.stream if run and batch_size else StreamState()
    tasks = tasks if batch_size else _reorder(tasks, seed)
    params = gen_config.params
    reward = viewed_reward(reward_fn, aggregator)
    kept = choose_engine(None, gen_config, engine or (run.engine if run else None))
    parts = {
        "seed": seed,
        "batch": BatchSize(batch_size or len(tasks), train_config.group_size),
        "environment": choose_environment(
            environment, max_turns, tool_parser, tool_executor, stop_condition
        ),
        "generation": Sampling(
            choose_engine(generator, gen_config, kept), params.temperature, params.max_new_tokens
        ),
        "reward": reward._replace(normalize=reward.normalize or train_config.normalize_rewards),
    }
    was_training = model.training
    model.eval()  # without dropout, so sampler and trainer see the same policy
    try:
        return IterationLearner(
            policy, optimizer, train_config, ref_model, ref_update_fn, parts, **hooks
        ).iterate(tasks, stream, kept)
    finally:
        model.train(was_training)


def _reorder(tasks: Sequence[Task], seed: int) -> list[Task]:
    """Reorder the tasks, so that the stream draws them in the given order."""
    places = order_of_parts(tasks, seed, 0)  # places[i] is the place of the stream's i-th draw
    return [task for _, task in sorted(zip(places, tasks, strict=True), key=lambda pair: pair[0])]


def _warn(config: GenerationConfig, kl: KL, ref_model: Any, ref_update_fn: Any, kl_fn: Any) -> None:
    """Warn of settings without effect. Raises: ValueError for a hook without effect."""
    for name, hook in (("ref_update_fn", ref_update_fn), ("kl_fn", kl_fn)):
        if hook is not None and ref_model is None:
            raise ValueError(
                f"{name} is given, and no ref_model; give one, such as"
                " create_reference_model(model)"
            )
    if kl.coef and ref_model is None:
        warnings.warn(
            f"kl_coef={kl.coef} has no effect without a ref_model, such as"
            " create_reference_model(model)",
            stacklevel=3,
        )
    if config.do_sample and (config.top_p < 1 or config.top_k):
        warnings.warn(
            "training samples the full distribution: top_p and top_k are taken as 1 and 0",
            stacklevel=3,
        )


def train(
    model_name: str | nn.Module,
    prompts: Sequence[Prompt],
    reward_fn: Any,
    num_steps: int = 100,
    batch_size: int = 4,
    algorithm: str = "grpo",
    learning_rate: float = 1e-4,
    use_ref_model: bool = False,
    kl_coef: float = 0.1,
    output_dir: str | Path = "./output",
    *,
    gen_config: GenerationConfig = GenerationConfig(256, 0.7, 1.0, 0),  # noqa: B008  (immutable)
    train_config: TrainingConfig | None = None,
    switch_strategy: Callable[[int], str] | None = None,
    save_every: int = 50,
    tokenizer: Any = None,
    model_loader: Callable[..., Any] | None = None,
    ref_model_fn: Callable[..., Any] | None = None,
    checkpoint_fn: Callable[..., None] | None = None,
    optimizer_fn: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    log_fn: Callable[[TrainingState], None] | None = None,
    seed: int | None = None,
    **hooks: Any,
) -> tuple[Any, Any]:
    """Train adapters on a named model, or train a model object. The seed fixes the order of the
    prompts. Return model and tokenizer.

    train_config: replaces algorithm, learning_rate and kl_coef. switch_strategy: replaces
    algorithm. log_fn: called with every state. optimizer_fn: function from (parameters,
    lr=learning_rate) to an optimizer. hooks: hooks of `training_iteration`. With a switch_strategy,
    pair_selector is used only in iterations with dapo. save_every: 0 saves nothing. Raises:
    ValueError for a switch_strategy beside a train_config.
    """
    rate = train_config.learning_rate if train_config else learning_rate
    numbers = {"kl_coef": kl_coef if use_ref_model else 0.0, "learning_rate": rate}
    configure = _choose_configs(train_config, switch_strategy, algorithm, **numbers)
    tokenizer = tokenizer or load_tokenizer(str(getattr(model_name, "name_or_path", model_name)))
    model = (
        load_model(model_name, use_lora=True, model_loader=model_loader)
        if isinstance(model_name, str)
        else model_name
    )
    ref_model = create_reference_model(model, ref_model_fn) if use_ref_model else None
    optimizer = optimizer_fn([p for p in model.parameters() if p.requires_grad], lr=rate)
    ema = dict[str, float]()
    tokens = 0
    seed = choose_seed(seed)
    update_fn = hooks.pop("ref_update_fn", None)
    os.makedirs(output_dir, exist_ok=True)
    for step in range(num_steps):
        config = configure(step)
        acting = {
            key: hook
            for key, hook in hooks.items()
            if key != "pair_selector" or config.algorithm == "dapo" or not switch_strategy
        }
        given_once = gen_config, config, reward_fn, optimizer, ref_model, update_fn
        state = training_iteration(
            model, tokenizer, prompts, *given_once, batch_size=batch_size, seed=seed, **acting
        )
        ema = update_ema_metrics(state.metrics, ema)
        tokens += state.total_tokens
        (log_fn or partial(_say, num_steps, tokens))(state._replace(ema_metrics=ema))
        if save_every and (step + 1) % save_every == 0:
            save_checkpoint(model, tokenizer, step, str(output_dir), checkpoint_fn)
    return model, tokenizer


def _choose_configs(
    train_config: TrainingConfig | None,
    switch_strategy: Callable[[int], str] | None,
    algorithm: str,
    **numbers: float,
) -> Callable[[int], TrainingConfig]:
    """Return a function from an iteration to its config."""
    if train_config is None:
        switch = switch_strategy or (lambda _: algorithm)
        return lambda step: get_algorithm_config(step, switch, **numbers)
    if switch_strategy is not None:
        raise ValueError(
            "train_config has one algorithm for all iterations, and switch_strategy chooses one for"
            " each; give one of them"
        )
    return lambda _: train_config


def _say(steps: int, tokens: int, state: TrainingState) -> None:
    loss, reward = (state.ema_metrics.get(name, math.nan) for name in ("loss", "reward"))
    print(f"step {state.step}/{steps}  loss {loss:.4f}  reward {reward:.3f}  tokens {tokens:,}")


def update_ema_metrics(
    current_metrics: Mapping[str, float], ema_metrics: Mapping[str, float], momentum: float = 0.9
) -> dict[str, float]:
    """Return momentum · average + (1 - momentum) · value for each name. A new name starts with its
    value. A nan or infinite value changes nothing."""
    finite = {name: value for name, value in current_metrics.items() if math.isfinite(value)}
    return {
        **ema_metrics,
        **{
            name: momentum * ema_metrics.get(name, value) + (1 - momentum) * value
            for name, value in finite.items()
        },
    }
