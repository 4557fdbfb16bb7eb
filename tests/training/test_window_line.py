"""The line on a model some of whose layers see a window of the context."""

from __future__ import annotations

import copy

import pytest

from parametrise import each
from rlkit.engines import Transformers
from rlkit.training.windows import describe_windows


@pytest.fixture
def windowed(tiny):
    """The tiny policy, its config as if the first layer had a window of so many tokens."""

    def make(window):
        model = copy.deepcopy(tiny.model)
        layers = model.config.num_hidden_layers
        model.config.layer_types = ["sliding_attention"] + ["full_attention"] * (layers - 1)
        model.config.sliding_window = window
        return tiny._replace(model=model)

    return make


@pytest.mark.slow
@each(
    ("window", "says"),
    [
        (64, "longer than the window are decoded by the reference engine, and scored without"),
        (900, "longer than the window would be decoded by the reference engine, and scored"),
        (10**6, None),
    ],
)
def test_a_run_is_told_which_contexts_leave_the_fast_paths(windowed, experiment, window, says):
    """The first contexts of the default task may have 289 tokens."""
    policy = windowed(window)
    line = describe_windows(experiment, policy, experiment.task(split="train"))
    if says is None:
        assert line == ""
        return
    assert line.startswith(f"window: some layers see only the last {window:,} tokens. Contexts of")
    assert says in line
    simple = experiment._replace(generation=experiment.generation._replace(engine=Transformers()))
    assert "decoded" not in describe_windows(simple, policy, experiment.task(split="train"))


def test_a_model_without_windows_has_no_line(tiny, experiment):
    assert describe_windows(experiment, tiny, experiment.task(split="train")) == ""
