"""vLLM as the engine, in this process or behind a server: token ids in, sampled ids and their log-probs out.

    policy ── its weights moved? ──▶ push (LoRA: the adapter alone) ──▶ vLLM ──▶ reply ──▶ follow ──▶ the next context at once

Whether the weights moved is read off the weights themselves, before every call: training, held-out evaluation, rollouts and the start-up
check all get the policy as it is, and none of them has to say that it changed.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rlkit.errors import ConfigError, EngineError
from rlkit.generation.vllm_server import Lost, Sampled, Server, start
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
                self.backend = InProcess(policy, self, lora)
            elif self.server == "start":
                flags = serve_arguments(policy, self, lora)
                self.backend = start(saved_model(policy), flags, devices=self.devices, **http)
            else:
                self.backend = Server(self.server, **http)
            self.model = weakref.ref(policy.model)
        return self.backend

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


# -------------------------------------------------------------------------------------------------------- weights


def fingerprint(tensors: Iterator[Tensor] | Sequence[Tensor]) -> tuple[tuple[float, ...], ...]:
    """Numbers that differ where any of the tensors does: a hash of the bits, and the sum, of each, read on its device.

    The version counters of autograd cost less, but a fused optimizer does not move them.
    """
    given = [t.detach() for t in tensors]
    with torch.no_grad():
        bits = [torch.hash_tensor(t).view(torch.int64) for t in given]
        sums = [t.sum(dtype=torch.float64) for t in given]
    return (tuple(torch.stack(bits).tolist()), tuple(torch.stack(sums).tolist())) if given else ()


def whole_weights(model: Any, *, merge: bool) -> Iterator[tuple[str, Tensor]]:
    """Parameters by their names in a checkpoint: of a model under LoRA those of the base, with `merge` plus the adapter.

    A head that shares the embedding is there too: vLLM may keep a copy of it in another layout.
    """
    lora = hasattr(model, "disable_adapter")
    base = model.get_base_model() if lora else model
    layers = {name: m for name, m in base.named_modules() if hasattr(m, "get_delta_weight")} if lora and merge else {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if lora and "lora_" in name:
            continue
        weight, layer = parameter.detach(), layers.get(name.removesuffix(".base_layer.weight"))
        if layer is not None:
            weight = (weight.float() + layer.get_delta_weight(adapter_name(model)).detach().float()).to(weight.dtype)
        yield name.replace(".base_layer.", "."), weight


def adapter_name(model: Any) -> str:
    """The adapter that is switched on."""
    active = model.active_adapter
    return active if isinstance(active, str) else active[0]


def lora_rank(model: Any) -> int | None:
    """The rank of the adapter; None for a model without."""
    return model.peft_config[adapter_name(model)].r if hasattr(model, "disable_adapter") else None


def save_adapter(model: Any, folder: Path) -> None:
    """The adapter in PEFT's format, straight into the folder."""
    active = adapter_name(model)
    model.save_pretrained(folder, selected_adapters=[active], save_embedding_layers=False)
    if active != "default":  # PEFT makes a folder of each other one
        for file in (folder / active).iterdir():
            file.rename(folder / file.name)


@contextmanager
def plain_numerics() -> Iterator[None]:
    """vLLM runs in its own precision, and not under the trainer's autocast."""
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False), torch.no_grad():
        yield


# ------------------------------------------------------------------------------------------------------- starting


def shared_arguments(policy: Policy, engine: VLLM, lora: int | None) -> dict[str, Any]:
    """What vLLM is started with, in this process or as a server, the user's own arguments last."""
    cpu = next(policy.model.parameters()).device.type == "cpu"
    arguments: dict[str, Any] = {
        "dtype": dtype_name(policy.model),
        "max_model_len": policy.context_length,
        "max_num_seqs": engine.max_rows,
        "logprobs_mode": "processed_logprobs",  # after temperature
        "generation_config": "vllm",  # none of the model's own defaults
        "enable_prefix_caching": True,  # a turn costs its new tokens
    }
    if cpu:
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}  # seconds to start, and not most of the memory
    else:
        arguments["gpu_memory_utilization"] = engine.share
    if lora is not None:
        arguments |= {"enable_lora": True, "max_lora_rank": next((r for r in RANKS if r >= lora), lora), "max_loras": 1}
    return arguments | engine.arguments


def serve_arguments(policy: Policy, engine: VLLM, lora: int | None) -> list[str]:
    """The same as flags of `vllm serve`."""
    flags = []
    for name, value in shared_arguments(policy, engine, lora).items():
        flag = name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


def dtype_name(model: Any) -> str:
    """bfloat16 where the trainer computes in it: by its weights, or under autocast."""
    weight = next(model.parameters())
    half = weight.dtype == torch.bfloat16 or torch.is_autocast_enabled(weight.device.type)
    return "bfloat16" if half else "float32"


def temporary_folder(owner: Any) -> Path:
    """Gone with its owner, or at the end of the process."""
    folder = Path(tempfile.mkdtemp(prefix="rlkit-vllm-"))
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return folder


def saved_model(policy: Policy) -> Path:
    """A folder with all that `vllm serve` reads: config, tokenizer and weights, of the base under LoRA."""
    from safetensors.torch import save_file

    folder = temporary_folder(policy.model)
    save_config(policy.model, folder)
    policy.codec.tokenizer.save_pretrained(folder)
    weights = {name: weight.cpu().contiguous().clone() for name, weight in whole_weights(policy.model, merge=False)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save_config(model: Any, folder: Path) -> None:
    """The model's config.json, as vLLM reads it."""
    base = model.get_base_model() if hasattr(model, "disable_adapter") else model
    config = copy.deepcopy(base.config)
    config.architectures = [type(base).__name__]
    config.save_pretrained(folder)


class InProcess:
    """vLLM in this process, on the device of the policy. It starts with random weights: the policy's are pushed."""

    def __init__(self, policy: Policy, engine: VLLM, lora: int | None):
        self.device = next(policy.model.parameters()).device
        self.sleeps = engine.sleeps and self.device.type == "cuda"
        self.keeps_weights = lora is not None  # asleep: a base that does not move waits in the memory of the CPU
        self.asleep, self.pushed, self.adapter = False, 0, None
        self.running: set[int] = set()
        self.folder = temporary_folder(self)
        save_config(policy.model, self.folder)
        arguments = shared_arguments(policy, engine, lora) | {"enable_sleep_mode": self.sleeps}
        if self.device.type == "cpu":
            del arguments["enable_sleep_mode"]
        with own_process():
            from vllm import LLM

            self.llm = LLM(str(self.folder), **{"load_format": "dummy", "skip_tokenizer_init": True} | arguments)
        self.max_length = self.llm.model_config.max_model_len

    def push_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.wake_cache()
        self.llm.reset_prefix_cache()

    def push_adapter(self, save: Callable[[Path], None]) -> None:
        from vllm.lora.request import LoRARequest

        self.wake_cache()
        self.pushed += 1
        folder = self.folder / f"adapter-{self.pushed}"
        save(folder)
        self.adapter = LoRARequest(folder.name, self.pushed, str(folder))  # a new name: nothing cached under an old one is reused
        self.llm.llm_engine.add_lora(self.adapter)
        shutil.rmtree(folder)

    def submit(self, index: int, context: Sequence[int], sampling: Mapping[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(**sampling, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        self.llm.llm_engine.add_request(str(index), tokens_input(list(context)), parameters, lora_request=self.adapter)
        self.running.add(index)

    def finished(self) -> list[Sampled]:
        while True:
            outputs = [o for o in self.llm.llm_engine.step() if o.finished]
            if outputs:
                self.running -= {int(o.request_id) for o in outputs}
                return [_sampled(int(o.request_id), o.outputs[0]) for o in outputs]

    def abort(self) -> None:
        self.llm.llm_engine.abort_request([str(i) for i in self.running])
        self.running.clear()

    def wake(self) -> bool:
        if not self.asleep:
            return True
        torch.cuda.empty_cache()  # what the trainer no longer uses
        self.llm.wake_up(tags=["weights"])
        if self.keeps_weights:
            self.wake_cache()
        return self.keeps_weights

    def wake_cache(self) -> None:
        """After the weights are pushed: until then they may need the room."""
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False

    def sleep(self) -> None:
        if self.sleeps:
            self.llm.sleep(level=1 if self.keeps_weights else 2)  # 2 forgets the weights, which are pushed before the next reply
            self.asleep = True

    def recover(self) -> None:
        raise AssertionError("vLLM in this process cannot be lost")

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def _sampled(index: int, output: Any) -> Sampled:
    tokens = tuple(output.token_ids)
    return Sampled(index, tokens, tuple(at[token].logprob for at, token in zip(output.logprobs, tokens, strict=True)))


@contextmanager
def own_process() -> Iterator[None]:
    """vLLM starts in this process, prints errors alone, and leaves the trainer's threads and random numbers as they are."""
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1"}
    os.environ.update(settings | {name: value for name, value in quiet.items() if name not in os.environ})
    set_num_threads = torch.set_num_threads
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads = set_num_threads  # on a CPU vLLM takes it away
