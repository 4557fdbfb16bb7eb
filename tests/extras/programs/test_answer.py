"""What a program is told and given, what its answer is, and what is said of its requests."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest

from extras.programs.test_gateway import (
    ASK,
    ASKED,
    CALL,
    answered,
    played,
    post,
    row_steps,
    said_by,
    status_of,
)
from rlkit.config.problems.rows import check_truths
from rlkit.episodes import collect, count_refusals, summarize
from rlkit.errors import ConfigError, DataError, EnvironmentFailed
from rlkit.extras.programs import program
from rlkit.extras.programs._program import _with_answer, check_task
from rlkit.rewards import Reward, Term, code_exec, final_answer, numeric, reads_fields, score
from rlkit.tasks import jsonl
from rlkit.tasks._jsonl import _metadata
from rlkit.training.callbacks import pathologies
from rlkit.types import Task

FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": 42}}\n</tool_call>'
BROKEN = "I call\n<tool_call>\n{'name': calculator}\n</tool_call>"


def run(tiny, tmp_path, code: str, *texts: str, task: Task | None = None, **settings):
    """The rollout of a process that asks once and then runs this code."""
    (tmp_path / "agent.py").write_text(ASK + code)
    command = ["python", str(tmp_path / "agent.py")]
    (rollout,) = collect(
        tiny,
        [task or Task("t", ASKED)],
        engine=said_by(*texts or ("a",)),
        environment=program(command=command, **settings),
    )
    return rollout


def ask_once(task, client):
    client.chat(task.messages)


# ------------------------------------------------------------------------------------------- answer


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer, code, text",
    [
        ("last_reply", "print('b')", "a"),
        ("stdout", "print(' b\\n'); print('c', file=sys.stderr)", "b"),
        ("stdout", "pass", ""),
        ("file", "open('answer.txt', 'w').write(' b\\n')", "b"),
        ("file", "pass", ""),
        ("file", "open('answer.txt', 'w').write('b' * (1 << 16) + 'c')", ""),
        ("file", "os.symlink('/etc/hostname', 'answer.txt')", ""),
    ],
)
def test_the_final_content_is_what_the_program_says(answer, code, text, tiny, tmp_path):
    rollout = run(tiny, tmp_path, code, answer=answer)
    assert rollout.final_content == text and final_answer(rollout) == text, rollout.error


@pytest.mark.parametrize("score", [None, "exit"])
def test_the_exit_status_and_standard_output_are_both_read(score, tiny, tmp_path):
    rollout = run(tiny, tmp_path, "print('b')", answer="stdout", score=score)
    assert rollout.final_content == "b"


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"answer": "x"}, "x"),
        ({"answer": 42}, "42"),
        ({"a": 1, "b": "c"}, '{"a": 1, "b": "c"}'),
        ({}, "{}"),
    ],
)
def test_the_last_call_of_a_tool_is_the_answer(arguments, text, tiny):
    call = json.dumps({"name": "final_answer", "arguments": arguments})
    said = [f"<tool_call>\n{call}\n</tool_call>", CALL]

    def play(task, client):
        for _ in said:
            client.chat(task.messages)

    rollout = played(tiny, play, FINAL, *said, answer="tool:final_answer")
    rollout = played(tiny, play, *said, answer="tool:final_answer")
    assert final_answer(rollout) == text
    assert final_answer(played(tiny, ask_once, CALL, answer="tool:final_answer")) == ""


def test_an_answer_by_tool_is_rewarded(tiny):
    """A reply that calls a tool is no answer otherwise."""
    for answer, reward in (("tool:final_answer", 1.0), ("last_reply", 0.0)):
        (rollout,) = collect(
            tiny,
            [Task("t", ASKED, answer="42")],
            engine=said_by(FINAL),
            environment=program(function=ask_once, answer=answer),
        )
        (scored,) = score([rollout], Reward("own", {"numeric": Term(1.0, numeric)}))
        assert scored.reward == reward
        assert summarize([scored])["answer_found_frac"] == reward


def test_the_last_call_of_a_tool_is_the_last_in_time(tiny):
    said = [
        f'<tool_call>\n{{"name": "final", "arguments": {{"answer": "{x}"}}}}\n</tool_call>'
        for x in ("first", "second")
    ]

    def play(task, client):
        reply = client.chat(task.messages)
        client.chat([{"role": "user", "content": "You?"}])
        client.chat([*task.messages, reply, answered(reply)])

    assert played(tiny, play, *said, answer="tool:final").final_content == "second"


def test_no_reply_is_the_answer_of_a_program_that_was_cut_off(tiny):
    rollout = played(tiny, ask_once, "a")
    assert _with_answer(rollout, "stdout", "").final_content == ""


def test_only_empty_answers_that_a_reward_reads_are_warned_of():
    row = {"program/rows": 1.0, "answer_found_frac": 0.0, "reward/numeric/ok_frac": 0.0}
    assert "environment.answer" in (pathologies.no_answers(row) or "")
    assert pathologies.no_answers({**row, "answer_found_frac": 0.1}) is None
    del row["reward/numeric/ok_frac"]
    assert pathologies.no_answers({**row, "reward/environment/ok_frac": 1.0}) is None
    assert pathologies.no_answers({"answer_found_frac": 0.0, "reward/a/ok_frac": 0.0}) is None


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"answer": "reply"}, "environment.answer is 'reply'"),
        ({"answer": "tool:"}, "environment.answer is 'tool:'"),
        ({"answer": "file", "command": (), "function": print}, "which a function has not"),
        ({"metadata": ["a", "tests"]}, "'tests' holds what the reward compares with"),
        ({"metadata": ["answer"]}, "'answer' holds"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        program(**{"command": ["true"], **settings})


# -------------------------------------------------------------------------------- what it is told


@pytest.mark.slow
def test_a_program_is_told_the_fields_that_are_named(tiny, tmp_path):
    task = Task("t", ASKED, answer="secret", metadata={"level": 3, "tests": ["secret"], "b": 1})
    told = run(tiny, tmp_path, "print(json.dumps(task))", task=task, answer="stdout")
    assert set(json.loads(told.final_content)) == {"id", "messages"}
    told = run(
        tiny,
        tmp_path,
        "print(os.environ['RLKIT_TASK'])",
        task=task,
        answer="stdout",
        metadata=["level", "nowhere"],
    )
    said = json.loads(told.final_content)
    assert said["metadata"] == {"level": 3} and "secret" not in told.final_content


@reads_fields("gold")
def by_gold(rollout):
    return float(rollout.final_content == rollout.task.metadata["gold"])


@pytest.mark.parametrize("fn", [by_gold, code_exec])
def test_a_field_that_the_reward_compares_with_is_refused(fn):
    reward = Reward("own", {"own": Term(1.0, fn)})
    task = Task("t", ASKED)
    environment = program(command=["true"], metadata=["level", "gold"])
    if fn is code_exec:  # `program` itself refuses `tests`
        environment = environment._replace(check=partial(check_task, ["level", "tests"]))
    with pytest.raises(DataError, match=r"row t: environment\.metadata: '(gold|tests)' holds"):
        check_truths([task], reward, environment)
    check_truths([task], reward, program(command=["true"], metadata=["level"]))


LIST = "print(sorted((where, name) for where, _, names in os.walk('.') for name in names))"


@pytest.mark.slow
def test_files_of_a_task_are_in_the_folder_of_its_episode(tiny, tmp_path):
    source = tmp_path / "shipped"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "b.txt").write_text("2")
    (source / "a.txt").write_text("1")
    (source / "run.sh").write_text("true")
    (source / "run.sh").chmod(0o755)
    source.chmod(0o555)
    code = LIST + "\nprint(open('a.txt').read(), os.access('run.sh', os.X_OK))\nopen('c', 'w')"
    task = Task("t", ASKED, metadata={"files": str(source)})
    said = run(tiny, tmp_path, code, task=task, answer="stdout")
    assert said.final_content == (
        "[('.', 'a.txt'), ('.', 'run.sh'), ('./deep', 'b.txt')]\n1 True"
    ), said.error
    assert sorted(os.listdir(source)) == ["a.txt", "deep", "run.sh"]
    task = Task("t", ASKED, metadata={"files": {"a/é.txt": "1", "b": "", "c": None}})
    said = run(tiny, tmp_path, LIST, task=task, answer="stdout")
    assert said.final_content == "[('.', 'b'), ('./a', 'é.txt')]", said.error


@pytest.mark.parametrize("files", [{"../a": "1"}, {"/a": "1"}, {"a": "1", "a/b": "2"}, "nowhere"])
def test_files_that_cannot_be_written_name_the_row(files, tiny, tmp_path):
    with pytest.raises(DataError, match="row t: its file"):
        run(tiny, tmp_path, "", task=Task("t", ASKED, metadata={"files": files}))


@pytest.mark.parametrize(
    "files, said",
    [
        ({"../a": ""}, "'../a' needs a relative path"),
        ({"/a": ""}, "'/a' needs a relative path"),
        ({"": ""}, "'' needs a relative path"),
        ({"a": 1}, "'a' needs a relative path"),
        (3, "neither a mapping of path to text nor a folder"),
        ("nowhere", "there is no folder 'nowhere'"),
    ],
)
def test_files_are_looked_at_before_a_model_is_loaded(files, said):
    tasks = [Task("s", ASKED), Task("t", ASKED, metadata={"files": files})]
    with pytest.raises(DataError, match=f"row t: its file.*{said}"):
        check_truths(tasks, Reward("own", {}), program(command=["true"]))


def rows_of(tmp_path, metadata):
    fields = {"prompt": "prompt", "metadata": "more"}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Go", "more": metadata}) + "\n")
    return jsonl(
        path=str(tmp_path / "rows.jsonl"),
        split="train",
        seed=0,
        fields=fields,
        validation=0.0,
        held_out=0.0,
    )


def test_rows_have_metadata_and_files(tmp_path):
    (tmp_path / "repo").mkdir()
    (task,) = rows_of(tmp_path, {"level": 1, "files": {"a": "1", "b": None}})
    assert task.metadata == {"level": 1, "files": {"a": "1", "b": None}}
    (task,) = rows_of(tmp_path, {"files": "repo"})
    assert task.metadata == {"files": str((tmp_path / "repo").resolve())}
    (task,) = rows_of(tmp_path, None)
    assert task.metadata == {}


@pytest.mark.parametrize(
    "metadata, said",
    [
        ({"files": "/etc"}, "there is no folder '/etc'"),
        ({"files": ".."}, "there is no folder '..'"),
        ({"files": "out"}, "there is no folder 'out'"),
        ("a", "is no mapping"),
        ({"harbor": True}, "the key 'harbor', which names folders of this machine"),
    ],
)
def test_a_row_with_files_of_elsewhere_is_refused(metadata, said, tmp_path):
    os.symlink("/etc", tmp_path / "out")
    with pytest.raises(DataError, match=said) as error:
        rows_of(tmp_path, metadata)
    assert "rows.jsonl" in str(error.value)


def test_rows_of_the_hub_name_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fields = {"metadata": "m"}
    with pytest.raises(DataError, match=r"'\.' beside the file of rows"):
        _metadata("squad[train] row 3", {"m": {"files": "."}}, fields)


# ------------------------------------------------------------------------------- requests and rows


def test_a_refusal_keeps_its_sentence(tiny):
    def play(task, client):
        for setting in ({"n": 2}, {"logprobs": True}):
            status_of(client, {"messages": list(task.messages), **setting})
        status_of(client, {}, path="/embeddings")
        client.chat(task.messages)

    rollout = played(tiny, play)
    assert rollout.metadata["refused"] == 3 and rollout.metrics["program/refused"] == 3.0
    assert rollout.metadata["refusal"] == "n=2 is not supported: ask once for each reply"
    assert count_refusals([rollout]) == (
        "requests were refused in 1 of 1 episodes; the first refusal: n=2 is not supported: ask"
        " once for each reply"
    )
    assert summarize([rollout])["program/refused"] == 3.0


def test_an_episode_of_refusals_alone_says_so(tiny):
    def play(task, client):
        status_of(client, {"messages": list(task.messages), "n": 2})

    with pytest.raises(
        EnvironmentFailed, match="all 1 requests were refused, the first: n=2 is not"
    ):
        collect_one(tiny, play)


def collect_one(tiny, play):
    """One episode, which ends the run where it fails."""
    from rlkit.episodes import count_failures

    rollout = played(tiny, play)
    count_failures([rollout])
    return rollout


@pytest.mark.slow
def test_refusals_are_kept_where_the_time_is_up(tiny):
    def play(task, client):
        status_of(client, {"messages": list(task.messages), "n": 2})
        import threading

        threading.Event().wait(20)

    rollout = played(tiny, play, time_limit=1.0)
    assert rollout.truncation == "deadline" and rollout.metadata["refused"] == 1
    assert "n=2 is not supported" in rollout.error and "time_limit" in rollout.error


def test_rows_that_begin_because_thinking_was_dropped_are_counted(tiny):
    def play(task, client):
        messages = list(task.messages)
        for _ in range(3):
            reply = client.chat(messages)
            messages += [
                {"role": "assistant", "content": reply["content"]},
                {"role": "user", "content": "And?"},
            ]

    texts = ["<think>b</think>a"] * 3
    rollout = played(tiny, play, *texts)
    assert [row["why"] for row in rollout.metadata["rows"]] == ["thinking", "thinking"]
    lengths = [len(rollout.context(i)) for i in range(3)]
    assert {name: rollout.metrics[f"program/{name}"] for name in ("rows", "thinking_rows")} == {
        "rows": 3.0,
        "thinking_rows": 2.0,
    }
    assert rollout.metrics["program/prompt_tokens"] == sum(lengths)
    assert rollout.metrics["program/thinking_tokens"] == sum(lengths[1:])
    row = summarize([rollout])
    assert "dropped_thinking=continue" in (pathologies.dropped_thinking(row) or "")
    whole = played(tiny, play, *texts, dropped_thinking="continue")
    said = sum(len(step.response_ids) for step in whole.steps[:2])
    assert whole.metrics["program/rows"] == 1.0
    assert whole.metrics["program/prompt_tokens"] == len(whole.context(2)) - said
    assert pathologies.dropped_thinking(summarize([whole])) is None


def test_a_context_that_holds_all_tokens_before_it_is_listed_as_no_row(tiny):
    """The client has added a reply of its own, but the tokens before it are the row's."""

    def play(task, client):
        said = [*task.messages, client.chat(task.messages), *ASKED]
        client.chat([*said, {"role": "assistant", "content": "mine"}, *ASKED])

    rollout = played(tiny, play)
    assert row_steps(rollout) == [[0, 1]] and "rows" not in rollout.metadata
    assert rollout.metrics["program/rows"] == 1.0


def test_a_prompt_of_its_own_is_no_dropped_thinking(tiny):
    def play(task, client):
        reply = client.chat(task.messages)
        client.chat([*task.messages, {**reply, "content": "other"}, *task.messages])
        client.chat([{"role": "user", "content": "New?"}])

    rollout = played(tiny, play, "<think>b</think>a")
    assert [row["why"] for row in rollout.metadata["rows"]] == ["new", "new"]
    assert rollout.metrics["program/thinking_tokens"] == 0.0


# ------------------------------------------------------------------------------------ broken calls


WHOLE = {
    "/chat/completions": lambda said: (
        said["choices"][0]["message"]["content"],
        said["choices"][0]["message"].get("tool_calls"),
        said["choices"][0]["finish_reason"],
    ),
    "/responses": lambda said: (
        said["output"][0]["content"][0]["text"],
        said["output"][1:] or None,
        "stop",
    ),
    "/messages": lambda said: (
        said["content"][0]["text"],
        said["content"][1:] or None,
        {"end_turn": "stop"}.get(said["stop_reason"]),
    ),
}


@pytest.mark.parametrize("path", WHOLE)
def test_a_call_that_cannot_be_read_is_text(path, tiny):
    """A whole call beside it is no call either, as from vLLM's parsers."""
    said = []

    def play(task, client):
        key = "input" if path == "/responses" else "messages"
        body = {key: list(task.messages), "max_tokens": 64}
        said.append(WHOLE[path](json.loads(post(client, body, path=path))))

    reply = f"{CALL}\n{BROKEN}"
    rollout = played(tiny, play, reply)
    assert said == [(reply, None, "stop")]
    (call,) = rollout.steps[0].tool_calls
    assert call.error and rollout.steps[0].content == reply
    assert summarize([rollout])["parse_fail_frac"] == 1.0


def test_a_conversation_with_a_broken_call_goes_on_in_its_row(tiny):
    def play(task, client):
        reply = client.chat(task.messages)
        client.chat([*task.messages, reply, {"role": "user", "content": "Again."}])

    assert "rows" not in played(tiny, play, BROKEN).metadata


@pytest.mark.slow
@pytest.mark.parametrize(
    "text, code, truncation, reward",
    [
        (BROKEN, "sys.exit(1)", "", 0.0),
        ("a", "sys.exit(1)", "error", None),
        (BROKEN, "os.kill(os.getpid(), 9)", "error", None),
        (BROKEN, "os.kill(os.getppid(), 9)", "error", None),
    ],
)
def test_a_program_that_ends_over_a_broken_call_is_scored(
    text, code, truncation, reward, tiny, tmp_path
):
    task = Task("t", ASKED, answer="7")
    confined = "getppid" not in code  # a confined program cannot end its guard
    rollout = run(tiny, tmp_path, code, text, task=task, confined=confined and "auto")
    assert rollout.truncation == truncation and rollout.error
    (scored,) = score([rollout], Reward("own", {"numeric": Term(1.0, numeric)}))
    assert scored.reward == reward


def test_a_function_that_raises_over_a_broken_call_is_scored(tiny):
    def play(task, client):
        client.chat(task.messages)
        raise ValueError("no call")

    assert played(tiny, play, BROKEN).status == "terminated"
    assert played(tiny, play, "a").truncation == "error"
