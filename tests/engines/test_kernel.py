"""The compiled decoding step against calls of torch: the same tokens, whatever the model, the
slots, the seeds and the threads."""

from __future__ import annotations

import random
import re
import shutil
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from parametrise import each
from rlkit.engines import Cached
from rlkit.engines.cached import kernel
from rlkit.engines.cached.forward import make_forward
from rlkit.engines.cached.sampler import STATE
from rlkit.errors import EngineError
from rlkit.functional import mix
from rlkit.models import LoRA, add_lora, compiled
from rlkit.models.head import PLAIN, split_model
from rlkit.types import SamplingParams

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler"
)

WORDS = 101  # neither a multiple of a tile nor a square: the last block of the draw is short


def policy_of(tiny, family="qwen3", **changes):
    """Random weights, norms and biases too, three query heads for each key head."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=WORDS,
        hidden_size=96,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        sliding_window=None,
        initializer_range=0.1,
        **changes,
    )
    if family == "qwen2":
        config.num_attention_heads, config.num_key_value_heads = (
            3,
            1,
        )  # its head size is hidden size / heads
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return tiny._replace(model=model, eos_token_ids=(7, 9), pad_token_id=0, context_length=256)


def contexts(number: int, seed: int) -> list[tuple[int, ...]]:
    """Of 1 to 70 tokens; some are the same."""
    rng = random.Random(seed)
    found = [
        tuple(rng.randrange(WORDS) for _ in range(rng.randrange(1, 70))) for _ in range(number)
    ]
    return [found[i // 2] for i in range(number)]


def sampled(complete, policy, asked, prompts, **params):
    engine = Cached(kernel=asked, max_rows=15)
    found = complete(
        engine,
        policy,
        prompts,
        [mix(4, i) for i in range(len(prompts))],
        max_new_tokens=30,
        **params,
    )
    assert engine.decodes == asked
    return found


@pytest.mark.slow
@each(
    ("family", "temperature"),
    [*((family, 1.0) for family in PLAIN), ("llama", 0.0), ("qwen3", 0.6), ("qwen3", 1.7)],
)
def test_a_compiled_step_draws_what_calls_of_torch_draw(tiny, complete, family, temperature):
    """40 contexts in 15 slots, more than a block of rows, left and taken again at any time; replies
    end by token and by length."""
    policy = policy_of(tiny, family)
    fused, eager = (
        sampled(complete, policy, asked, contexts(40, 1), temperature=temperature)
        for asked in ("fused", "eager")
    )
    assert [(g.token_ids, g.finish_reason) for g in fused] == [
        (g.token_ids, g.finish_reason) for g in eager
    ]
    assert len({g.finish_reason for g in eager}) == 2 and len({g.token_ids for g in eager}) > 8
    for a, b in zip(fused, eager, strict=True):
        torch.testing.assert_close(
            torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=1e-5
        )


@pytest.mark.slow
@each("family", ["llama", "qwen2"])
def test_a_compiled_step_has_the_adapters_in_it(tiny, complete, family):
    """They change between two calls, as by an update."""
    policy = policy_of(tiny, family)
    without = sampled(complete, policy, "fused", contexts(8, 1))
    policy = policy._replace(model=add_lora(policy.model, LoRA(rank=4)))
    factors = [p for name, p in policy.model.named_parameters() if "lora_B" in name]
    engines = [Cached(kernel=asked) for asked in ("fused", "eager")]
    for by in (0.0, 0.1):
        for factor in factors:
            torch.nn.init.normal_(factor, std=by)
        fused, eager = (
            complete(
                engine, policy, contexts(8, 1), [mix(4, i) for i in range(8)], max_new_tokens=30
            )
            for engine in engines
        )
        assert [engine.decodes for engine in engines] == ["fused", "eager"]
        assert [g.token_ids for g in fused] == [g.token_ids for g in eager]
        for a, b in zip(fused, eager, strict=True):
            torch.testing.assert_close(
                torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=1e-5
            )
        same = [g.token_ids for g in fused] == [g.token_ids for g in without]
        assert same == (by == 0.0)


@pytest.mark.slow
@each(
    ("family", "targets"),
    [
        ("llama", ()),
        ("qwen2", LoRA().targets),
        ("qwen3", LoRA().targets),
        # adapters in some layers only
        ("qwen3", ("layers.0.self_attn.q_proj", "layers.1.mlp.down_proj")),
    ],
)
def test_a_compiled_step_in_bfloat16_is_as_near_the_exact_numbers(tiny, complete, family, targets):
    """As calls of torch are, a tenth for chance: of every log-prob that was drawn, by the same
    weights in float64."""
    policy = policy_of(tiny, family)
    if targets:
        policy = policy._replace(model=add_lora(policy.model, LoRA(rank=3, targets=targets)))
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    for name, parameter in policy.model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    exact = deepcopy(policy.model).double()
    gaps = []
    for asked in ("fused", "eager"):
        prompts = contexts(40, 1)
        gap = []
        for prompt, reply in zip(prompts, sampled(complete, policy, asked, prompts), strict=True):
            ids = torch.tensor([[*prompt, *reply.token_ids]])
            with torch.no_grad():
                logits = exact(ids).logits[0, len(prompt) - 1 : -1]
            own = logits.log_softmax(-1)[range(len(reply.token_ids)), list(reply.token_ids)]
            gap.append(own - torch.tensor(reply.logprobs))
        gaps.append(float(torch.cat(gap).square().mean()) ** 0.5)
    assert 0 < gaps[0] <= 1.1 * gaps[1]


@contextmanager
def decoder_in_the_middle(policy, asked):
    """Eleven slots after four steps: one draws nothing, and some have ended."""
    engine = Cached(kernel=asked)
    decoder = engine.decoder = engine.make_decoder(policy._replace(eos_token_ids=tuple(range(9))))
    with engine.serving(), torch.inference_mode():
        for i, prompt in enumerate(contexts(11, 2)):
            decoder.submit(i, prompt, mix(5, i), SamplingParams(max_new_tokens=20))
        for _ in range(4):
            decoder.advance()
        decoder.sampler.draws[3] = False
        decoder.draw()
        yield decoder


def state(decoder):
    """All of a step's state but what no one reads: the token of slots that do not draw, and what
    they write behind their completion."""
    sampler, pages = decoder.sampler, decoder.pages
    rows = [row.slot for row in decoder.slots.active if row.slot != 3]
    tensors = [
        getattr(sampler, name) for name in ("position", "count", "limit", "seed", "draws", "ended")
    ]
    tensors += [sampler.last[sampler.draws], sampler.tokens[rows, :-1], sampler.logprobs[rows, :-1]]
    return [
        tensor.clone()
        for tensor in (
            *tensors,
            *(kept[:, pages.table[rows]].flatten(2, 3) for kept in (*pages.keys, *pages.values)),
        )
    ]


def test_one_step_leaves_the_state_that_calls_of_torch_leave(tiny):
    found = []
    for asked in ("fused", "eager"):
        with decoder_in_the_middle(policy_of(tiny), asked) as decoder:
            found.append(state(decoder))
            # up to there every slot has written
            seen = int(decoder.sampler.position[: len(decoder.slots.rows)].min())
    assert seen > 3 and found[0][4].sum() < 9  # some draw no more
    for ours, theirs in zip(*found, strict=True):
        ours, theirs = (
            tensor[:, :, :seen] if tensor.dim() == 4 else tensor for tensor in (ours, theirs)
        )
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_threads_and_neighbours_change_no_bit(tiny):
    """A row's sums run in one order, whoever computes them: with 1, 2 and 5 threads, and with half
    of the rows beside it."""
    found = []
    with decoder_in_the_middle(policy_of(tiny), "fused") as decoder:
        sampler = decoder.sampler
        before = {name: getattr(sampler, name).clone() for name in STATE}
        for threads, silent in ((1, 11), (2, 11), (5, 11), (1, 5)):
            decoder.kernel.threads = threads
            for name, tensor in before.items():
                getattr(sampler, name).copy_(tensor)
            sampler.draws[silent:] = False
            decoder.decode(11, decoder.pages.columns)
            found.append(state(decoder))
        drew = sum(row.slot < 5 and row.slot != 3 for row in decoder.slots.active)
    assert int((found[0][0] - before["position"]).sum()) > 4
    for other in found[1:3]:
        assert all(map(torch.equal, found[0], other))
    assert drew > 1 and torch.equal(found[0][8][:drew], found[3][8][:drew])


def test_weights_that_change_in_place_are_packed_again(tiny, complete):
    policy = policy_of(tiny)
    policy = policy._replace(model=deepcopy(policy.model))
    engine, prompts, replies = Cached(kernel="fused"), contexts(6, 3), []
    for _ in range(2):
        replies.append(complete(engine, policy, prompts, range(6), max_new_tokens=12))
        assert [g.token_ids for g in replies[-1]] == [
            g.token_ids
            for g in complete(Cached(kernel="eager"), policy, prompts, range(6), max_new_tokens=12)
        ]
        for weight in policy.model.parameters():
            weight.data.mul_(0.9)
    assert replies[0] != replies[1]


def test_what_the_kernel_does_not_know_is_left_to_torch(tiny, complete):
    """`auto` decodes it by calls of torch; `fused` refuses and says why."""
    from peft import LoraConfig, get_peft_model

    double, hooked, wide, adapted = (policy_of(tiny).model for _ in range(4))
    double = double.double()
    hooked.model.layers[1].mlp.down_proj.register_forward_hook(lambda *_: None)
    wide.lm_head = torch.nn.Linear(96, WORDS, bias=True)
    adapted = get_peft_model(
        adapted,
        LoraConfig(r=2, target_modules=["down_proj"], task_type="CAUSAL_LM", use_dora=True),
    ).get_base_model()
    for model, words in (
        (double, "float32 or bfloat16"),
        (hooked, "hooks"),
        (wide, "bias"),
        (adapted, "adapter"),
    ):
        trunk, head = split_model(model)
        forward = make_forward(trunk)
        made, reason = kernel.choose_kernel("auto", forward, head)
        assert made is None and re.search(words, reason)
        with pytest.raises(EngineError, match=f"generation.kernel=fused: .*{words}"):
            kernel.choose_kernel("fused", forward, head)


@pytest.mark.slow
def test_a_cut_distribution_and_a_thinking_budget_are_drawn_by_torch(tiny, complete):
    """Between steps of one engine that are compiled."""
    prompts, engines = contexts(5, 6), [Cached(kernel=asked) for asked in ("fused", "eager")]
    for params in ({}, {"top_k": 5}, {"max_thinking_tokens": 2}, {}):
        fused, eager = (
            complete(engine, tiny, prompts, range(5), max_new_tokens=10, **params)
            for engine in engines
        )
        assert [g.token_ids for g in fused] == [g.token_ids for g in eager]


@pytest.mark.slow
def test_nothing_needs_a_compiler(tiny, monkeypatch, tmp_path):
    """Without one `auto` decodes by calls of torch, and says why."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "FLAGS", ("-O0", "-march=native", "-shared", "-fPIC"))
    kernel.compile_kernel.cache_clear()
    try:
        assert kernel.compile_kernel() and list((tmp_path / "rlkit" / "kernels").iterdir())
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CC", raising=False)
        kernel.compile_kernel.cache_clear()
        trunk, head = split_model(tiny.model)
        made, reason = kernel.choose_kernel("auto", make_forward(trunk), head)
        assert made is None and "no C compiler" in reason
        with pytest.raises(EngineError, match="no C compiler"):
            kernel.choose_kernel("fused", make_forward(trunk), head)
        assert "were fused and are eager" in Cached().go_on_with(
            "fused"
        ) and not Cached().go_on_with("eager")
    finally:
        kernel.compile_kernel.cache_clear()


def test_a_continued_run_keeps_its_kernel_or_says_so():
    engine = Cached()
    assert not engine.go_on_with("eager") and engine.kernel == "eager"
    assert not Cached().go_on_with("fused")
    assert "were fused and are eager" in Cached(kernel="eager").go_on_with("fused")
    assert "were eager and are fused" in Cached(kernel="fused").go_on_with("eager")
