"""Define the records of an algorithm, and call its parts. No other file calls a part.

A part of an algorithm is a plain function, for example an advantage or a policy loss. The names of
its positional parameters are quantities in `rlkit.types.QUANTITIES`, and `call_part` passes these
quantities by name. Therefore a user's own loss can ask for any quantity in its signature, and no
code here has to change.
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
    """Describe the critic, a model that predicts returns. If its `loss` is None, no critic is
    built.

    With model=head, the critic reads the last hidden states of the policy's trunk. With
    model=separate, the critic has its own trunk, at first a copy of the policy.
    """

    name: str = "none"
    loss: ValueLossFn | None = None
    optimizer: Callable[..., Any] | None = None  # function from the parameters to a torch optimizer
    model: Literal["head", "separate"] = "head"
    coef: float = 1.0  # weight of the value loss, relative to the policy loss
    # with model=head: whether the value loss also trains the policy's trunk
    trunk_gradient: bool = False
    warmup: int = 0  # number of RL steps at the start that train only the critic

    @property
    def active(self) -> bool:
        """Return whether the algorithm has a critic."""
        return self.loss is not None


@safe("loss", "parts")
@ranges(coef=(0, None))
class Stream(NamedTuple):
    """Describe one stream: a per-token signal that adds `coef · Σ weights · loss per token` to the
    loss. Each stream has its own token weights and its own mask.

    mask             the tokens of
    sampled          a teacher: all sampled tokens, even of rollouts that the group filter or the
                     overlong rule removes from the reward's mask
    observations     imitation: the results of tools, without the template around them
    demonstrations   imitation: the replies in the conversations of the step's tasks

    The stream "reward" uses the mask and the weights of the algorithm itself, so only its `coef`
    and `parts` are set. With `parts`, a stream uses only the prompts of these parts of a mixture,
    and the stream's weights are those of a batch of these prompts alone.
    """

    coef: float | Controller = 1.0
    mask: Literal["sampled", "observations", "demonstrations"] | None = None
    aggregation: AggregationFn | None = None  # weights of the tokens; None: token_mean
    loss: Divergence | None = None  # divergence from a teacher; only for the stream "teacher"
    parts: Sequence[str] | None = None  # parts of a mixture to use; None: all prompts

    def of(self, part: str) -> bool:
        """Return whether the stream uses prompts of this part of a mixture. If a mixture contains
        another mixture, a part is named by both names, as in a/b."""
        return self.parts is None or any(
            part == own or part.startswith(f"{own}/") for own in self.parts
        )


STREAMS = ("reward", "teacher", "imitation")


@safe("name", "episodes", "streams")
@ranges(epochs=(1, None), minibatches=(1, None), max_refills=(0, None), entropy_coef=(0, None))
class Algorithm(NamedTuple):
    """Hold a named set of functions that together make a complete algorithm."""

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
    # largest divergence of the policy from the old policy, in nats per token; beyond it, the RL
    # step makes no further update. None: no limit
    target_kl: float | None = None
    # which policy is "old" in the ratio, see `compute_old_share`
    old: Literal["trainer", "sampler", "loglinear"] = "trainer"
    # if the group filter leaves fewer than batch.prompts groups in a step, the largest number of
    # further rounds of prompts to sample
    max_refills: int = 0
    # function that returns scored episodes without sampling (sft), with the arguments of
    # rlkit.collect; None: rlkit.collect
    episodes: Callable[..., Any] | None = None
    streams: Mapping[str, Stream] = {}  # streams by name, from STREAMS; empty: the reward alone

    @property
    def reward_coef(self) -> float:
        """Return the weight of the policy loss. Without streams it is 1. With streams, it is the
        `coef` of the stream "reward", or 0 without this stream."""
        own = self.streams.get("reward", Stream(0.0 if self.streams else 1.0))
        return require_number(own.coef)

    @property
    def active_streams(self) -> dict[str, Stream]:
        """Return the streams with a `coef` above 0 in this step, except for the stream "reward"."""
        return {
            name: stream
            for name, stream in self.streams.items()
            if name != "reward" and require_number(stream.coef) > 0
        }

    @property
    def parts(self) -> dict[str, Callable[..., Any]]:
        """Return field name → function, for every function called with quantities."""
        slots = {name: getattr(self, name) for name in self._fields if name in PARTS}
        return slots | ({"critic.loss": self.critic.loss} if self.critic.loss is not None else {})


@safe("name")
@ranges(coef=(0, None))
class KL(NamedTuple):
    """Describe the KL penalty that keeps the policy near the reference model. If `coef` is 0 or
    `estimator` is None, there is no penalty, and the reference scores no tokens.

    placement            adds
    loss                 coef · KL_t to the loss of each token
    reward               -coef · KL_t to the reward of each token
    reward_sequence      -coef · mean_t KL_t to the reward of the episode
    """

    name: str
    estimator: KLFn | None = None
    placement: Literal["loss", "reward", "reward_sequence"] = "loss"
    coef: float | Controller = 0.0
    # with placement=loss: whether to multiply each token's estimate by the token's probability
    # ratio, so the gradient also accounts for the sampling of the token
    importance_weight: bool = False
    # with placement=reward: whether to subtract the penalty before the baseline and the
    # normalisation, instead of after
    in_baseline: bool = False

    @property
    def active(self) -> bool:
        """Return whether the reference model has to score the tokens."""
        return self.estimator is not None and (isinstance(self.coef, Controller) or self.coef > 0)

    @property
    def in_loss(self) -> bool:
        """Return whether the penalty is a term of the loss."""
        return self.active and self.placement == "loss"

    @property
    def in_reward(self) -> bool:
        """Return whether the penalty is subtracted from the reward."""
        return self.active and self.placement != "loss"


@functools.lru_cache(maxsize=256)
def list_inputs(function: Callable[..., Any]) -> tuple[str, ...]:
    """List the quantities that a part asks for: its parameters without a default, except
    keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(
        p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty
    )


def asks_for(function: Callable[..., Any] | None, name: str) -> bool:
    """Return whether a part asks for a quantity."""
    return function is not None and name in list_inputs(function)


def call(function: Callable[..., Any], quantities: Mapping[str, Any]) -> Any:
    """Call a part with the quantities in its signature, and return its value without its metrics.
    This function does not check the value; `call_part` does."""
    return unpacked(apply_part(function, quantities))[0]


def apply_part(function: Callable[..., Any], quantities: Mapping[str, Any]) -> Any:
    """Call a function with the quantities in its signature. The function gets its own copies of the
    metadata and of the mapping of components.

    Raises: PartError if the function changes a tensor in place, because other parts read the same
      tensor.
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


class NoTerm(KeyError):
    """Raised if a part looks up a reward term that does not exist."""


class Components(dict[str, Tensor]):
    """Map reward terms to tensors, for one part."""

    def __missing__(self, key: str) -> Tensor:
        raise NoTerm(key)


def _hand_over(name: str, value: Any) -> Any:
    if name == "components":
        return Components(value)
    if name == "metadata":
        with suppress(Exception):  # if a value cannot be copied, the function gets the value itself
            return copy.deepcopy(value)
    return value


def _tensors(given: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """List (name, tensor) for each quantity, and for each entry of a quantity that is a mapping."""
    flat = [(name, value) for name, value in given.items() if not isinstance(value, dict)]
    flat += [pair for value in given.values() if isinstance(value, dict) for pair in value.items()]
    return [
        (name, value)
        for name, value in flat
        if isinstance(value, Tensor) and not value.is_inference()
    ]


# For each part, by its name in metrics: its path in the config, its Protocol, and the form of each
# tensor that it returns.
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
    """Call a part with its quantities and check the result. Return its value, and its metrics as
    NAME/METRIC. A metric is [], [N] or [B, T], without gradient.

    Args:
      name: a name in PARTS.
      given: quantities by name: all that the part asks for, and always `ids` and `rewards`, because
        the value is checked against their shapes and device.
    Raises: PartError naming the part, if a quantity has not been computed yet, or if the value does
      not fit the part's Protocol.
    """
    path, protocol, wanted = PARTS[name]

    def refused(said: str) -> PartError:
        return PartError(f"{path} ({name_function(function)}): {said}")

    for key in list_inputs(function):
        if key not in given:
            there = ", ".join(quantity for quantity in QUANTITIES if quantity in given)
            raise refused(
                f"asks for '{key}', which does not exist when it is called; there are: {there}"
            )
    try:
        value, metrics = unpacked(apply_part(function, given))
    except NoTerm as error:
        key, terms = error.args[0], given["components"]
        raise refused(
            f"there is no reward term '{key}'.{suggest_name(str(key), terms)} There are:"
            f" {', '.join(terms)}"
        ) from error
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
    """Return the metrics of a part as NAME/METRIC, without gradient. Raises: the error made by
    `refused`, if the shape of a metric is not [], [N] or [B, T]."""
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
    """Describe how a part's value differs from the form given in PARTS. Return an empty text for a
    value without fault."""
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
    """Return the keyword-only parameters of a part with their values."""
    parameters = inspect.signature(function).parameters.values()
    return {
        p.name: p.default
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.default is not p.empty
    }


def require_number(coefficient: float | Controller) -> float:
    """Return a coefficient after checking that it is a number. Before each step,
    `rlkit.training.schedules.resolve_schedules` replaces the controllers of an experiment by
    numbers. Raises: TypeError for a controller."""
    if isinstance(coefficient, Controller):
        raise TypeError(
            "a controller is not a number; use the experiment of a step:"
            " rlkit.training.schedules.resolve_schedules(experiment, progress)"
        )
    return coefficient


def require_value(value: Value | None, name: str) -> Value:
    """Return a quantity of a batch that an algorithm needs. Raises: ValueError if it is None."""
    if value is None:
        raise ValueError(f"the batch has no {name}; prepare it before the update")
    return value
