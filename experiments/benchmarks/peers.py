"""Compare one GRPO step of rlkit with one of TRL: seconds, tokens per second, memory, learning.

    bash experiments/benchmarks/peers_env.sh /tmp/peers
    python experiments/benchmarks/peers.py --python /tmp/peers/bin/python
    python experiments/benchmarks/peers.py --python /tmp/peers/bin/python --curve
    python experiments/benchmarks/peers.py --python /tmp/peers/bin/python --settings --threads 1 \
        --rounds 1

Both sides have the same prompts in the same order, and the same model, group size, reward, loss
(grpo: sequence means, group standard deviation) and number of threads. They make one update per
step by AdamW at a constant rate, in float32 on a CPU and with bfloat16 autocast on a GPU. There are
no checkpoints of activations or models and no evaluation. An update is one micro-batch. With
--micro-batches TRL splits it by rows, and rlkit by tokens into about as many.

The model is the embedded one or random weights of another size. Only the embedded model solves
problems. Replies of the others get 0 or 1 by their text, so that every group has a signal. --lora
trains adapters of this rank on all projections.

`--settings` compares both on SmolLM2-135M (after `rlkit get smollm2_135m`), in the settings with
these names in SETTINGS. rlkit then takes its micro-batches from the model's suggestions, and TRL's
have the numbers of rows in TRL_ROWS. `processor_s` are the seconds of the process's processors: on
one thread they are the seconds of a step without those of other processes.

Each measurement is its own process, and the sides alternate. `forced` replies never end, so that
both sides sample exactly the same number of tokens; `natural` replies end by themselves. A step's
seconds run from the end of a step to the end of the next, and contain everything a framework does
in between. TRL samples by its transformers backend, or with --vllm by vLLM in its own process
(colocate). rlkit samples by its default engine.

peers.csv, or peers_MODEL.csv for another model, has a row for each side, length and beta;
peers_smollm2.csv has one for each side, setting and number of rows. Peak memory is the most
resident memory; `above_import_mib` is the peak without the memory in use before the model was
loaded. On a GPU both are figures of torch's allocator. peers_curve.csv (--curve) has the accuracy
on each step's own samples for each seed, and the greedy accuracy on held-out problems at the end.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import bench

TARGETS = {"seconds": 1 / 3, "memory": 1 / 2}
HELD_OUT = 256
SIZES = ("lora", "prompts", "group", "tokens", "steps")
SETTINGS: dict[str, dict[str, Any]] = {
    "4x8x64": {"tasks": "stories", "prompts": 4, "group": 8, "tokens": 64, "lora": 16},
    "2x8x32": {"tasks": "stories", "prompts": 2, "group": 8, "tokens": 32, "lora": 16},
    "8x8x3": {"tasks": "pairs", "prompts": 8, "group": 8, "tokens": 3, "lora": 16},
    # Groups of two are the smallest with advantages: of 114 tokens of a row 50 are shared by two.
    "16x2x64": {"tasks": "pairs", "prompts": 16, "group": 2, "tokens": 64, "lora": 16},
    "4x8x64_all_weights": {"tasks": "stories", "prompts": 4, "group": 8, "tokens": 64, "lora": 0},
}
# Rows of TRL's micro-batches; 16 in the other settings.
TRL_ROWS = {"4x8x64": (8, 16, 32), "2x8x32": (8, 16), "8x8x3": (16, 64)}


# -------------------------------------------------------------------------------- in both processes


def write_problems(given: dict[str, Any]) -> str:
    """Write the rows of a setting to the current folder, and return the file's path."""
    import check_forecast

    rows = {"stories": check_forecast.stories, "pairs": check_forecast.pairs}[given["tasks"]](400)
    path = Path.cwd() / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def problems(given: dict[str, Any]) -> list[Any]:
    """Return the tasks of the run, in the order of rlkit's stream."""
    from rlkit.episodes.stream import StreamState, take
    from rlkit.tasks import arithmetic, jsonl

    own = given["tasks"] != "arithmetic"
    fields = {"prompt": "prompt", "answer": "answer"}
    return take(
        jsonl(path=write_problems(given), split="train", seed=0, fields=fields)
        if own
        else arithmetic(split="train"),
        StreamState(epoch=0, position=0),
        given["prompts"] * given["steps"],
        seed=given["seed"],
    )[0]


def tokenizer_of(given: dict[str, Any]) -> Any:
    """Return the model's own tokenizer."""
    from rlkit.models import pretrained_tokenizer

    return pretrained_tokenizer(given["model"])


def longest_prompt(given: dict[str, Any]) -> int:
    """Return the number of tokens of the run's longest prompt."""
    from rlkit.models import encode_prompt, make_renderer

    renderer = make_renderer(tokenizer_of(given))
    return max(len(encode_prompt(renderer, task.messages)) for task in problems(given))


def greedy_accuracy(model: Any) -> float:
    """Return the model's present greedy accuracy on held-out problems; both sides use this code."""
    from served import completions

    from rlkit.models import decode, encode_prompt, make_policy, pretrained_tokenizer
    from rlkit.tasks import arithmetic

    policy = make_policy(model, pretrained_tokenizer("tiny"))
    tasks = arithmetic(split="test", max_samples=HELD_OUT)
    contexts = [encode_prompt(policy.renderer, task.messages) for task in tasks]
    replies = completions(
        "cached", policy, contexts, [0] * len(tasks), max_new_tokens=96, temperature=0.0
    )
    texts = [decode(policy.renderer, reply.token_ids) for reply in replies]
    return statistics.fmean(
        bench.solved_text(text, task.answer) for text, task in zip(texts, tasks, strict=True)
    )


def baseline(given: dict[str, Any]) -> float:
    """Return the MiB in use before the model is loaded, and restart the count of peak memory."""
    import torch

    torch.set_num_threads(given["threads"])
    if given["device"] == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return 0.0
    return bench.forget_peak()


def peak(given: dict[str, Any]) -> float:
    """Return the peak memory in MiB since `baseline`."""
    import torch

    return (
        torch.cuda.max_memory_allocated() / 2**20
        if given["device"] == "cuda"
        else bench.memory("VmHWM")
    )


def run_rlkit(given: dict[str, Any]) -> dict[str, Any]:
    """Run `rlkit train` as a user does."""
    import datasets  # noqa: F401  (in TRL's baseline too)
    import peft  # noqa: F401

    import rlkit.training.module  # noqa: F401

    before = baseline(given)
    rows = given["prompts"] * given["group"] // given["micro_batches"]
    reward = "solved" if given["model"] == "tiny" else "spread"
    room = rows * (longest_prompt(given) + given["tokens"])
    model = (
        [f"model.path={given['model']}", f"trainer.micro_batch_tokens={room}"]
        if given["tasks"] == "arithmetic"
        else ["model=smollm2_135m", "task=jsonl", f"task.path={write_problems(given)}"]
    )
    overrides = [
        *model,
        *(["model._target_=bench.endless"] if given["lengths"] == "forced" else []),
        "environment=single_turn",
        "reward=numeric",
        f"reward.terms.numeric.fn._target_=bench.{reward}",
        f"batch.prompts={given['prompts']}",
        f"batch.group_size={given['group']}",
        f"generation.max_new_tokens={given['tokens']}",
        "algorithm.minibatches=1",
        *([f"kl.coef={given['beta']}"] if given["beta"] else ["kl=none", "reference=none"]),
        f"optimizer.lr={given['lr']}",
        f"seed={given['seed']}",
        f"trainer.steps={given['steps']}",
        f"trainer.threads={given['threads']}",
        f"trainer.accelerator={'gpu' if given['device'] == 'cuda' else 'cpu'}",
        f"model.lora.rank={given['lora']}",
    ]
    seconds, metrics = bench.steps_of(overrides, Path.cwd() / "run")
    return {
        "seconds": seconds,
        "processor": bench.differences(bench.MARKS["worked"]),
        "tokens": [row["perf/tokens_per_s"] * row["perf/step_s"] for row in metrics],
        "sampled": [row["tokens/sampled"] for row in metrics],
        "updates": [
            row["optim/updates"] for row in metrics
        ],  # rlkit makes no update if no group has a signal
        "reward": [row["reward/mean"] for row in metrics],
        "parts": {
            name: statistics.median(row[f"perf/{name}_s"] for row in metrics[1:])
            for name in ("generate", "update")
        },
        "before": before,
        "peak": peak(given),
        "held_out": greedy_accuracy(bench.MARKS["policy"].model) if given["held_out"] else None,
    }


def make_trl_config(**own: Any) -> Any:
    """Return TRL's config with the settings that rlkit has by default, changed by `own`."""
    from trl import GRPOConfig

    common = {
        "model_init_kwargs": {"dtype": "float32"},
        "shuffle_dataset": False,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "loss_type": "grpo",
        "scale_rewards": "group",
        "epsilon": 0.2,
        "num_iterations": 1,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    return GRPOConfig(**(common | own))


def run_trl(given: dict[str, Any]) -> dict[str, Any]:
    """Run TRL's GRPOTrainer with the same settings."""
    import time

    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    from rlkit.models.load import TINY

    before = baseline(given)
    sampling: dict[str, Any] = {}
    if given["vllm"]:
        sampling = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
        sampling["generation_kwargs"] = (
            {"ignore_eos": True} if given["lengths"] == "forced" else None
        )
    tasks = problems(given)
    data = Dataset.from_list(
        [{"prompt": [dict(m) for m in task.messages], "answer": task.answer} for task in tasks]
    )
    rows = given["prompts"] * given["group"]
    config = make_trl_config(
        output_dir=str(Path.cwd() / "run"),
        per_device_train_batch_size=rows // given["micro_batches"],
        gradient_accumulation_steps=given["micro_batches"],
        num_generations=given["group"],
        max_completion_length=given["tokens"],
        max_steps=given["steps"],
        beta=given["beta"],
        learning_rate=given["lr"],
        bf16=given["device"] == "cuda",
        use_cpu=given["device"] == "cpu",
        seed=given["seed"],
        **sampling,
    )

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        score = bench.solved_text if given["model"] == "tiny" else bench.spread_text
        return [
            score(said[-1]["content"], truth)
            for said, truth in zip(completions, answer, strict=True)
        ]

    ends: list[float] = []
    worked: list[float] = []

    def note() -> None:
        ends.append(time.perf_counter())
        worked.append(time.process_time())

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            note()

        def on_log(self, *_: Any, **__: Any) -> None:  # after each step's metrics are logged
            note()

    trainer = GRPOTrainer(
        model=str(TINY) if given["model"] == "tiny" else given["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=tokenizer_of(given),
        peft_config=adapters(given["lora"]),
        callbacks=[Clock()],
    )
    if given["lengths"] == "forced":
        trainer.eos_token_ids = list(bench.NEVER)
        if not given["vllm"]:
            trainer.generation_config.eos_token_id = trainer.generation_kwargs["eos_token_id"] = (
                list(bench.NEVER)
            )
    trainer.train()
    history = [row for row in trainer.state.log_history if "reward" in row]
    totals = [0.0, *(row["num_tokens"] for row in history)]
    seconds = bench.differences(ends)[: given["steps"]]
    assert len(seconds) == len(history) == given["steps"], (len(seconds), len(history))
    return {
        "seconds": seconds,
        "processor": bench.differences(worked)[: given["steps"]],
        "tokens": [b - a for a, b in itertools.pairwise(totals)],
        "sampled": [rows * row["completions/mean_length"] for row in history],
        "updates": [1] * len(history),
        "reward": [row["reward"] for row in history],
        "before": before,
        "peak": peak(given),
        "held_out": (
            greedy_accuracy(trainer.accelerator.unwrap_model(trainer.model))
            if given["held_out"]
            else None
        ),
    }


def adapters(rank: int) -> Any:
    """Return rlkit's adapters as TRL's config, None for rank 0."""
    from peft import LoraConfig

    from rlkit.models import LoRA

    own = LoRA(rank=rank)
    return LoraConfig(r=rank, lora_alpha=own.alpha, target_modules=[*own.targets]) if rank else None


# ------------------------------------------------------------------------------------ in the parent


def measure(python: str, side: str, given: dict[str, Any]) -> dict[str, Any]:
    """Run one side once, in its own process and an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        return bench.child(
            [python, __file__, "--side", side, json.dumps(given)],
            threads=given["threads"],
            cwd=Path(folder),
        )


def compare(given: dict[str, Any], python: str, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each side.

    A round's figure is the median over its steps without the first. A side's figure is the median
    over its rounds.
    """
    runs: dict[str, list[dict[str, Any]]] = {"rlkit": [], "trl": []}
    for number in range(rounds):
        for side in sorted(runs, reverse=bool(number % 2)):  # the sides take turns to go first
            runs[side].append(measure(python, side, given))
    steps = {
        side: [statistics.median(run["seconds"][1:]) for run in own] for side, own in runs.items()
    }
    above = {
        side: statistics.median(run["peak"] - run["before"] for run in own)
        for side, own in runs.items()
    }
    most = {side: statistics.median(run["peak"] for run in own) for side, own in runs.items()}
    worked = {
        side: [statistics.median(run["processor"][1:]) for run in own] for side, own in runs.items()
    }
    pairs, works = (
        [ours / theirs for ours, theirs in zip(own["rlkit"], own["trl"], strict=True)]
        for own in (steps, worked)
    )
    rows = []
    for side, own in runs.items():
        seconds = statistics.median(steps[side])
        rows.append(
            {
                "side": side,
                "lengths": given["lengths"],
                "beta": given["beta"],
                "micro_batches": given["micro_batches"],
                "seconds_per_step": round(seconds, 3),
                "slowest_round": round(max(steps[side]), 3),
                "tokens_per_second": round(
                    statistics.median(t for run in own for t in run["tokens"][1:]) / seconds
                ),
                "sampled_per_step": round(
                    statistics.median(t for run in own for t in run["sampled"][1:])
                ),
                "updates_per_step": round(
                    statistics.fmean(n for run in own for n in run["updates"][1:]), 2
                ),
                "peak_mib": round(most[side]),
                "above_import_mib": round(above[side]),
                "processor_s": round(statistics.median(worked[side]), 3),
                "time_of_trl": round(statistics.median(pairs), 3) if side == "rlkit" else 1.0,
                "processor_of_trl": round(statistics.median(works), 3) if side == "rlkit" else 1.0,
                "memory_of_trl": (
                    round(above["rlkit"] / above["trl"], 3) if side == "rlkit" else 1.0
                ),
                "peak_of_trl": round(most["rlkit"] / most["trl"], 3) if side == "rlkit" else 1.0,
                **{
                    f"{part}_s": round(statistics.median(run["parts"][part] for run in own), 3)
                    for part in own[0].get("parts", ())
                },
            }
        )
    return rows


def compare_setting(name: str, given: dict[str, Any], options: Any) -> list[dict[str, Any]]:
    """Return two rows of a setting on SmolLM2 for each number of rows in TRL's micro-batches."""
    from rlkit.models.load import find_fetched_folder

    setting = given | SETTINGS[name]
    setting |= {
        "model": str(find_fetched_folder("smollm2_135m")),
        "lengths": "forced",
        "beta": 0.0,
        "steps": options.steps,
    }
    rows = []
    for size in TRL_ROWS.get(name, (16,)):
        case = setting | {"micro_batches": setting["prompts"] * setting["group"] // size}
        own = {"setting": name, "trl_rows": size, "rounds": options.rounds}
        own |= {key: case[key] for key in SIZES}
        rows += [own | row for row in compare(case, options.python, options.rounds)]
    return rows


def curves(given: dict[str, Any], python: str, seeds: list[int]) -> list[dict[str, Any]]:
    """Return a row for each side, seed and step.

    The last step of a run also has the accuracy on held-out problems.
    """
    rows = []
    for seed in seeds:
        for side in ("rlkit", "trl"):
            run = measure(python, side, given | {"seed": seed, "held_out": True})
            for step, accuracy in enumerate(run["reward"], 1):
                last = step == given["steps"]
                rows.append(
                    {"side": side, "seed": seed, "step": step, "accuracy": round(accuracy, 4)}
                    | ({"held_out": round(run["held_out"], 4)} if last else {"held_out": ""})
                )
    for side in ("rlkit", "trl"):
        ends = [row["held_out"] for row in rows if row["side"] == side and row["held_out"] != ""]
        means = [
            statistics.fmean(
                row["accuracy"] for row in rows if (row["side"], row["step"]) == (side, s)
            )
            for s in range(1, given["steps"] + 1)
        ]
        print(
            f"{side}: accuracy by step {' '.join(f'{m:.2f}' for m in means)}, held out"
            f" {' '.join(f'{e:.3f}' for e in ends)}"
        )
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        bench.answer({"rlkit": run_rlkit, "trl": run_trl}[sys.argv[2]](json.loads(sys.argv[3])))
        return
    parser = bench.parser(__doc__, rounds=3)
    parser.add_argument(
        "--python",
        default=os.environ.get("PEERS_PYTHON"),
        help="of the environment that peers_env.sh made",
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--model",
        choices=(*bench.SIZES, "0.6b-shape"),
        default="0.9",
        help="millions of parameters, random but for 0.9; or a shape's name",
    )
    parser.add_argument(
        "--settings", nargs="*", choices=SETTINGS, help="on SmolLM2-135M; all without a name"
    )
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0: all weights")
    parser.add_argument(
        "--vllm",
        action="store_true",
        help="TRL samples with vLLM in its own process (colocate); on a GPU",
    )
    parser.add_argument(
        "--steps", type=int, default=4, help="of a process; the first is not counted"
    )
    parser.add_argument("--beta", type=float, nargs="+", default=[0.0, 0.04])
    parser.add_argument("--lengths", nargs="+", choices=("forced", "natural"), default=["forced"])
    parser.add_argument(
        "--curve",
        action="store_true",
        help="learning curves of three seeds in place of the timings",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    if not options.python:
        parser.error(
            "--python: the interpreter with TRL; make it with experiments/benchmarks/peers_env.sh"
        )
    if options.quick:
        options.beta, options.seeds = [0.0], [0]
        options.rounds, options.prompts, options.group, options.tokens, options.steps = (
            1,
            2,
            2,
            8,
            2,
        )
    if options.curve:
        options.steps = max(options.steps, 2 if options.quick else 12)
    need_peers(options.python)
    given = {
        name: getattr(options, name)
        for name in ("prompts", "group", "tokens", "steps", "threads", "device", "vllm", "lora")
    }
    given |= {"lr": 3e-4, "seed": 0, "held_out": False}
    last = bench.provenance(options.threads, options.device) | {
        "trl": peer_version(options.python),
        "vllm": options.vllm,
    }
    if options.settings is not None:
        for name in options.settings or SETTINGS:
            rows = [row | last for row in compare_setting(name, given, options)]
            bench.write(options.out, "peers_smollm2", rows, by=("setting",))
        return
    sizes = {"model": options.model} | {name: given[name] for name in SIZES}
    with tempfile.TemporaryDirectory() as folder:
        given |= {
            "model": bench.model_folder(options.model, Path(folder)),
            "tasks": "arithmetic",
            "micro_batches": options.micro_batches[0],
        }
        if options.curve:
            rows = curves(
                given | {"lengths": "natural", "beta": options.beta[0]},
                options.python,
                options.seeds,
            )
            bench.write(
                options.out,
                "peers_curve",
                [row | {"beta": options.beta[0]} | sizes | last for row in rows],
            )
            return
        cases = itertools.product(options.lengths, options.beta, options.micro_batches)
        asked = [
            {"lengths": lengths, "beta": beta, "micro_batches": parts}
            for lengths, beta, parts in cases
        ]
        rows = [
            row for case in asked for row in compare(given | case, options.python, options.rounds)
        ]
    table = "peers" if options.model == "0.9" else f"peers_{options.model}"
    bench.write(
        options.out, table, [row | sizes | {"rounds": options.rounds} | last for row in rows]
    )
    print(
        f"goal: at most {TARGETS['seconds']:.2f} of TRL's time and {TARGETS['memory']:.2f} of its"
        " memory"
    )


def need_peers(python: str, package: str = "trl") -> None:
    """Exit with an instruction if the interpreter does not exist or lacks the peer."""
    made = {
        "trl": "bash experiments/benchmarks/peers_env.sh FOLDER",
        "vllm": "bash tests/extras/vllm/vllm_env.sh FOLDER",
    }[package]
    if shutil.which(python) is None:
        sys.exit(
            f"{python}: there is no such interpreter; make one with `{made}` and name"
            " FOLDER/bin/python"
        )
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{package}') is None)"
    if subprocess.run([python, "-c", look], capture_output=True).returncode:
        sys.exit(
            f"{python} has no {package}; make an environment with `{made}` and name"
            " FOLDER/bin/python"
        )


def peer_version(python: str) -> str:
    """Return the version of TRL in its environment."""
    return bench.child(
        [python, "-c", "import bench; bench.answer(bench.installed('trl'))"], threads=1
    )


if __name__ == "__main__":
    main()
