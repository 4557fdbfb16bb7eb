"""Write train.jsonl and test.jsonl beside this file: which of two numbers is larger?

python experiments/rates/smollm2/pairs.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path


def ask(a: int, b: int) -> list[dict[str, str]]:
    """Ask about two numbers in a conversation, after two answered questions."""
    messages = []
    for first, second in ((58, 731), (904, 26), (a, b)):
        question = f"Which number is larger, {first} or {second}?"
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": str(max(first, second))},
        ]
    return messages[:-1]


def main() -> None:
    rng = random.Random(0)
    pairs = rng.sample([(a, b) for a in range(10, 1000) for b in range(10, a)], 500)
    rows = []
    for pair in pairs:
        prompt = ask(*rng.sample(pair, 2))
        rows.append(json.dumps({"prompt": prompt, "answer": str(max(pair))}))
    for name, part in (("train", rows[:400]), ("test", rows[400:])):
        path = Path(__file__).with_name(f"{name}.jsonl")
        path.write_text("".join(f"{row}\n" for row in part))


if __name__ == "__main__":
    main()
