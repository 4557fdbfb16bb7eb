"""The score that the package `reasoning-gym` gives an answer to one of its problems."""

from __future__ import annotations

import re

from rlkit.errors import ConfigError
from rlkit.rewards._score import final_answer
from rlkit.types import Rollout

MOST = 500  # characters of a reply that is evaluated
# In a reply that the package evaluates as Python: names of Python's own, attributes, calls but of
# known functions, comprehensions, strings and lists that are multiplied, and powers of numbers or
# of many brackets, which can fill the memory.
UNSAFE = re.compile(
    r"__|\.\s*[^\W\d]|:=|;|\b(?:for|lambda|import)\b|[\]'\"]\s*[*(]|\)\s*\("
    r"|(?<![\w.])(?!(?:a?sin|a?cos|a?tan|exp|log|ln|sqrt|Abs|Integral)\s*\()[^\W\d]\w*\s*\(|\d\s*\*\*|(?:\)\s*\*\*.*){3}|\*\s*[\['\"]",
    re.DOTALL,
)
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym(rollout: Rollout) -> float:
    """`score_answer` of the row's data set: mostly in 0 to 1, and for some data sets above 0 for a
    wrong answer of the right form.

    The answer is what stands in the last `<answer>…</answer>`, or the whole reply without such a
    tag. An episode without a final answer scores 0. So does an answer that the data set would
    evaluate as Python, where it is long or holds more than an expression of numbers, names, lists
    and the usual functions: what a policy writes does not run in this process.

    Raises: ConfigError for a row that is of no such data set, or where the package is not
      installed; what `score_answer` raises is the package's.
    """
    from rlkit.tasks._reasoning_gym import generated

    row = rollout.task.metadata.get("reasoning_gym")
    if row is None:
        raise ConfigError(
            f"task {rollout.task.id!r} has no row of reasoning-gym; use task=reasoning_gym, or"
            " another reward"
        )
    said = final_answer(rollout)
    if said is None:
        return 0.0
    tagged = TAGGED.findall(said)
    answer = (tagged[-1] if tagged else said).strip()
    source = generated(row["dataset"], row["options"])
    if source.evaluates and (len(answer) > MOST or UNSAFE.search(answer)):
        return 0.0
    return source.score(answer, row["number"])
