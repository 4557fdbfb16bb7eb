"""Run a new user's first week as one session, and check the outcome of every command.

    python experiments/first_week/session.py CLONE FOLDER

Every command is typed as a user types it. The script makes a fresh virtual environment in
FOLDER/venv, installs rlkit from CLONE as the README says, and works in FOLDER. FOLDER must not
exist yet. `--venv VENV` uses an existing environment. The transcript is FOLDER/transcript.txt, with
shortened paths. The exit status is 1 if an outcome was wrong. The installation needs the package
index; nothing else needs the network.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

SHOWN = 14  # lines kept in the transcript at each end of an output
SMALL = (
    "batch: {prompts: 4, group_size: 4}\ntrainer: {steps: 2}\nevaluation: {n: 8}\ngeneration:"
    " {max_new_tokens: 48}\n"
)
JSONL = "task=jsonl task.path=rows.jsonl task.fields.prompt=question task.fields.answer=result"
TERM = """_target_: rlkit.rewards.Reward
name: NAME
terms:
  NAME:
    _target_: rlkit.rewards.Term
    weight: 1.0
    fn: {_target_: FUNCTION, _partial_: true}
"""
OWN = {  # files of a user, besides the files shown on the pages
    "small.yaml": SMALL,
    "my_metrics.py": (
        '''
import lightning as L


def polite(rollout):
    """1 for a reply that thanks, and how many words it has."""
    text = rollout.final_content
    return float("thank" in text.lower()), {"words": len(text.split())}


class Count(L.Callback):
    """Logs how many steps are behind."""

    def on_train_batch_end(self, trainer, module, *_):
        module.log("mine/done", module.rl_step)


def counting(run_folder):
    return Count()
'''
    ),
    "my_conf/reward/polite.yaml": (
        TERM.replace("NAME", "polite").replace("FUNCTION", "my_metrics.polite")
    ),
    "my_conf/mine.yaml": (
        "defaults:\n- train\n- override algorithm: dapo\n- kl: none\n- _self_\ntrainer:\n "
        " steps: 2\n"
    ),
}
MODULES = {  # name → (text, expected words of the refusal)
    "syntax": ("def score(rollout):\n    return 1.0 +\n", r"bad_syntax\.py:2: invalid syntax"),
    "indent": (
        "def score(rollout):\n  x = 1\n    return x\n",
        r"bad_indent\.py:3: unexpected indent",
    ),
    "import": ("import pandaz\n", r"bad_import\.py:1: No module named 'pandaz'"),
    "runtime": (
        "def score(rollout):\n    return len(rollout.answr)\n",
        r"no attribute 'answr' at .*bad_runtime\.py:2",
    ),
    "value": ("def score(rollout):\n    return 'yes'\n", r"'yes'; return a finite number"),
    "arguments": (
        "def score():\n    return 1.0\n",
        r"called with a rollout alone.*bad_arguments\.py:1",
    ),
}
PRESETS = {
    "indented": (
        "# @package _global_\nalgorithm:\n   epochs: 2\n  minibatches: 3\n",
        r"indented\.yaml:4: this is not YAML",
    ),
    "tabbed": (
        "# @package _global_\noptimizer:\n\tlr: 1e-4\n",
        r"tabbed\.yaml:3: this is not YAML",
    ),
    "dangling": (
        "# @package _global_\nalgorithm:\n  epochs: ${nope}\n",
        r"algorithm\.epochs: \$\{nope\} cannot be resolved",
    ),
    "unpackaged": ("algorithm:\n  epochs: 2\n", r"write '# @package _global_' as the first line"),
    "typed": (
        "# @package _global_\noptimizer:\n  lr: fast\n",
        r"optimizer\.lr: 'fast' is not a number",
    ),
    "misnamed": (
        "# @package _global_\ndefaults:\n- override /algorithm: drgrpo\n",
        r"Did you mean 'dr_grpo'",
    ),
}
SLIPS = {  # typed words → expected answer
    "lr=1e-4": "Did you mean 'optimizer.lr'",
    "group_size=8": "Did you mean 'batch.group_size'",
    "beta=0.1": "Did you mean 'kl.coef'",
    "num_generations=8": "Did you mean 'batch.group_size'",
    "learning_rate=1e-5": "Did you mean 'optimizer.lr'",
    "lora_rank=8": "Did you mean 'model.lora.rank'",
    "steps=10": "Did you mean 'trainer.steps'",
    "--steps 10": "write trainer.steps=10",
    "algorithm=grp": "Did you mean 'grpo'",
    "trainer.steps=ten": "not a whole number",
    "'reward=[numeric'": "close each bracket",
    "model.suggests=3": "model.suggests.NAME=VALUE",
    "experiment=quikstart": "Did you mean 'quickstart'",
    "task=jsonl": "set task.path=VALUE",
    "task=jsonl task.path=nope.jsonl": "does not exist",
    "task=jsonl task.path=rows.jsonl task.fields.prompt=quest": r"the row has 'question', 'result'",
    "logger=wandb": r"pip install -c constraints.txt -e '\.\[wandb\]'",
    "resume=outputs/nope": "no run folder",
    "batch.group_size=1": "needs at least 2",
    "trainer=gpu": "no GPU",
}
READ = {
    "pandas": (
        'import pandas; print(pandas.read_parquet("RUN/completions")[["step", "reward",'
        ' "policy_version"]].describe())'
    ),
    "polars": (
        'import polars; print(polars.read_parquet("RUN/completions/*.parquet")'
        '.group_by("step").agg(polars.col("reward").mean()))'
    ),
    "datasets": (
        'import datasets as d; print(d.load_dataset("parquet",'
        ' data_files="RUN/completions/*.parquet", split="train"))'
    ),
    "the full record": (
        'import datasets; print(datasets.load_dataset("json", data_files="RUN/rollouts/*",'
        ' split="train"))'
    ),
    "rlkit": (
        'from rlkit.episodes import load_rollouts; print(load_rollouts("RUN/rollouts", step=1)[0])'
    ),
}
LOOP = """import rlkit


def short(rollout):
    return float(len(rollout.final_content) < 9)


x = rlkit.experiment("algorithm=dapo", "kl=none", reward=short, trainer__steps=2, evaluation__n=4)
run = rlkit.train(x)
print(run.metrics[-1]["reward/mean"])
"""


class Terminal:
    """Type commands in a folder, keep a transcript, and check each command's output and status."""

    def __init__(self, folder: Path, names: dict[str, str], environ: dict[str, str]):
        self.folder, self.names, self.environ = folder, names, environ
        self.failed: list[str] = []
        self.transcript = folder / "transcript.txt"
        self.transcript.write_text("")

    def write(self, text: str) -> None:
        """Add to the transcript, and print it."""
        for path, name in self.names.items():
            text = text.replace(path, name)
        print(text, flush=True)
        with self.transcript.open("a") as file:
            file.write(text + "\n")

    def chapter(self, title: str) -> None:
        """Write a heading."""
        self.write(f"\n{'=' * 100}\n{title}\n{'=' * 100}")

    def type(
        self,
        command: str,
        *says: str,
        status: int = 0,
        shown: int = SHOWN,
        within: Path | None = None,
    ) -> str:
        """Run a command and return its output.

        The command fails the check if it has another exit status, if a pattern of `says` does not
        match its output, or if the output has a traceback.
        """
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=within or self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr).strip()
        lines = said.splitlines()
        cut = (
            [*lines[:shown], f"… {len(lines) - 2 * shown} lines …", *lines[-shown:]]
            if len(lines) > 2 * shown + 1
            else lines
        )
        self.write(
            "\n".join(
                [
                    f"\n$ {command}",
                    *cut,
                    *([f"[exit {done.returncode}]"] if done.returncode else []),
                ]
            )
        )
        wrong = [f"exit {done.returncode}, not {status}"] if done.returncode != status else []
        wrong += [
            f"nothing matches {pattern!r}" for pattern in says if not re.search(pattern, said)
        ]
        wrong += ["a traceback"] if "Traceback" in said else []
        if wrong:
            self.failed.append(f"{command}: {'; '.join(wrong)}")
            self.write(f"!!! {'; '.join(wrong)}")
        return said

    def file(self, name: str, text: str) -> None:
        """Write a file of the user."""
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def page(self, page: Path) -> None:
        """Write the files shown on a page under comments with their names."""
        for part in re.split(r"^    (?=# [\w/]+\.(?:py|yaml)$)", page.read_text(), flags=re.M)[1:]:
            name, _, rest = part.partition("\n")
            body = re.split(r"^(?=    PYTHONPATH|\S)", rest, maxsplit=1, flags=re.M)[0]
            self.file(name[2:], "\n".join(line[4:] for line in body.rstrip().splitlines()) + "\n")
            self.write(f"(writes {name[2:]}, as {page.name} shows it)")

    def newest(self, place: str = "outputs/grpo") -> str:
        """Return the newest finished run below a folder."""
        found = [
            f
            for f in (self.folder / place).glob("*/summary.json")
            if '"ended": "finished"' in f.read_text()
        ]
        return (
            str(max(found, key=lambda f: f.stat().st_mtime).parent.relative_to(self.folder))
            if found
            else f"{place}/none"
        )


def first_run(t: Terminal) -> None:
    """Train the default run, and look at everything a new user can look at before another run."""
    t.chapter("Day 1: the first run, and what would run")
    t.type("rlkit train", "reward .*kl", r"accuracy +0\.477 +0\.9", "next:")
    t.type("rlkit", "commands|usage|rlkit train", shown=6)
    t.type("rlkit doctor", "torch", shown=8)
    t.type("rlkit train --cfg job --resolve trainer.steps=7", "steps: 7", shown=5)
    t.type("rlkit train --info algorithm=dapo", "algorithm=dapo", shown=5)
    t.type("rlkit check", "parameters", shown=10)
    t.file("small.yaml", SMALL)
    t.type(
        "cat small.yaml && rlkit train --config small.yaml", "step 2/2", "finished after 2 steps"
    )
    t.type("rlkit metrics kl/ref_k3", "nats", shown=8)
    t.type("rlkit metrics kl/reff", "Did you mean", status=2)


def own_parts(t: Terminal, clone: Path) -> None:
    """Use the parts shown on the pages: task, reward, tool, environment, advantage, metrics."""
    t.chapter("Day 2: my own task, reward, tool, environment, advantage, metrics")
    t.page(clone / "docs" / "first_task.md")
    t.page(clone / "docs" / "own_parts.md")
    for name, text in OWN.items():
        t.file(name, text)
    t.type("python make_rows.py && head -2 rows.jsonl", "question")
    t.type(f"rlkit rollout {JSONL} n=32", "reward")
    t.type(f"rlkit check --config-dir my_conf reward=strict {JSONL}", "strict", shown=8)
    t.type(
        f"rlkit train --config-dir my_conf reward=strict {JSONL} task.held_out=0.3 trainer.steps=8",
        r"accuracy +0\.\d+ +[01]\.",
        "finished",
    )
    t.type(
        "rlkit train --config-dir my_conf algorithm/advantage=signed algorithm.advantage.scale=0.5"
        " --config small.yaml",
        "finished",
    )
    t.type(
        "rlkit train --config-dir my_conf environment=shelf reward=shelved --config small.yaml",
        "finished",
    )
    game = (
        "task=episodes environment=gymnasium environment.make._target_=my_games.Climb"
        " environment.max_turns=10 model=tiny_guess"
    )
    t.type(f"rlkit train {game} --config small.yaml", "finished")
    t.type(
        "rlkit train --config-dir my_conf --config-name mine batch.prompts=4 evaluation.n=8",
        "dapo",
        "finished",
    )
    t.type("rlkit train environment.system_prompt='Be brief.' --config small.yaml", "finished")
    both = (
        "'reward=[numeric,polite]' reward.terms.polite.weight=0"
        " +evaluation.reward.terms.polite='${reward.terms.polite}'"
    )
    callback = "'+callbacks.mine={_target_: my_metrics.counting, _partial_: true}'"
    t.type(f"rlkit train --config-dir my_conf {both} {callback} --config small.yaml", "finished")
    t.type(
        'grep -oE \'"(test/|)reward/polite/words": [0-9.]+|"mine/done": [0-9.]+\''
        f" {t.newest()}/metrics.jsonl",
        "test/reward/polite/words",
        '"reward/polite/words',
        "mine/done",
    )
    t.file("loop.py", LOOP)
    t.type("cat loop.py && python loop.py", r"\n[01]\.\d+")


def mistakes(t: Terminal) -> None:
    """Make the mistakes of a first week.

    Each answer must name the place in one sentence, without a traceback.
    """
    t.chapter("Day 3: mistakes")
    fn = "reward.terms.task.fn._target_"
    for name, (text, answer) in MODULES.items():
        t.file(f"bad_{name}.py", text)
        t.type(
            f"cat bad_{name}.py && rlkit train {fn}=bad_{name}.score"
            " '~reward.terms.task.fn.rewards' --config small.yaml",
            answer,
            status=2,
        )
    t.type(
        f"rlkit train {fn}=bad_value.score",
        "take it out with ~reward.terms.task.fn.rewards",
        status=2,
    )
    t.type(f"rlkit train {fn}=bad_syntax.score debug=true 2>&1 | grep -c 'Traceba[c]k'", "1")
    for name, (text, answer) in PRESETS.items():
        t.file(f"my_conf/experiment/{name}.yaml", text)
        t.type(
            f"cat my_conf/experiment/{name}.yaml && rlkit train --config-dir my_conf"
            f" experiment={name}",
            answer,
            status=2,
        )
    for words, answer in SLIPS.items():
        t.type(f"rlkit train {words}", answer, status=2)
    t.file(
        "bad_tool.py",
        'def weigh(item: str) -> str:\n    """Weighs an item.\n\n    Args:\n        item: Its'
        ' name.\n    """\n    return 1 / 0\n',
    )
    tool = "{_target_: bad_tool.weigh, _partial_: true}"
    t.type(
        f"rlkit train environment=tool_use 'environment.tools=[{tool}]'",
        "environment.tools.NAME=VALUE",
        status=2,
    )
    t.type(
        f"rlkit train environment=tool_use '+environment.tools.weigh={tool}' --config small.yaml",
        "finished",
    )
    t.file(
        "bad_game.py",
        "class Game:\n    def reset(self, *, seed=None):\n        return '?', {}\n\n    def"
        " step(self, action):\n        return 1 / 0\n",
    )
    game = (
        "task=episodes environment=gymnasium environment.make._target_=bad_game.Game"
        " model=tiny_guess"
    )
    t.type(f"rlkit train {game} --config small.yaml", r"bad_game\.py:6", status=1)


def disks(t: Terminal) -> None:
    """Train on a full disk and on a read-only disk."""
    t.chapter("Day 3: disks")
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        t.write("(left out: this machine lets no user mount a disk of his own)")
        return
    (t.folder / "disk").mkdir()
    for options, says, status in (
        ("size=200k", "could not be written .*No space left", 1),
        ("ro", "cannot be written .*[Rr]ead-only", 2),
    ):
        run = "rlkit train --config small.yaml hydra.run.dir=disk/run"
        t.type(
            f"unshare -rm sh -c 'mount -t tmpfs -o {options} none disk && {run}'",
            says,
            status=status,
        )
    t.type(
        "touch taken && rlkit train --config small.yaml hydra.run.dir=taken",
        "cannot be written",
        status=2,
    )


def data(t: Terminal, *, fresh: bool) -> None:
    """Read a run's files with the usual tools. List, compare, export, report and continue runs."""
    t.chapter("Day 4: rollouts as data")
    t.type("rlkit train --config small.yaml", "finished", shown=3)
    run = t.newest()
    if fresh:
        t.type(
            "pip install -q pandas polars 2>/dev/null && python -c 'import pandas, polars,"
            " datasets'"
        )
    for code in READ.values():
        t.type(f"python -c '{code.replace('RUN', run)}'", "reward|answer|step")
    t.chapter("Day 5: runs, sweeps, a comparison, the report, the model")
    t.type(
        "rlkit train -m algorithm=grpo,reinforce seed=1,2 --config small.yaml"
        " hydra.sweep.dir=outputs/sweep",
        "reinforce",
        shown=20,
    )
    t.type("rlkit runs", "overrides", "algorithm=reinforce", shown=20)
    t.type("rlkit runs outputs/sweep algorithm=reinforce", "algorithm=reinforce")
    t.type("rlkit runs algorithm=sapo", "no run with algorithm=sapo")
    jobs = sorted(
        str(f.parent.relative_to(t.folder))
        for f in (t.folder / "outputs/sweep").glob("*/config.yaml")
    )
    t.type(f"rlkit runs diff {jobs[0]} {jobs[-1]}", "algorithm", "test accuracy, after")
    t.type("rlkit compare outputs/sweep/*", "no difference can be claimed")
    t.type(f"rlkit export run={run} merge=true", "written|export")
    card = next(iter(sorted(t.folder.rglob("README.md"))), t.folder / "README.md")
    t.type(f"head -30 {card.relative_to(t.folder)}", "rlkit", shown=30)
    t.type(f"rlkit evaluate run={run} evaluation.n=8 evaluation.samples=8", "pass@8")
    t.type("rlkit report outputs/sweep out=report.html && wc -c report.html", r"report\.html")
    t.type(f"rlkit train resume={run} trainer.steps=4", "after step 2", "finished after 4 steps")
    t.type("rlkit train resume=auto --config small.yaml", "finished", shown=8)
    t.type(
        'rlkit agent "Kim has 19 toys. Kim buys 14 more. How many toys does Kim have now?"'
        " tools=[calculator]",
        "#### 33",
    )


def install(t: Terminal, clone: Path, *, fresh: bool, tests: bool) -> None:
    """Type the two commands of the README.

    The second one runs the tests, and only if it is asked for, since .ci/run does it too.
    """
    t.chapter("Day 1: installation")
    if fresh:
        subprocess.run([sys.executable, "-m", "venv", str(t.folder / "venv")], check=True)
        t.type(
            "pip install -q -c constraints.txt -e . 2>/dev/null && pip list 2>/dev/null | grep -E"
            " 'rlkit|^torch |hydra-core'",
            "rlkit-lm",
            within=clone,
        )
    if tests:
        t.type(
            "pip install -q -c constraints.txt -e '.[test]' 2>/dev/null && pytest -q",
            "passed",
            within=clone,
        )


def main() -> int:
    """Run the session and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clone", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--venv", type=Path)
    parser.add_argument(
        "--tests",
        action="store_true",
        help="run the README's second command too: the tests, some minutes",
    )
    given = parser.parse_args()
    clone, folder = given.clone.resolve(), given.folder.resolve()
    folder.mkdir(parents=True)
    venv = given.venv.resolve() if given.venv else folder / "venv"
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "RLKIT"))
    }
    environ = kept | {
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(venv),
        "PYTHONPATH": ".",
        "COLUMNS": "100",
    }
    t = Terminal(
        folder, {str(venv): "~/week/venv", str(folder): "~/week", str(clone): "~/rlkit"}, environ
    )
    started = time.monotonic()
    install(t, clone, fresh=given.venv is None, tests=given.tests)
    first_run(t)
    own_parts(t, clone)
    mistakes(t)
    disks(t)
    data(t, fresh=given.venv is None)
    t.chapter(
        f"The end, after {(time.monotonic() - started) / 60:.0f} minutes; {len(t.failed)} outcomes"
        " are not what they should be"
    )
    for line in t.failed:
        t.write(f"- {line}")
    return 1 if t.failed else 0


if __name__ == "__main__":
    sys.exit(main())
