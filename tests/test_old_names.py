"""Names of version 0.1 in a `_target_` (keeps-old-names): one more version, with a warning."""

import pytest
import yaml

import rlkit.rewards
from rlkit.config.compose import compose
from rlkit.config.schema import MOVED, build, renamed, resolve
from rlkit.runs.folder import read_config
from rlkit.training.schedules import Schedule


def test_an_option_of_ones_own_may_name_a_part_where_it_was(tmp_path):
    (tmp_path / "schedule").mkdir()
    linear = {"_target_": "rlkit.schedules.linear", "_partial_": True, "start": 1, "end": 0, "steps": 2}
    mine = {"_target_": "rlkit.schedules.Schedule", "numbers": {"kl.coef": linear}}
    (tmp_path / "schedule" / "mine.yaml").write_text(yaml.safe_dump(mine))
    with pytest.warns(FutureWarning, match="goes in the next version"):
        config = compose(["schedule=mine"], config_dir=str(tmp_path)).config
    assert resolve(config["schedule"]["_target_"]) is Schedule
    assert config["schedule"]["numbers"]["kl.coef"]["_target_"] == "rlkit.training.schedules.linear"


def test_the_settings_of_an_old_run_are_read_under_todays_names(tmp_path):
    old = {"_target_": "rlkit.settings.Experiment", "generation": {"engine": {"_target_": "rlkit.generation.cached"}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old))
    with pytest.warns(FutureWarning, match="goes in the next version"):
        config = read_config(tmp_path)
    assert config["generation"]["engine"]["_target_"] == "rlkit.engines.Cached"
    assert renamed(config) == config


def test_a_part_may_be_named_with_the_file_that_held_it():
    with pytest.warns(FutureWarning, match=r"'rlkit\.rewards\.numeric\.numeric' is now 'rlkit\.rewards\.numeric'"):
        assert resolve("rlkit.rewards.numeric.numeric") is rlkit.rewards.numeric


def test_every_new_place_is_there():
    import importlib

    assert all(importlib.import_module(new) if new.islower() else resolve(new) for new in MOVED.values())


def test_an_engine_that_was_a_function_is_made_at_once():
    """Run folders of version 0.1 say `_partial_: true`."""
    old = {"_target_": "rlkit.generation.cached", "_partial_": True, "max_rows": 3}
    with pytest.warns(FutureWarning, match=r"rlkit\.engines\.Cached"):
        assert renamed(old) == {"_target_": "rlkit.engines.Cached", "max_rows": 3}
    with pytest.warns(FutureWarning):
        assert build(old).max_rows == 3
