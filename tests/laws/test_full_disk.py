"""A disk that refuses, whatever a run writes, whenever, with whichever library: training goes on,
and the end says what is missing.

The refusal is the kernel's own: RLIMIT_FSIZE 0 lets no file grow (EFBIG where a full disk says
ENOSPC), for Python, C++ and Rust alike. Small disks of their own (full, without inodes, read-only)
need root and are slow.
"""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
from pathlib import Path

import pytest
import torch

from rlkit.commands.cli import main
from rlkit.errors import ConfigError
from rlkit.runs import folder as runs
from rlkit.system import shards
from rlkit.system.files import (
    LOST,
    convert_write_errors,
    explain_write_error,
    refuse_unwritable,
    report_write_errors,
)
from rlkit.training.callbacks.checkpoints import list_checkpoints, load_checkpoint
from rlkit.training.loggers import (
    log_final,
    log_histogram,
    log_settings,
    log_text,
    make_tolerant,
    tensorboard,
)

EVERYTHING = [
    "debug=fast",
    "trainer.accelerator=cpu",
    "trainer.steps=3",
    "task.max_samples=32",
    "generation.max_new_tokens=32",
    "evaluation.n=2",
    "evaluation.every=1",
    "logger=tensorboard",
    "callbacks.checkpoint.every=1",
    "+callbacks.rollouts={_target_: rlkit.training.callbacks.rollouts, _partial_: true, every: 1}",
]
MOMENTS = {  # where the disk fills up, in the second RL step or at the end
    "step": "rlkit.training.module.RLModule.training_step",
    "evaluation": "rlkit.training.callbacks.evaluation.HeldOut.on_train_batch_end",
    "checkpoint": "rlkit.training.callbacks.checkpoints.RLCheckpoint.on_train_batch_end",
    "within the checkpoint": (
        "rlkit.training.callbacks.checkpoints.AtomicCheckpointIO.save_checkpoint"
    ),
    "model": "rlkit.training.callbacks.checkpoints.RLCheckpoint.on_train_end",
    "summary": "rlkit.training.run.conclude",
}


def full(limit: int = 0) -> None:
    """No file of this process grows beyond `limit` bytes from now on; -1: as before."""
    resource.setrlimit(
        resource.RLIMIT_FSIZE,
        (limit if limit >= 0 else resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    )


@pytest.fixture
def room():
    """Fills the disk within a block of this process, and makes room again."""
    yield full
    full(-1)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def at(place: str, action, count: int) -> None:
    """Calls `action` before the `count`-th call of a method or a function."""
    import importlib

    path, _, name = place.rpartition(".")
    try:
        owner = importlib.import_module(path)
    except ImportError:
        module, _, kind = path.rpartition(".")
        owner = getattr(importlib.import_module(module), kind)
    function, calls = getattr(owner, name), []

    def wrapper(*args, **kwargs):
        calls.append(1)
        if len(calls) == count:
            action()
        return function(*args, **kwargs)

    setattr(owner, name, wrapper)


SMALL = ("summary",)  # moments after which only small files are written


# Every moment with one of the limits in turns, and with all weights or adapters in turns of two.
REFUSALS = [
    (moment, 4 * (number // 2 % 2), 0 if number % 2 or moment in SMALL else 20_000)
    for number, moment in enumerate(MOMENTS)
]


@pytest.mark.parametrize(("moment", "rank", "limit"), REFUSALS)
@pytest.mark.slow
def test_a_disk_that_refuses_at_any_moment_ends_no_run(tmp_path, forked, moment, rank, limit):
    refuses(tmp_path, forked, moment, rank, limit)


@pytest.mark.slow
def test_a_disk_that_refuses_ends_no_run(tmp_path, forked):
    """From the second step on nothing can be written; the adapters' writer is safetensors, whose
    error is no OSError."""
    refuses(tmp_path, forked, "step", 4, 0)


def refuses(tmp_path: Path, forked, moment: str, rank: int, limit: int) -> None:
    """The run is trained to its end and exits with 1, without a traceback; what it lost is named;
    with room it can be continued."""
    folder, log = tmp_path / "run", tmp_path / "log"
    words = ["train", *EVERYTHING, f"model.lora.rank={rank}", f"hydra.run.dir={folder}"]
    pipe, out = os.pipe()  # the log must not be a file, which would not grow either
    count = 1 if moment in ("model", "summary") else 2
    child = forked(
        words,
        log,
        lambda: (os.dup2(out, 1), os.dup2(out, 2), at(MOMENTS[moment], lambda: full(limit), count)),
    )
    os.close(out)
    with os.fdopen(pipe, errors="replace") as text:
        said = text.read()
    assert wait(child) == 1, said
    assert "Traceback" not in said and "3 steps" in said and "not written" in said, said
    rows = [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows == sorted(rows) and rows[0] == 0
    _, state = load_checkpoint(folder / "checkpoints")
    assert state["rlkit"]["rl_step"] == (
        1 if moment in ("step", "evaluation", "checkpoint", "within the checkpoint") else 3
    )
    assert not list(folder.rglob("*.tmp")) and not list(folder.rglob(".*part"))
    again = tmp_path / "again"
    assert wait(forked(["train", f"resume={folder}"], again)) == 0, again.read_text()
    assert (
        load_checkpoint(folder / "checkpoints")[1]["rlkit"]["rl_step"] == 3
        and (folder / "model").is_dir()
    )
    assert json.loads((folder / "summary.json").read_text())["lost"] == {}


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_refuses_a_run_before_it_begins(
    tmp_path, monkeypatch, capsys, room
):
    """One sentence and exit status 2: a file in the way of the outputs or of the run, and a full
    disk; nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").write_text("")
    assert main(["train", *EVERYTHING]) == 2
    assert "cannot be written" in (said := capsys.readouterr().err) and "\n" not in said.strip()
    assert main(["train", *EVERYTHING, "hydra.run.dir=outputs"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    (tmp_path / "outputs").unlink()
    room(0)
    assert main(["train", *EVERYTHING, "hydra.run.dir=outputs/a"]) == 2
    room(-1)
    assert "outputs/a: cannot be written (File too large)" in capsys.readouterr().err
    assert [p.name for p in tmp_path.rglob("*")] in (["outputs"], [])


@pytest.mark.slow
@pytest.mark.parametrize("command", ["rollout", "evaluate", "export"])
def test_other_commands_show_what_they_computed(tmp_path, monkeypatch, capsys, room, command):
    """Hours of episodes ended in a traceback, and their table was never printed."""
    monkeypatch.chdir(tmp_path)
    assert (
        main(["train", *EVERYTHING[:4], "evaluation.n=0", "logger=none", "hydra.run.dir=run"]) == 0
    )
    words = {
        "rollout": ["n=2", "max_steps=1"],
        "evaluate": ["run=run", "evaluation.n=2", "evaluation.samples=1", "evaluation.k=[1]"],
    }
    fresh = runs.make_fresh_folder

    def filled(parent: Path) -> Path:
        folder = fresh(parent)
        room(0)
        return folder

    monkeypatch.setattr(runs, "make_fresh_folder", filled)
    capsys.readouterr()
    if command == "export":
        room(0)
    status = main([command, *words.get(command, ["run=run", "to=out"])])
    room(-1)
    said = capsys.readouterr()
    assert status == (2 if command == "export" else 1)
    assert ("cannot be written" if command == "export" else "not written") in said.err
    assert command == "export" or "accuracy" in said.out or "reward" in said.out


@pytest.mark.parametrize("rank", [0, 4], ids=["all weights", "adapters"])
@pytest.mark.parametrize("limit", [0, 1000, 100_000])
def test_what_each_library_raises_is_known(tmp_path, room, rank, limit):
    """safetensors and tokenizers are Rust, torch's zip file is C++: none of them promises an
    OSError."""
    from rlkit.models import LoRA, load_policy
    from rlkit.models.save import save_policy

    policy = load_policy(path="tiny", lora=LoRA(rank=rank))
    zeros = {"a": torch.zeros(100_000)}

    def into_a_file() -> None:
        with (tmp_path / "b.pt").open("wb") as file:
            torch.save(zeros, file)

    writers = {
        "a policy": lambda: save_policy(tmp_path / "model", policy),
        "torch.save by name": lambda: torch.save(zeros, tmp_path / "a.pt"),
        "torch.save into a file": into_a_file,
        "a row": lambda: (tmp_path / "c").write_bytes(bytes(200_000)),
    }
    if limit < 10_000:  # they are smaller
        writers["a tokenizer"] = lambda: policy.renderer.tokenizer.save_pretrained(
            tmp_path / "tokenizer"
        )
    for name, write in writers.items():
        room(limit)
        with pytest.raises(Exception) as caught:
            write()
        room(-1)
        assert explain_write_error(caught.value), name
    assert not (tmp_path / "model").exists()


def test_one_place_decides_what_becomes_of_a_refusal(capsys):
    """Reported and remembered until the same kind succeeds; a refusal at the start; an OSError for
    all ranks."""
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    with report_write_errors("checkpoint 2", "checkpoint"):
        raise error
    assert (
        LOST == {"checkpoint": "the disk took only a part of it"}
        and "checkpoint 2 not written" in capsys.readouterr().err
    )
    with report_write_errors("checkpoint 3", "checkpoint"):
        pass
    assert LOST == {}
    with (
        pytest.raises(ConfigError, match=r"outputs: cannot be written \(No space left on device\)"),
        refuse_unwritable("outputs"),
    ):
        raise Exception("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(OSError, match="took only a part"), convert_write_errors():
        raise error


def test_rollouts_that_find_no_room_leave_the_steps_before_them_whole(tmp_path, room):
    """The disk takes a part of a member: nothing of it stays between the steps before and after."""
    shards.append_lines(tmp_path, 1, b"one")
    room(shards.index_steps(tmp_path)[1].stop + 9)
    with pytest.raises(OSError):
        shards.append_lines(tmp_path, 2, b"two")
    room(-1)
    shards.append_lines(tmp_path, 3, b"three")
    assert gzip.decompress(shards.list_shards(tmp_path)[0].read_bytes()) == b"onethree" and [
        *shards.index_steps(tmp_path)
    ] == [1, 3]


@pytest.mark.parametrize(
    "error",
    [ValueError("rows"), RuntimeError("CUDA error: device-side assert"), KeyError("reward")],
)
def test_what_is_no_matter_of_the_disk_is_raised(error):
    assert explain_write_error(error) is None
    for tolerant_of in (report_write_errors("a"), refuse_unwritable("a"), convert_write_errors()):
        with pytest.raises(type(error)), tolerant_of:
            raise error
    assert LOST == {}


def test_a_logger_that_fails_ends_no_run_and_goes_on_when_there_is_room(
    tmp_path, room, capsys, monkeypatch
):
    """TensorBoard's writer is a thread that dies with its first failure: the error came out of a
    later, innocent call."""
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    logger = make_tolerant(tensorboard(tmp_path, 0))
    room(0)
    for step in (1, 2, 3):
        logger.log_metrics({"a": 1.0}, step=step)
        log_text(logger, "text", "words", step)
        log_histogram(logger, "values", [1.0, 2.0], step)
        logger.save()
    log_settings(logger, {"a": 1})
    log_final(logger, {"a": 1}, {"b": 2.0}, 3)
    logger.finalize("success")
    room(-1)
    assert list(LOST) == ["TensorBoardLogger"] and capsys.readouterr().err.count("warning") == 1
    logger.log_metrics({"a": 2.0}, step=4)
    logger.finalize("success")
    newest = max(
        (tmp_path / "tensorboard").glob("events.*"), key=lambda p: (p.stat().st_size, p.name)
    )
    assert newest.stat().st_size > 0


DISKS = {"full": "size=16M", "without inodes": "size=64M,nr_inodes=24", "read-only": "size=64M"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DISKS)
def test_a_disk_of_its_own_that_refuses_ends_no_run(tmp_path, forked, kind):
    disk, log = tmp_path / "disk", tmp_path / "log"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", DISKS[kind], "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("mounting a small tmpfs needs root")

    def read_only() -> None:
        subprocess.run(
            ["mount", "-o", "remount,ro", str(disk)]
        )  # refused while a file is open for writing, as loggers have one

    try:
        adapters = 0 if kind == "full" else 4
        # every step has updates, so that checkpoints hold an optimiser's moments
        moments = "algorithm.entropy_coef=0.01"
        words = [
            "train",
            *EVERYTHING,
            "logger=none",
            f"model.lora.rank={adapters}",
            moments,
            f"hydra.run.dir={disk / 'run'}",
        ]
        before = (lambda: at(MOMENTS["step"], read_only, 2)) if kind == "read-only" else None
        assert wait(forked(words, log, before)) == 1, log.read_text()
        assert "Traceback" not in log.read_text() and "not written" in log.read_text()
        assert list_checkpoints(disk / "run" / "checkpoints") or kind == "without inodes"
        if kind == "read-only":
            assert wait(forked(["train", f"resume={disk / 'run'}"], log)) == 2
            assert "cannot be written (Read-only file system)" in log.read_text()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
