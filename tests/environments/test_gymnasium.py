"""Environments with reset and step: one instance an episode, rewards at their steps, and failures
that end an episode and not the run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rlkit.config.problems.rows import check_verifier
from rlkit.engines import Batched
from rlkit.environments import gymnasium, single_turn
from rlkit.episodes import collect, count_failures, summarize
from rlkit.episodes.episode import read_opening
from rlkit.episodes.evaluation import greedy_accuracy, is_correct
from rlkit.errors import ConfigError, EnvironmentFailed
from rlkit.models import decode
from rlkit.models.chat import encode_scaffold
from rlkit.rewards import Reward, Term, environment, score
from rlkit.tasks import episodes
from rlkit.types import Generation, Task

REWARD = Reward("environment", {"task": Term(1.0, environment)})


class Countdown:
    """Take 1 or 2 from a number; 0 wins. Knows nothing of Gymnasium, and breaks when told to."""

    alive: list[Countdown] = []  # noqa: RUF012

    def reset(self, *, seed=None):
        self.left, self.closed = 3 + random.Random(seed).randrange(4), False
        Countdown.alive.append(self)
        return f"{self.left} left", {}

    def step(self, action):
        if action == "break":
            raise RuntimeError("no such move")
        if action == "odd":
            return "", float("nan"), False, False, {}
        if action == "stop":
            return "", 0.25, False, True, {}
        self.left -= int(action)
        return f"{self.left} left", 1.0 if self.left <= 0 else 0.1, self.left <= 0, False, {}

    def close(self):
        self.closed = True


def replies(*texts):
    """An engine that says the text of its turn; `texts` may be functions of (context, seed)."""

    def complete(policy, prompts, seeds, params):
        out = []
        for context, seed in zip(prompts, seeds, strict=True):
            opening = encode_scaffold(policy.renderer, "<|im_start|>assistant\n")
            turn = (
                sum(list(context[i : i + len(opening)]) == opening for i in range(len(context))) - 1
            )
            text = texts[min(turn, len(texts) - 1)]
            ids = tuple(
                encode_scaffold(
                    policy.renderer,
                    (text(decode(policy.renderer, context), seed) if callable(text) else text)
                    + "<|im_end|>",
                )
            )
            out.append(Generation(ids, (-1.0,) * len(ids), "stop"))
        return out

    return Batched(complete)


def play(tiny, engine, make=Countdown, tasks=None, group_size=1, **settings):
    Countdown.alive.clear()
    tasks = episodes(max_samples=1) if tasks is None else tasks
    rollouts = collect(
        tiny,
        tasks,
        engine=engine,
        environment=gymnasium(make=make, **settings),
        group_size=group_size,
    )
    return score(rollouts, REWARD)


def number(text: str) -> int:
    return int(text.split(" left")[0].split()[-1])


def test_observations_are_the_prompts_and_rewards_stand_at_their_steps(tiny):
    (rollout,) = play(tiny, replies("<think>\n2?\n</think>\n\n1", "1"))
    n = number(rollout.steps[0].prompt[0]["content"])
    assert [s.prompt[0]["content"] for s in rollout.steps] == [f"{n - i} left" for i in range(n)]
    assert [s.reward for s in rollout.steps] == [0.1] * (n - 1) + [1.0]
    assert (rollout.status, rollout.reward, rollout.total_reward) == (
        "terminated",
        0.0,
        pytest.approx(1.0 + 0.1 * (n - 1)),
    )
    assert is_correct(rollout) and all(instance.closed for instance in Countdown.alive)


def test_siblings_begin_alike_and_do_not_touch_each_other(tiny):
    """Interleaved in one batch, other actions by seed: each episode is what it is when it is played
    alone."""
    engine = replies(lambda text, seed: "12"[seed % 2])
    tasks = episodes(max_samples=3)
    together = play(tiny, engine, tasks=tasks, group_size=4)
    assert len({len(r.steps) for r in together}) > 1
    for r in together:
        assert r.steps[0].prompt_ids == together[4 * r.group].steps[0].prompt_ids
        left = number(r.steps[0].prompt[0]["content"])
        for i, s in enumerate(r.steps):
            assert s.prompt[-1]["content"] == f"{left} left"
            left -= int(s.content)
            assert (left <= 0) == (i == len(r.steps) - 1)
    assert all(instance.closed for instance in Countdown.alive) and len(Countdown.alive) == 3 * 4


@pytest.mark.parametrize(
    ("said", "truncation", "last", "total"),
    [
        (["1", "stop"], "environment", 0.25, 0.35),
        (["1", "break"], "error", None, None),
        (["1", "odd"], "error", None, None),
        (["1", "hello"], "error", None, None),
        (["1"], "steps", 0.1, 0.2),
    ],
)
def test_other_ends_are_truncations_and_failures_cannot_be_scored(
    tiny, said, truncation, last, total
):
    tasks = [
        t
        for t in episodes(max_samples=50)
        if 3 + random.Random(t.metadata["seed"]).randrange(4) == 6
    ][:1]
    (rollout,) = play(tiny, replies(*said), tasks=tasks, max_turns=2)
    assert (rollout.status, rollout.truncation, rollout.steps[-1].reward) == (
        "truncated",
        truncation,
        last,
    )
    assert rollout.total_reward == (None if total is None else pytest.approx(total))
    assert rollout.rewards == {
        "task": rollout.total_reward
    }  # what a filter on accuracy, gdpo and the metrics of the term read
    assert ("RuntimeError: no such move" in rollout.error) == (said[-1] == "break")
    assert summarize([rollout])[f"stop_reason/{truncation}"] == 1
    assert all(instance.closed for instance in Countdown.alive)


def test_a_failure_ends_one_episode_and_not_the_others(tiny):
    engine = replies(lambda text, seed: "break" if seed % 2 else "2")
    rollouts = play(tiny, engine, tasks=episodes(max_samples=4), group_size=2)
    assert {r.truncation for r in rollouts} == {"", "error"}


def test_a_reply_that_is_no_action_is_answered_and_counted(tiny):
    def parse(text):
        if text not in ("1", "2"):
            raise ValueError("say 1 or 2")
        return text

    (rollout,) = play(tiny, replies("what?", "2"), parse_action=parse)
    assert (
        rollout.steps[1].prompt[0]["content"] == "That is not an action: say 1 or 2"
        and rollout.steps[0].reward == 0.0
    )
    assert rollout.status == "terminated"


def test_the_session_survives_another_limit_of_replies(tiny):
    """`rlkit rollout max_steps=…` replaces fields of the environment."""
    env = gymnasium(make=Countdown)._replace(max_steps=1)
    (rollout,) = collect(tiny, episodes(max_samples=1), engine=replies("1"), environment=env)
    assert rollout.truncation == "steps" and rollout.steps[0].reward == 0.1


class Broken:
    def reset(self):
        return "", {}


@pytest.mark.parametrize("make", [Broken, dict])
def test_what_is_no_environment_is_refused_with_the_reason(tiny, make):
    with pytest.raises(ConfigError, match="cannot be made or reset"):
        play(tiny, replies("1"), make=make)


def test_seeds_of_the_splits_differ_and_rows_are_judged_by_their_environment():
    train, test = episodes(max_samples=500), episodes(split="test", max_samples=500)
    seeds = [{t.metadata["seed"] for t in tasks} for tasks in (train, test)]
    assert len(seeds[0]) == len(seeds[1]) == 500 and not seeds[0] & seeds[1]
    assert episodes(max_samples=500) == train and episodes(seed=1, max_samples=500) != train
    check_verifier(train, REWARD)  # there is no gold answer to try


def test_the_real_package(tiny):
    """A subclass of gymnasium.Env with its spaces, wrapped by gymnasium's own time limit."""
    gym = pytest.importorskip("gymnasium")

    class Echo(gym.Env):
        observation_space, action_space = gym.spaces.Text(20), gym.spaces.Text(20)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.word = str(self.np_random.integers(10))
            return f"Say {self.word}.", {}

        def step(self, action):
            return f"Say {self.word}.", float(action == self.word), action == self.word, False, {}

    def make():
        return gym.wrappers.TimeLimit(Echo(), max_episode_steps=3)

    right = replies(lambda text, seed: text.rpartition("Say ")[2][0])
    won, lost = play(tiny, right, make=make), play(tiny, replies("x"), make=make)
    assert [(r.status, r.total_reward, len(r.steps)) for r in won] == [("terminated", 1.0, 1)]
    assert [(r.status, r.truncation, r.total_reward, len(r.steps)) for r in lost] == [
        ("truncated", "environment", 0.0, 3)
    ]


class Fails:
    """Fails in the steps of the episodes whose number is in `bad`."""

    def __init__(self, bad):
        self.bad = bad

    def reset(self, *, seed=None):
        return "go", {}

    def step(self, action):
        if action in self.bad:
            return {}["nothing"]  # the line that the run has to name
        return "", 1.0, True, False, {}


LINE = next(
    i
    for i, line in enumerate(Path(__file__).read_text().splitlines(), 1)
    if "the line that the run has to name" in line
)


def test_an_environment_that_raises_is_named_with_file_and_line(tiny):
    rollouts = play(
        tiny,
        replies(lambda text, seed: "12"[seed % 2]),
        make=lambda: Fails("1"),
        tasks=episodes(max_samples=4),
        group_size=2,
    )
    failed = sum(r.truncation == "error" for r in rollouts)
    said = count_failures(rollouts)
    assert 0 < failed < 8 and said.startswith(f"the environment failed in {failed} of 8 episodes")
    assert said.endswith(f"step('1') raised KeyError: 'nothing' at {__file__}:{LINE}")
    assert count_failures([r for r in rollouts if r.truncation != "error"]) == ""


def test_one_that_always_raises_ends_what_is_played(tiny):
    """The reward was nan for ever, and the advice was to raise max_new_tokens."""
    environment = gymnasium(make=lambda: Fails("12"))
    with pytest.raises(
        EnvironmentFailed,
        match=rf"failed in all 3 episodes.*KeyError: 'nothing' at .*test_gymnasium.py:{LINE}$",
    ):
        greedy_accuracy(
            tiny,
            episodes(max_samples=3),
            reward=REWARD,
            engine=replies("1"),
            environment=environment,
        )


@pytest.mark.parametrize(
    "part", ["first_prompt", "next_prompt", "stop", "parse_calls", "tools", "session"]
)
def test_every_part_of_an_environment_that_raises_is_named(part, tiny):
    def broken(*_):
        raise ZeroDivisionError("mine")

    environment = single_turn()._replace(**{part: broken})
    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(
        EnvironmentFailed,
        match=rf"ZeroDivisionError: mine at .*test_gymnasium.py:{line}, in an episode of task",
    ) as said:
        collect(
            tiny,
            [Task("mine/0", ({"role": "user", "content": "hi"},))],
            engine=replies("1"),
            environment=environment,
        )
    assert isinstance(said.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("given", ["Go", "G", ("Go",), ("Go", {}, 1), None])
def test_a_reset_that_gives_no_pair_is_refused(given):
    """A text of two letters was unpacked to them, and the policy read its first letter."""

    class Text:
        def reset(self, *, seed):
            return given

    with pytest.raises(ConfigError, match=r"it must return \(observation, info\), and it returned"):
        read_opening(Task("t/0", ()), gymnasium(make=Text))
