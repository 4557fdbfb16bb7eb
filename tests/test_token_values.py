"""Token values on record: texts that add up, and advantages that stand at their own tokens."""

from __future__ import annotations

import gzip
import json

import torch

from rlkit.episodes import assemble
from rlkit.episodes.tokens import pieces, save_tokens
from rlkit.training.callbacks.conversations import learned_from
from rlkit.types import Rollout, Step, Task


def utf8(ids):
    """Bytes as tokens, as a byte-level tokenizer has them."""
    return bytes(ids).decode(errors="replace")


def test_pieces_add_up_and_a_character_of_several_tokens_stands_at_its_last():
    ids = list("aé€😀b".encode())
    assert pieces(ids, utf8) == ["a", "", "é", "", "", "€", "", "", "", "😀", "b"]
    assert pieces([0xF0, 0x9F], utf8) == ["", "\ufffd"], "cut in the middle: shown as what it is"
    assert pieces([0xFF, 0xFF, 0xFF, 0xFF, 0x61], utf8)[-1] == "a", "what is no character does not swallow the rest"


def test_a_space_at_the_start_of_a_text_is_not_lost():
    """As SentencePiece decodes: the space of a first token is dropped."""
    words = [" one", " two", " three"]
    assert pieces([0, 1, 2], lambda ids: "".join(words[i] for i in ids).removeprefix(" ")) == ["one", " two", " three"]


def rollout(prompt, *, sample):
    """Two steps, three tokens and two; the second context goes on from the first or, with another prompt, starts anew."""
    first = Step((), (1, 2), (11, 12, 13), (-0.1, -0.2, -0.3), "tool", forced=(1,))
    return Rollout(Task("row/0", ()), (first, Step((), prompt, (21, 22), (-0.4, -0.5), "stop")), sample=sample, reward=1.0)


def test_advantages_stand_at_their_own_tokens():
    """Also where a rollout fills two rows, and where a token was written by the thinking budget."""
    rollouts = [rollout((1, 2, 11, 12, 13, 5), sample=0), rollout((7, 8), sample=1)]
    batch = assemble(rollouts, pad_token_id=0)
    assert batch.ids.shape[0] == 3, "one row, then two"
    learned = learned_from(rollouts, batch._replace(advantages=batch.ids.float()), [1, 0])
    assert [[step["advantages"] for step in own] for own in learned] == [[[11, 12, 13], [21, 22]]] * 2
    assert [[step["trained"] for step in own] for own in learned] == [[[1, 0, 1], [1, 1]]] * 2


def test_an_episode_without_a_reply_has_no_values():
    """Its first prompt left no room; as the worst of its step it is among those that are written."""
    rollouts = [rollout((7, 8), sample=0), Rollout(Task("row/0", ()), (), sample=1)]
    batch = assemble(rollouts, pad_token_id=0)
    assert learned_from(rollouts, batch._replace(advantages=batch.ids.float()), [1, 0])[0] == []


def test_a_file_has_a_line_a_rollout_and_equal_rollouts_give_equal_bytes(tmp_path):
    rollouts = [rollout((7, 8), sample=1)]
    batch = assemble(rollouts, pad_token_id=0)
    learned = learned_from(rollouts, batch._replace(advantages=torch.full(batch.ids.shape, 1 / 3)), [0])
    for name in ("a", "b"):
        save_tokens(tmp_path / name, rollouts, lambda ids: "".join(chr(i + 80) for i in ids), learned)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    (line,) = gzip.decompress((tmp_path / "a").read_bytes()).decode().splitlines()
    told = json.loads(line)
    assert (told["group"], told["sample"], told["task_id"]) == (0, 1, "row/0")
    assert told["steps"][1] == {"text": ["e", "f"], "logprobs": [-0.4, -0.5], "advantages": [0.33333] * 2, "trained": [1, 1]}
