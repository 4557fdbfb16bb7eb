"""Run one training in one folder: load the policy, check it, train it, evaluate it, and write a
summary."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlkit.distributed import ranks
from rlkit.errors import Interrupted, RLKitError, describe_raise, name_error
from rlkit.system import owner
from rlkit.system.contents import PROMPTS
from rlkit.system.device import autocast, load_on_device, precision, silence_frameworks, versions
from rlkit.system.files import (
    LOST,
    put_aside,
    refuse_unwritable,
    report_write_errors,
    write_atomic,
    write_json,
)
from rlkit.system.processors import count_cores
from rlkit.system.redaction import redact_config
from rlkit.system.waiting import MAX_STEP_TIME, limit_waiting
from rlkit.tasks.splits import count_distinct, count_in_words
from rlkit.training.experiment import Experiment, describe_correction, describe_kl
from rlkit.types import Policy, Split, Splits

if TYPE_CHECKING:
    from rlkit.training.callbacks.evaluation import Results
    from rlkit.training.callbacks.faults import Watchdog
    from rlkit.training.module import RLModule
    from rlkit.training.selfcheck import Agreement


def train_in(
    x: Experiment,
    tasks: Splits,
    folder: Path,
    *,
    started: float,
    resume: Path | None,
    provenance: Mapping[str, Any] = MappingProxyType({}),
    again: Callable[[], Experiment] | None = None,
) -> tuple[dict[str, Any], RLModule]:
    """Train a run to its end in a folder.

    Returns: the summary, which is also written to the folder, and the module with the policy.
      `before` and `after` of the summary are evaluations on test problems. `validation` is the last
      evaluation during training.

    Args:
      x: the experiment.
      tasks: the problems of the experiment's splits (see `rlkit.config.problems.rows.load_tasks`).
      folder: the folder for all files; with `resume`, the folder of the run to continue.
      provenance: config, versions and git state of this process, for checkpoints and loggers.
      resume: a checkpoint, or a folder of checkpoints; the newest checkpoint of a folder is used.
        None starts a new run.
      started: time.perf_counter() at the start of the command.
      again: a function to build the experiment in a second process, for asynchrony=overlap
        (`rlkit.config.compose.make_builder`).
    Raises: ConfigError if `again` is needed and None.
    """
    from rlkit.training.ahead.modes import group_source

    LOST.clear()
    dogs: list[Watchdog] = []  # gets the trainer's watchdog as soon as there is a trainer
    with (
        limit_waiting(
            x.trainer.max_step_time, MAX_STEP_TIME, lambda: dogs[0].place() if dogs else ""
        ),
        group_source(x, tasks.train, again, folder=folder) as source,
    ):
        policy, device, agreement = prepare(x, tasks)
        # importing Lightning takes as long as everything else, so the first lines come before it
        from rlkit.episodes.record import keep_failed_rollout
        from rlkit.training.callbacks.faults import Watchdog
        from rlkit.training.module import RLModule

        module = RLModule(
            x,
            policy,
            tasks.train,
            source=source,
            exact=agreement.exact,
            mismatch_bound=agreement.bound,
        )
        module.provenance = dict(provenance)
        results: Results = {}
        if ranks.rank() == 0:
            begin_folder(folder, agreement.prompts)
        trainer, checkpoint = make_trainer(x, module, tasks, folder, results, device, resume=resume)
        dogs += [callback for callback in trainer.callbacks if isinstance(callback, Watchdog)]
        summary = {"ended": "failed", "seed": x.seed, "name": x.name}
        processor = time.process_time()
        # Exclude all present objects from garbage collection. Otherwise each collection would visit
        # half a million objects of the libraries and take a tenth of a small step.
        gc.freeze()
        try:
            with note_end(summary, module, trainer), keep_failed_rollout(folder):
                trainer.fit(module, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
                summary["ended"], summary["why"] = describe_end(module, results)
        finally:
            gc.unfreeze()
            if resume is None:  # the times of a resumed run's earlier processes are unknown
                summary["processor_seconds"] = round(time.process_time() - processor, 2)
                summary["wall_seconds"] = round(time.perf_counter() - started, 2)
            conclude(summary, module, folder, results, device=device)
    return summary, module


def begin_folder(folder: Path, prompts: str) -> None:
    """Write the policy's first prompts to the folder. If an earlier process has left a file with a
    failed rollout in the folder, move this file aside."""
    from rlkit.episodes.record import FAILED

    with report_write_errors(PROMPTS):
        write_atomic(folder / PROMPTS, prompts.encode(errors="backslashreplace"))
    with refuse_unwritable(folder):
        if (folder / FAILED).exists():
            put_aside(folder / FAILED, ".earlier")


@contextmanager
def note_end(summary: dict[str, Any], module: RLModule, trainer: Any) -> Iterator[None]:
    """Return a context manager that writes into the summary how its block ended: by an error or by
    a signal. A signal ends the block without an error.

    Raises: RLKitError if code of the run, for example a reward function, tried to end the process.
    """
    from rlkit.training.callbacks.stopping import StopOnSignal

    try:
        yield
    except Interrupted as signal:
        summary |= {"ended": "interrupted", "signal": str(signal), "status": signal.status}
    except (KeyboardInterrupt, SystemExit) as error:
        summary["ended"] = "interrupted"
        # StopOnSignal handles Ctrl-C, so this KeyboardInterrupt does not come from the user
        if any(isinstance(c, StopOnSignal) and c.module is not None for c in trainer.callbacks):
            what = describe_raise(error)
            summary["ended"] = f"failed: {what}"
            raise RLKitError(
                f"{what} ended the run in step {module.rl_step + 1}; no part of a run may do that"
            ) from error
    except BaseException as error:
        summary["ended"] = f"failed: {name_error(error)}"
        raise


def ready(x: Experiment, tasks: Splits) -> tuple[Policy, Any, bool]:
    """Seed the generators, load and check the policy of a run, and print a header.

    Returns: the policy, its device, and whether the engine gives exactly the trainer's log-probs on
      all ranks.
    Raises: ConfigError, SelfCheckError, DataError.
    """
    policy, device, agreement = prepare(x, tasks)
    return policy, device, agreement.exact


def prepare(x: Experiment, tasks: Splits) -> tuple[Policy, Any, Agreement]:
    """Do the same as `ready`, but return the whole result of the check (`Agreement`). Its field
    `exact` is True only if all ranks have found exact log-probs."""
    print(format_first_line(x), flush=True)
    import rich.style  # noqa: F401  # imported before seeding: the import draws from Python's generator

    from rlkit.system import rng
    from rlkit.training.activations import settle_activations
    from rlkit.training.kernels import settle_kernels
    from rlkit.training.selfcheck import check_policy, check_teacher
    from rlkit.training.update.claims import unchecked_line
    from rlkit.training.windows import describe_windows

    silence_frameworks()
    # for the start of adapters and for rewards and environments; sampling seeds itself
    rng.seed(x.seed)
    check_teacher(x)
    policy, device = load_on_device(x)
    print(format_header(x, policy, device, tasks), flush=True)
    if x.asynchrony.mode == "overlap":
        print(process_in_words(x, device), flush=True)
    activations = settle_activations(x, policy, tasks.train, device)
    if activations:
        print(activations, flush=True)
    with autocast(x, device):
        agreement = check_policy(policy, tasks.train, x)
        sharded = x.trainer.strategy == "fsdp" and ranks.size() > 1
        kernels = settle_kernels(x.generation.engine, policy.model, sharded=sharded)
    print(f"{agreement.tools}{kernels}", flush=True)
    exact = not ranks.any_rank(not agreement.exact)  # all ranks get the same answer
    lines = [
        unchecked_line(x.generation.engine, policy.model, shards=sharded),
        describe_windows(x, policy, tasks.train),
        *(f"warning: {line}" for line in agreement.warnings),
        describe_correction(x, exact=exact),
    ]
    for line in filter(None, lines):
        print(line, flush=True)
    return policy, device, agreement._replace(exact=exact)


def process_in_words(x: Experiment, device: Any) -> str:
    """Return a line about the sampling process of asynchrony=overlap: its threads, and whether it
    rounds sums in the same way as the trainer."""
    import torch

    own = x.asynchrony.sampler.threads
    trainer = torch.get_num_threads()
    ahead = f"{x.asynchrony.staleness} step(s) ahead"
    line = f"sampling: in a second process with {own} thread(s), {ahead}"
    if device.type == "cpu" and own != trainer:
        line += (
            f"; the trainer has {trainer}, so last bits differ from asynchrony=lag unless"
            f" trainer.threads={own}"
        )
    return line


def conclude(
    summary: dict[str, Any],
    module: Any,
    folder: Path,
    results: Mapping[Split, Mapping[int, Mapping[str, Any]]],
    *,
    device: Any,
) -> None:
    """Complete the summary of a run: add the final metrics, and the names of files that could not
    be written. Write summary.json and metrics.csv.

    Args:
      results: split → RL step → result of the evaluation.
    """
    from rlkit.sandbox import get_known_level
    from rlkit.system.rows import export_csv
    from rlkit.training.kernels import record_choices
    from rlkit.training.metrics import peak_memory

    validation = results.get("validation", {})
    test = results.get("test", {})
    summary |= {
        "before": test.get(0),
        "after": test.get(module.rl_step) if module.rl_step else None,
        "validation": (
            {**validation[max(validation)], "step": max(validation)} if validation else None
        ),
        "steps": module.rl_step,
        "tokens": module.tokens,
        "identity": module.provenance.get("identity"),
        "peak_memory_gb": round(peak_memory(device), 3),
        "device": str(device),
        **record_choices(module.experiment.generation.engine, module.policy.model),
        "versions": versions(),
        "sandbox": str(level) if (level := get_known_level()) else None,
    }
    writes = ranks.rank() == 0 and not owner.explain_loss(folder)
    if writes:
        with report_write_errors("metrics.csv"):
            export_csv(folder / "metrics.jsonl")
    summary |= list_missing()
    if summary["unsaved"] and summary["ended"] == "finished":
        summary["ended"] = f"failed: {summary['unsaved']}"
    if writes:
        with report_write_errors("summary.json"):
            write_json(folder / "summary.json", redact_config(summary))


def list_missing() -> dict[str, Any]:
    """Return two entries of the summary. `unsaved` is a sentence that says why the result of the
    run is incomplete, or None. `lost` names all other files that could not be written, each with
    the reason."""
    from rlkit.training.callbacks.checkpoints import RESULT

    lost = dict(LOST)
    unsaved = [f"{what} could not be written ({lost.pop(what)})" for what in LOST if what in RESULT]
    return {"unsaved": "; ".join(unsaved) or None, "lost": lost}


def describe_end(
    module: Any, results: Mapping[Split, Mapping[int, Mapping[str, Any]]]
) -> tuple[str, str]:
    """Return how the run ended, and why. A run is "finished" if all steps are done or the target is
    reached. It is "out of time" if trainer.max_time is over; the run can then be resumed. In all
    other cases the run is "interrupted"."""
    x = module.experiment
    target = x.evaluation.stop_at
    last = results.get("validation", {}).get(module.rl_step)
    if target is not None and last is not None and last["accuracy"] >= target:
        reached = f"{last['accuracy']:.3f} reached evaluation.stop_at={target:g}"
        return "finished", f"validation accuracy {reached}"
    if module.rl_step >= module.total_steps:
        return "finished", ""
    if module.is_out_of_time():
        return "out of time", f"trainer.max_time={x.trainer.max_time:g} minutes are over"
    return "interrupted", ""


def make_trainer(
    x: Experiment,
    module: Any,
    tasks: Splits,
    folder: Path,
    results: dict[Split, Any],
    device: Any,
    *,
    resume: Path | None,
) -> tuple[Any, Path | None]:
    """Make the Lightning trainer with rlkit's callbacks. Return it together with the checkpoint to
    continue from, or None."""
    import lightning as L

    from rlkit.distributed.strategies import list_cluster_plugins, make_strategy
    from rlkit.training.callbacks.checkpoints import AtomicCheckpointIO
    from rlkit.training.loggers import make_tolerant

    path = None
    step = 0
    if resume is not None:
        with refuse_unwritable(folder):
            identity = module.provenance.get("identity", "")
            path, step = ranks.broadcast(lambda: take_up(resume, folder, identity))
        begins = f"{resume} holds no checkpoint yet; the run starts from its beginning"
        print(f"resume: {f'{path}, after step {step}' if path else begins}", flush=True)
    with refuse_unwritable(folder):
        makers = x.logger.values() if ranks.rank() == 0 else ()
        loggers = [make_tolerant(make(folder, step)) for make in makers]
    trainer = L.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=x.trainer.devices,
        num_nodes=x.trainer.nodes,
        strategy=make_strategy(x.trainer),
        precision=precision(x, device),  # type: ignore[arg-type]
        max_epochs=-1,  # the module itself stops after trainer.steps or trainer.max_time
        min_epochs=0,
        default_root_dir=folder,  # otherwise Lightning takes the working directory
        log_every_n_steps=1,
        logger=loggers or False,
        callbacks=list_callbacks(x, tasks, folder, results),
        plugins=[AtomicCheckpointIO(), *list_cluster_plugins()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        inference_mode=False,
    )
    return trainer, path


def list_callbacks(
    x: Experiment, tasks: Splits, folder: Path, results: dict[Split, Any]
) -> list[Any]:
    """List rlkit's own callbacks and the experiment's callbacks, in the order in which they are
    called."""
    from rlkit.training.callbacks.checkpoints import RLCheckpoint
    from rlkit.training.callbacks.evaluation import HeldOut
    from rlkit.training.callbacks.faults import DebugBundle, Watchdog
    from rlkit.training.callbacks.metrics import ChoicesNoted, MetricsFile, Ownership
    from rlkit.training.callbacks.stopping import StopOnSignal

    metrics = folder / "metrics.jsonl"
    first = [StopOnSignal(), Ownership(folder), DebugBundle(folder), Watchdog()]
    first += [ChoicesNoted(folder), HeldOut(tasks, metrics, results), MetricsFile(metrics)]
    callbacks = [*first, *(make(folder) for make in x.callbacks.values())]
    # The row is written after every callback has added to it. The checkpoint comes last, because it
    # states that all files of its step are written.
    callbacks.sort(key=lambda own: (isinstance(own, RLCheckpoint), isinstance(own, MetricsFile)))
    return callbacks


def take_up(resume: Path, folder: Path, identity: str) -> tuple[Path | None, int]:
    """Return the checkpoint to continue a run from, and its RL step. Files from later steps and
    files of other runs are set aside.

    Args:
      resume: a checkpoint, or a folder of checkpoints.
      folder: the folder of the run.
      identity: the identity of the run in the folder.
    Raises: DataError if no checkpoint can be read, or if the checkpoint belongs to another run.
    """
    from rlkit.episodes.completions import cut_completions
    from rlkit.system import shards
    from rlkit.system.contents import set_others_aside
    from rlkit.system.rows import cut_back
    from rlkit.training.callbacks.checkpoints import (
        SUFFIX,
        list_checkpoints,
        load_checkpoint,
        refuse_foreign,
        set_foreign_aside,
        supersede,
    )

    path = None
    step = -1
    rows = None
    if resume.suffix == SUFFIX or list_checkpoints(
        resume
    ):  # else the run was killed before its first checkpoint
        path, state = load_checkpoint(resume)
        refuse_foreign(path, state, folder, identity)
        step = state["rlkit"]["rl_step"]
        set_foreign_aside(folder, identity)
        supersede(folder / "checkpoints", step)
        set_others_aside(folder, state["written"]["files"], step)
        rows = state["written"]["rows"]
    cut_back(folder / "metrics.jsonl", step, rows)
    for name in ("rollouts", "held_out/validation", "held_out/test"):
        shards.cut_steps(folder / name, step)
    cut_completions(folder / "completions", step)
    shards.cut_samples(folder / "samples", step)
    return path, max(step, 0)


def format_first_line(x: Experiment) -> str:
    """Describe the experiment in one line. This line is printed before the model is loaded."""
    from rlkit.training.schedules import list_phases

    x = next(iter(list_phases(x).values()))  # the first phase of the run
    return (
        f"rlkit: {x.algorithm.name}, kl {describe_kl(x)}, reward {x.reward.name}, "
        f"reference {x.reference.name if x.needs_reference else 'none'}, seed {x.seed}"
    )


def format_header(x: Experiment, policy: Any, device: Any, tasks: Splits) -> str:
    """Return lines about the model, the device, the data and the size of the batch."""
    import torch

    from rlkit.sandbox import get_known_level
    from rlkit.training.schedules import list_phases

    named = list_phases(x)
    x = next(iter(named.values()))  # the first phase of the run
    path = x.model.path or "a function"
    total = sum(p.numel() for p in policy.model.parameters())
    trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    rollouts = x.batch.prompts * x.batch.group_size
    updates = x.algorithm.epochs * x.algorithm.minibatches
    per_update = rollouts // x.algorithm.minibatches
    on = (
        f"{device} with {torch.get_num_threads()} thread(s) of {count_cores()} core(s)"
        if device.type == "cpu"
        else str(device)
    )
    named_tasks = zip(("training", "validation", "test"), tasks, strict=True)
    counts = [
        f"{count_in_words(len(own), count_distinct(own))} {name}"
        for name, own in named_tasks
        if own
    ]
    batch = (
        f"batch: {x.batch.prompts} prompts × {x.batch.group_size} samples → {updates} update(s) of"
        f" {per_update} rollouts a step, {x.trainer.steps} steps"
    )
    if x.schedule.paths:
        batch += f"; scheduled: {', '.join(x.schedule.paths)}"
    lines = [
        f"model: {path}, {trained:,} of {total:,} parameters trained, on {on}, precision"
        f" {precision(x, device)}",
        f"data: {', '.join(counts)} problems",
        batch,
    ]
    if len(named) > 1:
        in_order = (f"{name} ({phase.algorithm.name})" for name, phase in named.items())
        lines.append(f"phases: {' → '.join(in_order)}")
    return "\n".join(
        [*lines, str(get_known_level() or "sandbox: no reward and no tool asks for one")]
    )
