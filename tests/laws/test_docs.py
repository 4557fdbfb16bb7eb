"""What the pages say is so: generated ones are fresh, and every command that a page shows is one
that rlkit takes and can run."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import yaml

from parametrise import available, cases, every_extra, presets
from rlkit.commands.arguments import drop, parse
from rlkit.commands.cli import list_commands, main
from rlkit.config.compose import compose, conf_dir, experiment
from rlkit.config.hints import list_leaves
from rlkit.config.schema import build
from rlkit.errors import ConfigError
from rlkit.runs.sweeps import expand
from rlkit.system.extras import find_commands, list_extras

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "experiments").glob("*/README.md")),
    *sorted((ROOT / "experiments" / "laptop").glob("*/README.md")),
    *sorted((ROOT / "rlkit" / "extras").glob("*/README.md")),
]
PRESETS = [conf_dir() / "experiment" / f"{name}.yaml" for name in presets()]

REFUSED = "rlkit train algorithm=grp"  # shown for its message
# A part of a command → why it cannot be run here; its config is composed and checked all the same.
CANNOT = {
    "model=qwen3": "needs the model's weights",
    "trainer=gpu": "needs a GPU",
    "trainer.devices": "several processes; tests/distributed/test_ranks.py runs such",
    "generation=vllm": "needs vLLM; tests/extras/vllm/test_vllm_real.py runs it",
    "logger=[": "needs the extras",
    "sweep_": "needs the extras",
    "rlkit serve": "serves until it is stopped; tests/extras/programs/test_gateway.py runs it",
    "experiment=bench/": "earns nothing in two steps; tests/extras/bench trains such",
    "task=bench": "earns nothing in two steps; tests/extras/bench trains such",
    "replay": "needs a bundle; tests/laws/test_faults.py has one",
    "reference.path=": "needs a user's model",
    "rlkit check experiment=": "needs the model's weights",
    "task=gsm8k": "needs the rows",
    "experiment=gsm8k_tools": "needs the rows and the weights",
    "task=mbpp": "needs the rows",
    "task=mixture": "its rows are those of the hub",
    "task=jsonl": "needs a user's rows",
    "task.path=": "needs a user's rows",
    "task=harbor": "needs a confined program; tests/extras/programs/test_harbor.py trains with it",
    "task=verifiers": "needs the extra",
    "task=reasoning_gym": "needs the extra",
    "--config-dir": "needs a user's folder; tests/laws/test_extension.py runs such",
    "reward=judge": "needs a server; tests/extras/adapters/test_judge.py has one",
    "my_": "needs a user's module; tests/laws/test_extension.py runs such",
    "environment=python": "needs a sandbox, which not every machine has",
    "resume=": "needs a run; tests/runs/test_runs.py resumes such",
    "run=": "needs a run; tests/runs/test_runs.py and test_export.py have one",
    "-m": "many processes; tests of sweeps run such",
    "environment.command=": "processes; tests/extras/programs/test_gateway.py plays such",
    "task.high=100000": "earns nothing on purpose; experiments/why diagnoses it",
    "environment.id=": "earns nothing in two steps; tests/extras/programs plays such",
    "rlkit get": "needs the package index; tests/extras/pretrained has one of its own",
    "experiment=laptop": "needs rlkit get; tests/laws/test_presets.py takes a step of it",
    "smollm2_135m": "needs rlkit get; tests/extras/pretrained trains it",
    "rlkit report": "needs runs",
    "rlkit runs": "needs runs; tests/runs/test_runs.py lists such",
    "teacher=path": "needs a user's model",
    "teacher=vllm": "needs servers; tests/extras/vllm/test_served_teacher.py has some",
    "--cfg": "no run; tests/commands/test_first_week.py prints configs",
    "--info": "no run; tests/commands/test_first_week.py prints options",
    "rlkit compare": "needs runs",
    "rlkit plan": "needs runs",
    "rlkit bench": "many processes; tests/extras/bench/test_bench.py runs such",
    "rlkit prove": "of an extra that may be missing; tests/extras/bench/test_prove.py runs such",
    "rlkit why": "needs a run; tests/extras/why/test_why.py has some",
    "tensorboard": "needs the extra",
}
BROUGHT = {
    "report": "report",
    "serve": "programs",
    "forecast": "forecast",
    "get": "pretrained",
    "bench": "bench",
    "prove": "bench",
    "why": "why",
}  # command → the extra that brings it
NEEDS = {  # what a shown command leaves to the reader
    "task=jsonl": ["task.path=rows.jsonl"],
    "task=harbor": ["task.path=any"],
    "task=verifiers": ["task.id=any"],
    "task=reasoning_gym": ["task.dataset=countdown"],
    "generation=vllm": ["generation.engine.addresses=[http://127.0.0.1:8000]"],
    "experiment=sft": ["task.path=rows.jsonl"],
    "teacher.model=NAME": [
        "algorithm=opd",
        "teacher=vllm",
        "teacher.addresses=[http://127.0.0.1:8000]",
    ],
    "hydra.launcher.gpus_per_node=null": ["experiment=sweep_slurm"],
    "task=conversations": ["task.path=rows.jsonl"],
    "environment.id=MiniGrid-Empty-5x5-v0": ["task=episodes", "environment=gymnasium"],
    **{
        word: ["environment=program", "environment.command=[python]"]
        for word in (
            "environment.score=exit",
            "environment.dropped_thinking=continue",
            "environment.confined=auto",
            "environment.confined=true",
        )
    },
}


def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generated():
    return generator().pages()


@pytest.mark.slow
def test_generated_pages_are_fresh(generated):
    stale = [
        path.name
        for path, text in generated.items()
        if not path.is_file() or path.read_text() != text
    ]
    gone = {p for p in (ROOT / "docs" / "config").glob("*.md")} - set(generated)
    assert not stale and not gone, f"run python docs/generate.py: {stale}, {gone}"


@pytest.mark.slow
def test_every_option_and_every_key_has_a_meaning(generated):
    """A key without a comment above it is an empty cell; a name that only repeats the option's
    needs none."""
    silent = []
    for path, text in generated.items():
        if path.parent.name == "config" and path.stem not in ("experiment", "debug", "README"):
            rows = re.findall(r"^\| `([\w.]+)` \| .* \| (.*) \|$", text, re.M)
            silent += [
                f"{path.stem}: {key}"
                for key, meaning in rows
                if not meaning.strip() and key.rpartition(".")[2] != "name"
            ]
    assert silent == []


@pytest.mark.slow
def test_fifty_extension_points_are_listed(generated):
    points = generator().points()
    assert len(points) >= 50 and len({p.place for p in points}) == len(points)
    for place in (
        "reward.terms.NAME.fn",
        "algorithm.advantage",
        "kl.estimator",
        "reference",
        "task",
        "environment.tools",
        "environment.parse_calls",
        "environment",
        "schedule.numbers",
        "generation.engine",
        "callbacks",
    ):
        assert place in {p.place for p in points}
    text = next(text for path, text in generated.items() if path.name == "extension_points.md")
    assert (
        "Shipped: `rlkit.functional.group_mean`" in text or "`rlkit.functional.group_mean`" in text
    )


def shown() -> list[str]:
    """Every command on a page or in a preset's comments, as it is typed."""
    found = []
    for page in PAGES:
        for line in page.read_text().splitlines():
            if line.startswith("    ") and (
                at := re.search(r"(?:^|&& |(?<!from)(?<!import)\s)(rlkit [a-z-].*)$", line)
            ):
                found.append(at[1])
            elif not line.startswith("    "):
                found += re.findall(r"`(rlkit [a-z-][^`]*)`", line)
    for preset in PRESETS:
        comment = " ".join(
            line.lstrip("# ").rstrip()
            for line in preset.read_text().splitlines()
            if line.startswith("#")
        )
        found += [
            c.rstrip(";.") for c in re.findall(r"(rlkit train .*?)(?:;|$| \w+ the \w+)", comment)
        ]
    return sorted(
        dict.fromkeys(re.sub(r'\s+#.*| "\$@"$', "", command).strip(" …") for command in found)
    )


COMMANDS = shown()


def words_of(command: str) -> list[str]:
    words = shlex.split(command.replace("\\|", "|"))[1:]
    return words + [
        more
        for part, extra in NEEDS.items()
        for more in extra
        if part in words and not any(w.startswith(more.partition("=")[0] + "=") for w in words)
    ]


def test_the_commands_of_extras_are_named_with_their_extra():
    for name, module in find_commands().items():
        assert module.startswith(f"rlkit.extras.{BROUGHT[name]}.")


def test_commands_are_found():
    assert len(COMMANDS) > 40 and any("-m" in c for c in COMMANDS)


# The groups that decide what is sampled, and how it is scored.
PLAYED = ("task", "environment", "reward", "experiment", "generation", "model", "asynchrony")


def is_played(command: str) -> bool:
    """Whether a command shows an outcome that no other shows: of two trainings that differ in how
    the weights move, the rewards are as good."""
    name, *words = words_of(command)
    groups = {re.split(r"[=./]", word.lstrip("+"), maxsplit=1)[0] for word in words}
    return name != "train" or not words or not groups.isdisjoint(PLAYED)


RUN = [
    command
    for command in COMMANDS
    if command != REFUSED and not any(part in command for part in CANNOT) and is_played(command)
]


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in RUN])
def test_every_command_shown_is_one_that_rlkit_takes(command):
    """Composed, checked and dry-run: a renamed key or option makes the page that still shows it
    fail. Those that are played here are run below."""
    if "my_" in command or "--config-dir" in command:
        pytest.skip(CANNOT["my_"])
    if command == REFUSED:
        with pytest.raises(ConfigError):
            compose(words_of(command)[1:])
        return
    name, *words = words_of(command)
    if BROUGHT.get(name) not in (None, *list_extras()):
        pytest.skip(f"the extra {BROUGHT[name]} brings it")
    if not all(map(available, words)):
        pytest.skip("needs an extra that is not there")
    if name not in ("train", "check", "evaluate", "rollout", "agent"):
        assert name in (*list_commands(), "--help"), name
        return
    arguments = parse(words, texts=name == "agent")
    overrides = [
        o
        for o in drop(drop(arguments.overrides, "run"), "resume")
        if not o.startswith(("check.", "trainer.requeue=")) and o != "debug=true"
    ]
    jobs = expand(overrides) if arguments.multirun else [overrides]
    for job in jobs[:4]:
        composed = compose(job, entry={"check": "train"}.get(name, name))
        experiment(composed) if name in ("train", "check", "evaluate") else build(composed.config)


SMALL = {
    "train": ["batch.prompts=4", "trainer.steps=1", "evaluation.n=8", "logger=none"],
    "check": [],
    "rollout": ["n=8"],
    "evaluate": ["evaluation.n=8", "evaluation.samples=8"],
    "agent": [],
    "doctor": [],
    "metrics": [],
    "show": [],
    "--help": [],
    "--version": [],
}
ANSWERS = {
    "Kim has 19 toys. Kim buys 14 more.": "33"
}  # the beginning of a question that a page asks → the right answer


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_every_command_that_can_run_here_gives_what_it_is_shown_for(
    command, tmp_path, monkeypatch, capsys
):
    """Its outcome, not its exit status: a reward that is a number and not always 0, an answer that
    is right."""
    monkeypatch.chdir(tmp_path)
    words = words_of(command)
    assert main([*words, *SMALL[words[0]]]) == 0
    said = capsys.readouterr().out
    if words[0] == "train":
        [metrics] = tmp_path.glob("outputs/**/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        means = [
            {k: v for k, v in row.items() if re.fullmatch(r"reward/(\w+/)?mean", k)}
            for row in rows
            if "reward/mean" in row
        ]
        assert means and all(
            isinstance(mean, float) for row in means for mean in row.values()
        )  # nan is written as null
        assert all(
            any(row.values()) for row in means
        )  # the sum of standardised terms is 0, not the terms
        assert all(row["reward/unscored_frac"] == 0 for row in rows if "reward/mean" in row)
    elif words[0] == "rollout":
        [summary] = tmp_path.glob("outputs/**/summary.json")
        assert json.loads(summary.read_text())["reward/mean"] > 0
    elif words[0] == "evaluate":
        [result] = tmp_path.glob("outputs/**/result.json")
        assert json.loads(result.read_text())["greedy"]["accuracy"] > 0
    elif words[0] == "agent":
        [answer] = [answer for question, answer in ANSWERS.items() if words[1].startswith(question)]
        assert re.search(rf"^assistant\n  #### {answer}$", said, re.M)


def alternatives() -> list[str]:
    """`rlkit train GROUP=OPTION` with each of the options that stand behind it as "(or a, b,
    c)"."""
    rows = re.findall(
        r"`rlkit train ([\w/]+)=\w+` \(or ([\w, ]+)\)",
        (ROOT / "docs" / "cheat_sheet.md").read_text(),
    )
    return [f"{group}={option}" for group, options in rows for option in options.split(", ")]


@pytest.mark.parametrize("override", cases(alternatives(), 1))
def test_every_alternative_of_the_cheat_sheet_is_taken_alone(override):
    """`reference=none` stood there, which is refused beside the default KL."""
    experiment(compose([override]))


def blocks(page: str) -> dict[str, str]:
    """Files that a page shows: indented lines under a comment with the file's name."""
    files: dict[str, list[str]] = {}
    name = ""
    for line in (ROOT / "docs" / page).read_text().splitlines():
        if header := re.fullmatch(r"    # ([\w/]+\.(?:py|yaml))", line):
            name = header[1]
        elif name and (line.startswith("    PYTHONPATH") or (line and not line.startswith("    "))):
            name = ""
        elif name:
            files.setdefault(name, []).append(line)
    return {name: textwrap.dedent("\n".join(lines)) for name, lines in files.items()}


def write(page: str, folder: Path) -> None:
    """The files that a page shows, as they are shown."""
    for name, text in blocks(page).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "metrics"),
    [
        ("advantage=signed", ["test/accuracy"]),
        ("environment=till", ["test/accuracy", "reward/mean"]),
        ("my_games.Climb", ["test/reward"]),
    ],
)
def test_the_own_parts_of_the_page_learn(part, metrics, tmp_path, monkeypatch):
    """The files and the command as they are shown: every reward is a number, and the figures rise
    by far more than their noise. A tool that the embedded model does not know gave 0 for ever."""
    write("own_parts.md", tmp_path)
    shown = re.findall(
        r"^    PYTHONPATH=\. rlkit (train .*)$", (ROOT / "docs" / "own_parts.md").read_text(), re.M
    )
    [command] = [c for c in shown if part in c]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main([*shlex.split(command), "evaluation.n=64", "logger=none"]) == 0
    [file] = tmp_path.glob("outputs/*/*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [row for row in rows if "reward/mean" in row]
    assert len(steps) == 20 and all(row["reward/unscored_frac"] == 0 for row in steps)
    for metric in metrics:
        figures = [row[metric] for row in rows if metric in row]
        assert figures[-1] > figures[0] + 0.2, metric


@pytest.mark.slow
def test_the_first_own_task_goes_as_the_page_tells(tmp_path, monkeypatch, capsys):
    """Every command of the page in its order: a start with something to learn, a check that passes,
    and a test figure that rises."""
    write("first_task.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    runpy.run_path("make_rows.py")
    page = (ROOT / "docs" / "first_task.md").read_text()
    commands = re.findall(
        r"^    (?:PYTHONPATH=\. )?rlkit ((?:rollout|check|train) .*)$", page, re.M
    )
    assert [c.split()[0] for c in commands] == ["rollout", "check", "train"]
    rows = Path("rows.jsonl").read_text().splitlines()
    assert f"The file has {len(rows)} rows." in page
    for command in commands:
        assert (
            main([*shlex.split(command), *(["logger=none"] if command.startswith("train") else [])])
            == 0
        )
    printed = capsys.readouterr().out
    assert re.search(r"^episodes +32$", printed, re.M)
    # the last ones are those of the training, which has a validation split
    *_, counts = re.finditer(r"^data: (\d+) training, (\d+) test problems$", printed, re.M)
    assert f"`{counts[0]}`" in page
    validation = len(rows) - int(counts[1]) - int(counts[2])
    assert f"The other {validation} rows are for validation" in " ".join(page.split())
    [played] = [
        json.loads(file.read_text()) for file in tmp_path.glob("outputs/rollout/*/summary.json")
    ]
    [trained] = [
        json.loads(file.read_text()) for file in tmp_path.glob("outputs/grpo/*/summary.json")
    ]
    assert 0.05 < played["reward/mean"] < 0.5 and trained["steps"] == 8
    assert trained["before"]["accuracy"] < 0.2 and trained["after"]["accuracy"] > 0.8


def test_every_name_of_the_table_for_users_of_trl_and_verl_is_ours():
    """A key that was renamed would make the page send its readers to nothing."""
    table = re.findall(
        r"^\| .* \| ([^|]+) \|$",
        (ROOT / "docs" / "from_trl_and_verl.md").read_text().partition("## What differs")[0],
        re.M,
    )
    names = [name for row in table for name in re.findall(r"`([\w./=]+)`", row)]
    keys = {
        key
        for preset in ("grpo", "dapo")
        for key in list_leaves(compose([f"algorithm={preset}"]).config)
    } | {"reward.terms.NAME.weight"}
    lost = []
    for name in names:
        group, chosen, option = name.partition("=")
        file = conf_dir() / group / f"{option}.yaml"
        if not (
            file.is_file()
            if chosen and group != "resume"
            else group in keys or any(key.startswith(f"{group}.") for key in keys)
        ):
            lost.append(name)
    assert len(names) > 25 and not lost


def test_the_newcomers_page_is_one_page_with_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert (
        len(text.split()) <= 1000
        and len(re.findall(r"^    pip install -c constraints.txt -e ", text, re.M)) == 2
    )
    linked = re.findall(r"\]\(([\w./]+)\)", text)
    assert linked and all((ROOT / path).exists() for path in linked)


def test_the_citation_has_the_version_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(cited["version"]) == project["version"] and cited["license"] == project["license"]


TOUR = [
    page
    for page in PAGES
    if page.name not in ("extension_points.md", "notebooks.md") and "experiments" not in page.parts
]
NOT_OF_RUNS = {
    "resume",
    "figure",
    "effect",
    "at",
    "pairs",
    "seeds",
    "jobs",
    "placebo",
    "arms",
    "bundle",
    "run",
    "split",
    "trust",
    "limit",
    "attack",
    "step",
    "steps",
}  # of other commands


def overrides_named() -> list[str]:
    """`key=value …` in the running text of pages, but for what a whole command shows too, which is
    tested above."""
    shown = {word for command in COMMANDS for word in command.split()}
    spans = [span for page in TOUR for span in re.findall(r"`([a-z][^`\n]*)`", page.read_text())]
    words = r"[a-z][a-z_/.]*=[\w.\-]+"
    found = {
        span
        for span in spans
        if re.fullmatch(f"{words}( {words})*", span) and "__" not in span and "_target_" not in span
    }
    return sorted(span for span in found if not set(span.split()) <= shown)


@pytest.mark.slow
def test_every_override_that_a_page_names_is_taken():
    """`environment.overflow=drop_oldest` was named for environments that do not know it."""
    named, refused = overrides_named(), []
    for span in named:
        words = span.split()
        if any(w.partition("=")[0] in NOT_OF_RUNS or w.startswith("check.") for w in words):
            continue
        more = [own for part, extra in NEEDS.items() if part in words for own in extra]
        try:
            compose([*words, *more])
        except ConfigError as error:
            refused.append(f"{span}: {error}")
    assert len(named) > 20 and not refused, "\n".join(refused)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    pytest.importorskip("sphinx", reason="needs the extra docs")
    tmp_path = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-d",
        str(tmp_path / "read"),
        str(ROOT / "docs"),
        str(tmp_path / "site"),
    ]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return tmp_path / "site"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} <= {page.stem for page in pages}
    for page in pages:
        loaded = re.findall(
            r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=\"([^\"]+)|<link\b[^>]*\bhref=\"([^\"]+)",
            page.read_text(),
        )
        outside = [a or b for a, b in loaded if re.match(r"(?:https?:)?//", a or b)]
        assert not outside, f"{page.name}: {outside}"
    styles = "".join(style.read_text() for style in site.rglob("*.css"))
    assert not re.findall(r"@import|url\(['\"]?(?:https?:)?//", styles)


@pytest.mark.slow
def test_the_site_draws_formulas_and_colours_code(site):
    """Formulas stood there as they are typed, and indented code was grey."""
    step = (site / "rl_step.html").read_text()
    assert step.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">') == 2
    assert "$" not in re.sub(r"<script.*?</script>", "", step, flags=re.S)
    own = (site / "own_parts.html").read_text()
    for language in ("python", "yaml", "bash"):
        blocks = re.findall(rf'<div class="highlight-{language} .*?</pre>', own, re.S)
        assert blocks and all(block.count("<span") > 2 for block in blocks), language
    bare = re.findall(r'<div class="highlight-none .*?<pre>(.*?)</pre>', own, re.S)
    assert not [block for block in bare if re.search("rlkit train|import |_target_:", block)]


@pytest.mark.slow
def test_the_site_cuts_no_command(site):
    """Each command of a page stands whole on its page of the site, in a block whose lines break."""
    rules = (site / "_static" / "site.css").read_text()
    assert re.search(r"\.highlight pre \{[^}]*white-space: pre-wrap", rules)
    count = 0
    for page in (ROOT / "docs").glob("*.md"):
        built = html.unescape(re.sub("<[^>]+>", "", (site / f"{page.stem}.html").read_text()))
        shown = re.findall(r"^    ((?:PYTHONPATH=\. )?rlkit .*)$", page.read_text(), re.M)
        assert [command for command in shown if command not in built] == [], page.name
        count += len(shown)
    assert count > 40


@pytest.mark.slow
def test_the_embedded_model_follows_the_task():
    """`rlkit rollout task=guess_number` was played by the model of the word problems, which never
    says a number."""
    for words, path in [
        ([], "tiny"),
        (["task=guess_number"], "tiny_guess"),
        (["task=guess_number", "model=tiny"], "tiny"),
        (["task=guess_number", "model.path=elsewhere"], "elsewhere"),
    ]:
        for entry in ("train", "rollout"):
            assert compose(words, entry=entry).config["model"]["path"] == path


@pytest.mark.skipif(not every_extra(), reason="the pages of missing extras show no command")
def test_no_reason_is_left_that_no_command_needs():
    unused = [part for part in CANNOT if not any(part in command for command in COMMANDS)]
    assert set(unused) <= {"rlkit report", "tensorboard", "task.path=", "trainer=gpu"}
