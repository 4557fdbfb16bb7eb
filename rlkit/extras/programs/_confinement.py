"""Describe the limits of a confined program: its files, one TCP port, and its system calls. The
guard process (_guard_child.py) sets these limits before the program begins.

Landlock's version 6 limits the program to its files, to one TCP port, and to signals among its own
processes. A filter of system calls closes the ways around Landlock. It forbids sockets other than
TCP (MPTCP, UDP, unix sockets by path), pairs of datagram sockets, data in a TCP handshake, a port
opened by `listen` alone, io_uring, and access to other processes' memory, limits and priorities.
All other system calls are allowed. Some of them change the mode, owner, times and attributes of
files by path. Landlock does not limit these calls, and ordinary programs need them.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from rlkit.sandbox.process import CHILD

# Rights of Landlock. RUN: execute, read and list. LIST: list names. OWN: everything except making
# devices.
RUN = 0x1 | 0x4 | 0x8
LIST = 0x8
OWN = 0x77BF
FORBIDDEN = {
    "listen": (50, 201),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "unshare": (272, 97),
    "setns": (308, 268),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "open_by_handle_at": (304, 265),
    "shmat": (30, 196),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
NEW_NAMESPACE = 0x7E020000
FASTOPEN = 0x20000000


def bpf_of_programs(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the filter of system calls for a whole program. It is written with the constants and
    functions of rlkit/sandbox/_child.py (`s`)."""
    s = SimpleNamespace(**runpy.run_path(str(CHILD), run_name="limits"))
    column, audit, clone, _, prlimit, _ = s.MACHINES[machine]
    allow = (s.GIVE, 0, 0, s.ALLOW)
    program = [(s.LOAD, 0, 0, 4), (s.EQUAL, 1, 0, audit), (s.GIVE, 0, 0, s.KILL), (s.LOAD, 0, 0, 0)]
    if machine == "x86_64":
        program += [(s.ABOVE, 0, 1, 0x40000000), (s.GIVE, 0, 0, s.KILL)]
    for pair in FORBIDDEN.values():
        program += s.only(pair[column], [])
    # clone3: report that it does not exist, so the C library uses clone
    program += [(s.EQUAL, 0, 1, 435), (s.GIVE, 0, 0, s.ENOSYS)]
    tcp = [
        s.argument(0),
        (s.EQUAL, 1, 0, 2),
        (s.EQUAL, 0, 7, 10),  # IPv4 or IPv6
        s.argument(1),
        (s.AND, 0, 0, 0xF),
        (s.EQUAL, 0, 4, 1),  # a stream
        s.argument(2),
        (s.EQUAL, 1, 0, 0),
        (s.EQUAL, 0, 1, 6),
        allow,  # TCP
    ]
    program += s.only((41, 198)[column], tcp)
    # an end of a pair of datagram sockets could send to any unix socket by its path
    paired = [s.argument(1), (s.AND, 0, 0, 0xF), (s.EQUAL, 1, 0, 1), (s.EQUAL, 0, 1, 5), allow]
    program += s.only((53, 199)[column], paired)
    # only for the process itself
    program += s.only(prlimit, [s.argument(0), (s.EQUAL, 0, 1, 0), allow])
    flags = (
        (clone, 0, NEW_NAMESPACE),
        ((44, 206)[column], 3, FASTOPEN),
        ((46, 211)[column], 2, FASTOPEN),
        ((307, 269)[column], 3, FASTOPEN),
    )
    for number, index, bits in flags:
        program += s.only(number, [s.argument(index), (s.BITS, 1, 0, bits), allow])
    return [*program, allow]


class Root(NamedTuple):
    """Describe a separate file tree for a command: this machine's tree, with other folders at its
    top."""

    place: str  # an empty folder in which the tree is built
    readable: Mapping[str, str]  # name at the top → folder shown under this name
    own: Mapping[str, str]  # the same, for folders that the command may write


def confinement(
    readable: Sequence[str],
    port: int | None,
    listed: Sequence[str] = (),
    root: Root | None = None,
) -> dict[str, Any]:
    """Return the limits in the form that the guard reads. The program and its children may read and
    run the paths in `readable`, list the names in the folders `listed`, write their working folder,
    and connect to `port` if it is given. With `root`, they see this file tree instead of the
    machine's, and have an empty network."""
    paths = [*((path, RUN) for path in readable), *((path, LIST) for path in listed), (".", OWN)]
    limits: dict[str, Any] = {
        "by": str(CHILD),
        "port": port,
        "filter": bpf_of_programs(os.uname().machine),
    }
    if root is None:
        return {**limits, "paths": paths}
    paths += [(f"/{name}", RUN) for name in root.readable]
    paths += [(f"/{name}", OWN) for name in root.own]
    shown = {**root.readable, **root.own}
    return {**limits, "paths": paths, "root": (root.place, shown)}
