"""Every figure that only a GPU can give, with one command on a machine that has nothing else.

    python experiments/benchmarks/gpu.py [--wheels FOLDER] [--python TRL_ENVIRONMENT/bin/python]
    python experiments/benchmarks/gpu.py --device cpu --quick   # the plumbing, without a GPU

It needs torch, transformers, lightning and peft; what else is missing (hydra-core, omegaconf,
pytest, …) it names, and installs from a folder of wheels (--wheels) without an index. Each part is
a process of its own, and one that fails does not stop the others:

    tests     pytest -m gpu tests/gpu
    decode    decode.py: tokens a second of a 0.6 B shape against the limit of the bandwidth
              → decode.csv
    memory    memory.py: peak of an update at a vocabulary of 151,936
              → memory.csv
    step      whole RL steps with adapters and with all weights: seconds and peak against the
              roofline model, the peak that the memory probe promises, and the gap in nats between
              sampler and trainer in bfloat16            → gpu.csv
    peers     peers.py: a step against TRL's, with vLLM in its process; skipped where TRL is absent
              → peers.csv

gpu.csv also has a row a part: done, skipped or failed, and why. Rows of other devices stay in every
CSV. Exit status 1 where a part failed.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench

NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "lightning": "lightning",
    "peft": "peft",
    "hydra": "hydra-core",
    "omegaconf": "omegaconf",
    "datasets": "datasets",
    "pytest": "pytest",
}
SETTINGS = {
    "adapters": ["model.lora.rank=16"],
    "all weights": ["model.lora.rank=0", "optimizer.lr=1e-6"],
}
LAST = 600  # characters of a failure that are kept


def step(given: dict[str, Any]) -> dict[str, Any]:
    """Steps of one setting in this process: seconds, peaks in GB and the mismatch, measured and
    expected."""

    from rlkit.config.compose import compose, experiment
    from rlkit.episodes.stream import StreamState
    from rlkit.extras import forecast
    from rlkit.system.device import autocast, on_device
    from rlkit.training.groups import experience
    from rlkit.training.learner import Learner
    from rlkit.training.selfcheck import check_policy
    from rlkit.training.update.probe import probe_memory

    composed = compose(given["overrides"])
    x = experiment(composed)
    tasks = x.task(split="train")
    policy, device = on_device(x)
    with autocast(x, device):
        agreement = check_policy(policy, tasks, x)
    learner, stream = Learner(x, policy, exact=agreement.exact), StreamState()
    rows, seconds = [], []
    with autocast(x, device, updates=True):
        forget(device)
        probe_memory(learner.record(), tasks)
        probed = peak(device)
        forget(device)
        for number in range(given["steps"]):
            begun = time.perf_counter()
            sampled, trained, stream = experience(
                learner.begin(), policy, tasks, stream, step=number, clock=learner.clock
            )
            rows.append(learner.step(sampled, trained))
            seconds.append(time.perf_counter() - begun)
    shape, (load, _) = (
        forecast.shape_of_run(x),
        forecast.load_of(x, composed.config, {"reply_share": "1"}),
    )
    card = bench.card() or forecast.CARDS["cpu"]
    expected, last = forecast.forecast(card, shape, load), rows[-1]
    return {
        "measured_s": round(min(seconds[1:]), 3),
        "expected_s": round(expected.total, 3),
        "generate_s": round(last["perf/generate_s"], 3),
        "update_s": round(last["perf/update_s"], 3),
        "sampled": last["tokens/sampled"],
        "probed_gb": round(probed, 3),
        "measured_gb": round(peak(device), 3),
        "expected_gb": round(sum(expected.memory.values()) / 1e9, 3),
        "halvings": learner.micro.halvings,
        "mismatch_mean": f"{last['mismatch/logp_abs_mean']:.2e}",
        "mismatch_max": f"{last['mismatch/logp_abs_max']:.2e}",
        "updates": last["optim/updates"],
    }


def forget(device: Any) -> None:
    """The peak counts from here."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        bench.forget_peak()


def peak(device: Any) -> float:
    """GB at the most: what torch allocated on a GPU, what was resident elsewhere."""
    import torch

    return (
        torch.cuda.max_memory_allocated() / 1e9
        if device.type == "cuda"
        else bench.memory("VmHWM") * 2**20 / 1e9
    )


# ------------------------------------------------------------------------------------ in the parent


def missing(wheels: Path | None) -> list[str]:
    """Packages that are needed and not here, after those that lie in `wheels` have been installed
    from there."""

    def absent() -> list[str]:
        importlib.invalidate_caches()
        return [
            package
            for module, package in NEEDED.items()
            if importlib.util.find_spec(module) is None
        ]

    if wheels is not None and (wanted := absent()):
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--no-index",
                "--find-links",
                str(wheels),
                *wanted,
            ],
            check=False,
        )
    return absent()


def command(given: Any, words: Sequence[str], name: str) -> dict[str, Any]:
    """A row for a program that is started as a part of this."""
    begun = time.perf_counter()
    done = subprocess.run(
        list(words),
        env=bench.environment(given.threads),
        cwd=bench.ROOT,
        text=True,
        capture_output=True,
    )
    said = (done.stdout + done.stderr).strip()
    print(f"--- {name}\n{said[-2000:]}", flush=True)
    status = "failed" if done.returncode else "done"
    return row(name, status, said[-LAST:] if done.returncode else said.splitlines()[-1], begun)


def row(name: str, status: str, reason: str, begun: float) -> dict[str, Any]:
    return {
        "part": name,
        "status": status,
        "reason": reason,
        "seconds": round(time.perf_counter() - begun, 1),
    }


def steps(given: Any) -> list[dict[str, Any]]:
    """The part `step`: a row for each of SETTINGS."""
    import tempfile

    rows = []
    size = (
        {"prompts": 16, "group": 8, "tokens": 300, "steps": 4}
        if not given.quick
        else {"prompts": 2, "group": 2, "tokens": 8, "steps": 2}
    )
    with tempfile.TemporaryDirectory() as folder:
        path = bench.model_folder("0.9" if given.quick else "0.6b-shape", Path(folder))
        for name, words in SETTINGS.items():
            begun = time.perf_counter()
            overrides = [
                *bench.SPREAD,
                f"model.path={path}",
                f"batch.prompts={size['prompts']}",
                f"batch.group_size={size['group']}",
                f"generation.max_new_tokens={size['tokens']}",
                f"trainer.accelerator={'gpu' if given.device == 'cuda' else 'cpu'}",
                f"trainer.micro_batch_tokens={512 if given.quick else 8192}",
                *words,
            ]
            asked = json.dumps({"overrides": overrides, "steps": size["steps"]})
            try:
                found = bench.child(
                    [bench.PYTHON, __file__, "--side", asked], threads=given.threads
                )
                rows.append(row(f"step, {name}", "done", "", begun) | found)
            except RuntimeError as error:
                rows.append(row(f"step, {name}", "failed", str(error)[-LAST:], begun))
            print(rows[-1], flush=True)
    return rows


def peers(given: Any) -> dict[str, Any]:
    """The part `peers`, where an environment with TRL was named or TRL is here."""
    python, begun = given.python or sys.executable, time.perf_counter()
    look = (
        "import importlib.util as u, sys; sys.exit(sum(2**i for i, n in enumerate(('trl', 'vllm'))"
        " if u.find_spec(n) is None))"
    )
    absent = subprocess.run([python, "-c", look], capture_output=True).returncode
    if absent & 1:
        return row(
            "peers",
            "skipped",
            f"{python} has no TRL; make an environment with peers_env.sh and name it by --python",
            begun,
        )
    words = [
        sys.executable,
        str(bench.HERE / "peers.py"),
        "--python",
        python,
        "--device",
        given.device,
        "--out",
        str(given.out),
    ]
    words += (
        ["--quick"]
        if given.quick
        else [
            "--model",
            "0.6b-shape",
            "--lengths",
            "forced",
            "--tokens",
            "300",
            "--micro-batches",
            "4",
        ]
    )
    if not absent and given.device == "cuda":
        return command(given, [*words, "--vllm"], "peers")
    done = command(given, words, "peers")
    return done | {
        "reason": f"without vLLM, which {python} lacks or a CPU cannot run: {done['reason']}"
    }


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        bench.answer(step(json.loads(sys.argv[2])))
        return
    parser = bench.parser(__doc__, rounds=2)
    parser.set_defaults(device="cuda")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what is missing")
    parser.add_argument(
        "--python",
        help="interpreter of an environment with TRL, and with vLLM where it is to be measured",
    )
    parser.add_argument(
        "--parts", nargs="+", choices=("tests", "decode", "memory", "step", "peers"), default=None
    )
    given = parser.parse_args()
    if lacking := missing(given.wheels):
        names = " ".join(lacking)
        parser.error(
            f"not installed: {names}. On a machine with an index: pip download {names} -d FOLDER;"
            " here: --wheels FOLDER"
        )
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu --quick tries the plumbing")
    common = [
        "--device",
        given.device,
        "--threads",
        str(given.threads),
        "--out",
        str(given.out),
        *(["--quick"] if given.quick else []),
    ]

    def own(name: str, *words: str) -> list[str]:
        return [sys.executable, str(bench.HERE / name), *common, *words]

    large = (
        []
        if given.quick
        else [
            "--model",
            "qwen3_0.6b-shape",
            "--rows",
            "128",
            "256",
            "--prompt",
            "512",
            "--tokens",
            "512",
        ]
    )
    tokens = [] if given.quick else ["--tokens", "2048", "4096", "8192", "16384"]
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "-q",
        "-m",
        "gpu",
        "tests/gpu",
    ]
    parts: dict[str, Any] = {
        "tests": lambda: [command(given, tests, "tests")],
        "decode": lambda: [
            command(
                given,
                own("decode.py", *large, "--engines", "transformers", "cached", "--rounds", "2"),
                "decode",
            )
        ],
        "memory": lambda: [command(given, own("memory.py", *tokens), "memory")],
        "step": lambda: steps(given),
        "peers": lambda: [peers(given)],
    }
    rows = [own_row for name in given.parts or parts for own_row in parts[name]()]
    bench.write(
        given.out, "gpu", [one | bench.provenance(given.threads, given.device) for one in rows]
    )
    failed = [one["part"] for one in rows if one["status"] == "failed"]
    print(f"failed: {', '.join(failed)}" if failed else "no part failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
