"""Sample in this process with the fast engine. The engine decodes with continuous batching:
completions join and leave the running batch at any step. Keys and values are stored in pages, and
the memory of the pages stays in place as long as the engine lives.

Each file imports only from the files above it in this list.

products.py    the matrix products of a step, adapters included
forward.py     the forward pass of a Llama-like trunk in as few calls as possible
attention.py   attention over cached keys and values, without copying them for grouped heads
cache.py       keys and values in pages, and the table of the pages of each slot
sampler.py     the state of every slot's completion, and the sampling of its next token
graphs.py      a decoding step as CUDA graphs
slots.py       which rows hold slots and pages, and which row loses them first
passes.py      the model's passes: reading contexts, or decoding one token in every slot
kernel.py      a decoding step as one call of compiled C
scheduler.py   when contexts are read, when tokens are sampled, when the host checks for ends
windows.py     models with a window in some layers, and their longer contexts
engine.py      the service and its options
"""

from rlkit.engines.cached.engine import Cached

__all__ = ["Cached"]
