"""vLLM in this process, on the policy's device. It is a decoder driven by the service: each call of
`advance` runs one step of vLLM's own loop."""

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
    """Serve completions from one vLLM in this process."""

    def __init__(self, policy: Policy, arguments: Mapping[str, Any], *, merge: bool, sleeps: bool):
        super().__init__()
        self.vllm = InProcessDecoder(policy, arguments, merge=merge, sleeps=sleeps)

    def make_decoder(self, policy: Policy) -> InProcessDecoder:
        self.vllm.policy = policy
        self.vllm.ready()
        return self.vllm

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Wake vLLM at the beginning of the block, and let it sleep when no episode requests a
        completion."""
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
    """Use vLLM's LLM class as `rlkit.engines.service.Decoder`. It starts with random weights, and
    `ready` pushes the policy's weights to it.

    Args:
      arguments: arguments of vLLM's LLM class.
      merge: under LoRA, push base + adapter as whole weights.
      sleeps: on a GPU, free vLLM's memory for the trainer while no episode is played.
    """

    @weights.use_plain_numerics()
    def __init__(self, policy: Policy, arguments: Mapping[str, Any], *, merge: bool, sleeps: bool):
        cuda = next(policy.model.parameters()).device.type == "cuda"
        self.policy = policy
        self.merge = merge
        self.adapted = not merge and weights.lora_rank(policy.model) is not None
        self.sleeps = sleeps and cuda
        self.asleep = False
        # fingerprints of the base weights and of the adapter pushed to vLLM
        self.base: Any = None
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
        return True  # each request has its own parameters

    def submit(
        self, key: int, prompt_ids: Sequence[int], seed: int, params: SamplingParams
    ) -> None:
        """Give a completion to vLLM.

        Raises: ConfigError if the prompt leaves no token to sample.
        """
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
        """Run one step of vLLM, and return the completions that have ended."""
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
        """Abort a running completion. vLLM's prefix cache needs no call: it evicts old entries by
        itself."""
        if key in self.running:
            self.running.discard(key)
            self.llm.llm_engine.abort_request([str(key)])

    # --------------------------------------------------------------------------- weights and memory

    @weights.use_plain_numerics()
    def ready(self) -> None:
        """Wake vLLM, and push the weights or the adapter if they have changed."""
        if self.asleep:
            torch.cuda.empty_cache()  # memory that the trainer no longer uses
            self.llm.wake_up(tags=["weights"])
            if self.adapted:  # the base never changes; vLLM has kept it in the CPU's memory
                self.wake_cache()
            else:
                self.base = None
        model = self.policy.model
        base = weights.base_mark(model, merge=self.merge)
        if base != self.base:
            self.base = self.adapter = None  # so an interrupted push is repeated from its start
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
            # Use a new name each time, so that vLLM uses nothing cached under an old name.
            self.lora_request = LoRARequest(folder.name, self.pushed, str(folder))
            self.llm.llm_engine.add_lora(self.lora_request)
            shutil.rmtree(folder)
            self.adapter = adapter

    def wake_cache(self) -> None:
        """Allocate vLLM's cache again. Call it only after the weights are pushed, because the push
        may need the memory."""
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False

    def sleep(self) -> None:
        """Free vLLM's memory for the trainer."""
        if self.sleeps and not self.asleep:
            # level 2 also drops the weights: `ready` pushes them when vLLM wakes
            self.llm.sleep(level=1 if self.adapted else 2)
            self.asleep = True


@contextmanager
def use_own_process() -> Iterator[None]:
    """Start vLLM in this process within the block. vLLM prints only errors, and leaves the
    trainer's number of threads and random numbers unchanged."""
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
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        torch.set_num_threads = set_num_threads  # on a CPU vLLM replaces this function
