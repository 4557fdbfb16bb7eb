"""The fast engine in this process: continuous batching. Keys and values are in pages, and their
memory stays in place as long as the engine lives.

Each file imports only from the ones above it.

products.py    the matrix products of a step, adapters included
forward.py     a Llama-like trunk in as few calls as possible
attention.py   attention over keys and values without copies
cache.py       keys and values in pages, and the table of slots and their pages
sampler.py     the state of every slot's completion, and the draw of its next token
graphs.py      a decoding step as CUDA graphs
slots.py       which rows hold slots and pages, and which row loses them first
passes.py      the model's passes over rows: contexts to read, or one token a slot
kernel.py      a decoding step as one call of compiled C
scheduler.py   when contexts are read, when slots draw, when the host checks for ends
windows.py     contexts longer than the window of some layers
engine.py      the service and its options
"""

from rlkit.engines.cached.engine import Cached

__all__ = ["Cached"]
