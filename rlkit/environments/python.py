"""The python tool: code that the policy writes, run in the sandbox."""

from __future__ import annotations

from collections.abc import Callable

from rlkit.sandbox import Job, Outcome, Sandbox, run


def python_tool(*, sandbox: Sandbox | None = None) -> Callable[[str], str]:
    """The tool `python(code)`: a fresh interpreter for every call, nothing kept between calls.

    Args:
      sandbox: limits, and the isolation that is asked for.
    Returns: a tool that gives what the code printed, then the value of its last expression. It raises ValueError with a sentence
      for the policy where the code fails.
    """

    def python(code: str) -> str:
        """Runs Python code and gives what it prints and the value of its last expression.

        Args:
            code: The code. Only the standard library is there, without network.
        """
        outcome = run(Job(code, interactive=True), sandbox)
        text = outcome.printed.strip("\n")
        if problem := _problem(outcome):
            raise ValueError(f"{problem}; before that it printed:\n{text}" if text else problem)  # the end may be cut
        return text or "(no output)"

    vars(python)["sandbox"] = sandbox or Sandbox()  # for rlkit.training.selfcheck, which asks before the model is loaded
    return python


def _problem(outcome: Outcome) -> str:
    """What went wrong, or ''."""
    return {
        "ok": "",
        "error": outcome.error,
        "timeout": f"the code took longer than {outcome.seconds:.0f} s",
        "flood": "the code gave too much output",
        "died": "the interpreter ended early (exit, or out of memory)",
    }[outcome.status]
