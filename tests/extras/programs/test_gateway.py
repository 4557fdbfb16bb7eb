"""Programs that play episodes: what is trained is what was sampled, whatever the program does with
the conversation."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from copies import heed
from parametrise import each
from rlkit.commands.cli import main
from rlkit.config.compose import compose
from rlkit.config.schema import build
from rlkit.engines import Batched
from rlkit.environments import calculator, execute, hermes, tool_schema, tool_use
from rlkit.episodes import collect
from rlkit.episodes._assemble import split_into_rows
from rlkit.errors import ConfigError, DataError, EnvironmentFailed
from rlkit.extras.programs import Client, Ended, asking, program, reply_message
from rlkit.extras.programs._processes import LANDLOCK, find_landlock_version
from rlkit.extras.programs.server import MAX_BODY, SERVERS, Endpoint, open_door
from rlkit.extras.programs.serving import serve_endpoint
from rlkit.extras.programs.wire import WIRES, ChatRequest, Reply
from rlkit.models.chat import encode_scaffold, make_renderer
from rlkit.tasks import arithmetic
from rlkit.training.selfcheck import check_policy
from rlkit.types import Environment, Generation, Step, Task, ToolCall

END = "<|im_end|>"
EXPERIMENTS = Path(__file__).resolve().parents[3] / "experiments" / "programs"
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3 + 4"}}\n</tool_call>'
ASKED = ({"role": "user", "content": "How many?"},)


def said_by(*texts: str):
    """An engine that says the texts, one for each reply in the order of arrival, and then
    `more`."""
    left = list(texts)

    def complete(policy, prompts, seeds, params):
        out = []
        for seed in seeds:
            ids = tuple(encode_scaffold(policy.renderer, (left.pop(0) if left else "more") + END))
            out.append(
                Generation(ids, tuple(-((seed + i) % 7 + 1) / 8 for i in range(len(ids))), "stop")
            )
        return out

    return Batched(complete)


def played(tiny, function, *texts: str, **settings):
    (rollout,) = collect(
        tiny,
        [Task("t", ASKED)],
        engine=said_by(*texts),
        environment=program(function=function, **settings),
    )
    return rollout


def row_steps(rollout) -> list[list[int]]:
    """The steps whose sampled tokens each training row holds."""
    return [
        sorted({s for s, on in zip(row.steps, row.sampled, strict=True) if on})
        for row in split_into_rows(rollout)
    ]


def post(client, body, *, path="/chat/completions", headers=None, key=None):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Authorization": f"Bearer {client.api_key if key is None else key}", **(headers or {})}
    with urllib.request.urlopen(
        urllib.request.Request(client.base_url + path, data, sent)
    ) as reply:
        return reply.read()


def status_of(client, body, **more) -> tuple[int, str]:
    """Status and sentence of a request that is refused."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(client, body, **more)
    with refused.value as error:
        return error.code, json.loads(error.read())["error"]["message"]


# ---------------------------------------------------------------------------------------- exactness


def tool_user(task, client):
    """What tool_use does, written against the endpoint."""
    messages, tools = list(task.messages), [tool_schema(calculator)]
    for _ in range(4):
        reply = client.chat(messages, tools)
        messages.append(reply)
        if not reply.get("tool_calls"):
            return
        for call in reply["tool_calls"]:
            name, text = call["function"]["name"], call["function"]["arguments"]
            try:
                made = ToolCall(call["id"], name, json.loads(text))
            except ValueError:
                made = ToolCall(call["id"], name, {}, error=text)
            result = asyncio.run(execute(made, {"calculator": calculator}))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result.content})


@pytest.mark.slow
def test_a_program_that_does_what_tool_use_does_gives_its_tokens(tiny):
    tasks = arithmetic(split="test", seed=0, max_samples=4)
    inside, outside = (
        collect(tiny, tasks, environment=environment, group_size=2, seed=3, max_new_tokens=64)
        for environment in (
            tool_use(tools={"calculator": calculator}),
            program(function=tool_user, max_turns=4),
        )
    )
    assert any(len(r.steps) > 1 for r in inside)
    for a, b in zip(inside, outside, strict=True):
        assert [
            (s.prompt_ids, s.response_ids, s.kept, s.content, s.tool_calls) for s in a.steps
        ] == [(s.prompt_ids, s.response_ids, s.kept, s.content, s.tool_calls) for s in b.steps]
        assert [p for s in a.steps for p in s.logprobs] == pytest.approx(
            [p for s in b.steps for p in s.logprobs], abs=1e-5
        )
        assert (a.status, a.truncation, a.group, a.sample) == (
            b.status,
            b.truncation,
            b.group,
            b.sample,
        )


def test_a_program_reads_the_tools_of_a_template_without_tools_as_tool_use_does(tiny, toolless):
    """They were silently left out of its prompts."""
    policy = tiny._replace(renderer=make_renderer(toolless))
    outside = played(policy, tool_user, CALL, "#### 7", max_turns=4)
    (inside,) = collect(
        policy,
        [Task("t", ASKED)],
        engine=said_by(CALL, "#### 7"),
        environment=tool_use(tools={"calculator": calculator}),
    )
    assert [(s.prompt_ids, s.response_ids, s.kept) for s in outside.steps] == [
        (s.prompt_ids, s.response_ids, s.kept) for s in inside.steps
    ]
    assert len(outside.steps) == 2
    refused = []

    def asks(task, client):
        try:
            client.chat(task.messages, [tool_schema(calculator)])
        except urllib.error.HTTPError as error:
            refused.append((error.code, error.read().decode()))
        client.chat(task.messages)

    played(tiny._replace(renderer=make_renderer(toolless, tools="template")), asks, "fine", "fine")
    ((code, sentence),) = refused
    assert code == 400 and "use model.tools=prompt" in sentence


def test_no_more_programs_are_alive_than_allowed_and_one_that_fails_gives_its_place_back(tiny):
    alive, most = set(), []

    def plays(task, client):
        alive.add(client.api_key)
        most.append(len(alive))
        client.chat(ASKED)
        alive.remove(client.api_key)
        if len(most) % 2:
            raise ValueError("half of them fail")

    rollouts = collect(
        tiny,
        [Task("t", ASKED)] * 6,
        engine=said_by(),
        environment=program(function=plays, max_programs=2),
    )
    assert [len(r.steps) for r in rollouts] == [1] * 6 and len(most) == 6 and max(most) == 2


def answered(reply, text="7"):
    return {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": text}


def test_what_extends_the_record_continues_its_row(tiny):
    """Null contents, parts and other white space in the arguments are the same conversation."""

    def play(task, client):
        reply = client.chat(task.messages)
        reply["tool_calls"][0]["function"]["arguments"] = '{ "expression" :"3 + 4"}'
        client.chat(
            [
                {"role": "user", "content": [{"type": "text", "text": "How many?"}]},
                {**reply, "content": None},
                answered(reply),
            ]
        )

    rollout = played(tiny, play, CALL)
    first, second = rollout.steps
    assert row_steps(rollout) == [[0, 1]] and second.kept == first.prompt_length + len(
        first.response_ids
    )
    assert [(r.name, r.content) for r in first.tool_results] == [
        ("calculator", "7")
    ] and "rows" not in rollout.metadata


@each(
    "change",
    [
        lambda messages: [
            messages[0],
            {**messages[1], "content": "a "},
            *messages[2:],
        ],  # white space
        lambda messages: [{"role": "user", "content": "In short: a"}, messages[-1]],  # compaction
        lambda messages: [{"role": "system", "content": "Be brief."}, *messages],
    ],
)
def test_a_rewritten_history_begins_a_row_linked_to_the_reply_before(tiny, change):
    def play(task, client):
        messages = [*task.messages, client.chat(task.messages), {"role": "user", "content": "And?"}]
        client.chat(change(messages))

    rollout = played(tiny, play, "<think>b</think>a", "c")
    assert row_steps(rollout) == [[0], [1]]
    assert rollout.metadata["rows"] == [{"step": 1, "from": 0, "why": "new"}]
    assert rollout.final_content == "c"


def test_dropped_tool_calls_are_another_history(tiny):
    def play(task, client):
        reply = client.chat(task.messages)
        client.chat(
            [*task.messages, {"role": "assistant", "content": reply["content"]}, answered(reply)]
        )

    rollout = played(tiny, play, CALL)
    assert row_steps(rollout) == [[0], [1]] and not rollout.steps[0].tool_results


def test_thinking_that_a_client_drops_may_stay_in_the_row(tiny):
    def play(task, client):
        reply = client.chat(task.messages)
        client.chat(
            [
                *task.messages,
                {"role": "assistant", "content": reply["content"]},
                {"role": "user", "content": "And?"},
            ]
        )

    assert row_steps(played(tiny, play, "<think>b</think>a", dropped_thinking="continue")) == [
        [0, 1]
    ]


def test_forks_share_a_context_that_is_trained_once(tiny):
    """Two continuations of one reply, one of them continued: its row is whole, and the other's
    context is masked."""

    def play(task, client):
        base = [*task.messages, client.chat(task.messages)]
        client.chat([*base, {"role": "user", "content": "left"}])
        right = [*base, {"role": "user", "content": "right"}]
        client.chat([*right, client.chat(right), {"role": "user", "content": "on"}])

    rollout = played(tiny, play, "a", "b", "c", "d")
    assert row_steps(rollout) == [[0, 1], [2, 3]] and rollout.final_content == "d"
    assert rollout.metadata["rows"] == [{"step": 2, "from": 0, "why": "fork"}]
    assert rollout.context(2)[: len(rollout.context(0))] == rollout.context(0)
    assert sum(sum(row.sampled) for row in split_into_rows(rollout)) == rollout.response_length


def test_parallel_requests_are_samples_of_their_own(tiny):
    def play(task, client):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: client.chat(task.messages), range(4)))

    rollout = played(tiny, play)
    assert len(split_into_rows(rollout)) == 4 and len({s.logprobs for s in rollout.steps}) > 1


def test_a_retry_is_answered_from_the_record(tiny):
    def play(task, client):
        body = {"messages": list(task.messages)}
        first = post(client, body)
        assert post(client, body, headers={"x-stainless-retry-count": "1"}) == first
        assert post(client, body) != first  # not marked as a retry: another sample

    rollout = played(tiny, play, "a", "b")
    assert rollout.truncation == "" and len(rollout.steps) == 2 and rollout.metadata["retries"] == 1


# ---------------------------------------------------------------------------------------- protocols

REPLIES = {
    "text": Step((), (1,), (2,), (0.0,), "stop", content="a b"),
    "thinking": Step((), (1,), (2,), (0.0,), "stop", content="a", thinking="t"),
    "calls": Step(
        (),
        (1,),
        (2,),
        (0.0,),
        "tool",
        tool_calls=(ToolCall("call_0", "f", {"x": 1}), ToolCall("call_1", "g", {})),
    ),
    "both": Step(
        (),
        (1,),
        (2,),
        (0.0,),
        "tool",
        content="so",
        thinking="t",
        tool_calls=(ToolCall("call_0", "f", {"x": 1}),),
    ),
}


def sent_back(path: str, written: dict) -> dict:
    """A request with what a client that changes nothing sends back."""
    if path == "/v1/responses":
        return {
            "input": [
                {"role": "user", "content": "q"},
                *written["output"],
                {"role": "user", "content": "and"},
            ]
        }
    message = (
        written["choices"][0]["message"]
        if "choices" in written
        else {"role": "assistant", "content": written["content"]}
    )
    return {
        "messages": [{"role": "user", "content": "q"}, message, {"role": "user", "content": "and"}]
    }


@each("path", WIRES)
@each("name", REPLIES)
def test_a_reply_comes_back_as_it_was_sent(path, name):
    wire, step = WIRES[path], REPLIES[name]
    reply = Reply(0, 0, step, step.content)
    messages = wire.read(json.loads(json.dumps(sent_back(path, wire.write(reply))))).messages
    assert messages[1] == reply_message(step, step.content)
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]


@each("path", WIRES)
@each("name", REPLIES)
def test_a_stream_holds_the_whole_reply(path, name):
    step = REPLIES[name]
    text = json.dumps(
        [
            data
            for _, data in WIRES[path].events(
                Reply(0, 0, step, step.content), ChatRequest([], [], usage=True)
            )
        ]
    )
    for part in (step.content, step.thinking, *(c.name for c in step.tool_calls)):
        assert json.dumps(part)[1:-1] in text


def test_a_function_of_responses_is_the_tool_that_rlkit_writes():
    function = tool_schema(calculator)["function"]
    sent = {
        "type": "function",
        **{key: function[key] for key in ("name", "description", "parameters")},
        "output_schema": function["return"],
    }
    asked = WIRES["/v1/responses"].read({"input": "How many?", "tools": [sent]})
    assert json.dumps(asked.tools) == json.dumps(
        [tool_schema(calculator)]
    )  # in this order, as the prompt has it


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.slow
@each(
    "body, path, key, status",
    [
        (b"{", "/chat/completions", None, 400),
        (b"[]", "/chat/completions", None, 400),
        (b"\xff", "/responses", None, 400),
        (b"[" * 100_000, "/chat/completions", None, 400),
        ({"messages": []}, "/chat/completions", None, 400),
        ({"messages": [{"role": "x", "content": "a"}]}, "/chat/completions", None, 400),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "/chat/completions",
            None,
            400,
        ),
        ({"messages": list(ASKED), "n": 2}, "/chat/completions", None, 400),
        ({"messages": list(ASKED), "max_tokens": 0}, "/chat/completions", None, 400),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "/messages", None, 400),
        ({"messages": list(ASKED)}, "/nothing", None, 404),
        ({"messages": list(ASKED)}, "/chat/completions", "wrong", 401),
        (b"x" * (MAX_BODY + 1), "/chat/completions", None, 413),
        (
            {"messages": [{"role": "user", "content": "a" * 100_000}]},
            "/chat/completions",
            None,
            400,
        ),  # more than the context
    ],
)
def test_a_wrong_request_is_refused_in_a_sentence_and_disturbs_no_other(
    tiny, body, path, key, status
):
    found = {}

    def hostile(task, client):
        if task.id == "good":
            return float(client.chat(task.messages)["content"] == "more")
        try:
            found["is"] = status_of(client, body, path=path, key=key)
        except (
            urllib.error.URLError,
            ConnectionError,
        ) as error:  # a body that is refused unread may end the connection
            found["is"] = (413, str(error))
        return 0.0

    rollouts = collect(
        tiny,
        [Task("good", ASKED), Task("bad", ASKED)],
        engine=said_by(),
        environment=program(function=hostile, max_turns=2),
    )
    assert found["is"][0] == status and len(found["is"][1]) > 5
    assert (
        rollouts[0].status == "terminated"
        and rollouts[0].steps[-1].reward == 1.0
        and not rollouts[1].steps
    )


def malformed(rng: random.Random):
    """A path and a body of it with something wrong in a random place, or bytes that are no JSON."""
    path, key = rng.choice(
        [("/chat/completions", "messages"), ("/responses", "input"), ("/messages", "messages")]
    )
    wrong = [
        None,
        7,
        -1.5,
        "",
        True,
        "text",
        [],
        {},
        [[]],
        [None],
        {"type": []},
        [{"type": {}}],
        [{"role": []}],
        "\ud800",
        float("nan"),
    ]
    message = {"role": "user", "content": "a"}
    body = {key: [message], "tools": [{"type": "function", "name": "f", "function": {"name": "f"}}]}
    kind = rng.randrange(5)
    if kind == 0:
        raw = json.dumps(body).encode()
        return path, raw[: rng.randrange(len(raw))] + rng.randbytes(rng.randrange(4))
    if kind == 1:
        return path, {
            **body,
            key: rng.choice([w for w in wrong if not isinstance(w, str) or key == "messages"]),
        }
    if kind == 2:
        return path, {
            **body,
            key: [
                message
                | {
                    rng.choice(["role", "content"]): rng.choice(
                        [7, True, {}, [[]], [None], [{"type": {}}]]
                    )
                }
            ],
        }
    if kind == 3:
        return path, {
            **body,
            "tools": [{"function": rng.choice(wrong), "name": rng.choice([None, 7, [], {}])}],
        }
    setting = rng.choice(
        [
            ("n", 2),
            ("logprobs", True),
            ("previous_response_id", "a"),
            ("response_format", {"type": "json_object"}),
        ]
    )
    return path, {**body, setting[0]: setting[1]}


@pytest.mark.slow
def test_five_hundred_malformed_requests_are_refused_and_change_no_other_episode(tiny):
    found = []

    def play(task, client):
        if task.id == "good":
            said = [client.chat(task.messages)]
            client.chat([*task.messages, *said, {"role": "user", "content": "And?"}])
        elif task.id == "hostile":
            rng = random.Random(0)
            found.extend(
                (path, body, *status_of(client, body, path=path))
                for path, body in (malformed(rng) for _ in range(500))
            )

    tokens = []
    for name in ("idle", "hostile"):
        good, bad = collect(
            tiny,
            [Task("good", ASKED), Task(name, ASKED)],
            engine=said_by(),
            environment=program(function=play),
        )
        tokens.append([(s.prompt_ids, s.response_ids, s.logprobs) for s in good.steps])
    assert (
        tokens[0] == tokens[1]
        and len(tokens[0]) == 2
        and not bad.steps
        and bad.metadata.get("refused") == 500
    ), bad.metadata
    assert [f for f in found if f[2] != 400 or len(f[3]) < 5] == []


def raw_request(client, head: str, body: bytes = b"") -> bytes:
    """What comes back to a request that is written by hand and left open."""
    host, port = client.base_url.split("/")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=20) as line:
        line.sendall(
            "POST /v1/messages HTTP/1.1\r\nHost: a\r\nx-api-key:"
            f" {client.api_key}\r\n{head}\r\n\r\n".encode()
            + body
        )
        return line.recv(65536)


@pytest.mark.slow
@each(
    "head, body, status",
    [
        (f"Content-Length: {50 << 20}", b"{", b"413"),  # by its length, unread
        (
            "Transfer-Encoding: chunked",
            b"%x\r\n" % (MAX_BODY + 1) + b"a" * (MAX_BODY + 1) + b"\r\n",
            b"413",
        ),  # by counting
        ("Content-Length: 100", b"{", b"408"),  # a slow writer
        ("Content-Length: 4\r\nContent-Encoding: gzip", b"abcd", b"400"),
    ],
)
def test_bodies_that_are_too_large_too_slow_or_no_text_are_refused(
    tiny, monkeypatch, head, body, status
):
    monkeypatch.setattr("rlkit.extras.programs.server.BODY_SECONDS", 0.2)
    found = []
    played(tiny, lambda task, client: found.append(raw_request(client, head, body)))
    assert found and found[0].split()[1] == status and b'"message"' in found[0]


def test_a_connection_that_does_not_finish_its_head_is_closed(tiny, monkeypatch):
    monkeypatch.setattr("rlkit.extras.programs.server.IDLE_SECONDS", 0.2)
    found = []

    def play(task, client):
        host, port = client.base_url.split("/")[2].split(":")
        with socket.create_connection((host, int(port)), timeout=20) as line:
            line.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: a")
            found.append(line.recv(100))

    played(tiny, play)
    assert found == [b""]


def open_sockets() -> int:
    return sum(
        os.path.exists(fd) and os.readlink(fd).startswith("socket:")
        for fd in Path("/proc/self/fd").iterdir()
    )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs Linux's /proc")
@each("stream", [False, True])
@each("seconds", [0.2, 600.0])
def test_an_answer_that_is_not_read_is_cut_off_and_leaves_nothing(monkeypatch, stream, seconds):
    """After its time, or with the server. A request beside it is answered meanwhile."""
    monkeypatch.setattr("rlkit.extras.programs.server.ANSWER_SECONDS", seconds)
    handle, over, whole = (
        Endpoint.handle,
        [],
        16 << 20,
    )  # characters: more than the kernel's buffers hold

    async def told(self, request):
        response = await handle(self, request)
        if "x-long" in request.headers:
            over[0].set()
        return response

    monkeypatch.setattr(Endpoint, "handle", told)

    async def answer(messages, tools=(), limit=None, **settings):
        return Step(
            (),
            (1,),
            (2,),
            (0.0,),
            "stop",
            content="a" * (whole if messages[0]["content"] == "long" else 1),
        )

    async def asked(door, address: str, said: str):
        reader, writer = await asyncio.open_connection(*address.removeprefix("http://").split(":"))
        body = json.dumps({"messages": [{"role": "user", "content": said}], "stream": stream})
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nx-api-key: {door.token}\r\nx-{said}:"
            f" 1\r\nContent-Length: {len(body)}"
        )
        writer.write(f"{head}\r\n\r\n{body}".encode())
        return reader, writer

    async def main():
        before = open_sockets()
        over.append(asyncio.Event())
        async with open_door(answer) as (door, address):
            slow, line = await asked(door, address, "long")
            quick, beside = await asked(door, address, "short")
            assert b"200 OK" in await quick.readline()
            beside.close()
            await beside.wait_closed()
            if seconds < 1:
                await asyncio.wait_for(over[0].wait(), 20)
        assert open_sockets() == before + 1  # the client's
        assert len(await slow.read()) < whole
        line.close()

    asyncio.run(main())


def test_an_episode_at_its_limit_of_replies_is_truncated(tiny):
    def play(task, client):
        client.chat(task.messages)
        assert status_of(client, {"messages": list(task.messages)})[0] == 400

    assert played(tiny, play, max_turns=1).truncation == "steps"


@each(
    "settings",
    [
        {},
        {"command": ["a"], "function": print},
        {"command": ["a"], "max_turns": 0},
        {"command": ["a"], "time_limit": 0},
        {"function": print, "confined": True},
        {"command": ["a"], "confined": True},  # on a machine without Landlock
        {"command": ["a"], "readable": ["no/such/folder"]},
    ],
)
def test_settings_out_of_range_are_refused(settings, monkeypatch):
    monkeypatch.setattr("rlkit.extras.programs._processes.find_landlock_version", lambda: 0)
    with pytest.raises(ConfigError, match="environment"):
        program(**settings)


def test_a_request_that_the_template_refuses_uses_up_no_reply(tiny):
    schema = {"name": "f", "description": END, "parameters": {}}

    def play(task, client):
        body = {"messages": list(task.messages), "tools": [{"function": schema}]}
        assert "control token" in status_of(client, body)[1]
        client.chat(task.messages)

    assert len(played(tiny, play, max_turns=1).steps) == 1


def test_a_parser_that_raises_ends_the_run(tiny):
    """The reply was sampled, and it was missing in the record."""

    def raises(content):
        raise ValueError("my fault")

    def play(task, client):
        status_of(client, {"messages": list(task.messages)})

    with pytest.raises(EnvironmentFailed, match="my fault"):
        played(tiny, play, parse_calls=raises)


def test_the_decoder_does_not_wait_for_a_program_after_its_last_reply(tiny):
    engine, released, found = said_by(), [], []
    engine.release = released.append

    async def play(task, ask):
        await ask(task.messages)
        found.append(len(released))
        return Ended()

    environment = Environment(max_steps=1, play=asking(play))
    collect(tiny, [Task("t", ASKED)], engine=engine, environment=environment)
    assert found == [1]


async def raises_exit(task, client):
    sys.exit(3)


async def exits(task, client):
    os._exit(7)


def is_cancelled(task, client):
    raise asyncio.CancelledError("mine")


@each("function", [raises_exit, exits, is_cancelled])
def test_a_function_ends_its_own_episode_alone(tiny, function):
    rollout = played(tiny, function, time_limit=5.0)
    assert rollout.truncation == "error" and "ProcessEndAsked" in rollout.error


def test_rlkit_serve_forgets_old_replies(tiny, monkeypatch):
    monkeypatch.setattr("rlkit.extras.programs.server.REMEMBERED", 2)
    monkeypatch.setattr("rlkit.extras.programs.serving.REMEMBERED", 2)
    engine = said_by()
    generation = SimpleNamespace(engine=engine, params={})
    x = SimpleNamespace(generation=generation, parse_calls=hermes, port=0, seed=0)
    found = []

    async def serve():
        async with serve_endpoint(tiny, x) as variables:
            client = Client(variables["OPENAI_BASE_URL"], variables["OPENAI_API_KEY"])
            for i in range(6):
                await asyncio.to_thread(client.chat, [{"role": "user", "content": str(i)}])
            (door,) = SERVERS[asyncio.get_running_loop()].doors.values()
            found.append((len(door.numbers), len(door.replies), len(engine.due)))
            raise BrokenPipeError("not the port's")

    with pytest.raises(BrokenPipeError):
        asyncio.run(serve())
    assert found == [(3, 3, 0)]


def test_rlkit_serve_answers_one_conversation_after_another(tiny):
    x = build(
        compose(
            ["generation.max_new_tokens=4", "port=0", "generation.temperature=0"], entry="serve"
        ).config
    )

    async def serve():
        async with serve_endpoint(tiny, x) as variables:
            client = Client(variables["OPENAI_BASE_URL"], variables["OPENAI_API_KEY"])
            first = await asyncio.to_thread(client.chat, ASKED)
            return first, await asyncio.to_thread(
                client.chat, [*ASKED, first, {"role": "user", "content": "And?"}]
            )

    first, second = asyncio.run(serve())
    assert first["role"] == second["role"] == "assistant"


@pytest.mark.slow
def test_rlkit_serve_of_a_run_answers_a_client_until_ctrl_c(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = [
        "trainer.steps=1",
        "evaluation.n=2",
        "batch.prompts=1",
        "batch.group_size=2",
        "generation.max_new_tokens=8",
        "logger=none",
    ]
    assert main(["train", *small]) == 0
    (run,) = (path for path in tmp_path.glob("outputs/*/*") if path.parent.name != "latest")
    words = [
        sys.executable,
        "-m",
        "rlkit",
        "serve",
        f"run={run}",
        "port=0",
        "generation.max_new_tokens=4",
    ]
    with subprocess.Popen(
        words,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed,
    ) as serve:
        try:
            said = iter(serve.stdout.readline, "")
            heads = {}
            for line in said:
                if line.startswith("#"):
                    break
                name, _, value = line.removeprefix("export ").strip().partition("=")
                heads[name] = value
            reply = Client(heads["OPENAI_BASE_URL"], heads["OPENAI_API_KEY"]).chat(ASKED)
            serve.send_signal(signal.SIGINT)
            last = serve.communicate(timeout=60)[1]
        finally:
            serve.kill()
    assert reply["role"] == "assistant" and serve.returncode == 0 and not last.strip(), last


# ---------------------------------------------------------------------------------------- processes

ASK = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = json.dumps({"messages": task["messages"]}).encode()
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


def process(tiny, tmp_path, code: str, **settings):
    file = tmp_path / "agent.py"
    file.write_text(ASK + code)
    (rollout,) = collect(
        tiny,
        [Task("t", ASKED)],
        engine=said_by("a"),
        environment=program(command=["python", str(file)], **settings),
    )
    return rollout


@pytest.mark.slow
@pytest.mark.parametrize(
    "code, settings, truncation, reward",
    [
        ("sys.exit(said != 'a')", {"score": "exit"}, "", 1.0),
        ("raise ValueError('my fault')", {}, "error", None),
        ("while True: print('x' * 1000)", {"output_kb": 8}, "error", None),
        ("bytearray(1 << 30)", {"memory_mb": 512}, "error", None),
        ("import time; time.sleep(600)", {"time_limit": 0.5}, "deadline", None),
        ("os.kill(os.getppid(), 9)", {"confined": False}, "error", None),
    ],
)
def test_a_program_ends_its_own_episode_with_a_reason(
    tiny, tmp_path, code, settings, truncation, reward
):
    rollout = process(tiny, tmp_path, code, **settings)
    given = (
        rollout.steps[-1].reward if rollout.steps else None
    )  # on a loaded machine the time may be up before the first reply
    assert rollout.truncation == truncation and given == reward
    assert not truncation or rollout.error
    assert "my fault" not in code or "my fault" in rollout.error


OUTSIDE = """
import beside, socket, subprocess
def attempt(name, what):
    try:
        what()
        through.append(name)
    except (OSError, subprocess.SubprocessError):
        pass
def connect(kind, to, family=socket.AF_INET, protocol=0):
    with socket.socket(family, kind, protocol) as line:
        line.connect(to)
port, by_datagram, pid, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
secret, through = folder + "/secret", []
def early():
    with socket.socket() as line:
        line.sendto(b"a", 0x20000000, ("127.0.0.1", port))
attempt("read", lambda: open(secret).read())
attempt("hidden", lambda: open(os.path.dirname(sys.argv[0]) + "/.env").read())
attempt("write", lambda: open(secret, "a"))
shell = ["/bin/sh", "-c", "cat " + secret]
attempt("shell", lambda: subprocess.check_output(shell, stderr=-1) or 1)
attempt("tcp", lambda: connect(socket.SOCK_STREAM, ("127.0.0.1", port)))
attempt("mptcp", lambda: connect(socket.SOCK_STREAM, ("127.0.0.1", port), protocol=262))
attempt("fast open", early)
attempt("udp", lambda: connect(socket.SOCK_DGRAM, ("127.0.0.1", by_datagram)))
attempt("unix", lambda: connect(socket.SOCK_STREAM, folder + "/line", socket.AF_UNIX))
def pair():
    left, right = socket.socketpair(type=socket.SOCK_DGRAM)
    left.sendto(b"a", folder + "/letters")
attempt("datagram", pair)
attempt("listen", lambda: socket.socket().listen())
attempt("kill", lambda: os.kill(pid, 0))
attempt("environment", lambda: open(f"/proc/{pid}/environ").read())
attempt("limits", lambda: __import__("resource").prlimit(pid, 7))
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    left, right = socket.socketpair(type=kind)
    left.send(b"a")
os.makedirs("a/b")
open("a/b/c", "w").write("mine")
said = subprocess.check_output(["/bin/sh", "-c", "cat a/b/c"], text=True)
sys.exit(f"{through} {said}")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_landlock_version() < LANDLOCK, reason="needs Linux 6.12")
@each("confined", ["auto", False])
def test_a_confined_program_reaches_its_endpoint_and_nothing_else(tiny, tmp_path, confined):
    (tmp_path / "secret").write_text("s")
    code = tmp_path / "code"
    code.mkdir(exist_ok=True)
    for name, text in {"agent.py": ASK + OUTSIDE, "beside.py": "", ".env": "s"}.items():
        (code / name).write_text(text)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(type=socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as letters,
    ):
        udp.bind(("127.0.0.1", 0))
        (tmp_path / "line").unlink(missing_ok=True)
        unix.bind(str(tmp_path / "line"))
        unix.listen()
        (tmp_path / "letters").unlink(missing_ok=True)
        letters.bind(str(tmp_path / "letters"))
        ports = [str(line.getsockname()[1]) for line in (tcp, udp)]
        command = [
            "python",
            str(code / "agent.py"),
            *ports,
            str(os.getpid()),
            str(tmp_path),
        ]  # a folder that is named opens nothing
        environment = program(command=command, confined=confined)
        (rollout,) = collect(tiny, [Task("t", ASKED)], engine=said_by("a"), environment=environment)
    every = [
        "read",
        "hidden",
        "write",
        "shell",
        "tcp",
        "mptcp",
        "fast",
        "udp",
        "unix",
        "datagram",
        "listen",
        "kill",
        "environment",
        "limits",
    ]
    last = rollout.error.splitlines()[-1]
    assert len(rollout.steps) == 1 and last.endswith("mine"), last
    found = [name for name in every if f"'{name}" in last]
    assert found == ([] if confined == "auto" else every), last


@pytest.mark.slow
@pytest.mark.skipif(find_landlock_version() < LANDLOCK, reason="needs Linux 6.12")
def test_programs_of_a_sampling_process_are_confined_and_limited_too(tmp_path, monkeypatch, forked):
    """asynchrony=overlap starts them from a second process. A program that could write outside
    would fail, and the run with it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(
        ASK
        + f"try: open({str(tmp_path / 'written')!r}, 'w')\nexcept OSError: sys.exit(0)\nsys.exit(3)"
    )
    words = [
        "environment=program",
        "environment.command=[python,agent.py]",
        "environment.confined=true",
        "environment.max_programs=2",
        "asynchrony=overlap",
        "trainer.steps=3",
        "batch.prompts=2",
        "batch.group_size=2",
        "evaluation.n=0",
        "logger=none",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    status = os.waitstatus_to_exitcode(
        os.waitpid(forked(["train", *words], tmp_path / "log.txt"), 0)[1]
    )
    assert status == 0, (tmp_path / "log.txt").read_text()
    assert not (tmp_path / "written").exists()


LEAVES = """
child = os.fork()
if not child:
    os.setsid()
    os.close(1); os.close(2)
    if os.fork() == 0:
        import time
        time.sleep(600)
    os._exit(0)
"""


def alive(marker: str) -> list[str]:
    """Processes whose command line holds a text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (
                marker.encode() in (entry / "cmdline").read_bytes()
                and int(entry.name) != os.getpid()
            ):
                found.append(entry.name)
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs Linux's /proc")
def test_what_a_program_started_ends_with_it(tiny, tmp_path):
    """Also a grandchild in a session of its own whose parent is gone."""
    process(tiny, tmp_path, LEAVES)
    assert alive(str(tmp_path / "agent.py")) == []


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs Linux's /proc")
def test_a_program_ends_with_a_run_that_was_killed(tmp_path):
    file = tmp_path / "agent.py"
    file.write_text("import os, time\nprint('here', flush=True)\n" + LEAVES + "time.sleep(600)")
    guard = Path(sys.modules["rlkit.extras.programs._processes"].GUARD)
    job = json.dumps({"command": [sys.executable, str(file)], "task": "{}", "memory_mb": None})
    run = (
        f"import subprocess, sys\nc = subprocess.Popen([sys.executable, {str(guard)!r}], stdin=-1,"
        " stdout=1)\n"
    )
    run += f"c.stdin.write({job!r}.encode() + b'\\n'); c.stdin.flush(); c.wait()"
    with subprocess.Popen(
        [sys.executable, "-c", run], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as killed:
        assert killed.stdout.readline() == b"here\n"
        killed.send_signal(signal.SIGKILL)
        killed.stdout.read()  # until no process has it open
    assert alive(str(file)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, package", [("plain_agent", "json"), ("agent", "openai"), ("mcp_agent", "mcp")]
)
def test_the_agents_of_the_experiment_play_to_an_answer(tiny, name, package):
    pytest.importorskip(package, reason="the extras `programs` and `mcp` are not installed")
    environment = program(command=["python", str(EXPERIMENTS / f"{name}.py")])
    rollouts = collect(
        tiny,
        arithmetic(split="test", seed=0, max_samples=8),
        environment=environment,
        max_new_tokens=64,
    )
    assert {r.truncation for r in rollouts} <= {"", "steps"} and any(
        len(r.steps) > 1 for r in rollouts
    )


@pytest.mark.slow
def test_delays_and_crashes_of_some_change_nothing_for_the_others():
    spec = importlib.util.spec_from_file_location("delays", EXPERIMENTS / "delays.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.study(episodes=16, delay=0.05, crashes=0.1)
    assert found.pop("left over") == {"processes": 0, "sockets": 0}
    for figures in found.values():
        assert (
            figures["other tokens"] == 0
            and figures["largest difference of a log-prob"] < 1e-5
            and figures["survive"] > 8
        )


@pytest.mark.parametrize(
    "play, says",
    [
        (lambda task, ask: None, "ended before the policy was asked"),
        (lambda task, ask: 1 / 0, "division by zero"),
    ],
)
def test_a_program_that_never_asks_is_named_with_its_reason(play, says, tiny, experiment):
    """A mistyped script is the first mistake with programs."""
    with pytest.raises((DataError, EnvironmentFailed), match=says):
        check_policy(
            tiny, arithmetic(max_samples=2), experiment._replace(environment=program(function=play))
        )
