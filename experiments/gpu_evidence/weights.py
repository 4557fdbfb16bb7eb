"""Make models with random weights of a known shape on the card, and sample completions of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlkit.engines import Cached
from rlkit.extras.forecast import CARDS, KNOWN, Card, Shape
from rlkit.functional import mix
from rlkit.models import LoRA, load_policy, make_policy, pretrained_tokenizer
from rlkit.models.checkpointing import checkpoint_activations
from rlkit.models.load import add_lora
from rlkit.system.loops import run, run_together
from rlkit.types import Generation, Policy, SamplingParams

RANK = 16
GROUP = 8
SHAPES = {name: KNOWN[f"Qwen/Qwen3-{name}"] for name in ("0.6B", "4B", "8B")}
SHAPES["rehearsed"] = Shape(2, 64, 4, 2, 16, 128, 1024, True)
NEVER = (-1,)  # an id of no token: replies end only at their limits


class Setting(NamedTuple):
    """The options given to every piece."""

    out: Path
    device: str = "cuda"  # or cpu
    rehearse: bool = False  # tiny sizes
    weights: str | None = None  # folder or hub id of Qwen3-0.6B
    problems: str | None = None  # folder or hub id of GSM8K

    def pick(self, full: Any, tiny: Any) -> Any:
        """Return `tiny` in a rehearsal, else `full`."""
        return tiny if self.rehearse else full

    @property
    def shapes(self) -> tuple[str, ...]:
        """The names of the shapes to decode."""
        return self.pick(("0.6B", "4B", "8B"), ("rehearsed",))


def random_policy(
    *,
    shape: str,
    lora: LoRA = LoRA(),  # noqa: B008  (a NamedTuple: immutable)
    dtype: str = "auto",
    device: Any = "cpu",
    gradient_checkpointing: bool = False,
    **_: Any,
) -> Policy:
    """Return a policy with random weights of SHAPES[shape] and the embedded tokenizer.

    Its replies end only at their length limits. The function stands in for `load_policy`; other
    arguments of `load_policy` are accepted and ignored.

    Args:
      dtype: "auto" is bfloat16 on a GPU, float32 elsewhere.
    """
    from transformers import AutoModelForCausalLM, Qwen3Config

    own = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=own.vocab,
        hidden_size=own.hidden,
        intermediate_size=own.mlp,
        num_hidden_layers=own.layers,
        num_attention_heads=own.heads,
        num_key_value_heads=own.kv_heads,
        head_dim=own.head_dim,
        max_position_embeddings=40_960,
        tie_word_embeddings=own.tied,
    )
    half = dtype == "bfloat16" or (dtype == "auto" and torch.device(device).type == "cuda")
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.bfloat16 if half else torch.float32,
            attn_implementation="sdpa",
        )
    model.to(device)
    if lora.rank:
        model = add_lora(model, lora)
    checkpoint_activations(model, gradient_checkpointing)
    model.train()
    return make_policy(model, pretrained_tokenizer("tiny"))._replace(eos_token_ids=NEVER)


def embedded_policy(device: str, **given: Any) -> Policy:
    """Return rlkit's embedded model as a policy whose replies end only at their length limits."""
    return load_policy(path="tiny", device=device, **given)._replace(eos_token_ids=NEVER)


def grouped_prompts(rows: int, length: int, start: int = 0) -> list[tuple[int, ...]]:
    """Return random prompts of one length; GROUP consecutive rows share a prompt."""
    generator = torch.Generator().manual_seed(start)
    distinct = torch.randint(100, 700, (-(-rows // GROUP), length), generator=generator).tolist()
    return [tuple(distinct[row // GROUP]) for row in range(rows)]


def sample(
    engine: Cached, policy: Policy, prompts: Sequence[Sequence[int]], tokens: int, turns: int = 1
) -> list[Generation]:
    """Sample one completion of `tokens` tokens for each prompt, all at once.

    With several turns, return the completions of the last turn. Each further turn continues the
    context with the reply and eight more tokens.
    """
    params = SamplingParams(max_new_tokens=tokens)

    async def episode(index: int, prompt: Sequence[int]) -> Generation:
        try:
            for turn in range(turns):
                reply = await engine.generate(index, prompt, mix(turn, index), params)
                prompt = (*prompt, *reply.token_ids, *range(200, 208))
            return reply
        finally:
            engine.release(index)

    async def all_of_them() -> list[Generation]:
        await engine.load(policy, 0)
        return await run_together([episode(i, prompt) for i, prompt in enumerate(prompts)])

    return run(all_of_them())


def wait_for(device: str) -> None:
    """Wait until the device has finished all its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def median(values: Sequence[float]) -> float | None:
    """Return the median, or None without values."""
    return statistics.median(values) if values else None


def card_of(device: str, rate: float | None) -> Card:
    """Return this device's entry in the roofline model's table, or the H100's entry.

    rate: measured copy rate [bytes/s], replaces the entry's bandwidth if it is given
    """
    if torch.device(device).type != "cuda":
        card = CARDS["cpu"]
    else:
        name = torch.cuda.get_device_name().lower()
        card = next((own for key, own in CARDS.items() if key in name), CARDS["h100"])
    return card._replace(bandwidth=rate) if rate else card
