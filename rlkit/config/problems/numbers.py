"""Numbers out of their range, and numbers that do not fit one another, as sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlkit.config.schema import resolve
from rlkit.training.schedules import Schedule
from rlkit.training.schedules.paths import fields

if TYPE_CHECKING:  # torch is imported with the parts that need it, not before
    from rlkit.training.experiment import AgentRun, Experiment, Sampling


def range_problems(node: Any, path: str = "") -> list[str]:
    """Numbers out of the range that their part declares (`rlkit.types.ranges`), in a config or in what was built from it."""
    named = isinstance(node, Mapping) and "_target_" in node
    part = resolve(node["_target_"]) if named else getattr(node, "func", type(node))
    limits, problems = getattr(part, "__ranges__", {}), []
    for key, value in enumerate(node) if isinstance(node, list) else fields(node).items():
        where = f"{path}[{key}]" if isinstance(node, list) else f"{path}.{key}" if path else str(key)
        low, high = limits.get(key, (None, None)) if isinstance(value, int | float) else (None, None)
        if low is not None and value < low:
            problems.append(f"{where}={value}: must be at least {low:g}")
        if high is not None and value > high:
            problems.append(f"{where}={value}: must be at most {high:g}")
        problems += range_problems(value, where)
    return problems


def number_problems(x: Experiment) -> list[str]:
    rollouts = x.batch.prompts * x.batch.group_size
    a = x.algorithm
    counts: dict[str, float] = {
        "algorithm.epochs": a.epochs,
        "algorithm.minibatches": a.minibatches,
        "generation.max_new_tokens": x.generation.max_new_tokens,
    }
    problems = range_problems(x._replace(schedule=Schedule()))
    problems += [f"{path}={value}: must be at least 1" for path, value in counts.items() if value < 1]
    problems += thinking_problems(x.generation)
    problems += negative(x)
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


def negative(x: Experiment) -> list[str]:
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


def sampling_problems(sampling: Sampling) -> list[str]:
    """What no engine can sample, as sentences."""
    from rlkit.engines.service import out_of_range  # engines bring torch

    return out_of_range(sampling) + thinking_problems(sampling)


def thinking_problems(sampling: Sampling) -> list[str]:
    """A thinking budget out of range, or one that no reply can reach, as a sentence."""
    budget, limit = sampling.max_thinking_tokens, sampling.max_new_tokens
    if budget is None or 0 <= budget < limit:
        return []
    return [
        f"generation.max_thinking_tokens={budget}: must be at least 0 and below generation.max_new_tokens={limit}, where a reply ends "
        "anyway; null sets no limit"
    ]


def agent_problems(x: AgentRun) -> list[str]:
    """What of `rlkit agent` is out of range besides what its settings declare."""
    problems = []
    if x.timeout is not None and not x.timeout > 0:
        problems.append(f"timeout={x.timeout}: must be > 0 seconds, or null for no limit")
    return problems + sampling_problems(x.generation)
