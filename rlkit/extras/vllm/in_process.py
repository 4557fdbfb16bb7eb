"""vLLM in this process, on the policy's device: a decoder driven by the service, one step of vLLM's
own loop at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import rlkit.extras.vllm.weights as weights
from rlkit.engines.service import Service
from rlkit.extras.vllm.request import make_generation, request
from rlkit.types import Generation, Policy, SamplingParams


class InProcess(Service):
    """The engine around one vLLM."""

    def __init__(self, policy: Policy, arguments: Mapping[str, Any], *, merge: bool, sleeps: bool):
        super().__init__()
        self.vllm = InProcessDecoder(policy, arguments, merge=merge, sleeps=sleeps)

    def make_decoder(self, policy: Policy) -> InProcessDecoder:
        self.vllm.policy = policy
        self.vllm.ready()
        return self.vllm

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Sleep once no episode asks for more; a later one wakes it again."""
        if self.vllm.asleep:
            self.vllm.ready()
        try:
            yield
        finally:
            for key in tuple(self.vllm.running):
                self.vllm.release(key)
            self.vllm.sleep()

    def close(self) -> None:
        self.vllm.llm.llm_engine.engine_core.shutdown()


class InProcessDecoder:
    """vLLM's LLM class as `rlkit.engines.service.Decoder`. It starts with random weights; the
    policy's are pushed.

    Args:
      arguments: of vLLM's LLM class.
      merge: under LoRA, push base + adapter as whole weights.
      sleeps: leave its memory to the trainer between collects; on a GPU only.
    """

    @weights.use_plain_numerics()
    def __init__(self, policy: Policy, arguments: Mapping[str, Any], *, merge: bool, sleeps: bool):
        cuda = next(policy.model.parameters()).device.type == "cuda"
        self.policy = policy
        self.merge = merge
        self.adapted = not merge and weights.lora_rank(policy.model) is not None
        self.sleeps = sleeps and cuda
        self.asleep = False
        self.base: Any = None  # marks of the pushed weights
        self.adapter: Any = None
        self.lora_request: Any = None
        self.pushed = self.rounds = 0
        self.running: set[int] = set()
        self.folder = weights.make_temporary_folder(self)
        weights.save_config(policy.model, self.folder)
        own: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
        with use_own_process():
            from vllm import LLM

            self.llm = LLM(
                str(self.folder),
                **own | dict(arguments) | ({"enable_sleep_mode": self.sleeps} if cuda else {}),
            )
        self.max_length = self.llm.model_config.max_model_len

    # ---------------------------------------------------------------------------------- completions

    @property
    def idle(self) -> bool:
        return not self.running

    def accepts(self, params: SamplingParams) -> bool:
        return True  # a request has parameters of its own

    def submit(
        self, key: int, prompt_ids: Sequence[int], seed: int, params: SamplingParams
    ) -> None:
        """Raise ConfigError if the prompt leaves no token to sample."""
        from vllm import SamplingParams as Params
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        asked = request(self.policy, self.max_length, prompt_ids, seed, params)
        given = Params(
            **asked, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        self.llm.llm_engine.add_request(
            str(key), tokens_input(list(prompt_ids)), given, lora_request=self.lora_request
        )
        self.running.add(key)

    @weights.use_plain_numerics()
    def advance(self) -> list[tuple[int, Generation]]:
        """Take one step of vLLM."""
        self.rounds += 1
        ended = {int(o.request_id): o.outputs[0] for o in self.llm.llm_engine.step() if o.finished}
        self.running -= ended.keys()
        logprobs = {
            key: [at[t].logprob for at, t in zip(o.logprobs, o.token_ids, strict=True)]
            for key, o in ended.items()
        }
        return [
            (key, make_generation(self.policy, o.token_ids, logprobs[key]))
            for key, o in ended.items()
        ]

    def release(self, key: int) -> None:
        """Give up a running completion; vLLM's prefix cache forgets by itself."""
        if key in self.running:
            self.running.discard(key)
            self.llm.llm_engine.abort_request([str(key)])

    # --------------------------------------------------------------------------- weights and memory

    @weights.use_plain_numerics()
    def ready(self) -> None:
        """Wake it, and give it any missing weights or adapter."""
        if self.asleep:
            torch.cuda.empty_cache()  # memory that the trainer no longer uses
            self.llm.wake_up(tags=["weights"])
            if self.adapted:  # the base never moves; it waited in the memory of the CPU
                self.wake_cache()
            else:
                self.base = None
        model = self.policy.model
        base = weights.base_mark(model, merge=self.merge)
        if base != self.base:
            self.base = self.adapter = None  # an interrupted push is made again, whole
            self.llm.collective_rpc(
                "reload_weights",
                kwargs={"weights_iterator": weights.list_weights(model, merge=self.merge)},
            )
            self.wake_cache()
            self.llm.reset_prefix_cache()
            self.base = base
        adapter = weights.adapter_mark(model) if self.adapted else None
        if adapter != self.adapter:
            from vllm.lora.request import LoRARequest

            self.adapter = None
            self.pushed += 1
            folder = self.folder / f"adapter-{self.pushed}"
            weights.save_adapter(model, folder)
            # A new name each time, so that nothing cached under an old one is used again.
            self.lora_request = LoRARequest(folder.name, self.pushed, str(folder))
            self.llm.llm_engine.add_lora(self.lora_request)
            shutil.rmtree(folder)
            self.adapter = adapter

    def wake_cache(self) -> None:
        """Wake the cache after the weights are pushed: until then they may need the room."""
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False

    def sleep(self) -> None:
        """Leave the memory to the trainer."""
        if self.sleeps and not self.asleep:
            # 2 forgets the weights: they are pushed when it wakes
            self.llm.sleep(level=1 if self.adapted else 2)
            self.asleep = True


@contextmanager
def use_own_process() -> Iterator[None]:
    """Start vLLM in this process. It prints errors alone, and leaves the trainer's threads and
    random numbers as they are."""
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    quiet = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    os.environ.update(
        settings | {name: value for name, value in quiet.items() if name not in os.environ}
    )
    set_num_threads = torch.set_num_threads
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads = set_num_threads  # on a CPU vLLM takes it away
