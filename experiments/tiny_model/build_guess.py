"""Build the warm start of guess_number: the tiny model, trained on games of a mediocre player.

    python experiments/tiny_model/build_guess.py [--out rlkit/models/tiny] [--steps 100] [--seed 0]

The player halves the bounds, but in most turns he stubbornly repeats his last number. The model
thus learns the form of the game, and has much to gain. Only the guesses are trained on, in the
exact token stream of the environment. Everything follows from the seed.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from build import warm_up

from rlkit.models import load_policy
from rlkit.models.chat import Renderer, continuation, encode_prompt, encode_scaffold
from rlkit.tasks import guess_number as games
from rlkit.types import Message

STUBBORN = 0.6  # share of the guesses after the first that repeat the guess before
POOL = 128  # games sorted by length at a time, so that a batch has little padding
LOW, HIGH, TURNS = 1, 20, 50  # as in experiment=guess_number_ppo


def game(rng: random.Random) -> list[tuple[str, str]]:
    """Return the turns of a game as (role, text). The last guess is right, or the fiftieth."""
    number, low, high = rng.randint(LOW, HIGH), LOW, HIGH
    turns: list[tuple[str, str]] = []
    guess = (low + high) // 2
    while True:
        turns.append(("assistant", str(guess)))
        if guess == number or len(turns) == 2 * TURNS - 1:
            return turns
        turns.append(("user", "higher" if guess < number else "lower"))
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
        if rng.random() >= STUBBORN:
            guess = (low + high) // 2


def encoded_games(
    renderer: Renderer, count: int, seed: int
) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield ids and loss masks of `count` games, by the same functions that encode a rollout."""
    rng = random.Random(seed)
    end = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompt = encode_prompt(renderer, list(games(max_samples=1, low=LOW, high=HIGH)[0].messages))
    said: dict[str, list[int]] = {}
    for word in ("higher", "lower"):
        message: Message = {"role": "user", "content": word}
        said[word] = continuation(renderer, [message], end)
    guesses = {str(n): [*encode_scaffold(renderer, str(n)), end] for n in range(LOW, HIGH + 1)}

    def encoded(turns: list[tuple[str, str]]) -> tuple[list[int], list[bool]]:
        ids, mask = list(prompt), [False] * len(prompt)
        for role, text in turns:
            new = guesses[text] if role == "assistant" else said[text]
            ids += new
            mask += [role == "assistant"] * len(new)
        return ids, mask

    for start in range(0, count, POOL):
        yield from sorted(
            (encoded(game(rng)) for _ in range(min(POOL, count - start))),
            key=lambda row: len(row[0]),
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("rlkit/models/tiny"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # one thread: the same sums in the same order on similar machines
    lines = []

    def log(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    policy = load_policy(path="tiny")
    stream = encoded_games(policy.renderer, arguments.steps * arguments.batch, arguments.seed)
    warm_up(
        policy.model,
        policy.pad_token_id,
        stream,
        steps=arguments.steps,
        batch=arguments.batch,
        lr=arguments.lr,
        log=log,
    )
    name = "model.guess_number.safetensors"
    with tempfile.TemporaryDirectory(
        dir=arguments.out
    ) as part:  # moved at the end: never half a file under that name
        policy.model.to(torch.bfloat16).save_pretrained(part, variant="guess_number")
        (Path(part) / name).replace(arguments.out / name)
    (Path(__file__).parent / "guess_log.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
