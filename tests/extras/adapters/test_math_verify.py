"""The children, with a package of a few lines in them; then what the real package reads."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from functools import partial

import pytest

from parametrise import cases, each
from rlkit.config.problems.rows import check_truths
from rlkit.errors import ConfigError, DataError, install
from rlkit.extras.adapters import _math_verify as module
from rlkit.extras.adapters import math_verify
from rlkit.rewards import Reward, RewardError, Term, by_task, score
from rlkit.types import Environment, Rollout, Step, Task

ask, stop = module.ask, module.stop

FAKE = '''
import os, time
from fractions import Fraction
print("an advert on standard output")
LatexExtractionConfig = tuple

def parse(text, extraction_config=(), parsing_timeout=5):
    """Numbers are answers, other words are not; a few words do something."""
    print("parsing", text)
    while "forever" in text:
        pass
    if "hang" in text:
        time.sleep(600)
    if "crash" in text:
        os._exit(3)
    if "raise" in text:
        raise ValueError("bad latex")
    if "token" in text:
        return [Fraction("MY_TOKEN" in os.environ)]
    found = []
    for word in text.replace("{", " ").replace("}", " ").replace("$", " ").split():
        try:
            found.append(Fraction(word))
        except ValueError:
            pass
    return found

def verify(gold, target, timeout_seconds=5):
    return gold[-1] == target[-1]
'''


def fake(folder, monkeypatch, text=FAKE):
    """A math_verify that only the children import."""
    (folder / "math_verify.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(module, "count_cores", lambda: 2)
    stop()


@pytest.fixture
def package(tmp_path, monkeypatch):
    fake(tmp_path, monkeypatch)
    yield
    stop()


def rollout(content: str, truth: str = "1/2", finish_reason: str = "stop") -> Rollout:
    return Rollout(
        Task(f"row of {truth}", (), truth, "math_verify"),
        (Step((), (), (), (), finish_reason, content=content),),
    )


def verdict(content: str, truth: str = "1/2", finish_reason: str = "stop", **settings):
    return math_verify([rollout(content, truth, finish_reason)], **settings)[0]


def children() -> set[int]:
    return {child.pid for child in module._idle}


# ------------------------------------------------------------------------------------- the children


def test_verdicts(package):
    assert verdict("so it was 0.5 then") == 1.0
    assert verdict("I say 0.25 now", wrong=-1.0) == -1.0
    for nothing in (
        verdict(""),
        verdict("nothing to say here"),
        verdict("0.5", finish_reason="length"),
    ):
        assert nothing == 0.0 and nothing.status == "unparseable"
    assert verdict("\ud800 \n \u2028 1/2") == 1.0  # one line stays one line


@pytest.mark.slow
def test_what_takes_for_ever_costs_its_own_call_and_no_other(package):
    """One missed deadline killed the one child that all calls shared, in the middle of the
    batch."""
    assert math_verify([rollout("0.5"), rollout("2/4")]) == [1.0, 1.0]
    warm = children()
    assert len(warm) == 2
    replies = ["0.5", r"\boxed{forever}", "2/4", "3", "4/8", "5"]
    late = score(
        [rollout(reply) for reply in replies],
        Reward("math", {"math": Term(1.0, partial(math_verify, deadline=0.3))}),
    )
    assert [r.reward for r in late] == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert [r.statuses["math"] for r in late] == ["ok", "timeout", "ok", "wrong", "ok", "wrong"]
    assert len(children() & warm) == 1  # the other child went on


def test_equal_questions_are_asked_once_and_children_stay_warm(package):
    assert math_verify([rollout("0.5")] * 8) == [1.0] * 8
    warm = children()
    assert len(warm) == 1
    assert verdict("0.75") == 0.0
    assert children() == warm


@pytest.mark.slow
def test_what_waits_without_working_is_ended_by_the_clock(package):
    assert verdict(r"\boxed{hang}", deadline=0.05).status == "timeout"


def test_a_child_that_says_nothing_is_killed_by_the_parent(package, monkeypatch):
    """Here the kernel does not end it, because it is stopped before it sets its timers."""
    monkeypatch.setattr(module, "HUNG", 1.0)
    assert verdict("0.5") == 1.0
    (pid,) = children()
    os.kill(pid, signal.SIGSTOP)
    assert verdict("0.75", deadline=0.1).status == "timeout"
    assert children() == set() and verdict("0.5") == 1.0


@pytest.mark.parametrize("text", [r"\boxed{crash}", r"\boxed{raise}"])
def test_a_reply_that_kills_its_child_is_an_error_of_its_own(package, text):
    """A policy can write such a reply, so it must not end the run, nor touch another reply."""
    rollouts = score(
        [rollout(text), rollout("0.5")], Reward("math", {"math": Term(1.0, math_verify)})
    )
    assert [(r.reward, r.statuses["math"]) for r in rollouts] == [(0.0, "error"), (1.0, "ok")]


def test_a_child_killed_between_calls_is_replaced(package):
    assert verdict("0.5") == 1.0
    (pid,) = children()
    os.kill(pid, signal.SIGKILL)
    assert verdict("2/4") == 1.0
    assert children() and pid not in children()


def test_a_child_has_none_of_the_environment(package, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    assert verdict(r"\boxed{token}", truth="0") == 1.0


@pytest.mark.slow
def test_children_end_with_the_process_that_started_them(package, tmp_path):
    """Killed without a word, with one child idle and one at work."""
    (tmp_path / "trainer.py").write_text(
        "import os, signal, sys\n"
        "from threading import Thread\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import rlkit.extras.adapters._math_verify as m\n"
        "m.cores = lambda: 2\n"
        "m.ask([('1', '1 or 2'), ('1', '1 or 3')], 5.0)\n"
        "print(*(child.pid for child in m._idle), flush=True)\n"
        "Thread(target=m.ask, args=([('1', r'\\boxed{forever}')], 0.5), daemon=True).start()\n"
        "while len(m._idle) == 2: pass\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "trainer.py")],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert ended.returncode == -signal.SIGKILL
    for pid in map(int, ended.stdout.split()):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([handle], [], [], 20.0)[0], "the child is still there"
        os.close(handle)


def test_a_missing_package_is_refused_with_its_extra(tmp_path, monkeypatch):
    fake(tmp_path, monkeypatch, "import a_package_that_is_not_there")
    with pytest.raises(
        ConfigError, match=r"a_package_that_is_not_there.*" + re.escape(install("math"))
    ):
        verdict("0.5")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import time\ntime.sleep(600)", "not ready after 0.3 s"),
        ("raise ValueError('antlr')", "ValueError: antlr"),
        ("import os\nos._exit(7)", "status 7"),
    ],
    ids=["slow", "broken", "dead"],
)
def test_a_package_that_does_not_start_is_not_called_missing(tmp_path, monkeypatch, text, reason):
    fake(tmp_path, monkeypatch, text)
    monkeypatch.setattr(module, "START", 0.3 if "sleep" in text else 60.0)
    with pytest.raises(RewardError, match=reason) as error:
        score([rollout("0.5")], Reward("math", {"math": Term(1.0, math_verify)}))
    assert install("math") not in str(error.value)


def test_the_deadline_is_positive():
    with pytest.raises(ConfigError, match="deadline"):
        verdict("0.5", deadline=0.0)


# --------------------------------------------------------------------------------- the real package

# Written for this test, in the forms that answers of MATH (Hendrycks et al. 2021) have.
TRUTHS = (
    r"""
18|-7|0.5|.25|1{,}000|10,080|\frac{3}{4}|-\frac{5}{12}|\frac{1}{2\sqrt{3}}|2\frac{1}{3}
\dfrac{7}{9}|0.\overline{36}|0.1\overline{6}
2.4 \times 10^{-3}|10^{-3}|2^{10}|7!|\binom{10}{3}|3\sqrt{2}|\sqrt[3]{4}|11\sqrt2
\frac{1+\sqrt{5}}{2}|-2 + \sqrt{7}|3 + 2\sqrt{2}
1 \pm \sqrt{19}|\frac{-1 \pm \sqrt{3}}{2}|25\pi|\frac{4\pi}{3}|6\pi + 4|e^2|\log_2 5|\ln 2|\infty
\tan \theta|2\cos \theta|\sin 20^\circ
2k+2|3x^2 - 5x + 2|(x+3)(x-4)|(x - 2)^2 (x + 2)^2|a^2 + b^2|\frac{x+2}{x-3}|\frac{n(n+1)}{2}|p - q
\frac{a}{b}
y = 2x - 3|x = 11|y=-\frac{1}{2}x+4|x^2+y^2=25|6 - 5i|-2i|1+2i, 1-2i
3,5,7|1,-2|-3, \frac{1}{2}|1, 2, 3, 4|\{-1, 0, 1\}|\emptyset|(3,4)|(3, -4)|(1,2,3)
\left( \frac{3}{2}, -5 \right)|(-1,2), (2,5)|(2, \frac{\pi}{3})
[0,1)|[-1,1]|(-\infty, 8)|(5, \infty)|(-\infty,-2]\cup[5,\infty)|(0, 1) \cup (1, \infty)
\left[ -\frac{1}{2}, \frac{3}{2} \right]
x<3|x \ge 4|-2 \le x \le 5|1 < x < 6
B|\text{(A)}|(C)|\text{D}|\text{Evelyn}|\text{east}|Wednesday|\text{June 20}|\text{Yes}|odd
no real solutions
90^\circ|45^{\circ}|360 \text{ degrees}|12 \text{ cm}|30\text{ square units}|144 \text{ cm}^2
\frac{5}{2} \text{ hours}|62\text{ mph}|21 dollars
\$32|\$18.90|\$1{,}250|15\%|12.5\%|33\frac{1}{3}\%|2516_8|101_2|4210_{5}|2:3|6:00
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}|\begin{pmatrix} -1 \\ 0 \\ 5 \end{pmatrix}
\begin{bmatrix} 2 & 1 \\ 0 & 3 \end{bmatrix}
""".strip()
    .replace("\n", "|")
    .split("|")
)
FORMS = [
    r"So it is $\boxed{%s}$.",
    "The answer is $%s$.",
    "**Answer:** %s",
    "so $x$ is positive, and we get $%s$",
    "some steps\n#### %s",
    r"\[%s\]",
    "%s",
]


@pytest.fixture(scope="module")
def real():
    pytest.importorskip("math_verify")
    stop()
    yield
    stop()


EVERY = pytest.mark.parametrize(
    "every", [12, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"]
)


def test_there_are_at_least_a_hundred_truths():
    assert len(set(TRUTHS)) == len(TRUTHS) >= 100


@pytest.mark.slow
@EVERY
def test_every_truth_is_read_and_equals_itself_in_each_form(real, every):
    r"""2k+2 was read as 2, 6 - 5i as 5, 3,5,7 as 3.5, and (3,4), [0,1), x<3 and B as nothing."""
    truths = TRUTHS[::every]
    assert ask([(truth,) for truth in truths], 10.0) == ["readable"] * len(truths)
    pairs = [(truth, form % truth) for truth in truths for form in FORMS]
    assert [
        pair for pair, said in zip(pairs, ask(pairs, 10.0), strict=True) if said != "equal"
    ] == []


@pytest.mark.slow
@EVERY
def test_no_truth_equals_another(real, every):
    truths = TRUTHS[::every]
    pairs = [
        (truth, rf"\boxed{{{other}}}")
        for i, truth in enumerate(truths)
        for other in [*truths[i + 1 :], *truths[:i]][:: every and 9]
    ]
    assert [
        pair for pair, said in zip(pairs, ask(pairs, 10.0), strict=True) if said != "different"
    ] == []


@pytest.mark.slow
@each(
    ("truth", "right", "wrong"),
    [
        ("2k+2", [r"\boxed{2(k+1)}", "$2 + 2k$"], ["2", r"\boxed{2}", r"\boxed{2k}"]),
        ("6 - 5i", [r"\boxed{6-5i}", "-5i + 6"], ["5", r"\boxed{6}", r"\boxed{6+5i}"]),
        (
            "3,5,7",
            [r"\boxed{7, 5, 3}", "$3$, $5$ and $7$", r"\boxed{3}, \boxed{5} and \boxed{7}"],
            ["3.5", r"\boxed{3,5}"],
        ),
        (r"\{1,2\}", [r"\boxed{\left\{1, 2\right\}}", r"\boxed{\{2,1\}}."], [r"\boxed{\{1\}}"]),
        (
            "(3,4)",
            [r"\boxed{(3, 4)}", r"\left(3,4\right)"],
            [r"\boxed{(4,3)}", r"\boxed{[3,4]}", "4"],
        ),
        ("[0,1)", [r"$[0, 1)$", r"\boxed{[0, 1)}"], [r"\boxed{[0,1]}", r"\boxed{(0,1)}"]),
        (
            "x<3",
            ["$x < 3$", r"\boxed{3 > x}", r"\boxed{(-\infty,3)}"],
            [r"\boxed{x \le 3}", r"\boxed{x>3}", "3"],
        ),
        (
            "B",
            ["The answer is B.", r"\boxed{\text{(B)}}", "(B)", "**Answer:** b"],
            ["A", r"\boxed{C}", "no idea"],
        ),
        (
            r"\text{east}",
            [r"\boxed{East}", "The answer is east."],
            [r"\boxed{seat}", r"\boxed{west}"],
        ),
        (
            "Wednesday",
            [r"\boxed{\text{wednesday}}"],
            [r"\boxed{Wendesday}", r"\boxed{\text{Friday}}"],
        ),
        (
            "15",
            [r"\boxed{15\%}", "15%", r"$15\%$", r"\boxed{15 \text{ percent}}"],
            [r"\boxed{0.15}", r"\boxed{150\%}"],
        ),
        (
            r"33\frac{1}{3}\%",
            [r"\boxed{33\frac13}", r"\boxed{\frac{100}{3}\%}"],
            [r"\boxed{33\%}", r"\boxed{\frac13}"],
        ),
        (
            r"0.\overline{36}",
            [r"\boxed{\frac{4}{11}}", r"$0.\overline{36}$"],
            ["0", r"\boxed{0.36}"],
        ),
        (
            r"\frac{-1 \pm \sqrt{3}}{2}",
            [r"\boxed{\frac{-1+\sqrt3}{2}, \frac{-1-\sqrt3}{2}}"],
            [r"\boxed{\frac{-1+\sqrt3}{2}}"],
        ),
        (
            "2516_8",
            [r"\boxed{2516_8}", r"\boxed{2516_{8}}", r"\boxed{2516}"],
            [r"\boxed{2516_9}", r"\boxed{2517_8}"],
        ),
        (
            r"5\text{ inches}",
            ["5 inches", r"\boxed{5}", r"\boxed{5 \text{ in}}", r"\boxed{5\text{ cm}}"],
            [r"\boxed{6\text{ inches}}"],
        ),
        (
            r"\$18.90",
            [r"\boxed{18.9}", "The answer is $18.90", r"\boxed{18.90 dollars}"],
            [r"\boxed{\$18}", r"\boxed{18.80}"],
        ),
        ("x = 5", [r"\boxed{5}", r"\boxed{x=5}"], [r"\boxed{y=5}", r"\boxed{x=6}"]),
        (
            r"\frac{1}{2}",
            [r"\boxed{0.5}", r"\boxed{1/2}", r"\boxed{\frac12}", "so it is 0.5"],
            [r"\boxed{\frac{1}{3}}"],
        ),
        (
            r"2\sqrt{3}",
            [r"so $x = \sqrt{12}$", r"\boxed{\sqrt{12}}", r"2\sqrt{3}"],
            ["2", r"\boxed{2\sqrt{2}}"],
        ),
        (
            "18",
            [
                "#### 18",
                r"\boxed{17} is wrong, so \boxed{18}",
                "It costs $18 in all.",
                "The answer is therefore 18.",
                "\\boxed{\n18\n}",
            ],
            ["17", r"18, no: \boxed{17}"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_equal_forms_count_and_near_misses_do_not(real, truth, right, wrong):
    said = dict(
        zip(
            [*right, *wrong], ask([(truth, reply) for reply in (*right, *wrong)], 10.0), strict=True
        )
    )
    assert said == {reply: "equal" for reply in right} | {reply: "different" for reply in wrong}


@pytest.mark.slow
def test_what_never_ends_is_late(real):
    late = verdict("$9^{9^{9^{9}}}$", "3", deadline=0.3)
    assert late == 0.0 and late.status in (
        "timeout",
        "wrong",
        "unparseable",
    )  # as memory or time end first


UNREADABLE = [
    "",
    "  ",
    r"\frac{1}{2",
    "}",
    "She sold 48/2 = 24 clips in May.\n#### 72",
    "It is the sum of all of them that we have to find here.",
]


@pytest.mark.slow
@pytest.mark.parametrize("truth", cases(UNREADABLE, 1))
def test_a_truth_that_cannot_be_read_is_refused_at_the_start_with_its_row(real, truth):
    """It scored None, which dropped its rollouts without a word; and only 32 rows were tried."""
    tasks = [Task(f"rows.jsonl:{i}", (), str(i), "math_verify") for i in range(40)] + [
        Task("rows.jsonl:41", (), truth, "math_verify")
    ]
    other = Task("other:1", (), truth, "numeric")
    reward = Reward(
        "by_task",
        {"task": Term(1.0, partial(by_task, rewards={"math_verify": math_verify, "numeric": len}))},
    )
    check_truths([*tasks[:-1], other], reward, Environment())
    with pytest.raises(
        DataError, match=r"(?s)row rows\.jsonl:41: the gold answer .* cannot be read by math_verify"
    ):
        check_truths(tasks, reward, Environment())
    with pytest.raises(DataError, match="row of"):
        verdict("0.5", truth)
