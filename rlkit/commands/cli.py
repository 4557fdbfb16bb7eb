"""The command line: `rlkit train`, `evaluate`, `rollout`, `agent`. Refusals are one sentence and exit status 2, without a traceback."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlkit.errors import ConfigError, Refusal, RLKitError, raised_at, visible
from rlkit.system.processors import wait_without_spinning

if TYPE_CHECKING:
    from rlkit.config.compose import Composed

STARTED = time.perf_counter()

HELP = """rlkit: reinforcement learning of language models on multi-turn, tool-using tasks

  rlkit train                                    the embedded default: learns offline, on a CPU, in about a minute
  rlkit train algorithm=reinforce kl=none        another option of a group
  rlkit train optimizer.lr=3e-4 batch.prompts=8  another number
  rlkit train -m algorithm=grpo,reinforce seed=1,2   a sweep: every combination, one process each
  rlkit train resume=outputs/NAME/TIME           continue a run (resume=auto: the newest unfinished one)
  rlkit evaluate run=outputs/NAME/TIME           greedy accuracy, avg@k and pass@k on test problems (split=validation, train)
  rlkit evaluate model=qwen3_0.6b task=gsm8k     of a model that no run has touched
  rlkit rollout task=guess_number n=64           episodes without training: recorded, scored, summed up
  rlkit agent "Kim has 19 toys. Kim buys 14 more. How many toys does Kim have now?" tools=[calculator]
                                                 a conversation with tools; run=FOLDER asks a trained policy
  rlkit report outputs/NAME/TIME …               one HTML page of runs or a sweep: curves, tables, conversations; out=FILE
  rlkit export run=outputs/NAME/TIME             the policy as a Hugging Face folder; merge=true adds adapters to the weights
  rlkit check experiment=gsm8k_tools             what train would do, in one small step: rollout, reward, update, memory
  rlkit doctor                                   versions, devices, sandbox, disk and extras of this machine
  rlkit replay bundle=outputs/NAME/TIME/debug/step_000007   an update that failed, once more: which rows and gradients are not finite

  --config-dir DIR    options of your own
  trust=true          with run= or bundle=: the folder's config may call functions that do not ship with rlkit
  -m, --multirun      a sweep
  --completion SHELL  a script that completes groups, options and keys: eval "$(rlkit --completion bash)", the same with zsh;
                      rlkit --completion fish | source

groups and their options:
"""


class Arguments(NamedTuple):
    """A command line, taken apart."""

    overrides: list[str]
    multirun: bool = False
    config_dir: str | None = None
    help: bool = False
    words: tuple[str, ...] = ()  # all of it, as it was given
    texts: tuple[str, ...] = ()  # words that are no override, for a command that takes such


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status: 0 done, 1 failed, 2 refused, 130 interrupted."""
    wait_without_spinning()
    from rlkit.system.output import install

    install()
    words = list(sys.argv[1:] if argv is None else argv)
    if broken := [word for word in words if re.search("[\ud800-\udfff]", word)]:
        print(
            visible(f"rlkit: {broken[0]!a}: this word is not UTF-8; type it again, or set the terminal's encoding to UTF-8"),
            file=sys.stderr,
        )
        return 2
    if not words or words[0] in ("-h", "--help"):
        print(HELP + list_groups())
        return 0
    commands = {
        "train": train_command,
        "evaluate": evaluate_command,
        "rollout": rollout_command,
        "agent": agent_command,
        "export": export_command,
        "report": report_command,
        "check": check_command,
        "doctor": doctor_command,
        "replay": replay_command,
    }
    try:
        if words[0].startswith("--comp"):
            return completion(words, commands)
        if words[0] not in commands:
            raise ConfigError(f"there is no command '{words[0]}'; there are: {', '.join(commands)}")
        arguments = parse(words[1:], texts=words[0] in ("agent", "report"))
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
    except KeyboardInterrupt as error:
        print(visible(f"rlkit: interrupted: {raised_at(error)}"), file=sys.stderr)
        return 130
    except SystemExit as error:  # rlkit raises none
        print(visible(f"rlkit: {raised_at(error)} ended the command; a part of the config may not do that"), file=sys.stderr)
        return 1


def parse(words: Sequence[str], *, texts: bool = False) -> Arguments:
    """Flags and overrides; with `texts` also words that are neither. Raises ConfigError for a flag that does not exist."""
    arguments = Arguments([], words=tuple(words))
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
    from rlkit.config.compose import conf_dir

    groups = {f.name: sorted(o.stem for o in f.glob("*.yaml")) for f in sorted(conf_dir().iterdir()) if f.is_dir() and f.name != "hydra"}
    return "\n".join(f"  {name:<12} {', '.join(options)}" for name, options in groups.items())


# --------------------------------------------------------------------------------------------------------- train


def train_command(arguments: Arguments) -> int:
    """Checks everything that can be checked without a model, then trains inside Hydra's main."""
    if arguments.multirun:
        from rlkit.runs.sweeps import sweep

        return sweep(arguments.overrides, config_dir=arguments.config_dir)
    from rlkit.config.compose import compose, experiment, length_keys
    from rlkit.config.problems import warnings
    from rlkit.distributed import launch, ranks
    from rlkit.runs import folder as runs
    from rlkit.system.owner import owned
    from rlkit.tasks.splits import overlaps
    from rlkit.training.loggers import check_loggers
    from rlkit.training.run import join_ranks, load_tasks, start

    overrides, named, place = list(arguments.overrides), option(arguments.overrides, "resume"), option(arguments.overrides, "hydra.run.dir")
    folder = Path(place) if place else None
    resume: Path | None = None
    if named and named not in ("never", "auto"):
        folder = runs.find_run(named, "resume")
        resume = runs.checkpoint_source(named, folder)
        require_secrets(named, folder, overrides)
        overrides = [*added(runs.saved_overrides(folder), drop(overrides, "resume")), f"resume={quote(named)}"]
    composed = compose(overrides, config_dir=arguments.config_dir, before_import=announcer(folder if resume else None))
    x = experiment(composed)
    check_loggers(x.logger)
    if launch.needed(x.trainer.devices, x.trainer.nodes):
        return launch.start([sys.executable, "-m", "rlkit", "train", *arguments.words], x.trainer.devices)
    join_ranks(x.trainer)

    if named == "auto":
        folder = ranks.first(lambda: folder or runs.newest_unfinished(x.name, composed.config, beside=length_keys(composed)))
        if folder is not None and runs.is_finished(folder):
            print(f"{folder}: finished already; nothing to do")
            ranks.leave()
            return 0
        resume = folder / "checkpoints" if folder is not None and runs.is_run(folder) else None
    with ExitStack() as owning:

        def own(run: Path) -> Path:
            return ranks.first(lambda: owning.enter_context(owned(run, takeover=x.takeover)) or run)

        if known := folder is not None and runs.is_run(folder):
            check_continues(own(folder), composed.config, x.trainer.steps, resume)
        tasks = load_tasks(x)
        for line in (*warnings(x), *overlaps(tasks)):
            print(f"warning: {line}")
        target = ranks.first(lambda: folder or runs.fresh(runs.OUTPUTS / x.name))  # one for all ranks, which by now have read what is there
        ranks.first(lambda: runs.require_writable(target))
        if not known:
            own(target)

        def job() -> int:
            return start(x, composed.config, tasks, target, started=STARTED, resume=resume)

        status = in_hydra(composed, target, job) if ranks.rank() == 0 else job()
    if status == 0:
        ranks.leave()
    return status


def require_secrets(named: str, folder: Path, overrides: Sequence[str]) -> None:
    """Raises ConfigError where an override of the run held a secret, which no run folder keeps, and is not given again."""
    from rlkit.runs import folder as runs

    if missing := [key for key in runs.withheld(folder) if option(overrides, key) is None]:
        raise ConfigError(
            f"resume={named}: {missing[0]} held a secret, which no run folder keeps; give it again, as {missing[0]}=VALUE or better "
            f"as {missing[0]}='${{oc.env:NAME}}'"
        )


def check_continues(folder: Path, config: dict, steps: int, resume: Path | None) -> None:
    """Prints what changed since the run in `folder` was started.

    Raises: ConfigError where it cannot go on with that; DataError where it has trained and no checkpoint of it is left.
    """
    from rlkit.runs import folder as runs
    from rlkit.training.callbacks.rows import refuse_restart

    if resume is None:
        raise ConfigError(
            f"{folder} already holds a run, which is never overwritten; continue it with resume={folder}, or choose another folder"
        )
    if not resume.name.endswith(".ckpt"):
        refuse_restart(folder)
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


def in_hydra(composed: Composed, folder: Path, job: Callable[[], int]) -> int:
    """Runs a job as Hydra's main does, with the config that is composed already: .hydra/ in its folder, Hydra's state, its callbacks."""
    from hydra import initialize_config_dir
    from hydra._internal.callbacks import Callbacks
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.utils import run_job
    from hydra.types import HydraContext, RunMode

    from rlkit.config.compose import conf_dir

    config = composed.full
    config.hydra.run.dir, config.hydra.mode = str(folder), RunMode.RUN
    with initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="train"):
        callbacks = Callbacks(config)
        callbacks.on_run_start(config=config, config_name="train")
        context = HydraContext(config_loader=GlobalHydra.instance().config_loader(), callbacks=callbacks)
        done = run_job(lambda _: job(), config, "hydra.run.dir", None, hydra_context=context)
        callbacks.on_run_end(config=config, config_name="train", job_return=done)
        return done.return_value


def quote(text: str) -> str:
    """A value as Hydra's override grammar takes it."""
    return "'" + text.replace("'", "\\'") + "'"


def unquote(text: str) -> str:
    """The inverse of `quote`; a text without quotes stays as it is, whatever Hydra's grammar would make of it."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1].replace("\\" + text[0], text[0])
    return text


# ----------------------------------------------------------------------------------------- trust in what a folder names


def announcer(folder: Path | None) -> Callable[[dict], None] | None:
    """Where the run of a folder is continued, what says which code outside rlkit its config calls, before any of it is imported."""
    from rlkit.config.compose import conf_dir
    from rlkit.config.trust import outside, shipped
    from rlkit.runs import folder as runs

    def announce(config: dict) -> None:
        saved = runs.saved_overrides(folder) if folder is not None else []
        if found := list(dict.fromkeys(outside({"": config, "overrides": saved}, shipped(conf_dir())))):
            print(f"resume: code outside rlkit: {'; '.join(found)}", flush=True)

    return None if folder is None else announce


def asker(where: str, folder: Path, arguments: Arguments) -> Callable[[dict], None]:
    """What refuses a config that comes with a folder and calls code outside rlkit, unless the command line says trust=true."""
    from rlkit.config.compose import conf_dir
    from rlkit.config.trust import require
    from rlkit.runs import folder as runs

    own = " ".join(drop(arguments.overrides, "run"))
    for file in Path(arguments.config_dir).rglob("*.yaml") if arguments.config_dir else ():
        own += "\n" + file.read_text()

    def ask(config: dict) -> None:
        node = {"": config, "overrides": runs.saved_overrides(folder)}
        require(node, where, conf_dir(), trusted=is_trusted(arguments.overrides), own=own)

    return ask


def is_trusted(overrides: Sequence[str]) -> bool:
    """Whether the command line says trust=true. Raises ConfigError for any other value than true or false."""
    said = option(overrides, "trust")
    if said not in (None, "true", "false"):
        raise ConfigError(f"trust={said}: must be true or false")
    return said == "true"


# ------------------------------------------------------------------------------------------------------ evaluate


def evaluate_command(arguments: Arguments) -> int:
    """Accuracy of a run (run=FOLDER: its config and newest checkpoint) or of a model as it is, on test problems unless split= says
    otherwise."""
    from rlkit.commands.evaluate import evaluate, table
    from rlkit.config.compose import compose, experiment
    from rlkit.runs import folder as runs
    from rlkit.system.files import LOST
    from rlkit.training.run import load_split
    from rlkit.training.selfcheck import check_tools
    from rlkit.types import SPLITS

    if arguments.multirun:
        raise ConfigError("rlkit evaluate takes one run or model at a time; -m belongs to rlkit train")
    named, overrides = option(arguments.overrides, "run"), drop(drop(arguments.overrides, "run"), "split")
    split = next((known for known in SPLITS if known == (option(arguments.overrides, "split") or "test")), None)
    if split is None:
        raise ConfigError(f"split={option(arguments.overrides, 'split')}: there are {', '.join(SPLITS)}")
    run = runs.find_run(named, "run") if named else None
    ask = None
    if named and run is not None:
        overrides = added(runs.saved_overrides(run), drop(overrides, "trust"))
        ask = asker(f"run={named}", run, arguments)
    composed = compose(overrides, entry="evaluate", config_dir=arguments.config_dir, before_import=ask)
    x = experiment(composed)
    if x.evaluation.n < 1:
        raise ConfigError(f"evaluation.n={x.evaluation.n}: there is nothing to evaluate; set it to at least 1")
    if max(x.evaluation.k) > x.evaluation.samples:
        raise ConfigError(
            f"evaluation.k: pass@{max(x.evaluation.k)} needs evaluation.samples of at least that; it is {x.evaluation.samples}"
        )
    tasks = load_split(x, split)
    check_tools(tasks, x.environment)
    checkpoint = runs.checkpoint_source(named, run) if named and run else None
    parent = run / "evaluation" if run else runs.OUTPUTS / "evaluation"
    LOST.clear()
    print(table(*evaluate(x, tasks, split=split, checkpoint=checkpoint, parent=parent, started=STARTED)))
    return int(bool(LOST))


# ------------------------------------------------------------------------------------------------------- rollout


def rollout_command(arguments: Arguments) -> int:
    """Plays episodes without training and sums them up."""
    from rlkit.commands.rollout import roll_out, table
    from rlkit.config.compose import compose
    from rlkit.config.schema import build
    from rlkit.runs import folder as runs
    from rlkit.system.files import LOST

    if arguments.multirun:
        raise ConfigError("rlkit rollout plays one set of episodes at a time; -m belongs to rlkit train")
    composed = compose(arguments.overrides, entry="rollout", config_dir=arguments.config_dir)
    x = build(composed.config)
    LOST.clear()
    rollouts, out = roll_out(x, parent=runs.OUTPUTS / x.name, started=STARTED)
    print(f"{'split':<34}{x.split}\n{table(rollouts)}\n\nwritten to {out}" + (f", but for {', '.join(LOST)}" if LOST else ""))
    return int(bool(LOST))


# --------------------------------------------------------------------------------------------------------- agent


def agent_command(arguments: Arguments) -> int:
    """One question, answered with tools by a model as it is, or by that of a run (run=FOLDER: its newest checkpoint)."""
    from rlkit.commands.agent import ask, show
    from rlkit.config.compose import compose
    from rlkit.config.schema import build, check
    from rlkit.runs import folder as runs

    if arguments.multirun:
        raise ConfigError("rlkit agent answers one question at a time; -m belongs to rlkit train")
    if len(arguments.texts) != 1 or not arguments.texts[0].strip():
        said = f", not {len(arguments.texts)}" if arguments.texts else ""
        raise ConfigError(f'rlkit agent takes one question in quotes{said}: rlkit agent "How many toys …?" tools=[calculator]')
    named, overrides = option(arguments.overrides, "run"), drop(arguments.overrides, "run")
    run = runs.find_run(named, "run") if named else None
    if run is not None and (other := [o for o in overrides if re.match(r"[+~]*model\b", o)]):
        raise ConfigError(f"{other[0]}: run={named} brings its own model; take one of the two away")
    overrides = drop(overrides, "trust") if run is not None else overrides
    config, checkpoint = compose(overrides, entry="agent", config_dir=arguments.config_dir).config, None
    if named and run is not None:
        config["model"], checkpoint = model_of(run, f"run={named}", arguments), runs.checkpoint_source(named, run)
        if problems := check(config["model"], f"{run}/config.yaml, model"):
            raise ConfigError("\n".join(problems))
    show(ask(build(config), arguments.texts[0], checkpoint=checkpoint).rollout)
    return 0


def model_of(run: Path, where: str, arguments: Arguments) -> dict:
    """The model of a run, from its config, which is read as data. Raises ConfigError where it names code outside rlkit and trust=true
    is not said; DataError where it cannot be read."""
    from rlkit.config.compose import conf_dir
    from rlkit.config.trust import require, with_environment
    from rlkit.runs import folder as runs
    from rlkit.system.redaction import learn

    written = runs.read_config(run).get("model")
    if not isinstance(written, dict) or "_target_" not in written:
        raise ConfigError(f"{where}: {run}/config.yaml names no model; give the folder as rlkit wrote it")
    require({"model": written}, where, conf_dir(), trusted=is_trusted(arguments.overrides))
    model = with_environment(written, "model")
    learn(model, written)
    return model


# -------------------------------------------------------------------------------------------------------- export


def export_command(arguments: Arguments) -> int:
    """The policy of a run (run=FOLDER or a checkpoint) in a folder that `from_pretrained` loads."""
    from rlkit.commands.export import export
    from rlkit.runs import folder as runs

    known = ("run", "to", "merge", "trust")
    if unknown := [o for o in arguments.overrides if o.partition("=")[0] not in known]:
        raise ConfigError(f"{unknown[0]}: rlkit export takes run=FOLDER, to=FOLDER, merge=true and trust=true")
    named, place, merge = (option(arguments.overrides, key) for key in known[:3])
    if not named or arguments.multirun:
        raise ConfigError("rlkit export takes one run: run=outputs/NAME/TIME, or one of its checkpoints")
    if merge not in (None, "true", "false"):
        raise ConfigError(f"merge={merge}: must be true or false")
    run = runs.find_run(named, "run")
    out = Path(place).expanduser() if place else run / ("merged" if merge == "true" else "export")
    path, step = export(
        model_of(run, f"run={named}", arguments), checkpoint=runs.checkpoint_source(named, run), out=out, merge=merge == "true"
    )
    print(f"{path}, step {step}\nwritten to {out}\nload it with AutoModelForCausalLM.from_pretrained({str(out)!r}), or model.path={out}")
    return 0


# --------------------------------------------------------------------------------------- check, doctor, completion


def check_command(arguments: Arguments) -> int:
    """What `rlkit train` would do with these overrides, in one small step."""
    from rlkit.commands import check
    from rlkit.config.compose import compose, experiment
    from rlkit.config.problems import first_steps, warnings
    from rlkit.tasks.splits import overlaps
    from rlkit.training.loggers import check_loggers
    from rlkit.training.run import load_tasks

    if arguments.multirun:
        raise ConfigError("rlkit check tries one run at a time; rlkit train -m checks every job of a sweep before the first one starts")
    x = experiment(compose(arguments.overrides, config_dir=arguments.config_dir))
    check_loggers(x.logger)
    tasks = load_tasks(x)
    for line in (*warnings(x), *overlaps(tasks)):
        print(f"warning: {line}")
    firsts = first_steps(x)
    report = check.run(next(iter(firsts.values())), tasks)
    print(check.show(report, phases=list(firsts)))
    return 0


def doctor_command(arguments: Arguments) -> int:
    """What this machine gives to a run; 1 where nothing can be trained on it."""
    from rlkit.commands.doctor import examine, show

    if arguments.overrides or arguments.multirun:
        raise ConfigError("rlkit doctor takes no overrides; rlkit check takes those of a run")
    findings = examine()
    print(show(findings))
    return 1 if any(f.state == "bad" for f in findings) else 0


def completion(words: Sequence[str], commands: Iterable[str]) -> int:
    """`--completion SHELL` prints what a shell has to read; `--complete LINE` the words that may follow, for that."""
    from rlkit.commands.completion import complete, script

    if words[0] == "--completion":
        print(script(words[1] if len(words) > 1 else "bash"), end="")
    elif words[0] == "--complete" and len(words) == 2:
        print("\n".join(complete(words[1], commands, known_keys)))
    else:
        raise ConfigError(f"there is no flag '{words[0]}'; there is --completion bash, zsh or fish")
    return 0


def known_keys(entry: str, overrides: Sequence[str], config_dir: str | None) -> list[str]:
    """The keys of a composed config; none where it does not compose, since a shell shows no messages."""
    from rlkit.config.compose import keys

    try:
        return keys(overrides, entry=entry, config_dir=config_dir)
    except ConfigError:
        return []


# -------------------------------------------------------------------------------------------------------- report


def report_command(arguments: Arguments) -> int:
    """Runs as one HTML page: RUN…, and out=FILE, smooth=STEPS, limit=CONVERSATIONS."""
    given = {key: value for key in ("out", "smooth", "limit") if (value := option(arguments.overrides, key)) is not None}
    others = [text for text in arguments.overrides if text.partition("=")[0] not in given]
    if unknown := [text for text in others if not Path(text).exists()]:
        raise ConfigError(f"'{unknown[0]}': rlkit report takes folders, out=FILE.html, smooth=STEPS and limit=CONVERSATIONS")
    folders = [*arguments.texts, *others]  # those of a sweep's jobs have a = in their names
    if not folders:
        raise ConfigError("rlkit report needs at least one run folder, or a folder with runs below it: rlkit report outputs/grpo/*")
    if wrong := [key for key in ("smooth", "limit") if not given.get(key, "0").isdigit()]:
        raise ConfigError(f"{wrong[0]}={given[wrong[0]]}: give a whole number, 0 or more")
    from rlkit.runs.report import write_report

    counts = {key: int(given[key]) for key in ("smooth", "limit") if key in given}
    print(write_report(folders, given.get("out"), **counts))
    return 0


# -------------------------------------------------------------------------------------------------------- replay


def replay_command(arguments: Arguments) -> int:
    """The failed update of a debug bundle, done again; 1 where it fails again."""
    from rlkit.commands.replay import replay

    named = option(arguments.overrides, "bundle")
    if named is None or drop(drop(arguments.overrides, "bundle"), "trust"):
        raise ConfigError("rlkit replay takes one debug bundle: rlkit replay bundle=outputs/NAME/TIME/debug/step_000007")
    text, fine = replay(Path(named).expanduser(), trusted=is_trusted(arguments.overrides))
    print(text)
    return 0 if fine else 1
