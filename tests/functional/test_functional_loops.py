"""Every option of the catalogue against its formula in plain Python loops: random small batches,
and edges by name.

The loops know tensors no more than the papers do: they read lists, index rollouts and tokens one by
one, and call nothing of the package. A new option is tested by one line in CASES;
`test_every_public_function_has_a_loop` fails where it is missing.
"""

from __future__ import annotations

import inspect
import itertools
import math
import random
import struct
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache, partial, wraps
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from parametrise import cases, each
from rlkit import functional

NAN, INF = math.nan, math.inf
Rows = list[list[float]]
FUNCTIONS = [
    getattr(functional, name) for name in functional.__all__
]  # all public ones: test_functional_laws
PUBLIC = {f"{f.__module__.rpartition('.')[2]}.{f.__name__}": f for f in FUNCTIONS}
# float64: up to 10^4 terms summed in another order, 10^4 · 2^-53 = 1e-12, and an exp of up to 20
# behind the sum
CLOSE = 1e-9
# weights of aggregation and figures of diagnostics are float32 by contract: 2^-24 and one more
# rounding
FLOAT32 = 1e-6


# --- the loops: what the formulas share
# ---------------------------------------------------------------------------------------------


def cellwise(formula: Callable[..., float]) -> Callable[..., Rows]:
    """A formula of one token, at every cell of its [B, T] arguments."""

    @wraps(formula)
    def loop(*tables: Rows, **options: Any) -> Rows:
        return [
            [formula(*cells, **options) for cells in zip(*rows, strict=True)]
            for rows in zip(*tables, strict=True)
        ]

    return loop


def clip(x: float, low: float, high: float) -> float:
    return low if x < low else high if x > high else x  # nan stays nan


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def mean(xs: list[float]) -> float:
    return math.fsum(xs) / len(xs)


def variance(xs: list[float]) -> float:
    mu = mean(xs)
    return mean([(x - mu) ** 2 for x in xs])


def scored(rewards: list[float], group_ids: list[int], i: int) -> list[int]:
    """The rollouts of i's group that have a reward; none where i itself has none, or where all
    their rewards are equal."""
    peers = [j for j, g in enumerate(group_ids) if g == group_ids[i] and not math.isnan(rewards[j])]
    return peers if i in peers and len({rewards[j] for j in peers}) > 1 else []


def cells_of(rollout_ids: list[int], response_mask: Rows) -> dict[int, list[tuple[int, int]]]:
    """Where the trained tokens of each rollout stand; rollouts with rows but without such tokens
    have none."""
    out: dict[int, list[tuple[int, int]]] = {j: [] for j in rollout_ids}
    for b, row in enumerate(response_mask):
        out[rollout_ids[b]] += [(b, t) for t, trained in enumerate(row) if trained]
    return out


def trained(values: Rows, response_mask: Rows) -> list[float]:
    return [
        v
        for row, flags in zip(values, response_mask, strict=True)
        for v, flag in zip(row, flags, strict=True)
        if flag
    ]


def table_of(entries: dict[tuple[int, int], float], response_mask: Rows, elsewhere: float) -> Rows:
    return [
        [entries.get((b, t), elsewhere) for t in range(len(row))]
        for b, row in enumerate(response_mask)
    ]


# --- advantages
# --------------------------------------------------------------------------------------------------


def raw(rewards):
    return [0.0 if math.isnan(r) else r for r in rewards]


def batch_mean(rewards):
    return group_mean(rewards, [0] * len(rewards))


def group_mean(rewards, group_ids):
    peers = [scored(rewards, group_ids, i) for i in range(len(rewards))]
    return [
        r - mean([rewards[j] for j in js]) if js else 0.0
        for r, js in zip(rewards, peers, strict=True)
    ]


def leave_one_out(rewards, group_ids):
    out = []
    for i, r in enumerate(rewards):
        others = [rewards[j] for j in scored(rewards, group_ids, i) if j != i]
        out.append(r - mean(others) if others else 0.0)
    return out


def length_weighted(rewards, group_ids, lengths):
    out = []
    for i, r in enumerate(rewards):
        peers = scored(rewards, group_ids, i)
        weights = (
            [lengths[j] for j in peers] if any(lengths[j] for j in peers) else [1] * len(peers)
        )
        out.append(
            r
            - math.fsum(w * rewards[j] for w, j in zip(weights, peers, strict=True)) / sum(weights)
            if peers
            else 0.0
        )
    return out


def gpg(rewards, group_ids):
    known = [i for i, r in enumerate(rewards) if not math.isnan(r)]
    signal = [i for i in known if scored(rewards, group_ids, i)]
    return [a * len(known) / len(signal) if signal else 0.0 for a in group_mean(rewards, group_ids)]


def gdpo(rewards, lengths, group_ids, *, weights=None, eps=1e-4):
    """Of two components, "a" the rewards and "b" the lengths."""

    def standardised(xs, ids):
        out = []
        for i, x in enumerate(xs):
            peers = [xs[j] for j in scored(xs, ids, i)]
            out.append(
                (x - mean(peers))
                / (math.sqrt(variance(peers) * len(peers) / (len(peers) - 1)) + eps)
                if peers
                else 0.0
            )
        return out

    weights = {"a": 1.0, "b": 1.0} if weights is None else weights
    used = [
        (w, xs, standardised(xs, group_ids))
        for w, xs in ((weights.get("a"), rewards), (weights.get("b"), lengths))
        if w
    ]
    sums = [
        (
            NAN
            if any(math.isnan(xs[i]) for _, xs, _ in used)
            else math.fsum(w * z[i] for w, _, z in used)
        )
        for i in range(len(rewards))
    ]
    return standardised(sums, [0] * len(sums))


def turn_group_mean(
    token_rewards, rewards, group_ids, rollout_ids, step_ids, response_mask, *, gamma=1.0
):
    returns, turns = {}, {}
    for actions in actions_of(rollout_ids, step_ids, response_mask, True):
        total = 0.0
        for k, action in reversed(list(enumerate(actions))):
            j = rollout_ids[action[0][0]]
            total = math.fsum(token_rewards[b][t] for b, t in action) + gamma * total
            returns[j, k], turns[j, k] = total, action
    out = {}
    for (j, k), action in turns.items():
        peers = [
            returns.get((i, k), 0.0)
            for i in {i for i, _ in returns}
            if group_ids[i] == group_ids[j] and not math.isnan(rewards[i])
        ]
        a = (
            returns[j, k] - mean(peers)
            if len(set(peers)) > 1 and not math.isnan(rewards[j])
            else 0.0
        )
        out |= dict.fromkeys(action, a)
    return table_of(out, response_mask, 0.0)


def max_rl(rewards, group_ids):
    out = []
    for i, r in enumerate(rewards):
        peers = scored(rewards, group_ids, i)
        mu = mean([rewards[j] for j in peers]) if peers else 0.0
        out.append((r - mu) / mu if mu > 0 else 0.0)
    return out


def pass_at_k_advantage(rewards, group_ids, *, k=4, correct_above=0.5):
    """By enumeration: each k-subset has the reward of its best, standardised over all subsets; a
    rollout has the mean of its own."""
    out = []
    for i, r in enumerate(rewards):
        peers = [
            j for j, g in enumerate(group_ids) if g == group_ids[i] and not math.isnan(rewards[j])
        ]
        subsets = list(itertools.combinations(peers, min(k, len(peers))))
        success = [float(any(rewards[j] > correct_above for j in subset)) for subset in subsets]
        mu, sigma = mean(success), math.sqrt(variance(success))
        mine = (
            [(x - mu) / sigma for x, subset in zip(success, subsets, strict=True) if i in subset]
            if sigma > 0
            else []
        )
        out.append(mean(mine) if mine and not math.isnan(r) else 0.0)
    return out


def best_minus_second(rewards, group_ids):
    out = []
    for i, r in enumerate(rewards):
        others = [rewards[j] for j in scored(rewards, group_ids, i) if j != i]
        out.append(max([r, *others]) - max(others) if others else 0.0)
    return out


def actions_of(rollout_ids, step_ids, response_mask, by_turn):
    """For each rollout its actions in the order of time: single tokens, or all tokens of a step
    together."""
    for cells in cells_of(rollout_ids, response_mask).values():
        ordered = sorted(cells, key=lambda cell: (step_ids[cell[0]][cell[1]], cell))
        yield [
            list(turn)
            for _, turn in itertools.groupby(
                ordered, key=lambda c: step_ids[c[0]][c[1]] if by_turn else c
            )
        ]


def reward_to_go(token_rewards, rollout_ids, step_ids, response_mask, *, gamma=1.0):
    out = {}
    for actions in actions_of(rollout_ids, step_ids, response_mask, False):
        total = 0.0
        for [(b, t)] in reversed(actions):
            total = token_rewards[b][t] + gamma * total
            out[b, t] = total
    return table_of(out, response_mask, 0.0)


def remax(token_rewards, greedy_rewards, rollout_ids, step_ids, response_mask):
    returns = reward_to_go(token_rewards, rollout_ids, step_ids, response_mask)
    greedy = [
        [greedy_rewards[j] for _ in row] for row, j in zip(response_mask, rollout_ids, strict=True)
    ]
    return cellwise(lambda g, r, m: g - r if m and not math.isnan(r) else 0.0)(
        returns, greedy, response_mask
    )


def gae(
    token_rewards,
    values,
    truncated,
    rollout_ids,
    step_ids,
    response_mask,
    *,
    gamma=1.0,
    lam=0.95,
    bootstrap_truncated=False,
    by_turn=False,
):
    advantages, returns = {}, {}
    for actions in actions_of(rollout_ids, step_ids, response_mask, by_turn):
        b, t = actions[-1][-1] if actions else (0, 0)
        following = (
            values[b][t] if actions and bootstrap_truncated and truncated[rollout_ids[b]] else 0.0
        )
        advantage = 0.0
        for action in reversed(actions):
            reward = math.fsum(token_rewards[b][t] for b, t in action)
            value = values[action[0][0]][action[0][1]]
            advantage = reward + gamma * following - value + gamma * lam * advantage
            following = value
            for cell in action:
                advantages[cell], returns[cell] = advantage, advantage + value
    return table_of(advantages, response_mask, 0.0), table_of(returns, response_mask, 0.0)


def adaptive_gae(
    token_rewards,
    values,
    truncated,
    rollout_ids,
    step_ids,
    response_mask,
    *,
    gamma=1.0,
    alpha=0.05,
    bootstrap_truncated=False,
):
    given, out = (token_rewards, values, truncated, rollout_ids, step_ids, response_mask), {}
    for cells in cells_of(rollout_ids, response_mask).values():
        lam = max(0.0, 1 - 1 / (alpha * len(cells))) if cells else 0.0
        advantages, _ = gae(*given, gamma=gamma, lam=lam, bootstrap_truncated=bootstrap_truncated)
        out |= {(b, t): advantages[b][t] for b, t in cells}
    _, returns = gae(*given, gamma=gamma, lam=1.0, bootstrap_truncated=bootstrap_truncated)
    return table_of(out, response_mask, 0.0), returns


# --- normalization
# --------------------------------------------------------------------------------------------------


def no_normalization(advantages):
    return advantages


def normalize_group(advantages, rewards, group_ids, rollout_ids, *, std="sample", eps=1e-4):
    out = []
    for row, j in zip(advantages, rollout_ids, strict=True):
        known = [
            r
            for r, g in zip(rewards, group_ids, strict=True)
            if g == group_ids[j] and not math.isnan(r)
        ]
        scale = 1.0
        if len(set(known)) > 1:
            scale = math.sqrt(variance(known) * len(known) / (len(known) - (std == "sample"))) + eps
        out.append([a / scale for a in row])
    return out


def normalize_batch(advantages, rewards, *, std="sample", eps=1e-4):
    return normalize_group(
        advantages,
        rewards or [0.0],
        [0] * (len(rewards) or 1),
        [0] * len(advantages),
        std=std,
        eps=eps,
    )


def normalize_advantages(advantages, rewards, rollout_ids, response_mask, *, eps=1e-4):
    cells = cells_of(rollout_ids, response_mask)
    means = [
        mean([advantages[b][t] for b, t in own])
        for j, own in cells.items()
        if own and not math.isnan(rewards[j])
    ]
    scale = (
        math.sqrt(variance(means) * len(means) / (len(means) - 1)) + eps
        if len(set(means)) > 1
        else 1.0
    )
    return cellwise(lambda a: a / scale)(advantages)


def whiten(advantages, rewards, rollout_ids, response_mask, *, eps=1e-8):
    counts = [
        [m and not math.isnan(rewards[j]) for m in row]
        for row, j in zip(response_mask, rollout_ids, strict=True)
    ]
    xs = trained(advantages, counts)
    if len(set(xs)) < 2:
        return [[0.0] * len(row) for row in advantages]
    mu, scale = mean(xs), math.sqrt(variance(xs) * len(xs) / (len(xs) - 1) + eps)
    return cellwise(lambda a, m: (a - mu) / scale if m else 0.0)(advantages, counts)


# --- ratios
# --------------------------------------------------------------------------------------------------


@cellwise
def log_ratio(logprobs, logprobs_old, response_mask):
    return logprobs - logprobs_old if response_mask else 0.0


@cellwise
def d_log_ratio(weights, response_mask):
    return weights if response_mask else 0.0


@cellwise
def token_ratio(logprobs, logprobs_old, response_mask):
    return math.exp(clip(logprobs - logprobs_old, -20, 20)) if response_mask else 1.0


@cellwise
def d_token_ratio(weights, logprobs, logprobs_old, response_mask):
    delta = logprobs - logprobs_old
    return weights * math.exp(delta) if response_mask and -20 <= delta <= 20 else 0.0


def differences(logprobs, logprobs_old, cells):
    return [logprobs[b][t] - logprobs_old[b][t] for b, t in cells]


def sequence_ratio(logprobs, logprobs_old, response_mask, rollout_ids):
    out = {}
    for cells in cells_of(rollout_ids, response_mask).values():
        s = (
            math.exp(clip(mean(differences(logprobs, logprobs_old, cells)), -20, 20))
            if cells
            else 1.0
        )
        out |= dict.fromkeys(cells, s)
    return table_of(out, response_mask, 1.0)


def d_sequence_ratio(weights, logprobs, logprobs_old, response_mask, rollout_ids):
    out = {}
    for cells in cells_of(rollout_ids, response_mask).values():
        delta = mean(differences(logprobs, logprobs_old, cells)) if cells else 0.0
        total = math.fsum(weights[b][t] for b, t in cells)
        out |= dict.fromkeys(
            cells, total * math.exp(delta) / len(cells) if cells and abs(delta) <= 20 else 0.0
        )
    return table_of(out, response_mask, 0.0)


def d_sequence_token_ratio(weights, logprobs, logprobs_old, response_mask, rollout_ids):
    s = sequence_ratio(logprobs, logprobs_old, response_mask, rollout_ids)
    return cellwise(lambda w, r, m: w * r if m else 0.0)(weights, s, response_mask)


# --- policy losses and value losses, with their derivatives
# ------------------------------------------------------------------------


@cellwise
def clipped(ratio, advantages, *, clip_low=0.2, clip_high=0.2, dual_clip=None, delta=None):
    free = ratio if delta is None else min(ratio, delta)
    loss = -min(free * advantages, clip(ratio, 1 - clip_low, 1 + clip_high) * advantages)
    return min(loss, -dual_clip * advantages) if dual_clip and advantages < 0 else loss


@cellwise
def d_clipped(
    weights, ratio, advantages, *, clip_low=0.2, clip_high=0.2, dual_clip=None, delta=None
):
    """-A, but 0 where the ratio has left the interval in the direction that the advantage asks for,
    or is beyond a cap."""
    if advantages >= 0:
        return -advantages * weights if ratio <= 1 + clip_high else 0.0
    return (
        -advantages * weights
        if 1 - clip_low <= ratio < min(dual_clip or INF, delta or INF)
        else 0.0
    )


@cellwise
def cispo(ratio, advantages, logprobs, *, clip_low=1.0, clip_high=4.0):
    return -clip(ratio, 1 - clip_low, 1 + clip_high) * advantages * logprobs


@cellwise
def d_cispo(weights, ratio, advantages, *, clip_low=1.0, clip_high=4.0):
    return -clip(ratio, 1 - clip_low, 1 + clip_high) * advantages * weights


@cellwise
def sapo(ratio, advantages, *, tau_positive=1.0, tau_negative=1.05):
    tau = tau_positive if advantages > 0 else tau_negative
    return -4 / tau * sigmoid(tau * (ratio - 1)) * advantages


@cellwise
def d_sapo(weights, ratio, advantages, *, tau_positive=1.0, tau_negative=1.05):
    tau = tau_positive if advantages > 0 else tau_negative
    return -4 * sigmoid(tau * (ratio - 1)) * sigmoid(tau * (1 - ratio)) * advantages * weights


def gmpo(
    logprobs,
    logprobs_old,
    response_mask,
    rollout_ids,
    advantages,
    *,
    clip_log_low=0.4,
    clip_log_high=0.4,
):
    geometric = {}
    for j, cells in cells_of(rollout_ids, response_mask).items():
        held = []
        for b, t in cells:
            delta = logprobs[b][t] - logprobs_old[b][t]
            held.append(
                min(delta, clip_log_high) if advantages[b][t] > 0 else max(delta, -clip_log_low)
            )
        geometric[j] = math.exp(clip(mean(held), -20, 20)) if held else 1.0
    return [
        [-geometric[j] * a for a in row] for j, row in zip(rollout_ids, advantages, strict=True)
    ]


def d_gmpo(
    weights,
    logprobs,
    logprobs_old,
    response_mask,
    rollout_ids,
    advantages,
    *,
    clip_log_low=0.4,
    clip_log_high=0.4,
):
    losses = gmpo(
        logprobs,
        logprobs_old,
        response_mask,
        rollout_ids,
        advantages,
        clip_log_low=clip_log_low,
        clip_log_high=clip_log_high,
    )
    out = {}
    for j, cells in cells_of(rollout_ids, response_mask).items():
        upstream = [
            w * x
            for i, ws, xs in zip(rollout_ids, weights, losses, strict=True)
            if i == j
            for w, x in zip(ws, xs, strict=True)
        ]
        deltas = differences(logprobs, logprobs_old, cells)
        rising = [advantages[b][t] > 0 for b, t in cells]
        held = [
            min(d, clip_log_high) if up else max(d, -clip_log_low)
            for d, up in zip(deltas, rising, strict=True)
        ]
        slope = (
            math.fsum(upstream) / len(cells) if cells and abs(mean(held)) <= 20 else 0.0
        )  # d Σ w s A is itself × d log s
        for cell, d, up in zip(cells, deltas, rising, strict=True):
            out[cell] = slope if (d < clip_log_high if up else d > -clip_log_low) else 0.0
    return table_of(out, response_mask, 0.0)


@cellwise
def reinforce(logprobs, advantages):
    return -advantages * logprobs


@cellwise
def d_reinforce(weights, advantages):
    return -advantages * weights


@cellwise
def kl_cov(ratio, advantages, logprobs, logprobs_old, covariance_rank, *, share=2e-4, coef=1.0):
    return -ratio * advantages + (
        coef * abs(logprobs - logprobs_old) if covariance_rank < share else 0.0
    )


@cellwise
def d_kl_cov(weights, logprobs, logprobs_old, covariance_rank, *, share=2e-4, coef=1.0):
    return (
        weights * coef * ((logprobs > logprobs_old) - (logprobs < logprobs_old))
        if covariance_rank < share
        else 0.0
    )


@cellwise
def d_ratio_of_kl_cov(weights, advantages, **_):
    return -weights * advantages


def vespo(logprobs, logprobs_sampler, response_mask, rollout_ids, advantages, **numbers):
    slopes = d_vespo(
        [[1.0] * len(row) for row in logprobs],
        logprobs,
        logprobs_sampler,
        response_mask,
        rollout_ids,
        advantages,
        **numbers,
    )
    return cellwise(lambda slope, p: slope * p)(slopes, logprobs)


def d_vespo(
    weights,
    logprobs,
    logprobs_sampler,
    response_mask,
    rollout_ids,
    advantages,
    *,
    k_positive=2.0,
    lam_positive=3.0,
    k_negative=3.0,
    lam_negative=2.0,
):
    cells, out = cells_of(rollout_ids, response_mask), []
    for ws, row, j in zip(weights, advantages, rollout_ids, strict=True):
        w = min(
            max(
                math.exp(
                    clip(math.fsum(differences(logprobs, logprobs_sampler, cells[j])), -50, 50)
                ),
                1e-8,
            ),
            math.exp(20),
        )
        phi = [
            w**k * math.exp(lam * (1 - w))
            for k, lam in ((k_positive, lam_positive), (k_negative, lam_negative))
        ]
        out.append([-x * phi[a < 0] * a for x, a in zip(ws, row, strict=True)])
    return out


def d_dppo(
    weights,
    logprobs,
    logprobs_sampler,
    response_mask,
    advantages,
    *,
    divergence="tv",
    delta=0.2,
    two_sided=False,
    penalty=1e-3,
):
    @cellwise
    def slope(w, new, mu, m, a):
        moved = math.exp(new) - math.exp(mu)
        far = (abs(moved) if divergence == "tv" else binary_kl([[mu]], [[new]])[0][0]) > delta
        held = far and (two_sided or (moved > 0 if a > 0 else moved < 0))
        inside = m and -20 <= new - mu <= 20
        return (
            w * ((0.0 if held else -math.exp(new - mu) * a) + 2 * penalty * (new - mu))
            if inside
            else 0.0
        )

    return slope(weights, logprobs, logprobs_sampler, response_mask, advantages)


def dppo(logprobs, logprobs_sampler, response_mask, advantages, *, penalty=1e-3, **rule):
    """The ratio times what the slope says without the penalty, and the penalty; where the ratio is
    clamped it is not."""
    ones, gap = (
        [[1.0] * len(row) for row in logprobs],
        cellwise(lambda p, q: clip(p - q, -20, 20))(logprobs, logprobs_sampler),
    )
    near = cellwise(lambda p, g: p - g)(logprobs, gap)  # the sampler, no further off than the clamp
    slopes = d_dppo(
        ones,
        logprobs,
        near,
        [[True] * len(row) for row in logprobs],
        advantages,
        penalty=0.0,
        **rule,
    )
    return cellwise(lambda s, g, m: s + penalty * g * g if m else s)(slopes, gap, response_mask)


@cellwise
def squared_error(values, returns):
    return (values - returns) ** 2 / 2


@cellwise
def d_squared_error(weights, values, returns):
    return weights * (values - returns)


@cellwise
def clipped_squared_error(values, values_old, returns, *, clip=0.2):
    held = min(max(values, values_old - clip), values_old + clip)
    return max((values - returns) ** 2, (held - returns) ** 2) / 2


@cellwise
def d_clipped_squared_error(weights, values, values_old, returns, *, clip=0.2):
    """0 where the value has moved by more than the clip and the held one is further from the
    return."""
    held = min(max(values, values_old - clip), values_old + clip)
    return (
        0.0
        if held != values and (held - returns) ** 2 > (values - returns) ** 2
        else weights * (values - returns)
    )


# --- KL
# --------------------------------------------------------------------------------------------------


def log_quotient(logprobs, logprobs_ref):
    return clip(logprobs_ref - logprobs, -20, 20)


@cellwise
def k1(logprobs, logprobs_ref):
    return -log_quotient(logprobs, logprobs_ref)


@cellwise
def d_k1(weights, logprobs, logprobs_ref):
    return weights if abs(logprobs_ref - logprobs) <= 20 else 0.0


@cellwise
def k2(logprobs, logprobs_ref):
    return log_quotient(logprobs, logprobs_ref) ** 2 / 2


@cellwise
def d_k2(weights, logprobs, logprobs_ref):
    q = logprobs_ref - logprobs
    return -weights * q if abs(q) <= 20 else 0.0


@cellwise
def k3(logprobs, logprobs_ref):
    q = log_quotient(logprobs, logprobs_ref)
    return math.exp(q) - q - 1


@cellwise
def truncated(logprobs, logprobs_ref, *, threshold=1.0):
    q = clip(logprobs_ref - logprobs, -threshold, threshold)
    return math.exp(q) - q - 1


@cellwise
def d_truncated(weights, logprobs, logprobs_ref, *, threshold=1.0):
    q = logprobs_ref - logprobs
    return weights * (1 - math.exp(q)) if abs(q) <= threshold else 0.0


@cellwise
def confident(logprobs, logprobs_ref, *, probability=0.1):
    q = log_quotient(logprobs, logprobs_ref)
    return math.exp(q) - q - 1 if math.exp(logprobs) > probability else 0.0


@cellwise
def d_confident(weights, logprobs, logprobs_ref, *, probability=0.1):
    q = logprobs_ref - logprobs
    return weights * (1 - math.exp(q)) if math.exp(logprobs) > probability and abs(q) <= 20 else 0.0


@cellwise
def forward(logprobs, logprobs_ref, logprobs_old):
    return -math.exp(clip(logprobs - logprobs_old, -20, 20)) * log_quotient(logprobs, logprobs_ref)


@cellwise
def d_forward(weights, logprobs, logprobs_ref, logprobs_old):
    """Product rule: r (log π - log ref) through the ratio, r through the log-ratio, each within its
    own clamp."""
    q, delta = logprobs_ref - logprobs, logprobs - logprobs_old
    r = math.exp(clip(delta, -20, 20))
    return weights * (
        (-r * clip(q, -20, 20) if abs(delta) <= 20 else 0.0) + (r if abs(q) <= 20 else 0.0)
    )


@cellwise
def reverse(logprobs, logprobs_ref, logprobs_old):
    q = log_quotient(logprobs, logprobs_ref)
    return math.exp(clip(logprobs - logprobs_old, -20, 20)) * math.exp(q) * q


@cellwise
def d_reverse(weights, logprobs, logprobs_ref, logprobs_old):
    q = logprobs_ref - logprobs
    return (
        -weights * math.exp(clip(logprobs - logprobs_old, -20, 20)) * math.exp(q)
        if abs(q) <= 20
        else 0.0
    )


@cellwise
def full(full_kl):
    return full_kl


@cellwise
def d_full(weights):
    return weights


# --- aggregation, filters, corrections, overlong
# -----------------------------------------------------------------------------------


def token_mean(response_mask):
    total = sum(sum(row) for row in response_mask)
    return [[m / total if m else 0.0 for m in row] for row in response_mask]


def sequence_mean(response_mask, rollout_ids):
    cells = {j: len(c) for j, c in cells_of(rollout_ids, response_mask).items() if c}
    return [
        [1 / (len(cells) * cells[j]) if m else 0.0 for m in row]
        for row, j in zip(response_mask, rollout_ids, strict=True)
    ]


def sequence_sum(response_mask, rollout_ids, *, constant):
    return [
        [1 / (len(set(rollout_ids)) * constant) if m else 0.0 for m in row] for row in response_mask
    ]


def prompt_mean(response_mask, rollout_ids, group_ids):
    return sequence_mean(response_mask, [group_ids[j] for j in rollout_ids])


def keep_all(rewards):
    return [True for _ in rewards]


def mixed_groups(rewards, group_ids):
    out = []
    for i in range(len(rewards)):
        known = [
            r
            for r, g in zip(rewards, group_ids, strict=True)
            if g == group_ids[i] and not math.isnan(r)
        ]
        out.append(bool(known) and max(known) > min(known))
    return out


def mixed_component(rewards, lengths, group_ids, *, component=None):
    return mixed_groups(lengths if component == "b" else rewards, group_ids)


def covariances(advantages, logprobs_old, response_mask):
    """Cell → covariance of the trained ones, in their order."""
    cells = [(b, t) for b, row in enumerate(response_mask) for t, m in enumerate(row) if m]
    a, p = (mean([xs[b][t] for b, t in cells] or [0.0]) for xs in (advantages, logprobs_old))
    return {(b, t): (advantages[b][t] - a) * (logprobs_old[b][t] - p) for b, t in cells}


def splitmix(state):
    """The finaliser of splitmix64, on 64 bits."""
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> shift)) * multiplier % 2**64
    return state ^ (state >> 31)


def clip_cov(
    advantages, logprobs_old, response_mask, rollout_ids, *, share=2e-4, low=1.0, high=5.0
):
    def draw(cell):
        bits, golden = (
            int.from_bytes(struct.pack(">d", logprobs_old[cell[0]][cell[1]])),
            0x9E3779B97F4A7C15,
        )
        state = splitmix(
            (splitmix((bits + golden) % 2**64) ^ (rollout_ids[cell[0]] * 2**32 + cell[1])) + golden
            & 2**64 - 1
        )
        return splitmix((state + golden) % 2**64) >> 33

    cov = covariances(advantages, logprobs_old, response_mask)
    band = sorted((cell for cell, c in cov.items() if low < c < high), key=draw)
    out = dict.fromkeys(band[: max(1, int(share * len(cov)))], False)
    return [
        [bool(m) and out.get((b, t), True) for t, m in enumerate(row)]
        for b, row in enumerate(response_mask)
    ]


def covariance_rank(advantages, logprobs_old, response_mask):
    cov = covariances(advantages, logprobs_old, response_mask)
    return table_of(
        {cell: sum(x > c for x in cov.values()) / len(cov) for cell, c in cov.items()},
        response_mask,
        1.0,
    )


def every_token(response_mask):
    return response_mask


def top_entropy(entropy_old, response_mask, *, fraction=0.2):
    """By the quantile itself, interpolated between two neighbours in exact fractions."""
    ordered = sorted(map(Fraction, trained(entropy_old, response_mask)))
    if not ordered:
        return response_mask
    place = (1 - Fraction(str(fraction))) * (len(ordered) - 1)
    low = math.floor(place)
    quantile = ordered[low] + (place - low) * (
        ordered[min(low + 1, len(ordered) - 1)] - ordered[low]
    )
    return cellwise(lambda h, m: bool(m) and Fraction(h) >= quantile)(entropy_old, response_mask)


@cellwise
def no_correction(response_mask):
    return 1.0


def bounded(rho, cap, floor, mode):
    if floor <= rho <= cap:
        return 1.0 if mode == "keep" else rho
    return 0.0 if mode != "truncate" else cap if rho > cap else floor


@cellwise
def each_correction(
    logprobs_old, logprobs_sampler, response_mask, *, cap=2.0, floor=0.0, mode="truncate"
):
    return (
        bounded(math.exp(clip(logprobs_old - logprobs_sampler, -20, 20)), cap, floor, mode)
        if response_mask
        else 1.0
    )


def over_mean(weights, response_mask, means):
    middle = mean(means) if any(means) else 1.0
    return cellwise(lambda w, m: w / middle if m else 1.0)(weights, response_mask)


def token_correction(logprobs_old, logprobs_sampler, response_mask, *, normalise=False, **options):
    weights = each_correction(logprobs_old, logprobs_sampler, response_mask, **options)
    return (
        over_mean(weights, response_mask, trained(weights, response_mask)) if normalise else weights
    )


def automatic_correction(logprobs_old, logprobs_sampler, response_mask):
    return token_correction(logprobs_old, logprobs_sampler, response_mask)


def sequence_correction(
    logprobs_old,
    logprobs_sampler,
    response_mask,
    rollout_ids,
    *,
    cap=2.0,
    floor=0.0,
    mode="truncate",
    normalise=False,
):
    out, weights = {}, []
    for cells in cells_of(rollout_ids, response_mask).values():
        rho = math.exp(clip(math.fsum(differences(logprobs_old, logprobs_sampler, cells)), -20, 20))
        out |= dict.fromkeys(cells, bounded(rho, cap, floor, mode))
        weights += [bounded(rho, cap, floor, mode)] if cells else []
    factors = table_of(out, response_mask, 1.0)
    return over_mean(factors, response_mask, weights) if normalise else factors


def rollout_mask(logprobs_old, logprobs_sampler, response_mask, rollout_ids, keep):
    out = {}
    for cells in cells_of(rollout_ids, response_mask).values():
        out |= dict.fromkeys(
            cells, float(keep(differences(logprobs_old, logprobs_sampler, cells))) if cells else 1.0
        )
    return table_of(out, response_mask, 1.0)


def geometric_mask(*given, low=0.05, high=0.05, scaled=True):
    return rollout_mask(
        *given, lambda gaps: -low <= mean(gaps) * (math.sqrt(len(gaps)) if scaled else 1) <= high
    )


def divergence_mask(*given, estimator="k3", over="mean", bound=0.01):
    def k(gap):
        gap = clip(gap, -20, 20)
        return gap * gap / 2 if estimator == "k2" else math.exp(gap) - 1 - gap

    return rollout_mask(
        *given, lambda gaps: (mean if over == "mean" else max)([k(gap) for gap in gaps]) <= bound
    )


@cellwise
def binary_kl_mask(logprobs_old, logprobs_sampler, response_mask, *, bound=2.0):
    pairs = (
        [(logprobs_old, logprobs_sampler), (logprobs_sampler, logprobs_old)]
        if response_mask
        else []
    )
    return float(all(binary_kl([[p]], [[q]])[0][0] <= bound for p, q in pairs))


def second_moment_mask(logprobs_old, logprobs_sampler, response_mask, advantages, *, bound=0.04):
    """Algorithm 1 of the paper; equal ones go together."""
    gaps = cellwise(lambda p, q: p - q)(logprobs_old, logprobs_sampler)
    pushed = cellwise(lambda gap, a, m: m and ((a > 0 and gap > 0) or (a < 0 and gap < 0)))(
        gaps, advantages, response_mask
    )
    region = sorted(gap**2 for gap in trained(gaps, pushed))
    while region and mean(region) > bound:
        region = [x for x in region if x < region[-1]]
    return cellwise(lambda gap, far: 1.0 if not far or gap**2 in region else 0.0)(gaps, pushed)


def product_correction(logprobs_old, logprobs_sampler, response_mask, rollout_ids, advantages, **_):
    """Of the parts that its case names: IcePop, and a band of the mean log-ratio."""
    weights = token_correction(
        logprobs_old, logprobs_sampler, response_mask, mode="mask", floor=0.5, cap=5.0
    )
    masks = geometric_mask(
        logprobs_old, logprobs_sampler, response_mask, rollout_ids, low=0.5, high=0.7
    )
    return cellwise(lambda w, m: w * m)(weights, masks)


@cellwise
def interpolated_old(logprobs, logprobs_sampler, old_share, response_mask):
    return (1 - old_share) * logprobs_sampler + old_share * logprobs if response_mask else 0.0


@cellwise
def binary_kl(logprobs, logprobs_other):
    (p, rest), (q, rest_other) = (
        (math.exp(clip(x, -100, 0)), max(-math.expm1(clip(x, -100, 0)), 1e-12))
        for x in (logprobs, logprobs_other)
    )
    return p * math.log(p / q) + rest * math.log(rest / rest_other)


def keep_overlong(rewards):
    return rewards, [True for _ in rewards]


def soft_penalty(rewards, reply_lengths, *, limit, buffer=0.2):
    """The three cases of DAPO eq. 13."""
    zone, out = buffer * limit, []
    for r, length in zip(rewards, reply_lengths, strict=True):
        penalty = (
            0.0
            if length <= limit - zone
            else -1.0
            if length >= limit
            else (limit - zone - length) / zone
        )
        out.append(r + penalty)
    return out, [True for _ in rewards]


def mask_truncated(rewards, truncated):
    return rewards, [not cut for cut in truncated]


# --- pairs and entropy
# --------------------------------------------------------------------------------------------------


def all_pairs(rewards, group_ids):
    n = len(rewards)
    return [
        [i, j]
        for i in range(n)
        for j in range(n)
        if group_ids[i] == group_ids[j] and rewards[i] > rewards[j]
    ]


def best_worst(rewards, group_ids):
    out = []
    for g in sorted(set(group_ids)):
        known = [j for j, h in enumerate(group_ids) if h == g and not math.isnan(rewards[j])]
        if len({rewards[j] for j in known}) > 1:
            out.append(
                [
                    max(known, key=lambda j: (rewards[j], -j)),
                    min(known, key=lambda j: (rewards[j], j)),
                ]
            )
    return out


def scores(logprobs, response_mask, rollout_ids, length_normalise):
    out = {}
    for j, cells in cells_of(rollout_ids, response_mask).items():
        out[j] = math.fsum(logprobs[b][t] for b, t in cells) / (
            max(len(cells), 1) if length_normalise else 1
        )
    return out


def pairwise_loss(logprobs, response_mask, rollout_ids, pairs, *, beta=0.1, length_normalise=False):
    s = scores(logprobs, response_mask, rollout_ids, length_normalise)
    margins = [beta * (s[i] - s[j]) for i, j in pairs]
    return [math.log1p(math.exp(-m)) if m > 0 else -m + math.log1p(math.exp(m)) for m in margins]


def d_pairwise_loss(
    pair_weights, logprobs, response_mask, rollout_ids, pairs, *, beta=0.1, length_normalise=False
):
    s = scores(logprobs, response_mask, rollout_ids, length_normalise)
    out = {}
    for j, cells in cells_of(rollout_ids, response_mask).items():
        slope = 0.0
        for w, (better, worse) in zip(pair_weights, pairs, strict=True):
            slope += (
                w * beta * sigmoid(-beta * (s[better] - s[worse])) * ((worse == j) - (better == j))
            )
        out |= dict.fromkeys(cells, slope / (len(cells) if length_normalise and cells else 1))
    return table_of(out, response_mask, 0.0)


def pairwise(
    rewards,
    group_ids,
    logprobs_old,
    response_mask,
    rollout_ids,
    *,
    beta=0.1,
    length_normalise=False,
    select=all_pairs,
    pair_selector=None,
):
    """-N times the derivative of the mean loss over the pairs, one number a rollout."""
    lengths = {j: len(cells) for j, cells in cells_of(rollout_ids, response_mask).items()}
    pairs = select([r if lengths.get(i) else NAN for i, r in enumerate(rewards)], group_ids)
    s = scores(logprobs_old, response_mask, rollout_ids, length_normalise)
    slope = dict.fromkeys(lengths, 0.0)
    for better, worse in pairs:
        pull = beta * sigmoid(-beta * (s[better] - s[worse])) * len(lengths) / len(pairs)
        slope[better] += pull / (lengths[better] if length_normalise else 1)
        slope[worse] -= pull / (lengths[worse] if length_normalise else 1)
    return [[slope[j] for _ in row] for row, j in zip(response_mask, rollout_ids, strict=True)]


def log_softmax(logits):
    top = max(logits)
    normaliser = top + math.log(math.fsum(math.exp(z - top) for z in logits))
    return [z - normaliser for z in logits]


def entropy_of(log_probs):
    return -math.fsum(math.exp(p) * p for p in log_probs if p > -INF)


def from_log_probs(log_probs):
    return [entropy_of(row) for row in log_probs]


def d_from_log_probs(row_weights, log_probs):
    """-p (log p + 1); where p is 0 its limit."""
    return [
        [-w * math.exp(p) * (p + 1) if p > -INF else 0.0 for p in row]
        for w, row in zip(row_weights, log_probs, strict=True)
    ]


def from_logits(logits):
    return [entropy_of(log_softmax(row)) for row in logits]


def d_from_logits(row_weights, logits):
    """-p (log p + H)."""
    rows = [log_softmax(row) for row in logits]
    return [
        [-w * math.exp(p) * (p + entropy_of(row)) if p > -INF else 0.0 for p in row]
        for w, row in zip(row_weights, rows, strict=True)
    ]


# --- log-probs and diagnostics
# --------------------------------------------------------------------------------------------------


def token_log_probs(logits, ids, *, temperature=1.0):
    return [
        log_softmax([z / temperature for z in row])[v] for row, v in zip(logits, ids, strict=True)
    ]


def chunked_log_probs(logits, logits_ref, ids, *, temperature=1.0):
    tempered = [
        [log_softmax([z / temperature for z in row]) for row in table]
        for table in (logits, logits_ref)
    ]
    kl = [
        math.fsum(math.exp(p) * (p - q) for p, q in zip(*rows, strict=True) if p > -INF)
        for rows in zip(*tempered, strict=True)
    ]
    return (
        [row[v] for row, v in zip(tempered[0], ids, strict=True)],
        from_log_probs(tempered[0]),
        kl,
    )


def approximate_kl(logprobs, logprobs_old, response_mask):
    qs = [
        clip(q, -20, 20)
        for q in trained(
            cellwise(lambda new, old: new - old)(logprobs, logprobs_old), response_mask
        )
    ]
    return mean([math.exp(q) - q - 1 for q in qs]) if qs else 0.0


def ratio_statistics(ratio, response_mask):
    rs = trained(ratio, response_mask)
    return (mean(rs), variance(rs), max(rs)) if rs else (NAN, NAN, NAN)


def effective_sample_size(logprobs, logprobs_sampler, response_mask, rollout_ids=None):
    if rollout_ids is None:
        ws = trained(token_ratio(logprobs, logprobs_sampler, response_mask), response_mask)
    else:
        sums = {}
        for row, owner in enumerate(rollout_ids):
            for new, old, kept in zip(
                logprobs[row], logprobs_sampler[row], response_mask[row], strict=True
            ):
                if kept:
                    sums[owner] = sums.get(owner, 0.0) + new - old
        ws = [math.exp(clip(total, -20, 20)) for total in sums.values()]
    return math.fsum(ws) ** 2 / (len(ws) * math.fsum(w * w for w in ws)) if ws else NAN


def correlation(values, others, response_mask):
    xs, ys = trained(values, response_mask), trained(others, response_mask)
    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return NAN
    covariance = mean([x * y for x, y in zip(xs, ys, strict=True)]) - mean(xs) * mean(ys)
    return covariance / math.sqrt(variance(xs) * variance(ys))


def explained_variance(values, returns, response_mask):
    xs, ys = trained(values, response_mask), trained(returns, response_mask)
    if len(set(ys)) < 2:
        return NAN
    return 1 - variance([y - x for x, y in zip(xs, ys, strict=True)]) / variance(ys)


# --- masking
# --------------------------------------------------------------------------------------------------


def full_precision(values):
    return values


def fill_masked(values, mask, *, fill):
    return cellwise(lambda v, m: v if m else fill)(values, mask)


def masked_mean(values, mask):
    return mean(trained(values, mask) or [0.0])


def segment_sum(values, rollout_ids):
    rows = range(len(rollout_ids))
    return [
        math.fsum(v for b in rows if rollout_ids[b] == j for v in values[b])
        for j in range(max(rollout_ids, default=-1) + 1)
    ]


def rollout_mean(values, mask, rollout_ids):
    cells = cells_of(rollout_ids, mask)
    return [[mean([values[b][t] for b, t in cells[j]] or [0.0])] for j in rollout_ids]


def episodes(rollout_ids, step_ids, response_mask):
    """The trained cells of each rollout in the order of time, [N] lists."""
    out = [[] for _ in range(max(rollout_ids, default=-1) + 1)]
    for actions in actions_of(rollout_ids, step_ids, response_mask, False):
        for [(b, t)] in actions:
            out[rollout_ids[b]].append((b, t))
    return out


def episode_positions(rollout_ids, step_ids, response_mask):
    rows = episodes(rollout_ids, step_ids, response_mask)
    width, longest = len(response_mask[0]) if response_mask else 0, max(map(len, rows), default=0)
    positions = [[b * width + t for b, t in cells] + [0] * (longest - len(cells)) for cells in rows]
    return positions, [[place < len(cells) for place in range(longest)] for cells in rows]


def to_episodes(values, rollout_ids, step_ids, response_mask):
    rows = episodes(rollout_ids, step_ids, response_mask)
    longest = max(map(len, rows), default=0)
    return [[values[b][t] for b, t in cells] + [0.0] * (longest - len(cells)) for cells in rows]


def there_and_back(values, response_mask):
    return cellwise(lambda v, m: v if m else 0.0)(values, response_mask)


# --- the table: option → its loop, its options, what it is called with, its derivative
# ----------------------------------------------


class Case(NamedTuple):
    """`args` names the quantities where the parameters do not; `gradient` is the leaf and the loop
    of d Σ weights · result."""

    loop: Callable[..., Any]
    options: Mapping[str, Any] = MappingProxyType({})
    args: str = ""
    gradient: tuple[str, Callable[..., Rows]] | None = None
    call: Callable[..., Any] | None = None
    close: float = CLOSE


def _identity(x: Tensor) -> Tensor:
    return x


@torch.no_grad()
def _chunked(
    logits: Tensor, logits_ref: Tensor, ids: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, ...]:
    reference = (logits_ref, _identity)
    return functional.chunked_log_probs(
        logits, _identity, ids, chunk_size=2, temperature=temperature, reference=reference
    )


def _gdpo(rewards: Tensor, lengths: Tensor, group_ids: Tensor, **options: Any) -> Tensor:
    return functional.gdpo({"a": rewards, "b": lengths.to(rewards.dtype)}, group_ids, **options)


def _mixed_component(rewards: Tensor, lengths: Tensor, group_ids: Tensor, **options: Any) -> Tensor:
    return functional.mixed_component(
        rewards, {"a": rewards, "b": lengths.to(rewards.dtype)}, group_ids, **options
    )


def _to_episodes(
    values: Tensor, rollout_ids: Tensor, step_ids: Tensor, response_mask: Tensor
) -> Tensor:
    return functional.to_episodes(
        values, *functional.episode_positions(rollout_ids, step_ids, response_mask)
    )


def _there_and_back(
    values: Tensor, response_mask: Tensor, rollout_ids: Tensor, step_ids: Tensor
) -> Tensor:
    place = functional.episode_positions(rollout_ids, step_ids, response_mask)
    return functional.from_episodes(functional.to_episodes(values, *place), *place, response_mask)


OF_ROLLOUTS = "logprobs_old logprobs_sampler response_mask rollout_ids"
DISCOUNTS = {"gamma": 0.9, "lam": 0.8}
turn_gae = partial(gae, by_turn=True)
CASES = {
    "advantages.raw": Case(raw),
    "advantages.batch_mean": Case(batch_mean),
    "advantages.group_mean": Case(group_mean),
    "advantages.leave_one_out": Case(leave_one_out),
    "advantages.length_weighted": Case(length_weighted),
    "advantages.gpg": Case(gpg),
    "advantages.gdpo": Case(gdpo, call=_gdpo),
    "advantages.gdpo weighted": Case(
        gdpo, {"weights": {"a": -0.3, "b": 2.0}, "eps": 0.5}, call=_gdpo
    ),
    "advantages.gdpo one": Case(gdpo, {"weights": {"a": 1.0, "b": 0.0}}, call=_gdpo),
    "advantages.turn_group_mean": Case(turn_group_mean),
    "advantages.turn_group_mean discounted": Case(turn_group_mean, {"gamma": 0.9}),
    "advantages.gae adaptive": Case(adaptive_gae, {"alpha": 0.05}),
    "advantages.gae adaptive long": Case(
        adaptive_gae, {"gamma": 0.9, "alpha": 0.4, "bootstrap_truncated": True}
    ),
    "advantages.max_rl": Case(max_rl),
    "advantages.pass_at_k_advantage": Case(pass_at_k_advantage),
    "advantages.pass_at_k_advantage k=1": Case(pass_at_k_advantage, {"k": 1}),
    "advantages.pass_at_k_advantage k=2": Case(pass_at_k_advantage, {"k": 2, "correct_above": 0.0}),
    "advantages.best_minus_second": Case(best_minus_second),
    "advantages.reward_to_go": Case(reward_to_go),
    "advantages.reward_to_go discounted": Case(reward_to_go, {"gamma": 0.9}),
    "advantages.remax": Case(remax),
    "advantages.gae": Case(gae),
    "advantages.gae discounted": Case(gae, {**DISCOUNTS, "bootstrap_truncated": True}),
    "advantages.turn_gae": Case(turn_gae),
    "advantages.turn_gae discounted": Case(turn_gae, {**DISCOUNTS, "bootstrap_truncated": True}),
    "normalization.no_normalization": Case(no_normalization),
    "normalization.normalize_group": Case(normalize_group),
    "normalization.normalize_group population": Case(
        normalize_group, {"std": "population", "eps": 0.0}
    ),
    "normalization.normalize_batch": Case(normalize_batch),
    "normalization.normalize_batch population": Case(
        normalize_batch, {"std": "population", "eps": 0.0}
    ),
    "normalization.normalize_advantages": Case(normalize_advantages),
    "normalization.normalize_advantages eps": Case(normalize_advantages, {"eps": 0.5}),
    "normalization.whiten": Case(whiten),
    "normalization.whiten eps": Case(whiten, {"eps": 0.5}),
    "ratios.log_ratio": Case(log_ratio, gradient=("logprobs", d_log_ratio)),
    "ratios.token_ratio": Case(token_ratio, gradient=("logprobs", d_token_ratio)),
    "ratios.sequence_ratio": Case(sequence_ratio, gradient=("logprobs", d_sequence_ratio)),
    "ratios.sequence_token_ratio": Case(
        sequence_ratio, gradient=("logprobs", d_sequence_token_ratio)
    ),
    "policy_losses.clipped": Case(clipped, gradient=("ratio", d_clipped)),
    "policy_losses.clipped asymmetric": Case(
        clipped, {"clip_low": 0.1, "clip_high": 0.4}, gradient=("ratio", d_clipped)
    ),
    "policy_losses.clipped dual": Case(clipped, {"dual_clip": 1.5}, gradient=("ratio", d_clipped)),
    "policy_losses.clipped delta": Case(clipped, {"delta": 1.5}, gradient=("ratio", d_clipped)),
    "policy_losses.clipped dual and delta": Case(
        clipped, {"dual_clip": 3.0, "delta": 1.5}, gradient=("ratio", d_clipped)
    ),
    "policy_losses.cispo": Case(cispo, gradient=("logprobs", d_cispo)),
    "policy_losses.cispo narrow": Case(
        cispo, {"clip_low": 0.2, "clip_high": 0.3}, gradient=("logprobs", d_cispo)
    ),
    "policy_losses.sapo": Case(sapo, gradient=("ratio", d_sapo)),
    "policy_losses.sapo steep": Case(
        sapo, {"tau_positive": 2.0, "tau_negative": 3.0}, gradient=("ratio", d_sapo)
    ),
    "policy_losses.gmpo": Case(gmpo, gradient=("logprobs", d_gmpo)),
    "policy_losses.gmpo asymmetric": Case(
        gmpo, {"clip_log_low": 0.1, "clip_log_high": 0.7}, gradient=("logprobs", d_gmpo)
    ),
    "policy_losses.kl_cov": Case(
        kl_cov, {"share": 0.5, "coef": 0.7}, gradient=("logprobs", d_kl_cov)
    ),
    "policy_losses.kl_cov rest": Case(kl_cov, gradient=("ratio", d_ratio_of_kl_cov)),
    "policy_losses.vespo": Case(vespo, gradient=("logprobs", d_vespo)),
    "policy_losses.vespo numbers": Case(
        vespo,
        {"k_positive": 0.3, "lam_positive": 1.1, "k_negative": 1.0, "lam_negative": 0.7},
        gradient=("logprobs", d_vespo),
    ),
    "policy_losses.dppo": Case(dppo, gradient=("logprobs", d_dppo)),
    "policy_losses.dppo kl": Case(
        dppo, {"divergence": "kl", "delta": 0.05, "penalty": 0.0}, gradient=("logprobs", d_dppo)
    ),
    "policy_losses.dppo two-sided": Case(
        dppo, {"two_sided": True, "penalty": 0.3}, gradient=("logprobs", d_dppo)
    ),
    "policy_losses.reinforce": Case(reinforce, gradient=("logprobs", d_reinforce)),
    "value_losses.squared_error": Case(squared_error, gradient=("values", d_squared_error)),
    "value_losses.clipped_squared_error": Case(
        clipped_squared_error, gradient=("values", d_clipped_squared_error)
    ),
    "value_losses.clipped_squared_error wide": Case(
        clipped_squared_error, {"clip": 0.7}, gradient=("values", d_clipped_squared_error)
    ),
    "kl.k1": Case(k1, gradient=("logprobs", d_k1)),
    "kl.k2": Case(k2, gradient=("logprobs", d_k2)),
    "kl.k3": Case(k3, gradient=("logprobs", partial(d_truncated, threshold=20.0))),
    "kl.k3_straight_through": Case(k3, gradient=("logprobs", d_k2)),
    "kl.forward": Case(forward, gradient=("logprobs", d_forward)),
    "kl.reverse": Case(reverse, gradient=("logprobs", d_reverse)),
    "kl.truncated": Case(truncated, gradient=("logprobs", d_truncated)),
    "kl.truncated early": Case(truncated, {"threshold": 0.3}, gradient=("logprobs", d_truncated)),
    "kl.confident": Case(confident, gradient=("logprobs", d_confident)),
    "kl.confident half": Case(confident, {"probability": 0.5}, gradient=("logprobs", d_confident)),
    "kl.full": Case(full, gradient=("full_kl", d_full)),
    "aggregation.token_mean": Case(token_mean, close=FLOAT32),
    "aggregation.sequence_mean": Case(sequence_mean, close=FLOAT32),
    "aggregation.sequence_sum": Case(sequence_sum, {"constant": 7.0}, close=FLOAT32),
    "aggregation.prompt_mean": Case(prompt_mean, close=FLOAT32),
    "filters.keep_all": Case(keep_all),
    "filters.mixed_groups": Case(mixed_groups),
    "filters.mixed_component": Case(mixed_component, call=_mixed_component),
    "filters.mixed_component second": Case(
        mixed_component, {"component": "b"}, call=_mixed_component
    ),
    "filters.clip_cov": Case(clip_cov),
    "filters.clip_cov wide": Case(clip_cov, {"share": 0.3, "low": -0.2, "high": 9.0}),
    "filters.covariance_rank": Case(covariance_rank),
    "filters.every_token": Case(every_token),
    "filters.top_entropy": Case(top_entropy),
    "filters.top_entropy half": Case(top_entropy, {"fraction": 0.5}),
    "filters.top_entropy all": Case(top_entropy, {"fraction": 1.0}),
    "corrections.no_correction": Case(no_correction),
    "corrections.automatic_correction": Case(automatic_correction),
    "corrections.token_correction": Case(token_correction),
    "corrections.token_correction mask": Case(token_correction, {"mode": "mask", "cap": 1.5}),
    "corrections.token_correction icepop": Case(
        token_correction, {"mode": "mask", "floor": 0.5, "cap": 5.0}
    ),
    "corrections.token_correction floor": Case(token_correction, {"floor": 0.8, "cap": 1.5}),
    "corrections.sequence_correction": Case(sequence_correction),
    "corrections.sequence_correction floor": Case(
        sequence_correction, {"mode": "mask", "floor": 0.5, "cap": 2.0}
    ),
    "corrections.sequence_correction mask": Case(sequence_correction, {"mode": "mask", "cap": 3.0}),
    "corrections.token_correction keep": Case(
        token_correction, {"mode": "keep", "floor": 0.5, "cap": 1.5}
    ),
    "corrections.token_correction normalised": Case(token_correction, {"normalise": True}),
    "corrections.sequence_correction normalised": Case(
        sequence_correction, {"normalise": True, "mode": "mask", "floor": 0.1, "cap": 3.0}
    ),
    "corrections.geometric_mask": Case(geometric_mask, {"low": 0.3, "high": 0.9}, args=OF_ROLLOUTS),
    "corrections.geometric_mask fixed": Case(
        geometric_mask, {"low": 0.3, "high": 0.2, "scaled": False}, args=OF_ROLLOUTS
    ),
    "corrections.divergence_mask": Case(divergence_mask, {"bound": 0.7}, args=OF_ROLLOUTS),
    "corrections.divergence_mask worst": Case(
        divergence_mask, {"over": "max", "bound": 1.7, "estimator": "k2"}, args=OF_ROLLOUTS
    ),
    "corrections.binary_kl_mask": Case(binary_kl_mask, {"bound": 0.2}),
    "corrections.second_moment_mask": Case(second_moment_mask),
    "corrections.second_moment_mask wide": Case(second_moment_mask, {"bound": 0.9}),
    "corrections.product_correction": Case(
        product_correction,
        {
            "parts": {
                "weight": partial(functional.token_correction, mode="mask", floor=0.5, cap=5.0),
                "mask": partial(functional.geometric_mask, low=0.5, high=0.7),
            }
        },
    ),
    "proximal.interpolated_old": Case(interpolated_old),
    "proximal.binary_kl": Case(binary_kl, args="logprobs logprobs_sampler"),
    "overlong.keep_overlong": Case(keep_overlong),
    "overlong.soft_penalty": Case(soft_penalty, {"limit": 7.0, "buffer": 0.5}),
    "overlong.soft_penalty long": Case(soft_penalty, {"limit": 4096.0}),
    "overlong.mask_truncated": Case(mask_truncated),
    "pairs.all_pairs": Case(all_pairs),
    "pairs.best_worst": Case(best_worst),
    "pairs.pairwise_loss": Case(pairwise_loss, gradient=("logprobs", d_pairwise_loss)),
    "pairs.pairwise_loss mean": Case(
        pairwise_loss,
        {"beta": 2.0, "length_normalise": True},
        gradient=("logprobs", d_pairwise_loss),
    ),
    "pairs.pairwise": Case(pairwise),
    "pairs.pairwise mean": Case(pairwise, {"beta": 2.0, "length_normalise": True}),
    "pairs.pairwise best_worst": Case(
        partial(pairwise, select=best_worst), {"pair_selector": functional.best_worst}
    ),
    "entropy.from_log_probs": Case(from_log_probs, gradient=("log_probs", d_from_log_probs)),
    "entropy.from_logits": Case(from_logits, gradient=("logits", d_from_logits)),
    "log_probs.token_log_probs": Case(token_log_probs),
    "log_probs.token_log_probs tempered": Case(token_log_probs, {"temperature": 0.7}),
    "log_probs.chunked_log_probs": Case(chunked_log_probs, call=_chunked),
    "log_probs.chunked_log_probs tempered": Case(
        chunked_log_probs, {"temperature": 0.7}, call=_chunked
    ),
    "diagnostics.approximate_kl": Case(approximate_kl),
    "diagnostics.ratio_statistics": Case(ratio_statistics),
    "diagnostics.effective_sample_size": Case(
        effective_sample_size, args="logprobs logprobs_sampler response_mask", close=FLOAT32
    ),
    "diagnostics.effective_sample_size of rollouts": Case(
        effective_sample_size,
        args="logprobs logprobs_sampler response_mask rollout_ids",
        close=FLOAT32,
    ),
    "diagnostics.correlation": Case(
        correlation, args="logprobs logprobs_old response_mask", close=FLOAT32
    ),
    "diagnostics.explained_variance": Case(explained_variance, close=FLOAT32),
    "masking.full_precision": Case(full_precision),
    "masking.fill_masked": Case(fill_masked, {"fill": 1.0}, args="values response_mask"),
    "masking.masked_mean": Case(masked_mean, args="values response_mask"),
    "masking.segment_sum": Case(segment_sum, args="weights rollout_ids"),
    "masking.rollout_mean": Case(rollout_mean, args="values response_mask rollout_ids"),
    "masking.episode_positions": Case(episode_positions),
    "masking.to_episodes": Case(to_episodes, call=_to_episodes),
    "masking.from_episodes": Case(there_and_back, call=_there_and_back),
}
MODULES = {
    m: [name for name in CASES if name.startswith(f"{m}.")]
    for m in dict.fromkeys(name.split(".")[0] for name in CASES)
}
# No formula of a paper but a generator of bits, held to its published numbers in its own tests;
# over whole distributions, enumerated there.
ELSEWHERE = {"sampling", "divergences"}
STEPWISE = {
    "policy_losses.kl_cov",
    "policy_losses.clipped",
    "policy_losses.cispo",
    "policy_losses.sapo",
    "policy_losses.reinforce",
}
STEPWISE |= {"value_losses.squared_error", "value_losses.clipped_squared_error"}
OWN_DTYPE = STEPWISE | {
    "advantages",
    "normalization",
    "overlong",
    "pairs.pairwise",
    "kl.full",
    "diagnostics.ratio_statistics",
}
OWN_DTYPE |= {
    "masking.fill_masked",
    "masking.to_episodes",
    "masking.from_episodes",
}  # all others: never bfloat16
FILLED = {
    "policy_losses",
    "value_losses",
    "kl",
    "proximal",
}  # finite everywhere by contract: the caller fills under the mask


# --- batches
# --------------------------------------------------------------------------------------------------

REWARDS = (0.0, 1.0, 0.5, 0.1, 0.7, -2.0, 3.0, NAN)
GROUP_IDS = (7, -3, 40, 0)
TOKENS = {  # per-token quantities and their ranges
    "logprobs": (-3, 0),
    "logprobs_old": (-3, 0),
    "logprobs_ref": (-3, 0),
    "logprobs_sampler": (-3, 0),
    "advantages": (-2, 2),
    "token_rewards": (-1, 1),
    "values": (-1, 1),
    "values_old": (-1, 1),
    "returns": (-1, 1),
    "entropy_old": (0, 3),
    "full_kl": (0, 1),
    "covariance_rank": (0, 1),
    "old_share": (0, 1),
}
Rollout = tuple[float, bool, list[list[bool]]]  # reward, cut off, the response mask of its rows


@st.composite
def batches(draw: st.DrawFn) -> dict[str, list]:
    """One to four groups of one to four rollouts, each of no, one or two rows of up to six
    positions."""
    sizes, seed = (
        draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)),
        draw(st.integers(0, 2**32)),
    )
    rng, groups = random.Random(seed), []
    for size in sizes:
        pool = rng.choice((REWARDS, (0.0, 1.0), (0.1,)))  # the last: all rewards equal
        rows = [
            [
                [rng.random() < 0.6 for _ in range(rng.randint(0, 6))]
                for _ in range(rng.choice((0, 1, 1, 2)))
            ]
            for _ in range(size)
        ]
        groups.append([(rng.choice(pool), rng.random() < 0.5, masks) for masks in rows])
    return _batch(groups, draw(st.sampled_from(("smooth", "ties", "far"))), seed)


def _batch(groups: list[list[Rollout]], style: str = "smooth", seed: int = 0) -> dict[str, list]:
    """All quantities as lists. Rollouts and rows are shuffled; under the mask stands what may stand
    there.

    `ties` has numbers on a grid, so that many are equal; `far` has log-ratios beyond the clamps.
    """
    rng = random.Random(seed)

    def number(low: float, high: float) -> float:
        x = rng.uniform(low, high)
        return (
            round(2 * x) / 2
            if style == "ties"
            else 20 * x
            if style == "far" and rng.random() < 0.2
            else x
        )

    members = [(GROUP_IDS[g], *rollout) for g, group in enumerate(groups) for rollout in group]
    rng.shuffle(members)
    rows = [(j, k, row) for j, (*_, masks) in enumerate(members) for k, row in enumerate(masks)]
    rng.shuffle(rows)
    width = max([1, *(len(row) for *_, row in rows)])
    out: dict[str, list] = {
        "group_ids": [m[0] for m in members],
        "rewards": [m[1] for m in members],
        "greedy_rewards": [rng.choice(REWARDS) for _ in members],
        "truncated": [m[2] for m in members],
        "lengths": [sum(map(sum, m[3])) for m in members],
        "reply_lengths": [sum(map(sum, m[3])) for m in members],
        "rollout_ids": [j for j, *_ in rows],
        "response_mask": [row + [False] * (width - len(row)) for *_, row in rows],
        "weights": [[rng.uniform(-1, 1) for _ in range(width)] for _ in rows],
    }
    turns = [rng.randint(0, width) for _ in rows]  # where a row's second step begins
    out["step_ids"] = [
        [2 * k + (t >= turn) for t in range(width)]
        for (_, k, _), turn in zip(rows, turns, strict=True)
    ]
    for name, bounds in TOKENS.items():
        garbage = rng.choice((NAN, INF, -INF, 1e4, 0.0))
        out[name] = [
            [number(*bounds) if m else garbage for m in row] for row in out["response_mask"]
        ]
    if rng.random() < 0.5:  # one advantage a rollout, as most options give it
        mine = [rng.choice((-1.0, 0.0, 0.5)) for _ in members]
        out["advantages"] = [
            [mine[j] if m else NAN for m in row]
            for j, row in zip(out["rollout_ids"], out["response_mask"], strict=True)
        ]
    out["ratio"] = token_ratio(out["logprobs"], out["logprobs_old"], out["response_mask"])
    seen = set(out["rollout_ids"])
    out["pairs"] = all_pairs(
        [r if j in seen else NAN for j, r in enumerate(out["rewards"])], out["group_ids"]
    )
    out["pair_weights"] = [rng.uniform(-1, 1) for _ in out["pairs"]]
    size, vocabulary = rng.randint(0, 4), rng.randint(1, 5)
    out["ids"] = [rng.randrange(vocabulary) for _ in range(size)]
    for name in ("logits", "logits_ref"):
        out[name] = [[number(-4, 4) for _ in range(vocabulary)] for _ in range(size)]
    for row, v in zip(
        out["logits"], out["ids"], strict=True
    ):  # excluded tokens; the drawn one stays possible
        row[:] = [-INF if u != v and rng.random() < 0.2 else z for u, z in enumerate(row)]
    out["log_probs"] = [log_softmax(row) for row in out["logits"]]
    out["row_weights"] = [rng.uniform(-1, 1) for _ in range(size)]
    return out


INTEGERS = {"group_ids", "rollout_ids", "lengths", "reply_lengths", "step_ids", "pairs", "ids"}
BOOLEANS = {"truncated", "response_mask"}


def _tensor(name: str, batch: dict[str, list], dtype: torch.dtype) -> Tensor:
    """One quantity as a tensor; a batch without rows still has two dimensions."""
    dtype = torch.int64 if name in INTEGERS else torch.bool if name in BOOLEANS else dtype
    out = torch.tensor(batch[name], dtype=dtype)
    if name in TOKENS or name in ("weights", "ratio", "response_mask", "step_ids"):
        return out.view(len(batch["rollout_ids"]), -1 if out.numel() else 1)
    if name in ("logits", "logits_ref", "log_probs"):
        return out.view(len(batch["ids"]), -1 if out.numel() else 1)
    return out.view(-1, 2) if name == "pairs" else out


def _given(name: str, batch: dict[str, list]) -> dict[str, list]:
    """The batch as this option may see it: filled under the mask where its module asks for that."""
    if name.split(".")[0] not in FILLED:
        return batch
    mask = batch["response_mask"]
    filled = {k: fill_masked(batch[k], mask, fill=0.0) for k in TOKENS}
    return batch | filled | {"ratio": fill_masked(batch["ratio"], mask, fill=1.0)}


def _function(name: str) -> Callable[..., Any]:
    return CASES[name].call or PUBLIC[name.split()[0]]


def _arguments(f: Callable[..., Any], case: Case, batch: dict[str, list]) -> list[str]:
    """The quantities that f is called with, in order: its positional parameters, unless the case
    names them."""
    positional = [
        p.name
        for p in inspect.signature(f).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    return case.args.split() or [p for p in positional if p in batch]


def _loop(
    loop: Callable[..., Any], name: str, batch: dict[str, list], args: list[str] | None = None
) -> tuple[Any, ...]:
    case = CASES[name]
    out = loop(*[batch[a] for a in args or _arguments(loop, case, batch)], **case.options)
    return out if isinstance(out, tuple) else (out,)


def _call(
    name: str, batch: dict[str, list], dtype: torch.dtype = torch.float64, **leaves: Tensor
) -> tuple[Tensor, ...]:
    case, f = CASES[name], _function(name)
    out = f(
        *[
            leaves[a] if a in leaves else _tensor(a, batch, dtype)
            for a in _arguments(f, case, batch)
        ],
        **case.options,
    )
    return tuple(out) if isinstance(out, tuple) else (out,)


def _assert_close(name: str, got: Tensor, expected: Any, close: float) -> None:
    """Relative to the largest entry: sums of large terms that cancel have the rounding of the
    terms."""
    want = torch.tensor(expected, dtype=torch.float64)
    want = want.view(got.shape) if not want.numel() else want
    assert got.shape == want.shape, name
    if not got.is_floating_point():
        assert torch.equal(got.double(), want), f"{name}: {got} is not {want}"
        return
    largest = want[want.isfinite()].abs().max().item() if want.isfinite().any() else 0.0
    atol = 1e-3 * close * max(1.0, largest)
    assert torch.allclose(got.double(), want, rtol=close, atol=atol, equal_nan=True), (
        f"{name}: {got} is not {want}"
    )


def _check(name: str, batch: dict[str, list]) -> None:
    """Values and, where the case has one, the derivative."""
    case, batch = CASES[name], _given(name, batch)
    got, expected = _call(name, batch), _loop(case.loop, name, batch)
    assert len(got) == len(expected)
    for g, e in zip(got, expected, strict=True):
        _assert_close(name, g, e, case.close)
    if case.gradient is None:
        return
    leaf_name, derivative = case.gradient
    arguments = _arguments(derivative, Case(derivative), batch)
    leaf = _tensor(leaf_name, batch, torch.float64).requires_grad_()
    (result,) = _call(name, batch, **{leaf_name: leaf})
    (result * _tensor(arguments[0], batch, torch.float64)).sum().backward()
    (slope,) = _loop(derivative, name, batch, arguments)
    _assert_close(f"gradient of {name}", leaf.grad, slope, case.close)


@pytest.mark.slow
@pytest.mark.parametrize("module", cases(MODULES, 5))
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(batch=batches())
def test_equals_its_loop(module: str, batch: dict[str, list]) -> None:
    """Groups of one to four, rewards of nan and ties, rows without tokens, tools in between,
    garbage under the mask."""
    for name in MODULES[module]:
        _check(name, batch)


EDGES = {
    "a group of one": [[(1.0, False, [[True, False, True]])]],
    "all rewards equal": [[(0.1, False, [[True] * n]) for n in (1, 2, 3)]] * 2,
    "no reward can be scored": [[(NAN, False, [[True, True]])] * 2],
    "an empty response": [[(1.0, False, [[]]), (0.0, False, [[True, True]])]],
    "only empty responses": [[(1.0, True, [[]]), (0.0, False, [[]])]],
    "no rows": [[(1.0, False, []), (0.0, True, [])]],
    "one token": [[(1.0, False, [[True]]), (0.0, True, [[True]])]],
    "all masked": [[(1.0, True, [[False] * 4]), (0.0, False, [[False] * 2, [False] * 3])]] * 2,
    "one token against 1,000": [[(1.0, False, [[True]]), (0.0, True, [[True] * 1000])]],
}


@cache
def _edge(edge: str) -> dict[str, list]:
    return _batch(EDGES[edge])


@pytest.mark.slow
@each("edge", EDGES)
@each("module", MODULES)
def test_equals_its_loop_at_the_edge(module: str, edge: str) -> None:
    """And is finite there, but for rewards of nan that overlong passes on, and figures that are not
    defined."""
    batch = _edge(edge)
    for name in MODULES[module]:
        _check(name, batch)
        if module not in ("diagnostics", "masking", "normalization") and (module, edge) != (
            "overlong",
            "no reward can be scored",
        ):
            assert all(g.isfinite().all() for g in _call(name, _given(name, batch))), name


@pytest.mark.slow
@each("name", CASES)
def test_half_precision_is_computed_in_full(name: str) -> None:
    """On bfloat16 inputs the result is that of float32 on the same numbers; where it has their
    dtype, rounded once at the end.

    Losses of one token are computed on what they are given, ratios and log-probs of full precision;
    on others they round as they go.
    """
    batch = _batch(
        [[(r, r > 0, [[True, False, True, True], [True, True]]) for r in (1.0, 0.0, 0.5)]] * 3,
        seed=1,
    )
    batch = batch | {
        "reply_lengths": [4001 + n for n in batch["reply_lengths"]]
    }  # bfloat16 has no 4001
    exact = {
        k: v if k in INTEGERS | BOOLEANS else _tensor(k, batch, torch.bfloat16).tolist()
        for k, v in batch.items()
    }
    exact = _given(name, exact)
    for half, single in zip(
        _call(name, exact, torch.bfloat16), _call(name, exact, torch.float32), strict=True
    ):
        assert half.dtype != torch.bfloat16 or {name.split()[0], name.split(".")[0]} & OWN_DTYPE
        if name.split()[0] in STEPWISE:
            assert (half - single).nan_to_num().norm() <= 2**-6 * single.nan_to_num().norm()
        else:
            assert torch.equal(half.nan_to_num(), single.to(half.dtype).nan_to_num())


def test_every_public_function_has_a_loop() -> None:
    assert {name.split()[0] for name in CASES} == {
        name for name in PUBLIC if name.split(".")[0] not in ELSEWHERE
    }
