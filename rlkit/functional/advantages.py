"""Advantages of whole rollouts, [N] rewards → [N], and of tokens, → [B, T]; computed once without gradient over the whole
update batch.

A reward of nan cannot be scored: it takes no part in any baseline and its advantage is 0. Where the rewards compared
with each other are all equal the advantage is exactly 0, with no rounding for an epsilon to blow up. The arithmetic is
in float64 and the result has the dtype of `rewards`.

Token-level estimators count sampled tokens only: what tools and users say between them is passed over, neither a reset
nor a step of the discount.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlkit.functional._arguments import require
from rlkit.functional.filters import mixed_groups
from rlkit.functional.masking import fill_masked, segment_sum


def raw(rewards: Tensor) -> Tensor:
    """The reward itself: REINFORCE without a baseline.

    A_i = R_i

    Args:
      rewards: [N], nan where it cannot be scored.
    Returns: [N], in units of reward; 0 for nan.
    Source: Williams 1992, "Simple statistical gradient-following algorithms", section 4.

    >>> raw(torch.tensor([1.0, float("nan"), -2.0]))
    tensor([ 1.,  0., -2.])
    """
    return rewards.where(~rewards.isnan(), 0.0)


def batch_mean(rewards: Tensor) -> Tensor:
    """The reward above the mean of the whole batch: REINFORCE with a baseline.

    A_i = R_i - mean(R)

    Args:
      rewards: [N], nan where it cannot be scored.
    Returns: [N], in units of reward; sums to 0 over the batch. All equal, or only one scored: 0.
    Source: Williams 1992, section 4; the mean includes R_i itself, which shrinks the expected gradient by (N-1)/N.

    >>> batch_mean(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    tensor([ 0.5000, -0.5000, -0.5000,  0.5000])
    """
    return group_mean(rewards, torch.zeros_like(rewards, dtype=torch.int64))


def group_mean(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The reward above the mean of its group, not divided by a standard deviation.

    A_i = R_i - mean_g(R)

    Args:
      rewards: [N], nan where it cannot be scored.
      group_ids: [N] any integers; members need not be neighbours.
    Returns: [N], in units of reward; sums to 0 over a group. All equal, or a group of one: 0.
    Source: Dr. GRPO, Liu et al. 2025, section 3.2, arXiv:2503.20783.

    >>> group_mean(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0, 0, 1]))
    tensor([ 0.5000, -0.5000,  0.0000])
    """
    deviation, _, _ = _centred(rewards, group_ids)
    return deviation.to(rewards.dtype)


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The reward above the mean of the *other* rollouts of its group.

    A_i = R_i - Σ_{j≠i} R_j / (n-1) = n/(n-1) · (R_i - mean_g(R)), n scored rollouts in the group

    Args:
      rewards: [N], nan where it cannot be scored.
      group_ids: [N] any integers.
    Returns: [N], in units of reward. All equal, or a group of one: 0 (verl's loop form gives a group of one its reward;
      its vectorised form gives 0, as here).
    Source: RLOO, Ahmadian et al. 2024, section 3.3, arXiv:2402.14740; Kool et al. 2019.

    >>> leave_one_out(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 0, 0]))
    tensor([ 1.0000, -0.5000, -0.5000])
    """
    deviation, count, group = _centred(rewards, group_ids)
    return (deviation * (count / (count - 1).clamp_min(1))[group]).to(rewards.dtype)


def group_norm(rewards: Tensor, group_ids: Tensor, *, std: Literal["sample", "population"] = "sample", eps: float = 1e-4) -> Tensor:
    """The reward standardised within its group.

    A_i = (R_i - mean_g(R)) / (std_g(R) + eps)

    Args:
      rewards: [N], nan where it cannot be scored.
      group_ids: [N] any integers.
      std: "sample" divides the squares by n-1 (TRL, verl, OpenRLHF), "population" by n (open-instruct, the paper's code
        leaves it open). For two rollouts, 0 and 1, that is ±0.71 against ±1.
      eps: ≥ 0, in units of reward. TRL 1e-4, verl and SkyRL 1e-6, OpenRLHF 1e-9.
    Returns: [N], dimensionless. All equal, or a group of one: exactly 0 (verl gives a group of one its reward).
    Raises: ValueError naming `std` or `eps`.
    Source: GRPO, Shao et al. 2024, section 4.1.2, arXiv:2402.03300.

    >>> group_norm(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), std="population", eps=0.0)
    tensor([ 1., -1.])
    """
    require(std in ("sample", "population"), "std", std, "sample or population")
    require(0 <= eps < float("inf"), "eps", eps, "≥ 0 and finite")
    deviation, count, group = _centred(rewards, group_ids)
    return (deviation / _spread(deviation, count, group, std, eps)[group]).to(rewards.dtype)


def length_weighted(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """The reward above the mean of its group weighted by length: the baseline of least variance.

    A_i = R_i - Σ_j |y_j| R_j / Σ_j |y_j|, j over the scored rollouts of the group

    The squared norm of a rollout's score function is taken to grow with its length, which makes this the optimal baseline
    of a loss that sums over tokens.

    Args:
      rewards: [N], nan where it cannot be scored.
      group_ids: [N] any integers.
      lengths: [N] sampled tokens, ≥ 0. Of a group without any token the rollouts count the same.
    Returns: [N], in units of reward; the sum weighted by length is 0 over a group. All equal, or a group of one: 0.
    Source: OPO, Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline", arXiv:2505.23585.

    >>> length_weighted(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([30, 10]))
    tensor([ 0.2500, -0.7500])
    """
    deviation, count, group = _centred(rewards, group_ids)
    weight = lengths.double().where(~rewards.isnan(), 0.0)
    total = torch.zeros_like(count).index_add(0, group, weight)
    excess = torch.zeros_like(count).index_add(0, group, weight * deviation) / total.where(total > 0, 1.0)
    return (deviation - excess[group]).where(~rewards.isnan() & mixed_groups(rewards, group_ids), 0.0).to(rewards.dtype)


def max_rl(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The reward above the mean of its group, in units of that mean: hard prompts count more.

    A_i = (R_i - mean_g(R)) / mean_g(R); 0 where mean_g(R) ≤ 0

    For rewards 0 and 1 the expected gradient is that of a truncated series of log p(correct): maximum likelihood instead
    of the mean, which is its first term.

    Args:
      rewards: [N], ≥ 0 in the paper (0 or 1), nan where it cannot be scored.
      group_ids: [N] any integers.
    Returns: [N], dimensionless; sums to 0 over a group. All equal, or a group of one: 0. As prime-rl; SkyRL and TRL add
      1e-6 to the mean.
    Source: MaxRL, Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning", arXiv:2602.02710.

    >>> max_rl(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 0]))
    tensor([ 3., -1., -1., -1.])
    """
    deviation, count, group = _centred(rewards, group_ids)
    mean = torch.zeros_like(count).index_add(0, group, rewards.double().nan_to_num(0.0)) / count.clamp_min(1)
    return (deviation / mean.where(mean > 0, torch.inf)[group]).to(rewards.dtype)


def pass_at_k_advantage(rewards: Tensor, group_ids: Tensor, *, k: int = 4, correct_above: float = 0.5) -> Tensor:
    """Advantage for the best of k samples: the mean over all k-subsets of a group that hold the rollout, in closed form.

    ρ = 1 - C(n-c, k) / C(n, k), σ = √(ρ (1-ρ)), n scored and c correct rollouts in the group
    A_i = (1 - ρ) / σ where correct, (1 - ρ - C(n-c-1, k-1) / C(n-1, k-1)) / σ elsewhere

    A subset is rewarded 1 where any of its rollouts is correct, and standardised over all subsets.

    Args:
      rewards: [N], nan where it cannot be scored.
      group_ids: [N] any integers.
      k: ≥ 1 samples in a subset; all of them in a group that has fewer scored. 1 is group_norm of 0 and 1 with the
        population's deviation and no epsilon.
      correct_above: rewards above this are correct.
    Returns: [N], dimensionless; sums to 0 over a group. 0 where every subset holds a correct rollout, or none does.
    Raises: ValueError naming `k` or `correct_above`.
    Source: Chen et al. 2025, "Pass@k Training for Adaptively Balancing Exploration and Exploitation of Large Reasoning
      Models", section 2.4, arXiv:2508.10751.

    >>> pass_at_k_advantage(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4).long(), k=2)
    tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """
    require(k >= 1, "k", k, "≥ 1")
    require(-float("inf") < correct_above < float("inf"), "correct_above", correct_above, "finite")
    groups, group = group_ids.unique(return_inverse=True)
    scored, correct = ~rewards.isnan(), rewards > correct_above
    zeros = torch.zeros(groups.numel(), dtype=torch.float64, device=rewards.device)
    n = zeros.index_add(0, group, scored.double())
    wrong = zeros.index_add(0, group, (scored & ~correct).double())
    rest = torch.ones_like(n)  # C(n-c-1, k-1) / C(n-1, k-1), factor by factor
    for j in range(1, k):
        rest = rest * ((wrong - j).clamp_min(0) / (n - j).clamp_min(1)).where(n > j, 1.0)
    none_correct = wrong / n.clamp_min(1) * rest  # 1 - ρ
    spread = (none_correct * (1 - none_correct)).sqrt()
    advantage = torch.where(correct, none_correct[group], (none_correct - rest)[group]) / spread.where(spread > 0, torch.inf)[group]
    return advantage.where(scored, 0.0).to(rewards.dtype)


def best_minus_second(
    rewards: Tensor, group_ids: Tensor, *, std: Literal["sample", "population", "none"] = "sample", eps: float = 1e-6
) -> Tensor:
    """Only the best rollout of a group counts, by how far it is above the second: the best of all samples, leave-one-out.

    A_i = max_g(R) - max_{j≠i} R_j, which is R₁ - R₂ for the best and 0 for all others; over std_g(R) + eps unless "none"

    Args:
      rewards: [N], nan where it cannot be scored.
      group_ids: [N] any integers.
      std: "sample" (verl), "population", or "none", the estimator as published.
      eps: ≥ 0, in units of reward; verl 1e-6.
    Returns: [N], never negative. Two that share the best place, or a group of one: 0.
    Raises: ValueError naming `std` or `eps`.
    Source: Tang et al. 2025, "Optimizing language models for inference time objectives using reinforcement learning",
      arXiv:2503.19595; in verl `grpo_passk`. For the closed form over all subsets see `pass_at_k_advantage`.

    >>> best_minus_second(torch.tensor([0.2, 1.0, 0.7]), torch.tensor([0, 0, 0]), std="none")
    tensor([0.0000, 0.3000, 0.0000])
    """
    require(std in ("sample", "population", "none"), "std", std, "sample, population or none")
    require(0 <= eps < float("inf"), "eps", eps, "≥ 0 and finite")
    deviation, count, group = _centred(rewards, group_ids)
    compared = deviation.where(~rewards.isnan() & mixed_groups(rewards, group_ids), -torch.inf)
    lowest = torch.full_like(count, -torch.inf)
    first = lowest.scatter_reduce(0, group, compared, "amax")
    best = (compared == first[group]) & compared.isfinite()
    alone = torch.zeros_like(count).index_add(0, group, best.double()) == 1
    second = lowest.scatter_reduce(0, group, compared.where(~best, -torch.inf), "amax")
    margin = (first[group] - second[group]).where(best & alone[group], 0.0)
    scale = 1.0 if std == "none" else _spread(deviation, count, group, std, eps)[group]
    return (margin / scale).to(rewards.dtype)


def reward_to_go(rewards: Tensor, rollout_ids: Tensor, step_ids: Tensor, response_mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """The discounted return of each sampled token, for a reward at the last sampled token of the rollout.

    G_t = γ^(sampled tokens of the rollout after t) · R

    Tool and user tokens are passed over: they neither end the return nor discount it. Peers have zeroed it there, which
    takes the credit from all that was sampled before a tool's answer.

    Args:
      rewards: [N], nan where it cannot be scored.
      rollout_ids: [B], rows of one rollout need not be neighbours.
      step_ids: [B, T]; where a rollout fills several rows, they follow one another by the step of their sampled tokens.
      response_mask: [B, T] bool.
      gamma: 0 ≤ gamma ≤ 1, per sampled token.
    Returns: [B, T], in units of reward; 0 outside the mask and where the reward is nan.
    Raises: ValueError naming gamma.
    Source: Sutton and Barto 2018, "Reinforcement Learning", section 3.3.

    >>> mask = torch.tensor([[False, True, False, True, True]])
    >>> reward_to_go(torch.tensor([1.0]), torch.tensor([0]), torch.zeros(1, 5).long(), mask, gamma=0.5)
    tensor([[0.0000, 0.2500, 0.0000, 0.5000, 1.0000]])
    """
    require(0 <= gamma <= 1, "gamma", gamma, "0 ≤ gamma ≤ 1")
    after = _tokens_after(rollout_ids, step_ids, response_mask)
    returns = gamma ** after.double() * raw(rewards).double()[rollout_ids].unsqueeze(-1)
    return fill_masked(returns, response_mask, 0.0).to(rewards.dtype)


def reinforce_pp(
    rewards: Tensor, rollout_ids: Tensor, step_ids: Tensor, response_mask: Tensor, *, gamma: float = 1.0, eps: float = 1e-8
) -> Tensor:
    """The discounted return of each sampled token, standardised over all sampled tokens of the batch.

    A_t = (G_t - mean(G)) / √(var(G) + eps), G as in `reward_to_go`, var with n - 1

    Args:
      rewards: [N], nan where it cannot be scored: its tokens take no part.
      rollout_ids: [B]. step_ids: [B, T]. response_mask: [B, T] bool. As in `reward_to_go`.
      gamma: 0 ≤ gamma ≤ 1, per sampled token. eps: ≥ 0, in squared units of reward.
    Returns: [B, T], dimensionless, 0 outside the mask; sums to 0 over the tokens of the batch. All returns equal: 0.
    Raises: ValueError naming `gamma` or `eps`.
    Source: REINFORCE++, Hu 2025, arXiv:2501.03262; the whitening as in verl. The KL that the paper puts into the reward
      is the business of the `kl` part.

    >>> mask = torch.tensor([[True, False], [True, True]])
    >>> reinforce_pp(torch.tensor([1.0, 0.0]), torch.tensor([0, 1]), torch.zeros(2, 2).long(), mask)
    tensor([[ 1.1547,  0.0000],
            [-0.5774, -0.5774]])
    """
    require(0 <= eps < float("inf"), "eps", eps, "≥ 0 and finite")
    returns = reward_to_go(rewards.double(), rollout_ids, step_ids, response_mask, gamma=gamma)
    scored = response_mask & ~rewards.isnan()[rollout_ids].unsqueeze(-1)
    return _whitened(returns, scored, eps).to(rewards.dtype)


def reinforce_pp_baseline(rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor, response_mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """The reward above the mean of its group, standardised over all sampled tokens of the batch.

    A_t = (D_t - mean(D)) / √(var(D) + eps), D_t = R_i - mean_g(R) on each token of rollout i, var with n - 1

    Args:
      rewards: [N], nan where it cannot be scored: its tokens take no part.
      group_ids: [N] any integers. rollout_ids: [B]. response_mask: [B, T] bool.
      eps: ≥ 0, in squared units of reward.
    Returns: [B, T], dimensionless, 0 outside the mask; sums to 0 over the tokens of the batch. No group has spread: 0.
    Raises: ValueError naming eps.
    Source: REINFORCE++-baseline, Hu 2025, arXiv:2501.03262; as in verl.

    >>> mask = torch.tensor([[True, False], [True, True]])
    >>> reinforce_pp_baseline(torch.tensor([3.0, 2.0]), torch.tensor([7, 7]), torch.tensor([0, 1]), mask)
    tensor([[ 1.1547,  0.0000],
            [-0.5774, -0.5774]])
    """
    require(0 <= eps < float("inf"), "eps", eps, "≥ 0 and finite")
    deviation, _, _ = _centred(rewards, group_ids)
    scored = response_mask & ~rewards.isnan()[rollout_ids].unsqueeze(-1)
    return _whitened(deviation[rollout_ids].unsqueeze(-1).expand(response_mask.shape), scored, eps).to(rewards.dtype)


def _spread(deviation: Tensor, count: Tensor, group: Tensor, std: str, eps: float) -> Tensor:
    """Standard deviation of each group plus eps [groups]; 1 where there is no spread, and so nothing to divide."""
    squares = torch.zeros_like(count).index_add(0, group, deviation.square())
    free = (count - 1 if std == "sample" else count).clamp_min(1)
    scale = (squares / free).sqrt() + eps
    return scale.where(squares > 0, 1.0)


def _whitened(values: Tensor, mask: Tensor, eps: float) -> Tensor:
    """Standardised over the entries where the mask is True; 0 elsewhere, and everywhere where those are all equal."""
    counted = values[mask]
    if counted.numel() < 2 or bool((counted == counted[0]).all()):
        return torch.zeros_like(values)
    centred = values - counted.mean()
    return fill_masked(centred / (counted.var() + eps).sqrt(), mask, 0.0)


def _tokens_after(rollout_ids: Tensor, step_ids: Tensor, response_mask: Tensor) -> Tensor:
    """How many sampled tokens of the same rollout come after each position [B, T], over all rows of the rollout."""
    counts = response_mask.sum(1)
    within = counts.unsqueeze(1) - response_mask.cumsum(1)
    first_step = step_ids.where(response_mask, torch.iinfo(step_ids.dtype).max).amin(1)
    order = first_step.argsort(stable=True)
    order = order[rollout_ids[order].argsort(stable=True)]  # by rollout, then by step
    ends = segment_sum(counts, rollout_ids).cumsum(0)[rollout_ids[order]]  # tokens up to the end of the row's rollout
    later = torch.empty_like(counts).index_copy(0, order, ends - counts[order].cumsum(0))
    return within + later.unsqueeze(1)


def _centred(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Deviations from the group's mean [N], scored rollouts a group [groups], and which group each rollout is in [N].

    Deviations are exactly 0 for nan rewards and in groups without spread.
    """
    groups, group = group_ids.unique(return_inverse=True)
    scored = ~rewards.isnan()
    scores = rewards.double().where(scored, 0.0)
    zeros = scores.new_zeros(groups.numel())
    count = zeros.index_add(0, group, scored.double())
    mean = zeros.index_add(0, group, scores) / count.clamp_min(1)
    deviation = (scores - mean[group]).where(scored & mixed_groups(rewards, group_ids), 0.0)
    return deviation, count, group
