"""vLLM's request for one completion, and its answer. Both are the same in this process and over
HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlkit.errors import ConfigError
from rlkit.types import Generation, Policy, SamplingParams

# vLLM raises a temperature between 0 and COLDEST, and refuses a temperature above HOTTEST.
COLDEST = 0.01
HOTTEST = 2.0
UNUSED = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def check_reply(params: SamplingParams) -> None:
    """Raise ConfigError for settings that vLLM cannot sample."""
    if params.temperature and not COLDEST <= params.temperature <= HOTTEST:
        raise ConfigError(
            f"generation.temperature={params.temperature}: vLLM takes 0 or from {COLDEST} to"
            f" {HOTTEST}"
        )
    if params.max_thinking_tokens is not None:
        raise ConfigError(
            "generation.max_thinking_tokens: vLLM keeps no such budget; use generation=cached, or"
            " set it to null"
        )


def request(
    policy: Policy, max_length: int, prompt_ids: Sequence[int], seed: int, params: SamplingParams
) -> dict[str, Any]:
    """Make the arguments of vLLM's SamplingParams. Every argument is set, so no default of vLLM or
    of the model has an effect.

    Args:
      max_length: vLLM's limit for the tokens of a prompt and its completion together.
    Raises: ConfigError if the prompt leaves no token to sample.
    """
    left = min(policy.context_length, max_length) - len(prompt_ids)
    if left < 1:
        raise ConfigError(
            f"generation=vllm: a context has {len(prompt_ids)} tokens, and vLLM was started for"
            f" {max_length} with the reply; raise its max_model_len"
        )
    given = {
        "temperature": float(params.temperature),
        "top_p": float(params.top_p),
        "top_k": params.top_k,
        "seed": seed,
    }
    ends = {
        "ignore_eos": True,
        "stop_token_ids": list(policy.eos_token_ids),
        "max_tokens": min(params.max_new_tokens, left),
    }
    return given | ends | UNUSED


def make_generation(
    policy: Policy, token_ids: Sequence[int], logprobs: Sequence[float]
) -> Generation:
    """Make a completion from vLLM's answer. The completion ends with an end-of-sequence id
    ("stop"), or it was truncated ("length")."""
    ended = bool(token_ids) and token_ids[-1] in policy.eos_token_ids
    return Generation(tuple(token_ids), tuple(logprobs), "stop" if ended else "length")
