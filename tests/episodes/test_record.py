"""Rollouts as files and as text: what is loaded equals what was saved, bytes do not depend on the
clock, damage has a place."""

from __future__ import annotations

import gzip
import json
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rlkit.commands.rollout import tabulate_episodes
from rlkit.episodes import (
    append_rollouts,
    load_rollouts,
    rollout_schema,
    save_rollouts,
    write_transcript,
)
from rlkit.episodes.record import COLUMNS, FAILED, FORMATS, keep_failed_rollout, make_row, read_row
from rlkit.errors import ConfigError, DataError
from rlkit.rewards import RewardError
from rlkit.tasks import arithmetic
from rlkit.training.callbacks.conversations import select_best_and_worst
from rlkit.types import Message, Rollout, Step, Task, ToolCall, ToolResult

TASK = Task("row/0", (), answer="7")
# a call's JSON may hold a lone surrogate
ODD = 'naïve 数字 🙂 \u202e \u2028 \x85 \x00 \x1b[31m \ud800 \r\n\t"\\ \x0c'


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
        tool_results=(
            ToolResult("call_0", "calculator", "2", True, 1 / 3),
            ToolResult("call_1", "", "Error", False),
        ),
        reward=None,
    )
    last = Step(
        tuple(result.message for result in first.tool_results),
        (1,),
        (5, 6),
        (0.0, -1.0),
        "length",
        reward=-0.0,
        forced=(0,),
        dropped=1,
        versions=((0, 2), (1, 3)),
    )
    task = Task(
        "row/0",
        ({"role": "system", "content": text}, {"role": "user", "content": "?"}),
        text,
        metadata={"a": [1.5, None, text]},
    )
    rewards = {"numeric": 1e22, "format": None}
    return Rollout(
        task, (first, last), "truncated", "length", 3, 1, reward, rewards, {"note": text}
    )


# ------------------------------------------------------------------------------------ what is saved

CHARACTERS = (
    "a",
    "d",
    "8",
    "0",
    '"',
    "\\",
    "\n",
    "{",
    "é",
    "🙂",
    "\x00",
    "\u2028",
    "\ufffd",
    "\ufffdd83d",
    "\ufffdfffd",
    "\ud83d",
    "\ude42",
)
NUMBERS = (0.0, -0.0, 1.0, 0.1 + 0.2, -1e-300, 5e-324, 1e22, -1.7976931348623157e308)


def some_rollouts(random: Random) -> list[Rollout]:
    """Up to three, with anything that the contracts allow in every field. Messages have their keys
    in the order of the contract."""

    def text() -> str:
        return "".join(random.choices(CHARACTERS, k=random.randrange(9)))

    def maybe(value: Any) -> Any:
        return random.choice((value, None))

    def several(make: Callable[[], Any]) -> tuple[Any, ...]:
        return tuple(make() for _ in range(random.randrange(3)))

    def number() -> float:
        return random.choice((*NUMBERS, random.gauss(0, 1)))

    def anything() -> Any:
        scalars = (text(), number(), random.getrandbits(70), True, None)
        return random.choice(
            (
                *scalars,
                list(random.sample(scalars, 2)),
                {text(): random.choice(scalars), text(): [{}]},
                [],
                {},
            )
        )

    def mapping(make: Callable[[], Any] = anything) -> dict[str, Any]:
        return dict(several(lambda: (text(), make())))

    def message() -> Message:
        call = {
            "id": text(),
            "type": "function",
            "function": {"name": text(), "arguments": mapping()},
        }
        other = {
            "reasoning_content": text(),
            "tool_calls": random.choice(([call], None)),
            "tool_call_id": text(),
            "name": text(),
            text(): anything(),
        }
        other = {name: value for name, value in other.items() if random.random() < 0.3}
        content = random.choice(({}, {"content": text()}, {"content": text()}))
        return (
            {"role": random.choice(("user", "tool"))}
            | content
            | other
            | random.choice(({}, {"content": None}) if not content else ({},))
        )

    def ids() -> tuple[int, ...]:
        return several(lambda: random.getrandbits(60))

    def step() -> Step:
        calls, results = (
            several(lambda: ToolCall(text(), text(), mapping(), text())),
            several(lambda: ToolResult(text(), text(), text(), random.random() < 0.5, number())),
        )
        said = (
            random.choice(("stop", "length", "another")),
            text(),
            text(),
            random.random() < 0.5,
        )  # there is no closed list of reasons
        return Step(
            several(message), ids(), ids(), several(number), *said, calls, results, maybe(number())
        )

    def one() -> Rollout:
        task = Task(text(), several(message), text(), text(), text(), mapping())
        ended = random.choice((("terminated", ""), ("truncated", "length")))
        scores = (maybe(number()), mapping(lambda: maybe(number())), mapping(), mapping(text))
        return Rollout(
            task,
            several(step),
            *ended,
            random.getrandbits(40),
            random.getrandbits(8),
            *scores,
            metrics=mapping(number),
            environment_rewards=several(lambda: maybe(number())),
            greedy_reward=maybe(number()),
            greedy_played=random.random() < 0.5,
            player=maybe(1),
            error=text(),
            state=mapping(),
        )

    return list(several(one) + several(one))


@pytest.mark.parametrize("ending", FORMATS)
def test_loaded_equals_saved(tmp_path, ending):
    """In every format, saved at once or bit by bit: floats to the last bit, every character, None
    apart from 0 and from what is absent."""
    path = tmp_path / "a" / f"r{ending}"
    for seed in range(12):
        rollouts = [rollout for i in range(5) for rollout in some_rollouts(Random(5 * seed + i))]
        first = seed % (len(rollouts) + 1)
        save_rollouts(path, rollouts[:first])
        for one in rollouts[first:]:
            append_rollouts(path, [one])
        loaded = load_rollouts(path)
        assert loaded == rollouts
        assert repr(loaded) == repr(
            rollouts
        )  # tells -0.0 from 0.0 and lists from tuples, which == partly does not
        assert_histories(loaded, rollouts)


def assert_histories(loaded: list[Rollout], rollouts: list[Rollout]) -> None:
    """What the policy saw and said before every step, with and without its thinking, is told by the
    file."""
    for after, before in zip(loaded, rollouts, strict=True):
        for k in range(len(before.steps) + 1):
            whole = after.history(k, thinking=True)
            replies = [m for m in whole if m["role"] == "assistant"]
            assert whole == before.history(k, thinking=True)
            assert [m.get("reasoning_content", "") for m in replies] == [
                s.thinking for s in before.steps[:k]
            ]
            without = [
                (
                    m
                    if m["role"] != "assistant"
                    else {n: v for n, v in m.items() if n != "reasoning_content"}
                )
                for m in whole
            ]
            assert after.history(k, thinking=False) == without


def test_rollouts_of_the_default_task_are_equal_too(tmp_path):
    """The metadata of a generated row must survive JSON, or a saved rollout is another one."""
    rollouts = [Rollout(task, ()) for task in arithmetic(max_samples=3)]
    save_rollouts(tmp_path / "r.jsonl.gz", rollouts)
    assert load_rollouts(tmp_path / "r.jsonl.gz") == rollouts


@pytest.mark.parametrize("ending", FORMATS)
def test_bytes_depend_on_neither_clock_nor_name(tmp_path, monkeypatch, ending):
    """gzip writes the time into its header unless told not to; then no two runs are ever equal."""
    import time

    for number, name in enumerate(("a", "b")):
        monkeypatch.setattr(time, "time", lambda number=number: 1e9 + 12345.0 * number)
        save_rollouts(tmp_path / f"{name}{ending}", [rollout()])
        append_rollouts(tmp_path / f"{name}{ending}", [rollout("more")])
    assert (tmp_path / f"a{ending}").read_bytes() == (tmp_path / f"b{ending}").read_bytes()


@pytest.mark.parametrize("ending", FORMATS)
def test_a_file_appears_whole_or_not_at_all(tmp_path, ending):
    path = tmp_path / f"r{ending}"
    save_rollouts(path, [rollout()])
    before = path.read_bytes()
    for write in (save_rollouts, append_rollouts):
        with pytest.raises(TypeError):
            write(path, [rollout("new"), rollout()._replace(metadata={"no JSON": object()})])
    assert path.read_bytes() == before and [f.name for f in tmp_path.iterdir()] == [path.name]


def test_what_cannot_be_written_is_refused_with_the_remedy(tmp_path):
    for call in (lambda p: save_rollouts(p, []), lambda p: append_rollouts(p, []), load_rollouts):
        with pytest.raises(ConfigError, match=r"r\.parquet: .* must end in \.jsonl or \.jsonl\.gz"):
            call(tmp_path / "r.parquet")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------- damage


def found(path: Path) -> tuple[list[Rollout], list[str]]:
    """What is loaded, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rollouts = load_rollouts(path)
    return rollouts, [str(w.message) for w in caught]


@pytest.mark.parametrize(
    "damage",
    ["not JSON", "{}", "[]", "3", '{"task": 1, "steps": []}', "\xff", "[" * 100_000, "cut"],
)
@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_a_damaged_line_is_named_and_the_rest_is_kept(tmp_path, ending, damage):
    path, pack = tmp_path / f"r{ending}", gzip.compress if ending == ".jsonl.gz" else bytes
    kept = [rollout("a"), rollout("c")]
    first, last = (json.dumps(make_row(r)) for r in kept)
    path.write_bytes(
        pack(
            "\n".join([first, last[:-9] if damage == "cut" else damage, "", last]).encode("latin-1")
        )
    )
    rollouts, (warning,) = found(path)
    assert rollouts == kept and warning.startswith(f"{path}:2: not a rollout")


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_whatever_is_cut_off_costs_no_whole_line(tmp_path, ending):
    """A process that is killed while it appends leaves a file that ends anywhere. What is appended
    later is whole again."""
    path, rollouts, borders = tmp_path / f"r{ending}", [rollout(str(i), 0.5) for i in range(3)], []
    for one in rollouts:
        append_rollouts(path, [one])
        borders.append(path.stat().st_size)
    whole = path.read_bytes()
    for cut in sorted(
        {
            *range(1, len(whole), 83),
            *borders,
            *(b + d for b in borders[:-1] for d in (-9, -8, -1, 1, 9, 10, 11)),
        }
    ):
        path.write_bytes(whole[:cut])
        complete = sum(border <= cut for border in borders)
        append_rollouts(path, [rollout("later")])
        kept, warned = found(path)
        assert kept[-1] == rollout("later") and kept[:-1] in (
            rollouts[:complete],
            rollouts[: complete + 1],
        )
        damaged = cut not in borders and not (
            ending == ".jsonl" and cut + 1 in borders
        )  # the line's end is added again
        assert (
            bool(warned) == damaged
        )  # what stands behind a cut may be unpacked to several lines that are none


def test_a_damaged_member_leaves_the_others_whole(tmp_path):
    """One bit at any place of the second of three appends: the other two are kept, and what was
    damaged is said."""
    path, rollouts, borders = tmp_path / "r.jsonl.gz", [rollout(str(i), 0.5) for i in range(3)], []
    for one in rollouts:
        append_rollouts(path, [one])
        borders.append(path.stat().st_size)
    whole = path.read_bytes()
    for place in (*range(borders[0], borders[0] + 12), *range(borders[0] + 12, borders[1], 23)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        kept, warned = found(path)
        assert kept[0] == rollouts[0] and kept[-1] == rollouts[2]
        assert (kept == rollouts and place < borders[0] + 10) or any(
            "the compressed data is damaged" in warning for warning in warned
        )


@pytest.mark.slow
def test_what_stands_before_a_damaged_byte_is_kept(tmp_path):
    path, rollouts = tmp_path / "r.jsonl.gz", [rollout(str(i), 0.5) for i in range(20)]
    save_rollouts(path, rollouts)
    whole = path.read_bytes()
    for place in range(
        3 * len(whole) // 4, len(whole), 41
    ):  # behind the first line, which the others repeat
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        before = zlib.decompressobj(wbits=31).decompress(whole[: place - 1]).count(b"\n")
        kept, warned = found(path)
        assert (
            before
            and kept[:before] == rollouts[:before]
            and any("damaged" in warning for warning in warned)
        )


@pytest.mark.parametrize("ending, data", [(".jsonl.gz", b'{"task": 1}\n'), (".jsonl", b"\x1f\x8b")])
def test_a_file_without_any_rollout_is_refused(tmp_path, ending, data):
    """Another format under the name, or the first line cut off: one sentence, no traceback of zlib,
    and no empty list."""
    path = tmp_path / f"r{ending}"
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"{path}.*no rollout of the file"):
        load_rollouts(path)


def test_the_rollout_on_which_a_reward_fails_is_kept(tmp_path):
    with pytest.raises(RewardError) as caught, keep_failed_rollout(tmp_path):
        raise RewardError("broken", rollout("a"))
    assert (
        load_rollouts(tmp_path / FAILED) == [rollout("a")]
        and str(tmp_path / FAILED) in caught.value.__notes__[0]
    )
    with pytest.raises(RewardError), keep_failed_rollout(tmp_path / "none"):
        raise RewardError("no rollout is to blame")
    assert not (tmp_path / "none").exists()


# ----------------------------------------------------------------------------------- other programs


def test_the_columns_are_those_of_the_contracts():
    """A field that is added to a contract and not to the schema would be missing in `datasets`."""
    schema, row = rollout_schema(), make_row(rollout())
    steps = schema.field("steps").type.value_type
    assert tuple(schema.names) == (*COLUMNS, *Rollout._fields) == tuple(row)
    found = [
        schema.field("task").type,
        steps,
        steps.field("tool_calls").type.value_type,
        steps.field("tool_results").type.value_type,
    ]
    assert [tuple(f.name for f in kind) for kind in found] == [
        c._fields for c in (Task, Step, ToolCall, ToolResult)
    ]


def test_lines_are_json_objects_of_plain_types(tmp_path):
    """Other programs read the file too: one object a line, valid UTF-8, what one filters on in
    columns of its own."""
    save_rollouts(tmp_path / "r.jsonl.gz", [rollout()])
    (line,) = gzip.decompress((tmp_path / "r.jsonl.gz").read_bytes()).decode().split("\n")[:-1]
    data = json.loads(line)
    assert [data[name] for name in COLUMNS] == [None, "row/0", 2, 3, 0.1 + 0.2 - 0.0]
    assert "naïve 数字 🙂" in line and json.loads(data["rewards"]) == {
        "numeric": 1e22,
        "format": None,
    }


@pytest.mark.slow
@pytest.mark.parametrize("ending", FORMATS)
def test_files_open_in_datasets(tmp_path, ending):
    """Arguments, metadata and rewards whose keys and types differ between lines; a row is a rollout
    again."""
    import datasets

    def load(files, **more):
        return datasets.load_dataset(
            "json",
            data_files=[str(f) for f in files],
            split="train",
            cache_dir=str(tmp_path / "cache"),
            **more,
        )

    def called(arguments, **more) -> Rollout:
        call = rollout("a").steps[0]._replace(tool_calls=(ToolCall("call_0", "f", arguments),))
        return rollout("a")._replace(steps=(call,), **more)

    varied = [
        called({"x": 1}, rewards={"numeric": 1.0}),
        called({"x": "1"}, metadata={"x": [1]}),
        called({"y": [{}]}, metadata={"x": "1"}),
    ]
    plain = Rollout(
        Task("empty", ({"role": "user", "content": "?"},)), (Step((), (), (), (), "stop"),)
    )
    file, bare, odd = (tmp_path / f"{name}{ending}" for name in ("varied", "bare", "odd"))
    save_rollouts(file, [*varied, plain])
    rows = load([file])
    assert [read_row(row) for row in rows] == [*varied, plain]
    assert [
        row["task_id"]
        for row in rows.filter(lambda row: row["num_steps"] == 1 and row["reward"] is not None)
    ] == ["row/0"] * 3
    save_rollouts(odd, [rollout()])
    assert "naïve 数字 🙂" in load([odd])[0]["task"]["answer"]
    save_rollouts(bare, [plain])  # nothing in the first file tells what a tool call or a reward is
    features = datasets.Features.from_arrow_schema(rollout_schema())
    assert [read_row(row) for row in load([bare, file], features=features)] == [
        plain,
        *varied,
        plain,
    ]
    load([bare, file], features=features).to_parquet(tmp_path / "all.parquet")
    again = datasets.load_dataset(
        "parquet",
        data_files=str(tmp_path / "all.parquet"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert again.features == features and [read_row(row) for row in again] == [
        plain,
        *varied,
        plain,
    ]


# -------------------------------------------------------------------------------------- transcripts


def test_transcript_reads_as_the_conversation():
    text = write_transcript(rollout("seven", 0.5))
    assert text.splitlines()[0] == "### row/0 · sample 1 · reward 0.5 · truncated by length"
    wanted = [
        "**user**",
        "    seven",
        "**thinking**",
        "    seven",
        "**assistant**",
        "    seven",
        "**call**",
        "    calculator(expression='1 + 1'",
        "    (unreadable)",
        "**tool**",
        "    2",
        "**expected**",
        "    seven",
    ]
    place = 0
    for part in wanted:
        place = text.index(part, place) + len(part)


def test_what_the_model_wrote_is_never_markup():
    """Each of its lines is indented by four, so Markdown shows it as it is."""
    text = write_transcript(rollout("# heading\n\n**bold**\n```")._replace(task=TASK))
    assert "    # heading" in text and "\n# heading" not in text and "\n```" not in text


def unprintable(text: str) -> list[str]:
    return [c for c in text if not c.isprintable() and c != "\n"]


def test_control_characters_are_shown_not_obeyed():
    """A terminal escape in a reply must not reach the terminal of whoever reads samples/ with
    less."""
    text = write_transcript(rollout()._replace(task=TASK))
    assert "\\x1b[31m" in text and "\\x00" in text and "\\u202e" in text and "\\ud800" in text
    assert unprintable(text) == []


def test_control_characters_of_the_row_are_shown_too():
    """The row's id and expected answer come from a data file: from outside, like the reply."""
    text = write_transcript(
        Rollout(Task("row\x1b[2J", (), answer="7\x1b[31m \ud800\n# heading"), ())
    )
    assert unprintable(text) == []
    assert "\n# heading" not in text


def test_the_shown_reward_is_the_one_of_training():
    """A reward of the environment stands in the steps. `reward` alone is 0 there."""
    worse, best = (rollout(text, 0.0) for text in ("worse", "best"))
    best = best._replace(steps=(*best.steps[:-1], best.steps[-1]._replace(reward=1.0)))
    middle = rollout("middle", 0.5)
    played = [worse, middle, best, middle]
    assert [r.total_reward for r in played] == [0.0, 0.5, 1.0, 0.5]
    assert "reward 1.0 ·" in write_transcript(best).splitlines()[0]
    assert select_best_and_worst(played, 2) == [best, worse]
    assert select_best_and_worst([best], 6) == [best]
    assert "0.000, 1.000" in tabulate_episodes(played)
