"""asynchrony=overlap with servers of vLLM: which would not sample the same groups again, and which
two processes use in turns."""

from __future__ import annotations

import threading

import pytest
import torch

from extras.vllm.vllm_protocol import sampling
from rlkit import collect
from rlkit.config.compose import compose, experiment, make_builder
from rlkit.config.problems.rows import load_tasks
from rlkit.system import rng
from rlkit.training.ahead.flight import Flight
from rlkit.training.ahead.modes import group_source
from rlkit.training.learner import Learner
from stepping import take_step
from training.test_asynchrony import COMMON
from training.test_overlap import in_a_thread, timeless  # noqa: F401 (a fixture)

SMALL = [
    "batch.group_size=2",
    "generation.max_new_tokens=6",
    "generation=vllm",
    "asynchrony.staleness=1",
    "optimizer.lr=1e-2",
    "reward=numeric",
    "reward.terms.numeric.fn._target_=overlap_parts.even",
    "generation.temperature=2",
]


class Run:
    """A run against a server, from its start or from a state, in a folder that keeps the
    journal."""

    def __init__(self, server, folder, mode="overlap", words=(), saved=None):
        composed = compose(
            [
                *COMMON,
                *SMALL,
                f"generation.engine.addresses=[{server.url}]",
                f"asynchrony={mode}",
                *words,
            ]
        )
        self.x = experiment(composed)
        torch.set_num_threads(1)
        rng.seed(self.x.seed)
        self.tasks, self.flight, self.groups = load_tasks(self.x).train, Flight(), []
        self.learner = Learner(self.x, self.x.model(device="cpu"), exact=True)
        self.sampling = group_source(
            self.x, self.tasks, make_builder(composed.config), folder=folder
        )
        self.source = self.sampling.__enter__()
        if saved is not None:
            self.learner.load_state_dict(saved["learner"])
            self.flight = self.source.restore(
                saved["flight"], self.learner.policy, self.learner.progress
            )

    def steps(self, count, between=lambda: None):
        for _ in range(count):
            groups, self.flight, _ = take_step(self.source, self.flight, self.learner)
            between()
            self.groups.append((groups.version, timeless(groups.sampled)))
        return self

    def state(self, to):
        saved = {"learner": self.learner.state_dict(), "flight": self.source.state(self.flight)}
        torch.save(saved, to)
        return torch.load(to, weights_only=True)

    def ended(self):
        self.sampling.__exit__(None, None, None)
        return self


@pytest.fixture
def server():
    with sampling() as http:
        yield http


@pytest.mark.slow
def test_a_journal_repeats_a_run_that_no_server_would_repeat(server, in_a_thread, tmp_path, same):  # noqa: F811
    """Killed after step 3, with a checkpoint of step 1, of which nothing had arrived: what was
    learned from is learned from again."""
    first = Run(server, tmp_path).steps(1)
    first.source.arrived = lambda ahead: ahead
    saved = first.state(tmp_path / "state")
    first.steps(2).ended()
    assert sorted(file.stem for file in tmp_path.glob("journal/*.pt")) == [
        "000000",
        "000001",
        "000002",
    ]
    server.salt += 1
    asked = server.count("/v1/completions")
    again = Run(server, tmp_path, saved=saved).steps(2)
    again.source.idle()
    assert again.groups == first.groups[1:] and same(
        again.learner.state_dict(), first.learner.state_dict()
    )
    assert server.count("/v1/completions") == asked + 4  # those of the groups that were half-way
    again.steps(1).ended()
    other = Run(server, tmp_path / "anew", saved=saved)
    for _ in range(2):
        other.steps(1).state(tmp_path / "state")
    other.ended()
    assert other.groups != first.groups[1:]
    kept = {file.stem for file in tmp_path.glob("anew/journal/*.pt")}
    assert (
        "000001" not in kept and "000002" in kept
    )  # which the checkpoint before the newest one needs
    # With another rate the weights of version 2 are others: its groups are sampled again, and those
    # before it are not.
    changed = Run(server, tmp_path, words=["optimizer.lr=1e-3"], saved=saved).steps(3).ended()
    assert changed.groups[:2] == first.groups[1:] and changed.groups[2] != again.groups[2]


@pytest.mark.slow
def test_two_processes_use_a_server_in_turns(server, in_a_thread, tmp_path, same):  # noqa: F811
    """After each step the trainer plays the model of the start there, while groups are being
    sampled: neither gets the other's weights."""
    released = threading.Event()

    def hold(
        handler,
    ):  # the third step's groups are half-way when the trainer plays for the second time
        if handler.path == "/v1/completions" and server.count(handler.path) > 4 + 4 + 1 + 1:
            released.wait(0.5)

    def run(mode):
        own, played = Run(server, tmp_path / mode, mode, ["generation.max_new_tokens=24"]), []
        start = {
            name: value.clone() for name, value in own.learner.policy.model.state_dict().items()
        }

        def evaluated():
            model, engine = own.learner.policy.model, own.x.generation.engine
            now = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(start)
            played.append(
                collect(
                    own.learner.policy,
                    own.tasks[:1],
                    own.x.environment,
                    engine=engine,
                    seed=9,
                    max_new_tokens=6,
                )
            )
            model.load_state_dict(now)
            if len(played) == 2:
                released.set()

        return own.steps(3, evaluated).ended(), [timeless(rollouts) for rollouts in played]

    lag, others = run("lag")
    server.asked.clear()
    released.clear()
    server.holds = hold
    overlap, played = run("overlap")
    assert played == others == others[:1] * 3
    assert lag.groups == overlap.groups and same(
        lag.learner.state_dict(), overlap.learner.state_dict()
    )
