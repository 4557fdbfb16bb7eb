"""Malformed replies: whatever a policy writes is read, run and scored; nothing raises, and every
reply and call has a class."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from functools import partial

import pytest

from parametrise import available
from rlkit.commands.agent import parts
from rlkit.config.compose import compose, experiment
from rlkit.engines import Batched
from rlkit.environments import (
    calculator,
    execute,
    get_weather,
    hermes,
    none,
    python_tool,
    split_thinking,
    tool_use,
    xml,
)
from rlkit.episodes import collect
from rlkit.episodes.record import show_controls, write_transcript
from rlkit.rewards import (
    Reward,
    Term,
    contains,
    exact_match,
    extract_answer,
    extract_code,
    format_match,
    length,
    numeric,
    repetition,
    score,
    soft_length,
    tool_usage,
)
from rlkit.sandbox import Sandbox
from rlkit.system.loops import run
from rlkit.types import Generation, Rollout, Step, Task

TOOLS = {"calculator": calculator, "get_weather": get_weather}
PARSERS = {"hermes": hermes, "xml": partial(xml, tools=TOOLS), "none": none}
TASK = Task("t", ({"role": "user", "content": "3 + 4?"},), answer="7")
REWARD = Reward(
    "all",
    {
        name: Term(1.0, fn)
        for name, fn in {
            "numeric": numeric,
            "exact_match": exact_match,
            "parsed_match": partial(exact_match, parse=extract_answer),
            "contains": contains,
            "format": partial(format_match, pattern=r"####\s*-?\d+"),
            "length": length,
            "soft_length": soft_length,
            "tool_usage": tool_usage,
            "repetition": repetition,
        }.items()
    },
)

# ---------------------------------------------------------------------------------- what is written

HERMES = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3 + 4"}}\n</tool_call>'
XML = '<tool name="calculator">3 + 4</tool>'
GOOD = (
    HERMES,
    XML,
    HERMES.replace('"3 + 4"', '"9**9**9"'),
    XML.replace("3 + 4", "1/0"),
    HERMES.replace("calculator", "get_weather")
    .replace("expression", "city")
    .replace("3 + 4", "Paris"),
    XML.replace("calculator", "get_weather"),
    HERMES.replace('{"expression": "3 + 4"}', '"{\\"expression\\": \\"3\\"}"'),
    f"<think>\nlet me see {HERMES}\n</think>\n\n#### 7",
    f"<think>add</think>{HERMES}{XML}",
    f"<think>add {XML}",
    "The answer is 7.",
    "#### 1,234",
    "```python\nprint(7)\n```",
    "7",
    "",
)
PIECES = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool ",
    '<tool name="',
    "'>",
    "</tool>",
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ":",
    ",",
    '"name"',
    '"arguments"',
    '"calculator"',
    '{"expression": 3}',
    '{"expr": "1"}',
    "NaN",
    "-Infinity",
    "1e999",
    "null",
    "true",
    "-0",
    "9" * 50,
    "\x00",
    "\x1b[2J",
    "\x7f",
    "\r",
    "\u202e",
    "\u2028",
    "\ufeff",
    "e\u0301",
    "\U0001f600",
    "\ud800",
    "\\ud800",
    "\\u0000",
    "５",
    "<|im_end|>",
    "<|im_start|>",
    "####",
    "\\boxed{",
    "the answer is",
    "```",
    "$",
    "%",
    "/",
    "7",
    "1,",
    "111,",
    "\n",
    " ",
    "\t",
)


def malformed(rng: random.Random) -> str:
    """A reply as a bad policy writes it: good replies cut, spliced, nested, doubled and sprinkled
    with what does not belong there."""
    text = "".join(rng.choices((*GOOD, *PIECES), k=rng.randrange(1, 8)))
    for _ in range(rng.randrange(4)):
        start, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        piece = rng.choice(PIECES)
        text = rng.choice(
            (
                text[:end],  # cut off
                text[:start] + text[end:],  # a hole
                text[:start] + piece + text[start:],
                text[:start] + text + text[start:],  # nested in itself
                f"<think>{text}{rng.choice(('', '</think>'))}",
                f"<tool_call>{text}</tool_call>",
                f'<tool name="{piece}">{text}</tool>',
                text.replace(
                    '"calculator"', rng.choice(("3", "null", "[]", '""', '" "', '"nope"'))
                ),
                text.replace('"', rng.choice(("'", "“", '\\"'))),
                text[: start or 1] * rng.randrange(1, 30),
            )
        )[:5000]
    return text


# ------------------------------------------------------------------------------- what becomes of it


def played(text: str, parser: str) -> tuple[Rollout, Counter]:
    """A reply as an unscored rollout, and the classes of it and of its calls."""
    thinking, content, closed = split_thinking(text)
    assert "<think>" not in content and "</think>" not in content
    content, calls = PARSERS[parser](content)
    results = tuple(run(execute(call, TOOLS, timeout=None)) for call in calls[:8])
    classes: Counter = Counter()
    classes[
        "calls" if calls else "unclosed" if not closed else "answer" if content.strip() else "empty"
    ] += 1
    for call, result in zip(calls, results, strict=False):
        json.dumps(call.arguments, allow_nan=False).encode("utf-8")  # the history can be rendered
        result.content.encode("utf-8")
        assert (
            isinstance(call.name, str)
            and (result.ok or result.content)
            and not (call.error and (result.ok or call.arguments))
        )
        classes["unreadable" if call.error else "ok" if result.ok else "failed"] += 1
    step = Step(
        (),
        (),
        (1,) * min(len(text), 999),
        (),
        "stop",
        thinking,
        content,
        closed,
        tuple(calls),
        results,
    )
    return Rollout(TASK, (step,)), classes


def read_and_scored(texts, parsers=tuple(PARSERS)) -> dict[str, Counter]:
    """Classes of the replies under each parser, and statuses of each reward, counted."""
    counts: dict[str, Counter] = {}
    for parser in parsers:
        rollouts = []
        for text in texts:
            rollout, classes = played(text, parser)
            rollouts.append(rollout)
            counts.setdefault(parser, Counter()).update(classes)
            extract_code(rollout.final_content)
        for rollout in score(rollouts, REWARD):
            assert rollout.reward is not None
            for name, status in rollout.statuses.items():
                counts.setdefault(name, Counter())[status] += 1
            shown = write_transcript(rollout) + "".join(
                show_controls(text) for _, text in parts(rollout)
            )
            assert not set("\x00\x1b\x7f\r\u202e\ud800") & set(shown)
    return counts


COUNTS = [300, pytest.param(1500, marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("count", [500, 2000])
def test_no_reply_raises_and_each_is_classified(count):
    rng = random.Random(0)
    counts = read_and_scored([malformed(rng) for _ in range(count)])
    for parser in ("hermes", "xml"):
        replies = {name: counts[parser][name] for name in ("calls", "unclosed", "answer", "empty")}
        calls = {name: counts[parser][name] for name in ("unreadable", "ok", "failed")}
        assert (
            sum(replies.values()) == count
            and min(*replies.values(), *calls.values()) >= count // 100
        ), counts[parser]
    for name in ("numeric", "parsed_match", "exact_match", "contains"):
        assert (
            set(counts[name]) == {"ok", "wrong", "unparseable"}
            and sum(counts[name].values()) == 3 * count
        )
    for name in REWARD.terms:
        assert set(counts[name]) <= {"ok", "wrong", "unparseable"}, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pieces", "size"),
    [
        (["111,"], 200_000),
        (["<tool_call>"], 10**6),
        (PIECES, 200_000),
    ],
)
def test_a_megabyte_is_read_and_scored(pieces, size):
    """A regular expression that reads the rest of a text from every place in it would take an hour:
    111,111,…,1111 did. At a fifth of a megabyte it takes minutes for each piece."""
    for piece in pieces:
        whole = piece * (size // len(piece))
        read_and_scored([f"{whole}1111"], ["none"])
        read_and_scored([f"<tool_call>{whole}</tool_call>"], ["hermes"])
        read_and_scored([f'<tool name="calculator">{whole}'], ["xml"])


@pytest.mark.parametrize("count", COUNTS)
def test_replies_of_a_real_tokenizer_go_through_the_loop(tiny, count):
    """Ids of any kind, control tokens too: each reply ends the episode or gives a next context that
    its ids stand in."""
    rng = random.Random(1)
    environment = tool_use(tools=TOOLS, parse_calls=xml, max_turns=2, timeout=None)
    vocabulary, ended = len(tiny.renderer.tokenizer), Counter()

    def reply(number):
        text = malformed(rng)[:400].encode("utf-8", "replace").decode()
        words = (
            tiny.renderer.tokenizer.encode(text, add_special_tokens=False)
            if number % 2
            else rng.choices(range(vocabulary), k=rng.randrange(40))
        )
        ids = (*words[:200], *tiny.eos_token_ids[:1])
        return Generation(ids, (-1.0,) * len(ids), rng.choice(("stop", "stop", "length")))

    engine = Batched(lambda policy, prompts, seeds, params: [reply(i) for i in range(len(prompts))])
    for rollout in collect(tiny, [TASK] * (count // 10), engine=engine, environment=environment):
        first, *more = rollout.steps
        for step in more:
            assert step.kept >= len(first.prompt_ids + first.response_ids)
        ended["next" if more else rollout.truncation or rollout.status] += 1
    assert set(ended) == {"next", "length", "terminated"}, ended


# ----------------------------------------------------------------------------- what runs in a child


def code(rng: random.Random) -> str:
    return rng.choice(("", "print(7)\n", "x = (", "'")) + malformed(rng)[:2000]


@pytest.mark.parametrize("count", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_malformed_code_is_a_result_or_a_sentence(count):
    rng, tools = random.Random(2), {"python": python_tool(sandbox=Sandbox(time_limit=1.0))}
    kinds = Counter()
    for text in itertools.chain(
        ["print(7)", "1 / 0", "x" * 10**6], (code(rng) for _ in range(count - 3))
    ):
        (call,) = xml(f'<tool name="python">{text.replace("</tool>", "")}</tool>', tools=tools)[1]
        result = run(execute(call, tools))
        result.content.encode("utf-8")
        kinds["ok" if result.ok else "failed"] += 1
    assert min(kinds["ok"], kinds["failed"]) > 0 and sum(kinds.values()) == count


@pytest.mark.slow
@pytest.mark.skipif(not available("reward=math_verify"), reason="needs the extra adapters")
def test_malformed_answers_are_judged_by_math_verify():
    pytest.importorskip("math_verify")
    reward = experiment(compose(["reward=math_verify"])).reward
    rng = random.Random(3)
    rollouts = [played(malformed(rng), "none")[0] for _ in range(100)]
    statuses = {r.statuses["math_verify"] for r in score(rollouts, reward)}
    assert {"ok", "wrong", "unparseable"} <= statuses <= {"ok", "wrong", "unparseable", "timeout"}
