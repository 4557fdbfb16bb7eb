"""Whole runs on a pretend GPU: nothing mixes devices, a decoding step never asks the host, an RL
step a bounded number of times."""

from __future__ import annotations

import re

import pytest
import torch

from pretend_gpu import PretendGPU
from rlkit.commands import cli
from rlkit.engines import Cached
from rlkit.engines.cached.passes import Passes
from rlkit.engines.cached.scheduler import Scheduler
from rlkit.errors import EngineError
from rlkit.models import LoRA, load_policy
from rlkit.training.learner import Learner
from rlkit.training.update import probe

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None, reason="needs a torch built without CUDA"
)

SMALL = {
    "logger": "none",
    "trainer.accelerator": "gpu",
    "trainer.steps": "1",
    "batch.prompts": "2",
    "batch.group_size": "3",
    "evaluation.n": "2",
    "generation.max_new_tokens": "10",
    "callbacks.checkpoint.every": "1",
    "trainer.micro_batch_tokens": "1024",  # the probe before the first step fills one
}
# overrides, and the host reads of one RL step, rollouts and update, on the day that they were
# written down; a tenth more is allowed
CASES = {
    "grpo": ({}, 311),
    "lora_ema": ({"model.lora.rank": "4", "reference": "ema"}, 369),
    "ppo": ({"algorithm": "ppo", "batch.prompts": "4", "batch.group_size": "1"}, 643),
    "ppo_separate": (
        {
            "algorithm": "ppo",
            "algorithm.critic.model": "separate",
            "batch.prompts": "4",
            "batch.group_size": "1",
        },
        643,
    ),
    "dapo_refills": ({"algorithm": "dapo", "algorithm.max_refills": "2"}, 237),
    "kl_full": ({"kl": "full"}, 311),
    # more than the 32 tokens of the check before the first step: its cache and its graphs go
    "longer_than_the_check": ({"model.lora.rank": "4", "generation.max_new_tokens": "48"}, 369),
    "transformers": ({"generation": "transformers"}, 300),
}


@pytest.fixture
def gpu(monkeypatch):
    """An H200 that is not there, as Lightning and torch see it."""
    import lightning.fabric.accelerators.cuda as fabric
    import lightning.pytorch.accelerators.cuda as accelerators

    monkeypatch.setattr(fabric, "num_cuda_devices", lambda: 1)
    monkeypatch.setattr(fabric, "is_cuda_available", lambda: True)
    monkeypatch.setattr(accelerators, "num_cuda_devices", lambda: 1)
    # transformers leaves the angles of the first model of a process empty where it is loaded inside
    load_policy(path="tiny")
    with PretendGPU() as pretend:
        yield pretend


def train(folder, **overrides) -> int:
    return cli.main(
        [
            "train",
            f"hydra.run.dir={folder}",
            *(f"{key}={value}" for key, value in (SMALL | overrides).items()),
        ]
    )


@pytest.fixture
def host_reads(gpu, monkeypatch):
    """Host reads of each RL step: generation, scoring and update, without evaluation and
    start-up."""
    counts, step = [], Learner.step

    def counted(self, *given, **named):
        metrics = step(self, *given, **named)
        counts.append(sum(gpu.syncs.values()))
        return metrics

    begin = Learner.begin

    def begun(self, *given, **named):
        if (
            self.begun < self.rl_step
        ):  # the first call of a step; `step` calls it again, after the rollouts
            gpu.syncs.clear()
        return begin(self, *given, **named)

    monkeypatch.setattr(Learner, "step", counted)
    monkeypatch.setattr(Learner, "begin", begun)
    return counts


# ------------------------------------------------------------------------------ the pretence itself


def test_two_devices_in_one_operation_are_torchs_own_error(gpu):
    x = torch.ones(3, device="cuda")
    assert (
        x.device == torch.device("cuda", 0) and (x + 1).is_cuda and (x + torch.tensor(2.0)).is_cuda
    )
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="indices should be"):
        torch.ones(3)[torch.tensor([0], device="cuda")]
    with pytest.raises(TypeError, match="host memory"):
        x.numpy()


def test_what_the_host_reads_is_counted_and_breaks_a_capture(gpu):
    x = torch.ones(3, device="cuda")
    x.sum().item(), x.tolist(), x[x > 0], bool(x.any())
    assert sum(gpu.syncs.values()) == 4
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="capturing"):
            x.sum().item()
        with pytest.raises(RuntimeError, match="previous error"):
            graph.capture_end()


def test_a_capture_changes_nothing_and_its_replay_does(gpu):
    x, y = torch.zeros(3, device="cuda"), torch.ones(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        x.add_(y * 2)
        graph.capture_end()
    assert x.tolist() == [0, 0, 0]
    graph.replay()
    y.fill_(2.0)
    graph.replay()
    assert x.tolist() == [6, 6, 6]


def test_a_pool_of_memory_ends_with_the_last_graph_captured_into_it(gpu):
    pool = torch.cuda.graph_pool_handle()

    def capture():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin(pool=pool)
            graph.capture_end()
        return graph

    first = capture()
    second = capture()
    del first
    third = capture()
    del second, third
    assert pool != torch.cuda.graph_pool_handle()
    with pytest.raises(RuntimeError, match="use_count > 0 INTERNAL ASSERT FAILED"):
        capture()


# ----------------------------------------------------------------------------------- decoding steps


@pytest.mark.slow
@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "max_thinking_tokens": 3}], ids=str)
def test_a_decoding_step_never_asks_the_host(params, gpu, complete, monkeypatch):
    """Captured or kernel by kernel, and nothing in it is on the host; the replies are those of the
    CPU."""
    policy = load_policy(path="tiny")
    prompts = [tuple(range(100, 100 + n)) for n in (5, 9, 9, 30)]
    expected = complete(
        Cached(kernel="eager"), policy, prompts, range(4), max_new_tokens=14, **params
    )
    policy.model.to("cuda")
    asked, kernels, step = [], [], Scheduler.step

    def watched(self, longest):
        before = sum(gpu.syncs.values()), gpu.kernels
        step(self, longest)
        asked.append(sum(gpu.syncs.values()) - before[0])
        kernels.append(gpu.kernels - before[1])

    monkeypatch.setattr(Scheduler, "step", watched)
    engine = Cached(check_every=4)
    found = complete(engine, policy, prompts, range(4), max_new_tokens=14, **params)
    assert [g.token_ids for g in found] == [g.token_ids for g in expected]
    # A capture waits once until the device is idle. Each shape runs kernel by kernel, is captured,
    # and is replayed from then on.
    assert sum(asked) == gpu.captures == engine.metrics()["captured_shapes"] > 0, gpu.report()
    assert (
        sum(map(bool, kernels)) == 2 * gpu.captures
        and gpu.replays == len(asked) - gpu.captures > 12
    )


@pytest.mark.slow
@pytest.mark.parametrize("keep_cache", [True, False])
def test_graphs_serve_calls_whose_contexts_grow(gpu, complete, recwarn, keep_cache):
    """They outlive a call, and a call like the one before captures nothing. If the cache is
    given up between calls, they are captured again, into a pool that lives."""
    policy = load_policy(path="tiny")
    policy.model.to("cuda")
    engine = Cached(check_every=4, keep_cache=keep_cache)
    replayed, captured = [], []
    for length in (20, 200, 400, 400):
        before = gpu.replays, gpu.captures
        complete(engine, policy, [tuple(range(100, 100 + length))], [1], max_new_tokens=40)
        replayed.append(gpu.replays - before[0])
        captured.append(gpu.captures - before[1])
    assert not recwarn.list and min(replayed) > 20, (replayed, gpu.report())
    assert bool(captured[-1]) is not keep_cache


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_pages_read_in_place_give_the_replies_of_pages_that_are_gathered(
    rank, gpu, complete, monkeypatch
):
    """With and without an adapter that has learned something, in graphs that outlive calls. In
    float32, which the real kernel refuses, both read equal bits."""
    whole = load_policy(path="tiny")
    whole.model.to("cuda")
    with pytest.raises(EngineError, match="cache=varlen: it reads half precision"):
        complete(Cached(cache="varlen"), whole, [(100, 101)], [1], max_new_tokens=2)
    monkeypatch.setattr(
        "rlkit.engines.cached.engine.explain_no_reading_in_place", lambda causal: ""
    )
    policy = load_policy(path="tiny", lora=LoRA(rank=rank))
    for name, weight in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    policy.model.to("cuda")
    prompts = [tuple(range(100, 100 + n)) for n in (5, 9, 9, 70, 300)]
    engines = {kind: Cached(cache=kind, check_every=4) for kind in ("gather", "varlen")}
    for seeds in (range(5), range(5, 10)):
        gathered, in_place = (
            complete(engine, policy, prompts, seeds, max_new_tokens=40)
            for engine in engines.values()
        )
        assert [g.token_ids for g in gathered] == [g.token_ids for g in in_place]
        for one, other in zip(gathered, in_place, strict=True):
            assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
    assert any(kind == "varlen" for kind, *_ in gpu.attention) and gpu.replays


@pytest.mark.slow
def test_graphs_live_on_under_autocast_and_see_new_weights(gpu, complete):
    """Steps read half copies, which are made again in place. They ended with each call when they
    read the casts of autocast."""
    policy = load_policy(path="tiny")
    policy.model.to("cuda")
    engine = Cached(check_every=4)
    captured = []
    replies = []
    with torch.autocast("cuda", torch.bfloat16):
        for _ in range(2):
            drawn = complete(engine, policy, [(100, 101, 102)], [1], max_new_tokens=12)
            fresh = complete(Cached(), policy, [(100, 101, 102)], [1], max_new_tokens=12)
            assert [(g.token_ids, g.logprobs) for g in drawn] == [
                (g.token_ids, g.logprobs) for g in fresh
            ]
            captured.append(engine.metrics()["captured_shapes"])
            replies.append(drawn[0].logprobs)
            with torch.no_grad():
                for weight in policy.model.model.layers[1].mlp.parameters():
                    weight.mul_(1.5)
    assert captured == [1, 1] and replies[0] != replies[1]
    decoder = engine.decoder
    outside = complete(engine, policy, [(100, 101, 102)], [1], max_new_tokens=2)
    assert engine.decoder is not decoder and outside[0].logprobs != replies[1][:2]


@pytest.mark.slow
def test_a_step_that_reads_on_the_host_is_not_captured(gpu, complete, monkeypatch):
    """The first step finds it, before a capture could break; decoding goes on without graphs, with
    one warning."""
    policy = load_policy(path="tiny")
    policy.model.to("cuda")
    hidden = Passes.hidden
    monkeypatch.setattr(
        Passes, "hidden", lambda self, ids, *rest: (bool(ids.any()), hidden(self, ids, *rest))[1]
    )
    with pytest.warns(UserWarning, match="cannot be captured") as caught:
        complete(Cached(), policy, [(100, 101)], [1], max_new_tokens=3)
    assert len(caught) == 1 and not gpu.captures and not gpu.replays


# --------------------------------------------------------------------------------------- whole runs


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_on_one_gpu(case, gpu, host_reads, tmp_path, recwarn):
    overrides, reads = CASES[case]
    assert train(tmp_path, **overrides) == 0
    assert host_reads and max(host_reads) <= 1.1 * reads, (host_reads, gpu.report())
    assert not [
        w for w in recwarn if "captured" in str(w.message)
    ]  # a decoding step that asks the host is not captured
    assert gpu.replays or "generation" in overrides


@pytest.mark.slow
def test_a_run_is_continued_on_a_gpu(gpu, tmp_path):
    assert train(tmp_path) == 0
    assert train(tmp_path, resume=str(tmp_path), **{"trainer.steps": "2"}) == 0


@pytest.mark.slow
def test_out_of_memory_in_the_probe_halves_the_micro_batches(gpu, tmp_path, monkeypatch, capsys):
    """The probe's rollout ids were on the host and its rows on the device: the second try ended in
    torch's error about indices."""
    forward, left = probe.forward_logprobs, [1]

    def exhausted(*given, **named):
        if left:
            left.pop()
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB (pretended)."
            )
        return forward(*given, **named)

    monkeypatch.setattr(probe, "forward_logprobs", exhausted)
    assert train(tmp_path) == 0
    assert re.search(r"micro-batches are halved to \d+ tokens", capsys.readouterr().out)
