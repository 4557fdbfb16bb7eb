"""Held-out evaluation of a run's newest checkpoint, or of a model as it is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit import runs
from rlkit.callbacks.files import write_json
from rlkit.rollouts.record import save_rollouts
from rlkit.settings import Experiment
from rlkit.types import Policy, Task


def evaluate(x: Experiment, tasks: Sequence[Task], *, checkpoint: Path | None, parent: Path, started: float) -> tuple[dict[str, Any], Path]:
    """Greedy accuracy, avg@k, pass@k and mean rewards of held-out tasks, by the verifiers of training; written as JSON beside the rollouts.

    Args:
      x: the experiment; its evaluation settings decide how replies are sampled.
      tasks: held-out rows, at least one.
      checkpoint: a file, or a folder whose newest checkpoint is evaluated; None evaluates the model as loaded.
      parent: where a new folder for the results is made.
      started: time.perf_counter() of the command's start.
    """
    from rlkit.rollouts.evaluation import greedy_accuracy, sampled_accuracy
    from rlkit.sandbox import seen
    from rlkit.selfcheck import check_policy
    from rlkit.train import autocast, pick_device, quiet, versions

    quiet()
    device = pick_device(x)
    policy = x.model(device=device)
    path, step = restore(policy, checkpoint) if checkpoint else (None, None)
    settings = x.evaluation
    collecting: dict[str, Any] = {
        "reward": settings.reward,
        "generate": x.generation.engine,
        "environment": x.environment,
        "max_new_tokens": settings.max_new_tokens or x.generation.max_new_tokens,
    }
    with autocast(x, device):
        check_policy(policy, tasks, x)
        greedy, greedy_rollouts = greedy_accuracy(policy, tasks, **collecting)
        sampled, sampled_rollouts = sampled_accuracy(
            policy, tasks, samples=settings.samples, k=settings.k, temperature=settings.temperature, seed=settings.seed, **collecting
        )
    result = {
        "checkpoint": str(path) if path else None,
        "model": x.model.keywords.get("path") if hasattr(x.model, "keywords") else None,
        "step": step,
        "n": len(tasks),
        "greedy": greedy,
        "sampled": sampled,
        "temperature": settings.temperature,
        "samples": settings.samples,
        "seed": settings.seed,
        "wall_seconds": round(time.perf_counter() - started, 2),
        "versions": versions(),
        "sandbox": str(level) if (level := seen()) else None,
    }
    out = runs.fresh(parent)
    write_json(out / "result.json", result)
    save_rollouts(out / "greedy.jsonl.gz", greedy_rollouts)
    save_rollouts(out / "sampled.jsonl.gz", sampled_rollouts)
    return result, out


def restore(policy: Policy, checkpoint: Path) -> tuple[Path, int]:
    """Loads a checkpoint's policy; the file and the RL step it stands at. Raises DataError where there is none."""
    from rlkit.callbacks.checkpoints import load_checkpoint

    path, state = load_checkpoint(checkpoint)
    weights = {name.removeprefix("model."): value for name, value in state["state_dict"].items() if name.startswith("model.")}
    policy.model.load_state_dict(weights, strict=False)  # under LoRA the frozen base is not in the checkpoint
    return path, int(state["rlkit"]["rl_step"])


def table(result: Mapping[str, Any], out: Path) -> str:
    """The result in columns."""
    greedy = result["greedy"]
    shaped = greedy["reward"] != greedy["accuracy"]  # else the reward is the accuracy
    rows = [("greedy accuracy", greedy["accuracy"], greedy["interval"])]
    rows += [("greedy reward", greedy["reward"], greedy["reward_interval"])] if shaped else []
    rows += [(name, entry["value"], entry["interval"]) for name, entry in result["sampled"].items() if shaped or name != "reward"]
    lines = [f"{'held-out, n = ' + str(result['n']):<22}{'value':>10}{'95 % interval':>20}", "-" * 52]
    lines += [f"{name:<22}{value:>10.3f}{f'{low:.3f} – {high:.3f}':>20}" for name, value, (low, high) in rows]
    return "\n".join([*lines, "", f"written to {out}, {result['wall_seconds']:.0f} s"])
