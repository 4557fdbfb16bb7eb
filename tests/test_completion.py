"""What the tab key offers: commands, groups, options, keys, run folders; and that bash puts it in the right place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from rlkit.commands.cli import main
from rlkit.commands.completion import complete
from rlkit.config.compose import conf_dir, keys

COMMANDS = ("train", "check", "rollout", "doctor")


def offered(line, composed=()):
    return complete(line, COMMANDS, lambda entry, overrides, own: composed)


ALGORITHMS = sorted(f.stem for f in (conf_dir() / "algorithm").glob("*.yaml"))


@pytest.mark.parametrize(
    "line, words",
    {
        "rlkit tr": ["train"],
        "rlkit train algo": ["algorithm/", "algorithm="],
        "rlkit train algorithm=": [f"algorithm={name}" for name in ALGORITHMS],
        "rlkit train algorithm=grpo,da": ["algorithm=grpo,dapo"],
        "rlkit train reward=[numeric,for": ["reward=[numeric,format"],
        "rlkit train algorithm/crit": ["algorithm/critic/loss=", "algorithm/critic="],
        "rlkit train algorithm/critic=h": ["algorithm/critic=head"],
        "rlkit train +kl@schedule.phases.a.kl=trunc": ["+kl@schedule.phases.a.kl=truncated"],
        "rlkit train see": ["seed="],
        "rlkit train --con": ["--config-dir"],
        "rlkit rollout num_": ["num_return_sequences="],
        "rlkit train nothing_of_this_name": [],
        "rlkit doctor ": [],
    }.items(),
)
def test_what_is_offered(line, words):
    assert offered(line) == words


def test_keys_come_one_dot_at_a_time():
    composed = ["optimizer.lr", "optimizer.betas", "algorithm.policy_loss.clip_low", "algorithm.policy_loss.clip_high"]
    assert offered("rlkit train optimizer.", composed) == ["optimizer.betas=", "optimizer.lr="]
    assert offered("rlkit train algorithm.pol", composed) == ["algorithm.policy_loss."]
    assert offered("rlkit train ++algorithm.policy_loss.clip_l", composed) == ["++algorithm.policy_loss.clip_low="]


def test_keys_are_those_of_the_options_chosen_so_far():
    assert "algorithm.advantage.lam" in keys(["algorithm=ppo"]) and "algorithm.advantage.lam" not in keys([])
    assert "task.path" in keys(["task=jsonl"])  # what is missing is what most needs to be offered


def test_options_of_ones_own_folder(tmp_path):
    (tmp_path / "kl").mkdir()
    (tmp_path / "kl" / "mine.yaml").touch()
    assert offered(f"rlkit train --config-dir {tmp_path} kl=m") == ["kl=mine"] == offered(f"rlkit train --config-dir={tmp_path} kl=m")


def test_run_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs/grpo/a").mkdir(parents=True)
    (tmp_path / "outputs/grpo/a/config.yaml").touch()
    (tmp_path / "outputs/grpo/no_run").mkdir()
    assert offered("rlkit train resume=outputs/g") == ["resume=outputs/grpo/a"]


def test_what_cannot_be_composed_is_no_message(capsys):
    assert main(["--complete", "rlkit train algorithm=nothing optimizer.l"]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == captured.err == ""


def test_another_shell_is_refused(capsys):
    assert main(["--completion", "tcsh"]) == 2 and "bash" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    "line, replies",
    {
        "rlkit train algo": ["algorithm/", "algorithm="],
        "rlkit train algorithm=gsp": ["gspo", "gspo_token"],  # bash replaces only what stands behind the last =
        "rlkit train algorithm=grpo,da": ["grpo,dapo"],
    }.items(),
)
def test_bash_takes_it(line, replies, tmp_path):
    (tmp_path / "rlkit").write_text(f'#!/bin/sh\nexec {sys.executable} -m rlkit "$@"\n')
    (tmp_path / "rlkit").chmod(0o755)
    program = 'eval "$($0 --completion bash)"; COMP_LINE="$1" COMP_POINT=${#1}; _rlkit "$0"; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", program, str(tmp_path / "rlkit"), line], capture_output=True, text=True, check=True)
    assert done.stdout.split() == replies and done.stderr == ""


def program(folder):
    """A folder for PATH with the command `rlkit` of this environment."""
    (folder / "rlkit").write_text(f'#!/bin/sh\nexec {sys.executable} -m rlkit "$@"\n')
    (folder / "rlkit").chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
def test_zsh_takes_it(tmp_path):
    """What goes to compadd: words that go on get no space behind them. Where nothing is offered, files are."""
    before = 'compdef() { : }; compadd() { print -r -- "$@" }; _files() { print files }'
    words = {
        "rlkit train algo": ["-Q -S  -- algorithm/ algorithm=", "-Q --"],
        "rlkit train algorithm=gsp": ["-Q -S  --", "-Q -- algorithm=gspo algorithm=gspo_token"],
        "rlkit report ": ["files"],
    }
    calls = "; ".join(f"line='{line}'; words=(\"${{(@s: :)line}}\"); CURRENT=$#words; _rlkit" for line in words)
    text = f'{before}; eval "$(rlkit --completion zsh)"; {calls}'
    done = subprocess.run(["zsh", "-f", "-c", text], env=program(tmp_path), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [line for lines in words.values() for line in lines] and done.stderr == ""


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish")
@pytest.mark.parametrize(
    "line, replies",
    {"rlkit train algorithm=gsp": ["algorithm=gspo", "algorithm=gspo_token"], "rlkit train algo": ["algorithm/", "algorithm="]}.items(),
)
def test_fish_takes_it(line, replies, tmp_path):
    text = f"rlkit --completion fish | source; complete -C '{line}'"
    done = subprocess.run(["fish", "-N", "-c", text], env=program(tmp_path), capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == sorted(replies) and done.stderr == ""
