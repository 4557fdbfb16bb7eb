"""An update is skipped where its gradient is known to be 0, and nowhere else. So skipping changes
no gradient."""

from __future__ import annotations

import copy
import functools
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rlkit.functional as f
from parametrise import KLS, POLICY_LOSSES, cases, cover
from rlkit.algorithm import Stream
from rlkit.config.compose import compose, experiment
from rlkit.config.problems.trial import dry_run
from rlkit.errors import ConfigError
from rlkit.system import rng
from rlkit.training.learner import Learner
from rlkit.training.update import minibatch, signal
from rlkit.training.update.step import weigh_batch
from rlkit.types import Rollout, Step, Task, declarations, vanishes

SMALL = [
    "trainer.threads=1",
    "trainer.accelerator=cpu",
    "trainer.steps=3",
    "evaluation.n=0",
    "logger=none",
    "seed=3",
]
SIZES = [3, 20, 9, 14, 5, 17, 2, 11]


def rollouts_of(rewards: list[float]) -> list[Rollout]:
    """Rollouts of many lengths, two a prompt. What the sampler says of their tokens is far from
    what the trainer says."""
    draw = random.Random(5)
    prompts = [tuple(draw.randrange(5, 300) for _ in range(6 + i)) for i in range(4)]
    out = []
    for i, (size, reward) in enumerate(zip(SIZES, rewards, strict=True)):
        step = Step(
            (),
            prompts[i // 2],
            tuple(draw.randrange(5, 300) for _ in range(size)),
            (-5.0,) * size,
            "stop",
        )
        terms = {"numeric": reward}
        out.append(
            Rollout(
                Task(str(i // 2), ()),
                (step,),
                group=i // 2,
                sample=i % 2,
                reward=reward,
                rewards=terms,
            )
        )
    return out


EQUAL = rollouts_of([1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])  # in every group
ONE_DIFFERS = rollouts_of([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])


def experiment_of(*words: str, lr: float = 0.0):
    """At the rate 0 the optimiser moves nothing."""
    return experiment(compose([*SMALL, f"optimizer.lr={lr}", "schedule=constant", *words]))


def learner_of(*words: str, loss=None, lr: float = 0.0) -> Learner:
    """A learner of its own copy of the embedded model."""
    x = experiment_of(*words, lr=lr)
    if loss is not None:
        x = x._replace(algorithm=x.algorithm._replace(policy_loss=loss))
    return Learner(x, loaded(x), exact=True)


def loaded(x):
    torch.set_num_threads(1)
    rng.seed(x.seed)
    return x.model(device="cpu")


def gradients(
    learner: Learner, rollouts: list[Rollout], monkeypatch, *, skips: bool
) -> list[torch.Tensor | None]:
    """The policy's gradient in each update of a step, None where the update was skipped."""
    found: list[torch.Tensor | None] = []
    whole = minibatch.make_one_update

    def watched(u, optimizers, batch, terms):
        steps = len(terms.norms["policy"])
        going_on = whole(u, optimizers, batch, terms)
        trained = [p for p in u.model.parameters() if p.requires_grad]
        parts = [p.grad for p in trained if p.grad is not None]
        stepped = len(terms.norms["policy"]) > steps
        found.append(torch.cat([part.flatten().clone() for part in parts]) if stepped else None)
        return going_on

    with monkeypatch.context() as patched:
        patched.setattr("rlkit.training.update.step.make_one_update", watched)
        if not skips:
            for place in (signal, minibatch):
                patched.setattr(place, "has_signal", lambda u, batch: True)
        learner.step(rollouts)
    return found


# --------------------------------------------------------------------------------- the declarations

LOSSES = POLICY_LOSSES | {
    "kl_cov free": functools.partial(f.kl_cov, coef=0),
    "dppo free": functools.partial(f.dppo, penalty=0.0),
}
CONSTANT = {
    "cispo",
    "clipped",
    "clipped dual",
    "clipped delta",
    "gmpo",
    "reinforce",
    "sapo",
    "vespo",
    "kl_cov free",
    "dppo free",
}


def of_loss(loss, advantages: torch.Tensor) -> torch.Tensor:
    """d Σ loss / d log π of six tokens, of which the policy has moved away from old and sampler."""
    draw = torch.Generator().manual_seed(0)
    old, sampler, new = (
        -3 * torch.rand(2, 3, generator=draw, dtype=torch.float64) for _ in range(3)
    )
    new.requires_grad_()
    mask = torch.ones(2, 3, dtype=torch.bool)
    given = {
        "logprobs": new,
        "logprobs_old": old,
        "logprobs_sampler": sampler,
        "response_mask": mask,
        "advantages": advantages,
        "rollout_ids": torch.tensor([0, 1]),
        "ratio": f.token_ratio(new, old, mask),
        "covariance_rank": torch.zeros(2, 3),
    }
    from rlkit.algorithm import call

    return torch.autograd.grad(call(loss, given).sum(), new)[0]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_says_so_exactly_where_it_is_constant_without_advantages(name):
    """The penalties of dppo and kl_cov have a gradient without advantages; with a weight of 0 they
    have none."""
    declared = "without_advantages" in (declarations(LOSSES[name], "vanishes") or ())
    gradient = of_loss(LOSSES[name], torch.zeros(2, 3, dtype=torch.float64))
    assert declared == (name in CONSTANT) == (not gradient.any())


@pytest.mark.parametrize("name", KLS)
@pytest.mark.parametrize("weighted", [False, True])
def test_an_estimator_says_so_exactly_where_its_gradient_is_0_at_the_reference(name, weighted):
    """In the bits of float32, alone and times the ratio. For `full`, over a vocabulary of seven."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, generator=draw).requires_grad_()
    logp = logits.log_softmax(-1)
    new = logp[:, 2]
    given = {"logprobs": new, "logprobs_ref": new.detach(), "logprobs_old": new.detach()}
    from rlkit.algorithm import call
    from rlkit.functional.log_probs import _divergence

    given["full_kl"] = _divergence(logp, logp.detach())
    value = call(KLS[name], given)
    if weighted:
        value = value * f.token_ratio(new, new.detach(), torch.ones(5, dtype=torch.bool))
    gradient = torch.autograd.grad(value.sum(), logits)[0]
    assert ("at_reference" in (declarations(KLS[name], "vanishes") or ())) == (not gradient.any())


def test_a_wrapper_declares_for_itself():
    """functools.wraps copies attributes, and the wrapper may add a term."""

    @functools.wraps(f.clipped)
    def mine(*given, **numbers):
        return f.clipped(*given, **numbers) + 0.1 * given[0].log().square()

    assert declarations(mine, "vanishes") is None
    assert declarations(vanishes("without_advantages", clip_low=0.1)(mine), "vanishes") == set()
    assert declarations(functools.partial(mine, clip_low=0.1), "vanishes") == {"without_advantages"}
    assert declarations(functools.partial(f.clipped, clip_low=0.1), "vanishes") == {
        "without_advantages"
    }
    with pytest.raises(
        ValueError, match="there is no such word; there are: without_advantages, at_reference"
    ):
        vanishes("without_advantage")


@pytest.mark.slow
def test_kl_cov_keeps_the_micro_batches_of_its_old_log_probs(tiny, monkeypatch):
    """Its penalty |log π - log π_old| has no gradient at 0, and a full one beside it."""
    monkeypatch.setattr(minibatch, "order_by_signal", None)
    x = experiment(compose(["algorithm/policy_loss=kl_cov", "kl=none", *SMALL]))
    policy = tiny._replace(model=copy.deepcopy(tiny.model))
    Learner(x, policy, exact=True).step(rollouts_of([1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0]))


# --------------------------------------------------------------------- skipping changes no gradient

LOSS_OPTIONS = [
    "clipped",
    "clip_higher",
    "clip_sequence",
    "cispo",
    "dppo",
    "dual_clip",
    "gmpo",
    "kl_cov",
    "reinforce",
    "sapo",
    "vespo",
]
TERMS = {
    "alone": ["kl=none"],
    "k3": ["kl=k3"],
    "k2 weighted": ["kl=k2", "kl.importance_weight=true"],
    "full": ["kl=full"],
    "k1": ["kl=k1"],
    "forward": ["kl=forward"],
    "k1 in the reward": ["kl=k1", "kl.placement=reward"],
    "entropy": ["kl=none", "algorithm.entropy_coef=0.01"],
    "entropy and k3": ["kl=k3", "algorithm.entropy_coef=0.01"],
    "corrected": ["kl=k3", "algorithm/correction=token_truncate"],
    "by m2po": ["kl=none", "algorithm/correction=m2po"],
    "critic": ["kl=none", "algorithm/advantage=gae", "algorithm/critic=head"],
    "critic on the trunk": [
        "kl=none",
        "algorithm/advantage=gae",
        "algorithm/critic=head",
        "algorithm.critic.trunk_gradient=true",
    ],
    "token filter": ["kl=none", "algorithm/token_filter=clip_cov"],
    "sampler as old": ["kl=none", "algorithm.old=sampler"],
}
SPLITS = {
    "1": ["algorithm.minibatches=1"],
    "4": ["algorithm.minibatches=4"],
    "2 × 2": ["algorithm.minibatches=2", "algorithm.epochs=2"],
}
# A ratio to the sampler that would be corrected twice, and a loss that reads another old policy
# than the ratio's.
REFUSED = {(loss, term) for loss in ("dppo", "vespo") for term in ("corrected", "by m2po")} | {
    ("kl_cov", "sampler as old")
}
# Every loss, term and way to split, and some further pairs. The ways follow one another, and begin
# with another one for each loss.
WAYS = list(SPLITS)
PRODUCT = [
    (loss, term, WAYS[(i + j) % len(WAYS)])
    for i, loss in enumerate(LOSS_OPTIONS)
    for j, term in enumerate(TERMS)
    if (loss, term) not in REFUSED
]
FAST = [row for row in PRODUCT if row[:2] == ("clipped", "k3")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "term", "split"), cases(cover(PRODUCT, 20, also=FAST), FAST, unpack=True)
)
def test_skipping_changes_no_gradient(loss, term, split, monkeypatch):
    """Equal rewards in every group, then in all groups but one. What is skipped would have had a
    gradient of exactly 0. With one rollout in each micro-batch, gradients are added in one
    order."""
    words = ["algorithm=grpo", f"algorithm/policy_loss={loss}", *TERMS[term], *SPLITS[split]]
    words += ["trainer.micro_batch_tokens=1"]
    x = experiment_of(*words)
    policy = loaded(x)
    for rollouts in (EQUAL, ONE_DIFFERS):
        plain = gradients(Learner(x, policy, exact=True), rollouts, monkeypatch, skips=False)
        skipping = gradients(Learner(x, policy, exact=True), rollouts, monkeypatch, skips=True)
        assert len(plain) == len(skipping) > 0
        for whole, kept in zip(plain, skipping, strict=True):
            assert whole is not None
            assert not whole.any() if kept is None else torch.equal(whole, kept)


@pytest.mark.parametrize(
    ("words", "apart"),
    [
        (["kl=none"], True),
        (["kl=k3"], True),  # the reference is the policy
        (["kl=none", "algorithm.entropy_coef=0.01"], False),
        (["kl=none", "algorithm/advantage=gae", "algorithm/critic=head"], False),
    ],
)
def test_groups_of_equal_rewards_are_read_without_a_gradient(words, apart, monkeypatch):
    """The metrics are those of all rollouts. Two groups fit into a micro-batch, and the first one
    and the last one have unequal rewards."""
    rollouts = rollouts_of([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    rows = []
    for skips in (True, False):
        read = {True: 0, False: 0}
        whole = minibatch.compute_trained_logprobs

        def watched(u, packed, read=read, whole=whole):
            scores = whole(u, packed)
            read[scores.logprobs.requires_grad] += int(packed.response_mask.sum())
            return scores

        with monkeypatch.context() as patched:
            patched.setattr(minibatch, "compute_trained_logprobs", watched)
            if not skips:
                patched.setattr(minibatch, "has_signal", lambda u, batch: True)
            small = ["algorithm.minibatches=1", "trainer.micro_batch_tokens=54"]
            rows.append(learner_of("algorithm=grpo", *small, *words).step(rollouts))
        with_gradient = sum(SIZES[:2] + SIZES[6:]) if skips and apart else sum(SIZES)
        assert read == {True: with_gradient, False: sum(SIZES) - with_gradient}
    ours, theirs = (
        {name: value for name, value in row.items() if not name.startswith(("time/", "perf/"))}
        for row in rows
    )
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-7, nan_ok=True)  # sums in another order


def penalised(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    logprobs_sampler: torch.Tensor,
    logprobs: torch.Tensor,
) -> torch.Tensor:
    return -ratio * advantages + 0.01 * (logprobs - logprobs_sampler).square()


@pytest.mark.slow
def test_the_loss_of_a_user_is_skipped_only_if_it_declares_so(monkeypatch):
    """With the declaration a term of its own is lost; that is what a declaration means, and no
    default."""
    words = ["algorithm=grpo", "kl=none", "reference=none"]
    assert all(
        g is not None and g.any()
        for g in gradients(learner_of(*words, loss=penalised), EQUAL, monkeypatch, skips=True)
    )

    @vanishes("without_advantages")
    def declared(ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return -ratio * advantages

    assert gradients(learner_of(*words, loss=declared), EQUAL, monkeypatch, skips=True) == [
        None,
        None,
    ]


@pytest.mark.slow
def test_a_declaration_that_does_not_hold_is_refused_before_the_run():
    x = experiment_of("algorithm=grpo")
    dry_run(x)
    loss = x._replace(algorithm=x.algorithm._replace(policy_loss=claimed))
    with pytest.raises(
        ConfigError,
        match=r'^algorithm.policy_loss \(.*claimed\): declares @vanishes\("without_advantages"\)',
    ):
        dry_run(loss)
    estimator = x._replace(kl=x.kl._replace(estimator=functools.partial(noisy)))
    with pytest.raises(
        ConfigError, match=r'^kl.estimator \(.*noisy\): declares @vanishes\("at_reference"\)'
    ):
        dry_run(estimator)


@vanishes("without_advantages")
def claimed(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    logprobs_sampler: torch.Tensor,
    logprobs: torch.Tensor,
) -> torch.Tensor:
    """Wrongly: it has a penalty."""
    return penalised(ratio, advantages, logprobs_sampler, logprobs)


@vanishes("at_reference")
def noisy(logprobs: torch.Tensor, logprobs_ref: torch.Tensor) -> torch.Tensor:
    """k1, whose gradient is 0 in expectation alone."""
    return logprobs - logprobs_ref


@pytest.mark.slow
def test_which_minibatch_pays_a_penalty_is_not_drawn(monkeypatch):
    """dppo: one group has a signal. Every minibatch pays the penalty, and not only the one into
    which that group was shuffled."""
    for seed in range(3):
        words = [
            "algorithm=grpo",
            "algorithm/policy_loss=dppo",
            "kl=none",
            "algorithm.minibatches=4",
            f"seed={seed}",
        ]
        assert None not in gradients(learner_of(*words), ONE_DIFFERS, monkeypatch, skips=True)


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True])
def test_a_value_loss_that_trains_the_trunk_is_a_term_of_the_loss(trained):
    """The policy's optimiser steps for it. It did not where no advantage differed from 0."""
    words = [
        "algorithm=ppo",
        "kl=none",
        "reference=none",
        f"algorithm.critic.trunk_gradient={str(trained).lower()}",
    ]
    learner = learner_of(*words)
    learner.trained = EQUAL
    u = learner.record()
    batch = weigh_batch(u)
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
    assert signal.has_signal(u, batch) == trained


@pytest.mark.slow
def test_an_update_without_a_trained_token_is_skipped(monkeypatch):
    """Whatever the loss is: it is a sum over no token."""
    cut = [r._replace(status="truncated", truncation="length") for r in EQUAL]
    words = [
        "algorithm=grpo",
        "algorithm/policy_loss=dppo",
        "kl=k1",
        "algorithm.entropy_coef=0.1",
        "algorithm/overlong=mask",
    ]
    assert gradients(learner_of(*words), cut, monkeypatch, skips=True) == [None, None]


# --------------------------------------------------------------------------------- at the reference

KEPT = {
    "k1": ["kl=k1"],
    "forward": ["kl=forward"],
    "reverse": ["kl=reverse"],
    "entropy": ["kl=k3", "algorithm.entropy_coef=0.01"],
    "a model of its own": ["kl=k3", "reference.path=tiny"],
}
SKIPPED = {
    **{
        name: [f"kl={name}"]
        for name in ("k2", "k3", "k3_straight_through", "truncated", "confident", "full")
    },
    "once": ["kl=k3", "algorithm.minibatches=1"],
    "weighted": ["kl=k3", "kl.importance_weight=true"],
    "adapters": ["kl=k3", "model.lora.rank=4"],
    "adapters, moving": ["kl=k3", "model.lora.rank=4", "reference=ema"],
    "ema": ["kl=k3", "reference=ema"],
    "periodic": ["kl=k3", "reference=periodic"],
    "on_kl": ["kl=k3", "reference=on_kl"],
    "in the reward": ["kl=k1", "kl.placement=reward"],
    "passes": ["kl=k3", "algorithm.epochs=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", cases([*KEPT, *SKIPPED], ["k1", "k3"]))
def test_the_first_step_without_signal_is_skipped_at_the_reference(name):
    """Neither weights nor moments move, and the KL is 0 in the row. After an update the KL pulls,
    and no step is skipped."""
    words = (KEPT | SKIPPED)[name]
    learner = learner_of("algorithm=grpo", *words, lr=1e-3)
    before = {key: value.clone() for key, value in learner.model.state_dict().items()}
    row = learner.step(EQUAL)
    if name in KEPT:
        assert row["optim/updates"] == 2 and not row["optim/skipped_no_signal"]
        return
    assert (
        row["optim/updates"] == 0
        and row["optim/skipped_no_signal"]
        == learner.x.algorithm.epochs * learner.x.algorithm.minibatches
    )
    assert row["kl/ref"] == row["kl/ref_k3"] == 0
    if name != "once":
        assert row["policy/entropy"] > 0  # the pass before the updates knows it
    assert (
        row["kl/step"] < 1e-11
    )  # k3 of float32 log-probs from micro-batches of another shape: half the square of 1e-6
    after = learner.model.state_dict()
    assert (
        all(torch.equal(value, after[key]) for key, value in before.items())
        and not learner.optimizers.made[0].state
    )
    assert learner.step(EQUAL)["optim/updates"] == 0  # still at the reference
    assert learner.step(ONE_DIFFERS)["optim/updates"] > 0
    assert learner.step(EQUAL)["optim/skipped_no_signal"] == 0


@pytest.mark.slow
def test_weights_that_somebody_else_moved_are_not_the_reference():
    """A callback, or a loop of the user's own: no optimiser has stepped, and still the KL pulls
    back."""
    learner = learner_of("algorithm=grpo", "kl=k3")
    with torch.no_grad():
        next(learner.model.parameters()).mul_(1.01)
    assert learner.step(EQUAL)["optim/updates"] == 2


@pytest.mark.slow
def test_a_phase_with_a_reference_of_its_own_starts_at_it():
    words = [
        *SMALL,
        "schedule=grpo_to_pairwise",
        "optimizer.lr=1e-3",
        "schedule.phases.explore.until=1",
    ]
    words += [
        f"+{group}@schedule.phases.prefer.{group}={option}"
        for group, option in (("kl", "k3"), ("reference", "frozen"))
    ]
    x = experiment(compose(words))
    learner = Learner(x, loaded(x), exact=True)
    assert learner.step(ONE_DIFFERS)["optim/updates"] > 0
    row = learner.step(EQUAL)
    assert (
        row["schedule/phase"] == 1
        and row["optim/updates"] == 0
        and row["optim/skipped_no_signal"] > 0
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    cases(
        [
            pytest.param(["kl=k3"], id="all weights"),
            pytest.param(["kl=k3", "model.lora.rank=4"], id="adapters"),
        ],
        1,
    ),
)
def test_a_resumed_learner_skips_what_the_other_skips(words):
    whole = learner_of("algorithm=grpo", *words, lr=1e-3)
    whole.step(EQUAL)
    parts = learner_of("algorithm=grpo", *words, lr=1e-3)
    parts.load_state_dict(whole.state_dict())
    for rollouts in (EQUAL, ONE_DIFFERS, EQUAL):
        rows = [learner.step(rollouts) for learner in (whole, parts)]
        assert rows[0]["optim/skipped_no_signal"] == rows[1]["optim/skipped_no_signal"]
    ours, theirs = (learner.model.state_dict() for learner in (whole, parts))
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


@pytest.mark.slow
def test_a_reward_without_weight_is_no_signal():
    """Imitation alone: the policy loss has a gradient, and a weight of 0."""
    batch: Any = SimpleNamespace(
        response_mask=torch.ones(1, 1, dtype=torch.bool), advantages=torch.ones(1, 1)
    )
    u = learner_of("algorithm=reinforce", "kl=none", "reference=none").record()
    assert signal.has_signal(u, batch)
    algorithm = u.x.algorithm._replace(streams={"imitation": Stream()})
    assert not signal.has_signal(u._replace(x=u.x._replace(algorithm=algorithm)), batch)
