"""The errors that rlkit raises. All but Interrupted derive from RLKitError and from the matching
standard error.

A `Refusal` is a mistake in the user's input: a config, a file or a row. The command line prints its
message without a traceback and exits with status 2. The other errors have causes outside the config
and the data.
"""

import contextlib
import difflib
import functools
import inspect
import os
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

TRACEBACK = "RLKIT_TRACEBACK"  # set in the environment: errors are printed with their traceback
SHOWN = 1_000  # characters of a long line, from its beginning and again from its end


class RLKitError(Exception):
    """Root of every error raised by rlkit on purpose."""


class Refusal(RLKitError, ValueError):
    """The input cannot be run. The message says where the mistake is and how to fix it."""


class ConfigError(Refusal):
    """A config with an unknown option or key, a wrong type, or an impossible combination."""


def refuse_problems(problems: Iterable[str]) -> None:
    """Raise a ConfigError with all of the sentences, if there are any."""
    text = "\n".join(problems)
    if text:
        raise ConfigError(text)


class DataError(Refusal):
    """A file, or a row of a file, that cannot be turned into a Task."""


class TemplateError(Refusal):
    """A missing chat template, or one without a feature that the run needs."""


class PartError(Refusal):
    """A function named in a config returned a wrong value, or asked for a quantity that does not
    exist."""


class SelfCheckError(RLKitError, AssertionError):
    """A check at start-up failed for this model and tokenizer. Training would give wrong
    results."""


class EngineError(RLKitError, RuntimeError):
    """A rollout engine outside this process does not answer, or answers wrongly."""


class EnvironmentFailed(RLKitError, RuntimeError):
    """A user's environment raised an exception. The message names the file and the line."""


class EpisodeOver(RLKitError):
    """An episode is over before its first reply, for example because a player has no turn. A
    session's first prompt raises it."""


class Hung(RLKitError, TimeoutError):
    """A call of the user's did not end at its limit. Its episode fails; the message names the
    function and the limit."""


class NonFinite(RLKitError, ArithmeticError):
    """Losses or gradients were nan or infinite too often in a row."""


class Interrupted(BaseException):
    """A signal asked the run to end. The current step is complete, and the checkpoint callback
    saves."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def status(self) -> int:
        """The exit status that shells and schedulers expect: 143 for SIGTERM, 130 for SIGINT, 129
        for SIGHUP."""
        return 128 + self.signum


def describe_raise(error: BaseException) -> str:
    """A short description of an exception with its place, such as "SystemExit(3) at game.py:12"."""
    # a framework's own exit hides the error behind it
    while isinstance(error, SystemExit) and isinstance(
        error.__context__, KeyboardInterrupt | SystemExit
    ):
        error = error.__context__
    said = f"{type(error).__name__}({error!s})" if str(error) else type(error).__name__
    back = getattr(error, "inner", 1)
    frames = traceback.extract_tb(error.__traceback__)[-back:]
    return f"{said} at {frames[0].filename}:{frames[0].lineno}" if len(frames) == back else said


def name_function(function: Callable[..., Any]) -> str:
    """The name of a function in the form of a config, for example my_package.loss."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)  # of rlkit.NAME, which checks its arguments
    # a package exports the functions of its private files
    module = re.sub(r"\._\w+$", "", getattr(function, "__module__", None) or "")
    return f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"


def require_arguments(function: Callable[..., Any], where: str, *given: Any, **named: Any) -> None:
    """Raise a ConfigError if a user's function cannot be called with these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(*given, **named)
    except TypeError as error:
        asked = ", ".join(
            [*(type(one).__name__ for one in given), *(f"{name}=…" for name in named)]
        )
        raise ConfigError(
            f"{where}: {describe_definition(function)} is called with ({asked}): {error}"
        ) from None


def list_parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function; none for a builtin without a signature, like `int`."""
    try:
        return inspect.signature(function).parameters
    except ValueError:
        return {}


def describe_definition(function: Any) -> str:
    """The name of a function, method or class and where it is defined: "my_tools.Shelf.put
    (/home/me/my_tools.py:7)"."""
    while isinstance(function, functools.partial):
        function = function.func
    try:
        inner = inspect.unwrap(function)
        if not isinstance(inner, type) and not any(
            hasattr(inner, name) for name in ("__code__", "__func__", "cr_code")
        ):
            # an object that is called, or a session
            inner = type(inner).__call__ if "__call__" in vars(type(inner)) else type(inner)
        code = getattr(inner, "__code__", None) or getattr(inner, "cr_code", None)
        place = (
            f"{code.co_filename}:{code.co_firstlineno}" if code else inspect.getsourcefile(inner)
        )
        line = "" if code or not place else f":{inspect.getsourcelines(inner)[1]}"
    except (TypeError, OSError):  # a builtin, or a class of an interactive session
        place = None
        line = ""
    if inspect.iscoroutine(inner):
        name = (
            f"{inner.cr_frame.f_globals['__name__']}.{inner.__qualname__}"
            if inner.cr_frame
            else inner.__qualname__
        )
    else:
        name = name_function(
            inner if isinstance(inner, type) or hasattr(inner, "__qualname__") else function
        )
    return f"{name} ({place}{line})" if place else name


def suggest_name(name: str, names: Iterable[str]) -> str:
    """Suggest a similar valid name, or return an empty string."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""


def find_distribution() -> Distribution | None:
    """The installed distribution that contains this package; None if only the source is on the
    path.

    It is found by its command instead of its name. On the public package index the name `rlkit`
    belongs to another project, which may be installed in the same environment.
    """
    return next(
        (
            d
            for d in distributions()
            if any(
                re.fullmatch(r"rlkit\.(__main__|commands\.cli):main", entry.value)
                for entry in d.entry_points
            )
        ),
        None,
    )


def place(error: BaseException) -> str:
    """FILE:LINE at which an error was raised.

    This is the innermost frame of the user's own code, or the innermost frame of all if there is
    none.
    """
    frames = traceback.extract_tb(error.__traceback__)
    others = (
        str(Path(__file__).parent),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        "<",
    )
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    return (
        f"{(own or frames)[-1].filename}:{(own or frames)[-1].lineno}"
        if frames
        else "an unknown place"
    )


def name_error(error: BaseException) -> str:
    """Write "ValueError: text" in one line of at most 400 characters.

    An error's own text may be empty, and may raise.
    """
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    name = type(error).__name__
    return f"{name}: {text:.400}" if text else name


def describe_error(error: BaseException) -> str:
    """The text of an rlkit error. For any other error, its type, its text and where it was
    raised."""
    if isinstance(error, RLKitError):
        return str(error)
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in name_error(error):
        return (
            f"memory ran out at {place(error)}; use smaller batches (batch.prompts,"
            " trainer.micro_batch_tokens), or allow the process more"
        )
    return f"{name_error(error)} at {place(error)}"


def split_error(error: BaseException) -> list[str]:
    """Return the text of an error as the terminal's lines. The middle of a long line is left out,
    for example of a text that a user's function returned."""
    lines = describe_error(error).splitlines()
    cut = [f"{x[:SHOWN]} … {x[-SHOWN:]}" if len(x) > 2 * SHOWN else x for x in lines]
    return [f"rlkit: {line}" for line in cut]


def describe_yaml_error(error: Any, file: str) -> str:
    """FILE:LINE of a YAML error and the parser's expectation. `file` stands in if the parser does
    not know its name."""
    mark = error.problem_mark or error.context_mark
    named = mark.name if mark and not mark.name.startswith("<") else file
    where = f"{named}:{mark.line + 1}" if mark else named
    return (
        f"{where}: this is not YAML: {error.problem or error.context}; look at indentation, colons"
        " and quotes there"
    )


def install(extra: str) -> str:
    """The command that installs an extra. In a checkout it installs the checkout, otherwise the
    distribution by its name."""
    root = Path(__file__).resolve().parent.parent
    if (root / "pyproject.toml").is_file():
        here = "" if root == Path.cwd() else f"cd {root} && "
        return f"{here}pip install -c constraints.txt -e '.[{extra}]'"
    own = find_distribution()
    return (
        f"pip install '{own.name}[{extra}]'"
        if own
        else f"install the packages of the extra '{extra}' (pyproject.toml lists them)"
    )


def announce(error: BaseException) -> None:
    """Print an error that ends a step, before anything else is waited for. `say` does not print the
    same lines again."""
    if not isinstance(error, Exception) or hasattr(error, "announced"):
        return
    lines = split_error(error)
    with contextlib.suppress(AttributeError):  # an exception with slots
        error.announced = lines  # type: ignore[attr-defined]
    tell_user(*lines)


def list_notes(error: BaseException) -> Sequence[str]:
    """The notes added to an error with `add_note`, except the traceback of another process."""
    return [note for note in getattr(error, "__notes__", ()) if "\n" not in note]


def say(error: BaseException, lines: Iterable[str]) -> None:
    """Print an error on stderr; with `debug=true` the traceback comes first."""
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    announced = getattr(error, "announced", ())
    left = [line for line in lines if line not in announced]
    if left:
        tell_user(*left)


def report(error: BaseException, *lines: str) -> int:
    """Print the error that ended a command, then its notes or else these lines; return its exit
    status.

    A Refusal has status 2 and stands alone; all others have 1.
    """
    if isinstance(error, Refusal):
        say(error, split_error(error))
        return 2
    say(error, [*split_error(error), *(list_notes(error) or lines)])
    return 1


def warn(text: str) -> None:
    """Print a warning to standard error."""
    tell_user(f"warning: {text}")


def tell_user(*lines: str) -> None:
    """Print lines to standard error, as `show_controls` shows them."""
    print("\n".join(map(show_controls, lines)), file=sys.stderr, flush=True)


def show_controls(text: str, kept: str = "") -> str:
    """Show control characters, terminal escapes among them, instead of obeying them. Use it for
    text from a model or a file."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)
