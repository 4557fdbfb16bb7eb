"""What "old" is in the ratio (`algorithm.old`), which corrections go with it, and which of them are
refused or doubted."""

from __future__ import annotations

import math

import pytest
import torch

from parametrise import each
from rlkit.config.compose import compose, experiment
from rlkit.config.problems.doubts import list_warnings
from rlkit.config.problems.rows import load_tasks
from rlkit.errors import ConfigError
from rlkit.functional import no_correction, token_correction
from rlkit.system import rng
from rlkit.training.ahead.flight import Flight
from rlkit.training.ahead.modes import group_source
from rlkit.training.experiment import describe_correction, settle_correction
from rlkit.training.learner import Learner
from rlkit.training.update import drift
from rlkit.training.update import scored as passes
from rlkit.training.update.step import weigh_batch
from stepping import sample_step, take_step

COMMON = [
    "trainer.threads=1",
    "trainer.accelerator=cpu",
    "trainer.steps=4",
    "batch.prompts=4",
    "batch.group_size=4",
    "evaluation.n=0",
    "generation.max_new_tokens=24",
    "optimizer.lr=1e-3",
    "logger=none",
    "task.max_samples=64",
    "seed=3",
    "kl=none",
    "reference=none",
]
LAG = ["asynchrony=lag", "asynchrony.staleness=2"]


def stepped(*overrides, steps=2):
    """The learner after some steps, its last row, and a function that samples the groups of the
    step after it."""
    x = experiment(compose([*COMMON, *overrides]))
    torch.set_num_threads(1)
    rng.seed(x.seed)
    learner = Learner(x, x.model(device="cpu"), exact=True)
    flight = Flight()
    row = {}
    with group_source(x, load_tasks(x).train) as source:
        for _ in range(steps):
            _, flight, row = take_step(source, flight, learner)
    return learner, row, lambda: sample_step(source, flight, learner)[0]


def prepared(learner, trained):
    """The batch of the step to come, and what its updates compute with."""
    learner.begin()
    learner.trained = trained
    u = learner.record()
    return u, weigh_batch(u)


@pytest.fixture
def scored(monkeypatch):
    """How many rows each pass without gradient scored."""
    rows, real = [], passes.compute_batch_logprobs

    def counted(u, model, batch, *more, **settings):
        rows.append(len(batch.ids))
        return real(u, model, batch, *more, **settings)

    for place in (passes, drift):
        monkeypatch.setattr(place, "compute_batch_logprobs", counted)
    return rows


@pytest.mark.slow
def test_only_the_trainers_old_policy_takes_a_pass(scored):
    """Of the 16 rows of a step; the others score the few on which the drift is measured, and those
    of the first step with them. Without staleness all three are one policy."""
    rows = {}
    for old, whole in (("trainer", 1), ("sampler", 0), ("loglinear", 0)):
        scored.clear()
        learner, rows[old], _ = stepped("algorithm.minibatches=2", f"algorithm.old={old}", steps=1)
        assert scored.count(16) == whole and set(scored) <= {4, 8, 16}
        assert (learner.batch.logprobs_old is None) == (old != "trainer")
        assert (
            math.isnan(rows[old]["kl/old"])
            == math.isnan(rows[old]["ratio/first_mean"])
            == (old != "trainer")
        )
        assert (
            rows[old]["mismatch/kl"] < 1e-6
        )  # of the first update alone, before which nothing has moved
        for name in ("ratio/mean", "ratio/var", "optim/grad_norm", "kl/step"):
            assert rows[old][name] == pytest.approx(rows["trainer"][name], rel=1e-3)


@pytest.mark.slow
def test_stale_samples_move_the_ratio_of_the_sampler_and_not_that_of_the_trainer():
    """The second step is sampled by the start. One update a step: the trainer's ratio is 1,
    whatever the age, and its clip sees nothing."""
    words = [*LAG, "algorithm.minibatches=1"]
    rows = {
        old: stepped(*words, f"algorithm.old={old}")[1]
        for old in ("trainer", "sampler", "loglinear")
    }
    spread = {old: row["ratio/var"] for old, row in rows.items()}
    assert (
        spread["trainer"] < 1e-10 < 1e-3 < spread["loglinear"] < spread["sampler"] / 2
    )  # half the log-ratio, a quarter of its variance
    assert rows["sampler"]["ratio/mean"] == pytest.approx(rows["trainer"]["scale/mean"], rel=1e-5)
    assert rows["sampler"]["scale/mean"] == 1 and rows["loglinear"]["scale/mean"] == pytest.approx(
        rows["loglinear"]["ratio/mean"]
    )
    for row in rows.values():  # of the policy before the update, whatever the old one is
        assert row["staleness/steps_max"] == 1 and row["staleness/chi2_token"] > 0
        assert (
            row["staleness/ess_seq"]
            == pytest.approx(rows["trainer"]["staleness/ess_seq"], rel=1e-4)
            and row["staleness/ess_seq"] < 0.95
        )


@pytest.mark.slow
def test_with_one_update_a_step_the_correction_is_that_of_the_policy_before_it():
    """There is no pass before such an update but for the correction; without one the policy is its
    own old one, and nothing corrects."""
    learner, _, groups = stepped(
        *LAG, "algorithm.minibatches=1", "algorithm/correction=token_truncate"
    )
    u, batch = prepared(learner, groups().trained)
    mask, now = batch.response_mask, passes.compute_batch_logprobs(u, u.model, batch).logprobs
    expected = (now - batch.logprobs_sampler).exp().clamp(max=2)
    torch.testing.assert_close(batch.scale[mask], expected[mask], rtol=1e-5, atol=1e-6)
    assert (batch.scale[mask] - 1).abs().max() > 0.1
    plain, _, groups = stepped(*LAG, "algorithm.minibatches=1", "algorithm/correction=none")
    _, batch = prepared(plain, groups().trained)
    assert batch.logprobs_old is None and (batch.scale[batch.response_mask] == 1).all()


@pytest.mark.slow
def test_a_critic_is_scored_before_the_update_and_the_ratio_still_is_the_samplers(scored):
    """Values take the pass; "old" does not come from it."""
    learner, row, _ = stepped(
        *LAG, "algorithm=ppo", "algorithm.old=sampler", "algorithm.critic.warmup=0", steps=3
    )
    assert (
        scored.count(16) == 3 and learner.batch.logprobs_old is not None and row["ratio/var"] > 1e-5
    )


@pytest.mark.slow
def test_auto_is_none_where_the_loss_has_the_samplers_ratio():
    """Else the difference would be corrected twice."""
    cases = {
        (): (token_correction, "token_truncate, cap 2 (auto: replies are"),
        ("algorithm.old=sampler",): (no_correction, "none (auto: the ratio"),
        ("algorithm/policy_loss=dppo",): (no_correction, "none (auto: the ratio"),
        ("algorithm.old=loglinear",): (token_correction, "token_truncate"),
    }
    for words, (part, said) in cases.items():
        x = experiment(compose([*COMMON, *LAG, *words]))
        assert settle_correction(x, exact=True).algorithm.correction is part
        assert describe_correction(x, exact=True).startswith(f"correction: {said}")


TWO = ["algorithm/correction=product", "algorithm/correction@algorithm.correction.parts.mask=mis"]
REFUSED = {
    "every factor of algorithm/correction is 1": [
        "algorithm.old=sampler",
        "algorithm/correction=icepop",
    ],
    "algorithm/correction looks at the whole step": [
        "algorithm.old=loglinear",
        "algorithm/correction=m2po",
    ],
    "looks at the whole step; choose another": [
        "algorithm.old=loglinear",
        "algorithm/correction=product",
        "algorithm.correction.parts.weight.normalise=true",
    ],
    "algorithm.old=sampler: algorithm.advantage reads the policy before": [
        "algorithm.old=sampler",
        "algorithm=pairwise",
    ],
    "algorithm.token_filter reads": ["algorithm.old=loglinear", "algorithm/token_filter=clip_cov"],
    "algorithm.policy_loss reads": ["algorithm.old=sampler", "algorithm/policy_loss=kl_cov"],
    "algorithm.target_kl reads": ["algorithm.old=sampler", "algorithm.target_kl=0.1"],
    "kl.placement=reward reads": [
        "algorithm.old=sampler",
        "kl=k1",
        "kl.placement=reward",
        "kl.coef=0.1",
        "reference=frozen",
    ],
    "algorithm=sft samples nothing": [
        "algorithm.old=sampler",
        "algorithm=sft",
        "batch.group_size=1",
    ],
    "token_correction and sequence_correction both weigh": TWO,
}


@pytest.mark.slow
@each("words", REFUSED)
def test_what_has_no_meaning_is_refused(words):
    with pytest.raises(ConfigError) as error:
        experiment(compose([*COMMON, *REFUSED[words]]))
    assert words in str(error.value)


DOUBTED = {
    "is to the sampler already": ["algorithm=vespo", "algorithm/correction=icepop"],
    "a fixed band of the mean log-ratio": ["algorithm/correction=k1_mask"],
    "drops many of up to 24 tokens": [
        "algorithm/correction=product",
        "algorithm/correction@algorithm.correction.parts.mask=k1_mask",
    ],
    "with one update a step the ratio is 1": [
        "asynchrony=lag",
        "algorithm=reinforce",
        "algorithm/correction=none",
    ],
}


@pytest.mark.slow
def test_what_is_probably_not_meant_is_said():
    for words, given in DOUBTED.items():
        said = list_warnings(experiment(compose([*COMMON, *given])))
        assert any(words in line for line in said), words
    for given in (
        ["algorithm/correction=geometric_mask"],
        [*LAG, "algorithm=vespo"],
        [*LAG, "algorithm.old=sampler", "algorithm/correction=none"],
    ):
        assert not any(
            "correction" in line for line in list_warnings(experiment(compose([*COMMON, *given])))
        )
