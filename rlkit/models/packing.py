"""Pack rows without padding, every distinct beginning once, for the trunk in updates and scoring
passes.

The samples of one prompt begin alike, so rows are laid out as the forest of their prefixes. Each
distinct prefix is one packed token. Linear layers compute each packed token once, and attention
looks up the path to it. Causal states depend only on the prefix, so this changes no log-prob and no
gradient. Several equal replies cost as much as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as nn_functional

from rlkit.models.fused import compute_fused_states, get_update_kernel, serves
from rlkit.models.shape import find_whole_context
from rlkit.system.adapters import base_model
from rlkit.system.sharding import find_sharded_modules

ATTENTION = "rlkit_packed"
# most new tokens of a row for attention through a mask: masks then grow linearly with the tokens of
# a micro-batch
MASKED = 512
STEP = 256  # shortest padded length of a call, for lengths in steps
STEP_TOKENS = 4096  # of a call with stepped lengths, if a row is not longer


class Kernels(NamedTuple):
    """How a device attends to packed rows."""

    varlen: bool  # in half precision: each row is a segment of one call, whatever its length
    # otherwise: whole rows without a mask, one shape for each power of two (256 … 32,768), keys
    # repeated for their heads
    steps: bool


# Compute capability → kernels. A device between two rows takes the older row. torch chooses among
# its kernels of scaled_dot_product_attention in
# aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. cuDNN's is excluded on all of them, since it
# plans each new shape: 0.44 s forward and 0.55 s backward (FunASR#3704), and `pack` gives about 50
# shapes a step.
KERNELS = {
    # On a CPU nothing is planned, and one kernel takes masks, grouped heads and any length, so
    # exact lengths are the least work.
    (0, 0): Kernels(varlen=False, steps=False),
    # Volta and Turing: flash needs sm_80. The memory-efficient kernel takes no grouped heads in
    # torch 2.13 (pytorch#191085 came later).
    (7, 0): Kernels(varlen=False, steps=True),
    # A100: flash takes no mask, and with a mask and grouped heads torch falls to the kernel writing
    # out all scores: 4 GiB at 4k tokens, 15 GiB at 8k (ComfyUI#15135). Variable-length flash needs
    # no mask: its queries end at the end of a segment's keys. RTX 30 and 40 and the L4 as well, and
    # Hopper and Blackwell, although torch would prefer cuDNN there.
    (8, 0): Kernels(varlen=True, steps=True),
}


def choose_kernels(device: torch.device) -> Kernels:
    """The row of KERNELS for a device."""
    if device.type != "cuda":
        return KERNELS[0, 0]
    own = torch.cuda.get_device_capability(device)
    kernels = KERNELS[max((row for row in KERNELS if (0, 0) < row <= own), default=(7, 0))]
    # varlen attention takes grouped heads since then
    return kernels._replace(varlen=kernels.varlen and torch.__version__ >= "2.12")


class Paths(NamedTuple):
    """Rows of nearly one size: queries, and the path each attends to."""

    # [R, Q] packed tokens: the ones added by these rows, or whole rows; padding is token 0
    queries: Tensor
    keys: Tensor  # [R, L] packed tokens from the first of the row to its last; padding is token 0
    starts: Tensor | None  # [R] position of the first query; None: all of them 0


class Segments(NamedTuple):
    """All rows with new tokens, one behind the other. The packed tokens themselves are the queries,
    in their order."""

    keys: Tensor  # [ΣL] packed tokens of every row, from its first to its last
    # [2, R + 1] int32: the first query and the first key of each row, and the ends of the last
    ends: Tensor
    longest: list[int]  # most queries and most keys of a row


class Packed(NamedTuple):
    """Rows as packed tokens, one for each distinct prefix with a prediction after it."""

    ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64, in its row
    paths: tuple[Paths, ...]
    home: Tensor  # [N] int64, the place of each token among the queries of all paths, flattened
    # [K] int64, the packed token that predicts each distinct sampled token
    parents: Tensor
    targets: Tensor  # [K] int64, the ids of these sampled tokens
    # [M] int64, the index into K of each sampled token of the rows, in the order of the response
    # mask
    inverse: Tensor
    response_mask: Tensor  # [B, T] bool, of the rows
    tokens: int  # of the rows before packing
    kernels: Kernels
    segments: Segments | None  # None without kernels.varlen


def pack(ids: Tensor, response_mask: Tensor, *, kernels: Kernels | None = None) -> Packed:
    """Pack the forest of the prefixes of some rows. Each row is cut before its last sampled token,
    because nothing is predicted from it.

    Args:
      ids: [B, T], right-padded. response_mask: [B, T], True on sampled tokens; the first token of a
        row is never one.
      kernels: None takes the device's.
    Returns: N ≤ Σ row lengths, K ≤ M = response_mask.sum(); rows without a sampled token are not in
      it.
    Raises: ValueError if a row begins with a sampled token, because no state comes before it.
    """
    kernels = kernels or choose_kernels(ids.device)
    rows = ids.cpu().numpy()
    mask = response_mask.cpu().numpy()
    if mask[:, :1].any():
        raise ValueError(
            f"row {int(mask[:, 0].argmax())} begins with a sampled token; a prompt must stand"
            " before it"
        )
    lengths = np.where(mask, np.arange(mask.shape[1]), 0).max(1, initial=0)
    forest = _lay_out(rows, lengths)
    index = forest.index

    def tensor(values: Any, dtype: Any = np.int64) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=dtype), device=ids.device)

    paths = []
    home = np.zeros(forest.size, dtype=np.int64)
    offset = 0
    for part in _calls(forest.added, lengths, kernels):
        own, path = _place_part(part, index, lengths, home, offset)
        starts = [first for _, first, _ in part]
        paths.append(Paths(tensor(own), tensor(path), tensor(starts) if any(starts) else None))
        offset += own.size
    segments = None
    if kernels.varlen and forest.added:
        counts = np.array([(lengths[row] - shared, lengths[row]) for row, shared in forest.added])
        ends = np.pad(counts.cumsum(0), ((1, 0), (0, 0))).T
        flat = np.concatenate([index[row, : lengths[row]] for row, _ in forest.added])
        segments = Segments(tensor(flat), tensor(ends, np.int32), counts.max(0).tolist())
    where, at = np.nonzero(mask)
    pairs = np.stack([index[where, at - 1], rows[where, at]], 1)
    distinct, inverse = np.unique(pairs, axis=0, return_inverse=True)
    return Packed(
        ids=tensor(np.concatenate(forest.tokens) if forest.tokens else []),
        positions=tensor(np.concatenate(forest.depths) if forest.depths else []),
        paths=tuple(paths),
        home=tensor(home),
        parents=tensor(distinct[:, 0]),
        targets=tensor(distinct[:, 1]),
        inverse=tensor(inverse),
        response_mask=response_mask,
        tokens=int(lengths.sum()),
        kernels=kernels,
        segments=segments,
    )


class _Forest(NamedTuple):
    """Rows laid out so that a shared prefix is there once."""

    index: Any  # [B, T] row, position → packed token
    added: list[tuple[int, int]]  # rows with new tokens, and the number of tokens each shares
    tokens: list[Any]  # ids of the new tokens
    depths: list[Any]  # and their positions
    size: int  # packed tokens in all


def _lay_out(rows: Any, lengths: Any) -> _Forest:
    """Pack the first `lengths` tokens of the rows."""
    index = np.zeros(rows.shape, dtype=np.int64)
    # Once sorted, a row shares at least as much with the row before it as with any earlier one.
    order = sorted(
        np.flatnonzero(lengths).tolist(),
        key=lambda row: rows[row, : lengths[row]].astype(">i8").tobytes(),
    )
    added = []
    tokens = []
    depths = []
    size = 0
    before = -1
    for row in order:
        length = lengths[row]
        shared = 0
        if before >= 0:
            both = min(length, lengths[before])
            differs = rows[row, :both] != rows[before, :both]
            shared = int(differs.argmax()) if differs.any() else int(both)
            index[row, :shared] = index[before, :shared]
        before = row
        new = int(length) - shared
        if not new:
            continue
        index[row, shared:length] = np.arange(size, size + new)
        tokens.append(rows[row, shared:length])
        depths.append(np.arange(shared, length))
        size += new
        added.append((row, shared))
    return _Forest(index, added, tokens, depths, size)


def _place_part(
    part: Sequence[tuple[int, int, int]], index: Any, lengths: Any, home: Any, offset: int
) -> tuple[Any, Any]:
    """The queries and the paths of the rows of one call. Writes into `home` the place of each
    packed token among the queries; this call's begin at `offset`."""
    width = max(int(lengths[row]) for row, _, _ in part)
    queries = max(int(lengths[row]) - first for row, first, _ in part)
    own = np.zeros((len(part), queries), dtype=np.int64)
    path = np.zeros((len(part), width), dtype=np.int64)
    for i, (row, first, shared) in enumerate(part):
        length = lengths[row]
        path[i, :length] = index[row, :length]
        own[i, : length - first] = index[row, first:length]
        places = np.arange(shared - first, length - first)
        home[index[row, shared:length]] = offset + i * queries + places
    return own, path


def _calls(
    added: list[tuple[int, int]], lengths: Any, kernels: Kernels
) -> Iterator[list[tuple[int, int, int]]]:
    """The rows attending in one call, as (row, its first query, number of shared tokens). A long
    one is read whole, without a mask."""
    classes: dict[tuple[int, int, bool], list[tuple[int, int, int]]] = defaultdict(list)
    for row, shared in added:
        length = int(lengths[row])
        first = 0 if kernels.steps or length - shared > MASKED else shared
        key = (
            (step_length(length), 0, False)
            if kernels.steps
            else (size_class(length), size_class(length - first), first > 0)
        )
        classes[key].append((row, first, shared))
    for (length, *_), members in classes.items():
        most = max(1, STEP_TOKENS // length) if kernels.steps else len(members)
        yield from (members[i : i + most] for i in range(0, len(members), most))


def step_length(length: int) -> int:
    """The next power of two, at least STEP."""
    return max(STEP, 1 << (length - 1).bit_length())


def size_class(length: int) -> int:
    """Lengths of a class differ by less than a factor of √2, so attention is padded by less than
    that."""
    return int(2 * np.log2(length))


def compute_trunk_states(trunk: Any, packed: Packed) -> Tensor:
    """The last hidden states [N, H] of all packed tokens.

    A trunk reads the paths as rows if it cannot be packed (`allow_packing`), or if some layers do
    not see the whole of the longest row. The states are the same, but shared beginnings are
    computed again for each row.
    """
    if packed.ids.device.type == "cuda":
        # for the process: gradient checkpointing attends again in the backward pass
        torch.backends.cuda.enable_cudnn_sdp(False)
    if not len(packed.ids):
        return trunk.get_input_embeddings().weight.new_zeros(0, trunk.config.hidden_size)
    longest = max(path.keys.shape[1] for path in packed.paths)
    if trunk.config._attn_implementation == ATTENTION and longest <= find_whole_context(
        trunk.config
    ):
        if get_update_kernel(trunk).used == "fused" and serves(trunk):
            return compute_fused_states(
                trunk, packed.ids, packed.positions, partial(_attend_all, packed)
            )
        # given, to avoid a mask of all pairs
        unused = packed.ids.new_ones(1, 1, 1, 1, dtype=torch.bool)
        states = trunk(
            input_ids=packed.ids[None],
            position_ids=packed.positions[None],
            attention_mask=unused,
            use_cache=False,
            packed=packed,
        )
        return states.last_hidden_state[0]
    parts = []
    for (queries, keys, starts), states in zip(
        packed.paths, _read_rows(trunk, packed), strict=True
    ):
        at = torch.arange(queries.shape[1], device=keys.device).expand(queries.shape)
        at = (at if starts is None else at + starts[:, None]).clamp(max=keys.shape[1] - 1)
        parts.append(
            states.gather(1, at[..., None].expand(*at.shape, states.shape[-1])).flatten(0, 1)
        )
    return torch.cat(parts)[packed.home]


def _read_rows(trunk: Any, packed: Packed) -> Iterator[Tensor]:
    """The states [R, L, H] of the rows of each path. They are right-padded. Causal attention never
    looks at padding, so no attention mask is built."""
    rows = [path.keys for path in packed.paths]
    if find_sharded_modules(trunk):
        # One call, because other ranks have other numbers of paths, and each call gathers weights.
        width = max(keys.shape[1] for keys in rows)
        padded = [nn_functional.pad(keys, (0, width - keys.shape[1])) for keys in rows]
        together = trunk(input_ids=packed.ids[torch.cat(padded)], use_cache=False)
        yield from together.last_hidden_state.split([len(keys) for keys in rows])
        return
    for keys in rows:
        yield trunk(input_ids=packed.ids[keys], use_cache=False).last_hidden_state


def allow_packing(model: nn.Module) -> None:
    """Let a causal LM read packed rows, if its layers attend as Hugging Face's "sdpa". Layers with
    a window read rows up to its length in this way.

    For any other call nothing changes. The choice stays on the model, since gradient checkpointing
    attends again in backward.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import sdpa_mask

    model = base_model(model)
    config: Any = model.config
    if (
        isinstance(model, PreTrainedModel)
        and model._supports_attention_backend
        and find_whole_context(config) > 0
        and config._attn_implementation == "sdpa"
    ):
        AttentionInterface.register(ATTENTION, attend_packed)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        config._attn_implementation = ATTENTION


def attend_packed(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed: Packed | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention of every packed token to its path; Hugging Face's own if nothing is packed.

    Args:
      query: [1, Hq, N, D]. key, value: [1, Hk, N, D], Hk divides Hq.
    Returns: [1, N, Hq, D].
    """
    if packed is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, H, D]
    # In mixed precision the norms of queries and keys leave them in float32, because the norms'
    # weights are float32.
    q = q.to(v.dtype)
    k = k.to(v.dtype)
    segments = packed.segments
    if (
        segments is not None
        and v.dtype in (torch.float16, torch.bfloat16)
        and v.shape[-1] <= 256
        and v.shape[-1] % 8 == 0
    ):
        from torch.nn.attention.varlen import varlen_attn

        inputs: Any = (q, k[segments.keys], v[segments.keys], *segments.ends, *segments.longest)
        # (-1, 0): causal, from the end of each segment; a query sees the row's shared tokens, and
        # itself.
        out: Any = varlen_attn(*inputs, scale=scaling, window_size=(-1, 0), enable_gqa=True)
        return out[None], None
    if packed.kernels.steps:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    parts = [_attend(q, k, v, paths, packed.kernels, scaling) for paths in packed.paths]
    return torch.cat(parts)[packed.home][None], None


def _attend_all(packed: Packed, module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention [N, Hq, D] of every packed token to its path, [N, H, D]."""
    return torch.cat(
        [_attend(q, k, v, paths, packed.kernels, module.scaling) for paths in packed.paths]
    )[packed.home]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, paths: Paths, kernels: Kernels, scaling: float | None
) -> Tensor:
    """Attention [R · Q, Hq, D] of rows of nearly one size."""
    queries, keys, starts = paths
    count, length = queries.shape
    if kernels.steps:  # whole rows
        step = step_length(length)
        queries = keys = nn_functional.pad(
            keys, (0, step - length, 0, max(1, STEP_TOKENS // step) - count)
        )
    mask = None
    if starts is not None:
        last = starts[:, None] + torch.arange(length, device=keys.device)
        mask = (torch.arange(keys.shape[1], device=keys.device) <= last[..., None])[:, None]
    rows = (q[queries].transpose(1, 2), k[keys].transpose(1, 2), v[keys].transpose(1, 2))
    settings: Any = {
        "attn_mask": mask,
        "is_causal": mask is None,
        "scale": scaling,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    return (
        nn_functional.scaled_dot_product_attention(*rows, **settings)
        .transpose(1, 2)[:count, :length]
        .flatten(0, 1)
    )
