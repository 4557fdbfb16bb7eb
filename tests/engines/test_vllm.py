"""generation=vllm without vLLM: what it is told and when, what a server is asked, and what is said where one is missing.

The same against vLLM itself: test_vllm_real.py.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rlkit.config.compose import compose, experiment
from rlkit.engines import VLLM, vllm, vllm_server
from rlkit.engines.vllm_weights import fingerprint, whole_weights
from rlkit.errors import ConfigError, EngineError
from rlkit.models import LoRA, load_policy

EOS = 0


class Fake:
    """A backend whose reply is the context's last id + 1, and that notes what it is told."""

    max_length = 1 << 20

    def __init__(self) -> None:
        self.told: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.running: list[tuple] = []
        self.lost = 0  # times that it is lost before it answers

    def push_weights(self, weights: Iterator) -> None:
        self.weights = {name: weight.clone() for name, weight in weights}
        self.told.append("weights")

    def push_adapter(self, save) -> None:
        self.told.append("adapter")

    def submit(self, index, context, sampling) -> None:
        self.running.append((index, (context[-1] + 1,), (-0.5,)))

    def finished(self):
        if self.lost:
            self.lost, self.running = self.lost - 1, []
            raise vllm_server.Lost
        return [vllm_server.Sampled(*self.running.pop())]

    def recover(self) -> None:
        self.told.append("recovered")

    def abort(self) -> None:
        self.running = []

    def wake(self) -> bool:
        return True

    def sleep(self) -> None: ...

    def close(self) -> None:
        self.told.append("closed")


@pytest.fixture
def fakes(monkeypatch):
    """Every backend that an engine in this process starts."""
    made: list[Fake] = []

    def make(*_, **__):
        made.append(Fake())
        return made[-1]

    monkeypatch.setattr(vllm, "find_spec", lambda name: True)
    monkeypatch.setattr(vllm, "InProcess", make)
    return made


@pytest.fixture
def policy():
    return load_policy(path="tiny")


def step(policy) -> None:
    """One optimizer step of the fused kind, which moves no version counter of autograd."""
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(trained, lr=1e-4, fused=True).step()


# -------------------------------------------------------------------------------------------------- what is pushed


def test_weights_go_when_they_moved_and_only_then(fakes, policy):
    engine = VLLM()
    for _ in range(2):
        assert [g.token_ids for g in engine(policy, [(5,), (7,)], [1, 2])] == [(6,), (8,)]
    step(policy)
    engine(policy, [(5,)], [1])
    assert [f.told for f in fakes] == [["weights", "weights"]]
    for name, weight in policy.model.named_parameters():
        assert torch.equal(fakes[0].weights[name], weight)
    assert torch.equal(fakes[0].weights["lm_head.weight"], policy.model.lm_head.weight)  # shared with the embedding, and still there


def test_under_lora_the_base_goes_once_and_the_adapter_when_it_moved(fakes):
    policy, engine = load_policy(path="tiny", lora=LoRA(rank=2)), VLLM()
    for _ in range(2):
        engine(policy, [(5,)], [1])
    step(policy)
    engine(policy, [(5,)], [1])
    assert fakes[0].told == ["weights", "adapter", "adapter"]
    plain = dict(load_policy(path="tiny").model.named_parameters(remove_duplicate=False))
    assert fakes[0].weights.keys() == plain.keys() and all(torch.equal(fakes[0].weights[n], w) for n, w in plain.items())


def test_a_merged_adapter_is_the_model_that_trains(policy):
    """Base and adapter in one: the forward pass of the plain model with the merged weights is that of the adapted one."""
    adapted = load_policy(path="tiny", lora=LoRA(rank=2))
    with torch.no_grad():
        for name, weight in adapted.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.05)
        ids = torch.tensor([[5, 80, 90]])
        before = policy.model(ids).logits.clone()
        policy.model.load_state_dict(dict(whole_weights(adapted.model, merge=True)))
        torch.testing.assert_close(policy.model(ids).logits, adapted.model(ids).logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(before, adapted.model(ids).logits, rtol=1e-2, atol=1e-2)


def test_an_interrupted_push_is_made_again(fakes, policy, monkeypatch):
    engine = VLLM()
    engine(policy, [(5,)], [1])
    step(policy)
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(fakes[0], "push_weights", lambda weights: 1 / 0)
        engine(policy, [(5,)], [1])
    engine(policy, [(5,)], [1])
    assert fakes[0].told == ["weights", "weights"]


def test_another_model_gets_a_vllm_of_its_own(fakes, policy):
    engine = VLLM()
    engine(policy, [(5,)], [1])
    engine(load_policy(path="tiny_guess"), [(5,)], [1])
    assert [f.told for f in fakes] == [["weights", "closed"], ["weights"]]


@pytest.mark.parametrize("other", [[0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 4.0, 3.0001], [1.0, 2.0, 3.0, 4.0000005]])
def test_any_change_shows_in_the_fingerprint(other):
    """Also where a hash of the bits alone cancels out: four zeros and four ones have the same."""
    start = [0.0] * 4 if other == [1.0] * 4 else [0.0, 0.0, 0.0, 1.5] if other[0] == 0 else [1.0, 2.0, 3.0, 4.0]
    assert fingerprint([torch.tensor(start)]) == fingerprint([torch.tensor(start)]) != fingerprint([torch.tensor(other)])


# ------------------------------------------------------------------------------------------------------ the loop


def test_what_follows_is_sampled_under_the_same_index(fakes, policy):
    replies = []

    def follow(index, reply):
        replies.append((index, reply.token_ids))
        return (reply.token_ids, 9) if index == 1 and len([i for i, _ in replies if i == 1]) < 3 else None

    last = VLLM()(policy, [(5,), (50,)], [1, 2], follow=follow)
    assert sorted(replies) == [(0, (6,)), (1, (51,)), (1, (52,)), (1, (53,))]
    assert [g.token_ids for g in last] == [(6,), (53,)]


def test_after_a_loss_the_weights_and_all_that_waits_go_again(fakes, policy):
    """A server that comes back has the weights it was started with."""
    engine = VLLM()
    engine(policy, [(5,)], [1])
    fakes[0].lost = 2
    assert [g.token_ids for g in engine(policy, [(5,), (7,)], [1, 2])] == [(6,), (8,)]
    assert fakes[0].told == ["weights", "recovered", "weights", "recovered", "weights"]


def test_an_error_in_between_leaves_nothing_running(fakes, policy):
    engine = VLLM()
    with pytest.raises(ZeroDivisionError):
        engine(policy, [(5,), (7,)], [1, 2], follow=lambda index, reply: 1 / 0)
    assert fakes[0].running == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": 0.001},
        {"temperature": 2.5},
        {"max_new_tokens": 0},
        {"top_p": 0.0},
        {"top_k": -1},
        {"max_thinking_tokens": 3},
    ],
)
def test_numbers_out_of_range_are_refused(fakes, policy, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        VLLM()(policy, [(5,)], [1], **wrong)
    assert not fakes


# ------------------------------------------------------------------------------------------------- in this process


class FakeLLM:
    """The LLM class of vLLM: one token a step for each request, then it ends."""

    calls: list[tuple]
    model_config = SimpleNamespace(max_model_len=100)

    def __init__(self, model, **arguments):
        FakeLLM.calls = [("start", arguments)]
        torch.set_num_threads = None  # as vLLM does on a CPU
        self.llm_engine, self.requests = self, []

    def collective_rpc(self, method, kwargs):
        self.calls.append((method, len(list(kwargs["weights_iterator"]))))

    def reset_prefix_cache(self):
        self.calls.append(("reset",))

    def wake_up(self, tags):
        self.calls.append(("wake", *tags))

    def sleep(self, level):
        self.calls.append(("sleep", level))

    def add_lora(self, request):
        self.calls.append(("adapter", request.name))

    def add_request(self, name, prompt, parameters, lora_request):
        self.calls.append(("request", name, prompt, parameters.given, lora_request and lora_request.name))
        self.requests.append(name)

    def step(self):
        name = self.requests.pop(0)
        output = SimpleNamespace(token_ids=[7, EOS], logprobs=[{7: SimpleNamespace(logprob=-1.0)}, {EOS: SimpleNamespace(logprob=-2.0)}])
        return [SimpleNamespace(finished=True, request_id=name, outputs=[output])]

    def abort_request(self, names):
        self.calls.append(("abort", *names))


@pytest.fixture
def fake_llm(monkeypatch):
    """vLLM's modules, as far as the engine uses them."""
    names = ("vllm", "vllm.inputs", "vllm.sampling_params", "vllm.lora", "vllm.lora.request")
    modules = {name: ModuleType(name) for name in names}
    modules["vllm"].LLM = FakeLLM
    modules["vllm"].SamplingParams = lambda **given: SimpleNamespace(given=given)
    modules["vllm.inputs"].tokens_input = lambda ids: ids
    modules["vllm.sampling_params"].RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")
    modules["vllm.lora.request"].LoRARequest = lambda name, number, path: SimpleNamespace(name=name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(vllm, "find_spec", lambda name: True)
    for name in (
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_LOGGING_LEVEL",
        "VLLM_NO_USAGE_STATS",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_HOST_IP",
    ):
        monkeypatch.setenv(name, "before")  # and put back after the test
    return FakeLLM


def test_a_request_says_everything_itself(fake_llm, policy):
    """No default of vLLM or of the model's own generation config decides anything."""
    threads = torch.set_num_threads
    policy = policy._replace(eos_token_ids=(EOS, 3), context_length=60)
    (reply,) = VLLM(arguments={"max_model_len": 50})(policy, [tuple(range(48))], [1 << 62], max_new_tokens=9, temperature=0.7)
    assert reply == ((7, EOS), (-1.0, -2.0), "stop", ())
    started, (_, name, prompt, given, _) = fake_llm.calls[0][1], next(c for c in fake_llm.calls if c[0] == "request")
    assert (name, prompt, given["seed"], given["max_tokens"]) == ("0", list(range(48)), 1 << 62, 9)
    assert (given["temperature"], given["top_p"], given["top_k"], given["min_p"], given["repetition_penalty"]) == (0.7, 1.0, 0, 0.0, 1.0)
    assert given["ignore_eos"] and given["stop_token_ids"] == [EOS, 3] and given["logprobs"] == 0
    assert started["logprobs_mode"] == "processed_logprobs" and started["generation_config"] == "vllm" and started["max_model_len"] == 50
    assert torch.set_num_threads is threads


def test_a_context_beyond_what_vllm_was_started_for_is_refused(fake_llm, policy):
    with pytest.raises(ConfigError, match=r"100 tokens.*max_model_len"):
        VLLM()(policy, [(5,) * 100], [1])


@pytest.mark.parametrize("lora", [False, True])
def test_asleep_it_leaves_the_gpu_to_the_trainer(fake_llm, monkeypatch, lora):
    """Between calls. Weights that move are forgotten and pushed before the cache needs its room; a base that does not move is kept."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    policy, engine = load_policy(path="tiny", lora=LoRA(rank=2 if lora else 0)), VLLM()
    engine(policy, [(5,)], [1])
    engine.backend.sleeps = True  # as on a GPU
    for _ in range(2):
        engine(policy, [(5,)], [1])
        fake_llm.calls.append(("training",))
    told = [call[0] if call[0] == "request" else call for call in fake_llm.calls if call[0] not in ("start", "abort")]
    weights = len(list(whole_weights(policy.model, merge=False)))
    if lora:
        first = [("reload_weights", weights), ("reset",), ("adapter", "adapter-1"), "request", "request", ("sleep", 1), ("training",)]
        assert told == [*first, ("wake", "weights"), ("wake", "kv_cache"), "request", ("sleep", 1), ("training",)]
    else:
        first = [("reload_weights", weights), ("reset",), "request", "request", ("sleep", 2), ("training",)]
        again = [("wake", "weights"), ("reload_weights", weights), ("wake", "kv_cache"), ("reset",), "request", ("sleep", 2), ("training",)]
        assert told == first + again


# ---------------------------------------------------------------------------------------------------------- a server


class Handler(BaseHTTPRequestHandler):
    """`vllm serve` as far as the engine uses it: the reply is the prompt's last id + 1, and the end."""

    def do_GET(self):
        models = [{"id": "rlkit-1", "parent": "base"}, {"id": "base", "max_model_len": 100, "parent": None}]
        self.answer({"data": models} if self.path == "/v1/models" else {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        if self.path in self.server.missing:
            self.answer({"error": "no such path"}, 404)
        elif self.server.deaths:
            self.server.deaths -= 1
            self.close_connection = True
            return
        elif self.path == "/v1/completions":
            ids = [body["prompt"][-1] + 1, EOS]
            self.answer({"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": [-1.0, -2.0]}}]})
        else:
            self.answer("Success")

    def answer(self, body, status=200):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_): ...


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.asked, http.missing, http.deaths = [], set(), 0
        http.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield http
        http.shutdown()
        thread.join()


def test_a_server_gets_ids_and_seeds_and_gives_ids(server, policy):
    policy = policy._replace(eos_token_ids=(EOS,))
    engine = VLLM(server=server.url)
    replies = engine(policy, [(5,), (7, 8)], [3, 4], max_new_tokens=5, follow=lambda i, r: ((20,), 6) if r.token_ids[0] == 9 else None)
    assert replies[0] == ((6, EOS), (-1.0, -2.0), "stop", ()) and replies[1].token_ids == (21, EOS)
    assert [path for path, _ in server.asked[:2]] == ["/collective_rpc", "/reset_prefix_cache"]
    bodies = sorted((b for path, b in server.asked if path == "/v1/completions"), key=lambda b: b["seed"])
    assert [(b["prompt"], b["seed"], b["model"]) for b in bodies] == [([5], 3, "base"), ([7, 8], 4, "base"), ([20], 6, "base")]
    assert bodies[0]["ignore_eos"] and bodies[0]["return_token_ids"] and bodies[0]["max_tokens"] == 5


def test_a_server_gets_each_adapter_under_a_new_name(server):
    policy, engine = load_policy(path="tiny", lora=LoRA(rank=2)), VLLM(server=server.url)
    engine(policy, [(5,)], [1])
    step(policy)
    engine(policy, [(5,)], [1])
    told = [(path.rpartition("/")[2], body.get("lora_name") or body.get("model")) for path, body in server.asked]
    (_, first), (_, second) = (t for t in told if t[0] == "load_lora_adapter")
    assert first != second and told == [
        ("load_lora_adapter", first),
        ("completions", first),
        ("load_lora_adapter", second),
        ("unload_lora_adapter", first),
        ("completions", second),
    ]


def test_a_server_that_comes_back_gets_the_weights_again(server, policy, monkeypatch, capsys):
    monkeypatch.setattr(vllm_server, "POLL", 0.01)
    engine = VLLM(server=server.url)
    engine(policy, [(5,)], [1])
    server.deaths = 1  # at a completion
    assert [g.token_ids[0] for g in engine(policy, [(5,)], [1])] == [6]
    step(policy)
    server.deaths = 2  # at the push of the new weights, and at the next
    assert [g.token_ids[0] for g in engine(policy, [(5,), (7,)], [1, 2])] == [6, 8]
    pushes = [path for path, _ in server.asked].count("/collective_rpc")
    assert pushes == 1 + 1 + 3 and "no longer answers; waiting up to 300 s" in capsys.readouterr().err


def test_a_server_that_stays_away_is_one_message(server, policy):
    engine = VLLM(server=server.url, restart_wait=0.0)
    engine(policy, [(5,)], [1])
    server.shutdown()
    server.socket.close()
    with pytest.raises(EngineError, match=r"did not answer for 0 s \(generation.engine.restart_wait\)"):
        engine(policy, [(5,)], [1])


def test_a_server_that_was_never_there_is_told_at_once(policy):
    with pytest.raises(EngineError, match=r"generation.engine.server=http://127.0.0.1:9: nothing answers there.*vllm serve"):
        VLLM(server="http://127.0.0.1:9")(policy, [(5,)], [1])


@pytest.mark.parametrize(
    ("rank", "path", "hint"), [(0, "/collective_rpc", "VLLM_SERVER_DEV_MODE=1"), (2, "/v1/load_lora_adapter", "--enable-lora")]
)
def test_a_server_without_what_a_push_needs_is_told_how_to_start(server, rank, path, hint):
    server.missing = {path}
    with pytest.raises(EngineError, match=rf"{path} answers 404: .*no such path.*{hint}"):
        VLLM(server=server.url)(load_policy(path="tiny", lora=LoRA(rank=rank)), [(5,)], [1])


def test_a_started_server_that_ends_is_told_with_its_last_lines(tmp_path, monkeypatch):
    """A model folder that is none: with vLLM installed or without, the process ends."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho the kernel is on fire\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(vllm_server, "POLL", 0.01)
    with pytest.raises(EngineError, match=r"ended with status 3; the last lines of its log:\n  the kernel is on fire"):
        vllm_server.start(tmp_path, [], max_rows=1, restart_wait=60.0, devices=None, folder=None)


# ---------------------------------------------------------------------------------------------------------- refusals


def test_without_vllm_the_config_says_what_to_install(monkeypatch):
    """Before a model is loaded."""
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"generation.engine: vLLM is not installed: pip install -e '.\[vllm\]'"):
        experiment(compose(["generation=vllm"]))
    experiment(compose(["generation=vllm", "generation.engine.server=http://localhost:8000"]))


@pytest.mark.parametrize("wrong", [{"server": "localhost:8000"}, {"max_rows": 0}, {"restart_wait": -1.0}, {"gpu_memory_utilization": 1.5}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        VLLM(**wrong)
