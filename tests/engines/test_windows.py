"""Models of which some layers see a window: contexts up to its length from the cache, longer ones
by the reference engine, with the same replies."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlkit.engines import Cached
from rlkit.engines.cached.attention import find_longest_context
from rlkit.engines.cached.windows import Windowed
from rlkit.functional import mix
from rlkit.models.shape import find_whole_context, read_model_shape

WINDOW = 24
FAMILIES = {  # of some layers, or of all
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
}


def random_model(family, **more):
    """Random weights under which far tokens matter."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=50,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
        max_position_embeddings=64,
        **more,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def model_of(family, window=WINDOW):
    """A model of which some layers, or all, see a window."""
    sizes = {"num_key_value_heads": 1, "head_dim": 32, "sliding_window": window}
    return random_model(family, **sizes, **FAMILIES[family])


@pytest.fixture(params=FAMILIES)
def policy(request, tiny):
    model = model_of(request.param)
    return tiny._replace(model=model, eos_token_ids=(49,), pad_token_id=0, context_length=64)


def prompts(*lengths):
    return [tuple(mix(3, n, i) % 48 + 1 for i in range(n)) for n in lengths]


@contextmanager
def counting(monkeypatch):
    """The lengths of the prompts that are left to the reference engine."""
    longer, submit = [], Windowed.submit

    def noted(self, key, prompt_ids, seed, params):
        submit(self, key, prompt_ids, seed, params)
        longer.extend(len(prompt_ids) for k in self.longer.waiting if k == key)

    with monkeypatch.context() as patched:
        patched.setattr(Windowed, "submit", noted)
        yield longer


def assert_same(ours, theirs):
    assert [(g.token_ids, g.finish_reason) for g in ours] == [
        (g.token_ids, g.finish_reason) for g in theirs
    ]
    for a, b in zip(ours, theirs, strict=True):  # float32, sums in another order
        torch.testing.assert_close(
            torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=1e-4
        )


def test_a_window_changes_what_is_drawn_behind_it(policy):
    """Or nothing below would notice it. Up to its length it changes nothing."""
    whole = model_of(policy.model.config.model_type, 64)
    ids = torch.tensor(prompts(40))
    with torch.no_grad():
        gap = (policy.model(ids).logits - whole(ids).logits).abs().amax(-1)[0]
    assert gap[:WINDOW].max() < 1e-5 < 1e-4 < gap[WINDOW:].min()


def test_contexts_within_the_window_are_decoded_from_the_cache(
    policy, complete, reference, monkeypatch
):
    """Up to its last token, turn by turn; of a conversation only what is new is read."""
    contexts = prompts(4, 9, 12, 16)
    follow_up = {}

    def follow(index, reply):
        if index or index in follow_up:
            return None
        follow_up[index] = (*contexts[0], *reply.token_ids, 7, 8)[:16]
        return follow_up[index], 5

    seeds = [mix(1, i) for i in range(4)]
    engine = Cached()
    with counting(monkeypatch) as longer:
        found = complete(engine, policy, contexts, seeds, follow, max_new_tokens=8)
    assert longer == [] and isinstance(engine.decoder, Windowed)
    assert_same(found[1:], reference(policy, contexts[1:], seeds[1:], max_new_tokens=8))
    assert_same(found[:1], reference(policy, [follow_up[0]], [5], max_new_tokens=8))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["eager", "auto"])
def test_contexts_that_grow_beyond_the_window_are_right(
    policy, complete, reference, monkeypatch, kernel
):
    """An episode leaves the cache for good beside others that stay; slots for two."""
    contexts = prompts(5, 17, 30, 8)
    held = dict(enumerate(contexts))
    turns, replies = dict.fromkeys(range(4), 0), []

    def follow(index, reply):
        replies.append((held[index], mix(index, turns[index]), reply._replace(versions=())))
        turns[index] += 1
        held[index] += (*reply.token_ids, 7, 8)
        return (held[index], mix(index, turns[index])) if turns[index] < 4 else None

    seeds = [mix(i, 0) for i in range(4)]
    with counting(monkeypatch) as longer:
        engine = Cached(max_rows=2, kernel=kernel)
        complete(engine, policy, contexts, seeds, follow, max_new_tokens=7)
    assert len(replies) == 16 and 0 < len(longer) < 16 and min(longer) > 17
    expected = reference(
        policy, [p for p, *_ in replies], [s for _, s, _ in replies], max_new_tokens=7
    )
    assert_same([reply for *_, reply in replies], expected)
    if kernel == "auto" and policy.model.config.model_type != "gemma3_text" and engine.why_eager:
        assert "compiler" in engine.why_eager


def test_the_decoder_stays_while_the_weights_and_the_context_do(policy, complete):
    engine = Cached()
    complete(engine, policy, prompts(5), [1], max_new_tokens=3)
    first = engine.decoder
    complete(engine, policy, prompts(5), [1], max_new_tokens=3)
    assert engine.decoder is first
    for context, kind in ((40, True), (WINDOW, False), (64, True)):
        shorter = policy._replace(context_length=context)
        complete(engine, shorter, prompts(5), [1], max_new_tokens=3)
        assert engine.decoder is not first and isinstance(engine.decoder, Windowed) == kind
        first = engine.decoder
    (cut,) = complete(engine, policy, prompts(60), [1], max_new_tokens=9)
    assert len(cut.token_ids) <= 4  # the whole context, not the window, is the limit


def test_families_that_are_left_to_the_reference_engine_whatever_the_length():
    """The cache's attention knows no sinks, and its pages no layers that share keys."""
    sinks = AutoConfig.for_model("gpt_oss", attn_implementation="eager")
    assert find_whole_context(sinks) == 128 and find_longest_context(sinks) == 0
    for family in ("gemma3n_text", "llama4_text", "qwen3_next", "recurrent_gemma", "doge"):
        assert find_whole_context(AutoConfig.for_model(family)) == 0


def test_the_shape_of_a_model_with_vision_is_that_of_its_text():
    """The fields stand in the config of the text. Without them no layer seemed to have a window."""
    kinds = ["sliding_attention", "full_attention"]
    text = {"max_position_embeddings": 64, "sliding_window": 8, "num_hidden_layers": 2}
    config = AutoConfig.for_model("gemma3", text_config=text | {"layer_types": kinds})
    assert read_model_shape(config).context == 64 and find_whole_context(config) == 8


LATENT = {  # DeepSeek's attention: values are narrower than keys
    "first_k_dense_replace": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}


@pytest.mark.parametrize(("family", "more"), [("falcon", {}), ("deepseek_v3", LATENT)])
def test_other_kinds_of_attention_are_served_or_left_to_the_simple_engine(
    family, more, tiny, complete, reference
):
    """Falcon computes attention by itself and does not read the cache's masks: it saw all
    positions."""
    model = random_model(family, **more)
    policy = tiny._replace(model=model, eos_token_ids=(49,), pad_token_id=0, context_length=64)
    contexts = [tuple(range(1, 12)), (5, 6, 7)]
    given = complete(Cached(), policy, contexts, [1, 2], max_new_tokens=8)
    wanted = reference(policy, contexts, [1, 2], max_new_tokens=8)
    assert [own.token_ids for own in given] == [own.token_ids for own in wanted]
    for own, other in zip(given, wanted, strict=True):
        assert own.logprobs == pytest.approx(other.logprobs, abs=1e-4)
