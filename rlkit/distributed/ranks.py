"""Several processes, one run: who does which part, and how all of them come to the same result.

Every rank holds all rollouts of a step: they are light, and so refill, baselines, advantages, weights and metrics are computed on the whole
batch by everyone, as on one process. Shared out are the heavy parts: episodes and their scoring by prompts, forward and backward by
groups. The losses are sums whose weights are fixed before, so gradients are added up over ranks and nothing else scales them.

On one process every function here does nothing, and nothing is imported from torch.distributed before it is needed.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rlkit.errors import ConfigError, Refusal, RLKitError

T = TypeVar("T")


class RankError(RLKitError, RuntimeError):
    """Another rank failed, is gone, or was silent for longer than trainer.timeout."""


class RankOSError(RankError, OSError):
    """Another rank could not write or read: a full disk there is one for all."""

    elsewhere = True  # that rank reports it


# ------------------------------------------------------------------------------------------------------ the group


def size() -> int:
    """How many processes train together."""
    return torch.distributed.get_world_size() if _joined() else 1


def rank() -> int:
    """Which one this is; 0 alone prints and writes."""
    return torch.distributed.get_rank() if _joined() else 0


def _joined() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def join(devices: int, *, cuda: bool, timeout: float) -> None:
    """Makes this process a rank of the group that torchrun, SLURM or `rlkit.distributed.launch` has started; ranks above 0 fall silent.

    Args:
      devices: ranks that the config asks for, over all nodes.
      cuda: one GPU a rank; collectives of tensors on it go through NCCL, those of objects through gloo.
      timeout: seconds that a rank waits for the others.
    Raises: ConfigError where another number of ranks was started.
    """
    started = int(os.environ["WORLD_SIZE"])
    if started != devices:
        raise ConfigError(f"trainer.devices × trainer.nodes = {devices}, but {started} ranks were started; make the two equal")
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with _reaching("the others to start"):
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout))
    if rank():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (for the rest of the process)


def leave() -> None:
    """Ends the group."""
    if _joined():
        torch.distributed.destroy_process_group()


# ---------------------------------------------------------------------------------------------- objects and numbers


def gather(make: Callable[[], T]) -> list[T]:
    """What `make` gives on every rank, in their order. Where it raises on one, all ranks raise, that one its own exception.

    Results travel by pickle, between processes of one run alone.
    """
    if size() == 1:
        return [make()]
    error: Exception | None = None
    try:
        mine: Any = make()
        said = None
    except Exception as raised:
        kind = next((kind for kind in (Refusal, OSError) if isinstance(raised, kind)), Exception)
        error, mine, said = raised, None, (f"{type(raised).__name__}: {raised}", kind)
    parts: list[Any] = [None] * size()
    with _reaching("the results of the others"):
        torch.distributed.all_gather_object(parts, (said, mine))
    if error is not None:
        raise error
    failed = {i: said for i, (said, _) in enumerate(parts) if said is not None}
    if failed:
        text = "; ".join(f"rank {i} failed: {why}" for i, (why, _) in failed.items())
        kinds = {kind for _, kind in failed.values()}
        raise (Refusal if kinds == {Refusal} else RankOSError if kinds == {OSError} else RankError)(text)
    return [part for _, part in parts]


def broadcast(make: Callable[[], T]) -> T:
    """What `make` gives on rank 0, which alone calls it."""
    return gather(lambda: make() if rank() == 0 else None)[0]  # type: ignore[return-value]


def split_work(items: Sequence[Any], work: Callable[[Sequence[Any], int], list[T]]) -> list[T]:
    """`work` on all items, every rank on consecutive ones of its own; the results of all, in order.

    Args:
      items: the same on every rank.
      work: (own items, position of the first of them) → results. Not called where there are fewer items than ranks.
    """
    if size() == 1:
        return work(items, 0)
    begin, end = (len(items) * r // size() for r in (rank(), rank() + 1))
    return [one for part in gather(lambda: work(items[begin:end], begin) if begin < end else []) for one in part]


def any_rank(flag: bool) -> bool:
    """Whether it is so on any rank: what all of them then do together."""
    return bool(all_reduce_max(int(flag)))


def all_reduce_max(number: int) -> int:
    """The largest of the ranks' numbers."""
    if size() == 1:
        return number
    tensor = torch.tensor(number)
    with _reaching("a number of the others"):
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return int(tensor)


def all_reduce_sum(tensors: Iterable[Tensor | None]) -> None:
    """Replaces each tensor by its sum over all ranks, in place; the same tensors, in the same order, on every rank. None is passed over."""
    if size() == 1:
        return
    with _reaching("the sums of the others"):
        for work in [torch.distributed.all_reduce(t, async_op=True) for t in tensors if t is not None]:
            work.wait()


@contextmanager
def _reaching(what: str) -> Iterator[None]:
    """A lost or silent rank as a sentence."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1][:200] if str(error) else type(error).__name__
        raise RankError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} waited in vain for {what}: a rank has failed, was killed, or took "
            f"longer than trainer.timeout ({reason}). Look at what the other ranks said last; the run goes on from its newest checkpoint "
            "with resume=FOLDER"
        ) from error


# ------------------------------------------------------------------------------------------------ rows of a batch


def assign_groups(lengths: Tensor, group_ids: Tensor) -> Tensor:
    """[B] True on the rows that this rank trains on: whole groups, the longest dealt first, each to the rank with the fewest tokens.

    The rollouts of a group share their prompt in a packed pass, so they stay together.

    Args:
      lengths: [B] tokens of each row. group_ids: [B] the prompt that each row belongs to.
    """
    loads = [0] * size()
    of: dict[int, int] = {}
    for owner, length in zip(group_ids.tolist(), lengths.tolist(), strict=True):
        of[owner] = of.get(owner, 0) + length
    dealt: set[int] = set()
    for owner in sorted(of, key=lambda owner: (-of[owner], owner)):
        lightest = loads.index(min(loads))
        loads[lightest] += of[owner]
        if lightest == rank():
            dealt.add(owner)
    return torch.tensor([owner in dealt for owner in group_ids.tolist()], dtype=torch.bool, device=lengths.device)


def pad_work(work: list[T], spare: Callable[[], T]) -> list[tuple[T, bool]]:
    """The pieces of work, and whether each counts: on every rank as many as on the busiest, the rest filled with one that must not count.

    Sharded models gather their weights together, so a rank that had nothing left to do would leave the others waiting.
    """
    missing = all_reduce_max(len(work)) - len(work)  # agreed before the first of them, which may be a collective itself
    filler = [(work[-1] if work else spare(), False)] if missing else []
    return [(piece, True) for piece in work] + filler * missing


# ------------------------------------------------------------------------------------------------- sharded weights


def shard(model: Any, mesh: Any) -> None:
    """Shards a causal LM over the ranks of the mesh, each transformer layer by itself and the rest together (FSDP2).

    Gradients are summed, not averaged. `in_forward` calls functions of the model.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    model = _root(model)
    model.unsharded = (copy.deepcopy(model, {id(p): nn.Parameter(p.to("meta"), requires_grad=False) for p in model.parameters()}),)
    for stack in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
        for layer in stack:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for part in sharded(model):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # Gloo knows no scaled sum
    model.call_inside = lambda function, *arguments, **settings: function(*arguments, **settings)
    register_fsdp_forward_method(model, "call_inside")
    with torch.no_grad():
        in_forward(model, lambda _: None)  # the model becomes the root of its layers
    reshard(model)


def unsharded_copy(model: Any) -> Any:
    """A copy of a model without gradient, whole on each rank also where the model is sharded. A collective there."""
    if not sharded(model):
        return copy.deepcopy(model).requires_grad_(False).eval()
    (empty,) = _root(model).unsharded
    reshard(model)
    weights = full_tensors(dict(_root(model).named_parameters()))
    return copy.deepcopy(empty, {id(p): nn.Parameter(weights[name].clone(), False) for name, p in empty.named_parameters()}).eval()


def _root(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "disable_adapter") else model


def in_forward(model: Any, function: Callable[..., T], *arguments: Any, **settings: Any) -> T:
    """function(model, …), as the forward pass of a sharded model: weights are gathered, gradients are reduced."""
    call = getattr(_root(model), "call_inside", None)
    return function(model, *arguments, **settings) if call is None else call(function, model, *arguments, **settings)


def sharded(*models: Any) -> list[Any]:
    """All modules of the models that hold a shard."""
    from torch.distributed.fsdp import FSDPModule

    return [m for model in models if isinstance(model, nn.Module) for m in model.modules() if isinstance(m, FSDPModule)]


def reshard(*models: Any) -> None:
    """Back to shards, where a pass without a backward pass has left weights gathered."""
    for part in sharded(*models) if size() > 1 else ():
        part.reshard()


@contextmanager
def whole_weights(model: Any) -> Iterator[None]:
    """All weights gathered inside, once: then ranks may generate as many tokens as each needs, and any engine reads plain tensors."""
    parts = sharded(model) if size() > 1 else []
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not _root(model), recurse=False)
            part.reshard()


def full_tensors(value: Any) -> Any:
    """Plain containers with every sharded tensor gathered. A collective: all ranks call it."""
    if isinstance(value, Mapping):
        return {key: full_tensors(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [full_tensors(one) for one in value]
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def shard_like(value: Tensor, live: Tensor) -> Tensor:
    """A whole tensor, the same on every rank, as the live one is sharded."""
    if not hasattr(live, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    kept: Any = live
    return distribute_tensor(value.to(kept.device, kept.dtype), kept.device_mesh, kept.placements)
