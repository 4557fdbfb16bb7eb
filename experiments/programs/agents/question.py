"""The common parts of this folder's agents: the episode's question, the tool, and `leave`."""

import json
import os
from pathlib import Path

QUESTION = json.loads(os.environ["RLKIT_TASK"])["messages"][-1]["content"]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


# The same tool, for packages that take a schema.
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def leave(answer: object) -> None:
    """Write the answer of the agent where the verifier finds it."""
    Path("answer.txt").write_text(str(answer))
