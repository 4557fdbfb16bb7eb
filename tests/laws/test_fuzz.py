"""Whatever a user gives, a command ends in a sentence: no traceback, no hang, nothing wrong without
a word. The named cases are those that once did otherwise; `.ci/fuzz` draws thousands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

import fuzzing
from fuzzing import OPTIONS, PREFIX, SLOTS, SMALL, TRAIN, Case
from rlkit.errors import ConfigError, split_error

pytestmark = pytest.mark.slow
FIRST = 20_000  # seeds that .ci/fuzz does not draw by default
COUNT = 30


def own(slot: str, statement: str, after: int = 0) -> Case:
    """A user's function that does this from a call on."""
    code, words = SLOTS[slot]
    prefix = PREFIX.replace("{statement}", statement).replace("{after}", str(after))
    return Case([*TRAIN, *words], {**OPTIONS, "mine.py": (prefix + code).encode()})


def option(slot: str, *words: str) -> Case:
    """The function of a slot, which is right, with other overrides behind it."""
    case = own(slot, "pass", 9999)
    return case._replace(words=[*case.words, *words])


def rows(*fields: dict) -> Case:
    lines = "\n".join(json.dumps({"prompt": "1 + 1?", "answer": "2"} | own) for own in fields)
    words = ["task=jsonl", "task.path=rows.jsonl", "task.held_out=0", "task.validation=0"]
    return Case([*TRAIN, *words], {"rows.jsonl": lines.encode()})


SAMPLES = {  # what it is → (the case, its exit status, words that it says)
    "a number of 25 digits": (
        Case([*TRAIN, f"trainer.steps=1{24 * '0'}"]),
        2,
        "trainer.steps: this number",
    ),
    "a key that YAML reads as true": (
        Case([*TRAIN, "--config", "mine.yaml"], {"mine.yaml": b"trainer: {on: 1}"}),
        2,
        "'trainer.True' as True; write it in quotes",
    ),
    "the same in an option": (
        Case(
            [*TRAIN, "--config-dir", "own", "trainer=mine"],
            {"own/trainer/mine.yaml": b"defaults: [auto]\non: 1"},
        ),
        2,
        "trainer.True: YAML reads this key as True",
    ),
    "rewards of 1e308": (own("reward", "return 1e308"), 2, "1e+15"),
    "rewards of steps of 1e308": (own("step", "return 'On.', 1e308, True, False, {}"), 1, "1e+308"),
    "metadata that JSON cannot hold": (own("metadata", "return object()"), 2, "its metadata is"),
    "a folder of 300 letters": (
        Case([*TRAIN[:-1], f"hydra.run.dir={300 * 'x'}"]),
        2,
        "File name too long",
    ),
    "a loop of links": (
        Case(TRAIN, before="outputs is a loop"),
        2,
        "cannot be written",
    ),
    "a prompt_fn that gives a number": (own("prompt_fn", "return 7"), 1, "it must be messages"),
    "a prompt_fn that is a number": (
        Case(
            [*TRAIN, "environment=dialogue", "environment.prompt_fn._target_=mine.mine"],
            {"mine.py": b"mine = 7"},
        ),
        2,
        "'mine.mine' is not a function",
    ),
    "a tool that cancels": (
        own("async tool", "asyncio.current_task().cancel(); return asyncio.sleep(0)"),
        1,
        "cancelled the task of its episode",
    ),
    "a tool that stops the loop": (
        own("async tool", "asyncio.get_running_loop().stop()"),
        1,
        "stopped the event loop",
    ),
    "an advantage that raises": (own("advantage", "return rewards.x"), 2, "NameError"),
    "a builtin as parse_action": (
        option("reset", "+environment.parse_action={_target_: builtins.int, _partial_: true}"),
        0,
        "finished after 2 steps",
    ),
    "a reset that returns a text": (own("reset", "return 'Go'"), 2, "and it returned 'Go'"),
    "a callback that raises": (own("callback", "raise KeyError(3)"), 1, "KeyError: 3 at"),
    "an error of many lines": (
        own("callback", "raise ValueError(99 * 'line\\n')"),
        1,
        "ValueError: line line",
    ),
    "a callback that ends the process": (
        own("callback", "os._exit(0)"),
        1,
        "os._exit(0) at",
    ),
    "a file that ends the process": (own("import", "os._exit(0)"), 1, "os._exit(0) at"),
    "memory that runs out in a part": (own("advantage", "raise MemoryError"), 2, "memory ran out"),
    "memory that runs out in a callback": (
        own("callback", "raise MemoryError"),
        1,
        "memory ran out at",
    ),
    "a column of rewards": (rows({"reward": 0.5}, {}), 2, "nothing reads the field 'reward'"),
    "a column of environments": (
        rows({"environment": "tool_use"}, {}),
        2,
        "nothing reads the field 'environment'",
    ),
    "a column of rewards that is passed over": (
        rows({"reward": 0.5}, {})._replace(
            words=[*rows({}).words, "+task.fields.reward=null"],
        ),
        0,
        "finished after 2 steps",
    ),
    "resume=auto with nothing to resume": (
        Case([*TRAIN[:-1], "resume=auto"]),
        0,
        "no run with this config is unfinished",
    ),
    "a rate of 100": (
        Case([*TRAIN, "optimizer.lr=100", "batch.prompts=4", "batch.group_size=4"]),
        0,
        "the updates broke the policy; lower optimizer.lr",
    ),
    "a tool that always fails": (
        own("tool", "raise ValueError('broken')"),
        0,
        "the tool mine failed in all of its",
    ),
    "fewer rows than n": (
        rows({}, {})._replace(
            words=[
                "rollout",
                *SMALL[1:2],
                "task=jsonl",
                "task.path=rows.jsonl",
                "n=5",
                "task.held_out=0",
                "task.validation=0",
                "split=train",
                "generation.max_new_tokens=4",
            ]
        ),
        0,
        "n=5: the task has only 2 rows",
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs for the cases that read some."""
    place = tmp_path_factory.mktemp("fuzz") / "runs"
    place.mkdir()
    fuzzing.warm()
    fuzzing.prepare_folders(place)
    return place


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_that_was_once_taken_or_ended_in_a_traceback(runs, name):
    case, status, words = SAMPLES[name]
    outcome = fuzzing.run_case(case, runs)
    assert outcome.faults == [] and outcome.status == status, outcome.said
    assert words in outcome.said


def test_drawn_cases_end_in_a_sentence(runs):
    for seed in range(FIRST, FIRST + COUNT):
        _, case = fuzzing.draw_case(seed)
        outcome = fuzzing.run_case(case, runs)
        assert outcome.faults == [], (seed, case, outcome.said)


def test_a_case_that_sleeps_for_ever_is_killed(monkeypatch):
    monkeypatch.setattr(fuzzing, "LIMIT", 0)
    child = os.posix_spawnp("sleep", ["sleep", "infinity"], os.environ)
    assert fuzzing.wait(child) == -signal.SIGKILL


# ------------------------------------------------------------------------- processes of their own


def begin(words, place, **settings):
    return subprocess.Popen(
        [sys.executable, "-m", "rlkit", *words],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )


def test_ctrl_c_during_the_imports_of_the_command_line_ends_without_a_traceback():
    """From rlkit.__main__ on; what Python itself imports before it cannot be guarded."""
    said = "import signal, rlkit.__main__; signal.raise_signal(signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_line_of_an_error_can_be_read():
    """A schedule's function returned a text of 100,000 letters, and the sentence quoted it."""
    [line] = split_error(ConfigError(f"reward: {'x' * 100_000} is no number"))
    assert line.startswith("rlkit: reward: xxx") and line.endswith("xxx is no number")
    assert len(line) < 3_000
    assert split_error(ConfigError("a.b: wrong\nc: wrong")) == [
        "rlkit: a.b: wrong",
        "rlkit: c: wrong",
    ]


def test_what_libraries_print_goes_into_no_file_where_the_streams_are_closed(tmp_path):
    """The run's first file got the number 1, and with it what was printed."""
    shell = f"{sys.executable} -m rlkit train {' '.join(TRAIN[1:])} >&- 2>&-"
    assert subprocess.run(shell, shell=True, cwd=tmp_path, check=False).returncode == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ended"] == "finished"


OWN_PROCESSES = [
    ["--version"],
    ["--help"],
    [],
    ["trian"],
    ["runs", "nowhere"],
    ["show", "--help"],
    ["train", "--nonsense"],
    ["train", "resume=nowhere"],
]
COMMANDS = [
    *(
        [name, "--help"]
        for name in ("train", "show", "compare", "runs", "export", "serve", "agent")
    ),
    ["nonsense"],
    ["train", "nonsense"],
    ["train", "=3"],
    ["train", "trainer.steps"],
    ["train", "--config"],
    ["train", "--config", "nowhere.yaml"],
    ["train", "--config", "."],
    ["train", "--config-dir", "nowhere"],
    ["train", "--cfg"],
    ["train", "--cfg", "nonsense"],
    ["train", "trust=maybe"],
    ["runs", "limit=x"],
    ["runs", "diff", "a"],
    ["runs"],
    ["compare"],
    ["compare", "nowhere"],
    ["plan"],
    ["export"],
    ["export", "run=nowhere"],
    ["export", "to="],
    ["evaluate", "run=nowhere"],
    ["evaluate", "split=nonsense"],
    ["replay"],
    ["replay", "bundle=nowhere"],
    ["metrics", "nonsense"],
    ["metrics", "kl=3"],
    ["report", "nowhere"],
    ["agent"],
    ["get"],
    ["bench", "run=nonsense"],
    ["show", "run=nowhere"],
    ["serve", "-m"],
    ["check", "nonsense=1"],
    ["check", "algorithm=nonsense"],
    ["rollout", "n=x"],
    ["rollout", "task=nonsense"],
    ["doctor", "nonsense"],
    ["runs", "--json"],
    ["compare", "nowhere", "--json"],
    ["why", "nowhere"],
    ["forecast", "run=nowhere"],
    ["get", "nonsense"],
]


def test_commands_end_in_a_sentence(runs):
    for words in COMMANDS:
        outcome = fuzzing.run_case(Case(words), runs)
        assert outcome.faults == [], (words, outcome.said)


def test_commands_in_processes_of_their_own_end_in_a_sentence(tmp_path):
    for words in OWN_PROCESSES:
        process = begin(words, tmp_path, stdin=subprocess.DEVNULL)
        out, errors = process.communicate(timeout=120)
        assert fuzzing.faults_of(Case(words), process.returncode, out, errors) == [], (
            words,
            process.returncode,
            errors,
        )


def test_the_ctrl_c_that_serve_recommends_is_no_failure(tmp_path):
    process = begin(["serve", "port=0", "trainer.accelerator=cpu"], tmp_path)
    for line in process.stdout:
        if "Ctrl-C ends it" in line:
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
