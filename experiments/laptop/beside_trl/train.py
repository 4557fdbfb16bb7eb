"""Train the skill `digits` with TRL from the same start, on the same prompts and budget as rlkit.

    bash experiments/benchmarks/peers_env.sh /tmp/peers
    /tmp/peers/bin/python experiments/laptop/beside_trl/train.py [--seeds 0 1 2 3 4] [--steps 10]
    python experiments/study.py experiments/laptop/beside_trl --jobs 1

Both sides make 10 steps of 8 prompts with 8 replies of at most 8 tokens. They have adapters of rank
16, two updates a step, GRPO's loss without a KL, and AdamW at 3e-4, which falls linearly to a
tenth. The prompts are those of rlkit's run with this seed, in their order. TRL samples with
transformers, in micro-batches of 16 rows. Each side has one thread. The adapters of TRL are scored
by `rlkit evaluate`: greedily, on the 128 test problems of rlkit's own runs.

trl.csv has a row for each seed. Its `training_seconds` and `training_cpu_seconds` are those of
`trainer.train()`, without loading and evaluation. In rlkit's results.csv the column
`training_cpu_seconds` has the evaluations; the row `rlkit, one problem` evaluates one problem only,
so this row has the cost to compare. Seeds with a row are not repeated.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "experiments" / "benchmarks")]

PROMPTS = 8
GROUP = 8
ROWS = 16  # of a micro-batch; two make one of the step's two updates
RATE = 3e-4


def train(seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """Train one seed, and save its adapters in `folder`. Return the reward of each step, and the
    seconds of the clock and of the processor for all steps."""
    import torch
    from datasets import Dataset
    from peers import adapters, make_trl_config
    from trl import GRPOTrainer

    from rlkit.episodes.stream import StreamState, take
    from rlkit.extras.pretrained import digits
    from rlkit.models import pretrained_tokenizer
    from rlkit.models.load import find_fetched_folder
    from rlkit.rewards import extract_answer

    torch.set_num_threads(1)
    model = str(find_fetched_folder("smollm2_135m"))
    start = StreamState(epoch=0, position=0)
    tasks = take(digits(split="train"), start, PROMPTS * steps, seed=seed)[0]
    data = Dataset.from_list(
        [{"prompt": [dict(m) for m in task.messages], "answer": task.answer} for task in tasks]
    )

    tokenizer = pretrained_tokenizer(model)

    def reward(
        completions: list[Any], answer: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        """rlkit's `numeric`: the answer's number, and 0 for a reply that was cut off."""
        return [
            float(ids[-1] == tokenizer.eos_token_id and extract_answer(said) == int(truth))
            for ids, said, truth in zip(
                completion_ids, (one[-1]["content"] for one in completions), answer, strict=True
            )
        ]

    config = make_trl_config(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_generations=GROUP,
        max_completion_length=8,
        max_steps=2 * steps,
        learning_rate=RATE,
        seed=seed,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=adapters(16),
    )
    trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.99), weight_decay=0.0)
    # rlkit's rate holds for a step: at step s of n it is 1 - 0.9 s / n of the first one.
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: 1 - 0.9 * (update // 2) / steps
    )
    trainer.optimizer, trainer.lr_scheduler = optimizer, scheduler
    begun, worked = time.perf_counter(), time.process_time()
    trainer.train()
    spent = time.perf_counter() - begun, time.process_time() - worked
    trainer.save_model(str(folder / "adapters"))
    history = [row for row in trainer.state.log_history if "reward" in row]
    return {"rewards": [round(row["reward"], 4) for row in history], "spent": spent}


def evaluate(adapters: Path, folder: Path) -> dict[str, Any]:
    """Return the greedy accuracy on the test problems, as `rlkit evaluate` measures it."""
    words = ["experiment=laptop", f"model.path={adapters}", "model.lora.rank=0"]
    few = ["evaluation.samples=1", "evaluation.k=[1]", "trainer.threads=1"]
    subprocess.run(
        [sys.executable, "-m", "rlkit", "evaluate", *words, *few],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
    )
    (result,) = folder.glob("outputs/**/result.json")
    return json.loads(result.read_text())["greedy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=HERE / "trl.csv")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    rows = list(csv.DictReader(given.out.open())) if given.out.exists() else []
    done = {int(row["seed"]) for row in rows}
    for seed in given.seeds:
        if seed in done:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            found = train(seed, given.steps, folder)
            greedy = evaluate(folder / "adapters", folder)
        rows.append(row_of(seed, given.steps, found, greedy))
        with given.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        print(rows[-1], flush=True)


def row_of(seed: int, steps: int, found: dict[str, Any], greedy: dict[str, Any]) -> dict[str, str]:
    from importlib.metadata import version

    low, high = greedy["interval"]
    seconds, worked = found["spent"]
    row = {
        "variant": "TRL",
        "seed": seed,
        "final": greedy["accuracy"],
        "final_low": round(low, 4),
        "final_high": round(high, 4),
        "problems": greedy["n"],
        "steps": steps,
        "training_seconds": round(seconds, 1),
        "training_cpu_seconds": round(worked, 1),
        "rewards": " ".join(map(str, found["rewards"])),
        "date": date.today().isoformat(),
        **{name: version(name) for name in ("torch", "transformers", "trl")},
    }
    return {key: str(value) for key, value in row.items()}


if __name__ == "__main__":
    main()
