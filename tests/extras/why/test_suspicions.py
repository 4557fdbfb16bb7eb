"""The last lines of a run, `rlkit compare` and sweeps name the likeliest cause, and are silent on
healthy runs."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml

from extras.why.test_why import FLAT, RISING, ROW, SETTINGS
from parametrise import each
from rlkit.commands.cli import main
from rlkit.commands.compare import list_suspicions
from rlkit.commands.train import draw_page, format_closing_lines
from rlkit.system import extras

ENDED = {"ended": "finished", "steps": 12, "wall_seconds": 1.0, "tokens": 1}
TWELVE = (*FLAT, *FLAT[:3])


@pytest.fixture
def write_run(tmp_path):
    """(name, rewards, settings) → a run folder without rollouts."""

    def write(name, rewards=TWELVE, settings=None):
        folder = tmp_path / name
        folder.mkdir()
        config = SETTINGS | {"name": "grpo", "seed": 0, "kl.coef": 10} | (settings or {})
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        rows = [
            ROW | {"step": i + 1, "reward/mean": r, "kl/coef": config["kl.coef"]}
            for i, r in enumerate(rewards)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return write


def test_the_end_of_a_run_names_the_likeliest_cause_and_how_to_prove_it(write_run):
    folder = write_run("kl")
    said = format_closing_lines(ENDED, folder).splitlines()
    [at] = [i for i, line in enumerate(said) if line.startswith("suspicion: ")]
    assert said[at].startswith("suspicion: The KL penalty is too strong. With kl.coef=10 ")
    # five forks of 8 × 2 s and 256 replies of 1/32 s: 2 minutes, and half as much again
    assert said[at + 1] == f"  to prove it: rlkit why {shlex.quote(str(folder))} minutes=4"
    assert not said[at + 2].startswith(("suspicion", "  to prove"))


@each(
    ("rewards", "settings"),
    [
        ((*RISING, 0.76, 0.78, 0.80), {}),
        (TWELVE[:9], {}),
        (TWELVE, {"kl.coef": 0.05}),
    ],
)
def test_nothing_is_said_of_a_run_that_rises_or_is_short_or_has_nothing_odd(
    write_run, rewards, settings
):
    name = f"{len(rewards)} steps to {rewards[-1]}, {settings}"
    assert list_suspicions([write_run(name, rewards, settings)]) == []


def test_a_run_with_a_scheduled_group_size_has_its_findings_and_a_command(write_run):
    """No number can be multiplied, and nothing forecast."""
    folder = write_run("kl", settings={"batch.group_size": {"_target_": "my.schedule"}})
    said = format_closing_lines(ENDED, folder)
    assert "suspicion: The KL penalty is too strong." in said and " minutes=1\n" in said


def test_a_line_is_suspected_if_most_of_its_seeds_are(write_run):
    rising = (*RISING, 0.76, 0.78, 0.80)
    own = [write_run(f"a{seed}", settings={"seed": seed}) for seed in range(2)]
    own.append(write_run("a2", rising, {"seed": 2}))
    small = [
        write_run(f"b{seed}", rewards, {"seed": seed, "kl.coef": 20})
        for seed, rewards in enumerate((TWELVE, rising, rising))
    ]
    said = list_suspicions([*own, *small])
    assert said[0] == "suspicion: grpo, kl.coef=10: The KL penalty is too strong."
    assert said[1] == f"  to prove it: rlkit why {shlex.quote(str(own[0]))} minutes=4"
    assert len(said) == 2


@pytest.mark.slow
def test_two_lines_are_named_and_more_are_counted(write_run, capsys):
    folders = [write_run(f"kl{coef}", settings={"kl.coef": coef}) for coef in (10, 20, 30)]
    assert main(["compare", *map(str, folders)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("suspicion: ") for line in out) == 2
    assert out[-1] == "  suspicions on 1 more lines: rlkit why RUN"
    draw_page(folders, folders[0] / "report.html")
    assert "suspicion: grpo, kl.coef=10: " in capsys.readouterr().out


def test_without_the_extra_nothing_is_said(write_run, monkeypatch):
    folder = write_run("kl")
    monkeypatch.setattr(extras, "FOLDER", folder)
    assert list_suspicions([folder]) == []
    assert "suspicion" not in format_closing_lines(ENDED, folder)
