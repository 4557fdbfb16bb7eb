"""Generated word problems: held-out expressions are never trained on, answers are right, and
everything follows from the seed."""

from __future__ import annotations

import ast
import operator
import random
import re
from fractions import Fraction

import pytest

from rlkit.environments import calculator
from rlkit.tasks._arithmetic import (
    arithmetic,
    compute_value,
    draw_from_splits,
    expression,
    problem,
    split_of_expression,
)
from rlkit.types import SPLITS

WARM_UP = 1_000_003  # the seed of the problems that experiments/tiny_model/build.py warms up with
TRAINING_SEEDS = (0, 1, 2, 3, 4, 17, 123456789, WARM_UP, WARM_UP + 7)
HELD_OUT_SEEDS = (0, 1, 2, 17, WARM_UP)
N = 250  # problems a seed


@pytest.fixture(scope="module")
def problems():
    """(split, seed) → problems."""
    drawn = {
        ("train", seed): [problem(seed, i, "train") for i in range(N)] for seed in TRAINING_SEEDS
    }
    return drawn | {
        (split, seed): [problem(seed, i, split) for i in range(N)]
        for seed in HELD_OUT_SEEDS
        for split in SPLITS[1:]
    }


def expressions(problems, split):
    return [
        {p.expression for p in drawn} for (which, _), drawn in problems.items() if which == split
    ]


def independent(text: str) -> Fraction:
    """The value of an expression by Python's own grammar, in fractions."""
    operators = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
    }

    def value(node):
        if isinstance(node, ast.BinOp):
            return operators[type(node.op)](value(node.left), value(node.right))
        assert isinstance(node, ast.Constant)
        return Fraction(node.value)

    return value(ast.parse(text, mode="eval").body)


# ----------------------------------------------------------------------------------------- held out


@pytest.mark.slow
def test_no_held_out_expression_is_trained_on_under_any_seed(problems):
    """The border runs through the expressions, not through the problems: another seed, name or
    wording cannot cross it."""
    train, validation, test = (set().union(*expressions(problems, split)) for split in SPLITS)
    assert not train & test and not train & validation and not validation & test


def test_the_warm_up_of_the_embedded_model_has_seen_no_test_expression(problems):
    """It was made of train and validation expressions alike: the stream of seed WARM_UP as
    experiments/tiny_model/build.py draws it."""
    seen = [
        draw_from_splits(
            random.Random(f"arithmetic {WARM_UP} train {i}"), ("train", "validation")
        ).expression
        for i in range(N)
    ]
    assert not set(seen) & set().union(*expressions(problems, "test"))
    assert {split_of_expression(text) for text in seen} == {"train", "validation"}


def test_the_seeds_do_meet_within_a_split(problems):
    """What makes the law above worth testing: without the border, seeds would share many
    expressions."""
    for split in SPLITS:
        first, *others = expressions(problems, split)
        assert all(len(first & other) >= 3 for other in others)


def test_the_border_is_a_function_of_the_expression_alone(problems):
    """Each expression's side can be told from its text, so it is the same in every version, process
    and seed."""
    import zlib

    for (split, _), drawn in problems.items():
        tenths = {zlib.crc32(p.expression.encode()) % 10 for p in drawn}
        assert tenths == {"test": {0}, "validation": {1}}.get(split, set(range(2, 10)))


def test_tasks_carry_question_expression_and_answer_of_their_problem(problems):
    for task, p in zip(
        arithmetic(split="test", seed=0, max_samples=N), problems["test", 0], strict=True
    ):
        assert (task.metadata["expression"], task.messages[0]["content"]) == (
            p.expression,
            p.question,
        )
        assert Fraction(task.answer) == independent(p.expression)


# ------------------------------------------------------------------------------------------ answers


def test_every_answer_is_the_value_of_its_expression(problems):
    for drawn in problems.values():
        for p in drawn:
            assert independent(p.expression) == p.answer > 0, p


def test_the_expression_means_the_operations_in_their_order(problems):
    """(a + b) / c needs its parentheses, a * b / c none: the text and the story must have one
    value."""
    steps = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
    for drawn in problems.values():
        for p in drawn:
            total = Fraction(p.start)
            for sign, x in p.operations:
                total = steps[sign](total, x)
                assert total > 0 and total.denominator == 1, (
                    p
                )  # nobody has a negative or a broken number of pens
            assert total == independent(p.expression) == compute_value(p.start, p.operations)


@pytest.mark.parametrize(
    ("start", "operations", "text"),
    [
        (6, (("*", 4), ("+", 5)), "6 * 4 + 5"),
        (6, (("+", 4), ("/", 5)), "(6 + 4) / 5"),
        (6, (("*", 4), ("/", 3)), "6 * 4 / 3"),
        (9, (("*", 2), ("-", 3), ("/", 5)), "(9 * 2 - 3) / 5"),
        (8, (("/", 2),), "8 / 2"),
    ],
)
def test_expressions_by_hand(start, operations, text):
    assert expression(start, operations) == text


def test_the_calculator_gives_the_answer(problems):
    """The tool that the policy has solves every problem in one call."""
    for p in problems["train", 0]:
        assert calculator(p.expression) == str(p.answer)


def test_the_question_holds_every_number_and_no_other(problems):
    """A number that is missing makes a problem unsolvable; one too many is a distractor that is not
    marked."""
    for drawn in problems.values():
        for p in drawn:
            told = [int(n) for n in re.findall(r"\d+", p.question)]
            needed = [p.start, *(x for _, x in p.operations)]
            extra = [] if p.distractor is None else [p.distractor]
            assert sorted(told) == sorted(needed + extra), p
            rest = iter(told)
            assert all(n in rest for n in needed), p  # in the order of the story
            assert ("distractor" in p.kinds) == (p.distractor is not None)
            assert len(p.kinds) == len(p.operations) + len(extra)
            assert "{" not in p.question


# -------------------------------------------------------------------------------------- determinism


def test_the_same_seed_gives_the_same_problems():
    assert arithmetic(seed=3, max_samples=20) == arithmetic(seed=3, max_samples=20)


def test_problem_number_i_does_not_depend_on_how_many_are_made():
    assert arithmetic(seed=3, max_samples=5) == arithmetic(seed=3, max_samples=20)[:5]


def test_seed_split_and_number_each_give_other_problems():
    drawn = [
        [t.messages for t in arithmetic(split=split, seed=seed, max_samples=20)]
        for split in ("train", "test")
        for seed in (0, 1)
    ]
    assert all(a != b for i, a in enumerate(drawn) for b in drawn[:i])
    assert len(set(map(str, drawn[0]))) > 15


def test_the_problems_are_pinned():
    """Results of earlier versions compare only while these stay: changing them is changing the
    task."""
    assert [t.metadata["expression"] for t in arithmetic(max_samples=4)] == [
        "11 * 6",
        "18 - 5",
        "7 - 2",
        "8 + 8 - 6",
    ]
    assert [t.metadata["expression"] for t in arithmetic(split="test", max_samples=3)] == [
        "14 - 12",
        "14 * 4",
        "14 * 6",
    ]


def test_rows_say_how_they_are_scored_and_run():
    tasks = arithmetic(split="test", seed=5, max_samples=30, environment="single_turn")
    assert [t.id for t in tasks] == [f"arithmetic/test/5/{i}" for i in range(30)]
    assert {(t.reward, t.environment) for t in tasks} == {("numeric", "single_turn")}
    assert all(
        t.messages[0]["role"] == "user" and len(t.messages) == 1 and t.answer.isdecimal()
        for t in tasks
    )


def test_all_kinds_of_problem_are_drawn(problems):
    """The warm-up is wrong on some kinds on purpose; all of them must be there to be learned."""
    kinds = {kind for p in problems["train", 0] for kind in p.kinds}
    assert kinds == {
        "buys",
        "finds",
        "gets",
        "gives",
        "eats",
        "loses",
        "boxes",
        "shares",
        "distractor",
    }
    assert {len(p.operations) for p in problems["train", 0]} == {1, 2, 3}
