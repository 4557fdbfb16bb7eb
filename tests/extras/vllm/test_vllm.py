"""generation=vllm without vLLM: what it is told and when, what servers are asked, and what is said
where one is missing.

The same against vLLM itself: test_vllm_real.py.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch

from extras.vllm.vllm_protocol import EOS, serving
from rlkit.config.compose import compose, conf_dir, experiment
from rlkit.config.trust import Folder, find_unsafe_values
from rlkit.episodes._collect import collect
from rlkit.errors import ConfigError, EngineError
from rlkit.extras.vllm import VLLM
from rlkit.extras.vllm import engine as vllm_engine
from rlkit.extras.vllm import pool as vllm_pool
from rlkit.extras.vllm.weights import list_weights
from rlkit.models import LoRA, load_policy
from rlkit.types import Environment, SamplingParams, Task


@pytest.fixture
def policy():
    return load_policy(path="tiny")._replace(eos_token_ids=(EOS,))


def step(policy) -> None:
    """One optimizer step of the fused kind, which moves no version counter of autograd."""
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(trained, lr=1e-4, fused=True).step()


async def completions(engine, prompts, seeds=None, **params):
    """One completion of each prompt, all at once; their keys are their positions."""
    params = SamplingParams(**{"admission": "free"} | params)
    asked = zip(prompts, seeds or range(len(prompts)), strict=True)
    try:
        return await asyncio.gather(
            *(engine.generate(key, ids, seed, params) for key, (ids, seed) in enumerate(asked))
        )
    finally:
        for key in range(len(prompts)):
            engine.release(key)


def sample(engine, policy, prompts, seeds=None, *, version=0, **params):
    """A load, and completions after it, in an event loop of their own."""

    async def both():
        await engine.load(policy, version)
        return await completions(engine, prompts, seeds, **params)

    return asyncio.run(both())


# ---------------------------------------------------------------------------------- in this process


class FakeLLM:
    """The LLM class of vLLM: a completion is the prompt's last id + 1, then the end, each in a step
    of its own."""

    made: ClassVar[list[FakeLLM]] = []
    model_config = SimpleNamespace(max_model_len=100)

    def __init__(self, model, **arguments):
        self.calls, self.weights, self.requests = [("start", arguments)], {}, {}
        torch.set_num_threads = None  # as vLLM does on a CPU
        self.llm_engine = self.engine_core = self
        self.made.append(self)

    def collective_rpc(self, method, kwargs):
        self.weights = {name: weight.clone() for name, weight in kwargs["weights_iterator"]}
        self.calls.append((method,))

    def reset_prefix_cache(self):
        self.calls.append(("reset",))

    def wake_up(self, tags):
        self.calls.append(("wake", *tags))

    def sleep(self, level):
        assert not self.requests  # nothing runs while it sleeps
        self.calls.append(("sleep", level))

    def add_lora(self, request):
        self.calls.append(("adapter", request.name))

    def add_request(self, name, prompt, parameters, lora_request):
        self.calls.append(
            ("request", name, prompt, parameters.given, lora_request and lora_request.name)
        )
        self.requests[name] = prompt

    def step(self):
        name = next(iter(self.requests))
        ids = [self.requests.pop(name)[-1] + 1, EOS]
        output = SimpleNamespace(
            token_ids=ids,
            logprobs=[{t: SimpleNamespace(logprob=-1.0 - i)} for i, t in enumerate(ids)],
        )
        return [SimpleNamespace(finished=True, request_id=name, outputs=[output])]

    def abort_request(self, names):
        for name in names:
            del self.requests[name]
        self.calls.append(("abort", *names))

    def shutdown(self):
        self.calls.append(("shutdown",))

    def told(self, *what):
        """The names of its calls, those alone that are asked for."""
        return [call[0] for call in self.calls if call[0] in what]


@pytest.fixture
def fakes(monkeypatch):
    """vLLM's modules, as far as the engine uses them; every LLM that is made."""
    names = ("vllm", "vllm.inputs", "vllm.sampling_params", "vllm.lora", "vllm.lora.request")
    modules = {name: ModuleType(name) for name in names}
    modules["vllm"].LLM = FakeLLM
    modules["vllm"].SamplingParams = lambda **given: SimpleNamespace(given=given)
    modules["vllm.inputs"].tokens_input = lambda ids: ids
    modules["vllm.sampling_params"].RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")
    modules["vllm.lora.request"].LoRARequest = lambda name, number, path: SimpleNamespace(name=name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(vllm_engine, "find_spec", lambda name: True)
    for name in (
        "ENABLE_V1_MULTIPROCESSING",
        "LOGGING_LEVEL",
        "NO_USAGE_STATS",
        "CPU_OMP_THREADS_BIND",
        "HOST_IP",
    ):
        monkeypatch.setenv(f"VLLM_{name}", "before")  # and put back after the test
    monkeypatch.setattr(FakeLLM, "made", [])
    return FakeLLM.made


def test_weights_go_when_they_moved_and_only_then(fakes, policy):
    engine = VLLM()
    for version in range(2):
        replies = sample(engine, policy, [(5,), (7,)], version=version)
        assert [(g.token_ids, g.versions) for g in replies] == [
            ((6, EOS), ((0, version),)),
            ((8, EOS), ((0, version),)),
        ]
    step(policy)
    sample(engine, policy, [(5,)])
    (fake,) = fakes
    assert fake.told("reload_weights", "reset") == ["reload_weights", "reset"] * 2
    for name, weight in policy.model.named_parameters():
        assert torch.equal(fake.weights[name], weight)
    assert torch.equal(
        fake.weights["lm_head.weight"], policy.model.lm_head.weight
    )  # shared with the embedding, and still there


def test_under_lora_the_base_goes_once_and_the_adapter_when_it_moved(fakes):
    policy, engine = load_policy(path="tiny", lora=LoRA(rank=2)), VLLM()
    for _ in range(2):
        sample(engine, policy, [(5,)])
    step(policy)
    sample(engine, policy, [(5,)])
    assert fakes[0].told("reload_weights", "adapter") == ["reload_weights", "adapter", "adapter"]
    assert [call[-1] for call in fakes[0].calls if call[0] == "request"] == [
        "adapter-1",
        "adapter-1",
        "adapter-2",
    ]
    plain = dict(load_policy(path="tiny").model.named_parameters(remove_duplicate=False))
    assert fakes[0].weights.keys() == plain.keys() and all(
        torch.equal(fakes[0].weights[n], w) for n, w in plain.items()
    )


@pytest.mark.slow
def test_a_merged_adapter_is_the_model_that_trains(policy):
    """Base and adapter in one: the forward pass of the plain model with the merged weights is that
    of the adapted one."""
    adapted = load_policy(path="tiny", lora=LoRA(rank=2))
    with torch.no_grad():
        for name, weight in adapted.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.05)
        ids = torch.tensor([[5, 80, 90]])
        before = policy.model(ids).logits.clone()
        policy.model.load_state_dict(dict(list_weights(adapted.model, merge=True)))
        torch.testing.assert_close(
            policy.model(ids).logits, adapted.model(ids).logits, rtol=1e-4, atol=1e-4
        )
        assert not torch.allclose(before, adapted.model(ids).logits, rtol=1e-2, atol=1e-2)


def test_an_interrupted_push_is_made_again(fakes, policy, monkeypatch):
    """Also where the weights are those before it again: how far it came is not known."""
    engine, before = (
        VLLM(),
        {name: weight.clone() for name, weight in policy.model.state_dict().items()},
    )
    sample(engine, policy, [(5,)])
    step(policy)
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(fakes[0], "collective_rpc", lambda method, kwargs: 1 / 0)
        sample(engine, policy, [(5,)])
    policy.model.load_state_dict(before)
    sample(engine, policy, [(5,)])
    assert fakes[0].told("reload_weights") == ["reload_weights"] * 2


def test_another_model_gets_a_vllm_of_its_own(fakes, policy):
    engine = VLLM()
    sample(engine, policy, [(5,)])
    sample(engine, load_policy(path="tiny_guess"), [(5,)])
    assert [fake.told("reload_weights", "shutdown") for fake in fakes] == [
        ["reload_weights", "shutdown"],
        ["reload_weights"],
    ]


def test_a_request_says_everything_itself(fakes, policy):
    """No default of vLLM or of the model's own generation config decides anything."""
    threads = torch.set_num_threads
    policy, engine = (
        policy._replace(eos_token_ids=(EOS, 3), context_length=60),
        VLLM(arguments={"max_model_len": 50}),
    )
    (reply,) = sample(
        engine, policy, [tuple(range(48))], [1 << 62], version=4, max_new_tokens=9, temperature=0.7
    )
    assert reply == ((48, EOS), (-1.0, -2.0), "stop", (), ((0, 4),))
    started, (_, name, prompt, given, _) = (
        fakes[0].calls[0][1],
        next(c for c in fakes[0].calls if c[0] == "request"),
    )
    assert (name, prompt, given["seed"], given["max_tokens"]) == ("0", list(range(48)), 1 << 62, 9)
    assert (
        given["temperature"],
        given["top_p"],
        given["top_k"],
        given["min_p"],
        given["repetition_penalty"],
    ) == (0.7, 1.0, 0, 0.0, 1.0)
    assert given["ignore_eos"] and given["stop_token_ids"] == [EOS, 3] and given["logprobs"] == 0
    assert (
        started["logprobs_mode"] == "processed_logprobs"
        and started["generation_config"] == "vllm"
        and started["max_model_len"] == 50
    )
    assert torch.set_num_threads is threads


def test_a_context_beyond_what_vllm_was_started_for_is_refused(fakes, policy):
    with pytest.raises(ConfigError, match=r"100 tokens.*max_model_len"):
        sample(VLLM(), policy, [(5,) * 100])


def test_an_error_leaves_nothing_running(fakes, policy, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    engine = VLLM()
    sample(engine, policy, [(5,)])
    engine.backend.vllm.sleeps = True  # as on a GPU: it sleeps only once nothing runs
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(fakes[0], "step", lambda: 1 / 0)
        sample(engine, policy, [(5,), (7,)])
    assert not fakes[0].requests and [g.token_ids for g in sample(engine, policy, [(5,)])] == [
        (6, EOS)
    ]


@pytest.mark.parametrize("lora", [False, True])
def test_asleep_it_leaves_the_gpu_to_the_trainer(fakes, monkeypatch, lora):
    """It sleeps after the last episode and wakes for a load, or for an episode that comes later.
    Weights that move are forgotten, and pushed before the cache needs its room; a base that does
    not move is kept."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    policy, engine = load_policy(path="tiny", lora=LoRA(rank=2 if lora else 0)), VLLM()
    sample(engine, policy, [(5,)])
    engine.backend.vllm.sleeps = True  # as on a GPU
    for _ in range(2):
        sample(engine, policy, [(5,), (7,)])
        fakes[0].calls.append(("training",))
    asyncio.run(completions(engine, [(5,)]))
    told = [
        call[0] if call[0] == "request" else call
        for call in fakes[0].calls
        if call[0] not in ("start", "abort")
    ]
    pushed = [("reload_weights",), ("reset",), *([("adapter", "adapter-1")] if lora else [])]
    first = [*pushed, "request", "request", "request", ("sleep", 1 if lora else 2), ("training",)]
    wake = (
        [("wake", "weights"), ("wake", "kv_cache")]
        if lora
        else [("wake", "weights"), pushed[0], ("wake", "kv_cache"), pushed[1]]
    )
    assert told == [
        *first,
        *wake,
        "request",
        "request",
        first[-2],
        ("training",),
        *wake,
        "request",
        first[-2],
    ]


THREE_TURNS = Environment(
    next_prompt=lambda rollout, index: "again" if index < 2 else None, max_steps=5
)
TASKS = [Task(id=str(i), messages=({"role": "user", "content": f"go {i}"},)) for i in range(6)]


def test_whole_episodes_and_how_answers_join_is_said_once(fakes, policy, capsys):
    engine, keys = VLLM(), []
    for version in range(2):
        rollouts = collect(
            policy,
            TASKS[:2],
            engine=engine,
            environment=THREE_TURNS,
            group_size=2,
            version=version,
            max_new_tokens=4,
        )
        assert [len(r.steps) for r in rollouts] == [3] * 4
        assert {s.versions for r in rollouts for s in r.steps} == {((0, version),)}
        keys.append([call[1] for call in fakes[0].calls if call[0] == "request"])
    assert all(keys[0].count(key) == 3 for key in keys[0]) and engine.busy_s > 0
    assert (
        capsys.readouterr().err.count(
            "generation.admission=rounds: vLLM lets answers join as they come"
        )
        == 1
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"temperature": value}, "0 or from 0.01 to 2.0") for value in (-1.0, 0.001, 2.5)]
    + [({"max_thinking_tokens": 3}, "no such budget")],
)
def test_what_vllm_cannot_sample_is_refused(fakes, policy, wrong, message):
    with pytest.raises(ConfigError, match=rf"generation.{next(iter(wrong))}.*{message}"):
        sample(VLLM(), policy, [(5,)], **wrong)
    assert not fakes[0].told("request")


def test_without_weights_nothing_is_sampled(fakes):
    with pytest.raises(EngineError, match=r"await load\(policy, version\) first"):
        asyncio.run(VLLM().generate(0, (5,), 1, SamplingParams()))


# ------------------------------------------------------------------------------------------ servers


@pytest.fixture
def servers(monkeypatch):
    """Three servers."""
    monkeypatch.setattr(vllm_pool, "POLL", 0)
    with ExitStack() as stack:
        yield [stack.enter_context(serving()) for _ in range(3)]


@pytest.fixture
def server(servers):
    return servers[0]


def sampled_at(servers):
    """The prompts and seeds that each was asked for, sorted."""
    return [
        sorted(
            (body["prompt"][-1], body["seed"])
            for path, body in s.asked
            if path == "/v1/completions"
        )
        for s in servers
    ]


PROMPTS = [(10 + i,) for i in range(6)]
REPLIES = [(11 + i, EOS) for i in range(6)]


def test_arguments_become_flags_that_vllm_serve_reads():
    given = {"enforce_eager": True, "sleep": False, "dtype": "float32"}
    given |= {"hf_overrides": {"rope_theta": 1e6, "a": None}, "middleware": ["x", "y"]}
    assert vllm_engine.make_flags(given) == [
        *("--enforce-eager", "--no-sleep", "--dtype", "float32"),
        *("--hf-overrides", '{"rope_theta": 1000000.0, "a": null}', "--middleware", "x", "y"),
    ]


def test_a_server_gets_ids_and_seeds_and_gives_ids(server, policy):
    engine = VLLM(addresses=[server.url])
    first, second = sample(
        engine, policy, [(5,), (7, 8)], [3, 1 << 62], version=2, max_new_tokens=5
    )
    assert first == ((6, EOS), (-1.0, -2.0), "stop", (), ((0, 2),)) and second.token_ids == (9, EOS)
    assert [path for path, _ in server.asked[:2]] == ["/collective_rpc", "/reset_prefix_cache"]
    bodies = sorted(
        (b for path, b in server.asked if path == "/v1/completions"), key=lambda b: b["seed"]
    )
    assert [(b["prompt"], b["seed"], b["model"]) for b in bodies] == [
        ([5], 3, "base"),
        ([7, 8], 1 << 62, "base"),
    ]
    assert (
        bodies[0]["ignore_eos"] and bodies[0]["return_token_ids"] and bodies[0]["max_tokens"] == 5
    )


@pytest.mark.slow
def test_a_server_gets_each_adapter_under_a_new_name(server):
    policy, engine = load_policy(path="tiny", lora=LoRA(rank=2)), VLLM(addresses=[server.url])
    sample(engine, policy, [(5,)])
    step(policy)
    sample(engine, policy, [(5,)])
    told = [
        (path.rpartition("/")[2], body.get("lora_name") or body.get("model"))
        for path, body in server.asked
    ]
    (_, first), (_, second) = (t for t in told if t[0] == "load_lora_adapter")
    assert first != second and told == [
        ("load_lora_adapter", first),
        ("completions", first),
        ("load_lora_adapter", second),
        ("unload_lora_adapter", first),
        ("completions", second),
    ]


def test_episodes_are_dealt_by_position_and_weights_go_to_each_server_once(servers, policy):
    engine = VLLM(addresses=[s.url for s in servers])
    for version in range(2):
        assert [g.token_ids for g in sample(engine, policy, PROMPTS, version=version)] == REPLIES
    assert sampled_at(servers) == [
        [(10, 0)] * 2 + [(13, 3)] * 2,
        [(11, 1)] * 2 + [(14, 4)] * 2,
        [(12, 2)] * 2 + [(15, 5)] * 2,
    ]
    assert [s.count("/collective_rpc") for s in servers] == [1, 1, 1]
    step(policy)
    sample(engine, policy, PROMPTS, version=2)
    assert [s.count("/collective_rpc") for s in servers] == [2, 2, 2]
    folders = {
        body["kwargs"]["weights_path"]
        for s in servers
        for path, body in s.asked
        if path == "/collective_rpc"
    }
    assert len(folders) == 2  # written once for all of them


def test_one_that_dies_is_named_and_its_completions_are_sampled_elsewhere_from_the_same_seeds(
    servers, policy, capsys
):
    engine = VLLM(addresses=[s.url for s in servers])
    servers[1].dies_at = "/v1/completions"
    assert [g.token_ids for g in sample(engine, policy, PROMPTS)] == REPLIES
    assert [set(at) for at in sampled_at(servers)] == [
        {(10, 0), (13, 3), (11, 1)},
        {(11, 1), (14, 4)},
        {(12, 2), (15, 5), (14, 4)},
    ]
    said = capsys.readouterr().err
    assert (
        said.count("no longer answers") == 1
        and f"warning: the vLLM server {servers[1].url} no longer answers" in said
    )
    asked = len(servers[1].asked)
    assert [g.token_ids for g in sample(engine, policy, PROMPTS)] == REPLIES
    assert len(servers[1].asked) == asked  # left out
    servers[1].absences = 0
    sample(engine, policy, PROMPTS)
    assert [path for path, _ in servers[1].asked[asked:]] == [
        "/collective_rpc",
        "/reset_prefix_cache",
        *["/v1/completions"] * 2,
    ]
    assert [s.count("/collective_rpc") for s in servers] == [1, 2, 1]


@pytest.mark.slow
def test_the_turns_of_an_episode_stay_on_one_server_until_it_dies(servers, policy):
    def played():
        """Tokens, and for each server the first prompts of the episodes that it sampled in, with
        the number of completions."""
        rollouts = collect(
            policy,
            TASKS,
            engine=VLLM(addresses=[s.url for s in servers]),
            environment=THREE_TURNS,
            max_new_tokens=4,
        )
        firsts = [list(r.steps[0].prompt_ids) for r in rollouts]
        asked = [
            [body["prompt"] for path, body in s.asked if path == "/v1/completions"] for s in servers
        ]
        at = [
            [sum(ids[: len(first)] == first for ids in prompts) for first in firsts]
            for prompts in asked
        ]
        return [[(s.prompt_ids, s.response_ids) for s in r.steps] for r in rollouts], at

    tokens, at = played()
    assert [sorted(counts) for counts in at] == [[0, 0, 0, 0, 3, 3]] * 3

    def die_at_the_third(handler):
        if servers[1].count("/v1/completions") == 3:
            servers[1].absences = servers[1].away

    for s in servers:
        s.asked.clear()
    servers[1].holds = die_at_the_third
    again, then = played()
    assert again == tokens and 3 <= sum(then[1]) <= 4
    for before, after in zip(zip(*at, strict=True), zip(*then, strict=True), strict=True):
        moved = before[1] > 0
        assert max(after[0], after[2]) >= 2 if moved else before == after


def test_one_that_dies_while_it_is_given_weights_is_left_out(servers, policy, capsys):
    engine = VLLM(addresses=[s.url for s in servers])
    servers[2].dies_at = "/collective_rpc"
    assert [g.token_ids for g in sample(engine, policy, PROMPTS)] == REPLIES
    assert not servers[2].count("/v1/completions") and servers[2].url in capsys.readouterr().err


def test_where_none_is_left_the_first_that_comes_back_gets_the_weights_again(
    servers, policy, capsys
):
    engine = VLLM(addresses=[s.url for s in servers])
    sample(engine, policy, PROMPTS)
    for s in servers:
        s.dies_at = "/v1/completions"
    servers[0].away = 5
    assert [g.token_ids for g in sample(engine, policy, PROMPTS)] == REPLIES
    assert "none answers; waiting up to 300 s" in capsys.readouterr().err
    assert [s.count("/collective_rpc") for s in servers] == [2, 1, 1]


@pytest.mark.parametrize("path", ["/v1/completions", "/collective_rpc"])
def test_where_all_stay_away_the_error_names_them(servers, policy, path):
    engine = VLLM(addresses=[s.url for s in servers], restart_wait=0.0)
    for s in servers:
        s.dies_at = path
    with pytest.raises(
        EngineError, match=r"no answer for 0 s \(generation.engine.restart_wait\)"
    ) as caught:
        sample(engine, policy, PROMPTS)
    assert all(s.url in str(caught.value) for s in servers)


def test_a_completion_that_waited_for_room_never_reaches_a_server_without_the_weights(
    server, policy
):
    """One that was back before it was missed: started again, it has the weights of its start."""
    engine, drops = VLLM(addresses=[server.url], max_rows=1), ["drop"]
    server.holds = lambda handler: drops.pop() if drops else None
    assert [g.token_ids for g in sample(engine, policy, PROMPTS[:2])] == REPLIES[:2]
    push = ["/collective_rpc", "/reset_prefix_cache"]
    assert [path for path, _ in server.asked] == [
        *push,
        "/v1/completions",
        *push,
        "/v1/completions",
        "/v1/completions",
    ]


@pytest.mark.slow
def test_servers_that_are_lost_again_and_again_end_the_run(server, policy):
    engine, rounds = VLLM(addresses=[server.url]), []

    def die(handler):
        server.absences = 3
        rounds.append(1)

    server.holds = die
    with pytest.raises(EngineError, match=r"all were lost 6 times in one rollout"):
        sample(engine, policy, [(5,)])
    assert len(rounds) == 6


def drop_ten(handler) -> str | None:
    """Drops the completion whose prompt ends in 10."""
    return "drop" if handler.server.asked[-1][1]["prompt"][-1] == 10 else None


@pytest.mark.parametrize("count", [1, 2])
def test_a_completion_that_servers_lose_three_times_though_they_are_there_is_an_error(
    servers, policy, count
):
    """As behind a proxy with a limit of time."""
    used = servers[:count]
    engine = VLLM(addresses=[s.url for s in used], max_rows=1)
    for s in used:
        s.holds = drop_ten
    with pytest.raises(EngineError, match=r"lost the same completion 3 times") as caught:
        sample(engine, policy, [(1, 2, 10), (11,), (12,), (13,)], max_new_tokens=7)
    said = str(caught.value)
    assert "a prompt of 3 tokens, max_new_tokens=7" in said and servers[0].url in said
    assert sum(at.count((10, 0)) for at in sampled_at(used)) == 2 * count + 1


@pytest.mark.slow
def test_a_completion_that_waited_for_its_turn_was_not_lost(server, policy):
    """The server drops each of six completions once; the last has waited through most of it."""
    engine, left = VLLM(addresses=[server.url], max_rows=1), {ids[-1] for ids in PROMPTS}

    def drop_once(handler):
        last = handler.server.asked[-1][1]["prompt"][-1]
        if last in left:
            left.remove(last)
            return "drop"
        return None

    server.holds = drop_once
    assert [g.token_ids for g in sample(engine, policy, PROMPTS)] == REPLIES


def test_a_completion_may_be_lost_often_where_the_servers_go_away(server, policy):
    """Each time it waits for them; then another limit ends it."""
    engine, left = VLLM(addresses=[server.url]), [3, 3, 3, 3]

    def die(handler):
        server.absences = left.pop() if left else 0

    server.holds = die
    assert [g.token_ids for g in sample(engine, policy, [(5,)])] == [(6, EOS)]


def test_a_completion_that_nobody_waits_for_is_given_up(server, policy):
    """The connection closes, by which a server knows."""
    engine, asked, closed = (
        VLLM(addresses=[server.url], max_rows=1),
        threading.Event(),
        threading.Event(),
    )

    def hold(handler):
        asked.set()
        handler.connection.settimeout(30)
        if handler.connection.recv(1) == b"":
            closed.set()

    async def give_up():
        await engine.load(policy, 0)
        running = [
            asyncio.create_task(engine.generate(key, (5,), 1, SamplingParams(admission="free")))
            for key in range(2)
        ]
        await asyncio.to_thread(asked.wait, 30)
        with pytest.raises(EngineError, match="2 completions are being sampled"):
            await engine.load(policy, 1)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await asyncio.to_thread(closed.wait, 30)

    server.holds = hold
    asyncio.run(give_up())
    server.holds = None
    assert closed.is_set() and server.count("/v1/completions") == 1  # the other waited for room
    assert [g.token_ids for g in sample(engine, policy, [(5,)])] == [(6, EOS)]


def test_a_server_that_was_never_there_is_told_at_once(server, policy):
    message = r"generation.engine.addresses=http://127.0.0.1:9: nothing answers there.*vllm serve"
    with pytest.raises(EngineError, match=message):
        sample(VLLM(addresses=[server.url, "http://127.0.0.1:9"]), policy, [(5,)])


def test_servers_of_different_models_and_a_full_folder_are_told(servers, policy, monkeypatch):
    engine = VLLM(addresses=[s.url for s in servers])
    with (
        monkeypatch.context() as full,
        pytest.raises(
            EngineError, match=r"version 3 cannot be written there \(.*No space left.*make room"
        ),
    ):
        full.setattr(
            vllm_pool,
            "save_weights",
            lambda *_, **__: os.write(os.open("/dev/full", os.O_WRONLY), b"x"),
        )
        sample(engine, policy, [(5,)], version=3)
    assert not list(engine.backend.folder.iterdir()) and sample(engine, policy, [(5,)])[
        0
    ].token_ids == (
        6,
        EOS,
    )  # nothing is lost
    servers[1].model = "another"
    with pytest.raises(
        EngineError,
        match=rf"{servers[0].url} serves 'base' and {servers[1].url} serves 'another'; start all",
    ):
        sample(VLLM(addresses=[s.url for s in servers]), policy, [(5,)])


@pytest.mark.parametrize(
    ("rank", "path", "hint"),
    [
        (0, "/collective_rpc", "VLLM_SERVER_DEV_MODE=1"),
        (2, "/v1/load_lora_adapter", "--enable-lora"),
    ],
)
def test_a_server_without_what_a_push_needs_is_told_how_to_start(server, rank, path, hint):
    server.missing = {path}
    with pytest.raises(EngineError, match=rf"{path} answers 404: .*no such path.*{hint}"):
        sample(VLLM(addresses=[server.url]), load_policy(path="tiny", lora=LoRA(rank=rank)), [(5,)])


def test_a_server_that_took_half_of_a_push_gets_all_of_it_again(server, policy):
    engine, before = (
        VLLM(addresses=[server.url]),
        {name: weight.clone() for name, weight in policy.model.state_dict().items()},
    )
    sample(engine, policy, [(5,)])
    step(policy)
    server.missing = {"/reset_prefix_cache"}
    with pytest.raises(EngineError):
        sample(engine, policy, [(5,)])
    server.missing = set()
    policy.model.load_state_dict(before)
    sample(engine, policy, [(5,)])
    assert server.count("/collective_rpc") == 3


def test_a_started_server_that_ends_is_told_with_its_last_lines(
    fakes, policy, tmp_path, monkeypatch
):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho the kernel is on fire\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(vllm_pool, "POLL", 0.01)
    with pytest.raises(
        EngineError,
        match=r"ended with status 3; the last lines of its log:\n  the kernel is on fire",
    ):
        sample(VLLM(addresses=["start"], restart_wait=60.0), policy, [(5,)])


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.slow
def test_without_vllm_the_config_says_what_to_install(monkeypatch):
    """Before a model is loaded."""
    monkeypatch.setattr(vllm_engine, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"generation.engine: vLLM is not installed: pip install -e '.\[vllm\]'"
    ):
        experiment(compose(["generation=vllm"]))
    experiment(compose(["generation=vllm", "generation.engine.addresses=[http://localhost:8000]"]))


@pytest.mark.parametrize("key", ["server", "addresses"])
def test_servers_that_only_a_run_folder_names_need_trust(key):
    node = {"_target_": "rlkit.extras.vllm.VLLM", key: ["http://elsewhere"]}
    assert list(find_unsafe_values(node, Folder(conf_dir())))


def test_two_processes_that_would_each_start_a_vllm_are_refused(monkeypatch):
    monkeypatch.setattr(vllm_engine, "find_spec", lambda name: True)  # as if vLLM were installed
    words = ["generation=vllm", "generation.engine.addresses=[start]", "asynchrony=overlap"]
    with pytest.raises(ConfigError, match="each would start a vLLM of its own"):
        experiment(compose(words))


@pytest.mark.parametrize(
    "wrong",
    [
        {"addresses": ["localhost:8000"]},
        {"addresses": ["start", "http://localhost:8000"]},
        {"addresses": ["http://localhost:8000"] * 2},
        {"max_rows": 0},
        {"restart_wait": -1.0},
        {"gpu_memory_utilization": 1.5},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        VLLM(**wrong)
