"""The runs that tests/goldens holds, run again: the same tokens, and the same numbers up to rounding.

Token ids are equal, everything else is within 1e-5 of its size: another order of the same float32 sums moves a number by some 1e-7.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parent / "goldens"
spec = importlib.util.spec_from_file_location("take", FOLDER / "take.py")
assert spec and spec.loader
take = importlib.util.module_from_spec(spec)
spec.loader.exec_module(take)
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def close(now: float | None, then: float | None, size: float = 0.0) -> bool:
    """Within 1e-5 of the golden's size, or of `size`; below 1e-6 both count as nothing but rounding."""
    if now is None or then is None or isinstance(then, bool | str):
        return now == then
    return math.isclose(now, then, rel_tol=1e-5, abs_tol=max(1e-6, 1e-5 * size))


def test_every_case_has_a_golden_and_every_golden_a_case():
    assert {f.stem for f in FOLDER.glob("*.yaml")} == set(take.CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", take.CASES)
def test_a_run_is_what_it_was(name):
    then, now = yaml.load(take.path_of(name).read_text(), LOADER), take.measure(name)
    assert now["tokens"] == then["tokens"]
    for step, values in then["logprobs"].items():
        assert all(map(close, now["logprobs"][step], values)), step
    gone = set(then["metrics"]) - set(now["metrics"])
    assert not gone, f"metrics that are no longer there: {sorted(gone)}"
    moved = {
        key: (now["metrics"][key], values) for key, values in then["metrics"].items() if not all(map(close, now["metrics"][key], values))
    }
    assert not moved
    assert set(now["weights"]) == set(then["weights"])
    for key, (total, norm) in then["weights"].items():
        assert close(now["weights"][key][0], total, size=norm) and close(now["weights"][key][1], norm), key
