"""Serve one policy to any client, through the endpoint of environment=program."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any, NamedTuple

from rlkit.errors import ConfigError
from rlkit.extras.programs.contract import Ask
from rlkit.extras.programs.conversations import REMEMBERED, Conversations
from rlkit.training.experiment import ModelSpec, Sampling, TrainerSettings
from rlkit.types import (
    Environment,
    Policy,
    SamplingParams,
    Step,
    Task,
    ToolParser,
    ranges,
    safe,
)


@safe("model")
@ranges(port=(0, 65535))
class ServeRun(NamedTuple):
    """Describe an endpoint: its policy, and its port on loopback."""

    model: ModelSpec
    generation: Sampling
    parse_calls: ToolParser
    trainer: TrainerSettings
    port: int = 8000  # 0: any free port
    seed: int = 0


@asynccontextmanager
async def serve_endpoint(policy: Policy, x: ServeRun) -> AsyncIterator[dict[str, str]]:
    """Run the endpoint during the block. Yield the environment variables from which clients read
    its address and key.

    A conversation that extends a recorded conversation continues by token ids, as in training.
    Unsupported settings of requests have no effect, as with `environment.unsupported=ignore`.
    Raises: ConfigError if the port is taken.
    """
    from rlkit.extras.programs.server import list_addresses, open_door

    engine, params, keys = (
        x.generation.engine,
        SamplingParams(**x.generation.params)._replace(admission="free"),
        count(),
    )
    await engine.load(policy, 0)
    environment = Environment(parse_calls=x.parse_calls, max_steps=REMEMBERED)

    async def ready() -> None:
        """Return at once, so every request is sampled as it comes."""

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

    async def reply(*asked: Any, **settings: Any) -> Step:
        nonlocal known
        # so the memory is bounded; requests in progress still end in the old conversations
        if known.asked >= REMEMBERED:
            known = fresh()
        return await known.ask(*asked, **settings)

    async def counted(*asked: Any, **settings: Any) -> int:
        return await known.count(*asked, **settings)

    async with AsyncExitStack() as held:
        opening = open_door(Ask(reply, counted), port=x.port, ignore=True)
        try:
            door, address = await held.enter_async_context(opening)
        except OSError as error:
            raise ConfigError(
                f"port={x.port} cannot be opened on 127.0.0.1: {error}; choose another, or 0 for"
                " any"
            ) from error
        try:
            yield list_addresses(door, address)
        finally:
            known.release()
