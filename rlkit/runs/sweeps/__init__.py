"""Sweeps: every job is checked first, then runs in a process and a folder of its own; one line per
job, and one comparison at the end.

Hydra's sweeper decides the jobs and its launcher where they run. What the jobs do is read from
files alone, so it does not matter where that is: <sweep>/jobs/NAME.json and NAME.log of a job, and
the run folder <sweep>/NAME with its metrics and summary.

Files in the order of their imports: jobs, warm, compare, plan, runner, run.
"""

from rlkit.runs.sweeps.plan import expand
from rlkit.runs.sweeps.run import sweep

__all__ = ["expand", "sweep"]
