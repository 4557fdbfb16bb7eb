"""Define reference policies. A reference is a pair of functions (init, update) over explicit state.
Further functions score tokens with the reference, and save and load its state.

`none` and `frozen` never move. `ema`, `periodic` and `on_kl` follow the policy by different rules,
and their state is a `Moving`. The numbers of a rule are keywords of its `update`. Therefore a
schedule can name these numbers, for example as `reference.update.decay`. Under LoRA only adapters
are trained, so the reference is a second adapter on the same base model. Without LoRA it is a copy
of the model.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from rlkit.distributed import ranks
from rlkit.errors import PartError, name_function
from rlkit.system.adapters import base_model, has_adapters
from rlkit.system.sharding import find_sharded_modules, is_sharded
from rlkit.types import Measured, Reference, assumes, reaches, safe

ADAPTER = "reference"  # name of the second adapter under LoRA

# ------------------------------------------------------------------------------------------ options


def move_reference(
    reference: Reference, state: Any, policy: nn.Module, *, step: int, kl: float
) -> tuple[Any, dict[str, float]]:
    """Update a reference after an RL step. Return its new state, and the metrics of the update
    under names reference/NAME. Raise PartError if the update returns no state."""
    given = reference.update(state, policy, step=step, kl=kl)
    after, metrics = given if isinstance(given, Measured) else (given, {})
    if after is None and state is not None:
        raise PartError(
            f"reference.update ({name_function(reference.update)}): gave None, expected the"
            " state; end it with `return state`"
        )
    return after, {f"reference/{name}": float(value) for name, value in metrics.items()}


def none() -> Reference:
    """Make a reference without a model. No weights are kept, and scoring with this reference raises
    an error."""
    return _make_fixed("none", lambda policy, **_: None, _no_model)


def live() -> Reference:
    """Make a reference that is the policy itself, always with its present weights."""
    return _make_fixed("live", lambda policy, **_: None, _policy_itself)


@reaches(path="path", revision="path")
@safe("key")
def frozen(
    *, path: str | None = None, revision: str | None = None, key: str = "reference.path"
) -> Reference:
    """Make a reference that never moves: the policy at its start, or another model (a teacher).

    Without `path`, the reference is the policy at the start of the run or, if a phase has this
    reference, at the start of the phase. The start decides how the reference's weights are kept:

    start of the run   under LoRA nothing is kept, because the start is the same model with its
                       adapter off; without LoRA a copy of the weights is kept, without gradient.
                       A checkpoint holds neither: a resume makes them again from model.path
    start of a phase   the state is like a moving reference's (a second adapter under LoRA), and
                       checkpoints hold it

    Args:
      path: folder or hub id of another model. Its vocabulary has the policy's tokens, in any order.
        A resumed run loads the model again. None: the policy itself.
      revision: the revision of a hub id.
      key: the config key of the path, for messages.
    Raises: ConfigError, when the reference is made, if the model cannot be loaded or has another
      vocabulary.
    """
    if path is not None:
        init = functools.partial(_load_teacher, path=path, revision=revision, key=key)
        return _make_fixed("frozen", init, _open_model)
    return Reference("frozen", _freeze, _keep, _open_model, save=_save_frozen, load=_load_frozen)


def is_start(reference: Reference) -> bool:
    """Return whether a reference always has the policy's weights from the start of the run or of a
    phase."""
    return reference.init is _freeze


def is_adapter(reference: Reference, *, step: int) -> bool:
    """Return whether a reference that begins at this RL step is, under LoRA, the policy with its
    second adapter."""
    return reference.init is _start or (step > 0 and is_start(reference))


def is_policy(reference: Reference, state: Any, policy: nn.Module) -> bool:
    """Return whether a reference is known to equal the present policy, bit for bit.

    The answer can be True only for a reference of rlkit that started from the policy and still has
    equal weights. Under LoRA, policy and reference share the base model. A reference without an
    adapter then equals the policy as long as all B factors (lora_B) are 0. In all other cases the
    answer is False: for another model, a reference written by the user, or a policy with dropout.
    All ranks must call this function, and all ranks get the same answer.
    """
    ranks.reshard(policy, state.model if isinstance(state, Moving) else state)
    return not ranks.any_rank(not _is_policy(reference, state, policy))


def _is_policy(reference: Reference, state: Any, policy: nn.Module) -> bool:
    if reference.init not in (_freeze, _start) or reference.model is not _open_model:
        return False
    dropouts = [module for module in policy.modules() if "Dropout" in type(module).__name__]
    if any(module.training and getattr(module, "p", 0) for module in dropouts):
        return False
    parameters = dict(policy.named_parameters())
    if state is None:
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        second = [p for name, p in trained.items() if ".lora_B." in name]
        others = [name for name in trained if ".lora_B." not in name and ".lora_A." not in name]
        return bool(second) and not others and not any(bool(_get_local(p).any()) for p in second)
    if isinstance(state, Moving) and state.model is None:
        return all(_are_equal(own, parameters[name]) for name, own in state.scored.items())
    model: Any = state.model if isinstance(state, Moving) else state
    theirs = dict(model.named_parameters()) | dict(model.named_buffers())
    ours = parameters | dict(policy.named_buffers())
    if theirs.keys() != ours.keys():
        return False
    return all(_are_equal(own, ours[name]) for name, own in theirs.items())


def _are_equal(a: Tensor, b: Tensor) -> bool:
    a = _get_local(a)
    b = _get_local(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.device == b.device and torch.equal(a, b)


def _get_local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def ema(*, decay: float) -> Reference:
    """Make a reference that is an exponential moving average of the policy. After every RL step,
    `reference ← decay · reference + (1 - decay) · policy`.

    Under LoRA each factor of the adapter is averaged by itself. Therefore the effective weights
    `W + s·BA` of the reference are not the average of the policy's effective weights. With
    averaging weights w, `B̄ Ā = Σ w B A - Σ w (B - B̄)(A - Ā)`. The difference is the covariance of
    the two factors over the steps in the average. The difference was measured on the embedded model
    (rank 2, twenty steps of AdamW), as a share of the norm of the averaged change. With decay 0.9
    it was 5 % at a learning rate of 0.001 and 13 % at 0.01. With decay 0.99 it was 54 % at a
    learning rate of 0.01 and gradients of pure noise. The difference vanishes while the policy
    stands still. The average of the products BA has a higher rank, so no adapter of this rank can
    hold this average.

    Args:
      decay: in [0, 1). With 0, the reference is the policy of one step ago. With 0.99, the average
        covers about 100 steps.
    Raises: ValueError if decay is outside its range.
    """
    if not 0 <= decay < 1:
        raise ValueError(
            f"decay={decay}: must be at least 0 and less than 1; for a reference that never moves"
            " choose reference=frozen"
        )

    return _make_moving("ema", functools.partial(follow, decay=decay))


def periodic(*, every: int) -> Reference:
    """Make a reference that is a copy of the policy, renewed after every `every` RL steps. The
    steps are counted from the start of the run.

    Args:
      every: number of RL steps between two copies, at least 1.
    Raises: ValueError if every is less than 1.
    """
    if every < 1:
        raise ValueError(f"every={every}: must be at least 1 RL step")

    return _make_moving("periodic", functools.partial(_copy_each, every=every))


def _copy_each(state: Moving, policy: nn.Module, *, every: int, step: int, **_: Any) -> Moving:
    return follow(state, policy) if step % every == 0 else state


def on_kl(
    *, threshold: float, measure: Literal["accumulated", "distance"] = "accumulated"
) -> Reference:
    """Make a reference that is a copy of the policy, renewed when the policy has moved too far away
    from this copy.

    accumulated: add up the KL of each step since the last copy. If the sum is above `threshold`,
                 renew the copy and set the sum to 0
    distance:    renew the copy if the last step's KL is above `threshold`

    A step's KL is the mean per token of `kl`'s estimator, for the policy before each update of the
    step. This KL is the whole distance from the reference, not the distance moved in this step.
    Therefore the accumulated measure adds up distances. A policy that stays 0.05 nats away from the
    reference passes a threshold of 0.5 after 11 steps. With measure=distance this policy never
    passes the threshold. A step without a finite KL adds nothing and copies nothing.

    Args:
      threshold: nats per token, greater than 0.
      measure: accumulated or distance, as above.
    Raises: ValueError if threshold is not positive, or if measure is neither accumulated nor
      distance.
    """
    if not threshold > 0:
        raise ValueError(
            f"threshold={threshold}: must be greater than 0 nats; to copy after every step choose"
            " reference=periodic"
        )
    if measure not in ("accumulated", "distance"):
        raise ValueError(f"measure={measure}: must be accumulated or distance")
    accumulated = measure == "accumulated"
    update = functools.partial(_copy_beyond, threshold=threshold, accumulated=accumulated)
    return _make_moving("on_kl", update)


def _copy_beyond(
    state: Moving, policy: nn.Module, *, threshold: float, accumulated: bool, kl: float, **_: Any
) -> Moving:
    measured = (kl if math.isfinite(kl) else 0.0) + (state.kl if accumulated else 0.0)
    if measured > threshold:
        return follow(state, policy)._replace(kl=0.0)
    return state._replace(kl=measured if accumulated else 0.0)


# ----------------------------------------------------------------------------- references that move


class Moving(NamedTuple):
    """Hold the state of a moving reference. The keys of every mapping are the names of the policy's
    own tensors. `update` writes the tensors in place."""

    # the averaged weights, in float32 or wider: in bfloat16 a decay of 0.999 changes nothing
    weights: Mapping[str, Tensor]
    # the weights that score: the same tensors, unless the policy's type is narrower than float32
    scored: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]  # always copies of the policy's buffers
    # the copied model with these tensors; None under LoRA, because the policy holds both adapters
    model: nn.Module | None
    kl: float = 0.0  # on_kl: sum of the steps' KL since the last copy, in nats per token


def shard_state(
    state: nn.Module | Moving | None, policy: nn.Module, shard: Callable[[Any], None]
) -> nn.Module | Moving | None:
    """Shard a reference's state over the ranks as `rlkit.distributed.ranks.shard` shards a model,
    and return the new state.

    A reference with a model of its own is sharded here. Under LoRA the reference is a second
    adapter in the policy. The policy is already sharded, so the new state only takes the adapter's
    sharded tensors. A state that is sharded already is returned unchanged.

    Args:
      shard: a function that shards a model in place.
    """
    if isinstance(state, Moving) and state.model is None:
        return _make_tracked(_twins(policy), {}, None)._replace(kl=state.kl)
    model = state.model if isinstance(state, Moving) else state
    if model is None or find_sharded_modules(model):
        return state
    shard(model)
    return track(model)._replace(kl=state.kl) if isinstance(state, Moving) else state


def _make_moving(name: str, update: Callable[..., Moving]) -> Reference:
    return Reference(name, _start, update, _open_model, save=_save_moving, load=_load_moving)


def _start(policy: nn.Module, **_: Any) -> Moving:
    """Return the state of a reference that equals the present policy."""
    if has_adapters(policy):
        return _make_tracked(_add_second_adapter(policy), {}, None)
    return track(ranks.copy_unsharded(policy))


def track(model: nn.Module) -> Moving:
    """Return the state of a moving reference that uses the tensors of `model`. `follow` writes into
    these tensors. Only tensors narrower than float32 are copied."""
    return _make_tracked(dict(model.named_parameters()), dict(model.named_buffers()), model)


def _make_tracked(
    scored: Mapping[str, Tensor], buffers: Mapping[str, Tensor], model: nn.Module | None
) -> Moving:
    weights = {
        name: t.detach().to(torch.promote_types(t.dtype, torch.float32))
        for name, t in scored.items()
    }
    return Moving(weights, scored, buffers, model)


@torch.no_grad()
def follow(state: Moving, policy: nn.Module, *, decay: float = 0.0, **_: Any) -> Moving:
    """Move the reference to `decay · reference + (1 - decay) · policy`, and copy the buffers. With
    a decay of 0 all weights are copied, bit for bit."""
    ranks.reshard(policy, state.model)  # otherwise scoring would use old gathered weights
    parameters = dict(policy.named_parameters())
    buffers = dict(policy.named_buffers())
    for name, weight in state.weights.items():
        weight.lerp_(parameters[name].to(weight.dtype), 1 - decay)
    for name, buffer in state.buffers.items():
        buffer.copy_(buffers[name])
    _show(state)
    return state


def _show(state: Moving) -> None:
    """Copy the averaged tensors to the tensors that score, unless both are the same tensors."""
    for name, weight in state.weights.items():
        if weight.data_ptr() != state.scored[name].data_ptr():
            state.scored[name].copy_(weight)


@contextmanager
def _open_model(state: nn.Module | Moving | None, policy: nn.Module) -> Iterator[nn.Module]:
    """Yield the model that computes the reference's log-probs. This is the reference's own model if
    it has one. Under LoRA it is the policy with the second adapter active, or with no adapter if
    the state is None."""
    own = state.model if isinstance(state, Moving) else state
    with torch.no_grad():
        if own is not None:
            yield own
        elif isinstance(state, Moving):
            active: Any = policy.active_adapter
            _activate(policy, ADAPTER)
            try:
                yield policy
            finally:
                _activate(policy, active)
        else:
            # PEFT switches requires_grad off here and on again at the end. Both times it must find
            # the same tensors, the shards.
            ranks.reshard(policy)
            with policy.disable_adapter():  # type: ignore[operator]
                try:
                    yield policy
                finally:
                    ranks.reshard(policy)


def _save_moving(state: Moving) -> dict[str, Any]:
    return {"weights": dict(state.weights), "buffers": dict(state.buffers), "kl": state.kl}


@torch.no_grad()
def _load_moving(state: Moving, policy: nn.Module, saved: Mapping[str, Any]) -> Moving:
    """Load the saved state. If the checkpoint has no state, the run had a frozen reference until
    now. In this case, keep the present state, which equals the start of the run and therefore the
    frozen reference."""
    if not saved:
        return state
    for live, kept in ((state.weights, saved["weights"]), (state.buffers, saved["buffers"])):
        if live.keys() != kept.keys():
            odd = sorted(live.keys() ^ kept.keys())
            raise ValueError(
                f"reference: the checkpoint belongs to another model: {len(odd)} names differ, the"
                f" first is '{odd[0]}'"
            )
        for name, tensor in kept.items():
            live[name].copy_(ranks.shard_like(tensor, live[name]))
    _show(state)
    return state._replace(kl=saved["kl"])


# --------------------------------------------------------------------------------- adapters of PEFT


def _add_second_adapter(policy: Any) -> dict[str, Tensor]:
    """Give the policy a second adapter, unless it has one already. The reference uses this second
    adapter. Copy the active adapter's values into the second adapter. Return the tensors of the
    second adapter, under the names of the active adapter's tensors."""
    from rlkit.models.load import compute_as_base

    if ADAPTER not in policy.peft_config:
        on = {p.device for p in policy.parameters() if p.device.type == "cuda"}
        # the adapter's random start is overwritten, so it must not change later random numbers
        with _keep_gradients(policy), torch.random.fork_rng(devices=on):
            policy.add_adapter(ADAPTER, copy.deepcopy(policy.peft_config[policy.active_adapter]))
            compute_as_base(policy)
    parameters = dict(policy.named_parameters())
    pairs = _twins(policy)
    with torch.no_grad():
        for name, tensor in pairs.items():
            tensor.copy_(parameters[name])
    return pairs


def _twins(policy: Any) -> dict[str, Tensor]:
    """Return the tensors of the reference's adapter, without gradient, under the names of the
    active adapter's tensors."""
    parameters = dict(policy.named_parameters())
    twins = {}
    for name in parameters:
        parts = [ADAPTER if part == policy.active_adapter else part for part in name.split(".")]
        twin = ".".join(parts)
        if twin != name and twin in parameters:
            twins[name] = parameters[twin].requires_grad_(False).detach()
    return twins


def _activate(policy: Any, adapter: str) -> None:
    """Make another adapter the active one. PEFT's own function also changes which parameters are
    trained; this function does not."""
    with _keep_gradients(policy):
        policy.set_adapter(adapter)


@contextmanager
def _keep_gradients(policy: nn.Module) -> Iterator[None]:
    before = [(p, p.requires_grad) for p in policy.parameters()]
    yield
    for parameter, wanted in before:
        parameter.requires_grad_(wanted)


# ----------------------------------------------------------------------- references that never move


def _keep(state: Any, policy: nn.Module, **progress: Any) -> Any:
    return state


def _make_fixed(name: str, init: Callable[..., Any], model: Callable[..., Any]) -> Reference:
    """Make a reference that never moves. Checkpoints hold no state of this reference; in a resumed
    run `init` makes the state again."""
    return Reference(
        name, init, _keep, model, save=lambda state: {}, load=lambda state, policy, saved: state
    )


def _freeze(policy: nn.Module, *, step: int = 0) -> nn.Module | Moving | None:
    if step > 0:
        return _start(policy)
    return None if has_adapters(policy) else ranks.copy_unsharded(policy)


@assumes("same_vocabulary")
def _load_teacher(policy: Any, *, path: str, revision: str | None, key: str, **_: Any) -> nn.Module:
    """Load another model onto the policy's device, in the policy's precision. Its token ids are
    mapped to the policy's."""
    from rlkit.errors import ConfigError
    from rlkit.models import check_vocabulary, pretrained_model
    from rlkit.models.load import check_weights, take_rows

    own = base_model(policy)
    weight = own.get_output_embeddings().weight
    rows = None
    if own.name_or_path:
        rows = check_vocabulary(
            own.name_or_path, path, teacher_revision=revision, key=key, rows=len(weight)
        )
    try:
        teacher = pretrained_model(path, dtype=weight.dtype, revision=revision)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path=", f"{key}=", 1)) from error
    check_weights(teacher, path, key)
    if rows is not None:
        take_rows(teacher, rows)
    return teacher.to(weight.device).requires_grad_(False).eval()


def _save_frozen(state: nn.Module | Moving | None) -> dict[str, Any]:
    return {"frozen": _save_moving(state)} if isinstance(state, Moving) else {}


def _load_frozen(
    state: nn.Module | Moving | None, policy: nn.Module, saved: Mapping[str, Any]
) -> Any:
    if "frozen" not in saved:  # the reference began with the run, or replaces another reference
        return state
    moving = state if isinstance(state, Moving) else _start(policy)
    return _load_moving(moving, policy, saved["frozen"])


@contextmanager
def _policy_itself(state: None, policy: nn.Module) -> Iterator[nn.Module]:
    yield policy


@contextmanager
def _no_model(state: None, policy: nn.Module) -> Iterator[nn.Module]:
    raise ValueError(
        "reference: none is configured, so there is nothing to score with; choose reference=frozen"
    )
    yield policy
