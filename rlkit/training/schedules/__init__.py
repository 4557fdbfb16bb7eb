"""Numbers and parts as functions of progress. A schedule never edits an experiment: it returns a
new one for each step.

Files in the order of their imports: controllers, functions, paths, progress.
"""

from rlkit.training.schedules.controllers import (
    Condition,
    adaptive,
    adaptive_entropy,
    condition,
    streak,
)
from rlkit.training.schedules.functions import constant, cosine, decay, linear
from rlkit.training.schedules.progress import (
    Phase,
    Progress,
    Schedule,
    advance,
    at,
    lengthened,
    metrics,
    phases,
    require_measured,
    resets,
    start,
    transition,
    unmeasured,
    values,
)
