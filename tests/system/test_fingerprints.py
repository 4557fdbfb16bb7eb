"""A fingerprint changes with the weights."""

from __future__ import annotations

import pytest
import torch

from rlkit.system.fingerprints import fingerprint


@pytest.mark.parametrize(
    "other",
    [
        [0.0, 0.0, 0.0, 1.0],
        [1.0, 1.0, 1.0, 1.0],
        [1.0, 2.0, 4.0, 3.0001],
        [1.0, 2.0, 3.0, 4.0000005],
    ],
)
def test_any_change_shows_in_the_fingerprint(other):
    """Also where a hash of the bits alone cancels out: four zeros and four ones have the same."""
    start = (
        [0.0] * 4
        if other == [1.0] * 4
        else [0.0, 0.0, 0.0, 1.5]
        if other[0] == 0
        else [1.0, 2.0, 3.0, 4.0]
    )
    assert (
        fingerprint([torch.tensor(start)])
        == fingerprint([torch.tensor(start)])
        != fingerprint([torch.tensor(other)])
    )
