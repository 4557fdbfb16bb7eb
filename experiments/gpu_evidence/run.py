"""Measure every figure that needs a GPU, in about an hour and in resumable parts.

    python experiments/gpu_evidence/run.py --out FOLDER --wheels WHEELS
    python experiments/gpu_evidence/run.py --out FOLDER --rehearse     # tiny, on a CPU, in 80 s

The command stops by itself after nine minutes. The same command with the same --out continues with
the missing parts. Each part runs in its own process with its own time limit. A row is written to
FOLDER/rows.jsonl as soon as it is measured; FOLDER/evidence.md is a page made of all rows.

    a  copy and bfloat16 product, versions, captures of CUDA graphs, tests marked gpu
    b  decoding steps of 0.6B, 4B and 8B shapes against the limit of the bandwidth
    c  one update of 16k and 32k tokens by part, and the gaps between sampler and trainer
    d  whole RL steps at GSM8K's lengths beside the roofline model
    e  the embedded model's curve of 20 steps on the CPU and on the card
    f  Qwen3-0.6B on GSM8K: two arms, three seeds, TRL beside it; skipped without weights

The machine needs torch, transformers, lightning, peft and pytest. `bash wheels.sh WHEELS` fetches
the other packages on a machine with a package index. Exit status 0: all parts are complete; 1: a
part is unfinished or has failed pieces.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from page import write_page
from rows import append_row, is_over, read_rows, states_of

HERE = Path(__file__).resolve().parent
OUT = Path("outputs/gpu_evidence")
ROOT = HERE.parents[1]
COMMAND_S = 540  # seconds of one command; a lent machine may end a command after 600 s
SHORT = 20  # seconds: with less time left, no part is started
NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "lightning": "lightning",
    "peft": "peft",
    "rich": "rich",
    "hydra": "hydra-core",
    "omegaconf": "omegaconf",
    "antlr4": "antlr4-python3-runtime",
}


class Part(NamedTuple):
    """A part of the evidence: the function that lists its pieces, and the time limit of a process.

    limit: most seconds of a command on the part
    """

    module: str
    function: str
    limit: int


PARTS = {
    "a": Part("ceilings", "pieces", 300),
    "b": Part("parts_of_passes", "decoding", 500),
    "c": Part("parts_of_passes", "updates", 400),
    "d": Part("parts_of_steps", "whole_steps", 500),
    "e": Part("parts_of_steps", "curves", 200),
    "f": Part("parts_of_steps", "gsm8k", 100_000),
}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="README.md says how to use a lent machine",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="of rows and page")
    parser.add_argument("--only", type=parts_named, default=list(PARTS), metavar="a,b")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--wheels", type=Path, help="folder that wheels.sh made")
    parser.add_argument("--weights", help="Qwen3-0.6B, for part f")
    parser.add_argument("--problems", help="folder with train.jsonl and test.jsonl of GSM8K")
    parser.add_argument("--seconds", type=int, default=COMMAND_S, help="of this command")
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # the part that this process is
    return parser


def parts_named(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no part {', '.join(unknown)}; there are {','.join(PARTS)}"
        )
    return names


def main() -> int:
    parser = options()
    given = parser.parse_args()
    given.out = given.out.resolve()
    if given.wheels:
        install(given.wheels, given.out / "packages")
    sys.path.insert(0, str(given.out / "packages"))
    if given.inside:
        return do_part(given)
    lacking = missing()
    if lacking:
        parser.error(
            f"not installed: {' '.join(lacking)}. On a machine with an index, run `bash"
            " experiments/gpu_evidence/wheels.sh WHEELS`, then use --wheels WHEELS here."
        )
    device = device_of(given, parser)
    claim(given.out, device, parser)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ends = time.monotonic() + given.seconds
    header = f"{device}; rows: {given.out.name}/rows.jsonl"
    try:
        for part in given.only:
            run_part(part, given, ends)
            write_page(given.out, header)
    finally:
        print(f"the page: {write_page(given.out, header)}")
    rows = read_rows(given.out)
    unfinished = [part for part in given.only if not is_over(rows, part)]
    failed = [part for part in given.only if "failed" in states_of(rows, part).values()]
    print(f"left: {', '.join(unfinished) or 'nothing'}")
    print(f"failed pieces in: {', '.join(failed) or 'no part'}")
    return int(bool(unfinished or failed))


def missing() -> list[str]:
    """Return the packages missing here among the imports of rlkit and the parts."""
    importlib.invalidate_caches()
    return [
        package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None
    ]


def install(wheels: Path, target: Path) -> None:
    """Unpack wheels into a folder, without an index and without their dependencies."""
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files or target.exists():
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(target), *files], check=True)


def device_of(given: Any, parser: argparse.ArgumentParser) -> str:
    """Return the name of the card, or a note that this is a rehearsal on a CPU."""
    if given.rehearse:
        return "cpu, rehearsed: sizes of seconds, no figure counts"
    import torch

    if not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --rehearse tries everything tiny on a CPU")
    return torch.cuda.get_device_name()


def claim(out: Path, device: str, parser: argparse.ArgumentParser) -> None:
    """Record the device of a folder, or stop if the folder has rows of another device."""
    rows = [row for row in read_rows(out) if row["status"] == "device"]
    if not rows:
        append_row(out, part="", status="device", device=device)
    elif rows[0]["device"] != device:
        parser.error(f"{out} has rows of {rows[0]['device']}; choose another --out for {device}")


# ------------------------------------------------------------------------------------ one part


def run_part(part: str, given: Any, ends: float) -> None:
    """Start processes for a part until the part is complete or time is up.

    The time is the part's limit or the rest of the command's time, whichever ends first.
    """
    rows = read_rows(given.out)
    again = len(given.only) < len(PARTS) and "failed" in states_of(rows, part).values()
    if is_over(rows, part) and not again:
        print(f"=== {part}: complete", flush=True)
        return
    stops = time.monotonic() + PARTS[part].limit
    while True:
        left = min(stops, ends) - time.monotonic()
        if left < min(SHORT, given.seconds):
            return
        print(f"=== {part}: {left:.0f} s left", flush=True)
        status = start(part, given, left, again)
        again = False  # a piece that fails again is left to the next command
        if status == 0:
            return
        if status is None and stops < ends:
            close_open(given.out, part, f"ended by the part's limit of {PARTS[part].limit} s")
            return
        if status not in (None, 3):
            close_open(given.out, part, f"its process ended with {status}")


def start(part: str, given: Any, seconds: float, again: bool) -> int | None:
    """Run a part in its own process. Return its exit status, None after a timeout of `seconds`."""
    words = [sys.executable, str(HERE / "run.py"), "--inside", part, "--out", str(given.out)]
    words += ["--rehearse"] * given.rehearse + ["--only", part] * again
    words += ["--seconds", str(int(seconds) + 30)]
    for name in ("weights", "problems"):
        value = getattr(given, name)
        words += [f"--{name}", value] if value else []
    process = subprocess.Popen(
        words, env=environment(given.out, given.rehearse), start_new_session=True
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def environment(out: Path, rehearse: bool) -> dict[str, str]:
    """Return environment variables that make this checkout and the unpacked wheels importable.

    They also switch off the network and progress bars.
    """
    folders = [str(ROOT), str(HERE), str(out / "packages"), os.environ.get("PYTHONPATH", "")]
    one = {"OMP_NUM_THREADS": "1"} if rehearse else {}  # other programs may use this processor too
    return (
        os.environ
        | one
        | {
            "PYTHONPATH": os.pathsep.join(filter(None, folders)),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
    )


def close_open(out: Path, part: str, reason: str) -> None:
    """Record every unfinished piece of a part as failed."""
    for piece, state in states_of(read_rows(out), part).items():
        if state == "begun":
            append_row(out, part=part, piece=piece, status="failed", reason=reason)


def do_part(given: Any) -> int:
    """Run the pieces of a part in this process.

    SIGALRM ends the process after `--seconds`, even if its parent is gone.
    """
    from rows import perform
    from weights import Setting

    signal.alarm(given.seconds)
    device = "cpu" if given.rehearse else "cuda"
    setting = Setting(given.out, device, given.rehearse, given.weights, given.problems)
    part = PARTS[given.inside]
    pieces = getattr(importlib.import_module(part.module), part.function)(setting)
    again = len(given.only) < len(PARTS)
    return perform(given.out, given.inside, pieces, again=again)


if __name__ == "__main__":
    sys.exit(main())
