"""Many steps a file: each is found, all that was whole stays whole, and a resumed run cuts back to
its checkpoint."""

from __future__ import annotations

import gzip

import pytest

from rlkit.episodes import append_step, load_rollouts
from rlkit.errors import ConfigError, DataError
from rlkit.system import shards
from rlkit.types import Rollout, Task


def lines(step: int) -> bytes:
    return f"{step} \x1f\x8b\x08\x04 {'x' * (7 * step % 40)}\n".encode("latin-1")


def read(part: shards.Part) -> bytes:
    return gzip.decompress(part.read())


@pytest.fixture
def folder(tmp_path):
    """Steps 98 to 103, in two files."""
    for step in range(98, 104):
        shards.append_lines(tmp_path / "rollouts", step, lines(step))
    return tmp_path / "rollouts"


def test_a_run_of_3000_steps_keeps_30_files(tmp_path):
    for step in range(1, 3001):
        shards.append_lines(tmp_path, step, b"")
    assert len([*tmp_path.iterdir()]) == 30 and [*shards.index_steps(tmp_path)] == [*range(1, 3001)]


def test_a_step_is_found_without_the_others_and_a_file_is_one_gzip_file_to_other_programs(folder):
    found = shards.index_steps(folder)
    assert {step: read(part) for step, part in found.items()} == {
        step: lines(step) for step in range(98, 104)
    }
    first, second = shards.list_shards(folder)
    assert gzip.decompress(first.read_bytes()) == b"".join(map(lines, (98, 99, 100)))
    assert gzip.decompress(second.read_bytes()) == b"".join(map(lines, (101, 102, 103)))
    assert [path.name for path in (first, second)] == [
        "steps_000001-000100.jsonl.gz",
        "steps_000101-000200.jsonl.gz",
    ]


@pytest.mark.slow
def test_wherever_a_file_was_cut_off_a_resumed_run_keeps_its_steps_and_loses_nothing(folder):
    """Cut anywhere: whole steps are read; cutting back keeps exactly those up to the checkpoint's
    and moves the rest aside, once."""
    kept, last = shards.list_shards(folder)
    whole, before, aside = (
        last.read_bytes(),
        kept.read_bytes(),
        folder.with_name("rollouts.discarded.jsonl.gz"),
    )
    ends = [part.stop for part in shards.index_steps(folder).values() if part.path == last]
    near = {end + more for end in ends for more in (-1, 0, 1, 31, 32, 33)}  # a header has 32 bytes
    for cut in sorted({*range(0, len(whole), 29), *near, len(whole)}):
        last.write_bytes(whole[:cut])
        complete = [step for step, end in zip((101, 102, 103), ends, strict=True) if end <= cut]
        found = shards.index_steps(folder)
        assert all(read(found[step]) == lines(step) for step in (98, 99, 100, *complete))
        for step in (100, 101, 102):
            last.write_bytes(whole[:cut])
            aside.unlink(missing_ok=True)
            stays = max(
                [
                    end
                    for n, end in zip((101, 102, 103), ends, strict=True)
                    if n <= step and end <= cut
                ],
                default=0,
            )
            for _ in range(2):  # killed before the file is cut, and again
                shards.cut_steps(folder, step)
                assert (last.read_bytes() if last.exists() else b"") == whole[
                    :stays
                ] and kept.read_bytes() == before
                assert (aside.read_bytes() if aside.exists() else b"") == whole[stays:cut]
                last.write_bytes(whole[:cut])
            shards.cut_steps(folder, step)
            shards.append_lines(folder, step + 1, lines(7))
            assert read(shards.index_steps(folder)[step + 1]) == lines(7)


def test_cutting_back_beyond_a_file_takes_all_of_it(folder, capsys):
    shards.cut_steps(folder, 98)
    assert [*shards.index_steps(folder)] == [98] and len(shards.list_shards(folder)) == 1
    assert (
        "rollouts of 5 step(s) after step 98: moved to rollouts.discarded.jsonl.gz"
        in capsys.readouterr().out
    )
    assert gzip.decompress(
        folder.with_name("rollouts.discarded.jsonl.gz").read_bytes()
    ) == b"".join(map(lines, range(99, 104)))


def test_where_nothing_can_be_set_aside_nothing_is_cut(folder):
    folder.with_name("rollouts.discarded.jsonl.gz").mkdir()
    before = {path: path.read_bytes() for path in shards.list_shards(folder)}
    with pytest.raises(DataError, match="rollouts that the resumed run replaces would be lost"):
        shards.cut_steps(folder, 99)
    assert {path: path.read_bytes() for path in shards.list_shards(folder)} == before


def test_behind_a_damaged_header_the_next_steps_are_found(folder):
    path, _ = shards.list_shards(folder)
    data = path.read_bytes()
    path.write_bytes(data[:3] + b"?" + data[4:])
    assert [*shards.index_steps(folder)] == [99, 100, 101, 102, 103]


def test_headers_that_lie_cost_nothing(folder):
    """A folder of somebody else: no length is believed before the file has the bytes, and what is
    no header is searched once."""
    path, last = shards.list_shards(folder)
    path.write_bytes(shards.HEAD.pack(shards.SAME, 1, 2**63) + path.read_bytes())
    last.write_bytes(shards.HEAD.pack(shards.SAME, 1, 0) * 100_000 + last.read_bytes())
    found = shards.index_steps(folder)
    assert [*found] == [1, 101, 102, 103] and len(found[1].read()) == path.stat().st_size


def test_rollouts_of_a_step_are_loaded_by_its_number(tmp_path):
    for step in (1, 2):
        append_step(tmp_path, step, [Rollout(Task(f"row/{step}", ()), ())])
    assert [r.task.id for r in load_rollouts(tmp_path, step=2)] == ["row/2"]
    assert [r.task.id for r in load_rollouts(tmp_path / "steps_000001-000100.jsonl.gz")] == [
        "row/1",
        "row/2",
    ]
    with pytest.raises(ConfigError, match="no rollouts of step 3; it holds 2 steps, from 1 to 2"):
        load_rollouts(tmp_path, step=3)


def test_conversations_of_later_steps_are_cut_off(tmp_path):
    """They stood in the file at the next checkpoint, and the file was called foreign later."""
    path = tmp_path / "steps_000001-000100.md"
    texts = [f"# Sample conversations of step {step}\n\nhello\n" for step in (1, 4, 6, 8)]
    path.write_text("".join(texts))
    shards.cut_samples(tmp_path, 5)
    assert path.read_text() == "".join(texts[:2])
    shards.cut_samples(tmp_path, 5)
    assert path.read_text() == "".join(texts[:2])
