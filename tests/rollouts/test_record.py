"""Rollouts as files and as text: what is loaded equals what was saved, bytes do not depend on the clock, damage has a place."""

from __future__ import annotations

import gzip
import json

import pytest

from rlkit.errors import DataError
from rlkit.rollouts import load_rollouts, save_rollouts, transcript
from rlkit.tasks import arithmetic
from rlkit.types import Rollout, Step, Task, ToolCall, ToolResult

TASK = Task("row/0", (), answer="7")
ODD = 'naïve 数字 🙂 \u202e \u2028 \x85 \x00 \x1b[31m \ud800 \r\n\t"\\ \x0c'  # a lone surrogate comes out of byte-level decoding


def rollout(text: str = ODD, reward: float | None = 0.1 + 0.2) -> Rollout:
    first = Step(
        prompt=({"role": "user", "content": text},),
        prompt_ids=(1, 2, 2**40),
        response_ids=(3, 4),
        logprobs=(-0.1, -1e-300),
        finish_reason="stop",
        thinking=text,
        content=text,
        thinking_closed=False,
        tool_calls=(
            ToolCall("call_0", "calculator", {"expression": "1 + 1", "deep": [1, {"a": None}]}),
            ToolCall("call_1", "", {}, "Error"),
        ),
        tool_results=(ToolResult("call_0", "calculator", "2", True, 1 / 3), ToolResult("call_1", "", "Error", False)),
        reward=None,
    )
    last = Step((), (1,), (5, 6), (0.0, -1.0), "length", reward=-0.0, forced=(0,), dropped=1)
    task = Task("row/0", ({"role": "system", "content": text}, {"role": "user", "content": "?"}), text, metadata={"a": [1.5, None, text]})
    rewards = {"numeric": 1e22, "format": None}
    return Rollout(task, (first, last), "truncated", "length", 3, 1, reward, rewards, {"note": text})


def test_loaded_equals_saved(tmp_path):
    """Every float to its last bit, every character, None apart from 0, tuples as tuples."""
    rollouts = [rollout(), rollout("plain", None), Rollout(Task("empty", ()), ())]
    save_rollouts(tmp_path / "a" / "r.jsonl.gz", rollouts)
    loaded = load_rollouts(tmp_path / "a" / "r.jsonl.gz")
    assert loaded == rollouts
    assert repr(loaded) == repr(rollouts)  # tells -0.0 from 0.0 and lists from tuples, which == partly does not


def test_rollouts_of_the_default_task_are_equal_too(tmp_path):
    """The metadata of a generated row must survive JSON, or a saved rollout is another one."""
    rollouts = [Rollout(task, ()) for task in arithmetic(max_samples=3)]
    save_rollouts(tmp_path / "r.jsonl.gz", rollouts)
    assert load_rollouts(tmp_path / "r.jsonl.gz") == rollouts


def test_no_rollouts_are_a_file_too(tmp_path):
    save_rollouts(tmp_path / "r.jsonl.gz", [])
    assert load_rollouts(tmp_path / "r.jsonl.gz") == []


def test_bytes_depend_on_neither_clock_nor_name(tmp_path, monkeypatch):
    """gzip writes the time into its header unless told not to; then no two runs are ever equal."""
    import time

    for number, name in enumerate(("a", "b")):
        monkeypatch.setattr(time, "time", lambda number=number: 1e9 + 12345.0 * number)
        save_rollouts(tmp_path / f"{name}.jsonl.gz", [rollout()])
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "r.jsonl.gz"
    save_rollouts(path, [rollout()])
    before = path.read_bytes()
    with pytest.raises(TypeError):
        save_rollouts(path, [rollout("new"), rollout()._replace(metadata={"no JSON": object()})])
    assert path.read_bytes() == before and [f.name for f in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("damage", ["not JSON", "{}", "[]", "3", '{"task": 1, "steps": []}'])
def test_a_damaged_line_is_named(tmp_path, damage):
    path = tmp_path / "r.jsonl.gz"
    save_rollouts(path, [rollout("a"), rollout("b"), rollout("c")])
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    path.write_bytes(gzip.compress("\n".join([lines[0], damage, lines[2]]).encode()))
    with pytest.raises(DataError, match=rf"{path}:2: not a rollout"):
        load_rollouts(path)


@pytest.mark.parametrize("damage", ["cut", "not gzip", "not UTF-8"])
def test_a_file_that_cannot_be_unpacked_is_named(tmp_path, damage):
    """A copy that was cut off, or plain text under the name of a gzip file: one sentence, no traceback of zlib."""
    path = tmp_path / "r.jsonl.gz"
    save_rollouts(path, [rollout(str(i)) for i in range(50)])
    whole = path.read_bytes()
    broken = {"cut": whole[: len(whole) // 2], "not gzip": b'{"task": 1}\n', "not UTF-8": gzip.compress(b"\xff\xfe\n")}
    path.write_bytes(broken[damage])
    with pytest.raises(DataError, match=str(path)):
        load_rollouts(path)


def test_lines_are_json_objects_of_plain_types(tmp_path):
    """Other programs read the file too: one object a line, the fields in their order."""
    save_rollouts(tmp_path / "r.jsonl.gz", [rollout("a")])
    (line,) = gzip.decompress((tmp_path / "r.jsonl.gz").read_bytes()).decode().splitlines()
    data = json.loads(line)
    assert tuple(data) == Rollout._fields and tuple(data["steps"][0]) == Step._fields and tuple(data["task"]) == Task._fields


# -------------------------------------------------------------------------------------------------- transcripts


def test_transcript_reads_as_the_conversation():
    text = transcript(rollout("seven", 0.5))
    assert text.splitlines()[0] == "### row/0 · sample 1 · reward 0.5 · truncated by length"
    wanted = [
        "**user**",
        "    seven",
        "**assistant**",
        "    (thinking) seven",
        '    → calculator({"expression": "1 + 1"',
        "**tool**",
        "    2",
    ]
    positions = [text.index(part) for part in wanted]
    assert positions == sorted(positions)
    assert "expected: `seven`" in text


def test_what_the_model_wrote_is_never_markup():
    """Each of its lines is indented by four, so Markdown shows it as it is."""
    text = transcript(rollout("# heading\n\n**bold**\n```")._replace(task=TASK))
    assert "    # heading" in text and "\n# heading" not in text and "\n```" not in text


def unprintable(text: str) -> list[str]:
    return [c for c in text if not c.isprintable() and c != "\n"]


def test_control_characters_are_shown_not_obeyed():
    """A terminal escape in a reply must not reach the terminal of whoever reads samples/ with less."""
    text = transcript(rollout()._replace(task=TASK))
    assert "\\x1b[31m" in text and "\\x00" in text and "\\u202e" in text and "\\ud800" in text
    assert unprintable(text) == []


def test_control_characters_of_the_row_are_shown_too():
    """The row's id and expected answer come from a data file: from outside, like the reply."""
    text = transcript(Rollout(Task("row\x1b[2J", (), answer="7\x1b[31m \ud800\n# heading"), ()))
    assert unprintable(text) == []
    assert "\n# heading" not in text
