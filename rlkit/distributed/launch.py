"""Start the ranks of a run, unless torchrun or SLURM has started them.

`rlkit train trainer=ddp trainer.devices=2` starts two processes, the ranks, with the same command
line and with torchrun's environment variables, and watches them. If one rank fails, the others are
stopped. The watching process passes every signal on to all ranks. The ranks are killed when the
watching process ends, even if it was killed by SIGKILL.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlkit.errors import tell_user

# signals to pass on to the ranks, so that they save their state before they end
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
GRACE = 15.0  # seconds for the other ranks to report their errors, after a rank has failed


def is_started_outside(environ: Mapping[str, str], devices: int, nodes: int) -> bool:
    """Return whether torchrun, `start_ranks`, or srun with one task per device has started this
    process as one of several ranks."""
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        return True
    return (
        devices * nodes > 1
        and int(environ.get("SLURM_NTASKS") or 1) == devices * nodes
        and "SLURM_PROCID" in environ
    )


def must_start(devices: int, nodes: int) -> bool:
    """Return whether this process has to start its ranks: the run uses several devices on one
    machine, and no other program has started the ranks."""
    return devices * nodes > 1 and nodes == 1 and not is_started_outside(os.environ, devices, nodes)


def start_ranks(command: Sequence[str], count: int) -> int:
    """Run a command as `count` ranks on this machine, and wait for all of them.

    Returns: 0, or the exit status of the rank that failed first. The status is 128 + the signal's
    number if a signal killed it.
    """
    from rlkit.system.parent import make_child_environment

    with socket.create_server(("127.0.0.1", 0)) as found:  # finds a free port
        port = found.getsockname()[1]
    ranks: list[subprocess.Popen[bytes]] = []
    heard = [number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
    passed: list[int] = []  # the signals passed on so far
    earlier = {
        number: signal.signal(number, lambda got, _: passed.append(_send(ranks, got)))
        for number in heard
    }
    try:
        for i in range(count):
            place = {
                "RANK": i,
                "LOCAL_RANK": i,
                "WORLD_SIZE": count,
                "LOCAL_WORLD_SIZE": count,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            environ = (
                os.environ
                | {name: str(value) for name, value in place.items()}
                | make_child_environment()
            )
            # In a new session the terminal's Ctrl-C does not reach the rank. It reaches only this
            # process, and `_send` passes it on once.
            ranks.append(subprocess.Popen(command, env=environ, start_new_session=True))
        return _watch(ranks, passed)
    finally:
        _send(ranks, signal.SIGKILL)
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _watch(ranks: Sequence[subprocess.Popen[bytes]], passed: Sequence[int]) -> int:
    """Wait for all ranks. Return the exit status of the rank that failed first, or 0.

    If a rank fails, the other ranks have GRACE seconds to end by themselves. Then they get SIGTERM,
    and after GRACE more seconds SIGKILL. If several ranks are seen to have failed at the same time,
    a rank killed by a signal counts as the first: the other ranks fail because it is gone.

    Args:
      passed: the signals passed on to the ranks. After one, the ranks agree to end, and rank 0 may
        save for as long as it needs.
    """
    first = 0
    failed_at = 0.0
    told = False
    while any(rank.poll() is None for rank in ranks):
        time.sleep(0.1)
        failed = [i for i, rank in enumerate(ranks) if rank.poll()]
        if failed and not first and not passed:
            cause = next((i for i in failed if ranks[i].returncode < 0), failed[0])
            first = ranks[cause].returncode
            failed_at = time.monotonic()
            tell_user(
                f"rlkit: rank {cause} of {len(ranks)} {describe_exit(first)}; the others are"
                " stopped"
            )
        waited = time.monotonic() - failed_at if first else 0.0
        if waited > GRACE and not told:
            told = True
            _send(ranks, signal.SIGTERM)
        if waited > 2 * GRACE:
            _send(ranks, signal.SIGKILL)
    # The loop does not see ranks that all end together. A status is negative after a signal, so the
    # minimum prefers a rank killed by a signal.
    first = first or min((rank.returncode for rank in ranks if rank.returncode), default=0)
    return first if first >= 0 else 128 - first


def describe_exit(status: int) -> str:
    """Describe an exit status in words."""
    return (
        f"ended with exit status {status}"
        if status > 0
        else f"was killed by {signal.Signals(-status).name}"
    )


def _send(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> int:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)
    return number


def adopt_slurm() -> None:
    """Copy srun's description of this task to the environment variables that torchrun would set."""
    if "RANK" in os.environ or "SLURM_PROCID" not in os.environ:
        return
    from lightning.fabric.plugins.environments import SLURMEnvironment

    slurm = SLURMEnvironment(auto_requeue=False)
    place = {
        "RANK": "SLURM_PROCID",
        "LOCAL_RANK": "SLURM_LOCALID",
        "GROUP_RANK": "SLURM_NODEID",
        "WORLD_SIZE": "SLURM_NTASKS",
    }
    os.environ.update({name: os.environ[theirs] for name, theirs in place.items()})
    machines = int(os.environ.get("SLURM_NNODES") or 1)
    os.environ["LOCAL_WORLD_SIZE"] = str(max(1, int(os.environ["WORLD_SIZE"]) // machines))
    os.environ.update({"MASTER_ADDR": slurm.main_address, "MASTER_PORT": str(slurm.main_port)})


def explain_sweep_problem(devices: int, nodes: int) -> str | None:
    """Return the reason why a sweep (-m) cannot start jobs with this many devices here, and the
    remedy. Return None if it can.

    Each job is a separate process and starts its own ranks. So a sweep on one machine always works.
    """
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return (
            "-m: every rank that torchrun started would run the whole sweep; start `rlkit train -m"
            " …` by itself, and each job starts its own ranks, or give torchrun one job without -m"
        )
    if nodes > 1:
        return (
            f"-m with trainer.nodes={nodes}: a job starts no processes on other machines; submit"
            f" each with hydra/launcher=slurm hydra.launcher.nodes={nodes}"
            f" hydra.launcher.tasks_per_node={devices}, or run job after job under srun"
        )
    return None


@contextmanager
def assign_gpus(locks: Path, *, jobs: int, devices: int) -> Iterator[dict[str, str]]:
    """Yield the environment variable CUDA_VISIBLE_DEVICES for one of `jobs` simultaneous processes,
    each with `devices` GPUs.

    No two processes get the same GPU unless there are more jobs than GPUs. In this case the jobs
    are spread evenly. A process holds its place by a file lock, so the place is freed at the end of
    the process, even if it is killed.

    Args:
      locks: a folder shared by the jobs of this machine.
      jobs: number of simultaneous processes.
      devices: number of GPUs per process.
    Yields: variables to add to the environment. Empty if there is only one job, or if there are too
    few GPUs to choose from.
    """
    gpus = list_visible_gpus()
    sets = len(gpus) // devices
    if jobs < 2 or sets < 2:
        yield {}
        return
    locks.mkdir(parents=True, exist_ok=True)
    for place in range(jobs):
        with (locks / f"{place}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            first = place % sets * devices
            yield {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + devices])}
            return
    yield {}  # more processes run than `jobs` says


def list_visible_gpus() -> list[str]:
    """List the GPUs this process may use, by the names used in CUDA_VISIBLE_DEVICES."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]
