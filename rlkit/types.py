"""Define every contract of rlkit on one page: the records of a run, and the forms of the functions
that a config can replace. Read this page first.

    Task ──▶ Environment ──▶ Rollout ──▶ Batch ──▶ Algorithm ──▶ optimiser ──▶ Reference update

These letters stand for sizes everywhere: N is the number of rollouts (prompts × group size). B is
the number of rows. A row is one training sequence, and a rollout may fill several rows. T is the
number of positions of a padded row. V is the size of the vocabulary. A mask is True at each token
that counts. All `[B, T]` tensors are aligned with `ids`: entry t of a log-prob is the log-prob of
token t, given the tokens before it.
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

if TYPE_CHECKING:  # so importing this page does not import torch
    import torch
    from torch import Tensor

    PerRollout: TypeAlias = Tensor  # [N], floating point
    PerToken: TypeAlias = Tensor  # [B, T], floating point
    RolloutMask: TypeAlias = Tensor  # [N], bool
    TokenMask: TypeAlias = Tensor  # [B, T], bool
    Value = TypeVar("Value")
    OrMeasured: TypeAlias = "Value | tuple[Value, Metrics]"  # a value alone, or with metrics

# ------------------------------------------------------------------------------------ conversations


class Message(TypedDict, total=False):
    """Hold one chat message, in the form of chat templates."""

    role: str  # system, user, assistant or tool
    content: str
    reasoning_content: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    name: str


Messages = Sequence[Message]


class ToolCall(NamedTuple):
    """Hold a tool call by the policy. If the text is not a valid call, `error` says why, and
    `arguments` is empty."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    error: str = ""


class ToolResult(NamedTuple):
    """Hold the result of a tool call. The policy reads `content`. `ok` is False for every kind of
    failure."""

    id: str
    name: str
    content: str
    ok: bool
    seconds: float = 0.0

    @property
    def message(self) -> Message:
        """Return the message that answers the call."""
        return {
            "role": "tool",
            "tool_call_id": self.id,
            "name": self.name,
            "content": self.content,
        }


class Task(NamedTuple):
    """Hold one row of a data set. A row names its reward and its environment, so each row of a
    mixture can have its own."""

    id: str
    messages: tuple[Message, ...]
    answer: str = ""
    reward: str = "numeric"
    environment: str = "tool_use"
    metadata: Mapping[str, Any] = {}
    part: str = ""  # name of the row's task in a mixture


# Evaluations during a run use validation problems. Test problems are used only before and after the
# run, and their results decide nothing in the run.
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Splits(NamedTuple):
    """Hold the problems of a run by split. A run without evaluations has no validation and no test
    problems."""

    train: Sequence[Task]
    validation: Sequence[Task] = ()
    test: Sequence[Task] = ()


# ----------------------------------------------------------------------------------------- episodes

Status = Literal["terminated", "truncated"]
# How a reply ended. If several words apply, the first in this list is used. length: a limit of
# tokens cut the reply off. budget: the thinking budget closed the thinking, and then the reply
# ended by itself. tool: the reply ended with tool calls, readable or not. stop: the reply ended by
# itself. There is no "error", because a failing engine ends the run, and an unreadable call is
# answered.
FinishReason = Literal["length", "budget", "tool", "stop"]
THINK_TAGS = ("<think>", "</think>")


class SamplingParams(NamedTuple):
    """Set how to sample a completion, and when an episode joins the decoding again after a wait.

    If the environment answers without waiting, the episode joins the next round of decoding. After
    a wait (a tool in a thread, a request over the network), `admission` decides when it joins:
      rounds   exactly `admission_rounds` decoding rounds (one token per row) after the reply. If
               the answer comes later, the decoder stops and waits for it. A repeated run gives the
               same results.
      barrier  before any further token of any episode is decoded. A repeated run gives the same
               results, but it is slow.
      free     as soon as the answer has come. This is the fastest. Timing decides which rows are
               decoded in one batch, and so the last bits of the log-probs.
    """

    max_new_tokens: int = 256  # longest completion, in tokens, > 0
    # divisor of the logits, >= 0; 0 is greedy, with the log-probs of temperature 1
    temperature: float = 1.0
    top_p: float = 1.0  # in (0, 1]; 1 keeps all tokens
    top_k: int = 0  # >= 0; 0 keeps all tokens
    # longest thinking of one completion, in tokens, >= 0; at this length the engine writes the
    # closing tag. None: no limit
    max_thinking_tokens: int | None = None
    admission: Literal["rounds", "barrier", "free"] = "rounds"
    admission_rounds: int = 16  # for admission="rounds": number of rounds, > 0


class Generation(NamedTuple):
    """Hold one completion: the sampled token ids, with the end-of-turn token, and their log-probs
    after temperature.

    If a thinking budget closed the thinking, the engine itself wrote the tokens at the positions
    `forced`. The policy reads these tokens but is not trained on them. Their log-probs are 0,
    because they were not sampled.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    forced: tuple[int, ...] = ()
    # spans: (first position, version of the weights from this position on)
    versions: tuple[tuple[int, int], ...] = ()


class Step(NamedTuple):
    """Hold one turn of an episode: the new messages, the policy's reply, and the results of its
    tool calls."""

    prompt: tuple[Message, ...]  # the new messages of this turn
    # the token ids of the reply's context, without the first `kept` of them
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    # the sampler's log-prob of each id in response_ids, after temperature; 0 for forced tokens
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    thinking: str = ""
    content: str = ""
    thinking_closed: bool = True  # False: a thinking block was opened and never closed
    tool_calls: tuple[ToolCall, ...] = ()
    tool_results: tuple[ToolResult, ...] = ()
    reward: float | None = None
    # positions in response_ids of tokens written by the thinking budget, neither sampled nor
    # trained on
    forced: tuple[int, ...] = ()
    # number of exchanges (a reply and the messages after it) dropped from the start of the context
    dropped: int = 0
    # spans: (first position in response_ids, number of RL steps that had trained the weights)
    versions: tuple[tuple[int, int], ...] = ()
    # number of tokens at the start of the context that are not stored in prompt_ids, because they
    # equal the start of the previous step's context and reply; see Rollout.context
    kept: int = 0

    @property
    def prompt_length(self) -> int:
        """Return the number of tokens in the whole context of the reply."""
        return self.kept + len(self.prompt_ids)

    @property
    def sampled(self) -> list[int]:
        """Return the positions of the sampled tokens in response_ids."""
        return [i for i in range(len(self.response_ids)) if i not in self.forced]


class Rollout(NamedTuple):
    """Hold a whole episode. `reward` is None if the episode cannot be scored. `status` is
    "terminated" if the episode came to its end, and "truncated" if a limit cut it off."""

    task: Task
    steps: tuple[Step, ...]
    status: Status = "terminated"
    # why the episode was truncated: length, context, steps, deadline, environment (a limit of the
    # environment itself) or error (the environment failed)
    truncation: str = ""
    group: int = 0  # position of the prompt in the batch; all rollouts of a prompt have the same
    sample: int = 0  # number of this sample in its group
    reward: float | None = None
    rewards: Mapping[str, float | None] = {}  # score of each term of the reward
    metadata: Mapping[str, Any] = {}  # values added by the environment
    # status of each term's score: ok, wrong, unparseable, timeout or error
    statuses: Mapping[str, str] = {}
    # metrics by name: reward/TERM/NAME and aggregator/NAME from the reward's functions, and
    # program/NAME from a program's endpoint
    metrics: Mapping[str, float] = {}
    # each step's reward from the environment alone; () if no term of the reward added to the steps'
    # rewards
    environment_rewards: tuple[float | None, ...] = ()
    # reward of a greedy rollout of the same prompt, never trained on; None: it cannot be scored
    greedy_reward: float | None = None
    greedy_played: bool = False  # whether a greedy rollout was played
    player: int | None = None  # in a game for two: 0 moves first, 1 second
    error: str = ""  # why the environment failed, or why the program was ended
    # the session's state at the end of the episode, as plain values; empty if it reports none
    state: Mapping[str, Any] = {}

    def __repr__(self) -> str:
        from rlkit.display import format_rollout

        return format_rollout(self)

    def _repr_html_(self) -> str:
        from rlkit.display import render_rollout

        return render_rollout(self)

    def add(self, step: Step) -> Rollout:
        """Return the rollout with one more turn. If the step holds its whole context, only the
        tokens after the shared beginning with the step before are stored."""
        if self.steps and not step.kept:
            kept = agreement(self.context(-1) + self.steps[-1].response_ids, step.prompt_ids)
            step = step._replace(prompt_ids=step.prompt_ids[kept:], kept=kept)
        return self._replace(steps=(*self.steps, step))

    def context(self, index: int) -> tuple[int, ...]:
        """Return all token ids in the context of a reply. Raises: IndexError if the step does not
        exist."""
        *earlier, step = self.steps[: range(len(self.steps))[index] + 1]
        ids: list[int] = []
        for before in earlier:
            ids[before.kept :] = before.prompt_ids + before.response_ids
        return (*ids[: step.kept], *step.prompt_ids)

    @property
    def total_reward(self) -> float | None:
        """Return `reward` plus the rewards of the steps. Training uses this sum."""
        return (
            None
            if self.reward is None
            else self.reward + sum(step.reward or 0.0 for step in self.steps)
        )

    @property
    def final_content(self) -> str:
        """Return the text to read an answer from. This is `metadata["final_content"]` if the
        environment sets this entry, or else the content of the last reply, without its thinking."""
        last = self.steps[-1].content if self.steps else ""
        return self.metadata.get("final_content", last)

    @property
    def response_length(self) -> int:
        """Return the number of sampled tokens of all steps together, without the text of a thinking
        budget."""
        return sum(len(step.response_ids) - len(step.forced) for step in self.steps)

    @property
    def conversation(self) -> list[Message]:
        """Return the episode as chat messages. Thinking is included, calls are structured, and each
        result has the id of its call."""
        return self.history(len(self.steps), thinking=True)

    def history(self, steps: int, *, thinking: bool, dropped: int = 0) -> list[Message]:
        """Return the messages of the first `steps` steps, with or without the policy's thinking.

        After a reply stand the messages of the next step's prompt; after the last reply, the
        results of its tool calls. `dropped` is the number of oldest exchanges to leave out. An
        exchange is a reply and the messages after it. The first prompt always stays.
        """
        messages: list[Message] = [*self.steps[0].prompt] if self.steps[:steps] else []
        kept = self.steps[dropped:steps]
        for index, step in enumerate(kept):
            messages += step.prompt if index else ()
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
        return messages + [result.message for step in kept[-1:] for result in step.tool_results]


def agreement(a: Sequence[int], b: Sequence[int]) -> int:
    """Count the equal token ids at the start of two sequences. Both must have the same type."""
    if a == b[: len(a)]:
        return len(a)
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


# ------------------------------------------------------------------------------------------ tensors


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Hold rollouts as right-padded tensors, as they were sampled.

    The type of a batch says how much has been computed. Each type below also has the fields of the
    types before it. Therefore a function of token ids accepts a batch of any type:

        Batch ── score ──▶ Scored ── weigh ──▶ Weighted ── some rows, shares ──▶ Minibatch

    If a quantity is needed only by some algorithms, it is None for the others.
    """

    ids: Tensor  # [B, T] int64
    attention_mask: Tensor  # [B, T] bool, True on real tokens
    response_mask: Tensor  # [B, T] bool, True on the sampled tokens to train on
    sampled_mask: Tensor  # [B, T] bool, True on all sampled tokens
    rollout_ids: Tensor  # [B] int64, number of the row's rollout (0 … N-1)
    step_ids: Tensor  # [B, T] int64, number of the token's step in its rollout
    rewards: Tensor  # [N] float, nan if a rollout cannot be scored
    group_ids: Tensor  # [N] int64
    truncated: Tensor  # [N] bool, True if a limit cut off the rollout
    lengths: Tensor  # [N] int64, number of sampled tokens of a rollout, trained on or not
    reply_lengths: Tensor  # [N] int64, number of sampled tokens in a rollout's longest reply
    # [B, T] float; a step's reward is at the last sampled token of the step, and the episode's
    # reward is at the last sampled token of the rollout
    token_rewards: Tensor
    logprobs_sampler: Tensor  # [B, T] from the sampling engine
    # [B, T] int64, number of RL steps that had trained the weights of a sampled token; 0 elsewhere
    versions: Tensor
    # [N] float for each term of the reward, nan if a rollout cannot be scored
    components: Mapping[str, Tensor] = field(default_factory=dict)
    # metadata of each of the N rollouts: the task's metadata, updated with the rollout's metadata
    metadata: tuple[Mapping[str, Any], ...] = ()
    # metrics as [], [N] or [B, T], by name PART/NAME; returned by parts before the update, or while
    # the advantages and token weights were computed
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    # [N] reward of one greedy rollout of the prompt, nan if it cannot be scored; None: no greedy
    # rollout was played
    greedy_rewards: Tensor | None = None
    # [B, T] bool, True on tokens of tool results, without the template around them; None: no stream
    # needs this mask
    observed_mask: Tensor | None = None

    @property
    def quantities(self) -> dict[str, Any]:
        """Return name → quantity, for calling the parts of an algorithm."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def whole(self) -> Self:
        """Return the batch with every sampled token in its response_mask, even the tokens of
        rollouts left out of training."""
        return replace(self, response_mask=self.sampled_mask)


@dataclass(frozen=True, kw_only=True, eq=False)
class Scored(Batch):
    """Hold a batch with the log-probs, entropies and values that the models give to its tokens,
    computed before the update."""

    # [B, T] log-probs under the old policy, from the trainer. None with `old_share`. Also None if
    # the step has only one update, because this update computes the same log-probs itself
    logprobs_old: Tensor | None
    # [B, T] in 0 … 1. The "old" log-prob is interpolated between the sampler's log-prob (0) and the
    # policy's (1). None: logprobs_old is used
    old_share: Tensor | None = None
    entropy_old: Tensor | None = None  # [B, T] in nats, from the trainer
    values: Tensor | None = None  # [B, T] from the critic, value of the state before each token
    logprobs_ref: Tensor | None = None  # [B, T] from the reference
    # [B, T] in nats, exact KL(policy ‖ reference) over the vocabulary
    full_kl: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Weighted(Scored):
    """Hold a scored batch with the factors on the loss of each token. The factors are fixed before
    the batch is split into minibatches."""

    advantages: Tensor  # [B, T]
    scale: Tensor  # [B, T] off-policy correction × token filter, a factor on the policy loss
    returns: Tensor | None = None  # [B, T] target of the critic
    # [B, T] share of the step's tokens with a higher covariance of advantage and log-prob
    covariance_rank: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Minibatch(Weighted):
    """Hold the rows of one update."""

    weights: Tensor  # [B, T] weight of each token in the loss, by the aggregation


class TokenLogprobs(NamedTuple):
    """Hold the trained model's log-prob, entropy and further values of the sampled tokens. All
    tensors are [B, T] and 0 outside the response mask."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None = None  # from the critic, if there is one
    full_kl: Tensor | None = None  # exact KL to the reference, if the KL estimator needs it


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
        "[B, T] each step's reward at the step's last sampled token, the episode's reward at the"
        " rollout's last; a KL penalty in the reward is included"
    ),
    "rollout_ids": "[B] which rollout a row belongs to",
    "step_ids": "[B, T] which step of its rollout a token belongs to",
    "response_mask": "[B, T] True on the sampled tokens to train on",
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
        "[B, T] RL steps that had trained the weights that sampled the token; 0 on other tokens."
        " The current step's number minus this is the staleness"
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
        "a tuple of N mappings, one per rollout: `player`, `state`, then the task's metadata, then"
        " the episode's; a later entry replaces an earlier one of the same name"
    ),
}


def plain(part: Any) -> Any:
    """Return the function inside a part, without any `functools.partial` around it."""
    while isinstance(part, functools.partial):
        part = part.func
    return part


def bound(part: Any) -> Mapping[str, Any]:
    """Return the keyword arguments that a config has bound to a part. A plain function has none."""
    return part.keywords if isinstance(part, functools.partial) else {}


def is_record(value: Any) -> bool:
    """Return whether a value or a class is a NamedTuple."""
    return hasattr(value, "_fields")


def missing(part: Any, protocol: type) -> list[str]:
    """List the methods of a Protocol that a value lacks. For a class, list all of the methods,
    because a class is not an instance."""
    return [
        name
        for name in vars(protocol)
        if not name.startswith("_")
        and (isinstance(part, type) or not callable(getattr(part, name, None)))
    ]


# Words for the declarations of a part. The checks before a run read the declarations
# (rlkit.config.problems). A decorator refuses any word outside these lists. A part without
# declarations assumes nothing and guarantees nothing.

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
    """Declare an assumption of a part: `@assumes("binary_rewards")`. If a config breaks the
    assumption, it is refused before the run."""
    return _declared("assumes", words, ASSUMPTIONS, {})


def gives(*words: Guarantee, **where: Any) -> Callable[[Part], Part]:
    """Declare a property of the scores of a reward function, as in
    `@gives("binary", correct=1, wrong=0)`.

    With `where`, the property holds only if the function's hyperparameters have these values. A
    function may have several of these decorators, and then all their words hold. `@gives()`
    promises none of the words.
    """
    return _declared("gives", words, GUARANTEES, where)


def keeps(*words: Guarantee) -> Callable[[Part], Part]:
    """Declare which properties of rewards still hold after a part has changed the rewards. The part
    is an aggregator or an overlong rule. For an aggregator, a property must hold for all
    components."""
    return _declared("keeps", words, GUARANTEES, {})


def vanishes(*words: Vanishing, **where: Any) -> Callable[[Part], Part]:
    """Declare a case in which the gradient of a part is exactly 0, as in
    `@vanishes("without_advantages", penalty=0)`.

    If the gradient of every part of an update is 0, the update is skipped. An update with a part
    without this declaration is never skipped. With `where`, the declaration holds only if the
    part's hyperparameters have these values. A wrapper made with `functools.wraps` does not get its
    function's declaration, because the wrapper may add a term.
    """
    return _declared("vanishes", words, VANISHING, where)


def stateful(part: Part) -> Part:
    """Declare that a function's result depends on its earlier calls. Examples are a reward with a
    counter and an environment with a memory of episodes.

    With asynchrony=overlap, a second process would call the function with a separate state.
    Therefore this combination is refused before the run.
    """
    setattr(part, "__stateful__", True)  # noqa: B010  a class can be marked too
    return part


def is_stateful(part: Any) -> bool:
    """Return whether a part is marked `@stateful`. The mark may be on a class or on a function,
    even on a function inside a partial or a wrapper. An instance and a method have the mark of
    their class."""
    part = plain(part)
    inner = inspect.unwrap(part) if callable(part) else part
    owner = part.__self__ if inspect.ismethod(part) else None
    return any(getattr(own, "__stateful__", False) for own in (part, inner, owner))


def ranges(**limits: tuple[float | None, float | None]) -> Callable[[Part], Part]:
    """Declare the smallest and the largest allowed value of a part's numbers. None means no limit.
    An example is `@ranges(rank=(0, None))`.

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


# What a parameter's value can reach, as the end of a sentence.
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
    """Declare parameters with values that can do harm: `@reaches(command="program", cache="path")`.
    The word for each parameter is one of `REACHES`. It says what the parameter's value can reach.

    A run folder or checkpoint from somebody else may not set these parameters without trust=true.
    """
    unknown = [word for word in what.values() if word not in REACHES]
    if unknown:
        raise ValueError(
            f"@reaches: there is no word '{unknown[0]}'; there are: {', '.join(REACHES)}"
        )
    return _with_verdicts("reaches", what)


def safe(*names: str) -> Callable[[Part], Part]:
    """Declare parameters with values that can do no harm: `@safe("name", "tags")`. A run folder or
    checkpoint from somebody else may set these parameters.

    Numbers, booleans, Literals and parts are safe by their type. A text, a sequence, a mapping and
    a function need this declaration.
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
    """Hold two functions that mark the tokens affected by a loss's clipping. Each function takes
    quantities and the loss's numbers, and returns [B, T] bool. None means that no token is marked.

    held     the token has an advantage, but its own log-prob gets no gradient
    capped   the token's weight is bounded, but its log-prob still gets a gradient
    """

    held: Callable[..., Tensor] | None = None
    capped: Callable[..., Tensor] | None = None


def clips(
    *, held: Callable[..., Tensor] | None = None, capped: Callable[..., Tensor] | None = None
) -> Callable[[Any], Any]:
    """Declare how the clip of a policy loss affects tokens, for the metrics clip/*. The decorator
    sets `loss.clip` to a `Clip`.

    Args:
      held, capped: functions that ask for quantities by name, as the loss does, and take all
        keyword-only numbers of the loss.

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
    """Return whether a wrapper's attribute was only copied by `functools.wraps`."""
    if not hasattr(part, "__wrapped__"):
        return False
    return getattr(part, name, None) is getattr(part.__wrapped__, name, None)


def declarations(
    part: Any, kind: Literal["assumes", "gives", "keeps", "vanishes"]
) -> frozenset[str] | None:
    """Return the declared words of a part that hold for the part's bound hyperparameters. Return
    None if the part declares nothing of this kind.

    A `functools.partial` declares the same as its function. A wrapper made with `functools.wraps`
    also does, except for `vanishes`.
    """
    numbers, part = bound(part), plain(part)
    declaring: Any
    if kind == "vanishes":
        declaring = None if _is_copied(part, "__vanishes__") else part
    else:
        declaring = (
            inspect.unwrap(part, stop=lambda f: hasattr(f, f"__{kind}__"))
            if callable(part)
            else part
        )
    made = getattr(declaring, f"__{kind}__", None)
    if made is None:
        return None
    defaults = {p.name: p.default for p in inspect.signature(declaring).parameters.values()}
    holds = [
        words
        for words, where in made
        if all({**defaults, **numbers}.get(key) == value for key, value in where.items())
    ]
    found = {word for words in holds for word in words}
    return frozenset(found | ({"non_negative", "raw"} if "binary" in found else set()))


class Estimate(NamedTuple):
    """Hold the result of an advantage with a critic. `advantages` and `returns` are [B, T]; the
    returns are the critic's target."""

    advantages: Tensor
    returns: Tensor


# mypy checks the return type of the shipped parts in rlkit.functional and rlkit.rewards, with and
# without metrics (`PolicyLossFn[...]`). A part chooses its quantities itself, and Python has no
# type for "some of these names". Therefore the names are checked when the config is composed. A dry
# run on fake data checks that each quantity has been computed before the part is called. Every call
# checks the shape, the kind of numbers and the device of the result (`rlkit.algorithm.call_part`).
Q = ParamSpec("Q")
# name → a number, or a tensor [N] or [B, T], logged as the mean over its entries that count
Metrics = Mapping[str, "float | Tensor"]


class Measured(NamedTuple):
    """Hold a value with metrics. metrics.jsonl shows the metrics as PART/NAME in the row of the RL
    step. Every part except a reference's update may return a plain pair instead."""

    value: Any
    metrics: Metrics


def unpacked(given: Any) -> tuple[Any, Metrics]:
    """Split a part's result into its value and its metrics. A result has metrics only if it is a
    pair with a mapping as the second entry."""
    pair = type(given) in (tuple, Measured) and len(given) == 2 and isinstance(given[1], Mapping)
    return (given[0], given[1]) if pair else (given, {})


class AdvantageFn(Protocol[Q]):
    """(quantities of the whole update batch) → [N] or [B, T]; with a critic an Estimate.

    [N] is one number per rollout. With a KL penalty in the reward, the `token_rewards` already
    include the penalty. If the function does not ask for `token_rewards`, the penalty is subtracted
    later, from the normalised advantage.
    """

    def __call__(
        self, *quantities: Q.args, **numbers: Q.kwargs
    ) -> OrMeasured[PerRollout | PerToken | Estimate]: ...


class OverlongFn(Protocol[Q]):
    """(rewards [N], lengths [N], truncated [N], …) → (rewards [N], [N] bool).

    The rewards are passed to the advantage. The mask is True for rollouts to train on.
    """

    def __call__(
        self, *quantities: Q.args, **numbers: Q.kwargs
    ) -> OrMeasured[tuple[PerRollout, RolloutMask]]: ...


class GroupFilterFn(Protocol[Q]):
    """(rewards [N], group_ids [N]) → [N] bool, True for rollouts to keep. The rewards are never
    normalised by reward.normalize, neither in a refill nor in the update."""

    def __call__(self, *quantities: Q.args, **numbers: Q.kwargs) -> OrMeasured[RolloutMask]: ...


class TokenFilterFn(Protocol[Q]):
    """(entropy_old, response_mask, …) → [B, T] bool, True for tokens to keep in the policy loss."""

    def __call__(self, *quantities: Q.args, **numbers: Q.kwargs) -> OrMeasured[TokenMask]: ...


class PerTokenFn(Protocol[Q]):
    """(quantities) → [B, T], alone or with metrics. The functions in the next classes have this
    form.

    mypy checks the return type of a shipped part. The names of the quantities are checked when a
    config is composed. Every call checks the result.
    """

    def __call__(self, *quantities: Q.args, **numbers: Q.kwargs) -> OrMeasured[PerToken]: ...


class NormalizationFn(PerTokenFn[Q], Protocol[Q]):
    """(advantages [B, T], …) → advantages [B, T] on another scale.

    Entries outside the response mask are ignored.
    """


class CorrectionFn(PerTokenFn[Q], Protocol[Q]):
    """(logprobs_old, logprobs_sampler, response_mask, …) → factor ≥ 0 for each token [B, T].

    The factor multiplies the token's policy loss. No gradient flows through the factor.
    """


class RatioFn(PerTokenFn[Q], Protocol[Q]):
    """(logprobs, logprobs_old, response_mask, …) → policy over old policy [B, T], with gradient."""


class PolicyLossFn(PerTokenFn[Q], Protocol[Q]):
    """(ratio, advantages, …) → loss per token [B, T], neither masked nor reduced."""


class ValueLossFn(PerTokenFn[Q], Protocol[Q]):
    """(values, values_old, returns) → loss per token [B, T], neither masked nor reduced."""


class KLFn(PerTokenFn[Q], Protocol[Q]):
    """(logprobs, logprobs_ref) → estimate of the divergence per token [B, T], in nats."""


class AggregationFn(PerTokenFn[Q], Protocol[Q]):
    """(response_mask, rollout_ids, …) → weight of each token in the loss [B, T].

    Over an update batch the weights sum to 1, unless the function's docstring says otherwise.
    Nothing rescales them.

    The loss is `Σ weights × loss per token`, so any split into micro-batches gives the same
    gradient.
    """


class RewardFn(Protocol[Q]):
    """(rollout) → score, or None if the rollout cannot be scored; alone or with metrics.

    If it is marked `batched`, it takes the list of rollouts and returns a list.
    """

    def __call__(
        self, rollout: Rollout, /, *none: Q.args, **numbers: Q.kwargs
    ) -> OrMeasured[float | None] | Awaitable[OrMeasured[float | None]]: ...


class AggregatorFn(Protocol[Q]):
    """(scores by term, weights by term) → reward.

    If it is marked `batched`, it takes (rollouts, weights by term) and returns a list of rewards.
    """

    def __call__(
        self, given: Any, weights: Mapping[str, float], /, *_: Q.args, **__: Q.kwargs
    ) -> OrMeasured[float | Sequence[float]]: ...


class ToolParser(Protocol):
    """(content, without thinking) → (content without the calls, calls). An unreadable call becomes
    a ToolCall with an error.

    If it has a keyword `tools`, it receives its environment's tools by name.
    """

    def __call__(self, content: str, /) -> tuple[str, list[ToolCall]]: ...


# plain or async; set `bounded = True` on a tool that always returns quickly
Tool = Callable[..., Any]


class ToolExecutor(Protocol):
    """(call, tools by name) → result, plain or async. Every failure is a result with ok=False. Only
    interruptions are raised, and errors of a sandbox that cannot run here."""

    def __call__(
        self, call: ToolCall, tools: Mapping[str, Tool], /
    ) -> ToolResult | Awaitable[ToolResult]: ...


@runtime_checkable
class Session(Protocol):
    """The environment's side of one episode's conversation. The session is opened for this episode
    and closed exactly once, however the episode ends. Methods may be plain or async.

    A session may also have the methods of TellsState. A reward then reads the session's state as
    `rollout.state`. A session that is not a context manager may have the method of Closes.
    """

    @property
    def tools(self) -> Mapping[str, Tool]:
        """Return the tools by name. rlkit reads this at every reply, so return the same tools
        each time."""

    def first_prompt(self) -> Messages | Awaitable[Messages]:
        """Return the first messages of the episode. Raise rlkit.errors.EpisodeOver if there is
        nothing to reply to."""

    def answer(self, rollout: Rollout) -> Any:
        """Answer the last reply. Return (rollout, next messages), or an awaitable of this pair. If
        the messages are None, the episode ends.

        The returned rollout has the consequences of the reply: tool results, a reward of the step,
        a truncation, metadata.
        """


@runtime_checkable
class TellsState(Protocol):
    """A session, or an instance with tools as methods, with a state to report at the end of the
    episode."""

    def state(self) -> Any:
        """Return plain values by name, or an awaitable of them. Called before the object is
        closed."""


@runtime_checkable
class Closes(Protocol):
    """A session, or an instance with tools as methods, with resources to release."""

    def close(self) -> Any:
        """Release the resources. Called once; plain or async."""


@runtime_checkable
class HasSchema(Protocol):
    """A tool with its own schema. For other tools, the schema is made from the signature and the
    docstring."""

    schema: Mapping[str, Any]  # {"type": "function", "function": {"name", "parameters", …}}


class Playing(NamedTuple):
    """Hold everything an environment with its own `play` needs to play one episode."""

    task: Task
    environment: Environment
    policy: Policy
    engine: Engine
    params: SamplingParams
    seed: int  # the episode's seed; everything random in the episode follows from it
    # unused keys for the engine; no two replies in progress may have the same key
    keys: Iterator[int]
    # must be awaited before the first reply, so all episodes begin together
    ready: Callable[[], Awaitable[None]]
    # tells the other episodes not to wait for this episode's first reply any longer
    give_way: Callable[[], None]
    # plays the episode as if the environment had no `play`
    converse: Callable[[], Awaitable[Rollout]]


class Table(NamedTuple):
    """Describe a table, shared by several samples of a task: a game for two, or one instance of an
    environment that steps all samples together."""

    # Function from (task, number of players) to a table. A table has two methods. `player(number)`
    # returns a Session or a context manager of a Session. `lost(number, error)` is called if a
    # player's episode fails. The players wait for each other in their sessions.
    make: Callable[[Task, int], Any]
    players: int = 2  # 2: two samples take turns. 0: all samples of the task act together
    # path of the opponent's model; None: the policy plays both sides
    opponent: str | None = None


class Environment(NamedTuple):
    """Describe the policy's counterpart in an episode. An environment consists of functions from
    which each episode's session is made, or of one function `session`. Further fields set
    limits, and say how the history is kept.

    The functions may be plain or async. Without any function, an episode is one reply to the task's
    messages.
    """

    first_prompt: Callable[[Task], Any] | None = None  # → messages; None: the task's messages
    # called after a reply without tool calls; returns messages, a text, or None to end the episode
    next_prompt: Callable[[Rollout, int], Any] | None = None
    tools: Callable[[Task], Mapping[str, Tool]] | None = None  # called once per episode
    stop: Callable[[Rollout, int], bool] | None = None  # True ends the episode as terminated
    parse_calls: ToolParser | None = None  # None: replies have no calls
    max_steps: int = 1
    # number of calls answered in one reply; further calls are answered with an error
    max_calls: int = 8
    history: Literal["keep_thinking", "strip_thinking"] = "keep_thinking"
    # what to do if the context has no room for a reply
    overflow: Literal["truncate", "drop_oldest"] = "truncate"
    # function from a task to a Session or a context manager of a Session, plain or async
    session: Callable[[Task], Any] | None = None
    # runs a call; None: rlkit.environments.execute with its default limits
    execute: ToolExecutor | None = None
    # Seconds for all work of an episode in its session; then the episode is truncated. An async
    # method is cancelled. If it swallows its cancellation, it is abandoned 10 s later. A blocking
    # method cannot be cancelled, so the episode is truncated once it returns.
    deadline: float | None = None
    table: Table | None = None  # shared by several samples; None: each sample plays alone
    # Async function that plays a whole episode without a session. It may wait before the episode
    # begins, and it asks the engine for replies. It returns an unscored rollout.
    play: Callable[[Playing], Awaitable[Rollout]] | None = None
    # function from (task, metadata fields read by the reward) to the reason why the task cannot be
    # played, or ""
    check: Callable[[Task, Set[str]], str] | None = None


class Engine(Protocol):
    """A service that samples completions. Any number of completions may be awaited at the same
    time.

    A completion's randomness comes from its seed alone, not from other completions sampled at the
    same time. `key` identifies the episode. Until `release`, an engine may keep data of the
    episode's earlier turns for the next turn, for example a key-value cache.
    """

    busy_s: float  # seconds spent on sampling so far

    async def generate(
        self, key: int, prompt_ids: Sequence[int], seed: int, params: SamplingParams
    ) -> Generation:
        """Return one completion of these token ids."""

    def release(self, key: int) -> None:
        """Forget an episode that is over. A completion still in progress is given up."""

    async def load(self, weights: Policy, version: int) -> None:
        """Use this policy's current weights for all sampling from now on. `version` is the number
        of completed RL steps.

        An engine in this process uses the weights in place. Other engines copy the changed weights.
        With several ranks, all ranks call this method at the same time.
        """


@runtime_checkable
class TimedEngine(Protocol):
    """An engine that counts the seconds spent on sampling. Every engine should do so; otherwise the
    metrics of an RL step show 0 seconds for the model."""

    busy_s: float


@runtime_checkable
class MeasuredEngine(Protocol):
    """An engine with its own metrics.

    An RL step logs each metric as `engine/NAME`, with the metric's value after the step's last
    sampling. A run on several processes logs the metrics of rank 0. Two metrics of
    `rlkit.engines.Cached` have other names: `late_s`, in seconds so far, is logged as
    `perf/late_s`, and `captured_shapes` as `perf/captured_shapes`. An engine around another engine
    passes its metrics on: `{**self.inner.metrics(), "retries": self.retries}`.
    """

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name. This method is called before and after the engine samples, so
        it must be quick and reset nothing."""


@runtime_checkable
class CachingEngine(Protocol):
    """An engine that chooses the size of its cache. The last bits of log-probs depend on the size,
    because a row is prefilled again after its eviction from the cache. Therefore a resumed run
    keeps the size."""

    cached_tokens: int | None  # None before the first weights are loaded

    def keep_cached_tokens(self, tokens: int) -> None:
        """Use a cache of this many tokens, unless the config names a size."""


@runtime_checkable
class KernelEngine(Protocol):
    """An engine that chooses between kernels. The log-probs of two kernels differ in the last bits.

    A run decides once which kernel "auto" means, records the choice, and keeps it when the run is
    resumed. The run reads `kernel` (the kernel asked for), `decodes` (the kernel in use, None
    before the first weights are loaded) and `why_eager` (why "auto" became eager). With
    asynchrony=overlap, the run sets `elsewhere` to the kernel of the sampling process. An engine
    without one of these names decodes with its own kernel, and the run does not report which.
    """

    # the kernel asked for, or the kernel chosen for "auto"
    kernel: Literal["auto", "eager", "fused"]
    why_eager: str
    elsewhere: Literal["eager", "fused"] | None

    @property
    def decodes(self) -> Literal["eager", "fused"] | None:
        """Return the kernel in use. Before the first weights are loaded, return `elsewhere`, which
        is None without a sampling process."""

    def settle(self, kernel: Literal["eager", "fused"], why_eager: str = "") -> None:
        """Let "auto" mean this kernel from now on, whatever weights are loaded. If the config named
        a kernel, change nothing."""

    def go_on_with(self, kernel: Literal["eager", "fused"]) -> str:
        """Let "auto" mean this kernel, because the resumed run has used this kernel so far. If the
        engine cannot use the kernel, return a sentence for the run's output. Otherwise return an
        empty text."""


@runtime_checkable
class ThreadedEngine(Protocol):
    """An engine that computes in its own threads on a CPU. The run sets `threads`, the number of
    these threads, before the first weights are loaded. None means as many threads as torch uses."""

    threads: int | None


@runtime_checkable
class SharedEngine(Protocol):
    """An engine that samples on servers. The servers hold one version of the weights at a time.

    With asynchrony=overlap, two processes use the same servers. The run then sets `lent` to a
    function that waits until the other process has finished sampling. `load` calls this function
    before it pushes weights to the servers. `load` pushes the weights even if they have not changed
    in this process. The run keeps the engine's samples in its journal.
    """

    lent: Callable[[], None] | None


@runtime_checkable
class ChecksConfig(Protocol):
    """An engine or a teacher that checks the run's config, because it does not work with every
    config."""

    def problems(self, experiment: Any) -> list[str]:
        """Return one sentence for each problem of this `rlkit.training.experiment.Experiment`."""


@runtime_checkable
class TokenScorer(Protocol):
    """A teacher without a model in this process. `Reference.model` may return a TokenScorer instead
    of a model."""

    def score_tokens(
        self,
        ids: Tensor,
        mask: Tensor,
        *,
        divergence: Callable[..., Any],
        columns: int,
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return a pair like a model's hidden states and head. The states are [M, H], for the M
        tokens marked by `mask` in the rows `ids` [B, T]. The head is a function from states [m, H]
        to logits [m, V].

        `divergence` is the function that compares the policy with these logits. Logits not read by
        this function may be approximate. `columns` is V, the size of the policy's vocabulary.
        """


class Thinking(NamedTuple):
    """Describe how a tokenizer writes the tags around thinking, THINK_TAGS."""

    # ids of the opening and the closing tag, if each is an added token of the vocabulary. None:
    # each tag is several tokens, and is searched in the decoded text
    ids: tuple[int, int] | None
    # ids that close the thinking: an interrupting text (model.interruption) and the closing tag
    close: tuple[int, ...]
    decode: Callable[[Sequence[int]], str]  # token ids → text

    def opened(self, context: Sequence[int]) -> bool:
        """Return whether a context ends in the opening tag, as with some chat templates. If so, the
        reply begins inside a thinking block."""
        tail = list(context[-16:])  # enough for a tag spelled letter by letter, and white space
        if self.ids is None:
            return self.decode(tail).rstrip().endswith(THINK_TAGS[0])
        if self.ids[0] not in tail:
            return False
        return not self.decode(tail[len(tail) - tail[::-1].index(self.ids[0]) :]).strip()


class Policy(NamedTuple):
    """Hold a model and everything needed to talk to it in token ids."""

    model: torch.nn.Module  # a Hugging Face causal LM, or a PEFT model around one
    renderer: Any  # rlkit.models.Renderer; its `thinking` is the Thinking of this page
    eos_token_ids: tuple[int, ...]  # each of these ids ends a reply
    pad_token_id: int
    context_length: int


class Controller(NamedTuple):
    """Describe a number that is adapted to the run's metrics. `init` makes the controller's state,
    and `update` changes the state after every RL step.

    The state consists of plain numbers. `state["value"]` is the current number. The checkpoint
    holds the state under the path of the number in the config.
    """

    init: Callable[[], dict[str, float]]
    # (state, the step's metrics) → state
    update: Callable[[Mapping[str, float], Mapping[str, float]], dict[str, float]]


class Reference(NamedTuple):
    """Describe how to keep the reference policy. `init` makes the reference's state, and `update`
    changes the state after an RL step.

    `model(state, policy_model)` is a context manager that gives the model for scoring. `save`
    returns the state for a checkpoint, as plain types and tensors. The result is empty if `init`
    can make the same state again. `load` puts the saved state into a new state.
    """

    name: str
    init: Callable[..., Any]  # (policy_model, *, step: number of completed RL steps) → state
    # (state, policy_model, *, step: number of completed RL steps, kl: mean KL of the step, may be
    # nan) → state, or Measured(state, metrics)
    update: Callable[..., Any]
    model: Callable[[Any, torch.nn.Module], Any]
    save: Callable[[Any], dict[str, Any]]
    # (state, policy_model, result of `save`) → state
    load: Callable[[Any, torch.nn.Module, Mapping[str, Any]], Any]
    # Called before weights are loaded, with the policy's path, and with revision and
    # trust_remote_code by name. Raises ConfigError if the reference cannot be used, for example if
    # the vocabularies differ.
    check: Callable[..., None] | None = None
