"""A third for each change that was asked for, and a third for the rest."""

import json

from parts import is_rest_kept

try:
    with open("config.json") as file:
        found = json.load(file)
except (OSError, ValueError):
    found = None
if not isinstance(found, dict):
    found = {}
right = {
    "renamed": found.get("color") == "red" and "colour" not in found,
    "resized": found.get("size") == 12,
    "rest_kept": is_rest_kept(found),
}
scores = {name: float(value) for name, value in right.items()}
with open("/logs/verifier/reward.json", "w") as file:
    json.dump({**scores, "reward": sum(scores.values()) / len(scores)}, file)
