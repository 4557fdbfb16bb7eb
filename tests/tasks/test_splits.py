"""Laws of the three splits, for every task: no problem in two splits, none lost, and no row moved
by the rows around it."""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import partial

import pytest

from rlkit.errors import ConfigError, DataError
from rlkit.tasks import (
    arithmetic,
    conversations,
    episodes,
    gsm8k,
    guess_number,
    jsonl,
    mbpp,
    mixture,
)
from rlkit.tasks.splits import choose_split, find_overlaps
from rlkit.types import SPLITS, Splits, Task

SHARES = {"validation": 0.2, "held_out": 0.2}


def jsonl_row(i: int) -> dict:
    return {"id": i, "prompt": f"question {i}", "answer": i}


def gsm8k_row(i: int) -> dict:
    return {"question": f"question {i}", "answer": f"so #### {i}"}


def mbpp_row(i: int) -> dict:
    return {
        "text": f"Add {i}.",
        "code": "def f(n): return n",
        "test_list": [f"assert f({n}) == {n + i}" for n in range(3)],
    }


def conversation(i: int) -> dict:
    """Rows 2i and 2i + 1 ask the same and are answered differently."""
    said = [
        {"role": "user", "content": f"question {i // 2}"},
        {"role": "assistant", "content": f"answer {i}"},
    ]
    return {"messages": said}


FILES = {
    "jsonl": (jsonl_row, partial(jsonl, seed=0, fields={"prompt": "prompt", "answer": "answer"})),
    "gsm8k": (gsm8k_row, partial(gsm8k, seed=0)),
    "mbpp": (mbpp_row, partial(mbpp, seed=0)),
    "conversations": (conversation, partial(conversations, seed=0)),
}
GENERATED = {
    "arithmetic": partial(arithmetic, max_samples=400),
    "episodes": partial(episodes, max_samples=400),
    "guess_number": partial(guess_number, max_samples=300, **SHARES),
}
files = pytest.mark.parametrize(("row", "task"), FILES.values(), ids=FILES)


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def problem(task: Task) -> str:
    """What a policy is asked, or plays: where all prompts are alike, the number that is hidden or
    the seed."""
    hidden = (
        ""
        if task.reward in ("numeric", "exact_match", "code_exec")
        else f"{task.answer} {task.metadata.get('seed')}"
    )
    return json.dumps([list(task.messages), hidden])


def drawn(task, **settings) -> dict[str, list[str]]:
    return {split: [problem(t) for t in task(split=split, **settings)] for split in SPLITS}


def assert_disjoint(found: dict[str, list[str]]) -> None:
    for a, b in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not set(found[a]) & set(found[b]), (a, b)
    assert all(found.values())


# -------------------------------------------------------------------------------------------- files


@files
def test_the_splits_of_a_file_are_disjoint_and_lose_no_row(tmp_path, row, task):
    """With every prompt twice in the file: the cut is by the prompt, since ids may be nothing but
    row numbers."""
    rows = [row(i) for i in range(120)] + [row(i) for i in range(120)]
    found = drawn(task, path=write(tmp_path / "rows.jsonl", rows), **SHARES)
    assert_disjoint(found)
    assert sum(map(len, found.values())) == len(rows)
    ids = [
        t.id
        for split in SPLITS
        for t in task(split=split, path=str(tmp_path / "rows.jsonl"), **SHARES)
    ]
    assert len(set(ids)) == len(rows)


@files
def test_neither_order_nor_number_of_the_rows_moves_a_row(tmp_path, row, task):
    rows = [row(i) for i in range(150)]
    mixed = random.Random(0).sample(rows, len(rows))
    whole, other, part = (
        drawn(task, path=write(tmp_path / f"{name}.jsonl", own), **SHARES)
        for name, own in (("whole", rows), ("mixed", mixed), ("part", rows[:90]))
    )
    for split in SPLITS:
        assert Counter(whole[split]) == Counter(other[split])
        assert set(part[split]) <= set(whole[split])
    assert drawn(task, path=str(tmp_path / "whole.jsonl"), max_samples=5, **SHARES) == {
        s: whole[s][:5] for s in SPLITS
    }, "after the cut"


@files
def test_a_split_of_its_own_is_taken_whole_and_the_others_are_cut_from_train(tmp_path, row, task):
    """GSM8K has train and test, MBPP has validation too: a folder gives what it has."""
    write(tmp_path / "train.jsonl", [row(i) for i in range(100)])
    write(tmp_path / "test.jsonl", [row(i) for i in range(200, 220)])
    two = drawn(task, path=str(tmp_path), **SHARES)
    assert_disjoint(two)
    assert len(two["test"]) == 20 and len(two["train"]) + len(two["validation"]) == 100
    write(tmp_path / "validation.jsonl", [row(i) for i in range(300, 310)])
    three = drawn(task, path=str(tmp_path), **SHARES)
    assert (len(three["train"]), len(three["validation"]), len(three["test"])) == (100, 10, 20)


def test_a_share_moves_rows_between_its_split_and_train_alone(tmp_path):
    path = write(tmp_path / "rows.jsonl", [jsonl_row(i) for i in range(300)])
    task = partial(FILES["jsonl"][1], path=path)
    base, more_validation, more_test = (
        drawn(task, **s) for s in (SHARES, SHARES | {"validation": 0.4}, SHARES | {"held_out": 0.4})
    )
    assert set(base["validation"]) < set(more_validation["validation"]) and set(
        base["test"]
    ) == set(more_validation["test"])
    assert set(base["test"]) < set(more_test["test"]) and set(base["validation"]) == set(
        more_test["validation"]
    )


def test_validation_and_test_may_be_files_of_their_own(tmp_path):
    path, own, other = (
        write(tmp_path / f"{name}.jsonl", [jsonl_row(i) for i in numbers])
        for name, numbers in (("a", range(50)), ("b", range(50, 55)), ("c", range(60, 70)))
    )
    found = drawn(FILES["jsonl"][1], path=path, validation_path=own, test_path=other)
    assert [len(found[split]) for split in SPLITS] == [50, 5, 10]


@files
def test_an_empty_split_says_what_to_set(tmp_path, row, task):
    path = write(tmp_path / "rows.jsonl", [row(i) for i in range(30)])
    for share, split in (("validation", "validation"), ("held_out", "test")):
        with pytest.raises(
            DataError, match=rf"task\.{share}=0\.0 leaves no {split} rows.*raise it"
        ):
            task(path=path, split=split, **SHARES | {share: 0.0})
    with pytest.raises(DataError, match="use train, validation or test"):
        task(path=path, split="dev", **SHARES)


@pytest.mark.parametrize(
    "shares",
    [
        {"validation": -0.1},
        {"held_out": 1.0},
        {"validation": 0.5, "held_out": 0.5},
        {"held_out": float("nan")},
    ],
)
@pytest.mark.parametrize("name", [*FILES, "guess_number"])
def test_shares_that_leave_nothing_to_train_on_are_refused(tmp_path, shares, name):
    path = write(
        tmp_path / "rows.jsonl", [FILES.get(name, FILES["jsonl"])[0](i) for i in range(30)]
    )
    task = guess_number if name == "guess_number" else partial(FILES[name][1], path=path)
    with pytest.raises(ConfigError, match=r"task\.(validation|held_out)"):
        task(split="train", **shares)


def test_the_cut_is_pinned():
    """Results of earlier runs compare only while these stay."""
    found = [choose_split(f"question {i}", validation=0.3, held_out=0.3) for i in range(24)]
    assert [i for i, split in enumerate(found) if split == "test"] == [12, 15, 19, 21, 22]
    assert [i for i, split in enumerate(found) if split == "train"] == [3, 4, 7, 9, 11, 16, 20, 23]


# ---------------------------------------------------------------------------------------- generated


@pytest.mark.parametrize("task", GENERATED.values(), ids=GENERATED)
@pytest.mark.parametrize("seed", [0, 3])
def test_generated_problems_are_disjoint_whatever_their_seed(task, seed):
    found = [drawn(task, seed=s) for s in (0, seed)]
    assert_disjoint({split: [p for own in found for p in own[split]] for split in SPLITS})
    ids = [t.id for split in SPLITS for t in task(split=split, seed=seed)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("task", GENERATED.values(), ids=GENERATED)
def test_more_generated_problems_move_none(task):
    more, fewer = drawn(task), drawn(task, max_samples=100)
    assert all(set(fewer[split]) <= set(more[split]) for split in SPLITS)


def test_every_number_to_guess_is_hidden_in_one_split():
    games = {
        split: {int(t.answer) for t in guess_number(split=split, **SHARES)} for split in SPLITS
    }
    assert sorted(n for own in games.values() for n in own) == list(range(1, 101))
    with pytest.raises(DataError, match=r"task\.validation=0\.01.*none of the \d+ numbers"):
        guess_number(split="validation", low=1, high=5, validation=0.01)


def test_a_mixture_hands_the_split_to_its_parts(tmp_path):
    path = write(tmp_path / "rows.jsonl", [jsonl_row(i) for i in range(60)])
    whole = mixture(
        parts={
            "sums": GENERATED["arithmetic"],
            "rows": partial(FILES["jsonl"][1], path=path, **SHARES),
        }
    )
    found = {split: whole(split=split) for split in SPLITS}
    assert_disjoint({split: [problem(t) for t in own] for split, own in found.items()})
    rows = {split: {t.id for t in own if t.part == "rows"} for split, own in found.items()}
    assert all(i.startswith(f"rows/{split}/") for split, own in rows.items() for i in own)


# ------------------------------------------------------------------------------------------ overlap


def test_problems_that_stand_in_two_splits_are_counted():
    """Files of a user's own may share rows, and a game whose prompts are all alike has the same
    numbers everywhere."""

    def task(i: int, split: str, **changes) -> Task:
        return Task(f"{split}/{i}", ({"role": "user", "content": f"q{i}"},), str(i))._replace(
            **changes
        )

    splits = Splits(
        [task(i, "train") for i in range(9)],
        [task(8, "validation")],
        [task(i, "test") for i in range(7, 12)],
    )
    said = find_overlaps(splits)
    assert len(said) == 3
    assert (
        "1 of 1 validation problems" in said[0]
        and "2 of 5 test problems" in said[1]
        and "1 of 5 test" in said[2]
    )
    (said,) = find_overlaps(
        splits._replace(train=[task(i, "train", answer="x") for i in range(9)], validation=[])
    )
    assert said.startswith("2 prompts have rows with different answers")
    seeds = [Task(f"e/{i}", (), metadata={"seed": i}) for i in range(4)]
    assert (
        find_overlaps(Splits(seeds[:2], seeds[2:3], seeds[3:])) == []
        and len(find_overlaps(Splits(seeds, seeds[:1], []))) == 1
    )
    games = Splits(*(guess_number(split=split) for split in SPLITS))
    assert "1024 of 1024 test problems" in find_overlaps(games)[1]
