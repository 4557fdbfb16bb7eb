"""Laws of the whole loss, over a table of policy losses, KLs and aggregations; and the shape of the
package itself.

A new option is tested by adding a row to its table; the last tests fail where a public function
stands in no table.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rlkit.functional as functional
from parametrise import AGGREGATIONS, KLS, POLICY_LOSSES, combinations, each
from rlkit import types
from rlkit.functional import fill_masked, token_ratio

# Called with quantities by name: all of these modules, and these of a module with helpers besides.
PARTS = [
    "advantages",
    "aggregation",
    "corrections",
    "filters",
    "kl",
    "normalization",
    "overlong",
    "pairs.all_pairs",
    "pairs.best_worst",
    "pairs.pairwise",
    "policy_losses",
    "ratios",
    "value_losses",
]
PLAIN = {"statistics"}  # figures on Python numbers: no tensors, imported from their module
MODULES = {
    m.name: importlib.import_module(f"rlkit.functional.{m.name}")
    for m in pkgutil.iter_modules(functional.__path__)
}
PUBLIC = {
    f"{module}.{name}": f
    for module, m in MODULES.items()
    for name, f in inspect.getmembers(m, inspect.isfunction)
    if f.__module__ == m.__name__
    and not name.startswith("_")
    and not module.startswith("_")
    and module not in PLAIN
}

SOURCES = (Path(__file__).parents[2] / "docs" / "sources.md").read_text()
TABLE = combinations(POLICY_LOSSES, KLS, AGGREGATIONS, slow=60)  # a sum of terms, then a weight


def _batch(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """10 rows of 8 positions, 7 rollouts, 3 prompts; log-ratios of order 1, so that the clip binds
    on part of them."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(10, 8, generator=generator) < 0.5
    mask[4] = False
    rollouts = torch.tensor([0, 1, 2, 3, 4, 5, 6, 0, 0, 3])
    tokens = {
        name: -3 * torch.rand(10, 8, generator=generator, dtype=torch.float64).to(dtype)
        for name in ("logprobs", "logprobs_old", "logprobs_ref", "full_kl")
    }
    advantages = (
        torch.randn(7, generator=generator, dtype=torch.float64)
        .to(dtype)[rollouts]
        .unsqueeze(-1)
        .expand(10, 8)
    )
    tokens["logprobs_sampler"] = (
        tokens["logprobs_old"] + 0.1
    )  # so near that VESPO's weight is not 0
    tokens["covariance_rank"] = torch.rand(10, 8, generator=generator, dtype=torch.float64).to(
        dtype
    )
    groups = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    return tokens | {
        "advantages": advantages,
        "response_mask": mask,
        "rollout_ids": rollouts,
        "group_ids": groups,
    }


def _inject(part: Callable[..., Tensor], quantities: Mapping[str, Tensor]) -> Tensor:
    return part(
        **{
            name: quantities[name]
            for name in inspect.signature(part).parameters
            if name in quantities
        }
    )


def _loss(names: tuple[str, str, str], batch: Mapping[str, Tensor], weights: Tensor) -> Tensor:
    """The loss as a caller writes it: fill under the mask, then ratio, then the parts, then Σ
    weights × loss."""
    mask = batch["response_mask"]
    filled = {
        k: fill_masked(v, mask, 0.0) if v.is_floating_point() else v for k, v in batch.items()
    }
    filled["ratio"] = token_ratio(batch["logprobs"], batch["logprobs_old"], mask)
    per_token = _inject(POLICY_LOSSES[names[0]], filled) + 0.3 * filled["ratio"] * _inject(
        KLS[names[1]], filled
    )
    return (weights * per_token).sum()


def _value_and_gradient(
    names: tuple[str, str, str], batch: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    leaf = batch["logprobs"].clone().requires_grad_()
    loss = _loss(names, batch | {"logprobs": leaf}, _inject(AGGREGATIONS[names[2]], batch))
    loss.backward()
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("names", TABLE, ids="-".join)
def test_garbage_under_the_mask_changes_no_bit(names: tuple[str, str, str]) -> None:
    clean = _batch()
    value, gradient = _value_and_gradient(names, clean)
    assert gradient[~clean["response_mask"]].count_nonzero() == 0
    for garbage in (float("nan"), float("inf"), -float("inf"), 1e4, -1e300):
        dirty = {
            k: v.where(clean["response_mask"], garbage) if v.is_floating_point() else v
            for k, v in clean.items()
        }
        got, got_gradient = _value_and_gradient(names, dirty)
        assert torch.equal(got, value)
        assert torch.equal(got_gradient, gradient)


@pytest.mark.parametrize("names", TABLE, ids="-".join)
def test_no_split_into_micro_batches_changes_the_gradient(names: tuple[str, str, str]) -> None:
    """Weights come from the whole update batch; after that everything is a sum. Norm-relative, as
    float rounding is."""
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        batch = _batch(dtype)
        weights = _inject(AGGREGATIONS[names[2]], batch)
        _, whole = _value_and_gradient(names, batch)
        generator = torch.Generator().manual_seed(1)
        splits = [torch.randperm(10, generator=generator).split(size) for size in (1, 3, 4)]
        if (
            "rollout_ids" in inspect.signature(POLICY_LOSSES[names[0]]).parameters
        ):  # of whole rollouts, as micro_batches splits
            order = torch.randperm(7, generator=generator)
            splits = [
                [
                    torch.isin(batch["rollout_ids"], part).nonzero()[:, 0]
                    for part in order.split(size)
                ]
                for size in (1, 3, 4)
            ]
        for split in splits:
            leaf = batch["logprobs"].clone().requires_grad_()
            for rows in split:
                part = {
                    k: v[rows] for k, v in (batch | {"logprobs": leaf}).items() if k != "group_ids"
                }
                _loss(names, part, weights[rows]).backward()
            assert (leaf.grad - whole).norm() <= tolerance * whole.norm()
        assert whole.norm() > 0


@pytest.mark.parametrize("names", TABLE, ids="-".join)
def test_padding_changes_no_bit_of_the_gradient(names: tuple[str, str, str]) -> None:
    batch = _batch()
    _, gradient = _value_and_gradient(names, batch)
    wide = {k: torch.nn.functional.pad(v, (0, 6)) if v.dim() == 2 else v for k, v in batch.items()}
    _, padded = _value_and_gradient(names, wide)
    assert torch.equal(padded, torch.nn.functional.pad(gradient, (0, 6)))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_gradient_follows_the_advantage(name: str) -> None:
    """A step against the gradient raises the log-prob where the advantage is positive, and lowers
    it where negative."""
    logprobs = torch.full((2, 1), -1.0, requires_grad=True)
    batch = {
        "logprobs": logprobs,
        "logprobs_old": logprobs.detach(),
        "advantages": torch.tensor([[1.5], [-1.5]]),
    }
    batch |= {"response_mask": torch.ones(2, 1, dtype=torch.bool), "rollout_ids": torch.arange(2)}
    batch |= {"logprobs_sampler": logprobs.detach(), "covariance_rank": torch.zeros(2, 1)}
    batch["ratio"] = token_ratio(logprobs, logprobs.detach(), batch["response_mask"])
    _inject(POLICY_LOSSES[name], batch).sum().backward()
    assert (-logprobs.grad * batch["advantages"] > 0).all()


def test_every_public_function_is_exported_once() -> None:
    exported = [getattr(functional, name) for name in functional.__all__]
    assert {id(f) for f in exported} == {id(f) for f in PUBLIC.values()}
    assert len(functional.__all__) == len(set(functional.__all__)) == len(PUBLIC)


def test_every_option_stands_in_a_table() -> None:
    """An option that is in no table is tested by no law."""
    tables = {"policy_losses": POLICY_LOSSES, "kl": KLS, "aggregation": AGGREGATIONS}
    for module, table in tables.items():
        assert {name.split()[0] for name in table} == {
            name.split(".")[1] for name in PUBLIC if name.startswith(f"{module}.")
        }


@each("name", [n for n in PUBLIC if n in PARTS or n.split(".")[0] in PARTS])
def test_parameters_are_quantities_or_keywords(name: str) -> None:
    """Parts are called by name: a positional parameter that is no quantity could never be filled
    in."""
    for parameter in inspect.signature(PUBLIC[name]).parameters.values():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            assert parameter.name in types.QUANTITIES
            assert parameter.default is parameter.empty


@each("name", PUBLIC)
def test_docstrings_are_complete(name: str) -> None:
    doc = inspect.getdoc(PUBLIC[name]) or ""
    for section in ("Args:", "Returns:", ">>> "):
        assert section in doc
    if name.split(".")[0] != "masking":
        assert "Source:" in doc
        assert f"`{name.split('.')[1]}`" in SOURCES
    if "require(" in inspect.getsource(PUBLIC[name]):
        assert "Raises:" in doc
    assert all(f"{p}" in doc for p in inspect.signature(PUBLIC[name]).parameters)


@each("name", PUBLIC)
def test_bodies_are_short(name: str) -> None:
    source, doc = inspect.getsource(PUBLIC[name]), PUBLIC[name].__doc__ or ""
    assert len(source.splitlines()) - len(doc.splitlines()) <= 60
