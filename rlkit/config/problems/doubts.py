"""What is legal but probably not meant."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from rlkit.config.problems.assumptions import assumption_warnings
from rlkit.config.problems.schedules import schedule_warnings
from rlkit.training.schedules import phases

if TYPE_CHECKING:  # torch is imported with the parts that need it, not before
    from rlkit.training.experiment import Experiment


def warnings(x: Experiment) -> list[str]:
    """What is legal but probably not meant."""
    from rlkit.functional import forward, k1, no_correction

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
    corrections = [getattr(p.algorithm.correction, "func", p.algorithm.correction) for p in phases(x).values()]
    if x.asynchrony.staleness >= 2 and no_correction in corrections:
        out.append(
            f"asynchrony.staleness={x.asynchrony.staleness} algorithm/correction=none: nothing corrects for the age of the replies, and "
            "the clip is blind to it, since its old policy is the trainer's own. On the embedded task the effective share of the rollouts "
            "was 0.83 (0.41 in the worst step) at a staleness of 2 and 0.70 (0.11) at 4, and the clip held 0.3 % of the tokens in both; "
            "follow staleness/ess_seq, or choose algorithm/correction=token_truncate"
        )
    return out


def _too_late(x: Experiment) -> list[tuple[str, int, str]]:
    """(path, RL steps, what does not happen in a run that is no longer): numbers of steps that a short run never reaches."""
    out = []
    every = getattr(x.reference.update, "keywords", {}).get("every")
    if x.needs_reference and isinstance(every, int):
        out.append(("reference.every", every, "no update sees a new copy of the policy, so the reference is the frozen start"))
    if x.asynchrony.staleness:
        out.append(("asynchrony.staleness", x.asynchrony.staleness, "every step samples with the weights of the start"))
    if x.algorithm.critic.active:
        out.append(("algorithm.critic.warmup", x.algorithm.critic.warmup, "the policy is never trained"))
    return out
