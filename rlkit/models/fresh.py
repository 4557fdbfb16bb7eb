"""A very small policy made on the spot, which replies at random in a given form: the start of the bench's tasks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from rlkit.models.load import make_policy
from rlkit.types import Policy, ranges

TEMPLATE = """{%- for message in messages -%}
{{- ('<a>' if message.role == 'assistant' else '<u>') + message.content + '<end>' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<a>' -}}{%- endif -%}"""
CONTROL = ("<pad>", "<end>", "<u>", "<a>")
CONTEXT = 256  # tokens


@ranges(width=(8, None), layers=(1, None), turns=(1, None), steps=(0, None), rate=(0, None))
def fresh_policy(
    *,
    replies: Sequence[str],
    symbols: str = "",
    turns: int = 1,
    prompt: int = 2,
    width: int = 32,
    layers: int = 2,
    steps: int = 150,
    rate: float = 1e-2,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Policy:
    """A Qwen3 of a few thousand parameters whose vocabulary is single characters, taught a uniform choice among well-formed replies.

    The lessons are conversations of random prompts and random replies, so the policy knows the form and nothing about what is right: the
    chance of each reply is nearly that of a uniform draw, whatever the prompt.

    Args:
      replies: the characters that may stand at each place of a reply, such as ["0123456789", "+-", "0123456789"]. A place that ends in
        "*" is repeated, with one half as the chance of each further repetition, and may be absent.
      symbols: characters of prompts, beside those of replies.
      turns, prompt: the longest conversation of the lessons, and the longest prompt in it, in characters.
      width, layers: of the model; a width is a multiple of 8.
      steps, rate: of AdamW on 64 conversations each; 0 leaves the weights as drawn.
      seed: of weights and lessons.
    """
    alphabet = sorted({*symbols, *(c for place in replies for c in place.removesuffix("*"))})
    tokenizer = character_tokenizer(alphabet)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = small_model(len(CONTROL) + len(alphabet), width=width, layers=layers)
        rng, optimizer = random.Random(f"fresh {seed}"), torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - step / steps)
            texts = [lesson(rng, replies, alphabet, turns=turns, prompt=prompt) for _ in range(64)]
            ids, targets = as_tensors([tokenizer.encode(text, add_special_tokens=False) for text in texts])
            loss = torch.nn.functional.cross_entropy(
                model(input_ids=ids).logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.zero_grad(set_to_none=True)
    return make_policy(model.to(device), tokenizer)


def character_tokenizer(alphabet: Sequence[str]) -> Any:
    """A fast tokenizer of one token a character; characters that it does not know are left out."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*CONTROL, *alphabet]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=CONTROL[0]))
    allowed = "".join(f"\\{c}" if not c.isalnum() else c for c in alphabet)
    backend.normalizer = normalizers.Replace(Regex(f"[^{allowed}]"), "")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=CONTROL[0], eos_token=CONTROL[1])
    tokenizer.add_special_tokens({"additional_special_tokens": list(CONTROL[2:])})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def small_model(vocabulary: int, *, width: int, layers: int) -> Any:
    """Random weights, from torch's generator."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, head_dim=width // 2, max_position_embeddings=CONTEXT, tie_word_embeddings=False, attention_dropout=0.0,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = 1
    return model


def lesson(rng: random.Random, replies: Sequence[str], alphabet: Sequence[str], *, turns: int, prompt: int) -> str:
    """A conversation of random prompts and random well-formed replies, as the template writes it."""
    out = ""
    for _ in range(rng.randint(1, turns)):
        out += f"<u>{''.join(rng.choices(alphabet, k=rng.randint(1, prompt)))}<end><a>{random_reply(rng, replies)}<end>"
    return out


def random_reply(rng: random.Random, replies: Sequence[str]) -> str:
    """One reply of the form."""
    out = ""
    for place in replies:
        count = 1
        if place.endswith("*"):
            count = 0
            while rng.random() < 0.5:
                count += 1
        out += "".join(rng.choices(place.removesuffix("*"), k=count))
    return out


def as_tensors(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded ids [B, T], and the next ids [B, T-1] where they belong to a reply or end it, else -100."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    speaks, own = torch.zeros(len(rows), dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    for t in range(width):
        own[:, t] = speaks
        speaks = torch.where(ids[:, t] == 3, True, torch.where(ids[:, t] <= 1, False, speaks))
    return ids, torch.where(own, ids, -100)[:, 1:]
