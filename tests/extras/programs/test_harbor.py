"""task=harbor: tasks of Harbor's format run with their limits, and their tests stay hidden."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from extras.programs.test_gateway import ASK, said_by
from extras.programs.test_verify import OWN, STAYS
from parametrise import cases
from rlkit.commands.cli import main
from rlkit.episodes import collect
from rlkit.errors import DataError
from rlkit.extras.programs import harbor, program
from rlkit.extras.programs import hidden_tests as hidden
from rlkit.extras.programs._commands import confine_limits
from rlkit.extras.programs._processes import LANDLOCK, Limits, find_landlock_version
from rlkit.extras.programs._verifier import Verifier
from rlkit.types import Environment

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "harbor"
TASKS = {file.parent.name: file.parent for file in sorted(EXAMPLES.glob("*/*/task.toml"))}
confining = pytest.mark.skipif(
    find_landlock_version() < LANDLOCK or bool(hidden.explain_no_tree()),
    reason="needs Linux 6.12 with user namespaces",
)
# 1 for the right word in answer.txt
TESTS = """
read -r said < answer.txt
[ "$said" = "$(cat /tests/expected.txt)" ] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
"""


def write_task(place: Path, toml: str = "", tests: str = TESTS) -> Path:
    (place / "tests").mkdir(parents=True, exist_ok=True)
    (place / "task.toml").write_text(toml)
    (place / "instruction.md").write_text("Write the word into answer.txt.\n")
    (place / "tests" / "test.sh").write_text(tests)
    (place / "tests" / "expected.txt").write_text("swordfish\n")
    return place


def read(path: Path):
    return harbor(path=str(path), split="train", seed=0, validation=0.0, held_out=0.0)


def played(tiny, tmp_path, code: str, toml: str = "", tests: str = TESTS, **settings):
    """The rollout of a program that runs this code after one reply, on a task of its own."""
    task = write_task(tmp_path / "tasks" / "word", toml, tests)
    agent = tmp_path / "agent" / "agent.py"
    agent.parent.mkdir()
    agent.write_text(ASK + code)
    environment = program(command=["python", str(agent), str(task)], confined=True, **settings)
    (rollout,) = collect(tiny, read(task), engine=said_by("a"), environment=environment)
    return rollout


def reward_of(rollout):
    return rollout.steps[-1].reward


def reward_by(task: Path, left_in: Path) -> float | str:
    """The reward of a folder by the tests of a task."""
    (row,) = read(task)
    verifier = Verifier([], confine_limits(Limits(1 << 20), ["bash"]), 60.0, 0.0, 1.0, {})
    return asyncio.run(hidden.run_tests(verifier, hidden.find_hidden_tests(row), str(left_in)))


# --------------------------------------------------------------------------------------- the format


def test_a_task_is_read_with_its_files_and_limits(tmp_path):
    toml = "[agent]\ntimeout_sec = 9\n[verifier]\ntimeout_sec = 5.5\n[environment]\nmemory_mb = 700"
    folder = write_task(tmp_path / "set" / "one", toml)
    (folder / "environment").mkdir()
    (folder / "instruction.md").write_text("<!-- a canary: 1 -->\n\n# A heading\n\nDo it.\n")
    write_task(tmp_path / "set" / "two", 'version = "1.0"\n[environment]\nmemory = "2G"')
    one, two = sorted(read(tmp_path / "set"))
    assert one.messages == ({"role": "user", "content": "# A heading\n\nDo it."},)
    assert (one.id, one.reward, one.environment) == ("set/train/one", "environment", "program")
    assert one.metadata == {
        "files": str(folder / "environment"),
        "harbor": {
            "folder": str(folder),
            "time_limit": 9.0,
            "tests_time_limit": 5.5,
            "memory_mb": 700,
        },
    }
    assert two.metadata["harbor"]["memory_mb"] == 2048
    assert two.metadata["harbor"]["time_limit"] is None and "files" not in two.metadata


HARMLESS = """
schema_version = "1.3"
artifacts = ["/app/out.txt"]
[task]
name = "terminal-bench/x"
[[task.authors]]
name = "A"
[metadata]
difficulty = "easy"
[verifier]
environment_mode = "shared"
[environment]
build_timeout_sec = 600.0
os = "Linux"
cpus = 1
storage_mb = 10240
gpus = 0
allow_internet = true
network_mode = "public"
mcp_servers = []
unheard_of = 1
[verifier.env]
[environment.env]
[solution.env]
KEY = "1"
"""


def test_keys_that_ask_for_nothing_are_accepted(tmp_path):
    (task,) = read(write_task(tmp_path / "one", HARMLESS))
    assert task.metadata["harbor"]["tests_time_limit"] == 600.0


@pytest.mark.parametrize(
    "toml, said",
    [
        ('[environment]\ndocker_image = "a/b:1"', "container image (a/b:1)"),
        ("[environment]\ngpus = 1", "environment.gpus=1"),
        ('[environment]\nos = "windows"', "environment.os='windows'"),
        ('[environment]\nworkdir = "/app"', "environment.workdir='/app'"),
        ('[environment.env]\nKEY = "1"', "environment.env="),
        ('[environment.healthcheck]\ncommand = "true"', "environment.healthcheck="),
        ('[[environment.mcp_servers]]\nname = "a"', "environment.mcp_servers="),
        ('[environment]\nallowed_hosts = ["a.b"]', "environment.allowed_hosts="),
        ('[verifier]\nenvironment_mode = "separate"', "environment_mode='separate'"),
        ("[verifier.environment]\ncpus = 1", "verifier.environment="),
        ('[[verifier.collect]]\ncommand = "true"', "verifier.collect="),
        ('[agent]\nuser = "agent"', "agent.user='agent'"),
        ('[[steps]]\nname = "one"', "steps="),
        ("[agent]\ntimeout_sec = 0", "agent.timeout_sec is 0"),
        ('[verifier]\ntimeout_sec = "1 h"', "verifier.timeout_sec is '1 h'"),
        ('[environment]\nmemory = "much"', "environment.memory is 'much'"),
        ('[environment]\nmemory = "infG"', "environment.memory is 'infG'"),
        ("[agent", "cannot be read"),
    ],
)
def test_a_task_that_cannot_run_here_is_refused_by_name(toml, said, tmp_path):
    write_task(tmp_path / "set" / "fine")
    write_task(tmp_path / "set" / "odd", toml)
    with pytest.raises(DataError) as refused:
        read(tmp_path / "set")
    assert "odd" in str(refused.value) and said in str(refused.value)


@pytest.mark.parametrize("name", ["Dockerfile", "docker-compose.yaml"])
def test_a_task_with_an_image_to_build_is_refused_with_its_name(name, tmp_path):
    for task in ("odd", "other"):
        environment = write_task(tmp_path / "set" / task) / "environment"
        environment.mkdir()
        (environment / name).write_text("FROM python:3.12 AS first\nFROM ubuntu:24.04\nRUN true\n")
    with pytest.raises(DataError) as refused:
        read(tmp_path / "set")
    for words in ("odd: it needs a container image", name, "FROM ubuntu:24.04", "1 more task"):
        assert words in str(refused.value)


@pytest.mark.parametrize("name", ["instruction.md", "tests/test.sh"])
def test_a_task_without_instruction_or_tests_is_refused(name, tmp_path):
    (write_task(tmp_path / "odd") / name).unlink()
    with pytest.raises(DataError, match=f"odd: there is no {name}"):
        read(tmp_path / "odd")
    with pytest.raises(DataError, match="holds no task"):
        read(tmp_path / "odd" / "tests")
    (write_task(tmp_path / "odd") / "instruction.md").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"instruction\.md cannot be read"):
        read(tmp_path / "odd")


# --------------------------------------------------------------------------------- the hidden tests


@pytest.mark.slow
@confining
@pytest.mark.parametrize("name", cases(TASKS, ["rename-key", "pens"]))
def test_the_solution_of_each_example_earns_1_and_nothing_earns_less(name, tmp_path):
    assert len(TASKS) == 10
    task = TASKS[name]
    for work in ("solved", "idle"):
        where = tmp_path / work
        where.mkdir()
        if (task / "environment").is_dir():
            shutil.copytree(task / "environment", where, dirs_exist_ok=True)
    subprocess.run(["bash", task / "solution/solve.sh"], cwd=tmp_path / "solved", check=True)
    assert reward_by(task, tmp_path / "solved") == 1.0
    idle = reward_by(task, tmp_path / "idle")
    assert isinstance(idle, float) and idle < 0.5


@pytest.mark.slow
@confining
def test_the_files_travel_and_the_tests_give_the_reward(tiny, tmp_path):
    code = "word = open('given.txt').read()\nopen('answer.txt', 'w').write(word)"
    task = tmp_path / "tasks" / "word"
    (task / "environment").mkdir(parents=True)
    (task / "environment" / "given.txt").write_text("swordfish\n")
    rollout = played(tiny, tmp_path, code)
    assert reward_of(rollout) == 1.0 and not rollout.error


TELLS = "open('answer.txt', 'w').write(found)\n"
ATTEMPTS = {
    "read the tests": "found = open(sys.argv[1] + '/tests/expected.txt').read()\n" + TELLS,
    "list the tests": "found = str(os.listdir(sys.argv[1] + '/tests'))\n" + TELLS,
    "link the expected file": "os.symlink('/tests/expected.txt', 'answer.txt')",
    "a second name for it": "os.link(sys.argv[1] + '/tests/expected.txt', 'answer.txt')",
    "write the tests": "open(sys.argv[1] + '/tests/expected.txt', 'w').write('x')",
    "write the reward": """
for place in ('/logs/verifier', 'logs/verifier', sys.argv[1] + '/logs/verifier'):
    os.makedirs(place, exist_ok=True)
    open(place + '/reward.txt', 'w').write('1')
""",
    "a loop that writes the answer": (
        "import glob\ndef attempt():\n"
        "    for place in glob.glob('/proc/[0-9]*/root/tests/expected.txt'):\n"
        "        open('answer.txt', 'w').write(open(place).read())\n" + STAYS
    ),
    "another shell": """
for name in ('bash', 'cat', 'read', '.bashrc', '.bash_profile', '.profile'):
    open(name, 'w').write('#!/bin/sh\\necho 1 > /logs/verifier/reward.txt; kill -9 $PPID')
    os.chmod(name, 0o755)
os.environ['BASH_ENV'] = os.path.abspath('.bashrc')
""",
}


@pytest.mark.slow
@confining
@pytest.mark.parametrize("attempt", cases(ATTEMPTS, ["read the tests", "another shell"]))
def test_no_program_reads_the_tests_or_raises_its_reward(attempt, tiny, tmp_path):
    guarded = f"try:\n    exec({ATTEMPTS[attempt]!r})\nexcept OSError:\n    pass\n"
    rollout = played(tiny, tmp_path, OWN + guarded)
    assert rollout.steps and reward_of(rollout) == 0.0, rollout.error
    assert (tmp_path / "tasks/word/tests/expected.txt").read_text() == "swordfish\n"


# 1 only if Python imported what the program left
IMPORTS = """
for way in "-c 'import json, helper'" "-m json.tool /tests/data.json" "/tests/check.py"; do
    eval python3 $way || echo "failed $way" >&2
done > printed.txt
grep -q the.policy printed.txt && reward=1 || reward=0
grep -q the.helper printed.txt || reward=1
echo $reward > /logs/verifier/reward.txt
"""


@pytest.mark.slow
@confining
def test_the_tests_import_their_own_modules_and_none_of_the_program(tiny, tmp_path):
    code = """
for name in ("json", "helper", "sitecustomize", "usercustomize", "re"):
    open(name + ".py", "w").write("print('the policy')")
"""
    task = tmp_path / "tasks" / "word" / "tests"
    task.mkdir(parents=True)
    (task / "helper.py").write_text("print('the helper')")
    (task / "check.py").write_text("import json, helper")
    (task / "data.json").write_text("{}")
    rollout = played(tiny, tmp_path, code, tests=IMPORTS)
    assert reward_of(rollout) == 0.0, rollout.error


@pytest.mark.slow
@confining
def test_the_tests_start_from_scratch(tiny, tmp_path, monkeypatch):
    """No variable of the run or of rlkit, empty folders for their logs, no network."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-of-the-user")
    tests = """
env | grep -E 'RLKIT|OPENAI|^BASH_ENV' && exit 0
[ -z "$(cat)" ] && [ "$(ls -A /logs/verifier)$(ls -A ~)" = "" ] || exit 0
touch ~/written here || exit 0
touch /tests/written && exit 0
python3 -c 'import socket; socket.create_connection(("127.0.0.1", 22))' 2>&1 | grep -q OSError \
    || python3 -c 'import socket; socket.create_connection(("127.0.0.1", 22))' 2>&1 \
    | grep -qE 'refused|unreachable|not permitted|denied' || exit 0
echo '{"reward": 0.25, "other": 3, "text": "x"}' > /logs/verifier/reward.json
echo 1 > /logs/verifier/reward.txt
"""
    rollout = played(tiny, tmp_path, "open('answer.txt', 'w')", tests=tests)
    assert reward_of(rollout) == 0.25, rollout.error


FAILING = {
    "no file": ("exit 0", "left no reward"),
    "a text": ("echo much > /logs/verifier/reward.txt", "left no reward"),
    "a broken report": (
        "echo '{' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt",
        "left no reward",
    ),
    "a report without a reward": (
        "echo '{\"reward\": true}' > /logs/verifier/reward.json",
        "left no reward",
    ),
    "a link": ("echo 1 > /logs/one; ln -s ../one /logs/verifier/reward.txt", "left no reward"),
    "a pipe": ("mkfifo /logs/verifier/reward.txt", "left no reward"),
    "another folder": (
        "echo 1 > /logs/reward.txt; rm -r /logs/verifier; ln -s . /logs/verifier",
        "left no reward",
    ),
    "2": ("echo 2 > /logs/verifier/reward.txt", "outside environment.reward_range"),
    "nan": ("echo nan > /logs/verifier/reward.txt", "outside environment.reward_range"),
    "no end": ("echo 1 > /logs/verifier/reward.txt; sleep 600", "more than 2.0 s"),
}


@confining
@pytest.mark.parametrize("kind", cases(FAILING, ["no file", "2"]))
def test_tests_without_a_number_fail_the_episode_and_say_why(kind, tmp_path):
    tests, words = FAILING[kind]
    (tmp_path / "left").mkdir()
    limit = 2 if kind == "no end" else 60
    task = write_task(tmp_path / "task", f"[verifier]\ntimeout_sec = {limit}", tests)
    said = reward_by(task, tmp_path / "left")
    assert isinstance(said, str) and words in said


@pytest.mark.slow
@confining
def test_the_limits_of_a_task_hold_beside_those_of_the_run(tiny, tmp_path):
    code = """
import resource
open("answer.txt", "w").write("swordfish\\n")
assert resource.getrlimit(resource.RLIMIT_AS)[0] == 900 << 20
import time
time.sleep(600)
"""
    toml = "[agent]\ntimeout_sec = 4\n[environment]\nmemory_mb = 900"
    tests = '[ "$(ulimit -v)" = 921600 ] || exit 0\n' + TESTS
    rollout = played(tiny, tmp_path, code, toml, tests, memory_mb=1000)
    assert rollout.truncation == "deadline" and reward_of(rollout) == 1.0, rollout.error
    assert "task.toml: agent.timeout_sec=4.0 s" in rollout.error


# ------------------------------------------------------------------------------- the environment


def problem_of(environment: Environment, task: Path) -> str:
    (row,) = read(task)
    assert environment.check is not None
    return environment.check(row, frozenset())


@confining
@pytest.mark.parametrize(
    "settings, said",
    [
        ({"confined": False}, "environment.confined=true"),
        ({"command": (), "function": print, "confined": False}, "environment.confined=true"),
        ({"verify": ["true"]}, "leave out environment.verify"),
        ({"score": "exit"}, "environment.score"),
        ({"readable": ["tasks"]}, "could read its hidden tests in"),
        ({"command": ["python", "tasks/word/agent.py"]}, "could read its hidden tests in"),
        ({}, ""),
    ],
)
def test_tests_that_would_not_stay_hidden_are_refused(settings, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = write_task(tmp_path / "tasks" / "word")
    (task / "agent.py").write_text("")
    environment = program(**{"command": ["true"], "confined": True, **settings})
    problem = problem_of(environment, task)
    assert said in problem and bool(problem) == bool(said)


@confining
def test_a_machine_without_namespaces_refuses_the_task(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(hidden, "explain_no_tree", lambda: "unshare failed")
    with pytest.raises(DataError, match=r"/tests and /logs .*unshare failed"):
        played(tiny, tmp_path, "")


@confining
def test_the_guard_says_why_it_gives_no_file_tree(tmp_path, monkeypatch):
    python = tmp_path / "python"
    inner = f'echo 0 > /proc/sys/user/max_mnt_namespaces; exec {sys.executable} "$@"'
    python.write_text(f"#!/bin/bash\nexec unshare -Ur bash -c '{inner}' - \"$@\"\n")
    python.chmod(0o755)
    monkeypatch.setattr(hidden, "sys", SimpleNamespace(executable=str(python)))
    assert "unshare failed" in hidden.explain_no_tree.__wrapped__()


@confining
@pytest.mark.slow
def test_five_tasks_train_end_to_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    words = [
        "task=harbor",
        f"task.path={EXAMPLES / 'sums'}",
        "task.validation=0",
        "task.held_out=0",
        "environment=program",
        f"environment.command=[python,{EXAMPLES / 'agent' / 'agent.py'}]",
        "trainer.steps=1",
        "batch.prompts=5",
        "batch.group_size=3",
        "algorithm.minibatches=1",
        "evaluation.n=0",
        "logger=none",
        f"hydra.run.dir={run}",
    ]
    assert main(["train", *words]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    means = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert len(means) == 1 and 0 < means[0] <= 1
