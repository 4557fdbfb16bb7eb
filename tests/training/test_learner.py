"""There is one training loop: plain Python over `collect`, `score` and `learner.step` gives the
weights that `rlkit train` gives."""

from __future__ import annotations

import json
import random
import textwrap

import pytest
import torch

import rlkit
from parametrise import cases
from rlkit import collect
from rlkit.config.compose import compose, experiment
from rlkit.config.problems.rows import load_tasks
from rlkit.episodes.stream import StreamState, take
from rlkit.rewards import score
from rlkit.system import rng
from rlkit.training.groups import experience
from rlkit.training.learner import Learner
from rlkit.training.run import train_in
from rlkit.training.update.record import Host
from rlkit.types import Rollout, Step, Task

COMMON = [
    "trainer.threads=1",
    "trainer.accelerator=cpu",
    "trainer.steps=3",
    "batch.prompts=4",
    "batch.group_size=4",
    "evaluation.n=0",
    "generation.max_new_tokens=32",
    "optimizer.lr=1e-3",
    "logger=none",
    "task.max_samples=64",
    "seed=3",
]
REFILLS = ["algorithm/group_filter=mixed", "algorithm.max_refills=2"]
MOVED = ["algorithm.epochs=3", "algorithm.target_kl=1e-3"]
WARM = ["algorithm=ppo", "algorithm.critic.warmup=1"]
PHASES = [
    "schedule=reinforce_to_ppo",
    "schedule.phases.explore.until=1",
    "schedule.phases.refine.algorithm.critic.warmup=1",
]


def broken(
    ratio: torch.Tensor, advantages: torch.Tensor, response_mask: torch.Tensor
) -> torch.Tensor:
    """A policy loss that is not finite in about every third micro-batch."""
    return -ratio * advantages / (response_mask.sum() % 3)


def same(ours, theirs) -> bool:
    """Nested containers of tensors and plain values, bit for bit."""
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(
            same(value, theirs[key]) for key, value in ours.items()
        )
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


def loaded(x):
    """The policy as a run of this experiment has it at its start."""
    torch.set_num_threads(1)
    rng.seed(x.seed)
    return x.model(device="cpu")


def by_parts(x, tasks) -> Learner:
    """A loop that knows neither refills nor ranks."""
    policy = loaded(x)
    learner, stream = Learner(x, policy, exact=True), StreamState()
    for _ in range(x.trainer.steps):
        now = learner.begin()
        drawn, stream = take(tasks, stream, now.batch.prompts, seed=now.seed)
        rollouts = collect(
            policy,
            drawn,
            engine=now.generation.engine,
            environment=now.environment,
            group_size=now.batch.group_size,
            seed=now.seed,
            step=learner.rl_step,
            version=learner.rl_step,
            **now.generation.params,
        )
        learner.step(score(rollouts, now.reward))
    return learner


@pytest.mark.slow
def test_a_normalised_reward_changes_the_batch_and_no_rollout():
    """A teacher that shows right replies looked for a reward of 1, and found a normalised one. The
    moments are those of all episodes, trained on or not."""
    words = [*COMMON, "reward.normalize=true", "kl=none", "reference=none"]
    x = experiment(compose([*words, "batch.prompts=1"]))
    learner = Learner(x, loaded(x), exact=True)
    task = load_tasks(x).train[0]
    made = [
        Rollout(task, (Step((), (1, 2), (3, 4), (-1.0, -1.0), "stop"),), group=0, sample=i)
        for i in range(4)
    ]
    rollouts = [r._replace(reward=float(i == 0), rewards={"a": 0.0}) for i, r in enumerate(made)]
    learner.begin()
    learner.step(rollouts, rollouts[:3])
    assert learner.trained == rollouts[:3] and learner.moments.n == 4
    assert learner.batch.rewards.tolist() == pytest.approx([3**0.5, -(3**-0.5), -(3**-0.5)])


def by_steps(x, tasks) -> Learner:
    """The same with refills, and the last step in another learner, from the state of the first."""
    policy, stream = loaded(x), StreamState()
    learner = Learner(x, policy, exact=True)
    for step in range(x.trainer.steps):
        if step == x.trainer.steps - 1:
            state, policy = learner.state_dict(), loaded(x)
            learner = Learner(x, policy, exact=True)
            learner.load_state_dict(state)
        sampled, trained, stream = experience(
            learner.begin(), policy, tasks, stream, step=learner.rl_step
        )
        learner.step(sampled, trained)
    return learner


@pytest.mark.parametrize(
    "loop, overrides, seen",
    [
        pytest.param(by_parts, [], {}, marks=pytest.mark.slow),
        pytest.param(
            by_steps,
            [*REFILLS, *MOVED, "trainer.steps=2", "batch.prompts=2"],
            {"group/sampled": 2, "optim/ended_by_target_kl": 0},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            by_parts,
            ["broken"],
            {"optim/skipped_nonfinite": 0, "optim/updates": 0},
            marks=pytest.mark.slow,
        ),
        pytest.param(by_parts, WARM, {"value/loss": 0}, marks=pytest.mark.slow),
        pytest.param(by_steps, PHASES, {"schedule/phase": 0}, marks=pytest.mark.slow),
        pytest.param(
            by_steps,
            [*PHASES, "model.lora.rank=4", "reward.normalize=true"],
            {"schedule/phase": 0},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_plain_loop_gives_the_weights_of_a_run(loop, overrides, seen, tmp_path):
    """`seen`: metric → what it exceeds in some step, so that what a case is about does happen in
    it."""
    x = experiment(compose([*COMMON, *(words for words in overrides if words != "broken")]))
    if "broken" in overrides:
        x = x._replace(algorithm=x.algorithm._replace(policy_loss=broken))
    tasks = load_tasks(x)
    train_in(x, tasks, tmp_path, started=0.0, resume=None)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for name, bound in seen.items():
        assert any((row.get(name) or 0) > bound for row in rows), name
    run = torch.load(
        tmp_path / "checkpoints" / f"step_{x.trainer.steps:06d}.ckpt", weights_only=True
    )
    ours = loop(x, tasks.train).state_dict()
    assert same(ours["state_dict"], run["state_dict"]) and same(
        ours["optimizer_states"], run["optimizer_states"]
    )
    assert same(
        ours["rlkit"],
        {name: value for name, value in run["rlkit"].items() if name in ours["rlkit"]},
    )
    assert run["rlkit"].keys() - ours["rlkit"].keys() == {
        "stream",
        "flight",
        "kept",
        "requests",
        "weights",
        "generators",
    }


@pytest.mark.slow
def test_the_loop_of_the_docstring_gives_the_weights_of_a_run():
    """Copied as it stands, with the settings that it composes."""
    text = textwrap.dedent(Learner.__doc__.partition("\n")[2])
    loop = text.partition("import rlkit\n")[2].partition("\nThis loop gives")[0]
    assert len(loop.strip().splitlines()) <= 25
    scope = {}
    exec(textwrap.dedent("    import rlkit\n" + loop), scope)
    x = scope["x"]
    run = rlkit.train(x._replace(evaluation=x.evaluation._replace(n=0)))
    ours, theirs = (p.model.state_dict() for p in (scope["policy"], run.policy))
    assert scope["learner"].metrics["optim/updates"] > 0 and same(dict(ours), dict(theirs))


@pytest.mark.slow
def test_the_host_computes(tmp_path):
    """Forward, backward, sums and steps go through the functions that the learner is given."""
    x = experiment(compose([*COMMON, "trainer.steps=1"]))
    called: dict[str, int] = {}

    def counted(name):
        def run(*arguments, **settings):
            called[name] = called.get(name, 0) + 1
            return getattr(Host(), name)(*arguments, **settings)

        return run

    policy = loaded(x)
    learner = Learner(x, policy, exact=True, host=Host(*map(counted, Host._fields)))
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    sampled, trained, _ = experience(
        learner.begin(), policy, x.task(split="train"), StreamState(), step=0
    )
    metrics = learner.step(sampled, trained)
    assert (
        called.keys() == set(Host._fields)
        and called["optimizer_step"] == metrics["optim/updates"] > 0
    )
    assert any(not torch.equal(p, before[name]) for name, p in policy.model.named_parameters())


def without_signal() -> list[Rollout]:
    """Rollouts of equal rewards and many lengths, four a prompt."""
    draw, out = random.Random(5), []
    for i, size in enumerate([3, 40, 17, 9, 28, 5, 33, 12, 21, 2, 38, 14, 7, 25, 30, 11]):
        if i % 4 == 0:
            prompt = tuple(draw.randrange(5, 300) for _ in range(20 + size % 7))
        step = Step(
            (), prompt, tuple(draw.randrange(5, 300) for _ in range(size)), (-5.0,) * size, "stop"
        )
        out.append(
            Rollout(
                Task(str(i // 4), ()),
                (step,),
                group=i // 4,
                sample=i % 4,
                reward=1.0,
                rewards={"numeric": 1.0},
            )
        )
    return out


CASES = [
    ("k2", 1, 2, 200),
    ("k3", 1, 4, 200),
    ("k3", 1, 2, 4096),
    ("k3", 2, 2, 200),
    ("truncated", 1, 2, 200),
    ("full", 1, 2, 200),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "epochs", "minibatches", "limit"), cases(CASES, CASES[3:4], unpack=True)
)
def test_a_step_without_signal_leaves_the_policy_where_it_is(
    estimator, epochs, minibatches, limit, monkeypatch
):
    """The reference equals the policy and no advantage differs from 0, so the gradient is 0.
    Log-probs of other micro-batches made it rounding, and AdamW made a step of full size of that.
    Such a step is skipped; here it is taken."""
    for place in ("signal", "minibatch"):
        monkeypatch.setattr(f"rlkit.training.update.{place}.has_signal", lambda u, batch: True)
    words = [
        f"kl={estimator}",
        "kl.coef=1",
        "reference=frozen",
        f"trainer.micro_batch_tokens={limit}",
    ]
    x = experiment(
        compose(
            [*COMMON, *words, f"algorithm.epochs={epochs}", f"algorithm.minibatches={minibatches}"]
        )
    )
    learner = Learner(x, policy := loaded(x), exact=True)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    metrics = learner.step(without_signal())
    assert metrics["optim/updates"] and metrics["optim/grad_norm"] == 0
    assert all(torch.equal(p, before[name]) for name, p in policy.model.named_parameters())
