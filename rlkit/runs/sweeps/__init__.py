"""Run sweeps of many jobs. All jobs are checked first; then each job runs in its own process and
folder. One line is printed for each job, and a comparison at the end.

Hydra's sweeper decides which jobs to run, and Hydra's launcher decides on which machine. Results
are only read from files, so the machine does not matter. The files of a job are
<sweep>/jobs/NAME.json, <sweep>/jobs/NAME.log, and the run folder <sweep>/NAME with the metrics and
the summary.

Each file imports only files before it in this list: jobs, compare, plan, runner, run.
"""

from rlkit.runs.sweeps.plan import expand
from rlkit.runs.sweeps.run import sweep

__all__ = ["expand", "sweep"]
