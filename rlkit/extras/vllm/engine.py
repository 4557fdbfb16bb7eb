"""The engine of `generation=vllm`. It runs vLLM in this process, or asks servers.

    load ── the weights moved? ──▶ push (LoRA: the adapter alone) ──▶ vLLM
    generate ──▶ in this process: the service's next step │ servers: one HTTP request ──▶ completion

Each load compares the weights themselves with the weights pushed before. So training, evaluation,
rollouts and the start-up check all sample from the current policy, and none of them has to report a
change.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import torch

from rlkit.distributed import ranks
from rlkit.errors import ConfigError, EngineError
from rlkit.extras.vllm.in_process import InProcess
from rlkit.extras.vllm.pool import ServerPool
from rlkit.extras.vllm.request import check_reply
from rlkit.extras.vllm.server import Server, start_server
from rlkit.extras.vllm.weights import lora_rank, save_model
from rlkit.types import Generation, Policy, SamplingParams, reaches

INSTALL = (
    "pip install -e '.[vllm]' where there is a GPU; for a CPU tests/extras/vllm/vllm_env.sh FOLDER"
    " makes an environment with it"
)
THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks of adapters supported by vLLM


@reaches(
    addresses="address",
    devices="variable",
    folder="path",
    arguments="program",
)
class VLLM:
    """Implement the contract `rlkit.types.Engine` with vLLM. vLLM starts at the first load, and the
    engine remembers the weights vLLM has.

    Args:
      addresses: URLs of running `vllm serve` processes; each episode is assigned to one of them by
        its key. Empty: run vLLM in this process, on the training device. [start]: rlkit starts one
        server. Several ranks share the servers; rank 0 starts the server and pushes the weights.
      max_rows: the most completions sampled at once by each server, > 0.
      gpu_memory_utilization: share of the GPU's memory for vLLM, in (0, 1], for weights and cache
        together. It does not apply to a server started by somebody else.
      sleep: True frees vLLM's memory on the training GPU for the trainer while no episode is
        played. It applies only to vLLM in this process, on a GPU.
      merge: under LoRA, push base + adapter as whole weights. Use it for models whose adapters vLLM
        does not support.
      restart_wait: the most seconds, >= 0, to wait for a server to start, or to come back if no
        server is left.
      devices: CUDA_VISIBLE_DEVICES of the server started by rlkit. null leaves the variable
        unchanged.
      folder: a folder, visible to all servers, for passing weights to them. null is a temporary
        folder of this machine.
      arguments: further arguments of vLLM, by the names of its LLM class. They do not apply to a
        server started by somebody else.
    Raises: ConfigError if vLLM is needed and not installed. ValueError for arguments out of range.
    """

    def __init__(
        self,
        *,
        addresses: Sequence[str] = (),
        max_rows: int = 256,
        gpu_memory_utilization: float = 0.4,
        sleep: bool = True,
        merge: bool = False,
        restart_wait: float = 300.0,
        devices: str | None = None,
        folder: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ):
        if max_rows < 1 or restart_wait < 0 or not 0 < gpu_memory_utilization <= 1:
            raise ValueError(
                f"max_rows must be >= 1 (is {max_rows}), restart_wait >= 0 (is {restart_wait}), "
                f"gpu_memory_utilization in (0, 1] (is {gpu_memory_utilization})"
            )
        self.addresses = _addresses(addresses)
        if self.addresses in ([], ["start"]) and find_spec("vllm") is None:
            raise ConfigError(
                f"vLLM is not installed: {INSTALL}; or name servers with"
                " generation.engine.addresses=[http://HOST:8000]"
            )
        self.max_rows = max_rows
        self.share = gpu_memory_utilization
        self.sleeps = sleep
        self.merge = merge
        self.restart_wait = restart_wait
        self.devices = devices
        self.folder = folder
        self.arguments = dict(arguments or {})
        self.backend: InProcess | ServerPool | None = None
        self.model: Any = None  # the model that the backend was started for
        self.busy_s = 0.0
        # number of completions in progress, and the time at which the first of them began
        self.running = 0
        self.since = 0.0
        self.told = False  # True after the note about generation.admission was printed
        # If two processes use the servers in turns: a function to wait until the other one is done.
        self.lent: Callable[[], None] | None = None

    async def load(self, weights: Policy, version: int) -> None:
        """Sample from the present weights of this policy. Weights are pushed only if they have
        changed since the last load.

        With servers and several ranks, all ranks call this at the same time.

        Raises: EngineError if a server does not answer or refuses the weights, or while completions
        are being sampled.
        """
        if self.running:
            raise EngineError(
                f"VLLM.load: {self.running} completions are being sampled; await them"
            )
        if self.backend is not None and self.model is not weights.model:
            self.backend.close()
            self.backend = None
        if self.backend is None:
            self.backend = self._started(weights)
            self.model = weights.model
        if self.lent is not None and isinstance(self.backend, ServerPool):
            self.lent()
            self.backend.forget()
        await self.backend.load(weights, version)

    async def generate(
        self, key: int, prompt_ids: Sequence[int], seed: int, params: SamplingParams
    ) -> Generation:
        """Sample one completion.

        Args: as in `rlkit.types.Engine`. The temperature is 0, or 0.01 … 2, and there is no
          thinking budget. Log-probs are taken after temperature, top-k and top-p. A completion is
          also truncated at the context limits of the model and of vLLM.
        Raises: ConfigError for settings that vLLM cannot sample. EngineError before the first load,
        and if no server answers.
        """
        check_reply(params)
        if self.backend is None:
            raise EngineError(
                "VLLM.generate: there are no weights yet; await load(policy, version) first"
            )
        if params.admission != "free" and not self.told:
            print(
                f"rlkit: generation.admission={params.admission}: vLLM lets answers join as they"
                " come, as with free",
                file=sys.stderr,
            )
            self.told = True
        self.since = self.since if self.running else time.perf_counter()
        self.running += 1
        try:
            return await self.backend.generate(
                key, prompt_ids, seed, params._replace(admission="free")
            )
        finally:
            self.running -= 1
            self.busy_s += 0.0 if self.running else time.perf_counter() - self.since

    def release(self, key: int) -> None:
        """End the episode. After the last episode, vLLM in this process sleeps."""
        if self.backend is not None:
            self.backend.release(key)

    def problems(self, experiment: Any) -> list[str]:
        """Report two problems of a config, as in `rlkit.types.ChecksConfig`: asynchrony=overlap
        without addresses of servers, and an address of this machine in a run on several
        machines."""
        problems = []
        if experiment.asynchrony.mode == "overlap" and self.addresses in ([], ["start"]):
            problems.append(
                "asynchrony=overlap: two processes sample, and each would start a vLLM of its own;"
                " start `vllm serve` and name it in generation.engine.addresses, or choose"
                " asynchrony=lag"
            )
        near = [a for a in self.addresses if a == "start" or urlsplit(a).hostname in THIS_MACHINE]
        if experiment.trainer.nodes > 1 and near:
            nodes = experiment.trainer.nodes
            problems.append(
                f"generation.engine.addresses: {near[0]} is another server on each of"
                f" trainer.nodes={nodes} machines, and rank 0 alone gives weights; start `vllm"
                " serve` and name it as all machines reach it"
            )
        return problems

    def _started(self, policy: Policy) -> InProcess | ServerPool:
        """Start a vLLM for this policy's model."""
        if not self.addresses:
            # vLLM's UniProcExecutor gets the device "cuda" without a number: the first GPU.
            if ranks.size() > 1 and next(policy.model.parameters()).device.type == "cuda":
                refused = "generation=vllm in this process takes the first GPU on every rank"
                raise ConfigError(
                    f"{refused}; start servers and name them in generation.engine.addresses, or use"
                    " generation=cached"
                )
            return InProcess(policy, self._arguments(policy), merge=self.merge, sleeps=self.sleeps)
        if self.addresses == ["start"]:
            servers = [self._start(policy)]
        else:
            servers = [Server(address, max_rows=self.max_rows) for address in self.addresses]
        return ServerPool(
            servers, merge=self.merge, restart_wait=self.restart_wait, folder=self.folder
        )

    def _start(self, policy: Policy) -> Server:
        """Start a server on rank 0, for all ranks."""
        own: list[Server] = []

        def started() -> str:
            server = start_server(
                save_model(policy),
                make_flags(self._arguments(policy)),
                max_rows=self.max_rows,
                devices=self.devices,
            )
            own.append(server)
            return server.url

        url = ranks.broadcast(started)
        return own[0] if own else Server(url, max_rows=self.max_rows)

    def _arguments(self, policy: Policy) -> dict[str, Any]:
        """Return the arguments of vLLM, in this process or for a server. The user's own arguments
        come last and win."""
        lora = None if self.merge else lora_rank(policy.model)
        arguments: dict[str, Any] = {
            "dtype": name_dtype(policy.model),
            "max_model_len": policy.context_length,
            "max_num_seqs": self.max_rows,
            "logprobs_mode": "processed_logprobs",  # log-probs after temperature, top-k and top-p
            "generation_config": "vllm",  # do not use the model's own defaults
            "enable_prefix_caching": True,  # a turn costs only its new tokens
        }
        if next(policy.model.parameters()).device.type == "cpu":
            # start in seconds, and do not take most of the memory
            arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
        else:
            arguments["gpu_memory_utilization"] = self.share
        if lora is not None:
            arguments |= {
                "enable_lora": True,
                "max_lora_rank": next((r for r in RANKS if r >= lora), lora),
                "max_loras": 1,
            }
        return arguments | self.arguments


def _addresses(addresses: Sequence[str]) -> list[str]:
    """Return the addresses as a list.

    Raises: ValueError for invalid addresses.
    """
    given = [addresses] if isinstance(addresses, str) else list(addresses)
    if given != ["start"] and (
        len({*given}) < len(given) or not all(a.startswith(("http://", "https://")) for a in given)
    ):
        raise ValueError(
            f"addresses={given}: must be [], [start], or different URLs of running `vllm serve`, as"
            " [http://localhost:8000]"
        )
    return given


def make_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Convert arguments of vLLM's LLM class to flags of `vllm serve`. A mapping becomes JSON, and a
    list a word for each of its items."""
    out = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            out.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            values = value if isinstance(value, list) else [value]
            words = [json.dumps(own) if isinstance(own, dict) else str(own) for own in values]
            out += [f"--{flag}", *words]
    return out


def name_dtype(model: Any) -> str:
    """Return "bfloat16" if the trainer computes in bfloat16, by its weights or under autocast. Else
    return "float32"."""
    weight = next(model.parameters())
    half = weight.dtype == torch.bfloat16 or torch.is_autocast_enabled(weight.device.type)
    return "bfloat16" if half else "float32"
