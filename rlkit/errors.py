"""What can go wrong, by name: one root, and each error also is the standard error that it replaces.

A `Refusal` is the user's to mend (a config, a file, a row): the command line prints its sentence and exits with 2, without a
traceback. Every other error is ours.
"""

import difflib
import functools
import re
import signal
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any


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


class PartError(Refusal):
    """A function that a config names gave what is not what its place asks for, or asked for what there is not."""


class SelfCheckError(RLKitError, AssertionError):
    """An invariant proved at start-up does not hold on this model and tokenizer: training would be wrong."""


class EngineError(RLKitError, RuntimeError):
    """A rollout engine outside this process that does not answer, or not as it should."""


class EnvironmentFailed(RLKitError, RuntimeError):
    """A user's environment that raised; the message names the file and the line."""


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


def written(function: Callable[..., Any]) -> str:
    """A function as a config names it: my_package.loss."""
    while isinstance(function, functools.partial):
        function = function.func
    module = re.sub(r"\._\w+$", "", getattr(function, "__module__", ""))  # a package exports what its private files hold
    return f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"


def nearest(name: str, names: Iterable[str]) -> str:
    """ " Did you mean …?" where a valid name is close: the end of a sentence, or nothing."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""


def distribution() -> Distribution | None:
    """The installed distribution that brought this package; None where the source is only on the path.

    It is found by its command, not by its name: on the public package index the name `rlkit` belongs to another project, and
    that one may be installed in the same environment.
    """
    return next(
        (d for d in distributions() if any(re.fullmatch(r"rlkit\.(commands\.)?cli:main", entry.value) for entry in d.entry_points)), None
    )


def place(error: BaseException) -> str:
    """FILE:LINE that raised an error: the innermost frame of the user's own code, else the innermost of all."""
    frames = traceback.extract_tb(error.__traceback__)
    others = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), "<")
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    return f"{(own or frames)[-1].filename}:{(own or frames)[-1].lineno}" if frames else "an unknown place"


def install(extra: str) -> str:
    """The command that installs an extra: the checkout's own in a checkout, else by the name of the distribution."""
    root = Path(__file__).resolve().parent.parent
    if (root / "pyproject.toml").is_file():
        here = "" if root == Path.cwd() else f"cd {root} && "
        return f"{here}pip install -c constraints.txt -e '.[{extra}]'"
    own = distribution()
    return f"pip install '{own.name}[{extra}]'" if own else f"install the packages of the extra '{extra}' (pyproject.toml lists them)"


def visible(text: str, kept: str = "") -> str:
    """Control characters (terminal escapes among them) are shown, not obeyed; for text that a model or a file may have written."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)
