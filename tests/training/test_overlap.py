"""asynchrony=overlap: a second process samples what asynchrony=lag would, whoever is faster, and
ends with the run."""

from __future__ import annotations

import itertools
import os
import pickle
import queue
import random
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import pytest
import torch

from overlap_parts import CLOCK
from parametrise import cases, cover
from rlkit.config.compose import compose, experiment, make_builder
from rlkit.config.problems.rows import load_tasks
from rlkit.episodes.stream import StreamState
from rlkit.errors import ConfigError, EngineError, RLKitError
from rlkit.system import rng
from rlkit.system.redaction import KNOWN, REDACTED
from rlkit.training.ahead import process as trainers_side
from rlkit.training.ahead import sampler, weights
from rlkit.training.ahead.flight import Flight, Request, StepGroups
from rlkit.training.ahead.here import Here
from rlkit.training.ahead.journal import Journal
from rlkit.training.ahead.modes import group_source
from rlkit.training.ahead.weights import WeightSlots, make_shared_memory
from rlkit.training.learner import Learner
from rlkit.training.metrics import Clock
from rlkit.training.schedules import Progress
from stepping import sample_step, take_step
from training.test_asynchrony import COMMON, KINDS, LAG, TURNS
from training.test_asynchrony import trained as trained_in_one

TALKS = ["environment=dialogue", "environment.max_turns=3", "generation.max_new_tokens=48"]
WAITS = [
    "environment=tool_use",
    "environment._target_=overlap_parts.slowed",
    "+environment.seconds=0.05",
    "+environment.straggler=10",
]
LAWS = {
    "grpo": [],
    **{
        kind: KINDS[kind]
        for kind in ("sampler", "turns", "tools", "lora", "ppo", "phases", "moments")
    },
    "draws": [*TALKS, "environment.prompt_fn._target_=overlap_parts.drawn"],
    "delays": [*TURNS[:2], *WAITS, "task=arithmetic", "model=tiny"],
    "transformers": ["generation=transformers"],
}
ALONE = (
    "grpo",
    "draws",
    "delays",
    "lora",
    "transformers",
)  # in a process of their own; the others save its start


class Thread:
    """In place of a process: the same function in a thread."""

    def __init__(self, command, pass_fds, stdin, **_):
        pickle.load(stdin)  # the secrets, which this process knows
        setup = pickle.load(stdin)
        link, memory = Connection(os.dup(pass_fds[0])), os.dup(pass_fds[1])

        def run():
            with link:
                sampler.serve(lambda: setup, link.recv, link.send_bytes, memory)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def wait(self, seconds=None):
        self.thread.join(seconds)

    def poll(self):
        return None if self.thread.is_alive() else 0

    def terminate(self):
        pass


@pytest.fixture
def in_a_thread(monkeypatch):
    monkeypatch.setattr(trainers_side.subprocess, "Popen", Thread)


def trained(*overrides, steps=4, between=lambda: None):
    """The learner after some steps, and of each step version, groups and row, without the clock."""
    composed = compose([*COMMON, *overrides])
    x = experiment(composed)
    torch.set_num_threads(1)
    rng.seed(x.seed)
    tasks, flight, out = load_tasks(x).train, Flight(), []
    learner = Learner(
        x, x.model(device="cpu"), exact=True
    )  # first: two threads cannot load a model at the same time
    with group_source(x, tasks, make_builder(composed.config)) as source:
        for _ in range(steps):
            groups, flight, row = take_step(source, flight, learner, between)
            row = {
                k: v
                for k, v in row.items()
                if not (k.startswith("perf/") or k.endswith("_s") or "in_flight" in k)
            }
            out.append((groups.version, timeless(groups.sampled), timeless(groups.trained), row))
    return learner, out


def timeless(rollouts):
    """Rollouts without the seconds that tools took."""

    def step(own):
        return own._replace(
            tool_results=tuple(result._replace(seconds=0.0) for result in own.tool_results)
        )

    return [r._replace(steps=tuple(map(step, r.steps))) for r in rollouts]


def mode(name, staleness):
    return [f"asynchrony={name}", f"asynchrony.staleness={staleness}"]


@pytest.mark.slow
def test_a_second_sampler_gives_the_same_run(in_a_thread, same):
    (lag, rows), (ahead, others) = (trained(*mode(name, 1), steps=3) for name in ("lag", "overlap"))
    assert same(lag.state_dict(), ahead.state_dict()) and same(rows, others)


@pytest.mark.slow
@pytest.mark.parametrize("kind, staleness", cover(itertools.product(LAWS, [0, 2]), 3))
def test_overlap_is_lag_whoever_is_faster(kind, staleness, same, monkeypatch):
    """Weights, groups and rows, with random waits in the environment and between the trainer's
    steps; none is lag(0).

    So nothing is dropped and nothing overtakes, however long some episodes take.
    """
    if kind not in ALONE:
        monkeypatch.setattr(trainers_side.subprocess, "Popen", Thread)

    def between():
        time.sleep(0.2 * CLOCK.random())

    waits = between if kind in ("grpo", "delays") else lambda: None
    (one, rows), (ahead, others) = (
        trained(*LAWS[kind], *mode("lag", staleness)),
        trained(*LAWS[kind], *mode("overlap", staleness), between=waits),
    )
    assert same(one.state_dict(), ahead.state_dict()) and same(rows, others)
    if not staleness and kind not in KINDS:  # those are laws of asynchrony=lag
        assert same(trained(*LAWS[kind])[0].state_dict(), ahead.state_dict())


@pytest.mark.slow
def test_groups_that_are_being_sampled_are_asked_for_again_after_a_resume(
    in_a_thread, tmp_path, same
):
    """From a checkpoint that was written while nothing had arrived yet: with it go the weights that
    are due to sample them."""
    words = [*COMMON, *mode("overlap", 2)]
    composed = compose(words)
    x = experiment(composed)
    tasks = load_tasks(x).train

    rng.seed(x.seed)
    learner, other = (Learner(x, x.model(device="cpu"), exact=True) for _ in range(2))
    with group_source(x, tasks, make_builder(composed.config)) as process:
        _, flight, _ = take_step(process, Flight(), learner)
        while process.answers.empty():
            time.sleep(0.01)
        # what has arrived is saved, and still there for the next step
        assert process.state(flight)["flight"]
        _, flight, _ = take_step(process, flight, learner)
        process.take_answers = lambda ahead: ahead
        state = learner.state_dict() | {"flight": process.state(flight)}
        torch.save(state, tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    assert [r["version"] for r in state["flight"]["requests"]] == [0, 1] and set(
        state["flight"]["weights"]
    ) == {0, 1}
    learner = other
    learner.load_state_dict(state)
    given = state["flight"], learner.policy, learner.progress
    assert Here(x, tasks).restore(*given).ahead == ()  # without a second process they are lost
    with group_source(x, tasks, make_builder(composed.config)) as process:
        flight = process.restore(*given)
        for _ in range(2):
            _, flight, _ = take_step(process, flight, learner)
    assert same(learner.state_dict(), trained_in_one(*LAG)[0].state_dict())


DROPPED = [("none", 0), ("lag", 2), ("overlap", 2)]


@pytest.mark.slow
@pytest.mark.parametrize("name, staleness", cases(DROPPED, [("lag", 2)], unpack=True))
def test_a_step_that_is_dropped_is_sampled_again_alike(
    name, staleness, in_a_thread, tmp_path, same
):
    """Whatever the source has done for it, a later source goes on from the flight before it."""
    composed = compose([*COMMON, *mode(name, staleness)])
    x = experiment(composed)
    given = x, load_tasks(x).train, make_builder(composed.config)
    torch.set_num_threads(1)
    rng.seed(x.seed)
    learner, other = (Learner(x, x.model(device="cpu"), exact=True) for _ in range(2))
    with group_source(*given) as source:
        _, flight, _ = take_step(source, Flight(), learner)
        dropped, *_ = sample_step(source, flight, learner)
        torch.save(learner.state_dict() | {"flight": source.state(flight)}, tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    other.load_state_dict(state)
    with group_source(*given) as source:
        flight = source.restore(state["flight"], other.policy, other.progress)
        again, *_ = sample_step(source, flight, other)
    assert (again.step, again.version) == (dropped.step, dropped.version)
    assert same(timeless(again.sampled), timeless(dropped.sampled))


def test_an_answer_whose_request_was_not_noted_yet_is_kept():
    """A signal may come after a request was sent and before it is noted; what saves the run then
    takes the answer."""
    process = object.__new__(trainers_side.SamplingProcess)
    process.answers, process.requests, process.here = queue.SimpleQueue(), {}, {}
    process.journal, process.failure = None, None
    groups = StepGroups(4, 3, [], [], StreamState(), StreamState(), "")
    process.answers.put(sampler.Answer(groups, {}, [], {}, 0.5, None, None, {}))
    process._take()
    assert process.here[4].groups is groups


def test_the_journal_forgets_old_groups_also_without_a_lag(tmp_path):
    """With a staleness of 0 no groups are in flight at a checkpoint, and none were deleted."""
    process = object.__new__(trainers_side.SamplingProcess)
    process.answers, process.here, process.failure, process.slots = (
        queue.SimpleQueue(),
        {},
        None,
        None,
    )
    process.publish_s, process.next = 0.0, 0
    process.journal = Journal(tmp_path / "journal", [], 0)
    for step in range(4):
        groups = StepGroups(step, step, [], [], StreamState(), StreamState(), "")
        process.journal.keep(groups, "")
        process.receive(groups, Clock())
        process.state(Flight(StreamState()))
    assert sorted(own.name for own in process.journal.folder.iterdir()) == ["000003.pt"]


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


def test_an_answer_that_cannot_be_read_ends_the_run_with_a_sentence():
    """The trainer waited until trainer.max_step_time."""
    process = object.__new__(trainers_side.SamplingProcess)
    process.connection, theirs = Pipe()
    process.answers, process.here, process.failure = queue.SimpleQueue(), {}, None
    with theirs:
        theirs.send_bytes(pickle.dumps(Unreadable()))
    process._listen()
    with pytest.raises(EngineError, match=r"cannot be read \(ValueError: invalid literal .*lag"):
        process.receive(Request(4, 3, Progress(), None, ""), Clock())


@pytest.mark.parametrize("data", [b"", b"garbage", None])
def test_a_damaged_record_of_the_journal_is_kept_aside_and_sampled_again(tmp_path, capsys, data):
    """It ended every resume; so did a file with another name."""
    journal = Journal(tmp_path / "journal", [], 0)
    journal.folder.mkdir()
    (journal.folder / "notes.pt").touch()
    if data is None:
        torch.save(["of another program"], journal.folder / "000003.pt")
    else:
        (journal.folder / "000003.pt").write_bytes(data)
    assert journal.find(Request(3, 2, Progress(), None, "")) is None
    journal.checkpoint(9)
    assert [path.name for path in journal.folder.iterdir()] == ["notes.pt"]
    assert (tmp_path / "aside" / "journal" / "000003.pt").exists()
    assert "the groups of step 4 are sampled again" in capsys.readouterr().out


def test_decoding_that_waited_in_the_sampling_process_is_in_the_row(experiment):
    """perf/late_s was 0 in every row of a run with a second process."""
    process = object.__new__(trainers_side.SamplingProcess)
    process.x, process.failure, process.publish_s = experiment, None, 0.0
    groups = StepGroups(4, 3, [], [], StreamState(), StreamState(), "")
    process.here = {4: sampler.Answer(groups, {"handover_s": 0.0}, [], {}, 0.5, None, None, {})}
    clock = Clock()
    process.receive(Request(4, 3, Progress(), None, ""), clock)
    assert clock.late == 0.5


def test_every_version_has_its_place_in_memory(monkeypatch):
    """Of several types and shapes, also larger than what is copied at a time; a place that holds
    another version is refused."""
    monkeypatch.setattr(weights, "PIECE", 5)
    torch.manual_seed(0)
    model = torch.nn.ParameterDict(
        {
            "a": torch.nn.Parameter(torch.randn(3, 5).t()),
            "b": torch.nn.Parameter(torch.randn(4).bfloat16()),
            "frozen": torch.nn.Parameter(torch.zeros(2), requires_grad=False),
            "scalar": torch.nn.Parameter(torch.randn(())),
        }
    )
    memory = make_shared_memory()
    slots, kept = WeightSlots(memory, 2, model), {}
    for version in range(3):
        for p in model.values():
            p.data.mul_(2)
        slots.write(version)
        kept[version] = [p.clone() for p in model.values()]
    for version in (1, 2, 1):
        slots.read(version)
        assert all(map(torch.equal, model.values(), kept[version]))
    with pytest.raises(
        EngineError, match="version 0 were requested, but their slot holds version 2"
    ):
        slots.read(0)
    saved = slots.save(1)
    slots.write(3)
    slots.restore(1, saved)
    slots.read(1)
    assert all(map(torch.equal, model.values(), kept[1]))
    os.close(memory)


REFUSED = {
    "ranks": (
        ["trainer=ddp", "trainer.devices=2"],
        "there is one sampling process, and trainer=ddp has 2 ranks; choose asynchrony=lag",
    ),
    "sft": (
        [
            "algorithm=sft",
            "batch.group_size=1",
            "kl=none",
            "reference=none",
            "asynchrony.staleness=0",
        ],
        "algorithm=sft samples nothing",
    ),
    "threads": (
        ["asynchrony.sampler.threads=0"],
        "asynchrony.sampler.threads=0: must be at least 1",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(REFUSED, ["ranks"]))
def test_what_a_second_process_cannot_sample_is_refused(case):
    words, said = REFUSED[case]
    with pytest.raises(ConfigError) as error:
        experiment(compose([*COMMON, "asynchrony=overlap", *words]))
    assert said in str(error.value)


@pytest.mark.slow
def test_python_objects_are_refused():
    x = experiment(compose([*COMMON, "asynchrony=overlap"]))
    with (
        pytest.raises(ConfigError, match="cannot hold Python objects"),
        group_source(x, []),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="tasks cannot be handed"),
        group_source(x, [lambda: 0], int),
    ):
        pass


@pytest.mark.slow
def test_an_error_of_the_other_process_is_raised_here(in_a_thread):
    """As itself, with the sentence that it has in one process; and a full memory and another model
    are said."""
    with pytest.raises(RLKitError, match=r"OSError: the door is locked at .*overlap_parts.py"):
        trained(*TALKS, "environment.prompt_fn._target_=overlap_parts.locked", *mode("overlap", 1))

    class Full(WeightSlots):
        def write(self, version):
            raise OSError(28, "No space left on device")

    composed = compose([*COMMON, *mode("overlap", 1)])
    x = experiment(composed)
    policy = x.model(device="cpu")
    with (
        group_source(x, [], make_builder(composed.config)) as process,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(trainers_side, "WeightSlots", Full)
        with pytest.raises(
            EngineError, match=r"no memory for 2 versions of \d MiB \(No space left"
        ):
            process.publish(policy, 0)
    policy.model.model.norm.weight.requires_grad = False
    with group_source(x, [], make_builder(composed.config)) as process:
        process.publish(policy, 0)
        with pytest.raises(ConfigError, match="different models"):
            process.receive(Request(0, 0, None, None, ""), Clock())


# ---------------------------------------------------------------------------------- whole processes

RUN = [
    "train",
    "debug=fast",
    "trainer.accelerator=cpu",
    "task.max_samples=32",
    "trainer.steps=12",
    "batch.group_size=4",
    "optimizer.lr=3e-3",
    "generation.max_new_tokens=24",
    "evaluation.n=0",
    "callbacks.checkpoint.every=2",
    "callbacks.checkpoint.model=false",
    "logger=none",
    "trainer.threads=1",
]

KILLS = int(os.environ.get("RLKIT_KILLS", "3"))


def sampler_of(pid):
    """The process id of the sampling process of a run; None before it is there."""
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if b"sampling_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return None


def gone(pid, within=10.0):
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def running(pid, lines, step, log):
    """Waits until a run has done a step; the process id of its sampling process."""
    while (lines.read_text().count('"reward/mean"') if lines.exists() else 0) < step or sampler_of(
        pid
    ) is None:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), log.read_text()[-3000:]
        time.sleep(0.01)
    return sampler_of(pid)


@pytest.mark.slow
def test_kills_of_either_process_lose_and_repeat_nothing(tmp_path, monkeypatch, forked, same):
    """Three of them; RLKIT_KILLS=20 in the environment for twenty, which take two minutes."""
    monkeypatch.chdir(tmp_path)
    whole, run, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log.txt"
    words, draw = [*RUN, f"trainer.steps={2 * KILLS + 2}"], random.Random("kills")
    child = forked(
        [*words, "asynchrony=lag", "asynchrony.staleness=2", f"hydra.run.dir={whole}"], log
    )
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, log.read_text()[-3000:]
    words += ["asynchrony=overlap", "asynchrony.staleness=2"]
    for kill in range(KILLS):
        who = draw.choice(["trainer", "sampler"])
        start = ["train", f"resume={run}"] if run.exists() else [*words, f"hydra.run.dir={run}"]
        child = forked(start, log)
        sampler = running(child, run / "metrics.jsonl", 2 * kill, log)
        time.sleep(0.5 * draw.random())
        os.kill(child if who == "trainer" else sampler, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == (-signal.SIGKILL if who == "trainer" else 1), (
            kill,
            who,
            log.read_text()[-3000:],
        )
        assert gone(sampler), (kill, who)
    assert "the sampling process was killed by SIGKILL; its output is in" in log.read_text()
    assert (
        os.waitstatus_to_exitcode(os.waitpid(forked(["train", f"resume={run}"], log), 0)[1]) == 0
    ), log.read_text()[-3000:]
    a, b = (
        torch.load(f / "checkpoints" / f"step_{2 * KILLS + 2:06d}.ckpt", weights_only=True)
        for f in (whole, run)
    )
    assert same(a["state_dict"], b["state_dict"]) and same(
        a["optimizer_states"], b["optimizer_states"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_both_and_saves(signum, tmp_path, monkeypatch, forked, same):
    monkeypatch.chdir(tmp_path)
    run, whole, log = tmp_path / "run", tmp_path / "whole", tmp_path / "log.txt"
    words = [*RUN, "trainer.steps=6", *mode("overlap", 1), "callbacks.checkpoint.every=50"]
    child = forked([*words, f"hydra.run.dir={run}"], log)
    sampler = running(child, run / "metrics.jsonl", 3, log)
    os.kill(child, signum)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signum, log.read_text()[
        -3000:
    ]
    assert gone(sampler)
    for own in (["train", f"resume={run}"], [*words, *mode("lag", 1), f"hydra.run.dir={whole}"]):
        assert os.waitstatus_to_exitcode(os.waitpid(forked(own, log), 0)[1]) == 0, log.read_text()[
            -3000:
        ]
    a, b = (
        torch.load(f / "checkpoints" / "step_000006.ckpt", weights_only=True) for f in (whole, run)
    )
    assert same(a["state_dict"], b["state_dict"])


@pytest.mark.slow
def test_a_sampler_that_dies_by_itself_ends_the_run_with_a_sentence(tmp_path, monkeypatch, forked):
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "log.txt"
    words = [
        *RUN,
        *mode("overlap", 1),
        *TALKS,
        "environment.prompt_fn._target_=overlap_parts.killed",
    ]
    assert (
        os.waitstatus_to_exitcode(
            os.waitpid(forked([*words, f"hydra.run.dir={tmp_path / 'run'}"], log), 0)[1]
        )
        == 1
    )
    said = [line for line in log.read_text().splitlines() if line.startswith("rlkit:")][-1]
    assert said.endswith(
        f"the sampling process was killed by SIGKILL; its output is in {tmp_path}/run/sampler.log. "
        "The run can be resumed from its last checkpoint"
    )


@pytest.mark.slow
def test_secrets_are_covered_in_the_log_of_the_sampling_process(tmp_path, experiment, monkeypatch):
    """Whatever the experiment or its parts print there."""
    monkeypatch.setitem(KNOWN, "s3cr3tvalue", REDACTED)
    again = partial(print, "the key is s3cr3tvalue")
    process = trainers_side.SamplingProcess(experiment, [], again, tmp_path)
    process.process.wait()
    process.close()
    assert f"the key is {REDACTED}\n" in (tmp_path / "sampler.log").read_text()


def test_a_message_that_cannot_be_read_ends_the_sampling_process(monkeypatch, capfd):
    """It waited for the next one for ever, also where the trainer was long gone."""
    ours, theirs = Pipe()
    ours.send_bytes(b"no pickle")
    ended = []
    monkeypatch.setattr(sampler, "end_process", ended.append)
    sampler._listen(theirs, queue.SimpleQueue(), os.getppid())
    assert ended == [0] and "UnpicklingError" in capfd.readouterr().err
