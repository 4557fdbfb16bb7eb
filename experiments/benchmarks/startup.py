"""How long does rlkit take until its help, a refusal, the first line and the first RL step?

    python experiments/benchmarks/startup.py

Each run is its own process in an empty folder, in turn. One run of each comes first, to load the
files into the machine's memory. Help and the refusal of a config are timed to their end. The
default run is timed to its first line, and to the line about its finished first step; then it is
stopped. The first line should come within 1.3 times the seconds of importing torch, transformers
and peft, measured in the same rounds.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import bench

COMMANDS: dict[str, tuple[list[str], int, float]] = {  # name → words, exit status, goal in seconds
    "help": (["--help"], 0, 1.0),
    "refused": (["train", "optimizer.lrr=1e-4"], 2, 5.0),
    "first_line": (["train"], 0, 1.3),  # times the seconds of the import
    "first_step": (["train"], 0, 15.0),
}
LINES = {"first_line": "rlkit: ", "first_step": "step "}  # begin of the awaited line
IMPORT = "import torch, transformers, peft"


def ended(words: Sequence[str], status: int, threads: int, folder: Path) -> float:
    """Return the seconds of a command that ends by itself."""
    begun = time.perf_counter()
    done = subprocess.run(
        [bench.PYTHON, "-m", "rlkit", *words],
        env=bench.environment(threads),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    spent = time.perf_counter() - begun
    if done.returncode != status:
        raise RuntimeError(
            f"rlkit {' '.join(words)} ended with {done.returncode}, not"
            f" {status}:\n{done.stderr[-2000:]}"
        )
    return spent


def importing(threads: int) -> float:
    """Return the seconds of a process that only imports the packages needed by every run."""
    begun = time.perf_counter()
    subprocess.run([bench.PYTHON, "-c", IMPORT], env=bench.environment(threads), check=True)
    return time.perf_counter() - begun


def until(line_begins: str, words: Sequence[str], threads: int, folder: Path) -> float:
    """Return the seconds until a command prints a line with this beginning."""
    begun = time.perf_counter()
    command = [bench.PYTHON, "-m", "rlkit", *words]
    environment = bench.environment(threads)
    with subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith(line_begins):
                spent = time.perf_counter() - begun
                os.killpg(process.pid, signal.SIGKILL)
                process.stdout.read()
                return spent
    raise RuntimeError(
        f"rlkit {' '.join(words)} ended without a line that begins with"
        f" '{line_begins}':\n{''.join(said)[-2000:]}"
    )


def main() -> None:
    parser = bench.parser(__doc__, rounds=5, device=False)
    parser.add_argument("overrides", nargs="*", help="of the first step's run")
    given = parser.parse_intermixed_args()
    if given.quick:
        given.rounds, given.overrides = 1, ["debug=fast", *given.overrides]
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    imports: list[float] = []
    for number in range(given.rounds + (not given.quick)):
        for name, (words, status, _) in COMMANDS.items():
            with tempfile.TemporaryDirectory() as folder:
                if name in LINES:
                    spent = until(
                        LINES[name], [*words, *given.overrides], given.threads, Path(folder)
                    )
                else:
                    spent = ended(words, status, given.threads, Path(folder))
            if number or given.quick:
                seconds[name].append(spent)
        spent = importing(given.threads)
        if number or given.quick:
            imports.append(spent)
    imported = statistics.median(imports)
    goals = {
        name: goal * (imported if name == "first_line" else 1)
        for name, (_, _, goal) in COMMANDS.items()
    }
    rows = [
        {
            "what": name,
            "command": " ".join(
                ["rlkit", *COMMANDS[name][0], *(given.overrides if name in LINES else [])]
            ),
            "seconds": round(statistics.median(times), 2),
            "slowest": round(max(times), 2),
            "goal": round(goals[name], 2),
            "met": statistics.median(times) < goals[name],
            "rounds": given.rounds,
        }
        for name, times in seconds.items()
    ]
    bench.write(given.out, "startup", [row | bench.provenance(given.threads) for row in rows])


if __name__ == "__main__":
    main()
