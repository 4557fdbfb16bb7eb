"""What an editor completes, asked of jedi, and that the list of names is the only one."""

from __future__ import annotations

import inspect
from pathlib import Path

import jedi
import pytest

import rlkit
from rlkit.config.experiment import experiment

RUN = 'import rlkit\n\nrun = rlkit.train(rlkit.experiment("kl=none"))\n'


def completed(text: str) -> set[str]:
    """What jedi offers at the end of a text."""
    lines = text.splitlines()
    script = jedi.Script(text, project=jedi.Project("."))
    return {found.name for found in script.complete(len(lines), len(lines[-1]))}


@pytest.mark.slow
def test_the_names_of_the_package_complete():
    assert set(rlkit.__all__) <= completed("import rlkit\n\nrlkit.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("run.", rlkit.Run._fields),
        ("run.rollouts[0].", (*rlkit.Rollout._fields, "total_reward", "conversation")),
        ("for step in rlkit.steps(run): step.", ("step", "metrics", "rollouts", "policy")),
        ("rlkit.functional.", ("k3", "group_mean")),
        ("rlkit.references.", ("ema",)),
        ("rlkit.experiment(al", ("algorithm=",)),
    ],
)
def test_what_is_written_next_completes(line, names):
    assert set(names) <= completed(RUN + line)


@pytest.mark.slow
def test_the_call_of_an_experiment_names_every_group():
    """The stub of `experiment` and the function agree, and the groups are those of an experiment
    and the presets."""
    (call,) = jedi.Script("import rlkit\n\nrlkit.experiment(").get_signatures()
    told = [p.name for p in call.params]
    real = list(inspect.signature(experiment).parameters)
    groups = [*rlkit.Experiment._fields, "batch", "experiment", "debug"]
    assert set(told) == {*real, *groups}
    assert inspect.getdoc(experiment).startswith(call.docstring(raw=True).strip())


def test_type_checkers_are_told_to_read_the_annotations():
    assert Path(rlkit.__file__).with_name("py.typed").is_file()
