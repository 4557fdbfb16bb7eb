"""`rlkit serve`: the endpoint of environment=program on a model or a trained run, for trying a
policy with any client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

from rlkit.commands.agent import composed
from rlkit.commands.arguments import Arguments
from rlkit.commands.trust import with_limits
from rlkit.config.problems.numbers import sampling_problems
from rlkit.errors import ConfigError
from rlkit.types import Environment, Messages, Policy, SamplingParams, Step, Task

if TYPE_CHECKING:
    from rlkit.training.experiment import ServeRun

REMEMBERED = 256  # replies that a later conversation may continue by token ids


@asynccontextmanager
async def serving(policy: Policy, x: ServeRun) -> AsyncIterator[dict[str, str]]:
    """The endpoint while the block runs; gives the variables in which clients look for it.

    Conversations that extend a recorded one continue it by token ids, as in training. Raises:
    ConfigError where the port is taken.
    """
    from rlkit.episodes.programs import Conversations
    from rlkit.gateway.server import addresses, opened_door

    engine = x.generation.engine
    params = SamplingParams(**x.generation.params)._replace(admission="free")
    keys = count()
    await engine.load(policy, 0)
    environment = Environment(parse_calls=x.parse_calls, max_steps=REMEMBERED)

    async def ready() -> None:
        """Every request is sampled as it comes."""

    def fresh() -> Conversations:
        return Conversations(
            policy,
            environment,
            engine,
            params,
            Task("serve", ()),
            seed=x.seed,
            keys=keys,
            ready=ready,
        )

    known = fresh()

    async def ask(
        messages: Messages, tools: Sequence[Mapping[str, Any]] = (), limit: int | None = None
    ) -> Step:
        nonlocal known
        if known.asked >= REMEMBERED:  # those that are being sampled end in the old one
            known = fresh()
        return await known.ask(messages, tools, limit)

    try:
        async with opened_door(ask, port=x.port) as (door, address):
            try:
                yield addresses(door, address)
            finally:
                known.release()
    except OSError as error:
        raise ConfigError(
            f"port={x.port} cannot be opened on 127.0.0.1: {error}; choose another, or 0 for any"
        ) from error


def command(arguments: Arguments) -> int:
    """Serves a model as it is, or that of a run (run=FOLDER: its newest checkpoint), until it is
    interrupted."""
    from rlkit.config.schema import build

    config, checkpoint = composed(arguments, "serve")
    x = with_limits(build(config), arguments)
    problems = sampling_problems(x.generation)
    if problems:
        raise ConfigError("\n".join(problems))
    from rlkit.commands.evaluate import restored_policy
    from rlkit.system.device import autocast, on_device

    policy, device = on_device(x)
    if checkpoint is not None:
        restored_policy(policy, checkpoint)

    async def serve() -> None:
        async with serving(policy, x) as variables:
            print(
                "\n".join(
                    f"export {name}={value}"
                    for name, value in variables.items()
                    if "PROXY" not in name.upper()
                )
            )
            print(
                "# /v1/chat/completions, /v1/responses and /v1/messages; the model is `policy`;"
                " Ctrl-C ends it",
                flush=True,
            )
            await asyncio.Event().wait()

    with autocast(x, device):
        asyncio.run(serve())
    return 0
