"""Every shipped part under the Protocol of its place, and parts that are refused there. mypy reads
this file, and fails if a part returns a value that its place does not take."""

from torch import Tensor

from rlkit import functional as F
from rlkit import rewards as R
from rlkit import types as t

ADVANTAGES: tuple[t.AdvantageFn, ...] = (
    F.raw,
    F.batch_mean,
    F.group_mean,
    F.leave_one_out,
    F.length_weighted,
    F.max_rl,
    F.pairwise,
    F.gpg,
)
OF_GROUPS_AND_TOKENS: tuple[t.AdvantageFn, ...] = (
    F.pass_at_k_advantage,
    F.best_minus_second,
    F.reward_to_go,
    F.gae,
    F.turn_gae,
)
LATER_ADVANTAGES: tuple[t.AdvantageFn, ...] = (F.gdpo, F.remax, F.turn_group_mean)
NORMALIZATIONS: tuple[t.NormalizationFn, ...] = (
    F.no_normalization,
    F.normalize_group,
    F.normalize_batch,
    F.normalize_advantages,
    F.whiten,
)
RATIOS: tuple[t.RatioFn, ...] = (F.token_ratio, F.sequence_ratio, F.sequence_token_ratio)
POLICY_LOSSES: tuple[t.PolicyLossFn, ...] = (
    F.clipped,
    F.cispo,
    F.sapo,
    F.gmpo,
    F.reinforce,
    F.kl_cov,
    F.vespo,
    F.dppo,
)
AGGREGATIONS: tuple[t.AggregationFn, ...] = (
    F.token_mean,
    F.sequence_mean,
    F.sequence_sum,
    F.prompt_mean,
)
GROUP_FILTERS: tuple[t.GroupFilterFn, ...] = (F.keep_all, F.mixed_groups, F.mixed_component)
OVERLONG: tuple[t.OverlongFn, ...] = (F.keep_overlong, F.soft_penalty, F.mask_truncated)
TOKEN_FILTERS: tuple[t.TokenFilterFn, ...] = (F.every_token, F.top_entropy, F.clip_cov)
CORRECTIONS: tuple[t.CorrectionFn, ...] = (
    F.no_correction,
    F.automatic_correction,
    F.token_correction,
    F.sequence_correction,
)
MASKS: tuple[t.CorrectionFn, ...] = (
    F.geometric_mask,
    F.divergence_mask,
    F.binary_kl_mask,
    F.second_moment_mask,
)
PRODUCTS: tuple[t.CorrectionFn, ...] = (F.product_correction,)
VALUE_LOSSES: tuple[t.ValueLossFn, ...] = (F.squared_error, F.clipped_squared_error)
KLS: tuple[t.KLFn, ...] = (
    F.k1,
    F.k2,
    F.k3,
    F.forward,
    F.reverse,
    F.truncated,
    F.confident,
    F.full,
    F.k3_straight_through,
)
REWARDS: tuple[t.RewardFn, ...] = (
    R.contains,
    R.environment,
    R.exact_match,
    R.few_turns,
    R.format_match,
    R.length,
    R.numeric,
    R.repetition,
    R.soft_length,
)
REWARDS_OF_TOOLS: tuple[t.RewardFn, ...] = (R.tool_usage,)
AGGREGATORS: tuple[t.AggregatorFn, ...] = (
    R.weighted_sum,
    R.smallest,
    R.largest,
    R.mean,
    R.product,
    R.group_normalised,
)


# A user's parts: two are right, and mypy must refuse five, or it calls their comments unused.


def loss_of_a_number(ratio: Tensor) -> float:
    return float(ratio.mean())


def loss_with_figures(ratio: Tensor) -> tuple[Tensor, dict[str, float]]:
    return ratio, {"mean": float(ratio.mean())}


def overlong_of_three(rewards: Tensor) -> tuple[Tensor, Tensor, float]:
    return rewards, rewards > 0, 0.0


def advantage_of_nothing(rewards: Tensor) -> None:
    rewards.mean()


def advantage_with_a_number(rewards: Tensor, *, k: int) -> Tensor:
    return rewards / k


def reward_of_a_text(text: str) -> float:
    return float(len(text))


def sum_with_one_weight(scores: list[float], weights: int) -> float:
    return sum(scores) * weights


right_loss: t.PolicyLossFn = loss_with_figures
right_advantage: t.AdvantageFn = advantage_with_a_number
wrong_loss: t.PolicyLossFn = loss_of_a_number  # type: ignore[assignment]
wrong_overlong: t.OverlongFn = overlong_of_three  # type: ignore[assignment]
wrong_advantage: t.AdvantageFn = advantage_of_nothing  # type: ignore[assignment]
wrong_reward: t.RewardFn = reward_of_a_text  # type: ignore[assignment]
wrong_sum: t.AggregatorFn = sum_with_one_weight  # type: ignore[assignment]
