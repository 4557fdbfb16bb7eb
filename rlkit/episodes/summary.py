"""Summarise rollouts in numbers: the episode metrics of a row of metrics.jsonl."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev
from typing import get_args

from rlkit.errors import EnvironmentFailed
from rlkit.types import FinishReason, Rollout

NAN = float("nan")
TRUNCATIONS = ("length", "context", "steps", "deadline", "environment", "error")
# a tool is reported if all of its calls failed, and if there were at least this many
FEWEST_CALLS = 4
STATUSES = ("ok", "wrong", "unparseable", "timeout", "error")  # statuses of a component's score


def summarize(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Compute the metrics of scored rollouts. The keys depend only on the names of the reward's
    terms and metrics, and on the parts of the mixture. A value that cannot be computed is nan.

    part/NAME/*         all metrics below for the rollouts of one part of a mixture; share is the
                        part's share of all rollouts

    reward/*            raw task reward, with the rewards of steps; unscored_frac is the share of
                        rollouts without a score
    reward/NAME/*       a component of the reward, even with weight 0. mean and std are those of its
                        score. ok_frac, wrong_frac, unparseable_frac, timeout_frac and error_frac
                        are the shares of rollouts with this status. variance_share, 0 … 1, is the
                        squared correlation of component and reward within groups. This is the share
                        of the reward's variance (and of the advantage's) explained by this
                        component alone. For independent terms of a weighted sum these shares add up
                        to 1. NAME/METRIC is the mean of a metric returned by the reward function,
                        over the rollouts with this metric
    aggregator/*        metrics returned by the reward's aggregator itself
    group/*             shares of prompts. frac_zero_std: all rewards in the prompt's group are
                        equal. frac_all_good: they are equal and > 0. frac_all_bad: they are equal
                        and <= 0. frac_mixed: the rewards differ
    len/*               number of sampled tokens of an episode, over all steps. Text inserted by a
                        thinking budget is not counted
    len/loop_frac       share of episodes with a reply that repeats itself. Such a reply has over
                        10,000 characters, and zlib compresses it by a factor above 10, as in
                        arXiv:2604.08527. The factor is about 2 for prose, and over 100 for a text
                        repeated in a loop
    stop_reason/*       shares of the ways in which episodes ended. stop: the policy or the
                        environment ended the episode. length, context, steps, deadline and
                        environment: a limit cut the episode off. In this order, the limits are on
                        tokens of a reply, the model's context, the number of replies, and seconds
                        in the session; the last is the environment's own limit. error: the
                        environment failed, and the rollout's `error` says why
    finish_reason/*     shares of the ways in which replies ended: stop, tool, budget and length, as
                        in types.FinishReason
    dropped_frac        share of episodes whose oldest turns were dropped from the context
    think_closed_frac   share of episodes without an unclosed thinking block
    answer_found_frac   share of episodes with an answer: the last reply has content and no tool
                        call, or the environment gave the answer
    parse_fail_frac     share of episodes with at least one unreadable tool call
    tools/*             mean numbers per episode: calls, failures (failed calls) and turns (replies)
    rollout/empty_frac  share of episodes without thinking, content or a call
    program/*           means over the episodes played by programs: refused and retries (numbers of
                        requests), rows (training rows), thinking_rows (rows begun because the
                        client dropped thinking), prompt_tokens, and thinking_tokens (in
                        thinking_rows)
    """
    metrics = _summary(rollouts)
    for part, own in group_by_part(rollouts).items():
        mine = _summary(own) | {"share": len(own) / len(rollouts)}
        metrics |= {f"part/{part}/{name}": value for name, value in mine.items()}
    return metrics


def count_failures(rollouts: Sequence[Rollout]) -> str:
    """Return a sentence with the number of episodes in which the environment failed, and the first
    error. The result is an empty text if no environment failed.

    Raises: EnvironmentFailed if the environment failed in every episode, because there is then
      nothing to measure or learn.
    """
    failed = [r for r in rollouts if r.truncation == "error"]
    if not failed:
        return ""
    count = f"{len(failed)} of" if len(failed) < len(rollouts) else "all"
    said = (
        f"the environment failed in {count} {len(rollouts)} episodes; they are not scored. The"
        f" first error: {failed[0].error}"
    )
    if len(failed) == len(rollouts):
        raise EnvironmentFailed(said)
    return said


# beginnings of results of calls that ran no tool
NOT_RUN = ("Error: there is no tool", "Error: not a tool call", "Error: at most ")


def describe_failing_tools(rollouts: Sequence[Rollout]) -> list[str]:
    """Return a sentence on each tool that failed in all of its calls. A tool with fewer than
    FEWEST_CALLS calls is not reported. Calls that ran no tool do
    not count."""
    results = defaultdict(list)
    for result in (r for rollout in rollouts for step in rollout.steps for r in step.tool_results):
        # a call with unfit arguments is answered with the tool's signature
        if not result.content.startswith(NOT_RUN) and ". Call it as " not in result.content:
            results[result.name].append(result)
    return [
        f"the tool {name} failed in all of its {len(own)} calls; the first error:"
        f" {own[0].content:.200}"
        for name, own in results.items()
        if len(own) >= FEWEST_CALLS and not any(result.ok for result in own)
    ]


def count_refusals(rollouts: Sequence[Rollout]) -> str:
    """Return a sentence about refused requests, for episodes played by the user's own program. A
    program asks rlkit's endpoint for completions, and the endpoint may refuse a request. The
    sentence has the number of episodes with a refused request, and the first refusal. The result is
    an empty text if no request was refused."""
    refused = [r for r in rollouts if r.metadata.get("refused")]
    if not refused:
        return ""
    return (
        f"requests were refused in {len(refused)} of {len(rollouts)} episodes; the first refusal:"
        f" {refused[0].metadata['refusal']}"
    )


def group_by_part(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    """Group the rollouts by the part of the mixture that their task belongs to. The result is empty
    without a mixture."""
    parts: dict[str, list[Rollout]] = {
        part: [] for part in sorted({r.task.part for r in rollouts} - {""})
    }
    for r in rollouts:
        if r.task.part:
            parts[r.task.part].append(r)
    return parts


def _summary(rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [r.response_length for r in rollouts]
    totals = [r.total_reward for r in rollouts]
    scored = [(n, s) for n, s in zip(lengths, totals, strict=True) if s is not None]
    scores = [score for _, score in scored]
    ended = [r for r in rollouts if r.status == "terminated"]
    solved = [length for length, score in scored if score > 0]
    unsolved = [length for length, score in scored if score <= 0]
    calls = [[call for step in r.steps for call in step.tool_calls] for r in rollouts]
    results = [[result for step in r.steps for result in step.tool_results] for r in rollouts]
    return {
        "reward/mean": _mean(scores),
        "reward/std": pstdev(scores) if scores else NAN,
        "reward/unscored_frac": 1 - len(scores) / len(rollouts),
        **_components(rollouts),
        **measure_reward_functions(rollouts),
        **_groups(rollouts),
        "len/mean": _mean(lengths),
        "len/min": min(lengths),
        "len/max": max(lengths),
        "len/terminated_mean": _mean([r.response_length for r in ended]),
        "len/solved_mean": _mean(solved),
        "len/unsolved_mean": _mean(unsolved),
        "len/truncated_frac": 1 - len(ended) / len(rollouts),
        "len/loop_frac": _share(
            any(is_looping(s.thinking + s.content) for s in r.steps) for r in rollouts
        ),
        "stop_reason/stop": len(ended) / len(rollouts),
        **{
            f"stop_reason/{why}": _share(r.truncation == why for r in rollouts)
            for why in TRUNCATIONS
        },
        **{
            f"finish_reason/{why}": _share(
                s.finish_reason == why for r in rollouts for s in r.steps
            )
            for why in get_args(FinishReason)
        },
        "dropped_frac": _share(any(s.dropped for s in r.steps) for r in rollouts),
        "think_closed_frac": _share(all(s.thinking_closed for s in r.steps) for r in rollouts),
        "answer_found_frac": _share(
            bool(r.final_content) and ("final_content" in r.metadata or not r.steps[-1].tool_calls)
            for r in rollouts
        ),
        "parse_fail_frac": _share(any(call.error for call in made) for made in calls),
        "tools/calls": _mean([len(made) for made in calls]),
        "tools/failures": _mean([sum(not result.ok for result in given) for given in results]),
        "tools/turns": _mean([len(r.steps) for r in rollouts]),
        "rollout/empty_frac": _share(
            not any(s.thinking or s.content or s.tool_calls for s in r.steps) for r in rollouts
        ),
    }


def is_looping(text: str) -> bool:
    """Return whether a long text repeats itself. Such a text has more than 10,000 characters, and
    zlib compresses it by a factor above 10."""
    if len(text) <= 10_000:
        return False
    data = text.encode()
    return len(data) > 10 * len(zlib.compress(data))


def group_rewards(rollouts: Sequence[Rollout]) -> dict[int, list[float]]:
    """Return the scores of each group. Rollouts that cannot be scored are left out."""
    groups: dict[int, list[float]] = defaultdict(list)
    for r in rollouts:
        total = r.total_reward
        if total is not None:
            groups[r.group].append(total)
    return groups


def _groups(rollouts: Sequence[Rollout]) -> dict[str, float]:
    groups = group_rewards(rollouts)
    equal = [rewards for rewards in groups.values() if max(rewards) == min(rewards)]
    count = max(1, len(groups))
    return {
        "group/frac_zero_std": len(equal) / count,
        "group/frac_all_good": sum(rewards[0] > 0 for rewards in equal) / count,
        "group/frac_all_bad": sum(rewards[0] <= 0 for rewards in equal) / count,
        "group/frac_mixed": (len(groups) - len(equal)) / count,
    }


def _components(rollouts: Sequence[Rollout]) -> dict[str, float]:
    out = {}
    for name in rollouts[0].rewards:
        values = [v for r in rollouts if (v := r.rewards[name]) is not None]
        out[f"reward/{name}/mean"] = _mean(values)
        out[f"reward/{name}/std"] = pstdev(values) if values else NAN
        out[f"reward/{name}/variance_share"] = _variance_share(rollouts, name)
        for status in STATUSES:
            out[f"reward/{name}/{status}_frac"] = _share(
                r.statuses.get(name) == status for r in rollouts
            )
    return out


def measure_reward_functions(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of each metric that the reward's functions return in addition to their
    scores. The names are reward/TERM/METRIC and aggregator/METRIC. Each mean is over the rollouts
    with this metric."""
    return {
        name: _mean([r.metrics[name] for r in rollouts if name in r.metrics])
        for name in dict.fromkeys(name for r in rollouts for name in r.metrics)
    }


def _variance_share(rollouts: Sequence[Rollout], name: str) -> float:
    """Compute `(Σ x y)² / (Σ x² Σ y²)` over the rollouts. x is the component's value less the mean
    value in the rollout's group. y is the reward less the mean reward in the group. The result is
    nan if x or y does not vary."""
    groups: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for r in rollouts:
        value = r.rewards[name]
        total = r.total_reward
        if value is not None and total is not None:
            groups[r.group].append((value, total))
    pairs = [
        (x - fmean(xs), y - fmean(ys))
        for group in groups.values()
        for xs, ys in [zip(*group, strict=True)]
        for x, y in group
    ]
    xx = sum(x * x for x, _ in pairs)
    yy = sum(y * y for _, y in pairs)
    scale = sum(abs(r.rewards[name] or 0.0) + abs(r.total_reward or 0.0) for r in rollouts)
    if min(xx, yy) <= (1e-9 * scale) ** 2:  # only rounding errors vary
        return NAN
    return min(1.0, sum(x * y for x, y in pairs) ** 2 / (xx * yy))


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else NAN


def _share(flags: Iterable[bool]) -> float:
    return _mean([float(flag) for flag in flags])
