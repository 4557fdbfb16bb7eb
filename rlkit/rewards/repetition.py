"""A penalty on replies that go in circles."""

from __future__ import annotations

from collections.abc import Iterator

from rlkit.errors import ConfigError
from rlkit.types import Rollout, gives


@gives("raw")
def repetition(rollout: Rollout, *, n: int = 3, penalty: float = 1.0) -> float:
    """-penalty * (1 - distinct n-grams / n-grams), over everything that the policy wrote.

    Args:
      n: words of an n-gram, > 0; case is folded. Sources take 3 (open-r1) up to 40 on tokens (Yeo et al.).
      penalty: of a reply that says one thing for ever, ≥ 0.
    Returns: a score in (-penalty, 0]. Thinking counts as well as content. Each of these texts is looked at by itself: no n-gram spans
      two of them, and what a later reply says again is no repetition. 0 where every text is shorter than n words.
    Raises: ConfigError for n or penalty out of range.
    Source: Yeo et al. 2025, appendix C.2, arXiv:2502.03373, there token by token; this is its sum over a reply.

    >>> from rlkit.types import Step, Task
    >>> repetition(Rollout(Task("t", ()), (Step((), (), (), (), "stop", content="so so so so so"),)), n=2)
    -0.75
    """
    if n < 1 or penalty < 0:
        raise ConfigError(f"repetition: n must be > 0 and penalty >= 0, not n={n}, penalty={penalty}")
    total = distinct = 0
    for text in _texts(rollout):
        words = text.casefold().split()
        grams = list(zip(*(words[i:] for i in range(n)), strict=False))
        total += len(grams)
        distinct += len(set(grams))
    return -penalty * (total - distinct) / total if total > distinct else 0.0


def _texts(rollout: Rollout) -> Iterator[str]:
    for step in rollout.steps:
        yield from (step.thinking, step.content)
