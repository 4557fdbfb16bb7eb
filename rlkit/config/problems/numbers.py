"""Find numbers out of their range, and contradictions between numbers, as sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlkit.config.schema import resolve
from rlkit.training.schedules.paths import list_fields
from rlkit.types import plain

if TYPE_CHECKING:  # torch is imported only with the parts that need it
    from rlkit.training.experiment import Experiment, Sampling


def range_problems(node: Any, path: str = "") -> list[str]:
    """List numbers outside the range declared by their part (`rlkit.types.ranges`). `node` is a
    config, or an object built from a config."""
    named = isinstance(node, Mapping) and "_target_" in node
    part = resolve(node["_target_"]) if named else plain(node)
    limits = getattr(part, "__ranges__", {})
    problems = []
    for key, value in enumerate(node) if isinstance(node, list) else list_fields(node).items():
        if isinstance(node, list):
            where = f"{path}[{key}]"
        else:
            where = f"{path}.{key}" if path else str(key)
        low, high = (
            limits.get(key, (None, None)) if isinstance(value, int | float) else (None, None)
        )
        if low is not None and value < low:
            problems.append(f"{where}={value}: must be at least {low:g}")
        if high is not None and value > high:
            problems.append(f"{where}={value}: must be at most {high:g}")
        problems += range_problems(value, where)
    return problems


def number_problems(x: Experiment) -> list[str]:
    """List impossible numbers, and contradictions between numbers, as sentences."""
    a = x.algorithm
    sampling = x.generation
    rollouts = x.batch.prompts * x.batch.group_size
    known = {"task": x.task.load, "model": x.model.load, "schedule": {}}
    problems = range_problems(x._asdict() | known) + thinking_problems(sampling)
    if a.target_kl is not None and not a.target_kl > 0:
        problems.append(
            f"algorithm.target_kl={a.target_kl}: must be greater than 0 nats per token; null never"
            " ends a step's updates early"
        )
    if sampling.temperature == 0:
        problems.append(
            "generation.temperature=0: greedy samples of a prompt are all equal, so nothing is"
            " learned; use 1.0"
        )
    if sampling.top_p < 1 or sampling.top_k > 0:
        problems.append(
            f"generation.top_p={sampling.top_p}, generation.top_k={sampling.top_k}: training"
            " samples from the full distribution, since ratios and KL compare full distributions"
            " and are wrong on samples of a cut one; set top_p=1 and top_k=0"
        )
    if x.trainer.requeue and x.resume == "never":
        problems.append(
            "trainer.requeue: with resume=never a job that is queued again would start over; set"
            " resume=auto, or name a run"
        )
    if not problems and rollouts % a.minibatches:
        problems.append(
            f"algorithm.minibatches={a.minibatches}: {x.batch.prompts} prompts ×"
            f" {x.batch.group_size} samples are {rollouts} rollouts, which do not divide into that"
            " many equal parts; change it, batch.prompts or batch.group_size"
        )
    return problems


def sampling_problems(sampling: Sampling) -> list[str]:
    """List sampling settings supported by no engine, as sentences."""
    from rlkit.engines.service import find_out_of_range  # this imports torch

    return find_out_of_range(sampling) + thinking_problems(sampling)


def thinking_problems(sampling: Sampling) -> list[str]:
    """Report a thinking budget out of range, or above the length of the longest reply."""
    budget = sampling.max_thinking_tokens
    limit = sampling.max_new_tokens
    if budget is None or 0 <= budget < limit:
        return []
    return [
        f"generation.max_thinking_tokens={budget}: must be at least 0 and below"
        f" generation.max_new_tokens={limit}, where a reply ends anyway; null sets no limit"
    ]
