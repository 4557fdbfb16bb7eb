"""Reward the text of the final reply. Thinking is not read, and an episode without a final answer
is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rlkit.errors import ConfigError
from rlkit.rewards.verdicts import Verdict, final_answer
from rlkit.types import Rollout, gives, reaches, safe


@safe("parse")
@gives("binary", correct=1, wrong=0)
@gives("raw")
def exact_match(
    rollout: Rollout,
    *,
    parse: Callable[[str], Any] | None = None,
    ignore_case: bool = False,
    correct: float = 1.0,
    wrong: float = 0.0,
) -> float | None:
    """Score whether the final reply equals `task.answer`. White space around the two texts is
    ignored. With `parse`, only the parsed parts are compared.

    Args:
      parse: a function from a text to the part to compare, for example
        `rlkit.rewards.extract_answer`. The function returns None if there is nothing to compare. If
        `parse` is None (null in a config), the whole texts are compared.
      ignore_case: case-fold both texts first.
      correct, wrong: the two scores.
    Returns: `correct` or `wrong`; None if `task.answer` is empty or cannot be parsed. A reply that
      cannot be parsed is wrong, with the status unparseable.
    """
    truth = _parse_answer(rollout.task.answer, parse, ignore_case)
    if truth is None:
        return None
    answer = final_answer(rollout)
    given = None if answer is None else _parse_answer(answer, parse, ignore_case)
    if given is None:
        return Verdict(wrong, "unparseable")
    return correct if given == truth else wrong


@gives("binary", correct=1, wrong=0)
@gives("raw")
def contains(
    rollout: Rollout, *, ignore_case: bool = False, correct: float = 1.0, wrong: float = 0.0
) -> float | None:
    """Score whether the final reply contains `task.answer` as whole words.

    "1" is not in "10", "1.5", "1,000", "1/2" or "-1", and "correct" is not in "incorrect". White
    space between the answer's words may be of any kind and length.

    Args:
      ignore_case: case-fold both texts first.
      correct, wrong: the two scores.
    Returns: `correct` or `wrong`; None for an empty `task.answer`.
    """
    words = _fold_case(rollout.task.answer, ignore_case).split()
    if not words:
        return None
    answer = final_answer(rollout)
    if answer is None:
        return Verdict(wrong, "unparseable")
    before = r"(?<!\w)" + (r"(?<![-\u2212])(?<!\d[.,/])" if words[0][0].isdigit() else "")
    after = r"(?!\w)" + (r"(?![.,/]\d)" if words[-1][-1].isdigit() else "")
    pattern = before + r"\s++".join(map(re.escape, words)) + after
    return correct if re.search(pattern, _fold_case(answer, ignore_case)) else wrong


@reaches(pattern="processor")
@gives("binary", correct=1, wrong=0)
@gives("raw")
def format_match(
    rollout: Rollout, *, pattern: str, whole: bool = False, correct: float = 1.0, wrong: float = 0.0
) -> float | None:
    r"""Score whether the final reply matches a pattern. `task.answer` is not read, so every rollout
    can be scored.

    Args:
      pattern: a regular expression of Python's `re`. Flags are written in front of it, as (?s) or
        (?i). Avoid nested repetition: its running time on hostile text has no bound.
      whole: if True, the pattern must match the whole reply, without surrounding white space. If
        False, a match of any part is enough.
      correct, wrong: the two scores.
    Returns: `correct` or `wrong`; an episode without a final answer is wrong.
    Raises: ConfigError if the pattern is empty or not a regular expression.
    """
    if not pattern:
        raise ConfigError(
            "the format reward's pattern is empty and would match every reply; give it a pattern"
        )
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"the format reward's pattern {pattern!r} is not a regular expression: {error}"
        ) from error
    answer = final_answer(rollout)
    if answer is None:
        return Verdict(wrong, "unparseable")
    found = compiled.fullmatch(answer.strip()) if whole else compiled.search(answer)
    return correct if found else wrong


def _fold_case(text: str, ignore_case: bool) -> str:
    return text.strip().casefold() if ignore_case else text.strip()


def _parse_answer(text: str, parse: Callable[[str], Any] | None, ignore_case: bool) -> Any:
    folded = _fold_case(text, ignore_case)
    if not folded:
        return None
    return folded if parse is None else parse(folded)
