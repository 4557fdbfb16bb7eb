"""A `vllm serve` that is spoken to over HTTP: token ids as prompts, weights through a folder that both see.

It needs `--logprobs-mode processed_logprobs --generation-config vllm` and, in its environment, VLLM_SERVER_DEV_MODE=1 for whole weights or
VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 with `--enable-lora --max-lora-rank RANK` for adapters. One that rlkit starts has all of it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from rlkit.errors import EngineError

LONGEST = 3600.0  # seconds that one answer may take
LAST_LINES = 15  # of a server that died
POLL = 0.5  # seconds between two looks at a server that is to come


class Lost(Exception):
    """The server no longer answers; it may come back."""


class Sampled(NamedTuple):
    """What vLLM gave for the context of this index."""

    row: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Server:
    """A running server, and what rlkit started of it.

    Args:
      url: its address.
      max_rows: requests at once.
      restart_wait: seconds that it may take to come back.
      folder: where weights are written for it; None is a temporary folder.
      process, log: of a server that rlkit started.
    Raises: EngineError where nothing answers.
    """

    def __init__(
        self,
        url: str,
        *,
        max_rows: int,
        restart_wait: float,
        folder: str | None = None,
        process: subprocess.Popen[bytes] | None = None,
        log: Path | None = None,
    ):
        self.url, self.restart_wait, self.process, self.log = url.rstrip("/"), restart_wait, process, log
        self.folder = Path(tempfile.mkdtemp(prefix="rlkit-vllm-", dir=folder))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.pool = ThreadPoolExecutor(max_rows, thread_name_prefix="rlkit-vllm")
        self.running: dict[Future[Sampled], int] = {}
        self.pushed, self.adapter = 0, ""
        if process is not None:
            self.come_up()
        self.name, self.max_length = self.served()

    # ------------------------------------------------------------------------------------------- as an engine

    def push_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Writes them where the server reads them, and has it read them."""
        from safetensors.torch import save_file

        folder = self.fresh("weights")
        save_file({name: weight.cpu().contiguous().clone() for name, weight in weights}, folder / "model.safetensors")
        hint = "start it with VLLM_SERVER_DEV_MODE=1 in its environment, and let it see generation.engine.folder"
        self.ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}, hint=hint)
        self.ask("/reset_prefix_cache", {}, hint=hint)
        shutil.rmtree(folder)

    def push_adapter(self, save: Callable[[Path], None]) -> None:
        """Each under a new name, so that nothing cached under an old one is reused."""
        folder = self.fresh("adapter")
        save(folder)
        hint = (
            "start it with --enable-lora --max-lora-rank RANK and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and let it see "
            "generation.engine.folder; or push whole weights with generation.engine.merge=true"
        )
        self.ask("/v1/load_lora_adapter", {"lora_name": folder.name, "lora_path": str(folder)}, hint=hint)
        if self.adapter:
            self.ask("/v1/unload_lora_adapter", {"lora_name": self.adapter}, hint=hint)
            shutil.rmtree(self.folder / self.adapter)
        self.adapter = folder.name

    def fresh(self, what: str) -> Path:
        """A new folder, of a name that no other run has."""
        self.pushed += 1
        folder = self.folder / f"{self.folder.name}-{what}-{self.pushed}"
        folder.mkdir()
        return folder

    def submit(self, index: int, context: Sequence[int], sampling: Mapping[str, Any]) -> None:
        body = {**sampling, "model": self.adapter or self.name, "prompt": list(context), "logprobs": 0, "return_token_ids": True}
        self.running[self.pool.submit(self.complete, index, body)] = index

    def complete(self, index: int, body: Mapping[str, Any]) -> Sampled:
        choice = self.ask("/v1/completions", body)["choices"][0]
        return Sampled(index, tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))

    def finished(self) -> list[Sampled]:
        """Waits for at least one. Raises Lost where the server went away; what was running is then given up."""
        done, _ = wait(self.running, return_when=FIRST_COMPLETED)
        try:
            return [future.result() for future in done]
        except (Lost, EngineError):
            self.abort()
            raise
        finally:
            for future in done:
                self.running.pop(future, None)

    def abort(self) -> None:
        for future in self.running:
            future.cancel()
        wait(self.running)
        self.running.clear()

    def wake(self) -> bool:
        return True

    def sleep(self) -> None:
        """It has a device of its own."""

    def recover(self) -> None:
        """Waits for a foreign server to come back. Raises EngineError where it does not, or where it was rlkit's own."""
        if self.process is not None:
            raise EngineError(self.obituary("the vLLM server that rlkit started no longer answers"))
        print(f"rlkit: {self.url} no longer answers; waiting up to {self.restart_wait:g} s for it to come back", file=sys.stderr)
        self.adapter = ""
        self.come_up()
        self.name, self.max_length = self.served()

    # ------------------------------------------------------------------------------------------------- over HTTP

    def ask(self, path: str, body: Mapping[str, Any] | None = None, *, hint: str = "") -> Any:
        """POSTs a body, or GETs; the answer's JSON. Raises Lost, or EngineError where the server refuses."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=LONGEST) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            if error.code >= 500 and not self.healthy():
                raise Lost from error
            raise EngineError(f"{self.url}{path} answers {error.code}: {said or error.reason}" + (f"; {hint}" if hint else "")) from error
        except (OSError, HTTPException) as error:  # refused, reset, or closed in the middle
            raise Lost(str(getattr(error, "reason", error))) from error
        try:
            return json.loads(text)
        except ValueError:  # some answers are words, or nothing
            return text.decode(errors="replace")

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=10):
                return True
        except (OSError, HTTPException):
            return False

    def come_up(self) -> None:
        """Waits until it answers. Raises EngineError after `restart_wait`, or once a process of rlkit's own has ended."""
        until = time.monotonic() + self.restart_wait
        while not self.healthy():
            if self.process is not None and self.process.poll() is not None:
                raise EngineError(self.obituary(f"the vLLM server that rlkit started ended with status {self.process.returncode}"))
            if time.monotonic() > until:
                raise EngineError(self.obituary(f"{self.url} did not answer for {self.restart_wait:g} s (generation.engine.restart_wait)"))
            time.sleep(POLL)

    def served(self) -> tuple[str, int]:
        """The name of the model that it serves, and its context length."""
        try:
            models = self.ask("/v1/models")["data"]
        except Lost as error:
            raise EngineError(
                f"generation.engine.server={self.url}: nothing answers there ({error}); start it with `vllm serve`, or have one started "
                "with generation.engine.server=start"
            ) from error
        model = next(m for m in models if not m.get("parent"))
        return model["id"], int(model["max_model_len"])

    # ------------------------------------------------------------------------------------------- rlkit's own one

    def obituary(self, what: str) -> str:
        """What happened, and the last lines of the log where there is one."""
        if self.log is None:
            return what
        lines = self.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join([f"{what}; the last lines of its log:", *(f"  {line}" for line in lines)])

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        if self.process is not None:
            end(self.process)


def start(model: Path, flags: Sequence[str], *, max_rows: int, restart_wait: float, devices: str | None, folder: str | None) -> Server:
    """Starts `vllm serve` of a saved model on a free port of this machine; it ends with this process.

    Raises: EngineError with its last lines where it does not come up.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = model / "serve.log"
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # set where vLLM has run in this process
    environment |= {"CUDA_VISIBLE_DEVICES": devices} if devices is not None else {}
    server = "vllm.entrypoints.openai.api_server"  # `vllm serve` asks for the package vllm, which on a CPU has another name
    command = [sys.executable, "-m", server, "--model", str(model), "--host", "127.0.0.1", "--port", str(port), *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
    atexit.register(end, process)
    print(f"rlkit: started vllm serve on port {port}, its log is {log}", file=sys.stderr)
    address = f"http://127.0.0.1:{port}"
    return Server(address, max_rows=max_rows, restart_wait=restart_wait, folder=folder, process=process, log=log)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a server and the processes that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
