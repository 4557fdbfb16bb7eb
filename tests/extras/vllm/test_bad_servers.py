"""Servers that fail in the middle of a run: it ends with one sentence each time, and goes on as if
nothing had happened."""

from __future__ import annotations

import json
import os
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from extras.vllm.test_journal import SMALL
from extras.vllm.vllm_protocol import sampling
from rlkit.commands.cli import main
from rlkit.extras.vllm import pool
from training.test_asynchrony import COMMON

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
