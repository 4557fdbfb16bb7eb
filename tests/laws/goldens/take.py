"""Goldens: what a change of structure must not change. Five steps of 4 × 4 rollouts for every
algorithm, and for the KLs, references and experiments that take a path of their own.

    python tests/laws/goldens/take.py                takes all of them
    python tests/laws/goldens/take.py grpo ppo       takes these

Each case is the command `rlkit train` in this process, read from its run folder alone: the token
ids of every rollout as a digest, the log-probs of the sampler, the metrics of every step, and sum
and norm of every trained tensor after the last. They are taken again only for a change that is
meant to move them.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
CONF = HERE.parents[2] / "conf"
STEPS = 5
COMMON = [
    "trainer.threads=1",
    "trainer.accelerator=cpu",
    f"trainer.steps={STEPS}",
    "batch.prompts=4",
    "batch.group_size=4",
    "generation.max_new_tokens=32",
    "evaluation.n=8",
    "evaluation.every=0",
    "evaluation.stop_at=null",
    "logger=none",
    "++generation.kernel=eager",
    # compiled code differs in the last bits, and from processor to processor
    "++model.kernel=eager",
]
NEWER = (  # options that came after the goldens
    "remax",
    "gpg",
    "vespo",
    "vapo",
    "k3_straight_through",
    "opd",
    "gkd",
    "mopd",
    "sdft",
    "sdpo",
    "opsd",
    "echo",
    "rl_sft",
)
# Runs of other cases, token for token: grpo, and phases.
SAME = ("by_algorithm", "k3", "quickstart", "grpo_to_dapo")
# KLs that differ from k1 in their formula alone, which tests/functional has.
FORMULAS = ("confident", "forward", "k2", "reverse", "truncated")
# Sweeps, whose jobs are runs of the other cases; sft, whose rows are a user's (their order follows
# their path); and laptop, whose model is fetched.
WITHOUT = (
    *("kl_ablation", "reference_ablation", "search", "sweep_parallel", "sweep_slurm"),
    *("sft", "laptop"),
    *SAME,
)
CASES: dict[str, list[str]] = {
    **{
        f.stem: [f"algorithm={f.stem}"]
        for f in sorted((CONF / "algorithm").glob("*.yaml"))
        if f.stem not in ("sft", *NEWER)
    },
    **{
        f"kl_{f.stem}": [f"kl={f.stem}"]
        for f in sorted((CONF / "kl").glob("*.yaml"))
        if f.stem not in (*NEWER, *SAME, *FORMULAS)
    },
    "pass_at_k": [
        "algorithm=pass_at_k",
        "algorithm.advantage.k=2",
    ],  # of 4 samples there is one subset of 4
    "kl_in_reward": ["kl=k1", "kl.placement=reward"],
    "kl_adaptive": ["kl/coef=adaptive"],
    **{f"reference_{name}": [f"reference={name}"] for name in ("ema", "periodic")},
    "lora_ema": ["model.lora.rank=4", "reference=ema", "optimizer.lr=3e-4"],
    "mixture": ["task=mixture", "environment.environments.guess_number.max_turns=3"],
    "phases": ["schedule=grpo_to_dapo", "schedule.phases.explore.until=0.4"],
    "refills": ["algorithm/group_filter=mixed", "algorithm.max_refills=2"],
    "drop_oldest": [
        "task=guess_number",
        "model=tiny_guess",
        "environment=guess_number",
        "environment.max_turns=24",
        "environment.overflow=drop_oldest",
        "task.high=20",
    ],
    "thinking_budget": ["generation.max_thinking_tokens=12"],
    "transformers": ["generation=transformers"],
    **{
        f"experiment_{f.stem}": [f"experiment={f.stem}"]
        for f in sorted((CONF / "experiment").glob("*.yaml"))
        if f.stem not in WITHOUT
    },
    "experiment_recipe_dapo": ["experiment=recipe/dapo"],
}


def words(name: str) -> list[str]:
    """The overrides of a case. A model or rows from the hub are replaced by what ships."""
    from rlkit.config.compose import compose

    given = list(CASES[name])
    config = compose([*given, *COMMON]).config
    given += ["model=tiny"] if "Qwen" in config["model"]["path"] else []
    given += (
        ["task=arithmetic"]
        if config["task"]["_target_"] in ("rlkit.tasks.gsm8k", "rlkit.tasks.mbpp")
        else []
    )
    return [*given, *COMMON]


def measure(name: str) -> dict[str, Any]:
    """The golden of a case, taken now."""
    from rlkit.commands.cli import main
    from rlkit.system.shards import index_steps

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        status = main(["train", *words(name), f"hydra.run.dir={folder}"])
        if status:
            raise RuntimeError(f"{name}: rlkit train ended with {status}")
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return {
            "overrides": CASES[name],
            "tokens": {
                f"step_{step:06d}": digest(part)
                for step, part in index_steps(folder / "rollouts").items()
            },
            "logprobs": {
                f"step_{step:06d}": logprobs(part)
                for step, part in index_steps(folder / "rollouts").items()
            },
            "metrics": columns(metrics),
            "weights": {key: moments for key, moments in weights(folder)},
        }


def rollouts(part: Any) -> list[Any]:
    """The rollouts of a step, in the order of their places in it."""
    from rlkit.episodes import load_rollouts

    return sorted(load_rollouts(part), key=lambda rollout: (rollout.group, rollout.sample))


def digest(part: Any) -> str:
    """Of the ids of every prompt and every reply."""
    ids = [
        [(list(r.context(n)), list(step.response_ids)) for n, step in enumerate(r.steps)]
        for r in rollouts(part)
    ]
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def logprobs(part: Any) -> list[float]:
    """Of each rollout, the sampler's log-prob of all that it sampled."""
    return [
        significant(math.fsum(p for step in rollout.steps for p in step.logprobs))
        for rollout in rollouts(part)
    ]


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Metric → its value in every row; the clock is left out."""
    keys = dict.fromkeys(
        key
        for row in rows
        for key in row
        if not key.startswith("perf/") and isinstance(row[key], int | float | None)
    )
    return {key: [significant(row.get(key)) for row in rows] for key in sorted(keys)}


def weights(folder: Path) -> Iterator[tuple[str, list[float]]]:
    """(name, [sum, norm]) of every tensor in the last checkpoint's state."""
    import torch

    state = torch.load(
        folder / "checkpoints" / f"step_{STEPS:06d}.ckpt", weights_only=True, map_location="cpu"
    )["state_dict"]
    for key in sorted(state):
        tensor = state[key].double()
        yield key, [significant(float(tensor.sum())), significant(float(tensor.norm()))]


def significant(value: Any) -> Any:
    """Nine digits: more than any comparison looks at."""
    return float(f"{value:.9g}") if isinstance(value, float) else value


def path_of(name: str) -> Path:
    """Where the golden of a case is kept."""
    return HERE / f"{name}.yaml"


def save(name: str, golden: dict[str, Any]) -> None:
    """Writes a golden, one line a quantity, so that a change can be read."""
    path_of(name).write_text(
        yaml.safe_dump(golden, sort_keys=False, width=10**6, default_flow_style=None)
    )


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        save(case, measure(case))
