"""The benchmarks run and write well-formed tables. What they measure is measured on a quiet
machine, by hand."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from copies import as_script, run_script

FOLDER = Path(__file__).parents[2] / "experiments" / "benchmarks"

COLUMNS = {  # benchmark → columns whose every value is a number > 0
    "decode": ("tokens_per_second", "seconds", "rows"),
    "turns": ("whole_run_seconds", "ratio_of_a_decode_step"),
    "tools": ("seconds", "episodes"),
    "memory": ("naive_mib", "rlkit_mib", "naive_seconds"),
    "packing": ("padded_seconds", "packed_seconds", "apart_seconds"),
    "overhead": ("step_s",),
    "roofline": ("expected_s", "measured_s"),
    "startup": ("seconds",),
    "threads": ("seconds",),
    "overlap": ("step_s", "update_s", "reached"),
    "parts": ("step_s", "first_step_s"),
}


# Benchmarks that need a new process: a copy has the memory that this one has freed, so a peak may
# not show, and changing torch's threads in it may fail after this one has used several. peers asks
# another interpreter.
NEW = ("memory", "overhead", "parts", "peers")


@pytest.fixture
def quick(forked, tmp_path):
    """(benchmark, words) → the rows that it writes with --quick. It is a copy of this process, and
    so are the processes that it asks for a figure each; those in NEW are new processes."""

    def run(words: list[str]) -> int:
        sys.path.insert(0, str(FOLDER))
        import bench

        bench.subprocess = SimpleNamespace(run=run_script, PIPE=None, STDOUT=None)
        return as_script(words)

    def quick(name: str, *words: str) -> list[dict[str, str]]:
        command = [str(FOLDER / f"{name}.py"), "--quick", "--threads", "1", "--out", str(tmp_path)]
        if name in NEW:
            done = subprocess.run(
                [sys.executable, *command, *words], capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            return read(tmp_path, name)
        child = forked([*command, *words], tmp_path / "log", call=run)
        _, status = os.waitpid(child, 0)
        assert status == 0, (tmp_path / "log").read_text()
        return read(tmp_path, name)

    return quick


def read(folder: Path, name: str) -> list[dict[str, str]]:
    """The rows of a table."""
    with (folder / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows and all(row["machine"] and row["date"] and row["torch"] for row in rows)
    assert all(
        None not in row and None not in row.values() for row in rows
    )  # no row longer or shorter than the header
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", COLUMNS)
def test_a_benchmark_writes_a_table(name, quick):
    """Both forms of the update that memory.py measures have one gradient, or their memory is that
    of two different things."""
    rows = quick(name)
    assert all(float(row[column]) > 0 for row in rows for column in COLUMNS[name])
    if name == "memory":
        assert float(rows[0]["gradient_difference"]) < 1e-4  # float32 sums over 151,936 logits


@pytest.mark.slow
def test_bytes_of_an_episode_grow_with_its_tokens(quick):
    """With whole contexts in every step the exponents were 1.4 and more."""
    fits = [row for row in quick("growth") if not row["turns"]]
    assert (
        all(
            0.8 < float(value) < 1.1
            for row in fits
            for name, value in row.items()
            if name.endswith("_exponent")
        )
        and len(fits) == 2
    )


@pytest.mark.slow
def test_tokens_grow_with_what_is_scaled(quick):
    """An axis that changed nothing would have the exponent 0, whatever it cost."""
    fits = {
        row["axis"]: row for row in quick("scaling", "--axes", "batch", "turns") if not row["size"]
    }
    assert float(fits["batch"]["tokens_exponent"]) > 0.9
    assert float(fits["turns"]["tokens_exponent"]) > 0.3  # the prompt stands before all of them


@pytest.mark.slow
@pytest.mark.skipif(
    "PEERS_PYTHON" not in os.environ,
    reason="PEERS_PYTHON names the interpreter of peers_env.sh's environment",
)
def test_peers_draw_the_same_tokens(quick):
    ours, theirs = quick("peers")
    assert (
        ours["sampled_per_step"] == theirs["sampled_per_step"] == "32"
    )  # 2 prompts × 2 samples × 8 tokens


@pytest.fixture
def benchmarks(monkeypatch):
    """The folder of the benchmarks, importable."""
    monkeypatch.syspath_prepend(str(FOLDER))


def test_a_flip_is_the_first_difference_of_a_reply(benchmarks):
    """Equal replies, one that differs in its second token and goes on, one that ends earlier."""
    from flips import count_flips

    ours, theirs = (
        [SimpleNamespace(token_ids=ids) for ids in side]
        for side in (((1, 2), (1, 2, 3), (1, 2)), ((1, 2), (1, 5, 6), (1,)))
    )
    assert count_flips(ours, theirs) == (2, 2 + 2 + 2)


@pytest.mark.slow
def test_both_sides_of_a_setting_have_the_same_prompts(benchmarks, tmp_path, monkeypatch):
    """TRL gets the tasks as a list, and rlkit reads the file in the order of its own stream."""
    import peers

    import rlkit
    from rlkit.episodes.stream import StreamState, take

    monkeypatch.chdir(tmp_path)
    given = peers.SETTINGS["2x8x32"] | {"steps": 3, "seed": 5}
    path = peers.write_problems(given)
    x = rlkit.experiment("task=jsonl", f"task.path={path}", "environment=single_turn", "seed=5")
    tasks = x.task(split="train")
    own = take(tasks, StreamState(epoch=0, position=0), 6, seed=5)[0]
    assert [task.messages for task in own] == [task.messages for task in peers.problems(given)]


def test_rows_of_other_devices_stay_in_a_table(benchmarks, tmp_path, capsys):
    """Figures of a GPU do not wipe out those of a CPU, nor the other way round; figures of the same
    device are replaced."""
    import bench

    for device, value in (("cpu", 1), ("NVIDIA H200", 2), ("cpu", 3)):
        bench.write(tmp_path, "t", [{"value": value, "device": device}])
    with (tmp_path / "t.csv").open(newline="") as file:
        assert {row["device"]: row["value"] for row in csv.DictReader(file)} == {
            "cpu": "3",
            "NVIDIA H200": "2",
        }
    assert "NVIDIA" not in capsys.readouterr().out.splitlines()[-2]


def test_one_setting_measured_again_leaves_the_others_in_the_table(benchmarks, tmp_path):
    import bench

    for setting, value in (("a", 1), ("b", 2), ("a", 3)):
        row = {"setting": setting, "value": value, "device": "cpu"}
        bench.write(tmp_path, "t", [row], by=("setting",))
    with (tmp_path / "t.csv").open(newline="") as file:
        assert [(row["setting"], row["value"]) for row in csv.DictReader(file)] == [
            ("a", "3"),
            ("b", "2"),
        ]


@pytest.mark.parametrize(
    "python, expected", [("/nowhere/python", "no such interpreter"), (sys.executable, "has no trl")]
)
def test_the_table_is_refused_at_once_without_its_peers(benchmarks, python, expected, monkeypatch):
    import table

    monkeypatch.setattr(sys, "argv", ["table.py", "--python", python, "--without", "vllm"])
    with pytest.raises(SystemExit, match=expected):
        table.main()


def test_the_table_has_every_figure_of_the_steps_and_the_table_before(
    benchmarks, monkeypatch, tmp_path
):
    """Four ratios of time and memory by hand, and the ratio of the table before beside the new
    one."""
    import peers
    import table

    def compare(given, python, rounds):
        own = {
            "lengths": given["lengths"],
            "beta": given["beta"],
            "micro_batches": given["micro_batches"],
            "time_of_trl": 0.25,
        }
        peaks = {"rlkit": 500, "trl": 1200 // given["micro_batches"]}
        return [
            own | {"side": side, "seconds_per_step": 1.0 + (side == "trl") * 3, "peak_mib": peak}
            for side, peak in peaks.items()
        ]

    monkeypatch.setattr(peers, "compare", compare)
    monkeypatch.setattr(peers, "need_peers", lambda *_: None)
    monkeypatch.setattr(peers, "peer_version", lambda python: "1")
    for _ in range(2):
        monkeypatch.setattr(
            sys,
            "argv",
            [
                "table.py",
                "--python",
                "python",
                "--without",
                "vllm",
                "--quick",
                "--out",
                str(tmp_path),
            ],
        )
        table.main()
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = {row["figure"]: row for row in csv.DictReader(file)}
    assert {*table.STEPS} < {*rows}
    best = rows["memory, MiB resident, each at its best micro-batch"]
    assert (best["rlkit"], best["theirs"], best["ratio"], best["reached"]) == (
        "500",
        "600",
        "0.833",
        "False",
    )
    step = rows["step, natural replies, beta 0.04"]
    assert (step["ratio"], step["before"], step["reached"], step["left_out"]) == (
        "0.25",
        "0.25",
        "True",
        "vllm",
    )


def test_goals_of_the_table(benchmarks):
    """A step's time must be at most its goal, decoding at least."""
    import table

    assert table.line("step", "TRL", 0.5, 2.0, 0.25, 0.22)["reached"] is False
    assert table.line("decoding, 64 rows", "vllm", 3.0, 1.0, 3.0, 2.5)["reached"] is True


def test_the_share_outside_the_model_is_made_up_of_its_parts(benchmarks):
    """perf/outside_model_frac and the parts of overhead.csv are one definition: by hand, 10 s of
    which 6 are the model's."""
    import overhead

    row = {
        "perf/generate_s": 5.0,
        "perf/environment_s": 1.0,
        "perf/reward_s": 0.5,
        "perf/update_s": 3.0,
        "perf/model_s": 6.0,
    }
    row |= {"perf/step_s": 9.0, "perf/outside_model_frac": 0.4}
    parts = overhead.parts_of(row, 10.0)
    outside = sum(
        value for name, value in parts.items() if name not in (*overhead.MODEL, "total", "outside")
    )
    assert (parts["decode"], parts["train"], outside / parts["total"]) == (
        4.0,
        2.0,
        pytest.approx(parts["outside"]),
    )


def test_an_exponent_and_its_interval():
    """By hand: costs 1, 2, 4, 16 at sizes 1, 2, 4, 8 rise by 1, 1 and 2 doublings; least squares
    gives 1.3. The residuals 0.2, -0.1, -0.4 and 0.3 doublings give it a standard error of sqrt(0.30
    / 2 / 5) = sqrt(0.03), and t of 2 degrees of freedom is 4.303."""
    sys.path.insert(0, str(FOLDER))
    try:
        import bench
    finally:
        sys.path.remove(str(FOLDER))
    slope, low, high = bench.exponent([1, 2, 4, 8], [1, 2, 4, 16])
    half = 4.302653 * 0.03**0.5
    assert (slope, low, high) == (
        pytest.approx(1.3),
        pytest.approx(1.3 - half),
        pytest.approx(1.3 + half),
    )
