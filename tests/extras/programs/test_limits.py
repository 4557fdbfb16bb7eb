"""Large requests, long conversations and many connections change nothing for the other episodes."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
import threading
import urllib.error

import pytest

from extras.programs.test_gateway import ASKED, played, post, said_by, status_of
from rlkit.episodes import collect
from rlkit.episodes._assemble import split_into_rows
from rlkit.extras.programs import Ended, asking, conversations, program, server
from rlkit.models.chat import LONG, encode_text
from rlkit.types import Environment, Task

AND = {"role": "user", "content": "And?"}


@pytest.mark.slow
@pytest.mark.parametrize("turns", [400, pytest.param(1_500, marks=pytest.mark.slow)])
def test_a_conversation_of_many_turns_is_one_row_that_holds_each_token_once(tiny, turns):
    """Turn 988 failed by a recursion as deep as the conversation, and each turn kept its whole
    context."""
    depth = sys.getrecursionlimit()

    async def play(task, ask):
        messages = []
        for _ in range(turns):
            messages.append(AND)
            step = await ask(messages)
            messages.append({"role": "assistant", "content": step.content})
        return Ended()

    environment = Environment(max_steps=turns, play=asking(play))
    policy = tiny._replace(context_length=1 << 20)
    sys.setrecursionlimit(min(depth, 350))
    try:
        (rollout,) = collect(policy, [Task("t", ASKED)], engine=said_by(), environment=environment)
    finally:
        sys.setrecursionlimit(depth)
    assert (len(rollout.steps), rollout.status, len(split_into_rows(rollout))) == (
        turns,
        "terminated",
        1,
    )
    last = rollout.steps[-1]
    held = sum(len(step.prompt_ids) + len(step.response_ids) for step in rollout.steps)
    assert held == last.prompt_length + len(last.response_ids)


def test_a_large_request_is_read_in_a_thread_and_a_small_one_in_the_loop(tiny, monkeypatch):
    threads: dict[str, list[bool]] = {}

    def noting(module, name):
        inner = getattr(module, name)

        def noted(*given, **more):
            alone = threading.current_thread() is not threading.main_thread()
            threads.setdefault(name, []).append(alone)
            return inner(*given, **more)

        monkeypatch.setattr(module, name, noted)

    noting(server, "read_request")
    noting(conversations, "encode_prompt")

    def play(task, client):
        client.chat(task.messages)
        client.chat([{"role": "user", "content": "a" * conversations.LARGE}])

    rollout = played(tiny._replace(context_length=1 << 20), play)
    assert len(rollout.steps) == 2
    assert threads == {"read_request": [False, True], "encode_prompt": [False, True]}


def test_a_long_text_has_the_ids_of_a_short_one(tiny):
    text = "seven <|im_end|> 8\n" * (LONG // 16)
    plain = tiny.renderer.plain.encode(text, add_special_tokens=False).ids
    assert len(text) > LONG and encode_text(tiny.renderer, text) == plain


def connected(client) -> socket.socket:
    host, port = client.base_url.split("/")[2].split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_connections_are_bounded_and_idle_ones_give_way(tiny, monkeypatch, caplog):
    """A program without a bound on its connections took the run's last file."""
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 8)
    monkeypatch.setattr(server, "ACCEPTED", 1)
    closed = []

    def play(task, client):
        lines = [connected(client) for _ in range(100)]
        assert client.chat(task.messages)["content"] == "more"
        for line in lines:
            line.settimeout(0.0)
            try:
                closed.append(line.recv(1) == b"")
            except BlockingIOError:
                closed.append(False)
            except ConnectionResetError:
                closed.append(True)
            line.close()

    assert len(played(tiny, play).steps) == 1
    assert closed.count(True) >= 100 - 8
    assert closed[:80] == [True] * 80, "the oldest give way"


@pytest.mark.slow
def test_no_traceback_of_the_server_reaches_the_terminal(tiny, caplog):
    """Neither of connections beyond the files that the process may open, nor of what they send."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    heads = (
        b"\0\0\0",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n{",
        b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1_000 + b"\r\n",
    )

    def play(task, client):
        for _ in range(4):
            for head in heads:
                with connected(client) as line:
                    line.sendall(head)
        lines = []
        try:
            for _ in range(200):
                lines.append(connected(client))
        except OSError:  # the client has no file left itself
            pass
        for line in lines:
            line.close()
        client.chat(task.messages)

    with caplog.at_level(logging.DEBUG, "asyncio"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        try:
            rollout = played(tiny, play)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(rollout.steps) == 1
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.slow
def test_a_large_body_of_a_request_over_the_context_is_a_refusal_that_says_so(tiny):
    found = []

    def play(task, client):
        body = {"messages": [{"role": "user", "content": "seven " * 100_000}]}
        found.append(status_of(client, body))
        with pytest.raises(urllib.error.HTTPError):
            post(client, b"[" * (1 << 20))

    played(tiny, play)
    ((status, sentence),) = found
    assert status == 400 and sentence.startswith("context_length_exceeded")


def test_a_program_that_hangs_uses_up_no_time_of_the_others(tiny):
    """The decoder waits for it, and its wait was counted as time of the programs that waited for
    their replies."""

    async def play(task, client):
        await asyncio.to_thread(client.chat, task.messages)
        if task.id == "hangs":
            await asyncio.sleep(60)
        await asyncio.to_thread(client.chat, task.messages)

    rollouts = collect(
        tiny,
        [Task(name, ASKED) for name in ("hangs", "a", "b")],
        environment=program(function=play, time_limit=0.4),
        max_new_tokens=2,
    )
    assert [(len(r.steps), r.truncation == "deadline") for r in rollouts] == [
        (1, True),
        (2, False),
        (2, False),
    ]
