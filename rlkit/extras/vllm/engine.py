"""The engine of `generation=vllm`: vLLM in this process, or servers.

    load ── the weights moved? ──▶ push (LoRA: the adapter alone) ──▶ vLLM
    generate ──▶ in this process: the service's next step │ servers: one HTTP request ──▶ completion

Each load compares the weights themselves to see if they moved. So training, evaluation, rollouts
and the start-up check all get the policy as it is, and none of them has to report a change.
"""

from __future__ import annotations

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
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # supported by vLLM


@reaches(
    addresses="address",
    devices="variable",
    folder="path",
    arguments="program",
)
class VLLM:
    """The contract `rlkit.types.Engine` with vLLM. It starts at the first load and remembers which
    weights vLLM has.

    Args:
      addresses: of running `vllm serve`; episodes are dealt to them by position. Empty runs vLLM in
        this process, on the training device; [start] makes rlkit start one server. Several ranks
        share the servers: rank 0 starts one and gives them the weights.
      max_rows: completions sampled at once, of each server, > 0.
      gpu_memory_utilization: share of the GPU for it, in (0, 1], weights and cache together. Not
        for a foreign server.
      sleep: leave the training GPU to the trainer while no episode is played. In this process and
        on a GPU only.
      merge: under LoRA, push base + adapter as whole weights, for models with adapters unknown to
        vLLM.
      restart_wait: seconds, >= 0, for a server to start, or to come back if no other is left.
      devices: CUDA_VISIBLE_DEVICES of the server started by rlkit; null leaves it as it is.
      folder: for the weights of servers, seen by all; null is a temporary folder of this machine.
      arguments: further ones of vLLM, by the names of its LLM class; not for a foreign server.
    Raises: ConfigError if vLLM is needed and not installed; ValueError for arguments out of range.
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
        self.model: Any = None  # the backend was started for it
        self.busy_s = 0.0
        # number of completions in progress, and the time since there are any
        self.running = 0
        self.since = 0.0
        self.told = False  # how answers join
        # of servers used by two processes in turns: waits for the other one's end
        self.lent: Callable[[], None] | None = None

    async def load(self, weights: Policy, version: int) -> None:
        """Sample from this policy's weights as they are now. Weights are pushed only if they moved
        since the last load.

        With servers and several ranks, all ranks call this at the same time.
        Raises: EngineError if a server does not answer or refuses, or while completions are being
          sampled.
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
        """One completion.

        Args: as in `rlkit.types.Engine`. Temperatures are 0, or 0.01 … 2; there is no thinking
          budget. Log-probs are taken after temperature and cut. The context limits of the model and
          of vLLM cut a completion further.
        Raises: ConfigError for settings that vLLM cannot sample; EngineError before the first load,
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
        """End the episode. After the last one, vLLM in this process sleeps."""
        if self.backend is not None:
            self.backend.release(key)

    def problems(self, experiment: Any) -> list[str]:
        """Refuse asynchrony=overlap without addresses, and addresses of one machine on several, as
        in `rlkit.types.ChecksConfig`."""
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
            # vLLM's UniProcExecutor is given "cuda" without a number.
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
        """The arguments of vLLM, in this process or as a server, the user's own last."""
        lora = None if self.merge else lora_rank(policy.model)
        arguments: dict[str, Any] = {
            "dtype": name_dtype(policy.model),
            "max_model_len": policy.context_length,
            "max_num_seqs": self.max_rows,
            "logprobs_mode": "processed_logprobs",  # after temperature
            "generation_config": "vllm",  # none of the model's own defaults
            "enable_prefix_caching": True,  # a turn costs its new tokens
        }
        if next(policy.model.parameters()).device.type == "cpu":
            # seconds to start, and not most of the memory
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
    """The addresses as a list. Raises: ValueError for wrong ones."""
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
    """Arguments of vLLM's LLM class as flags of `vllm serve`."""
    out = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            out.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            out += [f"--{flag}", str(value)]
    return out


def name_dtype(model: Any) -> str:
    """bfloat16 if the trainer computes in it, by its weights or under autocast."""
    weight = next(model.parameters())
    half = weight.dtype == torch.bfloat16 or torch.is_autocast_enabled(weight.device.type)
    return "bfloat16" if half else "float32"
