"""Find legal settings that are probably not intended."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit.config.functions import read_key
from rlkit.config.problems.assumptions import assumption_warnings
from rlkit.config.problems.combinations import list_corrections
from rlkit.config.problems.schedules import schedule_warnings
from rlkit.environments import find_environment
from rlkit.errors import name_function
from rlkit.tasks.splits import find_overlaps
from rlkit.training.schedules import list_phases
from rlkit.types import Splits, bound, plain

if TYPE_CHECKING:  # torch is imported only with the parts that need it
    from rlkit.training.experiment import Experiment, RolloutRun


def _list_unused(x: Experiment) -> list[str]:
    """List chosen parts without effect in this run."""
    out = []
    # Do not warn if the algorithm turns the KL off and the reference is the default: the user has
    # not asked for a reference.
    by_default = x.kl.name != "none" and x.reference.name == "frozen"
    if not x.needs_reference and x.reference.name != "none" and not by_default:
        out.append(
            f"reference={x.reference.name} is not built: no KL uses it (kl={x.kl.name},"
            f" kl.coef={x.kl.coef})"
        )
    if x.model.interruption and x.generation.max_thinking_tokens is None:
        out.append(
            "model.interruption does nothing: no thinking is interrupted; set"
            " generation.max_thinking_tokens"
        )
    if x.teacher.models and not x.needs_teacher:
        out.append(
            f"teacher={x.teacher.name} is not built: no algorithm.streams.teacher asks for it;"
            " choose algorithm=opd, or teacher=none"
        )
    return out


def _list_idle(x: Experiment, overrides: Sequence[str], tasks: Splits | None) -> list[str]:
    """List keys that have no effect in this run, although the user has set them."""
    rows = {task.environment: task for task in tasks.train}.values() if tasks else ()
    once = bool(rows) and all(find_environment(x.environment, row).max_steps == 1 for row in rows)
    counted = x.generation.admission == "rounds"
    all_weights = not x.model.rank, "model.lora.rank=0 trains all weights; set it"
    alone = once, "every episode ends with its first reply, so none waits for an answer"
    reuse = x.reuse
    idle = {
        "model.lora.alpha": all_weights,
        "model.lora.targets": all_weights,
        "task.reuse.groups": (
            reuse.groups > 0 and reuse.staleness == 0,
            "with task.reuse.staleness=0 no group is used again; set it",
        ),
        "task.reuse.staleness": (
            reuse.staleness > 0 and reuse.groups == 0,
            "with task.reuse.groups=0 no group is kept; set it",
        ),
        "generation.admission": alone,
        "generation.admission_rounds": (
            alone if counted else (True, "only generation.admission=rounds counts them")
        ),
    }
    given = set(map(read_key, overrides))
    return [
        f"{key} does nothing: {why}" for key, (off, why) in idle.items() if off and key in given
    ]


def list_warnings(
    x: Experiment, overrides: Sequence[str] = (), tasks: Splits | None = None
) -> list[str]:
    """List legal settings that are probably not intended, and problems occurring in two splits of
    the data.

    Args:
      overrides: the user's overrides. tasks: the run's tasks; None: they are not loaded yet.
    """
    from rlkit.functional import forward, k1

    a = x.algorithm
    out = schedule_warnings(x)
    out += dict.fromkeys(text for p in list_phases(x).values() for text in assumption_warnings(p))
    updates = a.epochs * a.minibatches
    out += find_embedded_numbers(
        x, ("optimizer.lr", "trainer.steps", "generation.max_new_tokens")
    ) + _adapter_rate(x)
    out += _list_unused(x) + _list_idle(x, overrides, tasks)
    if (
        x.needs_reference
        and x.model.rank
        and any(phase.reference.name == "ema" for phase in list_phases(x).values())
    ):
        out.append(
            f"reference=ema model.lora.rank={x.model.rank} averages the adapter's factors and not"
            " their product, so the reference is not quite the average of the policy's weights"
            " (rlkit.training.references.ema says by how much); reference=periodic copies exactly"
        )
    if x.batch.group_size == 1 and not a.critic.active and a.episodes is None:
        out.append(
            "batch.group_size=1: nothing to compare a rollout with but the rest of the batch; the"
            " gradient will be noisy"
        )
    if x.kl.in_reward and plain(x.kl.estimator) not in (k1, forward):
        out.append(
            f"kl={x.kl.name} kl.placement={x.kl.placement}: as a reward this estimator hardly pulls"
            " towards the reference, or pushes away (table in rlkit/functional/kl.py); kl=k1 does"
        )
    out += [
        f"{path}={steps}: {why} (trainer.steps={x.trainer.steps}); lower it, or train longer"
        for path, steps, why in _find_unreached(x)
        if steps >= x.trainer.steps
    ]
    if a.target_kl is not None and updates == 1:
        out.append(
            f"algorithm.target_kl={a.target_kl} does nothing: with one update a step the policy has"
            " not moved when it is checked"
        )
    if "pair_selector" in inspect.signature(a.advantage).parameters and updates > 1:
        out.append(
            f"algorithm={a.name}: with {updates} updates a step, pair weights after the first are"
            " those of the policy before it"
        )
    out += dict.fromkeys(text for p in list_phases(x).values() for text in _correction_doubts(p))
    return out + (find_overlaps(tasks) if tasks else [])


def _correction_doubts(x: Experiment) -> list[str]:
    """Report doubtful off-policy corrections. A correction may count the difference to the sampler
    twice, drop short replies by chance, or be missing although the samples are old."""
    from rlkit.algorithm import asks_for
    from rlkit.functional import automatic_correction, geometric_mask, no_correction

    a = x.algorithm
    out = []
    given = list_corrections(x.algorithm)
    stale = x.staleness
    path = "asynchrony.staleness" if stale == x.asynchrony.staleness else "task.reuse.staleness"
    to_sampler = asks_for(a.policy_loss, "logprobs_sampler")
    if to_sampler and any(part not in (no_correction, automatic_correction) for part, _ in given):
        out.append(
            "algorithm/correction: the ratio of algorithm.policy_loss"
            f" ({name_function(a.policy_loss)})"
            " is to the sampler already, so the difference is corrected twice; choose"
            " algorithm/correction=none"
        )
    longest = x.generation.max_new_tokens
    if longest < 100 and any(
        part is geometric_mask and not numbers["scaled"] for part, numbers in given
    ):
        out.append(
            "algorithm/correction: a fixed band of the mean log-ratio is made for long replies and"
            f" drops many of up to {longest} tokens (generation.max_new_tokens) by chance; choose"
            " algorithm/correction=geometric_mask"
        )
    if (no_correction, {}) not in given or to_sampler or a.old != "trainer":
        return out
    if stale == 1 == a.epochs * a.minibatches:
        out.append(
            f"{path}=1 algorithm/correction=none: with one update a step the ratio is 1, so nothing"
            " corrects or clips for the age of the replies; choose"
            " algorithm/correction=token_truncate, or algorithm.old=sampler"
        )
    if stale >= 2:
        out.append(
            f"{path}={stale} algorithm/correction=none: nothing corrects for the age of the"
            " replies, and the clip is blind to it, since its old policy is the trainer's own. On"
            " the embedded task the effective share of the rollouts was 0.83 (0.41 in the worst"
            " step) at a staleness of 2 and 0.70 (0.11) at 4, and the clip held 0.3 % of the"
            " tokens in both; follow staleness/ess_seq, or choose"
            " algorithm/correction=token_truncate"
        )
    return out


def find_embedded_numbers(
    x: Experiment | RolloutRun, keys: Sequence[str] = ("generation.max_new_tokens",)
) -> list[str]:
    """Report values of these keys if they are meant for rlkit's embedded tiny model and the run has
    another model."""
    own = x.model.suggests
    path = x.model.path or x.model.origin
    # of rlkit's options, only the embedded model's suggests an environment
    if own.get("environment") is None or _is_embedded(path):
        return []
    used = {
        "optimizer.lr": (_rate(x), (own.get("lr"), own.get("lora_lr"))),
        "trainer.steps": (x.trainer.steps, (own.get("steps"),)),
        "generation.max_new_tokens": (x.generation.max_new_tokens, (own.get("max_new_tokens"),)),
    }
    kept = [
        f"{key}={value}" for key, (value, tiny) in used.items() if key in keys and value in tiny
    ]
    model = f"model.path={path}" if path else "model: another than the embedded one"
    return (
        [
            f"{model} runs with numbers for the tiny model: {', '.join(kept)}; choose"
            " model=pretrained, or set them"
        ]
        if kept
        else []
    )


def _is_embedded(path: str | None) -> bool:
    """Return whether a path names the embedded model, or a folder with a model of the same shape.
    The folder may be an export of the embedded model."""
    from rlkit.models.load import EMBEDDED, TINY

    shapes = [
        json.loads(f.read_text()) if f.is_file() else {}
        for f in (TINY / "config.json", Path(path or "") / "config.json")
    ]
    return path in EMBEDDED or shapes[0].get("hidden_size") == shapes[1].get("hidden_size")


def _rate(x: Experiment | RolloutRun) -> float | None:
    """Return the learning rate at the beginning of a run. The result is None for a run without
    training."""
    return bound(x._asdict().get("optimizer")).get("lr")


def _adapter_rate(x: Experiment) -> list[str]:
    """Report a learning rate meant for training all weights, if only adapters are trained."""
    own = x.model.suggests
    rank = x.model.rank
    rate = _rate(x)
    if not (rank and rate is not None and rate == own.get("lr") != own.get("lora_lr")):
        return []
    return [
        f"model.lora.rank={rank} optimizer.lr={rate:g}: is the rate for all weights of this"
        " model, and adapters need about ten times "
        'more (Schulman et al. 2025, "LoRA Without Regret"); try'
        f" optimizer.lr={own.get('lora_lr') or 10 * rate:g}"
    ]


def _find_unreached(x: Experiment) -> list[tuple[str, int, str]]:
    """List (path, RL steps, consequence) for each number of steps that a short run might never
    reach."""
    every = bound(x.reference.update).get("every", 0)
    critic = x.algorithm.critic
    late = [
        (
            x.needs_reference and isinstance(every, int),
            "reference.every",
            every,
            "no update sees a new copy of the policy, so the reference is the frozen start",
        ),
        (
            x.asynchrony.staleness,
            "asynchrony.staleness",
            x.asynchrony.staleness,
            "every step samples with the weights of the start",
        ),
        (
            critic.active,
            "algorithm.critic.warmup",
            critic.warmup,
            "the policy is never trained",
        ),
    ]
    return [(path, steps, why) for acts, path, steps, why in late if acts]
