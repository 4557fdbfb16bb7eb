"""What a run says in a terminal and in a pipe: header, a line a step with the time left, nothing
that moves where nobody sees it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlkit.commands.cli import main
from rlkit.config.problems.rows import check_tools
from rlkit.environments import python_tool, tool_use
from rlkit.environments.tool_parsers import hermes
from rlkit.errors import ConfigError
from rlkit.sandbox import Sandbox
from rlkit.sandbox.level import find_level
from rlkit.system.processors import count_cores
from rlkit.training.callbacks import terminal
from rlkit.training.callbacks.terminal import (
    LEGEND,
    ProgressLines,
    TimeLeft,
    count_evaluations_left,
    step_line,
    time_left,
)
from rlkit.types import Task

ROW = {
    "reward/mean": 0.5,
    "kl/ref_k3": 0.0,
    "len/mean": 20.0,
    "len/truncated_frac": 0.0,
    "perf/generate_s": 1.0,
    "perf/reward_s": 0.0,
    "perf/update_s": 1.0,
    "perf/step_s": 2.0,
    "perf/between_s": 0.5,
}


def test_the_time_left_is_the_median_step_and_the_evaluations_to_come():
    """A first step that took a minute must not make of 10 s an hour."""
    assert time_left(4, [60.0, 2.0, 3.0], 5.0) == 4 * 3.0 + 5.0
    for total in range(1, 12):  # counted out, as HeldOut evaluates
        for every in range(5):
            for step in range(total + 1):
                after = [
                    s
                    for s in range(step + 1, total + 1)
                    if s == total or (every and s % every == 0)
                ]
                assert count_evaluations_left(step, total, every) == len(after)


def module_at(step, row, *, max_time=None):
    experiment = SimpleNamespace(
        evaluation=SimpleNamespace(every=2), trainer=SimpleNamespace(max_time=max_time)
    )
    return SimpleNamespace(
        rl_step=step, total_steps=10, metrics=row, experiment=experiment, started=0.0
    )


@pytest.fixture
def lines(monkeypatch, capsys):
    """The lines of a piped run whose steps take 2.5 s and whose evaluations take 4 s, every second
    step."""
    monkeypatch.setattr(terminal.time, "perf_counter", lambda: 100.0)

    def run(steps, *, max_time=None):
        progress, trainer = ProgressLines(), SimpleNamespace(should_stop=False)
        progress.on_train_start(trainer, module_at(0, {"perf/eval_s": 4.0}))
        assert capsys.readouterr().out == f"{LEGEND}\n"
        for step in range(1, steps + 1):
            trainer.should_stop = step == 10
            progress.on_train_batch_end(trainer, module_at(step, ROW, max_time=max_time))
        return capsys.readouterr().out.splitlines()

    return run


def test_every_line_of_a_pipe_tells_the_time_left(lines):
    """After step 1: 9 steps and 5 evaluations, 22.5 + 20 s; after the last one there is none."""
    said = lines(10)
    assert (
        said[0].endswith("1.0 + 1.0 s, 0:42 left")
        and said[1].endswith(", 0:36 left")
        and said[9].endswith("1.0 + 1.0 s")
    )
    assert all(line.isprintable() for line in said)


def test_a_run_that_learns_from_conversations_shows_its_loss():
    """Its reward is 1 in every step."""
    row = ROW | {"reward/demonstration/mean": 1.0, "loss/total": 2.5}
    assert step_line(1, 10, row, None).startswith("step  1/10 loss 2.500 ")
    assert step_line(1, 10, ROW, None).startswith("step  1/10 reward 0.50 ")


def test_a_limit_of_time_is_the_end_of_the_run(lines):
    """trainer.max_time=2 minutes, of which 100 s are over."""
    assert lines(1, max_time=2)[0].endswith(", 0:20 left")


def test_the_countdown_counts_down(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(terminal.time, "perf_counter", lambda: now[0])
    countdown = TimeLeft()
    assert str(countdown) == ""
    countdown.set(75.0)
    now[0] = 15.0
    assert str(countdown) == "1:00 left"


def test_a_tool_that_runs_code_gets_its_sandbox_before_the_model_is_loaded(monkeypatch):
    """A machine without isolation was found out in the middle of the first episode, and the header
    said nothing of it."""
    environment = tool_use(
        tools={"python": python_tool(sandbox=Sandbox(min_level="kernel+ns"))}, parse_calls=hermes
    )
    asked = []
    monkeypatch.setattr("rlkit.config.problems.rows.require", asked.append)
    check_tools([Task("a", ({"role": "user", "content": "?"},), "1")], environment)
    assert asked == [Sandbox(min_level="kernel+ns")]

    def refuse(sandbox):
        raise ConfigError("sandbox.min_level")

    monkeypatch.setattr("rlkit.config.problems.rows.require", refuse)
    with pytest.raises(ConfigError, match=r"sandbox\.min_level"):
        check_tools([Task("a", ({"role": "user", "content": "?"},), "1")], environment)


@pytest.mark.slow
def test_a_run_in_a_pipe(tmp_path, monkeypatch, capsys):
    """The header's words; no control character, no advert; a warning that is none of the
    frameworks' habits comes through."""
    monkeypatch.chdir(tmp_path)
    find_level.cache_clear()  # another test of this process may have asked for a sandbox
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        words = [
            "trainer.accelerator=cpu",
            "evaluation.n=0",
            "generation.max_new_tokens=32",
            "task.max_samples=32",
        ]
        assert main(["train", "debug=fast", *words, "batch.group_size=4"]) == 0
        warnings.warn("a real one", stacklevel=1)
    assert [str(w.message) for w in caught] == ["a real one"]
    captured = capsys.readouterr()
    for words in (
        (
            "model: tiny, 886,144 of 886,144 parameters trained, on cpu with 1 thread(s) of"
            f" {count_cores()} core(s), precision 32-true"
        ),
        "batch: 2 prompts × 4 samples → 2 update(s) of 4 rollouts a step, 2 steps",
        "sandbox: no reward and no tool asks for one\nactivations: kept (one micro-batch of ",
        "\ntools: calculator\ntool prompt: the template's (model.tools=template)\nkernels: ",
        " left",
        "less outputs/",
    ):
        assert words in captured.out
    assert captured.err == "" and captured.out.replace("\n", "").isprintable()
    (prompts,) = Path("outputs").rglob("prompts.txt")
    assert '<tools>\n{"type": "function"' in prompts.read_text()


@pytest.mark.slow
def test_a_run_in_a_terminal(tmp_path):
    """One bar that is drawn over itself, the lines of all steps above it, the cursor shown again at
    the end."""
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "rlkit",
        "train",
        "debug=fast",
        "trainer.steps=3",
        "evaluation.n=2",
    ]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm-256color"},
    )
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 65536):
            said += part
    except OSError:  # Linux's way to say that the other end is closed
        pass
    assert process.wait(timeout=60) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())
    assert re.findall(r"step (\d)/3 reward", text) == ["1", "2", "3"]
    assert re.search(r"1/3 .*\d:\d\d left", text.replace("\r", "\n")) and "-:--:--" not in text
    assert said.rfind(b"\x1b[?25h") > said.rfind(b"\x1b[?25l") > 0
