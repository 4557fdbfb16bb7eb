"""Compiling C: whatever happens to the folder, the compiler and the other processes, a process has
the right library or one sentence."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlkit.errors import EngineError
from rlkit.models import compiled
from rlkit.models.compiled import JOBS, NoKernel, Undecided, load_library, load_or_reason

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
pytestmark = pytest.mark.skipif(COMPILER is None or os.name != "posix", reason="needs a C compiler")

SOURCE = "int step(void) { return 7; }\n"
# rlkit.models itself brings torch, which takes seconds to import.
CHILD = """
import sys, types
from pathlib import Path
import rlkit
package = types.ModuleType("rlkit.models")
package.__path__ = [str(Path(rlkit.__file__).parent / "models")]
sys.modules["rlkit.models"] = package
from rlkit.models import compiled
"""
LOADS = CHILD + "print(compiled.load_library(Path(sys.argv[1]), 'step').step(), flush=True)\n"


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A C file, and a home and a folder of temporary files of its own."""
    for name in ("home", "tmp", "bin"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    for name in ("XDG_CACHE_HOME", "CC", JOBS):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "test_step.c"
    file.write_text(SOURCE)
    return file


def compiler(tmp_path: Path, monkeypatch, script: str) -> None:
    """A shell script in the place of the compiler; CC in it is the real one."""
    file = tmp_path / "bin" / "cc"
    file.write_text(f"#!/bin/sh\nCC={COMPILER}\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setenv("CC", str(file))


def child(code: str, *words: str | Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kept() -> list[Path]:
    """The files of the user's folder."""
    return [*(compiled.cache_folder() / "kernels").iterdir()]


# -------------------------------------------------------------------------------- several processes


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 20])
def test_several_processes_at_once_all_have_it(count, source, tmp_path, monkeypatch):
    compiler(tmp_path, monkeypatch, f'echo x >> {tmp_path}/count; exec $CC "$@"')
    started = [child(LOADS, source) for _ in range(count)]
    assert [process.communicate(timeout=300)[0] for process in started] == ["7\n"] * count
    compilations = (tmp_path / "count").read_text()
    assert load_library(source, "step").step() == 7
    assert (tmp_path / "count").read_text() == compilations
    assert len(kept()) == 1


# ------------------------------------------------------------------------------------------- damage


def truncated(part: float):
    return lambda path: os.truncate(path, int(path.stat().st_size * part))


def flipped(part: float):
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes() or b"\0")
        data[int((len(data) - 1) * part)] ^= 0xFF
        path.write_bytes(data)

    return flip


def replaced(make):
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def filled_folder(path: Path) -> None:
    path.mkdir()
    (path / "file").write_text("x")


DAMAGES = {
    **{f"cut to {part}": truncated(part) for part in (0, 0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999)},
    **{f"flipped at {part}": flipped(part) for part in (0, 0.002, 0.1, 0.3, 0.5, 0.7, 0.9, 1)},
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x" * 5000),
    "text": lambda path: path.write_bytes(b"no library"),
    "zeros": lambda path: path.write_bytes(bytes(20_000)),
    "of another processor": lambda path: path.write_bytes(
        path.read_bytes()[:18] + b"\xf3\0" + path.read_bytes()[20:]
    ),
    "empty": replaced(lambda path: path.touch()),
    "gone": Path.unlink,
    "a folder": replaced(Path.mkdir),
    "a filled folder": replaced(filled_folder),
    "a FIFO": replaced(os.mkfifo),
    "a loop of links": replaced(lambda path: path.symlink_to(path.name)),
    "a dangling link": replaced(lambda path: path.symlink_to("nowhere")),
    "a link to a FIFO": replaced(
        lambda path: (os.mkfifo(path.with_name("fifo")), path.symlink_to("fifo"))
    ),
    "/dev/zero": replaced(lambda path: path.symlink_to("/dev/zero")),
    "no permission": lambda path: path.chmod(0),
}
# One process meets all damages: a signal would end it.
MEETS = (
    CHILD
    + """
sys.path.insert(0, sys.argv[2])
from test_compiled import DAMAGES
import shutil
compiled.FLAGS = ("-O0", "-shared", "-fPIC")
folder = compiled.cache_folder() / "kernels"
whole = folder.with_name("whole")
shutil.copytree(folder, whole)
for name in sys.argv[3].split(","):
    damage = DAMAGES[name]
    shutil.rmtree(folder)
    shutil.copytree(whole, folder)
    (path,) = folder.iterdir()
    damage(path)
    print(name, compiled.load_library(Path(sys.argv[1]), "step").step(), flush=True)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ["cut to 0.5", "flipped at 0.5", "a FIFO", "a filled folder", "a loop of links"],
        pytest.param([*DAMAGES], marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_no_damage_to_any_file_of_the_folder_ends_a_process_or_changes_what_it_has(
    names, source, monkeypatch
):
    monkeypatch.setattr(compiled, "FLAGS", ("-O0", "-shared", "-fPIC"))
    load_library(source, "step")
    tests = Path(__file__).resolve().parent
    process = child(MEETS, source, tests, ",".join(names))
    said = process.communicate(timeout=280)[0].splitlines()
    assert process.returncode == 0, said[-5:]
    assert said == [f"{name} 7" for name in names]


def test_a_damaged_library_is_compiled_again_and_kept(source, tmp_path, monkeypatch):
    compiler(tmp_path, monkeypatch, f'echo x >> {tmp_path}/count; exec $CC "$@"')
    load_library(source, "step")
    (file,) = kept()
    whole = file.read_bytes()
    file.write_bytes(whole[:-7])
    for _ in range(2):
        assert load_library(source, "step").step() == 7
        assert (tmp_path / "count").read_text() == "x\nx\n"
    assert kept() == [file] and len(file.read_bytes()) == len(whole)


def test_two_libraries_of_one_process_are_two(source, tmp_path):
    other = tmp_path / "other.c"
    other.write_text(SOURCE.replace("7", "8"))
    assert [load_library(file, "step").step() for file in (source, other, source)] == [7, 8, 7]


def test_another_source_flag_or_compiler_has_a_library_of_its_own(source, tmp_path, monkeypatch):
    names = {compiled.find_recipe(source, "step", flags).name for flags in (("-O1",), ("-O2",))}
    compiler(tmp_path, monkeypatch, 'exec $CC "$@"')
    names.add(compiled.find_recipe(source, "step", ("-O1",)).name)
    compiler(tmp_path, monkeypatch, ': newer; exec $CC "$@"')
    names.add(compiled.find_recipe(source, "step", ("-O1",)).name)
    source.write_text(SOURCE + "\n")
    names.add(compiled.find_recipe(source, "step", ("-O1",)).name)
    assert len(names) == 5


# ------------------------------------------------------------------------------------------ folders


def no_entry(*_):
    raise KeyError("uid not found")


def test_neither_a_home_nor_a_passwd_entry_is_needed(source, tmp_path, monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    assert load_library(source, "step").step() == 7


@pytest.mark.parametrize("home", ["", "nowhere/relative", "/proc/nothing", "/dev/null"])
def test_a_home_that_is_none_is_passed_over(home, source, monkeypatch):
    monkeypatch.setenv("HOME", home)
    assert load_library(source, "step").step() == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    ["a file", "a FIFO", "a loop", "open to all", "of somebody else", "a link to another folder"],
)
def test_a_folder_that_is_not_the_users_alone_is_not_used(what, source, tmp_path, monkeypatch):
    """Somebody else could have put a library there."""
    place = tmp_path / "home" / ".cache" / "rlkit" / "kernels"
    place.parent.mkdir(parents=True)
    if what == "a file":
        place.touch()
    elif what == "a FIFO":
        os.mkfifo(place)
    elif what == "a loop":
        place.symlink_to("kernels")
    elif what == "a link to another folder":
        (tmp_path / "theirs").mkdir()
        place.symlink_to(tmp_path / "theirs")
    else:
        place.mkdir(mode=0o700)
    if what == "open to all":
        place.chmod(0o777)
    if what == "of somebody else":
        real = os.fstat
        monkeypatch.setattr(
            os,
            "fstat",
            lambda d: _with_owner(real(d)) if os.path.samestat(real(d), place.stat()) else real(d),
        )
    assert load_library(source, "step").step() == 7
    assert not place.is_dir() or not list(place.iterdir())


def _with_owner(found: os.stat_result) -> os.stat_result:
    return os.stat_result([*found[:4], found.st_uid + 1, *found[5:10]])


def test_without_any_folder_it_is_compiled_each_time(source, tmp_path, monkeypatch):
    compiler(tmp_path, monkeypatch, f'echo x >> {tmp_path}/count; exec $CC "$@"')
    monkeypatch.setattr(compiled, "cache_folder", lambda: None)
    assert [load_library(source, "step").step() for _ in range(2)] == [7, 7]
    assert (tmp_path / "count").read_text() == "x\nx\n"


def test_a_full_disk_or_a_folder_that_takes_nothing_costs_the_kept_library_alone(
    source, monkeypatch
):
    opened = os.open

    def full(path, flags, *rest, **more):
        if str(path).endswith(".part"):
            raise OSError(28, "No space left on device")
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", full)
    assert load_library(source, "step").step() == 7


# ---------------------------------------------------------------------------------------- compilers

FAILS = {  # script → what is said
    "exit 3": "does not compile the kernel \\(status 3\\)",
    "echo 'step.c:1: error: no such thing' >&2; exit 1": "no such thing",
    "exit 0": "does not compile|cannot be loaded|No such file",
    'while [ "$1" != -o ]; do shift; done; echo garbage > "$2"': "cannot be loaded",
    'while [ "$1" != -o ]; do shift; done; : > "$2"': "cannot be loaded",
    'while [ "$1" != -o ]; do shift; done; mkdir "$2" 2>/dev/null; exit 0': "no regular file",
    'while [ "$1" != -o ]; do shift; done; rm -f "$2"; mkfifo "$2"': "no regular file",
    '$CC "$@"; while [ "$1" != -o ]; do shift; done; truncate -s 9000 "$2"': "cannot be loaded",
}


@pytest.mark.slow
@pytest.mark.parametrize("script", FAILS)
def test_a_compiler_that_fails_is_a_reason_for_auto_and_refuses_fused(
    script, source, tmp_path, monkeypatch
):
    compiler(tmp_path, monkeypatch, script)
    with pytest.raises(NoKernel, match=FAILS[script]) as raised:
        load_library(source, "step")
    assert "\n" not in str(raised.value)
    assert load_or_reason("auto", "model.kernel", lambda: load_library(source, "step")) == (
        None,
        str(raised.value),
    )
    with pytest.raises(EngineError, match=r"model\.kernel=fused: .*; use auto or eager"):
        load_or_reason("fused", "model.kernel", lambda: load_library(source, "step"))
    assert not list((tmp_path / "tmp").glob("rlkit-kernel-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        "sleep 60",
        "sleep 60 & sleep 60",
        "kill -9 $$",
        "echo 'cc: fatal error: Killed signal' >&2; exit 1",
    ],
)
def test_the_load_of_the_moment_decides_nothing(script, source, tmp_path, monkeypatch):
    compiler(tmp_path, monkeypatch, script)
    monkeypatch.setattr(compiled, "LIMIT", 0.3)
    monkeypatch.setattr(compiled, "PATIENCE", 0.1)
    began = time.monotonic()
    for kernel in ("auto", "fused"):
        with pytest.raises(
            Undecided, match=r"model\.kernel: .*(did not end|kept from).*model\.kernel=eager"
        ):
            load_or_reason(kernel, "model.kernel", lambda: load_library(source, "step"))
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_a_slow_compiler_is_waited_for_and_named(source, tmp_path, monkeypatch, capsys):
    compiler(tmp_path, monkeypatch, 'sleep 0.5; exec $CC "$@"')
    monkeypatch.setattr(compiled, "PATIENCE", 0.1)
    assert load_library(source, "step").step() == 7
    assert "waiting for " in capsys.readouterr().out


def test_a_compiler_that_knows_less_compiles_too(source, tmp_path, monkeypatch):
    compiler(
        tmp_path,
        monkeypatch,
        'case "$*" in *native*) echo "unknown argument" >&2; exit 1;; esac; exec $CC "$@"',
    )
    assert load_library(source, "step").step() == 7


def test_all_jobs_of_a_sweep_have_one_meaning_of_auto(monkeypatch):
    def fails():
        raise NoKernel("there is no C compiler")

    monkeypatch.setenv(JOBS, "eager")
    assert load_or_reason("auto", "model.kernel", lambda: 1)[0] is None
    assert load_or_reason("fused", "model.kernel", lambda: 1) == (1, "")
    monkeypatch.setenv(JOBS, "fused")
    assert load_or_reason("auto", "model.kernel", lambda: 1) == (1, "")
    with pytest.raises(
        EngineError, match=r"model\.kernel: the other jobs use compiled code.*no C compiler"
    ):
        load_or_reason("auto", "model.kernel", fails)
