"""Read a file somebody else may have made: never hang, and never read another file than the one of
this name."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_plain_file(path: str | Path, *, most: int, folder: int | None = None) -> bytes:
    """The bytes of a regular file with one name.

    Args:
      most: the largest size in bytes, >= 0.
      folder: a descriptor of the open folder for a relative path. Renaming the folder changes
        nothing.
    Raises: OSError if the path is a link, a FIFO, a folder, a device or a socket, has a second name
      (a hard link shows a file of somebody else), is larger, or cannot be read. The message never
      shows the content.
    """
    # a device may notice being opened
    check_plain(os.stat(path, dir_fd=folder, follow_symlinks=False), most)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = os.open(path, flags, dir_fd=folder)
    with open(descriptor, "rb") as file:
        check_plain(os.fstat(descriptor), most)
        data = file.read(most + 1)
    if len(data) > most:
        raise make_size_error(most)
    return data


def check_plain(found: os.stat_result, most: int) -> None:
    """Raise OSError unless this is a regular file with one name and at most so many bytes."""
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    if found.st_nlink > 1:
        raise OSError(errno.EMLINK, "it has a second name (a hard link)")
    if found.st_size > most:
        raise make_size_error(most)


def make_size_error(most: int) -> OSError:
    """The error for a file of more bytes than it may have."""
    return OSError(errno.EFBIG, f"it is larger than {most:,} bytes")
