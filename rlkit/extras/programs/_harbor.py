"""Read tasks in Harbor's format. Each task is a folder with an instruction, files for the program
and hidden tests."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlkit.errors import DataError
from rlkit.tasks.splits import check_split, cut, order_tasks
from rlkit.types import Task, ranges, reaches, safe

# names in environment/ of a task that needs a container image
IMAGES = ("Dockerfile", "docker-compose.yaml")
# Keys of task.toml that rlkit does not support, with values that are harmless because they ask for
# nothing. An empty value or 0 also asks for nothing.
BEYOND: dict[str, tuple[str, ...]] = {
    "steps": (),
    "agent.user": (),
    "agent.allowed_hosts": (),
    "environment.allowed_hosts": (),
    "environment.env": (),
    "environment.gpus": (),
    "environment.healthcheck": (),
    "environment.mcp_servers": (),
    "environment.os": ("linux",),
    "environment.skills_dir": (),
    "environment.tpu": (),
    "environment.workdir": (),
    "verifier.allowed_hosts": (),
    "verifier.collect": (),
    "verifier.env": (),
    "verifier.environment": (),
    "verifier.environment_mode": ("shared",),
    "verifier.user": (),
}
TESTS_S = 600.0  # seconds for tests/test.sh, Harbor's default
UNITS_MB = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
Config = Mapping[str, Any]


@reaches(path="program")
@safe("split")
@ranges(max_samples=(1, None))
def harbor(
    *,
    path: str,
    split: str,
    seed: int,
    validation: float = 0.1,
    held_out: float = 0.1,
    max_samples: int | None = None,
) -> list[Task]:
    """Read a folder of tasks in Harbor's format, for `environment=program` with
    `environment.confined=true`.

    The prompt is `instruction.md`, without canary lines at its top. The files of `environment/` are
    copied into the program's folder. After the episode, `tests/test.sh` computes the reward.

    Args:
      path: the folder of one task, or a folder of tasks. The folder of a task has a file
        `task.toml`.
      split: train, validation or test. "validation" and "test" are shares of the tasks, and "train"
        has the rest.
      seed: seed of the order. It does not change the split of a task.
      validation, held_out: shares of the tasks for "validation" and "test", at least 0 and together
        below 1. The hash of the instruction decides the split of a task.
      max_samples: number of tasks to keep after the shuffle; None for all.
    Returns: tasks with the ids SET/SPLIT/FOLDER. `metadata["harbor"]` has the task's folder and the
      limits in task.toml.
    Raises: DataError naming the first task that cannot run here, for example because it needs a
      container image.
    """
    check_split(split, validation, held_out)
    source = Path(path).expanduser().resolve()
    folders = [source] if (source / "task.toml").is_file() else sorted(_find_tasks(source))
    rows = [(folder, _config(folder)) for folder in folders]
    problems = {folder.name: _problem(folder, config) for folder, config in rows}
    refused = [f"{name}: {problem}" for name, problem in problems.items() if problem]
    if refused:
        more = f" ({len(refused) - 1} more tasks cannot run here)" if len(refused) > 1 else ""
        raise DataError(f"task.path={path}: {refused[0]}; take the task out of the folder{more}")
    kept = cut(
        rows,
        lambda row: _instruction(row[0]),
        split,
        f"tasks of task.path={path}",
        validation=validation,
        held_out=held_out,
    )
    tasks = [_task(f"{source.name}/{split}", *row) for row in kept]
    return order_tasks(tasks, seed=seed, max_samples=max_samples, source=path)


def _find_tasks(source: Path) -> list[Path]:
    """List the task folders in a folder of tasks. Raises: DataError if there is none."""
    found = [file.parent for file in source.glob("*/task.toml")]
    if not found:
        raise DataError(f"task.path={source} holds no task; a task is a folder with task.toml")
    return found


def _config(folder: Path) -> Config:
    """Read task.toml. Raises: DataError if it cannot be read."""
    try:
        return tomllib.loads((folder / "task.toml").read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}/task.toml cannot be read: {error}") from error


def _value(config: Config, key: str) -> Any:
    """Return the value at a dotted key; None if the key is missing."""
    node: Any = config
    for word in key.split("."):
        node = node.get(word) if isinstance(node, Mapping) else None
    return node


def _problem(folder: Path, config: Config) -> str:
    """Say why a task cannot run here; "" if it can."""
    image = _name_image(folder, config)
    if image:
        return f"it needs a container image ({image}), and rlkit starts no container"
    for key, harmless in BEYOND.items():
        value = _value(config, key)
        if value and str(value).lower() not in harmless:
            return f"task.toml sets {key}={value!r:.80}, which rlkit does not give"
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            return f"there is no {name}"
    return "" if _instruction(folder) else "instruction.md is empty"


def _name_image(folder: Path, config: Config) -> str:
    """Name the container image of a task; "" if it needs none."""
    named = _value(config, "environment.docker_image")
    if named:
        return str(named)
    for name in IMAGES:
        file = folder / "environment" / name
        if file.is_file():
            lines = file.read_text(errors="replace").splitlines()
            bases = [line.strip() for line in lines if line.upper().startswith("FROM ")]
            return f"environment/{name}{': ' if bases else ''}{''.join(bases[-1:])}"
    return ""


def _instruction(folder: Path) -> str:
    """Return the instruction for the policy, without canary lines at its top. They are marks for
    crawlers."""
    try:
        lines = (folder / "instruction.md").read_text().splitlines()
    except ValueError as error:
        raise DataError(f"{folder}/instruction.md cannot be read: {error}") from error
    while lines and (not lines[0].strip() or _is_canary(lines[0])):
        lines.pop(0)
    return "\n".join(lines).rstrip()


def _is_canary(line: str) -> bool:
    return line.startswith(("#", "<!--")) and "canary" in line.lower()


def _task(prefix: str, folder: Path, config: Config) -> Task:
    files = folder / "environment"
    own = {
        "folder": str(folder),
        "time_limit": _positive(folder, config, "agent.timeout_sec"),
        "tests_time_limit": _positive(folder, config, "verifier.timeout_sec") or TESTS_S,
        "memory_mb": _memory(folder, config),
    }
    return Task(
        id=f"{prefix}/{folder.name}",
        messages=({"role": "user", "content": _instruction(folder)},),
        reward="environment",
        environment="program",
        metadata={"harbor": own, **({"files": str(files)} if files.is_dir() else {})},
    )


def _positive(folder: Path, config: Config, key: str) -> float | None:
    """Return a limit in task.toml; None if it is not set. Raises: DataError unless it is above
    0."""
    value = _value(config, key)
    if value is None:
        return None
    if isinstance(value, int | float) and 0 < value < math.inf:
        return float(value)
    raise DataError(f"{folder}/task.toml: {key} is {value!r:.80}; it must be a number above 0")


def _memory(folder: Path, config: Config) -> int | None:
    """Return the memory limit in MB, from `memory_mb` or from the older key `memory`, for example
    "2G"."""
    text = _value(config, "environment.memory")
    if not text:
        found = _positive(folder, config, "environment.memory_mb")
        return math.ceil(found) if found else None
    try:
        return math.ceil(float(text[:-1]) * UNITS_MB[text[-1].upper()])
    except (TypeError, ValueError, KeyError, OverflowError):
        raise DataError(
            f"{folder}/task.toml: environment.memory is {text!r:.80}; write it as 512M or 2G"
        ) from None
