"""An update: when it ends a step, when it is skipped, and whose tokens it reads."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from rlkit.algorithm import Stream
from rlkit.config.compose import compose, experiment
from rlkit.config.problems.trial import dry_run
from rlkit.errors import ConfigError, NonFinite, PartError
from rlkit.functional import kl_student_teacher
from rlkit.models.chat import encode_text
from rlkit.rewards import Moments, update_moments
from rlkit.training.groups import accept
from rlkit.training.learner import Learner
from rlkit.training.schedules import Progress
from rlkit.training.teachers import context_teacher
from rlkit.training.update.optimizers import Optimizers
from rlkit.training.update.record import Host
from rlkit.training.update.sampled import find_tool_bodies, make_sampled_batch, mark_observed
from rlkit.training.update.scored import needs_old, read_batch
from rlkit.types import Rollout, Step, Task

WORDS = ["trainer.threads=1", "trainer.accelerator=cpu", "evaluation.n=0", "logger=none", "kl=none"]
PROMPT = ({"role": "user", "content": "What is 3 + 4?"},)
SIZES = (3, 20, 9, 14)


def rollouts_of(policy) -> list[Rollout]:
    """Two groups of uneven lengths and rewards; the policy has sampled none of it."""
    prompt = tuple(encode_text(policy.renderer, "What is 3 + 4?"))
    out = []
    for i, size in enumerate(SIZES):
        reply = tuple((7 * i + 3 * j) % 200 + 20 for j in range(size))
        step = Step(PROMPT, prompt, reply, (-5.0,) * size, "stop")
        task = Task(str(i // 2), PROMPT, answer="7")
        reward = float(i % 2)
        own = Rollout(task, (step,), group=i // 2, sample=i % 2, reward=reward)
        out.append(own._replace(rewards={"numeric": reward}))
    return out


def learner_of(policy, *words: str) -> Learner:
    own = policy._replace(model=copy.deepcopy(policy.model))
    return Learner(experiment(compose([*WORDS, *words])), own, exact=True)


# ------------------------------------------------------------------------------------- target_kl


@pytest.mark.slow
def test_target_kl_bounds_the_mean_over_the_tokens_of_all_micro_batches(tiny):
    """Of two updates of the whole batch the second is measured: the first starts at the old policy.
    kl/old is the mean of both, so the second one's is twice as much."""
    words = ["algorithm=reinforce", "algorithm.epochs=2", "algorithm.minibatches=1"]
    words += ["optimizer.lr=1e-3", "schedule=constant", "trainer.micro_batch_tokens=40"]

    x = experiment(compose([*WORDS, *words]))

    def row(target_kl: float | None) -> dict:
        own = x._replace(algorithm=x.algorithm._replace(target_kl=target_kl))
        policy = tiny._replace(model=copy.deepcopy(tiny.model))
        return Learner(own, policy, exact=True).step(rollouts_of(tiny))

    free = row(None)
    moved = 2 * free["kl/old"]
    assert free["optim/updates"] == 2 and moved > 1e-5
    for factor, updates in ((1.05, 2), (0.95, 1)):
        found = row(factor * moved)
        assert found["optim/updates"] == updates
        assert found["optim/ended_by_target_kl"] == 2 - updates


@pytest.mark.slow
def test_a_micro_batch_that_pads_the_work_of_a_rank_changes_no_weight(tiny):
    """A rank with fewer micro-batches than others repeats some of its rows, which do not count."""

    def train(pads: bool) -> list[torch.Tensor]:
        words = ["algorithm=reinforce", "optimizer.lr=1e-3", "schedule=constant"]
        learner = learner_of(tiny, *words, "trainer.micro_batch_tokens=40")
        real = learner.micro.of

        def pad(batch):
            work = list(real(batch))
            assert len(work) > 1
            return [*work, (work[0][0], False)]

        if pads:
            learner.micro.of = pad
        learner.step(rollouts_of(tiny))
        return list(learner.model.parameters())

    start = list(tiny.model.parameters())
    plain, padded = train(False), train(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, padded, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(plain, start, strict=True))


# --------------------------------------------------------------------------------- the group filter


@pytest.mark.slow
def test_a_group_filter_sees_the_same_rewards_in_a_refill_and_in_the_update(tiny):
    """With reward.normalize=true the update showed it the normalised ones, so it could drop groups
    that the refill had accepted."""
    seen = []

    def better(rewards, token_rewards):
        seen.append((rewards.tolist(), token_rewards.sum().item()))
        return rewards >= 0.9

    x = experiment(compose([*WORDS, "reward.normalize=true"]))
    x = x._replace(algorithm=x.algorithm._replace(group_filter=better))
    learner = Learner(x, tiny)
    learner.trained = accept(x, tiny, rollouts_of(tiny))
    learner.moments = update_moments(Moments(), [*learner.trained, *learner.trained[1::2]])
    batch = make_sampled_batch(learner.record())
    assert seen == [([0.0, 1.0, 0.0, 1.0], 2.0)] * 2
    assert batch.response_mask.any(1).tolist() == [False, True, False, True]
    assert batch.rewards.max() < 0.9  # the advantage has the normalised ones


# ------------------------------------------------------------------------- updates that are skipped


def stepped(optimizers: Optimizers, weight, index: int, *, grad: float, loss: float) -> float:
    """A step of one optimizer; the norm that it gives."""
    trainer = SimpleNamespace(max_grad_norm=10.0, max_nonfinite=3)
    u = SimpleNamespace(host=Host(), x=SimpleNamespace(trainer=trainer), step=0)
    weight.grad = torch.full_like(weight, grad)
    return optimizers.step(u, index, partial(torch.optim.SGD, lr=0.5), [weight], loss)[0]


def pair_of_optimizers():
    """A policy's and a critic's, of one weight each."""
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return weights, Optimizers([torch.optim.SGD([w], lr=0.5, momentum=0.9) for w in weights])


@pytest.mark.parametrize("grad, loss", [(1.0, math.nan), (1.0, math.inf), (math.nan, 1.0)])
def test_no_step_is_taken_if_the_loss_or_the_norm_is_not_finite(grad, loss):
    """A loss can be nan while its gradient is finite: a constant term that overflowed."""
    (weight, _), optimizers = pair_of_optimizers()
    assert math.isnan(stepped(optimizers, weight, 0, grad=grad, loss=loss))
    assert weight.item() == 0 and optimizers.nonfinite == {0: 1}
    assert stepped(optimizers, weight, 0, grad=1.0, loss=1.0) == pytest.approx(1.0)
    assert weight.item() == -0.5 and optimizers.nonfinite == {0: 0}


def test_a_gradient_is_clipped_to_the_norm_of_the_config():
    (weight, _), optimizers = pair_of_optimizers()
    assert stepped(optimizers, weight, 0, grad=100.0, loss=1.0) == pytest.approx(100.0)
    assert weight.item() == pytest.approx(-0.5 * 10.0)


def test_skipped_steps_in_a_row_are_counted_for_each_optimizer_by_itself():
    weights, optimizers = pair_of_optimizers()
    bad = {"grad": 1.0, "loss": math.nan}
    for index in (0, 0, 1, 1):
        stepped(optimizers, weights[index], index, **bad)
    assert optimizers.nonfinite == {0: 2, 1: 2}
    stepped(optimizers, weights[0], 0, grad=1.0, loss=1.0)
    stepped(optimizers, weights[0], 0, **bad)
    with pytest.raises(NonFinite, match="3 updates in a row"):
        stepped(optimizers, weights[1], 1, **bad)


# ---------------------------------------------------------------------------------- a phase's reset


@pytest.mark.slow
def test_a_phase_that_resets_the_optimizer_forgets_the_critics_moments_too(tiny):
    reset = "schedule.phases.refine.reset=[optimizer]"
    learner = learner_of(
        tiny, "schedule=reinforce_to_ppo", "schedule.phases.explore.until=1", reset
    )
    for optimizer in learner.optimizers.made:
        for weight in optimizer.param_groups[0]["params"]:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert [bool(own.state) for own in learner.optimizers.made] == [True, True]
    learner.progress = Progress(step=1, phase=1, since=1)
    assert learner.enter_phase() == ["optimizer moments"]
    assert [bool(own.state) for own in learner.optimizers.made] == [False, False]


# ------------------------------------------------------------------------------------------- a step


@pytest.mark.slow
def test_a_step_counts_what_it_trained_on_and_where_it_stands(tiny):
    """The moments are of all rewards, trained on or not, each step draws by a seed of its own, and
    a reference is moved with the number of steps done, this one included."""
    learner = learner_of(tiny)
    rollouts, steps, seeds = rollouts_of(tiny), [], []
    learner.kept.move = lambda reference, *, step, kl: steps.append(step) or {}
    for _ in range(2):
        seeds.append(learner.record().seed)
        learner.step(rollouts, rollouts[:2])
    assert learner.moments.n == 8 and steps == [1, 2] and seeds[0] != seeds[1]


@pytest.mark.slow
def test_a_step_that_trains_the_critic_alone_does_not_move_the_policy(tiny):
    """kl/step was measured in the policy's only update, which such a step does not have."""
    words = ["algorithm=ppo", "algorithm.epochs=1", "algorithm.minibatches=1"]
    learner = learner_of(tiny, *words, "algorithm.critic.warmup=1", "optimizer.lr=1e-3")
    steps = [learner.step(rollouts_of(tiny))["kl/step"] for _ in range(2)]
    assert abs(steps[0]) < 1e-9 < steps[1]


@pytest.mark.slow
def test_staleness_counts_the_updates_since_the_oldest_version_that_may_still_be_trained_on(tiny):
    """With a staleness of 2, step 3 may learn from tokens of version 0."""
    learner = learner_of(tiny, "asynchrony=lag", "asynchrony.staleness=2")
    learner.rl_step, learner.updates = 2, {0: 1, 1: 4, 2: 9}
    learner.progress = learner.progress._replace(step=2)
    old = [
        r._replace(steps=tuple(s._replace(versions=((0, 0),)) for s in r.steps))
        for r in rollouts_of(tiny)
    ]
    row = learner.step(old)
    assert row["staleness/steps_mean"] == 2 and row["staleness/updates_mean"] == 9 - 1


# ------------------------------------------------------------------------------- whose tokens count


def with_rewritten_row(rollout: Rollout) -> Rollout:
    """The rollout and a second reply, behind a context that does not extend the first."""
    reply = (31, 32, 33, 34)
    step = Step(PROMPT, (41, 42, 43), reply, (-5.0,) * len(reply), "stop")
    return rollout.add(step)


@pytest.mark.slow
def test_a_context_teacher_leaves_rows_with_a_rewritten_context_alone(tiny):
    """They have no first prompt to show the hint in. So the gradient is that of the first rows."""
    stream = {"teacher": Stream(1.0, "sampled", loss=kl_student_teacher)}

    def gradient(rollouts):
        x = experiment(compose([*WORDS, "environment=single_turn"]))
        own = x.algorithm._replace(streams=stream, minibatches=1, epochs=1)
        x = x._replace(algorithm=own, teacher=context_teacher(show="answer"))
        model = copy.deepcopy(tiny.model)
        host = Host(optimizer_step=lambda _: None)
        metrics = Learner(x, tiny._replace(model=model), exact=True, host=host).step(rollouts)
        parts = [p.grad.flatten() for p in model.parameters()]
        return torch.cat(parts), metrics["streams/teacher"]

    first = rollouts_of(tiny)
    plain, divergence = gradient(first)
    both, measured = gradient([with_rewritten_row(rollout) for rollout in first])
    assert plain.norm() > 0 and divergence > 0
    assert measured == pytest.approx(divergence, rel=1e-5)
    assert (both - plain).norm() < 1e-5 * plain.norm()  # other micro-batches: float32 sums


def test_sampled_tokens_are_never_observed_though_they_repeat_what_a_tool_said(tiny):
    """The template has changed the tool's text, so its last occurrence is in the policy's reply."""
    said = "the sum is 42"
    reply = tuple(encode_text(tiny.renderer, said))
    first = Step(PROMPT, (5, 6, 7), reply, (-1.0,) * len(reply), "tool")
    tool = ({"role": "tool", "name": "add", "content": said},)
    changed = tuple(encode_text(tiny.renderer, "THE SUM"))
    second = Step(tool, (5, 6, 7, *reply, *changed), (8, 9), (-1.0, -1.0), "stop")
    rollout = Rollout(Task("row/0", PROMPT), (first, second), reward=1.0)
    learner = learner_of(tiny)
    batch = learner.record().assemble_batch([rollout])
    assert int(batch.sampled_mask.sum()) == len(reply) + 2
    assert not mark_observed(batch, [rollout], tiny.renderer).observed_mask.any()


def test_of_the_messages_in_a_prompt_only_those_of_tools_are_observed(tiny):
    asked, told, thanks = (encode_text(tiny.renderer, t) for t in ("Add.", "It is 7.", "Go on."))
    ids = [1, *asked, 2, *told, 3, *thanks, 4]
    contents = {"user": "Add.", "tool": "It is 7.", "assistant": "Go on."}
    said = [{"role": role, "content": text} for role, text in contents.items()]
    begin = len(asked) + 2
    spans = find_tool_bodies(Step(said, ids, (), (), "stop"), tiny.renderer)
    assert spans == [(begin, begin + len(told))]


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (2, 1), (1, 2)])
def test_with_several_updates_the_old_policy_is_kept(epochs, minibatches, tiny):
    numbers = [f"algorithm.epochs={epochs}", f"algorithm.minibatches={minibatches}"]
    u = learner_of(tiny, "algorithm=reinforce", *numbers).record()
    assert needs_old(u.x, critic=False) == (epochs * minibatches > 1)


# a part of each kind that also asks for QUANTITY
ASKING = {
    "group_filter": "lambda rewards, QUANTITY: rewards == rewards",
    "overlong": "lambda rewards, QUANTITY: (rewards, rewards == rewards)",
    "advantage": "lambda rewards, QUANTITY: rewards - rewards.nanmean()",
    "normalization": "lambda advantages, QUANTITY: advantages",
    "token_filter": "lambda response_mask, QUANTITY: response_mask",
    "correction": "lambda logprobs_sampler, QUANTITY: torch.ones_like(logprobs_sampler)",
    "aggregation": "lambda response_mask, QUANTITY: response_mask / response_mask.sum()",
    "ratio": "lambda logprobs, QUANTITY: (logprobs - logprobs.detach()).exp()",
    "policy_loss": "lambda ratio, advantages, QUANTITY: -ratio * advantages",
}


@pytest.mark.parametrize(
    "quantity", ["logprobs_old", "entropy_old", "values", "logprobs_ref", "full_kl"]
)
@pytest.mark.parametrize("slot", ASKING)
def test_the_dry_run_refuses_what_the_update_does_not_compute_and_nothing_else(
    slot, quantity, tiny
):
    part = eval(ASKING[slot].replace("QUANTITY", quantity), {"torch": torch})
    words = ["algorithm=reinforce", "kl=none", "reference=none"]
    x = experiment(compose([*WORDS, *words]))
    x = x._replace(algorithm=x.algorithm._replace(**{slot: part}))
    own = tiny._replace(model=copy.deepcopy(tiny.model))

    def try_to(call) -> bool:
        try:
            call()
        except (ConfigError, PartError) as error:
            assert f"asks for '{quantity}'" in str(error)
            return False
        return True

    learner = Learner(x, own, exact=True)
    possible = try_to(lambda: learner.step(rollouts_of(tiny)))
    assert try_to(lambda: dry_run(x)) == possible
    known = slot not in ("group_filter", "overlong") and quantity in ("logprobs_old", "entropy_old")
    assert possible == known


@pytest.mark.parametrize("in_baseline", [False, True])
def test_a_kl_in_the_baseline_needs_the_rollouts_that_are_not_trained(in_baseline, tiny):
    words = ["algorithm=reinforce", "kl=k1", "kl.placement=reward", "kl.coef=0.1"]
    u = learner_of(tiny, *words, f"kl.in_baseline={in_baseline}").record()
    batch = u.assemble_batch(rollouts_of(tiny))
    few = replace(batch, response_mask=batch.response_mask & (batch.rollout_ids == 0)[:, None])
    read = read_batch(u, few).response_mask
    assert torch.equal(read, batch.response_mask if in_baseline else few.response_mask)
