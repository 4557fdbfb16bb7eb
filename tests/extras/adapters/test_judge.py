"""reward=judge against a scripted server on this machine: what it asks, how often, and what follows
where there is no verdict."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler

import pytest

from dripping_server import drips
from quiet_server import QuietServer
from rlkit.config.compose import compose, experiment
from rlkit.config.problems.rows import load_tasks
from rlkit.errors import ConfigError
from rlkit.extras.adapters import judge
from rlkit.extras.adapters._judge import SPENT
from rlkit.rewards import Reward, RewardError, Term, by_task, score
from rlkit.types import Rollout, Step, Task

RUBRIC = {"correct": "It is right.", "short": "It is short."}


class Handler(BaseHTTPRequestHandler):
    """Answers with the next line of the server's script, or with full points; counts the requests
    under way."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((body, self.headers.get("Authorization")))
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
            said = self.server.script.pop(0) if self.server.script else verdict(4, 4)
            meet = self.server.meet
        if meet is not None:
            meet.wait(5)  # until as many are here as may be
        with self.server.lock:
            self.server.now -= 1
        status, text = said if isinstance(said, tuple) else (200, said)
        data = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_): ...


def verdict(correct, short):
    return json.dumps({"reason": "because", "scores": {"correct": correct, "short": short}})


@contextmanager
def serving(script=(), meet=None):
    with QuietServer(("127.0.0.1", 0), Handler) as http:
        http.script, http.asked, http.now, http.most, http.lock, http.meet = (
            list(script),
            [],
            0,
            0,
            threading.Lock(),
            meet,
        )
        http.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield http
        finally:
            http.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    SPENT.clear()


def replies(*texts):
    asked = ({"role": "user", "content": "2 + 2?"},)
    return [
        Rollout(Task("t", asked, answer="4"), (Step(asked, (), (), (), "stop", content=text),))
        for text in texts
    ]


def asking(url, **settings):
    given = {
        "address": url,
        "model": "m",
        "rubric": RUBRIC,
        "levels": 4,
        "backoff": 0.0,
        "retries": 2,
    } | settings
    return Reward("judge", {"judge": Term(1.0, partial(judge, **given))})


def test_the_score_is_the_weighted_share_of_points_and_an_episode_without_answer_is_not_judged():
    with serving([verdict(4, 1)]) as http:
        done, cut = replies("4", "4 and more")
        cut = cut._replace(status="truncated")
        scored = score([done, cut], asking(http.url, weights={"correct": 3.0}, api_key="secret"))
        assert [r.reward for r in scored] == [(3 * 4 + 1 * 1) / (4 * 4), 0.0] and scored[
            1
        ].statuses["judge"] == "unparseable"
        [(body, key)] = http.asked
        material = json.loads(body["messages"][1]["content"])
        assert material["reference"] == "4" and material["conversation"][-1] == {
            "role": "assistant",
            "content": "4",
        }
        assert (
            body["response_format"]["json_schema"]["schema"]["properties"]["scores"]["required"]
            == list(RUBRIC)
            and key == "Bearer secret"
        )


def test_never_more_requests_at_once_than_the_limit_and_equal_questions_are_asked_once():
    with serving(
        meet=threading.Barrier(3)
    ) as http:  # requests pass in threes, so the limit is reached and never exceeded
        score(replies(*"abcdef", "a"), asking(http.url, concurrency=3))
        assert len(http.asked) == 6 and http.most == 3


def test_a_run_that_is_repeated_asks_nothing(tmp_path):
    with serving([verdict(1, 2), verdict(3, 4)]) as http:
        first, again = (
            score(replies("a", "b"), asking(http.url, cache=str(tmp_path), concurrency=1))
            for _ in range(2)
        )
        assert len(http.asked) == 2 and [r.reward for r in first] == [r.reward for r in again] == [
            3 / 8,
            7 / 8,
        ]
        score(
            replies("a"),
            asking(http.url, cache=str(tmp_path), rubric=RUBRIC | {"short": "It is brief."}),
        )
        assert len(http.asked) == 3  # another rubric is another question
        for file in tmp_path.rglob("*.json"):
            file.write_text("{")
        score(replies("a"), asking(http.url, cache=str(tmp_path)))
        assert len(http.asked) == 4  # what is damaged is asked again


def test_a_busy_server_and_an_answer_of_another_form_are_asked_again():
    parts = [{"type": "text", "text": verdict(2, 2)}]
    with serving([(503, "busy"), "I like it", parts, verdict(9, 0), verdict(2, 2)]) as http:
        assert (
            score(replies("a"), asking(http.url, retries=4))[0].reward == 0.5
            and len(http.asked) == 5
        )


def test_a_judge_that_is_down_stops_the_run_with_the_reason_after_the_retries_of_one_question():
    with serving([(503, "overloaded")] * 9) as http:
        with pytest.raises(
            RewardError,
            match=r"'judge'.*does not answer after 3 request\(s\): it answers 503.*overloaded",
        ):
            score(replies(*"abc"), asking(http.url, concurrency=1))
        assert len(http.asked) == 3
    with pytest.raises(RewardError, match=r"does not answer after 3.*refused"):  # it is gone
        score(replies("a"), asking(http.url))


def test_no_verdict_counts_as_an_error_of_its_rollout_alone():
    with serving(["no"] * 3) as http:
        reward = asking(http.url, concurrency=1)._replace(max_error_rate=0.5)
        assert [r.reward for r in score(replies("a", "b"), reward)] == [None, 1.0]


def test_the_budget_and_a_refused_request_stop_at_once():
    with serving([(401, "no key")]) as http:
        with pytest.raises(ConfigError, match=r"401.*correct address, model or api_key"):
            score(replies("a"), asking(http.url))
        with pytest.raises(ConfigError, match=r"budget of 3 request\(s\) is spent"):
            score(replies(*"abcd"), asking(http.url, budget=3, concurrency=1))
        assert len(http.asked) == 3


def test_a_row_may_name_the_judge():
    with serving() as http:
        own = [r._replace(task=r.task._replace(reward="judge")) for r in replies("a", "b")]
        named = {"judge": asking(http.url).terms["judge"].fn}
        assert [
            r.reward
            for r in score(
                own, Reward("by_task", {"task": Term(1.0, partial(by_task, rewards=named))})
            )
        ] == [1.0, 1.0]


@pytest.mark.slow
def test_a_missing_address_is_refused_when_the_config_is_composed():
    with pytest.raises(
        ConfigError, match=r"reward\.terms\.judge\.fn\.address: has no default; set"
    ):
        compose(["reward=judge"])
    for settings, said in (
        ({"address": "localhost"}, "no URL"),
        ({"weights": {"kind": 1.0}}, "no such criterion"),
        ({"rubric": {}}, "above 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            score(replies("a"), asking("http://127.0.0.1:9", **settings))


def test_a_judge_that_is_down_is_refused_before_a_model_is_loaded(tmp_path):
    with serving([(503, "overloaded")] * 9) as http:
        fn = "reward.terms.judge.fn"
        words = [
            f"{fn}.address={http.url}",
            f"{fn}.model=m",
            f"{fn}.retries=0",
            f"{fn}.cache={tmp_path}",
        ]
        x = experiment(compose(["reward=judge", *words, "evaluation.n=0", "task.max_samples=8"]))
        with pytest.raises(
            ConfigError,
            match=r"reward=judge: .*does not answer after 1 request\(s\): it answers 503",
        ):
            load_tasks(x)


def test_a_plain_function_that_waits_runs_in_as_many_threads_as_it_asks_for():
    meet = threading.Barrier(2)

    def waits(rollout):
        meet.wait(5)  # one alone would wait for ever
        return float(rollout.final_content)

    reward = Reward("plain", {"waits": Term(1.0, waits, threads=2)})
    assert [r.reward for r in score(replies("1", "2", "3", "4"), reward)] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.slow
def test_a_judge_that_sends_its_answer_byte_by_byte_is_given_up(monkeypatch):
    monkeypatch.setattr("rlkit.extras.adapters._judge.SLACK", 0.0)
    with drips() as address, pytest.raises(RewardError, match=r"no whole answer within 0\.3 s"):
        score(replies("a"), asking(address, retries=0, timeout=0.3))
