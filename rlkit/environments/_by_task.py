"""Choose the environment named by each row of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlkit.environments.prompts import with_system_prompt
from rlkit.errors import ConfigError, name_function, require_arguments, suggest_name
from rlkit.system.copies import copy_value
from rlkit.system.deadline import call_user
from rlkit.types import Environment, Messages, Task, safe

# one environment for all tasks, or a function from a task to its environment
Setting = Environment | Callable[[Task], Environment]


@safe("environments", "system_prompt")
def by_task(
    *, environments: Mapping[str, Environment], system_prompt: str | None = None
) -> Callable[[Task], Environment]:
    """Return a function from a task to the environment named by `task.environment`. Therefore each
    row of a mixture gets its own environment.

    Args:
      environments: environments by name.
      system_prompt: text to put in front of each environment's first prompt; None: no text.
    Raises:
      ConfigError: if a system prompt is given, but an environment makes its own sessions. The
        returned function also raises ConfigError, if a task names an unknown environment. The
        message has the row and the known names.
    """
    known = {
        name: _with_prompt(name, environment, system_prompt)
        for name, environment in environments.items()
    }

    def lookup(task: Task) -> Environment:
        if task.environment not in known:
            every = ",".join([*known, task.environment])
            raise ConfigError(
                f"task {task.id!r} asks for the environment {task.environment!r}, but it is not in "
                "environment.environments; the known ones are:"
                f" {', '.join(sorted(known)) or 'none'}.{suggest_name(task.environment, known)} Set"
                f" environment={task.environment} or another option for all rows, or add it with"
                f" task.environments=[{every}]"
            )
        return known[task.environment]

    return lookup


def _with_prompt(name: str, environment: Environment, system_prompt: str | None) -> Environment:
    if not system_prompt:
        return environment
    if environment.session is not None or environment.play is not None:
        raise ConfigError(
            f"system_prompt: the environment {name!r} makes its own prompts; set"
            f" environment.environments.{name}.system_prompt"
        )
    make = environment.first_prompt

    async def first_prompt(task: Task) -> Messages:
        said = (
            task.messages
            if make is None
            else await call_user("the environment's first prompt", make, task)
        )
        said = [{"role": "user", "content": said}] if isinstance(said, str) else said
        return with_system_prompt(said, system_prompt)

    return environment._replace(first_prompt=first_prompt)


def find_environment(environment: Setting, task: Task) -> Environment:
    """Return the environment of a task. The config gives one environment for all tasks, or a
    function from a task to its environment.

    Raises: ConfigError if the function does not take a task, or does not return an Environment.
    """
    if isinstance(environment, Environment):
        return environment
    require_arguments(environment, "environment", task)
    found = environment(copy_value(task))
    if not isinstance(found, Environment):
        raise ConfigError(
            f"environment: {name_function(environment)} gives {found!r:.100} for a task; let it"
            " return a value of the type Environment"
        )
    return found
