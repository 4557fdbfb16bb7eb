#!/usr/bin/env bash
# Debian's SLURM with two nodes on one machine: each is a network namespace with an address and a host name of its own, in which slurmd runs.
# Needs root, iproute2 and the packages slurm-wlm and munge, and for the sweep the extra submitit. Makes everything, and removes it.
#
#     bash experiments/machines/slurm.sh
set -euo pipefail
[ "$(id -u)" = 0 ] && command -v ip slurmctld slurmd munged > /dev/null || { echo "slurm.sh: needs root, iproute2, slurm-wlm, munge" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
mkdir "$work/state" "$work/munge" && chmod 755 "$work" "$work/munge"
export SLURM_CONF=$work/slurm.conf OMP_NUM_THREADS=1
clean() {
    status=$?
    [ $status = 0 ] || tail -n 20 "$work"/*.log >&2 || true
    scancel --user=root 2> /dev/null || true
    for own in rl-a rl-b ctl munge; do [ ! -f "$work/$own.pid" ] || kill "$(cat "$work/$own.pid")" 2> /dev/null || true; done
    sleep 1
    for host in rl-a rl-b; do ip netns delete "$host" 2> /dev/null || true; done
    ip link delete rl-slurm 2> /dev/null || true
    rm -rf "$work"
}
trap clean EXIT
jobs=()

# Two hosts and the switch between them.
ip link add rl-slurm type bridge && ip addr add 10.78.0.254/24 dev rl-slurm && ip link set rl-slurm up
printf '127.0.0.1 localhost\n10.78.0.254 %s\n10.78.0.1 rl-a\n10.78.0.2 rl-b\n' "$(hostname)" > "$work/hosts"
number=0
for host in rl-a rl-b; do
    number=$((number + 1))
    mkdir "$work/spool-$host"
    ip netns add "$host" && ip -n "$host" link set lo up
    ip link add "$host" type veth peer name eth0 netns "$host" && ip link set "$host" master rl-slurm up
    ip -n "$host" addr add "10.78.0.$number/24" dev eth0 && ip -n "$host" link set eth0 up
done

# SLURM: one controller, a daemon on each host.
cat > "$SLURM_CONF" <<CONF
ClusterName=rlkit
SlurmctldHost=$(hostname -s)(10.78.0.254)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge/socket
CryptoType=crypto/munge
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool-%n
SlurmctldPidFile=$work/ctl.pid
SlurmdPidFile=$work/%n.pid
SlurmctldLogFile=$work/ctl.log
SlurmdLogFile=$work/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=rl-a NodeAddr=10.78.0.1 CPUs=2 RealMemory=4096
NodeName=rl-b NodeAddr=10.78.0.2 CPUs=2 RealMemory=4096
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
echo IgnoreSystemd=yes > "$work/cgroup.conf"
dd if=/dev/urandom of="$work/munge/key" bs=1024 count=1 status=none && chmod 400 "$work/munge/key"
munged --force --socket="$work/munge/socket" --key-file="$work/munge/key" --pid-file="$work/munge.pid" --seed-file="$work/munge/seed" \
    --log-file="$work/munge.log"
slurmctld
for host in rl-a rl-b; do  # not `ip netns exec`, which hides the cgroups that slurmd asks for
    nsenter --net="/run/netns/$host" unshare --uts --mount sh -c "hostname $host && mount --bind $work/hosts /etc/hosts && exec slurmd"
done
for _ in $(seq 60); do [ "$(sinfo -h -t idle -o %D)" = 2 ] && break; sleep 1; done
sinfo -o "| %N | %D nodes | %T |" -h

train=(trainer.threads=1 trainer.accelerator=cpu batch.prompts=4 evaluation.n=0 logger=none callbacks.checkpoint.model=false callbacks.checkpoint.every=1)
two=(trainer.devices=1 trainer.nodes=2)
cd "$work"
echo; echo "## srun, and torchrun under srun"; echo
python -m rlkit train "${train[@]}" trainer.steps=2 hydra.run.dir=one > one.log 2>&1
srun --nodes=2 --ntasks-per-node=1 python -m rlkit train "${train[@]}" trainer.steps=2 trainer=ddp "${two[@]}" hydra.run.dir=srun > srun.log 2>&1
srun --nodes=2 --ntasks-per-node=1 torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=rl-a:29500 -m rlkit train \
    "${train[@]}" trainer.steps=2 trainer=fsdp "${two[@]}" hydra.run.dir=torchrun > torchrun.log 2>&1
python "$here/rows.py" one srun torchrun

echo; echo "## sbatch: queued again twice"; echo
eight=("${train[@]}" trainer.steps=8 trainer=ddp "${two[@]}")
srun --nodes=2 --ntasks-per-node=1 python -m rlkit train "${eight[@]}" hydra.run.dir=whole > whole.log 2>&1
steps() { cat outputs/queued/*/metrics.jsonl 2> /dev/null | grep -c '"reward/mean"' || true; }
await() { for _ in $(seq 600); do [ "$("${@:2}")" != "$1" ] || return 0; sleep 0.2; done; echo "slurm.sh: waited for $1 of: ${*:2}" >&2; return 1; }
state() { scontrol show job "$job" | grep -o 'JobState=[A-Z]*' | cut -d= -f2; }
reached() { [ "$(steps)" -ge "$1" ] && echo yes || echo no; }
again() { # SLURM lets a job that is queued again wait for two minutes
    await PENDING state
    echo "job queued again after step $(steps), restart $(scontrol show job "$job" | grep -o 'Restarts=[0-9]*' | cut -d= -f2)"
    sleep 2 && scontrol update "jobid=$job" starttime=now
}
mkdir bin && printf '#!/bin/sh\nexec %s -m rlkit "$@"\n' "$(command -v python)" > bin/rlkit && chmod +x bin/rlkit
job=$(PATH=$work/bin:$PATH sbatch --parsable --ntasks-per-node=1 --gpus-per-node=0 --output=sbatch.log "$here/rlkit.sbatch" "${eight[@]}" name=queued)
await yes reached 2 && scontrol requeue "$job" && again
await yes reached 5 && scancel --signal=USR1 "$job" && again
await COMPLETED state
echo "job $(state), $(steps) steps"
grep -hE '^(0: )?(rlkit: (job|SIG)|resume:)' sbatch.log | uniq | sed -E 's#outputs/queued/[^/]+/#…/#' 
python - whole/checkpoints/step_000008.ckpt outputs/queued/*/checkpoints/step_000008.ckpt <<'PY'
import sys
import torch

whole, queued = (torch.load(path, weights_only=True) for path in sys.argv[1:])
same = all(torch.equal(value, queued["state_dict"][name]) for name, value in whole["state_dict"].items())
print("weights after 8 steps equal those of the uninterrupted run, bit for bit:", same)
sys.exit(not same)
PY

echo; echo "## A sweep through submitit"; echo
number=0
python -m rlkit train -m experiment=sweep_slurm "${train[@]}" trainer.steps=2 algorithm=grpo,reinforce seed=1,2 hydra.launcher.gpus_per_node=null \
    hydra.launcher.cpus_per_task=2 hydra.launcher.mem_gb=1 hydra.launcher.array_parallelism=2 > sweep.log 2>&1
for folder in outputs/sweep_slurm/algorithm=*/; do  # named by all of their overrides
    name=$(basename "$folder" | sed -E 's/algorithm=([a-z]+),.*/\1/')
    ln -s "$folder" "$name-$((++number))"
    jobs+=("$name-$number")
done
python "$here/rows.py" "${jobs[@]}"
echo; scontrol show jobs | grep -E '^JobId=.*ArrayTask|BatchHost' | sed -E 's/.*ArrayTaskId=([0-9]+).*/array task \1/; s/ *BatchHost=/on /' | paste -d ' ' - - | grep array
