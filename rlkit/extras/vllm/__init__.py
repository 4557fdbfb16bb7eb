"""vLLM as an engine, in this process or behind any number of `vllm serve` processes, and as a
teacher behind servers.

Each file imports only files before it in this list: request, weights, guard, in_process, server,
pool, teacher, engine.
"""

from rlkit.extras.vllm.engine import VLLM
from rlkit.extras.vllm.teacher import vllm_teacher

__all__ = ["VLLM", "vllm_teacher"]
