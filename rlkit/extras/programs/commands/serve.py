"""an endpoint on loopback for any client of OpenAI's or Anthropic's API: run=FOLDER, port=8000"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from rlkit.commands.agent import compose_command
from rlkit.commands.arguments import Arguments
from rlkit.commands.trust import with_limits
from rlkit.config.problems.numbers import sampling_problems
from rlkit.errors import refuse_problems
from rlkit.extras.programs.serving import serve_endpoint


def command(arguments: Arguments) -> int:
    """Serve a model as it is, or the newest checkpoint of a run, until it is interrupted.

    run=FOLDER  the policy of this run
    port=N      the port to listen on
    KEY=VALUE   any other setting; GROUP=OPTION an option

        rlkit serve
        rlkit serve run=outputs/latest
    """
    from rlkit.config.schema import build

    config, checkpoint = compose_command(arguments, "serve")
    x = with_limits(build(config), arguments)
    refuse_problems(sampling_problems(x.generation))
    from rlkit.commands.evaluate import restore_policy
    from rlkit.system.device import autocast, load_on_device

    policy, device = load_on_device(x)
    if checkpoint is not None:
        restore_policy(policy, checkpoint)

    async def serve() -> None:
        async with serve_endpoint(policy, x) as variables:
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

    with autocast(x, device), suppress(KeyboardInterrupt):
        asyncio.run(serve())
    return 0
