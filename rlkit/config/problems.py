"""What of an experiment cannot run, or would silently do nothing, as sentences; and a dry run of its maths on fake data.

Numbers and combinations are looked at here; keys and types are by their functions' signatures (rlkit.config.schema). Neither needs a model.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from rlkit.config.assumptions import assumption_problems, assumption_warnings
from rlkit.errors import ConfigError, nearest
from rlkit.training.schedules import at, phases, schedule_problems, schedule_warnings, start

if TYPE_CHECKING:  # torch is imported with the parts that need it, not before
    from rlkit.training.experiment import Experiment


def range_problems(node: Any, path: str = "") -> list[str]:
    """Numbers below what their part can work with, where it would say so only in the middle of a run."""
    from rlkit.training.experiment import LEAST

    items = enumerate(node) if isinstance(node, list) else node.items() if isinstance(node, dict) else ()
    least = LEAST.get(str(node.get("_target_")), {}) if isinstance(node, dict) else {}
    problems = []
    for key, value in items:
        where = f"{path}[{key}]" if isinstance(node, list) else f"{path}.{key}" if path else str(key)
        if key in least and isinstance(value, int | float) and value < least[key]:
            problems.append(f"{where}={value}: must be at least {least[key]:g}")
        problems += range_problems(value, where)
    return problems


def run_problems(x: Experiment) -> list[str]:
    """All problems of a run with its phases, each at its first step."""
    problems = schedule_problems(x) + rank_problems(x)
    firsts = {} if problems else first_steps(x)
    problems += [f"schedule.phases.{name}: {problem}" if name else problem for name, first in firsts.items() for problem in validate(first)]
    problems += [problem for problem in _negative(x) if problem not in problems]
    if firsts and not x.needs_reference and x.reference.name not in ("none", "frozen"):
        problems.append(
            f"reference={x.reference.name}: it would be updated and never used, since no KL compares with it (kl={x.kl.name}, "
            f"kl.coef={x.kl.coef}); choose a kl, or reference=frozen"
        )
    critics = {name: first.algorithm.critic.model for name, first in firsts.items() if first.algorithm.critic.active}
    if len(set(critics.values())) > 1:
        kinds = ", ".join(f"{name}: {model}" for name, model in critics.items())
        problems.append(f"schedule.phases: a run has one critic, and its phases ask for several ({kinds}); choose one for all of them")
    return problems + optimizer_problems(x)


def validate(x: Experiment) -> list[str]:
    """Combinations that cannot run, or that would silently do nothing, as sentences."""
    checks = (_check_numbers, _check_evaluation, _check_groups, _check_kl, _check_critic, _check_quantities, assumption_problems)
    return [problem for check in checks for problem in check(x)]


def _check_numbers(x: Experiment) -> list[str]:
    from rlkit.training.experiment import thinking_problems

    rollouts = x.batch.prompts * x.batch.group_size
    a = x.algorithm
    counts: dict[str, float] = {
        "batch.prompts": x.batch.prompts,
        "batch.group_size": x.batch.group_size,
        "trainer.max_nonfinite": x.trainer.max_nonfinite,
        "algorithm.epochs": a.epochs,
        "algorithm.minibatches": a.minibatches,
        "generation.max_new_tokens": x.generation.max_new_tokens,
    }
    problems = [f"{path}={value}: must be at least 1" for path, value in counts.items() if value < 1]
    problems += thinking_problems(x.generation)
    problems += _negative(x)
    if a.target_kl is not None and not a.target_kl > 0:
        problems.append(f"algorithm.target_kl={a.target_kl}: must be greater than 0 nats per token; null never ends a step's updates early")
    if x.generation.temperature == 0:
        problems.append("generation.temperature=0: greedy samples of a prompt are all equal, so nothing is learned; use 1.0")
    if x.generation.top_p < 1 or x.generation.top_k > 0:
        problems.append(
            f"generation.top_p={x.generation.top_p}, generation.top_k={x.generation.top_k}: training samples from the full distribution, "
            "since ratios and KL compare full distributions and are wrong on samples of a cut one; set top_p=1 and top_k=0"
        )
    if x.trainer.max_step_time is not None and not x.trainer.max_step_time > 0:
        problems.append(f"trainer.max_step_time={x.trainer.max_step_time}: must be greater than 0 minutes; null waits for ever")
    if x.evaluation.max_time is not None and not x.evaluation.max_time > 0:
        problems.append(f"evaluation.max_time={x.evaluation.max_time}: must be greater than 0 minutes; null waits for ever")
    if x.trainer.requeue and x.resume == "never":
        problems.append("trainer.requeue: with resume=never the job that is queued again would begin anew; set resume=auto, or name a run")
    if not problems and rollouts % a.minibatches:
        problems.append(
            f"algorithm.minibatches={a.minibatches}: {x.batch.prompts} prompts × {x.batch.group_size} samples are "
            f"{rollouts} rollouts, which do not divide into that many equal parts; change it, batch.prompts or batch.group_size"
        )
    return problems


def _negative(x: Experiment) -> list[str]:
    """Of the numbers that a schedule may set in place of the config's, too: a broken one is never taken for what it is not."""
    amounts = {
        "kl.coef": x.kl.coef,
        "generation.temperature": x.generation.temperature,
        "algorithm.entropy_coef": x.algorithm.entropy_coef,
        "algorithm.max_refills": x.algorithm.max_refills,
        "algorithm.critic.warmup": x.algorithm.critic.warmup,
        "algorithm.critic.coef": x.algorithm.critic.coef,
    }
    return [f"{path}={value}: must not be negative" for path, value in amounts.items() if isinstance(value, int | float) and value < 0]


def _check_evaluation(x: Experiment) -> list[str]:
    e, problems = x.evaluation, []
    if e.every > 0 and e.n == 0:
        problems.append(f"evaluation.every={e.every}: evaluation.n=0 leaves nothing to evaluate; raise it, or set evaluation.every=0")
    if e.stop_at is not None and (e.every == 0 or e.n == 0):
        problems.append(f"evaluation.stop_at={e.stop_at}: nothing is evaluated during training; set evaluation.every and evaluation.n")
    for name, callback in x.callbacks.items():
        best = getattr(callback, "keywords", {}).get("best")
        if isinstance(best, str) and best.startswith("test/"):
            problems.append(
                f"callbacks.{name}.best={best}: test problems must not decide which checkpoint is kept; choose eval/{best[5:]} (validation)"
            )
        if isinstance(best, str) and best.startswith("eval/") and (e.every == 0 or e.n == 0):
            problems.append(f"callbacks.{name}.best={best}: no validation problem is played; set evaluation.every and evaluation.n")
    if any(k < 1 for k in e.k):
        problems.append(f"evaluation.k={list(e.k)}: pass@k needs k of at least 1")
    return problems


def rank_problems(x: Experiment) -> list[str]:
    """Numbers of devices that cannot be, and what several ranks cannot do, as sentences."""
    t, problems = x.trainer, []
    count = t.devices * t.nodes
    for name, value in {"devices": t.devices, "nodes": t.nodes}.items():
        if value < 1:
            problems.append(f"trainer.{name}={value}: must be at least 1")
    if not t.timeout > 0:
        problems.append(f"trainer.timeout={t.timeout}: must be greater than 0 seconds")
    if count > 1 and t.strategy == "single":
        problems.append(
            f"trainer.devices={t.devices}, trainer.nodes={t.nodes}: one process uses one device; choose trainer=ddp, or trainer=fsdp for a "
            "model that one device does not hold"
        )
    if count > 1 and x.batch.prompts < count:
        problems.append(
            f"batch.prompts={x.batch.prompts}: the samples of a prompt stay on one rank, so {count} ranks need at least as many prompts; "
            "raise it, or lower trainer.devices"
        )
    if t.strategy == "fsdp" and count > 1:
        lora = x.model.keywords.get("lora") if hasattr(x.model, "keywords") else None
        own = [name for name, phase in x.schedule.phases.items() if phase.reference is not None or "reference" in phase.reset]
        if lora and lora.rank and own:
            problems.append(
                f"trainer=fsdp model.lora.rank={lora.rank} schedule.phases.{own[0]}: a phase cannot add a reference of its own "
                "to sharded adapters; choose trainer=ddp, or let the phases share the reference of the run"
            )
    return problems


def _check_groups(x: Experiment) -> list[str]:
    from rlkit.algorithm import asks
    from rlkit.functional import keep_all

    problems = []
    if x.algorithm.episodes is not None and x.batch.group_size != 1:
        problems.append(
            f"batch.group_size={x.batch.group_size}: algorithm={x.algorithm.name} samples nothing, so a row is one episode; set it to 1"
        )
    numbers = inspect.signature(x.algorithm.advantage).parameters  # a partial's defaults are what the config has bound
    if x.batch.group_size == 1 and (asks(x.algorithm.advantage, "group_ids") or asks(x.algorithm.normalization, "group_ids")):
        problems.append(
            f"batch.group_size=1: algorithm={x.algorithm.name} compares the samples of a prompt with one another and needs at "
            "least 2; raise it, or choose algorithm=reinforce"
        )
    k = numbers["k"].default if "k" in numbers else None
    if isinstance(k, int) and "group_ids" in numbers and k >= x.batch.group_size > 1:
        problems.append(
            f"algorithm.advantage.k={k}: with batch.group_size={x.batch.group_size} there is one subset of that many samples and "
            "nothing to compare it with, so every advantage is 0; lower it, or raise batch.group_size"
        )
    if x.algorithm.max_refills > 0 and getattr(x.algorithm.group_filter, "func", x.algorithm.group_filter) is keep_all:
        problems.append(
            f"algorithm.max_refills={x.algorithm.max_refills}: the group filter accepts every prompt, so none is ever replaced; "
            "choose algorithm/group_filter=mixed, or set it to 0"
        )
    return problems


def _check_kl(x: Experiment) -> list[str]:
    from rlkit.algorithm import asks

    kl, problems = x.kl, []
    if x.needs_reference and x.reference.name == "none":
        problems.append(f"kl={kl.name} needs a reference to compare with, but reference=none; choose reference=frozen or kl=none")
    if kl.importance_weight and kl.placement != "loss":
        problems.append(f"kl.importance_weight: there is no ratio in the reward (kl.placement={kl.placement}); set it to false")
    if kl.importance_weight and asks(kl.estimator, "logprobs_old"):
        problems.append(f"kl.importance_weight: kl={kl.name} carries the ratio already; set it to false")
    if kl.in_baseline and kl.placement == "loss":
        problems.append(
            "kl.in_baseline: with kl.placement=loss nothing of the KL is in the reward; set it to false, or choose another placement"
        )
    if asks(kl.estimator, "full_kl") and kl.placement != "loss":
        problems.append(
            f"kl={kl.name} kl.placement={kl.placement}: the exact KL of a position is the same whatever token was drawn there, so as a "
            "reward it cannot teach that token; choose kl.placement=loss, or kl=k1"
        )
    return problems


def _check_critic(x: Experiment) -> list[str]:
    a, problems = x.algorithm, []
    if a.critic.active and a.critic.optimizer is None:
        problems.append("algorithm.critic.optimizer: the critic needs an optimizer of its own")
    for name, function in a.parts.items():
        if "values" in inspect.signature(function).parameters and not a.critic.active:
            problems.append(
                f"algorithm.{name} asks for the values of a critic, but there is none; choose algorithm/critic=head (or separate), "
                "or a part without values"
            )
    return problems


def _check_quantities(x: Experiment) -> list[str]:
    from rlkit.algorithm import inputs
    from rlkit.types import QUANTITIES

    own = {} if x.kl.estimator is None else {"kl.estimator": x.kl.estimator}
    parts = {f"algorithm.{name}": function for name, function in x.algorithm.parts.items()} | own
    return [
        f"{path}: asks for a quantity '{name}' that does not exist.{nearest(name, QUANTITIES)} There are: {', '.join(QUANTITIES)}"
        for path, function in parts.items()
        for name in inputs(function)
        if name not in QUANTITIES
    ]


def warnings(x: Experiment) -> list[str]:
    """What is legal but probably not meant."""
    from rlkit.functional import forward, k1

    a, out = x.algorithm, schedule_warnings(x) + list(dict.fromkeys(text for p in phases(x).values() for text in assumption_warnings(p)))
    updates = a.epochs * a.minibatches
    if not x.needs_reference and x.reference.name != "none":
        out.append(f"reference={x.reference.name} is not built: no KL uses it (kl={x.kl.name}, kl.coef={x.kl.coef})")
    lora = getattr(x.model, "keywords", {}).get("lora")
    if x.needs_reference and lora and lora.rank and any(phase.reference.name == "ema" for phase in phases(x).values()):
        out.append(
            f"reference=ema model.lora.rank={lora.rank} averages the adapter's factors and not their product, so the reference is not "
            "quite the average of the policy's weights (rlkit.training.references.ema says by how much); reference=periodic copies exactly"
        )
    if x.batch.group_size == 1 and not a.critic.active and a.episodes is None:
        out.append("batch.group_size=1: nothing to compare a rollout with but the rest of the batch; the gradient will be noisy")
    if x.kl.in_reward and getattr(x.kl.estimator, "func", x.kl.estimator) not in (k1, forward):
        out.append(
            f"kl={x.kl.name} kl.placement={x.kl.placement}: as a reward this estimator hardly pulls towards the reference, or pushes away "
            "(table in rlkit/functional/kl.py); kl=k1 does"
        )
    out += [
        f"{path}={steps}: {why} (trainer.steps={x.trainer.steps}); lower it, or train longer"
        for path, steps, why in _too_late(x)
        if steps >= x.trainer.steps
    ]
    if a.target_kl is not None and updates == 1:
        out.append(f"algorithm.target_kl={a.target_kl} does nothing: with one update a step the policy has not moved when it is checked")
    if "pair_selector" in inspect.signature(a.advantage).parameters and updates > 1:
        out.append(f"algorithm={a.name}: with {updates} updates a step, pair weights after the first are those of the policy before it")
    return out


def _too_late(x: Experiment) -> list[tuple[str, int, str]]:
    """(path, RL steps, what does not happen in a run that is no longer): numbers of steps that a short run never reaches."""
    out = []
    every = getattr(x.reference.update, "keywords", {}).get("every")
    if x.needs_reference and isinstance(every, int):
        out.append(("reference.every", every, "no update sees a new copy of the policy, so the reference is the frozen start"))
    if x.algorithm.critic.active:
        out.append(("algorithm.critic.warmup", x.algorithm.critic.warmup, "the policy is never trained"))
    return out


def dry_run(x: Experiment) -> None:
    """One update on fake data through advantage, weights, loss and backward, in milliseconds and without a model.

    Not where a part asks for `metadata`: what stands in the user's rows cannot be made up.

    Raises: ConfigError where a part fails, or where the gradient is not finite or zero.
    """
    import torch

    from rlkit.algorithm import asks, choose, estimate_advantages, scale_tokens, surrogate, value_surrogate, weigh
    from rlkit.training.metrics import UpdateTerms, update_metrics
    from rlkit.types import Batch, Scores

    if any(asks(function, "metadata") for function in (*x.algorithm.parts.values(), x.kl.estimator)):
        return
    groups, size, width, vocabulary = 2, max(2, min(x.batch.group_size, 64)), 6, 7
    n = groups * size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (n, width), generator=generator)
    mask = (torch.arange(width) >= 2).expand(n, width).clone()
    logits = torch.randn(n, width, vocabulary, generator=generator).requires_grad_()
    logprobs = logits.log_softmax(-1).gather(2, ids[:, :, None])[:, :, 0]
    fixed = logprobs.detach()
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    rewards = (torch.arange(n) % size == 0).float()
    values = torch.zeros(n, width).requires_grad_()
    batch = Batch(
        ids=ids, attention_mask=torch.ones_like(mask), response_mask=mask, rollout_ids=torch.arange(n),
        step_ids=torch.zeros_like(ids), rewards=rewards, group_ids=torch.arange(n) // size,
        truncated=torch.zeros(n, dtype=torch.bool), lengths=mask.sum(1), reply_lengths=mask.sum(1),
        token_rewards=torch.zeros(n, width).index_fill(1, torch.tensor([width - 1]), 1.0) * rewards[:, None],
        logprobs_sampler=fixed, logprobs_old=fixed, entropy_old=entropy.detach(), logprobs_ref=fixed - 0.1,
        full_kl=torch.full_like(fixed, 0.1), values=values.detach(), versions=torch.zeros_like(ids),
        components={name: rewards.clone() for name in x.reward.terms}, metadata=tuple({} for _ in range(n)),
    )  # fmt: skip
    try:
        batch = estimate_advantages(scale_tokens(choose(batch, x.algorithm), x.algorithm), x.algorithm, x.kl)
        batch = weigh(batch, x.algorithm)
        scores = Scores(logprobs, entropy, values, full_kl=logprobs - fixed + 0.1)
        loss, terms = surrogate(batch, scores, x.algorithm, x.kl)
        if x.algorithm.critic.active:
            loss = loss + value_surrogate(batch, scores, x.algorithm.critic)[0]
        loss.backward()
        update_metrics(batch._replace(metrics={name: term for name, term in terms.items() if "/" in name}), UpdateTerms(), x)
    except (TypeError, ValueError, RuntimeError, KeyError, IndexError) as error:
        raise ConfigError(f"algorithm={x.algorithm.name}, kl={x.kl.name}: the dry run on fake data fails: {error}") from error
    if logits.grad is None or not torch.isfinite(logits.grad).all() or not logits.grad.any():
        made = {"advantage": batch.advantages, "correction": batch.scale, "aggregation": batch.weights} | terms
        bad = [name for name, value in made.items() if value is not None and value.shape == mask.shape and not value[mask].isfinite().all()]
        why = f": {bad[0]} gave nan or inf" if bad else ""
        raise ConfigError(f"algorithm={x.algorithm.name}: the dry run's gradient is zero or not finite{why}; check its numbers")


def optimizer_problems(x: Experiment) -> list[str]:
    """What an optimizer says to its numbers, tried on one parameter: with the model it would be too late."""
    import torch

    critics = {id(p.algorithm.critic): p.algorithm.critic.optimizer for p in phases(x).values() if p.algorithm.critic.active}
    problems = []
    for path, make in [("optimizer", x.optimizer), *(("algorithm.critic.optimizer", make) for make in critics.values() if make)]:
        try:
            make([torch.nn.Parameter(torch.zeros(1))])
        except (TypeError, ValueError, RuntimeError) as error:
            problems.append(f"{path}: {error}; its numbers are {', '.join(f'{k}={v}' for k, v in getattr(make, 'keywords', {}).items())}")
    return problems


def first_steps(x: Experiment) -> dict[str, Experiment]:
    """Phase → its experiment at its first step, every number a plain number; each finds its place at the first and the last step.

    Raises: ConfigError naming the path that does not.
    """
    out = {}
    for name, phase in phases(x).items():
        try:
            at(phase, start(phase)._replace(step=x.trainer.steps - 1))
            out[name] = at(phase, start(phase))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"{f'schedule.phases.{name}, ' if name else ''}schedule.numbers: {error.args[0]}") from error
    return out
