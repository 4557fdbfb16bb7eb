"""Part a of the evidence: rates of the card, installed versions, CUDA graphs, and gpu tests."""

from __future__ import annotations

import importlib.util
import inspect
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from inside import Watch, watched
from rows import Report, figures_of, read_rows
from weights import Setting, embedded_policy, grouped_prompts, sample, wait_for

from rlkit.engines import Cached

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "transformers", "peft", "lightning", "numpy", "vllm", "trl")


def pieces(setting: Setting) -> dict[str, Callable[[Report], str | None]]:
    return {
        "ceilings": partial(measure_ceilings, setting),
        "versions": partial(list_versions, setting),
        "graphs, 32 then 1024 tokens": partial(count_after_calls, setting),
        "graphs, three turns": partial(count_after_turns, setting),
        "tests": partial(run_tests, setting),
    }


def seconds_of(work: Callable[[], Any], device: str, rounds: int = 5) -> float:
    """Return the shortest time of `rounds` calls in seconds, after one call to warm up."""
    spent = []
    for _ in range(rounds + 1):
        wait_for(device)
        begun = time.perf_counter()
        work()
        wait_for(device)
        spent.append(time.perf_counter() - begun)
    return min(spent[1:])


def measure_ceilings(setting: Setting, report: Report) -> None:
    """Report the bytes per second of a copy and the operations per second of a bfloat16 product.

    A copied byte counts twice, because it is read and written.
    """
    device = setting.device
    source = torch.ones(setting.pick(1 << 30, 1 << 22), dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / seconds_of(partial(target.copy_, source), device)
    report("ceilings", "copy", terabytes_per_s=round(rate / 1e12, 4))
    n = setting.pick(8192, 256)
    a = torch.randn(n, n, dtype=torch.bfloat16, device=device)
    flops = 2 * n**3 / seconds_of(lambda: a @ a, device)
    report("ceilings", "bfloat16 product", teraflops=round(flops / 1e12, 3), size=n)


def copy_rate(out: Path) -> float | None:
    """Return the bytes per second of the measured copy, or None if it is not measured yet."""
    for row in figures_of(read_rows(out), "a").get("ceilings", ()):
        if row.get("row") == "copy":
            return float(row["terabytes_per_s"]) * 1e12
    return None


def list_versions(setting: Setting, report: Report) -> None:
    """Report the device, the packages, and the newer arguments accepted by torch's attention."""
    from torch.nn.attention import varlen

    found: dict[str, Any] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    arguments = inspect.signature(varlen.varlen_attn).parameters
    for name in ("enable_gqa", "block_table", "num_splits"):
        found[f"varlen_attn takes {name}"] = name in arguments
    found["cores"] = os.cpu_count()
    if setting.device == "cuda":
        card = torch.cuda.get_device_properties(0)
        found |= {"card": card.name, "memory_gb": round(card.total_memory / 1e9, 1)}
        found["capability"] = f"{card.major}.{card.minor}"
        found["driver, clock, power"] = ask_driver("driver_version,clocks.max.sm,power.limit")
    for name, value in found.items():
        report("versions", name, value=value)


def ask_driver(what: str) -> str:
    """Return the answer of nvidia-smi to a query."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return "no nvidia-smi"
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def report_graphs(report: Report, call: str, watch: Watch, engine: Cached) -> None:
    """Report the counts of CUDA graphs after a call of an engine."""
    shapes = engine.metrics().get("captured_shapes")
    report(
        "CUDA graphs",
        call,
        captures=watch.captures,
        replays=watch.replays,
        refused=watch.refused,
        captured_shapes=shapes,
        looks=len(watch.looks),
        why=next((text for text in watch.warned if "captured" in text), "")[:300],
    )


def count_after_calls(setting: Setting, report: Report) -> None:
    """Check that CUDA graphs are captured for calls with different reply limits.

    The start-up check samples 32 tokens and the first rollout samples more, so the engine makes a
    new sampler. The third call repeats the second and should capture nothing.
    """
    policy = embedded_policy(setting.device)
    engine = Cached()
    rows = setting.pick(64, 8)
    longer = setting.pick(1024, 48)
    with watched(engine) as watch:
        for call, tokens in (("32 tokens", 32), ("longer", longer), ("the same again", longer)):
            sample(engine, policy, grouped_prompts(rows, 60), tokens)
            report_graphs(report, f"{call}: {tokens}", watch, engine)


def count_after_turns(setting: Setting, report: Report) -> None:
    """Report the graphs of three calls, each with episodes of three turns and growing contexts."""
    policy = embedded_policy(setting.device)
    engine = Cached()
    rows = setting.pick(256, 8)
    prompt = setting.pick(350, 40)
    tokens = setting.pick(96, 8)
    with watched(engine) as watch:
        for call in range(3):
            prompts = grouped_prompts(rows, prompt + 20 * call, start=call)
            sample(engine, policy, prompts, tokens, turns=3)
            report_graphs(report, f"call {call + 1}", watch, engine)


def run_tests(setting: Setting, report: Report) -> str | None:
    """Run pytest -m gpu. Warnings of other torch versions do not count as errors."""
    if importlib.util.find_spec("hypothesis") is None:
        return "hypothesis is not installed, which tests/conftest.py imports (wheels.sh has it)"
    quiet = ["-o", "addopts=", "-o", "filterwarnings=default", "-p", "no:cacheprovider"]
    files = setting.pick("tests/gpu", "tests/gpu/test_attention.py")
    command = [sys.executable, "-m", "pytest", *quiet, "--import-mode=importlib", "-m", "gpu"]
    done = subprocess.run([*command, "-q", "-rf", files], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    counts = {
        word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])
    }
    report("tests", "pytest -m gpu", exit_status=done.returncode, **counts)
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            report("tests", line.split(" - ")[0][:200], said=line.partition(" - ")[2][:300])
    return None
