"""vLLM as an engine: in this process, or behind the addresses of any number of `vllm serve`."""

from rlkit.engines.vllm.engine import VLLM

__all__ = ["VLLM"]
