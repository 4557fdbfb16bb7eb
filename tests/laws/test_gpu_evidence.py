"""The first GPU hour: rows survive a kill, finished parts are not done again, and each part runs
without a card."""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from copies import start_copy
from pretend_gpu import PretendGPU

FOLDER = Path(__file__).parents[2] / "experiments" / "gpu_evidence"
OWN = ("rows", "page", "run", "inside", "weights", "ceilings", "parts_of_passes", "parts_of_steps")


@pytest.fixture
def evidence(monkeypatch):
    """Imports a file of the experiment, of whose plain names others make use before and after."""

    def forget() -> None:
        for name in OWN:
            sys.modules.pop(name, None)

    monkeypatch.syspath_prepend(str(FOLDER))
    forget()
    yield importlib.import_module
    forget()


# ----------------------------------------------------------------------------------------- rows


def test_a_piece_that_is_over_is_not_done_again(evidence, tmp_path):
    """A failed one ends the process, is left out by the next, and is tried again when asked."""
    rows = evidence("rows")
    done = []

    def fails(report):
        done.append("fails")
        raise RuntimeError("CUDA error")

    pieces = {
        "first": lambda report: done.append("first"),
        "fails": fails,
        "last": lambda report: done.append("last") or "no weights",
    }
    assert rows.perform(tmp_path, "a", pieces) == 3
    assert not rows.is_over(rows.read_rows(tmp_path), "a")
    assert rows.perform(tmp_path, "a", pieces) == 0 == rows.perform(tmp_path, "a", pieces)
    assert done == ["first", "fails", "last"]
    states = rows.states_of(rows.read_rows(tmp_path), "a")
    assert states == {"first": "done", "fails": "failed", "last": "skipped"}
    assert rows.perform(tmp_path, "a", pieces, again=True) == 3
    assert done == ["first", "fails", "last", "fails"]


KILLED = """
import os, signal, sys
from pathlib import Path
from rows import perform

def piece(report):
    if sys.argv[2] == "a row":
        report("table", "kept", figure=1)
    os.kill(os.getpid(), signal.SIGKILL)

perform(Path(sys.argv[1]), "b", {"piece": piece})
"""


def start_killed(folder: Path, *words: str) -> None:
    command = [sys.executable, "-c", KILLED, str(folder), *words]
    assert subprocess.run(command, cwd=FOLDER, stdout=subprocess.DEVNULL).returncode == -9


def test_a_killed_part_leaves_its_rows_and_goes_on(evidence, tmp_path):
    """A piece that is killed starts again; after two starts without a row it counts as failed."""
    rows = evidence("rows")
    start_killed(tmp_path, "a row")
    with (tmp_path / rows.FILE).open("a") as file:
        file.write('{"part": "b", "pie')  # torn by the kill
    start_killed(tmp_path, "a row")
    starts = [row for row in rows.read_rows(tmp_path) if row["status"] == "begun"]
    assert len(starts) == 2  # the torn line did not swallow the next one
    tables = rows.figures_of(rows.read_rows(tmp_path), "b")
    assert tables == {"table": [{"piece": "piece", "row": "kept", "figure": 1}]}
    assert rows.states_of(rows.read_rows(tmp_path), "b") == {"piece": "begun"}
    start_killed(tmp_path, "no row")
    start_killed(tmp_path, "no row")
    assert rows.perform(tmp_path, "b", {"piece": lambda report: pytest.fail("a third start")}) == 0
    assert rows.states_of(rows.read_rows(tmp_path), "b") == {"piece": "failed"}


# -------------------------------------------------------------------------------------- the command


def given(folder: Path, run: object, **other: object) -> Namespace:
    settings = {"out": folder, "only": list(run.PARTS), "rehearse": True, "seconds": 540}
    return Namespace(**settings | {"weights": None, "problems": None} | other)


def test_a_complete_part_starts_no_process(evidence, monkeypatch, tmp_path):
    run, rows = evidence("run"), evidence("rows")
    started = []
    monkeypatch.setattr(run, "start", lambda part, *_: started.append(part) or 0)
    rows.append_row(tmp_path, part="a", status="over")
    for part in ("a", "b"):
        run.run_part(part, given(tmp_path, run), time.monotonic() + 540)
    assert started == ["b"]


@pytest.mark.parametrize("seconds, state", [(10_000, "failed"), (100, "begun")])
def test_the_parts_own_limit_ends_a_piece_and_the_commands_end_does_not(
    seconds, state, evidence, monkeypatch, tmp_path
):
    """A piece that the command's end cuts off is begun again by the next command."""
    run, rows = evidence("run"), evidence("rows")

    def cut_off(part, *_):
        rows.append_row(tmp_path, part=part, piece="piece", status="begun")

    monkeypatch.setattr(run, "start", cut_off)
    clock = iter([0.0, 0.0, float(min(seconds, run.PARTS["a"].limit))])
    monkeypatch.setattr(run.time, "monotonic", lambda: next(clock))
    run.run_part("a", given(tmp_path, run), float(seconds))
    assert rows.states_of(rows.read_rows(tmp_path), "a") == {"piece": state}


def test_rows_of_two_devices_do_not_share_a_folder(evidence, tmp_path):
    run = evidence("run")
    for _ in range(2):
        run.claim(tmp_path, "NVIDIA H100", run.options())
    with pytest.raises(SystemExit):
        run.claim(tmp_path, "cpu, rehearsed", run.options())


def test_the_page_names_what_is_missing_and_what_stands_out(evidence, tmp_path):
    rows, page = evidence("rows"), evidence("page")
    own = {"part": "a", "piece": "graphs"}
    rows.append_row(tmp_path, **own, status="begun")
    figures = {"table": "CUDA graphs", "key": "longer", "refused": 1, "why": "INTERNAL ASSERT"}
    rows.append_row(tmp_path, **own, status="row", **figures)
    text = page.write_page(tmp_path, "a card").read_text()
    assert "- a, graphs, longer: 1 models cannot be captured. INTERNAL ASSERT" in text
    assert "- graphs: interrupted." in text and "pieces failed" not in text
    assert all(f"## {part}. {title}" in text for part, title in page.TITLES.items())
    assert text.count("Not begun.") == len(page.TITLES) - 1
    rows.append_row(tmp_path, part="b", piece="8B", status="failed", reason="OutOfMemoryError")
    text = page.write_page(tmp_path, "a card").read_text()
    assert "- b: 1 pieces failed" in text and "- 8B: failed. OutOfMemoryError" in text


def test_reply_lengths_have_the_mean_that_the_roofline_is_given(evidence):
    """The mean over seeds against the area under the quantiles; 0.03 is three standard errors of
    20,000 lengths."""
    pytest.importorskip("rlkit.extras.forecast", reason="the roofline is an extra")
    steps = evidence("parts_of_steps")
    lengths = [steps.reply_limit(seed, 1024) for seed in range(20_000)]
    assert statistics.fmean(lengths) == pytest.approx(steps.mean_reply(1024), rel=0.03)
    assert min(lengths) >= 40 and max(lengths) <= 1024


# -------------------------------------------------------------------------------------- whole parts


@pytest.mark.slow
def test_the_rehearsal_writes_rows_of_every_part(evidence, forked, tmp_path):
    """In an empty folder; once more, it only says that all is there. The process of each part is a
    copy of this one. Nothing is left to do for the second start, which is a new one."""
    rows, page = evidence("rows"), evidence("page")
    command = [sys.executable, str(FOLDER / "run.py"), "--rehearse", "--out", str(tmp_path / "out")]
    log = tmp_path / "log"

    def rehearse(words: list[str]) -> int:
        run = evidence("run")
        run.subprocess = SimpleNamespace(
            Popen=start_copy, TimeoutExpired=subprocess.TimeoutExpired, run=subprocess.run
        )
        for name in OWN:
            sys.modules.pop(name, None)
        os.chdir(tmp_path)
        sys.argv = words
        return run.main()

    _, status = os.waitpid(forked(command[1:], log, call=rehearse), 0)
    assert status == 0, log.read_text()[-3000:]
    written = rows.read_rows(tmp_path / "out")
    for part in page.TITLES:
        assert rows.figures_of(written, part), part
        assert "failed" not in rows.states_of(written, part).values()
    skipped = [row for row in written if row["status"] == "skipped"]
    assert all(row["piece"].startswith("TRL") and row["reason"] for row in skipped)
    text = (tmp_path / "out" / "evidence.md").read_text()
    assert all(title in text for title in page.TITLES.values()) and "Not begun" not in text
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0 and again.stdout.count("complete") == len(page.TITLES)
    assert len(rows.read_rows(tmp_path / "out")) == len(written)


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch built without CUDA")
def test_counts_and_decoding_on_a_pretend_gpu(evidence, tmp_path):
    """Graphs are captured and replayed, and no piece of a mixes devices. Its ceilings, tests and
    driver's version need a real card."""
    weights, rows = evidence("weights"), evidence("rows")
    ceilings, passes = evidence("ceilings"), evidence("parts_of_passes")
    setting = weights.Setting(tmp_path, "cuda", rehearse=True)
    counts = {name: work for name, work in ceilings.pieces(setting).items() if "graphs" in name}
    steps = {name: work for name, work in passes.decoding(setting).items() if "context" in name}
    for rank in (0, 4):  # what they import is imported with torch as it is
        weights.random_policy(shape="rehearsed", lora=weights.LoRA(rank=rank))
    with PretendGPU():
        assert rows.perform(tmp_path, "a", counts) == 0, rows.read_rows(tmp_path)[-1]
        assert rows.perform(tmp_path, "b", steps) == 0, rows.read_rows(tmp_path)[-1]
    graphs = rows.figures_of(rows.read_rows(tmp_path), "a")["CUDA graphs"]
    assert all(row["captures"] > 0 and row["refused"] == 0 for row in graphs), json.dumps(graphs)
    replays = [row["replays"] for row in graphs if row["piece"].endswith("tokens")]
    assert replays == sorted(set(replays)) and replays[0] > 0
    decoded = rows.figures_of(rows.read_rows(tmp_path), "b")["decode"]
    by_mode = {mode: [row for row in decoded if row["row"] == mode] for mode in ("replay", "eager")}
    assert all(row["replays"] > 0 for row in by_mode["replay"]) and len(by_mode["replay"]) == 4
    assert not any(row["captures"] for row in by_mode["eager"])
