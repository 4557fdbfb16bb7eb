#!/usr/bin/env bash
# Three network namespaces as three machines: `vllm serve` on one of them, and training on the others: in one process with asynchrony=overlap,
# and in two ranks (ddp). Needs root, iproute2 and an environment with vLLM (tests/extras/vllm/vllm_env.sh), whose python is PYTHON.
#
#     PYTHON=FOLDER/bin/python bash experiments/machines/server.sh
set -euo pipefail
[ "$(id -u)" = 0 ] && ip netns list > /dev/null 2>&1 || { echo "server.sh: needs root and the command ip (iproute2)" >&2; exit 2; }
python=${PYTHON:-python}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
clean() {
    [ $? = 0 ] || tail -n 20 "$work"/*.log >&2 || true
    [ -z "${server:-}" ] || { kill -- "-$server" 2> /dev/null; wait "$server" 2> /dev/null; } || true
    for host in rl-a rl-b rl-c; do ip netns delete "$host" 2> /dev/null || true; done
    ip link delete rl-switch 2> /dev/null || true
    rm -rf "$work"
}
trap clean EXIT
ip link add rl-switch type bridge && ip link set rl-switch up
number=0
for host in rl-a rl-b rl-c; do
    number=$((number + 1))
    ip netns add "$host" && ip -n "$host" link set lo up
    ip link add "$host" type veth peer name eth0 netns "$host" && ip link set "$host" master rl-switch up
    ip -n "$host" addr add "10.79.0.$number/24" dev eth0 && ip -n "$host" link set eth0 up
done
export PYTHONPATH=$here/../.. OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1 GLOO_SOCKET_IFNAME=eth0 VLLM_NO_USAGE_STATS=1
cd "$work"
"$python" - <<'PY'
from pathlib import Path
from rlkit.extras.vllm.weights import save_config, save_weights
from rlkit.models import load_policy

policy = load_policy(path="tiny")
save_weights(policy.model, Path("model"), merge=False)
save_config(policy.model, Path("model"))
policy.renderer.tokenizer.save_pretrained("model")
PY
set -m  # the server's processes are a group of their own
VLLM_SERVER_DEV_MODE=1 VLLM_HOST_IP=10.79.0.3 ip netns exec rl-c "$python" -m vllm.entrypoints.openai.api_server --model model \
    --host 10.79.0.3 --port 8000 --dtype float32 --max-model-len 1024 --max-num-seqs 32 --logprobs-mode processed_logprobs \
    --generation-config vllm --enforce-eager --kv-cache-memory-bytes 268435456 > server.log 2>&1 &
server=$!
set +m
for _ in $(seq 300); do
    ip netns exec rl-a "$python" -c "import urllib.request as r; r.urlopen('http://10.79.0.3:8000/health')" 2> /dev/null && break
    kill -0 "$server"
    sleep 1
done
train=(trainer.threads=1 trainer.accelerator=cpu trainer.steps=2 batch.prompts=4 evaluation.n=0 logger=none callbacks.checkpoint.model=false
    generation=vllm 'generation.engine.addresses=[http://10.79.0.3:8000]' "generation.engine.folder=$work")
ip netns exec rl-a "$python" -m rlkit train "${train[@]}" asynchrony=overlap hydra.run.dir=overlap > overlap.log 2>&1
for rank in 0 1; do
    ip netns exec "$([ $rank = 0 ] && echo rl-a || echo rl-b)" "$python" -m torch.distributed.run --nnodes=2 --node-rank=$rank --nproc-per-node=1 \
        --master-addr=10.79.0.1 --master-port=29500 -m rlkit train "${train[@]}" trainer=ddp trainer.devices=1 trainer.nodes=2 \
        hydra.run.dir=ddp > "ddp-$rank.log" 2>&1 &
    started[rank]=$!
done
for pid in "${started[@]}"; do wait "$pid"; done
"$python" "$here/rows.py" overlap ddp
echo
grep -c 'POST /v1/completions' server.log | sed 's/$/ completions asked of the server/'
grep -c 'POST /collective_rpc' server.log | sed 's/$/ times it was given weights/'
ip netns exec rl-b "$python" -m rlkit train "${train[@]}" 'generation.engine.addresses=[http://10.79.0.9:8000]' hydra.run.dir=none 2>&1 | grep '^rlkit: generation' || true
