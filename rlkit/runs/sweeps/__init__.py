"""Sweeps. All jobs are checked first; then each job runs in its own process and folder. Each job
prints one line, and a comparison follows at the end.

Hydra's sweeper decides the jobs, and its launcher their places. Results are only read from files,
so the place does not matter: <sweep>/jobs/NAME.json and NAME.log of a job, and the run folder
<sweep>/NAME with its metrics and summary.

Each file imports only files before it in this list: jobs, warm, compare, plan, runner, run.
"""

from rlkit.runs.sweeps.plan import expand
from rlkit.runs.sweeps.run import sweep

__all__ = ["expand", "sweep"]
