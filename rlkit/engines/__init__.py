"""Engines: services that sample completions as token ids. All of them implement
`rlkit.types.Engine`.

Files in the order of their imports: service, transformers, cached.
"""

from rlkit.engines.cached import Cached
from rlkit.engines.service import Batched
from rlkit.engines.transformers import Transformers
