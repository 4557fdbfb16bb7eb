"""The skills of experiments/laptop: problems follow from the seed, splits are disjoint, and each
reward is 1 for the right answer and 0 for named wrong ones."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import runpy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from parametrise import each
from rlkit.extras.pretrained.tasks import digits, spell
from rlkit.rewards import numeric
from rlkit.types import SPLITS, Rollout, Step, Task

ROOT = Path(__file__).resolve().parents[3]
EXPERIMENTS = ROOT / "experiments"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXPERIMENTS / "laptop" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


skills = load("skills")
learned = load("learned")
study = load("../study")
SKILLS = (
    digits,
    skills.larger,
    skills.form,
    skills.oldest,
    skills.tool,
    skills.words,
    skills.words_with_tool,
    skills.doors,
)


def asked(task: Task) -> str:
    """The question behind the worked examples. A question about two numbers is the same in either
    order."""
    question = task.messages[-1]["content"]
    if task.id.startswith("larger"):
        return str(sorted(question.rstrip("?").replace(",", "").split()[-3::2]))
    return question


@pytest.mark.slow
@each("skill", SKILLS)
def test_problems_follow_from_the_seed_and_splits_share_none(skill):
    splits = [skill(split=split, seed=3, max_samples=80) for split in SPLITS]
    assert splits == [skill(split=split, seed=3, max_samples=80) for split in SPLITS]
    assert [len(tasks) for tasks in splits] == [80, 80, 80]
    assert skill(split="train", seed=4, max_samples=80) != splits[0]
    first, second, third = ({asked(task) for task in tasks} for tasks in splits)
    assert not first & second and not first & third and not second & third
    for task in splits[2]:
        assert asked(task) not in str(task.messages[:-1])


def reply(task: Task, *texts: str, **fields: Any) -> Rollout:
    steps = [Step((), (), (), (), "stop", content=text) for text in texts]
    return Rollout(task, tuple(steps), **fields)


def test_the_larger_number_is_right_and_the_smaller_is_wrong():
    for task in skills.larger(split="test", max_samples=50):
        a, b = map(int, task.messages[-1]["content"].rstrip("?").replace(",", "").split()[-3::2])
        assert numeric(reply(task, str(max(a, b)))) == 1
        assert numeric(reply(task, str(min(a, b)))) == 0
        assert numeric(reply(task, "neither")) == 0


@each(
    ("number", "words"),
    [
        (7, "seven"),
        (40, "forty"),
        (58, "fifty-eight"),
        (100, "one hundred"),
        (305, "three hundred and five"),
        (712, "seven hundred and twelve"),
        (1000, "one thousand"),
        (7012, "seven thousand and twelve"),
        (2350, "two thousand three hundred and fifty"),
        (9999, "nine thousand nine hundred and ninety-nine"),
    ],
)
def test_a_number_in_words(number, words):
    assert spell(number) == words


@pytest.mark.slow
def test_each_number_in_words_is_asked_once_and_its_digits_are_right():
    asked = [task for split in SPLITS for task in digits(split=split, max_samples=9000)]
    assert len(asked) == len({task.answer for task in asked}) == 9000
    for task in asked[::500]:
        assert f"Write {spell(int(task.answer))} in" in task.messages[-1]["content"]
        assert numeric(reply(task, task.answer)) == 1
        assert numeric(reply(task, task.answer[::-1] + "0")) == 0


FORM = Task("form", (), '{"name": "Eva", "age": 66}')


@each(
    ("text", "score"),
    [
        ('{"name": "Eva", "age": 66}', 1),
        ('\n{"age": 66,"name":"Eva"} ', 1),
        ('{"name": "Cem", "age": 65}', 0),
        ('{"name": "Eva", "age": 65}', 0),
        ('{"name": "Eva", "age": "66"}', 0),
        ('{"name": "Eva"}', 0),
        ('{"name": "Eva", "age": 66, "city": "Rome"}', 0),
        ('```json\n{"name": "Eva", "age": 66}\n```', 0),
        ('The oldest is {"name": "Eva", "age": 66}', 0),
        ("Eva", 0),
        ("", 0),
    ],
)
def test_json_is_right_in_form_and_content(text, score):
    assert skills.same_json(reply(FORM, text)) == score


def test_json_of_a_truncated_episode_is_wrong():
    assert skills.same_json(reply(FORM, FORM.answer, status="truncated")) == 0


def test_the_name_and_the_number_are_the_answer():
    assert skills.ask_coins("Eva", 207) == "Eva has two hundred and seven coins."
    assert json.loads(skills.coins_json("Eva", 207)) == {"name": "Eva", "coins": 207}
    numbers = [
        {json.loads(task.answer)["coins"] for task in skills.form(split=split, max_samples=500)}
        for split in SPLITS
    ]
    assert not set.intersection(*numbers) and len(set.union(*numbers)) == sum(map(len, numbers))


def test_the_oldest_person_is_the_answer():
    people = (("Ida", 34), ("Cem", 65), ("Eva", 66))
    assert skills.ask_oldest(people) == "Ida is 34, Cem is 65 and Eva is 66. Who is the oldest?"
    assert json.loads(skills.oldest_json(people)) == {"name": "Eva", "age": 66}


@each("skill", (skills.tool, skills.words_with_tool))
def test_a_demonstration_ends_with_the_right_answer_that_the_tool_gave(skill):
    for task in skill(split="train", seed=0, max_samples=50):
        messages = task.metadata["messages"]
        assert messages[: len(task.messages)] == list(task.messages)
        assert messages[-2]["role"] == "tool" and messages[-2]["content"] == task.answer
        assert numeric(reply(task, messages[-1]["content"])) == 1
        assert numeric(reply(task, f"#### {int(task.answer) + 1}")) == 0


def test_a_sum_takes_two_calls_of_the_calculator():
    for task in skills.tool(split="train", seed=0, max_samples=50):
        calls = [m["tool_calls"][0] for m in task.metadata["messages"] if "tool_calls" in m]
        first, second = (call["function"]["arguments"]["expression"] for call in calls)
        a, b = map(int, first.split(" * "))
        product, sign, c = second.split()
        assert int(product) == a * b
        then = {"+": "add", "-": "subtract"}[sign]
        question = f"Multiply {spell(a)} by {b}, then {then} {spell(int(c))}."
        assert task.messages[0]["content"] == question


@each(
    ("expression", "text"),
    [
        ("6 + 4 - 3", "6 + 4 = 10. 10 - 3 = 7. #### 7"),
        ("(14 + 4) / 6", "14 + 4 = 18. 18 / 6 = 3. #### 3"),
        ("3 * 5 - 4", "3 * 5 = 15. 15 - 4 = 11. #### 11"),
    ],
)
def test_a_worked_solution_calculates_from_left_to_right(expression, text):
    assert skills.solution(expression) == text


def test_every_worked_solution_is_right():
    for task in skills.words(split="train", seed=0, max_samples=200):
        solved = reply(task, task.metadata["messages"][-1]["content"])
        assert numeric(solved) == 1
        assert numeric(reply(task, f"#### {int(task.answer) + 1}")) == 0


GAME = Task("doors", (), "red blue gold")


@each(
    ("keys", "score", "over"),
    [
        (["red", "blue", "gold"], 1, True),
        (["Red", "blue.", " gold\n"], 1, True),
        (["red", "blue"], 0, False),
        (["red"], 0, False),
        (["blue"], 0, True),
        (["red", "blue", "blue"], 0, True),
        (["red", "gold"], 0, True),
        (["red blue gold"], 0, True),
        (["the red one"], 0, True),
    ],
)
def test_a_game_is_won_by_every_key_in_its_order(keys, score, over):
    played = reply(GAME, *keys)
    assert skills.all_open(played) == score
    assert skills.is_over(played, len(keys) - 1) == over


def test_the_next_question_names_the_next_door_and_no_colour():
    assert skills.next_door(reply(GAME, "red"), 0) == "Door 1 is open. Which key opens door 2?"
    first = skills.ask_door(GAME.answer.split(), 0)
    assert first.startswith("Doors: 1 red, 2 blue, 3 gold. ")


def test_the_coin_has_its_rate_and_reads_no_reply():
    tasks = skills.larger(split="train", max_samples=2000)
    tosses = [skills.coin(reply(task, "1"), rate=0.35) for task in tasks]
    assert tosses == [skills.coin(reply(task, task.answer), rate=0.35) for task in tasks]
    # five standard errors of 2,000 draws
    assert abs(sum(tosses) / 2000 - 0.35) < 5 * (0.35 * 0.65 / 2000) ** 0.5


@pytest.mark.slow
def test_the_study_of_rates_has_its_former_rows(tmp_path):
    script = tmp_path / "pairs.py"
    script.write_text((EXPERIMENTS / "rates" / "smollm2" / "pairs.py").read_text())
    runpy.run_path(str(script), run_name="__main__")
    digests = [
        hashlib.sha256((tmp_path / f"{name}.jsonl").read_bytes()).hexdigest()[:16]
        for name in ("train", "test")
    ]
    assert digests == ["2bb77c47ce7e716b", "d6279e055a10bfbb"]


@each(
    ("base", "final", "low", "expected"),
    [
        (0.4, 0.6, 0.51, True),
        (0.4, 0.59, 0.5, False),  # rises by less than 0.2
        (0.4, 0.62, 0.4, False),  # the interval holds the start
        (0.6, 0.4, 0.3, False),
    ],
)
def test_a_seed_has_learned_by_the_rule_of_the_page(base, final, low, expected):
    row = {"base": str(base), "final": str(final), "final_low": str(low)}
    assert learned.has_learned(row) == expected


def test_solutions_of_gsm8k_lose_the_calculator_of_their_authors(tmp_path):
    row = {"question": "48 and half of it?", "answer": "48/2 = <<48/2=24>>24.\n#### 72"}
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n")
    (task,) = skills.gsm8k(path=str(tmp_path), split="test")
    assert task.metadata["messages"][-1]["content"] == "48/2 = 24.\n#### 72"
    assert (task.answer, task.environment) == ("72", "single_turn")


def test_rows_of_other_settings_are_not_mixed_with_new_ones(capsys):
    rows = [{"variant": "GRPO", "seed": "3", "overrides": "trainer.steps=30"}]
    study.check_settings(rows, {"GRPO": ["trainer.steps=30"], "new": []}, missing=True)
    study.check_settings(rows, {"new": []}, missing=True)  # the study has this variant no longer
    changed = {"GRPO": ["trainer.steps=20"]}
    with pytest.raises(SystemExit, match="has GRPO, seed 3, with other overrides"):
        study.check_settings(rows, changed, missing=True)
    assert capsys.readouterr().out == ""
    study.check_settings(rows, changed, missing=False)  # the table of a complete study
    assert capsys.readouterr().out.startswith("note: results.csv has GRPO, seed 3, with other")


def test_an_interrupted_study_begins_no_further_run():
    begun: list[int] = []
    release = threading.Event()

    def run(number: int) -> None:
        begun.append(number)
        release.wait()

    with (
        pytest.raises(KeyboardInterrupt),
        ThreadPoolExecutor(1) as pool,
        closing(SimpleNamespace(close=release.set)),
        study.end_runs(pool),
    ):
        for number in range(5):
            pool.submit(run, number)
        raise KeyboardInterrupt
    assert len(begun) <= 1
