"""Servers that fail in the middle of a run: it ends with one sentence each time, and goes on as if
nothing had happened."""

from __future__ import annotations

import itertools
import json
import os
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from extras.vllm.test_journal import SMALL
from extras.vllm.vllm_protocol import sampling
from parametrise import cover
from rlkit.commands.cli import main
from rlkit.extras.vllm import pool
from rlkit.training.callbacks.pathologies import PROOF
from training.test_asynchrony import COMMON
from training.test_claims import Learned

WORDS = [
    "train",
    *COMMON,
    *SMALL,
    "asynchrony=lag",
    "trainer.steps=6",
    "callbacks.checkpoint.every=1",
    "generation.engine.restart_wait=0",
]
FAULTS = {  # what happens before weights are pushed → what is said
    "away": "no answer for 0 s (generation.engine.restart_wait)",
    "another model": "serves 'another' and",
    "never arrives": "has not taken the weights of version 3 in 0.3 s; look into its log",
    "full folder": (
        "the weights of version 4 cannot be written there ([Errno 28] No space left on device);"
        " make room"
    ),
}


@pytest.mark.slow
def test_what_fails_is_said_in_a_sentence_and_nothing_is_lost(tmp_path, monkeypatch, capfd, same):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pool, "POLL", 0)
    load, broken, released = pool.ServerPool.load, [], threading.Event()

    def failing(servers, fault, patch):
        if fault == "away":
            for own in servers:
                own.absences = own.away
        elif fault == "another model":
            servers[1].model, servers[1].absences = "another", 1
        elif fault == "never arrives":
            released.clear()
            patch.setattr(pool, "PUSH", 0.3)
            servers[0].holds = lambda handler: released.wait(30)
        else:
            patch.setattr(
                pool,
                "save_weights",
                lambda *_, **__: os.write(os.open("/dev/full", os.O_WRONLY), b"x"),
            )

    with ExitStack() as stack:
        servers = [stack.enter_context(sampling()) for _ in range(2)]
        words = [*WORDS, f"generation.engine.addresses=[{servers[0].url},{servers[1].url}]"]
        assert main([*words, "hydra.run.dir=whole"]) == 0
        for version, (fault, said) in enumerate(FAULTS.items(), 1):
            with monkeypatch.context() as patch:

                async def until(self, policy, own, version=version, fault=fault, patch=patch):
                    if own == version:
                        failing(servers, fault, patch)
                        broken.append(fault)
                    await load(self, policy, own)

                patch.setattr(pool.ServerPool, "load", until)
                capfd.readouterr()
                status = main(["train", "resume=run"] if broken else [*words, "hydra.run.dir=run"])
                error = capfd.readouterr().err
            assert status == 1 and sum(said in line for line in error.splitlines()) == 1, (
                fault,
                error,
            )
            assert broken[-1] == fault and "Traceback" not in error
            released.set()  # what was held ends with its connection
            for own in servers:
                own.absences, own.model, own.holds = 0, "base", None
        assert main(["train", "resume=run"]) == 0
    states = [
        torch.load(f"{run}/checkpoints/step_000006.ckpt", weights_only=True)
        for run in ("whole", "run")
    ]
    assert same(states[0]["state_dict"], states[1]["state_dict"])
    rows = [
        [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
        for run in ("whole", "run")
    ]
    assert [r["tokens/sampled"] for r in rows[0]] == [r["tokens/sampled"] for r in rows[1]]


LIES = {  # of the weights that were pushed, and the number of the completion → those that sample
    "accepts every push and ignores it": lambda given, call: given[0],
    "is one version late": lambda given, call: given[-2:][0],
    "mixes two": lambda given, call: given[-2:][call % len(given[-2:])],
    "does as it is told": lambda given, call: given[-1],
}


@pytest.mark.slow
@pytest.mark.parametrize(("lie", "rank"), cover(itertools.product(LIES, (0, 4))))
def test_a_server_that_samples_with_another_version_is_found(lie, rank):
    # A step reads one rollout, and any of them may be of the right version.
    steps = 8 if lie == "mixes two" else 4
    with sampling(lie=LIES[lie], rank=rank) as server:
        own = Learned(
            None,
            "generation=vllm",
            f"generation.engine.addresses=[{server.url}]",
            "generation.max_new_tokens=24",
            f"model.lora.rank={rank}",
            "optimizer.lr=1e-2",
            steps=steps,
        )
        assert len(server.given) == steps
    if lie == "mixes two":
        assert any(own.accused())
        return
    assert own.accused()[-1] == (lie != "does as it is told")
    assert own.accused()[1] == own.accused()[-1]  # in the first step that has two versions
    right = own.rows[-1]["mismatch/version_right"]
    assert (right > PROOF) == (lie == "does as it is told")
