"""asynchrony=in_flight: weights change in the middle of episodes, at counted rounds, and a run repeats itself bit for bit."""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from contextlib import closing

import pytest
import torch

from laws import cases
from rlkit.config.compose import compose, experiment
from rlkit.config.problems.rows import load_tasks
from rlkit.errors import ConfigError
from rlkit.system import rng
from rlkit.training.flight import Flight, continued, next_groups, packed, restored
from rlkit.training.in_flight import InFlight
from rlkit.training.learner import Learner

COMMON = [
    "trainer.threads=1", "trainer.accelerator=cpu", "trainer.steps=5", "batch.prompts=2", "batch.group_size=4", "evaluation.n=0",
    "generation.max_new_tokens=32", "optimizer.lr=1e-3", "logger=none", "task.max_samples=64", "seed=3",
]  # fmt: skip
TURNS = [
    "task=guess_number", "model=tiny_guess", "environment=guess_number", "environment.max_turns=3", "task.high=20",
    "generation.max_new_tokens=12", "asynchrony.switch_every=3",
]  # fmt: skip
SLOW = ["environment=tool_use", "environment._target_=overlap_parts.slowed", "+environment.seconds=0.01", "generation.admission_rounds=3"]
TALKS = [
    "environment=dialogue", "environment.max_turns=3", "generation.max_new_tokens=48", "environment.prompt_fn._target_=overlap_parts.drawn",
]  # fmt: skip
KINDS = {
    "one reply": [],
    "turns": TURNS,
    "slow sessions": SLOW,
    "eager": ["generation.kernel=eager"],
    "few slots": ["generation.engine.max_rows=5"],
    "lora": ["model.lora.rank=2"],
    "thinking budget": ["generation.max_thinking_tokens=6"],
}  # fmt: skip

TWICE = ("one reply", "slow sessions")


def ahead(staleness=2, every=6):
    return ["asynchrony=in_flight", f"asynchrony.staleness={staleness}", f"asynchrony.switch_every={every}"]


def begun(*overrides):
    x = experiment(compose([*COMMON, *overrides]))
    torch.set_num_threads(1)
    rng.seed(x.seed)
    return x, load_tasks(x).train, Learner(x, x.model(device="cpu"), exact=True)


def steps(learner, tasks, flight, process, count):
    out = []
    for _ in range(count):
        groups, flight = next_groups(learner, tasks, flight, process)
        row = learner.step(groups.sampled, groups.trained)
        out.append((groups, {k: v for k, v in row.items() if not k.startswith(("perf/", "staleness/wait"))}, learner.batch))
    return flight, out


@functools.cache
def trained(*overrides):
    x, tasks, learner = begun(*overrides)
    with closing(InFlight(x, tasks)) as process:
        _, out = steps(learner, tasks, Flight(), process if x.asynchrony.mode == "in_flight" else None, 5)
    return learner, out


def replies(out):
    """(step, group, sample, turn) → reply."""
    return {(g.step, r.group, r.sample, i): reply for g, *_ in out for r in g.sampled for i, reply in enumerate(r.steps)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_repeats_itself(kind, same):
    words = (*ahead(), *KINDS[kind])
    learner, out = trained(*words)
    if kind in TWICE:  # a run that is resumed repeats the rest of it, of every kind
        again, others = trained.__wrapped__(*words)
        assert same(learner.state_dict(), again.state_dict())
        assert all(same(a, b) for (_, a, _), (_, b, _) in zip(out, others, strict=True))
    mixed = [reply for reply in replies(out).values() if len(reply.versions) > 1]
    assert mixed and any(row["staleness/mixed_frac"] > 0 for _, row, _ in out)
    for _, row, _ in out:
        shares = [row[f"staleness/age_{age}/share"] for age in range(3)]
        assert sum(shares) == pytest.approx(1) and sum(i * share for i, share in enumerate(shares)) == pytest.approx(
            row["staleness/steps_mean"]
        )
        divergence = sum(share * row[f"staleness/age_{age}/kl"] for age, share in enumerate(shares) if share)
        assert divergence == pytest.approx(row["staleness/kl"], rel=1e-4, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one reply", "turns", "slow sessions"])
def test_switches_between_episodes_alone_are_a_lag(kind):
    """Tokens and versions are those of asynchrony=lag; log-probs up to the bits in which other neighbours round."""
    _, lag = trained(*KINDS[kind][: 6 if kind == "turns" else None], "asynchrony=lag", "asynchrony.staleness=2")
    _, own = trained(*ahead(), *KINDS[kind], "asynchrony.switch_every=1000000")
    assert replies(own).keys() == replies(lag).keys()
    for place, reply in replies(own).items():
        other = replies(lag)[place]
        assert (reply.response_ids, reply.versions) == (other.response_ids, other.versions)
        assert reply.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_tokens_on_a_cache_of_one_version_have_the_log_probs_of_its_weights():
    """Scored anew by the trainer's forward with the weights of each version; the wrong version, and a mixed cache, are far off."""
    _, tasks, learner = begun(*ahead(), "optimizer.lr=3e-3")
    model, kept, flight, out = learner.policy.model, {}, Flight(), []
    with closing(InFlight(learner.experiment, tasks)) as process:
        for version in range(4):
            kept[version] = {name: value.clone() for name, value in model.state_dict().items()}
            flight, more = steps(learner, tasks, flight, process, 1)
            out += more
    gaps, wrong, mixed = [], [], []
    for groups, *_ in out:
        for rollout in groups.sampled:
            reply = rollout.steps[0]
            ends = [first for first, _ in reply.versions[1:]] + [len(reply.response_ids)]
            ages = [groups.step - version for _, version in reply.versions]
            assert reply.versions[0] == (0, groups.version) and ages == sorted(ages, reverse=True) and ages[-1] >= 0 and ages[0] <= 2
            for (first, version), end in zip(reply.versions, ends, strict=True):
                gap = distance(model, kept[version], rollout.context(0), reply, slice(first, end))
                (mixed if first else gaps).append(gap)
                if version < 3 and not first:
                    wrong.append(distance(model, kept[version + 1], rollout.context(0), reply, slice(first, end)))
    assert max(gaps) < 1e-5 and max(wrong) > 1e-3 and max(mixed) > 1e-3 and len(mixed) > 5


@torch.no_grad()
def distance(model, weights, context, reply, span):
    """The largest difference of a span's recorded log-probs from those that these weights give."""
    model.load_state_dict(weights)
    logits = model(torch.tensor([[*context, *reply.response_ids]])).logits[0, len(context) - 1 : -1]
    own = logits.log_softmax(-1).gather(1, torch.tensor(reply.response_ids)[:, None])[:, 0]
    return float((own - torch.tensor(reply.logprobs))[span].abs().max())


@pytest.mark.parametrize("kind", cases(KINDS, ["turns"]))
def test_a_resumed_run_goes_on_bit_for_bit(kind, tmp_path, same):
    """From the state between any two steps, written and read again, with another engine and other sessions."""
    words = (*ahead(), *KINDS[kind])
    whole, rows = trained(*words)
    for stop in (1, 3) if kind == "turns" else (2,):
        x, tasks, learner = begun(*words)
        with closing(InFlight(x, tasks)) as process:
            flight, _ = steps(learner, tasks, Flight(), process, stop)
            assert flight.ahead and flight.suspended is not None
            torch.save((learner.state_dict(), packed(flight, process)), tmp_path / "state")
        state, still = torch.load(tmp_path / "state", weights_only=True)
        x, tasks, learner = begun(*words)
        learner.load_state_dict(state)
        with closing(InFlight(x, tasks)) as process:
            flight = continued(learner, restored(still, tasks, seed=3), process)
            assert same(packed(flight, process), still)  # killed again before the first step
            _, out = steps(learner, tasks, flight, process, 5 - stop)
        assert same(learner.state_dict(), whole.state_dict())
        assert [(r.response_ids, r.logprobs, r.versions) for r in replies(out).values()] == [
            (r.response_ids, r.logprobs, r.versions) for r in replies(rows[stop:]).values()
        ]
        assert all(same(a, b) for (_, a, _), (_, b, _) in zip(out, rows[stop:], strict=True))


@pytest.mark.slow
def test_the_round_of_a_switch_and_those_in_which_answers_are_due_are_kept(tmp_path, monkeypatch, same):
    """Where every episode waits for a later round than the one in which the weights change, they change in that one all the same; and
    a resumed run asks its episodes on in the rounds that were set before."""
    words = [
        *ahead(2, 3),
        *TALKS,
        "environment.prompt_fn._target_=overlap_parts.uneven",
        "batch.prompts=1",
        "batch.group_size=2",
        "generation.admission_rounds=40",
        "trainer.steps=3",
    ]
    decode, rounds = InFlight._decode, []

    async def counted(self, enough):
        await decode(self, enough)
        rounds.append(self.decoder.rounds)

    monkeypatch.setattr(InFlight, "_decode", counted)
    x, tasks, learner = begun(*words)
    with closing(InFlight(x, tasks)) as process:
        flight, _ = steps(learner, tasks, Flight(), process, 1)
        torch.save((learner.state_dict(), packed(flight, process)), tmp_path / "state")
        late = [due for due in process.engine.due.values() if due > process.engine.decoder.rounds]
        _, out = steps(learner, tasks, flight, process, 2)
    assert late and [after - before for before, after in zip(rounds[:4:2], rounds[1:4:2], strict=True)] == [3, 3]
    state, still = torch.load(tmp_path / "state", weights_only=True)
    x, tasks, again = begun(*words)
    again.load_state_dict(state)
    with closing(InFlight(x, tasks)) as process:
        _, others = steps(again, tasks, continued(again, restored(still, tasks, seed=3), process), process, 2)
    assert rounds[6:] == rounds[2:6] and replies(others) == replies(out) and same(again.state_dict(), learner.state_dict())


@pytest.mark.slow
def test_an_episode_that_is_over_counts_until_its_slot_is_free_after_a_resume_too(tmp_path, same):
    """Its slot is given up in the round in which the answer that ended it is due, and its step is not complete before that."""
    # Every reply is one token, since every token ends it, and is answered 10 rounds later. Step 0's second and last answer is due in round
    # 22 and the weights change 6 rounds on, in 28; step 1's third and last reply ended in 23, and its slot is free in 33. Step 2 decodes
    # in every round, so that the answers arrive.
    words = [
        *ahead(),
        "environment=dialogue",
        "environment.max_turns=40",
        "environment.prompt_fn._target_=overlap_parts.again",
        "batch.prompts=1",
        "batch.group_size=2",
        "generation.admission_rounds=10",
    ]
    x, tasks, whole = begun(*words)
    whole.policy = whole.policy._replace(eos_token_ids=tuple(range(whole.policy.model.config.vocab_size)))
    with closing(InFlight(x, tasks)) as process:
        flight, _ = steps(whole, tasks, Flight(), process, 1)
        engine, following = process.engine, process.parts[1]
        assert len(engine.over) == len(following.played) == 2 and engine.holds(following.keys)
        torch.save((whole.state_dict(), packed(flight, process)), tmp_path / "state")
        _, out = steps(whole, tasks, flight, process, 2)
    state, still = torch.load(tmp_path / "state", weights_only=True)
    x, tasks, learner = begun(*words)
    learner.policy = whole.policy._replace(model=learner.policy.model)
    learner.load_state_dict(state)
    with closing(InFlight(x, tasks)) as process:
        flight = continued(learner, restored(still, tasks, seed=3), process)
        assert same(packed(flight, process), still)
        _, others = steps(learner, tasks, flight, process, 2)
    assert [row["staleness/rounds"] for _, row, _ in others] == [row["staleness/rounds"] for _, row, _ in out]
    assert same(learner.state_dict(), whole.state_dict())


REFUSED = {
    "asynchrony.staleness=0": "no episode outlives its step",
    "trainer=ddp": "rounds are counted in one process",
    "generation=transformers": "the engine Transformers does not count rounds",
    "generation.admission=free": "a clock decides who decodes with whom",
    "algorithm=dapo": "algorithm.max_refills=",
    "algorithm=remax": "plays greedy episodes",
    "asynchrony.switch_every=0": "asynchrony.switch_every=0: must be at least 1",
    "environment=mcp": "environment.max_servers holds some back",
}
MORE = {"trainer=ddp": ["trainer.devices=2"], "environment=mcp": ["environment.servers={one:[python,one.py]}", "environment.max_servers=2"]}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_sampled_so_is_refused(word):
    with pytest.raises(ConfigError) as error:
        experiment(compose([*COMMON, *ahead(), word, *MORE.get(word, [])]))
    assert REFUSED[word] in str(error.value)


@pytest.mark.slow
def test_kills_lose_and_repeat_nothing(tmp_path, monkeypatch, forked, same):
    """Four of them, one a SIGTERM; RLKIT_KILLS=20 in the environment for twenty."""
    kills = int(os.environ.get("RLKIT_KILLS", "4"))
    monkeypatch.chdir(tmp_path)
    whole, run, log, draw = tmp_path / "whole", tmp_path / "run", tmp_path / "log.txt", random.Random("kills")
    words = ["train", *COMMON, *ahead(), *KINDS["slow sessions"], f"trainer.steps={2 * kills + 2}", "callbacks.checkpoint.every=2"]
    child = forked([*words, f"hydra.run.dir={whole}"], log)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, log.read_text()[-3000:]
    for kill in range(kills):
        child = forked(["train", f"resume={run}"] if run.exists() else [*words, f"hydra.run.dir={run}"], log)
        rows = run / "metrics.jsonl"
        while (rows.read_text().count('"reward/mean"') if rows.exists() else 0) < 2 * kill:
            assert os.waitpid(child, os.WNOHANG) == (0, 0), log.read_text()[-3000:]
            time.sleep(0.01)
        time.sleep(0.3 * draw.random())
        # SIGTERM saves what stood still before the step that it cuts short.
        number = signal.SIGTERM if kill == kills // 2 else signal.SIGKILL
        os.kill(child, number)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (-number, 128 + number), log.read_text()[-3000:]
    assert os.waitstatus_to_exitcode(os.waitpid(forked(["train", f"resume={run}"], log), 0)[1]) == 0, log.read_text()[-3000:]
    a, b = (torch.load(f / "checkpoints" / f"step_{2 * kills + 2:06d}.ckpt", weights_only=True) for f in (whole, run))
    assert same(a["state_dict"], b["state_dict"]) and same(a["optimizer_states"], b["optimizer_states"])
