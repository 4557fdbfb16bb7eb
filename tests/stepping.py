"""One RL step of a learner with the groups of a source."""

from __future__ import annotations

from rlkit.training.ahead.source import get_next_groups


def sample_step(source, flight, learner):
    """The groups of the step to come, the flight behind them, and figures for its row."""
    learner.begin()
    return get_next_groups(
        source,
        flight,
        learner.experiment,
        learner.policy,
        progress=learner.progress,
        clock=learner.clock,
    )


def take_step(source, flight, learner, between=lambda: None):
    """The groups of a step, the flight behind them, and the step's row. `between`: called before
    the learner takes its step."""
    groups, flight, figures = sample_step(source, flight, learner)
    between()
    return groups, flight, learner.step(groups.sampled, groups.trained) | figures
