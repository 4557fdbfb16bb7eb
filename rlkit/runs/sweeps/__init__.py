"""Sweeps: every job is checked first, then runs in a process and a folder of its own; one line per
job, and one comparison at the end.

Hydra's sweeper decides the jobs, and its launcher their places. Results are read from files alone,
so the place does not matter: <sweep>/jobs/NAME.json and NAME.log of a job, and the run folder
<sweep>/NAME with its metrics and summary.

Files in the order of their imports: jobs, warm, compare, plan, runner, run.
"""

from rlkit.runs.sweeps.plan import expand
from rlkit.runs.sweeps.run import sweep

__all__ = ["expand", "sweep"]
