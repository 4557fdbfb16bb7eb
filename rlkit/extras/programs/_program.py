"""`environment=program`: somebody else's program plays the episode, and speaks to the policy
through an endpoint on loopback."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from rlkit.environments import hermes
from rlkit.episodes.episode import cut_off, mark_failed
from rlkit.errors import ConfigError, DataError
from rlkit.extras.programs._players import Launch, call_function, make_launch, run_program
from rlkit.extras.programs._processes import Limits, settle_confinement
from rlkit.extras.programs._verifier import Verifier, make_verifier
from rlkit.extras.programs._verifier import verify as verify_left
from rlkit.extras.programs.contract import Ask, Ended
from rlkit.extras.programs.conversations import asking
from rlkit.extras.programs.hidden_tests import (
    check_hidden,
    find_hidden_tests,
    run_tests,
    take_least,
)
from rlkit.extras.programs.slots import AtMost
from rlkit.sandbox.process import make_folder
from rlkit.system.deadline import Countdown, DeadlinePassed
from rlkit.system.plain_files import read_plain_file
from rlkit.system.waiting import Wait, waiting
from rlkit.types import (
    Environment,
    Playing,
    Rollout,
    Step,
    Task,
    ToolParser,
    reaches,
    safe,
)

ANSWER = "answer.txt"  # in the program's folder
LONGEST_ANSWER = 1 << 16  # bytes of it
# fields of a task that hold its answer; a reward declares others (`rlkit.rewards.reads_fields`)
TRUTHS = ("answer", "tests", "solution", "messages")


@reaches(command="program", verify="program", variables="variable", readable="path")
@safe("function", "score", "answer", "metadata", "reward_range")
def program(
    *,
    command: Sequence[str] = (),
    function: Callable[..., Any] | None = None,
    max_turns: int = 8,
    time_limit: float = 300.0,
    output_kb: int = 1024,
    memory_mb: int | None = None,
    score: str | None = None,
    answer: str = "last_reply",
    metadata: Sequence[str] = (),
    verify: Sequence[str] = (),
    verify_time_limit: float = 60.0,
    reward_range: Sequence[float] = (0.0, 1.0),
    dropped_thinking: Literal["new_row", "continue"] = "new_row",
    unsupported: Literal["refuse", "ignore"] = "refuse",
    variables: Mapping[str, str] | None = None,
    confined: bool | Literal["auto"] = "auto",
    readable: Sequence[str] = (),
    max_programs: int | None = None,
    parse_calls: ToolParser = hermes,
) -> Environment:
    """Let a program, or a Python function, play each episode; all its requests to the policy are
    recorded and trained on.

    A program has a process and a working folder of its own, the task as JSON ({"id", "messages",
    "metadata"}) in `RLKIT_TASK` and on standard input, and its endpoint in OPENAI_BASE_URL and
    OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. It has none of the run's other
    variables except PATH and the language. It ends with its episode, together with all its
    processes. Unless it is confined, it has the rights of the run's user, and can read the keys of
    other programs.

    Args:
      command: the program and its arguments. Names of files are relative to the folder where the
        run was started.
      function: (task, client) in place of a command, plain or async; a plain one runs in a thread.
        A returned number is added to the reward. An error ends its episode.
      max_turns: replies of an episode, at least 1. Further requests are refused, and the episode is
        truncated.
      time_limit: seconds, > 0, of an episode, without decoding; then it is truncated by "deadline".
      output_kb: most output of a program, at least 1; more ends it.
      memory_mb: address space of each process of the program, at least 1. A process cannot get
        more. None: no limit.
      score: `exit`: an exit status of 0 gives the reward 1, any other 0, and it is added to the
        reward (reward `environment` is 0). None: nothing is added, and a status other than 0 is a
        failure.
      answer: the final content for rewards. `last_reply`; `stdout`, the program's standard output
        without white space around it; `file`, answer.txt in the program's folder, of at most 64
        KiB, read when all its processes are dead ("" without the file); `tool:NAME`, the last call
        of this tool (a single argument's text, else the arguments as JSON; "" without a call).
      metadata: fields of the task's metadata for the program to see. A field with a truth is
        refused.
      verify: a command to judge the program's folder once all processes of the episode are dead,
        even after its time was up. It writes a number to the descriptor RLKIT_REWARD_FD, and this
        number is added to the reward, see `rlkit.extras.programs._verifier.verify`. Without a
        number, the episode has failed. The verifier is confined if the program is, without a
        network. Needs Linux and a command.
      verify_time_limit: seconds, > 0, of a verifier.
      reward_range: least and greatest number of a verifier.
      dropped_thinking: a conversation may come back without the thinking of a reply. It is then
        another conversation and begins a new row (new_row), or it continues the row, and the
        thinking stays there (continue).
      unsupported: a request with a setting that cannot be honoured, such as a JSON format or a
        forced tool, is refused (refuse), or the setting has no effect and the program checks its
        answer itself (ignore). docs/programs.md has the table.
      variables: further variables of the program.
      confined: the program and its children write only its own folder. They read the system's
        programs and libraries, Python, the installations of the command's program and of its
        interpreter, the files of the command, the folders of PYTHONPATH in `variables`, `readable`,
        and the folder of its code, see `rlkit.extras.programs._commands.list_code_folders`. They
        connect to the port of its endpoint over TCP and have no other network, and signal nothing
        outside. Needs Landlock in version 6 (Linux 6.12) and seccomp. `auto` confines where these
        are there, and says in a line where they are not.
      readable: further files and folders for a confined program to read and run.
      max_programs: programs alive at the same time, at least 1; None: all episodes of a step begin
        together. Waiting for a place spends none of an episode's time. The last bits of its
        log-probs then depend on the end of another episode.
      parse_calls: reads the calls out of a reply's content.
    Raises: ConfigError for no or two programs, one that cannot be started, a limit out of range, or
      a parser that needs the tools' functions.
    """
    _check_choice(command, function, score, answer, metadata, verify, confined)
    _check_settings(time_limit, readable, parse_calls)
    require_positive(
        max_turns=max_turns, output_kb=output_kb, memory_mb=memory_mb, max_programs=max_programs
    )
    guarded = function is None and settle_confinement(confined)
    player = function or make_launch(
        command,
        Limits(output_kb << 10, memory_mb),
        score=score == "exit",
        variables=variables or {},
        answer=answer,
        fields=metadata,
        confined=guarded,
        readable=readable,
        closed=verify,
    )
    verifier = make_verifier(
        verify,
        time_limit=verify_time_limit,
        reward_range=reward_range,
        confined=guarded,
        readable=readable,
        memory_mb=memory_mb,
    )
    awaited = player.awaited if isinstance(player, Launch) else ""
    paths = player.limits.readable if isinstance(player, Launch) else None
    strict = dropped_thinking == "new_row"
    slots = AtMost(max_programs) if max_programs else None
    check = partial(_check_row, tuple(metadata), awaited, paths, bool(verify or score))
    ignore = unsupported == "ignore"
    play = partial(_play, player, verifier, check, time_limit, answer, strict, ignore, slots)
    return Environment(parse_calls=parse_calls, max_steps=max_turns, check=check, play=play)


def _check_choice(
    command: Sequence[str],
    function: Callable[..., Any] | None,
    score: str | None,
    answer: str,
    metadata: Sequence[str],
    verify: Sequence[str],
    confined: bool | Literal["auto"],
) -> None:
    """Raise ConfigError for unknown or contradictory choices."""
    if bool(command) == (function is not None):
        raise ConfigError(
            "environment: set one of environment.command=[PROGRAM, …] and"
            " environment.function._target_=MODULE.NAME"
        )
    if score == "file":
        raise ConfigError(
            "environment.score=file is gone, since the policy could write that file; judge what the"
            " program leaves by environment.verify=[COMMAND, …]"
        )
    if score not in (None, "exit"):
        raise ConfigError(f"environment.score is {score!r}; it is exit or null")
    tool = answer.removeprefix("tool:") if answer.startswith("tool:") else ""
    if not tool and answer not in ("last_reply", "stdout", "file"):
        raise ConfigError(
            f"environment.answer is {answer!r}; it is last_reply, stdout, file or tool:NAME"
        )
    if function is not None and confined is True:
        raise ConfigError(
            "environment.confined: a function runs in this process and cannot be confined; give"
            " environment.command"
        )
    if function is not None and (answer in ("stdout", "file") or verify):
        key = "verify" if verify else "answer"
        raise ConfigError(
            f"environment.{key} needs a process and a folder, which a function has not; set"
            " environment.command=[PROGRAM, …]"
        )
    if verify and score:
        raise ConfigError(
            "environment.verify and environment.score=exit both give the reward; set one of them"
        )
    told = [name for name in metadata if name in TRUTHS]
    if told:
        raise ConfigError(
            f"environment.metadata: {told[0]!r} holds what the reward compares with; name fields"
            " that the program may know"
        )


def _check_settings(time_limit: float, readable: Sequence[str], parse_calls: ToolParser) -> None:
    """Raise ConfigError for an impossible setting."""
    if not time_limit > 0:
        raise ConfigError(f"environment.time_limit is {time_limit}; it must be > 0 seconds")
    lost = [path for path in readable if not os.path.exists(path)]
    if lost:
        raise ConfigError(f"environment.readable: there is no {lost[0]!r}")
    if "tools" in inspect.signature(parse_calls).parameters:
        raise ConfigError(
            "environment.parse_calls needs the tools' functions, which the program has; choose"
            " hermes"
        )


def require_positive(**limits: int | None) -> None:
    """Raise ConfigError naming the first limit below 1; None is no limit."""
    for key, limit in limits.items():
        if limit is not None and limit < 1:
            raise ConfigError(f"environment.{key} is {limit}; it must be at least 1")


# --------------------------------------------------------------------------------------- an episode


async def _play(
    player: Launch | Callable[..., Any],
    verifier: Verifier,
    check: Callable[[Task, Set[str]], str],
    time_limit: float,
    answer: str,
    strict_thinking: bool,
    ignore: bool,
    slots: AtMost | None,
    at: Playing,
) -> Rollout:
    """Play an episode of a program, as `Environment.play`. Its folder lives until its verifier is
    done; the engine forgets the episode earlier. A task's own limits hold beside the run's."""
    problem = check(at.task, frozenset())
    if problem:
        raise DataError(f"row {at.task.id}: {problem}")
    tests = find_hidden_tests(at.task)
    if tests is not None:
        time_limit = take_least(time_limit, tests.time_limit)
        if isinstance(player, Launch):
            memory_mb = take_least(player.limits.memory_mb, tests.memory_mb)
            player = player._replace(limits=player.limits._replace(memory_mb=memory_mb))
    async with nullcontext() if slots is None else slots.held(at.give_way):
        with ExitStack() as held:
            left: list[bool] = []
            if isinstance(player, Launch):
                where = held.enter_context(make_folder())
                write_files(at.task, where)
                play: Callable[..., Awaitable[Ended]] = partial(run_program, player, where, left)
                named: Any = shlex.join(player.command)
            else:
                where = ""
                play = partial(call_function, player)
                named = player
            episode = partial(_play_program, play, time_limit, ignore, named)
            rollout = await asking(episode, strict_thinking=strict_thinking)(at)
            rollout = _with_answer(_with_requests(rollout), answer, where)
            judged = verifier.command or tests is not None
            if not judged or not rollout.steps or rollout.truncation == "error":
                return rollout
            if left != [False]:
                why = (
                    "the program ended its guard, so its processes may live and nothing is verified"
                )
                return mark_failed(rollout, why)
            if tests is None:
                reward = await verify_left(verifier, at.task, where)
            else:
                reward = await run_tests(verifier, tests, where)
            if isinstance(reward, str):
                judge = "environment.verify" if tests is None else "its hidden tests"
                return mark_failed(rollout, f"{judge}: {reward}")
            last = rollout.steps[-1]._replace(reward=reward)
            return rollout._replace(steps=(*rollout.steps[:-1], last))


def _check_row(
    told: Sequence[str],
    awaited: str,
    readable: Sequence[str] | None,
    judged: bool,
    task: Task,
    truths: Set[str],
) -> str:
    """As `check_task` and `check_hidden`; `awaited`: a path in the command that a file of the task
    must bring."""
    problem = check_task(told, task, truths) or check_hidden(task, readable, judged)
    if problem or not awaited:
        return problem
    files = task.metadata.get("files") or {}
    if isinstance(files, str):
        brought = os.path.exists(os.path.join(files, awaited))
    else:
        brought = os.path.normpath(awaited) in map(os.path.normpath, files)
    where = os.getcwd()
    missing = f"environment.command: there is no {awaited!r} in {where}, and this task brings none"
    return "" if brought else missing


def check_task(told: Sequence[str], task: Task, truths: Set[str]) -> str:
    """Say why a task's fields cannot be told, or its files not copied. `told`: fields of its
    metadata for the program to see."""
    for field in told:
        if field in truths:
            return (
                f"environment.metadata: {field!r} holds what the reward compares with; name fields"
                " that the program may know"
            )
    files = task.metadata.get("files") or {}
    if isinstance(files, str):
        return "" if os.path.isdir(files) else f"its files: there is no folder {files!r:.100}"
    if not isinstance(files, Mapping):
        return "its files are neither a mapping of path to text nor a folder"
    for name, text in files.items():
        path = PurePosixPath(str(name))
        inside = path.name and not path.is_absolute() and ".." not in path.parts
        # columns of a data set have None if a row lacks the file
        if not inside or not isinstance(text, str | None):
            return f"its file {name!r:.100} needs a relative path without '..' and a text"
    return ""


def write_files(task: Task, where: str) -> None:
    """Put the files of a task, `metadata["files"]`, into the folder of its episode. Raises:
    DataError that names the row."""
    files = task.metadata.get("files") or {}
    try:
        if isinstance(files, str):
            shutil.copytree(files, where, symlinks=True, dirs_exist_ok=True)
            os.chmod(where, 0o700)  # the copy has the rights of the original
            return
        for name, text in files.items():
            if text is not None:
                path = Path(where, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text.encode())
    except (OSError, ValueError) as error:
        raise DataError(f"row {task.id}: its files cannot be written: {error}") from error


def _with_requests(rollout: Rollout) -> Rollout:
    """Add its refused and retried requests to the rollout as metrics. An episode of nothing but
    refusals says so, and has failed unless a limit ended it."""
    refused = rollout.metadata.get("refused", 0)
    retries = rollout.metadata.get("retries", 0)
    counts = {"program/refused": float(refused), "program/retries": float(retries)}
    rollout = rollout._replace(metrics={**rollout.metrics, **counts})
    if rollout.steps or not refused:
        return rollout
    why = f"all {refused} requests were refused, the first: {rollout.metadata['refusal']}"
    rollout = cut_off(rollout, rollout.truncation or "error")
    return rollout._replace(error="; ".join(filter(None, (why, rollout.error))))


def _with_answer(rollout: Rollout, answer: str, where: str) -> Rollout:
    """Set the final content for rewards, if it is not the last reply's."""
    if answer == "file":
        try:
            path = os.path.join(where, ANSWER)
            text = read_plain_file(path, most=LONGEST_ANSWER).decode(errors="replace").strip()
        except OSError:  # no file, or one that is no plain file: no answer
            text = ""
    elif answer.startswith("tool:"):
        text = answer_by_tool(rollout, answer.removeprefix("tool:"))
    else:
        return rollout
    return rollout._replace(metadata={**rollout.metadata, "final_content": text})


def answer_by_tool(rollout: Rollout, name: str) -> str:
    """The last call of a tool: the text of a single argument, else the arguments as JSON; ""
    without a call."""
    made = [call for step in rollout.steps for call in step.tool_calls]
    calls = [call for call in made if call.name == name and not call.error]
    if not calls:
        return ""
    arguments = dict(calls[-1].arguments)
    value = next(iter(arguments.values())) if len(arguments) == 1 else arguments
    return value if isinstance(value, str) else json.dumps(value)


async def _play_program(
    play: Callable[..., Awaitable[Ended]],
    time_limit: float,
    ignore: bool,
    named: Any,
    task: Task,
    ask: Ask,
) -> Ended:
    """Play an episode with an endpoint of its own, within its time. `ignore`: unsupported settings
    of requests have no effect. `named`: the program, for messages."""
    from rlkit.extras.programs.server import open_door

    wait = Wait("the program", named)

    async def reply(*asked: Any, **settings: Any) -> Step:
        with wait.pause():  # meanwhile the program waits for the policy
            return await ask(*asked, **settings)

    said: dict[str, Any] = {}
    door = open_door(ask._replace(reply=reply), counts=said, ignore=ignore)
    try:
        async with Countdown(time_limit).running(), door as opened:
            with waiting(wait):
                ended = await play(task, *opened)
    except DeadlinePassed:
        why = f"the program ran for more than environment.time_limit={time_limit} s"
        ended = Ended("deadline", error=why)
    return ended._replace(metadata={**ended.metadata, **said})
