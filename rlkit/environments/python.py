"""Run the policy's Python code in the sandbox, as a tool."""

from __future__ import annotations

from collections.abc import Callable

from rlkit.sandbox import Interpreter, Job, Outcome, Sandbox, run


def python_tool(*, sandbox: Sandbox | None = None) -> Callable[[str], str]:
    """Make the tool `python(code)`. Every call has a new interpreter, and no variable is kept
    between calls.

    Args:
      sandbox: limits of a call, and the required isolation.
    Returns: the tool. A call returns the printed text and then the value of the last expression. If
      the code fails, the call raises ValueError with a sentence for the policy.
    """

    def python(code: str) -> str:
        """Runs Python code and gives what it prints and the value of its last expression.

        Args:
            code: The code. Only the standard library is there, without network.
        """
        return _format_result(run(Job(code, interactive=True), sandbox))

    # the check of the sandbox, before the model is loaded, reads this attribute
    vars(python)["sandbox"] = sandbox or Sandbox()
    return python


class PythonSession:
    """Provide the tool `python(code)` with one interpreter per episode, so variables are kept
    between calls. The first call starts the interpreter, and it ends with the episode.

    Args:
      sandbox: as for `python_tool`. The limits of time and output hold for each call. The limit of
        memory holds for the whole session.
    """

    def __init__(self, *, sandbox: Sandbox | None = None):
        self.sandbox = sandbox or Sandbox()  # read by the same check as in `python_tool`
        self.interpreter = Interpreter(self.sandbox)

    def python(self, code: str) -> str:
        """Runs Python code and gives what it prints and the value of its last expression. Variables
        are kept for the next call.

        Args:
            code: The code. Only the standard library is there, without network.
        """
        outcome = self.interpreter.run(code)
        lost = outcome.status not in ("ok", "error")
        return _format_result(outcome, "; the variables of this session are lost" if lost else "")

    def close(self) -> None:
        """End the interpreter."""
        self.interpreter.close()


def _format_result(outcome: Outcome, more: str = "") -> str:
    """Write the result of a call as text. Raises: ValueError with a sentence for the policy if the
    code failed."""
    text = outcome.printed.strip("\n")
    problem = _problem(outcome)
    if problem:
        problem += more
        # the text goes last, because its end may be cut
        raise ValueError(f"{problem}; before that it printed:\n{text}" if text else problem)
    return text or "(no output)"


def _problem(outcome: Outcome) -> str:
    """Describe how the code failed; return '' if it did not."""
    return {
        "ok": "",
        "error": outcome.error,
        "timeout": f"the code took longer than {round(outcome.seconds, 1):g} s",
        "flood": "the code gave too much output",
        "died": "the interpreter ended early (exit, or out of memory)",
    }[outcome.status]
