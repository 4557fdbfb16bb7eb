"""The rewards that a task set of the package `verifiers` brings with its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlkit.errors import ConfigError, install
from rlkit.types import Message, Rollout

# in the words of verifiers
STOPS = {"steps": "max_turns", "length": "max_output_tokens", "context": "max_total_tokens"}


async def verifiers(rollout: Rollout) -> float:
    """The weighted sum of the rewards of the row's own task, of the episode as a trace.

    Raises: ConfigError for a row that is of no such task set, or where the package is not
      installed; what a reward raises is that of the task set.
    """
    row = rollout.task.metadata.get("verifiers")
    if row is None:
        raise ConfigError(
            f"task {rollout.task.id!r} has no row of a task set of verifiers; use task=verifiers,"
            " or another reward"
        )
    task = task_of(row)
    trace = trace_of(task, rollout)
    await task.score(trace)
    return float(trace.reward)


def task_of(row: Mapping[str, Any]) -> Any:
    """The task of verifiers that a row describes by id, config and data."""
    try:
        from verifiers.v1.utils import loaders
    except ImportError as error:
        raise ConfigError(
            f"reward verifiers needs the package: {install('verifiers')} ({error})"
        ) from error
    config = loaders.taskset_config_type(row["id"]).model_validate(
        {**row["config"], "id": row["id"]}
    )
    kind = loaders.task_type(row["id"])
    return kind(kind.data_type().model_validate(row["data"]), config.task)


def trace_of(task: Any, rollout: Rollout) -> Any:
    """The episode as verifiers records one: a chain of messages, of which the replies are marked as
    sampled."""
    from verifiers import v1
    from verifiers.v1.state import state_cls

    said = [_message(v1, message) for message in rollout.conversation]
    first = len(rollout.steps[0].prompt) if rollout.steps else 0
    nodes = [
        v1.MessageNode(
            parent=i - 1 if i else None,
            message=message,
            sampled=message.role == "assistant" and i >= first,
        )
        for i, message in enumerate(said)
    ]
    return v1.Trace(
        task=v1.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=v1.AgentInfo(config=v1.AgentConfig()),
        nodes=nodes,
        state=state_cls(type(task))(),
        is_completed=True,
        ok=True,
        stop_condition=STOPS.get(rollout.truncation, "agent_completed"),
    )


def _message(v1: Any, message: Message) -> Any:
    """One of rlkit's messages as one of verifiers'."""
    content = message.get("content", "")
    if message["role"] == "assistant":
        calls = [
            v1.ToolCall(
                id=call["id"],
                name=call["function"]["name"],
                arguments=json.dumps(call["function"]["arguments"]),
            )
            for call in message.get("tool_calls", [])
        ]
        return v1.AssistantMessage(
            content=content,
            reasoning_content=message.get("reasoning_content"),
            tool_calls=calls or None,
        )
    if message["role"] == "tool":
        return v1.ToolMessage(
            tool_call_id=message["tool_call_id"], content=content, name=message.get("name")
        )
    return (v1.SystemMessage if message["role"] == "system" else v1.UserMessage)(content=content)
