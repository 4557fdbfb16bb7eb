"""Guard process-wide state against changes by a user's function, for example gradients off, another
default dtype, or another working directory.

rlkit reads the state before a stretch of user code, and compares it whenever no user code runs.
Every change is put back, so the run's numbers do not depend on it. One sentence names the functions
behind the change. A change lasts until its function returns or waits.

Some changes are left alone, because they are usually intended and affect no number of a run:
environment variables, warning filters, the recursion limit, `sys.path`. The umask is left alone
too, because reading it means setting it. Random generators have rules of their own
(`rlkit.system.rng`).
"""

from __future__ import annotations

import _signal
import locale
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, Literal, NamedTuple

from rlkit.errors import RLKitError, describe_definition, warn
from rlkit.types import plain

# a run and its children rely on these
SIGNALS = {
    name: int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGCHLD")
}
DEFAULTS = {int(handler): handler for handler in signal.Handlers}
DEVICES = ("cpu", "cuda")
PLACES = ("thread", "both", "process")


class SharedStateError(RLKitError, RuntimeError):
    """Raised if user code changed process-wide state and rlkit cannot put it back."""


class Kind(NamedTuple):
    """A kind of state that code may change for all other code.

    read    returns the current value, or several values by name
    write   sets the value
    place   process: all threads share one value
            thread: each thread has its own value, until the thread ends
            both: each thread has its own value, but setting it in one thread also sets the others
    """

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    place: Literal["process", "thread", "both"] = "process"


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "a folder that is gone"


def _handlers() -> dict[str, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {name: _handler(number) for name, number in SIGNALS.items()}


def _handler(number: int) -> Any:
    """Return the handler of a signal. An event loop's own handler of Ctrl-C comes and goes with the
    loop, so Python's default handler is returned in its place."""
    # not signal.getsignal: it takes 3 us to look up an enum, and a step asks thousands of times
    found = _signal.getsignal(number)
    if type(found) is int:
        return DEFAULTS[found]
    of_loop = isinstance(found, partial) and getattr(found.func, "__name__", "") == "_on_sigint"
    return signal.default_int_handler if of_loop else found


def _set_handlers(handlers: Mapping[str, Any]) -> None:
    for name, handler in handlers.items():
        # None: it was set from C
        if handler is not None and _handler(SIGNALS[name]) != handler:
            signal.signal(SIGNALS[name], handler)


def _streams() -> dict[str, Any]:
    return {"stdout": sys.stdout, "stderr": sys.stderr}


def _set_streams(streams: Mapping[str, Any]) -> None:
    sys.stdout = streams["stdout"]
    sys.stderr = streams["stderr"]


def _read_blocked_signals() -> set[Any]:
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


def describe_change(was: Any, now: Any) -> str:
    """Say how a value changed, from old to new. Of several named values, only the changed values
    are named."""
    if isinstance(was, dict):
        return " and ".join(
            f"{name} {describe_change(was[name], now[name])}"
            for name in was
            if was[name] != now[name]
        )
    return f"from {_word(was)} to {_word(now)}"


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, signal.Handlers):
        return value.name
    if isinstance(value, set):
        return ", ".join(sorted(number.name for number in value)) or "none"
    return str(getattr(value, "__qualname__", value))


FOLDER = "the working directory"
OWN = ("rlkit", "torch", "builtins", "None")  # modules whose functions are not the user's
OF_PYTHON: Mapping[str, Kind] = {
    FOLDER: Kind(_folder, os.chdir),
    "the signal handlers": Kind(_handlers, _set_handlers, "thread"),
    "the blocked signals": Kind(
        _read_blocked_signals, partial(signal.pthread_sigmask, signal.SIG_SETMASK), "thread"
    ),
    "the locale": Kind(
        partial(locale.setlocale, locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)
    ),
    "the standard output": Kind(_streams, _set_streams),
}


@cache
def list_kinds() -> Mapping[str, Kind]:
    """Return the kinds of state of Python and of torch. This imports torch."""
    import torch

    cuda = torch.backends.cuda
    cudnn = torch.backends.cudnn
    onednn = torch.backends.mkldnn

    def autocast() -> dict[str, bool]:
        return {device: torch.is_autocast_enabled(device) for device in DEVICES}

    def set_autocast(enabled: Mapping[str, bool]) -> None:
        for device, on in enabled.items():
            torch.set_autocast_enabled(device, on)

    def set_device(device: Any) -> None:
        # an explicit "cpu" would slow every call of torch
        torch.set_default_device(None if device.type == "cpu" else device)

    def deterministic() -> dict[str, bool]:
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        return {"deterministic": torch.are_deterministic_algorithms_enabled(), "warn_only": warns}

    def set_deterministic(flags: Mapping[str, bool]) -> None:
        torch.use_deterministic_algorithms(flags["deterministic"], warn_only=flags["warn_only"])

    def backends() -> dict[str, bool]:
        return {
            "flash_sdp": cuda.flash_sdp_enabled(),
            "mem_efficient_sdp": cuda.mem_efficient_sdp_enabled(),
            "math_sdp": cuda.math_sdp_enabled(),
            "mkldnn": onednn.enabled,
            "cudnn": cudnn.enabled,
            "cudnn.benchmark": cudnn.benchmark,
            "cudnn.deterministic": cudnn.deterministic,
        }

    def set_backends(flags: Mapping[str, bool]) -> None:
        cuda.enable_flash_sdp(flags["flash_sdp"])
        cuda.enable_mem_efficient_sdp(flags["mem_efficient_sdp"])
        cuda.enable_math_sdp(flags["math_sdp"])
        onednn.set_flags(flags["mkldnn"])
        own = {f"_{name}": flags[f"cudnn.{name}"] for name in ("benchmark", "deterministic")}
        cudnn.set_flags(_enabled=flags["cudnn"], **own)

    products = Kind(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
    return {
        **OF_PYTHON,
        "torch's grad mode": Kind(torch.is_grad_enabled, torch.set_grad_enabled, "thread"),
        "torch's autocast": Kind(autocast, set_autocast, "thread"),
        # four times as fast as torch.get_default_device
        "torch's default device": Kind(lambda: torch.empty(0).device, set_device, "thread"),
        "torch's default dtype": Kind(torch.get_default_dtype, torch.set_default_dtype),
        "torch's number of threads": Kind(torch.get_num_threads, torch.set_num_threads, "both"),
        "torch's deterministic mode": Kind(deterministic, set_deterministic),
        "torch's precision of float32 products": products,
        "torch's backends": Kind(backends, set_backends),
    }


def select_kinds(names: Sequence[str]) -> Mapping[str, Kind]:
    """Return the kinds with these names, or all kinds without a name. Only Python's kinds can be
    named."""
    return {name: OF_PYTHON[name] for name in names} if names else list_kinds()


SharedState = Mapping[str, Any]  # name of a kind → its value


def read_state(kinds: Mapping[str, Kind]) -> SharedState:
    """Read the current state of this thread."""
    return {name: kind.read() for name, kind in kinds.items()}


def put_back(before: SharedState, kinds: Mapping[str, Kind]) -> list[str]:
    """Restore the state `before`. Returns: for each changed kind, a text with the old and the new
    value.

    Raises: SharedStateError if a value cannot be put back.
    """
    changed = []
    for name, was in before.items():
        kind = kinds[name]
        now = kind.read()
        if now == was:
            continue
        said = f"{name} {describe_change(was, now)}"
        try:
            kind.write(was)
        except Exception as error:
            raise SharedStateError(f"{said}, which cannot be put back: {error}") from error
        if kind.read() != was:
            raise SharedStateError(f"{said}, which cannot be put back")
        changed.append(said)
    return changed


# --------------------------------------------------------------------------- a stretch of user code

# functions and their changes → the sentence printed, in this process
NAMED: dict[tuple[str, ...], str] = {}


def say_once(sentences: Mapping[tuple[str, ...], str]) -> None:
    """Print each sentence whose functions and changes were not named before in this process."""
    for key, sentence in sentences.items():
        if key not in NAMED:
            NAMED[key] = sentence
            warn(sentence)


class Watch:
    """Watch a stretch of user code. It keeps the state before the stretch, and the functions run
    since the last look.

    Args:
      parts: functions, or values with functions inside, for example an Environment. They are named
        for a change if it is not known which of them ran. A text is used as the name itself.
      kinds: names of the kinds of state to compare; by default all kinds.
    """

    def __init__(self, *parts: Any, kinds: Sequence[str] = ()):
        self.parts = parts
        self.kinds = select_kinds(kinds)
        self.before = read_state(self.kinds)
        self.lock = threading.Lock()
        self.elsewhere = 0
        self.ran = list[Any]()

    def look(self, *, over: bool = False) -> None:
        """Put back every change and name the functions behind it. Call this while no user code runs
        in this thread.

        While user code runs in other threads, state shared by all threads is left alone, because
        another thread may have changed it and may still need it. Once the stretch is `over`, only
        abandoned functions can still run, so this state is put back too.
        """
        with self.lock:
            self._compare(("thread", "both") if self.elsewhere and not over else PLACES)

    @contextmanager
    def watch_call(self, function: Any) -> Iterator[None]:
        """Watch a call of a function in this thread, inside this block. The function is named for
        its changes."""
        self._note(function)
        try:
            yield
        finally:
            self.look()

    @contextmanager
    def watch_worker(self, function: Any) -> Iterator[None]:
        """Watch a call of a function in a thread of its own, like `watch_call`."""
        with self.lock:
            self.elsewhere += 1
            self._note(function)
        try:
            yield
        finally:
            with self.lock:
                self.elsewhere -= 1
                self._compare(("both",) if self.elsewhere else ("both", "process"))

    def _note(self, function: Any) -> None:
        if not is_own(function) and function not in self.ran:
            self.ran.append(function)

    def _compare(self, places: Sequence[str]) -> None:
        before = self.before
        if places is not PLACES:
            before = {name: was for name, was in before.items() if self.kinds[name].place in places}
        try:
            changed = put_back(before, self.kinds)
        except SharedStateError as error:
            raise SharedStateError(f"{self._name_suspects()} changed {error}") from error
        if changed:
            self._name(changed)
        if not self.elsewhere:
            self.ran.clear()

    def _name_suspects(self) -> str:
        said = [part for part in self.parts if isinstance(part, str)]
        return (
            " or ".join(
                said or map(describe_definition, self.ran or find_user_functions(self.parts))
            )
            or "a function"
        )

    def _name(self, changed: list[str]) -> None:
        who = self._name_suspects()
        key = (who, *(text.partition(" from ")[0] for text in changed))
        say_once(
            {
                key: (
                    f"{who} changed {' and '.join(changed)}. rlkit has put it back; let the"
                    " function restore what it changes"
                )
            }
        )


WATCH: ContextVar[Watch | None] = ContextVar("WATCH", default=None)  # of the stretch under way


@contextmanager
def guard_state(*parts: Any, kinds: Sequence[str] = ()) -> Iterator[Watch]:
    """Guard a stretch of user code: put all shared state back after it."""
    watch = Watch(*parts, kinds=kinds)
    token = WATCH.set(WATCH.get() if kinds else watch)
    try:
        yield watch
    finally:
        WATCH.reset(token)
        watch.look(over=True)


def get_current_watch() -> Watch:
    """Return the watch of the current stretch of user code, or a new watch outside of a stretch."""
    return WATCH.get() or Watch()


# -------------------------------------------------------------------------------------------- names


def is_own(function: Any) -> bool:
    """Return whether a function belongs to rlkit, torch or Python."""
    return str(getattr(plain(function), "__module__", None)).partition(".")[0] in OWN


def find_user_functions(part: Any, depth: int = 6) -> list[Any]:
    """Find the user's functions and classes in a value, even inside closures of rlkit's functions.
    rlkit's own functions are left out."""
    found: list[Any] = []
    if depth == 0 or part is None or isinstance(part, str | bytes | int | float):
        return found
    inside: list[Any] = []
    if isinstance(part, partial):
        inside = [part.func, *part.args, *part.keywords.values()]
    elif isinstance(part, Mapping):
        inside = list(part.values())
    elif isinstance(part, list | tuple):
        inside = list(part)
    elif callable(part):
        if is_own(part):
            inside = [
                cell.cell_contents
                for cell in getattr(part, "__closure__", None) or ()
                if _is_filled(cell)
            ]
        else:
            found = [part]
    for value in inside:
        found += [
            function for function in find_user_functions(value, depth - 1) if function not in found
        ]
    return found


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
