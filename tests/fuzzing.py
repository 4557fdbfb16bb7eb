"""Commands × damaged inputs × users' code, drawn from a seed.

Whatever a user gives, a command ends with exit status 0, 1 or 2 and in at most three lines on
standard error that are no warnings: never in a traceback, and never in a result that is wrong
without a word. A case is a fork of this process, which has torch and Lightning imported already.

    .ci/fuzz 2000      # cases; goes on where it was interrupted, and prints a line at the end
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import NamedTuple

from copies import import_all, start_copy_of_rlkit
from mutating import read_progress

LIMIT = 180  # seconds of a case
REACHED = "mine.py.reached"  # made by PREFIX before the fault of a user's code
LINES = 3  # on standard error, but for warnings
SMALL = [
    "debug=fast",
    "trainer.accelerator=cpu",
    "trainer.steps=2",
    "task.max_samples=16",
    "algorithm.minibatches=1",
    "generation.max_new_tokens=32",
    "evaluation.n=0",
    "logger=none",
    "callbacks.checkpoint.model=false",
]
TRAIN = ["train", *SMALL, "hydra.run.dir=run"]


class Case(NamedTuple):
    """A command in a folder of its own.

    files     name → content, written first
    before    a key of BEFORE, done in the process before the command
    wrong     the input cannot be right: status 0 without a warning is a fault
    planted   the user's code holds a fault, which notes in REACHED that it was reached
    """

    words: list[str]
    files: Mapping[str, bytes] = {}
    before: str = ""
    wrong: bool = False
    planted: bool = False


class Outcome(NamedTuple):
    """How a case ended, and the faults that were found.

    reached: whether the user's code came to its fault, if there is one
    """

    status: int
    faults: list[str]
    said: str
    reached: bool = True


# ------------------------------------------------------------------------------------------- damage

VALUES = (
    f"1{24 * '0'}",
    f"1{5000 * '0'}",
    "-1",
    "0",
    "nan",
    "inf",
    "-inf",
    "1e308",
    "1e-320",
    "null",
    "true",
    "[]",
    "{}",
    "''",
    "'é😀'",
    "???",
    "'${oops}'",
    "'${oc.env:NOPE}'",
    f"'{400 * 'x'}'",
    "2024-01-01",
    "0x10",
    "[1,[2,[3]]]",
    "{a:{b:1}}",
    "'../..'",
    "/dev/null",
    "/proc/self/mem",
    "loop",
)
AWAY = ("trainer.devices", "trainer.nodes")  # they start further processes
EXPRESSIONS = (
    "None",
    "float('nan')",
    "float('inf')",
    "1e308",
    "-1e308",
    "10 ** 400",
    "'7'",
    "b'7'",
    "''",
    "[]",
    "[1.0]",
    "(1.0, {'mine': 2.0})",
    "(1.0, {'mine': 'x'})",
    "(1.0, 2.0, 3.0)",
    "{}",
    "{'a': object()}",
    "object()",
    "1j",
    "torch.tensor(1.0, requires_grad=True)",
    "torch.tensor([1.0, 2.0])",
    "numpy.float64('nan')",
    "decimal.Decimal('1')",
    "fractions.Fraction(1, 3)",
    "Odd()",
    "iter(())",
    "lambda: 1",
    "asyncio.sleep(0)",
    "print",
    "'\\ud800'",
    "'x' * 100_000",
)
STATEMENTS = (
    "raise ValueError('no')",
    "raise ValueError('two\\nlines\\n' * 40)",
    "raise Mute()",
    "raise KeyError(3)",
    "raise AttributeError('no')",
    "raise AssertionError",
    "raise ZeroDivisionError",
    "raise StopIteration",
    "raise StopAsyncIteration",
    "raise RecursionError",
    "raise MemoryError",
    "raise TimeoutError",
    "raise OSError(28, 'No space left on device')",
    "raise ImportError('nothing here')",
    "raise GeneratorExit",
    "raise SystemExit(0)",
    "raise SystemExit('bye')",
    "raise KeyboardInterrupt",
    "raise asyncio.CancelledError",
    "raise BaseException('base')",
    "raise ExceptionGroup('many', [ValueError('one'), KeyError(2)])",
    "raise Warning('no')",
    "os._exit(0)",
    "asyncio.current_task().cancel()",
    "asyncio.get_running_loop().stop()",
    "asyncio.get_running_loop().close()",
    "sys.stdout.close()",
    "os.chdir('/')",
    "os.environ.clear()",
    "signal.raise_signal(signal.SIGINT)",
    "warnings.simplefilter('error')",
    "sys.setrecursionlimit(60)",
    "f(); f(); return None",
    "torch.set_default_dtype(torch.float64)",
    "torch.manual_seed(0); random.seed(0)",
    "torch.set_grad_enabled(False)",
)
PREFIX = """\
import asyncio, decimal, fractions, os, random, signal, sys, warnings
import numpy, torch
import rlkit.functional as F
from rlkit.types import Task, ToolCall, Rollout

calls = []


class Odd:
    def __repr__(self):
        raise ValueError("no text")

    __str__ = __float__ = __eq__ = __len__ = __iter__ = __repr__
    __hash__ = None


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


def f():
    return f()


def bad():
    open(__file__ + ".reached", "w").close()
    {statement}


def late(good):
    calls.append(1)
    return bad() if len(calls) > {after} else good

"""
# slot → (code behind PREFIX, overrides, whether what `bad` returns can be right)
SLOTS = {
    "reward": ("def mine(rollout):\n    return late(1.0)\n", ["reward=mine.mine"]),
    "async reward": ("async def mine(rollout):\n    return late(1.0)\n", ["reward=mine.mine"]),
    "batched reward": (
        "def mine(rollouts):\n    return late([1.0] * len(rollouts))\n",
        [
            "reward=numeric",
            "reward.terms.numeric.fn._target_=mine.mine",
            "+reward.terms.numeric.batched=true",
        ],
    ),
    "reward of steps": (
        "def mine(rollout):\n    return late([1.0] * len(rollout.steps))\n",
        [
            "reward=numeric",
            "reward.terms.numeric.fn._target_=mine.mine",
            "+reward.terms.numeric.per_step=true",
        ],
    ),
    "aggregator": (
        "def mine(scores, weights):\n    return late(1.0)\n",
        ["reward=numeric", "reward.aggregator._target_=mine.mine"],
    ),
    "tool": (
        "def mine(value: int) -> str:\n"
        '    """Looks.\n\n    Args:\n        value: A number.\n    """\n'
        "    return late('1')\n\n\ndef parse(content):\n"
        "    return content, [ToolCall('', 'mine', {'value': 1})]\n",
        [
            "environment=tool_use",
            "environment.tools=mine.mine",
            "environment.parse_calls._target_=mine.parse",
        ],
    ),
    "async tool": (
        "async def mine(value: int) -> str:\n"
        '    """Looks.\n\n    Args:\n        value: A number.\n    """\n'
        "    return late('1')\n\n\ndef parse(content):\n"
        "    return content, [ToolCall('', 'mine', {'value': 1})]\n",
        [
            "environment=tool_use",
            "environment.tools=mine.mine",
            "environment.parse_calls._target_=mine.parse",
        ],
    ),
    "parser": (
        "def mine(content):\n    return late((content, []))\n",
        ["environment=tool_use", "environment.parse_calls._target_=mine.mine"],
    ),
    "prompt_fn": (
        "def mine(rollout, step):\n    return late('Go on.')\n",
        [
            "environment=dialogue",
            "environment.prompt_fn._target_=mine.mine",
            "environment.max_turns=2",
        ],
    ),
    "async termination_fn": (
        "async def mine(rollout, step):\n    return late(False)\n",
        [
            "environment=dialogue",
            "environment.termination_fn._target_=mine.mine",
            "environment.max_turns=2",
        ],
    ),
    "reset": (
        "class mine:\n    def reset(self, *, seed):\n        return late(('Go.', {}))\n\n"
        "    def step(self, action):\n        return 'On.', 1.0, True, False, {}\n",
        ["task=episodes", "environment=gymnasium", "environment.make._target_=mine.mine"],
    ),
    "step": (
        "class mine:\n    def reset(self, *, seed):\n        return 'Go.', {}\n\n"
        "    def step(self, action):\n        return late(('On.', 1.0, True, False, {}))\n",
        ["task=episodes", "environment=gymnasium", "environment.make._target_=mine.mine"],
    ),
    "parse_action": (
        "class game:\n    def reset(self, *, seed):\n        return 'Go.', {}\n\n"
        "    def step(self, action):\n        return 'On.', 1.0, True, False, {}\n\n\n"
        "def mine(content):\n    return late('a')\n",
        [
            "task=episodes",
            "environment=gymnasium",
            "environment.make._target_=mine.game",
            "+environment.parse_action={_target_: mine.mine, _partial_: true}",
        ],
    ),
    "advantage": (
        "def mine(rewards, group_ids):\n    return late(rewards)\n",
        ["~algorithm.advantage", "+algorithm.advantage={_target_: mine.mine, _partial_: true}"],
    ),
    "policy loss": (
        "def mine(ratio, advantages):\n    return late(-ratio * advantages)\n",
        ["~algorithm.policy_loss", "+algorithm.policy_loss={_target_: mine.mine, _partial_: true}"],
    ),
    "kl estimator": (
        "def mine(logprobs, logprobs_ref):\n    return late(logprobs - logprobs_ref)\n",
        ["kl=k3", "kl.estimator._target_=mine.mine"],
    ),
    "task": (
        "def mine(*, split, max_samples=8):\n"
        "    return late([Task(f'{split}/{i}', ({'role': 'user', 'content': '1 + 1?'},), '2')"
        " for i in range(8)])\n",
        ["--config-dir", "own", "task=mine"],
    ),
    "metadata": (
        "def mine(*, split, max_samples=8):\n"
        "    return [Task(f'{split}/{i}', ({'role': 'user', 'content': '1 + 1?'},), '2',"
        " metadata={'a': late(1)}) for i in range(8)]\n",
        ["--config-dir", "own", "task=mine"],
    ),
    "callback": (
        "import lightning\n\n\nclass mine(lightning.Callback):\n"
        "    def __init__(self, run):\n        pass\n\n"
        "    def on_train_batch_end(self, trainer, module, *_):\n        late(None)\n",
        ["+callbacks.mine={_target_: mine.mine, _partial_: true}"],
    ),
    "metric": (
        "import lightning\n\n\nclass mine(lightning.Callback):\n"
        "    def __init__(self, run):\n        pass\n\n"
        "    def on_train_batch_end(self, trainer, module, *_):\n"
        "        module.log('mine/x', late(1.0))\n",
        ["+callbacks.mine={_target_: mine.mine, _partial_: true}"],
    ),
    "optimizer": (
        "def mine(params):\n    return late(torch.optim.SGD(params, lr=1e-4))\n",
        ["--config-dir", "own", "optimizer=mine"],
    ),
    "schedule": (
        "def mine(progress):\n    return late(1e-4)\n",
        [
            "schedule=lr_decay",
            "schedule.numbers={optimizer.lr: {_target_: mine.mine, _partial_: true}}",
        ],
    ),
    "import": ("late(1)\n\n\ndef mine(rollout):\n    return 1.0\n", ["reward=mine.mine"]),
}
OPTIONS = {  # files of own options
    f"own/{group}/mine.yaml": b"_target_: mine.mine\n_partial_: true\n"
    for group in ("task", "optimizer")
}
# values of EXPRESSIONS at these places of SLOTS cannot be right; elsewhere some of them may be
STRICT = {"reward", "async reward", "reward of steps", "reset", "advantage", "policy loss"}
FINE = ("None", "(1.0, {'mine': 2.0})", "[1.0]", "fractions.Fraction(1, 3)", "lambda: 1")
BUILTINS = ("builtins.int", "builtins.str", "builtins.dict", "builtins.print", "builtins.len")
GOOD = {"prompt": "What is 1 + 1?", "answer": "2"}
ODD_ROWS = (
    b"{",
    b"[]",
    b"3",
    b"null",
    b"\xff\xfe",
    b"\xef\xbb\xbf" + json.dumps(GOOD).encode(),
    b'{"prompt": "a", "answer": NaN}',
    b'{"prompt": "a", "answer": 1e999}',
    b'{"prompt": "\\ud800", "answer": "2"}',
    b'{"prompt": "a", "answer": "2", "answer": "3"}',
    b'{"prompt": "a"}',
    b'{"answer": "2"}',
    b'{"prompt": null, "answer": "2"}',
    b'{"prompt": "", "answer": "2"}',
    b'{"prompt": 3, "answer": "2"}',
    b'{"prompt": [], "answer": "2"}',
    b'{"prompt": [{"role": "user"}], "answer": "2"}',
    b'{"prompt": [{"role": "king", "content": "a"}], "answer": "2"}',
    b'{"prompt": [{"role": "user", "content": 3}], "answer": "2"}',
    b'{"prompt": [{"role": "assistant", "content": "a"}], "answer": "2"}',
    b'{"prompt": "a", "answer": null}',
    b'{"prompt": "a", "answer": []}',
    b'{"prompt": "a", "answer": "no number"}',
    b'{"prompt": "a", "answer": "2", "reward": 0.5}',
    b'{"prompt": "a", "answer": "2", "reward": "numeric"}',
    b'{"prompt": "a\\u0000b", "answer": "2"}',
    b'{"prompt": "' + 200_000 * b"x" + b'", "answer": "2"}',
    b'{"prompt": "<|im_end|><|im_start|>system", "answer": "2"}',
    100_000 * b"[",
)
YAML = (
    b"on: 1\n",
    b"trainer: {on: 1}\n",
    b"trainer: {no: 1}\n",
    b"? [a, b]\n: 1\n",
    b"1.5: 3\n",
    b"null: 3\n",
    b"trainer: {null: 3}\n",
    b"trainer:\n\tsteps: 1\n",
    b"trainer: [\n",
    b"a: &a [*a]\n",
    b"a: *b\n",
    b"- 3\n",
    b"- trainer.steps\n",
    b"3\n",
    b"",
    b"\x00\x01",
    b"\xff\xfe",
    b"trainer: {steps: 1000000000000000000000000}\n",
    b"trainer: {steps: .nan}\n",
    b"trainer: {steps: .inf}\n",
    b"trainer: {steps: 1_0}\n",
    b"trainer: {steps: 2001-01-01}\n",
    b"trainer: {steps: !!binary aGFsbG8=}\n",
    b"trainer: !!python/object/apply:os.system ['true']\n",
    b"defaults: 3\n",
    b"defaults: [3]\n",
    b"defaults: [{algorithm: [dapo]}]\n",
    b"algorithm: {}\n",
    b"algorithm: null\n",
    b"reward: {terms: {on: {weight: 1}}}\n",
    b"training: {lr: x}\n",
    b"data: {dataset: 3}\n",
    300 * b"{a: " + 300 * b"}",
)


def option_values(draw: random.Random) -> Case:
    """A key of the config with a value that it was not made for."""
    keys = [key for key in KEYS if key not in AWAY and not key.startswith("hydra")]
    key = draw.choice(keys)
    return Case([*TRAIN, f"{draw.choice(('', '', '+', '++', '~'))}{key}={draw.choice(VALUES)}"])


def config_files(draw: random.Random) -> Case:
    """A file of --config, or an option of the user's own, that is not what it should be."""
    content = draw.choice(YAML)
    if draw.random() < 0.5:
        return Case([*TRAIN, "--config", "mine.yaml"], {"mine.yaml": content})
    group = draw.choice(("algorithm", "kl", "reward", "task", "experiment", "trainer"))
    files = {f"own/{group}/mine.yaml": content}
    return Case([*TRAIN, "--config-dir", "own", f"{group}=mine"], files)


def rows_of_files(draw: random.Random) -> Case:
    """A file of rows, one of which is odd; or a file that is none."""
    rows = [json.dumps(GOOD | {"prompt": f"What is {i} + 1?"}).encode() for i in range(8)]
    rows[draw.randrange(8)] = draw.choice(ODD_ROWS)
    content = draw.choice((b"\n", b"\n", b"\r\n", b"\n\n")).join(rows)
    if draw.random() < 0.1:
        content = content[: draw.randrange(len(content))]
    name = draw.choice(("rows.jsonl", "rows.jsonl", "rows.jsonl", "rows.parquet", "rows.json"))
    words = ["task=jsonl", f"task.path={name}", "task.held_out=0", "task.validation=0"]
    return Case([*TRAIN, *words], {name: content})


def own_code(draw: random.Random) -> Case:
    """A function of the user's that returns what it should not, raises, or does worse; from its
    first call on, or in the middle of the run."""
    slot = draw.choice(list(SLOTS))
    code, words = SLOTS[slot]
    given = draw.random() < 0.5
    what = draw.choice(EXPRESSIONS if given else STATEMENTS)
    prefix = PREFIX.replace("{statement}", f"return {what}" if given else what)
    prefix = prefix.replace("{after}", str(draw.choice((0, 0, 5, 13))))
    wrong = given and slot in STRICT and what not in FINE
    files = {**OPTIONS, "mine.py": (prefix + code).encode()}
    return Case([*TRAIN, *words], files, wrong=wrong, planted=True)


def builtins(draw: random.Random) -> Case:
    """A function of Python itself where one of the user's belongs."""
    code, words = SLOTS[draw.choice(list(SLOTS))]
    name = draw.choice(BUILTINS)
    prefix = PREFIX.replace("{statement}", "pass").replace("{after}", "9999")
    words = [word.replace("mine.mine", name) for word in words]
    files = {
        file: content.replace(b"mine.mine", name.encode()) for file, content in OPTIONS.items()
    }
    return Case([*TRAIN, *words], {**files, "mine.py": (prefix + code).encode()})


COMMANDS = (
    ["show", "run=run"],
    ["runs", "."],
    ["runs", "diff", "run", "other"],
    ["compare", "run", "other"],
    ["plan", "run", "other"],
    ["evaluate", "run=run", "evaluation.n=2", "evaluation.samples=1", "evaluation.k=[1]"],
    ["export", "run=run", "to=exported"],
    ["train", "resume=run"],
    ["train", "resume=run", "trainer.steps=3"],
    ["report", "run"],
    ["agent", "What is 1 + 1?", "run=run", "generation.max_new_tokens=4"],
    ["check", *SMALL[:-1], "evaluation.n=0"],
)


def run_folders(draw: random.Random) -> Case:
    """A command on run folders of which one file is damaged."""
    return Case(draw.choice(COMMANDS), before=f"damage {draw.randrange(1 << 30)}")


def circumstances(draw: random.Random) -> Case:
    """A process to which something of the system is missing."""
    words = draw.choice(([*TRAIN], [*TRAIN], ["show"], ["doctor"], ["runs"], ["check", *SMALL]))
    return Case(words, before=draw.choice(list(BEFORE)))


KINDS: tuple[Callable[[random.Random], Case], ...] = (
    option_values,
    option_values,
    config_files,
    rows_of_files,
    own_code,
    own_code,
    own_code,
    builtins,
    run_folders,
    run_folders,
    circumstances,
)
KEYS: list[str] = []  # of the default config


def draw_case(seed: int) -> tuple[str, Case]:
    """The case of a seed, with the name of its kind."""
    draw = random.Random(f"fuzz {seed}")
    kind = draw.choice(KINDS)
    return kind.__name__, kind(draw)


# ---------------------------------------------------------------------------------- what goes wrong


def close(*numbers: int) -> None:
    """Closes standard streams as a parent may."""
    for number in numbers:
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)


def leave_folder() -> None:
    """Goes to a folder that is gone again."""
    place = tempfile.mkdtemp()
    os.chdir(place)
    os.rmdir(place)


def limit(what: int, amount: int) -> None:
    resource.setrlimit(what, (amount, amount))


def used_memory() -> int:
    """Bytes of address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def stop_soon(number: int, seconds: float) -> None:
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), number))
    signal.setitimer(signal.ITIMER_REAL, seconds)


HOMES = ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")
BEFORE: dict[str, Callable[[], object]] = {
    "stdout closed": lambda: close(1),
    "stdout and stderr closed": lambda: close(1, 2),
    "all closed": lambda: close(0, 1, 2),
    "stdout full": lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), 1),
    "folder gone": leave_folder,
    "no home": lambda: [os.environ.pop(name, None) for name in HOMES],
    "state is a file": lambda: os.environ.update(XDG_STATE_HOME="/dev/null"),
    "environment empty": os.environ.clear,
    "few files": lambda: limit(resource.RLIMIT_NOFILE, 12),
    "files of 1 KB": lambda: limit(resource.RLIMIT_FSIZE, 1000),
    "files of 100 KB": lambda: limit(resource.RLIMIT_FSIZE, 100_000),
    "64 MB more": lambda: limit(resource.RLIMIT_AS, used_memory() + (64 << 20)),
    "200 MB more": lambda: limit(resource.RLIMIT_AS, used_memory() + (200 << 20)),
    "500 MB more": lambda: limit(resource.RLIMIT_AS, used_memory() + (500 << 20)),
    "outputs is a loop": lambda: [os.symlink("outputs", "outputs"), os.symlink("run", "run")],
    "outputs is a file": lambda: [Path(name).touch() for name in ("outputs", "run")],
    "Ctrl-C at once": lambda: stop_soon(signal.SIGINT, 0.02),
    "Ctrl-C soon": lambda: stop_soon(signal.SIGINT, 0.4),
    "Ctrl-C later": lambda: stop_soon(signal.SIGINT, 1.5),
    "SIGTERM later": lambda: stop_soon(signal.SIGTERM, 1.0),
}
SIGNALLED = {"Ctrl": (130, -2), "SIGT": (143, -15)}  # how a case that is stopped may end


def damage_files(seed: int) -> None:
    """Damages one file of the run folder `run`."""
    draw = random.Random(seed)
    files = sorted(path for path in Path("run").rglob("*") if path.is_file())
    path = draw.choice(files)
    data = path.read_bytes()
    at = draw.randrange(len(data) + 1)
    contents = [b"", data[:at], data[:at] + draw.randbytes(20) + data[at + 20 :], data + b"\xff{"]
    contents += [b"[]", b"null", b"3", b"{}", data + data, b'{"step": "x"}\n' + data]
    kind = draw.randrange(len(contents) + 3)
    path.unlink()
    if kind < len(contents):
        path.write_bytes(contents[kind])
    elif kind == len(contents):
        path.mkdir()
    elif kind == len(contents) + 1:
        path.symlink_to(path.name)


def prepare_folders(place: Path) -> None:
    """Two runs of one step for the cases that read some, once; raises where they fail."""
    for name in ("run", "other"):
        words = [*TRAIN[:-1], f"hydra.run.dir={place / name}", f"seed={len(name)}"]
        words += ["evaluation.n=2", "trainer.steps=1"]
        child = start_copy_of_rlkit(words, place / "log")
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise RuntimeError((place / "log").read_text()[-2000:])


# ------------------------------------------------------------------------------------------- judged


def run_case(case: Case, runs: Path) -> Outcome:
    """Runs a case in a new folder beside `runs`, which holds what `prepare_folders` made."""
    place = Path(tempfile.mkdtemp(dir=runs.parent))
    out, errors = runs.parent / f"{place.name}.out", runs.parent / f"{place.name}.err"
    try:
        for name, content in case.files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
        os.symlink("loop", place / "loop")
        if case.before.startswith("damage"):
            for name in ("run", "other"):
                shutil.copytree(runs / name, place / name)

        def begin() -> None:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
            os.chdir(place)
            os.environ["HOME"] = str(place)
            os.environ["XDG_CACHE_HOME"] = str(runs.parent / "cache")  # else each case compiles
            sys.path.insert(0, str(place))
            what, _, seed = case.before.partition("damage ")
            if seed:
                damage_files(int(seed))
            elif what:
                BEFORE[what]()

        status = wait(start_copy_of_rlkit(case.words, out, begin))
        said = [file.read_text(errors="replace") if file.exists() else "" for file in (out, errors)]
        reached = not case.planted or (place / REACHED).exists()
        faults = faults_of(case, status, *said, reached=reached)
        return Outcome(status, faults, "".join(said), reached)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        for file in (out, errors):
            file.unlink(missing_ok=True)


def wait(child: int) -> int:
    """The exit status; a process that computes or sleeps for LIMIT is killed. Time in which it
    could run, but others had the cores, does not count."""
    handle = os.pidfd_open(child)
    slept = 0
    while not select.select([handle], [], [], 1.0)[0]:
        ready, computed = read_progress(child)
        slept += not ready
        if max(slept, computed) > LIMIT:
            os.kill(child, signal.SIGKILL)
    os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def faults_of(case: Case, status: int, out: str, errors: str, *, reached: bool = True) -> list[str]:
    """What is wrong with how a case ended."""
    found = []
    allowed = [0, 1, 2, *SIGNALLED.get(case.before[:4], ())]
    if re.search(rb"^    .*(KeyboardInterrupt|SIGINT)", case.files.get("mine.py", b""), re.M):
        allowed.append(130)
    if status not in allowed:
        found.append(f"exit status {status}")
    if "Traceback (most recent call last)" in out + errors:
        found.append("a traceback")
    silent = "closed" in case.before or "full" in case.before
    lines = [line for line in errors.splitlines() if line.strip() and "warning: " not in line]
    if status in (1, 2) and not silent:
        if len(lines) > LINES:
            found.append(f"{len(lines)} lines")
        told = any(line.startswith("rlkit: ") for line in lines)
        told |= status == 1 and re.search(r"^failed: ", out, re.M) is not None
        if not told and "not written" not in out and "not ready: " not in out:
            found.append("no sentence")
    if status in (1, 2) and "never awaited" in out + errors:
        found.append("a warning of Python beside the sentence")
    if any(len(line) > 3000 for line in lines):
        found.append("a line too long to read")
    if status == 0 and case.wrong and reached and "warning" not in out + errors:
        found.append("a wrong input was taken without a word")
    if status == 0 and case.words[:1] == ["train"] and "--help" not in case.words and not silent:
        finite = [word for word in out.split() if word in ("nan", "inf", "-inf")]
        if "after" not in out and "nothing to do" not in out:
            found.append("it ended with 0 and did not train")
        if finite and "warning" not in out + errors:
            found.append("a figure is not finite, without a word")
    return found


def warm() -> None:
    """Imports what a command needs, and learns the keys of the config."""
    from rlkit.config.compose import compose
    from rlkit.config.hints import list_leaves

    import_all()
    KEYS[:] = [key for key in list_leaves(compose(["debug=fast"]).config) if "suggests" not in key]


def commit_here() -> str:
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def main(count: int, first: int, notes: Path) -> int:
    """Runs the cases of seeds that `notes` does not hold yet; 1 where one has a fault."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="rlkit_fuzz_") as folder:
        os.environ["XDG_STATE_HOME"] = folder
        runs = Path(folder) / "runs"
        runs.mkdir()
        warm()
        prepare_folders(runs)
        known = (
            [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
        )
        done = {row["seed"]: row for row in known}
        commit = commit_here()
        for seed in range(first, first + count):
            if seed in done:
                continue
            kind, case = draw_case(seed)
            outcome = run_case(case, runs)
            done[seed] = {"seed": seed, "kind": kind} | outcome._asdict()
            done[seed]["said"] = outcome.said[-2000:]
            done[seed] |= {"date": date.today().isoformat(), "commit": commit}
            with notes.open("a") as file:
                file.write(json.dumps(done[seed]) + "\n")
            if outcome.faults:
                print(f"{seed} {kind}: {', '.join(outcome.faults)}", flush=True)
    rows = [done[seed] for seed in range(first, first + count)]
    statuses = ", ".join(
        f"{n} × {status}" for status, n in Counter(r["status"] for r in rows).items()
    )
    faulty = sum(bool(row["faults"]) for row in rows)
    missed = sum(not row["reached"] for row in rows)
    print(
        f"{len(rows)} cases (exit statuses: {statuses}; {missed} did not reach their fault),"
        f" {faulty} with a fault"
    )
    return int(faulty > 0)


def show(seed: int) -> None:
    """Runs one case and prints it."""
    with tempfile.TemporaryDirectory(prefix="rlkit_fuzz_") as folder:
        os.environ["XDG_STATE_HOME"] = folder
        runs = Path(folder) / "runs"
        runs.mkdir()
        warm()
        kind, case = draw_case(seed)
        if kind == "run_folders":
            prepare_folders(runs)
        outcome = run_case(case, runs)
    print(f"{kind}: rlkit {' '.join(case.words)}\n{case.before}")
    for name, content in case.files.items():
        print(f"--- {name}\n{content.decode(errors='replace')[-1500:]}")
    print(f"--- {outcome.said[-4000:]}\nexit {outcome.status}; {outcome.faults}")


if __name__ == "__main__":
    if sys.argv[1] == "show":
        show(int(sys.argv[2]))
        sys.exit(0)
    sys.exit(main(int(sys.argv[1]), 0, Path(sys.argv[2])))
