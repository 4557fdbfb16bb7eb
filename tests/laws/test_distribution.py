"""The distribution has a name of its own: on the public package index `rlkit` is another
project."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path

import pytest

from rlkit import errors

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = [
    f
    for folder in ("rlkit", "conf", "docs", "examples", "tests", ".ci")
    for f in (ROOT / folder).rglob("*")
    if f.suffix in (".py", ".yaml", ".md", ".toml", ".sh", "")
    and f.is_file()
    and "__pycache__" not in f.parts
]


def installed(name: str, command: str) -> Distribution:
    """A distribution as the metadata shows it, with one command."""

    class Fake(Distribution):
        metadata = {"Name": name}  # noqa: RUF012
        entry_points = (EntryPoint("rlkit", command, "console_scripts"),)

        def read_text(self, filename: str) -> None: ...

        def locate_file(self, path: object) -> Path:
            return Path(str(path))

    return Fake()


@pytest.mark.slow
def test_no_file_tells_to_install_the_other_project():
    told = re.compile(r"""pip install [^\n&]*['" ]rlkit([\['"\s]|==|$)|\brlkit\[""")
    others = [f for f in (*TEXTS, ROOT / "README.md") if f != Path(__file__)]
    wrong = [str(f.relative_to(ROOT)) for f in others if told.search(f.read_text(errors="replace"))]
    assert len(others) > 300 and wrong == []


def test_extras_refer_to_the_name_in_pyproject():
    assert PROJECT["name"] != "rlkit"
    own = [
        line
        for lines in PROJECT["optional-dependencies"].values()
        for line in lines
        if line.startswith("rlkit")
    ]
    assert own and all(line.startswith(f"{PROJECT['name']}[") for line in own)


def test_a_checkout_installs_from_itself(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert errors.install("math") == "pip install -c constraints.txt -e '.[math]'"
    monkeypatch.chdir(ROOT.parent)
    assert errors.install("math") == f"cd {ROOT} && pip install -c constraints.txt -e '.[math]'"


def test_outside_a_checkout_the_distribution_is_named_even_beside_the_other_project(
    monkeypatch, tmp_path
):
    both = [
        installed("rlkit", "rlkit.launchers:main"),
        installed("ours", "rlkit.commands.cli:main"),
    ]
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "rlkit" / "errors.py"))
    monkeypatch.setattr(errors, "distributions", lambda: both)
    assert errors.install("math") == "pip install 'ours[math]'"
    monkeypatch.setattr(errors, "distributions", lambda: both[:1])
    assert "rlkit[" not in errors.install("math") and "'math'" in errors.install("math")


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["wandb", "mlflow", "trackio"])
def test_a_logger_installs_beside_the_pinned_versions(extra):
    """trackio takes pillow below 13, which was pinned."""
    words = ["install", "-q", "--dry-run", "--ignore-installed", "-c", "constraints.txt"]
    wanted = PROJECT["optional-dependencies"][extra]
    command = [sys.executable, "-m", "pip", *words, *wanted]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    if "No matching distribution" in done.stderr or "Connection" in done.stderr:
        pytest.skip(f"no package index here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
