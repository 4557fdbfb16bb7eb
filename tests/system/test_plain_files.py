"""A file that somebody else may have made is read without a hang and without a look elsewhere."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from rlkit.system.plain_files import read_plain_file

DEADLINE = 20.0  # seconds for what takes milliseconds
SECRET = "sk-secret-of-the-user"


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
        line.bind(os.path.relpath(path))  # its whole name may be too long for an address


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 << 30)


def hard_link(path: Path) -> None:
    (path.parent / "other").write_text("0.5")
    os.link(path.parent / "other", path)


def link_to(target: str):
    return lambda path: os.symlink(path.parent / target, path)


# name → (what makes the file, what the message says)
ODD = {
    "FIFO": (os.mkfifo, "is no regular file"),
    "symlink": (link_to("secret"), "is no regular file"),
    "dangling symlink": (link_to("nowhere"), "is no regular file"),
    "symlink loop": (link_to("file"), "is no regular file"),
    "hard link": (hard_link, "has a second name"),
    "folder": (os.mkdir, "is no regular file"),
    "device": (lambda path: os.symlink("/dev/zero", path), "is no regular file"),
    "socket": (socket_file, "is no regular file"),
    "10 GB": (sparse, "is larger than 64 bytes"),
    "absent": (lambda path: None, "No such file"),
}


@pytest.mark.parametrize("kind", ODD)
def test_only_a_small_regular_file_is_read(kind, tmp_path):
    make, words = ODD[kind]
    (tmp_path / "secret").write_text(SECRET)
    make(tmp_path / "file")
    before = set(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else set()
    said = within(DEADLINE, lambda: read_plain_file(tmp_path / "file", most=64))
    after = set(os.listdir("/proc/self/fd")) if before else before
    assert isinstance(said, OSError) and words in str(said)
    assert SECRET not in str(said) and len(after) <= len(before)


def test_a_folder_that_takes_the_place_of_the_right_one_is_not_read(tmp_path):
    """The folder is held open from before."""
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "own" / "file").write_text("1")
    (tmp_path / "other" / "file").write_text(SECRET)
    place = os.open(tmp_path / "own", os.O_RDONLY | os.O_DIRECTORY)
    os.rename(tmp_path / "own", tmp_path / "moved")
    os.symlink(tmp_path / "other", tmp_path / "own")
    assert read_plain_file("file", most=64, folder=place) == b"1"
    os.close(place)
