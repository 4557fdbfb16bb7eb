"""The command line: `rlkit train`, `evaluate`, `rollout`, `agent`. Refusals are one sentence and exit status 2, without a traceback."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rlkit.errors import ConfigError, Refusal, RLKitError, visible

STARTED = time.perf_counter()

HELP = """rlkit: reinforcement learning of language models on multi-turn, tool-using tasks

  rlkit train                                    the embedded default: learns offline, on a CPU, in about a minute
  rlkit train algorithm=reinforce kl=none        another option of a group
  rlkit train optimizer.lr=3e-4 batch.prompts=8  another number
  rlkit train -m algorithm=grpo,reinforce seed=1,2   a sweep: every combination, one process each
  rlkit train resume=outputs/NAME/TIME           continue a run (resume=auto: the newest unfinished one)
  rlkit evaluate run=outputs/NAME/TIME           greedy accuracy, avg@k and pass@k on held-out problems
  rlkit evaluate model=qwen3_0.6b task=gsm8k     of a model that no run has touched
  rlkit rollout task=guess_number n=64           episodes without training: recorded, scored, summed up
  rlkit agent "What is 15 * 27, plus 100?" tools=[calculator]   a conversation with tools; run=FOLDER asks a trained policy
  rlkit replay bundle=outputs/NAME/TIME/debug/step_000007   an update that failed, once more: which rows and gradients are not finite

  --config-dir DIR    options of your own
  -m, --multirun      a sweep

groups and their options:
"""


class Arguments(NamedTuple):
    """A command line, taken apart."""

    overrides: list[str]
    multirun: bool = False
    config_dir: str | None = None
    help: bool = False
    texts: tuple[str, ...] = ()  # words that are no override, for a command that takes such


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status: 0 done, 1 failed, 2 refused, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(HELP + list_groups())
        return 0
    commands = {"train": train_command, "evaluate": evaluate_command, "rollout": rollout_command, "agent": agent_command}
    commands["replay"] = replay_command
    try:
        if words[0] not in commands:
            raise ConfigError(f"there is no command '{words[0]}'; there are: {', '.join(commands)}")
        arguments = parse(words[1:], texts=words[0] == "agent")
        if arguments.help:
            print(HELP + list_groups())
            return 0
        return commands[words[0]](arguments)
    except Refusal as error:
        for line in str(error).splitlines():
            print(visible(f"rlkit: {line}"), file=sys.stderr)
        return 2
    except RLKitError as error:
        print(visible("\n".join((f"rlkit: {error}", *getattr(error, "__notes__", ()))), kept="\n"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parse(words: Sequence[str], *, texts: bool = False) -> Arguments:
    """Flags and overrides; with `texts` also words that are neither. Raises ConfigError for a flag that does not exist."""
    arguments = Arguments([])
    rest = iter(words)
    for word in rest:
        if word in ("-m", "--multirun"):
            arguments = arguments._replace(multirun=True)
        elif word in ("-h", "--help"):
            arguments = arguments._replace(help=True)
        elif word == "--config-dir" or word.startswith("--config-dir="):
            folder = word.partition("=")[2] or next(rest, "")
            if not Path(folder).is_dir():
                raise ConfigError(f"--config-dir {folder}: no such folder")
            arguments = arguments._replace(config_dir=folder)
        elif texts and (" " in word.partition("=")[0].strip() or not re.match(r"[-~]|[^=]+=", word)):
            arguments = arguments._replace(texts=(*arguments.texts, word))
        elif word.startswith("-"):
            raise ConfigError(f"there is no flag '{word}'; there are -m, --config-dir DIR and --help")
        elif "=" not in word and not word.startswith("~"):
            raise ConfigError(f"'{word}' is no override; write KEY=VALUE or GROUP=OPTION")
        else:
            arguments.overrides.append(word)
    return arguments


def list_groups() -> str:
    """The groups of conf/ and their options."""
    from rlkit.compose import conf_dir

    groups = {f.name: sorted(o.stem for o in f.glob("*.yaml")) for f in sorted(conf_dir().iterdir()) if f.is_dir()}
    return "\n".join(f"  {name:<12} {', '.join(options)}" for name, options in groups.items())


# --------------------------------------------------------------------------------------------------------- train


def train_command(arguments: Arguments) -> int:
    """Checks everything that can be checked without a model, then trains inside Hydra's main."""
    if arguments.multirun:
        return sweep(arguments)
    from rlkit import runs
    from rlkit.compose import compose, experiment, warnings
    from rlkit.train import load_tasks, start

    overrides, named, place = list(arguments.overrides), option(arguments.overrides, "resume"), option(arguments.overrides, "hydra.run.dir")
    folder = Path(place) if place else None
    resume: Path | None = None
    if named and named not in ("never", "auto"):
        folder = runs.find_run(named, "resume")
        resume = runs.checkpoint_source(named, folder)
        overrides = [*drop(added(runs.saved_overrides(folder), overrides), "resume"), f"resume={quote(named)}"]
    composed = compose(overrides, config_dir=arguments.config_dir)
    x = experiment(composed)
    if named == "auto":
        folder = folder or runs.newest_unfinished(x.name, composed.config)
        if folder is not None and runs.is_finished(folder):
            print(f"{folder}: finished already; nothing to do")
            return 0
        resume = folder / "checkpoints" if folder is not None and runs.is_run(folder) else None
    if folder is not None and runs.is_run(folder):
        check_continues(folder, composed.config, x.trainer.steps, resume)
    tasks = load_tasks(x)
    for line in warnings(x):
        print(f"warning: {line}")
    target = folder or runs.fresh(runs.OUTPUTS / x.name)
    return in_hydra(composed.overrides, target, arguments, lambda: start(x, composed.config, tasks, target, started=STARTED, resume=resume))


def check_continues(folder: Path, config: dict, steps: int, resume: Path | None) -> None:
    """Prints what changed since the run in `folder` was started. Raises ConfigError where it cannot go on with that."""
    from rlkit import runs

    if resume is None:
        raise ConfigError(
            f"{folder} already holds a run, which is never overwritten; continue it with resume={folder}, or choose another folder"
        )
    changed = runs.difference(runs.read_config(folder), config)
    runs.refuse_changes(folder, changed)
    for key, (was, now) in changed.items():
        print(f"resume: {key} was {was}, is {now}")
    summary = runs.read_summary(folder) or {}
    done = 0 if summary.get("unsaved") else summary.get("steps") or 0
    if resume.is_dir() and done >= steps:
        raise ConfigError(f"{folder} has done all of its {done} steps; to go on, raise trainer.steps, as in trainer.steps={2 * done}")


def option(overrides: Sequence[str], key: str) -> str | None:
    """The value that the command line gives a key, or None."""
    values = [o.partition("=")[2] for o in overrides if o.partition("=")[0].lstrip("+") == key]
    return unquote(values[-1]) if values else None


def added(saved: list[str], overrides: list[str]) -> list[str]:
    """Overrides after those of a run; what is said again word for word is said once, since `+group=option` can stand only once."""
    return [text for text in saved if text not in overrides] + overrides


def drop(overrides: Sequence[str], key: str) -> list[str]:
    """The overrides without those of a key."""
    return [o for o in overrides if o.partition("=")[0].lstrip("+") != key]


def in_hydra(overrides: Sequence[str], folder: Path, arguments: Arguments, job: Callable[[], int]) -> int:
    """Enters Hydra's main with a config that is known to compose; Hydra writes .hydra/ and sets its own state."""
    import hydra

    from rlkit.compose import conf_dir, searchpath

    status = [1]

    def run(config: object) -> None:
        status[0] = job()

    rest = drop(overrides, "hydra.run.dir")
    saved = sys.argv
    sys.argv = ["rlkit train", *searchpath(arguments.config_dir), *rest, f"hydra.run.dir={quote(str(folder))}"]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")(run)()
    finally:
        sys.argv = saved
    return status[0]


def quote(text: str) -> str:
    """A value as Hydra's override grammar takes it."""
    return "'" + text.replace("'", "\\'") + "'"


def unquote(text: str) -> str:
    """The inverse of `quote`; a text without quotes stays as it is, whatever Hydra's grammar would make of it."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1].replace("\\" + text[0], text[0])
    return text


def sweep(arguments: Arguments) -> int:
    """Every job composed and checked first; then Hydra's multirun, one process per job. A failed job does not stop the rest."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from rlkit.compose import compose, conf_dir, experiment, searchpath

    problems = []
    for job in expand(arguments.overrides):
        try:
            experiment(compose(job, config_dir=arguments.config_dir))
        except Refusal as error:
            problems += [f"job {' '.join(job)}: {line}" for line in str(error).splitlines()]
    if problems:
        raise ConfigError("\n".join(problems))
    failed: list[str] = []

    def run(config: object) -> None:
        state = HydraConfig.get()
        overrides = list(state.overrides.task)
        folder = Path(state.sweep.dir) / str(state.sweep.subdir)
        print(f"job {state.job.num}: {' '.join(overrides)} → {folder}", flush=True)
        command = [sys.executable, "-m", "rlkit", "train", *overrides, f"hydra.run.dir={quote(str(folder))}"]
        if arguments.config_dir:
            command += ["--config-dir", arguments.config_dir]
        if subprocess.run(command).returncode != 0:
            failed.append(str(folder))

    saved = sys.argv
    sys.argv = ["rlkit train", "--multirun", *searchpath(arguments.config_dir), *arguments.overrides]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")(run)()
    finally:
        sys.argv = saved
    for folder in failed:
        print(f"failed: {folder}", file=sys.stderr)
    return 1 if failed else 0


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """The jobs of a sweep, each as its overrides."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    except HydraException as error:
        raise ConfigError(str(error)) from error
    return [list(job) for job in batches[0]]


# ------------------------------------------------------------------------------------------------------ evaluate


def evaluate_command(arguments: Arguments) -> int:
    """Held-out accuracy of a run (run=FOLDER: its config and newest checkpoint) or of a model as it is."""
    from rlkit import runs
    from rlkit.compose import compose, experiment
    from rlkit.evaluate import evaluate, table
    from rlkit.train import load_tasks

    if arguments.multirun:
        raise ConfigError("rlkit evaluate takes one run or model at a time; -m belongs to rlkit train")
    named, overrides = option(arguments.overrides, "run"), drop(arguments.overrides, "run")
    run = runs.find_run(named, "run") if named else None
    if run is not None:
        overrides = added(drop(runs.saved_overrides(run), "resume"), overrides)
    composed = compose(overrides, entry="evaluate", config_dir=arguments.config_dir)
    x = experiment(composed)
    if x.evaluation.n < 1:
        raise ConfigError(f"evaluation.n={x.evaluation.n}: there is nothing to evaluate; set it to at least 1")
    if max(x.evaluation.k) > x.evaluation.samples:
        raise ConfigError(
            f"evaluation.k: pass@{max(x.evaluation.k)} needs evaluation.samples of at least that; it is {x.evaluation.samples}"
        )
    _, held_out = load_tasks(x)
    checkpoint = runs.checkpoint_source(named, run) if named and run else None
    parent = run / "evaluation" if run else runs.OUTPUTS / "evaluation"
    print(table(*evaluate(x, held_out, checkpoint=checkpoint, parent=parent, started=STARTED)))
    return 0


# ------------------------------------------------------------------------------------------------------- rollout


def rollout_command(arguments: Arguments) -> int:
    """Plays episodes without training and sums them up."""
    from rlkit import runs
    from rlkit.compose import compose
    from rlkit.rollout import roll_out, table
    from rlkit.schema import build

    if arguments.multirun:
        raise ConfigError("rlkit rollout plays one set of episodes at a time; -m belongs to rlkit train")
    composed = compose(arguments.overrides, entry="rollout", config_dir=arguments.config_dir)
    x = build(composed.config)
    rollouts, out = roll_out(x, parent=runs.OUTPUTS / x.name, started=STARTED)
    print(f"{table(rollouts)}\n\nwritten to {out}")
    return 0


# --------------------------------------------------------------------------------------------------------- agent


def agent_command(arguments: Arguments) -> int:
    """One question, answered with tools by a model as it is, or by that of a run (run=FOLDER: its newest checkpoint)."""
    from rlkit import runs
    from rlkit.agent import ask, show
    from rlkit.compose import compose
    from rlkit.schema import build, check

    if arguments.multirun:
        raise ConfigError("rlkit agent answers one question at a time; -m belongs to rlkit train")
    if len(arguments.texts) != 1 or not arguments.texts[0].strip():
        said = f", not {len(arguments.texts)}" if arguments.texts else ""
        raise ConfigError(f'rlkit agent takes one question in quotes{said}: rlkit agent "What is 15 * 27, plus 100?" tools=[calculator]')
    named, overrides = option(arguments.overrides, "run"), drop(arguments.overrides, "run")
    run = runs.find_run(named, "run") if named else None
    if run is not None and (other := [o for o in overrides if re.match(r"[+~]*model\b", o)]):
        raise ConfigError(f"{other[0]}: run={named} brings its own model; take one of the two away")
    config, checkpoint = compose(overrides, entry="agent", config_dir=arguments.config_dir).config, None
    if named and run is not None:
        config["model"], checkpoint = runs.read_config(run).get("model", "???"), runs.checkpoint_source(named, run)
        if problems := check(config["model"], f"{run}/config.yaml, model"):
            raise ConfigError("\n".join(problems))
    show(ask(build(config), arguments.texts[0], checkpoint=checkpoint).rollout)
    return 0


# -------------------------------------------------------------------------------------------------------- replay


def replay_command(arguments: Arguments) -> int:
    """The failed update of a debug bundle, done again; 1 where it fails again."""
    from rlkit.replay import replay

    named = option(arguments.overrides, "bundle")
    if named is None or len(arguments.overrides) != 1:
        raise ConfigError("rlkit replay takes one debug bundle: rlkit replay bundle=outputs/NAME/TIME/debug/step_000007")
    text, fine = replay(Path(named).expanduser())
    print(text)
    return 0 if fine else 1
