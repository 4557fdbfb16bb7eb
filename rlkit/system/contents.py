"""List a run's files in its checkpoints. A resumed run recognises its own files by this list, and
moves all other files to aside/.

A checkpoint lists the files the run appends to, each with its size and the SHA-256 of its bytes. It
also holds a short digest of each row of metrics.jsonl. So the files themselves need not name their
run: the checkpoint names the run, and all listed files belong to this run.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rlkit.errors import DataError
from rlkit.system.digest import digest_more
from rlkit.system.files import open_regular, read_regular, reason
from rlkit.system.rows import digest_line
from rlkit.system.shards import scan_members

ASIDE = "aside"  # folder for files that are not the run's own, each under its own name
METRICS = "metrics.jsonl"
PROMPTS = "prompts.txt"  # first prompts as the policy reads them, tools included
APPENDED = (  # files that grow while a run goes on; the part listed in a checkpoint never changes
    "rollouts/steps_*.jsonl.gz",
    "held_out/*/steps_*.jsonl.gz",
    "completions/steps_*.parquet",
    "samples/steps_*.md",
)
REWRITTEN = (  # other files that a resume reads or writes, and does not need
    "run.json",
    "summary.json",
    "metrics.csv",
    "metrics.discarded.jsonl",
    "metrics.unreadable",
    PROMPTS,
    "*.discarded.jsonl.gz",
    "held_out/*.discarded.jsonl.gz",
    ".hydra/config.yaml",
    ".hydra/hydra.yaml",
    "checkpoints/best.json",
    "tensorboard/hparams.yaml",
    "wandb.id",
    "mlflow.id",
)
FOLDERS = (
    ".hydra",
    "rollouts",
    "held_out",
    "held_out/validation",
    "held_out/test",
    "completions",
    "completions.discarded",
    "samples",
    "checkpoints",
    "tensorboard",
    "debug",
)
SPAN = re.compile(r"steps_(\d+)-(\d+)\.")
SHOWN = 3  # most files named in a sentence


class Hashed(NamedTuple):
    """The measured start of a file."""

    size: int  # bytes measured
    digest: Any  # their SHA-256, a hashlib object to continue with further bytes


def measure_files(folder: Path, before: Mapping[str, Hashed]) -> dict[str, Hashed]:
    """Measure the size and digest of every file the run appends to. Returns: path in the folder →
    Hashed. An unreadable file is left out.

    Args:
      before: the result of an earlier call in this process. Only the bytes appended since then are
        read.
    """
    found = {}
    for path in _list_appended(folder):
        name = path.relative_to(folder).as_posix()
        with suppress(OSError):
            # an error on one rank would leave the others waiting inside the checkpoint's save
            found[name] = _measure_file(path, before.get(name))
    return found


def _measure_file(path: Path, before: Hashed | None) -> Hashed:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if before is None or before.size > size:
            before = Hashed(0, hashlib.sha256())
        file.seek(before.size)
        return Hashed(size, digest_more(file, size - before.size, before.digest.copy()))


def list_files(folder: Path, measured: Mapping[str, Hashed]) -> dict[str, Any]:
    """List the run's files for a checkpoint, in plain types. `files` is name → [size, digest], and
    `rows` holds the digests of the lines of metrics.jsonl."""
    lines: list[bytes] = []
    with suppress(OSError):
        lines = read_regular(folder / METRICS).split(b"\n")
    return {
        "files": {name: [own.size, own.digest.hexdigest()] for name, own in measured.items()},
        "rows": [digest_line(line) for line in lines if line],
    }


def _list_appended(folder: Path) -> list[Path]:
    return _match_files(folder, APPENDED)


def _match_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


# ---------------------------------------------------------------------------------- before a resume


def clear_places(folder: Path) -> None:
    """Make sure that no path of the run's files is taken by anything but a regular file. Anything
    else, such as a FIFO, is moved to aside/, because reading it might never end.

    Raises: DataError naming a file or folder without read permission.
    """
    for name in FOLDERS:
        _clear(folder, folder / name, Path.is_dir, "folder")
    for path in _match_files(folder, (METRICS, *APPENDED, *REWRITTEN)):
        _clear(folder, path, Path.is_file, "regular file")


def _clear(folder: Path, path: Path, fits: Callable[[Path], bool], kind: str) -> None:
    if fits(path):
        require_readable(path)
    elif os.path.lexists(path):
        name = path.relative_to(folder).as_posix()
        print(f"resume: {name} is no {kind} and is kept as {set_aside(folder, name)}", flush=True)


def require_readable(path: Path) -> None:
    """Raise DataError if a path of a run cannot be read, or is neither a file nor a folder."""
    try:
        if path.is_dir():
            os.listdir(path)
        else:
            open_regular(path).close()
    except OSError as error:
        raise _make_read_error(path, error) from None


def _make_read_error(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path} cannot be read ({reason(error)}); make it readable, or move it out of the run"
        " folder"
    )


def set_aside(folder: Path, name: str) -> str:
    """Move a file or folder of a run folder to aside/, or to aside_2/ … if its name is taken.
    Returns the new path in the folder.

    Raises: DataError if it cannot be moved.
    """
    target = folder / find_free_place(folder, name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(folder / name, target)
    except OSError as error:
        raise DataError(
            f"{folder / name} is not the run's own and cannot be moved to {target}"
            f" ({reason(error)}); move it away"
        ) from None
    return target.relative_to(folder).as_posix()


def find_free_place(folder: Path, name: str) -> str:
    """Return the path in the folder to which `set_aside` would move a file."""
    places = (
        f"{ASIDE}/{name}" if number == 1 else f"{ASIDE}_{number}/{name}"
        for number in itertools.count(1)
    )
    return next(place for place in places if not os.path.lexists(folder / place))


def set_others_aside(folder: Path, files: Mapping[str, tuple[int, str]], step: int) -> None:
    """Compare the run's files with the list in the checkpoint of RL step `step`. Print a line about
    missing files and about files of another run.

    A file of another run is moved to aside/ whole. Bytes after the listed size belong to later
    steps, and stay.

    Args:
      files: path in the folder → (size, SHA-256) of the run's own bytes.
    Raises: DataError if a file cannot be read or moved.
    """
    faults: dict[tuple[str, str], list[str]] = {}
    for name, (size, digest) in files.items():
        why = _find_fault(folder / name, size, digest, step)
        if why:
            faults.setdefault((Path(name).parts[0], why), []).append(name)
    for path in _list_appended(folder):
        name = path.relative_to(folder).as_posix()
        if name not in files and any(held <= step for held, _ in _steps(path)):
            fault = Path(name).parts[0], "was not there at the checkpoint"
            faults.setdefault(fault, []).append(name)
    for (place, why), names in faults.items():
        kept = [set_aside(folder, name) for name in names if os.path.lexists(folder / name)]
        more = f", as are {len(names) - SHOWN} more files of {place}/" if len(names) > SHOWN else ""
        where = f"; kept as {', '.join(kept[:SHOWN])}" if kept else ""
        goes_on = f"the run goes on without what this run wrote there up to step {step}"
        print(f"resume: {', '.join(names[:SHOWN])} {why}{more}{where}; {goes_on}", flush=True)


def _find_fault(path: Path, size: int, digest: str, step: int) -> str:
    """Say in a few words how a file differs from the run's own bytes; empty if it does not."""
    try:
        with open_regular(path) as file:
            held = os.fstat(file.fileno()).st_size
            same = held >= size and digest_more(file, size, hashlib.sha256()).hexdigest() == digest
        foreign = same and any(start >= size and own <= step for own, start in _steps(path))
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        raise _make_read_error(path, error) from None
    if same and not foreign:
        return ""
    return "does not begin with what this run wrote" if held else "is empty"


def _steps(path: Path) -> Iterator[tuple[int, int]]:
    """Yield (RL step, position of its first byte) for each step in a file. Only steps readable
    without unpacking the file are known."""
    if path.name.endswith(".jsonl.gz"):
        yield from ((step, part.start) for step, part in scan_members(path))
    elif path.suffix == ".parquet":
        found = SPAN.match(path.name)
        if found:
            yield int(found[2]), 0
