"""Mistakes of the first days: each is answered with one sentence that names the place and what to
write instead."""

from __future__ import annotations

import inspect
import itertools
import json
import re

import pytest

from rlkit.commands.arguments import parse
from rlkit.commands.cli import main
from rlkit.config.compose import compose, experiment
from rlkit.config.hints import PEERS, suggest_key
from rlkit.config.problems.rows import load_tasks
from rlkit.config.schema import resolve
from rlkit.environments import by_task, single_turn
from rlkit.errors import ConfigError
from rlkit.rewards import Reward, Term, score
from rlkit.system.loops import run
from rlkit.training.callbacks.terminal import COLUMNS, step_line
from rlkit.types import Environment, Task

MODULES = {
    "broken_syntax": ("def score(rollout)\n    return 1.0\n", r"broken_syntax\.py:1: expected ':'"),
    "broken_import": (
        "import not_a_package\n",
        r"broken_import\.py:1: No module named 'not_a_package'",
    ),
    "broken_value": (
        "X = 1\nY = X / 0\n",
        r"broken_value\.py:2: ZeroDivisionError: division by zero",
    ),
}
PRESETS = {
    "indented": (
        "# @package _global_\nalgorithm:\n   epochs: 2\n  minibatches: 3\n",
        r"indented\.yaml:4: this is not YAML",
    ),
    "unpackaged": (
        "algorithm:\n  epochs: 2\n",
        r"experiment: this preset sets algorithm under 'experiment'; write '# @package _global_'",
    ),
    "dangling": (
        "# @package _global_\nalgorithm:\n  epochs: ${nope}\n",
        r"algorithm\.epochs: \$\{nope\} cannot be resolved",
    ),
    "misnamed": (
        "# @package _global_\ndefaults:\n- override /algorithm: drgrpo\n",
        r"algorithm=drgrpo, which a defaults .* mean 'dr_grpo'",
    ),
}
PLAIN = {  # override → what is said instead of the words of OmegaConf, ANTLR or difflib
    "model.suggests=3": r"^model\.suggests: holds values by name; .* model\.suggests\.NAME=VALUE$",
    "reward=[numeric": r"^'reward=\[numeric' cannot be read: .*; close each bracket and quote",
    "environment.tools=[{_target_: math.sqrt}]": (
        r"^'environment\.tools=.*set environment\.tools\.NAME=VALUE$"
    ),
    "reward.terms.task.fn._target_=math.sqrt": (
        r"takes no 'rewards'\. It takes: nothing; .* out with ~reward\.terms\.task\.fn\.rewards"
    ),
}
MEANINGS = {
    "lr": "optimizer.lr",
    "group_size": "batch.group_size",
    "beta": "kl.coef",
    "num_generations": "batch.group_size",
    "learning_rate": "optimizer.lr",
    "lora_rank": "model.lora.rank",
    "steps": "trainer.steps",
    "generation.lr": "optimizer.lr",
    "optimizer.lrr": "lr",
    "clip_high": "algorithm.policy_loss.clip_high",
    "algoritm": "algorithm",
    "task.path": "task=OPTION",
    "algoritm.epochs": "algorithm",
    "data.train_batch_size": "batch.prompts",
    "actor_rollout_ref.rollout.n": "batch.group_size",
    "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
    "actor_rollout_ref.actor.ppo_epochs": "algorithm.epochs",
    "actor_rollout_ref.rollout.multi_turn.enable": "environment=OPTION",
    "custom_reward_function.path": "reward=OPTION",
    "algorithm.use_kl_in_reward": "kl.placement",
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_cannot_be_imported_names_its_line(name, tmp_path, monkeypatch):
    (tmp_path / f"{name}.py").write_text(MODULES[name][0])
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=MODULES[name][1]):
        compose([f"algorithm.advantage._target_={name}.score"])


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_that_cannot_be_read_names_its_place(name, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / f"{name}.yaml").write_text(PRESETS[name][0])
    with pytest.raises(ConfigError, match=PRESETS[name][1]):
        compose([f"experiment={name}"], config_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("betas", "said"),
    [
        ("[0.9]", r"has 1 values; give 2"),
        ("[0.9,0.99,0.9]", r"has 3 values; give 2"),
        ("[0.9,high]", r"\[1\]: 'high' is not a number"),
    ],
)
def test_a_list_of_another_length_than_its_type_is_refused(betas, said):
    """Three betas were taken, and ended the first step in torch's words."""
    with pytest.raises(ConfigError, match=rf"optimizer\.betas.*{said}"):
        experiment(compose([f"optimizer.betas={betas}"]))


@pytest.mark.parametrize("name", ["numeri", "exactmatch"])
def test_a_misspelt_reward_of_a_task_is_answered_with_the_nearest(name, tmp_path):
    """The names it could have meant had left the config, so "known are none" was said."""
    rows = [json.dumps({"prompt": f"{i} + 1?", "answer": f"{i + 1}"}) for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    x = experiment(
        compose(
            [
                "task=jsonl",
                f"task.path={tmp_path}/rows.jsonl",
                f"task.reward={name}",
                "evaluation.n=0",
                "environment=single_turn",
            ]
        )
    )
    meant = {"numeri": "numeric", "exactmatch": "exact_match"}[name]
    with pytest.raises(ConfigError, match=f"Did you mean '{meant}'"):
        load_tasks(x)


@pytest.mark.parametrize("given", PLAIN)
def test_what_does_not_fit_is_said_in_plain_words(given):
    with pytest.raises(ConfigError, match=PLAIN[given]):
        compose(["environment=tool_use", given])


def test_a_reward_that_cannot_be_called_with_a_rollout_names_its_place():
    """The place of the TypeError was in rlkit."""
    with pytest.raises(
        ConfigError,
        match=(
            r"'mine': .* \(.*test_first_week\.py:\d+\) is called with \(Rollout\): too many"
            r" positional arguments"
        ),
    ):
        score([], Reward("mine", {"mine": Term(1.0, lambda: 1.0)}))


def test_a_reference_that_fails_names_its_key():
    """Hydra's own bookkeeping of the overrides met it first, as a traceback."""
    with pytest.raises(ConfigError, match=r"kl\.coef: \$\{kl\.coeff\} cannot be resolved"):
        compose(["kl.coef=${kl.coeff}"])


@pytest.mark.parametrize("given", MEANINGS)
def test_a_key_of_another_framework_or_place_is_answered_with_the_key_here(given):
    with pytest.raises(ConfigError, match=f"Did you mean '{MEANINGS[given]}'"):
        compose([f"{given}=1"])


def test_an_option_given_for_a_key_is_answered_with_its_group():
    with pytest.raises(ConfigError, match=r"option; write algorithm/policy_loss=clip_higher$"):
        compose(["algorithm.policy_loss=clip_higher"])
    with pytest.raises(ConfigError, match="Did you mean 'algorithm/policy_loss=OPTION'"):
        compose(["policy_loss=clip_higher"])


def test_every_key_that_a_foreign_name_is_answered_with_exists():
    config = compose(["model.lora={rank: 8, alpha: 8}"]).config
    for key in PEERS:
        node = config
        if key == "hydra.run.dir":
            continue
        for part in key.removesuffix("=").replace("/", ".").split("."):
            assert (
                part in node or part in inspect.signature(resolve(node["_target_"])).parameters
            ), key
            node = node.get(part)


def test_the_meant_key_is_never_the_wrong_one_itself():
    assert suggest_key("foo", ["bar"], ["foo", "foo.baz"]) == ""
    assert suggest_key("a.depth", ["width"], ["a.depth", "b.depth"]) == " Did you mean 'b.depth'?"


def test_a_flag_that_is_a_key_is_answered_with_the_key():
    with pytest.raises(ConfigError, match=r"there is no flag '--steps'; write trainer\.steps=10"):
        parse(["--steps", "10"])
    with pytest.raises(ConfigError, match=r"write optimizer\.lr=3e-4"):
        parse(["--learning-rate=3e-4"])


@pytest.mark.parametrize(
    "words, said",
    [
        (["--bf16", "true"], "trainer.precision=VALUE"),
        (["--gradient-accumulation-steps", "8"], "trainer.micro_batch_tokens=VALUE"),
        (["--use-vllm", "true"], "generation=OPTION"),
        (["--thinking", "false"], "model.enable_thinking=false"),
    ],
)
def test_a_value_that_means_something_else_here_is_not_copied(words, said):
    with pytest.raises(ConfigError, match=re.escape(f"write {said}") + "$"):
        parse(words)


def test_a_config_name_is_a_file_of_ones_own_with_its_defaults_list(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n- train\n- override algorithm: dapo\n- kl: none\n- _self_\ntrainer:\n "
        " steps: 7\n"
    )
    given = parse(["--config-dir", str(tmp_path), "--config-name", "mine", "trainer.steps=9"])
    assert given.overrides == ["algorithm=dapo", "kl=none", "trainer.steps=9"]
    assert parse(["--config-name", "train"]).overrides == []


@pytest.mark.slow
def test_the_config_is_printed_without_a_run_and_without_secrets(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-s3cret")
    assert (
        main(
            [
                "train",
                "--cfg",
                "job",
                "--resolve",
                "optimizer.lr=0.5",
                "name=${oc.env:WANDB_API_KEY}",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert (
        "lr: 0.5" in said
        and "s3cret" not in said
        and "hydra" not in said
        and not list(tmp_path.iterdir())
    )
    assert main(["train", "--info", "algorithm=dapo"]) == 0
    assert "\nalgorithm=dapo\n" in f"\n{capsys.readouterr().out}"


def test_debug_shows_the_traceback_of_a_refusal_and_of_no_later_one(capsys):
    assert main(["train", "lr=1", "debug=true"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" in said and said.splitlines()[-1].startswith("rlkit: lr: ")
    assert main(["train", "lr=1"]) == 2 and "Traceback" not in capsys.readouterr().err


def test_a_function_in_place_of_a_reward_term_is_named():
    with pytest.raises(
        ConfigError,
        match=(
            r"reward\.terms\.mine: 'math\.sqrt' is a function, not a rlkit\.rewards\.Term.* as fn"
        ),
    ):
        compose(["+reward.terms.mine={_target_: math.sqrt, _partial_: true}"])


def test_the_default_environment_takes_a_system_prompt():
    """One more system prompt beside that of the row or of the environment: templates read one
    only."""
    task = Task("a", ({"role": "user", "content": "?"},), "1", environment="single_turn")
    environments = {"single_turn": single_turn(system_prompt="own")}
    made = by_task(environments=environments, system_prompt="Be brief.")(task).first_prompt(task)
    assert run(made) == (
        {"role": "system", "content": "Be brief.\n\nown"},
        {"role": "user", "content": "?"},
    )
    with pytest.raises(ConfigError, match="environment 'x' makes its own prompts"):
        by_task(
            environments={"x": Environment(session=lambda task: None)}, system_prompt="Be brief."
        )


@pytest.mark.parametrize(
    "reward, seconds", list(itertools.product((-12.5, 0.5, 99.99), (0.04, 9.99, 123.4)))
)
def test_the_line_of_a_step_has_at_most_80_columns(reward, seconds):
    row = {
        "reward/mean": reward,
        "kl/ref_k3": 12.3456,
        "len/mean": 32768.0,
        "len/truncated_frac": 1.0,
        "perf/generate_s": seconds,
        "perf/reward_s": 0.1,
        "perf/update_s": seconds,
    }
    assert len(step_line(1000, 3000, row, reward - 10.0, "0:59:59 left")) <= COLUMNS == 80


def test_what_does_not_apply_is_not_in_the_line_of_a_step():
    row = {
        "reward/mean": float("nan"),
        "kl/ref_k3": float("nan"),
        "len/mean": 3.0,
        "len/truncated_frac": 0.0,
        "loss/total": 1.2345,
        "perf/generate_s": 1.0,
        "perf/reward_s": 0.0,
        "perf/update_s": 1.0,
    }
    assert step_line(1, 3, row, None) == "step 1/3 loss 1.234 len 3 | 1.0 + 1.0 s"
