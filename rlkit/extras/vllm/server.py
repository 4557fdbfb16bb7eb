"""One `vllm serve` process, over HTTP. Prompts are sent as token ids, and weights go through a
folder visible to both sides.

The server needs `--logprobs-mode processed_logprobs --generation-config vllm`. To receive whole
weights, it also needs VLLM_SERVER_DEV_MODE=1 in its environment. To receive adapters, it needs
VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and `--enable-lora --max-lora-rank RANK`. A server started by
rlkit has all of these.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from rlkit.errors import EngineError
from rlkit.extras.vllm.guard import guard_command
from rlkit.extras.vllm.request import make_generation, request
from rlkit.system.waiting import waiting, waiting_outside
from rlkit.types import Generation, Policy, SamplingParams

LONGEST = 3600.0  # the most seconds to wait for an answer
SOON = 10.0  # the same for an answer without any computation
LAST_LINES = 15  # number of lines shown from a dead server's log


class Lost(Exception):
    """Report that the server no longer answers. It may come back."""


class NotAsked(Lost):
    """Report that the server was lost while a request waited for its turn, so the server never got
    it."""


class Server:
    """A server at an address.

    Args:
      url: the server's address.
      max_rows: the most requests at once, > 0.
      process, log: the process and the log file of a server started by rlkit, else None.
    """

    def __init__(
        self,
        url: str,
        *,
        max_rows: int,
        process: subprocess.Popen[bytes] | None = None,
        log: Path | None = None,
    ):
        self.url = url.rstrip("/")
        self.max_rows = max_rows
        self.process = process
        self.log = log
        self.losses = -1
        self.forget()
        self.loop: asyncio.AbstractEventLoop | None = None

    def forget(self) -> None:
        """Mark the server as lost. If it comes back, it has only the weights of its start."""
        self.losses += 1
        # fingerprint of the weights pushed to the server; None: no push since its start
        self.has: Any = None
        # names of the server's model, and of the adapter on top of it
        self.name = ""
        self.adapter = ""
        self.max_length = 0

    async def meet(self) -> None:
        """Read the name and the context length of the server's model.

        Raises: Lost.
        """
        models = json.loads(await self.ask("/v1/models", limit=SOON))["data"]
        model = next(m for m in models if not m.get("parent"))
        self.name = model["id"]
        self.max_length = int(model["max_model_len"])

    async def push_weights(self, folder: Path) -> None:
        """Make the server read whole weights from a folder.

        Raises: Lost. EngineError if the server refuses.
        """
        hint = (
            "start it with VLLM_SERVER_DEV_MODE=1 in its environment, and let it see"
            " generation.engine.folder"
        )
        await self.ask(
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}},
            hint=hint,
        )
        await self.ask("/reset_prefix_cache", {}, hint=hint)
        self.adapter = ""

    async def push_adapter(self, folder: Path) -> None:
        """Make the server read an adapter from a folder, under the folder's name, and drop the
        previous adapter.

        Raises: as `push_weights`.
        """
        hint = (
            "start it with --enable-lora --max-lora-rank RANK and"
            " VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and let it see generation.engine.folder; or push"
            " whole weights with generation.engine.merge=true"
        )
        await self.ask(
            "/v1/load_lora_adapter", {"lora_name": folder.name, "lora_path": str(folder)}, hint=hint
        )
        before = self.adapter
        self.adapter = folder.name
        if before:
            await self.ask("/v1/unload_lora_adapter", {"lora_name": before}, hint=hint)

    async def complete(
        self, policy: Policy, prompt_ids: Sequence[int], seed: int, params: SamplingParams
    ) -> Generation:
        """Sample one completion. If the caller stops waiting, the connection closes and the server
        abandons the completion.

        Raises: Lost.
        """
        body = request(policy, self.max_length, prompt_ids, seed, params)
        body |= {
            "model": self.adapter or self.name,
            "prompt": list(prompt_ids),
            "logprobs": 0,
            "return_token_ids": True,
        }
        losses = self.losses
        async with self.slots():
            # the server may have been lost and come back during the wait, without the weights
            if self.losses != losses:
                raise NotAsked
            with waiting_outside():
                choice = json.loads(await self.ask("/v1/completions", body))["choices"][0]
        return make_generation(policy, choice["token_ids"], choice["logprobs"]["token_logprobs"])

    async def score(self, ids: Sequence[int], k: int) -> list[Any]:
        """Score a row's tokens at temperature 1.

        Returns: for each position {id: {logprob}}, with the log-probs of the row's token and of the
        k likeliest tokens. The first position has None.
        Raises: Lost. EngineError if the server refuses, or if the row is too long for it.
        """
        if len(ids) >= self.max_length:  # the server must also sample one token
            raise EngineError(
                f"{self.url}: a row has {len(ids)} of its {self.max_length} tokens; raise its"
                " --max-model-len"
            )
        body = {
            "model": self.name,
            "prompt": list(ids),
            "prompt_logprobs": k,
            "max_tokens": 1,
            "temperature": 0.0,
        }
        async with self.slots():
            # by default a server gives at most 20 log-probs
            hint = f"start it with --max-logprobs {k} or more" if k > 20 else ""
            with waiting("the server", self.url):
                answer = json.loads(await self.ask("/v1/completions", body, hint=hint))
            return list(answer["choices"][0]["prompt_logprobs"])

    async def decode_text(self, ids: Sequence[int]) -> str:
        """Decode ids with the server's tokenizer.

        Raises: as `ask`.
        """
        return str(
            json.loads(await self.ask("/detokenize", {"model": self.name, "tokens": list(ids)}))[
                "prompt"
            ]
        )

    def slots(self) -> asyncio.Semaphore:
        """Return a semaphore for `max_rows` requests at once. A semaphore belongs to one event
        loop, and each collect may run in a new loop, so a new loop gets a new semaphore."""
        if self.loop is not asyncio.get_running_loop():
            self.loop = asyncio.get_running_loop()
            self.free = asyncio.Semaphore(self.max_rows)
        return self.free

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        hint: str = "",
        limit: float = LONGEST,
    ) -> bytes:
        """Send a request and return the answer: POST with a body, GET without.

        Args:
          hint: advice for the message of an EngineError.
          limit: the most seconds to wait.
        Raises: Lost. EngineError with the hint if the server refuses.
        """
        try:
            async with asyncio.timeout(limit):
                status, text = await fetch(self.url + path, body)
        except (OSError, HTTPException) as error:  # connection refused, reset, or closed too early
            raise Lost(str(error) or type(error).__name__) from error
        if status >= 500 and not await self.healthy():
            raise Lost(f"it answers {status}")
        if status >= 400:
            said = text.decode(errors="replace")[:500]
            raise EngineError(
                f"{self.url}{path} answers {status}: {said}" + (f"; {hint}" if hint else "")
            )
        return text

    async def healthy(self) -> bool:
        """Return whether the server reports that it is healthy."""
        try:
            async with asyncio.timeout(SOON):
                return (await fetch(self.url + "/health"))[0] < 400
        except (OSError, HTTPException):
            return False

    def obituary(self) -> str:
        """Return the last lines of the server's log if rlkit started it; else an empty string."""
        lines = self.log.read_text(errors="replace").splitlines()[-LAST_LINES:] if self.log else ()
        return (
            "\n".join(["; the last lines of its log:", *(f"  {line}" for line in lines)])
            if lines
            else ""
        )


async def fetch(url: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
    """Fetch the status and the content of a URL. Use POST if there is a body, else GET.

    Raises: OSError and HTTPException.
    """
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    data = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{'GET' if body is None else 'POST'} {parts.path} HTTP/1.1\r\nHost:"
        f" {parts.netloc}\r\nConnection: close\r\n"
    )
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port or (443 if secure else 80), ssl=secure or None
    )
    try:
        writer.write(head.encode() + data)
        received = io.BytesIO(await reader.read())
        response = HTTPResponse(SimpleNamespace(makefile=lambda mode: received))  # type: ignore[arg-type]
        response.begin()
        return response.status, response.read()
    finally:
        writer.close()


def start_server(
    model: Path, flags: Sequence[str], *, max_rows: int, devices: str | None
) -> Server:
    """Start `vllm serve` for a saved model, on a free port of this machine. The server ends when
    this process ends, even if it was killed by SIGKILL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = model / "serve.log"
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    # this process has the variable if vLLM has run in it
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    environment |= {"CUDA_VISIBLE_DEVICES": devices} if devices is not None else {}
    # The command `vllm serve` needs a package named vllm, but for a CPU it has another name.
    server = "vllm.entrypoints.openai.api_server"
    # two servers of one model get the same name, whatever their folders are
    kind = hashlib.sha256((model / "config.json").read_bytes()).hexdigest()[:12]
    address = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", f"rlkit-{kind}"]
    command = [sys.executable, "-m", server, "--model", str(model), *address, *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            guard_command(command),
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    atexit.register(end, process)
    print(f"rlkit: started vllm serve on port {port}, its log is {log}", file=sys.stderr)
    return Server(f"http://127.0.0.1:{port}", max_rows=max_rows, process=process, log=log)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a server and all processes started by it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
