"""The records of an algorithm, and the only place that calls its parts.

A part is a plain function. Its positional parameters are quantities of `rlkit.types.QUANTITIES`,
given by name. So a user's own loss asks for quantities in its signature, and nothing here changes.
`part` calls it.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

import rlkit.functional as F
from rlkit.errors import PartError, name_function, suggest_name
from rlkit.functional.divergences import Divergence
from rlkit.types import (
    QUANTITIES,
    AdvantageFn,
    AggregationFn,
    Controller,
    CorrectionFn,
    Estimate,
    GroupFilterFn,
    KLFn,
    NormalizationFn,
    OverlongFn,
    PolicyLossFn,
    RatioFn,
    TokenFilterFn,
    ValueLossFn,
    ranges,
    safe,
    unpacked,
)

Value = TypeVar("Value")


@safe("name", "optimizer")
@ranges(warmup=(0, None), coef=(0, None))
class Critic(NamedTuple):
    """The predictor of returns. Without a loss, no critic is built.

    `head` reads the last hidden states of the policy's own trunk. `separate` has a trunk of its
    own, a copy of the policy at the start.
    """

    name: str = "none"
    loss: ValueLossFn | None = None
    optimizer: Callable[..., Any] | None = None  # (parameters) → torch optimizer
    model: Literal["head", "separate"] = "head"
    coef: float = 1.0  # weight of the value loss beside the policy loss
    trunk_gradient: bool = False  # head: the value loss trains the policy's trunk too
    warmup: int = 0  # RL steps that train the critic alone

    @property
    def active(self) -> bool:
        """Whether there is a critic."""
        return self.loss is not None


@safe("loss", "parts")
@ranges(coef=(0, None))
class Stream(NamedTuple):
    """One per-token signal in the loss: coef · Σ weights · loss per token, with weights of its own
    over a mask of its own.

    mask             the tokens of
    sampled          a teacher: all sampled tokens, even those that the group filter or the overlong
                     rule take out of the reward's mask
    observations     imitation: the answers of tools, without the template around them
    demonstrations   imitation: the replies of the conversations in the rows of the step's prompts

    The reward uses the algorithm's own mask and weights, so only its `coef` and `parts` are set.
    With `parts`, a stream sees only the prompts of these parts of a mixture, and its weights sum to
    1 over them.
    """

    coef: float | Controller = 1.0
    mask: Literal["sampled", "observations", "demonstrations"] | None = None
    aggregation: AggregationFn | None = None  # None: token_mean
    loss: Divergence | None = None  # a teacher's divergence
    parts: Sequence[str] | None = None  # of a mixture; None: all, and any task

    def of(self, part: str) -> bool:
        """Whether prompts of this part of a mixture belong to it. A part of a mixture within a
        mixture has both names, as a/b."""
        return self.parts is None or any(
            part == own or part.startswith(f"{own}/") for own in self.parts
        )


STREAMS = ("reward", "teacher", "imitation")


@safe("name", "episodes", "streams")
@ranges(epochs=(1, None), minibatches=(1, None), max_refills=(0, None), entropy_coef=(0, None))
class Algorithm(NamedTuple):
    """A named set of functions; complete alone."""

    name: str
    advantage: AdvantageFn
    ratio: RatioFn
    policy_loss: PolicyLossFn
    aggregation: AggregationFn
    group_filter: GroupFilterFn
    normalization: NormalizationFn = F.no_normalization
    overlong: OverlongFn = F.keep_overlong
    token_filter: TokenFilterFn = F.every_token
    correction: CorrectionFn = F.no_correction
    critic: Critic = Critic()
    # weight of the entropy bonus, in units of reward per nat
    entropy_coef: float | Controller = 0.0
    epochs: int = 1
    minibatches: int = 1
    # a step's updates end at this distance from the old policy, in nats per token
    target_kl: float | None = None
    # the meaning of "old" in the ratio: `place_old`
    old: Literal["trainer", "sampler", "loglinear"] = "trainer"
    # rounds of further prompts if the group filter leaves fewer than batch.prompts
    max_refills: int = 0
    # scored episodes from elsewhere than sampling (sft), called as rlkit.collect; None: collect
    episodes: Callable[..., Any] | None = None
    streams: Mapping[str, Stream] = {}  # of STREAMS; none is the reward alone

    @property
    def reward_coef(self) -> float:
        """The weight of the policy loss: 1 without streams, 0 with streams but none for the
        reward."""
        own = self.streams.get("reward", Stream(0.0 if self.streams else 1.0))
        return require_number(own.coef)

    @property
    def active_streams(self) -> dict[str, Stream]:
        """The streams other than the reward's that count in this step."""
        return {
            name: stream
            for name, stream in self.streams.items()
            if name != "reward" and require_number(stream.coef) > 0
        }

    @property
    def parts(self) -> dict[str, Callable[..., Any]]:
        """Name → function, of every slot called with quantities."""
        slots = {name: getattr(self, name) for name in self._fields if name in PARTS}
        return slots | ({"critic.loss": self.critic.loss} if self.critic.loss is not None else {})


@safe("name")
@ranges(coef=(0, None))
class KL(NamedTuple):
    """The penalty that keeps the policy near the reference. With `coef` 0 or no estimator there is
    no penalty and no reference pass.

    placement            adds
    loss                 coef · KL_t to the loss of each token
    reward               -coef · KL_t to the reward of each token
    reward_sequence      -coef · mean_t KL_t to the reward of the episode
    """

    name: str
    estimator: KLFn | None = None
    placement: Literal["loss", "reward", "reward_sequence"] = "loss"
    coef: float | Controller = 0.0
    # loss: multiply each token's estimate by its ratio, for the gradient of the sampling too
    importance_weight: bool = False
    # reward: subtracted before the baseline and the normalisation, not after
    in_baseline: bool = False

    @property
    def active(self) -> bool:
        """Whether the reference has to be scored."""
        return self.estimator is not None and (isinstance(self.coef, Controller) or self.coef > 0)

    @property
    def in_loss(self) -> bool:
        """Whether it is a term of the loss."""
        return self.active and self.placement == "loss"

    @property
    def in_reward(self) -> bool:
        """Whether it is a part of the reward."""
        return self.active and self.placement != "loss"


@functools.lru_cache(maxsize=256)
def list_inputs(function: Callable[..., Any]) -> tuple[str, ...]:
    """The quantities that a part asks for: its parameters that can be positional and have no
    default."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(
        p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty
    )


def asks_for(function: Callable[..., Any] | None, name: str) -> bool:
    """Whether a part asks for a quantity."""
    return function is not None and name in list_inputs(function)


def call(function: Callable[..., Any], quantities: Mapping[str, Any]) -> Any:
    """Call a part with the quantities of its signature. Return its value without metrics and
    without checks; `part` checks it."""
    return unpacked(apply_part(function, quantities))[0]


def apply_part(function: Callable[..., Any], quantities: Mapping[str, Any]) -> Any:
    """Call a function with the quantities in its signature. Metadata and the mapping of components
    are copies of its own.

    Raises: PartError if it changes a tensor in place, because other parts read the same one.
    """
    given = {name: _hand_over(name, quantities[name]) for name in list_inputs(function)}
    before = {name: tensor._version for name, tensor in _tensors(given)}
    out = function(**given)
    for name, tensor in _tensors(given):
        if tensor._version != before.get(name):
            raise PartError(
                f"{name_function(function)} changes '{name}' in place, which other parts read"
                f" too; let it work on {name}.clone()"
            )
    return out


def _hand_over(name: str, value: Any) -> Any:
    if name == "components":
        return dict(value)
    if name == "metadata":
        with suppress(Exception):  # a value that cannot be copied is shared
            return copy.deepcopy(value)
    return value


def _tensors(given: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors among quantities, and in mappings among them, by name."""
    flat = [(name, value) for name, value in given.items() if not isinstance(value, dict)]
    flat += [pair for value in given.values() if isinstance(value, dict) for pair in value.items()]
    return [
        (name, value)
        for name, value in flat
        if isinstance(value, Tensor) and not value.is_inference()
    ]


# Part, as in the names of its metrics: (its place in the config, the Protocol with its result in
# words, the tensors).
PARTS: Mapping[str, tuple[str, Any, tuple[str, ...]]] = {
    "group_filter": ("algorithm.group_filter", GroupFilterFn, ("[N] bool",)),
    "overlong": ("algorithm.overlong", OverlongFn, ("[N]", "[N] bool")),
    "correction": ("algorithm.correction", CorrectionFn, ("[B, T]",)),
    "token_filter": ("algorithm.token_filter", TokenFilterFn, ("[B, T] bool",)),
    "advantage": ("algorithm.advantage", AdvantageFn, ("[N] or [B, T]",)),
    "normalization": ("algorithm.normalization", NormalizationFn, ("[B, T]",)),
    "aggregation": ("algorithm.aggregation", AggregationFn, ("[B, T]",)),
    "ratio": ("algorithm.ratio", RatioFn, ("[B, T]",)),
    "policy_loss": ("algorithm.policy_loss", PolicyLossFn, ("[B, T]",)),
    "kl_estimator": ("kl.estimator", KLFn, ("[B, T]",)),
    "value_loss": ("algorithm.critic.loss", ValueLossFn, ("[B, T]",)),
}


def call_part(
    name: str, function: Callable[..., Any], given: Mapping[str, Any]
) -> tuple[Any, dict[str, Tensor]]:
    """Call a part with its quantities. Return its value, and its metrics as NAME/METRIC: [], [N] or
    [B, T], without gradient.

    Args:
      name: of PARTS.
      given: at least `ids` and `rewards`, because their shapes and device decide if the value is
        right, and all quantities that the part asks for.
    Raises: PartError that names the part, if a quantity is not there yet, or if the value does not
      fit its Protocol.
    """
    path, protocol, wanted = PARTS[name]
    asked = list_inputs(function)

    def refused(said: str) -> PartError:
        return PartError(f"{path} ({name_function(function)}): {said}")

    try:
        value, metrics = unpacked(apply_part(function, given))
    except KeyError as error:
        key = str(error.args[0])
        terms = given.get("components", {})
        if key in asked and key not in given:
            there = ", ".join(quantity for quantity in QUANTITIES if quantity in given)
            raise refused(
                f"asks for '{key}', which there is not, or not yet, when it is called; there are:"
                f" {there}"
            ) from error
        if "components" in asked and key not in terms:
            raise refused(
                f"there is no reward term '{key}'.{suggest_name(key, terms)} There are:"
                f" {', '.join(terms)}"
            ) from error
        raise
    sizes = {"[N]": given["rewards"].shape, "[B, T]": given["ids"].shape}
    device = given["ids"].device
    values = value if isinstance(value, tuple) else (value,)
    if protocol is AdvantageFn and isinstance(value, Estimate):
        wanted = ("[B, T]", "[B, T]")
    faults = [
        said
        for one, spec in zip(values, wanted, strict=False)
        if (said := _describe_fault(one, spec, sizes, device))
    ]
    if len(values) != len(wanted):
        faults = (
            [f"a tuple of {len(values)}"] if isinstance(value, tuple) else [*faults, "one tensor"]
        )
    if faults:
        expected = ", and ".join(
            spec if "bool" in spec else f"{spec} floating point" for spec in wanted
        )
        for size, shape in sizes.items():
            expected = expected.replace(size, f"{size} = {tuple(shape)}")
        raise refused(
            f"gave {faults[0]}, expected {expected}. {protocol.__name__}:"
            f" {protocol.__doc__.splitlines()[0]}"
        )
    return value, _check_metrics(name, metrics, sizes, device, refused)


def _check_metrics(
    name: str,
    metrics: Mapping[str, Any],
    sizes: Mapping[str, torch.Size],
    device: torch.device,
    refused: Callable[[str], PartError],
) -> dict[str, Tensor]:
    """The metrics of a part as NAME/METRIC, without gradient. Raises: the error of `refused`, for a
    metric of another shape."""
    measured = {}
    for key, number in metrics.items():
        tensor = (
            torch.tensor(float(number), dtype=torch.float64)
            if isinstance(number, int | float)
            else number
        )
        tensor = tensor.detach().float() if isinstance(number, Tensor) else tensor
        scalar = isinstance(tensor, Tensor) and tensor.shape == ()
        fault = None if scalar else _describe_fault(tensor, "[N] or [B, T]", sizes, device)
        if fault:
            raise refused(
                f"metric {key!r} is {fault}; give a number, or a tensor of shape [N] or [B, T]"
            )
        measured[f"{name}/{key}"] = tensor
    return measured


def _describe_fault(
    value: Any, spec: str, sizes: Mapping[str, torch.Size], device: torch.device
) -> str:
    """Describe how a tensor breaks its entry in PARTS; an empty text if it does not."""
    if not isinstance(value, Tensor):
        return "None" if value is None else f"{value!r:.60} ({type(value).__name__})"
    if all(value.shape != shape for size, shape in sizes.items() if size in spec):
        return f"shape {tuple(value.shape)}"
    if value.dtype != torch.bool if "bool" in spec else not value.is_floating_point():
        return f"{value.dtype}"
    return (
        ""
        if value.device == device
        else f"a tensor on {value.device}, where the batch is on {device}"
    )


def hyperparameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only parameters of a part and their values."""
    parameters = inspect.signature(function).parameters.values()
    return {
        p.name: p.default
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.default is not p.empty
    }


def require_number(coefficient: float | Controller) -> float:
    """A coefficient in an experiment of a step, whose controllers
    `rlkit.training.schedules.resolve_schedules` has turned into numbers."""
    if isinstance(coefficient, Controller):
        raise TypeError(
            "a controller is no number; take the experiment of a step,"
            " rlkit.training.schedules.resolve_schedules(experiment, progress)"
        )
    return coefficient


def require_value(value: Value | None, name: str) -> Value:
    """Return a quantity of a batch that an algorithm needs. Raises: ValueError if it is None."""
    if value is None:
        raise ValueError(f"the batch has no {name}; prepare it before the update")
    return value
