"""From named components to one reward. An aggregator sees the components of non-zero weight, none of them None."""

from __future__ import annotations

from collections.abc import Mapping


def weighted_sum(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Σ weight * score over the components, in their order.

    Args:
      scores: component → score, in the component's own unit.
      weights: component → weight; may be negative (a penalty).
    Raises: KeyError for a component without a weight.
    """
    return sum(weights[name] * score for name, score in scores.items())
