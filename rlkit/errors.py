"""What can go wrong, by name: one root, and each error also is the standard error that it replaces.

A `Refusal` is the user's to mend (a config, a file, a row): the command line prints its sentence and exits with 2, without a
traceback. Every other error is ours.
"""

import difflib
import signal
import traceback
from collections.abc import Iterable


class RLKitError(Exception):
    """Root of every error that rlkit raises on purpose."""


class Refusal(RLKitError, ValueError):
    """The input cannot be run as it is; the message names the place and the remedy."""


class ConfigError(Refusal):
    """A config that does not hold together: unknown option or key, wrong type, impossible combination."""


class DataError(Refusal):
    """A file or a row of it that cannot become a Task."""


class TemplateError(Refusal):
    """A chat template that is missing or that cannot carry what the run needs."""


class SelfCheckError(RLKitError, AssertionError):
    """An invariant proved at start-up does not hold on this model and tokenizer: training would be wrong."""


class EngineError(RLKitError, RuntimeError):
    """A rollout engine outside this process that does not answer, or not as it should."""


class NonFinite(RLKitError, ArithmeticError):
    """Losses or gradients were nan or infinite too often in a row."""


class Interrupted(BaseException):
    """A signal asked the run to end. No step is half done, and the checkpoint callback saves."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def status(self) -> int:
        """The exit status that shells and schedulers expect: 143 for SIGTERM, 130 for SIGINT, 129 for SIGHUP."""
        return 128 + self.signum


def raised_at(error: BaseException, *, back: int = 1) -> str:
    """An exception in a few words with its place: "SystemExit(3) at game.py:12". `back`: frames from the innermost, 1 is that one."""
    while isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt | SystemExit):  # a framework's own exit
        error = error.__context__
    said = f"{type(error).__name__}({error!s})" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    return f"{said} at {frames[-back].filename}:{frames[-back].lineno}" if len(frames) >= back else said


def nearest(name: str, names: Iterable[str]) -> str:
    """ " Did you mean …?" where a valid name is close: the end of a sentence, or nothing."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""


def visible(text: str, kept: str = "") -> str:
    """Control characters (terminal escapes among them) are shown, not obeyed; for text that a model or a file may have written."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)
