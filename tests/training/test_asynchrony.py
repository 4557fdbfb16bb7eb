"""Groups sampled ahead of training: which weights sampled which token, nothing dropped, and runs
that repeat themselves bit for bit."""

from __future__ import annotations

import functools
import json
import shutil

import pytest
import torch

from parametrise import cases
from rlkit import collect
from rlkit.config.compose import compose, experiment
from rlkit.config.problems.doubts import list_warnings
from rlkit.config.problems.rows import load_tasks
from rlkit.engines import Cached
from rlkit.episodes import load_rollouts
from rlkit.episodes.stream import take
from rlkit.errors import ConfigError, DataError
from rlkit.rewards import score
from rlkit.system import rng
from rlkit.training import schedules
from rlkit.training.ahead.flight import Flight, compute_version
from rlkit.training.ahead.modes import group_source
from rlkit.training.learner import Learner
from rlkit.training.run import train_in
from rlkit.training.schedules.progress import foresee_step
from rlkit.types import Environment, Task
from stepping import sample_step, take_step

COMMON = [
    "trainer.threads=1",
    "trainer.accelerator=cpu",
    "trainer.steps=4",
    "batch.prompts=2",
    "batch.group_size=4",
    "evaluation.n=0",
    "generation.max_new_tokens=32",
    "optimizer.lr=1e-3",
    "logger=none",
    "task.max_samples=64",
    "seed=3",
]
LAG = ["asynchrony=lag", "asynchrony.staleness=2"]
REFILLS = ["algorithm=dapo", "algorithm.max_refills=2", "algorithm/group_filter=mixed"]
TURNS = [
    "task=guess_number",
    "model=tiny_guess",
    "environment=guess_number",
    "environment.max_turns=3",
    "task.high=20",
    "generation.max_new_tokens=12",
]
TOOLS = ["environment=tool_use", "generation.max_new_tokens=32"]
LORA = ["model.lora.rank=2", "reference=ema", "reference.decay=0.5"]
PHASES = [
    "schedule=grpo_to_dapo",
    "schedule.phases.explore.until=2",
    "schedule.phases.refine.algorithm.max_refills=0",
]
KINDS = {
    "grpo": [],
    "refills": REFILLS,
    "turns": TURNS,
    "tools": TOOLS,
    "lora": LORA,
    "ppo": ["algorithm=ppo"],
    "gspo": ["algorithm=gspo"],
    "pairwise": ["algorithm=pairwise"],
    "one update": ["algorithm=reinforce"],
    "moments": ["reward.normalize=true"],
    "phases": PHASES,
    "fused": ["model.kernel=fused", "reference=ema", "reference.decay=0.5"],
    "sampler": [*REFILLS, "task/sampler=prioritised", "task.max_samples=8"],
    # whose checkpoints hold whole rollouts, so no tool that measures its seconds
    "reuse": ["task/reuse=replay", "task/sampler=variance", "environment=single_turn"],
}


def begun(*overrides):
    """The experiment, its tasks and a learner at the start."""
    x = experiment(compose([*COMMON, *overrides]))
    torch.set_num_threads(1)
    rng.seed(x.seed)
    return x, load_tasks(x).train, Learner(x, x.model(device="cpu"), exact=True)


def source_of(x, tasks):
    """What samples the groups of a run in this process."""
    with group_source(x, tasks) as source:
        return source


@functools.cache
def trained(*overrides):
    """The learner after four steps, and of each step: its groups, and its row without the clock."""
    x, tasks, learner = begun(*overrides)
    source, flight, out = source_of(x, tasks), Flight(), []
    for _ in range(4):
        groups, flight, row = take_step(source, flight, learner)
        out.append(
            (groups, {k: v for k, v in row.items() if not k.startswith("perf/")}, learner.batch)
        )
    return learner, out


# A lag of zero takes the path of a lag, so most kinds are tried with one of the two.
WITHOUT_LAG = ("grpo", "refills", "gspo", "one update", "moments", "sampler")
WITH_LAG = ("grpo", "turns", "tools", "lora", "ppo", "pairwise", "phases", "fused")


def test_every_kind_is_tried():
    assert {*WITHOUT_LAG, *WITH_LAG} | {"reuse"} == {*KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITHOUT_LAG)
def test_a_staleness_of_zero_is_the_synchronous_run(kind, same):
    plain, rows = trained(*KINDS[kind])
    lag, others = trained(*KINDS[kind], "asynchrony=lag", "asynchrony.staleness=0")
    assert same(plain.state_dict(), lag.state_dict())
    for (_, row, _), (_, other, _) in zip(rows, others, strict=True):
        assert same(
            row, {key: value for key, value in other.items() if not key.startswith("staleness/")}
        )
        assert not other["staleness/steps_max"] > 0 and other["staleness/in_flight_groups"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_LAG)
def test_a_lag_samples_with_the_weights_of_then(kind, same):
    """Against a loop that keeps a copy of the weights of every version, and puts the one that is
    due back to sample with it."""
    _, tasks, learner = begun(*KINDS[kind], *LAG)
    kept, stream = [], Flight().consumed
    for step in range(4):
        now, model = learner.begin(), learner.policy.model
        kept.append({name: value.clone() for name, value in model.state_dict().items()})
        model.load_state_dict(kept[max(0, step - 2)])
        drawn, stream = take(tasks, stream, 2, seed=3)
        rollouts = collect(
            learner.policy,
            drawn,
            engine=now.generation.engine,
            environment=now.environment,
            group_size=4,
            seed=3,
            step=step,
            version=max(0, step - 2),
            **now.generation.params,
        )
        model.load_state_dict(kept[step])
        learner.step(score(rollouts, now.reward))
    ahead, _ = trained(*KINDS[kind], *LAG)
    assert same(learner.state_dict(), ahead.state_dict())


@pytest.mark.slow
def test_every_token_knows_its_version_and_nothing_is_dropped(same):
    """The prompts and their order are those of the synchronous run; with 4 steps and a staleness of
    2 nothing is left in flight."""
    _, lag = trained(*LAG)
    _, plain = trained()
    versions = [0, 0, 0, 1]
    assert [compute_version(step, 2) for step in range(4)] == versions
    updates = [0]
    for step, ((groups, row, batch), (others, _, _)) in enumerate(zip(lag, plain, strict=True)):
        assert (groups.step, groups.version) == (step, versions[step])
        assert (
            batch.versions == versions[step] * batch.response_mask
        ).all() and batch.response_mask.any()
        assert [(r.task.id, r.group, r.sample) for r in groups.sampled] == [
            (r.task.id, r.group, r.sample) for r in others.sampled
        ]
        assert all(
            reply.versions == ((0, versions[step]),) for r in groups.sampled for reply in r.steps
        )
        assert row["staleness/steps_mean"] == row["staleness/steps_max"] == step - versions[step]
        assert row["staleness/updates_mean"] == updates[step] - updates[versions[step]]
        assert row["staleness/in_flight_groups"] == [4, 4, 2, 0][step]
        fresh = step == 0  # later all tokens are old, and say nothing of the engine
        assert (
            (row["mismatch/kl"] < 1e-6)
            if fresh
            else (row["mismatch/kl"] != row["mismatch/kl"] and row["staleness/kl"] > 1e-6)
        )
        updates.append(updates[-1] + row["optim/updates"])
    assert lag[3][1]["staleness/ess_seq"] < 1 and lag[3][1]["scale/mean"] != 1  # corrected


def test_replies_of_an_engine_that_names_no_version_have_that_of_the_weights_it_was_given(tiny):
    class Silent(Cached):
        async def generate(self, *inputs):
            return (await super().generate(*inputs))._replace(versions=())

    task = Task("a", ({"role": "user", "content": "2 + 2"},))
    (rollout,) = collect(tiny, [task], Environment(), engine=Silent(), version=7, max_new_tokens=4)
    assert [reply.versions for reply in rollout.steps] == [((0, 7),)]


@pytest.mark.slow
def test_groups_in_flight_survive_a_checkpoint(tmp_path, same):
    """Also what JSON does not know of a task, since the prompts give it again; refills keep which
    groups are trained on."""
    x, tasks, learner = begun(*REFILLS, *LAG)
    tasks = [task._replace(metadata={**task.metadata, "odd": {1, 2}}) for task in tasks]
    source = source_of(x, tasks)
    _, flight, _ = sample_step(source, Flight(), learner)
    torch.save(source.state(flight), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    assert source.restore(state, learner.policy, learner.progress) == flight
    assert len(flight.ahead) == 2
    with pytest.raises(DataError, match="no longer in the task's data"):
        source_of(x, tasks[::-1]).restore(state, learner.policy, learner.progress)


RESUMED = [
    ("turns", (1, 2, 3)),
    *((kind, (1,)) for kind in ("refills", "tools", "reuse")),
    *((kind, (3,)) for kind in ("lora", "sampler", "fused")),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind, steps", cases(RESUMED, RESUMED[:1], unpack=True))
def test_a_resumed_run_goes_on_bit_for_bit(kind, steps, tmp_path, same):
    """From the checkpoints of these steps, with evaluations between; rows, files and weights."""
    words = [
        *KINDS[kind],
        *LAG,
        "callbacks.checkpoint.every=1",
        "callbacks.checkpoint.keep=9",
        "evaluation.n=2",
        "evaluation.every=2",
    ]
    x = experiment(compose([*COMMON, *words]))
    tasks, whole = load_tasks(x), tmp_path / "whole"
    train_in(x, tasks, whole, started=0.0, resume=None)
    for step in steps:
        folder = tmp_path / f"from_{step}"
        shutil.copytree(whole, folder)
        train_in(
            experiment(compose([*COMMON, *words])),
            tasks,
            folder,
            started=0.0,
            resume=folder / f"checkpoints/step_{step:06d}.ckpt",
        )
        then, now = (
            torch.load(f / "checkpoints/step_000004.ckpt", weights_only=True)
            for f in (whole, folder)
        )
        for key in ("state_dict", "optimizer_states"):
            assert same(now[key], then[key])
        assert same(
            {k: v for k, v in now["rlkit"].items() if k != "generators"},
            {k: v for k, v in then["rlkit"].items() if k != "generators"},
        )
        assert rows_of(folder) == rows_of(whole)
    steps = [load_rollouts(whole / "rollouts", step=step) for step in range(1, 5)]
    assert [{v for r in own for reply in r.steps for _, v in reply.versions} for own in steps] == [
        {0},
        {0},
        {0},
        {1},
    ]


def rows_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        json.dumps({k: v for k, v in row.items() if not k.startswith("perf/") and k != "time"})
        for row in rows
    ]


SWITCHES = [
    (LAG, [], 2, "of step 3 to 4 are sampled again"),
    (LAG, ["asynchrony=lag"], 2, "of step 3 to 4"),
    ([], LAG, 2, ""),
    (LAG, ["asynchrony=lag", "asynchrony.staleness=3"], 0, ""),
    (LAG, [*LAG, "generation.temperature=0.9"], 2, "of step 3 to 4"),
]


@pytest.mark.slow
@pytest.mark.parametrize("then, now, version, said", cases(SWITCHES, SWITCHES[:1], unpack=True))
def test_asynchrony_may_change_where_a_run_is_resumed(
    then, now, version, said, tmp_path, capsys, same
):
    """From the next step on. Groups that are too old for it, or sampled otherwise, are sampled
    again; the prompts go on."""
    x, tasks, learner = begun(*then)
    source, flight = source_of(x, tasks), Flight()
    for _ in range(2):
        _, flight, _ = take_step(source, flight, learner)
    state, saved = learner.state_dict(), source.state(flight)
    x, _, resumed = begun(*now)
    resumed.load_state_dict(state)
    capsys.readouterr()
    source = source_of(x, tasks)
    flight = source.restore(saved, resumed.policy, resumed.progress)
    out = capsys.readouterr().out
    assert said in out if said else not out
    groups, flight, _ = sample_step(source, flight, resumed)
    assert groups.version == version and groups.step == 2
    assert [r.task.id for r in groups.sampled][::4] == [
        task.id for task in take(tasks, Flight().consumed, 6, seed=3)[0][4:]
    ]


REFUSED = {
    "asynchrony.staleness=2": "asynchrony=none a step samples with the weights that it trains",
    "sft": "algorithm=sft samples nothing",
    "controller": "generation.temperature: follows what the run measures",
    "reward": "schedule.phases.explore.until=reward/mean > 0.5: groups are sampled ahead",
    "asynchrony.staleness=-1": "asynchrony.staleness=-1: must be at least 0",
}
GIVEN = {
    "sft": [*LAG, "algorithm=sft", "batch.group_size=1", "kl=none", "reference=none"],
    "controller": [
        *LAG,
        (
            "+schedule.numbers={generation.temperature: {_target_:"
            " rlkit.training.schedules.adaptive_entropy, start: 0.5}}"
        ),
    ],
    "reward": [
        *LAG,
        "schedule=grpo_to_dapo",
        "schedule.phases.explore.until='reward/mean > 0.5'",
        "+reward@schedule.phases.refine.reward=format",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_sampled_ahead_is_refused(case):
    with pytest.raises(ConfigError) as error:
        experiment(compose([*COMMON, *GIVEN.get(case, [case])]))
    assert REFUSED[case] in str(error.value)


@pytest.mark.slow
def test_what_is_known_ahead_is_not_refused():
    """A phase whose end is open, before one that samples alike; a phase that ends after steps; a
    controller of the update."""
    experiment(
        compose(
            [
                *COMMON,
                *LAG,
                "schedule=reinforce_to_ppo",
                "schedule.phases.explore.until='reward/mean > 0.5'",
            ]
        )
    )
    experiment(
        compose(
            [*COMMON, *LAG, "schedule=grpo_to_dapo", "+reward@schedule.phases.refine.reward=format"]
        )
    )
    experiment(compose([*COMMON, *LAG, "kl/coef=adaptive"]))
    experiment(compose([*COMMON, "asynchrony=lag", "asynchrony.staleness=0", *GIVEN["reward"][2:]]))


@pytest.mark.slow
def test_stale_groups_without_a_correction_are_warned_of():
    def said(*words):
        return [
            line
            for line in list_warnings(experiment(compose([*COMMON, *words])))
            if "asynchrony" in line
        ]

    assert (
        "algorithm/correction=none: nothing corrects" in said(*LAG, "algorithm/correction=none")[0]
    )
    assert said(*LAG) == said("asynchrony=lag", "algorithm/correction=none") == []
    assert (
        "every step samples with the weights of the start"
        in said("asynchrony=lag", "asynchrony.staleness=4")[0]
    )


@pytest.mark.slow
def test_the_experiment_of_a_later_step_is_foreseen():
    """Phases that end after steps, their numbers and those of the run are as they will be."""
    numbers = (
        "{generation.temperature: {_target_: rlkit.training.schedules.linear, _partial_: true,"
        " start: 1.0, end: 0.5, steps: 4}}"
    )
    x = experiment(
        compose(
            [
                *COMMON,
                "schedule=grpo_to_dapo",
                "schedule.phases.explore.until=2",
                f"+schedule.numbers={numbers}",
            ]
        )
    )
    progress = first = schedules.start(x)
    for step in range(4):
        seen, now = foresee_step(x, first, step), schedules.resolve_schedules(x, progress)
        assert (seen.algorithm.name, seen.generation.temperature) == (
            now.algorithm.name,
            now.generation.temperature,
        )
        assert (
            seen.algorithm.name == ("grpo" if step < 2 else "dapo")
            and seen.generation.temperature == 1 - step / 8
        )
        progress = schedules.advance(x, progress, {})
