"""Rollouts as files: JSON lines for machines, plain text for people."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlkit.errors import DataError
from rlkit.types import Rollout, Step, Task, ToolCall, ToolResult


def save_rollouts(path: Path, rollouts: Sequence[Rollout]) -> None:
    """One JSON object a line, gzip without a time stamp: equal rollouts give equal bytes. The file appears whole or not at all."""
    text = "".join(json.dumps(to_dict(r), ensure_ascii=False) + "\n" for r in rollouts)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".tmp")
    part.write_bytes(gzip.compress(text.encode(errors="surrogatepass"), compresslevel=3, mtime=0))
    os.replace(part, path)


def load_rollouts(path: Path) -> list[Rollout]:
    """The rollouts of a file, equal to those saved. Raises DataError naming the file and the line that is damaged."""
    rollouts = []
    try:
        lines = gzip.decompress(path.read_bytes()).decode(errors="surrogatepass").split("\n")
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a file of rollouts ({error})") from error
    for number, line in enumerate(lines[:-1], start=1):
        try:
            rollouts.append(from_dict(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number}: not a rollout ({error})") from error
    return rollouts


def to_dict(rollout: Rollout) -> dict[str, Any]:
    """Plain types only, in the order of the fields."""
    steps = [
        step._asdict() | {"tool_calls": [c._asdict() for c in step.tool_calls], "tool_results": [r._asdict() for r in step.tool_results]}
        for step in rollout.steps
    ]
    return rollout._asdict() | {"task": rollout.task._asdict(), "steps": steps}


def from_dict(data: dict[str, Any]) -> Rollout:
    """The inverse of `to_dict` after a trip through JSON."""
    steps = tuple(
        Step(
            **s
            | {name: tuple(s[name]) for name in ("prompt", "prompt_ids", "response_ids", "logprobs")}
            | {"tool_calls": tuple(ToolCall(**c) for c in s["tool_calls"])}
            | {"tool_results": tuple(ToolResult(**r) for r in s["tool_results"])}
        )
        for s in data["steps"]
    )
    task = Task(**data["task"] | {"messages": tuple(data["task"]["messages"])})
    return Rollout(**data | {"task": task, "steps": steps})


def transcript(rollout: Rollout) -> str:
    """The conversation as Markdown that also reads well as plain text; text of the model is indented, never markup."""
    lines = [f"### {visible(rollout.task.id)} · sample {rollout.sample} · reward {rollout.reward} · {_ending(rollout)}", ""]
    for message in rollout.conversation:
        lines += [f"**{message['role']}**", ""]
        if thinking := message.get("reasoning_content"):
            lines += [_indent(f"(thinking) {thinking}"), ""]
        if content := message.get("content"):
            lines += [_indent(content), ""]
        for call in message.get("tool_calls", []):
            lines += [_indent(f"→ {call['function']['name']}({json.dumps(call['function']['arguments'], ensure_ascii=False)})"), ""]
    if rollout.task.answer:
        lines += [f"expected: `{visible(rollout.task.answer)}`", ""]
    return "\n".join(lines)


def _ending(rollout: Rollout) -> str:
    return f"truncated by {rollout.truncation}" if rollout.status == "truncated" else "terminated"


def visible(text: str, kept: str = "") -> str:
    """Control characters (terminal escapes among them) are shown, not obeyed."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in visible(text, kept="\n").splitlines())
