"""Provide the chat and tool functions of the chat and PPO notebook. They use `collect` and
`run_agent`, so they sample as training does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from rlkit.commands.agent import convert_to_dict, make_core_parser, read_call, run_agent
from rlkit.engines import Cached
from rlkit.environments import calculator, execute, hermes, single_turn, split_thinking
from rlkit.episodes import collect
from rlkit.extras.notebook.data import as_task
from rlkit.extras.notebook.generation import begun, load_model, load_tokenizer, parse_thinking, said
from rlkit.models import decode, make_policy
from rlkit.system.loops import run
from rlkit.types import Engine, Message, Messages, Rollout, ToolCall

TEMPERATURE = 0.6  # the notebook's sampling temperature
Chat = list[Message]


class LLMGenerator:
    """Reply to chats in batches, with the thinking separated from the content. The same calls in
    the same order give the same replies."""

    def __init__(
        self, model_name: Any, tokenizer: Any = None, *, engine: Engine | None = None, seed: int = 0
    ):
        named = isinstance(model_name, str)
        self.model = load_model(
            model_name,
            "auto" if torch.cuda.is_available() else "float32",
            "auto" if named else None,
        )
        self.tokenizer = tokenizer or load_tokenizer(
            model_name if named else self.model.name_or_path
        )
        self.engine = engine or Cached()
        self.seed = seed
        self.temperature = TEMPERATURE
        # number of calls of `replies`; number of RL steps that have trained the weights
        self.calls = 0
        self.version = 0
        self.policies = {
            thinks: make_policy(self.model, self.tokenizer, enable_thinking=thinks)
            for thinks in (True, False)
        }
        self.policy = self.policies[True]
        ids: Any = self.policy.renderer.thinking.ids or (None, None)
        self.think_start_id, self.think_end_id = ids

    def generate(
        self,
        prompts: Any,
        max_new_tokens: int = 512,
        temperature: float | None = None,
        num_return_sequences: int = 1,
        enable_thinking: bool = True,
        return_thinking: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Return a reply as [thinking, content], or without `return_thinking` as one text with
        both. For several replies or several chats, return a list of replies. For both, return a
        list of lists.

        temperature: 0 is greedy; None: the generator's temperature, by default 0.6. kwargs: top_p,
        top_k, do_sample, max_thinking_tokens.
        """
        single = isinstance(prompts, str) or isinstance(prompts[0], Mapping)
        chats = [prompts] if single else prompts
        n = num_return_sequences
        policy = self.policies[enable_thinking]
        rollouts = begun(
            policy, self.replies(chats, max_new_tokens, temperature, n, enable_thinking, **kwargs)
        )
        steps = [r.steps[0] for r in rollouts]
        texts: list[Any] = [[step.thinking, step.content] for step in steps]
        if not return_thinking:
            texts = [decode(policy.renderer, said(policy, step)).strip() for step in steps]
        results = texts if n == 1 else [texts[i : i + n] for i in range(0, len(texts), n)]
        return results[0] if single else results

    def replies(
        self,
        chats: Sequence[Any],
        max_new_tokens: int,
        temperature: float | None = None,
        n: int = 1,
        thinks: bool = True,
        **kwargs: Any,
    ) -> list[Rollout]:
        """Return the replies as rollouts with one step, in the order of the chats. A rollout has no
        step if its chat leaves no room for a reply."""
        self.calls += 1
        tasks = [as_task(chat, i) for i, chat in enumerate(chats)]
        temperature = self.temperature if temperature is None else temperature
        kwargs |= {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature if kwargs.pop("do_sample", True) else 0.0,
        }
        kwargs |= {"group_size": n, "seed": self.seed, "step": self.calls, "version": self.version}
        return collect(
            self.policies[thinks], tasks, engine=self.engine, environment=single_turn(), **kwargs
        )

    def _parse_thinking(self, output_ids: Sequence[int]) -> tuple[str, str]:
        return parse_thinking(output_ids, self.tokenizer)


# ----------------------------------------------------------------------------------- lists of chats


def generate_templates(prompts: Sequence[str]) -> Chat:
    return [{"role": "user", "content": prompt} for prompt in prompts]


def batch_history(history: Messages, prompts: Sequence[str]) -> list[Chat]:
    """Return one chat per text: the history with this text as the next message. No two chats share
    a list or a message."""
    return [[*deepcopy(history), message] for message in generate_templates(prompts)]


def create_batch(
    bh: Sequence[Messages], num_gen: int, outputs: Any, include_thinking: bool = False
) -> tuple[list[Chat], list[Chat]]:
    """Return two lists of the chats with their replies, `num_gen` replies per chat. The first list
    has no thinking. With `include_thinking`, the second list has the thinking in
    `reasoning_content`. Without it, the second list has the chats without replies."""
    pairs = [
        (list(deepcopy(chat)), reply)
        for chat, own in zip(bh, outputs, strict=True)
        for reply in (own if num_gen > 1 else [own])
    ]
    without = [[*chat, Message(role="assistant", content=content)] for chat, (_, content) in pairs]
    if not include_thinking:
        return without, [deepcopy(chat) for chat, _ in pairs]
    return without, [
        [
            *deepcopy(chat),
            Message(role="assistant", content=content)
            | ({"reasoning_content": thinking} if thinking else {}),
        ]
        for chat, (thinking, content) in pairs
    ]


def res(
    generator: Any,
    batch: Sequence[Messages],
    max_new_tokens: int = 1000,
    num_return_sequences: int = 1,
) -> tuple[Any, ...]:
    """Return the replies of `generator.generate`, and the two lists of chats that `create_batch`
    makes with them, without and with thinking."""
    outputs = generator.generate(
        batch, max_new_tokens=max_new_tokens, num_return_sequences=num_return_sequences
    )
    return outputs, *create_batch(batch, num_return_sequences, outputs, include_thinking=True)


# -------------------------------------------------------------------------------------------- tools


def has_tool_call(response_text: str, *, tool_parser: Callable[..., Any] = hermes) -> bool:
    """Return whether a reply calls a tool, or tries to. An unreadable call counts. A call inside
    the thinking does not count."""
    return bool(parse_tool_calls(response_text, tool_parser=tool_parser))


def parse_tool_calls(
    response_text: str, *, tool_parser: Callable[..., Any] = hermes
) -> list[dict[str, Any]]:
    """Return the calls of a reply outside its thinking, as {id, type, function {name, arguments}}.
    An unreadable call has an `error`."""
    _, content, _ = split_thinking(response_text)
    return [convert_to_dict(call) for call in make_core_parser(tool_parser)(content)[1]]


def execute_tool_call(
    tool_call: Mapping[str, Any] | ToolCall, tool_implementations: Mapping[str, Callable[..., Any]]
) -> str:
    """Run a call and return its result as text. A result other than a string is written as JSON,
    and every failure as a sentence (`rlkit.environments.execute`)."""
    return run(execute(read_call(tool_call), tool_implementations)).content


class ToolUseLLM(LLMGenerator):
    """Run a model that calls tools in `<tool_call>` tags."""

    has_tool_call = staticmethod(has_tool_call)
    execute_tool_call = staticmethod(execute_tool_call)
    _parse_tool_calls = staticmethod(parse_tool_calls)

    def run(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]],
        tool_implementations: Mapping[str, Callable[..., Any]],
        max_turns: int = 10,
        max_new_tokens: int = 1024,
        temperature: float = TEMPERATURE,
    ) -> dict[str, Any]:
        """Hold a conversation with tools (`run_agent`). Return messages, final_response,
        tool_calls, turns, and the rollout with its status."""
        limits: Any = {
            "max_turns": max_turns,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
        }
        answer = run_agent(
            messages,
            tools,
            tool_implementations,
            policy=self.policy,
            engine=self.engine,
            seed=self.seed,
            **limits,
        )
        self.seed += 1  # so the next conversation is sampled with another seed
        return answer._asdict()


# city → °F and °C
TEMPERATURES = {"San Francisco, CA": (65, 18), "New York, NY": (50, 10), "London, UK": (55, 13)}


def get_weather(location: str, unit: str = "fahrenheit") -> str:
    """Tell the weather of a city "City, STATE", as an example of a tool. It knows three cities and
    gives one answer for all others. It is always sunny."""
    fahrenheit, celsius = TEMPERATURES.get(location, (70, 21))
    degrees = f"{celsius}°C" if unit == "celsius" else f"{fahrenheit}°F"
    return f"The weather in {location} is {degrees} and sunny"


def calculate(expression: str) -> int | float | str:
    """Return the value of an arithmetic expression, or a text that says what is wrong with it.
    Nothing is evaluated as Python."""
    try:
        value = calculator(expression)
    except ValueError as error:
        return f"Error: {error}"
    return int(value) if value.lstrip("-").isdigit() else float(value)
