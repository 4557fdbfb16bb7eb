"""The file: complete in itself, a policy that lets nothing else in, and no text that becomes
markup."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import random
import re

import pytest

from parametrise import cases
from rlkit.commands.cli import main
from rlkit.errors import install
from rlkit.extras.report import charts, drawing, write_report
from rlkit.extras.report.conversations import compress_data
from run_folders import damage_run

HOSTILE = (
    "<img src=x onerror=window.hacked=1></script><script>window.hacked=1</script><!-- \u2028 \ud800"
    " & \"'"
)


@pytest.fixture(autouse=True, scope="module")
def few():
    """Two charts: what the page does with them is not a question of their number."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "STATIC", charts.STATIC[:2])
        patch.setattr(charts, "chart_dynamic", lambda found: ())
        yield


@pytest.fixture(scope="module")
def page(make_runs, few):
    make_runs("a", text=HOSTILE, switch=2, title="<i>grpo</i>")
    folder = make_runs("b", seed=1, title="<i>grpo</i>", switch=2)
    return write_report([folder.parent])


def blocks(text):
    """Name → what a block of the page holds."""
    found = re.findall(r'<script type="application/gzip" id="data-([^"]+)">([^<]*)</script>', text)
    return {name: json.loads(gzip.decompress(base64.b64decode(data))) for name, data in found}


@pytest.mark.slow
def test_the_policy_names_the_one_script_and_the_one_style_sheet(page):
    text = page.read_text()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)[1]
    assert (
        policy.startswith("default-src 'none'; ")
        and "unsafe" not in policy
        and "http" not in policy
    )
    for kind, body in (
        ("script-src", re.findall(r"<script>(.*?)</script>", text, re.S)),
        ("style-src", re.findall(r"<style>(.*?)</style>", text, re.S)),
    ):
        assert len(body) == 1
        assert (
            f"{kind}"
            f" 'sha256-{base64.b64encode(hashlib.sha256(body[0].encode()).digest()).decode()}'"
            in policy
        )
    markup = re.sub(r"<script.*?</script>|<style>.*?</style>", "", text, flags=re.S)
    assert not re.search(r"<[^>]*\s(on\w+|style)=", markup), "an inline handler or style"
    assert "src=" not in markup, "a picture from somewhere else"
    assert not re.search(r'href="(?!#)', markup), "a link to somewhere else"


def test_texts_of_the_model_are_in_the_data_alone(page):
    text = page.read_text()
    data = blocks(text)
    said = [
        message
        for name, own in data.items()
        if name.startswith("page-")
        for entry in own["said"]
        for message in entry["messages"]
    ]
    assert any(HOSTILE in message.get("text", "") for message in said)
    assert "hacked" not in text, "data is compressed: no parser and no search finds a text in it"
    assert len(data["list"]["rollouts"]) == len(
        [m for m in said if m["role"] == "assistant" and m.get("turn") != 2]
    )


def test_a_runs_name_is_no_markup(page):
    text = page.read_text()
    assert "&lt;i&gt;grpo&lt;/i&gt;" in text and "<i>" not in text


def test_json_that_html_cannot_end():
    text = compress_data({"a": HOSTILE, "b": float("nan")})
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", text)
    assert json.loads(gzip.decompress(base64.b64decode(text))) == {"a": HOSTILE, "b": None}


def test_without_matplotlib_there_is_the_page_and_a_word_on_the_files(
    make_run, monkeypatch, tmp_path
):
    """The report was refused, and the page does not need it."""
    monkeypatch.setattr(drawing.importlib.util, "find_spec", lambda name: None)
    text = write_report([make_run("plain")], tmp_path / "plain.html").read_text()
    assert (
        install("report").replace("'", "&#x27;") in text
        and blocks(text)["curves"]["charts"]
        and not (tmp_path / "plain").exists()
    )
    assert "SVG and PDF" in text and "folder beside" not in text


@pytest.mark.slow
def test_sections_follow_from_what_the_runs_have(page, make_run, tmp_path):
    headings = re.findall(r"<h2>(.*?)</h2>", page.read_text())
    assert (
        headings[:3] == ["Before and after", "Health", "Learning"]
        and headings[-1] == "Conversations"
    )
    assert "Settings that differ" not in headings, "seeds alone differ"
    two = write_report(
        [page.parent / "a", make_run("c", lr=1e-5)], tmp_path / "two.html"
    ).read_text()
    assert "<code>optimizer.lr</code>" in two and "<code>1e-05</code>" in two


def test_the_pictures_for_papers_stand_beside(page):
    names = {path.name for path in (page.parent / "report").iterdir()}
    assert {"reward.svg", "reward.pdf", "where_time_goes.pdf"} <= names


def test_the_page_names_the_split_of_each_figure(page):
    text = page.read_text()
    assert "<td>test</td>" in text
    assert "Validation accuracy" in {chart["title"] for chart in blocks(text)["curves"]["charts"]}


def test_a_folder_of_rollouts_is_conversations_alone(tmp_path, make_run):
    (tmp_path / "rolled").mkdir()
    next((make_run("a") / "rollouts").iterdir()).rename(tmp_path / "rolled" / "rollouts.jsonl.gz")
    text = write_report([tmp_path / "rolled"]).read_text()
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["Solve rates", "Turns", "Runs", "Conversations"]
    assert ">episodes<" in text and ">unfinished<" not in text


@pytest.mark.slow
def test_what_the_policies_read_first_stands_once_and_is_no_markup(make_run, tmp_path):
    prompt = "=== row 1\n<tools>" + HOSTILE.replace("\ud800", "")
    runs = [make_run("a"), make_run("b", seed=1)]
    for run in runs:
        (run / "prompts.txt").write_text(prompt)
    text = write_report(runs, tmp_path / "both.html").read_text()
    (shown,) = re.findall(
        r"<details><summary>grpo</summary><div class=text>(.*?)</div>", text, re.S
    )
    assert shown == html.escape(prompt)


def test_a_run_that_has_just_begun_is_reported_too(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("name: grpo\nseed: 0\n")
    text = write_report([tmp_path / "run"]).read_text()
    assert ">unfinished<" in text and ">episodes<" not in text


@pytest.mark.slow
def test_the_command_takes_folders_with_an_equals_sign_and_refuses_what_it_does_not_know(
    make_run, capsys
):
    folder = make_run("lr=1,seed=0")
    assert (
        main(["report", str(folder), f"out={folder.parent / 'x.html'}", "limit=1", "smooth=0"]) == 0
    )
    assert capsys.readouterr().out.strip() == str(folder.parent / "x.html")
    for words, said in (
        (["report"], "at least one run folder"),
        (["report", str(folder), "wrong=1"], "out=FILE.html"),
        (["report", str(folder), "out=x.pdf"], "one HTML file"),
        (["report", str(folder), "smooth=-1"], "whole number"),
        (["report", str(folder.parent.parent / "nothing")], "no run folder"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "first, last", cases([(0, 1), *((n, n + 2) for n in range(1, 7, 2))], [(0, 1)], unpack=True)
)
def test_the_page_survives_whatever_stands_in_a_run_folder(first, last, tmp_path):
    """Each number, text and mapping of metrics.jsonl, summary.json, run.json and the rollouts is
    replaced by another type, at random."""
    pytest.importorskip("matplotlib")
    generator = random.Random(first)
    for case in range(first, last):
        folder = tmp_path / "runs" / str(case)
        damage_run(folder, case, generator)
        text = write_report([folder], tmp_path / f"{case}.html").read_text()
        assert "metrics.jsonl: " in text and "left out" in text and "<script" in text
    if last - first > 1:
        assert write_report([tmp_path / "runs"], tmp_path / "all.html").stat().st_size > 10_000
