"""Models and generation: loading, templates, replies and their log-probs and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import rlkit.functional as F
from rlkit.engines import Batched, Transformers
from rlkit.engines.transformers import complete
from rlkit.environments import split_thinking
from rlkit.environments.prompts import with_system_prompt
from rlkit.models import (
    LoRA,
    ValueHead,
    add_lora,
    decode,
    encode_prompt,
    forward_logprobs,
    make_policy,
    pack,
    pretrained_model,
    pretrained_tokenizer,
)
from rlkit.notebook.data import Conversation, GenerationConfig, Prompt, TextGeneration, as_messages, as_prompt
from rlkit.notebook.tokens import compute_logprobs_for_tokens, rows_of
from rlkit.types import Engine, Generation, Message, Messages, Policy, SamplingParams, Task

TemplateFn = Callable[..., str]
Generator = Callable[..., TextGeneration]

# ---------------------------------------------------------------------------------------------------------- loading


def load_model(
    model_id: str | nn.Module,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    device_map: str | None = None,
    use_lora: bool = False,
    lora_rank: int = 16,
    lora_alpha: int = 32,
) -> Any:
    """A causal LM in evaluation mode; the default model_loader. Raises ConfigError if there is no such model.

    Args:
      model_id: "tiny", a local folder or a hub id; or a model that is already built.
      dtype: of the weights; "auto" is the one they were saved in. Whole weights in bfloat16 do not move at the learning rates of RL.
      device_map: a device such as "cuda"; None: the CPU, or where a built model is.
      use_lora: adapters of `lora_rank` and `lora_alpha` on all projections, in float32, without dropout.
    """
    model: Any = model_id
    if isinstance(model_id, str):
        model = pretrained_model(model_id, dtype=dtype if dtype == "auto" else getattr(torch, dtype))
    if device_map is not None:
        model.to(device_map)
    return (add_lora(model, LoRA(lora_rank, lora_alpha)) if use_lora else model).eval()


def load_tokenizer(model_id: str) -> Any:
    """The tokenizer of a model: it pads on the left, with the end token where it has none for padding. Raises ConfigError."""
    tokenizer = pretrained_tokenizer(model_id)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


# -------------------------------------------------------------------------------------------------------- templates


def format_prompt(
    prompt: Prompt, tokenizer: Any, use_chat_template: bool = True, system_prompt: str | None = None, enable_thinking: bool | None = None
) -> str:
    """A prompt as the text that a model reads; the default template_fn. Encode it with `add_special_tokens=False`.

    Users may forge a turn in such a text, but not in a prompt that is given to `generate_text`, which encodes their words apart.
    `use_chat_template=False` joins the contents by empty lines, without roles; `enable_thinking=None` leaves the template's default.
    """
    messages = with_system_prompt(as_messages(prompt), system_prompt)
    if not use_chat_template:
        return "\n\n".join(m["content"] for m in messages)
    thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **thinking))


def parse_thinking(reply: str | Sequence[int] | Tensor, tokenizer: Any = None) -> tuple[str, str]:
    """Thinking and content of a reply, split at its last `</think>`; the tags are in neither. Token ids need the tokenizer.

    >>> parse_thinking("<think>2 + 2</think>4")
    ('2 + 2', '4')
    """
    if not isinstance(reply, str):
        ids = torch.as_tensor(reply).tolist()
        ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
        while ids and ids[-1] in ends:
            ids.pop()
        reply = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    thinking, content, _ = split_thinking(reply)
    return thinking, content


def create_batch(prompts: Prompt | Sequence[Prompt], n: int = 1, system_prompt: str | None = None) -> list[Conversation]:
    """n parallel chats of each prompt, side by side: every one its own list."""
    return [
        [Message(**m) for m in with_system_prompt(as_messages(prompt), system_prompt)] for prompt in _several(prompts) for _ in range(n)
    ]


def batch_history(
    chats: Sequence[Conversation], replies: Sequence[TextGeneration | str], prompts: Sequence[str] | None = None
) -> list[Conversation]:
    """New chats: each with its reply, thinking left out, and with the user's next message where `prompts` has them."""
    texts = [reply if isinstance(reply, str) else reply.text for reply in replies]
    answers: list[Message] = [{"role": "assistant", "content": parse_thinking(text)[1]} for text in texts]
    following: list[Conversation] = [[] for _ in chats]
    if prompts is not None:
        following = [[{"role": "user", "content": text}] for text in prompts]
    return [[*chat, answer, *user] for chat, answer, user in zip(chats, answers, following, strict=True)]


def generate_templates(chats: Sequence[Prompt], tokenizer: Any, enable_thinking: bool | None = None) -> list[str]:
    """What a model reads of each chat: `format_prompt`."""
    return [format_prompt(chat, tokenizer, enable_thinking=enable_thinking) for chat in chats]


def policy_of(
    model: Any,
    tokenizer: Any,
    *,
    template_fn: TemplateFn | None = None,
    use_chat_template: bool = True,
    enable_thinking: bool | None = None,
) -> Policy:
    """A policy whose prompts are written by the chat template, or by a template_fn.

    A template_fn gets placeholders for the contents, which are encoded apart as plain text, so that no content forges a turn.
    """
    if template_fn is None and use_chat_template:
        return make_policy(model, tokenizer, enable_thinking=enable_thinking)
    write = template_fn or format_prompt

    def render(messages: Messages, tools: Sequence[Mapping[str, Any]]) -> str:
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        rest = list(messages if system is None else messages[1:])
        text = write(as_prompt(rest), tokenizer, use_chat_template, system, enable_thinking)
        if any(m["role"] == "user" and m["content"] not in text for m in rest):
            raise ValueError("template_fn left out or changed a prompt's text, which it has to write as it gets it")
        return text

    return make_policy(model, tokenizer, render=render)


# ------------------------------------------------------------------------------------------------------- generation


def generate_text(
    model: Any,
    tokenizer: Any,
    prompt: Prompt | Sequence[Prompt],
    config: GenerationConfig = GenerationConfig(),  # noqa: B008  (immutable)
    compute_logprobs: bool = True,
    *,
    num_return_sequences: int = 1,
    system_prompt: str | None = None,
    template_fn: TemplateFn | None = None,
    use_chat_template: bool = True,
    seed: int = 0,
) -> Any:
    """Replies to one prompt or to many, all in one batch; the default generator. The notebooks call it generate.

    Args:
      model, tokenizer: a causal LM, also under PEFT, and its fast tokenizer. The model's mode and `use_cache` are put back.
      prompt: a text, a list of messages, a Task, or a list of these.
      compute_logprobs: False leaves `logprobs` None. num_return_sequences: replies to each prompt.
      seed: decides every token, with the position of the prompt and of the sample, whatever the batch.
    Returns: a TextGeneration for one reply to one prompt; else a list, prompt by prompt, replies to a prompt side by side.
    Raises: ValueError for a prompt as long as the model's context: none is cut.
    """
    template: dict[str, Any] = {"template_fn": template_fn, "use_chat_template": use_chat_template}
    policy, prompts = policy_of(model, tokenizer, enable_thinking=config.enable_thinking, **template), _several(prompt)
    contexts = [encode_prompt(policy.renderer, with_system_prompt(as_messages(p), system_prompt)) for p in prompts]
    for i, context in enumerate(contexts):
        if len(context) >= policy.context_length:
            raise ValueError(f"prompt {i} has {len(context)} tokens, the model's context {policy.context_length}; shorten it, none is cut")
    places = [(i, j) for i in range(len(prompts)) for j in range(num_return_sequences)]
    seeds = [F.mix(F.mix(seed, 0, i, j), 0) for i, j in places]  # as the first step of `collect`
    replies = complete(policy, [contexts[i] for i, _ in places], seeds, config.params, use_cache=config.use_cache)
    found = [_in_words(policy, reply, config, compute_logprobs) for reply in replies]
    return found[0] if len(found) == 1 and not _is_many(prompt) else found


def _in_words(policy: Policy, reply: Generation, config: GenerationConfig, compute_logprobs: bool) -> TextGeneration:
    text = decode(policy.renderer, reply.token_ids[: -1 if reply.finish_reason == "stop" else None])
    thinking, content, closed = split_thinking(text)
    metadata = {"finish_reason": reply.finish_reason, "thinking": thinking, "thinking_closed": closed}
    logprobs = reply.logprobs if compute_logprobs else None
    valid = (True,) * len(reply.token_ids)
    return TextGeneration(content if config.parse_thinking else text, reply.token_ids, logprobs, valid, metadata)


def _is_many(prompt: Prompt | Sequence[Prompt]) -> bool:
    return not isinstance(prompt, str | Task) and not (len(prompt) > 0 and isinstance(prompt[0], Mapping))


def _several(prompt: Prompt | Sequence[Prompt]) -> list[Prompt]:
    return list(prompt) if _is_many(prompt) else [prompt]  # type: ignore[arg-type, list-item]


def engine_of(generate: Any, config: GenerationConfig) -> Engine:
    """The engine that is meant: one that is made, or a plain function as `rlkit.engines.Batched` takes it. None: `Transformers`."""
    if generate is None:
        return Transformers(use_cache=config.use_cache)
    return generate if hasattr(generate, "load") else Batched(generate)


class Asked(NamedTuple):
    """What a generator is asked for one reply, as the engine of that reply."""

    generator: Generator
    policy: Policy
    prompt: Prompt
    config: GenerationConfig

    async def generate(self, key: int, prompt_ids: Sequence[int], seed: int, params: SamplingParams) -> Generation:
        """The generator's reply. It has a seed of its own, if any."""
        given = self.generator(self.policy.model, self.policy.renderer.tokenizer, self.prompt, self.config, True)
        return _sampled(self.policy, prompt_ids, given, params.temperature or 1.0)

    def release(self, key: int) -> None:
        """Nothing is kept."""


def _sampled(policy: Policy, context: Sequence[int], given: TextGeneration, temperature: float) -> Generation:
    """What a generator gave as the core keeps it: up to the first end token, scored by the model where log-probs are missing."""
    ids = [int(token) for token in given.token_ids]
    valid = [True] * len(ids) if given.valid_mask is None else [bool(v) for v in given.valid_mask]
    length = valid.index(False) if False in valid else len(ids)
    length = next((i + 1 for i, token in enumerate(ids[:length]) if token in policy.eos_token_ids), length)
    if length == 0:
        raise ValueError("generator gave a reply without a token; the end token belongs to the reply")
    if given.logprobs is None:
        with torch.no_grad():
            found = compute_logprobs_for_tokens(
                policy.model, torch.tensor([list(context)]), None, torch.tensor([ids[:length]]), temperature=temperature
            )
        logprobs = found[0].tolist()
    else:
        logprobs = [float(logprob) for logprob in given.logprobs[:length]]
    ended = ids[length - 1] in policy.eos_token_ids
    return Generation(tuple(ids[:length]), tuple(logprobs), given.metadata.get("finish_reason", "stop" if ended else "length"))


# ------------------------------------------------------------------------------------------------ tokens and values


def generate_with_values(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    critic: nn.Module,
    config: GenerationConfig = GenerationConfig(),  # noqa: B008  (immutable)
    **hooks: Any,
) -> tuple[TextGeneration, Tensor]:
    """A reply, and the critic's value of the state before each of its tokens [T], a constant. Hooks as in `generate_text`.

    The critic is one of `make_critic(model, model="head")`, or a `ValueHead` on the model's last hidden states.
    """
    reply = generate_text(model, tokenizer, prompt, config, **hooks)
    template = {name: hooks[name] for name in ("template_fn", "use_chat_template") if name in hooks}
    policy = policy_of(model, tokenizer, enable_thinking=config.enable_thinking, **template)
    context = encode_prompt(policy.renderer, with_system_prompt(as_messages(prompt), hooks.get("system_prompt")))
    device = next(model.parameters()).device
    ids, mask = rows_of(torch.tensor([context]), None, torch.tensor([reply.token_ids]))
    judge: Any = (lambda hidden, packed: critic(hidden)) if isinstance(critic, ValueHead) else critic
    with torch.no_grad():
        values = forward_logprobs(model, pack(ids.to(device), mask.to(device)), critic=judge).values
    assert values is not None
    return reply, values[mask.to(device)]
