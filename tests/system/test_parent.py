"""What rlkit starts ends when rlkit is gone, by SIGKILL too."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outliving import WAIT, check_the_end
from parametrise import cases
from rlkit.system.parent import PARENT, end_with_parent, make_child_environment

KINDS = {
    "a rank": (
        "from rlkit.distributed.launch import start_ranks\nstart_ranks([sys.executable, '-m',"
        " 'rlkit', *words], 1)\n"
    ),
    "a job of a sweep": (
        "from rlkit.runs.sweeps.runner import start_process\n"
        "process = start_process(words, open(pipe + '.log', 'wb'), {})\n" + WAIT
    ),
    "a child of rlkit's own": (
        "import os, subprocess; from rlkit.system.parent import make_child_environment\n"
        "code = 'import sys; from rlkit.system.parent import end_with_parent; end_with_parent();"
        " open(sys.argv[1]).read()'\n"
        "process = subprocess.Popen([sys.executable, '-c', code, pipe], env=os.environ |"
        " make_child_environment())\n" + WAIT
    ),
}


@pytest.mark.parametrize("code", cases(KINDS.values(), [KINDS["a child of rlkit's own"]]))
def test_no_process_outlives_the_one_that_started_it(code, tmp_path):
    check_the_end(code, tmp_path)


def test_the_children_of_a_tied_process_are_not_tied_by_its_environment(monkeypatch):
    monkeypatch.setattr("rlkit.system.parent.end_with", lambda parent: None)
    monkeypatch.setenv(PARENT, make_child_environment()[PARENT])
    end_with_parent()
    assert PARENT not in os.environ


SANDBOXED = {
    "a program": "run(Job('while True: pass'), limits)\n",
    "a session": "Interpreter(limits).run('while True: pass')\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("code", SANDBOXED.values(), ids=SANDBOXED)
def test_no_code_of_a_model_outlives_the_trainer(code):
    """It computes for ever, and its own limits are far away."""
    start = (
        "from rlkit.sandbox import Job, Sandbox, find_level, run\n"
        "from rlkit.sandbox.interpreter import Interpreter\n"
        "limits = Sandbox(time_limit=600, allow_weak=True)\n"
        "print(find_level(), flush=True)\n"
    )
    command = [sys.executable, "-c", start + code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline()
        children = Path(f"/proc/{parent.pid}/task")
        own: list[int] = []
        deadline = time.monotonic() + 60
        while not own and time.monotonic() < deadline:
            own = [
                int(pid)
                for task in children.iterdir()
                for pid in (task / "children").read_text().split()
            ]
            own = [pid for pid in own if busy(pid)]
        parent.kill()
    assert own
    for pid in own:
        with contextlib.suppress(ProcessLookupError):
            assert select.select([os.pidfd_open(pid)], [], [], 20)[0], "the program goes on"


def busy(pid: int) -> bool:
    """Whether a process has computed for a tenth of a second."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return int(fields[11]) > 10
