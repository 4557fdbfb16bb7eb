"""Judge a program's folder with a user's command (`environment.verify`), when every process of the
episode is dead."""

from __future__ import annotations

import json
import math
import os
import socket
import stat
import sys
from collections.abc import Sequence
from typing import NamedTuple

from rlkit.errors import ConfigError
from rlkit.extras.programs._commands import check_command, confine_limits, find_files
from rlkit.extras.programs._processes import (
    Limits,
    explain_confinement,
    make_variables,
    run_guarded,
)
from rlkit.sandbox.process import make_folder
from rlkit.system.deadline import Countdown, DeadlinePassed
from rlkit.types import Task

LONGEST_NUMBER = 64  # largest size of a verifier's number, in bytes
OUTPUT = 1 << 20  # largest output of a verifier, in bytes

State = tuple[int, ...]


class Verifier(NamedTuple):
    """Describe how the reward of an episode is decided."""

    command: Sequence[str]  # the user's command; empty: only a task's own tests decide
    limits: Limits
    time_limit: float
    least: float
    most: float
    state: dict[str, State]  # marks of the command's files at the start of the run


def make_verifier(
    command: Sequence[str],
    *,
    time_limit: float,
    reward_range: Sequence[float],
    confined: bool,
    readable: Sequence[str],
    memory_mb: int | None,
) -> Verifier:
    """Make the verifier of a run. Raises: ConfigError for an invalid range or limit, if the command
    cannot be started, and for a command outside Linux."""
    if command and sys.platform != "linux":
        raise ConfigError(
            "environment.verify needs Linux, where all that a program started is ended before its"
            " files are judged"
        )
    if not time_limit > 0:
        raise ConfigError(f"environment.verify_time_limit is {time_limit}; it must be > 0 seconds")
    ends = [float(end) for end in reward_range]
    if len(ends) != 2 or not all(map(math.isfinite, ends)) or not ends[0] < ends[1]:
        raise ConfigError(
            f"environment.reward_range is {list(reward_range)}; give two finite numbers, the"
            " smaller one first"
        )
    words = find_files(command, os.path.exists) if command else []
    lost = check_command("verify", words) if command else ""
    if lost:
        raise ConfigError(f"environment.verify: there is no {lost!r} in {os.getcwd()}")
    limits = Limits(OUTPUT, memory_mb)
    if confined:
        more = [*readable, *filter(os.path.isdir, words)]
        limits = confine_limits(limits, words or ["bash"], more)
    # a confined program cannot change the content of these files, only their mode and times
    state = {} if confined else read_file_states(words)
    return Verifier(words, limits, time_limit, ends[0], ends[1], state)


def read_file_states(command: Sequence[str]) -> dict[str, State]:
    """Return marks of the command's files and of all files in its folders. The mark of a file
    changes if anybody writes or replaces the file."""
    named = [word for word in command if os.path.isabs(word) and os.path.exists(word)]
    found = {word: _state(os.stat(word)) for word in named}
    for word in named:
        for place, _, files in os.walk(word):
            paths = [os.path.join(place, name) for name in files]
            found |= {path: _state(os.lstat(path)) for path in paths}
    return found


def _state(at: os.stat_result) -> State:
    if stat.S_ISDIR(at.st_mode):
        return at.st_dev, at.st_ino
    return at.st_dev, at.st_ino, at.st_size, at.st_ctime_ns


def keep_plain_files(where: str) -> None:
    """Reduce a program's folder to readable files and folders.

    Links, files with a second name, pipes, sockets and devices are removed. So a name that a
    verifier opens is always a file in this folder, and opening it never hangs. Files lose their
    right to be executed. Raises: OSError if the folder cannot be walked.
    """
    if not stat.S_ISDIR(os.lstat(where).st_mode):
        raise OSError("the program replaced its folder")
    # the program may have removed the rights of this folder, or of a folder inside
    os.chmod(where, 0o700)
    for _, folders, files, place in os.fwalk(where, onerror=_raise):
        for name in (*folders, *files):
            at = os.stat(name, dir_fd=place, follow_symlinks=False)
            if stat.S_ISDIR(at.st_mode):
                os.chmod(name, 0o700, dir_fd=place)
            elif stat.S_ISREG(at.st_mode) and at.st_nlink == 1:
                os.chmod(name, 0o400, dir_fd=place)
            else:
                os.unlink(name, dir_fd=place)
                folders[:] = [other for other in folders if other != name]


def _raise(error: OSError) -> None:
    raise error


def write_whole_task(task: Task) -> str:
    """Write the whole task for a verifier, with its answer and all metadata."""
    return json.dumps(
        {
            "id": task.id,
            "messages": list(task.messages),
            "answer": task.answer,
            "metadata": dict(task.metadata),
        }
    )


async def verify(verifier: Verifier, task: Task, left_in: str) -> float | str:
    """Compute the reward of an episode from its program's folder. If there is no reward, return a
    sentence that says why.

    Every process of the episode must be dead. The verifier has its own working folder and new
    environment variables. It finds the whole task in RLKIT_TASK (if it has fewer than 65,536
    characters) and on standard input, and the program's folder in RLKIT_FOLDER. It writes one
    number to the descriptor with the number in RLKIT_REWARD_FD. The descriptor is a socket, so
    another process cannot open it by its name in /proc.
    """
    try:
        if verifier.state and read_file_states(verifier.command) != verifier.state:
            return "a file that environment.verify names was changed during the run"
        keep_plain_files(left_in)
    except (OSError, RecursionError) as error:
        return f"what the program left cannot be verified: {error}"
    text = write_whole_task(task)
    limits = verifier.limits
    if limits.readable is not None:
        limits = limits._replace(readable=[*limits.readable, left_in])
    ours, theirs = socket.socketpair()
    with make_folder() as where, ours, theirs:
        variables = make_variables(where, text)
        variables |= {
            "RLKIT_FOLDER": left_in,
            "RLKIT_REWARD_FD": "3",
            # Python then imports neither from the script's folder nor from the current folder
            "PYTHONSAFEPATH": "1",
            # otherwise new files would change a folder of `verifier.state`
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            async with Countdown(verifier.time_limit).running():
                done = await run_guarded(
                    verifier.command,
                    where,
                    variables,
                    text,
                    limits,
                    left=[],
                    reward_fd=theirs.fileno(),
                )
        except DeadlinePassed:
            return f"it ran for more than environment.verify_time_limit={verifier.time_limit} s"
        theirs.close()
        if done.flooded:
            return f"it printed more than {OUTPUT >> 20} MiB"
        if done.status:
            hint = explain_confinement(done, limits)
            return f"it ended with exit status {done.status}{hint}: {done.complained[-500:]}"
        ours.setblocking(False)
        return read_number(ours.recv(LONGEST_NUMBER + 1), verifier.least, verifier.most)


def read_number(data: bytes, least: float, most: float) -> float | str:
    """Return a verifier's number, or a sentence that says what is wrong with it."""
    try:
        number = float(data.decode("ascii")) if len(data) <= LONGEST_NUMBER else math.nan
    except ValueError:
        number = math.nan
    if math.isnan(number):
        return "it wrote no number to the descriptor RLKIT_REWARD_FD"
    return check_range(number, least, most)


def check_range(number: float, least: float, most: float) -> float | str:
    """Return a verifier's number, or a sentence if it is out of range."""
    if least <= number <= most:
        return number
    return f"it wrote {number}, which is outside environment.reward_range=[{least}, {most}]"
