"""Reward an episode of library_agent.py by how quickly its number was found."""

import json
import os
import sys
import zlib
from pathlib import Path

TURNS = 16
task = json.load(sys.stdin)
number = zlib.crc32(task["id"].encode()) % 20 + 1
guesses = json.loads(Path(os.environ["RLKIT_FOLDER"], "guesses.json").read_text())
reward = 1 - guesses.index(number) / TURNS if number in guesses else 0.0
os.write(int(os.environ["RLKIT_REWARD_FD"]), str(reward).encode())
