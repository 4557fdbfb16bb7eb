"""Arguments of the wrong shape, type or size: a function of the notebooks computes, or says which
argument is what in a ValueError or a TypeError, never in a raw error of torch."""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import Any

import pytest
import torch

import rlkit.functional as functional
from rlkit import notebook
from rlkit.extras.notebook.arguments import explain_arguments

B, T, N, V = 4, 6, 3, 5
TOKENS = torch.linspace(-2, -0.1, B * T).view(B, T)
MASK = torch.arange(T).expand(B, T) >= 2
LOGITS = torch.linspace(-1, 1, B * T * V).view(B, T, V)
IDS = torch.arange(B * T).view(B, T) % V
ROLLOUTS = torch.tensor([0, 1, 2, 2])
STEPS = torch.zeros(B, T, dtype=torch.int64)
PLACES = functional.episode_positions(ROLLOUTS, STEPS, MASK)
HEAD = torch.nn.Linear(V, V)
VALUES: dict[str, Any] = {  # of parameters by their names; every other one is [B, T]
    "rewards": torch.tensor([0.0, 1.0, 1.0]),
    "greedy_rewards": torch.tensor([0.0, 1.0, 1.0]),
    "group_ids": torch.tensor([0, 0, 1]),
    "lengths": torch.tensor([3, 4, 8]),
    "reply_lengths": torch.tensor([3, 4, 8]),
    "truncated": torch.tensor([False, True, False]),
    "rollout_ids": ROLLOUTS,
    "step_ids": STEPS,
    "response_mask": MASK,
    "mask": MASK,
    "components": {"a": torch.tensor([0.0, 1.0, 1.0])},
    "logits": LOGITS,
    "log_probs": LOGITS.log_softmax(-1),
    "logq": LOGITS.log_softmax(-1),
    "logp": LOGITS.log_softmax(-1),
    "probabilities": LOGITS.softmax(-1)[0],
    "seeds": torch.arange(T),
    "counter": 3,
    "vocabulary": V,
    "ids": IDS,
    "hidden": LOGITS,
    "lm_head": HEAD,
    "student": (LOGITS, HEAD),
    "teacher": (LOGITS, HEAD),
    "fill": 0.0,
    "pairs": torch.zeros(N, N),
    "chunk_size": 4,
    "constant": 7.0,
    "limit": 8.0,
    "divergence": functional.kl_student_teacher,
    "parts": {"a": functional.no_correction},
}
WRONG = {
    "one dimension less": lambda t: t[0] if t.ndim else t,
    "one dimension more": lambda t: t[None].expand(2, *t.shape),
    "another length": lambda t: t[..., :-1],
    "more rows": lambda t: torch.cat([t, t]),
    "empty": lambda t: t[:0],
    "a number": lambda t: torch.tensor(1, dtype=t.dtype),
    "complex": lambda t: t.to(torch.complex64),
    "booleans": lambda t: t.bool(),
    "fractions": lambda t: t.double() + 0.5,
    "a list": lambda t: t.tolist(),
    "None": lambda t: None,
    "a text": lambda t: "rewards",
}


def arguments_of(function) -> dict[str, Any]:
    """Right arguments, except for parameters with a default."""
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            found[name] = VALUES.get(name, TOKENS)
    if "positions" in found:
        found["positions"], found["mask"] = PLACES
        if "like" in found:
            found["values"] = torch.zeros(PLACES[1].shape)
    return found


def check(call, given: dict[str, Any]) -> str:
    """What the call says that is no sentence about its arguments; empty if it computes."""
    try:
        call()
    except (ValueError, TypeError) as error:
        named = any(re.search(rf"\b{name}\b", str(error)) for name in given)
        return "" if named else f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


FUNCTIONS = """
compute_advantages compute_dapo_loss compute_policy_gradient_loss compute_ppo_loss
compute_forward_kl compute_kl compute_reverse_kl truncated_kl
compute_advantages_and_returns compute_kl_divergence compute_value_loss
"""


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch casts with one
@pytest.mark.parametrize("name", FUNCTIONS.split())
def test_wrong_arguments_are_computed_with_or_named(name):
    function = getattr(notebook, name)
    given = arguments_of(function)
    said = {}
    for parameter, value in given.items():
        if isinstance(value, torch.Tensor):
            for kind, damage in WRONG.items():
                wrong = given | {parameter: damage(value)}
                said[parameter, kind] = check(partial(function, **wrong), given)
    assert not {key: text for key, text in said.items() if text}


def test_an_error_of_the_users_own_code_or_of_memory_passes_as_it_is():
    def own(values):
        raise RuntimeError("mine")

    def grows(values):
        return torch.empty(1 << 60)

    for function, text in ((own, "mine"), (grows, "alloc")):
        with pytest.raises(RuntimeError, match=text):
            explain_arguments(function)(TOKENS)
