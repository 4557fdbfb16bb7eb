"""Several ranks in front of the same servers: rank 0 gives them the weights and names them, and all
ranks ask for the same ones."""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack
from functools import partial

import pytest

from extras.vllm.vllm_protocol import EOS, serving
from rlkit.config.compose import compose, experiment
from rlkit.distributed import ranks
from rlkit.episodes._collect import collect
from rlkit.errors import ConfigError
from rlkit.extras.vllm import VLLM
from rlkit.extras.vllm import engine as vllm_engine
from rlkit.extras.vllm.server import Server
from rlkit.models import LoRA, load_policy
from rlkit.types import Environment, Task

TASKS = [Task(id=str(i), messages=({"role": "user", "content": f"go {i}"},)) for i in range(4)]

ALONE = Environment()  # one reply


def move(policy) -> None:
    """Other weights, the same on every rank."""
    for p in policy.model.parameters():
        if p.requires_grad:
            p.data += 0.01


def played(engine, policy, tasks, version) -> list:
    """The episodes of all ranks, each of which samples some of them."""

    def own(tasks, first):
        return collect(
            policy, tasks, ALONE, engine=engine, first=first, version=version, max_new_tokens=4
        )

    return ranks.split_work(tasks, own)


def two_ranks(forked, tmp_path, work, servers=1, prepare=lambda servers: None):
    """Runs work(addresses) → JSON on two ranks with servers in this process; the servers, and what
    each rank gave, or the error that it ended with.

    The ranks are forked before a server has a thread, and learn the addresses from a pipe.
    """
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    pipes = [os.pipe() for _ in range(2)]

    def child(rank):
        addresses = json.loads(os.read(pipes[rank][0], 1 << 12))
        ranks.join(2, cuda=False, timeout=60.0)
        try:
            said = work(addresses)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        (tmp_path / f"rank{rank}").write_text(json.dumps(said))
        ranks.leave()

    children = [
        forked(
            rank,
            tmp_path / "log",
            partial(os.environ.update, group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}),
            child,
        )
        for rank in range(2)
    ]
    with ExitStack() as stack:
        own = [stack.enter_context(serving()) for _ in range(servers)]
        prepare(own)
        for _, write in pipes:
            os.write(write, json.dumps([server.url for server in own]).encode())
        ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert ended == [0, 0], (tmp_path / "log").read_text()[-4000:]
    return own, [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]


def told(server, path) -> list:
    return [body for asked, body in server.asked if asked == path]


def sample_two_versions(lora, addresses) -> list:
    policy = load_policy(path="tiny", lora=LoRA(rank=lora))._replace(eos_token_ids=(EOS,))
    engine = VLLM(addresses=addresses)
    said = []
    for version in range(2):
        played(engine, policy, TASKS[:1], version)  # rank 0 has no episode of its own
        said += played(engine, policy, TASKS, version)
        move(policy)
    return [step.versions for rollout in said for step in rollout.steps]


@pytest.mark.slow
def test_both_ranks_sample_from_the_adapter_that_rank_0_has_pushed_once(forked, tmp_path):
    (server,), said = two_ranks(forked, tmp_path, partial(sample_two_versions, 2))
    names = [body["lora_name"] for body in told(server, "/v1/load_lora_adapter")]
    assert len(set(names)) == len(names) == 2
    asked = [body["model"] for body in told(server, "/v1/completions")]
    assert asked == [names[0]] * 5 + [names[1]] * 5
    assert [body["lora_name"] for body in told(server, "/v1/unload_lora_adapter")] == names[:1]
    assert said[0] == said[1] == [[[0, 0]]] * 4 + [[[0, 1]]] * 4


@pytest.mark.slow
def test_whole_weights_are_pushed_once_to_each_server(forked, tmp_path):
    servers, said = two_ranks(forked, tmp_path, partial(sample_two_versions, 0), servers=2)
    assert [s.count("/collective_rpc") for s in servers] == [2, 2]
    assert [s.count("/reset_prefix_cache") for s in servers] == [2, 2]
    assert said[0] == said[1]


@pytest.mark.slow
def test_a_push_that_fails_on_rank_0_ends_both_with_its_error(forked, tmp_path):
    def refuse(servers):
        servers[0].missing = {"/v1/load_lora_adapter"}

    _, said = two_ranks(forked, tmp_path, partial(sample_two_versions, 2), prepare=refuse)
    error = "/v1/load_lora_adapter answers 404:"
    assert said[0].startswith("EngineError: http") and error in said[0]
    assert said[1].startswith("RankError: rank 0 failed: EngineError: http") and error in said[1]


def lose_one(addresses) -> list:
    """Two loads of the same weights; between them rank 1 alone loses the server."""
    policy = load_policy(path="tiny", lora=LoRA(rank=2))._replace(eos_token_ids=(EOS,))
    engine = VLLM(addresses=addresses)
    played(engine, policy, TASKS, 0)
    if ranks.rank() == 1:
        engine.backend.servers[0].forget()
    played(engine, policy, TASKS, 0)
    return [server.adapter for server in engine.backend.servers]


@pytest.mark.slow
def test_a_server_that_another_rank_has_lost_is_given_the_weights_again(forked, tmp_path):
    """It may have been started again, and then serves the weights of its start."""
    servers, said = two_ranks(forked, tmp_path, lose_one, servers=2)
    assert [s.count("/v1/load_lora_adapter") for s in servers] == [2, 1]
    assert said[0] == said[1] and len(set(said[0])) == 2
    last = told(servers[0], "/v1/completions")[-1]
    assert last["model"] == said[0][0]


def start_one(addresses) -> list:
    """Samples with addresses=[start], which gives the server of this test; how often it started."""
    started = []

    def start_server(*_, max_rows, **__):
        started.append(addresses[0])
        return Server(addresses[0], max_rows=max_rows)

    vllm_engine.find_spec = lambda name: True  # as if vLLM were installed
    vllm_engine.start_server = start_server
    policy = load_policy(path="tiny")._replace(eos_token_ids=(EOS,))
    engine = VLLM(addresses=["start"])
    played(engine, policy, TASKS, 0)
    return [started, [server.url for server in engine.backend.servers]]


@pytest.mark.slow
def test_one_server_is_started_for_all_ranks(forked, tmp_path):
    (server,), said = two_ranks(forked, tmp_path, start_one)
    assert said == [[[server.url], [server.url]], [[], [server.url]]]
    assert server.count("/collective_rpc") == 1 and server.count("/v1/completions") == len(TASKS)


def sample_alone(addresses) -> str:
    policy = load_policy(path="tiny")._replace(eos_token_ids=(EOS,))
    if ranks.rank() == 1:
        return str(ranks.gather(lambda: "something else"))
    collect(policy, TASKS, ALONE, engine=VLLM(addresses=addresses), max_new_tokens=4)
    return ""


@pytest.mark.slow
def test_sampling_on_one_rank_alone_is_refused(forked, tmp_path):
    """Else it would take another exchange of the ranks for its own."""
    _, said = two_ranks(forked, tmp_path, sample_alone)
    assert "with several ranks call collect on all of them" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("address", ["http://localhost:8000", "http://127.0.0.1:8000"])
def test_an_address_that_each_machine_has_is_refused_on_several(address):
    words = ["generation=vllm", f"generation.engine.addresses=[{address}]"]
    x = experiment(compose(words))
    several = x._replace(trainer=x.trainer._replace(nodes=2))
    (said,) = x.generation.engine.problems(several)
    assert f"{address} is another server on each of trainer.nodes=2 machines" in said
    assert not x.generation.engine.problems(x)
    with pytest.raises(ConfigError, match="name it as all machines reach it"):
        experiment(compose([*words, "trainer=ddp", "trainer.nodes=2", "batch.prompts=8"]))
