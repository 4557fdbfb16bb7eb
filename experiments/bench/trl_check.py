"""Does TRL's GRPO reach the same scores as rlkit's? Two tasks, ten seeds, the same settings.

    bash experiments/benchmarks/peers_env.sh FOLDER
    python experiments/bench/trl_check.py --python FOLDER/bin/python [--tasks scales needle]

rlkit's rows are those of GRPO on scales in matrix/results.csv, and of GRPO without a KL on needle
in results.csv. TRL samples with other random numbers, and splits a step's replies into its two
updates by reply, not by group. Runs of a seed therefore share their start and their problems, and
nothing else. TRL's score is exact: the probability of the right replies under the trained model.
trl.csv has a row for each run, and the printed table has the differences within seeds.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROWS = HERE / "trl.csv"
sys.path.append(str(HERE.parent / "benchmarks"))


class Own(NamedTuple):
    """rlkit's rows of a task, and the overrides of its arm beside algorithm=grpo."""

    rows: Path
    arm: str
    overrides: tuple[str, ...]
    seeds: range


OWN = {
    "scales": Own(HERE / "matrix" / "results.csv", "grpo", (), range(10)),
    "needle": Own(
        HERE / "results.csv",
        "grpo, no KL to the start",
        ("kl=none", "reference=none"),
        range(80, 90),
    ),
}


def trained(task: str, seed: int) -> dict[str, Any]:
    """Train one run of TRL. Return its mean probability of a right reply, and the regret."""
    from datasets import Dataset
    from peers import make_trl_config
    from trl import GRPOTrainer

    from rlkit.config.experiment import experiment
    from rlkit.config.problems.rows import load_tasks
    from rlkit.extras.bench.tasks import average_value

    x = experiment(
        f"experiment=bench/{task}", "algorithm=grpo", *OWN[task].overrides, f"seed={seed}"
    )
    policy, tasks, replies = (
        x.model(device="cpu"),
        load_tasks(x),
        x.batch.prompts * x.batch.group_size,
    )
    rows = [
        {
            "prompt": [dict(m) for m in t.messages],
            "right": t.metadata["right"],
            "pay": t.metadata["pay"],
        }
        for t in tasks.train
    ]
    config = make_trl_config(
        output_dir=str(Path.cwd() / "run"),
        model_init_kwargs=None,  # the model is already there
        per_device_train_batch_size=replies // 2,
        gradient_accumulation_steps=1,
        steps_per_generation=2,
        num_generations=x.batch.group_size,
        max_completion_length=x.generation.params["max_new_tokens"],
        max_steps=2 * x.trainer.steps,
        learning_rate=x.optimizer.keywords["lr"],
        logging_strategy="no",
        seed=seed,
    )

    def reward(
        completions: list[Any], right: list[list[str]], pay: list[float], **_: Any
    ) -> list[float]:
        return [
            paid * (said[-1]["content"] in own)
            for said, own, paid in zip(completions, right, pay, strict=True)
        ]

    trainer = GRPOTrainer(
        model=policy.model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=policy.renderer.tokenizer,
    )
    trainer.train()
    test = {t.messages[0]["content"]: t for t in tasks.test}.values()
    chance = fmean(chance_of(policy._replace(model=trainer.model), t) for t in test)
    value = average_value(list(test))
    return {
        "task": task,
        "seed": seed,
        "reward": round(chance, 5),
        "regret": round(value.regret(chance), 5),
    }


def chance_of(policy: Any, task: Any) -> float:
    """Return the probability that a reply sampled at temperature 1 is right."""
    import torch

    from rlkit.models.chat import encode_prompt

    prompt = encode_prompt(policy.renderer, list(task.messages))
    encode = policy.renderer.tokenizer.encode
    ids = torch.tensor(
        [
            prompt + encode(right + "<end>", add_special_tokens=False)
            for right in task.metadata["right"]
        ]
    )
    with torch.no_grad():
        logprobs = policy.model(input_ids=ids).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
    return float(logprobs.gather(2, ids[:, len(prompt) :, None]).sum((1, 2)).exp().sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--python", help="of an environment with TRL")
    parser.add_argument("--tasks", nargs="+", default=list(OWN), choices=list(OWN))
    parser.add_argument(
        "--one", nargs=2, help=argparse.SUPPRESS
    )  # a task and a seed, for the process with TRL
    given = parser.parse_args()
    if given.one:
        print(json.dumps(trained(given.one[0], int(given.one[1]))))
        return
    if not given.python:
        parser.error(
            "--python: name the interpreter of an environment with TRL"
            " (experiments/benchmarks/peers_env.sh makes one)"
        )
    rows = list(csv.DictReader(ROWS.open())) if ROWS.exists() else []
    for task in given.tasks:
        for seed in OWN[task].seeds:
            if any((row["task"], int(row["seed"])) == (task, seed) for row in rows):
                continue
            with tempfile.TemporaryDirectory() as folder:
                command = [given.python, str(Path(__file__).resolve()), "--one", task, str(seed)]
                done = subprocess.run(
                    command,
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
            if done.returncode:
                sys.exit(f"{' '.join(command)}:\n{done.stderr[-3000:]}")
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)
            with ROWS.open("w", newline="") as file:
                writer = csv.DictWriter(file, ["task", "seed", "reward", "regret"])
                writer.writeheader()
                writer.writerows(rows)
    print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of both sides' scores and of the differences within seeds."""
    from rlkit.extras.bench.matrix import markdown
    from rlkit.runs.comparing import compare_pairs

    lines = []
    for task, own in OWN.items():
        ours = {
            int(row["seed"]): 1 - float(row["regret"])
            for row in csv.DictReader(own.rows.open())
            if (row["task"], row["arm"]) == (task, own.arm)
        }
        theirs = {
            int(row["seed"]): 1 - float(row["regret"])
            for row in rows
            if row["task"] == task and int(row["seed"]) in own.seeds
        }
        theirs = {seed: score for seed, score in theirs.items() if seed in ours}
        if not theirs:
            continue
        d = compare_pairs(list(theirs.values()), [ours[seed] for seed in theirs])
        means = [f"{fmean(theirs.values()):.3f}", f"{fmean(ours[seed] for seed in theirs):.3f}"]
        lines.append([task, str(d.n), *means, f"{d.mean:+.3f} ({d.low:+.3f} to {d.high:+.3f})"])
    return markdown(["task", "seeds", "TRL", "rlkit", "rlkit - TRL, 95 %"], lines)


if __name__ == "__main__":
    main()
