"""Run the model over rows of the cache. A pass either reads new tokens of several contexts, or
decodes one token in every slot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkit.engines.cached.attention import Part, attend, attend_in_place
from rlkit.engines.cached.cache import SPARE, Pages
from rlkit.engines.cached.forward import (
    casts_weights,
    find_autocast_type,
    make_forward,
    make_logits_function,
)
from rlkit.engines.cached.slots import Row
from rlkit.models.head import split_model
from rlkit.system.adapters import lora_layers
from rlkit.types import Policy


class Seen(NamedTuple):
    """Say to which places a pass writes keys and values, and to which tokens each row attends.

    Attributes:
      places: [R, m], the places for the keys and values of the new tokens (`Pages.places`).
      table: [R, n], the pages to read. None for a pass over whole contexts, in which each context
        attends only to its own new tokens.
      mask: [R, 1, m, n · page], True if a token sees a position.
      lengths: [R] int32, the number of positions each row sees. This replaces the mask if the pages
        are read in place.
      parts: ranges of rows of similar length, each with its own number of positions to read. If
        empty, all rows read all pages.
    """

    places: Tensor
    table: Tensor | None = None
    mask: Tensor | None = None
    lengths: Tensor | None = None
    parts: tuple[Part, ...] = ()


class Passes:
    """Run a model over the pages of a cache.

    Args:
      in_place: True lets decoding steps read the pages in place (`attend_in_place`). False copies
        them for torch's scaled_dot_product_attention.
    """

    def __init__(self, policy: Policy, causal: Any, pages: Pages, *, in_place: bool = False):
        self.policy = policy
        self.causal = causal
        self.trunk, self.head = split_model(causal)
        self.pages = pages
        self.in_place = in_place
        self.half = find_autocast_type(pages.device)
        self.forward = make_forward(self.trunk, self.half)
        self.logits = make_logits_function(self.head, self.forward)
        # True if graphs must be dropped after each call. A graph may read copies of weights made by
        # autocast, and autocast frees these copies at the end of the call.
        self.casts = self.half is not None and casts_weights(self.head, self.forward)
        self.weights = list_addresses(causal)

    def serves(self, policy: Policy, causal: Any) -> bool:
        """Return whether graphs captured for the previous weights can be replayed with these
        weights, because all addresses are the same. If so, recompute the tensors derived from the
        weights."""
        rest = (a is b or a == b for a, b in zip(policy, self.policy, strict=True))
        if causal is not self.causal or not all(rest) or list_addresses(causal) != self.weights:
            return False
        if find_autocast_type(self.pages.device) != self.half:
            return False
        if self.forward is not None:
            self.forward.refresh()
        return True

    def read(self, rows: Sequence[Row]) -> Tensor:
        """Pass the unread tokens of some rows through the model. Return the hidden state of each
        row's last token, [R, H].

        The rows must be alike: either no row has cached tokens, or every row has cached tokens.
        """
        pages = self.pages
        device = pages.device
        new = [row.context[row.known :] for row in rows]
        width = max(map(len, new))
        padded = [[*ids, *[self.policy.pad_token_id] * (width - len(ids))] for ids in new]
        ids = torch.tensor(padded, device=device)
        lengths = torch.tensor([len(ids) for ids in new], device=device)
        slots = torch.tensor([row.slot for row in rows], device=device)
        starts = torch.tensor([row.known for row in rows], device=device)
        steps = torch.arange(width, device=device)
        # The padding may reach beyond the longest context. Nothing reads its keys and values.
        positions = (starts[:, None] + steps).clamp(max=self.policy.context_length - 1)
        own = steps < lengths[:, None]
        places = pages.places(slots, positions).where(own, SPARE * pages.page)
        seen = Seen(places)
        if rows[0].known:
            columns = pages.span(max(len(row.context) for row in rows))
            reach = torch.arange(columns * pages.page, device=device)
            mask = (reach <= positions[..., None])[:, None]
            seen = Seen(places, pages.table[slots, :columns], mask)
        states = self.hidden(ids, positions, seen)
        return states[torch.arange(len(rows), device=device), lengths - 1]

    def step(self, last: Tensor, positions: Tensor, columns: int, parts: Sequence[Part]) -> Tensor:
        """Pass the last token [S] of each of the first S slots through the model, at its position
        [S]. Return logits [S, V].

        Rows attend to the pages in the first `columns` columns of the table. The host reads no
        tensor, so the step can be captured as a CUDA graph.
        """
        pages = self.pages
        slots = len(last)
        at = positions[:, None]
        places = pages.places(pages.indices[:slots], at)
        table = pages.table[:slots, :columns]
        if self.in_place:
            # a slot without a completion may keep a position beyond these columns
            lengths = (positions + 1).clamp(max=columns * pages.page).to(torch.int32)
            seen = Seen(places, table.to(torch.int32), lengths=lengths)
        else:
            reach = torch.arange(columns * pages.page, device=pages.device)
            seen = Seen(places, table, (reach <= at)[:, None, None], parts=tuple(parts))
        return self.logits(self.hidden(last[:, None], at, seen)[:, 0])

    def hidden(self, ids: Tensor, positions: Tensor, seen: Seen) -> Tensor:
        """Return the last hidden states [R, m, H] of tokens [R, m] at these positions [R, m]."""
        if self.forward is not None:
            return self.forward(ids, positions, partial(self.attention, seen))
        mask = seen.mask
        if mask is None:  # `attend` takes a mask of this shape to mean causal attention
            mask = ids.new_ones(len(ids), 1, 1, 1, dtype=torch.bool)
        out = self.trunk(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=ModelCache(self.pages, seen),
            use_cache=True,
        )
        return out.last_hidden_state

    def attention(
        self, seen: Seen, query: Tensor, key: Tensor, value: Tensor, layer: int
    ) -> Tensor:
        """Write the new keys and values of a layer to the pages. Then compute the attention of
        these rows to all tokens that they see. Return the output [R, m, Hq, D]."""
        pages = self.pages
        pages.put(layer, key, value, seen.places)
        if seen.table is None:
            return attend(None, query, key.to(value.dtype), value, None)[0]
        if seen.lengths is not None:
            own = pages.keys[layer], pages.values[layer]
            return attend_in_place(query, *own, seen.table, seen.lengths)
        assert seen.mask is not None
        outs = []
        for start, stop, length in seen.parts or ((0, len(query), seen.mask.shape[-1]),):
            table = seen.table[start:stop, : pages.span(length)]
            # a range of rows reads no further than its longest row
            keys, values = (own[:, :, :length] for own in pages.gather(layer, table))
            mask = seen.mask[start:stop, ..., :length]
            outs.append(attend(None, query[start:stop], keys, values, mask)[0])
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class ModelCache:
    """Present the pages as a cache of Hugging Face's transformers, for one pass."""

    def __init__(self, pages: Pages, seen: Seen):
        self.pages = pages
        self.seen = seen

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values [R, Hk, m, D] of a layer to the pages. Return all keys and
        values these rows see."""
        self.pages.put(layer, key, value, self.seen.places)
        if self.seen.table is None:
            return key.to(value.dtype), value
        return self.pages.gather(layer, self.seen.table)

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the number of positions in the cache. Some models ask for this number, although
        every pass states the positions of its tokens."""
        return 0 if self.seen.mask is None else self.seen.mask.shape[-1]


def list_addresses(causal: Any) -> tuple[Any, ...]:
    """List the addresses of a model's weights, and the types, hooks and adapters of its modules. A
    captured graph is valid only while this list stays the same."""
    weights = [(p.data_ptr(), p.dtype, p.shape) for p in (*causal.parameters(), *causal.buffers())]
    adapters = [
        (m.merged, m.disable_adapters, tuple(m.active_adapters), tuple(m.scaling.items()))
        for m in lora_layers(causal)
    ]
    return (
        *weights,
        *adapters,
        *((type(m), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in causal.modules()),
    )
