"""A run folder from a stranger: its config is data until the user says otherwise, and nothing in it
ends a command with a traceback."""

from __future__ import annotations

import json
import random

import pytest

from parametrise import cases, each
from rlkit.commands.cli import main
from rlkit.config.compose import compose, conf_dir
from rlkit.config.trust import (
    Folder,
    find_named_functions,
    find_unsafe_values,
    read_yaml,
    require_trust,
    with_environment,
)
from rlkit.errors import ConfigError, DataError
from rlkit.runs import folder as runs
from rlkit.runs import verdicts
from rlkit.runs.reading import group_runs, read_run
from rlkit.runs.trends import find_symptoms
from run_folders import LAUGHS, damage_run

MODEL = {"_target_": "rlkit.models.load_policy", "_partial_": True, "path": "tiny"}


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A run folder whose config names a module; importing that leaves a file behind. (folder, file,
    module)"""
    trace, name = (
        tmp_path / "imported",
        f"strange_{tmp_path.name}",
    )  # a name of its own: what was imported once stays
    (tmp_path / f"{name}.py").write_text(
        f"open({str(trace)!r}, 'w').close()\n\ndef call(*a, **k):\n    raise ValueError('it ran')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "run"
    (folder / ".hydra").mkdir(parents=True)
    config = compose([]).config
    config["model"] = {"_target_": f"{name}.call", "_partial_": False}
    runs.write_config(folder, config)
    (folder / ".hydra" / "overrides.yaml").write_text(f"- ++model._target_={name}.call\n")
    for file in ("batch.pt", "state.ckpt"):
        (folder / file).write_bytes(b"")
    return folder, trace, name


COMMANDS = {
    "export": ["export", "run={}"],
    "agent": ["agent", "Who are you?", "run={}"],
    "evaluate": ["evaluate", "run={}"],
    "replay": ["replay", "bundle={}"],
}


@pytest.mark.parametrize("command", cases(COMMANDS, 2))
def test_code_of_a_stranger_is_not_even_imported(stranger, command, capsys):
    folder, trace, name = stranger
    words = [word.format(folder) for word in COMMANDS[command]]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"model calls {name}.call" in said and "say trust=true" in said and said.count("\n") == 1
    assert not trace.exists()
    # it is imported and called; then there is no model
    assert main([*words, "trust=true"]) in (1, 2)
    said = capsys.readouterr().err
    assert "it ran" in said or "path" in said
    assert trace.exists()
    assert (
        main([*words, "trust=perhaps"]) == 2
        and "trust=perhaps: must be true or false" in capsys.readouterr().err
    )


def test_what_the_user_names_himself_needs_no_trust():
    """An option of the user's own folder, or a function on the command line, is his."""
    node = {"reward": {"_target_": f"{__name__}.test_what_rlkit_writes_it_can_read"}}
    for own in (
        f"reward._target_={node['reward']['_target_']}",
        f"_target_: {node['reward']['_target_']}\n",
    ):
        assert list(find_unsafe_values(node, Folder(conf_dir(), find_named_functions(own)))) == []
    for own in (f"reward={__name__}.test_what_rlkit_writes_it_can_read", ""):
        said = list(find_unsafe_values(node, Folder(conf_dir(), find_named_functions(own))))
        assert said == [f"reward calls {node['reward']['_target_']}"]
    with pytest.raises(ConfigError, match=r"run=a: .*reward calls .*say trust=true"):
        require_trust(said, "run=a", trusted=False)


def test_what_is_trusted_is_printed(capsys):
    require_trust(["reward calls strange.call\x1b[2J"], "run=a", trusted=True)
    assert capsys.readouterr().err == "run=a: trusted: reward calls strange.call\\x1b[2J\n"


@each(
    "node",
    [
        {
            "_target_": "rlkit.distributed.launch.start_ranks",
            "command": ["sh"],
            "count": 1,
        },  # of rlkit, but no part of a run
        {"_target_": "os.system", "_args_": ["true"]},
        {"_target_": ["os.system"]},
        MODEL | {"trust_remote_code": True, "revision": "0" * 40},
        MODEL | {"path": "someone/${oc.env:HOME}"},
    ],
)
def test_every_way_to_code_outside_is_seen(node):
    for place in (node, {"deep": [{"down": node}]}):
        assert len(list(find_unsafe_values(place, Folder(conf_dir())))) >= 1


def test_values_of_the_environment_come_from_it_again(monkeypatch):
    monkeypatch.setenv("WHERE", "somewhere/else")
    assert with_environment({"a": ["${oc.env:WHERE}/b", 3]}) == {"a": ["somewhere/else/b", 3]}
    monkeypatch.delenv("WHERE")
    with pytest.raises(ConfigError, match=r"a: .*environment variable WHERE, which is not set"):
        with_environment({"a": ["${oc.env:WHERE}/b"]})


# -------------------------------------------------------------------------------- files that attack

BAD = {
    "aliases that explode": LAUGHS,
    "merge keys that explode": "a: &a {x: 1}\nb: {<<: *a}\n",
    "an alias of itself": "a: &a [*a]\n",
    "too deep": "[" * 3000,
    "too large": "a: " + "x" * (5 << 20),
    "a tag": "!!python/object/apply:os.system [true]\n",
    "no mapping": "- 1\n- 2\n",
    "nothing": "",
    "half": "model: {path: ti",
    "no text": "\x00\x01\x02",
}


@pytest.mark.parametrize("kind", cases(BAD, 1))
def test_a_config_that_attacks_is_one_sentence(tmp_path, kind, capsys):
    folder = tmp_path / "run"
    (folder / ".hydra").mkdir(parents=True)
    (folder / "config.yaml").write_text(BAD[kind])
    with pytest.raises(DataError, match=r"config\.yaml"):
        runs.read_config(folder)
    assert main(["export", f"run={folder}"]) == main(["agent", "Who?", f"run={folder}"]) == 2
    (folder / ".hydra" / "overrides.yaml").write_text(
        BAD[kind] if kind != "no mapping" else "a: 1\n"
    )
    assert main(["evaluate", f"run={folder}"]) == main(["train", f"resume={folder}"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 4 and "Traceback" not in said
    assert runs.find_unfinished_run("run", {}) is None


def test_what_rlkit_writes_it_can_read(tmp_path):
    """A list that stands at two places is written twice, not as an alias."""
    shared = ["q_proj", "v_proj"]
    runs.write_config(tmp_path, {"a": shared, "b": {"c": shared, "d": None, "e": 1e-06}})
    assert runs.read_config(tmp_path) == {"a": shared, "b": {"c": shared, "d": None, "e": 1e-06}}
    assert read_yaml(tmp_path / "config.yaml")["b"]["c"] == shared


# ------------------------------------------------------------------------------ readers of odd rows


@pytest.mark.parametrize(
    "first, last", cases([(0, 1), *((n, n + 2) for n in range(1, 17, 2))], [(0, 1)], unpack=True)
)
def test_reading_survives_whatever_stands_in_a_run_folder(first, last, tmp_path):
    """Each number, text and mapping of metrics.jsonl, summary.json, run.json and the rollouts is
    replaced by another type, at random."""
    generator = random.Random(first)
    found = []
    for case in range(first, last):
        folder = tmp_path / "runs" / str(case)
        damage_run(folder, case, generator)
        runs.write_start(folder, {}, {})
        runs.read_summary(folder)
        found.append(read_run(folder))
        assert any("metrics.jsonl: " in note and "left out" in note for note in found[-1].notes)
        find_symptoms(found[-1])
    groups = group_runs(found)
    verdicts.find_falls(groups)
    compared = verdicts.find_shared_figure(groups)
    if compared:
        verdicts.judge_lines(groups, compared)


def test_a_rollout_of_other_types_is_left_out_with_its_field(tmp_path):
    """It was loaded, and the first reader that touched the field failed."""
    from rlkit.episodes import load_rollouts, save_rollouts
    from rlkit.types import Rollout, Step, Task

    step = Step(
        ({"role": "user", "content": "hi"},), (1,), (2, 3), (-0.1, -0.2), "stop", content="ho"
    )
    file = tmp_path / "rollouts.jsonl"
    save_rollouts(file, [Rollout(Task("t", step.prompt, "4"), (step,), reward=1.0)] * 2)
    good, bad = (json.loads(line) for line in file.read_text().splitlines())
    for place, key, value in (
        ("steps", "content", 3),
        ("steps", "logprobs", ["x"]),
        ("steps", "tool_calls", "xxx"),
        ("task", "answer", []),
        ("", "reward", "high"),
    ):
        broken = json.loads(json.dumps(bad))
        node = (
            broken["steps"][0]
            if place == "steps"
            else broken["task"]
            if place == "task"
            else broken
        )
        node[key] = value
        file.write_text(json.dumps(good) + "\n" + json.dumps(broken))
        with pytest.warns(
            UserWarning, match=rf"rollouts\.jsonl:2: not a rollout.*{key} has another type"
        ):
            assert len(load_rollouts(file)) == 1
