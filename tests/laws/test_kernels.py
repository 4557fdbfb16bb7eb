"""Kernels belong to a run: decided once, said with the reason for a fallback, noted, kept on
resume, and alike in all jobs of a sweep."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlkit.commands.cli import main
from rlkit.distributed import ranks
from rlkit.engines import Batched, Cached
from rlkit.engines.cached import kernel
from rlkit.errors import ConfigError, EngineError
from rlkit.models import fused
from rlkit.models.compiled import JOBS
from rlkit.runs.kernels import NAME, decide_kernels
from rlkit.training.kernels import (
    engine_line,
    keep_kernels,
    note_choices,
    read_kernels_in_use,
    settle_kernels,
)

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler"
)

FAST = [
    "debug=fast",
    "trainer.accelerator=cpu",
    "evaluation.n=0",
    "logger=none",
    "batch.prompts=1",
    "batch.group_size=2",
    "trainer.threads=1",
    "generation.max_new_tokens=8",
    "callbacks.checkpoint.every=1",
    "schedule.numbers.optimizer.lr.steps=9",
]


@pytest.fixture
def without_compiler(tmp_path, monkeypatch):
    """A function after which compilers fail, and one after which they work."""

    def forget() -> None:
        kernel.compile_kernel.cache_clear()
        fused.load_operations.cache_clear()

    def away() -> None:
        file = tmp_path / "bin" / "cc"
        file.parent.mkdir(exist_ok=True)
        file.write_text("#!/bin/sh\necho no licence >&2\nexit 1\n")
        file.chmod(0o755)
        monkeypatch.setenv("CC", str(file))
        forget()

    def back() -> None:
        monkeypatch.delenv("CC", raising=False)
        forget()

    monkeypatch.delenv(JOBS, raising=False)
    yield away, back
    back()


def noted(folder: Path) -> list[dict]:
    return [start.get("kernels") for start in json.loads((folder / "run.json").read_text())]


EAGER, FUSED = ({"decoding": kind, "updates": kind} for kind in ("eager", "fused"))


@pytest.mark.slow
def test_a_fallback_is_one_sentence_with_its_reason_and_noted(without_compiler, tmp_path, capsys):
    away, _ = without_compiler
    away()
    assert main(["train", *FAST, "trainer.steps=1", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("kernels:")]
    assert (
        line.startswith("kernels: decoding eager (")
        and line.count("no licence") == 2
        and "updates eager (" in line
    )
    assert noted(tmp_path / "run") == [EAGER]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["kernels"] == EAGER


@pytest.mark.slow
def test_a_run_goes_on_with_its_kernels_or_says_what_differs(without_compiler, tmp_path, capsys):
    """Eager, then with a compiler: as if there were none. Fused, then without: one sentence for
    each kernel."""
    away, back = without_compiler

    def trained(name: str, *words: str) -> str:
        place = (
            [f"resume={tmp_path / name}"]
            if (tmp_path / name).exists()
            else [*FAST, f"hydra.run.dir={tmp_path / name}"]
        )
        assert main(["train", *place, *words]) == 0
        return capsys.readouterr().out

    away()
    trained("whole", "trainer.steps=4")
    trained("eager", "trainer.steps=2")
    back()
    said = trained("eager", "trainer.steps=4")
    assert (
        "resume: decoding is eager, as the run did so far" in said
        and "resume: updates are eager, as the run did so far" in said
    )
    assert noted(tmp_path / "eager") == [EAGER, EAGER]
    weights = [
        torch.load(tmp_path / name / "checkpoints" / "step_000004.ckpt", weights_only=True)[
            "state_dict"
        ]
        for name in ("whole", "eager")
    ]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])

    assert "kernels: decoding fused, updates fused\n" in trained("fused", "trainer.steps=2")
    away()
    said = trained("fused", "trainer.steps=3")
    assert (
        "resume: decoding steps were fused and are eager (generation.kernel)" in said
        and "resume: updates were fused and are eager" in said
    )
    assert noted(tmp_path / "fused") == [FUSED, EAGER]
    back()
    capsys.readouterr()
    assert (
        main(
            [
                "evaluate",
                f"run={tmp_path / 'eager'}",
                "evaluation.n=1",
                "evaluation.samples=1",
                "evaluation.k=[1]",
            ]
        )
        == 0
    )
    assert (
        "kernels: decoding eager (as the run did so far), updates eager (as the run did so far)"
        in capsys.readouterr().out
    )


def load(engine, policy, complete) -> None:
    complete(engine, policy, [(1, 2)], [0], max_new_tokens=1)


def test_auto_is_decided_once(tiny, complete, monkeypatch):
    """Where compiled code is no longer possible later, a run does not fall back: that would be
    another run."""
    engine = Cached()
    load(engine, tiny, complete)
    assert (
        settle_kernels(engine, tiny.model) == "kernels: decoding fused, updates fused"
        and engine.kernel == "fused"
    )
    before = engine.decoder
    load(engine, tiny, complete)
    assert engine.decoder is before  # nothing is built again for it
    eager = Cached(kernel="eager")
    load(eager, tiny, complete)
    assert settle_kernels(eager, tiny.model).startswith("kernels: decoding eager, ")
    assert keep_kernels(eager, tiny.model, {"kernel": "fused", "update_kernel": "fused"}) == [
        "decoding steps were fused and are eager (generation.kernel), so log-probs differ in their"
        " last bits"
    ]


OWN = Batched(lambda policy, prompts, seeds, params: [])  # an engine with kernels of its own


def test_an_engine_with_kernels_of_its_own_is_not_named(tiny):
    assert (
        settle_kernels(OWN, tiny.model) == "kernels: updates fused"
        and keep_kernels(OWN, tiny.model, {"kernel": None, "update_kernel": "fused"}) == []
    )


GPU = torch.device("cuda")


class Served(Batched):
    """An engine behind servers."""

    lent = None


def test_a_gpu_names_its_engine_and_large_models_are_advised_vllm():
    """By the count of parameters alone: 4B has 4.02 billion."""
    small = engine_line(Cached(), GPU, 1_720_574_976)
    large = engine_line(Cached(), GPU, 4_022_468_096)
    assert small.startswith("engine: Cached; it decodes with the model's own code")
    assert "vllm" not in small and large.startswith(f"{small}; for a model of 4.0 billion")
    assert "we advise generation=vllm" in large and "not a measurement" in large
    served = engine_line(Served(lambda *_: []), GPU, 4_022_468_096)
    assert served.startswith("engine: Served; ") and "advise" not in served
    assert engine_line(Cached(), torch.device("cpu"), 4_022_468_096) == ""


def test_the_engine_is_named_before_the_kernels_on_a_gpu_only(tiny, complete, monkeypatch):
    engine = Cached()
    load(engine, tiny, complete)
    said = settle_kernels(engine, tiny.model)
    assert said.startswith("kernels: ") and "\n" not in said
    weight = SimpleNamespace(device=GPU, numel=lambda: 5_000_000_000)
    monkeypatch.setattr(tiny.model, "parameters", lambda: iter([weight]))
    first, second = settle_kernels(engine, tiny.model).splitlines()
    assert first.startswith("engine: Cached") and "5.0 billion" in first
    assert second == said


def test_shards_and_a_model_that_changes_are_decoded_without_compiled_code(
    tiny, complete, without_compiler
):
    """Shards are made behind the line; a compiler that is lost behind it is no fallback any
    more."""
    away, _ = without_compiler
    engine, hooked = Cached(), tiny._replace(model=deepcopy(tiny.model))
    load(engine, hooked, complete)
    said = settle_kernels(engine, hooked.model, sharded=True)
    assert (
        said == "kernels: decoding eager (the weights are sharded), updates eager (the weights are"
        " sharded)"
    )
    engine, hooked = Cached(), tiny._replace(model=deepcopy(tiny.model))
    load(engine, hooked, complete)
    settle_kernels(engine, hooked.model)
    handle = hooked.model.model.register_forward_hook(lambda *_: None)
    engine.decoder = None
    load(engine, hooked, complete)
    assert read_kernels_in_use(engine, hooked.model)["decoding"] == "eager"
    handle.remove()
    away()
    engine.decoder = None
    with pytest.raises(
        EngineError, match=r"generation\.kernel: the run decodes with compiled code, .*no licence"
    ):
        load(engine, hooked, complete)


@pytest.mark.parametrize(
    ("case", "decoding", "updates"),
    [
        ("budget", "it has no top-p, no top-k and no thinking budget", ""),
        ("top_k", "it has no top-p, no top-k and no thinking budget", ""),
        ("autocast", "it computes without autocast", "no autocast (trainer.precision)"),
        ("attention", "", "it needs packed rows (model.attention)"),
    ],
)
def test_a_kernel_that_the_run_cannot_use_is_not_named(tiny, complete, case, decoding, updates):
    """`kernels: decoding fused, updates fused` was said where no step and no pass was fused, and
    an explicit `fused` was accepted."""
    words = {"budget": {"max_thinking_tokens": 1}, "top_k": {"top_k": 3}}.get(case, {})

    def settled(kernel):
        policy = tiny._replace(model=deepcopy(tiny.model))
        fused.choose_kernel(policy.model, kernel if updates else "auto")
        if case == "attention":
            policy.model.config._attn_implementation = "eager"
        engine = Cached(kernel=kernel if decoding else "auto")
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
            complete(engine, policy, [(1, 2)], [0], max_new_tokens=2, **words)
            return settle_kernels(engine, policy.model), read_kernels_in_use(engine, policy.model)

    said, kernels = settled("auto")
    assert kernels == {
        "decoding": "eager" if decoding else "fused",
        "updates": "eager" if updates else "fused",
    }
    assert (
        decoding in said and updates in said and said.count("(it ") == len(said.split("eager")) - 1
    )
    option = "generation.kernel" if decoding else "model.kernel"
    with pytest.raises(EngineError, match=rf"{option}=fused: it .*; use auto or eager"):
        settled("fused")


def test_ranks_have_the_same_kernels(tiny, complete, monkeypatch):
    """On one of them there is no compiler."""
    engine = Cached()
    load(engine, tiny, complete)
    monkeypatch.setattr(ranks, "any_rank", lambda flag: True)
    try:
        assert (
            settle_kernels(engine, tiny.model)
            == "kernels: decoding eager (as another process of the run), updates eager (as another"
            " process of the run)"
        )
        load(engine, tiny, complete)
        assert engine.decodes == "eager" and read_kernels_in_use(engine, tiny.model) == EAGER
    finally:
        fused.choose_kernel(tiny.model, "auto")


def test_the_critic_goes_on_as_the_policy(tiny):
    from rlkit.models import make_critic

    critic = make_critic(tiny.model, model="separate")
    fused.choose_kernel(tiny.model, "auto")
    try:
        said = keep_kernels(OWN, tiny.model, {"kernel": None, "update_kernel": "eager"}, critic)
        assert said == ["updates are eager, as the run did so far (model.kernel)"]
        assert {fused.get_update_kernel(module).used for module in critic.modules()} == {"eager"}
    finally:
        fused.choose_kernel(tiny.model, "auto")


def test_a_note_changes_nothing_else_and_needs_no_file(tmp_path):
    note_choices(tmp_path, {"kernels": EAGER})
    assert not list(tmp_path.iterdir())
    for broken in ("", "[]", "{}", "[1]", "null", "[[]]"):
        (tmp_path / "run.json").write_text(broken)
        note_choices(tmp_path, {"kernels": EAGER})
        assert (tmp_path / "run.json").read_text() == broken
    (tmp_path / "run.json").write_text('[{"git": "a"}, {"git": "b"}]')
    note_choices(tmp_path, {"kernels": EAGER})
    assert json.loads((tmp_path / "run.json").read_text()) == [
        {"git": "a"},
        {"git": "b", "kernels": EAGER},
    ]


def test_jobs_of_a_sweep_are_decided_together(without_compiler, tmp_path, capsys, monkeypatch):
    away, back = without_compiler
    assert decide_kernels(tmp_path) == {JOBS: "fused"}
    assert json.loads((tmp_path / NAME).read_text()) == {"auto": "fused"}
    away()
    assert decide_kernels(tmp_path) == {JOBS: "eager"}  # no job has begun: the decision is free
    assert "kernels: all jobs are computed without compiled code (" in capsys.readouterr().out
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "config.yaml").touch()
    back()
    decided = decide_kernels(tmp_path)
    assert decided == {JOBS: "eager"} and "like the jobs so far" in capsys.readouterr().out
    monkeypatch.setenv(JOBS, decided[JOBS])  # as a job has it
    assert kernel.choose_kernel("auto", *_parts())[1] == "so that all jobs are computed alike"
    (tmp_path / NAME).write_text('{"auto": "fused"}')
    away()
    with pytest.raises(
        ConfigError, match=r"its jobs so far used compiled kernels, but here .*no licence"
    ):
        decide_kernels(tmp_path)


def _parts():
    from rlkit.engines.cached.forward import make_forward
    from rlkit.models.head import split_model
    from rlkit.models.load import load_policy

    trunk, head = split_model(load_policy(path="tiny").model)
    return make_forward(trunk), head


@pytest.mark.slow
def test_a_sweep_without_a_compiler_says_so_once_and_all_its_jobs_are_eager(
    without_compiler, tmp_path, monkeypatch, capfd
):
    away, _ = without_compiler
    monkeypatch.chdir(tmp_path)
    away()
    assert main(["train", "-m", "seed=0,1", *FAST, "trainer.steps=1"]) == 0
    assert (
        capfd.readouterr().out.count("kernels: all jobs are computed without compiled code (") == 1
    )
    assert [noted(path.parent) for path in sorted(tmp_path.glob("outputs/sweep/*/run.json"))] == [
        [EAGER]
    ] * 2
