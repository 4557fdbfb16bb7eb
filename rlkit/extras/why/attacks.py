"""Test whether the run's reward pays an empty or constant answer, or pays a wrong answer more than
the truth."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from rlkit.extras.why.evidence import Finding
from rlkit.rewards import Reward, RewardError, list_named_rewards, read_declarations
from rlkit.rewards import score as score_rollouts
from rlkit.tasks.splits import identify_problem
from rlkit.types import Rollout, Step, Task, bound, plain

TRIED = 16  # rows
PAID = 0.8  # share of the truth's reward for a senseless answer
CONSTANTS = ("", "0", "1", "yes", "I do not know.", "The answer is", "the " * 200)
ADDRESS = ("address", "addresses", "url", "base_url", "host", "endpoint", "client")


def attack(reward: Reward, tasks: Sequence[Task]) -> Finding | None:
    """Score truths and constant answers on the first distinct problems with a truth.

    Errors of the reward are not raised. If the reward fails on an answer, there is no finding.
    """
    distinct = {identify_problem(task): task for task in tasks if task.answer.strip()}
    rows = [*distinct.values()][:TRIED]
    if len(rows) < 2:
        return None
    common = Counter(task.answer for task in rows).most_common(1)[0][0]
    answers = dict.fromkeys((*CONSTANTS, common))
    try:
        truth, known = try_answers(reward, rows, answers)
    except RewardError:
        return None
    if truth is None or not known:
        return None
    best = max(known, key=known.__getitem__)
    shown = f"the answer {best!r}" if len(best) < 40 else f"the answer {best[:20]!r}, repeated,"
    if not best:
        shown = "an empty answer"
    if truth < min(known.values()):
        return Finding(
            "sign",
            "The reward pays less for the truth than for anything else.",
            f"On {len(rows)} rows the right answer earns {truth:.2f}, and {shown}"
            f" {known[best]:.2f}. A reward that rises here means worse answers.",
            "Check the signs of reward.terms.*.weight, and the values that the function returns.",
            find_flips(reward, rows, answers),
        )
    if known[best] > 0 and known[best] >= PAID * truth:
        return Finding(
            "hackable",
            "The reward pays for a senseless answer.",
            f"On {len(rows)} rows {shown} earns {known[best]:.2f}, and the right answer"
            f" {truth:.2f}.",
            "Change the reward so that only a right answer earns it, or train on the task's own"
            " verifier (reward=by_task).",
            ("reward=by_task",) if reward.name != "by_task" else (),
        )
    return None


def find_flips(reward: Reward, rows: Sequence[Task], answers: Iterable[str]) -> tuple[str, ...]:
    """Return one override for each negative weight whose sign is wrong: with the other sign, the
    truth earns no less than another answer."""
    found = []
    for name, term in reward.terms.items():
        if term.weight >= 0:
            continue
        turned = {**reward.terms, name: term._replace(weight=-term.weight)}
        truth, known = try_answers(reward._replace(terms=turned), rows, answers)
        if truth is not None and known and truth >= min(known.values()):
            found.append(f"reward.terms.{name}.weight={-term.weight:g}")
    return tuple(found)


def try_answers(
    reward: Reward, rows: Sequence[Task], answers: Iterable[str]
) -> tuple[float | None, dict[str, float]]:
    """Return the mean reward of the truths, and of each scored constant answer."""
    truth = mean_reward(reward, rows, [task.answer for task in rows])
    paid = {text: mean_reward(reward, rows, [text] * len(rows)) for text in answers}
    return truth, {text: value for text, value in paid.items() if value is not None}


def mean_reward(reward: Reward, tasks: Sequence[Task], answers: Sequence[str]) -> float | None:
    """Compute the mean reward of texts given as replies; None if no reply is scored."""
    played = [make_episode(task, text) for task, text in zip(tasks, answers, strict=True)]
    scored = [r.total_reward for r in score_rollouts(played, reward)]
    values = [value for value in scored if value is not None]
    return fmean(values) if values else None


def make_episode(task: Task, text: str) -> Rollout:
    """Make an episode of one reply."""
    step = Step(task.messages, (), (1,), (0.0,), finish_reason="stop", content=text)
    return Rollout(task, (step,))


def explain_unsafe(reward: Reward, tasks: Sequence[Task]) -> str:
    """Say why attacks on this reward need consent; "" for plain functions of one rollout.

    A batched or async function may belong to a model or a server, and cost time or money.
    """
    for name, fn in list_functions(reward, tasks):
        if inspect.iscoroutinefunction(plain(fn)):
            return f"the reward {name} is async"
        if read_declarations(fn).batched or (name in reward.terms and reward.terms[name].batched):
            return f"the reward {name} takes the whole batch"
        if read_declarations(fn).no_gold:
            return f"the reward {name} has no truths"
        if set(ADDRESS) & set(list_parameters(fn)):
            return f"the reward {name} contacts a server"
    return ""


def list_functions(
    reward: Reward, tasks: Sequence[Task]
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """List the name and function of each reward term with a weight. For a term by row, list the
    functions named in the rows."""
    asked = {task.reward for task in tasks}
    for name, term in reward.terms.items():
        known: Mapping[str, Callable[..., Any]] = list_named_rewards(term.fn)
        if term.weight and known:
            yield from ((own, fn) for own, fn in known.items() if own in asked)
        elif term.weight:
            yield name, term.fn


def list_parameters(fn: Callable[..., Any]) -> list[str]:
    """List the bound keywords and the parameters of a function."""
    try:
        return [*bound(fn), *inspect.signature(plain(fn)).parameters]
    except (TypeError, ValueError):
        return []
