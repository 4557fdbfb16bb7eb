"""The reference engine: what it samples belongs to the rollout alone, and its log-probs are those of the trainer."""

from __future__ import annotations

import pytest
import torch

from rlkit.environments import calculator, tool_schema
from rlkit.functional import cut_distribution, mix
from rlkit.generation import generate
from rlkit.models import encode_prompt, score

NEVER = (1,)  # the id of a byte that the model does not write: replies end by length alone
TOOLS = [tool_schema(calculator)]
QUESTIONS = (
    "Ann has 3 pens. Ann buys 4 more. How many pens does Ann have now?",
    "Ben has 5 hats.",
    "How many?",
    "Ida has 20 boxes of 9 figs.",
)


@pytest.fixture(scope="module")
def contexts(tiny):
    return [encode_prompt(tiny.codec, [{"role": "user", "content": q}], TOOLS) for q in QUESTIONS]


def seeds(n):
    return [mix(1, i) for i in range(n)]


def tokens(generations):
    return [g.token_ids for g in generations]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neither_batch_nor_row_changes_a_reply(tiny, contexts, temperature):
    """Randomness is per rollout: alone, together, reversed or two at a time, each context gets the same tokens."""
    settings = {"max_new_tokens": 24, "temperature": temperature}
    together = tokens(generate(tiny, contexts, seeds(4), **settings))
    alone = [tokens(generate(tiny, [c], [s], **settings))[0] for c, s in zip(contexts, seeds(4), strict=True)]
    backwards = tokens(generate(tiny, contexts[::-1], seeds(4)[::-1], **settings))[::-1]
    in_twos = tokens(generate(tiny, contexts, seeds(4), max_rows=2, **settings))
    assert together == alone == backwards == in_twos


def test_another_seed_gives_another_reply(tiny, contexts):
    a, b = (generate(tiny, contexts, [s] * 4, max_new_tokens=24) for s in (1, 2))
    assert tokens(a) != tokens(b)


def test_greedy_equals_a_loop_over_full_forwards(tiny, contexts):
    """No cache, no padding, argmax: the plainest decoder there is."""
    for context, reply in zip(contexts, generate(tiny, contexts, seeds(4), max_new_tokens=12, temperature=0.0), strict=True):
        ids = list(context)
        with torch.no_grad():
            for token in reply.token_ids:
                assert int(tiny.model(torch.tensor([ids])).logits[0, -1].argmax()) == token
                ids.append(token)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_log_probs_equal_the_trainer_at_the_same_temperature(tiny, contexts, temperature):
    for context, reply in zip(contexts, generate(tiny, contexts, seeds(4), max_new_tokens=24, temperature=temperature), strict=True):
        ids = torch.tensor([[*context, *reply.token_ids]])
        mask = (torch.arange(ids.shape[1]) >= len(context))[None]
        with torch.no_grad():
            logprobs = score(tiny.model, ids, mask, temperature=temperature)[0][mask]
        # cached decoding with left padding against one full forward, both float32: rounding alone
        torch.testing.assert_close(logprobs, torch.tensor(reply.logprobs), rtol=0, atol=1e-4)


def test_a_cut_distribution_is_the_one_that_is_sampled_and_scored(tiny, contexts):
    """Top-k 1 is greedy and certain; under top-p every log-prob is that of the cut distribution, here by full forwards."""
    surest = generate(tiny, contexts, seeds(4), max_new_tokens=8, temperature=2.0, top_k=1)
    assert tokens(surest) == tokens(generate(tiny, contexts, seeds(4), max_new_tokens=8, temperature=0.0))
    assert all(logprob == 0 for g in surest for logprob in g.logprobs)
    settings = {"max_new_tokens": 8, "temperature": 6.0, "top_p": 0.6, "top_k": 50}
    replies = generate(tiny, contexts, seeds(4), **settings)
    assert tokens(replies) == tokens(generate(tiny, contexts, seeds(4), use_cache=False, **settings))
    for context, reply in zip(contexts, replies, strict=True):
        ids = torch.tensor([[*context, *reply.token_ids]])
        with torch.no_grad():
            logits = tiny.model(ids).logits[0, len(context) - 1 : -1]
        cut = cut_distribution((logits / 6.0).log_softmax(-1), top_p=0.6, top_k=50)
        expected = cut.gather(1, ids[0, len(context) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(reply.logprobs), expected, rtol=0, atol=1e-3)  # at temperature 6, of one nat or more


def test_first_tokens_follow_the_distribution(tiny, contexts):
    """Chi-square of 4,000 seeds against the model's own probabilities, in 16 classes of token ids (15 degrees of freedom)."""
    n, context = 4000, contexts[2][:8]  # inside the question, where the model is unsure
    replies = generate(tiny, [context] * n, [mix(7, i) for i in range(n)], max_new_tokens=1, temperature=6.0, max_rows=n)
    with torch.no_grad():
        probabilities = (tiny.model(torch.tensor([context])).logits[0, -1] / 6.0).softmax(-1)
    classes = torch.arange(len(probabilities)) % 16
    expected = torch.zeros(16).index_add_(0, classes, probabilities) * n
    observed = torch.bincount(torch.tensor([g.token_ids[0] % 16 for g in replies]), minlength=16).float()
    assert expected.min() > 10 and expected.max() < 0.5 * n  # else the statistic means nothing
    assert float(((observed - expected) ** 2 / expected).sum()) < 37.7  # the 99.9 % quantile at 15 degrees of freedom


@pytest.mark.parametrize("which", [0, 1])
def test_every_end_token_stops(tiny, contexts, which):
    """With any token declared an end, the reply ends there and keeps it."""
    free = generate(tiny, contexts[:1], [5], max_new_tokens=24)[0]
    ends = (free.token_ids[3 + which], tiny.eos_token_ids[0])
    stopped = generate(tiny._replace(eos_token_ids=ends), contexts[:1], [5], max_new_tokens=24)[0]
    first = next(i for i, t in enumerate(free.token_ids) if t in ends)
    assert stopped.token_ids == free.token_ids[: first + 1] and stopped.finish_reason == "stop"
    assert len(stopped.logprobs) == len(stopped.token_ids)


def test_length_limits(tiny, contexts):
    cut = generate(tiny._replace(eos_token_ids=NEVER), contexts, seeds(4), max_new_tokens=3)
    assert [len(g.token_ids) for g in cut] == [3] * 4 and {g.finish_reason for g in cut} == {"length"}


def test_the_context_limit_of_the_model_cuts_each_row_by_its_own_length(tiny, contexts):
    """A long neighbour must not shorten a short row's reply."""
    longest = max(map(len, contexts))
    narrow = tiny._replace(context_length=longest + 2, eos_token_ids=NEVER)
    replies = generate(narrow, contexts, seeds(4), max_new_tokens=10)
    for context, reply in zip(contexts, replies, strict=True):
        assert len(reply.token_ids) == min(10, longest + 2 - len(context))


def test_the_models_own_generation_defaults_do_not_leak_in(tiny, contexts):
    before = tokens(generate(tiny, contexts, seeds(4), max_new_tokens=16))
    defaults = tiny.model.generation_config
    try:
        defaults.repetition_penalty, defaults.top_k, defaults.temperature = 5.0, 1, 0.1
        assert tokens(generate(tiny, contexts, seeds(4), max_new_tokens=16)) == before
    finally:
        defaults.repetition_penalty, defaults.top_k, defaults.temperature = None, None, None


def test_mode_and_defaults_are_put_back_also_after_an_error(tiny, contexts):
    tiny.model.train()
    defaults = tiny.model.generation_config
    try:
        with pytest.raises((IndexError, RuntimeError)):
            generate(tiny, [[10**6]], [1], max_new_tokens=2)
        assert tiny.model.training and tiny.model.generation_config is defaults
    finally:
        tiny.model.eval()


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"max_new_tokens": 0}, {"max_rows": 0}, {"top_p": 0.0}, {"top_k": -1}])
def test_numbers_out_of_range_are_refused(tiny, contexts, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        generate(tiny, contexts, seeds(4), **wrong)
