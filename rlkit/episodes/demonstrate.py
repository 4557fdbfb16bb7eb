"""Turn recorded conversations into episodes instead of playing them, as training data for
algorithm=sft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlkit.environments import find_environment
from rlkit.episodes.episode import read_opening
from rlkit.errors import DataError
from rlkit.models.chat import continuation, encode_prompt, encode_reply
from rlkit.types import (
    Environment,
    Message,
    Policy,
    Rollout,
    Step,
    Task,
    ToolCall,
    ToolResult,
    safe,
)

NAN = float("nan")


@safe("_")
def demonstrations(
    policy: Policy,
    tasks: Sequence[Task],
    environment: Environment | Callable[[Task], Environment],
    *,
    first: int = 0,
    **_: Any,
) -> list[Rollout]:
    """Return the conversation of each task as a scored episode. This function takes the place of
    `collect`. The replies count as sampled tokens, and the reward is 1.

    A reply is tokenised as the policy would sample it in the same context, with the end-of-turn
    token. Each context consists of the previous context, the reply, and the template's text between
    replies. No text in a message becomes a control token.

    Args:
      tasks: tasks with the whole conversation in `metadata["messages"]`
        (rlkit.tasks.conversations).
      environment: the environment of each task. The prompt lists the environment's tools. The
        environment plays no episode.
      first: number of the first group.
    Returns: one rollout per task. The sampler's log-probs are nan, because nothing was sampled.
    Raises: DataError if a task has no conversation, or if the conversation is longer than the
      model's context. TemplateError if the chat template writes a reply at another position than
      the policy would.
    """
    out = []
    for group, task in enumerate(tasks, first):
        if "messages" not in task.metadata:
            raise DataError(
                f"row {task.id}: holds no conversation to learn from; choose task=conversations, or"
                " another algorithm"
            )
        schemas = read_opening(task, find_environment(environment, task)).schemas
        steps = make_demonstration(policy, task.metadata["messages"], schemas)
        length = steps[-1].prompt_length + len(steps[-1].response_ids)
        if length > policy.context_length:
            raise DataError(
                f"row {task.id}: its conversation has {length} tokens, and the model's context is"
                f" {policy.context_length}; take the row out, or choose a model with a longer"
                " context (model.path)"
            )
        out.append(
            Rollout(
                task,
                steps,
                group=group,
                reward=1.0,
                rewards={"demonstration": 1.0},
                statuses={"demonstration": "ok"},
            )
        )
    return out


def make_demonstration(
    policy: Policy, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
) -> tuple[Step, ...]:
    """Turn a conversation into steps, one per reply. Messages after the last reply are left out."""
    steps: list[Step] = []
    new: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            new.append(message)
            continue
        if steps:
            last = steps[-1]
            kept = last.prompt_length + len(last.response_ids)
            ids = continuation(policy.renderer, new, last.response_ids[-1])
            texts = [m["content"] for m in new if m["role"] == "tool"]
            results = tuple(
                ToolResult(call.id, call.name, text, ok=True)
                for call, text in zip(last.tool_calls, texts, strict=False)
            )
            steps[-1] = last._replace(tool_results=results)
        else:
            kept = 0
            ids = encode_prompt(policy.renderer, new, tools)
        reply = tuple(encode_reply(policy.renderer, message))
        steps.append(
            Step(
                prompt=tuple(new),
                prompt_ids=tuple(ids),
                response_ids=reply,
                logprobs=(NAN,) * len(reply),
                finish_reason="tool" if message.get("tool_calls") else "stop",
                thinking=message.get("reasoning_content", ""),
                content=message["content"],
                tool_calls=tuple(
                    ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
                    for call in message.get("tool_calls", ())
                ),
                kept=kept,
            )
        )
        new = []
    return tuple(steps)
