"""Collectives for one run on several processes, the ranks. All ranks compute the same result.

Every rank holds all rollouts of a step, because they are small. So every rank computes refill,
baselines, advantages, weights and metrics on the whole batch, as a single process would. Only the
expensive parts are divided between ranks. Episodes and their scoring are divided by prompt, and
forward and backward passes by group. A loss is a sum with weights fixed before the passes. So the
gradients are summed over ranks, without any further scaling.

On one process, these functions return their input unchanged. torch.distributed is imported only
when it is needed.
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
from rlkit.system.adapters import base_model
from rlkit.system.sharding import find_sharded_modules, holds_shards, is_sharded
from rlkit.system.waiting import waiting_outside

T = TypeVar("T")


class RankError(RLKitError, RuntimeError):
    """Report that another rank failed, ended, or did not answer within trainer.timeout."""


class RankOSError(RankError, OSError):
    """Report that another rank could not read or write, for example because its disk is full."""

    elsewhere = True  # the failed rank itself reports the error


# ---------------------------------------------------------------------------------------- the group


def size() -> int:
    """Return the number of processes that train together."""
    return torch.distributed.get_world_size() if _has_joined() else 1


def rank() -> int:
    """Return the number of this process. Only rank 0 prints and writes."""
    return torch.distributed.get_rank() if _has_joined() else 0


def _has_joined() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def join(devices: int, *, cuda: bool, timeout: float) -> None:
    """Join the process group that torchrun, SLURM or `rlkit.distributed.launch` has started.

    Ranks above 0 no longer print to stdout.

    Args:
      devices: number of ranks set in the config, over all nodes.
      cuda: True if each rank has one GPU. Collectives of GPU tensors then use NCCL, and collectives
        of objects use gloo.
      timeout: seconds to wait for the other ranks in a collective.
    Raises: ConfigError if a different number of ranks was started.
    """
    started = int(os.environ["WORLD_SIZE"])
    if started != devices:
        raise ConfigError(
            f"trainer.devices × trainer.nodes = {devices}, but {started} ranks were started; make"
            " the two equal"
        )
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with _explain_lost_ranks("the others to start"):
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout)
        )
    if rank():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (for the rest of the process)


def leave() -> None:
    """Leave the process group."""
    if _has_joined():
        torch.distributed.destroy_process_group()


# ------------------------------------------------------------------------------ objects and numbers


def gather(make: Callable[[], T]) -> list[T]:
    """Call `make` on every rank and return all results, in the order of the ranks.

    If `make` raises on one rank, all ranks raise. The failed rank raises its own exception.

    Results are pickled. This is safe, because only processes of the same run exchange them.
    """
    if size() == 1:
        return [make()]
    error: Exception | None = None
    try:
        mine: Any = make()
        said = None
    except Exception as raised:
        kind = next((kind for kind in (Refusal, OSError) if isinstance(raised, kind)), Exception)
        error = raised
        mine = None
        said = (f"{type(raised).__name__}: {raised}", kind)
    parts: list[Any] = [None] * size()
    with _explain_lost_ranks("the results of the others"):
        torch.distributed.all_gather_object(parts, (said, mine))
    if error is not None:
        raise error
    failed = {i: said for i, (said, _) in enumerate(parts) if said is not None}
    if failed:
        text = "; ".join(f"rank {i} failed: {why}" for i, (why, _) in failed.items())
        kinds = {kind for _, kind in failed.values()}
        if kinds == {Refusal}:
            raise Refusal(text)
        raise RankOSError(text) if kinds == {OSError} else RankError(text)
    return [part for _, part in parts]


def broadcast(make: Callable[[], T]) -> T:
    """Call `make` on rank 0 only, and return its result on every rank."""
    return gather(lambda: make() if rank() == 0 else None)[0]  # type: ignore[return-value]


def split_work(items: Sequence[Any], work: Callable[[Sequence[Any], int], list[T]]) -> list[T]:
    """Divide items over the ranks in consecutive parts. Return the results for all items, in order,
    on every rank.

    Args:
      items: the same items on every rank.
      work: (items of this rank, index of the first of them) → results. It is called on every rank,
        even on a rank without items, because all ranks together load weights into servers.
    """
    if size() == 1:
        return work(items, 0)
    begin, end = (len(items) * r // size() for r in (rank(), rank() + 1))
    return [one for part in gather(lambda: work(items[begin:end], begin)) for one in part]


def any_rank(flag: bool) -> bool:
    """Return whether the flag is true on any rank."""
    return bool(all_reduce_max(int(flag)))


def all_reduce_max(number: int) -> int:
    """Return the largest number over all ranks."""
    if size() == 1:
        return number
    tensor = torch.tensor(number)
    with _explain_lost_ranks("a number of the others"):
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return int(tensor)


def all_reduce_sum(tensors: Iterable[Tensor | None]) -> None:
    """Replace each tensor by its sum over all ranks, in place. Skip None.

    Every rank must pass the same tensors in the same order.
    """
    if size() == 1:
        return
    with _explain_lost_ranks("the sums of the others"):
        for work in [
            torch.distributed.all_reduce(t, async_op=True) for t in tensors if t is not None
        ]:
            work.wait()


@contextmanager
def _explain_lost_ranks(what: str) -> Iterator[None]:
    """Turn an error about a lost or silent rank into a message with a remedy."""
    try:
        with waiting_outside():
            yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1][:200] if str(error) else type(error).__name__
        raise RankError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} waited in vain for {what}: a"
            f" rank has failed, was killed, or took longer than trainer.timeout ({reason}). Look at"
            " what the other ranks said last; the run goes on from its newest checkpoint with"
            " resume=FOLDER"
        ) from error


# ---------------------------------------------------------------------------------- rows of a batch


def assign_groups(lengths: Tensor, group_ids: Tensor) -> Tensor:
    """Assign whole groups to ranks. Return a mask [B], True on the rows that this rank trains on.

    The groups are assigned in order of length, the longest first. Each group goes to the rank with
    the fewest tokens so far.

    The rollouts of a group stay together, because a packed pass reads the prompt of a group only
    once.

    Args:
      lengths: [B] number of tokens per row.
      group_ids: [B] the group of each row, that is, its prompt.
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
    return torch.tensor(
        [owner in dealt for owner in group_ids.tolist()], dtype=torch.bool, device=lengths.device
    )


def pad_work(work: list[T], spare: Callable[[], T]) -> list[tuple[T, bool]]:
    """Pad the list of micro-batches to the same length on all ranks. Return each micro-batch with
    True, or with False if it is padding and must not count.

    The common length is the largest number of micro-batches on any rank.

    A sharded model gathers its weights on all ranks at the same time. If one rank ran fewer passes,
    the others would wait for ever.

    Args:
      work: the micro-batches of this rank.
      spare: makes a micro-batch for padding if `work` is empty.
    """
    # Agree on the number before the first pass, because a pass may be a collective itself.
    missing = all_reduce_max(len(work)) - len(work)
    padded = [(piece, True) for piece in work]
    if missing:
        padded += [(work[-1] if work else spare(), False)] * missing
    return padded


# ---------------------------------------------------------------------------------- sharded weights


def shard(model: Any, mesh: Any, gathered: torch.dtype | None = None) -> None:
    """Shard a causal LM over the ranks of the mesh with FSDP2. Each transformer layer is sharded
    separately, and the rest of the model together.

    Gradients are summed, not averaged. `run_in_forward` calls functions of the model.

    Args:
      gathered: the type of gathered weights and of computation; bfloat16 halves the data to send.
        None: the weights' own type. The shards and the sums of gradients stay float32.
    """
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    # FSDP2 must not cast the inputs: autocast keeps the residual stream in float32, as on one rank.
    policy = MixedPrecisionPolicy(
        param_dtype=gathered, reduce_dtype=gathered and torch.float32, cast_forward_inputs=False
    )

    model = base_model(model)
    model.unsharded = (
        copy.deepcopy(
            model,
            {id(p): nn.Parameter(p.to("meta"), requires_grad=False) for p in model.parameters()},
        ),
    )
    for stack in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
        for layer in stack:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for part in find_sharded_modules(model):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # Gloo does not support a scaled sum
    model.call_inside = lambda function, *arguments, **settings: function(*arguments, **settings)
    register_fsdp_forward_method(model, "call_inside")
    with torch.no_grad():
        run_in_forward(model, lambda _: None)  # makes the model the FSDP root of its layers
    reshard(model)


def copy_unsharded(model: Any) -> Any:
    """Return a copy of a model without gradients. The copy is whole on each rank, even if the model
    is sharded.

    For a sharded model this is a collective: all ranks must call it.
    """
    if not find_sharded_modules(model):
        return copy.deepcopy(model).requires_grad_(False).eval()
    (empty,) = base_model(model).unsharded
    reshard(model)
    weights = gather_tensors(dict(base_model(model).named_parameters()))
    return copy.deepcopy(
        empty,
        {id(p): nn.Parameter(weights[name].clone(), False) for name, p in empty.named_parameters()},
    ).eval()


def run_in_forward(model: Any, function: Callable[..., T], *arguments: Any, **settings: Any) -> T:
    """Call function(model, …) as the forward pass of a sharded model. The weights are gathered for
    the call, and a backward pass reduces the gradients."""
    root = base_model(model)
    if holds_shards(root):
        return root.call_inside(function, model, *arguments, **settings)
    return function(model, *arguments, **settings)


def reshard(*models: Any) -> None:
    """Free the gathered weights, and keep only the shards. A forward pass without a backward pass
    leaves the weights gathered."""
    for part in find_sharded_modules(*models) if size() > 1 else ():
        part.reshard()


@contextmanager
def gather_weights(model: Any) -> Iterator[None]:
    """Gather all weights once, and keep them gathered within the block.

    Within the block, each rank may generate as many tokens as it needs, and any engine sees plain
    tensors.
    """
    parts = find_sharded_modules(model) if size() > 1 else []
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not base_model(model), recurse=False)
            part.reshard()


def gather_tensors(value: Any, *, for_file: bool = False) -> Any:
    """Copy nested containers and gather every sharded tensor in them. This is a collective: all
    ranks must call it.

    Args:
      for_file: rank 0 writes the result. Each tensor is moved to its CPU before the next one is
        gathered, so a GPU holds one whole tensor at a time. The other ranks get empty tensors.
    """
    if isinstance(value, Mapping):
        return {key: gather_tensors(one, for_file=for_file) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [gather_tensors(one, for_file=for_file) for one in value]
    if not is_sharded(value):
        return value
    whole = value.full_tensor()
    if for_file:
        return whole.cpu() if rank() == 0 else whole.new_empty(0, device="cpu")
    return whole


def shard_like(value: Tensor, live: Tensor) -> Tensor:
    """Shard a whole tensor, equal on every rank, in the same way as the tensor `live`."""
    if not is_sharded(live):
        return value
    from torch.distributed.tensor import distribute_tensor

    kept: Any = live
    return distribute_tensor(value.to(kept.device, kept.dtype), kept.device_mesh, kept.placements)
