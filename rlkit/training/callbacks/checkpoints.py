"""Write checkpoints between RL steps. Lightning's own checkpoint callback counts optimizer steps
and not RL steps."""

from __future__ import annotations

import errno
import math
import os
import pickle
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from rlkit.distributed import ranks
from rlkit.errors import DataError, Interrupted, warn
from rlkit.models.save import save_policy
from rlkit.system import owner
from rlkit.system.adapters import has_adapters
from rlkit.system.contents import APPENDED, METRICS, Hashed, list_files, measure_files, set_aside
from rlkit.system.digest import find_damage, lists_every_file, seal
from rlkit.system.files import (
    LOST,
    convert_write_errors,
    is_json,
    open_atomically,
    open_regular,
    put_aside,
    reason,
    report_write_errors,
    sync,
    write_json,
)
from rlkit.system.rows import WAITING
from rlkit.system.sharding import find_sharded_modules
from rlkit.training.callbacks.metrics import check_ownership

PREFIX = "step_"
SUFFIX = ".ckpt"
SUPERSEDED = ".superseded"
DAMAGED = ".damaged"
BEST = "best.ckpt"  # a link to the checkpoint with the best metric
ADAPTER = ".adapter"  # suffix of the folder beside a checkpoint, with its adapters for PEFT
# after a failed save, the list of lost files holds this name until a save succeeds
CHECKPOINT = "the newest checkpoint"
# a run without these files is incomplete; all other files are only a record of the run
RESULT = (CHECKPOINT, "model/", "model_best/", "metrics.jsonl")
# errors that `torch.load` raises for a damaged file
UNREADABLE = (RuntimeError, OSError, EOFError, KeyError, ValueError, pickle.UnpicklingError)
SPARE = 1 << 20  # bytes of the disk that a save leaves free for metrics and the summary


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write a checkpoint and its digest to a file beside the target, then rename the file.
    Lightning's own class writes through the system's temporary folder instead."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        need = _size(checkpoint) + SPARE
        free = shutil.disk_usage(path.parent).free
        if free < need:
            raise OSError(
                errno.ENOSPC,
                f"No space left on device: {need / 2**20:,.0f} MiB needed, {free / 2**20:,.0f} MiB"
                " free",
            )
        with convert_write_errors(), open_atomically(path) as file:
            seal(file, lambda out: torch.save(checkpoint, out))
            # another process may have taken over the folder while the checkpoint was written
            owner.check_path(path)


def _size(value: Any) -> int:
    """Return the bytes of all tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0


class RLCheckpoint(L.Callback):
    """Save a checkpoint after every `every` RL steps, after the last step, and on a signal. The
    newest `keep` checkpoints and the best checkpoint by a metric stay.

    This callback runs after every other callback. Therefore all files of a step are written before
    the checkpoint states that the step is done. A failed save is reported, and the run continues.
    An old checkpoint is removed only after a newer checkpoint is complete. With several ranks the
    first rank writes, and then tells all ranks whether it succeeded.
    """

    def __init__(
        self,
        run: Path,
        *,
        every: int,
        keep: int,
        best: str | None = None,
        mode: str = "max",
        model: bool = True,
    ):
        self.run = run
        self.folder = run / "checkpoints"
        self.every = every
        self.keep = keep
        self.metric = best
        self.mode = mode
        self.model = model
        self.best: dict[str, Any] = {}  # step, name and value of the best metric so far
        self.measured: dict[str, Hashed] = {}  # the run's other files at the last checkpoint

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]

    def on_save_checkpoint(
        self, trainer: L.Trainer, module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """List the files of the run in the checkpoint, so that a resumed run recognises them. Every
        other callback has written its files by now."""
        if trainer.is_global_zero:
            self.measured = measure_files(self.run, self.measured)
            checkpoint["written"] = list_files(self.run, self.measured)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        before = self.best
        if self.has_improved(module) or module.rl_step % self.every == 0 or trainer.should_stop:
            self.best = self.best if self.save(trainer, module) else before

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.is_global_zero:
            # the run may have been killed after writing a checkpoint and before making its link
            self.try_write(BEST, self.point)

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        if isinstance(exception, Interrupted):
            module.drop_step()
            if module.rl_step and not ranks.broadcast(self.path(module).exists):
                self.save(trainer, module)

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        reached = module.experiment.evaluation.is_reached(module.metrics)
        if not self.model or (module.rl_step < module.total_steps and not reached):
            return
        check_ownership(self.run)
        state = gather_policy(module.model)

        def write_last() -> None:
            save_policy(self.run / "model", module.policy, state=state)

        def write_best() -> None:
            if self.best:
                identity = module.provenance.get("identity", "")
                best = read_weights(self.folder / BEST, self.run, identity)
                save_policy(self.run / "model_best", module.policy, state=best)

        self.try_write("model/", lambda: ranks.broadcast(write_last), "model/")
        self.try_write("model_best/", lambda: ranks.broadcast(write_best), "model_best/")

    def has_improved(self, module: Any) -> bool:
        """Return whether the step has a value of the metric, and this value is better than in all
        earlier steps. If so, remember the step as the best step."""
        if self.metric is None or self.metric not in module.metrics:
            return False
        value = float(module.metrics[self.metric])
        sign = 1 if self.mode == "max" else -1
        if not math.isfinite(value) or (self.best and sign * value <= sign * self.best["value"]):
            return False
        self.best = {"step": module.rl_step, "metric": self.metric, "value": value}
        return True

    def path(self, module: Any) -> Path:
        """Return the path of the checkpoint of the current RL step."""
        return self.folder / f"{PREFIX}{module.rl_step:06d}{SUFFIX}"

    def save(self, trainer: L.Trainer, module: Any) -> bool:
        """Write the checkpoint of the current RL step, then delete the oldest checkpoints. Return
        whether the checkpoint was written."""
        path = self.path(module)
        check_ownership(self.run)

        def write() -> None:
            ranks.broadcast(before)
            # all ranks call this; weights_only=True would leave the optimizer out
            trainer.save_checkpoint(path, weights_only=False)
            ranks.broadcast(self.point)

        def before() -> None:
            # a checkpoint promises that all rows of metrics.jsonl up to its step are written
            if self.run / "metrics.jsonl" in WAITING:
                raise OSError(errno.ENOSPC, "rows of metrics.jsonl are still unwritten")
            for pattern in (METRICS, *APPENDED):
                for file in self.run.glob(pattern):
                    sync(file)
            if has_adapters(module.model):
                place = path.with_suffix(ADAPTER)
                save_policy(place, module.policy, state=adapters, tokenizer=False)

        adapters = gather_policy(module.model) if has_adapters(module.model) else None
        done = self.try_write(f"checkpoint {path.name}", write)
        if done and trainer.is_global_zero:
            self.prune()
        return done

    def point(self) -> None:
        """Make best.ckpt a link to the checkpoint of the best step."""
        path = self.folder / f"{PREFIX}{self.best.get('step', 0):06d}{SUFFIX}"
        if not path.exists():
            return
        if (self.folder / BEST).resolve() != path.resolve():
            best = self.folder / BEST
            if os.path.lexists(best) and not best.is_symlink():
                kept = set_aside(self.run, best.relative_to(self.run).as_posix())
                print(f"warning: {BEST} was not a link; the file is kept as {kept}", flush=True)
            link(best, path)
        if not is_json(self.folder / "best.json", self.best):
            write_json(self.folder / "best.json", self.best)

    def try_write(self, what: str, write: Any, kind: str = CHECKPOINT) -> bool:
        """Call `write`, and return whether it succeeded. A failure is reported, and files written
        earlier stay (see `report_write_errors`)."""
        with report_write_errors(what, kind):
            write()
        return kind not in LOST

    def prune(self) -> None:
        """Delete all checkpoints except the newest `keep` checkpoints and the best checkpoint.
        Also delete checkpoints renamed by `supersede`, and adapters without a checkpoint, for
        example of a failed save."""
        held = (self.folder / BEST).resolve()
        old = [
            path for path in list_checkpoints(self.folder)[: -self.keep] if path.resolve() != held
        ]
        for path in (*old, *self.folder.glob(f"*{SUPERSEDED}")):
            with suppress(OSError):
                path.unlink()
        for place in self.folder.glob(f"{PREFIX}*{ADAPTER}"):
            if not place.with_suffix(SUFFIX).exists() and lists_every_file(place):
                shutil.rmtree(place, ignore_errors=True)


def gather_policy(model: Any) -> dict[str, Any] | None:
    """Gather the tensors of a sharded model for `save_policy`: all weights, or only the adapters
    under LoRA. Return None if the model is not sharded."""
    if not find_sharded_modules(model):
        return None
    ranks.reshard(model)
    state = model.state_dict()
    if has_adapters(model):
        state = {name: value for name, value in state.items() if "lora_" in name}
    return ranks.gather_tensors(state, for_file=True)


def link(name: Path, target: Path) -> None:
    """Make a symbolic link beside its target, atomically."""
    part = name.with_name(name.name + ".tmp")
    part.unlink(missing_ok=True)
    part.symlink_to(target.name)
    os.replace(part, name)


def read_weights(path: Path, folder: Path, identity: str) -> dict[str, Any]:
    """Read the policy's weights from a checkpoint, under the names of the policy's model. Raise
    OSError if the checkpoint is damaged or belongs to another run."""
    try:
        checkpoint = read_checkpoint(path)
        refuse_foreign(path, checkpoint, folder, identity)
    except DataError as error:
        raise OSError(errno.EIO, str(error)) from None
    return {
        name.removeprefix("model."): value
        for name, value in checkpoint["state_dict"].items()
        if name.startswith("model.")
    }


def parse_step(path: Path) -> int:
    """Return the RL step in a checkpoint's file name, or -1 if the name has another form."""
    found = re.fullmatch(rf"{PREFIX}(\d+)\{SUFFIX}", path.name)
    return int(found[1]) if found else -1


def list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints of a folder, oldest first."""
    found = [path for path in folder.glob(f"{PREFIX}*{SUFFIX}") if parse_step(path) >= 0]
    return sorted(found, key=parse_step)


def load_checkpoint(source: Path) -> tuple[Path, dict[str, Any]]:
    """Load a checkpoint onto the CPU: the named file, or the newest intact checkpoint of a folder.
    Return its path and its content.

    In a folder, damaged checkpoints are skipped. A warning names each damaged checkpoint, and the
    checkpoint used instead. A damaged file that was given by name is refused, because nobody asked
    for an older checkpoint. The message then names the newest intact checkpoint before the damaged
    file.

    Raises: DataError if no checkpoint can be read.
    """
    damaged = []
    named = source.suffix == SUFFIX
    for path in [source] if named else reversed(list_checkpoints(source)):
        try:
            state = read_checkpoint(path)
        except DataError as error:
            damaged.append(str(error))
            continue
        for line in damaged:
            warn(f"{line}; {path.name} is used")
        return path, state
    if named:
        for path in reversed(list_checkpoints(source.parent)):
            if parse_step(path) < parse_step(source.resolve()) and not find_damage(path):
                raise DataError(f"{damaged[0]}; the newest intact checkpoint before it is {path}")
    none = (
        f"{source}: no checkpoint that can be read; start a new run without resume, or name an"
        " older run"
    )
    raise DataError("; ".join([*damaged, none]))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Load a file of AtomicCheckpointIO onto the CPU. The digest of the whole file is verified
    before any part of the file is loaded. Raise DataError if the file is damaged."""
    why = find_damage(path)
    if not why:
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except UNREADABLE as error:
            why = reason(error)
    raise DataError(f"{path} is damaged ({why})")


def refuse_foreign(path: Path, state: dict[str, Any], folder: Path, identity: str) -> None:
    """Raise DataError unless the run in `folder` saved this checkpoint under the name `path`.

    Args:
      state: the content of the checkpoint.
      identity: the identity of the run.
    """
    own = state["run"].get("identity", "")
    if own != identity:
        config = state["run"].get("config", {})
        raise DataError(
            f"{path} is a checkpoint of run {own} (name={config.get('name')},"
            f" seed={config.get('seed')}), and {folder} is the folder of run {identity}. Put the"
            " right file back, or move this one away to continue from an older checkpoint"
        )
    named = parse_step(path.resolve())
    step = state["rlkit"]["rl_step"]
    if named not in (-1, step):
        raise DataError(
            f"{path} holds RL step {step}, so it is not the file saved by the run under this name;"
            " move it away"
        )


def set_foreign_aside(run: Path, identity: str) -> None:
    """Move checkpoints of other runs out of checkpoints/. Otherwise they would be deleted like old
    checkpoints of this run."""
    folder = run / "checkpoints"
    for path in (*list_checkpoints(folder), *sorted(folder.glob(f"*{SUPERSEDED}"))):
        with suppress(*UNREADABLE, AttributeError, TypeError):
            open_regular(path).close()
            # mmap=True reads the file's structure without loading its tensors
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            own = saved["run"].get("identity", "")
            if own != identity:
                kept = set_aside(run, path.relative_to(run).as_posix())
                print(
                    f"resume: {path.name} is a checkpoint of run {own}, not of run {identity}, and"
                    f" is kept as {kept}",
                    flush=True,
                )


def supersede(folder: Path, step: int) -> None:
    """Rename the checkpoints after `step`, because the run continues from `step`.

    Suppose that the checkpoints kept their names and the run were killed. The next resume would
    then take them for the newest checkpoints, although the run has already rewritten the rows of
    these steps. The next save deletes the intact checkpoints among them. Damaged checkpoints are
    kept as evidence.
    """
    for path in list_checkpoints(folder):
        if parse_step(path) <= step:
            continue
        if find_damage(path):
            kept = put_aside(path, DAMAGED).name
            print(
                f"resume: {path.name} is damaged and kept as {kept}; delete it when you have looked"
                " at it",
                flush=True,
            )
        else:
            os.replace(path, path.with_name(path.name + SUPERSEDED))
            print(f"resume: {path.name} is set aside; the next checkpoint replaces it", flush=True)
