"""The command line. Each command is a file of this folder. A refusal prints one sentence, without a
traceback, and has exit status 2."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial

from rlkit.commands.arguments import Answer, Arguments, parse
from rlkit.commands.help import format_command_help, format_full_help
from rlkit.errors import (
    TRACEBACK,
    ConfigError,
    describe_raise,
    find_distribution,
    report,
    say,
    show_controls,
    suggest_name,
    warn,
)
from rlkit.system import extras
from rlkit.system.files import replace_nonfinite
from rlkit.system.leaving import leave_process, raise_exits
from rlkit.system.output import guard_output, hold_unawaited
from rlkit.system.parent import end_with_parent
from rlkit.system.processors import wait_without_spinning

# each is a file of this folder
COMMANDS = (
    "train",
    "evaluate",
    "rollout",
    "agent",
    "export",
    "runs",
    "compare",
    "plan",
    "check",
    "doctor",
    "replay",
    "metrics",
    "show",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 0 done, 1 failed, 2 refused, 130 interrupted.

    Without `argv`, the words are the arguments of the process, and the process ends with the
    command (`rlkit.system.leaving`).
    """
    if argv is not None:
        return run_command(argv)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by rlkit.__main__
        signal.signal(signal.SIGINT, signal.default_int_handler)
    status = run_command(sys.argv[1:])
    leave_process(status)
    return status


def _dispatch(name: str, words: Sequence[str]) -> int:
    """Find the command by its name, run it with its words, and return its exit status."""
    if name not in list_commands():
        known = ", ".join(list_commands())
        raise ConfigError(
            f"there is no command '{name}'.{suggest_name(name, list_commands())} There are:"
            f" {known}."
            f" Extras bring others (this copy has: {', '.join(extras.list_extras()) or 'none'}),"
            " and so do other packages"
        )
    own = f"rlkit.commands.{name}" if name in COMMANDS else extras.find_commands().get(name)
    if {"-h", "--help"}.intersection(words):
        print(format_command_help(name, own))
        return 0
    as_json = "--json" in words
    # With --json warnings and progress go to standard error: standard output is one document.
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        found = _run_named(name, [word for word in words if word != "--json"], as_json)
    if isinstance(found, int):
        return found
    if as_json:  # in ASCII, so text of a model or a file cannot control the terminal
        print(json.dumps(replace_nonfinite(found.data), indent=2, default=str))
    else:
        print(show_controls(found.text, kept="\n"))
    return found.status


def _run_named(name: str, words: Sequence[str], as_json: bool) -> int | Answer:
    """Run a command with its words; return its exit status or its Answer."""
    run = find_command(name)
    module = sys.modules[run.__module__]
    arguments = parse(words, texts=getattr(module, "TAKES_TEXTS", False))
    if arguments.multirun and name != "train":
        raise ConfigError(f"rlkit {name} takes one run at a time; -m belongs to rlkit train")
    if as_json and (arguments.shown or not getattr(module, "GIVES_JSON", False)):
        raise ConfigError(
            f"--json: rlkit {name} prints no JSON, nor does --cfg; `rlkit COMMAND --help` names"
            " --json where a command takes it"
        )
    if arguments.shown:
        return importlib.import_module("rlkit.commands.config_dump").command(name, arguments)
    return run(arguments)


def run_command(argv: Sequence[str]) -> int:
    """Run a command in this process; return its exit status."""
    end_with_parent()
    wait_without_spinning()
    guard_output()
    words = list(argv)
    # in the environment, because ranks and the jobs of a sweep are separate processes
    if "debug=true" in words:
        os.environ[TRACEBACK] = "1"
        try:
            return run_command([word for word in words if word != "debug=true"])
        finally:
            del os.environ[TRACEBACK]
    if words[:1] == ["--version"]:
        own = find_distribution()
        print(f"rlkit {own.version if own else 'of a checkout that is not installed'}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(format_full_help())
        return 0
    held = set[str]()
    show = warnings.showwarning
    warnings.showwarning = partial(hold_unawaited, held, show)
    status = _answer(words)
    warnings.showwarning = show
    if status == 0:
        for warning in sorted(held):
            warn(warning)
    return status


def _answer(words: Sequence[str]) -> int:
    """Run a command, print the error if it fails, and return its exit status."""
    try:
        for word in words:
            if re.search("[\ud800-\udfff]", word):
                raise ConfigError(
                    f"{word!a}: this word is not UTF-8; type it again, or set the terminal's"
                    " encoding to UTF-8"
                )
        with raise_exits():
            return _dispatch(words[0], words[1:])
    except KeyboardInterrupt as error:
        say(error, [f"rlkit: interrupted: {describe_raise(error)}"])
        return 130
    except SystemExit as error:  # rlkit itself raises no SystemExit
        what = f"{describe_raise(error)} ended the command"
        say(error, [f"rlkit: {what}; a part of the config must not do that"])
        return 1
    except BaseException as error:
        return report(error)


def list_commands() -> tuple[str, ...]:
    """List the commands of the core, of the present extras, and of other packages."""
    return tuple(
        dict.fromkeys([*COMMANDS, *extras.find_commands(), *extras.find_outside_commands()])
    )


def find_command(name: str) -> Callable[[Arguments], int | Answer]:
    """Return the function of a command. If a command of the core and of an extra or a package have
    the same name, the core's is returned.

    A command's module sets TAKES_TEXTS if words without a key are allowed. It sets GIVES_JSON if
    the function returns an Answer instead of an exit status.
    """
    if name in COMMANDS:
        return importlib.import_module(f"rlkit.commands.{name}").command
    found = extras.load_command(name)
    assert found is not None, f"list_commands names {name}"
    return found
