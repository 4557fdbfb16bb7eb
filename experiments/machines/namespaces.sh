#!/usr/bin/env bash
# Two network namespaces as two machines: torchrun across them trains the default for two steps with ddp and with fsdp, and one process does the
# same. Needs root and iproute2; makes the namespaces and removes them.
#
#     bash experiments/machines/namespaces.sh
set -euo pipefail
[ "$(id -u)" = 0 ] && ip netns list > /dev/null 2>&1 || { echo "namespaces.sh: needs root and the command ip (iproute2)" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
clean() {
    for host in rl-a rl-b; do ip netns delete "$host" 2> /dev/null || true; done
    rm -rf "$work"
}
trap clean EXIT
for host in rl-a rl-b; do ip netns add "$host"; ip -n "$host" link set lo up; done
ip link add to-b netns rl-a type veth peer name to-a netns rl-b
ip -n rl-a addr add 10.77.0.1/24 dev to-b && ip -n rl-a link set to-b up
ip -n rl-b addr add 10.77.0.2/24 dev to-a && ip -n rl-b link set to-a up

export OMP_NUM_THREADS=1
train=(trainer.threads=1 trainer.accelerator=cpu trainer.steps=2 batch.prompts=4 evaluation.n=16 logger=none callbacks.checkpoint.model=false)
(cd "$work" && python -m rlkit train "${train[@]}" hydra.run.dir=one > one.log)
for strategy in ddp fsdp; do
    for rank in 0 1; do
        interface=$([ $rank = 0 ] && echo to-b || echo to-a)
        host=$([ $rank = 0 ] && echo rl-a || echo rl-b)
        (cd "$work" && GLOO_SOCKET_IFNAME=$interface ip netns exec "$host" torchrun --nnodes=2 --node-rank=$rank --nproc-per-node=1 \
            --master-addr=10.77.0.1 --master-port=29500 -m rlkit train "${train[@]}" "trainer=$strategy" trainer.devices=1 trainer.nodes=2 \
            "hydra.run.dir=$strategy" > "$strategy-$rank.log" 2>&1) &
        started[rank]=$!
    done
    for pid in "${started[@]}"; do wait "$pid" || { tail -n 20 "$work/$strategy"-*.log >&2; exit 1; }; done
done
cd "$work" && python "$here/rows.py" one ddp fsdp
