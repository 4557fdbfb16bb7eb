"""The runs that tests/laws/goldens holds, run again: the same tokens, and the same numbers up to
rounding.

Token ids are equal. Another order of the same float32 sums moves a number by some 1e-7, and each
step amplifies it. On another kind of processor five steps of ppo moved a log-prob by 3.6e-4 nats,
the norm of the gradient by 1.6e-4 of its size, and the sums of the weights by 7e-7.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from parametrise import read_yaml

FOLDER = Path(__file__).parent / "goldens"
spec = importlib.util.spec_from_file_location("take", FOLDER / "take.py")
assert spec and spec.loader
take = importlib.util.module_from_spec(spec)
spec.loader.exec_module(take)


# Metrics that consist of rounding, with how far another processor may move them: the largest
# difference of two log-probs that are equal but for their rounding, and the share of tokens whose
# KL does not round to 0. KL and the spread of the ratio are squares of small differences, so their
# error is some times larger than that of the log-probs.
ROUNDING = {
    "mismatch/logp_abs_max": 2e-5,
    "kl/nonzero_frac": 0.03,
    "kl/old": 1e-5,
    "kl/step": 1e-5,
    "ratio/max": 2e-3,
    "ratio/var": 1e-4,
}
WITHIN = 5e-4  # of a metric's size, and nats of a log-prob
OF_WEIGHTS = 1e-4  # of the size of a sum or norm of weights


def close(
    now: float | None,
    then: float | None,
    within: float = WITHIN,
    size: float = 0.0,
    rounding: float = 1e-6,
) -> bool:
    """Within a part of the golden's size, or of `size`; a difference below `rounding` is nothing
    else."""
    if now is None or then is None or isinstance(then, bool | str):
        return now == then
    return math.isclose(now, then, rel_tol=within, abs_tol=max(rounding, within * size))


def test_every_case_has_a_golden_and_every_golden_a_case():
    assert {f.stem for f in FOLDER.glob("*.yaml")} == set(take.CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", take.CASES)
def test_a_run_is_what_it_was(name):
    then, now = read_yaml(take.path_of(name).read_text()), take.measure(name)
    assert now["tokens"] == then["tokens"]
    for step, values in then["logprobs"].items():
        pairs = zip(now["logprobs"][step], values, strict=True)
        assert all(close(*pair, size=1.0) for pair in pairs), step
    gone = set(then["metrics"]) - set(now["metrics"])
    assert not gone, f"metrics that are no longer there: {sorted(gone)}"

    def is_close(key: str) -> bool:
        pairs = zip(now["metrics"][key], then["metrics"][key], strict=True)
        return all(close(*pair, rounding=ROUNDING.get(key, 1e-6)) for pair in pairs)

    moved = {
        key: (now["metrics"][key], values)
        for key, values in then["metrics"].items()
        if not is_close(key)
    }
    assert not moved
    assert set(now["weights"]) == set(then["weights"])
    for key, (total, norm) in then["weights"].items():
        assert close(now["weights"][key][0], total, OF_WEIGHTS, size=norm), key
        assert close(now["weights"][key][1], norm, OF_WEIGHTS), key
