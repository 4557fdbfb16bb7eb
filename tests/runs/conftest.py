"""The fixtures of run folders."""

from run_folders import make_run, make_runs  # noqa: F401
