"""tests/long.txt, the slow tests that CI leaves to .ci/long."""

from __future__ import annotations

import pytest

from parametrise import every_extra


@pytest.mark.skipif(not every_extra(), reason="a missing extra takes its cases with it")
def test_every_line_is_a_test(long_names_without_a_test):
    """A renamed test would return to CI without a word."""
    assert not long_names_without_a_test
