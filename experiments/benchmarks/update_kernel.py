"""Do fused norms, rotary positions and gates pay: one update's forward and backward pass with either `model.kernel`.

    python experiments/benchmarks/update_kernel.py

Both sides go through `rlkit.models.forward_logprobs` over the same 64 rows of the embedded model, groups of 8 replies to prompts of 40
tokens, in alternating rounds of one process. Three lengths of replies, with one thread and with two.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import bench

ROWS, GROUP, PROMPT = 64, 8, 40


def spent(model: Any, kernel: str, packed: Any) -> tuple[float, float]:
    """Seconds of the clock and of the processors of one forward and backward pass."""
    from rlkit.models import forward_logprobs
    from rlkit.models.fused import choose_kernel

    choose_kernel(model, kernel)  # type: ignore[arg-type]
    model.zero_grad()
    begun, at = time.perf_counter(), time.process_time()
    forward_logprobs(model, packed).logprobs.mean().backward()
    return time.perf_counter() - begun, time.process_time() - at


def main() -> None:
    given = bench.parser(__doc__, rounds=15, device=False)
    given.add_argument("--tokens", type=int, nargs="+", default=[16, 28, 96], help="of a reply")
    options = given.parse_args()
    if options.quick:
        options.rounds, options.tokens = 1, [4]
    import torch

    from rlkit.models import load_policy, pack

    model, found = load_policy(path="tiny").model, []
    for threads in sorted({1, options.threads}):
        torch.set_num_threads(threads)
        for tokens in options.tokens:
            ids = torch.randint(10, 700, (ROWS, PROMPT + tokens), generator=torch.Generator().manual_seed(0))
            ids[:, :PROMPT] = ids[torch.arange(ROWS) // GROUP * GROUP, :PROMPT]
            packed = pack(ids, (torch.arange(PROMPT + tokens) >= PROMPT).expand(ROWS, -1))
            rounds = [[spent(model, kernel, packed) for kernel in ("eager", "fused")] for _ in range(options.rounds + 1)][1:]
            ratios = [fused[0] / eager[0] for eager, fused in rounds]
            row: dict[str, Any] = {"tokens": tokens}
            for side, kernel in enumerate(("eager", "fused")):
                row |= {f"{kernel}_seconds": round(statistics.median(own[side][0] for own in rounds), 4)}
            row["ratio"], row["fastest"], row["slowest"] = (round(f(ratios), 3) for f in (statistics.median, min, max))
            row["processor_ratio"] = round(statistics.median(fused[1] / eager[1] for eager, fused in rounds), 3)
            found.append(row | {"rounds": options.rounds} | bench.provenance(threads))
    bench.write(options.out, "update_kernel", found)


if __name__ == "__main__":
    main()
