"""Conversations for the page's viewer: a list of all of them, and their text in compressed pages,
opened on reading."""

from __future__ import annotations

import base64
import gzip
import json
import math
import os
import random
import shlex
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rlkit.episodes.record import load_rollouts
from rlkit.episodes.summary import group_rewards
from rlkit.errors import DataError
from rlkit.runs import folder as runs
from rlkit.runs.reading import ReadRun, find_rollout_file
from rlkit.system.extras import has_command
from rlkit.system.files import replace_nonfinite
from rlkit.system.shards import Part, index_steps
from rlkit.types import Rollout, Step

HELD_OUT = ("test", "validation")  # splits with rollouts in held_out/SPLIT
TEXT = 100_000  # characters of one message
PAGE = 400_000  # about the characters of a page; the viewer opens a page at once
TOTAL = 200_000_000  # bytes of all pages: a file of this size still opens in browsers
LEAST = 2  # conversations shown of a step, if not all fit
SNIPPET = 160  # characters of an answer in the list


class Turn(NamedTuple):
    """The n-th replies of a run's training episodes together."""

    replies: int = 0
    tokens: int = 0
    called: int = 0  # replies with a tool call
    failed: int = 0  # of them, replies with a failed or unreadable call
    ended: int = 0  # episodes with it as their last reply
    scored: int = 0  # of them, scored ones
    reward: float = 0.0  # the sum of these scores

    def plus(self, other: Turn) -> Turn:
        """Add both."""
        return Turn._make(a + b for a, b in zip(self, other, strict=True))


class Played(NamedTuple):
    """Results of a run's training episodes, over the steps read by the report."""

    # (step, share of a prompt's samples with a reward above 0), a prompt of a step each
    solved: list[tuple[int, float]]
    turns: list[Turn]


class Shown(NamedTuple):
    """The viewer's data."""

    runs: list[str]
    entries: list[dict[str, Any]]  # a line of the list each, with its page and its place there
    pages: list[str]  # `compress_data` {texts: [text of a prompt], said: [{expected, messages}]}
    played: list[Played]  # of each run
    notes: list[str]  # omissions, in words


def collect(found: Sequence[ReadRun], limit: int) -> Shown:
    """Collect at most `limit` conversations, the same number of each run; all of them if there is
    room.

    Otherwise a run's steps are spread evenly, the first and the last among them. A step gives its
    best, its worst and a random choice of the others. Test and validation problems take at most
    half of the room.
    """
    shown = Shown(name_runs(found), [], [], [], [])
    traced = has_command("why")
    size = 0
    for index, run in enumerate(found):
        played = Played([], [])
        page = _Page()
        left = 0
        for step, kind, chosen, count in choose_rollouts(run, limit // len(found), played):
            left += count - len(chosen)
            for number, rollout in chosen.items():
                entry = {"run": index, "kind": kind, "step": step, **make_entry(rollout)}
                if traced and kind == "training":
                    entry["why"] = token_command(run, step, number)
                page.add(entry, rollout)
            if page.size > PAGE:
                size += page.close(shown)
                page = _Page()
            if size > TOTAL:
                warnings.warn(
                    f"conversations beyond {TOTAL:,} bytes are left out, from step {step} of"
                    f" {run.folder} on",
                    stacklevel=2,
                )
                shown.played.append(played)
                return shown
        size += page.close(shown)
        shown.played.append(played)
        if left:
            shown.notes.append(
                f"{left:,} more conversations are in {run.folder}; limit=NUMBER shows more of them"
                f" (now {limit:,})."
            )
    return shown


class _Page:
    """A page in the making."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.entries: list[dict[str, Any]] = []
        self.said: list[dict[str, Any]] = []
        self.size = 0

    def add(self, entry: dict[str, Any], rollout: Rollout) -> None:
        said = {
            "expected": trim_text(rollout.task.answer),
            "messages": list_messages(rollout, self.texts),
        }
        self.entries.append(entry)
        self.said.append(said)
        self.size += len(json.dumps(said))

    def close(self, shown: Shown) -> int:
        """Add the page to the shown ones, and return its bytes."""
        if not self.said:
            return 0
        shown.entries.extend(
            {**entry, "page": len(shown.pages), "at": at} for at, entry in enumerate(self.entries)
        )
        shown.pages.append(compress_data({"texts": list(self.texts), "said": self.said}))
        return len(shown.pages[-1])


def compress_data(data: Any) -> str:
    """JSON, compressed, in base64. No HTML parser sees an end in it, and no search of the page's
    source finds its text."""
    text = json.dumps(replace_nonfinite(data), allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def name_runs(found: Sequence[ReadRun]) -> list[str]:
    """A line for each run, with its place below the folder common to all of them."""
    folders = [os.path.abspath(run.folder) for run in found]
    common = os.path.commonpath([os.path.dirname(folder) for folder in folders])
    seeds = ["" if run.seed is None else f", seed {run.seed}" for run in found]
    return [
        f"{run.name}{seed} · {os.path.relpath(folder, common)}"
        for run, seed, folder in zip(found, seeds, folders, strict=True)
    ]


def token_command(run: ReadRun, step: int, number: int) -> str:
    """Write the command that explains a token of a rollout, up to the token's number."""
    return (
        f"rlkit why {shlex.quote(runs.shorten_path(run.folder))} step={step} rollout={number}"
        " token="
    )


def choose_rollouts(
    run: ReadRun, limit: int, played: Played
) -> Iterator[tuple[int, str, dict[int, Rollout], int]]:
    """(step, kind, place in the step → rollout to show, their full number) of a run. The training
    episodes read on the way are added to `played`.

    Test and validation problems come first, because they are few; then each step gives its share.
    """
    alone = find_rollout_file(run.folder)
    if alone is not None:
        rollouts = read(Part(alone))
        count_played(played, 0, rollouts)
        yield 0, "episodes", select_best_worst_random(rollouts, limit, seed=0), len(rollouts)
        return
    held_out = [
        (*own, kind)
        for kind in HELD_OUT
        for own in index_steps(run.folder / "held_out" / kind).items()
    ]
    room = limit
    for left, (step, part, kind) in zip(range(len(held_out), 0, -1), held_out, strict=True):
        rollouts = read(part)
        chosen = select_best_worst_random(rollouts, (room - limit // 2) // left, seed=step)
        room -= len(chosen)
        yield step, kind, chosen, len(rollouts)
    steps = [*index_steps(run.folder / "rollouts").items()]
    # the solve rates need both ends
    spread = _spread(steps, max(2, room // LEAST))
    skipped = (len(steps) - len(spread)) / max(1, len(spread))  # unread steps after each read one
    for left, (step, part) in zip(range(len(spread), 0, -1), spread, strict=True):
        rollouts = read(part)
        count_played(played, step, rollouts)
        chosen = select_best_worst_random(rollouts, room // left, seed=step)
        room -= len(chosen)
        yield step, "training", chosen, round(len(rollouts) * (1 + skipped))


def read(part: Part) -> list[Rollout]:
    """Read the rollouts of a step. Leave out unreadable ones with a warning."""
    try:
        return load_rollouts(part)
    except (DataError, OSError) as error:
        warnings.warn(f"left out: {error}", stacklevel=2)
        return []


def _spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of them, evenly spread, with the first and the last.

    >>> _spread([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(1, count - 1))] for i in range(count)]


def select_best_worst_random(
    rollouts: Sequence[Rollout], limit: int, *, seed: int
) -> dict[int, Rollout]:
    """At most `limit` rollouts by their places: best, worst, then others at random; in their own
    order."""
    if len(rollouts) <= limit:
        return dict(enumerate(rollouts))
    totals = [-math.inf if r.total_reward is None else r.total_reward for r in rollouts]
    ranked = sorted(range(len(rollouts)), key=totals.__getitem__)
    others = random.Random(seed).sample(range(len(rollouts)), len(rollouts))
    picked = list(dict.fromkeys([ranked[-1], ranked[0], *others]))[:limit]
    return {i: rollouts[i] for i in sorted(picked)}


def count_played(played: Played, step: int, rollouts: Sequence[Rollout]) -> None:
    """Add a step's episodes to the solve rates and the turns of a run."""
    for rollout in rollouts:
        total = rollout.total_reward
        for i, reply in enumerate(rollout.steps):
            bad = any(call.error for call in reply.tool_calls) or any(
                not result.ok for result in reply.tool_results
            )
            last = reply is rollout.steps[-1]
            ending = (1, int(total is not None), total or 0.0) if last else (0, 0, 0.0)
            own = Turn(1, len(reply.response_ids), bool(reply.tool_calls), bad, *ending)
            played.turns[i : i + 1] = [
                (played.turns[i] if i < len(played.turns) else Turn()).plus(own)
            ]
    played.solved.extend(
        (step, sum(value > 0 for value in values) / len(values))
        for values in group_rewards(rollouts).values()
    )


# ------------------------------------------------------------------------------------------ entries


def make_entry(rollout: Rollout) -> dict[str, Any]:
    """The list's row for a rollout, also for its filters and its order."""
    calls = [call for step in rollout.steps for call in step.tool_calls]
    results = [result for step in rollout.steps for result in step.tool_results]
    return {
        "problem": rollout.task.id,
        "group": rollout.group,
        "sample": rollout.sample,
        "reward": rollout.total_reward,
        "rewards": dict(rollout.rewards) if len(rollout.rewards) > 1 else {},
        "status": (
            rollout.status if rollout.status == "terminated" else f"truncated: {rollout.truncation}"
        ),
        "tokens": rollout.response_length,
        "turns": len(rollout.steps),
        "versions": [
            *dict.fromkeys(version for step in rollout.steps for _, version in step.versions)
        ],
        "calls": len(calls),
        "failed": sum(not result.ok for result in results),
        "answer": _answer(rollout)[:SNIPPET],
    }


def _answer(rollout: Rollout) -> str:
    """The last reply in a line."""
    if not rollout.steps:
        return "(no reply)"
    last = rollout.steps[-1]
    if last.content.strip():
        return last.content
    if last.tool_calls:
        call = last.tool_calls[0]
        return f"→ {call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})"
    return f"(thinking) {last.thinking}" if last.thinking else "(empty)"


def list_messages(rollout: Rollout, prompts: dict[str, int]) -> list[dict[str, Any]]:
    """The conversation in order: prompts by their number in `prompts`, replies in parts, results of
    tools."""
    out: list[dict[str, Any]] = []
    for index, step in enumerate(rollout.steps):
        for message in step.prompt:
            if index and message["role"] == "tool":  # shown with its call's step
                continue
            text = trim_text(str(message.get("content", "")))
            out.append({"role": message["role"], "prompt": prompts.setdefault(text, len(prompts))})
        out.append(_reply(step) | ({"turn": index + 1} if len(rollout.steps) > 1 else {}))
        out += [
            {"role": "tool", "name": r.name, "text": trim_text(r.content), "ok": r.ok}
            for r in step.tool_results
        ]
    return out or [
        {
            "role": m["role"],
            "prompt": prompts.setdefault(trim_text(str(m.get("content", ""))), len(prompts)),
        }
        for m in rollout.task.messages
    ]


def _reply(step: Step) -> dict[str, Any]:
    """A reply of the policy."""
    calls = [
        {
            "name": c.name,
            "arguments": trim_text(json.dumps(dict(c.arguments), ensure_ascii=False)),
            "error": c.error,
        }
        for c in step.tool_calls
    ]
    out: dict[str, Any] = {
        "role": "assistant",
        "text": trim_text(step.content),
        "why": step.finish_reason,
        "tokens": len(step.response_ids),
    }
    out |= (
        {"thinking": trim_text(step.thinking), "closed": step.thinking_closed}
        if step.thinking or not step.thinking_closed
        else {}
    )
    return (
        out
        | ({"calls": calls} if calls else {})
        | ({"reward": step.reward} if step.reward is not None else {})
    )


def trim_text(text: str) -> str:
    """Cut a text that is too long for a page."""
    return (
        text
        if len(text) <= TEXT
        else f"{text[:TEXT]}\n… {len(text) - TEXT:,} more characters are in the run's files"
    )
