"""Turn data sets into tasks. A factory takes `split`, `seed` and `max_samples` by keyword and
returns a sequence of Task. `mixture` joins several tasks.

The problems of train, validation and test are disjoint. A row stays in its split if rows are added,
removed or reordered (tasks/splits.py).

Each file imports only files before it in this list: splits, _mixture, _arithmetic, games, source,
_conversations, _gsm8k, _jsonl, _mbpp.
"""

from rlkit.tasks._arithmetic import arithmetic
from rlkit.tasks._conversations import conversations
from rlkit.tasks._gsm8k import gsm8k
from rlkit.tasks._jsonl import jsonl, make_tasks
from rlkit.tasks._mbpp import mbpp
from rlkit.tasks._mixture import mixture
from rlkit.tasks.games import episodes, guess_number
from rlkit.tasks.source import read_rows
