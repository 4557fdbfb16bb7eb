"""Ranges of numbers stand beside the functions that they bound."""

import pytest

from rlkit.config.compose import compose, experiment
from rlkit.config.problems import find_problems
from rlkit.errors import ConfigError
from rlkit.types import ranges

MINE = """
from rlkit.types import ranges

@ranges(width=(0, 1))
def mine(rewards, *, width=0.5):
    return rewards * width
"""


@pytest.mark.slow
def test_a_part_from_outside_has_its_ranges_too(tmp_path, monkeypatch):
    (tmp_path / "ranged_part.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    option = tmp_path / "conf" / "algorithm" / "advantage" / "mine.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("_target_: ranged_part.mine\n_partial_: true\nwidth: 0.5\n")
    chosen = ["algorithm=reinforce", "algorithm/advantage=mine"]
    compose(chosen, config_dir=str(tmp_path / "conf"))
    for width, said in [(2, "must be at most 1"), (-1, "must be at least 0")]:
        with pytest.raises(ConfigError, match=f"algorithm.advantage.width={width}: {said}"):
            compose(
                [*chosen, f"algorithm.advantage.width={width}"], config_dir=str(tmp_path / "conf")
            )


def test_an_experiment_built_by_hand_has_them_too():
    x = experiment(compose([]))
    assert "batch.prompts=0: must be at least 1" in find_problems(
        x._replace(batch=x.batch._replace(prompts=0))
    )


def test_a_range_of_a_number_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="has no such number"):
        ranges(rang=(0, None))(lambda *, rank: rank)
