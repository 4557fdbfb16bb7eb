"""What a stranger's folder may set: a verdict for each parameter of a shipped function, and the
commands that ask for the rest."""

from __future__ import annotations

import inspect
import itertools
import shutil
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from parametrise import available, cases, each, every_extra, presets
from rlkit.commands.arguments import Arguments, append_overrides
from rlkit.commands.cli import list_commands, main
from rlkit.commands.trust import make_asker
from rlkit.config.compose import compose, compose_without_values, conf_dir
from rlkit.config.functions import format_literal
from rlkit.config.schema import resolve, signature_hints
from rlkit.config.trust import (
    UNDECLARED,
    Folder,
    find_unsafe_values,
    is_safe_by_type,
    read_declarations,
    read_shipped_values,
)
from rlkit.errors import ConfigError
from rlkit.models.load import TINY
from rlkit.runs import folder as runs
from rlkit.system.extras import explain_missing
from rlkit.types import REACHES, reaches, safe

SHIPPED = [name for name in sorted(read_shipped_values(conf_dir())) if not explain_missing(name)]
BY = Folder(conf_dir())


def settable(target: str) -> list[str]:
    """The parameters that a config can set: a function's required positional ones are what it is
    called with."""
    function = resolve(target)
    return [
        key
        for key, p in inspect.signature(function).parameters.items()
        if inspect.isclass(function)
        or p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD)
        or p.default is not p.empty
    ]


REACHING = [
    (target, key)
    for target in SHIPPED
    for key in settable(target)
    if read_declarations(target)[key].word
]


@each("target", SHIPPED)
def test_every_parameter_has_a_verdict(target):
    words = {key: read_declarations(target)[key].word for key in settable(target)}
    assert UNDECLARED not in words.values(), f"@safe or @reaches is missing for {target}: {words}"


def without_verdict(*, where: str, count: int = 1, ways: Literal["a", "b"] = "a", made: Any = None):
    """Stands for a new function."""


@reaches(where="path")
@safe("made")
def with_verdict(*, where: str, made: Any = None):
    """Stands for a function that somebody has thought about."""


def test_a_new_parameter_without_a_verdict_is_not_safe():
    words = {
        key: found.word for key, found in read_declarations(f"{__name__}.without_verdict").items()
    }
    assert words == {"where": UNDECLARED, "count": "", "ways": "", "made": UNDECLARED}
    assert {
        key: found.word for key, found in read_declarations(f"{__name__}.with_verdict").items()
    } == {
        "where": "path",
        "made": "",
    }
    with pytest.raises(ValueError, match="no parameter 'other'"):
        safe("other")(without_verdict)
    with pytest.raises(ValueError, match="no word 'moon'"):
        reaches(where="moon")


@each(
    "hint, expected",
    [(int, True), (float | None, True), (Literal["a"], True), (bool, True), (Path, True)]
    + [
        (hint, False)
        for hint in (
            str,
            str | None,
            Sequence[int],
            Mapping[str, float],
            Any,
            object,
            typing.Callable,
            float | str,
        )
    ],
)
def test_safe_by_type(hint, expected):
    assert is_safe_by_type(hint) == expected


# ------------------------------------------------------------------------------ a stranger's folder


def bad_value(target: str, key: str, canary: str) -> Any:
    """A value of the parameter's kind that no shipped option gives."""
    found = read_declarations(target)[key]
    if found.word == "calls":
        return {"x": {"_target_": "rlkit.tasks.jsonl", "_partial_": True}}
    hint = signature_hints(resolve(target)).get(key, Any)
    if found.plain:
        alternatives = [True, *typing.get_args(hint)]
        return next(
            value
            for value in alternatives
            if value != found.default and (hint is bool) == isinstance(value, bool)
        )
    text = str(hint)
    if "Mapping" in text and "Sequence[str] | None" not in text:
        return {"x": canary}
    return [canary] if "Sequence" in text else canary


def node_of(target: str, key: str, canary: str) -> dict[str, Any]:
    name = (
        "further"
        if inspect.signature(resolve(target)).parameters[key].kind is inspect.Parameter.VAR_KEYWORD
        else key
    )
    return {"_target_": target, "_partial_": True, name: bad_value(target, key, canary)}


@each("target, key", REACHING)
def test_what_is_not_declared_safe_is_found_wherever_it_stands(target, key):
    """Alone, deep inside, beside a shipped value; and not where the user says the same himself."""
    node = node_of(target, key, "canary")
    for place in (
        node,
        {"deep": [{"down": node}]},
        {"task": {"suggests": {"kl": node}, "_target_": "rlkit.tasks.arithmetic"}},
    ):
        said = list(find_unsafe_values(place, BY))
        assert any(
            f"{key}" in what or "further" in what or "policy call" in what for what in said
        ), said
        assert list(find_unsafe_values(place, BY, place)) == []
    other = {**node, "_target_": "rlkit.tasks.arithmetic"}
    assert list(
        find_unsafe_values(node, BY, other)
    )  # the same value under another function is another value


THERE = list_commands()
ASKING = [c for c in ("evaluate", "train", "replay", "export", "agent", "serve") if c in THERE]
# The commands in turns: what is found does not depend on the command, which the test above has for
# every parameter; and whether a command asks does not depend on what is found.
CASES = [(command, *case) for command, case in zip(itertools.cycle(ASKING), REACHING, strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize("command, target, key", cases(CASES, len(ASKING) + 2, unpack=True))
def test_each_command_refuses_what_is_not_declared_safe(
    command, target, key, tmp_path, capsys, monkeypatch
):
    """Generated from the declarations. Nothing is executed: the canary would be a file."""
    monkeypatch.chdir(tmp_path)
    canary, folder = tmp_path / "canary", tmp_path / "run"
    node = node_of(target, key, str(canary))
    (folder / ".hydra").mkdir(parents=True)
    config = compose([]).config
    config["callbacks"]["strange"] = node
    if command in ("export", "agent", "serve"):
        config["model"] = node
    runs.write_config(folder, config)
    (folder / ".hydra" / "overrides.yaml").write_text(
        yaml.safe_dump([f"+callbacks.strange={format_literal(node)}"])
    )
    for file in ("batch.pt", "state.ckpt"):
        (folder / file).write_bytes(b"")
    words = {"train": f"resume={folder}", "replay": f"bundle={folder}"}.get(
        command, f"run={folder}"
    )
    assert main([command, *(["Who?"] if command == "agent" else []), words]) == 2
    said = capsys.readouterr().err
    place = "model" if command in ("export", "agent", "serve") else "callbacks.strange"
    name = next(name for name in node if name not in ("_target_", "_partial_"))
    assert f"{place}.{name}" in said and "say trust=true" in said and said.count("\n") == 1, said
    assert not canary.exists()


@pytest.mark.slow
@pytest.mark.parametrize("experiment", cases([None, *presets()], 3))
def test_runs_of_shipped_options_need_no_trust(experiment):
    words = (
        [f"experiment={experiment}", *(["task.path=rows.jsonl"] if experiment == "sft" else [])]
        if experiment
        else []
    )
    config = compose(words).config
    base = compose_without_values([], words, entry="train", config_dir=None)
    assert list(find_unsafe_values(config, BY, base)) == []
    rows = [what for what in find_unsafe_values(config, BY) if "rows.jsonl" not in what]
    assert rows == []  # also where only the written config is there to look at


OVERRIDES = {
    "a weaker sandbox": (
        ["sandbox=weak"],
        "sandbox.allow_weak=True can reach what the sandbox keeps out",
    ),
    "a weaker sandbox by value": (["sandbox.min_level=basic"], "sandbox.min_level=basic"),
    "one tool's sandbox": (
        [
            "++environment.environments.python.tools.python.sandbox={_target_:"
            " rlkit.sandbox.Sandbox, allow_weak: true}"
        ],
        "environment.environments.python.tools.python.sandbox.allow_weak=True",
    ),
    "a search path": (
        ["hydra.searchpath=[pkg://strange]"],
        "hydra.searchpath=[pkg://strange] can reach an import",
    ),
    "a search path behind a space": ([" hydra.searchpath=[pkg://strange]"], "can reach an import"),
    "a place of Hydra's": (
        ["hydra.run.dir=elsewhere"],
        "hydra.run.dir=elsewhere can reach an import",
    ),
    "a callback of Hydra's": (["+hydra.callbacks.x={_target_: os.system}"], "can reach an import"),
    "variables of Hydra's": (["+hydra.job.env_set.LD_PRELOAD=x.so"], "can reach an import"),
    "an option put into Hydra": (["+model@hydra.callbacks.x=tiny"], "can reach an import"),
    "a launcher": (["hydra/launcher=joblib"], "can reach an import"),
    "the environment": (
        ["name=${oc.env:HOME}"],
        "name=${oc.env:HOME} can reach an environment variable",
    ),
    "the environment in disguise": (
        ["++a=oc", "name=${${a}.env:HOME}"],
        "can reach an environment variable",
    ),
    "a decoded variable": (
        ["name=${oc.decode:${oc.env:HOME}}"],
        "can reach an environment variable",
    ),
    "a model elsewhere": (
        ["model.path=someone/model"],
        "model.path=someone/model can reach a path",
    ),
    "a kernel of the hub": (
        ["model.attention=someone/kernel"],
        "model.attention=someone/kernel can reach a program",
    ),
    "code of a model": (
        ["model.trust_remote_code=true"],
        "model.trust_remote_code=True can reach a program",
    ),
    "a template": (["model.chat_template=a.jinja"], "model.chat_template=a.jinja can reach a path"),
    "a function by reference": (
        ["++a=os.system", "++callbacks.x._target_=${a}"],
        "callbacks.x calls os.system",
    ),
    "no function of options": (
        ["++callbacks.x._target_=rlkit.distributed.launch.start_ranks"],
        "callbacks.x calls rlkit.dist",
    ),
    "a function of a comment": (
        ["environment=program", "environment.function={_target_:my_module.play}"],
        "calls my_module.play",
    ),
    "what an optimizer's module holds": (
        ["optimizer._target_=torch.optim.optimizer.deepcopy"],
        "calls torch.optim.optimizer.deepcopy",
    ),
    "a tool that reads files": (
        [
            "+environment.environments.tool_use.tools.x={_target_: rlkit.tasks.jsonl, _partial_:"
            " true}"
        ],
        "tools.x lets the policy call rlkit.tasks.jsonl, whose path can reach a path",
    ),
    "arguments by position": (
        ["++callbacks.health._args_=[x]"],
        "callbacks.health._args_=[x] can reach",
    ),
    "variables of a program": (
        ["environment=program", "++environment.variables.LD_PRELOAD=x.so"],
        "can reach an environment variable",
    ),
    "a program": (
        ["environment=program", "environment.command=[touch,ran]"],
        "environment.command=[touch, ran] can reach a program",
    ),
    "a logger that sends": (
        ["logger=wandb", "logger.wandb.mode=online"],
        "logger.wandb.mode=online can reach an address",
    ),
    "an option outside": (
        ["environment=../../../../elsewhere/option"],
        "environment=../../../../elsewhere/option can reach a path",
    ),
    "an option outside, by a slash": (
        ["environment='/../../../../elsewhere/option'"],
        "can reach a path",
    ),
    "an option outside, in a list": (
        ["reward=[numeric,../../../../elsewhere/option]"],
        "can reach a path",
    ),
    "an address": (
        ["logger=mlflow", "logger.mlflow.tracking_uri=http://elsewhere"],
        "can reach an address",
    ),
    "an endless pattern": (
        ["reward=format", "reward.terms.format.fn.pattern='(a+)+$'"],
        "can reach the processor without a limit",
    ),
}


class Asked(Exception):
    """Ends a composition once the folder has been judged."""


def judge(folder: Path, mine: list[str], entry: str) -> None:
    """Raises ConfigError where a command would ask; otherwise Asked, before anything is
    imported."""
    ask = make_asker(f"run={folder}", folder, mine, Arguments(mine), entry=entry, own_model=True)

    def stop(config):
        ask(config)
        raise Asked

    compose(append_overrides(runs.read_overrides(folder), mine), entry=entry, before_import=stop)


OVERRIDES = {kind: case for kind, case in OVERRIDES.items() if all(map(available, case[0]))}
FAST = {"a weaker sandbox", "a search path behind a space", "a program"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:provider=hydra.searchpath")
@pytest.mark.parametrize("kind", cases(OVERRIDES, FAST & OVERRIDES.keys()))
def test_every_way_around_is_closed(kind, tmp_path, monkeypatch):
    """Each is refused by evaluate and by resume, and none where the user says the same on his own
    command line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "strange").mkdir()
    overrides, expected = OVERRIDES[kind]
    folder = tmp_path / "run"
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    for entry in ("evaluate", "train"):
        with pytest.raises(ConfigError) as refused:
            judge(folder, [], entry)
        assert expected in str(refused.value) and "say trust=true" in str(refused.value)
        with pytest.raises((Asked, ConfigError)) as ended:
            judge(folder, overrides, entry)
        assert "say trust=true" not in str(ended.value)
    assert not (tmp_path / "ran").exists()


def test_a_model_in_the_folder_is_the_folders_own(tmp_path):
    """Its weights are data. One beside it, or a link out of it, is not."""
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "run" / "link").symlink_to(tmp_path / "other")
    by = Folder(conf_dir(), place=tmp_path / "run")
    for name, count in {
        "run/model": 0,
        "other": 1,
        "run/link": 1,
        "run/../other": 1,
        "run/absent": 1,
    }.items():
        node = {
            "model": {
                "_target_": "rlkit.models.load_policy",
                "_partial_": True,
                "path": str(tmp_path / name),
            }
        }
        assert len(list(find_unsafe_values(node, by))) == count, name
        assert len(list(find_unsafe_values(node, BY))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("command", cases([["agent", "Who?"], ["evaluate"]], 1))
def test_a_hostile_template_of_a_folder_ends_a_command(command, tmp_path, monkeypatch, capsys):
    """The model lies in the folder, so nothing is asked; its template would take all memory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "rlkit.commands.evaluate.restore_policy",
        lambda policy, checkpoint, engine=None: (checkpoint, 0),
    )
    folder = tmp_path / "run"
    shutil.copytree(TINY, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text("{{ messages[0].role * 10**12 }}")
    (folder / ".hydra").mkdir()
    config = compose([f"model.path={folder}/model"]).config
    runs.write_config(folder, config)
    (folder / ".hydra" / "overrides.yaml").write_text(f"- model.path={folder}/model\n")
    assert main([*command, f"run={folder}"]) == 2
    said = capsys.readouterr().err
    assert (
        "the chat template of" in said
        and "was stopped: one prompt took more than 2 s" in said
        and "Traceback" not in said
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", list_commands())
def test_every_command_takes_trust(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = []
    if command in ("train", "check", "rollout", "evaluate", "serve", "agent"):
        words = ["nothing=1"]  # stops them before a model is loaded
    main([command, *words, "trust=true"])
    said = capsys.readouterr().err
    assert "trust" not in said, said
    if command != "doctor":
        assert main([command, *words, "trust=perhaps"]) == 2
        assert "trust=perhaps: must be true or false" in capsys.readouterr().err


def test_the_words_of_reach_are_used():
    used = {read_declarations(target)[key].word for target, key in REACHING}
    assert used == set(REACHES) or (used < set(REACHES) and not every_extra())
