"""Does packing pay? Compare an update over packed rows with one over padded rows.

    python experiments/benchmarks/packing.py

Both sides run forward and backward of `rlkit.models.forward_logprobs` over the same rows of the
embedded model: groups of 8 replies of 19 to 38 tokens to prompts of 40 tokens. The padded rows are
nearly equal in length. `padded` reads the rows like a model that cannot be packed. `apart` packs
rows with different prompts, so that nothing is shared. Rounds alternate in one process.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import bench

GROUP, PROMPT = 8, 40


def batch(rows: int, *, shared: bool) -> tuple[Any, Any]:
    """Return ids and response mask. The rows of a group share a prompt if `shared`."""
    import torch

    generator = torch.Generator().manual_seed(0)
    lengths = [PROMPT + 19 + (7 * row) % 20 for row in range(rows)]
    ids = torch.randint(700, (rows, max(lengths)), generator=generator)
    if shared:
        ids[:, :PROMPT] = ids[torch.arange(rows) // GROUP * GROUP, :PROMPT]
    at = torch.arange(max(lengths))
    return ids, (at >= PROMPT) & (at < torch.tensor(lengths)[:, None])


def seconds(model: Any, ids: Any, mask: Any) -> tuple[float, float]:
    """Return the seconds of one forward and backward pass with packing, and the gradient's norm."""
    import torch

    from rlkit.models import forward_logprobs, pack

    model.zero_grad()
    begun = time.perf_counter()
    forward_logprobs(model, pack(ids, mask)).logprobs.mean().backward()
    spent = time.perf_counter() - begun
    return spent, float(torch.stack([p.grad.norm() for p in model.parameters()]).norm())


def main() -> None:
    given = bench.parser(__doc__, rounds=9, device=False)
    given.add_argument("--rows", type=int, nargs="+", default=[64, 128, 256])
    options = given.parse_args()
    if options.quick:
        options.rounds, options.rows = 1, [8]
    import torch

    from rlkit.models import load_policy
    from rlkit.models.packing import ATTENTION

    torch.set_num_threads(options.threads)
    model = load_policy(path="tiny").model
    found = []
    for rows in options.rows:
        sides = {
            "padded": (batch(rows, shared=True), "sdpa"),
            "packed": (batch(rows, shared=True), ATTENTION),
        }
        sides["apart"] = (batch(rows, shared=False), ATTENTION)
        spent: dict[str, list[float]] = {name: [] for name in sides}
        norms = {}
        for turn in range(options.rounds + 1):  # the first warms up
            for name, (given_rows, attention) in sides.items():
                model.config._attn_implementation = attention
                took, norms[name] = seconds(model, *given_rows)
                if turn or options.quick:
                    spent[name].append(took)
        medians = {
            f"{name}_seconds": round(statistics.median(times), 4) for name, times in spent.items()
        }
        ratios = [a / b for a, b in zip(spent["padded"], spent["packed"], strict=True)]
        found.append(
            {"rows": rows}
            | medians
            | {
                "padded_over_packed": round(statistics.median(ratios), 2),
                "fastest": round(max(ratios), 2),
                "slowest": round(min(ratios), 2),
            }
            | {
                "gradient_difference": (
                    f"{abs(norms['padded'] - norms['packed']) / norms['padded']:.1e}"
                ),
                "rounds": options.rounds,
            }
        )
    bench.write(options.out, "packing", [row | bench.provenance(options.threads) for row in found])


if __name__ == "__main__":
    main()
