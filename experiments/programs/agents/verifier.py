"""Reward 1 if the last number in answer.txt is the task's answer, else 0."""

import json
import os
import re
import sys
from pathlib import Path

answer = Path(os.environ["RLKIT_FOLDER"], "answer.txt")
numbers = re.findall(r"-?\d+", answer.read_text()) if answer.exists() else []
right = numbers[-1:] == [json.load(sys.stdin)["answer"]]
os.write(int(os.environ["RLKIT_REWARD_FD"]), str(float(right)).encode())
