"""Threads follow the model's size and the cores that the process may use, and nothing else."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from rlkit.system import processors
from rlkit.system.device import total_memory, use_threads
from rlkit.system.processors import (
    PARAMETERS_PER_THREAD,
    choose_threads,
    count_cores,
    machine_memory,
)
from rlkit.training.experiment import TrainerSettings


@pytest.mark.parametrize(
    "parameters, available, asked, expected",
    [
        (886_144, 2, "", 1),  # the embedded model: a second thread buys nothing
        (PARAMETERS_PER_THREAD * 3, 2, "", 2),  # never more than the cores
        (PARAMETERS_PER_THREAD * 3, 16, "", 3),
        (600_000_000, 16, "", 16),
        (600_000_000, 16, "4", 4),  # what the user allows is a limit
        (886_144, 16, "4", 1),
        (600_000_000, 16, "4,2", 16),  # nested levels of OpenMP: no number
    ],
)
def test_threads_by_size_and_cores(parameters, available, asked, expected, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert choose_threads(parameters, available) == expected


@pytest.mark.parametrize(
    "membership, files, expected",
    [
        ("0::/", {"cpu.max": "150000 100000"}, 2),  # a core and a half: two threads can run
        (
            "0::/job/step",
            {
                "cpu.max": "max 100000",
                "job/cpu.max": "300000 100000",
                "job/step/cpu.max": "max 100000",
            },
            3,
        ),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "nonsense"}, 8),
        (None, {}, 8),
    ],
)
def test_a_container_limits_the_cores(membership, files, expected, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text + "\n")
    if membership is not None:
        (tmp_path / "membership").write_text(membership + "\n")
    monkeypatch.setattr(processors, "CGROUP", tmp_path)
    monkeypatch.setattr(processors, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert count_cores() == expected


@pytest.mark.parametrize(
    "membership, files, expected",
    [
        ("0::/", {}, 8 << 30),
        ("0::/", {"memory.max": "max"}, 8 << 30),
        ("0::/", {"memory.max": str(3 << 30)}, 3 << 30),
        ("0::/job/step", {"job/memory.max": str(2 << 30), "job/step/memory.max": "max"}, 2 << 30),
        ("0::/", {"memory.max": str(1 << 60)}, 8 << 30),  # more than the machine has
        (None, {}, 8 << 30),
    ],
)
def test_a_container_limits_the_memory(membership, files, expected, tmp_path, monkeypatch):
    """Its total counts; what is free at the moment is never asked for."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text + "\n")
    if membership is not None:
        (tmp_path / "membership").write_text(membership + "\n")
    monkeypatch.setattr(processors, "CGROUP", tmp_path)
    monkeypatch.setattr(processors, "MEMBERSHIP", tmp_path / "membership")
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": (8 << 30) // 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    assert machine_memory() == total_memory("cpu") == expected
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert total_memory("cpu") == expected // 2


def test_a_gpu_has_the_memory_of_its_properties(monkeypatch):
    asked = []

    def properties(device):
        asked.append(device)
        return SimpleNamespace(total_memory=80 << 30)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    device = torch.device("cuda", 1)
    assert total_memory(device) == 80 << 30 and asked == [device]


def test_a_given_number_wins_and_a_gpu_keeps_torchs(monkeypatch):
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "")
        small = torch.nn.Linear(2, 2)
        use_threads(TrainerSettings(steps=1, threads=3), small, torch.device("cpu"))
        assert torch.get_num_threads() == 3
        use_threads(TrainerSettings(steps=1), small, torch.device("cuda"))
        assert torch.get_num_threads() == 3
        use_threads(TrainerSettings(steps=1), small, torch.device("cpu"))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_the_command_line_has_openmp_wait_without_spinning():
    """It acts only where it is set before torch is imported; a user's own policy stays."""
    program = "import os, sys; from rlkit.commands.cli import main; main(['--help']); "
    program += "print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    clean = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    for given, expected in [({}, "passive False"), ({"OMP_WAIT_POLICY": "active"}, "active False")]:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=clean | given,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines()[-1] == expected


@pytest.mark.slow
@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep what was freed"
)
def test_freed_blocks_are_taken_again_without_the_system():
    """Each page from the system is a fault and is filled with zeros: an eighth of the time of a
    long update."""
    program = """if True:
        import resource, sys
        import numpy as np
        from rlkit.system.device import keep_freed_memory
        if sys.argv[1:]:
            keep_freed_memory()
        np.ones(2 << 20)  # 16 MiB
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            np.ones(2 << 20)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"""
    system, kept = (
        int(subprocess.check_output([sys.executable, "-c", program, *more]))
        for more in ((), ("keep",))
    )
    assert system >= 20  # of huge pages; 20,480 of small ones
    assert kept <= 5
