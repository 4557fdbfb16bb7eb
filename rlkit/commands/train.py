"""`rlkit train`: compose and check a run, train it in its folder as a Hydra job, and print its
results."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit.commands.arguments import STARTED, Arguments, append_overrides, drop, find_option
from rlkit.commands.compare import list_suspicions
from rlkit.commands.trust import make_asker
from rlkit.config.changes import find_differences, identify, refuse_changes
from rlkit.config.functions import quote
from rlkit.distributed import launch, ranks
from rlkit.errors import ConfigError, NonFinite, Refusal, report
from rlkit.runs import folder as runs
from rlkit.system import extras, owner
from rlkit.system.contents import clear_places, set_aside
from rlkit.system.device import versions
from rlkit.system.files import LOST, refuse_unwritable, report_write_errors
from rlkit.system.shared_state import FOLDER, guard_state
from rlkit.training.run import train_in

if TYPE_CHECKING:
    from rlkit.config.compose import Composed
    from rlkit.training.experiment import Experiment, TrainerSettings

SHOWN = 6  # unwritten files named at the end of a run


def command(arguments: Arguments) -> int:
    """Train a policy. Everything that needs no model is checked first; then the run trains in a new
    folder outputs/NAME/TIME. outputs/latest is a link to the newest run.

    GROUP=OPTION            an option of a group, such as algorithm=dapo or kl=none; rlkit --help
                            lists them
    KEY=VALUE               a value, such as optimizer.lr=3e-4; rlkit show lists the keys that
                            matter
    reward=MODULE.FUNCTION  a reward of your own, a function of a rollout; [A,B] several
    environment.tools=MODULE.FUNCTION  the tools of environment=tool_use; [A,B] several
    resume=FOLDER           continue that run; auto: the newest unfinished one with this config
    trainer.steps=N         length of the run
    seed=N                  seed of everything random
    name=NAME               the folder is outputs/NAME/TIME
    -m                      a sweep: every combination of values such as seed=1,2, one process each
    --config FILE           overrides from a YAML file
    --config-dir DIR        a folder with options of your own
    --cfg job               print the composed config, without a run

        rlkit train algorithm=dapo kl=none trainer.steps=50
        rlkit train -m algorithm=grpo,reinforce seed=1,2
    """
    if arguments.multirun:
        from rlkit.runs.sweeps import sweep

        return sweep(
            arguments.overrides,
            config_dir=arguments.config_dir,
            report=draw_page,
        )
    from rlkit.config.compose import compose, experiment, find_length_keys
    from rlkit.training.loggers import check_loggers

    overrides = arguments.overrides
    named = find_option(overrides, "resume")
    folder = _find_given_folder(overrides)
    resume: Path | None = None
    ask = None
    if named and named not in ("never", "auto"):
        folder = runs.find_run(named, "resume")
        resume = runs.find_checkpoint(named, folder)
        runs.require_overrides(folder)
        require_secrets(named, folder, overrides)
        mine = [*drop(overrides, "resume"), f"resume={quote(named)}"]
        ask = make_asker(f"resume={named}", folder, mine, arguments, entry="train")
        overrides = append_overrides(runs.read_overrides(folder), mine)
    outputs = runs.OUTPUTS.absolute()  # before any code of the user runs
    composed = compose(overrides, config_dir=arguments.config_dir, before_import=ask)
    x = experiment(composed)
    check_loggers(x.logger)
    if launch.must_start(x.trainer.devices, x.trainer.nodes):
        return launch.start_ranks(
            [sys.executable, "-m", "rlkit", "train", *arguments.words], x.trainer.devices
        )
    join_ranks(x.trainer)

    if named == "auto":
        folder = ranks.broadcast(
            lambda: (
                folder
                or runs.find_unfinished_run(
                    x.name, composed.config, beside=find_length_keys(composed)
                )
            )
        )
        if folder is not None and has_finished(folder, composed.config, x.trainer.steps):
            refuse_changes(folder, find_differences(runs.read_config(folder), composed.config))
            print(f"{runs.shorten_path(folder)}: finished already; nothing to do")
            ranks.leave()
            return 0
        resume = folder / "checkpoints" if folder is not None and runs.is_run(folder) else None
        if resume is None and ranks.rank() == 0:
            print("resume=auto: no run with this config is unfinished; a new one begins")
    status = _train_owned(x, composed, folder, resume, outputs)
    if status == 0:
        ranks.leave()
    return status


def has_finished(folder: Path, config: dict, steps: int) -> bool:
    """Return whether the run in a folder has finished, and has no step left with this config."""
    summary = runs.read_summary(folder) or {}
    done = summary.get("ended") == "finished" and (summary.get("steps") or 0) >= steps
    return done or has_reached(folder, config, summary)


def has_reached(folder: Path, config: dict, summary: dict[str, Any]) -> bool:
    """Return whether the run in a folder ended at its target, `evaluation.stop_at`, and this config
    has the same target."""
    if summary.get("ended") != "finished" or not summary.get("why"):
        return False
    return runs.read_config(folder)["evaluation"]["stop_at"] == config["evaluation"]["stop_at"]


def _find_given_folder(overrides: Sequence[str]) -> Path | None:
    """Find the run folder named on the command line. Raises: ConfigError for an impossible name."""
    place = find_option(overrides, "hydra.run.dir")
    if not place:
        return None
    with refuse_unwritable(place):
        Path(place).exists()  # raises if the name is too long
    return Path(place).absolute()


def _train_owned(
    x: Experiment, composed: Composed, folder: Path | None, resume: Path | None, outputs: Path
) -> int:
    """Own the run's folder, or a new folder in `outputs` for None, and train as a Hydra job. Return
    the exit status."""
    from rlkit.config.problems.doubts import list_warnings
    from rlkit.config.problems.rows import load_tasks

    with ExitStack() as owning:

        def own(run: Path) -> Path:
            return ranks.broadcast(
                lambda: owning.enter_context(owner.own_folder(run, takeover=x.takeover)) or run
            )

        identity = ""
        known = folder is not None and runs.is_run(folder)
        if folder is not None and known:
            identity = check_continues(own(folder), composed.config, x.trainer.steps, resume)
        elif folder is not None:
            runs.refuse_leftovers(folder)
        tasks = load_tasks(x)
        for line in list_warnings(x, composed.overrides, tasks):
            print(f"warning: {line}")
        # one folder for all ranks; by now they have read its files
        target = ranks.broadcast(
            lambda: (
                folder
                or runs.make_fresh_folder(
                    outputs / x.name, runs.describe_overrides(composed.overrides, x.name)
                )
            )
        )
        occupied = not known and target.is_dir() and any(target.iterdir())  # by the user's files
        ranks.broadcast(lambda: runs.require_writable(target))
        if not known:
            own(target)
        former = None
        if folder is None and ranks.rank() == 0:
            former = runs.point_latest(outputs, target)
        ranks.broadcast(lambda: note_start(target, composed, identity))

        def job() -> int:
            return run_in_folder(x, composed.config, tasks, target, started=STARTED, resume=resume)

        status = run_in_hydra(composed, target, job) if ranks.rank() == 0 else job()
        if status == 2 and not known and ranks.rank() == 0 and not owner.explain_loss(target):
            remove_start(target, whole=not occupied)
            if folder is None:
                runs.point_latest(outputs, former, instead_of=target)
    return status


def require_secrets(named: str, folder: Path, overrides: Sequence[str]) -> None:
    """Raise ConfigError if an override of the run held a secret and is not given again, because no
    run folder keeps a secret."""
    missing = [
        key for key in runs.list_withheld_keys(folder) if find_option(overrides, key) is None
    ]
    if missing:
        raise ConfigError(
            f"resume={named}: {missing[0]} held a secret, and no run folder keeps one; give it"
            f" again, as {missing[0]}=VALUE or better as {missing[0]}='${{oc.env:NAME}}'"
        )


def note_start(folder: Path, composed: Composed, identity: str) -> None:
    """Add this process to run.json, before Hydra writes its files, and print the changes since the
    previous process.

    Args:
      identity: identity of the continued run; empty for a new run.
    Raises: ConfigError.
    """
    config = composed.config
    overrides = [str(text) for text in composed.full.hydra.overrides.task]
    with refuse_unwritable(folder):
        # an earlier process ended before it wrote config.yaml
        if not identity and (folder / "run.json").exists():
            set_aside(folder, "run.json")
        said = runs.write_start(
            folder, config, versions(), identity=identity or identify(config), overrides=overrides
        )
    for line in said:
        print(f"resume: {line}", flush=True)


def remove_start(folder: Path, *, whole: bool) -> None:
    """Remove the files that a refused run wrote before its first row; remove the whole folder if it
    was empty before."""
    if (folder / "metrics.jsonl").exists():
        return
    if whole:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for name in (
        "config.yaml",
        "run.json",
        *(f".hydra/{name}.yaml" for name in ("config", "hydra", "overrides")),
    ):
        with suppress(OSError):
            (folder / name).unlink()
    with suppress(OSError):
        (folder / ".hydra").rmdir()


def check_continues(folder: Path, config: dict, steps: int, resume: Path | None) -> str:
    """Print the changes since the run in `folder` was started. Return the run's identity.

    Raises: ConfigError if the run cannot continue with them. DataError if a file with the run's
      identity was damaged or exchanged, or if the run has trained and has no checkpoint left.
    """
    if resume is None:
        raise ConfigError(
            f"{folder} already holds a run, and a run is never overwritten; continue it with"
            f" resume={folder}, or choose another folder"
        )
    ranks.broadcast(lambda: clear_places(folder))
    identity = ranks.broadcast(lambda: runs.require_identity(folder))
    if not resume.name.endswith(".ckpt"):
        runs.refuse_restart(folder)
    changed = find_differences(runs.read_config(folder), config)
    refuse_changes(folder, changed)
    for key, (was, now) in changed.items():
        print(f"resume: {key} was {was} and is now {now}")
    summary = ranks.broadcast(lambda: read_own_summary(folder))
    done = 0 if summary.get("unsaved") else summary.get("steps") or 0
    if resume.is_dir() and done >= steps:
        raise ConfigError(
            f"{folder} has done all of its {done} steps, by its summary.json; to continue, raise"
            f" trainer.steps, as in trainer.steps={2 * done}"
        )
    if resume.is_dir() and has_reached(folder, config, summary):
        raise ConfigError(
            f"{folder} reached its target after {done} steps ({summary['why']}); to continue, set"
            " evaluation.stop_at=null"
        )
    return identity


def read_own_summary(folder: Path) -> dict[str, Any]:
    """Read summary.json of the continued run. A damaged file, or the file of another run, is moved
    to aside/, and a line about it is printed."""
    summary = runs.read_summary(folder)
    if summary is None and (folder / "summary.json").exists():
        print(
            "resume: summary.json is not what this run wrote, and is kept as"
            f" {set_aside(folder, 'summary.json')}",
            flush=True,
        )
    return summary or {}


def run_in_hydra(composed: Composed, folder: Path, job: Callable[[], int]) -> int:
    """Run a job as Hydra's main does, with the composed config: with .hydra/ in its folder, with
    Hydra's state, and with its callbacks."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.utils import run_job
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from rlkit.config.compose import hydra_context

    config = composed.full
    place = config.hydra.output_subdir
    config.hydra.run.dir = str(folder)
    config.hydra.mode = RunMode.RUN
    # these files are written here: each completely, without secrets, and noted as the user's own
    config.hydra.output_subdir = None

    def work(task: Any) -> int:
        own = HydraConfig.instance().cfg
        parts = {
            "config.yaml": task,
            "hydra.yaml": own,
            "overrides.yaml": config.hydra.overrides.task,
        }
        with refuse_unwritable(folder):
            for name, part in parts.items() if place else ():
                runs.write_hydra(folder, f"{place}/{name}", OmegaConf.to_yaml(part))
        return job()

    with hydra_context(config) as context:
        context.callbacks.on_run_start(config=config, config_name="train")
        done = run_job(work, config, "hydra.run.dir", None, hydra_context=context)
        context.callbacks.on_run_end(config=config, config_name="train", job_return=done)
        return done.return_value


def run_in_folder(
    x: Experiment,
    config: Mapping[str, Any],
    tasks: Any,
    folder: Path,
    *,
    started: float,
    resume: Path | None,
) -> int:
    """Run a job in a folder, print its results, and return the exit status. If the run is refused,
    remove everything it has added."""
    from rlkit.config.compose import make_builder

    fresh = resume is None
    try:
        with refuse_unwritable(folder):
            provenance = ranks.broadcast(lambda: runs.read_start(folder))
            if ranks.rank() == 0 and fresh:
                runs.write_config(folder, config, provenance["identity"], new=True)
            elif ranks.rank() == 0:
                runs.cover_overrides(folder)
        with guard_state(x, kinds=[FOLDER]):
            summary, _ = train_in(
                x,
                tasks,
                folder,
                started=started,
                resume=resume,
                provenance=provenance,
                again=make_builder(config),
            )
    except Exception as error:
        if isinstance(error, NonFinite):  # every rank raises it, and rank 0 writes the debug bundle
            ranks.broadcast(lambda: None)
        return report(error, f"run folder: {runs.shorten_path(folder)}")
    if ranks.rank() == 0:
        with report_write_errors("config.yaml"):
            # a resumed run writes it only after it has continued with this config
            runs.write_config(folder, config, provenance["identity"])
    print(format_closing_lines(summary, folder), flush=True)
    ranks.broadcast(lambda: None)  # a rank that ends makes the launcher stop the others
    return _exit_status(x, summary, folder)


def _exit_status(x: Experiment, summary: Mapping[str, Any], folder: Path) -> int:
    """Return the exit status of a finished run. If SLURM interrupted the run and the trainer's
    settings ask for it, queue the job again."""
    if summary["ended"] == "interrupted":
        if (
            ranks.rank() == 0
            and x.trainer.requeue
            and "signal" in summary
            and summary["signal"] != "SIGINT"
        ):
            from rlkit.training.callbacks.stopping import requeue

            owner.release(folder)  # SLURM may end this process as soon as it gets the request
            requeue()
        return 1 if LOST else summary.get("status", 130)
    return 1 if LOST else 0


def _compare_tests(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Write the table of test results before and after training. The first line says if they got
    worse by more than chance."""
    from rlkit.runs.comparing import estimate, newcombe
    from rlkit.training.callbacks.terminal import describe_sampling

    lines = []
    sides = (estimate(side["accuracy"], side["interval"]) for side in (before, after))
    if newcombe(*sides).high < 0:
        said = f"test accuracy {before['accuracy']:.3f} → {after['accuracy']:.3f}"
        lines.append(f"warning: this run ended below its start: {said}")
    lines += [f"{'test':<22}{'before':>16}{'after':>16}", "-" * 54]
    named = [("accuracy", "interval")]
    # otherwise the reward is the accuracy
    if any(r["reward"] != r["accuracy"] for r in (before, after)):
        named.append(("reward", "reward_interval"))
    for name, interval in named:
        lines.append(f"{name:<22}{before[name]:>16.3f}{after[name]:>16.3f}")
        spans = [f"{r[interval][0]:.3f} – {r[interval][1]:.3f}" for r in (before, after)]
        lines.append(f"{'95 % interval':<22}{spans[0]:>16}{spans[1]:>16}")
    lines.append(f"{'problems':<22}{before['n']:>16}{after['n']:>16}")
    distinct = [r["distinct"] for r in (before, after)]
    if distinct != [before["n"], after["n"]]:
        lines.append(f"{'of these distinct':<22}{distinct[0]:>16}{distinct[1]:>16}")
    cut = [r.get("truncated", 0.0) for r in (before, after)]  # absent in older run folders
    if any(cut):  # some of the gain may be that replies end
        lines.append(f"{'episodes cut off':<22}{cut[0]:>16.3f}{cut[1]:>16.3f}")
    for part, own in after.get("parts", {}).items():
        was = before.get("parts", {}).get(part)
        cells = [f"{r['accuracy']:>16.3f}" if r else f"{'-':>16}" for r in (was, own)]
        lines.append(f"{f'accuracy, {part}':<22}{''.join(cells)}")
    return [
        *lines,
        f"{'replies':<22}{describe_sampling(before['temperature']):>32}",
        f"{'right answers by':<22}{'evaluation.reward':>32}",
    ]


def format_closing_lines(summary: Mapping[str, Any], folder: Path) -> str:
    """Write the last lines of a run: the table of test results, the folder, and commands to try
    next."""
    where = shlex.quote(runs.shorten_path(folder))
    lines = [""]
    before = summary.get("before")
    after = summary.get("after")
    if before and after:
        lines += [*_compare_tests(before, after), ""]
    why = summary.get("why", "")
    seconds = summary.get("wall_seconds")  # absent in a resumed run
    took = "" if seconds is None else f" {seconds:.0f} s,"
    lines.append(
        f"{summary['ended']} after {summary['steps']} steps,{took} {summary['tokens']:,} tokens"
    )
    lines += [why] if why else []
    lines += [f"warning: {text}" for text in list_doubts(folder)]
    lines += list_suspicions([folder])
    if LOST:
        named = [
            f"{what} ({why})"
            for what, why in LOST.items()
            if f"{what} could not be written" not in summary["ended"]
        ]
        more = f"; and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
        lines += [f"not written: {'; '.join(named[:SHOWN])}{more}"] if named else []
    longer = f" trainer.steps={2 * summary['steps']}" if summary["ended"] == "finished" else ""
    longer = f" evaluation.stop_at=null{longer}" if longer and why else longer
    saved = any((folder / "checkpoints").glob("*.ckpt"))
    lines += [
        f"run folder       {runs.shorten_path(folder)}",
        "next:",
        *(
            [f"  curves         tensorboard --logdir {where}"]
            if (folder / "tensorboard").is_dir()
            else []
        ),
        *(
            f"  {name:<15}rlkit {name} {where}"
            for name in ("report", "why")
            if extras.has_command(name)
        ),
        f"  conversations  less {where}/samples/*",
        (
            f"  resume         rlkit train resume={where}{longer}"
            if saved
            else "  (nothing to resume: it ended before its first checkpoint)"
        ),
    ]
    return "\n".join(lines)


def draw_page(folders: Sequence[Path], file: Path) -> None:
    """Print why a sweep's runs may not learn. Let the command `report` write a page about the runs,
    and print its path."""
    for line in list_suspicions(folders):
        print(line)
    print("report           ", end="", flush=True)
    report = extras.load_command("report")
    if report is None:
        print("none: the command 'report' is missing; it is in the extra 'report'")
        return
    try:
        report(Arguments([f"out={file}"], texts=tuple(map(str, folders))))
    except Refusal as error:
        print(f"none: {error}")


def list_doubts(folder: Path) -> list[str]:
    """List harmful drifts over the whole run, and for each warning printed only once the number of
    its steps. A warning that the last third of the steps did not show again is over."""
    from rlkit.runs.reading import read_run
    from rlkit.runs.trends import find_symptoms

    try:
        run = read_run(folder)
    except OSError:  # a failing disk is named elsewhere
        return []
    found = find_symptoms(run)
    drifted = [f.text for f in found if not f.steps]
    return drifted + [
        f"{f.text} (step {f.steps[0]}, the first of {len(f.steps)})"
        for f in found
        if len(f.steps) > 1 and 3 * f.steps[-1] > 2 * run.rows[-1]["step"]
    ]


def join_ranks(settings: TrainerSettings) -> None:
    """Make this process a rank if the settings ask for several. Raises: ConfigError if the ranks
    were not started."""
    import torch

    count = settings.devices * settings.nodes
    if count == 1 or ranks.size() > 1:
        return
    if not launch.is_started_outside(os.environ, settings.devices, settings.nodes):
        raise ConfigError(
            f"trainer.nodes={settings.nodes}: processes on other machines have to be started from"
            f" outside: srun --ntasks={count} --ntasks-per-node={settings.devices} rlkit train …,"
            f" or torchrun --nnodes={settings.nodes} --nproc-per-node={settings.devices} … -m rlkit"
            " train …"
        )
    launch.adopt_slurm()
    cuda = settings.accelerator != "cpu" and torch.cuda.is_available()
    if cuda and settings.devices > torch.cuda.device_count():
        raise ConfigError(
            f"trainer.devices={settings.devices}: this machine has {torch.cuda.device_count()}"
            " GPU(s); lower it"
        )
    ranks.join(count, cuda=cuda, timeout=settings.timeout)
