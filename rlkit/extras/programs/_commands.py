"""Prepare a command of a config: find its missing files before it starts, and list the files that
it may read when it is confined."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rlkit.errors import ConfigError
from rlkit.extras.programs._processes import Limits

# Paths that a confined program may read and run: programs and libraries, and files of the C library
# and TLS
SYSTEM = (
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/sbin",
    "/etc/ld.so.cache",
    "/etc/ssl",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/group",
    "/etc/localtime",
    "/etc/os-release",
    "/etc/mime.types",
)
INTERPRETER = re.compile(r"(python|pypy)[\d.]*|node|ruby|perl|(ba|da|k|z)?sh")
SCRIPT = re.compile(r".\.(py|js|cjs|mjs|rb|pl|sh)$")
# options of an interpreter that are followed by a text or a module instead of a script
TEXT = re.compile(r"-\w*[cemp]|--eval|--print")
# the folder of runs, which a program may not read, because rollouts hold answers
RECORDS = "outputs"


def find_files(command: Sequence[str], found: Callable[[str], bool] = os.path.isfile) -> list[str]:
    """Make the paths of a command's files absolute. The word `python` becomes this process's
    interpreter. `found` says whether a word is a path."""
    words = map(str, command)
    out = [str(Path(word).absolute()) if found(word) else word for word in words]
    return [sys.executable if out[0] == "python" else out[0], *out[1:]]


def check_command(key: str, words: Sequence[str], path: str | None = None) -> str:
    """Find missing files of a command before the run starts.

    Args:
      key: key of the command in the config.
      words: words of the command, from `find_files`.
      path: PATH of the command; None: PATH of this process.
    Returns: a missing relative path, because the files of a task may provide it; else "".
    Raises: ConfigError if the program, its interpreter or its script is missing, or if the program
      may not be executed.
    """
    program = words[0]
    script = find_script(words)
    if os.path.isfile(program) and not os.access(program, os.X_OK):
        raise ConfigError(
            f"environment.{key}: {program} cannot be executed; say chmod +x, or name its"
            " interpreter first, as in [python, my_agent.py]"
        )
    for word in (program, script):
        if os.path.isabs(word) and not os.path.exists(word):
            raise ConfigError(f"environment.{key}: there is no {word}")
    found = shutil.which(program, path=path)
    if found is None and (os.path.isabs(program) or not os.path.dirname(program)):
        raise ConfigError(
            f"environment.{key}: there is no program {program!r} in PATH; install it, or give its"
            " path"
        )
    interpreter = read_interpreter(found or "")
    if interpreter and shutil.which(interpreter, path=path) is None:
        raise ConfigError(
            f"environment.{key}: the first line of {found} names {interpreter!r}, which is not"
            " there; install it, or name another interpreter first"
        )
    lost = [word for word in (program if found is None else "", script) if word]
    return next((word for word in lost if not os.path.isabs(word)), "")


def find_script(words: Sequence[str]) -> str:
    """Return the script that a command's interpreter runs: `agent.py` in [python, -u, agent.py].
    Return "" if there is no script, or if it might be the value of an option."""
    names = [os.path.basename(word) for word in words]
    at = next((i for i, name in enumerate(names) if INTERPRETER.fullmatch(name)), len(words))
    for before, word in zip(words[at:], words[at + 1 :], strict=False):
        if TEXT.fullmatch(word):
            return ""
        if os.path.isfile(word) or (SCRIPT.search(word) and not before.startswith("--")):
            return word
    return ""


def read_interpreter(program: str) -> str:
    """Return the interpreter named in the first line of a script; "" for any other file."""
    try:
        with open(program, "rb") as file:
            line = file.readline(256).decode(errors="replace")
    except OSError:
        return ""
    words = line.removeprefix("#!").split() if line.startswith("#!") else []
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    return words[0] if words else ""


# ------------------------------------------------------------------------------------ what is read


def confine_limits(
    limits: Limits,
    words: Sequence[str],
    more: Sequence[str] = (),
    *,
    path: str | None = None,
    closed: Sequence[str] = (),
) -> Limits:
    """Return the limits of a confined command, with the paths that it may read beside its working
    folder.

    The command may read and run the system's programs and libraries, this Python, the installations
    of its program and interpreter, the files named in the command, the folder of its code, and the
    paths in `more`.

    Args:
      words: words of the command, from `find_files`.
      more: further paths to read.
      path: PATH of the command; None: PATH of this process.
      closed: words of another command. Its files in the folder of the code stay closed.
    """
    program = shutil.which(words[0], path=path) or words[0]
    interpreter = shutil.which(read_interpreter(program), path=path) or program
    script = find_script(words) or program
    named = [os.path.realpath(word) for word in (program, *words[1:]) if os.path.isfile(word)]
    paths = [*SYSTEM, sys.prefix, sys.base_prefix, *named, *map(os.path.abspath, more)]
    paths += [
        *list_installation(program),
        *list_installation(interpreter),
        *list_node_packages(script),
    ]
    others = [os.path.realpath(word) for word in closed if os.path.exists(word)]
    code = list_code_folders(os.path.realpath(script), others)
    listed = [os.path.dirname(inside) for inside in code[:1]]
    return limits._replace(readable=list(dict.fromkeys([*paths, *code])), listed=listed)


def list_installation(program: str) -> list[str]:
    """List the folders installed together with a program PREFIX/bin/NAME. If PREFIX is a virtual
    environment, the whole folder is listed."""
    found = list_node_packages(program)
    for place in (program, os.path.realpath(program)):
        prefix, folder = os.path.split(os.path.dirname(place))
        if os.path.isfile(os.path.join(prefix, "pyvenv.cfg")):
            found.append(prefix)
        elif folder == "bin":
            found += [os.path.join(prefix, part) for part in ("bin", "lib", "lib64", "libexec")]
    return found


def list_node_packages(file: str) -> list[str]:
    """List the npm packages that a file can import, from every folder above it."""
    above = Path(os.path.abspath(file)).parents
    paths = [folder / name for folder in above for name in ("node_modules", "package.json")]
    return [str(path) for path in paths if path.exists()]


def list_code_folders(file: str, closed: Sequence[str]) -> list[str]:
    """List the files and folders beside a command's code that a confined command may read.

    Left out are links, names that start with a dot, the records of runs, and `closed`. If the code
    is in the home folder, in a folder above it, in the folder of temporary files, or in a folder
    `bin` of installed programs, nothing is listed.
    """
    folder = os.path.dirname(file)
    home = os.path.realpath(os.path.expanduser("~"))
    temporary = os.path.realpath(tempfile.gettempdir())
    if (
        Path(home).is_relative_to(folder)
        or folder == temporary
        or os.path.basename(folder) in ("bin", ".bin")
        or not os.access(folder, os.R_OK)
    ):
        return []
    with os.scandir(folder) as entries:
        inside = [
            entry.path
            for entry in entries
            if not entry.is_symlink() and not entry.name.startswith(".") and entry.name != RECORDS
        ]
    return [
        path for path in inside if not any(Path(other).is_relative_to(path) for other in closed)
    ]
