"""The fast engine in this process: continuous batching over a key-value cache that lasts as long as
an episode.

engine.py      the service and its options
scheduler.py   which episode has which slot, which slots read, which draw
sampler.py     what every slot is in the middle of, and the draw of its next token
cache.py       keys and values of all slots
attention.py   attention over them without copies
forward.py     a Llama-like trunk in as few calls as it takes
graphs.py      a decoding step as CUDA graphs
"""

from rlkit.engines.cached.engine import Cached

__all__ = ["Cached"]
