"""A checkpoint and a folder of weights are read whole or not at all: damage in any place is found
before anything is loaded."""

from __future__ import annotations

import json
import random
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from rlkit.commands.cli import main
from rlkit.errors import DataError
from rlkit.system.digest import find_damage, find_folder_damage
from rlkit.training.callbacks import checkpoints
from rlkit.training.callbacks.checkpoints import AtomicCheckpointIO, load_checkpoint, supersede

PAGE = 4096
SMALL = [
    "debug=fast",
    "trainer.accelerator=cpu",
    "task.max_samples=32",
    "evaluation.n=0",
    "logger=none",
    "model.lora.rank=1",
    "generation.max_new_tokens=32",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps; under LoRA, so that its checkpoints are small."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(["train", *SMALL, f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.fixture
def copy(run, tmp_path):
    """The run in a folder of its own, to be damaged."""
    return Path(shutil.copytree(run, tmp_path / "run", symlinks=True))


def flips(path: Path) -> list[tuple[int, str]]:
    """(offset, what lies there): in each tensor, each other record, each header of the archive, its
    index, its end and the seal."""
    data = path.read_bytes()
    places = []
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            name, extra = (
                int.from_bytes(
                    data[entry.header_offset + i : entry.header_offset + i + 2], "little"
                )
                for i in (26, 28)
            )
            start = entry.header_offset + 30 + name + extra
            places += [
                (entry.header_offset + 12, f"header of {entry.filename}"),
                (start + entry.file_size // 2, entry.filename),
            ]
    index = data.rfind(b"PK\1\2")
    return [
        *places,
        (index + 20, "index"),
        (data.rfind(b"PK\5\6") + 1, "end"),
        (len(data) - 70, "seal"),
        (len(data) - 5, "digest"),
    ]


def flipped(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def zeroed(path: Path, page: int) -> bytes:
    """Overwrites a page with zeros; what was there."""
    with path.open("r+b") as file:
        file.seek(page * PAGE)
        before = file.read(PAGE)
        file.seek(page * PAGE)
        file.write(bytes(len(before)))
    return before


def newest(folder: Path) -> Path:
    return folder / "checkpoints" / "step_000002.ckpt"


# -------------------------------------------------------------------------------------- checkpoints


@pytest.mark.slow
def test_a_whole_checkpoint_is_whole_and_plain_torch_reads_it(run):
    assert find_damage(newest(run)) == ""
    assert torch.load(newest(run), weights_only=True)["rlkit"]["rl_step"] == 2


@pytest.mark.slow
def test_a_flipped_bit_is_found_wherever_it_is(copy):
    path, draw = newest(copy), random.Random("bits")
    places = flips(path)
    assert len(places) > 100  # two optimiser moments and a weight for each adapter
    for offset, what in places:
        bit = draw.randrange(8)
        flipped(path, offset, bit)
        assert find_damage(path), what
        flipped(path, offset, bit)
    assert find_damage(path) == ""


@pytest.mark.slow
def test_a_zeroed_page_is_found_wherever_it_is(copy):
    path = newest(copy)
    pages = -(-path.stat().st_size // PAGE)
    for page in {0, 1, pages // 2, *range(pages - 3, pages)}:
        before = zeroed(path, page)
        assert find_damage(path), page
        with path.open("r+b") as file:
            file.seek(page * PAGE)
            file.write(before)
    assert find_damage(path) == ""


@pytest.mark.slow
def test_every_page_of_a_checkpoint_of_all_weights(tmp_path):
    """A bit flipped and the whole page zeroed, in each page of the default model's checkpoint."""
    folder, draw = tmp_path / "run", random.Random("pages")
    assert main(["train", *SMALL[:-1], "trainer.steps=1", f"hydra.run.dir={folder}"]) == 0
    path = folder / "checkpoints" / "step_000001.ckpt"
    size = path.stat().st_size
    for page in range(-(-size // PAGE)):
        offset, bit = draw.randrange(page * PAGE, min(size, (page + 1) * PAGE)), draw.randrange(8)
        flipped(path, offset, bit)
        assert find_damage(path), offset
        flipped(path, offset, bit)
        before = zeroed(path, page)
        assert find_damage(path) or not any(before), (
            page
        )  # a page of padding is the same when it is zeroed
        with path.open("r+b") as file:
            file.seek(page * PAGE)
            file.write(before)
    assert find_damage(path) == ""


@pytest.mark.slow
def test_a_checkpoint_cut_anywhere_is_damaged(copy):
    data, path = newest(copy).read_bytes(), newest(copy)
    for left in (0, 1, 21, 22, PAGE, len(data) // 2, len(data) - 80, len(data) - 1):
        path.write_bytes(data[:left])
        assert find_damage(path), left
    path.write_bytes(data + b"\0")
    assert find_damage(path)


@pytest.mark.slow
def test_nothing_of_a_damaged_checkpoint_is_loaded_and_the_one_before_it_is_used(
    copy, monkeypatch, capsys
):
    loaded, real = [], torch.load
    monkeypatch.setattr(
        torch, "load", lambda path, **given: loaded.append(Path(path).name) or real(path, **given)
    )
    zeroed(newest(copy), 3)
    path, state = load_checkpoint(copy / "checkpoints")
    assert (
        path.name == "step_000001.ckpt"
        and state["rlkit"]["rl_step"] == 1
        and loaded == ["step_000001.ckpt"]
    )
    said = capsys.readouterr().err
    assert "step_000002.ckpt is damaged" in said and "step_000001.ckpt is used" in said


@pytest.mark.slow
def test_a_damaged_checkpoint_that_was_named_is_refused_and_the_one_before_it_is_offered(copy):
    zeroed(newest(copy), 3)
    with pytest.raises(
        DataError, match=r"step_000002\.ckpt is damaged .*before it .*step_000001\.ckpt"
    ):
        load_checkpoint(newest(copy))
    zeroed(copy / "checkpoints" / "step_000001.ckpt", 3)
    for source in (newest(copy), copy / "checkpoints"):
        with pytest.raises(DataError, match="no checkpoint that can be read"):
            load_checkpoint(source)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_kept_when_a_run_goes_on_without_it(copy, capsys):
    """It is evidence of a failing disk. A whole one of another past makes room at the next save, as
    before."""
    AtomicCheckpointIO().save_checkpoint(
        {"rlkit": {"rl_step": 3}}, copy / "checkpoints" / "step_000003.ckpt"
    )
    zeroed(newest(copy), 3)
    damaged = newest(copy).read_bytes()
    for number in ("", "_2"):
        supersede(copy / "checkpoints", 1)
        assert (copy / "checkpoints" / f"step_000002.ckpt.damaged{number}").read_bytes() == damaged
        newest(copy).write_bytes(damaged)
    assert "step_000002.ckpt.damaged" in capsys.readouterr().out
    assert (copy / "checkpoints" / "step_000003.ckpt.superseded").exists()


COMMANDS = {
    "evaluate": ["evaluate", "evaluation.n=2", "evaluation.samples=1", "evaluation.k=[1]"],
    "agent": ["agent", "What is 1 + 1?", "generation.max_new_tokens=4"],
    "export": ["export", "merge=true"],
    "train": ["train", "trainer.steps=3"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "export")) for name in COMMANDS],
)
def test_commands_take_the_checkpoint_before_a_damaged_one_and_say_so(
    copy, capsys, monkeypatch, command
):
    monkeypatch.chdir(copy)
    offset = newest(copy).stat().st_size // 2
    flipped(newest(copy), offset, 5)
    key = "resume" if command == "train" else "run"
    assert main([*COMMANDS[command], f"{key}={copy}"]) == 0
    said = capsys.readouterr()
    assert "step_000002.ckpt is damaged" in said.err and "step_000001.ckpt is used" in said.err
    if command == "train":
        assert [
            json.loads(line)["step"] for line in (copy / "metrics.jsonl").read_text().splitlines()
        ] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("other", ["model.lora.rank=0", "model.lora.targets=[q_proj]"])
def test_a_checkpoint_of_other_weights_is_not_loaded_in_part(run, capsys, other):
    """Names that the model does not have were once passed over: the base was evaluated under the
    name of the trained policy."""
    assert main([*COMMANDS["evaluate"], f"run={run}", other]) == 2
    assert "belongs to another model" in capsys.readouterr().err


@pytest.mark.slow
def test_the_best_model_is_not_written_of_a_damaged_checkpoint(copy):
    zeroed(newest(copy), 3)
    with pytest.raises(OSError, match="is damaged"):
        checkpoints.read_weights(newest(copy), copy, "")


# ------------------------------------------------------------------------------- folders of weights


@pytest.mark.slow
def test_a_damaged_file_of_a_saved_model_is_found_before_it_is_loaded(
    run, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    assert main(["export", f"run={run}", f"to={model}", "merge=true"]) == 0
    assert find_folder_damage(model) == ""
    listed = (model / "rlkit.sha256").read_text()
    assert {line.split("  ")[1] for line in listed.splitlines()} == {
        p.name for p in model.iterdir()
    } - {"rlkit.sha256"}
    for path in model.iterdir():
        offset = path.stat().st_size // 2
        flipped(path, offset, 2)
        assert find_folder_damage(model), path.name
        flipped(path, offset, 2)
    flipped(model / "model.safetensors", 400_000, 0)
    assert main(["evaluate", f"model.path={model}", *COMMANDS["evaluate"][1:]]) == 2
    said = capsys.readouterr().err
    assert f"model.path={model}: model.safetensors is not the file that rlkit.sha256 lists" in said


def test_a_missing_file_or_a_damaged_list_is_damage_and_no_list_is_none(tmp_path):
    from rlkit.system.digest import write_sums

    (tmp_path / "a.json").write_text("{}")
    assert (
        find_folder_damage(tmp_path)
        == find_folder_damage(tmp_path / "absent")
        == find_folder_damage(tmp_path / "a.json")
        == ""
    )
    write_sums(tmp_path)
    whole = (tmp_path / "rlkit.sha256").read_bytes()
    for content in (b"", bytes(80), b"\xff" + whole, whole.replace(b"  ", b" ")):
        (tmp_path / "rlkit.sha256").write_bytes(content)
        assert find_folder_damage(tmp_path), content
    (tmp_path / "rlkit.sha256").write_bytes(whole)
    (tmp_path / "a.json").unlink()
    assert "a.json" in find_folder_damage(tmp_path)
