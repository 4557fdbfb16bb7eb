"""Does `model.kernel=fused` pay? Time one update's forward and backward pass with both kernels.

    python experiments/benchmarks/update_kernel.py

The fused kernel covers norms, rotary positions and gates. Both sides run
`rlkit.models.forward_logprobs` over the same 64 rows of the embedded model, groups of 8 replies to
prompts of 40 tokens, in alternating rounds of one process. There are three lengths of replies, with
one thread and with two. Two larger models with random weights run at the middle length.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import bench

ROWS, GROUP, PROMPT = 64, 8, 40


def spent(model: Any, kernel: str, packed: Any) -> tuple[float, float]:
    """Return the wall and processor seconds of one forward and backward pass."""
    from rlkit.models import forward_logprobs
    from rlkit.models.fused import choose_kernel

    choose_kernel(model, kernel)  # type: ignore[arg-type]
    model.zero_grad()
    begun, at = time.perf_counter(), time.process_time()
    forward_logprobs(model, packed).logprobs.mean().backward()
    return time.perf_counter() - begun, time.process_time() - at


def compared(model: Any, tokens: int, rounds: int) -> dict[str, Any]:
    """Return a row with the medians of both kernels, run in turn, and the ratios of the pairs."""
    import torch

    from rlkit.models import pack

    ids = torch.randint(
        10, 700, (ROWS, PROMPT + tokens), generator=torch.Generator().manual_seed(0)
    )
    ids[:, :PROMPT] = ids[torch.arange(ROWS) // GROUP * GROUP, :PROMPT]
    packed = pack(ids, (torch.arange(PROMPT + tokens) >= PROMPT).expand(ROWS, -1))
    both = [
        [spent(model, kernel, packed) for kernel in ("eager", "fused")] for _ in range(rounds + 1)
    ][1:]
    ratios = [fused[0] / eager[0] for eager, fused in both]
    row: dict[str, Any] = {"tokens": tokens}
    for side, kernel in enumerate(("eager", "fused")):
        row |= {f"{kernel}_seconds": round(statistics.median(own[side][0] for own in both), 4)}
    row["ratio"], row["fastest"], row["slowest"] = (
        round(f(ratios), 3) for f in (statistics.median, min, max)
    )
    row["processor_ratio"] = round(
        statistics.median(fused[1] / eager[1] for eager, fused in both), 3
    )
    return row | {"rounds": rounds}


def main() -> None:
    given = bench.parser(__doc__, rounds=15, device=False)
    given.add_argument("--tokens", type=int, nargs="+", default=[16, 28, 96], help="of a reply")
    given.add_argument(
        "--million",
        nargs="+",
        choices=tuple(bench.SIZES),
        default=list(bench.SIZES),
        help="parameters of the model",
    )
    options = given.parse_args()
    if options.quick:
        options.rounds, options.tokens, options.million = 1, [4], ["0.9"]
    import torch

    from rlkit.models import load_policy

    found = []
    for size in options.million:
        with tempfile.TemporaryDirectory() as folder:
            model = load_policy(path=bench.model_folder(size, Path(folder))).model
        for threads in sorted({1, options.threads}):
            torch.set_num_threads(threads)
            for tokens in (
                options.tokens
                if size == "0.9"
                else sorted(options.tokens)[len(options.tokens) // 2 :][:1]
            ):
                found.append(
                    {"million": size}
                    | compared(model, tokens, options.rounds)
                    | bench.provenance(threads)
                )
    bench.write(options.out, "update_kernel", found)


if __name__ == "__main__":
    main()
