"""The numeric reward: which number of a reply counts, how numbers are written, and what is no final answer."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from rlkit.rewards import extract_answer, numeric, parse_number
from rlkit.types import Rollout, Step, Task, ToolCall

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
MINUS = "\u2212"


def rollout(content: str, truth: str = "18", status: str = "terminated", **step) -> Rollout:
    fields = {"prompt": (), "prompt_ids": (), "response_ids": (), "logprobs": (), "finish_reason": "stop"}
    return Rollout(task=Task("t", (), truth), steps=(Step(**(fields | {"content": content} | step)),), status=status)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", "18"),
        ("-18", "-18"),
        (f"{MINUS}18", "-18"),
        ("+18", "18"),
        ("$18", "18"),
        ("-$18", "-18"),
        ("$-18", "-18"),
        ("€18.50", "37/2"),
        ("18.00", "18"),
        ("18.", "18"),
        (".5", "1/2"),
        ("50%", "50"),
        ("70,000", "70000"),
        ("1,234,567.25", "4938269/4"),
        ("18 apples", "18"),
        ("**18**", "18"),
        ("3/4", "3/4"),
        ("3 / 4", "3/4"),
        ("2 3/4", "11/4"),
        ("-1 1/2", "-3/2"),
        ("6/8", "3/4"),
        ("1e6", "1000000"),
        ("2.5e-1", "1/4"),
        (r"\frac{3}{4}", "3/4"),
        (r"\dfrac{-3}{4}", "-3/4"),
        ("1{,}234", "1234"),
        (r"\$18", "18"),
        (r"18\%", "18"),
        ("x = 18", "18"),
        ("5 + 3 = 8", "8"),
        ("x = 5 + 3 = 8 dollars", "8"),
        ("10-20", "10"),
        ("5/0", None),
        ("nothing", None),
        ("", None),
        ("9" * 300, None),
    ],
)
def test_numbers_as_people_write_them(text, value):
    assert parse_number(text) == (None if value is None else Fraction(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 18\nso \\boxed{2}, the answer is 3. 4", 18),  # #### before all others
        ("#### 1\n#### 18", 18),  # the last one
        ("####\n18\n5", 18),
        ("#### $1,018 in 3 days", 1018),  # the first number of its line
        ("#### Conclusion\n\\boxed{18}", 18),  # a marker without a number does not count
        ("##### 5\nso 18", 18),  # five are a heading
        ("\\boxed{1} and \\boxed{18}. The answer is 3", 18),  # \boxed before the phrase
        ("\\boxed{\\frac{36}{2}} 7", 18),  # braces inside
        ("\\boxed{18 \\text{ apples}} 7", 18),
        ("\\boxed{5, so 18", 18),  # never closed: no box
        ("The answer is 5. No, the answer is 18. I took 3 steps", 18),
        ("the answer is: **$18**, since 3 + 4 = 7", 18),
        ("THE FINAL ANSWER IS 9 + 9 = 18.\n5", 18),
        ("the answer is unclear. I have 3, so 18", 18),  # a marker reaches to the end of its sentence
        ("16 - 3 + 5 is 18.", 18),
        ("from 10-18", 18),  # a range, not minus 18
        ("it fell to -18 degrees", -18),
        ("no number", None),
    ],
)
def test_which_number_is_the_answer(text, value):
    assert extract_answer(text) == value


def test_decimals_are_compared_exactly():
    assert numeric(rollout("0.1", truth="1/10")) == 1.0
    assert numeric(rollout("0.3333333333", truth="1/3")) == 0.0


def test_truth_may_be_a_whole_solution_and_scores_may_be_set():
    truth = "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\n#### 18"
    assert numeric(rollout("It is 18", truth=truth), correct=2.0, wrong=-1.0) == 2.0
    assert numeric(rollout("It is 9", truth=truth), correct=2.0, wrong=-1.0) == -1.0


@pytest.mark.parametrize("truth", ["", "unknown", "1/0"])
def test_unusable_truth_cannot_be_scored(truth):
    assert numeric(rollout("", truth=truth)) is None


@pytest.mark.parametrize(
    "episode",
    [
        rollout("18", status="truncated"),
        rollout("18", finish_reason="length"),
        rollout("18", tool_calls=(ToolCall("call_0", "calculator", {}),)),
        rollout("", thinking="18"),
        rollout("18")._replace(steps=()),
    ],
    ids=["truncated", "cut by length", "still calling", "only thought", "no reply"],
)
def test_no_final_answer_is_wrong(episode):
    assert numeric(episode) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "9" * 10**6,
        "1 " * 10**5,
        "111," * 10**5,
        "1" * 10**5 + " " + "2" * 10**5,
        "#### " * 10**5,
        "\\boxed{" * 10**5,
        "the answer is " + "=" * 10**6,
        "1" + " " * 10**6,
        "$" * 10**6,
        "-" * 10**6,
        "1/" * 10**5,
        "\\boxed{" + "\\frac{" * 10**5,
    ],
    ids=range(12),
)
def test_hostile_text_is_bounded(text):
    assert numeric(rollout(text)) == 0.0  # returns at all: no number of a million digits, no backtracking


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K rows of ../shared/data are not here")
def test_every_gold_solution_of_gsm8k_is_right_and_an_empty_reply_wrong():
    rows = [json.loads(line) for file in sorted(GSM8K.glob("*.jsonl")) for line in file.read_text("utf-8").splitlines()]
    truths = [row["answer"] for row in rows]
    assert len(truths) == 3400
    assert [t for t in truths if numeric(rollout(t, truth=t)) != 1.0] == []
    assert [t for t in truths if numeric(rollout(t, truth=t.rpartition("####")[2])) != 1.0] == []
    assert [t for t in truths if numeric(rollout("", truth=t)) != 0.0] == []
