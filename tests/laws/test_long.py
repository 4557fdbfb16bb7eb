"""tests/long.txt, the slow tests that CI leaves to .ci/long."""

from __future__ import annotations


def test_every_line_is_a_test(long_names_without_a_test):
    """A renamed test would return to CI without a word."""
    assert not long_names_without_a_test
