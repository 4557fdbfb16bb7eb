"""Engines that turn token ids into sampled token ids and their log-probs. All of them keep the contract `types.Generate`."""

from rlkit.engines.cached import generate as cached
from rlkit.engines.transformers import generate
from rlkit.engines.vllm import VLLM

__all__ = ["VLLM", "cached", "generate"]
