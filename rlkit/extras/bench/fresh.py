"""Make a very small policy, the start of the bench's tasks. It replies at random in a given
form."""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import platform
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from rlkit.models.load import LoRA, add_lora, make_policy
from rlkit.system.files import write_atomic
from rlkit.types import Policy, ranges, safe

STARTS = (  # in the environment of a bench's jobs: the folder of their common starts
    "RLKIT_STARTS"
)
TEMPLATE = """{%- for message in messages -%}
{{- ('<a>' if message.role == 'assistant' else '<u>') + message.content + '<end>' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<a>' -}}{%- endif -%}"""
CONTROL = ("<pad>", "<end>", "<u>", "<a>")
CONTEXT = 256  # tokens


@safe("replies", "symbols", "device")
@ranges(
    width=(8, None),
    layers=(1, None),
    turns=(1, None),
    opinions=(0, None),
    init_std=(0, None),
    steps=(0, None),
    rate=(0, None),
)
def fresh_policy(
    *,
    replies: Sequence[str],
    symbols: str = "",
    turns: int = 1,
    prompt: int = 2,
    opinions: float = 0.0,
    width: int = 32,
    layers: int = 2,
    init_std: float = 0.02,
    steps: int = 150,
    rate: float = 1e-2,
    seed: int = 0,
    lora: LoRA = LoRA(),  # noqa: B008  (a NamedTuple: immutable)
    device: torch.device | str = "cpu",
) -> Policy:
    """Make a Qwen3 of a few thousand parameters with single characters as its vocabulary, and teach
    it to draw well-formed replies at random.

    It is taught on conversations of random prompts and random replies, so it knows the form and
    nothing about right answers. Without opinions the chance of each reply is nearly that of a
    uniform draw, for any prompt. A policy without opinions has never used its prompt. So training
    first makes it give the same reply to all problems, and only later tell the problems apart.

    With opinions, each prompt has its own distribution of replies, `p ∝ exp(opinions · z)`. Here z
    is a standard normal number for each place and character. z is independent of the right answers.

    Args:
      replies: the characters for each place of a reply, for example ["0123456789", "+-",
        "0123456789"]. A place that ends in "*" is repeated, with one half as the chance of each
        further repetition, and may be absent.
      symbols: characters of prompts, besides those of replies.
      turns, prompt: most turns of a conversation in the lessons, and most characters of a prompt.
      opinions: standard deviation of the log-odds of characters between prompts. From the second
        turn on, the first prompt and the latest prompt count half each.
      width, layers: size of the model; a width is a multiple of 8.
      init_std: standard deviation of the initial weights. 0.02 is Qwen3's, for widths above 1,000.
        1/√width keeps the size of activations, so that the policy tells prompts apart from the
        first steps on.
      steps, rate: number of AdamW steps on 64 conversations each, and their learning rate; 0 steps
        keep the initial weights.
      seed: seed of weights and lessons.
      lora: adapters added after the lessons; rank 0 trains all weights.
    """
    alphabet = sorted({*symbols, *(c for place in replies for c in place.removesuffix("*"))})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = small_model(
            len(CONTROL) + len(alphabet), width=width, layers=layers, init_std=init_std
        )
        model.load_state_dict(
            kept_start(
                replies=tuple(replies),
                alphabet=tuple(alphabet),
                turns=turns,
                prompt=prompt,
                opinions=opinions,
                width=width,
                layers=layers,
                init_std=init_std,
                steps=steps,
                rate=rate,
                seed=seed,
            )
        )
        if lora.rank > 0:
            model = add_lora(model, lora)
    return make_policy(model.to(device), character_tokenizer(alphabet))


def kept_start(**given: Any) -> Mapping[str, torch.Tensor]:
    """Run `taught` once for all processes with the same folder in RLKIT_STARTS; without the folder,
    run it here.

    A file's name holds every argument on which the weights depend. The file is written under a
    lock, and made again if it is damaged.
    """
    folder = os.environ.get(STARTS)
    if not folder:
        return taught(**given)
    source = Path(__file__).read_bytes()
    place = [
        torch.__version__,
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
    ]
    key = hashlib.sha256(source + repr([place, sorted(given.items())]).encode()).hexdigest()[:32]
    path = Path(folder) / f"{key}.start"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = read_weights(path)
            if found:
                return found
            data = save(dict(taught(**given)))
            write_atomic(path, hashlib.sha256(data).digest() + data)
    except OSError:  # no room or no locks: every job makes an equal start of its own
        pass
    return taught(**given)


def read_weights(path: Path) -> Mapping[str, torch.Tensor]:
    """Read the weights in a file of `kept_start`; empty if the file is missing, or if its digest
    shows damage."""
    try:
        content = path.read_bytes()
    except OSError:
        return {}
    return load(content[32:]) if hashlib.sha256(content[32:]).digest() == content[:32] else {}


@lru_cache(maxsize=4)  # consecutive runs in a process share their start
def taught(
    replies: tuple[str, ...],
    alphabet: tuple[str, ...],
    *,
    turns: int,
    prompt: int,
    opinions: float,
    width: int,
    layers: int,
    init_std: float,
    steps: int,
    rate: float,
    seed: int,
) -> Mapping[str, torch.Tensor]:
    """Train on the lessons and return the weights. The arguments are those of `fresh_policy`.
    Callers copy the tensors and do not change them."""
    tokenizer = character_tokenizer(alphabet)
    own = Opinions(seed, opinions)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = small_model(
            len(CONTROL) + len(alphabet), width=width, layers=layers, init_std=init_std
        )
        rng = random.Random(f"fresh {seed}")
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - step / steps)
            texts = [
                lesson(rng, replies, alphabet, turns=turns, prompt=prompt, opinions=own)
                for _ in range(64)
            ]
            ids, targets = pad_rows(
                [tokenizer.encode(text, add_special_tokens=False) for text in texts]
            )
            loss = torch.nn.functional.cross_entropy(
                model(input_ids=ids).logits[:, :-1].flatten(0, 1),
                targets.flatten(),
                ignore_index=-100,
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.state_dict()


def character_tokenizer(alphabet: Sequence[str]) -> Any:
    """Make a fast tokenizer with one token for each character. Unknown characters are left out."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*CONTROL, *alphabet]
    backend = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=CONTROL[0])
    )
    allowed = "".join(f"\\{c}" if not c.isalnum() else c for c in alphabet)
    backend.normalizer = normalizers.Replace(Regex(f"[^{allowed}]"), "")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=CONTROL[0], eos_token=CONTROL[1]
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(CONTROL[2:])})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def small_model(vocabulary: int, *, width: int, layers: int, init_std: float) -> Any:
    """Make a model with random weights from torch's generator."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=width // 2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        attention_dropout=0.0,
        initializer_range=init_std,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = 1
    return model


class Opinions:
    """Preferences of a fresh policy: for each prompt and place of a reply, the log-odds of the
    characters for this place."""

    def __init__(self, seed: int, strength: float):
        self.seed = seed
        self.strength = strength
        self.known: dict[tuple[str, int, str], list[float]] = {}

    def weights(self, prompts: Sequence[str], place: int, characters: str) -> list[float]:
        """Compute one weight `exp(strength · z)` for each character. Here z is the sum of the
        prompts' own numbers, divided by the square root of the number of prompts."""
        drawn = [self.drawn(text, place, characters) for text in prompts]
        return [
            math.exp(self.strength * sum(own) / math.sqrt(len(own)))
            for own in zip(*drawn, strict=True)
        ]

    def drawn(self, prompt: str, place: int, characters: str) -> list[float]:
        """Draw standard normal numbers that depend on the seed and the arguments only."""
        key = (prompt, place, characters)
        if key not in self.known:
            rng = random.Random(f"opinion {self.seed} {key}")
            self.known[key] = [rng.gauss(0.0, 1.0) for _ in characters]
        return self.known[key]


def lesson(
    rng: random.Random,
    replies: Sequence[str],
    alphabet: Sequence[str],
    *,
    turns: int,
    prompt: int,
    opinions: Opinions,
) -> str:
    """Write a conversation of random prompts and random well-formed replies in the template's
    form."""
    out = ""
    first = ""
    for _ in range(rng.randint(1, turns)):
        asked = "".join(rng.choices(alphabet, k=rng.randint(1, prompt)))
        prompts = [first, asked] if first else [asked]
        first = first or asked
        out += f"<u>{asked}<end><a>{random_reply(rng, replies, prompts, opinions)}<end>"
    return out


def random_reply(
    rng: random.Random, replies: Sequence[str], prompts: Sequence[str], opinions: Opinions
) -> str:
    """Draw a reply of the given form, to the first and the latest prompt."""
    out = ""
    for i, place in enumerate(replies):
        characters = place.removesuffix("*")
        count = 1
        if place.endswith("*"):
            count = 0
            while rng.random() < 0.5:
                count += 1
        out += "".join(rng.choices(characters, opinions.weights(prompts, i, characters), k=count))
    return out


def pad_rows(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded ids [B, T], and targets [B, T-1]: the next id inside replies and at their ends,
    -100 elsewhere."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    speaks = torch.zeros(len(rows), dtype=torch.bool)
    own = torch.zeros_like(ids, dtype=torch.bool)
    for t in range(width):
        own[:, t] = speaks
        speaks = torch.where(ids[:, t] == 3, True, torch.where(ids[:, t] <= 1, False, speaks))
    return ids, torch.where(own, ids, -100)[:, 1:]
