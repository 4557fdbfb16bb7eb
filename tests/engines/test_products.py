"""The products of the engine's own forward: adapters and half copies against the calls of the
model's own modules, and what they cost."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from engines.test_forward import ALL, CONTEXTS, SIZES, SOME, adapted, model_of
from pretend_gpu import PretendGPU, is_view
from rlkit.engines import Cached
from rlkit.engines.cached.forward import make_forward, make_logits_function
from rlkit.engines.cached.products import find_plain_part, make_projection
from rlkit.functional import mix
from rlkit.models.head import PLAIN, split_model
from rlkit.models.load import compute_as_base
from rlkit.system.adapters import lora_layers

# ----------------------------------------------------------------------- adapters as two products


class Counter(TorchDispatchMode):
    """Operations that compute, and conversions of tensors as large as a weight, named by shape."""

    def __init__(self, weights):
        super().__init__()
        self.shapes = {w.shape for w in weights if w.dim() == 2}
        self.kernels = 0
        self.casts = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not is_view(out, (args, kwargs)):
            self.kernels += 1
            if func._schema.name in ("aten::_to_copy", "aten::to") and args[0].shape in self.shapes:
                self.casts.append(tuple(args[0].shape))
        return out


def causal(query, key, value, layer):
    """Attention among the tokens of one pass, as the cache has it read."""
    key = key.to(value.dtype)
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1, output_size=query.shape[1]) for x in (key, value))
    return scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


def logits_by(model, ids, half=None):
    """Last hidden states, and the logits of them, by the engine's own forward."""
    trunk, head = split_model(model)
    forward = make_forward(trunk, half)
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    states = forward(ids, positions, causal)
    return states, make_logits_function(head, forward)(states)


def by_its_modules(model, ids):
    trunk, head = split_model(model)
    states = trunk(ids, use_cache=False).last_hidden_state
    return states, head(states)


IDS = torch.arange(1, 28).view(3, 9)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(
            torch.version.cuda is not None, reason="needs a torch built without CUDA"
        ),
    ),
]


@pytest.fixture
def on(request):
    """The device's name, under a pretend GPU for CUDA."""
    with PretendGPU() if request.param == "cuda" else nullcontext():
        yield request.param


@torch.no_grad()
def count(model, ids, half=None):
    """What one pass computes, what is made of weights before it aside."""
    trunk, head = split_model(model)
    forward = make_forward(trunk, half)
    logits = make_logits_function(head, forward)
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    with Counter([*model.parameters(), *(made for made, _ in forward.derived)]) as counter:
        logits(forward(ids, positions, causal))
    return counter


@pytest.mark.slow
@pytest.mark.parametrize("half", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("on", DEVICES, indirect=True)
def test_adapters_add_eight_kernels_a_layer(on, half):
    """On all seven projections: two products in each group that reads the same input. In float32 on
    a CPU none, because they are part of the copies."""
    model = model_of("qwen3").to(on)
    ids = IDS.to(on)
    autocast = nullcontext() if half is None else torch.autocast(on, half)
    with autocast:
        base = count(model, ids, half).kernels
        more = count(adapted(model, ALL).to(on), ids, half).kernels - base
    if half is None and on == "cpu":
        assert more == 0
    else:
        assert 0 < more <= 8 * SIZES["num_hidden_layers"]


def assert_products_are_those_of_the_modules(model):
    """In float64, where a wrong term shows and another order of a sum does not."""
    model = model.double()
    layer = split_model(model)[0].layers[1]
    attn = layer.self_attn
    mlp = layer.mlp
    groups = [
        (layer.input_layernorm, attn.q_proj, attn.k_proj, attn.v_proj),
        (None, attn.o_proj),
        (layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj),
        (None, mlp.down_proj),
    ]
    for norm, *modules in groups:
        x = torch.randn(2, 3, modules[0].in_features, dtype=torch.float64)
        scaled = x if norm is None else x * norm.weight
        torch.testing.assert_close(
            make_projection(lambda make: make(), norm, *modules)(x),
            torch.cat([module(scaled) for module in modules], -1),
            rtol=1e-12,
            atol=1e-12,
        )


@pytest.mark.parametrize("targets", [ALL, SOME], ids=len)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@torch.no_grad()
def test_adapters_give_the_numbers_of_their_modules(family, targets):
    """Of two ranks, on some modules of a group or on all, with biases and without."""
    model = adapted(model_of(family), targets, rank_pattern={"v_proj": 5}, lora_alpha=7)
    assert_products_are_those_of_the_modules(model)


@torch.no_grad()
def test_float32_adapters_over_a_bfloat16_base_are_computed_in_bfloat16():
    """As far from the exact numbers as the modules are: scaling × B is rounded once where they
    round each product."""
    model = adapted(model_of("qwen3"), ALL)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    truth = by_its_modules(deepcopy(model).float(), IDS)
    compute_as_base(model)
    trunk = split_model(model)[0]
    assert find_plain_part(trunk.layers[0].self_attn.q_proj).factors
    found = logits_by(model, IDS)
    assert {x.dtype for x in found} == {torch.bfloat16}
    assert as_near(found, by_its_modules(model, IDS), truth)


def as_near(ours, theirs, truth) -> bool:
    """Whether our numbers are on the whole no farther from the truth than theirs, a tenth for
    chance."""
    return all(
        (a.float() - t).square().mean() <= 1.1**2 * (b.float() - t).square().mean()
        for a, b, t in zip(ours, theirs, truth, strict=True)
    )


@torch.no_grad()
def test_what_adapters_become_is_seen_by_refresh():
    """An optimizer's step in place, on factors that may lie anywhere."""
    model = adapted(model_of("qwen3"), ALL)
    forward = make_forward(split_model(model)[0])
    places = [tensor.data_ptr() for tensor, _ in forward.derived]
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.mul_(1.5)
    forward.refresh()
    positions = torch.arange(IDS.shape[1]).expand(IDS.shape)
    assert torch.equal(forward(IDS, positions, causal), logits_by(model, IDS)[0])
    assert places == [tensor.data_ptr() for tensor, _ in forward.derived]


def merged(model):
    model.merge_adapter()


def disabled(model):
    model.base_model.disable_adapter_layers()


def scaled(model):
    for layer in lora_layers(model):
        layer.scale_layer(3.0)


def replaced(model):
    for layer in lora_layers(model):
        factor = layer.lora_B["default"]
        factor.weight = torch.nn.Parameter(factor.weight * 2)


@pytest.mark.slow
@pytest.mark.parametrize("change", [merged, disabled, scaled, replaced])
def test_adapters_that_are_changed_between_calls_are_seen(tiny, complete, reference, change):
    model = adapted(model_of("qwen3"), ALL)
    policy = tiny._replace(model=model, eos_token_ids=(63,), pad_token_id=62, context_length=64)
    engine = Cached()
    drawn = {"contexts": CONTEXTS, "seeds": [mix(1, i) for i in range(len(CONTEXTS))]}
    before = complete(engine, policy, *drawn.values(), max_new_tokens=8)
    change(model)
    after = complete(engine, policy, *drawn.values(), max_new_tokens=8)
    expected = reference(policy, *drawn.values(), max_new_tokens=8)
    assert [g.token_ids for g in after] == [g.token_ids for g in expected]
    for a, b in zip(after, expected, strict=True):  # float32, sums in another order
        torch.testing.assert_close(
            torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=1e-4
        )
    if change is not merged:
        assert [g.logprobs for g in after] != [g.logprobs for g in before]


@pytest.mark.filterwarnings("ignore:.*lora_bias")
@pytest.mark.parametrize("kind", ["use_dora", "lora_bias", "use_rslora"])
@torch.no_grad()
def test_adapters_of_other_kinds_are_called(kind):
    """Of the three, rank-stabilised ones are plain: their scaling differs."""
    model = adapted(model_of("qwen3"), ALL, **{kind: True})
    plain = find_plain_part(split_model(model)[0].layers[0].mlp.up_proj)
    assert (plain is not None) == (kind == "use_rslora")
    assert_products_are_those_of_the_modules(model)


@torch.no_grad()
def test_what_hangs_on_a_projection_is_called():
    model = model_of("qwen3")
    seen = []
    model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *_: seen.append(1))
    logits_by(model, IDS)
    assert seen == [1]


# ------------------------------------------------------------------------------- half copies


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True], ids=["plain", "adapter"])
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("on", DEVICES, indirect=True)
def test_no_weight_is_cast_in_a_step(on, tied, adapter):
    """Autocast converts every weight in each step; the copies are converted by `refresh`."""
    model = model_of("qwen2", tie_word_embeddings=tied)
    model = (adapted(model, ALL) if adapter else model).to(on)
    ids = IDS.to(on)
    with torch.autocast(on, torch.bfloat16):
        assert len(count(model, ids).casts) > SIZES["num_hidden_layers"]
        assert count(model, ids, torch.bfloat16).casts == []


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("family", PLAIN)
@torch.no_grad()
def test_half_copies_give_the_numbers_of_autocast(family, tied):
    """Those of the model's own forward: logits bit for bit, and states up to the last bits of the
    norms in float32, which are computed in another way."""
    model = model_of(family, tie_word_embeddings=tied)
    with torch.autocast("cpu", torch.bfloat16):
        states, logits = logits_by(model, IDS, torch.bfloat16)
        expected = by_its_modules(model, IDS)
    torch.testing.assert_close(states, expected[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(logits, expected[1]) and logits.dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@torch.no_grad()
def test_half_copies_of_adapters_are_as_near_as_autocast(family):
    """Their products are added before the rounding, so bits differ from those of the modules."""
    model = adapted(model_of(family), ALL)
    truth = by_its_modules(model, IDS)
    with torch.autocast("cpu", torch.bfloat16):
        found = logits_by(model, IDS, torch.bfloat16)
        expected = by_its_modules(model, IDS)
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert as_near(found, expected, truth)
