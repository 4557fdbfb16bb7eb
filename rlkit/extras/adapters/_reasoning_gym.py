"""Problems that the package `reasoning-gym` generates as tasks, and the score that it gives an
answer."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

from rlkit.errors import ConfigError, install, nearest
from rlkit.rewards import final_answer, no_gold, reads_fields
from rlkit.tasks.splits import check_split, cut, in_order
from rlkit.types import Message, Rollout, Task, ranges, reaches, safe

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


@reaches(options="path")
@safe("dataset", "split", "system")
@ranges(rows=(1, None), max_samples=(1, None))
def reasoning_gym(
    *,
    dataset: str,
    split: str,
    seed: int,
    options: Mapping[str, Any] = {},
    rows: int = 2000,
    system: str | None = None,
    validation: float = 0.1,
    held_out: float = 0.1,
    max_samples: int | None = None,
) -> list[Task]:
    """The first `rows` problems of a generated data set, for the reward `reasoning_gym_reward`.

    A row keeps the name, the options, the seed and the number of its problem. The reward generates
    the problem again from them, because the entries of some data sets hold objects that no file of
    rlkit can store.

    Args:
      dataset: its name in the package, such as countdown or knights_knaves.
      split: train, validation or test, cut by the hash of the question. Equal questions share a
        split.
      seed: of the problems, unless `options` has one, and of their order.
      options: what the data set's own config takes, such as {min_numbers: 3}.
      rows: how many problems are generated, > 0.
      system: a system prompt in front of each question; None gives none.
      validation, held_out: these shares, at least 0 and together below 1.
      max_samples: how many, after the shuffle; None for all.
    Returns: tasks called DATASET/SPLIT/NUMBER. `answer` is the package's, empty where it names
      none.
    Raises: ConfigError where the package, the data set or an option is not there.
    """
    check_split(split, validation, held_out)
    own = {"seed": seed, **options, "size": rows}
    source = generated(dataset, own)
    numbers = cut(
        range(rows),
        lambda i: source[i]["question"],
        split,
        f"rows of task.dataset={dataset}",
        validation=validation,
        held_out=held_out,
    )
    tasks = [
        _task(source[i], i, {"dataset": dataset, "options": own}, split, system) for i in numbers
    ]
    return in_order(tasks, seed=seed, max_samples=max_samples, source=dataset)


def generated(dataset: str, options: Mapping[str, Any]) -> Entries:
    """The data set of a name and options. It is made once, and each of its entries is generated
    once.

    Raises: ConfigError where the package, the data set or an option is not there.
    """
    return _generated(dataset, json.dumps(dict(options), sort_keys=True, default=list))


class Entries:
    """A data set, with its entries kept: generating one can take longer than scoring an answer."""

    def __init__(self, dataset: Any):
        self.dataset = dataset
        self.kept = dict[int, Any]()
        self.evaluates = bool(
            re.search(
                r"\b(?:eval|exec|parse_expr)\(", inspect.getsource(type(dataset).score_answer)
            )
        )  # the reply

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number not in self.kept:
            self.kept[number] = self.dataset[number]
        return self.kept[number]

    def score(self, answer: str, number: int) -> float:
        """The package's own score."""
        return float(self.dataset.score_answer(answer, self[number]))


@functools.lru_cache(maxsize=16)
def _generated(dataset: str, options: str) -> Entries:
    try:
        import reasoning_gym as package
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"task=reasoning_gym needs the package: {install('reasoning_gym')} ({error})"
        ) from error
    if dataset not in DATASETS:
        raise ConfigError(
            f"task.dataset={dataset}: reasoning-gym has no such data"
            f" set.{nearest(dataset, DATASETS)}"
        )
    if dataset == "composite":
        raise ConfigError(
            "task.dataset=composite: name its data sets one by one, as parts of task=mixture"
        )
    try:
        return Entries(package.create_dataset(dataset, **json.loads(options)))
    except Exception as error:  # a wrong name or value; its config checks them with assertions, too
        raise ConfigError(
            f"task.dataset={dataset}, task.options: {type(error).__name__}: {error}"
        ) from error


def _task(
    entry: Mapping[str, Any], number: int, own: Mapping[str, Any], split: str, system: str | None
) -> Task:
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    return Task(
        id=f"{own['dataset']}/{split}/{number}",
        messages=(*messages, {"role": "user", "content": entry["question"]}),
        answer=entry["answer"] if isinstance(entry["answer"], str) else "",
        reward="reasoning_gym",
        environment="single_turn",
        metadata={"reasoning_gym": {**own, "number": number}},
    )


@no_gold
@reads_fields("reasoning_gym")
def reasoning_gym_reward(rollout: Rollout) -> float:
    """`score_answer` of the row's data set: mostly in 0 to 1, and for some data sets above 0 for a
    wrong answer of the right form.

    The answer is what stands in the last `<answer>…</answer>`, or the whole reply without such a
    tag. An episode without a final answer scores 0. So does an answer that the data set would
    evaluate as Python, where it is long or holds more than an expression of numbers, names, lists
    and the usual functions: what a policy writes does not run in this process.

    Raises: ConfigError for a row that is of no such data set, or where the package is not
      installed; what `score_answer` raises is the package's.
    """
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
