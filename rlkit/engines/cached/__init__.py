"""The fast engine in this process: continuous batching over keys and values in pages, at fixed
places for the engine's life.

Each file imports only from the ones above it.

products.py    the products of a step, adapters included
forward.py     a Llama-like trunk in as few calls as it takes
attention.py   attention over keys and values without copies
cache.py       keys and values in pages, and the table of slots and their pages
sampler.py     the state of every slot's completion, and the draw of its next token
graphs.py      a decoding step as CUDA graphs
slots.py       slots and pages of rows, and the row to give way
passes.py      the model's passes over rows: contexts to read, or one token a slot
kernel.py      a decoding step as one call of compiled C
scheduler.py   when contexts are read, when slots draw, when the host looks
windows.py     contexts not seen whole by some layers
engine.py      the service and its options
"""

from rlkit.engines.cached.engine import Cached

__all__ = ["Cached"]
