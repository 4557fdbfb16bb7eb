"""A server that rlkit starts ends when rlkit is gone, with all that the server has started."""

from __future__ import annotations

import subprocess
import sys

import pytest

from outliving import WAIT, check_the_end
from parametrise import cases
from rlkit.extras.vllm.guard import guard_command

GUARD = "import subprocess; from rlkit.extras.vllm.guard import guard_command\n"
KINDS = {
    "a server": (
        "process = subprocess.Popen(guard_command(['cat', pipe]), start_new_session=True)\n"
    ),
    "what a server has started": (
        "process = subprocess.Popen(guard_command(['sh', '-c', f'cat {pipe} & wait']),"
        " start_new_session=True)\n"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("code", cases(KINDS.values(), [KINDS["a server"]]))
def test_no_server_outlives_the_process_that_started_it(code, tmp_path):
    check_the_end(GUARD + code + WAIT, tmp_path)


@pytest.mark.slow
def test_a_guarded_command_ends_with_its_own_status():
    for code, status in (("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)):
        command = guard_command([sys.executable, "-S", "-c", code])
        assert subprocess.run(command, start_new_session=True).returncode == status
