"""Several ranks are one process: shares, gradients, metrics, checkpoints; and how it ends where one
of them does not go on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from safetensors.torch import load_file

import ranks_worker
from copies import start_copy
from rlkit.commands.cli import main
from rlkit.config.compose import compose, experiment
from rlkit.distributed import launch, ranks
from rlkit.errors import ConfigError, NonFinite
from rlkit.models.load import load_policy
from rlkit.system.device import silence_frameworks

# ------------------------------------------------------------------------------------------- shares


@pytest.fixture
def as_rank(monkeypatch):
    """Makes this process believe that it is rank r of n."""

    def pretend(r: int, n: int) -> None:
        monkeypatch.setattr(ranks, "rank", lambda: r)
        monkeypatch.setattr(ranks, "size", lambda: n)

    return pretend


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_every_item_is_worked_on_once_at_its_own_position(as_rank, monkeypatch, n):
    """Also with fewer items than ranks, where some have nothing to do."""
    monkeypatch.setattr(ranks, "gather", lambda make: [make()])
    for items in ([], [10], list(range(10, 15))):
        found = []
        for r in range(n):
            as_rank(r, n)
            found += ranks.split_work(
                items, lambda own, begin: [(begin + i, item) for i, item in enumerate(own)]
            )
        assert found == list(enumerate(items))


def test_groups_are_dealt_whole_and_evenly(as_rank):
    """Every row on exactly one rank, the rows of a group together, and loads that differ by less
    than the longest group."""
    owners = torch.tensor([0, 1, 1, 2, 3, 3, 3, 4])
    lengths = torch.tensor([9, 2, 3, 7, 1, 1, 1, 4])
    masks = []
    for r in range(2):
        as_rank(r, 2)
        masks.append(ranks.assign_groups(lengths, owners))
    assert torch.equal(masks[0], ~masks[1])
    assert all(len(set(masks[0][owners == i].tolist())) == 1 for i in range(5))
    loads = [int(lengths[mask].sum()) for mask in masks]
    assert loads == [13, 15]  # 9 + 4 and 7 + 5 + 3


def test_every_rank_has_as_many_micro_batches_as_the_busiest(as_rank, monkeypatch):
    """What fills up is marked, so that it adds nothing; a rank without any takes the spare one."""
    as_rank(0, 2)
    monkeypatch.setattr(ranks, "all_reduce_max", lambda number: 3)
    assert ranks.pad_work(["a", "b"], spare=lambda: "s") == [("a", True), ("b", True), ("b", False)]
    assert ranks.pad_work([], spare=lambda: "s") == [("s", False)] * 3


# -------------------------------------------------------------------------------- configs and start


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.devices=2"], "choose trainer=ddp"),
        (["trainer=ddp", "trainer.devices=0"], "trainer.devices=0: must be at least 1"),
        (["trainer=ddp", "batch.prompts=1"], "2 ranks need at least as many prompts"),
        (["trainer=ddp", "trainer.timeout=0"], "trainer.timeout=0"),
        (
            [
                "trainer=fsdp",
                "model.lora.rank=4",
                "schedule=on_reward",
                "+reference@schedule.phases.refine.reference=frozen",
            ],
            "a reference of its own",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_several_ranks_cannot_do_is_refused_with_what_to_do(overrides, said):
    with pytest.raises(ConfigError, match=said):
        experiment(compose(overrides))


@pytest.mark.slow
def test_more_machines_need_a_launcher_from_outside(capsys):
    assert main(["train", "trainer=ddp", "trainer.nodes=2", "batch.prompts=8"]) == 2
    assert "srun --ntasks=4 --ntasks-per-node=2" in capsys.readouterr().err


def test_ranks_are_started_once():
    """Under torchrun, and under srun with a task a device, nothing is started; an allocation alone
    is no rank."""
    torchrun = dict.fromkeys(
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"), "1"
    )
    assert launch.is_started_outside(torchrun, 2, 1)
    assert launch.is_started_outside({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, 2, 1)
    assert not launch.is_started_outside({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, 2, 1)
    assert not launch.is_started_outside({}, 2, 1)


def test_a_run_where_a_cluster_is_entered_is_not_told_to_use_srun(tmp_path, monkeypatch):
    """Lightning warns wherever the command is installed, and a warning is an error in these
    tests."""
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    silence_frameworks()
    assert not SLURMEnvironment.detect()


def test_a_sweep_runs_jobs_of_several_devices_on_one_machine_and_refuses_the_rest(monkeypatch):
    assert launch.explain_sweep_problem(2, 1) is None
    assert "hydra/launcher=slurm" in (launch.explain_sweep_problem(2, 2) or "")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "torchrun" in (launch.explain_sweep_problem(2, 1) or "")


END = "import os, signal, sys, threading; rank = int(os.environ['RANK'])\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(3) if rank else threading.Event().wait()", 3),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank else threading.Event().wait()", 137),
        (
            (
                "signal.signal(signal.SIGTERM, signal.SIG_IGN); sys.exit(5) if rank else"
                " threading.Event().wait()"
            ),
            5,
        ),
    ],
    ids=["all end", "one fails", "one is killed", "the others do not listen"],
)
def test_a_rank_that_fails_ends_the_others_and_gives_its_status(monkeypatch, program, status):
    monkeypatch.setattr(launch, "GRACE", 0.2)
    assert launch.start_ranks([sys.executable, "-c", END + program], 2) == status


@pytest.mark.slow
@pytest.mark.parametrize("others", ["go on", "end too"])
def test_a_rank_killed_by_a_signal_is_the_cause_of_the_failures_seen_beside_it(
    monkeypatch, capfd, others
):
    """Rank 0 waits in vain for rank 1 and may have ended when both are looked at."""
    monkeypatch.setattr(launch, "GRACE", 0.2)
    programs = ["raise SystemExit(1)", "import os; os.kill(os.getpid(), 9)"]
    started = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    assert [rank.wait() for rank in started] == [1, -9]
    if others == "go on":
        started.append(subprocess.Popen(["sleep", "60"]))
    assert launch._watch(started, []) == 137
    assert others == "end too" or "rank 1 of 3 was killed by SIGKILL" in capfd.readouterr().err


def test_after_a_signal_the_other_ranks_may_save_as_long_as_they_need(monkeypatch, capfd):
    """Rank 0 wrote its checkpoint and its summary alone, and was killed after 30 seconds."""
    monkeypatch.setattr(launch, "GRACE", 0.0)
    monkeypatch.setattr(launch.time, "sleep", lambda seconds: None)
    polls = iter([None] * 9)
    sent = []
    saving = SimpleNamespace(poll=lambda: next(polls, 143), returncode=143, send_signal=sent.append)
    ended = SimpleNamespace(poll=lambda: 143, returncode=143)
    assert launch._watch([saving, ended], [15]) == 143
    assert sent == [] and capfd.readouterr().err == ""


@pytest.mark.parametrize("fails", [False, True])
def test_no_rank_ends_before_rank_0_has_written(tmp_path, monkeypatch, fails):
    """The launcher stopped rank 0 when another rank ended, even if all had failed alike."""
    from rlkit.commands import train

    told = []
    summary = {"ended": "finished", "steps": 1, "tokens": 1}

    def trained(*given, **settings):
        if fails:
            raise NonFinite("not finite")
        return summary, None

    monkeypatch.setattr(train, "train_in", trained)
    monkeypatch.setattr(train, "runs", SimpleNamespace(shorten_path=str, write_config=print))
    monkeypatch.setattr(train, "format_closing_lines", lambda *given: "")
    monkeypatch.setattr(train.ranks, "rank", lambda: 1)
    monkeypatch.setattr(train.ranks, "broadcast", told.append)
    x = SimpleNamespace(trainer=None)
    given = {"started": 0.0, "resume": None}
    train.run_in_folder(x, {"seed": 1}, None, tmp_path, **given)
    assert len(told) == 2  # where run.json is read, and at the end


# ------------------------------------------------------------------------------------ two equal one

FAST = [
    "debug=fast",
    "trainer.accelerator=cpu",
    "logger=none",
    "optimizer.lr=1e-3",
    "task.max_samples=64",
    "evaluation.n=3",
    "generation.max_new_tokens=32",
    "model.kernel=eager",  # as that of shards
]
RUNS = {  # small micro-batches: the ranks have different numbers of them
    "grpo": [
        *("batch.group_size=4", "batch.prompts=3", "seed=3", "trainer.micro_batch_tokens=200"),
        "algorithm.token_filter._target_=ranks_worker.half",
    ],
    "ppo": [
        "algorithm=ppo",
        "batch.group_size=4",
        "algorithm.minibatches=2",
        "reference=ema",
        "reference.decay=0.5",
        "kl/coef=adaptive",
    ],
    "separate": [
        "algorithm=ppo",
        "algorithm/critic=separate",
        "algorithm.critic.warmup=1",
        "batch.group_size=4",
        "algorithm.target_kl=0.05",
    ],
    "double": [
        *(
            "algorithm=dapo",
            "batch.group_size=4",
            "batch.prompts=3",
            "algorithm.max_refills=4",
            "algorithm/group_filter=mixed",
            "seed=3",
        ),
        *("trainer.steps=3", "model._target_=ranks_worker.double"),
        *("optimizer._target_=torch.optim.SGD", "~optimizer.betas", "optimizer.lr=0.1"),
    ],
    "fused": ["batch.group_size=4", "batch.prompts=3", "seed=3", "model.kernel=fused"],
    "lora_ema": [
        *("batch.group_size=4", "batch.prompts=3", "seed=3", "model.lora.rank=4"),
        *("reference=ema", "reference.decay=0.5", "algorithm.minibatches=1"),
    ],
    "unpacked": [
        *("batch.group_size=4", "batch.prompts=3", "seed=3"),
        "model._target_=ranks_worker.unpacked",
    ],
    "phases": [
        *(
            "batch.group_size=4",
            "batch.prompts=3",
            "seed=2",
            "schedule=on_reward",
            "schedule.phases.explore.until=1",
        ),
        "+reference@schedule.phases.refine.reference=ema",
    ],
}
OWN = {  # what several ranks have and one process has not
    "draws": [
        "batch.prompts=3",
        "reward=numeric",
        "reward.terms.numeric.fn._target_=ranks_worker.draws",
    ],
    "blocked": ["batch.group_size=4", "seed=3", "model.lora.rank=4"],
    "bad": [
        *(
            "batch.group_size=4",
            "seed=1",
            "kl=none",
            "trainer.max_nonfinite=2",
            "~algorithm.policy_loss",
        ),
        "+algorithm.policy_loss={_target_: ranks_worker.bad, _partial_: true}",
    ],
}
FROM_ONE = {
    "from_one": "ppo",
    "lora_from_one": "lora_ema",
    "phases_from_one": "phases",
}  # begun there, resumed on two ranks
ON_ONE = {
    "from_two": "ppo",
    "lora_from_two": "lora_ema",
    "phases_from_two": "phases",
    "draws_on_one": "draws",
}  # the other way round
# Which of them each strategy runs. Dealing of work, refills and micro-batches is the same code for
# both. DDP hands gradients over, and FSDP shards of weights, moments, critic, adapters, references.
OF = {
    "ddp": {
        *("grpo", "ppo", "double", "fused", "lora_ema", "phases", "draws"),
        *("from_one", "phases_from_one", "draws_on_two"),
        *("from_two", "phases_from_two", "draws_on_one"),
    },
    "fsdp": {
        *("ppo", "separate", "fused", "lora_ema", "unpacked", "blocked", "bad"),
        *("from_one", "lora_from_one"),
        *("from_two", "lora_from_two"),
    },
}
EXACT, ROUNDED, DRIFTED = (
    1e-6,
    5e-6,
    1e-3,
)  # sums in another order; after some steps of SGD; after Adam has divided small gradients


def run(forked, root: Path, strategy: str, runs: list[tuple]) -> str:
    """Runs of the worker, (folder, key of RUNS or OWN, folder of which it is the continuation or
    None), on one process ("single") or on two, which are forks of this one; what they say."""
    root.mkdir(exist_ok=True)
    more = [] if strategy == "single" else [f"trainer={strategy}", "trainer.timeout=300"]
    (root / "runs.json").write_text(
        json.dumps(
            [(name, [*FAST, *more, *(RUNS | OWN)[key]], source) for name, key, source in runs]
        )
    )
    with socket.create_server(("127.0.0.1", 0)) as found:
        group = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(found.getsockname()[1]),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
        }
    log = root / f"{runs[0][0]}.log"
    places = (
        [{}]
        if strategy == "single"
        else [group | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    )
    children = [
        forked(root, log, partial(os.environ.update, place), ranks_worker.main) for place in places
    ]
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    said = log.read_text()
    assert not any(ended), said[-4000:]
    for name, key, _ in runs:
        assert (root / f"{name}.status").read_text() == ("1" if key == "bad" else "0"), (
            name,
            said[-4000:],
        )
    return said


def names_of(request, strategy: str) -> set[str]:
    """The runs of a strategy that the tests of this session read: a run costs seconds."""
    cases = [getattr(item, "callspec", None) for item in request.session.items]
    names = {
        case.params["name"]
        for case in cases
        if case and "name" in case.params and case.params.get("strategy") == strategy
    }
    names |= {ON_ONE[name] for name in names & {*ON_ONE}}
    return names | ({"draws_on_two", "draws_on_one"} if "draws" in names else set())


@pytest.fixture(scope="module")
def one(request, tmp_path_factory, forked):
    root = tmp_path_factory.mktemp("ranks") / "one"
    names = names_of(request, "ddp") | names_of(request, "fsdp")
    keys = {(FROM_ONE | ON_ONE).get(name, name) for name in names}
    run(forked, root, "single", [(name, name, None) for name in RUNS if name in keys])
    return root


def run_two(forked, one: Path, strategy: str, mine: set[str]) -> Path:
    """Those of a strategy's runs that are asked for: on two ranks, also those that one process has
    begun; and on one process those that the two have begun."""
    root = one.parent / strategy
    (root / "blocked" / "checkpoints" / "step_000001.ckpt" / "in the way").mkdir(parents=True)
    goes_on = {name: (key, f"../one/{key}") for name, key in FROM_ONE.items()} | {
        "draws_on_two": ("draws", "draws")
    }
    runs = [
        *((name, name, None) for name in RUNS | OWN),
        *((name, *source) for name, source in goes_on.items()),
    ]
    runs = [each for each in runs if each[0] in mine]
    (root / "said").write_text(run(forked, root, strategy, runs))
    run(forked, root, "single", [(name, key, key) for name, key in ON_ONE.items() if name in mine])
    return root


@pytest.fixture(scope="module")
def ddp(request, one, forked):
    return run_two(forked, one, "ddp", names_of(request, "ddp"))


@pytest.fixture(scope="module")
def fsdp(request, one, forked):
    return run_two(forked, one, "fsdp", names_of(request, "fsdp"))


@pytest.fixture
def two(request, strategy):
    """The folder with the runs of a strategy."""
    return request.getfixturevalue(strategy)


def with_runs(*names: str):
    """A test of `two` with each of these runs, on each strategy that runs it. `name` is the run."""
    found = [(strategy, name) for strategy in OF for name in names if name in OF[strategy]]
    assert {*names} == {name for _, name in found}
    return pytest.mark.parametrize(("strategy", "name"), found)


def test_every_run_has_a_strategy_and_each_strategy_runs():
    assert OF["ddp"] | OF["fsdp"] == {*RUNS, *OWN, *FROM_ONE, *ON_ONE, "draws_on_two"}


def gradients(root: Path, name: str) -> list[torch.Tensor]:
    return torch.load(root / f"{name}.grads")


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same_rows(ours: list[dict], theirs: list[dict], rel: float) -> None:
    """All but the clock and what is rounding alone: the sampler's distance from the trainer, and
    how many zero KLs are not 0."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        assert mine.get("schedule/switch") == other.get("schedule/switch")
        for key in (
            mine.keys()
            - {"schedule/switch"}
            - {k for k in mine if k.startswith(("perf/", "mismatch/", "kl/nonzero_frac"))}
        ):
            a, b = (float("nan") if row[key] is None else row[key] for row in (mine, other))
            assert a == pytest.approx(b, rel=rel, abs=1e-6, nan_ok=True), (mine["step"], key)


@pytest.mark.slow
@with_runs(*RUNS)
def test_two_ranks_have_the_gradients_and_metrics_of_one_process(one, two, name):
    """Every optimiser step of the run. The first of policy and critic start from equal weights;
    later ones carry Adam's rounding, so with SGD and weights in float64 ("double") they stay as
    close as the first."""
    ours, theirs = gradients(two, name), gradients(one, name)
    assert len(ours) == len(theirs) > 1 and all(float(g.norm()) > 0 for g in theirs)
    assert distance(ours[0], theirs[0]) < (
        ROUNDED if name == "fused" else EXACT
    )  # shards are not passed by C
    assert max(map(distance, ours, theirs)) < (ROUNDED if name == "double" else DRIFTED)
    same_rows(rows(two / name), rows(one / name), DRIFTED)
    same_rows(rows(two / name)[:1], rows(one / name)[:1], 0.0)  # the held-out evaluation before


@pytest.mark.slow
@with_runs("double")
def test_refills_were_needed_and_agreed(one, two, name):
    sampled = [[row.get("group/sampled") for row in rows(root / name)] for root in (one, two)]
    assert sampled[0] == sampled[1] and max(n for n in sampled[0] if n) > 3


@pytest.mark.slow
@with_runs(*FROM_ONE, *(name for name in ON_ONE if name.endswith("from_two")))
def test_a_checkpoint_is_the_same_for_any_number_of_ranks(one, two, name):
    """Policy or adapters, critic, both optimizers, a moving reference, one of a phase, the KL
    controller: the second step is that of the whole run."""
    key = (FROM_ONE | ON_ONE)[name]
    ours, theirs = gradients(two, name), gradients(one, key)
    assert distance(ours[0], theirs[-len(ours)]) < (EXACT if name in FROM_ONE else DRIFTED)
    same_rows(rows(two / name)[-1:], rows(one / key)[-1:], DRIFTED)
    mine, other = (
        torch.load(f / "checkpoints" / "step_000002.ckpt", weights_only=True)
        for f in (two / name, one / key)
    )
    assert mine["state_dict"].keys() == other["state_dict"].keys()
    for a, b in zip(mine["optimizer_states"], other["optimizer_states"], strict=True):
        assert a["state"].keys() == b["state"].keys()
        for i, state in a["state"].items():
            assert distance(state["exp_avg"], b["state"][i]["exp_avg"]) < DRIFTED
    owner = "refine" if key == "phases" else ""
    kept, whole = (state["rlkit"]["references"][owner]["weights"] for state in (mine, other))
    assert all(distance(tensor, whole[key]) < DRIFTED for key, tensor in kept.items())


@pytest.mark.slow
@with_runs("draws")
def test_each_rank_goes_on_with_its_own_generators(two, name):
    """A reward draws from all of them. On as many ranks a resumed run is the whole one, bit for
    bit; on one process it has rank 0's."""
    whole, again, alone = (
        torch.load(two / run / "checkpoints" / "step_000002.ckpt", weights_only=True)
        for run in (name, "draws_on_two", "draws_on_one")
    )
    begun = torch.load(two / name / "checkpoints" / "step_000001.ckpt", weights_only=True)["rlkit"][
        "generators"
    ]
    for generators in (begun, whole["rlkit"]["generators"]):
        assert len(generators) == 2 and not torch.equal(
            generators[0]["torch"], generators[1]["torch"]
        )
        assert generators[0]["python"] != generators[1]["python"] and not torch.equal(
            generators[0]["numpy"][1], generators[1]["numpy"][1]
        )
    assert all(
        torch.equal(value, again["state_dict"][name]) for name, value in whole["state_dict"].items()
    )
    for mine, other in zip(again["rlkit"]["generators"], whole["rlkit"]["generators"], strict=True):
        assert mine["python"] == other["python"] and torch.equal(mine["torch"], other["torch"])
    assert len(alone["rlkit"]["generators"]) == 1


@pytest.mark.slow
@with_runs("blocked")
def test_all_ranks_go_on_after_a_save_that_failed(two, name):
    """A folder stands where the first checkpoint belongs; the second is whole, with its adapters
    for from_pretrained."""
    said = (two / "said").read_text()
    assert (
        said.count("checkpoint step_000001.ckpt not written (Is a directory); the run goes on") == 1
    )
    assert (two / name / "checkpoints" / "step_000002.ckpt").is_file()
    written = load_file(
        two / name / "checkpoints" / "step_000002.adapter" / "adapter_model.safetensors"
    )
    state = torch.load(two / name / "checkpoints" / "step_000002.ckpt", weights_only=True)[
        "state_dict"
    ]
    assert len(written) == len(state)
    assert all(
        torch.equal(t, state[f"model.{name.replace('.weight', '.default.weight')}"])
        for name, t in written.items()
    )
    assert json.loads((two / name / "summary.json").read_text())["ended"] == "finished"


@pytest.mark.slow
@with_runs("bad")
def test_a_bundle_of_several_ranks_replays_on_one_process(two, name, capsys):
    (bundle,) = (two / name / "debug").iterdir()
    assert {p.name for p in bundle.iterdir()} == {
        "traceback.txt",
        "config.yaml",
        "rollouts.jsonl.gz",
        "batch.pt",
        "state.ckpt",
    }
    trained = torch.load(bundle / "state.ckpt", weights_only=True)["state_dict"]
    start = load_policy(path="tiny").model.state_dict()  # no update was made
    assert all(torch.equal(value, trained[f"model.{name}"]) for name, value in start.items())
    assert main(["replay", f"bundle={bundle}", "trust=true"]) == 1
    assert "the gradient of" in (said := capsys.readouterr().out) and "the fault came again" in said


@pytest.mark.slow
@with_runs("grpo")
def test_only_the_first_rank_writes(one, two, name):
    assert {p.name for p in (two / name).rglob("*")} == {p.name for p in (one / name).rglob("*")}


# ----------------------------------------------------------------------- a rank that does not go on

FAULTS = {
    "fails": (
        "raise ValueError('no judge')",
        1,
        ["reward term 'numeric' raised", "rank 1 failed: RewardError"],
    ),
    "is killed": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        137,
        ["rank 1 of 2 was killed by SIGKILL", "rank 0 of 2 waited in vain"],
    ),
    "hangs": (
        "threading.Event().wait()",
        1,
        ["rank 0 of 2 waited in vain", "took longer than trainer.timeout"],
    ),
}


def train(forked, folder: Path, words: list[str]) -> tuple[int, str]:
    """`rlkit train trainer=ddp` in a folder, which holds a module `faulty`: its exit status, and
    what it says. The command and the ranks that it starts are copies of this process."""

    def settle() -> None:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        sys.modules.pop("faulty", None)
        launch.subprocess = SimpleNamespace(Popen=start_copy)
        launch.GRACE = 2.0

    words = ["train", *FAST, *words, "trainer=ddp", "hydra.run.dir=run"]
    child = forked(words, folder / "log", settle)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), (folder / "log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("how", FAULTS)
def test_a_rank_that_does_not_go_on_ends_the_run_with_a_reason(tmp_path, forked, how):
    """The fault is in a reward on rank 1, in training alone; the run folder keeps what was done
    before."""
    what, status, said = FAULTS[how]
    (tmp_path / "faulty.py").write_text(
        "import os, signal, threading\nfrom rlkit.rewards import numeric\n\ndef reward(rollout):\n"
        f"    if rollout.steps[0].response_ids and os.environ['RANK'] == '1':\n        {what}\n   "
        " return numeric(rollout)\n"
    )
    fault = [
        "reward=numeric",
        "reward.terms.numeric.fn._target_=faulty.reward",
        "evaluation.n=0",
        f"trainer.timeout={5 if how == 'hangs' else 60}",
    ]
    ended, told = train(forked, tmp_path, fault)
    assert ended == status, told[-4000:]
    for text in said:
        assert text in told
    assert "Traceback" not in told


@pytest.mark.slow
def test_a_rank_that_fails_alone_in_an_update_leaves_a_bundle_that_replays(
    tmp_path, forked, monkeypatch, capsys
):
    (tmp_path / "faulty.py").write_text(
        "import torch.distributed as group\nfrom rlkit.functional import clipped\n\ndef loss(ratio,"
        " advantages):\n    if group.is_initialized() and group.get_rank() == 1:  # no dry run\n"
        "        raise ValueError('no such kernel')\n    return clipped(ratio, advantages,"
        " clip_low=0.2, clip_high=0.2)\n"
    )
    fault = [
        "~algorithm.policy_loss",
        "+algorithm.policy_loss={_target_: faulty.loss, _partial_: true}",
        "evaluation.n=0",
    ]
    ended, told = train(forked, tmp_path, ["seed=1", "batch.group_size=4", *fault])
    assert ended == 1, told[-4000:]
    bundles = {
        p.name: {f.name for f in p.iterdir()} for p in (tmp_path / "run" / "debug").iterdir()
    }
    assert {"batch.pt", "state.ckpt"} <= bundles[
        "step_000001_rank1"
    ] and "state.ckpt" not in bundles.get("step_000001", set())
    monkeypatch.syspath_prepend(str(tmp_path))
    assert (
        main(["replay", f"bundle={tmp_path / 'run' / 'debug' / 'step_000001_rank1'}", "trust=true"])
        == 0
    )
    assert "the fault did not come again" in capsys.readouterr().out
