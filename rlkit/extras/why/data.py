"""Find causes outside the settings: failing rewards and tools, truths that are unreadable or
visible in the prompt, repeated rows, and an engine with old weights."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean

from rlkit.extras.why.evidence import Evidence, Finding
from rlkit.tasks.splits import identify_problem
from rlkit.training.callbacks.pathologies import MISMATCH
from rlkit.types import Rollout, Task, ToolResult

FAILED = 0.02  # share of episodes with a failure of the reward or the environment
UNREAD = 0.05  # share of rows without any scored reply
BROKEN = 0.9  # share of failed calls from which a tool counts as broken
CALLS = 10  # fewest calls of a tool to judge it
# An engine has old weights if its difference from the trainer grew by this factor, and by more than
# this many nats a token.
GREW = 30
ROUNDING = 0.001
GIVEN = 0.3  # share of prompts with their own truth, beyond the share with another row's
REPEATED = 0.3  # share of the rows with the same problem
PLACED = 0.8  # share of these prompts with the truth at the same place
ROWS = 8  # fewest rows to judge them


def failing_reward(e: Evidence) -> Finding | None:
    """Find a reward term that raises or hangs."""
    rates: dict[str, float] = defaultdict(float)
    for metric in e.run.rows[-1] if e.run.rows else ():
        name, _, kind = metric.removeprefix("reward/").rpartition("/")
        if metric.startswith("reward/") and kind in ("error_frac", "timeout_frac"):
            rates[name] += e.mean(metric)
    name = max(rates, key=rates.__getitem__, default="")
    rate = rates.get(name, 0.0)
    if not rate > FAILED:
        return None
    return Finding(
        "reward_fails",
        "The reward fails.",
        f"The term {name} raised or hung on {rate:.0%} of the episodes, which are not trained on.",
        f"Mend reward.terms.{name}; the first error stands in the run's output.",
    )


def failing_environment(e: Evidence) -> Finding | None:
    """Find an environment whose failures end episodes."""
    rate = e.mean("stop_reason/error")
    if not rate > FAILED:
        return None
    error = next((r.error for r in e.rollouts if r.error), "no rollout that was read says why")
    return Finding(
        "environment_fails",
        "The environment fails.",
        f"It failed in {rate:.0%} of the episodes, which are not trained on ({error:.120}).",
        "Mend the environment.",
    )


def unread_truths(e: Evidence) -> Finding | None:
    """Find rows for which no reply gets a score."""
    scored: dict[str, bool] = defaultdict(bool)
    for rollout in e.rollouts:
        if rollout.truncation != "error":
            scored[rollout.task.id] |= rollout.total_reward is not None
    unread = [task for task in e.tasks if not scored.get(task.id, True)]
    if not unread or len(unread) < UNREAD * len(scored):
        return None
    return Finding(
        "unread",
        "The reward cannot read the truths of some rows.",
        f"No reply to {len(unread)} of {len(scored)} rows got a score, so nothing is learned from"
        f" them; one is {unread[0].id!r:.60} with the truth {unread[0].answer!r:.60}.",
        "Mend these truths, or choose a reward that can read them.",
    )


def failing_tool(e: Evidence) -> Finding | None:
    """Find a tool that fails in nearly every call. It must already fail in the first step, because
    later the policy may have forgotten how to call it."""
    every = group_results(e.rollouts)
    first = group_results(next(iter(e.played.values()), ()))
    for name, results in every.items():
        failed = [result for result in results if not result.ok]
        begun = fmean([not result.ok for result in first[name]] or [0])
        if len(results) >= CALLS and min(len(failed) / len(results), begun) >= BROKEN:
            return Finding(
                "tool",
                f"The tool {name} is broken.",
                f"{len(failed)} of {len(results)} calls of it failed; the first said"
                f" {failed[0].content!r:.120}.",
                "Call it by hand with the arguments of samples/, and mend it.",
            )
    return None


def group_results(rollouts: Sequence[Rollout]) -> dict[str, list[ToolResult]]:
    """Group the results of calls by tool. An unreadable call is left out, because no tool is to
    blame for it."""
    found: dict[str, list[ToolResult]] = defaultdict(list)
    for rollout in rollouts:
        for step in rollout.steps:
            for result in step.tool_results:
                if result.name:
                    found[result.name].append(result)
    return found


def stale_engine(e: Evidence) -> Finding | None:
    """Find an engine that samples with other weights than the trainer's, in a run without a lag.

    In the first step both have the same weights, so a difference in this step is due to rounding.
    """
    gaps = e.values("mismatch/logp_abs_mean")
    if not gaps or e.number("asynchrony.staleness") > 0:
        return None
    first = gaps[0]
    gap = e.mean("mismatch/logp_abs_mean", -1)
    bound = (e.values("mismatch/logp_abs_bound") or [MISMATCH])[-1]
    grew = gap > GREW * first and gap > ROUNDING
    if not (grew or gap > bound):
        return None
    why = "so it has old weights" if grew else f"more than the {bound:.2g} of rounding"
    remedy: tuple[str, ...] = ("generation=cached",)
    advice = "Sample with rlkit's engine. If that mends it, look at how the other loads weights."
    if e.setting("generation.engine._target_") == "rlkit.engines.Cached":
        remedy = ()
        advice = "Sample with generation=transformers. If that mends it, report a fault of rlkit."
    return Finding(
        "stale",
        "The engine does not sample from the trained policy.",
        f"Sampler and trainer differed by {first:.2g} nats a token in the first step, and by"
        f" {gap:.2g} in the last third, {why}.",
        advice,
        remedy,
    )


def given_truths(e: Evidence) -> Finding | None:
    """Find prompts that contain their own truth, more often than they contain another row's truth,
    and at the same place. Truths among several options stand at different places. A policy that has
    earned nothing has not copied them."""
    tasks = [task for task in e.tasks if task.answer.strip() and task.messages]
    if len(tasks) < ROWS or not any(e.values("reward/mean")):
        return None
    own = fmean(holds(task, task.answer) for task in tasks)
    others = random.Random(0).sample(tasks, len(tasks))
    chance = fmean(holds(a, b.answer) for a, b in zip(tasks, others, strict=True))
    held = [task for task in tasks if holds(task, task.answer)]
    places = Counter(place for task in held for place in list_places(task))
    if not own - chance > GIVEN or max(places.values()) < PLACED * len(held):
        return None
    shown = held[0]
    return Finding(
        "leak",
        "The prompts give the truth away.",
        f"{own:.0%} of the prompts hold their own answer, and {chance:.0%} that of another row; one"
        f" is {shown.id!r:.60} with the answer {shown.answer!r:.60}.",
        "Take the answers out of the prompts, unless they are there to be copied: the policy learns"
        " to copy them.",
    )


def holds(task: Task, answer: str) -> bool:
    """Return whether the prompt contains an answer as a word."""
    return len(split_at(task, answer)) > 1


def split_at(task: Task, answer: str) -> list[str]:
    """Split the prompt at each place where an answer stands as a word."""
    text = "\n".join(str(m.get("content") or "") for m in task.messages)
    return re.split(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", text)


def list_places(task: Task) -> set[tuple[str, str | int]]:
    """List the places of the truth in the prompt: the word before it, and its distance in words
    from the start and from the end of the prompt."""
    parts = split_at(task, task.answer)
    places: set[tuple[str, str | int]] = set()
    for i in range(1, len(parts)):
        before = task.answer.join(parts[:i]).split()
        after = task.answer.join(parts[i:]).split()
        places |= {("after", (before or [""])[-1]), ("from start", len(before))}
        places.add(("from end", len(after)))
    return places


def repeated_rows(e: Evidence) -> Finding | None:
    """Find one problem that makes up a large share of the rows."""
    counts = Counter(map(identify_problem, e.tasks))
    total = sum(counts.values())
    if total < ROWS:
        return None
    most = max(counts.values())
    if most < REPEATED * total:
        return None
    [worst] = [task for task in e.tasks if counts[identify_problem(task)] == most][:1]
    return Finding(
        "repeated",
        "The rows repeat a problem.",
        f"{most} of {total} rows that were read are one problem, such as {worst.id!r:.60};"
        f" {len(counts)} of them are distinct.",
        "Remove the duplicates from the data.",
    )


def disagreeing_rewards(e: Evidence) -> Finding | None:
    """Report if the training reward rises while the verifier's accuracy falls."""
    curve = e.values("eval/accuracy") or e.values("test/accuracy")
    if len(curve) < 2 or not e.progress.rose or not curve[-1] < curve[0] - 0.05:
        return None
    return Finding(
        "disagree",
        "The training reward is not what you want.",
        f"It rose from {e.progress.first:.2f} to {e.progress.last:.2f} while the verifier's"
        f" accuracy fell from {curve[0]:.2f} to {curve[-1]:.2f}.",
        "Read the best conversations in samples/, and compare the reward with the verifier.",
    )


CHECKS: Sequence[Callable[[Evidence], Finding | None]] = (
    failing_reward,
    failing_environment,
    unread_truths,
    failing_tool,
    stale_engine,
    given_truths,
    repeated_rows,
    disagreeing_rewards,
)
