#!/usr/bin/env bash
# Wheels of what a GPU machine without an index may lack, built where there is an index.
#
#     bash experiments/gpu_evidence/wheels.sh FOLDER [PYTHON]      # PYTHON: of the GPU machine, 3.12 without it
#
# Ten for rlkit (four of them for rich; datasets, dill and multiprocess only for part f), two for the tests marked gpu. antlr4 is only
# there as a source archive, which cannot be built without an index, so it is built here. The wheel of hypothesis is for
# PYTHON on x86-64 Linux, the others are pure Python.
set -euo pipefail

[ $# -ge 1 ] || { echo "usage: bash experiments/gpu_evidence/wheels.sh FOLDER [PYTHON]" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python -m pip download --quiet --no-deps --only-binary=:all: --python-version "${2:-3.12}" --dest "$1" \
    --constraint "$root/constraints.txt" hydra-core omegaconf datasets dill multiprocess \
    hypothesis sortedcontainers rich markdown-it-py mdurl pygments
python -m pip wheel --quiet --no-deps --wheel-dir "$1" antlr4-python3-runtime==4.9.3
ls -1sh "$1"
