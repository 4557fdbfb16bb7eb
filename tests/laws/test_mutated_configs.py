"""Broken configs, generated: each is refused before a model is loaded, with its path and a remedy;
none is taken silently."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from parametrise import cases
from rlkit.commands.cli import main
from rlkit.config.compose import compose, conf_dir, experiment
from rlkit.errors import Refusal

BASES = [
    [],
    ["experiment=guess_number_ppo"],
    ["schedule=on_reward"],
    ["task=mixture"],
    ["reward=[numeric,length,format]"],
    ["reference=ema"],
    ["algorithm=dapo"],
    ["environment=tool_use"],
    ["model=qwen3_0.6b"],
    ["kl/coef=adaptive"],
    ["schedule=kl_anneal"],
    ["kl=truncated"],
]
PER_BASE = 17  # 204 in all
NAMES = ("name", "run_name")  # any text will do
# Numbers that may be negative: scores and weights of a reward, values that are added, seeds.
SIGNED = re.compile(
    r"(^|\.)(weight|below|above|inside|score\w*|bonus|penalty|reward|offset|start|end|value|before|after|floor|ceiling|low|high|seed)$"
)


class Mutant(NamedTuple):
    """An override that breaks a config, and the part of the path that its refusal has to name."""

    override: str
    path: str
    kind: str


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Every value of a composed config that a command line can set: dotted path, value, the mapping
    it stands in."""
    for key, value in node.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, dict) and value:
            yield from leaves(value, where)
        elif not key.startswith("_") and "." not in key and key not in NAMES:
            yield where, value, node


def mutants(config: dict[str, Any], generator: random.Random) -> Iterator[Mutant]:
    """All single faults of all fields: typos at every depth, `+` keys, wrong types, holes, numbers
    out of range."""
    for path, value, node in leaves(config):
        depth = generator.randrange(path.count(".") + 1)
        parts = path.split(".")
        if "suggests" in parts:
            continue  # advice, which is checked where the group that it is for reads it
        wrong = [*parts[:depth], typo(parts[depth], generator), *parts[depth + 1 :]]
        if depth == len(parts) - 1 and "_target_" not in node:
            depth = 0  # names of one's own stand here, as those of terms
        plain = value if isinstance(value, int | float | str) else 1
        yield Mutant(f"{'.'.join(wrong)}={plain!r}", ".".join(wrong[: depth + 1]), "typo")
        if "_target_" in node:
            added = f"{path.rpartition('.')[0]}.nonsense".lstrip(".")
            yield Mutant(f"+{added}=1", added, "plus")
            target = f"{path.rpartition('.')[0]}._target_".lstrip(".")
            yield Mutant(
                f"{target}={generator.choice(['[rlkit.rewards.numeric]', '{a: 1}', '3', 'true'])}",
                target,
                "target",
            )
        yield Mutant(f"{path}=???", path, "hole")
        if isinstance(value, bool):
            yield Mutant(f"{path}=maybe", path, "type")
        elif isinstance(value, int | float):
            yield Mutant(f"{path}=many", path, "type")
            yield Mutant(f"{path}=[{value}]", path, "type")
            yield Mutant(f"{path}={{a: 1}}", path, "type")
            yield Mutant(f"{path}=nan", path, "range")
            yield Mutant(f"{path}=true", path, "type")
            if not SIGNED.search(path):
                yield Mutant(f"{path}={-3 if isinstance(value, int) else -0.5}", path, "range")


def typo(word: str, generator: random.Random) -> str:
    """A word with one letter doubled: never a valid name."""
    at = generator.randrange(len(word))
    return word[: at + 1] + word[at] + word[at + 1 :]


def refusal(overrides: list[str]) -> str | None:
    """What `rlkit train` says before it loads a model, or None."""
    try:
        experiment(compose(overrides))
    except Refusal as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("base", cases(BASES, 1), ids=" ".join)
def test_no_mutated_config_is_taken(base):
    """A sample of the faults that `mutants` makes of every field, with a seed of its own for each
    base."""
    generator = random.Random(" ".join(base))
    found = list(mutants(compose(base).config, generator))
    taken, unclear = [], []
    for mutant in generator.sample(found, PER_BASE):
        began = time.process_time()
        said = refusal([*base, mutant.override])
        assert time.process_time() - began < 5, mutant
        if said is None:
            taken.append(mutant)
        elif (
            mutant.path.rpartition(".")[2] not in said
            or "Traceback" in said
            or len(said) < len(mutant.path) + 10
        ):
            unclear.append((mutant, said))
    assert taken == []
    assert unclear == []


IMPOSSIBLE = [
    (["reference=none"], "reference=frozen"),
    (["batch.group_size=1"], "batch.group_size=1"),
    (["algorithm.minibatches=7"], "algorithm.minibatches=7"),
    (["kl.importance_weight=true", "kl=k1"], "kl.importance_weight"),
    (["algorithm/advantage=gae"], "algorithm/critic=head"),
    (["algorithm/critic=head"], "critic"),
    (["kl=full", "kl.placement=reward"], "kl.placement=loss"),
    (["generation.top_k=5"], "top_k=0"),
    (["~optimizer"], "optimizer"),
    (["~batch.prompts"], "batch.prompts"),
    (["optimizer=sgd"], "adamw"),
    (["schedule=kl_anneal", "kl.coef=-1"], "kl.coef=-1"),
    (["schedule=grpo_to_dapo", "algorithm.epochs=2"], "schedule.phases"),
    (["schedule=on_reward", "schedule.phases.explore.until=-3"], "schedule.phases.explore"),
    (["evaluation.every=5", "evaluation.n=0"], "evaluation.every=5"),
    (["evaluation.stop_at=0.9"], "evaluation.every"),
    (["evaluation.k=[0]"], "evaluation.k"),
]


@pytest.mark.parametrize(
    "overrides, word",
    cases(IMPOSSIBLE, 2, unpack=True),
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_impossible_combinations_are_refused(overrides, word):
    said = refusal(overrides)
    assert said is not None and word in said


GROUPS = sorted(f.name for f in conf_dir().iterdir() if f.is_dir() and f.name != "hydra")


def test_no_option_that_does_not_exist_is_taken():
    """In every group, with the options that there are; one command line, one message."""
    said = refusal([f"{group}=nonsense" for group in GROUPS])
    assert said is not None
    for group in GROUPS:
        assert re.search(rf"{group}=nonsense: no such option.*Options of {group}: \w+", said), group


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["optimizer.lrr=1"],
        ["+batch.nonsense=1"],
        ["trainer.steps=many"],
        ["task=jsonl"],
        ["optimizer.lr=-1"],
        ["-m", "seed=1,x"],
    ],
    ids=" ".join,
)
def test_the_command_refuses_without_a_traceback(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words]) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err and said.err.startswith("rlkit: ")
    assert list(tmp_path.iterdir()) == []
