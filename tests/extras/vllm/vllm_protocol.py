"""A server that speaks the protocol of `vllm serve`, as far as rlkit uses it, on this machine."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from peft import set_peft_model_state_dict
from safetensors.torch import load_file

from rlkit.models import LoRA, load_policy
from rlkit.system.adapters import has_adapters

EOS = 0


class Handler(BaseHTTPRequestHandler):
    """`vllm serve` as far as the engine uses it: the completion is the prompt's last id + 1, and
    the end."""

    def do_GET(self):
        self.server.absences -= 1
        models = [
            {"id": "rlkit-1", "parent": "base"},
            {"id": self.server.model, "max_model_len": self.server.length, "parent": None},
        ]
        self.answer({"data": models} if self.path == "/v1/models" else {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        if self.path == self.server.dies_at:
            self.server.dies_at, self.server.absences = None, self.server.away
        if self.path in self.server.missing:
            self.answer({"error": "no such path"}, 404)
        elif self.path == "/v1/completions":
            if self.server.holds is not None and self.server.holds(self) == "drop":
                return
            ids = [body["prompt"][-1] + 1, EOS]
            self.answer(
                {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": [-1.0, -2.0]}}]}
            )
        else:
            self.answer("Success")

    def answer(self, body, status=200):
        if self.server.absences > 0:
            return  # the connection closes without a word
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_): ...


@contextmanager
def serving(handler=Handler):
    """A server. `dies_at`: the path at which it goes away, for `away` looks at it; `holds`: what it
    does before a completion."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        http.model, http.asked, http.missing, http.dies_at, http.absences, http.away, http.holds = (
            "base",
            [],
            set(),
            None,
            0,
            1 << 30,
            None,
        )
        http.length, http.handle_error = 100, lambda *_: None  # a client that gave up
        http.url = f"http://127.0.0.1:{http.server_address[1]}"
        http.count = lambda path: [asked for asked, _ in http.asked].count(path)
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield http
        finally:
            http.shutdown()
            thread.join()


class Model(Handler):
    """One that samples from the weights that it was given. `salt` moves the draws: with another one
    a server gives other tokens."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        if self.server.holds is not None:
            self.server.holds(self)
        with self.server.lock, torch.no_grad():
            if self.path == "/collective_rpc":
                self.take(load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors"))
            if self.path == "/v1/load_lora_adapter":
                self.take(load_file(Path(body["lora_path"]) / "adapter_model.safetensors"))
            if self.path == "/v1/completions":
                self.choose()
                self.answer({"choices": [sampled(self.server.policy, body, self.server.salt)]})
            else:
                self.answer("Success")

    def take(self, weights):
        """Weights were pushed: all, or those of an adapter."""
        put(self.server.policy.model, weights)

    def choose(self):
        """A completion is asked for."""


class Liar(Model):
    """One that accepts every push, and samples from those weights that `http.lie` takes."""

    def take(self, weights):
        self.server.given.append(weights)

    def choose(self):
        put(self.server.policy.model, self.server.lie(self.server.given, self.server.calls))
        self.server.calls += 1


def put(model, weights):
    if has_adapters(model):
        set_peft_model_state_dict(model, weights)
    else:
        model.load_state_dict(weights)


def sampled(policy, body, salt):
    """A completion, a token at a time."""
    ids, logprobs = list(body["prompt"]), []
    draws = torch.Generator().manual_seed((body["seed"] + salt) % (1 << 62))
    while len(logprobs) < body["max_tokens"] and (
        not logprobs or ids[-1] not in body["stop_token_ids"]
    ):
        own = (policy.model(torch.tensor([ids])).logits[0, -1] / body["temperature"]).log_softmax(
            -1
        )
        ids.append(int(torch.multinomial(own.exp(), 1, generator=draws)))
        logprobs.append(float(own[ids[-1]]))
    return {"token_ids": ids[len(body["prompt"]) :], "logprobs": {"token_logprobs": logprobs}}


@contextmanager
def sampling(salt=0, lie=None, rank=0):
    """A server of the embedded model."""
    with serving(Liar if lie else Model) as http:
        http.policy, http.lock, http.salt = (
            load_policy(path="tiny", lora=LoRA(rank=rank)),
            threading.Lock(),
            salt,
        )
        http.lie, http.given, http.calls = lie, [], 0
        http.length = 512
        yield http
