"""The engine's own forward against Hugging Face's own forward, over its families of layers; and who
is left to the latter."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from parametrise import each
from rlkit.engines import Cached
from rlkit.engines.cached.forward import make_forward
from rlkit.functional import mix
from rlkit.models.head import PLAIN

CONTEXTS = [(5, 9, 2, 7), (5, 9, 2, 7), (11, 3), (4, 4, 8, 1, 30, 2)]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "eos_token_id": 63,
    "pad_token_id": 62,
    "tie_word_embeddings": False,
    "sliding_window": None,
}
VARIANTS = {
    "as it is": {},
    "a key head for each": {"num_key_value_heads": 4},
    "a base of its own": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    },
}


def model_of(family, **changes):
    """Random weights, norms and biases too, so that each of them matters."""
    torch.manual_seed(0)
    size = {"num_key_value_heads": 2, "head_dim": 8} | SIZES | changes
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **size), attn_implementation="sdpa"
    ).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model


SOME = ["q_proj", "v_proj", "up_proj", "down_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(model, targets=SOME, **settings):
    """With an adapter that changes what the model says."""
    config = LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **({"r": 2} | settings))
    model = get_peft_model(model, config).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.slow
@each("adapter", [False, True], ids=["plain", "adapter"])
@each(
    ("family", "variant"),
    [*((family, "as it is") for family in PLAIN), *(("qwen3", v) for v in [*VARIANTS][1:])],
)
def test_a_step_draws_what_the_reference_engine_draws(
    tiny, complete, reference, family, variant, adapter
):
    model = model_of(family, **VARIANTS[variant])
    model = adapted(model) if adapter else model
    policy = tiny._replace(model=model, eos_token_ids=(63,), pad_token_id=62, context_length=64)
    assert make_forward(model.get_base_model().base_model if adapter else model.base_model)
    seeds = [mix(1, i) for i in range(len(CONTEXTS))]
    ours = complete(Cached(), policy, CONTEXTS, seeds, max_new_tokens=24)
    theirs = reference(policy, CONTEXTS, seeds, max_new_tokens=24)
    assert [g.token_ids for g in ours] == [g.token_ids for g in theirs]
    assert sum(len(g.token_ids) for g in ours) > 40
    for a, b in zip(ours, theirs, strict=True):  # float32, sums in another order
        torch.testing.assert_close(
            torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=1e-4
        )


def test_a_step_is_left_to_layers_that_are_not_known(tiny):
    assert make_forward(tiny.model.base_model)
    assert not make_forward(
        GemmaForCausalLM(GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=8)).base_model
    )
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))
    assert make_forward(model.base_model)

    class Mine(type(model.base_model.layers[1].mlp)):  # type: ignore[misc]
        """A part that a user has changed."""

    model.base_model.layers[1].mlp.__class__ = Mine
    assert not make_forward(model.base_model)


def test_what_hangs_on_the_call_of_a_layer_is_not_passed_by(tiny, complete):
    layer, seen = tiny.model.base_model.layers[0], []
    hook = layer.self_attn.register_forward_hook(lambda *_: seen.append(1))
    try:
        complete(Cached(), tiny, [(760, 590, 764)], [1], max_new_tokens=4)
    finally:
        hook.remove()
    assert len(seen) >= 2
