"""Compute the numbers and config groups of an experiment from the run's progress. A schedule never
edits an experiment. Instead it returns a new experiment for each step.

Each file imports only files before it in this list: controllers, functions, paths, progress.
"""

from rlkit.training.schedules.controllers import (
    Condition,
    adaptive,
    adaptive_entropy,
    count_streak,
    read_condition,
)
from rlkit.training.schedules.functions import constant, cosine, decay, linear
from rlkit.training.schedules.progress import (
    Phase,
    Progress,
    Schedule,
    advance,
    describe_transition,
    explain_new_length,
    find_resets,
    find_unmeasured,
    list_phases,
    list_values,
    measure_schedules,
    resolve_schedules,
    start,
)
