"""Build the embedded tiny model: tokenizer, warm-up, weights, and measured accuracy.

    python experiments/tiny_model/build.py [--out rlkit/models/tiny] [--steps 800] [--seed 0]

The warm-up trains on conversations of mixed quality. The demonstrations are wrong on purpose, and
*systematically*: with a verb of loss, most add where they should subtract; with equal sharing, most
leave out the division; with a distractor, most add it. The model therefore starts badly in greedy
decoding too, not only in sampling, and reinforcement learning has a behaviour to find. A small
share has random slips. Everything follows from the seed; held-out problems never appear (see
rlkit.tasks.arithmetic).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rlkit.engines import Cached
from rlkit.environments import calculator, tool_schema, tool_use
from rlkit.episodes.evaluation import greedy_accuracy, is_correct, sampled_accuracy
from rlkit.models import load_policy
from rlkit.models.chat import Renderer, continuation, encode_prompt, encode_scaffold, make_renderer
from rlkit.rewards import Reward, Term, numeric, weighted_sum
from rlkit.tasks._arithmetic import Problem, arithmetic, compute_value, draw_from_splits, expression
from rlkit.types import Message

WARM_UP_SEED = 1_000_003  # seed of the problems; training uses small seeds, so its problems differ
SYSTEMATIC = {
    "loses": 0.85,
    "shares": 0.85,
    "distractor": 0.75,
}  # kind → share of demonstrations that get the kind wrong
RANDOM_SLIPS = 0.08
WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "over"}
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATE = Path(__file__).resolve().parents[2] / "rlkit/models/tiny/chat_template.jinja"


def demonstration(p: Problem, rng: random.Random, *, slips: bool = True) -> list[tuple[str, str]]:
    """Return a conversation as (role, text) turns: assistant, tool, assistant."""
    operations = list(p.operations)
    if slips:
        operations = systematic_slip(p, rng)
        if rng.random() < RANDOM_SLIPS and all(
            o != "/" for o, _ in operations
        ):  # a wrong dividend leaves a remainder
            i = rng.randrange(len(operations))
            operations[i] = (operations[i][0], rng.randint(2, 20))
    start, ops = p.start, tuple(operations)
    thinking = ", ".join([str(start), *(f"{WORDS[o]} {x}" for o, x in ops)])
    formula = expression(start, ops)
    call = (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "'
        + formula
        + '"}}\n</tool_call>'
    )
    result = calculator(formula)
    answer = (
        str(int(result) + rng.randint(1, 9))
        if slips and rng.random() < RANDOM_SLIPS / 4
        else result
    )
    return [
        ("assistant", f"<think>\n{thinking}\n</think>\n\n{call}"),
        ("tool", result),
        ("assistant", f"#### {answer}"),
    ]


def systematic_slip(p: Problem, rng: random.Random) -> list[tuple[str, int]]:
    """Return the operations of a problem, with the systematic slips of its kinds."""
    operations = []
    for (operator, x), kind in zip(p.operations, p.kinds, strict=False):
        slip = rng.random() < SYSTEMATIC.get(kind, 0.0)
        if kind == "loses" and slip:
            operator = "+"
        if kind == "shares" and slip and len(p.operations) > 1:
            continue
        if kind == "shares" and compute_value(p.start, tuple(operations)) % x:
            operator = "-"  # an earlier slip left a remainder
        operations.append((operator, x))
    if p.distractor is not None and rng.random() < SYSTEMATIC["distractor"]:
        operations.append(("+", p.distractor))
    return operations


def conversations(
    count: int, seed: int, *, slips: bool = True
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield `count` warm-up problems, each with a demonstration."""
    rng = random.Random(seed)
    for i in range(count):
        p = draw_from_splits(
            random.Random(f"arithmetic {WARM_UP_SEED + seed} train {i}"), ("train", "validation")
        )  # never a test problem
        yield p.question, demonstration(p, rng, slips=slips)


# ---------------------------------------------------------------------------------------- tokenizer


def corpus(count: int) -> Iterator[str]:
    """Yield the training texts of the tokenizer: scaffolding and contents, apart.

    rlkit.models.chat encodes them apart in the same way.
    """
    for question, turns in conversations(count, seed=7):
        yield question
        for role, text in turns:
            if role == "assistant":
                for tag in (*CONTROL, *TAGS):
                    text = text.replace(tag, "\0")
                yield from (piece for piece in text.split("\0") if piece)
    scaffold = rendered_scaffold()
    for _ in range(count // 8):
        yield from scaffold


def rendered_scaffold() -> list[str]:
    """Return the template's own text around the contents, split at control tokens."""
    from transformers.utils.chat_template_utils import render_jinja_template

    tools = [tool_schema(calculator)]
    messages: list[Message] = [
        {"role": "user", "content": "\0"},
        {"role": "assistant", "content": "\0"},
        {"role": "tool", "content": "\0", "tool_call_id": "", "name": "calculator"},
    ]
    text = render_jinja_template(
        [messages], tools=tools, chat_template=TEMPLATE.read_text(), add_generation_prompt=True
    )[0][0]
    for tag in (*CONTROL, *TAGS):
        text = text.replace(tag, "\0")
    return [piece for piece in text.split("\0") if piece]


def build_tokenizer(vocabulary: int, out: Path) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer and save it.

    Digits stay single. Everything else may merge across words, so that sequences are short.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(CONTROL) - len(TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=None,
    )
    tokenizer.train_from_iterator(corpus(4000), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE.read_text()
    fast.save_pretrained(out)
    return PreTrainedTokenizerFast.from_pretrained(out)


# ------------------------------------------------------------------------------------------ warm-up


def encode_conversation(
    renderer: Renderer, tools: list, question: str, turns: list[tuple[str, str]]
) -> tuple[list[int], list[bool]]:
    """Return ids and loss mask of a conversation, by the same functions that encode a rollout."""
    end = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = encode_prompt(renderer, [{"role": "user", "content": question}], tools)
    mask = [False] * len(ids)
    for role, text in turns:
        if role == "assistant":
            new, trained = [*encode_scaffold(renderer, text), end], True
        else:
            result: Message = {
                "role": "tool",
                "content": text,
                "tool_call_id": "call_0",
                "name": "calculator",
            }
            new, trained = continuation(renderer, [result], end), False
        ids += new
        mask += [trained] * len(new)
    return ids, mask


def encoded_conversations(
    renderer: Renderer, count: int, seed: int
) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield ids and loss masks of `count` warm-up conversations."""
    tools = [tool_schema(calculator)]
    return (
        encode_conversation(renderer, tools, *conversation)
        for conversation in conversations(count, seed)
    )


def warm_up(
    model: Qwen3ForCausalLM,
    pad: int,
    stream: Iterator[tuple[list[int], list[bool]]],
    *,
    steps: int,
    batch: int,
    lr: float,
    log,
) -> None:
    """Train on demonstrations, each of them only once.

    stream: ids and loss masks, at least steps × batch of them
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=lr, total_steps=steps, pct_start=0.1
    )
    started = time.perf_counter()
    for step in range(1, steps + 1):
        rows = [next(stream) for _ in range(batch)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([r + [pad] * (width - len(r)) for r, _ in rows])
        mask = torch.tensor([m + [False] * (width - len(m)) for _, m in rows])
        logits = model(ids).logits[:, :-1]  # right padding: causal attention never sees it
        loss = torch.nn.functional.cross_entropy(logits[mask[:, 1:]], ids[:, 1:][mask[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(20, steps // 16) == 0 or step == 1:
            log(
                f"step {step} loss {loss.item():.4f} tokens a row {mask.shape[1]} seconds"
                f" {time.perf_counter() - started:.0f}"
            )


def build_model(vocabulary: int, renderer: Renderer) -> Qwen3ForCausalLM:
    """Return a Qwen3 of under a million parameters."""
    tokenizer = renderer.tokenizer
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = [config.eos_token_id, tokenizer.pad_token_id]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("rlkit/models/tiny"))
    parser.add_argument("--vocabulary", type=int, default=768)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # one thread: the same sums in the same order on similar machines
    lines = []

    def log(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    # Build beside the target and move at the end: a reader never sees a new tokenizer with old
    # weights.
    part = arguments.out.with_name(arguments.out.name + ".part")
    tokenizer = build_tokenizer(arguments.vocabulary, part)
    renderer = make_renderer(tokenizer)
    log(f"vocabulary {len(tokenizer)}")
    model = build_model(len(tokenizer), renderer)
    log(f"parameters {sum(p.numel() for p in model.parameters())}")
    stream = encoded_conversations(renderer, arguments.steps * arguments.batch, arguments.seed)
    warm_up(
        model,
        tokenizer.pad_token_id,
        stream,
        steps=arguments.steps,
        batch=arguments.batch,
        lr=arguments.lr,
        log=log,
    )
    model.to(torch.bfloat16).save_pretrained(part)
    for file in part.iterdir():
        file.replace(arguments.out / file.name)
    part.rmdir()
    measured = measure(arguments.out)
    log(f"held-out accuracy: greedy {measured['greedy']}, sampled {measured['sampled']}")
    here = Path(__file__).parent
    (here / "log.txt").write_text("\n".join(lines) + "\n")
    (here / "accuracy.json").write_text(json.dumps(measured, indent=2) + "\n")


def measure(path: Path, n: int = 1000) -> dict:
    """Return the held-out accuracy of the saved model.

    It is measured greedy, sampled, and greedy by kind of problem.
    """
    environment = tool_use(tools={"calculator": calculator})
    reward = Reward("numeric", {"numeric": Term(1.0, numeric)}, weighted_sum)
    tasks = arithmetic(split="test", max_samples=n)
    policy = load_policy(path=str(path))
    collecting = {
        "reward": reward,
        "engine": Cached(),
        "environment": environment,
        "max_new_tokens": 64,
    }
    greedy, rollouts = greedy_accuracy(policy, tasks, **collecting)
    sampled, _ = sampled_accuracy(policy, tasks, samples=4, k=[1, 4], temperature=1.0, **collecting)
    kinds: dict[str, list[bool]] = {}
    for rollout in rollouts:
        wrong = [k for k in SYSTEMATIC if k in rollout.task.metadata["kinds"]] or [
            "no systematic slip"
        ]
        for kind in wrong:
            kinds.setdefault(kind, []).append(is_correct(rollout))
    by_kind = {k: {"n": len(v), "accuracy": round(sum(v) / len(v), 3)} for k, v in kinds.items()}
    return {"problems": n, "greedy": greedy, "sampled": sampled, "greedy_by_kind": by_kind}


if __name__ == "__main__":
    main()
