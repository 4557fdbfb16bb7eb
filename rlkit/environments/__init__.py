"""Provide the policy's counterparts in an episode: environments and tools. Parsers read tool calls
and thinking from a reply.

Each file imports only files before it in this list: _calculator, prompts, python, thinking, tools,
weather, _by_task, _single_turn, calling, tool_parsers, toolbox, _tool_use, games, session,
_dialogue, _guess_number, _gymnasium.
"""

from rlkit.environments._by_task import Setting, by_task, find_environment
from rlkit.environments._calculator import calculator
from rlkit.environments._dialogue import continue_with_step, dialogue, said_done
from rlkit.environments._guess_number import guess_number
from rlkit.environments._gymnasium import gymnasium
from rlkit.environments._single_turn import single_turn
from rlkit.environments._tool_use import tool_use
from rlkit.environments.prompts import with_system_prompt
from rlkit.environments.python import PythonSession, python_tool
from rlkit.environments.session import answer_calls, open_session
from rlkit.environments.thinking import split_reply, split_thinking
from rlkit.environments.tool_parsers import hermes, none, xml
from rlkit.environments.tools import execute, name_tools, tool_name, tool_schema, with_schema
from rlkit.environments.weather import get_weather
