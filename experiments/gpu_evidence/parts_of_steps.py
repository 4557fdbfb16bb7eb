"""Parts d to f of the evidence: whole RL steps and training runs.

Part d times RL steps at GSM8K's lengths, part e trains the embedded model on two devices, and part
f trains Qwen3-0.6B on GSM8K beside TRL.
"""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ceilings import copy_rate
from inside import Watch, limited_by_seed, watched
from parts_of_passes import Pieces, forget, peak_gb
from rows import Report
from weights import RANK, SHAPES, Setting, card_of

import rlkit
from rlkit.config.compose import compose, experiment
from rlkit.extras.forecast import forecast, measure_load
from rlkit.training.selfcheck import check_policy
from rlkit.training.update.probe import probe_memory
from rlkit.types import Task

# Share of replies → tokens of a reply on GSM8K without thinking. The shares are assumed; the mean
# length is 236 tokens.
REPLY = ((0.0, 40), (0.1, 100), (0.25, 140), (0.5, 200), (0.75, 280), (0.9, 390), (0.97, 600))
REPLY += ((1.0, 1024),)
PROMPT = 350  # tokens of a problem of GSM8K with the schema of the calculator
QUIET = ["logger=none", "evaluation.n=0", "schedule=constant", "callbacks.rollouts.every=0"]


def quantile(share: float, points: Sequence[tuple[float, int]] = REPLY) -> int:
    """Return the length in tokens of the reply at this quantile, by linear interpolation."""
    for (below, low), (above, high) in itertools.pairwise(points):
        if share <= above:
            return round(low + (high - low) * (share - below) / (above - below))
    return points[-1][1]


def reply_limit(seed: int, longest: int) -> int:
    """Return the length of the reply with this seed, scaled to at most `longest` tokens."""
    share = (seed * 0x9E3779B97F4A7C15 % 2**64) / 2**64
    return max(1, round(quantile(share) * longest / REPLY[-1][1]))


def mean_reply(longest: int) -> float:
    """Return the mean of `reply_limit` over all seeds."""
    areas = [(b - a) * (x + y) / 2 for (a, x), (b, y) in itertools.pairwise(REPLY)]
    return sum(areas) * longest / REPLY[-1][1]


# ------------------------------------------------------------------------------- d. whole RL steps


def whole_steps(setting: Setting) -> Pieces:
    """List the pieces of part d: each shape with each number of prompts per step, with adapters."""
    return {
        f"{shape}, {prompts} × {setting.pick(8, 2)}": partial(steps, setting, shape, prompts)
        for prompts in setting.pick((32, 64), (2,))
        for shape in setting.pick(("0.6B", "8B"), ("rehearsed",))
    }


def spread(rollout: Any, /) -> float:
    """Return 1 for every second sample of a prompt, else 0, so that each group has a signal."""
    return float(rollout.sample % 2)


def problems_of(words: int, count: int) -> list[Task]:
    """Return `count` problems with different questions of about `words` words."""
    return [
        Task(f"problem/{i}", ({"role": "user", "content": f"{i} " + "1 " * words},), "0")
        for i in range(count)
    ]


def overrides_of(setting: Setting, shape: str, prompts: int) -> list[str]:
    return [
        *QUIET,
        "model=pretrained",
        "model.path=tiny",
        "model._target_=weights.random_policy",
        f"+model.shape='{shape}'",
        f"model.lora.rank={RANK}",
        "model.gradient_checkpointing=false",
        "environment=single_turn",
        "reward=numeric",
        "reward.terms.numeric.fn._target_=parts_of_steps.spread",
        f"batch.prompts={prompts}",
        f"batch.group_size={setting.pick(8, 2)}",
        f"generation.max_new_tokens={setting.pick(1024, 24)}",
        "optimizer.lr=1e-6",
        f"trainer.accelerator={'gpu' if setting.device == 'cuda' else 'cpu'}",
        f"trainer.micro_batch_tokens={setting.pick(16_384, 512)}",
    ]


def steps(setting: Setting, shape: str, prompts: int, report: Report) -> None:
    """Report whole steps (generation, scoring, update), one row for each step.

    A last row gives the seconds predicted by the roofline model for the same lengths, at the
    measured copy rate.
    """
    forget()
    longest = setting.pick(1024, 24)
    composed = compose(overrides_of(setting, shape, prompts))
    x = experiment(composed)
    tasks = problems_of(setting.pick(PROMPT - 20, 10), 4 * prompts)
    with watched(x.generation.engine) as watch:
        policy, device, exact = ready(x, tasks)
        learner = rlkit.Learner(x, policy, exact=exact)
        with rlkit.autocast(x, device, updates=True):
            probe_memory(learner.record(), tasks)
        report("steps", "after the memory probe", peak_gb=peak_gb(setting.device))
        forget()
        with limited_by_seed(partial(reply_limit, longest=longest)):
            prompt = take_steps(setting, learner, tasks, watch, report)
    share = mean_reply(longest) / longest
    given = {"reply_share": str(share), "prompt_tokens": str(prompt), "turns": "1"}
    load, _ = measure_load(x, composed.config, given)
    expected = forecast(card_of(setting.device, copy_rate(setting.out)), SHAPES[shape], load)
    report("steps", "roofline", **roofline_row(expected))


def take_steps(
    setting: Setting, learner: Any, tasks: Sequence[Task], watch: Watch, report: Report
) -> int:
    """Run whole steps and report a row for each. Return the number of tokens of a prompt."""
    stream = rlkit.StreamState()
    prompt = 0
    x = learner.x
    for step in range(setting.pick(4, 2)):
        first = len(watch.looks)
        begun = time.perf_counter()
        device = next(learner.model.parameters()).device
        with rlkit.autocast(x, device, updates=True):
            sampled, trained, stream = rlkit.experience(
                learner.begin(), learner.policy, tasks, stream, step=step, clock=learner.clock
            )
            row = learner.step(sampled, trained)
        seconds = time.perf_counter() - begun
        prompt = len(sampled[0].steps[0].prompt_ids)
        rounds = sum(look.rounds for look in watch.looks[first:])
        drawn = sum(rollout.response_length for rollout in sampled)
        report(
            "steps",
            f"step {step + 1}",
            step_s=round(seconds, 3),
            **{f"{name}_s": round(row[f"perf/{name}_s"], 3) for name in ("generate", "update")},
            rows_drawing=round(drawn / max(1, rounds), 1),
            host_ms_a_look=round(watch.host_ms(first), 3),
            sampled=drawn,
            captures=watch.captures,
            replays=watch.replays,
            refused=watch.refused,
            mismatch=float(f"{row['mismatch/logp_abs_mean']:.2e}"),
            peak_gb=peak_gb(setting.device),
        )
    return prompt


def roofline_row(expected: Any) -> dict[str, Any]:
    """Return a forecast under the column names of a measured step."""
    parts = expected.seconds
    generate = parts["prefill"] + sum(v for name, v in parts.items() if name.startswith("decode"))
    return {
        "step_s": round(expected.total, 3),
        "generate_s": round(generate, 3),
        "update_s": round(parts["scoring"] + parts["update"], 3),
        "rows_drawing": expected.slots,
        "peak_gb": round(sum(expected.memory.values()) / 1e9, 2),
    }


def ready(x: Any, tasks: Any) -> tuple[Any, Any, bool]:
    """Return the policy on its device, the device, and whether the log-probs agree.

    The policy passes the same checks as before a run.
    """
    from rlkit.system import rng
    from rlkit.system.device import load_on_device

    rng.seed(x.seed)
    policy, device = load_on_device(x)
    with rlkit.autocast(x, device):
        return policy, device, check_policy(policy, tasks, x).exact


# ----------------------------------------------------------------------- e. one curve, two devices


def curves(setting: Setting) -> Pieces:
    """List the pieces of part e: the default run on the CPU and on the card.

    A rehearsal runs both on the CPU. The second of the two then uses kernels that round
    differently.
    """
    first = ["trainer.accelerator=cpu"]
    second = ["trainer.accelerator=gpu", "trainer.precision=32-true"]
    if setting.device == "cpu":
        second = [*first, "generation.kernel=eager", "model.kernel=eager"]
    return {
        "curve, CPU": partial(curve, setting, first),
        "curve, card": partial(curve, setting, second),
    }


def curve(setting: Setting, overrides: Sequence[str], report: Report) -> None:
    """Report the mean reward of each step of a run of the embedded model: 20 steps, in float32."""
    count = setting.pick(20, 2)
    small = setting.pick([], ["batch.prompts=4", "batch.group_size=4"])
    x = rlkit.experiment(*QUIET, f"trainer.steps={count}", *small, *overrides)
    tasks = rlkit.load_tasks(x)
    policy, device, exact = rlkit.ready(x, tasks)
    learner, stream = rlkit.Learner(x, policy, exact=exact), rlkit.StreamState()
    for step in range(count):
        begun = time.perf_counter()
        with rlkit.autocast(x, device, updates=True):
            sampled, trained, stream = rlkit.experience(
                learner.begin(), policy, tasks.train, stream, step=step, clock=learner.clock
            )
            row = learner.step(sampled, trained)
        report(
            "curve",
            f"step {step + 1:02}",
            reward=round(row["reward/mean"], 6),
            sampled=row["tokens/sampled"],
            seconds=round(time.perf_counter() - begun, 3),
        )


# --------------------------------------------------------------------- f. Qwen3-0.6B on GSM8K

FOUND = {  # a repository in the local cache of the hub → a file that proves the download
    "Qwen/Qwen3-0.6B": "model.safetensors",
    "openai/gsm8k": "main/train-00000-of-00001.parquet",
}
ADAPTERS = {"adapters": f"model.lora.rank={RANK}", "all weights": "model.lora.rank=0"}
SEEDS = (0, 1, 2)


def in_cache(name: str) -> str | None:
    """Return the repository's id if the local cache of the hub holds the repository, else None."""
    from huggingface_hub import try_to_load_from_cache

    kind = "dataset" if name == "openai/gsm8k" else "model"
    found = try_to_load_from_cache(name, FOUND[name], repo_type=kind)
    return name if isinstance(found, str) else None


def gsm8k(setting: Setting) -> Pieces:
    """List the pieces of part f: for each of three seeds, two arms of rlkit and one of TRL."""
    out: Pieces = {}
    for seed in setting.pick(SEEDS, SEEDS[:1]):
        for arm in ADAPTERS:
            out[f"{arm}, seed {seed}"] = partial(train, setting, arm, seed)
        out[f"TRL, all weights, seed {seed}"] = partial(train_with_trl, setting, seed)
    return out


def sources(setting: Setting) -> tuple[str, str] | str:
    """Return the paths of the weights and of the problems, or a message about the missing one."""
    weights = setting.weights or in_cache("Qwen/Qwen3-0.6B")
    problems = setting.problems or in_cache("openai/gsm8k")
    if weights is None:
        return "no weights: give --weights FOLDER, or put Qwen/Qwen3-0.6B into the cache of the hub"
    if problems is None:
        return "no problems: give --problems FOLDER with train.jsonl and test.jsonl of GSM8K"
    if problems != setting.problems and importlib.util.find_spec("datasets") is None:
        return "the problems are a data set of the hub, and `datasets` is not installed"
    return weights, problems


def run_settings(setting: Setting) -> list[str] | str:
    """Return the overrides of model, task and sizes, or the reason for skipping the part."""
    if setting.rehearse:
        small = ["batch.prompts=4", "batch.group_size=4", "generation.max_new_tokens=32"]
        return [*small, "trainer.steps=2", "evaluation.n=8", "environment=single_turn"]
    found = sources(setting)
    if isinstance(found, str):
        return found
    weights, problems = found
    sizes = ["batch.prompts=32", "batch.group_size=8", "trainer.steps=60", "evaluation.n=256"]
    return [
        "model=qwen3_0.6b",
        f"model.path={weights}",
        "task=gsm8k",
        f"task.path={problems}",
        "environment=single_turn",
        "task.environment=single_turn",
        "evaluation.every=0",
        *sizes,
    ]


def train(setting: Setting, arm: str, seed: int, report: Report) -> str | None:
    """Run `rlkit train`. A run cut off by an earlier command continues from its last checkpoint."""
    from rlkit.commands.cli import main

    own = run_settings(setting)
    if isinstance(own, str):
        return own
    folder = setting.out / "runs" / f"{arm}_{seed}".replace(" ", "_")
    accelerator = "gpu" if setting.device == "cuda" else "cpu"
    words = [
        *own,
        ADAPTERS[arm],
        f"seed={seed}",
        "logger=none",
        "schedule=constant",
        "resume=auto",
        f"hydra.run.dir={folder}",
        f"trainer.accelerator={accelerator}",
        "callbacks.checkpoint.every=5",
        "+callbacks.evidence={_target_: parts_of_steps.row_of_step, _partial_: true}",
    ]
    REPORTS["now"] = report
    status = main(["train", *words])
    if status:
        raise RuntimeError(f"rlkit train {' '.join(words)} ended with {status}")
    return None


REPORTS: dict[str, Report] = {}  # where the callback of a run in this process writes


def row_of_step(run: Path, /) -> Any:
    """Return a callback that reports one row for each step."""
    import lightning as L

    class Rows(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            row = module.metrics
            REPORTS["now"](
                "training",
                f"step {int(module.rl_step):03}",
                reward=round(row["reward/mean"], 4),
                seconds=round(row["perf/step_s"], 3),
                sampled=row["tokens/sampled"],
                **{k.replace("/", "_"): v for k, v in row.items() if k.startswith("test/")},
            )

    return Rows()


def train_with_trl(setting: Setting, seed: int, report: Report) -> str | None:
    """Train all weights with TRL's GRPOTrainer on rlkit's problems, with rlkit's reward and sizes.

    The learning rate is the same too.
    """
    missing = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (experiments/benchmarks/peers_env.sh)"
    own = run_settings(setting)
    if isinstance(own, str):
        return own
    import peer

    peer.train(setting, [*own, ADAPTERS["all weights"], f"seed={seed}"], seed, report)
    return None
