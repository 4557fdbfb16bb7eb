"""The benchmarks run and write well-formed tables. What they measure is measured on a quiet machine, by hand."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "experiments" / "benchmarks"

COLUMNS = {  # benchmark → columns whose every value is a number > 0
    "decode": ("tokens_per_second", "seconds", "rows"),
    "turns": ("whole_run_seconds", "ratio_of_a_decode_step"),
    "tools": ("seconds", "episodes"),
    "memory": ("naive_mib", "rlkit_mib", "naive_seconds"),
    "packing": ("padded_seconds", "packed_seconds", "apart_seconds"),
    "overhead": ("step_s",),
    "startup": ("seconds",),
    "threads": ("seconds",),
}


def table(folder: Path, name: str, *words: str) -> list[dict[str, str]]:
    """The rows that a benchmark writes with --quick."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick", "--threads", "1", "--out", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with (folder / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows and all(row["machine"] and row["date"] and row["torch"] for row in rows)
    assert all(None not in row and None not in row.values() for row in rows)  # no row longer or shorter than the header
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", COLUMNS)
def test_a_benchmark_writes_a_table(name, tmp_path):
    for row in table(tmp_path, name):
        assert all(float(row[column]) > 0 for column in COLUMNS[name])


@pytest.mark.slow
def test_both_forms_of_the_update_have_one_gradient(tmp_path):
    """Or their memory is that of two different things."""
    assert float(table(tmp_path, "memory")[0]["gradient_difference"]) < 1e-4  # float32 sums over 151,936 logits


@pytest.mark.slow
def test_tokens_grow_with_what_is_scaled(tmp_path):
    """An axis that changed nothing would have the exponent 0, whatever it cost."""
    fits = {row["axis"]: row for row in table(tmp_path, "scaling", "--axes", "batch", "turns") if not row["size"]}
    assert float(fits["batch"]["tokens_exponent"]) > 0.9
    assert float(fits["turns"]["tokens_exponent"]) > 0.3  # the prompt stands before all of them


@pytest.mark.slow
@pytest.mark.skipif("PEERS_PYTHON" not in os.environ, reason="PEERS_PYTHON names the interpreter of peers_env.sh's environment")
def test_peers_draw_the_same_tokens(tmp_path):
    ours, theirs = table(tmp_path, "peers")
    assert ours["sampled_per_step"] == theirs["sampled_per_step"] == "32"  # 2 prompts × 2 samples × 8 tokens


def test_an_exponent_and_its_interval():
    """By hand: costs 1, 2, 4, 16 at sizes 1, 2, 4, 8 rise by 1, 1 and 2 doublings; least squares gives 1.3. The residuals 0.2, -0.1, -0.4
    and 0.3 doublings give it a standard error of sqrt(0.30 / 2 / 5) = sqrt(0.03), and t of 2 degrees of freedom is 4.303."""
    sys.path.insert(0, str(FOLDER))
    try:
        import bench
    finally:
        sys.path.remove(str(FOLDER))
    slope, low, high = bench.exponent([1, 2, 4, 8], [1, 2, 4, 16])
    half = 4.303 * 0.03**0.5
    assert (slope, low, high) == (pytest.approx(1.3), pytest.approx(1.3 - half), pytest.approx(1.3 + half))
