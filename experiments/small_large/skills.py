"""A number in words, written in digits, with an answer to imitate in each row."""

from __future__ import annotations

from rlkit.extras.pretrained import digits
from rlkit.types import Split, Task


def answered(*, split: Split, seed: int = 0, max_samples: int = 1024) -> list[Task]:
    """Return the tasks of `digits` without the worked examples; `metadata["messages"]` has the
    solution."""
    tasks = []
    for task in digits(split=split, seed=seed, max_samples=max_samples):
        question = (task.messages[-1],)
        solution = [*question, {"role": "assistant", "content": task.answer}]
        tasks.append(task._replace(messages=question, metadata={"messages": solution}))
    return tasks
