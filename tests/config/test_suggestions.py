"""What a model, a task and a trainer suggest reaches the groups that own the keys, and a value that
a user sets wins."""

from __future__ import annotations

import re
import shlex

import pytest

import rlkit
from laws.test_docs import COMMANDS, words_of
from parametrise import available, cases, options
from rlkit.commands.arguments import parse
from rlkit.config.changes import find_differences
from rlkit.config.compose import compose, conf_dir, experiment
from rlkit.config.problems.doubts import find_embedded_numbers, list_warnings
from rlkit.errors import ConfigError
from rlkit.models import LoRA, load_policy

EMBEDDED = ("tiny", "tiny_guess", "embedded")
MODELS = [name for name in options("model") if name != "bench"]  # made for its own tasks
TASKS = options("task")
GIVEN = {  # what an option leaves to the user
    "model=pretrained": ["model.path=any"],
    "task=jsonl": ["task.path=rows.jsonl"],
    "task=conversations": ["task.path=rows.jsonl"],
    "task=harbor": ["task.path=any"],
    "task=verifiers": ["task.id=any"],
    "task=reasoning_gym": ["task.dataset=countdown"],
}
OF_TINY = {
    "optimizer.lr": 3e-4,
    "generation.max_new_tokens": 64,
    "trainer.steps": 20,
    "trainer.micro_batch_tokens": 16384,
}


def composed(*words):
    return compose([*words, *(more for word in words for more in GIVEN.get(word, ()))]).config


def at(config, path):
    for key in path.split("."):
        config = config[key]
    return config


def numbers(config):
    return {key: at(config, key) for key in OF_TINY}


# -------------------------------------------------------------------------------------- composition

PRODUCT = [(task, model) for task in TASKS for model in MODELS]
FAST = [
    ("arithmetic", "embedded"),
    ("gsm8k", "qwen3_0.6b"),
    ("mixture", "qwen3_4b"),
    ("guess_number", "pretrained"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "model"), cases(PRODUCT, FAST, unpack=True))
def test_every_task_composes_to_sane_numbers_with_every_model(task, model):
    """The command of the README composed to 64 tokens with thinking, the tiny model's learning
    rate, and 20 steps."""
    config = composed(f"task={task}", f"model={model}")
    if model in EMBEDDED:
        assert numbers(config) == OF_TINY
        return
    adapters = config["model"]["lora"]["rank"] > 0
    assert config["optimizer"]["lr"] == config["model"]["suggests"]["lora_lr" if adapters else "lr"]
    thinks = config["model"]["enable_thinking"] is not False
    tokens = config["generation"]["max_new_tokens"]
    if task == "digits":  # a number of four digits
        assert tokens == (1024 if thinks else 8)
    else:
        assert (2048 if thinks else 256) <= tokens <= 8192
    assert config["trainer"]["steps"] >= (40 if model == "smollm2_135m" else 100)
    assert tokens < config["trainer"]["micro_batch_tokens"] or model == "smollm2_135m"


@pytest.mark.slow
def test_thinking_lengthens_the_replies_and_adapters_raise_the_rate():
    words = ["task=gsm8k", "model=qwen3_0.6b", "trainer=gpu"]
    got = {
        more: (c["generation"]["max_new_tokens"], c["optimizer"]["lr"], c["batch"]["prompts"])
        for more in (
            "model.enable_thinking=false",
            "model.enable_thinking=true",
            "model.lora.rank=0",
        )
        for c in [composed(*words, more)]
    }
    assert list(got.values()) == [(1024, 1e-5, 32), (4096, 1e-5, 32), (1024, 1e-6, 32)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "tokens"),
    [
        ('{"prompt": "2 + 2?", "answer": 4}\n{"prompt": "2 + 20?", "answer": "22"}\n', 260),
        ('{"prompt": "Sum up.", "answer": "' + 800 * "x" + '"}\n', 1024),
        ('{"prompt": "2 + 2?"}\n', 1024),
        ('["no row"]\nno JSON\n{"prompt": "2 + 2?", "answer": "4"}\n{"prompt": "cut', 258),
        ("", 1024),
    ],
)
def test_the_longest_answer_of_a_file_gives_the_length_of_a_reply(tmp_path, rows, tokens):
    """1,024 tokens for answers of two characters are days on a CPU."""
    file = tmp_path / "rows.jsonl"
    file.write_text(rows)
    words = ["model=smollm2_135m", "task=jsonl", f"task.path={file}"]
    assert at(compose(words).config, "generation.max_new_tokens") == tokens
    assert at(compose([*words, "task.fields.answer=a"]).config, "generation.max_new_tokens") == 1024
    mixed = ["task=mixture", "+task@task.parts.mine=jsonl", f"task.parts.mine.path={file}"]
    assert at(compose(mixed).config, "task.parts.mine.suggests.max_new_tokens") == tokens


@pytest.mark.slow
def test_rows_of_a_file_have_tools_where_the_model_asks_for_them():
    """A model without tools in its template read 150 tokens of a calculator's description."""
    rows = ["task=jsonl"]
    assert at(composed(*rows), "task.environment") == "tool_use"  # of the embedded model
    assert at(composed(*rows, "model=smollm2_135m"), "task.environment") == "single_turn"


@pytest.mark.slow
def test_turns_are_those_of_the_task_and_a_mixture_takes_its_longest_part():
    assert (
        at(
            composed("task=gsm8k", "environment=tool_use", "task.suggests.turns=9"),
            "environment.max_turns",
        )
        == 9
    )
    mixture = ["task=mixture", "model=qwen3_0.6b"]
    assert at(composed(*mixture), "generation.max_new_tokens") == 512
    assert (
        at(composed(*mixture, "+task@task.parts.math=gsm8k"), "generation.max_new_tokens") == 1024
    )
    assert at(composed(*mixture), "environment.environments.guess_number.max_turns") == 50


@pytest.mark.parametrize("path", OF_TINY)
def test_a_value_that_is_set_wins(path):
    assert at(composed("task=gsm8k", "model=qwen3_0.6b", f"{path}=7"), path) == 7


@pytest.mark.slow
def test_a_model_and_a_task_that_suggest_nothing_get_the_careful_numbers():
    """A user's own option need not know of suggestions."""
    bare = ["task=gsm8k", "~task.suggests", "~model.suggests", "model.enable_thinking=false"]
    assert [composed(*bare, *more)["optimizer"]["lr"] for more in ([], ["model.lora.rank=1"])] == [
        1e-6,
        pytest.approx(1e-5),
    ]
    assert composed(*bare)["generation"]["max_new_tokens"] == 1024


@pytest.mark.slow
def test_every_engine_and_entry_takes_the_same_length():
    words = ["task=gsm8k", "model=qwen3_0.6b"]
    for engine in ("cached", "transformers", "vllm"):
        option = f"generation={engine}"
        if available(option):
            assert composed(*words, option)["generation"]["max_new_tokens"] == 1024
    for entry in ("rollout", "evaluate"):
        assert compose(words, entry=entry).config["generation"]["max_new_tokens"] == 1024
    assert (
        compose(["model=qwen3_0.6b"], entry="agent").config["generation"]["max_new_tokens"] == 1024
    )


@pytest.mark.slow
def test_no_option_writes_into_another_group():
    """Every suggestion is read by somebody: a misspelt one would be advice to no one."""
    read = "".join(f.read_text() for f in conf_dir().rglob("*.yaml"))
    for group, names in (("model", MODELS), ("task", TASKS)):
        for option in names:
            given = composed(f"{group}={option}")[group].get("suggests", {})
            via_code = {"lr", "lora_lr", "max_new_tokens", "max_new_tokens_thinking", "thinking"}
            unread = [
                key
                for key in given
                if key not in via_code and f"{group}.suggests.{key}" not in read
            ]
            assert not unread, f"{group}={option}: {unread}"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("task.suggests.max_new_tokens=true", "not a whole number"),
        ("task.suggests.max_new_tokens=-3", "greater than 0"),
        ("+model.suggests.learning_rate=1", "nothing reads this"),
        ("task.suggests=3", "not a mapping"),
    ],
)
def test_a_suggestion_that_nothing_could_take_is_refused_though_it_is_hidden(word, said):
    with pytest.raises(ConfigError, match=said) as error:
        compose([word])
    assert word.lstrip("+").partition("=")[0] in str(error.value)


def test_other_suggestions_do_not_keep_a_run_from_going_on():
    """A run folder keeps the numbers, and a later version may advise others: the numbers decide
    whether it is the same run."""
    old = {"model": {"path": "tiny", "suggests": {"lr": 1e-3}}}
    assert find_differences(old, {"model": {"path": "tiny"}}) == {} and find_differences(
        old, {"model": {"path": "other"}}
    )


# --------------------------------------------------------------------------------------- advertised

ADVERTISED = [
    c for c in COMMANDS if c.startswith("rlkit train") and re.search("model=qwen3|trainer=gpu", c)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    cases(
        ADVERTISED, lambda c: "model=qwen3_0.6b trainer=gpu" in c or "gsm8k_tools trainer=gpu" in c
    ),
)
def test_every_advertised_command_for_a_real_model_can_learn(command):
    """Replies have room for an answer, the rate is the model's, and nothing is doubtful."""
    words = parse(words_of(command)[1:]).overrides
    x = experiment(compose(words))
    own = x.model.suggests
    assert (
        x.model.path.startswith("Qwen/")
        and x.generation.max_new_tokens >= 512  # of the embedded task; gsm8k and mbpp suggest 1,024
        and x.trainer.steps >= 100
    )
    if not any("=recipe/" in word for word in words):  # those have the paper's rate
        assert x.optimizer.keywords["lr"] == own["lora_lr" if x.model.rank else "lr"]
    assert [w for w in list_warnings(x) if "tiny model" in w or "LoRA" in w] == []
    assert shlex.split(command)[:2] == ["rlkit", "train"]


# ------------------------------------------------------------------------------------------- doubts


def of_numbers(*words, **parts):
    return [
        line for line in list_warnings(rlkit.experiment(*words, **parts)) if "tiny model" in line
    ]


@pytest.mark.parametrize(
    "words", [["model.path=elsewhere"], ["model=tiny", "model.path=elsewhere", "model.lora.rank=4"]]
)
def test_the_tiny_models_numbers_with_another_model_are_named(words):
    [line] = of_numbers(*words)
    rate = "0.001" if len(words) == 3 else "0.0003"
    for part in (
        "model.path=elsewhere",
        f"optimizer.lr={rate}",
        "trainer.steps=20",
        "generation.max_new_tokens=64",
        "model=pretrained",
    ):
        assert part in line


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["model.path=tiny_guess"],
        ["model=pretrained", "model.path=elsewhere"],
        ["model=qwen3_0.6b", "model.path=elsewhere"],
        ["model=pretrained", "model.path=elsewhere", "model.suggests.max_new_tokens=2048"],
        [
            "model.path=elsewhere",
            "optimizer.lr=1e-6",
            "trainer.steps=100",
            "generation.max_new_tokens=1024",
        ],
    ],
)
def test_a_models_own_numbers_are_not_doubted(words):
    assert of_numbers(*words) == []


def test_an_export_of_the_tiny_model_is_the_tiny_model(tmp_path):
    load_policy(path="tiny").model.config.save_pretrained(tmp_path)
    assert of_numbers(f"model.path={tmp_path}") == []


@pytest.mark.slow
def test_a_model_as_a_python_object_is_known_by_its_folder():
    assert of_numbers(model=load_policy(path="tiny")) == []

    def mine(*, device):
        raise NotImplementedError

    [line] = of_numbers(model=mine)
    assert "another than the embedded one" in line and "optimizer.lr=0.0003" in line


def test_without_training_only_the_length_of_replies_is_doubted():
    [line] = find_embedded_numbers(rlkit.experiment("model.path=elsewhere"))
    assert "generation.max_new_tokens=64" in line and "optimizer.lr" not in line


@pytest.mark.parametrize(
    ("words", "better"),
    [
        (["model=qwen3_0.6b", "optimizer.lr=1e-6"], "optimizer.lr=1e-05"),
        (["model.lora.rank=4", "optimizer.lr=3e-4"], "optimizer.lr=0.001"),
        (["model=qwen3_0.6b"], None),
        (["model=qwen3_0.6b", "model.lora.rank=0"], None),
        (["model.lora.rank=4"], None),
        (["model=qwen3_0.6b", "optimizer.lr=3e-6"], None),
    ],
)
def test_adapters_at_the_rate_of_all_weights_get_one_line(words, better):
    lines = [
        line for line in list_warnings(rlkit.experiment(*words)) if "LoRA Without Regret" in line
    ]
    assert [better in line for line in lines] == ([True] if better else [])
    assert all(LoRA.__name__ in line or "model.lora.rank" in line for line in lines)
