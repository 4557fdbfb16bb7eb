"""vLLM as the engine, in this process or behind a server: token ids in, sampled ids and their log-probs out.

    policy ── its weights moved? ──▶ push (LoRA: the adapter alone) ──▶ vLLM ──▶ reply ──▶ follow ──▶ the next context at once

Whether the weights moved is read off the weights themselves, before every call: training, evaluation, rollouts and the start-up
check all get the policy as it is, and none of them has to say that it changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rlkit.engines.vllm_process import InProcess
from rlkit.engines.vllm_server import Lost, Sampled, Server, start
from rlkit.engines.vllm_weights import adapter_name, fingerprint, lora_rank, save_adapter, saved_model, whole_weights
from rlkit.errors import ConfigError, EngineError
from rlkit.types import Generation, Policy

Follow = Callable[[int, Generation], "tuple[Sequence[int], int] | None"]
INSTALL = "pip install -e '.[vllm]' where there is a GPU; for a CPU tests/vllm_env.sh FOLDER makes an environment with it"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
MOST_LOSSES = 5  # of a server in one call
COLDEST, HOTTEST = 0.01, 2.0  # vLLM raises lower temperatures, except 0, and refuses higher ones


class Backend(Protocol):
    """A vLLM that runs somewhere. `max_length`: tokens of a context and its reply together."""

    max_length: int

    def push_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None: ...
    def push_adapter(self, save: Callable[[Path], None]) -> None: ...
    def submit(self, index: int, context: Sequence[int], sampling: Mapping[str, Any]) -> None: ...
    def finished(self) -> list[Sampled]: ...  # waits for at least one
    def abort(self) -> None: ...  # all that is not finished
    def wake(self) -> bool: ...  # whether it still has the weights
    def sleep(self) -> None: ...
    def recover(self) -> None: ...  # after Lost: waits until it answers again, without the weights
    def close(self) -> None: ...


class VLLM:
    """The engine of `generation=vllm`. It starts at its first call and keeps what it has told vLLM of the policy.

    Args:
      server: null runs vLLM in this process, on the training device; a URL is a running `vllm serve`; start has rlkit start one.
      max_rows: replies sampled at once, > 0.
      gpu_memory_utilization: share of the GPU that it may take, in (0, 1], weights and cache together. Not for a foreign server.
      sleep: between calls it leaves the training GPU to the trainer. In this process and on a GPU only.
      merge: under LoRA, push base + adapter as whole weights: for models whose adapters vLLM does not take.
      restart_wait: seconds that a server may take to start, or to come back, >= 0.
      devices: CUDA_VISIBLE_DEVICES of the server that rlkit starts; null leaves it as it is.
      folder: where weights are written for a server, seen by both; null is a temporary folder of this machine.
      arguments: further ones of vLLM, by the names of its LLM class; not for a foreign server.
    Raises: ConfigError where vLLM is not installed and needed; ValueError for numbers out of range.
    """

    def __init__(
        self,
        *,
        server: str | None = None,
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
        if server not in (None, "start") and not server.startswith(("http://", "https://")):
            raise ValueError(f"server={server}: must be null, start, or the URL of a running `vllm serve`, such as http://localhost:8000")
        if server in (None, "start") and find_spec("vllm") is None:
            raise ConfigError(f"vLLM is not installed: {INSTALL}; or name a running server with generation.engine.server=http://HOST:8000")
        self.server, self.max_rows, self.share, self.sleeps, self.merge = server, max_rows, gpu_memory_utilization, sleep, merge
        self.restart_wait, self.devices, self.folder = restart_wait, devices, folder
        self.arguments = dict(arguments or {})
        self.backend: Backend | None = None
        self.model: Callable[[], Any] = lambda: None  # whose weights it has
        self.base: Any = None  # fingerprints of what was pushed
        self.adapter: Any = None
        self.losses = 0  # of the server, in this call

    def __call__(
        self,
        policy: Policy,
        contexts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        /,
        *,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        max_thinking_tokens: int | None = None,
        follow: Follow | None = None,
    ) -> list[Generation]:
        """Samples one reply per context, and those that follow.

        Args:
          policy, contexts, seeds: as for the reference engine.
          max_new_tokens: limit of a reply, > 0; the context limits of the model and of vLLM cut it further.
          temperature: 0 is greedy and gives the log-probs at temperature 1; else 0.01 … 2, which are vLLM's bounds.
          top_p, top_k: 1 and 0 cut nothing. Log-probs are those after temperature and cut.
          max_thinking_tokens: None; a thinking budget is for the other engines.
          follow: (index of the context, its reply) → (next context, its seed), which joins the running replies at once; None ends it.
        Returns: the last reply of each, in the order of the contexts; it ends with an end-of-sequence id ("stop") or is cut ("length").
        Raises: ConfigError for arguments out of range; EngineError where a server does not answer.
        """
        if max_new_tokens < 1 or not 0 < top_p <= 1 or top_k < 0 or not (temperature == 0 or COLDEST <= temperature <= HOTTEST):
            raise ConfigError(
                f"generation: max_new_tokens must be >= 1 (is {max_new_tokens}), temperature 0 or from {COLDEST} to {HOTTEST} "
                f"(is {temperature}), top_p > 0 and <= 1 (is {top_p}), top_k >= 0 (is {top_k})"
            )
        if max_thinking_tokens is not None:
            raise ConfigError("generation.max_thinking_tokens: vLLM keeps no such budget; use generation=cached, or set it to null")
        sampling: dict[str, Any] = {
            "temperature": float(temperature),
            "top_p": float(top_p),
            "top_k": top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        sampling |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": True, "stop_token_ids": list(policy.eos_token_ids)}
        with plain_numerics():
            backend = self.backend_of(policy)
            if not backend.wake():
                self.base = None
            self.losses = 0
            try:
                self.push(policy)
                return _play(self, policy, contexts, seeds, follow, sampling, max_new_tokens)
            finally:
                backend.abort()
                backend.sleep()

    def backend_of(self, policy: Policy) -> Backend:
        """The vLLM of this policy's model, started where it is not running yet."""
        if self.backend is None or self.model() is not policy.model:
            if self.backend is not None:
                self.backend.close()
            self.backend, self.base, self.adapter = None, None, None
            lora = None if self.merge else lora_rank(policy.model)
            http: dict[str, Any] = {"max_rows": self.max_rows, "restart_wait": self.restart_wait, "folder": self.folder}
            if self.server is None:
                # Asleep, the base of an adapter, which does not move, waits in the memory of the CPU.
                self.backend = InProcess(policy, self.started_with(policy, lora), sleeps=self.sleeps, keeps_weights=lora is not None)
            elif self.server == "start":
                self.backend = start(saved_model(policy), flags(self.started_with(policy, lora)), devices=self.devices, **http)
            else:
                self.backend = Server(self.server, **http)
            self.model = weakref.ref(policy.model)
        return self.backend

    def started_with(self, policy: Policy, lora: int | None) -> dict[str, Any]:
        """The arguments of vLLM, in this process or as a server, the user's own last."""
        cpu = next(policy.model.parameters()).device.type == "cpu"
        arguments: dict[str, Any] = {
            "dtype": dtype_name(policy.model),
            "max_model_len": policy.context_length,
            "max_num_seqs": self.max_rows,
            "logprobs_mode": "processed_logprobs",  # after temperature
            "generation_config": "vllm",  # none of the model's own defaults
            "enable_prefix_caching": True,  # a turn costs its new tokens
        }
        if cpu:
            arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}  # seconds to start, and not most of the memory
        else:
            arguments["gpu_memory_utilization"] = self.share
        if lora is not None:
            arguments |= {"enable_lora": True, "max_lora_rank": next((r for r in RANKS if r >= lora), lora), "max_loras": 1}
        return arguments | self.arguments

    def push(self, policy: Policy) -> None:
        """Gives vLLM the weights, or the adapter, that it does not have yet; a server that is lost meanwhile is waited for."""
        try:
            self.give(policy)
        except Lost:
            self.regain(policy)

    def regain(self, policy: Policy) -> None:
        """Waits for a lost server, which comes back without the weights, and pushes them. Raises EngineError where it stays away."""
        assert self.backend is not None
        self.losses += 1
        if self.losses > MOST_LOSSES:
            raise EngineError(f"generation.engine.server={self.server}: lost {self.losses} times in one rollout; look into its log")
        self.backend.recover()
        self.base = self.adapter = None
        self.push(policy)

    def give(self, policy: Policy) -> None:
        """`push`, once."""
        backend, model = self.backend, policy.model
        assert backend is not None
        adapted = not self.merge and lora_rank(model) is not None
        base = fingerprint(t for name, t in model.named_parameters() if not (adapted and "lora_" in name))
        if base != self.base:
            self.base = self.adapter = None  # whatever interrupts the push, the next one begins anew
            if not (adapted and isinstance(backend, Server)):  # a server has the base from where it was started
                backend.push_weights(whole_weights(model, merge=self.merge))
            self.base = base
        if not adapted:
            return
        active = adapter_name(model)
        adapter = fingerprint(t for name, t in model.named_parameters() if f".{active}." in name)
        if adapter != self.adapter:
            self.adapter = None
            backend.push_adapter(lambda folder: save_adapter(model, folder))
            self.adapter = adapter


def _play(
    engine: VLLM,
    policy: Policy,
    contexts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    follow: Follow | None,
    sampling: Mapping[str, Any],
    max_new_tokens: int,
) -> list[Generation]:
    """Replies as they come, and the contexts that follow them, until none follows."""
    backend = engine.backend
    assert backend is not None
    replies: dict[int, Generation] = {}
    waiting: dict[int, tuple[Sequence[int], int]] = {}

    def submit(index: int, context: Sequence[int], seed: int) -> None:
        room = min(policy.context_length, backend.max_length) - len(context)
        if room < 1:
            raise ConfigError(
                f"generation=vllm: a context has {len(context)} tokens, and vLLM was started for {backend.max_length} with the reply; "
                "raise its max_model_len"
            )
        waiting[index] = context, seed
        backend.submit(index, context, {**sampling, "seed": seed, "max_tokens": min(max_new_tokens, room)})

    for i, (context, seed) in enumerate(zip(contexts, seeds, strict=True)):
        submit(i, context, seed)
    while waiting:
        try:
            found = backend.finished()
        except Lost:
            engine.regain(policy)
            for i, given in waiting.items():
                submit(i, *given)
            continue
        for i, token_ids, logprobs in found:
            del waiting[i]
            ended = bool(token_ids) and token_ids[-1] in policy.eos_token_ids
            replies[i] = Generation(token_ids, logprobs, "stop" if ended else "length")
            following = follow(i, replies[i]) if follow is not None else None
            if following is not None:
                submit(i, *following)
    return [replies[i] for i in range(len(contexts))]


@contextmanager
def plain_numerics() -> Iterator[None]:
    """vLLM runs in its own precision, and not under the trainer's autocast."""
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False), torch.no_grad():
        yield


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of vLLM's LLM class as flags of `vllm serve`."""
    out = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        out += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return out


def dtype_name(model: Any) -> str:
    """bfloat16 where the trainer computes in it: by its weights, or under autocast."""
    weight = next(model.parameters())
    half = weight.dtype == torch.bfloat16 or torch.is_autocast_enabled(weight.device.type)
    return "bfloat16" if half else "float32"
