"""Data, models and generation by the notebooks' names: every hook, and the slips that the notebooks had."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch

from rlkit import (
    GenerationConfig,
    Rollout,
    Step,
    Task,
    TextGeneration,
    attach_logprobs,
    batch_history,
    compute_logprobs_for_tokens,
    create_batch,
    create_rollout,
    format_prompt,
    generate_templates,
    generate_text,
    generate_with_values,
    load_model,
    load_tokenizer,
    parse_thinking,
    same_rollouts,
    view_steps,
)
from rlkit.episodes import load_rollouts, save_rollouts
from rlkit.errors import ConfigError
from rlkit.models import LoRA, ValueHead, encode_prompt, make_critic
from rlkit.models.load import TINY
from rlkit.notebook.data import TRAINING
from rlkit.types import SamplingParams

SHORT = TRAINING._replace(max_new_tokens=6)
QUESTION = "Ann has 3 pens. Ann buys 4 more. How many pens does Ann have now?"


@pytest.fixture
def model(tiny):
    return tiny.model.eval()


@pytest.fixture
def tokenizer(tiny):
    return tiny.renderer.tokenizer


# ------------------------------------------------------------------------------------------------------------- data


def test_a_config_is_immutable_and_says_how_an_engine_samples():
    """The notebooks share mutable defaults."""
    with pytest.raises(AttributeError):
        GenerationConfig().temperature = 1.0  # type: ignore[misc]
    assert GenerationConfig().params == SamplingParams(512, 0.7, 0.9, 50) and TRAINING.params == SamplingParams(256, 1.0, 1.0, 0)
    assert TRAINING._replace(do_sample=False).params.temperature == 0.0


def two_steps(**more) -> Rollout:
    user = {"role": "user", "content": "Count."}
    first = Step((user,), (1, 2), (3, 4), (-1.0, -2.0), "stop", thinking="hm", content="one")
    second = Step(({"role": "user", "content": "On."},), (1, 2, 3, 4, 5), (6,), (-3.0,), "stop", thinking="so", content="two")
    return Rollout(Task("t", ({"role": "system", "content": "Be brief."}, user)), (first, second), **more)


def test_a_rollout_has_the_notebooks_names():
    """`terminated` and `truncated` are two things: only the first ends an episode early."""
    done, cut = two_steps(metadata={"kl_penalty": 0.5}), two_steps(status="truncated", truncation="steps")
    assert (done.prompt, done.text, done.generation.content, done.total_steps, done.kl_penalty) == ("Count.", "two", "two", 2, 0.5)
    assert (done.terminated_early, done.termination_step) == (True, 1)
    assert (cut.terminated_early, cut.termination_step, cut.kl_penalty) == (False, None, None)
    assert Rollout(Task("t", ()), ()).generation is None
    plain = done.to_dict()
    assert plain["steps"][1]["response_ids"] == (6,) and type(plain["steps"][0]) is dict and plain["task"]["id"] == "t"


def test_every_step_keeps_its_thinking_in_the_history_with_thinking():
    """The slip: a history with thinking keeps only the last step's."""
    views = view_steps(two_steps(metadata={"old_logprobs": torch.tensor([-0.1, -0.2, -0.3])}), values=[0.5, 0.25], returns=[1.0, 1.0])
    assert [m.get("reasoning_content") for m in views[1].history_with_thinking] == [None, "hm", None, "so"]
    assert not any("reasoning_content" in m for m in views[1].history) and len(views[0].history) == 2
    assert (views[1].step_num, views[1].tokens, views[1].response_tokens) == (1, (1, 2, 3, 4, 5, 6), (6,))
    assert views[0].old_logprobs.tolist() == pytest.approx([-0.1, -0.2]) and views[1].old_logprobs.tolist() == pytest.approx([-0.3])
    assert (views[1].value, views[1].return_, views[1].advantage) == (0.25, 1.0, None)


def test_rollouts_are_equal_by_value_with_tensors_in_them(model, tokenizer, tmp_path):
    """And what is loaded is rollouts again, not dicts, from a file that no pickle reads."""
    rollout = create_rollout(model, tokenizer, QUESTION, config=SHORT, reward_fn=lambda r: 1.0)
    save_rollouts(tmp_path / "rollouts.jsonl.gz", [rollout])
    assert load_rollouts(tmp_path / "rollouts.jsonl.gz") == [rollout]
    a, b = attach_logprobs(model, [rollout]), attach_logprobs(model, [rollout])
    assert same_rollouts(a, b) and not same_rollouts(a, [a[0]._replace(reward=0.0)])
    changed = a[0].steps[0]._replace(logprobs=a[0].steps[0].logprobs + 1)
    assert not same_rollouts(a, [a[0]._replace(steps=(changed,))])


# ----------------------------------------------------------------------------------------------------------- models


def test_models_and_tokenizers_are_loaded(tmp_path):
    policy = load_model("tiny", "bfloat16")
    assert not policy.training and {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    adapted = load_model(policy, use_lora=True, lora_rank=2)
    trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert adapted.get_base_model() is policy and all("lora_" in n and p.dtype == torch.float32 for n, p in trained.items())
    assert all(any(f".{target}." in n for n in trained) for target in LoRA().targets)
    assert not any(isinstance(m, torch.nn.Dropout) and m.p for m in adapted.modules())
    with pytest.raises(ConfigError, match=r"model\.path=.*nothing"):
        load_model(str(tmp_path / "nothing"))
    shutil.copytree(TINY, tmp_path / "m")
    settings = tmp_path / "m" / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"pad_token"', '"no_pad_token"'))
    tokenizer = load_tokenizer(str(tmp_path / "m"))
    assert tokenizer.padding_side == "left" and tokenizer.pad_token == tokenizer.eos_token == "<|im_end|>"


def test_a_prompt_is_formatted(tokenizer):
    assert format_prompt("Hi", tokenizer, system_prompt="Be brief.") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert format_prompt("Hi", tokenizer, use_chat_template=False, system_prompt="Be brief.") == "Be brief.\n\nHi"
    seen = []
    spy = copy.copy(tokenizer)
    spy.apply_chat_template = lambda messages, **settings: seen.append(settings) or "text"
    format_prompt("Hi", spy)
    format_prompt([{"role": "user", "content": "Hi"}], spy, enable_thinking=False)
    assert "enable_thinking" not in seen[0] and seen[1]["enable_thinking"] is False


def test_thinking_is_split_at_the_last_tag_of_the_tokenizers_own(tokenizer):
    text = "<think>a</think>b<think>c</think> 7"
    assert parse_thinking(text) == ("abc", "7") or parse_thinking(text)[1] == "7"
    ids = tokenizer.encode("<think>two</think>4<|im_end|><|endoftext|>", add_special_tokens=False)
    assert parse_thinking(ids, tokenizer) == parse_thinking(torch.tensor(ids), tokenizer) == ("two", "4")
    assert parse_thinking("4") == ("", "4")


def test_siblings_share_no_history(tokenizer):
    """The slip: all chats of create_batch are one list."""
    chats = create_batch(["Hi", "Ho"], 2, system_prompt="Be brief.")
    chats[0].append({"role": "assistant", "content": "x"})
    chats[0][1]["content"] = "changed"
    assert [len(chat) for chat in chats] == [3, 2, 2, 2] and [chat[1]["content"] for chat in chats] == ["changed", "Hi", "Ho", "Ho"]
    longer = batch_history(chats[1:], ["<think>hm</think>yes", TextGeneration("no", ()), "so"], ["And?"] * 3)
    assert [m["content"] for m in longer[0]] == ["Be brief.", "Hi", "yes", "And?"] and len(chats[1]) == 2
    assert generate_templates(longer, tokenizer)[1].endswith("<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n")


# ------------------------------------------------------------------------------------------------------- generation


def test_one_prompt_a_list_and_messages_are_one_thing(model, tokenizer):
    """As one batch or alone, as a text or as messages: the same replies, no longer than asked, prompt by prompt."""
    asked = [QUESTION, [{"role": "user", "content": "Hi"}]]
    many = generate_text(model, tokenizer, asked, SHORT, num_return_sequences=2)
    assert len(many) == 4 and all(len(g.token_ids) == len(g.logprobs) == len(g.valid_mask) <= 6 for g in many)
    alone = [generate_text(model, tokenizer, QUESTION, SHORT), *generate_text(model, tokenizer, [QUESTION], SHORT)]
    alone += generate_text(model, tokenizer, [{"role": "user", "content": QUESTION}], SHORT, num_return_sequences=2)
    assert [g.token_ids for g in alone] == [many[i].token_ids for i in (0, 0, 0, 1)]
    rollout = create_rollout(model, tokenizer, QUESTION, config=SHORT)
    assert rollout.generation.response_ids == alone[0].token_ids and rollout.generation.logprobs == alone[0].logprobs
    assert generate_text(model, tokenizer, QUESTION, SHORT, False).logprobs is None


def test_the_end_token_belongs_to_the_reply_and_nothing_after_it(model, tokenizer):
    """The slips: the response is sliced at the padded width, the end token is dropped, what follows it is kept."""
    replies = generate_text(model, tokenizer, [QUESTION, QUESTION + " " + QUESTION, "Hi"], GenerationConfig(max_new_tokens=100))
    ends = (761, 759)
    ended = [g for g in replies if g.metadata["finish_reason"] == "stop"]
    assert ended and all(g.token_ids[-1] in ends and not set(g.token_ids[:-1]) & set(ends) for g in ended)
    assert all("<|im_end|>" not in g.text and "<think>" not in g.text for g in replies)


def test_thinking_is_returned_or_not(model, tokenizer):
    config = TRAINING._replace(max_new_tokens=60, do_sample=False)
    parsed = generate_text(model, tokenizer, QUESTION, config)
    whole = generate_text(model, tokenizer, QUESTION, config._replace(parse_thinking=False))
    assert parsed.metadata["thinking"] and "<think>" not in parsed.text and whole.text.startswith("<think>")
    assert parse_thinking(whole.text) == (parsed.metadata["thinking"], parsed.text)
    assert whole == generate_text(
        model, tokenizer, QUESTION, config._replace(parse_thinking=False, temperature=0.0, do_sample=True), seed=9
    )


def test_mode_and_cache_are_put_back_also_after_an_error(model, tokenizer):
    model.train()
    model.config.use_cache = False
    hook = model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            generate_text(model, tokenizer, "Hi", SHORT)
        assert model.training and model.config.use_cache is False
    finally:
        hook.remove()
        model.eval()
        model.config.use_cache = True


def test_a_prompt_is_never_cut(model, tokenizer):
    with pytest.raises(ValueError, match=r"prompt 1 has \d+ tokens, the model's context 2048"):
        generate_text(model, tokenizer, ["Hi", "pens " * 3000], SHORT)
    rollout = create_rollout(model, tokenizer, "pens " * 3000, config=SHORT)
    assert (rollout.status, rollout.truncation, rollout.steps) == ("truncated", "context", ())


def test_a_template_fn_writes_the_prompt_and_no_text_forges_a_turn(model, tokenizer):
    seen = []

    def template_fn(prompt, tokenizer, use_chat_template, system_prompt, enable_thinking):
        seen.append((use_chat_template, enable_thinking))
        return f"<|im_start|>{system_prompt or ''} Q: {prompt}\nA:"

    config = SHORT._replace(enable_thinking=False)
    rollout = create_rollout(
        model, tokenizer, "Hi <|im_end|>", config=config, template_fn=template_fn, system_prompt="S", use_chat_template=False
    )
    ids = rollout.steps[0].prompt_ids
    assert tokenizer.decode(ids) == "<|im_start|>S Q: Hi <|im_end|>\nA:" and 761 not in ids and ids[0] == 760
    assert seen[0] == (False, False)
    assert generate_text(model, tokenizer, "Hi <|im_end|>", config, template_fn=template_fn, system_prompt="S").token_ids
    with pytest.raises(ValueError, match="left out or changed a prompt's text"):
        generate_text(model, tokenizer, "Hi", SHORT, template_fn=lambda prompt, *_: prompt.upper())


# ------------------------------------------------------------------------------------------------ tokens and values


def test_log_probs_of_tokens_know_neither_padding_nor_micro_batches(model, tokenizer):
    """Position ids under left padding, and what was sampled is what is scored, temperature in both."""
    contexts = [tokenizer.encode(format_prompt(q, tokenizer), add_special_tokens=False) for q in (QUESTION, "Hi", "How many?")]
    config = TRAINING._replace(max_new_tokens=5, temperature=1.5)
    replies = [generate_text(model, tokenizer, q, config) for q in (QUESTION, "Hi", "How many?")]
    width = max(map(len, contexts))
    ids = torch.tensor([[7] * (width - len(c)) + c for c in contexts])
    mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts])
    generated = torch.tensor([[*g.token_ids, *[0] * (5 - len(g.token_ids))] for g in replies])
    found = compute_logprobs_for_tokens(model, ids, mask, generated, micro_batch_size=2, temperature=1.5)
    assert found.shape == (3, 5) and found.requires_grad
    for row, reply in zip(found, replies, strict=True):
        # cached decoding against one full forward, both float32
        torch.testing.assert_close(row[: len(reply.token_ids)].detach(), torch.tensor(reply.logprobs), rtol=0, atol=1e-4)
    assert all(isinstance(p, float) for g in replies for p in g.logprobs)  # constants
    alone = compute_logprobs_for_tokens(model, torch.tensor([contexts[1]]), None, generated[1:2], temperature=1.5)
    torch.testing.assert_close(alone[0], found[1], rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="nothing before it"):
        compute_logprobs_for_tokens(model, ids, mask * 0, generated)


def test_log_probs_of_a_bfloat16_model_are_of_a_float32_softmax(tokenizer):
    """The slip: a log-softmax in bfloat16 is off by 0.02 to 0.07 nats."""
    half = load_model("tiny", "bfloat16")
    ids = torch.tensor([tokenizer.encode(format_prompt(QUESTION, tokenizer), add_special_tokens=False)])
    tokens = torch.arange(5, 45)[None]
    found = compute_logprobs_for_tokens(half, ids, None, tokens)
    with torch.no_grad():
        logits = half(torch.cat([ids, tokens], 1)).logits[0, ids.shape[1] - 1 : -1]
    expected = logits.float().log_softmax(-1).gather(1, tokens.T)[:, 0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[0].detach(), expected, rtol=0, atol=1e-3)


def test_values_are_those_of_the_states_before_the_tokens(model, tokenizer, tiny):
    """The slips: zeros, taken at the token itself; 33 tokens where 5 were asked for."""
    torch.manual_seed(0)
    head = ValueHead(model.config.hidden_size)
    torch.nn.init.normal_(head.value.weight)
    config = TRAINING._replace(max_new_tokens=5)
    reply, values = generate_with_values(model, tokenizer, QUESTION, head, config, seed=3)
    assert values.shape == (5,) and len(reply.token_ids) == 5 and not values.requires_grad
    context = encode_prompt(tiny.renderer, [{"role": "user", "content": QUESTION}])
    with torch.no_grad():
        states = model.model(torch.tensor([[*context, *reply.token_ids]])).last_hidden_state[0]
        expected = head(states[len(context) - 1 : -1])
    torch.testing.assert_close(values, expected)
    critic = make_critic(model, model="head")
    critic.head = head
    torch.testing.assert_close(generate_with_values(model, tokenizer, QUESTION, critic, config, seed=3)[1], expected)
