"""Keys go only to addresses that the user names: a real server writes down what it is sent."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import yaml

from parametrise import cases, each
from quiet_server import QuietServer
from rlkit.commands.cli import main
from rlkit.config.compose import compose, conf_dir
from rlkit.config.keys import find_leaks
from rlkit.config.schema import resolve, signature_hints
from rlkit.config.trust import (
    SENDS,
    Folder,
    find_unsafe_values,
    read_declarations,
    read_shipped_values,
)
from rlkit.runs import folder as runs
from rlkit.system.extras import explain_missing
from rlkit.system.noted import is_noted, note
from rlkit.system.redaction import is_secret_key

KEY = "sk-of-the-user-alone"
BY = Folder(conf_dir())
SHIPPED = [name for name in sorted(read_shipped_values(conf_dir())) if not explain_missing(name)]


@pytest.fixture
def server():
    """(address, what it was sent): a judge that gives full points to the gold answer."""
    heard: list[str] = []

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            heard.append(f"{self.path} {self.headers} {body}")
            asked = json.loads(json.loads(body)["messages"][1]["content"])
            points = 10 if asked["reference"] in asked["conversation"][-1]["content"] else 0
            verdict = json.dumps({"reason": "", "scores": dict.fromkeys(asked["criteria"], points)})
            answer = json.dumps({"choices": [{"message": {"content": verdict}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            """Says nothing."""

    listening = QuietServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_port}/v1", heard
    listening.shutdown()
    listening.server_close()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder that the user works in. A run's weights are taken as they are, without a
    checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "rlkit.commands.evaluate.restore_policy",
        lambda policy, checkpoint, engine: (checkpoint, 0),
    )
    return tmp_path


SMALL = [
    "evaluation.n=1",
    "evaluation.samples=1",
    "evaluation.k=[1]",
    "evaluation.max_new_tokens=4",
]
FN = "evaluation.reward.terms.judge.fn"


def judged(folder: Path, address: str, *more: str) -> Path:
    """A run folder whose evaluations ask the judge at an address."""
    (folder / ".hydra").mkdir(parents=True)
    runs.write_config(folder, compose([]).config)
    overrides = [
        "reward@evaluation.reward=judge",
        f"{FN}.address={address}",
        f"{FN}.model=m",
        f"{FN}.cache=null",
        *SMALL,
        *more,
    ]
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    return folder


@pytest.mark.slow
def test_the_judges_key_stays_at_home(server, place, monkeypatch, capsys):
    """It was sent to the address of the folder, without a question."""
    address, heard = server
    monkeypatch.setenv("RLKIT_JUDGE_KEY", KEY)
    folder = judged(place / "run", address)
    assert main(["evaluate", f"run={folder}"]) == 2
    assert f"{FN}.address={address} can reach an address" in capsys.readouterr().err
    assert main(["evaluate", f"run={folder}", "trust=true"]) == 2
    said = capsys.readouterr().err
    assert (
        f"{FN}.api_key: the value of RLKIT_JUDGE_KEY would go to {FN}.address={address}" in said
        and KEY not in said
    )
    assert f"repeat {FN}.address=VALUE on the command line" in said
    assert heard == []
    status = main(["evaluate", f"run={folder}", f"{FN}.address={address}"])
    assert status == 0, capsys.readouterr().err
    assert heard and all(f"Bearer {KEY}" in request for request in heard)


@pytest.mark.slow
def test_without_a_key_a_trusted_address_is_asked(server, place, monkeypatch, capsys):
    address, heard = server
    monkeypatch.delenv("RLKIT_JUDGE_KEY", raising=False)
    folder = judged(place / "run", address)
    assert main(["evaluate", f"run={folder}", "trust=true"]) == 0
    assert heard and not any("Authorization" in request for request in heard)
    assert f"trusted: {FN}.address={address} can reach an address" in capsys.readouterr().err


@pytest.mark.slow
def test_the_users_own_run_names_the_address_himself(server, place, monkeypatch):
    address, heard = server
    monkeypatch.setenv("RLKIT_JUDGE_KEY", KEY)
    folder = judged(place / "run", address)
    note(folder)  # as training does
    assert is_noted(folder) and main(["evaluate", f"run={folder}"]) == 0
    assert heard and all(f"Bearer {KEY}" in request for request in heard)


WAYS = {
    "in the prompt": (f"{FN}.rubric.correct=${{oc.env:OTHER_KEY}}",),
    "in the prompt, by reference": ("++a=${oc.env:OTHER_KEY}", f"{FN}.rubric.correct=${{a}}"),
    "as another model's name": (f"{FN}.model=${{oc.env:OTHER_KEY}}",),
    "as the key": (f"{FN}.api_key=${{oc.env:OTHER_KEY}}",),
    "in the address": (f"{FN}.address=http://127.0.0.1:9/${{oc.env:OTHER_KEY}}",),
    "in the task's words": ("++environment.system_prompt=${oc.env:OTHER_KEY}",),
    "in disguise": ("++a=oc", f"{FN}.model=${{${{a}}.env:OTHER_KEY}}"),
    "decoded": (f"{FN}.model=${{oc.decode:${{oc.env:OTHER_KEY}}}}",),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", cases(WAYS, 2))
def test_no_value_of_the_environment_travels_to_a_folders_address(
    way, server, place, monkeypatch, capsys
):
    address, heard = server
    monkeypatch.delenv("RLKIT_JUDGE_KEY", raising=False)
    monkeypatch.setenv("OTHER_KEY", KEY)
    folder = judged(place / "run", address, *WAYS[way])
    assert main(["evaluate", f"run={folder}", "trust=true"]) == 2
    assert "the value of OTHER_KEY would go to" in capsys.readouterr().err
    assert heard == []


@pytest.mark.slow
def test_a_users_own_key_does_not_follow_a_folders_address(server, place, monkeypatch, capsys):
    address, heard = server
    monkeypatch.setenv("MY_KEY", KEY)
    folder = judged(place / "run", address)
    for key in (f"{FN}.api_key=${{oc.env:MY_KEY}}", f"{FN}.api_key={KEY}"):
        assert main(["evaluate", f"run={folder}", "trust=true", key]) == 2
        said = capsys.readouterr().err
        assert f"{FN}.api_key: " in said and "would go to" in said and KEY not in said
    assert heard == []


# ------------------------------------------------------------------------ wherever the two may meet


def meetings() -> list[tuple[str, str, str]]:
    """(function, a parameter through which it sends, another one that holds text), from the
    declarations."""
    found = []
    for target in SHIPPED:
        own = read_declarations(target)
        hints = {key: str(hint) for key, hint in signature_hints(resolve(target)).items()}
        places = [
            key for key, declared in own.items() if declared.word in SENDS and not declared.plain
        ]
        found += [
            (target, place, key) for place in places for key in own if "str" in hints.get(key, "")
        ]
    return found


@each("target, place, key", meetings())
def test_wherever_a_key_and_an_address_meet(target, place, key):
    """A value of the environment beside an address, or in it, is held back; not where the user says
    the same address."""
    address = "http://elsewhere/${oc.env:SOME_KEY}" if key == place else "http://elsewhere"
    node = {"x": {"_target_": target, "_partial_": True, place: [address]}}
    if key != place:
        node["x"][key] = {"a": ["${oc.env:SOME_KEY}"]}
    found = find_leaks(node, BY)
    assert found and "SOME_KEY" in str(found[0]) and f"x.{place}" in str(found[0])
    assert find_leaks(node, BY, node) == []


def test_what_a_package_sends_by_itself(monkeypatch):
    """MLflow takes its token from the environment, whatever the address."""
    node = {
        "logger": {
            "mlflow": {
                "_target_": "rlkit.training.loggers.mlflow",
                "_partial_": True,
                "tracking_uri": "http://elsewhere",
            }
        }
    }
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN", raising=False)
    assert find_leaks(node, BY) == []
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", KEY)
    assert (
        "the value of MLFLOW_TRACKING_TOKEN would go to logger.mlflow.tracking_uri=http://elsewhere"
        in str(find_leaks(node, BY)[0])
    )
    node["logger"]["mlflow"]["tracking_uri"] = "${oc.env:MLFLOW_URI}"  # the environment names it
    assert find_leaks(node, BY) == []


def test_every_secret_of_a_shipped_function_stands_beside_an_address():
    """A parameter that is named like a secret belongs to a function that says where it sends: then
    the law above holds for it."""
    for target in SHIPPED:
        own = read_declarations(target)
        secrets = [key for key, found in own.items() if is_secret_key(key)]
        assert not secrets or any(found.word in SENDS for found in own.values()), (target, secrets)


def test_a_task_set_of_someone_else_is_seen_as_code():
    node = {"_target_": "rlkit.extras.adapters.verifiers", "id": "someones"}
    assert len(list(find_unsafe_values(node, BY))) >= 1
