"""`--json`: one document on standard output, with the keys of docs/commands.md and the figures of
the text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from answers import ANSWERS, misfits
from rlkit.commands.cli import main
from rlkit.runs.folder import write_config
from rlkit.system.extras import has_command
from rlkit.system.identity import read_identity
from run_folders import make_run  # noqa: F401

PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"


@pytest.fixture
def answer(capsys):
    """(words) → the document that the command prints on standard output, and nothing else."""

    def ask(*words, name=None):
        assert main([*words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert list(misfits(found, ANSWERS[name or words[0]])) == []
        return found

    return ask


@pytest.fixture
def text(capsys):
    def ask(*words):
        assert main(list(words)) == 0
        return capsys.readouterr().out

    return ask


@pytest.fixture
def lines(make_run, tmp_path):  # noqa: F811
    """Two folders of ten runs each, of which the second is better by 0.02 and a little."""
    for seed in range(10):
        make_run(f"grpo/{seed}", seed=seed, after=0.8)
        make_run(f"dapo/{seed}", seed=seed, after=0.82 + 0.001 * (seed % 3), title="dapo")
    return [str(tmp_path / "runs" / name) for name in ("grpo", "dapo")]


def test_the_page_has_the_keys_of_each_answer():
    rows = re.findall(r"^\| `rlkit ([^`]+) --json` \| (.+) \|$", PAGE.read_text(), re.M)
    keys = {name: re.findall(r"`(\w+)`(?=[,:]| \(|$)", cells) for name, cells in rows}
    known = {name: [key.removesuffix("?") for key in schema] for name, schema in ANSWERS.items()}
    assert keys == known


def test_a_schema_finds_what_does_not_fit():
    schema = {"a": int, "b?": [str], "c": {str: float}}
    assert list(misfits({"a": 1, "c": {"x": 0.5}}, schema)) == []
    found = list(misfits({"a": "1", "b": [2], "d": 0}, schema))
    assert len(found) == 4 and {text.partition(":")[0] for text in found} == {
        ".a",
        ".b[0]",
        ".c",
        ".d",
    }


def test_metrics(answer, text):
    every = answer("metrics")["metrics"]
    [one] = answer("metrics", "kl/ref_k3")["metrics"]
    assert one in every and len(every) > 50
    assert "kl/ref_k3" in one["names"] and one["unit"] in text("metrics", "kl/ref_k3")


@pytest.mark.slow
def test_show(answer, text):
    """With the translation of a file, which is printed while the words are read."""
    found = answer("show", "algorithm=dapo", "optimizer.lr=0.5")
    [lr] = [own for own in found["values"] if own["key"] == "optimizer.lr"]
    assert lr == {
        "key": "optimizer.lr",
        "value": 0.5,
        "origin": "command line",
        "changed": True,
    }
    assert found["overrides"] == ["algorithm=dapo", "optimizer.lr=0.5"]
    assert re.search(r"lr +0\.5 +command line", text("show", "optimizer.lr=0.5"))


@pytest.mark.slow
def test_what_is_printed_on_the_way_goes_to_standard_error(tmp_path, capsys):
    """The translation of a flat config is printed while the words are read."""
    (tmp_path / "flat.yaml").write_text("training:\n  lr: 0.5\n")
    assert main(["show", "--config", str(tmp_path / "flat.yaml"), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["overrides"][-1] == "optimizer.lr=0.5"
    assert "optimizer.lr=0.5" in printed.err


@pytest.mark.slow
def test_runs_and_their_differences(answer, text, lines, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = answer("runs", "runs", "limit=3")
    assert len(found["runs"]) == 3 and found["more"] == 17
    assert answer("runs", "runs", "seed=77") == {"runs": [], "more": 0}
    newest = found["runs"][0]
    assert newest["test_accuracy"]["before"] == 0.5 and newest["ended"] == "finished"
    assert newest["folder"] in text("runs", "runs", "limit=3")
    pair = [Path(line, "1") for line in lines]
    for folder in pair:
        write_config(folder, yaml.safe_load((folder / "config.yaml").read_text()))
        summary = json.loads((folder / "summary.json").read_text())
        summary["identity"] = read_identity(folder)
        (folder / "summary.json").write_text(json.dumps(summary))
    pair = answer("runs", "diff", *map(str, pair), name="runs diff")
    assert pair["settings"]["name"] == ["grpo", "dapo"]
    assert pair["results"]["test accuracy, after"] == [0.8, 0.821]


@pytest.mark.slow
def test_compare_and_plan(answer, text, lines):
    """A p-value of no comparison and an interval of few seeds are null, since JSON has no nan."""
    found = answer("compare", *lines)
    assert found["lines"] == ["grpo", "dapo"] and found["figure"]["name"] == "test accuracy"
    grpo, dapo = found["figure"]["values"]
    assert grpo["7"] == 0.8 and dapo["7"] == 0.821 and len(dapo) == 10
    [pair] = found["comparisons"]
    assert pair["claim"] == "better" and pair["found"]["n"] == 10
    said = text("compare", *lines)
    assert all(sentence in said for sentence in found["sentences"])
    assert pair["sentence"] == found["sentences"][0]
    [few] = answer("compare", f"{lines[0]}/0", f"{lines[1]}/0")["comparisons"]
    assert few["claim"] == "open" and few["p"] is None and few["found"]["low"] is None

    [need] = answer("plan", *lines, "effect=0.001", "seeds=12")["comparisons"]
    said = text("plan", *lines, "effect=0.001", "seeds=12")
    assert f"dapo against grpo: {need['seeds']} seeds" in said and need["given_seeds"] == 12
    assert f"a difference of {need['seen']:.4f} is found" in said
    [need] = answer("plan", *lines)["comparisons"]
    assert need["given_seeds"] is need["seen"] is None


@pytest.mark.slow
def test_check(answer):
    found = answer("check", "task.max_samples=40", "kl=none", "reference=none")
    assert len(found["rewards"]) == 8 and found["rewards"][0].keys() == {"task"}
    assert found["metrics"]["optim/updates"] == 1 and found["memory"]["peak"] > 0
    assert ("cost" in found) == has_command("forecast")


@pytest.mark.slow
@pytest.mark.skipif(not has_command("forecast"), reason="the extra forecast brings it")
def test_check_of_a_card(answer, text):
    words = ("check", "check.device=h200")
    found = answer(*words, name=" ".join(words))
    step = sum(found["forecast"]["seconds"].values())
    assert f"step        {step:.3g} s: " in text(*words)


@pytest.mark.parametrize("words", [["train"], ["doctor"], ["show", "--cfg", "job"]], ids=" ".join)
def test_where_there_is_no_json_the_word_is_refused(words, capsys):
    assert main([*words, "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and f"rlkit {words[0]} prints no JSON" in printed.err


def test_a_refused_command_prints_no_document(capsys):
    assert main(["compare", "nowhere", "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "nowhere" in printed.err
