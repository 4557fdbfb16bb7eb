"""Let a program play an episode (`environment=program`). The program talks to the policy through an
endpoint on loopback."""

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
from rlkit.environments.calling import check_counts
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

ANSWER = "answer.txt"  # name of the answer's file in the program's folder
LONGEST_ANSWER = 1 << 16  # bytes of this file
# fields of a task that hold its answer; a reward can declare more fields
# (`rlkit.rewards.reads_fields`)
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
    """Make an environment in which a program, or a Python function, plays each episode. All its
    requests to the policy are recorded and trained on.

    For each episode, the program runs as a new process in a new working folder. It finds the task
    as JSON ({"id", "messages", "metadata"}) in `RLKIT_TASK` and on standard input. It finds its
    endpoint in OPENAI_BASE_URL and OPENAI_API_KEY, and in ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY.
    Of the run's other variables, it has only PATH and the language. When the episode ends, the
    program ends, together with all its processes. Unless it is confined, it has the rights of the
    run's user, and can read the keys of other programs.

    Args:
      command: the program and its arguments. Names of files are relative to the folder in which the
        run was started.
      function: function of (task, client), instead of a command. It may be plain or async. A plain
        function runs in a thread. If it returns a number, the number is added to the reward. If it
        raises, the episode ends.
      max_turns: number of replies of an episode, at least 1. Further requests are refused, and the
        episode is truncated.
      time_limit: seconds for an episode, > 0, not counting the time of decoding. After it, the
        episode is truncated by "deadline".
      output_kb: largest output of a program in kB, at least 1. A program with more output is ended.
      memory_mb: largest address space of each process of the program in MB, at least 1. None: no
        limit.
      score: with `exit`, an exit status of 0 adds 1 to the reward, and any other status adds 0. The
        reward term `environment` is then 0. With None, nothing is added, and a status other than 0
        is a failure.
      answer: where rewards find the final content. `last_reply` is the last reply. `stdout` is the
        program's standard output, without white space around it; if the time was up it is "".
        `file` is answer.txt in the program's folder, of at most 64 KiB, read when all its processes
        are dead; without the file it is "". `tool:NAME` is the last call of this tool: the text of
        its only argument, or all arguments as JSON; without a call it is "".
      metadata: fields of the task's metadata that the program sees. A field that holds the task's
        answer is refused.
      verify: a command that judges the program's folder when all processes of the episode are dead.
        It also runs if the program's time was up. It writes a number to the descriptor
        RLKIT_REWARD_FD, and this number is added to the reward (see
        `rlkit.extras.programs._verifier.verify`). If it writes no number, the episode has failed.
        If the program is confined, the verifier is confined too, without a network. It needs Linux,
        and `command` instead of `function`.
      verify_time_limit: seconds for a verifier, > 0.
      reward_range: smallest and largest number that a verifier may write.
      dropped_thinking: what to do if the program sends a conversation back without the thinking of
        a reply. With new_row, it is a different conversation and begins a new training row. With
        continue, it continues the same row, and the row keeps the thinking.
      unsupported: what to do with a request with an unsupported setting, for example a JSON format
        or a forced tool. With refuse, the request is refused. With ignore, the setting has no
        effect, and the program must check its answer itself. docs/programs.md has a table of all
        settings.
      variables: further environment variables of the program.
      confined: whether to confine the program and its children. They may then write only the
        program's own folder. They may read the system's programs and libraries, Python, the
        installations of the command's program and of its interpreter, the files of the command, the
        folders of PYTHONPATH in `variables`, the paths in `readable`, and the folder of the
        program's code (see `rlkit.extras.programs._commands.list_code_folders`). They may connect
        to the port of the endpoint over TCP, and have no other network. They may not send signals
        to other processes. Confinement needs Landlock in version 6 (Linux 6.12) and seccomp. With
        `auto`, programs are confined if the machine has both; otherwise a printed line says that
        they are not.
      readable: further files and folders that a confined program may read and run.
      max_programs: largest number of programs alive at the same time, at least 1. None: all
        episodes of a step begin together. The wait for a place is not counted as time of the
        episode. The last bits of its log-probs then depend on when another episode ends.
      parse_calls: function that reads the tool calls from a reply's content.
    Raises: ConfigError unless exactly one of command and function is given, or if the command
      cannot be started, a limit is out of range, or the parser needs the tools' functions.
    """
    _check_choice(command, function, score, answer, metadata, verify, confined)
    _check_settings(time_limit, readable, parse_calls)
    check_counts(
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
    """Play an episode of a program, as the function `Environment.play`. The program's folder exists
    until the verifier is done, but the engine forgets the episode earlier. If the task has its own
    limits, the smaller limit of task and run holds."""
    problem = check(at.task, frozenset())
    if problem:
        raise DataError(f"row {at.task.id}: {problem}")
    limit = time_limit, "environment.time_limit"
    tests = find_hidden_tests(at.task)
    if tests is not None:
        if tests.time_limit is not None:
            limit = min(limit, (tests.time_limit, "task.toml: agent.timeout_sec"))
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
            episode = partial(_play_program, play, *limit, ignore, named)
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
    """Say why a task cannot be played; "" if it can. See `check_task` and `check_hidden`. `awaited`
    is a path in the command that must be among the task's files."""
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
    """Say why the program may not see these fields of a task, or why the task's files cannot be
    copied; "" if all is well. `told` are the fields of the metadata that the program sees."""
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
        # in a data set with columns, the text is None if a row does not have this file
        if not inside or not isinstance(text, str | None):
            return f"its file {name!r:.100} needs a relative path without '..' and a text"
    return ""


def write_files(task: Task, where: str) -> None:
    """Copy the files of a task, `metadata["files"]`, into the folder of its episode. Raises:
    DataError naming the row."""
    files = task.metadata.get("files") or {}
    try:
        if isinstance(files, str):
            shutil.copytree(files, where, symlinks=True, dirs_exist_ok=True)
            os.chmod(where, 0o700)  # because the copy of the folder has the rights of the original
            return
        for name, text in files.items():
            if text is not None:
                path = Path(where, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text.encode())
    except (OSError, ValueError) as error:
        raise DataError(f"row {task.id}: its files cannot be written: {error}") from error


def _with_requests(rollout: Rollout) -> Rollout:
    """Add the numbers of refused and retried requests to the rollout as metrics. If every request
    was refused, the rollout's `error` says so, and the episode has failed, unless a limit ended
    it."""
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
    """Set the final content for rewards, unless `answer` is the last reply."""
    if answer == "file":
        try:
            path = os.path.join(where, ANSWER)
            text = read_plain_file(path, most=LONGEST_ANSWER).decode(errors="replace").strip()
        except OSError:  # without a plain file there is no answer
            text = ""
    elif answer == "stdout":  # unknown if the time was up
        text = rollout.metadata.get("final_content", "")
    elif answer.startswith("tool:"):
        text = answer_by_tool(rollout, answer.removeprefix("tool:"))
    else:
        return rollout
    return rollout._replace(metadata={**rollout.metadata, "final_content": text})


def answer_by_tool(rollout: Rollout, name: str) -> str:
    """Return the arguments of a tool's last call: the text of its only argument, or all arguments
    as JSON. Return "" without a call."""
    made = [call for step in rollout.steps for call in step.tool_calls]
    calls = [call for call in made if call.name == name and not call.error]
    if not calls:
        return ""
    # the steps are in the order of rows, and the numbers of the calls in the order of time
    last = max(calls, key=lambda call: int(call.id.removeprefix("call_")))
    arguments = dict(last.arguments)
    value = next(iter(arguments.values())) if len(arguments) == 1 else arguments
    return value if isinstance(value, str) else json.dumps(value)


async def _play_program(
    play: Callable[..., Awaitable[Ended]],
    time_limit: float,
    key: str,
    ignore: bool,
    named: Any,
    task: Task,
    ask: Ask,
) -> Ended:
    """Play an episode with its own endpoint, within its time limit. With `ignore`, unsupported
    settings of requests have no effect. `key` is the name of the time limit, and `named` is the
    program, for messages."""
    from rlkit.extras.programs.server import open_door

    wait = Wait("the program", named)
    limit = Countdown(time_limit)

    async def reply(*asked: Any, **settings: Any) -> Step:
        with wait.pause(), limit.pause():  # not counted, because the program waits for the policy
            return await ask(*asked, **settings)

    said: dict[str, Any] = {}
    door = open_door(ask._replace(reply=reply), counts=said, ignore=ignore)
    try:
        async with limit.running(), door as opened:
            with waiting(wait):
                ended = await play(task, *opened)
    except DeadlinePassed:
        why = f"the program ran for more than {key}={time_limit} s"
        ended = Ended("deadline", error=why)
    return ended._replace(metadata={**ended.metadata, **said})
