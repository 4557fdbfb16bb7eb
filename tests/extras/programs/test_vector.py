"""Vector environments: the samples of a task act together in one instance."""

from __future__ import annotations

from functools import partial

import pytest

from environments.test_gymnasium import replies
from rlkit.episodes import collect
from rlkit.extras.programs import gymnasium_vector
from rlkit.tasks import episodes


class Vector:
    """Two sub-environments in one: each counts down from 3 by what it is told. Knows nothing of
    Gymnasium."""

    made: list[Vector] = []  # noqa: RUF012

    def __init__(self, num_envs):
        self.left, self.steps, self.closed = [3] * num_envs, [], 0
        Vector.made.append(self)

    def reset(self, *, seed):
        assert len(seed) == len(self.left) and len(set(seed)) == 1
        return {"left": list(self.left)}, {}

    def step(self, actions):
        if "break" in actions:
            raise RuntimeError("no such move")
        self.steps.append(actions)
        self.left = [left - int(action) for left, action in zip(self.left, actions, strict=True)]
        done = [left <= 0 for left in self.left]
        return {"left": list(self.left)}, [float(d) for d in done], done, [False] * len(done), {}

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("admission", ["rounds", "free"])
def test_samples_of_a_task_step_a_vector_environment_together(tiny, admission):
    """One takes 3 and is done after a step; the others go on without it, and the decoder never
    waits for who waits for the decoding."""
    Vector.made.clear()
    engine = replies(lambda context, seed: "3" if seed % 2 else "1")
    tasks = episodes(max_samples=2)
    rollouts = collect(
        tiny, tasks, gymnasium_vector(make=Vector), engine=engine, group_size=4, admission=admission
    )
    lengths = [len(r.steps) for r in rollouts]
    assert {1, 3} <= set(lengths) and all(
        r.status == "terminated" and r.steps[-1].reward == 1 for r in rollouts
    )
    assert rollouts[lengths.index(3)].steps[1].prompt[0]["content"] == "{'left': 2}"
    assert [(len(v.steps), v.closed) for v in Vector.made] == [
        (max(lengths[i : i + 4]), 1) for i in (0, 4)
    ]


def test_a_vector_environment_that_breaks_ends_the_episodes_of_its_task(tiny):
    Vector.made.clear()
    engine = replies(lambda context, seed: "break" if seed % 8 < 2 else "1")
    rollouts = collect(
        tiny, episodes(max_samples=4), gymnasium_vector(make=Vector), engine=engine, group_size=2
    )
    ends = [{r.truncation for r in rollouts[i : i + 2]} for i in range(0, 8, 2)]
    assert all(len(end) == 1 for end in ends) and {"error", ""} == set().union(*ends)
    assert all(v.closed == 1 for v in Vector.made)


def test_gymnasiums_own_vector_environments_play(tiny):
    gym = pytest.importorskip("gymnasium")
    made = partial(gym.make_vec, "CartPole-v1", vectorization_mode="sync")
    environment = gymnasium_vector(
        make=made,
        parse_action=lambda text: int(text) % 2,
        render=lambda seen: f"{seen[2]:.3f}",
        max_turns=3,
    )
    rollouts = collect(
        tiny, episodes(max_samples=1), environment, engine=replies("0", "1"), group_size=3
    )
    assert [len(r.steps) for r in rollouts] == [3, 3, 3] and all(
        s.reward == 1 for r in rollouts for s in r.steps
    )
    assert len({r.steps[0].prompt[0]["content"] for r in rollouts}) == 1


def test_the_decoder_does_not_wait_for_an_episode_that_waits_for_the_decoding(tiny):
    """Replies of several lengths: at 1 round after its reply, the shortest would be due while the
    others are still sampled."""
    tasks = [
        task._replace(
            messages=({"role": "user", "content": "Ann has 5 pens. Ben gives Ann 3. How many?"},)
        )
        for task in episodes(max_samples=1)
    ]
    environment = gymnasium_vector(make=Vector, parse_action=lambda text: 1)
    rollouts = collect(
        tiny, tasks, environment, group_size=4, max_new_tokens=48, admission_rounds=1
    )
    assert len({len(step.response_ids) for r in rollouts for step in r.steps}) > 1
    assert {r.truncation for r in rollouts} <= {"", "length"}
