"""Evaluate the policy of a run. During training, validation problems are played to plot a curve, to
decide when to stop (`stop_at`), and to choose the best checkpoint. Before the first step and after
the last step, test problems are played to report results. Nothing in a run depends on a test
problem."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L

from rlkit.distributed import ranks
from rlkit.episodes import append_step, count_failures
from rlkit.episodes.evaluation import greedy_accuracy, is_correct
from rlkit.system import rng
from rlkit.system.files import report_write_errors
from rlkit.system.rows import append_row
from rlkit.tasks.splits import count_distinct, count_in_words
from rlkit.training.callbacks.pathologies import INTERVALS
from rlkit.training.callbacks.terminal import describe_sampling, format_held_out, say_pace
from rlkit.types import Rollout, Split, Splits

JUDGED = 8  # fewest answers before training that are judged
KEPT = 16  # rollouts that an evaluation writes, always of the same tasks to show changes
# split → prefix of the names of its metrics in a row of metrics.jsonl
PREFIXES: dict[Split, str] = {"validation": "eval/", "test": "test/"}
Results = dict[Split, dict[int, dict[str, Any]]]  # split → RL step → result


class HeldOut(L.Callback):
    """Evaluate the policy, and add `eval/*` (validation) and `test/*` to the rows of steps. The
    seconds of a step do not include its evaluations.

    With `evaluation.every` = n > 0, validation problems are played before the first step, after
    every n-th step and after the last step. With 0 they are never played. Test problems are played
    before the first step and after the last. `results` collects the results of all evaluations. A
    resumed run restores `results` from its checkpoint.
    """

    def __init__(self, tasks: Splits, metrics: Path, results: Results):
        self.tasks = tasks
        self.metrics = metrics
        self.results = results

    def state_dict(self) -> dict[str, Any]:
        return {"results": self.results}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.results |= state_dict["results"]

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        resumed = module.rl_step or any(self.results.values())
        if resumed or not (self.tasks.validation or self.tasks.test):
            return  # a resumed run has already written its first row
        trainer.print(self.announce(module.experiment.evaluation.curve_temperature))
        row, rollouts = self.evaluate(trainer, module, "validation")
        for_test, others = self.evaluate(trainer, module, "test")
        row = add_evaluation(row, for_test)
        module.metrics = row
        if ranks.rank() == 0:
            append_row(self.metrics, module.rl_step, row)
        for logger in trainer.loggers:
            logger.log_metrics(dict(row), step=module.rl_step)
        played = [*rollouts, *others]
        cut = sum(bool(rollout.truncation) for rollout in played) / max(1, len(played))
        trainer.print(f"  {format_held_out(row)}{f', {cut:.0%} cut off' if cut else ''}")
        x = module.experiment
        if x.algorithm.episodes is not None:  # the policy samples no episodes
            return
        seconds = row["perf/eval_s"] * x.batch.prompts * x.batch.group_size / max(1, len(played))
        if pace := say_pace(seconds, module.total_steps):
            trainer.print(f"  {pace}")
        if advice := flat_start(played):
            trainer.print(f"warning: {advice}")

    def announce(self, temperature: float) -> str:
        """Say which problems are played before the first step: on a CPU this may take minutes."""
        tasks = self.tasks._asdict()
        counts = " and ".join(
            f"{count_in_words(len(tasks[split]), count_distinct(tasks[split]))} {split}"
            for split in PREFIXES
            if tasks[split]
        )
        return f"before the first step: {counts} problems, {describe_sampling(temperature)}"

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        settings = module.experiment.evaluation
        if settings.every and (trainer.should_stop or module.rl_step % settings.every == 0):
            module.metrics |= self.evaluate(trainer, module, "validation")[0]
            trainer.should_stop = trainer.should_stop or settings.is_reached(module.metrics)
        if trainer.should_stop:
            row = self.evaluate(trainer, module, "test")[0]
            module.metrics = add_evaluation(module.metrics, row)

    def evaluate(
        self, trainer: L.Trainer, module: Any, split: Split
    ) -> tuple[dict[str, float], list[Rollout]]:
        """Play and score the tasks of a split once. Return the metrics and the rollouts; both are
        empty if the split has no tasks."""
        started = time.perf_counter()
        tasks = self.tasks._asdict()[split]
        x = module.experiment
        if not tasks:
            return {}, []
        forward = trainer.strategy.precision_plugin.forward_context
        # the same draws before and after training, also in the rewards; afterwards the random
        # generators are as before
        seeded = rng.seed_block(x.evaluation.seed + ranks.rank())
        with forward(), ranks.gather_weights(module.model), seeded:
            result, rollouts = greedy_accuracy(
                module.policy,
                tasks,
                seed=x.evaluation.seed,
                version=module.rl_step,
                **x.held_out(x.evaluation.curve_temperature),
            )
        if said := count_failures(rollouts):
            trainer.print(f"warning: the {split} problems after step {module.rl_step}: {said}")
        self.results.setdefault(split, {})[module.rl_step] = {"split": split} | result
        if trainer.is_global_zero:
            with report_write_errors(f"held_out/{split}/ of step {module.rl_step}"):
                folder = self.metrics.parent / "held_out" / split
                append_step(folder, module.rl_step, rollouts[:KEPT])
        row = flatten_result(result, PREFIXES[split])
        return row | {"perf/eval_s": time.perf_counter() - started}, rollouts


def add_evaluation(row: dict[str, Any], found: Mapping[str, float]) -> dict[str, Any]:
    """Return a row with the metrics of an evaluation. The seconds of its evaluations are added."""
    seconds = row.get("perf/eval_s", 0.0) + found.get("perf/eval_s", 0.0)
    return {**row, **found, "perf/eval_s": seconds} if found else row


def flat_start(rollouts: Sequence[Rollout]) -> str | None:
    """Advise what to change if all answers before training are right, or none. Return None
    otherwise, and if there are fewer than JUDGED answers."""
    n = len(rollouts)
    right = sum(map(is_correct, rollouts))
    if n < JUDGED or 0 < right < n:
        return None
    if right:
        return (
            f"all {n} answers before training are right, so this accuracy cannot rise: choose"
            " harder problems (task)"
        )
    said = f"none of {n} answers before training is right"
    cut = sum(rollout.truncation == "length" for rollout in rollouts)
    if 2 * cut > n:
        return f"{said}: {cut} of them were cut, so raise generation.max_new_tokens"
    shown = rollouts[0]
    return (
        f"{said}. One reply is {shown.final_content!r:.80}, where the answer is"
        f" {shown.task.answer!r:.40}. If replies say the answer in another form, show the form in"
        " worked examples (docs/first_task.md), or choose another task.reward."
        " Training samples more randomly, so a first reward may still come. If none comes, choose"
        " easier problems (task), or warm the model up on whole conversations (experiment=sft)"
    )


def flatten_result(result: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Convert a result to metrics with a prefix, for example `eval/`. The metrics of each part of a
    mixture are `eval/part/NAME/*`. Metrics returned by the reward's functions are
    `eval/reward/TERM/METRIC` and `eval/aggregator/METRIC`."""
    parts = result.get("parts", {})
    rows = {prefix: result, **{f"{prefix}part/{part}/": own for part, own in parts.items()}}
    out: dict[str, float] = {}
    for path, own in rows.items():
        for name, interval in INTERVALS.items():
            low, high = own[interval]
            out |= {path + name: own[name], f"{path}{name}_low": low, f"{path}{name}_high": high}
        out |= {path + name: value for name, value in own.get("metrics", {}).items()}
        out |= {f"{path}n": own["n"]} if own is not result else {}
    return out
