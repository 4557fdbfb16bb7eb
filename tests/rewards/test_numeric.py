"""The numeric reward: which number of a reply counts, how numbers are written, and what is no final
answer."""

from __future__ import annotations

import json
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example
from hypothesis import strategies as st

from parametrise import cases, each, examples
from rlkit.rewards import extract_answer, numeric, parse_number
from rlkit.types import Rollout, Step, Task, ToolCall

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
MINUS = "\u2212"


def rollout(content: str, truth: str = "18", status: str = "terminated", **step) -> Rollout:
    fields = {
        "prompt": (),
        "prompt_ids": (),
        "response_ids": (),
        "logprobs": (),
        "finish_reason": "stop",
    }
    return Rollout(
        task=Task("t", (), truth),
        steps=(Step(**(fields | {"content": content} | step)),),
        status=status,
    )


# text: the number that it is as a whole
NUMBERS = {
    "18": "18",
    "-18": "-18",
    f"{MINUS}18": "-18",
    "- 18": "-18",
    "minus 18": "-18",
    "negative 18": "-18",
    "+18": "18",
    "$18": "18",
    "-$18": "-18",
    "$-18": "-18",
    "€18.50": "37/2",
    "US$18": "18",
    "Rs. 18": "18",
    "18 USD": "18",
    "18.00": "18",
    "18.": "18",
    ".5": "1/2",
    "50%": "50",
    r"50\%": "50",
    "50 percent": "50",
    "70,000": "70000",
    "1,234,567.25": "4938269/4",
    "18 apples": "18",
    "18 (apples)": "18",
    "18 eggs a day": "18",
    "18 times": "18",
    "18th": "18",
    "2.5 km": "5/2",
    "60km/h": "60",
    "6e1km/h": "60",
    "- Rs. 18": "-18",
    "9.81 m/s^2": "981/100",
    "5 m²": "5",
    "20°C": "20",
    r"90^\circ": "90",
    "$5/hour": "5",
    "**18**": "18",
    "(18)": "18",
    "$18$": "18",
    r"\(18\)": "18",
    "3/4": "3/4",
    "3 / 4": "3/4",
    "2 3/4": "11/4",
    "-1 1/2": "-3/2",
    "6/8": "3/4",
    "½": "1/2",
    "2½ cups": "5/2",
    "-¾": "-3/4",
    "1e6": "1000000",
    "2.5e-1": "1/4",
    "10^{-3}": "1/1000",
    "10⁻³": "1/1000",
    "2^10": "1024",
    r"2 \times 10^6": "2000000",
    "5 million dollars": "5000000",
    r"\frac{3}{4}": "3/4",
    r"\dfrac{-3}{4}": "-3/4",
    r"\frac12": "1/2",
    r"2\frac{1}{2}": "5/2",
    r"-2\frac12": "-5/2",
    "1{,}234": "1234",
    r"10,\!000": "10000",
    r"10\,000": "10000",
    r"\$18": "18",
    r"18 \text{ apples}": "18",
    r"5\,\text{cm}^2": "5",
}

# What is not wholly one number with an optional unit, though there are digits in it
NOT_ONE_NUMBER = [
    r"3\sqrt{2}",
    r"\sqrt{2}",
    "10:30",
    "3:4",
    "2k+2",
    "6 - 5i",
    "3,5,7",
    "(3,4)",
    "[0,1)",
    "x<3",
    "5 + 3",
    "10-20",
    "5k",
    "5x",
    "3ab",
    "5i",
    r"2\pi",
    "2π",
    r"\frac{1}{2}\pi",
    r"\frac{\pi}{4}",
    r"\frac{1}{2}3",
    r"\frac{\frac{1}{2}}{3}",
    "5 and a half",
    "5 or 6",
    "2 thirds",
    "5 times x",
    "12/25/2020",
    "1/2/3",
    "1 000",
    "1,00",
    "0,001",
    "0.333...",
    "3!",
    "5/0",
    "0^{-1}",
    "2 3/2",
    "--5",
    "٣",
    "1٣",
    "5 m 30 s",
    "2 hundred thousand",
    "x^2",
    "x_1",
    "H2O",
    "#5",
    "9" * 300,
]


@each("text", NUMBERS)
def test_numbers_as_people_write_them(text):
    assert parse_number(text) == Fraction(NUMBERS[text])


@each(
    "text",
    [
        "",
        "nothing",
        "B",
        r"\pi",
        "x = 3",
        "5 + 3 = 8",
        "no. 5",
        "2. Compute the total",
        "18\napples",
        *NOT_ONE_NUMBER,
    ],
)
def test_what_is_not_wholly_one_number_is_none(text):
    assert parse_number(text) is None and numeric(rollout("#### 3", truth=text)) is None


@each(
    ("text", "value"),
    [
        # the last marker that is followed by a number
        ("#### 18\nso \\boxed{2}, the answer is 3. 4", 3),
        ("the answer is 1. \\boxed{2}\n#### 18", 18),
        ("#### 1\n#### 18", 18),
        ("\\boxed{1} and \\boxed{18}. That took 3 steps", 18),
        ("The answer is 5. No, the answer is 18. I took 3 steps", 18),
        ("<answer>1</answer> no: <answer>18</answer> in 3 steps", 18),
        ("Answer: 5\n\nWait.\n\nAnswer: 18\n\nThat took 3 steps.", 18),
        # ####
        ("####\n18\n5", 18),
        ("#### $1,018 in 3 days", 1018),  # the first number of its line
        ("#### 9 * 2 = 18 eggs", 18),
        ("#### **18**", 18),
        ("#### - 18", -18),
        ("##### 5\nso 18", 18),  # five are a heading
        ("#### Conclusion\n\\boxed{18}", 18),
        ("#### Step 2\nso \\boxed{18}", 18),
        ("\\boxed{18}\n#### Step 2: check", 18),
        ("\\boxed{18}\n#### 2. Check\nIt is right.", 18),
        ("#### Step 1\n9\n#### Step 2\n9 * 2 makes 18", 18),
        # \boxed
        ("\\boxed{\\frac{36}{2}} 7", 18),  # braces inside
        ("\\boxed{18 \\text{ apples}} 7", 18),
        ("\\boxed{\\text{Janet has } 18} 7", 18),
        ("\\boxed{\\boxed{18}} 7", 18),
        ("\\boxed{x = 18} 7", 18),
        ("\\boxed{9 \\times 2 = 18} 7", 18),
        ("\\boxed{5, so 18", 18),  # never closed: no box
        ("\\boxed{B}, since 3 * 6 is 18", 18),  # no number in it
        ("\\boxed{3\\sqrt{2}}, where 18 > 17", None),  # an answer, and no number
        ("\\boxed{10:30}", None),
        ("\\boxed{a = 3, b = 5}", None),
        ("\\boxed{3 \\text{ and } 5}", None),
        # the answer is
        ("the answer is: **$18**, since 3 + 4 = 7", 18),
        ("THE FINAL ANSWER IS 9 + 9 = 18.\n5", 18),
        ("The answer is $9 \\times 2 = 18$ dollars.", 18),
        ("The answer is\n\n$$18$$\n\nafter 3 steps", 18),
        ("The answer is:\n\\[\n18\n\\]\nafter 3 steps", 18),
        ("The answer is that she has 18 eggs (3 a day), not 17.", 18),
        ("The answer is minus 18.", -18),
        ("The answer is 18!", 18),
        ("The answer is 2½ cups.", Fraction(5, 2)),
        (
            "the answer is unclear. I have 3, so 18",
            18,
        ),  # a marker reaches to the end of its sentence
        ("The answer is 5 and a half.", None),
        ("The answer is 5 or 6.", None),
        ("The answer is 10-20.", None),
        # Answer: and <answer>
        ("**Answer:** 18\n\nThis took 3 steps.", 18),
        ("**Answer**: $18 (3 steps)", 18),
        ("Final answer: x = 18", 18),
        (
            "Answer: Janet sells 16 - 3 - 4 = 9 eggs.\nShe makes 9 * 2 = $18 every day.",
            18,
        ),  # the beginning of a solution
        ("<answer>\n18\n</answer>\n3", 18),
        ("<answer>Janet makes $18 every day.</answer> 3", 18),
        ("<ANSWER>18</ANSWER> 3", 18),
        # no marker
        ("16 - 3 + 5 is 18.", 18),
        ("It is .5", Fraction(1, 2)),
        ("It is Rs. 18", 18),
        ("the answer is: - Rs. 18", -18),
        ("She makes 9 * 2 = $18 in 7 days", 18),  # behind =
        ("so $9 \\times 2 = 18$", 18),
        ("x = 5. That makes 18 of 2 kinds, or 18", 18),  # = in another sentence
        ("She sold 9*2=<<9*2=18>>18 clips", 18),
        ("from 10-18", 18),  # a range, not minus 18
        ("it fell to -18 degrees", -18),
        ("it fell to minus 18 degrees", -18),
        ("the change is - 18", -18),
        ("it costs -$18", -18),
        ("- 3 pears\n- 18 apples", 18),  # a list
        ("18 m^2", 18),
        ("It has 18 m^2", 18),
        ("It makes 18 dollars with H2O", 18),
        ("The area is 3\\sqrt{2}", None),
        ("It is 10:30", None),
        ("It is x^2", None),
        ("no number", None),
    ],
)
def test_which_number_is_the_answer(text, value):
    assert extract_answer(text) == value


# ----------------------------------------------------------------------- the law of truth and reply

MARKED = [
    "#### {}",
    "So she has it.\n#### {}",
    "\\boxed{{{}}}",
    "so $\\boxed{{{}}}$.",
    "The answer is {}",
    "the answer is: {}",
    "Answer: {}",
    "**Answer:** {}",
    "**Answer**: {}",
    "Final answer: {}",
    "<answer>{}</answer>",
    "<answer>\n{}\n</answer>",
    "{}",
]
PUNCTUATED = [
    "#### {}.",
    "The answer is {}.",
    "The answer is **{}**.",
    "The answer is {}!",
    "Answer: {}.",
    "Answer: {},",
    "**Answer:** {}!",
]
FORMS = [
    before + form
    for form in MARKED + PUNCTUATED
    for before in ("", "#### Step 2\nShe takes 16 - 3 - 4 = 9 eggs.\n\n")
    if form != "{}" or not before
]


def scores(truth: str, said: str) -> dict[str, float | None]:
    return {form: numeric(rollout(form.format(said), truth=truth)) for form in FORMS}


@pytest.mark.slow
@each("truth", NUMBERS)
def test_every_truth_scores_1_in_every_form_and_0_against_another(truth):
    assert set(scores(truth, truth).values()) == {1.0}
    others = [other for other in NUMBERS if Fraction(NUMBERS[other]) != Fraction(NUMBERS[truth])]
    assert {numeric(rollout(f"#### {truth}", truth=other)) for other in others} == {0.0}


@each("text", NOT_ONE_NUMBER)
def test_what_is_not_one_number_is_read_in_part_in_no_box_and_no_tag(text):
    parts = {Fraction(digits) for digits in re.findall("[0-9]+", text)}
    assert {
        extract_answer(form.format(text)) for form in ("\\boxed{{{}}}", "<answer>{}</answer>")
    } & parts == set()


whole = st.integers(0, 10**7).map(str) | st.integers(10**3, 10**9).map("{:,}".format)
digit = st.integers(1, 9).map(str)
values = st.one_of(
    whole,
    st.tuples(whole, st.integers(0, 999).map(str)).map(".".join),
    st.tuples(whole, st.integers(1, 99).map(str)).map("/".join),
    st.tuples(digit, st.sampled_from(["1/2", "3/4"])).map(" ".join),
    st.tuples(
        st.sampled_from(["\\frac{%s}{%s}", "\\dfrac{%s}{%s}", "\\frac%s%s", "\\frac{%s}%s"]),
        digit,
        digit,
    ).map(lambda t: t[0] % t[1:]),
    st.tuples(digit, st.sampled_from(["½", "\\frac12", "\\frac{1}{2}", " \\tfrac{2}{3}"])).map(
        "".join
    ),
    st.tuples(
        st.sampled_from(["10^{%d}", "10^%d", "2 \\times 10^{%d}", "3 x 10^%d", "4e%d"]),
        st.integers(-9, 9),
    ).map(lambda t: t[0] % t[1]),
)
signs = st.sampled_from(["", "", "-", MINUS, "- ", "minus ", "+"])
currencies = st.sampled_from(["", "", "$", "\\$", "€", "$ "])
units = st.sampled_from(
    [
        "",
        "",
        "%",
        "\\%",
        " %",
        " apples",
        " km",
        "km/h",
        " m^2",
        " m²",
        "°",
        "^\\circ",
        "\\text{ cm}",
        " eggs per day",
        " (eggs)",
        ".",
        " million",
    ]
)


@pytest.mark.slow
@examples(signs, currencies, values, units, st.integers(-3, 3).filter(bool), fast=25, slow=200)
def test_generated_truths_score_1_in_every_form_and_0_against_another(
    sign, currency, value, unit, distance
):
    truth = sign + currency + value + unit
    number = parse_number(truth)
    assert number is not None
    assert set(scores(truth, truth).values()) == {1.0}
    assert set(scores(str(number + distance), truth).values()) == {0.0}


PIECES = st.sampled_from(
    [
        "1",
        "18",
        "3,000",
        ".5",
        "3/4",
        "½",
        "\\frac12",
        "\\frac{3}{4}",
        "^2",
        "^{-3}",
        "²",
        "-",
        MINUS,
        "- ",
        "minus ",
        "$",
        "\\$",
        "%",
        " ",
        "\n",
        ".",
        ",",
        "!",
        "?",
        ":",
        "=",
        " = ",
        "x",
        "k",
        " km",
        " a day",
        "°C",
        "\\text{ cm}",
        "\\text{",
        "}",
        "{",
        "(",
        ")",
        "[",
        "\\(",
        "\\)",
        "**",
        "_",
        "e3",
        "\\times ",
        "x 10^5",
        "\\sqrt{2}",
        "\\pi",
        " million",
        " and ",
        "half",
        " or ",
        "\\,",
        "\\!",
        "{,}",
        "<",
        "/",
        " sq. ft",
        "p.m.",
        " Rs. ",
        "USD ",
        "#",
        "~",
        "'",
        ". ",
        "; ",
        "#### ",
        "\\boxed{",
        "the answer is ",
        "Answer: ",
        "<answer>",
        "</answer>",
        "٣",
        "\u2028",
    ]
)


@pytest.mark.slow
@examples(st.lists(PIECES, min_size=1, max_size=6).map("".join), fast=60, slow=400)
@example("1the answer is ")
@example("_minus 1")
def test_any_text_that_is_a_number_is_that_number_in_every_form(text):
    """And no text raises."""
    number = parse_number(text)
    read = {form: extract_answer(form.format(text)) for form in FORMS}
    if number is not None:
        assert {form: value for form, value in read.items() if value != number} == {}


# ----------------------------------------------------------------------------------------- the rest


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    cases(
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
        4,
    ),
    ids=range(12),
)
def test_hostile_text_is_bounded(text):
    assert (
        numeric(rollout(text)) == 0.0
    )  # returns at all: no number of a million digits, no backtracking


@pytest.mark.slow
@pytest.mark.parametrize(
    "frame",
    cases(
        ["{}", "#### 1{}", "\\boxed{{{}}}", "the answer is {}", "<answer>{}</answer>", "1{}."], 2
    ),
)
def test_a_reply_of_60_kb_is_read_in_less_than_100_ms(frame):
    """Processor time, the best of three. A quadratic pattern takes seconds."""
    pieces = [
        "9",
        "1 ",
        "111,",
        "#### ",
        "#### a1 ",
        "\\boxed{",
        "the answer is 1",
        "Answer: ",
        "<answer>",
        "<answer>1</answer>",
        "= 1 ",
        "$",
        "- ",
        "1/",
        "\\frac{",
        "\\frac12",
        "{",
        "(",
        "1(",
        "10^{",
        "½",
        "²",
        "\\text{ a",
        "<<1",
        "a.b",
        "5 a ",
        "x1",
        "minus ",
        "is - ",
        "**",
        "\\,",
        "1\\,000",
        "5%",
        "\n1",
        ". ",
        "1, ",
        "1:",
        "5 km/",
        "1e",
        "٣",
        "\\left(",
        "^\\circ",
        " ",
        "a'",
        "####9²",
        "_",
    ]
    slow = {}
    for piece in pieces:
        text = frame.format(piece * (60_000 // len(piece)))
        for _ in range(3):
            start = time.process_time()
            numeric(rollout(text, truth="18"))
            taken = time.process_time() - start
            if taken < 0.1:
                break
        else:
            slow[piece] = taken
    assert slow == {}


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K rows of ../shared/data are not here")
def test_every_gold_solution_of_gsm8k_is_right_and_an_empty_reply_wrong():
    rows = [
        json.loads(line)
        for file in sorted(GSM8K.glob("*.jsonl"))
        for line in file.read_text("utf-8").rstrip("\n").split("\n")
    ]
    truths = [row["answer"] for row in rows]
    assert len(truths) == 3400
    assert [t for t in truths if parse_number(t.rpartition("####")[2]) is None] == []
    assert [t for t in truths if numeric(rollout(t, truth=t)) != 1.0] == []
    assert [t for t in truths if numeric(rollout(t, truth=t.rpartition("####")[2])) != 1.0] == []
    assert [t for t in truths if numeric(rollout("", truth=t)) != 0.0] == []
