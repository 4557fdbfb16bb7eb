"""Define teachers, the models for the teacher stream. The stream compares the teacher's next-token
distributions with the policy's distributions. A teacher may read a prompt of its own.

A teacher's model is a `Reference`: another model, the policy's start, a moving average, or the
policy itself. With `show`, the teacher's prompt also holds a hint before the policy's reply. The
policy thereby learns to answer as if it had seen the hint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rlkit.environments import find_environment
from rlkit.episodes.episode import read_opening
from rlkit.errors import DataError
from rlkit.models.chat import encode_prompt
from rlkit.system.copies import copy_value
from rlkit.training.references import ema, frozen, live
from rlkit.types import Message, Policy, Reference, Rollout, reaches

# (rollout, its group) → the hint for the teacher's prompt; None leaves the rollout out
Show = Callable[[Rollout, Sequence[Rollout]], "str | None"]


class Teacher(NamedTuple):
    """Hold the models that teach the policy.

    A subclass may refuse configs (`rlkit.types.ChecksConfig`).
    """

    name: str = "none"
    models: Mapping[str, Reference] = {}  # part of a mixture → its model; "" stands for all parts
    show: Show | None = None  # makes the hint for the teacher's prompt; None: no hint
    word: str = "+teacher.paths.PART=FOLDER"  # the override that names the model of one part


def no_teacher() -> Teacher:
    """Make no teacher. The teacher stream is then not used."""
    return Teacher()


@reaches(path="path", revision="path", paths="path")
def path_teacher(
    *, path: str | None = None, revision: str | None = None, paths: Mapping[str, str] | None = None
) -> Teacher:
    """Make teachers from other models with the policy's vocabulary. There is one model for all
    prompts, or one model for each part of a mixture.

    Args:
      path: a local folder or a hub id.
      revision: the revision of a hub id.
      paths: part of the mixture → folder or hub id; then `path` is None.
    Raises: ValueError unless exactly one of path and paths is given.
    """
    if (path is None) == (not paths):
        raise ValueError(
            "path: give the teacher as teacher.path=FOLDER, or one for each part of a mixture as"
            " +teacher.paths.PART=FOLDER"
        )
    if path is not None:
        return Teacher("path", {"": frozen(path=path, revision=revision, key="teacher.path")})
    return Teacher(
        "path",
        {
            part: frozen(path=own, key=f"teacher.paths.{part}")
            for part, own in (paths or {}).items()
        },
    )


def start_teacher() -> Teacher:
    """Make a teacher with the policy's weights at the start of the run. Training never changes
    these weights."""
    return Teacher("start", {"": frozen()})


def ema_teacher(*, decay: float) -> Teacher:
    """Make a teacher that is a moving average of the policy. After every RL step, `teacher ← decay
    · teacher + (1 - decay) · policy`, with decay in [0, 1)."""
    return Teacher("ema", {"": ema(decay=decay)})


def context_teacher(
    *,
    show: Literal["demonstration", "answer", "sibling"],
    weights: Literal["live", "start", "ema"] = "live",
    decay: float = 0.95,
) -> Teacher:
    """Make the policy its own teacher. The teacher's prompt has an additional text, and the policy
    in training does not see this text.

    Args:
      show: which text the teacher sees. "demonstration" is the last reply of the conversation in
        the task's row. "answer" is the row's gold answer. "sibling" is the first other reply of the
        same group with a score of 1 or more, together with the `feedback` in the rollout's
        metadata. If one of these two is missing, the teacher sees only the other. A rollout with
        nothing to show is left out.
      weights: "live" uses the policy's present weights, "start" its first weights, and "ema" a
        moving average, with `decay` in [0, 1).
    Source: SDFT, arXiv:2601.19897; SDPO, arXiv:2601.20802; OPSD, arXiv:2601.18734.
    """
    model = {"live": live, "start": frozen, "ema": lambda: ema(decay=decay)}[weights]()
    return Teacher(
        "context",
        {"": model},
        {"demonstration": demonstration, "answer": answer, "sibling": sibling}[show],
    )


def demonstration(rollout: Rollout, group: Sequence[Rollout]) -> str | None:
    """Return a hint with the last reply of the conversation in the task's row."""
    replies = [
        m["content"] for m in rollout.task.metadata.get("messages", ()) if m["role"] == "assistant"
    ]
    return (
        f"This is an example of a good response:\n{replies[-1]}\nNow answer with a response of your"
        " own."
        if replies
        else None
    )


def answer(rollout: Rollout, group: Sequence[Rollout]) -> str | None:
    """Return a hint with the gold answer of the task's row."""
    return (
        f"The correct answer is {rollout.task.answer}. Explain how to find it."
        if rollout.task.answer
        else None
    )


def sibling(rollout: Rollout, group: Sequence[Rollout]) -> str | None:
    """Return a hint with another reply of the group, and with feedback on the rollout's own reply.
    The other reply is the first reply with a score of 1 or more. If reply or feedback is missing,
    the hint contains only the other. If both are missing, return None."""
    good = [
        r for r in group if r is not rollout and r.total_reward is not None and r.total_reward >= 1
    ]
    told = [f"Correct solution:\n{good[0].final_content}"] if good else []
    told += (
        [f"Feedback on an earlier attempt:\n{said}"]
        if (said := rollout.metadata.get("feedback"))
        else []
    )
    return "\n\n".join([*told, "Correctly solve the original question."]) if told else None


def build_shown_prompts(
    policy: Policy, rollouts: Sequence[Rollout], show: Show, environment: object
) -> dict[int, tuple[int, list[int]]]:
    """Build the teacher's prompt for each rollout. Rollouts with nothing to show are left out.

    Returns: position of the rollout → (number of tokens in the policy's first prompt, token ids of
      the teacher's prompt).
    """
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    out = {}
    schemas = {}
    for i, rollout in enumerate(rollouts):
        group = groups[rollout.group]
        mine = copy_value(group)  # the user's function may change its arguments
        place = next(k for k, own in enumerate(group) if own is rollout)
        said = show(mine[place], mine) if rollout.steps else None
        if said is None:
            continue
        if rollout.group not in schemas:
            played: Any = find_environment(environment, rollout.task)  # type: ignore[arg-type]
            schemas[rollout.group] = read_opening(rollout.task, played).schemas
        first = rollout.steps[0]
        out[i] = (
            len(first.prompt_ids),
            encode_prompt(policy.renderer, with_hint(first.prompt, said), schemas[rollout.group]),
        )
    return out


def with_hint(messages: Sequence[Message], said: str) -> list[Message]:
    """Return the messages with a text added to the user's last message."""
    out = [*messages]
    at = max((i for i, message in enumerate(out) if message["role"] == "user"), default=None)
    if at is None:
        raise DataError(
            "teacher=context adds its hint to the user's last message, and a first prompt has none;"
            " let the environment begin with a user's message"
        )
    out[at] = {**out[at], "content": f"{out[at]['content']}\n\n{said}"}
    return out
