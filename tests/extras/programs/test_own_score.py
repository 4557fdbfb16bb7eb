"""environment.score=file: what a program leaves as its reward is read without a hang, without a
look elsewhere, and only where the user said so on this command line."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from extras.programs.test_gateway import ASK, ASKED, said_by
from rlkit.commands.cli import main
from rlkit.config.experiment import experiment
from rlkit.environments import single_turn
from rlkit.episodes import collect
from rlkit.errors import ConfigError
from rlkit.extras.programs import program
from rlkit.extras.programs._program import read_score
from rlkit.system.plain_files import read_plain_file
from rlkit.types import Task

DEADLINE = 20.0  # seconds for what takes milliseconds
SECRET = "sk-secret-of-the-user"
WORDS = ["environment=program", "environment.command=[python]", "environment.score=file"]


def within(seconds: float, function):
    """What a function gives, or fails with; an assertion where it is not over in time."""
    found: list = []

    def work() -> None:
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, f"hangs for more than {seconds} s"
    return found[0]


def socket_file(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as line:
        here = os.getcwd()
        os.chdir(path.parent)  # its name may be too long for an address
        try:
            line.bind(path.name)
        finally:
            os.chdir(here)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"1")
        file.truncate(10 << 30)


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except OSError:
        os.symlink("/dev/zero", path)


def hard_link(path: Path) -> None:
    (path.parent / "other").write_text("0.5")
    os.link(path.parent / "other", path)


def link_to(target: str):
    return lambda path: os.symlink(path.parent / target, path)


# name → (what makes reward.txt, what the message says)
ODD = {
    "FIFO": (os.mkfifo, "is no regular file"),
    "symlink": (link_to("secret"), "is no regular file"),
    "dangling symlink": (link_to("nowhere"), "is no regular file"),
    "symlink loop": (link_to("reward.txt"), "is no regular file"),
    "hard link": (hard_link, "has a second name"),
    "folder": (os.mkdir, "is no regular file"),
    "device": (device, "is no regular file"),
    "socket": (socket_file, "is no regular file"),
    "10 GB": (sparse, "is larger than 64 bytes"),
    "absent": (lambda path: None, "No such file"),
    "empty": (lambda path: path.write_bytes(b""), "holds no number"),
    "not UTF-8": (lambda path: path.write_bytes(b"\xff\xfe0.5"), "holds no number"),
    "text": (lambda path: path.write_text(SECRET), "holds no number"),
    "NUL": (lambda path: path.write_bytes(b"1\0"), "holds no number"),
    "nan": (lambda path: path.write_text("nan"), "holds nan"),
    "inf": (lambda path: path.write_text("-inf"), "holds -inf"),
    "1e999": (lambda path: path.write_text("1e999"), "holds inf"),
}


@pytest.mark.parametrize("kind", ODD)
def test_only_a_small_regular_file_with_a_number_is_a_score(kind, tmp_path):
    make, words = ODD[kind]
    (tmp_path / "secret").write_text(SECRET)
    make(tmp_path / "reward.txt")
    place = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    before = set(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else set()
    try:
        said = within(DEADLINE, lambda: read_score(place))
        after = set(os.listdir("/proc/self/fd")) if before else before
    finally:
        os.close(place)
    assert isinstance(said, str) and words in said, said
    assert SECRET not in said and "\n" not in said
    assert len(after) <= len(before)


@pytest.mark.parametrize("text, value", [("0.5", 0.5), (" 1\n", 1.0), ("-2e-3\n", -0.002)])
def test_a_number_is_the_score(text, value, tmp_path):
    (tmp_path / "reward.txt").write_text(text)
    place = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert read_score(place) == value
    finally:
        os.close(place)


def test_a_folder_that_takes_the_place_of_the_right_one_is_not_read(tmp_path):
    """The folder is held open from before the program starts."""
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "own" / "reward.txt").write_text("1")
    (tmp_path / "other" / "reward.txt").write_text(SECRET)
    place = os.open(tmp_path / "own", os.O_RDONLY | os.O_DIRECTORY)
    os.rename(tmp_path / "own", tmp_path / "moved")
    os.symlink(tmp_path / "other", tmp_path / "own")
    assert read_plain_file("reward.txt", most=64, folder=place) == b"1"
    os.close(place)


PROGRAMS = {
    "a FIFO": ("os.mkfifo('reward.txt')", None),
    "a link to a file of the user": ("os.symlink(sys.argv[1], 'reward.txt')", None),
    "a number": ("open('reward.txt', 'w').write('0.25')", 0.25),
}


def process(tiny, tmp_path, code: str):
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "agent.py").write_text(ASK + code)
    environment = program(
        command=["python", str(tmp_path / "agent.py"), str(tmp_path / "secret")], score="file"
    )
    (rollout,) = collect(tiny, [Task("t", ASKED)], engine=said_by("a"), environment=environment)
    return rollout


@pytest.mark.parametrize("kind", PROGRAMS)
def test_an_episode_ends_whatever_its_program_left(kind, tiny, tmp_path):
    code, reward = PROGRAMS[kind]
    rollout = within(120, lambda: process(tiny, tmp_path, code))
    assert rollout.steps[-1].reward == reward
    assert bool(rollout.error) == (reward is None) and SECRET not in str(rollout.metadata)


LATE = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import time
        os.close(0); os.close(1); os.close(2)
        while True:
            open('reward.txt', 'w').write('9')
    os._exit(0)
os.wait()
import time
while not os.path.exists('reward.txt'): time.sleep(0.001)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a subreaper")
def test_every_process_of_an_episode_is_dead_when_its_score_is_read(tiny, tmp_path, monkeypatch):
    """A grandchild in a session of its own, whose parent is gone, writes on and on."""
    module, sizes = sys.modules["rlkit.extras.programs._program"], []

    def looks(place):
        for _ in range(20):  # a writer that lives would empty the file between two looks
            sizes.append(
                (
                    os.stat("reward.txt", dir_fd=place).st_mtime_ns,
                    os.stat("reward.txt", dir_fd=place).st_size,
                )
            )
            time.sleep(0.001)
        return 0.0

    monkeypatch.setattr(module, "read_score", looks)
    process(tiny, tmp_path, LATE)
    assert len(set(sizes)) == 1


FORGES = """
if os.fork() == 0:
    os.setsid()
    import time
    if os.fork() == 0:
        os.close(0); os.close(1); os.close(2)
        time.sleep(3)
    os._exit(0)
os.wait()
open('reward.txt', 'w').write('9')
guard = os.getppid()
with open(f'/proc/{guard}/fd/2', 'w') as said:
    said.write('exit 0\\n')
os.kill(guard, 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_program_that_ends_its_guard_gives_itself_no_score(tiny, tmp_path):
    """It can say "exit 0" in the guard's name; what it started may still live."""
    rollout = process(tiny, tmp_path, FORGES)
    assert rollout.truncation == "error" and not any(step.reward for step in rollout.steps)


# ------------------------------------------------------------------------------------------ consent


@pytest.mark.parametrize("command", ["train", "check", "rollout", "evaluate"])
def test_a_command_asks_for_consent_and_says_why(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([command, *WORDS]) == 2
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1
        and said.startswith("rlkit: environment.score=file:")
        and "trust=true" in said
    )
    assert "writes its own reward" in said and not list(tmp_path.iterdir())


def test_a_sweep_asks_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-m", "seed=0,1", *WORDS]) == 2
    assert "trust=true" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_python_asks_too():
    with pytest.raises(ConfigError, match="trust=true"):
        experiment(*WORDS)
    assert experiment(*WORDS, trust=True).environment.play
    assert experiment(*WORDS, "trust=true").environment.play
    assert "trust=true" not in experiment(*WORDS, "trust=true").overrides
    assert experiment(environment=single_turn()) and not isinstance(
        program(command=["true"], score="file"), Exception
    )


@pytest.mark.slow
def test_consent_is_given_for_one_command_line_and_kept_in_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(ASK + "open('reward.txt', 'w').write('0.5')")
    small = [
        "batch.prompts=1",
        "batch.group_size=2",
        "generation.max_new_tokens=8",
        "evaluation.n=0",
        "logger=none",
        "trainer.steps=1",
    ]
    words = [
        *WORDS[:1],
        "environment.command=[python,agent.py]",
        WORDS[2],
        *small,
        "hydra.run.dir=run",
    ]
    assert main(["train", *words, "trust=true"]) == 0, capsys.readouterr()
    assert all("trust=true" not in p.read_text() for p in Path("run").rglob("*.yaml"))
    capsys.readouterr()
    assert main(["train", "resume=run", "trainer.steps=2"]) == 2
    assert "trust=true" in capsys.readouterr().err
    assert main(["train", "resume=run", "trainer.steps=2", "trust=true"]) == 0


def test_any_other_word_than_true_or_false_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *WORDS, "trust=yes"]) == 2
    assert "trust=yes" in capsys.readouterr().err
    assert main(["train", *WORDS, "trust=false"]) == 2
