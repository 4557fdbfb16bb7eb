"""A config is refused with all its problems, their paths and remedies, before anything heavy is
imported; else it is built."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

import parametrise
from parametrise import cases, combinations, presets
from rlkit.algorithm import list_inputs
from rlkit.config.compose import compose, conf_dir, experiment
from rlkit.config.problems.doubts import list_warnings
from rlkit.config.schema import build, check
from rlkit.errors import ConfigError
from rlkit.functional import forward, k2, k3
from rlkit.training.experiment import describe_kl
from rlkit.training.run import format_first_line
from rlkit.training.schedules import Progress, list_phases, list_values, resolve_schedules, start
from rlkit.types import Controller

GROUPS = sorted(
    f.name for f in conf_dir().iterdir() if f.is_dir() and f.name not in ("experiment", "debug")
)
REQUIRED = {
    "task=jsonl": ["task.path=rows.jsonl"],
    "reference=none": ["kl=none"],
    "model=pretrained": ["model.path=any"],
    "task=harbor": ["task.path=any"],
    "task=verifiers": ["task.id=any"],
    "task=reasoning_gym": ["task.dataset=countdown"],
    "task=conversations": ["task.path=rows.jsonl"],
    "experiment=sft": ["task.path=rows.jsonl"],
    "environment=gymnasium": [
        "environment.make._target_=rlkit.sandbox.Sandbox"
    ],  # any callable: nothing is played
    "environment=gymnasium_vector": ["environment.make._target_=rlkit.sandbox.Sandbox"],
    "environment=two_players": ["environment.make._target_=rlkit.sandbox.Sandbox"],
    "environment=program": ["environment.command=[python]"],
    "environment=mcp": ["environment.servers={mine:[python]}"],
    "environment/parse_calls=hermes": ["environment=tool_use"],
    "environment/parse_calls=xml": ["environment=tool_use"],
    "generation=vllm": [
        "generation.engine.addresses=[http://localhost:8000]"
    ],  # vLLM in this process is not installed everywhere
    "teacher=path": ["teacher.path=any"],
    "teacher=vllm": ["teacher.addresses=[http://127.0.0.1:8000]"],
    "reward=judge": [
        "reward.terms.judge.fn.address=http://localhost:8000/v1",
        "reward.terms.judge.fn.model=any",
    ],
    "generation=notebook": [
        "generation.top_p=1",
        "generation.top_k=0",
    ],  # training refuses a cut distribution
}


def options(group: str) -> list[str]:
    return [f"{group}={name}" for name in parametrise.options(group)]


def nested_options(group: str) -> list[str]:
    files = [f.relative_to(conf_dir()) for f in (conf_dir() / group).glob("*/**/*.yaml")]
    words = sorted(f"{f.parent.as_posix()}={f.stem}" for f in files)
    return [word for word in words if parametrise.available(word)]


# Algorithms, their parts and KLs are built and dry-run in test_catalogue.py, which holds them to
# their laws too.
@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    cases(
        [o for g in GROUPS for o in options(g) + nested_options(g) if g not in ("algorithm", "kl")],
        4,
    ),
)
def test_every_option_composes_builds_and_dry_runs(option):
    if option == "optimizer=adamw_8bit":
        pytest.importorskip("bitsandbytes")
    if option == "environment=mcp":
        pytest.skip("its servers are asked for their tools; tests/extras/programs/test_mcp.py does")
    experiment(compose([option, *REQUIRED.get(option, [])]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", cases([f"experiment={name}" for name in presets()] + options("debug"), 2)
)
def test_every_preset_composes_builds_and_dry_runs(option):
    experiment(compose([option, *REQUIRED.get(option, [])]))


PAPER_NUMBERS = {  # what the papers give, so that no default of ours takes its place unseen
    "grpo": {
        "batch.prompts": 16,
        "batch.group_size": 64,
        "kl.coef": 0.04,
        "optimizer.lr": 1e-6,
        "generation.max_new_tokens": 1024,
    },
    "dr_grpo": {
        "batch.group_size": 8,
        "generation.max_new_tokens": 3000,
        "algorithm.aggregation.constant": 3000,
        "kl.name": "none",
    },
    "dapo": {
        "batch.prompts": 512,
        "batch.group_size": 16,
        "algorithm.minibatches": 16,
        "algorithm.policy_loss.clip_high": 0.28,
        "algorithm.overlong.limit": 20480,
        "kl.name": "none",
    },
    "gspo": {
        "algorithm.minibatches": 4,
        "algorithm.policy_loss.clip_low": 3e-4,
        "algorithm.policy_loss.clip_high": 4e-4,
    },
    "cispo": {"algorithm.policy_loss.clip_low": 1.0, "kl.name": "none"},
    "rloo": {"batch.group_size": 4, "kl.placement": "reward", "kl.in_baseline": True},
}


@pytest.mark.parametrize(
    "name, numbers", cases(PAPER_NUMBERS.items(), 1, unpack=True), ids=PAPER_NUMBERS
)
def test_recipes_hold_the_numbers_of_their_papers(name, numbers):
    from rlkit.training.schedules.paths import flatten_numbers as flatten

    config = flatten(compose([f"experiment=recipe/{name}"]).config)
    assert {key: config[key] for key in numbers} == numbers
    assert (
        config["algorithm.name"] == name and config["schedule.numbers"] == {}
    )  # a constant rate, as given


@pytest.mark.slow
@pytest.mark.parametrize("words", cases([[f"experiment={name}"] for name in presets()[::4]], 1))
def test_hydra_composes_alike_with_and_without_what_makes_the_tests_fast(words, composing):
    """The session's own `composing`: values, interpolations, flags and parents, which two equal
    configs share."""
    from rlkit.config.compose import _compose_groups

    found = []
    for on in (True, False):
        composing(on)
        _compose_groups.cache_clear()
        full = compose([*words, *REQUIRED.get(words[0], [])]).full
        found.append(
            (
                yaml.dump(OmegaConf.to_container(full)),
                OmegaConf.to_yaml(full, resolve=False),
                parents(full),
            )
        )
    composing(True)
    assert found[0] == found[1]


def parents(node):
    """Of each node whether it knows its parent, and its flags."""
    children = (
        [node._get_node(key) for key in node]
        if OmegaConf.is_dict(node) and not node._is_missing()
        else []
    )
    return [
        (child._get_parent() is node, child._metadata.flags, parents(child)) for child in children
    ]


SWEEPS = ("kl_ablation", "reference_ablation")


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEPS)
def test_every_job_of_a_sweeping_preset_composes(name):
    """The values stand in the preset; what they name must exist."""
    params = yaml.safe_load((conf_dir() / "experiment" / f"{name}.yaml").read_text())["hydra"][
        "sweeper"
    ]["params"]
    for values_ in itertools.product(*(str(v).split(",") for v in params.values())):
        experiment(
            compose(
                [
                    f"experiment={name}",
                    *(f"{key}={value}" for key, value in zip(params, values_, strict=True)),
                ]
            )
        )


REFUSALS = {
    "unknown option": (["algorithm=grp"], ["algorithm=grp", "Did you mean 'grpo'", "reinforce"]),
    "unknown key": (["optimizer.lrr=1"], ["optimizer.lrr", "Did you mean 'lr'"]),
    "accuracy in percent": (
        ["evaluation.stop_at=95", "evaluation.every=1"],
        ["evaluation.stop_at=95", "1"],
    ),
    "unknown key deep": (
        ["algorithm.policy_loss.clip_lo=0.1"],
        ["algorithm.policy_loss.clip_lo", "Did you mean 'clip_low'"],
    ),
    "unknown key with plus": (["+batch.promts=1"], ["batch.promts", "Did you mean 'prompts'"]),
    "unknown root key": (["algoritm.epochs=1"], ["algoritm", "Did you mean 'algorithm'"]),
    "unknown key of a nested part": (
        ["callbacks.checkpoint.evry=1"],
        ["callbacks.checkpoint.evry", "Did you mean 'every'"],
    ),
    "word for a number": (
        ["batch.prompts=many"],
        ["batch.prompts", "'many' is not a whole number"],
    ),
    "fraction for a whole number": (["trainer.steps=1.5"], ["trainer.steps", "not a whole number"]),
    "word outside a choice": (["trainer.precision=fp8"], ["trainer.precision", "bf16-mixed"]),
    "text for a list": (["evaluation.k=many"], ["evaluation.k: 'many' is not a list"]),
    "number for named parts": (["++reward.terms=3"], ["reward.terms: 3 is not a mapping"]),
    "number for a part": (["++batch=3"], ["batch: 3", "mapping with a _target_"]),
    "a term that is no part": (
        ["+reward.terms.x={weight: 1.0, fn: {_target_: rlkit.rewards.numeric, _partial_: true}}"],
        ["reward.terms.x", "no _target_", "_target_: rlkit.rewards.Term"],
    ),
    "a package of options that is not there": (
        ["hydra.searchpath=[pkg://my_pckage.conf]"],
        ["pkg://my_pckage.conf", "PYTHONPATH"],
    ),
    "a folder of options that is not there": (
        ["hydra.searchpath=[file:///no/where]"],
        ["file:///no/where is no folder"],
    ),
    "a setting of Hydra's that there is not": (
        ["hydra.serchpath=[pkg://rlkit]"],
        ["hydra.serchpath", "Did you mean 'searchpath'"],
    ),
    "mapping for a number": (["++seed={a: 1}"], ["seed", "not a whole number"]),
    "missing value": (["task=jsonl"], ["task.path", "set task.path="]),
    "missing target": (
        ["kl.estimator._target_=???"],
        ["kl.estimator: has no default; set kl.estimator._target_="],
    ),
    "weight of no part": (
        ["task=mixture", "task.weights.mroe=2"],
        ["task.weights.mroe: there is no such part"],
    ),
    "unknown key of a part": (
        ["task=mixture", "task.parts.guess_number.hihg=9"],
        ["task.parts.guess_number.hihg", "Did you mean 'high'"],
    ),
    "target that is no function": (
        ["kl.estimator._target_=rlkit.functional.k4"],
        ["kl.estimator._target_", "Did you mean 'k"],
    ),
    "target that cannot be imported": (
        ["kl.estimator._target_=no.such.part"],
        ["kl.estimator._target_", "no.such.part"],
    ),
    "KL without a reference": (["reference=none"], ["kl=k3", "reference=none", "reference=frozen"]),
    "scheduled KL without a reference": (
        ["schedule=kl_anneal", "kl.coef=0", "reference=none"],
        ["kl=k3", "reference=none"],
    ),
    "group of one": (["batch.group_size=1"], ["batch.group_size=1", "algorithm=reinforce"]),
    "subsets as large as the group": (
        ["algorithm=pass_at_k", "algorithm.advantage.k=8", "batch.group_size=8"],
        ["algorithm.advantage.k=8", "group_size=8"],
    ),
    "parts that do not divide": (
        ["algorithm.minibatches=7"],
        ["algorithm.minibatches=7", "128 rollouts"],
    ),
    "zero steps": (["trainer.steps=0"], ["trainer.steps=0", "at least 1"]),
    "a budget no reply reaches": (
        ["generation.max_thinking_tokens=64"],
        ["generation.max_thinking_tokens=64", "below generation.max_new_tokens=64"],
    ),
    "greedy training": (["generation.temperature=0"], ["generation.temperature=0", "greedy"]),
    "number schedule that binds nothing": (
        [
            "schedule=kl_anneal",
            (
                "++schedule.numbers={kl.cof: {_target_: rlkit.training.schedules.linear, _partial_:"
                " true, start: 1, end: 0, steps: 2}}"
            ),
        ],
        ["schedule.numbers", "kl.cof", "coef"],
    ),
    "clip out of range": (["algorithm.policy_loss.clip_low=1.5"], ["clip_low", "1.5"]),
    "sweep without -m": (["seed=1,2"], ["seed=1,2", "-m"]),
    "decay that never moves": (
        ["reference=ema", "reference.decay=1"],
        ["reference", "decay=1", "less than 1"],
    ),
    "copies at no step": (
        ["reference=periodic", "reference.every=0"],
        ["reference", "every=0", "at least 1"],
    ),
    "no KL to wait for": (
        ["reference=on_kl", "reference.threshold=0"],
        ["reference", "threshold=0", "greater than 0"],
    ),
    "end that is no condition": (
        ["schedule=on_reward", "schedule.phases.explore.until=soon"],
        ["schedule.phases.explore.until", "reward/mean > 0.8"],
    ),
    "phase without an end": (
        ["schedule=on_reward", "schedule.phases.explore.until=null"],
        ["schedule.phases.explore", "until"],
    ),
    "part of a group in a phase": (
        ["schedule=on_reward", "schedule.phases.explore.kl.coef=1"],
        ["+kl@schedule.phases.explore.kl=OPTION"],
    ),
    "number of a phase that binds nothing": (
        [
            "schedule=on_reward",
            (
                "schedule.phases.refine.numbers={kl.cof: {_target_:"
                " rlkit.training.schedules.constant, _partial_: true, value: 1}}"
            ),
        ],
        ["schedule.phases.refine", "kl.cof", "coef"],
    ),
    "phase that cannot run": (
        ["schedule=on_reward", "schedule.phases.refine.algorithm.minibatches=7"],
        ["schedule.phases.refine", "minibatches=7", "128 rollouts"],
    ),
    "unknown key of a phase": (
        ["schedule=on_reward", "schedule.phases.explore.untl=3"],
        ["schedule.phases.explore.untl", "'until'"],
    ),
    "number scheduled twice": (
        ["schedule=kl_anneal", "kl/coef=adaptive"],
        ["kl.coef", "controller", "schedule.numbers.kl.coef"],
    ),
    "controller out of range": (["kl/coef=adaptive", "kl.coef.target=0"], ["kl.coef", "target=0"]),
    "broken override": (["optimizer.lr=[1"], ["optimizer.lr=[1"]),
    "a reference that follows and that no KL uses": (
        ["kl=none", "reference=ema"],
        ["reference=ema", "never used", "reference=frozen"],
    ),
    "a scale of groups of one": (
        ["batch.group_size=1", "algorithm/advantage=raw", "algorithm/normalization=group"],
        ["batch.group_size=1", "at least 2"],
    ),
    "a cispo cap below 1": (
        ["algorithm=cispo", "algorithm.policy_loss.clip_high=-0.2"],
        ["clip_high", "-0.2", "> 0"],
    ),
    "pairs within groups of one": (
        ["algorithm=pairwise", "batch.group_size=1"],
        ["batch.group_size=1", "pairwise", "at least 2"],
    ),
    "values without a critic": (
        ["algorithm/advantage=gae"],
        ["algorithm.advantage", "critic", "algorithm/critic=head"],
    ),
    "a critic that nobody asks": (
        ["algorithm/critic=head"],
        ["algorithm.advantage", "returns", "critic"],
    ),
    "a sampler that cuts the distribution": (
        ["generation.top_p=0.9"],
        ["generation.top_p=0.9", "full distribution", "top_p=1"],
    ),
    "a sampler that takes the best": (["generation.top_k=50"], ["generation.top_k=50", "top_k=0"]),
    "refills that a filter never asks for": (
        ["algorithm.max_refills=2"],
        ["algorithm.max_refills=2", "algorithm/group_filter=mixed"],
    ),
    "the ratio twice": (
        ["kl=k1", "kl.importance_weight=true"],
        ["kl.importance_weight", "carries the ratio already"],
    ),
    "a ratio in the reward": (
        ["kl=k3", "kl.placement=reward", "kl.importance_weight=true"],
        ["kl.importance_weight", "kl.placement=reward"],
    ),
    "a baseline without a KL in it": (
        ["kl.in_baseline=true"],
        ["kl.in_baseline", "kl.placement=loss"],
    ),
    "an exact KL as a reward": (
        ["kl=full", "kl.placement=reward"],
        ["kl.placement=reward", "kl.placement=loss", "kl=k1"],
    ),
    "a KL in a reward that is not trained on": (
        ["algorithm=opd", "teacher=start", "kl=k1", "kl.placement=reward"],
        ["kl.placement=reward", "algorithm=opd trains on no reward", "kl.placement=loss"],
    ),
    "a KL in a baseline that reads terms": (
        ["algorithm/advantage=gdpo", "kl=k1", "kl.placement=reward", "kl.in_baseline=true"],
        ["kl.in_baseline", "reads only the reward's terms"],
    ),
    "a normalised total beside terms": (
        ["algorithm/advantage=gdpo", "reward.normalize=true"],
        ["reward.normalize", "reads only the reward's terms"],
    ),
    "a penalty on a total beside terms": (
        ["algorithm/advantage=gdpo", "algorithm/overlong=penalty"],
        ["algorithm/overlong", "reads only the reward's terms"],
    ),
    "an end at no divergence": (["algorithm.target_kl=0"], ["algorithm.target_kl=0", "null"]),
    "two critics in one run": (
        [
            "schedule=reinforce_to_ppo",
            "algorithm@schedule.phases.explore.algorithm=ppo",
            "algorithm/critic@schedule.phases.explore.algorithm.critic=separate",
        ],
        ["one critic", "algorithm.critic.model=separate (phase explore), head (phase refine)"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("overrides, words", cases(REFUSALS.values(), 8, unpack=True), ids=REFUSALS)
def test_refusal_names_the_place_and_the_remedy(overrides, words):
    with pytest.raises(ConfigError) as refusal:
        experiment(compose(overrides))
    for word in words:
        assert word in str(refusal.value)


def test_a_frozen_reference_that_no_kl_uses_is_a_warning():
    x = experiment(compose(["kl=none", "reference=frozen"]))
    assert [line for line in list_warnings(x) if "reference=frozen is not built" in line]


@pytest.mark.slow
def test_an_average_of_adapters_says_once_what_it_averages():
    """The factors, not their product; a copy of all weights is averaged exactly, and so is an
    adapter that is copied."""
    found = {
        tuple(overrides): sum(
            "averages the adapter's factors" in line
            for line in list_warnings(experiment(compose(overrides)))
        )
        for overrides in (
            ["reference=ema", "model.lora.rank=4"],
            ["reference=ema"],
            ["reference=periodic", "model.lora.rank=4"],
        )
    }
    assert list(found.values()) == [1, 0, 0]


@pytest.mark.slow
def test_a_reference_that_a_scheduled_kl_uses_is_no_warning():
    """The coefficient stands at 0 in the config, and the schedule raises it; without an estimator
    nothing can."""
    x = experiment(compose(["schedule=kl_anneal", "kl.coef=0"]))
    assert x.needs_reference and not any("not built" in line for line in list_warnings(x))
    assert not experiment(
        compose(["schedule=kl_anneal", "kl=none", "reference=none"])
    ).needs_reference


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    cases(
        [
            ["algorithm=pass_at_k", "batch.group_size=6"],
            ["algorithm=pass_at_k", "algorithm.advantage.k=8", "batch.group_size=16"],
            ["algorithm=grpo", "algorithm/advantage=best_minus_second"],
            [
                "algorithm=pairwise",
                "algorithm/advantage/pair_selector=best_worst",
                "algorithm.advantage.beta=0.2",
            ],
        ],
        1,
    ),
)
def test_the_dry_run_shows_every_advantage_a_group_it_learns_from(overrides):
    """One best sample in a group: among many equal ones an advantage of the best is rightly 0, and
    the config would be refused."""
    experiment(compose([*overrides, "kl=none", "reference=none"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "option, numbers",
    cases(
        {
            "clip_higher": {"clip_low": 0.2, "clip_high": 0.28},
            "dual_clip": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
            "delta_clip": {"clip_low": 0.2, "clip_high": 0.2, "delta": 4.0},
            "clip_sequence": {"clip_low": 3e-4, "clip_high": 4e-4},
        }.items(),
        1,
        unpack=True,
    ),
)
def test_options_that_inherit_the_clip_keep_the_rest_of_it(option, numbers):
    part = experiment(compose([f"algorithm/policy_loss={option}"])).algorithm.policy_loss
    assert part.func.__name__ == "clipped" and part.keywords == numbers


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(["dr_grpo", "rloo", "max_rl", "opo"], 1))
def test_a_sum_over_a_reply_is_divided_by_the_longest_reply(name):
    """The two numbers cannot drift apart; a number of one's own stays possible."""

    def constant(*overrides):
        return experiment(
            compose([f"algorithm={name}", *overrides])
        ).algorithm.aggregation.keywords["constant"]

    assert constant("generation.max_new_tokens=77") == 77
    assert constant("generation.max_new_tokens=77", "algorithm.aggregation.constant=3") == 3


@pytest.mark.parametrize("name", cases(["k1", "forward", "reverse"], 1))
def test_these_estimators_carry_the_ratio_in_the_loss(name):
    """Without it k1 in the loss has no gradient in expectation, and says nothing about it."""
    assert "logprobs_old" in list_inputs(experiment(compose([f"kl={name}"])).kl.estimator)


@pytest.fixture
def two_phases(tmp_path):
    """A folder with schedule=two: algorithm and KL in both phases, the reference in one."""
    (tmp_path / "schedule").mkdir()
    (tmp_path / "schedule" / "two.yaml").write_text(
        "defaults:\n  - /algorithm@phases.first.algorithm: grpo\n  - /kl@phases.first.kl: k1\n  -"
        " /reference@phases.first.reference: ema\n  - /algorithm@phases.second.algorithm: rloo\n  -"
        " /kl@phases.second.kl: k2\n  - _self_\n\n_target_:"
        " rlkit.training.schedules.Schedule\nphases:\n  first: {_target_:"
        " rlkit.training.schedules.Phase, until: 10}\n  second: {_target_:"
        " rlkit.training.schedules.Phase}\n"
    )
    return str(tmp_path)


@pytest.mark.slow
def test_overrides_reach_into_a_phase(two_phases):
    overrides = [
        "schedule=two",
        "schedule.phases.first.until=3",
        "schedule.phases.first.algorithm.policy_loss.clip_high=0.5",
        "algorithm/advantage@schedule.phases.second.algorithm.advantage=raw",
        "kl@schedule.phases.second.kl=k3",
        "kl/coef@schedule.phases.second.kl.coef=adaptive",
        "schedule.phases.second.kl.coef.target=0.5",
        "reference=periodic",
    ]
    x = experiment(compose(overrides, config_dir=two_phases))
    first, second = list_phases(x).values()
    assert x.schedule.phases["first"].until == 3 and list(x.schedule.phases) == ["first", "second"]
    assert (
        first.algorithm.policy_loss.keywords["clip_high"] == 0.5
        and first.kl.name == "k1"
        and first.reference.name == "ema"
    )
    assert (
        second.algorithm.name == "rloo"
        and second.algorithm.advantage.func.__name__ == "raw"
        and second.reference.name == "periodic"
    )
    assert second.kl.name == "k3" and second.kl.coef.update.keywords["target"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "override, meant",
    cases(
        {
            "algorithm=rloo": "algorithm@schedule.phases.first.algorithm=rloo",
            "algorithm/policy_loss=sapo": (
                "algorithm/policy_loss@schedule.phases.second.algorithm.policy_loss=sapo"
            ),
            "algorithm.policy_loss.clip_high=0.5": (
                "schedule.phases.first.algorithm.policy_loss.clip_high=0.5"
            ),
            "++algorithm.epochs=2": "schedule.phases.second.algorithm.epochs=2",
            "kl.coef=0.1": "schedule.phases.first.kl.coef=0.1",
            "kl/coef=adaptive": "kl/coef@schedule.phases.first.kl.coef=adaptive",
        }.items(),
        1,
        unpack=True,
    ),
)
def test_an_override_that_every_phase_replaces_is_refused(two_phases, override, meant):
    """Hydra would compose it, and it would change nothing."""
    with pytest.raises(ConfigError) as refusal:
        compose(["schedule=two", override], config_dir=two_phases)
    assert str(refusal.value).startswith(f"{override}: ") and meant in str(refusal.value)
    compose(["schedule=two", meant], config_dir=two_phases)


@pytest.mark.slow
def test_an_override_of_a_group_that_some_phase_shares_stands(two_phases):
    x = experiment(
        compose(
            ["schedule=two", "reference=ema", "reference.decay=0.5", "batch.prompts=8"],
            config_dir=two_phases,
        )
    )
    assert [p.reference.update.keywords["decay"] for p in list_phases(x).values()] == [0.99, 0.5]


@pytest.mark.slow
def test_a_reference_is_needed_where_any_phase_needs_one(two_phases):
    x = experiment(
        compose(["schedule=two", "kl@schedule.phases.first.kl=none"], config_dir=two_phases)
    )
    assert [p.needs_reference for p in list_phases(x).values()] == [False, True]
    assert x._replace(
        kl=x.schedule.phases["first"].kl
    ).needs_reference  # whatever stands at the top, where no phase reads it


@pytest.mark.slow
def test_phases_keep_the_decay_of_the_learning_rate():
    """It counts over the whole run."""
    x = experiment(compose(["schedule=on_reward"]))
    lr = x.optimizer.keywords["lr"]
    assert resolve_schedules(x, Progress(10, phase=1, since=5)).optimizer.keywords[
        "lr"
    ] == pytest.approx(0.55 * lr)


@pytest.mark.slow
def test_an_end_beyond_the_run_is_a_warning():
    (text,) = list_warnings(
        experiment(compose(["schedule=on_reward", "schedule.phases.explore.until=50"]))
    )
    assert "schedule.phases.explore.until=50" in text and "trainer.steps=20" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides, words",
    [
        (["reference=periodic"], "reference.every=20: no update sees a new copy"),
        (
            ["algorithm=ppo", "algorithm.critic.warmup=20"],
            "algorithm.critic.warmup=20: the policy is never trained",
        ),
    ],
)
def test_steps_that_the_run_never_reaches_are_a_warning(overrides, words):
    (text,) = list_warnings(experiment(compose(overrides)))
    assert text.startswith(words) and "trainer.steps=20" in text
    assert not list_warnings(experiment(compose([*overrides, "trainer.steps=21"])))


@pytest.mark.parametrize(
    "overrides, words",
    [
        (
            ["schedule=on_reward", "schedule.phases.explore.until='reward/meen > 0.8'"],
            "schedule.phases.explore.until: waits for 'reward/meen', .* Did you mean 'reward/mean'",
        ),
        (
            ["schedule=kl_anneal", "kl=none", "reference=none"],
            r"schedule\.numbers\.kl\.coef: kl=none",
        ),
    ],
)
def test_a_schedule_that_does_nothing_is_a_warning(overrides, words):
    (text,) = list_warnings(experiment(compose(overrides)))
    assert re.match(words, text)


@pytest.mark.parametrize("overrides", [[], ["kl=none", "reference=none"]])
@pytest.mark.parametrize("loss", ["detached", "of_old_policy"])
def test_a_policy_loss_without_a_gradient_is_refused(overrides, loss):
    """Beside a KL the run trained on the KL alone; without one torch's own words were shown."""
    own = [f"algorithm.policy_loss._target_={__name__}.{loss}"]
    own += ["~algorithm.policy_loss.clip_low", "~algorithm.policy_loss.clip_high"]
    with pytest.raises(ConfigError, match=rf"^algorithm\.policy_loss \(.*{loss}\): .*no gradient"):
        experiment(compose([*own, *overrides]))


def detached(ratio, advantages):
    return -ratio.detach() * advantages


def of_old_policy(logprobs_old, advantages):
    return -logprobs_old * advantages


@pytest.mark.slow
def test_an_advantage_of_zero_beside_a_kl_is_refused():
    own = [f"algorithm.advantage._target_={__name__}.nothing"]
    with pytest.raises(ConfigError, match="gradient is zero"):
        experiment(compose([*own, "algorithm=reinforce", "kl=k3"]))


def nothing(rewards):
    return 0 * rewards


@pytest.mark.slow
@pytest.mark.parametrize("option", options("kl"))
def test_every_kl_takes_an_adaptive_coefficient(option):
    """In either order, and its numbers without a plus."""
    for chosen in ([option, "kl/coef=adaptive"], ["kl/coef=adaptive", option]):
        x = experiment(compose([*chosen, "kl.coef.target=0.02"]))
        assert (
            x.kl.name == {"kl=by_algorithm": "k3"}.get(option, option.removeprefix("kl="))
            and resolve_schedules(x, start(x)).kl.coef == 0.05
            and x.kl.coef.update.keywords["target"] == 0.02
        )


@pytest.mark.parametrize(
    "override",
    [
        (
            "kl.coef={_target_: rlkit.training.schedules.adaptive, start: 0.1, target: 0.8, metric:"
            " reward/mean}"
        ),
        (
            "algorithm.entropy_coef={_target_: rlkit.training.schedules.adaptive_entropy, start:"
            " 0.1, target: 0.3}"
        ),
        (
            "schedule.numbers.algorithm.entropy_coef={_target_:"
            " rlkit.training.schedules.adaptive_entropy, start: 0.1}"
        ),
    ],
)
def test_a_controller_may_be_written_in_place_of_a_number(override):
    x = experiment(compose([override]))
    path = override.partition("=")[0].removeprefix("schedule.numbers.")
    assert list_values(x, start(x))[path] == 0.1


@pytest.mark.slow
@pytest.mark.parametrize("value", ["reward/mean > 0.8 for 3", "'reward/mean > 0.8 for 3'"])
def test_a_condition_needs_no_second_quotes(value):
    """The shell takes one pair; Hydra's own grammar would want another."""
    composed = compose(["schedule=grpo_to_dapo", f"schedule.phases.explore.until={value}"])
    assert experiment(composed).schedule.phases["explore"].until == "reward/mean > 0.8 for 3"
    assert composed.overrides[1] == "schedule.phases.explore.until='reward/mean > 0.8 for 3'"


def kl_of_the_paper() -> dict[str, tuple[str, str, float, str]]:
    """Preset → estimator, placement, coefficient and source, as the table of docs/algorithms.md has
    them."""
    page = (conf_dir().parent / "docs" / "algorithms.md").read_text()
    lines = page.partition("## The KL of each algorithm")[2].partition("\n## ")[0].splitlines()
    found = {}
    for line in [line for line in lines if line.startswith("| ")][1:]:
        presets, kl, coef, source = (cell.strip() for cell in line.strip("|").split(" | "))
        name, _, placement = kl.partition(", ")
        found |= {preset: (name, placement, float(coef), source) for preset in presets.split(", ")}
    return found


KL_OF_THE_PAPER = kl_of_the_paper()


def test_every_algorithm_has_a_kl_with_a_source():
    """Nothing falls back on k3 unsaid: the file suggests a coefficient, and the page says whose it
    is."""
    files = {f.stem: f for f in (conf_dir() / "algorithm").glob("*.yaml")}
    assert files.keys() == KL_OF_THE_PAPER.keys() and all(
        source for *_, source in KL_OF_THE_PAPER.values()
    )
    for name, file in files.items():
        assert "coef" in yaml.safe_load(file.read_text())["suggests"]["kl"], name


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", cases(sorted(KL_OF_THE_PAPER), ["grpo", "gspo", "rloo", "reinforce_pp_baseline"])
)
def test_an_algorithm_alone_has_the_kl_of_its_paper(algorithm):
    """PPO and REINFORCE++ had k3 in the loss, and DAPO, MaxRL and OPO a KL that their papers leave
    out. Later so had Dr. GRPO, GSPO, CISPO and others."""
    x = experiment(
        compose(
            [
                f"algorithm={algorithm}",
                *({"sft": ["batch.group_size=1"]}.get(algorithm, ["teacher=start"])),
            ]
        )
    )
    name, placement, coef, _ = KL_OF_THE_PAPER[algorithm]
    assert x.kl.coef == coef and x.kl.active == x.needs_reference == (coef > 0)
    if name == "none":
        assert not x.kl.active and describe_kl(x) == "none"
        return
    assert x.kl.name == name and x.kl.estimator.func is {"k1": forward, "k2": k2, "k3": k3}[name]
    assert (x.kl.placement, x.kl.in_baseline) == (
        placement.partition(",")[0],
        "before the baseline" in placement,
    )
    assert describe_kl(x) == f"{name} × {coef:g} in the {placement.partition(',')[0]}"


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", cases(["gspo", "rloo", "ppo", "grpo"], 2))
def test_a_kl_of_the_user_replaces_that_of_the_algorithm(algorithm):
    """All of it, the place before the baseline too; and one number alone, a coefficient, gives a KL
    to one that has none."""
    kl = experiment(compose([f"algorithm={algorithm}", "kl=k3"])).kl
    assert (kl.name, kl.placement, kl.coef, kl.in_baseline) == ("k3", "loss", 0.05, False)
    assert experiment(compose([f"algorithm={algorithm}", "kl.coef=0.2"])).kl.coef == 0.2
    assert not experiment(compose([f"algorithm={algorithm}", "kl.coef=0"])).needs_reference


@pytest.mark.slow
def test_only_a_reference_that_somebody_chose_is_warned_of():
    """`algorithm=gspo` alone has no KL, and the default reference is not built; the first line says
    so."""
    assert not [
        line
        for line in list_warnings(experiment(compose(["algorithm=gspo"])))
        if "is not built" in line
    ]
    with pytest.raises(ConfigError, match="reference=ema: it would be updated and never used"):
        experiment(compose(["algorithm=gspo", "reference=ema"]))
    assert "kl none, reward by_task, reference none" in format_first_line(
        experiment(compose(["algorithm=gspo"]))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "expected"),
    cases(
        [
            (["algorithm=ppo", "kl.placement=loss"], ("k1", "loss", 0.05)),
            (["algorithm=ppo", "kl.coef=0.2"], ("k1", "reward", 0.2)),
            (["algorithm=ppo", "kl=k3"], ("k3", "loss", 0.05)),
            (["algorithm=ppo", "kl=none"], ("none", "loss", 0.0)),
            (["algorithm=dapo", "kl.coef=0.1"], ("k3", "loss", 0.1)),
            (["algorithm=dapo", "kl=k2"], ("k2", "loss", 0.05)),
            (
                ["algorithm=grpo", "algorithm.suggests.kl.placement=reward_sequence"],
                ("k3", "reward_sequence", 0.05),
            ),
        ],
        1,
        unpack=True,
    ),
    ids=lambda value: " ".join(map(str, value)),
)
def test_what_the_user_says_of_the_kl_wins(overrides, expected):
    kl = experiment(compose(overrides)).kl
    assert (kl.name, kl.placement, kl.coef) == expected


LORA = ["model.lora.rank=4", "model.lora.alpha=8"]
GKD = [
    "schedule=grpo_to_dapo",
    "algorithm@schedule.phases.explore.algorithm=gkd",
    "algorithm@schedule.phases.refine.algorithm=gkd",
    "teacher=ema",
]
LINEAR = "_target_: rlkit.training.schedules.linear, _partial_: true"
FALLING = f"{{{LINEAR}, start: %s, end: %s, steps: 3}}"
TWO_PPO = ["schedule=reinforce_to_ppo", "algorithm@schedule.phases.explore.algorithm=ppo"]
TWICE = "under LoRA there is one second adapter, and both need it"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([*LORA, *GKD, "kl=k3", "reference=ema"], TWICE),
        ([*LORA, *GKD, "kl=k3", "schedule.phases.refine.reset=[reference]"], TWICE),
        (
            [
                *(*LORA, "schedule=grpo_to_dapo", "kl=none", "teacher=ema"),
                "algorithm@schedule.phases.refine.algorithm=gkd",
                *("+kl@schedule.phases.explore.kl=k3", "reference=ema"),
            ],
            TWICE,
        ),
        ([*LORA, "model.lora.targets=[q_proj,lm_head]", "kl=full"], "take lm_head out"),
        ([*LORA, "model.lora.targets=[lm_head]", *GKD], "take lm_head out"),
        (
            [f"+schedule.numbers.optimizer.weight_decay={FALLING % (0.1, 0)}"],
            "only the learning rate of an optimizer follows a schedule",
        ),
        (
            [f"+schedule.numbers.generation.temperature={FALLING % (1, 0)}"],
            "in the last step, generation.temperature=0",
        ),
        (
            [f"+schedule.numbers.algorithm.policy_loss.clip_high={FALLING % (0.3, 0)}"],
            "clip_high",
        ),
        (
            [*TWO_PPO, "schedule.phases.refine.algorithm.critic.optimizer.weight_decay=0.1"],
            "algorithm.critic.optimizer.weight_decay=0.0 (phase explore), 0.1 (phase refine)",
        ),
        (
            [
                *TWO_PPO,
                "schedule.phases.refine.algorithm.critic.optimizer._target_=torch.optim.Adam",
            ],
            "algorithm.critic.optimizer=torch.optim.adamw.AdamW (phase explore), torch.optim.adam",
        ),
        (
            [*TWO_PPO, "schedule.phases.refine.algorithm.critic.trunk_gradient=true"],
            "algorithm.critic.trunk_gradient=False (phase explore), True (phase refine)",
        ),
        (["evaluation.k=[]"], "evaluation.k=[]: pass@k needs k of at least 1"),
        (
            [*LORA, "schedule=on_reward", "+schedule.phases.explore.kl.coef=1"],
            "schedule.phases.explore.kl: must be whole",
        ),
    ],
)
def test_what_would_go_wrong_in_a_later_step_or_phase_is_refused(overrides, said):
    """A schedule that leaves its range ended a run in the middle, and two references in one
    adapter overwrote each other without a word."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        experiment(compose(overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        [*GKD, "kl=k3", "schedule.phases.refine.reset=[reference]"],
        [*LORA, *GKD, "kl=k3"],
        [*LORA, "model.lora.targets=[q_proj,lm_head]", "kl=k3"],
        ["schedule=kl_anneal"],
        [
            *(*TWO_PPO, "schedule.phases.refine.algorithm.critic.optimizer.lr=1e-2"),
            "schedule.phases.refine.algorithm.critic.coef=2",
        ],
    ],
)
def test_what_does_not_go_wrong_there_is_accepted(overrides):
    experiment(compose(overrides))


@pytest.mark.slow
def test_the_first_line_has_the_scheduled_coefficient_of_the_first_step():
    for algorithm in ("grpo", "dapo"):
        x = experiment(compose(["schedule=kl_anneal", f"algorithm={algorithm}", "kl=k3"]))
        assert resolve_schedules(x, start(x)).kl.coef == 0.1
        assert "kl k3 × 0.1 in the loss" in format_first_line(x)


@pytest.mark.slow
def test_a_phase_asks_the_algorithm_of_its_own_phase():
    x = experiment(
        compose(["schedule=reinforce_to_ppo", "+kl@schedule.phases.refine.kl=by_algorithm"])
    )
    assert (x.kl.name, x.kl.placement) == ("k3", "loss")
    assert (x.schedule.phases["refine"].kl.name, x.schedule.phases["refine"].kl.placement) == (
        "k1",
        "reward",
    )


def test_an_adaptive_coefficient_goes_with_any_suggestion():
    kl = experiment(compose(["algorithm=dapo", "kl/coef=adaptive"])).kl
    assert isinstance(kl.coef, Controller) and kl.active


PAIRS = combinations(
    [name for name in parametrise.options("algorithm") if name != "sft"],
    parametrise.options("kl"),
    slow=30,
)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_every_algorithm_composes_with_every_kl(pair):
    algorithm, kl = pair
    x = experiment(
        compose([f"algorithm={algorithm}", f"kl={kl}", "teacher=start"])
    )  # which distillation needs
    assert kl == "by_algorithm" or (x.kl.name == kl and x.kl.placement == "loss")


@pytest.mark.slow
def test_dapo_with_its_overrides_taken_back_is_grpo():
    taken_back = [
        "policy_loss=clipped",
        "aggregation=sequence_mean",
        "group_filter=none",
        "overlong=none",
    ]
    dapo = experiment(
        compose(
            [
                "algorithm=dapo",
                *(f"algorithm/{text}" for text in taken_back),
                "algorithm.max_refills=0",
            ]
        )
    ).algorithm
    grpo = experiment(compose(["algorithm=grpo"])).algorithm

    def plain(part):
        return (part.func, part.args, part.keywords) if hasattr(part, "keywords") else part

    assert {k: plain(v) for k, v in dapo._replace(name="grpo")._asdict().items()} == {
        k: plain(v) for k, v in grpo._asdict().items()
    }


def test_the_last_reward_counts_and_values_come_after_it():
    def read(*overrides: str) -> dict:
        terms = compose(overrides).config["reward"]["terms"]
        return {name: (term["fn"]["_target_"], term["weight"]) for name, term in terms.items()}

    numeric = ("rlkit.rewards.numeric", 1.0)
    assert read("reward=rlkit.rewards.exact_match", "reward=numeric") == {"numeric": numeric}
    contains = {"contains": ("rlkit.rewards.contains", 2.0)}
    assert read("reward.terms.contains.weight=2", "reward=rlkit.rewards.contains") == contains
    assert read("reward=[rlkit.rewards.numeric, rlkit.rewards.numeric]") == {
        "numeric": numeric,
        "numeric_1": numeric,
    }


def test_a_group_that_a_command_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="algorithm: rlkit rollout has no such group"):
        compose(["algorithm=grpo"], entry="rollout")


def test_all_problems_come_in_one_message():
    with pytest.raises(ConfigError) as refusal:
        compose(["algorithm=grp", "optimizer.lrr=1", "batch.prompts=many", "+nonsense=1"])
    assert len(str(refusal.value).splitlines()) == 4


def test_keys_that_a_signature_knows_need_no_plus():
    """weight_decay's neighbour `amsgrad` stands in no YAML, but AdamW takes it."""
    assert experiment(compose(["optimizer.amsgrad=true"])).optimizer.keywords["amsgrad"] is True


@pytest.mark.slow
def test_composing_imports_neither_lightning_nor_transformers():
    """`rlkit train` with a typo answers before seconds are spent on imports (DECISIONS: compose
    stays light)."""
    program = (
        "import sys\nfrom rlkit.config.compose import compose,"
        " experiment\nexperiment(compose([]))\nheavy = {'lightning', 'transformers', 'peft',"
        " 'datasets'} & set(sys.modules)\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_partial_parts_are_plain_partials():
    """Hydra's own partial is a slow subclass; ours is functools.partial, called 128 times a
    step."""
    import functools

    part = build({"_target_": "rlkit.functional.clipped", "_partial_": True, "clip_low": 0.1})
    assert type(part) is functools.partial and part.keywords == {"clip_low": 0.1}


def test_a_part_that_refuses_its_values_is_named_by_its_path():
    node = {"tool": {"_target_": "rlkit.environments.tool_use", "tools": {}}}
    with pytest.raises(ConfigError, match="tool: "):
        build(node)


def test_required_keyword_is_missed():
    assert check({"_target_": "rlkit.functional.sequence_sum", "_partial_": True}, "a") == [
        "a.constant: 'rlkit.functional.sequence_sum' needs a value here"
    ]


def test_quantities_cannot_be_set_by_a_config():
    """`ratio` is what the loss is called with, not a hyperparameter."""
    problems = check({"_target_": "rlkit.functional.clipped", "_partial_": True, "ratio": 1.0}, "a")
    assert len(problems) == 1 and "takes no 'ratio'" in problems[0]


def test_options_from_outside(tmp_path):
    (tmp_path / "kl").mkdir()
    (tmp_path / "kl" / "mine.yaml").write_text(
        "_target_: rlkit.algorithm.KL\nname: mine\nestimator: {_target_: rlkit.functional.k2,"
        " _partial_: true}\ncoef: 0.5\n"
    )
    assert experiment(compose(["kl=mine"], config_dir=str(tmp_path))).kl.name == "mine"


def test_an_option_on_the_search_path_is_read_again_once_it_changes(tmp_path):
    (tmp_path / "optimizer").mkdir()
    words = ["optimizer=mine", f"hydra.searchpath=[file://{tmp_path}]"]
    for time, lr in enumerate((0.25, 0.5)):
        option = tmp_path / "optimizer" / "mine.yaml"
        option.write_text(f"defaults: [adamw]\nlr: {lr}\n")
        os.utime(option, (1000 + time, 1000 + time))
        assert compose(words).config["optimizer"]["lr"] == lr


def test_an_option_that_a_shipped_one_hides_is_refused(tmp_path):
    """Hydra would take the built-in without a word."""
    (tmp_path / "kl").mkdir()
    (tmp_path / "kl" / "k3.yaml").write_text("_target_: rlkit.algorithm.KL\nname: mine\n")
    with pytest.raises(ConfigError, match=r"k3\.yaml.*rename"):
        compose([], config_dir=str(tmp_path))


def test_advantage_that_asks_for_an_unknown_quantity_is_refused(tmp_path, monkeypatch):
    (tmp_path / "my_parts.py").write_text("def odd(reward):\n    return reward\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"algorithm.advantage.*'reward'.*Did you mean 'rewards'"):
        experiment(
            compose(["algorithm/advantage=raw", "algorithm.advantage._target_=my_parts.odd"])
        )


FILES = {
    str(file.relative_to(conf_dir())): file.read_text()
    for file in sorted(conf_dir().rglob("*.yaml"))
}


@pytest.mark.slow
def test_every_option_says_what_it_is():
    """A comment stands first, so that the YAML is the documentation; and there is something below
    it."""
    silent = [
        name
        for name, text in FILES.items()
        if not text.startswith("#") or yaml.safe_load(text) is None
    ]
    assert silent == []


NO_COMMENT = ("_target_", "_partial_", "name", "defaults", "hydra")


def unexplained(name: str, text: str) -> Iterator[str]:
    """The fields of an option without a comment in the line above."""
    file = Path(name)
    lines = [line for line in text.split("\nhydra:")[0].splitlines() if line.strip()]
    inherits = (
        "defaults:" in lines
        and file.stem not in ("train", "by_task", "default")
        and file.parent.name not in ("algorithm", "kl", "schedule")
    )
    for above, line in itertools.pairwise(lines):
        key, _, value = line.strip().partition(":")
        if (
            not value.strip()
            or key in NO_COMMENT
            or line.strip().startswith(("#", "-"))
            or inherits
        ):
            continue
        if not above.strip().startswith("#"):
            yield f"{name}: '{line.strip()}' has no comment above it"


def test_every_number_has_its_meaning_above_it():
    """Each field of an option is explained in the line above it. Presets are left out: they set
    what options explain."""
    options = {
        n: t
        for n, t in FILES.items()
        if Path(n).parent.name not in ("experiment", "debug") and ("/" in n or n == "train.yaml")
    }
    assert (
        options
        and [line for name, text in options.items() for line in unexplained(name, text)] == []
    )
