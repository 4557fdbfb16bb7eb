"""Every setting of a request holds, has a stated lack of effect, or is refused."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from extras.programs.test_gateway import ASKED, CALL, answered, played, post, row_steps, status_of
from parametrise import each
from rlkit.extras.programs.server import Door, list_addresses
from rlkit.extras.programs.settings import CHAT, MESSAGES, RESPONSES, SETTINGS, write_table
from rlkit.extras.programs.stopping import end_at
from rlkit.extras.programs.wire import read_request
from rlkit.models.chat import encode_scaffold
from rlkit.types import Generation

PAGE = Path(__file__).resolve().parents[3] / "docs" / "programs.md"
BASE = {
    CHAT: {"messages": list(ASKED)},
    RESPONSES: {"input": "How many?"},
    MESSAGES: {"messages": list(ASKED), "max_tokens": 64},
}
CASES = [(path, row) for row in SETTINGS for path in row.paths]


def read(path, body, **how):
    return read_request(path, json.dumps(body).encode(), **how)._replace(size=0)


@each("path, row", CASES)
def test_a_setting_is_treated_as_the_table_says(path, row):
    first, *rest = row.name.split(".")
    value = row.example
    for part in reversed(rest):
        value = {part: value}
    body = {**BASE[path], first: value}
    plain = read(path, BASE[path])
    if row.treatment in ("unsupported", "refused"):
        with pytest.raises(ValueError, match=" is not supported: ") as refused:
            read(path, body)
        assert str(refused.value).startswith(row.shown or f"{row.name}=")
        says = "environment.unsupported=ignore" in str(refused.value)
        assert says == (row.treatment == "unsupported")
    if row.treatment == "refused":
        with pytest.raises(ValueError, match="not supported"):
            read(path, body, ignore=True)
    else:
        same = read(path, body, ignore=True) == plain
        assert same == (row.treatment != "honoured")


@each("path, refused", [(CHAT, True), (RESPONSES, True), (MESSAGES, False)])
def test_only_messages_have_ordinary_tools_of_the_type_custom(path, refused):
    body = {**BASE[path], "tools": [{"type": "custom", "name": "f", "input_schema": {}}]}
    if refused:
        with pytest.raises(ValueError, match="a tool of another type than function"):
            read(path, body, ignore=True)
    else:
        assert read(path, body).tools


@each("path", BASE)
def test_what_clients_send_by_default_is_not_refused(path):
    body = {
        "n": 1,
        "tool_choice": {"type": "auto"} if path == MESSAGES else "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "text": {"format": {"type": "text"}},
        "logprobs": False,
        "truncation": "disabled",
        "user": "a",
        "metadata": {},
    }
    assert read(path, {**BASE[path], **body}) == read(path, BASE[path])


def test_the_table_of_the_page_is_the_codes():
    assert write_table() in PAGE.read_text(), "run python docs/generate.py"


def test_a_forced_tool_is_refused_or_left_to_the_program(tiny):
    forced = {"tool_choice": "required"}

    def refused(task, client):
        status, sentence = status_of(client, {"messages": list(task.messages), **forced})
        assert status == 400 and "environment.unsupported=ignore" in sentence
        client.chat(task.messages)

    def ignored(task, client):
        client.chat(task.messages, **forced)

    assert played(tiny, refused, "a").metadata["refused"] == 1
    rollout = played(tiny, ignored, "a", unsupported="ignore")
    assert rollout.truncation == "" and "refused" not in rollout.metadata


# ------------------------------------------------------------------------------------------- routes


def get(client, path):
    asked = urllib.request.Request(
        client.base_url + path, headers={"Authorization": f"Bearer {client.api_key}"}
    )
    with urllib.request.urlopen(asked) as reply:
        return json.load(reply)


def test_the_model_is_found_by_its_name(tiny):
    found = []

    def play(task, client):
        found.append(get(client, "/models/policy"))
        found.extend(get(client, "/models")["data"])
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(client, "/models/other")
        refused.value.close()
        client.chat(task.messages)

    played(tiny, play)
    assert [model["id"] for model in found] == ["policy", "policy"]


def test_tokens_are_counted_as_the_request_would_count_them(tiny):
    found = []

    def play(task, client):
        first = {"messages": list(task.messages), "max_tokens": 8}
        said = json.loads(post(client, first, path="/messages"))
        more = [*task.messages, {"role": "assistant", "content": said["content"]}, *ASKED]
        for body in (first, {**first, "messages": more}):
            counted = json.loads(post(client, body, path="/messages/count_tokens"))
            asked = json.loads(post(client, body, path="/messages"))
            found.append((counted["input_tokens"], asked["usage"]["input_tokens"]))

    rollout = played(tiny, play, "a", "a", "b", max_turns=3)
    assert len(rollout.steps) == 3 and all(a == b for a, b in found) and found[0] < found[1]


def test_aiders_variable_is_the_endpoint():
    variables = list_addresses(Door(lambda: None), "http://127.0.0.1:1")
    assert variables["OPENAI_API_BASE"] == variables["OPENAI_BASE_URL"] == "http://127.0.0.1:1/v1"


# --------------------------------------------------------------------------------------- stop texts


@each(
    "text, stops, left",
    [
        ("a b c", ["c"], "a b c"),
        ("one two three two", ["two", "zero"], "one two"),
        ("<think>two</think>one two", ["two"], "<think>two</think>one two"),
        ("a b", ["x"], None),
        ("<think>a</think>one\n\ntwo", ["\n\n"], "<think>a</think>one\n\n"),
        ("<think>a</think>\n\none", ["\n\n"], None),
        ("one\n", ["\n\n"], None),
    ],
)
def test_a_reply_ends_with_the_token_that_completes_a_stop_text(tiny, text, stops, left):
    ids = tuple(encode_scaffold(tiny.renderer, text + "<|im_end|>"))
    reply = Generation(ids, tuple(map(float, range(len(ids)))), "length", (1,), ((0, 1), (99, 2)))
    given = end_at(tiny, (1,), reply, stops)
    if left is None:
        assert given is reply
        return
    said = tiny.renderer.tokenizer.decode(given.token_ids)
    shorter = tiny.renderer.tokenizer.decode(given.token_ids[:-1])
    assert said.startswith(left) and not shorter.startswith(left)
    assert given.finish_reason == "stop" and given.versions == ((0, 1),)
    assert given.logprobs == reply.logprobs[: len(given.token_ids)]
    assert given.token_ids == ids[: len(given.token_ids)]


@each("path", ["/chat/completions", "/messages"])
def test_what_is_behind_a_stop_text_is_neither_trained_nor_read_nor_continued(tiny, path):
    found = []

    def play(task, client):
        key = "stop" if path == "/chat/completions" else "stop_sequences"
        body = {"messages": list(task.messages), key: ["\n"], "max_tokens": 64}
        said = json.loads(post(client, body, path=path))
        found.append(said)
        text = said["choices"][0]["message"] if "choices" in said else said
        messages = [*task.messages, {"role": "assistant", "content": text["content"]}, *ASKED]
        post(client, {**body, "messages": messages}, path=path)

    rollout = played(tiny, play, "one\ntwo three", "four")
    first = rollout.steps[0]
    assert first.content == "one"
    assert tiny.renderer.tokenizer.decode(first.response_ids) == "one\n"
    assert row_steps(rollout) == [[0, 1]]
    context = tiny.renderer.tokenizer.decode(rollout.context(1))
    assert "two three" not in context and context.count("one\n") == 1
    (said,) = found
    if path == "/messages":
        assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", "\n")
    else:
        assert said["choices"][0]["finish_reason"] == "stop"


def test_a_stop_text_inside_a_token_begins_a_new_row(tiny):
    """The rest of the token was never seen by the program, so nothing is sampled behind it."""
    word = "How many"
    assert len(encode_scaffold(tiny.renderer, word)) == 1

    def play(task, client):
        body = {"messages": list(task.messages), "stop": word[:1]}
        text = json.loads(post(client, body))["choices"][0]["message"]["content"]
        assert text == ""
        client.chat([*task.messages, {"role": "assistant", "content": text}, *ASKED])

    rollout = played(tiny, play, word, "b")
    assert row_steps(rollout) == [[0], [1]] and rollout.steps[0].content == ""


# ----------------------------------------------------------------------------------------- call ids


def test_equal_replies_with_a_call_get_their_own_results(tiny):
    def play(task, client):
        first, _ = (client.chat(task.messages) for _ in range(2))
        client.chat([*task.messages, first, answered(first)])

    rollout = played(tiny, play, CALL, CALL)
    found = {c.id: len(s.tool_results) for s in rollout.steps for c in s.tool_calls}
    assert found == {"call_0": 1, "call_1": 0}


def test_a_whole_number_of_javascript_is_the_same_argument(tiny):
    def play(task, client):
        reply = client.chat(task.messages)
        function = reply["tool_calls"][0]["function"]
        function["arguments"] = function["arguments"].replace("1.0", "1")
        client.chat([*task.messages, reply, answered(reply)])

    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1.0}}\n</tool_call>'
    assert row_steps(played(tiny, play, call)) == [[0, 1]]


def test_call_ids_are_unique_in_an_episode(tiny):
    """Those of sub-agents began at call_0 again, and a program that keeps results by id mixed
    them."""
    ids = []

    def play(task, client):
        for system in ("one", "two"):
            messages = [{"role": "system", "content": system}, *task.messages]
            for _ in range(2):
                reply = client.chat(messages)
                ids.extend(call["id"] for call in reply["tool_calls"])
                messages += [reply, answered(reply)]

    rollout = played(tiny, play, CALL, f"{CALL}\n{CALL}", CALL, CALL)
    assert ids == [f"call_{i}" for i in range(5)]
    assert [call.id for step in rollout.steps for call in step.tool_calls] == ids
    assert row_steps(rollout) == [[0, 1], [2, 3]]
