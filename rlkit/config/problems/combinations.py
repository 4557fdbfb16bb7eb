"""Find combinations of parts that cannot run, and parts without effect, as sentences."""

from __future__ import annotations

import inspect
import itertools
from typing import TYPE_CHECKING, Any

from rlkit.errors import suggest_name
from rlkit.types import bound, plain

if TYPE_CHECKING:  # torch is imported only with the parts that need it
    from rlkit.algorithm import Algorithm, Stream
    from rlkit.training.experiment import Experiment


def combination_problems(x: Experiment) -> list[str]:
    """List combinations that cannot run or would silently do nothing, as sentences."""
    checks = [
        _check_evaluation,
        _check_groups,
        _check_choice,
        _check_kl,
        _check_components,
        _check_critic,
        _check_corrections,
        _check_old,
        _check_streams,
        _check_parts,
        _check_quantities,
    ]
    return [problem for check in checks for problem in check(x)]


def _check_evaluation(x: Experiment) -> list[str]:
    e = x.evaluation
    problems = []
    if e.every > 0 and e.n == 0:
        problems.append(
            f"evaluation.every={e.every}: evaluation.n=0 leaves nothing to evaluate; raise it, or"
            " set evaluation.every=0"
        )
    if e.stop_at is not None and (e.every == 0 or e.n == 0):
        problems.append(
            f"evaluation.stop_at={e.stop_at}: nothing is evaluated during training; set"
            " evaluation.every and evaluation.n"
        )
    for name, callback in x.callbacks.items():
        best = bound(callback).get("best")
        if isinstance(best, str) and best.startswith("test/"):
            problems.append(
                f"callbacks.{name}.best={best}: test problems must not decide which checkpoint is"
                f" kept; choose eval/{best[5:]} (validation)"
            )
        if isinstance(best, str) and best.startswith("eval/") and (e.every == 0 or e.n == 0):
            problems.append(
                f"callbacks.{name}.best={best}: no validation problem is played; set"
                " evaluation.every and evaluation.n"
            )
    if not e.k or any(k < 1 for k in e.k):
        problems.append(f"evaluation.k={list(e.k)}: pass@k needs k of at least 1")
    return problems


def rank_problems(x: Experiment) -> list[str]:
    """List settings that do not work on several ranks, as sentences."""
    t = x.trainer
    problems = []
    count = t.devices * t.nodes
    if count > 1 and t.strategy == "single":
        problems.append(
            f"trainer.devices={t.devices}, trainer.nodes={t.nodes}: one process uses one device;"
            " choose trainer=ddp, or trainer=fsdp for a model that one device does not hold"
        )
    if count > 1 and x.batch.prompts < count:
        problems.append(
            f"batch.prompts={x.batch.prompts}: the samples of a prompt stay on one rank, so {count}"
            " ranks need at least as many prompts; raise it, or lower trainer.devices"
        )
    if t.strategy == "fsdp" and count > 1:
        own = [
            name
            for name, phase in x.schedule.phases.items()
            if phase.reference is not None or "reference" in phase.reset
        ]
        if x.model.rank and own:
            problems.append(
                f"trainer=fsdp model.lora.rank={x.model.rank} schedule.phases.{own[0]}: a"
                " phase cannot add a reference of its own to sharded adapters; choose trainer=ddp,"
                " or let the phases share the reference of the run"
            )
    return problems


def adapter_problems(x: Experiment) -> list[str]:
    """List references and teachers that cannot be kept in a LoRA run, as sentences."""
    return _check_second_adapter(x) + _check_head(x) if x.model.rank else []


def _check_second_adapter(x: Experiment) -> list[str]:
    """Report two references or teachers that need the second adapter in one phase. A moving
    average, a copy and the start of a later phase are kept in it, one at a time."""
    from rlkit.training.references import is_adapter
    from rlkit.training.schedules import list_phases

    teachers = x.teacher.models.values() if x.needs_teacher else ()
    phases = list(list_phases(x).items())
    given = x.schedule.phases
    owned = [bool(given) and given[name].reference is not None for name, _ in phases]
    users: dict[str, set[int]] = {}  # who uses the second adapter → in which phases
    if any(is_adapter(model, step=0) for model in teachers):
        users[f"teacher={x.teacher.name}"] = set(range(len(phases)))
    shared = [i for i, (_, own) in enumerate(phases) if own.needs_reference and not owned[i]]
    restarts = [i for i in shared if i and "reference" in given[phases[i][0]].reset]
    begins = [i for i in (0, *restarts) if is_adapter(x.reference, step=i)]
    if shared and begins:
        users[f"reference={x.reference.name}"] = set(range(begins[0], shared[-1] + 1))
    for i, (name, own) in enumerate(phases):
        if owned[i] and own.needs_reference and is_adapter(own.reference, step=i):
            users[f"schedule.phases.{name}.reference={own.reference.name}"] = {i}
    return [
        f"{one} {other}: under LoRA there is one second adapter, and both need it; choose"
        " reference=frozen without a reset, teacher=start, or model.lora.rank=0"
        for one, other in itertools.combinations(users, 2)
        if users[one] & users[other]
    ]


def _check_head(x: Experiment) -> list[str]:
    """Report adapters on the output layer that would stand in the place of a reference's or a
    teacher's output layer."""
    from rlkit.algorithm import asks_for
    from rlkit.training.references import is_adapter
    from rlkit.training.schedules import list_phases

    teachers = x.teacher.models.values() if x.needs_teacher else ()
    exact = [
        f"kl={own.kl.name}"
        for own in list_phases(x).values()
        if own.kl.estimator is not None
        and asks_for(own.kl.estimator, "full_kl")
        and is_adapter(own.reference, step=1)
    ]
    exact += [f"teacher={x.teacher.name}" for model in teachers if is_adapter(model, step=1)]
    if not exact or x.model.lora is None or "lm_head" not in x.model.lora.targets:
        return []
    return [
        f"model.lora.targets {exact[0]}: adapters on lm_head would change the logits of the"
        " reference or the teacher too; take lm_head out of the targets"
    ]


def _check_groups(x: Experiment) -> list[str]:
    from rlkit.algorithm import asks_for
    from rlkit.functional import keep_all

    problems = []
    if x.algorithm.episodes is not None and x.batch.group_size != 1:
        problems.append(
            f"batch.group_size={x.batch.group_size}: algorithm={x.algorithm.name} samples nothing,"
            " so a row is one episode; set it to 1"
        )
    # a partial's defaults are the values bound in the config
    numbers = inspect.signature(x.algorithm.advantage).parameters
    if x.batch.group_size == 1 and (
        asks_for(x.algorithm.advantage, "group_ids")
        or asks_for(x.algorithm.normalization, "group_ids")
    ):
        problems.append(
            f"batch.group_size=1: algorithm={x.algorithm.name} compares the samples of a prompt"
            " with one another and needs at least 2; raise it, or choose algorithm=reinforce"
        )
    k = numbers["k"].default if "k" in numbers else None
    if isinstance(k, int) and "group_ids" in numbers and k >= x.batch.group_size > 1:
        problems.append(
            f"algorithm.advantage.k={k}: with batch.group_size={x.batch.group_size} there is one"
            " subset of that many samples and nothing to compare it with, so every advantage is 0;"
            " lower it, or raise batch.group_size"
        )
    if x.algorithm.max_refills > 0 and plain(x.algorithm.group_filter) is keep_all:
        problems.append(
            f"algorithm.max_refills={x.algorithm.max_refills}: the group filter accepts every"
            " prompt, so none is ever replaced; choose algorithm/group_filter=mixed, or set it"
            " to 0"
        )
    return problems


def _check_choice(x: Experiment) -> list[str]:
    """Report settings that cannot be combined with a sampler of tasks (task.sampler), or with
    reused groups (task.reuse)."""
    a = x.algorithm
    problems = []
    if x.sampler.weigh is not None and a.episodes is not None:
        problems.append(
            f"task/sampler={x.sampler.name}: algorithm={a.name} scores nothing to choose by; choose"
            " task/sampler=uniform"
        )
    if x.reuse.active and a.episodes is not None:
        problems.append(
            f"task/reuse: algorithm={a.name} samples nothing, so there is nothing to correct for;"
            " choose task/reuse=none"
        )
    if x.reuse.active and a.max_refills:
        problems.append(
            f"task/reuse: with algorithm.max_refills={a.max_refills} every group that is trained on"
            " has different rewards, so there is none to replace; set it to 0, or choose"
            " task/reuse=none"
        )
    if x.reuse.active and x.reuse.staleness <= x.asynchrony.staleness:
        problems.append(
            f"task.reuse.staleness={x.reuse.staleness}: groups are {x.asynchrony.staleness} steps"
            " old when they are first trained on (asynchrony.staleness), so none could be used"
            " again; raise it"
        )
    if x.reuse.active and a.streams.keys() - {"reward"}:
        problems.append(
            "task/reuse: groups that are replaced would be lost to the streams beside the reward;"
            " choose task/reuse=none"
        )
    return problems


def _check_kl(x: Experiment) -> list[str]:
    from rlkit.algorithm import asks_for

    kl = x.kl
    problems = []
    if x.needs_reference and x.reference.name == "none":
        problems.append(
            f"kl={kl.name} needs a reference to compare with, but reference=none; choose"
            " reference=frozen or kl=none"
        )
    if kl.in_reward and x.algorithm.streams and "reward" not in x.algorithm.streams:
        problems.append(
            f"kl.placement={kl.placement}: algorithm={x.algorithm.name} trains on no reward, so a"
            " KL in the reward does nothing; choose kl.placement=loss or kl=none"
        )
    if kl.importance_weight and kl.placement != "loss":
        problems.append(
            f"kl.importance_weight: there is no ratio in the reward (kl.placement={kl.placement});"
            " set it to false"
        )
    if kl.importance_weight and asks_for(kl.estimator, "logprobs_old"):
        problems.append(
            f"kl.importance_weight: kl={kl.name} carries the ratio already; set it to false"
        )
    if kl.in_baseline and kl.placement == "loss":
        problems.append(
            "kl.in_baseline: with kl.placement=loss nothing of the KL is in the reward; set it to"
            " false, or choose another placement"
        )
    if asks_for(kl.estimator, "full_kl") and kl.placement != "loss":
        problems.append(
            f"kl={kl.name} kl.placement={kl.placement}: the exact KL of a position is the same"
            " whatever token was drawn there, so as a reward it cannot teach that token; choose"
            " kl.placement=loss, or kl=k1"
        )
    return problems


def _check_components(x: Experiment) -> list[str]:
    """Report changes of the total reward beside an advantage of the reward's terms, such as
    gdpo."""
    from rlkit.algorithm import asks_for
    from rlkit.functional import soft_penalty

    a = x.algorithm
    read = [
        name for name in ("components", "rewards", "token_rewards") if asks_for(a.advantage, name)
    ]
    idle = {
        "kl.in_baseline": x.kl.in_reward and x.kl.in_baseline,
        "reward.normalize": x.reward.normalize,
        "algorithm/overlong": plain(a.overlong) is soft_penalty,
    }
    return [
        f"{key}: changes the total reward, and the advantage of algorithm={a.name} reads only the"
        " reward's terms; take it out, or choose another algorithm/advantage"
        for key, changes in idle.items()
        if changes and read == ["components"]
    ]


def _check_critic(x: Experiment) -> list[str]:
    a = x.algorithm
    problems = []
    if a.critic.active and a.critic.optimizer is None:
        problems.append("algorithm.critic.optimizer: the critic needs an optimizer of its own")
    for name, function in a.parts.items():
        if "values" in inspect.signature(function).parameters and not a.critic.active:
            problems.append(
                f"algorithm.{name} asks for the values of a critic, but there is none; choose"
                " algorithm/critic=head (or separate), or a part without values"
            )
    return problems


def list_corrections(algorithm: Algorithm) -> list[tuple[Any, dict[str, Any]]]:
    """List (function, numbers bound to the function) of the off-policy correction. For a product of
    corrections, list a pair for each factor."""
    from rlkit.algorithm import hyperparameters

    parts = hyperparameters(algorithm.correction).get("parts", {"": algorithm.correction})
    return [(plain(part), hyperparameters(part)) for part in parts.values()]


def _check_corrections(x: Experiment) -> list[str]:
    from rlkit.functional import automatic_correction, sequence_correction, token_correction

    weighing = (automatic_correction, sequence_correction, token_correction)
    weights = [
        part.__name__
        for part, numbers in list_corrections(x.algorithm)
        if part in weighing and numbers.get("mode") != "keep"
    ]
    said = (
        f"algorithm.correction.parts: {' and '.join(weights)} both weigh, so the difference to the"
        " sampler would be corrected twice"
    )
    return [f"{said}; set mode=keep in one of them, or choose a mask"] if len(weights) > 1 else []


def _check_old(x: Experiment) -> list[str]:
    """Report settings with no effect, or with another meaning, because of `algorithm.old`. This key
    may choose another "old" policy for the ratio than the policy before the update."""
    from rlkit.algorithm import asks_for
    from rlkit.functional import automatic_correction, no_correction, second_moment_mask

    a = x.algorithm
    parts = list_corrections(x.algorithm)
    problems = []
    if a.old == "trainer":
        return []
    if a.old == "sampler" and any(
        part not in (no_correction, automatic_correction) for part, _ in parts
    ):
        problems.append(
            "every factor of algorithm/correction is 1, since the old policy is the sampler; choose"
            " algorithm/correction=none"
        )
    if a.old == "loglinear" and any(
        part is second_moment_mask or numbers.get("normalise") for part, numbers in parts
    ):
        problems.append(
            "the old policy moves in every update, and algorithm/correction looks at the whole"
            " step; choose another correction"
        )
    before = ("advantage", "normalization", "token_filter", "aggregation")
    asking = [f"algorithm.{slot}" for slot in before if asks_for(a.parts[slot], "logprobs_old")]
    asking += ["algorithm.policy_loss"] if asks_for(a.policy_loss, "covariance_rank") else []
    asking += ["algorithm.target_kl"] if a.target_kl is not None else []
    asking += [f"kl.placement={x.kl.placement}"] if x.kl.in_reward else []
    problems += [
        f"{path} reads the policy before the update, which is not the old policy of the ratio;"
        " choose another"
        for path in asking
    ]
    if a.episodes is not None:
        problems.append(f"algorithm={a.name} samples nothing")
    return [
        f"algorithm.old={a.old}: {problem}, or set algorithm.old=trainer" for problem in problems
    ]


def _check_stream(name: str, stream: Stream) -> list[str]:
    from rlkit.algorithm import STREAMS

    problems = []
    masks = {
        "reward": (None,),
        "teacher": (None, "sampled"),
        "imitation": ("observations", "demonstrations"),
    }
    path = f"algorithm.streams.{name}"
    if name not in STREAMS:
        problems.append(
            f"{path}: there is no such stream.{suggest_name(name, STREAMS)} There are:"
            f" {', '.join(STREAMS)}"
        )
    elif stream.mask not in masks[name]:
        problems.append(
            f"{path}.mask={stream.mask}: must be"
            f" {' or '.join(str(mask or 'null') for mask in masks[name])}"
        )
    if (stream.loss is None) == (name == "teacher"):
        said = (
            "needs a divergence, such as rlkit.functional.kl_student_teacher"
            if name == "teacher"
            else "only a teacher has a divergence"
        )
        problems.append(f"{path}.loss: {said}")
    if name == "reward" and stream.aggregation is not None:
        problems.append(
            f"{path}.aggregation: the reward's weights are those of algorithm/aggregation; set that"
            " instead"
        )
    return problems


def _check_streams(x: Experiment) -> list[str]:
    a = x.algorithm
    problems = [said for name, stream in a.streams.items() for said in _check_stream(name, stream)]
    if "teacher" in a.streams and not x.teacher.models:
        problems.append(
            "algorithm.streams.teacher needs a teacher, but teacher=none; choose teacher=path"
            " teacher.path=FOLDER, or teacher=context"
        )
    if a.streams.keys() - {"reward"} and a.max_refills:
        problems.append(
            f"algorithm.max_refills={a.max_refills}: prompts that are replaced would be lost to the"
            " streams beside the reward; set it to 0"
        )
    return problems


def _check_parts(x: Experiment) -> list[str]:
    """List the problems reported by the engine and by the teacher about the config
    (`ChecksConfig`)."""
    from rlkit.types import ChecksConfig

    parts: list[Any] = [x.generation.engine]
    if "teacher" in x.algorithm.streams:
        parts.append(x.teacher)
    return [
        problem for part in parts if isinstance(part, ChecksConfig) for problem in part.problems(x)
    ]


def _check_quantities(x: Experiment) -> list[str]:
    from rlkit.algorithm import list_inputs
    from rlkit.types import QUANTITIES

    parts = {f"algorithm.{name}": function for name, function in x.algorithm.parts.items()}
    if x.kl.estimator is not None:
        parts["kl.estimator"] = x.kl.estimator
    return [
        f"{path}: asks for a quantity '{name}' that does not exist.{suggest_name(name, QUANTITIES)}"
        f" There are: {', '.join(QUANTITIES)}"
        for path, function in parts.items()
        for name in list_inputs(function)
        if name not in QUANTITIES
    ]
