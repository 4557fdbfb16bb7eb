"""Connect programs and servers of others. A program plays an episode through an endpoint on
loopback. Tools come from MCP servers. Games have two players, or many boards that are stepped
together. Tasks are read from Harbor's format.

aiohttp is imported only when it is needed.

Each file imports only files before it in this list: _confinement, _guard_child, _gymnasium_vector,
_harbor, _named_games, _two_players, contract, record, settings, slots, stopping, _processes,
_commands, tool_servers, wire, _mcp, conversations, server, _verifier, hidden_tests, _players,
_program, serving, commands.
"""

from rlkit.extras.programs._gymnasium_vector import gymnasium_vector
from rlkit.extras.programs._harbor import harbor
from rlkit.extras.programs._mcp import mcp
from rlkit.extras.programs._named_games import named_game
from rlkit.extras.programs._players import Client
from rlkit.extras.programs._program import program
from rlkit.extras.programs._two_players import two_players
from rlkit.extras.programs.contract import Ask, Ended, RequestRefused
from rlkit.extras.programs.conversations import asking
from rlkit.extras.programs.wire import reply_message
