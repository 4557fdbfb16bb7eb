"""Ordinary programs run and give their values; limits and levels are said and refused in words."""

from __future__ import annotations

import os
import time

import pytest

from rlkit.errors import ConfigError
from rlkit.sandbox import (
    Job,
    Opaque,
    Sandbox,
    SandboxError,
    find_level,
    get_known_level,
    level,
    process,
    require,
    run,
    run_many,
)
from rlkit.sandbox._child import ALLOWED, MACHINES, OPEN, bpf
from rlkit.sandbox.process import run_with

PROGRAMS = {
    "arithmetic": ("def f(a, b): return a + b", "f(1, 2)", 3),
    "text": ("def f(s): return s[::-1]", "f('añ\\ud800')", "\ud800ña"),
    "nested values": (
        "",
        "[1, (2.5, None), {'a': {1, 2}, 3: frozenset({b'x'})}, True, 1j, -0.5]",
        [1, (2.5, None), {"a": {1, 2}, 3: frozenset({b"x"})}, True, 1j, -0.5],
    ),
    "large numbers": ("", "-(10 ** 3000)", -(10**3000)),
    "subclasses": (
        "from collections import *\nd = defaultdict(list, a=[1])\nP = namedtuple('P', 'x y')",
        "(d, Counter('aab'), P(1, 2), OrderedDict())",
        ({"a": [1]}, {"a": 2, "b": 1}, (1, 2), {}),
    ),
    "infinity": ("", "[float('inf'), -float('inf')]", [float("inf"), -float("inf")]),
    "class and recursion": (
        (
            "class N:\n  def __init__(s, n): s.n = n\n"
            "def f(n): return N(1).n if n < 1 else n * f(n - 1)"
        ),
        "f(20)",
        2432902008176640000,
    ),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n  x: int = 1\n",
        "P(2).x",
        2,
    ),
    "pickle": ("import pickle\nclass P: x = 1\n", "pickle.loads(pickle.dumps(P())).x", 1),
    "small file": (
        "with open('a.txt', 'w') as f: f.write('hello')",
        "open('a.txt').read()",
        "hello",
    ),
    "temporary file": (
        (
            "import tempfile\nwith tempfile.TemporaryFile('w+', dir='.') as f:\n  f.write('a')\n "
            " f.seek(0)\n  x = f.read()"
        ),
        "x",
        "a",
    ),
    "a data base in a file": (
        (
            "import sqlite3\nc = sqlite3.connect('a.db')\nc.execute('create table t (x)')\n"
            "c.execute('insert into t values (7)')\nc.commit()"
        ),
        "c.execute('select x from t').fetchall()",
        [(7,)],
    ),
    "locks and flags of a file": (
        (
            "import fcntl, os\nf = open('a', 'w')\nfcntl.lockf(f, fcntl.LOCK_EX)\n"
            "fcntl.fcntl(f, fcntl.F_SETFL, fcntl.fcntl(f, fcntl.F_GETFL) | os.O_APPEND)"
        ),
        "os.dup(f.fileno()) > 0",
        True,
    ),
    "files renamed and removed": (
        (
            "import os\nopen('a', 'w').close()\nos.rename('a', 'b')\nx = os.listdir('.')\n"
            "os.remove('b')"
        ),
        "(x, os.listdir('.'))",
        (["b"], []),
    ),
    "threads": (
        (
            "import threading\nx = []\nt = threading.Thread(target=x.append,"
            " args=(1,))\nt.start()\nt.join()"
        ),
        "x",
        [1],
    ),
    "pool of threads": (
        (
            "from concurrent.futures import ThreadPoolExecutor as P\n"
            "with P(2) as p: x = list(p.map(str, [1, 2]))"
        ),
        "x",
        ["1", "2"],
    ),
    "caught recursion": (
        "def f():\n  try: return f()\n  except RecursionError: return 'deep'",
        "f()",
        "deep",
    ),
    "generator": ("def f(): yield from range(3)", "list(f())", [0, 1, 2]),
    "prints, too": ("print('hello')", "1", 1),
    "module name": ("", "__name__", "solution"),
    "random, time, date": (
        "import random, time, datetime, uuid\nrandom.seed(1)",
        "0 < time.time() and random.random() < 1 and len(str(uuid.uuid4()))",
        36,
    ),
    "an error in a call is that call's": ("", "1 / 0", None),
}
STDLIB = [
    "abc",
    "array",
    "ast",
    "base64",
    "bisect",
    "calendar",
    "cmath",
    "collections",
    "contextlib",
    "copy",
    "csv",
    "ctypes",
    "dataclasses",
    "datetime",
    "decimal",
    "difflib",
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "html",
    "inspect",
    "io",
    "itertools",
    "json",
    "logging",
    "math",
    "numbers",
    "operator",
    "os",
    "pathlib",
    "pickle",
    "pprint",
    "queue",
    "random",
    "re",
    "secrets",
    "shlex",
    "sqlite3",
    "statistics",
    "string",
    "struct",
    "sys",
    "tempfile",
    "textwrap",
    "threading",
    "time",
    "timeit",
    "traceback",
    "types",
    "typing",
    "unicodedata",
    "unittest",
    "urllib.parse",
    "uuid",
    "warnings",
    "weakref",
    "xml.etree.ElementTree",
    "zlib",
    "zoneinfo",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_ordinary_programs_give_their_values(name):
    code, call, value = PROGRAMS[name]
    outcome = run(Job(code, (call,)))
    assert outcome.status == "ok" and outcome.results[0].value == value, outcome
    assert type(outcome.results[0].value) is type(value)
    assert ("ZeroDivisionError" in outcome.results[0].error) == (call == "1 / 0")


@pytest.mark.slow
def test_the_standard_library_can_be_imported():
    outcome = run(Job("\n".join(f"import {name}" for name in STDLIB)))
    assert outcome.status == "ok", outcome


@pytest.mark.slow
def test_values_of_other_types_are_named_and_equal_nothing():
    (function, *_), *_ = [run(Job("class A: __eq__ = lambda s, o: True", ("A()",))).results]
    assert function.value == Opaque("A") and not function.error


def test_calls_share_one_interpreter_and_programs_do_not():
    first = run(Job("n = 0\ndef f():\n  global n\n  n += 1\n  return n", ("f()", "f()")))
    assert [r.value for r in first.results] == [1, 2]
    assert "NameError" in run(Job("", ("f()",))).results[0].error


def test_an_exception_names_its_line_and_a_call_that_fails_does_not_end_the_others():
    outcome = run(Job("x = 1\ny = 2\nz = undefined"))
    assert (
        outcome.status == "error" and "NameError" in outcome.error and "(line 3)" in outcome.error
    )
    assert [bool(r.error) for r in run(Job("", ("1", "nothing", "2"))).results] == [
        False,
        True,
        False,
    ]


@pytest.mark.slow
def test_what_came_before_the_deadline_is_kept():
    outcome = run(Job("import time", ("1", "time.sleep(60)", "2")), Sandbox(time_limit=0.3))
    assert (
        outcome.status == "timeout"
        and [r.value for r in outcome.results] == [1]
        and 0.3 <= outcome.seconds < 1.0
    )


@pytest.mark.slow
def test_many_programs_keep_their_order():
    outcomes = run_many(
        [Job(f"import time\ntime.sleep({0.2 if i % 2 else 0})", (str(i),)) for i in range(6)],
        Sandbox(workers=3),
    )
    assert [o.results[0].value for o in outcomes] == list(range(6))
    assert run_many([]) == []


def test_interactive_code_gives_what_it_prints_and_its_last_value():
    outcome = run(Job("print('a')\nx = [1]\nx", interactive=True))
    assert (outcome.status, outcome.printed) == ("ok", "a\n[1]")
    assert run(Job("print('x' * 10**6)", interactive=True)).printed == "x" * (16 << 10)


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("RLKIT_TEST_TOKEN", "secret")
    names = run(Job("import os", ("sorted(os.environ)",))).results[0].value
    assert set(names) <= {"LC_CTYPE"}


def test_the_level_says_what_it_blocks_and_is_found_once():
    start = time.perf_counter()
    found = find_level()
    assert find_level() is found and time.perf_counter() - start < 5 and get_known_level() is found
    assert found.name in level.LEVELS and str(found).startswith(f"sandbox: {found.name} - ")
    if found.name != "basic":
        assert found.open == () and {"seccomp", "landlock"} <= set(found.features)


@pytest.mark.parametrize(
    "lost, name",
    [
        ({"namespaces"}, "kernel"),
        ({"landlock"}, "basic"),
        ({"seccomp"}, "basic"),
        ({"seccomp", "landlock", "namespaces"}, "basic"),
    ],
)
def test_a_kernel_without_a_feature_gives_a_weaker_level_that_needs_consent(
    monkeypatch, lost, name
):
    real = process.run_with

    def without(job, sandbox, features):
        if lost & set(features):
            raise SandboxError("not in this kernel")
        return real(job, sandbox, features)

    if find_level().name == "basic":
        pytest.skip(f"this machine gives basic only: {find_level().reasons}")
    monkeypatch.setattr(level, "run_with", without)
    find_level.cache_clear()
    try:
        found = find_level()
        assert found.name == name and not lost & set(found.features) and found.reasons
        if name == "basic":
            assert found.open and "NOT blocked" in str(found)
            with pytest.raises(
                ConfigError,
                match=(
                    r"sandbox\.min_level is kernel.*gives basic.*not in this"
                    r" kernel.*allow_weak=true"
                ),
            ):
                require(Sandbox())
            assert (
                require(Sandbox(allow_weak=True)).name
                == require(Sandbox(min_level="basic")).name
                == "basic"
            )
        else:
            assert require(Sandbox()).name == "kernel"
            with pytest.raises(ConfigError, match=r"kernel\+ns"):
                require(Sandbox(min_level="kernel+ns"))
    finally:
        find_level.cache_clear()


def test_a_child_that_cannot_be_confined_runs_nothing(tmp_path):
    """A feature that fails is an error, never a run without it."""
    with pytest.raises(SandboxError, match="did not run"):
        process._outcome([("X", b"OSError: seccomp failed")], Job(""), "end", 0.0)
    with pytest.raises(SandboxError, match="said nothing"):
        process._outcome([], Job(""), "end", 0.0)


@pytest.mark.parametrize(
    "field, value",
    [
        ("time_limit", 0),
        ("memory_mb", 1),
        ("output_kb", 0),
        ("workers", 0),
        ("min_level", "strong"),
    ],
)
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(ConfigError, match=rf"sandbox\.{field} is .*{value}"):
        require(Sandbox()._replace(**{field: value}))


def test_workers_never_take_more_than_half_of_the_memory():
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    assert process.count_workers(Sandbox(workers=64, memory_mb=memory // 8)) <= 4
    assert (
        process.count_workers(Sandbox(workers=3)) == 3
        and 1 <= process.count_workers(Sandbox()) <= 8
    )


def simulate(program, machine: int, number: int, arguments=(0,) * 6) -> int:
    """What a seccomp filter gives: an interpreter of the instructions that it is made of."""
    data = {0: number, 4: machine} | {
        16 + 8 * i + 4 * h: (a >> 32 * h) & 0xFFFFFFFF
        for i, a in enumerate(arguments)
        for h in (0, 1)
    }
    place = value = 0
    while True:
        code, true, false, k = program[place]
        place += 1
        if code == 0x06:
            return k
        if code == 0x20:
            value = data[k]
        elif code == 0x54:
            value &= k
        else:
            place += (
                true if {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code] else false
            )


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_allows_what_is_listed_and_nothing_else(machine):
    """Both machines' filters, interpreted here; so the one that does not run on this machine is
    tested as well."""
    column, audit, clone, ioctl, prlimit, fcntl = MACHINES[machine]
    program = bpf(machine)
    allowed = {pair[column] for pair in ALLOWED.values()} - {None}
    opening = {pair[column]: index for pair, index in OPEN.values() if pair[column] is not None}
    special = {
        clone: 0x50001,
        ioctl: 0x50019,
        435: 0x50026,
        prlimit: 0x7FFF0000,
        fcntl: 0x7FFF0000,
    } | dict.fromkeys(opening, 0x7FFF0000)
    assert not allowed & set(special)
    for number in range(600):
        assert simulate(program, audit, number) == special.get(
            number, 0x7FFF0000 if number in allowed else 0x50001
        ), number
    assert simulate(program, audit, clone, (0x3D0F00, 0, 0, 0, 0, 0)) == 0x7FFF0000  # a thread
    for arguments in (
        (1, 7, 0, 9, 0, 0),
        (0, 7, 9, 0, 0, 0),
        (0, 7, 1 << 40, 0, 0, 0),
    ):  # another process; new limits
        assert simulate(program, audit, prlimit, arguments) == 0x50001
    assert simulate(program, 0x40000003, 0) == 0x80000000  # 32-bit calls have other numbers
    if machine == "x86_64":
        assert simulate(program, audit, 0x40000000) == 0x80000000
    assert all(0 <= t < 256 and 0 <= f < 256 for _, t, f, _ in program) and len(program) < 4096


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_reads_the_arguments_of_fcntl_and_open(machine):
    """Of fcntl's 64 bits every command but the listed ones, and O_ASYNC; of a file's flags what
    empties it without writing."""
    column, audit, *_, fcntl = MACHINES[machine]
    program = bpf(machine)

    def allows(number: int, *arguments: int) -> bool:
        return (
            simulate(program, audit, number, (*arguments, *[0] * (6 - len(arguments))))
            == 0x7FFF0000
        )

    allowed = {
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        1030,
    }  # not 8 F_SETOWN, 10 F_SETSIG, 15 F_SETOWN_EX, 1024 F_SETLEASE, 1026 F_NOTIFY
    for command in [*range(64), *range(1020, 1050), 2**31, 2**32 - 1]:
        for high in (0, 1, 2**31, 2**32 - 1):
            assert allows(fcntl, 3, high << 32 | command) == (command in allowed and high == 0), (
                command,
                high,
            )
    for high in (
        0,
        1,
        2**32 - 1,
    ):  # the kernel reads the low half of flags, whatever stands in the high one
        assert allows(fcntl, 3, 4, high << 32 | 0o4000) and not allows(
            fcntl, 3, 4, high << 32 | 0o20000
        )
        for pair, index in OPEN.values():
            for mode in range(4):
                for others in (0, 0o100, 0o2000000, 0o20200100):
                    for truncate in (0, 0o1000):
                        flags = high << 32 | mode | others | truncate
                        if pair[column] is not None:
                            assert allows(pair[column], *[7] * index, flags) == (
                                mode in (1, 2) or (mode == 0 and not truncate)
                            )


def test_a_program_cannot_be_run_below_the_time_of_nothing():
    with pytest.raises(ConfigError, match="time_limit"):
        run_with(Job(""), Sandbox(time_limit=0.0), ())
