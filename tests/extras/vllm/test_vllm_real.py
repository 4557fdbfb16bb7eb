"""vLLM itself, on a CPU, against the reference engine. It needs the environment of
tests/extras/vllm/vllm_env.sh; elsewhere it is skipped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from rlkit.engines import Transformers
from rlkit.environments import calculator, tool_schema
from rlkit.episodes import assemble, collect
from rlkit.errors import EngineError
from rlkit.extras.vllm import VLLM
from rlkit.extras.vllm.teacher import ServedTeacher
from rlkit.functional import mix
from rlkit.models import LoRA, encode_prompt, forward_logprobs, load_policy, pack
from rlkit.types import SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: tests/extras/vllm/vllm_env.sh"
    ),
    pytest.mark.filterwarnings("ignore"),  # its own, of what it imports
]
REFERENCE = Transformers()
QUESTIONS = (
    "Ann has 3 pens. Ann buys 4 more. How many pens does Ann have now?",
    "Ben has 5 hats.",
    "Ida has 20 boxes of 9 figs.",
)
ROUNDING = 1e-4  # nats: two orders of summation in float32


@pytest.fixture(scope="module")
def policy():
    return load_policy(path="tiny")


@pytest.fixture(scope="module")
def contexts(policy):
    return [
        tuple(
            encode_prompt(
                policy.renderer, [{"role": "user", "content": q}], [tool_schema(calculator)]
            )
        )
        for q in QUESTIONS
    ]


@pytest.fixture(scope="module")
def engine():
    """In this process; a token budget as small as the tests, so that it starts in seconds."""
    return VLLM(max_rows=64, arguments={"kv_cache_memory_bytes": 1 << 28})


def adapter():
    """The embedded model with an adapter, its A drawn from a seed: some draws are so badly
    conditioned that rounding passes ROUNDING."""
    torch.manual_seed(0)
    return load_policy(path="tiny", lora=LoRA(rank=3))


def move(policy, scale: float) -> None:
    """A change of the trained weights that changes replies."""
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name or (weight.requires_grad and "norm" in name):
                weight.add_(
                    scale
                    * torch.randn(
                        weight.shape, generator=torch.Generator().manual_seed(int(1000 * scale))
                    )
                )


def sample(engine, policy, contexts, seeds, **params):
    """A load, and one completion of each context, all at once."""

    async def both():
        await engine.load(policy, 0)
        given = SamplingParams(admission="free", **params)
        asked = enumerate(zip(contexts, seeds, strict=True))
        try:
            return await asyncio.gather(
                *(engine.generate(key, ids, seed, given) for key, (ids, seed) in asked)
            )
        finally:
            for key in range(len(contexts)):
                engine.release(key)

    return asyncio.run(both())


def agree(engine, policy, contexts, *, temperature: float = 0.0) -> list[tuple[int, ...]]:
    """The greedy replies are those of the reference engine, their log-probs equal up to
    rounding."""
    ours = sample(engine, policy, contexts, [1, 2, 3], max_new_tokens=24, temperature=temperature)
    theirs = sample(
        REFERENCE, policy, contexts, [1, 2, 3], max_new_tokens=24, temperature=temperature
    )
    assert [(g.token_ids, g.finish_reason) for g in ours] == [
        (g.token_ids, g.finish_reason) for g in theirs
    ]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=ROUNDING
        )
    return [g.token_ids for g in ours]


def test_greedy_replies_follow_the_weights(policy, engine, contexts):
    """After every change of the weights, and with a fused optimizer, which moves no version
    counter."""
    seen = [agree(engine, policy, contexts)]
    move(policy, 0.3)
    seen.append(agree(engine, policy, contexts))
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.01, fused=True)
    for weight in policy.model.parameters():
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(4))
    optimizer.step()
    optimizer.zero_grad()
    seen.append(agree(engine, policy, contexts))
    assert len({tuple(s) for s in seen}) == 3
    policy.model.load_state_dict(load_policy(path="tiny").model.state_dict())
    assert agree(engine, policy, contexts) == seen[0]


def test_weights_that_stay_are_not_pushed_again(policy, engine, contexts, monkeypatch):
    agree(engine, policy, contexts)
    monkeypatch.setattr(engine.backend.vllm.llm, "collective_rpc", None)
    agree(engine, policy, contexts)


def test_sampled_replies_are_those_of_their_seeds_with_log_probs_after_temperature(
    policy, engine, contexts
):
    """Alone, together and in another order; their log-probs are the trainer's at that
    temperature."""
    settings = {"max_new_tokens": 16, "temperature": 2.0}
    together = sample(engine, policy, contexts * 2, [7, 8, 9, 10, 11, 12], **settings)
    assert [g.token_ids for g in sample(engine, policy, contexts[2:] * 2, [12, 9], **settings)] == [
        together[5].token_ids,
        together[2].token_ids,
    ]
    assert len({g.token_ids for g in together}) > 3
    for context, reply in zip(contexts * 2, together, strict=True):
        ids = torch.tensor([context + reply.token_ids])
        mask = torch.arange(ids.shape[1])[None] >= len(context)
        with torch.no_grad():
            expected = forward_logprobs(policy.model, pack(ids, mask), temperature=2.0).logprobs[
                mask
            ]
        torch.testing.assert_close(torch.tensor(reply.logprobs), expected, rtol=0, atol=ROUNDING)
        assert (reply.finish_reason == "stop") == (reply.token_ids[-1] in policy.eos_token_ids)
        assert len(reply.token_ids) == 16 or reply.finish_reason == "stop"


def test_samples_have_the_distribution_of_the_policy(policy, engine, contexts):
    """First tokens of 2,000 replies at temperature 2: Pearson's χ² over cells of about a
    sixty-fourth of the probability each."""
    n, cells = 2000, 64
    replies = sample(
        engine,
        policy,
        contexts[:1] * n,
        [mix(5, i) for i in range(n)],
        max_new_tokens=1,
        temperature=2.0,
    )
    with torch.no_grad():
        probabilities = (policy.model(torch.tensor([contexts[0]])).logits[0, -1] / 2.0).softmax(-1)
    order = probabilities.argsort(descending=True)
    before = probabilities[order].cumsum(0) - probabilities[order]
    cell = torch.empty_like(order).scatter_(0, order, (before * cells).long().clamp(max=cells - 1))
    expected = n * torch.zeros(cells).index_add_(0, cell, probabilities)
    found = torch.bincount(cell[[g.token_ids[0] for g in replies]], minlength=cells)
    full = expected > 0  # a likely token is several cells by itself
    chi, degrees = (
        float(((found - expected)[full] ** 2 / expected[full]).sum()),
        int(full.sum()) - 1,
    )
    assert (
        degrees >= 8 and found[~full].sum() == 0 and chi < degrees + 5 * (2 * degrees) ** 0.5
    )  # five standard deviations


def test_episodes_with_tools_are_exact_on_every_token(policy, engine, experiment):
    """The default task through the whole loop: turns follow at once, and the trainer agrees with
    every sampled token."""
    tasks = experiment.task(split="train")[:4]
    rollouts = collect(
        policy,
        tasks,
        engine=engine,
        environment=experiment.environment,
        group_size=4,
        seed=5,
        max_new_tokens=48,
        temperature=1.0,
    )
    assert max(len(r.steps) for r in rollouts) > 1
    batch = assemble(rollouts, pad_token_id=policy.pad_token_id)
    with torch.no_grad():
        logprobs = forward_logprobs(
            policy.model, pack(batch.ids, batch.response_mask), temperature=1.0
        ).logprobs
    assert float((logprobs - batch.logprobs_sampler)[batch.response_mask].abs().max()) < ROUNDING


@pytest.mark.parametrize("merge", [False, True])
def test_an_adapter_goes_alone_or_merged(contexts, merge):
    """The base once, then the adapter after each change; merged, both as whole weights. Rank 3 has
    no room of its own in vLLM."""
    adapted = adapter()
    engine = VLLM(max_rows=16, merge=merge, arguments={"kv_cache_memory_bytes": 1 << 28})
    seen = []
    for scale in (0.05, 0.08):
        move(adapted, scale)
        seen.append(agree(engine, adapted, contexts))
    assert seen[0] != seen[1]
    engine.backend.close()


def test_servers_get_adapters_and_weights_and_are_missed(contexts, capfd):
    """Two, started by rlkit; further engines speak to them as to foreign ones. One is killed in the
    middle, then the other."""
    adapted = adapter()
    started = [
        VLLM(
            addresses=["start"],
            max_rows=16,
            restart_wait=600.0,
            arguments={"kv_cache_memory_bytes": 1 << 28},
        )
        for _ in range(2)
    ]
    seen = []
    for engine, scale in zip((*started, started[0]), (0.05, 0.08, 0.06), strict=True):
        move(adapted, scale)
        seen.append(agree(engine, adapted, contexts))
    assert seen[0] != seen[1] != seen[2]
    servers = [engine.backend.servers[0] for engine in started]
    several = VLLM(addresses=[server.url for server in servers])
    agree(several, adapted, contexts)
    complete = several.backend.servers[0].complete

    async def killed(*asked):
        running = asyncio.create_task(complete(*asked))
        await asyncio.sleep(0)
        os.killpg(servers[0].process.pid, signal.SIGKILL)
        return await running

    several.backend.servers[0].complete = killed
    agree(several, adapted, contexts)
    assert f"the vLLM server {servers[0].url} no longer answers" in capfd.readouterr().err
    agree(VLLM(addresses=[servers[1].url], merge=True), adapted, contexts)
    with pytest.raises(EngineError, match=r"ended with status -9; the last lines of its log:\n  "):
        agree(started[0], adapted, contexts)
    for engine in started:
        engine.backend.close()


def test_a_served_teacher_names_the_tokens_that_the_model_itself_names(policy, contexts):
    """Log-probs of a row's tokens and of the three likeliest at each, and the check of the
    vocabulary, by a server that rlkit starts."""
    engine = VLLM(
        addresses=["start"],
        max_rows=16,
        restart_wait=600.0,
        arguments={"kv_cache_memory_bytes": 1 << 28},
    )
    agree(engine, policy, contexts)
    served = ServedTeacher([engine.backend.servers[0].url])
    served.check("tiny")
    ids = torch.tensor([context[:18] for context in contexts])
    mask = (torch.arange(18) >= 5).expand(len(ids), -1)
    read, logits = served.read(ids, mask, k=3, columns=768)
    named = read[:, :4].long()
    with torch.no_grad():
        wanted = policy.model(ids).logits[:, 4:-1].log_softmax(-1).flatten(0, 1)
    torch.testing.assert_close(
        logits(read).gather(1, named), wanted.gather(1, named), rtol=0, atol=ROUNDING
    )
    assert torch.equal(named[:, 0], ids[mask]) and all(
        set(a) >= set(b) for a, b in zip(named.tolist(), wanted.topk(3)[1].tolist(), strict=True)
    )
    engine.backend.close()


def test_a_run_with_a_served_teacher_learns_what_one_with_the_same_teacher_in_process_learns(
    policy, contexts, tmp_path
):
    """Two whole commands of two steps; the policy is another model than the teacher, so that there
    is something to learn."""
    engine = VLLM(
        addresses=["start"],
        max_rows=16,
        restart_wait=600.0,
        arguments={"kv_cache_memory_bytes": 1 << 28},
    )
    agree(engine, policy, contexts)  # the server is up
    pupil = load_policy(path="tiny")
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in pupil.model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    pupil.model.save_pretrained(tmp_path / "pupil")
    pupil.renderer.tokenizer.save_pretrained(tmp_path / "pupil")
    losses = []
    for own in (
        ["teacher=path", "teacher.path=tiny"],
        ["teacher=vllm", f"teacher.addresses=[{engine.backend.servers[0].url}]"],
    ):
        words = [
            "algorithm=opd",
            "debug=fast",
            f"model.path={tmp_path / 'pupil'}",
            f"hydra.run.dir={tmp_path / own[0]}",
            *own,
        ]
        done = subprocess.run(
            [sys.executable, "-m", "rlkit", "train", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        rows = map(json.loads, (tmp_path / own[0] / "metrics.jsonl").read_text().splitlines())
        losses.append([row["streams/teacher"] for row in rows if "streams/teacher" in row])
    engine.backend.close()
    assert len(losses[0]) == len(losses[1]) == 2 and min(map(abs, losses[0])) > 10 * ROUNDING
    torch.testing.assert_close(
        torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=0, atol=10 * ROUNDING
    )


def test_a_training_run_learns_nothing_wrong(tmp_path):
    """The whole command: start-up equality, steps, evaluation; the gap between sampler and trainer
    is rounding, and logged."""
    command = [
        sys.executable,
        "-m",
        "rlkit",
        "train",
        "debug=fast",
        "generation=vllm",
        "algorithm/correction=token_truncate",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (metrics,) = tmp_path.glob("outputs/*/*/metrics.jsonl")
    rows = [
        row
        for row in map(json.loads, metrics.read_text().splitlines())
        if "mismatch/logp_abs_max" in row
    ]
    assert rows and all(row["mismatch/logp_abs_max"] < ROUNDING for row in rows)
