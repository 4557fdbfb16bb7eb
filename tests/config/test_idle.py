"""Keys that do nothing in a run are named, and keys that do something are not."""

from __future__ import annotations

import pytest

from parametrise import each
from rlkit.config.compose import compose, experiment
from rlkit.config.problems.doubts import list_warnings
from rlkit.config.problems.rows import load_tasks

ALONE = "every episode ends with its first reply"


@pytest.mark.slow
@each(
    ("words", "said"),
    [
        (["model.lora.alpha=64"], "model.lora.alpha does nothing: model.lora.rank=0 trains all"),
        (["+model.lora.targets=[q_proj]"], "model.lora.targets does nothing: model.lora.rank=0"),
        (["model.lora.rank=2", "model.lora.alpha=64"], None),
        (["task.reuse.groups=8"], "task.reuse.groups does nothing: with task.reuse.staleness=0"),
        (["task.reuse.staleness=8"], "task.reuse.staleness does nothing: with task.reuse.groups=0"),
        (["task/reuse=replay", "task.reuse.groups=8", "task.reuse.staleness=2"], None),
        (["environment=single_turn", "generation.admission=free"], ALONE),
        (["environment=single_turn", "generation.admission_rounds=4"], ALONE),
        (
            ["environment=tool_use", "generation.admission=free", "generation.admission_rounds=4"],
            "generation.admission_rounds does nothing: only generation.admission=rounds",
        ),
        (["environment=tool_use", "generation.admission=barrier"], None),
    ],
)
def test_a_key_that_does_nothing_is_named(words, said):
    """All of these were taken without a word."""
    composed = compose([*words, "task.max_samples=8"])
    x = experiment(composed)
    lines = [
        line
        for line in list_warnings(x, composed.overrides, load_tasks(x))
        if "does nothing" in line
    ]
    assert ([said in line for line in lines] == [True]) if said else lines == []
