"""Skills for a small language model: problems, worked examples, environments, rewards.

Each task function takes `split`, `seed` and `max_samples`. Everything follows from (seed, split),
and a problem belongs to one split by its hash. The skill `digits` ships with rlkit.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable, Sequence

from rlkit.environments import calculator
from rlkit.environments.tool_parsers import load_json
from rlkit.extras.pretrained.tasks import spell
from rlkit.rewards import final_answer, no_gold
from rlkit.tasks import arithmetic
from rlkit.tasks import gsm8k as read_gsm8k
from rlkit.tasks.splits import check_split, choose_split
from rlkit.types import Message, Rollout, Split, Task, gives

NAMES = ("Ann", "Ben", "Cem", "Eva", "Gus", "Ida", "Jim", "Kim", "Leo", "Mia", "Ned", "Pia")
COLOURS = (
    *("red", "blue", "gold", "pink", "green", "black"),
    *("white", "brown", "grey", "orange", "purple", "yellow"),
    *("silver", "violet", "beige", "cream"),
)


def draw_problems(
    name: str,
    draw: Callable[[random.Random], Sequence],
    split: Split,
    seed: int,
    count: int,
    key: Callable[[Sequence], Sequence] = tuple,
) -> list[Sequence]:
    """Return `count` problems of a split, made by `draw`.

    A fifth of all possible problems is test, and a tenth is validation. Problems with the same
    `key` are in the same split.
    """
    check_split(split)
    rng = random.Random(f"{name}/{seed}/{split}")
    problems: list[Sequence] = []
    while len(problems) < count:
        problem = draw(rng)
        if choose_split(key(problem), validation=0.1, held_out=0.2) == split:
            problems.append(problem)
    return problems


def say(role: str, content: str) -> Message:
    return {"role": role, "content": content}


# ----------------------------------------------------------- a placebo: rewards without a meaning


@gives("binary")
def coin(rollout: Rollout, *, rate: float) -> float:
    """Return 1 for a share `rate` of all rollouts, whatever their text, else 0.

    It is more even than chance: at 0.35, 2 to 4 of the 8 replies to a prompt are paid, and at 0.09
    none or 2.
    """
    name = f"{rollout.task.id}/{rollout.group}/{rollout.sample}"
    return float(zlib.crc32(name.encode()) < rate * 2**32)


# ----------------------------------------------------------- larger: the larger of two numbers

LARGER_EXAMPLES = ((58, 731), (904, 26))


def ask_larger(a: int, b: int) -> Message:
    return say("user", f"Which number is larger, {a} or {b}?")


def draw_pair(rng: random.Random) -> list[int]:
    """Return two different numbers from 10 to 999."""
    return rng.sample(range(10, 1000), 2)


def larger(*, split: Split, seed: int = 0, max_samples: int = 1024) -> list[Task]:
    """Return tasks that ask for the larger of two numbers, after two worked examples.

    A pair belongs to one split, in either order of its numbers.
    """
    shown = [
        message
        for pair in LARGER_EXAMPLES
        for message in (ask_larger(*pair), say("assistant", str(max(pair))))
    ]
    return [
        Task(
            f"larger/{split}/{seed}/{i}",
            (*shown, ask_larger(a, b)),
            str(max(a, b)),
            "numeric",
            "single_turn",
        )
        for i, (a, b) in enumerate(
            draw_problems("larger", draw_pair, split, seed, max_samples, key=sorted)
        )
    ]


# -------------------------------------------- form, oldest: JSON with the right content


def ask_coins(name: str, number: int) -> str:
    return f"{name} has {spell(number)} coins."


def coins_json(name: str, number: int) -> str:
    return json.dumps({"name": name, "coins": number})


def draw_coins(rng: random.Random) -> tuple[str, int]:
    """Return a name and a number from 100 to 999."""
    return rng.choice(NAMES), rng.randrange(100, 1000)


FORM_EXAMPLE = ("Sam", 352)


def form(*, split: Split, seed: int = 0, max_samples: int = 1024) -> list[Task]:
    """Return tasks that tell a name and a number in words, after a worked example that writes both
    as JSON. A number is in one split, whatever the name."""
    example = [
        say("user", ask_coins(*FORM_EXAMPLE)),
        say("assistant", coins_json(*FORM_EXAMPLE)),
    ]
    return [
        Task(
            f"form/{split}/{seed}/{i}",
            (*example, say("user", ask_coins(name, number))),
            coins_json(name, number),
            "same_json",
            "single_turn",
        )
        for i, (name, number) in enumerate(
            draw_problems("form", draw_coins, split, seed, max_samples, key=lambda own: own[1:])
        )
    ]


def draw_people(rng: random.Random) -> tuple[tuple[str, int], ...]:
    """Return three people with different ages."""
    return tuple(zip(rng.sample(NAMES, 3), rng.sample(range(18, 90), 3), strict=True))


def ask_oldest(people: Sequence[tuple[str, int]]) -> str:
    said = [f"{name} is {age}" for name, age in people]
    return f"{said[0]}, {said[1]} and {said[2]}. Who is the oldest?"


def oldest_json(people: Sequence[tuple[str, int]]) -> str:
    name, age = max(people, key=lambda person: person[1])
    return json.dumps({"name": name, "age": age})


OLDEST_EXAMPLE = (("Sam", 42), ("Ola", 67), ("Fay", 25))


def oldest(*, split: Split, seed: int = 0, max_samples: int = 1024) -> list[Task]:
    """Return tasks that ask for the oldest of three people as JSON, after one worked example."""
    example = [
        say("user", ask_oldest(OLDEST_EXAMPLE)),
        say("assistant", oldest_json(OLDEST_EXAMPLE)),
    ]
    return [
        Task(
            f"oldest/{split}/{seed}/{i}",
            (*example, say("user", ask_oldest(people))),
            oldest_json(people),
            "same_json",
            "single_turn",
        )
        for i, people in enumerate(draw_problems("oldest", draw_people, split, seed, max_samples))
    ]


@gives("binary")
def same_json(rollout: Rollout) -> float:
    """Return 1 if the whole reply is JSON with the content of `task.answer`, else 0."""
    answer = final_answer(rollout)
    try:
        given = load_json(answer or "")
    except ValueError:
        return 0.0
    return float(given == json.loads(rollout.task.answer))


# -------------------------------------------- tool, words: calls of the calculator, with a warm-up


def solve(question: str, expressions: Sequence[str], answer: int | str) -> list[Message]:
    """Return a conversation that calls the calculator once for each expression and then answers."""
    messages = [say("user", question)]
    for number, expression in enumerate(expressions):
        name = f"call_{number}"
        function = {"name": "calculator", "arguments": {"expression": expression}}
        call = {"id": name, "type": "function", "function": function}
        result = {"tool_call_id": name, "name": "calculator", "content": calculator(expression)}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", **result})
    return [*messages, say("assistant", f"#### {answer}")]


def draw_sum(rng: random.Random) -> tuple[int, int, str, int]:
    """Return the numbers and the sign of a · b ± c, always positive."""
    return (
        rng.randrange(100, 1000),
        rng.randrange(12, 100),
        rng.choice("+-"),
        rng.randrange(100, 1000),
    )


def tool(*, split: Split, seed: int = 0, max_samples: int = 1024) -> list[Task]:
    """Return tasks with a product and then a sum, one call for each. Numbers of three digits are in
    words, as in `form`: with all numbers in digits, eight steps of the warm-up solve every problem.

    The conversation that solves a task is its `metadata["messages"]`, for algorithm=sft.
    """
    tasks = []
    for i, (a, b, sign, c) in enumerate(draw_problems("tool", draw_sum, split, seed, max_samples)):
        second = "add" if sign == "+" else "subtract"
        question = f"Multiply {spell(a)} by {b}, then {second} {spell(c)}."
        answer = a * b + c if sign == "+" else a * b - c
        messages = solve(question, (f"{a} * {b}", f"{a * b} {sign} {c}"), answer)
        tasks.append(
            Task(
                f"tool/{split}/{seed}/{i}",
                (messages[0],),
                str(answer),
                "numeric",
                "tool_use",
                {"messages": messages},
            )
        )
    return tasks


def two_steps(split: Split, seed: int, count: int) -> list[Task]:
    """Return the word problems of task=arithmetic with two operations."""
    drawn = arithmetic(split=split, seed=seed, max_samples=8 * count)
    return [task for task in drawn if len(operations_of(task)) == 2][:count]


def operations_of(task: Task) -> list[str]:
    return [kind for kind in task.metadata["kinds"] if kind != "distractor"]


def solution(expression: str) -> str:
    """Return both operations with their results, and the answer.

    >>> solution("(14 + 4) / 6")
    '14 + 4 = 18. 18 / 6 = 3. #### 3'
    """
    a, first, b, second, c = expression.replace("(", "").replace(")", "").split()
    middle = calculator(f"{a} {first} {b}")
    answer = calculator(f"{middle} {second} {c}")
    return f"{a} {first} {b} = {middle}. {middle} {second} {c} = {answer}. #### {answer}"


def words(*, split: Split, seed: int = 0, max_samples: int = 1024) -> list[Task]:
    """Return two-step word problems without a tool; `metadata["messages"]` has the solution."""
    return [
        task._replace(
            id=f"words/{split}/{seed}/{i}",
            environment="single_turn",
            metadata={
                "messages": [
                    *task.messages,
                    say("assistant", solution(task.metadata["expression"])),
                ]
            },
        )
        for i, task in enumerate(two_steps(split, seed, max_samples))
    ]


def words_with_tool(*, split: Split, seed: int = 0, max_samples: int = 1024) -> list[Task]:
    """Return the problems of `words` with the calculator.

    `metadata["messages"]` has the conversation that solves a task, as in `tool`.
    """
    return [
        task._replace(
            id=f"words_with_tool/{split}/{seed}/{i}",
            metadata={
                "messages": solve(
                    task.messages[0]["content"], [task.metadata["expression"]], task.answer
                )
            },
        )
        for i, task in enumerate(two_steps(split, seed, max_samples))
    ]


# -------------------------------------------------------------- GSM8K: real problems of this kind


def gsm8k(*, path: str, split: Split, seed: int = 0, max_samples: int | None = None) -> list[Task]:
    """Return GSM8K's problems without a tool; `metadata["messages"]` has the solution, without its
    annotations for a calculator. Arguments as of `rlkit.tasks.gsm8k`."""
    rows = read_gsm8k(
        path=path, split=split, seed=seed, max_samples=max_samples, environment="single_turn"
    )
    return [
        task._replace(
            metadata={
                "messages": [
                    *task.messages,
                    say("assistant", re.sub("<<[^>]*>>", "", task.metadata["solution"])),
                ]
            }
        )
        for task in rows
    ]


# --------------------------------------------------------- doors: a game that has to be remembered

DOORS = 3
DOORS_EXAMPLE = ("lime", "teal", "plum")


def draw_keys(rng: random.Random) -> tuple[str, ...]:
    return tuple(rng.sample(COLOURS, DOORS))


def ask_door(keys: Sequence[str], number: int) -> str:
    """Return the message before door `number`, counted from 0. The colours are told only once."""
    if number == 0:
        listed = ", ".join(f"{i} {key}" for i, key in enumerate(keys, 1))
        return f"Doors: {listed}. Each opens with the key of its colour. Which key opens door 1?"
    return f"Door {number} is open. Which key opens door {number + 1}?"


def doors(*, split: Split, seed: int = 0, max_samples: int = 1024) -> list[Task]:
    """Return tasks to open all doors in order, after an example of a won game."""
    example: list[Message] = []
    for number, key in enumerate(DOORS_EXAMPLE):
        example += [say("user", ask_door(DOORS_EXAMPLE, number)), say("assistant", key)]
    return [
        Task(
            f"doors/{split}/{seed}/{i}",
            (*example, say("user", ask_door(keys, 0))),
            " ".join(keys),
            "all_open",
            "doors",
        )
        for i, keys in enumerate(draw_problems("doors", draw_keys, split, seed, max_samples))
    ]


def open_doors(rollout: Rollout) -> int:
    """Return how many doors the replies open before the first wrong key."""
    count = 0
    for key, step in zip(rollout.task.answer.split(), rollout.steps, strict=False):
        if step.content.strip().rstrip(".").lower() != key:
            break
        count += 1
    return count


def next_door(rollout: Rollout, step: int) -> str:
    """Return the next question of the game."""
    return ask_door(rollout.task.answer.split(), step + 1)


def is_over(rollout: Rollout, step: int) -> bool:
    """Return whether the last key was wrong, or the last door is open."""
    return open_doors(rollout) <= step or step + 1 == DOORS


@gives("binary")
@no_gold  # one reply cannot hold the whole game
def all_open(rollout: Rollout) -> float:
    """Return 1 if every reply was the right key and all doors are open, else 0."""
    return float(open_doors(rollout) == DOORS)
