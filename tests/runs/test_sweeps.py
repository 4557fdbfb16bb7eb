"""Sweeps: which jobs there are, what is refused before the first, and what each plugin does for
real."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from copies import begin_sweep
from parametrise import cases
from rlkit.distributed.launch import assign_gpus
from rlkit.errors import ConfigError, install
from rlkit.runs.sweeps.compare import format_comparison, tabulate_results
from rlkit.runs.sweeps.jobs import RunJob, read_jobs, read_objective, record_path, save
from rlkit.runs.sweeps.plan import expand, folder_name, folder_problems, list_corners, make_plan
from rlkit.runs.sweeps.run import count_parallel_jobs, launch, run_job
from rlkit.runs.sweeps.runner import explain_end, make_sweep

FAST = ["debug=fast", "trainer.steps=1", "evaluation.n=0"]


def run_folder(root, name, *, ended="finished", seed=1, after=None, validation=None, title=""):
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"{f'name: {title}' if title else ''}\nseed: {seed}\ntrainer: {{steps: 3}}\n"
    )
    figures = {
        name: {"accuracy": value} if value else None
        for name, value in (("after", after), ("validation", validation))
    }
    (folder / "summary.json").write_text(json.dumps({"ended": ended, "steps": 3} | figures))
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": 0.25}\n{"step": 2, "reward/mean": 0.75}\n{"step": 3, "rew'
    )
    return folder


def test_a_sweep_is_every_combination():
    assert expand(["algorithm=grpo,reinforce", "seed=1,2"]) == [
        ["algorithm=grpo", "seed=1"],
        ["algorithm=grpo", "seed=2"],
        ["algorithm=reinforce", "seed=1"],
        ["algorithm=reinforce", "seed=2"],
    ]


def test_a_search_is_checked_at_its_ends():
    """Every end and choice once, so that a search does not find out after hours that one of them
    cannot run."""
    jobs = list_corners(["optimizer.lr=tag(log, interval(1e-4, 1e-2))", "kl=k1,k3", "seed=4"])
    assert jobs == [
        ["optimizer.lr=0.0001", "kl=k1", "seed=4"],
        ["optimizer.lr=0.01", "kl=k1", "seed=4"],
        ["optimizer.lr=0.0001", "kl=k3", "seed=4"],
    ]


@pytest.mark.slow
def test_a_plan_takes_the_values_of_a_preset_and_of_the_command_line(tmp_path, monkeypatch):
    """hydra.sweeper.params in a preset; the command line narrows them. A key that only a signature
    knows needs no plus here either."""
    (tmp_path / "experiment").mkdir()
    preset = (
        "# @package _global_\nhydra:\n  sweeper:\n    params:\n      kl: k1,k3\n      seed: 1,2,3\n"
    )
    (tmp_path / "experiment" / "mine.yaml").write_text(preset)
    monkeypatch.chdir(tmp_path)
    plan = make_plan(["experiment=mine", "seed=5", "optimizer.amsgrad=true"], str(tmp_path))
    assert plan.total == 2 and plan.arguments == [
        "experiment=mine",
        "seed=5",
        "++optimizer.amsgrad=true",
    ]
    with pytest.raises(ConfigError, match=r"batch\.promts"):
        make_plan(["experiment=mine", "+batch.promts=1"], str(tmp_path))


@pytest.mark.slow
def test_a_sweep_takes_rewards_of_the_user(tmp_path, monkeypatch):
    """Hydra composes the jobs, and finds no option for a function."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_to_sweep.py").write_text(
        "def one(rollout): return 1.0\ndef two(rollout): return 2.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    both = "[mine_to_sweep.one,mine_to_sweep.two]"
    done = []
    for words in (
        [f"reward=mine_to_sweep.one,numeric,{both}"],
        ["reward=mine_to_sweep.two", "reward.terms.two.weight=2,3"],
    ):
        plan = make_plan(words, None)
        launch(plan, lambda config: done.append(HydraConfig.get().sweep.subdir))
    assert done == [
        "reward=mine_to_sweep.one",
        "reward=numeric",
        f"reward={both}",
        "reward.terms.two.weight=2,reward=mine_to_sweep.two",
        "reward.terms.two.weight=3,reward=mine_to_sweep.two",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, expected",
    cases(
        [
            (["algorithm=grpo,grpp"], "Did you mean 'grpo'"),
            (["seed=1,2", "resume=outputs/grpo/x"], "resume=auto"),
            (["seed=1"], "no key has several values"),
            (["seed=1,2", "hydra/launcher=submitit_nowhere"], install("submitit")),
        ],
        1,
        unpack=True,
    ),
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_sweep_is_refused_before_its_first_job(words, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        make_plan(words, None)
    assert expected in str(refusal.value) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "option, extra",
    cases(
        [
            ("launcher=parallel", "joblib"),
            ("launcher=slurm", "submitit"),
            ("sweeper=search", "optuna"),
        ],
        1,
        unpack=True,
    ),
)
def test_a_missing_plugin_is_named_with_its_extra(option, extra, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlkit.runs.sweeps.plan.is_installed", lambda name: False)
    with pytest.raises(ConfigError, match=re.escape(install(extra))):
        make_plan(["seed=1,2", f"hydra/{option}"], None)


def test_folder_names_hold_no_slash_and_are_not_too_long():
    assert (
        folder_name("algorithm/policy_loss=clipped,seed=1")
        == "algorithm.policy_loss=clipped,seed=1"
    )
    long = [folder_name("a" * 300 + f",seed={i}") for i in (1, 2)]
    assert len(set(long)) == 2 and max(map(len, long)) < 200


def test_a_folder_with_a_run_is_refused_or_continued(tmp_path):
    folder = run_folder(tmp_path, "seed=1")
    assert "resume=auto" in folder_problems(folder, {"seed": 1, "trainer": {"steps": 3}}, False)[0]
    assert folder_problems(folder, {"seed": 1, "trainer": {"steps": 3}}, True) == []
    assert (
        "trainer.steps was 3 and is now 9"
        in folder_problems(folder, {"seed": 1, "trainer": {"steps": 9}}, True)[0]
    )
    assert (
        "seed was 1 and is now 2"
        in folder_problems(folder, {"seed": 2, "trainer": {"steps": 3}}, True)[0]
    )


def test_the_objective_is_the_accuracy_else_the_reward(tmp_path):
    """Never the accuracy on test problems: what is searched on them cannot be reported on them."""
    assert read_objective(run_folder(tmp_path, "a", after=0.9, validation=0.6)) == 0.6
    assert read_objective(run_folder(tmp_path, "d", after=0.9)) == 0.5
    assert (
        read_objective(run_folder(tmp_path, "b")) == 0.5
    )  # mean of 0.25 and 0.75; the half-written row is left out
    assert read_objective(run_folder(tmp_path, "c", ended="failed")) is None


def test_the_comparison_puts_the_best_first_and_sums_up_seeds(tmp_path):
    jobs = []
    for number, (algorithm, seed, after, validation) in enumerate(
        [("grpo", 1, 0.9, 0.1), ("grpo", 2, 0.7, 0.2), ("dapo", 1, 0.3, 0.8)]
    ):
        overrides = [f"algorithm={algorithm}", f"seed={seed}", "debug=fast"]
        folder = run_folder(
            tmp_path, f"{number}", seed=seed, after=after, validation=validation, title=algorithm
        )
        jobs.append(RunJob(number, overrides, folder, "finished"))
        save(tmp_path / "jobs" / f"{number}.json", jobs[-1])
    assert read_jobs(tmp_path / "jobs") == jobs
    first, second, verdict, said = format_comparison(jobs).split("\n\n")
    assert [line.split()[:2] for line in first.splitlines()[2:]] == [
        ["dapo", "1"],
        ["grpo", "2"],
        ["grpo", "1"],
    ]
    assert second.splitlines()[-2].split() == [
        "grpo",
        "2",
        "0.800",
        "0.141",
    ]  # of test accuracy: sd of 0.9, 0.7 is 0.1 √2
    assert (
        verdict.splitlines()[0]
        == "dapo against grpo: no difference can be claimed; they share 1 seed, and fewer than 10"
        " claim nothing."
    )
    assert said == "before and after: test accuracy; best first by validation accuracy"
    assert "debug" not in first


def test_a_sweep_over_rewards_keeps_their_names(tmp_path):
    jobs = [
        RunJob(n, [f"reward={name}"], run_folder(tmp_path, name), "finished")
        for n, name in enumerate(("numeric", "format"))
    ]
    rows = tabulate_results(jobs)
    assert [(row["reward"], row["training reward"]) for row in rows] == [
        ("numeric", 0.5),
        ("format", 0.5),
    ]


@pytest.mark.slow
def test_cores_are_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlkit.runs.sweeps.run.count_cores", lambda: 8)
    monkeypatch.setattr("rlkit.runs.sweeps.plan.is_installed", lambda name: True)
    assert [
        count_parallel_jobs(make_plan(["seed=1,2,3", *o], None))
        for o in ([], ["hydra/launcher=parallel"], ["hydra/launcher=slurm_local"])
    ] == [
        1,
        2,
        3,
    ]


def test_the_reason_of_a_failure_is_rlkits_own_sentence(tmp_path):
    log = tmp_path / "log"
    log.write_text("rlkit: grpo, kl k3\nstep 1\nrlkit: reward 'x' raised KeyError\nrun folder: y\n")
    assert explain_end(1, log) == "exit 1: reward 'x' raised KeyError"
    assert explain_end(-9, log) == "signal 9: run folder: y"
    begin = log.stat().st_size  # of the next attempt, which another library ends
    with log.open("a") as file:
        file.write("rlkit: grpo, kl k3\nIndexError: 7\n")
    assert explain_end(1, log, begin) == "exit 1: IndexError: 7"


def test_jobs_side_by_side_have_gpus_of_their_own(tmp_path, monkeypatch):
    """All of them landed on the first one. A job that ends makes room for the next; more jobs than
    GPUs go round."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-7")

    def place(stack, *, jobs=4, devices=1):
        return stack.enter_context(assign_gpus(tmp_path, jobs=jobs, devices=devices)).get(
            "CUDA_VISIBLE_DEVICES"
        )

    with ExitStack() as all_jobs, ExitStack() as second:
        assert [place(all_jobs), place(second), place(all_jobs), place(all_jobs)] == [
            "4",
            "5",
            "GPU-7",
            "4",
        ]
        second.close()
        assert place(all_jobs) == "5"
    with ExitStack() as alone:
        assert (
            place(alone, jobs=1) is None and place(alone, jobs=2, devices=2) is None
        )  # nothing to choose from
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert place(alone, jobs=2) is None
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
        assert [place(alone, jobs=2, devices=2), place(alone, jobs=2, devices=2)] == ["0,1", "2,3"]


def test_a_job_is_started_on_its_gpu(tmp_path, monkeypatch):
    """Two jobs at once, of which the other one has the first GPU."""
    started = []

    class Process:
        pid = 0

        def __init__(self, command, *, env, **others):
            started.append(env["CUDA_VISIBLE_DEVICES"])

        def wait(self, timeout):
            return 1

    (tmp_path / "jobs").mkdir()
    state = {
        "overrides": {"task": ["seed=1"]},
        "sweep": {"dir": str(tmp_path), "subdir": "seed=1"},
        "job": {"num": 0},
    }
    monkeypatch.setattr("hydra.core.hydra_config.HydraConfig.get", lambda: OmegaConf.create(state))
    monkeypatch.setattr("rlkit.runs.sweeps.runner.subprocess.Popen", Process)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with assign_gpus(tmp_path / "jobs" / "gpus", jobs=2, devices=1):
        run_job(OmegaConf.create({"trainer": {"devices": 1}}), shared=make_sweep(tmp_path, None, 2))
    assert started == ["1"]


# ------------------------------------------------------------------------------- real jobs, minutes


def train(folder, *words, **settings):
    command = [sys.executable, "-m", "rlkit", "train", "-m", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, **settings)


def finished(root):
    return sorted(
        p.parent.name
        for p in root.glob("*/summary.json")
        if json.loads(p.read_text())["ended"] == "finished"
    )


@pytest.mark.slow
def test_jobs_have_folders_a_failed_one_is_told_and_the_rest_goes_on(tmp_path, forked):
    """A job whose checkpoint cannot be written fails; a second command does the other ones not
    again."""

    def train(folder, *words):
        process = begin_sweep(forked, ["train", "-m", *words], folder, {})
        said = process.communicate()
        return subprocess.CompletedProcess(words, process.returncode, *said)

    words = ["algorithm=grpo", "seed=1,2,3", *FAST]
    root = tmp_path / "outputs" / "sweep"
    root.mkdir(parents=True)
    broken = root / "algorithm=grpo,debug=fast,evaluation.n=0,seed=2,trainer.steps=1"
    broken.mkdir()
    (broken / "checkpoints").write_text("a file where a folder has to be")
    done = train(tmp_path, *words)
    assert (
        done.returncode == 1
        and "2/3  seed=2  failed  exit 1" in done.stdout
        and len(finished(root)) == 2
    ), done.stdout + done.stderr
    (broken / "checkpoints").unlink()
    assert "reward" in (root / "comparison.csv").read_text()
    refused = train(tmp_path, *words)
    assert refused.returncode == 2 and "resume=auto" in refused.stderr
    stamps = {p: p.stat().st_mtime_ns for p in root.glob("*/summary.json") if p.parent != broken}
    again = train(tmp_path, *words, "resume=auto")
    assert (
        again.returncode == 0
        and again.stdout.count("done earlier") == 2
        and len(finished(root)) == 3
    )
    assert all(p.stat().st_mtime_ns == stamp for p, stamp in stamps.items())


def begin(command: list[str], folder: Path, **more) -> subprocess.Popen:
    """Starts a command that takes Ctrl-C, even where a shell without job control started pytest
    with SIGINT ignored."""
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, preexec_fn=heed, **more
    )


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path):
    """With new processes, as a shell starts them."""
    words = ["seed=1,2", "debug=fast", "trainer.steps=6", "evaluation.n=0"]
    root = tmp_path / "outputs" / "sweep"
    process = begin([sys.executable, "-m", "rlkit", "train", "-m", *words], tmp_path)
    deadline = time.monotonic() + 300
    while not list(root.glob("*/checkpoints/*.ckpt")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 130 and "resume=auto" in said and len(finished(root)) < 2
    done = train(tmp_path, *words, "resume=auto")
    assert done.returncode == 0 and len(finished(root)) == 2, done.stdout + done.stderr


def needs(plugin):
    absent = (
        importlib.util.find_spec("hydra_plugins") is None
        or importlib.util.find_spec(f"hydra_plugins.{plugin}") is None
    )
    return pytest.mark.skipif(absent, reason=f"{plugin} is not installed")


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", ["basic", pytest.param("parallel", marks=needs("hydra_joblib_launcher"))]
)
def test_a_ctrl_c_ends_a_sweep_and_leaves_no_process(launcher, tmp_path):
    """What a terminal does: SIGINT to every process of the foreground group, the launcher's workers
    among them."""
    words = [
        f"hydra/launcher={launcher}",
        "seed=1,2",
        "debug=fast",
        "trainer.steps=50",
        "evaluation.n=0",
    ]
    root = tmp_path / "outputs" / "sweep"
    command = [sys.executable, "-m", "rlkit", "train", "-m", *words]
    process = begin(command, tmp_path, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 300
    while len({p.parent for p in root.glob("*/checkpoints/*.ckpt")}) < (
        2 if launcher == "parallel" else 1
    ):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    said, errors = process.communicate(timeout=300)
    assert (
        process.returncode == 130
        and "interrupted" in said
        and "to go on         rlkit train -m" in said
    ), said + errors
    assert "running jobs save and end" in errors and "Traceback" not in said + errors
    while left := [
        p for p in Path("/proc").glob("[0-9]*") if session_or_folder(p, process.pid, tmp_path)
    ]:
        assert time.monotonic() < deadline, [
            (p / "cmdline").read_bytes() for p in left
        ]  # joblib's workers need a moment
        time.sleep(0.2)


def session_or_folder(process, session, folder):
    """Whether a process is of a session, or works in a folder: a job has a group, but no session of
    its own."""
    try:
        return (
            int((process / "stat").read_text().rpartition(")")[2].split()[3]) == session
            or (process / "cwd").resolve() == folder
        )
    except OSError:
        return False


@pytest.mark.slow
@needs("hydra_optuna_sweeper")
def test_a_search_takes_no_trials_of_an_earlier_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["experiment=search", "evaluation.every=0", "hydra.sweep.dir=s"]
    folder = tmp_path / "s" / "trial"
    folder.mkdir(parents=True)
    (tmp_path / "s" / "jobs").mkdir()
    save(record_path(tmp_path / "s", folder), RunJob(0, [], folder))
    with pytest.raises(ConfigError, match="holds trials of a search already"):
        make_plan(words, None)
    assert make_plan([*words, "resume=auto"], None).total


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ["experiment=sweep_parallel", "algorithm=grpo", "seed=1,2"],
            marks=needs("hydra_joblib_launcher"),
        ),
        pytest.param(
            ["experiment=sweep_slurm", "hydra/launcher=slurm_local", "algorithm=grpo", "seed=1,2"],
            marks=needs("hydra_submitit_launcher"),
        ),
        pytest.param(
            ["experiment=search", "hydra.sweeper.n_trials=2", "evaluation.every=0"],
            marks=needs("hydra_optuna_sweeper"),
        ),
    ],
    ids=lambda words: words[0],
)
def test_plugins_run_for_real(words, tmp_path):
    done = train(tmp_path, *words, *FAST)
    assert done.returncode == 0 and "2 of 2 jobs finished" in done.stdout, done.stdout + done.stderr
    assert done.stderr == "" and len(finished(next((tmp_path / "outputs").iterdir()))) == 2
