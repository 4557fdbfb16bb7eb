"""`rlkit train` as a user runs it, in an empty folder: what it writes, how it resumes, what it
refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlkit.commands.cli import main
from rlkit.engines.cached.cache import Pages
from rlkit.episodes import load_rollouts

# a length of its own: a run that is continued with more steps is exact
SPAN = "schedule.numbers.optimizer.lr.steps=20"
LEARNS = [
    "batch.group_size=8",
    "optimizer.lr=1e-3",
    SPAN,
]  # with which little steps have a gradient
FAST = ["debug=fast", "trainer.accelerator=cpu", "generation.max_new_tokens=32"]


def train(folder: Path, *overrides: str) -> int:
    return main(["train", *FAST, f"hydra.run.dir={folder}", *overrides])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four steps without interruption."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert train(folder, "trainer.steps=4", *LEARNS) == 0
    return folder


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_clock(row: dict) -> dict:
    return {k: v for k, v in row.items() if not k.startswith("perf/")}


@pytest.mark.slow
def test_run_folder_is_complete(whole):
    names = {p.name for p in whole.iterdir()}
    assert {
        ".hydra",
        "config.yaml",
        "summary.json",
        "metrics.jsonl",
        "metrics.csv",
        "tensorboard",
        "checkpoints",
        "rollouts",
        "samples",
    } <= names
    assert any((whole / "tensorboard").glob("events.*"))


def test_one_row_a_step_with_the_same_keys(whole):
    found = rows(whole)
    assert [r["step"] for r in found] == [0, 1, 2, 3, 4]
    keys = [set(without_clock(r)) - {k for k in r if k.startswith("test/")} for r in found[1:]]
    assert all(k == keys[0] for k in keys)
    assert (
        "test/accuracy" in found[0]
        and "test/accuracy" in found[4]
        and "test/accuracy" not in found[2]
    )
    assert not any(key.startswith("eval/") for row in found for key in row), (
        "evaluation.every=0 plays no validation problem"
    )


def test_summary_says_how_it_went(whole):
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["ended"] == "finished" and summary["steps"] == 4 and summary["seed"] == 0
    assert summary["validation"] is None
    for when in ("before", "after"):
        assert summary[when]["n"] == 4 and summary[when]["split"] == "test"
        for value, interval in (("accuracy", "interval"), ("reward", "reward_interval")):
            low, high = summary[when][interval]
            assert low <= summary[when][value] <= high
    assert {"wall_seconds", "tokens", "peak_memory_gb", "versions"} <= summary.keys()


def test_first_minibatch_is_on_policy(whole):
    """Ratio 1 and trainer = sampler: the cheapest guard against mask, temperature and log-prob
    bugs."""
    for row in rows(whole)[1:]:
        assert row["ratio/first_mean"] == pytest.approx(1.0, abs=1e-6)
        assert row["mismatch/logp_abs_max"] < 1e-3


@pytest.mark.slow
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(whole, tmp_path, same, timeless):
    """Stopped after two of four steps and continued in the same folder: weights, metrics and
    rollouts are identical."""
    folder = tmp_path / "halves"
    assert train(folder, "trainer.steps=2", *LEARNS) == 0
    middle = torch.load(folder / "checkpoints" / "step_000002.ckpt", weights_only=True)[
        "state_dict"
    ]
    assert main(["train", f"resume={folder}", "trainer.steps=4"]) == 0
    a, b = (
        torch.load(f / "checkpoints" / "step_000004.ckpt", weights_only=True)
        for f in (whole, folder)
    )
    assert rows(whole)[2]["optim/grad_norm"] > 0 and not same(
        middle, a["state_dict"]
    )  # moved before and after, or this shows nothing
    assert same(a["state_dict"], b["state_dict"]) and same(
        a["optimizer_states"], b["optimizer_states"]
    )
    assert same(a["rlkit"], b["rlkit"])
    first = [without_clock(r) for r in rows(whole)]
    second = [without_clock(r) for r in rows(folder)]
    for row in second:
        if row["step"] == 2:  # where the first half ended, it evaluated
            for key in [k for k in row if k.startswith("test/")]:
                del row[key]
    assert first == second
    for name in sorted(p.name for p in (whole / "rollouts").iterdir()):
        x, y = (timeless(f / "rollouts" / name) for f in (whole, folder))
        assert x == y


# Numbers with which this little moves policy and reference within three steps.
MOVES = [
    "algorithm=reinforce",
    "batch.group_size=4",
    "generation.max_new_tokens=64",
    "optimizer.lr=3e-3",
    "evaluation.n=0",
    "kl.coef=0.5",
    SPAN,
]
REFERENCES = {
    "ema": ["reference=ema", "reference.decay=0.5"],
    "periodic": [
        "reference=periodic",
        "reference.every=2",
        "algorithm.entropy_coef=0.01",
    ],  # the policy moves in every step
    "on_kl": ["reference=on_kl", "reference.threshold=0.3"],
    "lora": ["reference=ema", "reference.decay=0.5", "model.lora.rank=4"],
}


@pytest.mark.slow
@pytest.mark.parametrize("option", REFERENCES)
def test_resumed_run_with_a_moving_reference_equals_an_uninterrupted_one(tmp_path, same, option):
    """Policy, reference, its counters and all metrics; the reference has moved and is not the
    policy, or this shows nothing."""
    words = [*MOVES, *REFERENCES[option]]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert train(whole, "trainer.steps=4", *words) == 0
    assert train(halves, "trainer.steps=3", *words) == 0
    middle = torch.load(halves / "checkpoints" / "step_000003.ckpt", weights_only=True)
    kept = middle["rlkit"]["references"][""]["weights"]
    assert len(kept) == len({f"model.{n}" for n in kept} & middle["state_dict"].keys()) > 0
    assert not any(".reference." in n for n in middle["state_dict"])
    assert any(not torch.equal(kept[n], middle["state_dict"][f"model.{n}"]) for n in kept)
    assert (middle["rlkit"]["references"][""]["kl"] > 0) == (option == "on_kl")
    assert main(["train", f"resume={halves}", "trainer.steps=4"]) == 0
    a, b = (
        torch.load(f / "checkpoints" / "step_000004.ckpt", weights_only=True)
        for f in (whole, halves)
    )
    assert same(a["state_dict"], b["state_dict"]) and same(a["rlkit"], b["rlkit"])
    assert not same(kept, a["rlkit"]["references"][""]["weights"])
    first, second = ([without_clock(r) for r in rows(f)] for f in (whole, halves))
    assert same(first, second) and any(row["kl/ref_k3"] > 0 for row in first)
    assert (
        main(
            [
                "evaluate",
                f"run={whole}",
                "evaluation.n=2",
                "evaluation.samples=1",
                "evaluation.k=[1]",
            ]
        )
        == 0
    )


@pytest.mark.slow
def test_a_reference_that_no_kl_uses_is_not_built(tmp_path, capsys):
    folder = tmp_path / "run"
    assert train(folder, "trainer.steps=1", "evaluation.n=0", "kl=none") == 0
    assert "reference=frozen is not built" in "".join(capsys.readouterr())
    state = torch.load(folder / "checkpoints" / "step_000001.ckpt", weights_only=True)
    assert state["rlkit"]["references"] == {}


@pytest.mark.slow
def test_a_finished_run_is_never_overwritten(whole, capsys):
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*") if p.is_file()}
    assert train(whole, "trainer.steps=4") == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["train", f"resume={whole}"]) == 2
    assert "raise trainer.steps" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in whole.rglob("*") if p.is_file()} == before


def test_resume_refuses_another_model_task_or_seed(whole, capsys):
    assert main(["train", f"resume={whole}", "trainer.steps=9", "seed=5"]) == 2
    assert "seed was 0 and is now 5" in capsys.readouterr().err


@pytest.mark.slow
def test_resume_auto_continues_the_newest_unfinished_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [
        "train",
        *FAST,
        "name=auto",
        "evaluation.n=0",
        "schedule.numbers.optimizer.lr.steps=${trainer.steps}",
    ]
    assert main([*words, "trainer.steps=1"]) == 0
    folder = next((tmp_path / "outputs" / "auto").iterdir())
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"ended": "interrupted"}))
    assert main([*words, "trainer.steps=2", "resume=auto"]) == 0
    assert [r["step"] for r in rows(folder)] == [1, 2]
    assert len(list((tmp_path / "outputs" / "auto").iterdir())) == 1
    said = capsys.readouterr().out
    assert (
        "resume: schedule.numbers.optimizer.lr.steps was 1 and is now 2" in said
        and "resume: trainer.steps was 1 and is now 2" in said
    )
    first, second = (row["schedule/optimizer.lr"] for row in rows(folder))
    assert second == pytest.approx(0.55 * first)  # the new curve, from the next step on
    assert "wall_seconds" not in json.loads((folder / "summary.json").read_text())
    here = [*words, "resume=auto", f"hydra.run.dir={folder}"]
    assert main([*here, "trainer.steps=3"]) == 0, "finished, but not as long as it shall be now"
    assert main([*here, "trainer.steps=3"]) == 0
    assert [r["step"] for r in rows(folder)] == [1, 2, 3]
    assert "finished already" in capsys.readouterr().out
    assert main([*here, "trainer.steps=3", "seed=7"]) == 2
    assert "seed was 0 and is now 7" in capsys.readouterr().err


OTHERS = [
    ["algorithm=reinforce", "kl=none", "reference=none"],
    ["reward=[numeric,format]", "algorithm/aggregation=token_mean"],
    [
        "reward=[numeric,repetition]",
        "reward/aggregator=group_normalised",
        "algorithm/normalization=batch",
    ],
    ["algorithm.epochs=2", "algorithm.minibatches=2", "trainer.micro_batch_tokens=100"],
    ["schedule=kl_anneal", "logger=none", "algorithm/group_filter=mixed"],
    ["environment=single_turn"],
]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", OTHERS, ids=" ".join)
def test_other_compositions_train(tmp_path, overrides):
    assert train(tmp_path / "run", "trainer.steps=1", "evaluation.n=0", *overrides) == 0


@pytest.mark.slow
def test_a_reward_that_fails_in_training_leaves_its_rollout_behind(tmp_path, monkeypatch, capsys):
    """It passed the try on gold answers; the run stops, and the sample is there to look at.
    Allowed, it goes on and says so."""
    (tmp_path / "failing_reward.py").write_text(
        "def late(r):\n    return 1.0 if not r.steps[0].response_ids or r.sample else r.nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    overrides = [
        "trainer.steps=1",
        "evaluation.n=0",
        "reward=numeric",
        "reward.terms.numeric.fn._target_=failing_reward.late",
    ]
    assert train(tmp_path / "run", *overrides) == 1
    (kept,) = load_rollouts(tmp_path / "run" / "failed_rollout.jsonl.gz")
    assert kept.sample == 0 and kept.reward is None
    assert "failed_rollout.jsonl.gz" in capsys.readouterr().err
    assert train(tmp_path / "more", *overrides, "reward.max_error_rate=0.9") == 0
    (row,) = rows(tmp_path / "more")
    assert row["reward/numeric/error_frac"] == row["reward/unscored_frac"] > 0
    assert "the reward term numeric failed" in capsys.readouterr().out


@pytest.mark.slow
def test_lora_trains_and_saves_adapters_alone(tmp_path):
    folder = tmp_path / "lora"
    assert train(folder, "model.lora.rank=4", "trainer.steps=1", "evaluation.n=0") == 0
    state = torch.load(folder / "checkpoints" / "step_000001.ckpt", weights_only=True)["state_dict"]
    assert state and all("lora_" in name for name in state)
    assert (
        main(
            [
                "evaluate",
                f"run={folder}",
                "evaluation.n=2",
                "evaluation.samples=2",
                "evaluation.k=[1]",
            ]
        )
        == 0
    )


@pytest.mark.slow
def test_real_questions_go_through_and_the_log_says_that_rewards_are_equal(
    tmp_path, shared, capsys
):
    folder = tmp_path / "gsm8k"
    assert train(folder, "task=gsm8k", f"task.path={shared / 'gsm8k'}", "trainer.steps=2") == 0
    assert "all rewards" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "split",
    [
        "test",
        pytest.param("validation", marks=pytest.mark.slow),
        pytest.param("train", marks=pytest.mark.slow),
    ],
)
def test_evaluate_writes_accuracy_with_intervals(whole, capsys, split):
    words = [] if split == "test" else [f"split={split}"]
    known = set((whole / "evaluation").glob("*/result.json"))
    assert (
        main(
            [
                "evaluate",
                f"run={whole}",
                "evaluation.n=3",
                "evaluation.samples=2",
                "evaluation.k=[1,2]",
                *words,
            ]
        )
        == 0
    )
    (file,) = set((whole / "evaluation").glob("*/result.json")) - known
    result = json.loads(file.read_text())
    assert result["step"] == 4 and result["n"] == 3 and result["split"] == split
    assert {r.task.id.split("/")[1] for r in load_rollouts(file.parent / "greedy.jsonl.gz")} == {
        split
    }
    assert set(result["sampled"]) == {"avg@2", "pass@1", "pass@2", "reward"}
    assert result["sampled"]["pass@2"]["value"] >= result["sampled"]["pass@1"]["value"]
    said = capsys.readouterr().out
    assert "greedy accuracy" in said and f"{split}, n = 3" in said


@pytest.mark.slow
def test_max_time_ends_a_run_whole(tmp_path):
    """The run stops after the step in which the time runs out, evaluated and saved."""
    folder = tmp_path / "short"
    assert train(folder, "trainer.steps=50", "trainer.max_time=0.0001") == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert (
        summary["steps"] == 1 and summary["after"] is not None and summary["ended"] == "out of time"
    )
    assert (folder / "checkpoints" / "step_000001.ckpt").exists()


@pytest.mark.slow
def test_a_target_ends_a_run_as_finished(tmp_path, capsys):
    """evaluation.stop_at 0 is reached at the first evaluation; test problems are played once more
    then. The run goes on with another target only."""
    folder = tmp_path / "target"
    assert train(folder, "trainer.steps=50", "evaluation.every=2", "evaluation.stop_at=0.0") == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["ended"] == "finished"
    assert summary["validation"]["step"] == 2 and summary["after"]["split"] == "test"
    assert (folder / "checkpoints" / "step_000002.ckpt").exists()
    assert (folder / "model" / "config.json").exists()
    assert main(["train", f"resume={folder}"]) == 2
    assert "evaluation.stop_at=null" in capsys.readouterr().err
    same = ["trainer.steps=50", "evaluation.every=2", "evaluation.stop_at=0.0", "resume=auto"]
    assert train(folder, *same) == 0 and "finished already" in capsys.readouterr().out
    assert train(folder, *same, "evaluation.stop_at=null", "trainer.steps=3") == 0
    assert json.loads((folder / "summary.json").read_text())["steps"] == 3


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, capsys):
    folder = tmp_path / "damaged"
    assert train(folder, "trainer.steps=2", "evaluation.n=0") == 0
    newest = folder / "checkpoints" / "step_000002.ckpt"
    newest.write_bytes(newest.read_bytes()[:1000])
    assert main(["train", f"resume={folder}", "trainer.steps=3"]) == 0
    captured = capsys.readouterr()
    assert "step_000002.ckpt is damaged" in captured.err and "after step 1" in captured.out
    assert [r["step"] for r in rows(folder)] == [1, 2, 3]


@pytest.mark.slow
def test_a_named_checkpoint_is_the_one_that_is_used(tmp_path, capsys):
    folder = tmp_path / "named"
    assert train(folder, "trainer.steps=2", "evaluation.n=0") == 0
    first = folder / "checkpoints" / "step_000001.ckpt"
    assert (
        main(
            [
                "evaluate",
                f"run={first}",
                "evaluation.n=2",
                "evaluation.samples=1",
                "evaluation.k=[1]",
            ]
        )
        == 0
    )
    assert json.loads(next((folder / "evaluation").glob("*/result.json")).read_text())["step"] == 1
    assert main(["train", f"resume={first}", "trainer.steps=2"]) == 0
    assert "after step 1" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_that_no_run_has_touched_is_evaluated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            ["evaluate", "model=tiny", "evaluation.n=2", "evaluation.samples=1", "evaluation.k=[1]"]
        )
        == 0
    )
    result = json.loads(
        next((tmp_path / "outputs" / "evaluation").glob("*/result.json")).read_text()
    )
    assert result["model"] == "tiny" and result["checkpoint"] is None


@pytest.mark.slow
def test_ppo_runs_on_the_warm_start_of_guess_number(tmp_path, capsys):
    """Episodes of many steps, end to end; a found number counts as right, and the mean reward
    stands beside it."""
    folder = tmp_path / "guess"
    few = [
        "trainer.steps=2",
        "batch.prompts=8",
        "evaluation.n=8",
        "algorithm.critic.warmup=0",
        "trainer.accelerator=cpu",
    ]
    assert main(["train", "experiment=guess_number_ppo", f"hydra.run.dir={folder}", *few]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    for when in ("before", "after"):
        assert (
            summary[when]["accuracy"] > 0.2
            and 0 < summary[when]["reward"] < summary[when]["accuracy"]
        )
    assert all(row["optim/updates"] > 0 and row["tools/turns"] > 3 for row in rows(folder)[1:])
    assert "sampled at temperature 1" in capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_run_keeps_its_threads_on_a_machine_of_other_cores(tmp_path, monkeypatch, capsys):
    """Sums of another number of threads are rounded differently, so the continuation would not be
    the uninterrupted run's."""
    before = torch.get_num_threads()
    try:
        for threads, words in [
            (2, [*FAST, "trainer.steps=1", "evaluation.n=0", f"hydra.run.dir={tmp_path}"]),
            (1, [f"resume={tmp_path}", "trainer.steps=2"]),
        ]:
            monkeypatch.setattr(
                "rlkit.system.device.choose_threads",
                lambda parameters, cores, threads=threads: threads,
            )
            assert main(["train", *words]) == 0
            assert torch.get_num_threads() == 2
        said = capsys.readouterr().out
        assert (
            "with 2 thread(s)" in said
            and "resume: computes with 2 thread(s), as the run did so far" in said
        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_a_resumed_run_keeps_the_size_of_its_cache_on_a_machine_of_other_memory(
    tmp_path, monkeypatch
):
    """Which rows give way depends on it, and so do the last bits of log-probs."""
    made, make = [], Pages.__init__

    def watched(self, tokens, *given):
        made.append(tokens)
        make(self, tokens, *given)

    monkeypatch.setattr(Pages, "__init__", watched)
    for tokens, words in [
        (5000, [*FAST, "trainer.steps=1", "evaluation.n=0", f"hydra.run.dir={tmp_path}"]),
        (4000, [f"resume={tmp_path}", "trainer.steps=2"]),
    ]:
        monkeypatch.setattr(
            "rlkit.engines.cached.engine.choose_cache_tokens",
            lambda causal, device, tokens=tokens: tokens,
        )
        assert main(["train", *words]) == 0
        assert made[-1] == 5000
