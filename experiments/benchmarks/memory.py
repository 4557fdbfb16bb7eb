"""Compare the peak memory of one update between rlkit and the naive form, by tokens.

    python experiments/benchmarks/memory.py [--tokens 512 1024 2048 4096]
    python experiments/benchmarks/memory.py --device cuda --tokens 2048 4096 8192 16384

The vocabulary has 151,936 tokens. rlkit's side is forward and backward of `forward_logprobs` and
the clipped surrogate. The naive side computes logits [B, T, V] → log_softmax → gather and the same
surrogate. The trunk is tiny (one layer of width 64), so that nearly all memory belongs to the head.
Rows have 512 tokens, and a quarter of each is its prompt.

Every figure comes from its own process. It is the peak of memory above model and gradients:
resident memory on a CPU, the memory of torch's allocator on a GPU. Both forms give the same
gradient; memory.csv has the relative difference of the two norms. rlkit's form also computes the
entropy of every token in the same pass, and the naive form does not.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import bench

WIDTH = 512
PROMPT = WIDTH // 4


def batch(tokens: int, device: str) -> dict[str, Any]:
    """Return random ids [B, T], the mask of the sampled tokens, and the inputs of the surrogate."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (max(1, tokens // WIDTH), min(WIDTH, tokens))
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[:, min(PROMPT, tokens // 2) :] = True
    made = {
        "ids": torch.randint(0, 151_936, shape, generator=generator),
        "mask": mask,
        "advantages": torch.randn(shape, generator=generator),
        "shift": (
            torch.randn(shape, generator=generator) / 10
        ),  # old log-probs minus the present ones
    }
    return {name: value.to(device) for name, value in made.items()}


def logprobs_of(form: str, model: Any, given: dict[str, Any]) -> Any:
    """Return the log-probs of the sampled tokens [B, T], 0 elsewhere."""
    from rlkit.models import forward_logprobs, pack

    if form == "rlkit":
        return forward_logprobs(model, pack(given["ids"], given["mask"])).logprobs
    logits = model(input_ids=given["ids"], use_cache=False).logits
    taken = logits.log_softmax(-1)[:, :-1].gather(-1, given["ids"][:, 1:, None])[..., 0]
    return taken.new_zeros(given["ids"].shape).index_put(
        (given["mask"],), taken[given["mask"][:, 1:]]
    )


def update(form: str, model: Any, given: dict[str, Any]) -> float:
    """Run one forward and backward pass. Return the norm of the gradient."""
    import torch

    from rlkit.functional import clipped, token_ratio

    mask = given["mask"]
    logprobs = logprobs_of(form, model, given)
    ratio = token_ratio(logprobs, logprobs.detach() + given["shift"], mask)
    ((clipped(ratio, given["advantages"]) * mask).sum() / mask.sum()).backward()
    return float(
        torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    )


def side(form: str, tokens: int, threads: int, device: str) -> dict[str, float]:
    """Return the MiB of one update beyond model and gradients, in this process."""
    import time

    import torch

    torch.set_num_threads(threads)
    model = bench.shape("wide_vocabulary", device)
    update(form, model, batch(8, device))  # allocates the gradients, and torch's one-time buffers
    for p in model.parameters():
        p.grad.zero_()
    given = batch(tokens, device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
    else:
        before = bench.forget_peak()
    begun = time.perf_counter()
    norm = update(form, model, given)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    most = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else bench.memory("VmHWM")
    return {"mib": most - before, "seconds": seconds, "norm": norm}


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        bench.answer(side(**json.loads(sys.argv[2])))
        return
    parser = bench.parser(__doc__, rounds=1)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[512, 1024, 2048, 4096],
        help="of a micro-batch; the logits of each take 0.58 MiB, several times over",
    )
    given = parser.parse_args()
    if given.quick:
        given.tokens = [128]
    rows = []
    for tokens in given.tokens:
        runs: dict[str, list[dict[str, float]]] = {"naive": [], "rlkit": []}
        for _ in range(given.rounds):
            for form in runs:
                settings = {
                    "form": form,
                    "tokens": tokens,
                    "threads": given.threads,
                    "device": given.device,
                }
                runs[form].append(
                    bench.child(
                        [bench.PYTHON, __file__, "--side", json.dumps(settings)],
                        threads=given.threads,
                    )
                )
        mib, seconds = (
            {form: statistics.median(run[key] for run in own) for form, own in runs.items()}
            for key in ("mib", "seconds")
        )
        norms = [runs[form][0]["norm"] for form in runs]
        rows.append(
            {
                "tokens": tokens,
                "vocabulary": 151_936,
                "naive_mib": round(mib["naive"]),
                "rlkit_mib": round(mib["rlkit"]),
                "of_naive": round(mib["rlkit"] / mib["naive"], 3),
                "naive_seconds": round(seconds["naive"], 3),
                "rlkit_seconds": round(seconds["rlkit"], 3),
                "gradient_difference": f"{abs(norms[0] - norms[1]) / norms[0]:.1e}",
                "rounds": given.rounds,
            }
        )
    bench.write(
        given.out, "memory", [row | bench.provenance(given.threads, given.device) for row in rows]
    )
    print("goal: at most 0.33 of the naive form")


if __name__ == "__main__":
    main()
