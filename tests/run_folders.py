"""Fixtures: run folders as training leaves them, with figures that are easy to follow and texts
that try to break the page."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import yaml

from rlkit.episodes import append_step, save_rollouts
from rlkit.system.shards import append_lines
from rlkit.types import Rollout, Step, Task, ToolCall, ToolResult

HOSTILE = (
    '<img src=x onerror="window.hacked=1"></script><script>window.hacked=1</script><!-- \u2028 &'
    " \ud800 {{7*7}} javascript:"
)
ROW = {  # a healthy step
    "group/frac_zero_std": 0.5,
    "reward/std": 0.5,
    "adv/abs_mean": 0.3,
    "adv/mean": 0.0,
    "len/truncated_frac": 0.0,
    "len/mean": 12.0,
    "parse_fail_frac": 0.0,
    "reward/task/error_frac": 0.0,
    "reward/task/timeout_frac": 0.0,
    "ratio/first_mean": 1.0,
    "mismatch/logp_abs_mean": 0.001,
    "optim/skipped_nonfinite": 0,
    "kl/ref_k3": 0.01,
    "policy/entropy": 0.5,
    "tools/calls": 1.0,
    "value/loss": None,
    "perf/step_s": 3.0,
    "perf/generate_s": 1.0,
    "perf/reward_s": 0.5,
    "perf/update_s": 1.0,
    "perf/update_processor_s": 1.0,
    "stop_reason/error": 0.0,
    "schedule/optimizer.lr": 1e-3,
}


def episode(
    index: int,
    *,
    problem: str = "row/0",
    text: str = "#### 4",
    reward: float | None = 1.0,
    ok: bool = True,
) -> Rollout:
    """Thinks, calls a tool, reads its result, answers."""
    call, result = (
        ToolCall("c0", "calculator", {"expression": "2 + 2"}),
        ToolResult("c0", "calculator", "4", ok),
    )
    asked = {"role": "user", "content": f"How much is it? {text}"}
    first = Step(
        (asked,),
        (1, 2),
        (3, 4),
        (-0.5, -0.1),
        "tool",
        thinking=f"let me see {text}",
        tool_calls=(call,),
        tool_results=(result,),
    )
    last = Step(
        ({"role": "tool", "content": "4"},), (1, 2, 3, 4, 5), (6,), (-1.5,), "stop", content=text
    )
    return Rollout(
        Task(problem, (asked,), answer="4"),
        (first, last),
        group=0,
        sample=index,
        reward=reward,
        rewards={"task": reward},
    )


def silent(index: int) -> Rollout:
    """Calls no tool and is cut off."""
    step = Step(
        ({"role": "user", "content": "And now?"},),
        (1,),
        (2, 3),
        (-0.1, -0.2),
        "length",
        content="eh",
    )
    return Rollout(
        Task("row/9", (), answer="4"),
        (step,),
        "truncated",
        "length",
        group=1,
        sample=index,
        reward=0.0,
    )


@pytest.fixture
def make_run(tmp_path):
    """(name, …) → the folder of a run below tmp_path."""
    return maker(tmp_path)


@pytest.fixture(scope="module")
def make_runs(tmp_path_factory):
    """The same, of runs that a whole file shares."""
    return maker(tmp_path_factory.mktemp("shared"))


def maker(parent: Path):
    """(name, …) → the folder of a run below the parent."""

    def make(
        name: str,
        *,
        seed: int = 0,
        lr: float = 1e-3,
        steps: int = 4,
        reward: float = 0.1,
        change: dict | None = None,
        switch: int = 0,
        title: str = "grpo",
        after: float = 0.9,
        text: str = "#### 4",
        samples: int = 3,
    ) -> Path:
        folder = parent / "runs" / name
        (folder / ".hydra").mkdir(parents=True)
        config = {
            "name": title,
            "seed": seed,
            "optimizer": {"lr": lr},
            "evaluation": {"seed": seed},
            "resume": "never",
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / ".hydra" / "config.yaml").write_text("{}")
        held_out = {
            "eval/accuracy": 0.5,
            "eval/accuracy_low": 0.4,
            "eval/accuracy_high": 0.6,
            "eval/reward": 0.5,
        }
        rows = [{"step": 0, **held_out}]
        for step in range(1, steps + 1):
            mean = {
                "reward/mean": reward * step,
                "reward/task/mean": reward * step,
                "reward/format/mean": 0.5,
            }
            rows.append({"step": step, **ROW, **mean, **(change or {})})
            rows += (
                [
                    {
                        "step": step,
                        "schedule/switch": f"phase a → b after step {step}: dapo; keeps weights",
                    }
                ]
                if step == switch
                else []
            )
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sides = {
            "interval": [0.4, 0.6],
            "n": 100,
            "distinct": 100,
            "reward_interval": [0.4, 0.6],
            "temperature": 0.0,
        }
        summary = {
            "ended": "finished",
            "steps": steps,
            "tokens": 1234,
            "wall_seconds": 300,
            "device": "cpu",
            "peak_memory_gb": 1.5,
        }
        sides |= {"split": "test"}
        summary |= {
            "before": {"accuracy": 0.5, "reward": 0.5, **sides},
            "after": {"accuracy": after, "reward": after, **sides},
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        for step in range(1, steps + 1):
            rollouts = [
                episode(i, text=f"{text} {step}", reward=i / samples, ok=i != 1)
                for i in range(samples)
            ] + [silent(samples)]
            append_step(folder / "rollouts", step, rollouts)
        return folder

    return make


ODD = [
    None,
    True,
    -1,
    3.5,
    1e308,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "x" * 300,
    "\ud800",
    [],
    {},
    [1],
    {"a": {"b": []}},
    [[[]]],
]
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def damage_run(folder: Path, case: int, generator: random.Random) -> None:
    """Write a run folder in which numbers, texts and mappings of metrics.jsonl, summary.json,
    run.json and the rollouts are replaced by other types, at random."""
    metrics = (
        "reward/mean",
        "reward/term/mean",
        "eval/accuracy",
        "kl/ref_k3",
        "perf/step_s",
        "schedule/optimizer.lr",
        "adv/abs_mean",
    )
    side = {
        "accuracy": 0.5,
        "interval": [0.4, 0.6],
        "reward": 0.4,
        "reward_interval": [0.3, 0.5],
        "n": 9,
        "distinct": 9,
        "split": "test",
        "parts": {},
    }
    step = Step(
        ({"role": "user", "content": "hi"},), (1,), (2, 3), (-0.1, -0.2), "stop", content="ho"
    )
    (folder / "rollouts").mkdir(parents=True)
    rows = [{"step": s, **dict.fromkeys(metrics, s / 9)} for s in range(6)]
    rows.append(
        {
            "step": 4,
            "schedule/switch": "phase a → b after step 4",
            "reward/" + "y" * 400 + "/mean": 0.3,
        }
    )
    summary = {
        "ended": "finished",
        "before": dict(side),
        "after": dict(side),
        "steps": 5,
        "tokens": 9,
        "wall_seconds": 3.0,
        "seed": 1,
    }
    for node in (*rows, summary, summary["before"], summary["after"]):
        for key in list(node):
            if generator.random() < 0.15:
                node[key] = generator.choice(ODD)
            elif generator.random() < 0.05:
                del node[key]
    odd = [
        json.dumps(generator.choice(ODD)),
        "{",
        "\x00",
        "[" * 5000,
        '{"step": 1e999}',
        '{"a": 1}',
    ][case % 6]
    lines = [json.dumps(row) for row in rows]
    lines.insert(3, odd)
    (folder / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    (folder / "summary.json").write_text(json.dumps(summary if case % 5 else generator.choice(ODD)))
    (folder / "run.json").write_text(
        json.dumps(generator.choice([[], [1], {}, [{"versions": 1}], [{"versions": {}}]]))
    )
    (folder / "config.yaml").write_text(
        LAUGHS if case % 7 == 0 else yaml.safe_dump({"name": case, "seed": 0, "a": {"b": case}})
    )
    file = folder / "damaged.jsonl"
    save_rollouts(
        file,
        [Rollout(Task("t", step.prompt, "4"), (step,), reward=1.0, rewards={"term": 1.0})] * 3,
    )
    damaged = [json.loads(line) for line in file.read_text().splitlines()]
    for node in (damaged[0], damaged[0]["steps"][0], damaged[1]["task"]):
        node[generator.choice(list(node))] = generator.choice(ODD)
    append_lines(folder / "rollouts", 1, "\n".join(json.dumps(line) for line in damaged).encode())
    file.unlink()
