"""The command line: every refusal is a sentence, exit status 2, no traceback, nothing
half-written."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sys
import warnings

import pytest

from parametrise import cases
from rlkit.commands import cli
from rlkit.commands.arguments import parse, unquote
from rlkit.commands.cli import find_command, list_commands, main
from rlkit.commands.train import draw_page, format_closing_lines
from rlkit.config.compose import compose, experiment
from rlkit.config.functions import quote
from rlkit.config.schema import resolve
from rlkit.errors import ConfigError, install
from rlkit.system import extras


def jsonl(path, *rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


GOOD = {"prompt": "What is 1 + 1?", "answer": "2"}


def without_answer(folder):
    return [
        "task=jsonl",
        "task.path=" + jsonl(folder / "a.jsonl", *[GOOD] * 20, {"prompt": "What?"}),
    ], ["a.jsonl:21", "answer"]


def without_number(folder):
    path = jsonl(
        folder / "a.jsonl", *[{"prompt": f"What is {i}?", "answer": "two"} for i in range(20)]
    )
    return ["task=jsonl", f"task.path={path}"], ["gold answer", "'two'", "numeric"]


def one_row_without_a_number(folder):
    rows = [
        {"prompt": f"What is {i}?", "answer": "10:30" if i == 57 else str(i), "id": f"key-{i}"}
        for i in range(200)
    ]
    path = jsonl(folder / "a.jsonl", *rows)
    return ["task=jsonl", f"task.path={path}", "+task.fields.id=id"], [
        "row key-57",
        "'10:30'",
        "one number",
    ]


def broken_row(folder):
    return ["task=jsonl", "task.path=" + jsonl(folder / "a.jsonl", GOOD, "{oops")], ["a.jsonl:2"]


def missing_file(folder):
    return ["task=jsonl", f"task.path={folder}/none.jsonl"], ["none.jsonl", "task.path"]


def long_row(folder):
    rows = [
        {"prompt": f"{i} " + "word " * (3000 if i == 3 else 1), "answer": str(i)} for i in range(20)
    ]
    return ["task=jsonl", "task.path=" + jsonl(folder / "a.jsonl", *rows)], [
        "tokens",
        "context is 2048",
    ]


def no_template(folder):
    (folder / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return [f"model.chat_template={folder}/t.jinja", "model.tools=template"], [
        "model.chat_template=",
        "tools",
        "model.tools=prompt",
    ]


def no_gpu(folder):
    return ["trainer=gpu"], ["trainer=gpu", "trainer=auto"]


def raising_reward(folder):
    (folder / "my_rewards.py").write_text("def oops(rollout):\n    return rollout.nothing\n")
    return ["reward=numeric", "reward.terms.numeric.fn._target_=my_rewards.oops"], [
        "reward=numeric",
        "'numeric' raised",
        "nothing",
    ]


def raising_reward_of_a_later_phase(folder):
    (folder / "my_rewards.py").write_text("def oops(rollout):\n    return rollout.nothing\n")
    phase = "schedule.phases.refine.reward"
    return (
        [
            "schedule=on_reward",
            f"+reward@{phase}=numeric",
            f"{phase}.terms.numeric.fn._target_=my_rewards.oops",
        ],
        ["reward=numeric", "'numeric' raised", "nothing"],
    )


def missing_extra(folder):
    (folder / "math_verify.py").write_text("import a_package_that_is_not_there\n")
    return ["reward=math_verify"], [install("math"), "reward=numeric"]


def reward_that_cannot_score(folder):
    (folder / "my_rewards.py").write_text("def unsure(rollout):\n    return None\n")
    return ["reward=numeric", "reward.terms.numeric.fn._target_=my_rewards.unsure"], [
        "can score none",
        "arithmetic/train",
    ]


CASES = [
    raising_reward,
    raising_reward_of_a_later_phase,
    missing_extra,
    reward_that_cannot_score,
    without_answer,
    without_number,
    one_row_without_a_number,
    broken_row,
    missing_file,
    long_row,
    no_template,
    no_gpu,
]


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(CASES, [without_answer]), ids=lambda c: c.__name__)
def test_bad_input_is_a_sentence_and_leaves_nothing(case, tmp_path, monkeypatch, capsys):
    import torch

    if case is no_gpu and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("my_rewards", None)
    for name in [n for n in sys.modules if n.partition(".")[0] == "math_verify"]:
        monkeypatch.delitem(sys.modules, name)  # another test of this process has imported it
    resolve.cache_clear()  # names are resolved once a process; this one has had another my_rewards
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    overrides, words = case(tmp_path)
    assert main(["train", *overrides]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    for word in words:
        assert word in captured.err
    assert [p for p in (tmp_path / "work").rglob("*") if p.is_file()] == []


@pytest.mark.parametrize(
    "words, expected",
    cases(
        [
            (["trian"], "there is no command 'trian'"),
            (["train", "--stesp"], "there is no flag '--stesp'"),
            (["train", "seed"], "'seed' is not an override"),
            (["train", "--config-dir", "nowhere"], "no such folder"),
            (["train", "resume=nowhere"], "no run folder"),
            (["train", "--resolve"], "write --cfg job --resolve"),
            (["train", "resume=outputs/latest", "--cfg", "job"], "rlkit show run=FOLDER"),
            (["evaluate", "split=train", "--cfg", "job"], "split=train: --cfg"),
            (["evaluate", "run=nowhere"], "no run folder"),
            (["evaluate", "evaluation.samples=2"], "pass@8"),
            (["train", "-m", "algorithm=grpo,grpp"], "grpp"),
        ],
        4,
        unpack=True,
    ),
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_wrong_command_lines(words, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert expected in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_group(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for word in (
        "algorithm",
        "grpo",
        "reinforce",
        "kl",
        "k3",
        "reference",
        "frozen",
        "task",
        "gsm8k",
    ):
        assert word in text


@pytest.mark.parametrize("name", list_commands())
def test_the_help_of_a_command_is_its_own(name, capsys, monkeypatch):
    """Wrapped to the terminal, with two examples that the command line can read; other words on the
    line do not matter."""
    monkeypatch.setenv("COLUMNS", "60")
    assert main([name, "nonsense", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    examples = [line.strip() for line in lines if line.startswith(f"    rlkit {name}")]
    assert lines[0] == f"rlkit {name}" and len(examples) == 2
    assert max(len(line) for line in lines if line.strip() not in examples) <= 60
    run = find_command(name)
    texts = getattr(sys.modules[run.__module__], "TAKES_TEXTS", False)
    for example in examples:
        assert parse(shlex.split(example)[2:], texts=texts).overrides is not None


def test_help_names_every_setting_of_its_own(capsys):
    """The keys that a command reads itself, which no option of conf/ has."""
    settings = {"compare": ("figure", "at", "pairs", "effect"), "plan": ("effect", "seeds")}
    for name, keys in settings.items():
        assert main([name, "--help"]) == 0
        said = capsys.readouterr().out
        assert [key for key in keys if f"\n{key}=" not in said] == []


def test_the_version_and_the_nearest_command_are_told(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"rlkit \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert main(["trian"]) == 2
    assert "there is no command 'trian'. Did you mean 'train'?" in capsys.readouterr().err


def test_help_imports_nothing_heavy():
    program = (
        "import sys\nfrom rlkit.commands.cli import main\nmain(['--help'])\nmain(['train', '-h'])\n"
        "assert not {'torch', 'hydra', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_a_function_is_named_where_a_part_holds_some(tmp_path, monkeypatch, capsys):
    """A reward and tools of the command line: bare functions, which a later key may still set. The
    overrides of the run compose again."""
    (tmp_path / "named_parts.py").write_text(
        "def brief(rollout):\n    return 1.0\n\n\ndef long(rollout):\n    return 0.0\n\n\n"
        'def double(number: int) -> int:\n    """Doubles.\n\n    Args:\n        number: Any.\n'
        '    """\n    return 2 * number\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["reward=[named_parts.brief,named_parts.long]", "reward.terms.long.weight=0.5"]
    words += ["environment=tool_use", "environment.tools=named_parts.double"]
    composed = compose(words)
    assert compose(composed.overrides).config == composed.config
    x = experiment(composed)
    weights = {name: term.weight for name, term in x.reward.terms.items()}
    assert weights == {"brief": 1.0, "long": 0.5} and x.reward.name == "brief+long"
    assert list(x.environment.tools(None)) == ["double"]
    assert compose(["tools=calculator"], entry="agent").config["tools"] == ["calculator"]
    assert main(["show", "reward=named_parts.brief"]) == 0
    assert "reward = named_parts.brief" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"'named_parts' has no 'breif'\. Did you mean 'brief'"):
        compose(["reward=named_parts.breif"])


@pytest.mark.parametrize(
    "text",
    [
        *("outputs/a", "a=b,c=d", "it's", "back\\slash", '"', "with space"),
        *(r"pattern=\d+", "ends in \\", "ends in \\\\", r"[\'\"]", r"\\'"),
    ],
)
def test_quoting_is_undone(text):
    """Folders of a sweep hold '=' and ','; their names travel through Hydra's grammar and come
    back."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    quoted = quote(text)
    assert unquote(quoted) == unquote(text) == text if text != '"' else unquote(quoted) == text
    assert OverridesParser.create().parse_overrides([f"name={quoted}"])[0].value() == text


@pytest.mark.slow
def test_the_default_learns(tmp_path, monkeypatch):
    """From a held-out greedy accuracy of 0.2–0.6 to at least 0.95, as the README says. .ci/run
    holds the default's seed to it."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "seed=1"]) == 0
    summary = json.loads(next(tmp_path.glob("outputs/*/*/summary.json")).read_text())
    assert 0.2 <= summary["before"]["accuracy"] <= 0.6
    assert summary["after"]["accuracy"] >= 0.95


@pytest.mark.slow
def test_the_first_line_of_train_needs_no_lightning(tmp_path):
    stop = (
        "import builtins, os, sys\nsays = builtins.print\ndef first(*words, **how):\n   "
        " says(*words)\n    heavy = {'lightning', 'torchmetrics', 'datasets', 'tensorboard',"
        " 'sklearn'} & set(sys.modules)\n    os._exit(bool(heavy) or not"
        " words[0].startswith('rlkit: '))\nbuiltins.print = first\nfrom rlkit.commands.cli import"
        " main\nmain(['train', 'trainer.steps=1', 'evaluation.n=2',"
        f" 'hydra.run.dir={tmp_path}/run'])\nos._exit(3)"
    )
    done = subprocess.run([sys.executable, "-c", stop], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout


class Outside:
    """The entry point of a package that has a command."""

    value = "a_package:draw"

    def __init__(self, command):
        self.load = lambda: command


def test_the_page_of_a_sweep_is_drawn_by_whoever_has_the_command(tmp_path, monkeypatch, capsys):
    """Without the command the sweep leaves the page out, and the end of a run does not name it."""
    ended = {"ended": "finished", "steps": 0, "wall_seconds": 1.0, "tokens": 1}
    folders = [tmp_path / "lr=1", tmp_path / "lr=2"]
    monkeypatch.setattr(extras, "FOLDER", tmp_path)
    draw_page(folders, tmp_path / "report.html")
    said = capsys.readouterr().out
    assert said.startswith("report           none: ") and "extra 'report'" in said
    assert "rlkit report" not in format_closing_lines(ended, tmp_path)
    asked = []

    def draw(arguments):
        asked.append((arguments.texts, arguments.overrides))
        if len(asked) > 1:
            raise ConfigError("no ink")
        return 0

    monkeypatch.setattr(extras, "find_outside_commands", lambda: {"report": Outside(draw)})
    assert "rlkit report" in format_closing_lines(ended, tmp_path)
    draw_page(folders, tmp_path / "report.html")
    assert asked == [(tuple(map(str, folders)), [f"out={tmp_path / 'report.html'}"])]
    capsys.readouterr()
    draw_page(folders, tmp_path / "report.html")
    assert capsys.readouterr().out == "report           none: no ink\n"


def test_python_names_a_forgotten_coroutine_behind_a_result_and_not_beside_a_sentence(
    monkeypatch, capsys
):
    def command(arguments):
        asyncio.sleep(0)
        if arguments.overrides:
            raise ConfigError("no number", asyncio.sleep(0))
        return 0

    monkeypatch.setattr(cli, "find_command", lambda name: command)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert main(["doctor"]) == 0
        assert capsys.readouterr().err == "warning: coroutine 'sleep' was never awaited\n"
        assert main(["doctor", "seed=1"]) == 2
    assert "never awaited" not in capsys.readouterr().err and shown == []
