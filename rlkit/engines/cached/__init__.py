"""The fast engine in this process: continuous batching over a key-value cache that lasts as long as
an episode.

Each file imports only from those above it.

products.py    what a step multiplies by, adapters included
forward.py     a Llama-like trunk in as few calls as it takes
attention.py   attention over keys and values without copies
cache.py       keys and values of all slots
sampler.py     what every slot is in the middle of, and the draw of its next token
graphs.py      a decoding step as CUDA graphs
kernel.py      a decoding step as one call of compiled C
scheduler.py   which episode has which slot, which slots read, which draw
engine.py      the service and its options
"""

from rlkit.engines.cached.engine import Cached

__all__ = ["Cached"]
