"""Read a file that somebody else may have made. Reading never hangs, and never follows a link to
another file."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_plain_file(path: str | Path, *, most: int, folder: int | None = None) -> bytes:
    """Read the bytes of a regular file that has only one name.

    Args:
      most: the largest allowed size in bytes, >= 0.
      folder: descriptor of the open folder to which a relative path belongs. If the folder is
        renamed meanwhile, the same folder is still used.
    Raises: OSError if the path is a link, a FIFO, a folder, a device or a socket, if the file has a
      second name (a hard link may show a file of somebody else), if it is larger than `most`, or if
      it cannot be read. The message never shows the content.
    """
    # before opening it, because a device may notice being opened
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
    """Raise OSError unless this is a regular file with only one name and at most `most` bytes."""
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    if found.st_nlink > 1:
        raise OSError(errno.EMLINK, "it has a second name (a hard link)")
    if found.st_size > most:
        raise make_size_error(most)


def make_size_error(most: int) -> OSError:
    """Return the error for a file of more than `most` bytes."""
    return OSError(errno.EFBIG, f"it is larger than {most:,} bytes")
