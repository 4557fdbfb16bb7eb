"""Where the parts of an algorithm meet: a batch becomes advantages, weights and one loss.

A part is a plain function; its positional parameters are quantities of `rlkit.types.QUANTITIES`,
given by name. So a user's own loss asks for what it needs in its signature, and nothing here
changes. `part` is the one place that calls them.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

import rlkit.functional as F
from rlkit.errors import PartError, nearest, written
from rlkit.functional.divergences import Divergence
from rlkit.types import (
    QUANTITIES,
    AdvantageFn,
    AggregationFn,
    Batch,
    Controller,
    CorrectionFn,
    Estimate,
    GroupFilterFn,
    KLFn,
    Minibatch,
    NormalizationFn,
    OverlongFn,
    PolicyLossFn,
    RatioFn,
    Scored,
    TokenFilterFn,
    TokenLogprobs,
    ValueLossFn,
    Weighted,
    ranges,
    safe,
    unpacked,
)

Rows = TypeVar("Rows", bound=Batch)


@safe("name", "optimizer")
@ranges(warmup=(0, None), coef=(0, None))
class Critic(NamedTuple):
    """What predicts returns. No loss means no critic, and none is built.

    `head` reads the last hidden states of the policy's own trunk; `separate` has a trunk of its
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
    """One per-token signal that is added to the loss: coef · Σ weights · loss per token, weights of
    its own over a mask of its own.

    mask             the tokens of
    sampled          a teacher: everything that was sampled, also what the group filter or the
                     overlong rule take out of the reward's observations     imitation: what tools
                     answered, without the template around it
    demonstrations   imitation: the replies of the conversations in the rows of the step's prompts

    The reward's mask and weights are those of the algorithm, so only its `coef` and `parts` are
    set. With `parts`, a stream sees the prompts of these parts of a mixture alone, and its weights
    sum to 1 over them.
    """

    coef: float | Controller = 1.0
    mask: Literal["sampled", "observations", "demonstrations"] | None = None
    aggregation: AggregationFn | None = None  # None: token_mean
    loss: Divergence | None = None  # a teacher's divergence
    parts: Sequence[str] | None = None  # of a mixture; None: all, and any task

    def of(self, part: str) -> bool:
        """Whether prompts of this part of a mixture belong to it; that of a mixture within a
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
    # nats per token from the old policy at which the updates of a step end
    target_kl: float | None = None
    # what "old" is in the ratio: `place_old`
    old: Literal["trainer", "sampler", "loglinear"] = "trainer"
    # rounds of further prompts where the group filter leaves fewer than batch.prompts
    max_refills: int = 0
    # as rlkit.collect, but scored: episodes that are not sampled (sft); None: collect
    episodes: Callable[..., Any] | None = None
    streams: Mapping[str, Stream] = {}  # of STREAMS; none is the reward alone

    @property
    def reward_coef(self) -> float:
        """The weight of the policy loss: 1 without streams, 0 where there are some and the reward
        is not among them."""
        own = self.streams.get("reward", Stream(0.0 if self.streams else 1.0))
        return number(own.coef)

    @property
    def active_streams(self) -> dict[str, Stream]:
        """The streams beside the reward's that count in this step."""
        return {
            name: stream
            for name, stream in self.streams.items()
            if name != "reward" and number(stream.coef) > 0
        }

    @property
    def parts(self) -> dict[str, Callable[..., Any]]:
        """Name → function, of every slot that is called with quantities."""
        slots = {name: getattr(self, name) for name in self._fields if name in PARTS}
        return slots | ({"critic.loss": self.critic.loss} if self.critic.loss is not None else {})


@safe("name")
@ranges(coef=(0, None))
class KL(NamedTuple):
    """The penalty that keeps the policy near the reference. `coef` 0 or no estimator means none,
    and no reference pass.

    placement            what is added
    loss                 coef · KL_t to the loss of each token
    reward               -coef · KL_t to the reward of each token
    reward_sequence      -coef · mean_t KL_t to the reward of the episode
    """

    name: str
    estimator: KLFn | None = None
    placement: Literal["loss", "reward", "reward_sequence"] = "loss"
    coef: float | Controller = 0.0
    # loss: each token's estimate times its ratio, for the gradient of the sampling too
    importance_weight: bool = False
    # reward: subtracted before the baseline and the normalisation, not after
    in_baseline: bool = False

    @property
    def active(self) -> bool:
        """True where the reference has to be scored."""
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
def inputs(function: Callable[..., Any]) -> tuple[str, ...]:
    """The quantities that a part asks for: its parameters that can be positional and have no
    default."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(
        p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty
    )


def asks(function: Callable[..., Any] | None, name: str) -> bool:
    """Whether a part asks for a quantity."""
    return function is not None and name in inputs(function)


def call(function: Callable[..., Any], quantities: Mapping[str, Any]) -> Any:
    """What a part gives for the quantities that its signature names, without its metrics and as it
    is: `part` checks it."""
    return unpacked(applied(function, quantities))[0]


def applied(function: Callable[..., Any], quantities: Mapping[str, Any]) -> Any:
    """What a function gives for the quantities that it names. Metadata and the mapping of
    components are copies of its own.

    Raises: PartError where it changes a tensor in place, since other parts read the same one.
    """
    given = {name: _handed(name, quantities[name]) for name in inputs(function)}
    before = {name: tensor._version for name, tensor in _tensors(given)}
    out = function(**given)
    for name, tensor in _tensors(given):
        if tensor._version != before.get(name):
            raise PartError(
                f"{written(function)} changes '{name}' in place, which other parts read too; let it"
                f" work on {name}.clone()"
            )
    return out


def _handed(name: str, value: Any) -> Any:
    if name == "components":
        return dict(value)
    if name == "metadata":
        with suppress(Exception):  # what cannot be copied is shared
            return copy.deepcopy(value)
    return value


def _tensors(given: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors among quantities, those of a mapping too, by name."""
    flat = [(name, value) for name, value in given.items() if not isinstance(value, dict)]
    flat += [pair for value in given.values() if isinstance(value, dict) for pair in value.items()]
    return [
        (name, value)
        for name, value in flat
        if isinstance(value, Tensor) and not value.is_inference()
    ]


# Part, as in the names of its metrics: (where it stands in the config, the Protocol that says in
# words what it gives, the tensors).
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


def part(
    name: str, function: Callable[..., Any], given: Mapping[str, Any]
) -> tuple[Any, dict[str, Tensor]]:
    """What a part gives for the quantities that it asks for, and its metrics as NAME/METRIC: [],
    [N] or [B, T], without gradient.

    Args:
      name: of PARTS.
      given: at least `ids` and `rewards`, whose shapes and device decide what is right, and what
        the part asks for.
    Raises: PartError naming the part where a quantity is not there yet, or what it gives is not
      what its Protocol says.
    """
    path, protocol, wanted = PARTS[name]
    asked = inputs(function)

    def refused(said: str) -> PartError:
        return PartError(f"{path} ({written(function)}): {said}")

    try:
        value, metrics = unpacked(applied(function, given))
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
                f"there is no reward term '{key}'.{nearest(key, terms)} There are:"
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
        if (said := _fault(one, spec, sizes, device))
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
    return value, _checked_metrics(name, metrics, sizes, device, refused)


def _checked_metrics(
    name: str,
    metrics: Mapping[str, Any],
    sizes: Mapping[str, torch.Size],
    device: torch.device,
    refused: Callable[[str], PartError],
) -> dict[str, Tensor]:
    """The metrics of a part as NAME/METRIC, without gradient. Raises: what `refused` makes of a
    sentence, for a metric of another shape."""
    measured = {}
    for key, number in metrics.items():
        tensor = (
            torch.tensor(float(number), dtype=torch.float64)
            if isinstance(number, int | float)
            else number
        )
        tensor = tensor.detach().float() if isinstance(number, Tensor) else tensor
        scalar = getattr(tensor, "shape", None) == ()
        fault = None if scalar else _fault(tensor, "[N] or [B, T]", sizes, device)
        if fault:
            raise refused(
                f"metric {key!r} is {fault}; give a number, or a tensor of shape [N] or [B, T]"
            )
        measured[f"{name}/{key}"] = tensor
    return measured


def _fault(value: Any, spec: str, sizes: Mapping[str, torch.Size], device: torch.device) -> str:
    """What is wrong with a tensor that should be as PARTS has it, in words; nothing where it is
    right."""
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


def counted(value: Tensor, batch: Batch) -> Tensor:
    """The entries of a term or a metric that count, [M]: of trained tokens, of rollouts with a
    trained token, or a number for each token.

    So sums and counts of parts of a batch add up to those of the whole, however it is split.
    """
    mask = batch.response_mask
    if value.dim() == 0:
        return value.expand(int(mask.sum()))
    return value[mask] if value.dim() == 2 else value[batch.rollout_ids[mask.any(1)].unique()]


def hyperparameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only parameters of a part and their values."""
    parameters = inspect.signature(function).parameters.values()
    return {
        p.name: p.default
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.default is not p.empty
    }


def clipped_tokens(loss: Callable[..., Any], quantities: Mapping[str, Any]) -> dict[str, Tensor]:
    """clip_held and clip_capped [B, T] bool, by the rule that a policy loss declares
    (`policy_losses.Clip`); nothing where it has none."""
    clip = getattr(getattr(loss, "func", loss), "clip", None)
    if clip is None:
        return {}
    numbers = hyperparameters(loss)
    none = torch.zeros_like(quantities["ratio"], dtype=torch.bool)
    rules = {f"clip_{name}": rule for name, rule in clip._asdict().items()}
    with torch.no_grad():
        return {
            name: (
                none
                if rule is None
                else rule(**{n: quantities[n] for n in inputs(rule)}, **numbers)
            )
            for name, rule in rules.items()
        }


def quantities(batch: Batch) -> dict[str, Any]:
    """What the parts may ask for, before the policy is evaluated."""
    return {name: value for name, value in vars(batch).items() if value is not None}


# -------------------------------------------------------------- before the update, without gradient


def filter_rollouts(batch: Rows, algorithm: Algorithm) -> Rows:
    """The batch with the rollouts that are trained on, and the rewards that the advantage sees.

    The group filter reads the raw rewards; then the overlong rule may change rewards (and with them
    the token rewards, at the last sampled token) and take rollouts out. What is taken out leaves
    `response_mask` and stays in `sampled_mask`; its reward still counts in baselines.
    """
    with torch.no_grad():
        given = quantities(batch)
        kept, filtered = part("group_filter", algorithm.group_filter, given)
        (rewards, trained), shortened = part("overlong", algorithm.overlong, given)
        shaped = (rewards - batch.rewards).nan_to_num(0.0)[batch.rollout_ids][:, None]
        return replace(
            batch,
            rewards=rewards,
            token_rewards=batch.token_rewards + shaped * last_tokens(batch),
            response_mask=batch.response_mask & (kept & trained)[batch.rollout_ids][:, None],
            metrics=filtered | shortened,
        )


def last_tokens(batch: Batch) -> Tensor:
    """[B, T] True at the last sampled token of each rollout."""
    positions, mask = F.episode_positions(batch.rollout_ids, batch.step_ids, batch.response_mask)
    last = mask & (torch.arange(mask.shape[1], device=mask.device) == mask.sum(1, keepdim=True) - 1)
    return F.from_episodes(last, positions, mask, batch.response_mask)


def old_share(batch: Batch, algorithm: Algorithm, *, step: int) -> Tensor | None:
    """Where the ratio's old policy lies between the sampler (0) and the policy (1) [B, T], where it
    needs no pass before the update (`algorithm.old`).

    trainer      the policy before the update, by a pass of the trainer: None
    sampler      what sampled, in its own log-probs: share 0. The ratio is π / μ, and a clip sees
                 how old a sample is
    loglinear    between both, by versions (`rlkit.functional.interpolated_old`): share (d - 1) / d,
                 where the policy in training makes version step + 1, d versions behind which a
                 token was sampled

    Args:
      step: RL steps done.
    """
    if algorithm.old == "trainer":
        return None
    share = torch.zeros_like(batch.logprobs_sampler)
    if algorithm.old == "loglinear":
        behind = (step - batch.versions).clamp_min(0)
        share = (behind / (behind + 1)).to(share.dtype)
    return share


def weigh(batch: Scored, algorithm: Algorithm, kl: KL = KL("none")) -> Weighted:  # noqa: B008  (immutable)
    """The batch with advantages [B, T], returns where there is a critic, and the factor on each
    token's policy loss; zero outside the response mask.

    advantage → normalisation → minus the KL to come, where the KL stands in the reward. An
    advantage that asks for `token_rewards` gets the KL in them instead, and with `kl.in_baseline`
    every advantage gets it in its rewards: in those of all rollouts, since also the ones that are
    not trained on count in the baseline. Then the factor: off-policy correction × token filter,
    which may ask for advantages. Computed once over the whole update batch, without gradient.
    Raises: PartError where the advantage has neither shape [N] nor [B, T], or a critic gets no
    returns.
    """
    with torch.no_grad():
        penalty = penalize(batch, kl)
        batch = replace(
            batch,
            token_rewards=F.fill_masked(batch.token_rewards - penalty, batch.response_mask, 0.0),
        )
        if kl.in_baseline:
            of_rollouts = F.segment_sum(
                penalize(whole(batch), kl), batch.rollout_ids, n=len(batch.rewards)
            )
            batch = replace(batch, rewards=batch.rewards - of_rollouts)
        given = quantities(batch)
        advantages, returns, measured = _estimate(batch, algorithm, given)
        if kl.in_reward and not kl.in_baseline and not asks(algorithm.advantage, "token_rewards"):
            # what cannot be scored has no advantage, whatever its KL
            later = F.fill_masked(_reward_to_go(penalty, batch), _scored(batch), 0.0)
            advantages = advantages - later
        given |= {"advantages": advantages}
        if returns is not None:
            given |= {"returns": returns}
        rank = None
        if asks(algorithm.policy_loss, "covariance_rank"):
            rank = given["covariance_rank"] = call(F.covariance_rank, given)
        scale, scaled = _scale(batch, algorithm, given)
        return Weighted(
            **vars(batch) | {"metrics": {**batch.metrics, **measured, **scaled}},
            advantages=advantages,
            returns=returns,
            covariance_rank=rank,
            scale=scale,
        )


def _estimate(
    batch: Scored, algorithm: Algorithm, given: dict[str, Any]
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Normalised advantages [B, T], returns [B, T] or None, and what the two parts measured."""
    estimate, measured = part("advantage", algorithm.advantage, given)
    advantages, returns = estimate if isinstance(estimate, Estimate) else (estimate, None)
    if algorithm.critic.active and returns is None:
        who = f"algorithm.advantage ({written(algorithm.advantage)})"
        raise PartError(
            f"{who}: gave no returns, and the critic needs them; give"
            " rlkit.types.Estimate(advantages, returns)"
        )
    if advantages.dim() == 1:
        advantages = advantages[batch.rollout_ids][:, None].expand_as(batch.ids)
    # what cannot be scored teaches neither policy nor critic
    scored = _scored(batch)
    of_advantages = {"advantages": F.fill_masked(advantages, scored, 0.0)}
    advantages, normalized = part("normalization", algorithm.normalization, given | of_advantages)
    if returns is not None:
        known = torch.where(scored, returns, _required(batch.values, "values"))
        returns = F.fill_masked(known, batch.response_mask, 0.0)
    return F.fill_masked(advantages, scored, 0.0), returns, measured | normalized


def _scored(batch: Batch) -> Tensor:
    """[B, T] True on trained tokens of rollouts that have a reward."""
    return batch.response_mask & ~batch.rewards.isnan()[batch.rollout_ids][:, None]


def _scale(
    batch: Scored, algorithm: Algorithm, given: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Off-policy correction × token filter [B, T], and what both measured. A correction to an old
    policy that moves with the current one is left to `surrogate`."""
    factor: Any = 1.0
    corrected: dict[str, Tensor] = {}
    if batch.old_share is None:
        factor, corrected = part("correction", algorithm.correction, given)
    kept, filtered = part("token_filter", algorithm.token_filter, given)
    return F.fill_masked(factor * kept, batch.response_mask, 0.0), corrected | filtered


def whole(batch: Rows) -> Rows:
    """The batch with every sampled token in its response_mask, those of rollouts that are not
    trained on too."""
    return replace(batch, response_mask=batch.sampled_mask)


def penalize(batch: Scored, kl: KL) -> Tensor:
    """What the KL takes off the reward of each token [B, T], at the policy before the update; zeros
    where it is not in the reward."""
    if not kl.in_reward:
        return torch.zeros_like(batch.token_rewards)
    mask = batch.response_mask
    given = quantities(batch)
    given["logprobs"] = given["logprobs_old"] = F.fill_masked(
        _required(batch.logprobs_old, "logprobs_old"), mask, 0.0
    )
    given["logprobs_ref"] = F.fill_masked(_required(batch.logprobs_ref, "logprobs_ref"), mask, 0.0)
    divergence = F.fill_masked(
        part("kl_estimator", _required(kl.estimator, "estimator"), given)[0], mask, 0.0
    )
    if kl.placement == "reward_sequence":
        divergence = F.rollout_mean(divergence, mask, batch.rollout_ids) * last_tokens(batch)
    return number(kl.coef) * divergence.to(batch.token_rewards.dtype)


def _reward_to_go(values: Tensor, batch: Batch) -> Tensor:
    """Sum over a token and all trained tokens of its rollout after it [B, T]: tools and users are
    passed over."""
    positions, mask = F.episode_positions(batch.rollout_ids, batch.step_ids, batch.response_mask)
    later = F.to_episodes(values, positions, mask).flip(1).cumsum(1).flip(1)
    return F.from_episodes(later, positions, mask, values)


def loss_weights(batch: Weighted, algorithm: Algorithm) -> Minibatch:
    """The batch with each token's share of the loss, and no other metrics than its own. Once per
    optimiser step, on all of its rows."""
    with torch.no_grad():
        weights, metrics = part("aggregation", algorithm.aggregation, quantities(batch))
        return Minibatch(**vars(batch) | {"metrics": metrics}, weights=weights)


# ----------------------------------------------------------------------------------------- the loss


def surrogate(
    batch: Minibatch, scores: TokenLogprobs, algorithm: Algorithm, kl: KL
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy's loss on some rows of an update batch: Σ weights · (scale · policy loss + coef ·
    KL - entropy_coef · entropy).

    Sums over rows, never means.

    Args:
      batch: with advantages, weights, old log-probs and, where `kl` stands in the loss, reference
        log-probs.
      scores: of the policy being trained.
    Returns: the loss, and the terms that the metrics are made of, detached: [B, T] per token, and
      what parts measure as PART/NAME.
    """
    mask = batch.response_mask
    given = quantities(batch) | {
        name: F.fill_masked(value, mask, 0.0)
        for name, value in scores._asdict().items()
        if value is not None
    }
    if batch.old_share is not None:
        old = F.interpolated_old(scores.logprobs, batch.logprobs_sampler, batch.old_share, mask)
    else:
        old = scores.logprobs.detach() if batch.logprobs_old is None else batch.logprobs_old
    given["logprobs_old"] = F.fill_masked(old, mask, 0.0)
    given["ratio"], measured = part("ratio", algorithm.ratio, given)
    loss, of_loss = part("policy_loss", algorithm.policy_loss, given)
    terms = (
        {"policy_loss": loss, "ratio": given["ratio"]}
        | measured
        | of_loss
        | clipped_tokens(algorithm.policy_loss, given)
    )
    scale = batch.scale
    if batch.old_share is not None:
        factor, corrected = part("correction", algorithm.correction, given)
        scale = factor.detach() * scale
        terms |= corrected | {"scale": scale}
    per_token = scale * terms["policy_loss"]
    if algorithm.reward_coef != 1:
        per_token = algorithm.reward_coef * per_token
    if kl.active:
        given["logprobs_ref"] = F.fill_masked(
            _required(batch.logprobs_ref, "logprobs_ref"), mask, 0.0
        )
        if asks(kl.estimator, "full_kl"):
            _required(scores.full_kl, "full_kl")
        terms["kl"], measured = part("kl_estimator", _required(kl.estimator, "estimator"), given)
        terms |= measured
    if kl.in_loss:
        weight = (
            F.token_ratio(given["logprobs"], given["logprobs_old"], mask)
            if kl.importance_weight
            else 1.0
        )
        per_token = per_token + number(kl.coef) * weight * terms["kl"]
    if algorithm.entropy_coef:
        per_token = per_token - number(algorithm.entropy_coef) * given["entropy"]
    loss = (batch.weights * F.fill_masked(per_token, mask, 0.0)).sum()
    return loss, {name: term.detach() for name, term in terms.items()}


def value_surrogate(
    batch: Minibatch, scores: TokenLogprobs, critic: Critic
) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's loss on some rows of an update batch: coef · Σ weights · value loss; and its
    terms, detached."""
    mask = batch.response_mask
    given = quantities(batch) | {
        "values": F.fill_masked(F.full_precision(_required(scores.values, "values")), mask, 0.0),
        "values_old": F.fill_masked(_required(batch.values, "values"), mask, 0.0),
        "returns": _required(batch.returns, "returns"),
    }
    per_token, measured = part("value_loss", _required(critic.loss, "critic.loss"), given)
    loss = critic.coef * (batch.weights * F.fill_masked(per_token, mask, 0.0)).sum()
    return loss, {"value_loss": per_token.detach(), "values": given["values"].detach()} | measured


def number(coefficient: float | Controller) -> float:
    """A coefficient in an experiment of a step, where every controller has become a number
    (rlkit.training.schedules.at)."""
    if isinstance(coefficient, Controller):
        raise TypeError(
            "a controller is no number; take the experiment of a step,"
            " rlkit.training.schedules.at(experiment, progress)"
        )
    return coefficient


def _required(value: Any, name: str) -> Any:
    if value is None:
        raise ValueError(f"the batch has no {name}; prepare it before the update")
    return value
