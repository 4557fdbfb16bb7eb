"""Tools of MCP servers, with a scripted one: what it says, what a call of it cannot do to other
episodes, and what is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from parametrise import each
from rlkit.config.compose import conf_dir
from rlkit.config.trust import Folder, find_unsafe_values
from rlkit.engines import Batched
from rlkit.environments import calculator, tool_schema
from rlkit.episodes._collect import collect_groups
from rlkit.episodes.episode import play, read_opening
from rlkit.errors import ConfigError
from rlkit.extras.programs import mcp
from rlkit.extras.programs._mcp import make_signature, simplify_schema
from rlkit.extras.programs.tool_servers import read_server
from rlkit.models.chat import encode_prompt, encode_scaffold
from rlkit.rewards import Reward, Term, numeric, score
from rlkit.system.loops import run
from rlkit.types import Generation, Rollout, Step, Task, ToolCall

SCRIPT = str(Path(__file__).resolve().with_name("tool_server.py"))
COMMAND = [sys.executable, "-S", SCRIPT]
TASK = Task("t/0", ({"role": "user", "content": "Go."},), answer="1", metadata={"seed": 3})
needs_mcp = pytest.mark.skipif(find_spec("mcp") is None, reason="needs the extra mcp")


def reply(*calls, content="1") -> Step:
    """A reply that calls tools by name: "count", or ("echo", {"text": "hi"})."""
    named = [(call, {}) if isinstance(call, str) else call for call in calls]
    made = tuple(
        ToolCall(f"call_{i}", name, arguments) for i, (name, arguments) in enumerate(named)
    )
    return Step(
        (), (), (), (), "tool" if made else "stop", content="" if made else content, tool_calls=made
    )


def played(environment, *replies: Step, n: int = 1) -> list[Rollout]:
    async def say(rollout, messages, session):
        return replies[len(rollout.steps)]

    async def all_of_them():
        return await asyncio.gather(*(play(TASK, environment, say, sample=i) for i in range(n)))

    return run(all_of_them())


def results(rollout: Rollout) -> list[str]:
    return [result.content for step in rollout.steps for result in step.tool_results]


@pytest.fixture
def private():
    """An environment with a process for each episode."""
    return mcp(servers={"mine": COMMAND}, max_chars=100, timeout=20)


@needs_mcp
def test_each_episode_has_a_server_of_its_own_and_results_are_bounded(private):
    calls = (
        reply("count", "count", ("echo", {"text": "hi"}), "fail", "flood"),
        reply(("echo", {}), "nope"),
        reply(),
    )
    for rollout in played(private, *calls, n=2):
        first, second, echo, failed, flood, missing, unknown = results(rollout)
        assert (first, second, echo, failed) == ("1", "2", "hi", "Error: no luck.")
        assert flood.startswith("x" * 100 + "\n[cut: 100000")
        assert (
            "missing argument 'text'" in missing and "no tool 'nope'" in unknown
        )  # the server is not asked
        assert rollout.status == "terminated"
    [alone] = played(private, reply("count"), reply())
    assert results(alone) == ["1"]
    assert children() == []


@needs_mcp
def test_a_result_that_the_client_refuses_is_a_failed_call(private):
    """It ended the episode, and the episodes that share the server."""
    [rollout] = played(private, reply("misfit", "count"), reply())
    refused, counted = results(rollout)
    assert refused.startswith("Error: RuntimeError: Invalid structured content")
    assert counted == "2" and rollout.status == "terminated"


def children() -> list[str]:
    """Servers that this process has started and that are alive."""
    listed = subprocess.run(
        ["ps", "-ww", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True
    )
    return [line for line in listed.stdout.splitlines() if SCRIPT in line]


@needs_mcp
def test_a_server_finds_its_episodes_task(private):
    long = mcp(servers={"mine": {"command": COMMAND, "tools": ["task"]}})
    [rollout] = played(long, reply("task"), reply())
    assert results(rollout) == ['{"id": "t/0", "metadata": {"seed": 3}}']
    assert [s["function"]["name"] for s in read_opening(TASK, long).schemas] == ["task"]


@needs_mcp
def test_a_process_has_a_folder_of_its_own_for_the_time_of_its_episode():
    server = {
        "command": [sys.executable, "-S", os.path.relpath(SCRIPT)],
        "cwd": "episode",
        "env": {"OWN": "{folder}/{sample}.db"},
    }
    own = mcp(servers={"mine": server})
    found = [json.loads(results(r)[0]) for r in played(own, reply("where"), reply(), n=2)]
    folders = [folder for folder, _, _ in found]
    assert [variable for _, _, variable in found] == [f"{f}/{i}.db" for i, f in enumerate(folders)]
    assert len({os.getcwd(), *folders}) == 3 and not any(map(os.path.exists, folders))


@needs_mcp
def test_what_a_server_leaves_behind_ends_with_its_episode(private):
    [rollout] = played(private, reply("leave"), reply())
    [said] = results(rollout)
    with pytest.raises(ProcessLookupError):
        os.kill(int(said), 0)


@needs_mcp
@each("max_servers", [1, 2])
def test_no_more_servers_are_alive_than_allowed_and_every_episode_is_played(tiny, max_servers):
    """Under counted rounds, where an episode that waited for a server inside its answer would hold
    up the one that has it."""
    alive = []

    def complete(policy, prompts, seeds, params):
        alive.append(len(children()))
        texts = [
            (
                '<tool_call>\n{"name": "count", "arguments": {}}\n</tool_call>'
                if len(p) < longest
                else "1"
            )
            for p in prompts
        ]
        ids = [tuple(encode_scaffold(policy.renderer, text + "<|im_end|>")) for text in texts]
        return [Generation(reply, (0.0,) * len(reply), "stop") for reply in ids]

    environment = mcp(servers={"mine": COMMAND}, max_servers=max_servers)
    longest = 1 + len(
        encode_prompt(tiny.renderer, TASK.messages, read_opening(TASK, environment).schemas)
    )
    rollouts = run(
        asyncio.wait_for(
            collect_groups(tiny, [TASK] * 5, environment, engine=Batched(complete)), 60
        )
    )
    assert [results(r) for r in rollouts] == [["1"]] * 5 and max(alive) == max_servers


@needs_mcp
def test_a_server_that_dies_ends_its_own_episode_unscored(private):
    async def say(rollout, messages, session):  # sample 1 calls what kills the server
        return [reply("die" if rollout.sample else "count"), reply("count"), reply()][
            len(rollout.steps)
        ]

    async def all_of_them():
        return await asyncio.gather(*(play(TASK, private, say, sample=i) for i in range(2)))

    fine, dead = score(
        run(all_of_them()), Reward("numeric", {"numeric": Term(1.0, partial(numeric))})
    )
    assert (results(fine), fine.reward) == (["1", "2"], 1.0)
    assert (dead.status, dead.truncation, dead.reward, len(dead.steps)) == (
        "truncated",
        "error",
        None,
        1,
    )
    assert "'mine'" in dead.error and "out of cheese" in dead.error


@needs_mcp
def test_a_shared_server_is_started_again_after_its_death():
    shared = mcp(servers={"mine": {"command": COMMAND, "shared": True}})
    assert sorted(results(r)[0] for r in played(shared, reply("count"), reply(), n=3)) == [
        "1",
        "2",
        "3",
    ]
    assert played(shared, reply("die"), reply())[0].truncation == "error"
    assert results(played(shared, reply("count"), reply())[0]) == ["1"]


@needs_mcp
def test_a_call_that_takes_too_long_is_a_result_and_the_episode_goes_on():
    quick = mcp(servers={"mine": COMMAND}, timeout=0.2)
    [rollout] = played(quick, reply(("wait", {"seconds": 0.4})), reply())
    assert (
        results(rollout) == ["Error: wait took longer than 0.2 s and was given up."]
        and rollout.status == "terminated"
    )


@needs_mcp
def test_a_server_over_http_that_dies_does_so_to_nobody_else():
    """The client throws a CancelledError into the task that entered it, and a group when it is
    left."""
    with subprocess.Popen(
        [sys.executable, "-S", SCRIPT, "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        remote = mcp(
            servers={"far": f"http://127.0.0.1:{int(server.stdout.readline())}/mcp"}, timeout=20
        )
        assert sorted(results(r)[0] for r in played(remote, reply("count"), reply(), n=2)) == [
            "1",
            "2",
        ]
        for _ in range(2):  # dies in a call; is not there for the next
            [dead] = played(remote, reply("die"), reply())
            assert dead.truncation == "error" and "'far'" in dead.error


@needs_mcp
@pytest.mark.slow
def test_no_server_outlives_a_trainer_that_is_killed(tmp_path):
    """One that is inside a call does not see that its standard input was closed."""
    os.mkfifo(tmp_path / "note")
    server = {"command": COMMAND, "env": {"NOTE": str(tmp_path / "note")}}
    code = (
        f"from test_mcp import *\nplayed(mcp(servers={{'mine': {server!r}}}), reply(('wait',"
        " {'seconds': 600})), reply())"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(SCRIPT).parent), *sys.path])
    note = os.open(tmp_path / "note", os.O_RDONLY | os.O_NONBLOCK)
    with subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}
    ) as trainer:
        try:
            assert select.select([note], [], [], 60)[0], "the tool was not called"
            child = os.pidfd_open(int(os.read(note, 20)))
        finally:
            trainer.kill()
            os.close(note)
    try:
        assert select.select([child], [], [], 5)[0], "the server is still there"
    finally:
        os.close(child)


@needs_mcp
@each(
    ("servers", "said"),
    [
        ({"mine": [sys.executable, "-S", "-c", "raise SystemExit('bad luck')"]}, "bad luck"),
        ({"mine": COMMAND, "yours": COMMAND}, "both have a tool 'misfit'"),
        ({"mine": {"command": COMMAND, "tools": ["cuont"]}}, "no tool 'cuont'"),
    ],
)
def test_servers_that_cannot_be_used_are_refused_with_their_name(servers, said):
    with pytest.raises(ConfigError, match=said) as error:
        read_opening(TASK, mcp(servers=servers))
    assert "environment.servers." in str(error.value)


@each("max_servers", [0, 1])
def test_fewer_servers_than_an_episode_needs_are_refused(max_servers):
    with pytest.raises(ConfigError, match=f"max_servers is {max_servers}; an episode needs 2"):
        mcp(
            servers={"mine": COMMAND, "yours": COMMAND, "far": "http://127.0.0.1:1/mcp"},
            max_servers=max_servers,
        )


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr("rlkit.extras.programs.tool_servers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package mcp.*\[mcp\]"):
        read_opening(TASK, mcp(servers={"mine": COMMAND}))


@each(
    ("given", "said"),
    [
        ("localhost:8000", "begins with http"),
        ([], "first word"),
        (["no-such-program"], "first word"),
        ({"command": COMMAND, "url": "http://x"}, "give a command as a list"),
        ({"command": COMMAND, "shard": True}, "servers.mine.shard is no key"),
        ({"url": "http://x/mcp", "shared": False}, "share it"),
        ({"command": COMMAND, "shared": True, "cwd": "episode"}, "belong to one episode"),
        ({"command": [*COMMAND, "{sample}"], "shared": True}, "belong to one episode"),
        ({"url": "http://x/mcp", "env": {"A": "{folder}"}}, "belong to one episode"),
    ],
)
def test_what_is_no_server_is_refused_where_it_stands(given, said):
    with pytest.raises(ConfigError, match=said):
        read_server("mine", given)


def test_a_schema_loses_what_says_nothing_and_a_tool_called_title_stays():
    """pydantic names every object and argument twice; each name is in every prompt."""
    own = tool_schema(calculator)["function"]["parameters"]
    argument = {"description": "The expression.", "title": "Expression", "type": "string"}
    dressed = {
        "properties": {"expression": argument},
        "required": ["expression"],
        "title": "calculatorArguments",
        "type": "object",
    }
    assert json.dumps(simplify_schema(dressed)) == json.dumps(
        own
    )  # in this order, as the prompt has it
    assert simplify_schema({"properties": {"title": {"type": "string", "title": "Title"}}}) == {
        "properties": {"title": {"type": "string"}}
    }


@each("name", ["a-b", "class"])
def test_a_parameter_that_python_cannot_name_leaves_the_check_to_the_server(name):
    assert (
        str(make_signature({"properties": {name: {"type": "string"}}, "required": [name]}))
        == "(**arguments)"
    )


def test_a_server_that_a_folder_names_is_seen_as_code_outside():
    node = {"_target_": "rlkit.extras.programs.mcp", "servers": {"mine": ["sh", "-c", "true"]}}
    for place in (node, {"deep": [{"down": node}]}):
        assert list(find_unsafe_values(place, Folder(conf_dir())))
