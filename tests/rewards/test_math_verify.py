"""The child process around math-verify: its verdicts, its deadline, its death. The package itself is played by a module of a few lines."""

from __future__ import annotations

import re
import time

import pytest

from rlkit.errors import ConfigError, install
from rlkit.rewards import Reward, RewardError, Term, math_verify, score
from rlkit.rewards.math_verify import stop
from rlkit.types import Rollout, Step, Task

FAKE = '''
import os, time
from fractions import Fraction
print("an advert on standard output")

def parse(text):
    """Words: numbers are answers, the others are not."""
    print("parsing", text)
    if "forever" in text:
        time.sleep(60)
    if "crash" in text:
        os._exit(3)
    if "raise" in text:
        raise ValueError("bad latex")
    found = []
    for word in text.split():
        try:
            found.append(Fraction(word))
        except ValueError:
            pass
    return found

def verify(gold, target):
    return gold[-1] == target[-1]
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A math_verify that only the child imports."""
    (tmp_path / "math_verify.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    stop()
    yield
    stop()


def rollout(content: str, truth: str = "1/2", finish_reason: str = "stop") -> Rollout:
    return Rollout(Task("t", (), truth), (Step((), (), (), (), finish_reason, content=content),))


def test_verdicts(package):
    assert math_verify(rollout("so 0.5")) == 1.0
    assert math_verify(rollout("0.25"), wrong=-1.0) == -1.0
    assert math_verify(rollout("1/2", truth="nothing")) is None
    for nothing in (rollout("nothing"), rollout("0.5", finish_reason="length")):
        assert math_verify(nothing) == 0.0 and math_verify(nothing).status == "unparseable"
    assert math_verify(rollout("\ud800 \n \u2028 1/2")) == 1.0  # one line stays one line


@pytest.mark.slow
def test_what_takes_for_ever_is_wrong_and_says_so_and_the_next_one_is_right(package):
    """The slip: sympy in the process that trains, where nothing can stop it."""
    assert math_verify(rollout("0.5")) == 1.0
    start = time.perf_counter()
    (late,) = score([rollout("forever")], Reward("math", {"math": Term(1.0, lambda r: math_verify(r, deadline=0.3))}))
    assert time.perf_counter() - start < 3
    assert late.reward == 0.0 and late.statuses == {"math": "timeout"}
    assert math_verify(rollout("0.5")) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("text", ["crash", "raise"])
def test_a_child_that_fails_is_an_error_and_not_zero(package, text):
    with pytest.raises(RewardError, match="math-verify failed"):
        score([rollout(text)], Reward("math", {"math": Term(1.0, math_verify)}))
    assert math_verify(rollout("0.5")) == 1.0


def test_a_missing_package_is_refused_with_its_extra(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("import a_package_that_is_not_there")
    monkeypatch.syspath_prepend(str(tmp_path))
    stop()
    with pytest.raises(ConfigError, match=r"a_package_that_is_not_there.*" + re.escape(install("math"))):
        math_verify(rollout("0.5"))


def test_the_deadline_is_positive():
    with pytest.raises(ConfigError, match="deadline"):
        math_verify(rollout("0.5"), deadline=0.0)


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("#### 18", "18", 1.0),
        ("so it is 0.5", "1/2", 1.0),
        ("17", "18", 0.0),
        (r"$\boxed{\frac{1}{2}}$", "0.5", 1.0),
        (r"2\sqrt{3}", r"2\sqrt{3}", 1.0),
        ("2", r"2\sqrt{3}", 0.0),  # bare LaTeX is not cut to its first number
        (r"so $x = \sqrt{12}$", r"2\sqrt{3}", 1.0),
        ("$[0, 1)$", "$[0,1)$", 1.0),
        ("$9^{9^{9^{9}}}$", "3", 0.0),
        ("3", "a word", None),
    ],
)
def test_with_the_real_package(text, truth, expected):
    pytest.importorskip("math_verify")
    assert math_verify(rollout(text, truth), deadline=2.0) == expected
