"""Mixtures: how many prompts each part gets, in any number of draws, and what is asked and
refused."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from functools import partial
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.episodes.stream import StreamState, take
from rlkit.errors import ConfigError, DataError
from rlkit.tasks import arithmetic, guess_number, mixture
from rlkit.tasks._mixture import take_turns
from rlkit.types import Task


def rows(name: str, n: int, *, split: str) -> list[Task]:
    return [Task(f"{name}/{split}/{i}", ()) for i in range(n)]


def parts(**sizes: int):
    return {name: partial(rows, name, n) for name, n in sizes.items()}


WEIGHTS = st.dictionaries(
    st.sampled_from("abcdefg"), st.floats(0.01, 100).map(lambda w: round(w, 2)), min_size=1
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, database=None)
@given(WEIGHTS)
def test_every_number_of_turns_has_its_shares_to_within_one(weights):
    shares = {
        name: Fraction(str(w)) / sum(map(Fraction, map(str, weights.values())))
        for name, w in weights.items()
    }
    counts: Counter[str] = Counter()
    for k, name in enumerate(islice(take_turns(weights), 300), start=1):
        counts[name] += 1
        assert all(abs(counts[n] - k * share) < 1 for n, share in shares.items())


@pytest.mark.slow
@settings(max_examples=60, deadline=None, database=None)
@given(
    WEIGHTS.filter(lambda w: max(w.values()) < 40 * min(w.values())), st.integers(0, 5), st.data()
)
def test_every_draw_of_the_stream_has_its_shares_and_a_resumed_one_goes_on(weights, seed, data):
    """Any run of n prompts within an epoch, wherever it starts, is off by less than two; and
    drawing in pieces changes nothing."""
    sizes = {name: data.draw(st.integers(1, 9)) for name in weights}
    tasks = mixture(parts=parts(**sizes), weights=weights)(split="train")
    total = sum(weights.values())
    whole, _ = take(tasks, StreamState(), len(tasks), seed=seed)
    start = data.draw(st.integers(0, len(tasks) - 1))
    piece = whole[start:]
    for name, weight in weights.items():
        assert abs(sum(t.part == name for t in piece) - len(piece) * weight / total) < 2
        assert {t.id for t in whole if t.part == name} == {
            f"{name}/train/{i}" for i in range(sizes[name])
        }  # no row is left out
        times = Counter(t.id for t in whole if t.part == name).values()
        assert max(times) - min(times) <= 1
    first, state = take(tasks, StreamState(), start, seed=seed)
    rest, _ = take(tasks, StreamState(*tuple(state)), len(tasks), seed=seed)
    again, _ = take(tasks, StreamState(), start + len(tasks), seed=seed)
    assert first + rest == again


def test_epochs_are_shuffled_within_parts():
    tasks = mixture(parts=parts(a=30, b=10), weights={"a": 3})(split="train")
    (first, state), seeds = take(tasks, StreamState(), 40, seed=0), {}
    second, _ = take(tasks, state, 40, seed=0)
    assert [t.part for t in first] == [t.part for t in second] == [
        t.part for t in tasks
    ] and first != second != tasks
    for seed in (0, 1):
        seeds[seed], _ = take(tasks, StreamState(), 40, seed=seed)
    assert seeds[0] != seeds[1] and {t.id for t in seeds[0]} == {t.id for t in seeds[1]}


def test_held_out_rows_stand_once_and_any_number_of_them_has_the_shares():
    """A row that stood twice would count twice in the accuracy and its interval."""
    tasks = mixture(parts=parts(a=100, b=5), weights={"a": 2, "b": 1})(split="test")
    assert (
        len({t.id for t in tasks}) == len(tasks) == 17
    )  # the eighteenth would be the sixth row of b
    assert Counter(t.part for t in tasks[:9]) == {"a": 6, "b": 3}


def test_rows_keep_what_their_own_task_says():
    tasks = mixture(
        parts={
            "sums": partial(arithmetic, max_samples=3),
            "games": partial(guess_number, max_samples=3),
        }
    )(split="train")
    assert {(t.part, t.reward, t.environment) for t in tasks} == {
        ("sums", "numeric", "tool_use"),
        ("games", "few_turns", "guess_number"),
    }
    assert [t._replace(part="") for t in tasks if t.part == "sums"] == arithmetic(max_samples=3)


def test_a_mixture_may_be_part_of_a_mixture():
    inner = mixture(parts=parts(b=2, c=2))
    tasks = mixture(parts=parts(a=4) | {"inner": inner})(split="train")
    assert Counter(t.part for t in tasks) == {"a": 4, "inner/b": 2, "inner/c": 2}


def test_weights_of_zero_and_max_samples_leave_out():
    tasks = mixture(parts=parts(a=4, b=4, c=4), weights={"b": 0}, max_samples=6)(split="train")
    assert Counter(t.part for t in tasks) == {"a": 3, "c": 3}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"weights": {"z": 1}}, r"task\.weights\.z.*the parts are a, b"),
        ({"weights": {"a": -1}}, r"task\.weights\.a is -1"),
        ({"weights": {"a": "many"}}, r"task\.weights\.a is 'many'"),
        ({"weights": {"a": float("nan")}}, r"task\.weights\.a is nan"),
        ({"weights": {"a": 0, "b": 0}}, "no part of a weight above 0"),
        ({"max_samples": 0}, r"task\.max_samples is 0"),
    ],
)
def test_what_makes_no_mixture_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        mixture(parts=parts(a=1, b=1), **given)


def test_a_part_without_rows_is_named():
    with pytest.raises(DataError, match=r"task\.parts\.b has no rows in split=test"):
        mixture(parts=parts(a=1, b=0))(split="test")
