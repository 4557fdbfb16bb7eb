"""The compiled operations of an update against torch's: the same values and gradients, whatever the
shapes, the family and the threads."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch.nn import functional as nn_functional
from transformers import AutoConfig, AutoModelForCausalLM

from parametrise import each
from rlkit.errors import EngineError
from rlkit.models import LoRA, add_lora, forward_logprobs, fused, pack
from rlkit.models import compiled as machinery
from rlkit.models.head import PLAIN, split_model
from rlkit.models.packing import allow_packing

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler"
)
EPS = 1e-6


def rotated(x, cosine, sine):
    half = x.shape[-1] // 2
    return x * cosine + torch.cat((-x[..., half:], x[..., :half]), -1) * sine


def gradients(function, *inputs):
    """Output, and the gradients of inputs for a gradient of the output that is not contiguous."""
    inputs = tuple(t.detach().requires_grad_() for t in inputs)
    y = function(*inputs)
    torch.manual_seed(1)
    g = torch.randn(*reversed(y.shape)).bfloat16().to(y).permute(*reversed(range(y.dim())))
    return [y, *torch.autograd.grad(y, inputs, g)]


def same(found, expected, rounding=2e-6):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= rounding * max(1.0, float(other.detach().abs().max()))


SHAPES = [
    (1, 1, 2),
    (1, 3, 32),
    (7, 2, 10),
    (64, 1, 48),
    (65, 4, 6),
    (200, 2, 34),
]  # tokens, heads, size


@pytest.mark.slow
@each(("n", "heads", "size"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("strided", [False, True])
def test_norm_rotation_and_gate_are_those_of_torch(n, heads, size, threads, strided, dtype):
    """To one rounding of what float64 gives, for odd shapes, one row, strided inputs and
    gradients."""
    torch.manual_seed(0)
    rounding = 2e-6 if dtype == torch.float32 else 2**-8
    x, other = (
        (
            torch.randn(n, size, heads).transpose(1, 2) if strided else torch.randn(n, heads, size)
        ).to(dtype)
        for _ in range(2)
    )
    weight, angle = (torch.rand(size) + 0.5).to(dtype), torch.rand(n, size)
    cosine, sine = angle.cos(), angle.sin()  # the halves differ, as after scaling
    exact = [t.double() for t in (x, weight)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for angles in ((None, None), (cosine, sine)):
            wide = [None if t is None else t.double()[:, None] for t in angles]

            def reference(x, weight=None, wide=wide):
                y = x if weight is None else nn_functional.rms_norm(x, x.shape[-1:], weight, EPS)
                return y if wide[0] is None else rotated(y, *wide)

            same(
                gradients(lambda x, w, a=angles: fused.Norm.apply(x, w, *a, EPS), x, weight),
                gradients(reference, *exact),
                rounding,
            )
            same(
                gradients(lambda x, a=angles: fused.Norm.apply(x, None, *a, 0.0), x),
                gradients(reference, exact[0]),
                rounding,
            )
        a, b = x * 20, other
        same(
            gradients(fused.Gate.apply, a, b),
            gradients(lambda a, b: nn_functional.silu(a) * b, a.double(), b.double()),
            rounding,
        )
    finally:
        torch.set_num_threads(before)


def test_sums_do_not_depend_on_threads():
    torch.manual_seed(0)
    x, weight, found = torch.randn(500, 2, 32), torch.rand(32), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(gradients(lambda x, w: fused.Norm.apply(x, w, None, None, EPS), x, weight))
    finally:
        torch.set_num_threads(before)
    assert all(
        torch.equal(one, other)
        for run in found[1:]
        for one, other in zip(run, found[0], strict=True)
    )


def model_of(family):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=50,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        sliding_window=None,
        initializer_range=0.2,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    allow_packing(model)
    return model


def trained(model, packed):
    model.zero_grad()
    loss = forward_logprobs(model, packed).logprobs.sum()
    loss.backward()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return float(loss.detach()), {name: p.grad.clone() for name, p in trained}


def packed_rows():
    ids = torch.randint(50, (6, 17))
    mask = torch.arange(17).expand(6, 17) > 4
    ids[:3, :6] = ids[0, :6]
    return pack(ids, mask)


def adapted(model):
    """With adapters that are not zero."""
    model = add_lora(model, LoRA(rank=3, targets=["q_proj", "v_proj", "gate_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.slow
@each(("family", "adapters"), [*((family, False) for family in PLAIN), ("qwen2", True)])
def test_a_pass_has_the_loss_and_the_gradients_of_hugging_face(family, adapters, monkeypatch):
    model = adapted(model_of(family)) if adapters else model_of(family)
    packed = packed_rows()
    loss, expected = trained(model, packed)
    fused.choose_kernel(model, "fused")
    with monkeypatch.context() as patch:
        patch.setattr(type(split_model(model)[0]), "forward", None)  # which is not called
        found, grads = trained(model, packed)
    assert found == pytest.approx(loss, rel=1e-6)
    for name, grad in expected.items():
        assert (grads[name] - grad).norm() <= 1e-5 * grad.norm() + 1e-6, name


@pytest.mark.slow
@each("family", ["llama", "qwen3"])
def test_a_pass_in_bfloat16_is_as_near_the_exact_numbers_as_hugging_faces(family):
    """The base in bfloat16 under adapters in float32. A tenth for chance."""
    model, packed = adapted(model_of(family)), packed_rows()
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    _, exact = trained(copy.deepcopy(model).double(), packed)
    _, theirs = trained(model, packed)
    fused.choose_kernel(model, "fused")
    _, ours = trained(model, packed)
    ours, theirs = (
        sum(float((grads[name] - exact[name]).norm() ** 2) for name in exact) ** 0.5
        for grads in (ours, theirs)
    )
    assert 0 < ours <= 1.1 * theirs


def test_what_it_does_not_know_is_left_to_torch():
    for change in (
        lambda m: m.double(),
        lambda m: m.gradient_checkpointing_enable(),
        lambda m: m.model.norm.register_forward_hook(lambda *_: None),
        lambda m: m.model.layers[1].self_attn.q_norm.register_forward_hook(lambda *_: None),
        lambda m: setattr(m.config, "hidden_act", "gelu"),
    ):
        model = model_of("qwen3")
        fused.choose_kernel(model, "auto")
        assert (
            fused.update_kernel(copy.deepcopy(model)) == "fused"
        )  # a reference computes as its policy
        change(model)
        assert not fused.serves(model.model)  # asked at every pass
        fused.choose_kernel(model, "auto")
        assert fused.update_kernel(model) == "eager"
        with pytest.raises(EngineError, match=r"model\.kernel=fused: it (is for|keeps)"):
            fused.choose_kernel(model, "fused")


def test_nothing_needs_a_compiler(monkeypatch, tmp_path):
    model = model_of("llama")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    fused.load_operations.cache_clear()
    try:
        fused.choose_kernel(model, "auto")
        assert fused.update_kernel(model) == "eager"
        with pytest.raises(EngineError, match=r"model\.kernel=fused: there is no C compiler"):
            fused.choose_kernel(model, "fused")
    finally:
        fused.load_operations.cache_clear()
    monkeypatch.undo()
    monkeypatch.setattr(machinery, "FLAGS", ("-O0", "-shared", "-fPIC"))
    assert fused.load_operations()


def test_a_continued_run_keeps_its_kernel_or_says_so():
    model = model_of("qwen2")
    fused.choose_kernel(model, "auto")
    assert (
        not fused.go_on_with(model, "fused")
        and not fused.go_on_with(model, "eager")
        and fused.update_kernel(model) == "eager"
    )
    fused.choose_kernel(model, "eager")
    assert "were fused and are eager" in fused.go_on_with(model, "fused")
    fused.choose_kernel(model, "fused")
    assert "were eager and are fused" in fused.go_on_with(model, "eager")
