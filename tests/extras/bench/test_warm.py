"""The process that is forked for each run of a bench."""

from __future__ import annotations

import pytest

from outliving import WAIT, check_the_end

JOB = (
    "from rlkit.extras.bench.warm import WarmServer\n"
    "process = WarmServer({}).start(words, open(pipe + '.log', 'wb'), {})\n"
)


@pytest.mark.slow
def test_a_job_of_a_bench_does_not_outlive_it(tmp_path):
    check_the_end(JOB + WAIT, tmp_path)
