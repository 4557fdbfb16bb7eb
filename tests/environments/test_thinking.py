"""Thinking: the last closing tag counts, tags are in neither part, and an unclosed block hides what
follows."""

from __future__ import annotations

import copy
import json
import random

import pytest

from parametrise import each
from rlkit.environments import split_reply, split_thinking
from rlkit.models import encode_text, make_renderer
from rlkit.models.chat import encode_prompt, encode_scaffold
from rlkit.types import THINK_TAGS


@each(
    ("text", "expected"),
    [
        (" 18 ", ("", " 18 ", True)),
        ("<think>\na\n</think>\n\n18", ("a", "18", True)),
        ("a</think>18", ("a", "18", True)),  # the opening tag stood in the prompt
        ("<think>a</think>b</think>18", ("ab", "18", True)),
        ("<think>a<think>b</think>18", ("ab", "18", True)),
        ("<think>the answer is 18", ("the answer is 18", "", False)),
        ("so <think>18", ("18", "so", False)),
        ("<think>a</think> b <think>18", ("a\n18", "b", False)),
        ("</think>", ("", "", True)),
        ("", ("", "", True)),
    ],
)
def test_split(text, expected):
    assert split_thinking(text) == expected


def test_a_block_that_the_prompt_opened_must_be_closed():
    assert split_thinking("the answer is 18", opened=True) == ("the answer is 18", "", False)
    assert split_thinking("a</think>18", opened=True) == ("a", "18", True)


# ------------------------------------------------------------------------------------- by token ids


def bytes_with_tags():
    """A tokenizer of bytes whose closing tag comes before its opening one: no id of any other
    tokenizer fits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in THINK_TAGS[::-1]])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def without_tags(tokenizer):
    """The tokenizer with its tags spelled in ordinary tokens."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    description = json.loads(tokenizer.backend_tokenizer.to_str())
    description["added_tokens"] = [
        t for t in description["added_tokens"] if t["content"] not in THINK_TAGS
    ]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(description)))


def renderers(tiny):
    template = tiny.renderer.tokenizer.chat_template
    tokenizers = {
        "tiny": tiny.renderer.tokenizer,
        "bytes": bytes_with_tags(),
        "spelled": without_tags(tiny.renderer.tokenizer),
    }
    for tokenizer in tokenizers.values():
        tokenizer.chat_template = template
    return {name: make_renderer(tokenizer) for name, tokenizer in tokenizers.items()}


@pytest.fixture(scope="module")
def codec_of(tiny):
    return renderers(tiny)


def test_the_ids_are_those_of_the_tokenizer(codec_of):
    assert codec_of["tiny"].thinking.ids == tuple(
        codec_of["tiny"].tokenizer.convert_tokens_to_ids(list(THINK_TAGS))
    )
    assert codec_of["bytes"].thinking.ids == (257, 256) and codec_of["bytes"].thinking.close == (
        256,
    )
    spelled = codec_of["spelled"].thinking
    assert (
        spelled.ids is None
        and len(spelled.close) > 1
        and spelled.decode(spelled.close) == "</think>"
    )


@pytest.mark.parametrize("name", ["tiny", "bytes", "spelled"])
def test_only_tags_that_are_tokens_count_where_there_are_such_tokens(codec_of, name):
    """Random replies of tags, quotations of tags and words: a quotation is text, unless the
    tokenizer knows no other tags."""
    renderer, rng = codec_of[name], random.Random(0)
    for _ in range(300):
        ids, text = [], ""
        for _ in range(rng.randint(0, 7)):
            kind, word = (
                rng.choice(["tag", "quoted", "word"]),
                rng.choice(["a ", " é", "18\n", "think>"]),
            )
            tag = rng.choice(THINK_TAGS)
            ids += (
                encode_scaffold(renderer, tag)
                if kind == "tag"
                else encode_text(renderer, tag if kind == "quoted" else word)
            )
            text += {"tag": tag, "quoted": tag.replace("<", "‹"), "word": word}[kind]
        if name == "spelled":
            text = text.replace("‹", "<")
        opened = rng.random() < 0.3
        thinking, content, closed = split_thinking(text, opened=opened)
        assert split_reply(renderer.thinking, ids, opened=opened) == (
            thinking.replace("‹", "<"),
            content.replace("‹", "<"),
            closed,
        )


@pytest.mark.parametrize("name", ["tiny", "bytes", "spelled"])
@pytest.mark.parametrize("ending", ["<think>", "<think>\n", "<think>\n\n"])
def test_a_template_may_open_the_block(codec_of, name, ending):
    """Read at the end of the context: tags of the user, of earlier turns and of closed blocks open
    nothing."""
    tokenizer = copy.deepcopy(codec_of[name].tokenizer)
    said = [
        {"role": "user", "content": "<think>"},
        {"role": "assistant", "content": "a", "reasoning_content": "<think>"},
    ]
    said.append({"role": "user", "content": "why <think>\n"})
    for generation_prompt, expected in (
        (ending, True),
        ("", False),
        ("<think>\n\n</think>\n\n", False),
    ):
        tokenizer.chat_template = codec_of[name].tokenizer.chat_template + generation_prompt
        renderer = make_renderer(tokenizer)
        assert renderer.thinking.opened(encode_prompt(renderer, said)) is expected
    # nothing stands behind what the user says
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    renderer = make_renderer(tokenizer)
    assert renderer.thinking.opened(encode_prompt(renderer, said)) is (name == "spelled")


@pytest.mark.parametrize("enable_thinking", [None, True, False])
def test_qwen3s_template_never_opens_the_block(codec_of, shared, enable_thinking):
    """Its model opens it; with thinking off, the template writes a block that is closed already."""
    tokenizer = copy.deepcopy(codec_of["tiny"].tokenizer)
    tokenizer.chat_template = (shared / "qwen3" / "chat_template.jinja").read_text()
    renderer = make_renderer(tokenizer, enable_thinking=enable_thinking)
    context = encode_prompt(renderer, [{"role": "user", "content": "why?"}])
    assert renderer.thinking.opened(context) is False
    assert (renderer.thinking.ids[1] in context) is (enable_thinking is False)
