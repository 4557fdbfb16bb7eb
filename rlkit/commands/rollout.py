"""`rlkit rollout`: play episodes without training, and record, score, sum up and save them.
Episodes are played as in training."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlkit.commands.arguments import STARTED, Arguments
from rlkit.config.problems.numbers import sampling_problems
from rlkit.environments import Setting, find_environment
from rlkit.episodes.record import append_rollouts, keep_failed_rollout, save_rollouts
from rlkit.episodes.summary import (
    count_failures,
    count_refusals,
    describe_failing_tools,
    group_by_part,
    summarize,
)
from rlkit.errors import ConfigError, refuse_problems, tell_user, warn
from rlkit.runs import folder as runs
from rlkit.system.contents import PROMPTS
from rlkit.system.files import (
    LOST,
    replace_nonfinite,
    report_write_errors,
    write_atomic,
    write_json,
)
from rlkit.training.experiment import RolloutRun
from rlkit.types import Rollout

UNSCORED = "unscored.jsonl.gz"  # finished episodes, until all are scored


def roll_out(x: RolloutRun, *, parent: Path, started: float) -> tuple[list[Rollout], Path]:
    """Play the episodes, score and write them, with summary.json and transcripts. Return the
    rollouts and their folder.

    Each episode is written to unscored.jsonl.gz when it ends. The file is removed once all episodes
    are scored, so the played episodes are not lost if the command ends early.
    Raises: ConfigError if the settings are out of range or there are no tasks. DataError naming a
      row with an unreadable truth. RewardError if a reward fails.
    """
    refuse_problems(sampling_problems(x.generation))
    tasks = list(x.task(split=x.split))[: x.n]
    if not tasks:
        raise ConfigError(f"split={x.split}: the task has no rows there")
    if len(tasks) < x.n:
        print(f"n={x.n}: the task has only {len(tasks)} rows in split={x.split}; all are played")
    from rlkit.config.problems.rows import check_tools, check_truths
    from rlkit.episodes import collect, write_transcript
    from rlkit.rewards import score
    from rlkit.system.device import autocast, load_on_device, versions
    from rlkit.training.kernels import settle_kernels
    from rlkit.training.selfcheck import check_contexts

    check_truths(tasks, x.reward, x.environment)
    check_tools(tasks, x.environment)
    policy, device = load_on_device(x)
    environment = limit_environment(x.environment, x.max_steps)
    with autocast(x, device):
        tools, prompts = check_contexts(policy, tasks, environment)
        out = runs.make_fresh_folder(parent)
        with (
            keep_unscored(out / UNSCORED, len(tasks) * x.num_return_sequences) as keep,
            keep_failed_rollout(out),
        ):
            rollouts = collect(
                policy,
                tasks,
                engine=x.generation.engine,
                environment=environment,
                group_size=x.num_return_sequences,
                seed=x.seed,
                on_done=keep,
                **x.generation.params,
            )
            print(f"{tools}{settle_kernels(x.generation.engine, policy.model)}", flush=True)
            said = [count_failures(rollouts), count_refusals(rollouts)]
            said += describe_failing_tools(rollouts)
            for line in filter(None, said):
                warn(line)
            rollouts = score(rollouts, x.reward)
            with report_write_errors(f"rollouts.{x.format}"):
                save_rollouts(out / f"rollouts.{x.format}", rollouts)
    with report_write_errors(PROMPTS):
        write_atomic(out / PROMPTS, prompts.encode(errors="backslashreplace"))
    with report_write_errors("conversations.txt"):
        text = "\n\n".join([prompts, *(write_transcript(r) for r in rollouts[:8])])
        write_atomic(out / "conversations.txt", text.encode(errors="backslashreplace"))
    figures = {
        "split": x.split,
        "seconds": round(time.perf_counter() - started, 2),
        "seed": x.seed,
        "versions": versions(),
    }
    with report_write_errors("summary.json"):
        write_json(
            out / "summary.json",
            replace_nonfinite(summarize(rollouts)) | {"steps": step_counts(rollouts)} | figures,
        )
    return rollouts, out


@contextmanager
def keep_unscored(path: Path, total: int) -> Iterator[Callable[[Rollout], None]]:
    """Yield a function to call with each finished episode. The function writes the episode to the
    file, and on a terminal advances a progress bar. The file is removed if the block ends without
    an error."""
    from rich.progress import Progress

    done = 0
    with Progress(disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("episodes", total=total)

        def keep(rollout: Rollout) -> None:
            nonlocal done
            with report_write_errors(path.name):
                append_rollouts(path, [rollout])
            done += 1
            bar.advance(task)

        try:
            yield keep
            path.unlink(missing_ok=True)
        finally:
            if path.exists():
                tell_user(
                    f"rlkit: {done} of {total} episodes had ended; they are in"
                    f" {runs.shorten_path(path)}, unscored"
                )


def limit_environment(environment: Setting, max_steps: int | None) -> Setting:
    """Give the environment another limit of replies; None keeps its own limit."""
    if max_steps is None:
        return environment
    return lambda task: find_environment(environment, task)._replace(max_steps=max_steps)


def step_counts(rollouts: Sequence[Rollout]) -> dict[int, int]:
    """Count the episodes by their number of replies."""
    return dict(sorted(Counter(len(r.steps) for r in rollouts).items()))


def tabulate_episodes(rollouts: Sequence[Rollout]) -> str:
    """Write the episodes in columns: counts, steps, rewards, endings, tool calls."""
    row = summarize(rollouts)
    steps = [len(r.steps) for r in rollouts]
    rewards = [r.total_reward for r in rollouts if r.total_reward is not None]
    low, high = (f"{min(rewards):.3f}", f"{max(rewards):.3f}") if rewards else ("-", "-")
    counts = step_counts(rollouts).items()
    replies = (f"{row[f'finish_reason/{why}']:.0%}" for why in ("stop", "tool", "budget", "length"))
    ended = Counter(
        "terminated" if r.status == "terminated" else f"truncated: {r.truncation}" for r in rollouts
    )
    lines = [
        ("episodes", f"{len(rollouts)}"),
        ("steps: mean, min, max", f"{row['tools/turns']:.2f}, {min(steps)}, {max(steps)}"),
        (
            "reward: mean, std, min, max",
            f"{row['reward/mean']:.3f}, {row['reward/std']:.3f}, {low}, {high}",
        ),
        ("not scored", f"{row['reward/unscored_frac']:.0%}"),
        ("tokens an episode", f"{row['len/mean']:.1f}"),
        (
            "tool calls, failures an episode",
            f"{row['tools/calls']:.2f}, {row['tools/failures']:.2f}",
        ),
        ("replies: stop, tool, budget, cut", ", ".join(replies)),
        *(
            (f"reward of {part}", f"{row[f'part/{part}/reward/mean']:.3f} ({len(own)} episodes)")
            for part, own in group_by_part(rollouts).items()
        ),
        *((f"ended: {why}", f"{count}") for why, count in sorted(ended.items())),
        *(
            (
                f"{number} step{'s' * (number != 1)}",
                f"{count:>4} {'▪' * round(40 * count / len(rollouts))}",
            )
            for number, count in counts
        ),
    ]
    return "\n".join(f"{name:<34}{value}" for name, value in lines)


def command(arguments: Arguments) -> int:
    """Play episodes without training: they are recorded, scored and summed up.

    n=N                     tasks to play
    num_return_sequences=N  samples per task
    split=NAME              test (by default), validation or train
    KEY=VALUE               any other setting; GROUP=OPTION an option

        rlkit rollout task=guess_number n=64
        rlkit rollout task=arithmetic n=8 num_return_sequences=4
    """
    from rlkit.config.compose import compose
    from rlkit.config.problems.doubts import find_embedded_numbers
    from rlkit.config.schema import build

    composed = compose(
        arguments.overrides,
        entry="rollout",
        config_dir=arguments.config_dir,
    )
    x = build(composed.config)
    for line in find_embedded_numbers(x):
        print(f"warning: {line}")
    LOST.clear()
    rollouts, out = roll_out(x, parent=runs.OUTPUTS / x.name, started=STARTED)
    print(
        f"{'split':<34}{x.split}\n{tabulate_episodes(rollouts)}\n\nwritten to"
        f" {runs.shorten_path(out)}" + (f", but for {', '.join(LOST)}" if LOST else "")
    )
    return int(bool(LOST))
