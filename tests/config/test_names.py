"""A name that becomes a folder stays inside outputs/: whatever is accepted resolves there, all else
is refused before anything is made."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from rlkit.commands.cli import main
from rlkit.config.functions import quote
from rlkit.config.problems.names import name_problems
from rlkit.runs.sweeps.plan import folder_name

OUTSIDE = [
    "../../x",
    "",
    "/tmp/x",
    "a/../../b",
    ".",
    "..",
    "~",
    "~/x",
    "-x",
    "a/-x",
    "a//b",
    "a/",
    "/",
    "x" * 300,
    "é" * 150,
    "x ",
    " x",
]
ODD = ["a\nb", "a\tb", "a\x7fb", "a\u2028b", "a\u202eb", "a/./b", "a\0b"]
KEPT = [
    "grpo",
    "my run",
    "a/b",
    "grpo_to_dapo",
    "v1.2",
    "run+x=3,y",
    "été",
    "...",
    "a..b",
    ".hidden",
]


@pytest.mark.parametrize("name", [*OUTSIDE, *ODD])
def test_a_name_that_is_no_plain_folder_is_named_with_its_key(name):
    (said,) = name_problems({"name": name, "algorithm": {"name": "grpo"}})
    assert said.startswith("name=") and "\n" not in said and said.isprintable() and len(said) < 300


@pytest.mark.parametrize("name", KEPT)
def test_a_plain_name_is_taken(name):
    assert name_problems({"name": name}) == []


def test_the_message_names_the_key_that_the_name_comes_from():
    assert name_problems({"name": "../x", "algorithm": {"name": "../x"}})[0].startswith(
        "algorithm.name="
    )
    both = {"name": "../x", "algorithm": {"name": "../x"}, "schedule": {"name": "../x"}}
    assert name_problems(both)[0].startswith("schedule.name=")


@pytest.mark.slow
def test_whatever_is_accepted_resolves_inside_outputs():
    """Names of random pieces, most of them hostile."""
    rng = random.Random(34)
    pieces = [
        "..",
        ".",
        "/",
        "//",
        "~",
        "-",
        "a",
        "B",
        " ",
        "\n",
        "\0",
        "\\",
        "x" * 260,
        "é",
        "\udcff",
        "outputs",
        "=",
        ",",
        ":",
        "*",
        "$HOME",
    ]
    accepted = 0
    for _ in range(20_000):
        name = "".join(rng.choice(pieces) for _ in range(rng.randrange(6)))
        if name_problems({"name": name}):
            continue
        accepted += 1
        outputs = Path("/somewhere/outputs")
        place = Path(os.path.normpath(outputs / name))
        assert outputs in place.parents and place == outputs / name, repr(name)
        assert all(len(os.fsencode(part)) < 256 for part in place.parts)
    assert accepted > 500


@pytest.mark.parametrize("command", ["train", "rollout"])
@pytest.mark.parametrize("name", ["../../x", "", "/tmp/rlkit_x", "a/../../b"])
def test_a_command_refuses_before_anything_is_made(command, name, tmp_path, monkeypatch, capsys):
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert main([command, f"name={quote(name)}"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "rlkit: name=" in said
    assert [str(p) for p in tmp_path.rglob("*")] == [str(tmp_path / "a"), str(inside)]


@pytest.mark.slow
def test_a_sweep_refuses_such_a_name_in_any_of_its_jobs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-m", "name=good,'../x'", "debug=fast"]) == 2
    assert "name=../x" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_folder_of_a_job_is_one_plain_part():
    for text in (
        "name=../x,seed=1",
        "a=" + "é" * 150,
        "a=b\nc",
        "a=" + "x" * 400,
        "~kl,seed=1",
        "-x",
        ".",
        "..",
        "",
        "a=\u202e",
    ):
        made = folder_name(text)
        assert (
            "/" not in made
            and made not in ("", ".", "..")
            and made.isprintable()
            and len(os.fsencode(made)) < 200
        ), (text, made)
    assert folder_name("a=" + "é" * 150) != folder_name("a=" + "é" * 151)
    assert (
        folder_name("algorithm=grpo,seed=1") == "algorithm=grpo,seed=1"
    )  # folders of sweeps that are there already
