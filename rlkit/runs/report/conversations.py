"""Conversations for the page's viewer: a bounded choice of what runs have recorded, as plain data."""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Sequence
from typing import Any

from rlkit.episodes.record import load_rollouts
from rlkit.errors import DataError
from rlkit.runs.report.read import ReadRun, rollout_file
from rlkit.system.shards import Part, recorded
from rlkit.types import Rollout, Step

STEPS = 60  # of a run that are shown
HELD_OUT = {"test": "held_out/test", "validation": "held_out/validation", "held-out": "held_out"}  # kind → folder; the last in older runs
TEXT = 20_000  # characters of one message
TOTAL = 30_000_000  # characters of all conversations: what a browser opens at once


def collect(found: Sequence[ReadRun], limit: int) -> dict[str, Any]:
    """{runs: [name], texts: [text of a prompt], rollouts: [entry]}; at most `limit` entries, the same number of each run.

    Of a run's steps at most STEPS are shown, spread evenly, first and last among them; of a step the best, the worst and a
    random choice of the others; of test and validation problems all that were recorded.
    """
    prompts: dict[str, int] = {}
    entries: list[dict[str, Any]] = []
    size = 0
    for index, run in enumerate(found):
        for entry in of_run(run, limit // len(found), prompts):
            size += entry.pop("size")
            if size > TOTAL:
                warnings.warn(f"conversations beyond {TOTAL:,} characters are left out, from {run.folder} on", stacklevel=2)
                return {"runs": names(found), "texts": list(prompts), "rollouts": entries}
            entries.append({"run": index, **entry})
    return {"runs": names(found), "texts": list(prompts), "rollouts": entries}


def names(found: Sequence[ReadRun]) -> list[str]:
    """A line for each run that tells it from the others."""
    return [f"{run.name}{'' if run.seed is None else f', seed {run.seed}'} · {run.folder.name}" for run in found]


def of_run(run: ReadRun, limit: int, prompts: dict[str, int]) -> list[dict[str, Any]]:
    """The entries of a run: those of test and validation problems first, since they are few, then of each step its share."""
    alone = rollout_file(run.folder)
    if alone is not None:
        return step_entries(Part(alone), 0, "episodes", limit, prompts)
    shown = {folder: _spread([*recorded(run.folder / folder).items()], STEPS) for folder in (*HELD_OUT.values(), "rollouts")}
    held_out = [(*own, kind) for kind, folder in HELD_OUT.items() for own in shown[folder]]
    out: list[dict[str, Any]] = []
    for step, part, kind in held_out:
        out += step_entries(part, step, kind, (limit // 2) // len(held_out), prompts)
    for position, (step, part) in enumerate(shown["rollouts"]):
        share = (limit - len(out)) // (len(shown["rollouts"]) - position)
        out += step_entries(part, step, "training", share, prompts)
    return out


def _spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of them, evenly spread, with the first and the last.

    >>> _spread([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(1, count - 1))] for i in range(count)]


def step_entries(part: Part, step: int, kind: str, limit: int, prompts: dict[str, int]) -> list[dict[str, Any]]:
    """Entries of the rollouts of a step; what cannot be read is warned of and left out."""
    try:
        rollouts = load_rollouts(part)
    except (DataError, OSError) as error:
        warnings.warn(f"left out: {error}", stacklevel=2)
        return []
    return [{"step": step, "kind": kind, **entry_of(r, prompts)} for r in best_worst_random(rollouts, limit, seed=step)]


def best_worst_random(rollouts: Sequence[Rollout], limit: int, *, seed: int) -> list[Rollout]:
    """At most `limit`: best, worst, then others at random; in their own order."""
    if len(rollouts) <= limit:
        return list(rollouts)
    totals = [r.total_reward for r in rollouts]
    ranked = sorted(range(len(rollouts)), key=lambda i: -math.inf if (total := totals[i]) is None else total)
    others = random.Random(seed).sample(range(len(rollouts)), len(rollouts))
    picked = list(dict.fromkeys([ranked[-1], ranked[0], *others]))[:limit]
    return [rollouts[i] for i in sorted(picked)]


# ------------------------------------------------------------------------------------------------------ entries


def entry_of(rollout: Rollout, prompts: dict[str, int]) -> dict[str, Any]:
    """What the viewer shows of a rollout. `size` counts its characters."""
    calls = [call for step in rollout.steps for call in step.tool_calls]
    results = [result for step in rollout.steps for result in step.tool_results]
    said = messages(rollout, prompts)
    return {
        "problem": rollout.task.id,
        "group": rollout.group,
        "sample": rollout.sample,
        "reward": rollout.total_reward,
        "rewards": {name: value for name, value in rollout.rewards.items() if len(rollout.rewards) > 1},
        "status": rollout.status if rollout.status == "terminated" else f"truncated: {rollout.truncation}",
        "tokens": rollout.response_length,
        "versions": [*dict.fromkeys(version for step in rollout.steps for _, version in step.versions)],
        "calls": len(calls),
        "failed": sum(not result.ok for result in results),
        "expected": trimmed(rollout.task.answer),
        "messages": said,
        "size": sum(len(json.dumps(message)) for message in said),
    }


def messages(rollout: Rollout, prompts: dict[str, int]) -> list[dict[str, Any]]:
    """The conversation in order: prompts by their number in `prompts`, replies in parts, results of tools."""
    out: list[dict[str, Any]] = []
    for index, step in enumerate(rollout.steps):
        for message in step.prompt:
            if index and message["role"] == "tool":  # shown with the step that called
                continue
            text = trimmed(str(message.get("content", "")))
            out.append({"role": message["role"], "prompt": prompts.setdefault(text, len(prompts))})
        out.append(_reply(step))
        out += [{"role": "tool", "name": r.name, "text": trimmed(r.content), "ok": r.ok} for r in step.tool_results]
    return out or [
        {"role": m["role"], "prompt": prompts.setdefault(trimmed(str(m.get("content", ""))), len(prompts))} for m in rollout.task.messages
    ]


def _reply(step: Step) -> dict[str, Any]:
    """A reply of the policy."""
    calls = [
        {"name": c.name, "arguments": trimmed(json.dumps(dict(c.arguments), ensure_ascii=False)), "error": c.error} for c in step.tool_calls
    ]
    out: dict[str, Any] = {"role": "assistant", "text": trimmed(step.content), "why": step.finish_reason}
    out |= {"thinking": trimmed(step.thinking), "closed": step.thinking_closed} if step.thinking or not step.thinking_closed else {}
    return out | ({"calls": calls} if calls else {}) | ({"reward": step.reward} if step.reward is not None else {})


def trimmed(text: str) -> str:
    """A text, cut where it is longer than a page can show."""
    return text if len(text) <= TEXT else f"{text[:TEXT]}\n… {len(text) - TEXT:,} more characters are in the run's files"
