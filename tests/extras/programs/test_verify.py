"""environment.verify: a command of the user's gives the reward once every process of the episode is
dead, and nothing that a program does raises it."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from extras.programs.test_gateway import ASK, ASKED, said_by
from parametrise import cases
from rlkit.config.compose import compose
from rlkit.config.schema import build
from rlkit.episodes import collect
from rlkit.errors import ConfigError
from rlkit.extras.programs import program
from rlkit.extras.programs._processes import LANDLOCK, find_landlock_version
from rlkit.extras.programs._verifier import keep_plain_files, read_file_states, read_number
from rlkit.types import Task

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs a subreaper")
TASK = Task("t", ASKED, answer="the right answer")
# gives 1 where the task's answer stands in the program's answer.txt
JUDGE = """
import json, os, sys
task = json.load(sys.stdin)
try:
    with open(os.environ["RLKIT_FOLDER"] + "/answer.txt") as file:
        said = file.read()
except OSError:
    said = ""
os.write(int(os.environ["RLKIT_REWARD_FD"]), str(float(task["answer"] in said)).encode())
"""
# gives 1 where a hidden test passes, which never does
TESTS = """
import os, subprocess, sys
with open("test_hidden.py", "w") as file:
    file.write("def test_it():\\n    assert False\\n")
done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"])
os.write(int(os.environ["RLKIT_REWARD_FD"]), b"0" if done.returncode else b"1")
"""


def judged(tiny, tmp_path, code: str, *, judge: str = JUDGE, **settings):
    """The rollout of a program that runs this code after one reply, with a verifier."""
    (tmp_path / "agent.py").write_text(ASK + code)
    (tmp_path / "verify.py").write_text(judge)
    files = {name: str(tmp_path / name) for name in ("agent.py", "verify.py")}
    environment = program(
        command=["python", files["agent.py"], files["verify.py"]],
        verify=["python", files["verify.py"]],
        **settings,
    )
    (rollout,) = collect(tiny, [TASK], engine=said_by("a"), environment=environment)
    return rollout


def reward_of(rollout):
    return rollout.steps[-1].reward


WRITES = "import os; os.write(3, b'1'); os._exit(0)"  # what a module of the policy would do
# An attempt changes nothing but its own folder and pipes, also where the code under test is wrong.
OWN = """
import stat
def write_to(place, data):
    held = os.open(place, os.O_PATH)
    try:
        kind = os.fstat(held).st_mode
        if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind):
            os.write(os.open(f'/proc/self/fd/{held}', os.O_WRONLY), data)
    finally:
        os.close(held)
def is_own(place):
    return os.path.realpath(place).startswith((os.getcwd(), os.path.dirname(sys.argv[1])))
"""
# It ends by itself, so that it is not left behind where the code under test fails to end it.
STAYS = """
import time
end = time.monotonic() + 20
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    while time.monotonic() < end:
        try:
            attempt()
        except (OSError, ValueError):
            pass
os.wait()
"""
# Only at its own verifier, which is told this folder; other processes of the machine are no target.
LOOKS = """
import glob
own = 'RLKIT_FOLDER=' + os.getcwd()
def attempt():
    for place in glob.glob('/proc/[0-9]*'):
        try:
            words = open(place + '/environ').read()
        except OSError:
            continue
        if own in words.split(chr(0)):
"""
ATTEMPTS = {
    "a loop that writes a reward": (
        "def attempt():\n    open('reward.txt', 'w').write('1')\n" + STAYS
    ),
    "conftest.py": (
        "open('conftest.py', 'w').write('def pytest_sessionfinish(session):\\n"
        "    import os; os._exit(0)')"
    ),
    "sitecustomize.py": f"""
import site
for place in filter(is_own, ('.', site.getusersitepackages())):
    os.makedirs(place, exist_ok=True)
    for name in ('sitecustomize.py', 'usercustomize.py'):
        open(os.path.join(place, name), 'w').write({WRITES!r})
""",
    "json.py": f"open('json.py', 'w').write({WRITES!r})",
    "every descriptor": """
def attempt():
    for descriptor in range(3, 256):
        try:
            write_to(f'/proc/self/fd/{descriptor}', b'1')
        except OSError:
            pass
attempt()
"""
    + STAYS,
    "a link to the verifier's input": "os.symlink('/dev/stdin', 'answer.txt')",
    "a link to the verifier's variables": "os.symlink('/proc/self/environ', 'answer.txt')",
    "another verifier": f"""
try:
    open(sys.argv[1], 'w').write({WRITES!r})
except OSError:
    pass
""",
    "a verifier in its place": f"""
try:
    open(sys.argv[1] + '.new', 'w').write({WRITES!r})
    os.replace(sys.argv[1] + '.new', sys.argv[1])
except OSError:
    pass
""",
    "a module beside the verifier": f"""
try:
    open(os.path.join(os.path.dirname(sys.argv[1]), 'json.py'), 'w').write({WRITES!r})
except OSError:
    pass
""",
    "variables": f"""
os.makedirs(os.environ['PYTHONPATH'], exist_ok=True)
for place in filter(is_own, (os.environ['PYTHONPATH'], os.path.expanduser('~'))):
    for name in ('sitecustomize.py', '.pythonrc', '.profile', '.bashrc'):
        open(os.path.join(place, name), 'w').write({WRITES!r})
os.environ['LD_PRELOAD'] = os.environ['PYTHONSTARTUP'] = os.path.abspath('sitecustomize.py')
""",
    "a daemon that opens the verifier's descriptor": (
        LOOKS
        # never a file: while a process starts, its descriptor 3 may be a library of Python's
        + "            write_to(place + '/fd/3', b'1')\n"
        + STAYS
    ),
    "a race after the end": (LOOKS + "            open('answer.txt', 'w').write(words)\n" + STAYS),
    "the guard's end": """
if os.fork() == 0:
    import time
    os.setsid()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        open('answer.txt', 'w').write('the right answer')
while not os.path.exists('answer.txt'):
    pass
write_to(f'/proc/{os.getppid()}/fd/2', b'exit 0\\n')
os.kill(os.getppid(), 9)
""",
    "a pipe": "os.mkfifo('answer.txt')",
}
CONFINED = pytest.param(
    True,
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(find_landlock_version() < LANDLOCK, reason="needs Linux 6.12"),
    ],
)


@pytest.mark.slow
@pytest.mark.parametrize("confined", [False, CONFINED])
@pytest.mark.parametrize("attempt", cases(ATTEMPTS, ["conftest.py", "a pipe"]))
def test_no_attempt_of_a_program_raises_its_reward(attempt, confined, tiny, tmp_path):
    rollout = judged(
        tiny,
        tmp_path,
        OWN + ATTEMPTS[attempt],
        judge=TESTS if attempt == "conftest.py" else JUDGE,
        # a folder of the user's that the policy can write
        variables={"PYTHONPATH": "." if confined else str(tmp_path / "lib")}
        if attempt == "variables"
        else {},
        confined=confined,
        verify_time_limit=30.0,
    )
    assert rollout.steps and reward_of(rollout) in (0.0, None), rollout.error
    assert "verify_time_limit" not in rollout.error


@pytest.mark.slow
@pytest.mark.parametrize("confined", [False, CONFINED])
def test_a_verifier_gives_the_reward(confined, tiny, tmp_path):
    code = "open('answer.txt', 'w').write('the right answer')"
    rollout = judged(tiny, tmp_path, code, confined=confined)
    assert reward_of(rollout) == 1.0 and not rollout.error


@pytest.mark.slow
def test_a_program_whose_time_is_up_is_verified(tiny, tmp_path):
    code = "import time\nopen('answer.txt', 'w').write('the right answer')\ntime.sleep(600)"
    rollout = judged(tiny, tmp_path, code, time_limit=5.0)
    assert rollout.truncation == "deadline" and reward_of(rollout) == 1.0


WRITE = "import os, time; os.write(int(os.environ['RLKIT_REWARD_FD']), b'{}')"
FAILING = {
    "nothing": ("pass", "wrote no number"),
    "a text": (WRITE.format("much"), "wrote no number"),
    "two numbers": (WRITE.format("1 1"), "wrote no number"),
    "nan": (WRITE.format("nan"), "wrote no number"),
    "100": (WRITE.format("100"), "outside environment.reward_range=[0.0, 1.0]"),
    "inf": (WRITE.format("inf"), "outside environment.reward_range"),
    "65 bytes": (WRITE.format("0" * 65), "wrote no number"),
    "a number and an error": (WRITE.format("1") + "; 1 / 0", "ZeroDivisionError"),
    "a number and no end": (WRITE.format("1") + "; time.sleep(600)", "verify_time_limit=2.0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", cases(FAILING, ["100", "a number and an error"]))
def test_a_verifier_that_fails_gives_no_reward_and_says_why(kind, tiny, tmp_path):
    judge, words = FAILING[kind]
    limit = 2.0 if "time_limit" in words else 60.0  # only one kind waits for it
    rollout = judged(tiny, tmp_path, "", judge=judge, verify_time_limit=limit)
    assert reward_of(rollout) is None and rollout.truncation == "error"
    assert rollout.error.startswith("environment.verify: ") and words in rollout.error


@pytest.mark.slow
def test_a_verifier_is_told_the_whole_task_and_nothing_of_the_run(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-of-the-user")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", "") + ":" + str(tmp_path))
    judge = """
import json, os, sys
known = {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "SYSTEMROOT", "VIRTUAL_ENV"}
known |= {"HOME", "TMPDIR", "PYTHONUNBUFFERED", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE"}
known |= {"RLKIT_TASK", "RLKIT_FOLDER", "RLKIT_REWARD_FD"}
assert set(os.environ) <= known, set(os.environ) - known
task = json.load(sys.stdin)
assert task == json.loads(os.environ["RLKIT_TASK"])
assert (task["id"], task["answer"], task["metadata"]) == ("t", "the right answer", {})
assert os.listdir() == [] and os.getcwd() != os.environ["RLKIT_FOLDER"]
os.write(int(os.environ["RLKIT_REWARD_FD"]), b"0.5")
"""
    rollout = judged(tiny, tmp_path, "", judge=judge, variables={"EXTRA": "1"})
    assert reward_of(rollout) == 0.5, rollout.error


def test_only_plain_files_and_folders_are_left(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "kept").write_text("1")
    (tmp_path / "run.sh").write_text("true")
    (tmp_path / "run.sh").chmod(0o755)
    for place in (tmp_path, tmp_path / "in"):
        os.mkfifo(place / "pipe")
        os.symlink("/etc", place / "folder of the user")
        os.symlink("kept", place / "link")
    os.link(tmp_path / "in" / "link", tmp_path / "second name", follow_symlinks=False)
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(os.path.relpath(tmp_path / "socket"))
    (tmp_path / "closed").mkdir(mode=0)
    keep_plain_files(str(tmp_path))
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert left == {"in", "in/kept", "run.sh", "closed"}
    assert not (tmp_path / "run.sh").stat().st_mode & 0o333


def test_a_folder_that_is_a_link_now_is_refused(tmp_path):
    (tmp_path / "users").mkdir()
    (tmp_path / "users" / "file").write_text("1")
    os.symlink(tmp_path / "users", tmp_path / "own")
    with pytest.raises(OSError, match="replaced its folder"):
        keep_plain_files(str(tmp_path / "own"))


def test_a_file_in_a_folder_that_the_command_names_counts(tmp_path):
    (tmp_path / "tests").mkdir()
    hidden = tmp_path / "tests" / "hidden.txt"
    hidden.write_text("1")
    command = [sys.executable, str(tmp_path / "tests")]
    before = read_file_states(command)
    assert read_file_states(command) == before
    times = hidden.stat().st_mtime_ns, hidden.stat().st_mtime_ns
    hidden.write_text("2")
    os.utime(hidden, ns=times)  # a time of change cannot be set
    assert read_file_states(command) != before
    assert read_file_states(["sh", "-c", "/bin/true $RLKIT_FOLDER"]) == {}


def test_the_range_holds_its_ends():
    assert read_number(b" -1\n", -1.0, 1.0) == -1.0 and read_number(b"1", -1.0, 1.0) == 1.0
    assert isinstance(read_number(b"1.0000001", -1.0, 1.0), str)


@pytest.mark.parametrize(
    "words, said",
    [
        ({"score": "file"}, "environment.verify="),
        ({"verify": ["true"], "score": "exit"}, "both give the reward"),
        ({"verify": ["true"], "command": (), "function": print}, "which a function has not"),
        ({"verify": ["true"], "reward_range": [1, 0]}, "reward_range"),
        ({"verify": ["true"], "reward_range": [0, float("inf")]}, "reward_range"),
        ({"verify": ["true"], "verify_time_limit": 0}, "verify_time_limit"),
    ],
)
def test_what_cannot_be_verified_is_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        program(**{"command": ["true"], **words})


@pytest.mark.slow
def test_a_config_with_the_score_of_a_file_is_refused():
    words = ["environment=program", "environment.command=[python]", "environment.score=file"]
    with pytest.raises(ConfigError, match=r"environment\.verify="):
        build(compose(words).config)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["rollout", "evaluate", "train"])
def test_every_command_that_plays_episodes_takes_a_verifier(command):
    x = build(
        compose(
            ["environment=program", "environment.command=[python]", "environment.verify=[python]"],
            entry=command,
        ).config
    )
    # the same `Environment.play` in each
    assert x.environment.play.args[1].command == [sys.executable]
