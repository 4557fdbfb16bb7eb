"""Models that scale or cap their logits behind the head: trainer, engines and the exact KL use what
the model's own forward gives."""

from __future__ import annotations

import copy
import sys
from typing import NamedTuple

import pytest
import torch

from rlkit.engines import Cached, Transformers
from rlkit.functional import mix
from rlkit.models import LoRA, add_lora, forward_logprobs, make_policy, pack
from rlkit.models.head import PLAIN, Head, split_model
from rlkit.models.log_probs import compute_states
from rlkit.tasks import arithmetic
from rlkit.training import references as reference
from rlkit.training.selfcheck import check_policy

MAMBA = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
# What each does behind the head is far from nothing, so that leaving it out shows.
FAMILIES = {
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "gemma2": {
        "final_logit_softcapping": 1.0,
        "attn_logit_softcapping": None,
        "sliding_window": 64,
    },
    "falcon_h1": {"lm_head_multiplier": 0.25, **MAMBA},
    "cohere2": {"logit_scale": 0.25, "layer_types": ["full_attention"] * 2},
    "gemma3_text": {"final_logit_softcapping": 1.0, "sliding_window": 64},
}
# weights in float64, but norms, rotations and Mamba's states in float32, as their models have them
CLOSE = {
    "rtol": 0,
    "atol": 1e-6,
}
SEEDS = [mix(5, i) for i in range(3)]

every = pytest.mark.parametrize("family", FAMILIES, indirect=True)


def made(family: str, tokenizer, **more):
    """A random model of about 30,000 parameters whose logits are spread out."""
    import transformers

    numbers = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = transformers.AutoConfig.for_model(
        family, **(numbers | FAMILIES.get(family, {}) | more)
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3, generator=generator)
    return model.eval()


class Case(NamedTuple):
    policy: object  # a Policy in float32
    double: object  # its model in float64
    ids: torch.Tensor
    mask: torch.Tensor


@pytest.fixture(scope="module")
def family(request, tiny) -> Case:
    tokenizer = tiny.renderer.tokenizer
    policy = make_policy(made(request.param, tokenizer), tokenizer)
    ids = torch.randint(len(tokenizer), (3, 12), generator=torch.Generator().manual_seed(1))
    ids[1, :4] = ids[0, :4]  # a shared beginning, which packing reads once
    mask = torch.zeros(3, 12, dtype=torch.bool)
    mask[0, 4:9], mask[1, 5:], mask[2, 7:8] = True, True, True
    return Case(policy, copy.deepcopy(policy.model).double(), ids, mask)


def naive(model, ids, temperature=1.0):
    """log softmax of the model's own forward, [B, T-1, V]."""
    return (model(ids).logits[:, :-1].double() / temperature).log_softmax(-1)


def chosen(logp, ids, mask):
    return (logp.gather(2, ids[:, 1:, None])[..., 0] * mask[:, 1:])[mask[:, 1:]]


@pytest.mark.slow
@every
def test_log_probs_and_their_gradient_are_those_of_the_models_own_forward(family):
    """Also in chunks, each of which is run again in the backward pass."""
    model, ids, mask = family.double, family.ids, family.mask
    weights = torch.randn(
        mask.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = chosen(naive(model, ids, 0.7), ids, mask)
    wanted = torch.autograd.grad((weights[mask] * expected).sum(), trained, allow_unused=True)
    for chunk in (1 << 25, 2 * len(model.get_output_embeddings().weight)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules["rlkit.models.log_probs"], "CHUNK_LOGITS_ON_CPU", chunk)
            got = forward_logprobs(model, pack(ids, mask), temperature=0.7).logprobs[mask]
            found = torch.autograd.grad((weights[mask] * got).sum(), trained, allow_unused=True)
        torch.testing.assert_close(got, expected, **CLOSE)
        for a, b in zip(found, wanted, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert float((a - b).norm()) <= 1e-6 * float(b.norm())  # as CLOSE


@every
def test_the_exact_divergence_and_the_entropy_are_those_of_the_models_own_forward(family, tiny):
    """Also where the reference is of another family, with another rule behind its head."""
    model, ids, mask = family.double, family.ids, family.mask
    other = made(
        "granite" if model.config.model_type != "granite" else "cohere", tiny.renderer.tokenizer
    ).double()
    packed = pack(ids, mask)
    with torch.no_grad():
        p, ref = naive(model, ids), naive(other, ids)
        got = forward_logprobs(
            model, packed, reference=(compute_states(other, packed), split_model(other)[1])
        )
    torch.testing.assert_close(
        got.full_kl[mask], (p.exp() * (p - ref)).sum(-1)[mask[:, 1:]], **CLOSE
    )
    torch.testing.assert_close(got.entropy[mask], -(p.exp() * p).sum(-1)[mask[:, 1:]], **CLOSE)


@pytest.mark.slow
@every
def test_every_engine_gives_the_log_probs_that_the_trainer_gives(family, complete):
    """And both engines the same tokens; a model with a state of its own is left to the reference
    engine."""
    policy = family.policy
    contexts = [row[:length].tolist() for row, length in zip(family.ids, (5, 9, 12), strict=True)]
    ours, theirs = (
        complete(engine(), policy, contexts, SEEDS[: len(contexts)], max_new_tokens=8)
        for engine in (Cached, Transformers)
    )
    assert [g.token_ids for g in ours] == [g.token_ids for g in theirs]
    for replies in (ours, theirs):
        for context, reply in zip(contexts, replies, strict=True):
            ids = torch.tensor([[*context, *reply.token_ids]])
            mask = torch.arange(ids.shape[1])[None] >= len(context)
            with torch.no_grad():
                mine = forward_logprobs(policy.model, pack(ids, mask)).logprobs[mask]
            torch.testing.assert_close(
                mine, torch.tensor(reply.logprobs), rtol=0, atol=1e-4
            )  # float32, other orders of summation


@pytest.mark.slow
@every
def test_under_adapters_policy_and_reference_keep_what_is_behind_the_head(family):
    """The adapted policy, the start with the adapter off, and a second adapter."""
    model = add_lora(copy.deepcopy(family.double), LoRA(rank=2))
    ids, mask = family.ids, family.mask
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(3))
        torch.testing.assert_close(
            forward_logprobs(model, pack(ids, mask)).logprobs[mask],
            chosen(naive(model, ids), ids, mask),
            rtol=0,
            atol=1e-5,
        )
        start = chosen(naive(family.double, ids), ids, mask)
    for kept in (reference.frozen(), reference.periodic(every=1)):
        state = kept.init(model)
        with kept.model(state, model) as scored:
            got = forward_logprobs(scored, pack(ids, mask)).logprobs[mask]
        wanted = start if kept.name == "frozen" else chosen(naive(model, ids), ids, mask).detach()
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)  # adapters are float32


@every
def test_such_a_model_passes_the_check_before_the_first_step(family, experiment):
    short = experiment._replace(generation=experiment.generation._replace(max_new_tokens=4))
    checked = check_policy(family.policy, arithmetic(max_samples=2), short)
    assert checked.warnings == [] and checked.exact


@pytest.mark.parametrize("name", PLAIN)
def test_where_the_head_is_all_there_is_it_is_used_alone(name, tiny):
    """Bit for bit what the model's own forward gives; a subclass or an instance with a forward of
    its own is not taken for it."""
    model = made(name, tiny.renderer.tokenizer)
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(4))
    plain = Head(model)
    assert plain.logits is model.get_output_embeddings()
    assert torch.equal(plain(hidden), plain._forward(hidden))
    own = type("Capped", (type(model),), {"forward": lambda self, **inputs: None})
    model.__class__ = own
    assert Head(model).logits != model.get_output_embeddings()


def test_the_model_is_not_touched(tiny):
    """A trunk that was put in its place and not taken away would answer with old states ever
    after."""
    model = made("granite", tiny.renderer.tokenizer)
    parts, attributes = dict(model._modules), dict(vars(model))
    Head(model)(torch.zeros(2, 16))
    assert model._modules == parts and vars(model) == attributes
