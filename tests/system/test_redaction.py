"""Secrets: whatever way they came into a run, none of its texts holds them, and it can be
resumed."""

from __future__ import annotations

import ast
import gzip
import io
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import rlkit
from parametrise import available, each, every_extra
from rlkit.commands.cli import main
from rlkit.config.compose import compose, conf_dir, read_unresolved
from rlkit.runs import folder as runs
from rlkit.system.extras import has_command
from rlkit.system.output import Descriptor, Output
from rlkit.system.redaction import KNOWN, REDACTED, cover, is_secret_key, learn, redact_config

FAST = [
    "debug=fast",
    "task.max_samples=32",
    "trainer.accelerator=cpu",
    "evaluation.n=0",
    "callbacks.checkpoint.model=false",
    "generation.max_new_tokens=32",
]


@pytest.fixture(autouse=True)
def nothing_known():
    before = dict(KNOWN)
    KNOWN.clear()
    yield
    KNOWN.clear()
    KNOWN.update(before)


def test_secrets_are_found_by_name_by_origin_and_by_form(monkeypatch):
    """The value is covered wherever it turns up, also escaped; what says nothing, and what the
    config says in clear, stays."""
    monkeypatch.setenv("SOME_API_KEY", "sk-0123456789")
    monkeypatch.setenv("PLAINLY", 'v4lue "of" origin')
    for name, value in {
        "SEED_OF": "12345678",
        "ALGORITHM": "reinforce",
        "FOLDER": str(Path.cwd()),
        "SHORT": "ab",
    }.items():
        monkeypatch.setenv(name, value)
    names = {"x": "PLAINLY", "b": "SEED_OF", "c": "ALGORITHM", "d": "FOLDER", "e": "SHORT"}
    raw = {
        "a": {key: f"${{oc.env:{name}}}" for key, name in names.items()},
        "algorithm": {"_target_": "rlkit.functional.reinforce"},
        "password": "hunter22",
        "pin": {"password": 1234},
        "tokens": 5,
        "eos_token": "<|im_end|>",
        "store": "postgres://jane:s3cr3tpw@host/db",
        "api": "https://host/v1?api_key=k3yk3yk3y&n=1",
    }
    config = raw | {
        "a": {
            "x": 'v4lue "of" origin',
            "b": "12345678",
            "c": "reinforce",
            "d": str(Path.cwd()),
            "e": "ab",
        }
    }
    learn(config, raw)
    written = redact_config(config)
    assert written["a"] == config["a"] | {"x": "${oc.env:PLAINLY}"}
    assert written["algorithm"] == raw["algorithm"] and (
        written["tokens"],
        written["eos_token"],
    ) == (5, "<|im_end|>")
    assert (written["password"], written["pin"]["password"]) == (REDACTED, REDACTED)
    assert (
        written["store"] == f"postgres://jane:{REDACTED}@host/db"
        and written["api"] == f"https://host/v1?api_key={REDACTED}&n=1"
    )
    text = (
        'no access: sk-0123456789 v4lue \\"of\\" origin hunter22 s3cr3tpw k3yk3yk3y'
        " v4lue%20%22of%22%20origin http://a:b@c"
    )
    assert (
        cover(text) == f"no access: {REDACTED} ${{oc.env:PLAINLY}} {REDACTED} {REDACTED} {REDACTED}"
        f" ${{oc.env:PLAINLY}} http://a:{REDACTED}@c"
    )
    assert redact_config(written) == written


@pytest.mark.parametrize("key", ["none", "x", "EMPTY", "1234567890"])
def test_a_short_or_common_secret_is_covered_under_its_key_alone(key):
    """Local servers take any key; `kl.name` was written as a secret."""
    config = {"judge": {"api_key": key}, "kl": {"name": key}, "fn": f"my.{key}_match"}
    assert redact_config(config) == {**config, "judge": {"api_key": REDACTED}}


def test_of_two_secrets_the_longer_is_covered_first():
    """The shorter one stands in it, and its end would be left."""
    KNOWN.update({"s3cr3tvalue": REDACTED, "s3cr3tvalue-of-jane": REDACTED})
    assert cover("key s3cr3tvalue-of-jane") == f"key {REDACTED}"


def test_a_stream_covers_secrets_and_outlives_its_reader(tmp_path):
    """A traceback on standard error, a closed pipe, a full disk: the first showed the value, the
    others ended the run."""
    KNOWN["s3cr3tvalue"] = REDACTED
    with (tmp_path / "log").open("wb") as file:
        out = Output(
            io.BufferedWriter(Descriptor(file.fileno(), "wb", closefd=False)),
            encoding="utf-8",
            errors="backslashreplace",
        )
        print("the key s3cr3tvalue \ud800", file=out, flush=True)
        out.detach()
    assert (tmp_path / "log").read_text() == f"the key {REDACTED} \\ud800\n"
    reader, writer = os.pipe()
    os.close(reader)
    out = Output(io.BufferedWriter(Descriptor(writer, "wb", closefd=False)), encoding="utf-8")
    print("nobody reads", file=out, flush=True)
    out.detach()
    os.close(writer)


def test_counts_and_parts_that_are_called_tokens_are_no_secrets():
    """A run with `generation.max_new_tokens=64`, or with the callback `tokens`, could not be
    resumed."""
    for text in (
        "generation.max_new_tokens=64",
        "generation.max_thinking_tokens=null",
        "+callbacks.tokens={_target_: my_package.tokens}",
        "trainer.micro_batch_tokens=1024,2048",
        "generation.max_new_tokens=range(16,64)",
        "x.hub_token=${oc.env:HUB}",
        "x.max_tokens=${generation.max_new_tokens}",
    ):
        assert runs.redact_node([text]) == [text]
    secrets = ("x.hub_token=hf_abc", "x.hub_token=[a,b]", "+x.password=1234", "x.api_key='a b'")
    for text in (*secrets, "+servers.mine.env.GITHUB_PAT_TOKEN=ghp", "x.headers.X-Api-Key=abc"):
        assert runs.redact_node([text]) == [f"{text.partition('=')[0]}={REDACTED}"]


# ---------------------------------------------------------------- which keys of a config are secret

LOOKS_SECRET = re.compile(
    r"key|secret|pass(w|phrase)|credential|auth|token|bearer|cookie|private|salt", re.IGNORECASE
)
IS_NONE = {  # look like a secret and are none
    "cached_tokens",
    "prompt_tokens",
    "token_s",
    "control_tokens",
    "eos_token_ids",
    "exclude_keys",
    "key",
    "keys",
    "max_cached_tokens",
    "max_new_tokens",
    "max_new_tokens_thinking",
    "max_thinking_tokens",
    "max_tokens",
    "micro_batch_tokens",
    "pad_token_id",
    "response_tokens",
    "token_filter",
    "token_ids",
    "token_rewards",
    "tokenizer",
    "tokens",
    "tokens_per_s",
    "total_tokens",
}


def keys_of(node: Any) -> Iterator[str]:
    for key, value in node.items() if isinstance(node, dict) else ():
        yield str(key)
        yield from keys_of(value)
    for value in node if isinstance(node, list) else ():
        yield from keys_of(value)


def parameters_of(tree: ast.Module) -> Iterator[str]:
    """Parameters of public functions, and fields of classes."""
    for node in ast.walk(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and not node.name.startswith("_"):
            given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            yield from (argument.arg for argument in given)
        elif isinstance(node, ast.ClassDef):
            fields = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
            yield from (field.id for field in fields if isinstance(field, ast.Name))


@pytest.mark.slow
def test_every_key_that_looks_like_a_secret_has_been_judged():
    """A new key belongs into SECRET_KEYS of rlkit/system/redaction.py, or into IS_NONE above."""
    options = [yaml.safe_load(file.read_text()) for file in conf_dir().rglob("*.yaml")]
    names = {name for option in options for name in keys_of(option)}
    for file in Path(rlkit.__file__).parent.rglob("*.py"):
        names |= set(parameters_of(ast.parse(file.read_text())))
    looking = {name for name in names if LOOKS_SECRET.search(name)}
    plain = {name for name in looking if not is_secret_key(name)}
    assert plain == IS_NONE or (plain < IS_NONE and not every_extra())
    # a token of text is an argument of `rlkit why`, and no key of a config
    assert looking - plain <= {"api_key", "token"}


COMPOSED = [
    (),
    ("algorithm=ppo", "environment=mcp", "environment.servers={}"),
    ("model=qwen3_0.6b", "task=gsm8k", "trainer=gpu"),
    ("experiment=recipe/scalerl",),
    ("experiment=grpo_to_dapo", "generation=transformers"),
    (
        "reward=judge",
        "reward.terms.judge.fn.address=http://127.0.0.1:1",
        "reward.terms.judge.fn.model=m",
    ),
]


@pytest.mark.slow
@each("words", [pytest.param(words) for words in COMPOSED if all(map(available, words))])
def test_settings_are_written_in_clear(words):
    """`max_new_tokens` stood as <redacted> in `--cfg job` and in every run's .hydra/config.yaml."""
    composed = compose(words)
    hydra = read_unresolved(composed.full, of_hydra=True)
    for config in (composed.config, read_unresolved(composed.full), hydra):
        assert runs.redact_node(config) == config


@pytest.mark.parametrize(
    "given", ["+logger.x.api_key=n4med-literal", "+logger.x.uri=https://jane:p4ssw0rd@host"]
)
def test_a_sweep_names_no_folder_by_a_secret(tmp_path, monkeypatch, capsys, given):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-m", "seed=1,2", given]) == 2
    said = capsys.readouterr().err
    assert (
        "holds a secret" in said
        and given.partition("=")[2] not in said
        and list(tmp_path.iterdir()) == []
    )


SECRETS = {  # how it is given → the value that must not turn up
    "by origin": ("+callbacks.extra.first='${oc.env:OF_THE_ENVIRONMENT}'", "0rigin-of-env"),
    "in a URL": ("+callbacks.extra.second=https://jane:p4ssw0rd-url@host/x", "p4ssw0rd-url"),
    "by name": ("+callbacks.extra.api_key=n4med-literal", "n4med-literal"),
    "by the variable's name": (
        "+callbacks.extra.fourth=${oc.env:SOME_HUB_TOKEN}",
        "hub-t0ken-value",
    ),
}


@pytest.mark.slow
def test_no_text_that_leaves_a_run_holds_a_secret(tmp_path):
    """config, Hydra's files, summary, tracebacks, debug bundle, TensorBoard, checkpoints, report:
    searched byte by byte, unpacked."""
    (tmp_path / "talks.py").write_text(
        "import lightning as L\n\ndef extra(run, **given):\n    return Talks(given)\n\nclass"
        " Talks(L.Callback):\n    def __init__(self, given):\n        self.given = given\n    def"
        " on_train_batch_end(self, trainer, module, *_):\n        print('said', self.given,"
        " flush=True)\n        if module.rl_step == 2:\n            raise RuntimeError(f'cannot"
        " reach it with {self.given}')\n"
    )
    folder = tmp_path / "run"
    extra = "+callbacks.extra={_target_: talks.extra, _partial_: true}"
    words = [
        "train",
        *FAST,
        "trainer.steps=3",
        "callbacks.checkpoint.every=1",
        "logger=tensorboard",
        extra,
    ]
    words += [given for given, _ in SECRETS.values()]
    values = {
        "OF_THE_ENVIRONMENT": "0rigin-of-env",
        "SOME_HUB_TOKEN": "hub-t0ken-value",
        "PYTHONPATH": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }

    def run(*given: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rlkit", *given]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | values,
            capture_output=True,
            text=True,
            timeout=300,
        )

    done = run(*words, f"hydra.run.dir={folder}")
    said = done.stdout + done.stderr
    assert (
        done.returncode == 1 and "cannot reach it with" in done.stderr and "said {" in done.stdout
    ), said
    again = run("train", f"resume={folder}")
    assert again.returncode == 2 and "callbacks.extra.second held a secret" in again.stderr, (
        again.stderr
    )
    again = run(
        "train",
        f"resume={folder}",
        *(given for how, (given, _) in SECRETS.items() if how in ("in a URL", "by name")),
    )
    assert (
        "after step" in again.stdout
        and "callbacks.extra" not in again.stdout.split("code outside")[0]
    ), again.stdout + again.stderr
    texts = {"said": said + again.stdout + again.stderr}
    if has_command("report"):
        report = run("report", str(folder))
        assert report.returncode == 0, report.stderr
        texts["report"] = report.stdout
    for path in (p for p in tmp_path.rglob("*") if p.is_file() and p.name != "talks.py"):
        data = path.read_bytes()
        texts[str(path)] = (gzip.decompress(data) if path.suffix == ".gz" else data).decode(
            "latin1"
        )
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                texts |= {
                    f"{path}:{name}": archive.read(name).decode("latin1")
                    for name in archive.namelist()
                }
    assert {Path(name).name for name in texts} >= {
        "config.yaml",
        "run.json",
        "overrides.yaml",
        "summary.json",
        "traceback.txt",
        *(["report.html"] if has_command("report") else []),
    }
    found = [
        (how, name)
        for how, (_, value) in SECRETS.items()
        for name, text in texts.items()
        if value in text
    ]
    assert found == []
    assert runs.read_config(folder)["callbacks"]["extra"]["first"] == "${oc.env:OF_THE_ENVIRONMENT}"
