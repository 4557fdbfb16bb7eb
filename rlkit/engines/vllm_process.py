"""vLLM in this process: a backend of `rlkit.engines.vllm`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkit.engines.vllm_server import Sampled
from rlkit.engines.vllm_weights import save_config, temporary_folder
from rlkit.types import Policy


class InProcess:
    """vLLM in this process, on the device of the policy. It starts with random weights: the policy's are pushed."""

    def __init__(self, policy: Policy, arguments: Mapping[str, Any], *, sleeps: bool, keeps_weights: bool):
        """Starts it.

        Args:
          arguments: of vLLM's LLM class.
          sleeps: between calls it leaves its memory to others; on a GPU only.
          keeps_weights: asleep it keeps the weights in the memory of the CPU, else it forgets them.
        """
        cuda = next(policy.model.parameters()).device.type == "cuda"
        self.sleeps, self.keeps_weights = sleeps and cuda, keeps_weights
        self.asleep, self.pushed, self.adapter = False, 0, None
        self.running: set[int] = set()
        self.folder = temporary_folder(self)
        save_config(policy.model, self.folder)
        own: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
        with own_process():
            from vllm import LLM

            self.llm = LLM(str(self.folder), **own | dict(arguments) | ({"enable_sleep_mode": self.sleeps} if cuda else {}))
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
