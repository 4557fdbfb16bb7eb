"""A program's command: what it lacks is found before a model is loaded, and what it reads is what
it needs to start."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from extras.programs.test_gateway import ASK, ASKED, said_by
from parametrise import each
from rlkit.config.problems.rows import check_truths
from rlkit.episodes import collect
from rlkit.errors import ConfigError, DataError
from rlkit.extras.programs import _processes, program
from rlkit.extras.programs._commands import find_script, list_code_folders
from rlkit.extras.programs._processes import LANDLOCK, find_landlock_version
from rlkit.rewards import Reward
from rlkit.types import Task

confines = pytest.mark.skipif(find_landlock_version() < LANDLOCK, reason="needs Linux 6.12")
TASK = Task("t", ASKED)


def played(tiny, command, **settings):
    environment = program(command=[str(word) for word in command], **settings)
    (rollout,) = collect(tiny, [TASK], engine=said_by("a"), environment=environment)
    return rollout


# -------------------------------------------------------------------------------- what is missing


@each("key", ["command", "verify"])
@pytest.mark.parametrize(
    "command, said",
    [
        (["no-such-program"], "there is no program 'no-such-program'"),
        (["./no_such"], "there is no './no_such'"),
        (["/no/such"], "there is no /no/such"),
        (["python", "no_such.py"], "there is no 'no_such.py'"),
        (["env", "A=1", "python", "-u", "no_such.py"], "there is no 'no_such.py'"),
        (["bash", "/no/such.sh"], "there is no /no/such.sh"),
        (["plain.py"], "cannot be executed; say chmod"),
        (["./plain.py"], "cannot be executed; say chmod"),
        (["started_by_nobody"], "names '/no/such/python', which is not there"),
        (["started_by_env"], "names 'no-such-python', which is not there"),
    ],
)
def test_what_cannot_be_started_is_refused(key, command, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.py").write_text("")
    for name, line in {"nobody": "/no/such/python", "env": "/usr/bin/env no-such-python"}.items():
        (tmp_path / f"started_by_{name}").write_text(f"#!{line}\n")
        (tmp_path / f"started_by_{name}").chmod(0o755)
    with pytest.raises((ConfigError, DataError)) as refused:
        environment = program(**{"command": ["true"], key: command})
        check_truths([TASK], Reward("own", {}), environment)
    assert f"environment.{key}: " in str(refused.value) and said in str(refused.value)


@each("as_folder", [False, True])
def test_a_task_may_bring_the_script(as_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir(exist_ok=True)
    (tmp_path / "files" / "agent.py").write_text("")
    environment = program(command=["python", "./agent.py"])
    files = str(tmp_path / "files") if as_folder else {"agent.py": ""}
    task = TASK._replace(metadata={"files": files})
    check_truths([task], Reward("own", {}), environment)
    with pytest.raises(DataError, match=r"row t: environment\.command: there is no './agent.py'"):
        check_truths([task, TASK], Reward("own", {}), environment)


@pytest.mark.parametrize(
    "command, script",
    [
        (["python", "a.py", "b.py"], "a.py"),
        (["python", "-W", "ignore", "a.py"], "a.py"),
        (["timeout", "60", "python3.12", "-u", "a.py"], "a.py"),
        (["bash", "-x", "a.sh"], "a.sh"),
        (["python", sys.executable, "b.py"], sys.executable),
        (["python", "-m", "a.py"], ""),
        (["python", "-c", "a.py"], ""),
        (["bash", "-lc", "a.sh"], ""),
        (["node", "--require", "a/b.js", "c"], ""),
        (["my_agent", "--out", "a.py"], ""),
        (["python"], ""),
    ],
)
def test_a_script_is_told_from_other_words(command, script):
    assert find_script(command) == script


# ------------------------------------------------------------------------------------ what is read


def test_the_folder_of_code_is_open_without_hidden_files_records_and_the_verifier(tmp_path):
    for name in ("agent.py", "data.txt", ".env", "outputs/run.json", "tests/hidden.py", "lib/a.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "link").symlink_to("/etc")
    code = str(tmp_path / "agent.py")
    opened = list_code_folders(code, [str(tmp_path / "tests" / "hidden.py")])
    names = {os.path.relpath(path, tmp_path) for path in opened}
    assert names == {"agent.py", "data.txt", "lib"}


@each("above", ["", ".."])
def test_the_home_folder_is_never_open(above, tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / "code").mkdir(parents=True, exist_ok=True)
    (home / "code" / "agent.py").write_text("")
    monkeypatch.setenv("HOME", str(home))
    assert list_code_folders(str((home / above / "agent.py").resolve()), []) == []
    assert list_code_folders(str(home / "code" / "agent.py"), []) != []


@pytest.mark.slow
@confines
def test_a_program_of_a_virtual_environment_starts_confined(tiny, tmp_path):
    """Found by PATH, from its first line to the packages of its Python."""
    venv = tmp_path / "venv"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = venv / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    (packages / "mine.py").write_text("")
    (venv / "bin").mkdir()
    python = os.path.realpath(sys.executable)
    (venv / "bin" / "python").symlink_to(python)
    (venv / "pyvenv.cfg").write_text(f"home = {os.path.dirname(python)}\n")
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "my-agent"
    tool.write_text(f"#!{venv}/bin/python\nimport mine\n{ASK}")
    tool.chmod(0o755)
    rollout = played(tiny, ["my-agent"], variables={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})
    assert len(rollout.steps) == 1 and not rollout.error


@pytest.mark.slow
@confines
@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_a_program_of_npm_starts_confined(tiny, tmp_path):
    modules = tmp_path / "node_modules"
    for name in ("agent", "dependency", ".bin"):
        (modules / name).mkdir(parents=True)
    (modules / "dependency" / "index.js").write_text("module.exports = '/chat/completions'")
    (modules / "agent" / "cli.js").write_text(
        "#!/usr/bin/env node\n"
        "const path = require('dependency'), e = process.env\n"
        "const headers = {Authorization: `Bearer ${e.OPENAI_API_KEY}`}\n"
        "const body = JSON.stringify({messages: JSON.parse(e.RLKIT_TASK).messages})\n"
        "fetch(e.OPENAI_BASE_URL + path, {method: 'POST', headers, body}).then(r => r.json())\n"
    )
    (modules / "agent" / "cli.js").chmod(0o755)
    (modules / ".bin" / "agent").symlink_to("../agent/cli.js")
    rollout = played(tiny, [modules / ".bin" / "agent"])
    assert len(rollout.steps) == 1 and not rollout.error


# ----------------------------------------------------------------------------------- what is said


@pytest.mark.slow
@confines
@pytest.mark.parametrize(
    "code", ["open({outside!r})", "sys.path.insert(0, {folder!r}); import own"]
)
def test_a_program_that_confinement_stops_is_told_the_keys(code, tiny, tmp_path):
    outside = tmp_path / "outside"
    (tmp_path / "code").mkdir()
    outside.mkdir()
    (outside / "own.py").write_text("")
    agent = tmp_path / "code" / "agent.py"
    agent.write_text(ASK + code.format(outside=str(outside / "own.py"), folder=str(outside)))
    stopped = played(tiny, ["python", agent])
    assert "environment.readable=[PATH]" in stopped.error
    assert "environment.confined=false" in stopped.error
    assert not played(tiny, ["python", agent], readable=[str(outside)]).error


def test_a_machine_that_cannot_confine_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(_processes, "find_landlock_version", lambda: 0)
    _processes.say_unconfined.cache_clear()
    for confined in (False, "auto", "auto"):
        program(command=["true"], confined=confined)
    (line,) = capsys.readouterr().err.splitlines()
    assert "programs are not confined and can read one another's keys" in line
    with pytest.raises(ConfigError, match=r"environment\.confined needs Landlock"):
        program(command=["true"], confined=True)


@pytest.mark.slow
@confines
def test_a_program_is_confined_by_default(tiny, tmp_path):
    (tmp_path / "code").mkdir()
    agent = tmp_path / "code" / "agent.py"
    written = tmp_path / "written"
    agent.write_text(f"{ASK}open({str(written)!r}, 'w')")
    assert played(tiny, ["python", agent]).error and not written.exists()
    assert not played(tiny, ["python", agent], confined=False).error and written.exists()


def test_paths_of_a_command_are_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text("")
    play = program(command=["python", "agent.py"]).play
    assert play.args[0].command == [sys.executable, str(tmp_path / "agent.py")]
