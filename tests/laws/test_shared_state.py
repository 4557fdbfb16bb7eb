"""Code of the user that changes what it shares with the rest of the run: rows, and state of the
process such as the working directory."""

from __future__ import annotations

import asyncio
import functools
import gzip
import io
import itertools
import json
import locale
import os
import re
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import meddling_parts
import rlkit
from parametrise import cases, cover
from rlkit.config.compose import compose, experiment
from rlkit.config.problems import run_problems
from rlkit.config.problems.asynchrony import _find_stateful
from rlkit.config.problems.rows import load_tasks
from rlkit.environments import by_task as environments_by_task
from rlkit.environments import dialogue, gymnasium, single_turn, tool_use
from rlkit.episodes.evaluation import greedy_accuracy
from rlkit.errors import Interrupted
from rlkit.rewards import Reward, Term, batched, by_task, score
from rlkit.system import rng
from rlkit.system.copies import copy_value
from rlkit.system.shared_state import (
    NAMED,
    SharedStateError,
    guard_state,
    list_kinds,
    put_back,
    read_state,
)
from rlkit.training.ahead.flight import Flight
from rlkit.training.ahead.here import Here
from rlkit.training.callbacks.stopping import SIGNALS, StopOnSignal
from rlkit.training.learner import Learner
from rlkit.training.schedules import Phase
from rlkit.types import Environment, Rollout, Task, ToolCall, ToolResult, stateful
from stepping import take_step

FAST = [
    "trainer.threads=1",
    "trainer.accelerator=cpu",
    "batch.prompts=1",
    "batch.group_size=4",
    "evaluation.n=0",
    "trainer.steps=2",
    "generation.max_new_tokens=12",
    "optimizer.lr=1e-3",
    "logger=none",
    "task.max_samples=16",
    "seed=3",
    "task=guess_number",
    "model=tiny_guess",
    "task.high=20",
]
ELSEWHERE = Path(os.sep)
MEDDLE = {
    "the working directory": lambda: os.chdir(ELSEWHERE),
    "the signal handlers": lambda: [
        signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)
    ],
    "the blocked signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]),
    "the locale": lambda: locale.setlocale(
        locale.LC_ALL, "C" if locale.setlocale(locale.LC_ALL) != "C" else "C.UTF-8"
    ),
    "the standard output": lambda: setattr(sys, "stdout", io.StringIO()),
    "torch's grad mode": lambda: torch.set_grad_enabled(False),
    "torch's autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "torch's default device": lambda: torch.set_default_device("meta"),
    "torch's default dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch's number of threads": lambda: torch.set_num_threads(2),
    "torch's deterministic mode": lambda: torch.use_deterministic_algorithms(True),
    "torch's precision of float32 products": lambda: torch.set_float32_matmul_precision("medium"),
    "torch's backends": lambda: torch.backends.mkldnn.set_flags(False),
}
OF_THREAD = {name for name, kind in list_kinds().items() if kind.place == "thread"}


def even(rollout):
    """A score that differs between replies: the share of their tokens that are even."""
    ids = rollout.steps[-1].response_ids
    return sum(token % 2 == 0 for token in ids) / max(1, len(ids))


def with_door(x, door, meddle):
    """The experiment where `meddle` is called at a door, with what is handed out there."""

    def reward(rollout):
        meddle(rollout)
        return even(rollout)

    async def late(rollout):
        meddle(rollout)
        return even(rollout)

    @batched
    def rewards(rollouts):
        values = [even(rollout) for rollout in rollouts]
        meddle(rollouts)
        return values

    @batched
    def aggregator(rollouts, weights):
        values = [rollout.rewards["even"] for rollout in rollouts]
        meddle(rollouts, weights)
        return values

    def stop(rollout, index):
        meddle(rollout)
        return True

    def first_prompt(task):
        messages = [dict(message) for message in task.messages]
        meddle(task)
        return messages

    def lookup(task):
        meddle(task)
        return single_turn()

    class Own:
        """A session that goes on for a second turn, and changes what it has said as well."""

        tools = {}  # noqa: RUF012

        def __init__(self, task):
            self.said, self.task = [dict(message) for message in task.messages], task
            meddle(task)

        def first_prompt(self):
            return self.said

        def answer(self, rollout):
            meddle(rollout, self.said)
            return rollout, (
                None if len(rollout.steps) > 1 else [{"role": "user", "content": "Once more."}]
            )

    def look(value: int, more: list) -> str:
        """Looks.

        Args:
            value: A number.
            more: Numbers.
        """
        meddle(more)
        return "seen"

    def calls(content):
        return content, [ToolCall("", "look", {"value": 1, "more": [1, {"a": 2}]})]

    def executor(call, tools):
        meddle(call, tools)
        return ToolResult(call.id, call.name, "seen", ok=True)

    def advantage(rewards, metadata):
        meddle(metadata)
        return rewards - rewards.mean()

    term, environment = Term(1.0, even), single_turn()
    tools = tool_use(tools={"look": look}, parse_calls=calls, max_turns=2)
    if door in ("reward", "async reward", "batched reward", "reward in a thread"):
        fn = {"async reward": late, "batched reward": rewards}.get(door, reward)
        term = Term(1.0, fn, timeout=60.0 if door == "reward in a thread" else None)
    scoring = Reward(
        "mine", {"even": term}, **({"aggregator": aggregator} if door == "aggregator" else {})
    )
    evaluated = Reward("mine", {"even": Term(1.0, reward if door == "evaluation" else even)})
    look.bounded = door == "bounded tool"
    environment = {
        "stop": Environment(stop=stop),
        "first prompt": Environment(first_prompt=first_prompt),
        "lookup": lookup,
        "session": Environment(session=Own, max_steps=3, history="strip_thinking"),
        "tool": tools,
        "bounded tool": tools,
        "executor": tools._replace(execute=executor),
    }.get(door, tools if door == "no tool" else environment)
    if door == "advantage":
        x = x._replace(algorithm=x.algorithm._replace(advantage=advantage))
    return x._replace(
        reward=scoring, environment=environment, evaluation=x.evaluation._replace(reward=evaluated)
    )


@functools.cache
def plain():
    return experiment(compose(FAST))


def trained(x, steps=2, tasks=()):
    """Weights, prompts, rows and an evaluation of a run of a few steps."""
    torch.set_num_threads(1)
    rng.seed(x.seed)
    tasks, flight = tasks or load_tasks(plain()).train, Flight()
    learner = Learner(x, x.model(device="cpu"), exact=True)
    source = Here(x, tasks)
    out, played = [], []
    for _ in range(steps):
        _, flight, row = take_step(source, flight, learner)
        played += learner.rollouts
        out.append(
            {
                name: value
                for name, value in row.items()
                if not name.startswith(("perf/", "tools/seconds"))
            }
        )
    result, rollouts = greedy_accuracy(
        learner.policy, tasks[:2], x.environment, reward=x.evaluation.reward, max_new_tokens=12
    )
    said = [[r.conversation, r.rewards, r.reward, r.task] for r in (*played, *rollouts)]
    return learner.model.state_dict(), repr((out, result, said, tasks))


@functools.cache
def untouched(door):
    return trained(with_door(plain(), door, lambda *given: None))


@pytest.fixture
def as_before():
    """What a test leaves changed is put back, and nothing has been named before it."""
    kinds = {
        name: kind for name, kind in list_kinds().items() if name != "the standard output"
    }  # pytest's own comes and goes
    state = read_state(kinds)
    NAMED.clear()
    yield
    left = put_back(state, kinds)
    NAMED.clear()
    assert left == []


# ----------------------------------------------------------------------------- state of the process

STATE_DOORS = [
    "reward",
    "async reward",
    "batched reward",
    "reward in a thread",
    "stop",
    "session",
    "tool",
    "bounded tool",
    "evaluation",
]
IN_THREADS = ("async reward", "reward in a thread", "tool")
PAIRS = [
    (kind, door)
    for kind in MEDDLE
    for door in STATE_DOORS
    if not (door in IN_THREADS and kind in OF_THREAD)
]
REPRESENTATIVES = [
    ("the working directory", "reward"),
    ("the signal handlers", "bounded tool"),
    ("torch's grad mode", "batched reward"),
    ("torch's number of threads", "session"),
]


def test_every_kind_has_a_law():
    assert set(MEDDLE) == set(list_kinds())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, door", cases(cover(PAIRS, 12, also=REPRESENTATIVES), REPRESENTATIVES, unpack=True)
)
def test_a_change_of_shared_state_is_put_back_and_named_once(kind, door, same, capfd, as_before):
    """The run has the weights, the rows and the replies that it has without it."""
    x = with_door(plain(), door, lambda *given: MEDDLE[kind]())
    wanted, capfd_before = untouched(door), capfd.readouterr()
    assert "put it back" not in capfd_before.err
    found = trained(x)
    assert same(wanted[0], found[0]) and wanted[1] == found[1]
    said = [line for line in capfd.readouterr().err.splitlines() if "put it back" in line]
    assert len(said) == 1, said
    assert "test_shared_state.with_door.<locals>." in said[0] and f"changed {kind} " in said[0]
    assert f"({__file__}:" in said[0]


@pytest.mark.slow
def test_a_change_that_holds_over_a_wait_is_put_back_while_others_run(same, capfd, as_before):
    """An async function that leaves grad mode off and waits: nothing else of the episode computes
    without gradients."""
    seen = []

    async def stop(rollout, index):
        seen.append(torch.is_grad_enabled())
        torch.set_grad_enabled(False)
        await asyncio.sleep(0)
        return True

    trained(plain()._replace(environment=Environment(stop=stop)), steps=1)
    assert (
        seen
        and all(seen)
        and capfd.readouterr().err.count("changed torch's grad mode from on to off") == 1
    )


def test_what_cannot_be_put_back_ends_the_run_with_the_name_of_the_function(as_before):
    """A device that is entered as a context and never left lies over the default that torch can
    set."""
    entered = torch.device("meta")

    def reward(rollout):
        entered.__enter__()
        return 1.0

    try:
        said = (
            r"reward \(.*test_shared_state.py:\d+\) changed torch's default device from cpu to"
            r" meta, which cannot be put back"
        )
        with pytest.raises(SharedStateError, match=said):
            score([Rollout(Task("a", ()), ())], Reward("mine", {"mine": Term(1.0, reward)}))
    finally:
        entered.__exit__(None, None, None)


def test_a_function_that_was_given_up_in_its_thread_is_named_when_its_stretch_is_over(
    as_before, capfd
):
    """What runs beside it may still need what it has set; the run after it may not."""
    changed, go_on = threading.Event(), threading.Event()

    def hangs():
        torch.set_default_dtype(torch.float64)
        changed.set()
        go_on.wait()

    with guard_state() as watch:

        def work():
            with watch.watch_worker(hangs):
                hangs()

        thread = threading.Thread(target=work)
        thread.start()
        changed.wait()
        watch.look()
        assert torch.get_default_dtype() == torch.float64
    assert torch.get_default_dtype() == torch.float32
    assert "hangs (" in capfd.readouterr().err
    go_on.set()
    thread.join()


def test_ctrl_c_is_heard_after_a_reward_has_taken_its_handler(as_before, capfd):
    module = SimpleNamespace(droppable=False)
    callback, kept = StopOnSignal(), {number: signal.getsignal(number) for number in SIGNALS}
    try:
        callback.on_train_start(SimpleNamespace(), module)

        def reward(rollout):
            MEDDLE["the signal handlers"]()
            return 1.0

        score([Rollout(Task("a", ()), ())], Reward("mine", {"mine": Term(1.0, reward)}))
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)
        assert callback.signum == signal.SIGINT
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def test_a_look_costs_little():
    """In reads of state, not in time: one for each kind, and as many again as have changed."""
    reads = []
    kinds = {
        name: kind._replace(read=lambda kind=kind: reads.append(1) or kind.read())
        for name, kind in list_kinds().items()
    }
    before = read_state(kinds)
    assert put_back(before, kinds) == [] and len(reads) == 2 * len(kinds)


# ---------------------------------------------------------------------------- the working directory

RUN = [
    "debug=fast",
    "task=guess_number",
    "model=tiny_guess",
    "task.high=20",
    "task.max_samples=16",
    "trainer.accelerator=cpu",
    "trainer.threads=1",
    "trainer.steps=2",
    "evaluation.n=2",
    "evaluation.every=1",
    "batch.prompts=1",
    "batch.group_size=4",
    "generation.max_new_tokens=12",
    "reward=numeric",
    "reward.terms.numeric.fn._target_=meddling_parts.score",
    "reward@evaluation.reward=numeric",
    "evaluation.reward.terms.numeric.fn._target_=meddling_parts.right",
    "algorithm.advantage._target_=meddling_parts.advantage",
    "callbacks.checkpoint.every=1",
    "logger=tensorboard",
    "optimizer.lr=1e-3",
]
PLACES = {
    name: ["environment=single_turn", f"environment._target_=meddling_parts.{name}"]
    for name in ("turns", "game")
}
PLACES["tools"] = [
    "environment=tool_use",
    "environment._target_=meddling_parts.tools",
    "environment.max_turns=2",
]
MODES = {
    "none": [],
    "lag": ["asynchrony=lag", "asynchrony.staleness=1"],
    "overlap": ["asynchrony=overlap", "asynchrony.staleness=1", "asynchrony.sampler.threads=1"],
}


def ran(place, mode, folder, forked, away=None):
    """A run, resumed by resume=auto in the same process and evaluated after that, in a folder of
    its own: what is there afterwards."""
    words = ["train", *RUN, *PLACES[place], *MODES[mode]]

    def before():
        os.chdir(folder)
        sys.path.insert(0, str(Path(__file__).parents[1]))
        del sys.modules["meddling_parts"]  # the run imports it, which leaves the folder as well
        if away is not None:
            os.environ[meddling_parts.AWAY] = str(away)

    def call(_):
        from rlkit.commands.cli import main

        assert (
            main([*words, "trainer.max_time=1e-9"]) == 0
        )  # it ends out of time, after its first step
        assert main([*words, "resume=auto"]) == 0
        (run,) = Path("outputs/grpo").iterdir()
        return main(
            ["evaluate", f"run={run}", "evaluation.samples=1", "evaluation.k=[1]", "trust=true"]
        )

    folder.mkdir()
    (folder / "outputs").mkdir()
    child = forked([], folder.parent / f"{folder.name}.log", before, call)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, (folder.parent / f"{folder.name}.log").read_text()
    return {unstamped(path, folder): path for path in sorted(folder.rglob("*")) if path.is_file()}


def unstamped(path, folder):
    """A path below a folder without times and process numbers."""
    return re.sub(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d|tfevents.*", "*", str(path.relative_to(folder)))


def content(path):
    """What a file of a run says, without times, places and seconds."""
    if path.suffix == ".ckpt":
        return torch.load(path, weights_only=True)["state_dict"]
    if path.name == "metrics.jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [
            {
                k: v
                for k, v in row.items()
                if not (k.startswith("perf/") or k.endswith("_s") or "seconds" in k)
            }
            for row in rows
        ]
    if path.suffix == ".gz":
        return re.sub(
            rb'"seconds": [-.e\d]+', b"", b"".join(gzip.decompress(path.read_bytes()).splitlines())
        )
    if path.name == "overrides.yaml" or path.suffix == ".safetensors":
        return path.read_bytes()
    return None


@pytest.mark.slow
@pytest.mark.parametrize("place, mode", cover(itertools.product(PLACES, MODES)))
def test_a_run_whose_functions_change_the_folder_writes_what_its_twin_writes(
    place, mode, tmp_path, forked, same
):
    """Rewards, tools, environments, their `step` and an advantage go elsewhere, to folders that are
    gone: nothing is written there."""
    away = tmp_path / "away"
    away.mkdir()
    twin = ran(place, mode, tmp_path / "twin", forked)
    found = ran(place, mode, tmp_path / "own", forked, away)
    assert set(found) == set(twin) and list(away.iterdir()) == []
    for name, path in found.items():
        assert same(content(path), content(twin[name])), name
    said = (tmp_path / "own.log").read_text()
    assert (
        "meddling_parts.score (" in said
        and "importing meddling_parts changed the working directory" in said
    )
    assert said.count("meddling_parts.score (") == 1 and "Traceback" not in said


@pytest.mark.slow
def test_a_run_from_python_stays_in_its_folder(tmp_path, monkeypatch):
    """The representative: a reward, an environment and an advantage that leave for a folder that is
    gone, and a relative run folder."""
    away = tmp_path / "away"
    away.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(meddling_parts.AWAY, str(away))
    environment = meddling_parts.turns()
    os.chdir(tmp_path)  # `turns` was called here, by the test
    shipped = [
        text
        for text in RUN
        if "meddling" not in text and not text.startswith(("evaluation", "reward", "logger"))
    ]
    parts = {
        "reward": meddling_parts.score,
        "environment": environment,
        "algorithm__advantage": meddling_parts.advantage,
    }
    x = rlkit.experiment(*shipped, "evaluation.n=0", "logger=none", **parts)
    run = rlkit.train(x, "mine")
    assert run.folder == tmp_path / "mine" and list(away.iterdir()) == [] and Path.cwd() == tmp_path
    assert {"metrics.jsonl", "summary.json", "checkpoints", "rollouts", "config.yaml"} <= {
        path.name for path in run.folder.iterdir()
    }
    assert [path.name for path in tmp_path.iterdir()] in (["away", "mine"], ["mine", "away"])


# --------------------------------------------------------------------------------------------- rows


def ruin(*given):
    """Changes all that can be reached: mappings are emptied, lists grow, attributes are set,
    tensors are zeroed."""
    for value in given:
        if isinstance(value, dict):
            ruin(*value.values())
            value.clear()
            value["ruined"] = True
        elif isinstance(value, list):
            ruin(*value)
            value.append("ruined")
        elif isinstance(value, set):
            value.add("ruined")
        elif isinstance(value, tuple):
            ruin(*value)
        elif isinstance(value, Mark):
            value.what = "ruined"


class Mark:
    """An object that a row of the user's may hold."""

    def __init__(self):
        self.what = "whole"

    def __repr__(self):
        return f"Mark({self.what})"


ROW_DOORS = [
    "reward",
    "async reward",
    "batched reward",
    "reward in a thread",
    "aggregator",
    "stop",
    "first prompt",
    "lookup",
    "session",
    "tool",
    "bounded tool",
    "executor",
    "advantage",
    "evaluation",
]


@pytest.mark.slow
@pytest.mark.parametrize("door", cases(ROW_DOORS, ["session"]))
def test_a_function_that_changes_its_rows_changes_no_step(door, same):
    """Weights, replies, rows and the tasks themselves are those of a twin that changes nothing."""

    def run(meddle):
        rich = {
            "list": [1, [2]],
            "set": {1},
            "mark": Mark(),
            "nested": {"deep": [{"a": 1}]},
            "tuple": (1, {"b": [2]}, 3),
        }
        tasks = [
            task._replace(metadata={**task.metadata, **copy_value(rich)})
            for task in load_tasks(plain()).train
        ]
        return trained(with_door(plain(), door, meddle), tasks=tasks)

    wanted, found = run(lambda *given: None), run(ruin)
    assert same(wanted[0], found[0])
    assert wanted[1] == found[1] and "ruined" not in found[1] and "whole" in found[1]


# ----------------------------------------------------------------- state between a function's calls


@stateful
def counted(rollout):
    """A score that grows with each call."""
    COUNT.append(1)
    return float(len(COUNT))


COUNT: list[int] = []


@stateful
class Memory:
    """A reward, or tools, that remember."""

    def __call__(self, rollout):
        return 0.0

    def remember(self, what: str) -> str:
        """Remembers.

        Args:
            what: A word.
        """
        return what


@functools.wraps(counted)
def wrapped(rollout):
    return counted(rollout)


def scoring_with(fn, **fields):
    return lambda x: x._replace(
        reward=Reward("mine", {"mine": Term(1.0, fn, **fields), "even": Term(1.0, even)})
    )


def playing(environment):
    return lambda x: x._replace(environment=environment)


def in_a_phase(x):
    later = Phase(x.algorithm, until=1, reward=Reward("mine", {"mine": Term(1.0, counted)}))
    return x._replace(
        schedule=x.schedule._replace(phases={"first": Phase(x.algorithm, until=1), "then": later})
    )


STATEFUL = {
    "function": scoring_with(counted),
    "partial": scoring_with(partial(partial(counted))),
    "wrapper": scoring_with(wrapped),
    "instance": scoring_with(Memory()),
    "method": scoring_with(Memory().remember),
    "batched": scoring_with(counted, batched=True),
    "weight 0": lambda x: x._replace(
        reward=Reward("mine", {"mine": Term(0.0, counted), "even": Term(1.0, even)})
    ),
    "by task": scoring_with(partial(by_task, rewards={"numeric": even, "other": partial(counted)})),
    "aggregator": lambda x: x._replace(reward=x.reward._replace(aggregator=counted)),
    "phase": in_a_phase,
    "dialogue": playing(dialogue(prompt_fn=stateful(lambda rollout, step: None))),
    "toolbox": playing(tool_use(tools={"memory": Memory})),
    "session": playing(Environment(session=Memory)),
    "environment of a row": playing(
        environments_by_task(environments={"a": single_turn(), "b": dialogue(prompt_fn=counted)})
    ),
    "game": playing(gymnasium(make=partial(Memory))),
}


@pytest.mark.parametrize("place", STATEFUL)
def test_a_function_that_keeps_state_is_refused_in_a_second_process(place):
    x = STATEFUL[place](plain())
    overlap = x._replace(asynchrony=x.asynchrony._replace(mode="overlap", staleness=1))
    (said,) = _find_stateful(overlap)
    assert (
        f"({__file__}:" in said
        and said.endswith("choose asynchrony=lag")
        and said in run_problems(overlap)
    )
    assert not any(
        "@stateful" in problem
        for problem in run_problems(x._replace(asynchrony=overlap.asynchrony._replace(mode="lag")))
    )
    assert _find_stateful(plain()._replace(asynchrony=overlap.asynchrony)) == []
