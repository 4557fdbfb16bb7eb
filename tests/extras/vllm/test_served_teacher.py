"""A teacher behind a server gives what the same teacher gives in process; the server is scripted
and answers from a tiny model.

The same against vLLM itself: test_vllm_real.py.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler

import pytest
import torch

from dripping_server import drips
from laws.test_hangs import quick  # noqa: F401 (a fixture)
from quiet_server import QuietServer
from rlkit import collect
from rlkit.algorithm import Stream
from rlkit.config.compose import compose, experiment
from rlkit.errors import ConfigError, EngineError
from rlkit.extras.vllm import server, vllm_teacher
from rlkit.extras.vllm.teacher import ServedTeacher
from rlkit.functional import sampled_divergence, top_k_divergence
from rlkit.models.load import load_policy
from rlkit.system import rng
from rlkit.training.learner import Learner
from rlkit.training.selfcheck import check_teacher
from rlkit.training.teachers import path_teacher
from rlkit.training.update import streams

LOSSES = {
    "sampled": sampled_divergence,
    "top_k": partial(top_k_divergence, k=5, chosen_by="teacher"),
}
COMMON = [
    "task=arithmetic",
    "trainer.threads=1",
    "trainer.accelerator=cpu",
    "batch.prompts=2",
    "batch.group_size=3",
    "evaluation.n=0",
    "algorithm=opd",
    "algorithm.minibatches=1",
    "generation.max_new_tokens=12",
    "logger=none",
    "task.max_samples=16",
]


class Handler(BaseHTTPRequestHandler):
    """`vllm serve` as far as a teacher needs it."""

    def do_GET(self):
        self.answer(
            {"data": [{"id": "teacher", "max_model_len": self.server.longest, "parent": None}]}
        )

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/detokenize":
            return self.answer({"prompt": self.server.tokenizer.decode(body["tokens"])})
        self.server.asked.append(body["prompt"])
        ids, k = torch.tensor(body["prompt"]), body["prompt_logprobs"]
        with torch.no_grad():
            logp = self.server.model(ids[None]).logits[0, :-1].log_softmax(-1)
        named = [
            [int(token), *row.topk(k).indices.tolist()]
            for token, row in zip(ids[1:], logp, strict=True)
        ]
        said = [
            {str(v): {"logprob": float(row[v])} for v in own}
            for own, row in zip(named, logp, strict=True)
        ]
        return self.answer({"choices": [{"prompt_logprobs": [None, *said]}]})

    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_): ...


@contextmanager
def serving(policy):
    with QuietServer(("127.0.0.1", 0), Handler) as http:
        http.model, http.tokenizer, http.longest, http.asked = (
            policy.model,
            policy.renderer.tokenizer,
            4096,
            [],
        )
        http.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield http
        finally:
            http.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, tiny):
    """A folder with another model of the policy's tokenizer, and it as a policy."""
    folder, model = tmp_path_factory.mktemp("teacher"), copy.deepcopy(tiny.model)
    with torch.no_grad(), rng.seed_block(3):
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    model.save_pretrained(folder)
    tiny.renderer.tokenizer.save_pretrained(folder)
    return folder, load_policy(path=str(folder))


@pytest.fixture(scope="module")
def played(tiny):
    x = experiment(compose([*COMMON, "teacher=start"]))
    tasks = x.task(split="train")[:2]
    found = collect(
        tiny,
        tasks,
        environment=x.environment,
        engine=x.generation.engine,
        group_size=3,
        seed=1,
        **x.generation.params,
    )
    return x, [r._replace(reward=0.0, rewards={"task": 0.0}) for r in found]


def flat(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def learner_of(x, tiny, teacher, loss):
    x = x._replace(
        algorithm=x.algorithm._replace(streams={"teacher": Stream(1.0, "sampled", loss=loss)}),
        teacher=teacher,
    )
    return Learner(x, tiny._replace(model=copy.deepcopy(tiny.model)), exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_every_token_and_the_weights_after_two_steps_are_those_of_the_teacher_in_process(
    loss, played, teacher, tiny, monkeypatch
):
    """Tokens to 1e-5 nats; the weights after two steps of plain descent to 1e-4 of the way that
    they went."""
    x, rollouts = played
    folder, behind = teacher
    start = flat(tiny.model)
    seen, real = [], streams.compute_divergences
    monkeypatch.setattr(
        streams, "compute_divergences", lambda *given: seen.append(real(*given)) or seen[-1]
    )
    after = []
    with serving(behind) as one, serving(behind) as two:
        for own in (path_teacher(path=str(folder)), vllm_teacher(addresses=[one.url, two.url])):
            learner = learner_of(
                x._replace(optimizer=partial(torch.optim.SGD, lr=0.01)), tiny, own, LOSSES[loss]
            )
            for _ in range(2):
                learner.step(rollouts)
            after.append(flat(learner.model))
        assert len(one.asked) == len(two.asked) == 6  # two steps of six rows, dealt in turn
    half = len(seen) // 2
    assert half == 2 and all(tokens.abs().max() > 0.01 for tokens in seen)
    for ours, theirs in zip(seen[:half], seen[half:], strict=True):
        assert (ours - theirs).abs().max() < 1e-5
    assert 0 < (after[0] - after[1]).norm() < 1e-4 * (after[0] - start).norm()


@pytest.mark.slow
def test_each_part_of_a_mixture_is_scored_by_its_own_servers(played, teacher, tiny):
    """The step of two teachers that are served is that of the same two in process; each server is
    asked about its own part alone."""
    x, rollouts = played
    folder, behind = teacher
    mixed = [
        r._replace(task=r.task._replace(part=("one", "two")[i >= 3]))
        for i, r in enumerate(rollouts)
    ]
    after = []
    with serving(behind) as one, serving(tiny) as two:
        served = vllm_teacher(parts={"one": [one.url], "two": [two.url]})
        for own in (path_teacher(paths={"one": str(folder), "two": "tiny"}), served):
            learner = learner_of(
                x._replace(optimizer=partial(torch.optim.SGD, lr=0.01)),
                tiny,
                own,
                sampled_divergence,
            )
            learner.step(mixed)
            after.append(flat(learner.model))
        prompts = [
            [list(r.steps[0].prompt_ids) for r in own] for own in (rollouts[:3], rollouts[3:])
        ]
        for http, own in ((one, prompts[0]), (two, prompts[1])):
            assert len(http.asked) == 3 and all(ids[: len(own[0])] == own[0] for ids in http.asked)
    moved = (after[0] - flat(tiny.model)).norm()
    assert 0 < (after[0] - after[1]).norm() < 1e-4 * moved


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides, says",
    [
        (["teacher.addresses=[]"], "teacher.addresses=[http://HOST:8000]"),
        (
            ["+teacher.parts.one=[http://127.0.0.1:9]"],
            "of each part of a mixture as +teacher.parts.PART",
        ),
        (["teacher.addresses=http://a:1"], "teacher.addresses: 'http://a:1' is not a list"),
        (["+teacher.parts.a=5"], "teacher.parts.a: 5 is not text or a list"),
        (["algorithm=gkd"], "compares whole distributions"),
        (
            ["generation.temperature=0.7"],
            "generation.temperature=0.7: teacher=vllm gives log-probs at temperature 1",
        ),
    ],
)
def test_what_a_server_cannot_give_is_refused(overrides, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        experiment(
            compose([*COMMON, "teacher=vllm", "teacher.addresses=[http://127.0.0.1:9]", *overrides])
        )


@pytest.mark.slow
def test_a_server_that_is_not_the_teacher_is_refused_before_a_model_is_loaded(tiny):
    """One that does not answer, serves another model, or decodes an id to another text; the first
    such token is named."""

    def refusal(url, *more):
        with pytest.raises(ConfigError) as error:
            check_teacher(
                experiment(compose([*COMMON, "teacher=vllm", f"teacher.addresses=[{url}]", *more]))
            )
        return str(error.value)

    other = tiny._replace(renderer=copy.deepcopy(tiny.renderer))
    tokens = json.loads(other.renderer.tokenizer.backend_tokenizer.to_str())
    names = sorted(tokens["model"]["vocab"], key=tokens["model"]["vocab"].get)
    vocab = tokens["model"]["vocab"]
    vocab[names[400]], vocab[names[500]] = vocab[names[500]], vocab[names[400]]
    swapped = type(tiny.renderer.tokenizer.backend_tokenizer).from_str(json.dumps(tokens))
    with serving(other) as http:
        assert f"{http.url} serves teacher; name that" in refusal(http.url, "teacher.model=another")
        http.tokenizer = swapped
        first = min(vocab[names[400]], vocab[names[500]])
        assert re.search(
            rf"another vocabulary than model\.path=tiny .*, id {first}\)", refusal(http.url)
        )
    assert "does not answer" in refusal(http.url)


def test_a_server_that_dies_is_passed_over_and_without_another_the_run_ends_with_the_reason(
    teacher, tiny
):
    ids, mask = (
        torch.tensor([[5, 6, 7, 8], [6, 7, 8, 9]]),
        torch.tensor([[False, True, True, False]] * 2),
    )
    with serving(teacher[1]) as one:
        with serving(teacher[1]) as two:
            served = ServedTeacher([one.url, two.url])
            served.check("tiny")
            before, _ = served.read(ids, mask, k=2, columns=768)
        after, logits = served.read(ids, mask, k=2, columns=768)
        assert torch.equal(before, after) and [len(row) for row in one.asked] == [3, 3, 3]
        assert torch.allclose(logits(after).exp().sum(-1), torch.ones(4), atol=1e-5)
        one.longest = 3
        served.checked = False
        with pytest.raises(ConfigError, match="does not answer"):
            served.check("tiny")
    with pytest.raises(EngineError, match=r"does not answer .*nor does another"):
        served.read(ids, mask, k=2, columns=768)


@pytest.mark.slow
def test_servers_of_one_part_that_die_in_the_middle_of_a_run_end_it_with_their_key(
    played, teacher, tiny
):
    """Those of the other part do not stand in for them: they serve another teacher."""
    x, rollouts = played
    mixed = [
        r._replace(task=r.task._replace(part=("one", "two")[i >= 3]))
        for i, r in enumerate(rollouts)
    ]
    with serving(teacher[1]) as one:
        with serving(tiny) as two:
            learner = learner_of(
                x, tiny, vllm_teacher(parts={"one": one.url, "two": two.url}), sampled_divergence
            )
            learner.step(mixed)
        with pytest.raises(EngineError, match=f"teacher.parts.two: {two.url} does not answer"):
            learner.step(mixed)
        assert len(one.asked) == 6  # three a step, and none of the other part's


@pytest.mark.slow
def test_a_teacher_that_never_answers_is_named(quick, capfd, monkeypatch):  # noqa: F811
    monkeypatch.setattr(server, "LONGEST", 0.3)
    monkeypatch.setattr(server.Server.ask, "__kwdefaults__", {"hint": "", "limit": 0.3})
    with drips() as address:
        teacher = ServedTeacher([address.removesuffix("/v1")])
        for own in teacher.servers:
            own.max_length = 100
        with pytest.raises(EngineError, match="does not answer"):
            teacher.read(
                torch.ones(1, 3, dtype=torch.long),
                torch.ones(1, 3, dtype=torch.bool),
                k=0,
                columns=4,
            )
        assert (
            f"for the server {address.removesuffix('/v1')}, in 1 episode" in capfd.readouterr().err
        )
