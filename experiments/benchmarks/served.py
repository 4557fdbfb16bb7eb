"""Call rlkit's engines as plain functions, in this checkout and in much older ones.

In older checkouts engines were no services. With this file, one script can be timed against both,
pair by pair:

    PYTHONPATH=THIS_CHECKOUT python experiments/benchmarks/turns.py --once
    PYTHONPATH=OLDER_CHECKOUT python experiments/benchmarks/turns.py --once
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

Follow = Callable[
    [int, Any], "tuple[Sequence[int], int] | None"
]  # (index, completion) → its next prompt and seed, or None


def completions(
    name: str, policy: Any, prompts: Sequence[Sequence[int]], seeds: Sequence[int], **given: Any
) -> list[Any]:
    """Return the last completion of each prompt; all prompts are sampled at once.

    Args:
      name: "cached" or "transformers".
      given: max_rows, `follow` and `kernel` (for "cached" only), and the sampling parameters.
    """
    try:
        from rlkit import engines  # noqa: F401
    except ImportError:
        from rlkit import generation  # in checkouts without services

        return (generation.cached if name == "cached" else generation.generate)(
            policy, prompts, seeds, **given
        )
    engine = engine_of(name, given.pop("max_rows", 256), given.pop("kernel", "auto"))
    return _played(
        engine, policy, prompts, seeds, given.pop("follow", lambda index, reply: None), given
    )


@cache
def engine_of(name: str, max_rows: int, kernel: str) -> Any:
    """Return one engine for all rounds of the process, so that its cache keeps its memory.

    A run, too, has one engine for all of its steps.
    """
    from rlkit import engines

    if name == "cached":
        return engines.Cached(max_rows=max_rows, kernel=kernel)
    return engines.Transformers(max_rows=max_rows)


def _played(
    engine: Any, policy: Any, prompts: Any, seeds: Any, follow: Follow, given: dict[str, Any]
) -> list[Any]:
    from rlkit.system.loops import run, run_together
    from rlkit.types import SamplingParams

    params = SamplingParams(**given)

    async def episode(index: int, prompt: Sequence[int], seed: int) -> Any:
        try:
            while True:
                reply = await engine.generate(index, prompt, seed, params)
                after = follow(index, reply)
                if after is None:
                    return reply
                prompt, seed = after
        finally:
            engine.release(index)

    async def all_of_them() -> list[Any]:
        await engine.load(policy, 0)
        return await run_together(
            [
                episode(i, prompt, seed)
                for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
            ]
        )

    return run(all_of_them())
