"""Validation on the way, test before and after: what is played when, what may decide what, and
which figure is of which split."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from parametrise import cases
from rlkit.commands.cli import main
from rlkit.commands.train import format_closing_lines
from rlkit.config.compose import compose, experiment
from rlkit.config.problems.rows import load_tasks
from rlkit.config.problems.schedules import schedule_problems
from rlkit.episodes.evaluation import summarise_accuracy
from rlkit.episodes.record import load_rollouts
from rlkit.errors import ConfigError, DataError
from rlkit.rewards import Reward
from rlkit.statistics import wilson
from rlkit.system import shards
from rlkit.training.callbacks import evaluation
from rlkit.training.callbacks.checkpoints import load_checkpoint
from rlkit.training.callbacks.evaluation import PREFIXES, HeldOut, flat_start
from rlkit.training.experiment import BatchSize, Evaluation, TaskSource
from rlkit.training.run import describe_end
from rlkit.training.schedules import Schedule, adaptive
from rlkit.types import SPLITS, Rollout, Splits, Task

TASK = Task("t", ({"role": "user", "content": "?"},), "1")
ALL = Splits([TASK], [TASK], [TASK])


class Played(HeldOut):
    """Without a model: what was played is written down, and each split has an accuracy of its
    own."""

    def evaluate(self, trainer, module, split):
        if not getattr(self.tasks, split):
            return {}, []
        accuracy = {"validation": 0.1 * module.rl_step, "test": 1.0}[split]
        self.results.setdefault(split, {})[module.rl_step] = {"split": split, "accuracy": accuracy}
        row = {f"{PREFIXES[split]}{name}": accuracy for name in ("accuracy", "reward")}
        return row | {"perf/eval_s": 1.0}, []


def play(folder, *, steps: int, every: int, stop_at: float | None = None, tasks=ALL):
    """A run of so many steps: its module and the callback."""
    settings = Evaluation(Reward("none", {}), every=every, stop_at=stop_at)
    module = SimpleNamespace(
        rl_step=0,
        total_steps=steps,
        metrics={},
        experiment=SimpleNamespace(
            evaluation=settings, algorithm=SimpleNamespace(episodes="of a file")
        ),
        is_out_of_time=lambda: False,
    )
    trainer = SimpleNamespace(should_stop=False, loggers=[], print=lambda *_: None)
    held_out = Played(tasks, folder / "metrics.jsonl", {})
    held_out.on_train_start(trainer, module)
    while not trainer.should_stop:
        module.rl_step, module.metrics = module.rl_step + 1, {}
        trainer.should_stop = module.rl_step == steps
        held_out.on_train_batch_end(trainer, module)
    return module, held_out.results


@pytest.mark.parametrize(("steps", "every"), list(itertools.product((1, 4, 5), (0, 1, 2, 5, 9))))
def test_what_is_played_when(tmp_path, steps, every):
    """Validation at the first step, every so many and the last, or never; test at the first and the
    last."""
    _, results = play(tmp_path, steps=steps, every=every)
    assert sorted(results["test"]) == [0, steps]
    assert sorted(results.get("validation", {0: 0})) == sorted(
        {0} | ({*range(0, steps, every), steps} if every else set())
    )


def test_validation_ends_a_run_and_test_never_does(tmp_path):
    """Test accuracy is 1 from the start on here; validation reaches 0.3 at step 3 and is looked at
    every second step."""
    module, results = play(tmp_path, steps=9, every=2, stop_at=0.3)
    assert module.rl_step == 4 and describe_end(module, results)[0] == "finished"
    assert sorted(results["test"]) == [
        0,
        4,
    ], "test is played after the step that turned out to be the last"
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert first["perf/eval_s"] == 2.0, "the time of both"
    module, results = play(tmp_path, steps=3, every=2, stop_at=0.9)
    assert module.rl_step == 3 and module.metrics["perf/eval_s"] == 2.0, "the time of both"
    assert (
        describe_end(SimpleNamespace(**vars(module) | {"total_steps": 9}), results)[0]
        == "interrupted"
    )


def test_a_run_without_evaluations_writes_nothing(tmp_path):
    play(tmp_path, steps=2, every=0, tasks=Splits([TASK]))
    assert not (tmp_path / "metrics.jsonl").exists()


# ---------------------------------------------------------------------------------- what is refused


def rows_file(folder, count: int) -> str:
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": f"What is {i} + 0?", "answer": str(i)}) + "\n"
            for i in range(count)
        )
    )
    return str(path)


@pytest.mark.slow
def test_validation_problems_are_loaded_where_they_are_played(tmp_path):
    words = ["task=jsonl", f"task.path={rows_file(tmp_path, 60)}"]
    never, often = (
        load_tasks(experiment(compose([*words, *more])))
        for more in ([], ["evaluation.every=5", "evaluation.n=3"])
    )
    assert never.train == often.train, "how often is evaluated does not change what is trained on"
    assert not never.validation and never.test and len(often.validation) == len(often.test) == 3


@pytest.mark.slow
def test_an_empty_validation_split_is_refused_with_what_to_set(tmp_path):
    words = ["task=jsonl", f"task.path={rows_file(tmp_path, 60)}", "task.validation=0.0"]
    load_tasks(experiment(compose(words)))
    with pytest.raises(
        DataError, match=r"task\.validation=0\.0 leaves no validation rows.*evaluation\.every=0"
    ):
        load_tasks(experiment(compose([*words, "evaluation.every=5"])))
    x = experiment(compose(["evaluation.every=5"]))
    own = x._replace(
        task=TaskSource(lambda *, split: [] if split == "validation" else x.task(split=split))
    )
    with pytest.raises(
        ConfigError, match=r"no validation problems.*task\.validation.*evaluation\.every=0"
    ):
        load_tasks(own)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["callbacks.checkpoint.best=test/accuracy", "evaluation.every=2"],
            r"best=test/accuracy.*choose eval/accuracy",
        ),
        (["callbacks.checkpoint.best=eval/accuracy"], r"best=eval/accuracy.*set evaluation\.every"),
        (
            [
                "schedule=grpo_to_dapo",
                "schedule.phases.explore.until='test/accuracy > 0.5'",
                "evaluation.every=2",
            ],
            "wait for 'eval/accuracy'",
        ),
    ],
)
def test_what_would_let_test_problems_decide_is_refused(overrides, words):
    with pytest.raises(ConfigError, match=words):
        experiment(compose(overrides))


def test_a_number_that_waits_for_a_test_figure_is_refused():
    x = experiment(compose(["evaluation.every=2"]))
    waits = x._replace(
        kl=x.kl._replace(coef=0.5),
        schedule=Schedule({"kl.coef": adaptive(start=1, target=0.9, metric="test/accuracy")}),
    )
    assert any(
        "kl.coef: waits for 'test/accuracy'" in problem for problem in schedule_problems(waits)
    )


def test_an_unknown_split_is_refused(capsys):
    assert main(["evaluate", "model=tiny", "split=dev"]) == 2
    assert "split=dev: there are train, validation, test" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------- a run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three steps with an evaluation every second one: the folder, its rows, its summary."""
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    words = [
        "debug=fast",
        "trainer.accelerator=cpu",
        "trainer.steps=3",
        "evaluation.every=2",
        "evaluation.n=3",
        "logger=none",
        "task.max_samples=64",
        "generation.max_new_tokens=32",
    ]
    assert (
        main(
            ["train", *words, "callbacks.checkpoint.best=eval/accuracy", f"hydra.run.dir={folder}"]
        )
        == 0
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return folder, rows, json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_rows_and_summary_name_the_split(run, tmp_path):
    _, rows, summary = run
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2, 3]
    assert [row["step"] for row in rows if "test/accuracy" in row] == [0, 3]
    assert (
        summary["before"]["split"] == summary["after"]["split"] == "test"
        and summary["validation"]["split"] == "validation"
    )
    assert (
        summary["after"]["accuracy"] == rows[-1]["test/accuracy"]
        and summary["validation"]["accuracy"] == rows[-1]["eval/accuracy"]
    )
    table = format_closing_lines(summary, tmp_path).splitlines()
    assert any(line.split() == ["test", "before", "after"] for line in table)


@pytest.mark.slow
def test_the_recorded_replies_are_of_their_split(run):
    folder, *_ = run
    for split, steps in (("validation", (0, 2, 3)), ("test", (0, 3))):
        recorded = shards.index_steps(folder / "held_out" / split)
        assert [*recorded] == list(steps)
        assert {
            r.task.id.split("/")[1] for part in recorded.values() for r in load_rollouts(part)
        } == {split}


@pytest.mark.slow
def test_the_best_checkpoint_is_the_best_on_validation(run):
    folder, rows, _ = run
    best = json.loads((folder / "checkpoints" / "best.json").read_text())
    values = {
        row["step"]: row["eval/accuracy"] for row in rows if row["step"] and "eval/accuracy" in row
    }
    assert (
        best["metric"] == "eval/accuracy"
        and best["value"] == max(values.values()) == values[best["step"]]
    )


@pytest.mark.slow
def test_a_resumed_run_reads_back_both_splits(run):
    folder, _, summary = run
    results = load_checkpoint(folder / "checkpoints")[1]["callbacks"]["HeldOut"]["results"]
    assert results["test"] == {0: summary["before"], 3: summary["after"]}
    assert results["validation"][3] | {"step": 3} == summary["validation"] and sorted(
        results["validation"]
    ) == [0, 2, 3]


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_what_was_validation_and_what_was_test(run, tmp_path):
    """Its `before` is the one of its first process, and the rows before it stay."""
    old, rows, summary = run
    folder = Path(shutil.copytree(old, tmp_path / "run", symlinks=True))
    assert main(["train", f"resume={folder}", "trainer.steps=5"]) == 0
    longer = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert longer[:4] == rows
    assert [row["step"] for row in longer if "eval/accuracy" in row] == [0, 2, 3, 4, 5]
    assert [row["step"] for row in longer if "test/accuracy" in row] == [0, 3, 5]
    after = json.loads((folder / "summary.json").read_text())
    assert (
        after["before"] == summary["before"]
        and after["after"]["split"] == "test"
        and after["validation"]["step"] == 5
    )


@pytest.mark.slow
@pytest.mark.parametrize("split", cases(SPLITS, 1))
def test_rollout_plays_the_split_that_is_named(split, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                "rollout",
                f"split={split}",
                "n=2",
                "task.max_samples=2",
                "generation.max_new_tokens=4",
                "trainer.accelerator=cpu",
            ]
        )
        == 0
    )
    (out,) = (tmp_path / "outputs" / "rollout").iterdir()
    assert json.loads((out / "summary.json").read_text())["split"] == split
    assert {r.task.id.split("/")[1] for r in load_rollouts(out / "rollouts.jsonl.gz")} == {split}
    assert ["split", split] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_a_run_that_ends_below_its_start_says_so_first(tmp_path):
    """It printed its table and "finished". Within the interval nothing is said."""

    def said(right: int) -> list[str]:
        sides = [measured(n) for n in (48, right)]
        ended = {"ended": "finished", "steps": 9, "wall_seconds": 1.0, "tokens": 1}
        return format_closing_lines(
            dict(zip(("before", "after"), sides, strict=True)) | ended, tmp_path
        )

    def measured(right: int) -> dict:
        low, high = wilson(right, 64)
        figures = {"accuracy": right / 64, "reward": right / 64, "n": 64, "distinct": 64}
        spans = {"interval": [low, high], "reward_interval": [low, high]}
        return figures | spans | {"temperature": 0.0}

    assert said(16).splitlines()[1] == (
        "warning: this run ended below its start: test accuracy 0.750 → 0.250"
    )
    assert "below its start" not in said(46) + said(60)


def test_a_gain_of_replies_that_end_is_shown_beside_the_accuracy(tmp_path):
    """A policy that learns to stop gains accuracy without learning to solve anything."""

    def said(*cut: float) -> str:
        sides = [
            summarise_accuracy(
                [*answers(*[0] * 8, truncation="length" if share else ""), *answers(*[1] * 8)]
            )
            for share in cut
        ]
        ended = {"ended": "finished", "steps": 9, "wall_seconds": 1.0, "tokens": 1}
        return format_closing_lines(
            dict(zip(("before", "after"), sides, strict=True)) | ended, tmp_path
        )

    (line,) = [line for line in said(1, 0).splitlines() if "cut off" in line]
    assert line.split() == ["episodes", "cut", "off", "0.500", "0.000"]
    assert "cut off" not in said(0, 0)


def answers(*right, truncation=""):
    """Rollouts with these rewards."""
    return [
        Rollout(TASK, (), reward=float(own), rewards={"r": float(own)}, truncation=truncation)
        for own in right
    ]


def test_a_start_that_teaches_nothing_is_named_before_the_first_step():
    assert flat_start(answers(*[0] * 7)) is None  # too few to judge
    assert flat_start(answers(*[0] * 7, 1)) is None
    assert flat_start([]) is None
    wrong = flat_start(answers(*[0] * 8))
    assert f"One reply is '', where the answer is {TASK.answer!r}" in wrong
    assert "warm the model up on whole conversations (experiment=sft)" in wrong
    assert "16 of them were cut, so raise generation.max_new_tokens" in flat_start(
        answers(*[0] * 16, truncation="length")
    )
    assert "choose harder problems" in flat_start(answers(*[1] * 16))


def test_a_long_run_says_before_its_first_step_how_long_it_samples(tmp_path, monkeypatch):
    """A pass of 3 problems takes 6 s, so a step of 8 rollouts takes 16 s."""
    said: list[str] = []
    played = answers(1, 0, 1)

    def evaluate(self, trainer, module, split):
        return {"perf/eval_s": 3.0}, played if split == "test" else []

    monkeypatch.setattr(HeldOut, "evaluate", evaluate)

    def start(steps: int, episodes: object) -> list[str]:
        said.clear()
        x = SimpleNamespace(
            evaluation=SimpleNamespace(curve_temperature=0.0),
            algorithm=SimpleNamespace(episodes=episodes),
            batch=BatchSize(prompts=2, group_size=4),
        )
        module = SimpleNamespace(rl_step=0, experiment=x, total_steps=steps, metrics={})
        trainer = SimpleNamespace(print=said.append, loggers=[])
        HeldOut(Splits((), (), (TASK,)), tmp_path / "metrics.jsonl", {}).on_train_start(
            trainer, module
        )
        return said

    assert (
        "  at this pace, sampling takes 0:16 a step and 16:00 in all; updates come on top"
        in start(60, None)
    )
    assert not any("pace" in line for line in start(7, None))  # 112 s
    assert not any("pace" in line for line in start(60, object()))  # nothing is sampled


@pytest.mark.slow
@pytest.mark.parametrize("algorithm, warned", [("grpo", True), ("sft", False)])
def test_the_warning_of_the_start_stands_before_the_first_step(algorithm, warned, tmp_path, capsys):
    """A run with algorithm=sft need not be right at its start."""
    rows = [{"prompt": f"Say {i}.", "answer": "123456789"} for i in range(40)]
    if algorithm == "sft":
        messages = [{"role": "assistant", "content": "no"}]
        rows = [
            {"messages": [{"role": "user", "content": row["prompt"]}, *messages]} for row in rows
        ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [
        f"algorithm={algorithm}",
        f"task={'conversations' if algorithm == 'sft' else 'jsonl'}",
        f"task.path={tmp_path / 'rows.jsonl'}",
        "task.held_out=0.5",
        "kl=none",
        "reference=none",
        "batch.prompts=2",
        f"batch.group_size={1 if algorithm == 'sft' else 2}",
        "generation.max_new_tokens=8",
        "trainer.steps=1",
        "evaluation.n=16",
        "logger=none",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    assert main(["train", *words]) == 0
    said = capsys.readouterr().out
    start, _, _ = said.partition("step 1/1")
    assert ("answers before training is right" in start) == warned


def test_an_evaluation_moves_nobodys_random_numbers(tmp_path, monkeypatch):
    """Its rewards may draw, before training and after it alike; the run's rewards draw as if it had
    not been."""
    drawn = []

    def played(policy, tasks, *, reward, **_):
        drawn.append(random.random())
        return {"accuracy": 0.5, "interval": [0, 1], "reward": 0.5, "reward_interval": [0, 1]}, []

    monkeypatch.setattr(evaluation, "greedy_accuracy", played)
    precision = SimpleNamespace(forward_context=nullcontext)
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(precision_plugin=precision), is_global_zero=False
    )
    x = experiment(compose(["evaluation.n=1"]))
    module = SimpleNamespace(experiment=x, policy=None, model=None, rl_step=3)
    before = random.getstate()
    row, _ = HeldOut(ALL, tmp_path / "metrics.jsonl", {}).evaluate(trainer, module, "validation")
    assert row["eval/accuracy"] == 0.5 and random.getstate() == before
    random.random()
    HeldOut(ALL, tmp_path / "metrics.jsonl", {}).evaluate(trainer, module, "validation")
    assert drawn[0] == drawn[1]


AWAY = """
from rlkit.episodes.episode import mark_failed
from rlkit.types import Environment


class Session:
    tools = {}

    def __init__(self, task):
        self.task = task

    def first_prompt(self):
        return self.task.messages

    def answer(self, rollout):
        if int(self.task.id.rpartition("/")[2]) % 2:
            return mark_failed(rollout, "the server is away"), None
        return rollout, None


def make():
    return Environment(session=Session)
"""


@pytest.mark.slow
def test_failures_of_the_environment_in_an_evaluation_are_said(tmp_path, monkeypatch, capfd):
    """They count as wrong, and nothing said so but the curve."""
    (tmp_path / "away.py").write_text(AWAY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = [
        "debug=fast",
        "trainer.accelerator=cpu",
        "trainer.steps=1",
        "evaluation.every=1",
        "evaluation.n=8",
        "logger=none",
        "task.max_samples=64",
        "generation.max_new_tokens=64",
        "environment=single_turn",
        "environment._target_=away.make",
        "batch.prompts=8",
    ]
    assert main(["train", *words, "hydra.run.dir=run"]) == 0
    failed = r"the environment failed in [1-7] of 8 episodes; they are not scored"
    said = capfd.readouterr().out
    for split, step in itertools.product(("validation", "test"), (0, 1)):
        assert re.search(f"warning: the {split} problems after step {step}: {failed}", said)
    sampled = ["evaluation.samples=2", "evaluation.k=[1]"]
    assert main(["evaluate", "run=run", *sampled]) == 0
    said = capfd.readouterr().out
    assert re.search(f"warning: {failed}", said)
    assert re.search("warning: the environment failed in [0-9]+ of 16 episodes", said)
