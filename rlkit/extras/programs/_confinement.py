"""The limits of a confined program: files, one TCP port, and some system calls. The guard sets them
before the program begins.

Landlock's version 6 keeps the program to its files, to one TCP port, and to signals of its own. The
filter closes the ways around it: sockets other than TCP (MPTCP, UDP, unix sockets by path), data in
a TCP handshake, a port by `listen` alone, io_uring, and other processes' memory, limits and
priorities. Everything else is allowed.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from rlkit.sandbox.process import CHILD

# Rights of Landlock: execute and read; list; everything except the making of devices
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
    """The filter of a whole program, in the terms of rlkit/sandbox/_child.py (`s`)."""
    s = SimpleNamespace(**runpy.run_path(str(CHILD), run_name="limits"))
    column, audit, clone, _, prlimit, _ = s.MACHINES[machine]
    allow = (s.GIVE, 0, 0, s.ALLOW)
    program = [(s.LOAD, 0, 0, 4), (s.EQUAL, 1, 0, audit), (s.GIVE, 0, 0, s.KILL), (s.LOAD, 0, 0, 0)]
    if machine == "x86_64":
        program += [(s.ABOVE, 0, 1, 0x40000000), (s.GIVE, 0, 0, s.KILL)]
    for pair in FORBIDDEN.values():
        program += s.only(pair[column], [])
    # clone3: the C library falls back on clone
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
    program += s.only(prlimit, [s.argument(0), (s.EQUAL, 0, 1, 0), allow])  # of oneself
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
    """A file tree of a command's own: this machine's, with other folders at its top."""

    place: str  # an empty folder, where the tree is put together
    readable: Mapping[str, str]  # name at the top → folder to show there
    own: Mapping[str, str]  # the same for folders that the command writes


def confinement(
    readable: Sequence[str],
    port: int | None,
    listed: Sequence[str] = (),
    root: Root | None = None,
) -> dict[str, Any]:
    """The limits in the form of the guard. The program and its children read and run `readable`,
    list the names in `listed`, write their own folder and connect to `port` if there is one, no
    more. With `root`, they see that file tree and have a network of their own, which is empty."""
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
