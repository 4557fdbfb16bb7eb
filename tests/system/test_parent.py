"""What rlkit starts ends when rlkit is gone, by SIGKILL too. Each kind of process reads from a pipe, and is gone once no one does."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from laws import cases
from rlkit.system.parent import PARENT, end_with_parent, tied

START = "import sys; from pathlib import Path; pipe = sys.argv[1]; words = ['train', '--config', pipe]\n"
WAIT = "process.wait()\n"
KINDS = {
    "a rank": "from rlkit.distributed.launch import start_ranks\nstart_ranks([sys.executable, '-m', 'rlkit', *words], 1)\n",
    "a job of a sweep": (
        "from rlkit.runs.sweeps.runner import start_process\n"
        "process = start_process(words, open(pipe + '.log', 'wb'), {})\n" + WAIT
    ),
    "a job of a bench": (
        "from rlkit.runs.sweeps.warm import WarmServer\n"
        "process = WarmServer({}).start(words, open(pipe + '.log', 'wb'), {})\n" + WAIT
    ),
    "a server of another package": (
        "import subprocess; from rlkit.system.parent import guarded\n"
        "process = subprocess.Popen(guarded(['cat', pipe]), start_new_session=True)\n" + WAIT
    ),
    "what a server of another package has started": (
        "import subprocess; from rlkit.system.parent import guarded\n"
        "process = subprocess.Popen(guarded(['sh', '-c', f'cat {pipe} & wait']), start_new_session=True)\n" + WAIT
    ),
}  # fmt: skip


@pytest.mark.parametrize("code", cases(KINDS.values(), [KINDS["a server of another package"]]))
def test_no_process_outlives_the_one_that_started_it(code, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    parent = subprocess.Popen([sys.executable, "-c", START + code, str(pipe)])
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(os.open, pipe, os.O_WRONLY)  # waits until the process reads
        try:
            writer = opened.result(120)
        finally:
            parent.kill()
            parent.wait()
            os.close(os.open(pipe, os.O_RDWR))
    poller = select.poll()
    poller.register(writer, 0)  # an error: no one reads any more
    assert poller.poll(20_000), "the process goes on"
    os.close(writer)


def test_a_guarded_command_ends_with_its_own_status():
    from rlkit.system.parent import guarded

    for code, status in (("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)):
        command = guarded([sys.executable, "-S", "-c", code])
        assert subprocess.run(command, start_new_session=True).returncode == status


def test_the_children_of_a_tied_process_are_not_tied_by_its_environment(monkeypatch):
    monkeypatch.setattr("rlkit.system.parent.end_with", lambda parent: None)
    monkeypatch.setenv(PARENT, tied()[PARENT])
    end_with_parent()
    assert PARENT not in os.environ
