"""The command `rlkit report`, and the places of the core that show it because it is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlkit.commands.cli import format_full_help
from rlkit.commands.train import draw_page, format_closing_lines
from rlkit.extras.report import charts


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Two charts: this is no question of their number."""
    monkeypatch.setattr(charts, "STATIC", charts.STATIC[:2])
    monkeypatch.setattr(charts, "chart_dynamic", lambda found: ())


def test_the_help_and_the_end_of_a_run_name_it(make_run):
    ended = {"ended": "finished", "steps": 0, "wall_seconds": 1.0, "tokens": 1}
    assert "\n  rlkit report " in format_full_help()
    assert "rlkit report " in format_closing_lines(ended, make_run("a"))


@pytest.mark.slow
def test_a_sweep_has_a_page_of_its_runs_or_a_sentence(make_run, capsys):
    run = make_run("lr=1,seed=0")
    page = run.parent / "report.html"
    draw_page([run, make_run("lr=2,seed=0", lr=2.0)], page)
    assert capsys.readouterr().out == f"report           {page}\n"
    assert "<h2>Settings that differ</h2>" in page.read_text()
    draw_page([run.parent / "nothing"], page)
    said = capsys.readouterr().out
    assert said.startswith("report           none: ") and said.count("\n") == 1


@pytest.mark.slow
def test_a_report_needs_no_torch():
    code = (
        "import sys, rlkit.extras.report\nassert not {'torch', 'lightning', 'pyarrow'} &"
        " set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
