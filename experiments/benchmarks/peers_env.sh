#!/usr/bin/env bash
# The environment that peers.py runs TRL and rlkit in: rlkit's tested versions and the newest TRL beside them.
#
#     bash experiments/benchmarks/peers_env.sh FOLDER        # then: peers.py --python FOLDER/bin/python
#
# One environment for both sides: the same torch, transformers and tokenizers, so that what differs is the framework. PYTHON names the
# interpreter to build it from (python3 without it); TRL names the requirement ("trl>=1.16" without it).
set -euo pipefail

[ $# -eq 1 ] || { echo "usage: bash experiments/benchmarks/peers_env.sh FOLDER" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
"${PYTHON:-python3}" -m venv "$1"
"$1/bin/pip" install --quiet --constraint "$root/constraints.txt" "${TRL:-trl>=1.16}" "$root"
"$1/bin/python" - <<'PYTHON'
from importlib.metadata import version

print(", ".join(f"{name} {version(name)}" for name in ("trl", "torch", "transformers", "accelerate")))
PYTHON
