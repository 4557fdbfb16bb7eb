"""A game played by an agent of an agent library, pydantic-ai, written without rlkit.

It needs `pydantic-ai-slim[openai]`. The program hides a number from 1 to 20, tells the agent
"higher" or "lower", and leaves the guesses in guesses.json. library_verifier.py judges them.
"""

import json
import os
import re
import zlib
from pathlib import Path

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

TURNS = 16
agent = Agent(OpenAIChatModel("policy"))  # OPENAI_BASE_URL and OPENAI_API_KEY
number = (
    zlib.crc32(json.loads(os.environ["RLKIT_TASK"])["id"].encode()) % 20 + 1
)  # differs between tasks
said, history, found = "Guess my number from 1 to 20. I say higher or lower.", None, []
for _ in range(TURNS):
    reply = agent.run_sync(said, message_history=history)
    history = reply.all_messages()
    guesses = re.findall(r"\d{1,9}", reply.output)
    found.append(int(guesses[-1]) if guesses else None)
    if found[-1] == number:
        break
    said = (
        "Say a whole number." if not guesses else "higher" if int(guesses[-1]) < number else "lower"
    )
Path("guesses.json").write_text(json.dumps(found))
