"""Full disks, signals, numbers that are not finite, memory that runs out, secrets: a run says what
happened and loses nothing."""

from __future__ import annotations

import errno
import json
import os
import pty
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from parametrise import cases
from rlkit.config.changes import find_differences
from rlkit.distributed import ranks
from rlkit.runs import folder as runs
from rlkit.system import rng
from rlkit.system.digest import write_sums
from rlkit.system.files import LOST
from rlkit.system.redaction import REDACTED
from rlkit.system.rows import WAITING, append_row, read_rows
from rlkit.training.callbacks.checkpoints import (
    CHECKPOINT,
    AtomicCheckpointIO,
    RLCheckpoint,
    list_checkpoints,
    load_checkpoint,
    supersede,
)
from rlkit.training.callbacks.evaluation import HeldOut
from rlkit.training.callbacks.stopping import SIGNALS, StopOnSignal, requeue
from rlkit.training.metrics import UpdateTerms
from rlkit.training.update.micro_batches import MicroBatches, OutOfMemory
from rlkit.types import Splits

UPDATES = "algorithm.entropy_coef=0.01"  # in every step, also where all rewards are equal
FAST = [
    "debug=fast",
    "task.max_samples=32",
    "trainer.accelerator=cpu",
    "evaluation.n=0",
    "logger=none",
    "callbacks.checkpoint.model=false",
    "generation.max_new_tokens=32",
]


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --------------------------------------------------------------------------------------- generators


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
    ]


def test_every_generator_goes_on_where_it_was_saved(tmp_path):
    """Also through a file that is loaded without pickle; a Gaussian that waits for its turn
    included."""
    rng.seed(5)
    random.gauss(0, 1), np.random.randn()
    torch.save(rng.state(), tmp_path / "state")
    first = draw()
    draw()
    rng.restore(torch.load(tmp_path / "state", weights_only=True))
    assert draw() == first
    with rng.keep_generators():
        second = draw()
    assert draw() == second != first


# -------------------------------------------------------------------------------------- checkpoints


class Trainer(SimpleNamespace):
    """What RLCheckpoint uses of Lightning's: it writes the module's step."""

    should_stop, is_global_zero = False, True

    def save_checkpoint(self, path, weights_only):
        AtomicCheckpointIO().save_checkpoint({"step": self.module.rl_step}, path)


@pytest.fixture
def saving(tmp_path):
    """(callback, step) → the checkpoint callback after a step with a metric."""
    module = SimpleNamespace(rl_step=0, metrics={}, model=None)
    trainer = Trainer(module=module)

    def step(callback, number, **metrics):
        module.rl_step, module.metrics = number, metrics
        callback.on_train_batch_end(trainer, module)
        return [p.name for p in list_checkpoints(tmp_path / "checkpoints")]

    return step


def test_the_newest_and_the_best_stay(tmp_path, saving):
    callback = RLCheckpoint(tmp_path, every=2, keep=1, best="score")
    assert saving(callback, 1, score=0.5) == ["step_000001.ckpt"]
    assert saving(callback, 2, score=float("nan")) == ["step_000001.ckpt", "step_000002.ckpt"]
    assert saving(callback, 3, score=0.9) == ["step_000003.ckpt"]
    assert (
        saving(callback, 4)
        == saving(callback, 5, score=0.9)
        == ["step_000003.ckpt", "step_000004.ckpt"]
    )
    (tmp_path / "checkpoints" / "best.ckpt").unlink()  # as if it was killed between the two
    callback.on_train_start(Trainer(), None)
    assert load_checkpoint(tmp_path / "checkpoints" / "best.ckpt")[1] == {"step": 3}
    again = RLCheckpoint(tmp_path, every=2, keep=1, best="score", mode="min")
    again.load_state_dict(callback.state_dict())
    assert saving(again, 6, score=0.8) == ["step_000006.ckpt"]
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text())["value"] == 0.8


@pytest.mark.parametrize("where", ["os.replace", "os.fsync", "torch.save"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_save_that_fails_leaves_the_last_good_checkpoint(
    tmp_path, saving, monkeypatch, capsys, where, number
):
    callback = RLCheckpoint(tmp_path, every=1, keep=1)
    saving(callback, 1)

    def fails(*args):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(where, fails)
        assert saving(callback, 2) == ["step_000001.ckpt"]
    assert os.strerror(number) in capsys.readouterr().err and CHECKPOINT in LOST
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000001.ckpt"]
    assert load_checkpoint(tmp_path / "checkpoints")[1] == {"step": 1}
    assert saving(callback, 3) == ["step_000003.ckpt"] and CHECKPOINT not in LOST


def test_a_save_for_which_there_is_no_room_is_not_begun(tmp_path, saving, monkeypatch, capsys):
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    assert saving(RLCheckpoint(tmp_path, every=1, keep=1), 1) == []
    assert "1 MiB needed, 0 MiB free" in capsys.readouterr().err


def test_checkpoints_of_another_past_are_set_aside(tmp_path, saving):
    """Resumed from step 1 with step 2 in place, and killed before its next save, a run would take
    up step 2 again."""
    callback = RLCheckpoint(tmp_path, every=1, keep=9)
    for step in (1, 2):
        saving(callback, step)
    supersede(tmp_path / "checkpoints", 1)
    assert load_checkpoint(tmp_path / "checkpoints")[1] == {"step": 1}
    assert saving(callback, 2) == ["step_000001.ckpt", "step_000002.ckpt"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_the_adapters_of_a_failed_save_go_with_the_next_save(tmp_path, saving):
    """They stayed for good. A folder with other files is not the run's own."""
    callback = RLCheckpoint(tmp_path, every=1, keep=9)
    for step in (1, 2):
        adapters = tmp_path / "checkpoints" / f"step_{step:06d}.adapter"
        adapters.mkdir(parents=True)
        write_sums(adapters)
    (tmp_path / "checkpoints" / "step_000002.adapter" / "notes").touch()
    saving(callback, 3)
    left = {path.name for path in (tmp_path / "checkpoints").glob("*.adapter")}
    assert left == {"step_000002.adapter"}


def test_a_save_that_waits_for_rows_is_reported_by_the_first_rank(
    tmp_path, saving, monkeypatch, capsys
):
    """Every rank printed the warning."""

    def fails(make):
        raise ranks.RankOSError("rank 0 failed")

    monkeypatch.setattr("rlkit.training.callbacks.checkpoints.check_ownership", lambda run: None)
    monkeypatch.setattr(ranks, "any_rank", lambda flag: True)
    monkeypatch.setattr(ranks, "broadcast", fails)
    assert saving(RLCheckpoint(tmp_path, every=1, keep=1), 1) == []
    assert capsys.readouterr().err == "" and CHECKPOINT in LOST
    LOST.clear()


@pytest.mark.parametrize("step", [2, 3])
def test_the_adapters_of_another_past_go_with_their_checkpoint(tmp_path, saving, step):
    """Those of a step that is saved again are the new past's."""
    callback = RLCheckpoint(tmp_path, every=1, keep=9)
    for early in (1, 2):
        saving(callback, early)
        adapters = tmp_path / "checkpoints" / f"step_{early:06d}.adapter"
        adapters.mkdir()
        write_sums(adapters)
    supersede(tmp_path / "checkpoints", 1)
    saving(callback, step)
    left = {path.name for path in (tmp_path / "checkpoints").glob("*.adapter")}
    assert left == {"step_000001.adapter", *(["step_000002.adapter"] if step == 2 else [])}


def test_checkpoints_are_ordered_by_number(tmp_path):
    for step in (999999, 1000000, 2):
        (tmp_path / f"step_{step:06d}.ckpt").touch()
    assert [p.name for p in list_checkpoints(tmp_path)] == [
        "step_000002.ckpt",
        "step_999999.ckpt",
        "step_1000000.ckpt",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2], ids=["all weights", "adapters"])
def test_the_saved_model_is_the_trained_one(tmp_path, rank):
    """Read back with the libraries' own `from_pretrained`, from a folder that was replaced."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rlkit.models.load import LoRA, load_policy, pretrained_model
    from rlkit.models.save import save_policy

    policy, folder = load_policy(path="tiny", lora=LoRA(rank=rank)), tmp_path / "model"
    save_policy(folder, policy)
    with torch.no_grad():
        for p in policy.model.parameters():
            p += p.requires_grad * 0.01
    save_policy(folder, policy)
    if rank:
        from peft import PeftModel

        assert sum(p.stat().st_size for p in folder.glob("*.safetensors")) < 1 << 20
        model = PeftModel.from_pretrained(pretrained_model("tiny", dtype=torch.float32), folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, policy.model.eval()(ids).logits)
    assert (
        AutoTokenizer.from_pretrained(folder).chat_template
        == policy.renderer.tokenizer.chat_template
    )
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


# ------------------------------------------------------------------------------------------ metrics


def test_a_resumed_run_adds_no_row_to_those_before_it(tmp_path):
    """A kill between two evaluations once left an `eval/*` row more than an uninterrupted run
    has."""
    held_out = HeldOut(Splits([], [object()], [object()]), tmp_path / "metrics.jsonl", {})
    held_out.on_train_start(SimpleNamespace(), SimpleNamespace(rl_step=2))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_rows_that_find_no_room_wait_for_it(tmp_path, monkeypatch, saving, capsys):
    """None is lost, none is there twice, none is cut; and no checkpoint claims a step whose row is
    not there."""
    file, plain = tmp_path / "metrics.jsonl", Path.open
    append_row(file, 1, {"a": 1})

    class Full:
        def __init__(self, path):
            self.file = plain(path, "ab", buffering=0)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def tell(self):
            return self.file.tell()

        def write(self, data):
            return self.file.write(data[:5])

    callback = RLCheckpoint(tmp_path, every=1, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(
            Path,
            "open",
            lambda self, mode="r", **k: Full(self) if mode == "ab" else plain(self, mode, **k),
        )
        append_row(file, 2, {"a": 2})
        append_row(file, 3, {"a": 3})
        assert (
            file in WAITING
            and [r["step"] for r in read_rows(file)] == [1]
            and file.read_text().endswith("\n")
        )
        assert saving(callback, 3) == []
    assert capsys.readouterr().err.count("rows wait for room") == 1
    append_row(file, 4, {"a": 4})
    assert [r["a"] for r in read_rows(file)] == [1, 2, 3, 4] and file not in WAITING
    assert saving(callback, 4) == ["step_000004.ckpt"]


# ------------------------------------------------------------------------------------------- memory


class Portions(MicroBatches):
    """Micro-batches of 64 tokens on a device that has room for fewer."""

    def __init__(self, room):
        super().__init__(64)
        self.room = room

    def work(self, terms):
        terms.loss += 1
        terms.tokens["kl"].append(torch.ones(1))
        if self.limit > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
        return self.limit


def eight_rows():
    mask = torch.ones(8, 4, dtype=torch.bool)
    rows = SimpleNamespace(
        attention_mask=mask,
        response_mask=mask,
        rollout_ids=torch.arange(8),
        group_ids=torch.arange(8),
        ids=mask,
    )
    rows.whole = lambda: rows
    return rows


def test_micro_batches_are_halved_until_they_fit(capsys):
    module, terms = Portions(room=16), UpdateTerms()
    assert module.retry_halved(eight_rows(), lambda: module.work(terms), terms) == 16
    assert terms.loss == 1 and len(terms.tokens["kl"]) == 1
    assert "trainer.micro_batch_tokens=16" in capsys.readouterr().out


def test_memory_that_a_single_rollout_exceeds_names_the_keys(capsys):
    module, terms = Portions(room=1), UpdateTerms()
    with pytest.raises(OutOfMemory, match=r"generation.max_new_tokens.*Tried to allocate"):
        module.retry_halved(eight_rows(), lambda: module.work(terms), terms)


def test_several_ranks_do_not_halve(monkeypatch):
    monkeypatch.setattr(ranks, "size", lambda: 2)
    module, terms = Portions(room=16), UpdateTerms()
    with pytest.raises(OutOfMemory, match=r"lower trainer\.micro_batch_tokens"):
        module.retry_halved(eight_rows(), lambda: module.work(terms), terms)


@pytest.mark.slow
def test_the_probe_takes_the_longest_rollouts_and_leaves_no_gradient(experiment, monkeypatch):
    """Rows as long as the prompt and every reply of an episode; as many as a micro-batch takes."""
    from rlkit.models import load_policy
    from rlkit.training.learner import Learner
    from rlkit.training.update import probe

    x = experiment._replace(trainer=experiment.trainer._replace(micro_batch_tokens=1024))
    learner = Learner(x, load_policy(path="tiny"))
    seen, real = [], probe.forward_logprobs
    monkeypatch.setattr(
        probe, "forward_logprobs", lambda *a, **k: seen.append(a[1]) or real(*a, **k)
    )
    probe.probe_memory(learner.record(), experiment.task(split="train")[:2])
    (packed,) = seen
    rows, width = packed.response_mask.shape
    shared = packed.tokens - len(packed.ids)
    counted = len(packed.ids) + shared / 8  # a shared token counts an eighth
    assert counted <= 1024 < counted + width and width > 4 * x.generation.max_new_tokens
    assert (
        packed.tokens == rows * (width - 1) > len(packed.ids)
    )  # a group shares its prompt, as in a run
    assert all(p.grad is None for p in learner.nets.parameters())


# ------------------------------------------------------------------------------------------ secrets


def test_secrets_are_not_written(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-0123456789")
    config = {
        "logger": {
            "api_key": "my-own-key",
            "max_new_tokens": 3,
            "eos_token": "<|im_end|>",
            "hub_token": ["t1"],
        },
        "reward": {"header": "Bearer sk-0123456789"},
        "tokens": 5,
    }
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- logger.api_key=my-own-key\n- seed=3\n")
    runs.write_config(tmp_path, config)
    assert runs.read_config(tmp_path) == {
        "logger": {
            "api_key": REDACTED,
            "max_new_tokens": 3,
            "eos_token": "<|im_end|>",
            "hub_token": [REDACTED],
        },
        "reward": {"header": f"Bearer {REDACTED}"},
        "tokens": 5,
    }
    assert runs.read_overrides(tmp_path) == ["seed=3"]
    assert find_differences(runs.read_config(tmp_path), config) == {}
    runs.write_start(tmp_path, config, {})
    assert all(
        "sk-01" not in p.read_text() and "my-own-key" not in p.read_text()
        for p in tmp_path.rglob("*")
        if p.is_file()
    )


def test_what_changed_between_two_starts_is_said(tmp_path):
    assert runs.write_start(tmp_path, {"seed": 0}, {"torch": "1"}) == []
    (tmp_path / "summary.json").write_text("{}")
    assert runs.write_start(tmp_path, {"seed": 0}, {"torch": "2"}) == ["torch was 1 and is now 2"]
    assert runs.read_start(tmp_path)["versions"] == {"torch": "2"}


# ------------------------------------------------------------------------------------------ signals


@pytest.mark.parametrize(
    "status, said",
    [(0, "job 17 is queued again"), (1, "failed (no such job); start the job again by hand")],
)
def test_a_slurm_job_is_queued_again(tmp_path, monkeypatch, capfd, status, said):
    (tmp_path / "scontrol").write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho no such job >&2\nexit {status}\n'
    )
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    requeue()
    assert (tmp_path / "asked").read_text() == "requeue 17\n"
    assert said in "".join(capfd.readouterr())


def at(place: str, action):
    """Calls `action` in the middle of a function, once, in the second RL step."""
    import importlib

    path, _, name = place.rpartition(".")
    owner = importlib.import_module(path)
    function, module = getattr(owner, name), []
    from rlkit.training.callbacks import stopping

    started = stopping.StopOnSignal.on_train_start

    def start(self, trainer, found):
        started(self, trainer, found)
        module.append(found)

    def wrapper(*args, **kwargs):
        result = function(*args, **kwargs)
        if module and module[0].rl_step == 1:
            module.clear()
            action()
        return result

    stopping.StopOnSignal.on_train_start = start
    setattr(owner, name, wrapper)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    ["rlkit.episodes.replies.read_reply", "rlkit.training.update.minibatch.surrogate"],
    ids=["rollouts", "update"],
)
@pytest.mark.parametrize(
    "signum, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_a_run_saved_and_it_goes_on_as_if_nothing_had_happened(
    tmp_path, forked, place, signum, status
):
    """Rollouts are dropped, an update is finished; no step is done twice or left out, though no
    checkpoint was due."""
    log, whole, folder = tmp_path / "log", tmp_path / "whole", tmp_path / "run"
    words = ["train", *FAST, "trainer.steps=3", "callbacks.checkpoint.every=9", UPDATES]
    assert wait(forked([*words, f"hydra.run.dir={whole}"], log)) == 0, log.read_text()
    stop = lambda: at(place, lambda: os.kill(os.getpid(), signum))  # noqa: E731
    assert wait(forked([*words, f"hydra.run.dir={folder}"], log, stop)) == status, log.read_text()
    assert json.loads((folder / "summary.json").read_text())["ended"] == "interrupted"
    done = 1 if "episodes" in place else 2
    assert [p.name for p in list_checkpoints(folder / "checkpoints")] == [f"step_{done:06d}.ckpt"]
    assert wait(forked(["train", f"resume={folder}"], log)) == 0, log.read_text()
    a, b = (
        torch.load(f / "checkpoints" / "step_000003.ckpt", weights_only=True)["state_dict"]
        for f in (whole, folder)
    )
    assert all(torch.equal(a[name], b[name]) for name in a)
    kept = [
        [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows(f)]
        for f in (whole, folder)
    ]
    assert kept[0] == kept[1] and [row["step"] for row in kept[1]] == [1, 2, 3]


def test_a_hangup_is_heard_unless_it_is_ignored(monkeypatch):
    """A closed terminal ended a run unsaved; `nohup` ignores the signal, and a run that listened to
    it would end after all."""
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    try:
        for found, heard in ((signal.SIG_DFL, True), (signal.SIG_IGN, False)):
            signal.signal(signal.SIGHUP, found)
            callback = StopOnSignal()
            callback.on_train_start(SimpleNamespace(), SimpleNamespace())
            assert (signal.getsignal(signal.SIGHUP) == callback.handle) is heard
            assert signal.getsignal(signal.SIGTERM) == callback.handle
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@pytest.mark.slow
def test_a_terminal_that_is_closed_ends_a_run_saved(tmp_path):
    """What it prints after that has nowhere to go, which is no reason to stop saving."""
    child, terminal = pty.fork()
    if not child:
        words = [
            "train",
            *FAST,
            "trainer.steps=99999",
            "callbacks.checkpoint.every=99999",
            "trainer.threads=1",
        ]
        os.execvp(
            sys.executable,
            [sys.executable, "-m", "rlkit", *words, f"hydra.run.dir={tmp_path / 'run'}"],
        )
    said, metrics = b"", tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or len(read_rows(metrics)) < 2:
        said += os.read(terminal, 65536)
    os.close(terminal)
    assert wait(child) == 129, said.decode()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["ended"], summary["signal"]) == ("interrupted", "SIGHUP") and summary[
        "steps"
    ] >= 2
    assert (
        load_checkpoint(tmp_path / "run" / "checkpoints")[1]["rlkit"]["rl_step"] == summary["steps"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", cases(["raise SystemExit(0)", "raise KeyboardInterrupt"], 1))
def test_an_environment_that_ends_the_process_is_named(tmp_path, forked, monkeypatch, how):
    """It ended the run without a word, and with the exit status of its choice."""
    (tmp_path / "leaves.py").write_text(
        "from rlkit.environments import single_turn\n\ncalls = []\n\n\ndef after(rollout, step):\n"
        f"    calls.append(1)\n    if len(calls) > 9:\n        {how}\n    return True\n\n\ndef"
        " make(**given):\n    return single_turn(**given)._replace(stop=after)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    log = tmp_path / "log"
    words = [
        "train",
        *FAST,
        "environment=single_turn",
        "environment._target_=leaves.make",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    assert wait(forked(words, log)) == 1, log.read_text()
    said = log.read_text()
    name = how.split()[1].partition("(")[0]
    assert (
        f"rlkit: {name}" in said
        and "leaves.py:9 ended the run in step" in said
        and "Traceback" not in said
    )
    assert name in json.loads((tmp_path / "run" / "summary.json").read_text())["ended"]


@pytest.mark.slow
def test_a_second_signal_ends_a_run_at_once(tmp_path, forked):
    """During an update, which would otherwise be finished and saved."""
    folder, log = tmp_path / "run", tmp_path / "log"

    def twice():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    words = [
        "train",
        *FAST,
        UPDATES,
        "trainer.steps=3",
        "callbacks.checkpoint.every=9",
        f"hydra.run.dir={folder}",
    ]
    assert (
        wait(forked(words, log, lambda: at("rlkit.training.update.minibatch.surrogate", twice)))
        == 143
    )
    assert not (folder / "summary.json").exists() and list_checkpoints(folder / "checkpoints") == []


@pytest.mark.slow
def test_a_job_that_is_signalled_is_queued_again_once_it_is_saved(tmp_path, forked, monkeypatch):
    (tmp_path / "scontrol").write_text(
        f'#!/bin/sh\necho "$@" $(ls {tmp_path}/outputs/*/*/checkpoints) > {tmp_path}/asked\n'
    )
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.chdir(tmp_path)
    words = [
        "train",
        *FAST,
        "trainer.steps=3",
        "callbacks.checkpoint.every=9",
        "trainer.requeue=true",
        "resume=auto",
    ]

    def stop():
        at("rlkit.episodes.replies.read_reply", lambda: os.kill(os.getpid(), signal.SIGUSR1))

    assert wait(forked(words, tmp_path / "log", stop)) == 128 + signal.SIGUSR1
    assert (tmp_path / "asked").read_text() == "requeue 17 step_000001.ckpt\n"
    assert wait(forked(words, tmp_path / "log")) == 0
    found = (tmp_path / "outputs").glob("*/*")
    (folder,) = (run for run in found if run.parent.name != "latest")
    assert [row["step"] for row in rows(folder)] == [1, 2, 3]


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.slow
def test_an_evaluation_that_hangs_ends_the_run_and_says_so(tmp_path, forked, monkeypatch):
    """Before the first step: a reward that never comes back, on held-out rows alone."""
    (tmp_path / "waits.py").write_text(
        "import threading\nfrom rlkit.rewards import numeric\n\ndef reward(rollout):\n    if"
        " rollout.steps[0].response_ids:  # no start-up check\n        threading.Event().wait()\n  "
        "  return numeric(rollout)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    hung = [
        "evaluation.n=2",
        "reward@evaluation.reward=numeric",
        "evaluation.reward.terms.numeric.fn._target_=waits.reward",
    ]
    log = tmp_path / "log"
    words = [
        "train",
        *FAST,
        *hung,
        "trainer.max_step_time=0.05",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    assert wait(forked(words, log)) == 1, log.read_text()
    said = "the run hangs: nothing within trainer.max_step_time=0.05 minutes; waiting for"
    assert said in log.read_text()
    assert "waits.py" in log.read_text()


# ---------------------------------------------------------------------------- not finite, full disk


@pytest.mark.slow
def test_updates_that_are_not_finite_are_skipped_and_end_the_run_with_a_bundle_that_replays(
    tmp_path, forked, monkeypatch
):
    (tmp_path / "bad_loss.py").write_text(
        "import rlkit.functional as F\n\ndef clipped(ratio, advantages, rollout_ids=None):\n   "
        " return (ratio - 1).sqrt() * advantages  # its gradient at 1 is infinite\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    folder, log = tmp_path / "run", tmp_path / "log"
    loss = [
        "~algorithm.policy_loss",
        "+algorithm.policy_loss={_target_: bad_loss.clipped, _partial_: true}",
    ]
    words = [
        "train",
        *FAST,
        "trainer.steps=9",
        "batch.group_size=4",
        "seed=1",
        "kl=none",
        "trainer.max_nonfinite=3",
        *loss,
    ]
    assert wait(forked([*words, f"hydra.run.dir={folder}"], log, skip_dry_run)) == 1, (
        log.read_text()
    )
    said = log.read_text()
    assert "3 updates in a row" in said and "rlkit replay bundle=" in said
    (bundle,) = (folder / "debug").iterdir()
    assert {p.name for p in bundle.iterdir()} == {
        "traceback.txt",
        "config.yaml",
        "rollouts.jsonl.gz",
        "batch.pt",
        "state.ckpt",
    }
    assert all(
        row["optim/skipped_nonfinite"] + row["optim/skipped_no_signal"] == 2 for row in rows(folder)
    )
    replayed = tmp_path / "replayed"
    assert wait(forked(["replay", f"bundle={bundle}", "trust=true"], replayed)) == 1
    assert (
        "the gradient of" in replayed.read_text() and "the fault came again" in replayed.read_text()
    )


def skip_dry_run():
    """The start-up check would refuse such a loss."""
    import rlkit.config.compose

    rlkit.config.compose.dry_run = lambda x: None


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_no_run(tmp_path, forked):
    """A real one of 12 MiB: the first checkpoint fits, the second does not; then the end says
    so."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16M", "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        folder, log = disk / "run", tmp_path / "log"
        assert (
            wait(
                forked(
                    [
                        "train",
                        *FAST,
                        UPDATES,
                        "logger=tensorboard",
                        "trainer.steps=3",
                        f"hydra.run.dir={folder}",
                    ],
                    log,
                )
            )
            == 1
        )
        assert (
            "step_000002.ckpt not written" in log.read_text() and "Traceback" not in log.read_text()
        )
        assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step_000001.ckpt"]
        assert [row["step"] for row in rows(folder)] == [1, 2, 3]
        assert wait(forked(["train", f"resume={folder}", "callbacks.checkpoint.every=9"], log)) == 1
        assert load_checkpoint(folder / "checkpoints")[1]["rlkit"]["rl_step"] == 1
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
