"""The environment that each row of the data names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlkit.errors import ConfigError
from rlkit.types import Environment, Task


def by_task(*, environments: Mapping[str, Environment]) -> Callable[[Task], Environment]:
    """A lookup of `task.environment` in named environments, so that a mixture runs each row its own way.

    Args:
      environments: name → environment.
    Raises: ConfigError, from the lookup, naming the row, the name it asks for and the known names.
    """

    def lookup(task: Task) -> Environment:
        if task.environment not in environments:
            raise ConfigError(
                f"task {task.id!r} asks for the environment {task.environment!r}, which is not in "
                f"environment.environments; known are {', '.join(sorted(environments)) or 'none'}. "
                "Add it there, or set environment= to one option for all rows"
            )
        return environments[task.environment]

    return lookup


def environment_of(environment: Environment | Callable[[Task], Environment], task: Task) -> Environment:
    """The environment of a task, whether the config gave one for all tasks or a lookup."""
    return environment if isinstance(environment, Environment) else environment(task)
