"""Task sets of the package `verifiers` (0.4 and later): read their rows as tasks, and score them by
their own rewards."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Mapping
from typing import Any

from rlkit.errors import ConfigError, DataError, install
from rlkit.rewards import no_gold, reads_fields
from rlkit.tasks.splits import check_split, cut, order_tasks
from rlkit.types import Message, Rollout, Task, ranges, reaches, safe

STOPS = {
    "steps": "max_turns",
    "length": "max_output_tokens",
    "context": "max_total_tokens",
}  # in the words of verifiers


@reaches(id="import", config="import")
@safe("split", "environment")
@ranges(max_samples=(1, None))
def verifiers(
    *,
    id: str,
    split: str,
    seed: int,
    config: Mapping[str, Any] = {},
    validation: float = 0.1,
    held_out: float = 0.1,
    limit: int | None = None,
    max_samples: int | None = None,
    environment: str = "single_turn",
) -> list[Task]:
    """Read a task set's rows for the reward `verifiers_reward`. Each must be a prompt, a reply and
    rewards of the conversation.

    Args:
      id: of an installed task set, in the form of `verifiers`.
      split: train, validation or test. A task set has no splits of its own. "validation" and "test"
        are shares, and "train" leaves them out.
      seed: of the order. It moves no row from one split to another.
      config: for the task set's own config.
      validation, held_out: these shares, at least 0 and together below 1. A task's split is decided
        by the hash of the task's prompt, or of its `key` if the task set defines one (the package's
        own key changes with a row's position).
      limit: rows read at most; a task set without end needs it. None reads all.
      max_samples: number of tasks after the shuffle; None for all.
      environment: its name in every task.
    Returns: tasks called ID/SPLIT/INDEX. `metadata["verifiers"]` holds the task set's id, its
      config and the row.
    Raises: ConfigError if the package, the task set or a value of its config does not exist.
      DataError if the task set needs a harness of `verifiers`: a container, tool servers, hooks or
      rewards that ask for a runtime, a user of its own, images.
    """
    check_split(split, validation, held_out)
    taskset = _taskset(id, config)
    if not taskset.bounded and limit is None:
        raise ConfigError(
            f"task.id={id} never ends; say with task.limit how many of its rows are read"
        )
    rows = list(itertools.islice(taskset, limit))
    kept = cut(
        rows, _content, split, f"rows of task.id={id}", validation=validation, held_out=held_out
    )
    tasks = [_task(id, config, split, environment, row) for row in kept]
    return order_tasks(tasks, seed=seed, max_samples=max_samples, source=id)


def _taskset(id: str, config: Mapping[str, Any]) -> Any:
    try:
        from verifiers.v1.utils import loaders
    except ImportError as error:
        raise ConfigError(
            f"task=verifiers needs the package: {install('verifiers')} ({error})"
        ) from error
    try:
        taskset = loaders.load_taskset(
            loaders.taskset_config_type(id).model_validate({**config, "id": id})
        )
        own = loaders.environment_class(id).__name__
    except Exception as error:  # any error at import or construction is the user's to mend
        raise ConfigError(
            f"task.id={id}, task.config={dict(config)}: {type(error).__name__}:"
            f" {' '.join(str(error).split()):.300}"
        ) from error
    if own != "SingleAgentEnv":
        raise DataError(
            f"task.id={id} plays in an environment of its own ({own}), which rlkit does not run;"
            " choose a task set without one"
        )
    return taskset


def _content(row: Any) -> Any:
    """The content whose hash decides the task's split."""
    from verifiers.v1 import Task as Base

    return (
        row.key
        if type(row).key is not Base.key
        else row.data.model_dump(mode="json", include={"prompt"})
    )


def _task(id: str, config: Mapping[str, Any], split: str, environment: str, row: Any) -> Task:
    where = f"task.id={id}, row {row.data.idx}"
    needs = _list_other_needs(row)
    if needs:
        raise DataError(
            f"{where}: it needs {', '.join(needs)}, which only a harness of verifiers gives; choose"
            " another task set"
        )
    return Task(
        id=f"{id}/{split}/{row.data.idx}",
        messages=_messages(where, row.data),
        reward="verifiers",
        environment=environment,
        metadata={
            "verifiers": {
                "id": id,
                "config": dict(config),
                "data": row.data.model_dump(mode="json"),
            }
        },
    )


def _list_other_needs(row: Any) -> list[str]:
    """List a task's needs beyond a conversation."""
    from verifiers.v1 import Task as Base

    hooks = [*row.hooks("reward"), *row.hooks("metric")]
    asking = [
        fn.__name__
        for fn in hooks
        for p in inspect.signature(fn).parameters.values()
        if (p.name, p.default) == ("runtime", p.empty)
    ]
    needs = {
        "a container": row.NEEDS_CONTAINER or row.data.image is not None,
        "tool servers": bool(type(row).toolsets(row.config)),
        "a setup": type(row).setup is not Base.setup,
        "a finalize": type(row).finalize is not Base.finalize,
        f"a runtime for {', '.join(asking)}": bool(asking),
        "a judge": bool(row.config.judges),
        "a user who opens the conversation": row.data.prompt is None,
    }
    return [what for what, needed in needs.items() if needed]


def _messages(where: str, data: Any) -> tuple[Message, ...]:
    """The system prompt and the prompt as chat messages."""
    said = [("system", data.system_prompt)] if data.system_prompt else []
    said += (
        [("user", data.prompt)]
        if isinstance(data.prompt, str)
        else [(message.role, message.content) for message in data.prompt]
    )
    if any(role == "tool" or not isinstance(content, str) for role, content in said):
        raise DataError(
            f"{where}: a message of its prompt is no text of system, user or assistant; choose"
            " another task set"
        )
    return tuple({"role": role, "content": content} for role, content in said)


# ------------------------------------------------------------------------------------- the reward


@no_gold
@reads_fields("verifiers")
async def verifiers_reward(rollout: Rollout) -> float:
    """Compute the weighted sum of the rewards of the verifiers task from which the row was made.
    These rewards read the episode as a trace.

    Raises: ConfigError for a row of no such task set, or if the package is not installed; every
    error of the task set's rewards.
    """
    row = rollout.task.metadata.get("verifiers")
    if row is None:
        raise ConfigError(
            f"task {rollout.task.id!r} has no row of a task set of verifiers; use task=verifiers,"
            " or another reward"
        )
    task = make_task(row)
    trace = record_trace(task, rollout)
    await task.score(trace)
    return float(trace.reward)


def make_task(row: Mapping[str, Any]) -> Any:
    """Make the verifiers task of a row with id, config and data."""
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


def record_trace(task: Any, rollout: Rollout) -> Any:
    """Record the episode as verifiers does: a chain of messages, with the replies marked as
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
    """Turn a message of rlkit into one of verifiers."""
    content = message.get("content", "")
    if message["role"] == "assistant":
        calls = [
            v1.ToolCall(
                id=call["id"],
                name=call["function"]["name"],
                arguments=json.dumps(call["function"]["arguments"]),
            )
            for call in message.get("tool_calls") or ()
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
