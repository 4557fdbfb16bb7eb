"""Pack rows for the trunk, in updates and scoring passes. Packed rows have no padding, and a
beginning shared by several rows is stored only once.

The samples of one prompt begin alike. Therefore the rows are stored as the forest of their
prefixes, with one packed token for each distinct prefix. Linear layers compute each packed token
once. Attention of a packed token reads the packed tokens on the path to it, from the root of its
tree. Causal states depend only on the prefix, so packing changes no log-prob and no gradient.
Several equal replies cost as much as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
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
# Largest number of new tokens of a row for attention with a mask. With this limit, the size of the
# masks grows only linearly with the tokens of a micro-batch.
MASKED = 512
STEP = 256  # with stepped lengths: the shortest padded length of a call
STEP_TOKENS = 4096  # with stepped lengths: padded tokens in a call, unless one row has more


class Kernels(NamedTuple):
    """Select the attention kernels of a device for packed rows."""

    # True: in half precision, one call of variable-length attention, with each row as a segment
    varlen: bool
    # True: in all other cases, attention over whole rows without a mask. Their lengths are padded
    # to a power of two (256 … 32,768), and keys are repeated for every query head.
    steps: bool


# Compute capability → kernels. A device between two rows of the table uses the older row. torch
# chooses among its kernels for scaled_dot_product_attention in
# aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. cuDNN's kernel is excluded on all devices:
# it makes a plan for each new shape, in 0.44 s forward and 0.55 s backward (FunASR#3704), and
# `pack` makes about 50 shapes a step.
KERNELS = {
    # A CPU makes no plans, and one kernel supports masks, grouped heads and any length. Therefore
    # exact lengths need the least work.
    (0, 0): Kernels(varlen=False, steps=False),
    # Volta and Turing: flash attention needs sm_80. The memory-efficient kernel does not support
    # grouped heads in torch 2.13 (pytorch#191085 came later).
    (7, 0): Kernels(varlen=False, steps=True),
    # A100: flash attention supports no mask. With a mask and grouped heads, torch falls back to a
    # kernel writing out all scores: 4 GiB at 4k tokens, 15 GiB at 8k (ComfyUI#15135).
    # Variable-length flash attention needs no mask, because the last query of a segment is at its
    # last key. The same holds for RTX 30 and 40, the L4, Hopper and Blackwell, although torch would
    # prefer cuDNN on the last two.
    (8, 0): Kernels(varlen=True, steps=True),
}


def choose_kernels(device: torch.device) -> Kernels:
    """Return the row of KERNELS for a device."""
    if device.type != "cuda":
        return KERNELS[0, 0]
    own = torch.cuda.get_device_capability(device)
    kernels = KERNELS[max((row for row in KERNELS if (0, 0) < row <= own), default=(7, 0))]
    # varlen attention supports grouped heads since torch 2.12
    return kernels._replace(varlen=kernels.varlen and torch.__version__ >= "2.12")


class Paths(NamedTuple):
    """Hold rows of nearly the same size for one call of attention: the queries of each row, and the
    packed tokens that the row attends to."""

    # [R, Q] packed tokens: only the tokens added by each row, or all tokens of each row; padding is
    # token 0
    queries: Tensor
    keys: Tensor  # [R, L] all packed tokens of each row, in order; padding is token 0
    starts: Tensor | None  # [R] position of each row's first query; None: all positions are 0


class Segments(NamedTuple):
    """Hold all rows with new tokens, one after the other, for one call of variable-length
    attention. The queries are all packed tokens, in their order."""

    keys: Tensor  # [ΣL] all packed tokens of each row, in order
    # [2, R + 1] int32: the first query and the first key of each row, and the ends of the last row
    ends: Tensor
    longest: list[int]  # largest number of queries, and of keys, in a row


class Packed(NamedTuple):
    """Hold rows as packed tokens. There is one packed token for each distinct prefix from which a
    token is predicted."""

    ids: Tensor  # [N] int64, the id of each packed token
    positions: Tensor  # [N] int64, the position of each token in its row
    paths: tuple[Paths, ...]
    home: Tensor  # [N] int64, the index of each token in the flattened queries of all paths
    # [K] int64, the packed token that predicts each distinct sampled token
    parents: Tensor
    targets: Tensor  # [K] int64, the ids of the distinct sampled tokens
    # [M] int64, for each sampled token of the rows its index among the K distinct tokens, in the
    # order of the response mask
    inverse: Tensor
    response_mask: Tensor  # [B, T] bool, the response mask of the rows
    tokens: int  # number of tokens in the rows before packing
    kernels: Kernels
    segments: Segments | None  # None unless kernels.varlen


def pack(ids: Tensor, response_mask: Tensor, *, kernels: Kernels | None = None) -> Packed:
    """Pack rows as the forest of their prefixes. Each row is packed only up to the token before its
    last sampled token, because no further token is predicted from the last sampled token.

    Args:
      ids: [B, T], right-padded.
      response_mask: [B, T], True on sampled tokens. The first token of a row must not be sampled.
      kernels: the attention kernels to pack for; None: the kernels for the device of `ids`.
    Returns: N packed tokens and K distinct sampled tokens. N is at most the sum of the row lengths,
    and K is at most `M = response_mask.sum()`. Rows without a sampled token are left out.
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
        # kernels refuse the strides of a transposed array
        return torch.as_tensor(np.ascontiguousarray(values, dtype=dtype), device=ids.device)

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
    """Hold rows with each shared prefix stored only once."""

    index: Any  # [B, T] the packed token of each row and position
    added: list[tuple[int, int]]  # (a row with new tokens, number of tokens shared with others)
    tokens: list[Any]  # for each of these rows: ids of the new tokens
    depths: list[Any]  # for each of these rows: positions of the new tokens
    size: int  # total number of packed tokens


def _lay_out(rows: Any, lengths: Any) -> _Forest:
    """Build the forest from the first `lengths` tokens of each row."""
    index = np.zeros(rows.shape, dtype=np.int64)
    # In sorted order, a row shares at least as much with the row before it as with any earlier row.
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
            shared = count_shared(rows[row, :length], rows[before, : lengths[before]])
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


def count_shared(a: Any, b: Any) -> int:
    """Return the number of equal tokens at the beginning of two arrays."""
    both = min(len(a), len(b))
    differs = a[:both] != b[:both]
    return int(differs.argmax()) if differs.any() else both


def _place_part(
    part: Sequence[tuple[int, int, int]], index: Any, lengths: Any, home: Any, offset: int
) -> tuple[Any, Any]:
    """Return the queries [R, Q] and the paths [R, L] of the rows in one call of attention.

    Also write into `home` the index of each packed token among the queries of all calls. The
    queries of this call begin at index `offset`.
    """
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
    """Group the rows into calls of attention. Yield each call as a list of (row, position of the
    row's first query, number of tokens shared with other rows). If a row has many new tokens, all
    of its tokens become queries, and no mask is needed."""
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
    """Round a length up to a power of two, at least STEP."""
    return max(STEP, 1 << (length - 1).bit_length())


def size_class(length: int) -> int:
    """Return the number of a length's size class. Lengths in one class differ by less than a factor
    of √2, so padding to the longest length of the class costs less than this factor."""
    return int(2 * np.log2(length))


def compute_trunk_states(trunk: Any, packed: Packed) -> Tensor:
    """Compute the last hidden states [N, H] of all packed tokens.

    In two cases the trunk reads the rows unpacked: if it cannot attend to packed rows (see
    `allow_packing`), or if some layer does not see all positions of the longest row. The states are
    then the same, but shared beginnings are computed again for each row.
    """
    if packed.ids.device.type == "cuda":
        # switched off for the whole process, because gradient checkpointing computes attention
        # again in the backward pass
        torch.backends.cuda.enable_cudnn_sdp(False)
    if not len(packed.ids):
        return trunk.get_input_embeddings().weight.new_zeros(0, trunk.config.hidden_size)
    if max(path.keys.shape[1] for path in packed.paths) <= find_packed_context(trunk.config):
        if get_update_kernel(trunk).used == "fused" and serves(trunk):
            return compute_fused_states(
                trunk,
                packed.ids,
                packed.positions,
                lambda module, *qkv: _attend_all(packed, module.scaling, *qkv),
            )
        # this mask is ignored, but without it transformers would build a mask of all pairs
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


def find_packed_context(config: Any) -> float:
    """Return the longest row that a trunk with this config reads packed, in tokens; inf without a
    limit. Return 0 if the trunk reads every row unpacked."""
    return find_whole_context(config) if config._attn_implementation == ATTENTION else 0


def _read_rows(trunk: Any, packed: Packed) -> Iterator[Tensor]:
    """Yield the states [R, L, H] of the whole rows of each Paths, right-padded. In causal attention
    no token sees the padding after it, so no attention mask is built."""
    rows = [path.keys for path in packed.paths]
    if find_sharded_modules(trunk):
        # Make one call: each call gathers weights on all ranks, and ranks differ in their number of
        # paths.
        width = max(keys.shape[1] for keys in rows)
        padded = [nn_functional.pad(keys, (0, width - keys.shape[1])) for keys in rows]
        together = trunk(input_ids=packed.ids[torch.cat(padded)], use_cache=False)
        yield from together.last_hidden_state.split([len(keys) for keys in rows])
        return
    for keys in rows:
        yield trunk(input_ids=packed.ids[keys], use_cache=False).last_hidden_state


def allow_packing(model: nn.Module) -> None:
    """Let a causal LM read packed rows, if its layers attend as Hugging Face's "sdpa" does. Layers
    with a window read packed rows only up to the window's length.

    The model's other calls do not change. The choice is stored in the model's config, because
    gradient checkpointing computes attention again in the backward pass.
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
    """Compute causal attention of every packed token to its path. Without `packed`, call Hugging
    Face's own attention.

    Args:
      query: [1, Hq, N, D].
      key, value: [1, Hk, N, D]; Hk divides Hq.
    Returns: [1, N, Hq, D].
    """
    if packed is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, H, D]
    # In mixed precision, queries and keys are float32 after their norms, because the weights of the
    # norms are float32.
    q = q.to(v.dtype)
    k = k.to(v.dtype)
    segments = packed.segments
    if (
        segments is not None
        and v.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] == v.shape[-1] <= 256
        and v.shape[-1] % 8 == 0
    ):
        from torch.nn.attention.varlen import varlen_attn

        inputs: Any = (q, k[segments.keys], v[segments.keys], *segments.ends, *segments.longest)
        # (-1, 0): causal attention, aligned at the end of each segment. Therefore a query sees
        # itself and all earlier tokens of its row, including shared tokens.
        out: Any = varlen_attn(*inputs, scale=scaling, window_size=(-1, 0), enable_gqa=True)
        return out[None], None
    if packed.kernels.steps:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return _attend_all(packed, scaling, q, k, v)[None], None


def _attend_all(packed: Packed, scaling: float | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention [N, Hq, D] of every packed token to its path, from q, k and v [N, heads,
    D]."""
    parts = [_attend(q, k, v, paths, packed.kernels, scaling) for paths in packed.paths]
    return torch.cat(parts)[packed.home]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, paths: Paths, kernels: Kernels, scaling: float | None
) -> Tensor:
    """Compute attention [R · Q, Hq, D] of rows of nearly the same size."""
    queries, keys, starts = paths
    count, length = queries.shape
    if kernels.steps:  # here all tokens of the rows are queries
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
