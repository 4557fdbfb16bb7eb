"""The common parts of the benchmarks: command line, child processes, memory, exponents, the CSV.

A measured run is the command `rlkit train` itself, in its own process. Its config names parts of
this file by `_target_`: a model without an end token (`endless`), a clock (`clock`), conversations
of a fixed number of turns (`talk`), and a reward that needs no tool (`solved`).
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = sys.executable
NEVER = (1,)  # the id of a byte that the embedded model never writes
MARK = "result: "  # begins the line with a child process's answer to its parent


# ---------------------------------------------------------------------------------- command and CSV


def parser(
    doc: str | None, *, rounds: int, threads: int = 2, device: bool = True
) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark; the first line of `doc` is the help."""
    made = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    made.add_argument(
        "--rounds", type=int, default=rounds, help="alternating rounds; medians are reported"
    )
    made.add_argument("--threads", type=int, default=threads, help="of torch")
    if device:
        made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--out", type=Path, default=HERE, help="folder of the CSV")
    made.add_argument(
        "--quick",
        action="store_true",
        help="sizes of seconds: shows that it works, measures nothing",
    )
    made.add_argument(
        "--once",
        action="store_true",
        help="where there is one: processor seconds of one round, and no CSV",
    )
    return made


def once(work: Callable[[], Any]) -> None:
    """Print the processor seconds of one round of `work`, after one round to warm up.

    Each line of standard input starts one more round. With `--once`, pairs.py compares two
    checkouts in this way.
    """
    work()
    while True:
        begun = time.process_time()
        work()
        print(f"processor_s {time.process_time() - begun:.4f}", flush=True)
        if sys.stdin.isatty() or not sys.stdin.readline():
            return


def provenance(threads: int, device: str = "cpu") -> dict[str, Any]:
    """Return the last columns of every CSV: the machine, the versions and the date."""
    import torch

    found: dict[str, Any] = {
        "threads": threads,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    found |= {
        "date": date.today().isoformat(),
        "machine": machine(),
        "python": platform.python_version(),
    }
    return found | {name: installed(name) for name in ("torch", "transformers")}


def machine() -> str:
    """Return the processor's name and the number of cores."""
    names = (
        re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        if Path("/proc/cpuinfo").exists()
        else []
    )
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def installed(package: str) -> str:
    """Return the version of a package, "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def write(
    out: Path, name: str, rows: Sequence[Mapping[str, Any]], *, by: Sequence[str] = ()
) -> None:
    """Write name.csv, and print the columns in which the rows differ.

    Rows measured on other devices stay in the file, and so do rows that differ from all new rows in
    the columns `by`.
    """
    out.mkdir(parents=True, exist_ok=True)
    shown, rows = rows, [*rows, *read_others(out / f"{name}.csv", rows, by)]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with (out / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    said = [
        key for key in columns if len(shown) == 1 or len({str(row.get(key)) for row in shown}) > 1
    ]
    for row in shown:
        print("  ".join(f"{key} {row[key]}" for key in said if row.get(key) not in (None, "")))
    print(f"written to {out / f'{name}.csv'}")


def read_others(
    file: Path, rows: Sequence[Mapping[str, Any]], by: Sequence[str]
) -> list[dict[str, str]]:
    """Return the rows of a CSV whose device and columns `by` are those of no row in `rows`."""

    def place(row: Mapping[str, Any]) -> tuple[str, ...]:
        return str(row.get("device", "cpu")), *(str(row.get(column, "")) for column in by)

    if not file.exists():
        return []
    new = set(map(place, rows))
    with file.open(newline="") as opened:
        return [row for row in csv.DictReader(opened) if place(row) not in new]


# ----------------------------------------------------------------------------- processes and memory


def environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a child process.

    This checkout and this folder are importable, the number of threads is fixed, and there are no
    network and no progress bars.
    """
    path = [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def child(command: Sequence[str], *, threads: int, cwd: Path | None = None) -> Any:
    """Run a process and return its `answer`.

    Raises RuntimeError with the end of its output if it gives no answer.
    """
    done = subprocess.run(
        list(command),
        env=environment(threads),
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not said:
        raise RuntimeError(
            f"{' '.join(command)[:300]} ended with {done.returncode}:\n{done.stdout[-3000:]}"
        )
    return json.loads(said[-1][len(MARK) :])


def answer(result: Any) -> None:
    """Print a child's answer to its parent as the last line."""
    print(f"\n{MARK}{json.dumps(result)}", flush=True)


def memory(field: str) -> float:
    """Return this process's memory in MiB, as Linux counts it.

    VmRSS is the memory in use now. VmHWM is the peak since the start or since `forget_peak`.
    """
    found = re.search(rf"^{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"/proc/self/status has no {field}"
    return int(found.group(1)) / 1024


def forget_peak() -> float:
    """Restart the count of peak memory, if the kernel allows it. Return the MiB in use now."""
    with contextlib.suppress(
        OSError
    ):  # then the peak includes the imports, which need less than any update
        Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


# ------------------------------------------------------------------------------------------ numbers


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> tuple[float, float, float]:
    """Return k of cost ~ size^k, and the ends of its 95 % interval (Student's t).

    k is the least-squares slope of the logarithms. There must be three points or more.
    """
    from rlkit.statistics import student_quantile

    x, y = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    mean = statistics.fmean(x)
    spread = sum((a - mean) ** 2 for a in x)
    slope = sum((a - mean) * b for a, b in zip(x, y, strict=True)) / spread
    level = statistics.fmean(y) - slope * mean
    left = sum((b - level - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    freedom = len(x) - 2
    half = student_quantile(0.975, freedom) * math.sqrt(left / freedom / spread)
    return slope, slope - half, slope + half


# --------------------------------------------------------------------------------- models for speed


def shape(name: str, device: str) -> Any:
    """Return random weights in a known model's shape, enough to measure speed.

    They are bfloat16 on a GPU, float32 elsewhere.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    shapes = {
        "qwen3_0.6b-shape": {
            "vocab_size": 151_936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "tie_word_embeddings": True,
        },
        "wide_vocabulary": {  # a tiny trunk, so that nearly all work is in the head
            "vocab_size": 151_936,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
    }
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            Qwen3Config(**shapes[name]), dtype=dtype, attn_implementation="sdpa"
        )


# Millions of parameters → hidden size and layers of a model with random weights and the embedded
# tokenizer. None is the embedded model itself.
SIZES: dict[str, tuple[int, int] | None] = {"0.9": None, "4.5": (256, 5), "26": (512, 8)}


def model_folder(size: str, folder: Path) -> str:
    """Write a model of this size to a folder and return its path.

    The model has random weights and the embedded tokenizer. "0.6b-shape" has the weights of
    `shape`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from rlkit.models.load import TINY, pretrained_config, pretrained_tokenizer

    if size == "0.6b-shape":
        shape("qwen3_0.6b-shape", "cpu").save_pretrained(folder / "model")
        pretrained_tokenizer("tiny").save_pretrained(folder / "model")
        return str(folder / "model")
    sizes = SIZES[size]
    if sizes is None:
        return "tiny"
    hidden, layers = sizes
    config = pretrained_config(str(TINY))
    heads = {
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "layer_types": ["full_attention"] * layers,
    }
    config.update(
        {
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers,
            **heads,
        }
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    pretrained_tokenizer("tiny").save_pretrained(folder / "model")
    return str(folder / "model")


def card() -> Any:
    """Return this machine's GPU from the table of rlkit.extras.forecast.

    The result is None without a GPU, or for an unlisted one.
    """
    import torch

    from rlkit.extras.forecast import CARDS

    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return next((card for key, card in CARDS.items() if key in name), None)


# ------------------------------------------------------------- parts named by a config's `_target_`


def endless(**given: Any) -> Any:
    """Return `load_policy`'s policy without an end token: no reply ends before its limit."""
    from rlkit.models import load_policy

    return load_policy(**given)._replace(eos_token_ids=NEVER)


def spread_text(text: str, answer: str) -> float:
    """Return 1 for a right answer, else 0 or 1 by the characters of the text.

    Random weights solve nothing, and a group of equal rewards has no advantages. This rule lets
    rewards differ.
    """
    return 1.0 if text.strip() == answer else float(bool(text) and sum(map(ord, text)) % 2)


def spread(rollout: Any, /) -> float:
    """Return 1 for every second sample of a prompt, else 0.

    No group then has equal rewards, and every step has its updates.
    """
    return float(rollout.sample % 2)


# A run with random weights: endless replies, one per rollout, and different rewards.
SPREAD = [
    "model._target_=bench.endless",
    "environment=single_turn",
    "reward=numeric",
    "reward.terms.numeric.fn._target_=bench.spread",
]


def solved_text(text: str, answer: str) -> float:
    """Return 1 if the reply's expression for the calculator has the value of the answer, else 0.

    One reply is enough, and no tool is needed.
    """
    from rlkit.environments import calculator

    found = re.findall(r'"expression": "([^"]*)"', text)
    try:
        return float(bool(found) and calculator(found[-1]) == answer)
    except ValueError:
        return 0.0


def solved(rollout: Any, /) -> float:
    """Return `solved_text` of the last reply.

    A plain answer counts too, so that the gold answers score 1.
    """
    text = rollout.steps[-1].content if rollout.steps else ""
    return float(text.strip() == rollout.task.answer) or solved_text(text, rollout.task.answer)


def talk(*, turns: int) -> Any:
    """Return an environment of a fixed number of turns, with the same words after every reply."""
    from rlkit.environments import single_turn

    def next_prompt(rollout: Any, step: int) -> Any:
        return (
            ({"role": "user", "content": "How many are there now?"},)
            if len(rollout.steps) < turns
            else None
        )

    return single_turn()._replace(next_prompt=next_prompt, max_steps=turns)


MARKS: dict[str, Any] = {}  # times and rows recorded by a clock in this process


def clock(run: Path, /) -> Any:
    """Return a callback that records the start of training, and the end and row of each RL step.
    `ends` are times of the clock, `worked` those of the process's processors.

    The end of a step comes after its metrics and other callbacks.
    """
    import lightning as L

    MARKS.update(ends=[], worked=[], rows=[])

    def note() -> None:
        MARKS["ends"].append(time.perf_counter())
        MARKS["worked"].append(time.process_time())

    class Clock(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            note()

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            note()
            MARKS["rows"].append(module.metrics)
            MARKS["policy"] = module.policy

    return Clock()


def steps_of(overrides: Sequence[str], folder: Path) -> tuple[list[float], list[dict[str, Any]]]:
    """Run `rlkit train` in this process. Return the seconds and the metrics of each RL step.

    The run has no evaluation, no checkpoints and no copies of rollouts.
    """
    from rlkit.commands.cli import main

    quiet = [
        "logger=none",
        "schedule=constant",
        "evaluation.n=0",
        "callbacks.rollouts.every=0",
        "~callbacks.checkpoint",
        "~callbacks.samples",
    ]
    status = main(
        [
            "train",
            f"hydra.run.dir={folder}",
            *quiet,
            "+callbacks.clock={_target_: bench.clock, _partial_: true}",
            *overrides,
        ]
    )
    if status:
        raise RuntimeError(f"rlkit train {' '.join(overrides)} ended with {status}")
    return differences(MARKS["ends"]), MARKS["rows"]


def differences(times: Sequence[float]) -> list[float]:
    """Return the seconds between each time and the next."""
    return [b - a for a, b in itertools.pairwise(times)]
