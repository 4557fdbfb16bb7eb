"""An agent for delays.py: it asks twice, waits before each request, and may crash.

It needs only the standard library.
"""

import json
import os
import random
import sys
import time
import urllib.request

DELAY, CRASHES = float(os.environ["DELAY"]), float(os.environ["CRASHES"])
TOOL = json.loads(os.environ["TOOL"])


def ask(messages: list) -> dict:
    """Send a request and return the policy's message."""
    body = json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    ) as reply:
        return json.load(reply)["choices"][0]["message"]


task = json.loads(os.environ["RLKIT_TASK"])
rng, messages = random.Random(task["id"]), task["messages"]
for turn in range(2):
    delay, crash = rng.uniform(0, DELAY), rng.random() < CRASHES
    time.sleep(delay)
    if crash:
        sys.exit(f"crashed in turn {turn}")
    messages += [ask(messages), {"role": "user", "content": "Are you sure?"}]
