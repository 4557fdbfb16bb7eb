"""Find rows of a task that cannot be played or scored, before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

from rlkit.algorithm import Stream
from rlkit.config.problems.assumptions import assumption_problems
from rlkit.environments import Setting, find_environment
from rlkit.episodes.episode import read_opening
from rlkit.episodes.summary import group_by_part
from rlkit.errors import ConfigError, DataError, refuse_problems
from rlkit.rewards import Reward, RewardError, list_named_rewards, read_declarations, split_tests
from rlkit.rewards import score as score_rollouts
from rlkit.rewards.declarations import truth_problems
from rlkit.sandbox import Sandboxed, require
from rlkit.system.copies import copy_value
from rlkit.system.shared_state import FOLDER, guard_state
from rlkit.system.waiting import MAX_STEP_TIME, limit_waiting
from rlkit.tasks.splits import identify_problem
from rlkit.training.experiment import Experiment
from rlkit.training.schedules import list_phases
from rlkit.training.selfcheck import ROWS, select_first_rows
from rlkit.training.teachers import answer, demonstration
from rlkit.types import Rollout, Split, Splits, Step, Task


def load_tasks(x: Experiment) -> Splits:
    """Load the problems of a run and check the rows. Every row's truth must be readable. The
    verifier and the reward of every phase are tried on gold answers.

    Test problems are loaded if `evaluation.n` is above 0. Validation problems are loaded if
    `evaluation.every` is also above 0.
    Raises: DataError; ConfigError. If a split has no problems, the message names the setting to
    change.
    """
    # the checks call the user's rewards and environments, which may change state or hang
    with (
        guard_state(x.task.load, kinds=[FOLDER]),
        limit_waiting(x.trainer.max_step_time, MAX_STEP_TIME, lambda: ""),
    ):
        return _check_tasks(x)


def _check_tasks(x: Experiment) -> Splits:
    train = x.task(split="train")
    if not train:
        raise ConfigError("the task has no train problems; give it some")
    check_ids(train)
    check_truths(train, x.evaluation.reward, x.environment)
    check_verifier(train, x.evaluation.reward, x.reward)
    validation = load_split(x, "validation") if x.evaluation.n and x.evaluation.every else []
    test = load_split(x, "test") if x.evaluation.n else []
    for phase in list_phases(x).values():
        rewarded = phase.algorithm.streams.get("reward", Stream())
        # without this stream, the reward is measured but not trained on
        if "reward" in phase.algorithm.streams or not phase.algorithm.streams:
            own = [task for task in train if rewarded.of(task.part)]
            check_truths(own, phase.reward, x.environment)
            check_reward(own, phase.reward, x.environment)
        refuse_problems(assumption_problems(phase, train))
        check_streams(train, phase)
    check_tools(train, x.environment)
    return Splits(train, validation, test)


def check_ids(tasks: Sequence[Task]) -> None:
    """Raise DataError if two problems have one id. The samplers and the record know a problem by
    its id."""
    first: dict[tuple[str, str], Task] = {}
    for task in tasks:
        other = first.setdefault((task.part, task.id), task)
        if other is not task and identify_problem(other) != identify_problem(task):
            raise DataError(
                f"two different problems have the id {task.id!r}; give each row an id of its own,"
                " or leave out task.fields.id"
            )


def load_split(x: Experiment, split: Split) -> Sequence[Task]:
    """Load the first `evaluation.n` problems of a split. Check that their truths can be read, and
    try the verifier. Raises DataError, ConfigError."""
    with guard_state(x.task.load, kinds=[FOLDER]):
        tasks = x.task(split=split)[: x.evaluation.n]
    if not tasks:
        instead = {
            "validation": "set task.validation above 0, or train with evaluation.every=0",
            "test": "set task.held_out above 0, or train with evaluation.n=0",
        }
        raise ConfigError(f"the task has no {split} problems; {instead.get(split, 'give it some')}")
    check_truths(tasks, x.evaluation.reward, x.environment)
    check_verifier(tasks, x.evaluation.reward, x.reward)
    return tasks


def _is_judged(name: str, rewards: Sequence[Reward | None]) -> bool:
    """Return whether a reward named in the rows is marked `no_gold`."""
    fns = []
    for reward in rewards:
        for term_name, term in reward.terms.items() if reward else ():
            known = list_named_rewards(term.fn)
            if name in known:
                fns.append(known[name])
            elif reward and name in (term_name, reward.name):
                fns.append(term.fn)
    return any(read_declarations(fn).no_gold for fn in fns)


def check_verifier(tasks: Sequence[Task], reward: Reward, training: Reward | None = None) -> None:
    """Check on the first rows that the verifier scores a gold answer with at least 1, and an empty
    answer below 1. A score is the total reward, as in an evaluation. Rows with a reward marked
    `no_gold` are skipped, because there is no gold answer. The mark counts on the function in
    `reward` and on the function in `training`.

    For programs, the tests of every row are read.
    Raises: DataError naming the row, for a test that cannot be judged outside the program and for a
      `correct_from` that is no number.
    """
    for task in tasks:
        least = task.metadata.get("correct_from") or 0.0
        if not isinstance(least, int | float):
            raise DataError(f"row {task.id}: its correct_from is {least!r:.100}; give a number")
        if task.reward == "code_exec":
            split_tests(task)
    judged = {
        name
        for name in dict.fromkeys(task.reward for task in tasks)
        if _is_judged(name, (reward, training))
    }
    for task in select_first_rows([task for task in tasks if task.reward not in judged], ROWS):
        gold, empty = (_answer_task(task, text) for text in (task.answer, ""))
        scores = [r.total_reward for r in score_rollouts([gold, empty], reward)]
        if scores[0] is None or scores[0] < 1:
            raise DataError(
                f"row {task.id}: the gold answer '{task.answer[:80]}' scores {scores[0]} with"
                f" reward '{task.reward}', not 1; mend the row's answer, or name a reward that can"
                " score it"
            )
        if scores[1] is not None and scores[1] >= 1:
            raise DataError(
                f"row {task.id}: an empty answer scores {scores[1]} with reward '{task.reward}'; it"
                " must not count as right"
            )


def check_truths(
    tasks: Sequence[Task],
    reward: Reward,
    environment: Setting,
) -> None:
    """Check every row's truth and environment. Each term of the reward must be able to read the
    row's truth. Otherwise the row would silently be left out of every step. Terms of weight 0 are
    only logged, so they are not checked. The environment must be able to play the row
    (`Environment.check`).

    Raises: DataError naming the first faulty row, and the number of further faulty rows.
    """
    fns = [term.fn for term in reward.terms.values()]
    fns += [own for fn in fns for own in list_named_rewards(fn).values()]
    read = {field for fn in fns for field in read_declarations(fn).fields}
    for task in tasks:
        check = find_environment(environment, task).check
        problem = check(task, read) if check else ""
        if problem:
            raise DataError(f"row {task.id}: {problem}")
    asked = [truth_problems(term.fn, tasks) for term in reward.terms.values() if term.weight]
    found = [(task, said) for task, *said in zip(tasks, *asked, strict=True) if any(said)]
    if found:
        task, said = found[0]
        more = f" ({len(found) - 1} more rows are like it)" if len(found) > 1 else ""
        raise DataError(
            f"row {task.id}: the gold answer '{task.answer[:80]}' of reward '{task.reward}'"
            f" {next(filter(None, said))}{more}"
        )


def check_streams(tasks: Sequence[Task], x: Experiment) -> None:
    """Check that the rows hold the data needed by the algorithm's streams. Imitation needs
    conversations. A teacher needs the text shown to it, and every part of a mixture needs a
    teacher. Raises: DataError naming the row; ConfigError if a stream names an unknown part."""
    streams = x.algorithm.streams
    teacher = x.teacher
    for name, stream in streams.items():
        known = {task.part for task in tasks}
        odd = [
            part
            for part in stream.parts or ()
            if not any(Stream(parts=[part]).of(own) for own in known)
        ]
        if odd:
            there = ", ".join(sorted(known - {""})) or "none, since task is no mixture"
            raise ConfigError(
                f"algorithm.streams.{name}.parts: there is no part {odd[0]!r} of the task; there"
                f" are: {there}"
            )
    demonstrates = "imitation" in streams and streams["imitation"].mask == "demonstrations"
    mine = [task for task in tasks if "imitation" in streams and streams["imitation"].of(task.part)]
    silent = [task for task in mine if "messages" not in task.metadata]
    if demonstrates and silent:
        raise DataError(
            f"row {silent[0].id}: holds no conversation, and"
            " algorithm.streams.imitation.mask=demonstrations learns from them"
        )
    if "teacher" not in streams:
        return
    tasks = [task for task in tasks if streams["teacher"].of(task.part)]
    untaught = [task for task in tasks if task.part not in teacher.models]
    if untaught and "" not in teacher.models:
        task = untaught[0]
        key = teacher.word.lstrip("+").partition(".PART")[0]
        raise DataError(
            f"row {task.id}: its part {task.part!r} has no teacher; {key} has those of"
            f" {', '.join(teacher.models)}, so set"
            f" {teacher.word.replace('PART', task.part or 'PART')}"
        )
    shown: dict[Any, str] = {demonstration: "a conversation", answer: "an answer"}
    reads = shown.get(teacher.show)
    if (
        reads
        and teacher.show
        and not any(teacher.show(Rollout(copy_value(task), ()), ()) for task in tasks)
    ):
        raise DataError(
            f"row {tasks[0].id}: no row holds {reads}, which teacher.show={teacher.show.__name__}"
            " shows to the teacher"
        )


def check_reward(
    tasks: Sequence[Task],
    reward: Reward,
    environment: Setting | None = None,
) -> None:
    """Check that the training reward runs. For every part of a mixture, the reward must be able to
    score the gold answer of at least one of the first rows.

    A reward on the end state of a session gets the state at the session's beginning. A broken
    reward is found here, before a model is loaded. Raises: ConfigError if a term raises, or if
    nothing can be scored.
    """
    gold = [_answer_task(task, task.answer) for task in select_first_rows(tasks, ROWS)]
    if environment is not None:
        gold = [
            r._replace(state=read_opening(r.task, find_environment(environment, r.task)).state)
            for r in gold
        ]
    try:
        scored = score_rollouts(gold, reward)
    except RewardError as error:
        raise ConfigError(f"reward={reward.name}: {error}") from error
    for own in (group_by_part(scored) or {"": scored}).values():
        if all(r.reward is None for r in own):
            raise ConfigError(
                f"reward={reward.name}: it can score none of the first {len(own)} rows (the first"
                f" is {own[0].task.id}); choose a reward that fits the task, or reward=by_task"
            )


def check_tools(tasks: Sequence[Task], environment: Setting) -> None:
    """Check that tools for running the policy's code get the isolation required by their sandbox,
    in every environment named by the rows.

    Raises: ConfigError, before a model is loaded.
    """
    for task in {task.environment: task for task in tasks}.values():
        for tool in read_opening(task, find_environment(environment, task)).tools.values():
            owner = tool.__self__ if isinstance(tool, MethodType) else tool
            if isinstance(owner, Sandboxed):
                require(owner.sandbox)


def _answer_task(task: Task, text: str) -> Rollout:
    step = Step(
        prompt=task.messages,
        prompt_ids=(),
        response_ids=(),
        logprobs=(),
        finish_reason="stop",
        content=text,
    )
    return Rollout(task, (step,))
