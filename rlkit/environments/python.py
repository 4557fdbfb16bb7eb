"""The python tool: code that the policy writes, run in the sandbox."""

from __future__ import annotations

from collections.abc import Callable

from rlkit.errors import ConfigError
from rlkit.sandbox import Job, Outcome, Sandbox, run


def python_tool(*, sandbox: Sandbox | None = None, max_chars: int = 2000) -> Callable[[str], str]:
    """The tool `python(code)`: a fresh interpreter for every call, nothing kept between calls.

    Args:
      sandbox: limits, and the isolation that is asked for.
      max_chars: of the text that the policy reads, at least 1; the rest is cut and said to be.
    Returns: a tool that gives what the code printed, then the value of its last expression. It raises ValueError with a sentence
      for the policy where the code fails.
    Raises: ConfigError for max_chars below 1.
    """
    if max_chars < 1:
        raise ConfigError(f"environment.tools.python.max_chars is {max_chars}; it must be at least 1")

    def python(code: str) -> str:
        """Runs Python code and gives what it prints and the value of its last expression.

        Args:
            code: The code. Only the standard library is there, without network.
        """
        outcome = run(Job(code, interactive=True), sandbox)
        text = outcome.printed.strip("\n")
        if problem := _problem(outcome):
            raise ValueError(_cut(f"{text}\n{problem}" if text else problem, max_chars))
        return _cut(text, max_chars) or "(no output)"

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


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} characters more)"
