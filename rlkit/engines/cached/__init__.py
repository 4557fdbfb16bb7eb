"""The fast engine in this process: continuous batching over keys and values in pages, which stay
where they are for the engine's life.

Each file imports only from those above it.

products.py    what a step multiplies by, adapters included
forward.py     a Llama-like trunk in as few calls as it takes
attention.py   attention over keys and values without copies
cache.py       keys and values in pages, and the table of who has which page
sampler.py     what every slot is in the middle of, and the draw of its next token
graphs.py      a decoding step as CUDA graphs
slots.py       which row has which slot and pages, and which one gives way
passes.py      what the model computes for rows: contexts to read, or one token a slot
kernel.py      a decoding step as one call of compiled C
scheduler.py   when contexts are read, when slots draw, when the host looks
windows.py     contexts that some layers do not see whole
engine.py      the service and its options
"""

from rlkit.engines.cached.engine import Cached

__all__ = ["Cached"]
