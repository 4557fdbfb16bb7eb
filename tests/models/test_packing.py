"""Packed rows: every distinct prefix once, and no log-prob, value or gradient differs from that of
whole padded rows."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen3Config
from transformers.utils import logging

from parametrise import cases, combinations
from pretend_gpu import PretendGPU, segments_by_rows
from rlkit.models import forward_logprobs, make_critic, pack, packing
from rlkit.models.packing import ATTENTION, KERNELS, Kernels, allow_packing, attend_packed


def make_rows(seed: int, *, vocabulary: int = 50):
    """Groups of one prompt; equal replies, replies that begin alike, a row without a sampled token,
    gaps between sampled tokens."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (12, 20), generator=g)
    mask = torch.zeros(12, 20, dtype=torch.bool)
    for row in range(12):
        first = 6 + row // 4
        ids[row, :first] = ids[row // 4 * 4, :first]
        mask[row, first : first + int(torch.randint(1, 20 - first, (1,), generator=g))] = True
    ids[1], mask[1] = ids[0], mask[0]
    ids[3, :14] = ids[2, :14]
    mask[5] = False
    mask[6, 10:12] = False
    return ids, mask


def needed(mask):
    return [int(row.nonzero().max()) if row.any() else 0 for row in mask]


@pytest.mark.parametrize("seed", range(5))
def test_every_distinct_prefix_is_one_token_and_every_row_a_path(seed):
    ids, mask = make_rows(seed)
    packed = pack(ids, mask)
    rows = [row[:length].tolist() for row, length in zip(ids, needed(mask), strict=True)]
    prefixes = {tuple(row[: i + 1]) for row in rows for i in range(len(row))}
    assert len(packed.ids) == len(prefixes) and packed.tokens == sum(map(len, rows)) > len(prefixes)
    found = set()
    for queries, keys, starts in packed.paths:
        for i, (own, path) in enumerate(zip(queries, keys, strict=True)):
            start = 0 if starts is None else int(starts[i])
            for j, token in enumerate(own):
                if (
                    packed.home[token]
                    == sum(q.numel() for q, *_ in packed.paths[: index_of(packed.paths, queries)])
                    + i * len(own)
                    + j
                ):
                    assert path[start + j] == token and packed.positions[token] == start + j
                    found.add(tuple(packed.ids[path[: start + j + 1]].tolist()))
    assert found == prefixes
    sampled = [tuple(ids[row, : at + 1].tolist()) for row, at in mask.nonzero().tolist()]
    assert len(packed.targets) == len(set(sampled)) and len(packed.inverse) == len(sampled)
    assert torch.equal(packed.targets[packed.inverse], ids[mask])


def index_of(paths, queries):
    return next(i for i, part in enumerate(paths) if part.queries is queries)


def naive(model, ids, mask):
    logprobs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    taken = torch.nn.functional.pad(logprobs.gather(2, ids[:, 1:, None])[..., 0], (1, 0))
    return taken.masked_fill(~mask, 0.0)


def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


SIZE = {
    "vocab_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
WIDE = SIZE | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
CONFIGS = {
    "qwen3": Qwen3Config(**WIDE, head_dim=8),
    "llama": LlamaConfig(**WIDE),
    "gpt2": GPT2Config(**SIZE, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "mistral, sliding window": MistralConfig(**WIDE, sliding_window=4),
    "qwen3, sliding window": Qwen3Config(
        **WIDE, head_dim=8, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
}


@pytest.fixture(params=CONFIGS)
def model(request):
    logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return (
            AutoModelForCausalLM.from_config(CONFIGS[request.param], attn_implementation="sdpa")
            .double()
            .train()
        )


CUDA = packing.Kernels(varlen=False, steps=True)


READ = [
    (masked, kernels, recompute)
    for masked, kernels in ((512, None), (2, None), (512, CUDA))
    for recompute in (False, True)
]


@pytest.mark.slow
@pytest.mark.parametrize(("masked", "kernels", "recompute"), cases(READ, READ[1:4:2], unpack=True))
def test_scores_and_gradients_are_those_of_padded_rows(
    model, masked, kernels, recompute, monkeypatch
):
    """For models that read packed rows and those that cannot, also where backward attends again."""
    monkeypatch.setattr(packing, "MASKED", masked)
    ids, mask = make_rows(0)
    weights = torch.randn(
        ids.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    expected = naive(model, ids, mask)
    wanted = gradient(model, (weights * expected).sum())
    allow_packing(model)
    assert model.config._attn_implementation == ATTENTION
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    got = forward_logprobs(model, pack(ids, mask, kernels=kernels)).logprobs
    # float64 rounding over a few thousand operations
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    tolerance = (
        1e-10 if model.config.model_type == "gpt2" else 1e-6
    )  # the others' norms are computed in float32
    assert (gradient(model, (weights * got).sum()) - wanted).norm() < tolerance * wanted.norm()
    torch.testing.assert_close(
        naive(model, ids, mask), expected, rtol=0, atol=1e-12
    )  # nothing changes for any other call


@pytest.mark.parametrize("name", [name for name in CONFIGS if "window" in name])
def test_rows_up_to_a_window_are_packed_and_longer_ones_are_not(name):
    """A sliding layer computes what a full one does up to there: of a longer row the packed one
    would give other scores."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="sdpa").double()
    calls = []
    model.base_model.register_forward_pre_hook(
        lambda _, inputs, settings: calls.append(settings["input_ids"].shape), with_kwargs=True
    )
    allow_packing(model)
    ids = torch.arange(12).view(2, 6) + 3
    ids[1, :2] = ids[0, :2]
    for width, read in ((5, [(1, 6)]), (6, [(1, 5)] * 2)):  # the last token is not read
        rows = ids[:, :width]
        mask = torch.zeros_like(rows, dtype=torch.bool)
        mask[:, 2:] = True
        expected = naive(model, rows, mask)
        calls.clear()
        got = forward_logprobs(model, pack(rows, mask)).logprobs
        assert calls == read
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)  # as above


@pytest.mark.parametrize("kind", ["head", "separate"])
def test_values_are_those_of_the_states_before_the_tokens(tiny, kind):
    model = copy.deepcopy(tiny.model).double()
    critic = make_critic(model, model=kind, trunk_gradient=True).double()
    torch.nn.init.normal_(critic.head.value.weight, generator=torch.Generator().manual_seed(0))
    ids, mask = make_rows(0)
    states = model.base_model(input_ids=ids).last_hidden_state
    expected = torch.nn.functional.pad(critic.head(states)[:, :-1], (1, 0)).masked_fill(~mask, 0.0)
    torch.testing.assert_close(
        forward_logprobs(model, pack(ids, mask), critic=critic).values, expected, rtol=0, atol=1e-10
    )


def test_a_row_that_begins_with_a_sampled_token_is_refused():
    ids, mask = make_rows(0)
    mask[7, 0] = True
    with pytest.raises(ValueError, match="row 7 begins with a sampled token"):
        pack(ids, mask)


def test_nothing_sampled_is_nothing_packed(tiny):
    ids, mask = make_rows(0)
    scores = forward_logprobs(tiny.model, pack(ids, torch.zeros_like(mask)))
    assert scores.logprobs.shape == ids.shape and not scores.logprobs.any()


# -------------------------------------------------------------- which kernels attend, and with what


def make_groups(prompts: int, samples: int, *, prompt=(60, 250), replies=(5.5, 0.6), seed: int = 0):
    """Groups of one prompt, with replies as long as those to GSM8K: log-normal, 300 tokens on
    average."""
    g = np.random.default_rng(seed)
    heads = g.integers(*prompt, prompts).repeat(samples)
    lengths = (
        heads + np.minimum(g.lognormal(*replies, prompts * samples), 16 * 1024).astype(int) + 2
    )
    ids = torch.from_numpy(g.integers(0, 200, (len(heads), lengths.max())))
    at = torch.arange(ids.shape[1])
    heads, lengths = torch.from_numpy(heads)[:, None], torch.from_numpy(lengths)[:, None]
    ids = torch.where(at < heads, ids[torch.arange(len(ids)) // samples * samples], ids)
    return ids, (at >= heads) & (at < lengths)


def attend(packed, *, dtype=torch.float32, grad=False):
    """One layer's attention of packed rows, four heads on two: its inputs and its result."""
    g = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, heads, len(packed.ids), 8, generator=g).to(dtype).requires_grad_(grad)
        for heads in (4, 2, 2)
    ]
    return inputs, attend_packed(None, *inputs, None, packed=packed)[0]


@pytest.fixture
def shapes(monkeypatch):
    """Shapes that attention is called with, as kernels see them."""
    seen, sdpa = set(), torch.nn.functional.scaled_dot_product_attention

    def counted(q, k, v, **settings):
        assert k.shape[1] == q.shape[1] or settings.get("enable_gqa")
        seen.add((q.shape, k.shape, settings.get("attn_mask") is None))
        return sdpa(q, k, v, **settings)

    def segments(q, k, v, ends_q, ends_k, *longest, **settings):
        assert ends_q.is_contiguous() and ends_k.is_contiguous()  # as the kernel demands
        seen.add((q.shape, k.shape, longest))
        return segments_by_rows(sdpa, q, k, v, ends_q.tolist(), ends_k.tolist(), **settings)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", segments)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    combinations(
        sorted({kernels for device, kernels in KERNELS.items() if device > (0, 0)}),
        [torch.float32, torch.bfloat16],
    ),
)
def test_a_step_on_a_gpu_has_at_most_eight_shapes_of_attention(case, shapes):
    """16 × 8 replies in micro-batches of 16,384 tokens had about 50, and each costs cuDNN a second
    of planning."""
    kernels, dtype = case
    ids, mask = make_groups(16, 8)
    for rows in torch.arange(len(ids)).split(40):
        attend(pack(ids[rows], mask[rows], kernels=kernels), dtype=dtype)
    assert 0 < len(shapes) <= 8 and all(without_mask for *_, without_mask in shapes)


def test_segments_are_the_rows(shapes):
    """What variable-length attention computes, and its gradients, are those of the padded rows."""
    ids, mask = make_rows(0)
    results = []
    for kernels in (Kernels(varlen=True, steps=True), Kernels(varlen=False, steps=False)):
        inputs, out = attend(pack(ids, mask, kernels=kernels), dtype=torch.bfloat16, grad=True)
        out.float().square().sum().backward()
        results.append((out.float(), *(x.grad.float() for x in inputs)))
    for segments, padded in zip(*results, strict=True):
        torch.testing.assert_close(segments, padded, rtol=0.02, atol=0.02)  # bfloat16


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is made inside."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.numel() * x.itemsize)
        return out


@pytest.mark.parametrize("kernels", [KERNELS[0, 0], CUDA], ids=["cpu", "steps"])
def test_memory_of_attention_grows_with_the_tokens(kernels):
    """Two long replies to one prompt: a mask would be four times as large for twice the tokens."""
    found = []
    for length in (1000, 4000):
        ids = torch.arange(2 * length).view(2, -1) % 1000
        ids[1, :200] = ids[0, :200]
        with Largest() as largest:
            attend(pack(ids, torch.arange(length).expand(2, -1) >= 200, kernels=kernels))
        found.append(largest.bytes / length)
    assert found[1] < 1.5 * found[0], found


@pytest.mark.slow
@pytest.mark.parametrize("case", combinations([(8, 9), (9, 0)], [False, True]))
def test_no_gpu_plans_a_shape_or_writes_out_the_scores(tiny, case):
    """A mask that meets grouped heads ended in the materialising kernel on Ada and Ampere, and in
    cuDNN's plans on Hopper."""
    capability, half = case
    ids, mask = (x[:6, :80] for x in make_groups(2, 3, prompt=(20, 40), replies=(4, 0.1)))
    model = copy.deepcopy(tiny.model)
    with torch.no_grad():
        expected = forward_logprobs(model, pack(ids, mask)).logprobs
    with (
        PretendGPU(capability=capability) as gpu,
        torch.autocast("cuda", torch.bfloat16, enabled=half),
    ):
        found = forward_logprobs(model.to("cuda"), pack(ids.to("cuda"), mask.to("cuda"))).logprobs
        found.sum().backward()
        kernels = {kernel for kernel, *_ in gpu.attention}
        torch.testing.assert_close(
            found.detach().cpu(), expected, rtol=0, atol=0.3 if half else 1e-4
        )
    assert kernels == {"varlen" if half else "efficient"} and not gpu.plans
