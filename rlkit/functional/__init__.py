"""Pure tensor maths: no config, no model, no state, no I/O.

Positional parameters are quantities, named as in `rlkit.types.QUANTITIES` where they are injected
by name; hyperparameters are keyword-only. Each topic has one module. To add an advantage, loss,
estimator, aggregation or filter, write one function in its module and one line here.

Each file imports only files before it in this list: _arguments, masking, aggregation, entropy,
overlong, pairs, proximal, ratios, sampling, value_losses, filters, kl, log_probs, policy_losses,
_groups, corrections, diagnostics, divergences, advantages, normalization.
"""

from rlkit.functional.advantages import (
    batch_mean,
    best_minus_second,
    gae,
    gdpo,
    gpg,
    group_mean,
    leave_one_out,
    length_weighted,
    max_rl,
    pass_at_k_advantage,
    raw,
    remax,
    reward_to_go,
    turn_gae,
    turn_group_mean,
)
from rlkit.functional.aggregation import prompt_mean, sequence_mean, sequence_sum, token_mean
from rlkit.functional.corrections import (
    automatic_correction,
    binary_kl_mask,
    divergence_mask,
    geometric_mask,
    no_correction,
    product_correction,
    second_moment_mask,
    sequence_correction,
    token_correction,
)
from rlkit.functional.diagnostics import (
    approximate_kl,
    correlation,
    effective_sample_size,
    explained_variance,
    ratio_statistics,
)
from rlkit.functional.divergences import (
    chunked_divergence,
    jensen_shannon,
    kl_student_teacher,
    kl_teacher_student,
    sampled_divergence,
    top_k_divergence,
)
from rlkit.functional.entropy import from_log_probs, from_logits
from rlkit.functional.filters import (
    clip_cov,
    covariance_rank,
    every_token,
    keep_all,
    mixed_component,
    mixed_groups,
    top_entropy,
)
from rlkit.functional.kl import (
    confident,
    forward,
    full,
    k1,
    k2,
    k3,
    k3_straight_through,
    reverse,
    truncated,
)
from rlkit.functional.log_probs import chunked_log_probs, token_log_probs
from rlkit.functional.masking import (
    episode_positions,
    fill_masked,
    from_episodes,
    full_precision,
    masked_mean,
    rollout_mean,
    segment_sum,
    to_episodes,
)
from rlkit.functional.normalization import (
    no_normalization,
    normalize_advantages,
    normalize_batch,
    normalize_group,
    whiten,
)
from rlkit.functional.overlong import keep_overlong, mask_truncated, soft_penalty
from rlkit.functional.pairs import all_pairs, best_worst, pairwise, pairwise_loss
from rlkit.functional.policy_losses import (
    cispo,
    clipped,
    dppo,
    gmpo,
    kl_cov,
    reinforce,
    sapo,
    vespo,
)
from rlkit.functional.proximal import binary_kl, interpolated_old
from rlkit.functional.ratios import log_ratio, sequence_ratio, sequence_token_ratio, token_ratio
from rlkit.functional.sampling import cut_distribution, gumbel_choice, gumbel_noise, mix
from rlkit.functional.value_losses import clipped_squared_error, squared_error

# every function imported above
__all__ = [name for name, part in list(globals().items()) if callable(part)]
