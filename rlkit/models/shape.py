"""Read the config of a Hugging Face model into fields that mean the same for every family."""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class ModelShape(NamedTuple):
    """Hold the sizes of a model and the kinds of its layers."""

    family: str  # model_type; "" if the config names none
    context: int | None  # largest number of positions; None: the config has no limit
    vocab: int | None  # rows of the vocabulary; None: the config does not say
    heads: int  # heads of queries; 0: the config does not say
    kv_heads: int  # heads of keys and values; as many as `heads` if the config does not say
    head_dim: int
    experts: int  # experts in a layer; 1: the model has no choice of experts
    active: int  # experts used for each token
    expert_width: int | None  # intermediate size of one expert
    layer_types: frozenset[str]  # empty if the config does not say
    # number of positions seen by a layer of type sliding_attention, or by every layer if the config
    # names no types; None: all positions
    window: int | None
    shared: int  # number of last layers with keys and values from earlier layers, as in Gemma 3n
    encoder: bool  # True if the model has an encoder before the decoder


def read_model_shape(config: Any) -> ModelShape:
    """Read the shape of a model from its config. Each family leaves out fields it does not need, so
    any field may be missing. For a model with vision or audio, read the config of its text."""
    text = getattr(config, "get_text_config", lambda: config)()

    def field(name: str) -> Any:
        return getattr(text, name, None)

    heads = field("num_attention_heads") or 0
    return ModelShape(
        family=field("model_type") or "",
        context=field("max_position_embeddings"),
        vocab=field("vocab_size"),
        heads=heads,
        kv_heads=field("num_key_value_heads") or heads,
        head_dim=field("head_dim") or (field("hidden_size") // heads if heads else 0),
        experts=field("num_experts") or field("num_local_experts") or 1,
        active=field("num_experts_per_tok") or 1,
        expert_width=field("moe_intermediate_size"),
        layer_types=frozenset(field("layer_types") or field("layers_block_type") or ()),
        window=field("sliding_window") or None,
        shared=field("num_kv_shared_layers") or 0,
        encoder=bool(getattr(config, "is_encoder_decoder", None)),
    )


def find_whole_context(config: Any) -> float:
    """Return the longest context, in tokens, for which every layer sees all positions.

    The result is inf for a model without windows, and the size of the window for a model with
    sliding layers. The result is 0 if the model has layers of other kinds, layers with shared keys
    and values, or an encoder.

    Up to this length a sliding layer computes the same as a full layer.
    """
    shape = read_model_shape(config)
    if (
        shape.encoder
        or shape.shared
        or shape.family == "doge"  # it adds a mask of its own to the scores
        or shape.layer_types - {"full_attention", "sliding_attention"}
    ):
        return 0
    if shape.layer_types == {"full_attention"}:
        return math.inf
    if shape.window is None:
        return 0 if shape.layer_types else math.inf
    return shape.window
