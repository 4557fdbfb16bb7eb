"""A game played by an agent of a kept agent library, pydantic-ai's, which knows nothing of rlkit.
Needs `pydantic-ai-slim[openai]`.

The program hides a number from 1 to 20, tells the agent "higher" or "lower", and writes to
reward.txt how quickly it was found.
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
)  # another one for each task
said, history, reward = "Guess my number from 1 to 20. I say higher or lower.", None, 0.0
for turn in range(TURNS):
    reply = agent.run_sync(said, message_history=history)
    history = reply.all_messages()
    guesses = re.findall(r"\d{1,9}", reply.output)
    if guesses and int(guesses[-1]) == number:
        reward = 1 - turn / TURNS
        break
    said = (
        "Say a whole number." if not guesses else "higher" if int(guesses[-1]) < number else "lower"
    )
Path("reward.txt").write_text(f"{reward}")
