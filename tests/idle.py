"""Whether each key of conf/ does anything: one value is changed at a time, in small runs.

    .ci/idle           # all keys of all bases, a second each; prints the silent ones, and counts
    .ci/idle lora      # those with this word in them

A changed value speaks if a weight, a row, a printed line or the set of files differs from those of
the base, or if the run is refused. A key that speaks in no base must stand in SILENT with a reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import shutil
import sys
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlkit.config.compose import compose, experiment
from rlkit.config.hints import leaves_of
from rlkit.config.problems.doubts import warnings
from rlkit.config.problems.rows import load_tasks
from rlkit.config.schema import alternatives, resolve, signature_hints
from rlkit.errors import RLKitError
from rlkit.training.run import train_in

SMALL = [
    "debug=fast",
    "trainer.accelerator=cpu",
    "trainer.threads=1",
    "task.max_samples=16",
    "generation.max_new_tokens=16",
    "generation.kernel=eager",
    "model.kernel=eager",
    "evaluation.n=2",
    "evaluation.every=1",
    "optimizer.lr=1e-2",
    "reward=numeric",
    "reward.terms.numeric.fn._target_=idle.even",
]
# overrides of a base → the beginnings of the keys that are changed in it
BASES: dict[tuple[str, ...], tuple[str, ...]] = {
    (): ("",),
    ("model.lora.rank=2",): ("model.lora", "optimizer", "reference"),
    ("asynchrony=lag", "asynchrony.staleness=1"): ("asynchrony", "algorithm.correction"),
    ("task/reuse=replay", "trainer.steps=3"): ("task.reuse",),
    ("environment=tool_use", "generation.max_new_tokens=32"): ("environment", "generation"),
    ("algorithm=ppo",): ("algorithm",),
    ("algorithm=dapo", "algorithm.max_refills=1"): ("algorithm",),
    ("algorithm=gspo",): ("algorithm.policy_loss", "algorithm.ratio"),
    ("kl=k1", "kl.placement=reward"): ("kl",),
    ("kl/coef=adaptive",): ("kl.coef",),
    ("reference=ema",): ("reference",),
    ("reference=periodic", "reference.every=1"): ("reference",),
    ("algorithm=opd", "teacher=start"): ("teacher", "algorithm.streams"),
    ("schedule=kl_anneal",): ("schedule",),
    ("task/sampler=pools",): ("task.sampler",),
    ("reward=[numeric,length,format]",): ("reward",),
}


class Reason(NamedTuple):
    """Why keys are silent here. `keys` is a regular expression."""

    keys: str
    why: str


SILENT: tuple[Reason, ...] = ()


def even(rollout: Any) -> float:
    """1 if the number of sampled tokens is even: rewards that differ in every group."""
    return float(rollout.response_length % 2 == 0)


def values_of(node: dict[str, Any], key: str) -> Iterator[Any]:
    """Other values for a key of a config's node, the likeliest to be accepted first."""
    value = node[key]
    hint = signature_hints(resolve(node["_target_"])).get(key, Any) if "_target_" in node else Any
    for kind in alternatives(hint):
        if typing.get_origin(kind) is typing.Literal:
            yield from (own for own in typing.get_args(kind) if own != value)
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (2 * value, value + 1, value - 1)
    elif isinstance(value, float):
        yield from (2 * value, value / 2, 1 - value, value + 0.25)
    elif value is None:
        yield from (1, 0.5, True, "x")
    elif isinstance(value, str):
        yield from (f"{value}x", "x")
    elif isinstance(value, list) and value:
        yield value[:-1]


def node_of(config: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The mapping that holds a dotted key, and the key's last word."""
    *places, last = key.split(".")
    for place in places:
        config = config[place]
    return config, last


class Said(NamedTuple):
    """What a run did. `refused` is the sentence of a refusal, else empty."""

    refused: str
    lines: str = ""
    rows: str = ""
    weights: str = ""
    files: str = ""


TIMES = re.compile(r"\d+(\.\d+)?( \+ \d+(\.\d+)?)* s\b|[\d.]+ ?(MiB|GiB|ms)|, [\d:]+ left")


def run(words: list[str], folder: Path) -> Said:
    """What a run with these overrides does, without its times."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            composed = compose([*SMALL, *words])
            x = experiment(composed)
            tasks = load_tasks(x)
            print(*warnings(x, composed.overrides, tasks.train), sep="\n")
            _, module = train_in(x, tasks, folder, started=0.0, resume=None)
        except (RLKitError, ValueError) as error:
            return Said(f"{type(error).__name__}: {error}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]
    digest = hashlib.sha256()
    for weight in module.model.state_dict().values():
        digest.update(weight.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))
    lines = TIMES.sub("", out.getvalue().replace(str(folder), ""))
    return Said("", lines, json.dumps(rows), digest.hexdigest(), json.dumps(files))


def silent_keys(word: str = "", tell: Any = print) -> tuple[list[str], int]:
    """Keys with this word that speak in no base, and how many were tried."""
    spoke: set[str] = set()
    tried: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="rlkit_idle_") as place:
        folder = Path(place) / "run"
        for base, beginnings in BASES.items():
            config = compose([*SMALL, *base]).config
            keys = [
                key
                for key in leaves_of(config)
                if key.startswith(beginnings) and word in key and key not in spoke
            ]
            keys = [key for key in keys if "suggests" not in key and "._" not in key]
            if not keys:
                continue
            before = run(list(base), folder)
            assert not before.refused, before
            for key in keys:
                tried.add(key)
                if speaks(key, config, list(base), before, folder):
                    spoke.add(key)
                else:
                    tell(f"silent so far: {' '.join(base)} {key}", flush=True)
    return sorted(tried - spoke), len(tried)


def speaks(key: str, config: dict[str, Any], base: list[str], before: Said, folder: Path) -> bool:
    """Whether some other value of a key changes what the base does, or none is accepted."""
    node, last = node_of(config, key)
    for value in values_of(node, last):
        now = run([*base, f"{key}={json.dumps(value)}"], folder)
        if not now.refused:
            return now != before
    return True


def main(word: str) -> int:
    """1 if a key is silent for no reason that SILENT gives."""
    silent, count = silent_keys(word)
    unknown = [k for k in silent if not any(re.fullmatch(own.keys, k) for own in SILENT)]
    for key in unknown:
        print(f"{key}: no other value changed anything", flush=True)
    print(f"{count} keys, {len(silent)} silent, {len(unknown)} of them without a reason")
    return int(bool(unknown))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
