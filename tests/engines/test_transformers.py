"""The reference engine: what it samples belongs to the rollout alone, and its log-probs are those
of the trainer."""

from __future__ import annotations

import random

import pytest
import torch

from parametrise import cases
from rlkit.engines import Transformers
from rlkit.engines.transformers import Budgeted, ThinkingBudget, complete
from rlkit.environments import calculator, tool_schema
from rlkit.functional import cut_distribution, mix
from rlkit.models import decode, encode_prompt, encode_text, forward_logprobs, pack
from rlkit.models.chat import encode_scaffold
from rlkit.types import THINK_TAGS, SamplingParams, Thinking

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
    return [
        encode_prompt(tiny.renderer, [{"role": "user", "content": q}], TOOLS) for q in QUESTIONS
    ]


def generate(policy, contexts, seeds, *, use_cache=True, max_rows=256, **params):
    return complete(
        policy, contexts, seeds, SamplingParams(**params), use_cache=use_cache, max_rows=max_rows
    )


def seeds(n):
    return [mix(1, i) for i in range(n)]


def tokens(generations):
    return [g.token_ids for g in generations]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", cases([1.0, 0.0], 1))
def test_neither_batch_nor_row_changes_a_reply(tiny, contexts, temperature):
    """Randomness is per rollout: alone, together, reversed or two at a time, each context gets the
    same tokens."""
    settings = {"max_new_tokens": 24, "temperature": temperature}
    together = tokens(generate(tiny, contexts, seeds(4), **settings))
    alone = [
        tokens(generate(tiny, [c], [s], **settings))[0]
        for c, s in zip(contexts, seeds(4), strict=True)
    ]
    backwards = tokens(generate(tiny, contexts[::-1], seeds(4)[::-1], **settings))[::-1]
    in_twos = tokens(generate(tiny, contexts, seeds(4), max_rows=2, **settings))
    assert together == alone == backwards == in_twos


@pytest.mark.slow
def test_another_seed_gives_another_reply(tiny, contexts):
    a, b = (generate(tiny, contexts, [s] * 4, max_new_tokens=24) for s in (1, 2))
    assert tokens(a) != tokens(b)


@pytest.mark.slow
def test_greedy_equals_a_loop_over_full_forwards(tiny, contexts):
    """No cache, no padding, argmax: the plainest decoder there is."""
    for context, reply in zip(
        contexts,
        generate(tiny, contexts, seeds(4), max_new_tokens=12, temperature=0.0),
        strict=True,
    ):
        ids = list(context)
        with torch.no_grad():
            for token in reply.token_ids:
                assert int(tiny.model(torch.tensor([ids])).logits[0, -1].argmax()) == token
                ids.append(token)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_log_probs_equal_the_trainer_at_the_same_temperature(tiny, contexts, temperature):
    for context, reply in zip(
        contexts,
        generate(tiny, contexts, seeds(4), max_new_tokens=24, temperature=temperature),
        strict=True,
    ):
        ids = torch.tensor([[*context, *reply.token_ids]])
        mask = (torch.arange(ids.shape[1]) >= len(context))[None]
        with torch.no_grad():
            logprobs = forward_logprobs(tiny.model, pack(ids, mask), temperature=temperature)[0][
                mask
            ]
        # cached decoding with left padding against one full forward, both float32: rounding alone
        torch.testing.assert_close(logprobs, torch.tensor(reply.logprobs), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_cut_distribution_is_the_one_that_is_sampled_and_scored(tiny, contexts):
    """Top-k 1 is greedy and certain; under top-p every log-prob is that of the cut distribution,
    here by full forwards."""
    surest = generate(tiny, contexts, seeds(4), max_new_tokens=8, temperature=2.0, top_k=1)
    assert tokens(surest) == tokens(
        generate(tiny, contexts, seeds(4), max_new_tokens=8, temperature=0.0)
    )
    assert all(logprob == 0 for g in surest for logprob in g.logprobs)
    settings = {"max_new_tokens": 8, "temperature": 6.0, "top_p": 0.6, "top_k": 50}
    replies = generate(tiny, contexts, seeds(4), **settings)
    assert tokens(replies) == tokens(
        generate(tiny, contexts, seeds(4), use_cache=False, **settings)
    )
    for context, reply in zip(contexts, replies, strict=True):
        ids = torch.tensor([[*context, *reply.token_ids]])
        with torch.no_grad():
            logits = tiny.model(ids).logits[0, len(context) - 1 : -1]
        cut = cut_distribution((logits / 6.0).log_softmax(-1), top_p=0.6, top_k=50)
        expected = cut.gather(1, ids[0, len(context) :, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(reply.logprobs), expected, rtol=0, atol=1e-3
        )  # at temperature 6, of one nat or more


@pytest.mark.slow
def test_first_tokens_follow_the_distribution(tiny, contexts):
    """Chi-square of 4,000 seeds against the model's own probabilities, in 16 classes of token ids
    (15 degrees of freedom)."""
    n, context = 4000, contexts[2][:8]  # inside the question, where the model is unsure
    replies = generate(
        tiny,
        [context] * n,
        [mix(7, i) for i in range(n)],
        max_new_tokens=1,
        temperature=6.0,
        max_rows=n,
    )
    with torch.no_grad():
        probabilities = (tiny.model(torch.tensor([context])).logits[0, -1] / 6.0).softmax(-1)
    classes = torch.arange(len(probabilities)) % 16
    expected = torch.zeros(16).index_add_(0, classes, probabilities) * n
    observed = torch.bincount(
        torch.tensor([g.token_ids[0] % 16 for g in replies]), minlength=16
    ).float()
    assert expected.min() > 10 and expected.max() < 0.5 * n  # else the statistic means nothing
    assert (
        float(((observed - expected) ** 2 / expected).sum()) < 37.7
    )  # the 99.9 % quantile at 15 degrees of freedom


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
    assert [len(g.token_ids) for g in cut] == [3] * 4 and {g.finish_reason for g in cut} == {
        "length"
    }


def test_the_context_limit_of_the_model_cuts_each_row_by_its_own_length(tiny, contexts):
    """A long neighbour must not shorten a short row's reply."""
    longest = max(map(len, contexts))
    narrow = tiny._replace(context_length=longest + 2, eos_token_ids=NEVER)
    replies = generate(narrow, contexts, seeds(4), max_new_tokens=10)
    for context, reply in zip(contexts, replies, strict=True):
        assert len(reply.token_ids) == min(10, longest + 2 - len(context))


def test_no_row_reads_behind_a_table_of_positions(tiny):
    """Long rows were decoded as far as short ones, and the table has no more positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=768,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    policy = tiny._replace(
        model=GPT2LMHeadModel(config).eval(), context_length=32, eos_token_ids=NEVER
    )
    prompts = [[2 + i % 50 for i in range(length)] for length in (28, 4, 27, 5)]
    together = generate(policy, prompts, seeds(4), max_new_tokens=20)
    assert [len(reply.token_ids) for reply in together] == [4, 20, 5, 20]
    for prompt, seed, reply in zip(prompts, seeds(4), together, strict=True):
        (alone,) = generate(policy, [prompt], [seed], max_new_tokens=20)
        assert alone.token_ids == reply.token_ids


@pytest.mark.slow
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


# ---------------------------------------------------------------------------------- thinking budget


def thoughts(policy, ids) -> int:
    """Tokens in thinking blocks, tags apart."""
    first, second = policy.renderer.thinking.ids
    inside, count = False, 0
    for token in ids:
        inside = (inside or token == first) and token != second
        count += inside and token != first
    return count


@pytest.mark.slow
def test_a_budget_changes_nothing_before_it_is_used_up_and_closes_the_block_then(tiny, contexts):
    """The free reply up to there, the closing tag, and what the policy says behind it; a reply that
    thinks less is the free one."""
    settings, close = {"max_new_tokens": 32, "temperature": 1.5}, tiny.renderer.thinking.close
    free = generate(tiny, contexts, seeds(4), **settings)
    used = [thoughts(tiny, g.token_ids) for g in free]
    assert max(used) > 3 and all(g.forced == () for g in free)
    for budget in (0, 3, max(used) + 1):
        for before, after, n in zip(
            free,
            generate(tiny, contexts, seeds(4), max_thinking_tokens=budget, **settings),
            used,
            strict=True,
        ):
            at = after.forced[0] if after.forced else len(after.token_ids)
            assert (
                after.token_ids[:at] == before.token_ids[:at]
                and after.logprobs[:at] == before.logprobs[:at]
            )
            assert thoughts(tiny, after.token_ids) <= budget and (after == before or n >= budget)
            assert [after.token_ids[i] for i in after.forced] == [*close] * len(after.forced)
            assert [after.logprobs[i] for i in after.forced] == [0.0] * len(after.forced)
            assert not after.forced or thoughts(tiny, after.token_ids[:at]) == budget


def test_behind_a_forced_tag_tokens_are_those_of_the_policy(tiny, contexts):
    """Its log-probs given all that stands before, the forced tag included: by the trainer on the
    whole reply."""
    replies = generate(tiny, contexts, seeds(4), max_new_tokens=40, max_thinking_tokens=2)
    assert all(len(g.token_ids) > g.forced[-1] + 1 for g in replies if g.forced) and any(
        g.forced for g in replies
    )
    for context, reply in zip(contexts, replies, strict=True):
        ids = torch.tensor([[*context, *reply.token_ids]])
        mask = torch.zeros(ids.shape, dtype=torch.bool)
        mask[
            0, [len(context) + i for i in range(len(reply.token_ids)) if i not in reply.forced]
        ] = True
        with torch.no_grad():
            logprobs = forward_logprobs(tiny.model, pack(ids, mask))[0][mask]
        want = [p for i, p in enumerate(reply.logprobs) if i not in reply.forced]
        torch.testing.assert_close(
            logprobs, torch.tensor(want), rtol=0, atol=1e-4
        )  # cached decoding against one full forward


@pytest.mark.slow
def test_neither_batch_nor_row_changes_a_reply_under_a_budget(tiny, contexts):
    """Each reply has a state of its own; one context ends inside a block, as some templates make
    it."""
    opened = [*contexts[0], tiny.renderer.thinking.ids[0]]
    settings, rows = (
        {"max_new_tokens": 24, "max_thinking_tokens": 3, "temperature": 1.5},
        [*contexts, opened],
    )
    together = generate(tiny, rows, seeds(5), **settings)
    alone = [
        tokens(generate(tiny, [c], [s], **settings))[0] for c, s in zip(rows, seeds(5), strict=True)
    ]
    assert (
        tokens(together)
        == alone
        == tokens(generate(tiny, rows[::-1], seeds(5)[::-1], **settings))[::-1]
    )
    assert (
        together[4].forced[0] == 3
    )  # three tokens of thinking, counted from where the prompt opened the block


def spell_tags(renderer):
    """How a tokenizer without the tags as tokens would see them."""
    return renderer.thinking._replace(ids=None, close=tuple(encode_text(renderer, THINK_TAGS[1])))


@pytest.mark.parametrize("spelled", [False, True])
def test_the_budget_over_random_replies(tiny, spelled):
    """Against a plain loop over text: all rows and kinds of replies at once, tags cut into tokens
    at any place."""
    renderer, rng, budget, steps = tiny.renderer, random.Random(1), 4, 60
    thinking = spell_tags(renderer) if spelled else renderer.thinking
    write = encode_text if spelled else encode_scaffold
    contexts = [
        encode_scaffold(renderer, "<|im_start|>assistant\n")
        + write(renderer, rng.choice(["", "<think>\n"]))
        for _ in range(40)
    ]
    scripts = []
    for context in contexts:
        script: list[int] = []
        while len(script) < steps:
            piece = rng.choice(
                ["<think>", "</think>", "a", "é", "\n\n", "<", "1", "</thin", "1", "a"]
            )
            script += (
                encode_text(renderer, piece) if piece not in THINK_TAGS else write(renderer, piece)
            )
        scripts.append((context, script))
    width = max(map(len, contexts))
    budgeted = Budgeted(
        ThinkingBudget(thinking, len(contexts), budget, torch.device("cpu")), contexts, width
    )
    ids = torch.tensor([[0] * (width - len(c)) + list(c) for c in contexts])
    for step in range(steps):
        choice = torch.zeros(len(scripts), 768).scatter(
            1, torch.tensor([[s[step]] for _, s in scripts]), 1.0
        )
        ids = torch.cat([ids, budgeted(ids, choice).argmax(1, keepdim=True)], dim=1)
    forced = torch.stack(budgeted.forced, dim=1).tolist()
    assert sum(map(sum, forced)) > 40  # every reply or so
    for (context, script), row, marks in zip(scripts, ids[:, width:].tolist(), forced, strict=True):
        inside, used, text, writing = thinking.opened(context), 0, "", 0
        for i, token in enumerate(row):
            must = writing > 0 or (inside and used >= budget)
            assert marks[i] == must and token == (thinking.close[writing] if must else script[i])
            writing = (writing + 1) % len(thinking.close) if must else 0
            before = inside
            if spelled:
                text += decode(renderer, [token])
                for tag, state in zip(THINK_TAGS, (True, False), strict=True):
                    if text.endswith(tag):  # no token of this tokenizer goes on behind a tag's end
                        inside = state
                used += before and inside
            else:
                inside = (inside or token == thinking.ids[0]) and token != thinking.ids[1]
                used += inside and token != thinking.ids[0]


def test_a_token_that_ends_a_spelled_tag_and_goes_on(tiny):
    """Tokenizers merge "/think" and ">\\n": the tag is found inside the token, and only once."""
    pieces = ["x <th", "ink>\n", "a", " b</", "think", ">\n\nso", " c", "<think><", "/think>", "d"]
    thinking = Thinking(None, (0,), lambda ids: "".join(pieces[i] for i in ids))
    budgeted, at = ThinkingBudget(thinking, 1, 99, torch.device("cpu")), torch.tensor([0])
    budgeted.begin(at, [[9]])
    states = []
    for i in range(len(pieces)):
        budgeted.follow(at, torch.tensor([i]))
        states.append((bool(budgeted.inside[0]), int(budgeted.used[0])))
    assert states[:6] == [(False, 0), (True, 0), (True, 1), (True, 2), (True, 3), (False, 3)]
    assert states[6:] == [(False, 3), (True, 3), (False, 3), (False, 3)]


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="max_rows"):
        Transformers(max_rows=0)
