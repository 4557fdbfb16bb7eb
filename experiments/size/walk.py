"""Follow a batch through the training code: which files it enters, and how often it comes back.

    python experiments/size/walk.py [older checkout]

The script counts calls by `sys.setprofile` in one RL step of the default run. A call counts if it
goes to a function of rlkit/training or rlkit/algorithm.py and passes a batch. Functions that only
cut a batch into rows are left out (CUTS). Consecutive calls in one file are one visit.
Micro-batches count once: a repeated pair of caller and callee counts only the first time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CUTS = {
    *(
        "select",
        "whole",
        "split_into_minibatches",
        "minibatches",
        "micro_batches",
        "rank_micro_batches",
    ),
    *("of", "retried", "updating", "halve", "quantities", "pick_counted", "on", "move_to_device"),
}
HERE = Path(__file__).resolve().parents[2]


def walked() -> list[tuple[str, str]]:
    """Return (file, function) of every call with a batch, in order."""
    import rlkit
    from rlkit.types import Batch

    root = Path(rlkit.__file__).parent
    x = rlkit.experiment("trainer.steps=1", "batch.prompts=4", "kl=k3", "reference=frozen")
    for _ in rlkit.steps(x):  # load imports and caches, and compile code
        pass
    calls: list[tuple[str, str]] = []

    def seen(frame: object, event: str, _: object) -> None:
        file = frame.f_code.co_filename  # type: ignore[attr-defined]
        if event != "call" or not file.startswith(str(root)):
            return
        name = Path(file).relative_to(root).as_posix()
        if not name.startswith(("training/", "algorithm")):
            return
        code = frame.f_code  # type: ignore[attr-defined]
        given = [frame.f_locals.get(n) for n in code.co_varnames[: code.co_argcount]]  # type: ignore[attr-defined]
        if code.co_name not in CUTS and any(isinstance(value, Batch) for value in given):
            calls.append((name, code.co_name))

    steps = rlkit.steps(x)
    sys.setprofile(seen)
    try:
        next(steps)
    finally:
        sys.setprofile(None)
    return calls


def summary(calls: list[tuple[str, str]]) -> dict[str, object]:
    """Return the number of files and of returns to an earlier file, and the files in order."""
    visits: list[str] = []
    arrows = set()
    before = ("", "")
    for file, function in calls:
        if (before, (file, function)) in arrows:
            before = (file, function)
            continue
        arrows.add((before, (file, function)))
        if not visits or visits[-1] != file:
            visits.append(file)
        before = (file, function)
    returns = sum(file in visits[:i] for i, file in enumerate(visits))
    return {"files": len(set(visits)), "returns": returns, "walk": visits}


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] != "--own":
        env = os.environ | {"PYTHONPATH": sys.argv[1]}
        subprocess.run([sys.executable, __file__, "--own"], env=env, check=True)
        return
    found = summary(walked())
    print(f"{found['files']} files, {found['returns']} returns")
    print(" → ".join(found["walk"]))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
