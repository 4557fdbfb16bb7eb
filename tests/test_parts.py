"""What a part gives: metrics of its own that no split changes, and a sentence where it gives
anything else than its place takes."""

from __future__ import annotations

import functools
import json
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import typed_parts
from minibatches import minibatches
from parametrise import each
from rlkit import functional as F
from rlkit.algorithm import KL, PARTS, Algorithm, Critic, call_part
from rlkit.config.compose import compose, conf_dir, experiment
from rlkit.config.schema import resolve
from rlkit.errors import ConfigError, PartError
from rlkit.models import pack
from rlkit.rewards import Reward, RewardError, Term, batched, score
from rlkit.training.metrics import UpdateTerms, update_metrics
from rlkit.training.references import ema, move_reference
from rlkit.training.update import drift
from rlkit.training.update.loss import loss_weights, surrogate, value_surrogate
from rlkit.training.update.sampled import filter_rollouts
from rlkit.training.update.split import move_to_device, select, split_into_micro_batches
from rlkit.training.update.weighted import weigh
from rlkit.types import Estimate, Measured, Rollout, Scored, Step, Task, TokenLogprobs

ROWS = torch.tensor(
    [0, 0, 0, 1, 2, 2, 3, 4, 5, 6, 6, 7]
)  # the rollout of each row; rollout 8 has no row


def make_batch() -> Scored:
    """12 rows of 9 rollouts of 3 prompts, of one width; one reward is unknown, and one row has no
    trained token."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(12, 9, generator=generator) < 0.6
    mask[:, 0], mask[:, 2], mask[4] = False, True, False
    logprobs = [
        -2 * torch.rand(12, 9, generator=generator, dtype=torch.float64) * mask for _ in range(4)
    ]
    return Scored(
        ids=torch.arange(12 * 9).view(12, 9),
        attention_mask=torch.ones_like(mask),
        response_mask=mask,
        sampled_mask=mask,
        rollout_ids=ROWS,
        step_ids=torch.arange(12 * 9).view(12, 9),
        rewards=torch.tensor([1, 0, 0.5, 1, 1, 1, 0, float("nan"), 1]).double(),
        group_ids=torch.tensor([5, 5, 5, 2, 2, 2, 9, 9, 9]),
        truncated=torch.arange(9) % 4 == 0,
        lengths=torch.zeros(9, dtype=torch.int64).index_add_(0, ROWS, mask.sum(1)),
        reply_lengths=torch.ones(9, dtype=torch.int64),
        token_rewards=logprobs[3] / 5,
        logprobs_sampler=logprobs[0],
        logprobs_old=logprobs[1],
        logprobs_ref=logprobs[2],
        values=torch.linspace(-1, 2, 12 * 9).view(12, 9).double(),
        versions=torch.arange(12 * 9).view(12, 9) % 3 * mask,
        components={"task": torch.arange(9.0) % 2},
        metadata=tuple({"level": i} for i in range(9)),
    )


def algorithm(**parts: Any) -> Algorithm:
    shipped = {
        "advantage": F.raw,
        "ratio": F.token_ratio,
        "policy_loss": F.clipped,
        "aggregation": F.token_mean,
        "group_filter": F.keep_all,
    }
    return Algorithm("test", **shipped | parts)


# --------------------------------------------------------------------------------- metrics of parts

SHIPPED: dict[str, Callable[..., Any]] = {
    "group_filter": F.keep_all,
    "overlong": F.keep_overlong,
    "correction": F.token_correction,
    "token_filter": F.every_token,
    "advantage": F.gae,
    "normalization": F.whiten,
    "aggregation": F.token_mean,
    "ratio": F.token_ratio,
    "policy_loss": F.clipped,
    "kl_estimator": F.k3,
    "value_loss": F.squared_error,
}


def with_metrics(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same part with a metric of each kind: of tokens, of rollouts, and a mean of its own over
    the tokens it was given."""

    @functools.wraps(function)
    def measured(**given: Any) -> Any:
        asked = {name: given[name] for name in inner}
        tokens = given["step_ids"].double() + given["logprobs_sampler"]
        mean = tokens[given["response_mask"]].mean()
        return function(**asked), {
            "tokens": tokens,
            "rollouts": given["rewards"] + given["lengths"],
            "own": mean,
        }

    import inspect

    signature = inspect.signature(function)
    inner = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    more = {"step_ids", "logprobs_sampler", "response_mask", "rewards", "lengths"} - set(inner)
    positional = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name in (*inner, *sorted(more))
    ]
    numbers = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    measured.__signature__ = inspect.Signature([*positional, *numbers])  # type: ignore[attr-defined]
    return measured


def built(parts: dict[str, Callable[..., Any]], **more: Any) -> tuple[Algorithm, Any]:
    own = {
        name: function
        for name, function in parts.items()
        if name not in ("kl_estimator", "value_loss")
    }
    kl = KL("k3", parts["kl_estimator"], coef=0.3)
    return algorithm(**own, critic=Critic("head", parts["value_loss"]), **more), kl


def updated(
    a: Algorithm, kl: Any, *, budget: int, seed: int = 0
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Gradients and metrics of a step's updates, cut as a module cuts them."""
    batch = weigh(filter_rollouts(make_batch(), a), a, kl)
    terms, gradients = UpdateTerms(), []
    for minibatch in minibatches(batch, a, seed=seed):
        leaf = (batch.logprobs_ref * 0.7 - 0.3).requires_grad_()
        for rows in split_into_micro_batches(minibatch, budget):
            one = select(minibatch, rows)
            mine = leaf[one.ids[:, 0] // 9]
            scores = TokenLogprobs(mine, torch.zeros_like(mine), values=mine * 2)
            loss, said = surrogate(one, scores, a, kl)
            value_loss, more = value_surrogate(one, scores, a.critic)
            (loss + value_loss).backward()
            terms.add(one, loss, scores, said | more, pack(one.ids, one.response_mask))
        gradients.append(leaf.grad)
    return gradients, update_metrics(batch, terms, SimpleNamespace(algorithm=a, kl=kl))  # type: ignore[arg-type]


MEASURING, PLAIN = (
    {name: change(f) for name, f in SHIPPED.items()} for change in (with_metrics, lambda f: f)
)
NAMES = {f"{name}/{kind}" for name in PARTS for kind in ("tokens", "rollouts", "own")}


def test_metrics_of_parts_are_the_same_for_every_split_and_every_order_of_minibatches():
    """Sums over tokens or rollouts only: micro-batches, the number of minibatches and their order
    leave no trace."""
    a, kl = built(MEASURING)
    _, whole = updated(a, kl, budget=10**6)
    found = {name: value for name, value in whole.items() if name in NAMES}
    assert found.keys() == NAMES
    for more, budget, seed in (
        ({}, 1, 0),
        ({}, 20, 0),
        ({"minibatches": 3}, 20, 1),
        ({"minibatches": 3, "epochs": 2}, 9, 2),
    ):
        _, got = updated(a._replace(**more), kl, budget=budget, seed=seed)
        for name, value in found.items():
            assert got[name] == pytest.approx(value, rel=1e-6), (
                name
            )  # sums of float32 in another order


def test_metrics_of_parts_are_means_over_what_counts():
    batch = make_batch()
    a, kl = built(MEASURING)
    _, row = updated(a, kl, budget=20)
    tokens = (torch.arange(12 * 9).view(12, 9).double() + batch.logprobs_sampler)[
        batch.response_mask
    ]
    for name in ("policy_loss/tokens", "policy_loss/own", "aggregation/own"):
        assert row[name] == pytest.approx(float(tokens.mean()), rel=1e-6)  # float32
    rollouts = (batch.rewards + batch.lengths)[:7]  # one cannot be scored, and one has no token
    assert (
        row["advantage/rollouts"]
        == row["ratio/rollouts"]
        == pytest.approx(float(rollouts.mean()), rel=1e-6)
    )


def test_a_group_filter_measures_what_it_drops_too():
    def fussy(rewards):
        return rewards > 0.6, {"rewards": rewards}

    batch = filter_rollouts(make_batch(), algorithm(group_filter=fussy))
    batch = weigh(batch, algorithm(advantage=F.raw))
    row = update_metrics(
        batch, UpdateTerms(), SimpleNamespace(algorithm=algorithm(), kl=KL("none"))
    )  # type: ignore[arg-type]
    assert row["group_filter/rewards"] == pytest.approx(
        4.5 / 7
    )  # not of the ones alone that were kept


def test_metrics_change_no_bit_of_a_gradient():
    for more in ({}, {"minibatches": 3, "epochs": 2}):
        with_, without = (updated(*built(parts, **more), budget=20) for parts in (MEASURING, PLAIN))
        assert len(with_[0]) == len(without[0]) and all(map(torch.equal, with_[0], without[0]))
        assert {
            name: value for name, value in with_[1].items() if name not in NAMES
        } == pytest.approx(without[1], rel=0, abs=0, nan_ok=True)


def test_a_metric_that_is_taken_or_is_no_number_is_refused():
    def ratio(logprobs, logprobs_old):
        return (logprobs - logprobs_old).exp(), {"mean": 1.0}

    with pytest.raises(PartError, match="ratio/mean, a metric of rlkit; give it another name"):
        updated(*built(PLAIN | {"ratio": ratio}), budget=20)
    for value, said in (
        (torch.zeros(5), r"shape \(5,\)"),
        ("high", r"'high' \(str\)"),
        (None, "None"),
    ):
        with pytest.raises(
            PartError,
            match=(
                rf"algorithm.ratio .*metric 'mine' is {said}; give a number, or a tensor of shape"
                r" \[N\] or"
            ),
        ):
            call_part("ratio", lambda logprobs, value=value: (logprobs, {"mine": value}), given())


# ------------------------------------------------------------------------------------- wrong values


def given() -> dict[str, Any]:
    batch = make_batch()
    return batch.quantities | {
        "logprobs": batch.logprobs_old,
        "ratio": batch.logprobs_old.exp(),
        "advantages": batch.logprobs_old,
    }


def returning(value: Any) -> Callable[..., Any]:
    def mine(rewards):
        return value

    return mine


TOKENS, ROLLOUTS = torch.zeros(12, 9), torch.zeros(9)
BAD = {
    "a mean": (
        "policy_loss",
        TOKENS.mean(),
        r"gave shape \(\), expected \[B, T\] = \(12, 9\) floating point",
    ),
    "rows": ("policy_loss", torch.zeros(12), r"gave shape \(12,\), expected \[B, T\]"),
    "none": ("ratio", None, r"gave None, expected \[B, T\]"),
    "a float": ("aggregation", 0.5, r"gave 0.5 \(float\), expected"),
    "bools": (
        "correction",
        TOKENS > 0,
        r"gave torch.bool, expected \[B, T\] = \(12, 9\) floating point",
    ),
    "numbers": ("group_filter", ROLLOUTS, r"gave torch.float32, expected \[N\] = \(9,\) bool"),
    "a pair": ("policy_loss", (TOKENS, TOKENS), r"gave a tuple of 2, expected \[B, T\]"),
    "three": (
        "overlong",
        (ROLLOUTS, ROLLOUTS > 0, {"x": 1.0}),
        r"gave a tuple of 3, expected \[N\] = .* floating point, and \[N\]",
    ),
    "one of two": ("overlong", ROLLOUTS, "gave one tensor, expected"),
    "swapped": ("overlong", (ROLLOUTS > 0, ROLLOUTS), "gave torch.bool, expected"),
    "an estimate": ("normalization", Estimate(TOKENS, TOKENS), "gave a tuple of 2"),
    "half an estimate": ("advantage", Estimate(TOKENS, None), "gave None, expected"),  # type: ignore[arg-type]
    "metrics alone": ("kl_estimator", {"x": 1.0}, r"gave \{'x': 1.0\} \(dict\)"),
    "elsewhere": (
        "value_loss",
        torch.zeros(12, 9, device="meta"),
        "gave a tensor on meta, where the batch is on cpu",
    ),
}


@each("name, value, said", BAD.values(), ids=BAD)
def test_a_wrong_value_is_named_by_part_function_and_what_was_expected(name, value, said):
    path, protocol, _ = PARTS[name]
    with pytest.raises(PartError, match=said) as caught:
        call_part(name, functools.partial(returning(value)), given())
    assert str(caught.value).startswith(f"{path} ({__name__}.returning.<locals>.mine): gave ")
    assert str(caught.value).endswith(f"{protocol.__name__}: {protocol.__doc__.splitlines()[0]}")


def test_every_place_of_an_algorithm_is_checked_in_the_words_of_its_protocol():
    places = {
        f"algorithm.{name}" for name in algorithm(critic=Critic("head", F.squared_error)).parts
    } | {"kl.estimator"}
    assert {path for path, *_ in PARTS.values()} == places
    for path, protocol, wanted in PARTS.values():
        assert all(
            size in protocol.__doc__
            for spec in wanted
            for size in spec.removesuffix(" bool").split(" or ")
        ), path


def test_metrics_may_stand_beside_every_kind_of_value():
    for name, value in {
        "overlong": (ROLLOUTS, ROLLOUTS > 0),
        "advantage": Estimate(TOKENS, TOKENS),
        "ratio": TOKENS,
    }.items():
        for pair in ((value, {"x": 1}), Measured(value, {"x": 1})):
            got, metrics = call_part(name, returning(pair), given())
            assert got is value and list(metrics) == [f"{name}/x"]


def test_a_quantity_that_is_not_there_yet_is_named():
    with pytest.raises(
        PartError,
        match=r"algorithm.group_filter \(.*\): asks for 'advantages', which does not exist",
    ):
        filter_rollouts(make_batch(), algorithm(group_filter=lambda advantages: advantages > 0))


@pytest.mark.parametrize(
    "of, said",
    [
        (lambda c, m: c["rihgt"], "there is no reward term 'rihgt'. Did you mean 'right'"),
        (lambda c, m: m[0]["level"], "^'level'$"),
        (lambda c, m: {}.pop(*[]), "expected"),
    ],
    ids=["a term", "a field of the row", "an error of its own"],
)
def test_only_a_missing_term_is_called_a_missing_term(of, said):
    """A KeyError of the part's own code is not about the components."""

    def part(rewards, components, metadata):
        return rewards * 0 + of(components, metadata)

    extra = {"components": {"right": ROLLOUTS}, "metadata": tuple({} for _ in ROLLOUTS)}
    with pytest.raises((PartError, KeyError, TypeError), match=said):
        call_part("advantage", part, {**given(), **extra})


# ----------------------------------------------------------------------------------- new quantities


def composed(tmp_path, monkeypatch, source: str, *overrides: str):
    """An experiment with functions of a module of the user's own, `own`."""
    (tmp_path / "own.py").write_text(
        "import torch\nfrom rlkit.types import Measured\n" + textwrap.dedent(source)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own", None)
    resolve.cache_clear()
    return experiment(
        compose(
            ["debug=fast", "trainer.accelerator=cpu", "logger=none", "evaluation.n=0", *overrides]
        )
    )


OWN = "algorithm.advantage={_target_: own.mine, _partial_: true}"


@pytest.mark.parametrize(
    "body, said",
    [
        (
            "mine(component, rewards): return rewards",
            "algorithm.advantage: asks for a quantity 'component'.*Did you mean 'components'",
        ),
        (
            "mine(components): return components['tasc']",
            r"algorithm.advantage \(own.mine\): .* term 'tasc'. Did you mean 'task'",
        ),
        (
            "mine(rewards): return rewards.mean()",
            r"algorithm.advantage \(own.mine\): gave shape \(\), expected \[N\] = ",
        ),
        ("mine(rewards): return rewards / 0", "advantage gave nan or inf"),
    ],
)
def test_what_a_part_asks_for_and_gives_is_checked_before_a_model_is_loaded(
    body, said, tmp_path, monkeypatch
):
    with pytest.raises(ConfigError, match=said):
        composed(tmp_path, monkeypatch, f"def {body}", OWN)


def test_a_part_that_reads_metadata_is_composed_without_rows(tmp_path, monkeypatch):
    source = (
        "def mine(rewards, metadata): return rewards * torch.tensor([float(row['level']) for row in"
        " metadata])"
    )
    assert composed(tmp_path, monkeypatch, source, OWN).algorithm.advantage.func.__name__ == "mine"


def test_what_is_no_tensor_survives_selection_and_moves_and_a_checkpoint_is_spared_it():
    batch = loss_weights(weigh(make_batch(), algorithm()), algorithm())
    batch = replace(batch, metadata=({"made": object()},) * 9)
    one = select(batch, torch.tensor([3, 4]))
    assert (
        one.metadata is batch.metadata
        and one.components is batch.components
        and one.versions.shape[0] == 2
    )
    there = move_to_device(one, torch.device("meta"))
    assert there.metadata is batch.metadata and {
        t.device.type for t in (there.versions, *there.components.values())
    } == {"meta"}
    kept = drift.pack_few(drift.select_few(batch, batch.logprobs_old))
    assert all(torch.is_tensor(value) for value in (*kept["batch"].values(), kept["logprobs"]))


# --------------------------------------------------------------------------- rewards and references

ROLLOUT = Rollout(
    Task("row/0", ()), (Step((), (1,), (2,), (0.0,), "stop"),), metadata={"a": 0.25, "kept": 1}
)


def scored(aggregator: Any, count: int = 2) -> list[Rollout]:
    return score(
        [ROLLOUT] * count, Reward("test", {"a": Term(1.0, lambda r: r.metadata["a"])}, aggregator)
    )


def test_an_aggregator_may_measure_one_rollout_or_all():
    [one, _] = scored(lambda scores, weights: (scores["a"] * 2, {"doubled": 2}))
    assert one.reward == 0.5 and one.metadata == {"a": 0.25, "kept": 1}
    assert one.metrics == {"aggregator/doubled": 2.0}
    many = scored(batched(lambda rollouts, weights: ([0.1, 0.2], {"each": [3.0, 4.0], "all": 5.0})))
    assert [r.metrics for r in many] == [
        {"aggregator/each": 3.0, "aggregator/all": 5.0},
        {"aggregator/each": 4.0, "aggregator/all": 5.0},
    ]


@pytest.mark.parametrize(
    "value, said",
    [
        (None, None),
        ("x", "'x'"),
        ((1.0, {"m": "x"}), "'x'"),
        (torch.ones(2), "tensor"),
        ((1.0, 2.0), r"\(1.0, 2.0\)"),
    ],
)
def test_an_aggregator_that_gives_no_reward_is_named(value, said):
    def mine(scores, weights):
        return value

    if said is None:
        assert scored(mine)[0].reward is None
        return
    with pytest.raises(
        RewardError,
        match=(
            rf"reward aggregator \(.*test_parts.*mine\) returned no reward on task 'row/0': {said}"
        ),
    ):
        scored(mine)


def test_a_reference_whose_update_forgets_its_state_is_named_and_a_pair_is_a_state():
    reference = ema(decay=0.5)
    with pytest.raises(
        PartError, match=r"reference.update \(.*test_parts.*\): gave None, expected the state"
    ):
        move_reference(
            reference._replace(update=lambda state, policy, **_: None),
            "state",
            torch.nn.Linear(1, 1),
            step=1,
            kl=0.0,
        )
    pair = ("weights", {"n": 1})
    for given, want in (
        (pair, (pair, {})),
        (Measured(pair, {"n": 1}), (pair, {"reference/n": 1.0})),
    ):
        assert (
            move_reference(
                reference._replace(update=lambda *_, given=given, **__: given),
                pair,
                torch.nn.Linear(1, 1),
                step=1,
                kl=0.0,
            )
            == want
        )


# -------------------------------------------------------------------------------------------- a run


@pytest.mark.slow
def test_metrics_of_parts_reach_the_row_of_a_run(tmp_path):
    from rlkit.config.problems.rows import load_tasks
    from rlkit.training.run import train_in

    def advantage(rewards, components, metadata, versions, rollout_ids):
        assert (
            len(metadata) == len(rewards)
            and versions.shape[0] == len(rollout_ids)
            and metadata[0]["level"] == 2
        )
        return rewards * 0 + torch.arange(len(rewards)), {
            "task": components["task"],
            "versions": versions,
            "one": 1,
        }

    def loss(ratio, advantages, components):
        return -ratio * advantages, {"ratio": ratio, "components": float(len(components))}

    short = ["logger=none", "evaluation.n=0", "generation.max_new_tokens=32", "task.max_samples=32"]
    x = experiment(
        compose(["debug=fast", "trainer.accelerator=cpu", *short, "kl=none", "reference=none"])
    )
    x = x._replace(
        algorithm=x.algorithm._replace(advantage=advantage, policy_loss=loss, minibatches=2),
        reward=x.reward._replace(
            aggregator=lambda scores, weights: (sum(scores.values()), {"terms": len(scores)})
        ),
    )
    tasks = load_tasks(x)
    tasks = tasks._replace(train=[task._replace(metadata={"level": 2}) for task in tasks.train])
    train_in(x, tasks, tmp_path / "run", started=0.0, resume=None)
    rows = [
        r
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        if "optim/lr" in (r := json.loads(line))
    ]
    assert len(rows) == 2
    for row in rows:
        assert (
            row["advantage/task"] == pytest.approx(row["reward/task/mean"])
            and row["advantage/one"] == row["aggregator/terms"] == 1
        )
        assert (
            row["policy_loss/ratio"] == pytest.approx(row["ratio/mean"])
            and row["policy_loss/components"] == 1
        )
        assert row["advantage/versions"] == row["step"] - 1


# -------------------------------------------------------------------------------------------- types


def test_every_option_of_conf_is_under_its_protocol():
    """What mypy reads in tests/typed_parts.py is all there is."""
    known = {f for entry in vars(typed_parts).values() if isinstance(entry, tuple) for f in entry}
    places = {
        path.split(".")[1] for path, *_ in PARTS.values() if path.startswith("algorithm.")
    } - {"critic"}
    files = [
        f for f in (conf_dir() / "algorithm").glob("*/*.yaml") if f.parent.name in places
    ] + list((conf_dir() / "kl").glob("*.yaml"))
    nodes = [yaml.safe_load(f.read_text()) or {} for f in files]
    nodes += [node["estimator"] for node in nodes if isinstance(node.get("estimator"), dict)]
    targets = {node.get("_target_") for node in nodes}
    functions = {
        resolve(target) for target in targets if target and target.startswith("rlkit.functional")
    }
    assert len(functions) > 20 and functions <= known
