"""Every contract of rlkit on one page: the records of a run, and the functions to swap.
Read this first.

    Task ──▶ Environment ──▶ Rollout ──▶ Batch ──▶ Algorithm ──▶ optimiser ──▶ Reference update

Shape letters, used everywhere: N rollouts (prompts × group size), B rows (sequences; a rollout may
fill several), T positions of a padded row, V vocabulary. A mask is True where a token counts. All
`[B, T]` tensors are aligned with `ids`: entry t of a log-prob belongs to token t given the tokens
before it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypedDict,
    TypeVar,
    runtime_checkable,
)

if TYPE_CHECKING:  # this page costs nothing to import
    import torch
    from torch import Tensor

    PerRollout: TypeAlias = Tensor  # [N], floating point
    PerToken: TypeAlias = Tensor  # [B, T], floating point
    RolloutMask: TypeAlias = Tensor  # [N], bool
    TokenMask: TypeAlias = Tensor  # [B, T], bool
    Value = TypeVar("Value")
    OrMeasured: TypeAlias = "Value | tuple[Value, Metrics]"  # alone, or with metrics

# ------------------------------------------------------------------------------------ conversations


class Message(TypedDict, total=False):
    """One chat message, in the form of chat templates."""

    role: str  # system, user, assistant or tool
    content: str
    reasoning_content: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    name: str


Messages = Sequence[Message]


class ToolCall(NamedTuple):
    """A call by the policy. `error` says why the text is not a call; then `arguments` is empty."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    error: str = ""


class ToolResult(NamedTuple):
    """The result of a call. The policy reads `content`; `ok` is False for every kind of failure."""

    id: str
    name: str
    content: str
    ok: bool
    seconds: float = 0.0

    @property
    def message(self) -> Message:
        """The message that answers the call."""
        return {
            "role": "tool",
            "tool_call_id": self.id,
            "name": self.name,
            "content": self.content,
        }


class Task(NamedTuple):
    """One row of a dataset. It names its reward and its environment, so that a mixture scores each
    row its own way."""

    id: str
    messages: tuple[Message, ...]
    answer: str = ""
    reward: str = "numeric"
    environment: str = "tool_use"
    metadata: Mapping[str, Any] = {}
    part: str = ""  # of a mixture: the task that the row is from


# Evaluations during a run use validation problems. Test problems are for the figures before and
# after it, and decide nothing.
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Splits(NamedTuple):
    """The problems of a run. Without evaluations there are no validation or test problems."""

    train: Sequence[Task]
    validation: Sequence[Task] = ()
    test: Sequence[Task] = ()


# ----------------------------------------------------------------------------------------- episodes

Status = Literal["terminated", "truncated"]
# How a reply ended; the first that applies: cut off by a limit of tokens; its thinking was closed
# by the budget and it ended by itself; it ended with tool calls, readable or not; it ended by
# itself. There is no "error": an engine that fails ends the run, and an unreadable call is
# answered.
FinishReason = Literal["length", "budget", "tool", "stop"]
THINK_TAGS = ("<think>", "</think>")


class SamplingParams(NamedTuple):
    """How to sample a completion, and when an episode rejoins the decoding after a wait.

    If the environment answers without waiting, the episode joins the next round of decoding. After
    a wait (a tool in a thread, a request over the network) it joins
      rounds   exactly `admission_rounds` decoded tokens after the reply; the decoder waits for a
               late answer. A run repeats itself.
      barrier  before anything else is decoded. A run repeats itself, slowly.
      free     as soon as the answer is there. This is the fastest. The clock decides which rows
               share a batch, and so the last bits.
    """

    max_new_tokens: int = 256  # of one completion, > 0
    # divides the logits, >= 0; 0 is greedy, with the log-probs of temperature 1
    temperature: float = 1.0
    top_p: float = 1.0  # in (0, 1]; 1 cuts nothing
    top_k: int = 0  # >= 0; 0 cuts nothing
    # >= 0, of one completion; then the engine writes the closing tag. None: no limit
    max_thinking_tokens: int | None = None
    admission: Literal["rounds", "barrier", "free"] = "rounds"
    admission_rounds: int = 16  # > 0, in decoded tokens per slot


class Generation(NamedTuple):
    """One reply: the token ids as sampled (end-of-turn token included) and their log-probs after
    temperature.

    If a thinking budget closed the thinking, the engine itself wrote the tokens at the positions
    `forced`. The policy reads them, but nothing is learned from them. Their log-probs are 0,
    because the engine had no choice.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    forced: tuple[int, ...] = ()
    # spans: first position, version of the weights for the tokens from there on
    versions: tuple[tuple[int, int], ...] = ()


class Step(NamedTuple):
    """One turn of an episode: the new messages, the policy's reply, and the results of its tool
    calls."""

    prompt: tuple[Message, ...]  # the messages new in this turn
    # the context of the reply, without the `kept` tokens at its start
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    # of response_ids, by the sampler, after temperature; 0 where forced
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    thinking: str = ""
    content: str = ""
    thinking_closed: bool = True  # False: a thinking block was opened and never closed
    tool_calls: tuple[ToolCall, ...] = ()
    tool_results: tuple[ToolResult, ...] = ()
    reward: float | None = None
    # positions in response_ids written by the thinking budget: neither sampled nor trained
    forced: tuple[int, ...] = ()
    # number of exchanges (a reply and the messages after it) dropped from the start of the context
    dropped: int = 0
    # spans: first position in response_ids, number of RL steps behind the weights
    versions: tuple[tuple[int, int], ...] = ()
    # number of tokens at the context's start equal to the previous step's context and reply; see
    # Rollout.context
    kept: int = 0

    @property
    def prompt_length(self) -> int:
        """Tokens of the whole context of the reply."""
        return self.kept + len(self.prompt_ids)

    @property
    def sampled(self) -> list[int]:
        """Sampled positions in response_ids."""
        return [i for i in range(len(self.response_ids)) if i not in self.forced]


class Rollout(NamedTuple):
    """A whole episode. `reward` is None if it cannot be scored; `status` keeps terminated and
    truncated apart."""

    task: Task
    steps: tuple[Step, ...]
    status: Status = "terminated"
    # why it was truncated: length, context, steps, deadline, environment (a limit of its own) or
    # error (it failed)
    truncation: str = ""
    group: int = 0  # position of the prompt in the batch: rollouts of one group share it
    sample: int = 0  # number of this sample in its group
    reward: float | None = None
    rewards: Mapping[str, float | None] = {}  # named components
    metadata: Mapping[str, Any] = {}  # from its environment
    # component → origin of its score: ok, wrong, unparseable, timeout or error
    statuses: Mapping[str, str] = {}
    # reward/TERM/NAME and aggregator/NAME → further figures of the reward's functions; program/NAME
    # → counts of a program's endpoint
    metrics: Mapping[str, float] = {}
    # reward of each step by the environment alone; () if no term of the reward added to it
    environment_rewards: tuple[float | None, ...] = ()
    # reward of the greedy rollout of its prompt, never trained on; None: it cannot be scored
    greedy_reward: float | None = None
    greedy_played: bool = False  # whether there was one
    player: int | None = None  # in a game of two: 0 moves first, 1 second
    error: str = ""  # why its environment failed, or its program was ended
    # the session's state at its end, as plain values; empty if it tells none
    state: Mapping[str, Any] = {}

    def __repr__(self) -> str:
        from rlkit.display import format_rollout

        return format_rollout(self)

    def _repr_html_(self) -> str:
        from rlkit.display import render_rollout

        return render_rollout(self)

    def add(self, step: Step) -> Rollout:
        """Add one turn. If the step holds its whole context, store only the difference from the
        step before."""
        if self.steps and not step.kept:
            kept = agreement(self.context(-1) + self.steps[-1].response_ids, step.prompt_ids)
            step = step._replace(prompt_ids=step.prompt_ids[kept:], kept=kept)
        return self._replace(steps=(*self.steps, step))

    def context(self, index: int) -> tuple[int, ...]:
        """All token ids of a reply's context. Raises: IndexError if there is no such step."""
        *earlier, step = self.steps[: range(len(self.steps))[index] + 1]
        ids: list[int] = []
        for before in earlier:
            ids[before.kept :] = before.prompt_ids + before.response_ids
        return (*ids[: step.kept], *step.prompt_ids)

    @property
    def total_reward(self) -> float | None:
        """`reward` plus the rewards of the steps: the reward for training."""
        return (
            None
            if self.reward is None
            else self.reward + sum(step.reward or 0.0 for step in self.steps)
        )

    @property
    def final_content(self) -> str:
        """The text to read an answer from: `metadata["final_content"]` if the environment sets it,
        else the content of the last reply, thinking excluded."""
        last = self.steps[-1].content if self.steps else ""
        return self.metadata.get("final_content", last)

    @property
    def response_length(self) -> int:
        """Sampled tokens of all steps together, without the text of a thinking budget."""
        return sum(len(step.response_ids) - len(step.forced) for step in self.steps)

    @property
    def conversation(self) -> list[Message]:
        """The episode as chat messages, thinking included, calls structured, results with the
        call's id."""
        return self.history(len(self.steps), thinking=True)

    def history(self, steps: int, *, thinking: bool, dropped: int = 0) -> list[Message]:
        """The messages of the first `steps` steps, with or without the policy's thinking.

        Results of a step's calls belong to their step here; in the token stream they are part of
        the next prompt. `dropped` is the number of oldest exchanges to leave out, each a reply and
        the messages after it. The first prompt stays.
        """
        messages: list[Message] = [*self.steps[0].prompt] if self.steps[:steps] else []
        for index, step in enumerate(self.steps[dropped:steps], dropped):
            if index > dropped:
                messages += [m for m in step.prompt if m["role"] != "tool"]
            reply: Message = {"role": "assistant", "content": step.content}
            if thinking and step.thinking:
                reply["reasoning_content"] = step.thinking
            if step.tool_calls:
                reply["tool_calls"] = [
                    {
                        "id": c.id,
                        "type": "function",
                        "function": {"name": c.name, "arguments": dict(c.arguments)},
                    }
                    for c in step.tool_calls
                ]
            messages.append(reply)
            messages += [result.message for result in step.tool_results]
        return messages


def agreement(a: Sequence[int], b: Sequence[int]) -> int:
    """Count the equal token ids at the start of two sequences of one type."""
    if a == b[: len(a)]:
        return len(a)
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


# ------------------------------------------------------------------------------------------ tensors


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Rollouts as right-padded tensors, as they were sampled.

    The type of a batch says how much has been computed. Each record below has the fields of the
    ones before it, so a function of token ids takes them all:

        Batch ── score ──▶ Scored ── weigh ──▶ Weighted ── some rows, shares ──▶ Minibatch

    A quantity for some algorithms only is None for the others.
    """

    ids: Tensor  # [B, T] int64
    attention_mask: Tensor  # [B, T] bool, True on real tokens
    response_mask: Tensor  # [B, T] bool, True on the sampled tokens to train on
    sampled_mask: Tensor  # [B, T] bool, True on all sampled tokens
    rollout_ids: Tensor  # [B] int64, the rollout of a row (0 … N-1)
    step_ids: Tensor  # [B, T] int64, the step of a token in its rollout
    rewards: Tensor  # [N] float, nan if it cannot be scored
    group_ids: Tensor  # [N] int64
    truncated: Tensor  # [N] bool, cut off by a limit instead of ended
    lengths: Tensor  # [N] int64, sampled tokens of a rollout, trained on or not
    reply_lengths: Tensor  # [N] int64, sampled tokens of a rollout's longest reply
    # [B, T] float, a step's reward at its last sampled token, the episode's at the last of all
    token_rewards: Tensor
    logprobs_sampler: Tensor  # [B, T] by the sampling engine
    # [B, T] int64, RL steps done when the weights behind a token were loaded; 0 elsewhere
    versions: Tensor
    # reward component → [N] float, nan if it cannot be scored
    components: Mapping[str, Tensor] = field(default_factory=dict)
    # of each of the N rollouts: its task's metadata, and its own on top
    metadata: tuple[Mapping[str, Any], ...] = ()
    # PART/NAME → [], [N] or [B, T]: figures of parts from before the update, or from weighing it
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    # [N] reward of one greedy rollout of the prompt, nan if it has none; None: none was played
    greedy_rewards: Tensor | None = None
    # [B, T] bool, answers of tools, without the template around them; None: no stream asks for it
    observed_mask: Tensor | None = None

    @property
    def quantities(self) -> dict[str, Any]:
        """Name → quantity, for the parts of an algorithm."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def whole(self) -> Self:
        """The batch with every sampled token in its response_mask, even of rollouts left out of
        training."""
        return replace(self, response_mask=self.sampled_mask)


@dataclass(frozen=True, kw_only=True, eq=False)
class Scored(Batch):
    """A batch with the models' figures on its tokens before the update."""

    # [B, T] by the trainer; None: the only update of the step finds them, or `old_share` does
    logprobs_old: Tensor | None
    # [B, T] in 0 … 1: position of "old" between sampler (0) and policy (1); None: it is
    # logprobs_old
    old_share: Tensor | None = None
    entropy_old: Tensor | None = None  # [B, T] in nats, by the trainer
    values: Tensor | None = None  # [B, T] by the critic, of the state before each sampled token
    logprobs_ref: Tensor | None = None  # [B, T] by the reference
    full_kl: Tensor | None = None  # [B, T] in nats, exact over the vocabulary, policy to reference


@dataclass(frozen=True, kw_only=True, eq=False)
class Weighted(Scored):
    """A scored batch with the factors on the loss of each token; they are fixed before the
    split."""

    advantages: Tensor  # [B, T]
    scale: Tensor  # [B, T] off-policy correction × token filter
    returns: Tensor | None = None  # [B, T] the critic's target
    # [B, T] share of the step's tokens with a higher covariance of advantage and log-prob
    covariance_rank: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Minibatch(Weighted):
    """The rows of one update."""

    weights: Tensor  # [B, T] share of each token in the loss; sums to 1 over the update


class TokenLogprobs(NamedTuple):
    """Figures of the model in training on the sampled tokens; everything [B, T], 0 outside the
    response mask."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None = None  # by the critic, if there is one
    full_kl: Tensor | None = None  # to the reference, if the KL is exact


# --------------------------------------------------------------------------------- extension points
#
# Stateless parts are functions. Their positional parameters are quantities, passed by name. Their
# keyword-only parameters are hyperparameters, set by the config. A part may ask for any of these
# quantities:

QUANTITIES: Mapping[str, str] = {
    "rewards": "[N] task reward, nan where it cannot be scored",
    "group_ids": "[N] which prompt a rollout belongs to",
    "truncated": "[N] True where a rollout was cut off by a limit",
    "lengths": "[N] sampled tokens of a rollout",
    "reply_lengths": "[N] sampled tokens of a rollout's longest reply",
    "greedy_rewards": (
        "[N] reward of one greedy rollout of the same prompt, which is played if the advantage asks"
        " for this"
    ),
    "token_rewards": (
        "[B, T] a step's reward at its last sampled token, the episode's at the last; a KL in the"
        " reward is in it"
    ),
    "rollout_ids": "[B] which rollout a row belongs to",
    "step_ids": "[B, T] which step of its rollout a token belongs to",
    "response_mask": "[B, T] True on sampled tokens",
    "advantages": "[B, T] a constant",
    "logprobs": "[B, T] of the policy being trained; carries the gradient",
    "logprobs_old": "[B, T] of the policy before the update",
    "logprobs_ref": "[B, T] of the reference, on the same tokens",
    "logprobs_sampler": "[B, T] of the engine that sampled",
    "ratio": "[B, T] policy over old policy; carries the gradient",
    "entropy": "[B, T] entropy of the policy's next-token distribution, in nats",
    "entropy_old": "[B, T] the same before the update",
    "full_kl": (
        "[B, T] exact KL(policy ‖ reference) over the vocabulary at each sampled token; carries the"
        " gradient"
    ),
    "values": (
        "[B, T] the critic's value of the state before each sampled token; in the value loss it"
        " carries the gradient"
    ),
    "values_old": "[B, T] the same before the update (value loss only)",
    "returns": "[B, T] what the critic learns to predict, a constant (value loss only)",
    "versions": (
        "[B, T] RL steps done when the weights were loaded that sampled a token, 0 elsewhere: their"
        " difference is the staleness"
    ),
    "covariance_rank": (
        "[B, T] share of the step's tokens with a higher covariance of advantage and old log-prob"
        " (policy loss only)"
    ),
    "components": (
        "a mapping: name of a reward term → [N] its score, nan where it cannot be scored; shadow"
        " terms too"
    ),
    "metadata": (
        "a tuple of N mappings: what a rollout's task carries as metadata, and what its episode"
        " added, which wins; else its `player` and `state`"
    ),
}


def plain(part: Any) -> Any:
    """The function of a part, without the partials around it."""
    while isinstance(part, functools.partial):
        part = part.func
    return part


def bound(part: Any) -> Mapping[str, Any]:
    """The keyword arguments bound to a part by a config; none for a plain function."""
    return part.keywords if isinstance(part, functools.partial) else {}


def is_record(value: Any) -> bool:
    """Whether a value, or a class, is a NamedTuple."""
    return hasattr(value, "_fields")


def missing(part: Any, protocol: type) -> list[str]:
    """The methods of a Protocol missing from a value: all of them for a class, because it is not
    an instance yet."""
    return [
        name
        for name in vars(protocol)
        if not name.startswith("_")
        and (isinstance(part, type) or not callable(getattr(part, name, None)))
    ]


# Declarations of a part, for the checks before a run (rlkit.config.problems). These lists are
# closed: an unknown word is refused in the decorator. A part without declarations assumes nothing
# and guarantees nothing.

Guarantee = Literal["binary", "non_negative", "raw"]
GUARANTEES: Mapping[str, str] = {
    "binary": "every score is 0 or 1, so it is non_negative and raw too",
    "non_negative": "no score is below 0",
    "raw": (
        "a score depends on its own rollout alone: no statistic of other rollouts has shifted or"
        " scaled it"
    ),
}
Assumption = Literal[
    "binary_rewards",
    "non_negative_rewards",
    "raw_rewards",
    "reply_budget",
    "episode_budget",
    "same_vocabulary",
]
ASSUMPTIONS: Mapping[str, str] = {
    "binary_rewards": "that rewards are 0 or 1",
    "non_negative_rewards": "that no reward is below 0",
    "raw_rewards": "rewards on the scale of their verifier",
    "reply_budget": "that its `limit` is one of the tokens of a reply",
    "episode_budget": "that its `limit` is one of the tokens of a whole episode",
    "same_vocabulary": "the policy's tokenizer, so that an id means the same to both models",
}
Vanishing = Literal["without_advantages", "at_reference"]
VANISHING: Mapping[str, str] = {
    "without_advantages": "a policy loss: its gradient is exactly 0 on tokens whose advantage is 0",
    "at_reference": (
        "a KL estimator: it and its gradient are exactly 0 where the reference is the policy"
    ),
}
Part = TypeVar("Part", bound=Callable[..., Any])


def assumes(*words: Assumption) -> Callable[[Part], Part]:
    """Declare an assumption of a part: `@assumes("binary_rewards")`. A composition that breaks it
    is refused before the run."""
    return _declared("assumes", words, ASSUMPTIONS, {})


def gives(*words: Guarantee, **where: Any) -> Callable[[Part], Part]:
    """Declare a property of a reward function's scores: `@gives("binary", correct=1, wrong=0)`.

    With `where`, it holds only while the function's hyperparameters have these values. Several of
    these decorators add up; `@gives()` promises none of the words.
    """
    return _declared("gives", words, GUARANTEES, where)


def keeps(*words: Guarantee) -> Callable[[Part], Part]:
    """Declare the words that still hold after a part has changed rewards. The part is an aggregator
    (they must hold for all components) or an overlong rule."""
    return _declared("keeps", words, GUARANTEES, {})


def vanishes(*words: Vanishing, **where: Any) -> Callable[[Part], Part]:
    """Declare where the gradient of a part is exactly 0: `@vanishes("without_advantages",
    penalty=0)`.

    If all parts of an update declare it, the update is skipped there; a part without the
    declaration is never skipped. With `where`, it holds only while the part's hyperparameters have
    these values. A wrapper made with `functools.wraps` declares for itself, because it may add a
    term.
    """
    return _declared("vanishes", words, VANISHING, where)


def stateful(part: Part) -> Part:
    """Declare that a function's result depends on its earlier calls: a reward with a counter, an
    environment with a memory of episodes.

    With asynchrony=overlap a second process makes its calls, with a state of its own, so the
    composition is refused before the run.
    """
    setattr(part, "__stateful__", True)  # noqa: B010  a class can be marked too
    return part


def is_stateful(part: Any) -> bool:
    """Whether a part is marked `@stateful`: a function, also in a partial or a wrapper, a class,
    its instance or its method."""
    part = plain(part)
    inner = inspect.unwrap(part) if callable(part) else part
    owner = part.__self__ if inspect.ismethod(part) else None
    return any(getattr(own, "__stateful__", False) for own in (part, inner, owner))


def ranges(**limits: tuple[float | None, float | None]) -> Callable[[Part], Part]:
    """Declare the smallest and the largest value of a part's numbers, None for no limit:
    `@ranges(rank=(0, None))`.

    A config with a value outside its range is refused before the run.
    """

    def mark(part: Part) -> Part:
        unknown = limits.keys() - inspect.signature(part).parameters
        if unknown:
            raise ValueError(
                f"@ranges({min(unknown)}=…): {getattr(part, '__name__', part)} has no such number"
            )
        setattr(part, "__ranges__", limits)  # noqa: B010  where a NamedTuple has it too
        return part

    return mark


# Within the reach of a parameter's value, as the end of a sentence.
REACHES = {
    "program": "a program",
    "address": "an address",
    "path": "a path",
    "import": "an import",
    "variable": "an environment variable",
    "outside": "what the sandbox keeps out",
    "processor": "the processor without a limit",
    # the function is called with the policy's arguments
    "calls": "any function that the policy calls",
}


def reaches(**what: str) -> Callable[[Part], Part]:
    """Declare how far the value of a parameter can reach: `@reaches(command="program",
    cache="path")`.

    A folder from a stranger may not set it without trust=true. The words are in `REACHES`.
    """
    unknown = [word for word in what.values() if word not in REACHES]
    if unknown:
        raise ValueError(
            f"@reaches: there is no word '{unknown[0]}'; there are: {', '.join(REACHES)}"
        )
    return _with_verdicts("reaches", what)


def safe(*names: str) -> Callable[[Part], Part]:
    """Declare parameters of a part with harmless values: `@safe("name", "tags")`. A folder from a
    stranger may set them.

    Numbers, booleans, Literals and parts are safe by their type. A text, a sequence, a mapping and
    a function need this word.
    """
    return _with_verdicts("safe", dict.fromkeys(names, ""))


def _with_verdicts(kind: str, what: Mapping[str, str]) -> Callable[[Part], Part]:
    def mark(part: Part) -> Part:
        unknown = what.keys() - inspect.signature(part).parameters
        if unknown:
            raise ValueError(
                f"@{kind}: {getattr(part, '__name__', part)} has no parameter '{min(unknown)}'"
            )
        known = {**vars(part).get("__verdicts__", {}), **what}
        setattr(part, "__verdicts__", known)  # noqa: B010  where a NamedTuple has it too
        return part

    return mark


class Clip(NamedTuple):
    """Tokens touched by the clip of a loss: functions of the loss's own quantities and numbers →
    [B, T] bool. None: no token.

    held     the token has an advantage, and its own log-prob gets no gradient
    capped   the token's weight is bounded, and its gradient stays
    """

    held: Callable[..., Tensor] | None = None
    capped: Callable[..., Tensor] | None = None


def clips(
    *, held: Callable[..., Tensor] | None = None, capped: Callable[..., Tensor] | None = None
) -> Callable[[Any], Any]:
    """Declare how the clip of a policy loss touches a token, for the metrics clip/*: `loss.clip` is
    a `Clip`.

    Args:
      held, capped: functions of quantities by name, as the loss, and of all its keyword-only
        numbers.

    >>> import torch
    >>> @clips(held=lambda ratio, *, width: ratio > 1 + width)
    ... def mine(ratio, advantages, *, width=0.2): ...
    >>> mine.clip.held(torch.tensor([1.1, 1.3]), width=0.2)
    tensor([False,  True])
    """

    def mark(loss: Any) -> Any:
        loss.clip = Clip(held, capped)
        return loss

    return mark


def _declared(
    kind: str, words: Sequence[str], known: Mapping[str, str], where: Mapping[str, Any]
) -> Callable[[Part], Part]:
    unknown = [word for word in words if word not in known]
    if unknown:
        raise ValueError(
            f"@{kind}('{unknown[0]}'): there is no such word; there are: {', '.join(known)}"
        )

    def mark(part: Part) -> Part:
        name = f"__{kind}__"
        earlier = () if kind == "vanishes" and _is_copied(part, name) else getattr(part, name, ())
        setattr(part, name, (*earlier, (tuple(words), dict(where))))
        return part

    return mark


def _is_copied(part: Any, name: str) -> bool:
    """Whether a wrapper's attribute is only a copy by `functools.wraps`."""
    if not hasattr(part, "__wrapped__"):
        return False
    return getattr(part, name, None) is getattr(part.__wrapped__, name, None)


def declarations(
    part: Any, kind: Literal["assumes", "gives", "keeps", "vanishes"]
) -> frozenset[str] | None:
    """The declared words of a part, with its hyperparameters as they are bound; None if it declares
    nothing of this kind.

    A `functools.partial` declares the same as its function. So does a wrapper made with
    `functools.wraps`, except for `vanishes`.
    """
    bound: dict[str, Any] = {}
    while isinstance(part, functools.partial):
        bound = {**part.keywords, **bound}
        part = part.func
    plain: Any
    if kind == "vanishes":
        plain = None if _is_copied(part, "__vanishes__") else part
    else:
        plain = (
            inspect.unwrap(part, stop=lambda f: hasattr(f, f"__{kind}__"))
            if callable(part)
            else part
        )
    made = getattr(plain, f"__{kind}__", None)
    if made is None:
        return None
    defaults = {p.name: p.default for p in inspect.signature(plain).parameters.values()}
    holds = [
        words
        for words, where in made
        if all((defaults | bound).get(key) == value for key, value in where.items())
    ]
    found = {word for words in holds for word in words}
    return frozenset(found | ({"non_negative", "raw"} if "binary" in found else set()))


class Estimate(NamedTuple):
    """Result of an advantage with a critic: advantages, and returns as the critic's target; both
    [B, T]."""

    advantages: Tensor
    returns: Tensor


# mypy checks the return type of the shipped parts in rlkit.functional and rlkit.rewards, with and
# without metrics (`PolicyLossFn[...]`). A part chooses its quantities itself, and Python has no
# type for "some of these names". So the composition checks each name. A dry run on fake data checks
# that each quantity is there when the part is called. Every call checks the shape, the kind of
# numbers and the device of the result (`rlkit.algorithm.call_part`).
Q = ParamSpec("Q")
# name → a number, or a tensor [N] or [B, T]; the mean is over the entries that count
Metrics = Mapping[str, "float | Tensor"]


class Measured(NamedTuple):
    """A value with metrics, which the step's row shows as PART/NAME. A plain pair means the same,
    except for a reference's update."""

    value: Any
    metrics: Metrics


def unpacked(given: Any) -> tuple[Any, Metrics]:
    """Split a part's result into its value and its metrics: a pair with a mapping as its second
    entry has metrics, anything else none."""
    pair = type(given) in (tuple, Measured) and len(given) == 2 and isinstance(given[1], Mapping)
    return (given[0], given[1]) if pair else (given, {})


class AdvantageFn(Protocol[Q]):
    """(quantities of the whole update batch) → [N], one number a rollout, or [B, T]; with a critic
    an Estimate.

    If it asks for `token_rewards`, it works on tokens: a KL in the reward is part of them. For any
    other advantage, the KL is subtracted from the normalised advantage.
    """

    def __call__(
        self, *quantities: Q.args, **numbers: Q.kwargs
    ) -> OrMeasured[PerRollout | PerToken | Estimate]: ...


class OverlongFn(Protocol[Q]):
    """(rewards [N], lengths [N], truncated [N], …) → (rewards [N] as the advantage sees them, [N]
    bool: trained on)."""

    def __call__(
        self, *quantities: Q.args, **numbers: Q.kwargs
    ) -> OrMeasured[tuple[PerRollout, RolloutMask]]: ...


class GroupFilterFn(Protocol[Q]):
    """(rewards [N], group_ids [N]) → [N] bool, True for rollouts that are kept."""

    def __call__(self, *quantities: Q.args, **numbers: Q.kwargs) -> OrMeasured[RolloutMask]: ...


class TokenFilterFn(Protocol[Q]):
    """(entropy_old, response_mask, …) → [B, T] bool, True for tokens whose policy loss counts."""

    def __call__(self, *quantities: Q.args, **numbers: Q.kwargs) -> OrMeasured[TokenMask]: ...


class PerTokenFn(Protocol[Q]):
    """(quantities) → [B, T], alone or with metrics: the common form of the functions below.

    mypy checks the return type of a shipped part. The composition checks that its quantities exist,
    and every call checks the result.
    """

    def __call__(self, *quantities: Q.args, **numbers: Q.kwargs) -> OrMeasured[PerToken]: ...


class NormalizationFn(PerTokenFn[Q], Protocol[Q]):
    """(advantages [B, T], …) → advantages [B, T] on another scale. Entries outside the response
    mask are ignored."""


class CorrectionFn(PerTokenFn[Q], Protocol[Q]):
    """(logprobs_old, logprobs_sampler, response_mask, …) → factor ≥ 0 on each token's policy loss
    [B, T], a constant."""


class RatioFn(PerTokenFn[Q], Protocol[Q]):
    """(logprobs, logprobs_old, response_mask, …) → policy over old policy [B, T]; carries the
    gradient."""


class PolicyLossFn(PerTokenFn[Q], Protocol[Q]):
    """(ratio, advantages, …) → loss per token [B, T], unmasked and unreduced."""


class ValueLossFn(PerTokenFn[Q], Protocol[Q]):
    """(values, values_old, returns) → loss per token [B, T], unmasked and unreduced."""


class KLFn(PerTokenFn[Q], Protocol[Q]):
    """(logprobs, logprobs_ref) → estimate of the divergence per token [B, T], in nats."""


class AggregationFn(PerTokenFn[Q], Protocol[Q]):
    """(response_mask, rollout_ids, …) → weight of each token [B, T]. Over an update batch they sum
    to 1, or to what the function's docstring says; nothing rescales them.

    The loss is Σ weights × loss per token, so any split into micro-batches gives the same gradient.
    """


class RewardFn(Protocol[Q]):
    """(rollout) → score, or None where it cannot be scored; alone or with metrics. Marked
    `batched`, it takes and returns a list."""

    def __call__(
        self, rollout: Rollout, /, *none: Q.args, **numbers: Q.kwargs
    ) -> OrMeasured[float | None] | Awaitable[OrMeasured[float | None]]: ...


class AggregatorFn(Protocol[Q]):
    """(component → score, component → weight) → reward. Marked `batched`: (rollouts, component →
    weight) → a list of rewards."""

    def __call__(
        self, given: Any, weights: Mapping[str, float], /, *_: Q.args, **__: Q.kwargs
    ) -> OrMeasured[float | Sequence[float]]: ...


class ToolParser(Protocol):
    """(content, without thinking) → (content without the calls, calls). Unreadable text is a call
    with an error.

    If it has a keyword `tools`, it receives name → function of its environment.
    """

    def __call__(self, content: str, /) -> tuple[str, list[ToolCall]]: ...


Tool = Callable[..., Any]  # plain or async; `bounded = True` on one that always returns quickly


class ToolExecutor(Protocol):
    """(call, name → function) → result, plain or async. Every failure is a result that is not ok;
    only interruptions are raised."""

    def __call__(
        self, call: ToolCall, tools: Mapping[str, Tool], /
    ) -> ToolResult | Awaitable[ToolResult]: ...


@runtime_checkable
class Session(Protocol):
    """One episode's side of the conversation: opened for it, closed exactly once, however it ends.
    Methods may be plain or async.

    A session may also be a TellsState: a reward reads its state as `rollout.state`. A session
    without a context manager may be a Closes.
    """

    @property
    def tools(self) -> Mapping[str, Tool]:
        """Name → function, made once for the episode, so that tools may share state."""

    def first_prompt(self) -> Messages | Awaitable[Messages]:
        """The first messages of the episode. It may raise rlkit.errors.EpisodeOver: there is
        nothing to reply to."""

    def answer(self, rollout: Rollout) -> Any:
        """Answer the last reply: (rollout, next messages), or an awaitable of it. Messages of None
        end the episode.

        The rollout comes back with the consequences of the reply: tool results, a reward of its
        step, a truncation, metadata.
        """


@runtime_checkable
class TellsState(Protocol):
    """A session, or an instance with tools as methods, that tells its state at the end."""

    def state(self) -> Any:
        """Plain values by name, or an awaitable of them. Called before it is closed."""


@runtime_checkable
class Closes(Protocol):
    """A session, or an instance with tools as methods, with resources to give back."""

    def close(self) -> Any:
        """Called once; plain or async."""


@runtime_checkable
class HasSchema(Protocol):
    """A tool with a schema of its own, in place of the one from its signature and docstring."""

    schema: Mapping[str, Any]  # {"type": "function", "function": {"name", "parameters", …}}


class Playing(NamedTuple):
    """An episode before its start, for an environment that plays it in a way of its own."""

    task: Task
    environment: Environment
    policy: Policy
    engine: Engine
    params: SamplingParams
    seed: int  # of the episode; everything random in it follows from this number
    keys: Iterator[int]  # names for the engine, unlike those of any other reply
    ready: Callable[[], Awaitable[None]]  # awaited before the first reply: all begin together
    give_way: Callable[[], None]  # the others no longer wait for this episode's first reply
    converse: Callable[[], Awaitable[Rollout]]  # plays it as if the environment had no `play`


class Table(NamedTuple):
    """Common to several samples of a task: a game of two, or one instance that steps them all."""

    # (task, players) → an object with `player(number)` → Session or a context manager of one, and
    # `lost(number, error)`. The players wait for each other in their sessions.
    make: Callable[[Task, int], Any]
    players: int = 2  # they take turns; or 0: all samples of the task, and they act together
    # path of the opponent's model; None: the policy plays both
    opponent: str | None = None


class Environment(NamedTuple):
    """The policy's counterpart: functions to make each episode's session from, or `session` itself;
    and how the history is kept.

    The functions may be plain or async. Without any, the task's messages get one reply.
    """

    first_prompt: Callable[[Task], Any] | None = None  # → messages; None: the task's own
    # after a reply without calls → messages, a text, or None: the end
    next_prompt: Callable[[Rollout, int], Any] | None = None
    tools: Callable[[Task], Mapping[str, Tool]] | None = None  # called once an episode
    stop: Callable[[Rollout, int], bool] | None = None  # True ends the episode as terminated
    parse_calls: ToolParser | None = None  # None: a reply holds no calls
    max_steps: int = 1
    max_calls: int = 8  # tool calls answered in one reply; the others come back as errors
    history: Literal["keep_thinking", "strip_thinking"] = "keep_thinking"
    # for a context without room for a reply
    overflow: Literal["truncate", "drop_oldest"] = "truncate"
    # (task) → Session, or a context manager of one, plain or async
    session: Callable[[Task], Any] | None = None
    # answers a call; None: rlkit.environments.execute with its own limits
    execute: ToolExecutor | None = None
    # Seconds for all work of an episode in its session; then it is truncated. An async method is
    # cancelled, and abandoned 10 s later if it swallows this. A blocking one cannot be cancelled:
    # the episode is truncated once it returns.
    deadline: float | None = None
    table: Table | None = None  # common to several samples; None: each plays by itself
    # Plays an episode in a way of its own, async: it may wait before it begins, and ask for replies
    # in place of a session. The rollout is not scored.
    play: Callable[[Playing], Awaitable[Rollout]] | None = None
    # (task, fields of its metadata that the reward compares with) → why it cannot be played, or ""
    check: Callable[[Task, Set[str]], str] | None = None


class Engine(Protocol):
    """A service that samples completions: any number of them at once, each awaited on its own.

    Randomness comes from the seed alone, never from other completions at the same time. `key` names
    the episode. Until `release`, an engine may keep data of its earlier turns for the next one,
    such as a key-value cache.
    """

    busy_s: float  # seconds spent on sampling so far

    async def generate(
        self, key: int, prompt_ids: Sequence[int], seed: int, params: SamplingParams
    ) -> Generation:
        """One completion of these token ids."""

    def release(self, key: int) -> None:
        """The episode is over; give up a completion still in progress."""

    async def load(self, weights: Policy, version: int) -> None:
        """From now on, sample from this policy's weights as they are. `version` is the number of
        completed RL steps.

        An engine in this process uses the weights in place; others copy the changed weights. With
        several ranks, all of them call it at the same time.
        """


@runtime_checkable
class TimedEngine(Protocol):
    """An engine that counts its seconds. Every Engine should; without them, a step counts no
    seconds for the model."""

    busy_s: float


@runtime_checkable
class MeasuredEngine(Protocol):
    """An engine with figures of its own.

    A step logs each of them as `engine/NAME`, as it is after the step's last sampling. A run on
    several processes logs those of rank 0. Two names of `rlkit.engines.Cached` are logged
    elsewhere: `late_s`, seconds so far, as `perf/late_s`, and `captured_shapes` as
    `perf/captured_shapes`. An engine that wraps another one passes its figures on:
    `{**self.inner.metrics(), "retries": self.retries}`.
    """

    def metrics(self) -> dict[str, float]:
        """Name → figure. It is called before and after the engine samples, so it must be quick and
        reset nothing."""


@runtime_checkable
class CachingEngine(Protocol):
    """An engine that chooses the size of its cache. The last bits of log-probs depend on the size,
    because a row that gives way is read again. A resumed run keeps it."""

    cached_tokens: int | None  # None before the first weights

    def keep_cached_tokens(self, tokens: int) -> None:
        """Have a cache of so many tokens, unless the config names a size."""


@runtime_checkable
class KernelEngine(Protocol):
    """An engine that chooses between kernels. Their log-probs differ in the last bits.

    A run settles the choice once, notes it, and keeps it when it is resumed. It reads `kernel` (the
    kernel asked for), `decodes` (the kernel in use, None before the first weights) and `why_eager`
    (the reason where "auto" is eager). With asynchrony=overlap it sets `elsewhere` to the kernel of
    the sampling process. An engine that lacks any of these decodes with a kernel of its own,
    and the run does not name it.
    """

    kernel: Literal["auto", "eager", "fused"]  # or what "auto" was settled as
    why_eager: str
    elsewhere: Literal["eager", "fused"] | None

    @property
    def decodes(self) -> Literal["eager", "fused"] | None:
        """The kernel in use, or `elsewhere`; None before the first weights."""

    def settle(self, kernel: Literal["eager", "fused"], why_eager: str = "") -> None:
        """From now on "auto" is this kernel, whatever weights are loaded. If the config named a
        kernel, change nothing."""

    def go_on_with(self, kernel: Literal["eager", "fused"]) -> str:
        """Resume a run that used this kernel: "auto" becomes it. Return a sentence if the engine
        cannot keep it, else an empty text."""


@runtime_checkable
class ThreadedEngine(Protocol):
    """An engine that computes in threads of its own on a CPU. The run sets `threads` to their
    number before the first weights; None means as many as torch has."""

    threads: int | None


@runtime_checkable
class SharedEngine(Protocol):
    """An engine behind servers that hold one version of the weights at a time.

    With asynchrony=overlap, two processes use the same servers. The run then sets `lent` to a
    function that waits until the other process has finished sampling; `load` calls it before it
    pushes weights, and pushes them even if this process has seen no change. The run keeps the
    engine's samples in its journal.
    """

    lent: Callable[[], None] | None


@runtime_checkable
class ChecksConfig(Protocol):
    """An engine or a teacher that cannot work with every config."""

    def problems(self, experiment: Any) -> list[str]:
        """One sentence for each problem of this `rlkit.training.experiment.Experiment`."""


@runtime_checkable
class TokenScorer(Protocol):
    """A teacher without a model in this process. `Reference.model` may give one in place of a
    model."""

    def score_tokens(
        self,
        ids: Tensor,
        mask: Tensor,
        *,
        divergence: Callable[..., Any],
        columns: int,
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return what a model would: states [M, H] of the M tokens that `mask` marks in the rows
        `ids` [B, T], and a head from states [m, H] to logits [m, V].

        `divergence` compares the policy with these logits, so numbers that it does not read may be
        approximate. `columns` is V, the policy's number of tokens.
        """


class Thinking(NamedTuple):
    """How a tokenizer writes THINK_TAGS."""

    # of both tags, if each is an added token; None: they are spelled, and read in the text
    ids: tuple[int, int] | None
    # writes the closing tag, after a text that interrupts (model.interruption)
    close: tuple[int, ...]
    decode: Callable[[Sequence[int]], str]  # ids → their text

    def opened(self, context: Sequence[int]) -> bool:
        """Whether a context ends in the opening tag, as with some templates: then the reply begins
        inside a thinking block."""
        tail = list(context[-16:])  # a tag spelled letter by letter, and white space
        if self.ids is None:
            return self.decode(tail).rstrip().endswith(THINK_TAGS[0])
        if self.ids[0] not in tail:
            return False
        return not self.decode(tail[len(tail) - tail[::-1].index(self.ids[0]) :]).strip()


class Policy(NamedTuple):
    """A model with everything needed to talk to it in token ids."""

    model: torch.nn.Module  # a Hugging Face causal LM, or a PEFT model around one
    renderer: Any  # rlkit.models.Renderer; its `thinking` is the Thinking of this page
    eos_token_ids: tuple[int, ...]  # every one of them ends a reply
    pad_token_id: int
    context_length: int


class Controller(NamedTuple):
    """A number that follows the run's metrics: explicit state, made by `init` and moved by `update`
    after every RL step.

    The state is plain numbers; `state["value"]` is the number in force. It goes into the checkpoint
    under the number's path.
    """

    init: Callable[[], dict[str, float]]
    # (state, the step's metrics) → state
    update: Callable[[Mapping[str, float], Mapping[str, float]], dict[str, float]]


class Reference(NamedTuple):
    """How to keep the reference policy: explicit state, made by `init` and moved by `update`.

    `model(state, policy_model)` is a context manager around the model for scoring. `save` returns
    the content of a checkpoint, as plain types and tensors (nothing, if `init` makes it again);
    `load` takes it back into a fresh state.
    """

    name: str
    init: Callable[..., Any]  # (policy_model, *, step: RL steps done) → state
    # (state, policy_model, *, step: RL steps done, kl: the step's mean, maybe nan) → state, or it
    # Measured
    update: Callable[..., Any]
    model: Callable[[Any, torch.nn.Module], Any]
    save: Callable[[Any], dict[str, Any]]
    # (state, policy_model, result of `save`) → state
    load: Callable[[Any, torch.nn.Module, Mapping[str, Any]], Any]
    # Before weights are loaded: the policy's path, with revision and trust_remote_code by name. It
    # raises ConfigError, for example if the vocabularies differ.
    check: Callable[..., None] | None = None
