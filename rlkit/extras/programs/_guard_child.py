"""Run a program and end it with all its processes, even if the parent was killed.

    python -I -S -B _guard_child.py      standard input: a line of JSON, the arguments of `begin`,
                                         then nothing until its end
    python -I -S -B _guard_child.py keep PARENT COMMAND …     the command gets its standard streams

This guard process takes over every orphan of the program (PR_SET_CHILD_SUBREAPER). So it also finds
a process that has left the program's session. The program prints to the guard's standard output and
error. When no process is left, the guard writes the line `exit STATUS` to standard error. For a
signal, STATUS is 128 + its number. The guard does not import rlkit.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import tempfile

# options of prctl, from linux/prctl.h
SUBREAPER = 36
DEATH_SIGNAL = 1
POLL_MS = 1000  # milliseconds between two checks of the parent
REWARD_FD = 3  # the descriptor for a verifier's reward; one digit, because a plain shell needs it
# flags of mount, from linux/mount.h
BIND = 0x1000
RECURSIVE = 0x4000
ROOT_BYTES = 1 << 20  # size of the top of a separate file tree, which has no files
OPEN_FILES = 64  # more descriptors than the guard and its parent pass on


def prctl(option: int, value: int) -> None:
    """Set an option of this process in the kernel. Outside Linux, nothing happens."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def begin(
    command: list[str],
    task: str,
    memory_mb: int | None,
    confine: dict | None = None,
    reward_fd: int | None = None,
) -> int:
    """Start the program and return its process id. The program cannot outlive this process. It
    reads the task on standard input.

    `confine` is the result of `_confinement.confinement`: "by", the path of
      rlkit/sandbox/_child.py, and the arguments of its functions. None: the program has the user's
      rights. `reward_fd` is a descriptor to pass to the program as REWARD_FD.
    """
    with tempfile.TemporaryFile() as given:
        given.write(task.encode())
        given.seek(0)
        child = os.fork()
        if child:
            return child
        try:
            os.setsid()
            prctl(DEATH_SIGNAL, signal.SIGKILL)
            os.dup2(given.fileno(), 0)
            if reward_fd is None:
                os.closerange(REWARD_FD, OPEN_FILES)
            else:
                os.dup2(reward_fd, REWARD_FD)
                os.closerange(REWARD_FD + 1, max(OPEN_FILES, reward_fd + 1))
            if memory_mb:
                import resource

                resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
            if confine:
                limits: dict = {"__name__": "limits"}
                with open(confine["by"]) as file:
                    exec(compile(file.read(), confine["by"], "exec"), limits)
                libc = ctypes.CDLL(None, use_errno=True)
                if "root" in confine:
                    enter_root(libc, limits, *confine["root"])
                limits["checked"](libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
                limits["landlock"](libc, confine["paths"], port=confine["port"])
                limits["powerless"](libc)
                limits["seccomp"](libc, confine["filter"])
            os.execvp(command[0], command)
        except Exception as error:
            os.write(2, f"{command[0]} cannot be started: {error}\n".encode())
        finally:
            os._exit(127)


def enter_root(libc: ctypes.CDLL, limits: dict, place: str, shown: dict[str, str]) -> None:
    """Give this process a separate file tree, built in the empty folder `place`. It is the
    machine's tree, with the folders `shown` under their names at its top. The kernel must allow a
    user namespace and a mount namespace."""

    def bind(source: str, name: str) -> None:
        os.mkdir(name)
        flags = ctypes.c_ulong(BIND | RECURSIVE)
        bound = libc.mount(source.encode(), name.encode(), None, flags, None)
        limits["checked"](bound, f"mount {name}")

    here = os.getcwd()
    os.chdir(place)
    limits["namespaces"](libc, ROOT_BYTES)  # now the current folder is an empty folder in memory
    for name in set(os.listdir("/")) - set(shown):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), name)
        elif os.path.isdir(f"/{name}"):
            bind(f"/{name}", name)
    for name, source in shown.items():
        bind(source, name)
    limits["checked"](libc.chroot(b"."), "chroot")
    os.chdir(here)


def list_children() -> list[int]:
    """List the process ids of this process's children."""
    own = str(os.getpid())
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, IndexError):
                if name.isdigit():
                    with open(f"/proc/{name}/stat") as stat:
                        if stat.read().rpartition(")")[2].split()[1] == own:
                            found.append(int(name))
    return found


def end_all(main: int) -> None:
    """Kill all children until none is left. The children of a dead child become children of this
    process."""
    while True:
        for kill, process in ((os.killpg, main), *((os.kill, child) for child in list_children())):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        select.select([], [], [], 0.002)


def wait(main: int) -> int:
    """Wait until the program ends by itself, or until the parent closes the guard's standard input
    or dies. Return the program's status in the form of `os.waitpid`."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write)
    parent = os.getppid()
    poller = select.poll()
    for descriptor in (0, read):
        poller.register(descriptor, select.POLLIN | select.POLLHUP)
    while True:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == main:
                    return ended[1]
        ready = {descriptor for descriptor, _ in poller.poll(POLL_MS)}
        if read in ready:
            os.read(read, 4096)
        if (0 in ready and not os.read(0, 4096)) or os.getppid() != parent:
            return signal.SIGKILL


def job_line() -> bytes:
    """Read the job, one line from standard input. The parent sends nothing after the newline."""
    line = b""
    while not line.endswith(b"\n") and (piece := os.read(0, 1 << 16)):
        line += piece
    return line


def _main() -> None:
    """Run one program as described at the top of this file."""
    job = json.loads(job_line())
    prctl(SUBREAPER, 1)
    reward_fd = job.get("reward_fd")
    child = begin(job["command"], job["task"], job["memory_mb"], job.get("confine"), reward_fd)
    if reward_fd is not None:
        os.close(reward_fd)
    status = wait(child)
    end_all(child)
    code = os.waitstatus_to_exitcode(status)
    os.write(2, f"\nexit {128 - code if code < 0 else code}\n".encode())


def keep(parent: int, command: list[str]) -> None:
    """Run a command with this process's standard streams. End all its processes when the command
    ends, when the parent ends, or on SIGTERM."""
    prctl(SUBREAPER, 1)
    prctl(DEATH_SIGNAL, signal.SIGTERM)
    guard = os.getpid()
    if os.getppid() != parent:
        return
    child = os.fork()
    if not child:
        try:
            os.setsid()
            prctl(DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() == guard:
                os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]} cannot be started: {error}\n".encode())
        finally:
            os._exit(127)

    def end(*_: object) -> None:
        end_all(child)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    # only the command keeps its streams open, so its client sees when they end
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    while os.waitpid(-1, 0)[0] != child:
        pass
    end()


if __name__ == "__main__":
    if sys.argv[1:2] == ["keep"]:
        keep(int(sys.argv[2]), sys.argv[3:])
    else:
        _main()
