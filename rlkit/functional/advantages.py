"""Advantages: of whole rollouts, rewards [N] → [N], and of tokens, token rewards [B, T] → [B, T].
They are computed once, over the whole update batch and without gradient.

A rollout with the reward nan is unscored. It takes no part in any baseline, and its advantage is 0.
If the compared rewards are all equal, the advantage is exactly 0, so there is no rounding error for
an epsilon to amplify. A group of one gives 0 if its rewards are compared within the group; most
estimators of verl then give it its reward. The arithmetic is in float64 and the result has the
dtype of `rewards`.

Token-level estimators read `token_rewards` instead of `rewards`, and the result has the dtype of
`token_rewards`. For an unscored rollout, `token_rewards` holds the KL penalty only. These
estimators count sampled tokens only. They skip the text of tools and users: this text neither
resets the estimate nor counts as a step of the discount.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlkit.functional._arguments import require, require_unsigned
from rlkit.functional._groups import centre_groups, spread
from rlkit.functional.filters import mixed_groups
from rlkit.functional.masking import episode_positions, fill_masked, from_episodes, to_episodes
from rlkit.types import Estimate, assumes, safe


def raw(rewards: Tensor) -> Tensor:
    """Return each reward as its advantage: REINFORCE without a baseline.

    A_i = R_i

    Args:
      rewards: [N], nan for an unscored rollout.
    Returns: [N], in units of reward; 0 for nan.
    Source: Williams 1992, "Simple statistical gradient-following algorithms", section 4.

    >>> raw(torch.tensor([1.0, float("nan"), -2.0]))
    tensor([ 1.,  0., -2.])
    """
    return rewards.where(~rewards.isnan(), 0.0)


def batch_mean(rewards: Tensor) -> Tensor:
    """Subtract the mean reward of the whole batch: REINFORCE with a baseline.

    A_i = R_i - mean(R)

    Args:
      rewards: [N], nan for an unscored rollout.
    Returns: [N], in units of reward; sums to 0 over the batch. All are 0 if the rewards are equal
      or only one rollout is scored.
    Source: Williams 1992, section 4; the mean includes R_i itself, so the expected gradient shrinks
      by (N-1)/N.

    >>> batch_mean(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    tensor([ 0.5000, -0.5000, -0.5000,  0.5000])
    """
    return group_mean(rewards, torch.zeros_like(rewards, dtype=torch.int64))


def group_mean(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Subtract the mean reward of the group, without dividing by a standard deviation.

    A_i = R_i - mean_g(R)

    The mean includes R_i itself. With n scored rollouts in the group, this shrinks the expected
    gradient by (n-1)/n and keeps its direction. With a loss summed over tokens, the expected
    gradient is the policy gradient up to this factor.

    Args:
      rewards: [N], nan for an unscored rollout.
      group_ids: [N] any integers; the rollouts of a group need not be neighbours.
    Returns: [N], in units of reward; sums to 0 over a group. All are 0 in a group with equal
      rewards, or with only one rollout.
    Source: Dr. GRPO, Liu et al. 2025, section 3.2, arXiv:2503.20783.

    >>> group_mean(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0, 0, 1]))
    tensor([ 0.5000, -0.5000,  0.0000])
    """
    deviation, _, _ = centre_groups(rewards, group_ids)
    return deviation.to(rewards.dtype)


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Subtract the mean reward of the *other* rollouts of the group.

    A_i = R_i - Σ_{j≠i} R_j / (n-1) = n/(n-1) · (R_i - mean_g(R)), n scored rollouts in the group

    Args:
      rewards: [N], nan for an unscored rollout.
      group_ids: [N] any integers.
    Returns: [N], in units of reward. All are 0 in a group with equal rewards, or with only one
      rollout. (For a group of one, verl's loop form returns the reward; verl's vectorised form
      returns 0, as here.)
    Source: RLOO, Ahmadian et al. 2024, section 2.3, arXiv:2402.14740; Kool et al. 2019.

    >>> leave_one_out(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 0, 0]))
    tensor([ 1.0000, -0.5000, -0.5000])
    """
    deviation, count, group = centre_groups(rewards, group_ids)
    return (deviation * (count / (count - 1).clamp_min(1))[group]).to(rewards.dtype)


def length_weighted(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """Subtract the mean reward of the group, weighted by length: the baseline of least variance.

    A_i = R_i - Σ_j |y_j| R_j / Σ_j |y_j|, j over the scored rollouts of the group

    The squared norm of a rollout's score function is assumed to grow with its length. Under this
    assumption the baseline is optimal for a loss summed over tokens. The baseline includes the
    rollout itself, weighted by its length. If the policy decides the length, the expected update is
    therefore not along the policy gradient.

    Args:
      rewards: [N], nan for an unscored rollout.
      group_ids: [N] any integers.
      lengths: [N] sampled tokens of each rollout, ≥ 0. If a group has no tokens at all, its
        rollouts count equally.
    Returns: [N], in units of reward; the sum weighted by length is 0 over a group. All are 0 in a
      group with equal rewards, or with only one rollout.
    Source: OPO, Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline", arXiv:2505.23585.

    >>> length_weighted(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([30, 10]))
    tensor([ 0.2500, -0.7500])
    """
    deviation, count, group = centre_groups(rewards, group_ids)
    weight = lengths.double().where(~rewards.isnan(), 0.0)
    total = torch.zeros_like(count).index_add(0, group, weight)
    excess = torch.zeros_like(count).index_add(0, group, weight * deviation) / total.where(
        total > 0, 1.0
    )
    return (
        (deviation - excess[group])
        .where(~rewards.isnan() & mixed_groups(rewards, group_ids), 0.0)
        .to(rewards.dtype)
    )


def gpg(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Subtract the mean reward of the group, then scale up to make up for groups without a signal.

    A_i = α (R_i - mean_g(R)), α = B / (B - M)

    B is the number of scored rollouts. M of these are in groups whose rewards are all equal, so
    their advantage is 0. They dilute a mean over all rollouts, and α corrects this. A group filter
    corrects it too: use only one of the two.

    Args:
      rewards: [N], nan for an unscored rollout, which counts in neither B nor M.
      group_ids: [N] any integers.
    Returns: [N], in units of reward; sums to 0 over a group; 0 if no group has different rewards.
    Source: GPG, Chu et al. 2025, arXiv:2504.02546, F_norm = 1. The paper can also sample further
      prompts until (B - M) / B reaches a threshold (0.6 in its main table). Here B is the given
      batch. verl divides by the number of rewards other than 0 instead of B - M.

    >>> gpg(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]))
    tensor([ 1., -1.,  0.,  0.])
    """
    deviation, count, _ = centre_groups(rewards, group_ids)
    signal = (mixed_groups(rewards, group_ids) & ~rewards.isnan()).sum().clamp_min(1)
    return (deviation * count.sum() / signal).to(rewards.dtype)


@safe("weights")
def gdpo(
    components: Mapping[str, Tensor],
    group_ids: Tensor,
    *,
    weights: Mapping[str, float] | None = None,
    eps: float = 1e-4,
) -> Tensor:
    """Standardise each component of the reward within its group, then standardise their weighted
    sum over the batch.

    S_i = Σ_k weight_k (r_ki - mean_g(r_k)) / (std_g(r_k) + eps)
    A_i = (S_i - mean(S)) / (std(S) + eps)

    Args:
      components: name → [N], nan for an unscored rollout.
      group_ids: [N] any integers.
      weights: name of a component → its factor; a name left out has the factor 0. None gives every
        component the factor 1, also the terms that are only logged.
      eps: ≥ 0, in units of a component. Standard deviations are those of a sample (n - 1).
    Returns: [N], dimensionless; 0 if a weighted component is nan, or if all values are equal.
    Raises: ValueError naming `eps`, or `weights` if a name in it is not a component.
    Source: GDPO, Liu et al. 2026, arXiv:2601.05242; eps as in TRL. TRL counts a component that is
      nan as 0, so the rollout keeps an advantage from its other components.

    >>> gdpo(
    ...     {"right": torch.tensor([1.0, 0.0]), "short": torch.tensor([9.0, 8.0])},
    ...     torch.tensor([0, 0]),
    ...     eps=0.0,
    ... )
    tensor([ 0.7071, -0.7071])
    """
    require_unsigned(eps=eps)
    given = dict.fromkeys(components, 1.0) if weights is None else dict(weights)
    require(
        given.keys() <= components.keys(), "weights", given, f"names of {', '.join(components)}"
    )
    used = {name: weight for name, weight in given.items() if weight}
    total = torch.zeros_like(group_ids, dtype=torch.float64)
    for name, weight in used.items():
        column = components[name]
        z_score = centre_groups(column, group_ids)[0] / spread(column, group_ids, "sample", eps)
        total += weight * z_score.where(~column.isnan(), torch.nan)
    batch = torch.zeros_like(group_ids)
    return (centre_groups(total, batch)[0] / spread(total, batch, "sample", eps)).to(
        next(iter(components.values())).dtype
    )


@assumes("non_negative_rewards")
def max_rl(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Subtract the mean reward of the group and divide by this mean: hard prompts count more.

    A_i = (R_i - mean_g(R)) / mean_g(R); 0 if mean_g(R) ≤ 0

    For rewards 0 and 1, let p be the chance of 1, and n the number of scored rollouts. The expected
    gradient is the gradient of the first n - 1 terms of `log p = -Σ_k (1 - p)^k / k`. So the update
    maximises the likelihood of a correct answer; the mean reward is only the first term. To reach
    all n terms, a group without a success would need a baseline too, but this estimator makes no
    update from such a group.

    Args:
      rewards: [N], ≥ 0 in the paper (0 or 1), nan for an unscored rollout.
      group_ids: [N] any integers.
    Returns: [N], dimensionless; sums to 0 over a group. All are 0 in a group with equal rewards, or
      with only one rollout. This is as in prime-rl; the authors' code and SkyRL add 1e-6 to the
      mean.
    Source: MaxRL, Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning",
      arXiv:2602.02710, algorithm 1; appendix D derives the order n - 1.

    >>> max_rl(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 0]))
    tensor([ 3., -1., -1., -1.])
    """
    deviation, count, group = centre_groups(rewards, group_ids)
    mean = torch.zeros_like(count).index_add(
        0, group, rewards.double().nan_to_num(0.0)
    ) / count.clamp_min(1)
    return (deviation / mean.where(mean > 0, torch.inf)[group]).to(rewards.dtype)


@assumes("binary_rewards")
def pass_at_k_advantage(
    rewards: Tensor, group_ids: Tensor, *, k: int = 4, correct_above: float = 0.5
) -> Tensor:
    """Compute the advantage for the best of k samples: the mean over all k-subsets of the group
    with this rollout, in closed form.

    ρ = 1 - C(n-c, k) / C(n, k), σ = √(ρ (1-ρ)), for n scored and c correct rollouts in the group
    A_i = (1 - ρ) / σ where correct, (1 - ρ - C(n-c-1, k-1) / C(n-1, k-1)) / σ elsewhere

    A subset has the reward 1 if any of its rollouts is correct. These rewards are standardised over
    all subsets.

    Args:
      rewards: [N], nan for an unscored rollout.
      group_ids: [N] any integers.
      k: samples in a subset, ≥ 1; if fewer rollouts of a group are scored, the only subset is all
        of these. k = 1 gives the result of group_mean on rewards 0 and 1, then normalize_group with
        std="population" and eps=0.
      correct_above: a rollout with a reward above this number is correct.
    Returns: [N], dimensionless; sums to 0 over a group. 0 if every subset has a correct rollout, or
      if no subset has one.
    Raises: ValueError naming `k` or `correct_above`.
    Source: Chen et al. 2025, "Pass@k Training for Adaptively Balancing Exploration and Exploitation
      of Large Reasoning Models", section 2.4, arXiv:2508.10751. The authors' code adds 1e-6 to the
      deviation; the paper does not.

    >>> pass_at_k_advantage(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4).long(), k=2)
    tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """
    require(k >= 1, "k", k, "≥ 1")
    require(-float("inf") < correct_above < float("inf"), "correct_above", correct_above, "finite")
    groups, group = group_ids.unique(return_inverse=True)
    scored = ~rewards.isnan()
    correct = rewards > correct_above
    zeros = torch.zeros(groups.numel(), dtype=torch.float64, device=rewards.device)
    n = zeros.index_add(0, group, scored.double())
    wrong = zeros.index_add(0, group, (scored & ~correct).double())
    rest = torch.ones_like(n)  # C(n-c-1, k-1) / C(n-1, k-1), factor by factor
    for j in range(1, k):
        rest = rest * ((wrong - j).clamp_min(0) / (n - j).clamp_min(1)).where(n > j, 1.0)
    none_correct = wrong / n.clamp_min(1) * rest  # 1 - ρ
    spread = (none_correct * (1 - none_correct)).sqrt()
    advantage = (
        torch.where(correct, none_correct[group], (none_correct - rest)[group])
        / spread.where(spread > 0, torch.inf)[group]
    )
    return advantage.where(scored, 0.0).to(rewards.dtype)


def best_minus_second(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Give the best rollout of a group its lead over the second best, and all others 0. This is the
    leave-one-out advantage for the best of all samples.

    A_i = max_g(R) - max_{j≠i} R_j: R₁ - R₂ for the best and 0 for all others

    Args:
      rewards: [N], nan for an unscored rollout.
      group_ids: [N] any integers.
    Returns: [N], in units of reward, never negative. 0 if two rollouts share the best reward, or in
      a group of one. verl also divides by std_g + 1e-6, as normalize_group with eps=1e-6 does.
    Source: Tang et al. 2025, "Optimizing language models for inference time objectives using
      reinforcement learning", arXiv:2503.19595; in verl `grpo_passk`. For the closed form over all
      subsets see `pass_at_k_advantage`.

    >>> best_minus_second(torch.tensor([0.2, 1.0, 0.7]), torch.tensor([0, 0, 0]))
    tensor([0.0000, 0.3000, 0.0000])
    """
    deviation, count, group = centre_groups(rewards, group_ids)
    compared = deviation.where(~rewards.isnan() & mixed_groups(rewards, group_ids), -torch.inf)
    lowest = torch.full_like(count, -torch.inf)
    first = lowest.scatter_reduce(0, group, compared, "amax")
    best = (compared == first[group]) & compared.isfinite()
    alone = torch.zeros_like(count).index_add(0, group, best.double()) == 1
    second = lowest.scatter_reduce(0, group, compared.where(~best, -torch.inf), "amax")
    return (first[group] - second[group]).where(best & alone[group], 0.0).to(rewards.dtype)


def reward_to_go(
    token_rewards: Tensor,
    rollout_ids: Tensor,
    step_ids: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
) -> Tensor:
    """Compute the discounted return of each sampled token. The rewards come from single steps, from
    the whole episode and from a KL penalty.

    G_t = Σ_{s ≥ t} γ^(sampled tokens of the rollout after t, up to s) r_s

    Tool and user tokens are skipped: they neither end the return nor discount it. Some other
    libraries set the return to zero at these tokens, so all tokens sampled before a tool's answer
    lose their credit.

    Args:
      token_rewards: [B, T], 0 for a token without a reward; any value where the mask is False.
      rollout_ids: [B], the rollout of each row; the rows of a rollout need not be neighbours.
      step_ids: [B, T], the step of the episode at each token; it orders the rows of a rollout.
      response_mask: [B, T] bool, True at sampled tokens.
      gamma: discount per sampled token, 0 ≤ gamma ≤ 1.
    Returns: [B, T], in units of reward, of the dtype of `token_rewards`; 0 outside the mask.
    Raises: ValueError naming gamma.
    Source: Sutton and Barto 2018, "Reinforcement Learning", section 3.3.

    >>> mask = torch.tensor([[False, True, False, True, True]])
    >>> rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]])
    >>> reward_to_go(rewards, torch.tensor([0]), torch.zeros(1, 5).long(), mask, gamma=0.5)
    tensor([[0.0000, 0.2500, 0.0000, 0.5000, 1.0000]])
    """
    require(0 <= gamma <= 1, "gamma", gamma, "0 ≤ gamma ≤ 1")
    positions, mask = episode_positions(rollout_ids, step_ids, response_mask)
    returns = _accumulate_backwards(to_episodes(token_rewards.double(), positions, mask), gamma)
    return from_episodes(returns, positions, mask, token_rewards).to(token_rewards.dtype)


@assumes("raw_rewards")
def remax(
    token_rewards: Tensor,
    greedy_rewards: Tensor,
    rollout_ids: Tensor,
    step_ids: Tensor,
    response_mask: Tensor,
) -> Tensor:
    """Subtract the reward of the prompt's greedy rollout from the return of each sampled token.

    A_t = G_t - R_greedy, G_t as in `reward_to_go` with γ = 1

    Args:
      token_rewards, rollout_ids, step_ids, response_mask: [B, T], [B], [B, T] and [B, T] bool; as
      in `reward_to_go`.
      greedy_rewards: [N], for each rollout the reward of one more, greedy rollout of its prompt.
        The greedy rollout is never trained on; nan if it is unscored.
    Returns: [B, T], in units of reward; 0 outside the mask, and if the greedy rollout is unscored.
    Source: ReMax, Li et al. 2023, arXiv:2310.10505; as in verl. A KL in the reward counts from each
      token on. The authors' code counts the KL of each token alone, and clamps the difference of
      the two rewards to ±5.

    >>> given = (torch.tensor([0]), torch.zeros(1, 2).long(), torch.ones(1, 2).bool())
    >>> remax(torch.tensor([[0.0, 1.0]]), torch.tensor([0.25]), *given)
    tensor([[0.7500, 0.7500]])
    """
    returns = reward_to_go(token_rewards, rollout_ids, step_ids, response_mask)
    above = returns.double() - greedy_rewards[rollout_ids, None].double()
    return fill_masked(above, response_mask & ~above.isnan(), 0.0).to(token_rewards.dtype)


def gae(
    token_rewards: Tensor,
    values: Tensor,
    truncated: Tensor,
    rollout_ids: Tensor,
    step_ids: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    alpha: float | None = None,
    bootstrap_truncated: bool = False,
) -> Estimate:
    """Estimate advantages and returns by generalised advantage estimation (GAE). One action is one
    sampled token.

    δ_t = r_t + γ V_{t+1} - V_t,  Â_t = δ_t + γ λ Â_{t+1},  return_t = Â_t + V_t

    With alpha, rollout j of l_j sampled tokens has its own `λ_j = max(0, 1 - 1 / (alpha · l_j))`.
    Then `Σ_i λ_j^i = alpha · l_j`. The returns use λ = 1.

    t + 1 is the next *sampled* token of the rollout, across tools, users and rows. Nothing resets,
    discounts or bootstraps in between. After the last token V and Â are 0. The result is not
    whitened; choose `whiten` as the normalisation for this.

    Args:
      token_rewards: [B, T], 0 for a token without a reward; any value where the mask is False.
      values: [B, T], the value of the state before each sampled token, in units of reward. They are
        constants, and may be anything where the mask is False.
      truncated: [N] bool, True for a rollout truncated by a limit.
      rollout_ids, step_ids, response_mask: [B], [B, T] and [B, T] bool; as in `reward_to_go`.
      gamma: discount per sampled token, 0 ≤ gamma ≤ 1.
      lam: 0 ≤ lam ≤ 1; 1 gives the return minus the value, 0 the one-step error. OpenRLHF and verl
        use 1, TRL uses 0.95.
      alpha: > 0, replaces lam by a λ for each length. With VAPO's 0.05, λ is 0 up to 20 tokens, 0.5
        at 40 and 0.98 at 1,000. None uses lam for all rollouts. A script derived from slime takes
        1.5.
      bootstrap_truncated: if True, V after the last token of a truncated rollout is the value
        before that token instead of 0. Truncation then does not count as failure. The usual
        bootstrap takes the value after it, which the critic does not compute here.
    Returns: advantages and returns, [B, T] each, in units of reward, of the dtype of
      `token_rewards`; 0 outside the mask.
    Raises: ValueError naming `gamma`, `lam` or `alpha`.
    Source: Schulman et al. 2016, section 3, arXiv:1506.02438. alpha: VAPO, Yue et al. 2025,
      arXiv:2504.05118, without the bound at 0.

    >>> given = (
    ...     torch.zeros(1).bool(),
    ...     torch.tensor([0]),
    ...     torch.zeros(1, 2).long(),
    ...     torch.ones(1, 2).bool(),
    ... )
    >>> gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.0]]), *given, lam=0.5).advantages
    tensor([[0., 1.]])
    """
    _require_discounts(gamma, lam)
    require(alpha is None or 0 < alpha < float("inf"), "alpha", alpha, "> 0 and finite, or None")
    positions, mask = episode_positions(rollout_ids, step_ids, response_mask)
    rewards, states = (
        to_episodes(x.detach().double(), positions, mask) for x in (token_rewards, values)
    )
    errors = _errors(
        rewards, states, mask, _last_values(states, mask, truncated) * bootstrap_truncated, gamma
    )
    decay = (
        lam if alpha is None else (1 - 1 / (alpha * mask.sum(1).double().clamp_min(1))).clamp_min(0)
    )
    advantages = _accumulate_backwards(errors, gamma * decay)
    returns = (advantages if alpha is None else _accumulate_backwards(errors, gamma)) + states
    return Estimate(
        *(
            from_episodes(x, positions, mask, token_rewards).to(token_rewards.dtype)
            for x in (advantages, returns)
        )
    )


def turn_gae(
    token_rewards: Tensor,
    values: Tensor,
    truncated: Tensor,
    rollout_ids: Tensor,
    step_ids: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_truncated: bool = False,
) -> Estimate:
    """Estimate advantages and returns by generalised advantage estimation (GAE). One action is one
    turn: everything the policy samples in one step of the episode.

    δ_k = r_k + γ V_{k+1} - V_k,  Â_k = δ_k + γ λ Â_{k+1},  return_k = Â_k + V_k;
    r_k sums the turn's token rewards, V_k is the value at its first sampled token

    γ and λ apply once per turn and not per token, so credit reaches the first turn even if turns
    are long.

    Args:
      token_rewards, values, truncated: [B, T], [B, T] and [N] bool; as in `gae`.
      rollout_ids, response_mask: [B] and [B, T] bool; as in `gae`.
      step_ids: [B, T], the same number at all tokens of a turn.
      gamma: discount per turn, 0 ≤ gamma ≤ 1.
      lam: per turn, 0 ≤ lam ≤ 1.
      bootstrap_truncated: if True, V after the last turn of a truncated rollout is the value at its
        last sampled token instead of 0.
    Returns: advantages and returns, [B, T] each, the same at all tokens of a turn; as in `gae`.
    Raises: ValueError naming `gamma` or `lam`.
    Source: Schulman et al. 2016, section 3, arXiv:1506.02438, on turns; Zhou et al. 2024 (ArCHer),
      arXiv:2402.19446, for the turn as the action.

    >>> given = (
    ...     torch.zeros(1).bool(),
    ...     torch.tensor([0]),
    ...     torch.tensor([[0, 0, 1]]),
    ...     torch.ones(1, 3).bool(),
    ... )
    >>> turn_gae(
    ...     torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.25]]), *given, lam=0.0
    ... ).advantages
    tensor([[-0.2500, -0.2500,  0.7500]])
    """
    _require_discounts(gamma, lam)
    positions, mask = episode_positions(rollout_ids, step_ids, response_mask)
    rewards, states = (
        to_episodes(x.detach().double(), positions, mask) for x in (token_rewards, values)
    )
    turn, first, taken = _turns(step_ids, positions, mask)
    earned = torch.zeros_like(rewards).scatter_add(1, turn, rewards)
    begun = torch.zeros_like(states).scatter_add(1, turn, states.where(first, 0.0))
    last = _last_values(states, mask, truncated) * bootstrap_truncated
    advantages = _accumulate_backwards(_errors(earned, begun, taken, last, gamma), gamma * lam)
    back = [
        from_episodes(x.gather(1, turn), positions, mask, token_rewards)
        for x in (advantages, advantages + begun)
    ]
    return Estimate(*(x.to(token_rewards.dtype) for x in back))


def turn_group_mean(
    token_rewards: Tensor,
    rewards: Tensor,
    group_ids: Tensor,
    rollout_ids: Tensor,
    step_ids: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
) -> Tensor:
    """Subtract from the return of each turn the mean return of the same turn in its group. This
    gives credit to turns without a critic.

    G_ik = Σ_{l ≥ k} γ^(l-k) r_il
    A_ik = G_ik - mean_j G_jk, over the rollouts j of the group

    G_jk is 0 if rollout j has ended before turn k. r_ik sums the token rewards of turn k. With γ =
    0 a turn gets credit for its own reward alone. The mean for a turn is over all rollouts of the
    group, also the rollouts that have ended before it. So the expected update is (n-1)/n of the
    policy gradient at each turn, even if the policy decides when to end. A mean over only the m
    rollouts that reach the turn would shrink the update by (m-1)/m instead, so the update of late
    turns would shrink more. Rollouts without a trained token take no part in a mean.

    Args:
      rewards: [N], nan for an unscored rollout, which takes no part in a mean.
      group_ids: [N] any integers.
      token_rewards, step_ids, response_mask, rollout_ids: [B, T], [B, T], [B, T] bool and [B]; as
        in `turn_gae`.
      gamma: discount per turn, 0 ≤ gamma ≤ 1.
    Returns: [B, T], in units of reward, the same at all tokens of a turn. All are 0 if the returns
      of a turn are equal, or in a group of one.
    Raises: ValueError naming gamma.
    Source: turn-level advantages of groups, Zeng et al. 2025, arXiv:2505.11821. In that paper all
      rollouts have the same number of turns. The reward of each turn and the outcome are each
      standardised in the group, and then summed from the turn on with a discount per turn.

    >>> given = (
    ...     torch.tensor([0, 0]),
    ...     torch.tensor([0, 1]),
    ...     torch.tensor([[0, 1], [0, 1]]),
    ...     torch.ones(2, 2).bool(),
    ... )
    >>> turn_group_mean(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.ones(2), *given)
    tensor([[ 0.0000, -0.5000],
            [ 0.0000,  0.5000]])
    """
    require(0 <= gamma <= 1, "gamma", gamma, "0 ≤ gamma ≤ 1")
    positions, mask = episode_positions(rollout_ids, step_ids, response_mask)
    turn, _, _ = _turns(step_ids, positions, mask)
    earned = to_episodes(token_rewards.detach().double(), positions, mask)
    returns = _accumulate_backwards(torch.zeros_like(earned).scatter_add(1, turn, earned), gamma)
    counted = mask.any(1) & ~rewards[: len(mask)].isnan()
    known = returns.where(counted[:, None], torch.nan)
    places = group_ids.unique(return_inverse=True)[1][: len(mask), None] * mask.shape[
        1
    ] + torch.arange(mask.shape[1], device=mask.device)
    advantages = centre_groups(known.flatten(), places.flatten())[0].view(mask.shape)
    return from_episodes(advantages.gather(1, turn), positions, mask, token_rewards).to(
        token_rewards.dtype
    )


def _turns(step_ids: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three [N, L] tensors: the index of each token's turn, whether the token is the first
    of its turn, and, at index k, whether the rollout has a turn k."""
    steps = to_episodes(step_ids, positions, mask)
    places = torch.arange(mask.shape[1], device=mask.device)
    first = mask & (places == 0)
    first[:, 1:] |= mask[:, 1:] & (steps[:, 1:] != steps[:, :-1])
    return (first.cumsum(1) - 1).clamp_min(0), first, places < first.sum(1, keepdim=True)


def _require_discounts(gamma: float, lam: float) -> None:
    require(0 <= gamma <= 1, "gamma", gamma, "0 ≤ gamma ≤ 1")
    require(0 <= lam <= 1, "lam", lam, "0 ≤ lam ≤ 1")


def _accumulate_backwards(values: Tensor, factor: float | Tensor) -> Tensor:
    """Compute x_t = values_t + factor · x_{t+1}, backwards along the last axis of [N, L], for all
    rollouts at once. `factor` is one number, or one for each rollout [N]."""
    out = values.clone()
    for t in range(values.shape[1] - 2, -1, -1):
        out[:, t] += factor * out[:, t + 1]
    return out


def _errors(rewards: Tensor, states: Tensor, mask: Tensor, last: Tensor, gamma: float) -> Tensor:
    """Compute r_t + γ V_{t+1} - V_t [N, L]. `last` [N, 1] is the value after each rollout's last
    entry; later entries are 0."""
    following = torch.cat([states[:, 1:], torch.zeros_like(states[:, :1])], 1)
    return (rewards + gamma * torch.where(_is_last(mask), last, following) - states).where(
        mask, 0.0
    )


def _last_values(states: Tensor, mask: Tensor, truncated: Tensor) -> Tensor:
    """Return the value of the last state of each truncated rollout [N, 1], and 0 for all others."""
    return states.where(_is_last(mask), 0.0).sum(1, keepdim=True) * truncated[: len(states), None]


def _is_last(mask: Tensor) -> Tensor:
    """Mark each rollout's last entry: [N, L] bool. The entries of `mask` fill a row from the
    left."""
    return mask & (torch.arange(mask.shape[1], device=mask.device) == mask.sum(1, keepdim=True) - 1)
