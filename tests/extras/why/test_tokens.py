"""`rlkit why RUN step= rollout= token=`: the policy of then is computed again from a checkpoint and
the recorded rollouts, and gives the recorded log-probs."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from parametrise import each
from rlkit.commands.arguments import Arguments
from rlkit.commands.cli import main
from rlkit.config.problems.rows import load_tasks
from rlkit.extras.why.commands.why import compose_run
from rlkit.extras.why.evidence import read_evidence
from rlkit.extras.why.tokens import (
    EXACT,
    Move,
    TokenEffect,
    find_token,
    judge_move,
    measure_gaps,
    read_effect,
    read_step,
    repeat_steps,
    say_clip,
)
from rlkit.functional import clipped, reinforce, token_ratio

WORDS = ("batch.prompts=2", "batch.group_size=4", "trainer.threads=1", "evaluation.n=0")
WORDS += ("logger=none", "callbacks.checkpoint.model=false", "callbacks.checkpoint.every=2")
WORDS += ("optimizer.lr=3e-3", "callbacks.samples.every=1000", "callbacks.completions.every=0")


def draw_tokens(folder, last, count):
    """Tokens of all steps up to the last, drawn from a seed."""
    rng = random.Random(0)
    found = []
    for _ in range(count):
        step = rng.randint(1, last)
        played = read_step(folder, step)
        rollout = rng.randrange(len(played))
        length = sum(len(said.sampled) for said in played[rollout].steps)
        found.append(find_token(played, step, rollout, rng.randrange(length)))
    return found


def differences(folder, tokens):
    """|log-prob computed again - recorded|, of each token."""
    x = compose_run(folder, str(folder), Arguments([]), ()).x
    return measure_gaps(x, load_tasks(x), read_evidence(folder), tokens)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three steps of a multi-turn task, with a checkpoint of the second."""
    folder = tmp_path_factory.mktemp("tokens") / "run"
    words = [*WORDS, "trainer.steps=3", "generation.temperature=0.8", f"hydra.run.dir={folder}"]
    assert main(["train", *words]) == 0
    return folder


@pytest.mark.slow
def test_recorded_log_probs_are_found_again(run):
    """From the start and from a checkpoint, after updates that moved the policy."""
    tokens = draw_tokens(run, 3, 12)
    assert {token.version for token in tokens} == {0, 1, 2}
    assert max(token.reply for token in tokens) > 0
    found = differences(run, tokens)
    assert len(found) == 12 and max(found) < EXACT


@pytest.mark.slow
def test_the_advantage_is_that_of_the_step(run):
    """GRPO's: reward less the group's mean, over its deviation, and no rollout but the group's."""
    x = compose_run(run, str(run), Arguments([]), ()).x
    step, mixed = next(
        (step, i)
        for step in (1, 2, 3)
        for i, r in enumerate(read_step(run, step))
        if len(rewards_of(read_step(run, step), r.group)) > 1
    )
    played = read_step(run, step)
    token = find_token(played, step, mixed, 2)
    *_, learner = repeat_steps(x, load_tasks(x), read_evidence(run), step - 1, step)
    effect = read_effect(learner, token)
    own = {i: r.reward for i, r in enumerate(played) if r.group == played[mixed].group}
    assert effect.trained and effect.group == own
    values = torch.tensor([*own.values()])
    expected = (own[mixed] - values.mean()) / values.std()
    assert effect.advantage == pytest.approx(float(expected), rel=1e-3)


def rewards_of(played, group):
    return {rollout.reward for rollout in played if rollout.group == group}


@pytest.mark.slow
def test_the_command_tells_all_and_writes_nothing(run, capsys):
    before = sorted(path for path in run.rglob("*"))
    assert main(["why", str(run), "step=3", "rollout=1", "token=4"]) == 0
    out = capsys.readouterr().out
    assert "(computed again from step 2, by 1 RL step on the recorded rollouts)" in out
    assert "step 3, rollout 1, token 4, in reply 0 " in out
    assert (
        "Step 3 sampled it with the weights after step 2, with log-prob" in out
        and "(as recorded)" in out
    )
    assert "<- sampled" in out and "Its advantage was" in out
    assert "of its group: " in out and "The update moved its probability from" in out
    assert out.splitlines()[-1].startswith("Verdict: ")
    assert sorted(path for path in run.rglob("*")) == before


@pytest.mark.slow
@each(
    ("words", "said"),
    [
        (["rollout=1", "token=4"], "name a token together"),
        (["step=9", "rollout=1", "token=4"], "steps 1 to 3"),
        (["step=1", "rollout=8", "token=4"], "step 1 has 8, counted from 0"),
        (["step=1", "rollout=1", "token=9999"], "sampled tokens, counted from 0"),
    ],
)
def test_a_token_that_is_not_there(run, capsys, words, said):
    assert main(["why", str(run), *words]) == 2
    assert said in capsys.readouterr().err


@each(
    ("advantage", "after", "verdict"),
    [
        (0.4, 0.63, "the update raised its probability, as its positive advantage asked; clipped"),
        (0.4, 0.50, "its positive advantage asked; not clipped, because its ratio went to 1.04"),
        (
            -0.4,
            0.30,
            "the update lowered its probability, as its negative advantage asked; clipped",
        ),
        (-0.4, 0.50, "the update did not lower its probability"),
        (0.0, 0.50, "nothing was asked of this token"),
    ],
)
def test_a_verdict_compares_the_move_with_the_advantage(advantage, after, verdict):
    loss = partial(clipped, clip_low=0.2, clip_high=0.2)
    ppo = SimpleNamespace(policy_loss=loss, ratio=token_ratio, epochs=2, minibatches=4)
    made = TokenEffect(advantage, 1.0, trained=True, group={})
    moved = Move(0.48, after)
    assert verdict in judge_move(made, moved, say_clip(ppo, advantage, moved))
    bare = SimpleNamespace(policy_loss=reinforce, ratio=token_ratio)
    assert say_clip(bare, advantage, moved) == "", "the loss of an earlier phase"


@pytest.mark.slow
def test_an_overlapped_run_gives_its_log_probs_too(tmp_path):
    """Its groups are sampled by weights one step behind."""
    folder = tmp_path / "run"
    words = ["asynchrony=overlap", "asynchrony.staleness=1", "asynchrony.sampler.threads=1"]
    words += ["trainer.steps=3", f"hydra.run.dir={folder}"]
    assert main(["train", *WORDS, *words]) == 0
    tokens = draw_tokens(folder, 3, 8)
    assert {token.step - 1 - token.version for token in tokens} == {0, 1}
    assert max(differences(folder, tokens)) < EXACT
