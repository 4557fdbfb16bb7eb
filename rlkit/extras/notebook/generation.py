"""Load models, format prompts and sample replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlkit import types
from rlkit.engines import Batched, Cached
from rlkit.environments import single_turn, split_reply
from rlkit.episodes import collect
from rlkit.extras.notebook.data import Generation, GenerationConfig, Hook, Prompt, as_task
from rlkit.extras.notebook.views import SHOWN, view
from rlkit.models import (
    LoRA,
    add_lora,
    decode,
    forward_logprobs,
    make_policy,
    pack,
    pretrained_model,
    pretrained_tokenizer,
)
from rlkit.models.chat import make_renderer
from rlkit.types import Engine, Messages, Policy, SamplingParams

# for readers of the document; the functions here read the id from the tokenizer
QWEN3_THINK_END_TOKEN = 151668


def load_model(
    model_id: str | nn.Module,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "bfloat16",
    device_map: str | None = "auto",
    use_lora: bool = False,
    lora_rank: int = 16,
    lora_alpha: int = 32,
    model_loader: Hook = None,
) -> Any:
    """Load a causal LM in evaluation mode. model_id is "tiny", a local folder, a hub id, or a model
    object. With use_lora, the model gets adapters in float32."""
    if model_loader is not None:
        return model_loader(model_id, dtype, device_map, use_lora, lora_rank, lora_alpha)
    model: Any = model_id
    if isinstance(model_id, str):
        model = pretrained_model(
            model_id, dtype=dtype if dtype == "auto" else getattr(torch, dtype)
        )
    if device_map == "auto":
        device_map = "cuda" if torch.cuda.is_available() else "cpu"
    if device_map is not None:
        model.to(device_map)
    return (add_lora(model, LoRA(lora_rank, lora_alpha)) if use_lora else model).eval()


def load_tokenizer(model_id: str, padding_side: str = "left") -> Any:
    """Load the tokenizer of a model. If it has no padding token, the end token is used. Raises:
    ConfigError if the model has no tokenizer."""
    tokenizer = pretrained_tokenizer(model_id)
    tokenizer.padding_side = padding_side
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def format_prompt(
    prompt: str,
    tokenizer: Any,
    use_chat_template: bool = False,
    system_prompt: str | None = None,
    enable_thinking: bool = False,
    template_fn: Hook = None,
) -> str:
    """Write the text that the model reads. Without the chat template, it is the prompt itself, and
    the system prompt is ignored."""
    if template_fn is not None:
        return template_fn(prompt, tokenizer, use_chat_template, system_prompt, enable_thinking)
    if not use_chat_template:
        return prompt
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages.append({"role": "user", "content": prompt})
    if not tokenizer.chat_template:
        return (
            "".join(f"{m['role'].capitalize()}: {m['content']}\n\n" for m in messages)
            + "Assistant:"
        )
    return str(
        tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=enable_thinking
        )
    )


def parse_thinking(token_ids: Sequence[int] | Tensor, tokenizer: Any) -> tuple[str, str]:
    """Split a reply's ids at the last `</think>`. Return its thinking and its response, both
    without the tags and the end token."""
    ids = torch.as_tensor(token_ids).tolist()
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    while ids and ids[-1] in ends:
        ids.pop()
    thinking, response, _ = split_reply(make_renderer(tokenizer, render=_raw).thinking, ids)
    return thinking.strip(), response.strip()


def _raw(messages: Messages, tools: Sequence[Mapping[str, Any]]) -> str:
    """Join the contents of the messages as they are, without roles."""
    return "\n\n".join(m["content"] for m in messages)


def wrap_policy(
    model: Any, tokenizer: Any, *, use_chat_template: bool, enable_thinking: bool | None = None
) -> Policy:
    """Make a policy. With use_chat_template, it reads a prompt through the chat template, and text
    in a prompt never becomes a control token. Otherwise it reads a prompt as it is, with the
    control tokens in it, for example from `format_prompt`."""
    if use_chat_template:
        return make_policy(model, tokenizer, enable_thinking=enable_thinking)
    policy = make_policy(model, tokenizer, render=_raw)
    return policy._replace(renderer=policy.renderer._replace(plain=Verbatim(tokenizer)))


def read_prompts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    config: GenerationConfig,
    use_chat_template: bool = False,
    template_fn: Hook = None,
) -> tuple[Policy, list[types.Task]]:
    """Return the policy that reads these prompts, and a task for each. With a template_fn, the
    policy reads the texts that it writes, and rollouts show the prompts that it was given. Raises:
    ValueError if a template_fn is given and a prompt is no text."""
    texts = all(isinstance(prompt, str) for prompt in prompts)
    template = use_chat_template or not texts
    thinks = config.enable_thinking
    tasks = [as_task(prompt, i) for i, prompt in enumerate(prompts)]
    if template_fn is None:
        policy = wrap_policy(model, tokenizer, use_chat_template=template, enable_thinking=thinks)
        return policy, tasks
    if not texts:
        raise ValueError("template_fn writes the text of a prompt; give all prompts as texts")
    written = [
        task._replace(
            messages=as_task(template_fn(prompt, tokenizer, template, None, thinks), 0).messages,
            metadata={SHOWN: prompt},
        )
        for task, prompt in zip(tasks, prompts, strict=True)
    ]
    return wrap_policy(model, tokenizer, use_chat_template=False), written


class Verbatim:
    """Encode a text with the control tokens in it. If the tokenizer has a token for the start of a
    text, this token comes first."""

    def __init__(self, tokenizer: Any):
        self.backend = tokenizer.backend_tokenizer
        self.begins = tokenizer.bos_token

    def encode(self, text: str, **_: Any) -> Any:
        return self.backend.encode(
            text, add_special_tokens=not (self.begins and text.startswith(self.begins))
        )

    def encode_batch(self, texts: Sequence[str], **_: Any) -> list[Any]:
        return [self.encode(text) for text in texts]


def choose_engine(
    generator: Callable[..., Generation] | None, config: GenerationConfig, engine: Any = None
) -> Engine:
    """Choose the sampling engine: an engine around the generator, if there is one; or else the
    given engine, or rlkit's fast engine."""
    return engine or Cached() if generator is None else Batched(_asked(generator, config))


def _asked(
    generator: Callable[..., Generation], config: GenerationConfig
) -> Callable[..., list[types.Generation]]:
    """Turn a generator into the core's function of a batch. The generator is called once per
    prompt."""

    def complete(
        policy: Policy, contexts: list[Any], seeds: list[int], params: SamplingParams
    ) -> list[types.Generation]:
        asked = [(context, decode(policy.renderer, context)) for context in contexts]
        model = policy.model
        tokenizer = policy.renderer.tokenizer
        return [
            _sampled(policy, context, generator(model, tokenizer, text, config, True), params)
            for context, text in asked
        ]

    return complete


def _sampled(
    policy: Policy, context: Sequence[int], given: Generation, params: SamplingParams
) -> types.Generation:
    """Turn a generator's reply into the core's form. Tokens after the first end token are left out,
    and the model computes the log-probs of the remaining tokens."""
    ids = torch.as_tensor(given.token_ids).tolist()
    ends = [i for i, token in enumerate(ids) if token in policy.eos_token_ids]
    reply = ids[: ends[0] + 1 if ends else int(given.valid_mask.sum())]
    with torch.no_grad():
        given_ids = torch.tensor([list(context)]), None, torch.tensor([reply])
        found = compute_logprobs_for_tokens(
            policy.model, *given_ids, temperature=params.temperature or 1.0
        )[0]
    return types.Generation(tuple(reply), tuple(found.tolist()), "stop" if ends else "length")


def choose_seed(seed: int | None) -> int:
    """Return the given seed, or else a seed from torch's generator. So two calls give different
    seeds, and torch.manual_seed repeats them."""
    return int(torch.randint(1 << 62, ())) if seed is None else seed


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    config: GenerationConfig = GenerationConfig(),  # noqa: B008  (immutable)
    compute_logprobs: bool = False,
    generator: Callable[..., Generation] | None = None,
    *,
    engine: Any = None,
    seed: int | None = None,
) -> Generation:
    """Sample a reply to a text. The model reads the text as it is. Raises: ValueError if the prompt
    fills the model's context.

    compute_logprobs: whether to return log-probs, at the sampler's temperature, with gradient if
    gradients are enabled. seed: seed of the reply; None takes a seed from torch.
    """
    if generator is not None:
        return generator(model, tokenizer, prompt, config, compute_logprobs)
    policy = wrap_policy(model, tokenizer, use_chat_template=False)
    episode = played(
        policy,
        [prompt],
        config,
        choose_engine(None, config, engine),
        single_turn(),
        seed=choose_seed(seed),
    )[0]
    step = episode.steps[-1]
    parsed = config.enable_thinking and config.parse_thinking
    text = (
        step.content
        if parsed
        else decode(policy.renderer, said(policy, step), control_tokens=False)
    )
    logprobs = scores(policy.model, [episode], config)[0] if compute_logprobs else None
    return view(episode).generation._replace(text=text, logprobs=logprobs)


def played(
    policy: Policy,
    prompts: Sequence[Prompt],
    config: GenerationConfig,
    engine: Engine,
    environment: Any,
    *,
    seed: int,
) -> list[types.Rollout]:
    """Play an episode of each prompt. Raises: ValueError if a prompt fills the model's context."""
    tasks = [as_task(prompt, i) for i, prompt in enumerate(prompts)]
    return begun(
        policy,
        collect(
            policy,
            tasks,
            engine=engine,
            environment=environment,
            seed=seed,
            **config.params._asdict(),
        ),
    )


def begun(policy: Policy, episodes: list[types.Rollout]) -> list[types.Rollout]:
    """Return the episodes, which must all have a reply. Raises: ValueError if a prompt left no room
    for a reply."""
    full = [episode.group for episode in episodes if not episode.steps]
    if full:
        raise ValueError(
            f"prompt {full[0]} fills the model's context of {policy.context_length} tokens; shorten"
            " it, none is cut"
        )
    return episodes


def said(policy: Policy, step: types.Step) -> Sequence[int]:
    """Return the ids of a reply without its end token."""
    return (
        step.response_ids[:-1]
        if step.response_ids[-1] in policy.eos_token_ids
        else step.response_ids
    )


def scores(
    model: nn.Module, episodes: Sequence[types.Rollout], config: GenerationConfig
) -> list[Tensor]:
    """Compute the model's log-probs [T] of the last reply of each episode, at the sampler's
    temperature."""
    found = []
    was_training = model.training
    model.eval()  # without dropout, because the sampler had none
    for episode, step in ((episode, episode.steps[-1]) for episode in episodes):
        ids = torch.tensor([episode.context(-1)]), None, torch.tensor([step.response_ids])
        scored = compute_logprobs_for_tokens(
            model, *ids, temperature=config.params.temperature or 1.0
        )[0]
        found.append(scored[torch.tensor(step.sampled, device=scored.device)])
    model.train(was_training)
    return found


def compute_logprobs_for_tokens(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor | None,
    generated_ids: Tensor,
    pad_token_id: int | None = None,
    micro_batch_size: int = 8,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """Compute the log-probs [B, T] of generated_ids [B, T] in nats, float32, with gradient.
    prompt_mask [B, P] is 0 on padding."""
    ids, mask = _rows(prompt_ids, prompt_mask, generated_ids)
    device = next(model.parameters()).device
    found = [
        forward_logprobs(
            model, pack(part.to(device), sampled.to(device)), temperature=temperature
        ).logprobs[sampled.to(device)]
        for part, sampled in zip(
            ids.split(micro_batch_size), mask.split(micro_batch_size), strict=True
        )
    ]
    return torch.cat(found).reshape(generated_ids.shape)


def _rows(
    prompt_ids: Tensor, prompt_mask: Tensor | None, generated_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Join each prompt and its reply without the padding between them, and return the rows with a
    mask of the replies. So positions count only real tokens."""
    real = (
        torch.ones_like(prompt_ids, dtype=torch.bool) if prompt_mask is None else prompt_mask.bool()
    )
    rows = [
        torch.cat([p[m], g.to(p.device)])
        for p, m, g in zip(prompt_ids, real, generated_ids, strict=True)
    ]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    at = torch.arange(ids.shape[1], device=ids.device)
    ends = torch.tensor([len(row) for row in rows], device=ids.device)[:, None]
    return ids, (at < ends) & (at >= ends - generated_ids.shape[1])
