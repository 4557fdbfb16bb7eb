"""Whatever happens to a file of a run folder: a resumed run ends as if nothing had happened, or
says in a sentence which file it is.

The law goes over every kind of file of a folder in which a run was killed, and over every damage,
in turns. A file of a kind that `KINDS` does not know fails it. Each run is a fork of this process,
which has torch and Lightning imported already.
"""

from __future__ import annotations

import ctypes
import fnmatch
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from laws.test_kill import TINY, arm
from parametrise import cases
from rlkit.commands.cli import list_commands, main
from rlkit.commands.train import read_own_summary
from rlkit.config.changes import identify
from rlkit.errors import DataError, RLKitError
from rlkit.runs import folder as run_folders
from rlkit.system.contents import clear_places
from rlkit.system.identity import read_identity
from rlkit.system.rows import read_rows
from rlkit.training import loggers
from rlkit.training.callbacks.checkpoints import read_checkpoint
from rlkit.training.run import take_up

WORDS = [
    *(
        word
        for word in TINY
        if not word.startswith(("trainer.steps", "callbacks.checkpoint", "logger", "evaluation"))
    ),
    *(
        "trainer.steps=2",
        "model.lora.rank=1",
        "evaluation.n=2",
        "evaluation.every=1",
        "callbacks.checkpoint.best=reward/mean",
    ),
    *(
        "callbacks.samples.every=1",
        "callbacks.checkpoint.every=1",
        "callbacks.checkpoint.keep=3",
        "reward=numeric",
        "reward.terms.numeric.fn._target_=fragile_reward.score",
    ),
]
LONGER = "trainer.steps=5"
LIMIT = 300  # seconds after which a resumed run counts as hanging
REWARD = """
import os
import random

def score(rollout):
    if os.path.exists(os.environ.get("FRAGILE", "")):
        raise ValueError("broken")
    return len(rollout.final_content) % 7 + random.random()
"""
# Kind of a file → pattern. A resume reads the first ones, or goes on writing them; it never looks
# at the others.
KINDS = {
    "config": "config.yaml",
    "overrides": ".hydra/overrides.yaml",
    "Hydra's own": ".hydra/*.yaml",
    "starts": "run.json",
    "summary": "summary.json",
    "owner": "owner.json",
    "metrics": "metrics.jsonl",
    "metrics that were set aside": "metrics.discarded.jsonl",
    "metrics for spreadsheets": "metrics.csv",
    "rollouts": "rollouts/steps_*.jsonl.gz",
    "rollouts that were set aside": "rollouts.discarded.jsonl.gz",
    "held-out replies": "held_out/*/steps_*.jsonl.gz",
    "held-out replies that were set aside": "held_out/*.discarded.jsonl.gz",
    "completions": "completions/steps_*.parquet",
    "completions that were set aside": "completions.discarded/*.parquet",
    "samples": "samples/steps_*.md",
    "first prompts": "prompts.txt",
    "checkpoints": "checkpoints/step_*.ckpt",
    "checkpoints that were set aside": "checkpoints/step_*.ckpt.superseded",
    "link to the best checkpoint": "checkpoints/best.ckpt",
    "value of the best checkpoint": "checkpoints/best.json",
    "adapters": "checkpoints/*.adapter/*",
    "model": "model/*",
    "best model": "model_best/*",
    "failed rollout": "failed_rollout.jsonl.gz*",
    "debug bundle": "debug/*/*",
    "TensorBoard's settings": "tensorboard/hparams.yaml",
    "TensorBoard's events": "tensorboard/**",
}
UNREAD = (
    "adapters",
    "model",
    "best model",
    "failed rollout",
    "debug bundle",
    "TensorBoard's events",
)  # one file of each is tried, with one damage
TEXTS = (
    "config",
    "overrides",
    "starts",
    "summary",
    "owner",
    "metrics",
)  # a flipped byte may mean another thing at each place
REPEATED = (
    "Hydra's own",
    "summary",
    "metrics for spreadsheets",
    "first prompts",
    "link to the best checkpoint",
    "value of the best checkpoint",
    "model",
    "best model",
)


def kind_of(name: str) -> str:
    """The kind of a file of a run folder."""
    for kind, pattern in KINDS.items():
        if fnmatch.fnmatchcase(name, pattern):
            return kind
    raise AssertionError(
        f"{name}: a file of a kind that the law does not know; add it to KINDS, with what a resume"
        " does about it"
    )


# ------------------------------------------------------------------------------------------ damages


def missing(path: Path, other: Path | None) -> None:
    path.unlink()


def replace(path: Path, data: bytes) -> None:
    """Writes a file in place of one that may be a link."""
    path.unlink()
    path.write_bytes(data)


def content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b"a link that leads nowhere"


def emptied(path: Path, other: Path | None) -> None:
    replace(path, b"")


def truncated(path: Path, other: Path | None) -> None:
    data = content(path)
    replace(path, data[: len(data) * 2 // 3])


def flipped(path: Path, other: Path | None, place: float = 0.5) -> None:
    data = bytearray(content(path))
    data[min(int(len(data) * place), len(data) - 1)] ^= 1
    replace(path, bytes(data))


def flipped_early(path: Path, other: Path | None) -> None:
    flipped(path, other, 0.1)


def flipped_late(path: Path, other: Path | None) -> None:
    flipped(path, other, 0.95)


def swapped(path: Path, other: Path) -> None:
    replace(path, content(other))


def a_folder(path: Path, other: Path | None) -> None:
    path.unlink()
    path.mkdir()
    (path / "mine.txt").write_text("mine")


def a_fifo(path: Path, other: Path | None) -> None:
    path.unlink()
    os.mkfifo(path)


def unreadable(path: Path, other: Path | None) -> None:
    replace(path, content(path))
    path.chmod(0)


DAMAGES = [
    missing,
    emptied,
    truncated,
    flipped,
    flipped_early,
    flipped_late,
    swapped,
    a_folder,
    a_fifo,
    unreadable,
]


def without_privileges() -> None:
    """Lets file modes hold for root as well: gives up CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    (capset, version 3)."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    held = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, held) == 0
    held[0] &= ~0b110
    assert libc.capset(header, held) == 0


# ----------------------------------------------------------------------------------------- the runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forked):
    """(a run that nobody disturbed, the same one killed again and again, the latter with another
    seed)."""
    root = tmp_path_factory.mktemp("runs")
    (root / "fragile_reward.py").write_text(REWARD)
    os.environ["PYTHONPATH"] = str(root)

    def run(words, log, before=None, limit=LIMIT):
        def begin():
            import sys

            sys.path.insert(0, str(root))
            os.chdir(root)
            signal.alarm(limit)
            without_privileges()
            if before is not None:
                before()

        return os.waitstatus_to_exitcode(os.waitpid(forked(["train", *words], log, begin), 0)[1])

    def killed(folder: Path, seed: int) -> None:
        log = folder.with_suffix(".log")

        def fail() -> None:
            from rlkit.training.callbacks import stopping

            started = stopping.StopOnSignal.on_train_start

            def start(self, trainer, module):
                started(self, trainer, module)
                os.environ["FRAGILE"] = "/"

            stopping.StopOnSignal.on_train_start = start

        assert run([*WORDS, f"seed={seed}", f"hydra.run.dir={folder}"], log) == 0, log.read_text()
        assert (
            run([f"resume={folder}", LONGER], log, lambda: arm("generate", 4, 6)) == -signal.SIGKILL
        ), log.read_text()
        assert run([f"resume={folder}"], log, fail) == 1, log.read_text()
        earlier = f"resume={folder}/checkpoints/step_000003.ckpt"
        assert run([earlier], log, lambda: arm("generate", 3, 6)) == -signal.SIGKILL, (
            log.read_text()
        )

    whole, log = root / "whole", root / "whole.log"
    assert run([*WORDS, "seed=0", f"hydra.run.dir={whole}"], log) == 0, log.read_text()
    assert run([f"resume={whole}", LONGER], log) == 0, log.read_text()
    killed(root / "killed", 0)
    killed(root / "other", 1)
    return run, whole, root / "killed", root / "other"


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def rows(folder: Path) -> list[dict]:
    return [
        {k: v for k, v in row.items() if not k.startswith("perf/")}
        for row in read_rows(folder / "metrics.jsonl")
    ]


def weights(folder: Path):
    return torch.load(folder / "checkpoints" / "step_000005.ckpt", weights_only=True)["state_dict"]


def counterpart(folder: Path, name: str) -> Path | None:
    """The same-named file of another run; one of the same kind where names hold a time."""
    if os.path.lexists(folder / name):
        return folder / name
    alike = [own for own in names_in(folder) if kind_of(own) == kind_of(name)]
    return folder / alike[0] if alike else None


def faults_of(name: str, damage, runs, folder: Path, same) -> list[str]:
    """In what the law does not hold for a damage to a file of the killed run, in sentences."""
    run, whole, killed, other = runs
    log = folder.with_suffix(".log")
    shutil.copytree(killed, folder, symlinks=True)
    theirs = counterpart(other, name)
    if theirs is None and damage is swapped:
        return []
    damage(folder / name, theirs)
    status = run([f"resume={folder}", "trust=true"], log)  # a copy is not known as the user's own
    said = log.read_text()
    short = Path(name).name
    faults = []
    if status == -signal.SIGALRM:
        return ["it hangs"]
    if "Traceback" in said:
        faults.append("it ends in a traceback")
    if status == 0:
        if not same(weights(whole), weights(folder)):
            faults.append("other weights")
        mine = rows(folder)
        lost = (
            kind_of(name) == "metrics"
            and short in said
            and all(row in rows(whole) for row in mine)
            and mine[-1] == rows(whole)[-1]
        )
        if mine != rows(whole) and not lost:
            faults.append("other rows")
        if says_nothing(name, said):
            faults.append("it says nothing")
    elif status not in (1, 2):
        faults.append(f"exit {status}")
    elif short not in said and not (kind_of(name) == "owner" and "works there" in said):
        faults.append(f"exit {status} without the name of the file")
    if damage is a_folder and not any(path.name == "mine.txt" for path in folder.rglob("mine.txt")):
        faults.append("a file of the user is gone")
    if damage is swapped and kind_of(name) not in REPEATED:
        kept = any(
            content(theirs) in path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and os.access(path, os.R_OK)
        )
        if not kept and kind_of(name) != "owner":
            faults.append("the other run's file is gone")
    return [f"{fault}: {said[-1500:]}" for fault in faults]


SAYS = (
    "metrics",
    "rollouts",
    "held-out replies",
    "completions",
    "samples",
)  # kinds whose loss is always said


def says_nothing(name: str, said: str) -> bool:
    """Whether a run went on without a word on a file whose loss has to be said."""
    return kind_of(name) in SAYS and Path(name).name not in said


def check(cases, runs, tmp_path, same) -> None:
    found = {}
    for number, (name, damage) in enumerate(cases):
        folder = tmp_path / str(number)
        if faults := faults_of(name, damage, runs, folder, same):
            found[name, damage.__name__] = faults
        shutil.rmtree(folder)
    assert not found, "\n\n".join(
        f"{name} {damage}: {fault}" for (name, damage), faults in found.items() for fault in faults
    )


FLIPS = (flipped_early, flipped_late)  # of texts alone
OTHERS = [damage for damage in DAMAGES if damage not in FLIPS]


def tried(names: list[str], damage) -> list[str]:
    """The files that meet a damage, in turns: the first and the last file of a kind meet one of
    them, and the first meets another one if a resume reads it."""
    first = {kind_of(name): name for name in reversed(names)}
    last = {kind: name for name in names if (kind := kind_of(name)) not in UNREAD}
    names = [name for name in names if name in (*first.values(), *last.values())]
    if damage in FLIPS:
        texts = [name for name in names if kind_of(name) in TEXTS]
        return texts[FLIPS.index(damage) :: 2]
    number = OTHERS.index(damage)
    return [
        name
        for place, name in enumerate(names)
        if number == place % len(OTHERS)
        or (
            last.get(kind_of(name))
            and name in first.values()
            and number == (place + 3) % len(OTHERS)
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_to_every_kind_of_file_of_a_run_folder(runs, tmp_path, same, damage):
    names = names_in(runs[2])
    assert set(map(kind_of, names)) == set(KINDS)
    assert set(map(kind_of, names)) == {
        kind_of(name) for other in DAMAGES for name in tried(names, other)
    }
    check([(name, damage) for name in tried(names, damage)], runs, tmp_path, same)


# ---------------------------------------------------------------------------------- representatives

SMALL = [
    *(
        "debug=fast",
        "trainer.accelerator=cpu",
        "trainer.steps=2",
        "task.max_samples=32",
        "model.lora.rank=1",
        "batch.group_size=2",
    ),
    *(
        "generation.max_new_tokens=4",
        "evaluation.n=2",
        "evaluation.every=1",
        "callbacks.checkpoint.every=1",
        "logger=none",
    ),
    *("callbacks.checkpoint.model=false", "callbacks.samples.every=1"),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The folders of two runs with other seeds and other problems."""
    root = tmp_path_factory.mktemp("pair")
    for seed, name in enumerate(("mine", "theirs")):
        assert (
            main(
                [
                    "train",
                    *SMALL,
                    f"seed={seed}",
                    f"evaluation.n={2 + seed}",
                    f"hydra.run.dir={root / name}",
                ]
            )
            == 0
        )
    return root / "mine", root / "theirs"


@pytest.fixture
def mine(pair, tmp_path):
    return Path(shutil.copytree(pair[0], tmp_path / "mine", symlinks=True))


def take_up_in_child(folder: Path) -> None:
    """What `rlkit train resume=FOLDER` does before it trains."""
    clear_places(folder)
    identity = run_folders.require_identity(folder)
    run_folders.require_overrides(folder)
    read_own_summary(folder)
    take_up(folder / "checkpoints", folder, identity)


SHARD, PARQUET = "steps_000001-000100.jsonl.gz", "steps_000002-000002.parquet"
GOES_ON = {  # (file, damage) → what a resume says, with which it goes on
    ("metrics.jsonl", missing): "metrics.jsonl is missing; its 3 row(s) up to step 2 are lost",
    ("metrics.jsonl", emptied): "metrics.jsonl is empty; its 3 row(s) up to step 2 are lost",
    (
        "metrics.jsonl",
        flipped,
    ): "metrics.jsonl lacks 1 of the 3 row(s) that this run wrote up to step 2",
    (
        "metrics.jsonl",
        truncated,
    ): "metrics.jsonl lacks 1 of the 3 row(s) that this run wrote up to step 2",
    (
        "metrics.jsonl",
        swapped,
    ): (
        "metrics.jsonl is not what this run wrote; its 3 row(s) up to step 2 are lost, and the run"
        " goes on without them; 3 other line(s) are kept in aside/metrics.jsonl"
    ),
    (
        "metrics.jsonl",
        a_fifo,
    ): "metrics.jsonl is no regular file and is kept as aside/metrics.jsonl",
    (
        f"rollouts/{SHARD}",
        missing,
    ): (
        f"rollouts/{SHARD} is missing; the run goes on without what this run wrote there up to"
        " step 2"
    ),
    (
        f"rollouts/{SHARD}",
        emptied,
    ): f"rollouts/{SHARD} is empty; kept as aside/rollouts/{SHARD}; the run goes on",
    (
        f"rollouts/{SHARD}",
        swapped,
    ): f"rollouts/{SHARD} does not begin with what this run wrote; kept as aside/rollouts/{SHARD}",
    (
        f"rollouts/{SHARD}",
        a_folder,
    ): f"rollouts/{SHARD} is no regular file and is kept as aside/rollouts/{SHARD}",
    (
        f"held_out/test/{SHARD}",
        swapped,
    ): (
        f"held_out/test/{SHARD} does not begin with what this run wrote; kept as"
        f" aside/held_out/test/{SHARD}"
    ),
    (
        f"held_out/validation/{SHARD}",
        flipped,
    ): f"held_out/validation/{SHARD} does not begin with what this run wrote",
    (f"completions/{PARQUET}", missing): f"completions/{PARQUET} is missing",
    (
        f"completions/{PARQUET}",
        swapped,
    ): (
        f"completions/{PARQUET} does not begin with what this run wrote; kept as"
        f" aside/completions/{PARQUET}"
    ),
    (
        "samples/steps_000001-000100.md",
        swapped,
    ): "samples/steps_000001-000100.md does not begin with what this run wrote",
    (
        "summary.json",
        swapped,
    ): "summary.json is not what this run wrote, and is kept as aside/summary.json",
    ("run.json", missing): "run.json is missing; a new one begins with this process",
    ("checkpoints/step_000001.ckpt", swapped): "step_000001.ckpt is a checkpoint of run",
    (
        "checkpoints/step_000002.ckpt",
        flipped,
    ): "resume: 1 line(s) after step 1: moved to metrics.discarded.jsonl",
}
REFUSED = {  # (file, damage) → the sentence of a refusal
    (
        "checkpoints/step_000002.ckpt",
        swapped,
    ): (
        r"step_000002\.ckpt is a checkpoint of run \w{16} \(name=grpo, seed=1\), and .* is the"
        r" folder"
    ),
    ("config.yaml", swapped): r"config\.yaml belongs to run \w{16} and run\.json to run \w{16}",
    ("config.yaml", emptied): r"config\.yaml does not say which run it belongs to",
    ("run.json", swapped): r"config\.yaml belongs to run \w{16} and run\.json to run \w{16}",
    (".hydra/overrides.yaml", swapped): r"overrides\.yaml is not what this run wrote",
    (".hydra/overrides.yaml", missing): r"overrides\.yaml is missing or not a file",
    (".hydra/overrides.yaml", truncated): r"overrides\.yaml",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, damage, sentence",
    cases([(*key, text) for key, text in GOES_ON.items()], 3, unpack=True),
)
def test_a_resume_goes_on_and_says_which_file_is_not_its_own(
    pair, mine, capsys, name, damage, sentence
):
    theirs = (pair[1] / name).read_bytes()
    damage(mine / name, pair[1] / name)
    take_up_in_child(mine)
    said = capsys.readouterr().out
    assert sentence in said
    if damage is swapped:
        assert (mine / "aside" / name).read_bytes() == theirs
    take_up_in_child(mine)
    assert "aside" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name, damage, sentence", [(*key, text) for key, text in REFUSED.items()])
def test_a_resume_is_refused_where_it_would_mix_two_runs(pair, mine, name, damage, sentence):
    damage(mine / name, pair[1] / name)
    before = {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()}
    with pytest.raises(RLKitError, match=sentence):
        take_up_in_child(mine)
    assert before == {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_every_file_of_a_run_folder_has_a_kind(pair):
    assert {kind_of(name) for name in names_in(pair[0])} >= {
        "metrics",
        "checkpoints",
        "rollouts",
        "held-out replies",
        "completions",
    }


def test_a_run_is_what_its_numbers_depend_on():
    config = {
        "seed": 0,
        "model": {"path": "tiny", "suggests": {"lr": 1}, "shelf": "everyday"},
        "logger": {"a": 1},
        "callbacks": {},
    }
    silent = [
        {"logger": {}},
        {"callbacks": {"b": {"every": 2}}},
        {"resume": "auto", "takeover": True},
        {"model": {"path": "tiny", "suggests": {"lr": 2}, "shelf": "catalogue"}},
    ]
    assert len({identify(config | change) for change in [{}, *silent]}) == 1
    assert (
        len(
            {
                identify(config | change)
                for change in [{}, {"seed": 1}, {"trainer": {"steps": 3}}, {"model": {"path": "b"}}]
            }
        )
        == 4
    )


@pytest.mark.slow
def test_a_run_keeps_its_identity_wherever_and_with_whatever_it_goes_on(pair, mine):
    own = read_identity(mine)
    assert own and own != read_identity(pair[1])
    assert (
        main(
            [
                "train",
                f"resume={mine}",
                "trainer.steps=3",
                "optimizer.lr=1e-5",
                "callbacks.checkpoint.keep=3",
            ]
        )
        == 0
    )
    assert main(["train", f"resume={mine}", "trainer.steps=4"]) == 0
    assert "lr: 1.0e-05" in (mine / "config.yaml").read_text() and read_identity(mine) == own
    assert {
        read_checkpoint(mine / "checkpoints" / f"step_00000{n}.ckpt")["run"]["identity"]
        for n in (2, 3, 4)
    } == {own}
    assert run_folders.read_summary(mine)["identity"] == own


def test_auto_finds_a_run_that_is_shown_and_saved_in_other_ways(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {"seed": 0, "logger": {}, "callbacks": {"checkpoint": {"every": 1}}}
    run_folders.write_config(Path("outputs/a/run"), config)
    assert (
        run_folders.find_unfinished_run("a", {"seed": 0, "logger": {"x": 1}, "callbacks": {}})
        == tmp_path / "outputs/a/run"
    )
    assert (
        run_folders.find_unfinished_run(
            "a", {"seed": 1, "logger": {}, "callbacks": config["callbacks"]}
        )
        is None
    )


def test_the_id_of_a_logger_belongs_to_one_run(tmp_path, capsys):
    for seed, name in enumerate(("mine", "theirs")):
        run_folders.write_config(tmp_path / name, {"seed": seed})
        loggers.keep_id(tmp_path / name, "wandb.id", name)
    assert loggers.read_id(tmp_path / "mine", "wandb.id") == "mine"
    swapped(tmp_path / "mine" / "wandb.id", tmp_path / "theirs" / "wandb.id")
    assert loggers.read_id(tmp_path / "mine", "wandb.id") is None
    assert (
        "wandb.id is not what this run wrote, and is kept as aside/wandb.id"
        in capsys.readouterr().out
    )


def test_a_run_folder_without_its_config_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RLKitError, match=r"holds metrics\.jsonl, but no file config\.yaml"):
        run_folders.find_run(str(tmp_path), "resume")


COMMANDS = [
    ["train", "resume={}"],
    ["evaluate", "run={}"],
    ["export", "run={}"],
    ["agent", "Who?", "run={}"],
    ["serve", "run={}"],
]
COMMANDS = [words for words in COMMANDS if words[0] in list_commands()]


@pytest.mark.parametrize("words", cases(COMMANDS, 2))
def test_a_run_folder_without_an_identity_is_refused_with_a_sentence(
    tmp_path, monkeypatch, capsys, words
):
    """Versions before the first release wrote such folders; nothing reads their names and
    formats."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old" / "checkpoints").mkdir(parents=True)
    (tmp_path / "old" / "config.yaml").write_text("_target_: rlkit.settings.Experiment\n")
    assert main([word.format("old") for word in words]) == 2
    said = capsys.readouterr().err
    assert (
        "a version before 0.1.0 wrote it" in said
        and "start a new run" in said
        and "Traceback" not in said
    )


@pytest.mark.slow
@pytest.mark.parametrize("resume", ["never", "auto"])
def test_no_new_run_begins_in_the_folder_of_one_that_lost_its_config(mine, capsys, resume):
    (mine / "config.yaml").unlink()
    before = names_in(mine)
    assert main(["train", *SMALL, f"hydra.run.dir={mine}", f"resume={resume}"]) == 2
    assert "but no file config.yaml" in capsys.readouterr().err and names_in(mine) == before


@pytest.mark.slow
def test_a_refused_run_leaves_the_files_that_were_in_its_folder(tmp_path, monkeypatch):
    """It removed the whole folder that hydra.run.dir named."""

    def refuse(*_, **__):
        raise DataError("no")

    monkeypatch.setattr("rlkit.commands.train.train_in", refuse)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / "old" / "thesis.tex").write_text("mine")
        assert main(["train", *SMALL, f"hydra.run.dir={tmp_path / name}"]) == 2
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == [
        "old",
        "old/thesis.tex",
    ]
