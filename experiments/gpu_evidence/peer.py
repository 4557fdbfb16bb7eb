"""Train with TRL beside part f. This module is imported only if TRL is installed."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rows import Report
from weights import Setting

import rlkit
from rlkit.episodes.stream import StreamState, take
from rlkit.rewards import numeric
from rlkit.types import Rollout, Step

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))


def train(setting: Setting, overrides: Sequence[str], seed: int, report: Report) -> None:
    """Train with TRL and report a row for each step.

    Prompts, their order, reward, learning rate and sizes are the experiment's. Loss, sampling and
    optimizer are those of experiments/benchmarks/peers.py.
    """
    from datasets import Dataset
    from peers import make_trl_config
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    x = rlkit.experiment(*overrides, "logger=none")
    tasks = rlkit.load_tasks(x)
    count = x.trainer.steps * x.batch.prompts
    drawn, _ = take(tasks.train, StreamState(), count, seed=seed)
    rows = x.batch.prompts * x.batch.group_size
    micro = max(1, rows // 32)
    config = make_trl_config(
        output_dir=str(setting.out / "runs" / f"trl_{seed}"),
        per_device_train_batch_size=rows // micro,
        gradient_accumulation_steps=micro,
        num_generations=x.batch.group_size,
        max_completion_length=x.generation.max_new_tokens,
        max_steps=x.trainer.steps,
        learning_rate=x.optimizer.keywords["lr"],
        bf16=setting.device == "cuda",
        use_cpu=setting.device == "cpu",
        chat_template_kwargs={"enable_thinking": False},
        seed=seed,
    )

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [
            score(said[-1]["content"], truth)
            for said, truth in zip(completions, answer, strict=True)
        ]

    begun = [time.perf_counter()]

    class Rows(TrainerCallback):
        def on_log(self, _: Any, state: Any, control: Any, logs: Any = None, **__: Any) -> None:
            if logs and "reward" in logs:
                now = time.perf_counter()
                seconds = now - begun[0]
                begun[0] = now
                sampled = rows * logs["completions/mean_length"]
                report(
                    "training",
                    f"step {state.global_step:03}",
                    reward=round(logs["reward"], 4),
                    seconds=round(seconds, 3),
                    sampled=round(sampled),
                )

    GRPOTrainer(
        model=str(x.model.path),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": [dict(m) for m in task.messages], "answer": task.answer} for task in drawn]
        ),
        callbacks=[Rows()],
    ).train()


def score(text: str, answer: str) -> float:
    """Return rlkit's own reward for a reply of one turn."""
    task = rlkit.Task("trl", ({"role": "user", "content": ""},), answer)
    return float(numeric(Rollout(task, (Step((), (), (), (), "stop", content=text),))))
