"""Streams add up: each has its own tokens, weights and coefficient, and leaves the gradients of the
others as they are."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import re

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from parametrise import cases
from rlkit import collect
from rlkit.algorithm import Stream
from rlkit.commands import check
from rlkit.config.compose import compose, experiment
from rlkit.config.problems.rows import load_tasks
from rlkit.environments import find_environment
from rlkit.episodes.demonstrate import demonstrations, make_demonstration
from rlkit.episodes.episode import read_opening
from rlkit.episodes.summary import is_looping
from rlkit.errors import ConfigError, DataError
from rlkit.functional import kl_student_teacher, no_correction, sampled_divergence
from rlkit.models.chat import encode_prompt
from rlkit.models.packing import allow_packing
from rlkit.system import rng
from rlkit.training.callbacks.pathologies import length_inflation
from rlkit.training.learner import Learner
from rlkit.training.selfcheck import check_teacher
from rlkit.training.teachers import (
    answer,
    context_teacher,
    demonstration,
    ema_teacher,
    path_teacher,
    sibling,
    with_hint,
)
from rlkit.training.update.record import Host
from rlkit.training.update.sampled import mark_observed
from rlkit.types import Rollout, Step, Task

COMMON = [
    "trainer.threads=1",
    "trainer.accelerator=cpu",
    "batch.prompts=2",
    "batch.group_size=3",
    "evaluation.n=0",
    "algorithm.minibatches=1",
    "generation.max_new_tokens=12",
    "logger=none",
    "task.max_samples=16",
    "kl=none",
    "algorithm/overlong=mask",
    "trainer.max_grad_norm=1e9",
]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TALK = (
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "name": "add", "content": "the sum is 42"},
    {"role": "assistant", "content": "42"},
)
KL = Stream(0.7, "sampled", loss=kl_student_teacher)


@pytest.fixture(scope="module")
def played(tiny):
    """The experiment, and rollouts of its first step with rewards that differ."""
    x = experiment(compose(["task=arithmetic", *COMMON]))
    tasks = x.task(split="train")[:2]
    found = collect(
        tiny,
        tasks,
        environment=x.environment,
        engine=x.generation.engine,
        group_size=3,
        seed=1,
        **x.generation.params,
    )
    rewarded = [
        r._replace(reward=float(i % 2), rewards={"task": float(i % 2)}) for i, r in enumerate(found)
    ]
    return x, [
        r._replace(status="truncated" if i == 1 else "terminated") for i, r in enumerate(rewarded)
    ]


def gradients(x, rollouts, policy, *, micro=1 << 14, of=None, **own):
    """The gradient of one update, flattened, and the step's metrics."""
    x = x._replace(
        algorithm=x.algorithm._replace(streams=own), teacher=of or context_teacher(show="answer")
    )
    x = x._replace(trainer=x.trainer._replace(micro_batch_tokens=micro))
    policy, seen = policy._replace(model=copy.deepcopy(policy.model).double()), []
    learner = Learner(x, policy, exact=True, host=Host(optimizer_step=lambda _: None))
    with rng.seed_block(0):
        metrics = learner.step(rollouts)
    seen = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    return (torch.cat(seen) if seen else torch.zeros(())), metrics


@pytest.mark.slow
def test_streams_add_up_however_they_are_split(played, tiny):
    """One rollout is masked by the overlong rule: the teacher reads it, the reward does not, and
    neither count is the other's."""
    x, rollouts = played
    plain, _ = gradients(x, rollouts, tiny)
    alone, _ = gradients(x, rollouts, tiny, teacher=KL)
    both, metrics = gradients(x, rollouts, tiny, reward=Stream(), teacher=KL)
    size = plain.norm()
    assert alone.norm() > 1e-3 * size and metrics["streams/teacher"] > 0
    assert (both - plain - alone).norm() < 1e-6 * size
    split, _ = gradients(x, rollouts, tiny, micro=1, reward=Stream(), teacher=KL)
    assert (split - both).norm() < 1e-5 * size  # norms and rotations of the model are in float32
    off, _ = gradients(x, rollouts, tiny, reward=Stream(), teacher=KL._replace(coef=0.0))
    assert torch.equal(off, plain)


@pytest.mark.slow
def test_target_kl_bounds_what_a_teacher_moves(played, tiny):
    """It was measured in the passes of the reward alone."""
    x, rollouts = played
    counts = []
    for limit in (None, 1e-9):
        own = x.algorithm._replace(streams={"teacher": KL}, epochs=3, target_kl=limit)
        policy = tiny._replace(model=copy.deepcopy(tiny.model))
        learner = Learner(
            x._replace(algorithm=own, teacher=context_teacher(show="answer")), policy, exact=True
        )
        row = learner.step(rollouts)
        counts.append((row["optim/updates"], row["optim/ended_by_target_kl"]))
    assert counts == [(3, 0), (1, 1)]


@pytest.mark.slow
def test_streams_add_up_on_two_ranks_of_uneven_tokens(played, tiny, tmp_path, forked):
    """Three rollouts on one rank and two on the other, each in micro-batches; a teacher of one part
    leaves a rank without tokens."""
    x, rollouts = played
    mixed = [r._replace(task=r.task._replace(part="ab"[r.group])) for r in rollouts[:5]]
    own = {
        "reward": {"reward": Stream()},
        "teacher": {"teacher": KL},
        "both": {"reward": Stream(), "teacher": KL},
        "part": {"teacher": KL._replace(parts=["b"])},
        "both_part": {"reward": Stream(), "teacher": KL._replace(parts=["b"])},
    }

    def compute(rank):
        store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
        found = {
            name: gradients(x, mixed, tiny, micro=200, **given)[0] for name, given in own.items()
        }
        torch.save(found, tmp_path / f"{rank}.pt")

    children = [forked(rank, tmp_path / f"{rank}.log", call=compute) for rank in range(2)]
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ended == [0, 0], [(tmp_path / f"{rank}.log").read_text()[-2000:] for rank in range(2)]
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name, given in own.items():
        alone, _ = gradients(x, mixed, tiny, **given)
        assert alone.norm() > 0 and torch.equal(one[name], two[name])
        assert (
            one[name] - alone
        ).norm() < 1e-5 * alone.norm()  # norms and rotations of the model are in float32
    for teacher, both in (("teacher", "both"), ("part", "both_part")):
        assert (one[both] - one["reward"] - one[teacher]).norm() < 1e-6 * one[both].norm()


def test_a_right_reply_is_shown_to_the_others_of_its_group_and_not_to_itself():
    step = Step((), (), (), (), "stop", content="It is 7.")
    right = Rollout(Task("a", ()), (step,), reward=1.0)
    wrong = right._replace(reward=0.0)
    assert sibling(right, [right, wrong]) is None
    assert "It is 7." in (sibling(wrong, [right, wrong]) or "")


def test_a_hint_stands_behind_the_users_last_message():
    said = [{"role": role, "content": role} for role in ("user", "assistant", "user", "tool")]
    hinted = [message["content"] for message in with_hint(said, "It is 7.")]
    assert hinted == ["user", "assistant", "user\n\nIt is 7.", "tool"]
    with pytest.raises(DataError, match="the user's last message, and a first prompt has none"):
        with_hint(said[1:2], "It is 7.")


@pytest.mark.slow
def test_the_teacher_reads_the_sampled_tokens_behind_its_own_prompt(played, tiny):
    """The loss is the divergence of two plain forward passes; an off-by-one would compare other
    tokens."""
    x, rollouts = played
    _, metrics = gradients(x, rollouts, tiny, teacher=KL)
    found = []
    for rollout in rollouts:
        step, rows = rollout.steps[0], []
        asked = encode_prompt(
            tiny.renderer,
            with_hint(step.prompt, answer(rollout, ())),
            read_opening(rollout.task, find_environment(x.environment, rollout.task)).schemas,
        )
        for prompt in (list(step.prompt_ids), asked):
            ids = torch.tensor([prompt + list(step.response_ids)])
            with torch.no_grad():
                rows.append(
                    tiny.model(ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
                )
        found.append((rows[0].exp() * (rows[0] - rows[1])).sum(-1))
    wanted = torch.cat(found)
    assert metrics["streams/teacher"] == pytest.approx(float(wanted.mean()), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("old", ["sampler", "loglinear"])
def test_a_sampled_teacher_is_weighed_by_policy_over_sampler_whatever_old_is(old, played, tiny):
    """Sampled 0.3 nats less likely than the trainer has it, every token counts e^0.3 as much; with
    old=trainer the correction would."""
    x, rollouts = played
    away = [
        r._replace(
            steps=tuple(s._replace(logprobs=tuple(p - 0.3 for p in s.logprobs)) for s in r.steps)
        )
        for r in rollouts
    ]
    x = x._replace(algorithm=x.algorithm._replace(correction=no_correction))
    sampled = Stream(1.0, "sampled", loss=sampled_divergence)
    plain, measured = gradients(x, away, tiny, teacher=sampled)
    moved, weighed = gradients(
        x._replace(algorithm=x.algorithm._replace(old=old)), away, tiny, teacher=sampled
    )
    assert weighed["streams/teacher"] == pytest.approx(
        math.exp(0.3) * measured["streams/teacher"], rel=1e-4
    )
    assert (moved - math.exp(0.3) * plain).norm() < 1e-4 * plain.norm()


@pytest.mark.slow
def test_one_part_of_a_mixture_by_its_reward_and_another_by_its_teacher(played, tiny):
    """The gradient is the sum of those of two steps, each with the rollouts of one part alone."""
    x, rollouts = played
    x = x._replace(algorithm=x.algorithm._replace(correction=no_correction))
    mixed = [r._replace(task=r.task._replace(part="ab"[r.group])) for r in rollouts]
    both, _ = gradients(
        x, mixed, tiny, reward=Stream(parts=["a"]), teacher=KL._replace(parts=["b"])
    )
    reward, _ = gradients(x, [r for r in mixed if r.task.part == "a"], tiny)
    teacher, _ = gradients(
        x, [r._replace(group=0) for r in mixed if r.task.part == "b"], tiny, teacher=KL
    )
    assert (
        reward.norm() > 0 < teacher.norm() and (both - reward - teacher).norm() < 1e-6 * both.norm()
    )


def test_a_teacher_that_is_the_policy_teaches_nothing(played, tiny):
    x, rollouts = played
    x = x._replace(
        algorithm=x.algorithm._replace(streams={"teacher": KL}),
        teacher=context_teacher(show="answer")._replace(show=None),
    )
    policy = tiny._replace(model=copy.deepcopy(tiny.model).double())
    metrics = Learner(x, policy, exact=True, host=Host(optimizer_step=lambda _: None)).step(
        rollouts
    )
    assert metrics["streams/teacher"] == 0 and metrics["optim/grad_norm"] == 0


def kl(a, b):
    return (a * (a / b).log()).sum(-1)


DIVERGENCES = {
    "sdft": lambda q, p: kl(p, q),
    **dict.fromkeys(("sdpo", "opsd"), lambda q, p: (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2),
}
SHOWS = {"sdft": demonstration, "sdpo": sibling, "opsd": answer}


@pytest.mark.slow
@pytest.mark.parametrize("name", cases((*SHOWS, "echo", "rl_sft"), ("sdpo",)))
def test_the_gradient_of_a_preset_is_that_of_its_definition_over_the_whole_vocabulary(
    name, played, tiny
):
    """A model that is float64 throughout, row by row through its own forward: every token's
    distributions, enumerated."""
    _, rollouts = played
    with rng.seed_block(1):
        config = GPT2Config(
            vocab_size=768,
            n_embd=8,
            n_layer=1,
            n_head=2,
            n_positions=512,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
        model = GPT2LMHeadModel(config).double().eval()
        for weight in model.parameters():
            weight.data.mul_(8)  # far from uniform
    allow_packing(model)
    shown = ["teacher=context"] if name in SHOWS else []
    x = experiment(compose(["task=arithmetic", *COMMON, f"algorithm={name}", *shown]))
    talk = ({"role": "user", "content": "Add."}, {"role": "assistant", "content": "It is 42."})
    rollouts = [
        r._replace(task=r.task._replace(metadata={**r.task.metadata, "messages": talk}))
        for r in rollouts
    ]
    if name == "echo":
        steps = make_demonstration(tiny, TALK)
        steps = tuple(s._replace(logprobs=(-1.0,) * len(s.response_ids)) for s in steps)
        rollouts = [
            Rollout(
                Task("row/0", TALK[:1]), steps, reward=1.0, rewards={"task": 1.0}, group=0, sample=i
            )
            for i in range(2)
        ]
        x = x._replace(batch=x.batch._replace(prompts=1, group_size=2))
    if name == "rl_sft":
        rollouts = [
            r._replace(reward=1.0, rewards={"task": 1.0}) for r in rollouts
        ]  # equal: the reward teaches nothing
    learner = Learner(
        x, tiny._replace(model=model), exact=True, host=Host(optimizer_step=lambda _: None)
    )
    learner.step(rollouts)
    found = torch.cat([p.grad.flatten() for p in model.parameters()])

    def read(prompt, reply):
        return model(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1].softmax(-1)

    values, coef = [], 1.0
    if name in SHOWS:
        for own in rollouts:
            group, step = [r for r in rollouts if r.group == own.group], own.steps[0]
            if (said := SHOWS[name](own, group)) is None:
                continue
            schemas = read_opening(own.task, find_environment(x.environment, own.task)).schemas
            asked = encode_prompt(tiny.renderer, with_hint(step.prompt, said), schemas)
            values.append(
                DIVERGENCES[name](
                    read(step.prompt_ids, step.response_ids),
                    read(asked, step.response_ids).detach(),
                )
            )
        assert values
    elif name == "echo":
        batch, coef = learner.record().assemble_batch(rollouts), 0.1
        batch = mark_observed(batch, rollouts, tiny.renderer)
        for row, mask in zip(batch.ids, batch.observed_mask, strict=True):
            values.append(
                -read(row[:1].tolist(), row[1:].tolist())[range(len(row) - 1), row[1:]].log()[
                    mask[1:]
                ]
            )
    else:
        coef = 0.1
        for own in demonstrations(tiny, [r.task for r in rollouts[::3]], x.environment):
            prompt, reply = own.steps[-1].prompt_ids, own.steps[-1].response_ids
            values.append(-read(prompt, reply)[range(len(reply)), list(reply)].log())
    model.zero_grad()
    tokens = torch.cat(values)
    (
        coef * tokens.sum() * float(torch.tensor(1.0) / len(tokens))
    ).backward()  # the weight of a token is a number in float32
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert wanted.norm() > 1e-3 and (found - wanted).abs().max() < 1e-10 * max(
        1.0, float(wanted.abs().max())
    )


def test_observations_are_what_tools_said_and_nothing_else(played, tiny):
    x, _ = played
    steps = make_demonstration(tiny, TALK)
    rollouts = [
        Rollout(
            Task("row/0", TALK[:1]), steps, reward=1.0, rewards={"task": 1.0}, group=0, sample=i
        )
        for i in range(2)
    ]
    echo = {"reward": Stream(), "imitation": Stream(0.1, "observations")}
    x = x._replace(
        algorithm=x.algorithm._replace(streams=echo),
        batch=x.batch._replace(prompts=1, group_size=2),
    )
    policy = tiny._replace(model=copy.deepcopy(tiny.model))
    learner = Learner(x, policy, exact=True, host=Host(optimizer_step=lambda _: None))
    batch = learner.record().assemble_batch(rollouts)
    mask = mark_observed(batch, rollouts, tiny.renderer).observed_mask
    texts = [
        tiny.renderer.tokenizer.decode(row[own]) for row, own in zip(batch.ids, mask, strict=True)
    ]
    assert texts == ["the sum is 42"] * 2 and not (mask & batch.response_mask).any()
    zeros = [
        r._replace(steps=tuple(s._replace(logprobs=(-1.0,) * len(s.response_ids)) for s in r.steps))
        for r in rollouts
    ]
    metrics = learner.step(
        zeros
    )  # all rewards are equal: the reward teaches nothing, the observations do
    assert metrics["streams/imitation"] > 0 and metrics["optim/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides, says",
    [
        (["algorithm=opd"], "teacher=none; choose teacher=path"),
        (["algorithm=opd", "teacher=path"], "teacher.path=FOLDER"),
        (
            ["algorithm=opd", "teacher=start", "algorithm.streams.teacher.coef=-1"],
            "algorithm.streams.teacher.coef=-1: must be at least 0",
        ),
        (
            ["algorithm=echo", "algorithm.streams.imitation.mask=sampled"],
            "mask=sampled: must be observations or demonstrations",
        ),
        (
            [
                "algorithm=opd",
                "teacher=start",
                "algorithm.max_refills=2",
                "algorithm/group_filter=mixed",
            ],
            "algorithm.max_refills=2",
        ),
    ],
)
def test_what_cannot_run_is_refused(overrides, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        experiment(compose(overrides))


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides, says",
    [
        (["algorithm=rl_sft"], "holds no conversation"),
        (["algorithm=sdft", "teacher=context"], "no row holds a conversation"),
        (
            ["algorithm=mopd", "task=mixture", "teacher=path", "+teacher.paths.arithmetic=tiny"],
            "'guess_number' has no teacher",
        ),
    ],
)
def test_rows_that_do_not_hold_what_a_stream_reads_are_refused(overrides, says):
    with pytest.raises(DataError, match=says):
        load_tasks(experiment(compose([*overrides, "task.max_samples=64", "evaluation.n=0"])))


def reordered(policy, folder):
    """Saves the model with its tokens in another order, one more token among those added, and rows
    of padding behind."""
    tokenizer, drawn = policy.renderer.tokenizer, torch.Generator().manual_seed(5)
    tokenizer.save_pretrained(folder)
    spec = json.loads((folder / "tokenizer.json").read_text())
    plain = len(spec["model"]["vocab"])
    order = torch.cat(
        [
            torch.randperm(plain, generator=drawn),
            plain + torch.randperm(769 - plain, generator=drawn),
        ]
    ).tolist()
    spec["model"]["vocab"] = {token: order[i] for token, i in spec["model"]["vocab"].items()}
    added = [*spec["added_tokens"], {**spec["added_tokens"][-1], "id": 768, "content": "<more>"}]
    spec["added_tokens"] = sorted(
        ({**token, "id": order[token["id"]]} for token in added), key=lambda token: token["id"]
    )
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    model = copy.deepcopy(policy.model)
    model.resize_token_embeddings(776, mean_resizing=False)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[order] = weight[:769].clone()
    model.save_pretrained(folder)


@pytest.mark.slow
def test_a_teacher_whose_tokens_have_another_order_gives_the_same_gradients(played, tiny, tmp_path):
    """The tiny model with weights that have moved, as it is and in another order with rows between:
    equal bits, tied head and all."""
    x, rollouts = played
    moved = tiny._replace(model=copy.deepcopy(tiny.model))
    with torch.no_grad():
        for weight in moved.model.parameters():
            weight.mul_(1.01)
    moved.model.save_pretrained(tmp_path / "plain")
    tiny.renderer.tokenizer.save_pretrained(tmp_path / "plain")
    reordered(moved, tmp_path / "other")
    check_teacher(
        experiment(compose(["algorithm=opd", "teacher=path", f"teacher.path={tmp_path / 'other'}"]))
    )
    plain, other = (
        gradients(x, rollouts, tiny, of=path_teacher(path=str(tmp_path / name)), teacher=KL)[0]
        for name in ("plain", "other")
    )
    assert plain.norm() > 0 and torch.equal(plain, other)


def test_a_loop_is_told_from_prose_and_the_alarm_fires_on_it():
    words = random.Random(0)
    prose = " ".join(
        "".join(words.choices("etaoinshrdlu", k=words.randint(2, 9))) for _ in range(2500)
    )
    assert (
        is_looping("wait, let me check. " * 600)
        and not is_looping(prose)
        and not is_looping("a" * 9_000)
    )
    quiet = {"len/truncated_frac": 0.1, "len/loop_frac": 0.0, "streams/teacher": 0.2}
    assert (
        length_inflation(quiet) is None
        and length_inflation({"len/truncated_frac": 0.5, "len/loop_frac": 0.0}) is None
    )
    assert "repeat themselves" in str(length_inflation(quiet | {"len/loop_frac": 0.1}))
    assert "are cut" in str(length_inflation(quiet | {"len/truncated_frac": 0.3}))


PRESETS = {
    "opsd": ["teacher=context"],
    "opd": ["teacher=path", "teacher.path=tiny"],
    "gkd": ["teacher=ema"],
    "mopd": [
        "task=mixture",
        "teacher=path",
        "+teacher.paths.arithmetic=tiny",
        "+teacher.paths.guess_number=tiny",
    ],
    "sdpo": ["teacher=context"],
    "echo": [],
    "sdft": ["teacher=context", "TALK"],
    "rl_sft": ["TALK"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(PRESETS, ("opsd",)))
def test_a_preset_takes_a_step(name, tmp_path):
    (tmp_path / "talk.jsonl").write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": f"{i}?"}, TALK[3]]}) + "\n"
            for i in range(9)
        )
    )
    talk = [
        (
            [
                "task=conversations",
                f"task.path={tmp_path}/talk.jsonl",
                "task.held_out=0",
                "reward=length",
            ]
            if w == "TALK"
            else [w]
        )
        for w in PRESETS[name]
    ]
    x = experiment(
        compose(
            [
                f"algorithm={name}",
                *(word for words in talk for word in words),
                "evaluation.n=0",
                "logger=none",
                "batch.group_size=4",
            ]
        )
    )
    report = check.run(x, load_tasks(x))
    streams_of = x.algorithm.streams.keys() - {"reward"}
    silent = {"sdpo", "echo"}  # no reply of the small step may have succeeded, or called a tool
    assert name in silent or all(report.metrics[f"streams/{stream}"] > -20 for stream in streams_of)


@pytest.mark.slow
def test_a_moving_teacher_goes_on_from_a_checkpoint_and_coefficients_follow_a_schedule(
    played, tiny
):
    x, rollouts = played
    numbers = {"algorithm.streams.teacher.coef": lambda step: 1.0 - step}
    own = x.algorithm._replace(streams={"teacher": KL})
    x = x._replace(
        algorithm=own, teacher=ema_teacher(decay=0.5), schedule=x.schedule._replace(numbers=numbers)
    )
    first = Learner(x, tiny._replace(model=copy.deepcopy(tiny.model)), exact=True)
    with torch.no_grad():
        first.model.get_input_embeddings().weight.add_(0.01)  # away from the average
    assert first.step(rollouts)["schedule/algorithm.streams.teacher.coef"] == 1
    later = Learner(x, tiny._replace(model=copy.deepcopy(tiny.model)), exact=True)
    later.load_state_dict(first.state_dict())
    for name, weight in first.kept.teachers[""].weights.items():
        assert torch.equal(weight, later.kept.teachers[""].weights[name])
    assert later.step(rollouts)["optim/updates"] == 0  # its coefficient is 0 by now
