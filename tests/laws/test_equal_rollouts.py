"""Equal rollouts of a prompt get equal advantages, whichever of them is masked, filtered out or
cannot be scored.

Over every pair of slots of an algorithm with the other slots as in GRPO; and over every advantage
with every KL and every option of the other slots.
A new option is tested by a row of its table: the first test fails where conf/algorithm has an
option that stands in none.
"""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest
import torch

from parametrise import SLOTS, cases, cover
from rlkit import functional as f
from rlkit.algorithm import Algorithm, Critic
from rlkit.config.compose import compose, conf_dir, experiment
from rlkit.training.update.sampled import filter_rollouts
from rlkit.training.update.weighted import weigh
from rlkit.types import Batch, Scored, Weighted

GRPO = {"advantage": "group_mean", "normalization": "group"} | dict.fromkeys(
    list(SLOTS)[2:], "none"
)
PAIRS = list(itertools.combinations(SLOTS, 2))
# Scales of trained tokens and rollouts, pairs of the trained rollouts, and their turns: who is
# masked changes them.
ON_TRAINED = ("whiten", "advantages", "pairwise", "turn_group_mean")


def make_batch(contents: str) -> Batch:
    """A rollout for each letter, two rows and five sampled tokens each; equal letters are equal
    rollouts, those of one group neighbours."""
    groups = contents.split()
    letters = "".join(groups)
    n, b, t = len(letters), 2 * len(letters), 4
    owner = torch.arange(n).repeat_interleave(2)

    def tokens(seed: int) -> torch.Tensor:
        made = [
            -2
            * torch.rand(
                2,
                t,
                generator=torch.Generator().manual_seed(100 * seed + ord(c)),
                dtype=torch.float64,
            )
            for c in letters
        ]
        return torch.cat(made)

    mask = torch.tensor([[False, True, True, True], [False, False, True, True]]).repeat(n, 1)
    rewards = torch.tensor(
        [1.0 if c == "a" else 0.0 if c == "b" else 0.25 for c in letters], dtype=torch.float64
    )
    ends = torch.zeros(b, t, dtype=torch.float64)
    ends[1::2, -1] = rewards
    return Scored(
        ids=torch.ones(b, t, dtype=torch.int64),
        attention_mask=torch.ones(b, t, dtype=torch.bool),
        response_mask=mask,
        sampled_mask=mask,
        rollout_ids=owner,
        step_ids=torch.tensor([0, 1]).repeat(n)[:, None].expand(b, t),
        rewards=rewards,
        group_ids=torch.tensor([g for g, members in enumerate(groups) for _ in members]),
        truncated=torch.zeros(n, dtype=torch.bool),
        lengths=torch.full((n,), 5),
        reply_lengths=torch.full((n,), 3),
        token_rewards=ends,
        logprobs_sampler=tokens(1),
        logprobs_old=tokens(2),
        logprobs_ref=tokens(3),
        entropy_old=tokens(4).abs(),
        values=tokens(5),
        versions=torch.zeros(b, t, dtype=torch.int64),
        components={"task": rewards},
        greedy_rewards=torch.full((n,), 0.3),
    )


def estimated(batch: Scored, names: dict[str, str]) -> Weighted:
    parts = {slot: SLOTS[slot][name] for slot, name in names.items()}
    kl = parts.pop("kl")
    critic = (
        Critic("head", f.squared_error)
        if names["advantage"] in ("gae", "turn_gae", "adaptive_gae")
        else Critic()
    )
    algorithm = Algorithm(
        "test",
        ratio=f.token_ratio,
        policy_loss=f.clipped,
        aggregation=f.token_mean,
        critic=critic,
        **parts,
    )
    return weigh(filter_rollouts(batch, algorithm), algorithm, kl)


def rows_of(batch: Weighted, rollout: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask and advantages of a rollout, its two rows one after the other."""
    own = slice(2 * rollout, 2 * rollout + 2)
    return batch.response_mask[own], batch.advantages[own]


def struck(batch: Scored, victim: int, event: str) -> Scored:
    """One rollout is cut off, or cannot be scored."""
    hit = torch.arange(len(batch.rewards)) == victim
    if event == "cut off":
        return replace(batch, truncated=hit)
    lost = hit[batch.rollout_ids][:, None]
    rewards = batch.rewards.where(~hit, torch.nan)
    return replace(
        batch,
        rewards=rewards,
        components={"task": rewards},
        token_rewards=batch.token_rewards.where(~lost, 0.0),
    )


def problems(names: dict[str, str]) -> list[str]:
    """What of the law does not hold for one algorithm."""
    found = []

    def compare(
        what: str, left: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        both = left[0] & right[0]
        a, b = (side[1][both] for side in (left, right))
        if names["normalization"] in (
            "whiten",
            "advantages",
        ):  # divide by one less than there are, so they move with the number
            a, b = (values / values.norm().clamp_min(1e-9) for values in (a, b))
        if not torch.allclose(
            a, b, rtol=0, atol=1e-12
        ):  # float64 rounding of sums of a dozen terms
            found.append(f"{what}: {a.tolist()} and {b.tolist()}")

    equal, mixed = make_batch("aaaa aaaa"), make_batch("aaab aacb")
    whole = {id(batch): estimated(batch, names) for batch in (equal, mixed)}
    for event in ("cut off", "not scored"):
        for victim in (0, 2):
            alike, unlike = (
                estimated(struck(batch, victim, event), names) for batch in (equal, mixed)
            )
            others = [i for i in (0, 1, 2) if i != victim]
            compare(f"{event}, twins", *(rows_of(unlike, i) for i in others))
            for i in (*others, 4, 5):
                compare(f"{event}, among equals", rows_of(alike, i), rows_of(whole[id(equal)], i))
                if event == "cut off" and not {*names.values()} & {*ON_TRAINED}:
                    compare(
                        f"{event}, as if it were not",
                        rows_of(unlike, i),
                        rows_of(whole[id(mixed)], i),
                    )
    return found


def test_every_option_stands_in_a_table():
    for slot in [*SLOTS][:-1]:
        assert {path.stem for path in (conf_dir() / "algorithm" / slot).glob("*.yaml")} == SLOTS[
            slot
        ].keys(), slot


@pytest.mark.slow
@pytest.mark.parametrize("slots", cases(PAIRS, 2), ids=" and ".join)
def test_equal_rollouts_get_equal_advantages(slots):
    for chosen in itertools.product(*(SLOTS[slot] for slot in slots)):
        names = GRPO | dict(zip(slots, chosen, strict=True))
        assert problems(names) == [], names


@pytest.mark.slow
@pytest.mark.parametrize("advantage", SLOTS["advantage"])
@pytest.mark.parametrize("kl", SLOTS["kl"])
def test_equal_rollouts_get_equal_advantages_in_every_algorithm(advantage, kl):
    rest = [
        "normalization",
        "overlong",
        "group_filter",
    ]  # token_filter and correction scale the loss and reach no advantage
    for chosen in cover(itertools.product(*(SLOTS[slot] for slot in rest)), 3):
        names = GRPO | {"advantage": advantage, "kl": kl} | dict(zip(rest, chosen, strict=True))
        assert problems(names) == [], names


@pytest.mark.parametrize("in_baseline", [False, True])
def test_the_run_scores_what_the_baseline_needs(in_baseline, tiny):
    """A rollout that is not trained on has a KL too where that counts in the baseline, and is not
    scored for nothing elsewhere."""
    from rlkit.training.learner import Learner
    from rlkit.training.update.scored import score

    words = [
        "kl=k1",
        "kl.placement=reward",
        f"kl.in_baseline={str(in_baseline).lower()}",
        "algorithm/overlong=mask",
    ]
    x = experiment(compose([*words, "task.max_samples=8"]))
    batch = replace(make_batch("aacb"), truncated=torch.tensor([True, False, False, False]))
    batch = filter_rollouts(replace(batch, ids=torch.arange(32).view(8, 4)), x.algorithm)
    found = score(
        Learner(x, tiny).record(), Batch(**{f.name: getattr(batch, f.name) for f in fields(Batch)})
    )
    wanted = batch.sampled_mask if in_baseline else batch.response_mask
    assert torch.equal(found.logprobs_ref != 0, wanted) and torch.equal(
        found.logprobs_old != 0, wanted
    )
