"""Evaluate a run's newest checkpoint, or a model as it is, on the problems of a split."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit.commands.arguments import STARTED, Arguments, append_overrides, drop, find_option
from rlkit.commands.trust import make_asker, with_limits
from rlkit.episodes.record import keep_failed_rollout, save_rollouts
from rlkit.errors import ConfigError, DataError
from rlkit.runs import folder as runs
from rlkit.system.files import LOST, report_write_errors, write_json
from rlkit.tasks.splits import count_distinct, count_in_words
from rlkit.training.experiment import Experiment
from rlkit.types import SPLITS, Policy, Rollout, Split, Task


def evaluate_run(
    x: Experiment,
    tasks: Sequence[Task],
    *,
    split: Split,
    checkpoint: Path | None,
    parent: Path,
    started: float,
) -> tuple[dict[str, Any], Path]:
    """Measure greedy accuracy, avg@k, pass@k and mean rewards on tasks, with the same verifiers as
    in training. The figures are written as JSON next to the rollouts.

    Args:
      x: the experiment; its evaluation settings decide the sampling.
      tasks: rows of the split, at least one.
      split: name of the split, for the result.
      checkpoint: a file, or a folder whose newest checkpoint is taken. None evaluates the model as
        loaded.
      parent: folder in which a new folder for the results is made.
      started: time.perf_counter() of the command's start.
    Raises: RewardError if a reward fails. The error's note names the rollout's file in the new
      folder.
    """
    from rlkit.sandbox import get_known_level
    from rlkit.system.device import autocast, load_on_device, versions
    from rlkit.training.kernels import settle_kernels
    from rlkit.training.selfcheck import check_policy
    from rlkit.training.windows import describe_windows

    policy, device = load_on_device(x)
    path, step = (
        restore_policy(policy, checkpoint, x.generation.engine) if checkpoint else (None, None)
    )
    settings = x.evaluation
    with autocast(x, device):
        tools = check_policy(policy, tasks, x).tools
        print(f"{tools}{settle_kernels(x.generation.engine, policy.model)}", flush=True)
        windows = describe_windows(x, policy, tasks)
        if windows:
            print(windows, flush=True)
        out = runs.make_fresh_folder(parent)
        greedy = _measure(x, policy, tasks, step or 0, out, "greedy")
        sampled = _measure(x, policy, tasks, step or 0, out, "sampled")
    level = get_known_level()
    result = {
        "checkpoint": str(path) if path else None,
        "model": x.model.path,
        "step": step,
        "split": split,
        "n": len(tasks),
        "distinct": count_distinct(tasks),
        "greedy": greedy,
        "sampled": sampled,
        "temperature": settings.temperature,
        "samples": settings.samples,
        "seed": settings.seed,
        "wall_seconds": round(time.perf_counter() - started, 2),
        "versions": versions(),
        "sandbox": str(level) if level else None,
    }
    with report_write_errors("result.json"):
        write_json(out / "result.json", result)
    return result, out


def _measure(
    x: Experiment, policy: Policy, tasks: Sequence[Task], version: int, out: Path, how: str
) -> dict[str, Any]:
    """Measure one reply to each task (`how` = greedy), or several (sampled). Write the rollouts to
    `out`."""
    from rlkit.episodes.evaluation import greedy_accuracy, sampled_accuracy
    from rlkit.system.waiting import MAX_STEP_TIME, limit_waiting

    settings = x.evaluation
    limit = limit_waiting(
        x.trainer.max_step_time, MAX_STEP_TIME, lambda: f"the {how} evaluation hangs"
    )
    with keep_failed_rollout(out), limit:
        if how == "greedy":
            result, rollouts = greedy_accuracy(policy, tasks, version=version, **x.held_out(0.0))
        else:
            result, rollouts = sampled_accuracy(
                policy,
                tasks,
                samples=settings.samples,
                k=settings.k,
                seed=settings.seed,
                version=version,
                **x.held_out(settings.temperature),
            )
        _keep_rollouts(out / f"{how}.jsonl.gz", rollouts)
    return result


def _keep_rollouts(file: Path, rollouts: Sequence[Rollout]) -> None:
    """Write the rollouts of an evaluation, and warn of failed episodes and of refused requests."""
    from rlkit.episodes import count_failures, count_refusals

    with report_write_errors(file.name):
        save_rollouts(file, rollouts)
    for said in filter(None, (count_failures(rollouts), count_refusals(rollouts))):
        print(f"warning: {said}", flush=True)


def restore_policy(policy: Policy, checkpoint: Path, engine: Any = None) -> tuple[Path, int]:
    """Load a checkpoint's policy; return the checkpoint's file and RL step. The engine uses the
    kernels of the run; if it cannot, the difference is reported.

    Raises: DataError if no checkpoint can be read, or if its weights belong to another model.
    """
    from rlkit.training.callbacks.checkpoints import load_checkpoint
    from rlkit.training.kernels import keep_kernels

    path, state = load_checkpoint(checkpoint)
    weights = {
        name.removeprefix("model."): value
        for name, value in state["state_dict"].items()
        if name.startswith("model.")
    }
    trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    strange = [
        *sorted(trained - weights.keys()),
        *sorted(weights.keys() - policy.model.state_dict().keys()),
    ]
    if strange:
        raise DataError(
            f"{path} belongs to another model: {len(strange)} weights are in only one of the two,"
            f" such as {strange[0]}; use the model settings of its run"
        )
    # under LoRA the frozen base is not in the checkpoint
    policy.model.load_state_dict(weights, strict=False)
    for said in keep_kernels(engine, policy.model, state["rlkit"]) if engine is not None else ():
        print(f"evaluate: {said}", flush=True)
    return path, int(state["rlkit"]["rl_step"])


def list_held_out_rows(
    label: str, greedy: Mapping[str, Any], sampled: Mapping[str, Any], prefix: str = ""
) -> list[tuple[str, float, Any]]:
    """List (name, value, interval) of the figures in a result, or in one of its parts. The reward
    is left out if it equals the accuracy."""
    shaped = greedy["reward"] != greedy["accuracy"]
    rows = [(f"{label} accuracy", greedy["accuracy"], greedy["interval"])]
    rows += [(f"{label} reward", greedy["reward"], greedy["reward_interval"])] if shaped else []
    curves = [name for name in sampled if name != "parts" and (shaped or name != "reward")]
    return rows + [
        (prefix + name, sampled[name]["value"], sampled[name]["interval"]) for name in curves
    ]


def format_accuracy(result: Mapping[str, Any], out: Path) -> str:
    """Write the result in columns."""
    greedy = result["greedy"]
    sampled = result["sampled"]
    rows = list_held_out_rows("greedy", greedy, sampled)
    for part, own in greedy.get("parts", {}).items():
        rows += list_held_out_rows(f"{part}: greedy", own, sampled["parts"][part], f"{part}: ")
    head = f"{result['split']}, n = {count_in_words(result['n'], result['distinct'])}"
    width = max(22, len(head) + 1, *(len(name) + 1 for name, *_ in rows))
    lines = [f"{head:<{width}}{'value':>10}{'95 % interval':>20}", "-" * (width + 30)]
    lines += [
        f"{name:<{width}}{value:>10.3f}{f'{low:.3f} – {high:.3f}':>20}"
        for name, value, (low, high) in rows
    ]
    return "\n".join(
        [
            *lines,
            "right answers by evaluation.reward\n",
            f"written to {runs.shorten_path(out)}, {result['wall_seconds']:.0f} s",
        ]
    )


def command(arguments: Arguments) -> int:
    """Measure greedy accuracy, avg@k and pass@k of a run's newest checkpoint or of a model as it
    is.

    run=FOLDER            a run folder or one of its checkpoints; without it the model of the config
    split=NAME            test (by default), validation or train
    evaluation.n=N        problems
    evaluation.samples=N  sampled replies per problem, besides the greedy one
    KEY=VALUE             any other setting of a run; GROUP=OPTION an option

        rlkit evaluate run=outputs/latest
        rlkit evaluate model=qwen3_0.6b task=gsm8k evaluation.n=64
    """
    from rlkit.config.compose import compose, experiment
    from rlkit.config.problems.doubts import find_embedded_numbers
    from rlkit.config.problems.rows import check_tools, load_split

    named = find_option(arguments.overrides, "run")
    overrides = drop(arguments.overrides, "run", "split")
    asked = find_option(arguments.overrides, "split") or "test"
    split = next((known for known in SPLITS if known == asked), None)
    if split is None:
        raise ConfigError(f"split={asked}: there are {', '.join(SPLITS)}")
    run = runs.find_run(named, "run") if named else None
    ask = None
    if named and run is not None:
        runs.require_overrides(run)
        ask = make_asker(
            f"run={named}", run, overrides, arguments, entry="evaluate", own_model=True
        )
        overrides = append_overrides(runs.read_overrides(run), overrides)
    composed = compose(
        overrides,
        entry="evaluate",
        config_dir=arguments.config_dir,
        before_import=ask,
    )
    x = with_limits(experiment(composed), arguments)
    if x.evaluation.n < 1:
        raise ConfigError(
            f"evaluation.n={x.evaluation.n}: there is nothing to evaluate; set it to at least 1"
        )
    if max(x.evaluation.k) > x.evaluation.samples:
        raise ConfigError(
            f"evaluation.k: pass@{max(x.evaluation.k)} needs evaluation.samples of at least that;"
            f" it is {x.evaluation.samples}"
        )
    tasks = load_split(x, split)
    check_tools(tasks, x.environment)
    if len(tasks) < x.evaluation.n:
        print(f"evaluation.n={x.evaluation.n}: split={split} has {len(tasks)} problems")
    checkpoint = runs.find_checkpoint(named, run) if named and run else None
    parent = run / "evaluation" if run else runs.OUTPUTS / "evaluation"
    for line in find_embedded_numbers(x):
        print(f"warning: {line}")
    LOST.clear()
    print(
        format_accuracy(
            *evaluate_run(
                x, tasks, split=split, checkpoint=checkpoint, parent=parent, started=STARTED
            )
        )
    )
    return int(bool(LOST))
