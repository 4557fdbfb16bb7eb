"""Engines sample completions of the policy and return them as token ids. Every engine implements
`rlkit.types.Engine`.

Each file imports only files before it in this list: service, transformers, cached.
"""

from rlkit.engines.cached import Cached
from rlkit.engines.service import Batched
from rlkit.engines.transformers import Transformers
