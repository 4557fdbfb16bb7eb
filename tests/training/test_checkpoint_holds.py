"""A checkpoint holds everything with an effect on the steps to come. A value that it lacked let a
killed run go on differently, without a word."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlkit.config.compose import compose, experiment
from rlkit.episodes.stream import StreamState
from rlkit.errors import DataError
from rlkit.rewards import Moments
from rlkit.system import owner, rng
from rlkit.system.owner import TakenOver, own_folder
from rlkit.training.ahead.flight import Flight, StepGroups
from rlkit.training.ahead.here import Here
from rlkit.training.callbacks.checkpoints import AtomicCheckpointIO
from rlkit.training.experiment import Reuse
from rlkit.training.learner import Learner
from rlkit.training.module import RLModule
from rlkit.training.reuse import with_reused
from rlkit.training.schedules import Progress
from rlkit.training.update import drift
from rlkit.types import Rollout, Step, Task

WORDS = [
    "trainer.threads=1",
    "trainer.accelerator=cpu",
    "evaluation.n=0",
    "logger=none",
    "reference=ema",
    "reference.decay=0.5",
    "kl/coef=adaptive",
    "task.max_samples=16",
]
TASKS = [Task(f"t/{i}", ({"role": "user", "content": "?"},)) for i in range(4)]
# Why a checkpoint does without an attribute of a learner.
MADE_ANEW = {
    "configured": "of the config",
    "experiment": "of the config",
    "phases": "of the config",
    "host": "of the process",
    "policy": "its weights are under state_dict",
    "model": "its weights are under state_dict",
    "critic": "its weights are under state_dict",
    "nets": "both of them",
    "x": "follows from the progress",
    "begun": "the next call of `begin` sets it",
    "metrics": "of the step that is done",
    "rollouts": "of the step that is done",
    "trained": "of the step that is done",
    "batch": "of the step that is done",
    "claims": "a proof begins anew, since the weights of earlier versions are gone",
    "clock": "of the step that is done",
}


def group(number: int, *rewards: float) -> list[Rollout]:
    step = Step((), (5, 6, 7), (8, 9, 10 + number), (-0.5,) * 3, "stop", versions=((0, 1),))
    return [
        Rollout(TASKS[number], (step,), group=number, sample=i, reward=reward)
        for i, reward in enumerate(rewards)
    ]


@pytest.fixture(scope="module")
def x():
    return experiment(compose(WORDS))


@pytest.fixture
def policy(tiny):
    """The tests move no weights of the shared model."""
    return tiny._replace(model=copy.deepcopy(tiny.model))


def collect_state(learner: Learner) -> dict:
    """What decides the steps to come, by attribute."""
    kept = learner.kept.references[""]
    return {
        "rl_step": learner.rl_step,
        "tokens": learner.tokens,
        "updates": learner.updates,
        "exact": learner.exact,
        "moments": learner.moments,
        "progress": learner.progress,
        "start": drift.pack_few(learner.start),
        "micro": learner.micro.halvings,
        "optimizers": [own.state_dict()["state"] for own in learner.optimizers.made],
        "optimizers.nonfinite": learner.optimizers.nonfinite,
        "kept": {name: weight.clone() for name, weight in kept.weights.items()},
    }


def moved(x, policy) -> Learner:
    """A learner of which no part is as at its start."""
    learner = Learner(x, policy, exact=True)
    learner.rl_step = 3
    learner.tokens = 1234
    learner.updates = {2: 5, 3: 7}
    learner.moments = Moments(8.0, 0.5, 2.0)
    coefs = {path: {"value": 0.7} for path in learner.progress.controllers}
    learner.progress = Progress(step=3, streak=2, controllers=coefs)
    batch = learner.record().assemble_batch(group(0, 0.0, 1.0))
    learner.start = drift.select_few(batch, torch.full(batch.ids.shape, -2.0))
    learner.micro.halvings = 2
    learner.optimizers.nonfinite = {0: 2}
    (optimizer,) = learner.optimizers.made
    for weight in optimizer.param_groups[0]["params"]:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    for weight in learner.kept.references[""].weights.values():
        weight.add_(1.0)
    return learner


def test_a_loaded_learner_is_the_saved_one_in_all_that_decides_the_steps_to_come(x, policy, tiny):
    first = moved(x, policy)
    fresh = Learner(x, tiny._replace(model=copy.deepcopy(tiny.model)), exact=False)
    saved, before = collect_state(first), collect_state(fresh)
    assert [name for name in saved if same(saved[name], before[name])] == []
    fresh.load_state_dict(first.state_dict())
    loaded = collect_state(fresh)
    assert [name for name in saved if not same(saved[name], loaded[name])] == []
    assert {name.partition(".")[0] for name in saved} | MADE_ANEW.keys() == vars(first).keys()


@pytest.mark.slow
def test_a_checkpoint_of_another_commit_is_refused_with_the_name_of_what_it_lacks(x, policy):
    """It ended in a KeyError."""
    state = moved(x, policy).state_dict()
    for name in state["rlkit"].keys() - {"teachers"}:  # the run has none
        lacking = {key: value for key, value in state["rlkit"].items() if key != name}
        with pytest.raises(DataError, match=rf"has no '{name}', so another commit"):
            Learner(x, policy, exact=True).load(state | {"rlkit": lacking})


def same(ours, theirs) -> bool:
    """Nested containers of tensors and plain values, bit for bit."""
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(own, theirs[k]) for k, own in ours.items())
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


def test_halved_micro_batches_stay_halved(x, policy):
    """They decide the order of a gradient's sums."""
    learner = Learner(x, policy, exact=True)
    learner.micro.halvings = 3
    assert learner.micro.limit == x.trainer.micro_batch_tokens // 8


@pytest.mark.parametrize("factor, halvings", [(1, 2), (0.5, 0), (2, 0)])
def test_halvings_are_of_the_setting_under_which_memory_ran_out(x, policy, factor, halvings):
    """A resume with a lower trainer.micro_batch_tokens halved the lower number twice more."""
    tokens = int(factor * x.trainer.micro_batch_tokens)
    other = x._replace(trainer=x.trainer._replace(micro_batch_tokens=tokens))
    resumed = Learner(other, policy, exact=True)
    resumed.load(moved(x, policy).state_dict())
    assert resumed.record().micro.limit == tokens >> halvings


def module_of(x, policy) -> RLModule:
    return RLModule(x, policy, TASKS, source=Here(x, TASKS))


def test_a_loaded_module_has_the_groups_to_learn_from_again_and_the_generators(x, policy):
    """Without the groups a killed run with task.reuse went on differently."""
    first, second = module_of(x, policy), module_of(x, policy)
    first.kept = with_reused(Reuse(9, 9), (), group(1, 0.0, 1.0), step=1, seed=0).kept
    checkpoint = {"state_dict": first.state_dict()}
    first.fill(checkpoint, [rng.state()])
    assert first.kept and checkpoint["rlkit"].keys() >= {"kept", "generators", "flight", "stream"}
    second.on_load_checkpoint(checkpoint)
    assert second.kept == first.kept and second.flight == Flight()
    assert [sorted(own) for own in second.generators] == [sorted(rng.state())]


def test_a_step_learns_from_the_groups_used_again_and_its_row_has_the_figures(x, policy):
    """A group of equal rewards gives way to the kept one."""
    own = x._replace(task=replace(x.task, reuse=Reuse(9, 9)))
    module = module_of(own, policy)
    module._trainer = SimpleNamespace(should_stop=False)
    module.kept = (tuple(group(1, 0.0, 1.0)),)
    flat = group(0, 0.0, 0.0)
    table = torch.tensor([[1.0, 1.0, 0.5, 1.0]])
    state = StreamState(sampler={"table": table})
    groups = StepGroups(0, 0, flat, flat, StreamState(), state, "")
    module.take_groups = lambda: (groups, {"staleness/wait_s": 1.0})
    trained = []
    module.learner.step = lambda sampled, own: trained.append((sampled, own))
    module.training_step(0, 0)
    ((sampled, learned),) = trained
    assert sampled == flat and [r.task.id for r in learned] == ["t/1", "t/1"]
    figures = {"staleness/wait_s": 1.0, "sampler/seen": 1.0, "reuse/groups": 1}
    assert figures.items() <= module.metrics.items()


def test_a_dropped_step_gives_back_the_draws_of_its_rollouts(x, policy):
    module = module_of(x, policy)
    with rng.keep_generators():
        module.before = rng.state()
        first = torch.rand(3)
        module.drop_step()
        assert torch.equal(torch.rand(3), first) and module.before is None


def test_a_checkpoint_is_not_put_in_place_once_another_process_owns_the_folder(
    tmp_path, monkeypatch
):
    """Writing may take minutes; the file must not stand beside those of the new owner."""
    path, real = tmp_path / "checkpoints" / "step_000001.ckpt", torch.save
    with own_folder(tmp_path):
        mine = json.loads((tmp_path / owner.NAME).read_text())

        def save(value, file):
            real(value, file)
            owner.claim(tmp_path, {**mine, "token": "theirs"}, takeover=True)

        monkeypatch.setattr(torch, "save", save)
        with pytest.raises(TakenOver):
            AtomicCheckpointIO().save_checkpoint({"weights": torch.zeros(3)}, path)
    assert list(path.parent.iterdir()) == []
