"""The user's own run folders: noted where rlkit writes them, strange once they are moved, copied or
edited."""

from __future__ import annotations

import os
import shutil

import pytest

from rlkit.commands.cli import main
from rlkit.runs import folder as runs
from rlkit.system import noted
from rlkit.system.noted import is_noted, note, state_folder
from rlkit.types import Environment

CONFIG = {"name": "a", "model": {"_target_": "rlkit.models.load_policy", "path": "tiny"}}


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "rlkit" / "runs"


def own_run(folder):
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text("- seed=1\n")
    runs.write_config(folder, CONFIG, new=True)
    return folder


def test_a_new_run_is_noted_under_digests_alone(state, tmp_path):
    folder = own_run(tmp_path / "run")
    assert is_noted(folder) and is_noted(tmp_path / "." / "run")
    (entry,) = state.iterdir()
    assert len(entry.name) == 64 and int(entry.name, 16)
    assert entry.stat().st_mode & 0o077 == 0 or state.stat().st_mode & 0o077 == 0


CHANGES = {
    "moved": lambda folder: folder.rename(folder.with_name("moved")),
    "copied": lambda folder: shutil.copytree(folder, folder.with_name("copied")),
    "config edited": lambda folder: edited(folder, "config.yaml"),
    "overrides edited": lambda folder: edited(folder, ".hydra/overrides.yaml"),
    "a file more": lambda folder: edited(folder, ".hydra/more.yaml"),
    "overrides gone": lambda folder: (folder / ".hydra" / "overrides.yaml").unlink(),
    "config a link": lambda folder: linked(folder),
    "config too large": lambda folder: (folder / "config.yaml").write_bytes(b"#" * (5 << 20)),
    "config gone": lambda folder: (folder / "config.yaml").unlink(),
}


def edited(folder, name):
    with (folder / name).open("a") as file:
        file.write("# a word\n")


def linked(folder):
    (folder / "other").write_bytes((folder / "config.yaml").read_bytes() + b"#")
    (folder / "config.yaml").unlink()
    (folder / "config.yaml").symlink_to(folder / "other")


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_moved_copied_or_edited_is_a_strangers(change, state, tmp_path):
    folder = own_run(tmp_path / "run")
    after = CHANGES[change](folder)
    assert not is_noted(after if change in ("moved", "copied") else folder)
    assert is_noted(folder) == (change == "copied")


def test_rewriting_keeps_a_note_at_every_moment_and_makes_none(state, tmp_path, monkeypatch):
    """A kill may come before and after each file."""
    folder, seen = own_run(tmp_path / "run"), []
    write = runs.write_atomic

    def watched(path, data):
        seen.append(is_noted(folder))
        write(path, data)
        seen.append(is_noted(folder))

    monkeypatch.setattr(runs, "write_atomic", watched)
    for seed in range(2 * noted.KEPT):
        runs.write_hydra(folder, ".hydra/overrides.yaml", f"- seed={seed}\n")
        runs.write_hydra(folder, ".hydra/hydra.yaml", f"a: {seed}\n")
        runs.write_config(folder, CONFIG | {"seed": seed})
    assert len(seen) > 20 and all(seen)
    edited(folder, "config.yaml")
    runs.write_config(folder, CONFIG)  # as at the end of a stranger's run
    assert not is_noted(folder)
    (entry,) = state.iterdir()
    assert len(entry.read_text().splitlines()) <= 1 + noted.KEPT


def test_notes_of_folders_that_are_gone_go(state, tmp_path):
    for name in "abc":
        own_run(tmp_path / name)
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    own_run(tmp_path / "d")
    assert len(list(state.iterdir())) == 2 and is_noted(tmp_path / "c") and is_noted(tmp_path / "d")


@pytest.mark.parametrize("why", ["no HOME", "relative", "a file", "others write", "read only"])
def test_where_nothing_can_be_noted_a_run_is_a_strangers(why, tmp_path, monkeypatch):
    place = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(place))
    if why == "no HOME":
        monkeypatch.delenv("XDG_STATE_HOME")
        monkeypatch.delenv("HOME", raising=False)
    elif why == "relative":
        monkeypatch.setenv("XDG_STATE_HOME", "state")
        monkeypatch.delenv("HOME", raising=False)
    elif why == "a file":
        place.write_text("")
    elif why == "others write":
        (place / "rlkit" / "runs").mkdir(parents=True)
        os.chmod(place / "rlkit" / "runs", 0o777)
    else:
        (place / "rlkit" / "runs").mkdir(parents=True)
        monkeypatch.setattr(
            noted, "write_atomic", lambda *_: (_ for _ in ()).throw(OSError("read-only"))
        )
    folder = own_run(tmp_path / "run")
    assert not is_noted(folder)
    assert (state_folder() is None) == (why != "read only")


def test_the_state_folder_is_the_users(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    note(own_run(tmp_path / "run"))
    assert state_folder() == tmp_path / ".local" / "state" / "rlkit" / "runs"


@pytest.mark.slow
def test_an_own_run_never_asks(tmp_path, monkeypatch, capsys, state):
    """It is trained, resumed twice and evaluated. A copy of it is a stranger's, and stays one after
    it was resumed with trust=true."""
    monkeypatch.chdir(tmp_path)
    small = [
        "debug=fast",
        "evaluation.n=0",
        "generation.max_new_tokens=8",
        "logger=none",
        "trainer.steps=1",
    ]
    strange = (
        "++callbacks.checkpoint.best=null",
        f"+environment.environments.x={{_target_: {__name__}.an_environment}}",
    )
    place, copy = tmp_path / "mine", tmp_path / "copy"
    assert main(["train", *small, *strange, f"hydra.run.dir={place}"]) == 0
    assert is_noted(place)
    for steps in (2, 3):
        assert main(["train", f"resume={place}", f"trainer.steps={steps}"]) == 0
        assert is_noted(place)
    shutil.copytree(place, copy)
    capsys.readouterr()
    assert main(["train", f"resume={copy}", "trainer.steps=4"]) == 2
    assert f"environment.environments.x calls {__name__}.an_environment" in capsys.readouterr().err
    assert main(["train", f"resume={copy}", "trainer.steps=4", "trust=true"]) == 0
    assert (
        f"trusted: environment.environments.x calls {__name__}.an_environment"
        in capsys.readouterr().err
    )
    assert not is_noted(copy)
    assert (
        main(["train", f"resume={copy}", "trainer.steps=5", strange[1]]) == 0
    )  # the user says it himself


def an_environment():
    """A function of the user's."""
    return Environment()
