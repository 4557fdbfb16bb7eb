"""Engines that turn token ids into sampled token ids and their log-probs. All of them keep the contract `types.Generate`."""

from rlkit.generation.cached import generate as cached
from rlkit.generation.transformers import generate
from rlkit.generation.vllm import VLLM

__all__ = ["VLLM", "cached", "generate"]
