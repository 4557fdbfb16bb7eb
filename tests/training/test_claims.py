"""Whether an engine samples with the versions that it claims: the law of false alarms, and engines
that lie."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from parametrise import cases, each
from rlkit.config.compose import compose, experiment
from rlkit.config.problems.rows import load_tasks
from rlkit.engines import Batched, Cached, Transformers
from rlkit.engines.transformers import complete
from rlkit.system import rng
from rlkit.training import learner
from rlkit.training.ahead.flight import Flight
from rlkit.training.ahead.modes import group_source
from rlkit.training.callbacks.pathologies import PROOF, version_unknown, version_wrong
from rlkit.training.learner import Learner
from rlkit.training.update import claims
from rlkit.training.update.claims import add_row, count_telling, list_trained
from stepping import take_step
from training.test_asynchrony import COMMON

# ------------------------------------------------------------------------------------ the statistic


def test_tokens_are_counted_where_two_versions_differ_by_more_than_the_noise():
    """The noise is (0.1 + 0.1 + 0 + 0) / 4 = 0.05, so a token tells if versions differ by 0.8."""
    claimed = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    other = torch.tensor([-1.9, -1.9, -1.7, -1.0])
    engine = torch.tensor([-1.1, -1.8, -1.7, -1.0])
    assert count_telling(engine, claimed, other) == (1, 1)
    assert count_telling(engine, other, claimed) == (1, 1)
    nothing = torch.zeros(0)
    assert count_telling(nothing, nothing, nothing) == (0, 0)


def test_ten_tokens_of_another_version_prove_it():
    assert add_row(math.nan, 10, 0) > PROOF > add_row(math.nan, 9, 0)
    assert add_row(5.0, 0, 10) == pytest.approx(5 - 10 * math.log10(7 / 4))
    assert add_row(-3.0, 1, 0) == pytest.approx(math.log10(4))  # what spoke against it is forgotten
    assert 34 * (math.log10(4) - math.log10(7 / 4)) / 2 > PROOF


def rows(move: float, noise: float, *, at: float, shape, count=40, tokens=48, seed=0):
    """Rows of an engine that samples `at` of the way from the claimed version to the other.

    move, noise: of the log-probs, times an uncertainty of each token that both share.
    """
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(count):
        unsure = torch.rand(tokens, generator=draw) ** 3
        delta = move * unsure * torch.randn(tokens, generator=draw)
        error = noise * unsure * shape(torch.rand(tokens, generator=draw))
        wrong = torch.rand(tokens, generator=draw) < at
        yield delta * wrong + error, torch.zeros(tokens), delta


def digits(given) -> tuple[float, float]:
    """The largest digits that a run reaches for the claimed version and against it."""
    right = wrong = math.nan
    most = [0.0, 0.0]
    for engine, claimed, other in given:
        here, there = count_telling(engine, claimed, other)
        right, wrong = add_row(right, here, there), add_row(wrong, there, here)
        most = [max(most[0], right), max(most[1], wrong)]
    return most[0], most[1]


SHAPES = {
    "normal": lambda u: math.sqrt(2) * torch.erfinv((2 * u - 1).clamp(-0.999999, 0.999999)),
    "two values": lambda u: (2 * (u > 0.5) - 1).float(),
    "heavy": lambda u: torch.tan(math.pi * (u - 0.5)).clamp(-1e4, 1e4),
    "always up": lambda u: u,  # not symmetric, as the law assumes
}


@each("name", SHAPES)
@each("noise", [0.0, 0.01, 0.1, 0.3, 1.0])
def test_an_honest_engine_is_never_accused_whatever_it_rounds(name, noise):
    """40 rows reach six digits with a probability of 4e-5 at most; of 20 runs none does."""
    _, wrong = digits(rows(1.0, noise, at=0.0, shape=SHAPES[name]))
    assert wrong < PROOF


@each("noise", [0.0, 1e-4, 0.01])
def test_an_engine_is_told_apart_where_versions_differ_by_more_than_it_rounds(noise):
    right, wrong = digits(rows(1.0, noise, at=0.0, shape=SHAPES["normal"], count=1))
    assert right > PROOF and wrong < 1
    right, wrong = digits(rows(1.0, noise, at=1.0, shape=SHAPES["normal"], count=1))
    assert wrong > PROOF and right < 1
    right, wrong = digits(rows(1.0, noise, at=0.5, shape=SHAPES["normal"]))
    assert right > PROOF and wrong > PROOF  # both versions are at work


@each("at", [0.0, 0.5, 1.0])
def test_where_versions_differ_by_less_than_it_rounds_nothing_is_told(at):
    assert max(digits(rows(0.02, 1.0, at=at, shape=SHAPES["normal"]))) < PROOF


def test_the_sentences_stand_at_six_digits():
    def said(**digits):
        row = {f"mismatch/version_{name}": value for name, value in digits.items()}
        return version_wrong(row) is not None, version_unknown(row) is not None

    assert said() == (False, False)  # an engine that is not checked
    assert said(right=math.nan, wrong=math.nan) == (False, False)  # nothing is compared yet
    assert said(right=6.0, wrong=5.9) == (False, False)
    assert said(right=5.9, wrong=0.0) == (False, True)
    assert said(right=0.0, wrong=6.0) == said(right=9.0, wrong=6.0) == (True, False)


# -------------------------------------------------------------------------------------- whole runs


def honest(weights, version, call):
    return weights[version]


def ignores(weights, version, call):
    return weights[0]


def late(weights, version, call):
    return weights[max(0, version - 1)]


def mixes(weights, version, call):
    return weights[version - call % 2 if version else 0]


class Copying(Batched):
    """An engine with copies of the weights of every version; `choose` says which of them sample."""

    def __init__(self, choose):
        self.choose = choose
        self.weights = {}
        super().__init__(self.sampled)

    async def load(self, weights, version):
        self.weights[version] = [p.detach().clone() for p in list_trained(weights.model)]
        await super().load(weights, version)

    def sampled(self, policy, prompts, seeds, params):
        now = [p.detach().clone() for p in list_trained(policy.model)]
        replies = {}
        chosen = [self.choose(self.weights, self.version, i) for i in range(len(prompts))]
        for weights in {id(own): own for own in chosen}.values():
            claims.put(policy.model, weights)
            rows = [i for i, own in enumerate(chosen) if own is weights]
            own = complete(policy, [prompts[i] for i in rows], [seeds[i] for i in rows], params)
            replies |= dict(zip(rows, own, strict=True))
        claims.put(policy.model, now)
        return [replies[i] for i in range(len(prompts))]


FEW = [
    "batch.prompts=1",
    "generation.max_new_tokens=20",
    "generation.temperature=2",
    "algorithm/correction=none",
    "reward=numeric",
    "reward.terms.numeric.fn._target_=overlap_parts.even",
]


class Learned:
    """Some steps of a run with an engine: their rows, and the learner."""

    def __init__(self, choose, *words, steps=2):
        x = experiment(compose([*COMMON, *FEW, *words]))
        if choose is not None:
            x = x._replace(generation=x.generation._replace(engine=Copying(choose)))
        torch.set_num_threads(1)
        rng.seed(x.seed)
        tasks = load_tasks(x).train
        self.learner = Learner(x, x.model(device="cpu"), exact=True)
        self.rows = []
        flight = Flight()
        with group_source(x, tasks) as source:
            for _ in range(steps):
                _, flight, row = take_step(source, flight, self.learner)
                self.rows.append(row)

    def accused(self) -> list[bool]:
        return [version_wrong(row) is not None for row in self.rows]


@functools.cache
def learned(choose, *words):
    return Learned(choose, *words)


@pytest.mark.slow
@pytest.mark.parametrize("words", cases([(), ("model.lora.rank=4", "optimizer.lr=1e-2")], 1))
def test_one_wrong_version_is_found_in_the_first_step_that_has_two(words):
    """Engines that accept every push and ignore it, or are one version late: the warning of
    mismatch/logp_abs_mean at 0.05 nat never came."""
    for choose in (ignores, late):
        assert learned(choose, *words).accused() == [False, True], choose
    own = learned(honest, *words)
    assert own.accused() == [False] * 2
    assert own.rows[-1]["mismatch/version_right"] > PROOF
    assert math.isnan(own.rows[0]["mismatch/version_right"])


@pytest.mark.slow
def test_an_engine_that_mixes_two_versions_is_found():
    """One rollout of a step is read, so within some steps: both versions are proved."""
    own = Learned(mixes, steps=4)
    assert any(own.accused())
    assert max(row["mismatch/version_right"] for row in own.rows[1:]) > PROOF


@pytest.mark.slow
def test_versions_are_compared_under_a_lag():
    words = ("asynchrony=lag", "asynchrony.staleness=1", "trainer.steps=5")
    own = Learned(honest, *words, steps=4)
    assert not any(own.accused()) and own.rows[-1]["mismatch/version_right"] > PROOF
    assert Learned(late, *words, steps=4).accused()[-1]


@pytest.mark.slow
def test_the_run_says_where_it_cannot_tell():
    """Weights that do not move."""
    rows = learned(ignores, "optimizer.lr=1e-12").rows
    assert [version_unknown(row) is not None for row in rows] == [False, True]


@pytest.mark.slow
def test_the_check_changes_no_weight_and_costs_a_hundredth_of_a_step(monkeypatch):
    """Counted in tokens that a forward pass reads; a step's update counts three times."""
    counted = {"check": 0, "step": 0}
    read = claims.compute_batch_logprobs

    def counting(u, model, batch):
        counted["check"] += int(batch.attention_mask.sum())
        return read(u, model, batch)

    monkeypatch.setattr(claims, "compute_batch_logprobs", counting)
    words = ("batch.prompts=32", "generation.max_new_tokens=4")
    own = Learned(honest, *words, steps=2)
    monkeypatch.setattr(learner, "Claims", NoClaims)
    other = Learned(honest, *words, steps=2)
    for p, q in zip(
        list_trained(own.learner.model), list_trained(other.learner.model), strict=True
    ):
        assert torch.equal(p, q)
    # sampled and updated, in one step each; the reference is read once more
    step = int(own.learner.batch.attention_mask.sum()) * (1 + 1 + 3)
    assert 0 < counted["check"] <= 0.01 * step, (counted, step)


class NoClaims:
    """Checks nothing."""

    def check(self, u):
        return {}


@pytest.mark.slow
def test_engines_of_the_trainers_own_tensors_have_nothing_to_claim():
    x = experiment(compose(COMMON))
    model = x.model(device="cpu").model
    assert not claims.has_copies(Cached()) and not claims.has_copies(Transformers())
    assert claims.has_copies(Batched(complete)) and claims.keeps_versions(model)


@pytest.mark.slow
def test_of_weights_too_large_to_keep_only_the_newest_version_is_checked(monkeypatch):
    monkeypatch.setattr(claims, "LARGEST", 1000)
    assert "mismatch/version_right" not in Learned(ignores, steps=1).rows[0]
