#!/bin/bash
python3 - <<'END'
import json

with open("config.json") as file:
    found = json.load(file)
found["color"] = found.pop("colour")
found["size"] = 12
with open("config.json", "w") as file:
    json.dump(found, file)
END
