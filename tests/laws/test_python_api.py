"""`import rlkit`: its names, experiments from keywords and Python objects, whole runs and single
steps, and how they look."""

import asyncio
import functools
import re
import subprocess
import sys
from datetime import date

import datasets
import numpy
import pytest
import torch
from safetensors.torch import load_file

import rlkit
from parametrise import cases, count_threads
from rlkit.commands.cli import main
from rlkit.config.experiment import override
from rlkit.display import LINES, format_rollout, render_rollout
from rlkit.errors import DataError
from rlkit.functional import group_mean
from rlkit.system import extras
from rlkit.types import Step

SMALL = {
    "batch__prompts": 2,
    "batch__group_size": 2,
    "trainer__steps": 2,
    "evaluation__n": 0,
    "trainer__threads": 1,
}
TASK = rlkit.Task("t/0", ({"role": "user", "content": "What is 1 + 1?"},), answer="2")


F = rlkit.functional
ALGORITHM = rlkit.Algorithm("mine", group_mean, F.token_ratio, F.clipped, F.token_mean, F.keep_all)


def brief(rollout):
    return float(len(rollout.final_content) < 20)


def doubled(rewards, group_ids, *, by=2.0):
    return by * group_mean(rewards, group_ids)


# -------------------------------------------------------------------------------------------- names


def test_the_names_at_the_top_are_few_and_all_there():
    assert len(dir(rlkit)) <= 52 and all(getattr(rlkit, name) is not None for name in dir(rlkit))
    assert (
        rlkit.functional.k3
        and rlkit.rewards.numeric
        and rlkit.references.ema(decay=0.99).name == "ema"
        and rlkit.engines.Cached()
    )


def test_a_name_of_a_namespace_is_not_at_the_top():
    with pytest.raises(AttributeError, match="no attribute 'k3'"):
        _ = rlkit.k3


def test_without_the_extra_the_notebooks_names_say_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "FOLDER", tmp_path)
    with pytest.raises(ImportError, match="needs the extra 'notebook'"):
        from rlkit.notebook import create_rollout  # noqa: F401
    with pytest.raises(ImportError, match="needs the extra 'notebook'"):
        _ = rlkit.notebook.__all__
    assert dir(rlkit.notebook) == [] and not hasattr(rlkit, "create_rollout")


def test_importing_rlkit_imports_nothing_heavy():
    heavy = {"torch", "numpy", "hydra", "lightning", "transformers", "yaml"}
    code = f"import sys, rlkit; dir(rlkit); print(sorted({heavy} & set(sys.modules)))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


# -------------------------------------------------------------------------------------- experiments


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "text"),
    cases(
        [
            ("trainer.steps", 3, "trainer.steps=3"),
            ("trainer.max_time", None, "trainer.max_time=null"),
            ("resume", "never", "resume='never'"),
            ("name", "it's", r"name='it\'s'"),
            ("reward.normalize", True, "reward.normalize=true"),
            ("kl", "none", "kl=none"),
            ("algorithm.advantage", "leave_one_out", "algorithm/advantage=leave_one_out"),
            ("reward", ["numeric", "format"], "reward=[numeric,format]"),
            ("evaluation.k", [1, 2], "evaluation.k=[1,2]"),
        ],
        3,
        unpack=True,
    ),
)
def test_a_keyword_is_an_override(key, value, text):
    assert override(key, value) == text
    x = rlkit.experiment(**{key.replace(".", "__"): value})
    assert x.config == rlkit.experiment(text).config


def test_a_number_of_numpy_is_a_number():
    x = rlkit.experiment(seed=numpy.int64(3), optimizer__betas=[numpy.float32(0.5), 0.75])
    assert type(x.seed) is int and x.overrides == ("seed=3", "optimizer.betas=[0.5,0.75]")


def test_a_python_object_stands_where_the_part_stood():
    x = rlkit.experiment(
        "algorithm=dapo",
        kl="k3",
        reward=brief,
        algorithm__advantage=functools.partial(doubled, by=3.0),
        reference=rlkit.references.ema(decay=0.5),
        task=[TASK],
        generation__engine=(engine := rlkit.engines.Cached()),
        schedule__numbers={"kl.coef": lambda step: 0.1},
        **SMALL,
    )
    assert (
        x.reward.terms["brief"].fn is brief
        and x.reward.name == "brief"
        and x.algorithm.advantage.keywords == {"by": 3.0}
    )
    assert (
        x.reference.name == "ema"
        and x.generation.engine is engine
        and list(x.task(split="train")) == [TASK]
    )
    assert list(x.schedule.paths) == ["kl.coef"] and x.config["reward"]["terms"]["brief"]["fn"][
        "_target_"
    ].endswith(".brief")


@pytest.mark.slow
def test_a_run_says_what_is_known_of_its_model_and_its_tasks():
    """A function of one's own says nothing of its model; sampler, reuse and suggestions are the
    run's, whatever gives model and tasks."""
    x = rlkit.experiment("model.lora.rank=4", "task/sampler=variance", "task/reuse=replay")
    assert x.model.path == "tiny" and x.model.rank == 4

    def mine(*, device):
        raise NotImplementedError

    own = rlkit.experiment("task/sampler=variance", "task/reuse=replay", model=mine, task=[TASK])
    assert own.model.load is mine and own.model.path is own.model.lora is None
    assert own.model.suggests == x.model.suggests and own.model.rank == 0
    assert own.sampler.name == x.sampler.name == "variance" and own.reuse == x.reuse
    given = functools.partial(rlkit.load_policy, path="there", revision="a" * 40)
    bound = rlkit.experiment(model=given).model
    assert bound.path == "there"
    assert bound.hub == {"revision": "a" * 40, "trust_remote_code": False}


def test_rewards_may_come_in_a_list_by_name_or_as_one_more_term():
    numeric = rlkit.rewards.numeric
    assert list(rlkit.experiment(reward=[numeric, rlkit.Term(0.5, brief)]).reward.terms) == [
        "numeric",
        "brief",
    ]
    assert rlkit.experiment(reward={"right": numeric, "short": brief}).reward.name == "right+short"
    assert list(rlkit.experiment(reward__terms__short=rlkit.Term(0.0, brief)).reward.terms) == [
        "task",
        "short",
    ]
    selector = rlkit.functional.best_worst
    paired = rlkit.experiment(algorithm="pairwise", algorithm__advantage__pair_selector=selector)
    assert paired.algorithm.advantage.keywords["pair_selector"] is selector


class Shelf:
    """A tool with state."""

    def put(self, name: str) -> str:
        """Puts a book on the shelf.

        Args:
            name: Its name.
        """
        return name


@pytest.mark.slow
def test_a_number_below_a_part_that_is_replaced_belongs_to_the_new_one():
    """Whatever their order, and where the number has the type that the part asks for."""
    x = rlkit.experiment(algorithm__advantage__by=3, algorithm__advantage=doubled)
    assert x.algorithm.advantage.func is doubled and x.algorithm.advantage.keywords == {"by": 3}
    assert x.config["algorithm"]["advantage"]["by"] == 3
    assert rlkit.experiment(reward=brief, reward__normalize=True).reward.normalize is True
    k3 = rlkit.experiment(kl="k3").kl
    assert rlkit.experiment(kl=k3, kl__coef=0.3).kl == k3._replace(coef=0.3)
    with pytest.raises(rlkit.ConfigError, match=r"kl\.coef: 'much' is not a number"):
        rlkit.experiment(kl=k3, kl__coef="much")
    with pytest.raises(rlkit.ConfigError, match=r"advantage\.bye: there is no 'bye'.* mean 'by'"):
        rlkit.experiment(algorithm__advantage=doubled, algorithm__advantage__bye=3.0)


@pytest.mark.parametrize(
    ("words", "tools"),
    [
        ((), {"environment__tools": {"shelf": Shelf}}),
        (("~environment.tools.calculator",), {"environment__tools__shelf": Shelf}),
    ],
)
def test_tools_of_ones_own_stand_in_place_of_those_of_the_option(words, tools):
    x = rlkit.experiment("environment=tool_use", *words, **tools)
    assert list(asyncio.run(x.environment.tools(TASK))) == ["put"]
    assert list(x.config["environment"]["tools"]) == ["shelf"] and x.overrides is None


def test_the_folder_of_options_is_a_keyword_in_python():
    with pytest.raises(rlkit.ConfigError, match='give the folder as config_dir="my_conf"'):
        rlkit.experiment("--config-dir=my_conf", "algorithm/advantage=mine")


class Half:
    """An engine that cannot be told that an episode is over."""

    async def generate(self, key, prompt_ids, seed, params):
        raise NotImplementedError

    async def load(self, weights, version):
        raise NotImplementedError


def test_an_engine_is_an_instance_with_all_methods(tiny):
    """In an experiment and in `collect`; the message names what is wanting."""
    with pytest.raises(rlkit.ConfigError, match=r"made of this class: Cached\(…\)"):
        rlkit.experiment(generation__engine=rlkit.engines.Cached)
    with pytest.raises(rlkit.ConfigError, match="the type Engine; it has no release"):
        rlkit.experiment(generation__engine=Half())
    environment = rlkit.environments.single_turn()
    for engine, said in ((rlkit.engines.Cached, r"Cached\(…\)"), (Half(), "it has no release")):
        with pytest.raises(rlkit.ConfigError, match=said):
            rlkit.collect(tiny, [TASK], environment, engine=engine)


def test_a_function_is_a_reward_wherever_one_is_taken():
    """Also inside a Reward, and where a field of an experiment is replaced by hand."""
    played = [rlkit.Rollout(TASK, ())]
    for reward in (brief, [brief], {"brief": brief}, rlkit.Reward("mine", {"brief": brief})):
        assert rlkit.score(played, reward)[0].rewards == {"brief": 1.0}
    x = rlkit.experiment(task=[TASK], evaluation__n=0)
    assert rlkit.load_tasks(x._replace(reward=brief)).train == [TASK]


def test_rows_are_tasks():
    """A list of mappings, and a data set with splits of its own."""
    row = {"prompt": "What is 1 + 1?", "answer": 2}
    x = rlkit.experiment(task=[row])
    assert x.task(split="train") == [TASK._replace(id="train/0")] and not x.task(split="test")
    given = {"train": datasets.Dataset.from_list([row]), "test": datasets.Dataset.from_list([row])}
    for task in (given, datasets.DatasetDict(given)):
        x = rlkit.experiment(task=task)
        assert x.task(split="test") == [TASK._replace(id="test/0")]
    assert len(rlkit.experiment(task=given["train"]).task(split="train")) == 1


def test_a_bare_function_is_a_tool():
    def double(number: int) -> int:
        """Doubles a number.

        Args:
            number: Any.
        """
        return 2 * number

    for tools in (double, [double]):
        x = rlkit.experiment("environment=tool_use", environment__tools=tools)
        assert x.environment.tools(TASK) == {"double": double}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"kl": brief},
            (
                "kl: .* cannot stand there; give a value of the type KL, or replace one of its"
                " parts: kl__name, kl__estimator"
            ),
        ),
        (
            {"algorithm__advantge": doubled},
            "algorithm.advantge: there is no 'advantge'. Did you mean 'advantage'?",
        ),
        ({"reward": object()}, "reward: .* is no term of a reward; give a function"),
        (
            {"generation__engine": brief},
            "generation.engine: .* cannot stand there; give a value of the type Engine",
        ),
        ({"task": [brief]}, "task: .* is no task; give a list of Task"),
        ({"trainer__steps": 0}, "trainer.steps=0: must be at least 1"),
        ({"algorithm": "grp"}, "algorithm=grp: no such option. Did you mean 'grpo'?"),
        (
            {"algorithm__advantage": lambda rewards, nonsense: rewards},
            "algorithm.advantage: asks for a quantity 'nonsense'",
        ),
        (
            {"schedule": "grpo_to_dapo", "algorithm": ALGORITHM},
            "every phase of the schedule has its own algorithm",
        ),
    ],
)
def test_what_cannot_be_placed_is_refused_in_a_sentence(given, said):
    with pytest.raises(rlkit.ConfigError, match=said):
        rlkit.experiment(**given)


@pytest.mark.parametrize(
    "row, said",
    [
        (TASK._replace(answer=2), "its id is 't/0' and its answer 2; give two texts"),
        (
            {"prompt": "1 + 1?", "answer": 2, "metadata": {"at": date(2026, 1, 31)}},
            "its metadata is .*not JSON serializable",
        ),
    ],
)
def test_a_row_that_a_record_cannot_hold_is_refused(row, said):
    with pytest.raises(DataError, match=said):
        rlkit.experiment(task=[row])


# --------------------------------------------------------------------------------------------- runs


@pytest.mark.slow
def test_train_steps_and_the_command_give_the_same_weights(tmp_path, capsys):
    """From Python whole, from Python step by step, and from the command line."""
    x = rlkit.experiment(
        seed=3, kl="k3", logger="none", **SMALL | {"batch__group_size": 4, "task__max_samples": 32}
    )
    run = rlkit.train(x)
    *_, last = rlkit.steps(x)
    assert main(["train", *x.overrides, f"hydra.run.dir={tmp_path / 'cli'}"]) == 0
    weights, stepped = run.policy.model.state_dict(), last.policy.model.state_dict()
    start = rlkit.load_policy(path="tiny").model.state_dict()
    told = load_file(tmp_path / "cli" / "model" / "model.safetensors")
    assert all(torch.equal(weights[name], stepped[name]) for name in weights) and not all(
        torch.equal(weights[n], start[n]) for n in start
    )
    assert all(torch.equal(weights[name], told[name]) for name in told) and len(told) > 10
    assert (
        run.folder is None
        and [row["step"] for row in run.metrics] == [1, 2]
        and len(run.rollouts) == len(last.rollouts) == 8
    )


@pytest.mark.slow
def test_a_folder_from_python_is_a_run_folder(tmp_path, capsys):
    x = rlkit.experiment(**SMALL)
    run = rlkit.train(x, tmp_path / "run")
    assert (
        run.folder == tmp_path / "run"
        and main(["train", f"resume={run.folder}", "trainer.steps=3"]) == 0
    )
    with pytest.raises(rlkit.ConfigError, match="already holds a run"):
        rlkit.train(x, tmp_path / "run")
    by_hand = rlkit.train(
        x._replace(reward=rlkit.experiment(reward=brief).reward), tmp_path / "mine"
    )
    assert "fn" in (by_hand.folder / "config.yaml").read_text()
    with_part = rlkit.train(rlkit.experiment(reward=brief, **SMALL), tmp_path / "part")
    capsys.readouterr()
    for folder in (by_hand.folder, with_part.folder):  # the defaults would take the objects' places
        for words in (["evaluate", f"run={folder}"], ["train", f"resume={folder}"]):
            assert main(words) == 2
            assert "a run begun in Python from objects" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_without_a_folder_says_which_callbacks_are_left_out(tiny, capsys):
    """Nobody waits for files, or for a callback of their own, that never come."""
    given = {**SMALL, "trainer__steps": 1, "generation__max_new_tokens": 4}
    rlkit.train(rlkit.experiment(model=tiny, callbacks__mine=lambda run: 1 / 0, **given))
    [said] = [line for line in capsys.readouterr().out.splitlines() if "folder=" in line]
    assert said.endswith("left out: checkpoint, samples, rollouts, completions, mine")


@pytest.mark.slow
def test_a_loop_may_be_left_at_any_step_also_inside_a_running_event_loop(tiny, capsys):
    """As in a notebook, with a policy that is loaded already."""
    x = rlkit.experiment(model=tiny, **SMALL)
    before = count_threads()

    async def cell():
        for step in rlkit.steps(x):
            return step, asyncio.all_tasks()

    step, tasks = asyncio.run(cell())
    assert step.step == 1 and step.policy is tiny and len(tasks) == 1 and count_threads() == before
    assert re.match(r"RL step 1 · reward .* · 4 rollouts · \d+ metrics$", repr(step))


def test_episodes_are_collected_with_three_arguments(tiny):
    (rollout,) = rlkit.collect(tiny, [TASK], rlkit.environments.single_turn(), max_new_tokens=4)
    assert len(rollout.steps) == 1 and rollout.response_length <= 4


# ------------------------------------------------------------------------------------- how it looks


def test_a_rollout_reads_as_a_conversation_of_at_most_a_screen():
    call = rlkit.ToolCall("1", "add", {"a": 1})
    result = rlkit.ToolResult("1", "add", "<b>\x1b[31m", True)
    step = Step(
        TASK.messages, (), (1, 2), (0.0, 0.0), "tool", "hm", "x\n" * 50, True, (call,), (result,)
    )
    rollout = rlkit.Rollout(TASK, (step,) * 9, reward=0.5, rewards={"numeric": 0.5})
    text = format_rollout(rollout)
    assert (
        repr(rollout) == text
        and len(text.splitlines()) <= LINES
        and max(map(len, text.splitlines()[1:])) <= 100
    )
    assert (
        "reward 0.5 (numeric 0.5) · 9 replies, 18 tokens" in text
        and "What is 1 + 1?" in text
        and "expected  2" in text
    )
    assert "\x1b" not in text and "thinking" in text
    page = render_rollout(rollout)
    assert (
        rollout._repr_html_() == page
        and "&lt;b&gt;" in page
        and not re.search(r"<script|<b>\\|src=|href=|\x1b", page)
    )
    assert "add(a=1)" in page
    assert "no reply" not in repr(rlkit.Rollout(TASK, ())) and "What is 1 + 1?" in repr(
        rlkit.Rollout(TASK, ())
    )


def test_a_run_reads_as_a_table():
    rows = [{"step": n, "reward/mean": n / 10, "kl/ref_k3": float("nan")} for n in range(1, 41)]
    summary = {
        "name": "<i>",
        "ended": "finished",
        "steps": 40,
        "before": {"accuracy": 0.4},
        "after": {"accuracy": 0.9},
    }
    run = rlkit.Run(rows, [], None, None, summary)
    lines = repr(run).splitlines()
    assert lines[0] == "Run <i> · finished after 40 steps · test accuracy 0.4 → 0.9" and lines[
        1
    ].split() == ["step", "reward", "KL"]
    assert len(lines) < 20 and lines[-1].split() == ["40", "4", "–"]
    assert "&lt;i&gt;" in run._repr_html_() and "<i>" not in run._repr_html_()
