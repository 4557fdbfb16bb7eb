"""Any program is an environment: an endpoint on loopback that speaks the protocols of chat
endpoints, and the programs that use it.

What needs aiohttp is imported when it is asked for.
"""

from rlkit.gateway._program import Client, program
from rlkit.gateway.wire import reply_message
