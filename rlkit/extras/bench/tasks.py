"""Small generated tasks with a computed optimum. Each isolates one difference between algorithms.

Every problem lists its right replies, or is a game with countable states. So the expected rewards
of a random policy and of the best possible policy are known. A run's score is its place between
the two, 1 - regret: 0 is as good as random, 1 as good as possible. All splits have the same
problems. So the score measures how fast the problems are learned, not how well the policy
generalises.

Every factory takes `placebo`: "coin" makes the rewards of training rows a coin, "format" makes them
1 for any reply. In `chain` this is true of the turn that counts, and the others stay coins.
Validation and test rows stay as they are. A method counts only if it is better than both placebos
(Shao et al. 2025, "Spurious Rewards", arXiv:2506.10947).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rlkit.tasks.splits import check_split
from rlkit.types import Message, Split, Task, ranges

LETTERS = "abcdefghijklmnopqrstuvwxyz012345"  # 32 symbols
Placebo = Literal["none", "coin", "format"]
# a placebo's change to a row of training
OF_A_ROW: Mapping[str, Mapping[str, Any]] = {"coin": {"flip": 0.5}, "format": {"any": True}}
# added to the seed of a game's reset
OF_A_GAME: Mapping[str, int] = {"truth": 0, "none": 1000, "coin": 2000, "format": 3000}


class Value(NamedTuple):
    """The expected rewards of a policy with random well-formed replies, and of the best policy."""

    random: float
    best: float

    def regret(self, reward: float) -> float:
        """Compute the regret of a reward: 0 for the best policy's reward, 1 for the random
        policy's."""
        return (self.best - reward) / (self.best - self.random)


class Question(NamedTuple):
    """A problem: its prompt and its right replies."""

    prompt: str
    right: Sequence[str]
    flip: float = 0.0  # chance that the verifier errs in training
    pay: float = 1.0  # of a right reply in training


def deal_tasks(
    name: str,
    rows: Sequence[Question],
    form: Sequence[str],
    *,
    split: Split,
    seed: int,
    max_samples: int,
    placebo: Placebo,
) -> list[Task]:
    """Make tasks of problems. Each comes once before any comes again, in an order by split and
    seed.

    Args:
      form: the characters for each place of a reply. The value of each problem is an enumeration of
        all of them.
    """
    replies = ["".join(reply) for reply in itertools.product(*form)]
    tasks = []
    for row in rows:
        earned = [float(reply in row.right) for reply in replies]
        own: dict[str, Any] = {
            "right": list(row.right),
            "value": [sum(earned) / len(earned), max(earned)],
        }
        if split == "train":
            own |= OF_A_ROW.get(placebo, {"flip": row.flip, "pay": row.pay})
        messages = ({"role": "user", "content": row.prompt},)
        verdict = "listed" if row.pay == 1 else "paid"
        tasks.append(Task(name, messages, reward=verdict, environment="single_turn", metadata=own))  # type: ignore[arg-type]
    return repeat_problems(tasks, split, seed, max_samples)


def repeat_problems(problems: Sequence[Task], split: Split, seed: int, count: int) -> list[Task]:
    """Repeat problems in a random order; each comes once before any comes again."""
    check_split(split)
    rng = random.Random(f"{problems[0].id}/{seed}/{split}")
    out = list[Task]()
    while len(out) < count:
        out += rng.sample(problems, len(problems))
    return [task._replace(id=f"{task.id}/{split}/{seed}/{i}") for i, task in enumerate(out[:count])]


def make_games(
    name: str,
    values: Sequence[Value],
    *,
    split: Split,
    seed: int,
    max_samples: int,
    placebo: Placebo,
) -> list[Task]:
    """Make episodes of a game with numbered problems. `metadata["seed"]`, for its reset, is the
    number (see `OF_A_GAME`).

    Args:
      values: of the problems.
    """
    offset = OF_A_GAME[placebo if split == "train" else "truth"]
    rows = [{"seed": i + offset, "value": list(value)} for i, value in enumerate(values)]
    tasks = [
        Task(name, (), reward="environment", environment="gymnasium", metadata=row) for row in rows
    ]
    return repeat_problems(tasks, split, seed, max_samples)


def average_value(tasks: Sequence[Task]) -> Value:
    """Average over tasks the expected rewards in their metadata."""
    return Value(*(sum(task.metadata["value"][i] for task in tasks) / len(tasks) for i in (0, 1)))


# ---------------------------------------------------------------------------------------- one reply


@ranges(problems=(1, 32), letters=(2, 32), depths=(1, None))
def needle(
    *,
    split: Split = "train",
    seed: int = 0,
    max_samples: int = 4096,
    placebo: Placebo = "none",
    problems: int = 12,
    letters: int = 16,
    depths: int = 3,
) -> list[Task]:
    """Make the task of exploration: find two symbols. A random reply to a problem is right with a
    chance of 1/letters, or half, a quarter, … of this, by problem.

    Args:
      problems: number of problems, at most 32.
      letters: number of letters for each place of a reply, a power of 2 up to 32.
      depths: number of different chances; problem i has the chance number i modulo depths.
    """
    rng = random.Random(f"needle of {seed}")
    rows = []
    for i in range(problems):
        first = rng.choice(LETTERS[:letters])
        others = rng.sample(LETTERS[:letters], max(1, letters >> (i % depths)))
        rows.append(Question(LETTERS[i], [first + second for second in others]))
    return deal_tasks(
        "needle",
        rows,
        [LETTERS[:letters]] * 2,
        split=split,
        seed=seed,
        max_samples=max_samples,
        placebo=placebo,
    )


def deal_letters(
    name: str,
    problems: int,
    seed: int,
    change: Callable[[int], Mapping[str, float]] = lambda i: {},
    **given: Any,
) -> list[Task]:
    """Make tasks of problems with one right letter of eight.

    Args:
      change: number of a problem → fields of its `Question`.
      given: further arguments of `deal_tasks`.
    """
    rng = random.Random(f"{name} of {seed}")
    rows = [Question(LETTERS[i], [rng.choice(LETTERS[:8])], **change(i)) for i in range(problems)]
    return deal_tasks(name, rows, [LETTERS[:8]], seed=seed, **given)


@ranges(problems=(1, 32))
def scales(
    *,
    split: Split = "train",
    seed: int = 0,
    max_samples: int = 4096,
    placebo: Placebo = "none",
    problems: int = 16,
) -> list[Task]:
    """Make the task of normalisation: one of eight letters is right. In training it pays 1, 10, 100
    or 1000, by problem; in evaluations it pays 1."""
    given: dict[str, Any] = {"split": split, "max_samples": max_samples, "placebo": placebo}
    return deal_letters("scales", problems, seed, lambda i: {"pay": 10.0 ** (i % 4)}, **given)


@ranges(problems=(1, 32))
def noisy(
    *,
    split: Split = "train",
    seed: int = 0,
    max_samples: int = 4096,
    placebo: Placebo = "none",
    problems: int = 16,
) -> list[Task]:
    """Make the task of a verifier with errors: one of eight letters is right. The training verifier
    errs with a chance of 0, 0.15, 0.3 or 0.45, by problem."""
    given: dict[str, Any] = {"split": split, "max_samples": max_samples, "placebo": placebo}
    return deal_letters("noisy", problems, seed, lambda i: {"flip": 0.15 * (i % 4)}, **given)


@ranges(problems=(1, 32))
def stale(
    *,
    split: Split = "train",
    seed: int = 0,
    max_samples: int = 4096,
    placebo: Placebo = "none",
    problems: int = 16,
) -> list[Task]:
    """Make the task of off-policy corrections: one of eight letters is right. The difficulty comes
    from the preset, which samples with old weights."""
    given: dict[str, Any] = {"split": split, "max_samples": max_samples, "placebo": placebo}
    return deal_letters("stale", problems, seed, **given)


@ranges(problems=(1, 32), fooled=(1, None))
def proxy(
    *,
    split: Split = "train",
    seed: int = 0,
    max_samples: int = 4096,
    placebo: Placebo = "none",
    problems: int = 16,
    fooled: int = 3,
) -> list[Task]:
    """Make the task of reward hacking: the first letter of three is right or wrong, but a reply
    that ends in "aa" fools the verifier of some problems.

    A fooled verifier passes one random reply in eight for the right reason and one in 73 by the
    trick, and does not tell them apart. The trick is the same for all of these problems, but the
    right letter is not. In evaluations a reply with the trick is wrong. A policy kept close to the
    start is `π ∝ π_start · exp(r/β)`. This policy has the right reason eight times as often as the
    trick, however small β is.

    Args:
      fooled: one problem in `fooled` has a verifier open to the trick.
    """
    rng = random.Random(f"proxy of {seed}")
    rows = []
    ends = ["".join(end) for end in itertools.product(LETTERS[:8], repeat=2)]
    for i in range(problems):
        first = rng.choice(LETTERS[:8])
        honest = [first + end for end in ends if end != "aa"]
        tricks = (
            [other + "aa" for other in LETTERS[:8]]
            if split == "train" and placebo == "none" and i % fooled == 0
            else []
        )
        rows.append(Question(LETTERS[i], honest + tricks))
    return deal_tasks(
        "proxy",
        rows,
        [LETTERS[:8]] * 3,
        split=split,
        seed=seed,
        max_samples=max_samples,
        placebo=placebo,
    )


@ranges(problems=(1, 32))
def lengthy(
    *,
    split: Split = "train",
    seed: int = 0,
    max_samples: int = 4096,
    placebo: Placebo = "none",
    problems: int = 16,
    price: float = 0.05,
) -> list[Task]:
    """Make the task of length: a reply is right if the right letter of eight is among its letters,
    and every letter after the first costs a price.

    To reply with all eight letters is easier to learn than the right letter, and earns less. A
    random reply has 1 + n letters, where n is the sum of three geometric numbers of mean 1. So its
    expected score is `1 - 7/8 · E[(7/8)ⁿ] - 3 · price`, with `E[(7/8)ⁿ] = (8/9)³`.

    Args:
      price: price of a letter, in training and in evaluations.
    """
    rng = random.Random(f"lengthy of {seed}")
    tasks = []
    scored = OF_A_ROW.get(placebo if split == "train" else "none", {"price": price})
    for i in range(problems):
        own = {
            "right": [rng.choice(LETTERS[:8])],
            "among": True,
            "value": [1 - 7 / 8 * (8 / 9) ** 3 - 3 * price, 1.0],
            **scored,
        }
        message: Message = {"role": "user", "content": LETTERS[i]}
        tasks.append(
            Task("lengthy", (message,), reward="priced", environment="single_turn", metadata=own)
        )
    return repeat_problems(tasks, split, seed, max_samples)


# -------------------------------------------------------------------------------------------- games


@ranges(problems=(1, 32), choices=(2, 32))
def chain(
    *,
    split: Split = "train",
    seed: int = 0,
    max_samples: int = 4096,
    placebo: Placebo = "none",
    problems: int = 8,
    choices: int = 8,
) -> list[Task]:
    """Make the task of credit: the game `Chain`, in which one turn counts.

    Args:
      problems: number of problems. Each has one turn that counts, and a right letter for this turn.
      choices: number of letters in the game.
    """
    return make_games(
        "chain",
        [Value(1 / choices, 1.0)] * problems,
        split=split,
        seed=seed,
        max_samples=max_samples,
        placebo=placebo,
    )


@ranges(length=(1, 32), choices=(2, 32))
class Chain:
    """A game of `length` turns. One turn counts, and the problem decides which. The other turns pay
    `coin` or -`coin` at random in training, and nothing in evaluations.

    The first observation is the problem, each later one the number of the turn. Every reward is
    given at its turn. So in an algorithm with credit for each turn, the coins do not disturb the
    turn that counts. In an algorithm with the episode's reward on all turns, they nearly drown it.
    """

    def __init__(self, *, length: int = 6, choices: int = 8, coin: float = 1.0):
        self.length = length
        self.choices = choices
        self.coin = coin

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        """Choose a problem: its name, the turn that counts and the right letter there."""
        self.kind, number = divmod(seed, 1000)
        rng = random.Random(f"chain {number}")
        self.turn = 0
        self.counts = rng.randrange(self.length)
        self.right = rng.choice(LETTERS[: self.choices])
        return LETTERS[number], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one reply."""
        right = float(action == self.right)
        coin = float(random.random() < 0.5)
        reward = (
            (right, right, coin, 1.0)[self.kind]
            if self.turn == self.counts
            else self.coin * (2 * coin - 1) * (self.kind > 0)
        )
        self.turn += 1
        return LETTERS[-self.turn], reward, self.turn == self.length, False, {}


@ranges(problems=(1, 32), holes=(0, 9), length=(6, None))
def lake(
    *,
    split: Split = "train",
    seed: int = 0,
    max_samples: int = 4096,
    placebo: Placebo = "none",
    problems: int = 8,
    holes: int = 3,
    length: int = 10,
) -> list[Task]:
    """Make the task of many turns without a way back: the game `Lake`.

    Args:
      problems: number of maps.
      holes, length: holes of a map, and most turns of the game.
    """
    values = [compute_crossing(draw_holes(number, holes), length) for number in range(problems)]
    return make_games(
        "lake", values, split=split, seed=seed, max_samples=max_samples, placebo=placebo
    )


MOVES = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1)}
GOAL = 15  # the last of 4 × 4 cells; the first is the start


class Lake:
    """The game FrozenLake without slipping. Cross 4 × 4 cells from corner to corner within `length`
    turns, by the moves u, d, l and r, without falling into a hole.

    The goal pays 1 and ends the episode; a hole and the last turn end it with nothing. A move off
    the ice, or a reply that is no move, leaves the player in place. The first observation is the
    problem, which decides the holes. Each later observation is the cell.

    Source: the environment FrozenLake-v1 of Gymnasium (Towers et al. 2024, arXiv:2407.17032), with
    is_slippery=False and maps of its own.
    """

    def __init__(self, *, holes: int = 3, length: int = 10):
        self.holes = holes
        self.length = length

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        """Choose a problem: its name, and its map."""
        self.kind, number = divmod(seed, 1000)
        self.turn = 0
        self.cell = 0
        self.thin = draw_holes(number, self.holes)
        return LETTERS[number], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make one move."""
        self.turn = self.turn + 1
        self.cell = find_neighbour(self.cell, action)
        over = self.turn == self.length or self.cell == GOAL or self.cell in self.thin
        earned = (float(self.cell == GOAL),) * 2 + (float(random.random() < 0.5), 1.0)
        return LETTERS[self.cell], earned[self.kind] * over, over, False, {}


def find_neighbour(cell: int, action: str) -> int:
    """Return the cell after a move. The 4 × 4 cells are numbered row by row."""
    down, right = MOVES.get(action, (0, 0))
    row = cell // 4 + down
    column = cell % 4 + right
    return 4 * row + column if 0 <= row < 4 and 0 <= column < 4 else cell


def draw_holes(number: int, holes: int) -> frozenset[int]:
    """Draw the holes of a map, again and again until a way leads past them."""
    rng = random.Random(f"lake {number}")
    while not compute_crossing(thin := frozenset(rng.sample(range(1, GOAL), holes)), 16).best:
        pass
    return thin


def compute_crossing(thin: frozenset[int], length: int) -> Value:
    """Chance that random moves cross the ice within `length`, and 1 if any moves do: by dynamic
    programming over turns."""
    there = {0: 1.0}
    crossed = 0.0
    for _ in range(length):
        after: dict[int, float] = {}
        for (cell, chance), move in itertools.product(there.items(), MOVES):
            new = find_neighbour(cell, move)
            after[new] = after.get(new, 0.0) + chance / 4
        crossed += after.pop(GOAL, 0.0)
        there = {cell: chance for cell, chance in after.items() if cell not in thin}
    return Value(crossed, float(crossed > 0))
