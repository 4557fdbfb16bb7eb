"""Files of token values: of each reply the text of every token, its log-prob, and what was learned from it."""

from __future__ import annotations

import gzip
import json
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit.system.files import finite, write_atomic
from rlkit.types import Rollout

DIGITS = 5  # of a log-prob or advantage
Tokens = Mapping[tuple[int, int, str], Sequence[Mapping[str, Any]]]  # (group, sample, task) → of each reply text, logprobs, …


def save_tokens(
    path: Path, rollouts: Sequence[Rollout], text_of: Callable[[tuple[int, ...]], str], learned: Sequence[list[dict[str, list]]] = ()
) -> None:
    """One line a rollout: {group, sample, task_id, steps: [{text, logprobs, advantages, trained}, …]}, each a list over the reply's tokens.

    Args:
      text_of: ids → text.
      learned: of each rollout what `learned_from` gives; without it the lines have text and log-probs alone.
    """
    lines = []
    for index, rollout in enumerate(rollouts):
        steps = []
        for number, step in enumerate(rollout.steps):
            own = {"text": pieces(step.response_ids, text_of), "logprobs": rounded(step.logprobs)}
            steps.append(own | (learned[index][number] if learned else {}))
        line = {"group": rollout.group, "sample": rollout.sample, "task_id": rollout.task.id, "steps": steps}
        lines.append(json.dumps(finite(line)) + "\n")
    write_atomic(path, gzip.compress("".join(lines).encode(), compresslevel=6, mtime=0))


def pieces(ids: Sequence[int], text_of: Callable[[tuple[int, ...]], str]) -> list[str]:
    """The text that each token adds; a character of several tokens stands at the last of them. Joined they are the whole text.

    Each is decoded behind the token before it, for some tokenizers drop a space at the start of a text.
    """
    out: list[str] = []
    before: list[int] = []
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        known = text_of(tuple(before)) if before else ""
        text = text_of((*before, *pending))
        own = text[len(known) :] if text.startswith(known) else text_of(tuple(pending))
        if own.endswith("\ufffd") and len(pending) < 4:  # UTF-8 takes four bytes at most
            out.append("")
            continue
        out.append(own)
        before, pending = pending, []
    if pending:
        out[-1] = text_of(tuple(pending))
    return out


def rounded(values: Sequence[float]) -> list[float]:
    """Numbers short enough to read and to store."""
    return [round(value, DIGITS) for value in values]


def load_tokens(path: Path) -> Tokens:
    """What `save_tokens` wrote; nothing where the file is missing or damaged."""
    if not path.is_file():
        return {}
    try:
        lines = [json.loads(text) for text in gzip.decompress(path.read_bytes()).decode().splitlines()]
        return {(line["group"], line["sample"], line["task_id"]): line["steps"] for line in lines}
    except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError, zlib.error) as error:
        warnings.warn(f"{path}: token values left out ({type(error).__name__}: {error})", stacklevel=2)
        return {}
