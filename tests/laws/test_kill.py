"""Runs killed at random moments and resumed are the runs that nobody killed: weights, metrics and
rollouts, bit for bit.

A run is a fork of this process, which has torch and Lightning imported already. Inside it,
functions that generation, reward, update and save pass through are counted; at a drawn count the
process kills itself with SIGKILL, so nothing of it can clean up.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pandas
import pytest
import torch

pytestmark = pytest.mark.slow

TINY = [
    "debug=fast",
    "trainer.accelerator=cpu",
    "task.max_samples=32",
    "trainer.steps=4",
    "batch.group_size=4",
    "optimizer.lr=3e-3",
    "generation.max_new_tokens=12",
    "evaluation.n=1",
    "evaluation.every=3",
    "callbacks.checkpoint.every=2",
    "callbacks.checkpoint.model=false",
    "logger=none",
]
DRAWS = [
    "reward=numeric",
    "reward.terms.numeric.fn._target_=drawing_reward.draws",
]  # from every generator that a user may use
CASES = {
    "grpo": [*DRAWS],
    "ppo": ["algorithm=ppo", "reference=ema", "reference.decay=0.5", "kl/coef=adaptive", *DRAWS],
    "dapo": [
        *(
            "algorithm=dapo",
            "kl=none",
            "algorithm.max_refills=2",
            "callbacks.checkpoint.best=reward/mean",
        ),
        *(
            "reward=numeric",
            "reward.terms.numeric.fn._target_=drawing_reward.uneven",
        ),  # equal in some groups, which are refilled
    ],
    "rows that give way": [
        # the cache has room for one context of the whole length, and these are 128 rows
        "generation.engine.max_cached_tokens=64",
        "generation.max_new_tokens=64",
        "batch.prompts=8",
        "batch.group_size=16",
        *DRAWS,
    ],
    "lag": ["asynchrony=lag", "asynchrony.staleness=2", *DRAWS],
    "lag and refills": [
        *(
            "asynchrony=lag",
            "asynchrony.staleness=1",
            "algorithm=dapo",
            "kl=none",
            "algorithm.max_refills=2",
        ),
        *("reward=numeric", "reward.terms.numeric.fn._target_=drawing_reward.uneven"),
    ],
    "reuse": [
        *("task/reuse=replay", "task.reuse.staleness=4", "batch.prompts=4"),
        *("reward=numeric", "reward.terms.numeric.fn._target_=drawing_reward.uneven"),
    ],
    "prioritised problems": ["task/sampler=prioritised", *DRAWS],
    "variance of problems": ["task/sampler=variance", *DRAWS],
    "a teacher that moves": [
        *("algorithm=opd", "teacher=ema", "teacher.decay=0.5", *DRAWS),
        "+algorithm.streams.reward={_target_: rlkit.algorithm.Stream, coef: 1.0}",
    ],
    "what tools answered": ["algorithm=echo", *DRAWS],
    "phases": [
        "schedule=reinforce_to_ppo",
        "schedule.phases.explore.until=2",
        "kl=k3",
        "reference=ema",
        *DRAWS,
    ],
}
REWARD = """
import random
import numpy
import torch

def draws(r):
    drawn = random.random() + numpy.random.rand() + float(torch.rand(())) + random.gauss(0, 1)
    return len(r.final_content) % 7 + 0.1 * drawn

def uneven(r):
    return float(sum(r.steps[-1].response_ids) % 4 == 0)
"""
MOMENTS = {  # kind of moment → functions that are in the middle of it
    "generate": ["rlkit.episodes.replies.read_reply"],
    "reward": ["rlkit.rewards.checks._check_value"],
    "update": [
        "rlkit.training.update.minibatch.surrogate",
        "rlkit.training.update.optimizers.Optimizers.step",
        "rlkit.training.reference_states.ReferenceStates.move",
    ],
    "save": [
        "os.fsync",
        "os.replace",
        "rlkit.system.rows.replace_nonfinite",
        "torch.save",
        "rlkit.training.callbacks.conversations.append_step",
    ],
}


def arm(kind: str, step: int, later: int) -> None:
    """Makes this process kill itself when the module stands at `step` and functions of the kind
    were called `later` times since."""
    from rlkit.training.callbacks import stopping
    from rlkit.training.module import RLModule

    modules: list[RLModule] = []
    left = [later]

    def count() -> None:
        if modules and modules[0].rl_step >= step:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def counted(function, name):
        def wrapper(*args, **kwargs):
            count()
            if name == "torch.save" and modules:  # half of a file is there
                args[1].file.write(b"PK")
                count()
                args[1].file.seek(0)
            result = function(*args, **kwargs)
            count()
            return result

        return wrapper

    for name in MOMENTS[kind]:
        path, _, attribute = name.rpartition(".")
        owner = resolve(path)
        setattr(owner, attribute, counted(getattr(owner, attribute), name))
    started = stopping.StopOnSignal.on_train_start

    def start(self, trainer, module):
        started(self, trainer, module)
        modules.append(module)

    stopping.StopOnSignal.on_train_start = start


def resolve(path: str):
    import importlib

    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        owner, _, name = path.rpartition(".")
        return getattr(resolve(owner), name)


KINDS = list(MOMENTS)


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_killed_again_and_again_ends_as_if_nothing_had_happened(
    tmp_path, monkeypatch, forked, same, timeless, case
):
    """Twice, in two kinds of moment; the next case has the next two. The first case has all, and
    one of them once more."""
    (tmp_path / "drawing_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    whole, killed, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log.txt"

    def run(words, *moment):
        child = forked(words, log, (lambda: arm(*moment)) if moment else None)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    words = ["train", *TINY, *CASES[case]]
    assert run([*words, f"hydra.run.dir={whole}"]) == 0, log.read_text()[-3000:]
    draw = random.Random(f"kill {case}")
    number = list(CASES).index(case)
    kinds = [KINDS[(2 * number + i) % len(KINDS)] for i in range(2 if number else 5)]
    draw.shuffle(kinds)
    for step, kind in zip(sorted(draw.choices(range(4), k=len(kinds))), kinds, strict=True):
        moment = (kind, step, draw.randrange(8))
        start = [f"resume={killed}"] if killed.exists() else [*words[1:], f"hydra.run.dir={killed}"]
        assert run(["train", *start], *moment) == -signal.SIGKILL, (moment, log.read_text()[-3000:])
    assert run(["train", f"resume={killed}"]) == 0, log.read_text()[-3000:]
    assert_equal_runs(whole, killed, same, timeless)


SHORT = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
REAL = [
    "model.lora.rank=4",
    "trainer.accelerator=cpu",
    "environment=single_turn",
    "task=jsonl",
    "task.path=rows.jsonl",
    "task.held_out=0",
    "task.validation=0",
    "model.chat_template=short.jinja",
    "batch.prompts=2",
    "batch.group_size=2",
    "algorithm.minibatches=1",
    "kl=none",
    "reference=none",
    "trainer.steps=2",
    "optimizer.lr=1e-3",
    "generation.max_new_tokens=4",
    "evaluation.n=0",
    "callbacks.checkpoint.every=1",
    "callbacks.checkpoint.model=false",
    "logger=none",
    *DRAWS,
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_of_adapters_on_smollm2_that_is_killed_ends_as_if_nothing_had_happened(
    tmp_path, monkeypatch, forked, same, timeless, smollm2, dtype
):
    """The frozen base is not in the checkpoint, and in bfloat16 the adapters have another type.
    Prompts of a few tokens, since a processor without bfloat16 takes a second for fifty."""
    rows = [json.dumps({"prompt": f"{i} + {i}?", "answer": str(2 * i)}) for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "short.jinja").write_text(SHORT)
    (tmp_path / "drawing_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    whole, killed, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log.txt"

    def run(words, *moment):
        child = forked(["train", *words], log, (lambda: arm(*moment)) if moment else None)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    words = [f"model={smollm2}", *REAL, f"model.dtype={dtype}"]
    assert run([*words, f"hydra.run.dir={whole}"]) == 0, log.read_text()[-3000:]
    # in the update of the second step, when the first one has been saved
    assert run([*words, f"hydra.run.dir={killed}"], "update", 1, 0) == -signal.SIGKILL
    assert not (killed / "checkpoints" / "step_000002.ckpt").exists()
    assert run([f"resume={killed}"]) == 0, log.read_text()[-3000:]
    assert_equal_runs(whole, killed, same, timeless, steps=(1, 2))


def assert_equal_runs(a: Path, b: Path, same, timeless, steps=(2, 4)) -> None:
    """Everything but wall-clock figures, `steps` being those of the last two checkpoints."""
    before, last = (f"step_{step:06d}.ckpt" for step in steps)
    x, y = (torch.load(f / "checkpoints" / last, weights_only=True) for f in (a, b))
    first, second = rows(a), rows(b)
    assert [r["step"] for r in first if "reward/mean" in r] == [*range(1, steps[-1] + 1)]
    assert [list(r) for r in first] == [list(r) for r in second]
    for r, s in zip(first, second, strict=True):
        assert {k: (r[k], s[k]) for k in r if r[k] != s[k]} == {}
    assert not same(
        x["state_dict"],
        torch.load(a / "checkpoints" / before, weights_only=True)["state_dict"],
    )
    assert same(x["state_dict"], y["state_dict"]) and same(
        x["optimizer_states"], y["optimizer_states"]
    )
    assert same(x["rlkit"], y["rlkit"])
    assert [p.name for p in sorted((a / "checkpoints").iterdir())] == [
        p.name for p in sorted((b / "checkpoints").iterdir())
    ]
    assert pandas.read_parquet(a / "completions").equals(pandas.read_parquet(b / "completions"))
    for folder in ("rollouts", "samples"):
        names = sorted(p.name for p in (a / folder).iterdir())
        assert names == sorted(p.name for p in (b / folder).iterdir() if p.suffix != ".tmp")
        for name in names:
            read = timeless if name.endswith(".gz") else Path.read_text
            assert read(a / folder / name) == read(b / folder / name), f"{folder}/{name}"


def rows(folder: Path) -> list[dict]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in found]
