"""Reference policies: the frozen one never moves, under LoRA it costs no second copy, and none scores nothing."""

from __future__ import annotations

import copy

import pytest
import torch

from rlkit import reference
from rlkit.models import LoRA, score
from rlkit.models.load import add_lora

IDS = torch.tensor([[20, 21, 22, 23, 24], [30, 31, 32, 33, 34]])
MASK = torch.tensor([[False, False, True, True, True], [False, True, True, False, True]])


def scores(model):
    with torch.no_grad():
        return score(model, IDS, MASK)[0]


def reference_scores(kept, state, model):
    with kept.model(state, model) as scored:
        return score(scored, IDS, MASK)[0]


def train_one_step(model):
    """One large step, so that the policy surely moves."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    score(model, IDS, MASK)[0].sum().backward()
    optimizer.step()


@pytest.fixture
def model(tiny):
    return copy.deepcopy(tiny.model)


def test_frozen_does_not_move_when_the_policy_does(model):
    start = scores(model)
    kept = reference.frozen()
    state = kept.init(model)
    train_one_step(model)
    state = kept.update(state, model, step=1, kl=0.1)
    assert not torch.equal(scores(model), start)
    assert torch.equal(reference_scores(kept, state, model), start)


def test_frozen_shares_no_memory_with_the_policy_and_takes_no_gradient(model):
    state = reference.frozen().init(model)
    policy = {p.data_ptr() for p in model.parameters()}
    assert not policy & {p.data_ptr() for p in state.parameters()}
    assert not any(p.requires_grad for p in state.parameters()) and all(p.requires_grad for p in model.parameters())
    assert not state.training


@pytest.mark.parametrize("lora", [False, True])
def test_scoring_with_the_reference_builds_no_graph(model, lora):
    """With the adapter off no weight that it uses is trained, but hooks and shared heads may be: nothing is recorded at all."""
    policy = add_lora(model, LoRA(rank=2)) if lora else model
    kept = reference.frozen()
    with kept.model(kept.init(policy), policy):
        assert not torch.is_grad_enabled()
    assert not reference_scores(kept, kept.init(policy), policy).requires_grad
    assert torch.is_grad_enabled()


def test_under_lora_nothing_is_copied_and_the_base_is_scored(model):
    """The state is None: the reference is the policy with its adapter off, even after the adapter has been trained."""
    start = scores(model)
    policy = add_lora(model, LoRA(rank=2))
    kept = reference.frozen()
    state = kept.init(policy)
    assert state is None
    for _ in range(2):  # the first step only moves the half of an adapter that starts at 0
        train_one_step(policy)
    assert not torch.equal(scores(policy), start)
    assert torch.equal(reference_scores(kept, kept.update(state, policy, step=1, kl=None), policy), start)


def test_under_lora_the_adapter_is_on_again_afterwards(model):
    """Also where scoring fails: otherwise the rest of the run samples from the base."""
    policy = add_lora(model, LoRA(rank=2))
    for _ in range(2):
        train_one_step(policy)
    trained, kept = scores(policy), reference.frozen()
    reference_scores(kept, None, policy)
    assert torch.equal(scores(policy), trained)
    with pytest.raises(RuntimeError, match="out of memory"), kept.model(None, policy):
        raise RuntimeError("out of memory")
    assert torch.equal(scores(policy), trained) and torch.is_grad_enabled()


def test_none_keeps_nothing_and_refuses_to_score(model):
    nothing = reference.none()
    state = nothing.init(model)
    assert state is None and nothing.update(state, model, step=1, kl=None) is None
    with pytest.raises(ValueError, match=r"reference.*none.*reference=frozen"), nothing.model(state, model):
        pass


@pytest.mark.parametrize("kept", [reference.none(), reference.frozen()], ids=lambda r: r.name)
def test_the_name_is_that_of_the_option(kept):
    """compose tells `reference=none` by its name."""
    assert getattr(reference, kept.name)() == kept or kept.name == getattr(reference, kept.name)().name
